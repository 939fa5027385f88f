"""Operations on torch tensors, with Horovod's names, arguments and meaning.

Every operation, including those that wait for their results, is matched among the ranks by its kind
and name, so ranks may call different operations in different orders. Operations without `name` are
numbered, for each kind and process set. `…_async` returns a handle for `poll` and `synchronize`.
Tensors may have any memory layout, on the CPU or on this rank's GPU; results are new tensors on the
same device, or the given ones if the function's name ends with an underscore. The out-of-place
functions that wait are differentiable, with the gradients of Horovod, which are not always the
derivative of the sum of all ranks' losses (the adjoint, which `horo_lite.jax` uses). With N ranks
in the set:

    allreduce       the allreduce of the upstream gradients with the same op and factors
    allgather       this rank's rows of the average of the upstream gradients: 1/N of the adjoint
    broadcast       on the root the average of the upstream gradients, 1/N of the adjoint; else 0
    reducescatter   the upstream gradients gathered, times N if op is Sum, times both factors: N
                    times the adjoint
    alltoall        the upstream gradients, sent back: the adjoint

Scripts that were tuned with Horovod depend on these numbers. For Min, Max, Product and Adasum,
Horovod reduces upstream gradients with the same op, which is not a gradient: here it is a
RuntimeError.

Errors: a ValueError from the call, for wrong arguments, dtypes that cannot be reduced or sent, a
name that is already in flight, or before `init()`; a MismatchError (a RuntimeError, and a
HorovodInternalError) on every rank if the ranks' calls differ, after which the world can still be
used; a PeerLostError if a rank is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from horo_lite import ops
from horo_lite.collectives.calls import Barrier, Part
from horo_lite.collectives.reductions import Adasum, AnyOp, Average, Max, Min, Product, Sum
from horo_lite.horovod.process_sets import global_process_set, group_of
from horo_lite.horovod.reductions import op_of
from horo_lite.torch.compression import Compression
from horo_lite.torch.differentiable import (
    gathered,
    reduced,
    rows_exchanged,
    scattered,
    sent_from_root,
)
from horo_lite.torch.submission import (
    Handle,
    Set,
    name_of,
    poll,
    submit_allgather,
    submit_alltoall,
    submit_broadcast,
    submit_reduction,
    submitting,
    synchronize,
)
from horo_lite.torch.uncompiled import uncompiled

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]


# All-reduce.


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
) -> Tensor:
    """Return the op (by default the average) over all ranks' `tensor` as a new tensor.

    Every rank of the set calls it, with the same shape, dtype and options. `prescale_factor`
    multiplies this rank's contribution, `postscale_factor` the result. Averages of integers are
    truncated towards zero. Differentiable for Sum and Average.
    """
    how = name, compression, op, prescale_factor, postscale_factor, process_set
    (result,) = grouped_allreduce([tensor], average, *how)
    return result


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """Start `allreduce`; `synchronize(handle)` returns its result."""
    op = op_of(average, op)
    how = name, compression, prescale_factor, postscale_factor, process_set
    return submit_reduction("allreduce", [tensor], op, *how, single=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Tensor:
    """Replace `tensor`, in place, by the op over all ranks, and return it. See `allreduce`.

    It has no gradient: a later `backward()` through `tensor` is a RuntimeError. As usual, autograd
    does not track the change under torch.no_grad(), and parameters remain parameters.
    """
    how = name, op, prescale_factor, postscale_factor, process_set, compression
    return synchronize(allreduce_async_(tensor, average, *how))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """Start `allreduce_`; do not use `tensor` until `synchronize(handle)` returns it."""
    op = op_of(average, op)
    how = name, compression, prescale_factor, postscale_factor, process_set
    return submit_reduction("allreduce", [tensor], op, *how, in_place=True, single=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
) -> list[Tensor]:
    """Return the op over all ranks' `tensors` as new tensors, in one operation.

    See `allreduce`. The tensors may have different dtypes, but must be on one device.
    """
    op = op_of(average, op)
    return reduced(tensors, op, name, compression, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """Start `grouped_allreduce`; `synchronize(handle)` returns its result."""
    op = op_of(average, op)
    how = name, compression, prescale_factor, postscale_factor, process_set
    return submit_reduction("allreduce", tensors, op, *how)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> list[Tensor]:
    """Replace `tensors`, in place, by the op over all ranks, and return them."""
    how = name, op, prescale_factor, postscale_factor, process_set, compression
    results: list[Tensor] = synchronize(grouped_allreduce_async_(tensors, average, *how))
    return results


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: AnyOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    compression: Any = Compression.none,
) -> Handle:
    """Start `grouped_allreduce_`; do not use `tensors` until `synchronize(handle)` returns them."""
    op = op_of(average, op)
    how = name, compression, prescale_factor, postscale_factor, process_set
    return submit_reduction("allreduce", tensors, op, *how, in_place=True)


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """Start the reduction of a sparse COO `tensor`; `synchronize(handle)` or `handle()` returns it.

    Sum or Average. The elements of all ranks are gathered, whatever their number on each, and added
    up on every rank.
    """
    op = op_of(None, op)
    given: Any = tensor
    if not isinstance(given, Tensor) or given.layout is not torch.sparse_coo:
        raise ValueError("sparse_allreduce_async takes a sparse COO tensor: see Tensor.to_sparse")
    if op not in (Sum, Average):
        raise ValueError(f"sparse tensors need op=hvd.Sum or op=hvd.Average, not {op!r}")
    group = group_of(process_set)
    name = name_of(group, "sparse_allreduce", name)
    local = tensor.detach().coalesce()
    shape = f"{op.name} of {tuple(tensor.shape)}"
    with submitting(group, "sparse_allreduce", name):
        parts = [
            ops.allgather_async(part, name=f"{name}.{what} ({shape})", group=group)
            for what, part in (
                ("values", local.values()),  # first: their dtype may be refused
                ("indices", local.indices().t().contiguous()),
            )
        ]

    def finish(parts: list[Any]) -> Tensor:
        values, indices = parts
        total = torch.sparse_coo_tensor(
            indices.t(), values, tensor.shape, check_invariants=False
        ).coalesce()
        return total / group.size if op is Average else total

    return Handle("sparse_allreduce", name, group, parts, finish)


# Reduce-scatter.


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of `allreduce(tensor)`.

    If the number of rows is not divisible by the number of ranks, the first ranks get one more.
    Differentiable for Sum and Average: the gradient is the gathered upstream gradients of all
    ranks, times the number of ranks if op is Sum, as in Horovod.
    """
    (result,) = grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )
    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
) -> Handle:
    """Start `reducescatter`; `synchronize(handle)` returns its result."""
    how = name, compression, prescale_factor, postscale_factor, process_set
    return submit_reduction("reducescatter", [tensor], op_of(None, op), *how, single=True)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of each of `grouped_allreduce(tensors)`. See `reducescatter`."""
    op = op_of(None, op)
    return scattered(tensors, op, name, compression, prescale_factor, postscale_factor, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Any = Compression.none,
) -> Handle:
    """Start `grouped_reducescatter`; `synchronize(handle)` returns its result."""
    how = name, compression, prescale_factor, postscale_factor, process_set
    return submit_reduction("reducescatter", tensors, op_of(None, op), *how)


# Moving tensors.


def allgather(
    tensor: Tensor, name: str | None = None, process_set: Set = global_process_set
) -> Tensor:
    """Return all ranks' `tensor`, concatenated along the first dimension, as a new tensor.

    Only the first dimension may differ between ranks; a 0-dimensional tensor counts as one row.
    Differentiable: the gradient is this rank's rows of the average of all ranks' upstream
    gradients, as in Horovod.
    """
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: Set = global_process_set
) -> Handle:
    """Start `allgather`; `synchronize(handle)` returns its result."""
    return submit_allgather([tensor], name, process_set, single=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Set = global_process_set
) -> list[Tensor]:
    """Return `allgather` of each tensor."""
    return gathered(tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Set = global_process_set
) -> Handle:
    """Start `grouped_allgather`; `synchronize(handle)` returns its result."""
    return submit_allgather(tensors, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Tensor:
    """Return the `tensor` of rank `root_rank`, which is a rank of the world, as a new tensor.

    It has the same shape and dtype on every rank. Differentiable: the root's gradient is the
    average of all ranks' upstream gradients, as in Horovod, and that of the others is 0.
    """
    return sent_from_root(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """Start `broadcast`; `synchronize(handle)` returns its result."""
    return submit_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Tensor:
    """Set `tensor`, in place, to the values of rank `root_rank`, and return it."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """Start `broadcast_`; do not use `tensor` until `synchronize(handle)` returns it."""
    return submit_broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Any:
    """Send rows to every rank of the set; return those received, in rank order.

    `splits[r]` rows, in order, go to rank r of the set; without `splits`, each gets the same
    number. With `splits`, the result is the tensor and the number of rows received from each rank.
    Differentiable.
    """
    result, received = rows_exchanged(tensor, splits, name, process_set)
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """Start `alltoall`; `synchronize(handle)` returns the tensor and the numbers of rows received.

    As in Horovod, it returns both also without `splits`. See `alltoall`.
    """
    return submit_alltoall(tensor, splits, name, process_set)


def barrier(process_set: Set = global_process_set) -> None:
    """Wait until all ranks of the set have called this."""
    group = group_of(process_set)
    part = group.submit(Barrier("all ranks"), Part())
    synchronize(Handle("barrier", "barrier", group, [part], lambda parts: None))


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; return the last one that did. See `horo_lite.join`.

    `device` is Horovod's argument, which has no effect here.
    """
    return ops.join()


for _name in __all__:
    if isinstance(_function := globals()[_name], FunctionType):
        uncompiled(_function)
