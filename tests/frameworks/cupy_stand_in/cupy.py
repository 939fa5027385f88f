"""The part of CuPy that the adapter and a home-made optimizer use, on the fake device.

Names and arguments are CuPy 14's; behaviour is fake_device.py's: reads and writes of an array that
are not ordered with the current stream get garbage.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import fake_device
import numpy as np

from horo_lite import adapters, world

# The adapter for CuPy is to be used, not the fake device's own.
adapters._registered[:] = [
    a for a in adapters._registered if type(a) is not fake_device.FakeGpuAdapter
]


class Device(int):
    """CuPy's device objects, for the fake device: a number; inside `with` it is the current one."""

    @property
    def id(self) -> int:
        return int(self)

    def __enter__(self) -> Device:
        _local.outer = [*getattr(_local, "outer", []), getattr(_local, "current", None)]
        _local.current = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.current = _local.outer.pop()

    def use(self) -> None:
        """Make it this thread's."""
        _local.current = self


_local = threading.local()


def _current() -> Device:
    """Return this thread's device: as with CUDA the first by default; init() sets the main's."""
    is_main = threading.current_thread() is threading.main_thread()
    chosen = getattr(_local, "current", None)
    return Device(world().device.index if is_main else 0) if chosen is None else chosen


class ndarray(fake_device.FakeGpuArray):  # noqa: N801 (CuPy's name)
    def get(self) -> np.ndarray:
        """Return the array in host memory."""
        return self.numpy()

    def copy(self) -> ndarray:
        return empty(self.shape, self.dtype)._take(self)  # type: ignore[return-value]


def empty(shape: Any, dtype: Any = np.float64) -> ndarray:
    memory = np.empty(shape, dtype)
    fake_device.spoil(memory)
    return ndarray(memory, _current())


def asarray(values: Any, dtype: Any = None) -> ndarray:
    if isinstance(values, ndarray):
        assert dtype in (None, values.dtype)
        return values
    values = np.asarray(values, dtype)
    return empty(values.shape, values.dtype).fill(values)  # type: ignore[return-value]


def array(x: ndarray, order: str) -> ndarray:
    assert order == "C"
    return x.copy()


def zeros_like(x: ndarray, order: str) -> ndarray:
    assert order == "C"
    return asarray(np.zeros(x.shape, x.dtype))


def from_external(stream: Any) -> AbstractContextManager[None]:
    version, handle = stream.__cuda_stream__()
    assert version == 0
    assert handle
    return nullcontext()


cuda = SimpleNamespace(
    Device=Device,
    get_current_stream=lambda device: SimpleNamespace(ptr=fake_device.stream().handle),
    Stream=SimpleNamespace(from_external=from_external),
)
