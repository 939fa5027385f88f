"""Pytrees: gradients, parameters and optimizer states of optax, flax, equinox or your own."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np

from horo_lite import ops
from horo_lite.adapters.jax import is_key, named_arrays
from horo_lite.collectives.group import Group

Tree = TypeVar("Tree")
Array = Any


def broadcast_parameters(params: Tree, root_rank: int = 0, *, group: Group | None = None) -> Tree:
    """Return a new tree with the values that rank `root_rank` has in `params`.

    Collective, outside jit. Leaves that are not arrays or numbers (functions, None) are those of
    each rank itself.

    Args:
        params: Any pytree: parameters, an optimizer's state, or both.
        root_rank: The rank whose values all receive; a rank of `group`, if that is given.
        group: The ranks; by default all.

    Raises:
        MismatchError: On every rank, if structures, dtypes or shapes differ; it names the first
            leaf that does.
    """
    named, rebuilt = named_arrays(params)
    names = [name for name, _ in named]
    values = [_sendable(x) for _, x in named]
    received = ops.grouped_broadcast(values, root_rank, names=names, group=group)
    return rebuilt(_like(old, new) for (_, old), new in zip(named, received, strict=True))


def _sendable(x: Array) -> Array:
    if isinstance(x, (bool, int, float, complex)):
        return np.asarray(x)
    return jax.random.key_data(x) if is_key(x) else x


def _like(old: Array, new: Array) -> Array:
    if isinstance(old, (bool, int, float, complex)):
        return type(old)(new)
    return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old)) if is_key(old) else new
