"""The expected result of every collective, in NumPy, for all ranks at once.

Each `…_reference` takes the inputs of all ranks in rank order. Reductions come in two kinds:
`allreduce_reference` is the mathematical result (float64, or exact integers), and
`rank_order_reference` is its specified rounding: accumulated in float32 or wider in rank order,
then divided, then rounded once to the dtype. `wire_bound` is the largest allowed error of a result
that was transferred in fewer bits, against the first kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
bfloat16 = np.dtype(ml_dtypes.bfloat16)

BLOCK = 1024  # elements that share one scale on the fp16 wire
INTEGERS = tuple(np.dtype(code) for code in "bBhHiIlLqQ")
FLOATS = (np.dtype(np.float16), bfloat16, np.dtype(np.float32), np.dtype(np.float64))
OPS = ("average", "sum", "min", "max", "product")


def is_float(dtype: npt.DTypeLike) -> bool:
    """Return whether reductions of this dtype are rounded instead of exact."""
    return np.dtype(dtype) in FLOATS


def sample(rank: int, shape: Sequence[int], dtype: npt.DTypeLike, *, seed: int = 0) -> Array:
    """Return numbers that differ by rank and seed, small enough to multiply."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng([seed, rank, *shape])
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(np.bool_)
    if is_float(dtype):
        return np.asarray(random.standard_normal(shape) * (rank + 1)).astype(dtype)
    low = 0 if dtype.kind == "u" else -9
    return np.asarray(random.integers(low, 10, shape) + rank).astype(dtype)


def whole_sample(rank: int, shape: Sequence[int], dtype: npt.DTypeLike, *, seed: int = 0) -> Array:
    """Return small whole numbers (0 … 15, so exact in any dtype) that differ by rank and seed."""
    random = np.random.default_rng([seed, rank, *shape])
    return np.asarray(random.integers(0, 12, shape) + rank % 4).astype(dtype)


def _stack(inputs: Sequence[Array], dtype: npt.DTypeLike) -> Array:
    return np.stack([np.asarray(x).astype(dtype) for x in inputs])


def allreduce_reference(
    inputs: Sequence[Array], op: str, *, weights: Sequence[float] | None = None
) -> Array:
    """Return the reduction as float64, or exactly in the input's own dtype for integers and bool.

    Sums and products of integers wrap around as in NumPy; their average is the exact sum over N
    truncated toward zero. Weighted: sum(w * x) / sum(w).
    """
    dtype = inputs[0].dtype
    if dtype == np.bool_:
        reduce = {"sum": np.any, "max": np.any, "product": np.all, "min": np.all}[op]
        return np.asarray(reduce(np.stack(inputs), axis=0))
    if not is_float(dtype):
        return _integer_reference(inputs, op)
    x = _stack(inputs, np.float64)
    if op == "average":
        w = np.ones(len(inputs)) if weights is None else np.asarray(weights, np.float64)
        return np.asarray(np.tensordot(w, x, axes=1) / w.sum())
    ufunc = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
    return np.asarray(ufunc.reduce(x, axis=0))


def _integer_reference(inputs: Sequence[Array], op: str) -> Array:
    dtype = inputs[0].dtype
    bits = 8 * dtype.itemsize

    def wrapped(value: int) -> int:
        value &= (1 << bits) - 1
        return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value

    def of(column: tuple[int, ...]) -> int:
        if op == "min":
            return min(column)
        if op == "max":
            return max(column)
        if op == "product":
            product = 1
            for value in column:
                product *= value
            return wrapped(product)
        total = sum(column)
        if op == "sum":
            return wrapped(total)
        return abs(total) // len(column) * (1 if total >= 0 else -1)

    columns = zip(*(x.ravel().tolist() for x in inputs), strict=True)
    return np.array([of(column) for column in columns], dtype).reshape(inputs[0].shape)


def rank_order_reference(
    inputs: Sequence[Array],
    op: str,
    *,
    prescale: float = 1.0,
    postscale: float = 1.0,
    hosts: Sequence[int] | None = None,
) -> Array:
    """Return the floats that must be reproduced bit for bit without compression.

    Accumulated in float32 (float64 for float64 inputs) in rank order, divided by N for an average,
    then rounded once to the input's dtype. With `hosts` (the host of each rank) every host first
    sums its own ranks, and the hosts' sums are added in host order.
    """
    dtype = inputs[0].dtype
    wide: Any = np.float64 if dtype == np.float64 else np.float32
    combine = {
        "average": np.add,
        "sum": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
    }[op]
    of_host: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for rank, x in enumerate(inputs):
            value = x.astype(wide)
            if prescale != 1.0:
                value = value * wide(prescale)
            host = 0 if hosts is None else hosts[rank]
            of_host[host] = combine(of_host[host], value) if host in of_host else value
        total = of_host.pop(min(of_host))
        for host in sorted(of_host):
            total = combine(total, of_host[host])
        if op == "average":
            total = total / wide(len(inputs))
        if postscale != 1.0:
            total = total * wide(postscale)
        return np.asarray(total).astype(dtype)


