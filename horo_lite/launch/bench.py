"""`horo-lite bench`: measure the speed of collective operations here, size by size.

Its output reads like that of nccl-tests. A time is the median over turns of the slowest rank's
time; all implementations take turns, so that other load on the machine affects them equally, and
every result is checked. "alg." is bytes over time, "bus" is that times the share of the bytes that
each rank must send and receive with any algorithm: 2 (n - 1) / n for an all-reduce, (n - 1) / n for
allgather, reducescatter and alltoall, 1 for a broadcast
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

The benchmarks of the repository use the same turns and the same table for other arrays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import horo_lite
from horo_lite import files
from horo_lite.arguments import WIRES
from horo_lite.launch.tasks import free_port
from horo_lite.start import session

Array = NDArray[Any]

OPERATIONS = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
FAR_NS = 320.0  # docs/performance.md: with longer round trips, two cores share no L3 cache
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TURNS = 7
_TURN_S = 0.02  # operations that take less are repeated within a turn


class Way:
    """An implementation of an operation.

    Args:
        name: The row's title.
        run: The timed function. It returns a list of results, or None if they are in `arrays`.
        arrays: The arrays to fill before each turn.
        exact: The expected results.
        alone: Only rank 0 runs it; the others sleep.
        wire: The format in which it sends, if that rounds numbers of any size alike.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], Any],
        arrays: Sequence[Array] = (),
        exact: Sequence[Array] = (),
        *,
        alone: bool = False,
        wire: str = "none",
    ) -> None:
        self.name, self.run, self.arrays = name, run, arrays
        self.error = {"int8": 0.02, "int4": 0.3}.get(wire, 0.0)
        """How far off a result may be, as a multiple of the largest."""
        self.exact, self.alone = exact, alone
        self.seconds: list[float] = []
        """The time of the slowest rank in each turn."""

    def check(self, results: Sequence[Array], tolerance: float) -> None:
        """Check the results of a turn.

        Raises:
            ValueError: A result is wrong.
        """
        for i, (array, expected) in enumerate(zip(results, self.exact, strict=True)):
            flat = np.asarray(array).reshape(-1)
            error = self.error * float(np.abs(expected).max(initial=0.0))
            if not (
                np.allclose(flat, expected, rtol=tolerance, atol=error)
                if tolerance or error
                else np.array_equal(flat, expected)
            ):
                raise ValueError(f"{self.name} is wrong in array {i}")

    def take_turn(
        self, fill: Callable[[Sequence[Array]], None], tolerance: float = 0.0, repeats: int = 1
    ) -> float:
        """Return the slowest rank's seconds, after checking the result. All ranks call it.

        Args:
            fill: Writes this rank's own numbers into each array.
            tolerance: The relative error that a result may have.
            repeats: How often to run it; the time is that of one run.

        Raises:
            ValueError: A result is wrong.
        """
        if self.arrays:
            fill(self.arrays)
        horo_lite.barrier()  # which sleeps, so that waiting does not occupy a core
        results, own_s = None, 0.0
        if not self.alone or horo_lite.rank() == 0:
            began = time.perf_counter()
            for _ in range(repeats):
                results = self.run()
            own_s = (time.perf_counter() - began) / repeats
        horo_lite.barrier()
        if self.exact:
            self.check(self.arrays if results is None else results, tolerance)
        return float(horo_lite.allreduce(np.array([own_s]), op=horo_lite.Max)[0])


class Row(NamedTuple):
    """The measurements of one implementation at one size."""

    way: str
    n_bytes: int
    """As in nccl-tests: what a rank receives in an allgather, otherwise what it contributes."""
    us: float
    """The median over the turns of the slowest rank's time, in microseconds."""
    algorithm_gb_s: float
    bus_gb_s: float
    memcpys: float
    """The time as a multiple of one rank's memcpy of the same bytes."""
    distance: str
    """Whether the ranks' cores share an L3 cache, "near" or "far"; "" if that is not known."""
    turns: int


