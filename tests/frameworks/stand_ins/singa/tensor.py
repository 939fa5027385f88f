"""SINGA's tensor: a raw one (`data`) with a name, and what autograd needs to know of it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import toy

from . import singa_wrap as singa
from .device import get_default_device

float32, float16, int32 = singa.kFloat32, singa.kFloat16, singa.kInt
_count = itertools.count()
_PUT = {
    np.dtype("f4"): singa.Tensor.CopyFloatDataFromHostPtr,
    np.dtype("f2"): singa.Tensor.CopyHalfFloatDataFromHostPtr,
    np.dtype("i4"): singa.Tensor.CopyIntDataFromHostPtr,
}


class Tensor(toy.Recorded):
    def __init__(
        self,
        shape: Any = (),
        device: singa.Device | None = None,
        dtype: int = float32,
        data: singa.Tensor | np.ndarray | None = None,
        requires_grad: bool = True,
        stores_grad: bool = False,
        name: str | None = None,
    ) -> None:
        self.device = device or get_default_device()
        if isinstance(data, singa.Tensor):
            self.data = data
        else:
            self.data = singa.Tensor(shape if data is None else data.shape, self.device, dtype)
        self.shape, self.dtype = tuple(self.data.shape()), self.data.data_type()
        self.requires_grad, self.stores_grad = requires_grad, stores_grad
        self.name = f"Dummy#{next(_count)}" if name is None else name
        if isinstance(data, np.ndarray):
            self.copy_from_numpy(data)

    def size(self) -> int:
        return self.data.Size()

    def copy_from_numpy(self, array: np.ndarray) -> None:
        assert array.size == self.size(), "tensor shape should be the same"
        _PUT[array.dtype](self.data, array.flatten())

    def copy_data(self, other: Tensor) -> None:
        self.data.CopyData(other.data)

    def set_value(self, x: float) -> Tensor:
        self.data.SetFloatValue(float(x))
        return self

    def clone(self) -> Tensor:
        return Tensor(device=self.device, data=self.data.Clone())

    def to_device(self, device: singa.Device) -> None:
        self.data.ToDevice(device)
        self.device = device

    def __eq__(self, other: object) -> Any:
        # Element by element, as in SINGA since version 3; so a tensor cannot be a key of a dict.
        return other is not None and to_numpy(self) == to_numpy(other)

    def __imul__(self, x: Any) -> Tensor:
        self.data *= x.data if isinstance(x, Tensor) else float(x)
        return self

    def __itruediv__(self, x: Any) -> Tensor:
        self.data /= x.data if isinstance(x, Tensor) else float(x)
        return self


def from_numpy(array: np.ndarray) -> Tensor:
    smaller = {np.dtype("f8"): np.float32, np.dtype("i8"): np.int32}
    array = array.astype(smaller.get(array.dtype, array.dtype))
    dtypes = {np.dtype("f4"): float32, np.dtype("f2"): float16, np.dtype("i4"): int32}
    new = Tensor(array.shape, dtype=dtypes[array.dtype])
    new.copy_from_numpy(array)
    return new


def to_numpy(t: Tensor) -> np.ndarray:
    host = t.data.Clone()
    host.ToHost()
    get = {float32: "GetFloatValue", float16: "GetHalfFloatValue", int32: "GetIntValue"}[t.dtype]
    return getattr(host, get)(int(t.size())).reshape(t.shape)


def zeros_like(t: Tensor) -> Tensor:
    return Tensor(t.shape, t.device, t.dtype).set_value(0)
