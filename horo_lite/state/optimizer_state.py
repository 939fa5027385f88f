"""Reading and writing an optimizer's state, apart from its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from horo_lite.adapters import Adapter, adapter_of, changed, from_numpy, to_host
from horo_lite.adapters.object import Named, is_array
from horo_lite.collectives.arrays import gpu_of
from horo_lite.state.trees import NUMBERS, Tree, in_brackets, mapped, overwritten, repeats
from horo_lite.state.wrapper import is_divided, unwrapped


def sharded_state(optimizer: Any) -> Any:
    """Return an optimizer's state that is divided between ranks, or None.

    Its `state_dict()` is then collective. The attribute `is_lost` says whether the ranks that had
    the parts are no longer those of a world.
    """
    for state in (optimizer, getattr(optimizer, "state", None)):
        if getattr(state, "is_sharded", False) is True:
            return state
    return None


class OptimizerState:
    """The state of `optimizer` (momenta, counts, options), which may be a DistributedOptimizer.

    It is read from the first of these that provides it: the optimizer's adapter (`state`,
    `set_state`), the optimizer itself (`state_dict`, `load_state_dict`), or its attributes. An
    attribute is state if it is a number, an array, or a list, tuple or dict of these. Parameters in
    it, and keys that are one or the `id()` of one, stand for the parameter's position. `named` are
    its parameters, if it is not asked for them.
    """

    def __init__(self, optimizer: Any, named: Named | None = None) -> None:
        self._inner, self._named = unwrapped(optimizer) if named is None else (optimizer, named)
        self._finder = self._adapter = adapter_of(self._inner)
        if type(self._finder) is Adapter and self._named:
            self._adapter = adapter_of(self._named[0][1])
        self._has_dict = hasattr(self._inner, "state_dict") and hasattr(
            self._inner, "load_state_dict"
        )

    def check(self) -> None:
        """Raise TypeError if it is not an optimizer: sending a module's state as one is harmful."""
        inner, steps = self._inner, self._finder.steps
        is_container = isinstance(inner, (type, Mapping, Set))
        is_module = self._finder.replica(inner, False) is not None
        if (
            is_container
            or is_module
            or not (any(callable(getattr(inner, name, None)) for name in steps) or self._is_kept)
        ):
            raise TypeError(
                f"{type(inner).__name__} is not an optimizer: it has no "
                + " or ".join(f"{name}()" for name in steps)
                + ". For a module, a state_dict() or arrays, use broadcast_parameters; if the "
                "optimizer's methods have other names, see register_adapter"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether every rank has to `read` it."""
        return sharded_state(self._inner) is not None

    def read(self) -> Any:
        """Return the state, in picklable form, for `write` on any rank."""
        kept = self._kept()
        if kept is not None:
            return kept
        return in_host_memory(self._inner.state_dict()) if self._has_dict else self._attributes()

    def write(self, state: Any) -> None:
        """Set the optimizer's state to one that was read; arrays are written in place."""
        inner = self._inner
        if is_divided(inner):
            inner.load_state_dict(state)
        elif self._is_kept:
            self._finder.set_state(inner, state)
        elif self._has_dict:
            before = [dict(options) for options in getattr(inner, "param_groups", ())]
            load_state_dict(inner, state)
            for options, old_options in zip(
                getattr(inner, "param_groups", ()), before, strict=False
            ):
                for key, value in options.items():  # a learning rate on a GPU stays there
                    if gpu_of(old_options.get(key)) is not None and hasattr(value, "to"):
                        options[key] = value.to(old_options[key].device)
        else:
            done: dict[int, Any] = {}
            for name, value in state.items():
                old = getattr(inner, name, None)
                setattr(inner, name, overwritten(old, value, self._local, self._local_key, done))

    def named(self) -> Named:
        """Return its arrays, not copied, and numbers, named after their parameters."""
        names = [name for name, _ in self._named]
        state: Any
        if (kept := self._kept()) is not None:
            state = kept if isinstance(kept, dict) else {"state": kept}
        elif self._has_dict:
            state = dict(self._inner.state_dict())
            if is_divided(self._inner):
                names = ["parameter"]  # each has a state of its own, in which it is the only one
            elif isinstance(
                state.get("state"), dict
            ):  # torch's, keyed by the parameters' positions
                state["state"] = {
                    names[key] if isinstance(key, int) and key < len(names) else key: value
                    for key, value in state["state"].items()
                }
        else:
            state = self._attributes()

        def name(path: str, key: Any) -> str:
            key = names[key.place] if isinstance(key, _Position) else key
            return in_brackets(path, key)

        leaves = Tree(state, join=name).named
        found = [(name, x) for name, x in leaves if isinstance(x, NUMBERS) or is_array(x)]
        if not found and not names:
            kind = type(self._inner).__name__
            raise ValueError(f"state=True is for optimizers: a {kind} has no optimizer state")
        return found

    @property
    def _is_kept(self) -> bool:
        """Whether the optimizer's adapter provides the state. Never collective."""
        can_be_divided = hasattr(self._inner, "is_sharded") and not is_divided(self._inner)
        return can_be_divided or self._kept() is not None

    def _kept(self) -> Any | None:
        """Return the state as the optimizer's adapter provides it, or None."""
        return None if is_divided(self._inner) else self._finder.state(self._inner)

    # Attributes.

    def _attributes(self) -> dict[str, Any]:
        state, done = {}, dict[int, Any]()
        for name, value in vars(self._inner).items():
            if name in self._finder.not_state:
                continue
            with suppress(_Foreign):
                kept = mapped(value, self._portable, self._portable_key, done)
                leaves = [leaf for _, leaf in Tree(kept).named]
                if not leaves or not all(isinstance(leaf, (str, _Position)) for leaf in leaves):
                    state[name] = kept
        return state

    @cached_property
    def _index(self) -> dict[int, int]:
        return {id(parameter): i for i, (_, parameter) in enumerate(self._named)}

    @cached_property
    def _held(self) -> list[Any]:
        """Objects that belong to parameters, kept alive since id() is reused for new objects."""
        adapter = self._adapter
        found = [x for _, p in self._named for x in (p, adapter.value(p), adapter.gradient(p))]
        return [x for x in found if x is not None]

    @cached_property
    def _not_state(self) -> set[int]:
        return set(map(id, self._held))

    def _portable(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, *NUMBERS)):
            return value
        if id(value) in self._index:
            return _Position(self._index[id(value)])
        if id(value) in self._not_state or not self._is_array(value):
            raise _Foreign
        return np.array(to_host(in_host_memory(value)))

    def _portable_key(self, key: Any) -> Any:
        if id(key) in self._index:
            return _Position(self._index[id(key)])
        if isinstance(key, int) and key in self._index:
            return _Position(self._index[key], is_id=True)
        if key is None or isinstance(key, (str, bytes, *NUMBERS)):
            return key
        if type(key) is tuple:
            return tuple(map(self._portable_key, key))
        raise _Foreign

    def _is_array(self, value: Any) -> bool:
        return is_array(value) or isinstance(value, self._adapter.array_types)

    def _local(self, old: Any, value: Any) -> Any:
        if isinstance(value, (dict, list, tuple)):  # but `old` is something else
            return overwritten(None, value, self._local, self._local_key)
        if not isinstance(value, np.ndarray):
            return old if isinstance(old, str) else self._local_key(value)
        if not self._is_array(old):
            if self._named:
                return from_numpy(value, self._named[0][1])
            return self._adapter.from_numpy(value, value)
        memory = to_host(old)
        fits = isinstance(memory, np.ndarray) and memory.shape == value.shape
        fits = fits and memory.dtype == value.dtype and not repeats(memory)
        if fits and memory.flags.writeable:
            memory[...] = value
            changed([old])
            return old
        return from_numpy(value, old)

    def _local_key(self, key: Any) -> Any:
        if isinstance(key, _Position):
            parameter = self._named[key.place][1]
            return id(parameter) if key.is_id else parameter
        return tuple(map(self._local_key, key)) if type(key) is tuple else key


