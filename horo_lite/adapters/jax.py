"""JAX arrays: they cannot be written, so results come back as new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np

from horo_lite.adapters.object import Adapter
from horo_lite.arrays import GpuView

if TYPE_CHECKING:
    from horo_lite._native import DeviceQueue


class JaxAdapter(Adapter):
    """Arrays; optimizers and modules of JAX are pytrees, not objects with `.grad`.

    JAX alone knows its streams: it makes others wait when it exports an array, and waits itself
    when it imports one, so a result on a GPU is exported in its name and imported again.
    """

    mutable = False

    def matches(self, obj: object) -> bool:
        return isinstance(obj, jax.Array)

    def value(self, parameter: Any) -> Any:
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


ADAPTER = JaxAdapter()
