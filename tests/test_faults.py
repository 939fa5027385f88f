"""What happens when something goes wrong, seen from outside: exit code, words, time, leftovers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import Job, Result, mpi_name, run_ranks, start_ranks

pytestmark = pytest.mark.mpi

LIMIT_S = 5.0  # from the fault to the end of the job
OVER = {"shm": "", "mpi": "1,1,1", "mixed": "2,1"}
PRELUDE = """\
import os, signal, sys, time
import numpy as np
import horo_lite as hvd
world = hvd.init()
rank, size = world.rank, world.size
def fault():
    print("FAULT", flush=True)
"""
# What a launcher adds once a rank has failed.
LAUNCHERS_WORDS = re.compile(
    r"prterun|mpiexec|MPI_ABORT|BAD TERMINATION|application called MPI_Abort"
)


def script(body: str) -> str:
    lines = body.strip("\n").splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    return PRELUDE + "\n".join(line[indent:] for line in lines) + "\n"


def end_of(job: Job) -> Result:
    """The job's end, which must come within the limit and leave no process behind."""
    began = time.monotonic()
    result = job.wait(20)
    assert time.monotonic() - began < LIMIT_S, f"the end took too long: {result}"
    until = time.monotonic() + 1  # MPICH's launcher may end before the ranks it has killed
    while job.processes() and time.monotonic() < until:
        time.sleep(0.01)
    assert not job.processes(), f"processes are left: {result}"
    return result


WAITING = {
    "allreduce": "hvd.allreduce(np.ones(1000))",
    "asynchronous": "hvd.synchronize(hvd.allreduce_async(np.ones(1000), name='w'))",
}
ENDS = {
    "exception": ("raise ValueError('no such file')", "no such file"),
    "sys.exit(3)": ("sys.exit(3)", ""),
    "sys.exit(0)": ("sys.exit(0)", ""),
    "sys.exit(text)": ("sys.exit('nothing to train on')", "nothing to train on"),
    "end of the program": ("pass", ""),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    "os._exit(0)": ("os._exit(0)", ""),
}
# Everything once; of the rest what differs in who notices.
CASES = [("shm", "allreduce", end) for end in ENDS]
CASES += [
    ("shm", "asynchronous", end)
    for end in ("exception", "sys.exit(0)", "end of the program", "SIGKILL")
]
CASES += [
    (over, waiting, end)
    for over in ("mpi", "mixed")
    for waiting, end in (
        ("allreduce", "exception"),
        ("asynchronous", "sys.exit(0)"),
        ("allreduce", "end of the program"),
        ("allreduce", "SIGKILL"),
    )
]


@pytest.mark.parametrize(("over", "waiting", "end"), CASES)
def test_one_rank_ends_while_the_others_wait(over: str, waiting: str, end: str) -> None:
    """The job ends soon, not with 0, and stderr names the rank; its own words come first."""
    statement, words = ENDS[end]
    body = f"""
    hvd.allreduce(np.ones(10))
    if rank == 1:
        time.sleep(0.3)
        fault()
        {statement}
    else:
        {WAITING[waiting]}
        print("came through", flush=True)
    """
    env = {"HORO_LITE_TEST_HOSTS": OVER[over]}
    with start_ranks(script(body), 3, env=env) as job:
        job.wait_for("FAULT")
        result = end_of(job)
    assert "came through" not in result.stdout
    if mpi_name() == "mpich" and end in ("SIGKILL", "os._exit(0)"):
        # Its launcher kills the others within milliseconds, before they can say anything.
        assert end != "SIGKILL" or result.returncode != 0, str(result)
        return
    assert result.returncode != 0, str(result)
    assert re.search(r"\brank 1\b", result.stderr), str(result)
    if words:
        assert words in result.stderr, str(result)
        launchers = LAUNCHERS_WORDS.search(result.stderr)
        assert launchers is None or result.stderr.index(words) < launchers.start(), str(result)
    if end == "exception":
        assert "Traceback" in result.stderr
        assert re.search(r"rank 1\b.*", result.stderr[: result.stderr.index(words)]), str(result)


