"""TensorFlow 2's tape and operations, and Keras on TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest
from digits_runs import accuracy_of
from horovod_scripts import figures, run_script
from launch import run_ranks

FOLDER = Path(__file__).resolve().parent
pytestmark = pytest.mark.timeout(900)
# A job takes fifteen seconds; the limits are for machines with other load.
LIMIT_S = 200
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.shows("eager", "jit", "fp16")
def test_tape_and_operations(size: int) -> None:
    checks = FOLDER / "tensorflow_checks.py"
    result = run_ranks(checks, size, env=QUIET, timeout_s=LIMIT_S).check()
    assert result.stdout.count(f"{size} ranks: check_") == 29, result


def test_gradients_of_operations_on_four_ranks() -> None:
    checks = FOLDER / "tensorflow_checks.py"
    args = ["check_gradients_are_horovods", "check_gradients_in_a_group", "check_adasum"]
    result = run_ranks(checks, 4, args=args, env=QUIET, timeout_s=LIMIT_S).check()
    assert result.stdout.count("4 ranks: check_") == 3, result


@pytest.mark.parametrize("size", [2, 3])
def test_keras_trains_as_one_process_would(size: int) -> None:
    checks = FOLDER / "keras_checks.py"
    result = run_ranks(checks, size, env=QUIET, timeout_s=LIMIT_S).check()
    assert result.stdout.count(f"tensorflow on {size}: check_") == 27, result


@pytest.mark.parametrize("size", [2, 3])
def test_tf_keras_trains_as_one_process_would(size: int) -> None:
    """Keras 2, for which most scripts with Horovod are written."""
    checks = FOLDER / "keras_checks.py"
    env = {**QUIET, "TF_USE_LEGACY_KERAS": "1"}
    result = run_ranks(checks, size, env=env, timeout_s=LIMIT_S).check()
    assert result.stdout.count(f"tf_keras on {size}: check_") == 13, result


def test_a_rank_with_more_steps_is_told_who_left() -> None:
    script = """
        import tensorflow as tf
        import horo_lite.tensorflow as hvd

        world = hvd.init()

        @tf.function
        def step(x):
            return hvd.allreduce(x)

        for _ in range(3 + world.rank):
            step(tf.ones(3))
        print("rank", world.rank, "is done")
    """
    result = run_ranks(script, 2, env=QUIET, timeout_s=LIMIT_S)
    assert result.returncode != 0
    assert "rank 0 is done" in result.stdout
    assert "rank 1 is done" not in result.stdout
    assert "PeerLostError" in result.stderr, result


def test_elastic_training_goes_on_where_a_loss_comes_out_of_a_graph() -> None:
    """TensorFlow converts an exception that an operation raises in a graph to its own error."""
    script = """
        import os, signal
        import tensorflow as tf
        import horo_lite.tensorflow as hvd

        hvd.init()
        me = hvd.rank()
        variable = tf.Variable(tf.zeros(2))

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable)
            tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
            variable.assign_sub(tape.gradient(loss, variable))

        @hvd.elastic.run
        def train(state):
            while state.step < 6:
                if (me, state.step) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                step()
                state.step += 1
                state.commit()
            return hvd.size()

        state = hvd.elastic.TensorFlowState([variable], step=0)
        print("ends", train(state), variable.numpy().tolist(), flush=True)
    """
    options = ["--with-ft", "ulfm"]
    result = run_ranks(script, 3, env=QUIET, options=options, timeout_s=LIMIT_S).check()
    # Three steps of three ranks, and three of two.
    assert result.stdout.count("ends 2 [-15.0, -15.0]") == 2, result


def test_digits_are_learned() -> None:
    assert accuracy_of("tensorflow", epochs=6, env=QUIET, timeout_s=LIMIT_S) > 0.9


def test_scripts_for_horovod_run_as_they_are() -> None:
    def run(script: str, n: int, *args: object) -> list[float]:
        return figures(run_script(script, n, *args, timeout_s=LIMIT_S, env=QUIET), n)

    whole = run("tensorflow2_digits.py", 1, "--batch-size", 64, "--lr", 0.08)
    assert whole[1] < whole[0]
    assert run("tensorflow2_digits.py", 2) == pytest.approx(whole, rel=1e-3)
    passes = ["--passes", 2]
    whole = run("keras_digits.py", 1, "--batch-size", 64, "--lr", 0.08, *passes)
    assert run("keras_digits.py", 2, *passes) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("kind", ["Keras 3", "new", "legacy"])
def test_an_elastic_script_runs_as_it_is(kind: str) -> None:
    """For Keras 3, and for both families of tf_keras' optimizers."""
    script = "keras_elastic.py" if kind == "Keras 3" else "tensorflow2_keras_elastic.py"
    family = ["--legacy"] if kind == "legacy" else []
    env = {**QUIET, "TF_USE_LEGACY_KERAS": "0" if kind == "Keras 3" else "1"}

    def run(n: int, *args: object) -> list[float]:
        return figures(run_script(script, n, *family, *args, timeout_s=LIMIT_S, env=env), n)

    whole = run(1, "--batch-size", 64, "--lr", 0.08)
    assert whole[1] < whole[0]
    assert run(2) == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("option", ["--fp16-allreduce", "--use-adasum"])
@pytest.mark.parametrize("keras", ["0", "1"], ids=["Keras 3", "tf_keras"])
def test_a_synthetic_benchmark_runs_as_it_is(option: str, keras: str) -> None:
    env = {**QUIET, "TF_USE_LEGACY_KERAS": keras}
    said = run_script("tensorflow2_synthetic.py", 2, option, timeout_s=LIMIT_S, env=env)
    assert "Total img/sec on 2 CPU(s): " in said
