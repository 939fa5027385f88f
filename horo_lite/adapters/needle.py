"""Needle, the framework that students of CMU 10-414/714 write: tensors are read by copying."""

from __future__ import annotations

from typing import Any

import needle
import numpy as np

from horo_lite.adapters.object import Adapter, Array, Named, join

# The first homework has no modules yet, and other packages are called needle, too.
TENSOR: Any = getattr(needle, "Tensor", ())
MODULE: Any = getattr(getattr(needle, "nn", None), "Module", ())
OPTIMIZER: Any = getattr(getattr(needle, "optim", None), "Optimizer", ())


class NeedleAdapter(Adapter):
    """needle.optim optimizers, needle.nn modules and tensors, on any of its devices.

    A gradient may share its memory (a + b gives both operands the same tensor) and have any layout:
    so it is copied, and the result is a tensor of its own, assigned to `.data` as Needle requires.
    Optimizers key their state by parameter, so parameters are never replaced.
    """

    steps = ("step",)
    before_step = ("clip_grad_norm",)
    array_types = (TENSOR,) if TENSOR else ()

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (TENSOR, MODULE, OPTIMIZER))

    def parameters(self, owner: Any) -> Named:
        """Return all tensors of a module, including running means, named by its attributes."""
        if isinstance(owner, OPTIMIZER):
            return [(f"params[{i}]", parameter) for i, parameter in enumerate(owner.params)]
        return [] if isinstance(owner, TENSOR) else _tensors(owner, "")

    def gradient(self, parameter: Any) -> Array | None:
        gradient = _gradient(parameter)
        return None if gradient is None else self.value(gradient)

    def set_gradient(self, parameter: Any, array: Array) -> None:
        averaged, gradient = self.from_numpy(array, parameter), _gradient(parameter)
        if gradient is None:
            parameter.grad = averaged
        else:
            gradient.data = averaged

    def value(self, parameter: Any) -> Array:
        array = np.asarray(parameter.numpy())  # a copy, or on some devices its own memory
        array.flags.writeable = False
        return array

    def set_value(self, parameter: Any, array: Array) -> None:
        parameter.data = self.from_numpy(array, parameter)

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        return needle.Tensor(array, device=like.device, dtype=like.dtype, requires_grad=False)


def _gradient(parameter: Any) -> Any:
    return getattr(parameter, "grad", None)  # the attribute is missing before the first backward()


def _tensors(value: Any, path: str) -> Named:
    """Return the named tensors of a module, in the order of its parameters()."""
    if isinstance(value, TENSOR):
        return [(path, value)]
    if isinstance(value, MODULE):
        value = vars(value)
    if isinstance(value, dict):
        return [named for key, x in value.items() for named in _tensors(x, join(path, key))]
    if isinstance(value, (list, tuple)):
        return [named for i, x in enumerate(value) for named in _tensors(x, f"{path}[{i}]")]
    return []


ADAPTER = NeedleAdapter()
