"""Properties of horo_lite.keras with tf_keras (Keras 2), as selected by TF_USE_LEGACY_KERAS=1.

Every rank runs this script. Besides the model that all train together on shards, it trains another
one alone on the whole batches: the result of one process.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horo_lite.tensorflow as of_tensorflow
import horo_lite.tensorflow.keras as hvd

keras = tf.keras
assert "tf_keras" in keras.optimizers.SGD.__module__
world = hvd.init()
RANKS = np.arange(world.size)
N_STEPS, BATCH, N_FEATURES = 6, 12, 5
rng = np.random.default_rng(7)
X = rng.normal(size=(N_STEPS * BATCH, N_FEATURES)).astype(np.float32)
Y = np.stack([np.sin(X.sum(1)), X[:, 0] * X[:, 1]], 1).astype(np.float32)
CLOSE = {"rtol": 2e-4, "atol": 2e-6}  # sums of float32 products, added in another order
FAMILIES = (keras.optimizers, keras.optimizers.legacy)


def network(like: Any = None) -> Any:
    """Return a model; its weights differ by rank, unless given."""
    keras.utils.set_random_seed(world.rank)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((N_FEATURES,)), layers.Dense(8, activation="tanh"), layers.Dense(2)]
    )
    if like is not None:
        model.set_weights(like)
    return model


def shard(x: Any) -> Any:
    """Return this rank's rows of every batch, in the order of batches."""
    batches = x.reshape(-1, BATCH, *x.shape[1:])
    return np.concatenate(batches[:, world.rank :: world.size])


def fit(model: Any, *, alone: bool = False, epochs: int = 2, **options: Any) -> Any:
    x, y = (X, Y) if alone else (shard(X), shard(Y))
    rows = BATCH if alone else BATCH // world.size
    return model.fit(x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, **options)


def pair(make: Callable[[], Any], compiled: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return models for all ranks and for one alone, starting from the last rank's weights."""
    model = network()
    model.compile(hvd.DistributedOptimizer(make(), **options), "mse", **(compiled or {}))
    alone = network(hvd.broadcast_object(model.get_weights(), world.size - 1))
    alone.compile(make(), "mse", **(compiled or {}))
    return model, alone


def broadcast() -> list[Any]:
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(world.size - 1)]


def check_close(model: Any, alone: Any) -> None:
    hvd.check_in_sync(model)
    hvd.check_in_sync(model.optimizer)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


def check_fit_equals_one_process() -> None:
    for family in FAMILIES:
        for make in (
            partial(family.Adam, 0.01),
            partial(family.SGD, 0.2, momentum=0.9, global_clipnorm=0.3),
        ):
            model, alone = pair(make)
            fit(model, callbacks=broadcast())
            fit(alone, alone=True)
            check_close(model, alone)
            optimizer = model.optimizer
            assert int(optimizer.iterations) == 2 * N_STEPS
            assert isinstance(optimizer, type(make()))
            assert optimizer.__class__ is type(make())
            again = type(optimizer).from_config(optimizer.get_config())
            assert type(again) is type(optimizer)
            with pytest.raises(TypeError, match="already"):
                hvd.DistributedOptimizer(optimizer)
    model, alone = pair(lambda: keras.optimizers.SGD(0.1), {"run_eagerly": True})
    fit(model, callbacks=broadcast(), epochs=1)
    fit(alone, alone=True, epochs=1)
    check_close(model, alone)


def applied(optimizer: Any, *steps: list[float], compiled: bool) -> list[float]:
    """Return two variables' values after a step with each of these gradients."""
    variables = [tf.Variable([value], name=f"number_{value}") for value in (2.0, 3.0)]
    if getattr(optimizer, "keeps_last", False):
        optimizer.register_local_var(variables[-1])

    def step(*gradients: Any) -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    call = tf.function(step) if compiled else step
    for each in steps:
        call(*(tf.constant([g], tf.float32) for g in each))
    return [float(v.numpy()[0]) for v in variables]


