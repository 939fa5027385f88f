"""The operations of a group of ranks: one frozen `Call` per operation.

A Call holds what must be the same on every rank, including options. A `Part` is one rank's
contribution: its arrays, its weight. `Group.run` executes a Call with this rank's Part when all
ranks have called it; `Group.submit` returns at once, and it is executed when all have submitted it.
Either way the engine matches the ranks' Calls, and compares what must be the same. A rank
that waits in join() receives the Call, and takes part with neutral arrays. The rest of the package
uses operations only through these classes.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native, arguments
from horo_lite.collectives.arrays import Array, Memory
from horo_lite.collectives.participation import ArraySpec, neutral, specs_of
from horo_lite.errors import printable
from horo_lite.transports.agreement import (
    StandIn,
    allgather_bytes,
    allgather_row,
    allocated,
    digest_of,
    needs_all,
)
from horo_lite.transports.interface import Header

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.transports import Transport
    from horo_lite.transports.shm import SharedMemory

T = TypeVar("T")
Finish: TypeAlias = Callable[[], T]
"""What the calling thread runs after the exchange; it returns the result."""


@dataclass
class Part:
    """One rank's contribution to a Call.

    Attributes:
        memory: Its arrays.
        weight: Its number of samples, in an average weighted by them.
        splits: How many rows of its array go to each rank, in an all-to-all.
        data: Bytes, in operations on objects.
        number: What the others learn of this rank in `Compare`.
        shared: Memory that the ranks of a host share, in which its arrays may be.
        follows: False for a rank that waits to learn what the others do; see `Exchange`.
        label: The operation's name in messages and records. The group sets it.
    """

    memory: Memory = field(default_factory=lambda: Memory([], fresh=True))
    weight: float | None = None
    splits: NDArray[np.int64] | None = None
    data: bytes = b""
    number: int = 0
    shared: SharedMemory | None = None
    follows: bool = True
    label: str = ""
    offsets: tuple[int, ...] | None = None  # in `shared`, if all arrays are known to be there

    @property
    def own_weight(self) -> float:
        """Its weight: 1 in operations without weights."""
        return 1.0 if self.weight is None else self.weight

    @property
    def changes(self) -> _native.Tensors | None:
        """The caller's arrays that the operation changes in place."""
        return None if self.memory.fresh else self.memory.tensors


