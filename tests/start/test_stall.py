"""Late ranks: what waiting ranks report, when, and how a stall ends the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch import PATIENCE, Job, RanksFailedError, run_threads, start_ranks

import horo_lite as hvd
from horo_lite import ops
from horo_lite._native import Segment, StallDetector, thread_group
from horo_lite.collectives.group import Group
from horo_lite.settings import seconds
from horo_lite.start import stall
from horo_lite.transports.mpi import start_barrier
from horo_lite.transports.shm import ShmTransport

HEADLINE = re.compile(r"^\[horo_lite\] stalled for .*$", re.MULTILINE)
S = r"(\d+\.\d) s"


class Told:
    """The text on stderr since the test began."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd, self._text, self._lock = capfd, "", threading.Lock()

    def text(self) -> str:
        with self._lock:
            self._text += self._capfd.readouterr().err
            return self._text

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        until = time.monotonic() + PATIENCE * 10
        while not (found := pattern.search(self.text())):
            assert time.monotonic() < until, f"{pattern.pattern} was not printed: {self.text()}"
            time.sleep(0.01)
        return found


def detectors_of(n: int, warn_s: float = 0.0, abort_s: float = 0.0) -> list[StallDetector]:
    """Return the detectors of ranks that are threads of this process."""
    segment = Segment.create(StallDetector.memory_bytes(n))
    names = [f"rank {rank} (a thread)" for rank in range(n)]
    made = [StallDetector(segment, 0, rank, [0] * n, [0] * n, names) for rank in range(n)]
    for one in made:
        one.set_limits(warn_s, abort_s)
    return made


# --- ranks as threads -----------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_report_of_one_stall(asynchronous: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Not for the earlier barriers, which took longer together; one, however many wait."""
    told = Told(capfd)

    def body(group: Group) -> None:
        for _ in range(6):
            time.sleep(0.1 * group.rank)
            ops.barrier(group=group)
        if group.rank == 1:
            told.wait_for(HEADLINE)
        if asynchronous:
            group.synchronize(ops.allreduce_async(1.0 + group.rank, name="loss", group=group))
        else:
            ops.allreduce(1.0 + group.rank, name="loss", group=group)

    run_threads(3, body, detectors=detectors_of(3, warn_s=3.0))
    text = told.text()
    assert len(HEADLINE.findall(text)) == 1, text
    stalled = re.search(rf"stalled for {S}: rank 1 is late$", text, re.M)
    waited = re.search(rf"ranks 0, 2 have waited {S} in allreduce 'loss' for rank 1$", text, re.M)
    (went_on,) = re.findall(rf"rank [02] continues after waiting for {S}", text)
    assert stalled is not None, text
    assert waited is not None, text
    assert 3.0 <= float(stalled[1]) <= float(went_on), text
    assert 3.0 <= float(waited[1]) <= float(went_on), text
    assert re.search(r"rank 1 \(a thread\) was last in barrier, which it reached", text), text


def test_who_comes_and_leaves_during_the_report_of_a_stall_has_come() -> None:
    """The report blocks until its stderr, a full pipe, is read."""
    reading, writing = os.pipe()
    capacity = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"." * capacity)
    waits: list[int] = []

    def reports(thread: int) -> bool:
        """Return whether the thread is in a system call on file descriptor 2."""
        called = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
        return called[1:2] == ["0x2"]

    def body(group: Group) -> None:
        if group.rank == 0:
            waits.append(threading.get_native_id())
        else:
            while not (waits and reports(waits[0])):
                time.sleep(0.01)
        ops.barrier(group=group)
        if group.rank == 1:
            group.transport.members.leave("its program is done")
            os.read(reading, capacity)

    stderr = os.dup(2)
    os.dup2(writing, 2)
    try:
        run_threads(2, body, detectors=detectors_of(2, warn_s=0.3))
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, reading, writing):
            os.close(descriptor)