def same_bits(a: Array, b: Array) -> bool:
    """Return whether shape, dtype and every bit agree; any nan equals any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not is_float(a.dtype):
        return bool(np.array_equal(a, b))
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    bits_a = np.ascontiguousarray(a).view(unsigned)
    bits_b = np.ascontiguousarray(b).view(unsigned)
    return bool(np.all((bits_a == bits_b) | (np.isnan(a) & np.isnan(b)).reshape(bits_a.shape)))


def block_maximum(inputs: Sequence[Array], block: int = BLOCK) -> Array:
    """Return for each element (C order) its block's largest finite magnitude over all ranks."""
    magnitude = np.abs(_stack(inputs, np.float64)).reshape(len(inputs), -1)
    magnitude[~np.isfinite(magnitude)] = 0
    largest = magnitude.max(axis=0, initial=0)
    starts = np.arange(0, largest.size, block)
    maxima = np.maximum.reduceat(largest, starts) if largest.size else largest
    return np.repeat(maxima, block)[: largest.size].reshape(inputs[0].shape)


def wire_bound(inputs: Sequence[Array], wire: str, *, hosts: int = 1) -> Array:
    """Return, elementwise, the largest allowed error of an average over ranks. Finite inputs only.

    Each rank rounds its contribution to the wire's precision u once, and the result is rounded once
    more: u * (mean |x_r| + |mean|), with (1 + 4u) for rounding rounded values. Adding N numbers in
    float32 costs N * 2^-24 * mean |x_r|. Between hosts a host's sum is rounded too. For fp16 (u =
    2^-11), values far below the largest magnitude m of their block are subnormal on the wire and
    have an absolute error of 2^-37 * m; a block has 1,024 elements of one tensor. For bf16 u is
    2^-8, and subnormal numbers of bf16 have an absolute error of 2^-133.
    """
    x = _stack(inputs, np.float64)
    n = len(inputs)
    mean = x.mean(axis=0)
    mean_magnitude = np.abs(x).mean(axis=0)
    accumulation = n * 2.0**-24 * mean_magnitude + 2.0**-149
    if wire == "none":
        return np.asarray(accumulation)
    u, absolute = {
        "fp16": (2.0**-11, 2.0**-37 * block_maximum(inputs)),
        "bf16": (2.0**-8, np.asarray(2.0**-133)),
    }[wire]
    roundings = 1 if hosts == 1 else 2
    relative = (1 + 4 * u) * u * (roundings * mean_magnitude + np.abs(mean))
    return np.asarray(relative + roundings * absolute + accumulation)


