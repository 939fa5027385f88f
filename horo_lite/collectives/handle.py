"""Handles of asynchronous operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo_lite import _native


class Handle:
    """An operation in flight; pass it to `synchronize` or `poll`.

    `finish` returns its result, once it is done; `check` raises HoroLiteError if the calling thread
    must not wait for it.
    """

    def __init__(
        self,
        name: str,
        job: _native.Job | None,
        finish: Callable[[], Any],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._job = job
        self._check = check
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._finishing = threading.RLock()
        self._is_void = [False]  # shared by the handles of one operation

    @property
    def is_void(self) -> bool:
        """Whether it was withdrawn because a GPU failed, which raises an error on all ranks."""
        return self._is_void[0]

    @is_void.setter
    def is_void(self, is_void: bool) -> None:
        self._is_void[0] = is_void

    def then(self, finish: Callable[[], Any]) -> Handle:
        """Return another handle of the same operation, whose result is that of `finish`."""

        def both() -> Any:
            self._finished()
            return finish()

        other = Handle(self.name, self._job, both, self._check)
        other._is_void = self._is_void
        return other

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._job is None or self._job.done()

    def wait(self, beside: bool = False) -> Any:
        """Wait for the operation, and return its result.

        `beside` means that the calling thread is not the training thread.
        """
        if self._job is not None:
            self._check_wait()
            self._job.wait(beside)
        return self._finished()

    def _check_wait(self) -> None:
        if not self.done():
            self._check()

    def _finished(self) -> Any:
        """Finish the operation, unless that has been done: several threads may wait for it."""
        with self._finishing:
            if self._finish is not None:
                self._result, self._finish = self._finish(), None
            return self._result

    def withdraw(self, beside: bool = False) -> bool:
        """Give the operation up on this rank; return whether that prevented its execution.

        False if it was executed, on every rank. Either way, none of it is in progress any more.
        Does not wait for other ranks' programs. `beside` means that the calling thread is not the
        training thread.
        """
        self._check_wait()
        return self._job is not None and self._job.withdraw(beside)
