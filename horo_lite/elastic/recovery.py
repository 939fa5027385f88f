"""Training goes on with the ranks that are left when some are lost."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, overload

from horo_lite.elastic.state import Progress, State
from horo_lite.errors import (
    HoroLiteError,
    MismatchError,
    PeerLostError,
    StallError,
    TooFewRanksError,
)
from horo_lite.world import abandon, communicator, die, dying_alone, rank, renew, size, world

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)
Train = Callable[Concatenate[S, P], T]

# How a rank came out of training, as bits of which all ranks form the conjunction.
_DONE, _RAISED, _NO_ERROR = 1, 2, 4
# So long all others have for coming to terms before one looks what keeps them.
_GRACE_S = 2.0


class HostsUpdatedInterrupt(HoroLiteError):  # noqa: N818
    """Horovod's, for scripts that name it: never raised here, where no rank joins a running job."""


@overload
def run(train: Train[S, P, T], *, min_size: int = 1) -> Train[S, P, T]: ...
@overload
def run(*, min_size: int = 1) -> Callable[[Train[S, P, T]], Train[S, P, T]]: ...
def run(train: Any = None, *, min_size: int = 1) -> Any:
    """`train(state, …)`, which goes on with the ranks that are left when some are lost.

        @hvd.elastic.run
        def train(state): …

    Collective. First all ranks get rank 0's state. When a rank dies while others need it, these
    form a smaller world, with ranks numbered from 0 in the order they had; the state's reset
    callbacks are called, all get the state of the most advanced of them, and `train(state, …)` is
    called again: it must go on from where the state says. Nothing is lost but the step in flight
    (see State). What belonged to the former world is gone: process sets, handles, `World` objects.
    An exception or `sys.exit(n)` out of `train` is the death of that rank alone, unless all ranks
    raise, or it is a MismatchError or Ctrl-C: these end the job. Returns when all ranks have.

    Needs Open MPI 5 and `mpiexec --with-ft ulfm`. Elsewhere a lost rank ends the job as ever.

    min_size: with fewer ranks left than this, rank 0 writes the state to its checkpoint, if it has
        one, and all raise TooFewRanksError.
    """
    if train is None:
        return partial(run, min_size=min_size)

    @wraps(train)
    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        if not survives():
            state.read_checkpoint()
            state.sync()
            return train(state, *args, **kwargs)
        with dying_alone():
            return _Run(lambda: train(state, *args, **kwargs), state, min_size).result()

    return call


def survives() -> bool:
    """Whether the rest of this world can go on without a rank."""
    if communicator() is None:
        return False
    setting = os.environ.get("OMPI_MCA_mpi_ft_enable", "0")  # noqa: SIM112
    enabled = setting.lower() not in ("0", "false", "no")
    restarts = os.environ.get("HORO_LITE_CHECKPOINT")  # the job has another way to go on
    if not enabled and not restarts and rank() == 0:
        warnings.warn(
            "horo_lite: without `--with-ft ulfm`, an option of Open MPI 5's mpiexec, elastic.run "
            "cannot go on without ranks that die: the job ends",
            RuntimeWarning,
            stacklevel=4,
        )
    return enabled


