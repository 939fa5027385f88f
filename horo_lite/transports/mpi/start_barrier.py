"""A barrier at the start of a second init(), which a rank whose program has ended does not hang."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from horo_lite.errors import PeerLostError
from horo_lite.transports.mpi.control import MESSAGE_BYTES, Tag, fitting

if TYPE_CHECKING:
    from mpi4py import MPI

_kept: list[Any] = []
"""Requests that may be under way until MPI ends, and their memory."""


class StartBarrier:
    """Where the ranks of a communicator wait for each other in init() after a shutdown().

    MPI's own collective operations would wait for ever for a rank whose program has ended, and
    which waits for the others in MPI_Finalize.
    """

    made: ClassVar[list[StartBarrier]] = []

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self._pid = os.getpid()
        self._arrival: Any = None  # kept when init() is interrupted, and called again
        StartBarrier.made.append(self)

    @staticmethod
    def of(comm: MPI.Comm) -> StartBarrier | None:
        """Return the one that the same ranks have made before; all of them find it, or none."""
        from mpi4py import MPI

        alike = (MPI.IDENT, MPI.CONGRUENT)
        made = (one for one in StartBarrier.made if MPI.Comm.Compare(one._comm, comm) in alike)
        return next(made, None)

    def wait(self) -> None:
        """Return when all ranks are here. PeerLostError: one has said that it never will be."""
        status, pause_s = self._mpi.Status(), 20e-6
        if self._arrival is None:
            self._arrival = self._comm.Ibarrier()
        while not self._arrival.Test():
            left = self._comm.Iprobe(self._mpi.ANY_SOURCE, Tag.LEFT, status)
            if left and not self._arrival.Test():
                peer = status.Get_source()
                reason = np.empty(MESSAGE_BYTES, np.uint8)
                self._comm.Recv([reason, self._mpi.BYTE], peer, Tag.LEFT, status)
                said = reason[: status.Get_count(self._mpi.BYTE)].tobytes().decode()
                raise PeerLostError(
                    f"rank {peer} has ended ({said}) while rank {self._comm.rank} waited for it in "
                    "init(): every rank calls init() again after shutdown(), or none does"
                )
            time.sleep(pause_s)
            pause_s = min(1e-3, 1.5 * pause_s)
        self._arrival = None

    @staticmethod
    def end_all(reason: str, timeout_s: float) -> None:
        """Call `end` of all that were made, and wait at most so long until MPI has sent it."""
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
        """Name the ranks that have said that they end, by their numbers when the job began."""
        names = set()
        for barrier in StartBarrier.made:
            comm = barrier._comm
            for peer in range(comm.size):
                with suppress(barrier._mpi.Exception):  # it has died
                    if peer != comm.rank and comm.Iprobe(peer, Tag.LEFT):
                        names.add(f"rank {peer}")
        return names

    def end(self, reason: str) -> None:
        """Make peers that wait for this rank, now or later, raise PeerLostError: it ends."""
        if os.getpid() != self._pid or self._mpi.Is_finalized():
            return
        data = np.frombuffer(fitting(reason), np.uint8)
        with suppress(self._mpi.Exception):  # some are dead
            for peer in range(self._comm.size):
                if peer != self._comm.rank:
                    request = self._comm.Isend([data, self._mpi.BYTE], peer, Tag.LEFT)
                    _kept.append((request, data))
