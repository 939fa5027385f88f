"""Operations on torch tensors, with Horovod's names, arguments and meaning.

Every operation, also one that waits for its result, is matched among the ranks by its kind and
name, so ranks may come to different operations in different orders. Without `name` they are
numbered, for each kind and process set. `…_async` gives a handle for `poll` and `synchronize`.
Tensors may lie anywhere in memory, on the CPU or on this rank's GPU; results are new tensors on the
same device, or, for forms with an underscore at the end, the given ones. The out-of-place forms
that wait are differentiable, with Horovod's gradients, which are not always the derivative of the
sum of all ranks' losses (that, the adjoint, is what `horo_lite.jax` has). Of N ranks in the set:

    allreduce       the allreduce of the upstream gradients with the same op and factors
    allgather       this rank's rows of the average of the upstream gradients: 1/N of the adjoint
    broadcast       on the root the average of the upstream gradients, 1/N of the adjoint; else 0
    reducescatter   the upstream gradients gathered, times N if op is Sum, times both factors: N
                    times the adjoint
    alltoall        the upstream gradients, sent back: the adjoint

Scripts that were tuned with Horovod depend on these numbers. Those of Min, Max, Product and Adasum,
which Horovod reduces with the same op, are no gradients: here they are a RuntimeError.

ValueError at the call: wrong arguments, dtypes that cannot be reduced or sent, a name that is in
flight already, no `init()` yet. MismatchError (a RuntimeError, and a HorovodInternalError) on every
rank where the ranks differ; the world can be used afterwards. PeerLostError where a rank is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from horo_lite import ops
from horo_lite.collectives.calls import Barrier, Part
from horo_lite.collectives.reductions import Average, Max, Min, Product, Sum
from horo_lite.horovod.process_sets import global_process_set, group_of
from horo_lite.horovod.reductions import Adasum, AnyOp, op_of
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
    """A new tensor holds the op (by itself the average) over all ranks' `tensor`.

    Every rank of the set calls it, with the same shape, dtype and options. `prescale_factor`
    multiplies what a rank contributes, `postscale_factor` the result. Averages of integers are cut
    towards zero. Differentiable for Sum and Average.
    """
    op = op_of(average, op)
    (result,) = grouped_allreduce(
        [tensor],
        None,
        name,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
    )
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
    """`synchronize(handle)` returns what `allreduce` would."""
    op = op_of(average, op)
    return submit_reduction(
        "allreduce",
        [tensor],
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        single=True,
    )


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
    """`tensor` itself holds the op over all ranks' `tensor`, and is returned. See `allreduce`.

    It has no gradient: `backward()` through `tensor` is a RuntimeError from now on. Under
    torch.no_grad() autograd does not see the change, as ever; parameters stay what they are.
    """
    op = op_of(average, op)
    return synchronize(
        allreduce_async_(
            tensor,
            None,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            compression,
        )
    )


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
    """`synchronize(handle)` returns `tensor`, changed; not to be touched until then."""
    op = op_of(average, op)
    return submit_reduction(
        "allreduce",
        [tensor],
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=True,
        single=True,
    )


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
    """New tensors hold the op over all ranks' `tensors`, which are reduced as one.

    See `allreduce`; dtypes may be mixed, devices may not.
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
    """`synchronize(handle)` returns what `grouped_allreduce` would."""
    op = op_of(average, op)
    return submit_reduction(
        "allreduce",
        tensors,
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
    )


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
    """`tensors` themselves hold the op over all ranks' `tensors`, and are returned."""
    op = op_of(average, op)
    results: list[Tensor] = synchronize(
        grouped_allreduce_async_(
            tensors,
            None,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            compression,
        )
    )
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
    """`synchronize(handle)` returns `tensors`, changed; not to be touched until then."""
    op = op_of(average, op)
    return submit_reduction(
        "allreduce",
        tensors,
        op,
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        in_place=True,
    )


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: AnyOp | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)`, or `handle()`, returns the op over all ranks' sparse COO `tensor`.

    Sum or Average. What all ranks have is gathered and added up: a rank receives every rank's
    elements, and different ranks may have different numbers of them.
    """
    op = op_of(None, op)
    given: Any = tensor
    if not isinstance(given, Tensor) or given.layout is not torch.sparse_coo:
        raise ValueError("sparse_allreduce_async takes a sparse COO tensor: see Tensor.to_sparse")
    if op not in (Sum, Average):
        raise ValueError(f"sparse tensors are reduced with hvd.Sum or hvd.Average, not {op!r}")
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
    """This rank's rows of `allreduce(tensor)`; the first ranks get one more where it must be.

    Differentiable for Sum and Average: the upstream gradients of all ranks one after the other,
    times the number of ranks if op is Sum, as in Horovod.
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
    """`synchronize(handle)` returns what `reducescatter` would."""
    return submit_reduction(
        "reducescatter",
        [tensor],
        op_of(None, op),
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
        single=True,
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: AnyOp = Average,
    process_set: Set = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """This rank's rows of each of `grouped_allreduce(tensors)`. See `reducescatter`."""
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
    """`synchronize(handle)` returns what `grouped_reducescatter` would."""
    return submit_reduction(
        "reducescatter",
        tensors,
        op_of(None, op),
        name,
        compression,
        prescale_factor,
        postscale_factor,
        process_set,
    )


# Moving tensors.


def allgather(
    tensor: Tensor, name: str | None = None, process_set: Set = global_process_set
) -> Tensor:
    """A new tensor of all ranks' `tensor`, one after the other along the first dimension.

    Only the first dimension may differ between ranks; a 0-dimensional tensor is one row.
    Differentiable: this rank's rows of the average of all ranks' upstream gradients, as in Horovod.
    """
    (result,) = grouped_allgather([tensor], name, process_set)
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: Set = global_process_set
) -> Handle:
    """`synchronize(handle)` returns what `allgather` would."""
    return submit_allgather([tensor], name, process_set, single=True)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Set = global_process_set
) -> list[Tensor]:
    """What `allgather` gives of each."""
    return gathered(tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: Set = global_process_set
) -> Handle:
    """`synchronize(handle)` returns what `grouped_allgather` would."""
    return submit_allgather(tensors, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Tensor:
    """A new tensor of what `tensor` is on rank `root_rank`, which the world's number names.

    Same shape and dtype on every rank. Differentiable: the root's gradient is the average of all
    ranks' upstream gradients, as in Horovod, and that of the others 0.
    """
    return sent_from_root(tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)` returns what `broadcast` would."""
    return submit_broadcast(tensor, root_rank, name, process_set, in_place=False)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Tensor:
    """`tensor` itself holds what it is on rank `root_rank`, and is returned."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Handle:
    """`synchronize(handle)` returns `tensor`, changed; not to be touched until then."""
    return submit_broadcast(tensor, root_rank, name, process_set, in_place=True)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: Set = global_process_set,
) -> Any:
    """The rows that all ranks of the set had for this one, in rank order.

    `splits[r]` rows, in order, go to rank r of the set; without `splits` each gets as many. With
    `splits`, the result is the tensor and the number of rows received from each rank.
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
    """`synchronize(handle)` returns the tensor and the number of rows received from each rank.

    Both also without `splits`, as in Horovod. See `alltoall`.
    """
    return submit_alltoall(tensor, splits, name, process_set)


def barrier(process_set: Set = global_process_set) -> None:
    """All ranks of the set have called this."""
    group = group_of(process_set)
    part = group.submit(Barrier("all ranks"), Part())
    synchronize(Handle("barrier", "barrier", group, [part], lambda parts: None))


def join(device: int = -1) -> int:
    """All ranks have called this; the number of the last one that did. See `horo_lite.join`.

    `device` is Horovod's, and not needed.
    """
    return ops.join()


for _name in __all__:
    if isinstance(_function := globals()[_name], FunctionType):
        uncompiled(_function)
