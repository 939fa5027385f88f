"""What the layers above use of a transport: all of it, so that they need to know no transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from horo_lite import _native

if TYPE_CHECKING:
    from horo_lite.transports.mpi.executor import MainThreadExecutor
    from horo_lite.transports.shm import SharedMemory

__all__ = ["Header", "OverHost", "QueuedReductions", "Reduction", "Transport"]


class Header(NamedTuple):
    """What each rank contributes to an `agree`."""

    digest: int
    """A hash of everything that must be alike on all ranks, at most 63 bits."""
    count: int  # type: ignore[assignment]  # hides tuple's method of that name
    """Something that may differ, such as a size."""
    weight: float
    """This rank's weight in a weighted average."""


class Reduction(NamedTuple):
    """The arithmetic of an all-reduce: reduced(prescale * w[r] * x over ranks r) * scale / divisor.

    A named tuple, since one is made for every all-reduce: a frozen dataclass takes twice as long.
    """

    op: str
    """As `Op.value` ("sum", "average", ...), or "weighted average"."""
    wire: str = "none"
    """What travels instead of wider floating point numbers: "none", "fp16" or "bf16"."""
    prescale: float = 1.0
    scale: float = 1.0
    divisor: float = 1.0
    weights: Sequence[float] = ()
    """One a rank, or none where all are 1. What is multiplied by 0 counts as zeros."""

    @classmethod
    def of(
        cls, op: str, wire: str, prescale: float, scale: float, given: Sequence[float]
    ) -> Reduction:
        """The arithmetic where the ranks' weights are `given`: those of their headers."""
        weights, divisor = _native.weighting(op, given)
        return cls(op, wire, prescale, scale, divisor, weights)


ReduceScatter = Callable[[Sequence[_native.Tensors], _native.Tensors, Reduction], None]


class QueuedReductions(Protocol):
    """Reductions that return when the GPU's work is queued, and on which nobody has agreed before.

    Whether all ranks queue the same is compared beside them, by a `Watchdog`.
    """

    def only_queues(
        self, tensors: _native.Tensors, reduction: Reduction, weight: float | None
    ) -> bool:
        """Whether `reduce` does no more than that; else the ranks must agree on it before."""

    def reduce(self, tensors: _native.Tensors, reduction: Reduction, weight: float | None) -> None:
        """As `allreduce`; an average is divided by the sum of all ranks' weights, or by size.

        `weight` is this rank's; the reduction has neither weights nor a divisor.
        """


