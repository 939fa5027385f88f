"""Ranks that the tasks of a cluster start: what Ray, Dask and Spark have in common.

A cluster runs n tasks at once, each on one of its workers. Each task starts one rank, in a process
of its own: whatever a rank does to its process, and however it ends, the worker goes on. The ranks
find each other without MPI, at an address of the host of rank 0, as `init(address=…)` has it.
"""

from __future__ import annotations

import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from horo_lite.launch import jobs
from horo_lite.launch.calls import write


class RankEnd(NamedTuple):
    """How a rank has ended, as its task reports it."""

    code: int
    """Its exit code."""
    said: str
    """The end of what it has printed."""
    files: dict[str, bytes]
    """What `calls.serve` has left there: its result or its error."""
    when: float
    """Seconds since 1970."""


class RankTask(NamedTuple):
    """What every task of a job is given; they differ in the number of their rank."""

    call: bytes
    """The pickled call, as `calls.serve` reads it."""
    size: int
    """The number of ranks."""
    env: dict[str, str]
    """Variables for the ranks, on top of the worker's environment."""
    path: list[str]
    """sys.path of the process that called `run`; the ranks look there after the worker's."""

    def run(
        self, rank: int, address: str, is_cancelled: Callable[[], bool] = lambda: False
    ) -> RankEnd:
        """Start a rank here, and wait for its end.

        Args:
            rank: Its number.
            address: The host of rank 0, and a free port there.
            is_cancelled: Whether nobody waits for the result any more; the rank then has a few
                seconds left.
        """
        path = [*sys.path, *(entry for entry in self.path if entry not in sys.path)]
        world = {
            "HORO_LITE_RANK": str(rank),
            "HORO_LITE_SIZE": str(self.size),
            "HORO_LITE_ADDRESS": address,
        }
        with tempfile.TemporaryDirectory(prefix="horo_lite-") as folder:  # mode 0700
            write(Path(folder, "call"), self.call)
            start = f"import sys; sys.path[:] = {path!r}; from horo_lite.launch.calls import serve"
            command = [
                sys.executable,
                "-c",
                f"{start}; serve({folder!r}, {self.size}, {rank})",
            ]
            job = jobs.Job(command, jobs.environment(self.env | world))
            code = job.wait(has_failed=is_cancelled)
            left = {
                file.name: file.read_bytes()
                for file in Path(folder).iterdir()
                if file.name in (f"result.{rank}", f"error.{rank}")
            }
            return RankEnd(code, job.tail, left, time.time())


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Return a rank for each task: those of one host have consecutive ones.

    The results are then those of a job with as many ranks on each host, to the bit.

    Args:
        hosts: The host of each task.
    """
    first = list(dict.fromkeys(hosts))
    order = sorted(range(len(hosts)), key=lambda task: first.index(hosts[task]))
    return [order.index(task) for task in range(len(hosts))]


def address_of(host: str, port: int) -> str:
    """Return "host:port", also of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """Return a port of this host that nobody listens at.

    It is below those that the kernel gives to outgoing connections: one of them might take it
    before rank 0 does.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port
