"""The lifetime of a world: `init()`, `shutdown()`, program exit, continuing with fewer ranks."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from horo_lite import context
from horo_lite.collectives.group import Group
from horo_lite.context import Device, World
from horo_lite.errors import HoroLiteError, in_one_line, warn
from horo_lite.messages import Messages
from horo_lite.recording import timeline
from horo_lite.settings import Settings, noise_every, unknown_variables
from horo_lite.start import (
    arrivals,
    clocks,
    devices,
    ending,
    launcher,
    mpi,
    rank_info,
    recording,
    stall,
    trace,
)
from horo_lite.start.cores import cores_of_process, take_cores, threads_chosen
from horo_lite.start.rank_info import Position, RankInfo, position_of
from horo_lite.start.rendezvous import Rendezvous
from horo_lite.start.rendezvous_spec import RendezvousSpec, is_one_host, rendezvous_spec
from horo_lite.transports import connect
from horo_lite.transports.peers import ObjectCommunicator, allgather_objects, host_key

__all__ = ["init", "shutdown"]


class Session(NamedTuple):
    """The state between init() and shutdown()."""

    settings: Settings
    """The settings of init()."""
    given_comm: Any
    """The communicator passed to init()."""
    world: World
    comm: Any
    """The package's own communicator of the world's ranks, from mpi4py or an
    ObjectCommunicator; None in a world of one."""
    host_of_rank: list[int]
    restore_threads: Callable[[], None]
    messages: Messages
    subgroups: list[Group]
    """The groups that new_group() created and free_group() has not closed."""
    began: float

    def close(self, reason: str) -> None:
        """Leave the world and all its groups."""
        if self.world.rank == 0:
            stall.print_summary(stall.detector_of(self.world), time.monotonic() - self.began)
        with contextlib.suppress(ValueError):  # which was raised where noise was to be measured
            if noise_every():
                from horo_lite.training import gradient_noise

                gradient_noise.print_summary([self.world.group, *self.subgroups])
        with contextlib.ExitStack() as closing:  # the last first, each whatever the others raise
            closing.callback(self.messages.close)
            closing.callback(self.world.group.close, reason)
            for group in reversed(self.subgroups):
                closing.callback(group.close, reason)
            closing.callback(context.leave)
            closing.callback(self.messages.deliver)
            if not ending.exits_with_failure():
                closing.callback(context.notify_ending)


_changing = threading.RLock()
"""Held by a thread in init() or shutdown(), so that calls of several threads are serialized."""
_session: Session | None = None


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
    slot_stores: str | None = None,
    overlap: str | None = None,
    test_hosts: str | Sequence[int] | None = None,
    stall_warn_s: float | None = None,
    stall_abort_s: float | None = None,
) -> World:
    """Make this process a rank of the world, ready for collectives.

    Every rank calls it (with `comm`: every rank of that communicator), with the same `test_hosts`
    and the same kind of device. Without a launcher, it creates a world of one and does not import
    MPI. Called again with the same arguments, by any thread, it returns the same world.

    Under torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or with `rank`, `size`
    and `address`, the ranks find each other through a PyTorch store, without MPI, and are connected
    between hosts by its gloo. In a job of MPI's launcher, torchrun's variables are ignored, but not
    these arguments; `address` alone is sufficient there, and under srun.

    Every argument except `comm` can also be set by the variable HORO_LITE_<NAME>; an explicit
    argument takes precedence.

    Args:
        comm: An mpi4py communicator whose ranks form the world; by default all ranks that the
            launcher started.
        rank: This rank's number, if neither MPI nor torchrun started it.
        size: The number of ranks, with `rank`.
        address: A free port of rank 0's host, "host:port", with `rank`.
        start_timeout_s: Seconds within which all ranks must call `init()`, without MPI; by default
            120.
        device: "cpu", "cuda" (the GPU `local_rank` modulo their number) or "cuda:1"; by default a
            GPU if there is one.
        threads: The number of threads of BLAS and OpenMP; by default this rank's share of the
            host's cores, unless OMP_NUM_THREADS or a similar variable is set or the world has one
            rank.
        binding: "keep" keeps the cores to which Open MPI bound this rank; "auto", the default,
            removes the binding if it has too few cores and the user did not request it.
        slot_stores: On one host, how this rank writes the memory through which ranks exchange:
            "cached", "streaming" (past the caches, which is faster if cores share no L3 cache), or
            "auto", the default, which chooses by a measured core-to-core round trip. It does not
            affect results.
        overlap: When gradients that `backward()` produces one by one are sent: "always" during
            `backward()`, "never" before its end, or "auto", the default: among the ranks of one
            host, during `backward()` only if that leaves cores free. It does not affect results.
        test_hosts: Sizes of simulated hosts, such as "2,1", for tests.
        stall_warn_s: Seconds that a rank may wait for another before a waiting rank reports which
            rank is late, and where; by default 30, and 0 for never.
        stall_abort_s: Seconds that a rank may wait before every rank raises StallError; by default
            0 for never.

    Returns:
        The world: rank, size, device and further properties.

    Raises:
        LauncherError: Launcher and MPI library are incompatible; or, without MPI, ranks are missing
            or two have the same number. Change how the job is started.
        MismatchError: On every rank, if the ranks' settings differ, or a rank has failed.
        ValueError: An argument is invalid, or differs from that of the first call.
        PeerLostError: A rank died during this.
    """
    arguments = {
        "rank": rank,
        "size": size,
        "address": address,
        "start_timeout_s": start_timeout_s,
        "device": device,
        "threads": threads,
        "binding": binding,
        "slot_stores": slot_stores,
        "overlap": overlap,
        "test_hosts": test_hosts,
        "stall_warn_s": stall_warn_s,
        "stall_abort_s": stall_abort_s,
    }
    if ending.in_forked_child():
        raise HoroLiteError(
            f"process {os.getpid()} was forked from a rank (a data loader's worker?) and is not a "
            "rank itself: rank() and size() work here, but call init() only in the parent"
        )
    settings = Settings.read(arguments, os.environ)
    with _changing:
        if _session is None:
            ending.open_standard_files()
            with arrivals.in_init():
                found, MPI = _find_ranks(settings, comm)
                made = _session_over(settings, found, MPI, is_ours=False)
            return _begin(made._replace(given_comm=comm))
        if settings.problem:
            raise ValueError(settings.problem)
        earlier = _session.settings
        name, before, now = "comm", _session.given_comm, comm
        if before == now and (name := settings.difference(earlier)):
            before, now = getattr(earlier, name), getattr(settings, name)
        if name:
            raise ValueError(
                f"init() was called before with {name}={before!r}, now with {now!r}: call "
                "shutdown() in between, or omit one call"
            )
        return _session.world


def init_with_store(store: Any, rank: int, size: int, timeout_s: float) -> World:
    """Make this process a rank of the world that a program of torch.distributed describes.

    Every rank calls it, before any other `init()`. In a job of MPI's launcher with these numbers,
    MPI connects the ranks; otherwise they find each other through the store. The world is for the
    CPU, and `init()` without arguments returns it, too.

    Args:
        store: A torch store that is shared by all ranks.
        rank: This rank's number.
        size: The number of ranks.
        timeout_s: Seconds within which all ranks must arrive, without MPI.

    Returns:
        The world.

    Raises:
        LauncherError: Ranks are missing, or cannot be connected.
        MismatchError: On every rank, if the ranks' settings differ, or a rank has failed.
        PeerLostError: A rank died during this.
    """
    by_itself = Settings.read({}, os.environ)
    settings = replace(by_itself, device="cpu")
    launch = launcher.detect(os.environ)
    with _changing:
        assert _session is None
        ending.open_standard_files()
        found, MPI = None, None
        by_mpi = launcher.connects_by_mpi(launch, os.environ)
        if by_mpi and launch is not None and launch[1:] == (rank, size):
            limits = settings.stall_warn_s, settings.stall_abort_s
            with arrivals.in_init():
                found, MPI = mpi.communicator(None, launch, *limits)
        elif size > 1:
            # No port: it may be any torch store, even a file.
            one_host = is_one_host(_host_of(store), size, os.environ)
            where = "the store of torch.distributed"
            spec = RendezvousSpec(rank, size, where, 0, False, "", one_host)
            found = Rendezvous(spec, timeout_s, store)
        return _begin(
            _session_over(settings, found, MPI, is_ours=False)._replace(settings=by_itself)
        )


def _host_of(store: Any) -> str:
    """Return the host of a torch store; "" if it has none."""
    while hasattr(store, "underlying_store"):  # a PrefixStore
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _begin(session: Session) -> World:
    """Make `session` the current one."""
    global _session
    _session = session
    context.enter(session.world, session.messages, session.subgroups)
    if session.settings.timeline and not timeline.is_running():
        trace.start_timeline(session.settings.timeline)
    return session.world


def shutdown() -> None:
    """Leave the world, and restore the thread limits from before `init()`.

    Every rank calls it; asynchronous operations that all ranks have submitted are completed. A rank
    that continues without calling it gets PeerLostError in its next collective. `init()` may be
    called again. Without a world, and in a forked child, this does nothing: if `init()` has raised,
    the end of this rank must still end the job. MPI stays initialised until the process ends.

    Raises:
        HoroLiteError: An asynchronous operation that was not waited for has failed.
    """
    if not ending.in_forked_child():  # in a child, a thread that does not exist may hold the lock
        with _changing:
            _leave()


def _leave() -> None:
    global _session
    if _session is None:
        return
    session, _session = _session, None
    atexit.unregister(_at_exit)
    try:
        session.close("it called shutdown()")
        if session.comm is not None:
            session.comm.Free()
    finally:
        context.notify_ended()
        session.restore_threads()
    # Not after an error, which must still end the job.
    ending.uninstall()


def _at_exit() -> None:
    """Complete what all ranks have submitted, and notify ranks that wait for more from this one."""
    global _session
    if _session is None or ending.in_forked_child():
        return
    ending.program_ends()
    session, _session = _session, None
    try:
        session.close(ending.reason())
    except BaseException as error:
        # An exception raised here is only printed, and the exit code stays 0.
        ending.report(error)
        raise
    finally:
        context.notify_ended()


def _find_ranks(settings: Settings, comm: Any) -> tuple[Any, Any]:
    """Return the communicator of two or more ranks, and mpi4py.MPI; (None, None) for one rank.

    The communicator of ranks that MPI did not start is a Rendezvous, and MPI is None.
    """
    if comm is not None and settings.rank is not None:
        raise ValueError("comm and rank both define the world: pass only one of them")
    spec = rendezvous_spec(settings, os.environ) if comm is None else None
    if spec is not None:
        return (Rendezvous(spec, settings.start_timeout_s) if spec.size > 1 else None), None
    limits = settings.stall_warn_s, settings.stall_abort_s
    return mpi.communicator(comm, launcher.detect(os.environ), *limits)


def _session_over(settings: Settings, comm: Any, MPI: Any, *, is_ours: bool) -> Session:
    """Return a session of the ranks of `comm`, all of which call this.

    With `is_ours`, `comm` is already the package's own, not the caller's.
    """
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    if comm is not None or MPI is not None:
        # Before anything else: the others must not wait for a rank that fails below.
        ending.install(rank, size, MPI)
    else:  # alone: remove what guard_start() may have installed
        ending.uninstall()
    for sentence in unknown_variables(os.environ) if rank == 0 and not is_ours else ():
        warn(f"{sentence} (docs/environment.md lists all variables)")
    if MPI is not None and comm is not None and not is_ours:
        comm = mpi.duplicate(comm, settings.stall_warn_s, settings.stall_abort_s)
    with mpi.failing_together(comm):
        try:
            return _connected_session(settings, comm, MPI)
        except BaseException as error:
            ending.abandon(in_one_line(error))
            raise


def _connected_session(settings: Settings, comm: Any, MPI: Any) -> Session:
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    everyone = _introduce(settings, rank, size, comm)
    host_of_rank = rank_info.numbered([(one.host, one.test_host) for one in everyone])
    positions = [position_of(r, host_of_rank) for r in range(size)]
    position = positions[rank]
    device = _take_device(everyone[rank].device, position)
    threads = settings.threads or threads_chosen()
    cores, restore_threads = take_cores(
        rank,
        [r for r, host in enumerate(host_of_rank) if host == host_of_rank[rank]],
        [one.cores for one in everyone],
        keeps_binding=any(one.settings.binding == "keep" for one in everyone),
        threads=settings.threads,
    )
    thread_multiple = comm is None or MPI is None or MPI.Query_thread() >= MPI.THREAD_MULTIPLE
    token = everyone[0].token
    links = connect(comm, host_of_rank, token=token, watchdog=device.kind == "cuda")
    ending.watch(links.transports(), None if MPI is None else comm)
    links.write_slots(settings.slot_stores)
    stall_detector = links.transport.stall_detector
    if stall_detector is not None:
        stall_detector.set_limits(settings.stall_warn_s, settings.stall_abort_s)
        stall.give_stacks(stall_detector)
    epoch_ns = clocks.epoch_ns(links.transport, several_hosts=len(set(host_of_rank)) > 1)
    recording.keep(rank, size, token, epoch_ns)
    assert links.mailbox is not None
    messages = Messages(links.mailbox, links.transport, token)
    world = World(
        rank=rank,
        size=size,
        local_rank=position.local_rank,
        local_size=position.local_size,
        cross_rank=position.cross_rank,
        cross_size=position.cross_size,
        device=device,
        homogeneous=len({host_of_rank.count(host) for host in host_of_rank}) == 1,
        thread_multiple=thread_multiple,
        group=Group(links.transport, links.watchdog),
        cores=cores,
        overlap=settings.overlap,
        threads=threads,
    )
    # After mpi4py was imported, so that it runs before MPI is finalised.
    atexit.register(_at_exit)
    atexit.register(ending.mark_end)
    return Session(
        settings=settings,
        given_comm=None,
        world=world,
        comm=comm,
        host_of_rank=host_of_rank,
        restore_threads=restore_threads,
        messages=messages,
        subgroups=[],
        began=time.monotonic(),
    )


def _take_device(choice: devices.DeviceChoice, position: Position) -> Device:
    """Return this rank's device, and make it the default of frameworks."""
    device = Device(choice.kind, devices.index_of(choice, position.local_rank))
    if device.kind == "cuda":
        devices.make_current(device.index)
    return device


