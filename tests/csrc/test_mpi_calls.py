"""C++ that calls MPI, over fake MPI functions."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from horo_lite import _native

NAMES = ("isend", "irecv", "iallgather", "testall", "iprobe", "recv", "get_count")


class FakeMpi:
    """Slow functions with MPICH's handles that record which threads are in them."""

    def __init__(self) -> None:
        self.called: dict[str, set[int]] = {name: set() for name in NAMES}
        self.at_once = 0
        """The largest number of threads that were in MPI functions at the same time."""
        self._inside: set[int] = set()
        self._numbers = itertools.count()
        # The largest number of arguments of any of them; excess arguments are not read.
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 8)
        self._functions = [kind(self._noting(name)) for name in NAMES]
        self._functions += [kind(lambda *_: 0)] * 2  # finalized, error_string

    def _noting(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            thread = threading.get_ident()
            self.called[name].add(thread)
            self._inside.add(thread)
            self.at_once = max(self.at_once, len(self._inside))
            time.sleep(1e-3)  # without the GIL
            self._inside.discard(thread)
            if name == "testall":
                ctypes.c_int.from_address(arguments[2]).value = 1
            elif name == "iprobe":  # nothing, and sometimes a message
                ctypes.c_int.from_address(arguments[3]).value = next(self._numbers) % 3 == 0
            elif name == "get_count":
                ctypes.c_int.from_address(arguments[2]).value = 0
            return 0

        return function

    def point_to_point(self) -> _native.MpiPointToPoint:
        """Return an object that calls these."""
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in self._functions]
        handle = bytes(4)
        return _native.MpiPointToPoint.over(addresses, handle, handle, -2, -1, 20, 0, 4)


def test_one_thread_at_a_time_is_in_mpi() -> None:
    """Otherwise Open MPI's transport over TCP may deadlock when a peer dies (docs/elastic.md)."""
    fake = FakeMpi()
    messages = [fake.point_to_point() for _ in range(3)]  # as of several transports
    memory = np.zeros(8, np.uint8)
    part = (0, 2, memory.ctypes.data, memory.nbytes)
    begin = threading.Barrier(4)
    errors: list[BaseException] = []

    def repeat(calls: Callable[[], object]) -> None:
        begin.wait(20)
        try:
            for _ in range(10):
                calls()
        except BaseException as error:
            errors.append(error)

    def exchange(messages: _native.MpiPointToPoint) -> None:
        assert messages.start([part], [part], memory)()

    channels = [each.control_channel() for each in messages[:2]]
    threads = [
        threading.Thread(target=repeat, args=[calls])
        for calls in (
            lambda: exchange(messages[0]),
            lambda: exchange(messages[2]),
            channels[0].receive,
            lambda: channels[1].send({1: b"text"}, 1),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert fake.at_once == 1
    callers = {name: len(threads) for name, threads in fake.called.items() if name != "iallgather"}
    assert callers == {"isend": 3, "irecv": 2, "testall": 3, "iprobe": 1, "recv": 1, "get_count": 1}
