"""MPI with less than THREAD_MULTIPLE; and the MPI resources that init() takes and frees."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from launch import mpi_name, run_ranks, start_ranks

pytestmark = pytest.mark.mpi

LEVELS = ("single", "funneled", "serialized")
WORLDS = [(2, "1,1"), (3, "2,1")]
PRELUDE = """\
import faulthandler, os, signal, sys, threading, time, warnings
import mpi4py
mpi4py.rc.thread_level = os.environ["LEVEL"]
warnings.simplefilter("ignore")
faulthandler.dump_traceback_later(80)
import numpy as np
import horo_lite as hvd
world = hvd.init()
assert world.transport == "mpi"
assert not world.thread_multiple
rank, size = world.rank, world.size
total = sum(range(1, size + 1))
"""


def script(body: str) -> str:
    lines = body.strip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return PRELUDE + "\n".join(line[indent:] for line in lines) + "\n"


def env_of(hosts: str, level: str) -> dict[str, str]:
    return {"HORO_LITE_TEST_HOSTS": hosts, "LEVEL": level}


@pytest.mark.parametrize(
    ("ranks", "hosts", "level"), [(2, "1,1", "single"), (3, "2,1", "serialized")]
)
def test_every_check(ranks: int, hosts: str, level: str) -> None:
    """Everything that holds with THREAD_MULTIPLE also holds without."""
    body = """
    import checks
    print(checks.run_all(world.group), "checks passed", flush=True)
    hvd.shutdown()
    """
    result = run_ranks(script(body), ranks, env=env_of(hosts, level), timeout_s=50).check()
    assert len(re.findall(r"\d\d checks passed", result.stdout)) == ranks


@pytest.mark.parametrize("level", LEVELS)
def test_submitted_before_a_barrier_here_and_behind_it_there(level: str) -> None:
    """A rank polls its operation while its peer is in a barrier, and the reverse."""
    body = """
    x = np.full(300_000, rank + 1.0)
    for ahead in [0] * 10 + [1] * 10:
        if rank == ahead:
            handle = hvd.allreduce_async(x, hvd.Sum, name="x")
            for _ in range(20):
                assert not hvd.poll(handle)  # and returns, since the peer waits in the barrier
            hvd.barrier()
        else:
            hvd.barrier()
            handle = hvd.allreduce_async(x, hvd.Sum, name="x")
        assert np.all(hvd.synchronize(handle) == total)
    print("went on", flush=True)
    """
    result = run_ranks(script(body), 2, env=env_of("1,1", level)).check()
    assert result.stdout.count("went on") == 2


WAITS = {
    "synchronize": "[hvd.synchronize(handle) for handle in handles]",
    "poll": "while not all([hvd.poll(handle) for handle in handles]): time.sleep(1e-3)",
    "shutdown": "hvd.shutdown()",
}


def test_one_waits_in_one_way_and_one_in_another() -> None:
    """Several operations are completed whatever call each rank's thread waits in."""
    body = f"""
    import itertools
    waits = {WAITS!r}
    for ways in itertools.product(waits, waits):
        hvd.init()
        xs = [np.full(200_000, rank + i + 1.0) for i in range(3)]
        handles = [hvd.allreduce_async_(x, hvd.Sum, name=str(i)) for i, x in enumerate(xs)]
        exec(waits[ways[rank]])
        assert all(np.all(x == total + size * i) for i, x in enumerate(xs)), ways
        hvd.shutdown()
    print("done", flush=True)
    """
    result = run_ranks(script(body), 2, env=env_of("1,1", "single")).check()
    assert result.stdout.count("done") == 2


