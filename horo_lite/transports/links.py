"""The transports of a world or of a part of one: which are created, and for which purpose.

All operations share one segment or communicator; the watchdog of GPUs has its own, so that neither
waits for the other. Between hosts threads call MPI one at a time (`mpi_turn`), and make only calls
that return at once. mpi4py's calls, when a world or a group is made, and the program's own may
coincide with these: so between hosts MPI must grant THREAD_MULTIPLE (`require_threads`). On one
host, where MPI is needed for set-up only, any thread level will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from horo_lite.errors import LauncherError, warn
from horo_lite.transports.gloo.carrier import GlooCarrier
from horo_lite.transports.hosts.carrier import Carrier
from horo_lite.transports.hosts.mailbox import HostsMailbox
from horo_lite.transports.hosts.transport import HostsTransport
from horo_lite.transports.interface import Transport
from horo_lite.transports.mailbox import Mailbox
from horo_lite.transports.mpi.carrier import MpiCarrier, require_threads
from horo_lite.transports.peers import NAME, ObjectCommunicator, allgather_objects
from horo_lite.transports.pipes import Pipes
from horo_lite.transports.shm import ShmTransport
from horo_lite.transports.solo import SoloTransport
from horo_lite.transports.this_host import Role, share_memory

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Links", "connect"]


@dataclass(frozen=True)
class Links:
    """What connects the same ranks."""

    transport: Transport
    """For all operations."""
    watchdog: Transport | None = None
    """For comparing what the ranks queue on their GPUs, if they have any."""
    mailbox: Mailbox | None = None
    """For messages between two ranks; only in a complete world."""

    def transports(self) -> list[Transport]:
        """Return all transports."""
        return [self.transport, *([] if self.watchdog is None else [self.watchdog])]

    def write_slots(self, stores: str) -> None:
        """Choose how to write slots, the shared memory for exchanges between ranks of a host.

        Args:
            stores: "auto", "cached" or "streaming". Has no effect in a world of several hosts.
        """
        for transport in self.transports():
            if transport.native_group is not None:
                transport.native_group.write_slots(stores)


def connect(
    comm: MPI.Comm | ObjectCommunicator | None,
    host_of_rank: Sequence[int],
    *,
    token: str = "",
    watchdog: bool = False,
    ranks: Sequence[int] | None = None,
    beside: Transport | None = None,
) -> Links:
    """Connect the ranks of `comm`.

    Collective over `comm`.

    Args:
        comm: The ranks' communicator; None for a world of size 1.
        host_of_rank: The number of each rank's host; ranks with equal numbers share memory.
        token: A secret of this world, in hexadecimal digits; the same on all ranks.
        watchdog: Whether there are GPUs to compare.
        ranks: For a part of a world, its ranks' numbers there.
        beside: For a part of a world, that world's transport.

    Raises:
        LauncherError: Without MPI, the ranks of a host cannot share memory, or hosts cannot be
            connected; or MPI, which must carry the bytes, does not let several threads call it.
        OSError: There is no shared memory, not even for one rank.
    """
    if ranks is None:
        ranks = range(len(host_of_rank))
    if comm is None or comm.size == 1:
        solo = SoloTransport(ranks)
        other = SoloTransport(ranks) if watchdog else None
        return Links(solo, other, Pipes() if beside is None else None)
    between_hosts = len(set(host_of_rank)) > 1
    roles = [Role.OPERATIONS, *([Role.WATCHDOG] if watchdog else [])]
    carrier = GlooCarrier if isinstance(comm, ObjectCommunicator) else MpiCarrier
    share = partial(
        share_memory,
        comm,
        least_window=carrier.least_window,
        n_transports=len(roles),
        ranks=ranks,
        stall_detector=None if beside is None else beside.stall_detector,
    )
    pipes = Pipes() if beside is None and not between_hosts else None
    inbox = None if pipes is None else pipes.inbox
    host = share(host_of_rank, between_hosts=between_hosts, inbox=inbox)
    if isinstance(host, str):
        _report_no_shared_memory(comm, host)
        between_hosts = True
        host = share(range(comm.size), between_hosts=True)
        if isinstance(host, str):
            raise OSError(f"horo_lite needs shared memory, which is not available: {host}")
    if not between_hosts:
        detector = host.stall_detector
        shm = {role: ShmTransport(host.group(role), ranks, detector) for role in roles}
        if pipes is not None:
            pipes.connect(host.inboxes, token)
            # Until then no rank may close its inbox in shutdown(): another file could get its
            # descriptor.
            shm[Role.OPERATIONS].agree(0, label="init()")
        return Links(shm[Role.OPERATIONS], shm.get(Role.WATCHDOG), pipes)
    if pipes is not None:
        pipes.close()
    names = allgather_objects(comm, host.names[host.rank], NAME)
    carriers = _carriers(comm, roles, ranks)
    hosts = {role: HostsTransport(carriers[role], host, role, names) for role in roles}
    one = hosts[Role.OPERATIONS]
    mailbox = HostsMailbox(one.carrier.world_channel(), one) if beside is None else None
    return Links(one, hosts.get(Role.WATCHDOG), mailbox)


def _report_no_shared_memory(comm: MPI.Comm | ObjectCommunicator, why: str) -> None:
    """Warn that the ranks of a host will exchange through MPI.

    Raises:
        LauncherError: The ranks were not started by MPI.
    """
    if isinstance(comm, ObjectCommunicator):
        raise LauncherError(
            f"the ranks of this host cannot share memory ({why}), and were not started by MPI, "
            "which could be used instead: start the job with mpiexec or `python -m horo_lite`"
        )
    warn(
        f"the ranks of a host cannot share memory ({why}); they exchange through "
        "MPI instead, which is slower"
    )


def _carriers(
    comm: MPI.Comm | ObjectCommunicator,
    roles: Sequence[Role],
    ranks: Sequence[int],
) -> Mapping[Role, Carrier]:
    """Return the carrier between hosts for each of the transports; collective.

    Raises:
        LauncherError: MPI does not let several threads call it.
    """
    if isinstance(comm, ObjectCommunicator):
        connections = comm.connections()
        first = max(allgather_objects(comm, connections.next_channel, int))
        return {
            role: GlooCarrier(connections, ranks, first + GlooCarrier.N_CHANNELS * i)
            for i, role in enumerate(roles)
        }
    require_threads(comm, ranks)
    MpiCarrier.free_closed(comm)
    return {role: MpiCarrier(comm) for role in roles}
