"""Hugging Face Accelerate and Lightning Fabric on torch.distributed's backend "horo_lite"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Job, environment

SCRIPT = Path(__file__).parent / "wrappers_ranks.py"


def trained(wrapper: str, backend: str, folder: Path) -> list[Any]:
    """What each of two ranks that torchrun starts has in the end."""
    torchrun = "-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 2"
    result = folder / backend
    command = [sys.executable, *torchrun.split(), str(SCRIPT), wrapper, backend, str(result)]
    job = Job(command, environment(), folder)
    try:
        job.wait(60).check()
    finally:
        job.close()
    return [torch.load(f"{result}.{rank}") for rank in range(2)]


@pytest.mark.shows("eager", "overlap")
@pytest.mark.parametrize("wrapper", ["accelerate", "fabric"])
def test_training_is_that_on_gloo(wrapper: str, tmp_path: Path) -> None:
    """To the bit, since a sum of two numbers does not depend on their order. Each run has compared
    itself with one process on the whole batches.
    """
    ranks = [*trained(wrapper, "gloo", tmp_path), *trained(wrapper, "horo_lite", tmp_path)]
    first = ranks[0]
    for other in ranks[1:]:
        assert first["losses"] == other["losses"]
        assert first["model"].keys() == other["model"].keys()
        for name, value in first["model"].items():
            assert torch.equal(value, other["model"][name]), name
