"""Forward packets from one interface to another, with a delay and losses.

Tc's netem does this in the kernel, if the kernel has it. `python relay.py DELAY_MS LOSS A:B …`
joins each pair of interfaces of its network namespace: what arrives at A leaves by B after the
delay, unless it is lost, and what arrives at B leaves by A immediately. It prints `ready`, and ends
when its standard input does. A packet is what the kernel passes on: up to 64 KiB of a TCP stream,
which network cards would split into frames, unless the sender is told not to (`gso_max_segs 1`).
Only IPv4 packets are lost: TCP sends them again, but a host without an answer to three ARP requests
reports that there is no route.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 0x0003
_SOL_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_BUFFER_BYTES = 1 << 26
_LARGEST = 1 << 17
_IPV4 = b"\x08\x00"
# In a packet: behind the header of virtio-net and the two MAC addresses.
_PROTOCOL = slice(10 + 12, 10 + 14)


def _interface(name: str) -> socket.socket:
    """Return a socket for an interface's packets, with what the kernel left to offloading."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)  # receives nothing until bound
    packets.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)
    packets.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    # Packets in the link's queue count as the sender's: with the default of 208 KiB a packet would
    # be lost when the queue is nearly empty.
    packets.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _BUFFER_BYTES)
    packets.setblocking(False)
    packets.bind((name, _ALL_PROTOCOLS))
    return packets


def _send(to: socket.socket, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the queue is full: the packet is lost, as on any link
        to.send(packet)


def main() -> None:
    """Relay until standard input ends."""
    delay_s, loss = float(sys.argv[1]) / 1e3, float(sys.argv[2])
    leaves_by, delayed = {}, set()
    for pair in sys.argv[3:]:
        first, second = map(_interface, pair.split(":"))
        leaves_by[first], leaves_by[second] = second, first
        delayed.add(first)
    print("ready", flush=True)
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([sys.stdin, *leaves_by], [], [], timeout_s)
        if sys.stdin in readable:
            return
        for source in readable:
            to = leaves_by[source]
            with contextlib.suppress(BlockingIOError):
                while packet := source.recv(_LARGEST):
                    if source not in delayed:
                        _send(to, packet)
                    elif packet[_PROTOCOL] != _IPV4 or random.random() >= loss:
                        waiting.append((time.monotonic() + delay_s, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, packet = waiting.popleft()
            _send(to, packet)


if __name__ == "__main__":
    main()
