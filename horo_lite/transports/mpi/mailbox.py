"""Messages from one rank to another over MPI."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.transports.mpi.transport import MpiTransport

PIECE_BYTES = 1 << 20
"""Of a large message, what one message of MPI's holds."""
_RECORD = 1
_N_TAGS = 30_000  # all that MPI promises is 32,767
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3

_kept: list[Any] = []
"""Requests that may be under way until MPI ends, and their memory."""


class MpiMailbox:
    """How messages from one rank to another travel; see `horo_lite.transports.mailbox`.

    Over the world's own communicator, on which there are only collective operations otherwise.
    `transport`, for direct calls, counts the records: peers learn their number when it leaves.
    """

    def __init__(self, comm: MPI.Comm, transport: MpiTransport) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = comm
        self.call = transport.call
        self._transport = transport
        self._under_way: list[Any] = []
        self._pause_s = _SHORTEST_PAUSE_S

    def send(self, peer: int, record: bytes) -> bool:
        data = np.frombuffer(record, np.uint8)
        self._under_way = [sent for sent in self._under_way if not self.call(sent[0].Test)]
        request = self.call(self.comm.Isend, [data, self.mpi.BYTE], peer, _RECORD)
        self._under_way.append((request, data))
        self._transport.peers.n_records[peer] += 1
        return True

    def receive(self) -> list[bytes]:
        records: list[bytes] = self.call(self._receive)
        return records

    def _receive(self) -> list[bytes]:
        records = []
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _RECORD, status):
            data = np.empty(status.Get_count(self.mpi.BYTE), np.uint8)
            self.comm.Recv([data, self.mpi.BYTE], status.Get_source(), _RECORD)
            records.append(data.tobytes())
            self._pause_s = _SHORTEST_PAUSE_S
        return records

    def offer(self, peer: int, number: int, address: int, n_bytes: int) -> list[Any]:
        requests = []
        for at in range(0, n_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, n_bytes - at)
            piece = [self.mpi.buffer.fromaddress(address + at, size), self.mpi.BYTE]
            requests.append(self.call(self.comm.Isend, piece, peer, _tag_of(number)))
        return requests

    def location(self, offered: list[Any]) -> None:
        """Nothing: its number is enough."""

    def release(self, offered: list[Any]) -> None:
        self.call(self.mpi.Request.Waitall, offered)

    def fetch(self, peer: int, number: int, location: Any, address: int, n_bytes: int) -> MpiFetch:
        return MpiFetch(self, (peer, _tag_of(number)), address, n_bytes)

    def wait(self, timeout_s: float) -> None:
        pause = self._transport.serve or time.sleep
        pause(min(self._pause_s, timeout_s))
        self._pause_s = min(_LONGEST_PAUSE_S, 1.2 * self._pause_s)

    def wait_for_room(self, timeout_s: float) -> None:
        """There is room at any time."""

    def close(self) -> None:
        """Keep what MPI may still read; the communicator is the world's."""
        _kept.append(self._under_way)


def _tag_of(number: int) -> int:
    return _RECORD + 1 + number % _N_TAGS


class MpiFetch:
    """A large message on its way, which arrives in pieces through memory of its own."""

    def __init__(
        self, mailbox: MpiMailbox, source_and_tag: Sequence[int], address: int, n_bytes: int
    ) -> None:
        self._mailbox, self._source_and_tag = mailbox, source_and_tag
        self._address: int | None = address
        self._n_bytes = n_bytes
        self._n_begun = self._n_here = 0
        self._under_way: list[tuple[Any, NDArray[np.uint8]]] = []
        for _ in range(2):
            self._begin(np.empty(min(PIECE_BYTES, n_bytes), np.uint8))

    def _begin(self, stage: NDArray[np.uint8]) -> None:
        n_bytes = min(PIECE_BYTES, self._n_bytes - self._n_begun)
        if n_bytes > 0:
            self._n_begun += n_bytes
            mailbox = self._mailbox
            room = [stage[:n_bytes], mailbox.mpi.BYTE]
            request = mailbox.call(mailbox.comm.Irecv, room, *self._source_and_tag)
            self._under_way.append((request, stage))

    def is_here(self) -> bool:
        while self._under_way and self._mailbox.call(self._under_way[0][0].Test):
            _, stage = self._under_way.pop(0)
            n_bytes = min(PIECE_BYTES, self._n_bytes - self._n_here)
            if self._address is not None:
                ctypes.memmove(self._address + self._n_here, stage.ctypes.data, n_bytes)
            self._n_here += n_bytes
            self._begin(stage)
        return self._n_here == self._n_bytes

    def discard(self) -> None:
        self._address = None
