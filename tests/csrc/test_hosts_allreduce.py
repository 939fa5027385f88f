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
from functools import partial
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


Note = tuple[int, int, bytes]  # sender, tag, text


class Notes:
    """A control channel: its messages arrive at once, and no program ends."""

    def __init__(self, rank: int = 0, network: Network | None = None) -> None:
        self.rank, self._network = rank, network

    def send(self, texts: dict[int, bytes], tag: int) -> None:
        for peer, text in texts.items() if self._network is not None else ():
            self._network.notes[peer].append((self.rank, tag, text))

    def receive(self) -> list[Note]:
        notes = [] if self._network is None else self._network.notes[self.rank]
        return [notes.popleft() for _ in range(len(notes))]

    def ended(self) -> list[int]:
        return []


class Host:
    """The ranks of one host, as threads of this process.

    Args:
        hosts: The ranks of each host.
        here: The host's index.
        start: Returns what carries a rank's messages; reductions and broadcasts need no all-gather.
        control: Returns a rank's control channel.
        largest_message: In bytes.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        here: int,
        start: Callable[[int], Start],
        control: Callable[[int], Notes],
        largest_message: int | None = None,
    ) -> None:
        def allgather(mine: int, n_bytes: int, everyone: int) -> Callable[[], bool]:
            raise NotImplementedError

        size = sum(map(len, hosts))
        numbers = [0] * size
        for number, ranks in enumerate(hosts):
            for rank in ranks:
                numbers[rank] = number
        names = [f"rank {rank}" for rank in range(size)]
        board = _native.Segment.create(_native.StallDetector.memory_bytes(size))
        n_bytes = _native.HostsGroup.memory_bytes(hosts, here, 0)
        self._memory = _native.Segment.create(n_bytes)
        self._memory.array(0, n_bytes)[:] = 0xEE
        threads = _native.thread_group(len(hosts[here]))
        self.groups = {
            rank: _native.HostsGroup(
                thread,
                _native.Carrier.made_of(start(rank), allgather, largest_message),
                _native.ControlChannel.calling(control(rank)),
                hosts,
                here,
                0,
                self._memory.address,
                _native.StallDetector(board, 0, rank, numbers, [0] * size, names),
                range(size),
                names,
            )
            for rank, thread in zip(hosts[here], threads, strict=True)
        }


def window_bytes(hosts: Sequence[Sequence[int]]) -> int:
    """Return the size of a window: a host has four of every rank's, and of two sums."""
    return _native.HostsGroup.memory_bytes(hosts, 0, 0) // (4 * (len(hosts[0]) + 2))


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
        self.notes = defaultdict[int, deque[Note]](deque)
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
                while queue and awaited and self._random.random() < 0.4:
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