def scaled_integers_reference(
    column: Sequence[int], op: str, dtype: npt.DTypeLike, prescale: float, postscale: float
) -> int:
    """Return the reduction of one integer of each rank with factors, by Python's integers.

    A product with a factor is computed in float64 and truncated towards zero. All numbers wrap
    around as the dtype does, but not the sum that is divided to an average.
    """
    limits = np.iinfo(dtype)

    def wrapped(value: int) -> int:
        return (value - int(limits.min)) % (1 << limits.bits) + int(limits.min)

    values = [x if prescale == 1 else int(float(x) * prescale) for x in column]
    if op == "average":
        total, n = sum(values), len(values)
        if postscale == 1:
            return wrapped(abs(total) // n * (1 if total >= 0 else -1))
        return wrapped(int(float(total) * postscale / n))
    combine = {"sum": sum, "min": min, "max": max, "product": math.prod}[op]
    combined = wrapped(combine(map(wrapped, values)))
    return combined if postscale == 1 else wrapped(int(float(combined) * postscale))


def scaled_floats_reference(
    inputs: Sequence[Array],
    op: str,
    prescale: float,
    postscale: float,
    weights: Sequence[float] | None,
    wire: str,
    n_hosts: int,
) -> tuple[Array, Array, Array]:
    """Return the reduction with factors and weights in long double, its largest allowed error, and
    where that holds.

    It does not hold where the sum, or a contribution, is too large for the type in which it is
    computed (float32, or the dtype if that is wider), or a product on the way is too small.
    """
    dtype, n = inputs[0].dtype, len(inputs)
    x = _stack(inputs, np.longdouble)
    narrow = dtype in (np.dtype(np.float16), bfloat16)
    if dtype == bfloat16:  # a host's sum is rounded to bfloat16
        wire = "none" if n_hosts == 1 else "bf16"
    elif dtype == np.float16:
        wire = "none" if wire == "none" else "fp16"
    elif dtype == np.longdouble:
        wire = "none"
    if op == "product" and dtype != bfloat16:
        wire = "none"
    in_float32 = narrow or dtype == np.float32 or wire != "none"
    wide = np.finfo(np.float32 if in_float32 else dtype)
    one = np.asarray([1.0] * n if weights is None else weights, np.longdouble)[:, None]
    share = one / one.sum() if op == "average" else one
    with np.errstate(all="ignore"):
        y = x * np.longdouble(prescale) * share
        reduce = {"average": np.add, "sum": np.add, "min": np.minimum, "max": np.maximum}
        result = reduce.get(op, np.multiply).reduce(y, axis=0)
        size = {"min": np.max, "max": np.max, "product": lambda *_, **__: np.abs(result)}.get(
            op, np.sum
        )(np.abs(y), axis=0)
        least = np.longdouble(wide.smallest_subnormal)
        eps = np.longdouble(wide.eps if weights is None else max(wide.eps, 2.0**-52))
        error = (n + 6) * eps * size + n * least * (1 + abs(prescale))
        if wire != "none":
            u = {"fp16": 2.0**-11, "bf16": 2.0**-8}[wire]
            roundings = 2 if n_hosts == 1 else 3
            error = error + (1 + 4 * u) * u * roundings * size
            in_block = n * np.abs(y).max()  # all elements are in one block
            absolute = {"fp16": 2.0**-37 * in_block, "bf16": n * 2.0**-133 * (1 + abs(prescale))}
            error = error + roundings * absolute[wire]
        exact = result * postscale
        own_eps, own_least = _limits(dtype)
        least = max(least, np.longdouble(2.0**-133)) if wire == "bf16" else least
        bound = error * abs(postscale) + least + own_eps * np.abs(exact) + own_least
        unscaled = y * n if op == "average" and weights is None else y
        on_the_way = np.multiply if op == "product" else np.add
        partial = on_the_way.accumulate(np.abs(unscaled), axis=0)
        known = np.all(partial < np.longdouble(wide.max) / 2, axis=0)
        if wire == "bf16":  # it has the range of float32
            most = np.maximum(np.abs(x).max(axis=0), np.abs(exact) + bound)
            known &= most < np.longdouble(wide.max)
        if op == "product":
            known &= np.all((partial == 0) | (partial > np.longdouble(wide.tiny)), axis=0)
    return exact, bound, known


def _limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the precision and the least positive number."""
    if dtype == bfloat16:
        return np.longdouble(2.0**-8), np.longdouble(2.0**-133)
    limits = np.finfo(dtype)
    return np.longdouble(limits.eps), np.longdouble(limits.smallest_subnormal)


def fp16_wire_reference(inputs: Sequence[Array], *, scaled: bool = True) -> Array:
    """Model in NumPy an average over the fp16 wire of one host; unscaled to see it fail.

    It is one way to satisfy `wire_bound`, not the specified bits.
    """
    flat = [np.asarray(x, np.float32).ravel() for x in inputs]
    out = np.empty_like(flat[0])
    for start in range(0, out.size, BLOCK):
        part = slice(start, start + BLOCK)
        largest = [_largest_finite(x[part]) for x in flat]
        exponents = [_exponent(m) if scaled else 0 for m in largest]
        total = np.zeros_like(out[part])
        with np.errstate(over="ignore"):
            for x, e in zip(flat, exponents, strict=True):
                half = np.ldexp(x[part], e).astype(np.float16)
                total += np.ldexp(half.astype(np.float32), -e)
            mean = total / np.float32(len(inputs))
            e = _exponent(max(largest)) if scaled else 0
            half = np.ldexp(mean, e).astype(np.float16)
            out[part] = np.ldexp(half.astype(np.float32), -e)
    return out.reshape(inputs[0].shape)


def _largest_finite(x: Array) -> float:
    magnitude = np.abs(x[np.isfinite(x)])
    return float(magnitude.max(initial=0))


def _exponent(largest: float) -> int:
    """Return the power of two that scales the largest magnitude to just under 2^15."""
    return 15 - int(np.frexp(largest)[1]) if largest else 0


def adasum_reference(inputs: Sequence[Array]) -> Array:
    """Maleki et al. (2020): (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b of pairs, then of pairs."""
    level = [np.asarray(x, np.float64) for x in inputs]
    while len(level) > 1:
        level = [_adasum(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _adasum(a: Array, b: Array) -> Array:
    dot = float((a * b).sum())
    share = [dot / (2 * square) if (square := float((x * x).sum())) else 0.0 for x in (a, b)]
    return (1 - share[0]) * a + (1 - share[1]) * b


def allgather_reference(inputs: Sequence[Array]) -> Array:
    """Return all ranks' rows, concatenated in rank order."""
    return np.concatenate(list(inputs), axis=0)


def broadcast_reference(inputs: Sequence[Array], root: int) -> Array:
    """Return the root's array."""
    return inputs[root]


def share_of(n: int, size: int, rank: int) -> slice:
    """Return the rows of n that a rank gets in a reducescatter: the first n % size get one more."""
    each, more = divmod(n, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def alltoall_reference(
    inputs: Sequence[Array], splits: Sequence[Sequence[int]], rank: int
) -> Array:
    """Return what `rank` receives when rank r sends splits[r][i] rows to rank i, in rank order."""
    parts = []
    for x, counts in zip(inputs, splits, strict=True):
        start = sum(counts[:rank])
        parts.append(x[start : start + counts[rank]])
    return np.concatenate(parts, axis=0)
