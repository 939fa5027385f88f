"""Check in a background thread that all ranks queue the same operations on their GPUs."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakSet

from horo_lite import _native
from horo_lite.errors import DeviceError, MismatchError, PeerLostError, StallError
from horo_lite.transports.agreement import allgather_texts, explain, on_ranks
from horo_lite.transports.interface import Transport


class Withdrawable(Protocol):
    """An asynchronous operation with arrays on a GPU."""

    is_void: bool

    def done(self) -> bool: ...
    def withdraw(self, beside: bool = False) -> bool: ...


class Watched(Protocol):
    """The part of a `CommunicationStream` that the watchdog uses."""

    @property
    def peer_failed(self) -> bool: ...
    def is_idle(self) -> bool: ...
    def fail(self, reason: str) -> None: ...
    def failure(self) -> str: ...
    def close(self) -> None: ...


# A rank's state in a round: idle, with a notice of an operation that it cannot (differs) or can
# (follows) do as agreed on earlier, with a failure, or in its last round.
_IDLE, _DIFFERS, _FOLLOWS, _FAILED, _LEAVES = range(5)
_N_STATES = 8
_IN_JOIN = 1 << 31
ROUND_S = 0.2
IDLE_S = 0.005
ABORT_S = 10.0
MAX_AHEAD = 256  # notices of a rank without a match on others; CUDA itself queues about 1,000
ELSEWHERE = "not this call: it has queued something on its GPU that nobody else has"


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
    """Compares the notices of all ranks, in their order, over its own transport.

    The threads of all ranks compare in rounds: immediately if there is a notice, a few times per
    second if there is none. So a rank that waits for its GPU, or in a call on the host, learns of
    errors on other ranks.

    If notices differ, operations that wait on the GPUs are aborted on every rank. `check()` then
    raises the difference, once. A rank's earlier notices become void, and so do operations that it
    submitted (`submitting`) and the others did not, so that afterwards all ranks continue with the
    same operation, and reconnect their GPUs. No program raises the error before that is done on
    every rank. Failures of this rank's GPU are detected, too, and reported to the others.

    A rank that cannot do what was agreed on earlier announces this with `follows=False`, and then
    waits for the notice. If no rank follows, that is not a mismatch but `nobody_follows`: all are
    waiting, and nothing has been queued.

    A rank that waits for the others in a blocking call on the host, while they have queued
    something on their GPUs instead, is detected by the number of such calls (`enters`).
    """

    def __init__(
        self,
        transport: Transport,
        pass_by: Callable[[str], None],
        streams: Sequence[Watched],
    ) -> None:
        self._transport = transport
        self._pass_by = pass_by
        self._n_calls = 0  # blocking calls on the host; see `joins`
        self._label = ""  # of the latest
        self._streams = streams
        self._error: Exception | None = None
        self._stopped = threading.Event()  # set if there is an error
        self._raising = threading.RLock()
        self._submitting = threading.RLock()  # re-entrant, since a finalizer may submit, too
        self._submitted: WeakSet[Withdrawable] = WeakSet()
        self._is_stopping = False  # no submissions until the error was raised
        self._awaited = 0  # the blocking call in which a rank waits for ranks that are elsewhere
        self._generation = 0  # how many errors all ranks have raised
        self._lost: PeerLostError | None = None  # raised if this rank queues anything alone
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._first: Notice | None = None
        self._latest: deque[Notice] = deque()
        self._closing = False
        self._stall_detector = transport.stall_detector
        # The wait of an operation that this rank has queued, and others have not.
        self._unmatched: _native.Wait | None = None
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="horo_lite watchdog", daemon=True)

    def start(self) -> None:
        """Start, once all ranks have connected their GPUs; also called after a reconnection."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def announce(
        self, label: str, digest: int, describe: Callable[[], str], *, follows: bool = True
    ) -> Notice:
        """Announce what this rank is about to queue. Return at once; raise earlier errors."""
        self.check()
        if self._lost is not None:
            raise self._lost
        if self._stall_detector is not None:
            self._stall_detector.doing(label)
        state, n_agreed = _FOLLOWS if follows else _DIFFERS, self._n_calls

        def describe_all() -> str:
            return f"{describe()}\nafter {n_agreed} blocking calls on the host"

        notice = Notice(label, digest, describe_all, state, n_agreed, self._generation)
        self._notices.put(notice)
        self._latest.append(notice)
        if len(self._latest) > MAX_AHEAD:
            self.wait(self._latest.popleft())
        return notice

    @contextmanager
    def submitting(self) -> Iterator[WeakSet[Withdrawable]]:
        """Guard the submission of an asynchronous operation, which must be added to the set.

        Raises:
            MismatchError, DeviceError: As `check`.
        """
        while True:
            self.check()
            with self._submitting:
                if not self._is_stopping:
                    yield self._submitted
                    return
            self._wait_until(self._stopped_or_raised)

    def _stopped_or_raised(self, timeout_s: float) -> bool:
        """Return whether there is an error to raise, or another thread has raised it already."""
        return self._stopped.wait(timeout_s) or not self._is_stopping

    @property
    def generation(self) -> int:
        """The number of GPU errors that all ranks have raised."""
        return self._generation

    def wait(self, notice: Notice) -> None:
        """Wait until all ranks have announced it; raise if they differ, or never will."""
        self._wait_until(notice.settled.wait)
        self.check()

    def check(self) -> None:
        """Raise the error that the comparison of earlier notices found, or StallError."""
        if self._stall_detector is not None:
            self._stall_detector.check()
        if not self._stopped.is_set():
            return
        with self._raising:  # one thread raises it, once
            error = self._error
            if error is None:
                return
            if isinstance(error, (MismatchError, DeviceError)):
                if self._n_calls < self._awaited:
                    self._n_calls += 1
                    self._pass_by(self._label)
                for stream in self._streams:
                    if stream.failure():  # not a stream that has been connected since
                        stream.close()
                self._generation += 1
                self._is_stopping = False
                self._stopped.clear()
                self._error = None
        try:
            raise error
        finally:
            # Its traceback refers to this frame. A reference cycle would be freed at any time, even
            # in the middle of an MPI call, and with it a transport, whose deletion waits for the
            # GPU.
            del error

    def raise_common(self) -> None:
        """If a GPU of any rank has failed, wait until all ranks know, and raise the error."""
        if self._failure() or any(stream.peer_failed for stream in self._streams):
            self._wait_until(self._stopped.wait)
        self.check()

    def raise_what_voided(self) -> None:
        """Raise the error for which an operation was withdrawn, unless it was raised before."""
        if self._is_stopping:
            self._wait_until(self._stopped_or_raised)
        self.check()

    def raise_elsewhere(self) -> None:
        """Raise the same error as all ranks, since some are not in this rank's blocking call."""
        self._wait_until(self._stopped.wait)
        self.check()

    def enters(self, label: str) -> None:
        """Count a blocking call on the host; raise, if others wait in one that this rank missed."""
        if self._error is not None and self._n_calls < self._awaited:
            self.check()
        self._label = label
        self._n_calls += 1

    def joins(self) -> None:
        """Note that this rank waits in join(): what the others queue meanwhile cannot complete."""
        self._label = "join()"
        self._n_calls |= _IN_JOIN  # more than that of any other call before all have joined

    def all_have_joined(self) -> None:
        """Note the end of join(); the others have raised what was found meanwhile.

        Raises:
            DeviceError: A rank's GPU has failed meanwhile.
        """
        self._n_calls = ((self._n_calls >> 32) + 1) << 32  # the same on all ranks
        with suppress(MismatchError):
            self.check()

    def close(self) -> None:
        """Wait until all notices have been compared; raise if there was a difference."""
        self._notices.put(None)
        self._wait_until(self._has_ended)
        self.check()

    def _has_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wait_until(self, is_over: Callable[[float], bool]) -> None:
        """Wait until `is_over`, or until the watchdog's thread has ended."""
        # In short waits, so that Ctrl-C works.
        while self._thread.is_alive() and not is_over(0.1):
            pass

    def _loop(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:  # a peer was lost, or a stall
            self._abort(error)
            self._raise_in_program(error)
            if isinstance(error, StallError):
                self._transport.members.abandon(str(error))
        finally:
            if self._unmatched is not None:
                self._unmatched.close(False)

    def _round(self) -> bool:
        """Compare with the other ranks' threads; return whether there is another round."""
        if self._stall_detector is not None:
            self._stall_detector.check()
        # Read before the notices: notices from before the latest of these blocking calls are then
        # seen below.
        n_agreed, blocking_call = self._n_calls, self._label
        notice = self._next()
        failure = self._failure()
        if failure:
            state, digest, label = _FAILED, 0, "the report of a GPU failure"
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
                    on_ranks(self._transport.ranks, allgather_texts(self._transport, failure))
                )
            if _LEAVES in states:
                return self._is_any_busy(announced) or self._end_with_all(states, announced, label)
            without = [n for n, has in zip(counts, announced, strict=True) if not has]
            with_notice = [n for n, has in zip(counts, announced, strict=True) if has]
            if with_notice and without and max(without) > min(with_notice):
                latest = max(without)
                here = f"{blocking_call}, a blocking call on the host"
                here = here if n_agreed == latest else "nothing yet"
                self._awaited = 0 if latest & _IN_JOIN else latest  # nobody passes join() by
                texts = allgather_texts(
                    self._transport, here if notice is None else notice.describe()
                )
                where = texts[announced.index(True)].partition("\n")[0]
                raise MismatchError(explain(where, texts, self._transport.ranks))
            waits = notice is not None and not all(announced)
            self._report_wait(f"{label}, queued on its GPU" if waits else "", announced)
            if notice is None or without:
                return True
            if _FOLLOWS not in states:
                notice.nobody_follows = True
            elif any(header.digest != digest for header in headers) or len(set(counts)) > 1:
                texts = allgather_texts(self._transport, notice.describe())
                raise MismatchError(explain(label, texts, self._transport.ranks))
        except (DeviceError, MismatchError) as error:
            self._abort(error)
            self._withdraw()
            self._transport.agree(0, label="the recovery from a GPU error")
            self._raise_in_program(error)
        if notice is not None:
            notice.settled.set()
            self._first = None
        return True

    def _report_wait(self, what: str, has_come: Sequence[bool]) -> None:
        """Report the ranks for which this one waits in `what`, if it is not empty."""
        if self._stall_detector is None:
            return
        if not what:
            if self._unmatched is not None:
                self._unmatched.close(True)
                self._unmatched = None
            return
        self._unmatched = self._unmatched or self._stall_detector.wait()
        ranks = self._transport.ranks
        arrived = [rank for rank, has in zip(ranks, has_come, strict=True) if has]
        late = [rank for rank, has in zip(ranks, has_come, strict=True) if not has]
        self._unmatched.report_if_due(what, arrived, late)

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
        """Return the failure of this rank's GPU if the others do not know it yet, else ""."""
        if self._error is not None:
            return ""
        return next(filter(None, (stream.failure() for stream in self._streams)), "")

    def _is_any_busy(self, announced: Sequence[bool]) -> bool:
        """Return whether no rank may leave yet, since some GPU is still at what all have queued.

        A GPU may be behind by minutes, and the others' parts are needed until it has read them.
        Ranks with a notice are not waited for: what is queued alone never ends.
        """
        is_idle = announced[self._transport.rank] or all(s.is_idle() for s in self._streams)
        headers = self._transport.agree(0, int(is_idle), label="the end of the GPUs' work")
        idle = [bool(header.count) for header in headers]
        what = "the end of the GPUs' work" if is_idle and not all(idle) else ""
        self._report_wait(what, idle)
        time.sleep(0 if all(idle) else IDLE_S)
        return not all(idle)

    def _end_with_all(self, states: Sequence[int], announced: Sequence[bool], label: str) -> bool:
        """End, since this is the last round of some rank; return False: no more rounds."""
        ranks = self._transport.ranks
        lost = PeerLostError(
            f"rank {ranks[states.index(_LEAVES)]} has left the job (its program ended, or it "
            f"called shutdown) while rank {ranks[self._transport.rank]} waited in {label}"
        )
        if announced[self._transport.rank]:
            raise lost
        if any(announced):  # their queued operations will never complete: this rank must not wait
            for stream in self._streams:
                stream.fail("this rank was shut down")
        if not self._closing:
            self._lost = lost
        return False

    def _withdraw(self) -> None:
        """Withdraw what this rank has submitted and others have not, which they now need not."""
        with self._submitting:
            self._is_stopping = True
            submitted = list(self._submitted)
            self._submitted.clear()

        def withdraw() -> None:
            for handle in submitted:
                handle.is_void = True  # before the program can observe the withdrawal
                handle.is_void = handle.withdraw(beside=True)

        # Not forever, as in _abort: the engine may be in an NCCL call.
        thread = threading.Thread(target=withdraw, name="horo_lite withdraws", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _abort(self, error: Exception) -> None:
        # All concurrently: aborting one may wait for memory that a stuck kernel of another holds.
        # Not forever: NCCL may not return, and the program must raise the error nevertheless.
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
        """Let this rank's program raise the error, and reconnect."""
        self._error = error
        self._stopped.set()
