"""On which cores a rank runs, and how many threads BLAS and OpenMP have there."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from threadpoolctl import ThreadpoolController

from horo_lite.errors import warn
from horo_lite.start.launcher import Launch


class Cores(NamedTuple):
    """Where a process may run, where its launcher may, and who wanted it so."""

    own: tuple[int, ...]
    launchers: tuple[int, ...]  # () where there is no Open MPI among the parents
    chosen: bool | None  # the user asked for this binding; None where that cannot be seen
    quota: float  # cores' worth of time that the control group grants


_COMMANDS = frozenset({"mpiexec", "mpirun", "prterun", "orterun"})
_DAEMONS = frozenset({"prted", "orted"})
# Options of mpiexec (\0 is between arguments), and the variables that stand for them.
_BINDING = re.compile(rb"\0--?(bind-to|cpu-(set|list)|rankfile|rf\0)|binding_policy|:pe=", re.I)


def cores_of_process(launch: Launch | None) -> Cores:
    """Return where this process runs, and where it might.

    Whether `--bind-to` was given, ranks do not see in their environment; so Open MPI's mpiexec is
    looked up among the parents, for its command, its environment and its own cores.
    """
    own = tuple(sorted(os.sched_getaffinity(0)))
    quota = math.inf
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        granted, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        quota = int(granted) / int(period)
    with contextlib.suppress(OSError, ValueError):
        pid = os.getppid() if launch and launch.name == "Open MPI" else 0
        while pid > 1:
            process = Path(f"/proc/{pid}")
            name = (process / "comm").read_text().strip()
            if name in _COMMANDS | _DAEMONS:
                ours = Path("/proc/self/cmdline").read_bytes()
                command = (process / "cmdline").read_bytes().removesuffix(ours)
                is_given = _BINDING.search(command + (process / "environ").read_bytes()) is not None
                # A daemon does not repeat the command line of the mpiexec it works for.
                chosen = None if name in _DAEMONS and not is_given else is_given
                return Cores(own, tuple(sorted(os.sched_getaffinity(pid))), chosen, quota)
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return Cores(own, (), None, quota)


def usable(everyone: Sequence[Cores], here: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores for each rank of one host (`here`, among `everyone` in the job).

    These are the ones it has, or its launcher's if it was put on too few without the user's
    asking.
    """
    return [
        cores.launchers if is_narrow(cores, len(here)) and binding(everyone) is False else cores.own
        for cores in (everyone[rank] for rank in here)
    ]


def is_narrow(cores: Cores, local_size: int) -> bool:
    """Tell whether the launcher put this rank on fewer cores than a fair share of its own.

    With one core for each rank it is fair, although helper threads then share it: such ranks ran
    as fast as free ones, or up to a tenth faster.
    """
    return len(cores.own) * local_size < len(cores.launchers)


def binding(everyone: Sequence[Cores]) -> bool | None:
    """Tell whether the user asked for a binding; None where no rank can see it."""
    return max((cores.chosen for cores in everyone if cores.chosen is not None), default=None)


def widen(to: Sequence[int]) -> None:
    """Let every thread of this process run on the cores `to`, but for those bound elsewhere."""
    before = os.sched_getaffinity(0)
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it may have ended
            if os.sched_getaffinity(task) == before:
                os.sched_setaffinity(task, to)


def take_cores(
    rank: int,
    here: Sequence[int],
    everyone: Sequence[Cores],
    *,
    keeps_binding: bool,
    threads: int | None,
) -> tuple[float, Callable[[], None]]:
    """Give this rank the cores and threads due to it.

    Args:
        rank: This rank's number.
        here: The ranks of this host, in order.
        everyone: The cores of every rank of the job.
        keeps_binding: No rank leaves the cores on which its launcher put it.
        threads: The number of threads given for this rank.

    Returns:
        How many cores this rank has to itself, and a function that gives the threads back.
    """
    own = everyone[rank]
    usable_here = [everyone[r].own for r in here] if keeps_binding else usable(everyone, here)
    target = usable_here[here.index(rank)]
    widened = target != own.own
    if widened:
        widen(target)
    elif (
        not keeps_binding
        and is_narrow(own, len(here))
        and binding(everyone) is None
        and rank == here[0]
    ):
        warn(
            f"Open MPI keeps rank {rank} and all its threads on {len(own.own)} of "
            f"{len(own.launchers)} cores: pass --bind-to none to mpiexec, or set "
            "HORO_LITE_BINDING=keep if that is intended"
        )
    alone = len(everyone) == 1
    own_share = share(target, usable_here, own.quota)
    if threads is None and (threads_chosen() or (alone and not widened)):
        return own_share, lambda: None
    # A hair is added because 3 × 1/3 may come out below 1.
    return own_share, set_threads(
        threads or max(1, int(own_share + 1e-6)),
        # Pools made while the process was bound have counted too few cores.
        grow=widened or threads is not None,
        variables=not alone or threads is not None,
    )


THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def threads_chosen() -> bool:
    """Tell whether a variable sets the number of threads, the user's or the launcher's."""
    return any(os.environ.get(name) for name in THREAD_VARIABLES)


def share(cores: Sequence[int], everyones: Sequence[Sequence[int]], quota: float) -> float:
    """Return how many cores a rank has to itself that may use these.

    A core is divided among the ranks of the host that may use it (`everyones` cores, this rank's
    among them), and so is the host's quota.
    """
    fair = sum(1 / sum(core in theirs for theirs in everyones) for core in cores)
    return min(fair, quota / len(everyones))


def set_threads(n: int, *, grow: bool, variables: bool) -> Callable[[], None]:
    """Let BLAS and OpenMP run at most n threads (`grow`: exactly n); the result undoes it.

    `variables` sets the environment as well, for libraries that are loaded later.
    """
    undo: list[Callable[[], object]] = []

    def change(set_number: Callable[[int], object], before: int) -> None:
        if before > n or grow:
            undo.append(lambda: set_number(before))
            set_number(n)

    for library in ThreadpoolController().lib_controllers:
        change(library.set_num_threads, library.num_threads or 0)
    torch = sys.modules.get("torch")
    if torch is not None:
        change(torch.set_num_threads, torch.get_num_threads())
    if variables:
        before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
        os.environ.update(dict.fromkeys(before, str(n)))
        undo.append(lambda: _put_back(before, str(n)))

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _put_back(before: Mapping[str, str | None], ours: str) -> None:
    for name, value in before.items():
        if os.environ.get(name) == ours:  # else the program has chosen since
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
