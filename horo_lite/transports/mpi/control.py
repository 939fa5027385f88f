"""The control channel: short messages to all peers, for which nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.errors import PeerLostError

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_BYTES = 480


class Tag(IntEnum):
    """What a message of a control channel is about."""

    LEFT = 1
    GAVE_UP = 2
    WAKE_UP = 3
    STALLED = 4
    ARRIVED = 5
    ANNOUNCED = 6


def fitting(text: str) -> bytes:
    """Return as much of the text as one message holds, cut between two characters."""
    return text.encode(errors="backslashreplace")[:MESSAGE_BYTES].decode(errors="ignore").encode()


class ControlChannel:
    """Short messages between all ranks, over a communicator of their own."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self.n_sent = 0
        """To each peer."""
        self._n_received = [0] * comm.size
        self._under_way: list[Any] = []

    def send(self, text: bytes | Sequence[bytes], tag: Tag) -> None:
        """Send all peers this; or each the text at its place."""
        self._under_way = [sent for sent in self._under_way if not sent[0].Test()]
        self.n_sent += 1
        for peer in range(self._comm.size):
            if peer != self._comm.rank:
                data = np.frombuffer(text if isinstance(text, bytes) else text[peer], np.uint8)
                request = self._comm.Isend([data, self._mpi.BYTE], peer, tag)
                self._under_way.append((request, data))

    def receive(self) -> list[tuple[int, Tag, bytes]]:
        """Return what has arrived: peer, tag, text."""
        received = []
        status = self._mpi.Status()
        try:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
                received.append(self._receive(status.Get_source()))
        except self._mpi.Exception as error:  # of MPI with fault tolerance
            if not received:
                raise PeerLostError(f"a rank died ({error})") from error
        return received

    def _receive(self, peer: int) -> tuple[int, Tag, bytes]:
        status = self._mpi.Status()
        text = np.empty(MESSAGE_BYTES, np.uint8)
        self._comm.Recv([text, self._mpi.BYTE], peer, self._mpi.ANY_TAG, status)
        self._n_received[peer] += 1
        size = status.Get_count(self._mpi.BYTE)
        return peer, Tag(status.Get_tag()), text[:size].tobytes()

    def free(self, n_sent: Sequence[int]) -> None:
        """Give the communicator back; `n_sent` is how many messages each rank has sent to each.

        All are received first: else they would turn up in the next communicator, which may well be
        given the same number.
        """
        for peer, n in enumerate(n_sent):
            while peer != self._comm.rank and self._n_received[peer] < n:
                self._receive(peer)
        self._mpi.Request.Waitall([request for request, _ in self._under_way])
        self._comm.Free()
