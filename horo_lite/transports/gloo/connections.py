"""TCP connections between all ranks of a world, by PyTorch's gloo.

A world has one `ProcessGroupGloo`, outside of torch.distributed's groups, whose point-to-point
messages carry everything; a channel is a range of their tags. Gloo has no way to test whether a
transfer is complete, only to wait for it, and a wait that times out closes all connections. So
threads wait: one of `Waiters` for each transfer in flight, and one for each peer (`_Stream`), which
receives all short messages (for which memory is posted in advance), and so notices immediately when
the connection ends. What the peer sent before, such as why it left, is read first.

A rank that ends waits until its peers have confirmed the messages that it sent them, within the
limits of every wait (`Messages.deliver`), and up to 10 s for what else it sent. Then it closes the
connections, by a wait of 1 ms that times out, and joins its threads, so that none is left when
Python ends.

All of these threads need the GIL briefly, some twenty times in succession for a window of an
all-reduce. A training thread that is busy in Python keeps it as long as the interpreter allows.
"""

from __future__ import annotations

import atexit
import hmac
import itertools
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite.errors import HoroLiteError, LauncherError, PeerLostError
from horo_lite.transports.peers import asked

if TYPE_CHECKING:
    from horo_lite.transports.gloo.carrier import GlooChannel

# The stall detector decides how long to wait; gloo's clock must not overflow.
_FOREVER = timedelta(days=1000)
_STREAM_TAG, _NO_TAG, _PROOF_TAG = 0, (1 << 31) - 1, (1 << 31) - 2
# Header of a short message: channel, tag, length of the text. Channel 0 is that of the streams.
_HEADER = struct.Struct("<IHH")
_PACKET_BYTES = _HEADER.size + (4 << 10)
_ROOM = 16  # packets of a peer for which receives are posted in advance
_NOTED_EVERY = 8  # packets from a peer, after which it gets an acknowledgement
_N_RECEIVED, _ASKS = 1, 2
_N_RECEIVED_TEXT = struct.Struct("<Q")
# How long a rank that ends waits until peers have learnt that it leaves, in case they are stopped.
_LINGER_S = 10.0
# How long it waits for its threads, which have nothing more to wait for.
_JOIN_S = 2.0
# The interpreter's switch interval while there are connections. With Python's default of 5 ms and a
# training thread that never releases the GIL voluntarily, almost nothing of an exchange was hidden.
_SWITCH_S = 1e-3
# How long after the end of a connection its outstanding messages are considered lost.
_LOST_S = 1.0


