"""Time the exchange of gradients in a PyTorch training step, next to its yardsticks.

`python benchmarks/torch_step.py` (or `make bench`) starts mpiexec jobs itself and prints one table
per model and number of ranks. Within a job all contenders take turns, so that other load on the
machine affects them equally. A step is zero_grad, forward, backward and the optimizer's step, timed
on the slowest rank; its exchange time is the additional time over the step without communication in
the same turn. Figures are medians over the turns. After each turn every rank compares all gradients
with the average over the ranks: a wrong result ends the benchmark.

With gradients in shared memory, three operations are also timed separately: the in-place reduction,
moving gradients there (as the hooks do during backward()), and filling them with zeros (which
zero_grad(set_to_none=False) would do instead).

The yardstick is one memcpy of the gradients by one rank while the others sleep. Memory is measured
in separate jobs, one per contender: the peak resident size of a process during five steps, minus
that during local steps before; pages shared by several processes are counted proportionally.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from allreduce import MEMCPY, launch, machine, resnet50_shapes, rest
from torch import nn

HERE = Path(__file__).resolve()
LOCAL = "no communication"
SHARED = "horo_lite fp32, shared"
TURNS = {"resnet50": 15, "transformer": 10}


# --- what is trained --------------------------------------------------------------------------


class Sums(nn.Module):
    """Parameters of given shapes, whose gradients cost little more than writing them.

    Each parameter's gradient is a vector of this rank's numbers; backward() produces them one by
    one, from the last to the first, as in a network.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # The same memory for all contenders: only parameters that are trained need their own.
        self.parts = nn.ParameterList([nn.Parameter(p) for p in parameters])
        self.numbers = list(numbers)

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for p, numbers in zip(self.parts, self.numbers, strict=True):
            total = total + torch.dot(p.view(-1), numbers)
        return total


class Model(NamedTuple):
    """How to make a set of parameters, its optimizer and loss, and the exact result."""

    make: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Callable[[nn.Module], torch.Tensor]
    averages: list[torch.Tensor]
    exact: bool


def resnet50(comm: Any) -> Model:
    """The shapes of ResNet-50's 161 parameters, and gradients that are exact in half precision."""
    shapes = resnet50_shapes()
    sizes = [math.prod(shape) for shape in shapes]
    of_rank = [
        np.random.default_rng(r).integers(0, 16, sum(sizes), np.int8) for r in range(comm.size)
    ]
    mine = torch.from_numpy(of_rank[comm.rank].astype(np.float32))
    average = torch.from_numpy(sum(n.astype(np.float32) for n in of_rank) / np.float32(comm.size))
    parameters = [torch.zeros(shape) for shape in shapes]
    return Model(
        make=lambda: Sums(parameters, mine.split(sizes)),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0),  # leaves the parameters unchanged
        loss=lambda module: module(),
        averages=[
            part.view(shape) for part, shape in zip(average.split(sizes), shapes, strict=True)
        ],
        exact=True,
    )


