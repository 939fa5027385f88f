"""How parameters are dealt to ranks."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from horo_lite.training.sharding import GRAIN, Piece, divide

sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=20)


@given(sizes, st.integers(1, 6), st.data())
def test_every_element_belongs_to_one_rank_and_no_rank_has_too_many(
    sizes: list[int], n_ranks: int, data: st.DataObject
) -> None:
    may_cut = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    pieces = divide(sizes, may_cut, n_ranks)
    assert pieces == sorted(pieces)
    loads = [0] * n_ranks
    for i, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.parameter == i]
        assert [own[0].start, own[-1].stop] == [0, size]
        assert all(a.stop == b.start for a, b in itertools.pairwise(own))
        assert len(own) == 1 or may_cut[i]
        assert all(piece.start % GRAIN == 0 for piece in own)
        assert all(piece.start < piece.stop for piece in own) or size == 0
        for piece in own:
            loads[piece.owner] += piece.stop - piece.start
    largest = max((size for size, cut in zip(sizes, may_cut, strict=True) if not cut), default=0)
    assert max(loads) <= sum(sizes) / n_ranks + max(largest, 2 * len(sizes) * GRAIN)
    assert len(pieces) <= len(sizes) + n_ranks * 66


def test_the_largest_are_dealt_first_and_others_fill_up() -> None:
    pieces = divide([100, 300, 640, 200], [False, False, True, False], 2)
    assert pieces == [
        Piece(0, 0, 100, 1),
        Piece(1, 0, 300, 0),
        Piece(2, 0, 320, 0),
        Piece(2, 320, 640, 1),
        Piece(3, 0, 200, 1),
    ]
    assert divide([9000, 3000, 6000], [False, True, True], 2) == [
        Piece(0, 0, 9000, 0),
        Piece(1, 0, 3000, 1),
        Piece(2, 0, 6000, 1),
    ]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.integers(1, 70))
def test_each_rank_has_as_much_of_each_large_parameter(sizes: list[int], n_ranks: int) -> None:
    pieces = divide(sizes, [True] * len(sizes), n_ranks)
    share = sum(sizes) / n_ranks
    for i, size in enumerate(sizes):
        own = [piece.stop - piece.start for piece in pieces if piece.parameter == i]
        if size > n_ranks * max(GRAIN, share / 64):
            assert len(own) == n_ranks
            assert max(own) - min(own) <= 2 * GRAIN
    loads = [sum(p.stop - p.start for p in pieces if p.owner == r) for r in range(n_ranks)]
    assert max(loads) <= 1.1 * share + 2 * len(sizes) * GRAIN
