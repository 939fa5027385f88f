"""Time averaging gradients across hosts connected by links of known rates, next to MPI and gloo.

`python benchmarks/hosts.py` (or `make bench-hosts`) creates the hosts itself, as network namespaces
of this machine (tests/support/network.py), which needs root. It starts mpiexec jobs on them, which
use TCP across hosts, and prints a row for each rate and number of hosts and ranks when it is ready.

The unit is bytes over bandwidth: a ring sends 2 (H - 1) / H times the bytes of the gradients over
the link of each of H hosts; these bytes divided by the link's rate are 1.0. With fp16 or bf16 on
the wire 0.5 would be ideal, with int8 0.254 and with int4 0.129. Links are full duplex.

Within a job all contenders take turns, so that other load on the machine affects them equally; a
figure is the median over the turns of the slowest rank's time. Before each turn every rank fills
its arrays with its own numbers, and afterwards compares them with the exact result: a wrong result
ends the benchmark. MPI only sums one flat buffer; the others average 40 arrays.

"exposed" is the share of an asynchronous fp32 exchange that is not overlapped with a computation as
long as the exchange alone: (both together - computation) / exchange. The training thread computes
either in Python, without ever releasing the GIL voluntarily, or by NumPy's matrix products on one
core. "Python, cores free": the training threads of all ranks share one core, so that the exchange
has another to run on.

All hosts share the cores of this machine: the ranks' computation, and the kernel's work for TCP,
may limit fast links here, but not on real hosts. So the last columns show how many cores the ranks
used during the exchange in fp32, and the bytes on a host's link as a multiple of a ring's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from allreduce import Gradients, gloo, launch, machine, rest, take_turns

from horo_lite.launch.bench import Way

HERE = Path(__file__).resolve()
sys.path.append(str(HERE.parent.parent / "tests" / "support"))

from network import INTERFACE, Network, no_flow_limits, unavailable  # noqa: E402

WIRES = ("fp32", "fp16", "bf16", "int8", "int4")
MPI_FLAT, GLOO = "MPI, one flat buffer", "torch gloo, 25 MiB buckets"
ASYNC = "asynchronous"
FREE = "Python, cores free"
KINDS = ("Python", FREE, "NumPy")
N_ARRAYS = 40
SIDE = 256  # of the matrices that NumPy multiplies


class Configuration(NamedTuple):
    """One row of the table."""

    rate_mbit: float
    hosts: int
    ranks: int
    """On each host."""
    flow_mbit: float | None
    delay_ms: float
    loss: float

    def title(self) -> str:
        """Return the row's name."""
        rate = self.rate_mbit
        text = f"{rate / 1000:g} Gbit/s" if rate >= 1000 else f"{rate:g} Mbit/s"
        text += f", {self.hosts} × {self.ranks}"
        if self.flow_mbit:
            text += f", {self.flow_mbit:g} Mbit/s a flow"
        if self.delay_ms:
            text += f", {self.delay_ms:g} ms"
        if self.loss:
            text += f", {100 * self.loss:g} % lost"
        return text

    def ideal_s(self, n_bytes: int) -> float:
        """Return the seconds that a ring needs for gradients of n_bytes."""
        return 2 * (self.hosts - 1) / self.hosts * n_bytes * 8 / (self.rate_mbit * 1e6)


# --- inside a rank ----------------------------------------------------------------------------


def shapes(megabytes: float) -> list[tuple[int, ...]]:
    """Return the shapes of gradients of that size: the largest array is 1000 times the smallest."""
    sizes = np.geomspace(1, 1000, N_ARRAYS)
    sizes *= megabytes * 1e6 / 4 / sizes.sum()
    return [(max(1, round(size)),) for size in sizes]


