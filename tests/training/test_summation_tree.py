"""Sums in the order of one tree: the same bits, however the leaves are dealt to ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch import run_threads

from horo_lite import Group
from horo_lite.training.summation_tree import Subtree, leaves_of, merge, sum_of_all

SHAPES = [(np.dtype(np.float64), 3), (np.dtype(np.float32), 1003), (np.dtype(np.float16), 1)]
CASES = [(n, size) for n in (1, 2, 4, 8, 16) for size in range(1, min(n, 5) + 1)]


def leaf(number: int) -> list[Any]:
    rng = np.random.default_rng(number)
    scale = 10.0 ** rng.integers(-3, 4)  # so that each order of additions rounds differently
    return [(scale * rng.standard_normal(n)).astype(dtype) for dtype, n in SHAPES]


def tree_reference(first: int, n: int) -> list[Any]:
    """Return the sum of n leaves, each node the sum of its children."""
    if n == 1:
        return leaf(first)
    left, right = tree_reference(first, n // 2), tree_reference(first + n // 2, n // 2)
    return [a + b for a, b in zip(left, right, strict=True)]


def total(group: Group, n: int) -> list[Any]:
    subtrees: list[Subtree] = []
    for number in leaves_of(group.rank, group.size, n):
        subtrees.append(Subtree(number, 1, leaf(number)))
        merge(subtrees)
    return sum_of_all(subtrees, n, group, "test")


@pytest.mark.parametrize(("n", "size"), CASES)
def test_every_number_of_ranks_gives_the_bits_of_the_tree(n: int, size: int) -> None:
    expected = [x.tobytes() for x in tree_reference(0, n)]
    for sums in run_threads(size, lambda group: total(group, n)):
        assert [x.tobytes() for x in sums] == expected


def test_the_order_matters_for_these_leaves() -> None:
    leaves = [leaf(i)[1] for i in range(4)]
    assert (((leaves[0] + leaves[1]) + leaves[2]) + leaves[3] != tree_reference(0, 4)[1]).any()
    assert (tree_reference(0, 8)[1] != sum(leaf(i)[1] for i in range(8))).any()


@pytest.mark.parametrize("n", [1, 2, 8, 32])
def test_ranks_have_contiguous_leaves_and_few_subtrees(n: int) -> None:
    for size in range(1, n + 1):
        ranges = [leaves_of(rank, size, n) for rank in range(size)]
        assert [i for own in ranges for i in own] == list(range(n))
        for own in ranges:
            subtrees: list[Subtree] = []
            for i in own:
                subtrees.append(Subtree(i, 1, []))
                merge(subtrees)
            assert len(subtrees) == 1 or size & (size - 1)
            assert len(subtrees) <= max(1, 2 * len(own).bit_length() - 2)
