"""Adasum of torch tensors: see horo_lite.horovod.adasum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horo_lite.collectives.calls import Part
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.errors import warn
from horo_lite.horovod.adasum import SMALLEST, AdasumReduce, check_adasum


def adasum_(group: Group, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> None:
    """Replace each tensor, in place, by its Adasum over all ranks of the group.

    Every rank calls it, with tensors of the same floating point dtypes and shapes, dense and on one
    device. `names`, if given, are compared, and used in messages.
    """
    label = f"{names[0]} and {len(names) - 1} more" if names else f"{len(tensors)} tensors"
    adasum_async_(group, tensors, names, label).wait()


def adasum_async_(
    group: Group,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    label: str,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    kind: str = "allreduce",
) -> Handle:
    """Start `adasum_` and return its handle; the operation is matched by `label`.

    Needs memory for two copies of all tensors, in float64 if one of them is float64, otherwise in
    float32.
    """
    specs = tuple((str(x.dtype)[6:], tuple(x.shape)) for x in tensors)
    check_adasum(group, [dtype for dtype, _ in specs], prescale_factor, postscale_factor)
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    flat = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
    mine = torch.cat(flat) * prescale_factor if flat else torch.zeros(0, dtype=dtype, device="cpu")
    theirs = torch.empty_like(mine)
    is_on_host = mine.device.type == "cpu"
    kind_of_call = AdasumReduce if is_on_host else _OnDevice
    call = kind_of_call(label, specs, tuple(names), prescale_factor, postscale_factor)

    def write(_: None) -> None:
        begin = 0
        for tensor, end in zip(tensors, call.ends(), strict=True):
            result = mine[begin:end] * postscale_factor
            tensor.detach().copy_(result.reshape(tensor.shape))
            begin = end

    arrays = [mine.numpy(), theirs.numpy()] if is_on_host else [mine, theirs]
    memory = group.memory(arrays, asynchronous=True)
    return group.submit(call, Part(memory, label=f"{kind} '{label}'"), write)


def warn_of_compression(compression: Any) -> None:
    """Warn that compression is ignored: Horovod's scripts may request both."""
    name = getattr(compression, "name", compression)
    if name != "none":
        warn(f"op=Adasum does not compress: compression {name} is ignored")


class _OnDevice(AdasumReduce):
    """The same on a GPU, which computes the dot products."""

    def dots(self, a: Any, b: Any, spans: Sequence[slice]) -> np.ndarray[Any, Any]:
        results = torch.zeros(len(spans), 5, dtype=torch.float64, device=a.device)
        for i, at in enumerate(spans):
            x, y = self.wide(a[at]), self.wide(b[at])
            p, q = (_scale(v) if a.itemsize == 8 else v.new_zeros(()) for v in (x, y))
            x, y = x * 2.0**-p, y * 2.0**-q
            results[i] = torch.stack([x.dot(y), x.dot(x), y.dot(y), p, q])
        result: np.ndarray[Any, Any] = results.cpu().numpy()
        return result

    def wide(self, x: Any) -> Any:
        return x.double()


def _scale(x: torch.Tensor) -> torch.Tensor:
    greatest = x.abs().amax()
    scale = (torch.frexp(greatest).exponent - 1).clamp(min=SMALLEST).double()
    return torch.where(greatest == 0, SMALLEST, scale)
