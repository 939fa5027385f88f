"""The world: who this rank is, on which device, and how the job ends when one rank ends badly."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import termios
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from horo_lite import launcher, stall
from horo_lite.errors import (
    HoroLiteError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    StallError,
)

if TYPE_CHECKING:
    from horo_lite import _native
    from horo_lite.collectives import Group
    from horo_lite.messages import Messages
    from horo_lite.transports import Transport


OLDEST_DRIVER = 12010  # the first that takes kernels with 32 KiB of parameters


@dataclass(frozen=True)
class Device:
    """Where a rank computes; prints as `cpu` or `cuda:1`, which torch and others understand."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, eq=False)
class World:
    """All ranks of the job, seen from one of them; unpacks as `rank, device = init()`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    device: Device
    homogeneous: bool  # every host has as many ranks
    thread_multiple: bool  # False: MPI makes progress only inside calls
    group: Group = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.rank, self.device))

    @property
    def transport(self) -> str:
        """How arrays travel: solo, shm or mpi; once some of a GPU have, nccl or staged."""
        return self.group.carrier


class _Session(NamedTuple):
    """What lies between init() and shutdown()."""

    given: dict[str, Any]
    world: World
    comm: Any
    host_of_rank: list[int]
    restore_threads: Callable[[], None]
    messages: Messages
    parts: list[Group]  # that new_group() made and free_group() has not closed
    began: float

    def close(self, reason: str) -> None:
        """This rank has left the world and all its parts."""
        if self.world.rank == 0:
            stall.print_summary(_lookout_of(self.world), time.monotonic() - self.began)
        try:
            for group in self.parts:
                group.close(reason)
        finally:
            try:
                self.world.group.close(reason)
            finally:
                self.messages.close()


_session: _Session | None = None
_ending: _Ending | None = None
_was_shut_down = False
_forked = False
_dies_alone = False


def init(
    comm: Any = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    start_timeout_s: float | None = None,
    device: str | None = None,
    threads: int | str | None = None,
    binding: str | None = None,
    test_hosts: str | Sequence[int] | None = None,
    stall_warn_s: float | None = None,
    stall_abort_s: float | None = None,
) -> World:
    """The world this process belongs to, ready for collectives.

    Every rank calls it (with `comm`: every rank of that mpi4py communicator), with the same
    `test_hosts` and the same kind of device. Without a launcher it is a world of one, and MPI is
    not even imported. Called again with the same arguments it returns the same world.

    Under torchrun, where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, or with `rank`,
    `size` and `address` ("host:port", a free port of rank 0's host), the ranks meet in a store of
    PyTorch's, without MPI; all on one host. Within `start_timeout_s` seconds (120) all must have
    come. Inside a job of MPI's launcher only the arguments count.

    `device`: "cpu", "cuda" (GPU local_rank modulo their number) or "cuda:1"; by itself a GPU
    where there is one. `threads`: of BLAS and OpenMP; by itself this rank's share of the host's
    cores, unless OMP_NUM_THREADS or the like is set or the world is of one. `binding`: "keep"
    stays on the cores where Open MPI put this rank, "auto" leaves them where they are too few and
    nobody asked for it. `test_hosts`: sizes of the hosts that a test pretends, "2,1".
    `stall_warn_s`: how long a rank may wait for another before one of those that wait reports who
    is late, and where; 30, and 0 for never. `stall_abort_s`: how long before every rank raises
    StallError; by itself never. Each can also be a variable, HORO_LITE_DEVICE and so on; the
    argument counts.

    LauncherError: launcher and MPI library do not fit; or, without MPI, ranks are missing or two
    have one number. MismatchError, on every rank: the ranks differ. ValueError: an argument makes
    no sense, or is not that of the first call.
    """
    global _session
    arguments = {
        "rank": rank,
        "size": size,
        "address": address,
        "start_timeout_s": start_timeout_s,
        "device": device,
        "threads": threads,
        "binding": binding,
        "test_hosts": test_hosts,
        "stall_warn_s": stall_warn_s,
        "stall_abort_s": stall_abort_s,
    }
    given = {
        name: value if value is not None else os.environ.get(f"HORO_LITE_{name.upper()}") or None
        for name, value in arguments.items()
    }
    given["comm"] = comm
    if _forked:
        raise HoroLiteError(
            f"process {os.getpid()} was forked from a rank (a data loader's worker?) and is no "
            "rank itself: rank() and size() answer here, but init() is for the parent"
        )
    if _session is None:
        _session = _join(given)
    for name, value in given.items():
        if value != _session.given[name]:
            raise ValueError(
                f"init() was called before with {name}={_session.given[name]!r}, now with "
                f"{value!r}: call shutdown() in between, or leave one call out"
            )
    return _session.world


def _join(given: dict[str, Any], ours: Any = None) -> _Session:
    from horo_lite import __version__
    from horo_lite.collectives import Group
    from horo_lite.messages import Messages
    from horo_lite.transports import connect, mailbox
    from horo_lite.transports.pipes import Pipes

    global _ending
    launch = launcher.detect(os.environ)
    comm, MPI = _communicator(given, launch) if ours is None else _as_ours(ours)
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    if comm is not None or MPI is not None:
        # Already now: a rank that fails below must not leave the others waiting for it.
        _ending = _Ending(rank, size, MPI, _ending)
    elif _ending is not None:  # guard_start()'s: alone, this rank ends for itself
        _ending.uninstall()
        _ending = None

    pipes = Pipes()
    mine: dict[str, Any] = {"version": __version__, "host": launcher.host_key(), "error": None}
    mine |= {"token": os.urandom(8).hex(), "inbox": pipes.place_of_inbox}
    error: ValueError | None = None
    try:
        mine |= _checked(given, rank, size)
        mine["cores"] = tuple(launcher.cores(launch))
    except ValueError as wrong:
        error, mine["error"] = wrong, str(wrong)
    everyone: list[dict[str, Any]] = [mine] if comm is None else comm.allgather(mine)
    if error is not None:
        raise error
    _compare(everyone)

    host_of_rank = _numbered([(each["host"], each["pretended"]) for each in everyone])
    local_rank, local_size, cross_rank, cross_size = place_of(rank, host_of_rank)
    kind, index = mine["device"]
    if kind == "cuda":
        indices = [_gpu_of(r, everyone, host_of_rank) for r in range(size)]
        index = indices[rank]
        if rank == 0:
            _warn_of_shared_gpus(everyone, host_of_rank, indices)
        _use_gpu(index)

    here = [r for r, host in enumerate(host_of_rank) if host == host_of_rank[rank]]
    restore_threads = _take_cores(mine, everyone, rank, here)
    thread_multiple = comm is None or MPI is None or MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    if not thread_multiple and rank == 0:
        _warn(
            "MPI was initialised without THREAD_MULTIPLE: asynchronous operations progress only "
            "inside calls, which must come from this thread. Let horo_lite.init() initialise MPI, "
            "or ask for MPI.THREAD_MULTIPLE."
        )
    # The third compares what the ranks queue on their GPUs.
    transports = connect(comm, host_of_rank, n_transports=3 if kind == "cuda" else 2)
    lookout = getattr(transports[0], "lookout", None)
    if lookout is not None:
        lookout.set_limits(mine["stall_warn_s"], mine["stall_abort_s"])
        stall.give_stacks(lookout)
    if _ending is not None:
        _ending.transports = transports
    token = everyone[0]["token"]
    pipes.connect([each["inbox"] for each in everyone], token)
    messages = Messages(mailbox(comm, transports[0], pipes), transports[0], token)
    group = Group(*transports)
    world = World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        device=Device(kind, index or 0),
        homogeneous=len({host_of_rank.count(host) for host in host_of_rank}) == 1,
        thread_multiple=thread_multiple,
        group=group,
    )
    # After mpi4py was imported, so that it runs before MPI is finalised.
    atexit.register(_at_exit)
    if os.environ.get("HORO_LITE_END"):
        atexit.register(_mark_end)
    began = time.monotonic()
    return _Session(given, world, comm, host_of_rank, restore_threads, messages, [], began)


def _communicator(given: dict[str, Any], launch: launcher.Launch | None) -> tuple[Any, Any]:
    """Our own communicator, of two ranks or more, and mpi4py.MPI; (None, None) for one rank.

    Of ranks that MPI did not start a Rendezvous, and None.
    """
    comm = given["comm"]
    if comm is not None and given["rank"] is not None:
        raise ValueError("comm and rank are two ways to say which world it is: give one of them")
    if comm is None and (place := launcher.appointment(given, os.environ)) is not None:
        from horo_lite.rendezvous import TIMEOUT_S, Rendezvous

        timeout_s = stall.limit("start_timeout_s", given["start_timeout_s"], TIMEOUT_S)
        return (Rendezvous(place, timeout_s) if place.size > 1 else None), None
    loaded: Any = sys.modules.get("mpi4py.MPI")
    running = loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized()
    # Under plain PMIx the size is None, and only MPI knows it.
    launched = launch is not None and launch.size != 1
    if comm is None and not launched and not (running and loaded.COMM_WORLD.size > 1):
        return None, None
    MPI = launcher.load_mpi(launch if comm is None and launched else None)
    if comm is None:
        comm = MPI.COMM_WORLD
    if comm == MPI.COMM_NULL:
        raise ValueError("comm is COMM_NULL: this process is no rank of it and must not call init")
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm must be an mpi4py intracommunicator, not {type(comm).__name__}")
    return (comm.Dup(), MPI) if comm.size > 1 else (None, None)


def _as_ours(comm: Any) -> tuple[Any, Any]:
    """The same of a communicator that is ours already."""
    from mpi4py import MPI

    return (comm if comm.size > 1 else None), MPI


def _checked(given: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The arguments as the ranks compare and use them. ValueError says which is wrong, and why."""
    from horo_lite import _native

    threads = given["threads"]
    if threads is not None and not (str(threads).isdigit() and int(threads) > 0):
        raise ValueError(f"threads must be a positive number, not {threads!r}")
    binding = given["binding"] or "auto"
    if binding not in ("auto", "keep"):
        raise ValueError(f"binding must be 'auto' or 'keep', not {binding!r}")

    hosts, pretended = given["test_hosts"], 0
    if hosts is not None:
        sizes = [str(n).strip() for n in (hosts.split(",") if isinstance(hosts, str) else hosts)]
        if not all(n.isdigit() and int(n) > 0 for n in sizes):
            raise ValueError(f"test_hosts must be positive sizes as in '2,1', not {hosts!r}")
        hosts = [int(n) for n in sizes]
        if sum(hosts) != size:
            raise ValueError(f"test_hosts {hosts} are {sum(hosts)} ranks, but the world has {size}")
        pretended = next(i for i in range(size) if rank < sum(hosts[: i + 1]))

    driver, gpus, why = _native.gpus()
    n_gpus = len(gpus)
    # A CUDA 13 runtime wants a driver for CUDA 13, and the kernels one for 12.1.
    oldest = max(OLDEST_DRIVER, _native.cuda_runtime_version() // 1000 * 1000)
    outdated = (
        f"the NVIDIA driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and this build of "
        f"horo_lite needs one for CUDA {oldest // 1000}.{oldest % 1000 // 10} or newer"
    )
    if n_gpus and driver < oldest and given["device"] is None and rank == 0:
        _warn(f"{outdated}, so the GPUs are left alone: update the driver, or pass device='cpu'")
    wanted = str(given["device"] or ("cuda" if n_gpus and driver >= oldest else "cpu"))
    kind, colon, index = wanted.partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (kind == "cuda" and index.isdigit())):
        raise ValueError(f"device must be 'cpu', 'cuda' or like 'cuda:1', not {wanted!r}")
    if kind == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f"CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else "all are visible"
        if not n_gpus:
            raise ValueError(f"device is {wanted!r}, but {why}; {shown}. Pass device='cpu'?")
        if int(index or 0) >= n_gpus:
            raise ValueError(
                f"device is {wanted!r}, but this process sees only {n_gpus} GPU(s), numbered from "
                f"0 ({shown})"
            )
        if driver < oldest:
            raise ValueError(f"{outdated}: update it, or pass device='cpu'")
    return {
        "threads": None if threads is None else int(threads),
        "binding": binding,
        "test_hosts": hosts,
        "pretended": pretended,
        "device": (kind, int(index) if index else None),
        "gpus": gpus,
        "stall_warn_s": stall.limit("stall_warn_s", given["stall_warn_s"], stall.WARN_S),
        "stall_abort_s": stall.limit("stall_abort_s", given["stall_abort_s"], 0.0),
    }


def _gpu_of(rank: int, everyone: Sequence[dict[str, Any]], host_of_rank: Sequence[int]) -> int:
    """The GPU of a rank, as that rank counts them: what it asked for, or its turn among them."""
    index: int | None = everyone[rank]["device"][1]
    local_rank = place_of(rank, host_of_rank)[0]
    return local_rank % len(everyone[rank]["gpus"]) if index is None else index


def _warn_of_shared_gpus(
    everyone: Sequence[dict[str, Any]], host_of_rank: Sequence[int], indices: Sequence[int]
) -> None:
    first_with: dict[tuple[int, str], int] = {}
    for rank, (host, index) in enumerate(zip(host_of_rank, indices, strict=True)):
        other = first_with.setdefault((host, everyone[rank]["gpus"][index]), rank)
        if other != rank:
            _warn(
                f"{len(everyone)} ranks, but ranks {other} and {rank} on "
                f"{everyone[rank]['host'][0]} have to share a GPU, and NCCL needs one each: arrays "
                "on GPUs will go through the host's memory, which is slow. Start one rank a GPU, "
                "or look at CUDA_VISIBLE_DEVICES"
            )
            return


def _use_gpu(index: int) -> None:
    """Frameworks that are imported already put new arrays on this GPU."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(index)
    if cupy is not None:
        cupy.cuda.Device(index).use()


def _compare(everyone: Sequence[dict[str, Any]]) -> None:
    """MismatchError on every rank alike, unless all ranks have come with the same."""

    def check(what: str, values: Sequence[object], remedy: str) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise MismatchError(
                    f"{what} is {values[0]} on rank 0 (host {everyone[0]['host'][0]}), but {value} "
                    f"on rank {rank} (host {everyone[rank]['host'][0]}): {remedy}"
                )

    for rank, each in enumerate(everyone):
        if each["error"]:
            raise MismatchError(f"init() failed on rank {rank} of {len(everyone)}: {each['error']}")
    check("horo_lite's version", [e["version"] for e in everyone], "install one everywhere")
    check("test_hosts", [e["test_hosts"] for e in everyone], "give every rank the same")
    kinds = [e["device"][0] for e in everyone]
    check("the kind of device", kinds, "pass device='cpu', or look for the missing GPUs")


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    """The same key, the same number; numbers in order of first appearance."""
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def place_of(rank: int, host_of_rank: Sequence[int]) -> tuple[int, int, int, int]:
    """(local_rank, local_size, cross_rank, cross_size), where rank r is on host host_of_rank[r].

    The cross rank counts the hosts that have a rank with this local rank: hosts may be unequal.
    """
    host = host_of_rank[rank]
    local_rank = host_of_rank[:rank].count(host)
    peers = [h for h in dict.fromkeys(host_of_rank) if host_of_rank.count(h) > local_rank]
    return local_rank, host_of_rank.count(host), peers.index(host), len(peers)


def _take_cores(
    mine: dict[str, Any], everyone: Sequence[dict[str, Any]], rank: int, here: Sequence[int]
) -> Callable[[], None]:
    """This rank has the cores and threads due to it; the result gives the threads back."""
    cores = [launcher.Cores(*each["cores"]) for each in everyone]
    own, keep = cores[rank], any(each["binding"] == "keep" for each in everyone)
    usable = [cores[r].own for r in here] if keep else launcher.usable(cores, here)
    target = usable[here.index(rank)]
    narrow = not keep and launcher.is_narrow(own, len(here))
    if target != own.own:
        launcher.widen(target)
    elif narrow and launcher.binding(cores) is None and rank == here[0]:
        _warn(
            f"Open MPI keeps rank {rank} and all its threads on {len(own.own)} of "
            f"{len(own.launchers)} cores: pass --bind-to none to mpiexec, or say with "
            "HORO_LITE_BINDING=keep that it is meant so"
        )
    asked, widened, alone = mine["threads"], target != own.own, len(everyone) == 1
    if asked is None and (launcher.threads_chosen() or (alone and not widened)):
        return lambda: None
    return launcher.set_threads(
        asked or launcher.share(target, usable, own.quota),
        # Pools made while the process was bound have counted too few cores.
        grow=widened or asked is not None,
        variables=not alone or asked is not None,
    )


def _warn(text: str) -> None:
    warnings.warn(f"horo_lite: {text}", RuntimeWarning, stacklevel=4)


def world() -> World:
    """The world that init() made. NotInitializedError before init() and after shutdown()."""
    if _session is None:
        raise NotInitializedError(
            "horo_lite was shut down: call horo_lite.init() again first, on every rank"
            if _was_shut_down
            else "horo_lite is not initialised: call horo_lite.init() first, on every rank"
        )
    return _session.world


def messages() -> Messages:
    """What carries messages between two ranks of the world."""
    world().group.check_usable()
    assert _session is not None
    return _session.messages


def groups() -> list[Group]:
    """The world's group, and those of its parts that this rank is in."""
    group = world().group
    assert _session is not None
    return [group, *_session.parts]


def renew(comm: Any) -> World:
    """The world of the ranks of `comm`: those that are left of the one before, in its order.

    Each of them calls it. Nothing that the former world made can be used any more: its groups
    raise. Callers of its functions, and optimizers, find the new one. If one more rank is lost
    meanwhile, this raises PeerLostError or an error of MPI's, and can be called again, with fewer.
    """
    global _session
    assert _session is not None
    launcher.leave_without_finalize()
    atexit.unregister(_at_exit)  # the new world registers it again
    session = _session
    for group in groups():
        with contextlib.suppress(Exception):  # whatever was in flight has failed
            group.close("it goes on without the ranks that were lost")
    session.restore_threads()
    given = dict(session.given)
    if given["test_hosts"]:
        left = comm.Get_group().Translate_ranks(None, session.comm.Get_group())
        hosts = [session.host_of_rank[rank] for rank in left]
        given["test_hosts"] = [hosts.count(host) for host in dict.fromkeys(hosts)]
    _session = _join(given, comm)._replace(given=session.given)
    for renewed in when_renewed:
        renewed()
    return _session.world


when_renewed: list[Callable[[], None]] = []
"""Called on each rank after `renew`."""


def abandon(reason: str) -> None:
    """Whoever waits for this rank, in whichever group, now or later, raises PeerLostError."""
    for group in groups():
        for transport in group.transports():
            transport.abandon(reason)


def communicator() -> Any:
    """The world's own mpi4py communicator; None in a world of one, or where there is no MPI."""
    return _session.comm if started_by_mpi() and _session is not None else None


def started_by_mpi() -> bool:
    """Whether this world has several ranks, and MPI connects them."""
    from horo_lite.rendezvous import Meeting

    world()
    return _session is not None and not isinstance(_session.comm, (Meeting, type(None)))


def new_group(ranks: Sequence[int]) -> Group | None:
    """A group over some of the world's ranks; None on a rank that is not one of them.

    Every rank of the world calls it, with the same numbers; the new group counts its ranks from 0,
    in that order. Groups may overlap. `shutdown()` closes what `free_group` did not.
    """
    from horo_lite.collectives import Group
    from horo_lite.transports import connect

    world_ = world()
    ranks = [int(rank) for rank in ranks]
    world_.group.agree("new_group", f"ranks {ranks}")
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_.size)):
        raise ValueError(
            f"the ranks of a group must be different numbers from 0 to {world_.size - 1}, and at "
            f"least one, not {ranks}"
        )
    assert _session is not None
    # Ranks outside take part in this and in nothing else.
    comm, is_member = _part(_session.comm, world_, ranks), world_.rank in ranks
    if not is_member:
        return None
    transports = connect(
        comm,
        [_session.host_of_rank[rank] for rank in ranks],
        n_transports=len(world_.group.transports()),
        ranks=ranks,
        beside=world_.group.transport,
    )
    if _ending is not None:
        _ending.transports = [*_ending.transports, *transports]
    group = Group(*transports)
    if comm is not None:
        comm.Free()
    _session.parts.append(group)
    return group


