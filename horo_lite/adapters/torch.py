"""PyTorch: gradients are exchanged in their own memory, whatever layout they have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from horo_lite.adapters import needs
from horo_lite.adapters.object import Adapter, Array, Held, Named, RunningStatistics

needs(torch, "2.4")

# The attribute of a gradient that holds its version after backward() last added to it.
_MARK = "_horo_lite_version"
# That of a part of a larger memory whose version counter is its own.
_OWN = "_horo_lite_own_version"

_NUMPY_LACKS = {
    getattr(torch, name)
    for name in dir(torch)
    if name.startswith(("bfloat16", "complex32", "float8_"))
}


def parameters_of(param_groups: Sequence[dict[str, Any]]) -> Named:
    """Return an optimizer's parameters, by the names that it knows, or by their places."""
    return [
        (name, parameter)
        for g, group in enumerate(param_groups)
        for name, parameter in zip(
            group.get("param_names")
            or [f"param_groups[{g}][{i}]" for i in range(len(group["params"]))],
            group["params"],
            strict=True,
        )
    ]


class TorchAdapter(Adapter):
    """torch.optim optimizers, torch.nn modules and tensors."""

    face = "horo_lite.torch"
    array_types = (torch.Tensor,)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (torch.Tensor, torch.optim.Optimizer, torch.nn.Module))

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner, torch.nn.Module):
            # Buffers too (running means); for get_extra_state(), see objects().
            state = owner.state_dict(keep_vars=True)
            return [(name, t) for name, t in state.items() if isinstance(t, torch.Tensor)]
        return parameters_of(owner.param_groups)

    def objects(self, owner: Any) -> list[tuple[str, Held]]:
        modules = owner.named_modules() if isinstance(owner, torch.nn.Module) else ()
        return [
            (f"{name}._extra_state".lstrip("."), Held(each.get_extra_state, each.set_extra_state))
            for name, each in modules
            if type(each).get_extra_state is not torch.nn.Module.get_extra_state
        ]

    def mark_gradients(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            if getattr(parameter, "requires_grad", False) and parameter.is_leaf:
                parameter.register_post_accumulate_grad_hook(_mark)

    def changed_by_hand(self, parameter: Any) -> bool:
        gradient = parameter.grad
        version = getattr(gradient, _MARK, None)
        if version is None or version == gradient._version:
            return False
        # A module's zero_grad() may have zeroed it, and no backward pass has added to it since.
        return gradient.layout is not torch.strided or bool(gradient.any())

    def forget_marks(self, parameters: Sequence[Any]) -> None:
        for parameter in parameters:
            if hasattr(parameter.grad, _MARK):
                delattr(parameter.grad, _MARK)

    def gradient(self, parameter: Any) -> Array | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"it is sparse ({gradient.layout}), and only dense gradients are exchanged: make "
                "the layer with sparse=False, or the gradient with .to_dense() before step()"
            )
        gradient = resolved(parameter)
        return gradient.detach() if gradient.requires_grad else gradient

    def set_gradient(self, parameter: Any, array: Array) -> None:
        parameter.grad = self.from_numpy(array, parameter)

    def value(self, parameter: Any) -> Array:
        return _memory(parameter)

    def set_value(self, parameter: Any, array: Array) -> None:
        with torch.no_grad():
            parameter.copy_(self.from_numpy(array, parameter))

    def changed(self, x: Any) -> None:
        if x.is_inference():
            return
        if torch.is_grad_enabled() and x.requires_grad and not (x.is_leaf or _is_of_leaf(x)):
            _Changed.apply(x)
        else:
            torch.autograd.graph.increment_version(x)

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Array:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu")

    def stream(self, x: Any) -> int | None:
        return int(torch.cuda.current_stream(x.device).cuda_stream)

    def on_stream(self, x: Any, stream: int) -> AbstractContextManager[Any]:
        theirs: AbstractContextManager[Any] = torch.cuda.stream(
            torch.cuda.ExternalStream(stream, device=x.device)
        )
        return theirs

    def copy(self, x: Any) -> Array:
        return x.detach().clone(memory_format=torch.contiguous_format)

    def empty(self, x: Any, shape: Sequence[int]) -> Array:
        return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)

    def zeros_like(self, x: Any) -> Array:
        return torch.zeros_like(x.detach(), memory_format=torch.contiguous_format)

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)  # torch.manual_seed() takes 1 ms

    def computed(self, a: Any, b: Any) -> list[np.ndarray[Any, Any]]:
        x, y = torch.from_numpy(a), torch.from_numpy(b)
        return [each.numpy() for each in (x @ y, torch.tanh(x).sum(0), torch.softmax(y, 1))]

    def running_statistics(self, model: Any) -> RunningStatistics:
        return _RunningStatistics(model)

    def from_numpy(self, array: Any, like: Any) -> Any:
        if isinstance(array, torch.Tensor):
            return array
        # A dtype's name is made by a page of Python code; NumPy's own dtypes are built in.
        if (
            array.dtype.isbuiltin == 2 and array.dtype.name == "bfloat16"
        ):  # unknown to torch.from_numpy, as it is to NumPy
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(like.device)
        return torch.from_numpy(array).to(like.device)


_in_loop: WeakSet[Any] = WeakSet()
"""Layers whose statistics a loop over micro-batches computes now."""


