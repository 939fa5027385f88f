"""The control channel: short messages to all peers, for which nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from horo_lite.transports.hosts.carrier import Channel

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
    """Short messages between all ranks, over a channel of their own."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._peers = [r for r in range(channel.size) if r != channel.rank]

    def send(self, text: bytes | Sequence[bytes], tag: Tag) -> None:
        """Send all peers this; or each the text at its place."""
        if isinstance(text, bytes):
            self.channel.send(dict.fromkeys(self._peers, text), tag)
        else:
            self.channel.send({peer: text[peer] for peer in self._peers}, tag)

    def receive(self) -> list[tuple[int, Tag, bytes]]:
        """Return what has arrived: peer, tag, text."""
        return [(peer, Tag(tag), text) for peer, tag, text in self.channel.receive()]
