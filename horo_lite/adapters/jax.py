"""JAX: arrays and pytrees, which are immutable, so results are returned as new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from horo_lite import _native
from horo_lite.adapters import needs
from horo_lite.adapters.object import NO_ORDER, Adapter, Named

needs(jax, "0.7.2")  # until then XLA ends the process at some compiled functions with a callback
Tree = TypeVar("Tree")
Array = Any


class JaxAdapter(Adapter):
    """Arrays, objects registered as pytrees (modules, states), and optax's transformations.

    JAX does not expose its streams. It makes consumers wait when it exports an array, and waits
    itself when it imports one: so a result on a GPU is exported on its behalf and imported again.
    """

    mutable = False
    makes_copies = True
    face = "horo_lite.jax"
    array_types = (jax.Array,)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, jax.Array) or _is_transformation(obj) or _is_registered(obj)

    def flattened(self, tree: Any) -> tuple[Named, Callable[[Iterable[Any]], Any]] | None:
        return named_arrays(tree) if _is_registered(tree) else None

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        nnx = sys.modules.get("flax.nnx")
        if nnx is None or not isinstance(owner, nnx.Module):
            return None
        variables = tree_flatten_with_path(owner, is_leaf=lambda x: isinstance(x, nnx.Variable))[0]
        kept = [
            (keystr(path, simple=True, separator="."), variable)
            for path, variable in variables
            if isinstance(variable, nnx.Param)
            or (buffers and not isinstance(variable, nnx.RngState))
        ]
        return named_arrays(dict(kept))[0]

    def value(self, parameter: Any) -> Any:
        if isinstance(parameter, jax.core.Tracer):
            raise TypeError(
                "arrays have no values yet inside jax.jit or another transformation: use the "
                "functions of horo_lite.jax there"
            )
        # NumPy's view is read-only; JAX's DLPack capsule would let the core write into it.
        return np.asarray(jax.random.key_data(parameter) if is_key(parameter) else parameter)

    def received(self, parameter: Any, value: Any) -> Any:
        return self.from_numpy(value, parameter)

    def copy(self, x: Any) -> Any:
        return jnp.array(x, copy=True)

    def empty(self, x: Any, shape: Sequence[int]) -> Any:
        return jnp.empty(tuple(shape), x.dtype, device=x.device)

    def zeros_like(self, x: Any) -> Any:
        return jnp.zeros_like(x)

    def finished(self, x: Any, queue: _native.DeviceQueue) -> Any:
        return jax.dlpack.from_dlpack(GpuView(x, queue))

    def from_numpy(self, array: np.ndarray[Any, Any], like: Any) -> Any:
        if is_key(like):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(like))
        return _typed(jnp.asarray(array), like)

    def host_results(self, views: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        memory = MEMORY.arrays([view.nbytes for view in views])
        return [
            new.view(view.dtype).reshape(view.shape)
            for view, new in zip(views, memory, strict=True)
        ]

    def from_results(
        self, results: Sequence[np.ndarray[Any, Any]], likes: Sequence[Any]
    ) -> list[Any]:
        if any(map(is_key, likes)):
            return list(map(self.from_numpy, results, likes))
        # One call for all takes a third of the time. XLA uses the memory without a copy, since it
        # is aligned, and holds references to the NumPy arrays as long as it needs it.
        arrays: list[Any] = jax.device_put(list(results), may_alias=True)
        return list(map(_typed, arrays, likes))


def _typed(x: Any, like: Any) -> Any:
    """Return a new array: weakly typed if `like` is, so that promotion remains what it was."""
    return _weak(x) if getattr(like, "weak_type", False) else x


# JAX has no public function for it.
_weakly_typed: Any = Primitive("horo_lite_weakly_typed")
_weakly_typed.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype, weak_type=True))
mlir.register_lowering(_weakly_typed, lambda _, x: [x])
_weak = jax.jit(_weakly_typed.bind)
MEMORY = _native.ReusedMemory()
"""For results: clearing new memory, which the kernel does page by page, costs more than the
exchange."""


def _is_transformation(obj: object) -> bool:
    optax = sys.modules.get("optax")
    return optax is not None and isinstance(obj, optax.GradientTransformation)


def _is_registered(obj: object) -> bool:
    """Return whether `obj` is a pytree node of a type that was registered with JAX."""
    if obj is None or isinstance(obj, (list, tuple, dict, np.ndarray, np.generic)):
        return False
    return not jax.tree_util.all_leaves([obj])


def named_arrays(tree: Tree) -> tuple[list[tuple[str, Array]], Callable[[Iterable[Array]], Tree]]:
    """Return the arrays of a pytree, named by their paths, and a function that replaces them.

    The function takes new arrays in the same order and returns the tree with them. Numbers count as
    arrays; other leaves, such as the functions in an equinox module, are kept.
    """
    paths, structure = tree_flatten_with_path(tree)
    leaves = [leaf for _, leaf in paths]
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    named = [(keystr(paths[i][0], simple=True, separator="."), leaves[i]) for i in places]

    def rebuilt(arrays: Iterable[Array]) -> Tree:
        new = dict(zip(places, arrays, strict=True))
        whole = [new.get(i, leaf) for i, leaf in enumerate(leaves)]
        return tree_unflatten(structure, whole)  # type: ignore[no-any-return]

    return named, rebuilt


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0


def is_key(x: Any) -> bool:
    """Return whether `x` holds keys of `jax.random`, which travel as the integers in them."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


class GpuView:
    """Export GPU memory through DLPack, ordered after the work that a queue holds."""

    def __init__(self, x: Array, queue: _native.DeviceQueue) -> None:
        self._queue = queue
        self._x = x
        self._tensors = _native.Tensors([x], stream=queue.stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._queue.index

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is None:  # what JAX passes if it has no stream that could wait
            self._queue.synchronize()
        elif stream != NO_ORDER:
            self._queue.lead(stream)
        x = self._tensors
        return _native.dlpack_capsule(
            x.addresses[0], x.shape(0), x.dtype(0), self._queue.index, self
        )


ADAPTER = JaxAdapter()
