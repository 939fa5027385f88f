"""Groups of some of the world's ranks."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from horo_lite import _native, arguments, context
from horo_lite.collectives.calls import gathered
from horo_lite.collectives.group import Group, NullGroup
from horo_lite.errors import MismatchError
from horo_lite.start import ending, mpi, session
from horo_lite.transports import connect
from horo_lite.transports.agreement import explain
from horo_lite.transports.gloo.connections import GlooConnections
from horo_lite.transports.peers import ObjectCommunicator

__all__ = ["free_group", "new_group"]


def new_group(ranks: Sequence[int]) -> Group | NullGroup:
    """Create a group of some of the world's ranks, for operations among these.

    Every rank of the world calls it, including those outside the group, with the same numbers.
    Groups may overlap. `shutdown()` closes all groups that `free_group` has not closed.

    Args:
        ranks: Different numbers of ranks of the world. In the group, they are numbered from 0, in
            this order.

    Returns:
        The group; on a rank outside it, an object that is false (`if group:`), for which operations
        raise a ValueError.

    Raises:
        ValueError: The numbers are not of different ranks of the world, or there is none.
        MismatchError: On every rank, if the arguments differ between ranks.
        PeerLostError: A rank died or left during this.
        NotInitializedError: There is no world.
    """
    world = context.world()
    ranks = [arguments.integer("the rank of a group", rank) for rank in ranks]
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world.size)):
        raise ValueError(
            f"the ranks of a group must be different numbers from 0 to {world.size - 1}, and at "
            f"least one, not {ranks}"
        )
    world.group.agree("new_group", f"ranks {ranks}")
    here = session.current()
    # Ranks outside the group take part only in this.
    comm = _communicator(here.comm, world.group, ranks)
    return _connected(comm, ranks) if world.rank in ranks else NullGroup(world.rank, ranks)


def new_group_of_members(ranks: Sequence[int], name: str) -> Group:
    """Create a group like `new_group`, but called only by its members.

    Args:
        ranks: Different numbers of ranks of the world, including this one.
        name: Distinguishes this group from others created at the same time; the same on its ranks.

    Returns:
        The group.

    Raises:
        MismatchError: On every rank, if MPI has connected ranks that create different groups.
        PeerLostError: A rank died or left during this.
        NotInitializedError: There is no world.
    """
    here = session.current()
    number = _native.hash64(f"{name} of ranks {list(ranks)}".encode())
    comm: Any = None
    if len(ranks) > 1 and _needs_mpi(here.comm, here.world.group):
        members = here.comm.Get_group().Incl(ranks)
        comm = here.comm.Create_group(members, tag=number % (1 << 15))
        members.Free()
        whose = comm.allgather(f"{name} of ranks {list(ranks)}")
        if len(set(whose)) > 1:  # created at the same time, with the same tag
            raise MismatchError(explain("new_group", whose, ranks))
    elif len(ranks) > 1:
        comm = _Members(ranks, number)
    return _connected(comm, ranks)


def _connected(comm: Any, ranks: Sequence[int]) -> Group:
    """Create the group from a communicator of its ranks, which is None for a single rank."""
    here = session.current()
    with mpi.failing_together(comm):
        links = connect(
            comm,
            [here.host_of_rank[rank] for rank in ranks],
            watchdog=here.world.device.kind == "cuda",
            ranks=ranks,
            beside=here.world.group.transport,
        )
    links.write_slots(here.settings.slot_stores)
    ending.watch(links.transports())
    group = Group(links.transport, links.watchdog)
    if comm is not None:
        comm.Free()
    context.subgroups().append(group)
    return group


def free_group(group: Group | NullGroup) -> None:
    """Close a group that `new_group` created. Each of its ranks calls it once.

    Operations that all of them have submitted are completed. A rank that continues to use the group
    gets PeerLostError.

    Args:
        group: The result of `new_group`; on a rank outside the group, this does nothing.
    """
    if isinstance(group, NullGroup):
        return
    if not isinstance(group, Group):
        raise TypeError(f"group must be what new_group() returned, not {group!r}")
    if context.is_initialized() and group in context.subgroups():
        context.subgroups().remove(group)
    group.close("it called free_group()")
    ending.unwatch(group.transports())


def world_ranks_of(members: Any) -> list[int]:
    """Return the ranks in the world of the processes in an mpi4py group.

    Raises:
        ValueError: A process is not of this world, or MPI did not start it.
    """
    world = context.world()
    comm = session.current().comm
    if comm is None:
        return [0] * members.size
    if not session.started_by_mpi():
        raise ValueError("MPI did not start this world, so a communicator cannot be a part of it")
    everyone = comm.Get_group()
    ranks = [int(rank) for rank in members.Translate_ranks(None, everyone)]
    everyone.Free()
    if not set(ranks) <= set(range(world.size)):
        raise ValueError("the communicator has processes that are not ranks of this world")
    return ranks


def _communicator(comm: Any, group: Group, ranks: list[int]) -> Any:
    """Return a communicator of these ranks; None on other ranks, and in a world of one.

    Every rank of the world calls it. `comm` and `group` are the world's.
    """
    is_member = group.rank in ranks
    if comm is None:
        return None
    if _needs_mpi(comm, group):
        from mpi4py import MPI

        place = ranks.index(group.rank) if is_member else 0
        return comm.Split(0 if is_member else MPI.UNDEFINED, place)
    part = _OverWorld(group, ranks)
    if is_member:
        return part
    part.attend()
    return None


def _needs_mpi(comm: Any, group: Group) -> bool:
    """Return whether a group of ranks of the world of `comm` and `group` needs an MPI communicator.

    On one host none is needed; creating one while a rank dies is a risk.
    """
    return not isinstance(comm, ObjectCommunicator) and not group.transport.shares_memory


class _PartOfWorld(ObjectCommunicator):
    """Some ranks of a world, while they create a group; their connections are the world's."""

    def connections(self) -> GlooConnections:
        comm = session.current().comm
        assert isinstance(comm, ObjectCommunicator)  # worlds of MPI use MPI communicators
        return comm.connections()


