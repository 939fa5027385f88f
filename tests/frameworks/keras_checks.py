"""Properties of Keras' optimizer, callbacks and files, on the backend named by KERAS_BACKEND.

With TF_USE_LEGACY_KERAS=1, those of tf_keras (Keras 2), in both families of its optimizers.

Every rank runs this script. Besides the model that all train together on shards, rank 0 trains
another one alone on the whole batches: the result of one process.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horo_lite
from horo_lite.adapters import adapter_of
from horo_lite.collectives import arrays
from horo_lite.state.optimizer_state import OptimizerState

with pytest.MonkeyPatch.context() as patch:
    # Keras imports scikit-learn for wrappers, if it is installed, which takes as long as the rest.
    patch.setitem(sys.modules, "sklearn", None)
    import horo_lite.keras as hvd
    from horo_lite.keras.base import is_keras2, keras

BACKEND = "tf_keras" if is_keras2 else keras.backend.backend()
FAMILIES = (keras.optimizers, keras.optimizers.legacy) if is_keras2 else (keras.optimizers,)
world = hvd.init()
N_STEPS, BATCH, N_FEATURES = 6, 12, 5
rng = np.random.default_rng(7)
X = rng.normal(size=(N_STEPS * BATCH, N_FEATURES)).astype(np.float32)
Y = np.stack([np.sin(X.sum(1)), X[:, 0] * X[:, 1]], 1).astype(np.float32)
# Sums of a dozen float32 products, added in another order.
CLOSE = {"rtol": 2e-4, "atol": 2e-6}


def network(width: int = 8, seed: int | None = None) -> Any:
    """Return a model; its weights differ by rank, unless there is a seed."""
    keras.utils.set_random_seed(world.rank if seed is None else seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((N_FEATURES,)),
            layers.Dense(width, activation="tanh", name="first"),
            layers.Dense(2, name="second"),
        ]
    )


def shard(x: Any, sizes: list[int] | None = None) -> Any:
    """Return this rank's rows of every batch, in the order of batches."""
    batches = x.reshape(-1, BATCH, *x.shape[1:])
    if sizes is None:
        return np.concatenate(batches[:, world.rank :: world.size])
    begin = sum(sizes[: world.rank])
    return np.concatenate(batches[:, begin : begin + sizes[world.rank]])


UNEVEN = {1: [12], 2: [7, 5], 3: [6, 2, 4], 4: [3, 5, 1, 3]}[world.size]


def fit(model: Any, *, alone: bool = False, epochs: int = 2, x: Any = X, **options: Any) -> Any:
    """Train on rank 0 on the whole batches, or with the others on shards of them."""
    if alone and world.rank > 0:
        return None
    sizes = options.pop("sizes", None)
    rows = BATCH if alone else BATCH // world.size if sizes is None else sizes[world.rank]
    return model.fit(
        x if alone else shard(x, sizes),
        Y if alone else shard(Y, sizes),
        batch_size=rows,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **options,
    )


def check_same_bits(model: Any) -> None:
    hvd.check_in_sync(model)
    hvd.check_in_sync(model.optimizer)


def check_close(model: Any, other: Any, **tolerance: float) -> None:
    for variable, mine, theirs in zip(
        model.weights, model.get_weights(), other.get_weights(), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, err_msg=variable.name, **(tolerance or CLOSE))


def check_as_alone(model: Any, alone: Any, **tolerance: float) -> None:
    """Require what rank 0 has computed alone, and the same bits on the others."""
    check_same_bits(model)
    if world.rank == 0:
        check_close(model, alone, **tolerance)


def compiled(optimizer: Any, *, loss: Any = "mse", like: Any = None, **options: Any) -> Any:
    model = network()
    if like is not None:
        model.set_weights(like)
    model.compile(optimizer=optimizer, loss=loss, **options)
    return model


def pair(make: Any, root: int = 0, how: Any = None, **options: Any) -> tuple[Any, Any]:
    """Return models for all ranks and for one alone, starting from the weights of rank `root`."""
    model = compiled(hvd.DistributedOptimizer(make(), **options), **(how or {}))
    weights = hvd.broadcast_object(model.get_weights(), root)
    return model, compiled(make(), like=weights, **(how or {}))


def broadcast(root: int = 0) -> list[Any]:
    return [hvd.callbacks.BroadcastGlobalVariablesCallback(root)]


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def check_fit_equals_one_process() -> None:
    root = world.size - 1
    for family in FAMILIES:
        for make in (
            partial(family.Adam, 0.01),
            partial(family.SGD, 0.2, momentum=0.9, global_clipnorm=0.3),
        )[: 1 + is_keras2]:
            model, alone = pair(make, root)
            fit(model, callbacks=broadcast(root))
            fit(alone, alone=True)
            check_as_alone(model, alone)
            optimizer, plain = model.optimizer, make()
            assert int(optimizer.iterations) == 2 * N_STEPS
            assert isinstance(optimizer, type(plain))
            assert optimizer.__class__ is type(plain)
            # The generic wrapper and the wrapper's own class return the same type.
            for other in (
                horo_lite.DistributedOptimizer(make()),
                type(optimizer).from_config(optimizer.get_config()),
            ):
                assert type(other) is type(optimizer)
                assert float(other.learning_rate) == float(plain.learning_rate)
            with pytest.raises(TypeError, match="already a DistributedOptimizer"):
                hvd.DistributedOptimizer(optimizer)
    if is_keras2:
        model, alone = pair(lambda: keras.optimizers.SGD(0.1), root, {"run_eagerly": True})
        fit(model, callbacks=broadcast(root), epochs=1)
        fit(alone, alone=True, epochs=1)
        check_as_alone(model, alone)


def check_a_second_wrapper_does_not_change_the_first() -> None:
    inner = keras.optimizers.SGD(1.0)
    first = hvd.DistributedOptimizer(inner, op=hvd.Sum)
    with pytest.raises(ValueError, match="already has a DistributedOptimizer"):
        hvd.DistributedOptimizer(inner, op=hvd.Average, backward_passes_per_step=2)
    assert inner.gradient_accumulation_steps is None
    assert applied(first, [1.0, 2.0]) == [2.0 - world.size, 3.0 - 2 * world.size]
    del first
    gc.collect()
    again = hvd.DistributedOptimizer(inner, op=hvd.Average)
    assert [float(v) for v in (again.learning_rate, again.iterations)] == [1.0, 1.0]


def check_an_optimizer_that_has_trained_is_wrapped() -> None:
    """Also if its model keeps a step that was compiled before."""
    model, alone = (compiled(keras.optimizers.SGD(0.1, momentum=0.9)) for _ in range(2))
    rows = BATCH // world.size
    for net in (model, alone):
        net.set_weights(network(seed=0).get_weights())
        # Two steps: JAX compiles the first one anew, since it builds the optimizer.
        net.fit(X[: 2 * rows], Y[: 2 * rows], batch_size=rows, shuffle=False, verbose=0)
    model.optimizer = hvd.DistributedOptimizer(model.optimizer)
    fit(model, epochs=1)
    fit(alone, epochs=1, alone=True)
    check_as_alone(model, alone)


class Twins(keras.Model):  # type: ignore[misc]
    """Two layers of the same name, and so variables of the same path."""

    def __init__(self) -> None:
        super().__init__()
        self.one = keras.layers.Dense(N_FEATURES, activation="tanh", name="twin")
        self.other = keras.layers.Dense(N_FEATURES, name="twin")
        self.build((None, N_FEATURES))

    def build(self, shape: Any) -> None:
        self.one.build(shape)
        self.other.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.other(self.one(x))[:, :2]


def check_variables_of_one_name() -> None:
    model, alone = Twins(), Twins()
    assert len({variable.path for variable in model.weights}) == 2
    alone.set_weights(hvd.broadcast_object(model.get_weights()))
    model.compile(optimizer=hvd.DistributedOptimizer(adam()), loss="mse")
    alone.compile(optimizer=adam(), loss="mse")
    fit(model, epochs=1, callbacks=broadcast())
    fit(alone, epochs=1, alone=True)
    check_as_alone(model, alone)


