"""Detection of the end of this rank's launcher, after which nothing else would end the rank.

Ranks of one host exchange without MPI, which would notice it only in calls.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

from horo_lite.processes import name_of
from horo_lite.start import arrivals
from horo_lite.start.launcher import is_launcher


class LauncherEnd:
    """Calls back when the launcher ends, from a thread that waits for it, until `stop()`.

    Without pidfds (Linux before 5.3, and Pythons built for it) it does nothing.

    Args:
        callback: Called with the launcher's name and process ID.
    """

    def __init__(self, callback: Callable[[str], object]) -> None:
        self._files: list[int] = []
        self._thread: threading.Thread | None = None
        with suppress(OSError, AttributeError):
            pid = arrivals.launcher_process()
            if pid is None:
                return
            self._files.append(os.pidfd_open(pid))
            name = name_of(pid)
            # Now that it is open, the number cannot get another meaning. The first ancestor may be
            # another program if the launcher has ended.
            if arrivals.launcher_process() != pid or not is_launcher(name):
                return
            self._files.append(os.eventfd(0, os.EFD_CLOEXEC))
            self._thread = threading.Thread(
                target=self._watch,
                args=(callback, f"{name}, pid {pid}"),
                name="horo_lite: launcher",
                daemon=True,
            )
            self._thread.start()

    def _watch(self, callback: Callable[[str], object], launcher: str) -> None:
        ended, stopped = self._files
        if stopped not in _readable((ended, stopped)):
            callback(launcher)

    def has_come(self) -> bool:
        """Return whether the launcher has ended, which this object's thread may learn later."""
        return self._thread is not None and bool(_readable(self._files[:1], timeout_ms=0))

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            os.eventfd_write(self._files[1], 1)
            self._thread.join()
        for file in self._files:
            os.close(file)
        self._files.clear()


def _readable(files: Iterable[int], timeout_ms: int | None = None) -> list[int]:
    poll = select.poll()  # select() is limited to small descriptors
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(timeout_ms)]