def test_plans_that_differ() -> None:
    """MismatchError on every rank with the ranks and the tensor, whatever it is that differs."""
    body = """
    class Parameter:
        def __init__(self, shape, dtype):
            self.data = np.zeros(shape, dtype)
            self.grad = np.full(shape, rank + 1, dtype)

    class Descent:
        def __init__(self, params):
            self.params = params
        def step(self):
            for p in self.params:
                p.data -= p.grad

    def train(shapes, dtypes, names, compression):
        params = [Parameter(s, d) for s, d in zip(shapes, dtypes)]
        opt = hvd.DistributedOptimizer(
            Descent(params), named_parameters=list(zip(names, params)), compression=compression
        )
        opt.step()
        return params

    f4, none = np.float32, hvd.Compression.none
    odd = rank == size - 1
    cases = {
        "names": ([(2,), (3,)], [f4, f4], ["weight", "other" if odd else "bias"], none),
        "shapes": ([(2,), (4,) if odd else (3,)], [f4, f4], ["weight", "bias"], none),
        "dtypes": ([(2,), (3,)], [f4, np.float64 if odd else f4], ["weight", "bias"], none),
        "count": ([(2,), (3,), (3,)][: 2 + odd], [f4] * (2 + odd),
                  ["weight", "bias", "more"][: 2 + odd], none),
        "compression": ([(2,), (3,)], [f4, f4], ["weight", "bias"],
                        hvd.Compression.fp16 if odd else none),
    }
    for case, arguments in cases.items():
        try:
            train(*arguments)
        except hvd.MismatchError as error:
            text = " ".join(str(error).split())
            print(f"<{rank}|{case}|{text}>", flush=True)
    params = train([(2,), (3,)], [f4, f4], ["weight", "bias"], none)
    assert all(np.all(p.data == -(size + 1) / 2) for p in params)
    """
    result = run_ranks(script(body), 3).check()
    found = re.findall(r"<(\d)\|(\w+)\|(.*?)>\n", result.stdout)
    words = {
        "names": ["other", "bias"],
        "shapes": ["bias", "3", "4"],
        "dtypes": ["bias", "float32", "float64"],
        "count": ["2", "3"],
        "compression": ["fp16", "none"],
    }
    assert {(int(rank), case) for rank, case, _ in found} == {
        (rank, case) for rank in range(3) for case in words
    }, str(result)
    for _, case, text in found:
        for word in (*words[case], "rank", "2"):
            assert word in text, f"{case}: {word!r} is not in: {text}"


def test_a_mismatch_that_nobody_catches_ends_the_job() -> None:
    body = """
    fault()
    hvd.allreduce(np.ones(3 + rank), name="weights")
    """
    with start_ranks(script(body), 2) as job:
        job.wait_for("FAULT")
        result = end_of(job)
    assert result.returncode != 0
    assert "MismatchError" in result.stderr
    for word in ("weights", "rank 0", "rank 1", "3", "4"):
        assert word in result.stderr


def test_who_has_called_shutdown_is_not_waited_for() -> None:
    body = """
    hvd.allreduce(np.ones(3))
    if rank == 1:
        hvd.shutdown()
        time.sleep(8)  # alive, but no longer taking part
    else:
        time.sleep(0.2)
        began = time.monotonic()
        try:
            hvd.allreduce(np.ones(3))
        except hvd.PeerLostError as error:
            print(f"lost after {time.monotonic() - began:.1f} s: {error}", flush=True)
        fault()
    """
    with start_ranks(script(body), 2) as job:
        job.wait_for("FAULT")
        assert re.search(r"lost after [01]\.\d s: .*rank 1", job.stdout()), job.stdout()


# --- leftovers ------------------------------------------------------------------------------------

# Open MPI's and MPICH's own, which they do not always clear away after a crash.
MPIS_OWN = re.compile(r"vader_segment|sm_segment|mpich_sh|osc_rdma|psm|ucx|pmix|prrte")


def named_leftovers() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not MPIS_OWN.search(name)}


