"""Exchange of sparse gradients, as training/sparse_rows.py does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp
from horo_lite.torch.slots import Slot, is_sparse
from horo_lite.training import sparse_rows
from horo_lite.training.sparse_rows import Layout, found_in

__all__ = ["exchange", "found_in", "note"]


def note(slots: Sequence[Slot]) -> str:
    """Describe sparse gradients to the other ranks: their sparse dimensions and dtypes."""
    gradients = [(slot, slot.parameter.grad) for slot in slots]
    return sparse_rows.note(
        {
            slot.index: (slot.sparse_dim or gradient.sparse_dim(), str(gradient.dtype)[6:])
            for slot, gradient in gradients
            if gradient is not None
        }
    )


def exchange(
    notes: Mapping[int, str],
    slots: Sequence[Slot],
    group: Group,
    op: AnyOp,
    weight: float | None,
    is_dense: Callable[[int], bool],
) -> Iterator[Slot]:
    """Exchange the gradients that are sparse on some rank, and yield the slot of each.

    Collective; `notes` are the results of `note` by rank. `weight` is this rank's, on every rank or
    on none. `is_dense(i)` says whether some rank's gradient i was dense.
    """

    def rows(index: int, layout: Layout, divisor: float) -> tuple[Any, Any]:
        slot, (n_dims, dtype) = slots[index], layout
        gradient = slot.parameter.grad if slot.touched or slot.exchanged else None
        if gradient is None or not is_sparse(gradient) or divisor == math.inf:
            shape, device = slot.parameter.shape, slot.parameter.device
            indices = torch.empty((0, n_dims), dtype=torch.int64, device=device)
            dtype = getattr(torch, dtype)
            return indices, torch.empty((0, *shape[n_dims:]), dtype=dtype, device=device)
        gradient = gradient.coalesce()
        return gradient.indices().t().contiguous(), gradient.values() / divisor

    def name_of(index: int) -> str:
        return slots[index].name

    for index, indices, values in sparse_rows.exchange(
        notes, name_of, is_dense, rows, group, op, weight
    ):
        slot = slots[index]
        slot.parameter.grad = torch.sparse_coo_tensor(
            indices.t(), values, slot.parameter.shape, check_invariants=False
        ).coalesce()
        yield slot