def _part(comm: Any, world: World, ranks: list[int]) -> Any:
    """What those ranks make their group with; None for other ranks, and in a world of one."""
    from horo_lite.rendezvous import Meeting, Part

    is_member = world.rank in ranks
    if comm is None:
        return None
    if not isinstance(comm, Meeting):
        place = ranks.index(world.rank) if is_member else 0
        return comm.Split(0 if is_member else _undefined(), place)
    part = Part(world.group, ranks)
    if is_member:
        return part
    part.attend()
    return None


def abort(why: str) -> NoReturn:
    """The launcher kills all ranks, and the job's exit code is 1."""
    here = world()
    _tell(f"[horo_lite] rank {here.rank} of {here.size} ends the job: {why}\n")
    if _ending is not None:
        _ending.abort(1)
    os._exit(1)


def free_group(group: Group) -> None:
    """What all ranks of a group of `new_group` have submitted is complete, and this rank left it.

    Called by its ranks; who goes on using it finds PeerLostError.
    """
    if _session is not None and group in _session.parts:
        _session.parts.remove(group)
    group.close("it called free_group()")
    if _ending is not None:
        gone = group.transports()
        _ending.transports = [one for one in _ending.transports if one not in gone]


def ranks_of(members: Any) -> list[int]:
    """The world's numbers of the processes in an mpi4py group; ValueError if one is outside."""
    world_ = world()
    assert _session is not None
    if _session.comm is None:
        return [0] * members.size
    if not started_by_mpi():
        raise ValueError("MPI did not start this world, so a communicator cannot be a part of it")
    everyone = _session.comm.Get_group()
    ranks = [int(rank) for rank in members.Translate_ranks(None, everyone)]
    everyone.Free()
    if not set(ranks) <= set(range(world_.size)):
        raise ValueError("the communicator has processes that are no ranks of this world")
    return ranks


