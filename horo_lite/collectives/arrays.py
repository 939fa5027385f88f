"""Arrays as memory that a transport can work on: host memory, or a GPU's."""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native, adapters
from horo_lite.adapters.object import NO_ORDER

if TYPE_CHECKING:
    from horo_lite.adapters import Adapter
    from horo_lite.transports.stream import CommunicationStream

Array = Any
"""A NumPy array, or any object that exports memory (of the host or a GPU) through DLPack or the
buffer protocol."""

HOST = -1
"""The value of `Tensors.device` for host memory."""

MEMORY = _native.ReusedMemory(most_kept=256 << 20)
"""For large results: clearing new memory, which the kernel does page by page, costs more than the
exchange."""

_LARGE = 1 << 20
"""In bytes; malloc() keeps smaller blocks, and does not return them to the kernel."""

bytes_copied = 0
"""Bytes copied outside the core so far, because an array's memory was not dense."""


def gpu_of(x: Array) -> int | None:
    """Return the index (in this process) of the GPU that holds `x`; None for host memory."""
    if isinstance(x, (np.ndarray, np.generic, bool, int, float)):
        return None
    device = getattr(x, "__dlpack_device__", None)
    if device is None:
        return None
    try:
        kind, index = device()
    except BufferError:  # sharded by JAX over several devices: goes through host memory
        return None
    return int(index) if kind in (2, 13) else None  # kDLCUDA, kDLCUDAManaged


class HostArrays:
    """A list of arrays as dense memory: their own, or copies if they are not dense.

    `fresh` arrays are new, and not in use elsewhere. Otherwise arrays are changed in place, and
    `overlaps` lists those that share memory, as `Tensors.overlaps` does. Fresh arrays may have
    `sources`: arrays with their initial contents, which need not be copied if the transport reads
    from them.
    """

    stream: CommunicationStream | None = None
    overlaps: Sequence[tuple[int, int, int, bool]] = ()
    fresh = True
    _sources: _native.Tensors | None = None

    def __init__(
        self,
        arrays: Sequence[Array],
        *,
        fresh: bool = False,
        sources: Sequence[NDArray[Any]] | None = None,
    ) -> None:
        self.fresh = fresh
        self.arrays = list(arrays)
        self._originals: dict[int, NDArray[Any]] = {}
        try:
            self.tensors = _native.Tensors(self.arrays)
        except ValueError:  # an array whose memory cannot be used
            if not fresh:
                check_changeable(self.arrays)
            raise
        except (TypeError, BufferError):  # an object that needs its adapter, or not an array
            if not fresh:
                check_changeable(self.arrays)
            exported = [exportable(x) for x in self.arrays]
            if all(map(is_, exported, self.arrays)):  # not an array
                raise
            self.tensors = _native.Tensors(exported)
        if not fresh:
            self.overlaps = self.tensors.overlaps()
        if strided := self.tensors.strided:
            self._copy(strided)
        if sources is not None:
            self._sources = _native.Tensors(sources, writable=False)

    @classmethod
    def of_rows(cls, x: Array) -> HostArrays:
        """Return `x`, for reading only, as rows along its first dimension; a number is one row."""
        rows = cls.__new__(cls)
        if hasattr(host := readable(array_of(x)), "clone"):  # torch, if NumPy lacks the dtype
            rows.arrays = [(host.reshape(1) if host.ndim == 0 else host).contiguous()]
        else:
            array = view(host)
            rows.arrays = [np.ascontiguousarray(array.reshape(1) if array.ndim == 0 else array)]
        rows._originals = {}
        rows.tensors = _native.Tensors(rows.arrays, writable=False)
        return rows

    def use_c_order(self) -> None:
        """Use C order, because the ranks' memory orders differ."""
        self.fill()
        self._copy([i for i, x in enumerate(self.arrays) if not view(x).flags.c_contiguous])

    def _copy(self, indices: Sequence[int]) -> None:
        global bytes_copied
        for i in indices:
            original = exportable(self.arrays[i])
            if not hasattr(original, "clone"):
                original = view(original)
            self._originals.setdefault(i, original)
            self.arrays[i] = copy_of(original)
            bytes_copied += original.nbytes
        self.tensors = _native.Tensors([exportable(x) for x in self.arrays])

    def fill(self) -> None:
        """Copy the sources, if there are any, into the arrays."""
        if self._sources is not None:
            self._sources.copy_to(self.tensors)
            self._sources = None

    def begin(self, reads_sources: bool = False) -> None:
        """Prepare the memory for the operation, which reads from sources or from copies of them."""
        if reads_sources and self._sources is not None:
            self.tensors.read_from(self._sources)
            self._sources = None
        else:
            self.fill()

    def end(self) -> None:
        """Make the results visible in `arrays`: in host memory, they already are."""

    def write_back(self) -> None:
        """Copy the results into the caller's arrays that are not dense."""
        for i, original in self._originals.items():
            original[...] = self.arrays[i]

    def seen(self) -> list[Array]:
        """Return the arrays as a compressor's hooks see them."""
        self.fill()
        return [view(x) for x in self.arrays]

    def describe(self, names: Sequence[str]) -> list[str]:
        return described(self.tensors, names)

    # For rows.

    def empty(self, n_rows: int) -> tuple[Array, _native.Tensors]:
        """Return a new, uninitialized array of `n_rows` rows like these."""
        like, shape = self.arrays[0], (n_rows, *self.arrays[0].shape[1:])
        if isinstance(like, np.ndarray):
            array = new_array(shape, like.dtype)
        else:
            array = adapters.adapter_of(like).empty(like, shape)
        return array, _native.Tensors([array])

    def copy(self, source: _native.Tensors, to: _native.Tensors) -> None:
        source.copy_to(to)

    def result(self, array: Array, x: Array) -> Array:
        """Return `array`, which is new and complete, in the type of `x`."""
        return like(array, x)

    def results(self, arrays: Sequence[Array], xs: Sequence[Array]) -> list[Array]:
        """Return each of `copies_of(xs)` or `results_of(xs)` in the type of its x."""
        return results_like(arrays, xs)

    def part(self, array: Array, rows: slice, x: Array) -> Array:
        """Return a copy of some rows of `array` in the type of `x`."""
        part = array[rows]
        return like(_copied(part) if isinstance(part, np.ndarray) else part.clone(), x)