@dataclass(frozen=True)
class Call(ABC, Generic[T]):
    """One operation among the ranks of a group: what must be the same on all of them.

    Attributes:
        name: The caller's name for it, the same on every rank.
    """

    name: str | None = None

    kind: ClassVar[str]
    """The operation's name in messages and records."""

    def __post_init__(self) -> None:
        arguments.text("name", self.name)

    @property
    def label(self) -> str:
        return self.kind if self.name is None else f"{self.kind} '{self.name}'"

    @property
    def tensor_names(self) -> Sequence[str]:
        """The names of the arrays, if they have any."""
        return ()

    def prepare(self, part: Part) -> None:
        """Do what can fail on one rank alone, before the ranks compare anything."""

    def check(self, part: Part) -> None:
        """Raise ValueError for arguments that are invalid, and that all ranks have compared."""

    def contract(self, part: Part) -> object:
        """Return everything that must be the same on all ranks."""
        return self.describe(part)

    def describe(self, part: Part) -> str:
        """Return the contract as text, an item per line, for a MismatchError."""
        return part.label

    def count(self, part: Part) -> int:
        """Return a number that all ranks must know, and that may differ, such as a size."""
        return 0

    @abstractmethod
    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[T]:
        """Execute the operation on all ranks, which have been compared. On GPUs: queue it."""

    def queue(self, part: Part, transport: Transport) -> Finish[T] | None:
        """Queue the operation on a GPU, if all ranks can do so without being compared before."""
        return None

    def submit(
        self,
        part: Part,
        engine: _native.Engine,
        transport: Transport,
        record: _native.Operation | None,
    ) -> tuple[_native.Job, Finish[T]]:
        """Have the engine run it when all ranks have submitted it; the job's name is the label."""
        memory = part.memory
        if memory.stream is not None:
            memory.use_c_order()
            memory.begin()
        job = engine.submit_call(
            part.label,
            digest_of(self.contract(part)),
            lambda headers: self._run_matched(part, transport, headers),
            self.count(part),
            part.own_weight,
            lambda: printable(self.describe(part)),
            lambda joined: self.participation(part, transport.ranks, joined),
            record,
            self.changes(part),
        )
        return job, lambda: cast("Finish[T]", job.value())()

    def changes(self, part: Part) -> _native.Tensors | None:
        """Return the caller's memory that no other operation in flight may change."""
        return part.changes

    def _run_matched(
        self, part: Part, transport: Transport, headers: Sequence[tuple[int, int, float]]
    ) -> Finish[T]:
        """Execute it, on the engine's thread of every rank."""
        self.check(part)
        stream = part.memory.stream
        used = transport if stream is None else stream.transport_of_all()
        return self.move(part, used, [Header(*header) for header in headers])

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        """Describe how ranks that have `joined` take part; see `stand_in`.

        Args:
            part: This rank's part.
            ranks: The world ranks of the group.
            joined: The ranks that have joined.

        Raises:
            MismatchError: They cannot take part in this operation.
        """
        return needs_all(part.label)(joined)

    def stand_in(
        self,
        part: Part,
        joined: Sequence[int],
        weight: float = 1.0,
        count: int = 0,
        **own: Any,
    ) -> StandIn:
        """Have the ranks that joined make the same Call, each with a `part_that_changes_nothing`.

        They receive the arrays' `specs` (by default those of this rank) and the arguments `own`,
        which are specific to this kind of Call. `weight` and `count` are those of their parts.
        """
        specs = own.pop("specs", None) or specs_of(part.memory.tensors)
        try:
            return count, weight, pickle.dumps((self, part.label, specs, own))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return needs_all(f"{part.label} ({error})")(joined)

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], own: dict[str, Any]
    ) -> Part:
        """Return a neutral Part, for a rank that has joined."""
        nothing = [neutral(spec) for spec in specs]
        return Part(group.memory(nothing))


# --- moving data


@dataclass(frozen=True)
class AllGather(Call[Array]):
    """Gather the rows of all ranks, in rank order, in a new array."""

    kind = "allgather"

    def describe(self, part: Part) -> str:
        return f"{part.label}\n{rows_and_row(part.memory)[1]}"

    def count(self, part: Part) -> int:
        return rows_and_row(part.memory)[0]

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[Array]:
        rows = part.memory
        ends = np.cumsum([header.count for header in headers]).tolist()
        n_bytes = [ends[-1] * _row_bytes(rows)] * transport.size
        everyone, whole = allocated(transport, part.label, n_bytes, lambda: rows.empty(ends[-1]))
        parts = [
            whole.rows([(end - header.count, end)])
            for header, end in zip(headers, ends, strict=True)
        ]
        rows.begin()
        rows.copy(rows.tensors, parts[transport.rank])
        transport.allgather(parts[transport.rank], parts)

        def finish() -> Array:
            rows.end()
            return everyone

        return finish

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        if part.memory.stream is not None:
            return needs_all(part.label)(joined)
        ((dtype, shape),) = specs_of(part.memory.tensors)
        return self.stand_in(part, joined, specs=[(dtype, (0, *shape[1:]))])

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], own: dict[str, Any]
    ) -> Part:
        return Part(group.rows(neutral(specs[0])))


