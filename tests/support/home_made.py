"""A framework of one's own: parameters that hold arrays of NumPy, and gradient descent on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Parameter:
    """A value in `.data` and its gradient in `.grad`."""

    def __init__(self, data: Any, grad: Any = None) -> None:
        self.data, self.grad = data, grad


class SGD:
    """Subtracts the learning rate times the gradients, in place."""

    def __init__(self, params: Iterable[Any] | Mapping[str, Any], lr: float = 1.0) -> None:
        self.params = params
        self.lr = lr

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self._values():
            p.grad = None

    def step(self) -> None:
        """Take a step."""
        for p in self._values():
            p.data -= self.lr * p.grad

    def _values(self) -> Iterable[Any]:
        return self.params.values() if isinstance(self.params, Mapping) else self.params
