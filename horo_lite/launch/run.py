"""`run`: one function called on every rank of a job of its own, from a script or a notebook."""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import socket
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from horo_lite.errors import HoroLiteError, JobError, PeerLostError
from horo_lite.launch import jobs
from horo_lite.start import launcher

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 0,
    restarts: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    hosts: str | None = None,
    mpiexec_args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Call a function on every rank of a job of its own, and return what it returned on each.

    One process that is not a rank calls it, a script or a notebook. It starts new processes under
    mpiexec, which must be installed, and waits for them; what they print is shown. `fn` calls
    `init()` itself. It, its arguments and its results are pickled: with the package cloudpickle
    they may be anything of a notebook or script, lambdas too; without it, `fn` must be importable,
    and a script that calls `run` must do so under `if __name__ == "__main__":`, since every rank
    imports it. Ctrl-C and SIGTERM end the job. No process or file of it is left.

    Args:
        fn: The function, called on every rank.
        args: Its positional arguments, as a list or tuple.
        kwargs: Its named arguments.
        np: The number of ranks.
        restarts: How often a job that fails is started again; states of `elastic` go on from their
            last commit.
        checkpoint: The file with the commits of `elastic` states; by default a temporary
            one.
        hosts: Where the ranks run, as "a:4,b:4", which then need a common $TMPDIR; by default here.
        mpiexec_args: More arguments of mpiexec.
        env: Variables on top of the environment.

    Returns:
        What `fn` returned, one result per rank, in rank order.

    Raises:
        Exception: What `fn` raised on a rank, with that rank's traceback as its cause.
        JobError: The job ended otherwise; the message says how, and which rank was the cause.
        TypeError: Something cannot be pickled.
        LauncherError: There is no mpiexec.
        HoroLiteError: This process is a rank itself.
    """
    launch = launcher.detect(os.environ)
    if launch is not None and launch.size != 1:
        raise HoroLiteError(
            f"run() was called on rank {launch.rank} of a job, and starts one itself: start this "
            'script without mpiexec, and keep run() under if __name__ == "__main__":'
        )
    if not callable(fn):
        raise TypeError(f"run() calls a function on every rank, not {fn!r}")
    if not isinstance(args, (list, tuple)):
        raise TypeError(
            f"run()'s second argument is the list of fn's arguments, not {args!r}; the number of "
            "ranks is np=: hvd.run(train, np=2), hvd.run(train, (lr,), np=2)"
        )
    number: object = np
    if not isinstance(number, int) or number < 1:
        raise ValueError(
            f"np is the number of ranks, 1 or more, as in hvd.run(fn, np=2), not {np!r}"
        )
    if restarts < 0:
        raise ValueError(f"restarts is how often a job may start again, 0 or more, not {restarts}")
    if isinstance(mpiexec_args, str):
        raise TypeError(
            f"mpiexec_args is a list, not a text: mpiexec_args={mpiexec_args.split()!r}"
        )
    for name, value in (env or {}).items():
        if not isinstance(value, str):
            raise TypeError(f"env holds texts, but {name} is {value!r}: give {str(value)!r}")
    call = _pickled_call(fn, tuple(args), dict(kwargs or {}))
    with (
        jobs.ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="horo_lite-") as folder,  # mode 0700
        jobs.checkpoint_of(os.fspath(checkpoint) if checkpoint else None, restarts) as commits,
    ):
        call |= {"argv": sys.argv, "is_last": not restarts}
        _write(Path(folder, "call"), pickle.dumps(call))
        more = {jobs.CHECKPOINT: commits, jobs.RESTART: "0"}
        environ = jobs.environment({k: v for k, v in more.items() if v} | dict(env or {}))
        if not hosts:
            jobs.set_session_folder(environ, folder)
        path = [os.path.abspath(entry) for entry in sys.path]
        start = f"import sys; sys.path[:] = {path!r}; from horo_lite.launch.run import serve; "
        command = [sys.executable, "-c", f"{start}serve({folder!r}, {np})"]
        if np > 1 or hosts or mpiexec_args:
            mpiexec = jobs.find_mpiexec()
            command = mpiexec.command(command, np, hosts=hosts, more=mpiexec_args, env=environ)
        errors: list[_Error] = []

        def attempt(number: int) -> jobs.Failure | None:
            for left in Path(folder).glob("[er]*.[0-9]*"):
                left.unlink()
            job = jobs.Job(command, environ | {jobs.RESTART: str(number)})
            code = job.wait(has_failed=lambda: any(Path(folder).glob("error.*")))
            errors[:] = _errors(Path(folder))
            if errors:
                raised = f"rank {errors[0].rank} raised {errors[0].summary}"
                return jobs.Failure(code, jobs.lost_rank(raised) or raised)
            missing = [rank for rank in range(np) if not Path(folder, f"result.{rank}").exists()]
            if code == 0 and not missing:
                return None
            why = f"no result from rank {', '.join(map(str, missing))}" if not code else ""
            return jobs.failure_of(code, why, jobs.cause(job.tail))

        failure = jobs.until_done(attempt, restarts=restarts, checkpoint=commits)
        if errors:
            raise errors[0].as_exception()
        if failure is not None:
            raise JobError(f"the job of {np} ranks failed: {failure.why}", failure.returncode or 1)
        results = [Path(folder, f"result.{rank}").read_bytes() for rank in range(np)]
    _alias_main()
    return [_unpickled(result, rank) for rank, result in enumerate(results)]


# --- what travels: files of mode 0600 in a directory of mode 0700 ---------------------------------


def _pickler() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def _dumps(value: Any) -> bytes:
    data: bytes = _pickler().dumps(value)
    return data


def _pickled_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the call, pickled; TypeError says which part of it cannot be."""
    try:
        data = _dumps((fn, args, kwargs))
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
            f"{fn!r} is of a notebook or a prompt, which other processes cannot import: "
            "pip install cloudpickle, or move it into a module"
        )
    return {"call": data, "main": os.path.abspath(file)}


