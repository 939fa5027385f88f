"""How bytes get from rank to rank: one small interface, one file a way."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from horo_lite import _native
from horo_lite.errors import LauncherError
from horo_lite.rendezvous import Meeting

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.messages import Mailbox
    from horo_lite.transports.mpi import MpiTransport
    from horo_lite.transports.pipes import Pipes

__all__ = ["Header", "Transport", "connect", "mailbox"]


# The numbers of the transports: for direct calls, and for threads that nobody waits for (watch.py).
DIRECT, WATCH = 0, 2


class Header(NamedTuple):
    """What one rank says when all meet."""

    digest: int
    """A hash of everything that must be alike on all ranks, at most 63 bits."""
    count: int  # type: ignore[assignment]  # hides tuple's method of that name
    """Something that may differ, such as a size."""
    weight: float
    """This rank's weight in a weighted average."""


class Transport(Protocol):
    """What the collectives need. All ranks make the same calls in the same order.

    Only `agree` finds out whether they do; whoever calls anything else has agreed before. A peer
    that dies, leaves or gives up while this rank waits for it raises PeerLostError.
    """

    name: str
    rank: int
    size: int
    ranks: Sequence[int]
    """What messages call each rank: its number in the world."""

    @property
    def host(self) -> Transport:
        """The transport for tensors in the host's memory: this one, unless it is for a GPU's."""

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        """All ranks have met; everyone's header in rank order. `label` is for error messages."""

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
        """Every tensor holds reduced(prescale * x over all ranks) * scale / divisor, in place."""

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        """Every tensor holds what the root's holds."""

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        """receive[r] holds what rank r sent, for every other rank r; the own one is untouched."""

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        """receive[r] holds what rank r had in send[this rank]; the own part is untouched.

        n_bytes[s][d] is what rank s sends to rank d, known to all.
        """

    def abandon(self, reason: str) -> None:
        """Peers that wait for this rank, now or later, raise PeerLostError. Never blocks."""

    def leave(self, reason: str) -> None:
        """This rank takes part in nothing any more; peers that wait for it raise. Never blocks."""

    def silent(self) -> list[int]:
        """Process ids of this host's other ranks, alive or dead, that neither left nor gave up."""

    def first_to_tell(self) -> bool:
        """True for the first rank of the host that asks: what many have to say is said once."""

    def close(self) -> None:
        """What the transport holds is given back."""


class Local(NamedTuple):
    """The ranks of this host, and the memory they share."""

    rank: int
    size: int
    ranks: Sequence[int]
    """Of all of `connect`'s ranks, their numbers in the world."""
    segment: _native.Segment
    group_bytes: int
    scratch_bytes: int
    """For each of the transports; 0 where all ranks are on one host."""
    pids: list[int]
    names: list[str]
    n_transports: int
    here: list[int]
    """The world's numbers of the ranks of this host."""
    leaders: list[int]
    """The first rank of each host, as `connect`'s ranks are numbered."""
    lookout: _native.Lookout

    def group(self, which: int) -> _native.ShmGroup:
        group = _native.ShmGroup(
            self.segment,
            which * self.group_bytes,
            self.rank,
            self.size,
            self.pids,
            self.names,
        )
        if which != WATCH:
            direct = which == DIRECT and self.scratch_bytes == 0
            group.watched_by(self.lookout, self.here, direct)
        return group

    def scratch(self, which: int) -> int:
        """The address of memory that all ranks of this host see."""
        offset = self.n_transports * self.group_bytes + which * self.scratch_bytes
        return self.segment.address + offset


