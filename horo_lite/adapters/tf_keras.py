"""tf_keras (Keras 2): layers, models, and optimizers of both families."""

from __future__ import annotations

from typing import Any

import tf_keras

from horo_lite.adapters.object import Named, Passes, VariablesAdapter, named_variables
from horo_lite.adapters.tensorflow import TensorflowAdapter

OPTIMIZERS = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)


class TfKerasAdapter(VariablesAdapter, TensorflowAdapter):
    """Values are in tf.Variables; gradients are passed to `apply_gradients()`."""

    face = "horo_lite.keras"

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (tf_keras.layers.Layer, *OPTIMIZERS))

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner, tf_keras.layers.Layer):
            return named_variables(owner.weights)
        if isinstance(owner, OPTIMIZERS):
            found = owner.variables
            found = found() if callable(found) else found  # a method in the legacy family
            return named_variables(found)
        return []

    def passes(self, owner: Any) -> Passes | None:
        n_passes = getattr(owner, "_n_passes", None)
        if n_passes is None:
            return None
        # The optimizer's variables do not have their number.
        return Passes(int(n_passes), owner._passes, [n_passes, *owner._sums.values()])

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        if not isinstance(owner, tf_keras.layers.Layer):
            return None
        variables = owner.weights if buffers else owner.trainable_weights
        return named_variables(variables)


ADAPTER = TfKerasAdapter()
