"""MPI as a carrier between hosts: communicators, kept while requests may use them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite.errors import PeerLostError
from horo_lite.transports.hosts.carrier import Carrier, Channel, Done, Message
from horo_lite.transports.mpi.point_to_point import largest_message, point_to_point
from horo_lite.transports.peers import allgather_objects

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.transports.mpi.executor import MainThreadExecutor

# The tag of short messages on a communicator that carries others, too.
SHORT = 1

_kept: list[MpiChannel] = []
"""Channels for messages, whose requests may be in flight until MPI ends."""


def _addresses(messages: Sequence[Message]) -> list[tuple[int, int, int, int]]:
    return [(peer, tag, memory.ctypes.data, memory.nbytes) for peer, tag, memory in messages]


def _at_once(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _noticing_the_dead(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, raising PeerLostError if fault-tolerant MPI reports the death of a rank."""
    from mpi4py import MPI

    def noticing(*args: Any) -> Any:
        try:
            return call(*args)
        except MPI.Exception as error:
            raise PeerLostError(f"a rank died ({error})") from error

    return noticing


class MpiChannel(Channel):
    """Messages over a communicator.

    Args:
        comm: The communicator.
        call: Makes an MPI call, in the thread that may.
        executed: One thread makes the calls of all threads, and lets others continue while it
            waits.
        is_shared: The communicator carries long messages, too; then short ones have the tag SHORT,
            and long ones greater tags.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        call: Callable[..., Any],
        *,
        executed: bool,
        is_shared: bool = False,
    ) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.largest_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32_767)
        self._call = _noticing_the_dead(call)
        self.messages = None if executed else point_to_point(comm)
        """MPI calls without mpi4py, which releases the GIL in each call."""
        tag = SHORT if is_shared else None
        self._native = None if self.messages is None else self.messages.control_channel(tag)
        self._probed = MPI.ANY_TAG if tag is None else tag
        self._n_sent = [0] * comm.size  # short messages, to each peer
        self._n_received = [0] * comm.size
        self._under_way: list[Done] = []

    def exchange(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        if self.messages is not None:
            owner = receive, send
            return self.messages.start(_addresses(receive), _addresses(send), owner)
        return self._polled(self._call(self._post, receive, send))

    def allgather(self, mine: NDArray[np.uint8], everyone: NDArray[np.uint8]) -> Done:
        """Gather every rank's few bytes, like the carrier's allgather."""
        byte = self._mpi.BYTE
        return self._polled([self._call(self.comm.Iallgather, [mine, byte], [everyone, byte])])

    def _polled(self, requests: list[MPI.Request]) -> Done:
        return partial(self._call, self._mpi.Request.Testall, requests)

    def _post(self, receive: Sequence[Message], send: Sequence[Message]) -> list[MPI.Request]:
        byte = self._mpi.BYTE
        receiving = [self.comm.Irecv([memory, byte], peer, tag) for peer, tag, memory in receive]
        return receiving + [
            self.comm.Isend([memory, byte], peer, tag) for peer, tag, memory in send
        ]

    def send(self, texts: Mapping[int, bytes], tag: int) -> None:
        if self._native is not None:
            self._native.send(texts, tag)
        else:
            self._call(self._send, texts, tag)

    def _send(self, texts: Mapping[int, bytes], tag: int) -> None:
        self._under_way = [sent for sent in self._under_way if not sent()]
        for peer, text in texts.items():
            self._n_sent[peer] += 1
            self._under_way.append(self.exchange([], [(peer, tag, np.frombuffer(text, np.uint8))]))

    def receive(self) -> list[tuple[int, int, bytes]]:
        if self._native is not None:
            return self._native.receive()
        received: list[tuple[int, int, bytes]] = self._call(self._receive)
        return received

    def _receive(self) -> list[tuple[int, int, bytes]]:
        received = []
        status = self._mpi.Status()
        try:
            while self.comm.Iprobe(self._mpi.ANY_SOURCE, self._probed, status):
                received.append(self._receive_one(status))
        except self._mpi.Exception as error:  # raised by MPI with fault tolerance
            if not received:
                raise PeerLostError(f"a rank died ({error})") from error
        return received

    def _receive_one(self, probed: MPI.Status) -> tuple[int, int, bytes]:
        peer, tag = probed.Get_source(), probed.Get_tag()
        text = np.empty(probed.Get_count(self._mpi.BYTE), np.uint8)
        self.comm.Recv([text, self._mpi.BYTE], peer, tag)
        self._n_received[peer] += 1
        return peer, tag, text.tobytes()

    def is_over(self) -> bool:
        return bool(self._mpi.Is_finalized())

    def native(self) -> _native.ControlChannel:
        return super().native() if self._native is None else self._native

    def sent(self) -> list[int]:
        """Return the number of short messages that were sent to each rank."""
        if self._native is None:
            return list(self._n_sent)
        return [self._native.n_sent(peer) for peer in range(self.size)]

    def drain(self) -> None:
        """Receive and discard the short messages that have arrived."""
        if self.comm == self._mpi.COMM_NULL:
            return
        with suppress(PeerLostError):
            if self._native is not None:
                self._native.drained([0] * self.size)
            else:
                self._receive()

    def free(self, n_sent: Sequence[int]) -> None:
        """Free the communicator; `n_sent` has the number of short messages from each rank.

        All are received first: otherwise they could appear on the next communicator, which may get
        the same context ID.
        """
        if self._native is not None:
            while not self._native.drained(n_sent):
                time.sleep(1e-4)
        status = self._mpi.Status()
        for peer, n in enumerate(n_sent):
            while self._native is None and self._n_received[peer] < n:
                self.comm.Probe(peer, self._mpi.ANY_TAG, status)
                self._receive_one(status)
        while any([not sent() for sent in self._under_way]):  # noqa: C419  test all of them
            time.sleep(1e-4)
        self.comm.Free()


class MpiCarrier(Carrier):
    """Communicators of one transport, and the memory that requests on them use.

    Args:
        comm: The communicator of the transport's ranks.
        executor: Makes all MPI calls in one thread, if not all threads may.
        is_direct: The transport is for direct calls, which are made in that thread.
    """

    name = "mpi"
    in_use: ClassVar[list[MpiCarrier]] = []
    """All that have not been freed, in the order of creation."""
    unusable: ClassVar[list[MpiCarrier]] = []
    """All that can never be freed."""

    def __init__(
        self, comm: MPI.Comm, executor: MainThreadExecutor | None, *, is_direct: bool
    ) -> None:
        from mpi4py import MPI

        super().__init__()
        self._mpi = MPI
        self.rank = comm.rank
        self.size = comm.size
        self.executor = executor
        self._call: Callable[..., Any] = _at_once
        if executor is not None and is_direct:
            self.serve = executor.serve
        elif executor is not None:
            self._call = executor.call
        # All are created from `comm`: ranks left waiting when one dies meanwhile learn of it there.
        self._parent = comm
        self._main = MpiChannel(comm.Dup(), self._call, executed=executor is not None)
        self.comm = self._main.comm
        self._channels: list[MpiChannel] = []
        self._is_closed = False  # nothing was interrupted, and this rank no longer needs them
        MpiCarrier.in_use.append(self)

    def exchange(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        return self._main.exchange(receive, send)

    def allgather(self, mine: NDArray[np.uint8], everyone: NDArray[np.uint8]) -> Done:
        return self._main.allgather(mine, everyone)

    def native(self) -> _native.Carrier:
        if self._main.messages is not None:
            return self._main.messages
        wait = None if self.serve is None else self._serving_wait
        return self.called_by_native(wait, largest_message())

    def _serving_wait(self, done: Done, on_idle: Callable[[], object]) -> None:
        """Make other threads' calls while waiting. Ignore a PeerLostError if `done`."""
        assert self.serve is not None
        n_polls = 0
        due = time.monotonic() + 0.05
        while not done():
            n_polls += 1
            if n_polls < 200:
                self.serve(0.0)
                continue
            self.serve(min(1e-3, 2e-6 * (n_polls - 199)))
            if time.monotonic() < due:
                continue
            due = time.monotonic() + 0.05
            try:
                on_idle()
            except PeerLostError:
                if not done():
                    raise
                return

    def channel(self) -> MpiChannel:
        executed = self.executor is not None
        self._channels.append(MpiChannel(self._parent.Dup(), self._call, executed=executed))
        return self._channels[-1]

    def world_channel(self) -> MpiChannel:
        """Create it on the world's communicator, which otherwise has only collective operations."""
        executed = self.executor is not None
        channel = MpiChannel(self._parent, self._call, executed=executed, is_shared=True)
        _kept.append(channel)
        return channel

    def close(self, in_good_order: bool) -> None:
        """Allow the communicators to be freed: see free_closed."""
        self._is_closed = in_good_order

    def _free(self, n_sent: Sequence[Sequence[Sequence[int]]]) -> None:
        for i, channel in enumerate(self._channels):
            channel.free([of_rank[i][self.rank] for of_rank in n_sent])
        self.comm.Free()

    @staticmethod
    def drain() -> None:
        """Receive and discard all short messages that have arrived, of any world."""
        carriers = [*MpiCarrier.in_use, *MpiCarrier.unusable]
        for channel in [*_kept, *(each for one in carriers for each in one._channels)]:
            channel.drain()

    @staticmethod
    def free_closed(comm: MPI.Comm) -> None:
        """Free the communicators of former worlds over the same ranks; collective.

        Not earlier: in shutdown() a rank would have to wait for all others. Communicators that some
        rank did not close in good order, or still uses, are kept until MPI ends.
        """
        from mpi4py import MPI

        alike = (MPI.IDENT, MPI.CONGRUENT)
        former = [one for one in MpiCarrier.in_use if MPI.Comm.Compare(one.comm, comm) in alike]
        mine = [(one._is_closed, [channel.sent() for channel in one._channels]) for one in former]
        everyone = allgather_objects(comm, mine)
        MpiCarrier.in_use = [one for one in MpiCarrier.in_use if one not in former]
        if len({len(offers) for offers in everyone}) == 1:
            for i, one in enumerate(former):
                if all(offers[i][0] for offers in everyone):
                    one._free([offers[i][1] for offers in everyone])
                else:
                    MpiCarrier.in_use.append(one)
        else:
            MpiCarrier.unusable += former
