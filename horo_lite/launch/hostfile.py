"""Hosts and their numbers of ranks: `--hostfile` and `-H`, the same for every launcher."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from horo_lite.errors import LauncherError

# Horovod and Open MPI write "node1 slots=4", MPICH "node1:4"; the default is one rank.
_LINE = re.compile(r"(?P<host>[^\s:]+)(?:\s+slots\s*=\s*(?P<slots>\d+)|:(?P<ranks>\d+))?")


def read_hostfile(path: str) -> str:
    """Return the hosts in a file in the form "node1:4,node2:4".

    Raises:
        LauncherError: The file cannot be read, names no host, or has an invalid line.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(f"--hostfile {path} cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        found = _LINE.fullmatch(text)
        if not found:
            raise LauncherError(
                f"{path}, line {number}: {text!r} is neither 'host slots=4' nor 'host:4'"
            )
        hosts.append(f"{found['host']}:{found['slots'] or found['ranks'] or 1}")
    if not hosts:
        raise LauncherError(f"--hostfile {path} names no host")
    return ",".join(hosts)


def n_ranks(hosts: str) -> int:
    """Return the number of ranks in "node1:4,node2:4"; a host without a number has one."""
    return sum(number for _, number in _numbers(hosts))


def filled(hosts: str, n: int) -> list[tuple[str, int]]:
    """Return the hosts in "node1:4,node2:4" that `n` ranks fill in turn, and how many are there.

    After the last host follows the first again.
    """
    found: list[tuple[str, int]] = []
    for host, number in itertools.cycle(_numbers(hosts)):
        found.append((host, min(max(number, 1), n)))
        n -= found[-1][1]
        if n <= 0:
            break
    return found


def _numbers(hosts: str) -> list[tuple[str, int]]:
    pairs = (host.partition(":") for host in hosts.split(","))
    return [(name, int(number) if number.isdigit() else 1) for name, _, number in pairs]
