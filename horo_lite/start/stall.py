"""Ranks that the others wait for: who is late, who announced it, and what it cost the run."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from horo_lite import context

if TYPE_CHECKING:
    from horo_lite import _native
    from horo_lite.context import World

# Stragglers are reported at the end of a run above these limits.
WORTH_REPORTING_S = 10.0
WORTH_REPORTING_SHARE = 0.05


class Straggler(NamedTuple):
    """What one rank cost the others.

    Attributes:
        rank: The rank's number.
        n_last: How often it came last to an operation of all, and the others waited for it.
        waited_s: Seconds that each of the others has spent waiting for it, on average.
    """

    rank: int
    n_last: int
    waited_s: float


def stragglers() -> list[Straggler]:
    """Return what each rank cost the others by coming late.

    Any rank may call it, at any time since `init()`; no other rank takes part. Direct calls count,
    and asynchronous operations that `synchronize` waits for: the time from when the others had come
    until the last one came, as the ranks of this host saw it. On GPUs with NCCL the host does not
    wait, and nothing is counted.

    Returns:
        Every rank of the world, first the one that the others have waited for longest.

    Raises:
        NotInitializedError: There is no world.
    """
    return _sorted_stragglers(detector_of(context.world()))


def _sorted_stragglers(detector: _native.StallDetector | None) -> list[Straggler]:
    lateness = enumerate([(0, 0.0)] if detector is None else detector.lateness())
    found = [Straggler(rank, n_last, waited_s) for rank, (n_last, waited_s) in lateness]
    return sorted(found, key=lambda each: -each.waited_s)


def detector_of(world: World) -> _native.StallDetector | None:
    """Return the stall detector of a world; None in a world of one."""
    return world.group.transport.stall_detector


@contextlib.contextmanager
def announce(what: str, *, expect_s: float) -> Iterator[None]:
    """Announce that this rank will be busy inside the context, so that the others just wait.

    It is for long work of some ranks, such as `with announce("evaluation", expect_s=600):` on rank
    0; only those ranks call it. Until `expect_s` seconds have passed, no report says that this rank
    is late, and `stall_abort_s` does not end the job.

    Args:
        what: What this rank does, in a few words for reports.
        expect_s: Seconds that it may take.

    Returns:
        A context manager.

    Raises:
        ValueError: `what` is empty, or `expect_s` is not positive.
        NotInitializedError: There is no world.
    """
    if not what or not expect_s > 0:
        raise ValueError(f"announce needs a text and a time, not {what!r} and {expect_s!r}")
    _announce_to_all(what, expect_s)
    try:
        yield
    finally:
        _announce_to_all("", 0.0)


def _announce_to_all(what: str, expect_s: float) -> None:
    here = detector_of(context.world())
    if here is None:
        return
    here.announce(here.rank, what, expect_s)
    for transport in context.world().group.transports():
        transport.announce(what, expect_s)


@contextlib.contextmanager
def abort_after(abort_s: float) -> Iterator[None]:
    """Inside, let a wait of this rank that takes longer raise StallError on every rank."""
    here = detector_of(context.world())
    if here is None:
        yield
        return
    warn_s, former_s = here.warn_s, here.abort_s
    here.set_limits(warn_s, min(abort_s, former_s or abort_s))
    try:
        yield
    finally:
        here.set_limits(warn_s, former_s)


_stack_file: tuple[int, int] | None = None


def give_stacks(detector: _native.StallDetector) -> None:
    """Let the other ranks of this host read this process's Python stacks, whatever it does.

    They send a signal that nothing else uses, and faulthandler's handler, which needs no GIL,
    writes into a file without a name. Once for the life of the process: a signal that comes late
    must never find no handler.
    """
    global _stack_file
    if _stack_file is None:
        number = _free_signal()
        if number is None:
            return
        file = os.memfd_create("python_stacks", os.MFD_CLOEXEC)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # readers cut it down to nothing
        faulthandler.register(number, file=file, all_threads=True)
        _stack_file = file, number
    detector.give_stacks(*_stack_file)


def _free_signal() -> int | None:
    """Return a signal that has no handler and is not ignored."""
    taken = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:")):
            taken |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not taken >> (number - 1) & 1:
            return number
    return None


def print_summary(detector: _native.StallDetector | None, run_s: float) -> None:
    """Write to stderr which rank made the run longer, if that is worth a line."""
    worst = _sorted_stragglers(detector)[0]
    share = worst.waited_s / max(run_s, 1e-9)
    if worst.waited_s > WORTH_REPORTING_S and share > WORTH_REPORTING_SHARE:
        print(
            f"[horo_lite] the other ranks waited {worst.waited_s:.0f} s for rank {worst.rank}, "
            f"{share:.0%} of the run's {run_s:.0f} s; it came last {worst.n_last} times",
            file=sys.stderr,
            flush=True,
        )
