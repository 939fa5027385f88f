"""Asynchronous operations, as their caller holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo_lite import _native


class Handle:
    """An operation in flight, to be given to `synchronize` or `poll`."""

    def __init__(self, name: str, job: _native.Job | None, finish: Callable[[], Any]) -> None:
        self.name = name
        self._job = job
        self._finish = finish
        self._is_void = [False]  # shared by the handles of one operation

    @property
    def is_void(self) -> bool:
        """Whether it was withdrawn because a GPU has failed, which all ranks raise."""
        return self._is_void[0]

    @is_void.setter
    def is_void(self, is_void: bool) -> None:
        self._is_void[0] = is_void

    def then(self, finish: Callable[[], Any]) -> Handle:
        """Another handle of the same operation: what it returns is made by `finish`."""

        def both() -> Any:
            self._finish()
            return finish()

        other = Handle(self.name, self._job, both)
        other._is_void = self._is_void
        return other

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._job is None or self._job.done()

    def wait(self, beside: bool = False) -> Any:
        """Wait for the operation, and return its result.

        `beside` says that the calling thread is another than the one that trains.
        """
        if self._job is not None:
            self._job.wait(beside)
        return self._finish()

    def withdraw(self, beside: bool = False) -> bool:
        """Give the operation up on this rank; whether it never was and never will be carried out.

        False where it is done, on every rank. Either way nothing of it is under way any more. Waits
        for no other rank's program. `beside` says that the calling thread is another than the one
        that trains.
        """
        return self._job is not None and self._job.withdraw(beside)
