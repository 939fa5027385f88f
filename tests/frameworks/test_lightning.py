"""Lightning and its part Fabric: on the backend "horo_lite", and with an optimizer of horo_lite."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from torchrun import assert_same_bits, results, run_torchrun

HERE = Path(__file__).parent


@pytest.mark.shows("eager", "overlap")
def test_training_is_that_on_gloo(tmp_path: Path) -> None:
    """Bit for bit, since a sum of two numbers does not depend on their order.

    With one batch in a step and with two (and the optimizer's state divided), and with clipped
    gradients. Lightning's loop gives the
    optimizer's step() a closure that computes the gradients.
    """
    script = HERE / "lightning_ranks.py"
    for backend in ("gloo", "horo_lite"):
        run_torchrun(script, backend, tmp_path / backend, folder=tmp_path)
    args = ["horovod", str(tmp_path / "horovod")]
    run_ranks(script, 2, args=args, env={"OMP_NUM_THREADS": "1"}, timeout_s=90).check()
    expected = results(tmp_path / "gloo")
    for name in ("horo_lite", "horovod"):
        for rank, found in enumerate(results(tmp_path / name)):
            for n_batches, one in enumerate(found):
                assert_same_bits([expected[rank][n_batches], one])


@pytest.mark.shows("eager", "overlap")
def test_training_with_fabric_is_that_on_gloo(tmp_path: Path) -> None:
    """Bit for bit; each run has also compared itself with one process on the whole batches."""
    ranks = []
    for backend in ("gloo", "horo_lite"):
        result = tmp_path / backend
        run_torchrun(HERE / "wrappers_ranks.py", "fabric", backend, result, folder=tmp_path)
        ranks += results(result)
    assert_same_bits(ranks)
