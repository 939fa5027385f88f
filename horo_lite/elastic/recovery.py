"""Continuing training with the remaining ranks when some are lost.

Every way out of a training function (success, a lost peer, the function's own exception) leads to
one agreement (`comm.Iagree`), so that all survivors take the same decision. Before it, a rank
abandons its groups, so that no other rank waits for it elsewhere. After success it must remain
reachable until the others are done too: it announces this by an envelope, and a rank that then
waits for a message from it raises MismatchError. Then follow `comm.Shrink()`, a new world over the
result (the exchanges of its `init()` all use that one communicator, which a rank that loses a peer
revokes), and a second agreement that the new world is complete.

State comes from the rank that is furthest ahead: each rank counts the steps, assignments and
commits that it has seen, in program order, which is the same on all ranks. Where ranks train on
their own between averages (LocalSGD), it is one that has taken part in the last average.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, overload

from horo_lite import ops
from horo_lite.context import messages, rank, size, world
from horo_lite.elastic import growth
from horo_lite.elastic.consensus import consensus
from horo_lite.elastic.state import Progress, State
from horo_lite.errors import (
    HoroLiteError,
    MismatchError,
    PeerLostError,
    StallError,
    TooFewRanksError,
    behind,
    ranks_in_words,
    say,
    warn,
)
from horo_lite.settings import is_replacement
from horo_lite.start.ending import end_this_rank, others_go_on
from horo_lite.start.launcher import is_fault_tolerant
from horo_lite.start.session import abandon, communicator, renew

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)
Train = Callable[Concatenate[S, P], T]

# How a rank left training, as bits, of which all ranks compute the AND.
_DONE, _RAISED, _NO_ERROR, _GROWS, _NO_MISMATCH = 1, 2, 4, 8, 16


class HostsUpdatedInterrupt(HoroLiteError):  # noqa: N818
    """Raised by `state.commit()` on every rank if a rank is about to join; `run` catches it."""


@overload
def run(
    train: Train[S, P, T], *, min_size: int = 1, max_size: int | None = None
) -> Train[S, P, T]: ...
@overload
def run(
    *, min_size: int = 1, max_size: int | None = None
) -> Callable[[Train[S, P, T]], Train[S, P, T]]: ...
def run(train: Any = None, *, min_size: int = 1, max_size: int | None = None) -> Any:
    """Return `train(state, …)` wrapped to continue with the remaining ranks when some are lost.

        @hvd.elastic.run
        def train(state): …

    Collective. First, all ranks get rank 0's state. When a rank dies while others need it, these
    form a smaller world, with ranks numbered from 0 in the same order; the state's reset callbacks
    are called, all get the state of the most advanced rank, and `train(state, …)` is called again:
    it must continue from the position in the state. Only the step in flight is lost (see State).
    Objects of the former world can no longer be used: process sets, handles, `World` objects. If
    `train` raises an exception or calls `sys.exit(n)`, only that rank dies, unless all ranks raise,
    or it is a MismatchError or Ctrl-C: these end the job. It returns when all ranks have returned.

    Needs Open MPI 5 and `mpiexec --with-ft ulfm`. Otherwise a lost rank ends the job as usual.

    Args:
        train: A function of the state, and of any further arguments of `train(state, …)`.
        min_size: If fewer ranks than this remain, rank 0 writes the state to its checkpoint, if it
            has one, and all raise TooFewRanksError.
        max_size: Experimental. With fewer ranks than this, rank 0 starts replacements: this script
            again, in its own world until it calls `run`. A replacement joins, as the last rank, at
            a `state.commit()`, in which the ranks then wait for each other; `train` is called
            again.
    """
    if train is None:
        return partial(run, min_size=min_size, max_size=max_size)

    @wraps(train)
    def call(state: State, *args: Any, **kwargs: Any) -> Any:
        def trained() -> Any:
            try:
                return train(state, *args, **kwargs)
            finally:  # before another rank 0 writes to the file
                state.flush()

        joins = is_replacement()
        if not joins and not survives(state._checkpoint):
            state.read_checkpoint()
            state.sync()
            return trained()
        with others_go_on():
            job = _Run(trained, state, min_size, max_size)
            if joins:
                job.join()
            try:
                return job.result()
            finally:
                job.end()

    return call


def survives(checkpoint: str | None) -> bool:
    """Return whether the remaining ranks of this world can continue without a rank."""
    if communicator() is None:
        if size() > 1 and rank() == 0 and not checkpoint:
            warn(
                "MPI did not start this job, so elastic.run cannot continue without ranks "
                "that die: the job ends. With State(checkpoint=…) it continues from its last "
                "commit when it is started again, as `torchrun --max-restarts` does"
            )
        return False
    enabled = is_fault_tolerant(os.environ)
    restarts = os.environ.get("HORO_LITE_CHECKPOINT")  # the job has another way to continue
    if not enabled and not restarts and rank() == 0:
        warn(
            "without `--with-ft ulfm`, an option of Open MPI 5's mpiexec, elastic.run "
            "cannot continue without ranks that die: the job ends"
        )
    return enabled


class _Run:
    """One call of a training function, over several worlds."""

    def __init__(
        self, train: Callable[[], Any], state: State, min_size: int, max_size: int | None
    ) -> None:
        self._train = train
        self._state = state
        self._min_size = min_size
        self._replacements = growth.Replacements(max_size or 0)
        self._changed_at = 0.0  # when the world changed last
        self._is_new = False

    def join(self) -> None:
        """Make this process, a replacement, a rank of the job."""
        _settle(growth.join())
        self._is_new, self._changed_at = True, time.monotonic()

    def end(self) -> None:
        """Let no more ranks join."""
        self._state._check_for_ranks = None
        self._replacements.end()

    def result(self) -> Any:
        """Return the function's result, in the last of the worlds."""
        n_ranks, event = size(), "loss was noticed"
        while True:
            comm = communicator()
            came, error, result = self._train_in_this_world(comm, event)
            self._changed_at = time.monotonic()
            if comm is not None and not came & (_DONE | _GROWS):
                abandon(f"{type(error).__name__}: {error}")
                comm.Revoke()
            if not (came & _RAISED and isinstance(error, MismatchError)):
                came |= _NO_MISMATCH
            common, died = (came, False) if comm is None else consensus(comm, came, error)
            if common & _GROWS and not died:
                event = "last commit"
                self._grow(comm)
                n_ranks = size()
                continue
            if common & (_DONE | _RAISED) or (common & _NO_ERROR and not died):
                if error is not None:  # on all ranks, or some have left the world without dying
                    raise error
                return result
            if not died and not common & _NO_MISMATCH:
                # The ranks that have raised it end the job, which MPI does not detect as deaths.
                if error is None or isinstance(error, HostsUpdatedInterrupt):
                    error = PeerLostError("other ranks end the job with a MismatchError")
                raise error
            # After a death, a MismatchError may come from invalid data that MPI delivered.
            if error is not None and came & _RAISED and not isinstance(error, MismatchError):
                end_this_rank(error)
            lost = _shrink(comm)
            if rank() == 0:
                say(f"lost {ranks_in_words(lost)} of {n_ranks}. {error or ''}")
            del error  # its traceback holds what the function had in memory
            n_ranks, event = size(), "loss was noticed"

    def _train_in_this_world(self, comm: Any, event: str) -> tuple[int, BaseException | None, Any]:
        """Train; return how this rank left training, its error, and the function's result.

        `comm` is the world's communicator, `event` the end of the last world.
        """
        result: Any = None
        error: BaseException | None = None
        trains = False
        try:
            self._begin(event)
            trains = True
            try:
                result = self._train()
            except SystemExit as exit:
                if exit.code:
                    raise
                error = exit  # raised when all ranks are done
            if comm is not None:
                messages().finish()
                world().group.agree("elastic.run", "the end of training")
        except (TooFewRanksError, KeyboardInterrupt):
            raise
        except HostsUpdatedInterrupt as interrupt:
            return _GROWS | _NO_ERROR, interrupt, None
        except SystemExit as exit:
            return _RAISED, exit, None
        except Exception as raised:
            # TensorFlow and JAX raise another error for one that was raised in a graph.
            cause = behind(raised) or raised
            # Before training, MPI may have delivered invalid data while a rank died.
            return _RAISED if trains and not _is_loss(cause) else _NO_ERROR, cause, None
        return _DONE | _NO_ERROR, error, result

    def _begin(self, event: str) -> None:
        """Give all ranks of this world the state from which training starts or continues."""
        if not self._changed_at:
            self._state.read_checkpoint()
            self._state.sync()
        else:
            self._resume()
            if rank() == 0:
                took_s = time.monotonic() - self._changed_at
                say(f"{_ranks(size())}, {took_s:.2f} s after the {event}")
        self._prepare_growth()

    def _prepare_growth(self) -> None:
        """Start replacements if they are needed, and check for them at commits."""
        grows = self._replacements.wanted(size()) and world().thread_multiple
        self._state._check_for_ranks = self._check_for_ranks if grows else None
        if grows and rank() == 0:
            self._replacements.start()

    def _check_for_ranks(self) -> None:
        """Raise HostsUpdatedInterrupt, on every rank, if a rank waits to join."""
        if ops.broadcast_object(self._replacements.ready(), 0):
            raise HostsUpdatedInterrupt("a rank joins")

    def _grow(self, comm: Any) -> None:
        """Add one more rank to the world, if that is possible."""
        from mpi4py import MPI

        grown = self._replacements.take_in(MPI.COMM_SELF if comm is None else comm)
        if grown is not None:
            _settle(grown)
            if rank() == 0:
                say(f"rank {size() - 1} joins")
        elif rank() == 0:
            say("the replacement did not join: continuing without it")

    def _resume(self) -> None:
        """Give all ranks the state of the most advanced one."""
        state, group = self._state, world().group
        # A replacement's state is not used, as long as another rank is left.
        progress = Progress(False, 0, 0, 0) if self._is_new else state.progress()
        everyone: list[Progress] = ops.allgather_object(progress, group=group)
        furthest = max(everyone)
        if not furthest.is_whole:
            furthest = max(everyone, key=lambda progress: progress.n_commits)
        root = everyone.index(furthest)
        if furthest.n_commits == 0:  # no rank has received the state of the first rank 0
            root = 0
            state.read_checkpoint()
        has_lost_shares = state.has_lost_shares()  # if so, on all former ranks
        if not furthest.is_whole and (group.rank == root or has_lost_shares):
            state.restore()
        if group.rank == root and not furthest.is_whole:
            why = (
                "the optimizer's state was divided between the ranks (shard_state=True)"
                if has_lost_shares
                else "no rank has counted its last step, or all were in the middle of one (see "
                "horo_lite.elastic.State)"
            )
            say(f"going back to the last commit: {why}")
        if furthest.is_whole and furthest.n_commits:
            state.merge_ranks(root, is_new=self._is_new)
        if furthest.n_commits == 0 or not state.is_alike():
            state.sync(root)
        self._is_new = False
        state.on_reset()
        if not state.is_alike():  # a callback has not done the same everywhere
            state.sync(root)
        if group.size < self._min_size:
            self._stop()

    def _stop(self) -> NoReturn:
        group, path = world().group, self._state._checkpoint
        self._state.save()
        self._state.write_checkpoint()
        self._state.flush()
        ops.barrier(group=group)
        ranks = "1 rank" if group.size == 1 else f"{group.size} ranks"
        raise TooFewRanksError(
            f"{ranks} left, fewer than min_size={self._min_size}: "
            + (
                f"the state is in {path}"
                if path
                else "State(checkpoint=…) would have saved the state"
            )
        )


def _is_loss(error: BaseException) -> bool:
    """Return whether an error is caused by the loss of other ranks."""
    from mpi4py import MPI

    return isinstance(error, (PeerLostError, StallError, MPI.Exception))


def _shrink(comm: Any) -> list[int]:
    """Shrink the world to the ranks that live; return the former numbers of the others."""
    before = comm.Get_group()
    left = _settle(comm.Shrink()).Get_group().Translate_ranks(None, before)
    return [rank for rank in range(before.size) if rank not in left]


def _settle(comm: Any) -> Any:
    """Make the world one of the ranks of `comm` that live; return their communicator."""
    while True:
        error = None
        try:
            renew(comm)
        except Exception as failed:  # any error: MPI may deliver invalid data while a rank dies
            error = failed
            comm.Revoke()
        stands, died = consensus(comm, error is None)
        if stands and not died:
            return comm
        if error is not None and not died:
            raise error
        comm = comm.Shrink()


def _ranks(n: int) -> str:
    return "1 rank continues" if n == 1 else f"{n} ranks continue"
