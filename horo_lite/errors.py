"""Exceptions, one class for each kind of reaction."""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from types import FrameType
from typing import TypeVar

K = TypeVar("K")

_PACKAGE = os.path.dirname(__file__) + os.sep
# Their functions call those of this package.
_FRAMEWORKS = "torch", "tensorflow", "keras", "tf_keras", "jax"


class HoroLiteError(RuntimeError):
    """Base class of horo_lite's errors, except simple wrong arguments."""


class NotInitializedError(HoroLiteError, ValueError):
    """A call came before `init()` or after `shutdown()`: call `horo_lite.init()` first."""


class MismatchError(HoroLiteError):
    """The ranks' calls differ: a bug in the program, to be fixed there.

    Raised on every rank. The world remains usable.
    """


class DriftError(HoroLiteError):
    """The replicas have diverged: the ranks no longer train the same model.

    Raised on every rank by `check_in_sync`. The world remains usable, the model does not.
    """


class AllocationError(HoroLiteError, MemoryError):
    """A rank had no memory for the result of an operation; raised on every rank.

    No data was moved, and the world remains usable.
    """


class NonFiniteError(HoroLiteError):
    """A rank's own gradient contains NaN or inf; raised on every rank before it was applied."""


class PeerLostError(HoroLiteError):
    """A rank died, left or gave up while this one waited for it.

    Buffers in flight are undefined, and the group of ranks (the world, or one made by `new_group`)
    can no longer be used. To continue, for example in a notebook, every rank calls `shutdown()` and
    `init()`.
    """


class TooFewRanksError(PeerLostError):
    """Fewer ranks remain than `elastic.run` requires: start the job again."""


class StallError(HoroLiteError):
    """No rank made progress for longer than the job allows."""


class DeviceError(HoroLiteError):
    """A GPU, its driver or NCCL is missing or failed: the message says what to do."""


class LauncherError(HoroLiteError):
    """The launcher and the MPI library do not fit together: the message says what to change."""


class CheckpointError(HoroLiteError):
    """A job's commits cannot be read, or must not be read: the message says why."""


class JobError(HoroLiteError):
    """A job that `run` started has failed: the message says how, and which rank caused it."""

    def __init__(self, message: str, returncode: int = 1) -> None:
        super().__init__(message)
        self.returncode = returncode


RAISED_ALIKE = (MismatchError, AllocationError, DeviceError)
"""Errors that an operation raises on every rank: afterwards the ranks are at the same point."""

GROUP_IS_LOST = (PeerLostError, StallError)
"""Errors that an operation raises if the group has already been given up."""


raised_in_graphs: deque[BaseException] = deque(maxlen=16)
"""The last errors of operations inside graphs: XLA and TensorFlow only propagate their text.

Few are kept, since each keeps the arrays of its frames alive.
"""


def behind(error: BaseException) -> BaseException | None:
    """Return the error of an operation in a graph that a framework converted to `error`.

    None if `error` has another cause.
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
    """Return the error's class and text, in the form in which a framework's error contains them."""
    return f"{type(error).__name__}: {error}"


def in_one_line(error: BaseException) -> str:
    """Return the error's class and text in one line."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": "))


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return a phrase like "rank 3", "ranks 1 and 3" or "ranks 0, 1, 2, 3, … 63 (64 of them)"."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "no rank"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:4]))}, … {ranks[-1]} ({len(ranks)} of them)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def ranks_by(values: Sequence[K], ranks: Sequence[int] = ()) -> dict[K, list[int]]:
    """Return which ranks have each value, where the values are those of `ranks`, by default all."""
    found: dict[K, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def printable(text: str) -> str:
    """Return `text` in a form that any terminal can show and that can be sent to any rank.

    Lone surrogates (of undecodable file names) and control characters other than newlines and tabs
    are written as escapes.
    """
    valid = text.encode(errors="backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in valid)


def say(text: str) -> None:
    """Write a line to stderr that tells the user what the job does."""
    print(f"[horo_lite] {text}", file=sys.stderr, flush=True)


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning at the line of the program that called this package.

    Between them may be a framework's own frames, such as those of torch's backward().
    """
    frame, level = sys._getframe(1), 2
    while _is_inside(frame) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"horo_lite: {text}", category, stacklevel=level)


def _is_inside(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return frame.f_code.co_filename.startswith(_PACKAGE) or module.split(".")[0] in _FRAMEWORKS
