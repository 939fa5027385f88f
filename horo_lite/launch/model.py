"""Predict how long an exchange and a training step take, by a model of a few formulas.

It counts what one all-reduce of the package does (csrc/hosts/hosts_allreduce.h, csrc/shm): the
bytes on a link, the work of a host's cores, the messages, and the parts of the first and last
windows that do not overlap. docs/scaling.md gives the source of every term, and its error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

__all__ = [
    "Costs",
    "Exchange",
    "Network",
    "Step",
    "Wire",
    "allreduce",
    "eight_bits",
    "step",
    "two_levels",
    "window_bytes",
]

_MIB = 1 << 20
_BLOCK_ELEMENTS = 1024  # shares consist of such blocks
_HEADER_BYTES = 32  # a rank's part of the handshake


@dataclass(frozen=True)
class Wire:
    """A wire dtype, and the core time for a float32 element of it, in nanoseconds."""

    element_bytes: float
    """Bytes on the wire, including its part of the block's scale."""
    encode_ns: float
    reduce_ns: float
    """For one rank's, or one host's, contribution to an element of a sum."""
    decode_ns: float


@dataclass(frozen=True)
class Costs:
    """The costs of work on a host."""

    cores: float
    """A host's cores for its ranks."""
    tcp_ns: float
    """Core time to send a byte and receive one."""
    message_us: float
    """Core time for a message, sent and received, in addition to its bytes."""
    crowding: float
    """Extra work if very many ranks share a core, since they poll and evict each other's caches."""
    polling: float
    """The share of a core that a rank uses while it waits for other hosts."""
    wires: Mapping[str, Wire]

    @staticmethod
    def read(data: Mapping[str, Any]) -> Costs:
        """Return the costs that `data` was made from by `dataclasses.asdict`."""
        wires = {name: Wire(**wire) for name, wire in data["wires"].items()}
        return Costs(**{**data, "wires": wires})

    def data(self) -> dict[str, Any]:
        """Return the costs as data for JSON."""
        return asdict(self)

    def slowdown(self, ranks: int) -> float:
        """Return how much longer work takes with this number of ranks on a host than with one."""
        shared = max(1.0, ranks / self.cores)
        return shared * (1 + self.crowding * (1 - 1 / shared))


@dataclass(frozen=True)
class Network:
    """The network between the hosts."""

    gbit: float
    """Rate of a host's link in each direction, in 10^9 bits per second."""
    latency_us: float
    """Time until the first byte of a message arrives, including the MPI library's part."""
    flow_gbit: float | None = None
    """Rate of one TCP connection, if that is limited."""
    framing: float = 1538 / 1448
    """Bytes on an Ethernet per byte of a TCP stream."""
    largest_message: int = 60 << 10
    """Longer messages are split (Open MPI: see transports/mpi/point_to_point.py)."""


class Exchange(NamedTuple):
    """The predicted parts of one all-reduce."""

    link_s: float
    """Time for all bytes, at the rate of the link."""
    cpu_s: float
    """Time for all work, on all cores, or as many as there are ranks."""
    latency_s: float
    """Time for all windows if only messages took time: two in succession for every three."""
    fill_s: float
    """The parts of the first and last windows that do not overlap."""
    start_s: float
    """Time for the handshake."""
    n_messages: int
    """Messages sent by one of the ranks that send most."""
    polling: float
    """The share of each of a host's cores, or as many as it has ranks, that waiting uses."""

    @property
    def total_s(self) -> float:
        """The time that the all-reduce takes.

        The windows overlap link and cores, but not perfectly: a core that works on one window is
        late for another's messages. So the longer of the two counts, and the other one the more the
        closer it is to it. While messages are in flight, both are idle: if the latency is so long
        that the windows in flight cannot fill the link, it alone sets the pace.
        """
        paced_s = max(math.hypot(self.link_s, self.cpu_s), self.latency_s)
        return paced_s + self.fill_s + self.start_s

    @property
    def busy_s(self) -> float:
        """The time that it takes from cores that compute at the same time."""
        return self.cpu_s + self.polling * (self.total_s - self.cpu_s)


class Step(NamedTuple):
    """A predicted training step, on average if not every step exchanges."""

    compute_s: float
    exposed_s: float
    """The time that the exchange adds."""

    @property
    def total_s(self) -> float:
        """Both."""
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """The share of the time in which ranks compute: 1 for linear scaling."""
        return self.compute_s / self.total_s if self.total_s else 1.0


def window_bytes(hosts: int, ranks: int) -> int:
    """Return the size of a window on the wire: `Hosts::window_bytes` of csrc/hosts."""
    room = (128 * _MIB) // (4 * (ranks + 2)) // 64 * 64
    most = min(max(room, _MIB), 4 * _MIB)
    return min(max((256 << 10) * hosts * ranks, _MIB), most)


