"""Reductions and broadcasts among several hosts: threads, and messages with delays."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import oracle
import pytest

from horo_lite import _native

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import scaling

pytestmark = pytest.mark.timeout(60)

Messages = Sequence[tuple[int, int, int, int]]
Start = Callable[[Messages, Messages], Callable[[], bool]]


def carrier(start: Start, largest_message: int | None = None) -> _native.Carrier:
    """Return one whose messages `start` carries; these operations need no all-gather."""

    def allgather(mine: int, n_bytes: int, everyone: int) -> Callable[[], bool]:
        raise NotImplementedError

    return _native.Carrier.made_of(start, allgather, largest_message)


class Delivery:
    """One message on one side: its memory, and whether it has been delivered."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self.address, self.n_bytes = address, n_bytes
        self.done = False


class Network:
    """Carries messages between threads, each after a random number of polls.

    Bytes are read from the sender's memory only on delivery, which detects changes of data that is
    still in flight.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sent: dict[tuple[int, int, int], deque[Delivery]] = defaultdict(deque)
        self._awaited: dict[tuple[int, int, int], deque[Delivery]] = defaultdict(deque)
        self.cut = False
        self.largest = 0
        self.n_bytes = defaultdict[tuple[int, int], int](int)
        self.n_messages = defaultdict[int, int](int)

    def start(self, rank: int) -> Start:
        def start(receive: Messages, send: Messages) -> Callable[[], bool]:
            started: list[Delivery] = []
            with self._lock:
                for peer, tag, address, n_bytes in receive:
                    started.append(Delivery(address, n_bytes))
                    self._awaited[peer, rank, tag].append(started[-1])
                for peer, tag, address, n_bytes in send:
                    started.append(Delivery(address, n_bytes))
                    self._sent[rank, peer, tag].append(started[-1])

            def done() -> bool:
                self._deliver()
                return all(one.done for one in started)

            return done

        return start

    def _deliver(self) -> None:
        with self._lock:
            for way, queue in self._sent.items():
                awaited = self._awaited[way]
                while queue and awaited and not self.cut and self._random.random() < 0.4:
                    source, target = queue.popleft(), awaited.popleft()
                    assert source.n_bytes == target.n_bytes
                    ctypes.memmove(target.address, source.address, source.n_bytes)
                    self.n_bytes[way[0], way[1]] += source.n_bytes
                    self.n_messages[way[0]] += 1
                    self.largest = max(self.largest, source.n_bytes)
                    source.done = target.done = True

    def n_waiting(self) -> int:
        """Return the number of messages that only one side has posted."""
        return sum(len(queue) for queue in (*self._sent.values(), *self._awaited.values()))


def numbered(sizes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of hosts of these sizes, dealt in turn: neighbours are on other hosts."""
    hosts: list[list[int]] = [[] for _ in sizes]
    rank = 0
    while any(len(host) < size for host, size in zip(hosts, sizes, strict=True)):
        for host, size in zip(hosts, sizes, strict=True):
            if len(host) < size:
                host.append(rank)
                rank += 1
    return hosts


class Arithmetic(NamedTuple):
    """What happens to the ranks' numbers, in the order of Reduction."""

    op: str = "sum"
    wire: str = "none"
    prescale: float = 1.0
    scale: float = 1.0
    divisor: float = 1.0
    weights: Sequence[float] = ()


SUM = Arithmetic()
Factors = tuple[float, float, float, list[float]]  # prescale, scale, divisor, a host's weights


