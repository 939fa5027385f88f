"""Sets of ranks that operate among themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from horo_lite import ops
from horo_lite.collectives.group import Group, NullGroup
from horo_lite.context import World, is_initialized, on_ended, world
from horo_lite.start.groups import free_group, new_group, world_ranks_of

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Some of the world's ranks, for the `process_set` of any operation.

    `ProcessSet([0, 2])`, or `ProcessSet(comm)` of an mpi4py communicator, is given to
    `init(process_sets=[…])` or `add_process_set` on every rank, and can be used afterwards until it
    is removed or the world shut down. Sets may overlap. Ranks count from 0 in the world's order.

    Of a communicator that was split, every rank gives its own part, and all parts are registered;
    which ranks they are is known from then on.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._of_comm = hasattr(ranks_or_comm, "Get_group")
        self._members = ranks_or_comm.Get_group() if self._of_comm and ranks_or_comm else None
        self._ranks = [] if self._of_comm else sorted(_numbers(ranks_or_comm))
        self._entry: _Entry | None = None

    @property
    def process_set_id(self) -> int | None:
        """Its number, alike on all ranks; None while it is not registered."""
        return entry.number if (entry := self._registered()) else None

    @property
    def ranks(self) -> list[int]:
        """Its ranks, as the world counts them."""
        return list(self._ranks)

    def included(self) -> bool:
        """Whether this rank is one of them."""
        return world().rank in self._ranks

    def rank(self) -> int:
        """This rank's number in the set. ValueError on a rank outside."""
        return self.group().rank

    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def group(self) -> Group:
        """What its operations go through. ValueError where this rank cannot use it."""
        here = world()
        entry = self._registered()
        if entry is None:
            raise ValueError(
                f"{self} is not registered: give it to hvd.init(process_sets=[…]) or to "
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
    """All ranks of the world, whichever it is."""

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
    """One registered set: equal sets share it."""

    number: int
    world: World
    group: Group | None  # None on ranks outside
    sets: list[ProcessSet]


_entries: dict[int, _Entry] = {}
_n_registered = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """The set can be used; called by every rank of the world, those outside the set too.

    A set with the ranks of one that is registered already shares its number. MismatchError on every
    rank where the ranks differ in what they ask for.
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
        here.group.agree("add_process_set", f"{process_set}, which is known already")
    else:
        group = new_group(ranks) or None
        _n_registered += 1
        entry = _entries[_n_registered] = _Entry(_n_registered, here, group, [])
    _share(process_set, entry, ranks)
    return process_set


def set_with(ranks: Iterable[int]) -> ProcessSet:
    """Return a set that was stored as its ranks: registered where one with these ranks is."""
    found = ProcessSet(ranks)
    if is_initialized():
        _share(found, _entry_of(found.ranks), found.ranks)
    return found


def _entry_of(ranks: list[int]) -> _Entry | None:
    """The registered set of those ranks."""
    here = world()
    if ranks == list(range(here.size)):
        return _Entry(0, here, here.group, [])
    alike = (entry for entry in _entries.values() if entry.world is here)
    return next((entry for entry in alike if entry.sets[0].ranks == ranks), None)


def _share(process_set: ProcessSet, entry: _Entry | None, ranks: list[int]) -> None:
    """The set is the registered one, if it has these ranks."""
    if entry is not None and process_set.ranks == ranks and process_set._registered() is None:
        entry.sets.append(process_set)
        process_set._entry = entry


def remove_process_set(process_set: ProcessSet) -> bool:
    """The set and all equal to it are gone; called by every rank of the world.

    False, and nothing has changed, for the set of all ranks. ValueError where it is not registered.
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
    """The world they were of is gone."""
    global _n_registered
    for entry in _entries.values():
        for each in entry.sets:
            each._entry = None
    _entries.clear()
    _n_registered = 0


Set: TypeAlias = ProcessSet | Group | None
"""What callers may give for a process set; None is the world."""


def ranks_given(process_set: Set, group: Group | None) -> Any:
    """What a caller gave as `process_set=` or as `group=`; None for all ranks of any world."""
    if group is not None and process_set not in (None, global_process_set):
        raise TypeError("give group= or process_set=, not both: they are two names for the same")
    given = process_set if group is None else group
    return None if given is global_process_set else given


def group_of(process_set: Set) -> Group:
    """What operations of that set go through; None is the world."""
    if process_set is None or isinstance(process_set, (Group, NullGroup)):
        return ops.ranks_of(process_set)
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set is a ProcessSet, not {process_set!r}")
    return process_set.group()


def group_of_member(process_set: Set) -> Group | None:
    """The same; None where this rank is not in the set."""
    if isinstance(process_set, ProcessSet) and not process_set.included():
        return None
    return group_of(process_set)


def set_of(process_set_id: int) -> ProcessSet:
    """Return the registered set of that number; ValueError where there is none."""
    if process_set_id == 0:
        return global_process_set
    entry = _entries.get(process_set_id)
    if entry is None:
        raise ValueError(f"there is no process set with the number {process_set_id}")
    return entry.sets[0]


def root_in(group: Group, root_rank: int) -> int:
    """The place in the group of a root, which callers name by its number in the world."""
    ranks = list(group.transport.ranks)
    if isinstance(root_rank, bool) or root_rank not in ranks:
        raise ValueError(f"root_rank is {root_rank}, but the ranks are {ranks}")
    return ranks.index(root_rank)


def root_given(ranks: Group, root_rank: int, group: Group | None) -> int:
    """The place of a root among `ranks`, which is its number where the caller gave a `group`."""
    return root_in(ranks, root_rank) if group is None else root_rank


def _numbers(ranks: Any) -> list[int]:
    found: list[Any] = list(ranks) if isinstance(ranks, Iterable) else [None]
    if not all(hasattr(rank, "__index__") for rank in found):
        raise ValueError(
            f"a ProcessSet is made of a list of ranks or an mpi4py communicator, not of {ranks!r}"
        )
    return [int(rank) for rank in found]


global_process_set = _Everyone()
on_ended(forget_process_sets)
