"""Asynchronous operations, as their caller holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horo_lite import timeline

if TYPE_CHECKING:
    from horo_lite import _native


class Handle:
    """An operation in flight, to be given to `synchronize` or `poll`."""

    def __init__(self, name: str, job: _native.Job | None, finish: Callable[[], Any]) -> None:
        self.name = name
        self._job = job
        self._finish = finish
        self.is_void = False
        """Whether it was withdrawn because a GPU has failed, which all ranks raise."""

    def done(self) -> bool:
        return self._job is None or self._job.done()

    def wait(self, beside: bool = False) -> Any:
        if self._job is not None:
            try:
                self._job.wait(beside)
            finally:
                timeline.record_completed()
        return self._finish()

    def withdraw(self, beside: bool = False) -> bool:
        """Give the operation up on this rank; whether it never was and never will be carried out.

        False where it is done, on every rank. Either way nothing of it is under way any more. Waits
        for no other rank's program. `beside` says that the calling thread is another than the one
        that trains.
        """
        return self._job is not None and self._job.withdraw(beside)
