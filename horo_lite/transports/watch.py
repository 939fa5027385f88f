"""Whether the ranks queue the same things on their GPUs: found out by a thread beside the step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from horo_lite import _native
from horo_lite.agreement import digest_of, explain, told
from horo_lite.errors import DeviceError, MismatchError, PeerLostError, StallError
from horo_lite.transports import Header, Transport

if TYPE_CHECKING:
    from horo_lite.transports.mpi import Funnel
    from horo_lite.transports.nccl import Lane

# What a rank says in a round. It is there with a notice (of something that it can do as agreed on
# earlier, or cannot), with nothing, with a failure, or for the last time.
_IDLE, _DIFFERS, _FOLLOWS, _FAILED, _LEAVES = range(5)
_N_STATES = 8
ROUND_S = 0.2
MAX_BEHIND = 8
_ELSEWHERE = digest_of("not this call: it has queued something on its GPU that nobody else has")


class Notice:
    """What one rank says of one operation that it queues on its GPU."""

    def __init__(
        self,
        label: str,
        digest: int,
        describe: Callable[[], str],
        state: int,
        n_met: int,
        generation: int,
    ) -> None:
        self.label = label
        self.digest = digest
        self.describe = describe
        self.state = state
        self.n_met = n_met
        self.generation = generation
        self.nobody_follows = False
        self.settled = threading.Event()


class Watch:
    """Compares the notices of all ranks, in their order, over a transport of its own.

    The threads of all ranks meet in rounds: at once where there is a notice, a few times a second
    where there is none. So a rank that waits for its GPU, or in a call of the host's, hears of what
    went wrong elsewhere.

    Where notices differ, what waits on the GPUs is ended, on every rank. `check()` then raises the
    difference, once; what a rank announced before that is void, so that afterwards all ranks are at
    the same place again, and connect their GPUs anew. Failures of this rank's GPU are noticed, too,
    and the others told.

    A rank that cannot do what was agreed on earlier says so with `follows=False`, and then waits
    for the notice. If no rank follows, that is no mismatch but `nobody_follows`: all are waiting,
    and nothing has been queued.

    A rank that is in a direct call which meets the others on the host, where others have queued
    something on their GPUs instead, is found out by the number of such meetings (`Meetings`).
    """

    def __init__(self, transport: Transport, meetings: Meetings, lanes: Sequence[Lane]) -> None:
        self._transport = transport
        self._funnel: Funnel | None = getattr(transport, "funnel", None)
        self._meetings = meetings
        self._lanes = lanes
        self._error: Exception | None = None
        self._stopped = threading.Event()  # there is an error
        self._awaited = 0  # the meeting in which a rank waits for those that are elsewhere
        self._generation = 0
        self._lost: PeerLostError | None = None  # for whoever goes on alone
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._first: Notice | None = None
        self._closing = False
        self._lookout: _native.Lookout | None = getattr(meetings, "lookout", None)
        self._unmatched: _native.Wait | None = (
            None  # what this rank has queued, and others have not
        )
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="horo_lite watch", daemon=True)
        meetings.watch = self

    def start(self) -> None:
        """All ranks are there, and have their GPUs connected; not only for the first time."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def announce(
        self, label: str, digest: int, describe: Callable[[], str], *, follows: bool = True
    ) -> Notice:
        """This rank is about to queue this; returns at once, or raises what earlier ones led to."""
        self.check()
        if self._lost is not None:
            raise self._lost
        if self._lookout is not None:
            self._lookout.doing(label)
        state, n_met = _FOLLOWS if follows else _DIFFERS, self._meetings.n_met

        def tell() -> str:
            return f"{describe()}\nafter meeting on the host {n_met} times"

        notice = Notice(label, digest, tell, state, n_met, self._generation)
        self._notices.put(notice)
        if self._funnel is not None:  # nobody else lets the thread speak
            self._serve_until(lambda _: self._notices.qsize() < MAX_BEHIND)
        return notice

    def wait(self, notice: Notice) -> None:
        """All ranks have said theirs; raises if they differ, or if that will not be."""
        self._serve_until(notice.settled.wait)
        self.check()

    def check(self) -> None:
        """Raises what the comparison of earlier notices led to, or StallError."""
        if self._lookout is not None:
            self._lookout.check()
        error = self._error
        if error is None:
            return
        if isinstance(error, (MismatchError, DeviceError)):
            if self._meetings.n_met < self._awaited:
                self._meetings.pass_by()
            for lane in self._lanes:
                if lane.failure():  # not what has been connected since
                    lane.reset()
            self._generation += 1
            self._stopped.clear()
            self._error = None
        raise error

    def raise_common(self) -> None:
        """If a GPU of this rank has failed, all ranks have heard of it, and this one raises it."""
        if self._failure():
            self._serve_until(self._stopped.wait)
        self.check()

    def raise_elsewhere(self) -> None:
        """Raises what all ranks will, since some of them are not in this rank's direct call."""
        self._serve_until(self._stopped.wait)
        self.check()

    def is_awaited(self) -> bool:
        """Whether other ranks are in a direct call that this one should have made before."""
        return self._error is not None and self._meetings.n_met < self._awaited

    def close(self) -> None:
        """All that was announced has been compared; raises if there was a difference."""
        self._notices.put(None)
        self._serve_until(self._has_ended)
        self._meetings.watch = None
        self.check()

    def _has_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve_until(self, is_over: Callable[[float], bool]) -> None:
        """Waits, but not for a thread that has ended."""
        while self._thread.is_alive():
            # In turns, so that Ctrl-C works.
            if is_over(0.1 if self._funnel is None else 0.0):
                return
            if self._funnel is not None:  # MPI takes calls from one thread only: this one
                self._funnel.serve(0.05)

    def _loop(self) -> None:
        try:
            while self._round():
                pass
        except Exception as error:  # a peer is gone, or nothing moves
            self._stop(error)
            if isinstance(error, StallError):
                self._transport.abandon(str(error))
        finally:
            if self._unmatched is not None:
                self._unmatched.close(False)

    def _round(self) -> bool:
        """The ranks' threads have met; whether there is to be another time."""
        if self._lookout is not None:
            self._lookout.check()
        # What was announced before the latest of these meetings is seen below.
        n_met, place = self._meetings.n_met, self._meetings.label
        notice = self._next()
        failure = self._failure()
        if failure:
            state, digest, label = _FAILED, 0, "a failure of a GPU"
        elif notice is not None:
            state, digest, label, n_met = notice.state, notice.digest, notice.label, notice.n_met
        else:
            state, digest, label = _LEAVES if self._closing else _IDLE, 0, "the GPUs' watch"
        said = digest, n_met * _N_STATES + state
        headers = self._transport.agree(*said, label=label)
        states = [header.count % _N_STATES for header in headers]
        meetings = [header.count // _N_STATES for header in headers]
        speaks = [state in (_FOLLOWS, _DIFFERS) for state in states]
        try:
            if _FAILED in states:
                texts = told(self._transport, failure)
                failed = [r for r, state in enumerate(states) if state == _FAILED]
                raise DeviceError(
                    "; ".join(f"on rank {self._transport.ranks[r]}, {texts[r]}" for r in failed)
                )
            if _LEAVES in states:
                return self._part(states, speaks, label)
            silent = [n for n, speaking in zip(meetings, speaks, strict=True) if not speaking]
            spoken = [n for n, speaking in zip(meetings, speaks, strict=True) if speaking]
            if spoken and silent and max(silent) > min(spoken):
                self._awaited = max(silent)
                here = f"{place}, where the ranks meet on the host"
                here = here if n_met == self._awaited else "nothing yet"
                texts = told(self._transport, here if notice is None else notice.describe())
                where = texts[speaks.index(True)].partition("\n")[0]
                raise MismatchError(explain(where, texts, self._transport.ranks))
            self._look(None if notice is None or all(speaks) else notice, speaks)
            if notice is None or silent:
                return True
            if _FOLLOWS not in states:
                notice.nobody_follows = True
            elif any(header.digest != digest for header in headers) or len(set(meetings)) > 1:
                texts = told(self._transport, notice.describe())
                raise MismatchError(explain(label, texts, self._transport.ranks))
        except (DeviceError, MismatchError) as error:
            self._stop(error)
        if notice is not None:
            notice.settled.set()
            self._first = None
        return True

    def _look(self, notice: Notice | None, speaks: Sequence[bool]) -> None:
        """What this rank has queued waits for ranks that have not: they may be late."""
        if self._lookout is None:
            return
        if notice is None:
            if self._unmatched is not None:
                self._unmatched.close(True)
                self._unmatched = None
            return
        self._unmatched = self._unmatched or self._lookout.wait()
        ranks = self._transport.ranks
        come = [rank for rank, speaking in zip(ranks, speaks, strict=True) if speaking]
        late = [rank for rank, speaking in zip(ranks, speaks, strict=True) if not speaking]
        self._unmatched.look(f"{notice.label}, queued on its GPU", come, late)

    def _next(self) -> Notice | None:
        """The first notice that has not been compared; None if there is none for a while."""
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
        """What happened to this rank's GPU that the others do not know yet."""
        if self._error is not None:
            return ""
        return next(filter(None, (lane.failure() for lane in self._lanes)), "")

    def _part(self, states: Sequence[int], speaks: Sequence[bool], label: str) -> bool:
        """Some rank is here for the last time, so all are."""
        ranks = self._transport.ranks
        lost = PeerLostError(
            f"rank {ranks[states.index(_LEAVES)]} has left the job (its program ended, or it "
            f"called shutdown) while rank {ranks[self._transport.rank]} waited in {label}"
        )
        if speaks[self._transport.rank]:
            raise lost
        if any(speaks):  # what they have queued will never be complete, and this need not wait
            for lane in self._lanes:
                lane.fail("this rank was shut down")
        if not self._closing:
            self._lost = lost
        return False

    def _stop(self, error: Exception) -> None:
        # All at once: aborting one may wait for memory that a stuck kernel of another keeps.
        aborts = [
            threading.Thread(target=lane.fail, args=(str(error),), daemon=True)
            for lane in self._lanes
        ]
        for abort in aborts:
            abort.start()
        for abort in aborts:
            abort.join()
        self._error = error  # from here on this rank's program may raise it, and connect anew
        self._stopped.set()


class Meetings:
    """The transport of direct calls, counting how often this rank has met the others there."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.watch: Watch | None = None
        self.n_met = 0
        self.label = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def host(self) -> Meetings:
        return self

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        if self.watch is not None and self.watch.is_awaited():
            self.watch.check()
        self.label = label
        self.n_met += 1
        headers = self._transport.agree(digest, count, weight, label=label)
        if self.watch is not None and any(header.digest == _ELSEWHERE for header in headers):
            self.watch.raise_elsewhere()
        return headers

    def pass_by(self) -> None:
        """Those that wait in a direct call hear that this rank is not in it."""
        self.n_met += 1
        self._transport.agree(_ELSEWHERE, label=self.label)
