"""The oracle against results computed by hand, since it is the reference for the fast paths."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import bfloat16


def test_integers_wrap_in_sums_and_truncate_in_averages() -> None:
    a, b = np.array([100, -3, -128], np.int8), np.array([100, 0, -128], np.int8)
    assert oracle.allreduce_reference([a, b], "sum").tolist() == [-56, -3, 0]
    # -3 / 2 is -1.5: toward zero, not toward minus infinity; and no wrap-around before the
    # division.
    assert oracle.allreduce_reference([a, b], "average").tolist() == [100, -1, -128]
    assert oracle.allreduce_reference([a, b], "min").tolist() == [100, -3, -128]
    assert oracle.allreduce_reference([a, b], "max").tolist() == [100, 0, -128]
    assert oracle.allreduce_reference([a, b], "product").tolist() == [16, 0, 0]
    big = np.array([2**64 - 1], np.uint64)
    assert oracle.allreduce_reference([big, big], "average").tolist() == [2**64 - 1]
    assert oracle.allreduce_reference([big, big], "sum").tolist() == [2**64 - 2]


def test_bool_is_or_and_and() -> None:
    a, b = np.array([True, True, False]), np.array([True, False, False])
    assert oracle.allreduce_reference([a, b], "sum").tolist() == [True, True, False]
    assert oracle.allreduce_reference([a, b], "product").tolist() == [True, False, False]
    with pytest.raises(KeyError):
        oracle.allreduce_reference([a, b], "average")


def test_floats_are_float64_and_weights_divide_by_their_sum() -> None:
    a, b = np.array([1, 1e-8], np.float32), np.array([4, 3e-8], np.float32)
    assert oracle.allreduce_reference([a, b], "average")[0] == 2.5
    assert oracle.allreduce_reference([a, b], "average").dtype == np.float64
    weighted = oracle.allreduce_reference([a, b], "average", weights=[3, 1])
    np.testing.assert_allclose(weighted, [1.75, 1.5e-8], rtol=1e-7)
    assert oracle.allreduce_reference([a, b], "average", weights=[0, 2])[0] == 4


def test_rank_order_rounds_after_every_addition() -> None:
    # 2^24 + 1 is not a float32: the order of the sum shows in its bits.
    one, many = np.array([1], np.float32), np.array([2**24], np.float32)
    assert oracle.rank_order_reference([many, one, one], "sum") == 2**24
    assert oracle.rank_order_reference([one, one, many], "sum") == 2**24 + 2
    assert oracle.rank_order_reference([many, one, one], "sum", hosts=[0, 1, 1]) == 2**24 + 2
    assert oracle.rank_order_reference([one, one, one], "average") == 1
    thirds = oracle.rank_order_reference([one, one, np.zeros(1, np.float32)], "average")
    assert thirds == np.float32(2) / np.float32(3)
    halves = [np.array([60000], np.float16)] * 4
    assert oracle.rank_order_reference(halves, "average") == np.float16(60000)
    scaled = oracle.rank_order_reference([one, one], "sum", prescale=0.5, postscale=4)
    assert scaled == 4
    assert oracle.rank_order_reference([one.astype(bfloat16)] * 2, "sum").dtype == bfloat16


def test_factors_of_integers_truncate_each_contribution_and_wrap_around() -> None:
    reference = oracle.scaled_integers_reference
    assert reference((7, -7, 1), "sum", np.int8, 0.5, 1.0) == 0
    assert reference((7, 7), "sum", np.int8, 0.5, 1.0) == 6
    assert reference((100, 100), "sum", np.int8, 1.0, 1.0) == -56
    assert reference((100, 100), "sum", np.int8, 1.0, 0.5) == -28
    assert reference((100, 100), "average", np.int8, 1.0, 1.0) == 100
    assert reference((-7, -8), "average", np.int32, 1.0, 1.0) == -7
    assert reference((-7, -8), "average", np.int32, 1.0, 3.0) == -22
    assert reference((3, 5), "max", np.int32, -2.0, 1.0) == -6
    assert reference((2, 2, 2), "product", np.uint8, 4.0, 1.0) == 0


def test_the_bound_with_factors_holds_where_nothing_is_too_large() -> None:
    x = [np.array([1, 3e38, 1e-20], np.float32), np.array([2, 3e38, 1e-20], np.float32)]
    exact, bound, known = oracle.scaled_floats_reference(x, "sum", 2.0, 3.0, None, "none", 1)
    np.testing.assert_allclose(exact.astype(np.float64), [18, 3.6e39, 1.2e-19], rtol=1e-6)
    assert known.tolist() == [True, False, True]
    assert 0 < bound[0] < 1e-4
    weighted, _, _ = oracle.scaled_floats_reference(x, "average", 1.0, 1.0, [1, 3], "none", 1)
    assert float(weighted[0]) == 1.75
    _, of_wire, _ = oracle.scaled_floats_reference(x[:1] * 2, "sum", 2.0, 3.0, None, "bf16", 2)
    assert of_wire[0] > 12 * 2.0**-8 > bound[0]


def test_same_bits_sees_signed_zero_and_takes_any_nan() -> None:
    zero = np.zeros(2, np.float32)
    assert oracle.same_bits(zero, zero.copy())
    assert not oracle.same_bits(zero, -zero)
    assert not oracle.same_bits(zero, zero.astype(np.float64))
    assert not oracle.same_bits(zero, zero.reshape(2, 1))
    nan = np.array([np.nan, 1], np.float32)
    assert oracle.same_bits(nan, np.copysign(nan, [-1, 1]).astype(np.float32))
    assert not oracle.same_bits(nan, np.array([np.nan, 2], np.float32))


def test_adasum_is_the_sum_of_orthogonal_and_the_mean_of_equal_vectors() -> None:
    east, north, nothing = np.eye(3)[0], np.eye(3)[1], np.zeros(3)
    assert oracle.adasum_reference([3 * east]).tolist() == [3, 0, 0]
    assert oracle.adasum_reference([3 * east, 2 * north]).tolist() == [3, 2, 0]
    assert oracle.adasum_reference([east, east, north, nothing]).tolist() == [1, 1, 0]
    # a·b is 3, |a|² is 1, |b|² is 9.
    assert oracle.adasum_reference([east, 3 * east]).tolist() == [-0.5 + 3 * (1 - 1 / 6), 0, 0]


def test_rows_go_where_they_belong() -> None:
    inputs = [np.arange(3) + 10 * rank for rank in range(2)]
    assert oracle.allgather_reference(inputs).tolist() == [0, 1, 2, 10, 11, 12]
    assert oracle.broadcast_reference(inputs, 1).tolist() == [10, 11, 12]
    splits = [[1, 2], [3, 0]]
    assert oracle.alltoall_reference(inputs, splits, 0).tolist() == [0, 10, 11, 12]
    assert oracle.alltoall_reference(inputs, splits, 1).tolist() == [1, 2]
    assert [oracle.share_of(7, 3, rank) for rank in range(3)] == [
        slice(0, 3),
        slice(3, 5),
        slice(5, 7),
    ]
    assert [oracle.share_of(1, 2, rank) for rank in range(2)] == [slice(0, 1), slice(1, 1)]


def test_block_maximum_stays_in_its_block_and_ignores_what_is_not_finite() -> None:
    x = np.ones(oracle.BLOCK + 1, np.float32)
    y = x.copy()
    x[0], y[3], y[-1] = 7, np.inf, -9
    maxima = oracle.block_maximum([x, y])
    assert set(maxima[:-1]) == {7.0}
    assert maxima[-1] == 9
    assert oracle.block_maximum([np.empty((0, 3), np.float32)]).shape == (0, 3)


# What the bound must distinguish: the block-scaled wire satisfies it, plain fp16 does not.
EXTREMES = {
    "large": [np.full(8, 6e4, np.float32)] * 8,
    "small": [np.full(8, 2e-7, np.float32)] * 64,
    "two blocks": [np.repeat(np.array([1e6, 1e-7], np.float32), oracle.BLOCK)] * 2,
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_scaled_wire_keeps_the_bound_and_plain_fp16_breaks_it(name: str) -> None:
    inputs = EXTREMES[name]
    exact = oracle.allreduce_reference(inputs, "average")
    bound = oracle.wire_bound(inputs, "fp16")
    assert np.all(np.abs(oracle.fp16_wire_reference(inputs) - exact) <= bound)
    plain = oracle.fp16_wire_reference([2 * x for x in inputs], scaled=False)
    with np.errstate(invalid="ignore"):
        assert not np.all(np.abs(plain - 2 * exact) <= 2 * bound)


def test_the_bound_by_hand() -> None:
    # The unit roundoff is half the gap above 1: 10 stored bits in float16, 7 in bfloat16.
    for dtype, u in ((np.float16, 2.0**-11), (bfloat16, 2.0**-8)):
        one = np.ones(1, dtype)
        assert (np.ones(1) + 2 * u).astype(dtype) > one
        assert (np.ones(1) + u).astype(dtype) == one
    # One rank, 1 and 2^-30 in one block: relative 2 * 2^-11, absolute 2^-37 of the largest.
    bound = oracle.wire_bound([np.array([1, 2.0**-30], np.float32)], "fp16")
    np.testing.assert_allclose(bound[0], 2.0**-10, rtol=0.01)
    np.testing.assert_allclose(bound[1], 2.0**-37 + 2.0**-40, rtol=0.01)
    opposite = [np.array([1.0], np.float32), np.array([-1.0], np.float32)]
    np.testing.assert_allclose(oracle.wire_bound(opposite, "fp16"), 2.0**-11, rtol=0.01)
    np.testing.assert_allclose(oracle.wire_bound(opposite, "fp16", hosts=2), 2.0**-10, rtol=0.01)
    np.testing.assert_allclose(oracle.wire_bound(opposite, "bf16"), 2.0**-8, rtol=0.02)
    np.testing.assert_allclose(oracle.wire_bound(opposite, "none"), 2 * 2.0**-24, rtol=0.01)


@settings(max_examples=100)
@given(
    st.lists(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=5,
    )
)
def test_the_model_of_the_wire_keeps_the_bound_whatever_the_numbers(
    rows: list[list[float]],
) -> None:
    inputs = [np.array(row, np.float32) for row in rows]
    error = np.abs(
        oracle.fp16_wire_reference(inputs) - oracle.allreduce_reference(inputs, "average")
    )
    assert np.all(error <= oracle.wire_bound(inputs, "fp16"))


def test_samples_differ_between_ranks() -> None:
    for dtype in (*oracle.INTEGERS, *oracle.FLOATS):
        a, b = (oracle.sample(rank, (64,), dtype) for rank in range(2))
        assert a.dtype == dtype
        assert not np.array_equal(a, b)
        assert not np.array_equal(a, oracle.sample(0, (64,), dtype, seed=1))
        whole = oracle.whole_sample(1, (64,), dtype)
        assert np.array_equal(whole, oracle.whole_sample(1, (64,), np.float64).astype(dtype))
