"""Handles of asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo_lite import _native


class Handle:
    """An operation in flight; pass it to `synchronize` or `poll`."""

    def __init__(self, name: str, job: _native.Job | None, finish: Callable[[], Any]) -> None:
        self.name = name
        self._job = job
        self._finish = finish
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
            self._finish()
            return finish()

        other = Handle(self.name, self._job, both)
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
            self._job.wait(beside)
        return self._finish()

    def withdraw(self, beside: bool = False) -> bool:
        """Give the operation up on this rank; return whether that prevented its execution.

        False if it was executed, on every rank. Either way, none of it is in progress any more.
        Does not wait for other ranks' programs. `beside` means that the calling thread is not the
        training thread.
        """
        return self._job is not None and self._job.withdraw(beside)
