"""How long an exchange and a training step should take: a model of a few formulas.

It counts what one all-reduce of the package does (csrc/hosts/hosts_allreduce.h, csrc/shm): the
bytes on a link, the work of a host's cores, the messages, and what the first and the last window
cannot hide. docs/scaling.md names the source of every term, and how far it is off.
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
_BLOCK_ELEMENTS = 1024  # what a share consists of
_HEADER_BYTES = 32  # of a rank's part in the handshake


@dataclass(frozen=True)
class Wire:
    """A wire dtype, and what a core needs for a float32 element of it, in nanoseconds."""

    element_bytes: float
    """On the wire, with its part of the block's scale."""
    encode_ns: float
    reduce_ns: float
    """For one rank's, or one host's, contribution to an element of a sum."""
    decode_ns: float


@dataclass(frozen=True)
class Costs:
    """What work takes on a host."""

    cores: float
    """Of a host, for its ranks."""
    tcp_ns: float
    """Time of a core to send a byte and to receive one."""
    message_us: float
    """Time of a core for a message, sent and received, beside its bytes."""
    crowding: float
    """How much more work takes where very many ranks share a core: they poll, and empty caches."""
    polling: float
    """The share of a core that a rank takes while it waits for other hosts."""
    wires: Mapping[str, Wire]

    @staticmethod
    def read(data: Mapping[str, Any]) -> Costs:
        """Return what `data` was made of by `dataclasses.asdict`."""
        wires = {name: Wire(**wire) for name, wire in data["wires"].items()}
        return Costs(**{**data, "wires": wires})

    def data(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    def slowdown(self, ranks: int) -> float:
        """Return how much longer so many ranks of a host take than each would alone."""
        shared = max(1.0, ranks / self.cores)
        return shared * (1 + self.crowding * (1 - 1 / shared))


@dataclass(frozen=True)
class Network:
    """What joins the hosts."""

    gbit: float
    """Rate of a host's link in each direction, in 10^9 bits a second."""
    latency_us: float
    """Until the first byte of a message arrives, with the MPI library's part."""
    flow_gbit: float | None = None
    """Of one TCP connection, where that is limited."""
    framing: float = 1538 / 1448
    """Bytes on an Ethernet per byte of a TCP stream."""
    largest_message: int = 60 << 10
    """Longer messages are cut into such (Open MPI: see transports/mpi/point_to_point.py)."""


class Exchange(NamedTuple):
    """The predicted parts of one all-reduce."""

    link_s: float
    """All bytes, at the rate of the link."""
    cpu_s: float
    """All work, by as many cores as there are, or as there are ranks."""
    latency_s: float
    """All windows, if nothing but messages took time: two after each other for every three."""
    fill_s: float
    """Of the first and the last window, what nothing hides."""
    start_s: float
    """The handshake."""
    n_messages: int
    """Sent by a rank, of those that send most."""
    polling: float
    """Of each of a host's cores, or as many as it has ranks: the share that waiting takes."""

    @property
    def total_s(self) -> float:
        """The time that the all-reduce takes.

        The windows overlap link and cores, but not perfectly: a core that works on one window is
        late for another's messages. The longer of the two counts, and the other to the extent that
        it comes near it. While messages are on their way, both are idle: a link with so much
        latency that the windows under way cannot fill it sets the pace alone.
        """
        paced_s = max(math.hypot(self.link_s, self.cpu_s), self.latency_s)
        return paced_s + self.fill_s + self.start_s

    @property
    def busy_s(self) -> float:
        """What it takes of cores that compute at the same time."""
        return self.cpu_s + self.polling * (self.total_s - self.cpu_s)


class Step(NamedTuple):
    """A predicted training step, on average where not every one exchanges."""

    compute_s: float
    exposed_s: float
    """What the exchange adds."""

    @property
    def total_s(self) -> float:
        """Both."""
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """The share of the time in which ranks compute: 1 where scaling is linear."""
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
        n_elements: Of every rank.
        hosts: How many.
        ranks: Of each host.
        wire: How they travel.
        costs: Of a host.
        network: Between the hosts.
        levels: What the package does not do: hosts exchange in groups of `levels[0]`, then each
            host with its like in other groups, and so on. The product is `hosts`.
    """
    levels = levels or (hosts,)
    if math.prod(levels) != hosts:
        raise ValueError(f"{levels} are no levels of {hosts} hosts")
    if hosts * ranks == 1 or n_elements == 0:
        return Exchange(0, 0, 0, 0, 0, 0, 0)
    per_ns = costs.slowdown(ranks) * 1e-9  # seconds, for work of one rank
    if hosts == 1:
        others = (ranks - 1) / ranks
        work = others * (wire.encode_ns + wire.decode_ns) + wire.reduce_ns
        return Exchange(0, n_elements * work * per_ns, 0, 0, 0, 0, 0)

    # Shares consist of blocks. Where there are more shares than blocks, some ranks have none.
    all_bytes = n_elements * wire.element_bytes
    window = min(window_bytes(hosts, ranks), all_bytes)
    n_windows = all_bytes / window
    block = min(_BLOCK_ELEMENTS * wire.element_bytes, window)
    per_host = window / block / hosts  # blocks
    parts = min(float(ranks), max(1.0, per_host))  # the ranks of a host that have some

    # Bytes: what a ring sends, over as many connections as there are pairs of ranks. A host that
    # owns a block sends its sum to all others, also where there is none for each of them.
    sent = (hosts - 1) / hosts * (1 + max(1.0, 1 / per_host)) * all_bytes
    flows = parts * (hosts - 1) * (network.flow_gbit or math.inf)
    rate = min(network.gbit, flows) * 1e9 / 8
    link_s = sent * network.framing / rate

    # Messages: in each window to every other host of a level its sum and its result, for every
    # part.
    n_messages, share = 0.0, window / parts
    reduced = ranks / parts if ranks > 1 else 0.0  # contributions added, per element of a window
    for size in levels:
        reduced += share / window
        share /= size
        pieces = math.ceil(max(share, block) / network.largest_message)
        n_messages += (size - 1) * pieces * (1 + min(1.0, share / block))

    # Work in a window of a rank that has a part.
    elements = window / wire.element_bytes
    encode, decode = elements * wire.encode_ns, elements * wire.decode_ns
    reduce = elements * reduced * wire.reduce_ns
    carry = sent / n_windows / parts * costs.tcp_ns
    carry += n_messages * costs.message_us * 1e3
    cpu_s = n_windows * (encode + reduce + carry + decode) * per_ns

    # Step w of the pipeline sends the sums of window w; step w + 1 receives them and sends their
    # result; step w + 2 receives that. So three steps take two messages after each other, each of
    # which has half of a window's bytes.
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
        exchange: Of all gradients.
        overlap: The share of it during which gradients leave: backward()'s.
        last: The share of the gradients that are in the last bucket, which nothing hides.
        every: Steps whose gradients are accumulated for one exchange: backward_passes_per_step.
        free_cores: Whether cores are left for the exchange while ranks compute.
    """
    exposed_s = max(exchange.total_s - overlap * compute_s, last * exchange.total_s)
    if not free_cores:
        exposed_s = max(exposed_s, exchange.busy_s)
    return Step(compute_s, exposed_s / every)


def eight_bits(fp16: Wire) -> Wire:
    """Return what a wire dtype of one byte, and a scale for every block, should cost.

    The package has none. Its kernels would read and write fewer bytes than those of fp16.
    """
    return replace(fp16, element_bytes=1 + 4 / _BLOCK_ELEMENTS)


def two_levels(hosts: int) -> tuple[int, int]:
    """Return the levels of groups of which there are about as many as each has hosts."""
    inner = next(n for n in range(math.isqrt(hosts), 0, -1) if hosts % n == 0)
    return inner, hosts // inner