def test_a_stall_ends_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """Also the late one, in its next call, even if it is the last to reach a barrier."""
    has_ended = threading.Event()

    def body(group: Group) -> None:
        if group.rank == 1:
            assert has_ended.wait(PATIENCE * 10)
        try:
            ops.barrier(group=group)
        finally:
            has_ended.set()

    with pytest.raises(RanksFailedError) as failed:
        run_threads(3, body, detectors=detectors_of(3, abort_s=2.0))
    assert set(failed.value.errors) == {0, 1, 2}
    for error in failed.value.errors.values():
        assert isinstance(error, hvd.StallError)
        assert "rank 1 did not arrive; rank 1 has made no call yet" in str(error)
    assert len(HEADLINE.findall(capfd.readouterr().err)) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_limit_of_a_thread_ends_its_wait(asynchronous: bool) -> None:
    has_ended = threading.Event()

    def body(group: Group) -> None:
        if group.rank == 1:
            assert has_ended.wait(PATIENCE * 10)
        try:
            with stall.abort_after(0.5 if group.rank == 0 else 1000.0), stall.abort_after(900.0):
                if asynchronous:
                    group.synchronize(ops.allreduce_async(1.0, name="loss", group=group))
                else:
                    ops.barrier(group=group)
        finally:
            has_ended.set()

    with pytest.raises(RanksFailedError) as failed:
        run_threads(2, body, detectors=detectors_of(2))
    assert set(failed.value.errors) == {0, 1}
    for error in failed.value.errors.values():
        assert "nothing has moved for 0.5 s (stall_abort_s): rank 1 did not arrive" in str(error)


def test_the_limit_of_a_thread_does_not_end_the_waits_of_others() -> None:
    """These have waited for longer; and theirs is not forgotten."""
    limit_s = 2.0
    comes = threading.Event()

    def body(group: Group) -> None:
        long = ops.allreduce_async(1.0, name="long", group=group) if group.rank == 0 else None
        if long is not None:

            def wait() -> None:
                with stall.abort_after(1000.0):
                    group.synchronize(long, beside=True)

            other = threading.Thread(target=wait)
            other.start()
            other.join(1.1 * limit_s)
            threading.Timer(0.2, comes.set).start()
        assert group.rank == 0 or comes.wait(PATIENCE * 10)
        with stall.abort_after(limit_s):
            ops.barrier(group=group)
        if group.rank == 1:
            ops.allreduce_async(1.0, name="long", group=group)
        else:
            other.join()

    run_threads(2, body, detectors=detectors_of(2))


def test_the_limit_of_a_thread_holds_also_if_another_one_waits_for_the_same() -> None:
    waits, has_ended = threading.Event(), threading.Event()
    passed = []

    def body(group: Group) -> None:
        if group.rank == 1:
            assert has_ended.wait(PATIENCE * 10)
            return
        handle = ops.allreduce_async(1.0, name="a", group=group)

        def wait() -> None:
            assert waits.wait(PATIENCE * 10)
            time.sleep(0.2)
            with pytest.raises(hvd.StallError):
                group.synchronize(handle, beside=True)

        other = threading.Thread(target=wait)
        other.start()
        waits.set()
        try:
            match = "nothing has moved for 1"
            with pytest.raises(hvd.StallError, match=match), stall.abort_after(1.0):
                group.synchronize(handle)
        finally:
            has_ended.set()
        other.join()
        passed.append("rank 0")

    with contextlib.suppress(RanksFailedError):  # the ranks may raise it when they end, too
        run_threads(2, body, detectors=detectors_of(2))
    assert passed


def test_a_rank_that_gives_up_because_of_a_stall_is_no_lost_peer() -> None:
    """Who finds it between two looks at the detector raises the same error as all others."""
    detectors = detectors_of(2)
    natives = thread_group(2)
    for native, detector in zip(natives, detectors, strict=True):
        native.watched_by(detector, range(2))
    natives[0].check_peers("before")
    detectors[1].stall("nothing has moved")
    natives[1].abandon("nothing has moved")
    with pytest.raises(hvd.StallError, match="nothing has moved"):
        natives[0].check_peers("after")


def test_ranks_that_wait_for_each_other(capfd: pytest.CaptureFixture[str]) -> None:
    """In different groups, each of which sees nothing wrong."""
    detectors = detectors_of(3, abort_s=2.0)
    parts = {"one": [0, 1], "two": [1, 2], "three": [2, 0]}
    groups: dict[tuple[str, int], Group] = {}
    for name, ranks in parts.items():
        for native, rank in zip(thread_group(2), ranks, strict=True):
            native.watched_by(detectors[rank], ranks)
            groups[name, rank] = Group(ShmTransport(native, ranks, detectors[rank]))

    def body(group: Group) -> None:
        name = ["one", "two", "three"][group.rank]
        ops.allreduce(1.0, name=name, group=groups[name, group.rank])

    with pytest.raises(RanksFailedError) as failed:
        run_threads(3, body, detectors=detectors)
    assert all(isinstance(error, hvd.StallError) for error in failed.value.errors.values())
    told = capfd.readouterr().err
    (headline,) = HEADLINE.findall(told)
    assert "the ranks wait for each other" in headline
    for rank, (name, ranks) in enumerate(parts.items()):
        (other,) = set(ranks) - {rank}
        of = f"ranks {min(ranks)}{'-' if 0 else ', '}{max(ranks)}"
        line = rf"rank {rank} has waited {S} in allreduce '{name}' of {of} for rank {other}"
        assert re.search(line, told), told


