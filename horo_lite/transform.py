"""Gradients in, averages out: for optimizers that are given gradients and own none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from horo_lite.adapters import adapter_of, from_numpy, to_host
from horo_lite.adapters.object import Adapter, Array
from horo_lite.collectives import Average, Group, Op, Sum
from horo_lite.compression import Compression, Compressor
from horo_lite.reducer import Reducer


class Transform:
    """A function from this rank's gradients to the averages (or sums) over the ranks.

    Every rank calls it equally often, with gradients of the same names, shapes and dtypes, or
    MismatchError on all names the first that differs. None counts as zeros where other ranks have a
    gradient, and receives the result. What can be written is changed in place and returned, as
    torch's are; of others the result has new ones. `weight`, on every rank or on none, is this
    rank's number of samples.
    """

    def __init__(
        self,
        op: Op = Average,
        compression: Compressor = Compression.none,
        group: Group | None = None,
    ) -> None:
        if op not in (Average, Sum):
            raise ValueError(f"gradients take op=Average or op=Sum, not {op}")
        self.op, self.compression = op, compression
        self._group = group
        self._adapter = _SlotAdapter()
        self._slots: list[_Slot] = []
        self._reducer: Reducer | None = None

    def __call__(
        self, names: Sequence[str], gradients: Sequence[Any], weight: float | None = None
    ) -> list[Any]:
        if _are_traced(gradients):
            return self._inside_jit(names, gradients, weight)
        reducer = self._bound(names)
        for slot, gradient in zip(self._slots, gradients, strict=True):
            slot.gradient = gradient
        self._adapter.like = next((g for g in gradients if g is not None), None)
        try:
            reducer.weight = weight
            reducer.finish()
            return [slot.gradient for slot in self._slots]
        finally:
            self._adapter.like = None
            for slot in self._slots:
                slot.gradient = None

    @property
    def group(self) -> Group:
        if self._group is not None:
            return self._group
        from horo_lite.world import world

        return world().group

    def _bound(self, names: Sequence[str]) -> Reducer:
        if [slot.name for slot in self._slots] != list(names):
            self._slots = [_Slot(name) for name in names]
        named = [(slot.name, slot) for slot in self._slots]
        if self._reducer is None or self._reducer.group is not self.group:
            self._reducer = Reducer(
                self.group,
                self._adapter,
                named,
                op=self.op,
                compression=self.compression,
                streams=False,
            )
        else:
            self._reducer.bind(named)
        return self._reducer

    def _inside_jit(
        self, names: Sequence[str], gradients: Sequence[Any], weight: float | None
    ) -> list[Any]:
        """The same as a part of what JAX compiles; None, on all ranks, stays None there."""
        here = [i for i, gradient in enumerate(gradients) if gradient is not None]
        averages = import_module("horo_lite.jax").average_gradients(
            {names[i]: gradients[i] for i in here},
            op=self.op,
            compression=self.compression,
            weight=weight,
            group=self._group,
        )
        return [None if g is None else averages[n] for n, g in zip(names, gradients, strict=True)]


class _Slot:
    """A gradient's place in the plan, the same from call to call."""

    gradient: Any = None

    def __init__(self, name: str) -> None:
        self.name = name


class _SlotAdapter(Adapter):
    like: Any = None
    """Of the kind that a gradient gets which only other ranks have."""

    def gradient(self, parameter: _Slot) -> Array | None:
        return None if parameter.gradient is None else to_host(parameter.gradient)

    def set_gradient(self, parameter: _Slot, array: Array) -> None:
        old = self.like if parameter.gradient is None else parameter.gradient
        parameter.gradient = array if old is None else from_numpy(array, old)

    def value(self, parameter: _Slot) -> Array:
        return self.like

    def zeros_like(self, x: Array) -> Array:
        return adapter_of(x).zeros_like(x)


def _are_traced(gradients: Sequence[Any]) -> bool:
    """Whether JAX is compiling, so that there are no values yet."""
    core = sys.modules.get("jax.core")
    return core is not None and any(isinstance(g, core.Tracer) for g in gradients)