def check_everything_that_apply_does_comes_after_averaging() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(
            keras.optimizers.schedules.CosineDecay(0.2, 10),
            momentum=0.9,
            weight_decay=0.01,
            global_clipnorm=0.3,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_momentum=0.7,
            ema_overwrite_frequency=3,
        )

    model, alone = pair(make)
    fit(model, callbacks=broadcast())
    fit(alone, alone=True)
    check_as_alone(model, alone)


def check_uneven_shards_in_fit() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(0.3 / BATCH)

    sums = keras.losses.MeanSquaredError(reduction="sum")
    model = compiled(hvd.DistributedOptimizer(make(), op=hvd.Sum), loss=sums)
    alone = compiled(make(), loss=sums, like=hvd.broadcast_object(model.get_weights(), 0))
    fit(model, sizes=UNEVEN, callbacks=broadcast())
    fit(alone, alone=True)
    check_as_alone(model, alone)


def check_loss_scaling() -> None:
    """A sample of the last rank alone overflows, and all ranks skip that step."""
    x = X.copy()
    x[2 * BATCH + world.size - 1] = np.inf

    scaling = _loss_scaling()

    def make(inner: Any = None) -> Any:
        return scaling(inner or adam(), initial_scale=1024.0)

    for inside in (False, True)[: 1 + is_keras2]:
        model, alone = pair(make)
        if inside:
            model.compile(optimizer=make(hvd.DistributedOptimizer(adam())), loss="mse")
        fit(model, x=x, epochs=1, callbacks=broadcast())
        fit(alone, x=x, epochs=1, alone=True)
        check_as_alone(model, alone)
        scale = model.optimizer.loss_scale if is_keras2 else model.optimizer.dynamic_scale.numpy()
        assert float(scale) == 512.0
        # Keras 2 counts skipped steps.
        assert int(model.optimizer.iterations) == N_STEPS - (not is_keras2)
    if not is_keras2:
        with pytest.raises(TypeError, match="other way round"):
            scaling(hvd.DistributedOptimizer(adam()))


def _loss_scaling() -> Any:
    kinds = keras.mixed_precision if is_keras2 else keras.optimizers
    return kinds.LossScaleOptimizer


def check_fp16() -> None:
    model, alone = pair(lambda: keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16)
    fit(model, callbacks=broadcast())
    fit(alone, alone=True)
    check_as_alone(model, alone, rtol=2e-2, atol=2e-3)
    if world.size > 1 and world.rank == 0:  # it was sent as float16
        differ = zip(model.get_weights(), alone.get_weights(), strict=True)
        assert not all(np.allclose(a, b, rtol=1e-6, atol=0) for a, b in differ)


def gradients(model: Any, x: Any, y: Any) -> list[Any]:
    """Return the gradients of the mean squared error over these samples, as the backend's."""
    y = keras.ops.convert_to_tensor(y)
    if BACKEND == "torch":
        model.zero_grad()
        keras.ops.mean((model(x) - y) ** 2).backward()
        return [variable.value.grad for variable in model.trainable_variables]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])
    import jax

    def loss(values: Any) -> Any:
        fixed = [variable.value for variable in model.non_trainable_variables]
        outputs, _ = model.stateless_call(values, fixed, x)
        return ((outputs - y) ** 2).mean()

    return jax.grad(loss)([variable.value for variable in model.trainable_variables])


def apply(model: Any, found: list[Any], **weight: float) -> None:
    """Apply gradients in a training loop of one's own, eagerly."""
    if BACKEND != "torch":
        model.optimizer.apply(found, model.trainable_variables, **weight)
        return
    import torch

    with torch.no_grad():
        model.optimizer.apply(found, model.trainable_variables, **weight)


def check_weights_of_uneven_batches() -> None:
    """A custom training loop, eagerly; on JAX inside jit as well."""

    def make() -> Any:
        return keras.optimizers.SGD(0.1, momentum=0.9)

    model, alone = pair(make)
    hvd.broadcast_parameters(model)
    x, y = shard(X, UNEVEN), shard(Y, UNEVEN)
    n = UNEVEN[world.rank]
    for step in range(N_STEPS):
        mine, whole = slice(n * step, n * (step + 1)), slice(BATCH * step, BATCH * (step + 1))
        nets = ((model, mine, (x, y)), (alone, whole, (X, Y)))
        for net, rows, data in nets[: 2 if world.rank == 0 else 1]:
            found = gradients(net, data[0][rows], data[1][rows])
            weight = {"weight": n} if net is model else {}
            if BACKEND == "torch":
                before = [gradient.data_ptr() for gradient in found]
                apply(net, found, **weight)
                after = [variable.value.grad for variable in net.trainable_variables]
                assert [gradient.data_ptr() for gradient in after] == before
                if net is model:
                    hvd.check_in_sync(after)
            elif BACKEND == "jax" and step >= N_STEPS // 2:
                _stateless(net, found, weight)
            elif step % 2:
                net.optimizer.apply(found, net.trainable_variables, **weight)
            else:
                pairs = zip(found, net.trainable_variables, strict=True)
                net.optimizer.apply_gradients(pairs, **weight)
    check_as_alone(model, alone)
    if BACKEND == "torch":  # the gradients' own memory held the averages
        assert arrays.bytes_copied == 0


@cache
def _jitted(net: Any) -> Any:
    import jax

    return jax.jit(net.optimizer.stateless_apply)


def _stateless(net: Any, found: list[Any], weight: dict[str, Any]) -> None:
    step = partial(_jitted(net), **weight)
    values = [v.value for v in net.trainable_variables]
    new, state = step([v.value for v in net.optimizer.variables], found, values)
    for variable, value in zip(net.trainable_variables, new, strict=True):
        variable.assign(value)
    for variable, value in zip(net.optimizer.variables, state, strict=True):
        variable.assign(value)


def check_files() -> None:
    """Training continues from a file as if uninterrupted, and files do not need horo_lite."""
    for family, kind in zip(FAMILIES, (".keras", ".h5"), strict=False):
        model = compiled(hvd.DistributedOptimizer(family.Adam(0.01)))
        fit(model, epochs=1, callbacks=broadcast())
        folder = hvd.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "")
        path = str(Path(folder, f"model{kind}"))
        if world.rank == 0:
            model.save(path)
            if kind == ".keras":
                config = zipfile.ZipFile(path).read("config.json").decode()
                assert "Adam" in config
                assert "horo_lite" not in config
        hvd.barrier()
        plain = keras.models.load_model(path)
        assert "Distributed" not in repr(plain.optimizer)
        assert int(plain.optimizer.iterations) == N_STEPS
        loaded = hvd.load_model(path, compression=hvd.Compression.none)
        assert "DistributedAdam" in repr(type(loaded.optimizer))
        assert float(loaded.optimizer.learning_rate) == np.float32(0.01)
        loaded.optimizer.learning_rate = model.optimizer.learning_rate = 0.02
        # One rank has loaded it, and the others have built one, whose variables have other paths.
        resumed = model_of_rank(path, family)
        fit(model, epochs=1)
        for net, callbacks in ((loaded, []), (resumed, broadcast())):
            fit(net, epochs=1, callbacks=callbacks)
            check_same_bits(net)
            check_close(net, model, **({} if is_keras2 else {"rtol": 0, "atol": 0}))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            broadcast_alone = broadcast()
            broadcast_alone[0].set_model(plain)
            broadcast_alone[0].on_train_begin()
        told = [str(each.message) for each in seen]
        told = [text for text in told if "not a DistributedOptimizer" in text]
        assert len(told) == (world.rank == 0 and world.size > 1)


def check_a_custom_object_that_is_distributed() -> None:
    """Scripts for Horovod load a class of their own as a DistributedOptimizer."""
    for family in FAMILIES:
        made: list[Any] = []

        class Own(family.SGD):  # type: ignore[misc]
            pass

        class Loaded(Own):  # type: ignore[misc]
            @classmethod
            def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
                made.append(hvd.DistributedOptimizer(Own.from_config(config)))  # noqa: B023
                return made[-1]  # noqa: B023

        folder = hvd.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "")
        path = str(Path(folder, "model.h5"))
        model = compiled(hvd.DistributedOptimizer(Own(0.01)))
        fit(model, epochs=1, callbacks=broadcast())
        if world.rank == 0:
            model.save(path)
        hvd.barrier()
        loaded = hvd.load_model(path, custom_objects={"Own": Loaded})
        assert loaded.optimizer is made[-1]
        fit(loaded, epochs=1)
        check_same_bits(loaded)


