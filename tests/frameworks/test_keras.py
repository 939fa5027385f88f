"""Keras 3 on its torch and JAX backends: training together is training on one process."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from horovod_scripts import figures, run_script
from launch import Result, run_ranks
from worlds import script_on_ranks
from xla_variables import compilation

from horo_lite.horovod import aliases

FOLDER = Path(__file__).resolve().parent
pytestmark = [pytest.mark.served, pytest.mark.timeout(900)]
# A job takes fifteen seconds; the limits are for machines with other load.
LIMIT_S = 200
SCRIPTS = "../as_horovod/scripts"
# Keras imports JAX on any backend, and scikit-learn, if they are there: a third of the time.
OPTIONAL = {"torch": "jax", "jax": ""}


def without(backend: str, *more: str) -> dict[str, str]:
    """Return the variables of ranks that import no more than they need."""
    names = " ".join([OPTIONAL[backend], *more])
    return {"KERAS_BACKEND": backend, "HORO_LITE_TEST_WITHOUT": names}


def launched(
    script: str, size: int, backend: str, *args: str, env: Mapping[str, str] | None = None
) -> Result:
    """Return how a job ended; `script` is a file of this folder or the text itself."""
    path = FOLDER / script if script.endswith(".py") else script
    env = {**without(backend, "sklearn"), **compilation(), **(env or {})}
    return run_ranks(path, size, args=args, env=env, timeout_s=LIMIT_S)


def printed_by(script: str, size: int, backend: str, *args: object) -> str:
    """Return what a script printed on ranks on which Keras is imported already."""
    path = os.pathsep.join([aliases.PATH, *sys.path])
    job_env = {**without(backend), "PYTHONPATH": path, **compilation()}
    arguments = [str(arg) for arg in args]
    return script_on_ranks(
        FOLDER / script, size, args=arguments, job_env=job_env, timeout_s=LIMIT_S
    ).stdout


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("torch", marks=pytest.mark.shows("eager", "in place", "fp16")),
        pytest.param("jax", marks=pytest.mark.shows("eager", "jit", "fp16")),
    ],
)
def test_two_ranks_train_as_one_process_would(backend: str) -> None:
    printed = printed_by("keras_checks.py", 2, backend)
    n_checks = 31 + (backend == "torch")  # JAX would compile each random program
    assert printed.count(f"{backend} on 2: check_") == n_checks, printed


THREE = (
    "check_group",
    "check_uneven_shards_in_fit",
    "check_shard_state",
)
# Of what does not depend on the backend, once.
MORE = (
    "check_fit_equals_one_process",
    "check_weights_of_uneven_batches",
    "check_callbacks",
    "check_mismatches_are_named",
    "check_passes_per_step",
    "check_local_variables_and_predivision",
    "check_process_sets_and_values",
    "check_shard_state_in_a_loop",
    "check_shard_state_in_files",
)


@pytest.mark.parametrize(("backend", "chosen"), [("torch", (*THREE, *MORE)), ("jax", THREE)])
def test_three_ranks_do_as_well(backend: str, chosen: tuple[str, ...]) -> None:
    printed = printed_by("keras_checks.py", 3, backend, *chosen)
    assert printed.count(f"{backend} on 3: check_") == len(chosen), printed


LONGER = """
    import sys
    import keras
    import numpy as np
    import horo_lite.keras as hvd

    world = hvd.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="only")])
    model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse")
    n_steps = 3 + world.rank
    x, y = np.ones((4 * n_steps, 3), "f"), np.ones((4 * n_steps, 2), "f")
    names = ["BroadcastGlobalVariablesCallback", *sys.argv[1:]]
    callbacks = [getattr(hvd.callbacks, name)() for name in names]
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=callbacks)
    print("rank", world.rank, "is done")
