"""Ranks that serve many tests: a job under mpiexec whose ranks run functions, one after another.

A job of its own costs each rank the imports, MPI_Init and MPI_Finalize. Where a test is about what
ranks compute, and not about how a job begins or ends, `on_ranks` calls its function on ranks that
already run, between init() and shutdown() of its own. What init() and shutdown() must undo, they
must undo here: whatever a function leaves behind is a failure of its test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing.connection
import os
import pickle
import re
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO, TypeVar

import launch

T = TypeVar("T")
ON_RANKS = "worlds.on_ranks"  # an audit event: conftest.py requires a mark
_OF_INIT = re.compile(r"HORO_LITE_|\w+_NUM_THREADS$")


class RankError(AssertionError):
    """A function raised on some ranks, or left something behind, or a rank ended or hung."""


@dataclass(frozen=True)
class _Call:
    path: str
    name: str
    args: tuple[object, ...]
    env: Mapping[str, str]


def on_ranks(
    function: Callable[..., T],
    size: int,
    *args: object,
    hosts: str = "",
    env: Mapping[str, str] | None = None,
    job_env: Mapping[str, str] | None = None,
    timeout_s: float = 30,
) -> list[T]:
    """Return the results, by rank, of `function(*args)`, called by all ranks of a world.

    `function` is at the top level of an importable file, and calls `hvd.init()` itself; the rank
    calls `hvd.shutdown()` afterwards. `args` and results are pickled. `hosts` becomes
    HORO_LITE_TEST_HOSTS. Variables in `env` are set during the call; those in `job_env` when the
    ranks start, for what an import reads.

    RankError holds all ranks' exceptions, with the values of their variables, and their output. It
    ends the world: the next test has a new one.
    """
    sys.audit(ON_RANKS)
    call = _Call(
        function.__code__.co_filename,  # type: ignore[attr-defined]
        function.__qualname__,
        args,
        {**({"HORO_LITE_TEST_HOSTS": hosts} if hosts else {}), **(env or {})},
    )
    key = size, tuple((job_env or {}).items())
    world = _worlds.get(key)
    if world is None or not world.is_usable():
        world = _worlds[key] = _World(size, job_env)
    return world.run(call, launch.PATIENCE * timeout_s)  # type: ignore[return-value]


def script_on_ranks(
    code_or_path: str | Path,
    size: int,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    job_env: Mapping[str, str] | None = None,
    timeout_s: float = 30,
) -> launch.Result:
    """Return what a script printed that all ranks of a world ran, in an empty directory.

    Arguments as for `launch.run_ranks` and `on_ranks`. RankError if the script raises, or exits
    with another code than 0, on any rank.
    """
    with launch.script_of(code_or_path) as (script, folder):
        printed = on_ranks(
            _run_script,
            size,
            str(script),
            folder,
            list(args),
            env=env,
            job_env=job_env,
            timeout_s=timeout_s,
        )
    stdout, stderr = ("".join(parts) for parts in zip(*printed, strict=True))
    return launch.Result(f"{script} on {size} ranks", 0, stdout, stderr, 0.0)


class _World:
    """A job whose ranks wait for functions to run."""

    def __init__(self, size: int, env: Mapping[str, str] | None) -> None:
        self._size = size
        self._resources = contextlib.ExitStack()
        self._ranks: dict[int, Connection] = {}
        until = time.monotonic() + launch.PATIENCE * 30
        with (
            tempfile.TemporaryDirectory(prefix="hvd") as folder,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{folder}/calls")
            listener.listen(size)
            listener.settimeout(1)
            self._job = self._resources.enter_context(
                launch.start_ranks(
                    Path(__file__), size, args=[f"{folder}/calls"], env=env, launcher=size > 1
                )
            )
            while len(self._ranks) < size:
                try:
                    connection = Connection(listener.accept()[0].detach())
                except TimeoutError:
                    if self._job.launcher.poll() is None and time.monotonic() < until:
                        continue
                    result = self._job.result()
                    self.close()
                    raise RankError(f"a world of {size} did not start: {result}") from None
                self._ranks[connection.recv()] = connection

    def is_usable(self) -> bool:
        """Whether the last function ended on every rank, without an error."""
        return bool(self._ranks) and self._job.launcher.poll() is None

    def close(self) -> None:
        """Kill the ranks."""
        self._ranks = {}
        self._resources.close()

    def run(self, call: _Call, limit_s: float) -> list[object]:
        """Return the results of one call, or close this world and raise RankError."""
        printed = len(self._job.stdout()), len(self._job.stderr())
        for connection in self._ranks.values():
            connection.send_bytes(pickle.dumps(call))
        results: dict[int, object] = {}
        errors: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        until = time.monotonic() + limit_s
        while waiting and (left_s := until - time.monotonic()) > 0:
            # A rank that fails leaves the others waiting for it: shutdown() there tells them.
            for connection in multiprocessing.connection.wait(list(waiting), left_s):
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                try:
                    result, error = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    errors[rank] = "the process ended\n"
                    until = min(until, time.monotonic() + 10)  # the launcher ends the others
                    continue
                if error:
                    errors[rank] = error
                else:
                    results[rank] = result
        if not waiting and not errors:
            return [results[rank] for rank in range(self._size)]
        if waiting:
            self._job.show_stacks()
        told = [f"rank {rank}: {error}" for rank, error in sorted(errors.items())]
        told += [f"rank {rank} still ran after {limit_s} s" for rank in sorted(waiting.values())]
        streams = self._job.stdout()[printed[0] :], self._job.stderr()[printed[1] :]
        self.close()
        shown = "--- stdout\n{}\n--- stderr\n{}\n---".format(*streams)
        raise RankError(f"{call.name}, {self._size} ranks\n" + "\n".join([*told, shown]))


_worlds: dict[object, _World] = {}


def close_worlds() -> None:
    """End all ranks that wait for functions."""
    for world in _worlds.values():
        world.close()


# --- in a rank -----------------------------------------------------------------------------------


def _state() -> dict[str, object]:
    """Return what a program has, and must have again after shutdown()."""
    threads, links = [], []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            threads.append(Path(f"/proc/self/task/{task}/comm").read_text().strip())
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {
        # Frameworks' classes of threads are theirs.
        "Python threads": sorted(
            {
                thread.name
                for thread in threading.enumerate()
                if type(thread).__module__.partition(".")[0] in ("threading", "horo_lite")
            }
        ),
        "native threads": sorted(name for name in threads if name.startswith("horo")),
        "shared memory": sorted(link for link in links if "memfd:" in link),
        "signal handlers": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)],
        "hooks": [  # torch.distributed leaves its own
            hook
            for hook in (sys.excepthook, threading.excepthook, sys.exit)
            if (hook.__module__ or "").startswith("horo_lite")
        ],
        # Frameworks set others when they are imported.
        **{f"${name}": value for name, value in os.environ.items() if _OF_INIT.match(name)},
        "working directory": os.getcwd(),
    }


class _Tee(io.StringIO):
    """Remember what is printed, and print it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(text)
        return super().write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _run_script(script: str, folder: str, args: list[str]) -> tuple[str, str]:
    before = sys.argv, os.getcwd()
    sys.argv = [script, *args]
    os.chdir(folder)
    sys.path.insert(0, os.path.dirname(script))
    out, err = _Tee(sys.stdout), _Tee(sys.stderr)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    finally:
        sys.path.remove(os.path.dirname(script))
        sys.argv, _ = before
        os.chdir(before[1])
    return out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _answer(call: _Call) -> tuple[object, str]:
    """Return the result of one call and "", or None and what went wrong."""
    import horo_lite as hvd

    folder, file = os.path.split(call.path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        target: object = importlib.import_module(file.removesuffix(".py"))
        for part in call.name.split("."):
            target = getattr(target, part)
        with _environment(call.env):
            before = _state()
            try:
                result = target(*call.args)  # type: ignore[operator]
            finally:
                hvd.shutdown()
            after = _state()
            until = time.monotonic() + 2
            gc.unfreeze()  # what a function had when it imported a framework: sitecustomize.py
            while after != before and time.monotonic() < until:  # a thread may be about to end
                gc.collect()
                time.sleep(0.05)
                after = _state()
    except BaseException as error:
        try:
            shown = traceback.TracebackException.from_exception(error, capture_locals=True)
        except Exception:  # the repr() of a value, such as that of a JAX operation that has failed
            shown = traceback.TracebackException.from_exception(error)
        return None, "".join(shown.format())
    left = "".join(
        f"left behind: {key}: {before.get(key)} -> {after.get(key)}\n"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    )
    return result, left


def _serve(address: str) -> None:
    faulthandler.enable()
    import horo_lite as hvd

    rank = hvd.init().rank  # also what remains until the process ends, such as MPI
    hvd.shutdown()
    own = socket.socket(socket.AF_UNIX)
    own.connect(address)
    connection = Connection(own.detach())
    connection.send(rank)
    while True:
        try:
            call: _Call = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer = _answer(call)
        try:
            sent = pickle.dumps(answer)
        except Exception as error:
            sent = pickle.dumps((None, f"cannot return this: {error!r}\n"))
        sys.stdout.flush()
        connection.send_bytes(sent)


if __name__ == "__main__":
    import worlds  # pickled calls name the module by which the tests import it

    worlds._serve(sys.argv[1])