def check_passes_per_step() -> None:
    """Horovod: the passes' gradients are added, and divided only if they are to be averaged."""
    mean = (RANKS + 1).mean()
    one, two = [world.rank + 1.0, 1.0], [4.0 * (world.rank + 1), 2.0]
    for family in FAMILIES:
        for compiled in (False, True):
            for average, factor in ((False, 1.0), (True, 0.5)):

                def wrapped(average: bool = average, make: Any = family.SGD, **more: Any) -> Any:
                    return hvd.DistributedOptimizer(
                        make(1.0),
                        backward_passes_per_step=2,
                        average_aggregated_gradients=average,
                        **more,
                    )

                run = partial(applied, compiled=compiled)
                assert run(wrapped(), one) == [2.0, 3.0]  # not applied yet
                optimizer = wrapped()
                found = run(optimizer, one, two, one, two)
                np.testing.assert_allclose(found, [2 - factor * 10 * mean, 3 - factor * 6])
                assert int(optimizer.iterations) == 4  # like Horovod, this counts passes, too
                found = run(wrapped(op=hvd.Sum), one, two)
                np.testing.assert_allclose(
                    found, [2 - factor * 5 * (RANKS + 1).sum(), 3 - factor * 3 * world.size]
                )
    model = network()
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    sgd = partial(keras.optimizers.SGD, 0.1, global_clipnorm=0.5)
    model.compile(hvd.DistributedOptimizer(sgd(), **passes), "mse")
    alone = network(hvd.broadcast_object(model.get_weights(), world.size - 1))
    alone.compile(sgd(), "mse")
    fit(model, callbacks=broadcast())
    x = X.reshape(-1, 2 * BATCH, N_FEATURES)  # two passes are one batch with twice as many rows
    for _ in range(2):
        for rows, y in zip(x, Y.reshape(-1, 2 * BATCH, 2), strict=True):
            alone.train_on_batch(rows, y)
    check_close(model, alone)


def check_local_variables_and_predivision() -> None:
    """Horovod: a local gradient is this rank's, divided by the number of ranks; sum(g/f) * f/N."""
    own, mean = world.rank + 1.0, (RANKS + 1).mean()
    for scale, kept in ((True, own / world.size), (False, own)):
        for passes in (1, 2):
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0),
                backward_passes_per_step=passes,
                scale_local_gradients=scale,
            )
            vars(optimizer)["keeps_last"] = True
            found = applied(optimizer, *[[own, own]] * passes, compiled=True)
            np.testing.assert_allclose(found, [2 - passes * mean, 3 - passes * kept], rtol=1e-6)
    sgd = keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(sgd, gradient_predivide_factor=4.0)
    found = applied(optimizer, [own, 2 * own], compiled=False)
    np.testing.assert_allclose(found, [2 - mean, 3 - 2 * mean], rtol=1e-6)
    model = network()
    partly = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[0]
    )
    model.compile(partly, "mse")
    model.set_weights(hvd.broadcast_object(model.get_weights()))
    fit(model, epochs=1)
    first, last = ([w.tolist() for w in layer.get_weights()] for layer in model.layers)
    everyone = hvd.allgather_object((first, last))
    assert all(each[1] == last for each in everyone)
    assert world.size == 1 or everyone[0][0] != everyone[1][0]


