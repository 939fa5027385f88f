"""Sums of many arrays in one order, whatever the number of ranks that have them.

The n leaves of a balanced binary tree are the arrays; each inner node is the sum of its two
children, rounded once. The tree depends on n alone, so the root has the same bits however the
leaves are dealt to ranks. Each rank has a contiguous range of leaves and adds up what it can: the
largest subtrees inside its range, one for each digit of a binary counter. Subtrees of all ranks are
then added by the owner of each share of the elements: a rank sends every other rank that one's
share of its subtrees, and receives from each the share that this one has added up. If all ranks
have one subtree, these are the bytes of a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite.collectives.calls import AllGatherInPlace, Part
from horo_lite.collectives.reductions import Sum
from horo_lite.ops import alltoall, grouped_allreduce_

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

Flat = NDArray[Any]
"""One dimension, in C order."""


@dataclass(slots=True, eq=False)
class Subtree:
    """The sum of the leaves [start, start + size); start is a multiple of size, a power of two."""

    start: int
    size: int
    sums: list[Flat]
    """One array per dtype."""


def leaves_of(rank: int, size: int, n: int) -> range:
    """Return the leaves of a rank: contiguous, and on each rank about n / size."""
    return range(n * rank // size, n * (rank + 1) // size)


def are_siblings(left: Subtree, right: Subtree) -> bool:
    """Return whether two adjacent subtrees have the same parent."""
    return left.size == right.size and left.start % (2 * left.size) == 0


def merge(subtrees: list[Subtree]) -> list[list[Flat]]:
    """Add up what is complete, after a subtree was appended to those of the leaves before it.

    Args:
        subtrees: Adjacent ones. The list is changed, and so are the arrays.

    Returns:
        Arrays that are not needed any more.
    """
    free = []
    while len(subtrees) > 1 and are_siblings(*subtrees[-2:]):
        right, left = subtrees.pop(), subtrees[-1]
        for a, b in zip(left.sums, right.sums, strict=True):
            np.add(a, b, out=a)
        left.size *= 2
        free.append(right.sums)
    return free


def sum_of_all(subtrees: Sequence[Subtree], n: int, group: Group, label: str) -> list[Flat]:
    """Return the sum of all n leaves, the same bits on every rank. Collective.

    Args:
        subtrees: What `merge` has left of this rank's leaves, `leaves_of(rank, size, n)`. Their
            arrays may be changed.
        n: The number of leaves, a power of two, and at least the number of ranks.
        group: The ranks.
        label: What is added up, for messages.

    Returns:
        One array per dtype, whose memory is that of the first subtree.
    """
    if group.size <= 2:
        # The order of two is that of an all-reduce, which rounds a sum of two once in any dtype.
        grouped_allreduce_(subtrees[0].sums, op=Sum, name=label, group=group)
        return subtrees[0].sums
    everyones = [_subtrees_in(leaves_of(rank, group.size, n)) for rank in range(group.size)]
    by_dtype = zip(*(subtree.sums for subtree in subtrees), strict=True)
    return [_sum_of_dtype(mine, everyones, group, label) for mine in by_dtype]


def _sum_of_dtype(
    mine: Sequence[Flat], everyones: Sequence[Sequence[Subtree]], group: Group, label: str
) -> Flat:
    n = len(mine[0])
    bounds = [n * rank // group.size for rank in range(group.size + 1)]
    shares = [slice(*pair) for pair in pairwise(bounds)]
    widths = [share.stop - share.start for share in shares]
    item = mine[0].itemsize
    sent = mine[0] if len(mine) == 1 else np.concatenate([x[s] for s in shares for x in mine])
    splits = [width * len(mine) * item for width in widths]
    received, _ = alltoall(sent.view(np.uint8), splits, name=label, group=group)
    subtrees = [subtree for own in everyones for subtree in own]
    images = received.view(mine[0].dtype).reshape(len(subtrees), widths[group.rank])
    total: list[Subtree] = []
    for subtree, image in zip(subtrees, images, strict=True):
        total.append(Subtree(subtree.start, subtree.size, [image]))
        merge(total)
    result = mine[0]
    result[shares[group.rank]] = total[0].sums[0]
    owned = [(r, result[share]) for r, share in enumerate(shares) if widths[r]]
    names = [f"share {rank} of the sum" for rank, _ in owned]
    call = AllGatherInPlace(label, [rank for rank, _ in owned], names)
    # As bytes, since some dtypes (bfloat16) are NumPy's only by an extension.
    group.run(call, Part(group.memory([x.view(np.uint8) for _, x in owned])))
    return result


def _subtrees_in(leaves: range) -> list[Subtree]:
    """Return the subtrees, without arrays, that a rank has of these leaves."""
    found: list[Subtree] = []
    for leaf in leaves:
        found.append(Subtree(leaf, 1, []))
        merge(found)
    return found
