"""Properties of horo_lite.tensorflow, eagerly and inside tf.function; every rank runs this."""

from __future__ import annotations

import gc
import inspect
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
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
UNEVEN = {1: [12], 2: [7, 5], 3: [6, 2, 4], 4: [5, 1, 4, 2]}[SIZE]
CLOSE = {"rtol": 2e-4, "atol": 2e-6}  # sums of float32 products, added in another order

# Every check takes a function that converts a Python function: the identity, or tf.function.
Maker = Callable[[Any], Any]


def check_operations(made: Maker) -> None:
    # Exact in every dtype here.
    x = np.arange(6).reshape(2, 3) * (RANK + 1)
    for dtype in (tf.float32, tf.float16, tf.bfloat16, tf.float64, tf.int32):

        def all_of_them(x: Any) -> Any:
            rows = tf.repeat(x, RANK + 1, axis=0)
            return (
                hvd.allreduce(x, op=hvd.Sum),
                hvd.allgather(rows),
                hvd.broadcast(x, SIZE - 1),
                hvd.allgather(x[0, 1]),
                hvd.allreduce(x[0, 1], op=hvd.Sum),
                *hvd.grouped_allreduce([x, x[0] + 1], op=hvd.Max),
            )

        results = made(all_of_them)(tf.cast(x, dtype))
        base = np.arange(6).reshape(2, 3)
        expected = (
            base * (RANKS + 1).sum(),
            np.concatenate([np.repeat(base * (r + 1), r + 1, axis=0) for r in RANKS]),
            base * SIZE,
            RANKS + 1,
            (RANKS + 1).sum(),
            base * SIZE,
            base[0] * SIZE + 1,
        )
        for result, wanted in zip(results, expected, strict=True):
            assert result.dtype == dtype
            np.testing.assert_array_equal(np.asarray(result, np.float64), wanted)


def upstream(rank: int, n_rows: int) -> Any:
    """Return the gradient of rank `rank`'s loss with respect to the rows returned there."""
    return np.arange(1.0, 2 * n_rows + 1).reshape(n_rows, 2) * 10.0**rank


