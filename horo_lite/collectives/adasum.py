"""Adasum: sums of gradients that shrink the more the gradients point the same way.

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are
orthogonal, their mean if they are equal. Ranks combine in pairs, pairs in fours, and so on, each
tensor separately, as in Maleki et al., "Scaling Distributed Training with Adaptive Summation"
(2020).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import _native, adapters
from horo_lite.adapters.object import NO_ORDER
from horo_lite.collectives.arrays import view
from horo_lite.transports.agreement import allgather_row

if TYPE_CHECKING:
    from horo_lite.collectives.arrays import Memory
    from horo_lite.transports import Transport

Array = Any  # a NumPy array, or a tensor in a GPU's memory

SMALLEST = -1022
"""The smallest scale (an exponent) whose inverse is also a float64."""


def check_size(size: int) -> None:
    """Raise ValueError if there is no Adasum of this number of ranks."""
    if size & (size - 1):
        raise ValueError(
            f"Adasum combines ranks in pairs, so their number must be a power of two, not "
            f"{size}: change the number of ranks, use a ProcessSet, or op=hvd.Average"
        )


def reduce(memory: Memory, transport: Transport, prescale: float, postscale: float) -> None:
    """Replace each array, in place, by its Adasum over all ranks, which have agreed on it.

    Needs memory for two copies of all arrays, in float64 if one of them is float64, otherwise in
    float32.

    Args:
        memory: Arrays of the same floating point dtypes and shapes on every rank.
        transport: Connects the ranks, whose number is a power of two.
        prescale: Multiplies this rank's contribution.
        postscale: Multiplies the result.
    """
    if not memory.arrays:
        return
    # On a GPU, the arithmetic must run in the stream in which its arrays travel.
    queue = 0 if memory.stream is None else memory.stream.queue.stream
    first = memory.arrays[0]
    stream = adapters.adapter_of(first).on_stream(first, queue) if queue else nullcontext()
    with stream, np.errstate(over="ignore", invalid="ignore"):  # loss scalers see them
        # A tensor's `data` is written without autograd's notice, like the memory of all operations.
        arrays = [x.data if hasattr(x, "detach") else view(x) for x in memory.arrays]
        of = _library(arrays[0])
        wide = any(str(x.dtype).endswith("float64") for x in arrays)
        dtype = of.float64 if wide else of.float32
        mine = of.concatenate([of.asarray(x, dtype=dtype).reshape(-1) for x in arrays])
        if memory.stream is None:
            mine = np.asarray(mine)  # whose arithmetic is the same for every framework's arrays
        mine *= prescale
        ends = list(accumulate(x.size if isinstance(x, np.ndarray) else x.numel() for x in arrays))
        _combine(transport, mine, _library(mine).empty_like(mine), ends)
        mine *= postscale
        for x, begin, end in zip(arrays, [0, *ends[:-1]], ends, strict=True):
            x[...] = of.asarray(mine[begin:end]).reshape(x.shape)


def _library(x: Array) -> Any:
    """Return the module of functions for an array: NumPy, or PyTorch with the same names."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def _dots(a: Array, b: Array, spans: Sequence[slice]) -> np.ndarray[Any, Any]:
    """Return, for each span, a·b, a·a and b·b, in float64, and the scales p and q.

    The products are of a/2**p and b/2**q, so that squares of float64 numbers neither overflow nor
    underflow.
    """
    of = _library(a)
    results = []
    for at in spans:
        x, y = _wide(a[at]), _wide(b[at])
        p, q = (_scale(v) if a.itemsize == 8 else of.zeros_like(v[0]) for v in (x, y))
        x, y = x * 2.0**-p, y * 2.0**-q
        results.append(of.stack([x.dot(y), x.dot(x), y.dot(y), p, q]))
    # From a GPU, all at once.
    return np.array(of.stack(results).tolist() if results else []).reshape(len(spans), 5)


def _wide(x: Array) -> Array:
    """Return `x` in float64."""
    of = _library(x)
    return of.asarray(x, dtype=of.float64)


def _scale(x: Array) -> Array:
    """Return the exponent of the largest magnitude."""
    of = _library(x)
    greatest = abs(x).max()
    exponent = (of.frexp(greatest)[1] - 1).clip(SMALLEST)
    return _wide(of.where(greatest == 0, SMALLEST, exponent))


