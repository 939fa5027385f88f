"""PyTorch Ignite, a library that imports `horovod` itself, on horo_lite under that name.

And on the backend "horo_lite" of torch.distributed, which its `auto_model` does not know.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from horovod_scripts import SCRIPTS, figures, run_script
from launch import PATIENCE
from torchrun import run_torchrun
from without_mpi import started

LIMIT_S = 120
pytestmark = pytest.mark.timeout(4 * LIMIT_S)


@pytest.mark.shows("eager", "overlap")
def test_training_is_that_of_one_process_and_that_on_gloo(tmp_path: Path) -> None:
    """That on gloo to the last bit of the printed sum of the weights."""

    def run(n: int) -> list[float]:
        return figures(run_script("with_ignite.py", n, timeout_s=LIMIT_S), n)

    whole = run(1)
    assert whole[1] < whole[0]
    ours = run(2)
    assert ours == pytest.approx(whole, rel=1e-4)
    gloo = run_torchrun(SCRIPTS / "with_ignite.py", "--backend", "gloo", folder=tmp_path)
    assert figures(gloo.stdout, 2) == ours


def test_it_starts_the_ranks_itself() -> None:
    """With `horovod.run`, which returns results and raises errors."""
    whole = figures(run_script("with_ignite.py", 1, timeout_s=LIMIT_S), 1)
    spawned = run_script("with_ignite.py", 1, "--spawn", 2, timeout_s=LIMIT_S)
    assert figures(spawned, 2) == pytest.approx(whole, rel=1e-4)


BACKEND = """
import sys
import ignite.distributed as idist
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
import horo_lite.torch

dist.init_process_group(sys.argv[1])
torch.manual_seed(dist.get_rank())
model = idist.auto_model(torch.nn.Linear(4, 1))
if not isinstance(model, DistributedDataParallel):
    model = DistributedDataParallel(model)
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.5))
model(torch.full((2, 4), float(idist.get_rank() + 1))).sum().backward()
optimizer.step()
print(model.module.weight.tolist(), flush=True)
dist.destroy_process_group()
"""


def test_the_backend_says_what_auto_model_does_not_do(tmp_path: Path) -> None:
    """With the line that it advises, all ranks have the weights that they have on gloo."""
    weights = []
    for backend in "horo_lite", "gloo":
        (folder := tmp_path / backend).mkdir()
        with started(BACKEND, 2, folder, args=[backend]) as job:
            result = job.wait(LIMIT_S / PATIENCE).check()
        weights += result.stdout.splitlines()
        advice = "DistributedDataParallel(idist.auto_model(model))"
        assert result.stderr.count(advice) == (backend == "horo_lite"), result
    assert len(weights) == 4
    assert len(set(weights)) == 1
