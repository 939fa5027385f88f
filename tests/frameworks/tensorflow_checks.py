"""What horo_lite.tensorflow promises, eagerly and inside tf.function; every rank runs this."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horo_lite.tensorflow as hvd
import horo_lite.tensorflow.keras as of_keras

world = hvd.init()
RANK, SIZE = world.rank, world.size
RANKS = np.arange(SIZE)
N_STEPS, BATCH = 6, 12
UNEVEN = {1: [12], 2: [7, 5], 3: [6, 2, 4]}[SIZE]
CLOSE = {"rtol": 2e-4, "atol": 2e-6}  # sums of float32 products, formed in another order

# Every check takes what makes a function of a Python one: nothing, and tf.function.
Maker = Callable[[Any], Any]


def check_operations(made: Maker) -> None:
    # Exact in every dtype here.
    x = np.arange(6).reshape(2, 3) * (RANK + 1)
    for dtype in (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32):

        def all_of_them(x: Any) -> Any:
            rows = tf.repeat(x, RANK + 1, axis=0)
            return (
                hvd.allreduce(x, hvd.Sum),
                hvd.allgather(rows),
                hvd.broadcast(x, SIZE - 1),
                hvd.allgather(x[0, 1]),
                *hvd.grouped_allreduce([x, x[0] + 1], hvd.Max),
            )

        results = made(all_of_them)(tf.cast(x, dtype))
        base = np.arange(6).reshape(2, 3)
        expected = (
            base * (RANKS + 1).sum(),
            np.concatenate([np.repeat(base * (r + 1), r + 1, axis=0) for r in RANKS]),
            base * SIZE,
            RANKS + 1,
            base * SIZE,
            base[0] * SIZE + 1,
        )
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(np.asarray(result, np.float64), wanted)


def check_gradients_of_operations(made: Maker) -> None:
    x = tf.constant([1.0, 2.0]) * (RANK + 1)
    scale = tf.constant([3.0, 5.0]) * (RANK + 1)  # of each rank's own loss

    def gradients(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            mean = tf.reduce_sum(hvd.allreduce(x) * scale)
            rows = hvd.allgather(tf.repeat(x[None], RANK + 1, axis=0))
            gathered = tf.reduce_sum(rows * scale)
            sent = tf.reduce_sum(hvd.broadcast(x, SIZE - 1) * scale)
        return [tape.gradient(loss, x) for loss in (mean, gathered, sent)]

    mean, gathered, sent = (g.numpy() for g in made(gradients)(x))
    total = np.array([3.0, 5.0]) * (RANKS + 1).sum()
    np.testing.assert_allclose(mean, total / SIZE, rtol=1e-6)
    np.testing.assert_array_equal(gathered, total * (RANK + 1))
    np.testing.assert_array_equal(sent, total * (RANK == SIZE - 1))


def samples(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    ids, x = rng.integers(0, 9, BATCH), rng.normal(size=(BATCH, 3)).astype(np.float32)
    return ids, x


class Net:
    """An embedding and two dense layers' worth of variables."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def variable(name: str, *shape: int) -> tf.Variable:
            return tf.Variable(rng.normal(size=shape).astype(np.float32), name=name)

        self.table = variable("table", 9, 3)
        self.dense = {"w": variable("w", 3, 4), "v": variable("v", 4, 1)}

    def loss(self, ids: Any, x: Any) -> Any:
        hidden = tf.tanh((tf.nn.embedding_lookup(self.table, ids) + x) @ self.dense["w"])
        return tf.reduce_mean((hidden @ self.dense["v"])[:, 0] ** 2)

    def variables(self) -> list[tf.Variable]:
        return [self.table, *self.dense.values()]

    def step(self, gradients: Any) -> None:
        self.table.scatter_sub(_scaled(gradients["table"]))
        for name, variable in self.dense.items():
            variable.assign_sub(0.1 * gradients["dense"][name])


def _scaled(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.IndexedSlices(gradient, tf.range(9))
    return tf.IndexedSlices(0.1 * gradient.values, gradient.indices)


def check_tape(made: Maker) -> None:
    """Uneven shards, and gradients of an embedding, gathered or as dense ones."""
    _train(made, False, hvd.Compression.none, CLOSE)
    _train(made, True, hvd.Compression.none, CLOSE)
    _train(made, True, hvd.Compression.fp16, {"rtol": 0.02, "atol": 2e-3})


def _train(made: Maker, as_dense: bool, compression: Any, tolerance: dict[str, float]) -> None:
    net, alone = Net(RANK), Net(SIZE - 1)

    def train(ids: Any, x: Any, is_first: bool) -> None:
        if is_first:
            hvd.broadcast_variables(net.variables(), SIZE - 1)
        with hvd.DistributedGradientTape(
            tf.GradientTape(), sparse_as_dense=as_dense, compression=compression
        ) as tape:
            loss = net.loss(ids, x)
        sources = {"table": net.table, "dense": net.dense}
        found = tape.gradient(loss, sources, weight=tf.shape(ids)[0])
        assert isinstance(found["table"], tf.IndexedSlices) != as_dense
        net.step(found)

    train = made(train)
    begin = sum(UNEVEN[:RANK])
    mine = slice(begin, begin + UNEVEN[RANK])
    for step in range(N_STEPS):
        ids, x = samples(step)
        train(tf.constant(ids[mine]), tf.constant(x[mine]), step == 0)
        with tf.GradientTape() as tape:
            loss = alone.loss(ids, x)
        alone.step(tape.gradient(loss, {"table": alone.table, "dense": alone.dense}))
    hvd.check_in_sync([(v.name, v) for v in net.variables()])
    for ours, theirs in zip(net.variables(), alone.variables(), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), **tolerance)