def gradient_of(made: Maker, operation: Callable[[Any], Any], n_mine: int, n_result: int) -> Any:
    """Return the gradient of the loss sum(operation(x) * upstream) by this rank's x."""
    x = tf.ones((n_mine, 2), tf.float64)
    scale = tf.constant(upstream(RANK, n_result))

    def one(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(operation(x) * scale)
        return tape.gradient(loss, x)

    inside = made(one)(x).numpy()
    result_of = made(operation)
    with tf.GradientTape() as tape:  # a tape around a possible graph
        tape.watch(x)
        loss = tf.reduce_sum(result_of(x) * scale)
    np.testing.assert_array_equal(tape.gradient(loss, x).numpy(), inside)
    return inside


def check_gradients_are_horovods(made: Maker) -> None:
    """The formulas are those of horovod/tensorflow/mpi_ops.py; g are the upstream gradients."""

    def g(n_rows: int) -> Any:
        return np.stack([upstream(r, n_rows) for r in RANKS])

    close = partial(np.testing.assert_allclose, rtol=1e-12)

    # allreduce: allreduce(g) with the same op and factors
    mean = gradient_of(made, hvd.allreduce, 2, 2)
    close(mean, g(2).mean(0))
    scaled = partial(hvd.allreduce, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5)
    close(gradient_of(made, scaled, 2, 2), 1.5 * g(2).sum(0))
    both = gradient_of(
        made, lambda x: tf.add_n(hvd.grouped_allreduce([x, 2 * x], average=False)), 2, 2
    )
    close(both, 3 * g(2).sum(0))

    # allgather: allreduce(g, Average), split as the inputs were; this rank's part
    n_rows = RANKS + 1
    mine = slice(n_rows[:RANK].sum(), n_rows[: RANK + 1].sum())
    average = g(n_rows.sum()).mean(0)
    close(gradient_of(made, hvd.allgather, RANK + 1, n_rows.sum()), average[mine])
    many = gradient_of(
        made, lambda x: tf.add_n(hvd.grouped_allgather([x, x])), RANK + 1, n_rows.sum()
    )
    close(many, 2 * average[mine])
    scalars = gradient_of(made, lambda x: tf.repeat(hvd.allgather(x[0, 0])[:, None], 2, 1), 1, SIZE)
    close(scalars, [[g(SIZE).mean(0)[RANK].sum(), 0]])

    # broadcast: allreduce(g, Average) on the root, zeros elsewhere
    root = SIZE - 1
    sent = gradient_of(made, partial(hvd.broadcast, root_rank=root), 2, 2)
    close(sent, g(2).mean(0) * (root == RANK))

    # alltoall: alltoall(g, splits=received splits)
    n_to = [RANK + 1 + r for r in range(SIZE)]  # rank r gets r + RANK + 1 rows
    received = sum(r + 1 + RANK for r in range(SIZE))
    back = []
    for r in range(SIZE):
        begin = sum(s + 1 + r for s in range(RANK))
        back.append(upstream(r, sum(s + 1 + r for s in range(SIZE)))[begin : begin + n_to[r]])
    splits = tf.constant(n_to)
    close(
        gradient_of(made, lambda x: hvd.alltoall(x, splits)[0], sum(n_to), received),
        np.concatenate(back),
    )
    even = gradient_of(made, hvd.alltoall, 2 * SIZE, 2 * SIZE)
    close(even, np.concatenate([one[2 * RANK : 2 * RANK + 2] for one in g(2 * SIZE)]))

    # reducescatter: allgather(g), times the number of ranks for Sum; and the factors
    n_parts = [2] * SIZE
    n_parts[0] += 1
    gathered = np.concatenate([upstream(r, n) for r, n in enumerate(n_parts)])
    n_all = len(gathered)
    for op, factor in ((hvd.Sum, SIZE), (hvd.Average, 1)):
        found = gradient_of(made, partial(hvd.reducescatter, op=op), n_all, n_parts[RANK])
        close(found, factor * gathered)
        scaled = partial(hvd.reducescatter, op=op, prescale_factor=3.0, postscale_factor=0.5)
        close(gradient_of(made, scaled, n_all, n_parts[RANK]), 1.5 * factor * gathered)
    two = gradient_of(
        made,
        lambda x: tf.add_n(hvd.grouped_reducescatter([x, x], op=hvd.Sum)),
        n_all,
        n_parts[RANK],
    )
    close(two, 2 * SIZE * gathered)

    with pytest.raises(Exception, match="op=Max has no gradient"):
        gradient_of(made, partial(hvd.allreduce, op=hvd.Max), 2, 2)


def check_gradients_in_a_group(made: Maker) -> None:
    """There the number of ranks is that of the group, in values and gradients."""
    if SIZE < 3:
        return
    members = [r for r in RANKS if r != 1]
    group = hvd.new_group(members)
    if RANK == 1:
        return
    place, n = members.index(RANK), len(members)
    g = np.stack([upstream(r, 2 * n) for r in members])

    def found(operation: Any, n_mine: int, n_result: int, **options: Any) -> Any:
        return gradient_of(made, partial(operation, group=group, **options), n_mine, n_result)

    mine = slice(2 * place, 2 * place + 2)
    close = partial(np.testing.assert_allclose, rtol=1e-12)
    close(found(hvd.allreduce, 2 * n, 2 * n), g.mean(0))
    close(found(hvd.allgather, 2, 2 * n), g.mean(0)[mine])
    close(found(hvd.broadcast, 2 * n, 2 * n, root_rank=1), g.mean(0) * (place == 1))
    close(found(hvd.alltoall, 2 * n, 2 * n), np.concatenate([one[mine] for one in g]))
    whole = np.concatenate([upstream(r, 2) for r in members])
    close(found(hvd.reducescatter, 2 * n, 2, op=hvd.Sum), n * whole)
    close(found(hvd.reducescatter, 2 * n, 2), whole)
    values = tf.fill([1, 2], tf.cast(RANK + 1, tf.float64))
    slices = tf.IndexedSlices(values, tf.constant([0]), tf.constant([3, 2]))
    total = tf.convert_to_tensor(made(partial(hvd.allreduce, group=group))(slices))
    close(total.numpy()[0], np.mean([r + 1.0 for r in members]))
    variable = tf.Variable(float(RANK))
    made(lambda: hvd.broadcast_([variable], 1, group=group))()
    assert variable.numpy() == members[1]


def check_what_is_not_linear_in_its_shapes(made: Maker) -> None:
    """Shapes unknown to a graph, no rows, sparse gradients, second derivatives."""
    anything = tf.TensorSpec(None, tf.float32)
    rows = tf.reshape(tf.range(4.0 * SIZE), [2 * SIZE, 2]) + 100.0 * RANK

    def all_of_them(x: Any) -> Any:
        return (
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allgather(x),
            hvd.broadcast(x, 0),
            hvd.alltoall(x),
            hvd.reducescatter(x, op=hvd.Sum),
        )

    function = all_of_them
    if made is tf.function:
        function = tf.function(all_of_them, input_signature=[anything])
    for x in (rows, rows[:0]):
        known = all_of_them(x)
        for result, wanted in zip(function(x), known, strict=True):
            np.testing.assert_array_equal(result, wanted)

    def of_a_few_rows(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            chosen = tf.gather(hvd.allreduce(x), [1, 1])
            cubes = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) ** 3)
            slope = tape.gradient(cubes, x)
        return tape.gradient(chosen, x), tape.gradient(slope, x)

    first, second = made(of_a_few_rows)(rows)
    expected = np.zeros((2 * SIZE, 2))
    expected[1] = 2
    np.testing.assert_allclose(first, expected, rtol=1e-6)
    total = SIZE * np.arange(4.0 * SIZE).reshape(-1, 2) + 100 * RANKS.sum()
    np.testing.assert_allclose(second, 6 * total * SIZE * SIZE, rtol=1e-5)


