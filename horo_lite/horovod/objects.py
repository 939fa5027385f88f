"""Objects, barriers and the end of data, with Horovod's arguments, for TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from horo_lite import ops
from horo_lite.collectives.group import Group
from horo_lite.horovod.process_sets import (
    Set,
    global_process_set,
    group_of,
    ranks_given,
    root_given,
)

__all__ = ["allgather_object", "barrier", "broadcast_object", "broadcast_object_fn", "join"]

T = TypeVar("T")


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> T:
    """Return what `obj` is on rank `root_rank`: anything that can be pickled.

    Every rank of the set calls it. Other ranks' objects are ignored.

    Args:
        obj: The object; on other ranks than the root anything.
        root_rank: The world's number of the rank that has the object; with `group`, its own number
            there.
        session: TensorFlow 1's, which has no meaning here.
        name: For messages; where given, alike on all ranks.
        process_set: The ranks; default all.
        group: The same as a `Group`.
    """
    ranks = group_of(ranks_given(process_set, group))
    root = root_given(ranks, root_rank, group)
    result: T = ops.broadcast_object(obj, root, name=name, group=ranks)
    return result


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of one object that does `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: T,
    session: Any = None,
    name: str | None = None,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> list[T]:
    """Return all ranks' `obj`, in the order of ranks: anything that can be pickled.

    Every rank of the set calls it; for the arguments see `broadcast_object`.
    """
    ranks = group_of(ranks_given(process_set, group))
    result: list[T] = ops.allgather_object(obj, name=name, group=ranks)
    return result


def barrier(process_set: Set = global_process_set, *, group: Group | None = None) -> None:
    """Return when all ranks of the set have called this."""
    ops.barrier(group=group_of(ranks_given(process_set, group)))


def join(device: int = -1) -> int:
    """Take part in what the others do until all ranks have called this.

    Args:
        device: Horovod's, which has no meaning here.

    Returns:
        The number of the last rank that called it. See `horo_lite.join`.
    """
    return ops.join()
