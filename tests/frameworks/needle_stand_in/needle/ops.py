"""The operators that a small network needs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .autograd import NDArray, Tensor, TensorOp


class EWiseAdd(TensorOp):
    def compute(self, a: Any, b: Any) -> Any:
        return a + b

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad, out_grad  # the same tensor twice: a.grad is b.grad


class AddScalar(TensorOp):
    def __init__(self, scalar: float) -> None:
        self.scalar = scalar

    def compute(self, a: Any) -> Any:
        return a + self.scalar

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad


class EWiseMul(TensorOp):
    def compute(self, a: Any, b: Any) -> Any:
        return a * b

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b = node.inputs
        return out_grad * b.detach(), out_grad * a.detach()


class MulScalar(AddScalar):
    def compute(self, a: Any) -> Any:
        return a * self.scalar

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad * self.scalar


class PowerScalar(AddScalar):
    def compute(self, a: Any) -> Any:
        return a**self.scalar

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return out_grad * (self.scalar * node.inputs[0].detach() ** (self.scalar - 1))


class MatMul(TensorOp):
    def compute(self, a: Any, b: Any) -> Any:
        return a @ b

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        a, b = (x.detach() for x in node.inputs)
        return out_grad @ transpose(b, (1, 0)), transpose(a, (1, 0)) @ out_grad


class Transpose(TensorOp):
    def __init__(self, axes: Any) -> None:
        self.axes = axes

    def compute(self, a: Any) -> Any:
        return a.permute(self.axes)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return transpose(out_grad, tuple(np.argsort(self.axes)))


class Reshape(TensorOp):
    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def compute(self, a: Any) -> Any:
        return a.compact().reshape(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        return reshape(out_grad, node.inputs[0].shape)


class BroadcastTo(Reshape):
    """From the same number of dimensions, some of which are 1."""

    def compute(self, a: Any) -> Any:
        return a.broadcast_to(self.shape)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        before = node.inputs[0].shape
        axes = tuple(i for i, n in enumerate(self.shape) if before[i] != n)
        return reshape(summation(out_grad, axes), before)


class Summation(TensorOp):
    def __init__(self, axes: Any) -> None:
        self.axes = axes

    def compute(self, a: Any) -> Any:
        return a.sum(self.axes)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        shape = node.inputs[0].shape
        axes = range(len(shape)) if self.axes is None else self.axes
        kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
        return broadcast_to(reshape(out_grad, kept), shape)  # strides of 0


class ReLU(TensorOp):
    def compute(self, a: Any) -> Any:
        return NDArray(np.maximum(a.view(), 0), a.device)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        mask = node.inputs[0].cached_data.view() > 0
        return out_grad * Tensor(mask, device=out_grad.device, requires_grad=False)


class LogSumExp(TensorOp):
    """Over the last of two dimensions."""

    def compute(self, a: Any) -> Any:
        largest = a.view().max(axis=1, keepdims=True)
        total = np.exp(a.view() - largest).sum(axis=1)
        return NDArray(np.log(total) + largest[:, 0], a.device)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        logits = node.inputs[0].cached_data.view()
        shares = np.exp(logits - node.cached_data.view()[:, None])
        weights = Tensor(shares, device=out_grad.device, requires_grad=False)
        return broadcast_to(reshape(out_grad, (len(logits), 1)), logits.shape) * weights


class Conv(TensorOp):
    """NHWC images with HWIO weights, `padding` zeros on every side."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def _windows(self, image: Any, k: int) -> Any:
        p = self.padding
        padded = np.pad(image, ((0, 0), (p, p), (p, p), (0, 0)))
        return np.lib.stride_tricks.sliding_window_view(padded, (k, k), (1, 2))  # NHWIkk

    def compute(self, image: Any, weight: Any) -> Any:
        windows = self._windows(image.view(), weight.shape[0])
        return NDArray(np.einsum("nhwikl,klio->nhwo", windows, weight.view()), image.device)

    def gradient(self, out_grad: Tensor, node: Tensor) -> Any:
        image, weight = (x.cached_data for x in node.inputs)
        k, grad = weight.shape[0], out_grad.cached_data.view()
        back = Conv(k - 1 - self.padding)._windows(grad, k)
        of_image = np.einsum("nhwokl,klio->nhwi", back, weight.view()[::-1, ::-1])
        of_weight = np.einsum("nhwikl,nhwo->iklo", self._windows(image.view(), k), grad)
        made = NDArray(of_weight, image.device).permute((1, 2, 0, 3))  # not compact
        return Tensor(of_image, device=out_grad.device), Tensor.make_const(made)


def transpose(a: Tensor, axes: Any) -> Tensor:
    return Transpose(axes)(a)


def reshape(a: Tensor, shape: Any) -> Tensor:
    return Reshape(shape)(a)


def broadcast_to(a: Tensor, shape: Any) -> Tensor:
    return BroadcastTo(shape)(a)


def summation(a: Tensor, axes: Any = None) -> Tensor:
    return Summation(axes)(a)


def relu(a: Tensor) -> Tensor:
    return ReLU()(a)


def logsumexp(a: Tensor) -> Tensor:
    return LogSumExp()(a)


def conv(a: Tensor, weight: Tensor, padding: int) -> Tensor:
    return Conv(padding)(a, weight)