@dataclass(frozen=True)
class _Position:
    """Stands for a parameter, or its id()."""

    place: int
    is_id: bool = False


class _Foreign(Exception):  # noqa: N818 (no error: a kind of value)
    """Marks an attribute that is not state, since it contains a parameter or something unknown."""


def load_state_dict(obj: Any, state: Any) -> None:
    """Call `obj.load_state_dict(state)`, and keep the dtypes of an optimizer's tensors.

    torch.optim's converts them to the parameter's dtype, which rounds float32 state of bfloat16
    parameters.
    """
    obj.load_state_dict(state)
    if hasattr(obj, "param_groups") and isinstance(state, dict) and "state" in state:
        _restore_dtypes(obj.state_dict().get("state"), state["state"])


def _restore_dtypes(loaded: Any, state: Any) -> None:
    """Replace the tensors in `loaded` whose dtype differs from that in `state`, on their device."""
    if isinstance(state, dict) and isinstance(loaded, dict):
        items: Any = [(key, x) for key, x in state.items() if key in loaded]
    elif isinstance(state, list) and isinstance(loaded, list) and len(loaded) == len(state):
        items = enumerate(state)
    else:
        return
    for key, x in items:
        old = loaded[key]
        if is_array(x) and hasattr(old, "to") and old.dtype != x.dtype:
            loaded[key] = x.to(old.device)
        else:
            _restore_dtypes(old, x)


def in_host_memory(tree: Any) -> Any:
    """Copy a GPU's arrays to the host: unpickling would put them on the same GPU on all ranks."""

    def moved(x: Any) -> Any:
        copy = getattr(x, "cpu", None) or getattr(x, "get", None)  # torch's, or CuPy's
        return copy() if copy is not None and gpu_of(x) is not None else x

    return mapped(tree, moved)