class GpuArrays:
    """Like HostArrays, for arrays of one GPU, in stream order: nothing here waits for the GPU.

    Created, begun and ended by the caller's thread, since every thread has its own current stream.
    `begin` marks the point in that stream from which on the operation may use the memory; for an
    asynchronous call this is its submission, however late its work is queued. `fresh` arrays may be
    written even if the framework's arrays are immutable.
    """

    def __init__(
        self, arrays: Sequence[Array], stream: CommunicationStream, *, fresh: bool = False
    ) -> None:
        self.arrays = list(arrays)
        self.stream = stream
        self._queue = stream.queue
        self.fresh = fresh
        self._begun = False
        self._is_ours = False
        self._originals: dict[int, Array] = {}
        self._adapters: dict[type, tuple[Adapter, Array]] = {}
        for x in self.arrays:
            if type(x) not in self._adapters:
                adapter = adapters.adapter_of(x)
                if not (fresh or adapter.mutable):
                    raise ValueError(
                        f"a {type(x).__name__} cannot be changed in place: use the out-of-place "
                        "call, which returns a new array"
                    )
                self._adapters[type(x)] = adapter, x
        # JAX would take NO_ORDER, like any other number, for a stream.
        self._at_sight = self._queue.stream if None in self._streams() else NO_ORDER
        self._read(self._at_sight)
        self.overlaps = [] if fresh else self.tensors.overlaps()
        if strided := self.tensors.strided:
            self._copy(strided)

    @classmethod
    def of_rows(cls, x: Array, stream: CommunicationStream) -> GpuArrays:
        rows = cls([x if len(x.shape) else x.reshape((1,))], stream, fresh=True)
        rows.use_c_order()
        return rows

    def use_c_order(self) -> None:
        if self.tensors.layout:
            orders = [_native.Tensors([x], stream=self._at_sight).layout for x in self.arrays]
            self._copy([i for i, order in enumerate(orders) if order])

    def _copy(self, indices: Sequence[int]) -> None:
        global bytes_copied
        for i in indices:
            x = self.arrays[i]
            self._originals.setdefault(i, x)
            self.arrays[i] = self._adapters[type(x)][0].copy(x)
            bytes_copied += _native.Tensors([self.arrays[i]], stream=self._at_sight).nbytes
        self._read(self._at_sight)

    def _read(self, stream: int) -> None:
        self.tensors = _native.Tensors(self.arrays, stream=stream)

    def begin(self, reads_sources: bool = False) -> None:
        """Order work queued from now on after all work that the frameworks have been given."""
        if self._begun:
            return
        self._begun = True
        for stream in self._streams():
            if stream is None:  # the framework itself makes the queue wait
                self._read(self._queue.stream)
            else:
                self._queue.follow(stream)

    def end(self) -> None:
        """Order work that the frameworks are given from now on after all queued work."""
        for stream in self._streams():
            if stream is not None:
                self._queue.lead(stream)
            elif self.fresh:  # result() provides the order
                self._queue.hold(self.tensors)
            else:
                self._queue.synchronize()

    def write_back(self) -> None:
        for i, original in self._originals.items():
            original[...] = self.arrays[i]

    def _streams(self) -> set[int | None]:
        return {adapter.stream(x) for adapter, x in self._adapters.values()}

    def seen(self) -> list[Array]:
        return self.arrays

    def describe(self, names: Sequence[str]) -> list[str]:
        return described(self.tensors, names)

    def empty(self, n_rows: int) -> tuple[Array, _native.Tensors]:
        ((adapter, x),) = self._adapters.values()
        shape = (n_rows, *self.tensors.shape(0)[1:])
        if self._begun:
            # The call was submitted earlier, and its place in the caller's stream has passed:
            # memory that the allocator returns now may still be in use by work queued since.
            self._is_ours = True
            with adapter.on_stream(x, self._queue.stream):
                array = adapter.empty(x, shape)
        else:
            array = adapter.empty(x, shape)
        return array, _native.Tensors([array], stream=self._at_sight)

    def copy(self, source: _native.Tensors, to: _native.Tensors) -> None:
        self._queue.copy(source, to)

    def result(self, array: Array, x: Array) -> Array:
        adapter = adapters.adapter_of(x)
        result = adapter.finished(array, self._queue)
        stream = adapter.stream(x)
        if not self._is_ours or stream is None:
            return result
        # Memory of our stream must not be freed to it while the caller's stream may still read it.
        copy = adapter.copy(result)
        self._queue.hold(result, stream)
        return copy

    def results(self, arrays: Sequence[Array], xs: Sequence[Array]) -> list[Array]:
        return [self.result(array, x) for array, x in zip(arrays, xs, strict=True)]

    def part(self, array: Array, rows: slice, x: Array) -> Array:
        return adapters.adapter_of(x).copy(self.result(array, x)[rows])


