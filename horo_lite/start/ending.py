"""The end of a job when one of its ranks fails: report which rank and why, and end the others.

Exceptions in any thread count, since the main thread might wait for that thread forever. So does
the end of the launcher, which would leave the ranks of its host running. `init()`
installs the hooks, or `guard_start()` under Hydra; `uninstall()` removes them. A forked
child is not a rank: its end does not end the job.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from horo_lite import context, files
from horo_lite.errors import (
    AllocationError,
    DriftError,
    HoroLiteError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
    StallError,
    in_one_line,
    printable,
)
from horo_lite.start import launcher
from horo_lite.start.orphans import LauncherEnd

if TYPE_CHECKING:
    from horo_lite.transports import Transport

_PROGRAM_ENDED = "its program ended; a rank with fewer batches than others calls hvd.join() first"

# Parts of file names of libraries, such as PyTorch, in which backward() waits.
_LIBRARIES = ("/site-packages/", "/dist-packages/", str(Path(os.__file__).parent))
# Errors for which one rank's traceback is sufficient.
_ON_EVERY_RANK = (MismatchError, DriftError, NonFiniteError, AllocationError, StallError)

# After an abort, a launcher kills its ranks within milliseconds.
_KILLED_WITHIN_S = 2.0
# How long a rank waits for the one that reports to end the job, which may write to a slow disk.
_REPORT_S = 30.0

_installed: _Hooks | None = None
_launcher_end: LauncherEnd | None = None
_before_abort: Callable[[], object] | None = None
_is_forked = False
_others_go_on = False
_program_has_ended = False  # only its daemon threads are left


def install(rank: int, size: int, MPI: Any) -> None:
    """End the job if this rank fails, and this rank if its launcher ends, from now on.

    Args:
        rank: This rank's number.
        size: The number of ranks.
        MPI: mpi4py.MPI; None if it did not start the world: then each rank ends itself, and those
            that wait for it detect that.
    """
    global _launcher_end
    _install_hooks(rank, size, MPI)
    if _launcher_end is None:
        _launcher_end = LauncherEnd(_on_launcher_end)


def _install_hooks(rank: int, size: int, MPI: Any) -> None:
    global _installed
    earlier = _installed  # from guard_start(), or from an init() that failed
    if earlier is not None:
        earlier.uninstall()
    _installed = _Hooks(rank, size, MPI, None if earlier is None else earlier.comm)


def _on_launcher_end(name: str) -> None:
    if _installed is not None:
        _installed.on_launcher_end(name)


def before_abort(callback: Callable[[], object]) -> None:
    """Set a callback, called once per host when a rank ends the job, before the others know.

    Args:
        callback: The callback, which must not raise.
    """
    global _before_abort
    _before_abort = callback


def uninstall() -> None:
    """Remove the hooks: this process then ends like any other."""
    global _installed, _launcher_end
    if _launcher_end is not None:
        _launcher_end.stop()
        _launcher_end = None
    if _installed is not None:
        _installed.uninstall()
        # Later hooks, such as torch.distributed's, may keep these, which must not keep the world.
        _installed.transports, _installed.comm = (), None
        _installed = None


def watch(transports: Sequence[Transport], comm: Any = None) -> None:
    """Notify peers that wait for this rank in these transports, too, if it fails.

    Args:
        transports: Transports to add.
        comm: The world's communicator, which is used to find out which ranks have died.
    """
    if _installed is not None:
        _installed.transports = [*_installed.transports, *transports]
        _installed.comm = comm if comm is not None else _installed.comm


def unwatch(transports: Sequence[Transport]) -> None:
    """Remove these transports: no rank waits in them any more."""
    if _installed is not None:
        left = [one for one in _installed.transports if one not in transports]
        _installed.transports = left


def abandon(why: str) -> None:
    """Make peers that wait for this rank in these transports, now or later, raise PeerLostError."""
    for transport in () if _installed is None else _installed.transports:
        transport.members.abandon(why)


def reason() -> str:
    """Return the reason why this process ends, as its peers report it."""
    return _PROGRAM_ENDED if _installed is None else _installed.exited()[1]


def exits_with_failure() -> bool:
    """Return whether this process ends by sys.exit() with a non-zero status."""
    return _installed is not None and _installed.exited()[0] not in (None, 0)


def end_job_after_exit(why: str) -> None:
    """End the job with the status of sys.exit().

    Args:
        why: Why the job has not ended already.
    """
    if _installed is not None:
        _installed.end_after_exit(why)


def in_forked_child() -> bool:
    """Return whether this process was forked from a rank, and so is not one itself."""
    return _is_forked


def program_ends() -> None:
    """Ignore errors of daemon threads from now on: the end of the program interrupts these."""
    global _program_has_ended
    _program_has_ended = True


def report(error: BaseException) -> None:
    """End the job with an exception that would otherwise be ignored."""
    if _installed is not None:
        _installed.on_exception(type(error), error, error.__traceback__)


def abort(why: str) -> NoReturn:
    """End the job: the launcher kills all ranks, and the job's exit code is 1.

    Raises:
        NotInitializedError: There is no world.
    """
    here = context.world()
    write(f"[horo_lite] rank {here.rank} of {here.size} ends the job: {why}\n")
    if _before_abort is not None:
        _before_abort()
    if _installed is not None:
        _installed.abort(1)
    os._exit(1)


class _Hooks:
    """The hooks sys.excepthook, threading.excepthook and sys.exit that end the job.

    `transports` are those in which other ranks may wait for this one.
    """

    def __init__(self, rank: int, size: int, MPI: Any, comm: Any) -> None:
        self.transports: Sequence[Transport] = ()
        self.MPI = MPI
        self.comm = comm
        self.name = f"rank {rank} of {size} ({socket.gethostname()}, pid {os.getpid()})"
        self.prefix = f"[rank {rank}] "
        self._is_alone = size == 1
        self._exit: tuple[FrameType, int, Any, str] | None = None
        self._previous = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook, threading.excepthook = self.on_exception, self.on_exception_in_thread
        sys.exit = self.exit

    def uninstall(self) -> None:
        """Restore the previous hooks, unless others were installed later."""
        if sys.excepthook == self.on_exception:
            sys.excepthook = self._previous[0]
        if threading.excepthook == self.on_exception_in_thread:
            threading.excepthook = self._previous[1]
        if sys.exit == self.exit:
            sys.exit = self._previous[2]

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End the job; at a prompt, after shutdown or in a forked child, call the previous hook."""
        if self._is_over():
            self._previous[0](kind, error, trace)
        else:
            self._end(error, trace, "", lambda: self._previous[0](kind, error, trace))

    def on_exception_in_thread(self, args: threading.ExceptHookArgs) -> None:
        """threading.excepthook."""
        if _program_has_ended and isinstance(args.exc_value, HoroLiteError):
            pass  # a daemon thread that the end of the program has interrupted
        elif (
            _program_has_ended
            or self._is_over()
            or args.exc_value is None
            or isinstance(args.exc_value, SystemExit)
        ):
            self._previous[1](args)
        elif _others_go_on and not self._is_alone:
            end_this_rank(args.exc_value)
        else:
            where = f" in thread {args.thread.name!r}" if args.thread else " in a thread"
            self._end(args.exc_value, args.exc_traceback, where, lambda: self._previous[1](args))

    def exit(self, status: Any = None, /) -> NoReturn:
        """sys.exit, which records its status: at exit, nothing else shows why Python ends."""
        if threading.current_thread() is threading.main_thread():
            outermost = frame = sys._getframe(1)
            while outermost.f_back is not None:
                outermost = outermost.f_back
            reason = f"sys.exit({status!r:.200}) at {frame.f_code.co_filename}:{frame.f_lineno}"
            self._exit = outermost, outermost.f_lasti, status, printable(reason)
        self._previous[2](status)

    def exited(self) -> tuple[Any, str]:
        """Return the status with which this process ends, and the reason for its peers."""
        if self._exit is not None:
            outermost, instruction, status, reason = self._exit
            # SystemExit may have been caught, but then the program has continued.
            if outermost.f_lasti == instruction:
                return status, reason
        return None, _PROGRAM_ENDED

    def _is_over(self) -> bool:
        return _installed is not self or _is_forked or hasattr(sys, "ps1")

    def _end(
        self,
        error: BaseException,
        trace: TracebackType | None,
        where: str,
        previous: Callable[[], object],
    ) -> None:
        first = self._is_first()
        try:
            usual = self._previous[:2] == (sys.__excepthook__, threading.__excepthook__)
            if usual:
                self._report(error, trace, where, first)
            else:
                write(f"[horo_lite] {self.name} ends the job{where}:\n")
                previous()
                write("")
            for transport in self.transports:
                transport.members.abandon(in_one_line(error))
        finally:
            if not first:
                self._leave_it_to_the_first()
            self.abort(1)

    def on_launcher_end(self, name: str) -> NoReturn:
        """End this rank; MPI may wait for the launcher, and is not called."""
        self._say(f"ends, since its launcher ({name}) has ended")
        os._exit(1)

    def end_after_exit(self, why: str) -> None:
        status, reason = self.exited()
        self._say(f"ends the job: {reason}; {why}")
        self.abort(status if isinstance(status, int) else 1)

    def _say(self, text: str) -> None:
        """Write why this rank ends, unless another one reports the end of the job."""
        if self._is_first():
            write(f"[horo_lite] {self.name} {text}\n")
        else:
            self._leave_it_to_the_first()

    def _is_first(self) -> bool:
        """Return whether this rank is the one that reports the end of the job."""
        first = not self.transports or self.transports[0].members.claim_report()
        if first and _before_abort is not None:
            _before_abort()  # before the other ranks do anything else
        return first

    def _leave_it_to_the_first(self) -> None:
        """Wait until the rank that reports ends the job: an earlier abort would cut its report."""
        until = time.monotonic() + _REPORT_S
        while self.transports[0].members.peer_reports() and time.monotonic() < until:
            time.sleep(0.01)
        # Two simultaneous aborts have been seen to crash Open MPI's launcher.
        if self.MPI is not None:
            time.sleep(1.0)

    def abort(self, status: int) -> None:
        """Have the launcher kill all ranks, if possible; otherwise end this one."""
        if _launcher_end is not None and _launcher_end.has_come():
            os._exit(status)  # nobody kills the ranks: MPI would only print about the abort
        elif self.MPI is None and not self.transports and launcher.hydra() is not None:
            launcher.abort_hydra(status)
        elif self.MPI is None or self._is_alone or self._is_last():
            os._exit(status)
        elif launcher.is_fault_tolerant(os.environ):
            if self._may_call_mpi():
                from horo_lite.transports.mpi.start_barrier import StartBarrier

                # Here, an abort ends only this process, and MPI does not detect its end.
                StartBarrier.end_all("it ends the job", timeout_s=0.5)
            # If others have died, the launcher treats an abort as a success.
            os._exit(status)
        else:
            self.MPI.COMM_WORLD.Abort(status)
            # MPICH's Abort returns, and the launcher kills this process, if it can reach it: a host
            # that is disconnected from it would otherwise wait for it in MPI_Finalize forever.
            time.sleep(_KILLED_WITHIN_S)
            os._exit(status)

    def _may_call_mpi(self) -> bool:
        everywhere = bool(self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE)
        return everywhere or threading.current_thread() is threading.main_thread()

    def _report(
        self, error: BaseException, trace: TracebackType | None, where: str, first: bool
    ) -> None:
        package = str(Path(__file__).parents[1])
        frames = [at for at in traceback.extract_tb(trace) if package not in at.filename]
        program = [at for at in frames if not any(part in at.filename for part in _LIBRARIES)]
        last = (program or frames)[-1:]
        at = "".join(f" (at {at.filename}:{at.lineno}, {at.name})" for at in last)
        if isinstance(error, PeerLostError) and not first:
            pass  # the cause is another rank, whose report should not be buried under this one
        elif isinstance(error, _ON_EVERY_RANK) and not first:
            write(f"[horo_lite] {self.name}: {type(error).__name__} as well{at}\n")
        elif isinstance(error, (PeerLostError, StallError, KeyboardInterrupt)) or not frames:
            write(f"[horo_lite] {self.name}: {in_one_line(error)}{at}\n")
        else:
            self.write_traceback(f"ends the job with an exception{where}", error, trace)

    def write_traceback(self, what: str, error: BaseException, trace: TracebackType | None) -> None:
        lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
        text = "".join(f"{self.prefix}{line}\n" for line in lines)
        write(f"[horo_lite] {self.name} {what}:\n{text}")

    def report_exit(self, reason: str) -> None:
        write(f"[horo_lite] {self.name} ends the job before init(): {reason}\n")

    def _is_last(self) -> bool:
        """Return whether all other ranks have died, according to Open MPI's fault tolerance."""
        comm = self.comm
        if comm is None or not launcher.is_fault_tolerant(os.environ):
            return False
        until = time.monotonic() + 0.5  # detecting a death takes some time
        while comm.Get_failed().Get_size() < comm.size - 1 and time.monotonic() < until:
            with contextlib.suppress(self.MPI.Exception):
                comm.Iprobe()  # MPI makes progress only in calls
            time.sleep(1e-3)
        return bool(comm.Get_failed().Get_size() == comm.size - 1)


