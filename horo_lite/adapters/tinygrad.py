"""tinygrad: lazy gradients are computed all at once, and exchanged in their own memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tinygrad
from tinygrad import Tensor, dtypes
from tinygrad.engine.realize import capturing
from tinygrad.nn.optim import Optimizer
from tinygrad.nn.state import get_state_dict

from horo_lite.adapters import needs
from horo_lite.adapters.object import Adapter, Array, Named

needs(tinygrad, "0.13")


class TinygradAdapter(Adapter):
    """nn.optim optimizers, tensors, and models: any object that holds tensors, however deep."""

    steps = ("step", "schedule_step")
    array_types = (Tensor,)

    def matches(self, obj: object) -> bool:
        if isinstance(obj, (Tensor, Optimizer)):
            return True
        # Models have no common base class. A home-made optimizer has tensors, too, but also step().
        return hasattr(obj, "__dict__") and not hasattr(obj, "step") and bool(self.parameters(obj))

    def combines(self, optimizer: Any) -> str:
        # Those of SGD and Adam are fused LARS and LAMB without a ratio.
        for part in getattr(optimizer, "optimizers", [optimizer]):
            has_ratio = getattr(part, "tcoef", 0) != 0 or not getattr(part, "adam", True)
            if has_ratio and getattr(part, "fused", False):
                return "with fused=True, its trust ratio is that of all parameters together"
        return ""

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner, Tensor):
            return []
        if isinstance(owner, Optimizer):
            return [(f"params[{i}]", tensor) for i, tensor in enumerate(owner.params)]
        try:
            return list(get_state_dict(owner).items())
        except RecursionError:  # it contains itself, so it is not a model
            return []

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        if isinstance(owner, (Tensor, Optimizer)) or not self.matches(owner):
            return None
        return [
            (name, tensor) for name, tensor in self.parameters(owner) if buffers or tensor.is_param
        ]

    def compute(self, parameters: Sequence[Any]) -> None:
        lazy = [p for p in parameters if isinstance(p.grad, Tensor) and not _is_realized(p.grad)]
        if not lazy:
            return
        _refuse_capture()
        for parameter in lazy:
            # In memory of their own: a computed gradient may otherwise be a view of something else.
            parameter.grad = parameter.grad.clone()
        Tensor.realize(*[parameter.grad for parameter in lazy])

    def gradient(self, parameter: Any) -> Array | None:
        self.compute([parameter])
        return None if parameter.grad is None else _memory(parameter.grad)

    def seed(self, number: int) -> None:
        Tensor.manual_seed(number)

    def set_gradient(self, parameter: Any, array: Array) -> None:
        parameter.grad = self.from_numpy(array, parameter)

    def value(self, parameter: Any) -> Array:
        if not _is_realized(parameter) and 0 not in parameter.shape:
            _refuse_capture()
            parameter.replace(parameter.detach().clone().realize())
        return _memory(parameter)

    def set_value(self, parameter: Any, array: Array) -> None:
        # Assigned in place, so that users of its memory, such as a TinyJit, see the new value.
        parameter.assign(self.from_numpy(array, parameter)).realize()

    def state(self, optimizer: Any) -> dict[str, Array]:
        return {name: np.array(self.value(t)) for name, t in _state_of(optimizer).items()}

    def set_state(self, optimizer: Any, state: dict[str, Array]) -> None:
        mine = _state_of(optimizer)
        if mine.keys() != state.keys():
            raise ValueError(
                f"this optimizer keeps {', '.join(mine)}, and the other {', '.join(state)}: create "
                "them with the same options on every rank"
            )
        for name, tensor in mine.items():
            memory = self.value(tensor)
            if memory.flags.writeable:
                memory[...] = state[name]
            else:
                self.set_value(tensor, state[name])

    def from_numpy(self, array: Any, like: Any) -> Any:
        if array.dtype.name == "bfloat16":
            bits = Tensor(array.view(np.uint16), device=like.device)
            return bits.bitcast(dtypes.bfloat16).realize()
        return Tensor(array, device=like.device).realize()


def _state_of(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's tensors by name, without the parameters and their layers' buffers."""
    others = {id(tensor) for tensor in [*optimizer.params, *optimizer.buffers]}
    return {name: t for name, t in get_state_dict(optimizer).items() if id(t) not in others}


def _is_realized(tensor: Any) -> bool:
    return tensor.uop.has_buffer_identity() and tensor.uop.base.realized is not None


def _memory(tensor: Any) -> Array:
    """Return the tensor's own memory if the host can write it, otherwise a read-only copy."""
    _refuse_capture()
    if isinstance(tensor.device, tuple):
        raise TypeError(
            f"it is spread over {', '.join(tensor.device)}: give each rank one device, and do not "
            "use shard()"
        )
    name = "bfloat16" if tensor.dtype == dtypes.bfloat16 else tensor.dtype.fmt
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401 (gives NumPy the name)
    dtype = np.dtype(name)
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    return np.asarray(_Memory(tensor.uop.buffer, dtype, tensor.shape)).view(dtype)


class _Memory:
    """Keeps a buffer alive as long as an array over it exists."""

    def __init__(self, buffer: Any, dtype: np.dtype[Any], shape: Sequence[int]) -> None:
        self._buffer = buffer
        is_shared = buffer.options is None and hasattr(buffer.allocator, "_as_buffer")
        memory = buffer.as_memoryview(allow_zero_copy=is_shared)
        self._array = np.frombuffer(memory, dtype).reshape(shape)
        self._array.flags.writeable = is_shared
        self.__array_interface__ = self._array.__array_interface__


def _refuse_capture() -> None:
    if capturing:
        raise RuntimeError(
            "this exchange is inside a TinyJit, which would replay the step without it: jit the "
            "function that computes gradients and the one that applies them separately, and call "
            "synchronize() in between (see examples/digits_tinygrad.py)"
        )


ADAPTER = TinygradAdapter()
