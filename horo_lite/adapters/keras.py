"""Keras 3: layers, models, optimizers and their variables, on any backend."""

from __future__ import annotations

from typing import Any

import keras

from horo_lite.adapters import to_host
from horo_lite.adapters.object import Array, Named, VariablesAdapter

KINDS = (keras.Variable, keras.layers.Layer, keras.optimizers.Optimizer)


class KerasAdapter(VariablesAdapter):
    """Keras' values are in variables; gradients are not stored, but passed to `apply()`."""

    face = "horo_lite.keras"

    def matches(self, obj: object) -> bool:
        return isinstance(obj, KINDS)

    def parameters(self, owner: Any) -> Named:
        # Not `variables`, which also contains seeds: each rank must have noise of its own.
        if isinstance(owner, keras.layers.Layer):
            return [(variable.path, variable) for variable in owner.weights]
        if isinstance(owner, keras.optimizers.Optimizer):
            # With backward_passes_per_step, each rank adds up its own gradients.
            passes = getattr(owner, "_passes", 1)
            sums = set(map(id, owner._accumulated_gradients)) if passes > 1 and owner.built else ()
            return [pair for pair in self.variables(owner) if id(pair[1]) not in sums]
        return []

    def variables(self, optimizer: Any) -> Named:
        return [(variable.path, variable) for variable in optimizer.variables]

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        if not isinstance(owner, keras.layers.Layer):
            return None
        variables = owner.weights if buffers else owner.trainable_weights
        return [(variable.path, variable) for variable in variables]

    def value(self, parameter: Any) -> Array:
        return to_host(parameter.value)

    def set_value(self, parameter: Any, array: Array) -> None:
        parameter.assign(array)


ADAPTER = KerasAdapter()
