"""An array library on the fake device (HORO_LITE_TEST_GPUS), as CuPy is on a real GPU.

Work is queued on a stream and executed by a thread, some of it late. Memory that is no longer
referenced is overwritten in the order of the stream it was allocated for, as if an allocator reused
it. Reads and writes that are not ordered with the current stream get garbage, and the first of them
aborts the process (csrc/testing/races.h).
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from horo_lite import _native, _testing, register_adapter
from horo_lite.adapters.numpy import NumpyAdapter

LATE_S = 0.01

_local = threading.local()
_streams: list[_testing.FakeStream] = []


def new_stream() -> _testing.FakeStream:
    _streams.append(_testing.FakeStream())
    return _streams[-1]


def stream() -> _testing.FakeStream:
    """Return the current stream of this thread."""
    if not hasattr(_local, "stream"):
        _local.stream = new_stream()
    return _local.stream


@atexit.register
def end() -> None:
    """End the streams' threads before the interpreter ends, since they call it."""
    FakeGpuArray.alive = False
    for each in _streams:  # also those that arrays still refer to
        each.close()


@contextlib.contextmanager
def another_stream() -> Iterator[None]:
    """Queue work on a new stream inside, ordered after the current one; afterwards, the reverse."""
    outer, inner = stream(), new_stream()
    outer.lead(inner.handle)
    _local.stream = inner
    try:
        yield
    finally:
        inner.lead(outer.handle)
        _local.stream = outer


@contextlib.contextmanager
def capture() -> Iterator[Callable[[_testing.FakeStream], None]]:
    """Capture what is queued inside; the function queues it again, on a stream."""
    first = stream()
    graph: list[_testing.FakeGraph] = []
    first.begin_capture()
    try:
        yield lambda on: graph[0].replay(on.handle)
    finally:
        graph.append(first.end_capture())


class FakeGpuArray:
    """NumPy memory, accessed only through a stream. `device` is the GPU's index, as in cuda:N."""

    alive = True

    def __init__(
        self, memory: np.ndarray, device: int = 0, owner: FakeGpuArray | None = None
    ) -> None:
        self._memory = memory
        self._owner = owner  # the array of which this is a view
        self._stream = stream()
        self.device = device
        self.shape = memory.shape
        self.dtype = memory.dtype

    def __del__(self) -> None:
        if self.alive and self._owner is None:
            memory = self._memory

            def free() -> None:
                spoil(memory)
                _testing.forget(*extent(memory))

            self._stream.call(free, writes=[extent(memory)])

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        assert stream is not None, "the consumer must specify its stream"
        if stream != -1:
            globals()["stream"]().lead(stream)
        memory, name = self._memory, self.dtype.name
        strides = [step // memory.itemsize for step in memory.strides]
        address = memory.__array_interface__["data"][0]
        return _native.dlpack_capsule(address, self.shape, name, self.device, self, strides)

    def queue(
        self,
        work: Callable[[np.ndarray], object],
        *others: FakeGpuArray,
        late: bool = False,
    ) -> FakeGpuArray:
        """Queue work that changes this array, and may read the others."""
        memory = self._memory

        def run() -> None:
            if late:
                time.sleep(LATE_S)
            work(memory)

        reads = [extent(other._memory) for other in others]
        stream().call(run, reads, [extent(memory)])
        return self

    def fill(self, values: Any) -> FakeGpuArray:
        """Fill late, so that a reader that does not wait for it reads garbage."""
        values = np.array(values)
        return self.queue(lambda memory: np.copyto(memory, values, casting="unsafe"), late=True)

    def add(self, number: float) -> FakeGpuArray:
        return self.queue(lambda memory: np.add(memory, number, out=memory, casting="unsafe"))

    def subtract(self, other: FakeGpuArray, factor: float) -> FakeGpuArray:
        theirs = other._memory
        return self.queue(lambda memory: np.subtract(memory, factor * theirs, out=memory), other)

    def copy(self) -> FakeGpuArray:
        return empty(self.shape, self.dtype, self.device)._take(self)

    def _take(self, other: FakeGpuArray) -> FakeGpuArray:
        theirs = other._memory
        return self.queue(lambda memory: np.copyto(memory, theirs), other)

    def reshape(self, shape: tuple[int, ...]) -> FakeGpuArray:
        return FakeGpuArray(self._memory.reshape(shape), self.device, self._owner or self)

    def __getitem__(self, key: Any) -> FakeGpuArray:
        return FakeGpuArray(self._memory[key], self.device, self._owner or self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, FakeGpuArray):
            self[key]._take(value)
        else:
            self[key].queue(lambda memory: np.copyto(memory, value, casting="unsafe"))

    def __len__(self) -> int:
        return len(self._memory)

    def numpy(self) -> np.ndarray:
        """Return the array's contents after all work queued on its stream."""
        done = threading.Event()
        result: list[np.ndarray] = []
        memory = self._memory
        stream().call(lambda: (result.append(memory.copy()), done.set()), [extent(memory)])
        assert done.wait(20), "the stream is stuck"
        stream().see_done()
        return result[0]


def extent(memory: np.ndarray) -> tuple[int, int]:
    """Return the address of an array, and the number of bytes from its first to its last one."""
    if not memory.size:
        return memory.ctypes.data, 0
    steps = [(n - 1) * step for n, step in zip(memory.shape, memory.strides, strict=True)]
    before = sum(step for step in steps if step < 0)
    after = sum(step for step in steps if step > 0) + memory.itemsize
    return memory.ctypes.data + before, after - before


def spoil(memory: np.ndarray) -> None:
    memory[...] = np.frombuffer(b"\xa5" * memory.itemsize, memory.dtype)[0]


def empty(shape: Any, dtype: Any, device: int = 0) -> FakeGpuArray:
    memory = np.empty(shape, dtype)
    spoil(memory)
    return FakeGpuArray(memory, device)


def array(values: Any, dtype: Any = None, device: int = 0) -> FakeGpuArray:
    """Return an array that will hold `values` in stream order."""
    values = np.asarray(values, dtype)
    return empty(values.shape, values.dtype, device).fill(values)


class FakeGpuAdapter(NumpyAdapter):
    """An adapter for these arrays, like the one for CuPy."""

    array = FakeGpuArray

    def matches(self, obj: object) -> bool:
        return isinstance(obj, FakeGpuArray) or super().matches(obj)

    def stream(self, x: Any) -> int | None:
        return stream().handle

    def copy(self, x: Any) -> Any:
        return x.copy()

    def empty(self, x: Any, shape: Any) -> Any:
        return empty(tuple(shape), x.dtype, x.device)

    def from_numpy(self, array: Any, like: Any) -> Any:
        if isinstance(array, FakeGpuArray):
            return array
        return empty(array.shape, array.dtype, like.device).fill(array)


register_adapter(FakeGpuAdapter())
