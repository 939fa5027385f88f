"""PyTorch's gloo as a carrier between hosts: channels over a world's connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.transports.gloo.connections import GlooConnections, Transfer
from horo_lite.transports.hosts.carrier import Carrier, Channel, Done, Message, memory_at

# Gloo's tags, of 31 bits: those of the world's channel, followed by a few for each other channel.
_WORLD_TAGS = 1 << 30
_TAGS = 1 << 4
# The tag of short messages of an `allgather`.
_GATHERED = 0


class GlooChannel(Channel):
    """Messages between some ranks of a world.

    Args:
        connections: The world's connections.
        ranks: The ranks' numbers in the world.
        number: The channel's number, the same on all of its ranks.
        is_world: This is the world's channel, for messages with any tag from 1 on.
    """

    def __init__(
        self,
        connections: GlooConnections,
        ranks: Sequence[int],
        number: int,
        *,
        is_world: bool = False,
    ) -> None:
        self.number = number
        self._is_world = is_world
        self._first_tag = 0 if is_world else _WORLD_TAGS + number * _TAGS
        self.largest_tag = (_WORLD_TAGS if is_world else _TAGS) - 1
        self.rank = ranks.index(connections.rank)
        self.size = len(ranks)
        self._connections = connections
        self._ranks = ranks
        self._place = {rank: i for i, rank in enumerate(ranks)}
        self._received: deque[tuple[int, int, bytes]] = deque()
        self._gathered: list[deque[bytes]] = [deque() for _ in ranks]
        self._latest: dict[int, int] = {}  # the number of the last packet to each peer
        connections.add(self)

    def start(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        _native.count_sent(sum(memory.nbytes for _, _, memory in send))
        return self.begin(receive, send)

    def begin(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        """Do the same without counting the bytes: for C++, which has counted them."""
        works: list[tuple[int, Any]] = []
        failed = -1
        for messages, receives in ((receive, True), (send, False)):
            for place, tag, memory in messages:
                peer, gloo_tag = self._ranks[place], self._first_tag + tag
                try:
                    work = self._connections.post(peer, gloo_tag, memory, receive=receives)
                    works.append((peer, work))
                except RuntimeError:
                    failed = peer
        transfer = Transfer(works, failed)
        if self._is_world and not receive:
            return self._offered(transfer)
        if works:
            self._connections.waiters.add(transfer)
        return transfer

    def _offered(self, transfer: Transfer) -> Done:
        """Wait for a transfer only when asked, which is after the peer has received it.

        So messages that wait for their receiver, however many, do not occupy threads.
        """
        is_asked_for = False

        def done() -> bool:
            nonlocal is_asked_for
            if not is_asked_for:
                is_asked_for = True
                self._connections.waiters.add(transfer)
            return transfer()

        return done

    def send(self, texts: Mapping[int, bytes], tag: int) -> None:
        for place, text in texts.items():
            peer = self._ranks[place]
            self._latest[place] = self._connections.send(peer, self.number, tag, text)

    def undelivered(self) -> Collection[int]:
        return [
            place
            for place, number in self._latest.items()
            if not self._connections.has_received(self._ranks[place], number)
        ]

    def receive(self) -> list[tuple[int, int, bytes]]:
        received = []
        with suppress(IndexError):  # several threads may receive
            while True:
                received.append(self._received.popleft())
        return received

    def deliver(self, peer: int, tag: int, text: bytes) -> None:
        """Keep a short message until it is received. For any thread."""
        place = self._place[peer]
        if tag == _GATHERED:
            self._gathered[place].append(text)
        else:
            self._received.append((place, tag, text))

    def ended(self) -> Collection[int]:
        ended = self._connections.ended
        return [self._place[peer] for peer in tuple(ended) if peer in self._place] if ended else ()

    def allgather(self, mine: NDArray[np.uint8], everyone: NDArray[np.uint8]) -> Done:
        """Gather every rank's few bytes, in rank order; collective."""
        rows = everyone.reshape(self.size, -1)
        rows[self.rank] = mine
        peers = [place for place in range(self.size) if place != self.rank]
        self.send(dict.fromkeys(peers, mine.tobytes()), _GATHERED)
        waiting = list(peers)

        def done() -> bool:
            while waiting and self._gathered[waiting[-1]]:
                place = waiting.pop()
                rows[place] = np.frombuffer(self._gathered[place].popleft(), np.uint8)
            return not waiting

        return done

    def close(self) -> None:
        """Close the channel."""
        self._connections.remove(self)


class GlooCarrier(Carrier):
    """The channels of one transport.

    Args:
        connections: The world's connections.
        ranks: The numbers of the transport's ranks in the world.
        number: The first of N_CHANNELS channel numbers that belong to this transport only.
    """

    name = "gloo"
    N_CHANNELS: ClassVar[int] = 4
    # Each window waits some twenty times for the GIL, regardless of its size: with a training
    # thread that is busy in Python, windows of 1 MiB left twice as much of an exchange exposed.
    least_window: ClassVar[int] = 4 << 20

    def __init__(self, connections: GlooConnections, ranks: Sequence[int], number: int) -> None:
        super().__init__()
        self._connections = connections
        self._ranks = ranks
        self._end = number + self.N_CHANNELS
        self._next = number
        self._channels: list[GlooChannel] = []
        connections.next_channel = max(connections.next_channel, self._end)
        self._main = self.channel()
        self.rank, self.size = self._main.rank, self._main.size

    def start(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        return self._main.start(receive, send)

    def native(self) -> _native.Carrier:
        def messages(of: Sequence[tuple[int, int, int, int]]) -> list[Message]:
            return [(peer, tag, memory_at(address, n)) for peer, tag, address, n in of]

        def start(
            receive: Sequence[tuple[int, int, int, int]], send: Sequence[tuple[int, int, int, int]]
        ) -> Done:
            return self._main.begin(messages(receive), messages(send))

        def allgather(mine: int, n_bytes: int, everyone: int) -> Done:
            return self._main.allgather(
                memory_at(mine, n_bytes), memory_at(everyone, self.size * n_bytes)
            )

        return _native.Carrier.made_of(start, allgather)

    def channel(self) -> GlooChannel:
        return self._new_channel()

    def world_channel(self) -> GlooChannel:
        return self._new_channel(is_world=True)

    def _new_channel(self, *, is_world: bool = False) -> GlooChannel:
        number = self._next
        assert number < self._end
        self._next += 1
        channel = GlooChannel(self._connections, self._ranks, number, is_world=is_world)
        self._channels.append(channel)
        return channel

    def close(self, in_good_order: bool) -> None:
        """Close the channels; memory that may be in use lives as long as the connections."""
        if not in_good_order:
            self._connections.kept.append(self.memory)
        self.memory = {}
        for channel in self._channels:
            channel.close()
