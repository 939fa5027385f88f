"""The current world, and who is notified when another takes its place or it has ended.

`start.session` enters and leaves worlds; the layers above read here which one there is. Those below
(collectives, messages, transports) are given what they work with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from horo_lite.errors import NotInitializedError

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.messages import Messages


__all__ = [
    "Device",
    "World",
    "cross_rank",
    "cross_size",
    "device",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "size",
    "world",
]


@dataclass(frozen=True)
class Device:
    """Where a rank computes; its `str()` is `cpu` or `cuda:1`, which torch and others understand.

    Attributes:
        kind: "cpu" or "cuda".
        index: The number of the GPU as this process sees them; 0 for the CPU.
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        """Return "cpu", or like "cuda:1"."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of the job, seen from one of them; unpacks as `rank, device = init()`.

    Attributes:
        rank: This process's number, from 0 to `size - 1`.
        size: The number of ranks.
        local_rank: This rank's number among those of its host.
        local_size: The number of ranks on this host.
        cross_rank: The number of this host among those with a rank of this `local_rank`.
        cross_size: The number of hosts with a rank of this `local_rank`.
        device: Where this rank computes.
        homogeneous: Whether every host has equally many ranks.
        thread_multiple: Whether any thread may call MPI. Where it is False, asynchronous operations
            progress only inside calls.
        group: The group of all ranks.
        cores: How many of its host's cores this rank has to itself: of those that it may use, its
            share, and no more than the control group grants.
        overlap: When gradients leave: "auto", "always" or "never"; see `init`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    device: Device
    homogeneous: bool
    thread_multiple: bool
    group: Group = field(repr=False)
    cores: float = math.inf
    overlap: str = "auto"

    def __iter__(self) -> Iterator[Any]:
        """Yield the rank and the device."""
        return iter((self.rank, self.device))

    @property
    def transport(self) -> str:
        """How arrays travel: solo, shm or mpi; once some on a GPU have, nccl or staged."""
        return self.group.carrier


class _Current(NamedTuple):
    """A world and what belongs to it."""

    world: World
    messages: Messages
    subgroups: list[Group]
    """What `new_group()` made and `free_group()` has not closed."""


_current: _Current | None = None
_n_worlds = 0
_when_renewed: list[Callable[[], object]] = []
_when_ended: list[Callable[[], object]] = []


def enter(world: World, messages: Messages, subgroups: list[Group]) -> None:
    """Make this the current world. Only `start.session` calls it.

    Where there was another in this process before, the callbacks of `on_renewed` are called.

    Args:
        world: The new world.
        messages: What carries its messages.
        subgroups: The list to which `new_group()` adds.
    """
    global _current, _n_worlds
    _current = _Current(world, messages, subgroups)
    _n_worlds += 1
    if _n_worlds > 1:
        for callback in _when_renewed:
            callback()


def leave() -> None:
    """From now on there is no world. Only `start.session` calls it."""
    global _current
    _current = None


def notify_ended() -> None:
    """Call what was given to `on_ended`, after a world was closed. Only `start.session` does."""
    for callback in _when_ended:
        callback()


def on_renewed(callback: Callable[[], object]) -> None:
    """Call back on each rank that is in another world than before.

    Args:
        callback: Called after a second `init()`, or when `elastic.run` goes on in a new world.
    """
    _when_renewed.append(callback)


def on_ended(callback: Callable[[], object]) -> None:
    """Call back on each rank whose world was closed, by `shutdown()` or at the program's end.

    Args:
        callback: Called when all operations are complete.
    """
    _when_ended.append(callback)


def world() -> World:
    """Return the world that `init()` made.

    Returns:
        The same object at each call, until `shutdown()` or until `elastic.run` loses a rank.

    Raises:
        NotInitializedError: Before `init()` and after `shutdown()`.
    """
    if _current is None:
        raise NotInitializedError(
            "horo_lite was shut down: call horo_lite.init() again first, on every rank"
            if _n_worlds
            else "horo_lite is not initialised: call horo_lite.init() first, on every rank"
        )
    return _current.world


def messages() -> Messages:
    """Return what carries messages between two ranks of the world.

    Raises:
        NotInitializedError: There is no world, or this is a forked child.
        PeerLostError: The world's group was given up.
    """
    world().group.check_usable()
    assert _current is not None
    return _current.messages


def groups() -> list[Group]:
    """Return the world's group and, after it, those made of some of its ranks, this one included.

    Raises:
        NotInitializedError: There is no world.
    """
    return [world().group, *subgroups()]


def subgroups() -> list[Group]:
    """Return the list of the groups that `new_group()` made with this rank and that still stand.

    It is the list itself: making or closing one changes it.

    Raises:
        NotInitializedError: There is no world.
    """
    world()
    assert _current is not None
    return _current.subgroups


def is_initialized() -> bool:
    """Tell whether there is a world: True between `init()` and `shutdown()`."""
    return _current is not None


def rank() -> int:
    """Return this process's number, from 0 to `size() - 1`.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().rank


def size() -> int:
    """Return the number of ranks in the world.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().size


def local_rank() -> int:
    """Return this rank's number among the ranks of its host, from 0.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().local_rank


def local_size() -> int:
    """Return the number of ranks on this host.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().local_size


def cross_rank() -> int:
    """Return the number of this host among the hosts that have a rank with this `local_rank()`.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have a rank with this `local_rank()`.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().cross_size


def device() -> Device:
    """Return where this rank computes; its `str()` is `cpu` or like `cuda:1`.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().device


def is_homogeneous() -> bool:
    """Tell whether every host has equally many ranks.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().homogeneous
