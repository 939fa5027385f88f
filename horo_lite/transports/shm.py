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

    def silent(self) -> list[int]:
        return self.group.silent()

    def has_left(self, peer: int) -> bool:
        return self.group.has_left(peer)

    def check(self, peer: int, name: str) -> None:
        """PeerLostError if some rank died or gave up, or `peer`, needed for `name`, has left."""
        self.group.check_peers(name, peer)

    def first_to_tell(self) -> bool:
        return self.group.first_to_tell()

    def close(self) -> None:
        pass


class SharedMemory:
    """Memory of this rank, which the other ranks of a group see once they have met in `share`.

    `arrays`, filled by whoever lays the memory out, are what lies in it, by offset: alike on all
    ranks. Pages take memory when they are written. OSError where the system has none to give.
    """

    def __init__(self, n_bytes: int) -> None:
        self._segment = _native.Segment.create(n_bytes)
        self._n_bytes = n_bytes
        self._others: list[_native.Segment] = []
        self.arrays: dict[int, Array] = {}
        self.distances: list[int] = []  # how far each rank's memory is from this one's
        self.number = 0
        _segments.add(self._segment)

    def array(self, begin: int, n_bytes: int) -> NDArray[np.uint8]:
        """A part of it. The memory lives as long as somebody holds one."""
        return self._segment.array(begin, n_bytes)

    def offsets(self, tensors: _native.Tensors) -> tuple[int, ...] | None:
        """Where in it the tensors begin; None where one lies elsewhere."""
        start = self._segment.address
        offsets = tuple(address - start if n else 0 for address, n in tensors.buffers())
        inside = all(0 <= offset < self._n_bytes for offset in offsets)
        return offsets if inside else None

    def _open(self, everyone: list[tuple[int, int, int] | None], rank: int) -> bool:
        self._others, self.distances = [], []
        try:
            for r, where in enumerate(everyone):
                if where is None:
                    return False
                segment = self._segment
                if r != rank:
                    pid, descriptor, token = where
                    segment = _native.Segment.open(pid, descriptor, self._n_bytes, token)
                    segment.close_descriptor()
                    self._others.append(segment)
                self.distances.append(segment.address - self._segment.address)
        except (OSError, RuntimeError):
            return False
        return True


def share(group: Group, memory: SharedMemory | None) -> bool:
    """Whether the ranks of `group` see each other's memory from now on: the same on all of them.

    Called by every rank, with None where it has no memory; also a second time, for another group.
    False where one has none, its size differs, or the system does not let them see it.
    """
    where = None
    if memory is not None:
        where = os.getpid(), memory._segment.fd, memory._segment.token
    everyone = group.allgather_object(where, name="where shared memory is")
    is_open = memory is not None and memory._open(everyone, group.rank)
    if not all(group.allgather_object(is_open, name="who sees it")):
        return False
    assert memory is not None
    memory.number = _n_shared[group] = _n_shared.get(group, 0) + 1
    _shared.setdefault(group, WeakValueDictionary())[memory.number] = memory
    return True


def memory_of(group: Group, number: int) -> SharedMemory | None:
    """What the group has shared as the `number`-th; None if this rank has dropped it."""
    return _shared[group].get(number)


_n_shared: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_shared: WeakKeyDictionary[Group, WeakValueDictionary[int, SharedMemory]] = WeakKeyDictionary()
_segments: WeakSet[_native.Segment] = WeakSet()


def _make_private() -> None:
    """A forked child's writes are seen by no rank, as with any other memory."""
    for segment in _segments:
        segment.make_private()


os.register_at_fork(after_in_child=_make_private)