class Observed:
    """Records the resources that a contender's turns use on this rank."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self._sent = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
        self.turns: list[tuple[float, float, int]] = []
        """Seconds, CPU seconds of all cores, and bytes that the host has sent."""

    def __call__(self) -> Any:
        """Take a turn."""
        before = time.perf_counter(), time.process_time(), int(self._sent.read_text())
        results = self._run()
        after = time.perf_counter(), time.process_time(), int(self._sent.read_text())
        self.turns.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
        return results


class Work:
    """The training thread's computation, in units of about a millisecond."""

    def __init__(self, kind: str) -> None:
        self._a = np.full((SIDE, SIDE), 0.5, np.float32)
        self._out = np.empty_like(self._a)
        self._unit = self._in_numpy if kind == "NumPy" else self._in_python
        self._all_cores = os.sched_getaffinity(0)
        self._cores = {min(self._all_cores)} if kind == FREE else self._all_cores
        self.n_units = 0

    def _in_python(self) -> None:
        total = 0
        for i in range(15_000):
            total += i * i

    def _in_numpy(self) -> None:
        np.matmul(self._a, self._a, out=self._out)

    def __call__(self) -> None:
        """Compute."""
        with self._bound():
            for _ in range(self.n_units):
                self._unit()

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """Bind this thread, but no other of its process, to the cores for computing."""
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._all_cores)

    def calibrate(self, seconds: float, comm: Any) -> None:
        """Set the computation, the same on every rank, to about that long if all compute."""
        until = time.perf_counter() + min(seconds, 0.5)
        rest(comm)
        began, n = time.perf_counter(), 0
        with self._bound():
            while time.perf_counter() < until or n == 0:
                self._unit()
                n += 1
        units = seconds * n / (time.perf_counter() - began)
        self.n_units = max(1, round(statistics.median(comm.allgather(units))))


def contenders(gradients: Gradients, comm: Any, store: str) -> list[Way]:
    """Return all ways of averaging that this environment supports."""
    from mpi4py import MPI

    import horo_lite as hvd

    arrays = gradients.arrays

    def horo_lite(wire: str) -> Way:
        compression = hvd.Compression.none if wire == "fp32" else getattr(hvd.Compression, wire)

        def run() -> None:
            hvd.grouped_allreduce_(arrays, op=hvd.Average, compression=compression)

        return Way(wire, run, arrays, gradients.averages, wire=wire)

    def mpi_flat() -> None:
        comm.Allreduce(MPI.IN_PLACE, gradients.flat, MPI.SUM)

    return [
        Way(MPI_FLAT, mpi_flat, gradients.views, gradients.sums),
        *gloo(gradients, comm, store),
        *map(horo_lite, WIRES),
    ]


def beside_computing(gradients: Gradients) -> tuple[list[Way], dict[str, Work]]:
    """Return asynchronous exchanges with computation, the computation alone, and its amounts."""
    import horo_lite as hvd

    arrays = gradients.arrays
    works = {kind: Work(kind) for kind in KINDS}

    def beside(work: Callable[[], None] | None) -> Callable[[], None]:
        def run() -> None:
            handle = hvd.grouped_allreduce_async_(arrays, op=hvd.Average, name="gradients")
            if work is not None:
                work()
            hvd.synchronize(handle)

        return run

    field = [Way(ASYNC, beside(None), arrays, gradients.averages)]
    for kind, work in works.items():
        field.append(Way(f"{kind} alone", work))
        field.append(Way(f"{ASYNC}, {kind}", beside(work), arrays, gradients.averages))
    return field, works


def work(options: argparse.Namespace) -> None:
    """Run one rank's part of a job; rank 0 writes the results."""
    import horo_lite as hvd

    world = hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    numbers = Gradients(shapes(options.megabytes), comm.rank, comm.size)
    numbers.fill(numbers.arrays)
    field = contenders(numbers, comm, f"{options.output}.store")
    busy: list[Way] = []
    works: dict[str, Work] = {}
    if options.overlap:
        busy, works = beside_computing(numbers)
    if options.only:
        field = [c for c in field if c.name in options.only]
    seen = {c.name: Observed(c.run) for c in field}
    for contender in field:
        contender.run = seen[contender.name]
    take_turns(numbers, [*field, *busy[:1]], counts=False)  # warms up
    if busy:
        take_turns(numbers, busy[:1], counts=True)
        alone_s = busy[0].seconds.pop()
        for each in works.values():
            each.calibrate(alone_s, comm)
    for _ in range(options.repeats):
        take_turns(numbers, [*field, *busy], counts=True)
    used = comm.gather({name: each.turns[1:] for name, each in seen.items()})
    if comm.rank == 0:
        library = MPI.Get_library_version().replace("\0", "").splitlines()[0].split(", package")[0]
        report = {
            "mpi": library,
            "transport": world.transport,
            "hosts": hvd.size() // hvd.local_size(),
            "bytes": numbers.flat.nbytes,
            "milliseconds": {c.name: [1e3 * s for s in c.seconds] for c in [*field, *busy]},
            # For each turn: cores that all ranks used, and maximum bytes sent by a host.
            "cores": {name: cores_used([rank[name] for rank in used]) for name in seen},
            "sent": {name: bytes_sent([rank[name] for rank in used]) for name in seen},
        }
        options.output.write_text(json.dumps(report))
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    hvd.shutdown()


