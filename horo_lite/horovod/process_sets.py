"""Process sets: subsets of ranks with collectives of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from horo_lite import ops
from horo_lite.collectives.group import Group, NullGroup
from horo_lite.context import World, is_initialized, on_ended, world
from horo_lite.start.groups import free_group, new_group, world_ranks_of

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the world's ranks, for the argument `process_set` of any operation.

    Pass `ProcessSet([0, 2])`, or `ProcessSet(comm)` for an mpi4py communicator, to
    `init(process_sets=[…])` or `add_process_set` on every rank; it can be used from then on, until
    it is removed or the world is shut down. Sets may overlap. A set's ranks are numbered from 0 in
    the world's order.

    For a communicator that was split, every rank passes its own part, and all parts are registered;
    their ranks are known from then on.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._of_comm = hasattr(ranks_or_comm, "Get_group")
        self._members = ranks_or_comm.Get_group() if self._of_comm and ranks_or_comm else None
        self._ranks = [] if self._of_comm else sorted(_numbers(ranks_or_comm))
        self._entry: _Entry | None = None

    @property
    def process_set_id(self) -> int | None:
        """The set's number, the same on all ranks; None while it is not registered."""
        return entry.number if (entry := self._registered()) else None

    @property
    def ranks(self) -> list[int]:
        """The set's ranks, as ranks of the world."""
        return list(self._ranks)

    def included(self) -> bool:
        """Return whether this rank is in the set."""
        return world().rank in self._ranks

    def rank(self) -> int:
        """Return this rank's number in the set; raise ValueError on a rank outside it."""
        return self.group().rank

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return len(self.ranks)

    def group(self) -> Group:
        """Return the `Group` of the set; raise ValueError if this rank cannot use it."""
        here = world()
        entry = self._registered()
        if entry is None:
            raise ValueError(
                f"{self} is not registered: pass it to hvd.init(process_sets=[…]) or to "
                "hvd.add_process_set, on every rank"
            )
        if entry.group is None:
            raise ValueError(
                f"rank {here.rank} is not in {self}: only the set's own ranks may call this"
            )
        return entry.group

    def _registered(self) -> _Entry | None:
        entry = self._entry
        if entry is None or not is_initialized() or entry.world is not world():
            return None
        return entry

    def __deepcopy__(self, memo: object) -> ProcessSet:
        return self  # layers hold one, and are copied

    def __reduce__(self) -> Any:
        return set_with, (self._ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


class _Everyone(ProcessSet):
    """All ranks of the current world."""

    def __init__(self) -> None:
        super().__init__([])

    @property
    def process_set_id(self) -> int:
        return 0

    @property
    def ranks(self) -> list[int]:
        return list(range(world().size))

    def included(self) -> bool:
        return world().rank >= 0

    def group(self) -> Group:
        return world().group

    def __reduce__(self) -> Any:
        return "global_process_set"

    def __repr__(self) -> str:
        return "global_process_set"


class _Entry(NamedTuple):
    """A registered set, which equal `ProcessSet` objects share."""

    number: int
    world: World
    group: Group | None  # None on ranks outside the set
    sets: list[ProcessSet]


_entries: dict[int, _Entry] = {}
_n_registered = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set; every rank of the world calls it, including those outside the set.

    A set with the same ranks as a registered one shares its number.

    Raises:
        MismatchError: On every rank, if the ranks' arguments differ.
    """
    global _n_registered
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    here = world()
    if process_set._of_comm:
        members = process_set._members
        ranks = process_set._ranks = [] if members is None else sorted(world_ranks_of(members))
        for part in sorted(set(map(tuple, ops.allgather_object(ranks, group=here.group)))):
            if part:
                _share(process_set, add_process_set(part)._entry, list(part))
        return process_set
    if any(entry.world is not here for entry in _entries.values()):
        forget_process_sets()
    ranks = process_set.ranks
    entry = _entry_of(ranks)
    if entry is not None:
        here.group.agree("add_process_set", f"{process_set}, which is already registered")
    else:
        group = new_group(ranks) or None
        _n_registered += 1
        entry = _entries[_n_registered] = _Entry(_n_registered, here, group, [])
    _share(process_set, entry, ranks)
    return process_set


def set_with(ranks: Iterable[int]) -> ProcessSet:
    """Return a set of these ranks, which is registered if one with the same ranks is."""
    found = ProcessSet(ranks)
    if is_initialized():
        _share(found, _entry_of(found.ranks), found.ranks)
    return found


def _entry_of(ranks: list[int]) -> _Entry | None:
    """Return the registered set of those ranks."""
    here = world()
    if ranks == list(range(here.size)):
        return _Entry(0, here, here.group, [])
    alike = (entry for entry in _entries.values() if entry.world is here)
    return next((entry for entry in alike if entry.sets[0].ranks == ranks), None)


def _share(process_set: ProcessSet, entry: _Entry | None, ranks: list[int]) -> None:
    """Make `process_set` the registered one, if it has these ranks."""
    if entry is not None and process_set.ranks == ranks and process_set._registered() is None:
        entry.sets.append(process_set)
        process_set._entry = entry


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set and all equal ones; every rank of the world calls it.

    Returns:
        False for the set of all ranks, which cannot be removed; otherwise True.

    Raises:
        ValueError: The set is not registered.
    """
    here = world()
    number = process_set.process_set_id
    if number is None:
        raise ValueError(f"{process_set} is not registered")
    here.group.agree("remove_process_set", f"{process_set}, number {number}")
    if number == 0:
        return False
    entry = _entries.pop(number)
    for each in entry.sets:
        each._entry = None
    if entry.group is not None:
        free_group(entry.group)
    return True


def forget_process_sets() -> None:
    """Forget all sets, because their world has ended."""
    global _n_registered
    for entry in _entries.values():
        for each in entry.sets:
            each._entry = None
    _entries.clear()
    _n_registered = 0


Set: TypeAlias = ProcessSet | Group | None
"""What callers may pass as a process set; None is the world."""


def ranks_given(process_set: Set, group: Group | None) -> Any:
    """Return what the caller passed as `process_set=` or `group=`; None for all ranks."""
    if group is not None and process_set not in (None, global_process_set):
        raise TypeError("pass group= or process_set=, not both: they mean the same")
    given = process_set if group is None else group
    return None if given is global_process_set else given


def group_of(process_set: Set) -> Group:
    """Return the `Group` of a process set; None is the world."""
    if process_set is None or isinstance(process_set, (Group, NullGroup)):
        return ops.ranks_of(process_set)
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set must be a ProcessSet, not {process_set!r}")
    return process_set.group()


def group_of_member(process_set: Set) -> Group | None:
    """Return the `Group` of a process set; None if this rank is not in the set.

    Raises:
        ValueError: The set is not registered in this world. If it was in a former one, its numbers
            may belong to other ranks now.
    """
    if isinstance(process_set, ProcessSet):
        is_registered = process_set.process_set_id is not None
        if is_registered and not process_set.included():
            return None
    return group_of(process_set)


def set_of(process_set_id: int) -> ProcessSet:
    """Return the registered set with that number; raise ValueError if there is none."""
    if process_set_id == 0:
        return global_process_set
    entry = _entries.get(process_set_id)
    if entry is None:
        raise ValueError(f"there is no process set with the number {process_set_id}")
    return entry.sets[0]


def root_in(group: Group, root_rank: int) -> int:
    """Return the group rank of a root that is given as a rank of the world."""
    ranks = list(group.transport.ranks)
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ValueError(f"root_rank is {root_rank}, but the ranks are {ranks}")
    return ranks.index(root_rank)


def root_given(ranks: Group, root_rank: int, group: Group | None) -> int:
    """Return the rank of a root among `ranks`; with a `group`, the caller passed that rank."""
    return root_in(ranks, root_rank) if group is None else root_rank


def _numbers(ranks: Any) -> list[int]:
    found: list[Any] = list(ranks) if isinstance(ranks, Iterable) else [None]
    if not all(hasattr(rank, "__index__") for rank in found):
        raise ValueError(
            f"a ProcessSet needs a list of ranks or an mpi4py communicator, not {ranks!r}"
        )
    return [int(rank) for rank in found]


global_process_set = _Everyone()
on_ended(forget_process_sets)
