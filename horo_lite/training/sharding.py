"""Which rank updates which part of the parameters, if each has only its share of the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GRAIN = 64
"""Parameters are cut at multiples of this number of elements, so that vectorized loops over a piece
compute each element as they would in the whole parameter, and not in their scalar remainders."""


class Piece(NamedTuple):
    """The elements [start, stop) of a parameter, in memory order, which belong to one rank."""

    parameter: int
    start: int
    stop: int
    owner: int


def divide(sizes: Sequence[int], may_cut: Sequence[bool], n_ranks: int) -> list[Piece]:
    """Deal parameters to ranks, with about as many elements for each.

    Those that may not be cut are dealt first, the largest first, each to the rank that has least.
    The others fill up the ranks' shares in order, and at most n_ranks - 1 of them are cut.

    Args:
        sizes: The number of elements of each parameter.
        may_cut: Whether it may be divided between ranks.
        n_ranks: The number of ranks.

    Returns:
        The pieces, ordered by parameter and start.
    """
    share = sum(sizes) / n_ranks
    loads = [0] * n_ranks
    pieces = []

    def give(i: int, start: int, stop: int, rank: int) -> None:
        pieces.append(Piece(i, start, stop, rank))
        loads[rank] += stop - start

    whole = [i for i, cut in enumerate(may_cut) if not cut]
    for i in sorted(whole, key=lambda i: -sizes[i]):
        give(i, 0, sizes[i], loads.index(min(loads)))
    rank = 0
    for i, size in enumerate(sizes):
        start = 0
        while may_cut[i]:
            while rank < n_ranks - 1 and share - loads[rank] < GRAIN:
                rank += 1
            room = int(share - loads[rank]) // GRAIN * GRAIN
            stop = size if rank == n_ranks - 1 or size - start < room + GRAIN else start + room
            give(i, start, stop, rank)
            start = stop
            if start == size:
                break
    return sorted(pieces)
