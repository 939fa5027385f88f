"""Gradients in memory shared by all ranks of a host, in which they are reduced without copies.

Every rank has a segment in which each gradient has a fixed offset, the same on all ranks; it maps
the others' segments after the first agreement on a plan. Autograd makes the gradient as always, and
the hook that receives it moves it into the segment while it is still in the cache: one pass less
than adding to zeros there, and a gradient that is None stays None. Then every rank reduces its
share of each tensor in place: it reads it in all segments, adds in rank order, and writes the
result into all of them, with one barrier before and one flag after. Ranks compare whether and at
which offsets tensors are in shared memory, so all of them reduce in place or none does. A forked
child's mapping is made private at once: no other process sees what it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from horo_lite._native import Tensors
from horo_lite.transports.shm import SharedMemory

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

_ALIGNMENT = 64  # bytes
# Gradients of this size or more are copied past the caches: before their bucket is reduced, a
# bucket's worth of other gradients is written.
STREAMED_BYTES = 64 << 10


def can_share(group: Group) -> bool:
    """Return whether the ranks of `group` are on one host, as far as its transports know."""
    return group.size > 1 and all(each.shares_memory for each in group.transports())


def views_of(parameters: Sequence[Any]) -> tuple[SharedMemory | None, list[Any]]:
    """Return memory, and for each parameter a tensor in it for the gradient, or None.

    Each dense floating point parameter on the CPU gets one, in the layout that autograd uses for
    its gradient, with its own storage, so that copying or saving it includes nothing else.
    """
    begins, n_bytes = places_of(parameters)
    try:
        memory = SharedMemory(n_bytes)
    except OSError:
        return None, [None] * len(parameters)
    for begin, parameter in zip(begins, parameters, strict=True):
        if begin is not None:
            memory.arrays[begin] = view_of(memory, begin, parameter)
    return memory, [None if begin is None else memory.arrays[begin] for begin in begins]


def places_of(parameters: Sequence[Any]) -> tuple[list[int | None], int]:
    """Return each parameter's place in memory for all, None if it cannot be there, and the size."""
    begins: list[int | None] = []
    n_bytes = 0
    for parameter in parameters:
        begins.append(n_bytes if _may_live_there(parameter) else None)
        if begins[-1] is not None:
            n_bytes += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    return begins, n_bytes


def _may_live_there(parameter: Any) -> bool:
    return (
        parameter.layout is torch.strided
        and parameter.device.type == "cpu"
        and parameter.is_floating_point()
        and parameter.numel() > 0
    )


def view_of(memory: SharedMemory, begin: int, parameter: Any) -> Any:
    """Return a tensor at that place, like the parameter, with a storage of its own."""
    flat = torch.from_numpy(memory.array(begin, parameter.nbytes)).view(parameter.dtype)
    like = torch.empty_like(parameter, device="meta")  # dense, in the parameter's memory order
    return flat.as_strided(like.shape, like.stride())


def fits(gradient: Any, view: Any) -> bool:
    """Return whether `view` can hold the gradient."""
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.dtype is view.dtype
        and gradient.shape == view.shape
        and gradient.device == view.device
    )


def move(gradient: Any, view: Any) -> None:
    """Copy `gradient` to `view`, which it fits.

    Best called when the gradient has just been computed: it is in cache, and the memory that
    autograd allocated for it, once released, is reused for the next one.
    """
    if view.nbytes >= STREAMED_BYTES and _stream(gradient.resolve_neg(), view):
        torch.autograd.graph.increment_version(view)
    else:
        view.copy_(gradient)


def _stream(gradient: Any, view: Any) -> bool:
    """Copy past the caches if both have the same memory layout; return whether they have."""
    try:
        source, target = Tensors([gradient]), Tensors([view])
    except (TypeError, ValueError):  # without its own memory, which is possible for zeros
        return False
    if source.layout != target.layout or source.strided:
        return False
    source.copy_to(target, streaming=True)
    return True
