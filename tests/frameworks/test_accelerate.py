"""Hugging Face's Accelerate and Trainer on the backend "horo_lite"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun import assert_same_bits, results, run_torchrun

HERE = Path(__file__).parent


@pytest.mark.shows("eager", "overlap")
def test_training_is_that_on_gloo(tmp_path: Path) -> None:
    """Bit for bit, since a sum of two numbers does not depend on their order.

    Each run has also compared itself with one process on the whole batches.
    """
    ranks = []
    for backend in ("gloo", "horo_lite"):
        result = tmp_path / backend
        run_torchrun(HERE / "wrappers_ranks.py", "accelerate", backend, result, folder=tmp_path)
        ranks += results(result)
    assert_same_bits(ranks)


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script"])
def test_accelerates_own_script(name: str, tmp_path: Path) -> None:
    """They compare operations, `no_sync()` and whole trainings with those of one process."""
    env = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ran = run_torchrun(HERE / "accelerate_ranks.py", "horo_lite", name, folder=tmp_path, env=env)
    assert ran.stdout.count("passed on a rank") == 2, ran


@pytest.mark.shows("eager", "overlap")
def test_the_trainer(tmp_path: Path) -> None:
    """Bit for bit as on gloo, and as one process on the whole batches."""

    def run(backend: str, n: int) -> list[dict[str, Any]]:
        run_torchrun(HERE / "trainer_ranks.py", backend, tmp_path / backend, folder=tmp_path, n=n)
        return results(tmp_path / backend, n)

    gloo, ours = run("gloo", 2), run("horo_lite", 2)
    # Only the main process writes its log.
    assert_same_bits([gloo[0], ours[0]])
    for ranks in (gloo, ours):
        assert_same_bits([{**rank, "losses": []} for rank in ranks])
    (alone,) = run("alone", 1)
    assert alone["losses"][0] > 1.2 * alone["losses"][-1]
    assert ours[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3)  # rounded for the log
    for name, value in alone["model"].items():
        torch.testing.assert_close(ours[0]["model"][name], value, rtol=1e-9, atol=1e-9)
