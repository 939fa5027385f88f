"""One rank fails while all are in an operation: the others get an error that names the rank."""

from __future__ import annotations

import re
import textwrap

import pytest
from launch import mpi_name, run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.two_at_a_time]

OVER = [(2, ""), (2, "1,1"), (3, "2,1")]
PRELUDE = """\
import resource, sys, time
import numpy as np
import horo_lite as hvd

world = hvd.init(device="cpu", stall_warn_s=20, stall_abort_s=25)
rank, size = world.rank, world.size
"""


@pytest.mark.parametrize(("np_", "hosts"), OVER)
def test_a_result_that_does_not_fit_is_an_error_on_every_rank(np_: int, hosts: str) -> None:
    """Nothing is sent, all name the rank and the size, and the ranks remain in step."""
    body = """
    class Large:  # an object whose pickle is large, made without keeping a copy of it
        def __reduce__(self):
            return bytes, (bytes(64 << 20),)

    x = np.full((64 << 20) // size, rank, np.uint8)
    everything = [0] * size
    everything[0] = len(x)
    operations = {
        "allgather 'x'": lambda: hvd.allgather(x, name="x"),
        "alltoall 'x'": lambda: hvd.alltoall(x, everything, name="x"),
        "allgather_object 'x'": lambda: hvd.allgather_object(
            Large() if rank == size - 1 else rank, name="x"
        ),
        "broadcast_object 'x'": lambda: hvd.broadcast_object(
            Large() if rank == size - 1 else rank, size - 1, name="x"
        ),
    }
    hvd.allgather(np.ones(8)), hvd.alltoall(np.ones(size)), hvd.allgather_object(rank)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    for label, operate in operations.items():
        if rank == 0:
            used = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limits[1]))
        try:
            operate()
        except MemoryError as error:
            assert type(error) is hvd.AllocationError, repr(error)
            assert "rank 0 could not allocate 64.0 MiB" in str(error), error
            assert label in str(error), error
        else:
            raise AssertionError(f"{label} did not fail")
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert hvd.allreduce(np.array([rank + 1.0]), hvd.Sum)[0] == size * (size + 1) / 2
        assert hvd.allgather(np.array([rank])).tolist() == list(range(size))
    print("all four", flush=True)
    """
    result = run_ranks(_script(body), np_, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    assert result.stdout.count("all four") == np_, str(result)


@pytest.mark.parametrize(("np_", "hosts"), OVER)
def test_a_rank_that_fails_alone_in_an_operation_gives_up_the_group(np_: int, hosts: str) -> None:
    """For every operation: no rank hangs, mixes operations, or misses the reason."""
    body = """
    def fails(*args, **kwargs):
        raise BufferError("this rank alone fails")

    n = 1000
    x = np.full(n, rank + 1.0)
    operations = {
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
        try:
            operate()
        except BufferError as error:
            assert rank == 0, repr(error)
        except hvd.PeerLostError as error:
            assert rank != 0
            assert "rank 0" in str(error) and "BufferError: this rank alone fails" in str(error)
            assert "gave up" in str(error), error
        else:
            raise AssertionError(f"{name} did not fail")
        try:
            hvd.allreduce(x)
        except hvd.PeerLostError as error:
            assert "can no longer be used" in str(error), error
            assert "BufferError: this rank alone fails" in str(error), error
        else:
            raise AssertionError(f"after {name} the world was used on")
        hvd.shutdown()
        hvd.init(device="cpu", stall_warn_s=20, stall_abort_s=25)
        assert hvd.allreduce(np.array([rank + 1.0]), hvd.Sum)[0] == size * (size + 1) / 2
    print("all six", flush=True)
    """
    result = run_ranks(_script(body), np_, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    assert result.stdout.count("all six") == np_, str(result)


def _script(body: str) -> str:
    return PRELUDE + "\n".join(line[4:] for line in body.splitlines()) + "\n"


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_a_reason_is_cut_between_characters(hosts: str) -> None:
    """Whatever the length of the text before the cut."""
    body = """
    for shift in range(4):
        try:
            if rank == 1:
                hvd.world().group.transport.abandon("x" * shift + "данные/€/😀/" * 60)
            hvd.allreduce(np.ones(3))
        except hvd.PeerLostError as error:
            assert "данные/€/😀/" in str(error), error
        hvd.shutdown()
        hvd.init(device="cpu")
    print("four reasons", flush=True)
    """
    result = run_ranks(_script(body), 2, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    assert result.stdout.count("four reasons") == 2, str(result)


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_what_interrupts_an_operation_is_told_to_the_others(hosts: str) -> None:
    body = """
    import os, signal

    def ring(*_):
        raise TimeoutError("rang")

    signal.signal(signal.SIGALRM, ring)
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        while rank == 0 and not os.access("rank 1 has raised", os.F_OK):
            time.sleep(0.01)
        hvd.allreduce(np.ones(3))
    except TimeoutError:
        assert rank == 1
        open("rank 1 has raised", "w").close()
    except hvd.PeerLostError as error:
        assert "rank 1" in str(error) and "was interrupted: TimeoutError: rang) " in str(error)
        print("told", flush=True)
    try:
        hvd.allreduce(np.ones(3))
    except hvd.PeerLostError as error:
        assert "was interrupted" in str(error) and "TimeoutError: rang)" in str(error), error
        print("can no longer be used", flush=True)
    """
    result = run_ranks(_script(body), 2, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    assert result.stdout.count("told") == 1, str(result)
    assert result.stdout.count("can no longer be used") == 2, str(result)


def test_a_rank_that_is_done_may_leave_while_others_still_exchange() -> None:
    """Over MPI: rank 0 sends and receives nothing; rank 1 is late with what rank 2 waits for."""
    body = """
    transport = world.group.transport
    if rank == 1:
        real = transport.alltoall
        def late(*args):
            time.sleep(2.5)
            real(*args)
        transport.alltoall = late
    n = 1 << 20
    splits = [0, 0, n if rank == 1 else 0]
    rows, _ = hvd.alltoall(np.full(sum(splits), rank, np.float32), splits)
    assert rows.shape == (n if rank == 2 else 0,) and (rows == 1).all()
    print("end", flush=True)
    """
    result = run_ranks(_script(body), 3, env={"HORO_LITE_TEST_HOSTS": "1,1,1"}).check()
    assert result.stdout.count("end") == 3, str(result)


HANDLER = """
    def mine(number, frame):
        print("a handler of the program's", flush=True)
        os._exit(5)
    signal.signal(signal.SIGTERM, mine)
"""


@pytest.mark.parametrize("handler", ["", "before", "after"])
def test_who_was_killed_is_said_though_nobody_waits(handler: str) -> None:
    """Once, by one of the ranks that the launcher then ends; the program's handler runs first."""
    if mpi_name() != "openmpi":
        pytest.skip("MPICH's launcher kills the others with a signal that cannot be caught")
    body = f"""
    import os, signal
    {HANDLER if handler == "after" else ""}
    hvd.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """
    code = _script(body)
    if handler == "before":
        code = "import os, signal\n" + textwrap.dedent(HANDLER) + code
    result = run_ranks(code, 3, env={"HORO_LITE_STALL_WARN_S": "0"})
    assert result.returncode != 0, str(result)
    said = re.findall(r"\[horo_lite\] rank 1 \(pid .*was killed by signal 9, and", result.stderr)
    assert len(said) == (0 if handler else 1), str(result)
    assert ("a handler of the program's" in result.stdout) == bool(handler), str(result)


def test_sigterm_ends_as_ever_where_nobody_was_killed() -> None:
    body = """
    import os, signal

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
    result = run_ranks(_script(body), 2)
    assert result.returncode != 0, str(result)
    assert "killed by signal" not in "".join(re.findall(r"\[horo_lite\].*", result.stderr))
