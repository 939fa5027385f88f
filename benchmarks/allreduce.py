"""Time averaging gradients among the ranks of one host, next to its yardsticks.

`python benchmarks/allreduce.py` (or `make bench`) starts mpiexec jobs itself and prints one table
per set of gradients. Within a job all contenders take turns, so that other load on the machine
affects them equally; a figure is the median over the turns of the slowest rank's time. Before each
turn every rank fills its gradients with its own numbers, and afterwards compares all of them with
the exact result: a wrong result ends the benchmark.

The yardstick is one memcpy of the same bytes by one rank while the others sleep. The MPI rows only
sum; the others also divide.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
HERE = Path(__file__).resolve()
BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
MEMCPY = "memcpy, one rank"


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of ResNet-50's parameters, in the order of torchvision's."""
    shapes: list[tuple[int, ...]] = []

    def convolution(outputs: int, inputs: int, side: int) -> None:
        shapes.extend([(outputs, inputs, side, side), (outputs,), (outputs,)])  # and its batch norm

    convolution(64, 3, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(4 * width, width, 1)
            if block == 0:
                convolution(4 * width, inputs, 1)
            inputs = 4 * width
    shapes.extend([(1000, 2048), (1000,)])
    assert len(shapes) == 161
    assert sum(math.prod(shape) for shape in shapes) == 25_557_032
    return shapes


SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet50": resnet50_shapes,
    "1000x256": lambda: [(256,)] * 1000,
}


# --- inside a rank ----------------------------------------------------------------------------


class Gradients:
    """One set of gradients on this rank, the numbers to fill it with, and the exact average."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> None:
        self.arrays = [np.empty(shape, np.float32) for shape in shapes]
        self.copies = [np.empty(shape, np.float32) for shape in shapes]
        bounds = np.cumsum([0, *(array.size for array in self.arrays)])
        self.flat = np.zeros(bounds[-1], np.float32)
        self.views = [
            self.flat[start:end].reshape(array.shape)
            for (start, end), array in zip(pairwise(bounds), self.arrays, strict=True)
        ]
        # Whole numbers up to 15 and their averages over 2 or 4 ranks are exact in half precision.
        of_rank = [
            np.random.default_rng(r).integers(0, 16, self.flat.size, np.int8) for r in range(size)
        ]
        mine = of_rank[rank].astype(np.float32)
        total = np.zeros_like(mine)
        for numbers in of_rank:
            total += numbers
        self.fillings = [mine[start:end] for start, end in pairwise(bounds)]
        self.sums = [total[start:end] for start, end in pairwise(bounds)]
        average = total / np.float32(size)
        self.averages = [average[start:end] for start, end in pairwise(bounds)]

    def fill(self, arrays: Sequence[Array]) -> None:
        """Write this rank's own numbers into each array."""
        for array, filling in zip(arrays, self.fillings, strict=True):
            np.copyto(array.reshape(-1), filling)

    def check(self, contender: Contender) -> None:
        """Check that its arrays hold exactly the sum, or the average, over the ranks."""
        exact = self.averages if contender.divides else self.sums
        for index, (array, expected) in enumerate(zip(contender.arrays, exact, strict=True)):
            if not np.array_equal(array.reshape(-1), expected):
                raise SystemExit(f"{contender.name} is wrong in array {index}")


class Contender:
    """One way of averaging: the timed function, and the arrays it reads and writes."""

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        arrays: Sequence[Array] = (),
        *,
        divides: bool = False,
        alone: bool = False,
    ) -> None:
        self.name, self.run, self.arrays = name, run, arrays
        self.divides, self.alone = divides, alone
        self.times: list[float] = []


def contenders(gradients: Gradients, comm: Any, store: str) -> list[Contender]:
    """Return all ways of averaging that this environment supports."""
    from mpi4py import MPI

    import horo_lite as hvd

    arrays, views, flat = gradients.arrays, gradients.views, gradients.flat

    def copy() -> None:
        for to, array in zip(gradients.copies, arrays, strict=True):
            np.copyto(to, array)

    def mpi_each() -> None:
        for array in arrays:
            comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)

    def mpi_flat() -> None:
        comm.Allreduce(MPI.IN_PLACE, flat, MPI.SUM)

    def mpi_packed() -> None:
        for view, array in zip(views, arrays, strict=True):
            np.copyto(view, array)
        comm.Allreduce(MPI.IN_PLACE, flat, MPI.SUM)
        for view, array in zip(views, arrays, strict=True):
            np.copyto(array, view)

    def horo_lite(compression: Any) -> Callable[[], object]:
        return lambda: hvd.grouped_allreduce_(arrays, op=hvd.Average, compression=compression)

    return [
        Contender(MEMCPY, copy, alone=True),
        Contender("memcpy, every rank at once", copy),
        Contender("horo_lite fp32", horo_lite(hvd.Compression.none), arrays, divides=True),
        Contender("horo_lite fp16", horo_lite(hvd.Compression.fp16), arrays, divides=True),
        Contender("horo_lite bf16", horo_lite(hvd.Compression.bf16), arrays, divides=True),
        Contender("MPI, one call per array", mpi_each, arrays),
        Contender("MPI, one flat buffer", mpi_flat, views),
        Contender("MPI, one flat buffer, packed", mpi_packed, arrays),
        *gloo(gradients, comm, store),
    ]


