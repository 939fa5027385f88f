"""What can go wrong between ranks, one class for each thing the reader should do next."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Sequence

_PACKAGE = os.path.dirname(__file__) + os.sep


class HoroLiteError(RuntimeError):
    """Any error of horo_lite that is not a plain wrong argument."""


class NotInitializedError(HoroLiteError, ValueError):
    """A call came before `init()` or after `shutdown()`: call `horo_lite.init()` first."""


class MismatchError(HoroLiteError):
    """The ranks did not ask for the same thing: a bug in the program, to be fixed there.

    Raised on every rank. The world is usable again afterwards.
    """


class DriftError(HoroLiteError):
    """The replicas are no longer alike: what the ranks train is not one model any more.

    Raised on every rank by `check_in_sync`. The world is usable, the model is not.
    """


class AllocationError(HoroLiteError, MemoryError):
    """A rank had no memory for the result of an operation: raised on every rank.

    Nothing was moved, and the world is usable again afterwards.
    """


class NonFiniteError(HoroLiteError):
    """A rank's own gradient had NaN or inf: raised on every rank before anything was applied."""


class PeerLostError(HoroLiteError):
    """A rank died, left or gave up while this one waited for it.

    Buffers in flight are undefined, and the group of ranks (the world, or what `new_group` made)
    can no longer be used. To go on, as in a notebook, every rank calls `shutdown()` and `init()`.
    """


class TooFewRanksError(PeerLostError):
    """Fewer ranks are left than `elastic.run` shall go on with: start the job again."""


class StallError(HoroLiteError):
    """Nobody moved for longer than the job allows."""


class DeviceError(HoroLiteError):
    """A GPU, its driver or NCCL is missing or failed: the message says what to do."""


class LauncherError(HoroLiteError):
    """The launcher and the MPI library do not fit each other: the message says what to change."""


class CheckpointError(HoroLiteError):
    """The commits that a job left cannot be read, or must not be: the message says why."""


class JobError(HoroLiteError):
    """A job that `run` started has failed: the message says how, and which rank was the cause."""

    def __init__(self, message: str, returncode: int = 1) -> None:
        super().__init__(message)
        self.returncode = returncode


RAISED_ALIKE = (MismatchError, AllocationError, DeviceError)
"""What an operation raises on every rank alike: the ranks are at the same place afterwards."""

GROUP_IS_LOST = (PeerLostError, StallError)
"""What an operation raises where the group has been given up already."""


raised_in_graphs: deque[BaseException] = deque(maxlen=16)
"""What operations inside graphs raised last, of which XLA and TensorFlow pass on the text only.

No more, since each keeps the arrays of its frames.
"""


def behind(error: BaseException) -> BaseException | None:
    """Return what an operation in a graph has raised, of which a framework made `error`.

    None if it comes from something else.
    """
    said = str(error)
    return next(
        (
            cause
            for cause in reversed(raised_in_graphs)
            if cause is error or in_words(cause) in said
        ),
        None,
    )


def in_words(error: BaseException) -> str:
    """The error's class and text, as they are in what a framework makes of it."""
    return f"{type(error).__name__}: {error}"


def in_one_line(error: BaseException) -> str:
    """The error's class and text."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": "))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return like "rank 3", "ranks 1 and 3" or "ranks 0, 1, 2, 3, … 63 (64 of them)"."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "no rank"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:4]))}, … {ranks[-1]} ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def printable(text: str) -> str:
    """`text` as any terminal can show it and any rank can be sent it.

    Lone surrogates (of undecodable file names) and control characters other than newlines and tabs
    are written as escapes.
    """
    valid = text.encode(errors="backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in valid)


def warn(text: str) -> None:
    """Issue a RuntimeWarning at the line of the program that called this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"horo_lite: {text}", RuntimeWarning, stacklevel=level)
