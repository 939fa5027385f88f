"""Tensors, and the graph that records how they were computed."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import numpy as np

from .backend_ndarray import BackendDevice, NDArray, default_device


class TensorOp:
    def __call__(self, *args: Tensor) -> Tensor:
        return Tensor.make_from_op(self, args)

    def compute(self, *args: NDArray) -> NDArray:
        raise NotImplementedError

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        raise NotImplementedError


class Tensor:
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
            data = array.cached_data.to(device or array.device)
        else:
            data = NDArray(np.asarray(array, np.float32), device or default_device())
        self._set(None, (), data, requires_grad)

    def _set(self, op: Any, inputs: Any, cached_data: NDArray, requires_grad: bool) -> None:
        self.op, self.inputs = op, inputs
        self.cached_data, self.requires_grad = cached_data, requires_grad

    @staticmethod
    def make_const(data: NDArray, requires_grad: bool = False) -> Tensor:
        tensor = Tensor.__new__(Tensor)
        tensor._set(None, (), data, requires_grad)
        return tensor

    @staticmethod
    def make_from_op(op: TensorOp, inputs: Any) -> Tensor:
        tensor = Tensor.make_const(op.compute(*(x.realize_cached_data() for x in inputs)))
        if any(x.requires_grad for x in inputs):
            tensor._set(op, inputs, tensor.cached_data, True)
        return tensor

    def realize_cached_data(self) -> NDArray:
        return self.cached_data

    def detach(self) -> Tensor:
        return Tensor.make_const(self.cached_data)

    @property
    def data(self) -> Tensor:
        """Return a new tensor each time."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, Tensor)
        assert value.dtype == self.dtype
        self.cached_data = value.realize_cached_data()

    shape = property(lambda self: self.cached_data.shape)
    dtype = property(lambda self: self.cached_data.dtype)
    device = property(lambda self: self.cached_data.device)

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.cached_data.numpy()

    def backward(self, out_grad: Tensor | None = None) -> None:
        if out_grad is None:
            out_grad = Tensor(np.ones(self.shape), device=self.device, requires_grad=False)
        contributions = {id(self): [out_grad]}
        for node in reversed(_sorted(self)):
            # With one contribution, it is that tensor itself.
            node.grad = reduce(add, contributions[id(node)])
            if node.op is None:
                continue
            found = node.op.gradient(node.grad, node)
            for x, g in zip(
                node.inputs, found if isinstance(found, tuple) else (found,), strict=True
            ):
                contributions.setdefault(id(x), []).append(g)

    def __add__(self, other: Any) -> Tensor:
        from . import ops

        return (
            ops.EWiseAdd()(self, other) if isinstance(other, Tensor) else ops.AddScalar(other)(self)
        )

    def __mul__(self, other: Any) -> Tensor:
        from . import ops

        return (
            ops.EWiseMul()(self, other) if isinstance(other, Tensor) else ops.MulScalar(other)(self)
        )

    def __sub__(self, other: Any) -> Tensor:
        return self + -1 * other

    def __truediv__(self, other: Any) -> Tensor:
        return self * (other**-1 if isinstance(other, Tensor) else 1 / other)

    def __pow__(self, power: float) -> Tensor:
        from . import ops

        return ops.PowerScalar(power)(self)

    def __matmul__(self, other: Tensor) -> Tensor:
        from . import ops

        return ops.MatMul()(self, other)

    __radd__, __rmul__ = __add__, __mul__


def _sorted(output: Tensor) -> list[Tensor]:
    """Return the tensors that the output is computed from, each after its inputs."""
    done: list[Tensor] = []
    seen: set[int] = set()

    def visit(node: Tensor) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        for x in node.inputs:
            visit(x)
        done.append(node)

    visit(output)
    return done
