"""Exchange of sparse gradients, as training/sparse_rows.py does it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp
from horo_lite.torch.slots import Slot, is_sparse
from horo_lite.training import sparse_rows
from horo_lite.training.plan import Layout, Rows
from horo_lite.training.reducer import Reducer


def rows_of(slots: Sequence[Slot]) -> dict[int, tuple[Layout, Any]]:
    """Return the sparse gradients among those of `slots`, for `Reducer.finish`.

    A layout consists of the number of sparse dimensions and the dtype.
    """
    return {
        slot.index: ((slot.sparse_dim, str(gradient.dtype)[6:]), gradient.detach()._values())
        for slot in slots
        if (gradient := slot.parameter.grad) is not None and is_sparse(gradient)
    }


def exchange(
    found: Rows,
    slots: Sequence[Slot],
    group: Group,
    op: AnyOp,
    weight: float | None,
    reducer: Reducer,
) -> Iterator[Slot]:
    """Exchange the gradients that are sparse on some rank, and yield the slot of each.

    Collective; `found` are those of the plan. `weight` is this rank's, on every rank or on none.
    `reducer` has exchanged the dense ones.
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
        found,
        name_of,
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
