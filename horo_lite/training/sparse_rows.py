"""Gradients of which each rank has some rows, such as an embedding's: all gather the rows of all.

They take no part in the plan. The notes of an exchange say which rank has which gradients, and what
their rows look like. What such a gradient is made of is up to the framework.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from horo_lite import ops
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.errors import MismatchError, ranks_in_words

Layout = Sequence[Any]
"""What a rank without rows must know: numbers, strings and lists of them; None if unknown."""


def note(layouts: Mapping[int, Layout]) -> str:
    """Describe this rank's gradients of this kind, by their index, for the other ranks."""
    return json.dumps(layouts) if layouts else ""


def found_in(notes: Iterable[str]) -> dict[int, Layout]:
    """Return what the gradients in these notes look like, by their index."""
    return {int(i): layout for each in notes if each for i, layout in json.loads(each).items()}


def exchange(
    notes: Mapping[int, str],
    name_of: Callable[[int], str],
    is_dense: Callable[[int], bool],
    rows: Callable[[int, Layout, float], tuple[Any, Any]],
    group: Group,
    op: AnyOp,
    weight: float | None,
    check: Callable[[Sequence[Any]], None],
) -> Iterator[tuple[int, Any, Any]]:
    """Exchange the gradients of this kind; yield the index of each, its indices and its values.

    Collective.

    Args:
        notes: The results of `note`, by rank.
        name_of: Returns the name of the gradient at an index.
        is_dense: Returns whether some rank's gradient at an index is dense.
        rows: Returns this rank's indices and values, divided by a divisor: none if it is infinite.
        group: The ranks.
        op: Average or Sum.
        weight: This rank's number of samples, on every rank or on none.
        check: Receives the values of all ranks: `Reducer.reset_unless_finite`.

    Raises:
        MismatchError: On every rank, if a gradient is dense on others, or its rows differ.
        ValueError: On every rank, if `op` is another one.
    """
    found: dict[int, Layout] = {}
    for each in notes.values():
        for i, layout in found_in([each]).items():
            known = found.setdefault(i, layout)
            if not all(a == b or None in (a, b) for a, b in zip(known, layout, strict=True)):
                raise MismatchError(
                    f"the rows of the gradient of {name_of(i)!r} belong to different tensors: "
                    f"{_in_words(known)} on some ranks and {_in_words(layout)} on others"
                )
    for i in filter(is_dense, sorted(found)):
        ranks = [rank for rank, each in notes.items() if i in found_in([each])]
        raise MismatchError(
            f"the gradient of {name_of(i)!r} is sparse on {ranks_in_words(ranks)} and dense on "
            "others: make it the same on all ranks, or pass sparse_as_dense=True"
        )
    if found and op not in (Average, Sum):  # on all ranks, since these have the same notes
        raise ValueError(
            f"the gradient of {name_of(min(found))!r} is sparse, but op={op.name} "
            "combines only dense gradients: pass sparse_as_dense=True, or use op=Average or Sum"
        )
    divisor = float(group.size) if op is Average else 1.0
    if found and weight is not None:
        name = "the weights of sparse gradients"
        total = float(ops.allreduce(np.array([weight]), Sum, name=name, group=group)[0])
        divisor = total / weight if weight else math.inf
    for i, layout in sorted(found.items()):
        indices, values = rows(i, layout, divisor)
        name = f"the gradient of {name_of(i)!r}"
        indices = ops.allgather(indices, name=f"{name}, indices", group=group)
        values = ops.allgather(values, name=f"{name}, values", group=group)
        check([values])
        yield i, indices, values


def _in_words(layout: Layout) -> str:
    return " ".join(str(each) for each in layout if each is not None)