# Every rank makes the same direct calls in the same order. From a common order of all events, each
# rank submits earlier, and waits later, by random amounts: so ranks do not deadlock, unless the
# library causes it.
RANDOM = """
import random
seed = int(os.environ["SEED"])
common, own = random.Random(seed), random.Random(1000 * seed + rank + 1)

N = 40
timed = []
for i in range(N):
    if common.random() < 0.4:
        timed.append((i, "direct", i))
    else:
        timed += [(i, "submit", i), (i + 0.5 + common.randrange(6), "wait", i)]
events = [(what, i) for _, what, i in sorted(timed)]

# Earlier submissions, later waits.
placed = []
for at, (what, i) in enumerate(events):
    shift = {"direct": 0, "submit": -own.randrange(6), "wait": own.randrange(6)}[what]
    placed.append((at + shift + {"submit": -0.1, "direct": 0, "wait": 0.1}[what], what, i))
placed.sort()

sizes = {i: common.choice([1, 1000, 150_000, 400_000]) for i in range(N)}
kinds = {i: common.choice(["allreduce", "allgather", "broadcast"]) for i in range(N)}
roots = {i: common.randrange(size) for i in range(N)}

def mine(i):
    return np.full(sizes[i], rank + i + 1.0, np.float32)

def check(i, got):
    if kinds[i] == "allreduce":
        expected = np.full(sizes[i], total + size * i, np.float32)
    elif kinds[i] == "allgather":
        expected = np.repeat(np.arange(size, dtype=np.float32) + i + 1, sizes[i])
    else:
        expected = np.full(sizes[i], roots[i] + i + 1, np.float32)
    assert np.array_equal(got, expected), (i, kinds[i])

def options(i):
    of_kind = {"allreduce": {"op": hvd.Sum}, "broadcast": {"root_rank": roots[i]}}
    return of_kind.get(kinds[i], {})

handles = {}
for _, what, i in placed:
    if own.random() < 0.2:
        time.sleep(own.random() * 0.02)
    if handles and own.random() < 0.3:
        hvd.poll(own.choice(list(handles.values())))
    if what == "direct":
        if i % 3 == 0:
            hvd.barrier()
        else:
            check(i, getattr(hvd, kinds[i])(mine(i), **options(i)))
    elif what == "submit":
        handles[i] = getattr(hvd, kinds[i] + "_async")(mine(i), name=str(i), **options(i))
    else:
        handle = handles.pop(i)
        if own.random() < 0.5:
            while not hvd.poll(handle):
                pass
        check(i, hvd.synchronize(handle))
assert not handles
hvd.shutdown()
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "hosts", "level"),
    [(2, "1,1", "funneled"), (3, "2,1", "single"), (3, "1,1,1", "serialized")],
)
def test_random_orders(ranks: int, hosts: str, level: str) -> None:
    """Direct calls, submissions, polls, waits and pauses in a different order on every rank."""
    for seed in range(2):
        env = {**env_of(hosts, level), "SEED": str(seed)}
        result = run_ranks(PRELUDE + RANDOM, ranks, env=env).check()
        assert result.stdout.count("done") == ranks


def test_a_failed_operation_ends_on_every_rank() -> None:
    """A mismatch is found while a peer is in a direct call, and the world remains usable."""
    body = """
    for turn in range(3):
        handle = hvd.allreduce_async(np.ones(10 + rank), name="x")
        good = hvd.allreduce_async(np.full(10, rank + 1.0), hvd.Sum, name="y")
        if rank == 0:
            time.sleep(0.05)
            hvd.barrier()
        for _ in range(2):
            try:
                hvd.synchronize(handle)
            except hvd.MismatchError as error:
                assert "[10]" in str(error) and "[11]" in str(error), error
            else:
                raise AssertionError("different shapes were reduced")
        if rank != 0:
            hvd.barrier()
        assert np.all(hvd.synchronize(good) == total)
    # And one that a peer never submits.
    handle = hvd.allreduce_async(np.ones(3), name=f"of rank {rank}")
    try:
        hvd.synchronize(handle)
    except hvd.MismatchError as error:
        assert f"of rank {rank}" in str(error), error
    else:
        raise AssertionError("nobody else submitted it")
    hvd.barrier()
    print("went on", flush=True)
    """
    for ranks, hosts in WORLDS:
        result = run_ranks(script(body), ranks, env=env_of(hosts, "single")).check()
        assert result.stdout.count("went on") == ranks


def test_only_one_thread_may_wait_but_any_may_submit() -> None:
    """Torch's autograd threads submit gradients; no other thread calls MPI."""
    body = """
    def refused(function):
        try:
            function()
        except hvd.HoroLiteError as error:
            assert "THREAD_MULTIPLE" in str(error) and "init()" in str(error), error
            print("refused", flush=True)

    handles = []
    def other():
        handles.append(hvd.allreduce_async(np.full(5, rank + 1.0), hvd.Sum, name="x"))
        refused(hvd.barrier)
        refused(lambda: hvd.allreduce(np.ones(3)))
        refused(lambda: hvd.synchronize(handles[0]))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    hvd.barrier()
    assert np.all(hvd.synchronize(handles[0]) == total)
    print("went on", flush=True)
    """
    result = run_ranks(script(body), 2, env=env_of("1,1", "serialized")).check()
    assert result.stdout.count("refused") == 6
    assert result.stdout.count("went on") == 2