def test_what_was_announced_is_no_stall(capfd: pytest.CaptureFixture[str]) -> None:
    """Until the announced time is over; then it is reported."""
    told = Told(capfd)
    detectors = detectors_of(2, warn_s=0.2, abort_s=0.5)
    announced = threading.Event()

    def body(group: Group) -> None:
        if group.rank == 0:
            detectors[0].announce(0, "evaluation", 300.0)
            announced.set()
            time.sleep(0.75)
        assert announced.wait(PATIENCE * 10)
        ops.barrier(group=group)
        assert not HEADLINE.search(told.text())
        detectors[group.rank].set_limits(0.2, 0.0)
        if group.rank == 0:
            detectors[0].announce(0, "evaluation", 0.5)
            told.wait_for(HEADLINE)
        ops.barrier(group=group)

    run_threads(2, body, detectors=detectors)
    text = told.text()
    assert len(HEADLINE.findall(text)) == 1, text
    ago = re.search(rf"announced 'evaluation' {S} ago, for 0\.5 s at most", text)
    assert ago is not None, text
    assert float(ago[1]) >= 0.5, text


@pytest.mark.parametrize("asynchronous", [False, True])
def test_stragglers(
    asynchronous: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rank is charged with what the others waited, as measured by them.

    It comes once a report says that both wait for it: so it is the last, however busy the machine.
    """
    told = Told(capfd)
    detectors = detectors_of(3, warn_s=0.2)
    latecomers = [2, 1, 1, 1]
    reported_s, waited_s = [0.0] * 3, [0.0] * 3  # for each rank, by the others

    def body(group: Group) -> None:
        for step, late in enumerate(latecomers):
            if group.rank == late:
                waiting = "ranks " + ", ".join(str(r) for r in range(3) if r != late)
                report = rf"{waiting} have waited {S} in allreduce '{step}' for rank {late}$"
                reported_s[late] += float(told.wait_for(re.compile(report, re.M))[1])
            began = time.monotonic()
            if asynchronous:
                group.synchronize(ops.allreduce_async(1.0, name=str(step), group=group))
            else:
                ops.allreduce(1.0, name=str(step), group=group)
            if group.rank != late:
                waited_s[late] += time.monotonic() - began

    run_threads(3, body, detectors=detectors)
    lateness = detectors[0].lateness()
    assert lateness == detectors[2].lateness()
    assert lateness[0] == (0, 0.0)
    for late in (1, 2):
        n_last, mean_s = lateness[late]
        assert n_last == latecomers.count(late)
        # A report has the longer of the two waits until then, rounded to a tenth of a second.
        assert reported_s[late] - 0.05 * n_last <= 2 * mean_s <= waited_s[late]

    before = told.text()
    mean_s, worst = max((mean_s, rank) for rank, (_, mean_s) in enumerate(lateness))
    monkeypatch.setattr(stall, "WORTH_REPORTING_S", 2 * mean_s)
    stall.print_summary(detectors[0], 2 * mean_s)
    monkeypatch.setattr(stall, "WORTH_REPORTING_S", mean_s / 2)
    stall.print_summary(detectors[0], 1000 * mean_s)
    assert told.text() == before
    stall.print_summary(detectors[0], 2 * mean_s)
    assert f"waited {mean_s:.0f} s for rank {worst}, 50% of the run's" in told.text()


@pytest.mark.parametrize("wrong", ["soon", "-1", "inf", "nan"])
def test_limits_are_seconds(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="stall_warn_s must be a number of seconds"):
        seconds("stall_warn_s", wrong)
    assert seconds("stall_warn_s", "0") == 0.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"TIME_SECONDS": "45"}, {"WARN_S": "45.0"}),
        ({"TIME_SECONDS": "45", "DISABLE": "1"}, {"WARN_S": "0"}),
        ({"DISABLE": "0"}, {}),
    ],
)
def test_horovods_variables(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from horo_lite.horovod.world import _adopt_stall_limits

    monkeypatch.setattr(os, "environ", {f"HOROVOD_STALL_CHECK_{k}": v for k, v in given.items()})
    os.environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = "600"
    _adopt_stall_limits()
    ours = {name: os.environ[name] for name in os.environ if name.startswith("HORO_LITE")}
    named = {f"HORO_LITE_STALL_{name}": value for name, value in expected.items()}
    assert ours == {**named, "HORO_LITE_STALL_ABORT_S": "600.0"}


# --- processes ------------------------------------------------------------------------------------

PRELUDE = """\
import contextlib, ctypes, os, signal, sys, time
import numpy as np
import horo_lite as hvd
from stall_limits import limit_waits
world = hvd.init()
rank, size = world.rank, world.size
hvd.barrier()
"""
LATE = """
def asleep():
    while not os.access("asleep was told", os.F_OK):
        time.sleep(0.01)
def in_a_loop():
    while not os.access("in_a_loop was told", os.F_OK):
        pass
def holding_the_gil():
    ctypes.PyDLL(None).usleep(5_000_000)  # or until the signal that asks for its stacks
def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
for late in (asleep, in_a_loop, holding_the_gil, stopped):
    if rank == 1:
        late()
    hvd.allreduce(np.ones(3), name=late.__name__)
print("came through", flush=True)
"""


def reports(job: Job) -> list[str]:
    """Return the reports, each with its headline and all its lines."""
    parts = re.split(r"^(?=\[horo_lite\])", job.stderr(), flags=re.MULTILINE)
    return [part for part in parts if HEADLINE.match(part)]


@pytest.mark.launches
def test_where_the_late_rank_is() -> None:
    """Whatever the rank does, even if it cannot respond; the query does not disturb it."""
    env = {"HORO_LITE_STALL_WARN_S": "0.5"}
    with start_ranks(PRELUDE + LATE, 3, env=env) as job:
        for what in ("asleep", "in_a_loop"):
            job.wait_for(f" in {what}\n", on_stderr=True)  # the last line of its stack
            job.folder.joinpath(f"{what} was told").touch()
        job.wait_for("SIGSTOP", on_stderr=True)
        os.kill(job.ranks()[1], signal.SIGCONT)
        result = job.wait(20).check()
        told = reports(job)
    assert result.stdout.count("came through") == 3
    for what in ("asleep", "in_a_loop", "holding_the_gil"):
        (first, *_) = [one for one in told if f"in allreduce '{what}' for rank 1" in one]
        assert "ranks 0, 2 have waited" in first
        # The main thread's comes first, and the innermost of its frames.
        assert re.search(rf"its Python stacks:\n.*\n +File .* line \d+ in {what}\n", first), first
    (first, *_) = [one for one in told if "SIGSTOP" in one]
    assert re.search(r"rank 1 \(pid (\d+) .*kill -CONT \1 resumes it", first), first


@pytest.mark.launches
@pytest.mark.two_at_a_time
@pytest.mark.parametrize("hosts", ["", pytest.param("1,2", marks=pytest.mark.mpi)])
@pytest.mark.parametrize("waiting", ["direct", "asynchronous"])
def test_a_stall_ends_the_job(hosts: str, waiting: str) -> None:
    """Even if the late rank is stopped, and cannot raise."""
    call = {
        "direct": "hvd.allreduce(np.ones(3), name='loss')",
        "asynchronous": "hvd.synchronize(hvd.allreduce_async(np.ones(3), name='loss'))",
    }[waiting]
    body = f"""
limit_waits(3)
if rank == 1:
    print("FAULT", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)  # its engine must be stopped, too
{call}
print("came through", flush=True)
"""
    with start_ranks(PRELUDE + body, 3, env={"HORO_LITE_TEST_HOSTS": hosts}) as job:
        job.wait_for("FAULT")
        result = job.wait(20)
        told = reports(job)
        until = time.monotonic() + PATIENCE * 1
        while job.processes() and time.monotonic() < until:
            time.sleep(0.01)
        assert not job.processes(), str(result)
    assert result.returncode != 0, str(result)
    assert "came through" not in result.stdout
    assert len(told) == 1, str(result)
    assert "rank 1 is late" in told[0]
    # Woken by a peer, an engine may begin to wait before its own rank has submitted anything.
    in_ = "allreduce 'loss'" if waiting == "direct" else "(allreduce 'loss'|the matching of asyn)"
    assert re.search(f"in {in_}", told[0]), told[0]
    assert "SIGSTOP" in told[0]
    assert re.search(r"rank [02] of 3 .*StallError: .*rank 1 did not arrive", result.stderr)


@pytest.mark.launches
def test_a_rank_that_was_stopped_while_it_waited_is_late() -> None:
    """Its wait is over, but it cannot know that."""
    body = """
def waits():
    hvd.allreduce(np.ones(3), name="loss")
if rank == 0:
    while not os.access("it is stopped", os.F_OK):
        time.sleep(0.01)
waits()
print("came through", flush=True)
"""
    with start_ranks(PRELUDE + body, 2, env={"HORO_LITE_STALL_WARN_S": "0.5"}) as job:
        job.wait_for("rank 0 is late", on_stderr=True)  # so rank 1 is known to wait
        pid = job.ranks()[1]
        os.kill(pid, signal.SIGSTOP)
        job.folder.joinpath("it is stopped").touch()
        job.wait_for("SIGSTOP", on_stderr=True)
        os.kill(pid, signal.SIGCONT)
        job.wait(20).check()
        (told, *_) = [one for one in reports(job) if "SIGSTOP" in one]
    assert "rank 1 is late" in told, told
    assert re.search(r"rank 1 \(pid (\d+) .*kill -CONT \1 resumes it", told), told


@pytest.mark.launches
@pytest.mark.parametrize(
    ("waiting", "hosts"),
    [
        ("direct", ""),
        pytest.param("direct", "1,1", marks=pytest.mark.mpi),
        ("asynchronous", ""),
        ("asynchronous", "1,1"),
        ("in a message", ""),
    ],
)
def test_a_suspended_job_goes_on_where_it_was(waiting: str, hosts: str) -> None:
    """By Ctrl-Z, a scheduler or a container: the pause is neither a wait nor lateness."""
    call = {
        "direct": "hvd.allreduce(np.ones(3))",
        "asynchronous": "hvd.synchronize(hvd.allreduce_async(np.ones(3)))",
        "in a message": "hvd.recv(np.ones(3), 1) if rank == 0 else hvd.send(np.ones(3), 0)",
    }[waiting]
    body = f"""
limit_waits(3)
if rank == 1:
    time.sleep(0.5)
    print("rank 0 waits", flush=True)
    while not os.access("go on", os.F_OK):
        time.sleep(0.01)
{call}
hvd.barrier()  # a host's wait is counted in the next call
if rank == 0:
    (late,) = [one for one in hvd.stragglers() if one.rank == 1]
    took_s = time.monotonic() - began
    assert late.waited_s < took_s - 3.5, (late, took_s)
"""
    script = "import time\nbegan = time.monotonic()\n" + PRELUDE + body
    with start_ranks(script, 2, env={"HORO_LITE_TEST_HOSTS": hosts}) as job:
        job.wait_for("rank 0 waits")
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in job.ranks().values():
                os.kill(pid, number)
            time.sleep(4 if number == signal.SIGSTOP else 0.3)
        job.folder.joinpath("go on").touch()
        result = job.wait(20).check()
    assert "stalled for" not in result.stderr, str(result)


def test_time_for_which_a_rank_was_stopped_is_no_wait_in_init(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(start_barrier, "time", SimpleNamespace(monotonic=lambda: now))
    patience = start_barrier.Patience(0, 0.0, 3.0)

    def looks_for(s: float) -> None:
        nonlocal now
        for _ in range(round(s / 0.5)):
            now += 0.5
            patience.look(lambda _all: "rank 1")

    looks_for(2.0)
    now += 3600.0
    looks_for(0.5)
    with pytest.raises(hvd.StallError, match=r"rank 0 has waited 3\.0 s in init\(\) for rank 1"):
        looks_for(1.0)


@pytest.mark.launches
def test_a_rank_that_is_stopped_at_the_beginning_of_its_wait_has_not_waited() -> None:
    """Before the engine, which looks at the clock now and then, has seen that it waits."""
    body = """
import pathlib, signal, threading
limit_waits(2.2)
pid = hvd.broadcast_object(os.getpid())
received = pathlib.Path(__file__).with_name("received")
if rank == 0:
    while not received.exists():  # a root does not wait until all others have received
        time.sleep(0.001)
    handle = hvd.allreduce_async(np.ones(3))
    time.sleep(0.01)  # its engine has announced that, and is idle
    threading.Timer(0.005, os.kill, (pid, signal.SIGSTOP)).start()
else:
    received.touch()
    while open(f"/proc/{pid}/stat").read().rsplit(")")[1].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(2.5)
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.1)
    handle = hvd.allreduce_async(np.ones(3))
