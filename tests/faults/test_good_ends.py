"""What must not go wrong: leftovers, clean ends, forks, waiting, the import."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from launch import PATIENCE, run_ranks, start_ranks
from runner import ALLREDUCE, ASYNCHRONOUS, end_of, named_segments
from without_mpi import started
from worlds import on_ranks

import horo_lite as hvd

pytestmark = pytest.mark.launches
# One row for each mechanism in which the MPI library or its launcher takes part.
UNDER_BOTH = pytest.mark.mpi


OVER = {"shm": "", "mixed": "2,1"}
PRELUDE = """\
import os, signal, sys, time
import numpy as np
import horo_lite as hvd
world = hvd.init()
rank, size = world.rank, world.size
"""


def script(body: str) -> str:
    lines = body.strip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return PRELUDE + "\n".join(line[indent:] for line in lines) + "\n"


# --- leftovers ------------------------------------------------------------------------------------


# Where ranks stop inside init(), and how many do: the others wait for them there.
STOPS = {"MPI is up": 3, "a segment is made": 1, "it is opened": 2, "it is mapped by all": 3}
STOPPING = """
import sys, time
import horo_lite as hvd
from horo_lite import _native
from horo_lite.start import session
from horo_lite.transports import this_host

def stop(where, after=None):
    def stops(*args, **options):
        result = after(*args) if after else None  # keeps what it has made alive
        print(f"at <{where}>", flush=True)
        time.sleep(600)
    return stops

class Segment(_native.Segment):
    create, open = _native.Segment.create, _native.Segment.open

(where,) = sys.argv[1:]
if where == "MPI is up":
    session.connect = stop(where)
elif where == "a segment is made":
    Segment.create = staticmethod(stop(where, Segment.create))
elif where == "it is opened":
    Segment.open = staticmethod(stop(where, Segment.open))
else:
    this_host.ThisHost.group = stop(where)