ENDS = {
    "exception": "raise ValueError('no such file')",
    "end of the program": "pass",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
}
WAITING = {
    "synchronize": "hvd.synchronize(handle)",
    "barrier": "hvd.barrier()",
    "poll": "while not hvd.poll(handle) or hvd.synchronize(handle) is None: time.sleep(1e-3)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("waiting", WAITING)
def test_one_rank_ends_while_the_others_wait(waiting: str, end: str) -> None:
    body = f"""
    hvd.allreduce(np.ones(3))
    if rank == 1:
        time.sleep(0.3)
        print("FAULT", flush=True)
        {ENDS[end]}
    else:
        handle = hvd.allreduce_async(np.ones(1000), name="w")
        {WAITING[waiting]}
        print("came through", flush=True)
    """
    with start_ranks(script(body), 3, env=env_of("2,1", "funneled")) as job:
        job.wait_for("FAULT")
        result = job.wait(5)
    assert "came through" not in result.stdout
    if mpi_name() == "mpich" and end == "SIGKILL":
        assert result.returncode != 0, str(result)
        return  # its launcher kills the others before they can report anything
    assert result.returncode != 0, str(result)
    assert re.search(r"\brank 1\b", result.stderr), str(result)


@pytest.mark.parametrize("waiting", [*WAITING, "shutdown"])
def test_ctrl_c_while_waiting(waiting: str) -> None:
    """KeyboardInterrupt is raised within 2 s, and the job ends."""
    body = f"""
    hvd.allreduce(np.ones(3))
    if rank == 1:
        handle = hvd.allreduce_async(np.ones(1000), name="w")
        try:
            print("waiting", flush=True)
            {(WAITING | {"shutdown": "hvd.shutdown()"})[waiting]}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    else:
        time.sleep(60)
    """
    with start_ranks(script(body), 2, env=env_of("1,1", "funneled")) as job:
        job.wait_for("waiting")
        time.sleep(0.3)
        os.kill(job.ranks()[1], signal.SIGINT)
        job.wait_for("interrupted", timeout_s=2)
        if waiting != "shutdown":  # then this rank is alone, and the launcher ends the others
            result = job.wait(5)
            assert result.returncode != 0
            assert "KeyboardInterrupt" in result.stderr


@pytest.mark.parametrize(("ranks", "hosts"), WORLDS)
def test_communicators_are_given_back(ranks: int, hosts: str) -> None:
    """MPICH has 2,048 of them: 25 worlds that kept theirs would exhaust what is left here.

    And messages not received in one world are not received in the next, which reuses its numbers.
    """
    body = """
    import numpy as np
    import horo_lite as hvd
    from mpi4py import MPI
    others = [MPI.COMM_SELF.Dup() for _ in range(1840 * ("MPICH" in MPI.Get_library_version()))]
    for turn in range(60):
        world = hvd.init()
        assert world.transport == "mpi"
        handle = hvd.allreduce_async(np.full(10, world.rank + turn), hvd.Sum, name="x")
        hvd.barrier()
        result = hvd.synchronize(handle)
        assert np.all(result == sum(range(world.size)) + world.size * turn)
        hvd.shutdown()
    print("made", flush=True)
    """
    result = run_ranks(body, ranks, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    assert result.stdout.count("made") == ranks


def test_who_closes_alone_waits_for_nobody() -> None:
    """shutdown() returns while peers compute, and later calls work as usual."""
    body = """
    import os, time
    import numpy as np
    import horo_lite as hvd
    world = hvd.init()
    hvd.barrier()
    if world.rank == 1:
        while not os.access("rank 0 is through", os.F_OK):
            time.sleep(0.01)
    hvd.shutdown()
    open("rank 0 is through", "w").close()
    world = hvd.init()
    assert np.all(hvd.allreduce(np.full(10, world.rank), hvd.Sum) == 1)
    print("made", flush=True)
    """
    result = run_ranks(body, 2, env={"HORO_LITE_TEST_HOSTS": "1,1"}).check()
    assert result.stdout.count("made") == 2
