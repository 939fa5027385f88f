"""Optimizers over plain NumPy arrays: values in `optimizer.params`, gradients in `.grads`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from horo_lite.adapters.object import Adapter, Array, Named


class NumpyAdapter(Adapter):
    """Two lists of arrays, or two dicts with the same keys: `grads[k]` belongs to `params[k]`."""

    array: type = np.ndarray
    not_state = ("params", "grads")

    def matches(self, obj: object) -> bool:
        params, grads = getattr(obj, "params", None), getattr(obj, "grads", None)
        if isinstance(params, dict) and isinstance(grads, dict):
            params, grads = list(params.values()), list(grads.values())
        elif not (isinstance(params, list) and isinstance(grads, list)) or (
            len(grads or params) != len(params)
        ):
            return False
        # NumPy makes numbers of arrays without dimensions.
        kinds = (self.array, np.number, float, type(None))
        return any(isinstance(item, self.array) for item in params) and all(
            isinstance(item, kinds) for item in (*params, *grads)
        )

    def parameters(self, owner: Any) -> Named:
        _check_alike(owner.params, owner.grads)
        if isinstance(owner.params, Mapping):
            return [(str(key), slot_of(owner, key)) for key in owner.params]
        return [(f"params[{i}]", slot_of(owner, i)) for i in range(len(owner.params))]


class Slot:
    """An entry of the two containers, looked up on each access, since both may be refilled."""

    def __init__(self, owner: Any, key: Any) -> None:
        self.owner, self.key = owner, key

    @property
    def data(self) -> Array:
        return self.owner.params[self.key]

    @data.setter
    def data(self, array: Array) -> None:
        self._put("params", array)

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
        self._put("grads", array)

    def _put(self, name: str, array: Array) -> None:
        getattr(self.owner, name)[self.key] = array
        if getattr(self.owner, name)[self.key] is not array:
            raise TypeError(
                f"{type(self.owner).__name__}.{name} is another container each time it is read, so "
                f"the array that is to replace {name}[{self.key!r}], which is missing or cannot be "
                "written, would be lost: keep one container, or give every array its own memory"
            )


_slots: WeakValueDictionary[tuple[int, Any], Slot] = WeakValueDictionary()
"""By the owner's id, which is its own as long as a slot keeps it alive."""


def slot_of(owner: Any, key: Any) -> Slot:
    """Return the same object each time while it is in use: a plan is made for the objects."""
    slot = _slots.get((id(owner), key))
    if slot is None:
        slot = _slots[id(owner), key] = Slot(owner, key)
    return slot


def _check_alike(params: Any, grads: Any) -> None:
    """Raise ValueError for gradients that belong to no parameter, and would not be averaged."""
    if not isinstance(grads, Mapping):
        if len(grads) not in (0, len(params)):
            raise ValueError(f"there are {len(grads)} grads of {len(params)} params")
    elif params.keys() - grads.keys() and (others := grads.keys() - params.keys()):
        raise ValueError(
            f"there is no params[{min(others, key=str)!r}] for the gradient of that name, which "
            "would not be averaged: give gradients the keys of their parameters"
        )


ADAPTER = NumpyAdapter()