class GlooConnections:
    """The connections of one world.

    Args:
        store: A PyTorch store, used only by this world.
        rank: This rank.
        size: The number of ranks.
        towards: A host of the job, if one is known, "host:port": the interface that leads there is
            used.
        timeout_s: Seconds within which all ranks must be connected.
        check_living: Raises PeerLostError if a rank is known to have died.
        proof: Returns what a rank sends to another to prove that it is one; b"" if ranks have no
            secret.

    Raises:
        LauncherError: The ranks could not connect, or another process has connected.
        PeerLostError: A rank died meanwhile.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        towards: str,
        timeout_s: float,
        check_living: Callable[[], object] = lambda: None,
        proof: Callable[[int, int], bytes] = lambda sender, receiver: b"",
    ) -> None:
        self.rank = rank
        self.size = size
        self.next_channel = 1
        """The first channel number that this rank has not used yet."""
        self.kept: list[Any] = []
        """Objects that must live as long as the connections."""
        self.waiters = Waiters()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._channels: dict[int, GlooChannel | None] = {}  # None: closed
        self._early: dict[int, list[tuple[int, int, bytes]]] = {}
        self.ended: set[int] = set()
        """Peers from which nothing will arrive any more."""
        self.group = _connect(store, rank, size, towards, timeout_s, check_living, proof)
        self._is_open = True
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _SWITCH_S))
        self._own_switch_s = sys.getswitchinterval()
        self._streams = {peer: _Stream(self, peer) for peer in range(size) if peer != rank}
        atexit.register(self.close)

    def post(self, peer: int, tag: int, memory: NDArray[np.uint8], *, receive: bool) -> Any:
        """Begin to receive or send; return gloo's work. RuntimeError: the connection has ended."""
        import torch

        begin = self.group.recv if receive else self.group.send
        return begin([torch.from_numpy(memory)], peer, tag)

    def send(self, peer: int, channel: int, tag: int, text: bytes) -> int:
        """Send a short message, and return its number; drop it if the connection has ended."""
        return self._streams[peer].send(channel, tag, text)

    def has_received(self, peer: int, number: int) -> bool:
        """Return whether the peer has the short message of that number; if not, ask it."""
        return self._streams[peer].has_received(number)

    def add(self, channel: GlooChannel) -> None:
        """Deliver that channel's messages to it from now on."""
        with self._lock:
            self.next_channel = max(self.next_channel, channel.number + 1)
            self._channels[channel.number] = channel
            for early in self._early.pop(channel.number, ()):
                channel.deliver(*early)

    def remove(self, channel: GlooChannel) -> None:
        """Drop that channel's messages from now on."""
        with self._lock:
            self._channels[channel.number] = None

    def deliver(self, peer: int, number: int, tag: int, text: bytes) -> None:
        """Deliver a short message to its channel, or keep it until the channel is created."""
        with self._lock:
            if number not in self._channels:
                self._early.setdefault(number, []).append((peer, tag, text))
            elif (channel := self._channels[number]) is not None:
                channel.deliver(peer, tag, text)

    def close(self) -> None:
        """Close them when all sent messages have arrived, or after a while. For one thread."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        atexit.unregister(self.close)
        until = time.monotonic() + _LINGER_S
        for stream in self._streams.values():
            stream.ask()
        for stream in self._streams.values():
            stream.wait_until_received(until)
        for peer in self._streams:
            # A wait that times out makes gloo close all connections.
            with suppress(RuntimeError):
                work = self.post(peer, _NO_TAG, np.empty(1, np.uint8), receive=True)
                work.wait(timedelta(milliseconds=1))
        self.waiters.close()
        for stream in self._streams.values():
            stream.thread.join(_JOIN_S)
        if sys.getswitchinterval() == self._own_switch_s:  # not changed since
            sys.setswitchinterval(self._switch_s)
        self._channels.clear()


def _connect(
    store: Any,
    rank: int,
    size: int,
    towards: str,
    timeout_s: float,
    check_living: Callable[[], object],
    proof: Callable[[int, int], bytes],
) -> Any:
    """Return the ranks' ProcessGroupGloo."""
    try:
        import torch.distributed as distributed

        gloo: Any = distributed.ProcessGroupGloo
    except (ImportError, AttributeError) as error:
        raise LauncherError(
            "the ranks run on several hosts, were not started by MPI, and this PyTorch has no gloo "
            f"to connect them ({error}): pip install torch, or start the job with mpiexec"
        ) from error
    until = time.monotonic() + timeout_s + 10

    def connect() -> Any:
        options = gloo._Options()
        options._devices = [_device(gloo, towards)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # for collective operations, which are not used
        group = gloo(store, rank, size, options)
        _verify_peers(group, rank, size, options._timeout, proof)
        return group

    def look() -> None:
        check_living()
        if time.monotonic() > until:
            raise TimeoutError(f"not connected after {timeout_s:.0f} s")

    try:
        return asked(connect, look)
    except HoroLiteError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise LauncherError(
            f"rank {rank} of {size} on {socket.gethostname()} could not connect to the other "
            f"hosts' ranks ({why}): can they reach each other at any port, over the interface "
            "of the hostname or MASTER_ADDR? Set GLOO_SOCKET_IFNAME to another one, such as "
            "eth0, or start the job with mpiexec"
        ) from error


def _verify_peers(
    group: Any, rank: int, size: int, timeout: timedelta, proof: Callable[[int, int], bytes]
) -> None:
    """Raise LauncherError if a connection leads to a process that is not a rank of this world.

    Gloo accepts whoever connects to a rank's port and guesses a small number.
    """
    import torch

    if not proof(rank, rank):
        return
    peers = [peer for peer in range(size) if peer != rank]
    mine = [torch.frombuffer(bytearray(proof(rank, peer)), dtype=torch.uint8) for peer in peers]
    theirs = [torch.zeros_like(one) for one in mine]
    works = [
        post([memory], peer, _PROOF_TAG)
        for post, memories in ((group.recv, theirs), (group.send, mine))
        for peer, memory in zip(peers, memories, strict=True)
    ]
    for work in works:
        work.wait(timeout)
    for peer, found in zip(peers, theirs, strict=True):
        if not hmac.compare_digest(found.numpy().tobytes(), proof(peer, rank)):
            raise LauncherError(
                f"a process that is not rank {peer} has connected to rank {rank} on "
                f"{socket.gethostname()} as that rank: another user of the network or of this host "
                "interferes with the job. Use a network that only trusted people can reach"
            )


def _device(gloo: Any, towards: str) -> Any:
    """Return the network interface that gloo uses.

    As in PyTorch, GLOO_SOCKET_IFNAME takes precedence. By default, PyTorch uses the interface to
    which the hostname resolves, on Debian the loopback; so this returns the one that leads to rank
    0's host, unless that is the loopback, too.
    """
    names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    if names[0]:
        return gloo.create_device(interface=names[0])
    host, _, port = towards.rpartition(":")
    with suppress(OSError, ValueError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
        if not own.startswith("127.") and own != "::1":
            return gloo.create_device(hostname=own)
    return gloo.create_default_device()


class Transfer:
    """Messages in flight. A call returns whether all of them have been sent and received.

    Args:
        peers_and_works: The peer and gloo's work of each message.
        failed: The peer of a message that could not even be posted; -1 for none.
    """

    def __init__(self, peers_and_works: Sequence[tuple[int, Any]], failed: int = -1) -> None:
        self._works = peers_and_works
        self._is_done = not peers_and_works and failed < 0
        self._failed = failed
        self._failed_at = time.monotonic()

    def wait(self) -> None:
        """Return when nothing is in flight any more.

        Not earlier, even if a connection has ended: if a work is dropped while its message arrives,
        gloo receives neither the rest of it nor anything else from that peer.
        """
        for peer, work in self._works:
            try:
                work.wait(_FOREVER)
            except RuntimeError:
                self._failed_at, self._failed = time.monotonic(), peer
        self._works = ()
        self._is_done = self._failed < 0

    def __call__(self) -> bool:
        # If anything else reports why the connection has ended, that report has more information.
        if self._failed >= 0 and time.monotonic() > self._failed_at + _LOST_S:
            raise PeerLostError(f"the connection to rank {self._failed} has ended")
        return self._is_done


class Waiters:
    """Threads that wait for transfers: as many as there are transfers in flight at a time."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a signal handler may begin a transfer in the middle of it
        self._n_idle = 0
        self._threads: list[threading.Thread] = []

    def add(self, transfer: Transfer) -> None:
        """Let a thread wait for this transfer."""
        with self._lock:
            if self._n_idle > 0:
                self._n_idle -= 1
            else:
                thread = threading.Thread(target=self._run, name="horo_lite gloo", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(transfer)

    def _run(self) -> None:
        while (transfer := self._queue.get()) is not None:
            transfer.wait()
            with self._lock:
                self._n_idle += 1

    def close(self) -> None:
        """End the threads, once nothing is in flight any more."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)


class _Stream:
    """All short messages to and from one peer.

    A packet is sent by the thread that posts its message, and kept until the peer has acknowledged
    it: only this shows, without a wait, that gloo no longer needs it.
    """

    def __init__(self, connections: GlooConnections, peer: int) -> None:
        self._connections = connections
        self._peer = peer
        self._lock = threading.RLock()  # a signal handler may send in the middle of it
        self._sent: deque[Any] = deque()  # not acknowledged by the peer yet
        # Acknowledged last: in a signal handler, packets are kept in another order than posted.
        self._recent: deque[Any] = deque(maxlen=16)
        self._n_reported = 0
        self._asked = 0
        self.thread = threading.Thread(target=self._run, name=f"horo_lite {peer}", daemon=True)
        self.thread.start()

    def send(self, channel: int, tag: int, text: bytes) -> int:
        packet = np.frombuffer(bytearray(_HEADER.pack(channel, tag, len(text)) + text), np.uint8)
        with self._lock:
            with suppress(RuntimeError):  # it has ended, which a wait for it will detect
                work = self._connections.post(self._peer, _STREAM_TAG, packet, receive=False)
                self._sent.append(work)
            return self._n_reported + len(self._sent)

    def has_received(self, number: int) -> bool:
        if self._n_reported < number and self._asked < number:
            self.ask()
        return self._n_reported >= number

    def ask(self) -> None:
        """Make the peer acknowledge immediately what it has received up to this message."""
        self._asked = self.send(0, _ASKS, b"")

    def wait_until_received(self, until: float) -> None:
        """Return when the peer has acknowledged what it was asked for or ended, or at time `until`.

        What is sent meanwhile acknowledges the peer's messages, and nobody acknowledges that.
        """
        while self._n_reported < self._asked and self._peer not in self._connections.ended:
            if time.monotonic() > until:
                return
            time.sleep(1e-3)

    def _expect(self, room: NDArray[np.uint8]) -> Any:
        return self._connections.post(self._peer, _STREAM_TAG, room, receive=True)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the connection has ended
            rooms = np.zeros((_ROOM, _PACKET_BYTES), np.uint8)
            expected = deque((room, self._expect(room)) for room in rooms)
            for n in itertools.count(1):
                room, work = expected.popleft()
                work.wait(_FOREVER)
                channel, tag, length = _HEADER.unpack_from(room.data)
                text = room[_HEADER.size : _HEADER.size + length].tobytes()
                expected.append((room, self._expect(room)))
                if channel:
                    self._connections.deliver(self._peer, channel, tag, text)
                elif tag == _N_RECEIVED:
                    self._forget(*_N_RECEIVED_TEXT.unpack(text))
                if n % _NOTED_EVERY == 0 or (channel, tag) == (0, _ASKS):
                    self.send(0, _N_RECEIVED, _N_RECEIVED_TEXT.pack(n))
        self._connections.ended.add(self._peer)

    def _forget(self, n_received: int) -> None:
        with self._lock:
            while self._n_reported < n_received:
                self._recent.append(self._sent.popleft())
                self._n_reported += 1