def check_indexed_slices(made: Maker) -> None:
    """Rows with equal indices are added, on one rank and on several; ranks may have none."""
    values = np.arange(2.0 * RANK * 3).reshape(-1, 3).astype(np.float32) + RANK
    indices = np.array([0, 1] * RANK, np.int64)
    everyone = hvd.allgather_object((values, indices))
    total = np.zeros((4, 3), np.float32)
    for each, where in everyone:
        np.add.at(total, where, each)

    def reduced(values: Any, op: Any) -> Any:
        slices = tf.IndexedSlices(values, tf.constant(indices), tf.constant([4, 3]))
        one = hvd.allreduce(slices, op=op, prescale_factor=3.0)
        two, dense = hvd.grouped_allreduce([slices, tf.constant([RANK + 1.0])], op=op)
        with tf.GradientTape() as tape:
            tape.watch(values)
            watched = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
            loss = tf.reduce_sum(hvd.allreduce(watched, op=op).values * 2.0**RANK)
        return one, two, dense, tape.gradient(loss, values)

    for op, n in ((hvd.Average, SIZE), (hvd.Sum, 1)):
        one, two, dense, slope = made(partial(reduced, op=op))(tf.constant(values))
        assert isinstance(one, tf.IndexedSlices)
        assert one.values.shape[0] == RANKS.sum() * 2
        np.testing.assert_allclose(tf.convert_to_tensor(one), 3 * total / n, rtol=1e-6)
        np.testing.assert_allclose(tf.convert_to_tensor(two), total / n, rtol=1e-6)
        np.testing.assert_allclose(dense, [(RANKS + 1).sum() / n], rtol=1e-6)
        # Two allgathers, the values divided for an average: the average of g, also divided by it.
        np.testing.assert_allclose(slope, np.full_like(values, (2.0**RANKS).mean() / n), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="IndexedSlices takes op=Average or op=Sum"):
        made(partial(reduced, op=hvd.Max))(tf.constant(values))


def check_indexed_slices_of_integers(made: Maker) -> None:
    """Sums are exact; averages are floats, as Horovod's, so that halves of equal rows add up."""
    rows_of_all = [[2**53 + 1, -3], [2**62 + 2 * RANK + 1, 7]]
    transform = hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum)._transform_of([])
    dividing = hvd.DistributedGradientTape(tf.GradientTape())._transform_of([])

    def reduced(rows: Any) -> Any:
        slices = tf.IndexedSlices(rows, tf.constant([0, RANK]), tf.constant([SIZE, 2]))
        return (
            hvd.allreduce(slices, op=hvd.Sum).values,
            transform(["table"], [slices])[0].values,
            hvd.allreduce(slices).values,
            dividing(["table"], [slices])[0].values,
            hvd.allreduce(slices, op=hvd.Sum, postscale_factor=0.5).values,
        )

    for dtype, floats in ((tf.int64, tf.float64), (tf.int32, tf.float64), (tf.int16, tf.float32)):
        rows = np.array(rows_of_all) if dtype is tf.int64 else np.array([[3, -5], [RANK, 7]])
        rows = rows.astype(dtype.as_numpy_dtype)
        everyone = np.concatenate(hvd.allgather_object(rows))
        *sums, average, of_tape, half = made(reduced)(tf.constant(rows))
        for total in sums:
            assert total.dtype is dtype
            np.testing.assert_array_equal(total, everyone)
        for mean in (average, of_tape):
            assert mean.dtype is floats
            np.testing.assert_array_equal(mean, everyone.astype(floats.as_numpy_dtype) / SIZE)
        np.testing.assert_array_equal(half, everyone.astype(floats.as_numpy_dtype) / 2)


