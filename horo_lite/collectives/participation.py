"""How ranks that have joined take part in the others' operations: with neutral arrays.

A rank that calls an operation sends it to those that wait in join(): see `Call.stand_in`. So they
make the same call, with arrays that do not change the result; it is then compared and executed as
any other.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from horo_lite._native import Tensors
    from horo_lite.collectives.arrays import Array

ArraySpec: TypeAlias = "tuple[str, tuple[int, ...]]"
"""The dtype and the shape of an array."""


def specs_of(tensors: Tensors) -> list[ArraySpec]:
    """Return the dtype and shape of each of the arrays."""
    return [(tensors.dtype(i), tuple(tensors.shape(i))) for i in range(len(tensors))]


def neutral(spec: ArraySpec, op: str = "sum") -> Array:
    """Return an array of that dtype and shape which does not change the result of the others."""
    name, shape = spec
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, name) and name not in np.sctypeDict:  # unknown to NumPy
        value, dtype = _neutral(op, -np.inf, np.inf), getattr(torch, name)
        return torch.full(shape, value, dtype=dtype, device="cpu")
    if name.startswith(("bfloat16", "float8_")):
        import ml_dtypes  # noqa: F401 (gives NumPy the name)
    dtype = np.dtype(name)
    if dtype.kind == "b":  # minus infinity would become True
        return np.full(shape, _neutral(op, False, True), dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.full(shape, _neutral(op, limits.min, limits.max), dtype)
    return np.full(shape, _neutral(op, -np.inf, np.inf), dtype)


def _neutral(op: str, least: float, greatest: float) -> float:
    return {"min": greatest, "max": least, "product": 1}.get(op, 0)
