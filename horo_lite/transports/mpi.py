"""Ranks of several hosts: shared memory inside a host, MPI (through mpi4py) across hosts.

An all-reduce goes window by window. The ranks of a host encode theirs into shared memory and sum
them there, in rank order; one rank a host exchanges the sums with the other hosts, each of which
owns a share, adds it up in host order and gives the result to all; everyone decodes it. A host of
one rank does the same with nobody to wait for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from horo_lite import _native
from horo_lite.errors import HoroLiteError, PeerLostError, StallError
from horo_lite.transports import Header

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.transports import Local

T = TypeVar("T")

WINDOW_BYTES = 1 << 20
# MPI counts are 32 bits wide in libraries older than MPI 4.
PIECE_BYTES = 1 << 28
# A rank that has left may have sent this rank everything it waits for.
GRACE_S = 1.0

# Who waits for longer tells the others that it has come, and again, lest it is stopped meanwhile.
COME_S, AGAIN_S = 0.25, 10.0

# How long a rank has waited in the last meeting is said in the next.
_HEADER = np.dtype([("digest", "u8"), ("count", "i8"), ("weight", "f8"), ("waited", "f8")])
# Tags of messages about the end, and about who is late.
_LEFT, _GAVE_UP, _STALLED, _HAS_COME, _ANNOUNCES = 1, 2, 4, 5, 6
_TOLD_BYTES = 480


def scratch_bytes(local_size: int) -> int:
    """What the ranks of a host share: an image each, their sum, and the sum of all hosts."""
    return (local_size + 2) * WINDOW_BYTES


class Funnel:
    """How other threads call MPI without THREAD_MULTIPLE: the thread that called init() does it.

    It does so while it is in a call of ours: while a direct call waits, in poll, synchronize and
    shutdown. Only calls that return at once go through here; whoever waits repeats them. So no
    deadlock comes of it: a direct call waits for the same direct call on its peers and for nothing
    that an engine does; and engines wait for engines, which are served wherever a thread waits, so
    they get as far as engines that call MPI themselves. (Neighbours in a direct call also meet in
    shared memory, without serving, but only once all ranks have entered that call.) A part of the
    world has a funnel of its own `beside` the world's: whoever waits in one serves both.
    """

    def __init__(self, beside: Funnel | None = None) -> None:
        self._owner = threading.get_ident()
        self._closed = False
        self._asked: queue.SimpleQueue[tuple[Funnel, Callable[[], Any], queue.SimpleQueue[Any]]]
        self._asked = queue.SimpleQueue() if beside is None else beside._asked

    @staticmethod
    def if_needed(beside: Funnel | None = None) -> Funnel | None:
        """A funnel for the calling thread, unless MPI grants THREAD_MULTIPLE."""
        from mpi4py import MPI

        return None if MPI.Query_thread() == MPI.THREAD_MULTIPLE else Funnel(beside)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """What `function(*args)` returned to the thread that may call MPI."""
        if threading.get_ident() == self._owner:
            return function(*args)
        answers: queue.SimpleQueue[tuple[T, BaseException | None]] = queue.SimpleQueue()
        self._asked.put((self, partial(function, *args), answers))
        if self._closed:
            raise HoroLiteError("shutdown() has ended what was under way")
        value, error = answers.get()
        if error is not None:
            raise error
        return value

    def serve(self, timeout_s: float) -> bool:
        """Whether another thread asked for something within that time; it has been done."""
        if threading.get_ident() != self._owner:
            raise HoroLiteError(
                "MPI was initialised without THREAD_MULTIPLE, so only the thread that called "
                "horo_lite.init() may make this call"
            )
        value: Any = None
        error: BaseException | None = None
        try:
            whose, function, answers = self._asked.get(timeout_s > 0, timeout_s)
        except queue.Empty:
            return False
        try:
            if whose._closed:
                raise HoroLiteError("shutdown() has ended what was under way")
            value = function()
        except BaseException as raised:
            error = raised
        answers.put((value, error))
        if error is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C is for this thread too
        return True

    def close(self) -> None:
        """Whoever asks for something, now or later, gets an error."""
        self._closed = True
        others = []
        with suppress(queue.Empty):
            while True:
                asked = self._asked.get_nowait()
                if asked[0] is self:
                    asked[2].put((None, HoroLiteError("shutdown() has ended what was under way")))
                else:
                    others.append(asked)
        for asked in others:
            self._asked.put(asked)


class Post:
    """Short messages to all peers that nobody waits for, over a communicator of their own."""

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm.Dup()
        self.n_told = 0
        self._n_heard = [0] * comm.size
        self._under_way: list[Any] = []

    def tell(self, text: bytes, tag: int) -> None:
        """All peers can hear this."""
        self._under_way = [sent for sent in self._under_way if not sent[0].Test()]
        self.n_told += 1
        data = np.frombuffer(text[:_TOLD_BYTES], np.uint8)
        for peer in range(self.comm.size):
            if peer != self.comm.rank:
                request = self.comm.Isend([data, self._mpi.BYTE], peer, tag)
                self._under_way.append((request, data))

    def hear(self) -> list[tuple[int, int, bytes]]:
        """What has come: peer, tag, text."""
        heard = []
        status = self._mpi.Status()
        try:
            while self.comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
                heard.append(self._receive(status.Get_source()))
        except self._mpi.Exception as error:  # of MPI with fault tolerance
            if not heard:
                raise PeerLostError(f"a rank died ({error})") from error
        return heard

    def _receive(self, peer: int) -> tuple[int, int, bytes]:
        status = self._mpi.Status()
        text = np.empty(_TOLD_BYTES, np.uint8)
        self.comm.Recv([text, self._mpi.BYTE], peer, self._mpi.ANY_TAG, status)
        self._n_heard[peer] += 1
        return peer, status.Get_tag(), text[: status.Get_count(self._mpi.BYTE)].tobytes()

    def free(self, n_told: Sequence[int]) -> None:
        """The communicator is given back; `n_told` is how many messages each rank has sent.

        All are received first: else they would turn up in the next communicator, which may well be
        given the same number.
        """
        for peer, n in enumerate(n_told):
            while peer != self.comm.rank and self._n_heard[peer] < n:
                self._receive(peer)
        self._mpi.Request.Waitall([request for request, _ in self._under_way])
        self.comm.Free()


class Lines:
    """The communicators of one transport."""

    made: ClassVar[list[Lines]] = []
    """All that have not been given back, in the order in which they were made."""

    def __init__(self, comm: MPI.Comm, leads: bool) -> None:
        from mpi4py import MPI

        # All made from `comm`: who is left waiting when a rank dies meanwhile hears of it there.
        self._parent = comm
        self.comm = comm.Dup()
        self.posts: list[Post] = []
        across = comm.Split(0 if leads else MPI.UNDEFINED, comm.rank)
        self.across: MPI.Comm | None = across if leads else None
        self.closed = False  # nothing was interrupted, and this rank needs them no more
        Lines.made.append(self)

    def post(self) -> Post:
        self.posts.append(Post(self._parent))
        return self.posts[-1]

    def free(self, n_told: Sequence[Sequence[int]]) -> None:
        for i, post in enumerate(self.posts):
            post.free([each[i] for each in n_told])
        if self.across is not None:
            self.across.Free()
        self.comm.Free()

    @staticmethod
    def free_closed(comm: MPI.Comm) -> None:
        """Communicators of former worlds over the same ranks are given back; collective.

        Not earlier: to do it in shutdown() a rank would have to wait for all others. What some rank
        did not close in good order is left to the end of MPI, as is what it still uses.
        """
        from mpi4py import MPI

        alike = (MPI.IDENT, MPI.CONGRUENT)
        former = [lines for lines in Lines.made if MPI.Comm.Compare(lines.comm, comm) in alike]
        mine = [(lines.closed, [post.n_told for post in lines.posts]) for lines in former]
        everyone = comm.allgather(mine)
        Lines.made = [lines for lines in Lines.made if lines not in former]
        if len({len(offers) for offers in everyone}) == 1:
            for i, lines in enumerate(former):
                if all(offers[i][0] for offers in everyone):
                    lines.free([offers[i][1] for offers in everyone])
                else:
                    Lines.made.append(lines)


def _at_once(function: Callable[..., T], *args: Any) -> T:
    return function(*args)


class MpiTransport:
    """A transport over MPI for ranks on several hosts."""

    name = "mpi"

    def __init__(
        self, comm: MPI.Comm, local: Local, which: int, funnel: Funnel | None = None
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.funnel = funnel
        self._call: Callable[..., Any] = _at_once if funnel is None or which == 0 else funnel.call
        # The first transport is for direct calls: who waits in one lets the others go on.
        self._serve = None if funnel is None or which != 0 else funnel.serve
        self.rank = comm.rank
        self.size = comm.size
        self.ranks = local.ranks
        self.lookout = local.lookout
        self._is_direct = which == 0
        self._leaders = local.leaders
        self._scope = local.lookout.scope(local.ranks)
        self._names: list[str] = comm.allgather(local.names[local.rank])
        self._local = local.group(which)
        self._segment = local.segment
        n_local = local.size
        scratch = local.scratch(which)
        self._images = [scratch + r * WINDOW_BYTES for r in range(n_local)]
        self._sum = scratch + n_local * WINDOW_BYTES
        self._total = scratch + (n_local + 1) * WINDOW_BYTES
        self._leads = self._local.rank == 0
        self._lines = Lines(comm, self._leads)
        self._comm, self._across = self._lines.comm, self._lines.across
        self._control = self._lines.post()
        self.n_hosts: int = comm.allreduce(int(self._leads))
        self._broken = ""
        self._label = ""
        self.n_waits = 0  # changes whenever this rank begins or stops to wait, odd while it does
        self._left: dict[int, tuple[float, str]] = {}  # when, and why
        self._goodbyes: set[int] = set()
        self._n_met = 0
        self._began = 0.0  # the latest meeting
        self._come: dict[int, tuple[int, float]] = {}  # who has come to which meeting, said when
        self._said = 0, 0.0  # the same of this rank
        self._waited_s = 0.0  # in the last meeting

    # Meeting and reducing.

    @property
    def host(self) -> MpiTransport:
        return self

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        if self._broken:
            raise PeerLostError(f"the world can no longer be used: {self._broken}")
        self.lookout.check()
        if self._serve is not None:
            self._serve(0.0)  # even if this call never waits
        mine = np.array([(digest, count, weight, self._waited_s)], _HEADER)
        everyone = np.empty(self.size, _HEADER)
        byte = self._mpi.BYTE
        self._label = label
        self._n_met += 1
        if self._is_direct:
            self.lookout.doing(label)
        self._began = time.monotonic()
        self._wait([self._call(self._comm.Iallgather, [mine, byte], [everyone, byte])])
        self._tally(everyone["waited"].tolist())
        self._waited_s = time.monotonic() - self._began
        return [Header(int(h["digest"]), int(h["count"]), float(h["weight"])) for h in everyone]

    def _tally(self, waited_s: list[float]) -> None:
        """Hosts have clocks of their own: last in the last meeting was who waited least."""
        last = waited_s.index(min(waited_s))
        if self._is_direct and last != self.rank and self._waited_s > 0:
            self.lookout.waited_for(self.ranks[last], self._waited_s - waited_s[last])

    def allreduce(
        self,
        tensors: _native.Tensors,
        *,
        op: str,
        wire: str,
        prescale: float,
        scale: float,
        divisor: float,
    ) -> None:
        layout = _native.WireLayout(tensors, op, wire, WINDOW_BYTES, self.n_hosts)
        ours = range(self._local.rank, self.n_hosts, self._local.size)
        for window in range(layout.n_chunks):
            shares = layout.shares(window)
            layout.encode(window, prescale, self._images[self._local.rank])
            self._meet_locally()
            for share in ours:
                layout.reduce(window, share, self._images, 1.0, 1.0, self._sum)
            self._meet_locally()
            if self._across is not None:
                self._reduce_across(self._across, layout, window, shares, scale, divisor)
            self._meet_locally()
            layout.decode(window, self._total)

    def _reduce_across(
        self,
        across: MPI.Comm,
        layout: _native.WireLayout,
        window: int,
        shares: list[tuple[int, int]],
        scale: float,
        divisor: float,
    ) -> None:
        byte = self._mpi.BYTE
        begins = [begin for begin, _ in shares]
        sizes = [end - begin for begin, end in shares]
        host = across.rank
        own_begin, own_size = begins[host], sizes[host]
        inbox = np.empty(self.n_hosts * own_size, np.uint8)
        sums = self._memory(self._sum, shares[-1][1])
        total = self._memory(self._total, shares[-1][1])
        arrivals = [h * own_size for h in range(self.n_hosts)]
        self._wait(
            [
                self._call(
                    across.Ialltoallv,
                    [sums, (sizes, begins), byte],
                    [inbox, ([own_size] * self.n_hosts, arrivals), byte],
                )
            ],
            self._leaders,
        )
        # Where each host's image of the whole window would begin.
        images = [inbox.ctypes.data + arrival - own_begin for arrival in arrivals]
        layout.reduce(window, host, images, scale, divisor, self._total)
        in_place = self._mpi.IN_PLACE
        gathering = self._call(across.Iallgatherv, in_place, [total, (sizes, begins), byte])
        self._wait([gathering], self._leaders)

    def _meet_locally(self) -> None:
        if self._local.size > 1:
            self._local.agree(self._label, 0)

    # Moving bytes.

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        for piece in self._pieces(tensors):
            self._wait([self._call(self._comm.Ibcast, [piece, self._mpi.BYTE], root)])

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        self.alltoall([send] * self.size, receive, ())

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        byte = self._mpi.BYTE

        def start() -> list[Any]:
            requests = []
            for peer in range(self.size):
                if peer != self.rank:
                    for piece in self._pieces(receive[peer]):
                        requests.append(self._comm.Irecv([piece, byte], peer))
            for step in range(1, self.size):  # not all to rank 0 first
                peer = (self.rank + step) % self.size
                for piece in self._pieces(send[peer]):
                    requests.append(self._comm.Isend([piece, byte], peer))
            return requests

        self._wait(self._call(start))

    def _pieces(self, tensors: _native.Tensors) -> Iterator[Any]:
        for address, n_bytes in tensors.buffers():
            for begin in range(0, n_bytes, PIECE_BYTES):
                yield self._memory(address + begin, min(PIECE_BYTES, n_bytes - begin))

    def _memory(self, address: int, n_bytes: int) -> Any:
        return self._mpi.buffer.fromaddress(address, n_bytes)

    # Waiting and ending.

    def _wait(self, requests: list[Any], among: Sequence[int] = ()) -> None:
        """All requests are complete. MPI itself would wait for ever, at full speed, and deaf.

        They are of the ranks `among`; by itself, of all.
        """
        test: Callable[[list[Any]], bool] = self._mpi.Request.Testall
        if self._call is not _at_once:
            test = partial(self._call, test)
        pause = self._serve or time.sleep
        started = time.monotonic()
        n_looks = 0
        wait = self.lookout.wait()
        went_well = False
        try:
            while not test(requests):
                n_looks += 1
                if n_looks < 200:
                    continue
                if n_looks == 200:
                    self.n_waits += 1
                pause(min(1e-3, 20e-6 * (n_looks - 199)))
                if n_looks % 20 == 0:
                    self._check_peers(started)
                    self._look(wait, among or range(self.size))
            went_well = True
        except self._mpi.Exception as error:  # of MPI with fault tolerance
            self._broken = f"a rank died while {self._doing()} ({error})"
            self.abandon(self._broken)
            raise PeerLostError(self._broken) from error
        except (PeerLostError, StallError) as error:
            self._broken = str(error)
            self.abandon(self._broken)
            raise
        except BaseException:
            self._broken = "this rank was interrupted in the middle of an operation"
            self.abandon("it was interrupted")
            raise
        finally:
            self.n_waits += self.n_waits % 2
            wait.close(went_well)

    def _look(self, wait: _native.Wait, among: Sequence[int]) -> None:
        """The ranks of this host, and those that wait on others, see that this one waits."""
        self._say_it_has_come()
        if self._label == "join()":  # see kJoin in csrc/lookout.h
            self.lookout.check()
            return
        now = time.monotonic()
        come = [self.rank]
        for peer, (n_met, said) in self._come.items():
            if peer in among and n_met >= self._n_met and now - said < 2.5 * AGAIN_S:
                come.append(peer)
        late = [self.ranks[r] for r in among if r not in come]
        wait.look(self._label + self._scope, [self.ranks[r] for r in come], late)

    def _say_it_has_come(self) -> None:
        n_met, said = self._said
        now = time.monotonic()
        if now - self._began > COME_S and (n_met < self._n_met or now - said > AGAIN_S):
            self._said = self._n_met, now
            self._call(self._control.tell, self._n_met.to_bytes(8, "little"), _HAS_COME)

    def announce(self, what: str, expect_s: float) -> None:
        """Peers on other hosts know that this rank will be late; "": that it is over."""
        self._call(self._control.tell, f"{expect_s} {what}".encode(), _ANNOUNCES)

    def _check_peers(self, started: float) -> None:
        self._hear()
        for peer in self._left:
            self._check_left(peer, started, self._doing())
        self._local.check_peers(self._label)

    def check(self, peer: int, name: str) -> None:
        """PeerLostError if `peer`, which this rank needs for `name`, has left or given up."""
        self._hear()
        if peer in self._left:
            self._check_left(peer, 0.0, f"{self._names[self.rank]} waited for it in {name}")
        self._local.check_peers(name)
        self._say_it_has_come()  # and gone on: others may wait in that meeting still

    def has_left(self, peer: int) -> bool:
        """Whether that rank will do nothing more."""
        self._hear()
        return peer in self._left

    def _hear(self) -> None:
        """What peers said about their end, and about who is late, has been heard."""
        for peer, tag, text in self._call(self._control.hear):
            words = text.decode(errors="replace")
            if tag == _GAVE_UP:
                raise PeerLostError(f"{self._names[peer]} gave up ({words}) while {self._doing()}")
            if tag == _STALLED:
                self.lookout.stall(words)
                raise StallError(words)
            if tag == _HAS_COME:
                self._come[peer] = int.from_bytes(text, "little"), time.monotonic()
            elif tag == _ANNOUNCES:
                expect_s, _, what = words.partition(" ")
                self.lookout.announce(self.ranks[peer], what, float(expect_s))
            else:
                self._left[peer] = time.monotonic(), words

    def _check_left(self, peer: int, started: float, doing: str) -> None:
        when, reason = self._left[peer]
        if time.monotonic() - max(when, started) > GRACE_S:
            raise PeerLostError(f"{self._names[peer]} has left ({reason}) while {doing}")

    def _doing(self) -> str:
        return f"{self._names[self.rank]} waited in {self._label or 'an operation'}"

    def abandon(self, reason: str) -> None:
        self._broken = self._broken or f"this rank gave up: {reason}"
        self._local.abandon(reason)
        try:
            self.lookout.check()
        except StallError as stalled:
            self._tell(str(stalled).encode(), _STALLED)
        self._tell(reason.encode(), _GAVE_UP)

    def leave(self, reason: str) -> None:
        self._local.leave(reason)
        self._tell(reason.encode(), _LEFT)

    def silent(self) -> list[int]:
        return self._local.silent()

    def first_to_tell(self) -> bool:
        return self._local.first_to_tell()

    def _tell(self, text: bytes, tag: int) -> None:
        if tag not in self._goodbyes and not self._mpi.Is_finalized():
            self._goodbyes.add(tag)
            with suppress(self._mpi.Exception):  # some are dead
                self._call(self._control.tell, text, tag)

    def close(self) -> None:
        """Its communicators can be given back: see Lines.free_closed."""
        self._lines.closed = not self._broken


class MpiMailbox:
    """How messages from one rank to another travel; see `horo_lite.messages.Mailbox`.

    Over the world's own communicator, on which there are only collective operations otherwise.
    """

    _RECORD = 1
    _N_TAGS = 30_000  # all that MPI promises is 32,767

    def __init__(self, comm: MPI.Comm, transport: MpiTransport) -> None:
        self._comm = comm
        self._transport = transport
        self._call, self._mpi = transport._call, transport._mpi
        self._under_way: list[Any] = []
        self._pause_s = 20e-6

    def post(self, peer: int, record: bytes) -> bool:
        data = np.frombuffer(record, np.uint8)
        self._under_way = [sent for sent in self._under_way if not self._call(sent[0].Test)]
        request = self._call(self._comm.Isend, [data, self._mpi.BYTE], peer, self._RECORD)
        self._under_way.append((request, data))
        return True

    def collect(self) -> list[bytes]:
        records: list[bytes] = self._call(self._collect)
        return records

    def _collect(self) -> list[bytes]:
        records = []
        status = self._mpi.Status()
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, self._RECORD, status):
            data = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._comm.Recv([data, self._mpi.BYTE], status.Get_source(), self._RECORD)
            records.append(data.tobytes())
            self._pause_s = 20e-6
        return records

    def lay_out(self, peer: int, number: int, address: int, n_bytes: int) -> list[Any]:
        return self._start(self._comm.Isend, peer, number, address, n_bytes)

    def place(self, laid_out: list[Any]) -> None:
        """The number is enough."""

    def clear(self, laid_out: list[Any]) -> None:
        self._call(self._mpi.Request.Waitall, laid_out)

    def fetch(
        self, peer: int, number: int, place: Any, address: int, n_bytes: int
    ) -> Callable[[], bool]:
        requests = self._start(self._comm.Irecv, peer, number, address, n_bytes)
        return lambda: self._call(self._mpi.Request.Testall, requests)

    def _start(
        self, start: Callable[..., Any], peer: int, number: int, address: int, n_bytes: int
    ) -> list[Any]:
        byte, tag = self._mpi.BYTE, self._RECORD + 1 + number % self._N_TAGS
        return [
            self._call(start, [self._transport._memory(address + begin, size), byte], peer, tag)
            for begin in range(0, n_bytes, PIECE_BYTES)
            for size in [min(PIECE_BYTES, n_bytes - begin)]
        ]

    def wait(self, timeout_s: float) -> None:
        (self._transport._serve or time.sleep)(min(self._pause_s, timeout_s))
        self._pause_s = min(1e-3, 1.2 * self._pause_s)

    def close(self) -> None:
        """The communicator is the world's."""


