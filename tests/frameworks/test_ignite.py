"""PyTorch Ignite, a library that imports `horovod` itself, on horo_lite under that name."""

from __future__ import annotations

import pytest
from horovod_scripts import figures, run_script

LIMIT_S = 120
pytestmark = pytest.mark.timeout(4 * LIMIT_S)


@pytest.mark.shows("eager", "overlap")
def test_training_is_that_of_one_process() -> None:
    def run(n: int) -> list[float]:
        return figures(run_script("with_ignite.py", n, timeout_s=LIMIT_S), n)

    whole = run(1)
    assert whole[1] < whole[0]
    assert run(2) == pytest.approx(whole, rel=1e-4)


def test_it_starts_the_ranks_itself() -> None:
    """With `horovod.run`, which returns results and raises errors."""
    whole = figures(run_script("with_ignite.py", 1, timeout_s=LIMIT_S), 1)
    spawned = run_script("with_ignite.py", 1, "--spawn", 2, timeout_s=LIMIT_S)
    assert figures(spawned, 2) == pytest.approx(whole, rel=1e-4)
