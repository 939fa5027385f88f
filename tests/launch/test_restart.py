"""Commits on disk, complete whatever happens, and jobs that restart from them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from launch import Job, environment, mpi_name

import horo_lite as hvd
from horo_lite import checkpoint
from horo_lite.launch import jobs

# --- files ----------------------------------------------------------------------------------------


def snapshot(commit: int) -> dict[str, Any]:
    # Arrays of a size that pickle writes straight to the file, and several of them.
    return {"commit": commit, "weights": [np.full(10_000, commit + i) for i in range(2)]}


def check(found: Any, *commits: int) -> int:
    """Return which commit was found; assert that it is complete, and one of those."""
    commit: int = found["commit"]
    assert commit in commits
    assert all(np.all(w == commit + i) for i, w in enumerate(found["weights"]))
    return commit


def test_the_newest_commit_is_found_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    assert checkpoint.load(path) is None
    assert checkpoint.saved_at(path) is None
    for commit in range(3):
        checkpoint.save(path, snapshot(commit))
        check(checkpoint.load(path), commit)
    assert sorted(os.listdir(tmp_path)) == ["run.ckpt", "run.ckpt.previous"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert checkpoint.saved_at(path) == path.stat().st_mtime
    checkpoint.remove(path)
    assert not os.listdir(tmp_path)


@pytest.mark.launches
def test_a_kill_at_any_moment_of_saving_leaves_a_whole_commit(tmp_path: Path) -> None:
    """A child is killed before the first call of C that save() makes, before the second, and so on.

    Nothing else changes what is on disk.
    """
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, snapshot(0))
    checkpoint.save(path, snapshot(1))
    commit, found, n_calls = 2, [], 0
    while True:
        n_calls += 1
        child = os.fork()
        if child == 0:
            left = n_calls

            def count(frame: FrameType, event: str, arg: object) -> None:
                nonlocal left
                left -= event == "c_call"
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(count)
            try:
                checkpoint.save(path, snapshot(commit))
            finally:
                sys.setprofile(None)
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none of this is corruption
            found.append(check(checkpoint.load(path), commit - 1, commit))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if found[-1] == commit:
            commit += 1
    assert found[0] == 1
    assert len(set(found)) > 2, "no kill came after the new commit was in place"
    assert n_calls > 50
    assert set(os.listdir(tmp_path)) == {"run.ckpt", "run.ckpt.previous"}


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["magic", "format", "length", "digest", "data", "torn", "empty"])
def test_a_damaged_commit_falls_back_to_the_one_before(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    for commit in range(2):
        checkpoint.save(path, snapshot(commit))
    harms = {"magic": 0, "format": 11, "length": 39, "digest": 50, "data": 100_000}
    if harm in harms:
        damage(path, harms[harm])
    else:
        os.truncate(path, 100_000 if harm == "torn" else 0)
    with pytest.warns(RuntimeWarning, match=r"run\.ckpt .*renamed"):
        check(checkpoint.load(path), 0)
    # The damaged one does not become the previous one.
    checkpoint.save(path, snapshot(2))
    damage(path, 100_000)
    with pytest.warns(RuntimeWarning, match="checksum"):
        check(checkpoint.load(path), 0)
    checkpoint.save(path, snapshot(3))
    damage(path, 100_000)
    damage(tmp_path / "run.ckpt.previous", 100_000)
    with pytest.raises(hvd.CheckpointError, match=r"run\.ckpt\.previous is damaged"):
        checkpoint.load(path)


def test_who_removes_the_file_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    for commit in range(3):
        checkpoint.save(path, snapshot(commit))
    damage(path, 100_000)
    with pytest.warns(RuntimeWarning, match="checksum"):
        check(checkpoint.load(path), 1)
    check(checkpoint.load(path), 1)  # killed before the next commit
    checkpoint.save(path, snapshot(3))
    shutil.copy(path, tmp_path / "run.ckpt.new")  # killed in the middle of a commit
    path.unlink()
    assert checkpoint.load(path) is None
    assert checkpoint.saved_at(path) is None
    checkpoint.save(path, snapshot(4))
    damage(path, 100_000)
    with pytest.raises(hvd.CheckpointError):  # and not the one before
        checkpoint.load(path)


def test_a_kill_in_the_middle_of_the_first_commit_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "run.ckpt.new").write_bytes(b"HOROLITE")
    assert checkpoint.load(tmp_path / "run.ckpt") is None
    assert checkpoint.saved_at(tmp_path / "run.ckpt") is None


def test_commits_are_whole_without_hard_links(tmp_path: Path, monkeypatch: Any) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "run.ckpt"
    for commit in range(3):
        checkpoint.save(path, snapshot(commit))
        check(checkpoint.load(path), commit)
    assert os.listdir(tmp_path) == ["run.ckpt"]


def test_a_commit_that_finds_no_room_names_the_file_and_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "commit"
    checkpoint.save(path, b"the last one")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match=rf"cannot be written to {path} \(.*Make room"):
            checkpoint.save(path, bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load(path) == b"the last one"
    assert [file.name for file in tmp_path.iterdir()] == ["commit"]


def test_a_file_that_is_no_commit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('a script and no commit, given by mistake')\n" * 9)
    with pytest.raises(hvd.CheckpointError, match="not a commit of horo_lite"):
        checkpoint.load(path)
    assert os.listdir(tmp_path) == ["train.py"]


def test_another_users_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, snapshot(0))
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(hvd.CheckpointError, match="belongs to user"):
        checkpoint.load(path)


# --- jobs -----------------------------------------------------------------------------------------

TRAIN = """
import os, signal
import numpy as np
import horo_lite as hvd
from horo_lite.elastic import Sampler, State

