"""JAX arrays: they cannot be written, so results come back as new ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from horo_lite.adapters.object import Adapter


class JaxAdapter(Adapter):
    """Arrays on the CPU; optimizers and modules of JAX are pytrees, not objects with `.grad`."""

    def matches(self, obj: object) -> bool:
        return isinstance(obj, jax.Array)

    def value(self, parameter: Any) -> Any:
        # NumPy's view is read-only; JAX's DLPack capsule would let the core write into it.
        return np.asarray(parameter)

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        return jnp.asarray(array)


ADAPTER = JaxAdapter()
