"""The ranks of a launcher's job that are all on one host: they find each other without MPI.

`MPI_Init` takes half of the time of a job's start, and on one host MPI would only be used to
exchange a few small objects (`ObjectCommunicator`). Rank and size are in the launcher's variables,
the ranks' processes are in /proc. Each rank has a board: a file in memory, without a name, which
processes of the same user open through /proc. There the rank writes its entries, which the others
read, also after it has ended: that it is in `init()`, its objects, why its `init()` has failed, why
its program ends. Each rank searches /proc once: of two ranks, the one that comes later finds the
board of the other, and writes there where its own is.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from horo_lite.errors import PeerLostError, in_one_line, ranks_in_words
from horo_lite.start import arrivals, orphans
from horo_lite.start.arrivals import Mark
from horo_lite.start.launcher import Launch, is_fault_tolerant, mark_rank, refuse_descendant
from horo_lite.transports.mpi.start_barrier import Patience
from horo_lite.transports.peers import ObjectCommunicator, lives

# Launchers that end the job, or can be asked to, when a rank fails that has not initialised MPI:
# Open MPI's after any exit code but 0 and any signal, MPICH's after a signal or `abort_hydra`.
_LAUNCHERS = ("Open MPI", "MPICH")
_LOOK_S = 0.05  # how often a rank that waits checks whether the others live
_SEARCH_S = 1.0  # how often it searches /proc
_REPORT_S = 5.0  # how long a rank that has failed is given to report that, and to end the job
# Kinds of entries.
_ARRIVED, _OBJECT, _FAILED, _ENDED = range(4)
_PAIR = struct.Struct("<II")


class NeedsMpiError(Exception):
    """MPI must connect these ranks; raised on every rank."""


def _is_proc_shared() -> bool:
    """Return whether the ranks of this host can see each other, as far as one rank can tell."""
    found = orphans.visible_launcher()
    with suppress(OSError):
        return (
            found is not None
            and arrivals.may_inspect(found[0])
            # Not of another PID namespace, and not a process that only root may inspect.
            and os.readlink("/proc/self") == str(os.getpid())
            and os.stat("/proc/self").st_uid == os.geteuid()
        )
    return False


class _Board:
    """A rank's board: one place for each rank to introduce itself, then the entries of its rank."""

    def __init__(self, file: int, pid: int, size: int) -> None:
        self._file = file
        self._size = size
        self._end = _PAIR.size * size  # of the entries that have been written, or read
        self._entry: tuple[int, Any] | None = None
        self.pid = pid

    def write(self, kind: int, value: Any) -> None:
        """Append an entry; only its own rank does."""
        data = pickle.dumps((kind, value))
        os.pwrite(self._file, _PAIR.pack(len(data), zlib.crc32(data)) + data, self._end)
        self._end += _PAIR.size + len(data)

    def entry(self) -> tuple[int, Any] | None:
        """Return the next entry, if it is complete; the same until `skip` is called."""
        if self._entry is not None:
            return self._entry
        head = os.pread(self._file, _PAIR.size, self._end)
        n_bytes, crc = _PAIR.unpack(head) if len(head) == _PAIR.size else (0, 0)
        data = os.pread(self._file, n_bytes, self._end + _PAIR.size)
        if not data or zlib.crc32(data) != crc:
            return None
        self._end += _PAIR.size + n_bytes
        self._entry = pickle.loads(data)
        return self._entry

    def skip(self) -> None:
        """Go on to the next entry."""
        self._entry = None

    def introduce(self, rank: int, pid: int, descriptor: int) -> None:
        """Show the rank of this board where that of another is."""
        os.pwrite(self._file, _PAIR.pack(pid, descriptor), _PAIR.size * rank)

    def introduced(self) -> dict[int, tuple[int, int]]:
        """Return the process and the descriptor of each rank that has introduced itself."""
        n_bytes = _PAIR.size * self._size
        places = _PAIR.iter_unpack(os.pread(self._file, n_bytes, 0).ljust(n_bytes, b"\0"))
        return {rank: (pid, number) for rank, (pid, number) in enumerate(places) if pid}


