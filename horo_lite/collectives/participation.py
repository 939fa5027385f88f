"""How ranks that have joined take part in what the others do: with arrays that change nothing.

A rank that calls an operation describes it for those that wait in join(): the function that makes
their part of it, and what to call it with. A rank that has joined waits in two places: in the
handshake of direct calls, and in its engine (`Group.join`). In both it learns what the others are
about to do, makes the same call with arrays that change nothing, and is compared, matched and
served as in any call.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from horo_lite._native import Tensors
    from horo_lite.collectives.arrays import Array

ArraySpec: TypeAlias = "tuple[str, tuple[int, ...]]"
"""The dtype and the shape of an array."""


def described_by(
    function: Callable[..., None], weight: float = 1.0, **what: Any
) -> tuple[float, bytes]:
    """What ranks that have joined are to call: `function(group, asynchronous, **what)`.

    `function` belongs to a module. PicklingError (and the like) where something in `what` cannot
    be sent to other processes.
    """
    return weight, pickle.dumps((function, what))


def specs_of(tensors: Tensors) -> list[ArraySpec]:
    """Return the dtype and shape of each of the arrays."""
    return [
        (tensors.describe(i).partition("[")[0], tuple(tensors.shape(i)))
        for i in range(len(tensors))
    ]


def neutral(spec: ArraySpec, op: str = "sum") -> Array:
    """Return an array of that dtype and shape which does not change the result of the others."""
    name, shape = spec
    if name == "bfloat16" and "torch" in sys.modules:  # unknown to NumPy
        torch = sys.modules["torch"]
        return torch.full(shape, _neutral(op, -np.inf, np.inf), dtype=torch.bfloat16)
    if name == "bfloat16":
        from ml_dtypes import bfloat16

        return np.full(shape, _neutral(op, -np.inf, np.inf), bfloat16)
    dtype = np.dtype(name)
    if dtype.kind == "b":  # of which minus infinity would be True
        return np.full(shape, _neutral(op, False, True), dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.full(shape, _neutral(op, limits.min, limits.max), dtype)
    return np.full(shape, _neutral(op, -np.inf, np.inf), dtype)


def _neutral(op: str, least: float, greatest: float) -> float:
    return {"min": greatest, "max": least, "product": 1}.get(op, 0)