def _undefined() -> int:
    from mpi4py import MPI

    return int(MPI.UNDEFINED)


def lookout() -> _native.Lookout | None:
    """Who looks out for ranks that are late; None in a world of one."""
    return _lookout_of(world())


def _lookout_of(world: World) -> _native.Lookout | None:
    return getattr(world.group.transport, "lookout", None)


def is_initialized() -> bool:
    """True between init() and shutdown()."""
    return _session is not None


def shutdown() -> None:
    """The world is left, and thread limits are as before init(), which may be called again.

    Every rank calls it; asynchronous operations that all ranks have asked for are completed. A
    rank that goes on alone finds PeerLostError in its next collective. Without a world, and in a
    forked child, it does nothing. MPI stays initialised until the process ends.
    """
    global _session, _ending, _was_shut_down
    if _session is None or _forked:
        return
    session = _session
    _session, _was_shut_down = None, True
    atexit.unregister(_at_exit)
    try:
        session.close("it called shutdown()")
        if session.comm is not None:
            session.comm.Free()
    finally:
        session.restore_threads()
    # Not after an error, which still has to end the job.
    if _ending is not None:
        _ending.uninstall()
        _ending = None


def rank() -> int:
    """This process's number, from 0 to size() - 1."""
    return world().rank


def size() -> int:
    """How many ranks the world has."""
    return world().size


