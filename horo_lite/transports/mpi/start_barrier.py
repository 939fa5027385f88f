"""The barrier in init(): reports late ranks, and does not wait for dead ones.

Ranks that MPI started enter it first, also where init() makes a new world after a failure. It is
notified when the program of a rank ends; MPI's own operations would wait for such a rank forever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from horo_lite.errors import PeerLostError, StallError, ranks_in_words, say
from horo_lite.processes import lives
from horo_lite.transports.peers import allgather_objects, host_key

if TYPE_CHECKING:
    from mpi4py import MPI

_REASON_BYTES = 480
# MPI moves messages only in calls, and a probe may check before it does: so check this often for
# messages that peers may have sent long ago.
_N_LOOKS = 10


class Tag(IntEnum):
    """The kind of a barrier's message."""

    LEFT = 1
    ARRIVED = 2
    GONE = 3


_kept: list[Any] = []
"""Requests that may be in flight until MPI ends, and their memory."""

_first: list[tuple[Any, Any]] = []
"""Communicators, and requests of `wait_for_first` that an interrupt has left in flight."""

_STOPPED_S = 2.0
"""A rank that has not looked for so long was itself stopped, as a suspended job is."""


class Patience:
    """One rank's wait in init(), with stall reports and a time limit.

    Args:
        rank: This rank.
        warn_s: Seconds after which the wait is reported; 0 for never.
        abort_s: Seconds after which a StallError is raised; 0 for never.
    """

    def __init__(self, rank: int, warn_s: float, abort_s: float) -> None:
        self._rank = rank
        self._next_s = warn_s
        self._abort_s = abort_s
        self._waited_s = 0.0
        self._looked = time.monotonic()
        self._pause_s = 20e-6

    def look(self, late: Callable[[bool], str]) -> None:
        """Report late ranks if a report is due. To be called several times per second.

        Args:
            late: Returns which ranks are late. Unless its argument is True, it may return "" if
                another rank reports the same.

        Raises:
            StallError: The wait has exceeded the limit.
        """
        now = time.monotonic()
        if now - self._looked < _STOPPED_S:
            self._waited_s += now - self._looked
        self._looked, waited_s = now, self._waited_s
        waited = f"{waited_s:.{1 if waited_s < 10 else 0}f} s"
        text = f"rank {self._rank} has waited {waited} in init() for"
        if 0 < self._abort_s <= waited_s:
            raise StallError(f"{text} {late(True)} (stall_abort_s is {self._abort_s:g})")
        if 0 < self._next_s <= waited_s:
            self._next_s *= 2
            if who := late(False):
                say(f"{text} {who}")

    def pause(self, late: Callable[[bool], str]) -> None:
        """Do the same, then sleep for up to a millisecond."""
        self.look(late)
        time.sleep(self._pause_s)
        self._pause_s = min(1e-3, 1.5 * self._pause_s)


def wait_for_first(
    comm: MPI.Comm, warn_s: float, abort_s: float, late: Callable[[bool], str]
) -> None:
    """Return when all ranks of the caller's communicator are in their first init().

    Args:
        comm: The communicator.
        warn_s: Seconds after which ranks that wait report it; 0 for never.
        abort_s: Seconds after which they raise StallError; 0 for never.
        late: Returns which ranks are late, which MPI cannot report; see `Patience.look`.

    Raises:
        StallError: It took longer than `abort_s`.
    """
    found = next((i for i, (of, _) in enumerate(_first) if of == comm), None)
    request = comm.Ibarrier() if found is None else _first.pop(found)[1]
    patience = Patience(comm.rank, warn_s, abort_s)
    try:
        while not request.Test():
            patience.pause(late)
    except BaseException:
        _first.append((comm, request))  # init() may be called again
        raise