def described(tensors: _native.Tensors, names: Sequence[str]) -> list[str]:
    """Return a line for each tensor."""
    return [
        f"tensor {repr(names[i]) if i < len(names) else i}: {tensors.describe(i)}"
        for i in range(len(tensors))
    ]


# Arrays in host memory, as NumPy arrays.


def check_changeable(arrays: Sequence[Array]) -> None:
    """Raise a TypeError that says what to do, if there are numbers or lists among the arrays.

    Only copies of them could be changed. The core has already refused them.
    """
    for i, x in enumerate(arrays):
        if isinstance(x, (list, tuple)):
            remedy = "for a list of arrays, call grouped_allreduce_ or broadcast_parameters"
        elif isinstance(x, (bool, int, float, complex, np.generic)):
            remedy = "call allreduce or broadcast, without the underscore, which return a new one"
        else:
            continue
        raise TypeError(
            f"array {i} is a {type(x).__name__}, which cannot be changed in place: {remedy}"
        ) from None


def check_apart(memory: HostArrays | GpuArrays, names: Sequence[str], label: str) -> None:
    """Raise ValueError if arrays that are to be reduced in place share memory."""
    for first, second, _, same in memory.overlaps:
        a, b = (
            f"{repr(names[i]) if i < len(names) else i} ({memory.tensors.describe(i)})"
            for i in (first, second)
        )
        if first == second:
            raise ValueError(
                f"{label}: elements of array {a} share memory with each other (it comes from "
                "expand() or as_strided()), so it cannot be changed in place: pass a copy, or use "
                "the out-of-place call"
            )
        how = "are the same memory" if same else "overlap in memory"
        raise ValueError(
            f"{label}: arrays {a} and {b} {how}, so the shared elements would be reduced twice: "
            "pass them once, or use the out-of-place call"
        )


def exportable(x: Array) -> Array:
    """Return `x` as an object whose memory the core can read."""
    if isinstance(x, (np.ndarray, memoryview, array.array, bytearray)):
        return x
    return adapters.to_host(x)


def readable(x: Array) -> Array:
    """Return `exportable(x)`, whose numbers are to be copied into another array."""
    if hasattr(x, "resolve_conj"):  # torch, which conjugates and negates at the first use
        x = x.resolve_conj().resolve_neg()
    host = exportable(x)
    if isinstance(host, np.ndarray) and type(host) is not np.ndarray:
        _native.Tensors([host], writable=False)  # a copy would no longer show what it refuses
    return host


