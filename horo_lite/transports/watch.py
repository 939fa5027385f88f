"""Whether the ranks queue the same things on their GPUs: found out by a thread beside the step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from horo_lite.agreement import explain, told
from horo_lite.errors import DeviceError, MismatchError
from horo_lite.transports import Transport

if TYPE_CHECKING:
    from horo_lite.transports.mpi import Funnel
    from horo_lite.transports.nccl import Lane

_DIFFERS, _FOLLOWS, _FAILED = range(3)
POLL_S = 0.2
MAX_BEHIND = 8


class Notice:
    """What one rank says of one operation that it queues on its GPU."""

    def __init__(
        self, label: str, digest: int, describe: Callable[[], str], state: int, generation: int
    ) -> None:
        self.label = label
        self.digest = digest
        self.describe = describe
        self.state = state
        self.generation = generation
        self.nobody_follows = False
        self.settled = threading.Event()


class Watch:
    """Compares the notices of all ranks, in their order, over a transport of its own.

    Where they differ, what waits on the GPUs is ended, on every rank. `check()` then raises the
    difference, once; what a rank announced before that is void, so that afterwards all ranks are at
    the same place again, and connect their GPUs anew. Failures of this rank's GPU are noticed, too,
    and the others told.

    A rank that cannot do what was agreed on earlier says so with `follows=False`, and then waits
    for the notice. If no rank follows, that is no mismatch but `nobody_follows`: all are waiting,
    and nothing has been queued.
    """

    def __init__(self, transport: Transport, lanes: Sequence[Lane]) -> None:
        self._transport = transport
        self._funnel: Funnel | None = getattr(transport, "funnel", None)
        self._lanes = lanes
        self._error: Exception | None = None
        self._generation = 0
        self._notices: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="horo_lite watch", daemon=True)
        self._thread.start()

    def announce(
        self, label: str, digest: int, describe: Callable[[], str], *, follows: bool = True
    ) -> Notice:
        """This rank is about to queue this; returns at once, or raises what earlier ones led to."""
        self.check()
        state = _FOLLOWS if follows else _DIFFERS
        notice = Notice(label, digest, describe, state, self._generation)
        self._notices.put(notice)
        if self._funnel is not None:  # nobody else lets the thread speak
            self._serve_until(lambda _: self._notices.qsize() < MAX_BEHIND)
        return notice

    def wait(self, notice: Notice) -> None:
        """All ranks have said theirs, or that will not be."""
        self._serve_until(notice.settled.wait)

    def check(self) -> None:
        """Raises what the comparison of earlier notices led to."""
        error = self._error
        if error is None:
            return
        if isinstance(error, (MismatchError, DeviceError)):
            self._generation += 1
            self._error = None
            for lane in self._lanes:
                lane.reset()
        raise error

    def close(self) -> None:
        """All that was announced has been compared; raises if there was a difference."""
        self._notices.put(None)

        def has_ended(timeout_s: float) -> bool:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()

        self._serve_until(has_ended)
        self.check()

    def _serve_until(self, is_over: Callable[[float], bool]) -> None:
        """Waits. Where MPI takes calls from one thread only, this one makes the other's."""
        while not is_over(0.1 if self._funnel is None else 0.0):  # in turns, so that Ctrl-C works
            if self._funnel is not None:
                self._funnel.serve(0.05)

    def _loop(self) -> None:
        while True:
            try:
                notice = self._notices.get(timeout=POLL_S)
            except queue.Empty:
                self._look()
                continue
            if notice is None:
                return
            if self._error is None and notice.generation == self._generation:
                try:
                    self._compare(notice)
                except Exception as error:
                    self._stop(error)
            notice.settled.set()

    def _look(self) -> None:
        if self._error is not None:
            return
        try:
            for lane in self._lanes:
                lane.poll()
        except DeviceError as error:
            text = str(error)
            notice = Notice("a failure of a GPU", 0, lambda: text, _FAILED, self._generation)
            self._stop(error)
            try:
                self._compare(notice)
            except (DeviceError, MismatchError):
                pass  # this rank knows already
            except Exception as lost:
                self._stop(lost)

    def _stop(self, error: Exception) -> None:
        self._error = error
        for lane in self._lanes:
            lane.fail(str(error))

    def _compare(self, notice: Notice) -> None:
        headers = self._transport.agree(notice.digest, notice.state, label=notice.label)
        states = [header.count for header in headers]
        if any(state == _FAILED for state in states):
            texts = told(self._transport, notice.describe())
            raise DeviceError(
                "; ".join(
                    f"on rank {rank}, {texts[rank]}"
                    for rank, state in enumerate(states)
                    if state == _FAILED
                )
            )
        if not any(states):
            notice.nobody_follows = True
        elif any(header.digest != notice.digest for header in headers):
            texts = told(self._transport, notice.describe())
            raise MismatchError(explain(notice.label, texts, self._transport.ranks))
