"""Operations of torch's collectives in addition to the package's own.

Torch passes the memory for results, so nothing is allocated here, and everything that must be the
same on all ranks is known when an operation is submitted: the progress threads compare it, and
executing the operation is a barrier and a transfer of bytes. `all_reduce` is the package's own, for
which the progress thread needs no Python.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.collectives.calls import Call, Finish, Part
from horo_lite.errors import MismatchError
from horo_lite.torch.distributed.arguments import Access
from horo_lite.transports import Transport
from horo_lite.transports.agreement import allgather_row
from horo_lite.transports.interface import Header, Reduction

T = TypeVar("T")
_SUM = Reduction("sum")


@dataclass
class Buffers(Part):
    """The buffers from which one rank sends, and into which it receives.

    Attributes:
        send: The data for each rank, in rank order, or one item that is for all of them.
        receive: The memory for the data from each rank, in rank order.
    """

    send: Sequence[_native.Tensors] = ()
    receive: Sequence[_native.Tensors] = ()


@dataclass(frozen=True)
class Collective(Call[T]):
    """A collective; `terms` is what must be the same on all ranks, one item per line."""

    terms: str = ""

    access: ClassVar[Access]
    """What it reads and writes, if it moves tensors from some to others."""

    def contract(self, part: Part) -> object:
        return self._text

    def describe(self, part: Part) -> str:
        return f"{part.label}\n{self._text}"

    def changes(self, part: Part) -> None:
        return None  # the process group looks after that

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[T]:
        result = self.transfer(part, transport)
        return lambda: result

    @property
    def _text(self) -> str:
        return f"{self.kind}\n{self.terms}"

    @abstractmethod
    def transfer(self, part: Part, transport: Transport) -> T:
        """Execute it, after all ranks have agreed."""


@dataclass(frozen=True)
class Barrier(Collective[None]):
    """A barrier."""

    kind = "barrier"

    def transfer(self, part: Part, transport: Transport) -> None:
        """Do nothing: all ranks have submitted it."""


@dataclass(frozen=True)
class Broadcast(Collective[None]):
    """Copies the tensors of one rank to all ranks."""

    root: int = 0

    kind = "broadcast"

    def transfer(self, part: Part, transport: Transport) -> None:
        transport.broadcast(part.memory.tensors, self.root)


@dataclass(frozen=True)
class AllGather(Collective[None]):
    """Copies the tensors of each rank to all ranks. The terms contain the sizes of each."""

    kind = "all_gather"
    access = Access(writes_each=True)

    def transfer(self, part: Part, transport: Transport) -> None:
        assert isinstance(part, Buffers)
        (mine,) = part.send
        mine.copy_to(part.receive[transport.rank])
        transport.allgather(mine, part.receive)


@dataclass(frozen=True)
class ReduceScatter(Collective[None]):
    """Reduces the tensors that all ranks have for this one."""

    reduction: Reduction = _SUM

    kind = "reduce_scatter"
    access = Access(reads_each=True)

    def transfer(self, part: Part, transport: Transport) -> None:
        assert isinstance(part, Buffers)
        (result,) = part.receive
        transport.host.reduce_scatter(part.send, result, self.reduction)


@dataclass(frozen=True)
class AllToAll(Collective[None]):
    """Sends tensors from every rank to every other rank.

    Attributes:
        n_bytes: The number of bytes that rank s sends to rank d, as n_bytes[s][d], the same on all
            ranks; or empty if each rank knows only what it sends and receives itself.
    """

    n_bytes: Sequence[Sequence[int]] = ()

    kind = "all_to_all"
    access = Access(reads_each=True, writes_each=True)

    def transfer(self, part: Part, transport: Transport) -> None:
        assert isinstance(part, Buffers)
        n_bytes = self.n_bytes or _exchanged_sizes(part, transport)
        part.send[transport.rank].copy_to(part.receive[transport.rank])
        transport.alltoall(part.send, part.receive, n_bytes)


@dataclass(frozen=True)
class Gather(AllToAll):
    """Copies the tensors of each rank to one rank."""

    kind = "gather"
    access = Access(writes_each=True, written_at_root=True, is_even=True)


@dataclass(frozen=True)
class Scatter(AllToAll):
    """Sends tensors from one rank to each rank."""

    kind = "scatter"
    access = Access(reads_each=True, read_at_root=True, is_even=True)


@dataclass(frozen=True)
class GatherSparse(Collective["list[tuple[NDArray[np.int64], NDArray[np.uint8]]]"]):
    """Gathers the indices and values of each rank's sparse tensor on every rank.

    Indices are an array of `n_axes` rows, values an array of bytes.
    """

    n_axes: int = 0

    kind = "sparse all_reduce"

    def transfer(
        self, part: Part, transport: Transport
    ) -> list[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        assert isinstance(part, Buffers)
        (mine,) = part.send
        counts = np.array([n_bytes for _, n_bytes in mine.buffers()], np.int64)
        result = []
        for n_indices, n_values in allgather_row(transport, counts).tolist():
            columns = n_indices // (8 * self.n_axes)
            indices = np.empty((self.n_axes, columns), np.int64)
            result.append((indices, np.empty(n_values, np.uint8)))
        receive = [_native.Tensors(arrays) for arrays in result]
        mine.copy_to(receive[transport.rank])
        transport.allgather(mine, receive)
        return result


def _exchanged_sizes(part: Buffers, transport: Transport) -> list[list[int]]:
    """Return n_bytes[s][d]; raise MismatchError, on all ranks, if a rank expects other sizes."""
    mine = np.array([[each.nbytes for each in part.send], [each.nbytes for each in part.receive]])
    table = allgather_row(transport, mine)
    sent, expected = table[:, 0], table[:, 1].T
    if (sent != expected).any():
        s, d = np.argwhere(sent != expected)[0].tolist()
        raise MismatchError(
            f"ranks disagree on {part.label}: rank {transport.ranks[s]} sends {sent[s, d]} bytes "
            f"to rank {transport.ranks[d]}, which expects {expected[s, d]}: the input_split_sizes "
            "of each rank must be the output_split_sizes of the others"
        )
    return [[int(n) for n in row] for row in sent]
