"""Whether the ranks queue the same things on their GPUs: found out by a thread beside the step."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from horo_lite import _native
from horo_lite.errors import DeviceError, MismatchError, PeerLostError, StallError
from horo_lite.transports.agreement import digest_of, exchange_texts, explain, on_ranks
from horo_lite.transports.interface import Header, OverHost, Transport


class Withdrawable(Protocol):
    """An asynchronous operation with arrays on a GPU."""

    is_void: bool

    def done(self) -> bool: ...
    def withdraw(self, beside: bool = False) -> bool: ...


class Watched(Protocol):
    """A communication stream, as far as it is watched: see `CommunicationStream`."""

    @property
    def peer_failed(self) -> bool: ...
    def fail(self, reason: str) -> None: ...
    def failure(self) -> str: ...
    def reset(self) -> None: ...


# A rank's state in a round: with a notice (of something that it can do as agreed on earlier, or
# cannot), idle, with a failure, or for the last time.
_IDLE, _DIFFERS, _FOLLOWS, _FAILED, _LEAVES = range(5)
_N_STATES = 8
ROUND_S = 0.2
ABORT_S = 10.0
MAX_BEHIND = 8
MAX_AHEAD = 256  # notices of a rank that others have not matched; CUDA itself queues about 1,000
_ELSEWHERE = digest_of("not this call: it has queued something on its GPU that nobody else has")


class Notice:
    """One rank's announcement of one operation that it queues on its GPU."""

    def __init__(
        self,
        label: str,
        digest: int,
        describe: Callable[[], str],
        state: int,
        n_agreed: int,
        generation: int,
    ) -> None:
        self.label = label
        self.digest = digest
        self.describe = describe
        self.state = state
        self.n_agreed = n_agreed
        self.generation = generation
        self.nobody_follows = False
        self.settled = threading.Event()