def allreduce(
    n_elements: float,
    hosts: int,
    ranks: int,
    wire: Wire,
    costs: Costs,
    network: Network,
    levels: Sequence[int] | None = None,
) -> Exchange:
    """Predict an all-reduce of float32 elements.

    Args:
        n_elements: The number of elements on every rank.
        hosts: The number of hosts.
        ranks: The number of ranks on each host.
        wire: The wire dtype.
        costs: The costs of a host.
        network: The network between the hosts.
        levels: For comparison, since the package does not do it: hosts exchange in groups of
            `levels[0]`, then each host with its counterparts in other groups, and so on. The
            product of the levels is `hosts`.
    """
    levels = levels or (hosts,)
    if math.prod(levels) != hosts:
        raise ValueError(f"the product of the levels {levels} is not {hosts}, the number of hosts")
    if hosts * ranks == 1 or n_elements == 0:
        return Exchange(0, 0, 0, 0, 0, 0, 0)
    per_ns = costs.slowdown(ranks) * 1e-9  # seconds, for work of one rank
    if hosts == 1:
        others = (ranks - 1) / ranks
        work = others * (wire.encode_ns + wire.decode_ns) + wire.reduce_ns
        return Exchange(0, n_elements * work * per_ns, 0, 0, 0, 0, 0)

    # Shares consist of blocks. If there are more shares than blocks, some ranks have none.
    all_bytes = n_elements * wire.element_bytes
    window = min(window_bytes(hosts, ranks), all_bytes)
    n_windows = all_bytes / window
    block = min(_BLOCK_ELEMENTS * wire.element_bytes, window)
    per_host = window / block / hosts  # blocks
    parts = min(float(ranks), max(1.0, per_host))  # the ranks of a host that have some

    # Bytes: as many as a ring sends, over one connection for each pair of ranks. A host that owns a
    # block sends its sum to all others, even if there are fewer blocks than hosts.
    sent = (hosts - 1) / hosts * (1 + max(1.0, 1 / per_host)) * all_bytes
    flows = parts * (hosts - 1) * (network.flow_gbit or math.inf)
    rate = min(network.gbit, flows) * 1e9 / 8
    link_s = sent * network.framing / rate

    # Messages: in each window and for every part, the sum and the result to every other host of a
    # level.
    n_messages, share = 0.0, window / parts
    reduced = ranks / parts if ranks > 1 else 0.0  # contributions added, per element of a window
    for size in levels:
        reduced += share / window
        share /= size
        pieces = math.ceil(max(share, block) / network.largest_message)
        n_messages += (size - 1) * pieces * (1 + min(1.0, share / block))

    # Work in a window, for a rank that has a part.
    elements = window / wire.element_bytes
    encode, decode = elements * wire.encode_ns, elements * wire.decode_ns
    reduce = elements * reduced * wire.reduce_ns
    carry = sent / n_windows / parts * costs.tcp_ns
    carry += n_messages * costs.message_us * 1e3
    cpu_s = n_windows * (encode + reduce + carry + decode) * per_ns

    # Step w of the pipeline sends the sums of window w; step w + 1 receives them and sends their
    # result; step w + 2 receives that. So three steps take two messages in succession, each with
    # half of a window's bytes.
    latency_s = 2 / 3 * (n_windows * network.latency_us * 1e-6 + link_s / 2)
    fill_s = (encode + reduce + decode) * per_ns + 2 * len(levels) * network.latency_us * 1e-6
    rounds = math.ceil(math.log2(hosts * ranks))
    start_s = rounds * (network.latency_us + costs.message_us) * 1e-6
    start_s += hosts * ranks * _HEADER_BYTES / rate
    sent_messages = round(n_windows * n_messages)
    polling = min(1.0, costs.polling * max(1.0, ranks / costs.cores))
    return Exchange(link_s, cpu_s, latency_s, fill_s, start_s, sent_messages, polling)


def step(
    compute_s: float,
    exchange: Exchange,
    *,
    overlap: float = 2 / 3,
    last: float = 0.0,
    every: int = 1,
    free_cores: bool = True,
) -> Step:
    """Predict a training step.

    Args:
        compute_s: Seconds without communication.
        exchange: The exchange of all gradients.
        overlap: The share of `compute_s` in which gradients leave, that of backward().
        last: The share of the gradients that are in the last bucket, which does not overlap.
        every: Steps whose gradients are accumulated for one exchange: backward_passes_per_step.
        free_cores: Whether cores are free for the exchange while ranks compute.
    """
    exposed_s = max(exchange.total_s - overlap * compute_s, last * exchange.total_s)
    if not free_cores:
        exposed_s = max(exposed_s, exchange.busy_s)
    return Step(compute_s, exposed_s / every)


def eight_bits(fp16: Wire) -> Wire:
    """Return the costs of a hypothetical wire dtype of one byte, with a scale for every block.

    The package has none. Its kernels would read and write fewer bytes than those of fp16.
    """
    return replace(fp16, element_bytes=1 + 4 / _BLOCK_ELEMENTS)


def two_levels(hosts: int) -> tuple[int, int]:
    """Return two levels such that there are about as many groups as hosts in each group."""
    inner = next(n for n in range(math.isqrt(hosts), 0, -1) if hosts % n == 0)
    return inner, hosts // inner
