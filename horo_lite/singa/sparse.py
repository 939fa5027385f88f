"""The sum over ranks of what is large in each rank's vector."""

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
    """The sum of the elements of all ranks' vectors that travel; called by every rank.

    With `top_k` these are the fraction `spars` of all, rounded up, the largest by magnitude;
    without it all of at least the magnitude `spars`. `left_over`, if given, is added before and
    holds the rest afterwards. NaN travels. `what` describes the vector, alike on every rank.

    8 bytes an element that travels, to each rank. Summed in rank order in float64: the same bits on
    every rank, and of what travelled nothing is lost.
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
