"""Tensors, whose values are arrays on a device, and the operators that a small network needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import toy


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


class NDArray:
    """A view of a flat float32 buffer. It has neither the buffer protocol nor DLPack."""

    __array_ufunc__ = None

    def __init__(self, view: np.ndarray[Any, Any], device: BackendDevice) -> None:
        assert device.enabled(), f"{device} is not available"
        assert view.dtype == np.float32
        self.view, self.device = view, device  # the view is not for users

    @property
    def _handle(self) -> int:
        base = self.view
        while isinstance(base.base, np.ndarray):
            base = base.base
        return id(base)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(stride // 4 for stride in self.view.strides)

    def is_compact(self) -> bool:
        return self.view.flags.c_contiguous

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.view.copy() if self.device.copies else self.view.view()


class Tensor(toy.Recorded):
    grad: Tensor | None

    def __init__(
        self,
        array: Any,
        *,
        device: BackendDevice | None = None,
        dtype: str | None = None,
        requires_grad: bool = True,
    ) -> None:
        assert dtype in (None, "float32")
        if isinstance(array, Tensor):
            array, device = array.numpy(), device or array.device
        self.cached_data = NDArray(np.array(array, np.float32, order="C"), device or cpu_numpy())
        self.requires_grad = requires_grad

    @staticmethod
    def make_const(data: NDArray) -> Tensor:
        tensor = Tensor.__new__(Tensor)
        tensor.cached_data, tensor.requires_grad = data, False
        return tensor

    @property
    def data(self) -> Tensor:
        """Return a new tensor each time."""
        return Tensor.make_const(self.cached_data)

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, Tensor)
        assert value.dtype == self.dtype
        self.cached_data = value.cached_data

    shape = property(lambda self: self.cached_data.view.shape)
    dtype = property(lambda self: self.cached_data.view.dtype.name)
    device = property(lambda self: self.cached_data.device)

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.cached_data.numpy()

    def backward(self) -> None:
        """Set the gradients; one array is one tensor, however many have it as their gradient."""
        tensors: dict[int, Tensor] = {}
        for x, g in toy.gradients(self):
            x.grad = tensors.setdefault(id(g), Tensor.make_const(NDArray(g, self.device)))

    def __add__(self, other: Any) -> Tensor:
        return _of_two(toy.add, self, other)

    def __mul__(self, other: Any) -> Tensor:
        return _of_two(toy.multiply, self, other)

    def __sub__(self, other: Any) -> Tensor:
        return self + -1 * other

    def __truediv__(self, other: Any) -> Tensor:
        return self * (other**-1 if isinstance(other, Tensor) else 1 / other)

    def __pow__(self, n: float) -> Tensor:
        return apply(lambda a: toy.power(a, n), self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return apply(toy.matmul, self, other)

    __radd__, __rmul__ = __add__, __mul__


def apply(operator: Any, *inputs: Tensor) -> Tensor:
    """Return the operator's result, which remembers its inputs if one of them needs a gradient."""
    device = inputs[0].device
    assert all(x.device == device for x in inputs), f"not all on {device}"
    values, backwards = operator(*(x.cached_data.view for x in inputs))
    result = Tensor.make_const(NDArray(values.astype(np.float32, copy=False), device))
    if any(x.requires_grad for x in inputs):
        result.inputs, result.backwards, result.requires_grad = inputs, backwards, True
    return result


def _of_two(operator: Any, a: Tensor, b: Any) -> Tensor:
    if isinstance(b, Tensor):
        assert a.shape == b.shape, "tensors are not broadcast automatically"
        return apply(operator, a, b)

    def with_number(x: Any) -> Any:
        values, backwards = operator(x, np.float32(b))
        return values, lambda dy: backwards(dy)[:1]

    return apply(with_number, a)


def transpose(a: Tensor, axes: Any) -> Tensor:
    assert axes == (1, 0)
    return apply(toy.transpose, a)


def reshape(a: Tensor, shape: Any) -> Tensor:
    return apply(lambda x: toy.reshape(x, shape), a)


def summation(a: Tensor) -> Tensor:
    return apply(toy.summation, a)