def model_of_rank(path: str, family: Any) -> Any:
    """Return the model of a file on rank 0, and another one on the others."""
    if world.rank > 0:
        # With tf_keras, learning rates are not broadcast, and compared before the first batch.
        return compiled(hvd.DistributedOptimizer(family.Adam(0.02 if is_keras2 else 0.5)))
    model = hvd.load_model(path)
    model.optimizer.learning_rate = 0.02
    return model


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
        _check_callbacks(family)


def _check_callbacks(family: Any) -> None:
    model = compiled(hvd.DistributedOptimizer(family.SGD(0.3, momentum=0.5)), metrics=["mae"])
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
    check_same_bits(model)
    # The same means are in fit's history, computed from every rank's own values.
    own = hvd.allgather_object(before.logs)
    for epoch, logs in enumerate(after.logs):
        for name in ("loss", "mae", "val_loss", "val_mae"):
            mean = np.mean([each[epoch][name] for each in own])
            np.testing.assert_allclose(logs[name], mean, rtol=1e-12)
            assert history.history[name][epoch] == logs[name]
    assert world.size == 1 or own[0][0]["loss"] != own[1][0]["loss"]
    # Horovod: initial_lr / N * ((epoch + (batch + 1) / steps) * (N - 1) / warmup_epochs + 1), and
    # then initial_lr * multiplier ** (epoch - start_epoch).
    n = world.size
    climb = [0.3 / n * ((k + 1) / N_STEPS * (n - 1) / 2 + 1) for k in range(2 * N_STEPS)]
    rates = climb + [0.3 * 0.1**0] * N_STEPS + [0.3 * 0.1**1] * N_STEPS
    np.testing.assert_allclose(after.rates, rates, rtol=1e-6)
    ends = [rates[N_STEPS * (epoch + 1) - 1] for epoch in range(4)]
    name = "lr" if is_keras2 else "learning_rate"
    np.testing.assert_allclose([logs[name] for logs in after.logs], ends, rtol=1e-6)
    corrects = BACKEND == "torch" or (is_keras2 and family is not keras.optimizers)
    if corrects and n > 1:  # momentum * new rate / old rate
        old = [0.3, *rates]
        corrected = [0.5 * new / old for new, old in zip(rates, old, strict=False)]
        changes = [*range(2 * N_STEPS), 3 * N_STEPS]
        expected = [corrected[k] if k in changes else 0.5 for k in range(4 * N_STEPS)]
        np.testing.assert_allclose(after.momenta, expected, rtol=1e-5)
    assert float(model.optimizer.momentum) == 0.5
    if BACKEND == "jax":
        look = keras.callbacks.Callback()
        look.on_train_batch_end = lambda batch, logs: hvd.check_in_sync(model)
        with pytest.raises(RuntimeError, match=r"first/kernel' has no value: .*jax_state_sync"):
            fit(model, epochs=1, callbacks=[look])


def check_schedules() -> None:
    """Rates equal the formulas, and are those that the steps used."""
    schedule = hvd.callbacks.LearningRateScheduleCallback
    cases = [
        (3, lambda: schedule(0.1, 0.5), lambda epoch, batch: 0.1 * 0.5**epoch),
        (
            4,
            lambda: schedule(0.1, 0.5, 1, 3),
            lambda epoch, batch: 0.1 * 0.5 ** max(0, min(1, epoch - 1)),
        ),
        (
            2,
            lambda: schedule(0.1, 0.5, 1, staircase=False),
            lambda epoch, batch: 0.1 * 0.5 ** max(0, epoch - 1 + batch / N_STEPS),
        ),
        (2, lambda: schedule(0.1, lambda e: 1 / (1 + e)), lambda epoch, batch: 0.1 / (1 + epoch)),
        (
            2,
            lambda: schedule(0.1, lambda e: 1 / (1 + e), staircase=False),
            lambda epoch, batch: 0.1 / (1 + epoch + batch / N_STEPS),
        ),
    ]
    model, alone = pair(lambda: keras.optimizers.SGD(0.1))
    hvd.broadcast_parameters(model)
    for epochs, make, formula in cases:
        model.optimizer.learning_rate = 0.1
        recording = Recording()
        fit(model, epochs=epochs, callbacks=[make(), recording])
        expected = [formula(k // N_STEPS, k % N_STEPS) for k in range(epochs * N_STEPS)]
        np.testing.assert_allclose(recording.rates, expected, rtol=1e-6)
        assert [logs["learning_rate"] for logs in recording.logs] == [
            np.float32(expected[k]) for k in range(N_STEPS - 1, epochs * N_STEPS, N_STEPS)
        ]
        for k, rate in enumerate(expected if world.rank == 0 else []):
            alone.optimizer.learning_rate = rate
            rows = slice(BATCH * (k % N_STEPS), BATCH * (k % N_STEPS + 1))
            alone.train_on_batch(X[rows], Y[rows])
    check_as_alone(model, alone)


def check_warmup_of_several_steps_at_once() -> None:
    """Keras only passes the first batch of each execution to callbacks."""
    if BACKEND == "torch":  # not supported there
        return
    model = compiled(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.3)), steps_per_execution=N_STEPS
    )
    hvd.broadcast_parameters(model)
    recording = Recording()
    fit(model, epochs=3, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.3, 2), recording])
    n = world.size
    begins = [0.3 / n * ((epoch + 1 / N_STEPS) * (n - 1) / 2 + 1) for epoch in range(2)]
    np.testing.assert_allclose(recording.rates, [*begins, 0.3], rtol=1e-6)
    check_same_bits(model)


def check_metrics_that_are_arrays() -> None:
    mine = {"loss": float(world.rank), "each": keras.ops.array([1.0, world.rank]), "n": world.rank}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, mine)
    mean = (world.size - 1) / 2
    assert mine["loss"] == mine["n"] == mean
    np.testing.assert_array_equal(mine["each"], [1.0, mean])
    with pytest.raises(TypeError, match=r"logs\['when'\] is 'today'"):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"loss": 1.0, "when": "today"})


