"""Ranks that the tasks of a cluster start: what Ray, Dask and Spark have in common.

A cluster runs n tasks at once, each on one of its workers. Each task starts one rank in its own
process: whatever a rank does to it, and however the rank ends, the worker continues. The ranks find
each other without MPI, at an address on rank 0's host, as with `init(address=…)`.
"""

from __future__ import annotations

import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from horo_lite.launch import calls, jobs

GRACE_S = 2.0
"""After a rank has failed, how long the others may take to end by themselves.

Those in the same world end at once. Those still waiting for it in init() would keep waiting.
"""

T = TypeVar("T")


class RankEnd(NamedTuple):
    """How a rank ended, as reported by its task."""

    rank: int
    code: int
    """Its exit code."""
    said: str
    """The end of its output."""
    files: dict[str, bytes]
    """The files that `calls.serve` has written: its result or its error."""
    when: float
    """Seconds since 1970."""


class RankTask(NamedTuple):
    """What every task of a job receives; only the rank differs."""

    call: bytes
    """The pickled call, as `calls.serve` reads it."""
    size: int
    """The number of ranks."""
    env: dict[str, str]
    """Variables for the ranks, added to the worker's environment."""
    path: list[str]
    """sys.path of the process that called `run`; ranks search it after the worker's."""

    def run(
        self, rank: int, address: str, is_cancelled: Callable[[], bool] = lambda: False
    ) -> RankEnd:
        """Start a rank here, and wait for its end.

        Args:
            rank: Its number.
            address: The host of rank 0, and a free port there.
            is_cancelled: Returns whether the result is no longer needed or another rank has failed;
                the rank then has GRACE_S left.
        """
        path = [*sys.path, *(entry for entry in self.path if entry not in sys.path)]
        world = {
            "HORO_LITE_RANK": str(rank),
            "HORO_LITE_SIZE": str(self.size),
            "HORO_LITE_ADDRESS": address,
        }
        with tempfile.TemporaryDirectory(prefix="horo_lite-") as folder:  # mode 0700
            calls.write(Path(folder, "call"), self.call)
            command = calls.command(path, folder, self.size, rank)
            job = jobs.Job(command, jobs.environment(self.env | world))
            code = job.wait(has_failed=is_cancelled, grace_s=GRACE_S)
            left = {
                file.name: file.read_bytes()
                for file in Path(folder).iterdir()
                if file.name in (f"result.{rank}", f"error.{rank}")
            }
            return RankEnd(rank, code, job.tail, left, time.time())


def ends_of(
    running: Sequence[T],
    first_done: Callable[[Sequence[T], float | None], Collection[T]],
    end_of: Callable[[T], RankEnd],
) -> list[RankEnd]:
    """Wait for tasks, and return how their ranks ended.

    After a rank has failed, only those that end within GRACE_S are returned. The caller ends the
    others.

    Args:
        running: The cluster's handles of the tasks.
        first_done: Waits until some of the given tasks are done, or for the given seconds, and
            returns those that are done.
        end_of: Returns the result of a task that is done.

    Raises:
        Exception: From `end_of`: the task itself has failed.
    """
    ends: list[RankEnd] = []
    waiting, until = list(running), None
    while waiting:
        done = first_done(waiting, None if until is None else max(0.0, until - time.monotonic()))
        if not done:
            break
        ends += [end_of(task) for task in waiting if task in done]
        waiting = [task for task in waiting if task not in done]
        if until is None and any(end.code for end in ends):
            until = time.monotonic() + GRACE_S
    return ends


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Return a rank for each task, such that ranks on the same host are consecutive.

    Results then have the same bits as in any job with these numbers of ranks on the hosts.

    Args:
        hosts: The host of each task.
    """
    first = list(dict.fromkeys(hosts))
    order = sorted(range(len(hosts)), key=lambda task: first.index(hosts[task]))
    return [order.index(task) for task in range(len(hosts))]


def address_of(host: str, port: int) -> str:
    """Return "host:port", also for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """Return a free port of this host.

    It is below those that the kernel assigns to outgoing connections, which might otherwise take it
    before rank 0 does.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port