class World:
    """Ranks of several hosts as threads."""

    def __init__(
        self, sizes: Sequence[int], seed: int = 0, largest_message: int | None = None
    ) -> None:
        self.hosts = numbered(sizes)
        self.network = Network(seed)
        self.size = sum(sizes)
        self.groups: dict[int, _native.ShmGroup] = {}
        self.allreduces: dict[int, _native.HostsAllreduce] = {}
        self.broadcasts: dict[int, _native.HostsBroadcast] = {}
        self._memory: list[np.ndarray] = []
        for here, ranks in enumerate(self.hosts):
            n_bytes = _native.HostsAllreduce.memory_bytes(self.hosts, here)
            self._memory.append(np.full(n_bytes + 64, 0xEE, np.uint8))
            address = -(-self._memory[-1].ctypes.data // 64) * 64
            for rank, group in zip(ranks, _native.thread_group(len(ranks)), strict=True):
                messages = carrier(self.network.start(rank), largest_message)
                self.groups[rank] = group
                memory = group, messages, self.hosts, here, address
                self.allreduces[rank] = _native.HostsAllreduce(*memory)
                self.broadcasts[rank] = _native.HostsBroadcast(*memory)

    def run(
        self,
        inputs: Sequence[Sequence[np.ndarray]],
        how: Arithmetic = SUM,
        on_idle: Callable[[], object] = lambda: None,
        residuals: Sequence[Sequence[np.ndarray]] = (),
    ) -> list[list[np.ndarray]]:
        """Return copies of each rank's arrays after an all-reduce, which keeps the residuals."""
        results = [[array.copy() for array in arrays] for arrays in inputs]

        def reduce(rank: int, factors: Factors) -> None:
            allreduce = self.allreduces[rank]
            tensors = _native.Tensors(results[rank], writable=True)
            if residuals:
                tensors.keep_residuals(_native.Tensors(residuals[rank]))
            layout = _native.WireLayout(
                tensors, how.op, how.wire, allreduce.window_bytes, allreduce.n_shares
            )
            allreduce.allreduce(layout, *factors, "allreduce 'g'", on_idle)

        self._reduce(reduce, how)
        return results

    def scatter(
        self, inputs: Sequence[Sequence[np.ndarray]], how: Arithmetic = SUM
    ) -> list[np.ndarray]:
        """Return each rank's own part after a reduce-scatter of inputs[rank][part]."""
        parts = [[array.copy() for array in arrays] for arrays in inputs]
        per_host = max(map(len, self.hosts))
        numbers = [[*host, *[-1] * (per_host - len(host))] for host in self.hosts]

        def reduce(rank: int, factors: Factors) -> None:
            allreduce = self.allreduces[rank]
            shares = [
                _native.Tensors([parts[rank][r]] if r >= 0 else [], writable=True)
                for host in numbers
                for r in host
            ]
            layout = _native.WireLayout.of_parts(shares, how.op, how.wire, allreduce.window_bytes)
            allreduce.reduce_scatter(layout, *factors, "reducescatter 'g'", lambda: None)

        self._reduce(reduce, how)
        for rank, (got, given) in enumerate(zip(parts, inputs, strict=True)):
            for r, (x, before) in enumerate(zip(got, given, strict=True)):
                assert r == rank or np.array_equal(x, before)  # the others' parts are only read
        return [parts[rank][rank] for rank in range(self.size)]

    def broadcast(
        self, inputs: Sequence[Sequence[np.ndarray]], root: int
    ) -> list[list[np.ndarray]]:
        """Return copies of each rank's arrays after a broadcast from the root."""
        results = [[array.copy() for array in arrays] for arrays in inputs]

        def receive(rank: int) -> None:
            tensors = _native.Tensors(results[rank], writable=True)
            self.broadcasts[rank].broadcast(tensors, root, "broadcast 'g'")

        self._on_all(receive)
        return results

    def _reduce(self, reduce: Callable[[int, Factors], None], how: Arithmetic) -> None:
        def body(rank: int) -> None:
            host = next(host for host in self.hosts if rank in host)
            here = [how.weights[r] for r in host] if how.weights else []
            reduce(rank, (how.prescale, how.scale, how.divisor, here))

        self._on_all(body)

    def _on_all(self, operation: Callable[[int], None]) -> None:
        def body(rank: int) -> None:
            try:
                operation(rank)
            except BaseException:
                self.groups[rank].abandon("it raised")
                raise

        with ThreadPoolExecutor(self.size) as pool:
            for future in [pool.submit(body, rank) for rank in range(self.size)]:
                future.result(timeout=50)


def one_after_the_other(
    hosts: Sequence[Sequence[int]], inputs: Sequence[np.ndarray], how: Arithmetic
) -> np.ndarray:
    """Return the specified rounding: rank order within each host, then host order; one window."""

    def images(n: int) -> tuple[list[np.ndarray], list[int]]:
        arrays = [np.zeros(1 << 23, np.uint8) for _ in range(n)]
        return arrays, [array.ctypes.data for array in arrays]

    def layout_of(array: np.ndarray) -> _native.WireLayout:
        tensors = _native.Tensors([array], writable=True)
        return _native.WireLayout(tensors, how.op, how.wire, 1 << 23, 1)

    if inputs[0].size == 0:
        return inputs[0]
    result = inputs[0].copy()
    layout = layout_of(result)
    sums, sums_at = images(len(hosts))
    for host, total, total_at in zip(hosts, sums, sums_at, strict=True):
        encoded, encoded_at = images(len(host))
        for rank, at in zip(host, encoded_at, strict=True):
            layout_of(inputs[rank].copy()).encode(0, at)
        weights = [how.weights[rank] for rank in host] if how.weights else []
        if len(host) == 1 and not weights and how.prescale == 1.0:
            total[:] = encoded[0]  # nothing is added, so nothing is rounded
        else:
            layout.reduce(0, 0, encoded_at, how.prescale, weights, 1.0, 1.0, total_at)
    _, (at,) = images(1)
    layout.reduce(0, 0, sums_at, 1.0, [], how.scale, how.divisor, at)
    layout.decode(0, at)
    return result


SHAPES = [(1, 1), (2, 2), (1, 3), (2, 1, 3), (1, 1, 1, 1), (4,)]


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "-".join(map(str, sizes)))
@pytest.mark.parametrize("wire", ["none", "fp16", "bf16"])
def test_bits_are_those_of_rank_order_then_host_order(sizes: tuple[int, ...], wire: str) -> None:
    world = World(sizes, seed=len(wire))
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(1_700_001).astype(np.float32) for _ in range(world.size)]
    # Split into several tensors: the ends of windows and shares must not matter.
    cuts = [0, 5, 5, 300_000, 1_000_000, 1_700_001]
    parts = [[x[a:b] for a, b in itertools.pairwise(cuts)] for x in inputs]
    for how in (
        Arithmetic("sum", wire),
        Arithmetic("average", wire, prescale=0.3, scale=3.0, divisor=float(world.size)),
        Arithmetic("sum", wire, weights=[0.5 + r for r in range(world.size)]),
    ):
        expected = [
            one_after_the_other(world.hosts, tensors, how) for tensors in zip(*parts, strict=True)
        ]
        for got in world.run(parts, how):
            for one, reference in zip(got, expected, strict=True):
                assert one.tobytes() == reference.tobytes()
    assert world.network.n_waiting() == 0


