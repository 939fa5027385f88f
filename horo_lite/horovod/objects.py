"""Object collectives, barrier and join with Horovod's arguments, for TensorFlow and Keras."""

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
    """Return the object of rank `root_rank`, which can be anything that can be pickled.

    Every rank of the set calls it. Other ranks' objects are ignored.

    Args:
        obj: The object; ignored on ranks other than the root.
        root_rank: The root's rank in the world; with `group`, its rank in the group.
        session: TensorFlow 1's argument, which has no effect here.
        name: For messages; if given, the same on all ranks.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
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
    """Return a function of one object that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: T,
    session: Any = None,
    name: str | None = None,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> list[T]:
    """Return all ranks' `obj`, which can be anything that can be pickled, in rank order.

    Every rank of the set calls it; for the arguments see `broadcast_object`.
    """
    ranks = group_of(ranks_given(process_set, group))
    result: list[T] = ops.allgather_object(obj, name=name, group=ranks)
    return result


def barrier(process_set: Set = global_process_set, *, group: Group | None = None) -> None:
    """Wait until all ranks of the set have called this."""
    ops.barrier(group=group_of(ranks_given(process_set, group)))


def join(device: int = -1) -> int:
    """Take part in the others' operations until all ranks have called this.

    Args:
        device: Horovod's argument, which has no effect here.

    Returns:
        The last rank that called it. See `horo_lite.join`.
    """
    return ops.join()