class MpiChannel:
    """How engines of several hosts meet: see Channel in csrc/engine.h.

    A rank that enters a round rings all others, so that engines need not meet all the time.
    """

    _BELL = 3
    _PAUSE_S = 5e-3  # MPI wakes nobody: an engine with nothing to do looks this often

    def __init__(self, transport: MpiTransport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._funnel = transport.funnel
        # How a thread that waits lets the engine go on; None where the engine needs nobody.
        self.serve = None if self._funnel is None else self._funnel.serve
        self._bells = transport._lines.post()
        self._round = 0
        self._is_rung = False
        self._woken = threading.Event()

    def meet(self, mine: bytes, label: str) -> list[bytes]:
        number = self._round.to_bytes(8, "little")
        self._transport._call(self._bells.tell, number, self._BELL)
        self._round += 1
        self._is_rung = False
        headers = self._transport.agree(0, count=len(mine), label=label)
        received = [np.empty(header.count, np.uint8) for header in headers]
        received[self.rank] = np.frombuffer(mine, np.uint8)
        tensors = [_native.Tensors([array], writable=False) for array in received]
        self._transport.allgather(tensors[self.rank], tensors)
        return [array.tobytes() for array in received]

    def peer_is_ahead(self) -> bool:
        for _, _, number in self._transport._call(self._bells.hear):
            # Bells of rounds that this rank has entered by itself come late.
            self._is_rung = self._is_rung or int.from_bytes(number, "little") >= self._round
        return self._is_rung

    def wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        pause_s = 50e-6
        while not self._woken.wait(pause_s) and time.monotonic() < until:
            if self.peer_is_ahead():
                return
            pause_s = min(self._PAUSE_S, pause_s * 1.5)
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    def stop(self) -> None:
        self._woken.set()
        if self._funnel is not None:
            self._funnel.close()

    def check(self, rank: int, name: str) -> None:
        self._transport.check(rank, name)

    def abandon(self, reason: str) -> None:
        self._transport.abandon(reason)
