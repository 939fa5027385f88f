"""Operations with the gradients of Horovod, which are described in `mpi_ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.horovod.process_sets import group_of, root_in
from horo_lite.torch.compression import Compression
from horo_lite.torch.submission import (
    Set,
    listed,
    submit_allgather,
    submit_alltoall,
    submit_broadcast,
    submit_reduction,
    synchronize,
)

Backward: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]
Run: TypeAlias = Callable[[Sequence[Tensor], "str | None", Set], tuple[Sequence[Tensor], Backward]]
"""Executes an operation on tensors, under a name, among ranks. Returns the results, of which those
beyond the number of tensors have no gradient, and what turns their gradients into the tensors'."""


class _Collective(torch.autograd.Function):
    """An operation with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, name: str | None, ranks: Set, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        results, ctx.run_backward = run(xs, name, ranks)
        ctx.mark_non_differentiable(*results[len(xs) :])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.run_backward(grads)


def _performed(
    tensors: Sequence[Tensor], name: str | None, process_set: Set, run: Run
) -> list[Tensor]:
    """Return the results of an operation; differentiable if a tensor requires a gradient."""
    if not torch.is_grad_enabled() or not any(getattr(x, "requires_grad", False) for x in tensors):
        return list(run(tensors, name, process_set)[0])
    return list(_Collective.apply(run, name, group_of(process_set), *tensors))


def reduced(
    tensors: Sequence[Tensor],
    op: AnyOp,
    name: str | None,
    compression: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Set,
) -> list[Tensor]:
    """Return the op over all ranks' tensors.

    Every rank's result depends on every rank's tensor: gradients are reduced in the same way.
    """
    factors = prescale_factor, postscale_factor

    def run(xs: Sequence[Tensor], name: str | None, ranks: Set) -> Any:
        how = op, name, compression, *factors, ranks
        handle = submit_reduction("allreduce", xs, *how)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            _check_linear(op)
            return reduced(grads, op, f"{handle.name} gradient", Compression.none, *factors, ranks)

        return synchronize(handle), backward

    return _performed(listed(tensors), name, process_set, run)


def scattered(
    tensors: Sequence[Tensor],
    op: AnyOp,
    name: str | None,
    compression: Any,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Set,
) -> list[Tensor]:
    """Return this rank's rows of what `reduced` returns.

    The gradient is the gathered gradients of all parts, times the number of ranks for Sum.
    """
    factors = prescale_factor, postscale_factor

    def run(xs: Sequence[Tensor], name: str | None, ranks: Set) -> Any:
        how = op, name, compression, *factors, ranks
        handle = submit_reduction("reducescatter", xs, *how)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            _check_linear(op)
            n_times = prescale_factor * postscale_factor
            factor = n_times * group_of(ranks).size if op is Sum else n_times
            return [grad * factor for grad in gathered(grads, f"{handle.name} gradient", ranks)]

        return synchronize(handle), backward

    return _performed(listed(tensors), name, process_set, run)


def gathered(tensors: Sequence[Tensor], name: str | None, process_set: Set) -> list[Tensor]:
    """Return all ranks' rows of each tensor.

    All ranks receive a rank's rows: their gradients are averaged.
    """

    def run(xs: Sequence[Tensor], name: str | None, ranks: Set) -> Any:
        handle = submit_allgather(xs, name, ranks)
        results = synchronize(handle)
        shapes = [x.shape for x in xs]
        n_rows = [shape[0] if shape else 1 for shape in shapes]

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            everyone = torch.tensor([n_rows], device="cpu")
            (everyone,) = gathered([everyone], f"{handle.name} gradient rows", ranks)
            before = everyone[: group_of(ranks).rank].sum(0).tolist()
            return [
                mean[begin : begin + n].reshape(shape)
                for mean, begin, n, shape in zip(
                    _averaged(grads, handle.name, ranks), before, n_rows, shapes, strict=True
                )
            ]

        return results, backward

    return _performed(listed(tensors), name, process_set, run)


def sent_from_root(tensor: Tensor, root_rank: int, name: str | None, process_set: Set) -> Tensor:
    """Return the root's tensor.

    All ranks receive it: its gradient is the average of theirs.
    """

    def run(xs: Sequence[Tensor], name: str | None, ranks: Set) -> Any:
        handle = submit_broadcast(xs[0], root_rank, name, ranks, in_place=False)

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            (mean,) = _averaged(grads, handle.name, ranks)
            group = group_of(ranks)
            if group.rank != root_in(group, root_rank):
                # In the graph, since second derivatives are collective.
                mean = mean.masked_fill(torch.ones((), dtype=torch.bool, device=mean.device), 0)
            return [mean]

        return [synchronize(handle)], backward

    (result,) = _performed([tensor], name, process_set, run)
    return result


def rows_exchanged(
    tensor: Tensor, splits: Any, name: str | None, process_set: Set
) -> tuple[Tensor, Tensor]:
    """Return the rows for this rank, and the number from each rank.

    Gradients are sent back to the ranks that the rows came from.
    """

    def run(xs: Sequence[Tensor], name: str | None, ranks: Set) -> Any:
        handle = submit_alltoall(xs[0], splits, name, ranks)
        result, received = synchronize(handle)
        splits_back = received.tolist()

        def backward(grads: Sequence[Tensor]) -> list[Tensor]:
            return [rows_exchanged(grads[0], splits_back, f"{handle.name} gradient", ranks)[0]]

        return [result, received], backward

    result, received = _performed([tensor], name, process_set, run)
    return result, received


def _averaged(grads: Sequence[Tensor], name: str, ranks: Set) -> list[Tensor]:
    return reduced(grads, Average, f"{name} gradient", Compression.none, 1.0, 1.0, ranks)


def _check_linear(op: AnyOp) -> None:
    if op not in (Sum, Average):
        raise RuntimeError(
            f"a reduction with {op.name} has no gradient: use hvd.Sum or hvd.Average, or call it "
            "under torch.no_grad() or on tensor.detach()"
        )
