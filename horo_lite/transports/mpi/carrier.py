"""MPI as a carrier between hosts: communicators, kept while requests may use them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from horo_lite import _native
from horo_lite.errors import LauncherError, PeerLostError, ranks_in_words
from horo_lite.transports.hosts.carrier import Carrier, Channel, Done, Message
from horo_lite.transports.mpi.point_to_point import point_to_point
from horo_lite.transports.peers import allgather_objects

if TYPE_CHECKING:
    from mpi4py import MPI

# The tag of short messages on a communicator that carries others, too.
SHORT = 1

_kept: list[MpiChannel] = []
"""Channels for messages, whose requests may be in flight until MPI ends."""


def require_threads(comm: MPI.Comm, ranks: Sequence[int]) -> None:
    """Check that MPI lets any thread of any rank call it. Every rank of `comm` calls this.

    THREAD_SERIALIZED is not enough: while threads of this package call MPI (one at a time), the
    program may call it as well, and so does mpi4py when this package creates a world or a group.

    Args:
        comm: The ranks' communicator.
        ranks: Their numbers in the world, for the message.

    Raises:
        LauncherError: On every rank, if MPI did not grant THREAD_MULTIPLE on one of them.
    """
    import mpi4py
    from mpi4py import MPI

    rc = mpi4py.rc
    requested = f"thread_level = {rc.thread_level!r}" if rc.threads else "threads = False"
    of_rank = allgather_objects(comm, (MPI.Query_thread(), requested))
    ranks_at: dict[int, list[int]] = {}
    for rank, (level, _) in zip(ranks, of_rank, strict=True):
        if level < MPI.THREAD_MULTIPLE:
            ranks_at.setdefault(level, []).append(rank)
    if not ranks_at:
        return
    names = {
        MPI.THREAD_SINGLE: "THREAD_SINGLE",
        MPI.THREAD_FUNNELED: "THREAD_FUNNELED",
        MPI.THREAD_SERIALIZED: "THREAD_SERIALIZED",
    }
    granted = ", ".join(f"{names[level]} on {ranks_in_words(at)}" for level, at in ranks_at.items())
    requested = next(asked for level, asked in of_rank if level < MPI.THREAD_MULTIPLE)
    if requested == "thread_level = 'multiple'":
        cause = (
            "The program, or a library that it uses, has initialised MPI before init(), or the MPI "
            "library does not grant more"
        )
    else:
        cause = f"The program, or a variable MPI4PY_RC_…, has set mpi4py.rc.{requested}"
    raise LauncherError(
        "ranks that exchange through MPI, as between hosts, need MPI.THREAD_MULTIPLE, since "
        "threads of horo_lite call MPI beside the program's; but MPI was initialised with "
        f"{granted}. {cause}. What to do: let horo_lite.init() initialise MPI, or request "
        "MPI.THREAD_MULTIPLE before (mpi4py.rc.thread_level = 'multiple', which is the default, "
        "or MPI.Init_thread(MPI.THREAD_MULTIPLE)). If the library does not support it: with "
        "PyTorch, ranks can start without MPI, by init(rank=…, size=…, address='host:port')"
    )


def _addresses(messages: Sequence[Message]) -> list[tuple[int, int, int, int]]:
    return [(peer, tag, memory.ctypes.data, memory.nbytes) for peer, tag, memory in messages]


class MpiChannel(Channel):
    """Messages over a communicator, without mpi4py, which releases the GIL in each call.

    Args:
        comm: The communicator.
        is_shared: The communicator carries long messages, too; then short ones have the tag SHORT,
            and long ones greater tags.
    """

    def __init__(self, comm: MPI.Comm, *, is_shared: bool = False) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.largest_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32_767)
        self.messages = point_to_point(comm)
        self._short = self.messages.control_channel(SHORT if is_shared else None)

    def start(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        owner = receive, send
        return self.messages.start(_addresses(receive), _addresses(send), owner)

    def send(self, texts: Mapping[int, bytes], tag: int) -> None:
        self._short.send(texts, tag)

    def receive(self) -> list[tuple[int, int, bytes]]:
        return self._short.receive()

    def native(self) -> _native.ControlChannel:
        return self._short

    def sent(self) -> list[int]:
        """Return the number of short messages that were sent to each rank."""
        return [self._short.n_sent(peer) for peer in range(self.size)]

    def drain(self) -> None:
        """Receive and discard the short messages that have arrived."""
        if self.comm != self._mpi.COMM_NULL:
            with suppress(PeerLostError):
                self._short.drained([0] * self.size)

    def free(self, n_sent: Sequence[int]) -> None:
        """Free the communicator; `n_sent` has the number of short messages from each rank.

        All are received first: otherwise they could appear on the next communicator, which may get
        the same context ID.
        """
        while not self._short.drained(n_sent):
            time.sleep(1e-4)
        self.comm.Free()


class MpiCarrier(Carrier):
    """Communicators of one transport, and the memory that requests on them use.

    Args:
        comm: The communicator of the transport's ranks.
    """

    name = "mpi"
    in_use: ClassVar[list[MpiCarrier]] = []
    """All that have not been freed, in the order of creation."""
    unusable: ClassVar[list[MpiCarrier]] = []
    """All that can never be freed."""

    def __init__(self, comm: MPI.Comm) -> None:
        super().__init__()
        self.rank = comm.rank
        self.size = comm.size
        # All are created from `comm`: ranks left waiting when one dies meanwhile learn of it there.
        self._parent = comm
        self._main = MpiChannel(comm.Dup())
        self.comm = self._main.comm
        self._channels: list[MpiChannel] = []
        self._is_closed = False  # nothing was interrupted, and this rank no longer needs them
        MpiCarrier.in_use.append(self)

    def start(self, receive: Sequence[Message], send: Sequence[Message]) -> Done:
        return self._main.start(receive, send)

    def native(self) -> _native.Carrier:
        return self._main.messages

    def channel(self) -> MpiChannel:
        self._channels.append(MpiChannel(self._parent.Dup()))
        return self._channels[-1]

    def world_channel(self) -> MpiChannel:
        """Create it on the world's communicator, which otherwise has only collective operations."""
        channel = MpiChannel(self._parent, is_shared=True)
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
