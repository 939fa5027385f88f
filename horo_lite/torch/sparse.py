"""Exchange of sparse gradients, as training/sparse_rows.py does it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp
from horo_lite.torch.slots import Slot, is_sparse
from horo_lite.training import sparse_rows
from horo_lite.training.reducer import Reducer
from horo_lite.training.sparse_rows import Layout


def note(slots: Sequence[Slot]) -> str:
    """Describe gradients to the other ranks: their sparse dimensions and dtypes."""
    return sparse_rows.note(
        {
            slot.index: (slot.sparse_dim, str(slot.parameter.grad.dtype)[6:])
            for slot in slots
            if slot.parameter.grad is not None
        }
    )


def dimensions(notes: Iterable[str]) -> dict[int, int]:
    """Return the sparse dimensions of the gradients that are dense in none of the ranks' notes."""
    found: dict[int, int] = {}
    for each in map(json.loads, filter(None, set(notes))):
        for i, (n_dims, _) in each.items():
            found[int(i)] = min(n_dims, found.get(int(i), n_dims))
    return {i: n_dims for i, n_dims in found.items() if n_dims}


def exchange(
    notes: Mapping[int, str],
    slots: Sequence[Slot],
    group: Group,
    op: AnyOp,
    weight: float | None,
    reducer: Reducer,
) -> Iterator[Slot]:
    """Exchange the gradients that are sparse on some rank, and yield the slot of each.

    Collective; `notes` are the results of `note` by rank. `weight` is this rank's, on every rank or
    on none. `reducer` has exchanged the dense ones.
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
        notes,
        name_of,
        reducer.has_exchanged,
        rows,
        group,
        op,
        weight,
        reducer.reset_unless_finite,
    ):
        slot = slots[index]
        slot.parameter.grad = torch.sparse_coo_tensor(
            indices.t(), values, slot.parameter.shape, check_invariants=False
        ).coalesce()
        yield slot
