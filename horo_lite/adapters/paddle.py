"""PaddlePaddle: gradients are exchanged in their own memory, so far only in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
from paddle.nn import Layer
from paddle.optimizer import Optimizer

from horo_lite.adapters.object import Adapter, Array, Named


class PaddleAdapter(Adapter):
    """paddle.optimizer optimizers, paddle.nn layers and tensors."""

    steps = ("step", "minimize")
    array_types = (paddle.Tensor,)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (paddle.Tensor, Optimizer, Layer))

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner, paddle.Tensor):
            return []
        if isinstance(owner, Layer):  # buffers too (running means)
            return list(owner.state_dict().items())
        groups = owner._param_groups
        found = [
            p for group in groups for p in (group["params"] if type(group) is dict else [group])
        ]
        # Paddle uses the same names in state_dict().
        return [(p.name, p) for p in found]

    def gradient(self, parameter: Any) -> Array | None:
        return None if parameter.grad is None else _memory(parameter.grad)

    def set_gradient(self, parameter: Any, array: Array) -> None:
        parameter.grad = self.from_numpy(array, parameter)

    def value(self, parameter: Any) -> Array:
        return _memory(parameter)

    def set_value(self, parameter: Any, array: Array) -> None:
        parameter.set_value(self.from_numpy(array, parameter))

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return paddle.to_tensor(array.view(np.int16)).view("bfloat16")
        return paddle.to_tensor(array)


def _memory(tensor: Any) -> Array:
    if tensor.is_selected_rows():
        raise TypeError(
            "it is sparse, and only dense gradients are exchanged: make the layer with sparse=False"
        )
    if not tensor.place.is_cpu_place():
        raise TypeError(
            f"it is on {tensor.place}, but so far Paddle's tensors are exchanged in host memory "
            'only: call paddle.set_device("cpu") before creating the model'
        )
    tensor = tensor.detach()  # DLPack refuses tensors that require gradients; same memory
    if tensor.dtype == paddle.bfloat16:
        import ml_dtypes

        return np.from_dlpack(tensor.view("int16")).view(ml_dtypes.bfloat16)
    return np.from_dlpack(tensor)


ADAPTER = PaddleAdapter()
