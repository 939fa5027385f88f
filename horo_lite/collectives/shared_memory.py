"""Memory that the ranks of a group share: arrays in it are reduced in place."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from horo_lite.collectives.calls import AllGatherBytes, Part

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.transports.shm import SharedMemory


def share(group: Group, memory: SharedMemory | None) -> bool:
    """Let the ranks of `group` access each other's memory; return, on all, whether all can.

    Every rank calls it, with None if it has no memory; it may be called again for another group.
    False if a rank has no memory, its size differs, or the system does not permit the access.
    """
    everyone = _gathered(group, memory and memory.where, "location of shared memory")
    is_open = memory is not None and memory.open_others(everyone, group.rank)
    if not all(_gathered(group, is_open, "access to shared memory")):
        return False
    assert memory is not None
    memory.number = _n_shared[group] = _n_shared.get(group, 0) + 1
    _shared.setdefault(group, WeakValueDictionary())[memory.number] = memory
    return True


def memory_of(group: Group, number: int) -> SharedMemory | None:
    """Return the `number`-th memory that the group shared; None if this rank has dropped it."""
    return _shared[group].get(number)


def _gathered(group: Group, mine: object, name: str) -> list[Any]:
    everyone = group.run(AllGatherBytes(name), Part(data=pickle.dumps(mine)))
    return [pickle.loads(one) for one in everyone]


_n_shared: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
_shared: WeakKeyDictionary[Group, WeakValueDictionary[int, SharedMemory]] = WeakKeyDictionary()