def _unpickled(result: bytes, rank: int) -> Any:
    try:
        return pickle.loads(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank} cannot be read in this process ({type(error).__name__}: "
            f"{error}): return numbers, arrays, lists or dicts"
        ) from error


def _unpicklable(parts: Mapping[str, Any], error: Exception) -> str:
    culprit = "the call"
    for name, value in parts.items():
        try:
            _dumps(value)
        except Exception as its:
            culprit, error = f"{name} ({type(value).__name__})", its
            break
    hint = "open files, locks and the like stay where they are: make them inside the function"
    if _pickler() is pickle:
        hint = "lambdas and inner functions need the package cloudpickle: pip install cloudpickle"
    return f"{culprit} cannot be sent to the ranks ({error}); {hint}"


def _write(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    new = path.with_name(f"new-{path.name}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)


def _alias_main() -> None:
    """Let what ranks pickled with a script's classes find them in this script."""
    sys.modules.setdefault("__mp_main__", sys.modules["__main__"])


class _Error(NamedTuple):
    """How `fn` ended on a rank."""

    rank: int
    where: str
    summary: str
    traceback: str
    pickled: bytes | None
    is_victim: bool  # of another rank's end

    def as_exception(self) -> BaseException:
        cause = _RankTraceback(f"on {self.where}:\n{self.traceback}")
        error: BaseException = JobError(f"{self.where} raised {self.summary}")
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may not be known here
                error = pickle.loads(self.pickled)
        error.__cause__ = cause
        return error


class _RankTraceback(Exception):  # noqa: N818 (shown as the cause of the exception itself)
    """Where on the rank the exception came from."""


def _errors(folder: Path) -> list[_Error]:
    """Return the ranks' errors, the likeliest cause of the others first."""
    _alias_main()
    files = sorted(folder.glob("error.*"), key=lambda file: file.stat().st_mtime_ns)
    errors = [_Error(*pickle.loads(file.read_bytes())) for file in files]
    return sorted(errors, key=lambda error: error.is_victim)


# --- on a rank ------------------------------------------------------------------------------------


def serve(folder: str, size: int) -> None:
    """Make the call in `folder` on this rank, and leave its result or error there.

    The error is raised as well, so that the job ends as it would have without `run`.

    Args:
        folder: Where `run` has left the call.
        size: The number of ranks.
    """
    launch = launcher.detect(os.environ)
    rank = (launch.rank if launch is not None else None) or 0
    call: dict[str, Any] = {"is_last": False}
    try:
        try:
            call = pickle.loads(Path(folder, "call").read_bytes())
        except FileNotFoundError:
            raise HoroLiteError(
                f"{folder} is not there on host {socket.gethostname()}: ranks on several hosts "
                "need a common directory for temporary files; name one in TMPDIR"
            ) from None
        sys.argv = call["argv"]
        if call["main"] is not None:
            main = types.ModuleType("__mp_main__")
            sys.modules["__main__"] = sys.modules["__mp_main__"] = main
            main.__dict__.update(runpy.run_path(call["main"], run_name="__mp_main__"))
        fn, args, kwargs = pickle.loads(call["call"])
        result = fn(*args, **kwargs)
        try:
            data = _dumps(result)
        except Exception as error:
            raise TypeError(
                f"the result on rank {rank}, a {type(result).__name__}, cannot be sent to the "
                f"caller ({error}): return numbers, arrays, lists or dicts"
            ) from error
    except BaseException as error:
        with contextlib.suppress(OSError):
            _write(Path(folder, f"error.{rank}"), pickle.dumps(tuple(_error_of(rank, size, error))))
            if call["is_last"]:  # the caller shows it; once is enough
                sys.stderr.flush()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise
    _write(Path(folder, f"result.{rank}"), data)


def _without_serve(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback without serve() itself."""
    return trace.tb_next or trace if trace is not None else None


def _error_of(rank: int, size: int, error: BaseException) -> _Error:
    pickled = None
    if isinstance(error, Exception):  # the caller's process is not to end by sys.exit() here
        with contextlib.suppress(Exception):
            pickled = _dumps(error)
            pickle.loads(pickled)  # some can only be pickled
    name, text = type(error).__name__, " ".join(str(error).split())
    return _Error(
        rank,
        f"rank {rank} of {size} ({socket.gethostname()}, pid {os.getpid()})",
        f"{name}: {text}" if text else name,
        "".join(
            traceback.format_exception(type(error), error, _without_serve(error.__traceback__))
        ),
        pickled,
        isinstance(error, (PeerLostError, KeyboardInterrupt)),
    )