def _introduce(settings: Settings, rank: int, size: int, comm: Any) -> list[RankInfo]:
    """Exchange and return the information of every rank.

    Raises:
        ValueError: A setting of this rank is invalid.
        MismatchError: The ranks are inconsistent, or another has failed.
    """
    error: ValueError | None = None
    try:
        if settings.problem:
            raise ValueError(settings.problem)
        mine = RankInfo(
            host=host_key(),
            token=os.urandom(8).hex(),
            settings=settings,
            test_host=rank_info.simulated_host(settings.test_hosts, rank, size),
            device=devices.choose(settings.device, rank),
            cores=cores_of_process(launcher.detect(os.environ)),
        ).record()
    except ValueError as wrong:
        error, mine = wrong, rank_info.failure(host_key(), wrong)
    records = [mine] if comm is None else allgather_objects(comm, mine, rank_info.FORM)
    if error is not None:
        raise error
    return rank_info.compare(records)


def current() -> Session:
    """Return the current session.

    Raises:
        NotInitializedError: There is no world.
    """
    context.world()
    assert _session is not None
    return _session


def renew(comm: Any) -> World:
    """Replace the world by one of the remaining ranks, those of `comm`, in its order.

    Each of them calls it. Objects of the former world can no longer be used: its groups raise
    errors. Functions and optimizers use the new world.

    Args:
        comm: A communicator of the remaining ranks, or of these and one more.

    Returns:
        The new world.

    Raises:
        PeerLostError, MPI.Exception: Another rank was lost during this. Call it again, with fewer.
    """
    global _session
    from mpi4py import MPI

    session = current()
    mpi.end_without_finalize()
    atexit.unregister(_at_exit)  # the new world registers it again
    for group in context.groups():
        with contextlib.suppress(Exception):  # operations in flight have failed
            group.close("it continues without the lost ranks")
    session.messages.close()
    session.restore_threads()
    settings = session.settings
    before = session.comm or MPI.COMM_SELF
    left = comm.Get_group().Translate_ranks(None, before.Get_group())
    timeline.pause(set(range(before.size)).difference(left))
    if settings.test_hosts:
        hosts = [session.host_of_rank[rank] for rank in left]
        sizes = tuple(hosts.count(host) for host in dict.fromkeys(hosts))
        settings = replace(settings, test_hosts=sizes)
    made = _session_over(settings, comm if comm.size > 1 else None, MPI, is_ours=True)
    _session = made._replace(settings=session.settings, given_comm=session.given_comm)
    context.enter(_session.world, _session.messages, _session.subgroups)
    timeline.resume(_session.world.rank)
    return _session.world


def abandon(reason: str) -> None:
    """Make peers that wait for this rank, in any group, now or later, raise PeerLostError."""
    for group in context.groups():
        group.abandon(reason)


def communicator() -> Any:
    """Return the world's own mpi4py communicator; None in a world of one, or without MPI."""
    return current().comm if started_by_mpi() else None


def started_by_mpi() -> bool:
    """Return whether this world has several ranks, and MPI connects them."""
    return not isinstance(current().comm, (ObjectCommunicator, type(None)))
