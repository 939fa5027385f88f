"""MPI without THREAD_MULTIPLE: one thread makes the calls of all threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from horo_lite.errors import HoroLiteError

T = TypeVar("T")

_CLOSED = "shutdown() has ended operations that were in flight"


class MainThreadExecutor:
    """Makes other threads' MPI calls in the thread that called init().

    It does so while that thread is in a call of horo_lite: while a direct call waits, in poll,
    synchronize and shutdown. Only non-blocking calls are executed here; a wait repeats them. So
    this cannot deadlock: a direct call waits for the same direct call on its peers, and not for
    engines; and engines wait for engines, which are served wherever a thread waits, so they proceed
    like engines that call MPI themselves. (Ranks of a host also wait for each other in shared
    memory, without serving, but only when all have entered that call.) A part of the world has its
    own executor `beside` the world's: a wait in one serves both.
    """

    def __init__(self, beside: MainThreadExecutor | None = None) -> None:
        self._owner = threading.get_ident()
        self._closed = False
        # Of each request: the executor that it belongs to, the call, and the queue for its answer.
        self._requests: queue.SimpleQueue[
            tuple[MainThreadExecutor, Callable[[], Any], queue.SimpleQueue[Any]]
        ]
        self._requests = queue.SimpleQueue() if beside is None else beside._requests

    @staticmethod
    def if_needed(beside: MainThreadExecutor | None = None) -> MainThreadExecutor | None:
        """Return an executor for the calling thread, unless MPI grants THREAD_MULTIPLE."""
        from mpi4py import MPI

        return None if MPI.Query_thread() == MPI.THREAD_MULTIPLE else MainThreadExecutor(beside)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function(*args)` in the thread that may call MPI, and return its result."""
        if threading.get_ident() == self._owner:
            return function(*args)
        answers: queue.SimpleQueue[tuple[T, BaseException | None]] = queue.SimpleQueue()
        self._requests.put((self, partial(function, *args), answers))
        if self._closed:
            raise HoroLiteError(_CLOSED)
        value, error = answers.get()
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def check_thread(self) -> None:
        """Raise HoroLiteError in any thread except the one that may call MPI."""
        if threading.get_ident() != self._owner:
            raise HoroLiteError(
                "MPI was initialised without THREAD_MULTIPLE, so only the thread that called "
                "horo_lite.init() may make this call"
            )

    def serve(self, timeout_s: float) -> bool:
        """Make the next call that another thread requests; return whether there was one in time."""
        self.check_thread()
        value: Any = None
        error: BaseException | None = None
        try:
            whose, function, answers = self._requests.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return False
        try:
            if whose._closed:
                raise HoroLiteError(_CLOSED)
            value = function()
        except BaseException as raised:
            error = raised
        answers.put((value, error))
        try:
            if error is not None and not isinstance(error, Exception):
                raise error  # Ctrl-C must end this thread's call, too
            return True
        finally:
            del error  # its traceback refers to this frame

    def close(self) -> None:
        """Make every call that is or will be requested raise HoroLiteError."""
        self._closed = True
        others = []
        with suppress(queue.Empty):
            while True:
                request = self._requests.get_nowait()
                if request[0] is self:
                    request[2].put((None, HoroLiteError(_CLOSED)))
                else:
                    others.append(request)
        for request in others:
            self._requests.put(request)
