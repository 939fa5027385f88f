"""Operations among a set of ranks: reductions, gathers, broadcasts; direct and asynchronous."""

from __future__ import annotations

import array
import enum
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native, adapters
from horo_lite.compression import Compression, Compressor
from horo_lite.errors import MismatchError, NotInitializedError

if TYPE_CHECKING:
    from horo_lite.transports import Header, Transport

T = TypeVar("T")
P = ParamSpec("P")
Array = Any
"""A NumPy array, or anything that gives CPU memory through DLPack or the buffer protocol."""


class Op(enum.Enum):
    """How the ranks' values become one."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product

bytes_copied = 0
"""Bytes that were copied outside the core so far, because an array's memory was not dense."""


class Handle:
    """An operation in flight, to be given to `synchronize` or `poll`."""

    def __init__(self, name: str, job: _native.Job | None, finish: Callable[[], Any]) -> None:
        self.name = name
        self._job = job
        self._finish = finish

    def done(self) -> bool:
        return self._job is None or self._job.done()

    def wait(self) -> Any:
        if self._job is not None:
            self._job.wait()
        return self._finish()


class Group:
    """A set of ranks that call the same operations.

    Direct calls are matched by position: every rank makes the same ones in the same order.
    `…_async` calls are matched by name, in any order. What must be alike on all ranks (operation,
    shapes, dtypes, options, and names where given) is compared before anything moves; if it is not,
    every rank raises MismatchError, naming the first difference and who has what, and the group can
    be used further. A rank that dies, leaves or raises while others wait for it makes them raise
    PeerLostError, after which the group is of no more use.
    """

    def __init__(self, transport: Transport, async_transport: Transport | None = None) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self._async_transport = async_transport
        self._lock = threading.RLock()
        self._n_unnamed = 0
        self._pid = os.getpid()
        self._closed = False
        self._engine = self._new_engine()

    # Reductions.

    def allreduce(
        self,
        x: Array,
        op: Op = Average,
        *,
        name: str | None = None,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """A new array of `x`'s kind holds the op over all ranks' `x`; called by every rank.

        `x` has the same shape and dtype on every rank; numbers are reduced as float64. Averages of
        integers are cut towards zero. `prescale_factor` multiplies what this rank contributes,
        `postscale_factor` the result. Sums are formed in rank order in float32 (float64 for
        float64), so the bits are the same on all ranks and in every run.
        """
        (result,) = self.grouped_allreduce(
            [x],
            op,
            name=name,
            compression=compression,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return result

    def allreduce_(
        self,
        x: Array,
        op: Op = Average,
        *,
        name: str | None = None,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """`x` itself holds the op over all ranks' `x`, and is returned. See `allreduce`."""
        self.grouped_allreduce_(
            [x],
            op,
            name=name,
            compression=compression,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return x

    def grouped_allreduce(
        self,
        xs: Sequence[Array],
        op: Op = Average,
        *,
        name: str | None = None,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[Array]:
        """New arrays hold the op over all ranks' `xs`, reduced as one. See `allreduce`."""
        copies = [_copy(x) for x in xs]
        reduction = _Reduction(
            "allreduce", name, copies, op, compression, prescale_factor, postscale_factor
        )
        self._run(lambda transport: reduction.run(self, transport))
        return [_like(copy, x) for copy, x in zip(copies, xs, strict=True)]

    def grouped_allreduce_(
        self,
        xs: Sequence[Array],
        op: Op = Average,
        *,
        name: str | None = None,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[Array]:
        """`xs` themselves hold the op over all ranks' `xs`, reduced as one. See `allreduce`."""
        reduction = _Reduction(
            "allreduce", name, xs, op, compression, prescale_factor, postscale_factor
        )
        self._run(lambda transport: reduction.run(self, transport))
        return list(xs)

    def reducescatter(
        self,
        x: Array,
        op: Op = Average,
        *,
        name: str | None = None,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Array:
        """This rank's part of `allreduce(x)`, cut along the first dimension; called by every rank.

        The first `len(x) % size` ranks get one row more than the others.
        """
        copy = _copy(x)
        part = self._part_of(copy)
        reduction = _Reduction(
            "reducescatter", name, [copy], op, compression, prescale_factor, postscale_factor
        )
        self._run(lambda transport: reduction.run(self, transport))
        return _like(copy[part].copy(), x)

    def exchange(
        self,
        arrays: Sequence[Array],
        *,
        names: Sequence[str],
        label: str,
        op: Op = Average,
        compression: Compressor = Compression.none,
        weight: float = 1.0,
    ) -> None:
        """Every array holds, in place, the op over all ranks; called by every rank.

        `names` are compared, and messages use them; `label` says what this exchange is. With op
        Average, what a rank contributes is multiplied by its `weight` and the sum divided by the
        sum of all weights; a rank of weight 0 contributes nothing, whatever its arrays hold.
        """
        reduction = _Reduction("exchange", label, arrays, op, compression, names=names)
        reduction.weight = weight
        self._run(lambda transport: reduction.run(self, transport))

    # Moving data.

    def allgather(self, x: Array, *, name: str | None = None) -> Array:
        """A new array of all ranks' `x`, one after the other along the first dimension.

        Called by every rank; only the first dimension may differ between ranks. A number or a
        zero-dimensional array counts as one row.
        """
        return self._run(lambda transport: self._allgather(transport, x, name))

    def broadcast(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Array:
        """A new array of what `x` is on rank `root_rank`; same shape and dtype on every rank."""
        copy = _copy(x)
        self._run(lambda transport: self._broadcast(transport, [copy], root_rank, name))
        return _like(copy, x)

    def broadcast_(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Array:
        """`x` itself holds what it is on rank `root_rank`, and is returned."""
        self._run(lambda transport: self._broadcast(transport, [x], root_rank, name))
        return x

    def grouped_broadcast_(
        self, xs: Sequence[Array], root_rank: int = 0, *, names: Sequence[str] = ()
    ) -> list[Array]:
        """`xs` themselves hold what they are on rank `root_rank`; `names`, if given, are alike."""
        self._run(lambda transport: self._broadcast(transport, xs, root_rank, None, names))
        return list(xs)

    def alltoall(
        self,
        x: Array,
        splits: Sequence[int] | NDArray[Any] | None = None,
        *,
        name: str | None = None,
    ) -> Any:
        """The rows that all ranks had for this one, in rank order; called by every rank.

        `splits[r]` rows of `x`, in order, go to rank r; without `splits` each gets as many, and the
        array alone is returned. With `splits` the result is (array, rows received from each rank).
        """
        return self._run(lambda transport: self._alltoall(transport, x, splits, name))

    def barrier(self) -> None:
        """All ranks have called this."""
        label = "barrier"
        self._run(lambda transport: self._agree(transport, label, label, lambda: label))

    def broadcast_object(self, obj: T, root_rank: int = 0, *, name: str | None = None) -> T:
        """What `obj` is on rank `root_rank`: any picklable object; other ranks' is ignored."""
        return self._run(lambda transport: self._broadcast_object(transport, obj, root_rank, name))

    def allgather_object(self, obj: T, *, name: str | None = None) -> list[T]:
        """All ranks' `obj`, in rank order: any picklable object; called by every rank."""
        label = _label("allgather_object", name)
        return self._run(
            lambda transport: _unpickled(
                self._gather_bytes(transport, label, pickle.dumps(obj), lambda: label)
            )
        )

    # Asynchronous forms.

    def allreduce_async(self, /, x: Array, op: Op = Average, **options: Any) -> Handle:
        """`synchronize(handle)` returns what `allreduce` would. See `allreduce`."""
        copy = _copy(x)
        return self._reduce_async("allreduce", [copy], op, options, lambda: _like(copy, x))

    def allreduce_async_(self, /, x: Array, op: Op = Average, **options: Any) -> Handle:
        """`synchronize(handle)` returns `x`, changed; not to be touched until then."""
        return self._reduce_async("allreduce", [x], op, options, lambda: x)

    def grouped_allreduce_async(
        self, /, xs: Sequence[Array], op: Op = Average, **options: Any
    ) -> Handle:
        """`synchronize(handle)` returns what `grouped_allreduce` would."""
        copies = [_copy(x) for x in xs]
        return self._reduce_async(
            "allreduce",
            copies,
            op,
            options,
            lambda: [_like(copy, x) for copy, x in zip(copies, xs, strict=True)],
        )

    def grouped_allreduce_async_(
        self, /, xs: Sequence[Array], op: Op = Average, **options: Any
    ) -> Handle:
        """`synchronize(handle)` returns `xs`, changed; not to be touched until then."""
        return self._reduce_async("allreduce", xs, op, options, lambda: list(xs))

    def reducescatter_async(self, /, x: Array, op: Op = Average, **options: Any) -> Handle:
        """`synchronize(handle)` returns what `reducescatter` would."""
        copy = _copy(x)
        part = self._part_of(copy)
        return self._reduce_async(
            "reducescatter", [copy], op, options, lambda: _like(copy[part].copy(), x)
        )

    def exchange_async(
        self,
        arrays: Sequence[Array],
        *,
        names: Sequence[str],
        label: str,
        op: Op = Average,
        compression: Compressor = Compression.none,
        weight: float = 1.0,
    ) -> Handle:
        """As `exchange`, matched by `label`; hands off the arrays until it is synchronized."""
        reduction = _Reduction("exchange", label, arrays, op, compression, names=names)
        reduction.weight = weight
        return self._submit_reduction(reduction, lambda: None)

    def allgather_async(self, x: Array, *, name: str | None = None) -> Handle:
        """`synchronize(handle)` returns what `allgather` would."""
        return self._submit(
            "allgather", name, lambda transport, name: self._allgather(transport, x, name)
        )

    def broadcast_async(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Handle:
        """`synchronize(handle)` returns what `broadcast` would."""
        copy = _copy(x)

        def run(transport: Transport, name: str) -> Array:
            self._broadcast(transport, [copy], root_rank, name)
            return _like(copy, x)

        return self._submit("broadcast", name, run)

    def broadcast_async_(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Handle:
        """`synchronize(handle)` returns `x`, changed; not to be touched until then."""

        def run(transport: Transport, name: str) -> Array:
            self._broadcast(transport, [x], root_rank, name)
            return x

        return self._submit("broadcast", name, run)

    def alltoall_async(
        self,
        x: Array,
        splits: Sequence[int] | NDArray[Any] | None = None,
        *,
        name: str | None = None,
    ) -> Handle:
        """`synchronize(handle)` returns what `alltoall` would."""
        _splits(x, splits, self.size)
        return self._submit(
            "alltoall", name, lambda transport, name: self._alltoall(transport, x, splits, name)
        )

    def synchronize(self, handle: Handle) -> Any:
        """The operation is complete; its result, or what went wrong."""
        self.check_usable()
        return handle.wait()

    def poll(self, handle: Handle) -> bool:
        """Whether `synchronize(handle)` would return (or raise) at once."""
        self.check_usable()
        return handle.done()

    def close(self) -> None:
        """What all ranks have submitted is complete, and this rank has left."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._engine is not None:
            self._engine.drain()
        for transport in (self.transport, self._async_transport):
            if transport is not None:
                transport.leave()
                transport.close()

    # How direct calls run.

    def check_usable(self) -> None:
        """Nothing, if this process may use the group; NotInitializedError otherwise."""
        if os.getpid() != self._pid:
            raise NotInitializedError(
                f"process {os.getpid()} is a forked child of rank {self.rank} (a data loader?) and "
                "takes no part in the world: call collectives in the parent only"
            )
        if self._closed:
            raise NotInitializedError(
                "the world was shut down: call horo_lite.init() again before using it"
            )

    def _run(self, operation: Callable[[Transport], T]) -> T:
        self.check_usable()
        with self._lock:
            return operation(self.transport)

    def _agree(
        self,
        transport: Transport,
        label: str,
        contract: object,
        describe: Callable[[], str],
        count: int = 0,
        weight: float = 1.0,
    ) -> list[Header]:
        """Everyone's header, once all ranks have been found to do the same thing."""
        digest = _native.hash64(repr(contract).encode())
        headers = transport.agree(digest, count, weight, label=label)
        if any(header.digest != digest for header in headers):
            sizes_differ = transport.agree(0, len(text := describe().encode()), label=label)
            texts = exchange_bytes(transport, text, [header.count for header in sizes_differ])
            raise MismatchError(explain(label, [text.decode() for text in texts]))
        return headers

    def _gather_bytes(
        self, transport: Transport, label: str, data: bytes, describe: Callable[[], str]
    ) -> list[bytes]:
        headers = self._agree(transport, label, label, describe, count=len(data))
        return exchange_bytes(transport, data, [header.count for header in headers])

    def _check_root(self, root_rank: int) -> None:
        if not 0 <= root_rank < self.size:
            raise ValueError(
                f"root_rank is {root_rank}, but the ranks are 0 to {self.size - 1} here"
            )

    def _part_of(self, x: Array) -> slice:
        if not x.shape:
            raise ValueError("reducescatter needs an array with at least one dimension")
        rows, more = divmod(x.shape[0], self.size)
        begin = self.rank * rows + min(self.rank, more)
        return slice(begin, begin + rows + (self.rank < more))

    def _allgather(self, transport: Transport, x: Array, name: str | None) -> Array:
        label = _label("allgather", name)
        mine = _rows(x)
        (own,) = _tensors([mine], writable=False)
        row = f"{own.describe(0).split('[')[0]} rows of {list(mine.shape[1:])}"
        headers = self._agree(
            transport, label, (label, row), lambda: f"{label}\n{row}", count=len(mine)
        )
        ends = np.cumsum([header.count for header in headers]).tolist()
        everyone = np.empty((ends[-1], *mine.shape[1:]), mine.dtype)
        parts = [
            everyone[end - header.count : end] for header, end in zip(headers, ends, strict=True)
        ]
        parts[self.rank][...] = mine
        transport.allgather(
            _native.Tensors([parts[self.rank]]), [_native.Tensors([part]) for part in parts]
        )
        return _like(everyone, x)

    def _broadcast(
        self,
        transport: Transport,
        xs: Sequence[Array],
        root_rank: int,
        name: str | None,
        names: Sequence[str] = (),
    ) -> None:
        self._check_root(root_rank)
        label = _label("broadcast", name)
        staged = _Staged(xs)

        def describe() -> str:
            return "\n".join([label, f"root_rank {root_rank}", *staged.describe(names)])

        contract = (label, root_rank, staged.tensors.signature, tuple(names))
        headers = self._agree(transport, label, contract, describe, count=staged.tensors.layout)
        if any(header.count != headers[0].count for header in headers):
            staged.use_c_order()
        transport.broadcast(staged.tensors, root_rank)
        staged.write_back()

    def _alltoall(
        self,
        transport: Transport,
        x: Array,
        splits: Sequence[int] | NDArray[Any] | None,
        name: str | None,
    ) -> Any:
        label = _label("alltoall", name)
        counts = _splits(x, splits, self.size)
        mine = _rows(x)
        (own,) = _tensors([mine], writable=False)
        row = f"{own.describe(0).split('[')[0]} rows of {list(mine.shape[1:])}"
        self._agree(transport, label, (label, row), lambda: f"{label}\n{row}")
        everyone = exchange_bytes(transport, counts.tobytes(), [counts.nbytes] * self.size)
        table = np.array([np.frombuffer(one, np.int64) for one in everyone])
        received = table[:, self.rank]
        result = np.empty((int(received.sum()), *mine.shape[1:]), mine.dtype)
        outgoing = np.split(mine, np.cumsum(counts)[:-1])
        incoming = np.split(result, np.cumsum(received)[:-1])
        incoming[self.rank][...] = outgoing[self.rank]
        row_bytes = int(np.prod(mine.shape[1:], dtype=np.int64)) * mine.dtype.itemsize
        transport.alltoall(
            [_native.Tensors([part], writable=False) for part in outgoing],
            [_native.Tensors([part]) for part in incoming],
            (table * row_bytes).tolist(),
        )
        if splits is None:
            return _like(result, x)
        return _like(result, x), received.copy()

    def _broadcast_object(
        self, transport: Transport, obj: T, root_rank: int, name: str | None
    ) -> T:
        self._check_root(root_rank)
        label = _label("broadcast_object", name)
        data = pickle.dumps(obj) if self.rank == root_rank else b""
        headers = self._agree(
            transport,
            label,
            (label, root_rank),
            lambda: f"{label}\nroot_rank {root_rank}",
            count=len(data),
        )
        if self.size == 1:
            return obj
        memory = np.empty(headers[root_rank].count, np.uint8)
        if self.rank == root_rank:
            memory[...] = np.frombuffer(data, np.uint8)
        transport.broadcast(_native.Tensors([memory]), root_rank)
        return obj if self.rank == root_rank else pickle.loads(memory.tobytes())

    # How asynchronous calls run.

    def _new_name(self, kind: str, name: str | None) -> str:
        """Unnamed operations are numbered: they match if all ranks submit them in one order."""
        if name is not None:
            return _label(kind, name)
        self._n_unnamed += 1
        return f"{kind} number {self._n_unnamed}"

    def _new_engine(self) -> _native.Engine | None:
        """The thread that runs asynchronous operations; on every rank, since all must meet."""
        direct, other = self.transport, self._async_transport
        if other is None or self.size == 1:
            return None
        from horo_lite.transports.shm import ShmTransport

        if isinstance(direct, ShmTransport) and isinstance(other, ShmTransport):
            return _native.Engine.over_shm(other.group, direct.group, explain)
        from horo_lite.transports.mpi import MpiChannel, MpiTransport

        assert isinstance(other, MpiTransport)
        return _native.Engine.over_channel(MpiChannel(other), explain, other.thread_multiple)

    def _reduce_async(
        self,
        kind: str,
        arrays: Sequence[Array],
        op: Op,
        options: dict[str, Any],
        finish: Callable[[], Any],
    ) -> Handle:
        name = self._new_name(kind, options.pop("name", None))
        return self._submit_reduction(
            _Reduction(kind, None, arrays, op, label=name, **options), finish
        )

    def _submit_reduction(self, reduction: _Reduction, finish: Callable[[], Any]) -> Handle:
        self.check_usable()
        reduction.prepare()
        layout = reduction.staged.tensors.layout
        transport = self._async_transport
        if self._engine is None or transport is None:
            self._run(lambda transport: reduction.run(self, transport))
            return Handle(reduction.label, None, finish)
        digest = _native.hash64(repr((reduction.contract(), layout)).encode())

        def describe() -> str:
            order = "C order" if layout == 0 else f"another order than C ({layout:x})"
            return f"{reduction.describe()}\nmemory in {order}"

        from horo_lite.transports.shm import ShmTransport

        if isinstance(transport, ShmTransport):
            job = self._engine.submit_allreduce(
                transport.group,
                reduction.label,
                digest,
                reduction.staged.tensors,
                reduction.op.value,
                reduction.compression.wire,
                *reduction.factors(None),
                reduction.op is Average,
                reduction.weight,
                describe,
            )
        else:
            job = self._engine.submit_call(
                reduction.label,
                digest,
                lambda weights: reduction.move(transport, weights),
                reduction.weight,
                describe,
            )

        def complete() -> Any:
            reduction.complete()
            return finish()

        return Handle(reduction.label, job, complete)

    def _submit(self, kind: str, name: str | None, run: Callable[[Transport, str], Any]) -> Handle:
        self.check_usable()
        if self._engine is None or self._async_transport is None:
            result = self._run(lambda transport: run(transport, name or kind))
            return Handle(kind, None, lambda: result)
        transport = self._async_transport
        label = self._new_name(kind, name)
        job = self._engine.submit_call(
            label, 0, lambda weights: run(transport, name or label), 1.0, lambda: label
        )
        return Handle(label, job, job.value)


class _Reduction:
    """One all-reduce: what was asked for, the memory it works on, and how to say it."""

    def __init__(
        self,
        kind: str,
        name: str | None,
        arrays: Sequence[Array],
        op: Op,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        names: Sequence[str] = (),
        label: str | None = None,
    ) -> None:
        if not isinstance(op, Op):
            raise ValueError(f"op is one of {', '.join(f'hvd.{o.name}' for o in Op)}, not {op!r}")
        if not isinstance(compression, Compressor):
            raise ValueError(
                f"compression is hvd.Compression.none, .fp16 or .bf16, not {compression!r}"
            )
        self.kind = kind
        self.label = label or _label(kind, name)
        self.names = names
        self.op = op
        self.compression = compression
        self.prescale = float(prescale_factor)
        self.postscale = float(postscale_factor)
        self.weight = 1.0
        self.staged = _Staged(arrays)

    def contract(self) -> object:
        """Everything that must be alike on all ranks."""
        return (
            self.label,
            self.op.value,
            self.compression.name,
            self.compression.wire,
            self.prescale,
            self.postscale,
            self.staged.tensors.signature,
            tuple(self.names),
        )

    def describe(self) -> str:
        options = [
            f"op {self.op.name}",
            f"compression {self.compression.name}",
            f"prescale_factor {self.prescale}, postscale_factor {self.postscale}",
        ]
        return "\n".join([self.label, *options, *self.staged.describe(self.names)])

    def run(self, group: Group, transport: Transport) -> None:
        self.prepare()
        tensors = self.staged.tensors
        headers = group._agree(
            transport,
            self.label,
            self.contract(),
            self.describe,
            count=tensors.layout,
            weight=self.weight,
        )
        if any(header.count != headers[0].count for header in headers):
            self.staged.use_c_order()
        self.move(transport, [header.weight for header in headers])
        self.complete()

    def prepare(self) -> None:
        self._hook(type(self.compression).prepare, Compressor.prepare)

    def complete(self) -> None:
        self._hook(type(self.compression).restore, Compressor.restore)
        self.staged.write_back()

    def move(self, transport: Transport, weights: Sequence[float]) -> None:
        prescale, scale, divisor = self.factors(weights)
        transport.allreduce(
            self.staged.tensors,
            op=self.op.value,
            wire=self.compression.wire,
            prescale=prescale,
            scale=scale,
            divisor=divisor,
        )

    def factors(self, weights: Sequence[float] | None) -> tuple[float, float, float]:
        """(prescale, scale, divisor); `weights` None leaves the sum of weights to the engine."""
        if self.op is not Average:
            return self.prescale, self.postscale, 1.0
        total = 1.0 if weights is None else sum(weights)
        return self.prescale * self.weight, self.postscale, total or 1.0

    def _hook(self, method: Callable[..., None], default: Callable[..., None]) -> None:
        if method is not default:
            for i, x in enumerate(self.staged.arrays):
                name = self.names[i] if self.names else f"{self.label}[{i}]"
                method(self.compression, name, _view(x))


class _Staged:
    """A list of arrays as dense memory: themselves, or copies where they are not dense."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = list(arrays)
        self._originals: dict[int, NDArray[Any]] = {}
        try:
            self.tensors = _native.Tensors(self.arrays)
        except (TypeError, BufferError):  # something that needs its adapter, or is wrong
            self.tensors = _native.Tensors([_exportable(x) for x in self.arrays])
        if strided := self.tensors.strided:
            self._copy(strided)

    def use_c_order(self) -> None:
        """Ranks whose memory orders differ meet in C order."""
        self._copy([i for i, x in enumerate(self.arrays) if not _view(x).flags.c_contiguous])

    def _copy(self, indices: Sequence[int]) -> None:
        global bytes_copied
        for i in indices:
            original = _view(self.arrays[i])
            self._originals.setdefault(i, original)
            self.arrays[i] = np.array(original, order="C")
            bytes_copied += original.nbytes
        self.tensors = _native.Tensors([_exportable(x) for x in self.arrays])

    def write_back(self) -> None:
        for i, original in self._originals.items():
            original[...] = self.arrays[i]

    def describe(self, names: Sequence[str]) -> list[str]:
        return [
            f"tensor {repr(names[i]) if i < len(names) else i}: {self.tensors.describe(i)}"
            for i in range(len(self.arrays))
        ]


def explain(label: str, descriptions: Sequence[str]) -> str:
    """The text of a MismatchError, from one description a rank: the first line that differs."""
    lines = [description.split("\n") for description in descriptions]
    longest = max(map(len, lines))
    for i in range(longest):
        said = [line[i] if i < len(line) else "nothing more" for line in lines]
        if len(set(said)) > 1:
            break
    whose: dict[str, list[int]] = {}
    for rank, text in enumerate(said):
        whose.setdefault(text, []).append(rank)
    who = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in whose.items()
    )
    return (
        f"the ranks do not agree in {label}. First difference: {who}. "
        "Every rank must make the same calls in the same order with the same options."
    )


def _label(kind: str, name: str | None) -> str:
    return kind if name is None else f"{kind} '{name}'"


def _exportable(x: Array) -> Array:
    """`x` as something whose memory the core can read."""
    if isinstance(x, (np.ndarray, memoryview, array.array, bytearray)):
        return x
    return adapters.to_host(x)


def _view(x: Array) -> NDArray[Any]:
    """`x` as a NumPy array over the same memory."""
    host = _exportable(x)
    if isinstance(host, (np.ndarray, np.generic)) or not hasattr(host, "__dlpack__"):
        return np.asarray(host)
    return np.from_dlpack(host)


def _copy(x: Array) -> Array:
    """A writable, dense copy, to be reduced in place and given back through `_like`."""
    if isinstance(x, (bool, int, float)):
        return np.array(x, np.float64)
    host = _exportable(x)
    if isinstance(host, (np.ndarray, np.generic)):
        return np.array(host, order="C")
    if hasattr(host, "clone"):  # torch, where NumPy has no such dtype
        return host.clone(memory_format=_contiguous_format(host))
    return np.array(_view(host), order="C")


def _contiguous_format(tensor: Any) -> Any:
    import sys

    return sys.modules["torch"].contiguous_format


def _like(result: Array, x: Array) -> Array:
    if isinstance(x, (bool, int, float)) and not isinstance(x, np.generic):
        return float(result) if result.ndim == 0 else result
    return adapters.from_numpy(result, x) if isinstance(result, np.ndarray) else result


def _rows(x: Array) -> NDArray[Any]:
    rows = np.asarray(x, np.float64) if isinstance(x, (bool, int, float)) else _view(x)
    return np.ascontiguousarray(rows.reshape(1) if rows.ndim == 0 else rows)


def _tensors(arrays: Sequence[Array], writable: bool) -> tuple[_native.Tensors]:
    return (_native.Tensors(arrays, writable=writable),)


def _splits(x: Array, splits: Sequence[int] | NDArray[Any] | None, size: int) -> NDArray[np.int64]:
    rows = len(_rows(x))
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits needs a multiple of {size} rows, not {rows}")
        return np.full(size, rows // size, np.int64)
    counts = np.asarray(splits, np.int64)
    if counts.shape != (size,) or (counts < 0).any() or counts.sum() != rows:
        raise ValueError(
            f"splits must be {size} numbers of rows, none negative, that add up to {rows}; "
            f"they are {np.asarray(splits).tolist()}"
        )
    return counts


def exchange_bytes(transport: Transport, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
    """What every rank has to say, in rank order; all know the sizes."""
    parts = [np.empty(size, np.uint8) for size in sizes]
    parts[transport.rank] = np.frombuffer(mine, np.uint8)
    tensors = [_native.Tensors([part], writable=False) for part in parts]
    transport.allgather(tensors[transport.rank], tensors)
    return [part.tobytes() for part in parts]


def _unpickled(data: Sequence[bytes]) -> list[Any]:
    return [pickle.loads(one) for one in data]


# The same for the world's group, as functions.


def _of_world(method: Callable[Concatenate[Group, P], T]) -> Callable[P, T]:
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        from horo_lite.world import world

        return method(world().group, *args, **kwargs)

    return call


allreduce = _of_world(Group.allreduce)
allreduce_ = _of_world(Group.allreduce_)
allreduce_async = _of_world(Group.allreduce_async)
allreduce_async_ = _of_world(Group.allreduce_async_)
grouped_allreduce = _of_world(Group.grouped_allreduce)
grouped_allreduce_ = _of_world(Group.grouped_allreduce_)
grouped_allreduce_async = _of_world(Group.grouped_allreduce_async)
grouped_allreduce_async_ = _of_world(Group.grouped_allreduce_async_)
reducescatter = _of_world(Group.reducescatter)
reducescatter_async = _of_world(Group.reducescatter_async)
allgather = _of_world(Group.allgather)
allgather_async = _of_world(Group.allgather_async)
broadcast = _of_world(Group.broadcast)
broadcast_ = _of_world(Group.broadcast_)
broadcast_async = _of_world(Group.broadcast_async)
broadcast_async_ = _of_world(Group.broadcast_async_)
alltoall = _of_world(Group.alltoall)
alltoall_async = _of_world(Group.alltoall_async)
barrier = _of_world(Group.barrier)
broadcast_object = _of_world(Group.broadcast_object)
allgather_object = _of_world(Group.allgather_object)
synchronize = _of_world(Group.synchronize)
poll = _of_world(Group.poll)