class Parameter:
    def __init__(self, rank):
        self.data = np.full(1000, rank, np.float32)
        self.grad = None

class Momentum:
    def __init__(self, params):
        self.params = params
        self.velocities = [np.zeros_like(p.data) for p in params]
    def step(self):
        for p, velocity in zip(self.params, self.velocities):
            velocity *= 0.5
            velocity += p.grad
            p.data -= 0.1 * velocity

def train(kills):
    # Attempt kills[i][0] ends when its rank kills[i][1] is at batch kills[i][2].
    world = hvd.init()
    attempt = int(os.environ["HORO_LITE_RESTART"])
    opt = hvd.DistributedOptimizer(Momentum([Parameter(world.rank), Parameter(7)]))
    sampler = Sampler(48)
    state = State(params=[p.data for p in opt.params], opt=opt, sampler=sampler, epoch=0)
    seen = []

    @hvd.elastic.run
    def epochs(state):
        begun_at = state.epoch, sampler.processed_num
        while state.epoch < 2:
            sampler.set_epoch(state.epoch)
            for batch, index in enumerate(sampler):
                for p in opt.params:
                    p.grad = (p.data - index) / 100
                n_done = state.epoch * 48 + sampler.processed_num
                if (attempt, world.rank, n_done // world.size) in kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                opt.step()
                sampler.record_batch(batch, 1)
                seen.append(index)
                if batch % 3 == 2:
                    state.commit()
            state.epoch += 1
            state.commit()
        return begun_at

    return attempt, epochs(state), [p.data for p in opt.params], seen
"""


@pytest.mark.mpi
def test_a_job_started_again_ends_where_an_undisturbed_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is killed in the first epoch, and then rank 0 in the second."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(jobs, "_FIRST_PAUSE_S", 0.1)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(TRAIN, cell)
    undisturbed = hvd.run(cell["train"], [()], np=3)
    assert sorted(index for *_, seen in undisturbed for index in seen) == sorted([*range(48)] * 2)
    capfd.readouterr()
    disturbed = hvd.run(cell["train"], [((0, 1, 7), (1, 0, 21))], np=3, restarts=2)
    said = capfd.readouterr().err
    for (_, _, expected, _), (attempt, begun_at, found, _) in zip(
        undisturbed, disturbed, strict=True
    ):
        assert attempt == 2
        assert begun_at == (1, 3 * 3)  # of 16 batches per epoch, 21 // 3 * 3 are committed
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_array_equal(a, b)
    for number, rank in ((1, 1), (2, 0)):  # MPICH reports processes instead of ranks
        why = rf"(rank {rank} \(pid \d+ on \S+\) |.*PID \d+ .*Killed).*"
        when = rf"restart {number} of 2 in 0\.1 s, from the commit"
        assert re.search(rf"the job failed \({why}\): {when}", said), said
    assert said.count("continuing from the commit of") == 2
    assert not os.listdir(tmp_path)


ELASTIC = """
import os, signal
import numpy as np
import horo_lite as hvd
hvd.init()
first, rank = os.environ["HORO_LITE_RESTART"] == "0", hvd.rank()
state = hvd.elastic.State(total=np.zeros(4), step=0)

@hvd.elastic.run(min_size=2)
def train(state):
    print(f"<{hvd.size()} ranks from step {state.step}>", flush=True)
    while state.step < 9:
        state.total = state.total + hvd.allreduce(np.full(4, state.step))
        state.step += 1
        if state.step == 5:
            state.commit()
        if first and (rank, state.step) in ((2, 3), (0, 7)):
            os.kill(os.getpid(), signal.SIGKILL)

train(state)
print("<end", *state.total, ">", flush=True)
"""


@pytest.mark.mpi
def test_too_few_ranks_of_an_elastic_job_are_a_bad_end(tmp_path: Path) -> None:
    """Open MPI's launcher exits with 0 then: the commits would be removed."""
    if mpi_name() != "openmpi":
        pytest.skip(
            "only Open MPI continues without dead ranks; the other launcher's test is enough"
        )
    (tmp_path / "train.py").write_text(ELASTIC)
    command = [sys.executable, "-m", "horo_lite", "-n", "3", "--elastic", "--restarts", "1"]
    env = environment({"TMPDIR": str(tmp_path)})
    with contextlib.closing(Job([*command, "train.py"], env, tmp_path)) as job:
        result = job.wait(60).check()
    begun = re.findall(r"<(\d) ranks from step (\d)>", result.stdout)
    assert Counter(begun) == {("3", "0"): 3, ("2", "3"): 2, ("3", "7"): 3}, str(result)
    assert result.stdout.count("<end 36.0 36.0 36.0 36.0 >") == 3
    assert re.search(r"failed \(.*TooFewRanks.*restart 1", result.stderr), str(result)
    assert os.listdir(tmp_path) == ["train.py"]


WAIT = """
import os, time
import horo_lite as hvd
from horo_lite.elastic import State
hvd.init()
state = State(step=7)
state.read_checkpoint()
state.commit()
print("up", os.environ["HORO_LITE_RESTART"], flush=True)
time.sleep(60)
"""


@pytest.mark.mpi
def test_who_ends_the_launcher_wants_no_restart_and_finds_the_last_commit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAIT)
    command = [sys.executable, "-m", "horo_lite", "-n", "2", "--restarts", "3", "train.py"]
    with contextlib.closing(Job(command, environment({"TMPDIR": str(tmp_path)}), tmp_path)) as job:
        job.wait_for("up 0", count=2)
        os.kill(job.launcher.pid, signal.SIGTERM)
        result = job.wait(10)
        assert result.returncode == 128 + signal.SIGTERM
        assert not job.processes()
    kept = re.search(r"to continue from it, set HORO_LITE_CHECKPOINT=(\S+)", result.stderr)
    assert kept is not None, str(result)
    assert checkpoint.load(kept[1]) == {"step": 7}
    assert "restart" not in result.stderr