class StartBarrier:
    """The barrier of a communicator's ranks in init() after a shutdown().

    MPI's own collective operations would wait forever for a rank whose program has ended, and which
    waits for the others in MPI_Finalize.
    """

    made: ClassVar[list[StartBarrier]] = []

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self._pid = os.getpid()
        self._is_here = False
        self._round = 0
        self._n_arrived = [0] * comm.size
        self._ended: dict[int, str] = {}
        """The ranks that have reported that they end, with their reasons."""
        self._gone: set[int] = set()
        """Those of them that have waited for this rank's end, and no longer receive anything."""
        everyone = allgather_objects(self._comm, (host_key(), os.getpid()))
        self._here = {r: pid for r, (host, pid) in enumerate(everyone) if host == host_key()}
        """The processes of the ranks of this host."""
        StartBarrier.made.append(self)

    @staticmethod
    def of(comm: MPI.Comm) -> StartBarrier | None:
        """Return the barrier that the same ranks have created before; all find it, or none."""
        from mpi4py import MPI

        alike = (MPI.IDENT, MPI.CONGRUENT)
        made = (one for one in StartBarrier.made if MPI.Comm.Compare(one._comm, comm) in alike)
        return next(made, None)

    def wait(self, warn_s: float, abort_s: float) -> None:
        """Return when all ranks have arrived.

        Raises:
            PeerLostError: A rank has reported that it never will, or has died on this host.
            StallError: It took longer than `abort_s`.
        """
        if not self._is_here:  # otherwise init() was interrupted, and called again
            _kept[:] = [one for one in _kept if not one[0].Test()]
            self._send(b"", Tag.ARRIVED)
            self._is_here = True
            self._round += 1
        patience = Patience(self._comm.rank, warn_s, abort_s)
        missing: list[int] = []

        def late(always: bool) -> str:
            return (
                f"{ranks_in_words(missing)}, which did not call init() again after shutdown(): "
                "every rank must, or none"
            )

        while missing := self._missing():
            self._raise_if_left()
            self._raise_if_dead(missing)
            patience.pause(late)
        self._is_here = False

    def _missing(self) -> list[int]:
        """Return the ranks that have not arrived in this round."""
        self._receive(self._mpi.ANY_SOURCE)
        rank = self._comm.rank
        return [r for r, n in enumerate(self._n_arrived) if r != rank and n < self._round]

    def _receive(self, source: int) -> None:
        """Process the messages that have arrived."""
        status = self._mpi.Status()
        text = np.empty(_REASON_BYTES, np.uint8)
        while self._comm.Iprobe(source, self._mpi.ANY_TAG, status):
            peer, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv([text, self._mpi.BYTE], peer, tag, status)
            if tag == Tag.ARRIVED:
                self._n_arrived[peer] += 1
            elif tag == Tag.GONE:
                self._gone.add(peer)
            else:
                self._ended[peer] = text[: status.Get_count(self._mpi.BYTE)].tobytes().decode()

    def _raise_if_left(self) -> None:
        self._receive(self._mpi.ANY_SOURCE)
        # A rank that has arrived may have left since. This is not an error if no rank is missing.
        if self._ended and self._missing():
            peer, why = next(iter(self._ended.items()))
            raise PeerLostError(
                f"rank {peer} has ended ({why}) while rank {self._comm.rank} waited for it in "
                "init(): every rank must call init() again after shutdown(), or none"
            )

    def _raise_if_dead(self, missing: list[int]) -> None:
        for peer in missing:
            if peer in self._here and not lives(self._here[peer]) and peer in self._missing():
                self._raise_if_left()  # its last message may have arrived meanwhile
                raise PeerLostError(
                    f"rank {peer} died (killed, out of memory, or os._exit) while rank "
                    f"{self._comm.rank} waited for it in init()"
                )

    @staticmethod
    def end_all(reason: str, timeout_s: float) -> None:
        """Call `end` of all barriers, and wait up to timeout_s until MPI has sent the messages."""
        n_kept = len(_kept)
        for barrier in StartBarrier.made:
            barrier.end(reason)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if all(request.Test() for request, _ in _kept[n_kept:]):
                break
            time.sleep(1e-3)

    @staticmethod
    def ended() -> set[str]:
        """Return the ranks that have reported that they end, as numbered when the job began."""
        return {f"rank {peer}" for one in StartBarrier.made for peer in one._ended_peers()}

    def end(self, reason: str) -> None:
        """Make peers that wait for this rank, now or later, raise PeerLostError, as it ends."""
        if self.is_usable():
            for _ in range(_N_LOOKS):
                self._ended_peers()
            self._send(_fitting(reason), Tag.LEFT, but_to=self._gone)

    def is_usable(self) -> bool:
        """Return whether this process created the barrier, and MPI has not been finalized."""
        return os.getpid() == self._pid and not self._mpi.Is_finalized()

    def all_ended(self) -> bool:
        """Return whether all other ranks have reported that they end, their last message here."""
        return len(self._ended_peers()) == self._comm.size - 1

    def going_on(self) -> list[int]:
        """Return the other ranks that have not reported that they end."""
        everyone = range(self._comm.size)
        return [r for r in everyone if r != self._comm.rank and r not in self._ended]

    def go(self) -> None:
        """Tell ranks that continue that this one no longer receives anything."""
        self._send(b"", Tag.GONE, but_to=self._ended_peers())

    def _ended_peers(self) -> Collection[int]:
        for peer in range(self._comm.size):
            with suppress(self._mpi.Exception):  # it has died
                if peer != self._comm.rank:
                    self._receive(peer)
        return self._ended.keys()

    def _send(self, text: bytes, tag: Tag, but_to: Collection[int] = ()) -> None:
        data = np.frombuffer(text, np.uint8)
        for peer in range(self._comm.size):
            if peer != self._comm.rank and peer not in but_to:
                with suppress(self._mpi.Exception):  # it is dead
                    request = self._comm.Isend([data, self._mpi.BYTE], peer, tag)
                    _kept.append((request, data))


def _fitting(text: str) -> bytes:
    """Truncate the text to the size of a message, between two characters."""
    return text.encode(errors="backslashreplace")[:_REASON_BYTES].decode(errors="ignore").encode()
