"""A world of size 1, without communication."""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite import _native
from horo_lite.transports.interface import Division, Header, Reduction, Transport


class SoloTransport(Transport):
    """The transport of a single rank."""

    name = "solo"
    rank = 0
    size = 1
    here = (0,)

    def __init__(self, ranks: Sequence[int] = (0,)) -> None:
        self.ranks = ranks
        (self.members,) = _native.thread_group(1)

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        return [Header(digest, count, weight)]

    def allreduce(
        self, tensors: _native.Tensors, reduction: Reduction, division: Division = ()
    ) -> None:
        if not is_identity(reduction):
            self.members.allreduce(tensors, *reduction._replace(wire="none"))

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        pass

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        pass

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        pass


def is_identity(reduction: Reduction) -> bool:
    """Return whether the reduction leaves one rank's tensors unchanged."""
    return reduction.prescale == reduction.scale == 1.0