_native.Segment = Segment
hvd.init()
print("up", flush=True)
"""


@pytest.mark.parametrize(
    "where", [pytest.param(where, marks=[UNDER_BOTH] * (where == "MPI is up")) for where in STOPS]
)
def test_sigkill_during_init_leaves_nothing(where: str, tmp_path: Path) -> None:
    before = named_segments()
    env = {"TMPDIR": str(tmp_path)}
    with start_ranks(STOPPING, 3, args=[where], env=env) as job:
        job.wait_for(f"at <{where}>", count=STOPS[where])
        held = sum(
            "memfd:horo_lite (deleted)" in memory
            for pid in job.ranks().values()
            for memory in opened(pid)
        )
        assert (held > 0) == (where != "MPI is up"), "what could be left"
        for pid in (*job.ranks().values(), job.launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.launcher.wait(10)
        assert "up\n" not in job.stdout(), "init() was over"
    assert named_segments() <= before
    ours = [path for path in tmp_path.rglob("*") if "horo" in path.name]
    assert not ours


def opened(pid: int) -> list[str]:
    """Return the files that a process has open or mapped."""
    process = Path("/proc", str(pid))
    files = [os.readlink(file) for file in process.joinpath("fd").iterdir() if file.is_symlink()]
    return files + process.joinpath("maps").read_text().splitlines()


@UNDER_BOTH
def test_nothing_is_left_behind() -> None:
    """No name in /dev/shm during or after the job, and no descriptor kept open.

    The record of a rank's operations is private to it, and lives as long as the process.
    """
    before = named_segments()
    body = """
    hvd.allreduce(np.ones(100_000))
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(fd) for fd in fds if os.path.islink(fd)]
    held = [name for name in held if "horo_lite_operations" not in name]
    print("memfd open:", sum("horo_lite" in name for name in held), flush=True)
    hvd.barrier()
    time.sleep(0.3)
    hvd.shutdown()
    del world
    maps = open("/proc/self/maps").read().replace("memfd:horo_lite_operations", "")
    print("memfd mapped:", maps.count("memfd:horo_lite"), flush=True)
    """
    with start_ranks(script(body), 3) as job:
        job.wait_for("memfd open:", count=3)
        assert named_segments() <= before
        result = job.wait(20).check()
        assert not job.processes()
    assert result.stdout.count("memfd open: 0") == 3, str(result)
    assert result.stdout.count("memfd mapped: 0") == 3, str(result)
    assert named_segments() <= before


@UNDER_BOTH
def test_a_container_has_64_mib_of_dev_shm() -> None:
    """It is enough for 4 ranks that reduce much more than that."""
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && df -m /dev/shm >&2 && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    if os.geteuid() != 0:
        prefix.insert(1, "--map-root-user")
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("cannot mount a small /dev/shm here: needs root or user namespaces")
    body = """
    x = np.full(50_000_000, rank + 1, np.float32)
    hvd.allreduce_(x, op=hvd.Sum)
    assert np.all(x == sum(range(1, size + 1)))
    print("reduced", flush=True)
    """
    result = run_ranks(script(body), 4, prefix=prefix, timeout_s=60).check()
    assert result.stdout.count("reduced") == 4
    assert re.search(r"tmpfs\s+64\s", result.stderr), str(result)


# --- clean ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["shm", pytest.param("mixed", marks=UNDER_BOTH)])
def test_a_clean_exit_with_work_in_flight(over: str) -> None:
    """Operations submitted by all ranks are completed, without any message."""
    body = """
    arrays = [np.full(100_000, rank + 1, np.float32) for _ in range(20)]
    if rank == 0:
        time.sleep(0.2)
    handles = [hvd.allreduce_async_(x, op=hvd.Sum, name=str(i)) for i, x in enumerate(arrays)]
    if os.environ["END"] == "shutdown":
        hvd.shutdown()
        assert all(np.all(x == sum(range(1, size + 1))) for x in arrays)
    print("end", flush=True)
    """
    for end in ("shutdown", "exit"):
        env = {"END": end, "HORO_LITE_TEST_HOSTS": OVER[over]}
        result = run_ranks(script(body), 3, env=env).check()
        assert result.stdout.count("end") == 3
        assert result.stderr.strip() == "", str(result)


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_a_job_whose_standard_files_are_closed(hosts: str, tmp_path: Path) -> None:
    """A stall report is dropped, and not written to a file that has got stderr's descriptor."""
    pytest.importorskip("torch")  # whose store is the rendezvous without MPI
    body = f"""
    import os, time
    out = os.open(f"{tmp_path}/{{os.environ['RANK']}}", os.O_WRONLY | os.O_CREAT)
    for number in range(3):
        os.close(number)
    import numpy as np
    import horo_lite as hvd

    hvd.init(stall_warn_s=0.3, stall_abort_s=30)
    x = np.full(5, 1.0 + hvd.rank())
    if hvd.rank() == 0:
        time.sleep(1.5)
        hvd.send(x, 1)
    else:
        hvd.recv(x, 0)
    os.write(out, f"{{x.sum()}} of {{hvd.allreduce(x, op=hvd.Sum).sum()}}".encode())
    """
    env = {"HORO_LITE_TEST_HOSTS": hosts}
    with started(textwrap.dedent(body), 2, tmp_path, env=env) as job:
        job.wait(40).check()
    assert [tmp_path.joinpath(rank).read_text() for rank in "01"] == ["5.0 of 10.0"] * 2