def cores_used(ranks: Sequence[Sequence[tuple[float, float, int]]]) -> list[float]:
    """Return the number of cores that all ranks together used in each turn."""
    return [sum(r[1] for r in turn) / max(r[0] for r in turn) for turn in zip(*ranks, strict=True)]


def bytes_sent(ranks: Sequence[Sequence[tuple[float, float, int]]]) -> list[int]:
    """Return the maximum bytes that a host has sent in each turn."""
    return [max(r[2] for r in turn) for turn in zip(*ranks, strict=True)]


# --- the driver -------------------------------------------------------------------------------


def measure(python: str, row: Configuration, options: argparse.Namespace) -> dict[str, Any]:
    """Run a job on its own hosts, and return its results."""
    ideal_s = row.ideal_s(int(options.megabytes * 1e6))
    # Exchanges of seconds vary little.
    repeats = options.repeats if ideal_s < 2 else (options.repeats + 1) // 2
    # Ten times the expected time of the slowest contender, and time for the job's start and end.
    timeout_s = 120 + 10 * (repeats + 2) * (12 if options.overlap else 6) * ideal_s
    arguments = ["--work", "--megabytes", str(options.megabytes), "--repeats", str(repeats)]
    arguments += [] if options.overlap else ["--no-overlap"]
    arguments += ["--only", *options.only] if options.only else []
    with Network(
        row.hosts,
        rate_mbit=row.rate_mbit,
        flow_mbit=row.flow_mbit,
        delay_ms=row.delay_ms,
        loss=row.loss,
    ) as network:
        n_ranks = row.hosts * row.ranks
        result: dict[str, Any] = launch(python, n_ranks, arguments, timeout_s, HERE, network)
    if result["hosts"] != row.hosts:
        raise SystemExit(f"{result['hosts']} hosts were found instead of {row.hosts}")
    result["name"] = "Open MPI" if "Open MPI" in result["mpi"] else "MPICH"
    result["ideal_ms"] = 1e3 * row.ideal_s(result["bytes"])
    return result | {"row": row._asdict()}


HEADINGS = [
    *(f"{MPI_FLAT} | gloo | " + " | ".join(f"horo_lite {wire}" for wire in WIRES)).split(" | "),
    *(f"exposed beside {kind}" for kind in KINDS),
    "cores, fp32",
    "bytes, fp32",
]


def cells(job: dict[str, Any]) -> list[str]:
    """Return a row's formatted figures; "–" if not measured."""
    ideal_ms = job["ideal_ms"]
    times = {name: statistics.median(ms) for name, ms in job["milliseconds"].items() if ms}
    ratios = [times.get(name, 0.0) / ideal_ms for name in (MPI_FLAT, GLOO, *WIRES)]
    found = [f"{ratio:.3g}" if ratio else "–" for ratio in ratios]
    for kind in KINDS:
        if f"{kind} alone" in times:
            both, alone = times[f"{ASYNC}, {kind}"], times[f"{kind} alone"]
            found.append(f"{100 * (both - alone) / times[ASYNC]:.0f} %")
        else:
            found.append("–")
    if "fp32" in job["cores"]:
        found.append(f"{statistics.median(job['cores']['fp32']):.1f}")
        row = Configuration(**job["row"])
        ring_bytes = row.ideal_s(job["bytes"]) * row.rate_mbit * 1e6 / 8
        found.append(f"{statistics.median(job['sent']['fp32']) / ring_bytes:.2f}")
    else:
        found += ["–", "–"]
    return found


