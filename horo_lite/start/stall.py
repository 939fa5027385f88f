"""Ranks that the others wait for: reports of late ranks, announcements, and the time lost."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from horo_lite import _native, context
from horo_lite.errors import say

if TYPE_CHECKING:
    from horo_lite.context import World

# A straggler is reported at the end of a run if it exceeds these limits.
WORTH_REPORTING_S = 10.0
WORTH_REPORTING_SHARE = 0.05


class Straggler(NamedTuple):
    """The time that the others have lost by waiting for one rank.

    Attributes:
        rank: The rank's number.
        n_last: How often it was the last to join an operation of all ranks, which waited for it.
        waited_s: Seconds that each of the others has waited for it, on average.
    """

    rank: int
    n_last: int
    waited_s: float


def stragglers() -> list[Straggler]:
    """Return how long the others have waited for each rank.

    Any rank may call it, at any time after `init()`; no other rank takes part. It counts
    blocking calls, and asynchronous operations that `synchronize` waits for: the time between the
    arrival of the others and that of the last rank, as measured by the ranks of this host. On GPUs
    with NCCL the host does not wait, and nothing is counted.

    Returns:
        All ranks of the world, starting with the one that the others have waited for longest.

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
    """Announce that this rank will be busy inside the block, so that the others just wait.

    Use it for long work on some ranks, such as `with announce("evaluation", expect_s=600):` on rank
    0; only these ranks call it. For `expect_s` seconds, this rank is not reported as late, and
    `stall_abort_s` does not end the job.

    Args:
        what: A short description of the work, for reports.
        expect_s: The number of seconds that it may take.

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
        transport.members.announce(what, expect_s)


@contextlib.contextmanager
def abort_after(abort_s: float) -> Iterator[None]:
    """Make longer waits of this thread, inside the block, raise StallError on every rank."""
    former_s = _native.StallDetector.limit_thread(abort_s)
    if 0 < former_s < abort_s:
        _native.StallDetector.limit_thread(former_s)
    try:
        yield
    finally:
        _native.StallDetector.limit_thread(former_s)


_stack_file: tuple[int, int] | None = None


def give_stacks(detector: _native.StallDetector) -> None:
    """Let the other ranks of this host read this process's Python stacks, whatever it does.

    They send an otherwise unused signal, and faulthandler's handler, which does not need the GIL,
    writes to an unnamed file. The handler is never removed, since a signal may arrive late.
    """
    global _stack_file
    if _stack_file is None:
        number = _free_signal()
        if number is None:
            return
        file = os.memfd_create("python_stacks", os.MFD_CLOEXEC)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # readers truncate it
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
    """Write to stderr which rank made the run longer, if it did so considerably."""
    worst = _sorted_stragglers(detector)[0]
    share = worst.waited_s / max(run_s, 1e-9)
    if worst.waited_s > WORTH_REPORTING_S and share > WORTH_REPORTING_SHARE:
        say(
            f"the other ranks waited {worst.waited_s:.0f} s for rank {worst.rank}, {share:.0%} of "
            f"the run's {run_s:.0f} s; it came last {worst.n_last} times"
        )
