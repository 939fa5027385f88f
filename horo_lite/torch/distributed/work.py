"""Operations in flight for torch.distributed: `Work`, and their futures."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch import distributed as dist

from horo_lite import context
from horo_lite.collectives.handle import Handle
from horo_lite.start import stall
from horo_lite.torch.uncompiled import all_uncompiled

_NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout: use that of the process group
_numbers = itertools.count()  # of works, in the order of submission


@all_uncompiled
class Work(dist.Work):
    """An operation in flight.

    `wait()` waits in the calling thread, where errors have their own types and Ctrl-C works. A
    future is completed by the process group's `Waiter`, since the program may never call `wait()`.

    Args:
        handle: The operation's handle in the group.
        tensors: The tensors of its result.
        waiter: The process group's waiter.
        timeout_s: The limit, in seconds, of waits without their own timeout, also the waiter's; 0
            for only that of the world.
        finish: Called after the operation, to move received data to the caller's tensors.
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
        self.number = next(_numbers)
        self._handle = handle
        self._tensors = list(tensors)
        self._waiter = waiter
        self._timeout_s = timeout_s
        self._finish = finish
        self._lock = threading.RLock()  # a signal handler may wait in the middle of it
        self._is_settled = False
        self._error: Exception | None = None
        self._value: Any = None
        self._begin: Any = None
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the operation is complete.

        Raises:
            MismatchError: On every rank, if the ranks' calls differ.
            PeerLostError: A rank died, left or failed.
            StallError: A rank did not call it in time; the message says which, and what it does.
        """
        self.settle(timeout_s=timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait()` would return or raise at once."""
        if not self._is_settled and self._handle.done():
            self.settle()
        return self._is_settled

    def is_success(self) -> bool:
        """Return whether it has completed successfully."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error, if it has failed."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """Return the tensors that hold the result."""
        return self._tensors

    def get_future(self) -> Any:
        """Return a future of the tensors that hold the result.

        Its callbacks run in a thread of the process group, one after the other; in a callback, the
        future of a further operation is complete when it is returned. In C++ and `then()`, an error
        is a RuntimeError with the text of the original.
        """
        if self._future is None:
            self._begin = torch.futures.Future()
            # C++ (DDP's reducer) sees only errors that a callback raises: set_exception() hides
            # them in the value.
            self._future = self._begin.then(lambda _: self._outcome())
            # In C++, the future of a work that was waited for is complete. In a callback, only this
            # thread can complete it.
            if self._is_settled or self._waiter.is_this_thread():
                self.settle(beside=True)
                self.complete_future()
            else:
                self._waiter.put(self)
        return self._future

    def settle(self, beside: bool = False, timeout_s: float = 0.0) -> None:
        """Wait until it has ended, successfully or not.

        Args:
            beside: Whether the calling thread is not one of the program.
            timeout_s: The limit, in seconds, if it is not the work's own.
        """
        if self._is_settled:
            return
        error, value = None, None
        try:
            with limited(timeout_s if timeout_s > 0 else self._timeout_s):
                value = self._handle.wait(beside)
        except Exception as failure:
            if not (beside or self._handle.done()):  # refused, or a signal handler's: it goes on
                raise
            error = failure
        with self._lock:
            finish, self._finish = self._finish, None
            if error is None and finish is not None:
                try:
                    finish(value)
                except Exception as failure:  # for the caller; it must not end the waiter
                    error = failure
            self._error = self._error or error  # another thread may have set it
            self._value, self._is_settled = value, True

    def complete_future(self) -> None:
        """Complete the future of an operation that has ended, if one was requested."""
        begin, self._begin = self._begin, None
        if begin is not None:
            begin.set_result(None)

    def _outcome(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error.with_traceback(None)  # C++ would include the traceback in the text
        return self._tensors


@all_uncompiled
class Receive(Work):
    """A message that is being received; its handle's value is the sender's rank in the group."""

    def source_rank(self) -> int:
        """Return the sender's rank in the process group."""
        self.wait()
        return int(self._value)

    _source_rank = source_rank


class AllOf(Handle):
    """Several works as one operation, which ends when all of them have."""

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
    """Limit waits of this rank in the block: longer ones raise StallError on every rank.

    Has no effect for 0, or if the world's own limit is not longer.
    """
    if timeout_s <= 0 or not context.is_initialized():
        return contextlib.nullcontext()
    detector = stall.detector_of(context.world())
    if detector is None or 0 < detector.abort_s <= timeout_s:
        return contextlib.nullcontext()
    return stall.abort_after(timeout_s)


class Waiter:
    """The thread that waits for the operations of a process group that have futures.

    It is started for the first one. Each kind of operation, collectives or messages, has its own
    waiter, which gets them in the order of submission, so none is delayed by a later one. If the
    program asks for their futures in another order, the earlier one has a thread of its own.
    """

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal handler may put a work in the middle of it
        self._latest = -1  # number
        _waiters.add(self)

    def put(self, work: Work) -> None:
        """Settle the work and complete its future, after those before it."""
        with self._lock:
            if work.number < self._latest:
                other = Waiter()
                other.put(work)
                other._works.put(None)
                return
            self._latest = work.number
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="horo_lite futures", daemon=True)
                if self._thread is None:  # still: see `_lock`
                    self._thread = thread
                    thread.start()
            self._works.put(work)

    def is_this_thread(self) -> bool:
        """Return whether the calling thread is the waiter."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """End the thread after the work in its queue: no operation is in flight any more."""
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
            del work  # otherwise its tensors would live until the next one


_reducer: Any = dist.Reducer
_set_work_of_join = _reducer._set_forward_pass_work_handle
_works_of_joins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _keep_work_of_join(reducer: Any, work: Any, *options: Any) -> None:
    """Keep a work as long as DDP's reducer, to which `join()` passes it without another reference.

    C++ keeps only its own part of the object. Without the Python part, `wait()` would be that of
    the base class, which nothing ends.
    """
    _works_of_joins[reducer] = work
    _set_work_of_join(reducer, work, *options)


_reducer._set_forward_pass_work_handle = _keep_work_of_join

_waiters: WeakSet[Waiter] = WeakSet()


def _close_all() -> None:
    """End all waiters: a daemon thread inside the core at Python's exit would end the process."""
    for waiter in list(_waiters):
        waiter.close()


context.on_ended(_close_all)
