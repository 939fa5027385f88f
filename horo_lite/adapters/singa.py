"""SINGA's tensors: only `array_of` and `write` touch their memory.

SINGA does not expose its memory to Python: its extension copies values out (`GetFloatValue`) and in
(`CopyFloatDataFromHostPtr`), so every exchange does, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from singa import opt, singa_wrap, tensor

from horo_lite.adapters.object import Adapter, Array, Named, name_leaves

_KINDS = {
    singa_wrap.kFloat32: ("Float", np.float32),
    singa_wrap.kFloat16: ("HalfFloat", np.float16),
    singa_wrap.kInt: ("Int", np.int32),
}
_HOST = -1  # the id() of SINGA's device for host memory


def array_of(raw: Any) -> NDArray[Any]:
    """Return a copy of a raw tensor (`tensor.data`), in its shape.

    Raises:
        RuntimeError: In SINGA's graph mode, where nothing has been computed yet.
    """
    graph_enabled = getattr(raw.device(), "graph_enabled", bool)  # exists since version 3
    if graph_enabled():
        raise RuntimeError(
            "SINGA's graph mode records C++ operations and replays them without Python, so no "
            "later step would exchange anything: use model.compile(…, use_graph=False)"
        )
    word, _ = _kind(raw)
    if raw.device().id() != _HOST:
        raw = raw.Clone()
        raw.ToHost()
    values: NDArray[Any] = getattr(raw, f"Get{word}Value")(int(raw.Size()))
    return values.reshape(tuple(raw.shape()))


def write(raw: Any, array: NDArray[Any]) -> None:
    """Copy `array` into a raw tensor of the same shape."""
    word, dtype = _kind(raw)
    flat: NDArray[Any] = np.ascontiguousarray(array, dtype).reshape(-1)
    if raw.transpose():  # SINGA reads in the order of the shape, but writes in memory order
        shuffled = np.empty_like(flat)
        shuffled[_places_in_memory(raw)] = flat
        flat = shuffled
    getattr(raw, f"Copy{word}DataFromHostPtr")(flat)


def new_tensor(array: NDArray[Any], device: Any) -> Any:
    """Return a new tensor on `device` with the values of `array`; 64 bits become 32 (SINGA's)."""
    array = array.astype({"f8": "f4", "i8": "i4"}.get(array.dtype.str[1:], array.dtype), copy=False)
    (kind,) = (kind for kind, (_, dtype) in _KINDS.items() if dtype == array.dtype)
    new = tensor.Tensor(array.shape, device, kind)
    write(new.data, array)
    return new


def _kind(raw: Any) -> tuple[str, type]:
    if raw.data_type() not in _KINDS:
        raise TypeError(
            "SINGA lets Python read only float32, float16 and int32 tensors, and this one has "
            f"data type {raw.data_type()}: convert it with as_type()"
        )
    return _KINDS[raw.data_type()]


def _places_in_memory(raw: Any) -> NDArray[np.int64]:
    """Return each element's position in memory, in the order of the shape, by a trial write."""
    probe, n = raw.Clone(), int(raw.Size())
    word, dtype = _kind(raw)
    places, unit = np.zeros(n, np.int64), 1
    while unit < n:  # digit by digit, since float16 has no integers above 2048
        digits: NDArray[Any] = (np.arange(n) // unit % 2048).astype(dtype)
        getattr(probe, f"Copy{word}DataFromHostPtr")(digits)
        places += array_of(probe).reshape(-1).astype(np.int64) * unit
        unit *= 2048
    return places


class SingaAdapter(Adapter):
    """Tensors, and layers and models with `get_params()`; optimizers: see `horo_lite.singa`."""

    def matches(self, obj: object) -> bool:
        return any(kind.__module__.partition(".")[0] == "singa" for kind in type(obj).__mro__)

    def parameters(self, owner: Any) -> Named:
        if isinstance(owner, opt.Optimizer):
            raise TypeError(
                "SINGA's optimizers hold no parameters, and see them only in backward(): use "
                "DistributedOptimizer and broadcast_optimizer_state of horo_lite.singa"
            )
        found = owner.get_params() if hasattr(owner, "get_params") else []
        return name_leaves(found, "params")

    def value(self, parameter: Any) -> Array:
        values = array_of(parameter.data)
        values.flags.writeable = False  # a copy: changes need set_value()
        return values

    def set_value(self, parameter: Any, array: Array) -> None:
        write(parameter.data, array)

    def from_numpy(self, array: NDArray[Any], like: Any) -> Any:
        return new_tensor(array, like.device)


ADAPTER = SingaAdapter()
