"""The interface of transports: everything that the layers above use, whatever the transport.

A `Transport` moves bytes between ranks; its `members`, a group of the core, know who they are, and
which of them live. No layer above asks which transport it has (`tests/test_layers.py`). A feature
that only some transports have is an attribute that is None on the others (`queued`,
`stall_detector`), or a method with a default: `reduce_in_place` is `allreduce` where memory is not
shared. The op, wire dtype, factors, divisor and weights of a reduction are one `Reduction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from horo_lite import _native

if TYPE_CHECKING:
    from horo_lite.transports.shm import SharedMemory

__all__ = [
    "Division",
    "Header",
    "HostTransport",
    "QueuedReductions",
    "Reduction",
    "Transport",
    "parts_of",
]


class Header(NamedTuple):
    """A rank's contribution to an `agree`."""

    digest: int
    """A hash, of at most 63 bits, of everything that must be the same on all ranks."""
    count: int  # type: ignore[assignment]  # hides tuple's method of that name
    """A number that may differ between ranks, such as a size."""
    weight: float
    """This rank's weight in a weighted average."""


class Reduction(NamedTuple):
    """The arithmetic of an all-reduce: reduced(prescale * w[r] * x over ranks r) * scale / divisor.

    A named tuple, since every all-reduce creates one: a frozen dataclass takes twice as long.
    """

    op: str
    """As `Op.value` ("sum", "average", ...), or "weighted average"."""
    wire: str = "none"
    """The wire format of wider floating point numbers: one of `arguments.WIRES`."""
    prescale: float = 1.0
    scale: float = 1.0
    divisor: float = 1.0
    weights: Sequence[float] = ()
    """One per rank, or empty if all are 1. A contribution with weight 0 counts as zeros."""

    @classmethod
    def of(
        cls, op: str, wire: str, prescale: float, scale: float, given: Sequence[float]
    ) -> Reduction:
        """Return the arithmetic with the ranks' weights `given`, which are in their headers."""
        weights, divisor = _native.weighting(op, given)
        return cls(op, wire, prescale, scale, divisor, weights)


