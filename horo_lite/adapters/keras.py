"""Keras 3: layers, models, optimizers and their variables, on any backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from horo_lite.adapters import changed, needs, to_host
from horo_lite.adapters.object import (
    Array,
    Held,
    Named,
    Passes,
    VariablesAdapter,
    named_variables,
)

needs(keras, "3.10")
KINDS = (keras.Variable, keras.layers.Layer, keras.optimizers.Optimizer)


class KerasAdapter(VariablesAdapter):
    """Keras' values are in variables; gradients are not stored, but passed to `apply()`."""

    face = "horo_lite.keras"

    def matches(self, obj: object) -> bool:
        return isinstance(obj, KINDS)

    def parameters(self, owner: Any) -> Named:
        # Not `variables`, which also contains seeds: each rank must have noise of its own.
        if isinstance(owner, keras.layers.Layer):
            return named_variables(owner.weights)
        if isinstance(owner, keras.optimizers.Optimizer):
            if _is_divided(owner):
                common: Named = owner.common_variables
                return common
            sums = self._own_sums(owner)
            return [pair for pair in self.variables(owner) if id(pair[1]) not in sums]
        return []

    def passes(self, owner: Any) -> Passes | None:
        # With backward_passes_per_step, each rank adds up its own until the last pass.
        if getattr(owner, "_passes", 1) == 1 or not owner.built:
            return None
        return Passes(int(owner._iterations), owner._passes, list(owner._accumulated_gradients))

    def _own_sums(self, optimizer: Any) -> set[int]:
        passes = self.passes(optimizer)
        return set(map(id, passes.sums if passes else ()))

    def objects(self, owner: Any) -> list[tuple[str, Held]]:
        if not _is_divided(owner):
            return []
        return [("the state of all ranks", Held(owner.state_to_send, owner.receive_state))]

    def variables(self, optimizer: Any) -> Named:
        # Their names contain the whole paths of the model's: see named_variables.
        return [(f"variables[{i}]", variable) for i, variable in enumerate(optimizer.variables)]

    def state(self, optimizer: Any) -> Any | None:
        if _is_divided(optimizer):
            variables, values = optimizer.layout(), optimizer.whole_state()
        else:
            variables, values = optimizer.variables, super().state(optimizer)
        sums = self._own_sums(optimizer)  # other ranks begin with zeros
        return [
            np.zeros_like(value) if id(variable) in sums else value
            for variable, value in zip(variables, values, strict=True)
        ]

    def set_state(self, optimizer: Any, state: Any) -> None:
        if _is_divided(optimizer):
            optimizer.set_whole_state(state)
        else:
            super().set_state(optimizer, state)

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        if not isinstance(owner, keras.layers.Layer):
            return None
        variables = owner.weights if buffers else owner.trainable_weights
        return named_variables(variables)

    def value(self, parameter: Any) -> Array:
        if parameter._value is None and keras.backend.backend() == "jax":
            raise RuntimeError(
                f"{parameter.path!r} has no value: on JAX, Keras keeps the variables elsewhere "
                "while fit() runs. In a callback, call self.model.jax_state_sync() first"
            )
        return to_host(parameter.value)

    def set_value(self, parameter: Any, array: Array) -> None:
        parameter.assign(array)

    def changed(self, x: Any) -> None:
        changed([x.value])


def _is_divided(optimizer: Any) -> bool:
    """Return whether it is wrapped with shard_state=True."""
    return hasattr(optimizer, "common_variables")


ADAPTER = KerasAdapter()
