"""TensorFlow 2: tensors are immutable, so results are returned as new ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite.adapters import needs
from horo_lite.adapters.object import Adapter, Array, Named, named_variables

needs(tf, "2.15.1")


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return an eager tensor as a read-only array: a view if the tensor is in host memory."""
    # For scalars of some dtypes (bfloat16), __array__ returns NumPy scalars, which NumPy refuses.
    array = np.asarray(tensor if tensor.shape.rank else tensor.numpy())
    array.flags.writeable = False  # a scalar is a copy: writes to it would be lost
    return array


class TensorflowAdapter(Adapter):
    """Tensors, variables, and modules that hold variables."""

    mutable = False
    array_types = (tf.Tensor,)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (tf.Tensor, tf.Variable, tf.Module))

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner, tf.Module):
            return named_variables(owner.variables)
        return []

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        if not isinstance(owner, tf.Module):
            return None
        variables = owner.variables if buffers else owner.trainable_variables
        return named_variables(variables)

    def value(self, parameter: Any) -> Array:
        tensor = parameter.value() if isinstance(parameter, tf.Variable) else parameter
        if tf.is_symbolic_tensor(tensor):
            raise TypeError(
                f"{tensor.name} is a tensor of a graph that is being traced and has no value yet: "
                "inside tf.function, use allreduce, allgather, broadcast, alltoall, reducescatter "
                "or DistributedGradientTape of horo_lite.tensorflow"
            )
        return array_of(tensor)

    def set_value(self, parameter: Any, array: Array) -> None:
        parameter.assign(array)

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        return tf.convert_to_tensor(array)


ADAPTER = TensorflowAdapter()
