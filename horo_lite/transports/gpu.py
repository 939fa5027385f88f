"""The common interface of transports for tensors on a GPU."""

from __future__ import annotations

from horo_lite.transports.interface import OverHost


class GpuTransport(OverHost):
    """A transport for tensors on a GPU, on top of one for the host's memory.

    Attributes:
        peer_failed: Whether another rank's GPU is known to have failed, so that all ranks are about
            to raise that error.
    """

    peer_failed = False

    def fail(self, reason: str) -> None:
        """Abort operations that wait on the GPU. For any thread."""

    def failure(self) -> str:
        """Return the error of the GPU's part, or the reason passed to `fail`. For any thread."""
        return ""