def check_what_acts_on_averages() -> None:
    """Clipping, decay, accumulation and moving averages, one at a time, beside a frozen layer."""
    each = (
        {"clipnorm": 0.05},
        {"global_clipnorm": 0.05},
        {"clipvalue": 0.02},
        {"weight_decay": 0.1},
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    )
    for options, n_frozen in [*((options, 1) for options in each), (each[1], 0)]:
        make = partial(keras.optimizers.SGD, 0.5, momentum=0.9, **options)
        model, alone = pair(make)
        hvd.broadcast_parameters(model)
        for net in (model, alone):
            net.layers[0].trainable = not n_frozen
        start = model.get_weights()
        for step in range(4):
            whole = slice(BATCH * step, BATCH * (step + 1))
            mine = slice(*(bound // world.size for bound in (whole.start, whole.stop)))
            apply(model, gradients(model, shard(X)[mine], shard(Y)[mine]))
            if world.rank == 0:
                apply(alone, gradients(alone, X[whole], Y[whole]))
        check_as_alone(model, alone)
        moved = [(a != b).any() for a, b in zip(start, model.get_weights(), strict=True)]
        assert moved == [not n_frozen] * 2 + [True] * 2


def check_words() -> None:
    with pytest.raises(TypeError, match=r"DistributedOptimizer\(\) got .* 'compresion'"):
        hvd.DistributedOptimizer("sgd", compresion=hvd.Compression.fp16)
    with pytest.raises(TypeError, match=r"load_model\(\) got .* 'compresion'"):
        hvd.load_model("model.keras", compresion=hvd.Compression.fp16)
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with pytest.warns(DeprecationWarning, match="use groups=") as warned:
        hvd.PartialDistributedOptimizer("sgd", num_groups=2)
    assert [w.filename for w in warned] == [__file__]


def check_group() -> None:
    """Ranks outside of the group train alone."""
    if world.size < 3:
        return
    group = hvd.new_group([0, 2])
    model = compiled(hvd.DistributedOptimizer(adam(), group=group))
    if world.rank == 1:  # after it has counted one more model, like the others
        return
    hvd.broadcast_parameters(model, group=group)
    fit(model, epochs=1)
    hvd.check_in_sync(model, group=group)


def applied(
    optimizer: Any, *steps: list[Any], keeps_last: bool = False, in_graph: bool = False
) -> list[float]:
    """Return two variables after a step with each of these gradients, two numbers each."""
    if is_keras2:
        import tensorflow as tf

        variables = [tf.Variable([value], name=f"number_{value}") for value in (2.0, 3.0)]
        convert: Any = partial(tf.constant, dtype=tf.float32)
    else:
        convert = partial(keras.ops.convert_to_tensor, dtype="float32")
        variables = [
            keras.Variable(convert([value]), name=f"number_{value}") for value in (2.0, 3.0)
        ]
    if keeps_last:
        optimizer.register_local_var(variables[-1])

    def step(*found: Any) -> None:
        if is_keras2:
            optimizer.apply_gradients(zip(found, variables, strict=True))
        else:
            optimizer.apply(found, variables)

    call: Any = tf.function(step) if in_graph else step
    for each in steps:
        call(*(None if g is None else convert([g]) for g in each))
    if is_keras2:
        return [float(v.numpy()[0]) for v in variables]
    return [float(keras.ops.convert_to_numpy(v.value)[0]) for v in variables]


def check_passes_per_step() -> None:
    """Horovod: the passes' gradients are added, and divided only if they are to be averaged."""
    n = world.size
    mean = (n + 1) / 2  # of rank + 1
    one, two = [world.rank + 1.0, 1.0], [4.0 * (world.rank + 1), 2.0]
    cases = [
        (family, average, in_graph)
        for family in FAMILIES
        for average in (False, True)
        for in_graph in (False, True)[: 1 + is_keras2]
    ]
    for family, average, in_graph in cases:
        factor = 0.5 if average else 1.0
        close = partial(np.testing.assert_allclose, rtol=1e-6)
        run = partial(applied, in_graph=in_graph)

        def wrapped(average: bool = average, make: Any = family.SGD, **options: Any) -> Any:
            return hvd.DistributedOptimizer(
                make(1.0),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
                **options,
            )

        assert run(wrapped(), one) == [2.0, 3.0]  # not applied yet
        close(run(wrapped(), one, two), [2 - factor * 5 * mean, 3 - factor * 3])
        optimizer = wrapped()
        close(run(optimizer, one, two, one, two), [2 - factor * 10 * mean, 3 - factor * 6])
        if is_keras2:
            assert int(optimizer.iterations) == 4  # like Horovod, this counts passes, too
        close(run(wrapped(op=hvd.Sum), one, two), [2 - factor * 5 * mean * n, 3 - factor * 3 * n])
    # In fit, compiled or not, with clipping, which sees the average.
    sgd = partial(keras.optimizers.SGD, 0.1, global_clipnorm=0.5, momentum=0.9)
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    model = compiled(hvd.DistributedOptimizer(sgd(), **passes))
    alone = compiled(
        sgd() if is_keras2 else sgd(gradient_accumulation_steps=2),
        like=hvd.broadcast_object(model.get_weights(), 0),
    )
    fit(model, callbacks=broadcast())
    if is_keras2:  # two passes are one batch with twice as many rows
        halves = (a.reshape(-1, 2 * BATCH, a.shape[1]) for a in (X, Y))
        for rows, labels in 2 * list(zip(*halves, strict=True)):
            alone.train_on_batch(rows, labels)
    else:
        fit(alone, alone=True)
    check_as_alone(model, alone)
    if not is_keras2:
        # The gradients of an incomplete step stay each rank's own.
        model.train_on_batch(*(shard(a)[: BATCH // world.size] for a in (X, Y)))
        check_same_bits(model)
        sums = [
            keras.ops.convert_to_numpy(v).copy() for v in model.optimizer._accumulated_gradients
        ]
        hvd.broadcast_parameters(model.optimizer, root_rank=world.size - 1)
        for v, before in zip(model.optimizer._accumulated_gradients, sums, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(v), before)
    with pytest.raises(ValueError, match="combined with a LossScaleOptimizer"):
        hvd.DistributedOptimizer(_loss_scaling()(adam()), backward_passes_per_step=2)
    if is_keras2:
        return
    several = keras.optimizers.MultiOptimizer(lambda variable: adam())
    with pytest.raises(ValueError, match="combined with a MultiOptimizer"):
        hvd.DistributedOptimizer(several, backward_passes_per_step=2)
    # Continued from a file: sums remain sums.
    passes = {"backward_passes_per_step": 2}
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **passes))
    fit(model, epochs=1, callbacks=broadcast())
    folder = hvd.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "")
    path = Path(folder, "model.keras")
    if world.rank == 0:
        model.save(path)
    hvd.barrier()
    loaded = hvd.load_model(path, **passes)
    for net in (model, loaded):
        fit(net, epochs=1)
    check_close(loaded, model, rtol=0, atol=0)
    # Saved between two passes: the sums are each rank's own, so the file is that of the last step.
    for divided in (False, True) if BACKEND in ("torch", "jax") else (False,):
        options = {**passes, "shard_state": True} if divided else passes
        model = compiled(hvd.DistributedOptimizer(adam(), **options))
        fit(model, epochs=1, callbacks=broadcast())
        assert int(model.optimizer._iterations) == N_STEPS
        assert N_STEPS % 2 == 0
        model.train_on_batch(*(shard(a)[: BATCH // world.size] for a in (X, Y)))
        hvd.save_model(model, path)
        plain = keras.models.load_model(path)
        assert int(plain.optimizer._iterations) == (N_STEPS if world.size > 1 else N_STEPS + 1)
        for v in plain.optimizer._accumulated_gradients:
            assert v.numpy().any() == (world.size == 1)
        # Ranks that receive the state of another have added up nothing.
        before = [v.numpy().copy() for v in model.optimizer._accumulated_gradients]
        hvd.broadcast_optimizer_state(model.optimizer, root_rank=0)
        for v, mine in zip(model.optimizer._accumulated_gradients, before, strict=True):
            np.testing.assert_array_equal(v.numpy(), mine if world.rank == 0 else 0 * mine)
    with pytest.raises(ValueError, match="mean the same"):
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2
        )
    with pytest.raises(ValueError, match="backward_passes_per_step must be 1 or more, not 0"):
        hvd.DistributedOptimizer("sgd", backward_passes_per_step=0)


def check_ranks_without_gradients() -> None:
    if is_keras2 or world.size == 1:
        return  # tf_keras itself requires a gradient
    here = world.rank == world.size - 1
    for factor in (1.0, 2.0):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0, momentum=0.9), gradient_predivide_factor=factor
        )
        found = applied(optimizer, [float(world.size), 2.0 * world.size] if here else [None, None])
        assert found == [1.0, 1.0]


def check_local_variables_and_predivision() -> None:
    """Horovod: a local gradient is this rank's, divided by the number of ranks; sum(g/f) * f/N."""
    n, own = world.size, world.rank + 1.0
    mean = (n + 1) / 2
    for scale, kept in ((True, own / n), (False, own)):
        for passes in (1, 2):
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0),
                backward_passes_per_step=passes,
                scale_local_gradients=scale,
            )
            found = applied(optimizer, *[[own, own]] * passes, keeps_last=True, in_graph=is_keras2)
            np.testing.assert_allclose(found, [2 - passes * mean, 3 - passes * kept], rtol=1e-6)
    for factor in (0.5, 4.0):
        sgd = keras.optimizers.SGD(1.0)
        optimizer = hvd.DistributedOptimizer(sgd, gradient_predivide_factor=factor)
        found = applied(optimizer, [own, 2 * own])
        np.testing.assert_allclose(found, [2 - mean, 3 - 2 * mean], rtol=1e-6)
    for options, reason in (({"global_clipnorm": 1.0}, "global_clipnorm"), ({}, "LossScale")):
        sgd = keras.optimizers.SGD(1.0, **options)
        if not options and is_keras2:
            sgd = keras.mixed_precision.LossScaleOptimizer(sgd)
        elif not options:
            sgd = keras.optimizers.LossScaleOptimizer(sgd)
        with pytest.raises(ValueError, match=rf"local variables such as 'number_3.*: .*{reason}"):
            applied(hvd.DistributedOptimizer(sgd), keeps_last=True)
    if not is_keras2:
        clips = keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0, global_clipnorm=1.0))
        several = hvd.DistributedOptimizer(keras.optimizers.MultiOptimizer(clips))
        with pytest.raises(ValueError, match="global_clipnorm scales all gradients"):
            applied(several, keeps_last=True)
    with pytest.raises(ValueError, match="needs op=Average"):
        hvd.DistributedOptimizer("sgd", gradient_predivide_factor=2.0, op=hvd.Sum)
    model = network()
    partly = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=[model.layers[0]]
    )
    model.compile(optimizer=partly, loss="mse")
    model.set_weights(hvd.broadcast_object(model.get_weights(), 0))
    fit(model, epochs=1)
    first, last = ([w.tolist() for w in layer.get_weights()] for layer in model.layers)
    everyone = hvd.allgather_object((first, last))
    assert all(each[1] == last for each in everyone)
    assert n == 1 or everyone[0][0] != everyone[1][0]
    # A variable that the callback knows to be local keeps this rank's values from the start.
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    model.set_weights([np.full_like(weight, world.rank) for weight in model.get_weights()])
    one, other = model.layers[0].weights
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(n - 1, local_variables=one)
    start.register_local_var(other)
    fit(model, epochs=1, callbacks=[start])
    for layer, value in zip(model.layers, (world.rank, n - 1), strict=True):
        assert all(np.all(weight == value) for weight in layer.get_weights())
    with pytest.raises(ValueError, match="local_layers must be Keras layers"):
        hvd.PartialDistributedOptimizer("sgd", local_layers=["first"])


