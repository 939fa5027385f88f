"""Operations on numbers, NumPy arrays and tensors of the backend, with Horovod's arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from horo_lite import ops
from horo_lite.collectives.compression import Compression
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average
from horo_lite.horovod.process_sets import (
    Set,
    global_process_set,
    group_of,
    ranks_given,
    root_given,
)
from horo_lite.horovod.reductions import op_of

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Any:
    """Return the op over all ranks' `value`, by default the average. Every rank calls it.

    For metrics and similar values; not inside compiled steps.

    Args:
        value: A number, array or eager tensor of the same shape and dtype on every rank.
        name: For messages; if given, the same on all ranks.
        average: Horovod's older form: True for Average, False for Sum.
        prescale_factor: Multiplies this rank's contribution.
        postscale_factor: Multiplies the result.
        op: Average, Sum, Min, Max, Product or Adasum, or Horovod's number for one. Adasum needs a
            number of ranks that is a power of two, and no compression.
        compression: The wire format, such as Compression.fp16.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
    """
    op = op_of(average, op)
    return ops.allreduce(
        value,
        op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        group=group_of(ranks_given(process_set, group)),
    )


def allgather(
    value: Any,
    name: str | None = None,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Any:
    """Return all ranks' `value`, concatenated along the first dimension.

    Args:
        value: An array or an eager tensor; only the first dimension may differ between ranks.
        name: For messages; if given, the same on all ranks.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
    """
    return ops.allgather(value, name=name, group=group_of(ranks_given(process_set, group)))


def broadcast(
    value: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Any:
    """Return the `value` of rank `root_rank`.

    Args:
        value: A number, array or eager tensor of the same shape and dtype on every rank.
        root_rank: The root's rank in the world; with `group`, its rank in the group.
        name: For messages; if given, the same on all ranks.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
    """
    ranks = group_of(ranks_given(process_set, group))
    root = root_given(ranks, root_rank, group)
    return ops.broadcast(value, root, name=name, group=ranks)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: Any = Average,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Any:
    """Return this rank's rows of `allreduce(value)`.

    If rows cannot be divided evenly, the first ranks get one more. The arguments are those of
    `allreduce`.
    """
    op = op_of(None, op)
    value = np.asarray(value) if isinstance(value, (list, tuple)) else value
    return ops.reducescatter(value, op, name=name, group=group_of(ranks_given(process_set, group)))