@dataclass(frozen=True)
class Broadcast(Call[None]):
    """Copy one rank's arrays, in place, to all ranks.

    Arrays may share memory (tied weights), if they do so in the same way on all ranks.

    Attributes:
        root_rank: The rank whose values all receive, as a rank of the group.
        names: The arrays' names, compared, and used in messages.
    """

    root_rank: int = 0
    names: Sequence[str] = ()

    kind = "broadcast"

    @property
    def tensor_names(self) -> Sequence[str]:
        return self.names

    def contract(self, part: Part) -> object:
        memory = part.memory
        # An array shared on one rank and separate on another cannot hold the same values.
        shared = tuple(memory.overlaps)
        return part.label, self.root_rank, memory.tensors.signature, tuple(self.names), shared

    def describe(self, part: Part) -> str:
        shared = [f"{i} and {k} ({n} bytes apart)" for i, k, n, _ in part.memory.overlaps]
        return "\n".join(
            [
                part.label,
                f"root_rank {self.root_rank}",
                f"arrays that share memory: {', '.join(shared) or 'none'}",
                *part.memory.describe(self.names),
            ]
        )

    def count(self, part: Part) -> int:
        return part.memory.tensors.layout

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[None]:
        memory = part.memory
        if any(header.count != headers[0].count for header in headers):
            memory.use_c_order()
        memory.begin()
        transport.broadcast(memory.tensors, self.root_rank)

        def finish() -> None:
            memory.end()
            memory.write_back()

        return finish

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        if ranks[self.root_rank] in joined or part.memory.stream is not None:
            return needs_all(f"{part.label} from rank {ranks[self.root_rank]}")(joined)
        return self.stand_in(part, joined, overlaps=part.memory.overlaps)

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], own: dict[str, Any]
    ) -> Part:
        part = super().part_that_changes_nothing(group, specs, own)
        part.memory.overlaps = own["overlaps"]  # as on the other ranks; nothing is kept here
        return part


@dataclass(frozen=True)
class AllGatherInPlace(Call[None]):
    """Copy each array, in place, from the rank that owns it to all ranks.

    Attributes:
        owners: The owner of each array, which has dimensions, as a rank of the group.
        names: The arrays' names, compared, and used in messages.
    """

    owners: Sequence[int] = ()
    names: Sequence[str] = ()

    kind = "allgather_"

    @property
    def tensor_names(self) -> Sequence[str]:
        return self.names

    def contract(self, part: Part) -> object:
        return part.label, part.memory.tensors.signature, tuple(self.owners), tuple(self.names)

    def describe(self, part: Part) -> str:
        arrays = part.memory.describe(self.names)
        owned = zip(arrays, self.owners, strict=True)
        return "\n".join([part.label, *(f"{array} of rank {owner}" for array, owner in owned)])

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[None]:
        memory, owners = part.memory, self.owners
        memory.use_c_order()
        memory.begin()
        n_rows = [memory.tensors.shape(i)[0] for i in range(len(owners))]
        parts = [
            memory.tensors.rows(
                [(0, n if owner == rank else 0) for n, owner in zip(n_rows, owners, strict=True)]
            )
            for rank in range(transport.size)
        ]
        transport.allgather(parts[transport.rank], parts)

        def finish() -> None:
            memory.end()
            memory.write_back()

        return finish


@dataclass(frozen=True)
class AllToAll(Call[tuple[Array, NDArray[np.int64]]]):
    """Send rows to each rank; return those received, in rank order, and how many from each."""

    kind = "alltoall"

    def describe(self, part: Part) -> str:
        return f"{part.label}\n{rows_and_row(part.memory)[1]}"

    def move(
        self, part: Part, transport: Transport, headers: Sequence[Header]
    ) -> Finish[tuple[Array, NDArray[np.int64]]]:
        assert part.splits is not None
        rows, counts = part.memory, part.splits
        table = allgather_row(transport, counts)
        received = table[:, transport.rank].copy()
        n_rows, row_bytes = int(received.sum()), _row_bytes(rows)
        n_bytes = (table.sum(axis=0) * row_bytes).tolist()
        result, whole = allocated(transport, part.label, n_bytes, lambda: rows.empty(n_rows))
        outgoing = _cut(rows.tensors, counts)
        incoming = _cut(whole, received)
        rows.begin()
        rows.copy(outgoing[transport.rank], incoming[transport.rank])
        transport.alltoall(outgoing, incoming, (table * row_bytes).tolist())

        def finish() -> tuple[Array, NDArray[np.int64]]:
            rows.end()
            return result, received

        return finish


@dataclass(frozen=True)
class Barrier(Call[None]):
    """Wait until all ranks have reached it."""

    kind = "barrier"

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[None]:
        return lambda: None

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        return self.stand_in(part, joined)