PREEMPTED = """
import os, sys, time
import horo_lite as hvd
hvd.init()
preemption = hvd.elastic.Preemption()
save = hvd.checkpoint.save  # a slow disk, which the program's end waits for
hvd.checkpoint.save = lambda *args: (time.sleep(1), save(*args))
state = hvd.elastic.State(step=0, write_in_background=True)
state.read_checkpoint()
state.sync()
print("up", os.environ["HORO_LITE_RESTART"], "from", state.step, flush=True)
while os.environ["HORO_LITE_RESTART"] == "0":
    time.sleep(0.01)
    state.step += 1
    if preemption.requested():
        state.commit()
        print("<left after", state.step, ">", flush=True)
        hvd.barrier()
        sys.exit(75)
print("end", flush=True)
"""


@pytest.mark.mpi
def test_a_signal_to_the_launcher_ends_all_ranks_after_one_step_and_is_a_restart(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(PREEMPTED)
    command = [sys.executable, "-m", "horo_lite", "-n", "2", "--restarts", "1", "train.py"]
    with contextlib.closing(Job(command, environment({"TMPDIR": str(tmp_path)}), tmp_path)) as job:
        job.wait_for("up 0", count=2)
        os.kill(job.launcher.pid, signal.SIGUSR1)
        result = job.wait(30).check()
    left = re.findall(r"<left after (\d+) >", result.stdout)
    assert len(left) == 2 and left[0] == left[1], str(result)  # noqa: PT018
    assert result.stdout.count(f"up 1 from {left[0]}\n") == result.stdout.count("end\n") == 2
    assert "the job failed (exit code 75" in result.stderr


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "[horo_lite] rank 1 of 2 (vm, pid 7) ends the job with an exception:\n"
            "[rank 1] Traceback (most recent call last):\n[rank 1] ValueError: odd\n"
            "[horo_lite] rank 0 of 2 (vm, pid 6): PeerLostError: rank 1 (pid 7 on vm) gave up\n",
            "rank 1 of 2 (vm, pid 7) ends the job with an exception: ValueError: odd",
        ),
        (
            "loading\n[horo_lite] rank 0 of 2 (vm, pid 6): PeerLostError: rank 1 (pid 7 on vm) was "
            "killed by signal 9 (Killed) while rank 0 (pid 6 on vm) waited in barrier\n",
            "rank 1 (pid 7 on vm) was killed by signal 9 (Killed)",
        ),
        (
            "[horo_lite] rank 0 of 2 (vm, pid 6): PeerLostError: rank 1 (pid 7 on vm) was killed "
            "by signal 9 (Killed), last seen in allreduce 'a', while rank 0 waited in barrier\n",
            "rank 1 (pid 7 on vm) was killed by signal 9 (Killed), last seen in allreduce 'a'",
        ),
        (
            "----\nprterun noticed that process rank 1 with PID 7 on node vm exited on\n"
            "signal 9 (Killed).\n----\n",
            "process rank 1 with PID 7 on node vm exited on signal 9 (Killed)",
        ),
        (
            "=====\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
            "=   PID 7 RUNNING AT vm\n=   EXIT CODE: 9\n=====\n"
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis typically\n",
            "PID 7 RUNNING AT vm: Killed (signal 9)",
        ),
        (  # Intel MPI, which has killed rank 0
            "=   RANK 0 PID 6 RUNNING AT vm\n=   KILLED BY SIGNAL: 9 (Killed)\n=====\n\n=====\n"
            "=   RANK 1 PID 7 RUNNING AT vm\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n==\n",
            "RANK 1 PID 7 RUNNING AT vm: KILLED BY SIGNAL: 11 (Segmentation fault)",
        ),
        (
            "[horo_lite] 2 ranks continue\n"
            "[horo_lite] rank 0 of 1 (vm, pid 7): TooFewRanksError: 1 rank left (at /x.py:3, f)\n",
            "rank 0 of 1 (vm, pid 7): TooFewRanksError: 1 rank left",
        ),
        ("nothing of the kind, rank and file", ""),
    ],
)
def test_the_cause_is_found_in_what_ranks_and_launchers_say(said: str, cause: str) -> None:
    assert jobs.cause(said) == cause