hvd.synchronize(handle)
"""
    with start_ranks(PRELUDE + body, 2) as job:
        result = job.wait(20).check()
    assert "stalled for" not in result.stderr, str(result)


@pytest.mark.launches
def test_a_process_may_be_stopped_at_any_moment_of_its_wait() -> None:
    """Also between two instructions of the detector: these check their waits without a pause."""
    script = """
import os, signal, sys, time
from horo_lite._native import Segment, StallDetector

def waits(begun):
    memory = Segment.create(StallDetector.memory_bytes(2))
    detector = StallDetector(memory, 0, 0, [0, 0], [0, 0], ["rank 0", "rank 1"])
    detector.set_limits(0.0, 2.2)
    wait = detector.wait()
    n_after, seen = 0, time.monotonic()
    os.write(begun, b".")
    while n_after < 100:
        wait.report_if_due("the test", [0], [1])
        now = time.monotonic()
        n_after += n_after > 0 or now - seen > 2.0
        seen = now

reading, begun = os.pipe()
pids = []
for _ in range(24):
    pids.append(os.fork())
    if pids[-1] == 0:
        failed = 1
        try:
            waits(begun)
            failed = 0
        finally:
            os._exit(failed)
    os.read(reading, 1)
    os.kill(pids[-1], signal.SIGSTOP)