@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.6, 0.9, 1.2])
def test_sigkill_during_init_leaves_nothing(delay_s: float, tmp_path: Path) -> None:
    before = named_leftovers()
    body = "import horo_lite as hvd; hvd.init(); hvd.barrier(); print('up', flush=True)"
    with start_ranks(body, 3, env={"TMPDIR": str(tmp_path)}) as job:
        time.sleep(delay_s)
        for pid in (*job.ranks().values(), job.launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.launcher.wait(10)
    assert named_leftovers() <= before
    ours = [path for path in tmp_path.rglob("*") if "horo" in path.name]
    assert not ours


def test_nothing_is_left_behind() -> None:
    """No name in /dev/shm while the job runs or after it, and no descriptor kept open."""
    before = named_leftovers()
    body = """
    hvd.allreduce(np.ones(100_000))
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(fd) for fd in fds if os.path.islink(fd)]
    print("memfd open:", sum("horo_lite" in name for name in held), flush=True)
    hvd.barrier()
    time.sleep(0.3)
    hvd.shutdown()
    del world
    maps = open("/proc/self/maps").read()
    print("memfd mapped:", maps.count("memfd:horo_lite"), flush=True)
    """
    with start_ranks(script(body), 3) as job:
        job.wait_for("memfd open:", count=3)
        assert named_leftovers() <= before
        result = job.wait(20).check()
        assert not job.processes()
    assert result.stdout.count("memfd open: 0") == 3, str(result)
    assert result.stdout.count("memfd mapped: 0") == 3, str(result)
    assert named_leftovers() <= before


def test_a_container_has_64_mib_of_dev_shm() -> None:
    """Enough for 4 ranks that reduce far more than that."""
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


@pytest.mark.parametrize("over", ["shm", "mixed"])
def test_a_clean_exit_with_work_in_flight(over: str) -> None:
    """What all ranks have submitted is completed; nobody complains."""
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
until = time.monotonic() + 2
while threads() > before and time.monotonic() < until:
    time.sleep(0.01)
assert threads() == before, (before, threads())
print("clean", flush=True)
"""
    for hosts in ("", "1,1"):
        result = run_ranks(body, 2, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
        assert result.stdout.count("clean") == 2


def test_the_world_can_be_made_again() -> None:
    body = """
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
    print("made", flush=True)
    """
    for hosts in ("", "2,1"):
        result = run_ranks(script(body), 3, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
        assert result.stdout.count("made") == 3


def test_forked_children_are_no_ranks() -> None:
    """However a child ends, the job goes on; what it may not do it is told."""
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
            lambda: world.group.broadcast(np.ones(3), root_rank=0),
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

    # A child that outlives what the parent does next.
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
        result = run_ranks(script(body), 2, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
        assert result.stdout.count("went on") == 2
        assert result.stderr.strip() == "", str(result)


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", WAITING)
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_ctrl_c_while_waiting(waiting: str, hosts: str) -> None:
    """KeyboardInterrupt comes within 2 s, and the peer that was waited for is told."""
    body = f"""
    hvd.allreduce(np.ones(3))
    if rank == 1:
        print("waiting", flush=True)
        try:
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
        os.kill(job.ranks()[1], signal.SIGINT)
        job.wait_for("interrupted", timeout_s=2)
        result = end_of(job)
    assert result.returncode != 0
    assert "KeyboardInterrupt" in result.stderr


def test_ctrl_c_without_a_launcher() -> None:
    body = """
    print("waiting", flush=True)
    time.sleep(60)
    """
    with start_ranks(script(body), 1, launcher=False) as job:
        job.wait_for("waiting")
        job.launcher.send_signal(signal.SIGINT)
        result = end_of(job)
    assert "KeyboardInterrupt" in result.stderr
    assert "abort" not in result.stderr.lower()


@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_waiting_costs_no_cpu(hosts: str) -> None:
    """2 s of waiting for a late rank cost under 0.1 s of CPU; twice that is allowed here."""
    body = f"""
    import resource
    def cpu():
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime
    for waiting in {list(WAITING.values())!r}:
        hvd.barrier()
        if rank == 1:
            time.sleep(2)
        before, began = cpu(), time.monotonic()
        exec(waiting)
        if rank == 0:
            waited = time.monotonic() - began
            print(f"<{{waited:.2f}} {{cpu() - before:.3f}} {{waiting}}>", flush=True)
    """
    result = run_ranks(script(body), 2, env={"HORO_LITE_TEST_HOSTS": hosts}).check()
    costs = re.findall(r"<(\S+) (\S+) (.*)>", result.stdout)
    assert len(costs) == len(WAITING)
    for waited, cost, waiting in costs:
        assert float(waited) > 1.5, f"{waiting} did not wait: {result}"
        assert float(cost) < 0.2, f"{waiting} used {cost} s of CPU: {result}"


# --- the import -----------------------------------------------------------------------------------


def test_the_import_is_light() -> None:
    """No framework, no MPI; and quick, of several tries the best."""
    code = """
import sys, time
began = time.perf_counter()
import horo_lite
print(time.perf_counter() - began)
heavy = {"mpi4py", "torch", "jax", "tensorflow", "keras", "cupy", "ml_dtypes", "sklearn",
         "matplotlib", "tqdm", "threadpoolctl", "multiprocessing", "asyncio"}
print(sorted(heavy & set(sys.modules)))
print(sorted(m for m in sys.modules if m.startswith("mpi4py")))
"""
    times = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
        )
        seconds, heavy, mpi = done.stdout.splitlines()
        assert heavy == "[]"
        assert mpi == "[]"
        times.append(float(seconds))
    assert min(times) < 0.15, times
