"""SINGA's extension module, over NumPy: raw tensors, which SINGA's Python files call `.data`.

As in the extension, a tensor's values can only be read as copies; a tensor on a GPU is copied to
the host first; a transposed one is read in the order of its shape and written in the order of its
memory; and reading uninitialized values ends the process, here with `Fatal`.
"""

# ruff: noqa: N802 (the names are SINGA's)
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

kFloat32, kFloat16, kInt = range(3)  # noqa: N816
_DTYPES = {kFloat32: np.float32, kFloat16: np.float16, kInt: np.int32}


class Fatal(BaseException):
    """As SINGA's logging library does: the process ends."""


class Device:
    def __init__(self, number: int) -> None:
        self._number, self._graph = number, False

    def id(self) -> int:
        return self._number

    def graph_enabled(self) -> bool:
        return self._graph

    def EnableGraph(self, enable: bool) -> None:
        self._graph = enable


_host = Device(-1)


class Platform:
    @staticmethod
    def GetDefaultDevice() -> Device:
        return _host

    @staticmethod
    def CreateCudaGPUsOn(numbers: Iterable[int]) -> list[Device]:
        return [Device(number) for number in numbers]


class Tensor:
    """A view of a block of memory; `Tensor(other)` is another view of the same block."""

    def __init__(self, shape: Any = (), device: Device = _host, dtype: int = kFloat32) -> None:
        if isinstance(shape, Tensor):
            vars(self).update(vars(shape))
            return
        self._dtype, self._device = dtype, device
        self._view = np.empty(tuple(shape), _DTYPES[dtype])
        self._block = {"is_initialized": False}

    def like(self, view: np.ndarray) -> Tensor:
        """Return a tensor over `view`, otherwise like this one; for the modules here only."""
        new = Tensor(self)
        new._view, new._block = view, {"is_initialized": True}
        return new

    @property
    def values(self) -> np.ndarray:
        """Return the values, for the modules here only."""
        if not self._block["is_initialized"]:
            raise Fatal("Must initialize data before reading it")
        return self._view

    @values.setter
    def values(self, values: Any) -> None:
        self._view[...] = values
        self._block["is_initialized"] = True

    @property
    def in_memory(self) -> np.ndarray:
        """Return the block in the order of its memory, however the tensor is transposed."""
        return self._view.transpose(np.argsort(self._view.strides, kind="stable")[::-1])

    def device(self) -> Device:
        return self._device

    def data_type(self) -> int:
        return self._dtype

    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    def transpose(self) -> bool:
        return not self._view.flags.c_contiguous

    def Size(self) -> int:
        return self._view.size

    def Clone(self) -> Tensor:
        return self.like(self.values.copy(order="K"))

    def ToHost(self) -> None:
        self.ToDevice(_host)

    def ToDevice(self, device: Device) -> None:
        if device is not self._device:
            self._view, self._device = self._view.copy(order="K"), device

    def SetFloatValue(self, x: float) -> None:
        self.values = x

    def CopyData(self, other: Tensor) -> None:
        self.values = other.values

    def _get(self, dtype: int, num: int) -> np.ndarray:
        if self._device is not _host or self._dtype != dtype or num != self.Size():
            raise Fatal("Check failed: device_ == defaultDevice")
        return self.values.flatten()

    def _put(self, dtype: int, source: np.ndarray) -> None:
        if self._dtype != dtype or source.shape != (self.Size(),) or source.dtype != _DTYPES[dtype]:
            raise Fatal("data copied from host memory must be of the tensor's type and size")
        self.in_memory[...] = source.reshape(self.in_memory.shape)
        self._block["is_initialized"] = True

    def GetFloatValue(self, num: int) -> np.ndarray:
        return self._get(kFloat32, num)

    def GetHalfFloatValue(self, num: int) -> np.ndarray:
        return self._get(kFloat16, num)

    def GetIntValue(self, num: int) -> np.ndarray:
        return self._get(kInt, num)

    def CopyFloatDataFromHostPtr(self, source: np.ndarray) -> None:
        self._put(kFloat32, source)

    def CopyHalfFloatDataFromHostPtr(self, source: np.ndarray) -> None:
        self._put(kFloat16, source)

    def CopyIntDataFromHostPtr(self, source: np.ndarray) -> None:
        self._put(kInt, source)

    def __iadd__(self, x: Any) -> Tensor:
        self.values += x.values if isinstance(x, Tensor) else x
        return self

    def __imul__(self, x: Any) -> Tensor:
        self.values *= x.values if isinstance(x, Tensor) else x
        return self

    def __itruediv__(self, x: Any) -> Tensor:
        self.values /= x.values if isinstance(x, Tensor) else x
        return self


class VecTensor(list):
    """A std::vector of tensors: it has copies of the views, not of the memory."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__(Tensor(t) for t in tensors)


def DefaultTranspose(a: Tensor) -> Tensor:
    return a.like(a.values.T)


def Axpy(alpha: Any, x: Tensor, y: Tensor) -> None:
    """Add alpha * x to y; to a transposed y in the order of its memory, as in 3.0.0.dev1."""
    more = (alpha.values if isinstance(alpha, Tensor) else np.float32(alpha)) * x.values
    y.in_memory[...] += more.reshape(y.in_memory.shape) if y.transpose() else more
