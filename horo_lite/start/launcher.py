"""Detection of the launcher by the environment, and MPICH's wire protocol."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from typing import NamedTuple

from horo_lite.processes import name_of

# A secret in the environment of a job's ranks, with which they sign what they write.
JOB_TOKEN = "HORO_LITE_JOB_TOKEN"
TORCHRUN = "torchrun"
SLURM = "Slurm"
# A variable that children inherit: the process that is the rank, and its place in the job.
RANK_PROCESS = "HORO_LITE_RANK_PROCESS"
NO_PROC = (
    "/proc is not mounted. MPI needs it, and so do the ranks of a host, which find each other's "
    "processes and memory there; only a single rank works without it. As root: mount -t proc proc "
    "/proc, or before entering a chroot in DIR: mount -t proc proc DIR/proc"
)


class Launch(NamedTuple):
    """The launcher of this process, its rank and the size; None if the environment has none."""

    name: str
    rank: int | None
    size: int | None


# Slurm: not SLURM_NTASKS, since the single process of an sbatch script has it too. PMI's pair is
# also set by others (Slurm, Flux, PALS): MPICH's and Intel's launchers have their own marks.
# torchrun is first: srun or mpiexec may have started it, once on each host.
_LAUNCHERS = (
    # name, number of ranks, own rank, mark
    (TORCHRUN, "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", None),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", None),
    ("MPICH", "PMI_SIZE", "PMI_RANK", "HYDI_CONTROL_FD"),
    ("Intel MPI", "PMI_SIZE", "PMI_RANK", "I_MPI_HYDRA_UUID"),
    ("PMI", "PMI_SIZE", "PMI_RANK", None),
    (SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", None),
    ("PMIx", None, "PMIX_RANK", None),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher whose variables `environ` contains; None if there is none."""

    def number(key: str | None) -> int | None:
        text = environ.get(key, "") if key else ""
        return int(text) if text.isdigit() else None

    for name, size_key, rank_key, mark in _LAUNCHERS:
        launch = Launch(name, number(rank_key), number(size_key))
        found = launch.rank is not None if size_key is None else launch.size is not None
        if found and (mark is None or mark in environ):
            return launch
    return None


def mark_rank() -> None:
    """Set a variable, for processes that inherit it, that says that this process is the rank."""
    os.environ[RANK_PROCESS] = f"{os.getpid()} {_place(os.environ)}"


def inherited_from(environ: Mapping[str, str]) -> int | None:
    """Return the process that is the rank `environ` describes, if this one is only its descendant.

    A process that another launcher started has another place, or is a child of that launcher.
    """
    pid, _, place = environ.get(RANK_PROCESS, "").partition(" ")
    if not pid or int(pid) == os.getpid() or place != _place(environ) or hydra() is not None:
        return None
    return int(pid)


def _place(environ: Mapping[str, str]) -> str:
    """Return a text that is unique among the processes of launchers, also of different jobs."""
    keys = "PMIX_NAMESPACE PMIX_RANK PMI_FD PMI_RANK SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID"
    return " ".join(environ.get(key, "-") for key in keys.split())


def has_proc() -> bool:
    """Return whether several ranks can work here; if not, `NO_PROC` says what to do."""
    return os.path.exists("/proc/self")


def connects_by_mpi(launch: Launch | None, environ: Mapping[str, str]) -> bool:
    """Return whether ranks of this launcher are connected by MPI_Init.

    torchrun's are not; nor are those of srun with `--mpi=none`, unless the MPI library reads
    Slurm's variables itself.
    """
    if launch is None or launch.name == TORCHRUN:
        return False
    return launch.name != SLURM or "PMIX_RANK" in environ


def is_fault_tolerant(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI lets the job continue without ranks that die (`--with-ft ulfm`)."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("0", "false", "no")


def is_launcher(name: str) -> bool:
    """Return whether a program of this name starts ranks, and lives as long as they do."""
    return name.partition(".")[0] in _PROGRAMS  # Debian has mpirun.openmpi


HYDRA_PROXY = "hydra_pmi_proxy"
"""The program with which MPICH and Intel MPI start the ranks of a host."""
_OPEN_MPI = ("prterun", "prted", "prte", "orterun", "orted")  # since version 5, and before
_PROGRAMS = (HYDRA_PROXY, "mpiexec", "mpirun", *_OPEN_MPI)


def hydra() -> int | None:
    """Return the descriptor through which a rank communicates with Hydra.

    None if this process is not a child of that launcher, MPICH's and Intel MPI's.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        descriptor = int(os.environ["PMI_FD"])
        is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        if is_socket and name_of(os.getppid()) == HYDRA_PROXY:
            return descriptor
    return None


def abort_hydra(status: int) -> None:
    """Request that Hydra kills all ranks, like MPI_Abort, but without MPI."""
    descriptor = hydra()
    if descriptor is not None:
        os.write(descriptor, f"cmd=abort exitcode={status}\n".encode())


def is_known_mismatch(launcher: str, library: str) -> bool:
    """Return whether a launcher and an MPI library are known to be incompatible.

    Other incompatible pairs are detected by the size of MPI's world.
    """
    if launcher == "Open MPI":
        return any(make in library for make in ("MPICH", "MVAPICH", "Intel(R) MPI"))
    return launcher in ("MPICH", "MVAPICH", "Intel MPI") and "Open MPI" in library
