"""Time PyTorch training steps, and the additional time of their gradient exchange.

`python benchmarks/torch_step.py` (or `make bench`) starts mpiexec jobs itself and prints one table
per model, optimizer and number of ranks. Within a job all contenders take turns, so that other load
on the machine affects them equally. A step is zero_grad, forward, backward and the optimizer's
step, timed on the slowest rank, after one that is not timed; its exchange time is the additional
time over the step without communication in the same turn. Figures are medians over the turns. After
each turn every rank compares all gradients with the average over the ranks: a wrong result ends the
benchmark. Turns of an exchange are near or far, as in allreduce.py, each with its own table; if the
distance is unknown (a job of one rank), it is missing in the table's title.

The models:

    sums         ResNet-50's parameters, whose gradients cost no more than writing them
    sums30m      the parameters of a transformer, 32 million in 105 tensors; likewise
    sums100m     100 million in 145 tensors; likewise
    waiting      as sums, but backward() waits before each gradient, as for an accelerator, three
                 times as long as the exchange alone: cores are free for the exchange
    resnet50     ResNet-50, on small images, so that backward() takes as long as a few exchanges
    transformer  the model of examples/torch/language_model.py

`--contenders "overlap always" "overlap never"` compares exchanges during backward() with exchanges
after it, and "barrier" is a step in which ranks only wait for each other. `--contenders "buckets of
25 MiB" "buckets of 4 MiB" …` compares bucket sizes, with `--link-mbit 1000` between hosts with one
rank each: network namespaces of this machine, which need root.

With `--contenders "state divided" "gradients divided" "one copy" "DDP gloo,
ZeroRedundancyOptimizer"` each rank updates its share of the parameters only: the additional time is
that of the exchange, minus the update that other ranks do; it is less than nothing where gradients
in shared memory save the page faults of new ones. "update" is the time of the optimizer's step(),
with what it receives, in updates of all parameters by one rank while the others sleep. "gradients
divided" receives the averages of its share only, which are not compared; "one copy" has one of the
parameters for all ranks of the host. `--optimizers fused-adam` has the fastest update.

"DDP, nothing exchanged" is DistributedDataParallel with a communication hook that leaves every
bucket unchanged (torch's `noop_hook`): a step's additional time over it is that of DDP's exchange.
"alone" is the same exchange with all gradients ready, without backward(). "hidden" is the share of
it that overlaps with the step: 1 - exchange / alone. The exchange's computation can overlap only
if cores are free: with as many ranks as cores, all busy, it cannot.

The unit is one memcpy of the gradients by one rank while the others sleep. Memory is measured
in separate jobs, one per contender: the peak resident size of a process during five steps, minus
that during local steps before; pages shared by several processes are counted proportionally.

`--state-memory` measures, instead, what an optimizer's state needs, undivided and divided
(shard_state=True): the peak of a process that makes an Adam for ResNet-50's parameters and takes
three steps, minus that before, when there were parameters and gradients.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from allreduce import (
    BUCKET_BYTES,
    FAR,
    MEMCPY,
    NEAR,
    UNCLEAR,
    Cores,
    distance_of,
    drive,
    resnet50_shapes,
    rest,
)
from torch import nn

HERE = Path(__file__).resolve()
LOCAL = "no communication"
NOTHING = "DDP, nothing exchanged"
BARRIER = "barrier"
SHARED = "horo_lite fp32, shared"
DIVIDED = (
    "state divided",
    "gradients divided",
    "one copy",
    "DDP gloo, ZeroRedundancyOptimizer",
)
TURNS = {
    "sums": 10,
    "sums30m": 10,
    "sums100m": 6,
    "waiting": 6,
    "resnet50": 6,
    "transformer": 6,
}
USUAL = ["sums", "waiting", "resnet50", "transformer"]
BACKWARD_PER_EXCHANGE = 3  # of "waiting"


# --- models -----------------------------------------------------------------------------------


class Wait(torch.autograd.Function):
    """The identity; its backward() sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class Sums(nn.Module):
    """Parameters of given shapes, whose gradients cost little more than writing them.

    Each parameter's gradient is a vector of this rank's numbers; backward() produces them one by
    one, from the last to the first, as in a network. It waits `seconds` in total.
    """

    seconds = 0.0

    def __init__(self, parameters: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(p) for p in parameters])
        self.numbers = list(numbers)

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        per_element = self.seconds / sum(numbers.numel() for numbers in self.numbers)
        for p, numbers in zip(self.parts, self.numbers, strict=True):
            product = torch.dot(p.view(-1), numbers)
            seconds = per_element * numbers.numel()
            if seconds > 1e-4:  # shorter sleeps take longer than they should
                product = Wait.apply(product, seconds)
            total = total + product
        return total


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, 4 * width, 1),
        )
        self.shortcut = (
            nn.Sequential(*_convolution(inputs, 4 * width, 1, stride))
            if inputs != 4 * width
            else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.convolutions(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


def resnet50_network() -> nn.Module:
    """Return ResNet-50, with parameters in torchvision's order."""
    blocks = []
    inputs = 64
    for width, n_blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(n_blocks):
            blocks.append(Bottleneck(inputs, width, 2 if block == 0 and width > 64 else 1))
            inputs = 4 * width
    network = nn.Sequential(
        *_convolution(3, 64, 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, 1000),
    )
    assert [tuple(p.shape) for p in network.parameters()] == resnet50_shapes()
    return network


class Model(NamedTuple):
    """Functions that create a module and compute its loss, and the exact averages."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    averages: list[torch.Tensor]
    exact: bool


def sums(
    comm: Any,
    options: argparse.Namespace,
    shapes_of: Callable[[], Sequence[Sequence[int]]] = resnet50_shapes,
) -> Model:
    """Return a model with these shapes and gradients that are exact in half precision."""
    shapes = shapes_of()
    sizes = [math.prod(shape) for shape in shapes]
    of_rank = [
        np.random.default_rng(r).integers(0, 16, sum(sizes), np.int8) for r in range(comm.size)
    ]
    mine = torch.from_numpy(of_rank[comm.rank].astype(np.float32))
    average = torch.from_numpy(sum(n.astype(np.float32) for n in of_rank) / np.float32(comm.size))
    parameters = [torch.zeros(shape) for shape in shapes]  # the same memory for all contenders
    return Model(
        make=lambda: Sums(parameters, mine.split(sizes)),
        loss=lambda module: module(),
        averages=[
            part.view(shape) for part, shape in zip(average.split(sizes), shapes, strict=True)
        ],
        exact=True,
    )


def resnet50(comm: Any, options: argparse.Namespace) -> Model:
    """Return ResNet-50 itself."""
    numbers = torch.Generator().manual_seed(comm.rank)
    images = torch.randn(2, 3, options.image, options.image, generator=numbers)
    classes = torch.randint(1000, (2,), generator=numbers)
    return _computed(
        resnet50_network,
        lambda module: nn.functional.cross_entropy(module(images), classes),
        comm,
    )


def network_of_example() -> Any:
    """Return the class of examples/torch/language_model.py."""
    path = HERE.parent.parent / "examples/torch/language_model.py"
    spec = importlib.util.spec_from_file_location("language_model", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.Transformer


def transformer_shapes(layers: int, width: int) -> list[Sequence[int]]:
    """Return the shapes of a transformer's parameters."""
    with torch.device("meta"):
        network = network_of_example()(layers=layers, width=width, heads=8, context=128)
    return [tuple(p.shape) for p in network.parameters()]


def transformer(comm: Any, options: argparse.Namespace) -> Model:
    """Return the transformer of examples/torch/language_model.py, with 4 layers of 256."""
    kind = network_of_example()
    numbers = torch.Generator().manual_seed(comm.rank)
    text = torch.randint(256, (4, 129), generator=numbers)
    return _computed(
        lambda: kind(layers=4, width=256, heads=4, context=128),
        lambda module: nn.functional.cross_entropy(
            module(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
        ),
        comm,
    )


def _computed(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor], comm: Any
) -> Model:
    """Return a model whose gradients are determined by running it."""
    from mpi4py import MPI

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make()

    module = made()
    loss(module).backward()
    averages = []
    for p in module.parameters():
        assert p.grad is not None
        average = p.grad.double().numpy()
        comm.Allreduce(MPI.IN_PLACE, average)
        averages.append(torch.from_numpy(average / comm.size))
    return Model(made, loss, averages, exact=False)


MODELS: dict[str, Callable[[Any, argparse.Namespace], Model]] = {
    "sums": sums,
    "sums30m": partial(sums, shapes_of=lambda: transformer_shapes(10, 512)),
    "sums100m": partial(sums, shapes_of=lambda: transformer_shapes(14, 768)),
    "waiting": sums,
    "resnet50": resnet50,
    "transformer": transformer,
}

# They read and write as much as with other arguments, but leave the parameters unchanged.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.0, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.0),
    "fused-adam": lambda parameters: torch.optim.Adam(parameters, lr=0.0, fused=True),
}


# --- inside a rank ----------------------------------------------------------------------------


class Contender:
    """One way of exchanging gradients, with its own gradients."""

    def __init__(self, name: str, model: Model, optimizer: str, wire_eps: float) -> None:
        self.name = name
        self.model = model
        # Relative to the largest element: one rounding per rank's contribution, one of the sum.
        self.tolerance = 4 * wire_eps
        self.module = model.make()
        self.optimizer: Any = OPTIMIZERS[optimizer](self.module.parameters())
        self.call: nn.Module = self.module  # the module that forward calls
        self.exchange: Callable[[], None] | None = None  # with all gradients ready

    def share_memory(self, other: Contender) -> None:
        """Use the parameters of `other`, and its state after a step, unless it is divided."""
        for p, q in zip(self.module.parameters(), other.module.parameters(), strict=True):
            p.data = q.data
            if self.name not in DIVIDED:
                self.optimizer.state[p] = other.optimizer.state[q]

    def step(self) -> tuple[float, float, float]:
        """Take a step; return the seconds of all of it, its backward(), and its update."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model.loss(self.call)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        return end - began, backward - forward, end - backward

    def check(self) -> None:
        """Check that its gradients are the average over the ranks, if it exchanges any."""
        if self.name in (LOCAL, NOTHING, BARRIER, "gradients divided"):
            return
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
                raise ValueError(f"{self.name}: gradient {i} is not the average over the ranks")

    def forget(self) -> None:
        """Free its gradients during the turns of others."""
        self.optimizer.zero_grad()

    def time_exchange(self) -> float:
        """Return the seconds that the exchange alone takes."""
        assert self.exchange is not None
        for p in self.module.parameters():
            p.grad = torch.ones_like(p)
        began = time.perf_counter()
        self.exchange()
        elapsed = time.perf_counter() - began
        self.forget()
        return elapsed


def horo_lite(compression: str, **options: Any) -> Callable[[Contender], None]:
    def wrap(contender: Contender) -> None:
        import horo_lite.torch as hvd

        contender.optimizer = hvd.DistributedOptimizer(
            contender.optimizer,
            named_parameters=contender.module.named_parameters(),
            compression=getattr(hvd.Compression, compression),
            **options,
        )
        contender.exchange = contender.optimizer.synchronize

    return wrap


def overlapping(cores: float) -> Callable[[Contender], None]:
    """Overlap as if each rank had that many cores to itself."""

    def wrap(contender: Contender) -> None:
        from horo_lite.training.overlap import Overlap

        with mock.patch.object(Overlap, "of", return_value=Overlap(cores)):
            horo_lite("none")(contender)

    return wrap


def barrier(contender: Contender) -> None:
    import horo_lite as hvd

    contender.optimizer.register_step_pre_hook(lambda *_: hvd.barrier())


def ddp(
    backend: str, hook: str | None, dtype: torch.dtype, **options: Any
) -> Callable[[Contender], None]:
    def wrap(contender: Contender) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        from horo_lite.torch import ddp_hooks

        group = _group(backend)
        wrapped = nn.parallel.DistributedDataParallel(
            contender.module, process_group=group, **options
        )
        if hook is not None:
            hooks = ddp_hooks if backend == "horo_lite" else default_hooks
            wrapped.register_comm_hook(group, getattr(hooks, hook))
        contender.call = wrapped
        parameters = list(contender.module.parameters())[::-1]
        contender.exchange = lambda: _all_reduce(parameters, dtype, group)

    return wrap


def zero_redundancy(contender: Contender) -> None:
    """Divide the optimizer's state, under DistributedDataParallel, as PyTorch does."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp("gloo", None, torch.float32, gradient_as_bucket_view=True)(contender)
    contender.optimizer = ZeroRedundancyOptimizer(
        contender.module.parameters(),
        type(contender.optimizer),
        process_group=_group("gloo"),
        **contender.optimizer.defaults,
    )


def ddp_without_exchange(contender: Contender) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    wrapped = nn.parallel.DistributedDataParallel(
        contender.module, process_group=_group("gloo"), gradient_as_bucket_view=True
    )
    wrapped.register_comm_hook(None, noop_hook)
    contender.call = wrapped


@lru_cache
def _group(backend: str) -> Any:
    """Return a process group of all ranks."""
    import torch.distributed as dist

    return dist.new_group(backend=backend)


def _all_reduce(parameters: Sequence[nn.Parameter], dtype: torch.dtype, group: Any) -> None:
    """Average gradients in buckets, like DistributedDataParallel."""
    import torch.distributed as dist

    buckets: list[list[torch.Tensor]] = [[]]
    for p in parameters:
        assert p.grad is not None
        if sum(gradient.numel() for gradient in buckets[-1]) * 4 >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(p.grad)
    flats, works = [], []
    for bucket in buckets:
        flat = torch.cat([gradient.view(-1) for gradient in bucket]).to(dtype)
        flat.div_(dist.get_world_size())
        flats.append(flat)
        works.append(dist.all_reduce(flat, group=group, async_op=True))
    for bucket, flat, pending in zip(buckets, flats, works, strict=True):
        pending.wait()
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.view(-1).copy_(part)


# Name, wire dtype, and the function that wraps a plain module and optimizer.
FIELD: dict[str, tuple[torch.dtype, Callable[[Contender], None]]] = {
    "horo_lite fp32": (torch.float32, horo_lite("none")),
    SHARED: (torch.float32, horo_lite("none", gradient_as_bucket_view=True)),
    "horo_lite fp16": (torch.float16, horo_lite("fp16")),
    "horo_lite bf16": (torch.bfloat16, horo_lite("bf16")),
    NOTHING: (torch.float32, ddp_without_exchange),
    "DDP on horo_lite": (torch.float32, ddp("horo_lite", None, torch.float32)),
    "DDP on horo_lite, fp16 hook": (
        torch.float16,
        ddp("horo_lite", "fp16_compress", torch.float16),
    ),
    "DDP on horo_lite, shared": (
        torch.float32,
        ddp("horo_lite", "average_in_place", torch.float32, gradient_as_bucket_view=True),
    ),
    "DDP gloo": (torch.float32, ddp("gloo", None, torch.float32)),
    "DDP gloo, bucket views": (
        torch.float32,
        ddp("gloo", None, torch.float32, gradient_as_bucket_view=True),
    ),
    "DDP gloo, fp16 hook": (torch.float16, ddp("gloo", "fp16_compress_hook", torch.float16)),
}
# Compared only on request.
OTHERS: dict[str, tuple[torch.dtype, Callable[[Contender], None]]] = {
    "overlap always": (torch.float32, overlapping(math.inf)),
    "overlap never": (torch.float32, overlapping(0)),
    BARRIER: (torch.float32, barrier),
    DIVIDED[0]: (
        torch.float32,
        horo_lite("none", gradient_as_bucket_view=True, shard_state=True),
    ),
    DIVIDED[1]: (torch.float32, horo_lite("none", shard_state=True, shard_gradients=True)),
    DIVIDED[2]: (
        torch.float32,
        horo_lite("none", gradient_as_bucket_view=True, shard_state=True, shared_parameters=True),
    ),
    DIVIDED[3]: (torch.float32, zero_redundancy),
} | {
    f"buckets of {mib} MiB": (torch.float32, horo_lite("none", bucket_bytes=mib << 20))
    for mib in (1, 2, 4, 8, 16, 25, 50, 100)
}


def connect(store: str, comm: Any) -> None:
    """Create the process group for DistributedDataParallel."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size
    )


def contender(name: str, model: Model, optimizer: str) -> Contender:
    if name == LOCAL:
        return Contender(name, model, optimizer, 0.0)
    dtype, wrap = (FIELD | OTHERS)[name]
    # A float32 sum in a different order from the reference's also differs in the last digits.
    made = Contender(name, model, optimizer, max(torch.finfo(dtype).eps, 1e-5))
    wrap(made)
    return made


def measure(
    options: argparse.Namespace, which: str, optimizer: str, comm: Any, cores: Cores
) -> dict[str, Any]:
    """Return every turn's times with one model and optimizer, the same on every rank."""
    model = MODELS[which](comm, options)
    # With one rank there is nothing to exchange: this measures the cost of wrapping.
    names = options.contenders if comm.size > 1 else ["horo_lite fp32"]
    plain = contender(LOCAL, model, optimizer)
    plain.step()
    field = [plain]
    for name in names:
        field.append(contender(name, model, optimizer))
        field[-1].share_memory(plain)
    sources = [average.float() for average in model.averages]
    copies = [torch.zeros_like(source) for source in sources]

    def together(timed: Callable[[], Any]) -> list[Any]:
        """Call `timed` on all ranks concurrently; return each rank's result."""
        rest(comm)
        comm.Barrier()
        found = timed()
        rest(comm)
        everyone: list[Any] = comm.allgather(found)
        return everyone

    def copy() -> float:
        began = time.perf_counter()
        if comm.rank == 0:
            for to, source in zip(copies, sources, strict=True):
                np.copyto(to.numpy(), source.numpy())
        return time.perf_counter() - began

    def update_alone() -> float:
        began = time.perf_counter()
        if comm.rank == 0:
            plain.optimizer.step()
        return time.perf_counter() - began

    def take(one: Contender) -> dict[str, Any]:
        times: dict[str, Any] = {}
        before = cores.round_trip_ns()
        if one.exchange is not None and comm.size > 1:
            times["alone"] = max(together(one.time_exchange))
        together(one.step)  # so that freed memory and cache contents are its own
        everyone = together(one.step)
        times["step"] = max(step for step, _, _ in everyone)
        times["backward"] = max(backward for _, backward, _ in everyone)
        times["update"] = max(update for _, _, update in everyone)
        if one is plain:
            times["one update"] = max(together(update_alone))
        times["distance"] = distance_of(before, cores.round_trip_ns())
        one.check()
        one.forget()
        return times

    turns: list[dict[str, Any]] = []
    n_turns = options.repeats or TURNS[which]
    for turn in range(-2, n_turns):  # the first two create and agree on plans
        times: dict[str, Any] = {MEMCPY: max(together(copy))}
        times |= {one.name: take(one) for one in field}
        if which == "waiting" and turn == -1:
            alone = [max(together(field[1].time_exchange)) for _ in range(5)]
            for one in field:
                one.module.seconds = BACKWARD_PER_EXCHANGE * statistics.median(alone)
        if turn >= 0:
            turns.append(times)
    return {
        "model": which,
        "optimizer": optimizer,
        "parameters": len(sources),
        "bytes": sum(source.numel() * 4 for source in sources),
        "turns": turns,
    }


def peak_bytes() -> int:
    """Return this process's peak resident size, minus the share of other processes."""
    sizes = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc/self", name).read_text().splitlines():
            key, _, size = line.partition(":")
            if size.endswith("kB"):
                sizes[key] = 1024 * int(size.split()[0])
    return sizes["VmHWM"] - (sizes["Rss"] - sizes["Pss"])


def measure_memory(options: argparse.Namespace, name: str, comm: Any) -> int:
    """Return a contender's maximum over the ranks of peak memory minus that of local steps."""
    model = MODELS["sums"](comm, options)
    plain = contender(LOCAL, model, "sgd")
    for _ in range(3):
        plain.step()
    before = peak_bytes()
    plain.forget()
    if name == SHARED:  # otherwise the allocator may reuse this memory for the others' gradients
        ctypes.CDLL(None).malloc_trim(0)
    wrapped = contender(name, model, "sgd")
    wrapped.share_memory(plain)
    for _ in range(5):
        wrapped.step()
    wrapped.check()
    return int(max(comm.allgather(peak_bytes() - before)))


STATES = ("torch", "torch, divided", "NumPy", "NumPy, divided")


class Weight:
    """A parameter of NumpyAdam."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.data, self.grad = np.ones(shape, np.float32), np.ones(shape, np.float32)


class NumpyAdam:
    """A home-made optimizer."""

    def __init__(self, params: Sequence[Weight]) -> None:
        self.params = params
        self.moments = [(np.zeros_like(w.data), np.zeros_like(w.data)) for w in params]

    def step(self) -> None:
        for weight, (mean, square) in zip(self.params, self.moments, strict=True):
            mean += 0.1 * (weight.grad - mean)
            square += 0.001 * (weight.grad**2 - square)
            weight.data -= 0.01 * mean / (np.sqrt(square) + 1e-8)


def measure_state(name: str, comm: Any) -> int:
    """Return the maximum over the ranks of the peak memory that an optimizer adds."""
    import horo_lite as hvd

    kind, _, divided = name.partition(", ")
    shapes = resnet50_shapes()
    optimizer: Any
    if kind == "torch":
        parameters = [torch.ones(shape, requires_grad=True) for shape in shapes]
        for p in parameters:
            p.grad = torch.ones_like(p)
        before = peak_bytes()
        inner = torch.optim.Adam(parameters, fused=True)
        optimizer = hvd.DistributedOptimizer(inner, shard_state=bool(divided))
    else:
        weights = [Weight(shape) for shape in shapes]
        before = peak_bytes()
        if divided:
            optimizer = hvd.DistributedOptimizer(NumpyAdam, parameters=weights, shard_state=True)
        else:
            optimizer = hvd.DistributedOptimizer(NumpyAdam(weights))
    for _ in range(3):
        optimizer.step()
    return int(max(comm.allgather(peak_bytes() - before)))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's part of a job."""
    import horo_lite.torch as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if options.state_memory:
        return {"results": measure_state(options.memory_of or STATES[0], comm)}
    if options.memory_of is None or options.memory_of.startswith("DDP"):
        connect(f"{options.output}.store", comm)
    found: Any
    if options.memory_of is not None:
        found = measure_memory(options, options.memory_of, comm)
    else:
        cores = Cores(comm)
        found = [
            measure(options, which, optimizer, comm, cores)
            for which in options.models
            if comm.size > 1 or which != "waiting"
            for optimizer in options.optimizers or [usual_optimizer(which)]
        ]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return {"threads": torch.get_num_threads(), "results": found}


# --- the driver -------------------------------------------------------------------------------


def usual_optimizer(model: str) -> str:
    """Return the optimizer that is usual for such a model."""
    return "adam" if model == "transformer" else "sgd"


def add_memory(options: argparse.Namespace, job: dict[str, Any], start: Callable[..., Any]) -> None:
    """Measure the contenders' or the states' memory, each in a job of its own."""
    if options.state_memory:
        first = {STATES[0]: job["results"]}
        job["state"] = first | {n: start("--memory-of", n)["results"] for n in STATES[1:]}
    if options.memory and job["ranks"] > 1 and "sums" in options.models:
        job["memory"] = {name: start("--memory-of", name)["results"] for name in options.contenders}


def tables(job: dict[str, Any]) -> list[str]:
    """Format the tables of a job."""
    if "state" in job:
        return ["\n".join(f"{name:<16}{n / 2**20:>8.1f} MiB" for name, n in job["state"].items())]
    return [text for result in job["results"] for text in tables_of(job, result)]


def tables_of(job: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Format the tables of one model on one number of ranks."""
    memory = job.get("memory", {}) if result["model"] == "sums" else {}
    found = {
        times["distance"]
        for turn in result["turns"]
        for name, times in turn.items()
        if name not in (MEMCPY, LOCAL)
    }
    kinds = [kind for kind in (NEAR, FAR) if kind in found] or [UNCLEAR]
    return [table(job, result, memory, kind) for kind in kinds]


def table(job: dict[str, Any], result: dict[str, Any], memory: dict[str, int], kind: str) -> str:
    """Format the table of the turns at one distance; local steps do not depend on it."""
    turns = result["turns"]
    memcpys = [1e3 * turn[MEMCPY] for turn in turns]
    unit = statistics.median(memcpys)

    def turns_of(name: str) -> list[dict[str, Any]]:
        return [turn for turn in turns if name == LOCAL or turn[name]["distance"] == kind]

    def median(name: str, what: str) -> float:
        return statistics.median(1e3 * turn[name][what] for turn in turns_of(name))

    def updates(name: str) -> float:
        return statistics.median(
            turn[name]["update"] / turn[LOCAL]["one update"] for turn in turns_of(name)
        )

    names = [name for name in turns[0] if name != MEMCPY]
    width = max(map(len, [MEMCPY, *names]))
    is_divided = any(name in DIVIDED for name in names)
    lines = [
        f"{result['model']}, {result['optimizer']}: {result['parameters']} float32 parameters, "
        f"{result['bytes'] / 2**20:.1f} MiB, {job['ranks']} rank(s) of {job['threads']} thread(s)"
        + ("" if kind == UNCLEAR else f", {kind}"),
        " " * width
        + f"{'turns':>7}{'step ms':>10}{'exchange ms':>13}{'memcpys':>9}{'of step':>9}"
        + f"{'alone':>8}{'hidden':>8}"
        + (f"{'update':>9}" if is_divided else "")
        + (f"{'MiB more':>10}" if memory else ""),
        f"{MEMCPY:<{width}}{len(turns):>7}{'':>10}{unit:>13.2f}{1:>9.2f}",
    ]
    for name in names:
        n_turns = len(turns_of(name))
        line = f"{name:<{width}}{n_turns:>7}"
        if not n_turns:
            lines.append(line)
            continue
        step = median(name, "step")
        line += f"{step:>10.2f}"
        if name != LOCAL:
            exchange = statistics.median(
                1e3 * (turn[name]["step"] - turn[LOCAL]["step"]) for turn in turns_of(name)
            )
            line += f"{exchange:>13.2f}{exchange / unit:>9.2f}{exchange / step:>9.1%}"
            if "alone" in turns[0][name]:
                alone = median(name, "alone")
                line += f"{alone / unit:>8.2f}{1 - exchange / alone:>8.0%}"
            elif is_divided:
                line += " " * 16
        elif is_divided:
            line += " " * 47
        if is_divided:
            line += f"{updates(name):>9.2f}"
        line += f"{memory[name] / 2**20:>10.1f}" if name in memory else ""
        lines.append(line)
    backward = f"backward() without communication: {median(LOCAL, 'backward'):.2f} ms"
    if "alone" in turns[0][names[1]] and turns_of(names[1]):
        times = median(LOCAL, "backward") / median(names[1], "alone")
        backward += f", {times:.1f} times the exchange alone of {names[1]}"
    lines.append(backward)
    if is_divided:
        update = statistics.median(1e3 * turn[LOCAL]["one update"] for turn in turns)
        lines.append(
            f"update of all parameters by one rank while the others sleep: {update:.2f} ms"
        )
    # The first indication of other load on the machine.
    steps = [1e3 * turn[LOCAL]["step"] for turn in turns]
    spreads = {MEMCPY: memcpys, LOCAL: steps}
    lines.append(
        "quartiles: "
        + ", ".join(
            "{} {:.2f}-{:.2f} ms".format(name, *np.quantile(times, [0.25, 0.75]))
            for name, times in spreads.items()
        )
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the JSON if requested."""
    parser = argparse.ArgumentParser(
        description="time training steps with PyTorch, and the cost of their exchange",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=USUAL, help="models to train"
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        help="instead of adam for the transformer and sgd, with momentum, for the others",
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=FIELD | OTHERS,
        metavar="CONTENDER",
        default=list(FIELD),
        help="contenders with several ranks",
    )
    parser.add_argument(
        "--link-mbit", type=float, help="rate of links between hosts with one rank each"
    )
    parser.add_argument("--delay-ms", type=float, default=0.0, help="latency of these links")
    parser.add_argument(
        "--image", type=int, default=64, help="side of resnet50's images, for more computation"
    )
    parser.add_argument("--repeats", type=int, help=f"turns, instead of {TURNS}")
    parser.add_argument("--memory", action="store_true", help="also measure memory (sums)")
    parser.add_argument(
        "--state-memory", action="store_true", help="only measure the memory of Adam's state"
    )
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    drive(parser, HERE, work, tables, (1, 2, 4), network_of, add_memory)


def network_of(options: argparse.Namespace, ranks: int) -> AbstractContextManager[Any]:
    """Return the network that was asked for, with a host for each rank."""
    if options.link_mbit is None or ranks == 1:
        return nullcontext()
    from hosts import Network

    return Network(ranks, rate_mbit=options.link_mbit, delay_ms=options.delay_ms)


if __name__ == "__main__":
    main()
