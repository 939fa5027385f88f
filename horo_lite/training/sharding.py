"""What all optimizers share whose state is divided between the ranks (shard_state=True).

Which rank updates which part of the parameters, what the ranks compare before they divide a state,
how they receive the parameters that others have updated, and how they collect the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from horo_lite.adapters.object import is_array
from horo_lite.collectives.calls import AllGatherInPlace, Compare, Part
from horo_lite.ops import allgather_object
from horo_lite.state import drift
from horo_lite.state.broadcast import Places
from horo_lite.state.trees import NUMBERS, Tree, in_brackets

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

K = TypeVar("K")
V = TypeVar("V")

GRAIN = 64
"""Parameters are cut at multiples of this number of elements, so that vectorized loops over a piece
compute each element as they would in the whole parameter, and not in their scalar remainders."""


_MOST_CUTS = 64
"""A rank's share consists of about that many pieces of large parameters, beside small ones."""


class Piece(NamedTuple):
    """The elements [start, stop) of a parameter, in memory order, which belong to one rank."""

    parameter: int
    start: int
    stop: int
    owner: int


def divide(sizes: Sequence[int], may_cut: Sequence[bool], n_ranks: int) -> list[Piece]:
    """Deal parameters to ranks, with about as many elements for each.

    Those that may not be cut are dealt first, the largest first, each to the rank that has least.
    Then the others, in order: a large one is cut into a piece for each rank that has room, so that
    ranks also have about as many elements of each bucket of gradients, and links carry as much in
    both directions.

    Args:
        sizes: The number of elements of each parameter.
        may_cut: Whether it may be divided between ranks.
        n_ranks: The number of ranks.

    Returns:
        The pieces, ordered by parameter and start. A rank has at most one of each parameter.
    """
    share = sum(sizes) / n_ranks
    smallest = max(GRAIN, int(share / _MOST_CUTS))
    loads = [0] * n_ranks
    pieces = []

    def give(i: int, ranks: Sequence[int], rooms: Sequence[float]) -> None:
        """Cut parameter i in proportion to the ranks' rooms."""
        start, room = 0, sum(rooms)
        for rank, until in zip(ranks, accumulate(rooms), strict=True):
            stop = sizes[i] if rank == ranks[-1] else int(sizes[i] * until / room) // GRAIN * GRAIN
            if start < stop or sizes[i] == 0:
                pieces.append(Piece(i, start, stop, rank))
                loads[rank] += stop - start
            start = stop

    for i in sorted((i for i, cut in enumerate(may_cut) if not cut), key=lambda i: -sizes[i]):
        give(i, [loads.index(min(loads))], [1.0])
    rooms = [max(share - load, 0.0) for load in loads]
    with_room = [rank for rank, room in enumerate(rooms) if room > 0] or [0]
    for i in (i for i, cut in enumerate(may_cut) if cut):
        n = max(1, sizes[i] // smallest)
        if n < len(with_room):
            least = sorted(sorted(with_room, key=loads.__getitem__)[:n])
            give(i, least, [1.0] * n)
        else:
            give(i, with_room, [rooms[rank] or 1.0 for rank in with_room])
    return sorted(pieces)


def owners_of(sizes: Sequence[int], n_ranks: int) -> list[int]:
    """Return the owner of each parameter, if none may be cut: see `divide`."""
    return [piece.owner for piece in divide(sizes, [False] * len(sizes), n_ranks)]


def compare_division(
    group: Group,
    label: str,
    dealt: Iterable[str],
    named: Sequence[tuple[str, Any]],
    state: Callable[[], Any],
    *,
    is_new: bool = False,
) -> None:
    """Raise on every rank unless all divide the same parameters and state in the same way.

    Args:
        group: The ranks.
        label: The operation's name.
        dealt: What says how it is divided, for messages.
        named: The parameters, whose values are compared.
        state: Returns nested dicts and lists, whose numbers and arrays are compared.
        is_new: Whether this rank's state is that before any step. If all are, they are equal.
    """
    text = "\n".join([label, *dealt])
    headers = group.run(Compare(label, text), Part(number=int(not is_new)))
    is_compared = any(header.count for header in headers)
    leaves = Tree(state(), join=in_brackets).named if is_compared else []
    found = [(name, x) for name, x in leaves if isinstance(x, NUMBERS) or is_array(x)]
    drift.compare([*named, *found], group=group, on_drift="raise")


def receive(
    group: Group, label: str, owners: Sequence[int], names: Sequence[str], arrays: Sequence[Any]
) -> None:
    """Write into each array, of one device, what its owner has in it."""
    call = AllGatherInPlace(label, owners, names)
    group.run(call, Part(group.memory(arrays), label=label))


def receive_values(
    group: Group, label: str, owners: Sequence[int], named: Sequence[tuple[str, Any]]
) -> list[Any]:
    """Give all ranks the parameters, on any devices, as their owners have updated them.

    Returns:
        The same objects if they can be written, else new ones.
    """
    places = Places(named)
    for chosen in filter(None, places.by_device()):
        arrays = [places.targets[i] for i in chosen]
        rows = [x if len(x.shape) else x.reshape((1,)) for x in arrays]
        receive(group, label, [owners[i] for i in chosen], [named[i][0] for i in chosen], rows)
    return places.received([owner == group.rank for owner in owners])


def collected(group: Group, label: str, mine: Mapping[K, V]) -> dict[K, V]:
    """Return the items of all ranks, each of which has others."""
    everyone = allgather_object(dict(mine), name=label, group=group)
    return dict(chain.from_iterable(rank.items() for rank in everyone))


class Changing(Protocol):
    """What has a divided state."""

    is_torn: bool
    """Whether a change of it has begun, and not ended: ranks may have made parts of it only."""


@contextmanager
def changing(state: Changing) -> Iterator[None]:
    """Change the state, or parameters, in the block; an error in it tears the state."""
    state.is_torn = True
    yield
    state.is_torn = False


def check_not_torn(state: Changing, whole: str = "a state_dict()") -> None:
    """Raise RuntimeError if an error has ended a change of the state."""
    if state.is_torn:
        raise RuntimeError(
            "a step or load_state_dict() of the optimizer, whose state is divided between the "
            "ranks (shard_state=True), has ended with an error, which the program has caught: some "
            f"parameters and their state may be those of another step. Load {whole} and parameters "
            "that were saved before, on every rank, and continue from there"
        )


def check_not_lost(then: Group, now: Group | None, whole: str = "a state_dict()") -> None:
    """Raise RuntimeError unless the ranks that divided a state are those of now."""
    if then.is_closed or then is not now:
        raise RuntimeError(
            "the ranks have changed since the optimizer's state was divided between them "
            f"(shard_state=True), so parts of it are lost: load {whole} that was collected "
            "before, on every rank, and continue from there"
        )
