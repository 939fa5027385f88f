"""Operations among a set of ranks: reductions, gathers, broadcasts; direct and asynchronous."""

from __future__ import annotations

import enum
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from math import prod
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.agreement import Recipe, agree, digest_of, exchange_bytes, explain, needs_all
from horo_lite.arrays import Array, GpuArrays, HostArrays, copy_of, gpu_of
from horo_lite.compression import Compression, Compressor
from horo_lite.errors import DeviceError, NotInitializedError
from horo_lite.join import (
    recipe_of_allgather,
    recipe_of_barrier,
    recipe_of_broadcast,
    recipe_of_reduction,
)

if TYPE_CHECKING:
    from horo_lite.transports import Transport
    from horo_lite.transports.nccl import Lane, NcclTransport
    from horo_lite.transports.shm import SharedMemory, ShmTransport
    from horo_lite.transports.watch import Meetings, Watch

T = TypeVar("T")
P = ParamSpec("P")


class Op(enum.Enum):
    """How the ranks' values become one."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product


class Handle:
    """An operation in flight, to be given to `synchronize` or `poll`."""

    def __init__(self, name: str, job: _native.Job | None, finish: Callable[[], Any]) -> None:
        self.name = name
        self._job = job
        self._finish = finish

    def done(self) -> bool:
        return self._job is None or self._job.done()

    def wait(self, beside: bool = False) -> Any:
        if self._job is not None:
            self._job.wait(beside)
        return self._finish()


class Beginner(Protocol):
    """What counts something that all ranks must count alike."""

    def begin_anew(self) -> None:
        """All ranks have joined, from wherever they were: it counts from the beginning."""


class Group:
    """A set of ranks that call the same operations.

    Direct calls are matched by position: every rank makes the same ones in the same order.
    `…_async` calls are matched by name, in any order. What must be alike on all ranks (operation,
    shapes, dtypes, options, and names where given) is compared before anything moves; if it is not,
    every rank raises MismatchError, naming the first difference and who has what, and the group can
    be used further. A rank that dies, leaves or raises while others wait for it makes them raise
    PeerLostError, after which the group is of no more use.
    """

    def __init__(
        self,
        transport: Transport,
        async_transport: Transport | None = None,
        watch_transport: Transport | None = None,
    ) -> None:
        own = (transport, async_transport, watch_transport)
        self._own = [one for one in own if one is not None]
        self.transport = transport
        self._meetings: Meetings | None = None
        if watch_transport is not None and transport.size > 1:
            from horo_lite.transports.watch import Meetings

            self._meetings = Meetings(transport)
            self.transport = cast("Transport", self._meetings)
        self.rank = transport.rank
        self.size = transport.size
        self._number = transport.ranks[transport.rank]
        self._async_transport = async_transport
        self._watch_transport = watch_transport
        self._watch: Watch | None = None
        self._lanes: tuple[Lane, Lane] | None = None
        self._lock = threading.RLock()
        self._unnamed: Counter[str] = Counter()
        self._n_failed = 0
        self._counting = threading.Lock()
        self.beginners: WeakSet[Beginner] = WeakSet()
        self.kept: dict[object, Any] = {}
        """What functions keep from call to call, each under a key of its own."""
        self._pid = os.getpid()
        self._closed = False
        self._engine = self._new_engine(transport, async_transport)

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
        names: Sequence[str] = (),
        weight: float | None = None,
    ) -> list[Array]:
        """New arrays hold the op over all ranks' `xs`, reduced as one. See `allreduce`.

        `names` of the arrays, if given, are alike on all ranks; `weight` as for `exchange`.
        """
        copies = [copy_of(x) for x in xs]
        memory = self._memory(copies, fresh=True)
        reduction = _Reduction(
            "allreduce",
            name,
            memory,
            op,
            compression,
            prescale_factor,
            postscale_factor,
            names=names,
            weight=weight,
        )
        self._reduce(reduction)
        return [memory.result(copy, x) for copy, x in zip(copies, xs, strict=True)]

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
        memory = self._memory(xs)
        reduction = _Reduction(
            "allreduce", name, memory, op, compression, prescale_factor, postscale_factor
        )
        self._reduce(reduction)
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
        copy = copy_of(x)
        part = self.part_of(copy)
        memory = self._memory([copy], fresh=True)
        reduction = _Reduction(
            "reducescatter", name, memory, op, compression, prescale_factor, postscale_factor
        )
        self._reduce(reduction)
        return memory.part(copy, part, x)

    def exchange(
        self,
        arrays: Sequence[Array],
        *,
        names: Sequence[str],
        label: str,
        op: Op = Average,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        weight: float | None = None,
        shared: SharedMemory | None = None,
        follows: bool = True,
    ) -> bool:
        """Every array holds, in place, the op over all ranks; called by every rank.

        `names` are compared, and messages use them; `label` says what this exchange is. With op
        Average, what a rank contributes is multiplied by its `weight` (given on every rank or on
        none) and the sum divided by the sum of all weights; a rank of weight 0 contributes nothing,
        whatever its arrays hold.

        Arrays that all lie in `shared`, at the same place on every rank, are reduced where they
        lie, if they travel as they are.

        A rank that passes `follows=False`, where `compares_later`, waits to hear what the others
        do. If all pass it, nothing is exchanged, and the result is False.
        """
        memory = self._memory(arrays)
        reduction = _Reduction(
            "exchange",
            label,
            memory,
            op,
            compression,
            prescale_factor,
            postscale_factor,
            names=names,
            weight=weight,
        )
        reduction.look_in(shared)
        return self._reduce(reduction, follows)

    def compares_later(self, gpu: int | None) -> bool:
        """Whether reductions of that GPU's arrays return before the ranks have been compared."""
        lane = self._lane(gpu)
        if lane is None or self._watch is None:
            return False
        from horo_lite.transports.nccl import NcclTransport

        return self._run(lambda transport: isinstance(transport, NcclTransport), lane)

    # Moving data.

    def allgather(self, x: Array, *, name: str | None = None) -> Array:
        """A new array of all ranks' `x`, one after the other along the first dimension.

        Called by every rank; only the first dimension may differ between ranks. A number or a
        zero-dimensional array counts as one row.
        """
        rows = self._rows(x)
        return self._run(lambda t: self._allgather(t, rows, x, name), rows.lane)()

    def broadcast(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Array:
        """A new array of what `x` is on rank `root_rank`; same shape and dtype on every rank."""
        memory = self._memory([copy := copy_of(x)], fresh=True)
        self._run(lambda t: self._broadcast(t, memory, root_rank, name), memory.lane)()
        return memory.result(copy, x)

    def broadcast_(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Array:
        """`x` itself holds what it is on rank `root_rank`, and is returned."""
        memory = self._memory([x])
        self._run(lambda t: self._broadcast(t, memory, root_rank, name), memory.lane)()
        return x

    def grouped_broadcast_(
        self, xs: Sequence[Array], root_rank: int = 0, *, names: Sequence[str] = ()
    ) -> list[Array]:
        """`xs` themselves hold what they are on rank `root_rank`; `names`, if given, are alike."""
        memory = self._memory(xs)
        self._run(lambda t: self._broadcast(t, memory, root_rank, None, names), memory.lane)()
        return list(xs)

    def grouped_broadcast(
        self, xs: Sequence[Array], root_rank: int = 0, *, names: Sequence[str] = ()
    ) -> list[Array]:
        """New arrays of what `xs` are on rank `root_rank`; `names`, if given, are alike."""
        memory = self._memory(copies := [copy_of(x) for x in xs], fresh=True)
        self._run(lambda t: self._broadcast(t, memory, root_rank, None, names), memory.lane)()
        return [memory.result(copy, x) for copy, x in zip(copies, xs, strict=True)]

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
        counts = _splits(_n_rows(x), splits, self.size)
        rows = self._rows(x)
        finish = self._run(lambda t: self._alltoall(t, rows, x, counts, name), rows.lane)
        result, received = finish()
        return result if splits is None else (result, received)

    def barrier(self) -> None:
        """All ranks have called this."""
        self._run(
            lambda transport: agree(
                transport, "barrier", "barrier", lambda: "barrier", recipe=recipe_of_barrier
            )
        )

    def agree(self, label: str, what: str) -> None:
        """All ranks have called this with the same texts; MismatchError if they were not."""
        self._run(lambda transport: agree(transport, label, (label, what), lambda: what))

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
        memory = self._memory([copy := copy_of(x)], fresh=True, asynchronous=True)
        return self._reduce_async("allreduce", memory, op, options, lambda: memory.result(copy, x))

    def allreduce_async_(self, /, x: Array, op: Op = Average, **options: Any) -> Handle:
        """`synchronize(handle)` returns `x`, changed; not to be touched until then."""
        memory = self._memory([x], asynchronous=True)
        return self._reduce_async("allreduce", memory, op, options, lambda: x)

    def grouped_allreduce_async(
        self, /, xs: Sequence[Array], op: Op = Average, **options: Any
    ) -> Handle:
        """`synchronize(handle)` returns what `grouped_allreduce` would."""
        copies = [copy_of(x) for x in xs]
        memory = self._memory(copies, fresh=True, asynchronous=True)
        return self._reduce_async(
            "allreduce",
            memory,
            op,
            options,
            lambda: [memory.result(copy, x) for copy, x in zip(copies, xs, strict=True)],
        )

    def grouped_allreduce_async_(
        self, /, xs: Sequence[Array], op: Op = Average, **options: Any
    ) -> Handle:
        """`synchronize(handle)` returns `xs`, changed; not to be touched until then."""
        memory = self._memory(xs, asynchronous=True)
        return self._reduce_async("allreduce", memory, op, options, lambda: list(xs))

    def reducescatter_async(self, /, x: Array, op: Op = Average, **options: Any) -> Handle:
        """`synchronize(handle)` returns what `reducescatter` would."""
        copy = copy_of(x)
        part = self.part_of(copy)
        memory = self._memory([copy], fresh=True, asynchronous=True)
        return self._reduce_async(
            "reducescatter", memory, op, options, lambda: memory.part(copy, part, x)
        )

    def exchange_async(
        self,
        arrays: Sequence[Array],
        *,
        names: Sequence[str],
        label: str,
        op: Op = Average,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        weight: float | None = None,
        shared: SharedMemory | None = None,
    ) -> Handle:
        """As `exchange`, matched by `label`; hands off the arrays until it is synchronized."""
        memory = self._memory(arrays, asynchronous=True)
        reduction = _Reduction(
            "exchange",
            label,
            memory,
            op,
            compression,
            prescale_factor,
            postscale_factor,
            names=names,
            weight=weight,
        )
        reduction.look_in(shared)
        return self._submit_reduction(reduction, lambda: None)

    def allgather_async(self, x: Array, *, name: str | None = None) -> Handle:
        """`synchronize(handle)` returns what `allgather` would."""
        label = self._new_name("allgather", name)
        return self._submit_allgather(label, name, self._rows(x, asynchronous=True), x)

    def broadcast_async(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Handle:
        """`synchronize(handle)` returns what `broadcast` would."""
        memory = self._memory([copy := copy_of(x)], fresh=True, asynchronous=True)
        label = self._new_name("broadcast", name)
        return self._submit_broadcast(
            label, name, memory, root_rank, lambda: memory.result(copy, x)
        )

    def broadcast_async_(self, x: Array, root_rank: int = 0, *, name: str | None = None) -> Handle:
        """`synchronize(handle)` returns `x`, changed; not to be touched until then."""
        memory = self._memory([x], asynchronous=True)
        label = self._new_name("broadcast", name)
        return self._submit_broadcast(label, name, memory, root_rank, lambda: x)

    def alltoall_async(
        self,
        x: Array,
        splits: Sequence[int] | NDArray[Any] | None = None,
        *,
        name: str | None = None,
    ) -> Handle:
        """`synchronize(handle)` returns what `alltoall` would."""
        counts = _splits(_n_rows(x), splits, self.size)
        rows = self._rows(x, asynchronous=True)

        label = self._new_name("alltoall", name)

        def run(transport: Transport) -> Callable[[], Any]:
            finish = self._alltoall(transport, rows, x, counts, name or label)
            return finish if splits is not None else lambda: finish()[0]

        return self._submit(label, rows, run, needs_all(label))

    def synchronize(self, handle: Handle, *, beside: bool = False) -> Any:
        """The operation is complete; its result, or what went wrong.

        `beside`: in a thread other than the one that trains and goes on meanwhile. On every rank
        one such thread at a time waits, for the same operations in the same order.
        """
        self.check_usable()
        try:
            return handle.wait(beside)
        except DeviceError:
            if self._watch is not None:
                self._watch.raise_common()
            raise

    def poll(self, handle: Handle) -> bool:
        """Whether `synchronize(handle)` would return (or raise) at once."""
        self.check_usable()
        return handle.done()

    def close(self, reason: str = "its program ended") -> None:
        """What all ranks have submitted is complete, and this rank has left for that reason."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            if self._engine is not None:
                self._engine.drain()
            if self._watch is not None:
                self._watch.close()
        finally:
            for lane in self._lanes or ():
                lane.close()
            for transport in self.transports():
                transport.leave(reason)
                transport.close()

    def transports(self) -> list[Transport]:
        """All that it was made of."""
        return list(self._own)

    @property
    def carrier(self) -> str:
        """The name of the transport that arrays take: a GPU's, once one is connected."""
        found = self._lanes[0].found if self._lanes is not None else None
        return self.transport.name if found is None else found.name

    # How direct calls run.

    def check_usable(self) -> None:
        """Nothing, if this process may use the group; NotInitializedError otherwise."""
        if os.getpid() != self._pid:
            raise NotInitializedError(
                f"process {os.getpid()} is a forked child of rank {self._number} (a data loader?) "
                "and takes no part in the world: call collectives in the parent only"
            )
        if self._closed:
            raise NotInitializedError(
                "the world was shut down: call horo_lite.init() again before using it"
            )

    def _run(self, operation: Callable[[Transport], T], lane: Lane | None = None) -> T:
        self.check_usable()
        with self._lock:
            if lane is None:
                return operation(self.transport)
            if self._watch is not None:
                self._watch.check()
            try:
                return operation(lane.transport())
            except DeviceError:
                if self._watch is not None:
                    self._watch.raise_common()
                raise

    def _lane(self, gpu: int | None, asynchronous: bool = False) -> Lane | None:
        """How a GPU takes part in this group; None for arrays in the host's memory."""
        if gpu is None:
            return None
        if self._lanes is None:
            from horo_lite.transports.nccl import Lane
            from horo_lite.transports.watch import Watch

            allowed = self._watch_transport is not None
            other = self._async_transport or self.transport
            lanes = Lane(self.transport, gpu, allowed), Lane(other, gpu, allowed)
            if self._watch_transport is not None and self._meetings is not None:
                self._watch = Watch(self._watch_transport, self._meetings, lanes)
                for lane in lanes:
                    lane.watch = self._watch
            self._lanes = lanes
        lane = self._lanes[asynchronous]
        if lane.index != gpu:
            raise ValueError(
                f"the arrays lie on cuda:{gpu}, but rank {self._number} has exchanged arrays of "
                f"cuda:{lane.index} before: a rank uses one GPU"
            )
        return lane

    def _memory(
        self, arrays: Sequence[Array], *, fresh: bool = False, asynchronous: bool = False
    ) -> HostArrays | GpuArrays:
        lane = self._lane(gpu_of(arrays[0]) if len(arrays) else None, asynchronous)
        return HostArrays(arrays) if lane is None else GpuArrays(arrays, lane, fresh=fresh)

    def _rows(self, x: Array, asynchronous: bool = False) -> HostArrays | GpuArrays:
        lane = self._lane(gpu_of(x), asynchronous)
        return HostArrays.of_rows(x) if lane is None else GpuArrays.of_rows(x, lane)

    def _reduce(self, reduction: _Reduction, follows: bool = True) -> bool:
        return self._run(
            lambda transport: reduction.run(transport, self._watch, follows), reduction.memory.lane
        )

    def _gather_bytes(
        self, transport: Transport, label: str, data: bytes, describe: Callable[[], str]
    ) -> list[bytes]:
        headers = agree(transport, label, label, describe, count=len(data))
        return exchange_bytes(transport, data, [header.count for header in headers])

    def _check_root(self, root_rank: int) -> None:
        if not 0 <= root_rank < self.size:
            raise ValueError(
                f"root_rank is {root_rank}, but the ranks are 0 to {self.size - 1} here"
            )

    def part_of(self, x: Array) -> slice:
        """The rows of `x` that reducescatter leaves to this rank."""
        if not x.shape:
            raise ValueError("reducescatter needs an array with at least one dimension")
        rows, more = divmod(x.shape[0], self.size)
        begin = self.rank * rows + min(self.rank, more)
        return slice(begin, begin + rows + (self.rank < more))

    # Each of these queues its work and returns what the caller's thread does once it is there.

    def _allgather(
        self, transport: Transport, rows: HostArrays | GpuArrays, x: Array, name: str | None
    ) -> Callable[[], Array]:
        label = _label("allgather", name)
        n_rows, row = _rows_and_row(rows)
        headers = agree(
            transport,
            label,
            (label, row),
            lambda: f"{label}\n{row}",
            count=n_rows,
            recipe=recipe_of_allgather(rows, name),
        )
        ends = np.cumsum([header.count for header in headers]).tolist()
        everyone, whole = rows.empty(ends[-1])
        parts = [
            whole.rows(end - header.count, end) for header, end in zip(headers, ends, strict=True)
        ]
        rows.begin()
        rows.copy(rows.tensors, parts[self.rank])
        transport.allgather(parts[self.rank], parts)

        def finish() -> Array:
            rows.end()
            return rows.result(everyone, x)

        return finish

    def _broadcast(
        self,
        transport: Transport,
        memory: HostArrays | GpuArrays,
        root_rank: int,
        name: str | None,
        names: Sequence[str] = (),
    ) -> Callable[[], None]:
        self._check_root(root_rank)
        label = _label("broadcast", name)

        def describe() -> str:
            return "\n".join([label, f"root_rank {root_rank}", *memory.describe(names)])

        contract = (label, root_rank, memory.tensors.signature, tuple(names))
        headers = agree(
            transport,
            label,
            contract,
            describe,
            count=memory.tensors.layout,
            recipe=recipe_of_broadcast(memory, root_rank, transport.ranks, name, names),
        )
        if any(header.count != headers[0].count for header in headers):
            memory.use_c_order()
        memory.begin()
        transport.broadcast(memory.tensors, root_rank)

        def finish() -> None:
            memory.end()
            memory.write_back()

        return finish

    def _alltoall(
        self,
        transport: Transport,
        rows: HostArrays | GpuArrays,
        x: Array,
        counts: NDArray[np.int64],
        name: str | None,
    ) -> Callable[[], tuple[Array, NDArray[np.int64]]]:
        label = _label("alltoall", name)
        _, row = _rows_and_row(rows)
        agree(transport, label, (label, row), lambda: f"{label}\n{row}")
        everyone = exchange_bytes(transport, counts.tobytes(), [counts.nbytes] * self.size)
        table = np.array([np.frombuffer(one, np.int64) for one in everyone])
        received = table[:, self.rank].copy()
        result, whole = rows.empty(int(received.sum()))
        outgoing = _cut(rows.tensors, counts)
        incoming = _cut(whole, received)
        rows.begin()
        rows.copy(outgoing[self.rank], incoming[self.rank])
        row_bytes = prod(rows.tensors.shape(0)[1:]) * rows.tensors.itemsize(0)
        transport.alltoall(outgoing, incoming, (table * row_bytes).tolist())

        def finish() -> tuple[Array, NDArray[np.int64]]:
            rows.end()
            return rows.result(result, x), received

        return finish

    def _broadcast_object(
        self, transport: Transport, obj: T, root_rank: int, name: str | None
    ) -> T:
        self._check_root(root_rank)
        label = _label("broadcast_object", name)
        data = pickle.dumps(obj) if self.rank == root_rank else b""
        headers = agree(
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
        return f"{kind} number {self.new_number('')}" if name is None else _label(kind, name)

    def new_number(self, kind: str) -> int:
        """The number of an unnamed operation, counted by `kind`.

        Counting begins anew where ranks may have counted differently, at a moment at which nothing
        is in flight: when all that lacked a match has failed, and when all ranks have joined.
        """
        n_failed = 0 if self._engine is None else self._engine.n_failed
        with self._counting:
            if n_failed != self._n_failed:
                self._unnamed.clear()
                self._n_failed = n_failed
            self._unnamed[kind] += 1
            return self._unnamed[kind]

    def give_back(self, kind: str, number: int) -> None:
        """The number was not used."""
        with self._counting:
            if self._unnamed[kind] == number:
                self._unnamed[kind] -= 1

    def begin_anew(self) -> None:
        """What all ranks must count alike is counted from the beginning."""
        with self._counting:
            self._unnamed.clear()
        for each in list(self.beginners):
            each.begin_anew()

    def _new_engine(self, direct: Transport, other: Transport | None) -> _native.Engine | None:
        """The thread that runs asynchronous operations; on every rank, since all must meet."""
        if other is None or self.size == 1:
            return None
        from horo_lite.transports.shm import ShmTransport

        ranks = list(direct.ranks)
        if isinstance(direct, ShmTransport) and isinstance(other, ShmTransport):
            engine = _native.Engine.over_shm(other.group, direct.group, ranks, explain)
        else:
            from horo_lite.transports.mpi import MpiChannel, MpiTransport

            assert isinstance(direct, MpiTransport)
            assert isinstance(other, MpiTransport)
            channel = MpiChannel(other)
            engine = _native.Engine.over_channel(
                channel, ranks, explain, channel.serve, lambda: direct.n_waits
            )
        lookout = getattr(direct, "lookout", None)
        if lookout is not None:
            engine.watched_by(lookout)
        return engine

    def _reduce_async(
        self,
        kind: str,
        memory: HostArrays | GpuArrays,
        op: Op,
        options: dict[str, Any],
        finish: Callable[[], Any],
    ) -> Handle:
        name = self._new_name(kind, options.pop("name", None))
        return self._submit_reduction(
            _Reduction(kind, None, memory, op, label=name, **options), finish
        )

    def _submit_reduction(self, reduction: _Reduction, finish: Callable[[], Any]) -> Handle:
        self.check_usable()
        memory = reduction.memory
        transport = self._async_transport
        if self._engine is None or transport is None:
            self._reduce(reduction)
            return Handle(reduction.label, None, finish)
        if memory.lane is not None and self._watch is not None:
            self._watch.check()
        reduction.prepare()
        if memory.lane is not None:
            memory.use_c_order()
        layout = memory.tensors.layout
        digest = digest_of((reduction.contract(), layout))

        def describe() -> str:
            order = "C order" if layout == 0 else f"another order than C ({layout:x})"
            return reduction.describe(f"memory in {order}")

        def complete() -> Any:
            reduction.complete()
            return finish()

        from horo_lite.transports.shm import ShmTransport

        weight = 1.0 if reduction.weight is None else reduction.weight
        if memory.lane is None and isinstance(transport, ShmTransport):
            job = self._engine.submit_allreduce(
                transport.group,
                reduction.label,
                digest,
                memory.tensors,
                reduction.op.value,
                reduction.compression.wire,
                *reduction.factors(None),
                reduction.op is Average,
                weight,
                describe,
                recipe_of_reduction(reduction),
                () if reduction.shared is None else reduction.shared.distances,
            )
            return Handle(reduction.label, job, complete)
        memory.begin()
        job = self._engine.submit_call(
            reduction.label,
            digest,
            lambda weights: reduction.move(_used_by_all(transport, memory.lane), weights),
            weight,
            describe,
            recipe_of_reduction(reduction),
        )
        return Handle(reduction.label, job, complete)

    def _submit_allgather(
        self, label: str, name: str | None, rows: HostArrays | GpuArrays, x: Array
    ) -> Handle:
        return self._submit(
            label,
            rows,
            lambda transport: self._allgather(transport, rows, x, name or label),
            recipe_of_allgather(rows, name, label),
        )

    def _submit_broadcast(
        self,
        label: str,
        name: str | None,
        memory: HostArrays | GpuArrays,
        root_rank: int,
        result: Callable[[], Any],
    ) -> Handle:
        def run(transport: Transport) -> Callable[[], Any]:
            finish = self._broadcast(transport, memory, root_rank, name or label)
            return lambda: (finish(), result())[1]

        ranks = self.transport.ranks
        recipe = recipe_of_broadcast(memory, root_rank, ranks, name, label=label)
        return self._submit(label, memory, run, recipe)

    def _submit(
        self,
        label: str,
        memory: HostArrays | GpuArrays,
        run: Callable[[Transport], Callable[[], Any]],
        recipe: Recipe,
    ) -> Handle:
        self.check_usable()
        if self._engine is None or self._async_transport is None:
            return Handle(label, None, self._run(run, memory.lane))
        transport = self._async_transport
        if memory.lane is not None:
            if self._watch is not None:
                self._watch.check()
            memory.use_c_order()
            memory.begin()
        job = self._engine.submit_call(
            label,
            0,
            lambda weights: run(_used_by_all(transport, memory.lane)),
            1.0,
            lambda: label,
            recipe,
        )
        return Handle(label, job, lambda: cast("Callable[[], Any]", job.value())())


def _used_by_all(transport: Transport, lane: Lane | None) -> Transport:
    """On the engine's thread, where all ranks are: the transport for the GPU's arrays or these."""
    return transport if lane is None else lane.transport_of_all()


class _Reduction:
    """One all-reduce: what was asked for, the memory it works on, and how to say it."""

    def __init__(
        self,
        kind: str,
        name: str | None,
        memory: HostArrays | GpuArrays,
        op: Op,
        compression: Compressor = Compression.none,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        names: Sequence[str] = (),
        label: str | None = None,
        weight: float | None = None,
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
        self.weight = weight
        self.memory = memory
        self.shared: SharedMemory | None = None  # where it happens in place
        self.offsets: tuple[int, ...] | None = None

    def look_in(self, shared: SharedMemory | None) -> None:
        """It happens in place if everything lies in `shared` and travels as it is."""
        as_it_is = self.compression.wire == "none" and self.prescale == 1 and self.weight is None
        if shared is not None and as_it_is and self.memory.lane is None:
            self.offsets = shared.offsets(self.memory.tensors)
            self.shared = None if self.offsets is None else shared

    def contract(self) -> object:
        """Everything that must be alike on all ranks."""
        return (
            self.label,
            self.op.value,
            self.compression.name,
            self.compression.wire,
            self.prescale,
            self.postscale,
            self.memory.tensors.signature,
            _digest_of_names(tuple(self.names)),
            self.weight is not None,
            self.offsets,
        )

    def describe(self, *more: str) -> str:
        options = [
            f"op {self.op.name}",
            f"compression {self.compression.name}",
            f"prescale_factor {self.prescale}, postscale_factor {self.postscale}",
            f"weighted: {self.weight is not None}",
            "memory of this rank" if self.shared is None else f"shared memory at {self.offsets}",
            *more,
        ]
        return "\n".join([self.label, *options, *self.memory.describe(self.names)])

    def run(self, transport: Transport, watch: Watch | None, follows: bool) -> bool:
        """The arrays hold the result; see Group.exchange about `follows`."""
        from horo_lite.transports.nccl import NcclTransport

        self.prepare()
        if watch is not None and isinstance(transport, NcclTransport):
            if not self._queue(transport, watch, follows):
                return False
        else:
            headers = agree(
                transport,
                self.label,
                self.contract(),
                self.describe,
                count=self.memory.tensors.layout,
                weight=1.0 if self.weight is None else self.weight,
                recipe=recipe_of_reduction(self),
            )
            if any(header.count != headers[0].count for header in headers):
                self.memory.use_c_order()
                self.shared = None
            self.memory.begin()
            self.move(transport, [header.weight for header in headers])
        self.complete()
        return True

    def _queue(self, transport: NcclTransport, watch: Watch, follows: bool) -> bool:
        """The work is queued on the GPU; whether the ranks agree is found out beside it."""
        layout = self.memory.tensors.layout

        def describe() -> str:
            order = "C order" if layout == 0 else f"another order than C ({layout:x})"
            return self.describe(f"memory in {order}")

        digest = digest_of((self.contract(), layout))
        notice = watch.announce(self.label, digest, describe, follows=follows)
        tensors, op = self.memory.tensors, self.op.value
        if not (
            follows
            and transport.only_queues(tensors, op, self.prescale, self.postscale, self.weight)
        ):
            watch.wait(notice)
            if notice.nobody_follows:
                return False
        self.memory.begin()
        transport.reduce(
            tensors,
            op=op,
            wire=self.compression.wire,
            prescale=self.prescale,
            scale=self.postscale,
            weight=self.weight,
        )
        return True

    def prepare(self) -> None:
        self._hook(type(self.compression).prepare, Compressor.prepare)

    def complete(self) -> None:
        self.memory.end()
        self._hook(type(self.compression).restore, Compressor.restore)
        self.memory.write_back()

    def move(self, transport: Transport, weights: Sequence[float]) -> None:
        prescale, scale, divisor = self.factors(weights)
        if self.shared is not None:
            cast("ShmTransport", transport).reduce_in_place(
                self.memory.tensors,
                self.shared,
                op=self.op.value,
                scale=scale,
                divisor=divisor,
            )
            return
        transport.allreduce(
            self.memory.tensors,
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
        mine = 1.0 if self.weight is None else self.weight
        return self.prescale * mine, self.postscale, total or 1.0

    def _hook(self, method: Callable[..., None], default: Callable[..., None]) -> None:
        if method is not default:
            for i, x in enumerate(self.memory.seen()):
                name = self.names[i] if self.names else f"{self.label}[{i}]"
                method(self.compression, name, x)


@lru_cache(maxsize=64)
def _digest_of_names(names: tuple[str, ...]) -> int:
    """Remembered, because an optimizer comes with the same ones in every step."""
    return digest_of(names)


def _label(kind: str, name: str | None) -> str:
    return kind if name is None else f"{kind} '{name}'"


def _rows_and_row(rows: HostArrays | GpuArrays) -> tuple[int, str]:
    """How many rows there are, and what each looks like, in words."""
    n_rows, *row = rows.tensors.shape(0)
    return n_rows, f"{rows.tensors.describe(0).split('[')[0]} rows of {row}"


def _n_rows(x: Array) -> int:
    shape = np.shape(x) if isinstance(x, (bool, int, float, list, tuple)) else x.shape
    return int(shape[0]) if len(shape) else 1


def _cut(tensors: _native.Tensors, n_rows: Sequence[int] | NDArray[Any]) -> list[_native.Tensors]:
    ends = np.cumsum(n_rows).tolist()
    return [tensors.rows(end - int(n), end) for n, end in zip(n_rows, ends, strict=True)]


def _splits(rows: int, splits: Sequence[int] | NDArray[Any] | None, size: int) -> NDArray[np.int64]:
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
