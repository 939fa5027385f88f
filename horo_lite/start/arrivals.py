"""Which ranks of this host have not called init(), for reports while MPI is not yet initialised.

A rank that is in init() has an unnamed file open, which others of the same user see in /proc. They
find its process by the launcher's variables.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from horo_lite.errors import PeerLostError, ranks_in_words
from horo_lite.processes import environ_of, name_of, pids, state_and_parent
from horo_lite.start import launcher

_MARK = "horo_lite: in init()"
_FIRST_LOOK_S, _RAREST_LOOK_S = 0.5, 5.0
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
        who = _not_among(everyone, own, n_started)
        return (
            f"{who}: ended without calling init(), or hidden from this rank (in another container?)"
        )
    return "ranks of other hosts: all of this host's have called init()"


class Watch:
    """Finds out that a rank of this host has ended, while this one waits for it in MPI_Init.

    Hydra does not: MPICH's ignores an exit code of 0, and Intel's signals, too.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._next_s = _FIRST_LOOK_S
        self._were_all_here = False
        self._n_left = 0
        self._since_s = 0.0  # it is that number

    def look(self) -> None:
        """Raise PeerLostError if one has ended. To be called several times per second."""
        waited_s = time.monotonic() - self._began
        if waited_s < self._next_s:
            return
        # A look costs milliseconds if many processes run.
        self._next_s = waited_s + min(max(waited_s / 4, _FIRST_LOOK_S), _RAREST_LOOK_S)
        environ = _environ(os.getpid())
        n_started, n_left = _n_started(environ), _n_left()
        if n_started is None or n_left is None or n_left >= n_started:
            self._were_all_here = n_left is not None
            return
        if n_left != self._n_left:
            self._n_left, self._since_s = n_left, waited_s
        own, everyone = launcher.detect(environ), _ranks_of_this_host()
        here = own.rank if own is not None else None
        # At first not all may have been started yet; and one rank's report is enough.
        sure_s = 1 if self._were_all_here else 5
        if waited_s > self._since_s + sure_s + 5 * (here != min(everyone, default=here)):
            who = _not_among(everyone, own, n_started)
            raise PeerLostError(
                f"{who} ended before init(), where rank {here} has waited: the program exited, or "
                "was killed; look at what it printed"
            )


def _not_among(everyone: Collection[int], own: launcher.Launch | None, n_started: int) -> str:
    """Return which of the ranks that the launcher has started on this host are not among these."""
    if own is not None and n_started == own.size:
        return ranks_in_words(sorted(set(range(n_started)) - set(everyone)))
    return f"{n_started - len(everyone)} of the {n_started} ranks of this host"


def _n_left() -> int | None:
    """Return how many processes that the launcher has started here have not ended.

    None if the launcher is not visible: whoever sees it sees these, too, which is not so for other
    processes, such as a container's first, which may hide its variables.
    """
    parent = launcher_process()
    with contextlib.suppress(OSError):  # such as no free descriptor
        if parent is not None and launcher.is_launcher(name_of(parent)):
            return sum(_is_living_child(pid, parent) for pid in pids())
    return None


def _is_living_child(pid: int, parent: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        state, its_parent = state_and_parent(pid)
        return its_parent == parent and state not in "ZX"
    return False


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
            if name_of(parent) == launcher.HYDRA_PROXY or _job(_environ(parent)) != job:
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
