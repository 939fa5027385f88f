"""Operations with the gradients of Horovod, which are described in `mpi_ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.horovod.process_sets import group_of, root_in
from horo_lite.torch.compression import Compression
from horo_lite.torch.submission import (
    Set,
    listed,
    name_of,
    submit_allgather,
    submit_alltoall,
    submit_broadcast,
    submit_reduction,
    synchronize,
)


def _differentiable(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def reduced(
    tensors: Sequence[Tensor],
    op: AnyOp,
    name: str | None,
    compression: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Set,
) -> list[Tensor]:
    """Return the op over all ranks' tensors; differentiable if a tensor requires a gradient."""
    tensors = listed(tensors)
    options = op, name, compression, prescale_factor, postscale_factor, process_set
    if _differentiable(tensors):
        return list(_Allreduce.apply(options, *tensors))
    results: list[Tensor] = synchronize(submit_reduction("allreduce", tensors, *options))
    return results


def scattered(tensors: Sequence[Tensor], *options: Any) -> list[Tensor]:
    """Take the arguments of `reduced`, and return this rank's rows of its result."""
    tensors = listed(tensors)
    if _differentiable(tensors):
        return list(_Reducescatter.apply(options, *tensors))
    results: list[Tensor] = synchronize(submit_reduction("reducescatter", tensors, *options))
    return results


def gathered(tensors: Sequence[Tensor], name: str | None, process_set: Set) -> list[Tensor]:
    """Return all ranks' rows of each tensor; differentiable if one requires a gradient."""
    tensors = listed(tensors)
    if _differentiable(tensors):
        return list(_Allgather.apply(name, process_set, *tensors))
    results: list[Tensor] = synchronize(submit_allgather(tensors, name, process_set))
    return results


def sent_from_root(tensor: Tensor, root_rank: int, name: str | None, process_set: Set) -> Tensor:
    """Return the root's tensor; differentiable if `tensor` requires a gradient."""
    if _differentiable([tensor]):
        result: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
        return result
    return synchronize(submit_broadcast(tensor, root_rank, name, process_set, in_place=False))


def rows_exchanged(
    tensor: Tensor, splits: Any, name: str | None, process_set: Set
) -> tuple[Tensor, Tensor]:
    """Return the rows for this rank, and the number from each rank."""
    if _differentiable([tensor]):
        result, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        result, received = synchronize(submit_alltoall(tensor, splits, name, process_set))
    return result, received


def _averaged(grads: Sequence[Tensor], name: str, group: Group) -> list[Tensor]:
    return reduced(grads, Average, name, Compression.none, 1.0, 1.0, group)


def _check_linear(op: AnyOp) -> None:
    if op not in (Sum, Average):
        raise RuntimeError(
            f"a reduction with {op.name} has no gradient: use hvd.Sum or hvd.Average, or call it "
            "under torch.no_grad() or on tensor.detach()"
        )


class _Allreduce(torch.autograd.Function):
    """Every rank's result depends on every rank's tensor: gradients are reduced in the same way."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        op, name, compression, prescale, postscale, process_set = options
        group = group_of(process_set)
        name = name_of(group, "allreduce", name)
        ctx.options = op, f"{name} gradient", Compression.none, prescale, postscale, group
        return tuple(
            synchronize(
                submit_reduction(
                    "allreduce", tensors, op, name, compression, prescale, postscale, group
                )
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, name, compression, prescale, postscale, group = ctx.options
        _check_linear(op)
        return None, *reduced(grads, op, name, compression, prescale, postscale, group)


class _Reducescatter(torch.autograd.Function):
    """The gradient is the gathered gradients of all parts, times the number of ranks for Sum."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        op, name, compression, prescale, postscale, process_set = options
        group = group_of(process_set)
        name = name_of(group, "reducescatter", name)
        ctx.options = op, f"{name} gradient", prescale * postscale, group
        return tuple(
            synchronize(
                submit_reduction(
                    "reducescatter", tensors, op, name, compression, prescale, postscale, group
                )
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, name, factor, group = ctx.options
        _check_linear(op)
        factor = factor * group.size if op is Sum else factor
        return None, *(grad * factor for grad in gathered(grads, name, group))


class _Allgather(torch.autograd.Function):
    """All ranks receive a rank's rows: their gradients are averaged."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: Set, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        group = group_of(process_set)
        name = name_of(group, "allgather", name)
        ctx.options = f"{name} gradient", group, [x.shape for x in tensors]
        return tuple(synchronize(submit_allgather(tensors, name, group)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, group, shapes = ctx.options
        n_rows = torch.tensor([[shape[0] if shape else 1 for shape in shapes]], device="cpu")
        before = gathered([n_rows], f"{name} rows", group)[0][: group.rank].sum(0).tolist()
        means = _averaged(grads, name, group)
        return (
            None,
            None,
            *(
                mean[begin : begin + (shape[0] if shape else 1)].reshape(shape)
                for mean, begin, shape in zip(means, before, shapes, strict=True)
            ),
        )


class _Broadcast(torch.autograd.Function):
    """All ranks receive the root's tensor: its gradient is the average of theirs."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: Set
    ) -> Tensor:
        group = group_of(process_set)
        name = name_of(group, "broadcast", name)
        ctx.options = f"{name} gradient", group, root_in(group, root_rank)
        result: Tensor = synchronize(
            submit_broadcast(tensor, root_rank, name, group, in_place=False)
        )
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, group, root = ctx.options
        (mean,) = _averaged(grads, name, group)
        if group.rank != root:  # in the graph, since second derivatives are collective
            mean = mean.masked_fill(torch.ones((), dtype=torch.bool, device=mean.device), 0)
        return mean, None, None, None


class _Alltoall(torch.autograd.Function):
    """Gradients are sent back to the ranks that the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: Set
    ) -> tuple[Tensor, Tensor]:
        group = group_of(process_set)
        name = name_of(group, "alltoall", name)
        result, received = synchronize(submit_alltoall(tensor, splits, name, group))
        ctx.options = f"{name} gradient", group, received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        name, group, received = ctx.options
        grad, _ = rows_exchanged(grads[0], received, name, group)
        return grad, None, None, None
