"""The cost model of benchmarks/scaling.py: against the benchmark's results, and its limits."""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from horo_lite import _native

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import scaling  # noqa: E402
from scaling import Costs, Network, Wire, allreduce, step  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
COSTS = {
    mpi: Costs.read(json.loads((RESULTS / f"intel-xeon-2-cores-costs-{name}.json").read_text()))
    for mpi, name in (("Open MPI", "openmpi"), ("MPICH", "mpich"))
}
XEON = COSTS["Open MPI"]
FP32, FP16 = XEON.wires["fp32"], XEON.wires["fp16"]
FREE = Costs(1, 0, 0, 0, 0, {"fp32": Wire(4, 0, 0, 0)})
N = 25_600_000


def measured() -> Iterator[tuple[str, str, Network, int, int, float, float]]:
    """Yield name, MPI, network, hosts, ranks, bytes, seconds of rows of benchmarks/hosts.py."""
    results = json.loads((RESULTS / "intel-xeon-2-cores-hosts.json").read_text())
    for job in results["jobs"]:
        row = job["row"]
        flow = row["flow_mbit"] and row["flow_mbit"] / 1e3
        # tc counts the headers of a packet, but not what Ethernet adds.
        network = Network(row["rate_mbit"] / 1e3, 50, flow, framing=1514 / 1448)
        if job["name"] == "MPICH":
            network = replace(network, largest_message=1 << 40)
        for wire in XEON.wires:
            if times := job["milliseconds"].get(wire):
                name = f"{job['name']} {row['rate_mbit'] / 1e3:g} Gbit/s"
                name += f" {row['hosts']}x{row['ranks']} {wire}" + " by flow" * bool(flow)
                seconds = statistics.median(times) / 1e3
                yield name, job["name"], network, row["hosts"], row["ranks"], job["bytes"], seconds


ROWS = list(measured())


def test_all_rows_of_the_benchmark_are_compared() -> None:
    assert len(ROWS) >= 52


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_the_model_is_within_15_percent_of_what_was_measured(
    row: tuple[str, str, Network, int, int, float, float],
) -> None:
    name, mpi, network, hosts, ranks, n_bytes, seconds = row
    # All hosts of the benchmark share the machine's cores.
    costs = replace(COSTS[mpi], cores=COSTS[mpi].cores / hosts)
    wire = costs.wires[name.split()[-1] if "flow" not in name else name.split()[-3]]
    predicted = allreduce(n_bytes / 4, hosts, ranks, wire, costs, network)
    assert predicted.total_s == pytest.approx(seconds, rel=0.15), predicted


def measured_with_latency() -> Iterator[tuple[Network, str, float, float]]:
    """Yield for each figure without loss: network, wire, bytes, time over bytes/bandwidth."""
    text = (RESULTS / "intel-xeon-2-cores-latency.txt").read_text()
    row = re.compile(
        r"^\| (\d+) ([GM])bit/s, 2 × 1, (\d+) ms \|.*\| (\S+) \| (\S+) \|$", re.MULTILINE
    )
    for rate, unit, delay_ms, *figures in row.findall(text):
        n_bytes = {"M": 13e6, "G": 52e6}[unit]
        gbit = float(rate) * {"M": 1e-3, "G": 1}[unit]
        network = Network(gbit, 50 + 1e3 * float(delay_ms), framing=1514 / 1448)
        for wire, figure in zip(("fp32", "fp16"), figures, strict=True):
            yield network, wire, n_bytes, float(figure)


LATENCY_ROWS = list(measured_with_latency())


def test_all_rows_with_latency_are_compared() -> None:
    assert len(LATENCY_ROWS) == 6


@pytest.mark.parametrize(("network", "name", "n_bytes", "ratio"), LATENCY_ROWS)
def test_links_with_latency_are_within_10_percent_of_what_was_measured(
    network: Network, name: str, n_bytes: float, ratio: float
) -> None:
    costs = replace(XEON, cores=XEON.cores / 2)
    predicted = allreduce(n_bytes / 4, 2, 1, costs.wires[name], costs, network)
    ideal_s = n_bytes * 8 / (network.gbit * 1e9)
    assert predicted.total_s / ideal_s == pytest.approx(ratio, rel=0.1), predicted


def test_latency_sets_the_pace_where_the_windows_under_way_do_not_fill_the_link() -> None:
    """Two consecutive messages for every three windows, whatever else there is to do."""
    n_bytes, wire = 52e6, FREE.wires["fp32"]
    times = {
        latency_us: allreduce(n_bytes / 4, 2, 1, wire, FREE, Network(1, latency_us, framing=1))
        for latency_us in (0, 1000, 20_000, 200_000)
    }
    n_windows = n_bytes / scaling.window_bytes(2, 1)
    link_s = times[0].total_s
    assert times[1000].total_s == pytest.approx(link_s, rel=0.01)
    for latency_us in (20_000, 200_000):
        message_s = latency_us * 1e-6 + link_s / n_windows / 2
        assert times[latency_us].total_s == pytest.approx(n_windows * 2 / 3 * message_s, rel=0.1)


