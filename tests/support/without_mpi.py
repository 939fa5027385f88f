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

# Starts ranks as a scheduler would, and returns 0 only if all have. They are forks of one process,
# which has imported PyTorch, and do not collect its objects when they end: that saves 2 s each.
START = """
import gc, os, runpy, sys
import torch
gc.freeze()
size, port, *sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
os.environ |= {"WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
ranks = []
for rank in range(int(size)):
    os.environ["RANK"] = str(rank)
    ranks.append(os.fork())
    if ranks[-1] == 0:
        runpy.run_path(sys.argv[0], run_name="__main__")
        break  # and not sys.exit(), which init() has replaced
else:
    os._exit(max(os.waitpid(rank, 0)[1] != 0 for rank in ranks))
"""


def free_port() -> int:
    """Return a port below those that the kernel assigns to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def by_address() -> dict[str, str]:
    """Return what makes ranks that serve many tests a world without MPI (`worlds.on_ranks`)."""
    return {"HORO_LITE_ADDRESS": f"localhost:{free_port()}"}


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