def gloo(gradients: Gradients, comm: Any, store: str) -> list[Contender]:
    """Average as DistributedDataParallel does with its buckets, if PyTorch is installed."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return []
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.size))
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.size
        )
    tensors = [torch.from_numpy(array) for array in gradients.arrays]
    buckets: list[list[torch.Tensor]] = [[]]
    for tensor in reversed(tensors):
        if sum(t.numel() for t in buckets[-1]) * 4 >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(tensor)
    flats = [torch.empty(sum(t.numel() for t in bucket)) for bucket in buckets]
    views = [
        [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in b]), b, strict=True)]
        for flat, b in zip(flats, buckets, strict=True)
    ]

    def run() -> None:
        works = []
        for flat, view, bucket in zip(flats, views, buckets, strict=True):
            torch._foreach_copy_(view, bucket)
            flat.div_(comm.size)
            works.append(dist.all_reduce(flat, async_op=True))
        for work, view, bucket in zip(works, views, buckets, strict=True):
            work.wait()
            torch._foreach_copy_(bucket, view)

    return [Contender("torch gloo, 25 MiB buckets", run, gradients.arrays, divides=True)]


def rest(comm: Any) -> None:
    """Wait for all ranks, sleeping: waiting must not occupy a core."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0002)


def measure(which: str, repeats: int, comm: Any, store: str) -> dict[str, Any]:
    """Return the times of every contender on one set, the same on every rank."""
    gradients = Gradients(SETS[which](), comm.rank, comm.size)
    gradients.fill(gradients.arrays)
    field = contenders(gradients, comm, store)
    for turn in range(repeats + 1):  # the first one warms up
        take_turns(gradients, field, comm, counts=turn > 0)
    return {
        "set": which,
        "arrays": len(gradients.arrays),
        "bytes": gradients.flat.nbytes,
        "milliseconds": {c.name: statistics.median(c.times) for c in field},
        "quartiles": {c.name: np.quantile(c.times, [0.25, 0.75]).tolist() for c in field},
    }


def take_turns(
    gradients: Gradients, field: Sequence[Contender], comm: Any, *, counts: bool
) -> None:
    """Give every contender one turn and check its result; record its time if it counts."""
    for contender in field:
        if contender.arrays:
            gradients.fill(contender.arrays)
        rest(comm)
        if not contender.alone:
            comm.Barrier()
        elapsed = 0.0
        if comm.rank == 0 or not contender.alone:
            began = time.perf_counter()
            contender.run()
            elapsed = time.perf_counter() - began
        rest(comm)
        if contender.arrays:
            gradients.check(contender)
        slowest = max(comm.allgather(elapsed))
        if counts:
            contender.times.append(1e3 * slowest)


def work(sets: Sequence[str], repeats: int, output: Path) -> None:
    """Run one rank's part of a job; rank 0 writes the results."""
    import horo_lite as hvd

    world = hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    found = [
        measure(which, repeats if which == "resnet50" else 4 * repeats, comm, f"{output}.store")
        for which in sets
    ]
    if comm.rank == 0:
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0].split(", package")[0]
        output.write_text(
            json.dumps(
                {"ranks": comm.size, "mpi": library, "transport": world.transport}
                | {"results": found}
            )
        )
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    hvd.shutdown()


def time_start(how: str, output: Path) -> None:
    """Measure how long `hvd.init()`, or MPI_Init alone, takes on the slowest rank."""
    if how == "init":
        import horo_lite as hvd

        began = time.perf_counter()
        hvd.init()
        elapsed = time.perf_counter() - began
        from mpi4py import MPI
    else:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        began = time.perf_counter()
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        elapsed = time.perf_counter() - began
    slowest = max(MPI.COMM_WORLD.allgather(elapsed))
    if MPI.COMM_WORLD.rank == 0:
        output.write_text(json.dumps(slowest))
    if how == "init":
        hvd.shutdown()
    else:
        MPI.Finalize()


# --- the driver -------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Describe the machine."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def launch(
    python: str, ranks: int, arguments: Sequence[str], timeout_s: float, script: Path = HERE
) -> Any:
    """Run a job, and return the results that its rank 0 wrote."""
    mpiexec = os.environ.get("MPIEXEC") or str(Path(python).with_name("mpiexec"))
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=True)
    env = dict(os.environ)
    command = [mpiexec, "-n", str(ranks)]
    if "Open MPI" in version.stdout:
        command.append("--oversubscribe")
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command += [python, str(script), "--output", str(output), *arguments]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode or not output.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(output.read_text())


