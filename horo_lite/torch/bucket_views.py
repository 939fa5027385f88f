"""Gradients in memory that all ranks of a host see, so that they are added up where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horo_lite._native import Tensors
from horo_lite.transports.shm import SharedMemory

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

_ALIGNMENT = 64  # bytes
# Gradients this large are moved past the caches: when their bucket is reduced, a bucket's worth of
# others has been written since.
STREAMED_BYTES = 64 << 10


def can_share(group: Group) -> bool:
    """Whether the ranks of `group` are on one host, as far as its transports know."""
    return group.size > 1 and all(each.shares_memory for each in group.transports())


def homes_of(parameters: Sequence[Any]) -> tuple[SharedMemory | None, list[Any]]:
    """Memory, and a tensor in it for the gradient of each parameter; None where there is none.

    Dense floating point parameters on the CPU get one each, in the layout that autograd gives their
    gradients, with a storage of its own: copying or saving one takes no more than that.
    """
    begins: list[int | None] = []
    n_bytes = 0
    for parameter in parameters:
        begins.append(n_bytes if _may_live_there(parameter) else None)
        if begins[-1] is not None:
            n_bytes += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    try:
        memory = SharedMemory(n_bytes)
    except OSError:
        return None, [None] * len(parameters)
    for begin, parameter in zip(begins, parameters, strict=True):
        if begin is not None:
            memory.arrays[begin] = _home(memory, begin, parameter)
    return memory, [None if begin is None else memory.arrays[begin] for begin in begins]


def _may_live_there(parameter: Any) -> bool:
    return (
        parameter.layout is torch.strided
        and parameter.device.type == "cpu"
        and parameter.is_floating_point()
        and parameter.numel() > 0
    )


def _home(memory: SharedMemory, begin: int, parameter: Any) -> Any:
    flat = torch.from_numpy(memory.array(begin, parameter.nbytes)).view(parameter.dtype)
    like = torch.empty_like(parameter, device="meta")  # dense, and in the parameter's order
    return flat.as_strided(like.shape, like.stride())


def fits(gradient: Any, home: Any) -> bool:
    """Whether `home` can hold that gradient."""
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.dtype is home.dtype
        and gradient.shape == home.shape
        and gradient.device == home.device
    )


def move(gradient: Any, home: Any) -> None:
    """Copy `gradient` to `home`, which it fits.

    Best where the gradient has just been computed: it is in cache, and the memory that autograd
    took for it, dropped then, serves for the next one.
    """
    if home.nbytes >= STREAMED_BYTES and _stream(gradient.resolve_neg(), home):
        torch.autograd.graph.increment_version(home)
    else:
        home.copy_(gradient)


def _stream(gradient: Any, home: Any) -> bool:
    """Copy past the caches, if both lie alike in memory; whether they do."""
    try:
        source, target = Tensors([gradient]), Tensors([home])
    except (TypeError, ValueError):  # without memory of its own, as zeros may be
        return False
    if source.layout != target.layout or source.strided:
        return False
    source.copy_to(target, streaming=True)
    return True
