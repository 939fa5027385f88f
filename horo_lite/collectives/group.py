"""A set of ranks that make the same calls: blocking ones, one at a time, and asynchronous ones."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar, cast
from weakref import WeakSet

from horo_lite.collectives import shared_memory
from horo_lite.collectives.arrays import Array, GpuMemory, Memory, gpu_of
from horo_lite.collectives.calls import Call, Compare, Finish, Part
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import Exchange, rows_of
from horo_lite.errors import (
    GROUP_IS_LOST,
    DeviceError,
    HoroLiteError,
    MismatchError,
    NotInitializedError,
    printable,
)
from horo_lite.recording import recorder
from horo_lite.transports.agreement import digest_of, explain, give_up_unless_alike, needs_all
from horo_lite.transports.interface import Header
from horo_lite.transports.stream import CommunicationStream
from horo_lite.transports.watchdog import ELSEWHERE, Watchdog

if TYPE_CHECKING:
    from horo_lite.transports import Transport
    from horo_lite.transports.shm import SharedMemory

T = TypeVar("T")


class Counting(Protocol):
    """An object whose counters must have the same values on all ranks."""

    def reset_counts(self) -> None:
        """Restart the counters: all ranks have joined, each with counts of its own."""


class NullGroup:
    """What `new_group` returns on ranks outside the group: it is false, and operations refuse it.

    None would mean all ranks.
    """

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self._rank = rank
        self._ranks = list(ranks)

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return f"<the group of ranks {self._ranks}, on rank {self._rank} outside>"

    def refuse(self) -> NoReturn:
        """Raise ValueError: this rank may not use the group."""
        raise ValueError(
            f"rank {self._rank} is not in this group of ranks {self._ranks}: only these may use "
            "it. On the others it is false, so write `if group: ...`"
        )


class Group:
    """A set of ranks that make the same calls; pass it to an operation as `group=`.

    Blocking calls are matched by position: every rank makes the same ones in the same order. Those
    of several threads wait for each other, and must be in the same order on all ranks; one inside
    another one, from a signal handler or a finalizer, raises HoroLiteError, and so does waiting
    there for an asynchronous one.
    `…_async` calls are matched by name, in any order. What must be the same on all ranks
    (operation, shapes, dtypes, options, and names if given) is compared before any data moves. If
    it differs, every rank raises MismatchError with the first difference and the ranks involved,
    and the group remains usable. If a rank dies, leaves or raises while others wait for it, they
    raise PeerLostError, and the group can no longer be used.

    Attributes:
        rank: This rank's number in the group, from 0 to size - 1.
        size: The number of ranks.
        is_closed: Whether it can no longer be used, since its world has ended or it was freed.
    """

    def __init__(
        self,
        transport: Transport,
        watchdog_transport: Transport | None = None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self._number = transport.ranks[transport.rank]
        self._channel = recorder.channel_of(transport.ranks)
        self._watchdog_transport = watchdog_transport
        self._watchdog: Watchdog | None = None
        self._streams: tuple[CommunicationStream, CommunicationStream] | None = None
        self._lock = threading.RLock()
        self._running = 0  # the thread whose blocking call has the lock
        self._unnamed: defaultdict[str, int] = defaultdict(int)
        self._n_failed = 0
        self._count_lock = threading.RLock()  # a signal handler may count in the middle of it
        self.counting: WeakSet[Counting] = WeakSet()
        self.kept: dict[object, Any] = {}
        """State that functions keep between calls, each under its own key."""
        self._pid = os.getpid()
        self.is_closed = False
        self._engine = transport.new_engine(explain)

    def __deepcopy__(self, memo: object) -> Group:
        return self  # layers hold one, and are copied

    def run(self, call: Call[T], part: Part) -> T:
        """Execute a call with this rank's part, and return its result.

        Every rank calls it, in the same order as its other blocking calls.

        Args:
            call: The operation, the same on every rank.
            part: This rank's contribution.

        Raises:
            MismatchError: The ranks' calls differ; raised on every rank.
            PeerLostError: A rank died, left or failed. The group can no longer be used.
        """
        return self._begin(call, part)()

    def _begin(self, call: Call[T], part: Part) -> Finish[T]:
        self.check_usable()
        part.label = part.label or call.label
        call.check(part)
        call.prepare(part)
        return self._run(call, part)

    def submit(
        self, call: Call[T], part: Part, result: Callable[[T], Any] = lambda value: value
    ) -> Handle:
        """Begin a call, and return at once.

        Every rank submits it, in any order. Unnamed calls are numbered: they match if all ranks
        submit them in the same order.

        Args:
            call: The operation, the same on every rank; matched by its label.
            part: This rank's contribution. Do not use its arrays until the call is synchronized.
            result: Converts the call's own result to what `synchronize` returns.

        Returns:
            A handle for `synchronize` and `poll`.
        """
        self.check_usable()
        is_numbered = not part.label and call.name is None
        part.label = part.label or call.label
        watchdog = None if part.memory.stream is None else self._watchdog
        if watchdog is not None:
            watchdog.check()
        call.prepare(part)
        if watchdog is None or self._engine is None:
            return self._submit(call, part, is_numbered, result)
        with watchdog.submitting() as submitted:
            handle = self._submit(call, part, is_numbered, result)
            submitted.add(handle)
        return handle

    def _submit(
        self, call: Call[T], part: Part, is_numbered: bool, result: Callable[[T], Any]
    ) -> Handle:
        if is_numbered:
            part.label = f"{call.kind} number {self.unnamed('')}"
        if self._engine is None:
            call.check(part)
            finish = self._run(call, part)
            return Handle(part.label, None, lambda: result(finish()))
        record = recorder.submission(
            self._channel, call.kind, call.tensor_names, part.memory.tensors
        )
        job, finish = call.submit(part, self._engine, self.transport, record)
        return Handle(part.label, job, lambda: result(finish()), self._check_not_inside)

    def _run(self, call: Call[T], part: Part) -> Finish[T]:
        """Execute a blocking call; those of other threads wait for this one."""
        self._check_not_inside()
        watchdog = None if part.memory.stream is None else self._watchdog
        failed = True
        recorder.enter(self._channel)
        try:
            with self._lock:
                self._running = threading.get_ident()
                try:
                    if watchdog is not None:
                        watchdog.check()
                    finish = self._execute(call, part)
                except DeviceError:
                    if watchdog is not None:
                        watchdog.raise_common()
                    raise
                except BaseException as error:
                    give_up_unless_alike(self.transport, error)
                    raise
                finally:
                    self._running = 0
            failed = False
            return finish
        finally:
            recorder.leave(failed)

    def _check_not_inside(self) -> None:
        """Raise HoroLiteError if this thread is in the middle of an operation of the group."""
        drives = self._engine is not None and self._engine.drives_here
        if drives or (self._running == threading.get_ident() and self.size > 1):
            outer = self.transport.label
            raise HoroLiteError(
                f"{_public_call()} was called while this thread was in '{outer}': by "
                "a signal handler, a finalizer (__del__, a weakref's callback) or a hook. The "
                "ranks would no longer make the same calls in the same order. Set a flag there, "
                "and make the call when the first one has returned"
            )

    def _execute(self, call: Call[T], part: Part) -> Finish[T]:
        stream, transport = part.memory.stream, self.transport
        if stream is not None:
            if stream.found is None:  # on all ranks
                self._together(_Connect(), part, transport)
            transport = stream.transport()
            queued = call.queue(part, transport)
            if queued is not None:
                return queued
        recorder.operation(part.label, call.kind, call.tensor_names, part.memory.tensors)
        return self._together(call, part, transport)

    def _together(self, call: Call[T], part: Part, transport: Transport) -> Finish[T]:
        """Execute the call when all ranks are in it, and have been compared."""
        digest, count = digest_of(call.contract(part)), call.count(part)

        def move(headers: Sequence[tuple[int, int, float]]) -> Finish[T]:
            recorder.begin()
            return call.move(part, transport, [Header(*header) for header in headers])

        if self._engine is None:
            return move([(digest, count, part.own_weight)])
        if self._watchdog is not None:
            self._watchdog.enters(part.label)
        try:
            finish = self._engine.call(
                part.label,
                digest,
                move,
                count,
                part.own_weight,
                lambda: printable(call.describe(part)),
                lambda joined: call.participation(part, transport.ranks, joined),
            )
        except MismatchError as error:
            if self._watchdog is not None and ELSEWHERE in str(error):
                self._watchdog.raise_elsewhere()
            raise
        return cast("Finish[T]", finish)

    def _pass_by(self, label: str) -> None:
        """Tell ranks that wait in a blocking call that this one is not in it."""
        assert self._engine is not None
        with suppress(MismatchError):
            self._engine.call(
                label, 0, lambda _: None, 0, 0.0, lambda: ELSEWHERE, needs_all(ELSEWHERE)
            )

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Let the blocking calls of other threads wait, for several calls in a row."""
        with self._lock:
            yield

    def synchronize(self, handle: Handle, *, beside: bool = False) -> Any:
        """Wait for an asynchronous operation: see `ops.synchronize`.

        Args:
            handle: What `submit` returned. It may be synchronized again.
            beside: Whether this is not the training thread, which continues meanwhile. On every
                rank at most one such thread waits at a time, for the same operations in the same
                order.
        """
        self.check_usable()
        try:
            return handle.wait(beside)
        except DeviceError:
            if self._watchdog is not None:
                self._watchdog.raise_common()
            raise
        except MismatchError:
            if self._watchdog is None or not handle.is_void:
                raise
            self._watchdog.raise_what_voided()
            raise DeviceError(
                f"{handle.name} was not executed, because a GPU had failed: see the earlier error"
            ) from None

    def poll(self, handle: Handle) -> bool:
        """Return whether an operation has ended: see `ops.poll`."""
        self.check_usable()
        return handle.done()

    def exchange(
        self,
        arrays: Sequence[Array],
        *,
        label: str,
        weight: float | None = None,
        shared: SharedMemory | None = None,
        follows: bool = True,
        **how: Any,
    ) -> bool:
        """Reduce an optimizer's gradients in place; return whether anything was reduced.

        Every rank calls it, in the same order as its other blocking calls. `how` is what an
        `Exchange` has; see `Part` for the other arguments, which may differ between ranks.
        """
        part = Part(self.memory(arrays), weight, shared=shared, follows=follows)
        return self.run(Exchange(label, **how), part)

    def exchange_async(
        self,
        arrays: Sequence[Array],
        *,
        label: str,
        weight: float | None = None,
        shared: SharedMemory | None = None,
        in_order: bool = False,
        **how: Any,
    ) -> Handle:
        """Begin `exchange`; do not use the arrays until it is synchronized.

        With `in_order`, where `compares_later`, it is queued on the GPU at once, and every rank
        calls it in the same order as its blocking calls; `synchronize` orders what the caller's
        stream does next after it.
        """
        call = Exchange(label, **how)
        if in_order:
            return Handle(label, None, self._begin(call, Part(self.memory(arrays), weight)))
        part = Part(self.memory(arrays, asynchronous=True), weight, shared=shared)
        return self.submit(call, part, lambda _: None)

    def agree(self, label: str, what: str) -> None:
        """Compare texts between all ranks; raise MismatchError if they differ."""
        self.run(Compare(label, what), Part())

    def join(self) -> int:
        """Wait until all ranks of the group have joined; return the group rank of the last one.

        Until then, this rank takes part in the others' operations; see `horo_lite.join`.
        """
        self.check_usable()
        if self.size == 1:
            return 0
        self._check_not_inside()
        assert self._engine is not None
        with self._lock:
            if self._watchdog is not None:
                self._watchdog.joins()
            order = cast("list[int]", self._engine.join(self._take_part))
            if self._watchdog is not None:
                self._watchdog.all_have_joined()
            self.reset_counts()
        return max(range(self.size), key=lambda r: order[r])

    def _take_part(self, pickled: bytes) -> None:
        """Take part, as a rank that has joined, in an operation of the others."""
        call, label, specs, own = pickle.loads(pickled)
        part = call.part_that_changes_nothing(self, specs, own)
        part.label = label
        assert self._engine is not None
        call.prepare(part)
        call.submit(part, self._engine, self.transport, record=None)

    def compares_later(self, gpu: int | None) -> bool:
        """Return whether reductions on that GPU return before the ranks have been compared."""
        stream = self.stream(gpu)
        if stream is None or self._watchdog is None:
            return False
        if stream.found is None:
            self.run(_Connect(), Part(GpuMemory([], stream)))
        return stream.transport().queued is not None

    def part_of(self, x: Array) -> slice:
        """Return which rows of `x` this rank receives from reducescatter."""
        if not x.shape:
            raise ValueError("reducescatter needs an array with at least one dimension")
        return slice(*rows_of(x.shape[0], self.size, self.rank))

    def close(self, reason: str = "its program ended") -> None:
        """Complete what all ranks have submitted, and leave the group for the given reason."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        was_given_up = self.transport.members.given_up()
        try:
            try:
                if self._engine is not None:
                    self._engine.drain()
            finally:  # it aborts what would keep a GPU busy for ever
                if self._watchdog is not None:
                    self._watchdog.close()
        except GROUP_IS_LOST:
            if not was_given_up:  # otherwise a blocking call has already raised it
                raise
        except BaseException as error:
            # A round may be in progress, and MPI may still write to its memory.
            give_up_unless_alike(self.transport, error)
            if isinstance(error, KeyboardInterrupt):  # do not wait for the GPU
                for stream in self._streams or ():
                    stream.fail("shutdown() was interrupted")
            raise
        finally:
            for stream in self._streams or ():
                stream.close()
            for transport in self.transports():
                transport.members.leave(reason)
            # Another thread that waits in a blocking call notices it. MPI must not end before.
            if self._lock.acquire(timeout=1.0):
                self._lock.release()
            for transport in self.transports():
                transport.close()
            shared_memory.make_own(self)

    def transports(self) -> list[Transport]:
        """Return all transports that the group was made of."""
        both = self.transport, self._watchdog_transport
        return [one for one in both if one is not None]

    def abandon(self, reason: str) -> None:
        """Make peers that wait for this rank, now or later, raise PeerLostError."""
        for transport in self.transports():
            transport.members.abandon(reason)

    @property
    def carrier(self) -> str:
        """The name of the transport that carries arrays: a GPU's, once one is connected."""
        found = self._streams[0].found if self._streams is not None else None
        return self.transport.name if found is None else found.name

    # Which memory operations use.

    def check_usable(self) -> None:
        """Raise NotInitializedError if this process may not use the group."""
        if os.getpid() != self._pid:
            raise NotInitializedError(
                f"process {os.getpid()} is a forked child of rank {self._number} (a data loader?), "
                "and not a rank itself: call collectives only in the parent"
            )
        if self.is_closed:
            raise NotInitializedError(
                "this group of ranks is closed, since its world was shut down, or the group was "
                "freed or destroyed: use one that was created after that"
            )

    def stream(self, gpu: int | None, asynchronous: bool = False) -> CommunicationStream | None:
        """Return the communication stream of a GPU in this group; None for host memory."""
        if gpu is None:
            return None
        if self._streams is None:
            allowed = self._watchdog_transport is not None
            streams = (
                CommunicationStream(self.transport, gpu, allowed),
                CommunicationStream(self.transport, gpu, allowed),
            )
            if self._watchdog_transport is not None and self.size > 1:
                self._watchdog = Watchdog(self._watchdog_transport, self._pass_by, streams)
                for stream in streams:
                    stream.watchdog = self._watchdog
            self._streams = streams
        stream = self._streams[asynchronous]
        if stream.index != gpu:
            raise ValueError(
                f"the arrays are on cuda:{gpu}, but rank {self._number} has exchanged arrays of "
                f"cuda:{stream.index} before: each rank can use only one GPU"
            )
        return stream

    def memory(self, arrays: Sequence[Array], *, asynchronous: bool = False) -> Memory:
        """Return the memory of arrays that an operation changes in place."""
        stream = self._stream_of(arrays, asynchronous)
        return Memory(arrays) if stream is None else GpuMemory(arrays, stream)

    def results(
        self, xs: Sequence[Array], *, asynchronous: bool = False, reduced: bool = True
    ) -> Memory:
        """Return new arrays, with the contents of `xs`, that an operation turns into its results.

        Large arrays are not copied before the operation begins, or not at all if the transport can
        read from `xs`, unless it is `asynchronous`: `xs` may then change at once.

        Args:
            xs: Arrays or numbers, which are not changed.
            asynchronous: Whether the operation is.
            reduced: Whether it computes: numbers are then float64, otherwise of their own type.
        """
        stream = self._stream_of(xs, asynchronous)
        if stream is None:
            return Memory.of_results(xs, at_once=asynchronous, reduced=reduced)
        return GpuMemory.results_on(xs, stream)

    def rows(self, x: Array, *, asynchronous: bool = False) -> Memory:
        """Return the rows of an array that an operation only reads."""
        stream = self._stream_of([x], asynchronous)
        return Memory.of_rows(x) if stream is None else GpuMemory.rows_on(x, stream)

    def _stream_of(self, xs: Sequence[Array], asynchronous: bool) -> CommunicationStream | None:
        gpu = gpu_of(xs[0]) if len(xs) else None
        return None if gpu is None else self.stream(gpu, asynchronous)

    # How asynchronous calls run.

    def new_number(self, kind: str) -> int:
        """Return the number of an unnamed operation, counted by `kind`.

        Ranks may come to count differently. Counting therefore restarts when nothing is in flight:
        after all operations without a match have failed, and after all ranks have joined.
        """
        n_failed = 0 if self._engine is None else self._engine.n_failed
        with self._count_lock:
            if n_failed != self._n_failed:
                self._n_failed = n_failed
                self._unnamed.clear()
            number = self._unnamed[kind] = self._unnamed[kind] + 1
            return number

    def busy_s(self) -> float:
        """Return the CPU time that exchanges of asynchronous calls have used, in seconds."""
        return 0.0 if self._engine is None else self._engine.busy_s

    def unnamed(self, kind: str) -> str:
        """Return the identification of an unnamed operation: its number, counted by `kind`.

        Counting restarts after a GPU failed, since ranks may then differ in what they submitted.
        """
        n_errors = 0 if self._watchdog is None else self._watchdog.generation
        since = f" after {n_errors} GPU errors" if n_errors else ""
        return f"{self.new_number(kind + since)}{since}"

    def give_back(self, kind: str, unnamed: str) -> None:
        """Return an identification of `unnamed(kind)` that was not used."""
        number, space, since = unnamed.partition(" ")
        with self._count_lock:
            if self._unnamed[kind + space + since] == int(number):
                self._unnamed[kind + space + since] -= 1

    def reset_counts(self) -> None:
        """Restart all counters that must have the same values on all ranks."""
        with self._count_lock:
            self._unnamed.clear()
        for each in list(self.counting):
            each.reset_counts()


@dataclass(frozen=True)
class _Connect(Call[None]):
    """Connect the ranks' GPUs."""

    kind = "the first call with arrays on a GPU"

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[None]:
        assert part.memory.stream is not None
        part.memory.stream.transport()
        return lambda: None


def _public_call() -> str:
    """Return the name of the operation that the program called: the outermost public function."""
    frame, found = sys._getframe(1), "a collective"
    while frame is not None:
        name = frame.f_code.co_name
        module = frame.f_globals.get("__name__", "")
        if module == "horo_lite.ops" and not name.startswith("_"):
            found = name
        elif not module.startswith("horo_lite"):
            break
        frame = frame.f_back  # type: ignore[assignment]
    return f"{found}()"