class _RunningStatistics:
    """Those of BatchNorm layers; with a momentum of 1 they are a micro-batch's own.

    Between micro-batches they are those before the step, which a frozen layer computes with.
    """

    def __init__(self, model: Any) -> None:
        self._layers: dict[str, Any] = {
            name: layer
            for name, layer in model.named_modules()
            if getattr(layer, "running_mean", None) is not None
        }
        for layer in self._layers.values():
            name = type(layer).__name__
            is_known = isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
            if not is_known or "SyncBatchNorm" in name:
                raise ValueError(
                    f"the model has a layer {name}, whose running statistics MicroBatches cannot "
                    "compute in the order of the micro-batches: it knows BatchNorm only (and a "
                    "SyncBatchNorm would wait for ranks that have fewer micro-batches)"
                )
        self._before: list[tuple[list[Any], Any]] = []

    def begin(self) -> None:
        layers = self._layers.values()
        if not _in_loop.isdisjoint(layers):
            raise RuntimeError(
                "another loop over micro-batches, which has not ended, computes the running "
                "statistics of this model: pass model= to one MicroBatches only"
            )
        self._before = [([x.clone() for x in _buffers(n)], n.momentum) for n in layers]
        _in_loop.update(layers)
        for layer in layers:
            layer.momentum = 1.0

    def take(self, batch: object) -> np.ndarray[Any, Any]:
        found = [np.zeros(0)]
        for (name, layer), (before, _) in zip(self._layers.items(), self._before, strict=True):
            now = _buffers(layer)
            n_runs = int(now[0] - before[0])
            if n_runs > 1:
                raise ValueError(
                    f"{batch!r}: the {type(layer).__name__} {name!r} has run {n_runs} times, and "
                    "only the last run's statistics are left: use a layer in one place, without "
                    "activation checkpointing, or pass no model= and keep its statistics yourself"
                )
            row = np.concatenate([[n_runs], *(x.double().numpy() for x in now[1:])])
            found.append(row if n_runs else np.zeros_like(row))
            _restore(layer, before)
        return np.concatenate(found)

    def end(self) -> None:
        for layer, (before, momentum) in zip(self._layers.values(), self._before, strict=True):
            layer.momentum = momentum
            _restore(layer, before)
        _in_loop.difference_update(self._layers.values())

    def fold(self, everyones: np.ndarray[Any, Any]) -> None:
        rows = torch.from_numpy(everyones)
        for layer in self._layers.values():
            count, mean, var = _buffers(layer)
            counts, means, variances, rows = rows.split(
                [1, len(mean), len(mean), rows.shape[1] - 1 - 2 * len(mean)], dim=1
            )
            for ran, new_mean, new_var in zip(counts, means, variances, strict=True):
                if ran:  # otherwise the layer was frozen, or not used
                    count += 1
                    momentum = 1 / int(count) if layer.momentum is None else layer.momentum
                    mean.lerp_(new_mean.to(mean.dtype), momentum)
                    var.lerp_(new_var.to(var.dtype), momentum)


def _buffers(layer: Any) -> tuple[Any, Any, Any]:
    return layer.num_batches_tracked, layer.running_mean, layer.running_var


def _restore(layer: Any, before: Sequence[Any]) -> None:
    for buffer, old in zip(_buffers(layer), before, strict=True):
        buffer.copy_(old)


class _Changed(torch.autograd.Function):
    """Make backward() raise at a tensor that an operation between ranks overwrote in place."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "backward() has reached a tensor that an operation between ranks changed in place "
            "(allreduce_, broadcast_, recv), which has no gradient: use horo_lite.torch's "
            "allreduce or broadcast, without the underscore, which do have one; or pass "
            "x.detach().clone() to the operation, if only its result is of interest"
        )


def _is_of_leaf(x: Any) -> bool:
    """Return whether `x` is a view of a leaf, which remains one whatever its values are."""
    return x._is_view() and x._base.is_leaf


def resolved(parameter: Any) -> Any:
    """Return the gradient; replace it if its memory contains its conjugate, or its negative."""
    gradient = parameter.grad
    if gradient.is_conj() or gradient.is_neg():
        gradient = parameter.grad = gradient.resolve_conj().resolve_neg()
    return gradient


def with_own_version(parameter: Any) -> Any:
    """Return the gradient, whose version will tell whether it has been changed.

    Gradients may be parts of one tensor (torch.cat() of parameters returns such ones, and users
    have flat buffers), with one version counter for all: adding to one would count as a change of
    the others. Then this replaces the gradient by a tensor with the same memory.
    """
    gradient = resolved(parameter)
    if (
        gradient.layout is torch.strided
        and not gradient.requires_grad
        and gradient.untyped_storage().nbytes() > gradient.nbytes
        and not hasattr(gradient, _OWN)
    ):
        torch.autograd.graph.increment_version(gradient)  # on behalf of what is done to it later
        parameter.grad = gradient = gradient.data
        setattr(gradient, _OWN, True)
    return gradient


def _mark(parameter: Any) -> None:
    gradient = with_own_version(parameter)
    setattr(gradient, _MARK, gradient._version)


def _memory(tensor: Any) -> Array:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__name__} is not an array: pass its tensors, in a list")
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no memory yet: see Module.to_empty()")
    if tensor.device.type != "cpu":
        return tensor
    if hasattr(tensor, "__tensor_flatten__"):
        return tensor  # a wrapper around others (DTensor); the core's error says what to do
    # NumPy's view of the same memory: a DLPack capsule takes torch four times as long.
    if tensor.dtype not in _NUMPY_LACKS:
        return tensor.numpy()
    if tensor.dtype is not torch.bfloat16:
        return tensor
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return tensor  # the core can read it, but NumPy could not copy it if it is strided
    return tensor.view(torch.int16).numpy().view(bfloat16)


ADAPTER = TorchAdapter()
