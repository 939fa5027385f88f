"""Send and receive: point-to-point messages with arrays, in which no other rank takes part.

Every message has an envelope, a short record that describes it. A small (eager) message is inside
it; a large one stays with its sender until the receiver has fetched it and acknowledged that, or
said why it could not. So nothing depends on the sender's thread: envelopes arrive in the receiver's
mailbox whatever the sender does next. Mailboxes are pipes inside a host (`transports/pipes.py`),
between hosts messages of the carrier (`transports/hosts/mailbox.py`).

While receives are posted, or a mailbox is full, and no thread waits for a message, a thread of
`Messages` goes on with them (`_proceed`), so nothing else that waits needs to know of messages. A
blocked receive checks whether the peer lives, and appears in stall reports, as a collective does.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from horo_lite import arguments
from horo_lite.adapters import changed
from horo_lite.collectives.arrays import Array, Memory, gpu_of
from horo_lite.collectives.handle import Handle
from horo_lite.errors import (
    HoroLiteError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ranks_in_words,
)
from horo_lite.transports import Fetch, Mailbox, Transport

SMALL_BYTES = 3072  # with its record it must fit into PIPE_BUF, 4096 bytes: atomic writes
CHECK_S = 0.05  # how often a rank that waits checks whether the others are alive
N_EAGER_POLLS = 50  # polls without a pause

_kept: list[Messages] = []
"""Messages in flight at the end of a world: MPI may use their memory as long as it runs."""

_numbers = itertools.count()  # unique for each message of this process, in all worlds


_Key: TypeAlias = "tuple[int, int]"  # channel and tag


class _Envelope(NamedTuple):
    world: str
    source: int
    number: int
    channel: int
    tag: int
    what: str  # such as "float32[3, 4]"
    n_bytes: int
    inside: bytes | None  # the contents of a small message
    location: Any  # where a large message can be fetched


class _Acknowledgement(NamedTuple):
    world: str
    source: int
    number: int
    error: str  # "" if there was none


class _Finished(NamedTuple):
    world: str
    source: int
    n_finished: int


class Message(Handle):
    """A message in flight: `wait()` for it before using the array again, and before the end."""

    def __init__(self, name: str, messages: Messages, peer: int | None) -> None:
        super().__init__(name, None, lambda: None)
        self._messages = messages
        self.peer = peer  # None: any
        self.is_over = False
        self.is_lost = False  # `done` has found that it will never complete
        self.checked = time.monotonic()  # when that was last checked
        self.error: Exception | None = None
        self.source: int | None = None

    def done(self) -> bool:
        return self._messages.poll(self)

    def wait(self, beside: bool = False) -> int | None:
        """Wait until it has been sent or received; return the sender of a received message."""
        if not self.is_over:
            self._messages.wait(self)
        if self.error is not None:
            raise self.error
        return self.source

    def end(self, error: str = "") -> None:
        if error:
            self.error = MismatchError(error)
        self.is_over = True


class _Sending(Message):
    memory: Any = None  # kept while its bytes may be read
    offered: Any = None


class _Receiving(Message):
    def __init__(
        self,
        name: str,
        messages: Messages,
        peer: int | None,
        key: _Key,
        x: Array,
        memory: Memory,
    ) -> None:
        super().__init__(name, messages, peer)
        self.key = key
        self.x = x
        self.memory = memory

    def accepts(self, envelope: _Envelope) -> bool:
        key = envelope.channel, envelope.tag
        return self.key == key and self.peer in (None, envelope.source)

    def received(self, error: str) -> None:
        if self.is_over:  # no longer waited for
            return
        if not error:
            self.memory.write_back()
            changed([self.x])
        self.end(error)


class _Fetching(NamedTuple):
    fetch: Fetch
    message: _Receiving
    envelope: _Envelope
    error: str
    discarded: Any  # the memory into which it is fetched if there is an error


class Messages:
    """This rank's side of all messages of a world; any thread may use it."""

    def __init__(self, mailbox: Mailbox, transport: Transport, world: str) -> None:
        self._mailbox = mailbox
        self._transport = transport  # it knows which ranks have died or left
        self._rank, self._size = transport.rank, transport.size
        self._world = world
        self._lock = threading.RLock()
        self._is_closed = False
        self._thread = threading.get_ident()  # the training thread
        self._in_other_threads = False
        self._n_waiting = 0  # threads in `wait`
        self._beside: threading.Thread | None = None  # see `_proceed`
        self._to_do = threading.Condition(self._lock)  # for that thread
        self._unexpected: list[_Envelope] = []  # arrived before a matching receive
        self._receiving: list[_Receiving] = []  # receives for which nothing has arrived yet
        self._sending: dict[int, _Sending] = {}  # large messages, not acknowledged yet
        self._fetching: list[_Fetching] = []
        self._latest: dict[int, str] = {}  # the last message to each rank
        self._outgoing: list[list[tuple[bytes, _Sending | None]]] = [[] for _ in range(self._size)]
        self._n_received = [0] * self._size  # records that have arrived from each rank
        self._n_finished = [0] * self._size  # how often each rank has announced `finish`

    def isend(self, x: Array, dst: int, tag: int, channel: int = 0) -> Message:
        """Begin to send. Only a receive with the same tag and channel accepts the message."""
        dst, tag = self._peer("dst", dst), _tag(tag)
        self._note_thread()
        memory = Memory.of_rows(_of_host(x))
        ((address, n_bytes),) = memory.tensors.buffers()
        message = _Sending(f"send to rank {dst} (tag {tag})", self, dst)
        number, inside, location = next(_numbers), None, None
        with self._lock:
            if n_bytes <= SMALL_BYTES:
                inside = ctypes.string_at(address, n_bytes)
                self._mailbox.count(n_bytes)
            else:
                message.memory = memory
                message.offered = self._mailbox.offer(dst, number, address, n_bytes)
                location = self._mailbox.location(message.offered)
                self._sending[number] = message
            what = memory.tensors.describe(0)
            envelope = _Envelope(
                self._world, self._rank, number, channel, tag, what, n_bytes, inside, location
            )
            self._send(dst, envelope, message if inside is not None else None)
            self._latest[dst] = message.name
        return message

    def irecv(self, x: Array, src: int | None, tag: int, channel: int = 0) -> Message:
        """Begin to receive from a rank, or from any if `src` is None."""
        message = self._receive(x, src, tag, channel)
        with self._lock:
            self._proceed()
        return message

    def recv(self, x: Array, src: int | None, tag: int) -> int:
        """Receive from a rank, or from any if `src` is None; return the sender."""
        source = self._receive(x, src, tag, channel=0).wait()
        assert source is not None
        return source

    def _receive(self, x: Array, src: int | None, tag: int, channel: int) -> Message:
        tag = _tag(tag)
        if src is not None:
            src = self._peer("src", src)
        elif self._size == 1:
            raise ValueError("this world has only one rank: no other can send it a message")
        if isinstance(x, (bool, int, float, list, tuple)):
            raise TypeError(f"a message is received into an array, not into a {type(x).__name__}")
        self._note_thread()
        memory = Memory([_of_host(x)])
        memory.use_c_order()
        whom = "any rank" if src is None else f"rank {src}"
        name = f"recv from {whom} (tag {tag})"
        message = _Receiving(name, self, src, (channel, tag), x, memory)
        with self._lock:
            self._receiving.append(message)
            for envelope in self._unexpected:
                if message.accepts(envelope):
                    self._unexpected.remove(envelope)
                    self._deliver(envelope)
                    break
        return message

    def wait(self, message: Message) -> None:
        """Wait until it has ended; raise PeerLostError or MismatchError if that is impossible."""
        transport, awaited = self._transport, self._awaited(message)
        detector = transport.stall_detector
        assert detector is not None, "nobody waits in a world of one"
        detector.check()
        detector.doing(message.name)
        waiting = detector.wait()
        n_polls, checked = 0, time.monotonic()
        went_well = False
        with self._lock:
            self._n_waiting += 1
        try:
            while True:
                gone = n_polls > 0 and self._have_left(awaited)
                self.progress()
                if message.is_over:
                    break
                n_polls += 1
                if n_polls < N_EAGER_POLLS:
                    continue
                self._mailbox.wait(CHECK_S)
                if gone or time.monotonic() - checked > CHECK_S:
                    checked = time.monotonic()
                    self._check_finished(message, awaited)
                    transport.members.check_peers(message.name, awaited[0] if gone else -1)
                    waiting.report_if_due(message.name, [self._rank], awaited)
            went_well = True
        finally:
            waiting.close(went_well)
            with self._lock:
                if not went_well:  # from now on, nothing is received into its array
                    if not message.is_over and isinstance(message, _Receiving):
                        message.error = PeerLostError(f"{message.name} ended early, and is lost")
                        message.end()
                    self._receiving = [each for each in self._receiving if each is not message]
                    for each in self._fetching:
                        if each.message is message:
                            each.fetch.discard()
                self._n_waiting -= 1
                self._proceed()

    def poll(self, message: Message) -> bool:
        """Do what is possible now, and return whether `wait` would return or raise at once."""
        self.progress()
        now = time.monotonic()
        if not message.is_over and not message.is_lost and now - message.checked > CHECK_S:
            message.checked = now
            message.is_lost = self._is_lost(message)
        return message.is_over or message.is_lost

    def _is_lost(self, message: Message) -> bool:
        """Return whether `wait` would raise.

        This does not use check_peer() to detect that a rank has left, since that gives up the
        world, and a caller that only polls may continue with the other ranks. After a death the
        world is lost anyway.
        """
        awaited, detector = self._awaited(message), self._transport.stall_detector
        assert detector is not None, "nobody waits in a world of one"
        try:
            if self._have_left(awaited):
                self.progress()
                return not message.is_over
            detector.check()
            self._check_finished(message, awaited)
            self._transport.members.check_peers(message.name)
        except HoroLiteError:
            return True
        return False

    def _awaited(self, message: Message) -> list[int]:
        """Return the ranks, one of which must act before the message can complete."""
        if message.peer is not None:
            return [message.peer]
        return [r for r in range(self._size) if r != self._rank]

    def _have_left(self, ranks: list[int]) -> bool:
        """Return whether all of these ranks have left; what they sent before has then arrived."""
        return all(self._transport.members.has_left(rank, self._n_received[rank]) for rank in ranks)

    def progress(self) -> None:
        """Do everything that is possible without waiting."""
        with self._lock:
            if self._is_closed:
                raise NotInitializedError("the world was shut down, and its messages are lost")
            for peer in range(self._size):
                self._flush(peer)
            for data in self._mailbox.receive():
                record = pickle.loads(data)
                if record.world != self._world:
                    continue  # of an earlier world, in which it was not received
                self._n_received[record.source] += 1
                if isinstance(record, _Envelope):
                    self._deliver(record)
                elif isinstance(record, _Acknowledgement):
                    message = self._sending.pop(record.number)
                    self._mailbox.release(message.offered)
                    message.memory = None
                    message.end(record.error)
                else:
                    self._n_finished[record.source] = record.n_finished
            under_way, self._fetching = self._fetching, []
            for each in under_way:
                if each.fetch.is_here():
                    answer = _Acknowledgement(
                        self._world, self._rank, each.envelope.number, each.error
                    )
                    self._send(each.envelope.source, answer)
                    each.message.received(each.error)
                else:
                    self._fetching.append(each)

    def finish(self) -> None:
        """Announce that this rank's function in elastic.run has ended, and sends no more messages.

        Does nothing if threads other than the training thread use messages, since these may
        continue.
        """
        with self._lock:
            self._n_finished[self._rank] += 1
            record = _Finished(self._world, self._rank, self._n_finished[self._rank])
            for peer in range(self._size):
                if peer != self._rank and not self._in_other_threads:
                    with suppress(OSError):  # no free descriptor: a stall will be reported instead
                        self._send(peer, record)

    def deliver(self) -> None:
        """Wait until the others hold the small messages sent to them, which may be lost otherwise.

        Ranks that have left do not want them any more.
        """
        transport, detector = self._transport, self._transport.stall_detector
        if detector is None or transport.members.given_up() or not self._mailbox.undelivered():
            return
        waiting, checked, went_well = detector.wait(), 0.0, False
        try:
            while peers := [
                peer
                for peer in self._mailbox.undelivered()
                if peer in self._latest and not transport.members.has_left(peer, sys.maxsize)
            ]:
                if time.monotonic() - checked > CHECK_S:
                    checked = time.monotonic()
                    name = f"shutdown(), after {self._latest[peers[0]]} that has not arrived"
                    transport.members.check_peers(name)
                    waiting.report_if_due(name, [self._rank], peers)
                self._mailbox.wait(CHECK_S)
            went_well = True
        finally:
            waiting.close(went_well)

    def close(self) -> None:
        """End all messages: those that have not arrived never will."""
        with self._lock:
            self._is_closed = True
            self._to_do.notify()
            beside = self._beside
        if beside is not None:
            beside.join(timeout=1.0)
        with self._lock:
            self._mailbox.close()
        if self._sending or self._fetching:
            _kept.append(self)

    def _note_thread(self) -> None:
        self._in_other_threads |= threading.get_ident() != self._thread

    def _check_finished(self, message: Message, awaited: list[int]) -> None:
        """Raise MismatchError if the training thread waits for ranks that wait in elastic.run.

        Messages that they sent earlier have arrived before their announcement.
        """
        with self._lock:
            mine = self._n_finished[self._rank]
            if (
                message.is_over
                or threading.get_ident() != self._thread
                or any(each.message is message for each in self._fetching)
                or any(self._n_finished[peer] <= mine for peer in awaited)
            ):
                return
        have, their = ("have", "their functions") if len(awaited) > 1 else ("has", "its function")
        raise MismatchError(
            f"{ranks_in_words(awaited)} {have} finished {their} in elastic.run, while rank "
            f"{self._rank} waits in {message.name}: before a rank returns from the function, or "
            "calls sys.exit(), it must send and receive all messages that others wait for"
        )

    def _deliver(self, envelope: _Envelope) -> None:
        """Give the message to the first receive that accepts it, or keep it until one does."""
        message = next((each for each in self._receiving if each.accepts(envelope)), None)
        if message is None:
            self._unexpected.append(envelope)
            return
        self._receiving.remove(message)
        message.source = envelope.source
        ((address, n_bytes),) = message.memory.tensors.buffers()
        mine, theirs, error = message.memory.tensors.describe(0), envelope.what, ""
        discarded = None
        if (mine.rpartition("[")[0], n_bytes) != (theirs.rpartition("[")[0], envelope.n_bytes):
            error = (
                f"rank {envelope.source} has sent {theirs} to rank {self._rank} (tag "
                f"{envelope.tag}), which receives into {mine}: dtype and number of elements must "
                "be the same"
            )
            discarded = np.empty(envelope.n_bytes, np.uint8)
            address = discarded.ctypes.data
        if envelope.inside is not None:
            ctypes.memmove(address, envelope.inside, envelope.n_bytes)
            message.received(error)
            return
        try:
            fetch = self._mailbox.fetch(
                envelope.source, envelope.number, envelope.location, address, envelope.n_bytes
            )
        except OSError:
            message.error = PeerLostError(
                f"rank {envelope.source} ended before rank {self._rank} had fetched its message "
                f"(tag {envelope.tag}): a rank that calls isend() must wait() before it ends"
            )
            message.end()
        else:
            self._fetching.append(_Fetching(fetch, message, envelope, error, discarded))

    def _send(self, peer: int, record: NamedTuple, message: _Sending | None = None) -> None:
        self._outgoing[peer].append((pickle.dumps(record), message))
        try:
            self._flush(peer)
        except OSError:  # raised to the caller; the record is not sent later
            self._outgoing[peer].pop()
            raise
        if self._outgoing[peer]:
            self._proceed()

    def _proceed(self) -> None:
        """Let a thread go on with what was begun, whatever this rank does next.

        So a receive completes also while its rank is in a collective. Under the lock; while a
        thread waits for a message, that thread does it.
        """
        if self._is_closed or self._n_waiting or not self._is_under_way():
            return
        if self._beside is None:
            run, name = self._run_beside, "horo_lite messages"
            self._beside = threading.Thread(target=run, name=name, daemon=True)
            self._beside.start()
        self._to_do.notify()

    def _is_under_way(self) -> bool:
        return bool(self._receiving or self._fetching) or any(self._outgoing)

    def _run_beside(self) -> None:
        while True:
            with self._lock:
                while not self._is_closed and (self._n_waiting or not self._is_under_way()):
                    self._to_do.wait()
            try:
                self._progress_beside()
            except OSError:  # short of descriptors: try again later
                pass
            except HoroLiteError:  # the world has ended, or is lost: `wait` raises it, too
                with self._lock:
                    self._beside = None
                    return
            self._mailbox.wait_beside(CHECK_S)

    def _progress_beside(self) -> None:
        with self._lock:
            if not self._n_waiting:
                self.progress()

    def _flush(self, peer: int) -> None:
        waiting = self._outgoing[peer]
        while waiting and self._mailbox.send(peer, waiting[0][0]):
            _, message = waiting.pop(0)
            if message is not None:
                message.end()

    def _peer(self, name: str, peer: Any) -> int:
        number = arguments.rank(name, peer, self._size)
        if number == self._rank:
            raise ValueError(f"{name} is {number}, this rank itself, but must be another rank")
        return number


def _tag(tag: Any) -> int:
    number = arguments.integer("tag", tag)
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"tag must fit into 64 bits, but {number:.3e} does not")
    return number


def _of_host(x: Array) -> Array:
    gpu = gpu_of(x)
    if gpu is not None:
        raise ValueError(
            f"the array is on cuda:{gpu}, but messages go through host memory: send a copy in host "
            "memory, and receive into one (in PyTorch, x.cpu())"
        )
    return x