def check_errors_are_those_of_tensorflow() -> None:
    """Scripts for Horovod catch its classes; they are ours and ValueError at the same time."""
    if SIZE == 1:
        return
    mine = tf.ones([RANK + 1, 2])
    table = tf.Variable(tf.ones([RANK + 1, 2]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table)
    for differ in (
        lambda: hvd.allreduce(mine),
        lambda: hvd.broadcast(mine, 0),
        lambda: hvd.broadcast(mine[:1], RANK),
        lambda: hvd.allgather(tf.ones([2, RANK + 1])),
        lambda: hvd.alltoall(tf.ones([SIZE, RANK + 1])),
        lambda: hvd.reducescatter(mine),
        lambda: hvd.broadcast_variables([table]),
        lambda: hvd.DistributedGradientTape(tape).gradient(loss, table),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank 1") as raised:
            differ()
        assert isinstance(raised.value, hvd.MismatchError)
        copy = pickle.loads(pickle.dumps(raised.value))
        assert isinstance(copy, hvd.MismatchError)
        assert str(copy) == str(raised.value)
    for wrong in (
        lambda: hvd.alltoall(tf.ones(SIZE + 1)),
        lambda: hvd.alltoall(tf.ones(SIZE), [SIZE + 1] * SIZE),
        lambda: hvd.broadcast(tf.ones(2), SIZE),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            wrong()
        assert isinstance(raised.value, ValueError)
    assert hvd.allreduce(float(RANK), op=hvd.Sum).numpy() == RANKS.sum()


def check_broadcast_writes_variables(made: Maker) -> None:
    root = SIZE - 1
    names = ("one", "two")
    variables = [tf.Variable([RANK + 1.0, k], name=name) for k, name in enumerate(names)]
    integer = tf.Variable(RANK, name="integer")

    def both() -> Any:
        return hvd.broadcast_(variables, root), hvd.broadcast_(integer, root_rank=root)

    values, number = made(both)()
    for k, (variable, value) in enumerate(zip(variables, values, strict=True)):
        assert variable.numpy().tolist() == value.numpy().tolist() == [SIZE, k]
    assert int(number) == int(integer) == root
    assert number.dtype == tf.int32

    for call in (hvd.broadcast_, hvd.broadcast_variables):
        with pytest.raises(TypeError, match=rf"{call.__name__} changes tf.Variables"):
            made(partial(call, [integer, tf.constant(1.0)], root))()
        with pytest.raises(TypeError, match=r"'text \(0\)'.*dtype string"):
            made(partial(call, [tf.Variable("a", name="text")], root))()
    array = np.full(3, RANK)
    assert hvd.broadcast_(array, root) is array
    assert array.tolist() == [root] * 3
    for face in (hvd, of_keras):
        with pytest.raises(RuntimeError, match=r"TensorFlow 1.*broadcast_"):
            face.broadcast_global_variables(0)
    if SIZE > 1:
        variables[0] = tf.Variable([1.0] * (2 + RANK), name="odd_one")
        with pytest.raises(Exception, match="odd_one") as raised:
            made(lambda: hvd.broadcast_(variables, root))()
        assert "MismatchError" in f"{raised.typename}: {raised.value}"


def check_signatures() -> None:
    """Editors and type checkers see every argument."""
    for face, module in ((hvd, "horo_lite.tensorflow"), (of_keras, "horo_lite.keras")):
        functions = {
            name: function
            for name, function in vars(face).items()
            if getattr(function, "__module__", "").startswith(module)
        }
        assert "DistributedOptimizer" in functions
        for name, function in functions.items():
            parameters = inspect.signature(function).parameters
            assert "self" not in parameters, name
            kinds = {parameter.kind for parameter in parameters.values()}
            assert inspect.Parameter.VAR_POSITIONAL not in kinds, name
            has_others = inspect.Parameter.VAR_KEYWORD in kinds
            assert has_others == (name == "save_model"), name  # which passes them to Keras


def check_errors_say_what_to_do() -> None:
    x = tf.constant([1.0])
    for call, words in (
        (lambda: hvd.allreduce(x, op=False), "op must be hvd.Average, hvd.Sum"),
        (lambda: hvd.allreduce(x, hvd.Sum), "average must be True or False.*use op="),
        (lambda: hvd.reducescatter(x, op=hvd.Adasum), "not Adasum"),
        (
            lambda: hvd.allreduce(x, op=hvd.Adasum, compression=hvd.Compression.fp16),
            "does not compress",
        ),
        (lambda: hvd.allreduce(x, op=hvd.Sum, average=True), "pass only op"),
        (lambda: hvd.allreduce(x, opp=hvd.Sum), r"allreduce\(\) got an unexpected .* 'opp'"),
        (lambda: hvd.DistributedOptimizer("sgd", compresion=1), r"DistributedOptimizer\(\) got"),
        (lambda: hvd.allreduce(tf.constant(1j)), "allreduce: dtype complex128 cannot be"),
        (lambda: tf.function(hvd.broadcast)(tf.constant("a")), "broadcast: dtype string cannot be"),
        (lambda: hvd.allreduce(tf.ragged.constant([[1.0]])), "RaggedTensor: call it with its flat"),
        (lambda: hvd.broadcast(tf.sparse.from_dense([1.0])), "tf.sparse.to_dense"),
        (
            lambda: tf.function(lambda x: hvd.allreduce_async(x))(x),
            r"inside tf.function.*DistributedGradientTape",
        ),
        (lambda: hvd.alltoall(x, [1.5] * SIZE), "splits must be integers, not float32"),
        (lambda: hvd.DistributedGradientTape(None), "GradientTape, and only once, but got None"),
        (lambda: hvd.alltoall(tf.ones([SIZE + 1])), f"needs a multiple of {SIZE} rows"),
    ):
        if SIZE == 1 and "multiple" in words:
            continue
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def samples(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    ids, x = rng.integers(0, 9, BATCH), rng.normal(size=(BATCH, 3)).astype(np.float32)
    return ids, x


class Net:
    """The variables of an embedding and two dense layers."""

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
    """A rank without samples does not contribute, whatever its rows contain."""
    weight = float(RANK)
    rows = tf.fill([2, 3], np.float32("nan") if weight == 0 else np.float32(SIZE))
    slices = tf.IndexedSlices(rows, tf.constant([RANK, 7]), tf.constant([9, 3]))
    transform = hvd.DistributedGradientTape(tf.GradientTape())._transform_of([])

    def averaged(values: Any) -> Any:
        own = tf.IndexedSlices(values, slices.indices, slices.dense_shape)
        return tf.convert_to_tensor(transform(["table"], [own], weight)[0])

    if SIZE == 1:
        return
    expected = np.zeros((9, 3))
    expected[1:SIZE] = SIZE * RANKS[1:, None] / RANKS.sum()
    expected[7] = SIZE
    np.testing.assert_allclose(made(averaged)(rows), expected, rtol=1e-6)


def check_a_rank_without_rows() -> None:
    """Its model did not use the table in this step, so its gradient is None there."""
    if SIZE == 1:
        return
    table, other = tf.Variable(np.ones((4, 3), np.float32)), tf.Variable([1.0])

    def averaged(looks: bool, **options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(other) * (RANK + 1)
            if looks:
                loss += tf.reduce_sum(tf.gather(table, [RANK, RANK, 3])) * (RANK + 1)
        tape = hvd.DistributedGradientTape(tape, **options)
        return tape.gradient(loss, [table, other])

    expected = np.zeros((4, 3))
    for r in RANKS[1:]:
        expected[r] += 2 * (r + 1) / SIZE
        expected[3] += (r + 1) / SIZE
    for _ in range(2):
        rows, dense = averaged(RANK > 0)
        assert isinstance(rows, tf.IndexedSlices)
        np.testing.assert_allclose(tf.convert_to_tensor(rows), expected, rtol=1e-6)
        np.testing.assert_allclose(dense, [(RANKS + 1).mean()], rtol=1e-6)
    rows, dense = averaged(False)
    assert rows is None
    rows, dense = averaged(RANK > 0, sparse_as_dense=True)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)

    # Dense on one rank, where the others have rows.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table if RANK == 0 else tf.gather(table, [0]))
    with pytest.raises(hvd.MismatchError, match="sparse_as_dense=True"):
        hvd.DistributedGradientTape(tape).gradient(loss, table)
    longer = tf.Variable(np.ones((5 if RANK == 0 else 4, 3), np.float32))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(longer, [0]))
    with pytest.raises(hvd.MismatchError, match=r"\[5, 3\], rank.* ha(s|ve) .*\[4, 3\]"):
        hvd.DistributedGradientTape(tape).gradient(loss, longer)
    assert hvd.allreduce(float(RANK), op=hvd.Sum).numpy() == RANKS.sum()


def check_embeddings_with_keras_optimizers(made: Maker) -> None:
    """Repeated rows, on a rank and among ranks, are as in one process that has all of them.

    Keras clips such rows before it adds them, so the rows themselves are part of the result.
    """
    for optimizer, as_dense in (
        (partial(keras.optimizers.SGD, 0.5, momentum=0.9), False),
        (partial(keras.optimizers.Adam, 0.1), False),
        (partial(keras.optimizers.SGD, 0.5, global_clipnorm=0.1), False),
        (partial(keras.optimizers.SGD, 0.5, global_clipnorm=0.1), True),
        (partial(keras.optimizers.SGD, 0.5, clipvalue=0.02), True),
    ):
        nets = []
        for rank in (RANK, 0):
            keras.utils.set_random_seed(rank)
            embedding = keras.layers.Embedding(5, 3)
            net = keras.Sequential([keras.Input((2,), dtype="int32"), embedding])
            net.add(keras.layers.Flatten())
            net.add(keras.layers.Dense(1))
            nets.append(net)
        together, alone = optimizer(), optimizer()
        together = hvd.DistributedOptimizer(together, sparse_as_dense=as_dense)
        for each, net in zip((together, alone), nets, strict=True):
            each.build(net.trainable_variables)

        def step(ids: Any, net: Any, optimizer: Any, dense: bool, **weight: int) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(ids) - 1.0) ** 2)
            found = tape.gradient(loss, [v.value for v in net.trainable_variables])
            assert isinstance(found[0], tf.IndexedSlices)
            if dense:
                found[0] = tf.convert_to_tensor(found[0])
            optimizer.apply(found, net.trainable_variables, **weight)

        hvd.broadcast_variables(nets[0].variables)
        ours, theirs = made(step), made(step)
        begin = sum(UNEVEN[:RANK])
        for k in range(3):
            ids = np.random.default_rng(k).integers(0, 4, (BATCH, 2)).astype(np.int32)
            mine = tf.constant(ids[begin : begin + UNEVEN[RANK]])
            ours(mine, nets[0], together, False, weight=UNEVEN[RANK])
            theirs(tf.constant(ids), nets[1], alone, as_dense)
        hvd.check_in_sync(nets[0])
        for a, b in zip(*(net.get_weights() for net in nets), strict=True):
            np.testing.assert_allclose(a, b, **CLOSE)


def check_what_a_tape_knows_lasts_for_all_steps(made: Maker) -> None:
    """A loop makes a tape in every step, and some ranks may trace a function again."""
    w = tf.Variable(np.full(3, float(RANK)), name="w")

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return hvd.DistributedGradientTape(tape).gradient(loss, [w])

    step = made(step)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for k in range(12):
            step(tf.ones(1 if k > 4 and RANK == 0 else 3, tf.float64))
    told = [str(one.message) for one in seen if issubclass(one.category, RuntimeWarning)]
    if RANK or SIZE == 1:
        assert not told, told
    else:
        same, different = told
        assert "all gradients are the same" in same
        assert "(gradients of a tape)" in same
        assert "'w (0)'" in different
        assert "after step 10" in different, different


def check_what_a_tape_knows_ends_with_its_variables() -> None:
    kept = world.group.kept.setdefault("tapes", {})
    gc.collect()
    n_kept = len(kept)
    for _ in range(3):
        x = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = x * (RANK + 1)
        hvd.DistributedGradientTape(tape).gradient(loss, [x])
        assert len(kept) == n_kept + 1
        del x, tape, loss
        gc.collect()
        assert len(kept) == n_kept


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


def check_a_tape_without_gradients(made: Maker) -> None:
    """On all ranks, and on some: they must not exchange another number of times."""
    x, y = tf.Variable([1.0], name="x"), tf.Variable([2.0], name="y")

    def found(source: Any, **weight: Any) -> Any:
        with tf.GradientTape() as tape:
            square = x**2
        return hvd.DistributedGradientTape(tape).gradient(square, [source], **weight)

    for weight in ({}, {"weight": RANK + 1}):
        assert made(partial(found, y, **weight))() == [None]
    if SIZE > 1 and made is tf.function:  # eagerly it counts as zeros
        with pytest.raises(
            tf.errors.OpError, match=r"rank 0 has only 0 parameters, rank.* 'x \(0\)'"
        ):
            made(partial(found, x if RANK else y))()
    (square,) = made(partial(found, x))()
    np.testing.assert_array_equal(square, [2.0])


def check_horovods_options_of_a_tape(made: Maker) -> None:
    """The formulas: sum(g / f) * f / N; local sources g / N, or g; the compression's two calls."""
    local, shared = tf.Variable([2.0, 3.0], name="local"), tf.Variable([1.0, 4.0], name="shared")

    class Halves:
        """Sends half of each value, and returns twice what it receives."""

        @staticmethod
        def compress(tensor: Any) -> Any:
            return tensor / 2, "context"

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            assert context == "context"
            return tensor * 2 + 1

    def found(register: bool = True, **options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(local**2) * (RANK + 1) + tf.reduce_sum(shared**2) * (RANK + 1)
        tape = hvd.DistributedGradientTape(tape, **options)
        if register:
            tape.register_local_source(local)
        return tape.gradient(loss, [local, shared], use_generic_names=True)

    own, mean = np.array([4.0, 6.0]) * (RANK + 1), np.array([2.0, 8.0]) * (RANKS + 1).mean()
    for options, mine, all_ranks in (
        ({}, own / SIZE, mean),
        ({"scale_local_gradients": False}, own, mean),
        ({"gradient_predivide_factor": 4.0}, own / SIZE, mean),
        ({"op": 1}, own / SIZE, mean * SIZE),
        ({"compression": Halves}, own / SIZE, mean + 1),
        ({"register": False}, np.array([4.0, 6.0]) * (RANKS + 1).mean(), mean),
    ):
        mine_found, shared_found = made(partial(found, **options))()
        np.testing.assert_allclose(mine_found, mine, rtol=1e-6, err_msg=str(options))
        np.testing.assert_allclose(shared_found, all_ranks, rtol=1e-6, err_msg=str(options))
    for options, words in (
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=Average"),
        ({"op": hvd.Adasum, "compression": hvd.Compression.fp16}, "does not compress"),
        ({"groups": "many"}, "groups must be a number"),
        ({"compression": 7}, "have compress"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.DistributedGradientTape(tf.GradientTape(), **options)

    layer = keras.layers.Dense(1, kernel_initializer="ones", name="kept_here")
    layer.build((None, 2))

    def partly() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.ones([1, 2])) * (RANK + 1)) + tf.reduce_sum(shared**2)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
        return tape.gradient(loss, [*layer.trainable_variables, shared])

    kernel, _, squares = made(partly)()
    np.testing.assert_allclose(kernel, np.full((2, 1), (RANK + 1) / SIZE), rtol=1e-6)
    np.testing.assert_allclose(squares, [2.0, 8.0], rtol=1e-6)

    def apart() -> Any:
        with tf.GradientTape() as tape:
            loss = (tf.reduce_sum(local**2) + tf.reduce_sum(shared**2)) * (RANK + 1)
        tape = hvd.DistributedGradientTape(tape)
        tape.register_local_source(local)
        here, everywhere = tape.get_local_and_global_gradients(loss, [shared, local])
        assert [source is local for source, _ in here] == [True]
        assert [source is shared for source, _ in everywhere] == [True]
        return here[0][1], everywhere[0][1]

    for gradient, expected in zip(made(apart)(), (own / SIZE, mean), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def adasum_of(per_rank: list[Any]) -> Any:
    """Maleki et al. (2020): (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, in pairs, then of pairs."""
    level = [np.asarray(x, np.float64) for x in per_rank]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [
            (1 - (a * b).sum() / (2 * (a * a).sum())) * a
            + (1 - (a * b).sum() / (2 * (b * b).sum())) * b
            for a, b in pairs
        ]
    return level[0]


def check_adasum(made: Maker) -> None:
    """For each tensor separately; neither this rank's own, nor the average or the sum."""
    shapes = [(7, 3), (1,), (257,)]
    rng = np.random.default_rng(11)
    data = [[rng.normal(size=s) + 0.5 for s in shapes] for _ in RANKS]
    mine = data[RANK]

    def reduced(xs: Any, **options: Any) -> Any:
        return hvd.grouped_allreduce(xs, op=hvd.Adasum, **options)

    if SIZE & (SIZE - 1):
        with pytest.raises(Exception, match="must be a power of two, not 3"):
            made(reduced)([tf.constant(x) for x in mine])
        variable = tf.Variable(mine[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Adasum)
        with pytest.raises(Exception, match="must be a power of two, not 3"):
            tape.gradient(loss, variable)
        return
    expected = [adasum_of([one[i] for one in data]) for i in range(len(shapes))]
    for dtype, close in (
        (tf.float64, {"rtol": 1e-10}),
        (tf.float32, {"rtol": 2e-5, "atol": 1e-6}),
        (tf.bfloat16, {"rtol": 0.05, "atol": 0.05}),
    ):
        scaled = partial(reduced, prescale_factor=2.0, postscale_factor=0.5)
        for call in (reduced, scaled, partial(reduced, name="three")):
            results = made(call)([tf.cast(x, dtype) for x in mine])
            for result, wanted in zip(results, expected, strict=True):
                assert result.dtype == dtype
                np.testing.assert_allclose(np.asarray(result, np.float64), wanted, **close)
            hvd.check_in_sync([(str(i), r) for i, r in enumerate(results)])
    assert hvd.allreduce(tf.constant([3.0, 4.0]), op=2).numpy().tolist() == [3, 4]  # Horovod's

    variables = [tf.Variable(np.ones(s), name=f"v{i}") for i, s in enumerate(shapes)]

    def gradients(xs: Any, **options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v * x) for v, x in zip(variables, xs, strict=True)])
        return hvd.DistributedGradientTape(tape, op=hvd.Adasum, **options).gradient(loss, variables)

    for _ in range(2):
        found = made(gradients)([tf.constant(x) for x in mine])
        for result, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-10)

    # One optimizer for all: it steps with the combined gradients, and so do all ranks.
    for wrap in (hvd.DistributedOptimizer, of_keras.DistributedOptimizer):
        variable = keras.Variable(np.ones(shapes[0]), dtype="float64", name="adasum")
        optimizer = wrap(keras.optimizers.SGD(0.5), op=hvd.Adasum)
        optimizer.build([variable])

        def step(optimizer: Any = None, variables: Any = None) -> None:
            optimizer.apply([tf.constant(mine[0])], variables)

        made(partial(step, optimizer, [variable]))()
        np.testing.assert_allclose(variable.numpy(), 1 - 0.5 * expected[0], rtol=1e-6)
    table = tf.Variable(np.ones((4, 3), np.float32))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.gather(table, [RANK, 3]))
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, table)
    dense = hvd.DistributedGradientTape(tape, op=hvd.Adasum, sparse_as_dense=True)
    rows = [np.zeros((4, 3)) for _ in RANKS]
    for r in RANKS:
        rows[r][[r, 3]] += 1
    if SIZE < 4:
        np.testing.assert_allclose(dense.gradient(loss, table), adasum_of(rows), rtol=1e-6)
    if SIZE > 1:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0])
        tape = hvd.DistributedGradientTape(tape, op=hvd.Adasum if RANK else hvd.Average)
        with pytest.raises(hvd.MismatchError, match="Adasum"):
            tape.gradient(loss, variables[0])


