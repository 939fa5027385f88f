"""Operators that record their inputs, and `backward`, which yields gradients.

As in SINGA, `backward` is a generator: it yields a parameter (a tensor that stores its gradient)
and its gradient as soon as everything that uses it has been processed; and one raw tensor may be
the gradient of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from . import singa_wrap as singa
from .tensor import Tensor

training = False
Raw = singa.Tensor


class Operator:
    """One application of an operator: `backward` takes the raw gradient of its only output."""

    def __init__(self, backward: Callable[[Any], tuple[Raw | None, ...]], inputs: Any) -> None:
        self.backward = backward
        self.inputs = inputs if training else ()


def _apply(result: Raw, backward: Callable[[Any], Any], *inputs: Tensor) -> Tensor:
    return Tensor(device=result.device(), data=result, creator=Operator(backward, inputs))


def matmul(x: Tensor, w: Tensor) -> Tensor:
    def backward(dy: Raw) -> Any:
        return (
            singa.Mult(dy, singa.DefaultTranspose(w.data)),
            singa.Mult(singa.DefaultTranspose(x.data), dy),
        )

    return _apply(singa.Mult(x.data, w.data), backward, x, w)


def add_bias(x: Tensor, b: Tensor, axis: int = 0) -> Tensor:
    assert axis == 0
    singa.AddRow(b.data, x.data)  # in place, as in SINGA
    return _apply(x.data, lambda dy: (dy, singa.Sum(dy, 0)), x, b)


def add(a: Tensor, b: Tensor) -> Tensor:
    return _apply(singa.Add(a.data, b.data), lambda dy: (dy, dy), a, b)


def transpose(x: Tensor, axes: tuple[int, int]) -> Tensor:
    assert axes == (1, 0)
    raw = singa.DefaultTranspose(x.data)
    return _apply(raw, lambda dy: (singa.DefaultTranspose(dy),), x)


def relu(x: Tensor) -> Tensor:
    return _apply(singa.ReLU(x.data), lambda dy: (singa.ReLUBackward(dy, x.data),), x)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    raw = singa.Clip(x.data, low, high)
    return _apply(raw, lambda dy: (None,), x)  # for gradients, which have none


def softmax_cross_entropy(x: Tensor, t: Tensor) -> Tensor:
    """Return the mean over the batch; `t` has the class number of each sample."""
    p = singa.SoftMax(x.data)
    loss = singa.SumAll(singa.CrossEntropyFwd(p, t.data))
    loss /= x.shape[0]

    def backward(dy: Any) -> Any:
        dx = singa.SoftmaxCrossEntropyBwd(p, t.data)
        dx /= float(x.shape[0])
        return (dx,)

    return _apply(loss, backward, x)


def backward(y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    assert y.size() == 1, "y must be a Tensor with a single value"
    n_uses = Counter[int]()  # pending uses of each tensor
    seen, todo = set(), [y]
    while todo:
        for x in getattr(todo.pop().creator, "inputs", ()):
            n_uses[id(x)] += 1
            if id(x) not in seen:
                seen.add(id(x))
                todo.append(x)
    gradients: dict[int, Any] = {id(y): 1.0}
    todo = [y]
    while todo:
        out = todo.pop()
        dy, op = gradients.pop(id(out)), out.creator
        for x, dx in zip(op.inputs, op.backward(dy), strict=True):
            if not x.requires_grad or dx is None:
                continue
            if id(x) in gradients:
                gradients[id(x)] = singa.Add(gradients[id(x)], dx)
            else:
                gradients[id(x)] = dx
            n_uses[id(x)] -= 1
            if n_uses[id(x)] == 0:
                if x.stores_grad:
                    g = gradients[id(x)]
                    yield x, Tensor(device=g.device(), data=g, name=f"{x.name}_g")
                if x.creator is not None:
                    todo.append(x)