"""


def test_a_rank_with_more_steps_is_told_who_left() -> None:
    result = launched(LONGER, 2, "torch")
    assert result.returncode != 0
    assert "rank 0 is done" in result.stdout
    assert "rank 1 is done" not in result.stdout
    assert "PeerLostError" in result.stderr, result
    assert "rank 0" in result.stderr


def test_ranks_that_wait_for_different_things_are_told_of_each_other() -> None:
    """One rank inside jit, where another could still arrive, and one for averages of metrics."""
    limits = {"HORO_LITE_STALL_WARN_S": "2", "HORO_LITE_STALL_ABORT_S": "5"}
    result = launched(LONGER, 2, "jax", "MetricAverageCallback", env=limits)
    assert result.returncode != 0
    assert "is done" not in result.stdout
    assert "the ranks wait for each other" in result.stderr, result
    assert re.search("rank 0 has waited .* in allreduce 'metrics loss'", result.stderr), result
    assert re.search("rank 1 has waited .* in allreduce 'gradients, call 4", result.stderr), result
    assert "StallError" in result.stderr, result


def test_digits_are_learned() -> None:
    printed = printed_by("../../examples/digits_keras.py", 2, "torch", "--epochs", 6)
    assert float(printed.split("test accuracy ")[1].split()[0]) > 0.93, printed
    assert "parameters bit-identical on all 2 ranks" in printed


def test_a_script_for_horovod_runs_as_it_is() -> None:
    def printed(n: int, *args: object) -> list[float]:
        return figures(printed_by(f"{SCRIPTS}/keras_digits.py", n, "torch", *args), n)

    # The warm-up depends on the number of ranks: with passes the script omits it.
    first, last, _ = printed(2)
    assert last < first
    whole = printed(1, "--batch-size", 64, "--lr", 0.08, "--passes", 2)
    assert printed(2, "--passes", 2) == pytest.approx(whole, rel=1e-3)


def test_an_elastic_script_for_horovod_runs_as_it_is() -> None:
    whole = printed_by(f"{SCRIPTS}/keras_elastic.py", 1, "torch", "--batch-size", 64, "--lr", 0.08)
    expected = figures(whole, 1)
    assert expected[1] < expected[0]
    env = without("torch")
    both = figures(run_script("keras_elastic.py", 2, timeout_s=LIMIT_S, env=env), 2)
    assert both == pytest.approx(expected, rel=1e-3)


DIES_IN_FIT = """
    import os
    import signal
    import sys
    import keras
    import numpy as np
    import horo_lite.keras as hvd

    hvd.init()
    layers = [keras.Input((3,)), keras.layers.Dropout(0.1), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    adam, options = keras.optimizers.Adam(0.1), {name: True for name in sys.argv[1:]}
    model.compile(hvd.DistributedOptimizer(adam, **options), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    x = np.random.default_rng(hvd.rank()).standard_normal((16, 3)).astype(np.float32)

    class Dies(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if hvd.size() == 3 and hvd.rank() == 2 and (state.epoch, batch) == (1, 3):
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd.elastic.run
    def train(state):
        if hvd.size() == 2:
            seeds = hvd.allgather(np.array(layers[1].seed_generator.state.value))
            assert seeds[0] != seeds[2], seeds
            print("goes on", state.epoch, state.batch, int(model.optimizer.iterations), flush=True)
        callbacks = [
            Dies(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
        ]
        epochs = 2 - state.epoch
        model.fit(x, x[:, :2], batch_size=4, epochs=epochs, verbose=0, callbacks=callbacks)

    train(state)
    hvd.check_in_sync(model)
    hvd.check_in_sync(model.optimizer)
    print("ended", hvd.size(), state.epoch, int(model.optimizer.iterations), flush=True)
"""


@pytest.mark.parametrize("options", [(), ("shard_state",)])
def test_the_others_go_on_if_a_rank_dies_in_a_compiled_step(options: tuple[str, ...]) -> None:
    """JAX has given away the arrays of the step that failed: it goes back to the last commit."""
    env = {"KERAS_BACKEND": "jax", **compilation()}
    result = run_ranks(
        DIES_IN_FIT, 3, options=["--with-ft", "ulfm"], args=options, env=env, timeout_s=LIMIT_S
    ).check()
    assert result.stdout.count("goes on 1 1 6") == 2, result
    assert result.stdout.count("ended 2 2 10") == 2, result
