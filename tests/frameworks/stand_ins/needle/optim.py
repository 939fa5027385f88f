"""Optimizers: their state is kept by parameter, the object itself."""

from __future__ import annotations

from typing import Any

from .ops import Tensor


class Optimizer:
    def __init__(self, params: Any) -> None:
        self.params = params

    def step(self) -> None:
        raise NotImplementedError

    def reset_grad(self) -> None:
        for p in self.params:
            p.grad = None


class SGD(Optimizer):
    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.u: dict[Any, Any] = {}

    def step(self) -> None:
        for p in self.params:
            if p.grad is None:
                continue
            g = p.grad.data + self.weight_decay * p.data
            self.u[p] = self.momentum * self.u.get(p, 0) + (1 - self.momentum) * g
            p.data = p.data - self.lr * self.u[p]

    def clip_grad_norm(self, max_norm: float = 0.25) -> None:
        gradients = [p.grad for p in self.params if p.grad is not None]
        norm = sum(float((g.numpy() ** 2).sum()) for g in gradients) ** 0.5
        for g in gradients:
            g.data = g.data * min(1.0, max_norm / norm)


class Adam(Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params)
        self.lr, self.beta1, self.beta2 = lr, beta1, beta2
        self.eps, self.weight_decay = eps, weight_decay
        self.t = 0
        self.m: dict[Any, Any] = {}
        self.v: dict[Any, Any] = {}

    def step(self) -> None:
        self.t += 1
        for p in self.params:
            if p.grad is None:
                continue
            g: Tensor = p.grad.data + self.weight_decay * p.data
            self.m[p] = self.beta1 * self.m.get(p, 0) + (1 - self.beta1) * g
            self.v[p] = self.beta2 * self.v.get(p, 0) + (1 - self.beta2) * (g * g)
            m = self.m[p] / (1 - self.beta1**self.t)
            v = self.v[p] / (1 - self.beta2**self.t)
            p.data = p.data - self.lr * m / (v**0.5 + self.eps)
