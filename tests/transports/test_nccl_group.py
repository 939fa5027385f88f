"""Irregular cases of NCCL: life cycles, failures, mismatches; real ranks over the stand-in.

The normal case is in test_gpu.py. The ranks' programs are in nccl_checks.py, several cases per job.
"""

from __future__ import annotations

import re
from pathlib import Path

import fake_nccl
import nccl_checks
import pytest
from launch import mpi_name, run_ranks, start_ranks, that_leave_survivors
from worlds import on_ranks


def environment(log: Path | None = None, hosts: str = "") -> dict[str, str]:
    env = {"HORO_LITE_NCCL_LIB": fake_nccl.compiled(), "HORO_LITE_TEST_HOSTS": hosts}
    return env if log is None else {**env, "HORO_LITE_FAKE_NCCL_LOG": str(log / "log")}


def program(job: str) -> str:
    return f"import nccl_checks; nccl_checks.main({job!r})"


@pytest.mark.served
@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        ("life", 2),
        ("life", 3),
        ("life", 4),
        ("splits", 4),
        ("registration", 2),
        ("mismatches", 3),
        ("joined", 3),
        ("optimizers", 2),
        ("shuts_down_behind_a_busy_gpu", 2),
        ("late_at_the_first_use", 2),
        ("backward_overlaps", 2),
        ("keeps_nan", 3),
        ("graphs", 2),
    ],
)
def test_all_is_well_in_the_end(job: str, ranks: int, tmp_path: Path) -> None:
    on_ranks(nccl_checks.serve, ranks, job, env=environment(tmp_path), timeout_s=45)


# These load another library, change the package, or depend on what the process has counted or
# warned of before.
@pytest.mark.launches
@pytest.mark.parametrize(
    ("job", "ranks"),
    [
        ("one_rank_has_no_windows", 2),
        ("connecting_fails", 2),
        ("operations_fail", 3),
        ("learns_late", 3),
        ("ahead", 2),
        ("without_nccl", 2),
        ("sequences", 3),
    ],
)
def test_all_is_well_in_the_end_of_a_job_of_its_own(job: str, ranks: int, tmp_path: Path) -> None:
    result = run_ranks(program(job), ranks, env=environment(tmp_path), timeout_s=45).check()
    assert result.stdout.count("all is well") == ranks


@pytest.mark.mpi
@pytest.mark.parametrize("job", ["operations_fail", "mismatches"])
def test_the_same_across_hosts(job: str, tmp_path: Path) -> None:
    env = environment(tmp_path, hosts="2,1")
    result = run_ranks(program(job), 3, env=env, timeout_s=45).check()
    assert result.stdout.count("all is well") == 3


@pytest.mark.mpi
def test_one_call_ahead_at_the_end() -> None:
    """The rank with one more call gets an error, and none waits forever."""
    result = run_ranks(program("one_call_ahead"), 2, env=environment(), timeout_s=20)
    assert result.returncode != 0, str(result)
    assert re.search(r"PeerLostError: rank 1 has left.*rank 0 waited in allreduce", result.stderr)


@pytest.mark.launches
def test_what_all_have_queued_is_done_though_a_rank_leaves_early() -> None:
    result = run_ranks(program("leaves_beside_one_call_too_many"), 2, env=environment())
    assert result.stdout.count("all is well") == 2, str(result)


@pytest.mark.launches
def test_a_rank_is_late() -> None:
    """The other has queued an operation, and waits in a call that only the GPU can complete."""
    result = run_ranks(program("stalled"), 2, env=environment(), timeout_s=30)
    assert result.stdout.count("told") == 2, str(result)
    assert re.search(r"rank 0 has waited \d+\.", result.stderr), str(result)
    assert "in allreduce 'x', queued on its GPU for rank 1" in result.stderr
    assert re.search(r"line \d+ in late\n", result.stderr), str(result)


@pytest.mark.launches
@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("killed_while_another_is_ahead", 1),
        ("killed_while_progress_threads_are_ahead", 1),
        ("interrupted_at_the_first_use", 2),
    ],
)
def test_a_rank_waits_in_a_call_of_the_gpu(job: str, told: int, tmp_path: Path) -> None:
    options = that_leave_survivors()
    result = run_ranks(program(job), 2, env=environment(tmp_path), timeout_s=45, options=options)
    assert result.stdout.count("told") == told, str(result)


@pytest.mark.launches
def test_full_streams() -> None:
    result = run_ranks(program("full_streams"), 1, launcher=False, timeout_s=30).check()
    assert "all is well" in result.stdout


@pytest.mark.mpi
def test_a_rank_is_killed() -> None:
    """Ranks that wait for their GPUs are notified: the job ends soon, and names the rank."""
    with start_ranks(program("killed"), 3, env=environment()) as job:
        job.wait_for("FAULT")
        result = job.wait(5)
    assert result.returncode != 0, str(result)
    assert "came through" not in result.stdout
    if mpi_name() == "openmpi":  # MPICH's launcher kills the others before they can report it
        assert re.search(r"\brank 1\b", result.stderr), str(result)