def local_rank() -> int:
    """This rank's number among the ranks of its host."""
    return world().local_rank


def local_size() -> int:
    """How many ranks this host has."""
    return world().local_size


def cross_rank() -> int:
    """The number of this rank's host among the hosts that have a rank with this local_rank()."""
    return world().cross_rank


def cross_size() -> int:
    """How many hosts have a rank with this local_rank()."""
    return world().cross_size


def device() -> Device:
    """Where this rank computes; str() of it is `cpu` or `cuda:1`."""
    return world().device


def is_homogeneous() -> bool:
    """True where every host has as many ranks."""
    return world().homogeneous


# --- how a rank ends -----------------------------------------------------------------------------


class _Ending:
    """The job ends when this rank ends with an exception, and says which rank it was and why.

    An exception in any thread: what the main thread may wait for would never come. MPI is None
    before init(), and where it did not start the world: then each rank ends itself, and those that
    need it hear of that.
    """

    def __init__(self, rank: int, size: int, MPI: Any, earlier: _Ending | None) -> None:
        self.transports: Sequence[Transport] = ()
        self.MPI = MPI
        self._name = f"rank {rank} of {size} ({socket.gethostname()}, pid {os.getpid()})"
        self._prefix = f"[rank {rank}] "
        self._is_alone = size == 1
        self._exit: tuple[FrameType, int, Any, str] | None = None
        if earlier is not None:  # of guard_start(), or of an init() that failed
            earlier.uninstall()
        self._previous = sys.excepthook, threading.excepthook, sys.exit
        sys.excepthook, threading.excepthook = self.on_exception, self.on_exception_in_thread
        sys.exit = self.exit

    def uninstall(self) -> None:
        """The hooks are what they were, unless somebody has put his own on top."""
        if sys.excepthook == self.on_exception:
            sys.excepthook = self._previous[0]
        if threading.excepthook == self.on_exception_in_thread:
            threading.excepthook = self._previous[1]
        if sys.exit == self.exit:
            sys.exit = self._previous[2]

    def on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """The excepthook; at a prompt, after shutdown and in forked children the previous one."""
        if self._is_over():
            self._previous[0](kind, error, trace)
        else:
            self._end(error, trace, "", lambda: self._previous[0](kind, error, trace))

    def on_exception_in_thread(self, args: threading.ExceptHookArgs) -> None:
        """threading.excepthook."""
        if self._is_over() or args.exc_value is None or isinstance(args.exc_value, SystemExit):
            self._previous[1](args)
        elif _dies_alone and not self._is_alone:
            die(args.exc_value)
        else:
            where = f" in thread {args.thread.name!r}" if args.thread else " in a thread"
            self._end(args.exc_value, args.exc_traceback, where, lambda: self._previous[1](args))

    def exit(self, status: Any = None, /) -> NoReturn:
        """sys.exit, which remembers: nothing tells _at_exit why Python ends."""
        if threading.current_thread() is threading.main_thread():
            outermost = frame = sys._getframe(1)
            while outermost.f_back is not None:
                outermost = outermost.f_back
            said = f"sys.exit({status!r:.200}) at {frame.f_code.co_filename}:{frame.f_lineno}"
            self._exit = outermost, outermost.f_lasti, status, said
        self._previous[2](status)

    def exited(self) -> tuple[Any, str]:
        """The status with which this process ends, and what its peers may be told about why."""
        if self._exit is not None:
            outermost, instruction, status, said = self._exit
            # Somebody may have caught SystemExit, but then the program went on.
            if outermost.f_lasti == instruction:
                return status, said
        return None, "its program ended"

    def _is_over(self) -> bool:
        return _ending is not self or _forked or hasattr(sys, "ps1")

    def _end(
        self,
        error: BaseException,
        trace: TracebackType | None,
        where: str,
        previous: Callable[[], object],
    ) -> None:
        first = not self.transports or self.transports[0].first_to_tell()
        try:
            usual = self._previous[:2] == (sys.__excepthook__, threading.__excepthook__)
            if usual:
                self._report(error, trace, where, first)
            else:
                _tell(f"[horo_lite] {self._name} ends the job{where}:\n")
                previous()
                _tell("")
            # Without THREAD_MULTIPLE another thread than init()'s could wait for that one here.
            if not where or self.MPI is None or self.MPI.Query_thread() == self.MPI.THREAD_MULTIPLE:
                for transport in self.transports:
                    transport.abandon(_in_one_line(error))
        finally:
            # Who was first ends the job. Two aborts at once were seen to crash Open MPI's launcher.
            if not first and self.MPI is not None:
                time.sleep(1.0)
            self.abort(1)

    def abort(self, status: int) -> None:
        """The launcher kills all ranks, where it can be asked to; else this one ends."""
        if self.MPI is None and not self.transports:
            launcher.abort_hydra(status)
        # Where the others died, Open MPI's launcher takes an abort for a success.
        elif self.MPI is None or self._is_alone:
            os._exit(status)
        else:
            self.MPI.COMM_WORLD.Abort(status)

    def _report(
        self, error: BaseException, trace: TracebackType | None, where: str, first: bool
    ) -> None:
        package = str(Path(__file__).parent)
        frames = [at for at in traceback.extract_tb(trace) if package not in at.filename]
        at = "".join(f" (at {at.filename}:{at.lineno}, {at.name})" for at in frames[-1:])
        if isinstance(error, PeerLostError) and not first:
            pass  # the cause lies elsewhere, and should not drown in the words of its victims
        elif isinstance(error, (MismatchError, StallError)) and not first:
            _tell(f"[horo_lite] {self._name}: {type(error).__name__} as well{at}\n")
        elif isinstance(error, (PeerLostError, StallError, KeyboardInterrupt)) or not frames:
            _tell(f"[horo_lite] {self._name}: {_in_one_line(error)}{at}\n")
        else:
            lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
            text = "".join(f"{self._prefix}{line}\n" for line in lines)
            _tell(f"[horo_lite] {self._name} ends the job with an exception{where}:\n{text}")

    def report_exit(self, said: str) -> None:
        _tell(f"[horo_lite] {self._name} ends the job before init(): {said}\n")


