"""What /proc says of other processes.

They can give themselves any bytes as a name and an environment, which need not be text.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path


def lives(pid: int) -> bool:
    """Return whether process `pid` of this PID namespace is still running."""
    try:
        return state_and_parent(pid)[0] not in "ZX"
    except OSError as error:  # others, such as too many open files here, do not show an end
        return error.errno not in (errno.ENOENT, errno.ESRCH)


def state_and_parent(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state, and its parent; raise OSError if it has ended."""
    state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    return state.decode(), int(parent)


def pids() -> list[int]:
    """Return all processes of this PID namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def name_of(pid: int) -> str:
    """Return the name of a process, which is that of its program at first, or raise OSError."""
    return os.fsdecode(Path(f"/proc/{pid}/comm").read_bytes()).strip()


def environ_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started, or raise OSError."""
    texts = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}