@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "-".join(map(str, sizes)))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
def test_results_are_those_of_the_oracle(sizes: tuple[int, ...], dtype: str, op: str) -> None:
    if dtype == "bool" and op == "average":
        pytest.skip("has no meaning")
    world = World(sizes)
    arrays = [
        [oracle.whole_sample(r, (n,), dtype, seed=n) for n in (3, 5000)] for r in range(world.size)
    ]
    if op == "product" and dtype == "float16":  # else they overflow
        arrays = [[x % 4 for x in each] for each in arrays]
    divisor = float(world.size) if op == "average" else 1.0
    for got in world.run(arrays, Arithmetic(op, divisor=divisor)):
        for i, one in enumerate(got):
            expected = oracle.allreduce_reference([x[i] for x in arrays], op)
            np.testing.assert_allclose(
                one.astype(np.float64), expected.astype(np.float64), rtol=2e-3
            )


@pytest.mark.parametrize(
    ("sizes", "wire"), [((1, 1), "none"), ((2, 2), "fp16"), ((2, 1, 3), "none"), ((4,), "fp16")]
)
def test_a_reduce_scatter_has_the_bits_of_an_all_reduce(sizes: tuple[int, ...], wire: str) -> None:
    world = World(sizes)
    rng = np.random.default_rng(5)
    lengths = [(1_200_000, 0, 5, 3000)[rank % 4] + rank for rank in range(world.size)]
    for dtype in ("float32", "float16", "int32"):
        inputs = [[(40 * rng.standard_normal(n)).astype(dtype) for n in lengths] for _ in lengths]
        for how in (
            Arithmetic("average", wire, prescale=0.3, scale=3.0, divisor=float(world.size)),
            Arithmetic("sum", wire, weights=[0.5 + r for r in range(world.size)]),
        ):
            whole = world.run(inputs, how)
            for rank, part in enumerate(world.scatter(inputs, how)):
                assert part.tobytes() == whole[rank][rank].tobytes()
    assert world.network.n_waiting() == 0


