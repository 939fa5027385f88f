"""Modules: they hold parameters, other modules, and lists and dicts of them, as attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import toy

from .ops import Tensor, apply


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


class Linear(Module):
    def __init__(self, in_features: int, out_features: int, device: Any = None) -> None:
        super().__init__()
        bound = (6 / in_features) ** 0.5
        weight = np.random.uniform(-bound, bound, (in_features, out_features))
        self.weight = Parameter(weight, device=device)
        self.bias = Parameter(np.zeros((1, out_features)), device=device)

    def forward(self, x: Tensor) -> Tensor:
        return apply(toy.add_row, x @ self.weight, self.bias)


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return apply(toy.relu, x)


class Sequential(Module):
    def __init__(self, *modules: Module) -> None:
        super().__init__()
        self.modules = modules

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


class SoftmaxLoss(Module):
    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        classes = y.numpy().astype(int)
        return apply(lambda x: toy.softmax_cross_entropy(x, classes), logits)