@contextlib.contextmanager
def dying_alone() -> Iterator[None]:
    """Inside, the other ranks can go on without this one, whichever of its threads fails."""
    global _dies_alone
    _dies_alone = True
    try:
        yield
    finally:
        _dies_alone = False


def die(error: BaseException) -> NoReturn:
    """This process is gone at once, after its traceback; ranks that survive that go on alone."""
    assert _ending is not None
    trace, package = error.__traceback__, str(Path(__file__).parent)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(package):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).splitlines()
    text = "".join(f"{_ending._prefix}{line}\n" for line in lines)
    _tell(f"[horo_lite] {_ending._name} ends with an exception, and the others go on:\n{text}")
    os.kill(os.getpid(), signal.SIGKILL)
    raise error


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def _at_exit() -> None:
    """Work that all ranks have asked for is done; those that wait for more of this one are told."""
    if _session is None or _forked:
        return
    try:
        _session.close(_ending.exited()[1] if _ending is not None else "its program ended")
    except BaseException as error:
        # An exception raised here is printed and forgotten, and the exit code stays 0.
        if _ending is not None:
            _ending.on_exception(type(error), error, error.__traceback__)
        raise


def _mark_end() -> None:
    """For a launcher whose exit code does not tell whether any rank came to its end."""
    if not _forked:
        with contextlib.suppress(OSError):
            Path(os.environ["HORO_LITE_END"]).touch()


