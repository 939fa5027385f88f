"""Passing a call to the ranks of a job, and their results back, through files in a directory.

The files have mode 0600, the directory mode 0700.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import socket
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horo_lite import files
from horo_lite.errors import HoroLiteError, JobError, PeerLostError, in_one_line
from horo_lite.start import launcher


def _pickler() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def dumps(value: Any) -> bytes:
    """Return an object pickled, by cloudpickle if that is installed."""
    data: bytes = _pickler().dumps(value)
    return data


def pickled_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call, pickled; raise TypeError, naming the part that cannot be pickled."""
    try:
        data = dumps((fn, args, kwargs))
    except Exception as error:
        parts = {"the function": fn}
        parts |= {f"argument {i}": value for i, value in enumerate(args)}
        parts |= {f"argument {name}": value for name, value in kwargs.items()}
        raise TypeError(_unpicklable(parts, error)) from error
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None) or ""
    if b"__main__" not in data or _pickler() is not pickle:
        return {"call": data, "main": None}
    if not os.path.exists(file):
        raise TypeError(
            f"{fn!r} was defined in a notebook or at a prompt, where other processes cannot import "
            "it from: pip install cloudpickle, or move it into a module"
        )
    return {"call": data, "main": os.path.abspath(file)}


def unpickled(result: bytes, rank: int) -> Any:
    """Unpickle a rank's result.

    Raises:
        TypeError: It cannot be unpickled in this process.
    """
    try:
        return pickle.loads(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank} cannot be unpickled in this process "
            f"({type(error).__name__}: {error}): return numbers, arrays, lists or dicts"
        ) from error


def _unpicklable(parts: Mapping[str, Any], error: Exception) -> str:
    culprit = "the call"
    for name, value in parts.items():
        try:
            dumps(value)
        except Exception as its:
            culprit, error = f"{name} ({type(value).__name__})", its
            break
    hint = "open files, locks and similar objects cannot be sent: create them inside the function"
    if _pickler() is pickle:
        hint = "lambdas and inner functions need the package cloudpickle: pip install cloudpickle"
    return f"{culprit} cannot be sent to the ranks ({error}); {hint}"


def write(path: Path, data: bytes) -> None:
    """Write a file atomically: it exists complete or not at all."""
    with files.replaced(path) as file:
        file.write(data)


def command(path: Sequence[str], folder: str, size: int, rank: int | None = None) -> list[str]:
    """Return the command for a rank that calls `serve(folder, size, rank)` with this sys.path."""
    start = f"import sys; sys.path[:] = {path!r}; from horo_lite.launch.calls import serve"
    return [sys.executable, "-c", f"{start}; serve({folder!r}, {size}, {rank})"]


def alias_main() -> None:
    """Make the script's classes available under the name by which ranks have pickled them."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])


class RankError(NamedTuple):
    """The error that `fn` raised on a rank."""

    rank: int
    where: str
    summary: str
    traceback: str
    pickled: bytes | None
    is_victim: bool  # caused by the end of another rank

    def as_exception(self) -> BaseException:
        cause = RankTraceback(f"on {self.where}:\n{self.traceback}")
        error: BaseException = JobError(f"{self.where} raised {self.summary}")
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may be unknown here
                error = pickle.loads(self.pickled)
        error.__cause__ = cause
        return error


class RankTraceback(Exception):  # noqa: N818 (shown as the cause of the exception itself)
    """Shows the traceback of an exception on a rank."""


def errors_in(folder: Path) -> list[RankError]:
    """Return the ranks' errors, the likeliest cause of the others first."""
    alias_main()
    found = sorted(folder.glob("error.*"), key=lambda file: file.stat().st_mtime_ns)
    errors = [RankError(*pickle.loads(file.read_bytes())) for file in found]
    return sorted(errors, key=lambda error: error.is_victim)


# --- on a rank ------------------------------------------------------------------------------------


def serve(folder: str, size: int, rank: int | None = None) -> None:
    """Execute the call in `folder` on this rank, and write its result or error there.

    The error is raised as well, so that the job ends as it would without `run`. Standard input is
    empty: `input()` raises EOFError, and breakpoint() ends the rank.

    Args:
        folder: The directory into which `run` has written the call.
        size: The number of ranks.
        rank: This rank's number; by default from the launcher.
    """
    if rank is None:
        launch = launcher.detect(os.environ)
        rank = (launch.rank if launch is not None else None) or 0
    call: dict[str, Any] = {"is_last": False}
    with open(os.devnull) as nothing:  # Open MPI gives all but the first a pipe that never ends
        os.dup2(nothing.fileno(), 0)
    try:
        try:
            call = pickle.loads(Path(folder, "call").read_bytes())
        except FileNotFoundError:
            raise HoroLiteError(
                f"{folder} does not exist on host {socket.gethostname()}: ranks on several hosts "
                "need a shared directory for temporary files; set TMPDIR to one"
            ) from None
        sys.argv = call["argv"]
        if call["main"] is not None:
            main = types.ModuleType("__mp_main__")
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main
            main.__dict__.update(runpy.run_path(call["main"], run_name="__mp_main__"))
        fn, args, kwargs = pickle.loads(call["call"])
        result = fn(*args, **kwargs)
        try:
            data = dumps(result)
        except Exception as error:
            raise TypeError(
                f"the result on rank {rank}, a {type(result).__name__}, cannot be sent to the "
                f"caller ({error}): return numbers, arrays, lists or dicts"
            ) from error
    except BaseException as error:
        with contextlib.suppress(OSError):
            write(Path(folder, f"error.{rank}"), pickle.dumps(tuple(_error_of(rank, size, error))))
            if call["is_last"]:  # the caller shows it
                sys.stderr.flush()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise
    write(Path(folder, f"result.{rank}"), data)


def _without_serve(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without serve() itself."""
    return trace.tb_next or trace if trace is not None else None


def _error_of(rank: int, size: int, error: BaseException) -> RankError:
    pickled = None
    if isinstance(error, Exception):  # sys.exit() on a rank must not end the caller's process
        with contextlib.suppress(Exception):
            pickled = dumps(error)
            pickle.loads(pickled)  # some can only be pickled
    return RankError(
        rank,
        f"rank {rank} of {size} ({socket.gethostname()}, pid {os.getpid()})",
        in_one_line(error),
        "".join(
            traceback.format_exception(type(error), error, _without_serve(error.__traceback__))
        ),
        pickled,
        isinstance(error, (PeerLostError, KeyboardInterrupt)),
    )
