"""init() and queries about the world, under Horovod's names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from horo_lite import _native
from horo_lite.context import (
    World,
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
    world,
)
from horo_lite.errors import DeviceError
from horo_lite.horovod.process_sets import ProcessSet, add_process_set
from horo_lite.settings import Settings, seconds
from horo_lite.start import launcher, mpi
from horo_lite.start.rendezvous_spec import rendezvous_spec
from horo_lite.start.session import init as _init
from horo_lite.start.session import shutdown, started_by_mpi
from horo_lite.transports.nccl_library import nccl_candidates

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


def init(
    comm: Any = None,
    process_sets: Iterable[ProcessSet | Sequence[int]] | str | None = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    start_timeout_s: float | None = None,
    device: str | None = None,
    threads: int | str | None = None,
    binding: str | None = None,
    slot_stores: str | None = None,
    overlap: str | None = None,
    test_hosts: str | Sequence[int] | None = None,
    stall_warn_s: float | None = None,
    stall_abort_s: float | None = None,
) -> World:
    """Make this process a rank of the world, and register process sets.

    Every rank calls it, with the same `process_sets`. HOROVOD_FUSION_THRESHOLD, HOROVOD_TIMELINE
    and the HOROVOD_STALL_… variables are used if horo_lite's own are not set.

    Args:
        comm: An mpi4py communicator, or a list of ranks of MPI.COMM_WORLD, in which case only these
            call it; by default all ranks that the launcher started.
        process_sets: Sets or lists of ranks. "dynamic" is accepted and has no effect: sets can
            always be added.
        rank: This rank's number; see `horo_lite.init` for this and the following.
        size: The number of ranks.
        address: A free port on rank 0's host, "host:port".
        start_timeout_s: Seconds within which all ranks must have called it, without MPI.
        device: "cpu", "cuda" or "cuda:1".
        threads: Threads of BLAS and OpenMP.
        binding: "auto" or "keep".
        slot_stores: "auto", "cached" or "streaming".
        overlap: "auto", "always" or "never".
        test_hosts: Sizes of simulated hosts, for tests.
        stall_warn_s: Seconds after which a wait for another rank is reported.
        stall_abort_s: Seconds after which a wait for another rank raises StallError.

    Returns:
        The world: rank, size, device and the rest.

    Raises:
        LauncherError, MismatchError, ValueError, PeerLostError: As `horo_lite.init`.
        ValueError: `process_sets`, a list of ranks or one of Horovod's variables is invalid.
    """
    if comm is not None and not hasattr(comm, "Get_group"):
        comm = _communicator(list(comm), rank=rank, size=size, address=address)
    if isinstance(process_sets, str):
        if process_sets != "dynamic":
            raise ValueError(
                f"process_sets must be a list of sets or 'dynamic', not {process_sets!r}"
            )
        process_sets = None
    # The optimizer reads it under horo_lite's name.
    if threshold := os.environ.get("HOROVOD_FUSION_THRESHOLD"):
        if not threshold.isdigit():
            raise ValueError(
                f"HOROVOD_FUSION_THRESHOLD must be a number of bytes, not {threshold!r}"
            )
        os.environ.setdefault("HORO_LITE_BUCKET_BYTES", str(max(1, int(threshold))))
    path = os.environ.get("HOROVOD_TIMELINE")
    if path and path != "DYNAMIC":
        os.environ.setdefault("HORO_LITE_TIMELINE", path)
    _adopt_stall_limits()
    here = _init(
        comm,
        rank=rank,
        size=size,
        address=address,
        start_timeout_s=start_timeout_s,
        device=device,
        threads=threads,
        binding=binding,
        slot_stores=slot_stores,
        overlap=overlap,
        test_hosts=test_hosts,
        stall_warn_s=stall_warn_s,
        stall_abort_s=stall_abort_s,
    )
    for process_set in process_sets or ():
        add_process_set(process_set)
    return here


def _adopt_stall_limits() -> None:
    """Use Horovod's variables if neither horo_lite's own nor arguments set the limits."""
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        os.environ.setdefault("HORO_LITE_STALL_WARN_S", "0")
    for variable, ours in (
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HORO_LITE_STALL_WARN_S"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HORO_LITE_STALL_ABORT_S"),
    ):
        if value := os.environ.get(variable):
            os.environ.setdefault(ours, str(seconds(variable, value)))


def _communicator(ranks: list[int], **place: int | str | None) -> Any:
    """Return a communicator over those ranks; None if they are all ranks.

    `place` is the rank, the size and the address that `init()` was given.
    """
    spec = rendezvous_spec(Settings.read(place, os.environ), os.environ)
    if spec is not None and spec.size > 1:
        raise ValueError(
            f"comm is the list of ranks {ranks}, but MPI did not start this job: call init() on "
            "every rank, and make a process set of those"
        )
    launch = launcher.detect(os.environ)
    if spec is not None or launch is None or launch.size == 1:
        if ranks != [0]:
            raise ValueError(f"comm is the list of ranks {ranks}, but there is only one process")
        return None
    MPI = mpi.load(launch)
    everyone = MPI.COMM_WORLD
    if ranks == list(range(everyone.size)):
        return None
    if everyone.rank not in ranks or not set(ranks) <= set(range(everyone.size)):
        raise ValueError(
            f"comm is the list of ranks {ranks}, but this is rank {everyone.rank} of "
            f"{everyone.size}: only ranks in the list may call init()"
        )
    if is_initialized() and tuple(ranks) in _made:
        return _made[tuple(ranks)]
    chosen = everyone.Get_group().Incl(ranks)
    _made[tuple(ranks)] = everyone.Create_group(chosen)
    return _made[tuple(ranks)]


_made: dict[tuple[int, ...], Any] = {}


def mpi_threads_supported() -> bool:
    """Return whether several threads may use MPI at once."""
    return world().thread_multiple


def mpi_built() -> bool:
    """Return True: ranks on several hosts communicate through MPI."""
    return True


def mpi_enabled() -> bool:
    """Return whether this process is one of several ranks that MPI connects."""
    return is_initialized() and started_by_mpi()


def gloo_built() -> bool:
    """Return whether ranks that MPI did not start can communicate, through PyTorch's Gloo."""
    return find_spec("torch") is not None


def gloo_enabled() -> bool:
    """Return whether this process is one of several ranks that MPI does not connect."""
    return is_initialized() and world().size > 1 and not started_by_mpi()


def nccl_built() -> int:
    """Return the version of the NCCL that arrays on GPUs use (21803 is 2.18.3), or 0."""
    try:
        return int(_native.nccl_library(nccl_candidates())[1])
    except DeviceError:
        return 0


def cuda_built() -> bool:
    """Return whether the core was built with support for NVIDIA GPUs."""
    try:
        _native.DeviceQueue(0)
    except DeviceError as error:
        return "no CUDA part" not in str(error)
    return True


def rocm_built() -> bool:
    """Return False: horo_lite does not support ROCm."""
    return False


def ddl_built() -> bool:
    """Return False: horo_lite does not support DDL."""
    return False


def ccl_built() -> bool:
    """Return False: horo_lite does not support oneCCL."""
    return False
