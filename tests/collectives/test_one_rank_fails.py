"""One rank fails while all are in an operation: the others get an error that names the rank."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import mpi_name, run_ranks
from worlds import on_ranks

import horo_lite as hvd

ACROSS = pytest.param("1,1", marks=pytest.mark.mpi)
OVER = [
    (2, ""),
    pytest.param(2, "1,1", marks=pytest.mark.mpi),
    pytest.param(3, "2,1", marks=pytest.mark.mpi),
]


def init() -> tuple[int, int]:
    world = hvd.init(device="cpu", stall_warn_s=20, stall_abort_s=25)
    return world.rank, world.size


class Large:
    """An object whose pickle is large, made without keeping a copy of it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(64 << 20),)


def allocate_too_much() -> None:
    rank, size = init()
    x = np.full((64 << 20) // size, rank, np.uint8)
    everything = [len(x)] + [0] * (size - 1)
    large = Large() if rank == size - 1 else rank
    operations: dict[str, Callable[[], object]] = {
        "allgather 'x'": lambda: hvd.allgather(x, name="x"),
        "alltoall 'x'": lambda: hvd.alltoall(x, everything, name="x"),
        "allgather_object 'x'": lambda: hvd.allgather_object(large, name="x"),
        "broadcast_object 'x'": lambda: hvd.broadcast_object(large, size - 1, name="x"),
    }
    hvd.allgather(np.ones(8))
    hvd.alltoall(np.ones(size))
    hvd.allgather_object(rank)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    for label, operate in operations.items():
        if rank == 0:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limits[1]))
        try:
            with pytest.raises(MemoryError) as raised:
                operate()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert raised.type is hvd.AllocationError
        assert "rank 0 could not allocate 64.0 MiB" in str(raised.value)
        assert label in str(raised.value)
        assert hvd.allreduce(np.array([rank + 1.0]), hvd.Sum)[0] == size * (size + 1) / 2
        assert hvd.allgather(np.array([rank])).tolist() == list(range(size))


@pytest.mark.served
@pytest.mark.parametrize(("ranks", "hosts"), OVER)
def test_a_result_that_does_not_fit_is_an_error_on_every_rank(ranks: int, hosts: str) -> None:
    """Nothing is sent, all name the rank and the size, and the ranks remain in step."""
    # What earlier tests have freed must not serve a large allocation.
    unmapped_at_once = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    on_ranks(allocate_too_much, ranks, hosts=hosts, job_env=unmapped_at_once)