Division: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""For each rank, which elements of each tensor belong to it, from begin to end, in C order."""


def parts_of(tensors: _native.Tensors, division: Division) -> list[_native.Tensors]:
    """Return what each rank receives of a reduction's results; of an empty division, what all do.

    With a division, the tensors must be in C order.
    """
    return [tensors.elements(ranges) for ranges in division] or [tensors]


class QueuedReductions(Protocol):
    """Reductions that return when the GPU's work is queued, without agreeing on them before.

    A `Watchdog` compares concurrently whether all ranks queue the same.
    """

    def can_reduce(
        self, tensors: _native.Tensors, reduction: Reduction, weight: float | None
    ) -> bool:
        """Return whether `reduce` can do this, which is the same on all ranks that agree."""

    def reduce(
        self,
        tensors: _native.Tensors,
        reduction: Reduction,
        weight: float | None,
        division: Division = (),
    ) -> None:
        """Reduce like `allreduce`; divide averages by the sum of all ranks' weights, or by size.

        `weight` is this rank's; the reduction has neither weights nor a divisor.
        """


class Transport(ABC):
    """Communication between a set of ranks. All of them make the same calls in the same order.

    Only `agree` checks whether they do; it is called before any other operation. If a peer dies,
    leaves or gives up while this rank waits for it, the call raises PeerLostError.
    """

    name: str
    members: _native.RankGroup
    """Who the ranks are, and which have died, left or given up; how this one does so."""
    rank: int
    size: int
    ranks: Sequence[int]
    """The ranks' numbers in the world, which are used in messages."""
    here: Sequence[int]
    """Those of `range(size)` that are on this rank's host, in order."""
    stall_detector: _native.StallDetector | None = None
    """Records which rank waits for which; None if no rank can wait."""
    engine: _native.Engine | None = None
    """What matches the operations, if `new_engine` was called."""
    native_group: _native.ShmGroup | None = None
    """The transport's C++ group, if all ranks are on one host."""
    reads_sources = False
    """Whether `allreduce` reads contributions from `Tensors.read_from`, if set."""
    shares_memory = False
    """Whether all ranks are on one host, and can access each other's `SharedMemory`."""

    @property
    def host(self) -> Transport:
        """The transport for tensors in host memory: this one, unless it is for a GPU."""
        return self

    @property
    def queued(self) -> QueuedReductions | None:
        """Queues reductions on a GPU without agreeing on each; None if that is impossible."""
        return None

    @property
    def label(self) -> str:
        """The name of the operation that began last."""
        return self.members.label

    @abstractmethod
    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        """Wait until all ranks are in this call, and return everyone's header in rank order.

        `label` names the operation in error messages and stall reports.
        """

    @abstractmethod
    def allreduce(
        self, tensors: _native.Tensors, reduction: Reduction, division: Division = ()
    ) -> None:
        """Leave the result of the reduction in every tensor.

        With a `division`, the same on all ranks, only in what it gives this rank; the rest is
        undefined afterwards, and fewer bytes are sent.
        """

    def reduce_in_place(
        self,
        tensors: _native.Tensors,
        memory: SharedMemory,
        reduction: Reduction,
        division: Division = (),
    ) -> None:
        """Reduce like `allreduce`, tensors at the same offsets in every rank's shared memory.

        The reduction has wire "none", no prescale and no weights.
        """
        self.allreduce(tensors, reduction, division)

    def reduce_scatter(
        self, parts: Sequence[_native.Tensors], result: _native.Tensors, reduction: Reduction
    ) -> None:
        """Reduce all ranks' contributions for this one into `result`, in host memory.

        parts[r] is this rank's contribution for rank r, which remains unchanged.
        """
        self.members.reduce_scatter(list(parts), result, *reduction)

    @abstractmethod
    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        """Copy the root's tensors to those of all ranks."""

    @abstractmethod
    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        """Receive in receive[r] what rank r sends, for each other rank r; leave this rank's."""

    @abstractmethod
    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        """Receive in receive[r] rank r's send[this rank], for each other rank r; leave this rank's.

        n_bytes[s][d] is the number of bytes that rank s sends to rank d, known to all.
        """

    def new_engine(
        self, explain: Callable[[str, list[str], list[int]], str]
    ) -> _native.Engine | None:
        """Match the ranks' operations over this transport from now on; only they may use it then.

        `explain` returns the text of a mismatch. Return None if this is the only rank. Every rank
        calls it.
        """
        return None

    def check_matched(self, label: str) -> None:
        """Assert that this is in an operation that the engine, if there is one, has matched.

        Otherwise its messages and those of the engine would be taken for each other.
        """
        assert self.engine is None or self.engine.drives_here, (
            f"{label}: not in a matched operation"
        )

    def close(self) -> None:  # noqa: B027
        """Release the transport's resources."""


class HostTransport(Transport):
    """A transport for host memory, over a group of the core."""

    reads_sources = True

    def __init__(
        self,
        members: _native.RankGroup,
        ranks: Sequence[int],
        stall_detector: _native.StallDetector | None,
    ) -> None:
        self.members = members
        self.rank = members.rank
        self.size = members.size
        self.ranks = ranks
        self.here = range(self.size)
        self.stall_detector = stall_detector

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        self.check_matched(label)
        return [Header(*header) for header in self.members.agree(label, digest, count, weight)]

    def allreduce(
        self, tensors: _native.Tensors, reduction: Reduction, division: Division = ()
    ) -> None:
        if division:
            parts = parts_of(tensors, division)
            self.reduce_scatter(parts, parts[self.rank], reduction)
        else:
            self.members.allreduce(tensors, *reduction)

    def new_engine(
        self, explain: Callable[[str, list[str], list[int]], str]
    ) -> _native.Engine | None:
        if self.size == 1:
            return None
        self.engine = engine = _native.Engine.over(self.members, list(self.ranks), explain)
        if self.stall_detector is not None:
            engine.watched_by(self.stall_detector)
        return engine
