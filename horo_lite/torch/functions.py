"""Broadcasts of parameters and optimizer state, and operations on objects."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar, cast

import torch

from horo_lite.collectives.calls import AllGatherBytes, BroadcastBytes
from horo_lite.errors import warn
from horo_lite.horovod.process_sets import global_process_set, group_of, root_in
from horo_lite.ops import transfer_objects
from horo_lite.state.broadcast import broadcast_optimizer_state as _broadcast_optimizer_state
from horo_lite.state.broadcast import broadcast_parameters as _broadcast_parameters
from horo_lite.state.drift import check_in_sync as _check_in_sync
from horo_lite.state.trees import NUMBERS
from horo_lite.torch.submission import Set

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_in_sync",
]

T = TypeVar("T")


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: Set = global_process_set
) -> None:
    """Set `params`, in place, to the values of rank `root_rank`.

    `params`: a `state_dict()`, `named_parameters()`, `parameters()`, a module, or a list of
    tensors. Every rank of the set calls it, in the same order as other broadcasts of this file.

    Raises:
        MismatchError: On every rank, if names, shapes or dtypes differ; it names the first
            difference. Nothing has been written.
        ValueError: `params` cannot contain a tensor.
    """
    if params is None or isinstance(params, (str, *NUMBERS)):
        raise ValueError(
            "params must be a state_dict(), named_parameters(), parameters(), a module or a list "
            f"of tensors, not {params!r}, into which nothing can be written"
        )
    group = group_of(process_set)
    if isinstance(params, torch.nn.Module) and group.rank == 0 and group.size > 1:
        _warn_of_plain_batch_norms(params)
    _broadcast_parameters(params, root_in(group, root_rank), group=group)


def _warn_of_plain_batch_norms(model: torch.nn.Module) -> None:
    """Warn of PyTorch's own SyncBatchNorm, which does not know these ranks, and raises no error."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    names = [n for n, layer in model.named_modules() if isinstance(layer, torch.nn.SyncBatchNorm)]
    if names:
        warn(
            f"{names[0]!r} is a torch.nn.SyncBatchNorm, which normalizes by this rank's samples "
            "alone, since torch.distributed has no process group. To normalize by those of all "
            "ranks, call horo_lite.torch.SyncBatchNorm.convert_sync_batchnorm(model)"
        )


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: Set = global_process_set,
) -> None:
    """Copy the optimizer's state tensors, step counts and options from rank `root_rank`.

    Every rank of the set calls it. It takes no step: a rank that has no state yet, or other state
    than the root, gets the root's. `model` is Horovod's argument, which has no effect here.
    """
    group = group_of(process_set)
    _broadcast_optimizer_state(optimizer, root_in(group, root_rank), group=group)


def check_in_sync(
    replica: Any,
    *,
    on_drift: str = "raise",
    buffers: bool = False,
    state: bool = False,
    step: int | None = None,
    process_set: Set = global_process_set,
) -> bool:
    """Return whether `replica` has the same bits on all ranks: see `horo_lite.check_in_sync`.

    `replica` is as for `broadcast_parameters`, or an optimizer. Every rank of the set calls it.
    """
    return _check_in_sync(
        replica,
        on_drift=on_drift,
        buffers=buffers,
        state=state,
        step=step,
        group=group_of(process_set),
    )


def broadcast_object(
    obj: T, root_rank: int = 0, name: str | None = None, process_set: Set = global_process_set
) -> T:
    """Return the `obj` of rank `root_rank`, which must be picklable; other ranks' are ignored.

    Matched by `name`. CUDA tensors in it are received on the CPU.
    """
    group = group_of(process_set)
    call = BroadcastBytes(name, root_in(group, root_rank), needs_all=False)
    if group.rank == call.root_rank:
        transfer_objects(group, call, lambda: obj, by_name=True, pickler=_Pickler)
        return obj
    (received,) = transfer_objects(group, call, by_name=True)
    return cast("T", received)


def allgather_object(
    obj: T, name: str | None = None, process_set: Set = global_process_set
) -> list[T]:
    """Return all ranks' `obj`, which must be picklable, in the order of the set.

    Matched by `name`. CUDA tensors in them are received on the CPU.
    """
    call = AllGatherBytes(name, needs_all=False)
    group = group_of(process_set)
    return transfer_objects(group, call, lambda: obj, by_name=True, pickler=_Pickler)


class _Pickler(pickle.Pickler):
    """Sends CUDA tensors as CPU tensors: another rank may not have, or not use, the same GPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return _tensor, (obj.detach().cpu(), obj.requires_grad)
        return NotImplemented


def _tensor(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.requires_grad_(requires_grad)
