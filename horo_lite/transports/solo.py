"""A world of one: nothing travels."""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite import _native
from horo_lite.transports import Header


class SoloTransport:
    """The transport of a single rank."""

    name = "solo"
    rank = 0
    size = 1
    lookout = None

    def __init__(self, ranks: Sequence[int] = (0,)) -> None:
        self.ranks = ranks

    @property
    def host(self) -> SoloTransport:
        return self

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        return [Header(digest, count, weight)]

    def allreduce(
        self,
        tensors: _native.Tensors,
        *,
        op: str,
        wire: str,
        prescale: float,
        scale: float,
        divisor: float,
    ) -> None:
        # Where there is nothing to compute, it should still be an error to ask for what has no
        # meaning on several ranks.
        _native.check_reducible(tensors, op)
        if prescale * scale != divisor:
            (alone,) = _native.thread_group(1)
            alone.allreduce(tensors, op, "none", prescale, scale, divisor)

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

    def abandon(self, reason: str) -> None:
        pass

    def leave(self, reason: str) -> None:
        pass

    def silent(self) -> list[int]:
        return []

    def first_to_tell(self) -> bool:
        return True

    def close(self) -> None:
        pass
