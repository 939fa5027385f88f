"""The current world, and callbacks for when it is replaced or has ended.

`start.session` enters and leaves worlds; the layers above this one read the current world here.
Those below (collectives, messages, transports) receive what they work with as arguments.
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
    """The device of a rank; its `str()` is `cpu` or like `cuda:1`, as torch and others expect.

    Attributes:
        kind: "cpu" or "cuda".
        index: The index of the GPU in this process; 0 for the CPU.
    """

    kind: str
    index: int = 0

    def __str__(self) -> str:
        """Return "cpu" or, for example, "cuda:1"."""
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
        device: This rank's device.
        homogeneous: Whether every host has the same number of ranks.
        thread_multiple: Whether any thread may call MPI: always True between hosts, which need it.
        group: The group of all ranks.
        cores: How many of its host's cores this rank has to itself: its share of those that it may
            use, within the limit of the control group.
        overlap: Whether gradients leave during backward(): "auto", "always" or "never"; see `init`.
        threads: The number of threads of BLAS and OpenMP, if an argument or variable says it; None
            if it is this rank's share of the host's cores.
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
    threads: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the rank and the device."""
        return iter((self.rank, self.device))

    @property
    def transport(self) -> str:
        """The transport of arrays: solo, shm or mpi; nccl or staged once arrays on a GPU use it."""
        return self.group.carrier


class _Current(NamedTuple):
    """A world and what belongs to it."""

    world: World
    messages: Messages
    subgroups: list[Group]
    """The groups that `new_group()` made and `free_group()` has not closed."""


_current: _Current | None = None
_n_worlds = 0
_when_renewed: list[Callable[[], object]] = []
_when_ending: list[Callable[[], object]] = []
_when_ended: list[Callable[[], object]] = []


def enter(world: World, messages: Messages, subgroups: list[Group]) -> None:
    """Make this the current world. Only `start.session` calls it.

    If this process was in another world before, the callbacks of `on_renewed` are called.

    Args:
        world: The new world.
        messages: Carries its messages.
        subgroups: The list to which `new_group()` adds groups.
    """
    global _current, _n_worlds
    _current = _Current(world, messages, subgroups)
    _n_worlds += 1
    if _n_worlds > 1:
        for callback in _when_renewed:
            callback()


def leave() -> None:
    """Leave the current world, so that there is none. Only `start.session` calls it."""
    global _current
    _current = None


def notify_ending() -> None:
    """Call the callbacks of `on_ending`, before leaving a world or waiting in join()."""
    for callback in _when_ending:
        callback()


def notify_ended() -> None:
    """Call the callbacks of `on_ended`, after a world was closed. Only `start.session` calls it."""
    for callback in _when_ended:
        callback()


def on_renewed(callback: Callable[[], object]) -> None:
    """Register a callback for when this process enters another world.

    Args:
        callback: Called after a second `init()`, or when `elastic.run` continues in a new world.
    """
    _when_renewed.append(callback)


def on_ending(callback: Callable[[], object]) -> None:
    """Register a callback for the end of this rank's part in the world's operations.

    It ends in good order, before the world is left; or this rank joins, and may continue later.

    Args:
        callback: Completes operations that only the caller knows to be in progress.
    """
    _when_ending.append(callback)


def on_ended(callback: Callable[[], object]) -> None:
    """Register a callback for when the world is closed, by `shutdown()` or at the program's end.

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
    """Return the `Messages` of the world, which carry messages between two ranks.

    Raises:
        NotInitializedError: There is no world, or this is a forked child.
        PeerLostError: The world's group was given up.
    """
    world().group.check_usable()
    assert _current is not None
    return _current.messages


def groups() -> list[Group]:
    """Return the world's group, followed by the groups of some of its ranks that include this one.

    Raises:
        NotInitializedError: There is no world.
    """
    return [world().group, *subgroups()]


def subgroups() -> list[Group]:
    """Return the list of the groups that `new_group()` made with this rank and that still exist.

    It is the list itself, which changes when a group is made or closed.

    Raises:
        NotInitializedError: There is no world.
    """
    world()
    assert _current is not None
    return _current.subgroups


def is_initialized() -> bool:
    """Return whether there is a world: True from `init()` until `shutdown()` or the exit.

    What was registered with `atexit` before `init()` runs after the world has ended.
    """
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
    """Return this rank's device; its `str()` is `cpu` or like `cuda:1`.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().device


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks.

    Raises:
        NotInitializedError: There is no world.
    """
    return world().homogeneous
