"""Gradients in, averages out: for optimizers that receive gradients and own none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from horo_lite.adapters import adapter_of, from_numpy, to_host
from horo_lite.adapters.object import Adapter, Array
from horo_lite.collectives.arrays import copy_of, gpu_of
from horo_lite.collectives.reductions import Average, Sum
from horo_lite.state.drift import DriftCheck
from horo_lite.training.options import Options
from horo_lite.training.plan import Layout, Rows
from horo_lite.training.reducer import Reducer


class Transform:
    """A function from this rank's gradients to the averages (or sums) over the ranks.

    Every rank calls it the same number of times, with gradients of the same names, shapes and
    dtypes; otherwise all raise MismatchError, which names the first difference. None counts as
    zeros if other ranks have a gradient, and receives the result. Writable gradients, such as
    torch's, are changed in place and returned; for others, the result has new arrays. With
    `copies`, nothing is changed, and the result has the core's own arrays, to be returned through
    `like`. `weight`, on every rank or on none, is this rank's number of samples. A rank without any
    gradient receives arrays like `like`, or NumPy's. `compared`, if given, returns the named
    parameters to which the averages will be added. They are compared from time to time, not before
    the second step, since a broadcast may follow the first. `title` and `feeds_back` are those of
    the Reducer.
    """

    def __init__(
        self,
        options: Options,
        *,
        copies: bool = False,
        title: str | None = None,
        feeds_back: bool = True,
    ) -> None:
        self.options = options
        self._feeds_back = feeds_back
        self._owner = object()  # without what is in this one, since compiled functions keep it
        self._title = title
        self._adapter = _SlotAdapter(copies)
        self._slots: list[_Slot] = []
        self._reducer: Reducer | None = None
        self._rows: dict[int, tuple[Layout, Any]] = {}  # this rank's, for `Reducer.finish`
        self._all_rows: Rows = ()  # of the last exchange's plan
        self._drift = DriftCheck(options.check_every, options.on_drift)
        self._n_calls = 0  # that have ended

    def __call__(
        self,
        names: Sequence[str],
        gradients: Sequence[Any],
        weight: float | None = None,
        like: Any = None,
        compared: Callable[[], Sequence[tuple[str, Any]]] | None = None,
    ) -> list[Any]:
        if is_traced(gradients):
            return self._inside_jit(names, gradients, weight, compared)
        reducer = self._bound(names)
        reducer.weight = weight
        reducer.known_parameters = compared
        self._adapter.like = next((g for g in gradients if g is not None), like)
        try:
            for slot, gradient in zip(self._slots, gradients, strict=True):
                slot.grad = gradient
            common = reducer.finish(rows=self._rows)
            self._all_rows = common.plan.rows
            if common.some_begin:
                self._drift.reset_counts()
                self._drift.n_steps = self._n_calls
            elif compared is not None:
                self._drift.stepped(compared, reducer.group)
            self._n_calls += 1
            return [slot.grad for slot in self._slots]
        finally:
            self._adapter.like = reducer.known_parameters = None
            for slot in self._slots:
                slot.grad = None

    def _bound(self, names: Sequence[str]) -> Reducer:
        if [slot.name for slot in self._slots] != list(names):
            self._slots = [_Slot(name) for name in names]
        named = [(slot.name, slot) for slot in self._slots]
        ranks = self.options.ranks
        if self._reducer is None or self._reducer.group is not ranks:
            self._drift.reset_counts()
            ranks.counting.add(self._drift)
            self._reducer = self.options.reducer(
                self._adapter,
                named,
                streams=False,
                title=self._title,
                feeds_back=self._feeds_back,
            )
        else:
            self._reducer.bind(named)
        return self._reducer

    def _inside_jit(
        self,
        names: Sequence[str],
        gradients: Sequence[Any],
        weight: float | None,
        compared: Callable[[], Sequence[tuple[str, Any]]] | None,
    ) -> list[Any]:
        """Do the same in a function that JAX compiles; None, which all ranks have, stays None."""
        if self.options.op not in (Average, Sum):
            raise ValueError(
                f"steps that JAX compiles take op=Average or Sum, not {self.options.op.name}"
            )
        # Several gradients may have the same name.
        keys = [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]
        named = zip(keys, gradients, strict=True)
        values = compared() if compared is not None else []
        averages = import_module("horo_lite.jax").average_gradients(
            {key: gradient for key, gradient in named if gradient is not None},
            op=self.options.op,
            compression=self.options.wire,
            weight=weight,
            group=None if self.options.group is None else self.options.ranks,
            parameters={k: getattr(x, "value", x) for k, (_, x) in zip(keys, values, strict=False)},
            broadcast_later=True,
            owner=self._owner,
        )
        return [averages.get(key) for key in keys]


class _Slot:
    """A gradient's place in the plan, the same in all calls."""

    grad: Any = None

    def __init__(self, name: str) -> None:
        self.name = name


class _SlotAdapter(Adapter):
    like: Any = None
    """An array of the kind to create for a gradient that only other ranks have."""

    def __init__(self, copies: bool) -> None:
        self._copies = copies

    def compute(self, parameters: Sequence[_Slot]) -> None:
        for one_of_its_kind in {type(slot.grad): slot.grad for slot in parameters}.values():
            adapter_of(one_of_its_kind).compute(parameters)
        if self._copies:
            for slot in parameters:
                slot.grad = _copied(slot.name, slot.grad)

    def gradient(self, parameter: _Slot) -> Array | None:
        return None if parameter.grad is None else to_host(parameter.grad)

    def set_gradient(self, parameter: _Slot, array: Array) -> None:
        old = self.like if parameter.grad is None else parameter.grad
        parameter.grad = array if old is None else from_numpy(array, old)

    def value(self, parameter: _Slot) -> Array | None:
        return None  # there are only gradients

    def missing(self, parameter: _Slot, dtype: str, shape: tuple[int, ...]) -> Array:
        if gpu_of(self.like) is None or not str(self.like.dtype).endswith(dtype):
            return self.zeros(dtype, shape)
        adapter = adapter_of(self.like)
        return adapter.zeros_like(adapter.empty(self.like, shape))


def _copied(name: str, array: Array | None) -> Array | None:
    try:
        return None if array is None else copy_of(array)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"the gradient of {name!r}: {error}") from error


def is_traced(gradients: Sequence[Any]) -> bool:
    """Return whether JAX is tracing a function for compilation, so that there are no values yet."""
    core = sys.modules.get("jax.core")
    return core is not None and any(isinstance(g, core.Tracer) for g in gradients)
