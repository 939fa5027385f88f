"""Which launcher started this process, by the environment; and MPICH's wire protocol."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

# A secret of the job's, in its ranks' environment: what it signs was written by one of them.
JOB_TOKEN = "HORO_LITE_JOB_TOKEN"
TORCHRUN = "torchrun"
SLURM = "Slurm"
# The process that is the rank, and as which, in the environment that its children inherit.
RANK_PROCESS = "HORO_LITE_RANK_PROCESS"
NO_PROC = (
    "/proc is not mounted. MPI needs it, and so do the ranks of a host, which find each other's "
    "processes and memory there; only one rank works without. As root: mount -t proc proc /proc, "
    "or before entering a chroot in DIR: mount -t proc proc DIR/proc"
)


class Launch(NamedTuple):
    """Who started this process, as which of how many; None where the environment does not say."""

    name: str
    rank: int | None
    size: int | None


# Slurm: SLURM_NTASKS would not do, the one process of an sbatch script has it too. PMI's pair is
# set by others than MPICH's launcher as well (Slurm, Flux, PALS): that one has a mark of its own.
# torchrun is first: srun or mpiexec may have started it, one on each host.
_LAUNCHERS = (
    # name, number of ranks, own rank, mark
    (TORCHRUN, "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID"),
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", None),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", None),
    ("MPICH", "PMI_SIZE", "PMI_RANK", "HYDI_CONTROL_FD"),
    ("PMI", "PMI_SIZE", "PMI_RANK", None),
    (SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", None),
    ("PMIx", None, "PMIX_RANK", None),
)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Return the launcher whose variables `environ` has; None where none started this process."""

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
    """Note, for processes that inherit the environment, that this one is the rank it describes."""
    os.environ[RANK_PROCESS] = f"{os.getpid()} {_place(os.environ)}"


def inherited_from(environ: Mapping[str, str]) -> int | None:
    """Return the process that is the rank `environ` describes, if this one is only its descendant.

    One that a launcher of its own has started has another place, or is a child of that launcher.
    """
    pid, _, place = environ.get(RANK_PROCESS, "").partition(" ")
    if not pid or int(pid) == os.getpid() or place != _place(environ) or hydra() is not None:
        return None
    return int(pid)


def _place(environ: Mapping[str, str]) -> str:
    """What tells a launcher's processes apart, also those of different jobs."""
    keys = "PMIX_NAMESPACE PMIX_RANK PMI_FD PMI_RANK SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID"
    return " ".join(environ.get(key, "-") for key in keys.split())


def has_proc() -> bool:
    """Tell whether several ranks can work here: where not, `NO_PROC` says what to do."""
    return os.path.exists("/proc/self")


def connects_by_mpi(launch: Launch | None, environ: Mapping[str, str]) -> bool:
    """Tell whether a launcher lets its ranks find each other in MPI_Init.

    torchrun does not; nor does srun with `--mpi=none`, unless the MPI library reads Slurm's
    variables itself.
    """
    if launch is None or launch.name == TORCHRUN:
        return False
    return launch.name != SLURM or "PMIX_RANK" in environ


def is_fault_tolerant(environ: Mapping[str, str]) -> bool:
    """Tell whether Open MPI lets the job go on without ranks that die (`--with-ft ulfm`)."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() not in ("0", "false", "no")


def hydra() -> int | None:
    """Return the descriptor on which a rank talks to MPICH's launcher.

    None if this process is not a child of that launcher.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        descriptor = int(os.environ["PMI_FD"])
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
        if parent == "hydra_pmi_proxy" and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return descriptor
    return None


def abort_hydra(status: int) -> None:
    """Ask MPICH's launcher to kill all ranks, as MPI_Abort would; this needs no MPI."""
    descriptor = hydra()
    if descriptor is not None:
        os.write(descriptor, f"cmd=abort exitcode={status}\n".encode())


def is_known_mismatch(launcher: str, library: str) -> bool:
    """Tell whether a launcher and an MPI library are known not to fit.

    Other pairs are found out by the size of MPI's world.
    """
    if launcher == "Open MPI":
        return any(make in library for make in ("MPICH", "MVAPICH", "Intel(R) MPI"))
    return launcher in ("MPICH", "MVAPICH") and "Open MPI" in library