@UNDER_BOTH
def test_no_thread_is_left_after_shutdown() -> None:
    body = """\
import os, time
from mpi4py import MPI  # MPI's own threads come with it
import numpy as np
import horo_lite as hvd
def threads():
    return len(os.listdir("/proc/self/task"))
np.ones((300, 300)) @ np.ones((300, 300))  # and BLAS's
before = threads()
for _ in range(3):
    world = hvd.init()
    hvd.allreduce(np.ones(10))
    hvd.synchronize(hvd.allreduce_async(np.ones(10), name="x"))
    hvd.shutdown()
until = time.monotonic() + 20
while threads() > before and time.monotonic() < until:
    time.sleep(0.01)
assert threads() == before, (before, threads())
print("clean", flush=True)
"""
    for hosts in ("", "1,1"):
        result = run_ranks(body, 2, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
        assert result.stdout.count("clean") == 2


@UNDER_BOTH
def test_the_world_can_be_made_again() -> None:
    body = """
    import atexit

    atexit.register(lambda: print("left at exit:", not hvd.is_initialized(), flush=True))
    for turn in range(5):
        hvd.init()
        total = hvd.allreduce(np.full(1000, rank + turn), op=hvd.Sum)
        assert np.all(total == sum(range(size)) + size * turn)
        hvd.shutdown()
        try:
            hvd.allreduce(np.ones(1))
        except hvd.NotInitializedError as error:
            assert "init()" in str(error)
        else:
            raise AssertionError("used after shutdown()")
    hvd.init()
    print("made", flush=True)
    """
    for hosts in ("", "2,1"):
        result = run_ranks(script(body), 3, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
        assert result.stdout.count("made") == 3
        assert result.stdout.count("left at exit: True") == 3, str(result)


@UNDER_BOTH
def test_forked_children_are_no_ranks() -> None:
    """However a child ends, the job continues; calls that it must not make raise errors."""
    body = """
    hvd.allreduce(np.ones(10))
    handle = hvd.allreduce_async(np.ones(10), name="before") if rank == 0 else None

    def child(function):
        pid = os.fork()
        if pid == 0:
            function()
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def use():
        calls = [
            lambda: hvd.allreduce(np.ones(3)),
            lambda: hvd.allreduce_async(np.ones(3), name="child"),
            lambda: hvd.barrier(),
            lambda: hvd.init(),
            lambda: hvd.broadcast(np.ones(3), root_rank=0, group=world.group),
        ]
        for call in calls:
            try:
                call()
            except hvd.HoroLiteError as error:
                assert "fork" in str(error), error
            else:
                os._exit(9)
        os._exit(42)

    def fail():
        sys.stderr = open(os.devnull, "w")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise ValueError("a child")

    assert child(lambda: None) == 0
    assert child(lambda: os._exit(0)) == 0
    assert child(lambda: sys.exit(1)) == 1
    assert child(fail) == 1
    assert child(use) == 42
    assert child(hvd.shutdown) == 0
    assert child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM

    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]

    # A child that outlives the parent's next calls.
    pid = os.fork()
    if pid == 0:
        time.sleep(0.5)
        os._exit(0)
    if handle is None:
        handle = hvd.allreduce_async(np.ones(10), name="before")
    assert np.all(hvd.synchronize(handle) == 1)
    assert np.all(hvd.allreduce(np.full(5, rank), op=hvd.Sum) == sum(range(size)))
    os.waitpid(pid, 0)
    print("went on", flush=True)
    """
    for hosts in ("", "1,1"):
        # Python 3.12 and later warn that a process's threads do not exist in its children.
        env = {"HORO_LITE_TEST_HOSTS": hosts, "PYTHONWARNINGS": "ignore::DeprecationWarning"}
        result = run_ranks(script(body), 2, env=env).check()
        assert result.stdout.count("went on") == 2
        assert result.stderr.strip() == "", str(result)


@pytest.mark.parametrize("rank_1_learns_of", [pytest.param("both", marks=UNDER_BOTH), "rank 0's"])
def test_no_rank_outlives_its_launcher(rank_1_learns_of: str, tmp_path: Path) -> None:
    """Whatever the rank does, and if a program between the two lives on until the rank has ended.

    MPICH's launcher ends the ranks if it is itself killed, but not if its process that has started
    them is. A rank that learns of another rank's end before its launcher's must not call MPI.
    """
    body = f"""
    import os, subprocess, sys

    if "RANK_OF_A_SCRIPT" not in os.environ:
        mine = os.environ | {{"RANK_OF_A_SCRIPT": "1"}}
        command = [sys.executable, __file__]
        sys.exit(subprocess.run(command, env=mine, close_fds=False).returncode)
    os.dup2(os.open("{tmp_path}/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    import numpy as np
    import horo_lite as hvd
    from horo_lite.start import ending

    rank = hvd.init().rank
    if rank == 1 and {rank_1_learns_of!r} != "both":
        ending._Hooks.on_launcher_end = lambda *_: __import__("time").sleep(60)
    hvd.barrier()
    print("running", flush=True)
    while rank == 0:
        pass
    hvd.allreduce(np.ones(3))
    """
    with start_ranks(body, 2) as job:
        job.wait_for("running", count=2)
        stat = Path(f"/proc/{job.ranks()[0]}/stat").read_text()
        launcher = int(stat.rpartition(")")[2].split()[1])
        name = Path(f"/proc/{launcher}/comm").read_text().strip()
        os.kill(launcher, signal.SIGKILL)
        job.launcher.wait(20 * PATIENCE)
        until = time.monotonic() + 20 * PATIENCE
        while left := job.processes():
            assert time.monotonic() < until, f"processes are left: {left.keys()} {job.result()}"
            time.sleep(0.01)
    (line,) = (tmp_path / "stderr").read_text().splitlines()
    why = rf"ends, since its launcher \({name}, pid {launcher}\) has ended"
    assert re.match(rf"\[horo_lite\] rank \d of 2 \(\S+, pid \d+\) {why}", line), line


# --- waiting --------------------------------------------------------------------------------------

WAITING = {"allreduce": ALLREDUCE, "asynchronous": ASYNCHRONOUS}


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1", marks=UNDER_BOTH)])
def test_ctrl_c_while_waiting(waiting: str, hosts: str) -> None:
    """KeyboardInterrupt is raised within 2 s, and the peer that was waited for is notified."""
    body = f"""
    hvd.allreduce(np.ones(3))
    if rank == 1:
        try:
            print("waiting", flush=True)
            {WAITING[waiting]}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    else:
        time.sleep(60)
    """
    with start_ranks(script(body), 2, env={"HORO_LITE_TEST_HOSTS": hosts}) as job:
        job.wait_for("waiting")
        time.sleep(0.3)
        since = time.monotonic()
        os.kill(job.ranks()[1], signal.SIGINT)
        job.wait_for("interrupted", timeout_s=2)
        result = end_of(job, since)
    assert result.returncode != 0
    assert "KeyboardInterrupt" in result.stderr


def test_ctrl_c_without_a_launcher() -> None:
    body = """
    print("waiting", flush=True)
    time.sleep(60)
    """
    with start_ranks(script(body), 1, launcher=False) as job:
        job.wait_for("waiting")
        since = time.monotonic()
        job.launcher.send_signal(signal.SIGINT)
        result = end_of(job, since)
    assert "KeyboardInterrupt" in result.stderr
    assert "abort" not in result.stderr.lower()


def costs_of_waiting() -> dict[str, tuple[float, float]]:
    """Return the seconds that this rank waits for the other, and those of CPU, in each way."""
    rank, x = hvd.init().rank, np.ones(1000)
    waits: dict[str, Callable[[], object]] = {
        "allreduce": lambda: hvd.allreduce(x),
        "asynchronous": lambda: hvd.synchronize(hvd.allreduce_async(x)),
    }
    costs = {}
    for name, wait in waits.items():
        hvd.barrier()
        if rank == 1:
            time.sleep(1)
        before, began = time.process_time(), time.monotonic()
        wait()
        costs[name] = time.monotonic() - began, time.process_time() - before
    return costs


@pytest.mark.served
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1", marks=UNDER_BOTH)])
def test_waiting_costs_no_cpu(hosts: str) -> None:
    """A second of waiting for a late rank costs under 0.05 s of CPU; here twice that is allowed."""
    costs, _ = on_ranks(costs_of_waiting, 2, hosts=hosts)
    for waiting, (waited, cost) in costs.items():
        assert waited > 0.5, f"{waiting} did not wait"
        assert cost < 0.1 * waited, f"{waiting} used {cost} s of CPU in {waited} s"


# --- the import -----------------------------------------------------------------------------------


def test_the_import_is_light() -> None:
    """It imports no framework and no MPI, and is faster than NumPy's: the best of several tries."""
    code = """
import sys, time
began = time.process_time()
import horo_lite
took = time.process_time() - began
heavy = {"mpi4py", "torch", "jax", "tensorflow", "keras", "cupy", "ml_dtypes", "sklearn",
         "matplotlib", "tqdm", "threadpoolctl", "multiprocessing", "asyncio"}
print(sorted(heavy & set(sys.modules)))
print(sorted(m for m in sys.modules if m.startswith("mpi4py")))
began = time.process_time()
import numpy
print(took / (time.process_time() - began))
"""
    ratios = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
        )
        heavy, mpi, ratio = done.stdout.splitlines()
        assert heavy == "[]"
        assert mpi == "[]"
        ratios.append(float(ratio))
    assert min(ratios) < 1, ratios
