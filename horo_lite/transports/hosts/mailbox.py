"""Messages from one rank to another between hosts.

Over MPI, envelopes and large messages are messages on the world's communicator, over gloo on a
channel of their own.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.errors import HoroLiteError
from horo_lite.transports.hosts.carrier import Channel, Done, memory_at

if TYPE_CHECKING:
    from horo_lite.transports.hosts.transport import HostsTransport

PIECE_BYTES = 1 << 20
"""The size of the carrier's messages into which a large message is divided."""
_RECORD = 1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
_BESIDE_S = 5e-3  # like an idle progress thread

# Each large message in flight from this process has a tag of its own, in whichever world it was
# sent: messages that were never received keep theirs.
_new_tags = itertools.count(_RECORD + 1)
_free_tags: deque[int] = deque()


class HostsMailbox:
    """Messages between ranks of several hosts; see `horo_lite.transports.mailbox`.

    `transport`, for blocking calls, counts the records: peers learn their number when it leaves.
    """

    def __init__(self, channel: Channel, transport: HostsTransport) -> None:
        self.channel = channel
        self._transport = transport
        self._pause_s = _SHORTEST_PAUSE_S

    def send(self, peer: int, record: bytes) -> bool:
        self.channel.send({peer: record}, _RECORD)
        self._transport.group.count_record(peer)
        return True

    def count(self, n_bytes: int) -> None:
        _native.count_sent(n_bytes)

    def receive(self) -> list[bytes]:
        records = [record for _, _, record in self.channel.receive()]
        if records:
            self._pause_s = _SHORTEST_PAUSE_S
        return records

    def undelivered(self) -> Collection[int]:
        return self.channel.undelivered()

    def offer(self, peer: int, number: int, address: int, n_bytes: int) -> tuple[int, Done]:
        tag = _free_tags.popleft() if _free_tags else next(_new_tags)
        if tag > self.channel.largest_tag:
            raise HoroLiteError(
                f"{self.channel.largest_tag - _RECORD} large messages of this rank are in flight, "
                "as many as the library has tags for: wait() for some of them before sending more"
            )
        pieces = [
            memory_at(address + at, min(PIECE_BYTES, n_bytes - at))
            for at in range(0, n_bytes, PIECE_BYTES)
        ]
        return tag, self.channel.start([], [(peer, tag, piece) for piece in pieces])

    def location(self, offered: tuple[int, Done]) -> int:
        return offered[0]

    def release(self, offered: tuple[int, Done]) -> None:
        tag, is_sent = offered
        while not is_sent():
            self.wait(_LONGEST_PAUSE_S)
        _free_tags.append(tag)

    def fetch(
        self, peer: int, number: int, location: Any, address: int, n_bytes: int
    ) -> HostsFetch:
        return HostsFetch(self.channel, peer, location, address, n_bytes)

    def wait(self, timeout_s: float) -> None:
        time.sleep(min(self._pause_s, timeout_s))
        self._pause_s = min(_LONGEST_PAUSE_S, 1.2 * self._pause_s)

    def wait_beside(self, timeout_s: float) -> None:
        time.sleep(min(_BESIDE_S, timeout_s))

    def close(self) -> None:
        """Do nothing: messages that are still in flight need the channel."""


class HostsFetch:
    """A large message in flight, which arrives in pieces through its own memory."""

    def __init__(self, channel: Channel, peer: int, tag: int, address: int, n_bytes: int) -> None:
        self._channel, self._peer, self._tag = channel, peer, tag
        self._address: int | None = address
        self._n_bytes = n_bytes
        self._n_begun = self._n_here = 0
        self._under_way: list[tuple[Done, NDArray[np.uint8]]] = []
        for _ in range(2):
            self._begin(np.empty(min(PIECE_BYTES, n_bytes), np.uint8))

    def _begin(self, stage: NDArray[np.uint8]) -> None:
        n_bytes = min(PIECE_BYTES, self._n_bytes - self._n_begun)
        if n_bytes > 0:
            self._n_begun += n_bytes
            done = self._channel.start([(self._peer, self._tag, stage[:n_bytes])], [])
            self._under_way.append((done, stage))

    def is_here(self) -> bool:
        while self._under_way and self._under_way[0][0]():
            _, stage = self._under_way.pop(0)
            n_bytes = min(PIECE_BYTES, self._n_bytes - self._n_here)
            if self._address is not None:
                ctypes.memmove(self._address + self._n_here, stage.ctypes.data, n_bytes)
            self._n_here += n_bytes
            self._begin(stage)
        return self._n_here == self._n_bytes

    def discard(self) -> None:
        self._address = None
