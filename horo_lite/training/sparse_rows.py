"""Gradients of which each rank has some rows, such as an embedding's: all gather the rows of all.

The plan says which gradients these are, and what their rows look like. What such a gradient is made
of is up to the framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from horo_lite import ops
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.training.plan import Layout, Rows


def exchange(
    found: Rows,
    name_of: Callable[[int], str],
    rows: Callable[[int, Layout, float], tuple[Any, Any]],
    group: Group,
    op: AnyOp,
    weight: float | None,
    check: Callable[[Sequence[Any]], None],
) -> Iterator[tuple[int, Any, Any]]:
    """Exchange the gradients of this kind; yield the index of each, its indices and its values.

    Collective.

    Args:
        found: Those of the plan on which all ranks have agreed.
        name_of: Returns the name of the gradient at an index.
        rows: Returns this rank's indices and values, divided by a divisor: none if it is infinite.
        group: The ranks.
        op: Average or Sum.
        weight: This rank's number of samples, on every rank or on none.
        check: Receives the values of all ranks: `Reducer.reset_unless_finite`.

    Raises:
        ValueError: On every rank, if `op` is another one.
    """
    if found and op not in (Average, Sum):  # on all ranks, since these have the same plan
        raise ValueError(
            f"the gradient of {name_of(found[0][0])!r} is sparse, but op={op.name} "
            "combines only dense gradients: pass sparse_as_dense=True, or use op=Average or Sum"
        )
    divisor = float(group.size) if op is Average else 1.0
    if found and weight is not None:
        name = "the weights of sparse gradients"
        total = float(ops.allreduce(np.array([weight]), Sum, name=name, group=group)[0])
        divisor = total / weight if weight else math.inf
    for i, layout in found:
        indices, values = rows(i, layout, divisor)
        name = f"the gradient of {name_of(i)!r}"
        indices = ops.allgather(indices, name=f"{name}, indices", group=group)
        values = ops.allgather(values, name=f"{name}, values", group=group)
        check([values])
        yield i, indices, values
