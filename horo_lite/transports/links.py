"""The transports of a world, or of a part of one: which are made, and what each is for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from horo_lite.errors import LauncherError
from horo_lite.transports.interface import Transport
from horo_lite.transports.mailbox import Mailbox
from horo_lite.transports.mpi.communicators import Communicators
from horo_lite.transports.mpi.executor import MainThreadExecutor
from horo_lite.transports.mpi.mailbox import MpiMailbox
from horo_lite.transports.mpi.transport import MpiTransport
from horo_lite.transports.peers import ObjectCommunicator
from horo_lite.transports.pipes import Pipes
from horo_lite.transports.shm import ShmTransport
from horo_lite.transports.solo import SoloTransport
from horo_lite.transports.this_host import Role, share_memory

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Links", "connect"]


@dataclass(frozen=True)
class Links:
    """Independent ways between the same ranks: a wait on one does not hold up another."""

    direct: Transport
    """For direct calls, which are matched by position."""
    engine: Transport
    """For asynchronous operations, which are matched by name."""
    watchdog: Transport | None = None
    """For comparing what the ranks queue on their GPUs, where they have some."""
    mailbox: Mailbox | None = None
    """For messages between two ranks; of a world as a whole only."""

    def transports(self) -> list[Transport]:
        """All of them."""
        return [self.direct, self.engine, *([] if self.watchdog is None else [self.watchdog])]

    def write_slots(self, stores: str) -> None:
        """Choose how slots are written: shared memory through which the ranks of one host exchange.

        Args:
            stores: "auto", "cached" or "streaming". Of no effect in a world of several hosts.
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
        comm: The ranks' communicator; None for a world of one.
        host_of_rank: Numbers the host of each rank; ranks with equal numbers share memory.
        token: What only this world knows, in hexadecimal digits; alike on all ranks.
        watchdog: Whether there are GPUs to compare.
        ranks: Of a part of a world, its ranks' numbers there.
        beside: Of a part of a world, the transport of that world's direct calls.

    Raises:
        LauncherError: Without MPI, the ranks are on several hosts or cannot share memory.
        OSError: There is no shared memory even for one rank.
    """
    if ranks is None:
        ranks = range(len(host_of_rank))
    if comm is None or comm.size == 1:
        solo = SoloTransport(ranks)
        others = SoloTransport(ranks), SoloTransport(ranks) if watchdog else None
        return Links(solo, *others, Pipes() if beside is None else None)
    # Who waits in a part of a world must let the world's engine go on.
    executor = None if beside is None else beside.executor
    n_hosts = len(set(host_of_rank))
    over_mpi = n_hosts > 1 or executor is not None
    if over_mpi and isinstance(comm, ObjectCommunicator):
        whose = [f"{ranks[r]} on host {host}" for r, host in enumerate(host_of_rank)]
        raise LauncherError(
            f"the ranks run on {n_hosts} hosts, or in containers that do not see each other's "
            f"processes (rank {', '.join(whose)}), and MPI did not start them: without MPI a "
            "world is limited to one host. Start the job with mpiexec, srun or "
            "`python -m horo_lite`"
        )
    roles = [Role.DIRECT, Role.ENGINE, *([Role.WATCHDOG] if watchdog else [])]
    stall_detector = None if beside is None else beside.stall_detector
    pipes = Pipes() if beside is None and not over_mpi else None
    inbox = None if pipes is None else pipes.inbox
    host = share_memory(
        comm,
        host_of_rank,
        over_mpi=over_mpi,
        n_transports=len(roles),
        ranks=ranks,
        stall_detector=stall_detector,
        inbox=inbox,
    )
    if isinstance(host, str) and isinstance(comm, ObjectCommunicator):
        raise LauncherError(
            f"the ranks of this host cannot share memory ({host}), and MPI, which could be used "
            "instead, did not start them: start the job with mpiexec or `python -m horo_lite`"
        )
    if isinstance(host, str):
        warnings.warn(
            f"horo_lite: the ranks of a host cannot share memory ({host}); they exchange through "
            "MPI instead, which is slower",
            stacklevel=3,
        )
        over_mpi = True
        host = share_memory(
            comm,
            range(comm.size),
            over_mpi=True,
            n_transports=len(roles),
            ranks=ranks,
            stall_detector=stall_detector,
        )
        if isinstance(host, str):
            raise OSError(f"horo_lite needs shared memory, and there is none: {host}")
    if not over_mpi:
        detector = host.stall_detector
        shm = {role: ShmTransport(host.group(role), ranks, detector) for role in roles}
        if pipes is not None:
            pipes.connect(host.inboxes, token)
            # Before that none may close its inbox in shutdown(): another file could get its number.
            shm[Role.DIRECT].agree(0, label="init()")
        return Links(shm[Role.DIRECT], shm[Role.ENGINE], shm.get(Role.WATCHDOG), pipes)
    assert not isinstance(comm, ObjectCommunicator)
    if pipes is not None:
        pipes.close()
    Communicators.free_closed(comm)
    executor = MainThreadExecutor.if_needed(executor)
    mpi = {role: MpiTransport(comm, host, role, executor) for role in roles}
    mailbox = MpiMailbox(comm, mpi[Role.DIRECT]) if beside is None else None
    return Links(mpi[Role.DIRECT], mpi[Role.ENGINE], mpi.get(Role.WATCHDOG), mailbox)