def check_adasum() -> None:
    """Of two ranks' a and b: (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, for each variable."""
    n = world.size
    if n != 2:
        with pytest.raises(ValueError, match="power of two, not 3"):
            hvd.allreduce(1.0, op=hvd.Adasum)
        return
    a, b = np.array([1.0, 2.0, -3.0], np.float32), np.array([2.0, 0.5, 1.0], np.float32)
    dot = float(a @ b)
    expected = (1 - dot / (2 * float(a @ a))) * a + (1 - dot / (2 * float(b @ b))) * b
    mine = (a, b)[world.rank]
    found = hvd.allreduce(keras.ops.convert_to_tensor(mine), op=hvd.Adasum)
    assert isinstance(found, type(keras.ops.convert_to_tensor(mine)))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), expected, rtol=1e-6)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), op=hvd.Adasum)
    variable = keras.Variable(keras.ops.ones(3), name="adasum")
    for step in (1, 2):
        optimizer.apply([keras.ops.convert_to_tensor(mine)], [variable])
        value = keras.ops.convert_to_numpy(variable.value)
        np.testing.assert_allclose(value, 1 - step * 0.5 * expected, rtol=1e-5, atol=1e-6)
    model = compiled(hvd.DistributedOptimizer(adam(), op=hvd.Adasum))
    before = model.get_weights()
    if BACKEND == "jax":  # which compiles the steps of fit
        with pytest.raises(ValueError, match="not Adasum"):
            fit(model, epochs=1)
        return
    fit(model, epochs=1, callbacks=broadcast())
    check_same_bits(model)
    assert any((p != q).any() for p, q in zip(before, model.get_weights(), strict=True))
    with pytest.raises(ValueError, match="does not compress"):
        hvd.DistributedOptimizer("sgd", op=hvd.Adasum, compression=hvd.Compression.fp16)


def check_process_sets_and_values() -> None:
    """Values of any kind, with Horovod's positions; roots are the world's numbers."""
    n, ranks = world.size, np.arange(world.size)
    x = np.arange(n) * (world.rank + 1.0)
    assert hvd.allreduce(x, "sums", False).tolist() == (np.arange(n) * (ranks + 1).sum()).tolist()
    assert float(hvd.allreduce(world.rank + 1.0)) == (n + 1) / 2
    assert float(hvd.allreduce(2.0, None, None, 3.0, 0.5, hvd.Max)) == 3.0
    tensor = keras.ops.convert_to_tensor(x)
    found = hvd.allreduce(tensor, op=4)  # Horovod's number for Max
    assert isinstance(found, type(tensor))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(found), np.arange(n) * n)
    assert hvd.allgather(x[:1], "rows").shape == (n,)
    assert hvd.broadcast(x, n - 1, "root").tolist() == (np.arange(n) * n).tolist()
    own = np.arange(n)[world.rank] * (ranks + 1).sum()
    assert hvd.reducescatter(x, "parts", hvd.Sum).tolist() == [own]
    assert hvd.mpi_threads_supported() in (True, False)
    members = [0, n - 1] if n > 2 else list(range(n))
    part = hvd.add_process_set(members)
    expected = world.rank + 1.0  # outside of the set gradients are unchanged
    if part.included():
        mean = np.mean([r + 1.0 for r in members])
        assert float(hvd.allreduce(world.rank + 1.0, process_set=part)) == mean
        assert hvd.broadcast_object(world.rank, members[-1], process_set=part) == members[-1]
        for both in (partial(hvd.allreduce, 1.0), partial(hvd.broadcast_object, 1.0)):
            with pytest.raises(TypeError, match="not both: they mean the same"):
                both(process_set=part, group=world.group)
        expected = mean
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=passes, process_set=part
        )
        found = applied(optimizer, *[[world.rank + 1.0, 1.0]] * passes)
        np.testing.assert_allclose(found, [2 - passes * expected, 3 - passes])
    hvd.remove_process_set(part)


def check_elastic_state() -> None:
    for family in FAMILIES:
        _check_elastic_state(compiled(hvd.DistributedOptimizer(family.Adam(0.01))))
    if BACKEND in ("torch", "jax"):
        optimizer = hvd.DistributedOptimizer(adam(), shard_state=True)
        _check_elastic_state(compiled(optimizer))
    if not is_keras2:
        _check_elastic_seeds()
    for family in FAMILIES:
        for options in ({}, {"shard_state": True})[: 1 + (BACKEND in ("torch", "jax"))]:
            _check_elastic_passes(partial(family.SGD, 0.1, momentum=0.9), options)


def _check_elastic_passes(make: Any, options: Mapping[str, Any]) -> None:
    """What a rank has added up before a commit is there after it, and only there."""

    def made() -> Any:
        return compiled(hvd.DistributedOptimizer(make(), backward_passes_per_step=2, **options))

    def train(*batches: int) -> list[Any]:
        for i in batches:
            model.train_on_batch(*(a[(2 * i + world.rank) * 5 :][:5] for a in (X, Y)))
        check_same_bits(model)
        weights: list[Any] = model.get_weights()
        return weights

    model = made()
    state = hvd.elastic.KerasState(model)
    state.sync()
    train(0, 1, 2)
    state.commit()
    expected = train(3)
    for others in ((), (4,), (4, 5)):
        train(*others)
        state.restore()
        for a, b in zip(train(3), expected, strict=True):
            np.testing.assert_array_equal(a, b)
    state.restore()
    state.sync()  # as survivors do
    for a, b in zip(train(3), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    if is_keras2:  # does not count passes in what other ranks get
        return
    state.restore()
    other = made()
    with pytest.warns(RuntimeWarning, match="after 1 of its passes, whose gradients are lost"):
        hvd.elastic.KerasState(other).load(state.snapshot())
    passes = adapter_of(other.optimizer).passes(other.optimizer)
    assert passes is not None
    assert passes.n == 3
    assert not any(np.any(x.numpy()) for x in passes.sums)


def _check_elastic_seeds() -> None:
    """Noise differs between ranks, also after they have got the state of one of them."""
    dropout = keras.layers.Dropout(0.5, seed=world.rank)
    normalized = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((N_FEATURES,)), dropout, normalized])
    normalized.moving_mean.assign([float(world.rank)] * N_FEATURES)
    state = hvd.elastic.KerasState(model)
    state.sync()
    assert hvd.check_in_sync(model, buffers=True)
    seeds = horo_lite.allgather_object(values_of_seeds(dropout))
    assert len(set(seeds)) == world.size, seeds
    model(np.ones((2, N_FEATURES), np.float32), training=True)
    drawn = values_of_seeds(dropout)
    state.restore()
    assert values_of_seeds(dropout) == drawn != seeds[world.rank], (drawn, seeds)


