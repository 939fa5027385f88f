"""After a failed operation, as in a notebook: shutdown(), init(), and training continues."""

from __future__ import annotations

import re
import time
from pathlib import Path

import go_on_ranks
import pytest
from launch import mpi_name, run_ranks, start_ranks, that_leave_survivors
from worlds import on_ranks

pytestmark = pytest.mark.launches

# One row for each mechanism in which the MPI library or its launcher takes part.
UNDER_BOTH = pytest.mark.mpi


@pytest.mark.served
@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [(2, ""), pytest.param(2, "1,1", marks=UNDER_BOTH), pytest.param(3, "2,1", marks=UNDER_BOTH)],
)
@pytest.mark.parametrize("which", ["numpy", "torch"])
def test_training_goes_on_after_an_interrupt(which: str, ranks: int, hosts: str) -> None:
    if which == "torch":
        pytest.importorskip("torch")
    on_ranks(go_on_ranks.train, ranks, which, hosts=hosts, timeout_s=90)


@pytest.mark.parametrize("hosts", ["", pytest.param("1,1,1", marks=UNDER_BOTH)])
def test_an_interrupt_in_a_second_init_ends_the_job(hosts: str) -> None:
    """Rank 1 also waits in init(), and rank 2 for a message from outside, which never comes."""
    script = """\
import os, signal, sys, threading, time
import horo_lite as hvd

rank = hvd.init(device="cpu").rank
hvd.barrier()
hvd.shutdown()
if rank == 0:
    def interrupt_soon():
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt_soon, daemon=True).start()
if rank == 2:
    threading.Event().wait()
hvd.init(device="cpu")
"""
    result = run_ranks(script, 3, env={"HORO_LITE_TEST_HOSTS": hosts})
    assert result.returncode != 0, str(result)
    assert "rank 0 of 3" in result.stderr, str(result)
    assert "KeyboardInterrupt" in result.stderr, str(result)


@pytest.mark.parametrize("hosts", ["", pytest.param("1,1,1", marks=UNDER_BOTH)])
@pytest.mark.parametrize("end", ["hvd.shutdown(); sys.exit(3)", "sys.exit(0)", "1 / 0"])
def test_a_rank_that_ends_is_missed_in_a_second_init(end: str, hosts: str) -> None:
    script = f"""\
import sys
import horo_lite as hvd

rank = hvd.init(device="cpu").rank
hvd.barrier()
if rank == 2:
    {end}
hvd.shutdown()
try:
    hvd.init(device="cpu")
except hvd.PeerLostError as error:
    assert "rank 2 has ended" in str(error) and "init()" in str(error), error
    print("missed", flush=True)
    raise
print("went on", flush=True)
"""
    result = run_ranks(script, 3, env={"HORO_LITE_TEST_HOSTS": hosts})
    assert result.returncode != 0, str(result)
    assert "went on" not in result.stdout, str(result)
    if end == "1 / 0":  # the rank itself ends the job
        assert "ZeroDivisionError" in result.stderr, str(result)
    else:
        assert "missed" in result.stdout, str(result)


@pytest.mark.parametrize("hosts", ["", pytest.param("1,1,1", marks=UNDER_BOTH)])
@pytest.mark.parametrize("waits_in", ["MPI_Init", "first init()", "second init()"])
def test_a_rank_that_is_late_in_init_is_reported(waits_in: str, hosts: str, tmp_path: Path) -> None:
    """Rank 2 comes after the others have reported that they wait."""
    script = f"""\
import os, sys, threading, time
from pathlib import Path
import horo_lite as hvd

if {waits_in!r} != "MPI_Init":
    from mpi4py import MPI
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
come = Path(sys.argv[1], "come")
if {waits_in!r} == "second init()":
    assert hvd.init(device="cpu").rank == rank
    hvd.shutdown()
if rank == 2:
    while not come.exists():
        time.sleep(0.01)
hvd.init(device="cpu", stall_warn_s=0.5)
assert hvd.allreduce(float(rank), op=hvd.Sum) == 3
print("came", os.getpid() if rank == 2 else "", flush=True)
"""
    env = {"HORO_LITE_TEST_HOSTS": hosts}
    # Ranks that learn from the others who is late all report it; else one rank of the host does.
    reporters = "01" if waits_in == "second init()" else "0"
    waits = [rf"rank {rank} has waited \S+ s in init\(\) for rank 2\b" for rank in reporters]

    def reported(said: str) -> bool:
        return all(re.search(wait, said) for wait in waits)

    with start_ranks(script, 3, args=(str(tmp_path),), env=env) as job:
        until = time.monotonic() + 60
        while not reported(job.stderr()) and time.monotonic() < until:
            time.sleep(0.01)
        (tmp_path / "come").touch()
        result = job.wait()
    assert reported(result.stderr), str(result)
    assert result.check().stdout.count("came") == 3, str(result)
    assert "rank 2 has waited" not in result.stderr, str(result)
    (pid,) = re.findall(r"came (\d+)", result.stdout)
    late = {
        "MPI_Init": f"rank 2 (pid {pid}), which has not called init() yet",
        "first init()": f"rank 2 (pid {pid}), which has not called init() yet",
        "second init()": "rank 2, which did not call init() again after shutdown()",
    }[waits_in]
    assert f"s in init() for {late}" in result.stderr, str(result)
    if waits_in != "second init()":  # rank 1 leaves it to rank 0, once that has come
        assert "rank 1 has waited" not in result.stderr.partition("rank 0 has")[2], str(result)


