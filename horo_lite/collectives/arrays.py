"""Arrays as memory that a transport can work on: host memory, or a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import attrgetter, is_
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

_n_bytes = attrgetter("nbytes")

bytes_copied = 0
"""Bytes copied outside the core so far, because an array's memory was not dense."""


def gpu_of(x: Array) -> int | None:
    """Return the index (in this process) of the GPU that holds `x`; None for host memory."""
    if isinstance(x, (np.ndarray, np.generic, bool, int, float)):
        return None
    device = getattr(x, "__dlpack_device__", None)
    if device is None or getattr(x, "is_cuda", True) is False:  # torch, where asking takes longer
        return None
    try:
        kind, index = device()
    except BufferError:  # sharded by JAX over several devices: goes through host memory
        return None
    return int(index) if kind in (2, 13) else None  # kDLCUDA, kDLCUDAManaged


class Memory:
    """The arrays of one operation as memory, here of the host: looked at once for each call.

    Attributes:
        arrays: The arrays whose memory is used: the caller's, copies of these if they are not
            dense, or new ones.
        tensors: Their addresses, sizes, dtypes, layouts and device.
        fresh: Whether they are new, and not in use elsewhere. Otherwise they are changed in place.
        overlaps: Those that share memory, as in `Tensors.overlaps`, if they are changed in place.
        stream: The communication stream of their GPU; None for host memory.
    """

    fresh = True
    overlaps: Sequence[tuple[int, int, int, bool]] = ()
    stream: CommunicationStream | None = None
    _xs: Sequence[Array] = ()  # the caller's, whose types the results have; may have been freed
    _sources: _native.Tensors | None = None  # with the contents of new arrays, not yet copied
    _residuals: _native.Tensors | None = None

    def __init__(self, arrays: Sequence[Array], *, fresh: bool = False) -> None:
        self.fresh = fresh
        self.arrays = list(arrays)
        self._originals: dict[int, Array] = {}
        try:
            self.tensors = _native.Tensors(self.arrays)
        except ValueError:  # an array whose memory cannot be used
            if not fresh:
                check_changeable(self.arrays)
            raise
        except (TypeError, BufferError):  # an object that needs its adapter, or not an array
            if not fresh:
                check_changeable(self.arrays)
            exported = [adapters.to_host(x) for x in self.arrays]
            if all(map(is_, exported, self.arrays)):  # not an array
                raise
            self.tensors = _native.Tensors(exported)
        if not fresh:
            self.overlaps = self.tensors.overlaps()
        if strided := self.tensors.strided:
            self._copy(strided)

    @classmethod
    def of_results(cls, xs: Sequence[Array], *, at_once: bool, reduced: bool) -> Memory:
        """Return new arrays with the contents of `xs`: see `Group.results`."""
        hosts = [x if type(x) is np.ndarray else _readable(_array(x, reduced)) for x in xs]
        sources = None
        if len([host for host in hosts if isinstance(host, np.ndarray)]) == len(hosts):
            if not at_once and sum(map(_n_bytes, hosts)) >= _LARGE:
                hosts = sources = [np.ascontiguousarray(host).reshape(host.shape) for host in hosts]
            adapter = _that_makes_copies(xs)
            if adapter is None:
                arrays = [new_array(host.shape, host.dtype) for host in hosts]
            else:
                arrays = adapter.host_results(hosts)
            if sources is None:
                for array, host in zip(arrays, hosts, strict=True):
                    array[...] = host
        else:
            arrays = [_copied(host) for host in hosts]
        results = cls(arrays, fresh=True)
        results._xs = xs
        if sources is not None:
            results._sources = _native.Tensors(sources, writable=False)
        return results

    @classmethod
    def of_rows(cls, x: Array) -> Memory:
        """Return `x`, for reading only, as rows along its first dimension; a number is one row."""
        host = _readable(_array(x))
        if host.ndim == 0:
            host = host.reshape(1)
        is_numpys = isinstance(host, np.ndarray)
        rows = cls.__new__(cls)
        rows.arrays = [np.ascontiguousarray(host) if is_numpys else host.contiguous()]
        rows.tensors = _native.Tensors(rows.arrays, writable=False)
        rows._xs = [x]
        return rows

    def use_c_order(self) -> None:
        """Use C order: the ranks' memory orders differ, or rows must be consecutive in memory."""
        if reordered := self.tensors.reordered:
            self.fill()
            self._copy(reordered)

    def _copy(self, indices: Sequence[int]) -> None:
        global bytes_copied
        for i in indices:
            original = _readable(self.arrays[i])
            self._originals.setdefault(i, original)
            self.arrays[i] = _copied(original)
            bytes_copied += original.nbytes
        self.tensors = _native.Tensors([adapters.to_host(x) for x in self.arrays])
        if self._residuals is not None:
            self.tensors.keep_residuals(self._residuals)

    def keep_residuals(self, residuals: Sequence[Array]) -> None:
        """Keep in these arrays what quantized messages lack; see `Tensors.keep_residuals`.

        In C order: the arrays of another step, or rank, may be in another order.
        """
        self.use_c_order()
        self._residuals = _native.Tensors(residuals)
        self.tensors.keep_residuals(self._residuals)

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

    def describe(self, names: Sequence[str]) -> list[str]:
        return described(self.tensors, names)

    def seen(self) -> list[Array]:
        """Return the arrays as a compressor's hooks see them."""
        self.fill()
        return [view(x) for x in self.arrays]

    def results(self) -> list[Array]:
        """Return the arrays, which are new and complete, in the types of the caller's."""
        adapter = _that_makes_copies(self._xs)
        if adapter is not None:
            return adapter.from_results(self.arrays, self._xs)
        return list(map(adapters.from_numpy, self.arrays, self._xs))

    def part(self, rows: slice) -> Array:
        """Return a copy of some rows of the only array, in the type of the caller's."""
        return adapters.from_numpy(_copied(self.arrays[0][rows]), self._xs[0])

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

    def result(self, array: Array) -> Array:
        """Return `array`, which `empty` made and is complete, in the type of the caller's."""
        return adapters.from_numpy(array, self._xs[0])