def connect(
    comm: MPI.Comm | Meeting | None,
    host_of_rank: Sequence[int],
    n_transports: int = 2,
    ranks: Sequence[int] | None = None,
    beside: Transport | None = None,
) -> list[Transport]:
    """Independent transports over the ranks of `comm`: for direct calls, for the engine, and more.

    Collective over `comm`. `host_of_rank[r]` numbers the host that rank r runs on; ranks with equal
    numbers share memory. `comm` None is a world of one. For a part of a world, `ranks` are its
    ranks' numbers there, and `beside` is a transport of that world.
    """
    if ranks is None:
        ranks = range(len(host_of_rank))
    if comm is None or comm.size == 1:
        from horo_lite.transports.solo import SoloTransport

        return [SoloTransport(ranks) for _ in range(n_transports)]
    # Who waits in a part of a world must let the world's engine go on: see Funnel.
    funnel = getattr(beside, "funnel", None)
    lookout = getattr(beside, "lookout", None)
    n_hosts = len(set(host_of_rank))
    over_mpi = n_hosts > 1 or funnel is not None
    if over_mpi and isinstance(comm, Meeting):
        whose = [f"{ranks[r]} on host {host}" for r, host in enumerate(host_of_rank)]
        raise LauncherError(
            f"the ranks run on {n_hosts} hosts, or in containers that do not see each other's "
            f"processes (rank {', '.join(whose)}), and MPI did not start them: without MPI a "
            "world is of one host. Start the job with mpiexec, srun or `python -m horo_lite`"
        )
    local = _local(comm, host_of_rank, over_mpi, n_transports, ranks, lookout)
    if local is None and isinstance(comm, Meeting):
        raise LauncherError(
            "the ranks of this host cannot open each other's memory through /proc (different "
            "users, or containers with little rights), and MPI, which would be the other way, did "
            "not start them: start the job with mpiexec or `python -m horo_lite`"
        )
    if local is None:
        warnings.warn(
            "horo_lite: the ranks of a host cannot open each other's memory through /proc "
            "(different users, or containers with separate process namespaces); they exchange "
            "through MPI instead, which is slower",
            stacklevel=3,
        )
        over_mpi = True
        local = _local(comm, range(comm.size), over_mpi, n_transports, ranks, lookout)
        if local is None:
            raise OSError("shared memory could not be made on this host: see the system's limits")
    if not over_mpi:
        from horo_lite.transports.shm import ShmTransport

        transports: list[Transport] = [
            ShmTransport(local.group(i), ranks, local.lookout) for i in range(n_transports)
        ]
        return transports
    from horo_lite.transports.mpi import Funnel, Lines, MpiTransport

    assert not isinstance(comm, Meeting)
    Lines.free_closed(comm)
    funnel = Funnel.if_needed(funnel)
    return [MpiTransport(comm, local, i, funnel) for i in range(n_transports)]


def mailbox(comm: MPI.Comm | Meeting | None, transport: Transport, pipes: Pipes) -> Mailbox:
    """How messages travel between two ranks of a world, whose direct calls use `transport`."""
    if transport.name != "mpi":
        return pipes
    from horo_lite.transports.mpi import MpiMailbox

    assert not isinstance(comm, (Meeting, type(None)))
    pipes.close()
    return MpiMailbox(comm, cast("MpiTransport", transport))


def _local(
    comm: MPI.Comm | Meeting,
    host_of_rank: Sequence[int],
    over_mpi: bool,
    n_transports: int,
    ranks: Sequence[int],
    lookout: _native.Lookout | None,
) -> Local | None:
    """This rank's host; None, on every rank, if some host's ranks cannot share memory.

    A part of a world has the world's lookout.
    """
    from horo_lite.transports.mpi import scratch_bytes

    # As `comm` numbers them: ranks of a host keep their order.
    places = list(host_of_rank)
    here = [r for r, place in enumerate(places) if place == places[comm.rank]]
    group_bytes = _native.ShmGroup.memory_bytes(len(here))
    scratch = scratch_bytes(len(here)) if over_mpi else 0
    board = n_transports * (group_bytes + scratch)
    n_bytes = board + (_native.Lookout.memory_bytes(comm.size) if lookout is None else 0)
    segment = None
    where: tuple[int, int, int] | None = None
    pid = os.getpid()
    name = f"rank {ranks[comm.rank]} (pid {pid} on {socket.gethostname()})"
    if comm.rank == here[0]:
        with suppress(OSError):
            segment = _native.Segment.create(n_bytes)
            where = (pid, segment.fd, segment.token)
    # All in `comm`: whoever has lost a peer revokes it, and nobody can be left in another one.
    everyone = comm.allgather((pid, name, where))
    where = everyone[here[0]][2]
    if segment is None and where is not None:
        with suppress(OSError, RuntimeError):
            segment = _native.Segment.open(where[0], where[1], n_bytes, where[2])
    if not all(comm.allgather(segment is not None)):
        return None
    assert segment is not None
    segment.close_descriptor()
    if lookout is None:
        pids, names, _ = (list(each) for each in zip(*everyone, strict=True))
        lookout = _native.Lookout(segment, board, comm.rank, places, pids, names)
    return Local(
        here.index(comm.rank),
        len(here),
        ranks,
        segment,
        group_bytes,
        scratch,
        [everyone[r][0] for r in here],
        [everyone[r][1] for r in here],
        n_transports,
        [ranks[r] for r in here],
        [places.index(place) for place in sorted(set(places))],
        lookout,
    )