class _Run:
    """One call of a training function, over several worlds."""

    def __init__(self, train: Callable[[], Any], state: State, min_size: int) -> None:
        self._train = train
        self._state = state
        self._min_size = min_size

    def result(self) -> Any:
        """What the function returns, in the last of the worlds."""
        n_ranks, lost_at = size(), 0.0
        while True:
            comm = communicator()
            result: Any = None
            error: BaseException | None = None
            came, trains = _DONE | _NO_ERROR, False
            try:
                if not lost_at:
                    self._state.read_checkpoint()
                    self._state.sync()
                else:
                    self._resume()
                    if rank() == 0:
                        took_s = time.monotonic() - lost_at
                        _tell(f"{_ranks(size())} on, {took_s:.2f} s after the loss was noticed")
                trains = True
                try:
                    result = self._train()
                except SystemExit as exit:
                    if exit.code:
                        raise
                    error = exit  # to be raised when all ranks are done
                if comm is not None:
                    world().group.agree("elastic.run", "the end of training")
            except (TooFewRanksError, KeyboardInterrupt):
                raise
            except SystemExit as exit:
                error, came = exit, _RAISED
            except Exception as raised:
                # Before training, MPI may have delivered anything while a rank died.
                error, came = raised, _RAISED if trains and not _is_loss(raised) else _NO_ERROR
            lost_at = time.monotonic()
            if comm is not None and not came & _DONE:
                abandon(f"{type(error).__name__}: {error}")
                comm.Revoke()
            common, died = (came, False) if comm is None else _agreed(comm, came, error)
            if common & (_DONE | _RAISED) or (common & _NO_ERROR and not died):
                if error is not None:  # on all ranks, or some have left their world but not died
                    raise error
                return result
            if error is not None and came & _RAISED:
                if not isinstance(error, MismatchError):
                    die(error)
                if not died:
                    raise error
                # Else no other rank had one: what MPI delivered while a rank died was no data.
            lost = _shrink(comm)
            if rank() == 0:
                which = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} of {n_ranks}"
                _tell(f"lost {which}. {error or ''}")
            n_ranks = size()

    def _resume(self) -> None:
        """All ranks have the state of the most advanced."""
        state, group = self._state, world().group
        everyone: list[Progress] = group.allgather_object(state.progress())
        furthest = max(everyone)
        if not furthest.is_whole:
            furthest = max(everyone, key=lambda progress: progress.n_commits)
        root = everyone.index(furthest)
        if furthest.n_commits == 0:  # no rank has had the state of the first rank 0
            root = 0
            state.read_checkpoint()
        if group.rank == root and not furthest.is_whole:
            state.restore()
            _tell(
                "back to the last commit: no rank has counted its last step (see "
                "horo_lite.elastic.State)"
            )
        state.on_reset()
        if furthest.n_commits == 0 or not state.is_alike():
            state.sync(root)
        if group.size < self._min_size:
            self._stop()

    def _stop(self) -> NoReturn:
        group, path = world().group, self._state._checkpoint
        self._state.save()
        self._state.write_checkpoint()
        group.barrier()
        ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
        raise TooFewRanksError(
            f"{ranks} left, fewer than min_size={self._min_size}: "
            + (f"the state is in {path}" if path else "the state is not saved, as it has no path")
        )


def _is_loss(error: Exception) -> bool:
    """Other ranks are to blame."""
    from mpi4py import MPI

    return isinstance(error, (PeerLostError, StallError, MPI.Exception))


def _agreed(comm: Any, bits: int, error: BaseException | None = None) -> tuple[int, bool]:
    """What the bits of all living ranks have in common, and whether some ranks are known dead.

    The same on every rank that survives it, whenever others die. Waits for all, at little cost;
    for those that `error`, a StallError, is about not any longer.
    """
    from mpi4py import MPI

    common = array("i", [bits])
    request = comm.Iagree(common)
    began, pause_s = time.monotonic(), 20e-6
    try:
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(1e-3, 1.5 * pause_s)
            if error is not None and time.monotonic() - began > _GRACE_S:
                began = time.monotonic()
                _look_after(world().group.transport.silent(), error)
    except MPI.Exception:  # on all alike: some are dead
        return common[0], True
    return common[0], False


def _look_after(silent: list[int], error: BaseException) -> None:
    """None of these, who do not come, is waited for in vain."""
    for pid in silent:
        if isinstance(error, StallError):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif not os.path.exists(f"/proc/{pid}"):
            raise PeerLostError(
                f"{error}. The others cannot go on: Open MPI notices the death of ranks that a "
                "signal ends, and not of those that exit with a status of their own (os._exit)"
            )


def _shrink(comm: Any) -> list[int]:
    """The world is that of the ranks that live; the others' numbers before."""
    before = comm.Get_group()
    while True:
        comm = comm.Shrink()
        error = None
        try:
            renew(comm)
        except Exception as failed:  # of whatever kind: MPI may deliver anything while a rank dies
            error = failed
            comm.Revoke()
        stands, died = _agreed(comm, error is None)
        if stands and not died:
            break
        if error is not None and not died:
            raise error
    left = comm.Get_group().Translate_ranks(None, before)
    return [rank for rank in range(before.size) if rank not in left]


def _ranks(n: int) -> str:
    return "1 rank goes" if n == 1 else f"{n} ranks go"


def _tell(text: str) -> None:
    print(f"[horo_lite] {text}", file=sys.stderr, flush=True)
