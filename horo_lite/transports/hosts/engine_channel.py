"""How the engines of several hosts exchange what was submitted: see Channel in the C++ engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from horo_lite import _native
from horo_lite.transports.hosts.control import ControlChannel, Tag

if TYPE_CHECKING:
    from horo_lite.transports.hosts.transport import HostsTransport


class EngineChannel:
    """What an engine calls, on its own thread, over a transport of its own.

    A rank that enters a round wakes all others, so that engines need not exchange all the time.
    """

    _PAUSE_S = 5e-3  # nothing wakes a thread: an engine with nothing to do polls this often

    def __init__(self, transport: HostsTransport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._executor = transport.executor
        # How a thread that waits lets the engine go on; None where the engine needs nobody.
        self.serve = None if self._executor is None else self._executor.serve
        self._wake_ups = ControlChannel(transport.carrier.channel())
        self._round = 0
        self._is_behind = False  # a peer has entered a round that this rank has not
        self._woken = threading.Event()

    def exchange(self, mine: bytes, label: str) -> list[bytes]:
        """Enter the next round: return every rank's bytes, in rank order."""
        number = self._round.to_bytes(8, "little")
        self._wake_ups.send(number, Tag.WAKE_UP)
        self._round += 1
        self._is_behind = False
        headers = self._transport.agree(0, count=len(mine), label=label)
        received = [np.empty(header.count, np.uint8) for header in headers]
        received[self.rank] = np.frombuffer(mine, np.uint8)
        tensors = [_native.Tensors([array], writable=False) for array in received]
        self._transport.allgather(tensors[self.rank], tensors)
        return [array.tobytes() for array in received]

    def peer_is_ahead(self) -> bool:
        """Whether some peer has entered the next round."""
        for _, _, number in self._wake_ups.receive():
            # Wake-ups for rounds that this rank has entered by itself arrive late.
            self._is_behind = self._is_behind or int.from_bytes(number, "little") >= self._round
        return self._is_behind

    def wait(self, timeout_s: float) -> None:
        """Return when a peer is ahead, after `wake` or `stop`, or when the time is over."""
        until = time.monotonic() + timeout_s
        pause_s = 50e-6
        while not self._woken.wait(pause_s) and time.monotonic() < until:
            if self.peer_is_ahead():
                return
            pause_s = min(self._PAUSE_S, pause_s * 1.5)
        self._woken.clear()

    def wake(self) -> None:
        """End `wait`. For any thread."""
        self._woken.set()

    def stop(self) -> None:
        """End `wait`, and every call that another thread was to make. For any thread."""
        self._woken.set()
        if self._executor is not None:
            self._executor.close()

    def check(self, rank: int, name: str) -> None:
        """Raise PeerLostError if that rank, needed for `name`, has left, or any died or gave up."""
        self._transport.check_peer(rank, name)

    def abandon(self, reason: str) -> None:
        """Make peers that wait for this rank raise PeerLostError."""
        self._transport.abandon(reason)
