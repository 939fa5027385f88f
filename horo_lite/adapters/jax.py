"""JAX: arrays and trees of them, which cannot be written, so results come back as new ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np

from horo_lite.adapters.object import Adapter, Named
from horo_lite.collectives.arrays import GpuView

if TYPE_CHECKING:
    from horo_lite._native import DeviceQueue


class JaxAdapter(Adapter):
    """Arrays, what was registered as a pytree (modules, states), and optax's transformations.

    JAX alone knows its streams: it makes others wait when it exports an array, and waits itself
    when it imports one, so a result on a GPU is exported in its name and imported again.
    """

    mutable = False
    face = "horo_lite.jax"

    def matches(self, obj: object) -> bool:
        return isinstance(obj, jax.Array) or _is_transformation(obj) or _is_registered(obj)

    def flattened(self, tree: Any) -> tuple[Named, Callable[[Iterable[Any]], Any]] | None:
        from horo_lite.jax.trees import named_arrays

        return named_arrays(tree) if _is_registered(tree) else None

    def value(self, parameter: Any) -> Any:
        if isinstance(parameter, jax.core.Tracer):
            raise TypeError(
                "inside jax.jit or another transformation there are no values yet: use the "
                "functions of horo_lite.jax there"
            )
        # NumPy's view is read-only; JAX's DLPack capsule would let the core write into it.
        return np.asarray(parameter)

    def copy(self, x: Any) -> Any:
        return jnp.array(x, copy=True)

    def empty(self, x: Any, shape: Sequence[int]) -> Any:
        return jnp.empty(tuple(shape), x.dtype, device=x.device)

    def zeros_like(self, x: Any) -> Any:
        return jnp.zeros_like(x)

    def finished(self, x: Any, queue: DeviceQueue) -> Any:
        return jax.dlpack.from_dlpack(GpuView(x, queue))

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        return jnp.asarray(array)


def _is_transformation(obj: object) -> bool:
    return "optax" in sys.modules and isinstance(obj, sys.modules["optax"].GradientTransformation)


def _is_registered(obj: object) -> bool:
    """Whether it is a node of pytrees that only JAX knows."""
    if obj is None or isinstance(obj, (list, tuple, dict, np.ndarray, np.generic)):
        return False
    return not jax.tree_util.all_leaves([obj])


ADAPTER = JaxAdapter()
