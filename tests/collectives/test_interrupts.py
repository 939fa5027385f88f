"""Over MPI: memory returned by an operation that ended early is never written to again."""

from __future__ import annotations

from pathlib import Path

import interrupts_ranks
import pytest
from worlds import on_ranks

OPERATIONS = ("allreduce", "allgather", "broadcast", "alltoall", "allgather_object", "recv")
CASES = [(name, phase, "interrupt") for name in OPERATIONS for phase in ("handshake", "movement")]
CASES = [case for case in CASES if case[:2] != ("recv", "handshake")]
CASES += [("allgather", "movement", "loss"), ("broadcast", "movement", "loss")]


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize(("operation", "phase", "how"), CASES)
def test_memory_given_back_keeps_its_content(
    operation: str, phase: str, how: str, tmp_path: Path
) -> None:
    on_ranks(interrupts_ranks.end_early, 2, operation, phase, how, tmp_path, hosts="1,1")


@pytest.mark.served
@pytest.mark.mpi
def test_an_interrupted_shutdown_keeps_the_memory_of_its_round(tmp_path: Path) -> None:
    on_ranks(interrupts_ranks.shutdown_early, 2, tmp_path, hosts="1,1")
