"""Over MPI: memory returned by an operation that ended early is never written to again."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.two_at_a_time]

SCRIPT = Path(__file__).with_name("interrupts_ranks.py")

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "allgather_object", "recv")
CASES = [(name, phase, "interrupt") for name in OPERATIONS for phase in ("handshake", "movement")]
CASES = [case for case in CASES if case[:2] != ("recv", "handshake")]
CASES += [("allgather", "movement", "loss"), ("broadcast", "movement", "loss")]


@pytest.mark.parametrize(("operation", "phase", "how"), CASES)
def test_memory_given_back_keeps_its_content(operation: str, phase: str, how: str) -> None:
    env = {"HORO_LITE_TEST_HOSTS": "1,1"}
    result = run_ranks(SCRIPT, 2, args=(operation, phase, how), env=env)
    assert "untouched" in result.stdout, str(result)
