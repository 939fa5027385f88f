"""Time averaging gradients and moving arrays among the ranks of one host, next to baselines.

`python benchmarks/allreduce.py` (or `make bench`) starts mpiexec jobs itself and prints one table
per set of arrays and number of ranks. Within a job all contenders take turns, so that other load on
the machine affects them equally; a figure is the median over the turns of the slowest rank's time.
Before each turn every rank fills its arrays with its own numbers, and afterwards compares them with
the exact result: a wrong result ends the benchmark.

Cores may share an L3 cache or not, and for virtual cores this changes within seconds. So a
core-to-core round trip is measured before and after each turn: if both take at most 320 ns, the
turn is "near"; if both take more, "far"; otherwise it is not counted. The cores are those of as
many ranks as there are cores, while the others sleep: a rank that waits for a core cannot answer.
Turns continue until each contender has enough of both kinds, or the time is over.

The unit is one memcpy of the same bytes by one rank while the others sleep. The ratio of several
cores' memory bandwidth to that of one differs between machines, so there is another row: "read and
write, every rank", in which all negate their own arrays in place, concurrently. Averaging arrays
that fit into no cache can hardly take less. The MPI rows of the all-reduce only sum; the others
also divide. Unless a row says otherwise, arrays are allocated by NumPy: large ones begin 16 bytes
into a page.
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
LIMIT = "read and write, every rank"
NEAR, FAR, UNCLEAR = "near", "far", "unclear"
FAR_NS = 320.0  # as in csrc/shm/distance.cpp
PAGE_BYTES = 4096
MAPPED_BYTES = 128 << 10  # malloc gives an array of this size or more its own pages
COLLECTIVES = "collectives"


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


class Transfers:
    """Numbers that are unique in the job, and each rank's results of the other collectives."""

    N_BYTES = 64 << 20  # of every rank's result

    def __init__(self, rank: int, size: int) -> None:
        n = self.N_BYTES // 4 // size * size
        of_rank = [np.arange(r * n, (r + 1) * n, dtype=np.int32) for r in range(size)]
        self.own = of_rank[rank]
        self.part = slice(0, n // size)
        self.broadcast = of_rank[0]
        self.gathered = np.concatenate([numbers[self.part] for numbers in of_rank])
        self.exchanged = np.concatenate([numbers.reshape(size, -1)[rank] for numbers in of_rank])

    def fill(self, arrays: Sequence[Array]) -> None:
        """Write the first of this rank's own numbers into each array."""
        for array in arrays:
            np.copyto(array, self.own[: array.size])


class Contender:
    """One way of reducing or moving arrays: the timed function, and what it must compute.

    Args:
        name: The row's title.
        run: The timed function. It returns a list of results, or None if they are in `arrays`.
        arrays: The arrays to fill before each turn.
        exact: The expected results.
        alone: Only rank 0 runs it; the others sleep.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], Any],
        arrays: Sequence[Array] = (),
        exact: Sequence[Array] = (),
        *,
        alone: bool = False,
    ) -> None:
        self.name, self.run, self.arrays = name, run, arrays
        self.exact, self.alone = exact, alone
        self.times: list[float] = []  # milliseconds
        self.distances: list[str] = []  # of the same turns: NEAR, FAR or UNCLEAR

    def check(self, results: Sequence[Array]) -> None:
        """Check the results of a turn."""
        for index, (array, expected) in enumerate(zip(results, self.exact, strict=True)):
            if not np.array_equal(array.reshape(-1), expected):
                raise ValueError(f"{self.name} is wrong in array {index}")


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


def distance(*round_trips_ns: float) -> str:
    """Classify a turn by the round trips before and after it: NEAR, FAR or UNCLEAR."""
    kinds = {UNCLEAR if ns == 0 else NEAR if ns <= FAR_NS else FAR for ns in round_trips_ns}
    return kinds.pop() if len(kinds) == 1 else UNCLEAR


def at_a_page(shape: tuple[int, ...]) -> Array:
    """Return a new array, which is aligned to a page if it is large."""
    n = math.prod(shape)
    if n * 4 < MAPPED_BYTES:
        return np.empty(shape, np.float32)
    memory = np.empty(n + PAGE_BYTES // 4, np.float32)
    skip = -memory.ctypes.data % PAGE_BYTES // 4
    return memory[skip : skip + n].reshape(shape)


def averaging(gradients: Gradients, comm: Any, store: str) -> list[Contender]:
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
    ) -> Contender:
        def run() -> None:
            hvd.grouped_allreduce_(arrays, op=hvd.Average, compression=compression)

        return Contender(f"horo_lite {name}", run, arrays, gradients.averages)

    field = [
        Contender(MEMCPY, copy, alone=True),
        Contender("memcpy, every rank at once", copy),
        Contender(LIMIT, rewrite),
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
        Contender("MPI, one call per array", mpi_each, arrays, gradients.sums),
        Contender("MPI, one flat buffer", mpi_flat, views, gradients.sums),
        Contender("MPI, one flat buffer, packed", mpi_packed, arrays, gradients.sums),
        *gloo(gradients, comm, store),
    ]


def in_shared_memory(gradients: Gradients) -> list[Contender]:
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

    return [Contender("horo_lite fp32, shared memory", run, arrays, gradients.averages)]


def gloo(gradients: Gradients, comm: Any, store: str) -> list[Contender]:
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
    return [Contender("torch gloo, 25 MiB buckets", run, arrays, averages)]


def moving(transfers: Transfers, comm: Any) -> list[Contender]:
    """Return the other collectives.

    Those of horo_lite return new arrays, whose memory the system clears; MPI's receive into
    existing arrays, so there is another row with new arrays for MPI.
    """
    import horo_lite as hvd

    x = np.empty_like(transfers.own)
    to = np.empty_like(x)
    part = x[transfers.part]

    def copy() -> None:
        np.copyto(to, x)

    def mpi(name: str, send: Array, exact: Array) -> list[Contender]:
        def run(new: bool) -> list[Array]:
            received = np.empty_like(to) if new else to
            getattr(comm, name)(send, received)
            return [received]

        return [
            Contender(f"MPI {name}", lambda: run(False), [x, to], [exact]),
            Contender(f"MPI {name}, new array", lambda: run(True), [x], [exact]),
        ]

    return [
        Contender(MEMCPY, copy, alone=True),
        Contender(
            "horo_lite broadcast", lambda: [hvd.broadcast_(x, 0)], [x], [transfers.broadcast]
        ),
        Contender("MPI Bcast", lambda: comm.Bcast(x, 0), [x], [transfers.broadcast]),
        Contender("horo_lite allgather", lambda: [hvd.allgather(part)], [x], [transfers.gathered]),
        *mpi("Allgather", part, transfers.gathered),
        Contender("horo_lite alltoall", lambda: [hvd.alltoall(x)], [x], [transfers.exchanged]),
        *mpi("Alltoall", x, transfers.exchanged),
    ]


def rest(comm: Any) -> None:
    """Wait for all ranks, sleeping, so that waiting does not occupy a core."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.0002)


def measure(
    which: str, repeats: int, seconds: float, comm: Any, cores: Cores, store: str
) -> dict[str, Any]:
    """Return the times of every contender on one set, the same on every rank."""
    numbers: Gradients | Transfers
    if which == COLLECTIVES:
        numbers = Transfers(comm.rank, comm.size)
        n_bytes = numbers.own.nbytes
        title = f"{which}: {n_bytes / 2**20:.1f} MiB of int32 for every rank"
        field = moving(numbers, comm)
    else:
        numbers = Gradients(SETS[which](), comm.rank, comm.size)
        numbers.fill(numbers.arrays)
        n_bytes = numbers.flat.nbytes
        title = f"{which}: {len(numbers.arrays)} float32 arrays, {n_bytes / 2**20:.1f} MiB"
        field = averaging(numbers, comm, store)
    take_turns(numbers, field, comm, counts=False)  # warms up
    until = time.monotonic() + seconds
    is_done = False
    while not is_done:
        take_turns(numbers, field, comm, cores, counts=True)
        fewest = min(c.distances.count(kind) for c in field for kind in (NEAR, FAR))
        is_late = comm.bcast(time.monotonic() > until)
        is_done = len(field[0].times) >= repeats and (fewest >= repeats or is_late)
    return {
        "set": which,
        "title": title,
        "bytes": n_bytes,
        "milliseconds": {c.name: c.times for c in field},
        "distances": {c.name: c.distances for c in field},
    }


def take_turns(
    numbers: Gradients | Transfers,
    field: Sequence[Contender],
    comm: Any,
    cores: Cores | None = None,
    *,
    counts: bool,
) -> None:
    """Give every contender a turn and check its result; record time and distance if it counts."""

    def round_trip_ns() -> float:
        return 0.0 if cores is None else cores.round_trip_ns()

    for contender in field:
        before = round_trip_ns()
        if contender.arrays:
            numbers.fill(contender.arrays)
        rest(comm)
        if not contender.alone:
            comm.Barrier()
        elapsed = 0.0
        results = None
        if comm.rank == 0 or not contender.alone:
            began = time.perf_counter()
            results = contender.run()
            elapsed = time.perf_counter() - began
        rest(comm)
        after = round_trip_ns()
        if contender.exact:
            contender.check(contender.arrays if results is None else results)
        del results  # not during the next contender's turn
        slowest = max(comm.allgather(elapsed))
        if counts:
            contender.times.append(1e3 * slowest)
            contender.distances.append(distance(before, after))


def work(sets: Sequence[str], repeats: int, seconds: float, output: Path) -> None:
    """Run one rank's part of a job; rank 0 writes the results."""
    import horo_lite as hvd

    world = hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cores = Cores(comm)
    found = [
        measure(
            which,
            4 * repeats if which == "1000x256" else repeats,
            seconds / len(sets),
            comm,
            cores,
            f"{output}.store",
        )
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
        env |= environment(mpi)
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
    """Format milliseconds, multiples of one memcpy and numbers of turns of jobs side by side."""
    columns: list[tuple[str, float, dict[str, list[float]]]] = []
    notes = []
    title = ""
    for job in jobs:
        for result in job["results"]:
            if result["set"] != which:
                continue
            title = f"{result['title']}, {job['ranks']} ranks"
            memcpys = result["milliseconds"][MEMCPY]  # independent of the distance
            kinds = [kind for of_row in result["distances"].values() for kind in of_row]
            for kind in (NEAR, FAR) if {NEAR, FAR} & set(kinds) else (UNCLEAR,):
                name = f"{job['name']}, {kind}"
                columns.append((name, statistics.median(memcpys), turns_of(result, kind)))
            # The first indication of other load on the machine.
            low, high = np.quantile(memcpys, [0.25, 0.75])
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in (NEAR, FAR, UNCLEAR))
            notes.append(
                f"{job['name']}: memcpy's quartiles {low:.2f}-{high:.2f} ms; turns: {counts}"
            )
    names = list(dict.fromkeys(row for _, _, times in columns for row in times))
    width = max(map(len, names))
    lines = [
        title,
        " " * width + "".join(f"{name:>24}" for name, _, _ in columns),
        " " * width + f"{'ms':>10}{'memcpys':>8}{'turns':>6}" * len(columns),
    ]
    for row in names:
        line = f"{row:<{width}}"
        for _, memcpy, times in columns:
            ms = times.get(row)
            if ms:
                median = statistics.median(ms)
                line += f"{median:>10.2f}{median / memcpy:>8.2f}{len(ms):>6}"
            else:
                line += f"{'-':>10}{'-':>8}{0:>6}"
        lines.append(line)
    return "\n".join([*lines, *notes])


def turns_of(result: dict[str, Any], kind: str) -> dict[str, list[float]]:
    """Return the milliseconds of all turns at that distance, by row."""
    return {
        row: [
            ms for ms, found in zip(times, result["distances"][row], strict=True) if found == kind
        ]
        for row, times in result["milliseconds"].items()
    }


def main() -> None:
    """Measure, print, and write the JSON if requested."""
    parser = argparse.ArgumentParser(
        description="time the all-reduce and other collectives against memcpy, MPI and gloo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = HERE.parent.parent / ".venv-mpich/bin/python"
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="job sizes")
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=[*SETS, COLLECTIVES],
        default=[*SETS, COLLECTIVES],
        help="gradients to average; the other collectives",
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
        work(options.sets, options.repeats, options.seconds, options.output)
        return

    here = machine()
    print("  ".join(f"{name}: {value}" for name, value in here.items()))
    jobs: list[dict[str, Any]] = []
    for python in filter(None, (sys.executable, options.mpich_python)):
        for ranks in options.ranks:
            arguments = ["--work", "--repeats", str(options.repeats), "--sets", *options.sets]
            arguments += ["--seconds", str(options.seconds)]
            job = launch(python, ranks, arguments, 1200 + options.seconds)
            job["name"] = "Open MPI" if "Open MPI" in job["mpi"] else "MPICH"
            jobs.append(job)
            print(f"{ranks} ranks: {job['mpi']}, transport {job['transport']}")
    for which in options.sets:
        for ranks in options.ranks:
            print(f"\n{table([job for job in jobs if job['ranks'] == ranks], which)}")
    print(f"\nnear, far: both of a turn's round trips at most, or more than, {FAR_NS:.0f} ns")
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