class Transport(ABC):
    """One way between a set of ranks. All of them make the same calls in the same order.

    Only `agree` finds out whether they do; it is called before anything else. A peer
    that dies, leaves or gives up while this rank waits for it raises PeerLostError.
    """

    name: str
    rank: int
    size: int
    ranks: Sequence[int]
    """The ranks' numbers in the world, as messages name them."""
    stall_detector: _native.StallDetector | None = None
    """Records which rank waits for which; None where no rank can wait."""
    executor: MainThreadExecutor | None = None
    """Makes all MPI calls in one thread, where MPI does not grant THREAD_MULTIPLE."""
    native_group: _native.ShmGroup | None = None
    """The C++ group behind the transport, where all ranks are on one host."""
    engine_group: _native.EngineGroup | None = None
    """What an engine reduces through without Python."""
    reads_sources = False
    """`allreduce` reads what tensors contribute where `Tensors.read_from` says."""
    shares_memory = False
    """All ranks are on one host, and see each other's `SharedMemory`."""

    @property
    def host(self) -> Transport:
        """The transport for tensors in the host's memory: this one, unless it is for a GPU's."""
        return self

    @property
    def queued(self) -> QueuedReductions | None:
        """How reductions are queued on a GPU without agreeing on each, where that is possible."""
        return None

    @property
    def label(self) -> str:
        """What the operation that began last is called."""
        return ""

    @property
    def reduce_scatter(self) -> ReduceScatter | None:
        """Leaves in a list of tensors the reduction of what all ranks have for this one.

        Given are what this rank has for each, which stays as it is, the result and the reduction.
        None where everything travels to every rank anyway: `allreduce` is then as good.
        """
        return None

    @abstractmethod
    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        """Wait until all ranks are in this call, and return everyone's header in rank order.

        `label` names the operation in error messages and stall reports.
        """

    @abstractmethod
    def allreduce(self, tensors: _native.Tensors, reduction: Reduction) -> None:
        """Leave the result of the reduction in every tensor."""

    def reduce_in_place(
        self, tensors: _native.Tensors, memory: SharedMemory, reduction: Reduction
    ) -> None:
        """As `allreduce`, for tensors at the same place in every rank's shared memory.

        The reduction has wire "none", no prescale and no weights.
        """
        self.allreduce(tensors, reduction)

    @abstractmethod
    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        """Leave in every tensor what the root's holds."""

    @abstractmethod
    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        """Leave in receive[r] what rank r sent, for each other rank r; the own one is untouched."""

    @abstractmethod
    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        """Leave in receive[r] what rank r had in send[this rank]; the own part is untouched.

        n_bytes[s][d] is what rank s sends to rank d, known to all.
        """

    def new_engine(
        self, direct: Transport, explain: Callable[[str, list[str], list[int]], str]
    ) -> _native.Engine | None:
        """Start the thread that runs asynchronous operations over this transport.

        `direct` is the same ranks' transport for direct calls, `explain` words a mismatch. None
        where this rank is alone. Every rank calls it.
        """
        return None

    def announce(self, what: str, expect_s: float) -> None:  # noqa: B027
        """Tell peers on other hosts that this rank will be late by so much; "": it is over."""

    def check_peer(self, peer: int, name: str) -> None:  # noqa: B027
        """Raise PeerLostError if `peer`, needed for `name`, has left, or any died or gave up.

        -1 for no peer in particular.
        """

    def has_left(self, peer: int, n_records: int) -> bool:
        """Whether that rank has left, having sent this one at most so many records of messages."""
        return False

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Make peers that wait for this rank, now or later, raise PeerLostError. Never blocks."""

    @abstractmethod
    def leave(self, reason: str) -> None:
        """Take part in nothing any more; peers that wait for this rank raise. Never blocks."""

    def given_up(self) -> bool:
        """Whether this rank has given the group up, or an operation of it has failed here."""
        return False

    def peer_pids(self, silent: bool) -> list[int]:
        """Process ids of this host's other ranks, alive or dead, that have not left.

        With `silent`, without those that have given up.
        """
        return []

    def claim_report(self) -> bool:
        """True for the first rank of the host that asks, so that one reports for all of them."""
        return True

    def peer_reports(self) -> bool:
        """Whether another rank of the host has claimed the report, and lives."""
        return False

    def close(self) -> None:  # noqa: B027
        """Give back what the transport holds."""


class OverHost(Transport):
    """A transport that does through another one, the host's, whatever it does not itself."""

    def __init__(self, host: Transport) -> None:
        self._host = host
        self.rank = host.rank
        self.size = host.size
        self.ranks = host.ranks
        self.stall_detector = host.stall_detector
        self.executor = host.executor

    @property
    def host(self) -> Transport:
        return self._host

    @property
    def label(self) -> str:
        return self._host.label

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        return self._host.agree(digest, count, weight, label=label)

    def allreduce(self, tensors: _native.Tensors, reduction: Reduction) -> None:
        self._host.allreduce(tensors, reduction)

    def reduce_in_place(
        self, tensors: _native.Tensors, memory: SharedMemory, reduction: Reduction
    ) -> None:
        self._host.reduce_in_place(tensors, memory, reduction)

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        self._host.broadcast(tensors, root)

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        self._host.allgather(send, receive)

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        self._host.alltoall(send, receive, n_bytes)

    def announce(self, what: str, expect_s: float) -> None:
        self._host.announce(what, expect_s)

    def check_peer(self, peer: int, name: str) -> None:
        self._host.check_peer(peer, name)

    def has_left(self, peer: int, n_records: int) -> bool:
        return self._host.has_left(peer, n_records)

    def abandon(self, reason: str) -> None:
        self._host.abandon(reason)

    def leave(self, reason: str) -> None:
        self._host.leave(reason)

    def given_up(self) -> bool:
        return self._host.given_up()

    def peer_pids(self, silent: bool) -> list[int]:
        return self._host.peer_pids(silent)

    def claim_report(self) -> bool:
        return self._host.claim_report()

    def peer_reports(self) -> bool:
        return self._host.peer_reports()