def check_only_sparse_gradients(made: Maker) -> None:
    """A rank without samples has no say, whatever its rows hold."""
    weight = float(RANK)
    rows = tf.fill([2, 3], np.float32("nan") if weight == 0 else np.float32(SIZE))
    slices = tf.IndexedSlices(rows, tf.constant([RANK, 7]), tf.constant([9, 3]))
    transform = hvd.DistributedGradientTape(tf.GradientTape())._transform

    def averaged(values: Any) -> Any:
        own = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        return tf.convert_to_tensor(transform(["table"], [own], weight)[0])

    if SIZE == 1:
        return
    expected = np.zeros((9, 3))
    expected[1:SIZE] = SIZE * RANKS[1:, None] / RANKS.sum()
    expected[7] = SIZE
    np.testing.assert_allclose(made(averaged)(rows), expected, rtol=1e-6)


def check_persistent_tape(made: Maker) -> None:
    x = tf.Variable([1.0, 2.0], name="x")

    def both() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            square, cube = x**2 * (RANK + 1), x**3 * (RANK + 1)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        return tape.gradient(square, x), tape.gradient(cube, [x]), tape.gradient(square, {})

    square, (cube,), nothing = made(both)()
    total = (RANKS + 1).sum()
    np.testing.assert_allclose(square, np.array([2, 4]) * total)
    np.testing.assert_allclose(cube, np.array([3, 12]) * total)
    assert nothing == {}


def check_mismatches_are_named(made: Maker) -> None:
    if SIZE == 1:
        return
    last = RANK == SIZE - 1
    variable = tf.Variable(np.ones((3 if last else 2,), np.float32), name="odd_one")

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2)
        return hvd.DistributedGradientTape(tape).gradient(loss, variable)

    for wrong in (gradient, lambda: hvd.broadcast_variables([variable])):
        with pytest.raises(Exception, match="odd_one") as raised:
            made(wrong)()
        assert "MismatchError" in f"{raised.typename}: {raised.value}"
        assert f"rank {SIZE - 1}" in str(raised.value)


def check_order_inside_a_graph() -> None:
    """Operations run in the order of the program, though nothing else puts them into one."""

    @tf.function
    def many(x: Any) -> Any:
        return [hvd.allreduce(x + k, hvd.Sum, name=f"number {k}") for k in range(20)]

    for _ in range(5):
        for k, result in enumerate(many(tf.constant(float(RANK)))):
            assert result == RANKS.sum() + k * SIZE


def check_a_graph_does_not_see_its_tensors_change() -> None:
    """Results are new tensors, even of what nobody else seems to need."""

    @tf.function
    def before_and_after(x: Any) -> Any:
        doubled = x * 2
        averaged = hvd.allreduce(doubled)
        gathered = hvd.DistributedGradientTape(tf.GradientTape())._transform(["x"], [doubled])
        return doubled, averaged, gathered[0]

    doubled, averaged, through = before_and_after(tf.fill([1000], RANK + 1.0))
    assert (doubled.numpy() == 2 * (RANK + 1)).all()
    assert (averaged.numpy() == SIZE + 1).all()
    assert (through.numpy() == SIZE + 1).all()


def check_xla_is_told_of() -> None:
    @tf.function(jit_compile=True)
    def compiled(x: Any) -> Any:
        return hvd.allreduce(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="horo_lite_needs_jit_compile_False"):
        compiled(tf.ones(3))

    model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="random_normal")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
    x = np.random.default_rng(RANK).normal(size=(8, 3)).astype(np.float32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        start = of_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(x, x[:, :2], batch_size=4, verbose=0, callbacks=[start])
    told = ["jit_compile=False" in str(one.message) for one in seen]
    assert sum(told) == (RANK == 0)
    hvd.check_in_sync(model)  # which had no weights when training began


for name, check in list(globals().items()):
    if name.startswith("check_"):
        takes = check.__code__.co_argcount
        for made in (lambda f: f, tf.function)[: 1 + takes]:
            check(made) if takes else check()
        if RANK == 0:
            print(f"{SIZE} ranks: {name}", flush=True)
