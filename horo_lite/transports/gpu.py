"""The common interface of transports for tensors on a GPU."""

from __future__ import annotations

from horo_lite.transports.interface import Header, Transport


class GpuTransport(Transport):
    """A transport for tensors on a GPU, on top of one for the host's memory.

    Attributes:
        peer_failed: Whether another rank's GPU is known to have failed, so that all ranks are about
            to raise that error.
    """

    peer_failed = False

    def __init__(self, host: Transport) -> None:
        self._host = host
        self.members = host.members
        self.rank = host.rank
        self.size = host.size
        self.ranks = host.ranks
        self.here = host.here
        self.stall_detector = host.stall_detector

    @property
    def host(self) -> Transport:
        return self._host

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        return self._host.agree(digest, count, weight, label=label)

    def fail(self, reason: str) -> None:
        """Abort operations that wait on the GPU. For any thread."""

    def failure(self) -> str:
        """Return the error of the GPU's part, or the reason passed to `fail`. For any thread."""
        return ""
