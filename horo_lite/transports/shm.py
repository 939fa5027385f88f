"""The ranks of one host, through shared memory: see csrc/shm_group.cpp."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.transports import Header

if TYPE_CHECKING:
    from horo_lite.arrays import Array
    from horo_lite.collectives import Group


class ShmTransport:
    """A transport over a native group, whose ranks are processes of one host (or threads)."""

    name = "shm"

    def __init__(
        self,
        group: _native.ShmGroup,
        ranks: Sequence[int] | None = None,
        lookout: _native.Lookout | None = None,
    ) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.ranks = range(group.size) if ranks is None else ranks
        self.lookout = lookout

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

    def reduce_in_place(
        self,
        tensors: _native.Tensors,
        shared: SharedMemory,
        *,
        op: str,
        scale: float,
        divisor: float,
    ) -> None:
        """As `allreduce`, for tensors that lie in `shared`, at the same place on all ranks."""
        self.group.reduce_in_place(tensors, op, scale, divisor, shared.distances)

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


class SharedMemory:
    """Memory that all ranks of a group see, a region of `n_bytes` for each.

    `number` is how many the group had before, alike on all ranks; `arrays`, filled by whoever lays
    the memory out, are what lies in this rank's region, by offset.
    """

    def __init__(self, segment: _native.Segment, n_bytes: int, group: Group) -> None:
        self._segment = segment
        self._n_bytes = n_bytes
        self._begin = group.rank * n_bytes
        self.distances = [(r - group.rank) * n_bytes for r in range(group.size)]
        self.arrays: dict[int, Array] = {}
        self.number = _n_memories[group] = _n_memories.get(group, 0) + 1
        _memories.setdefault(group, WeakValueDictionary())[self.number] = self
        _segments.add(segment)

    def array(self, begin: int, n_bytes: int) -> NDArray[np.uint8]:
        """A part of this rank's region, which lives as long as somebody holds such a part."""
        return self._segment.array(self._begin + begin, n_bytes)

    def offsets(self, tensors: _native.Tensors) -> tuple[int, ...] | None:
        """Where in this rank's region the tensors begin; None where one lies elsewhere."""
        start = self._segment.address + self._begin
        offsets = tuple(address - start if n else 0 for address, n in tensors.buffers())
        inside = all(0 <= offset < self._n_bytes for offset in offsets)
        return offsets if inside else None


def share_memory(group: Group, n_bytes: int) -> SharedMemory | None:
    """Memory that all ranks of `group` see; None, on every rank, where they cannot have any.

    Called by every rank with the same `n_bytes`, of which each gets as many. None if the ranks are
    on several hosts, the system refuses, or the sizes differ.
    """
    if group.size == 1 or not all(isinstance(t, ShmTransport) for t in group.transports()):
        return None
    n_bytes = -(-n_bytes // _PAGE) * _PAGE  # no cache line belongs to two ranks
    segment = where = None
    try:
        if group.rank == 0:
            segment = _native.Segment.create(group.size * n_bytes)
            where = os.getpid(), segment.fd, segment.token
    except OSError:
        pass
    where = group.broadcast_object(where, name="shared memory")
    try:
        if segment is None and where is not None:
            segment = _native.Segment.open(where[0], where[1], group.size * n_bytes, where[2])
    except (OSError, RuntimeError):
        pass
    if not all(group.allgather_object(segment is not None, name="shared memory")):
        return None
    assert segment is not None
    return SharedMemory(segment, n_bytes, group)


def memory_of(group: Group, number: int) -> SharedMemory | None:
    """The group's memory of that number; None if this rank has dropped it."""
    return _memories[group].get(number)


_PAGE = 4096
_n_memories: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_memories: WeakKeyDictionary[Group, WeakValueDictionary[int, SharedMemory]] = WeakKeyDictionary()
_segments: WeakSet[_native.Segment] = WeakSet()


def _make_private() -> None:
    """A forked child's writes are seen by no rank, as with any other memory."""
    for segment in _segments:
        segment.make_private()


os.register_at_fork(after_in_child=_make_private)
