"""Sums over ranks of the large elements of each rank's vector."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite.ops import allgather

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def sparse_sum(
    group: Group,
    arrays: Sequence[NDArray[Any]],
    left_over: Sequence[NDArray[Any]],
    *,
    names: Sequence[str],
    spars: float,
    top_k: bool,
    label: str,
) -> None:
    """Replace `arrays` by the sums of the large elements of all ranks' arrays; every rank calls it.

    With `top_k`, these are the fraction `spars` of all elements, rounded up, with the largest
    magnitudes; otherwise all of magnitude `spars` or more. `left_over`, if not empty, is added
    first and holds the rest afterwards. NaN is always sent. `names` and shapes are the same on
    every rank.

    Each element sent costs 8 bytes per rank. The sum is in rank order, in float64: it has the same
    bits on every rank, and loses nothing of what was sent.
    """
    what = [f"{name} {list(x.shape)}" for name, x in zip(names, arrays, strict=True)]
    group.agree(label, "\n".join([label, f"spars {spars}, topK {bool(top_k)}", *what]))
    values = _joined(arrays)
    if left_over:
        values += _joined(left_over)
    chosen = _largest(np.abs(values), spars) if top_k else ~(np.abs(values) < spars)
    (indices,) = np.nonzero(chosen)
    all_indices = allgather(indices.astype(np.int32), name=f"{label}, indices", group=group)
    all_values = allgather(values[indices], name=f"{label}, values", group=group)
    if left_over:
        _divide(np.where(chosen, 0, values), left_over)
    _divide(np.bincount(all_indices, all_values, len(values)), arrays)


def _joined(arrays: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
    return np.concatenate([x.reshape(-1) for x in arrays]).astype(np.float32)


def _divide(vector: NDArray[Any], arrays: Sequence[NDArray[Any]]) -> None:
    ends = np.cumsum([x.size for x in arrays])[:-1]
    for x, part in zip(arrays, np.split(vector, ends), strict=True):
        x[...] = part.reshape(x.shape)


def _largest(magnitudes: NDArray[Any], fraction: float) -> NDArray[np.bool_]:
    n_kept = min(ceil(fraction * magnitudes.size), magnitudes.size)
    chosen = np.zeros(magnitudes.size, bool)
    if n_kept:
        first = magnitudes.size - n_kept
        chosen[np.argpartition(magnitudes, first)[first:]] = True
    return chosen