def plot(jobs: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the ratios of all jobs, as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(job["name"] for job in jobs))
    figure, panels = plt.subplots(
        len(names), 1, figsize=(11, 3.6 * len(names)), squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels[:, 0], names, strict=True):
        of_mpi = [job for job in jobs if job["name"] == name]
        shown = [c for c in (MPI_FLAT, GLOO, *WIRES) if any(c in j["milliseconds"] for j in of_mpi)]
        width = 0.8 / len(shown)
        for i, contender in enumerate(shown):
            heights = [
                statistics.median(job["milliseconds"].get(contender) or [0.0]) / job["ideal_ms"]
                for job in of_mpi
            ]
            places = [n + (i - (len(shown) - 1) / 2) * width for n in range(len(of_mpi))]
            panel.bar(places, heights, width, label=contender)
        for ideal in (1.0, 0.5):
            panel.axhline(ideal, color="gray", linewidth=0.8, zorder=0)
        panel.set_yscale("log")
        panel.set_ylabel("time / (bytes / bandwidth)")
        panel.set_xticks(range(len(of_mpi)))
        titles = [Configuration(**job["row"]).title() for job in of_mpi]
        panel.set_xticklabels(titles, rotation=20, ha="right")
        panel.set_title(f"{name}: averaging {of_mpi[0]['bytes'] / 1e6:.0f} MB of float32")
        panel.legend()
    figure.savefig(file)


def main() -> None:
    """Measure, print, and write the JSON and the plot if requested."""
    parser = argparse.ArgumentParser(
        description="time the all-reduce across hosts against bytes over bandwidth, MPI and gloo",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    mpich = HERE.parent.parent / ".venv-mpich/bin/python"
    # Powers of two, so that averages of whole numbers are exact in half precision.
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], choices=[2, 4, 8])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2, 4], help="on each host"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[100, 1000, 10000], help="of links, in Mbit/s"
    )
    parser.add_argument(
        "--flows",
        type=float,
        nargs="+",
        default=[0],
        help="limits for one TCP connection, in Mbit/s; 0 for none",
    )
    parser.add_argument("--delays", type=float, nargs="+", default=[0], help="of messages, in ms")
    parser.add_argument("--losses", type=float, nargs="+", default=[0], help="share of packets")
    parser.add_argument("--megabytes", type=float, default=52.0, help="of gradients, 10^6 bytes")
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns; half as many if one takes seconds"
    )
    parser.add_argument(
        "--no-overlap", dest="overlap", action="store_false", help="do not measure overlap"
    )
    parser.add_argument("--only", nargs="+", choices=[MPI_FLAT, GLOO, *WIRES], help="contenders")
    parser.add_argument(
        "--pythons",
        nargs="+",
        default=[sys.executable, *([str(mpich)] if mpich.exists() else [])],
        help="Pythons of environments with one MPI each, to measure all of them",
    )
    parser.add_argument("--output", type=Path, help="also write all results to this file, as JSON")
    parser.add_argument("--plot", type=Path, help="also plot all results (needs matplotlib)")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    if why := unavailable():
        raise SystemExit(why)
    rows = [
        Configuration(rate, hosts, ranks, flow or None, delay, loss)
        for rate, hosts, ranks, flow, delay, loss in itertools.product(
            options.rates,
            options.hosts,
            options.ranks,
            options.flows,
            options.delays,
            options.losses,
        )
    ]
    if max(row.hosts * row.ranks for row in rows) > 16:
        parser.error("averages over more than 16 ranks would not be exact in bfloat16")
    if any(row.flow_mbit for row in rows) and (why := no_flow_limits()):
        raise SystemExit(f"this kernel cannot limit the rate of each connection: {why}")

    # Hosts have the machine's algorithm, and may not set another.
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    here = machine() | {"tcp": control, "load": round(os.getloadavg()[0], 1)}
    print("  ".join(f"{name}: {value}" for name, value in here.items()))
    jobs: list[dict[str, Any]] = []
    for python in options.pythons:
        for i, row in enumerate(rows):
            job = measure(python, row, options)
            if i == 0:
                print(f"\n{job['mpi']}, {job['bytes'] / 1e6:.0f} MB, hosts × ranks on each\n")
                print(f"| {job['name']} | {' | '.join(HEADINGS)} |")
                print("|---" * (len(HEADINGS) + 1) + "|")
            print(f"| {row.title()} | {' | '.join(cells(job))} |", flush=True)
            jobs.append(job)
    if options.output:
        options.output.write_text(json.dumps({"machine": here, "jobs": jobs}, indent=1))
    if options.plot:
        plot(jobs, options.plot)


if __name__ == "__main__":
    main()
