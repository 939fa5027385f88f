"""Modules: they hold parameters, other modules, and lists and dicts of them, as attributes."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from . import ops
from .autograd import Tensor


class Parameter(Tensor):
    """A trainable tensor."""


def _parameters(value: object) -> list[Parameter]:
    if isinstance(value, Parameter):
        return [value]
    if isinstance(value, Module):
        return _parameters(value.__dict__)
    items = value.values() if isinstance(value, dict) else value
    return (
        [p for x in items for p in _parameters(x)] if isinstance(value, (dict, list, tuple)) else []
    )


class Module:
    def __init__(self) -> None:
        self.training = True

    def parameters(self) -> list[Parameter]:
        """Return the parameters, without names."""
        return _parameters(self)

    def forward(self, *args: Any) -> Tensor:
        raise NotImplementedError

    def __call__(self, *args: Any) -> Tensor:
        return self.forward(*args)


def _kaiming(shape: tuple[int, ...], device: Any) -> Parameter:
    bound = (6 / prod(shape[:-1])) ** 0.5
    return Parameter(np.random.uniform(-bound, bound, shape), device=device)


class Linear(Module):
    def __init__(
        self, in_features: int, out_features: int, device: Any = None, dtype: str = "float32"
    ) -> None:
        super().__init__()
        self.weight = _kaiming((in_features, out_features), device)
        self.bias = Parameter(np.zeros((1, out_features)), device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out + ops.broadcast_to(self.bias, out.shape)


class Conv(Module):
    """For NCHW images, with odd kernels and padding that preserves their size."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, device: Any = None
    ) -> None:
        super().__init__()
        self.padding = kernel_size // 2
        self.weight = _kaiming((kernel_size, kernel_size, in_channels, out_channels), device)
        self.bias = Parameter(np.zeros(out_channels), device=device)

    def forward(self, x: Tensor) -> Tensor:
        out = ops.conv(ops.transpose(x, (0, 2, 3, 1)), self.weight, self.padding)
        bias = ops.reshape(self.bias, (1, 1, 1, out.shape[3]))
        return ops.transpose(out + ops.broadcast_to(bias, out.shape), (0, 3, 1, 2))


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class Flatten(Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.reshape(x, (x.shape[0], prod(x.shape[1:])))


class Sequential(Module):
    def __init__(self, *modules: Module) -> None:
        super().__init__()
        self.modules = modules

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


class BatchNorm1d(Module):
    def __init__(
        self, dim: int, eps: float = 1e-5, momentum: float = 0.1, device: Any = None
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.momentum = dim, eps, momentum
        self.weight = Parameter(np.ones(dim), device=device)
        self.bias = Parameter(np.zeros(dim), device=device)
        self.running_mean = Tensor(np.zeros(dim), device=device, requires_grad=False)
        self.running_var = Tensor(np.ones(dim), device=device, requires_grad=False)

    def _rows(self, x: Tensor, n: int) -> Tensor:
        return ops.broadcast_to(ops.reshape(x, (1, self.dim)), (n, self.dim))

    def forward(self, x: Tensor) -> Tensor:
        n, mean, var = x.shape[0], self.running_mean, self.running_var
        if self.training:
            mean = ops.summation(x, (0,)) / n
            var = ops.summation((x - self._rows(mean, n)) ** 2, (0,)) / n
            for kept, new in ((self.running_mean, mean), (self.running_var, var)):
                kept.data = (1 - self.momentum) * kept.data + self.momentum * new.data
        normal = (x - self._rows(mean, n)) * self._rows((var + self.eps) ** -0.5, n)
        return normal * self._rows(self.weight, n) + self._rows(self.bias, n)


class SoftmaxLoss(Module):
    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        n, n_classes = logits.shape
        hot = Tensor(
            np.eye(n_classes)[y.numpy().astype(int)], device=logits.device, requires_grad=False
        )
        chosen = ops.summation(logits * hot, (1,))
        return ops.summation(ops.logsumexp(logits) - chosen) / n