def drive(
    description: str,
    script: Path,
    repeats: int,
    work: Callable[[int, Path], None],
    tables: Callable[[dict[str, Any]], Sequence[str]],
) -> None:
    """Run the benchmark `script`, either as a rank or as the driver that starts jobs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="job sizes")
    parser.add_argument("--repeats", type=int, default=repeats, help="turns")
    parser.add_argument("--output", type=Path, help="also write all results to this file, as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.repeats, options.output)
        return
    here = machine()
    print("  ".join(f"{name}: {value}" for name, value in here.items()))
    jobs = []
    for ranks in options.ranks:
        arguments = ["--work", "--repeats", str(options.repeats)]
        jobs.append(launch(sys.executable, ranks, arguments, 600, script))
        for table in tables(jobs[-1]):
            print(f"\n{table}", flush=True)
    if options.output:
        options.output.write_text(json.dumps({"machine": here, "jobs": jobs}, indent=1))


def start_times(python: str, repeats: int = 5) -> dict[str, float]:
    """Return the median seconds of MPI_Init and of `init()` on 2 ranks, alternating."""
    times: dict[str, list[float]] = {"MPI_Init": [], "init": []}
    for _ in range(repeats):
        for how, into in times.items():
            into.append(launch(python, 2, ["--time-start", how], 60))
    return {how: statistics.median(seconds) for how, seconds in times.items()}


def table(jobs: Sequence[dict[str, Any]], which: str) -> str:
    """Format milliseconds and multiples of one memcpy of all jobs, side by side."""
    columns = []
    for job in jobs:
        for result in job["results"]:
            if result["set"] == which:
                columns.append((f"{job['ranks']} ranks, {job['name']}", result))
    if not columns:
        return ""
    first = columns[0][1]
    names = list(dict.fromkeys(name for _, result in columns for name in result["milliseconds"]))
    width = max(map(len, names))
    lines = [
        f"{which}: {first['arrays']} float32 arrays, {first['bytes'] / 2**20:.1f} MiB",
        " " * width + "".join(f"{title:>22}" for title, _ in columns),
        " " * width + f"{'ms':>14}{'memcpys':>8}" * len(columns),
    ]
    for name in names:
        line = f"{name:<{width}}"
        for _, result in columns:
            ms = result["milliseconds"]
            cell = f"{ms[name]:>14.2f}{ms[name] / ms[MEMCPY]:>8.2f}" if name in ms else f"{'-':>22}"
            line += cell
        lines.append(line)
    # Other load on the machine shows here first.
    spread = [result["quartiles"][MEMCPY] for _, result in columns]
    lines.append("memcpy's quartiles: " + ", ".join(f"{a:.2f}-{b:.2f} ms" for a, b in spread))
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the JSON if requested."""
    parser = argparse.ArgumentParser(
        description="time the all-reduce against memcpy, MPI and gloo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = HERE.parent.parent / ".venv-mpich/bin/python"
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="job sizes")
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="what to average"
    )
    parser.add_argument(
        "--repeats", type=int, default=15, help="turns; four times that for small arrays"
    )
    parser.add_argument(
        "--mpich-python",
        default=str(default) if default.exists() else None,
        help="the Python of an environment with the other MPI, to measure there too",
    )
    parser.add_argument("--output", type=Path, help="also write all results to this file, as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--time-start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.time_start:
        time_start(options.time_start, options.output)
        return
    if options.work:
        work(options.sets, options.repeats, options.output)
        return

    here = machine()
    print("  ".join(f"{name}: {value}" for name, value in here.items()))
    jobs: list[dict[str, Any]] = []
    for python in filter(None, (sys.executable, options.mpich_python)):
        for ranks in options.ranks:
            arguments = ["--work", "--repeats", str(options.repeats), "--sets", *options.sets]
            job = launch(python, ranks, arguments, 1200)
            job["name"] = "Open MPI" if "Open MPI" in job["mpi"] else "MPICH"
            jobs.append(job)
            print(f"{ranks} ranks: {job['mpi']}, transport {job['transport']}")
    for which in options.sets:
        print(f"\n{table(jobs, which)}")
    starts = {
        job["name"]: start_times(python)
        for python, job in zip(
            filter(None, (sys.executable, options.mpich_python)),
            jobs[:: len(options.ranks)],
            strict=True,
        )
    }
    print("\nstarting 2 ranks, seconds")
    for name, times in starts.items():
        print(f"  {name:<9} MPI_Init {times['MPI_Init']:.3f}  init() {times['init']:.3f}")
    if options.output:
        report = {"machine": here, "jobs": jobs, "start_seconds": starts}
        options.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