def _combine(transport: Transport, mine: Array, theirs: Array, ends: Sequence[int]) -> None:
    """Replace `mine` by the Adasum of all ranks' arrays.

    Its tensors are consecutive, up to `ends`. `theirs` is for those of other ranks.

    Halves go to the partner and back (recursive halving), so each number is computed by one rank
    only, and is the same on all.
    """
    rank, size = transport.rank, transport.size
    begin, end = 0, len(mine)
    distance = 1
    while distance < size:
        partner = rank ^ distance
        middle = begin + (end - begin + 1) // 2
        first, second = (begin, middle), (middle, end)
        keep, give = (first, second) if rank < partner else (second, first)
        _swap(transport, partner, mine, give, theirs, keep)
        begin, end = keep
        lower, upper = (mine, theirs) if rank < partner else (theirs, mine)
        spans = _spans(ends, begin, end)
        dots = np.tile([0.0, 0.0, 0.0, SMALLEST, SMALLEST], (len(ends), 1))
        dots[[i for i, _ in spans]] = _dots(lower, upper, [at for _, at in spans])
        # The tensors are spread over all ranks that have been combined so far.
        block = rank // (2 * distance) * 2 * distance
        total = _sum_of(transport, dots, range(block, block + 2 * distance))
        for i, at in spans:
            dot, aa, bb, p, q = total[i].tolist()
            # In float64: the factor of a tensor much smaller than its peer may exceed float32.
            a, b = _wide(lower[at]), _wide(upper[at])
            a_less = a * 2.0**-p * (dot / (2.0 * aa) * 2.0**q) if aa else 0.0
            b_less = b * 2.0**-q * (dot / (2.0 * bb) * 2.0**p) if bb else 0.0
            mine[at] = (a - a_less) + (b - b_less)
        distance *= 2
    while distance > 1:
        distance //= 2
        partner = rank ^ distance
        begin_, end_ = _part(partner, distance, size, len(mine))
        _swap(transport, partner, mine, (begin, end), mine, (begin_, end_))
        begin, end = min(begin, begin_), max(end, end_)


def _part(rank: int, distance: int, size: int, n: int) -> tuple[int, int]:
    """Return the range that `rank` holds after halving up to `distance`, or joining down to it."""
    begin, end = 0, n
    step = 1
    while step <= distance:
        middle = begin + (end - begin + 1) // 2
        begin, end = (begin, middle) if not rank & step else (middle, end)
        step *= 2
    return begin, end


def _spans(ends: Sequence[int], begin: int, end: int) -> list[tuple[int, slice]]:
    """Return which tensors are between `begin` and `end`, and where."""
    spans = []
    start = 0
    for i, stop in enumerate(ends):
        low, high = max(start, begin), min(stop, end)
        if low < high:
            spans.append((i, slice(low, high)))
        start = stop
    return spans


def _swap(
    transport: Transport,
    partner: int,
    source: Array,
    give: tuple[int, int],
    target: Array,
    take: tuple[int, int],
) -> None:
    """Send `give` of `source` to the partner, and receive its part into `take` of `target`."""
    rank, size = transport.rank, transport.size
    headers = transport.agree(0, give[1] - give[0], label="Adasum swap")
    n_bytes = [[0] * size for _ in range(size)]
    for other, header in enumerate(headers):
        n_bytes[other][other ^ rank ^ partner] = header.count * source.itemsize
    outgoing = [source[slice(*give) if r == partner else slice(0, 0)] for r in range(size)]
    incoming = [target[slice(*take) if r == partner else slice(0, 0)] for r in range(size)]
    transport.alltoall(
        [_native.Tensors([x], stream=NO_ORDER) for x in outgoing],
        [_native.Tensors([x], stream=NO_ORDER) for x in incoming],
        n_bytes,
    )


def _sum_of(transport: Transport, dots: np.ndarray[Any, Any], ranks: range) -> np.ndarray[Any, Any]:
    """Return the sum of the ranks' dot products, in rank order, at the largest of their scales."""
    transport.agree(0, label="Adasum dot products")
    each = allgather_row(transport, dots)[list(ranks)]
    scales = each[:, :, 3:].max(axis=0)
    total = np.zeros((len(dots), 3))
    for one in each:
        p, q = (one[:, 3:] - scales).astype(int).T
        total += np.ldexp(one[:, :3], np.stack([p + q, 2 * p, 2 * q], axis=1))
    return np.concatenate([total, scales], axis=1)