class HostRanks(ObjectCommunicator):
    """The ranks of this job, in every world of this process that MPI need not connect.

    Worlds are numbered, so that a rank whose `init()` has failed meets the others in the next.

    Args:
        rank: This process's rank.
        size: The number of ranks.
    """

    made: ClassVar[HostRanks | None] = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._pid = os.getpid()
        self._descriptor = Mark.BOARD.make()
        os.fchmod(self._descriptor, 0o600)
        self._own = _Board(self._descriptor, self._pid, size)
        self._boards: dict[int, _Board] = {}
        self._ended: dict[int, str] = {}
        """The ranks that have written that they end, with their reasons."""
        self._n_worlds = 0
        self._is_here = False  # in a world that does not exist yet
        self._missing: set[int] = set()
        self._limits = 0.0, 0.0
        self._looked = self._searched = -60.0  # when this rank has looked who is dead, and searched
        self._dead: set[int] = set()
        self._dead_before: set[int] = set()
        """Those of them that were dead when this rank looked before."""
        HostRanks.made = self

    @staticmethod
    def of_job(launch: Launch | None, environ: Mapping[str, str]) -> HostRanks | None:
        """Return the ranks of this job if MPI is not needed to connect them; None in any doubt.

        All of the following hold:
        - the variables of Open MPI's or MPICH's launcher say that all ranks are on this host;
        - /proc shows the launcher's process and its environment, and so, presumably, those of the
          other ranks; and it shows this process to these;
        - the job ends if a rank does: fault tolerance is off;
        - the program has not initialised MPI, which then ends the job.

        Raises:
            LauncherError: This process is not a rank, but only inherited a rank's variables.
        """
        if HostRanks.made is not None and HostRanks.made.is_usable():
            return HostRanks.made
        if launch is None or launch.name not in _LAUNCHERS or launch.rank is None:
            return None
        size = arrivals.n_ranks_here(environ)
        if size is None or size < 2 or size != launch.size or is_fault_tolerant(environ):
            return None
        MPI: Any = sys.modules.get("mpi4py.MPI")
        if (MPI is not None and MPI.Is_initialized()) or not _is_proc_shared():
            return None
        refuse_descendant(environ)
        made = HostRanks(launch.rank, size)
        mark_rank()
        return made

    def arrive(self, warn_s: float, abort_s: float) -> None:
        """Return when all ranks are in `init()`.

        Args:
            warn_s: Seconds after which ranks that wait report it; 0 for never.
            abort_s: Seconds after which they raise StallError; 0 for never.

        Raises:
            NeedsMpiError: A rank is in an `init()` that MPI connects.
            PeerLostError: A rank's program has ended, or a rank has died.
            StallError: A rank did not call `init()` within `abort_s`.
        """
        self._limits = warn_s, abort_s
        if not self._is_here:  # otherwise init() was interrupted, and called again
            self._n_worlds += 1
            self._own.write(_ARRIVED, self._n_worlds)
            self._is_here = True
            self._missing = set(range(self.size)) - {self.rank}
        patience = Patience(self.rank, warn_s, abort_s)

        def late(always: bool) -> str:
            if self._n_worlds == 1:
                return arrivals.late(always)
            return (
                f"{ranks_in_words(sorted(self._missing))}, which did not call init() again after "
                "shutdown(): every rank must, or none"
            )

        while self._missing:
            self._find_boards()
            for rank in list(self._missing):
                while (entry := self._entry(rank)) is not None:
                    self._boards[rank].skip()
                    if entry[0] == _ARRIVED and entry[1] >= self._n_worlds:
                        self._missing.remove(rank)
                        break
            if self._missing:
                self._check(self._missing)
                patience.pause(late)
        self._is_here = False

    def allgather(self, obj: Any, form: Any = object) -> list[Any]:
        self._own.write(_OBJECT, obj)
        return [obj if rank == self.rank else self._take(rank) for rank in range(self.size)]

    def give_up(self, error: BaseException) -> None:
        why = str(error)
        if not isinstance(error, PeerLostError):
            name = f"rank {self.rank} (pid {self._pid} on {socket.gethostname()})"
            why = f"{name} failed in init() ({in_one_line(error):.1000})"
        self._own.write(_FAILED, why)

    def cannot_share_memory(self, why: str) -> Exception:
        return NeedsMpiError(why)

    # The end of the program, as for StartBarrier.

    def is_usable(self) -> bool:
        """Return whether this process is the rank, and not a forked child."""
        return os.getpid() == self._pid

    def end(self, reason: str) -> None:
        """Make ranks that wait for this one in `init()`, now or later, raise PeerLostError."""
        self._own.write(_ENDED, reason)

    def all_ended(self) -> bool:
        """Return whether all other ranks have ended, or are about to."""
        return not self.going_on()

    def going_on(self) -> list[int]:
        """Return the other ranks that are not about to end."""
        for rank, board in self._boards.items():
            while self._entry(rank) is not None:
                board.skip()
        self._look()
        return sorted(self._boards.keys() - self._ended.keys() - self._dead)

    def go(self) -> None:
        """Do nothing: there are no messages that would have to be received."""

    # Reading the others' boards.

    def _find_boards(self) -> None:
        """Open the boards of ranks that have called `init()`.

        Of two ranks, the one that searches later finds the other and introduces itself to it.
        """
        for rank, place in self._own.introduced().items():
            self._open(rank, *place)
        began = time.monotonic()
        if began < self._searched + _SEARCH_S or len(self._boards) == self.size - 1:
            return
        by_mpi = False
        for rank, processes in arrivals.ranks_of_this_host().items():
            for _, _, pid, marks in sorted(processes, key=lambda process: process[:3]):
                if Mark.BOARD in marks:
                    self._open(rank, pid, marks[Mark.BOARD])
                by_mpi |= Mark.IN_INIT in marks
        self._searched = time.monotonic() + 20 * (time.monotonic() - began)
        if by_mpi:
            raise NeedsMpiError

    def _open(self, rank: int, pid: int, descriptor: int) -> None:
        """Open another rank's board, unless it has been."""
        if rank == self.rank or rank in self._boards or rank >= self.size:
            return
        with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
            file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
            if os.fstat(file).st_uid != os.geteuid():  # root can open it all the same
                os.close(file)
                raise PermissionError(errno.EPERM, f"rank {rank} (pid {pid}) is of another user")
            self._boards[rank] = board = _Board(file, pid, self.size)
            board.introduce(self.rank, self._pid, self._descriptor)

    def _entry(self, rank: int) -> tuple[int, Any] | None:
        """Return the next entry of another rank, if there is one, but not that it ends."""
        entry = self._boards[rank].entry() if rank in self._boards else None
        if entry is None or entry[0] != _ENDED:
            return entry
        self._ended[rank] = entry[1]
        return None

    def _take(self, rank: int) -> Any:
        """Wait for the next object of another rank and return it."""
        board = self._boards[rank]
        patience = Patience(self.rank, *self._limits)
        while (entry := self._entry(rank)) is None:
            self._check({rank})
            patience.pause(lambda _: f"rank {rank} (pid {board.pid}), which is in init(), too")
        kind, value = entry
        if kind == _ARRIVED:
            raise PeerLostError(f"rank {rank} (pid {board.pid}) has called init() again")
        board.skip()
        if kind == _OBJECT:
            return value
        until = time.monotonic() + _REPORT_S
        while self._entry(rank) is None and rank not in self._ended and time.monotonic() < until:
            time.sleep(0.01)
        raise PeerLostError(value)

    def _check(self, ranks: set[int]) -> None:
        """Raise PeerLostError if one of these ranks has ended."""
        for rank in ranks & self._ended.keys():
            raise PeerLostError(
                f"rank {rank} has ended ({self._ended[rank]}) while rank {self.rank} waited for "
                "it in init(): every rank must call init() again after shutdown(), or none"
            )
        self._look()
        for rank in ranks & self._dead_before:  # its last entries have been read since
            raise PeerLostError(
                f"rank {rank} died (killed, out of memory, or os._exit) while rank "
                f"{self.rank} waited for it in init()"
            )

    def _look(self) -> None:
        """Look which ranks are dead, at most 20 times a second."""
        if time.monotonic() > self._looked + _LOOK_S:
            self._looked, self._dead_before = time.monotonic(), self._dead
            self._dead = {rank for rank, one in self._boards.items() if not lives(one.pid)}