class Watchdog:
    """Compares the notices of all ranks, in their order, over a transport of its own.

    The threads of all ranks compare in rounds: at once where there is a notice, a few times a
    second where there is none. So a rank that waits for its GPU, or in a call of the host's, learns
    what went wrong elsewhere.

    Where notices differ, what waits on the GPUs is ended, on every rank. `check()` then raises the
    difference, once; what a rank announced before that is void, and so is what it submitted
    (`submitting`) and the others did not, so that afterwards all ranks continue with the same
    operation, and connect their GPUs anew. No program raises it before that is so on every rank.
    Failures of this rank's GPU are noticed, too, and reported to the others.

    A rank that cannot do what was agreed on earlier says so with `follows=False`, and then waits
    for the notice. If no rank follows, that is not a mismatch but `nobody_follows`: all are
    waiting, and nothing has been queued.

    A rank that waits for the others in a direct call on the host, where others have queued
    something on their GPUs instead, is found by the number of such calls (`CountedTransport`).
    """

    def __init__(
        self, transport: Transport, direct: CountedTransport, streams: Sequence[Watched]
    ) -> None:
        self._transport = transport
        self._executor = transport.executor
        self._direct = direct
        self._streams = streams
        self._error: Exception | None = None
        self._stopped = threading.Event()  # there is an error
        self._raising = threading.RLock()
        self._submitting = threading.RLock()  # again where a finalizer submits, too
        self._submitted: WeakSet[Withdrawable] = WeakSet()
        self._is_stopping = False  # nothing is submitted any more until the error was raised
        self._awaited = 0  # the direct call in which a rank waits for those that are elsewhere
        self._generation = 0  # how many errors all ranks have raised
        self._lost: PeerLostError | None = None  # raised by what this rank queues alone
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._first: Notice | None = None
        self._latest: deque[Notice] = deque()
        self._closing = False
        self._stall_detector = direct.stall_detector
        # What this rank has queued, and others have not.
        self._unmatched: _native.Wait | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="horo_lite watchdog", daemon=True)
        direct.watchdog = self

    def start(self) -> None:
        """Begin, once all ranks have connected their GPUs; also called when they have again."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def announce(
        self, label: str, digest: int, describe: Callable[[], str], *, follows: bool = True
    ) -> Notice:
        """Say what this rank is about to queue; return at once, or raise what others led to."""
        self.check()
        if self._lost is not None:
            raise self._lost
        if self._stall_detector is not None:
            self._stall_detector.doing(label)
        state, n_agreed = _FOLLOWS if follows else _DIFFERS, self._direct.n_agreed

        def describe_all() -> str:
            return f"{describe()}\nafter {n_agreed} direct calls on the host"

        notice = Notice(label, digest, describe_all, state, n_agreed, self._generation)
        self._notices.put(notice)
        if self._executor is not None:  # the thread calls MPI through this one
            self._serve_until(lambda _: self._notices.qsize() < MAX_BEHIND)
        self._latest.append(notice)
        if len(self._latest) > MAX_AHEAD:
            self.wait(self._latest.popleft())
        return notice

    @contextmanager
    def submitting(self) -> Iterator[WeakSet[Withdrawable]]:
        """Around submitting an asynchronous operation, which is then to be added.

        Raises:
            MismatchError, DeviceError: As `check`.
        """
        while True:
            self.check()
            with self._submitting:
                if not self._is_stopping:
                    yield self._submitted
                    return
            self._serve_until(self._stopped_or_raised)

    def _stopped_or_raised(self, timeout_s: float) -> bool:
        """Whether the error is there, or another thread has raised it already."""
        return self._stopped.wait(timeout_s) or not self._is_stopping

    @property
    def generation(self) -> int:
        """How many errors of GPUs all ranks have raised."""
        return self._generation

    def wait(self, notice: Notice) -> None:
        """Wait until all ranks have announced theirs; raise if they differ, or never will."""
        self._serve_until(notice.settled.wait)
        self.check()

    def check(self) -> None:
        """Raise what the comparison of earlier notices led to, or StallError."""
        if self._stall_detector is not None:
            self._stall_detector.check()
        if not self._stopped.is_set():
            return
        with self._raising:  # one thread raises it, once
            error = self._error
            if error is None:
                return
            if isinstance(error, (MismatchError, DeviceError)):
                if self._direct.n_agreed < self._awaited:
                    self._direct.pass_by()
                for stream in self._streams:
                    if stream.failure():  # not what has been connected since
                        stream.reset()
                self._generation += 1
                self._is_stopping = False
                self._stopped.clear()
                self._error = None
        try:
            raise error
        finally:
            # Its traceback has this frame. In a cycle it would be freed at any time, in the middle
            # of a call of MPI's, too, and with it a transport, whose end waits for the GPU.
            del error

    def raise_common(self) -> None:
        """If a GPU of any rank has failed, wait until all ranks know it, and raise it."""
        if self._failure() or any(stream.peer_failed for stream in self._streams):
            self._serve_until(self._stopped.wait)
        self.check()

    def raise_what_voided(self) -> None:
        """Raise the error for which an operation was withdrawn, unless that was raised before."""
        if self._is_stopping:
            self._serve_until(self._stopped_or_raised)
        self.check()

    def raise_elsewhere(self) -> None:
        """Raise what all ranks will, since some of them are not in this rank's direct call."""
        self._serve_until(self._stopped.wait)
        self.check()

    def is_awaited(self) -> bool:
        """Whether other ranks are in a direct call that this one should have made before."""
        return self._error is not None and self._direct.n_agreed < self._awaited

    def close(self) -> None:
        """Wait until all that was announced has been compared; raise if there was a difference."""
        self._notices.put(None)
        self._serve_until(self._has_ended)
        self._direct.watchdog = None
        self.check()

    def _has_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve_until(self, is_over: Callable[[float], bool]) -> None:
        """Wait, but not for a thread that has ended."""
        while self._thread.is_alive():
            # In turns, so that Ctrl-C works.
            if is_over(0.1 if self._executor is None else 0.0):
                return
            if self._executor is not None:  # MPI takes calls from one thread only: this one
                self._executor.serve(0.05)

    def _loop(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:  # a peer is gone, or nothing moves
            self._abort(error)
            self._raise_in_program(error)
            if isinstance(error, StallError):
                self._transport.abandon(str(error))
        finally:
            if self._unmatched is not None:
                self._unmatched.close(False)

    def _round(self) -> bool:
        """Compare with the other ranks' threads; whether there is to be another round."""
        if self._stall_detector is not None:
            self._stall_detector.check()
        # What was announced before the latest of these direct calls is seen below.
        n_agreed, direct_call = self._direct.n_agreed, self._direct.label
        notice = self._next()
        failure = self._failure()
        if failure:
            state, digest, label = _FAILED, 0, "a failure of a GPU"
        elif notice is not None:
            state, digest, label, n_agreed = (
                notice.state,
                notice.digest,
                notice.label,
                notice.n_agreed,
            )
        else:
            state, digest, label = _LEAVES if self._closing else _IDLE, 0, "the GPUs' watchdog"
        count = n_agreed * _N_STATES + state
        headers = self._transport.agree(digest, count, label=label)
        states = [header.count % _N_STATES for header in headers]
        counts = [header.count // _N_STATES for header in headers]
        announced = [state in (_FOLLOWS, _DIFFERS) for state in states]
        try:
            if _FAILED in states:
                raise DeviceError(
                    on_ranks(self._transport.ranks, exchange_texts(self._transport, failure))
                )
            if _LEAVES in states:
                return self._end_with_all(states, announced, label)
            without = [n for n, has in zip(counts, announced, strict=True) if not has]
            with_notice = [n for n, has in zip(counts, announced, strict=True) if has]
            if with_notice and without and max(without) > min(with_notice):
                self._awaited = max(without)
                here = f"{direct_call}, a direct call on the host"
                here = here if n_agreed == self._awaited else "nothing yet"
                texts = exchange_texts(
                    self._transport, here if notice is None else notice.describe()
                )
                where = texts[announced.index(True)].partition("\n")[0]
                raise MismatchError(explain(where, texts, self._transport.ranks))
            self._report_wait(None if notice is None or all(announced) else notice, announced)
            if notice is None or without:
                return True
            if _FOLLOWS not in states:
                notice.nobody_follows = True
            elif any(header.digest != digest for header in headers) or len(set(counts)) > 1:
                texts = exchange_texts(self._transport, notice.describe())
                raise MismatchError(explain(label, texts, self._transport.ranks))
        except (DeviceError, MismatchError) as error:
            self._abort(error)
            self._withdraw()
            self._transport.agree(0, label="what follows a failure of a GPU")
            self._raise_in_program(error)
        if notice is not None:
            notice.settled.set()
            self._first = None
        return True

    def _report_wait(self, notice: Notice | None, announced: Sequence[bool]) -> None:
        """Report ranks that have not queued what this one has: they may be late."""
        if self._stall_detector is None:
            return
        if notice is None:
            if self._unmatched is not None:
                self._unmatched.close(True)
                self._unmatched = None
            return
        self._unmatched = self._unmatched or self._stall_detector.wait()
        ranks = self._transport.ranks
        arrived = [rank for rank, has in zip(ranks, announced, strict=True) if has]
        late = [rank for rank, has in zip(ranks, announced, strict=True) if not has]
        self._unmatched.report_if_due(f"{notice.label}, queued on its GPU", arrived, late)

    def _next(self) -> Notice | None:
        """Return the first notice that has not been compared; None if there is none for a while."""
        while not self._closing:
            if self._first is None:
                try:
                    self._first = self._notices.get(timeout=ROUND_S)
                except queue.Empty:
                    return None
            if self._first is None:
                self._closing = True
            elif self._error is None and self._first.generation == self._generation:
                return self._first
            else:  # void
                self._first.settled.set()
                self._first = None
        return None

    def _failure(self) -> str:
        """Return what happened to this rank's GPU that the others do not know yet."""
        if self._error is not None:
            return ""
        return next(filter(None, (stream.failure() for stream in self._streams)), "")

    def _end_with_all(self, states: Sequence[int], announced: Sequence[bool], label: str) -> bool:
        """End, since some rank is here for the last time: whether there is to be another round."""
        ranks = self._transport.ranks
        lost = PeerLostError(
            f"rank {ranks[states.index(_LEAVES)]} has left the job (its program ended, or it "
            f"called shutdown) while rank {ranks[self._transport.rank]} waited in {label}"
        )
        if announced[self._transport.rank]:
            raise lost
        if any(announced):  # what they have queued will never be complete, and this need not wait
            for stream in self._streams:
                stream.fail("this rank was shut down")
        if not self._closing:
            self._lost = lost
        return False

    def _withdraw(self) -> None:
        """Make void what this rank has submitted and others have not: they need not do so now."""
        with self._submitting:
            self._is_stopping = True
            submitted = list(self._submitted)
            self._submitted.clear()

        def withdraw() -> None:
            for handle in submitted:
                handle.is_void = True  # before the program can see that it is withdrawn
                handle.is_void = handle.withdraw(beside=True)

        # Not for ever, as in _abort: the engine may be in a call of NCCL's.
        thread = threading.Thread(target=withdraw, name="horo_lite withdraws", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _abort(self, error: Exception) -> None:
        # All at once: aborting one may wait for memory that a stuck kernel of another keeps. Not
        # for ever: NCCL may not come back, and the program must raise the error nevertheless.
        aborts = [
            threading.Thread(
                target=stream.fail, args=(str(error),), name="horo_lite aborts", daemon=True
            )
            for stream in self._streams
        ]
        for abort in aborts:
            abort.start()
        until = time.monotonic() + ABORT_S
        for abort in aborts:
            abort.join(max(until - time.monotonic(), 0))

    def _raise_in_program(self, error: Exception) -> None:
        """From here on this rank's program may raise it, and connect anew."""
        self._error = error
        self._stopped.set()


class CountedTransport(OverHost):
    """The transport of direct calls, counting how often this rank has agreed with others there."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self.name = transport.name
        self.shares_memory = transport.shares_memory
        self.native_group = transport.native_group
        self.engine_group = transport.engine_group
        self.watchdog: Watchdog | None = None
        self.n_agreed = 0
        self._label = ""

    @property
    def host(self) -> CountedTransport:
        return self

    @property
    def label(self) -> str:
        return self._label

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        if self.watchdog is not None and self.watchdog.is_awaited():
            self.watchdog.check()
        self._label = label
        self.n_agreed += 1
        headers = self._host.agree(digest, count, weight, label=label)
        if self.watchdog is not None and any(header.digest == _ELSEWHERE for header in headers):
            self.watchdog.raise_elsewhere()
        return headers

    def pass_by(self) -> None:
        """Tell those that wait in a direct call that this rank is not in it."""
        self.n_agreed += 1
        self._host.agree(_ELSEWHERE, label=self._label)