def transformer(comm: Any) -> Model:
    """The transformer of examples/torch/language_model.py, 4 layers of 256."""
    path = HERE.parent.parent / "examples/torch/language_model.py"
    spec = importlib.util.spec_from_file_location("language_model", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def make() -> nn.Module:
        torch.manual_seed(0)
        module: nn.Module = example.Transformer(layers=4, width=256, heads=4, context=128)
        return module

    numbers = torch.Generator().manual_seed(comm.rank)
    text = torch.randint(256, (4, 129), generator=numbers)

    def loss(module: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(
            module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        )

    module = make()
    loss(module).backward()
    averages = []
    for p in module.parameters():
        assert p.grad is not None
        average = p.grad.double().numpy()
        comm.Allreduce(_in_place(), average)
        averages.append(torch.from_numpy(average / comm.size))
    return Model(
        make=make,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.0),
        loss=loss,
        averages=averages,
        exact=False,
    )


def _in_place() -> Any:
    from mpi4py import MPI

    return MPI.IN_PLACE


MODELS: dict[str, Callable[[Any], Model]] = {"resnet50": resnet50, "transformer": transformer}


# --- inside a rank ----------------------------------------------------------------------------


class Contender:
    """One way of exchanging gradients, with its own parameters."""

    def __init__(self, name: str, model: Model, wire_eps: float) -> None:
        self.name = name
        self.model = model
        # Relative to the largest element: one rounding per rank's contribution, one of the sum.
        self.tolerance = 4 * wire_eps
        self.module = model.make()
        self.optimizer: Any = model.optimizer(self.module.parameters())
        self.call: nn.Module = self.module  # the module that forward calls
        self.times: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model.loss(self.call).backward()
        self.optimizer.step()

    def check(self) -> None:
        """Check that its gradients are the average over the ranks."""
        for i, (p, average) in enumerate(
            zip(self.module.parameters(), self.model.averages, strict=True)
        ):
            assert p.grad is not None
            if self.model.exact:
                good = torch.equal(p.grad, average)
            else:
                largest = average.abs().max()
                good = (p.grad - average).abs().max() <= self.tolerance * largest + 1e-12
            if not good:
                raise SystemExit(f"{self.name}: gradient {i} is not the average over the ranks")

    def forget(self) -> None:
        """Free its gradients while others have their turns."""
        for p in self.module.parameters():
            p.grad = None


def horo_lite(compression: str, **options: Any) -> Callable[[Contender], None]:
    def wrap(contender: Contender) -> None:
        import horo_lite.torch as hvd

        contender.optimizer = hvd.DistributedOptimizer(
            contender.optimizer,
            named_parameters=contender.module.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            **options,
        )

    return wrap


def ddp(hook: str | None) -> Callable[[Contender], None]:
    def wrap(contender: Contender) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped = nn.parallel.DistributedDataParallel(contender.module)
        if hook is not None:
            wrapped.register_comm_hook(None, getattr(default_hooks, hook))
        contender.call = wrapped

    return wrap


# Name, wire dtype, and how to wrap a plain module and optimizer.
FIELD: dict[str, tuple[torch.dtype, Callable[[Contender], None]]] = {
    "horo_lite fp32": (torch.float32, horo_lite("none")),
    SHARED: (torch.float32, horo_lite("none", gradient_as_bucket_view=True)),
    "horo_lite fp16": (torch.float16, horo_lite("fp16")),
    "horo_lite bf16": (torch.bfloat16, horo_lite("bf16")),
    "DDP gloo": (torch.float32, ddp(None)),
    "DDP gloo, fp16 hook": (torch.float16, ddp("fp16_compress_hook")),
}


def connect(store: str, comm: Any) -> None:
    """Create the process group for DistributedDataParallel."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size
    )


def contender(name: str, model: Model) -> Contender:
    if name == LOCAL:
        return Contender(name, model, 0.0)
    dtype, wrap = FIELD[name]
    # A float32 sum in another order than the reference's differs in the last digits too.
    made = Contender(name, model, max(torch.finfo(dtype).eps, 1e-6))
    wrap(made)
    return made


def time_alone(one: Contender, comm: Any) -> dict[str, float]:
    """Return the slowest rank's milliseconds for the operations on gradients in shared memory."""
    from horo_lite.context import world

    one.step()
    homes = [p.grad for p in one.module.parameters()][::-1]
    names = [str(i) for i in range(len(homes))]
    # Like autograd's: as large, and in cache because just written.
    fresh = torch.zeros(max(home.numel() for home in homes))
    shared = one.optimizer._exchange.reducer.shared
    assert shared is not None

    def move() -> None:
        for home in homes:
            home.copy_(fresh[: home.numel()].fill_(1.0).view(home.shape))

    def fill() -> None:
        for home in homes:
            fresh[: home.numel()].fill_(1.0)

    def zero() -> None:
        for home in homes:
            home.zero_()

    def reduce() -> None:
        world().group.exchange(homes, names=names, label="alone", shared=shared)

    found = {}
    for what in (reduce, zero, move, fill):
        rest(comm)
        comm.Barrier()
        began = time.perf_counter()
        what()
        found[what.__name__] = 1e3 * max(comm.allgather(time.perf_counter() - began))
    found["move"] -= found.pop("fill")
    one.forget()
    return found


def measure(which: str, turns: int, comm: Any) -> dict[str, Any]:
    """Return the times of every contender with one model, the same on every rank."""
    model = MODELS[which](comm)
    # With one rank there is nothing to exchange: this measures the cost of wrapping.
    names = list(FIELD) if comm.size > 1 else ["horo_lite fp32"]
    field = [contender(name, model) for name in [LOCAL, *names]]
    sources = [average.float() for average in model.averages]
    copies = [torch.zeros_like(source) for source in sources]
    memcpys: list[float] = []
    alone: list[dict[str, float]] = []
    for turn in range(-2, turns):  # the first two make and agree on plans
        rest(comm)
        began = time.perf_counter()
        if comm.rank == 0:
            for copy, source in zip(copies, sources, strict=True):
                np.copyto(copy.numpy(), source.numpy())
        elapsed = time.perf_counter() - began
        if turn >= 0:
            memcpys.append(1e3 * max(comm.allgather(elapsed)))
        for one in field:
            rest(comm)
            comm.Barrier()
            began = time.perf_counter()
            one.step()
            elapsed = time.perf_counter() - began
            rest(comm)
            if one.name != LOCAL:
                one.check()
            one.forget()
            slowest = max(comm.allgather(elapsed))
            if turn >= 0:
                one.times.append(1e3 * slowest)
                if one.name == SHARED:
                    alone.append(time_alone(one, comm))
    local = field[0].times
    return {
        "model": which,
        "parameters": len(sources),
        "bytes": sum(source.numel() * 4 for source in sources),
        "memcpy": statistics.median(memcpys),
        "memcpy_quartiles": np.quantile(memcpys, [0.25, 0.75]).tolist(),
        "step": {one.name: statistics.median(one.times) for one in field},
        "step_quartiles": {
            one.name: np.quantile(one.times, [0.25, 0.75]).tolist() for one in field
        },
        "exchange": {
            one.name: statistics.median(
                with_it - without for with_it, without in zip(one.times, local, strict=True)
            )
            for one in field[1:]
        },
        "alone": {what: statistics.median(one[what] for one in alone) for what in alone[0]}
        if alone
        else {},
    }


def peak_bytes() -> int:
    """Return the peak resident size of this process, minus other processes' share of it."""
    sizes = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, size = line.partition(":")
            if size.endswith("kB"):
                sizes[key] = 1024 * int(size.split()[0])
    return sizes["VmHWM"] - (sizes["Rss"] - sizes["Pss"])


def measure_memory(which: str, name: str, comm: Any) -> int:
    """Return a contender's peak memory beyond that of local steps, on the worst rank."""
    model = MODELS[which](comm)
    plain = contender(LOCAL, model)
    for _ in range(3):
        plain.step()
    before = peak_bytes()
    plain.forget()
    if name == SHARED:  # otherwise the allocator may reuse this memory for the others' gradients
        ctypes.CDLL(None).malloc_trim(0)
    wrapped = contender(name, model)
    for _ in range(5):
        wrapped.step()
    wrapped.check()
    return int(max(comm.allgather(peak_bytes() - before)))


def work(options: argparse.Namespace) -> None:
    """Run one rank's part of a job; rank 0 writes the results."""
    import horo_lite.torch as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.memory is None or options.memory.startswith("DDP"):
        connect(f"{options.output}.store", comm)
    found: Any
    if options.memory is not None:
        found = measure_memory(options.models[0], options.memory, comm)
    else:
        found = [measure(which, options.repeats or TURNS[which], comm) for which in options.models]
    if comm.rank == 0:
        options.output.write_text(
            json.dumps({"ranks": comm.size, "threads": torch.get_num_threads(), "results": found})
        )
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    hvd.shutdown()


# --- the driver -------------------------------------------------------------------------------


def table(job: dict[str, Any], result: dict[str, Any], memory: dict[str, int]) -> str:
    """Format the table of one model on one number of ranks."""
    width = max(map(len, [MEMCPY, *FIELD]))
    unit = result["memcpy"]
    lines = [
        f"{result['model']}: {result['parameters']} float32 parameters, "
        f"{result['bytes'] / 2**20:.1f} MiB, {job['ranks']} rank(s) of {job['threads']} thread(s)",
        " " * width
        + f"{'step ms':>10}{'exchange ms':>13}{'memcpys':>9}{'of step':>9}{'MiB more':>10}",
        f"{MEMCPY:<{width}}{'':>10}{unit:>13.2f}{1:>9.2f}",
    ]
    for name, step in result["step"].items():
        line = f"{name:<{width}}{step:>10.2f}"
        if name in result["exchange"]:
            exchange = result["exchange"][name]
            line += f"{exchange:>13.2f}{exchange / unit:>9.2f}{exchange / step:>9.1%}"
            line += f"{memory[name] / 2**20:>10.1f}" if name in memory else ""
        lines.append(line)
    if result["alone"]:
        parts = [f"{what} {ms:.2f} ms ({ms / unit:.2f})" for what, ms in result["alone"].items()]
        lines.append(f"{SHARED}, in memcpys: " + ", ".join(parts))
    # Other load on the machine shows here first.
    spreads = {MEMCPY: result["memcpy_quartiles"], LOCAL: result["step_quartiles"][LOCAL]}
    lines.append(
        "quartiles: " + ", ".join(f"{name} {a:.2f}-{b:.2f} ms" for name, (a, b) in spreads.items())
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the JSON if requested."""
    parser = argparse.ArgumentParser(
        description="time training steps with PyTorch, and the cost of their exchange",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="job sizes")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="what to train"
    )
    parser.add_argument("--repeats", type=int, help=f"turns, if not {TURNS}")
    parser.add_argument("--no-memory", action="store_true", help="skip the memory measurements")
    parser.add_argument("--output", type=Path, help="also write all results to this file, as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return

    def start(ranks: int, arguments: Sequence[str]) -> Any:
        return launch(sys.executable, ranks, ["--work", *arguments], 1200, HERE)

    here = machine() | {"torch": torch.__version__}
    print("  ".join(f"{name}: {value}" for name, value in here.items()))
    repeats = ["--repeats", str(options.repeats)] if options.repeats else []
    jobs = []
    for ranks in options.ranks:
        job = start(ranks, ["--models", *options.models, *repeats])
        job["memory"] = {
            which: {
                name: start(ranks, ["--models", which, "--memory", name])["results"]
                for name in FIELD
            }
            for which in options.models
            if which == "resnet50" and ranks > 1 and not options.no_memory
        }
        jobs.append(job)
        for result in job["results"]:
            print(f"\n{table(job, result, job['memory'].get(result['model'], {}))}", flush=True)
    if options.output:
        options.output.write_text(json.dumps({"machine": here, "jobs": jobs}, indent=1))


if __name__ == "__main__":
    main()
