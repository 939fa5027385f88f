"""Ranks that the others wait for: who is late, who said so before, and what it cost the run."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from horo_lite import _native

WARN_S = 30.0
# What the end of a run says of its stragglers must be worth a line.
WORTH_TELLING_S = 10.0
WORTH_TELLING_SHARE = 0.05


class Straggler(NamedTuple):
    """What one rank cost the others."""

    rank: int
    n_last: int
    """How often it came last to a meeting of all, and the others waited for it."""
    waited_s: float
    """Seconds that each of the others has spent waiting for it, on average."""


def stragglers() -> list[Straggler]:
    """Every rank of the world, first the one that the others have waited for longest.

    Any rank may ask, at any time since `init()`, alone. Counted are direct calls, and asynchronous
    operations that `synchronize` waits for, from when the others had come until the last one came;
    seen by the ranks of this host (of ranks elsewhere: what these waited for them). On GPUs with
    NCCL the host waits for nobody, and nothing is counted.
    """
    from horo_lite.world import lookout

    return _seen_by(lookout())


def _seen_by(lookout: _native.Lookout | None) -> list[Straggler]:
    tallies = enumerate([(0, 0.0)] if lookout is None else lookout.tallies())
    found = [Straggler(rank, n_last, waited_s) for rank, (n_last, waited_s) in tallies]
    return sorted(found, key=lambda each: -each.waited_s)


@contextlib.contextmanager
def announce(what: str, *, expect_s: float) -> Iterator[None]:
    """The others have been told that this rank will be busy, and wait for it without complaint.

    For long work of some ranks, such as `with announce("evaluation", expect_s=600):` on rank 0.
    Until `expect_s` seconds have passed there is no report that this rank is late, and
    `stall_abort_s` does not end the job; those that wait go on waiting.
    """
    if not what or not expect_s > 0:
        raise ValueError(f"announce needs a text and a time, not {what!r} and {expect_s!r}")
    _tell_all(what, expect_s)
    try:
        yield
    finally:
        _tell_all("", 0.0)


def _tell_all(what: str, expect_s: float) -> None:
    from horo_lite.world import lookout, world

    here = lookout()
    if here is None:
        return
    here.announce(here.rank, what, expect_s)
    for transport in world().group.transports():
        if hasattr(transport, "announce"):
            transport.announce(what, expect_s)


def limit(name: str, given: object, default: float) -> float:
    """A number of seconds, 0 for never. ValueError where it is none."""
    try:
        value = default if given is None else float(str(given))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds, or 0 for never, not {given!r}")
    return value


_stack_file: tuple[int, int] | None = None


def give_stacks(lookout: _native.Lookout) -> None:
    """The other ranks of this host can read this process's Python stacks, whatever it does.

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
    lookout.give_stacks(*_stack_file)


def _free_signal() -> int | None:
    """A signal that has no handler and is not ignored."""
    taken = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:")):
            taken |= int(line.split()[1], 16)
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if not taken >> (number - 1) & 1:
            return number
    return None


def print_summary(lookout: _native.Lookout | None, run_s: float) -> None:
    """One line on stderr says who made the run longer, if that is worth one."""
    worst = _seen_by(lookout)[0]
    share = worst.waited_s / max(run_s, 1e-9)
    if worst.waited_s > WORTH_TELLING_S and share > WORTH_TELLING_SHARE:
        print(
            f"[horo_lite] the other ranks waited {worst.waited_s:.0f} s for rank {worst.rank}, "
            f"{share:.0%} of the run's {run_s:.0f} s; it came last {worst.n_last} times",
            file=sys.stderr,
            flush=True,
        )
