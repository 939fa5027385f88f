"""Scripts for Horovod, unedited, under --as-horovod: N ranks give what one process gives."""

from __future__ import annotations

import importlib.util

import pytest
from horovod_scripts import figures, run_script

LIMIT_S = 120
needs = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "sklearn")
]
pytestmark = [*needs, pytest.mark.timeout(4 * LIMIT_S)]


def run(script: str, n: int, *args: object, hosts: str = "") -> str:
    env = {"HORO_LITE_TEST_HOSTS": hosts} if hosts else {}
    return run_script(script, n, *args, timeout_s=LIMIT_S, env=env)


def test_digits_and_accumulation() -> None:
    """The learning rate is the same after the script has multiplied it by the number of ranks."""
    whole = figures(run("pytorch_digits.py", 1, "--batch-size", 64, "--lr", 0.08), 1)
    assert whole[1] < 0.97 * whole[0]
    # On each rank two passes of 16: the script divides the loss by the passes.
    options = ["--batches-per-allreduce", 2, "--gradient-predivide-factor", 2]
    passes = run("pytorch_digits.py", 2, "--batch-size", 16, "--lr", 0.02, *options)
    assert figures(passes, 2) == pytest.approx(whole, rel=2e-4)


@pytest.mark.mpi
def test_the_synthetic_benchmark() -> None:
    assert "Total img/sec on 2 CPU(s): " in run("pytorch_synthetic.py", 2)


def test_elastic_training_over_two_hosts() -> None:
    alone = figures(run("pytorch_elastic.py", 1), 1)
    both = figures(run("pytorch_elastic.py", 2, hosts="1,1"), 2)
    assert both == pytest.approx(alone, rel=1e-5)
