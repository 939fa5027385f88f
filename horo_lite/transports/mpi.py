"""Ranks of several hosts: shared memory inside a host, MPI (through mpi4py) across hosts.

An all-reduce goes window by window. The ranks of a host encode theirs into shared memory and sum
them there, in rank order; one rank a host exchanges the sums with the other hosts, each of which
owns a share, adds it up in host order and gives the result to all; everyone decodes it. A host of
one rank does the same with nobody to wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import _native
from horo_lite.errors import PeerLostError
from horo_lite.transports import Header

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.transports import Local

WINDOW_BYTES = 1 << 20
# MPI counts are 32 bits wide in libraries older than MPI 4.
PIECE_BYTES = 1 << 28
# A rank that has left may have sent this rank everything it waits for.
GRACE_S = 1.0

_HEADER = np.dtype([("digest", "u8"), ("count", "i8"), ("weight", "f8")])
_LEFT, _GAVE_UP = 1, 2  # tags of messages about the end


def scratch_bytes(local_size: int) -> int:
    """What the ranks of a host share: an image each, their sum, and the sum of all hosts."""
    return (local_size + 2) * WINDOW_BYTES


class MpiTransport:
    """A transport over MPI for ranks on several hosts."""

    name = "mpi"

    def __init__(self, comm: MPI.Comm, local: Local, which: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.thread_multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._comm = comm.Dup()
        self._control = comm.Dup()
        self.rank = comm.rank
        self.size = comm.size
        self._local = local.group(which)
        self._segment = local.segment
        n_local = local.comm.size
        scratch = local.scratch(which)
        self._images = [scratch + r * WINDOW_BYTES for r in range(n_local)]
        self._sum = scratch + n_local * WINDOW_BYTES
        self._total = scratch + (n_local + 1) * WINDOW_BYTES
        self._leads = self._local.rank == 0
        across = comm.Split(0 if self._leads else MPI.UNDEFINED, comm.rank)
        self._across: MPI.Comm | None = across if self._leads else None
        self.n_hosts: int = comm.allreduce(int(self._leads))
        self._broken = ""
        self._label = ""
        self._left: dict[int, float] = {}
        self._goodbyes: list[Any] = []

    # Meeting and reducing.

    @property
    def host(self) -> MpiTransport:
        return self

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        if self._broken:
            raise PeerLostError(f"the world can no longer be used: {self._broken}")
        mine = np.array([(digest, count, weight)], _HEADER)
        everyone = np.empty(self.size, _HEADER)
        byte = self._mpi.BYTE
        self._label = label
        self._wait([self._comm.Iallgather([mine, byte], [everyone, byte])])
        return [Header(int(h["digest"]), int(h["count"]), float(h["weight"])) for h in everyone]

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
                across.Ialltoallv(
                    [sums, (sizes, begins), byte],
                    [inbox, ([own_size] * self.n_hosts, arrivals), byte],
                )
            ]
        )
        # Where each host's image of the whole window would begin.
        images = [inbox.ctypes.data + arrival - own_begin for arrival in arrivals]
        layout.reduce(window, host, images, scale, divisor, self._total)
        in_place = self._mpi.IN_PLACE
        self._wait([across.Iallgatherv(in_place, [total, (sizes, begins), byte])])

    def _meet_locally(self) -> None:
        if self._local.size > 1:
            self._local.agree(self._label, 0)

    # Moving bytes.

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        for piece in self._pieces(tensors):
            self._wait([self._comm.Ibcast([piece, self._mpi.BYTE], root)])

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        self.alltoall([send] * self.size, receive, ())

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        byte = self._mpi.BYTE
        requests = []
        for peer in range(self.size):
            if peer != self.rank:
                for piece in self._pieces(receive[peer]):
                    requests.append(self._comm.Irecv([piece, byte], peer))
        for step in range(1, self.size):  # not all to rank 0 first
            peer = (self.rank + step) % self.size
            for piece in self._pieces(send[peer]):
                requests.append(self._comm.Isend([piece, byte], peer))
        self._wait(requests)

    def _pieces(self, tensors: _native.Tensors) -> Iterator[Any]:
        for address, n_bytes in tensors.buffers():
            for begin in range(0, n_bytes, PIECE_BYTES):
                yield self._memory(address + begin, min(PIECE_BYTES, n_bytes - begin))

    def _memory(self, address: int, n_bytes: int) -> Any:
        return self._mpi.buffer.fromaddress(address, n_bytes)

    # Waiting and ending.

    def _wait(self, requests: list[Any]) -> None:
        """All requests are complete. MPI itself would wait for ever, at full speed, and deaf."""
        test = self._mpi.Request.Testall
        started = time.monotonic()
        n_looks = 0
        try:
            while not test(requests):
                n_looks += 1
                if n_looks < 200:
                    continue
                time.sleep(min(1e-3, 20e-6 * (n_looks - 199)))
                if n_looks % 20 == 0:
                    self._check_peers(started)
        except PeerLostError as error:
            self._broken = str(error)
            self.abandon(str(error))
            raise
        except BaseException:
            self._broken = "this rank was interrupted in the middle of an operation"
            self.abandon("it was interrupted")
            raise

    def _check_peers(self, started: float) -> None:
        self._hear()
        for peer in self._left:
            self._check_left(peer, started, self._doing())
        self._local.check_peers(self._label)

    def check(self, peer: int, name: str) -> None:
        """PeerLostError if `peer`, which this rank needs for `name`, has left or given up."""
        self._hear()
        if peer in self._left:
            self._check_left(peer, 0.0, f"rank {self.rank} waited for it in {name}")
        self._local.check_peers(name)

    def _hear(self) -> None:
        """What peers said about their end has been heard."""
        status = self._mpi.Status()
        while self._control.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            text = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            peer, tag = status.Get_source(), status.Get_tag()
            self._control.Recv([text, self._mpi.BYTE], peer, tag)
            if tag == _GAVE_UP:
                reason = text.tobytes().decode(errors="replace")
                raise PeerLostError(f"rank {peer} gave up while {self._doing()}: {reason}")
            self._left[peer] = time.monotonic()

    def _check_left(self, peer: int, started: float, doing: str) -> None:
        if time.monotonic() - max(self._left[peer], started) > GRACE_S:
            raise PeerLostError(
                f"rank {peer} has left the job (its program ended, or it called shutdown) "
                f"while {doing}"
            )

    def _doing(self) -> str:
        return f"rank {self.rank} waited in {self._label or 'an operation'}"

    def abandon(self, reason: str) -> None:
        self._broken = self._broken or f"this rank gave up: {reason}"
        self._local.abandon(reason)
        self._tell(reason.encode(), _GAVE_UP)

    def leave(self) -> None:
        self._local.leave()
        self._tell(b"", _LEFT)

    def _tell(self, text: bytes, tag: int) -> None:
        if any(tag == told for told, _ in self._goodbyes) or self._mpi.Is_finalized():
            return
        data = np.frombuffer(text[:480], np.uint8)
        for peer in range(self.size):
            if peer != self.rank:
                request = self._control.Isend([data, self._mpi.BYTE], peer, tag)
                self._goodbyes.append((tag, (request, data)))

    def close(self) -> None:
        pass  # MPI frees communicators when it ends; until then late messages may still arrive


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
        self._bells = transport._comm.Dup()
        self._round = 0
        self._is_rung = False
        self._woken = threading.Event()
        self._sent: list[Any] = []

    def meet(self, mine: bytes) -> list[bytes]:
        number = np.array([self._round], np.int64)
        mpi = self._transport._mpi
        self._sent = [request for request in self._sent if not request[0].Test()]
        for peer in range(self.size):
            if peer != self.rank:
                self._sent.append((self._bells.Isend([number, mpi.BYTE], peer, self._BELL), number))
        self._round += 1
        self._is_rung = False
        headers = self._transport.agree(
            0, count=len(mine), label="the matching of asynchronous operations"
        )
        received = [np.empty(header.count, np.uint8) for header in headers]
        received[self.rank] = np.frombuffer(mine, np.uint8)
        tensors = [_native.Tensors([array], writable=False) for array in received]
        self._transport.allgather(tensors[self.rank], tensors)
        return [array.tobytes() for array in received]

    def peer_is_ahead(self) -> bool:
        mpi = self._transport._mpi
        status = mpi.Status()
        while self._bells.Iprobe(mpi.ANY_SOURCE, self._BELL, status):
            number = np.empty(1, np.int64)
            self._bells.Recv([number, mpi.BYTE], status.Get_source(), self._BELL)
            # Bells of rounds that this rank has entered by itself come late.
            self._is_rung = self._is_rung or int(number[0]) >= self._round
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

    def check(self, rank: int, name: str) -> None:
        self._transport.check(rank, name)

    def abandon(self, reason: str) -> None:
        self._transport.abandon(reason)
