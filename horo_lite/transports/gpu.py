"""What transports for tensors on a GPU have in common."""

from __future__ import annotations

from horo_lite.transports.interface import OverHost


class GpuTransport(OverHost):
    """A transport for tensors on a GPU, beside one for the host's memory.

    Attributes:
        peer_failed: Whether another rank's GPU is known to have failed, so that all ranks are about
            to raise that.
    """

    peer_failed = False

    def fail(self, reason: str) -> None:
        """End what waits on the GPU. For any thread."""

    def failure(self) -> str:
        """What the GPU's part has failed with, or what was given to `fail`. For any thread."""
        return ""