def check_process_sets_and_basics(made: Maker) -> None:
    """Roots are the world's numbers, and a graph's queries are evaluated when it runs."""
    assert hvd.mpi_built()
    assert hvd.gloo_built() == (find_spec("torch") is not None)
    assert not hvd.gloo_enabled()
    assert hvd.global_process_set.size() == SIZE
    assert issubclass(hvd.MismatchError, hvd.HorovodInternalError)
    numbers = made(lambda: (hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op()))
    assert [int(n) for n in numbers()] == [SIZE, RANK, hvd.local_size(), hvd.local_rank()]
    assert hvd.broadcast_object_fn(root_rank=SIZE - 1)(RANK) == SIZE - 1
    assert hvd.allgather_object({"rank": RANK}) == [{"rank": r} for r in RANKS]
    members = [r for r in RANKS if r != 1] if SIZE > 2 else [int(r) for r in RANKS]
    part = hvd.add_process_set(members)
    included = made(lambda: hvd.process_set_included_op(part.process_set_id))
    assert int(included()) == (RANK in members)
    variable = tf.Variable(float(RANK))
    if RANK in members:
        root = members[-1]

        def within() -> Any:
            x = tf.fill([len(members)], tf.cast(RANK + 1, tf.float32))
            hvd.broadcast_variables([variable], root, part)
            return (
                hvd.allreduce(x, op=hvd.Sum, process_set=part),
                hvd.allgather(x[:1], process_set=part),
                hvd.broadcast(x, root, process_set=part),
                hvd.reducescatter(x, op=hvd.Sum, process_set=part),
                hvd.alltoall(x, process_set=part),
                hvd.size_op(part.process_set_id),
            )

        total, gathered, sent, own, exchanged, n = made(within)()
        values = np.array(members) + 1.0
        assert total.numpy().tolist() == [values.sum()] * len(members)
        assert gathered.numpy().tolist() == exchanged.numpy().tolist() == values.tolist()
        assert sent.numpy().tolist() == [root + 1.0] * len(members)
        assert own.numpy().tolist() == [values.sum()]
        assert int(n) == len(members)
        assert variable.numpy() == root
        hvd.barrier(part)
        assert hvd.broadcast_object(RANK, root, process_set=part) == root

    def gradient() -> Any:
        weight = tf.ones([])
        with tf.GradientTape() as tape:
            tape.watch(weight)
            loss = weight * tf.cast(RANK + 1, tf.float32)
        return hvd.DistributedGradientTape(tape, process_set=part).gradient(loss, weight)

    mean = np.mean(np.array(members) + 1.0)
    assert float(made(gradient)()) == (mean if RANK in members else RANK + 1)
    hvd.remove_process_set(part)


