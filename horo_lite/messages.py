"""Arrays from one rank to another: send and receive, in which nobody else takes part.

A message is a letter: a short record of what it is. What is small is inside; what is large waits
with its sender until the receiver has fetched it and said so. Records carry themselves: a rank's
letters lie in its mailbox whatever the sender does next.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from horo_lite.arrays import Array, HostArrays, gpu_of
from horo_lite.collectives import Handle
from horo_lite.errors import MismatchError, NotInitializedError, PeerLostError
from horo_lite.transports import Transport

SMALL_BYTES = 3072  # with its record it must fit into PIPE_BUF, 4096 bytes, which travel in one go
LOOK_S = 0.05  # so often those who wait look what became of the others
N_LOOKS_AT_ONCE = 50

_numbers = itertools.count()  # no two messages of this process have one, in whichever worlds


class Mailbox(Protocol):
    """How records and bytes get from rank to rank. Nothing here waits."""

    def post(self, peer: int, record: bytes) -> bool:
        """The record is on its way; False where there is no room for it at present."""

    def collect(self) -> list[bytes]:
        """Records that have come, those of each peer in the order in which they were posted."""

    def lay_out(self, peer: int, number: int, address: int, n_bytes: int) -> Any:
        """Something to keep until the peer has fetched those bytes."""

    def place(self, laid_out: Any) -> Any:
        """What the peer must know to fetch them."""

    def clear(self, laid_out: Any) -> None:
        """The peer has fetched it."""

    def fetch(
        self, peer: int, number: int, place: Any, address: int, n_bytes: int
    ) -> Callable[[], bool]:
        """Whether the bytes that a peer has laid out are at `address`. OSError: it has ended."""

    def wait(self, timeout_s: float) -> None:
        """Something may have come, or the time is over."""

    def close(self) -> None:
        """Nothing can be posted or collected any more."""


class _Letter(NamedTuple):
    world: str
    source: int
    number: int
    tag: int
    what: str  # as "float32[3, 4]"
    n_bytes: int
    inside: bytes | None
    place: Any


class _Taken(NamedTuple):
    world: str
    source: int
    number: int
    error: str  # "" if there was none


class Message(Handle):
    """A message in flight: `wait()` for it before the array is used again, and before the end."""

    def __init__(self, name: str, office: Messages, peer: int | None) -> None:
        super().__init__(name, None, lambda: None)
        self._office = office
        self.peer = peer  # None: any
        self.is_over = False
        self.error: Exception | None = None
        self.source: int | None = None

    def done(self) -> bool:
        self._office.go_on()
        return self.is_over

    def wait(self, beside: bool = False) -> int | None:
        """It has been sent, and the array may be changed; or received: the rank it came from."""
        if not self.is_over:
            self._office.wait(self)
        if self.error is not None:
            raise self.error
        return self.source

    def end(self, error: str = "") -> None:
        if error:
            self.error = MismatchError(error)
        self.is_over = True


class _Sending(Message):
    memory: Any = None  # kept while its bytes may be read
    laid_out: Any = None


class _Receiving(Message):
    def __init__(
        self, name: str, office: Messages, peer: int | None, tag: int, memory: HostArrays
    ) -> None:
        super().__init__(name, office, peer)
        self.tag = tag
        self.memory = memory

    def accepts(self, letter: _Letter) -> bool:
        return self.tag == letter.tag and self.peer in (None, letter.source)

    def received(self, error: str) -> None:
        if not error:
            self.memory.write_back()
        self.end(error)


class _Fetching(NamedTuple):
    is_here: Callable[[], bool]
    message: _Receiving
    letter: _Letter
    error: str
    aside: Any  # where it goes if there is an error


class Messages:
    """This rank's part in all messages of a world; any thread may use it."""

    def __init__(self, mailbox: Mailbox, transport: Transport, world: str) -> None:
        self._mailbox = mailbox
        self._transport: Any = transport  # of direct calls, which knows who has died or left
        self._rank, self._size = transport.rank, transport.size
        self._world = world
        self._lock = threading.RLock()
        self._is_closed = False
        self._letters: list[_Letter] = []  # that have come, and nobody wants yet
        self._receiving: list[_Receiving] = []  # for which nothing has come yet
        self._sending: dict[int, _Sending] = {}  # large, and not fetched yet
        self._fetching: list[_Fetching] = []
        self._outgoing: list[list[tuple[bytes, _Sending | None]]] = [[] for _ in range(self._size)]

    def isend(self, x: Array, dst: int, tag: int) -> Message:
        self._check_peer("dst", dst)
        memory = HostArrays.of_rows(_of_host(x))
        ((address, n_bytes),) = memory.tensors.buffers()
        message = _Sending(f"send to rank {dst} (tag {tag})", self, dst)
        number, inside, place = next(_numbers), None, None
        with self._lock:
            if n_bytes <= SMALL_BYTES:
                inside = ctypes.string_at(address, n_bytes)
            else:
                message.memory = memory
                message.laid_out = self._mailbox.lay_out(dst, number, address, n_bytes)
                place = self._mailbox.place(message.laid_out)
                self._sending[number] = message
            what = memory.tensors.describe(0)
            letter = _Letter(self._world, self._rank, number, tag, what, n_bytes, inside, place)
            self._post(dst, letter, message if inside is not None else None)
        return message

    def irecv(self, x: Array, src: int | None, tag: int) -> Message:
        if src is not None:
            self._check_peer("src", src)
        if isinstance(x, (bool, int, float, list, tuple)):
            raise TypeError(f"a message is received into an array, not into a {type(x).__name__}")
        memory = HostArrays([_of_host(x)])
        if memory.tensors.layout:
            memory.use_c_order()
        whom = "any rank" if src is None else f"rank {src}"
        message = _Receiving(f"recv from {whom} (tag {tag})", self, src, tag, memory)
        with self._lock:
            self._receiving.append(message)
            for letter in self._letters:
                if message.accepts(letter):
                    self._letters.remove(letter)
                    self._hand_over(letter)
                    break
        return message

    def wait(self, message: Message) -> None:
        """It is over. PeerLostError where that cannot be."""
        transport, peer = self._transport, message.peer
        others = [r for r in range(self._size) if r != self._rank]
        awaited = others if peer is None else [peer]
        transport.lookout.check()
        transport.lookout.doing(message.name)
        waiting = transport.lookout.wait()
        n_looks, looked = 0, time.monotonic()
        went_well = False
        try:
            while True:
                # What has left, had sent all it had to send before.
                gone = all(map(transport.has_left, awaited)) if n_looks else False
                self.go_on()
                if message.is_over:
                    break
                n_looks += 1
                if n_looks < N_LOOKS_AT_ONCE:
                    continue
                self._mailbox.wait(LOOK_S)
                if gone or time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    transport.check(awaited[0] if gone else -1, message.name)
                    waiting.look(message.name, [self._rank], awaited)
            went_well = True
        finally:
            waiting.close(went_well)
            if not went_well:
                with self._lock:  # it does not get what comes now
                    self._receiving = [each for each in self._receiving if each is not message]

    def go_on(self) -> None:
        """Everything that need not wait has been done."""
        with self._lock:
            if self._is_closed:
                raise NotInitializedError("the world was shut down, and its messages are lost")
            for peer in range(self._size):
                self._flush(peer)
            for data in self._mailbox.collect():
                record = pickle.loads(data)
                if record.world != self._world:
                    continue  # nobody received it there
                if isinstance(record, _Taken):
                    message = self._sending.pop(record.number)
                    self._mailbox.clear(message.laid_out)
                    message.memory = None
                    message.end(record.error)
                else:
                    self._hand_over(record)
            under_way, self._fetching = self._fetching, []
            for each in under_way:
                if each.is_here():
                    taken = _Taken(self._world, self._rank, each.letter.number, each.error)
                    self._post(each.letter.source, taken)
                    each.message.received(each.error)
                else:
                    self._fetching.append(each)

    def close(self) -> None:
        """What has not come yet never will."""
        with self._lock:
            self._is_closed = True
            self._mailbox.close()

    def _hand_over(self, letter: _Letter) -> None:
        """The letter is with the first that accepts it, or kept until somebody does."""
        message = next((each for each in self._receiving if each.accepts(letter)), None)
        if message is None:
            self._letters.append(letter)
            return
        self._receiving.remove(message)
        message.source = letter.source
        ((address, n_bytes),) = message.memory.tensors.buffers()
        mine, theirs, error = message.memory.tensors.describe(0), letter.what, ""
        aside = None
        if (mine.split("[")[0], n_bytes) != (theirs.split("[")[0], letter.n_bytes):
            error = (
                f"rank {letter.source} has sent {theirs} to rank {self._rank} (tag {letter.tag}), "
                f"which receives into {mine}: dtype and number of elements must be alike"
            )
            aside = np.empty(letter.n_bytes, np.uint8)
            address = aside.ctypes.data
        if letter.inside is not None:
            ctypes.memmove(address, letter.inside, letter.n_bytes)
            message.received(error)
            return
        try:
            is_here = self._mailbox.fetch(
                letter.source, letter.number, letter.place, address, letter.n_bytes
            )
        except OSError:
            message.error = PeerLostError(
                f"rank {letter.source} ended before rank {self._rank} had fetched its message "
                f"(tag {letter.tag}): whoever calls isend() must wait() before its end"
            )
            message.end()
        else:
            self._fetching.append(_Fetching(is_here, message, letter, error, aside))

    def _post(self, peer: int, record: NamedTuple, message: _Sending | None = None) -> None:
        self._outgoing[peer].append((pickle.dumps(record), message))
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        waiting = self._outgoing[peer]
        while waiting and self._mailbox.post(peer, waiting[0][0]):
            _, message = waiting.pop(0)
            if message is not None:
                message.end()

    def _check_peer(self, name: str, peer: int) -> None:
        if isinstance(peer, bool) or not hasattr(peer, "__index__"):
            raise TypeError(f"{name} is the number of a rank, not {peer!r}")
        if not 0 <= peer < self._size:
            raise ValueError(f"{name} is {peer}, but the ranks are 0 to {self._size - 1}")
        if peer == self._rank:
            raise ValueError(f"{name} is {peer}, this rank itself: messages are for other ranks")


