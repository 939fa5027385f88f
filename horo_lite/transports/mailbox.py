"""How messages from one rank to another travel, as `horo_lite.messages` uses it."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Fetch", "Mailbox"]


class Fetch(Protocol):
    """Bytes of a peer on their way into this rank's memory."""

    def is_here(self) -> bool:
        """Whether all of them are there. Nothing moves but in these calls."""

    def discard(self) -> None:
        """Write to that memory no more, though the bytes go on arriving."""


class Mailbox(Protocol):
    """How records and bytes get from rank to rank. Nothing here waits."""

    def send(self, peer: int, record: bytes) -> bool:
        """Send the record; False where there is no room for it at present."""

    def receive(self) -> list[bytes]:
        """Records that have arrived, those of each peer in the order in which they were sent."""

    def offer(self, peer: int, number: int, address: int, n_bytes: int) -> Any:
        """Offer those bytes to the peer; what is returned is kept until it has fetched them."""

    def location(self, offered: Any) -> Any:
        """What the peer must know to fetch them."""

    def release(self, offered: Any) -> None:
        """Release what the peer has fetched."""

    def fetch(self, peer: int, number: int, location: Any, address: int, n_bytes: int) -> Fetch:
        """Begin to move bytes that a peer has offered to `address`. OSError: it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived, or the time is over."""

    def wait_for_room(self, timeout_s: float) -> None:
        """Return when what found no room may be sent, or the time is over."""

    def close(self) -> None:
        """Nothing can be sent or received any more."""
