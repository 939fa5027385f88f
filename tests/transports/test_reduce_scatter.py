"""The reduce-scatter in one host's shared memory, on ranks as threads, gives an all-reduce's bits.

Bits depend on the order in which ranks are added, and on rounding: the values show both.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.transports.interface import Reduction

Arrays = list[NDArray[np.generic]]


def reduced(
    inputs: Sequence[Sequence[Arrays]], reduction: Reduction, in_place: bool = False
) -> tuple[list[Arrays], list[Arrays]]:
    """Return each rank's result for inputs[rank][part], and its part of an all-reduce."""
    n = len(inputs)
    groups = _native.thread_group(n)

    def body(rank: int) -> tuple[Arrays, Arrays]:
        group, parts = groups[rank], [[x.copy() for x in part] for part in inputs[rank]]
        result = parts[rank] if in_place else [np.zeros_like(x) for x in parts[rank]]
        for _ in range(2):  # data that one leaves in shared memory must have no effect
            if in_place:
                for x, given in zip(result, inputs[rank][rank], strict=True):
                    x[...] = given
            group.agree("scatter", 1)
            given = [_native.Tensors(part, False) for part in parts]
            group.reduce_scatter(given, _native.Tensors(result), *reduction)
        for part, before in zip(parts, inputs[rank], strict=True):
            if part is not result:
                assert all(map(np.array_equal, part, before))
        whole = [[x.copy() for x in part] for part in inputs[rank]]
        group.agree("all", 2)
        group.allreduce(_native.Tensors([x for part in whole for x in part]), *reduction)
        return result, whole[rank]

    with ThreadPoolExecutor(n) as pool:
        both = list(pool.map(body, range(n)))
    return [result for result, _ in both], [expected for _, expected in both]


def values(n: int, sizes: Sequence[Sequence[int]], dtype: str) -> list[list[Arrays]]:
    """Return each rank's arrays for each part: `sizes` are those of every part's arrays."""

    def array(rng: np.random.Generator, size: int) -> NDArray[np.generic]:
        scaled = rng.standard_normal(size) * 2.0 ** rng.integers(-6, 7, size)
        return (
            scaled.astype(dtype) if "float" in dtype else rng.integers(1, 100, size).astype(dtype)
        )

    rngs = [np.random.default_rng(rank) for rank in range(n)]
    return [[[array(rng, size) for size in part] for part in sizes] for rng in rngs]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("op", ["sum", "average", "min", "product"])
def test_the_bits_of_an_all_reduce(op: str, dtype: str, n: int, in_place: bool) -> None:
    sizes = [[1025 + rank, 0, 3, 70_000 * (rank == 1)] for rank in range(n)]
    reduction = Reduction.of(op, "none", 1.0, 1.0, [1.0] * n)
    found, expected = reduced(values(n, sizes, dtype), reduction, in_place)
    for rank in range(n):
        for x, wanted in zip(found[rank], expected[rank], strict=True):
            assert x.tobytes() == wanted.tobytes(), rank
    # Neither this rank's own part nor the total sum by chance.
    assert not np.array_equal(found[0][0], values(n, sizes, dtype)[0][0][0])


@pytest.mark.parametrize("wire", ["fp16", "bf16"])
def test_what_travels_may_be_narrower(wire: str) -> None:
    reduction = Reduction.of("weighted average", wire, 0.5, 2.0, [1.0, 3.0, 2.0])
    found, expected = reduced(values(3, [[5000], [1], [30_000]], "float32"), reduction)
    for x, wanted in zip(found, expected, strict=True):
        assert x[0].tobytes() == wanted[0].tobytes()


def test_results_that_do_not_fit_are_refused() -> None:
    (alone,) = _native.thread_group(1)
    x = np.ones(4, np.float32)
    for parts, result in (([x], x[:2]), ([x], x.astype(np.int32)), ([x, x], x)):
        with pytest.raises(ValueError, match=r"differs from this|a part for each"):
            alone.reduce_scatter(
                [_native.Tensors([p]) for p in parts], _native.Tensors([result]), "sum", "none"
            )


def test_more_ranks_than_a_slot_has_blocks() -> None:
    """With the widest elements on the wire: a block of each does not fit, so they take turns."""
    n = 20
    inputs = values(n, [[2500 + rank] for rank in range(n)], "int64")
    found, expected = reduced(inputs, Reduction.of("average", "none", 1.0, 1.0, [1.0] * n))
    assert [x[0].tolist() for x in found] == [x[0].tolist() for x in expected]
    assert found[3][0].tolist() == [
        int(sum(column)) // n for column in np.stack([one[3][0] for one in inputs]).T.tolist()
    ]
