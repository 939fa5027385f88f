"""Ranks of one host, which find each other without MPI; and when they use MPI all the same."""

from __future__ import annotations

import os

import pytest
from launch import run_ranks, start_ranks

from horo_lite.start import host_ranks, launcher, orphans
from horo_lite.start.host_ranks import HostRanks

RANK = "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])"


# --- the choice ----------------------------------------------------------------------------------

OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "HYDI_CONTROL_FD": "7"}


@pytest.mark.parametrize(
    ("environ", "is_visible", "meet"),
    [
        (OPENMPI, True, True),
        (MPICH, True, True),
        (OPENMPI, False, False),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True, False),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, True, False),
        (OPENMPI | {"OMPI_MCA_mpi_ft_enable": "1"}, True, False),
        (MPICH | {"MPI_LOCALNRANKS": "1"}, True, False),
        ({k: v for k, v in MPICH.items() if k != "HYDI_CONTROL_FD"}, True, False),  # another's PMI
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, True, False),
        ({"PMIX_RANK": "1"}, True, False),
        ({}, True, False),
    ],
)
def test_mpi_is_left_out_if_the_launcher_is_known_to_end_the_job(
    environ: dict[str, str], is_visible: bool, meet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = (os.getpid(), "prterun") if is_visible else None
    monkeypatch.setattr(orphans, "visible_launcher", lambda: visible)
    monkeypatch.setattr(host_ranks, "mark_rank", lambda: None)
    monkeypatch.setattr(HostRanks, "made", None)
    found = HostRanks.of_job(launcher.detect(environ), environ)
    assert (found is not None) == meet
    if found is not None:
        assert (found.rank, found.size) == (1, 2)


def test_a_board_has_its_entries_once_they_are_complete() -> None:
    file = os.memfd_create("board")
    written, read = (host_ranks._Board(os.dup(file), os.getpid(), 3) for _ in range(2))
    assert read.entry() is None
    assert read.introduced() == {}
    written.write(0, "first")
    written.write(1, b"x" * 100_000)
    read.introduce(2, 17, 5)
    assert written.introduced() == {2: (17, 5)}
    assert read.entry() == read.entry() == (0, "first")
    read.skip()
    size = os.fstat(file).st_size
    last = os.pread(file, 1, size - 1)
    for torn in (lambda: os.ftruncate(file, size - 1), lambda: os.pwrite(file, b"?", size - 1)):
        torn()
        assert read.entry() is None
    os.pwrite(file, last, size - 1)
    assert read.entry() == (1, b"x" * 100_000)
    read.skip()
    assert read.entry() is None


def test_a_board_of_another_user_is_not_written_to() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    theirs = os.memfd_create("board")
    os.fchown(theirs, 65534, 65534)
    ranks = HostRanks(0, 2)
    HostRanks.made = None
    with pytest.raises(PermissionError, match=r"rank 1 .* is of another user"):
        ranks._open(1, os.getpid(), theirs)
    assert os.fstat(theirs).st_size == 0


# --- MPI beside it -------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.quick
def test_a_program_may_initialise_mpi_later() -> None:
    result = run_ranks(
        """
        import sys
        import numpy as np
        import horo_lite as hvd

        world = hvd.init()
        assert world.transport == "shm" and world.thread_multiple
        assert hvd.allreduce(world.rank + 1.0, hvd.Sum) == 6
        assert "mpi4py" not in sys.modules
        from mpi4py import MPI
        everyone = MPI.COMM_WORLD
        assert (everyone.rank, everyone.size) == (world.rank, 3)
        assert everyone.allreduce(1) == 3
        assert hvd.allreduce(world.rank + 1.0, hvd.Sum) == 6
        hvd.shutdown()
        assert everyone.allreduce(1) == 3
        part = everyone.Split(everyone.rank == 2, -everyone.rank)
        assert hvd.init(comm=part).size == part.size
        assert hvd.allgather_object(everyone.rank) == ([2] if everyone.rank == 2 else [1, 0])
        hvd.shutdown()
        assert hvd.init().size == 3
        assert hvd.allreduce(world.rank + 1.0, hvd.Sum) == 6
        hvd.shutdown()
        assert hvd.init(test_hosts="2,1").transport == "mpi"
        assert hvd.allreduce(world.rank + 1.0, hvd.Sum) == 6
        hvd.shutdown()
        assert hvd.init().transport == "shm"
        print("went on", flush=True)
        """,
        3,
    ).check()
    assert result.stdout.count("went on") == 3
    assert result.stderr == ""


@pytest.mark.mpi
@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_follow_one_that_needs_mpi(odd: int) -> None:
    """Such as one in a container, which cannot see the launcher."""
    result = run_ranks(
        f"""
        import os, sys
        import horo_lite as hvd
        from horo_lite.start import orphans

        {RANK}
        if rank == {odd}:
            orphans.visible_launcher = lambda: None
        for turn in range(3):
            assert hvd.init().transport == "shm"
            assert hvd.allreduce(rank + 1.0, hvd.Sum) == 6
            assert "mpi4py.MPI" in sys.modules
            hvd.shutdown()
        print("followed", flush=True)
        """,
        3,
    ).check()
    assert result.stdout.count("followed") == 3


# --- failures in init() --------------------------------------------------------------------------


@pytest.mark.mpi
def test_ranks_meet_again_after_an_init_that_failed_on_one() -> None:
    result = run_ranks(
        f"""
        import os
        import horo_lite as hvd
        import horo_lite.start.session as session

        {RANK}
        connect = session.connect
        def fail(*args, **options):
            raise OSError("no memory for this rank")
        for turn in range(3):
            if rank == turn:
                session.connect = fail
            try:
                hvd.init()
            except OSError:
                assert rank == turn
            except hvd.PeerLostError as error:
                assert rank != turn
                for word in (f"rank {{turn}} (pid", "failed in init()", "no memory for this rank"):
                    assert word in str(error), error
            else:
                raise AssertionError("it did not fail")
            session.connect = connect
            assert hvd.init().size == 3
            assert hvd.allreduce(rank + 1.0, hvd.Sum) == 6
            hvd.shutdown()
        print("met", flush=True)
        """,
        3,
    ).check()
    assert result.stdout.count("met") == 3


@pytest.mark.mpi
def test_a_rank_that_is_interrupted_in_init_may_call_it_again() -> None:
    script = f"""\
import os, signal, threading, time
import horo_lite as hvd

{RANK}
if rank == 0:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        hvd.init()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
if rank == 1:
    while not os.access("come", os.F_OK):
        time.sleep(0.01)
assert hvd.init().size == 2
print("met", flush=True)
"""
    with start_ranks(script, 2) as job:
        job.wait_for("interrupted")
        (job.folder / "come").touch()
        assert job.wait().check().stdout.count("met") == 2


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.mpi
def test_a_large_message_can_be_received_long_after_its_sender_has_ended() -> None:
    result = run_ranks(
        """
        import time
        import numpy as np
        import horo_lite as hvd

        if hvd.init().rank == 0:
            hvd.isend(np.arange(100_000.0), 1)
        else:
            time.sleep(4)
            x = np.empty(100_000)
            hvd.recv(x, 0)
            assert np.array_equal(x, np.arange(100_000.0))
            print("received", flush=True)
        """,
        2,
    ).check()
    assert "received" in result.stdout