def view(x: Array) -> NDArray[Any]:
    """Return `x` as a NumPy array over the same memory."""
    host = exportable(x)
    if isinstance(host, (np.ndarray, np.generic)) or not hasattr(host, "__dlpack__"):
        return np.asarray(host)
    return np.from_dlpack(host)


def array_of(x: Array) -> Array:
    """Return `x`, or a Python number as an array of its own type, which moving preserves."""
    if not isinstance(x, (bool, int, float)):
        return np.array(x) if isinstance(x, complex) else x
    dtype = np.bool_ if isinstance(x, bool) else np.int64 if isinstance(x, int) else np.float64
    try:
        return np.array(x, dtype)
    except OverflowError:
        raise ValueError(
            f"the number {x} does not fit into 64 bits: send it with broadcast_object() or "
            "allgather_object()"
        ) from None


def new_array(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a new, uninitialized array in C order."""
    n_bytes = prod(shape) * dtype.itemsize
    if n_bytes < _LARGE or dtype.hasobject:
        return np.empty(shape, dtype)
    return MEMORY.arrays([n_bytes])[0].view(dtype).reshape(shape)


def _copied(x: NDArray[Any] | np.generic) -> NDArray[Any]:
    copy = new_array(x.shape, x.dtype)
    copy[...] = x
    return copy


def copy_of(x: Array) -> Array:
    """Return a writable, dense copy, to be reduced in place and returned through `like`."""
    if isinstance(x, (bool, int, float)):
        return adapters.exact(np.array(x, np.float64), x)  # always: another rank may pass 0.5
    if gpu_of(x) is not None:
        return adapters.adapter_of(x).copy(x)
    host = readable(x)
    if isinstance(host, (np.ndarray, np.generic)):
        return _copied(host)
    if hasattr(host, "clone"):  # torch, if NumPy lacks the dtype
        return host.clone(memory_format=sys.modules["torch"].contiguous_format)
    return _copied(view(host))


def copies_of(xs: Sequence[Array]) -> list[Array]:
    """Return `copy_of` each, to be returned through `results_like`."""
    adapter = _that_makes_copies(xs)
    if adapter is None or any(gpu_of(x) is not None for x in xs):
        return [copy_of(x) for x in xs]
    views = [adapter.value(x) for x in xs]
    copies: list[Array] = adapter.host_results(views)
    for copy, view_of_x in zip(copies, views, strict=True):
        np.copyto(copy, view_of_x)
    return copies


def results_of(xs: Sequence[Array]) -> tuple[list[Array], list[NDArray[Any]] | None]:
    """Return new arrays for the results of reducing `xs`, and their sources: see `HostArrays`.

    If the sources are None, the arrays are copies. Return them to the caller through
    `results_like`, as those of `copies_of`.
    """
    sizes = [getattr(x, "nbytes", 0) for x in xs]  # a method in tinygrad
    n_bytes = sum(size for size in sizes if isinstance(size, int))
    if n_bytes < _LARGE or any(gpu_of(x) is not None for x in xs):
        return copies_of(xs), None
    adapter = _that_makes_copies(xs)
    views = [readable(x) if adapter is None else adapter.value(x) for x in xs]
    if not all(isinstance(view_of_x, np.ndarray) for view_of_x in views):
        return copies_of(xs), None
    sources = [np.ascontiguousarray(view_of_x).reshape(view_of_x.shape) for view_of_x in views]
    if adapter is None:
        return [new_array(source.shape, source.dtype) for source in sources], sources
    return list(adapter.host_results(sources)), sources


def results_like(results: Sequence[Array], xs: Sequence[Array]) -> list[Array]:
    """Convert results, made by `copies_of` or `results_of`, to the types of `xs`.

    Uses only the types of `xs`, whose memory may have been freed meanwhile.
    """
    adapter = _that_makes_copies(xs)
    if adapter is None:
        return [like(result, x) for result, x in zip(results, xs, strict=True)]
    return adapter.from_results(results)


def _that_makes_copies(xs: Sequence[Array]) -> Adapter | None:
    """Return the common adapter of all `xs`, if there is one and it `makes_copies`."""
    kinds = set(map(type, xs))
    if len(kinds) != 1 or np.ndarray in kinds:
        return None
    adapter = adapters.adapter_of(xs[0])
    return adapter if adapter.makes_copies else None


def like(result: Array, x: Array) -> Array:
    """Convert `result` to the type of `x`."""
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
        return result.item() if result.ndim == 0 else result
    return adapters.from_numpy(result, x) if isinstance(result, np.ndarray) else result
