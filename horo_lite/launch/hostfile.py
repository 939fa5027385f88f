"""Hosts and their numbers of ranks: `--hostfile` and `-H`, alike for every launcher."""

from __future__ import annotations

import re
from pathlib import Path

from horo_lite.errors import LauncherError

# "node1 slots=4" is Horovod's and Open MPI's form, "node1:4" MPICH's; alone, a host has one rank.
_LINE = re.compile(r"(?P<host>[^\s:]+)(?:\s+slots\s*=\s*(?P<slots>\d+)|:(?P<ranks>\d+))?")


def read_hostfile(path: str) -> str:
    """Return the hosts that a file names as "node1:4,node2:4".

    Raises:
        LauncherError: The file cannot be read, names no host, or has a line of another form.
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
    """Return how many ranks "node1:4,node2:4" has room for; a host without a number, for one."""
    numbers = (host.partition(":")[2] for host in hosts.split(","))
    return sum(int(number) if number.isdigit() else 1 for number in numbers)