class World:
    """Ranks of several hosts as threads."""

    def __init__(
        self, sizes: Sequence[int], seed: int = 0, largest_message: int | None = None
    ) -> None:
        self.hosts = numbered(sizes)
        self.network = Network(seed)
        self.size = sum(sizes)
        self.window_bytes = window_bytes(self.hosts)
        self._made = [
            Host(
                self.hosts,
                here,
                self.network.start,
                partial(Notes, network=self.network),
                largest_message,
            )
            for here in range(len(self.hosts))
        ]
        self.groups = {rank: group for host in self._made for rank, group in host.groups.items()}

    def run(
        self,
        inputs: Sequence[Sequence[np.ndarray]],
        how: Arithmetic = SUM,
        residuals: Sequence[Sequence[np.ndarray]] = (),
    ) -> list[list[np.ndarray]]:
        """Return copies of each rank's arrays after an all-reduce, which keeps the residuals."""
        results = [[array.copy() for array in arrays] for arrays in inputs]

        def reduce(rank: int) -> None:
            tensors = _native.Tensors(results[rank], writable=True)
            if residuals:
                tensors.keep_residuals(_native.Tensors(residuals[rank]))
            self.groups[rank].allreduce(tensors, *how)

        self._on_all(reduce)
        return results

    def scatter(
        self, inputs: Sequence[Sequence[np.ndarray]], how: Arithmetic = SUM
    ) -> list[np.ndarray]:
        """Return each rank's own part after a reduce-scatter of inputs[rank][part]."""
        results = [np.empty_like(arrays[rank]) for rank, arrays in enumerate(inputs)]
        before = [[array.copy() for array in arrays] for arrays in inputs]

        def reduce(rank: int) -> None:
            parts = [_native.Tensors([part]) for part in inputs[rank]]
            result = _native.Tensors([results[rank]], writable=True)
            self.groups[rank].reduce_scatter(parts, result, *how)

        self._on_all(reduce)
        for got, given in zip(inputs, before, strict=True):  # the parts are only read
            assert all(np.array_equal(x, y) for x, y in zip(got, given, strict=True))
        return results

    def broadcast(
        self, inputs: Sequence[Sequence[np.ndarray]], root: int
    ) -> list[list[np.ndarray]]:
        """Return copies of each rank's arrays after a broadcast from the root."""
        results = [[array.copy() for array in arrays] for arrays in inputs]

        def receive(rank: int) -> None:
            tensors = _native.Tensors(results[rank], writable=True)
            self.groups[rank].broadcast(tensors, root)

        self._on_all(receive)
        return results

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
    window = world.window_bytes
    for lengths in ([0], [1], [], [3, 0, 5_000, 1_025], [window], [2 * window + 7, 1, 3 * window]):
        inputs = [[rng.integers(0, 256, n, np.uint8) for n in lengths] for _ in range(world.size)]
        for root in range(world.size):
            for arrays in world.broadcast(inputs, root):
                for got, expected in zip(arrays, inputs[root], strict=True):
                    assert np.array_equal(got, expected)
    assert world.network.n_waiting() == 0


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 1), (2, 2, 2), (1, 1, 1, 1), (1, 3, 2)])
def test_a_broadcast_sends_each_host_its_bytes_once(sizes: tuple[int, ...]) -> None:
    world = World(sizes)
    n_windows, n_hosts = 3, len(sizes)
    n = n_windows * world.window_bytes
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
        self.sent: dict[int, int] = dict.fromkeys(self.hosts[here], 0)
        self._host = Host(self.hosts, here, self._starter, Notes)
        self.window_bytes = window_bytes(self.hosts)
        self.numbers = np.arange(n_windows * self.window_bytes // 4) % 1009
        tensors = _native.Tensors([self.numbers.astype(np.float32)], writable=True)
        n_shares = n_hosts * n_ranks
        layout = _native.WireLayout(tensors, "sum", "none", self.window_bytes, n_shares)
        self._shares = [layout.shares(window) for window in range(layout.n_chunks)]
        ends = itertools.accumulate(shares[-1][1] for shares in self._shares)
        self._begins = [0, *ends]  # of the windows
        self._windows: dict[tuple[int, int, int, int], int] = defaultdict(int)
        self._lock = threading.Lock()

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
        def body(group: _native.HostsGroup) -> None:
            mine = self.numbers.astype(np.float32)
            group.allreduce(_native.Tensors([mine], writable=True), "sum", "none")
            n_ranks = len(self.hosts) * len(self.hosts[0])
            np.testing.assert_array_equal(mine, self.numbers * n_ranks)

        groups = self._host.groups.values()
        with ThreadPoolExecutor(len(groups)) as pool:
            for future in [pool.submit(body, each) for each in groups]:
                future.result(timeout=50)


@pytest.mark.parametrize(
    ("hosts", "ranks", "here"), [(1500, 1, 0), (1500, 1, 1), (1500, 1, 1499), (750, 2, 3)]
)
def test_more_ranks_than_a_window_has_blocks(hosts: int, ranks: int, here: int) -> None:
    """Some ranks have no share then, and send no results, but all receive them."""
    world = OneOfMany(hosts, ranks, here, n_windows=2)
    assert world.window_bytes < hosts * ranks * 4096
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


def test_an_error_during_a_wait_ends_it() -> None:
    class BrokenError(Exception):
        pass

    class Broken(Notes):
        def receive(self) -> list[Note]:
            raise BrokenError

    host = Host([[0], [1]], 0, lambda rank: lambda receive, send: lambda: False, Broken)
    with pytest.raises(BrokenError):
        host.groups[0].allreduce(
            _native.Tensors([np.ones(3, np.float32)], writable=True), "sum", "none"
        )


def test_a_message_that_cannot_be_sent_raises() -> None:
    class BrokenError(Exception):
        pass

    def start(receive: Messages, send: Messages) -> Callable[[], bool]:
        raise BrokenError

    host = Host([[0], [1]], 0, lambda rank: start, Notes)
    with pytest.raises(BrokenError):
        host.groups[0].allreduce(
            _native.Tensors([np.ones(3, np.float32)], writable=True), "sum", "none"
        )


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
    assert world.window_bytes == window
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
