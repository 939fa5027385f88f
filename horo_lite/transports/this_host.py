"""The ranks of this host, and the memory that their transports share."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from horo_lite import _native
from horo_lite.transports.peers import (
    DESCRIPTOR,
    NAME,
    PID,
    ObjectCommunicator,
    allgather_objects,
)

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Role", "ThisHost", "share_memory"]


class Role(IntEnum):
    """The purpose of a transport of a world, and its index in the host's shared memory."""

    OPERATIONS = 0
    WATCHDOG = 1


# PID, name, location of the host's shared memory
_CONTRIBUTION = (PID, NAME, [None, (PID, DESCRIPTOR, range(1 << 62))])


@dataclass(frozen=True)
class ThisHost:
    """The ranks of this host, and the memory they share."""

    rank: int
    """This process's rank among those of the host."""
    size: int
    ranks: Sequence[int]
    """The numbers of all of the communicator's ranks in the world."""
    segment: _native.Segment
    group_bytes: int
    scratch_bytes: int
    """For each of the transports; 0 if all ranks are on one host."""
    pids: Sequence[int]
    names: Sequence[str]
    n_transports: int
    here: Sequence[int]
    """The world's numbers of the ranks of this host."""
    hosts: Sequence[Sequence[int]]
    """The communicator's ranks of each host."""
    host: int
    """The index of this host in `hosts`."""
    stall_detector: _native.StallDetector
    inboxes: Sequence[tuple[int, int]]
    """PID and descriptor for messages of each of the communicator's ranks, if any."""
    is_world: bool
    """False for a part of a world."""

    def group(self, role: Role) -> _native.ShmGroup:
        """Return the C++ group of the host's ranks for that transport."""
        group = _native.ShmGroup(
            self.segment,
            role * self.group_bytes,
            self.rank,
            self.size,
            self.pids,
            self.names,
        )
        if role != Role.WATCHDOG:  # no rank waits for its thread
            group.watched_by(self.stall_detector, self.here)
        if role == Role.OPERATIONS and self.is_world:
            group.report_at_sigterm()
        return group

    def scratch(self, role: Role) -> int:
        """Return the address of memory that all ranks of this host share."""
        offset = self.n_transports * self.group_bytes + role * self.scratch_bytes
        return self.segment.address + offset


def share_memory(
    comm: MPI.Comm | ObjectCommunicator,
    host_of_rank: Sequence[int],
    *,
    between_hosts: bool,
    least_window: int = 0,
    n_transports: int,
    ranks: Sequence[int],
    stall_detector: _native.StallDetector | None,
    inbox: int | None = None,
) -> ThisHost | str:
    """Create memory that the ranks of each host share; if a host cannot, return why on every rank.

    Collective over `comm`. A part of a world has the world's stall detector. `least_window` is that
    of the carrier between hosts, `inbox` the descriptor at which this rank's messages arrive, if
    others are to open it.
    """
    # Ranks of `comm`: ranks of a host keep their order.
    host_numbers = list(host_of_rank)
    here = [r for r, number in enumerate(host_numbers) if number == host_numbers[comm.rank]]
    group_bytes = _native.ShmGroup.memory_bytes(len(here))
    hosts = [
        [r for r, each in enumerate(host_numbers) if each == number]
        for number in sorted(set(host_numbers))
    ]
    host = hosts.index(here)
    scratch_bytes = 0
    if between_hosts:
        scratch_bytes = _native.HostsGroup.memory_bytes(hosts, host, least_window)
    board = n_transports * (group_bytes + scratch_bytes)
    is_world = stall_detector is None
    n_bytes = board + (_native.StallDetector.memory_bytes(comm.size) if is_world else 0)
    segment = None
    why_not = ""
    where: tuple[int, int, int] | None = None
    pid = os.getpid()
    name = f"rank {ranks[comm.rank]} (pid {pid} on {socket.gethostname()})"
    if comm.rank == here[0]:
        try:
            segment = _native.Segment.create(n_bytes)
            where = (pid, segment.fd, segment.token)
        except OSError as error:
            why_not = _why_not(error)
    form = (*_CONTRIBUTION, None if inbox is None else DESCRIPTOR)
    # Only on `comm`: a rank that has lost a peer revokes it, and no rank may be left waiting on
    # another communicator.
    everyone = allgather_objects(comm, (pid, name, where, inbox), form)
    where = everyone[here[0]][2]
    if segment is None and where is not None:
        try:
            segment = _native.Segment.open(where[0], where[1], n_bytes, where[2])
        except (OSError, RuntimeError) as error:
            why_not = _why_not(error)
    reasons = allgather_objects(comm, why_not, str)
    if any(reasons):
        return "; ".join(f"rank {ranks[r]}: {each}" for r, each in enumerate(reasons) if each)
    assert segment is not None
    segment.close_descriptor()
    pids = [each[0] for each in everyone]
    names = [each[1] for each in everyone]
    if stall_detector is None:
        stall_detector = _native.StallDetector(segment, board, comm.rank, host_numbers, pids, names)
    return ThisHost(
        rank=here.index(comm.rank),
        size=len(here),
        ranks=ranks,
        segment=segment,
        group_bytes=group_bytes,
        scratch_bytes=scratch_bytes,
        pids=[pids[r] for r in here],
        names=[names[r] for r in here],
        n_transports=n_transports,
        here=[ranks[r] for r in here],
        hosts=hosts,
        host=host,
        stall_detector=stall_detector,
        inboxes=[(each[0], each[3]) for each in everyone if each[3] is not None],
        is_world=is_world,
    )


def _why_not(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return f"{error}: raise `ulimit -n`"
    if number in (errno.EACCES, errno.EPERM, errno.ENOENT):
        return f"{error}: different users, or containers with separate process namespaces"
    return str(error)
