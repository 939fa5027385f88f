"""Operations in flight as torch.distributed knows them: `Work`, and their futures."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch import distributed as dist

from horo_lite import context
from horo_lite.collectives.handle import Handle
from horo_lite.start import stall
from horo_lite.torch.uncompiled import all_uncompiled

_NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout: that of the process group counts


@all_uncompiled
class Work(dist.Work):
    """An operation in flight.

    `wait()` waits in the calling thread, where errors have their own types and Ctrl-C works. A
    future is completed by the process group's `Waiter`, since nobody may call anything for it.

    Args:
        handle: The operation, as the group of ranks knows it.
        tensors: What its result is.
        waiter: The process group's.
        timeout_s: Seconds that a `wait()` of no timeout of its own may take; 0 for no limit but the
            world's.
        finish: Moves what has arrived to where the caller wants it, once the operation is over.
    """

    def __init__(
        self,
        handle: Handle,
        tensors: Sequence[Tensor],
        waiter: Waiter,
        timeout_s: float = 0.0,
        finish: Callable[[Any], None] | None = None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._tensors = list(tensors)
        self._waiter = waiter
        self._timeout_s = timeout_s
        self._finish = finish
        self._lock = threading.Lock()
        self._is_settled = False
        self._error: Exception | None = None
        self._value: Any = None
        self._begin: Any = None
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return when the result is there.

        Raises:
            MismatchError: The ranks differ; on every rank.
            PeerLostError: A rank died, left or failed.
            StallError: A rank did not come in time; the message says which, and what it does.
        """
        seconds = timeout.total_seconds()
        with limited(seconds if seconds > 0 else self._timeout_s):
            self.settle()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether `wait()` would return or raise at once."""
        if not self._is_settled and self._handle.done():
            self.settle()
        return self._is_settled

    def is_success(self) -> bool:
        """Tell whether it is over and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return what went wrong, if anything has up to now."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that a received message came from, as the process group counts."""
        self.wait()
        return int(self._value)

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the tensors that hold the result.

        Its callbacks run in a thread of the process group's, one after the other; in there, the
        future of a further operation is complete when it is returned. An error reaches C++ and
        `then()` as a RuntimeError with the text of the original.
        """
        if self._future is None:
            self._begin = torch.futures.Future()
            # Only what a callback raises is an error to C++ (DDP's reducer): set_exception() hides
            # it in the value.
            self._future = self._begin.then(lambda _: self._outcome())
            if self._waiter.is_this_thread():  # a callback's: nobody else would complete it
                self.settle(beside=True)
                self.complete_future()
            else:
                self._waiter.put(self)
        return self._future

    def settle(self, beside: bool = False) -> None:
        """Return when it is over, successfully or not.

        Args:
            beside: Whether the calling thread is another than the program's.
        """
        if self._is_settled:
            return
        error, value = None, None
        try:
            value = self._handle.wait(beside)
        except Exception as failure:
            error = failure
        with self._lock:
            finish, self._finish = self._finish, None
            if error is None and finish is not None:
                try:
                    finish(value)
                except Exception as failure:  # the caller's to see, and not the waiter's end
                    error = failure
            self._error = self._error or error  # another thread may have been here
            self._value, self._is_settled = value, True

    def complete_future(self) -> None:
        """Complete the future of an operation that is over, if somebody has asked for one."""
        begin, self._begin = self._begin, None
        if begin is not None:
            begin.set_result(None)

    def _outcome(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error.with_traceback(None)  # C++ makes its lines a part of the text
        return self._tensors


class AllOf(Handle):
    """Several works as one operation, which is over when nothing is left to do for any of them."""

    def __init__(self, name: str, works: Sequence[Work]) -> None:
        super().__init__(name, None, lambda: None)
        self._works = works

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, beside: bool = False) -> None:
        for work in self._works:
            work.settle(beside)
            error = work.exception()
            if error is not None:
                raise error


def limited(timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Inside, a wait of this rank that takes longer raises StallError on every rank.

    Nothing changes for 0, or where the world's own limit is not longer.
    """
    if timeout_s <= 0 or not context.is_initialized():
        return contextlib.nullcontext()
    detector = stall.detector_of(context.world())
    if detector is None or 0 < detector.abort_s <= timeout_s:
        return contextlib.nullcontext()
    return stall.abort_after(timeout_s)


class Waiter:
    """The thread that waits for the operations of a process group that have futures.

    It begins with the first of them. Operations of one kind, collectives or messages, are given to
    one waiter, in the order in which they were submitted, so none is held up by a later one.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        _waiters.add(self)

    def put(self, work: Work) -> None:
        """Settle the work and complete its future, when those before are over."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="horo_lite futures", daemon=True
                )
                self._thread.start()
            self._works.put(work)

    def is_this_thread(self) -> bool:
        """Tell whether the thread that asks is the waiter."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread, after what it was given: no operation is in flight any more."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout=10.0)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            work.settle(beside=True)
            work.complete_future()
            del work  # or its tensors stay until the next one comes


_waiters: WeakSet[Waiter] = WeakSet()


def _close_all() -> None:
    """A daemon thread that is in the core when Python ends would end the process."""
    for waiter in list(_waiters):
        waiter.close()


context.on_ended(_close_all)