def repeated(
    failures: list[jobs.Failure | None], restarts: int, commits_after: tuple[int, ...], path: Path
) -> tuple[jobs.Failure | None, int]:
    """Return how it ended and the number of attempts, some of which made a commit."""
    attempts = []

    def attempt(number: int) -> jobs.Failure | None:
        assert number == len(attempts)
        if number in commits_after:
            checkpoint.save(path, number)
            os.utime(path, (number, number))
        attempts.append(number)
        return failures[number]

    return jobs.until_done(attempt, restarts=restarts, checkpoint=str(path)), len(attempts)


def test_pauses_grow_until_there_is_a_new_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    bad = [jobs.Failure(1, f"rank {i} of 9: odd {'x' * i}") for i in range(9)]
    path = tmp_path / "run.ckpt"
    assert repeated([*bad[:4], None], 9, (), path) == (None, 5)
    assert pauses == [1, 2, 4, 8]
    pauses.clear()
    assert repeated(bad, 5, (2, 3), path) == (bad[5], 6)
    assert pauses == [1, 2, 1, 1, 2]
    said = capsys.readouterr().err
    assert "restart 1 of 9 in 1 s, from the beginning" in said
    assert re.search(r"restart 3 of 5 in 1 s, from the commit of \d\d:\d\d:02", said)
    assert said.strip().endswith("(rank 5 of 9: odd xxxxx), and all 5 restarts have been used")


def test_a_job_that_never_gets_going_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    same = [jobs.Failure(1, f"rank 1 of 2 (host, pid {i}) raised OSError") for i in range(3)]
    assert repeated(same, 2, (), tmp_path / "run.ckpt") == (same[2], 3)
    words = "failed 3 times in the same way, before its first commit"
    assert words in capsys.readouterr().err
    repeated(same, 2, (1,), tmp_path / "run.ckpt")
    assert words not in capsys.readouterr().err