@UNDER_BOTH
def test_a_rank_that_ends_before_init_ends_the_job() -> None:
    """With exit code 0: launchers kill the others only after failures."""
    script = """
    import os, sys
    import horo_lite as hvd
    if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1":
        sys.exit(0)
    hvd.init(device="cpu", stall_warn_s=0.5)
    """
    result = run_ranks(script, 3, timeout_s=30)
    assert result.returncode == 1, str(result)
    said = r"rank 0 has waited [\d.]+ s in init\(\) for rank 1: ended without calling init\(\)"
    assert re.search(said, result.stderr), str(result)
    said = "[horo_lite] rank 1 ended before init(), where rank 0 has waited: the program exited"
    assert result.stderr.count(said) == 1, str(result)


@UNDER_BOTH
def test_of_several_jobs_on_a_host_only_the_own_ranks_count(tmp_path: Path) -> None:
    """A rank starts its own job, of which one rank never comes; both jobs have a rank 1."""
    inner = tmp_path / "inner.py"
    inner.write_text("""\
import os, time
import horo_lite as hvd
if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1":
    time.sleep(60)
hvd.init(device="cpu", stall_warn_s=0.5, stall_abort_s=2)
""")
    script = f"""
    import subprocess, sys
    import horo_lite as hvd
    hvd.init(device="cpu")
    if hvd.rank() == 1:
        command = [sys.executable, "-m", "horo_lite", "-n", "2", {str(inner)!r}]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120)
        print(ended.returncode, ended.stderr)
    hvd.barrier()
    """
    result = run_ranks(script, 3, timeout_s=60).check()
    said = r"rank 0 has waited (\S+) s in init\(\) for rank 1 \(pid \d+\), which has not called"
    assert max(map(float, re.findall(said, result.stdout))) >= 2.0, str(result)
    assert result.stdout.startswith("1 "), str(result)


@pytest.mark.parametrize("hosts", ["", pytest.param("1,1,1", marks=UNDER_BOTH)])
@pytest.mark.parametrize("again", [False, True])
def test_a_rank_that_never_comes_to_init_is_a_stall(again: bool, hosts: str) -> None:
    script = f"""\
import threading
from mpi4py import MPI
import horo_lite as hvd

if {again}:
    hvd.init(device="cpu")
    hvd.shutdown()
if MPI.COMM_WORLD.rank == 2:
    threading.Event().wait()
hvd.init(device="cpu", stall_abort_s=0.5)
"""
    env = {"HORO_LITE_TEST_HOSTS": hosts}
    result = run_ranks(script, 3, env=env, timeout_s=60)
    assert result.returncode != 0, str(result)
    assert "StallError: rank" in result.stderr, str(result)
    assert "in init() for rank" in result.stderr, str(result)


@UNDER_BOTH
def test_a_rank_that_dies_is_missed_in_a_second_init() -> None:
    """Although its launcher ignores the death: the exit code is 0, or its options say so."""
    script = """\
import os
import horo_lite as hvd

rank = hvd.init(device="cpu").rank
hvd.barrier()
hvd.shutdown()
if rank == 2:
    os._exit(0)
try:
    hvd.init(device="cpu")
except hvd.PeerLostError as error:
    assert "rank 2 died" in str(error) and "init()" in str(error), error
    print("missed", flush=True)
    os._exit(5)
print("went on", flush=True)
"""
    result = run_ranks(script, 3, options=that_leave_survivors())
    if mpi_name() == "mpich":  # Open MPI's launcher ends the last one after the other's report
        assert result.stdout.count("missed") == 2, str(result)
    assert "went on" not in result.stdout, str(result)


def test_a_world_may_be_left_at_once() -> None:
    """Rank 1 is slow to open rank 0's inbox, which must not be another file by then."""
    script = """\
import time
import horo_lite as hvd
from horo_lite.transports.pipes import Pipes

connect = Pipes.connect


def slowly(*args):
    time.sleep(0.5)
    connect(*args)


files = []
for i in range(3):
    if i and rank == 1:
        Pipes.connect = slowly
    rank = hvd.init(device="cpu").rank
    hvd.shutdown()
    files += [open("/dev/null") for _ in range(20)]
print("went on", flush=True)
"""
    result = run_ranks(script, 2).check()
    assert result.stdout.count("went on") == 2, str(result)
