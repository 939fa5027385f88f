"""Transports between ranks: one complete interface, one file or folder per implementation."""

from horo_lite.transports.interface import Header, QueuedReductions, Reduction, Transport
from horo_lite.transports.links import Links, connect
from horo_lite.transports.mailbox import Fetch, Mailbox

__all__ = [
    "Fetch",
    "Header",
    "Links",
    "Mailbox",
    "QueuedReductions",
    "Reduction",
    "Transport",
    "connect",
]
