"""NDArray: a flat buffer of a device, with a shape, strides and an offset."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np


class Array:
    """The flat buffer, which Python sees as a handle only."""

    def __init__(self, size: int) -> None:
        self.array = np.empty(size, np.float32)
        self.size = size


class BackendDevice:
    """`copies`: numpy() returns a copy, as pybind11 does, and not a view of the buffer."""

    def __init__(self, name: str, *, copies: bool = True, enabled: bool = True) -> None:
        self.name, self.copies, self._enabled = name, copies, enabled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BackendDevice) and self.name == other.name

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.name}()"

    def enabled(self) -> bool:
        return self._enabled


def cpu() -> BackendDevice:
    return BackendDevice("cpu")


def cpu_numpy() -> BackendDevice:
    return BackendDevice("cpu_numpy", copies=False)


def cuda() -> BackendDevice:
    return BackendDevice("cuda", enabled=False)


def default_device() -> BackendDevice:
    return cpu_numpy()


def all_devices() -> list[BackendDevice]:
    return [cpu(), cuda(), cpu_numpy()]


class NDArray:
    """Float32 only. It has neither the buffer protocol nor DLPack, and NumPy cannot convert it."""

    __array_ufunc__ = None

    def __init__(self, other: Any, device: BackendDevice | None = None) -> None:
        source = np.ascontiguousarray(other.numpy() if isinstance(other, NDArray) else other)
        if isinstance(other, NDArray) and device is None:
            device = other.device
        self._set(source.shape, None, device or default_device(), Array(source.size), 0)
        self._handle.array[:] = source.reshape(-1)

    def _set(self, shape: Any, strides: Any, device: Any, handle: Array, offset: int) -> None:
        assert device.enabled(), f"{device} is not available"
        self._shape = tuple(shape)
        self._strides = compact_strides(shape) if strides is None else tuple(strides)
        self._device, self._handle, self._offset = device, handle, offset

    def _same(self, shape: Any, strides: Any) -> NDArray:
        """Return another view of the same buffer."""
        array = NDArray.__new__(NDArray)
        array._set(shape, strides, self._device, self._handle, self._offset)
        return array

    shape = property(lambda self: self._shape)
    strides = property(lambda self: self._strides)
    device = property(lambda self: self._device)
    dtype = property(lambda self: "float32")
    ndim = property(lambda self: len(self._shape))
    size = property(lambda self: prod(self._shape))

    def view(self) -> np.ndarray[Any, Any]:
        """Return the backend's view of its buffer; not for users."""
        strides = [4 * stride for stride in self._strides]
        flat = self._handle.array[self._offset :]
        return np.lib.stride_tricks.as_strided(flat, self._shape, strides)

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.view().copy() if self._device.copies else self.view()

    def to(self, device: BackendDevice) -> NDArray:
        return self if device == self._device else NDArray(self.numpy(), device)

    def is_compact(self) -> bool:
        return self._strides == compact_strides(self._shape) and self._handle.size == self.size

    def compact(self) -> NDArray:
        return self if self.is_compact() else NDArray(self.view(), self._device)

    def permute(self, axes: Any) -> NDArray:
        return self._same([self._shape[i] for i in axes], [self._strides[i] for i in axes])

    def broadcast_to(self, shape: Any) -> NDArray:
        assert len(shape) == self.ndim
        strides = [
            stride if old == new else 0
            for stride, old, new in zip(self._strides, self._shape, shape, strict=True)
        ]
        return self._same(shape, strides)

    def reshape(self, shape: Any) -> NDArray:
        if not self.is_compact():
            raise ValueError("reshape of an array that is not compact")
        assert prod(shape) == self.size
        return self._same(shape, None)

    def _with(self, other: Any, result: Any) -> NDArray:
        if isinstance(other, NDArray):
            assert other.shape == self.shape, "NDArrays are not broadcast automatically"
            assert other.device == self.device, f"{self.device} and {other.device} differ"
            other = other.view()
        return NDArray(result(self.view(), other), self._device)

    def __add__(self, other: Any) -> NDArray:
        return self._with(other, np.add)

    def __sub__(self, other: Any) -> NDArray:
        return self._with(other, np.subtract)

    def __mul__(self, other: Any) -> NDArray:
        return self._with(other, np.multiply)

    def __truediv__(self, other: Any) -> NDArray:
        return self._with(other, np.divide)

    def __pow__(self, power: float) -> NDArray:
        return self._with(power, np.power)

    def __matmul__(self, other: NDArray) -> NDArray:
        assert other.device == self.device, f"{self.device} and {other.device} differ"
        return NDArray(self.view() @ other.view(), self._device)

    def sum(self, axes: Any) -> NDArray:
        return NDArray(self.view().sum(axis=axes), self._device)

    __radd__, __rmul__ = __add__, __mul__


def compact_strides(shape: Any) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
