"""The ranks of one host, through shared memory: see csrc/shm_group.cpp."""

from __future__ import annotations

from collections.abc import Sequence

from horo_lite import _native
from horo_lite.transports import Header


class ShmTransport:
    """A transport over a native group, whose ranks are processes of one host (or threads)."""

    name = "shm"

    def __init__(self, group: _native.ShmGroup, ranks: Sequence[int] | None = None) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.ranks = range(group.size) if ranks is None else ranks

    @property
    def host(self) -> ShmTransport:
        return self

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        return [Header(*header) for header in self.group.agree(label, digest, count, weight)]

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
        self.group.allreduce(tensors, op, wire, prescale, scale, divisor)

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        sizes = [tensors.nbytes if r == root else 0 for r in range(self.size)]
        if self.rank == root:
            self.group.exchange([tensors], sizes, [])
        else:
            self.group.exchange([], sizes, [(root, 0, tensors)])

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        sizes = [send.nbytes if r == self.rank else receive[r].nbytes for r in range(self.size)]
        wanted = [(r, 0, receive[r]) for r in range(self.size) if r != self.rank]
        self.group.exchange([send], sizes, wanted)

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        # A rank's stream is what it sends, in rank order; its part for itself need not travel.
        sizes = [sum(row) - row[source] for source, row in enumerate(n_bytes)]
        wanted = [
            (s, sum(n_bytes[s][d] for d in range(self.rank) if d != s), receive[s])
            for s in range(self.size)
            if s != self.rank
        ]
        stream = [send[d] for d in range(self.size) if d != self.rank]
        self.group.exchange(stream, sizes, wanted)

    def abandon(self, reason: str) -> None:
        self.group.abandon(reason)

    def leave(self, reason: str) -> None:
        self.group.leave(reason)

    def first_to_tell(self) -> bool:
        return self.group.first_to_tell()

    def close(self) -> None:
        pass