def values_of_seeds(layer: Any) -> tuple[int, ...]:
    state = keras.ops.convert_to_numpy(layer.seed_generator.state.value)
    return tuple(int(number) for number in state)


def _check_elastic_state(model: Any) -> None:
    state = hvd.elastic.KerasState(model, batch=world.rank, epoch=0)
    state.sync()
    check_same_bits(model)
    before = model.get_weights()
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
    slots = OptimizerState(model.optimizer).read()
    assert any((a != b).any() for a, b in zip(before, after, strict=True))
    n_steps = int(model.optimizer.iterations)
    fit(model, epochs=1)
    assert any((a != b).any() for a, b in zip(model.get_weights(), after, strict=True))
    state.epoch = 9
    state.restore()
    assert state.epoch == 2
    assert int(model.optimizer.iterations) == n_steps == 2 * N_STEPS
    for a, b in zip(model.get_weights(), after, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(OptimizerState(model.optimizer).read(), slots, strict=True):
        np.testing.assert_array_equal(a, b)


def divided_and_whole(make: Any, **options: Any) -> tuple[Any, Any]:
    """Return two models of equal weights, whose optimizers differ in shard_state only."""
    divided = compiled(hvd.DistributedOptimizer(make(), shard_state=True, **options))
    whole = compiled(
        hvd.DistributedOptimizer(make(), **options),
        like=hvd.broadcast_object(divided.get_weights(), 0),
    )
    return divided, whole


def values_of(optimizer: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(v)) for v in optimizer.variables]


def check_shares(divided: Any, whole: Any, n_slots: int) -> None:
    """Each rank has slots for its own variables, and all together those of all."""
    sizes = [int(np.prod(v.shape)) for v in divided.trainable_variables]
    mine = sum(v.size for v in values_of(divided.optimizer) if v.ndim) // n_slots
    everyone = hvd.allgather_object(mine)
    assert sum(everyone) == sum(sizes), everyone
    assert max(everyone) <= max(max(sizes), sum(sizes) / world.size + min(sizes)), everyone
    assert sum(v.size for v in values_of(whole.optimizer) if v.ndim) == n_slots * sum(sizes)


def check_alike(divided: Any, whole: Any) -> None:
    """Weights and states are the same: to the bit, unless XLA has compiled two programs."""
    check_same_bits(divided)
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if BACKEND == "jax" else {"rtol": 0, "atol": 0}
    check_close(divided, whole, **tolerance)
    states = divided.optimizer.whole_state(), values_of(whole.optimizer)
    for mine, theirs in zip(*states, strict=True):
        np.testing.assert_allclose(mine, theirs, **tolerance)


def check_shard_state() -> None:
    kinds = keras.optimizers
    everything: dict[str, Any] = {
        "momentum": 0.9,
        "weight_decay": 0.01,
        "global_clipnorm": 0.3,
        "gradient_accumulation_steps": 2,
        "use_ema": True,
        "ema_momentum": 0.7,
    }
    rate = kinds.schedules.CosineDecay(0.2, 10)
    cases: list[tuple[Any, int, dict[str, Any]]] = [
        (partial(kinds.AdamW, 0.01, weight_decay=0.1), 2, {"compression": hvd.Compression.fp16}),
        (partial(kinds.SGD, rate, **everything), 0, {}),
        (partial(kinds.SGD, rate, **everything, ema_overwrite_frequency=3), 0, {}),
        (partial(kinds.Adam, rate, amsgrad=True), 3, {"backward_passes_per_step": 2}),
        (partial(kinds.Muon, 0.01), 0, {}),
        (partial(kinds.SGD, 0.2), 0, {}),
        (partial(kinds.SGD, 0.2, momentum=0.9, clipnorm=0.3), 1, {}),
        (adam, 2, {}),
        (partial(kinds.Nadam, 0.01), 2, {}),
    ]
    for make, n_slots, options in cases:
        divided, whole = divided_and_whole(make, **options)
        for optimizer in (divided.optimizer, whole.optimizer):
            if isinstance(optimizer, kinds.AdamW):
                optimizer.exclude_from_weight_decay(var_names=["bias"])
        for model in (divided, whole):
            fit(model, epochs=1, callbacks=broadcast())
        assert int(divided.optimizer.iterations) == int(whole.optimizer.iterations) > 0
        assert divided.optimizer.is_sharded
        if n_slots and "backward_passes_per_step" not in options:
            check_shares(divided, whole, n_slots)
        check_alike(divided, whole)


def check_shard_state_in_a_loop() -> None:
    """Eagerly, with weights, frozen layers and a gradient on one rank only; on JAX also in jit."""
    divided, whole = divided_and_whole(partial(keras.optimizers.Nadam, 0.1))
    hvd.broadcast_parameters(divided)
    for step in range(4):
        for model in (divided, whole):
            x, y = (a[(step + world.rank) * 3 :][:5] for a in (X, Y))
            found = gradients(model, x, y)
            if step == 1:  # the other ranks' variables have none
                found[1:] = [None] * 3
            if step == 2 and world.rank:
                found[0] = None
            if BACKEND == "jax" and step == 3:
                _stateless(model, found, {})
            else:
                apply(model, found, weight=1 + world.rank)
        check_alike(divided, whole)
    # Read between two passes, where every rank has a sum of its own.
    divided, whole = divided_and_whole(adam, backward_passes_per_step=2)
    hvd.broadcast_parameters(divided)
    for step in range(2):
        for model in (divided, whole):
            x, y = (a[(step + world.rank) * 3 :][:5] for a in (X, Y))
            apply(model, gradients(model, x, y))
        divided.optimizer.whole_state()
    check_alike(divided, whole)
    if world.size > 1:
        drifted, _ = divided_and_whole(adam)
        if BACKEND == "torch":
            with pytest.raises(hvd.DriftError, match="first/kernel"):
                fit(drifted, epochs=1)


class Failing(keras.optimizers.SGD):
    fails = False

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self.fails:
            raise ValueError("no memory left")
        super().update_step(gradient, variable, learning_rate)


def check_shard_state_after_an_error_in_the_middle_of_a_step() -> None:
    if world.size == 1 or BACKEND == "jax":  # where variables are changed when a step has ended
        return
    divided, whole = divided_and_whole(partial(Failing, 0.1, momentum=0.9))
    hvd.broadcast_parameters(divided)
    x, y = (a[world.rank * 3 :][:5] for a in (X, Y))
    for step in range(3):
        for model in (divided, whole):
            apply(model, gradients(model, x, y))
        if step == 0:
            saved = divided.optimizer.whole_state(), divided.get_weights()
        if step == 1:
            fails = vars(divided.optimizer)["fails"] = world.rank == 1
            with pytest.raises(ValueError if fails else hvd.MismatchError):
                apply(divided, gradients(divided, x, y))
            if fails:
                with pytest.raises(hvd.MismatchError):
                    hvd.barrier()
            vars(divided.optimizer)["fails"] = False
            for use in (
                lambda: apply(divided, gradients(divided, x, y)),
                divided.optimizer.whole_state,
            ):
                with pytest.raises(RuntimeError, match="Load a saved model"):
                    use()
            divided.optimizer.set_whole_state(saved[0])
            divided.set_weights(saved[1])
            apply(divided, gradients(divided, x, y))
    check_alike(divided, whole)