def test_a_reduce_scatter_sends_half_of_that() -> None:
    world = World((2, 2, 2))
    n = 500_000
    inputs = [[np.full(n, 10.0 * r + rank, np.float32) for r in range(6)] for rank in range(6)]
    for rank, part in enumerate(world.scatter(inputs)):
        assert (part == 60 * rank + 15).all()
    for host in world.hosts:
        others = [rank for rank in range(6) if rank not in host]
        sent = sum(world.network.n_bytes[a, b] for a in host for b in others)
        assert sent == pytest.approx((2 / 3) * 4 * 6 * n, rel=0.02)


def test_each_link_carries_the_bytes_of_a_ring() -> None:
    world = World((2, 2, 2))
    n = 6 * 500_000
    inputs = [[np.full(n, rank + 1.0, np.float32)] for rank in range(6)]
    for got in world.run(inputs):
        assert (got[0] == 21).all()
    for host in world.hosts:
        others = [rank for rank in range(6) if rank not in host]
        sent = sum(world.network.n_bytes[a, b] for a in host for b in others)
        assert sent == pytest.approx(2 * (2 / 3) * 4 * n, rel=0.02)
        # Both ranks of the host send, to one rank of each other host.
        for rank in host:
            by_peer = [world.network.n_bytes[rank, peer] for peer in others]
            assert sum(n_bytes > 0 for n_bytes in by_peer) == 2
            assert sum(by_peer) == pytest.approx(sent / 2, rel=0.02)


@pytest.mark.parametrize("largest_message", [None, 60_000])
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "-".join(map(str, sizes)))
def test_a_broadcast_brings_what_the_root_has(
    sizes: tuple[int, ...], largest_message: int | None
) -> None:
    world = World(sizes, largest_message=largest_message)
    rng = np.random.default_rng(7)
    window = world.allreduces[0].window_bytes
    for lengths in ([0], [1], [], [3, 0, 5_000, 1_025], [window], [2 * window + 7, 1, 3 * window]):
        inputs = [[rng.integers(0, 256, n, np.uint8) for n in lengths] for _ in range(world.size)]
        for root in range(world.size):
            for arrays in world.broadcast(inputs, root):
                for got, expected in zip(arrays, inputs[root], strict=True):
                    np.testing.assert_array_equal(got, expected)
    assert world.network.n_waiting() == 0


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 1), (2, 2, 2), (1, 1, 1, 1), (1, 3, 2)])
def test_a_broadcast_sends_each_host_its_bytes_once(sizes: tuple[int, ...]) -> None:
    world = World(sizes)
    n_windows, n_hosts = 3, len(sizes)
    n = n_windows * world.allreduces[0].window_bytes
    inputs = [[np.full(n, rank, np.uint8)] for rank in range(world.size)]
    for root in range(world.size):
        world.network.n_bytes.clear()
        for (got,) in world.broadcast(inputs, root):
            assert (got == root).all()
        sent = [[0] * n_hosts for _ in range(n_hosts)]
        by_rank = [0] * world.size
        for (source, target), n_bytes in world.network.n_bytes.items():
            hosts = [i for r in (source, target) for i, host in enumerate(world.hosts) if r in host]
            sent[hosts[0]][hosts[1]] += n_bytes
            by_rank[source] += n_bytes
        here = next(i for i, host in enumerate(world.hosts) if root in host)
        for host in range(n_hosts):
            assert sent[host][host] == 0
            assert sum(row[host] for row in sent) == (0 if host == here else n)
            # The root's host sends it once, too, and the others less.
            others = n * (n_hosts - 2) / (n_hosts - 1)
            assert sum(sent[host]) == pytest.approx(n if host == here else others, rel=0.02)
        # All ranks of the root's host send the same amount, if that is the largest.
        if sizes[here] == max(sizes):
            for rank in world.hosts[here]:
                assert by_rank[rank] == pytest.approx(n / sizes[here], rel=0.02)


