"""Operators that record their inputs, and `backward`, which yields gradients.

As in SINGA, `backward` is a generator: it yields a parameter (a tensor that stores its gradient)
and its gradient as soon as everything that uses it has been processed; and one raw tensor may be
the gradient of several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import toy

from .tensor import Tensor

training = False


def _apply(operator: Any, *inputs: Tensor) -> Tensor:
    values, backwards = operator(*(x.data.values for x in inputs))
    result = Tensor(device=inputs[0].device, data=inputs[0].data.like(values))
    if training:
        result.inputs, result.backwards = inputs, backwards
    return result


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return _apply(toy.matmul, x, w)


def add_bias(x: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    assert axis == 0
    return _apply(toy.add_row, x, b)


def add(a: Tensor, b: Tensor) -> Tensor:
    return _apply(toy.add, a, b)


def transpose(x: Tensor, axes: tuple[int, int]) -> Tensor:
    assert axes == (1, 0)
    return _apply(toy.transpose, x)


def relu(x: Tensor) -> Tensor:
    return _apply(toy.relu, x)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Clip a gradient, which has none itself."""
    return Tensor(device=x.device, data=x.data.like(np.clip(x.data.values, low, high)))


def softmax_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Return the mean over the batch; `t` has the class number of each sample."""
    return _apply(lambda values: toy.softmax_cross_entropy(values, t.data.values), x)


def backward(y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    assert y.size() == 1, "y must be a Tensor with a single value"
    for x, g in toy.gradients(y):
        if x.stores_grad:
            yield x, Tensor(device=x.device, data=x.data.like(g), name=f"{x.name}_g")