def guard_start() -> None:
    """Until init(), a failure of this rank ends the job where MPICH's launcher would not."""
    global _ending
    launch = launcher.detect(os.environ)
    if (
        launch
        and launch.rank is not None
        and (launch.size or 0) > 1
        and launcher.hydra() is not None
    ):
        _ending = _Ending(launch.rank, launch.size or 0, None, None)
        atexit.register(_at_exit_without_init)


def _at_exit_without_init() -> None:
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if _forked or _ending is None or (MPI is not None and MPI.Is_initialized()):
        return  # forked, alone or done; or MPI's launcher knows this rank, with us or without
    status, said = _ending.exited()
    if status not in (None, 0):
        _ending.report_exit(said)
        _ending.abort(status if isinstance(status, int) else 1)


def _tell(text: str) -> None:
    """`text` has left in one piece, and whoever reads this process's stderr has taken it.

    An abort overtakes what still lies in the pipe, and the launcher may then never print it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    data = text.encode(errors="backslashreplace")
    until = time.monotonic() + 0.5
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]
        while stat.S_ISFIFO(os.fstat(2).st_mode) and time.monotonic() < until:
            if not any(fcntl.ioctl(2, termios.FIONREAD, bytes(4))):
                break
            time.sleep(0.001)


def _in_child() -> None:
    """A forked child is no rank: it ends for itself alone, and the group refuses to serve it."""
    global _forked
    if _session is None:
        return
    _forked = True
    if _ending is not None:
        _ending.uninstall()


os.register_at_fork(after_in_child=_in_child)
