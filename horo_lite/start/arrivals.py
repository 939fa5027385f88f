"""Which ranks of this host have not called init(), for reports while MPI is not yet initialised.

A rank that is in init() has an unnamed file open, which others of the same user see in /proc. They
find its process by the launcher's variables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from horo_lite.errors import ranks_in_words
from horo_lite.processes import environ_of, name_of, pids, state_and_parent
from horo_lite.start import launcher

_MARK = "horo_lite: in init()"
_STACKS = "its Python stacks are shown by `py-spy dump --pid"


@contextlib.contextmanager
def in_init() -> Iterator[None]:
    """Show the other ranks of this host, inside the block, that this one is in init()."""
    with contextlib.ExitStack() as until_over:
        with contextlib.suppress(OSError):  # no free descriptor: the next file will raise an error
            until_over.callback(os.close, os.memfd_create(_MARK))
        yield


def late(always: bool = False) -> str:
    """Return which ranks of this job have not called init(), as far as visible, and what to check.

    Args:
        always: Otherwise it returns "" if another rank of this host, with a lower number, reports
            the same.
    """
    environ = _environ(os.getpid())
    own = launcher.detect(environ)
    everyone = _ranks_of_this_host()
    if own is None or own.rank not in everyone:
        return some_ranks()
    there = [rank for rank, processes in everyone.items() if any(p.is_in_init for p in processes)]
    if own.rank != min(there, default=own.rank) and not always:
        return ""
    if missing := sorted(everyone.keys() - there):
        pids = [min(everyone[rank]).pid for rank in missing]
        who = " and ".join(f"rank {r} (pid {pid})" for r, pid in zip(missing, pids, strict=True))
        return (
            f"{who}, which {'have' if missing[1:] else 'has'} not called init() yet. Look there "
            f"for a slow import, data that is still being loaded, or an error: {_STACKS} {pids[0]}`"
        )
    n_started = _n_started(environ)
    if n_started is not None and n_started > len(everyone):
        if n_started == own.size:
            who = ranks_in_words(sorted(set(range(n_started)) - everyone.keys()))
        else:
            who = f"{n_started - len(everyone)} of the {n_started} ranks of this host"
        return (
            f"{who}: ended without calling init(), or hidden from this rank (in another container?)"
        )
    return "ranks of other hosts: all of this host's have called init()"


def some_ranks(always: bool = False) -> str:
    """Return the report about ranks that are not known."""
    return (
        "ranks that do not report the same: they have not called init() yet. Look there for a "
        "slow import, data that is still being loaded, or an error"
    )


class _Process(NamedTuple):
    """A process that may be a rank; the least one is the most likely."""

    runs_other_program: bool
    depth: int
    """The number of levels below the launcher's process."""
    pid: int
    is_in_init: bool


def _ranks_of_this_host() -> dict[int, list[_Process]]:
    """Return the processes of each rank of this job that this user may inspect."""
    own = _job_and_depth(os.getpid())
    everyone: dict[int, list[_Process]] = {}
    for pid in pids() if own is not None else ():
        folder = Path(f"/proc/{pid}")
        launch = launcher.detect(_environ(pid))
        if launch is None or launch.rank is None:
            continue
        found = _job_and_depth(pid)
        if found is None or own is None or found[0] != own[0]:
            continue
        with contextlib.suppress(OSError):  # it may have ended
            other = os.readlink(folder / "exe") != os.readlink("/proc/self/exe")
            is_in_init = any(_is_mark(link) for link in (folder / "fd").iterdir())
            process = _Process(other, found[1], pid, is_in_init)
            everyone.setdefault(launch.rank, []).append(process)
    return everyone


def _is_mark(link: Path) -> bool:
    with contextlib.suppress(OSError):  # it may have been closed
        return _MARK in os.readlink(link)
    return False


def launcher_process() -> int | None:
    """Return the process of the launcher that has started this rank here; None if not visible.

    It may have started it through other programs, such as a shell.
    """
    found = _job_and_depth(os.getpid())
    return None if found is None else found[0][1]


def _job_and_depth(pid: int) -> tuple[tuple[object, int], int] | None:
    """Return an identifier of a process's job, and its depth below the launcher's process.

    The identifier contains that process. None if /proc does not show it.
    """
    job, depth = _job(_environ(pid)), 0
    with contextlib.suppress(OSError):
        while True:
            parent = state_and_parent(pid)[1]
            depth += 1
            # MPICH's variables are the same in all jobs.
            if name_of(parent) == "hydra_pmi_proxy" or _job(_environ(parent)) != job:
                return (job, parent), depth
            pid = parent
    return None


def _job(environ: Mapping[str, str]) -> tuple[str | None, ...] | None:
    launch = launcher.detect(environ)
    if launch is None or launch.rank is None:
        return None
    keys = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return (launch.name, *map(environ.get, keys))


def _environ(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return environ_of(pid)
    return {}


def _n_started(environ: Mapping[str, str]) -> int | None:
    """Return how many ranks the launcher has started on this host; None if unknown."""
    counts = (environ.get(key, "") for key in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    return next((int(count) for count in counts if count.isdigit()), None)
