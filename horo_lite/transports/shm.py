"""Shared memory between the ranks of one host: see csrc/shm/shm_group.cpp."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.transports.interface import Division, HostTransport, Reduction, parts_of


class ShmTransport(HostTransport):
    """A transport over a C++ group, whose ranks are processes of one host (or threads)."""

    name = "shm"
    shares_memory = True

    def __init__(
        self,
        group: _native.ShmGroup,
        ranks: Sequence[int] | None = None,
        stall_detector: _native.StallDetector | None = None,
    ) -> None:
        super().__init__(group, range(group.size) if ranks is None else ranks, stall_detector)
        self.group = self.native_group = group

    def reduce_in_place(
        self,
        tensors: _native.Tensors,
        memory: SharedMemory,
        reduction: Reduction,
        division: Division = (),
    ) -> None:
        if division:
            parts = parts_of(tensors, division)
            self.group.reduce_scatter(parts, parts[self.rank], *reduction, memory.distances)
        else:
            self.group.allreduce(tensors, *reduction, memory.distances)

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
        alltoall(self.group.exchange, self.rank, send, receive, n_bytes)


def alltoall(
    exchange: Callable[
        [list[_native.Tensors], list[int], list[tuple[int, int, _native.Tensors]]], None
    ],
    rank: int,
    send: Sequence[_native.Tensors],
    receive: Sequence[_native.Tensors],
    n_bytes: Sequence[Sequence[int]],
) -> None:
    """Implement `Transport.alltoall` by a group's `exchange` among the ranks of this host."""
    size = len(send)

    # A rank's stream is the data that it sends, to the next rank first, so that all receive at all
    # times. Its part for itself is not sent.
    def receivers(source: int) -> list[int]:
        return [(source + k) % size for k in range(1, size)]

    def begin(source: int) -> int:  # where this rank's part of that stream begins
        before = itertools.takewhile(lambda d: d != rank, receivers(source))
        return sum(n_bytes[source][d] for d in before)

    sizes = [sum(row) - row[source] for source, row in enumerate(n_bytes)]
    wanted = [(s, begin(s), receive[s]) for s in range(size) if s != rank]
    exchange([send[d] for d in receivers(rank)], sizes, wanted)


class SharedMemory:
    """Memory of this rank, which the other ranks of a group can access after all call `share`.

    `arrays` contains the arrays in the memory by offset, the same on all ranks; it is filled by the
    code that lays out the memory. Pages are allocated when they are written. Raise OSError if the
    system has no memory.
    """

    def __init__(
        self, n_bytes: int, *, of: int | None = None, at: tuple[int, int, int] | None = None
    ) -> None:
        """Allocate n_bytes, or use those that exist.

        Args:
            n_bytes: The size.
            of: The file as which another library holds the memory.
            at: `where` another rank has it.
        """
        segment = _native.Segment
        if at is not None:
            pid, descriptor, token = at
            self.segment = segment.open(pid, descriptor, n_bytes, token)
        elif of is not None:
            self.segment = segment.adopt(of, n_bytes)
        else:
            self.segment = segment.create(n_bytes)
        self._n_bytes = n_bytes
        self._others: list[_native.Segment] = []
        self.arrays: dict[int, Any] = {}
        self.distances: list[int] = []  # offset of each rank's memory from this one's
        self.number = 0
        _segments.add(self.segment)

    def array(self, begin: int, n_bytes: int) -> NDArray[np.uint8]:
        """Return a part of the memory, which lives as long as such an array is referenced."""
        return self.segment.array(begin, n_bytes)

    def offsets(self, tensors: _native.Tensors) -> tuple[int, ...] | None:
        """Return the tensors' offsets in the memory; None if one lies outside."""
        start = self.segment.address
        offsets = tuple(address - start if n else 0 for address, n in tensors.buffers())
        inside = all(0 <= offset < self._n_bytes for offset in offsets)
        return offsets if inside else None

    @property
    def where(self) -> tuple[int, int, int]:
        """What a peer needs to open the memory."""
        return os.getpid(), self.segment.fd, self.segment.token

    def open_others(self, everyone: list[tuple[int, int, int] | None], rank: int) -> bool:
        """Open every peer's memory, given each rank's `where`; return whether all succeeded."""
        self._others, self.distances = [], []
        try:
            for r, where in enumerate(everyone):
                if where is None:
                    return False
                segment = self.segment
                if r != rank:
                    pid, descriptor, token = where
                    segment = _native.Segment.open(pid, descriptor, self._n_bytes, token)
                    segment.close_descriptor()
                    self._others.append(segment)
                self.distances.append(segment.address - self.segment.address)
        except (OSError, RuntimeError):
            return False
        return True


_segments: WeakSet[_native.Segment] = WeakSet()


def _make_private() -> None:
    """Hide a forked child's writes from the ranks, as with any other memory."""
    for segment in _segments:
        segment.make_private()


os.register_at_fork(after_in_child=_make_private)
