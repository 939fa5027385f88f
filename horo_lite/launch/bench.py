"""`horo-lite bench`: measure the speed of collective operations here, size by size.

Its output reads like that of nccl-tests. A time is the slowest rank's median over turns; all
implementations take turns, so that other load on the machine affects them equally. "alg." is bytes
over time, "bus" is that times the share of the bytes that each rank must send and receive with any
algorithm: 2 (n - 1) / n for an all-reduce, (n - 1) / n for allgather, reducescatter and alltoall, 1
for a broadcast
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
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
from horo_lite.launch.tasks import free_port
from horo_lite.start import session

Array = NDArray[np.float32]

OPERATIONS = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall")
FAR_NS = 320.0  # docs/performance.md: with longer round trips, two cores share no L3 cache
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TURNS = 7
_TURN_S = 0.02  # operations that take less are repeated within a turn


class Way(NamedTuple):
    """An implementation of an operation; `run`, which is timed, returns the result."""

    name: str
    run: Callable[[], Array]
    divisor: int = 1
    """Divisor of the expected sum, if the result is an average."""


class Row(NamedTuple):
    """The measurements of one implementation at one size."""

    way: str
    n_bytes: int
    """As in nccl-tests: what a rank receives in an allgather, otherwise what it contributes."""
    us: float
    """The median time of the slowest rank, in microseconds."""
    algorithm_gb_s: float
    bus_gb_s: float
    memcpys: float
    """The time as a multiple of one rank's memcpy of the same bytes."""
    round_trip_ns: float
    """The core-to-core round trip, if the operation measured it; otherwise 0."""


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

    def check(self, way: Way, tolerance: float) -> None:
        """Run an implementation once; raise ValueError if the result is wrong."""
        result = np.asarray(way.run()).reshape(-1)
        if not np.allclose(result, self.expected / way.divisor, rtol=tolerance, atol=0):
            raise ValueError(f"{way.name}: wrong result of {self.operation}, {self.n_bytes} bytes")


def ours(case: Case, size: int, compression: Any) -> Way:
    """Return this library's implementation: all-reduce (an average) and broadcast are in place."""
    x = case.given.copy()

    def in_place(operation: Callable[..., object], **options: Any) -> Callable[[], Array]:
        def run() -> Array:
            operation(x, **options)
            return x

        return run

    ways: dict[str, Callable[[], Any]] = {
        # Averages, since repeated sums would reach infinity.
        "allreduce": in_place(horo_lite.allreduce_, compression=compression),
        "broadcast": in_place(horo_lite.broadcast_, root_rank=0),
        "allgather": lambda: horo_lite.allgather(x),
        "reducescatter": lambda: horo_lite.reducescatter(
            x, op=horo_lite.Sum, compression=compression
        ),
        "alltoall": lambda: horo_lite.alltoall(x),
    }
    return Way("horo_lite", ways[case.operation], size if case.operation == "allreduce" else 1)


def mpi(case: Case, comm: Any) -> Way:
    """Return MPI's implementation, into preallocated memory."""
    from mpi4py import MPI

    x, result = case.given.copy(), np.empty_like(case.expected)
    ways: dict[str, Callable[[], None]] = {
        "allreduce": lambda: comm.Allreduce(x, result),
        "broadcast": lambda: comm.Bcast(result),
        "allgather": lambda: comm.Allgather(x, result),
        "reducescatter": lambda: comm.Reduce_scatter_block(x, result, MPI.SUM),
        "alltoall": lambda: comm.Alltoall(x, result),
    }
    if comm.rank == 0 and case.operation == "broadcast":
        result[:] = x
    return Way("MPI", _then(ways[case.operation], result))


def gloo(case: Case) -> Way:
    """Return gloo's implementation (of PyTorch), into preallocated memory."""
    import torch
    import torch.distributed as dist

    given, result = torch.from_numpy(case.given.copy()), torch.empty(case.expected.size)
    ways: dict[str, Callable[[], object]] = {
        "allreduce": lambda: dist.all_reduce(result.copy_(given)),
        "broadcast": lambda: dist.broadcast(result, 0),
        "allgather": lambda: _named(dist, "all_gather")(result, given),
        "reducescatter": lambda: _named(dist, "reduce_scatter")(result, given),
        "alltoall": lambda: dist.all_to_all_single(result, given),
    }
    if dist.get_rank() == 0 and case.operation == "broadcast":
        result.copy_(given)
    return Way("gloo", _then(ways[case.operation], result.numpy()))


