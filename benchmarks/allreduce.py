"""Time averaging gradients among the ranks of one host, next to baselines.

`python benchmarks/allreduce.py` (or `make bench`) starts mpiexec jobs itself and prints one table
per set of gradients and number of ranks: that of `horo-lite bench`, in whose turns every rank fills
its arrays with its own numbers, and compares them with the exact result afterwards.

Cores may share an L3 cache or not, and for virtual cores this changes within seconds. So a
core-to-core round trip is measured before and after each turn: if both take at most 320 ns, the
turn is "near"; if both take more, "far"; otherwise it is not counted. The cores are those of as
many ranks as there are cores, while the others sleep: a rank that waits for a core cannot answer.
Turns continue until each contender has enough of both kinds, or the time is over.

The unit is one memcpy of the same bytes by one rank while the others sleep. The ratio of several
cores' memory bandwidth to that of one differs between machines, so there is another row: "read and
write, every rank", in which all negate their own arrays in place, concurrently. Averaging arrays
that fit into no cache can hardly take less. The MPI rows only sum; the others also divide. Unless a
row says otherwise, arrays are allocated by NumPy: large ones begin 16 bytes into a page.
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
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from horo_lite.launch import bench
from horo_lite.launch.bench import Array, Way, distance_of

HERE = Path(__file__).resolve()
BUCKET_BYTES = 25 << 20  # DistributedDataParallel's default
MEMCPY = "memcpy, one rank"
LIMIT = "read and write, every rank"
NEAR, FAR, UNCLEAR = "near", "far", ""
PAGE_BYTES = 4096
MAPPED_BYTES = 128 << 10  # malloc gives an array of this size or more its own pages


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of ResNet-50's parameters, in torchvision's order."""
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
    """A set of gradients on this rank, the numbers to fill it with, and the exact average."""

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


class Cores:
    """Measures how far the cores of this job's ranks are from each other."""

    N_ATTEMPTS = 5
    N_OPERATIONS = 5  # per attempt

    def __init__(self, comm: Any) -> None:
        import horo_lite as hvd

        self.comm = comm
        self.allowed = os.sched_getaffinity(0)
        cores = sorted(set().union(*comm.allgather(self.allowed)))
        self.group = hvd.new_group(range(min(comm.size, len(cores))))
        # With more ranks than cores, ranks that measure must not wait for the same core.
        self.only = {cores[comm.rank]} if self.group and comm.size > len(cores) else self.allowed
        self.native = self.group.transport.native_group if self.group else None
        if self.native is not None:
            self.native.write_slots("auto")  # otherwise nothing is measured
        self.array = np.zeros(1 << 18, np.float32)  # enough chunks that distances are measured

    def round_trip_ns(self) -> float:
        """Return the current maximum between neighbours; 0 if no rank has an answer."""
        for _ in range(self.N_ATTEMPTS):
            everyone: list[tuple[float, bool]] = self.comm.allgather(self._attempt())
            if any(is_new for _, is_new in everyone):
                return max(ns for ns, _ in everyone)
        return 0.0

    def _attempt(self) -> tuple[float, bool]:
        """Return this rank's last answer, and whether there was one in this attempt."""
        import horo_lite as hvd

        rest(self.comm)
        ns, is_new = 0.0, False
        if self.native is not None:
            # An operation without an answer, because a peer is not running, keeps the last one.
            os.sched_setaffinity(0, self.only)
            last = self.native.round_trip_ns
            for _ in range(self.N_OPERATIONS):
                hvd.allreduce_(self.array, group=self.group)
                ns = self.native.round_trip_ns
                is_new = is_new or ns != last
            os.sched_setaffinity(0, self.allowed)
        rest(self.comm)
        return ns, is_new