class OnlyRank0:
    """An object that only rank 0 can unpickle, as if it alone could import the class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return only_on_rank_0, ()


def only_on_rank_0() -> str:
    if hvd.rank() != 0:
        raise ModuleNotFoundError("no module that only rank 0 has")
    return "loaded"


class Momentum:
    """An optimizer whose state cannot be read on rank 1."""

    def step(self) -> None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        if hvd.rank() == 1:
            raise OSError("its file is missing")
        return {"momentum": 0.9}


def fail_with_objects() -> None:
    rank, size = init()
    lock = threading.Lock() if rank == 1 else rank
    state = hvd.elastic.State(epoch=rank)
    state.lock = lock
    no_lock = "on rank 1, TypeError: a lock cannot be sent to other processes"
    no_class = "; ".join(
        f"on rank {r}, TypeError: .* cannot be read here .ModuleNotFoundError: .*classes.*"
        for r in range(1, size)
    )
    cases: list[tuple[str, Callable[[], object]]] = [
        (no_lock, lambda: hvd.broadcast_object(lock, 1)),
        (no_lock, lambda: hvd.allgather_object(lock, name="x")),
        (no_class, lambda: hvd.broadcast_object(OnlyRank0())),
        (no_class, lambda: hvd.allgather_object(OnlyRank0())),
        ("on rank 1, OSError: its file", lambda: hvd.broadcast_optimizer_state(Momentum(), 1)),
        ("on rank 1, TypeError: state.lock is a lock", lambda: state.sync(1)),
    ]
    for text, call in cases:
        with pytest.raises(TypeError, match=f" has failed: {text}"):
            call()
        assert hvd.allgather_object(rank) == list(range(size))
        assert hvd.broadcast_object({rank}, 1) == {1}
    state.sync(0)
    assert state.lock == state.epoch == 0


@pytest.mark.served
@pytest.mark.parametrize(("ranks", "hosts"), OVER)
def test_an_object_that_one_rank_cannot_send_or_read_is_an_error_on_every_rank(
    ranks: int, hosts: str
) -> None:
    on_ranks(fail_with_objects, ranks, hosts=hosts)


def fails(*_: object, **__: object) -> None:
    raise BufferError("this rank alone fails")


def fail_in_operations() -> None:
    rank, size = init()
    n = 1000
    x = np.full(n, rank + 1.0)
    operations: dict[str, Callable[[], object]] = {
        "allreduce": lambda: hvd.allreduce(x),
        "broadcast": lambda: hvd.broadcast(x, 0),
        "allgather": lambda: hvd.allgather(x),
        "alltoall": lambda: hvd.alltoall(x[: n // size * size]),
        "broadcast_object": lambda: hvd.broadcast_object("x" * n, 0),
        "allgather_object": lambda: hvd.allgather_object("x" * n),
    }
    for name, operate in operations.items():
        operate()
        moves = {"broadcast_object": "broadcast", "allgather_object": "allgather"}.get(name, name)
        if rank == 0:
            setattr(hvd.world().group.transport, moves, fails)
            with pytest.raises(BufferError):
                operate()
        else:
            reason = r"rank 0 .*gave up.*BufferError: this rank alone fails"
            with pytest.raises(hvd.PeerLostError, match=reason):
                operate()
        unusable = r"can no longer be used.*BufferError: this rank alone fails"
        with pytest.raises(hvd.PeerLostError, match=unusable):
            hvd.allreduce(x)
        hvd.shutdown()
        assert init() == (rank, size)
        assert hvd.allreduce(np.array([rank + 1.0]), hvd.Sum)[0] == size * (size + 1) / 2


@pytest.mark.served
@pytest.mark.parametrize(("ranks", "hosts"), OVER)
def test_a_rank_that_fails_alone_in_an_operation_gives_up_the_group(ranks: int, hosts: str) -> None:
    """For every operation: no rank hangs, mixes operations, or misses the reason."""
    on_ranks(fail_in_operations, ranks, hosts=hosts)


def give_long_reasons() -> None:
    for shift in range(4):
        text = "x" * shift + "данные/€/😀/" * 60
        calls = [partial(hvd.allreduce, np.ones(3))]
        if init()[0] == 1:
            hvd.world().group.transport.members.abandon(text)
        else:
            calls.append(partial(hvd.synchronize, hvd.allreduce_async(np.ones(3), name=text)))
        for call in calls:
            with pytest.raises(hvd.PeerLostError, match="данные/€/😀/"):
                call()
        with contextlib.suppress(hvd.PeerLostError):
            hvd.shutdown()


@pytest.mark.served
@pytest.mark.parametrize("hosts", ["", ACROSS])
def test_a_reason_is_cut_between_characters(hosts: str) -> None:
    """Whatever the length of the text before the cut."""
    on_ranks(give_long_reasons, 2, hosts=hosts)


def interrupt_rank_1(raised: Path) -> None:
    rank, _ = init()

    def ring(*_: object) -> None:
        raise TimeoutError("rang")

    before = signal.signal(signal.SIGALRM, ring)
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError):
            hvd.allreduce(np.ones(3))
        raised.touch()
    else:
        while not raised.exists():
            time.sleep(0.01)
        told = r"rank 1.*was interrupted: TimeoutError: rang\) "
        with pytest.raises(hvd.PeerLostError, match=told):
            hvd.allreduce(np.ones(3))
    signal.signal(signal.SIGALRM, before)
    with pytest.raises(hvd.PeerLostError, match=r"was interrupted.*TimeoutError: rang\)"):
        hvd.allreduce(np.ones(3))


@pytest.mark.served
@pytest.mark.parametrize("hosts", ["", ACROSS])
def test_what_interrupts_an_operation_is_told_to_the_others(hosts: str, tmp_path: Path) -> None:
    on_ranks(interrupt_rank_1, 2, tmp_path / "raised", hosts=hosts)


def leave_while_another_is_between(is_blocking: bool, left: Path) -> None:
    rank, _ = init()
    members = hvd.world().group.transport.members
    x = np.ones(3)
    hvd.synchronize(hvd.allreduce_async(x, name="last"))
    if rank == 1:
        hvd.shutdown()
        left.touch()
        return
    while not (left.exists() if rank == 0 else members.given_up()):
        time.sleep(0.01)
    # What is asynchronous makes the engines of all ranks take part in the matching of operations.
    submit = hvd.allreduce if rank == 2 and is_blocking else hvd.allreduce_async
    told = rf"rank 1 .* has left .* while rank {rank} .* waited in allreduce 'next'"
    with pytest.raises(hvd.PeerLostError, match=told):
        hvd.synchronize(submit(x, name="next"))  # type: ignore[arg-type]
    with pytest.raises(hvd.PeerLostError, match=r"rank 1 .* has left") as caught:
        hvd.allreduce(x, name="one more")
    assert "waited in allreduce 'last'" not in str(caught.value)


@pytest.mark.served
@pytest.mark.parametrize("is_blocking", [True, False])
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1,1", marks=pytest.mark.mpi)])
def test_a_loss_is_told_by_the_operation_that_it_prevents(
    hosts: str, is_blocking: bool, tmp_path: Path
) -> None:
    """Not by the last one, though a rank's engine learns of it when the program is in neither."""
    on_ranks(leave_while_another_is_between, 3, is_blocking, tmp_path / "left", hosts=hosts)


