"""Broadcasts of parameters and optimizer state, and operations on objects."""

from __future__ import annotations

import pickle
from typing import Any, TypeVar

import numpy as np
import torch

from horo_lite.horovod.process_sets import global_process_set, group_of, root_in
from horo_lite.ops import pickled
from horo_lite.state.broadcast import broadcast_optimizer_state as _broadcast_optimizer_state
from horo_lite.state.broadcast import broadcast_parameters as _broadcast_parameters
from horo_lite.state.drift import check_in_sync as _check_in_sync
from horo_lite.state.trees import NUMBERS
from horo_lite.torch.mpi_ops import allgather, allgather_async, broadcast_, synchronize
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
    _broadcast_parameters(params, root_in(group, root_rank), group=group)


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
    is_root = group.rank == root_in(group, root_rank)
    data = _bytes_of(obj, "broadcast_object") if is_root else _host_bytes(0)
    size = broadcast_(_size_of(data), root_rank, _sub(name, "size"), group)
    if not is_root:
        data = _host_bytes(int(size))
    broadcast_(data, root_rank, _sub(name, "object"), group)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(
    obj: T, name: str | None = None, process_set: Set = global_process_set
) -> list[T]:
    """Return all ranks' `obj`, which must be picklable, in the order of the set.

    Matched by `name`. CUDA tensors in them are received on the CPU.
    """
    data = _bytes_of(obj, "allgather_object")
    everything = allgather_async(data, _sub(name, "object"), process_set)
    sizes = allgather(_size_of(data), _sub(name, "size"), process_set)
    return [
        pickle.loads(part.numpy().tobytes())
        for part in synchronize(everything).split(sizes.tolist())
    ]


# On the CPU, whatever torch's default device is.


def _size_of(data: torch.Tensor) -> torch.Tensor:
    return torch.tensor([len(data)], device="cpu")


def _host_bytes(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device="cpu")


def _sub(name: str | None, what: str) -> str | None:
    return None if name is None else f"{name}.{what}"


class _Pickler(pickle.Pickler):
    """Sends CUDA tensors as CPU tensors: another rank may not have, or not use, the same GPU."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return _tensor, (obj.detach().cpu(), obj.requires_grad)
        return NotImplemented


def _tensor(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor.requires_grad_(requires_grad)


def _bytes_of(obj: Any, label: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(pickled(obj, label, _Pickler)), np.uint8))