def _of_host(x: Array) -> Array:
    gpu = gpu_of(x)
    if gpu is not None:
        raise ValueError(
            f"the array lies on cuda:{gpu}, and messages go through the host's memory: send a copy "
            "of it there, and receive into one (in PyTorch, x.cpu())"
        )
    return x


# For the world that this process is in.


def send(x: Array, dst: int, *, tag: int = 0) -> None:
    """`x` is on its way to rank `dst`, and may be changed; only that rank takes part, in `recv`.

    Arrays above 3 KB wait until the receiver has them, so two ranks that first send such to each
    other and then receive wait for ever: one must use `isend`. Messages between two ranks with one
    `tag` are received in the order in which they were sent. On GPUs: ValueError. MismatchError:
    the receiver's array has another dtype or number of elements (of small ones only it knows).
    PeerLostError: `dst` has ended.
    """
    isend(x, dst, tag=tag).wait()


def recv(x: Array, src: int | None = None, *, tag: int = 0) -> int:
    """`x` holds what rank `src` (None: any) has sent with this `tag`; that rank is the result.

    `x` has the dtype and as many elements as what was sent: MismatchError here if not, and there if
    the message is large; `x` is as before then. Elements count in C order, shapes may differ.
    """
    source = irecv(x, src, tag=tag).wait()
    assert source is not None
    return source


def isend(x: Array, dst: int, *, tag: int = 0) -> Message:
    """`x` will be sent; not to be changed until `wait()` on the result has returned. See `send`.

    Every such message must be waited for, at the latest at the end of the program.
    """
    return _messages().isend(x, dst, tag)


def irecv(x: Array, src: int | None = None, *, tag: int = 0) -> Message:
    """`wait()` on the result says which rank `x` was received from. See `recv`.

    Of several that accept a message, the one asked for first gets it.
    """
    return _messages().irecv(x, src, tag)


def _messages() -> Messages:
    from horo_lite.world import messages

    return messages()
