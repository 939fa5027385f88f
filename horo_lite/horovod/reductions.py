"""The ops of reductions as Horovod scripts specify them: objects, numbers, or `average=`."""

from __future__ import annotations

from typing import Any

from horo_lite.collectives.reductions import Adasum, AnyOp, Average, Max, Min, Product, Sum
from horo_lite.errors import warn

# Horovod's ops are numbers in this order, which scripts' configurations may contain.
_NUMBERED: tuple[AnyOp, ...] = (Average, Sum, Adasum, Min, Max, Product)


def op_of(average: Any, op: Any) -> AnyOp:
    """Return the op that Horovod's `average=` and `op=` specify; Average if neither is given."""
    if average is not None:
        if not isinstance(average, bool):
            raise ValueError(f"average must be True or False, not {average!r}: use op={average!r}")
        if op is not None:
            raise ValueError("average and op mean the same: pass only op")
        warn("average= is Horovod's old name: use op=hvd.Average or op=hvd.Sum", DeprecationWarning)
        return Average if average else Sum
    if op is None:
        return Average
    return named_op(op)


def named_op(op: object) -> AnyOp:
    """Return the op that `op` is, or is Horovod's number of; raise ValueError otherwise."""
    if isinstance(op, AnyOp):
        return op
    if isinstance(op, int) and not isinstance(op, bool) and 0 <= op < len(_NUMBERED):
        return _NUMBERED[op]
    raise ValueError(
        f"op must be hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product, not {op!r}"
    )
