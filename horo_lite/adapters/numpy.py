"""Optimizers over plain NumPy arrays: values in `optimizer.params`, gradients in `.grads`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from horo_lite.adapters.object import Adapter, Array, Named


class NumpyAdapter(Adapter):
    """Two lists of arrays, or two dicts with the same keys: `grads[k]` belongs to `params[k]`."""

    array: type = np.ndarray

    def matches(self, obj: object) -> bool:
        params, grads = getattr(obj, "params", None), getattr(obj, "grads", None)
        if isinstance(params, dict) and isinstance(grads, dict):
            return (
                bool(params)
                and self._are_arrays(params.values())
                and self._are_arrays(grads.values())
            )
        if isinstance(params, list) and isinstance(grads, list):
            aligned = len(grads) in (0, len(params))
            return bool(params) and aligned and self._are_arrays(params) and self._are_arrays(grads)
        return False

    def _are_arrays(self, items: Any) -> bool:
        return all(item is None or isinstance(item, self.array) for item in items)

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner.params, Mapping):
            return [(str(key), Slot(owner, key)) for key in owner.params]
        return [(f"params[{i}]", Slot(owner, i)) for i in range(len(owner.params))]


class Slot:
    """An entry of the two containers, looked up on each access, since both may be refilled."""

    def __init__(self, owner: Any, key: Any) -> None:
        self.owner, self.key = owner, key

    @property
    def data(self) -> Array:
        return self.owner.params[self.key]

    @data.setter
    def data(self, array: Array) -> None:
        self.owner.params[self.key] = array

    @property
    def grad(self) -> Array | None:
        grads = self.owner.grads
        if isinstance(grads, Mapping):
            return grads.get(self.key)
        return grads[self.key] if grads else None

    @grad.setter
    def grad(self, array: Array) -> None:
        if isinstance(self.owner.grads, list) and not self.owner.grads:
            self.owner.grads.extend([None] * len(self.owner.params))
        self.owner.grads[self.key] = array


ADAPTER = NumpyAdapter()