time.sleep(2.5)
for pid in pids:
    os.kill(pid, signal.SIGCONT)
sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in pids))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.launches
def test_where_ranks_wait_for_each_other() -> None:
    """Each in an operation of another group: the lines of both are shown."""
    body = """
from horo_lite import new_group
pair = new_group([1, 0])
limit_waits(3)
def one():
    hvd.allreduce(np.ones(3), name="pair", group=pair)
def two():
    hvd.allreduce(np.ones(3), name="all")
one() if rank == 0 else two()
"""
    with start_ranks(PRELUDE + body, 2) as job:
        result = job.wait(20)
        (told,) = reports(job)
    assert result.returncode != 0
    assert "the ranks wait for each other" in told
    assert re.search(rf"rank 0 has waited {S} in allreduce 'pair' for rank 1\n", told), told
    assert re.search(rf"rank 1 has waited {S} in allreduce 'all' for rank 0\n", told), told
    for function in ("one", "two"):
        assert re.search(rf"line \d+ in {function}\n", told), told
    assert "StallError: nothing has moved for 3.0 s" in result.stderr


@pytest.mark.launches
@pytest.mark.parametrize(
    ("hosts", "both_wait"),
    [
        ("", "ranks 0, 2 have waited"),
        ("1,2", "(on other hosts rank 0, too)"),
        pytest.param("1,1,1", "(on other hosts rank 2, too)", marks=pytest.mark.mpi),
    ],
)
def test_announcing_and_asking_who_was_late(hosts: str, both_wait: str) -> None:
    """Also over hosts, which do not share a status board."""
    body = """
def until(event):
    while not os.access(event, os.F_OK):
        time.sleep(0.01)
if rank == 1:
    with hvd.announce("evaluation", expect_s=2):
        open("announced", "w").close()
        until("both wait")
        hvd.allreduce(np.ones(3), name="announced")
else:
    until("announced")
    hvd.allreduce(np.ones(3), name="announced")
took_s = max(hvd.allgather_object(time.monotonic() - began))
if rank == 0:
    (late,) = [one for one in hvd.stragglers() if one.rank == 1]
    assert late.n_last > 0 and 1 < late.waited_s < took_s, (late, took_s)
    print("asked", flush=True)
"""
    env = {"HORO_LITE_STALL_WARN_S": "0.5", "HORO_LITE_TEST_HOSTS": hosts}
    script = "import time\nbegan = time.monotonic()\n" + PRELUDE + body

    def told_of_both() -> list[str]:
        return [one for one in reports(job) if both_wait in one and "'announced'" in one]

    with start_ranks(script, 3, env=env) as job:
        until = time.monotonic() + PATIENCE * 20
        while not told_of_both():
            assert time.monotonic() < until, job.result()
            time.sleep(0.01)
        time.sleep(1)
        job.folder.joinpath("both wait").touch()
        assert "asked" in job.wait(20).check().stdout
        report = told_of_both()[0]
    told = re.search(rf"announced 'evaluation' {S} ago, for 2\.0 s at most", report)
    assert told is not None, report
    assert float(told[1]) >= 2.0, report