def steps_beside_computing() -> Iterator[tuple[str, int, bool, float]]:
    """Yield for each figure: MPI, ranks per host (of two), free cores or not, exposed fraction."""
    text = (RESULTS / "intel-xeon-2-cores-hosts.txt").read_text()
    rows = re.findall(r"^\| (.*), 1 Gbit/s, 2 × (\d) \|(.*)\|(.*)\|(.*)\|.*\|$", text, re.MULTILINE)
    for mpi, ranks, *cells in rows:
        for cell, free in zip(cells, (False, True, False), strict=True):
            shares = [float(share) / 100 for share in re.findall(r"(-?\d+) %", cell)]
            yield mpi, int(ranks), free, statistics.mean(shares)


STEPS = list(steps_beside_computing())


def test_all_steps_of_the_benchmark_are_compared() -> None:
    assert len(STEPS) == 12


@pytest.mark.parametrize(("mpi", "ranks", "free", "exposed"), STEPS)
def test_steps_are_within_15_percent_of_what_was_measured(
    mpi: str, ranks: int, free: bool, exposed: float
) -> None:
    """Computing took as long as the exchange alone, and shared the cores unless some were free."""
    costs = replace(COSTS[mpi], cores=COSTS[mpi].cores / 2)
    network = Network(1, 50, framing=1514 / 1448)
    exchange = allreduce(13e6, 2, ranks, costs.wires["fp32"], costs, network)
    alone_s = exchange.total_s
    predicted = step(alone_s, exchange, overlap=1.0, free_cores=free)
    assert predicted.total_s == pytest.approx((1 + exposed) * alone_s, rel=0.15)


def test_one_rank_and_nothing_to_send_take_no_time() -> None:
    network = Network(10, 50)
    assert allreduce(N, 1, 1, FP32, XEON, network).total_s == 0
    assert allreduce(0, 8, 2, FP32, XEON, network).total_s == 0
    alone = step(0.2, allreduce(N, 1, 1, FP32, XEON, network))
    assert (alone.total_s, alone.efficiency) == (0.2, 1.0)


def test_one_host_sends_nothing() -> None:
    found = allreduce(N, 1, 4, FP32, XEON, Network(1e-9, 1e9))
    assert found.n_messages == found.link_s == found.latency_s == 0
    assert found.total_s == found.cpu_s > 0


@pytest.mark.parametrize("hosts", [2, 3, 8, 1024])
@pytest.mark.parametrize("ranks", [1, 4])
def test_where_nothing_but_the_link_costs_it_takes_what_a_ring_sends(
    hosts: int, ranks: int
) -> None:
    network = Network(1, 0, framing=1)
    found = allreduce(N, hosts, ranks, FREE.wires["fp32"], FREE, network)
    assert found.total_s == pytest.approx(2 * (hosts - 1) / hosts * 4 * N * 8 / 1e9, rel=0.003)


def test_where_connections_are_limited_more_ranks_have_more_of_them() -> None:
    network = Network(10, 0, flow_gbit=1, framing=1)
    times = [
        allreduce(N, 2, ranks, FREE.wires["fp32"], FREE, network).link_s for ranks in (1, 2, 4, 16)
    ]
    assert times == pytest.approx([times[0] * share for share in (1, 1 / 2, 1 / 4, 1 / 10)])


