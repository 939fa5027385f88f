"""The transport of messages from one rank to another, as used by `horo_lite.messages`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

__all__ = ["Fetch", "Mailbox"]


class Fetch(Protocol):
    """A transfer of a peer's bytes into this rank's memory."""

    def is_here(self) -> bool:
        """Return whether all bytes have arrived. Bytes move only in these calls."""

    def discard(self) -> None:
        """Stop writing to that memory, although the remaining bytes still arrive."""


class Mailbox(Protocol):
    """Sends and receives records and bytes. Only `wait` and `wait_beside` block."""

    def send(self, peer: int, record: bytes) -> bool:
        """Send the record; return False if there is no room for it at the moment."""

    def count(self, n_bytes: int) -> None:
        """Count the bytes of a message inside a record, if records leave the host."""

    def receive(self) -> list[bytes]:
        """Return the records that have arrived, in the order of sending for each peer."""

    def undelivered(self) -> Collection[int]:
        """Return peers that may not get all records if this process ended now."""

    def offer(self, peer: int, number: int, address: int, n_bytes: int) -> Any:
        """Offer bytes to the peer; keep the returned object until it has fetched them."""

    def location(self, offered: Any) -> Any:
        """Return the information that the peer needs to fetch the bytes."""

    def release(self, offered: Any) -> None:
        """Release bytes that the peer has fetched."""

    def fetch(self, peer: int, number: int, location: Any, address: int, n_bytes: int) -> Fetch:
        """Begin to move bytes that a peer has offered to `address`. OSError: it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Return when something may have arrived or have room, or after the time-out."""

    def wait_beside(self, timeout_s: float) -> None:
        """Do the same in a thread that may not call MPI, and later if that costs less."""

    def close(self) -> None:
        """End sending and receiving."""
