"""Every cell of dtype x op x wire x factors x weights: computed right, or refused on all ranks.

What is refused is stated here again, independently of `horo_lite.collectives.arithmetic`: a cell
that is neither refused nor computed right fails, as does a dtype of the core that is not listed.
Results are compared with exact arithmetic: with Python's integers for integers, and in long double
for floating-point numbers, with the bounds that the documentation states.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import oracle
import pytest
from oracle import Array, bfloat16, same_bits

from horo_lite import Average, Compression, Max, Min, Op, Product, Sum, _native, ops
from horo_lite.collectives.compression import Compressor

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

N_ELEMENTS = 29
OPS = (Average, Sum, Min, Max, Product)
WIRES = (Compression.none, Compression.fp16, Compression.bf16)
DTYPES = {
    "bool": np.dtype(bool),
    **{str(dtype): dtype for dtype in oracle.INTEGERS},
    **{str(dtype): dtype for dtype in oracle.FLOATS},
    "longdouble": np.dtype(np.longdouble),
}
# prescale_factor and postscale_factor
FACTORS = (
    (1.0, 1.0),
    (0.5, 1.0),
    (-2.0, 0.7),
    (0.0, 1.0),
    (1.0, 3e4),
    (1e-40, 1.0),  # outside of float32
    (1e40, 1.0),
    (1.0, 1e-40),
    (1.0, 1e40),
    (2.0**40, 1.0),
    (1e-200, 1.0),  # outside of what any dtype takes
    (1.0, 1e200),
)
WEIGHTS = ("none", "samples", "fractions", "one is 0", "far apart", "all are 0")


class Cell(NamedTuple):
    """One reduction; of all dtypes for which it is not refused."""

    op: Op
    wire: Compressor
    prescale: float
    postscale: float
    weights: str

    @property
    def factors(self) -> list[float]:
        return [factor for factor in (self.prescale, self.postscale) if factor != 1.0]

    def weights_of(self, size: int) -> list[float] | None:
        return {
            "none": None,
            "samples": [2.0 * rank + 3 for rank in range(size)],
            "fractions": [0.3 * 1.7**rank for rank in range(size)],
            "one is 0": [float(rank + (size == 1)) for rank in range(size)],
            "far apart": [1e-12 if rank == 0 else 0.1 * rank for rank in range(size)],
            "all are 0": [0.0] * size,
        }[self.weights]

    def is_refused(self, dtype: str) -> bool:
        """Return whether this is in no row of the documented table."""
        if self.weights == "all are 0" or (self.weights != "none" and self.op is not Average):
            return True
        if dtype == "bool":
            return self.op is Average or bool(self.factors)
        if np.dtype(DTYPES[dtype]).kind in "iu":
            weighted = self.weights != "none" and bool(self.factors)
            return weighted or any(abs(factor) > 2.0**32 for factor in self.factors)
        return any(factor and not 1e-150 <= abs(factor) <= 1e150 for factor in self.factors)


def cells() -> Iterator[Cell]:
    for op, wire, factors, weights in itertools.product(OPS, WIRES, FACTORS, WEIGHTS):
        if op is Average or weights in ("none", "samples"):
            yield Cell(op, wire, *factors, weights)


def check_cells(group: Group, hosts: Sequence[int], every: int = 1) -> int:
    """Compute or refuse each `every`-th reduction of all dtypes; return the number of cells.

    All ranks of the group call it.
    """
    assert sorted(DTYPES) == sorted(_native.dtypes())
    n_cells, outputs = 0, []
    for number, cell in itertools.islice(enumerate(cells()), group.size % every, None, every):
        weights = cell.weights_of(group.size)
        weight = None if weights is None else weights[group.rank]
        options: dict[str, Any] = {
            "compression": cell.wire,
            "prescale_factor": cell.prescale,
            "postscale_factor": cell.postscale,
            "group": group,
        }
        computed = []
        for dtype in DTYPES:
            n_cells += 1
            if cell.is_refused(dtype):
                _expect_refusal(number + n_cells, cell, dtype, options, weight)
            else:
                computed.append(dtype)
        if not computed:
            continue
        inputs = [_inputs(rank, computed, cell) for rank in range(group.size)]
        mine = [x.copy() for x in inputs[group.rank]]
        part = slice(None)
        how = number % 4
        if how == 0:
            results = ops.grouped_allreduce(mine, cell.op, weight=weight, **options)
        elif how == 1:
            results = ops.grouped_allreduce_(mine, cell.op, weight=weight, **options)
        elif how == 2 or weights is not None:
            handle = ops.grouped_allreduce_async_(mine, cell.op, weight=weight, **options)
            results = group.synchronize(handle)
        else:
            part = group.part_of(mine[0])
            results = [ops.reducescatter(x, cell.op, **options) for x in mine]
        if how != 3:
            outputs.extend(results)
        if number % group.size == group.rank:
            for i, result in enumerate(results):
                of_all = [arrays[i] for arrays in inputs]
                _check(cell, of_all, np.asarray(result), part, weights, hosts)
    digests = ops.allgather_object(list(map(_bits, outputs)), group=group)
    assert all(digest == digests[0] for digest in digests), "ranks have different bits"
    return n_cells


def _bits(x: Array) -> object:
    # Elements of long double are padded.
    return list(map(str, x)) if x.dtype == np.longdouble else x.tobytes()


def _expect_refusal(
    number: int, cell: Cell, dtype: str, options: dict[str, Any], weight: float | None
) -> None:
    x = np.ones(3, DTYPES[dtype])
    pattern = "every rank passed weight 0" if cell.weights == "all are 0" else dtype
    if cell.weights not in ("none", "all are 0") and cell.op is not Average:
        pattern = "a weight needs op=Average"
    if cell.weights == "all are 0":
        pattern = f"every rank passed weight 0|{dtype}"
    calls = (
        lambda: ops.allreduce_(x, cell.op, weight=weight, **options),
        lambda: options["group"].synchronize(
            ops.allreduce_async(x, cell.op, weight=weight, **options)
        ),
        lambda: ops.reducescatter(x, cell.op, **options),
    )
    how = number % 3 if weight is None else number % 2
    with pytest.raises(ValueError, match=pattern):
        calls[how]()
    assert np.array_equal(x, np.ones(3, x.dtype)), "a refused reduction changes nothing"


# The inputs: numbers that differ between ranks, numbers that are equal on all, and extremes.


def _inputs(rank: int, dtypes: Sequence[str], cell: Cell) -> list[Array]:
    return [_numbers(rank, DTYPES[dtype], cell) for dtype in dtypes]


def _numbers(rank: int, dtype: np.dtype[Any], cell: Cell) -> Array:
    random = np.random.default_rng([rank, 5])
    if dtype == np.bool_:
        return np.asarray(random.integers(0, 2, N_ELEMENTS)).astype(bool)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        equal = [7, limits.max, limits.min, limits.max // 3, min(limits.max, 2**53 + 1), 0, 1]
        some = random.integers(limits.min, limits.max, 12, dtype, endpoint=True)
        small = random.integers(0, 12, N_ELEMENTS - len(equal) - len(some)).astype(dtype)
        return np.concatenate([np.array(equal, dtype), some, small])
    # What a factor makes small or large has ordinary results, where the dtype has room for that.
    size = 1 / cell.prescale if 1e-50 < abs(cell.prescale) < 1e-20 or cell.prescale > 1e20 else 1.0
    x = random.standard_normal(N_ELEMENTS) * (rank + 1)
    x[:4] = 1.0, -3.1416, 0.0, 255 / 128
    with np.errstate(over="ignore", under="ignore"):
        scaled = (x * size).astype(dtype)
        if not np.all(np.isfinite(scaled)) or not scaled[:2].all():
            scaled = x.astype(dtype)
    if cell.wire is Compression.none and not cell.factors:
        limits = np.finfo(dtype) if dtype != bfloat16 else np.finfo(np.float32)
        least = limits.smallest_subnormal
        scaled[4:7] = np.array([least, 1e-4, float(limits.max) / 8], dtype)
        if dtype == np.float16:
            scaled[7] = 65504
    return scaled


# The comparison.


def _check(
    cell: Cell,
    inputs: Sequence[Array],
    got: Array,
    part: slice,
    weights: Sequence[float] | None,
    hosts: Sequence[int],
) -> None:
    dtype = inputs[0].dtype
    what = f"{cell} of {dtype} over {len(inputs)} ranks on hosts {list(hosts)}"
    assert got.dtype == dtype, what
    if dtype == np.bool_:
        expected = oracle.allreduce_reference(inputs, cell.op.value)[part]
        assert got.tobytes() == expected.tobytes(), what
    elif dtype.kind in "iu":
        _check_integers(cell, inputs, got, part, weights, what)
    else:
        _check_floats(cell, inputs, got, part, weights, hosts, what)


def _check_integers(
    cell: Cell,
    inputs: Sequence[Array],
    got: Array,
    part: slice,
    weights: Sequence[float] | None,
    what: str,
) -> None:
    columns = list(zip(*(x[part].tolist() for x in inputs), strict=True))
    whole = weights is None or all(weight.is_integer() for weight in weights)
    for column, result in zip(columns, got.tolist(), strict=True):
        if weights is None:
            expected = oracle.scaled_integers_reference(
                column, cell.op.value, inputs[0].dtype, cell.prescale, cell.postscale
            )
            assert result == expected, f"{what}: {column} gives {result}, not {expected}"
            continue
        total = sum(map(Fraction, weights))
        exact = sum(Fraction(w) * x for w, x in zip(weights, column, strict=True)) / total
        if whole or len(set(column)) == 1:
            assert result == math.trunc(exact), f"{what}: {column} gives {result}, not {exact}"
        else:
            rounding = len(column) * Fraction(2) ** -51 * max(map(abs, column))
            assert abs(result - exact) < 1 + rounding, f"{what}: {column}: {result}, not {exact}"


def _check_floats(
    cell: Cell,
    inputs: Sequence[Array],
    got: Array,
    part: slice,
    weights: Sequence[float] | None,
    hosts: Sequence[int],
    what: str,
) -> None:
    op, dtype = cell.op.value, inputs[0].dtype
    exact, bound, known = oracle.scaled_floats_reference(
        inputs, op, cell.prescale, cell.postscale, weights, cell.wire.wire, len(set(hosts))
    )
    with np.errstate(all="ignore"):
        error = np.abs(got.astype(np.longdouble) - exact[part])
        right = error <= bound[part]
        # Results too large for the dtype are infinite; just below, rounding decides.
        too_large = np.abs(exact[part]) + bound[part] > _largest(dtype)
        right |= too_large & np.isinf(got) & (np.signbit(got) == (exact[part] < 0))
    wrong = np.flatnonzero(~right & known[part])
    assert not wrong.size, (
        f"{what}: at {wrong[:3]} {got[wrong[:3]]} is not {exact[part][wrong[:3]]}, "
        f"inputs {[x[part][wrong[0]] for x in inputs]}, allowed {bound[part][wrong[:3]]}"
    )
    # Equal values have themselves as their average, minimum and maximum.
    if cell.wire is Compression.none and not cell.factors and weights is None:
        first = inputs[0][part]
        equal = np.all([x[part] == first for x in inputs], axis=0)
        if op in ("average", "min", "max"):
            assert same_bits(got[equal], first[equal]), f"{what}: {got[equal]} of {first[equal]}"


def _largest(dtype: np.dtype[Any]) -> Any:
    if dtype == bfloat16:
        return np.longdouble(float.fromhex("0x1.fep127"))
    return np.longdouble(np.finfo(dtype).max)