class Recording(keras.callbacks.Callback):  # type: ignore[misc]
    """Records each batch's learning rate and momentum, and the metrics that callbacks see."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.momenta: list[float] = []
        self.logs: list[dict[str, float]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))
        self.momenta.append(float(self.model.optimizer.momentum))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def check_callbacks() -> None:
    for family in FAMILIES:
        model = network()
        optimizer = hvd.DistributedOptimizer(family.SGD(0.3, momentum=0.5))
        model.compile(optimizer, "mse", metrics=["mae"])
        before, after = Recording(), Recording()
        history = fit(
            model,
            epochs=4,
            validation_data=(X[world.rank :: 7], Y[world.rank :: 7]),
            callbacks=[
                *broadcast(),
                before,
                hvd.callbacks.MetricAverageCallback(),
                hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_epochs=2),
                hvd.callbacks.LearningRateScheduleCallback(0.3, 0.1, start_epoch=2, end_epoch=4),
                after,
            ],
        )
        hvd.check_in_sync(model)
        own = hvd.allgather_object(before.logs)
        for epoch, logs in enumerate(after.logs):
            for name in ("loss", "mae", "val_loss", "val_mae"):
                mean = np.mean([each[epoch][name] for each in own])
                np.testing.assert_allclose(logs[name], mean, rtol=1e-12)
                assert history.history[name][epoch] == logs[name]
        assert world.size == 1 or own[0][0]["loss"] != own[1][0]["loss"]
        # Horovod: initial_lr / N * ((epoch + (batch + 1) / steps) * (N - 1) / warmup_epochs + 1),
        # and then initial_lr * multiplier ** (epoch - start_epoch).
        n = world.size
        climb = [0.3 / n * ((k + 1) / N_STEPS * (n - 1) / 2 + 1) for k in range(2 * N_STEPS)]
        rates = climb + [0.3] * N_STEPS + [0.3 * 0.1] * N_STEPS
        np.testing.assert_allclose(after.rates, rates, rtol=1e-6)
        ends = [rates[N_STEPS * (epoch + 1) - 1] for epoch in range(4)]
        np.testing.assert_allclose([logs["lr"] for logs in after.logs], ends, rtol=1e-6)
        if family is keras.optimizers.legacy and n > 1:  # momentum * new rate / old rate
            old = [0.3, *rates]
            corrected = [0.5 * new / old for new, old in zip(rates, old, strict=False)]
            changes = [*range(2 * N_STEPS), 3 * N_STEPS]
            expected = [corrected[k] if k in changes else 0.5 for k in range(4 * N_STEPS)]
            np.testing.assert_allclose(after.momenta, expected, rtol=1e-5)
        assert float(model.optimizer.momentum) == 0.5


def check_loss_scaling() -> None:
    """A sample of the last rank alone overflows, and all ranks skip that step."""
    x = X.copy()
    x[2 * BATCH + world.size - 1] = np.inf
    mixed = keras.mixed_precision.LossScaleOptimizer
    for inside in (False, True):
        model = network()
        adam = keras.optimizers.Adam(0.01)
        optimizer = (
            mixed(hvd.DistributedOptimizer(adam), initial_scale=1024.0)
            if inside
            else hvd.DistributedOptimizer(mixed(adam, initial_scale=1024.0))
        )
        model.compile(optimizer, "mse")
        alone = network(hvd.broadcast_object(model.get_weights(), world.size - 1))
        alone.compile(mixed(keras.optimizers.Adam(0.01), initial_scale=1024.0), "mse")
        start = hvd.callbacks.BroadcastGlobalVariablesCallback(world.size - 1)
        rows = BATCH // world.size
        how = {"epochs": 1, "shuffle": False, "verbose": 0}
        model.fit(shard(x), shard(Y), batch_size=rows, callbacks=[start], **how)
        alone.fit(x, Y, batch_size=BATCH, **how)
        check_close(model, alone)
        assert float(model.optimizer.loss_scale) == 512.0
        assert int(model.optimizer.iterations) == N_STEPS  # Keras 2 counts skipped steps
    with pytest.raises(ValueError, match="cannot be combined with a LossScaleOptimizer"):
        hvd.DistributedOptimizer(mixed(keras.optimizers.Adam()), backward_passes_per_step=2)


def check_files() -> None:
    """Training continues from a file as if uninterrupted, and files do not need horo_lite."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "")
    for family, kind in zip(FAMILIES, (".keras", ".h5"), strict=True):
        model = network()
        model.compile(hvd.DistributedOptimizer(family.Adam(0.01)), "mse")
        fit(model, epochs=1, callbacks=broadcast())
        path = str(Path(folder, f"model{kind}"))
        if world.rank == 0:
            model.save(path)
        hvd.barrier()
        plain = keras.models.load_model(path)
        assert "Distributed" not in repr(plain.optimizer)
        assert int(plain.optimizer.iterations) == N_STEPS
        loaded = hvd.load_model(path)
        assert "DistributedAdam" in repr(type(loaded.optimizer))
        fit(model, epochs=1)
        fit(loaded, epochs=1)
        hvd.check_in_sync(loaded)
        for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, **CLOSE)


