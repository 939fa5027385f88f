"""Sums over ranks of the large elements of each rank's vector."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite.ops import allgather

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def sparse_sum(
    group: Group,
    vector: NDArray[Any],
    left_over: NDArray[Any] | None,
    *,
    spars: float,
    top_k: bool,
    label: str,
    what: str,
) -> NDArray[np.float32]:
    """Return the sum of the large elements of all ranks' vectors; every rank calls it.

    With `top_k`, these are the fraction `spars` of all elements, rounded up, with the largest
    magnitudes; otherwise all of magnitude `spars` or more. `left_over`, if given, is added first
    and holds the rest afterwards. NaN is always sent. `what` describes the vector, in the same way
    on every rank.

    Each element sent costs 8 bytes per rank. The sum is in rank order, in float64: it has the same
    bits on every rank, and loses nothing of what was sent.
    """
    group.agree(label, f"{label}\nspars {spars}, topK {bool(top_k)}\n{what}")
    values = vector.astype(np.float32)
    if left_over is not None:
        values += left_over
    chosen = _largest(np.abs(values), spars) if top_k else ~(np.abs(values) < spars)
    (indices,) = np.nonzero(chosen)
    if left_over is not None:
        left_over[...] = np.where(chosen, 0, values)
    all_indices = allgather(indices.astype(np.int32), name=f"{label}, indices", group=group)
    all_values = allgather(values[indices], name=f"{label}, values", group=group)
    return np.bincount(all_indices, all_values, len(values)).astype(np.float32)


def _largest(magnitudes: NDArray[Any], fraction: float) -> NDArray[np.bool_]:
    n_kept = min(ceil(fraction * magnitudes.size), magnitudes.size)
    chosen = np.zeros(magnitudes.size, bool)
    if n_kept:
        first = magnitudes.size - n_kept
        chosen[np.argpartition(magnitudes, first)[first:]] = True
    return chosen
