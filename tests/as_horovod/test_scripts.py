"""Scripts for Horovod, unedited, under --as-horovod: N ranks give the result of one process."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import pytest
from horovod_scripts import SCRIPTS, figures, run_script
from launch import TESTS
from oracle import adasum_reference
from worlds import script_on_ranks

from horo_lite.horovod import aliases

LIMIT_S = 120
needs = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "sklearn")
]
pytestmark = [pytest.mark.launches, *needs, pytest.mark.timeout(4 * LIMIT_S)]


def run(script: str, n: int, *args: object, hosts: str = "", path: str = "") -> str:
    env = {"HORO_LITE_DEVICE": "cpu", **({"HORO_LITE_TEST_HOSTS": hosts} if hosts else {})}
    return run_script(script, n, *args, timeout_s=LIMIT_S, env=env, path=path)


def printed_by(script: str, n: int, *args: object) -> str:
    """Return the output of the script on ranks on which `horovod` is this package."""
    path = os.pathsep.join([aliases.PATH, *sys.path])
    return script_on_ranks(
        SCRIPTS / script,
        n,
        args=[str(arg) for arg in args],
        job_env={"HORO_LITE_DEVICE": "cpu", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout_s=LIMIT_S,
    ).stdout


@pytest.mark.served
def test_digits_and_accumulation() -> None:
    """The learning rate is the same after the script has multiplied it by the number of ranks."""
    whole = figures(printed_by("pytorch_digits.py", 1, "--batch-size", 64, "--lr", 0.08), 1)
    assert whole[1] < 0.97 * whole[0]
    # On each rank two passes of 16: the script divides the loss by the passes.
    options = ["--batches-per-allreduce", 2, "--gradient-predivide-factor", 2]
    passes = printed_by("pytorch_digits.py", 2, "--batch-size", 16, "--lr", 0.02, *options)
    assert figures(passes, 2) == pytest.approx(whole, rel=2e-4)


@pytest.mark.served
def test_the_synthetic_benchmark() -> None:
    assert "Total img/sec on 2 CPU(s): " in printed_by("pytorch_synthetic.py", 2)


@pytest.mark.served
def test_elastic_training_over_two_hosts() -> None:
    alone = figures(printed_by("pytorch_elastic.py", 1), 1)
    both = figures(run("pytorch_elastic.py", 2, hosts="1,1"), 2)
    assert both == pytest.approx(alone, rel=1e-5)


@pytest.mark.served
def test_adasum_of_the_ranks_steps() -> None:
    """As if both ranks' models and optimizers were in one process, with the formula in between."""
    import torch

    def model() -> Any:
        torch.manual_seed(3)
        layers = torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        return torch.nn.Sequential(*layers).double()

    models = [model() for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    for step in range(5):
        start = [p.detach().clone() for p in models[0].parameters()]
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for i in range(2):
                x = torch.linspace(-1, 1, 16, dtype=torch.float64)[:, None]
                x += rank + (2 * step + i) / 10
                torch.nn.functional.mse_loss(one(x), torch.sin(x)).backward()
            optimizer.step()
        for value, *moved in zip(start, *(m.parameters() for m in models), strict=True):
            combined = adasum_reference([(p.detach() - value).numpy() for p in moved])
            for p in moved:
                p.data.copy_(value + torch.from_numpy(np.asarray(combined)))
    total = sum(p.detach().abs().sum().item() for p in models[0].parameters())
    found = figures(printed_by("pytorch_adasum.py", 2), 2)
    assert found == pytest.approx([total], abs=1e-6)


@pytest.mark.served
def test_a_library_that_imports_horovod() -> None:
    whole = figures(printed_by("with_a_library.py", 1), 1)
    assert whole[1] < whole[0]
    assert figures(run("with_a_library.py", 2), 2) == pytest.approx(whole, rel=1e-4)


def test_a_function_for_ray() -> None:
    """With processes instead of a cluster; the real Ray is in tests/clusters."""
    pytest.importorskip("cloudpickle")
    fake = str(TESTS / "support" / "fake_ray")
    whole = ["--num-workers", 1, "--batch-size", 64, "--lr", 0.08]
    alone = figures(run("ray_digits.py", 1, *whole, path=fake), 1)
    assert alone[1] < alone[0]
    both = figures(run("ray_digits.py", 1, path=fake), 2)
    assert both == pytest.approx(alone, rel=1e-4)
