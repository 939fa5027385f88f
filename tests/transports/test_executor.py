"""Calls that threads hand over to the main-thread MPI executor."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from horo_lite.transports.mpi.executor import MainThreadExecutor


class Resource:
    """A local variable of a call that fails."""


def test_what_a_failed_call_had_is_freed_with_its_error() -> None:
    """Not only when the garbage collector runs: its finalizer may wait for a GPU."""
    executor = MainThreadExecutor()
    kept: list[weakref.ref[Resource]] = []

    def fail() -> None:
        resource = Resource()
        kept.append(weakref.ref(resource))
        raise ValueError("no such thing")

    def ask() -> None:
        with pytest.raises(ValueError, match="no such thing"):
            executor.call(fail)

    gc.disable()
    try:
        thread = threading.Thread(target=ask)
        thread.start()
        assert executor.serve(60)
        thread.join()
        assert len(kept) == 1
        assert kept[0]() is None
    finally:
        gc.enable()
