"""What carries bytes between the ranks of several hosts: all that the transport over it uses."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native

if TYPE_CHECKING:
    from horo_lite.transports.mpi.executor import MainThreadExecutor

__all__ = ["Carrier", "Channel", "Done", "Message", "memory_at"]

Done: TypeAlias = Callable[[], bool]
"""Whether what was started is complete. Never waits; bytes may move only in these calls."""

Message: TypeAlias = "tuple[int, int, NDArray[np.uint8]]"
"""Peer, tag, memory. Those of one peer with one tag arrive in the order in which they were sent."""


class Channel(ABC):
    """Messages between all ranks of a carrier, which those of no other channel can be taken for.

    No call waits. Memory may be in use until what it was given for is complete.
    """

    rank: int
    size: int

    @abstractmethod
    def exchange(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        """Receive and send messages of sizes that both sides know. Tags are from 0 to 32,767."""

    @abstractmethod
    def send(self, texts: Mapping[int, bytes], tag: int) -> None:
        """Send each of these peers a short message, of at most 4 KiB, for which it need not wait.

        They arrive in the order in which they were sent, whatever their tags; tags are from 1 on.
        """

    @abstractmethod
    def receive(self) -> list[tuple[int, int, bytes]]:
        """Return the short messages that have arrived: peer, tag, text.

        Raises:
            PeerLostError: A peer has died, and nothing has arrived.
        """

    def ended(self) -> Collection[int]:
        """Return the peers that have died or left: `receive` returns all that they have sent."""
        return ()

    def is_over(self) -> bool:
        """Whether nothing can be sent any more, since this process is about to end."""
        return False

    def native(self) -> _native.ControlChannel:
        """Return the short messages of this channel for C++, which then has all of them."""
        return _native.ControlChannel.calling(self)


class Carrier(ABC):
    """Carries the bytes of one transport. All of its ranks make its collective calls in one order.

    Operations that ended early (an interrupt, a peer's death) stay under way, and what carries them
    may go on writing into their memory. So that memory is the carrier's own, and lives as long.
    """

    name: str
    """Of the transport."""
    rank: int
    size: int
    least_window: ClassVar[int] = 0
    """Bytes of a window of an all-reduce or broadcast, where messages cost more than usual."""
    executor: MainThreadExecutor | None = None
    """Makes all calls of MPI's in one thread, where it must."""
    serve: Callable[[float], bool] | None = None
    """How a direct call that waits makes the calls of other threads, where it must."""

    def __init__(self) -> None:
        self.memory: dict[str, Any] = {}
        """What must live as long as operations may be under way."""

    def buffer(self, name: str, n_bytes: int) -> NDArray[np.uint8]:
        """Return the memory of that name, at least so large; no operation uses it any more."""
        if name not in self.memory or self.memory[name].size < n_bytes:
            self.memory[name] = np.empty(n_bytes, np.uint8)
        memory: NDArray[np.uint8] = self.memory[name]
        return memory

    @abstractmethod
    def exchange(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        """As of a channel. Python uses tag 0 and nothing else does."""

    @abstractmethod
    def allgather(self, mine: NDArray[np.uint8], everyone: NDArray[np.uint8]) -> Done:
        """Leave every rank's few bytes in `everyone`, in rank order; collective."""

    def native(self) -> _native.Carrier:
        """Return this carrier for C++: for its handshakes, and for messages with tags above 0."""
        return self.called_by_native()

    def called_by_native(
        self,
        wait: Callable[[Done, Callable[[], object]], None] | None = None,
        largest_message: int | None = None,
    ) -> _native.Carrier:
        """Return what calls `exchange` and `allgather`.

        Args:
            wait: Returns when something is complete. It calls its second argument some 20 times a
                second, which raises to stop it. By default C++ waits.
            largest_message: Bytes; longer ones are sent in pieces.
        """

        def messages(of: Sequence[tuple[int, int, int, int]]) -> list[Message]:
            return [(peer, tag, memory_at(address, n)) for peer, tag, address, n in of]

        def start(
            receive: Sequence[tuple[int, int, int, int]], send: Sequence[tuple[int, int, int, int]]
        ) -> Done:
            return self.exchange(messages(receive), messages(send))

        def allgather(mine: int, n_bytes: int, everyone: int) -> Done:
            return self.allgather(
                memory_at(mine, n_bytes), memory_at(everyone, self.size * n_bytes)
            )

        return _native.Carrier.made_of(start, allgather, wait, largest_message)

    @abstractmethod
    def channel(self) -> Channel:
        """Make another channel; collective."""

    @abstractmethod
    def world_channel(self) -> Channel:
        """Make the one channel for messages between the world's ranks; collective."""

    @abstractmethod
    def close(self, in_good_order: bool) -> None:
        """Use it no more. In good order: no operation of this rank has ended early."""


def memory_at(address: int, n_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes there as an array, which does not keep them alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