def check_elastic_state() -> None:
    for family in FAMILIES:
        model = network()
        model.compile(hvd.DistributedOptimizer(family.Adam(0.01)), "mse")
        state = hvd.elastic.KerasState(model, batch=world.rank, epoch=0)
        state.sync()
        hvd.check_in_sync(model)
        elastic = hvd.elastic
        fit(
            model,
            callbacks=[
                elastic.UpdateBatchStateCallback(state),
                elastic.UpdateEpochStateCallback(state),
                elastic.CommitStateCallback(state, batches_per_commit=4),
            ],
        )
        assert (state.batch, state.epoch) == (0, 2)
        after = model.get_weights()
        fit(model, epochs=1)
        assert any((a != b).any() for a, b in zip(model.get_weights(), after, strict=True))
        state.epoch = 9
        state.restore()
        assert state.epoch == 2
        assert int(model.optimizer.iterations) == 2 * N_STEPS
        for a, b in zip(model.get_weights(), after, strict=True):
            np.testing.assert_array_equal(a, b)


def check_sync_batch_normalization() -> None:
    """Outputs, statistics and gradients are those of the whole batch."""
    x = (rng.normal(size=(BATCH, 4, 3, 2)) + 5).astype(np.float32)
    scale = rng.normal(size=x.shape).astype(np.float32)
    begin = BATCH // world.size * world.rank
    mine = slice(begin, begin + BATCH // world.size)
    ours, alone = of_tensorflow.SyncBatchNormalization(name="norm"), None
    alone = keras.layers.BatchNormalization()
    for layer in (ours, alone):
        layer.build(x.shape)

    def run(layer: Any, rows: Any, factors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            y = layer(rows, training=True)
            loss = tf.reduce_sum(y * factors)
        return y, tape.gradient(loss, [rows, layer.gamma])

    y, (dx, dgamma) = tf.function(partial(run, ours))(
        tf.constant(x[mine]), tf.constant(scale[mine])
    )
    whole, (dx_whole, dgamma_whole) = run(alone, tf.constant(x), tf.constant(scale))
    close = partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4)
    close(y, whole[mine])
    close(dx, dx_whole[mine])
    close(of_tensorflow.allreduce(dgamma, op=hvd.Sum), dgamma_whole)
    # The fused kernel, which BatchNormalization uses here, divides a variance by n - 1.
    close(ours.get_weights()[2], alone.get_weights()[2])
    close(ours.get_weights()[3], alone.get_weights()[3], rtol=0.05)


def check_a_loop_of_ones_own() -> None:
    """Horovod's tape with Keras' optimizer, which then does not average."""
    model, alone = network(), None
    hvd.broadcast_parameters(model, world.size - 1)
    alone = network(model.get_weights())
    mine, theirs = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        tape = of_tensorflow.DistributedGradientTape(tape)
        found = tape.gradient(loss, model.trainable_variables)
        mine.apply_gradients(zip(found, model.trainable_variables, strict=True))

    x, y = (np.split(shard(each), N_STEPS) for each in (X, Y))
    for rows, labels in zip(x, y, strict=True):
        step(rows, labels)
    for rows, labels in zip(np.split(X, N_STEPS), np.split(Y, N_STEPS), strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((alone(rows) - labels) ** 2)
        found = tape.gradient(loss, alone.trainable_variables)
        theirs.apply_gradients(zip(found, alone.trainable_variables, strict=True))
    hvd.check_in_sync(model)
    for a, b in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


HELPERS = ("check_close",)
EVERY = [name for name in globals() if name.startswith("check_") and name not in HELPERS]
for name in sys.argv[1:] or EVERY:
    globals()[name]()
    if world.rank == 0:
        print(f"tf_keras on {world.size}: {name}", flush=True)
