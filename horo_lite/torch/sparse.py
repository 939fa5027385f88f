"""Exchange of sparse gradients: every rank gathers the rows of all ranks and adds them up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from horo_lite import ops
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.errors import MismatchError, ranks_in_words
from horo_lite.torch.slots import Slot, is_sparse


def note(slots: Sequence[Slot]) -> str:
    """Describe sparse gradients to the other ranks: their indices, sparse dimensions and dtypes."""
    gradients = [(slot, slot.parameter.grad) for slot in slots]
    return ";".join(
        f"{slot.index}:{slot.sparse_dim or gradient.sparse_dim()}:{str(gradient.dtype)[6:]}"
        for slot, gradient in gradients
        if gradient is not None
    )


def found_in(notes: Iterable[str]) -> dict[int, tuple[int, str]]:
    """Return the sparse dimensions and dtype of each gradient in these notes, by its index."""
    return {
        int(index): (int(n_dims), dtype)
        for theirs in notes
        for index, n_dims, dtype in (item.split(":") for item in theirs.split(";") if item)
    }


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
    found = found_in(notes.values())
    for i in filter(is_dense, sorted(found)):
        ranks = [rank for rank, theirs in notes.items() if i in found_in([theirs])]
        raise MismatchError(
            f"the gradient of {slots[i].name!r} is sparse on {ranks_in_words(ranks)} and dense on "
            "others: make it the same on all ranks, or pass sparse_as_dense=True"
        )
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
        gradient = slot.parameter.grad if slot.touched or slot.exchanged else None
        gradient = gradient if is_sparse(gradient) else None
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