@dataclass(frozen=True)
class Compare(Call["list[Header]"]):
    """Compare a text between all ranks, and give each the numbers and weights of the others.

    Attributes:
        text: What must be the same on all ranks, an item per line.
        needs_all: Whether it is refused while ranks wait in join(); else these take part with
            `JOINED` as their number, and with weight 0.
    """

    text: str = ""
    needs_all: bool = True

    kind = "agree"
    JOINED: ClassVar[int] = -1

    @property
    def label(self) -> str:
        return self.name or self.kind

    def contract(self, part: Part) -> object:
        return self.label, self.text

    def describe(self, part: Part) -> str:
        return self.text or self.label

    def count(self, part: Part) -> int:
        return part.number

    def move(
        self, part: Part, transport: Transport, headers: Sequence[Header]
    ) -> Finish[list[Header]]:
        return lambda: list(headers)

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        if self.needs_all:
            return super().participation(part, ranks, joined)
        return self.stand_in(part, joined, weight=0.0, count=self.JOINED)

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], own: dict[str, Any]
    ) -> Part:
        return Part(number=self.JOINED, weight=0.0)


@dataclass(frozen=True)
class BroadcastBytes(Call["list[memoryview]"]):
    """Send one rank's data to every other rank.

    Attributes:
        root_rank: The rank whose data all receive, as a rank of the group.
        needs_all: Whether it is refused while ranks wait in join(); else only if the root does.
    """

    root_rank: int = 0
    needs_all: bool = True

    kind = "broadcast_object"

    def describe(self, part: Part) -> str:
        return f"{part.label}\nroot_rank {self.root_rank}"

    def count(self, part: Part) -> int:
        return len(part.data)

    def move(
        self, part: Part, transport: Transport, headers: Sequence[Header]
    ) -> Finish[list[memoryview]]:
        n_bytes = headers[self.root_rank].count
        memory = allocated(
            transport, part.label, [n_bytes] * transport.size, lambda: np.empty(n_bytes, np.uint8)
        )
        is_root = transport.rank == self.root_rank
        if is_root:
            memory[...] = np.frombuffer(part.data, np.uint8)
        transport.broadcast(_native.Tensors([memory]), self.root_rank)
        return lambda: [] if is_root else [memory.data]

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        if self.needs_all or ranks[self.root_rank] in joined:
            return super().participation(part, ranks, joined)
        return self.stand_in(part, joined)


@dataclass(frozen=True)
class AllGatherBytes(Call[list[bytes]]):
    """Gather every rank's data, in rank order, on every rank.

    Attributes:
        needs_all: Whether it is refused while ranks wait in join(); else these have no data.
    """

    needs_all: bool = True

    kind = "allgather_object"

    def count(self, part: Part) -> int:
        return len(part.data)

    def move(
        self, part: Part, transport: Transport, headers: Sequence[Header]
    ) -> Finish[list[bytes]]:
        sizes = [header.count for header in headers]
        everyone = allgather_bytes(transport, part.data, sizes, part.label)
        return lambda: everyone

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        if self.needs_all:
            return super().participation(part, ranks, joined)
        return self.stand_in(part, joined)


@dataclass(frozen=True)
class Outcome(AllGatherBytes):
    """Tell every rank what has failed on some ranks alone; costs a handshake if nothing has."""

    needs_all: bool = False

    kind = "outcome"

    @property
    def label(self) -> str:
        return self.name or self.kind


def gathered(
    group: Group,
    mine: object,
    name: str,
    *,
    needs_all: bool = True,
    run: Callable[[Any, Part], Any] | None = None,
) -> list[Any]:
    """Return what each rank of the group passes, except those that have joined. Collective.

    `run` executes it, by default that of the group.
    """
    call = AllGatherBytes(name, needs_all=needs_all)
    everyone = (run or group.run)(call, Part(data=pickle.dumps(mine)))
    return [pickle.loads(one) for one in everyone if one]


def rows_and_row(rows: Memory) -> tuple[int, str]:
    """Return the number of rows, and a description of their dtype and shape."""
    n_rows, *row = rows.tensors.shape(0)
    return n_rows, f"{rows.tensors.dtype(0)} rows of {row}"


def _row_bytes(rows: Memory) -> int:
    return prod(rows.tensors.shape(0)[1:]) * rows.tensors.itemsize(0)


def _cut(tensors: _native.Tensors, n_rows: Sequence[int] | NDArray[Any]) -> list[_native.Tensors]:
    ends = np.cumsum(n_rows).tolist()
    return [tensors.rows([(end - int(n), end)]) for n, end in zip(n_rows, ends, strict=True)]
