"""The cores on which a rank runs, and the number of threads of BLAS and OpenMP."""

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
from horo_lite.processes import name_of, state_and_parent
from horo_lite.start.launcher import Launch


class Cores(NamedTuple):
    """The cores of a process and of its launcher, and whether the user chose the binding."""

    own: tuple[int, ...]
    launchers: tuple[int, ...]  # () if Open MPI is not among the parents
    chosen: bool | None  # whether the user requested this binding; None if unknown
    quota: float  # the CPU time that the control group grants, in cores


_COMMANDS = frozenset({"mpiexec", "mpirun", "prterun", "orterun"})
_DAEMONS = frozenset({"prted", "orted"})
# Options of mpiexec (\0 separates arguments), and the equivalent variables.
_BINDING = re.compile(rb"\0--?(bind-to|cpu-(set|list)|rankfile|rf\0)|binding_policy|:pe=", re.I)


def cores_of_process(launch: Launch | None) -> Cores:
    """Return the cores on which this process runs, and those on which it might.

    The environment of ranks does not show whether `--bind-to` was given; so this searches the
    parents for Open MPI's mpiexec, and reads its command, environment and cores.
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
            name = name_of(pid)
            if name in _COMMANDS | _DAEMONS:
                ours = Path("/proc/self/cmdline").read_bytes()
                command = (process / "cmdline").read_bytes().removesuffix(ours)
                is_given = _BINDING.search(command + (process / "environ").read_bytes()) is not None
                # A daemon does not have the command line of its mpiexec.
                chosen = None if name in _DAEMONS and not is_given else is_given
                return Cores(own, tuple(sorted(os.sched_getaffinity(pid))), chosen, quota)
            pid = state_and_parent(pid)[1]
    return Cores(own, (), None, quota)


def usable(everyone: Sequence[Cores], here: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the cores for each rank of one host (`here`, among `everyone` in the job).

    These are its own, or the launcher's if the rank was bound to too few without a request of the
    user.
    """
    return [
        cores.launchers if is_narrow(cores, len(here)) and binding(everyone) is False else cores.own
        for cores in (everyone[rank] for rank in here)
    ]


def is_narrow(cores: Cores, local_size: int) -> bool:
    """Return whether the launcher bound this rank to fewer cores than its share of the launcher's.

    One core for each rank counts as sufficient, although helper threads then share it: such ranks
    ran as fast as unbound ones, or up to a tenth faster.
    """
    return len(cores.own) * local_size < len(cores.launchers)


def binding(everyone: Sequence[Cores]) -> bool | None:
    """Return whether the user requested a binding; None if no rank knows."""
    return max((cores.chosen for cores in everyone if cores.chosen is not None), default=None)


def widen(to: Sequence[int]) -> None:
    """Let every thread of this process run on the cores `to`, except those bound elsewhere."""
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
    """Set this rank's cores and number of threads.

    Args:
        rank: This rank's number.
        here: The ranks of this host, in order.
        everyone: The cores of every rank of the job.
        keeps_binding: Whether all ranks stay on the cores to which the launcher bound them.
        threads: The number of threads given for this rank.

    Returns:
        How many cores this rank has to itself, and a function that restores the numbers of threads.
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
            f"Open MPI binds rank {rank} and all its threads to {len(own.own)} of "
            f"{len(own.launchers)} cores: pass --bind-to none to mpiexec, or set "
            "HORO_LITE_BINDING=keep if that is intended"
        )
    alone = len(everyone) == 1
    own_share = share(target, usable_here, own.quota)
    if threads is None and (threads_chosen() or (alone and not widened)):
        return own_share, lambda: None
    # 1e-6 is added because 3 × 1/3 may be rounded to less than 1.
    return own_share, set_threads(
        threads or max(1, int(own_share + 1e-6)),
        # Thread pools that were created while the process was bound have too few threads.
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


def threads_chosen() -> int | None:
    """Return the number of threads that the first of these environment variables sets, if any."""
    # OMP_NUM_THREADS may be a list, of which the first number is that of the outermost level.
    texts = [os.environ.get(name, "").partition(",")[0].strip() for name in THREAD_VARIABLES]
    return next((int(text) for text in texts if text.isdigit() and int(text)), None)


def share(cores: Sequence[int], everyones: Sequence[Sequence[int]], quota: float) -> float:
    """Return how many cores a rank that may use these has to itself.

    A core is divided among the ranks of the host that may use it (`everyones` cores, including this
    rank's), and so is the host's quota.
    """
    fair = sum(1 / sum(core in theirs for theirs in everyones) for core in cores)
    return min(fair, quota / len(everyones))


def set_threads(n: int, *, grow: bool, variables: bool) -> Callable[[], None]:
    """Limit BLAS and OpenMP to n threads (`grow`: exactly n); return a function that undoes it.

    `variables`: set environment variables, too, for libraries that are loaded later.
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
        if os.environ.get(name) == ours:  # otherwise the program has changed it
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