def check_sync_batch_normalization(made: Maker) -> None:
    """Outputs, statistics and gradients are those of the whole, uneven batch."""
    for sizes in (UNEVEN, [BATCH, *[0] * (SIZE - 1)]):
        _normalize(made, sizes)


def _normalize(made: Maker, sizes: Sequence[int]) -> None:
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(BATCH, 4, 2)) + 5).astype(np.float32)
    scale = rng.normal(size=x.shape).astype(np.float32)
    begin = sum(sizes[:RANK])
    mine = slice(begin, begin + sizes[RANK])
    ours, alone = hvd.SyncBatchNormalization(name="norm"), keras.layers.BatchNormalization()
    for layer in (ours, alone):
        layer.build(x.shape)

    def run(layer: Any, rows: Any, factors: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            y = layer(rows, training=True)
            loss = tf.reduce_sum(y * factors)
        return y, tape.gradient(loss, [rows, layer.gamma.value])

    y, (dx, dgamma) = made(partial(run, ours))(tf.constant(x[mine]), tf.constant(scale[mine]))
    whole, (dx_whole, dgamma_whole) = run(alone, tf.constant(x), tf.constant(scale))
    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    close(y, whole[mine])
    close(dx, dx_whole[mine])
    close(hvd.allreduce(dgamma, op=hvd.Sum), dgamma_whole)
    for a, b in zip(ours.get_weights(), alone.get_weights(), strict=True):
        close(a, b)


def check_copies_of_sync_batch_normalization() -> None:
    """They have the statistics of the same ranks."""
    part = hvd.add_process_set(sorted({0, SIZE - 1}))
    custom = {"SyncBatchNormalization": hvd.SyncBatchNormalization}
    for ranks in (part, hvd.global_process_set):
        layer = hvd.SyncBatchNormalization(process_set=ranks, momentum=0.0)
        model = keras.Sequential([keras.Input((1,)), layer])
        with tempfile.TemporaryDirectory() as folder:
            model.save(Path(folder) / "model.keras")
            loaded = keras.models.load_model(Path(folder) / "model.keras", custom_objects=custom)
        if RANK not in ranks.ranks:
            continue
        for each in (model, keras.models.clone_model(model), loaded):
            each(np.full((2, 1), float(ranks.rank())), training=True)
            assert each.get_weights()[2] == (ranks.size() - 1) / 2
    hvd.remove_process_set(part)
    config = hvd.SyncBatchNormalization(process_set=hvd.ProcessSet([0, SIZE])).get_config()
    with pytest.raises(ValueError, match="is not registered"):
        hvd.SyncBatchNormalization.from_config(config)(np.ones((2, 1)), training=True)


def check_elastic_states() -> None:
    variable = tf.Variable([1.0 + RANK])
    state = hvd.elastic.TensorFlowState([variable], batch=RANK)
    state.sync()
    assert (variable.numpy().tolist(), state.batch) == ([1.0], 0)
    variable.assign([7.0])
    state.batch = 3
    state.restore()
    assert (variable.numpy().tolist(), state.batch) == ([1.0], 0)
    assert hvd.elastic.TensorFlowKerasState is of_keras.elastic.KerasState


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


def check_a_rank_that_traces_anew() -> None:
    """As where only its share of the last batch has another size than before."""
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * tf.reduce_sum(x)
        return hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variable)

    for first in (2, 3, 2):
        n_rows = first if RANK == 0 else 2
        total = first + 2.0 * (SIZE - 1)
        np.testing.assert_array_equal(step(tf.ones(n_rows)), [total, total])


def check_order_inside_a_graph() -> None:
    """Operations run in the order of the program, though they do not depend on each other."""

    @tf.function
    def many(x: Any) -> Any:
        return [hvd.allreduce(x + k, op=hvd.Sum, name=f"number {k}") for k in range(20)]

    for _ in range(5):
        for k, result in enumerate(many(tf.constant(float(RANK)))):
            assert result == RANKS.sum() + k * SIZE


def check_a_graph_does_not_see_its_tensors_change() -> None:
    """Results are new tensors, even if their inputs seem to be unused otherwise."""

    @tf.function
    def before_and_after(x: Any) -> Any:
        doubled = x * 2
        averaged = hvd.allreduce(doubled)
        transform = hvd.DistributedGradientTape(tf.GradientTape())._transform_of([])
        return doubled, averaged, transform(["x"], [doubled])[0]

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


EVERY = [name for name in globals() if name.startswith("check_")]
for name in sys.argv[1:] or EVERY:
    check = globals()[name]
    takes = check.__code__.co_argcount
    for made in (lambda f: f, tf.function)[: 1 + takes]:
        check(made) if takes else check()
    if RANK == 0:
        print(f"{SIZE} ranks: {name}", flush=True)
