"""CuPy: arrays on a GPU, in optimizers like those of NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import cupy
import numpy as np

from horo_lite.adapters.numpy import NumpyAdapter
from horo_lite.adapters.object import Array


class _Handle:
    """A stream's handle, in CUDA's protocol for streams of other libraries."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


class CupyAdapter(NumpyAdapter):
    """cupy.ndarray, and optimizers that keep lists or dicts of them in `params` and `grads`."""

    array = cupy.ndarray
    array_types = (cupy.ndarray,)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, cupy.ndarray) or super().matches(obj)

    def stream(self, x: Any) -> int | None:
        return int(cupy.cuda.get_current_stream(x.device.id).ptr)

    @contextmanager
    def on_stream(self, x: Any, stream: int) -> Iterator[None]:
        # CuPy requires that the stream's GPU is current, and our threads have not selected one.
        if hasattr(cupy.cuda.Stream, "from_external"):  # from CuPy 14 on; ExternalStream warns
            theirs = cupy.cuda.Stream.from_external(_Handle(stream))
        else:
            theirs = cupy.cuda.ExternalStream(stream, x.device.id)
        with x.device, theirs:
            yield

    # CuPy allocates on the current GPU, which this thread may not have set: use that of `x`.

    def copy(self, x: Any) -> Array:
        with x.device:
            return cupy.array(x, order="C")

    def empty(self, x: Any, shape: Sequence[int]) -> Array:
        with x.device:
            return cupy.empty(tuple(shape), x.dtype)

    def zeros_like(self, x: Any) -> Array:
        with x.device:
            return cupy.zeros_like(x, order="C")

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        if isinstance(array, cupy.ndarray):
            return array
        with like.device if isinstance(like, cupy.ndarray) else nullcontext():
            return cupy.asarray(array)


ADAPTER = CupyAdapter()