def _named(dist: Any, operation: str) -> Callable[..., object]:
    """Return an operation on one tensor, by its name since PyTorch 2.13 or the earlier one."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    found: Callable[..., object] = getattr(dist, f"{operation}_single", None) or getattr(
        dist, old[operation]
    )
    return found


def _then(operation: Callable[[], object], result: Array) -> Callable[[], Array]:
    def run() -> Array:
        operation()
        return result

    return run


@contextmanager
def peers(wanted: bool) -> Iterator[list[Callable[[Case], Way]]]:
    """Provide the available peers: MPI, if it started this job, and PyTorch's gloo."""
    if not wanted:
        yield []
        return
    comm = session.communicator()
    found: list[Callable[[Case], Way]] = []
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
    """Check the results of all implementations, then time them in turn. All ranks call it.

    Raises:
        ValueError: A result is wrong.
    """
    world = session.current().world
    for way in ways:
        case.check(way, tolerance)
    native = world.group.transport.native_group
    source, copy = np.ones(case.n_bytes // 4, np.float32), np.empty(case.n_bytes // 4, np.float32)

    def memcpy() -> None:
        if world.rank == 0:
            np.copyto(copy, source)

    timed: list[Callable[[], object]] = [memcpy, *(way.run for way in ways)]
    once = horo_lite.allreduce(np.array([_turn(run, 1) for run in timed]), op=horo_lite.Max)
    repeats = [max(1, min(1000, int(_TURN_S / seconds))) for seconds in once]
    turns = [[_turn(run, n) for run, n in zip(timed, repeats, strict=True)] for _ in range(_TURNS)]
    own = np.array([statistics.median(times) for times in zip(*turns, strict=True)])
    slowest = horo_lite.allreduce(own, op=horo_lite.Max)
    copying, round_trip_ns = slowest[0], 0.0 if native is None else float(native.round_trip_ns)
    return [
        Row(
            way.name,
            case.n_bytes,
            round(1e6 * seconds, 2),
            round(case.n_bytes / seconds / 1e9, 3),
            round(case.n_bytes / seconds / 1e9 * case.bus_factor(world.size), 3),
            round(seconds / copying, 3),
            round_trip_ns,
        )
        for way, seconds in zip(ways, slowest[1:].tolist(), strict=True)
    ]


def _turn(run: Callable[[], object], repeats: int) -> float:
    horo_lite.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - began) / repeats


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
    add("--compression", choices=("none", "fp16", "bf16"), default="none", help="wire format")
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
            f"{os.getloadavg()[0]:.1f}\n\n{_HEAD}"
        )
    rows: list[Row] = []
    with peers(options.compare) as others:
        for n_bytes in sizes(options.begin, options.end, options.factor):
            case = Case(options.op, n_bytes, world.rank, world.size)
            ways = [ours(case, world.size, compression), *(other(case) for other in others)]
            rows += measure(case, ways, tolerance)
            if is_first:
                print(*map(_line, rows[-len(ways) :]), sep="\n", flush=True)
    if is_first and options.json:
        found = {"op": options.op, "compression": options.compression, "ranks": world.size}
        found |= {"transport": world.transport, "rows": [row._asdict() for row in rows]}
        with files.replaced(files.real(options.json), files.ORDINARY) as file:
            file.write(json.dumps(found, indent=1).encode() + b"\n")
    if is_first and options.plot:
        _plot(rows, options.op, world.size, options.plot)
    horo_lite.shutdown()


_HEAD = f"{'bytes':>12} {'':10} {'us':>12} {'alg. GB/s':>10} {'bus GB/s':>9} {'memcpys':>8}"
_LARGE = 64 << 10  # from here on, the number of bytes determines the time


def _line(row: Row) -> str:
    near, memcpys = "", f"{row.memcpys:8.2f}" if row.n_bytes >= _LARGE else ""
    if row.way == "horo_lite" and row.round_trip_ns:
        near = f"  {'near' if row.round_trip_ns <= FAR_NS else 'far'} ({row.round_trip_ns:.0f} ns)"
    return (
        f"{row.n_bytes:12,} {row.way:10} {row.us:12,.2f} {row.algorithm_gb_s:10.3f} "
        f"{row.bus_gb_s:9.3f} {memcpys}{near}".rstrip()
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
