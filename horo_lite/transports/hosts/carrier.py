"""The interface of carriers of bytes between the ranks of several hosts.

Requests of an operation that ended early (an interrupt, a peer's death) stay active, and the
library may write into their memory until it has ended: MPI until it is finalized, gloo until its
connections are closed. So a carrier is only given buffers of its own, which live as long as the
requests. Reductions and broadcasts go through the host's shared memory (four windows); all else is
copied through windows (`hosts/transport.py`).
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native

__all__ = ["Carrier", "Channel", "Done", "Message", "memory_at"]

Done: TypeAlias = Callable[[], bool]
"""Return whether an operation is complete. Never waits; bytes may move only in these calls."""

Message: TypeAlias = "tuple[int, int, NDArray[np.uint8]]"
"""Peer, tag, memory. Messages of a peer with the same tag arrive in the order of sending."""


class Channel(ABC):
    """Messages between all ranks of a carrier, separate from those of every other channel.

    No call waits. Memory may be in use until the operation that it was passed to is complete.
    """

    rank: int
    size: int
    largest_tag: int

    @abstractmethod
    def start(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        """Begin to receive and send messages, and count the bytes to send (`hvd.stats()`).

        Both sides know their sizes; tags are from 0 on.
        """

    @abstractmethod
    def send(self, texts: Mapping[int, bytes], tag: int) -> None:
        """Send each of these peers a short message, of at most 4 KiB, which it need not expect.

        They arrive in the order of sending, regardless of their tags; tags are from 1 on.
        """

    @abstractmethod
    def receive(self) -> list[tuple[int, int, bytes]]:
        """Return the short messages that have arrived: peer, tag, text.

        Raises:
            PeerLostError: A peer has died, and no message has arrived.
        """

    def undelivered(self) -> Collection[int]:
        """Return peers that may not get all short messages if this process ended now."""
        return ()

    def ended(self) -> Collection[int]:
        """Return peers that have died or left; `receive` then returns all that they have sent."""
        return ()

    def native(self) -> _native.ControlChannel:
        """Return this channel's short messages for C++, which then receives all of them."""
        return _native.ControlChannel.calling(self)


class Carrier(ABC):
    """Carries the bytes of one transport. Its ranks make its collective calls in the same order."""

    name: str
    """The transport's name."""
    rank: int
    size: int
    least_window: ClassVar[int] = 0
    """Minimum bytes of an all-reduce's or broadcast's window, if messages cost more than usual."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        """Objects that must live as long as operations may be in flight."""

    def buffer(self, name: str, n_bytes: int) -> NDArray[np.uint8]:
        """Return the memory of that name, of at least n_bytes; no operation may still use it."""
        if name not in self.memory or self.memory[name].size < n_bytes:
            self.memory[name] = np.empty(n_bytes, np.uint8)
        memory: NDArray[np.uint8] = self.memory[name]
        return memory

    @abstractmethod
    def start(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        """Begin to receive and send messages, as a channel does. Only Python uses tag 0."""

    @abstractmethod
    def native(self) -> _native.Carrier:
        """Return this carrier for C++: for its handshakes, and for messages with tags above 0."""

    @abstractmethod
    def channel(self) -> Channel:
        """Create another channel; collective."""

    @abstractmethod
    def world_channel(self) -> Channel:
        """Create the only channel for messages between the world's ranks; collective."""

    @abstractmethod
    def close(self, in_good_order: bool) -> None:
        """Close the carrier. In good order: no operation of this rank has ended early."""


def memory_at(address: int, n_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes at that address as an array, which does not keep them alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