class OneOfMany:
    """One host of a world too large for one machine; the others' messages are known.

    All ranks have the same whole numbers, which are sent unchanged: a host's sum of a share is the
    numbers times its ranks, and the result is that times the hosts.
    """

    SUM, RESULT = 1, 2  # tags

    def __init__(self, n_hosts: int, n_ranks: int, here: int, n_windows: int) -> None:
        self.hosts = [[h * n_ranks + r for r in range(n_ranks)] for h in range(n_hosts)]
        self.here = here
        n_bytes = _native.HostsAllreduce.memory_bytes(self.hosts, here)
        self._memory = np.zeros(n_bytes + 64, np.uint8)
        address = -(-self._memory.ctypes.data // 64) * 64
        self.sent: dict[int, int] = dict.fromkeys(self.hosts[here], 0)
        self.allreduces = []
        for rank, group in zip(self.hosts[here], _native.thread_group(n_ranks), strict=True):
            messages = carrier(self._starter(rank))
            self.allreduces.append(
                _native.HostsAllreduce(group, messages, self.hosts, here, address)
            )
        first = self.allreduces[0]
        self.numbers = np.arange(n_windows * first.window_bytes // 4) % 1009
        layout = self._layout_of(self.numbers.astype(np.float32))
        self._shares = [layout.shares(window) for window in range(layout.n_chunks)]
        ends = itertools.accumulate(shares[-1][1] for shares in self._shares)
        self._begins = [0, *ends]  # of the windows
        self._windows: dict[tuple[int, int, int, int], int] = defaultdict(int)
        self._lock = threading.Lock()

    def _layout_of(self, numbers: np.ndarray) -> _native.WireLayout:
        first, tensors = self.allreduces[0], _native.Tensors([numbers], writable=True)
        return _native.WireLayout(tensors, "sum", "none", first.window_bytes, first.n_shares)

    def _expected(self, me: int, peer: int, tag: int, owner: int, way: int) -> np.ndarray:
        """Return the next message between two ranks, one of which owns its data."""
        with self._lock:
            while True:
                window = self._windows[me, peer, tag, way]
                self._windows[me, peer, tag, way] += 1
                begin, end = self._shares[window][owner]
                if begin < end:
                    break
        at = self._begins[window]
        numbers = self.numbers[(at + begin) // 4 : (at + end) // 4].astype(np.float32)
        factor = len(self.hosts[0]) * (1 if tag == self.SUM else len(self.hosts))
        return numbers * np.float32(factor)

    def _starter(self, me: int) -> Callable[[Messages, Messages], Callable[[], bool]]:
        def start(receive: Messages, send: Messages) -> Callable[[], bool]:
            for way, messages in enumerate((receive, send)):
                for peer, tag, address, n_bytes in messages:
                    # Sums go to the owner, and results come from it.
                    owner = me if (tag == self.SUM) == (way == 0) else peer
                    expected = self._expected(me, peer, tag, owner, way)
                    assert n_bytes == expected.nbytes
                    if way == 0:
                        ctypes.memmove(address, expected.ctypes.data, n_bytes)
                    else:
                        assert ctypes.string_at(address, n_bytes) == expected.tobytes()
                self.sent[me] += len(send) if way else 0
            return lambda: True

        return start

    def run(self) -> None:
        def body(allreduce: _native.HostsAllreduce) -> None:
            mine = self.numbers.astype(np.float32)
            layout = self._layout_of(mine)
            allreduce.allreduce(layout, 1.0, 1.0, 1.0, [], "allreduce 'g'", lambda: None)
            n_ranks = len(self.hosts) * len(self.hosts[0])
            np.testing.assert_array_equal(mine, self.numbers * n_ranks)

        with ThreadPoolExecutor(len(self.allreduces)) as pool:
            for future in [pool.submit(body, each) for each in self.allreduces]:
                future.result(timeout=50)


@pytest.mark.parametrize(
    ("hosts", "ranks", "here"), [(1500, 1, 0), (1500, 1, 1), (1500, 1, 1499), (750, 2, 3)]
)
def test_more_ranks_than_a_window_has_blocks(hosts: int, ranks: int, here: int) -> None:
    """Some ranks have no share then, and send no results, but all receive them."""
    world = OneOfMany(hosts, ranks, here, n_windows=2)
    assert world.allreduces[0].window_bytes < hosts * ranks * 4096
    world.run()
    costs = scaling.Costs(1, 0, 0, 0, 0, {})
    network = scaling.Network(1, 0, largest_message=1 << 40)
    fp32 = scaling.Wire(4, 0, 0, 0)
    predicted = scaling.allreduce(world.numbers.size, hosts, ranks, fp32, costs, network)
    if (ranks, here) == (1, 0):  # one of those that send most
        assert max(world.sent.values()) == pytest.approx(predicted.n_messages, rel=0.01)
    else:
        assert max(world.sent.values()) <= predicted.n_messages


def test_long_messages_are_sent_in_pieces() -> None:
    world = World((1, 1), largest_message=1000)
    inputs = [[np.arange(n, n + 2500, dtype=np.float32)] for n in (1, 7)]
    for got in world.run(inputs):
        np.testing.assert_array_equal(got[0], inputs[0][0] + inputs[1][0])
    assert world.network.largest == 1000


def test_what_on_idle_raises_ends_the_wait() -> None:
    world = World((1, 2))
    world.network.cut = True

    def give_up() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.run([[np.ones(10, np.float32)] for _ in range(3)], on_idle=give_up)


def test_a_message_that_cannot_be_sent_raises() -> None:
    class BrokenError(Exception):
        pass

    def start(receive: Messages, send: Messages) -> Callable[[], bool]:
        raise BrokenError

    (group,) = _native.thread_group(1)
    memory = np.zeros(_native.HostsAllreduce.memory_bytes([[0], [1]], 0), np.uint8)
    allreduce = _native.HostsAllreduce(group, carrier(start), [[0], [1]], 0, memory.ctypes.data)
    tensors = _native.Tensors([np.ones(3, np.float32)], writable=True)
    layout = _native.WireLayout(tensors, "sum", "none", allreduce.window_bytes, allreduce.n_shares)
    with pytest.raises(BrokenError):
        allreduce.allreduce(layout, 1.0, 1.0, 1.0, [], "allreduce 'g'", lambda: None)


def test_handles_of_no_known_mpi_are_refused() -> None:
    with pytest.raises(ValueError, match="handles of 3 bytes"):
        _native.MpiPointToPoint.over([1] * 9, b"abc", b"abc", -1, -1, 20, 0, 4)


@pytest.mark.parametrize(
    ("hosts", "ranks", "largest"),
    [(2, 1, 60 << 10), (2, 2, 60 << 10), (4, 1, 1 << 20), (3, 2, 60 << 10)],
)
def test_the_cost_model_counts_the_bytes_and_messages_that_are_sent(
    hosts: int, ranks: int, largest: int
) -> None:
    """benchmarks/scaling.py has formulas for what the C++ code does."""
    world = World([ranks] * hosts, largest_message=largest)
    window = scaling.window_bytes(hosts, ranks)
    assert {allreduce.window_bytes for allreduce in world.allreduces.values()} == {window}
    n_elements = 3 * window // 4
    world.run([[np.full(n_elements, rank, np.float32)] for rank in range(world.size)])
    costs = scaling.Costs(1, 0, 0, 0, 0, {})
    network = scaling.Network(8e-9, 0, framing=1, largest_message=largest)  # a byte per second
    fp32 = scaling.Wire(4, 0, 0, 0)
    predicted = scaling.allreduce(n_elements, hosts, ranks, fp32, costs, network)
    sent = [0] * hosts
    host_of = {rank: i for i, host in enumerate(world.hosts) for rank in host}
    for (sender, _), n_bytes in world.network.n_bytes.items():
        sent[host_of[sender]] += n_bytes
    # Shares consist of whole blocks.
    assert max(sent) == pytest.approx(predicted.link_s, rel=0.02)
    assert max(world.network.n_messages.values()) == pytest.approx(predicted.n_messages, rel=0.1)
