"""Exchange of sparse gradients: every rank gathers the rows of all ranks and adds them up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from horo_lite import ops
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Sum
from horo_lite.horovod.reductions import AnyOp
from horo_lite.torch.slots import Slot


def note(slots: Sequence[Slot]) -> str:
    """Describe sparse gradients to the other ranks: their indices, sparse dimensions and dtypes."""
    gradients = [(slot.index, slot.parameter.grad) for slot in slots]
    return ";".join(
        f"{index}:{gradient.sparse_dim()}:{str(gradient.dtype).removeprefix('torch.')}"
        for index, gradient in gradients
    )


def exchange(
    notes: Sequence[str], slots: Sequence[Slot], group: Group, op: AnyOp, weight: float | None
) -> Iterator[Slot]:
    """Exchange the gradients that are sparse on some rank, and yield the slot of each.

    Collective; `notes` are the results of `note` on all ranks. `weight` is this rank's, on every
    rank or on none.
    """
    found = {
        int(index): (int(n_dims), dtype)
        for theirs in notes
        for index, n_dims, dtype in (item.split(":") for item in theirs.split(";") if item)
    }
    if op not in (Average, Sum):  # on all ranks, since these have the same notes
        raise ValueError(
            f"the gradient of {slots[min(found)].name!r} is sparse, but op={op.name} "
            "combines only dense gradients: pass sparse_as_dense=True, or use op=Average or Sum"
        )
    divisor = float(group.size) if op is Average else 1.0
    if weight is not None:
        name = "the weights of sparse gradients"
        total = float(ops.allreduce(np.array([weight]), Sum, name=name, group=group)[0])
        divisor = total / weight if weight else math.inf
    for index, (n_dims, dtype) in sorted(found.items()):
        slot = slots[index]
        gradient = slot.parameter.grad if slot.touched else None
        shape, device = slot.parameter.shape, slot.parameter.device
        if gradient is None or divisor == math.inf:
            indices = torch.empty((0, n_dims), dtype=torch.int64, device=device)
            values = torch.empty((0, *shape[n_dims:]), dtype=getattr(torch, dtype), device=device)
        else:
            gradient = gradient.coalesce()
            indices, values = gradient.indices().t().contiguous(), gradient.values() / divisor
        name = f"the gradient of {slot.name!r}"
        indices = ops.allgather(indices, name=f"{name}, indices", group=group)
        values = ops.allgather(values, name=f"{name}, values", group=group)
        slot.parameter.grad = torch.sparse_coo_tensor(
            indices.t(), values, shape, check_invariants=False
        ).coalesce()
        yield slot