class GpuMemory(Memory):
    """Arrays of one GPU, in stream order: nothing here waits for the GPU.

    Created, begun and ended by the caller's thread, since every thread has its own current stream.
    `begin` marks the point in that stream from which on the operation may use the memory; for an
    asynchronous call this is its submission, however late its work is queued. `fresh` arrays may be
    written even if the framework's arrays are immutable.
    """

    def __init__(
        self, arrays: Sequence[Array], stream: CommunicationStream, *, fresh: bool = False
    ) -> None:
        self.arrays = list(arrays)
        self._originals = {}
        self.stream = stream
        self._queue = stream.queue
        self.fresh = fresh
        self._begun = False
        self._is_ours = False
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
    def results_on(cls, xs: Sequence[Array], stream: CommunicationStream) -> GpuMemory:
        """Return new arrays with the contents of `xs`: see `Group.results`."""
        results = cls([copy_of(x) for x in xs], stream, fresh=True)
        results._xs = xs
        return results

    @classmethod
    def rows_on(cls, x: Array, stream: CommunicationStream) -> GpuMemory:
        rows = cls([x if len(x.shape) else x.reshape((1,))], stream, fresh=True)
        rows._xs = [x]
        rows.use_c_order()
        return rows

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

    def _streams(self) -> set[int | None]:
        return {adapter.stream(x) for adapter, x in self._adapters.values()}

    def seen(self) -> list[Array]:
        return self.arrays

    def results(self) -> list[Array]:
        return [self._finished(array, x) for array, x in zip(self.arrays, self._xs, strict=True)]

    def part(self, rows: slice) -> Array:
        x = self._xs[0]
        return adapters.adapter_of(x).copy(self._finished(self.arrays[0], x)[rows])

    def keep_residuals(self, residuals: Sequence[Array]) -> None:
        """Keep nothing: after an overflow, the core could not find it in a GPU's memory."""

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

    def result(self, array: Array) -> Array:
        return self._finished(array, self._xs[0])

    def _finished(self, array: Array, x: Array) -> Array:
        adapter = adapters.adapter_of(x)
        result = adapter.finished(array, self._queue)
        stream = adapter.stream(x)
        if not self._is_ours or stream is None:
            return result
        # Memory of our stream must not be freed to it while the caller's stream may still read it.
        copy = adapter.copy(result)
        self._queue.hold(result, stream)
        return copy


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


def check_apart(memory: Memory, names: Sequence[str], label: str) -> None:
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


def _array(x: Array, reduced: bool = False) -> Array:
    """Return `x`, or a Python number as an array of its own type, which moving preserves.

    If it is to be reduced, always of float64: another rank may pass 0.5.
    """
    if not isinstance(x, (bool, int, float)):
        if reduced and str(getattr(x, "dtype", "")).startswith("key<"):
            raise TypeError("keys of jax.random cannot be reduced: send them, as broadcast does")
        return x
    if reduced:
        return adapters.exact(np.array(x, np.float64), x)
    dtype = np.bool_ if isinstance(x, bool) else np.int64 if isinstance(x, int) else np.float64
    try:
        return np.array(x, dtype)
    except OverflowError:
        raise ValueError(
            f"the number {x} does not fit into 64 bits: send it with broadcast_object() or "
            "allgather_object()"
        ) from None


def _readable(x: Array) -> Array:
    """Return `x` as a NumPy array over the same memory, whose numbers are to be copied.

    Where NumPy cannot be used (dtypes that it lacks, arrays on a GPU), that is the array itself.
    """
    if hasattr(x, "resolve_conj"):  # torch, which conjugates and negates at the first use
        x = x.resolve_conj().resolve_neg()
    if gpu_of(x) is not None:
        return x
    host = adapters.to_host(x)
    if not isinstance(host, np.ndarray):
        return host if hasattr(host, "clone") else view(host)
    if type(host) is not np.ndarray:
        _native.Tensors([host], writable=False)  # a copy would no longer show what it refuses
    return host


def view(x: Array) -> NDArray[Any]:
    """Return `x` as a NumPy array over the same memory."""
    host = adapters.to_host(x)
    if isinstance(host, (np.ndarray, np.generic)) or not hasattr(host, "__dlpack__"):
        return np.asarray(host)
    return np.from_dlpack(host)


def new_array(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a new, uninitialized array in C order."""
    n_bytes = prod(shape) * dtype.itemsize
    if n_bytes < _LARGE or dtype.hasobject:
        return np.empty(shape, dtype)
    return MEMORY.arrays([n_bytes])[0].view(dtype).reshape(shape)


def copy_of(x: Array) -> Array:
    """Return a writable, dense copy, on the same device: a NumPy array where that is possible."""
    return _copied(x if type(x) is np.ndarray else _readable(_array(x, reduced=True)))


def _copied(host: Array) -> Array:
    if not isinstance(host, np.ndarray):
        return adapters.adapter_of(host).copy(host)
    copy = new_array(host.shape, host.dtype)
    copy[...] = host
    return copy


def _that_makes_copies(xs: Sequence[Array]) -> Adapter | None:
    """Return the common adapter of all `xs`, if there is one and it `makes_copies`."""
    kinds = set(map(type, xs))
    if len(kinds) != 1 or np.ndarray in kinds:
        return None
    adapter = adapters.adapter_of(xs[0])
    return adapter if adapter.makes_copies else None