def check_shard_state_in_files() -> None:
    """Files are those of an undivided optimizer, and are loaded by any number of ranks."""
    divided, whole = divided_and_whole(adam)
    folder = hvd.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else "")
    new, path = Path(folder, "new.keras"), Path(folder, "model.keras")
    for name, epochs in ((new, 0), (path, 1)):
        for model in (divided, whole):
            fit(model, epochs=epochs, callbacks=broadcast())
        hvd.save_model(divided, name)
        plain = keras.models.load_model(name)
        assert int(plain.optimizer.iterations) == epochs * N_STEPS
        if epochs:
            check_close(plain, divided, rtol=0, atol=0)
            for mine, theirs in zip(
                values_of(plain.optimizer), divided.optimizer.whole_state(), strict=True
            ):
                np.testing.assert_array_equal(mine, theirs)
    assert not divided.optimizer.is_sharded  # until the next step
    loaded = hvd.load_model(path, shard_state=True)
    # One rank alone continues from a file, and others get its state.
    resumed = compiled(hvd.DistributedOptimizer(adam(), shard_state=True))
    if world.rank == world.size - 1:
        resumed = hvd.load_model(path, shard_state=True)
    for model in (divided, whole, loaded):
        fit(model, epochs=1)
    fit(resumed, epochs=1, callbacks=broadcast(world.size - 1))
    check_shares(loaded, whole, 2)
    for model in (divided, loaded, resumed):
        assert model.optimizer.is_sharded
        check_alike(model, whole)
    for model in (divided, whole):  # the state that was collected is no longer that of others
        fit(model, epochs=1)
    check_alike(divided, whole)
    with pytest.raises(ValueError, match=r"save_optimizer_weights_to_hdf5_group.*\.keras"):
        divided.save(Path(folder, f"{world.rank}.h5"))
    with pytest.raises(ValueError, match=r"get_state_tree\(\) takes the variables of one rank"):
        divided.get_state_tree()
    divided.load_weights(_weights_of(plain, folder))
    with pytest.raises(RuntimeError, match="broadcast from a rank that has loaded it"):
        divided.optimizer.receive_state(None)  # from a root that has not loaded it
    fit(divided, epochs=1)
    fit(plain, epochs=1, alone=True)
    check_as_alone(divided, plain)


def _weights_of(model: Any, folder: str) -> str:
    path = str(Path(folder, f"{world.rank}.weights.h5"))
    model.save_weights(path)
    return path


def check_shard_state_is_refused() -> None:
    shard = partial(hvd.DistributedOptimizer, shard_state=True)
    if BACKEND not in ("torch", "jax"):
        with pytest.raises(ValueError, match=f"not for {BACKEND}"):
            shard(adam())
        return
    kinds = keras.optimizers
    with pytest.raises(ValueError, match="cannot be combined with a LossScaleOptimizer"):
        shard(kinds.LossScaleOptimizer(adam()))
    with pytest.raises(ValueError, match="cannot be combined with a MultiOptimizer"):
        shard(kinds.MultiOptimizer(lambda variable: adam()))
    with pytest.raises(ValueError, match=r"'number.* cannot be a local variable"):
        applied(shard(adam()), [1.0, 2.0], keeps_last=True)
    model = network()
    for optimizer in (kinds.Adafactor(), shard(kinds.Adafactor())):
        if hasattr(optimizer, "is_sharded"):
            for _ in range(2):
                with pytest.raises(ValueError, match="cannot divide the state of Adafactor"):
                    optimizer.build(model.trainable_variables)
    optimizer = shard(adam())
    optimizer.build(model.trainable_variables)
    with pytest.raises(ValueError, match="this is not the state of the Adam"):
        optimizer.set_weights(values_of(optimizer)[:-1])