class _Members(_PartOfWorld):
    """Some ranks of a world, which exchange messages while they create a group."""

    def __init__(self, ranks: Sequence[int], channel: int) -> None:
        self.size = len(ranks)
        self.rank = ranks.index(context.world().rank)
        self._peers = [rank for rank in ranks if rank != context.world().rank]
        self._channel = channel

    def allgather(self, obj: Any, form: Any = object) -> list[Any]:
        data = np.frombuffer(pickle.dumps(obj), np.uint8)
        sizes = self._sent_and_received(
            np.array([data.size]), [np.empty(1, np.int64) for _ in self._peers]
        )
        everyone = self._sent_and_received(data, [np.empty(int(n[0]), np.uint8) for n in sizes])
        objects = [pickle.loads(one.tobytes()) for one in everyone]
        return [*objects[: self.rank], obj, *objects[self.rank :]]

    def _sent_and_received(self, mine: Any, theirs: list[Any]) -> list[Any]:
        """Send `mine` to the other members; return what they sent, in their order."""
        messages = context.messages()
        in_flight = [
            *(messages.isend(mine, peer, 0, self._channel) for peer in self._peers),
            *(
                messages.irecv(array, peer, 0, self._channel)
                for peer, array in zip(self._peers, theirs, strict=True)
            ),
        ]
        for message in in_flight:
            message.name = f"new_group, {message.name}"
            message.wait()
        return theirs


class _OverWorld(_PartOfWorld):
    """Some ranks of a world, while they create a group.

    They communicate with collectives of the whole world, in which the other ranks `attend`.
    """

    def __init__(self, group: Group, ranks: list[int]) -> None:
        self.size = len(ranks)
        self.rank = ranks.index(group.rank) if group.rank in ranks else -1
        self._group = group
        self._ranks = ranks

    def allgather(self, obj: Any, form: Any = object) -> list[Any]:
        return [obj for obj, _ in self._allgather_in_world(obj)]

    def attend(self) -> None:
        """Take part until the others have created their group."""
        while not any(is_over for _, is_over in self._allgather_in_world(None)):
            pass

    def Free(self) -> None:  # noqa: N802
        self._allgather_in_world(None, True)

    def _allgather_in_world(self, obj: Any, is_over: bool = False) -> list[tuple[Any, bool]]:
        everyone = gathered(self._group, (obj, is_over), "new_group")
        return [everyone[r] for r in self._ranks]