def leave_while_others_exchange() -> None:
    rank, _ = init()
    transport = hvd.world().group.transport
    if rank == 1:
        real = transport.alltoall

        def late(*args: Any) -> None:
            time.sleep(2.5)
            real(*args)

        transport.alltoall = late  # type: ignore[method-assign]
    n = 1 << 20
    splits = [0, 0, n if rank == 1 else 0]
    rows, _ = hvd.alltoall(np.full(sum(splits), rank, np.float32), splits)
    assert rows.shape == (n if rank == 2 else 0,)
    assert (rows == 1).all()


@pytest.mark.served
@pytest.mark.mpi
def test_a_rank_that_is_done_may_leave_while_others_still_exchange() -> None:
    """Over MPI: rank 0 sends and receives nothing; rank 1 is late with what rank 2 waits for."""
    on_ranks(leave_while_others_exchange, 3, hosts="1,1,1")


PRELUDE = """\
import os, signal, time
import horo_lite as hvd

rank = hvd.init(device="cpu", stall_warn_s=20, stall_abort_s=25).rank
"""
HANDLER = """
    def mine(number, frame):
        print("a handler of the program's", flush=True)
        os._exit(5)
    signal.signal(signal.SIGTERM, mine)
"""


@pytest.mark.launches
@pytest.mark.two_at_a_time
@pytest.mark.parametrize("handler", ["", "before", "after"])
def test_who_was_killed_is_said_though_nobody_waits(handler: str) -> None:
    """Once, by one of the ranks that the launcher then ends; the program's handler runs first."""
    if mpi_name() != "openmpi":
        pytest.skip("MPICH's launcher kills the others with a signal that cannot be caught")
    body = f"""
    {HANDLER if handler == "after" else ""}
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """
    code = PRELUDE + textwrap.dedent(body)
    if handler == "before":
        code = "import os, signal\n" + textwrap.dedent(HANDLER) + code
    result = run_ranks(code, 3, env={"HORO_LITE_STALL_WARN_S": "0"})
    assert result.returncode != 0, str(result)
    said = re.findall(r"\[horo_lite\] rank 1 \(pid .*was killed by signal 9, and", result.stderr)
    assert len(said) == (0 if handler else 1), str(result)
    assert ("a handler of the program's" in result.stdout) == bool(handler), str(result)


@pytest.mark.launches
def test_sigterm_ends_as_ever_where_nobody_was_killed() -> None:
    body = """
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
    """
    result = run_ranks(PRELUDE + textwrap.dedent(body), 2)
    assert result.returncode != 0, str(result)
    assert "killed by signal" not in "".join(re.findall(r"\[horo_lite\].*", result.stderr))
