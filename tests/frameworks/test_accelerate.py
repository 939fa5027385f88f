"""Hugging Face's Accelerate and Trainer, and Lightning Fabric, on the backend "horo_lite"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Job, environment

HERE = Path(__file__).parent
TORCHRUN = "-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 2"


def ranks_of(script: str, args: list[str], backend: str, folder: Path, n: int = 2) -> list[Any]:
    """Return each rank's result, of two that torchrun starts, or of one."""
    result = folder / backend
    launcher = TORCHRUN.split() if n > 1 else []
    command = [sys.executable, *launcher, str(HERE / script), *args, backend, str(result)]
    job = Job(command, environment(), folder)
    try:
        job.wait(90).check()
    finally:
        job.close()
    return [torch.load(f"{result}.{rank}") for rank in range(n)]


def trained(wrapper: str, backend: str, folder: Path) -> list[Any]:
    """Return the same for a run of a wrapper."""
    return ranks_of("wrappers_ranks.py", [wrapper], backend, folder)


@pytest.mark.shows("eager", "overlap")
@pytest.mark.parametrize("wrapper", ["accelerate", "fabric"])
def test_training_is_that_on_gloo(wrapper: str, tmp_path: Path) -> None:
    """Bit for bit, since a sum of two numbers does not depend on their order.

    Each run has also compared itself with one process on the whole batches.
    """
    same([*trained(wrapper, "gloo", tmp_path), *trained(wrapper, "horo_lite", tmp_path)])


@pytest.mark.shows("eager", "overlap")
def test_the_trainer(tmp_path: Path) -> None:
    """Bit for bit as on gloo, and as one process on the whole batches."""
    gloo, ours = (
        ranks_of("trainer_ranks.py", [], name, tmp_path) for name in ("gloo", "horo_lite")
    )
    # Only the main process writes its log.
    same([gloo[0], ours[0]])
    for ranks in (gloo, ours):
        same([{**rank, "losses": []} for rank in ranks])
    (alone,) = ranks_of("trainer_ranks.py", [], "alone", tmp_path, 1)
    assert alone["losses"][0] > 1.2 * alone["losses"][-1]
    assert ours[0]["losses"] == pytest.approx(alone["losses"], rel=1e-3)  # rounded for the log
    for name, value in alone["model"].items():
        torch.testing.assert_close(ours[0]["model"][name], value, rtol=1e-9, atol=1e-9)


def same(ranks: list[Any]) -> None:
    first = ranks[0]
    for other in ranks[1:]:
        assert first["losses"] == other["losses"]
        assert first["model"].keys() == other["model"].keys()
        for name, value in first["model"].items():
            assert torch.equal(value, other["model"][name]), name
