"""Keras 3 on its torch and JAX backends: training together is training on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

FOLDER = Path(__file__).resolve().parent
BACKENDS = ("torch", "jax")
pytestmark = pytest.mark.timeout(300)
# A job takes fifteen seconds; the limits are for machines that do other things as well.
LIMIT_S = 150


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("torch", marks=pytest.mark.shows("eager", "in place", "fp16")),
        pytest.param("jax", marks=pytest.mark.shows("eager", "jit", "fp16")),
    ],
)
def test_ranks_train_as_one_process_would(backend: str, size: int) -> None:
    checks = FOLDER / "keras_checks.py"
    result = run_ranks(checks, size, env={"KERAS_BACKEND": backend}, timeout_s=LIMIT_S).check()
    assert result.stdout.count(f"{backend} on {size}: check_") == 10, result


LONGER = """
    import keras
    import numpy as np
    import horo_lite.keras as hvd

    world = hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="only")])
    model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse")
    n_steps = 3 + world.rank
    x, y = np.ones((4 * n_steps, 3), "f"), np.ones((4 * n_steps, 2), "f")
    start = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=start)
    print("rank", world.rank, "is done")
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_with_more_steps_is_told_who_left(backend: str) -> None:
    result = run_ranks(LONGER, 2, env={"KERAS_BACKEND": backend}, timeout_s=LIMIT_S)
    assert result.returncode != 0
    assert "rank 0 is done" in result.stdout
    assert "rank 1 is done" not in result.stdout
    assert "PeerLostError" in result.stderr, result
    assert "rank 0" in result.stderr


def test_digits_are_learned() -> None:
    result = run_ranks(
        FOLDER.parents[1] / "examples" / "digits_keras.py",
        2,
        args=["--epochs", "6"],
        env={"KERAS_BACKEND": "jax"},
        timeout_s=LIMIT_S,
    ).check()
    assert float(result.stdout.split("test accuracy ")[1].split()[0]) > 0.93, result
    assert "parameters bit-identical on all 2 ranks" in result.stdout
