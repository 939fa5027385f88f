"""Invalid arguments: the same type of error on every rank, before any rank waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

pytestmark = pytest.mark.mpi

SCRIPT = Path(__file__).with_name("bad_arguments_ranks.py")


@pytest.mark.parametrize(("np_", "hosts"), [(2, ""), (2, "1,1"), (3, "2,1")])
def test_bad_arguments(np_: int, hosts: str) -> None:
    result = run_ranks(SCRIPT, np_, env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=60).check()
    assert result.stdout.count("refused") == np_, str(result)
