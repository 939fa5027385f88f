"""The toy framework that the stand-ins for Needle and SINGA share: operators and their gradients.

An operator returns its result and a function from the result's gradient to its inputs' gradients.
As in both frameworks, several of these may be one array, and they have any layout: transposed, or
expanded with strides of 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Result = tuple[Array, Callable[[Array], Sequence[Array]]]


class Recorded:
    """A tensor that knows what it was computed from."""

    requires_grad: bool
    inputs: Sequence[Any] = ()
    backwards: Callable[[Array], Sequence[Array]]


def gradients(output: Recorded) -> Iterator[tuple[Any, Array]]:
    """Yield each tensor with its gradient, as soon as all that uses the tensor is processed."""
    n_uses = Counter[int]()
    seen, todo = set(), [output]
    while todo:
        for x in todo.pop().inputs:
            n_uses[id(x)] += 1
            if id(x) not in seen:
                seen.add(id(x))
                todo.append(x)
    found: dict[int, Array] = {id(output): np.ones(output.shape, np.float32)}  # type: ignore[attr-defined]
    todo = [output]
    while todo:
        y = todo.pop()
        dy = found.pop(id(y))
        yield y, dy
        for x, dx in zip(y.inputs, y.backwards(dy), strict=True):
            if not x.requires_grad:
                continue
            found[id(x)] = found[id(x)] + dx if id(x) in found else dx
            n_uses[id(x)] -= 1
            if n_uses[id(x)] == 0 and x.inputs:
                todo.append(x)
            elif n_uses[id(x)] == 0:
                yield x, found.pop(id(x))


def add(a: Array, b: Any) -> Result:
    return a + b, lambda dy: (dy, dy)


def multiply(a: Array, b: Any) -> Result:
    return a * b, lambda dy: (dy * b, dy * a)


def power(a: Array, n: float) -> Result:
    return a**n, lambda dy: (dy * n * a ** (n - 1),)


def matmul(x: Array, w: Array) -> Result:
    return x @ w, lambda dy: (dy @ w.T, x.T @ dy)


def add_row(x: Array, row: Array) -> Result:
    return x + row, lambda dy: (dy, dy.sum(0).reshape(row.shape))


def transpose(x: Array) -> Result:
    return x.T, lambda dy: (dy.T,)


def reshape(x: Array, shape: Any) -> Result:
    return x.reshape(shape), lambda dy: (dy.reshape(x.shape),)


def summation(x: Array) -> Result:
    return x.sum(keepdims=True).reshape(1), lambda dy: (np.broadcast_to(dy[0], x.shape),)


def relu(x: Array) -> Result:
    return np.maximum(x, 0), lambda dy: (dy * (x > 0),)


def softmax_cross_entropy(x: Array, classes: Array) -> Result:
    """Return the mean over the samples, whose classes are numbers."""
    e = np.exp(x - x.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(len(p)), classes]).mean(keepdims=True)
    slope = (p - np.eye(p.shape[1], dtype=p.dtype)[classes]) / np.float32(len(p))
    return loss, lambda dy: (slope * dy,)