class Case:
    """An operation at one size: this rank's input, and the expected result.

    Args:
        operation: One of OPERATIONS.
        n_bytes: The size, rounded down if it must be a multiple of the number of ranks.
        rank: This rank's number.
        size: The number of ranks.
    """

    def __init__(self, operation: str, n_bytes: int, rank: int, size: int) -> None:
        self.operation = operation
        n = max(1, n_bytes // 4)
        if operation not in ("allreduce", "broadcast"):
            n = max(1, n // size) * size
        self.n_bytes = 4 * n
        # Element i of rank r is 1 if i and r are equal modulo 7, otherwise 0.
        residues = np.arange(n, dtype=np.int32) % 7
        ranks = np.arange(size) % 7
        n_ranks = np.bincount(ranks, minlength=7)  # how many have a 1 there
        part = slice(rank * (n // size), (rank + 1) * (n // size))
        expected: dict[str, Callable[[], NDArray[Any]]] = {
            "allreduce": lambda: n_ranks[residues],
            "broadcast": lambda: residues == 0,
            "allgather": lambda: residues[: n // size] == ranks[:, None],
            "reducescatter": lambda: n_ranks[residues[part]],
            "alltoall": lambda: residues[part] == ranks[:, None],
        }
        given = residues[: n // size] if operation == "allgather" else residues
        self.given: Array = (given == ranks[rank]).astype(np.float32)
        self.expected: Array = expected[operation]().astype(np.float32).reshape(-1)

    def bus_factor(self, size: int) -> float:
        """Return the share of the bytes that each rank has to send and receive."""
        factors = {"allreduce": 2 * (size - 1) / size, "broadcast": 1.0}
        return factors.get(self.operation, (size - 1) / size)

    def fill(self, arrays: Sequence[Array]) -> None:
        """Write this rank's input into each array."""
        for array in arrays:
            np.copyto(array, self.given)


def ours(case: Case, size: int, compression: Any) -> list[Way]:
    """Return this library's implementation: all-reduce (an average) and broadcast are in place."""
    x, exact = case.given.copy(), case.expected
    ways: dict[str, Callable[[], Any]] = {
        # An average, since repeated sums would reach infinity.
        "allreduce": lambda: horo_lite.allreduce_(x, compression=compression),
        "broadcast": lambda: horo_lite.broadcast_(x, root_rank=0),
        "allgather": lambda: horo_lite.allgather(x),
        "reducescatter": lambda: horo_lite.reducescatter(
            x, op=horo_lite.Sum, compression=compression
        ),
        "alltoall": lambda: horo_lite.alltoall(x),
    }
    run = ways[case.operation]
    if case.operation == "allreduce":
        exact = exact / np.float32(size)
    return [Way("horo_lite", lambda: [run()], [x], [exact], wire=compression.wire)]


def mpi(case: Case, comm: Any) -> list[Way]:
    """Return MPI's implementations, into preallocated memory and into new arrays."""
    from mpi4py import MPI

    x = case.given.copy()
    ways: dict[str, Callable[[Array], None]] = {
        "allreduce": lambda result: comm.Allreduce(x, result),
        "allgather": lambda result: comm.Allgather(x, result),
        "reducescatter": lambda result: comm.Reduce_scatter_block(x, result, MPI.SUM),
        "alltoall": lambda result: comm.Alltoall(x, result),
    }
    if case.operation == "broadcast":
        return [Way("MPI", lambda: comm.Bcast(x, 0), [x], [case.expected])]
    kept = np.empty_like(case.expected)

    def into(make: Callable[[], Array]) -> Callable[[], list[Array]]:
        def run() -> list[Array]:
            result = make()
            ways[case.operation](result)
            return [result]

        return run

    found = [Way("MPI", into(lambda: kept), [x], [case.expected])]
    if case.operation != "allreduce":  # the others return new arrays here, which the system clears
        new = into(lambda: np.empty_like(case.expected))
        found.append(Way("MPI, new", new, [x], [case.expected]))
    return found


def gloo(case: Case) -> list[Way]:
    """Return gloo's implementation (of PyTorch), into preallocated memory."""
    import torch
    import torch.distributed as dist

    given, result = torch.from_numpy(case.given.copy()), torch.empty(case.expected.size)
    ways: dict[str, Callable[[], object]] = {
        "allreduce": lambda: dist.all_reduce(result.copy_(given)),
        "broadcast": lambda: dist.broadcast(given, 0),
        "allgather": lambda: _named(dist, "all_gather")(result, given),
        "reducescatter": lambda: _named(dist, "reduce_scatter")(result, given),
        "alltoall": lambda: dist.all_to_all_single(result, given),
    }
    run, found = ways[case.operation], given if case.operation == "broadcast" else result
    return [Way("gloo", lambda: [run(), found.numpy()][1:], [given.numpy()], [case.expected])]


def _named(dist: Any, operation: str) -> Callable[..., object]:
    """Return an operation on one tensor, by its name since PyTorch 2.13 or the earlier one."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    found: Callable[..., object] = getattr(dist, f"{operation}_single", None) or getattr(
        dist, old[operation]
    )
    return found


@contextmanager
def peers(wanted: bool) -> Iterator[list[Callable[[Case], list[Way]]]]:
    """Provide the available peers: MPI, if it started this job, and PyTorch's gloo."""
    if not wanted:
        yield []
        return
    comm = session.communicator()
    found: list[Callable[[Case], list[Way]]] = []
    if comm is not None:
        found.append(lambda case: mpi(case, comm))
    try:
        import torch.distributed as dist
    except ImportError:
        yield found
        return
    world = session.current().world
    if world.local_size == world.size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    here = ("127.0.0.1" if world.local_size == world.size else gethostname(), free_port())
    host, port = horo_lite.broadcast_object(here)
    store = dist.TCPStore(host, port, world.size, world.rank == 0)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield [*found, gloo]
    finally:
        horo_lite.barrier()
        dist.destroy_process_group()


def measure(case: Case, ways: Sequence[Way], tolerance: float) -> list[Row]:
    """Time all implementations in turn. All ranks call it.

    Raises:
        ValueError: A result is wrong.
    """
    world = session.current().world
    source, copy = np.ones(case.n_bytes // 4, np.float32), np.empty(case.n_bytes // 4, np.float32)
    memcpy = Way("memcpy", lambda: np.copyto(copy, source), alone=True)
    timed = [memcpy, *ways]
    once = [way.take_turn(case.fill, tolerance) for way in timed]
    repeats = [max(1, min(1000, int(_TURN_S / seconds))) for seconds in once]
    for _ in range(_TURNS):
        for way, n in zip(timed, repeats, strict=True):
            way.seconds.append(way.take_turn(case.fill, tolerance, n))
    native = world.group.transport.native_group
    ns = horo_lite.allreduce(
        np.array([0.0 if native is None else native.round_trip_ns]), op=horo_lite.Max
    )[0]
    factor = case.bus_factor(world.size)
    distance = distance_of(float(ns))
    return [row(way, case.n_bytes, factor, memcpy.seconds, way.seconds, distance) for way in ways]


def distance_of(*round_trips_ns: float) -> str:
    """Return "near" or "far" if all these round trips between cores say so, otherwise ""."""
    kinds = {"" if ns == 0 else "near" if ns <= FAR_NS else "far" for ns in round_trips_ns}
    return kinds.pop() if len(kinds) == 1 else ""


def row(
    way: Way,
    n_bytes: int,
    bus_factor: float,
    memcpys_s: Sequence[float],
    seconds: Sequence[float],
    distance: str,
) -> Row:
    """Return what an implementation's turns, or those at one distance, have shown."""
    median = statistics.median(seconds)
    return Row(
        way.name,
        n_bytes,
        round(1e6 * median, 2),
        round(n_bytes / median / 1e9, 3),
        round(n_bytes / median / 1e9 * bus_factor, 3),
        round(median / statistics.median(memcpys_s), 3),
        distance,
        len(seconds),
    )


def sizes(begin: int, end: int, factor: float) -> list[int]:
    """Return the sizes from `begin` to `end` bytes, each `factor` times the previous one.

    Each size has at least one number more than the previous one.
    """
    found = [begin]
    while (following := max(found[-1] + 4, int(found[-1] * factor))) <= end:
        found.append(following)
    return found


def _n_bytes(text: str) -> int:
    number, unit = text.lower().removesuffix("b").removesuffix("i"), ""
    if number[-1:] in _UNITS and number[-1:]:
        number, unit = number[:-1], number[-1]
    exact = float(number) * _UNITS[unit]  # argparse shows a ValueError as "invalid value"
    n = int(exact) if math.isfinite(exact) else 0
    if n < 4:
        raise argparse.ArgumentTypeError(f"{text} is less than one float32, 4 bytes")
    return n


def _factor(text: str) -> float:
    if not 1 < (factor := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("a factor must be larger than 1")
    return factor


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Time a collective operation on arrays in host memory, size by size. "
        "Inside a job (mpiexec, srun, torchrun), it measures the job's ranks; elsewhere it starts "
        "its own ranks. On GPUs, NCCL does the work: use nccl-tests.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("-n", "-np", type=int, default=2, metavar="N", help="number of ranks to start (default: 2)")
    add("-H", "--hosts", metavar="A:4,B:4", help="hosts, each with its number of ranks")
    add("--op", choices=OPERATIONS, default="allreduce", help="operation (default: allreduce)")
    add("-b", "--begin", type=_n_bytes, default=4, metavar="BYTES", help="first size (default: 4)")
    add("-e", "--end", type=_n_bytes, default=64 << 20, metavar="BYTES", help="last (default: 64M)")
    add("-f", "--factor", type=_factor, default=4.0, help="between sizes (default: 4)")
    add("--compression", choices=WIRES, default="none", help="wire format")
    add("--compare", action="store_true", help="also MPI and PyTorch's gloo, if available")
    add("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    add("--plot", type=Path, metavar="FILE", help="also plot, with matplotlib: .png, .svg, .pdf")
    return made


def work(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark on this rank; rank 0 prints."""
    options = parser("bench").parse_args(argv)
    world = horo_lite.init(device="cpu")
    is_first = world.rank == 0
    compression = getattr(horo_lite.Compression, options.compression)
    tolerance = 1e-6 if options.compression == "none" else 0.02
    if is_first:
        print(
            f"{options.op}, float32, compression: {options.compression}; {world.size} ranks, "
            f"through {world.transport}; {platform.node()}: {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f}\n\n{head()}"
        )
    rows: list[Row] = []
    with peers(options.compare) as others:
        for n_bytes in sizes(options.begin, options.end, options.factor):
            case = Case(options.op, n_bytes, world.rank, world.size)
            ways = ours(case, world.size, compression)
            ways += [way for other in others for way in other(case)]
            rows += measure(case, ways, tolerance)
            if is_first:
                print(*map(line, rows[-len(ways) :]), sep="\n", flush=True)
    if is_first and options.json:
        found = {"op": options.op, "compression": options.compression, "ranks": world.size}
        found |= {"transport": world.transport, "rows": [row._asdict() for row in rows]}
        with files.replaced(files.real(options.json), files.ORDINARY) as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
    if is_first and options.plot:
        _plot(rows, options.op, world.size, options.plot)
    horo_lite.shutdown()


_LARGE = 64 << 10  # from here on, the number of bytes determines the time


def head(width: int = 10) -> str:
    """Return the table's first line, with so much room for the names of implementations."""
    columns = f"{'us':>12} {'alg. GB/s':>10} {'bus GB/s':>9} {'memcpys':>8} {'turns':>6}"
    return f"{'bytes':>12} {'':{width}} {columns}"


def line(row: Row, width: int = 10) -> str:
    """Return a line of the table."""
    memcpys = f"{row.memcpys:8.2f}" if row.n_bytes >= _LARGE else f"{'':8}"
    return (
        f"{row.n_bytes:12,} {row.way:{width}} {row.us:12,.2f} {row.algorithm_gb_s:10.3f} "
        f"{row.bus_gb_s:9.3f} {memcpys} {row.turns:6}  {row.distance}".rstrip()
    )


def _plot(rows: Sequence[Row], operation: str, size: int, file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for way in dict.fromkeys(row.way for row in rows):
        points = [(row.n_bytes, row.us) for row in rows if row.way == way]
        axes.loglog(*zip(*points, strict=True), marker="o", label=way)
    axes.set(xlabel="bytes", ylabel="microseconds", title=f"{operation}, {size} ranks")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    with files.replaced(files.real(file), files.ORDINARY) as image:
        figure.savefig(image, format=file.suffix.removeprefix(".") or None)


if __name__ == "__main__":
    work(sys.argv[1:])