def check_replicas_and_copies() -> None:
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = keras.Sequential([keras.Input((X.shape[1],)), *layers, keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss="mse")
    fit(model, x=X + world.rank, callbacks=broadcast())
    assert hvd.check_in_sync({"net": model})  # whose moving statistics and seeds are each rank's
    if world.size > 1:
        with pytest.raises(hvd.DriftError, match="moving_mean"):
            hvd.check_in_sync(model, buffers=True)
    hvd.broadcast_parameters(model)
    assert hvd.check_in_sync(model, buffers=True)
    with pytest.raises(TypeError, match="is not an optimizer"):
        hvd.broadcast_optimizer_state(model)
    for copy_of, warns in (
        (copy.deepcopy, True),
        (lambda model: pickle.loads(pickle.dumps(model)), True),
        (lambda model: network().compile_from_config(model.get_compile_config()), True),
        (lambda model: model.optimizer.get_config(), False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            copy_of(model)
        said = [str(each.message) for each in caught]
        said = [text for text in said if "has a plain SGD, which trains every rank" in text]
        assert len(said) == (warns and world.size > 1)


def check_mismatches_are_named() -> None:
    if world.size == 1:
        return
    wide = world.rank == world.size - 1
    model = network(width=9 if wide else 8)
    for call in (hvd.broadcast_parameters, _first_step):
        # The type of an exception inside of a graph depends on the backend.
        with pytest.raises(Exception, match=r"first/(kernel|bias)") as raised:
            call(model)
        text = f"{raised.typename}: {raised.value}"
        assert "MismatchError" in text
        assert f"rank {world.size - 1}" in text
    # A gradient that one rank does not have counts as zeros there.
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    hvd.broadcast_parameters(model)
    found = gradients(model, X[:4], Y[:4])
    start = model.get_weights()
    expected = [g * (world.size - 1) / world.size if k == 1 else g for k, g in enumerate(found)]
    expected = [keras.ops.convert_to_numpy(g) for g in expected]
    if wide:
        found[1] = None
    model.optimizer.apply(found, model.trainable_variables)
    for was, now, gradient in zip(start, model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(was - now, gradient, **CLOSE)
    check_same_bits(model)
    # Learning rates that follow each rank's own loss, as with ReduceLROnPlateau.
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    halved = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + wide * epoch))
    with pytest.raises(hvd.MismatchError, match=r"epoch 2: rank.* has 0\.5, .*MetricAverage"):
        fit(model, epochs=3, callbacks=[*broadcast(), halved])


def _first_step(model: Any) -> None:
    model.compile(optimizer=hvd.DistributedOptimizer(adam()), loss="mse")
    fit(model, epochs=1)


def check_sync_batch_normalization() -> None:
    """Outputs, statistics and gradients are those of the whole batch."""
    import tensorflow as tf

    import horo_lite.tensorflow as of_tensorflow

    x = (rng.normal(size=(BATCH, 4, 3, 2)) + 5).astype(np.float32)
    scale = rng.normal(size=x.shape).astype(np.float32)
    begin = BATCH // world.size * world.rank
    mine = slice(begin, begin + BATCH // world.size)
    ours = of_tensorflow.SyncBatchNormalization(name="norm")
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

    theirs = keras.layers.BatchNormalization(synchronized=True, name="theirs")
    for layer in (theirs, ours):
        model = keras.Sequential([keras.Input((4, 3, 2)), layer])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
        (callback,) = broadcast()
        callback.set_model(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            callback.on_train_begin()
        named = ["layer 'theirs' has synchronized=True" in str(one.message) for one in caught]
        assert named == [True] * (layer is theirs and world.rank == 0)


def check_a_loop_of_ones_own() -> None:
    """Horovod's tape with Keras' optimizer, which then does not average."""
    import tensorflow as tf

    import horo_lite.tensorflow as of_tensorflow

    model, alone = network(), network()
    hvd.broadcast_parameters(model, world.size - 1)
    alone.set_weights(model.get_weights())
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
    check_close(model, alone)


def check_a_forgotten_broadcast_is_a_warning() -> None:
    """After step 10, by when scripts that broadcast after the first batch have done so."""
    for broadcasts in (False, True):
        model = network()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, epochs=3, callbacks=[callback] if broadcasts else [])  # 18 steps
        texts = [str(one.message) for one in caught if "the replicas differ" in str(one.message)]
        is_told = world.rank == 0 and not broadcasts and world.size > 1
        assert len(texts) == is_told, texts
        assert all("after step 10: 2 of 4 arrays, first '" in text for text in texts), texts


class Heads(keras.Model):  # type: ignore[misc]
    """Two heads, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__(name="heads")
        self.body = keras.layers.Dense(4, activation="tanh", name="body")
        limit = keras.constraints.MaxNorm(1.0)
        self.heads = [
            keras.layers.Dense(2, name="zero", kernel_constraint=limit),
            keras.layers.Dense(2, name="one"),
        ]
        self.head = 0
        self.build((None, N_FEATURES))

    def build(self, shape: Any) -> None:
        for layer, n in ((self.body, N_FEATURES), *((head, 4) for head in self.heads)):
            layer.build((None, n))
        random = np.random.default_rng(0)
        self.set_weights([random.standard_normal(w.shape) / 2 for w in self.get_weights()])
        self.built = True

    def call(self, x: Any) -> Any:
        return self.heads[self.head](self.body(x))


SLOTS = {"momentum": 0.9, "epsilon": 1e-3}
KINDS = (
    ("SGD", "momentum"),
    ("Adam", "epsilon"),
    ("AdamW", "epsilon"),
    ("RMSprop", "momentum", "epsilon"),
    ("Lamb", "epsilon"),
)
CALLS = ("apply", "apply_gradients", "apply without variables", "stateless_apply")
IN_FIT = ("fit", "train_on_batch", "with sample weights")


class Program:
    """A random training loop: its optimizer, and what it does one after the other."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)

        def chosen(probability: float, **options: Any) -> dict[str, Any]:
            return options if draw.random() < probability else {}

        def one_of(*options: dict[str, Any]) -> dict[str, Any]:
            return draw.choice([{}, *options])

        self.seed, (self.kind, *slots) = seed, draw.choice(KINDS)
        clips = ("clipnorm", "global_clipnorm", "clipvalue")
        self.inside = {name: SLOTS[name] for name in slots} | {
            **one_of(*({clip: 0.1} for clip in clips)),
            **chosen(0.3, weight_decay=0.05),
            **chosen(0.3, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        }
        passes = one_of({}, {"average_aggregated_gradients": draw.random() < 0.5})
        if passes:
            passes["backward_passes_per_step"] = 2
        else:
            self.inside |= chosen(0.3, gradient_accumulation_steps=2)
        self.scales = not passes and draw.random() < 0.2
        self.around = passes | chosen(0 if self.scales else 0.4, shard_state=True)
        # The samples of all ranks in one process are one batch.
        means = one_of({"op": hvd.Sum}, {"gradient_predivide_factor": 2.0})
        self.has_weights = not passes and not means and draw.random() < 0.4
        self.around |= means
        others = ["head", "rate", "state", "overflow"]
        if "use_ema" not in self.inside:  # with frozen variables, fit() itself fails at its end
            others.append("freeze")
        in_fit = () if self.has_weights or "op" in means or self.factor > 1 else IN_FIT
        kinds = [*CALLS, *CALLS, *others, *in_fit]
        self.steps = [(draw.choice(kinds), draw.randrange(2)) for _ in range(draw.randint(2, 8))]

    @property
    def factor(self) -> int:
        """By how much passes are more than their mean, which is Keras' own."""
        return 2 if self.around.get("average_aggregated_gradients") is False else 1

    def optimizer(self, alone: bool) -> Any:
        passes = self.around.get("backward_passes_per_step")
        options = {"gradient_accumulation_steps": passes} if alone and passes else {}
        optimizer = getattr(keras.optimizers, self.kind)(0.05, **self.inside, **options)
        if self.scales:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 16.0, 3)
        return optimizer if alone else hvd.DistributedOptimizer(optimizer, **self.around)

    def run(self, alone: bool) -> list[Any]:
        """Return the weights after each step."""
        model, every = Heads(), []
        model.compile(optimizer=self.optimizer(alone), loss="mse", auto_scale_loss=False)
        variables = model.trainable_variables
        model.optimizer.build(variables)
        for i, (what, which) in enumerate(self.steps):
            batch = np.random.default_rng(i).standard_normal((8, N_FEATURES + 3))
            if not alone and self.has_weights:
                batch = batch[:5] if world.rank == 0 else batch[5:]
            elif not alone:
                batch = batch[world.rank :: 2]
            x, y, weights = np.split(batch, [N_FEATURES, N_FEATURES + 2], axis=1)
            if what in CALLS or what == "overflow":
                self.step(model, variables, x, y, what, which, alone)
            elif what == "freeze":
                model.heads[which].trainable = not model.heads[which].trainable
            elif what == "head":
                model.head = which
            elif what == "rate":
                model.optimizer.learning_rate = (0.01, 0.1)[which]
            elif what == "state" and not self.around.get("backward_passes_per_step"):
                kept: dict[str, Any] = {}
                model.optimizer.save_own_variables(kept)
                model.optimizer = self.optimizer(alone)
                model.optimizer.build(variables)
                model.optimizer.load_own_variables(kept)
            elif what == "fit":
                model.fit(x, y, batch_size=len(x) // 2, shuffle=False, verbose=0)
            elif what in IN_FIT:
                weight = np.abs(weights[:, 0]) if what == "with sample weights" else None
                model.train_on_batch(x, y, sample_weight=weight)
            every.append(model.get_weights())
        return every

    def step(
        self, model: Any, variables: Any, x: Any, y: Any, what: str, which: int, alone: bool
    ) -> None:
        import torch

        x, y = map(keras.ops.convert_to_tensor, (x, y))
        optimizer, model.head = model.optimizer, which
        known = what in ("apply without variables", "stateless_apply")
        trained = variables if known else model.trainable_variables
        model.zero_grad()
        share = len(x) / 8 if "op" in self.around and not alone else 1
        loss = keras.ops.mean((model(x) - y) ** 2) * share * (self.factor if alone else 1)
        optimizer.scale_loss(loss).backward()
        found = [variable.value.grad for variable in trained]
        if what == "overflow" and self.scales and (alone or world.rank == 0):
            found[0] = found[0] * np.inf
        weight = {"weight": len(x)} if self.has_weights and not alone else {}
        with torch.no_grad():
            if what == "apply_gradients":
                optimizer.apply_gradients(zip(found, trained, strict=True), **weight)
            elif what == "stateless_apply" and None not in found:
                values = [[v.value for v in some] for some in (optimizer.variables, trained)]
                new = optimizer.stateless_apply(values[0], found, values[1], **weight)
                for some, of in zip(new, (trained, optimizer.variables), strict=True):
                    for variable, value in zip(of, some, strict=True):
                        variable.assign(value)
            else:
                optimizer.apply(found, *([] if known else [trained]), **weight)


def check_random_programs() -> None:
    """The ranks train as one process does with the samples of both."""
    keras.config.set_floatx("float64")
    first = hvd.broadcast_object(random.randrange(1 << 30))
    for seed in range(first, first + 30):
        program = Program(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Gradients do not exist", UserWarning)
            together = program.run(alone=False)
            alone = program.run(alone=True)  # on all ranks, since Keras numbers its objects
        for i, each in enumerate(zip(together, alone, strict=True)):
            for mine, expected in zip(*each, strict=True):
                message = f"after step {i} of {vars(program)}"
                np.testing.assert_allclose(mine, expected, 1e-6, 1e-6, err_msg=message)
        hvd.check_in_sync(together[-1])
    keras.config.set_floatx("float32")


HELPERS = ("check_same_bits", "check_close", "check_as_alone", "check_shares", "check_alike")
OF_KERAS2 = (
    check_sync_batch_normalization,
    check_a_loop_of_ones_own,
    check_a_custom_object_that_is_distributed,
)
OF_BOTH = (
    check_fit_equals_one_process,
    check_an_optimizer_that_has_trained_is_wrapped,
    check_passes_per_step,
    check_local_variables_and_predivision,
    check_callbacks,
    check_loss_scaling,
    check_files,
    check_elastic_state,
    check_shard_state_is_refused,
    check_a_forgotten_broadcast_is_a_warning,
)
OF_TORCH_AND_JAX = (
    check_shard_state,
    check_shard_state_in_a_loop,
    check_shard_state_after_an_error_in_the_middle_of_a_step,
    check_shard_state_in_files,
)
NOT_HERE = [
    *OF_KERAS2,
    *(OF_TORCH_AND_JAX if BACKEND not in ("torch", "jax") else ()),
    *([check_random_programs] if (BACKEND, world.size) != ("torch", 2) else ()),
]
OF_ALL = [
    check
    for name, check in globals().items()
    if name.startswith("check_") and name not in HELPERS and check not in NOT_HERE
]
EVERY = [*OF_BOTH, *OF_KERAS2] if is_keras2 else OF_ALL
for name in sys.argv[1:] or [check.__name__ for check in EVERY]:
    globals()[name]()
    if world.rank == 0:
        print(f"{BACKEND} on {world.size}: {name}", flush=True)
