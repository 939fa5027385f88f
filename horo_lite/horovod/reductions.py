"""The ops of reductions as Horovod scripts specify them: objects, numbers, or `average=`."""

from __future__ import annotations

import warnings
from typing import Any, TypeAlias

from horo_lite.collectives.reductions import Average, Max, Min, Op, Product, Sum


class AdasumOp:
    """The op Adasum: its only instance is hvd.Adasum."""

    name = "Adasum"

    def __repr__(self) -> str:
        return "Adasum"

    def __reduce__(self) -> str:
        return "Adasum"  # copies and unpickled objects are the same instance


Adasum = AdasumOp()
AnyOp: TypeAlias = "Op | AdasumOp"

# Horovod's ops are numbers in this order, which scripts' configurations may contain.
_NUMBERED: tuple[AnyOp, ...] = (Average, Sum, Adasum, Min, Max, Product)


def op_of(average: Any, op: Any) -> AnyOp:
    """Return the op that Horovod's `average=` and `op=` specify; Average if neither is given."""
    if average is not None:
        if not isinstance(average, bool):
            raise ValueError(f"average must be True or False, not {average!r}: use op={average!r}")
        if op is not None:
            raise ValueError("average and op mean the same: pass only op")
        warnings.warn(
            "average= is Horovod's old name: use op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if op is None:
        return Average
    return named_op(op)


def named_op(op: object) -> AnyOp:
    """Return the op that `op` is, or is Horovod's number of; raise ValueError otherwise."""
    if isinstance(op, (Op, AdasumOp)):
        return op
    if isinstance(op, int) and not isinstance(op, bool) and 0 <= op < len(_NUMBERED):
        return _NUMBERED[op]
    raise ValueError(
        f"op must be hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product, not {op!r}"
    )