def at_a_page(shape: tuple[int, ...]) -> Array:
    """Return a new array, which is aligned to a page if it is large."""
    n = math.prod(shape)
    if n * 4 < MAPPED_BYTES:
        return np.empty(shape, np.float32)
    memory = np.empty(n + PAGE_BYTES // 4, np.float32)
    skip = -memory.ctypes.data % PAGE_BYTES // 4
    return memory[skip : skip + n].reshape(shape)


def averaging(gradients: Gradients, comm: Any, store: str) -> list[Way]:
    """Return all ways of averaging that this environment supports."""
    from mpi4py import MPI

    import horo_lite as hvd

    arrays, views, flat = gradients.arrays, gradients.views, gradients.flat

    def copy() -> None:
        for to, array in zip(gradients.copies, arrays, strict=True):
            np.copyto(to, array)

    def rewrite() -> None:
        for array in arrays:
            np.negative(array, out=array)

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

    def horo_lite(
        name: str, compression: Any = hvd.Compression.none, arrays: Sequence[Array] = arrays
    ) -> Way:
        def run() -> None:
            hvd.grouped_allreduce_(arrays, op=hvd.Average, compression=compression)

        return Way(f"horo_lite {name}", run, arrays, gradients.averages)

    field = [
        Way(MEMCPY, copy, alone=True),
        Way("memcpy, every rank at once", copy),
        Way(LIMIT, rewrite),
        horo_lite("fp32"),
    ]
    if any(array.nbytes >= MAPPED_BYTES for array in arrays):
        aligned = [at_a_page(array.shape) for array in arrays]
        field.append(horo_lite("fp32, arrays at a page", arrays=aligned))
    return [
        *field,
        *in_shared_memory(gradients),
        horo_lite("fp16", hvd.Compression.fp16),
        horo_lite("bf16", hvd.Compression.bf16),
        Way("MPI, one call per array", mpi_each, arrays, gradients.sums),
        Way("MPI, one flat buffer", mpi_flat, views, gradients.sums),
        Way("MPI, one flat buffer, packed", mpi_packed, arrays, gradients.sums),
        *gloo(gradients, comm, store),
    ]


def in_shared_memory(gradients: Gradients) -> list[Way]:
    """Average in place, like PyTorch's optimizer with gradient_as_bucket_view=True."""
    import horo_lite as hvd
    from horo_lite.collectives.shared_memory import share
    from horo_lite.transports.shm import SharedMemory

    group = hvd.world().group
    begins = np.cumsum([0, *(-(-array.nbytes // 64) * 64 for array in gradients.arrays)]).tolist()
    memory = SharedMemory(begins[-1])
    if not share(group, memory):
        return []
    arrays = [
        memory.array(begin, array.nbytes).view(np.float32)
        for begin, array in zip(begins, gradients.arrays, strict=False)
    ]
    names = [str(index) for index in range(len(arrays))]

    def run() -> None:
        group.exchange(arrays, names=names, label="gradients", shared=memory)

    return [Way("horo_lite fp32, shared memory", run, arrays, gradients.averages)]


def gloo(gradients: Gradients, comm: Any, store: str) -> list[Way]:
    """Average in buckets, like DistributedDataParallel, if PyTorch is installed."""
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

    arrays, averages = gradients.arrays, gradients.averages
    return [Way("torch gloo, 25 MiB buckets", run, arrays, averages)]


def rest(comm: Any) -> None:
    """Wait for all ranks, sleeping, so that waiting does not occupy a core."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0002)


def measure(which: str, options: argparse.Namespace, comm: Any, cores: Cores) -> dict[str, Any]:
    """Return the rows of the table of one set, the same on every rank."""
    gradients = Gradients(SETS[which](), comm.rank, comm.size)
    gradients.fill(gradients.arrays)
    n_bytes = gradients.flat.nbytes
    field = averaging(gradients, comm, f"{options.output}.store")
    repeats = options.repeats * (4 if which == "1000x256" else 1)
    found: dict[str, dict[str, list[float]]] = {way.name: {} for way in field}
    for way in field:  # warms up
        way.take_turn(gradients.fill)
    until = time.monotonic() + options.seconds / len(options.sets)
    is_done = False
    while not is_done:
        for way in field:
            before = cores.round_trip_ns()
            seconds = way.take_turn(gradients.fill)
            way.seconds.append(seconds)
            kind = distance_of(before, cores.round_trip_ns())
            found[way.name].setdefault(kind, []).append(seconds)
        fewest = min(len(of.get(kind, ())) for of in found.values() for kind in (NEAR, FAR))
        is_late = comm.bcast(time.monotonic() > until)
        is_done = len(field[0].seconds) >= repeats and (fewest >= repeats or is_late)
    memcpys = field[0].seconds  # independent of the distance
    factor = 2 * (comm.size - 1) / comm.size
    kinds = [kind for kind in (NEAR, FAR) if any(kind in of for of in found.values())] or [UNCLEAR]
    rows = [
        bench.row(way, n_bytes, factor, memcpys, found[way.name][kind], kind)
        for kind in kinds
        for way in field
        if kind in found[way.name]
    ]
    # The first indication of other load on the machine.
    low, middle, high = 1e3 * np.quantile(memcpys, [0.25, 0.5, 0.75])
    return {
        "title": f"{which}: {len(gradients.arrays)} float32 arrays, {n_bytes / 2**20:.1f} MiB",
        "rows": [row._asdict() for row in rows],
        "note": f"one memcpy: {middle:.2f} ms, quartiles {low:.2f}-{high:.2f} ms",
        "seconds": found,
    }


def take_turns(gradients: Gradients, field: Sequence[Way], counts: bool) -> None:
    """Give every way a turn and check its result; record the time if it counts."""
    for way in field:
        seconds = way.take_turn(gradients.fill)
        if counts:
            way.seconds.append(seconds)


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's part of a job."""
    import horo_lite as hvd

    hvd.init()
    from mpi4py import MPI

    cores = Cores(MPI.COMM_WORLD)
    found = [measure(which, options, MPI.COMM_WORLD, cores) for which in options.sets]
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    return {"results": found}


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
    from horo_lite import _native

    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "kernels": _native.instruction_set(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        **({"torch": sys.modules["torch"].__version__} if "torch" in sys.modules else {}),
    }


def launch(
    python: str,
    ranks: int,
    arguments: Sequence[str],
    timeout_s: float,
    script: Path = HERE,
    network: Any = None,
) -> Any:
    """Run a job, on one host or on a network's hosts, and return the results of its rank 0."""
    mpiexec = os.environ.get("MPIEXEC") or str(Path(python).with_name("mpiexec"))
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=True)
    env = dict(os.environ)
    command = [mpiexec, "-n", str(ranks)]
    if "Open MPI" in version.stdout:
        command.append("--oversubscribe")
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if network is not None:
        from network import environment

        mpi = "openmpi" if "Open MPI" in version.stdout else "mpich"
        command = network.launch(mpi, mpiexec, ranks // len(network.hosts))
        env |= environment(mpi) | {"HORO_LITE_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "result.json")
        command += [python, str(script), *arguments, "--output", str(output)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode or not output.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(output.read_text())


def drive(
    parser: argparse.ArgumentParser,
    script: Path,
    work: Callable[[argparse.Namespace], dict[str, Any]],
    tables: Callable[[dict[str, Any]], Sequence[str]],
    ranks: Sequence[int] = (2,),
    network: Callable[[argparse.Namespace, int], AbstractContextManager[Any]] | None = None,
    complete: Callable[[argparse.Namespace, dict[str, Any], Callable[..., Any]], None]
    | None = None,
) -> None:
    """Run the benchmark `script`, either as a rank or as the driver that starts jobs.

    Args:
        parser: With the arguments of this benchmark; those of all are added.
        script: Its file.
        work: Runs one rank's part of a job, and returns what rank 0 reports.
        tables: Returns the tables of a report.
        ranks: The default sizes of jobs.
        network: Returns the network of a job's hosts, or None for one host, as a context.
        complete: Adds the results of further jobs of the same size to a report; it receives a
            function that runs one with more arguments.
    """
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="job sizes")
    parser.add_argument("--output", type=Path, help="also write all results to this file, as JSON")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        import horo_lite as hvd

        found = work(options)
        from mpi4py import MPI

        library = MPI.Get_library_version().replace("\0", "").splitlines()[0].split(", package")[0]
        found |= {"ranks": hvd.size(), "mpi": library, "transport": hvd.world().transport}
        if hvd.rank() == 0:
            options.output.write_text(json.dumps(found))
        hvd.shutdown()
        return
    here = machine()
    print("  ".join(f"{name}: {value}" for name, value in here.items()))
    jobs = []

    def start(n: int, *more: str) -> Any:
        arguments = [*sys.argv[1:], "--work", *more]
        with network(options, n) if network else nullcontext() as hosts:
            return launch(sys.executable, n, arguments, 1800, script, hosts)

    for n in options.ranks:
        job = start(n)
        if complete:
            complete(options, job, partial(start, n))
        print(f"\n{n} ranks: {job['mpi']}, transport {job['transport']}")
        jobs.append(job)
        for table in tables(job):
            print(f"\n{table}", flush=True)
    if options.output:
        options.output.write_text(json.dumps({"machine": here, "jobs": jobs}, indent=1))


def start_times(repeats: int = 5) -> dict[str, float]:
    """Return the median seconds of MPI_Init and of `init()` on 2 ranks, alternating."""
    times: dict[str, list[float]] = {"MPI_Init": [], "init": []}
    for _ in range(repeats):
        for how, into in times.items():
            into.append(launch(sys.executable, 2, ["--time-start", how], 60))
    return {how: statistics.median(seconds) for how, seconds in times.items()}


def tables(job: dict[str, Any]) -> list[str]:
    """Return the table of each set of a job."""
    made = []
    for result in job["results"]:
        rows = [bench.Row(**row) for row in result["rows"]]
        width = max(len(row.way) for row in rows)
        lines = [bench.line(row, width) for row in rows]
        made.append("\n".join([result["title"], bench.head(width), *lines, result["note"]]))
    return made


def main() -> None:
    """Measure, print, and write the JSON if requested."""
    parser = argparse.ArgumentParser(
        description="time averaging gradients against memcpy, MPI and gloo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="gradients to average"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        help="minimum turns, near and far ones if possible; four times as many for small arrays",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="how long a job may continue while near or far turns are missing",
    )
    parser.add_argument("--time-start", help=argparse.SUPPRESS)
    options = parser.parse_known_args()[0]
    if options.time_start:
        time_start(options.time_start, Path(sys.argv[-1]))
        return
    drive(parser, HERE, work, tables, ranks=(2, 4))
    if "--work" not in sys.argv:
        times = start_times()
        said = ", ".join(f"{how} {seconds:.3f} s" for how, seconds in times.items())
        print(f"\nstarting 2 ranks: {said}")


if __name__ == "__main__":
    main()
