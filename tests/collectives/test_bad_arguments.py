"""Invalid arguments: the same type of error on every rank, before any rank waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import script_on_ranks

SCRIPT = Path(__file__).with_name("bad_arguments_ranks.py")


@pytest.mark.served
@pytest.mark.parametrize(
    ("ranks", "hosts"), [(2, ""), (2, "1,1"), pytest.param(3, "2,1", marks=pytest.mark.mpi)]
)
def test_bad_arguments(ranks: int, hosts: str) -> None:
    env = {"HORO_LITE_TEST_HOSTS": hosts}
    result = script_on_ranks(SCRIPT, ranks, env=env, timeout_s=60)
    assert result.stdout.count("refused") == ranks, str(result)