@contextlib.contextmanager
def others_go_on() -> Iterator[None]:
    """Let the other ranks continue without this one if any of its threads fails in the block."""
    global _others_go_on
    _others_go_on = True
    try:
        yield
    finally:
        _others_go_on = False


def end_this_rank(error: BaseException) -> NoReturn:
    """Print the traceback and end this process at once; ranks that survive it continue."""
    assert _installed is not None
    trace, package = error.__traceback__, str(Path(__file__).parents[1])
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(package):
        trace = trace.tb_next
    what = "ends with an exception, and the others continue"
    _installed.write_traceback(what, error, trace)
    os.kill(os.getpid(), signal.SIGKILL)
    raise error


def open_standard_files() -> None:
    """Open stdin, stdout and stderr, if they are closed, so that no other file gets their numbers.

    If a daemon has closed stderr, the next file that is opened has its number: in one case this was
    a rank's pipe for messages, which then never arrived.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def mark_end() -> None:
    """Create the file HORO_LITE_END, if the variable is set.

    It is for launchers whose exit code does not show whether any rank has completed.
    """
    path = os.environ.get("HORO_LITE_END")
    if path and not _is_forked:
        with contextlib.suppress(OSError):  # another rank has created it
            os.close(files.create(Path(path)))


def guard_start() -> None:
    """Until `init()`, end the job if this rank fails and Hydra would not end it.

    That launcher, of MPICH and Intel MPI, ignores a rank's failure before MPI_Init, in which the
    other ranks then wait forever. Does nothing under other launchers.
    """
    launch = launcher.detect(os.environ)
    if (
        launch
        and launch.rank is not None
        and (launch.size or 0) > 1
        and launcher.hydra() is not None
    ):
        _install_hooks(launch.rank, launch.size or 0, None)
        atexit.register(_at_exit_without_init)


def _at_exit_without_init() -> None:
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if _is_forked or _installed is None or (MPI is not None and MPI.Is_initialized()):
        return  # forked, alone or done; or MPI, whoever initialised it, handles this rank's end
    status, reason = _installed.exited()
    if status not in (None, 0):
        _installed.report_exit(reason)
        _installed.abort(status if isinstance(status, int) else 1)


def write(text: str) -> None:
    """Write to stderr without interleaving, and wait until the reader has received it.

    An abort may overtake text that is still in the pipe, which the launcher may then never print.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    data = text.encode(errors="backslashreplace")
    until = time.monotonic() + 0.5
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
        while stat.S_ISFIFO(os.fstat(2).st_mode) and time.monotonic() < until:
            if not any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))):
                break
            time.sleep(0.001)


def _in_child() -> None:
    """Remove the hooks in a forked child, whose end must not end the job."""
    global _is_forked
    if not context.is_initialized():
        return
    _is_forked = True
    if _installed is not None:
        _installed.uninstall()


os.register_at_fork(after_in_child=_in_child)
