"""MPI with less than THREAD_MULTIPLE; and the MPI resources that init() takes and frees."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from launch import run_ranks
from worlds import on_ranks

import horo_lite as hvd

pytestmark = pytest.mark.launches

WORLDS = [(2, "1,1"), (3, "2,1")]
RC = "mpi4py.rc.thread_level = 'serialized'"
REFUSED = [
    (2, "1,1", RC, "THREAD_SERIALIZED on ranks 0 and 1. The program, or a variable"),
    (2, "1,1", "mpi4py.rc.threads = False", "MPI4PY_RC_…, has set mpi4py.rc.threads = False"),
    (
        3,
        "2,1",
        f"if me == 2: {RC}",
        "THREAD_SERIALIZED on rank 2. The program, or a variable MPI4PY_RC_…, has set " + RC,
    ),
    (
        3,
        "1,1,1",
        "mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "MPI.Init_thread(MPI.THREAD_FUNNELED if me else MPI.THREAD_SINGLE)\n"
        "import atexit; atexit.register(MPI.Finalize)",
        "THREAD_SINGLE on rank 0, THREAD_FUNNELED on ranks 1 and 2. The program, or a library that",
    ),
]


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "hosts", "how", "words"), REFUSED)
def test_between_hosts_every_rank_says_what_to_do(
    ranks: int, hosts: str, how: str, words: str
) -> None:
    """Also the ranks that have THREAD_MULTIPLE, which would otherwise wait for the others."""
    body = f"""\
import os
import mpi4py
me = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
{how}
import horo_lite as hvd
for turn in range(2):
    try:
        hvd.init()
    except hvd.LauncherError as error:
        print("said:", error, flush=True)
"""
    result = run_ranks(body, ranks, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    said = [line for line in result.stdout.splitlines() if line.startswith("said: ")]
    assert len(said) == 2 * ranks
    assert len(set(said)) == 1
    assert words in said[0]
    assert "let horo_lite.init() initialise MPI, or request MPI.THREAD_MULTIPLE" in said[0]


def test_on_one_host_the_lowest_level_will_do() -> None:
    """Everything that holds with THREAD_MULTIPLE also holds with less, and without a warning."""
    body = """
    import warnings
    import mpi4py
    mpi4py.rc.thread_level = "single"
    warnings.simplefilter("error", RuntimeWarning)
    import numpy as np
    import horo_lite as hvd
    world = hvd.init()
    assert world.transport == "shm"
    assert not world.thread_multiple
    warnings.simplefilter("default")
    import checks
    del checks.CHECKS["every_cell_of_the_table"]  # arithmetic, half of the time: test_processes
    print(checks.run_all(world.group), "checks passed", flush=True)
    part = hvd.new_group([0, 1])
    if world.rank != 1:  # rank 1 has more batches, in the world and in the part
        last = hvd.join()
    else:
        assert hvd.allreduce(np.ones(3), hvd.Sum)[0] == 1
        assert hvd.allreduce(np.ones(3), hvd.Sum, group=part)[0] == 1
        last = hvd.join()
    assert last == 1
    hvd.shutdown()
    print("the end", flush=True)
    """
    env = {"HORO_LITE_OVERLAP": "always"}  # some checks look at what is sent early
    result = run_ranks(body, 3, env=env, timeout_s=50).check()
    assert result.stdout.count("checks passed") == result.stdout.count("the end") == 3


def wait_in_all_ways() -> None:
    def poll() -> None:
        while sum(map(hvd.poll, handles)) < len(handles):
            time.sleep(1e-3)

    waits = [lambda: [hvd.synchronize(handle) for handle in handles], poll, hvd.shutdown]
    for ways in itertools.product(range(3), repeat=2):
        rank = hvd.init().rank
        xs = [np.full(200_000, rank + i + 1.0) for i in range(3)]
        handles = [hvd.allreduce_async_(x, hvd.Sum, name=str(i)) for i, x in enumerate(xs)]
        waits[ways[rank]]()
        assert all(np.all(x == 3 + 2 * i) for i, x in enumerate(xs)), ways
        hvd.shutdown()


@pytest.mark.served
@pytest.mark.mpi
def test_one_waits_in_one_way_and_one_in_another() -> None:
    """Several operations are completed whatever call each rank's thread waits in."""
    on_ranks(wait_in_all_ways, 2, hosts="1,1")


def make_many_worlds() -> None:
    from mpi4py import MPI

    n_others = 1840 if "MPICH" in MPI.Get_library_version() else 0
    others = [MPI.COMM_SELF.Dup() for _ in range(n_others)]
    for turn in range(60):
        world = hvd.init()
        assert world.transport == "mpi"
        handle = hvd.allreduce_async(np.full(10, world.rank + turn), hvd.Sum, name="x")
        hvd.barrier()
        result = hvd.synchronize(handle)
        assert np.all(result == sum(range(world.size)) + world.size * turn)
        hvd.shutdown()
    for other in others:
        other.Free()


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "hosts"), WORLDS)
def test_communicators_are_given_back(ranks: int, hosts: str) -> None:
    """MPICH has 2,048 of them: 25 worlds that kept theirs would exhaust what is left here.

    And messages not received in one world are not received in the next, which reuses its numbers.
    """
    on_ranks(make_many_worlds, ranks, hosts=hosts)


def close_alone(closed: Path) -> None:
    world = hvd.init()
    hvd.barrier()
    while world.rank == 1 and not closed.exists():
        time.sleep(0.01)
    hvd.shutdown()
    closed.touch()
    world = hvd.init()
    assert np.all(hvd.allreduce(np.full(10, world.rank), hvd.Sum) == 1)


@pytest.mark.served
@pytest.mark.mpi
def test_who_closes_alone_waits_for_nobody(tmp_path: Path) -> None:
    """shutdown() returns while peers compute, and later calls work as usual."""
    on_ranks(close_alone, 2, tmp_path / "closed", hosts="1,1")