@pytest.mark.parametrize("hosts", [1, 2, 64])
def test_more_bytes_take_longer_and_more_bandwidth_less(hosts: int) -> None:
    times = [allreduce(2.0**k, hosts, 2, FP32, XEON, Network(10, 50)).total_s for k in range(4, 31)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    rates = [allreduce(N, hosts, 2, FP32, XEON, Network(gbit, 50)).total_s for gbit in (1, 10, 100)]
    assert rates == sorted(rates, reverse=True)
    assert hosts == 1 or rates[0] > 1.5 * rates[1]


def test_two_levels_are_factors_and_send_as_many_bytes_in_fewer_messages() -> None:
    assert [math.prod(scaling.two_levels(n)) for n in (2, 8, 13, 64, 1024)] == [2, 8, 13, 64, 1024]
    assert scaling.two_levels(1024) == (32, 32)
    flat, leveled = (
        allreduce(N, 1024, 1, FP32, XEON, Network(10, 50), levels) for levels in (None, (32, 32))
    )
    assert leveled.link_s == flat.link_s
    assert leveled.n_messages < flat.n_messages / 5
    assert leveled.total_s < flat.total_s
    with pytest.raises(ValueError, match="is not 64, the number of hosts"):
        allreduce(N, 64, 1, FP32, XEON, Network(10, 50), (8, 4))


def test_what_a_step_hides() -> None:
    exchange = allreduce(N, 8, 1, FP32, XEON, Network(10, 50))
    assert step(100, exchange).exposed_s == 0
    assert step(100, exchange, last=0.25).exposed_s == exchange.total_s / 4
    assert step(100, exchange, free_cores=False).exposed_s == exchange.busy_s
    assert exchange.cpu_s < exchange.busy_s < exchange.total_s
    assert step(0.01, exchange, overlap=0).exposed_s == exchange.total_s
    assert step(0.01, exchange, overlap=0, every=4).exposed_s == exchange.total_s / 4


def test_the_command_measures_what_it_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And its output can be used as a file of costs."""
    monkeypatch.setattr(scaling, "_N_ELEMENTS", 1 << 18)
    monkeypatch.setattr(scaling, "_BYTES_BY_TCP", 4 << 20)
    asked = ["scaling.py", "--bytes", "1e8", "--hosts", "8", "--wires", "fp32", "int8"]
    monkeypatch.setattr(sys, "argv", [*asked, "--ranks", "2", "--cores", "4", "--json"])
    scaling.main()
    text = capsys.readouterr().out
    costs, rows = Costs.read(json.loads(text)["costs"]), json.loads(text)["rows"]
    assert costs.cores == 4
    assert 0 < costs.tcp_ns < 100
    for wire in costs.wires.values():
        assert 0 < wire.encode_ns < 100
        assert 0 < wire.reduce_ns < 100
        assert 0 < wire.decode_ns < 100
    found = {(row["wire"], row["every"]): row for row in rows}
    assert found["fp32", 1]["link_s"] / found["int8", 1]["link_s"] == pytest.approx(4, rel=0.01)
    assert found["fp32", 1]["exposed_s"] == pytest.approx(4 * found["fp32", 4]["exposed_s"])
    expected = allreduce(25e6, 8, 2, costs.wires["fp32"], costs, Network(10, 50))
    assert found["fp32", 1]["allreduce_s"] == expected.total_s
    written = tmp_path / "costs.json"
    written.write_text(text)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--costs", str(written)])
    scaling.main()
    assert json.loads(capsys.readouterr().out) == json.loads(text)
    sys.argv.remove("--json")
    scaling.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("100.0 MB of float32 gradients, 2 rank(s) on each host, 10 Gbit/s")
    shown = [line.split()[1:4] for line in lines if line.split()[:1] == ["8"]]
    assert shown[0] == ["fp32", f"{1e3 * expected.total_s:.1f}", "ms"]


def test_the_page_has_what_the_model_says() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    rows = re.findall(r"^\| (\d+) Gbit/s, (\d+) × (\d) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    wires = {**XEON.wires, "int8": scaling.eight_bits(FP16)}
    columns = [("fp32", 1), ("fp32", 1), ("fp16", 1), ("int8", 1), ("fp32", 4), ("fp16", 4)]
    for gbit, hosts, ranks, cells in rows:
        costs = replace(XEON, cores=int(ranks))
        for i, (cell, (name, every)) in enumerate(zip(cells.split(" | "), columns, strict=True)):
            levels = scaling.two_levels(int(hosts)) if i == 1 else None
            network = Network(int(gbit), 30)
            found = allreduce(N, int(hosts), int(ranks), wires[name], costs, network, levels)
            stepped = step(0.2, found, last=1 / 8, every=every)
            assert cell == f"{1e3 * found.total_s:.0f} ms · {stepped.efficiency:.0%}".replace(
                "%", " %"
            )


@pytest.mark.parametrize(("gbit", "ranks", "hosts"), [(10, 1, 256), (25, 4, 64), (100, 8, 32)])
def test_two_levels_pay_from_256_ranks_on_as_the_page_says(
    gbit: int, ranks: int, hosts: int
) -> None:
    costs, network = replace(XEON, cores=ranks), Network(gbit, 30)

    def gain(n: int) -> float:
        flat = allreduce(N, n, ranks, FP32, costs, network)
        leveled = allreduce(N, n, ranks, FP32, costs, network, scaling.two_levels(n))
        return flat.total_s / leveled.total_s

    assert gain(hosts // 2) < 1.1 <= gain(hosts) < 1.5 <= gain(4 * hosts)


def test_windows_are_those_of_the_core() -> None:
    for hosts in (2, 3, 8, 64):
        for ranks in (1, 2, 8, 64):
            numbered = [[ranks * h + r for r in range(ranks)] for h in range(hosts)]
            n_bytes = _native.HostsGroup.memory_bytes(numbered, 0, 0)
            assert scaling.window_bytes(hosts, ranks) == n_bytes // (4 * (ranks + 2))
