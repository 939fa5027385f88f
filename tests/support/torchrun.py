"""Scripts that torchrun starts, and the comparison of what their ranks have trained."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from launch import Job, Result, environment

TORCHRUN = "-m torch.distributed.run --standalone --local-addr localhost --nproc-per-node 2"


def run_torchrun(
    script: Path, *args: object, folder: Path, n: int = 2, env: Mapping[str, str] | None = None
) -> Result:
    """Run the script on two ranks that torchrun starts, or as one process, in that folder."""
    launcher = TORCHRUN.split() if n > 1 else []
    job = Job([sys.executable, *launcher, str(script), *map(str, args)], environment(env), folder)
    try:
        return job.wait(90).check()
    finally:
        job.close()


def results(path: Path, n: int = 2) -> list[Any]:
    """Return what each rank has saved as `path`.rank."""
    return [torch.load(f"{path}.{rank}") for rank in range(n)]


def assert_same_bits(ranks: Sequence[Any]) -> None:
    """Compare the losses and the models of all of them."""
    first = ranks[0]
    for other in ranks[1:]:
        assert first["losses"] == other["losses"]
        assert first["model"].keys() == other["model"].keys()
        for name, value in first["model"].items():
            assert torch.equal(value, other["model"][name]), name
