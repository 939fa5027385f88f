"""The communication streams of a rank's GPU.

Blocking calls and asynchronous ones, which the progress thread queues, each have a stream and a
communicator. An operation is ordered in the caller's stream at the point of its submission, however
late it is matched; ordering it later could create a cyclic wait over several ranks.
"""

from __future__ import annotations

from horo_lite import _native
from horo_lite.errors import DeviceError
from horo_lite.transports.agreement import allgather_texts, on_ranks
from horo_lite.transports.gpu import GpuTransport
from horo_lite.transports.interface import Transport
from horo_lite.transports.nccl import connect
from horo_lite.transports.watchdog import Watchdog

# The state of a rank's GPU, for the other ranks.
_NOT_CONNECTED, _CONNECTED, _FAILED = range(3)


class CommunicationStream:
    """A stream of one rank's GPU for a group's communication, and the transport that uses it."""

    def __init__(self, host: Transport, index: int, allowed: bool) -> None:
        self.index = index
        self.queue = _native.DeviceQueue(index)
        self.host = host
        self.watchdog: Watchdog | None = None
        self._allowed = allowed
        self._transport: GpuTransport | None = None

    @property
    def found(self) -> GpuTransport | None:
        """The transport; None before the first call of `transport`."""
        return self._transport

    def transport(self) -> GpuTransport:
        """Return the transport. Collective at the first call, and at the first after `close`."""
        found = self._transport  # other threads may close it
        if found is None:
            self._transport = found = connect(self.host, self.queue, self._allowed)
            if self.watchdog is not None and found.queued is not None:
                self.watchdog.start()
        return found

    def transport_of_all(self) -> GpuTransport:
        """Return `transport`, even if ranks have closed theirs at other times; always collective.

        Raises:
            DeviceError: A rank's GPU has failed in an earlier operation, which was not reported to
                all programs yet; raised on every rank.
        """
        label = "arrays on a GPU"
        found = self._transport
        failure = "" if found is None else found.failure()
        state = _FAILED if failure else _CONNECTED if found is not None else _NOT_CONNECTED
        states = [header.count for header in self.host.agree(0, state, label=label)]
        if _FAILED in states:
            texts = allgather_texts(self.host, failure)
            if found is not None:
                found.peer_failed = True
            raise DeviceError(on_ranks(self.host.ranks, texts))
        if found is None or _NOT_CONNECTED in states:
            self.fail("the ranks reconnect their GPUs")
            self.close()
            found = self.transport()
            self.host.agree(0, label=label)  # operations through the host begin with agree()
        return found

    def fail(self, reason: str) -> None:
        """Abort operations that wait on the GPU. For any thread."""
        found = self._transport
        if found is not None:
            found.fail(reason)

    def failure(self) -> str:
        """Return NCCL's error, or the reason passed to `fail`. For any thread."""
        found = self._transport
        return "" if found is None else found.failure()

    def is_idle(self) -> bool:
        """Return whether nothing that was queued is left to do, or it cannot be done any more."""
        try:
            return bool(self.failure()) or self.queue.is_idle()
        except DeviceError:  # the process is losing its GPU
            return True

    @property
    def peer_failed(self) -> bool:
        """Whether another rank's GPU is known to have failed, and this was not raised yet."""
        found = self._transport
        return found is not None and found.peer_failed

    def close(self) -> None:
        """Close the transport, and reconnect at the next use.

        Not whenever it is deleted, which may be in any thread, since errors refer to frames that
        refer to it: closing waits for the GPU, and that for what the same thread may have to abort.
        """
        found, self._transport = self._transport, None  # other threads may use it
        if found is not None:
            found.close()
