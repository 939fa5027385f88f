"""Memory that ranks of a host share: one of each rank, with arrays reduced in place; or of all."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakSet, WeakValueDictionary

from horo_lite._native import Segment
from horo_lite.collectives.calls import gathered
from horo_lite.transports.shm import SharedMemory

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def share(group: Group, memory: SharedMemory | None) -> bool:
    """Let the ranks of `group` access each other's memory; return, on all, whether all can.

    Every rank calls it, with None if it has no memory; it may be called again for another group.
    False if a rank has no memory, its size differs, or the system does not permit the access.
    """
    everyone = gathered(group, memory and memory.where, "location of shared memory")
    is_open = memory is not None and memory.open_others(everyone, group.rank)
    if not all(gathered(group, is_open, "access to shared memory")):
        return False
    assert memory is not None
    kept = _kept_by(group)
    kept.n_shared += 1
    memory.number = kept.n_shared
    kept.shared[memory.number] = memory
    return True


def common(group: Group, n_bytes: int) -> SharedMemory | None:
    """Return one memory for all ranks on this host; None, on all ranks, if one cannot access it.

    Every rank of `group` calls it, with the same size. When the group is closed, the memory becomes
    each rank's own.
    """
    memory = None
    first = group.transport.here[0]
    if group.rank == first:
        with suppress(OSError):
            memory = SharedMemory(n_bytes)
    where = gathered(group, memory and memory.where, "location of shared memory")[first]
    if group.rank != first and where is not None:
        with suppress(OSError, RuntimeError):
            memory = SharedMemory(n_bytes, at=where)
    is_open = all(gathered(group, memory is not None, "access to shared memory"))
    if memory is None or not is_open:
        return None
    _kept_by(group).common.add(memory.segment)
    return memory


def make_own(group: Group) -> None:
    """Hide what this rank writes to memory for all ranks of the group from the others."""
    for segment in _kept_by(group).common:
        segment.make_private()


def memory_of(group: Group, number: int) -> SharedMemory | None:
    """Return the `number`-th memory that the group shared; None if this rank has dropped it."""
    return _kept_by(group).shared.get(number)


class _Kept:
    """The memory of a group's ranks, as long as someone uses it."""

    def __init__(self) -> None:
        self.n_shared = 0
        self.shared: WeakValueDictionary[int, SharedMemory] = WeakValueDictionary()
        self.common: WeakSet[Segment] = WeakSet()


def _kept_by(group: Group) -> _Kept:
    kept: _Kept = group.kept.setdefault(_Kept, _Kept())
    return kept
