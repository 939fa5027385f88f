"""Jobs whose ranks are not started by MPI: with the variables that torchrun and schedulers set."""

from __future__ import annotations

import random
import socket
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launch import Job, Result, environment

# Starts ranks as a scheduler would, and returns 0 only if all have.
START = """
import os, subprocess, sys
size, port, *command = sys.argv[1:]
meet = {"WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
ranks = [subprocess.Popen([sys.executable, *command], env=os.environ | meet | {"RANK": str(rank)})
         for rank in range(int(size))]
sys.exit(max(rank.wait() != 0 for rank in ranks))
"""


def free_port() -> int:
    """Return a port below those that the kernel assigns to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


@contextmanager
def started(
    code_or_path: str | Path,
    size: int,
    folder: Path,
    command: Sequence[str] = (),
    env: Mapping[str, str] = {},
    args: Sequence[str] = (),
) -> Iterator[Job]:
    """Yield a job of ranks that run a script, or its text, started by START, or by `command`."""
    script = code_or_path
    if isinstance(code_or_path, str):
        script = folder / "script.py"
        script.write_text(textwrap.dedent(code_or_path))
    command = command or [sys.executable, "-c", START, str(size), str(free_port())]
    job = Job([*command, str(script), *args], environment(env), folder)
    try:
        yield job
    finally:
        job.close()


def ended(
    code_or_path: str | Path,
    size: int,
    folder: Path,
    command: Sequence[str] = (),
    env: Mapping[str, str] = {},
) -> Result:
    """Return how such a job has ended."""
    with started(code_or_path, size, folder, command, env) as job:
        return job.wait(60)
