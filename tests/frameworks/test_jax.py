"""JAX and optax: eagerly and inside jit, through XLA's own calls and through callbacks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from digits_runs import accuracy_of
from launch import Result, mpi_name, run_ranks
from worlds import script_on_ranks
from xla_variables import compilation

pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]

CSRC = Path(__file__).resolve().parents[2] / "csrc"

START = """
import hashlib
import jax, jax.numpy as jnp, numpy as np, optax
import horo_lite.jax as hvd

world = hvd.init()
rank, size = world.rank, world.size

def check_alike(tree):
    bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)))
    assert len(set(hvd.allgather_object(bits.hexdigest()))) == 1

def raised(call):
    try:
        jax.block_until_ready(call())
    except Exception as error:
        return error
    raise SystemExit("nothing was raised")
"""

WAYS = pytest.mark.parametrize("way", ["xla", "callback"])


def ranks(
    code: str,
    np: int,
    way: str = "xla",
    *,
    hosts: str = "",
    optimized: bool = False,
    xla_flags: str = "",
) -> Result:
    code = f"{START}\nassert hvd.inside_jit() == {way!r}\n{code}\nprint('done', rank)\n"
    env = {"HORO_LITE_INSIDE_JIT": way, "HORO_LITE_TEST_HOSTS": hosts, "HORO_LITE_THREADS": "1"}
    job_env = compilation(xla_flags, optimized=optimized)
    return script_on_ranks(code, np, env=env, job_env=job_env, timeout_s=180)


TRAIN = """
rng = np.random.default_rng(0)
sizes = [7 + 4 * r for r in range(size)]
x = rng.standard_normal((sum(sizes), 6), np.float32)
y = np.sin(x.sum(1, keepdims=True))
n_mine = sizes[rank]
mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

def new_params(seed):
    draw = np.random.default_rng(100 + seed).standard_normal
    hidden = {"w": draw((6, 16), np.float32) / 3, "b": np.zeros(16, np.float32)}
    out = (draw((16, 1), np.float32) / 4, None)
    return jax.tree.map(jnp.asarray, {"hidden": hidden, "out": out, "scale": np.float32(1.0)})

def loss_of(params, x, y):
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return (((h @ params["out"][0]) * params["scale"] - y) ** 2).mean()

def train(tx, params, x, y, compiled=True, steps=8, **options):
    def step(params, state, options):
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(gradients, state, params, **options)
        return optax.apply_updates(params, updates), state, loss

    if compiled:
        step = jax.jit(step, donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, params), tx.init(params)
    for _ in range(steps):
        params, state, loss = step(params, state, options)
    return jax.block_until_ready(params)

# The last rank's values, which no other rank has.
mine_before, wanted = new_params(rank), new_params(size - 1)
params = hvd.broadcast_parameters(mine_before, root_rank=size - 1)
assert params["out"][1] is None
jax.tree.map(np.testing.assert_array_equal, params, wanted)
before, after = (np.asarray(tree["hidden"]["w"]) for tree in (mine_before, params))
assert rank == size - 1 or (before != after).all()

def close(mine, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), mine, other)
"""


@pytest.mark.shows("eager", "jit", "fp16")
@pytest.mark.parametrize(("np", "way"), [(2, "xla"), (3, "callback")])
def test_training_is_that_of_one_process_on_the_whole_batch(np: int, way: str) -> None:
    ranks(
        TRAIN
        + """
# Float32 sums in another order: a batch's mean of shards' means, eight steps long.
momentum = lambda: optax.sgd(0.1, momentum=0.9)
alone = train(momentum(), params, x, y)
for compiled in (True, False):
    weight = jnp.float32(n_mine) if compiled else n_mine  # traced, and not
    tx = hvd.DistributedOptimizer(momentum())
    together = train(tx, params, x[mine], y[mine], compiled, weight=weight)
    check_alike(together)
    close(together, alone, rtol=1e-5, atol=1e-6)
assert raised(lambda: close(train(momentum(), params, x[mine], y[mine]), alone, atol=1e-3))

# Adam may divide by small numbers, which magnifies differences.
tx = hvd.DistributedOptimizer(optax.adam(1e-2))
together = train(tx, params, x[mine], y[mine], weight=jnp.float32(n_mine))
check_alike(together)
close(together, train(optax.adam(1e-2), params, x, y), atol=1e-4)

# Under chain and MultiSteps; extra arguments arrive, and weight= is ours.
def make(inner):
    seen = lambda updates, state, params, *, value, **extra: (updates, state._replace(n=value))
    State = __import__("typing").NamedTuple("State", [("n", float)])
    last = optax.GradientTransformationExtraArgs(lambda params: State(jnp.float32(0)), seen)
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2), last)
    return optax.MultiSteps(inner(chain), 2).gradient_transformation()

together = train(
    make(hvd.DistributedOptimizer), params, x[mine], y[mine], weight=n_mine, value=jnp.float32(3)
)
check_alike(together)
close(together, train(make(lambda tx: tx), params, x, y, value=jnp.float32(3)), atol=1e-4)

# Two bytes per number: close, equal on all ranks, and not the same.
tx = hvd.DistributedOptimizer(momentum(), compression=hvd.Compression.fp16)
for compiled in (True, False):
    together = train(tx, params, x[mine], y[mine], compiled, weight=float(n_mine))
    check_alike(together)
    close(together, alone, atol=2e-3)
    assert (np.asarray(together["hidden"]["w"]) != np.asarray(alone["hidden"]["w"])).any()
tiny = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, compression=hvd.Compression.fp16))(
    jnp.float32([1e-9, 3e-9]) * (rank + 1)
)
assert np.allclose(tiny, np.float32([1e-9, 3e-9]) * sum(range(1, size + 1)), rtol=1e-3)

import warnings

# Ranks with the same gradients are told so at the first exchange, of these gradients.
for compiled in (True, False):
    average = jax.jit(hvd.average_gradients) if compiled else hvd.average_gradients
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for who, value in (("own", rank + 1.0), ("same", 5.0), ("same", 6.0)):
            jax.block_until_ready(average({f"{who} {compiled}": jnp.full(3, value)}))
    texts = [str(one.message) for one in caught if "all gradients are the same" in str(one.message)]
    assert len(texts) == (rank == 0), texts

import os, pathlib, tempfile
from horo_lite.launch.compare import Comparison, read
from horo_lite.training import step_record

# The record of the steps shows averages; each rank's own would differ.
def recorded(x, y, compiled, **options):
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HORO_LITE_RECORD_STEPS"] = path = folder + "/steps"
        tx = hvd.DistributedOptimizer(optax.sgd(0.1), **options)
        train(tx, params, x, y, compiled, steps=3, weight=float(len(x)))
        del os.environ["HORO_LITE_RECORD_STEPS"]
        step_record._writer.close()
        return read(pathlib.Path(path)).steps["gradients"] if rank == 0 else None

first = hvd.new_group([0])
for compiled in (True, False):
    together = recorded(x[mine], y[mine], compiled)
    if rank == 0:
        alone = recorded(x, y, True, group=first)
        own = recorded(x[mine], y[mine], True, group=first)
        assert len(alone) == 3 and len(alone[0].gradients.names) == 4
        shows = not compiled or hvd.inside_jit() == "xla"
        assert [len(step.parameters.names) for step in together] == [4 * shows] * 3
        assert Comparison(alone, together, 1e-4).is_same
        assert Comparison(alone, own, 1e-4).finding.step == 1
    hvd.barrier()

import horo_lite

# How much of the averages is noise, which no rank knows by itself.
os.environ["HORO_LITE_NOISE_EVERY"] = "2"
for compiled in (True, False):
    average = jax.jit(hvd.average_gradients) if compiled else hvd.average_gradients
    for step in range(4):
        jax.block_until_ready(average({f"noise {compiled}": jnp.array([1.0 + rank, 2.0])}))
del os.environ["HORO_LITE_NOISE_EVERY"]
numbers = np.arange(1, size + 1)
expected = numbers.var() / (size - 1) / (numbers.mean() ** 2 + 4)
measured = [(noise.steps, noise.share()) for noise in horo_lite.gradient_noise()]
assert len(measured) == 2 and all(steps == [2, 4] for steps, _ in measured), measured
assert np.allclose([share for _, share in measured], expected, rtol=1e-4), (measured, expected)
""",
        np,
        way,
    )


def test_what_optax_is_told_about_the_loss_is_about_all_ranks_samples() -> None:
    """A Polyak step, a line search, second derivatives, and steps that evaluate the loss again."""
    ranks(
        TRAIN
        + """
# What optax calls the loss, its gradients and functions that return them are those of all ranks.
def search(tx, x, y, *names, **options):
    def loss_of(p, i=0, scale=1.0):
        return scale * ((jnp.tanh(x @ p["w"]) - y[:, 0]) ** 2).mean()

    gradients_of = jax.grad(loss_of)

    @jax.jit
    def step(p, state):
        value, grad = jax.value_and_grad(loss_of)(p)
        known = dict(value=value, grad=grad, value_fn=loss_of, obj_fn=loss_of, grad_fn=gradients_of)
        known |= dict(scale=jnp.float32(1.0), other=jax.tree.map(jnp.copy, grad))
        told = {name.split("=")[0]: known[name.split("=")[-1]] for name in names}
        updates, state = tx.update(grad, state, p, **told, **options)
        return optax.apply_updates(p, updates), state

    p = {"w": jnp.linspace(-0.1, 0.3, 6)}
    state = tx.init(p)
    for _ in range(3):
        p, state = step(p, state)
    return jax.block_until_ready(p)

def again(updates, state, p, *, grad, value_fn):
    value, gradient = jax.value_and_grad(value_fn)(p)
    return jax.tree.map(lambda a, b: -value * (a + b), grad, gradient), state

again = optax.GradientTransformationExtraArgs(optax.identity().init, again)
line_search = optax.scale_by_backtracking_linesearch(9)
for tx, *names in (
    (optax.chain(optax.scale(-9.0), line_search), "value", "grad", "value_fn", "scale"),
    (again, "value_fn", "grad"),
    (again, "value_fn", "grad=other"),
    (optax.contrib.hutchinson_estimator_diag_hessian(), "obj_fn"),
    (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.2), opaque_mode=True), "grad_fn"),
):
    wrapped = hvd.DistributedOptimizer(tx)
    together = search(wrapped, x[mine], y[mine], *names, weight=n_mine)
    check_alike(together)
    if rank == 0:
        close(together, search(tx, x, y, *names), rtol=1e-5, atol=1e-6)
# Without weights; and a rank without samples, whose means are NaN.
tx, n = optax.polyak_sgd(), min(sizes)
wrapped = hvd.DistributedOptimizer(tx)
some = np.concatenate([np.arange(n) + sum(sizes[:r]) for r in range(size)])
together = search(wrapped, x[mine][:n], y[mine][:n], "value")
close(together, search(tx, x[some], y[some], "value"), rtol=1e-5, atol=1e-6)
n_mine_now = n_mine * (rank > 0)
together = search(wrapped, x[mine][:n_mine_now], y[mine][:n_mine_now], "value", weight=n_mine_now)
close(together, search(tx, x[sizes[0]:], y[sizes[0]:], "value"), rtol=1e-5, atol=1e-6)

# Gradients of single samples are clipped, and added up, before they are averaged.
def private(inner, x, y):
    clip = optax.contrib.differentially_private_aggregate(0.1, 0.0, key=jax.random.key(rank))
    tx = optax.chain(clip, inner(optax.sgd(1.0)))
    each = jax.vmap(jax.grad(loss_of), (None, 0, 0))

    @jax.jit
    def updates(params):
        return tx.update(each(params, x[:, None], y[:, None]), tx.init(params), params)[0]

    return updates(params)

together = private(hvd.DistributedOptimizer, x[mine][:n], y[mine][:n])
close(together, private(lambda tx: tx, x[some], y[some]), rtol=1e-5, atol=1e-6)
tx = hvd.DistributedOptimizer(optax.sgd(1.0))
twice = jax.tree.map(lambda p: jnp.stack([p, p]), params)
error = raised(lambda: tx.update(twice, tx.init(params), params))
assert "gradient of 'hidden.b' has the shape (2, 16), and the parameter (16,)" in str(error), error
""",
        2,
    )


PARAMETERS = """
import os, warnings

def new_params(seed):
    return {
        "w": jax.random.normal(jax.random.key(seed), (3, 2)),
        "b": jnp.zeros(2, jnp.bfloat16),
        "own": jnp.full(2, rank),  # these are not trained
        "n": jnp.int32(rank),
        "key": jax.random.key(rank),
        "none": None,
    }

def train(compiled, n_steps, at=None, seed=0, by_scan=False, shown=True):
    \"""Return rank 0's warnings; before step `at`, rank 1's parameters change.\"""
    tx = hvd.DistributedOptimizer(optax.sgd(0.0))
    params = new_params(seed)
    def step(params, x):
        gradients = jax.tree.map(lambda p: (0 * p + x.mean()).astype(p.dtype), pick(params))
        updates, _ = tx.update(gradients, tx.init(gradients), params if shown else None)
        return params | optax.apply_updates(pick(params), updates), None
    if compiled:
        step = jax.jit(step, donate_argnums=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if by_scan:
            params, _ = jax.lax.scan(step, params, jnp.full((n_steps, 1), rank + 1.0))
        for i in range(0 if by_scan else n_steps):
            if i == at and rank == 1:
                params["w"] = params["w"].at[1, 1].add(0.5)
            params, _ = step(params, jnp.full(1, rank + 1.0 + i))
        jax.block_until_ready(params)
    hvd.join()  # counting begins anew
    assert all(one.filename == __file__ for one in caught), caught[0]
    return [str(one.message) for one in caught if "the replicas differ" in str(one.message)]

def pick(params):
    return {"w": params["w"], "b": params["b"]}

def told(*texts):
    return lambda found: len(found) == len(texts) * (rank == 0) and all(
        text in one for text, one in zip(texts, found)
    )
"""


@WAYS
def test_parameters_are_compared_with_those_of_the_other_ranks(way: str) -> None:
    """Those that update() receives: at first, from time to time, or as often as is asked for."""
    ranks(
        PARAMETERS
        + f"""
known = {way == "xla"}
def ask(n):
    os.environ["HORO_LITE_CHECK_EVERY"] = n
for compiled in (True, False):
    shows = known or not compiled
    assert train(compiled, 11) == [] and train(compiled, 11, by_scan=True) == []
    assert train(compiled, 10, at=3) == [] and train(compiled, 12, at=3, shown=False) == []
    found = train(compiled, 12, at=3)
    after = "after step 10: 1 of 2 arrays, first 'w' (float32[3, 2]). Rank 1 differs from ranks "
    assert told(*[after] * shows)(found), found
    found = train(compiled, 2, seed=rank)
    assert told(*["before the exchange of gradients"] * shows)(found), found
    ask("0")
    assert train(compiled, 12, seed=rank) == []
    ask("3")
    assert train(compiled, 3, at=2) == []
    if shows:
        error = raised(lambda: train(compiled, 5, at=3))
        error = hvd.cause_of(error) if compiled else error
        assert type(error).__name__ == "DriftError" and "after step 3: 1 of 2" in str(error), error
        hvd.join()
    del os.environ["HORO_LITE_CHECK_EVERY"]

# Not those of cases, and derivatives of a step are those without comparisons.
tx = hvd.DistributedOptimizer(optax.sgd(1.0))
def after(p, x):
    gradient = {{"w": p["w"] * 0 + x * (rank + 1)}}
    return optax.apply_updates(p, tx.update(gradient, tx.init(p), p)[0])["w"].sum()
p, mean = {{"w": jnp.ones(4)}}, sum(range(1, size + 1)) / size
for f in (after, jax.jit(after)):
    assert f(p, 1.0) == 4 - 4 * mean
    cases = jax.vmap(f, in_axes=({{"w": 0}}, None))({{"w": jnp.ones((2, 4))}}, 1.0)
    assert (cases == 4 - 4 * mean).all()
    assert (jax.grad(f)(p, 1.0)["w"] == 1).all()
""",
        3,
        way,
    )


@pytest.mark.shows("in place")
def test_gradients_stay_where_xla_put_them() -> None:
    ranks(
        TRAIN
        + """
from horo_lite import _native
from horo_lite.collectives import arrays
from horo_lite.jax import primitive

seen = []

def look(number, inputs, results):
    at = [[np.frombuffer(view, np.uint8).ctypes.data for view in vs] for vs in (inputs, results)]
    copied = arrays.bytes_copied
    error = primitive._run(number, inputs, results)
    seen.append((*at, arrays.bytes_copied - copied))
    return error

_native.xla_handler(look, (0, 3))
weight = jnp.float32(n_mine)
tx = hvd.DistributedOptimizer(optax.sgd(0.1))
together = train(tx, params, x[mine], y[mine], steps=3, weight=weight)
check_alike(together)
alone = train(optax.sgd(0.1), params, x, y, steps=3)
close(together, alone, rtol=1e-5, atol=1e-6)  # also with all of XLA's optimizations
assert len(seen) == 3
for inputs, results, copied in seen:
    gradients = inputs[:4]  # and the weight, and the parameters
    assert len(inputs) == 9 and gradients == results and copied == 0
_native.xla_handler(primitive._run, (0, 3))
assert _native.xla_handler(primitive._run, (0, 99)) is not None  # it adds to what there was
assert _native.xla_handler(primitive._run, (1, 3)) is None
""",
        2,
        optimized=True,
    )


def test_results_outside_jit_use_memory_again_but_none_that_is_referred_to() -> None:
    ranks(
        """
import resource
import horo_lite
from horo_lite.adapters.jax import MEMORY

shapes = [(300, 1000), (7, 5), (1 << 20,), ()]
average = (size - 1) / 2

def reduced(step, call=hvd.grouped_allreduce):
    return call([jnp.full(shape, 10.0 * step + rank, jnp.float32) for shape in shapes])

def check(results, step):
    assert all((np.asarray(x) == 10 * step + average).all() for x in results), step

def place(x):
    return x.unsafe_buffer_pointer()

# Results that are freed before the next call, then those of a loop that keeps the last ones.
places, faults = [], []
for step in range(20):
    results = None
    results = reduced(step)
    check(results, step)
    places.append({place(x) for x in results if x.nbytes > 1 << 16})
assert len(set.union(*places)) == 2, places
for step in range(20):
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    results = reduced(step)
    check(results, step)
    places.append({place(x) for x in results if x.nbytes > 1 << 16})
assert len(set.union(*places)) == 4, places
sizes = [x.nbytes for x in results if x.nbytes > 1 << 16]
assert sum(MEMORY.bytes) <= 2 * sum(sizes) + 256, MEMORY.bytes

# Referenced memory is not reused: results, NumPy's views of freed ones, what a compiled function
# has received, also by donation, and what it returns unchanged.
kept = [reduced(0), reduced(1, horo_lite.grouped_allreduce)]
views = [np.asarray(x)[..., 3:] if x.ndim else np.asarray(x) for x in reduced(2)]
same = jax.jit(lambda xs: xs)(reduced(3))
doubled = jax.jit(lambda xs: [2 * x for x in xs], donate_argnums=0)(reduced(4.5))
parts = jax.jit(lambda xs: [x[..., :2] if x.ndim else x for x in xs])(reduced(5))
single = hvd.allreduce(jnp.full((1 << 16,), 60.0 + rank, jnp.float32))
later = horo_lite.allreduce_async(jnp.full((1 << 16,), 70.0 + rank, jnp.bfloat16))
deleted = jnp.full((1 << 16,), 80.0 + rank)
result_of_deleted = horo_lite.allreduce_async(deleted)
deleted.delete()
for step in range(20, 30):
    check(reduced(step), step)
    check([hvd.allreduce(jnp.full((1 << 16,), 10.0 * step + rank, jnp.float32))], step)
check(kept[0], 0)
check(kept[1], 1)
check(views, 2)
check(same, 3)
assert all((np.asarray(x) == 90 + 2 * average).all() for x in doubled)
check(parts, 5)
check([single], 6)
later = horo_lite.synchronize(later)
assert later.dtype == jnp.bfloat16 and (later == 70 + average).all()
assert (horo_lite.synchronize(result_of_deleted) == 80 + average).all()

# The end of the world frees the memory kept for its next results.
del kept, views, same, doubled, parts, single, later, results
assert MEMORY.bytes[1]
hvd.shutdown()
assert MEMORY.bytes[1] == 0, MEMORY.bytes
""",
        2,
    )


@pytest.mark.parametrize(("np", "way", "hosts"), [(3, "xla", "2,1"), (2, "callback", "")])
def test_every_operation(np: int, way: str, hosts: str) -> None:
    ranks(
        """
import pickle

def both(f, *xs):
    eager, compiled = f(*xs), jax.jit(f)(*xs)
    assert isinstance(eager, jax.Array) and eager.dtype == compiled.dtype
    np.testing.assert_array_equal(eager, compiled)
    return np.asarray(compiled)

# JAX keeps the first float32 that it sees, here NumPy's for an array that was sent.
received = jnp.asarray(pickle.loads(pickle.dumps(np.float32([rank, 2]))))
assert both(hvd.allreduce, received).tolist() == [(size - 1) / 2, 2]

rows = jnp.arange(2.0 * size * 3).reshape(2 * size, 3) + 100 * rank
whole = np.stack([np.arange(6.0 * size).reshape(2 * size, 3) + 100 * r for r in range(size)])
assert (both(hvd.allreduce, rows) == whole.mean(0)).all()
assert (both(lambda x: hvd.allreduce(x, hvd.Max), rows) == whole[-1]).all()
scaled = lambda x: hvd.allreduce(x, hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
assert (both(scaled, rows) == whole.sum(0)).all()
assert (both(hvd.allgather, rows) == whole.reshape(-1, 3)).all()
assert (both(lambda x: hvd.broadcast(x, 1), rows) == whole[1]).all()
assert (both(hvd.reducescatter, rows) == whole.mean(0)[2 * rank : 2 * rank + 2]).all()
parts = np.concatenate([one[2 * rank : 2 * rank + 2] for one in whole])
assert (both(hvd.alltoall, rows) == parts).all()
assert (both(hvd.allgather, jnp.float32(rank)) == np.arange(size)).all()
assert both(hvd.allreduce, jnp.zeros((0, 2))).shape == (0, 2)
for dtype in (jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.int8):
    assert (both(lambda x: hvd.allreduce(x, hvd.Sum), jnp.full(3, rank + 1, dtype)) ==
            size * (size + 1) // 2).all()
assert both(lambda x: hvd.allreduce(x, hvd.Max), jnp.array([rank == 1, False])).tolist() == [
    True, False]

# Trees, with leaves that are not arrays, or not JAX's arrays.
tree = {"a": [rows, None], "b": (jnp.int32(rank), print)}
total = hvd.grouped_allreduce(tree, hvd.Sum)
assert total["b"][1] is print and total["b"][0] == sum(range(size)) and total["a"][1] is None
assert hvd.allreduce(1.5 * rank) == 1.5 * (size - 1) / 2
squares = lambda: hvd.allreduce(rank**2)  # a number, unlike an integer array, is not truncated
assert np.allclose([squares(), jax.jit(squares)()], np.mean(np.arange(size) ** 2))
for f in (lambda x: hvd.allreduce(x, hvd.Sum), lambda x: hvd.broadcast(x * size, 1)):
    # Nor does a number determine the dtype of a sum.
    assert (both(lambda x: f(x) + jnp.ones(2, jnp.bfloat16), 1.5) == 1.5 * size + 1).all()
slope = jax.grad(lambda x: (hvd.allreduce(x, hvd.Sum) * jnp.ones(2, jnp.bfloat16)).sum())
assert jax.jit(slope)(1.5) == 2 * size
assert type(hvd.allreduce(np.ones(2) * rank)) is np.ndarray
ragged = hvd.allgather(jnp.full((rank + 1, 2), rank))
assert ragged[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
received, counts = hvd.alltoall(jnp.arange(float(size)), splits=[0] * (size - 1) + [size])
assert counts.tolist() == [size * (rank == size - 1)] * size and len(received) == counts.sum()
state = hvd.broadcast_parameters(
    {"key": jax.random.key(rank), "steps": rank, "on": rank == 1, "f": print}, root_rank=1
)
assert state["steps"] == 1 and state["on"] is True and state["f"] is print
import horo_lite
generic = horo_lite.broadcast_parameters({"key": jax.random.key(rank)}, root_rank=1)
for key in state["key"], generic["key"]:
    assert (jax.random.bits(key) == jax.random.bits(jax.random.key(1))).all()

# Every rank contributes by its weight, which is traced here.
weighted = jax.jit(lambda x, w: hvd.average_gradients(x, weight=w))
mean = sum(r * whole[r] for r in range(size)) / sum(range(size))
nothing = rows * (jnp.nan if rank == 0 else 1)  # its weight is 0, so the values do not matter
np.testing.assert_allclose(weighted(nothing, float(rank)), mean, rtol=1e-6)
assert "(0 or more), not -1" in str(raised(lambda: weighted(rows, -1.0)))
assert "with op=Sum" in str(raised(lambda: hvd.average_gradients(rows, op=hvd.Sum, weight=1)))

# Loops, branches and batches.
def body(x, i):
    x = hvd.allreduce(x + i * (rank + 1), hvd.Sum)
    return x, hvd.broadcast(x[0, 0] + rank, 1)
last, each = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(3.0)))(rows)
expected, kept = rows, []
for i in range(3):
    expected, one = body(expected, float(i))
    kept.append(one)
assert (last == expected).all() and each.tolist() == [float(one) for one in kept]
branch = jax.jit(lambda x, n: jax.lax.cond(n > 0, hvd.allreduce, lambda x: x, x))
assert (branch(rows, 1) == whole.mean(0)).all() and (branch(rows, 0) == rows).all()
assert "complex64" in str(raised(lambda: jax.jit(hvd.grouped_allreduce)({"z": 1j * rows})))
mixed = {"z": jnp.complex64([rank + 1j]), "n": float(rank), "i": rank}
for average in (hvd.average_gradients, horo_lite.average_gradients):
    for averages in (average(mixed), average(mixed)):  # the first ones are compared
        mean = (size - 1) / 2
        assert averages["z"] == mean + 1j and averages["n"] == averages["i"] == mean
    keys = {"key": jax.random.key(rank)}  # sums of their bits would be other keys
    assert "cannot be reduced" in str(raised(lambda: average(keys)))
assert "horo_lite.jax" in str(raised(lambda: jax.jit(horo_lite.allreduce)(rows)))
assert (jax.jit(horo_lite.average_gradients)({"a": rows})["a"] == whole.mean(0)).all()
assert (both(jax.vmap(hvd.allreduce, in_axes=1, out_axes=1), rows) == whole.mean(0)).all()
assert "vmap" in str(raised(lambda: jax.vmap(hvd.allgather)(rows)))

# Derivatives: the transposed operation on the cotangents, as if the ranks' losses were added.
def cotangent(f, c):
    g = lambda x: (f(x) * c).sum()
    return both(jax.grad(g), rows)
mine = jnp.arange(rows.size, dtype=float).reshape(rows.shape) * (rank + 1)
all_of = lambda c: np.stack([np.asarray(c) / (rank + 1) * (r + 1) for r in range(size)])
assert (cotangent(hvd.allreduce, mine) == all_of(mine).mean(0)).all()
assert (cotangent(lambda x: hvd.allreduce(x, hvd.Sum), mine) == all_of(mine).sum(0)).all()
expected = all_of(mine).sum(0) * (rank == 1)
assert (cotangent(lambda x: hvd.broadcast(x, 1), mine) == expected).all()
long = jnp.arange(rows.size * size, dtype=float).reshape(-1, 3) * (rank + 1)
expected = all_of(long).sum(0)[2 * size * rank : 2 * size * (rank + 1)]
assert (cotangent(hvd.allgather, long) == expected).all()
expected = np.zeros_like(mine)
for r in range(size):
    expected[2 * r : 2 * r + 2] = all_of(mine[2 * r : 2 * r + 2])[r] / size
c = mine[2 * rank : 2 * rank + 2]
np.testing.assert_allclose(cotangent(hvd.reducescatter, c), expected, rtol=1e-6)
back = np.concatenate([all_of(mine)[r][2 * rank : 2 * rank + 2] for r in range(size)])
assert (cotangent(hvd.alltoall, mine) == back).all()
assert "Max" in str(raised(lambda: jax.grad(lambda x: hvd.allreduce(x, hvd.Max).sum())(rows)))
loop = lambda x: jax.lax.scan(lambda c, i: (hvd.allreduce(c * i), None), x, jnp.ones(3) * 2)[0]
assert (both(jax.grad(lambda x: (loop(x) * mine).sum()), rows) == 8 * all_of(mine).mean(0)).all()
""",
        np,
        way,
        hosts=hosts,
    )


def test_what_is_traced_means_the_same_on_all_ranks_or_is_an_error() -> None:
    ranks(
        """
x = jnp.arange(3.0) + 10 * rank
total = 2 * np.arange(3.0) + 10

# A rank that retraces a function makes no calls that the others do not: not for constants either.
mine = np.float32(rank + 1)
function = jax.jit(lambda x: x * 0 + hvd.allreduce(mine, hvd.Sum))
assert (function(x) == 3).all()
assert (function(jnp.ones(2) if rank else x) == 3).all()
assert hvd.allreduce(mine, hvd.Sum) == 3
assert jax.lax.scan(lambda n, _: (n + hvd.allreduce(mine, hvd.Sum), None), 0.0, length=2)[0] == 6
assert type(hvd.allreduce(mine, hvd.Sum)) is type(mine)

# What was a Python number still gives way to other dtypes.
half, weak = jnp.ones(3, jnp.bfloat16), jnp.full(3, 2.0)
for function in (hvd.allreduce, hvd.broadcast, lambda x: hvd.broadcast_parameters({"x": x})["x"]):
    assert (function(jnp.asarray(2.0)) * half).dtype == (function(weak) * half).dtype == half.dtype
    assert (function(weak * jnp.float32(1)) * half).dtype == jnp.float32
assert (jax.grad(lambda x: (x * hvd.allreduce(mine, hvd.Sum)).sum())(x) == 3).all()

# Calls without a derivative have none in forward mode either, and can be auxiliary outputs.
greatest = lambda x: hvd.allreduce(x, hvd.Max)
weighted = lambda x: hvd.average_gradients(x, weight=rank + 1.0)
for f in (greatest, weighted):
    for derivative in (
        lambda x: jax.jvp(f, (x,), (x,))[1],
        jax.jit(jax.jacfwd(f)),
        jax.jit(jax.grad(lambda x: f(x).sum())),
        lambda x: jax.linear_transpose(f, x)(x),
    ):
        assert "has no gradient" in str(raised(lambda: derivative(x)))
for f in (jax.jit, lambda f: f):
    gradient, seen = f(jax.grad(lambda x: ((x**2).sum(), greatest(x)), has_aux=True))(x)
    assert (gradient == 2 * x).all() and (seen == np.arange(3.0) + 10).all()

# Integers beside differentiated values.
counted = lambda x: hvd.grouped_allreduce({"n": jnp.int32(rank), "x": x}, hvd.Sum)["x"] ** 2
assert (jax.jit(jax.grad(lambda x: counted(x).sum()))(x) == 2 * 2 * total).all()

# The batch axes of vmap differ by rank.
square = jnp.arange(9.0).reshape(3, 3)
given = square.T if rank else square
sums = jax.vmap(lambda x: hvd.allreduce(x, hvd.Sum), in_axes=rank, out_axes=0)
assert (jax.jit(sums)(given) == 2 * square).all()
alike = jax.vmap(weighted)(given.T if rank else given)
np.testing.assert_allclose(alike, square, rtol=1e-6)
each = jax.vmap(lambda x, n: hvd.average_gradients(x, weight=n))
assert "one weight" in str(raised(lambda: each(square, x)))

# Another number of rows than compiled for: NumPy would have broadcast the received one.
rows = jnp.full((0 if rank else 2, 3), 7.0)
error = raised(lambda: jax.jit(hvd.alltoall)(rows))
assert isinstance(hvd.cause_of(error), hvd.MismatchError) and "rows of each rank" in str(error)
for rows, text in ((jnp.ones(3), "a multiple of 2 rows, not 3"), (x[0], "at least one dimension")):
    error = raised(lambda: jax.jit(hvd.alltoall).lower(rows))
    assert isinstance(error, ValueError) and text in str(error), error
unequal = jnp.ones((1 + rank, 2))
error = raised(lambda: jax.grad(lambda x: hvd.allgather(x).sum())(unequal))
assert "same number of rows" in str(error)
small = x.astype(jnp.float8_e5m2)
assert "allreduce: dtype float8_e5m2" in str(raised(lambda: jax.jit(hvd.allreduce)(small)))
assert hvd.allreduce(1.0 + rank) == 1.5
""",
        2,
    )


def test_what_was_compiled_ahead_is_an_error_on_another_place() -> None:
    """Results that depend on the rank, after it has changed, would be those of the old rank."""
    ranks(
        """
from mpi4py import MPI

table = jnp.arange(2.0 * size**2)
functions = {
    "reducescatter": lambda x: hvd.reducescatter(x, hvd.Sum),
    "allgather": jax.grad(lambda x: (hvd.allgather(x) * table).sum()),
    "broadcast": jax.grad(lambda x: hvd.broadcast(x).sum()),
    "anywhere": lambda x: hvd.allreduce(x, hvd.Sum),
}
x = jnp.arange(2.0 * size)
ahead = {name: jax.jit(function).lower(x).compile() for name, function in functions.items()}
for name, function in functions.items():
    assert (ahead[name](x) == jax.jit(function)(x)).all(), name
hvd.shutdown()
assert hvd.init(comm=MPI.COMM_WORLD.Split(0, -rank)).rank == size - 1 - rank
assert (ahead.pop("anywhere")(x) == size * x).all()
for name, function in ahead.items():
    text = f"compiled for rank {rank} of {size}, but this is rank {hvd.rank()} of {size}"
    error = raised(lambda: function(x))
    assert isinstance(hvd.cause_of(error), ValueError) and text in str(error), error
assert (jax.jit(functions["broadcast"])(x) == size * (hvd.rank() == 0)).all()

# Invalid calls raise when they are traced.
for op, text in ((hvd.Average, "the average of bool has no meaning"), ("sum", "op must be one of")):
    error = raised(lambda: jax.jit(lambda x: hvd.allreduce(x, op)).lower(x > 1))
    assert isinstance(error, ValueError) and text in str(error), error
""",
        2,
    )


def test_several_devices_of_a_rank() -> None:
    """Within a function each device would make the call, and match another rank's other device."""
    ranks(
        """
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh, rows = Mesh(np.array(jax.devices()), "d"), PartitionSpec("d")
x = jax.device_put(jnp.arange(6.0).reshape(2, 3) + rank, NamedSharding(mesh, rows))
total = 2 * np.arange(6.0).reshape(2, 3) + 1
add = lambda x: hvd.allreduce(x, hvd.Sum)
for function in (add, jax.shard_map(add, mesh=mesh, in_specs=rows, out_specs=rows)):
    assert "allreduce inside a function over 2 devices" in str(raised(lambda: jax.jit(function)(x)))
assert (add(x) == total).all()
assert (hvd.allgather(x)[2:] == np.arange(6.0).reshape(2, 3) + 1).all()
assert (hvd.broadcast_parameters({"x": x}, 1)["x"] == np.arange(6.0).reshape(2, 3) + 1).all()
assert (jax.jit(add)(jax.device_put(np.asarray(x), jax.devices()[1])) == total).all()
""",
        2,
        xla_flags="--xla_force_host_platform_device_count=2",
    )


def test_horo_lites_own_functions_take_pytrees_and_work_inside_jit() -> None:
    ranks(
        """
import equinox
import horo_lite

x = jnp.arange(12.0).reshape(4, 3) + 10 * rank
n = 2 + 3 * rank  # samples
loss = lambda p, x: ((x @ p["w"] + p["b"]) ** 2).mean()
params = {"w": jnp.ones((3, 2)) / 3, "b": jnp.zeros(2), "none": None}
own = jax.value_and_grad(loss)(params, x)
gradient = horo_lite.grad_and_average(jax.value_and_grad(loss))
eager = gradient(params, x, weight=n)
compiled = jax.jit(lambda p, x, n: gradient(p, x, weight=n))(params, x, jnp.float32(n))
counts = [2 + 3 * r for r in range(size)]
for mine, one, other in zip(*map(jax.tree.leaves, (own, eager, compiled)), strict=True):
    everyone = hvd.allgather_object(np.asarray(mine))
    expected = np.average(everyone, axis=0, weights=counts)
    assert type(one) is type(mine) and one.dtype == mine.dtype and (one != mine).any()
    np.testing.assert_allclose(one, expected, rtol=1e-6)
    np.testing.assert_allclose(other, expected, rtol=1e-6)
    check_alike([one, other])
assert eager[1]["none"] is compiled[1]["none"] is None

# A registered class with leaves that are not arrays: they are not gradients.
net = equinox.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
found = equinox.filter_grad(lambda net, x: jax.vmap(net)(x).sum())(net, x)
averaged = horo_lite.average_gradients(found)
assert type(averaged) is type(net) and averaged.activation is None
kept = hvd.allgather_object(np.asarray(found.layers[0].weight))
np.testing.assert_allclose(averaged.layers[0].weight, np.mean(kept, axis=0), rtol=1e-6)
wider = equinox.tree_at(lambda net: net.layers[1].bias, found, jnp.zeros(2 + rank))
error = raised(lambda: horo_lite.average_gradients(wider))
assert isinstance(error, horo_lite.MismatchError)
assert "'layers[1].bias' float32[2], rank 1 has 'layers[1].bias' float32[3]" in str(error)

# Averages of parameters, which are new arrays after each step.
layers = (net, {"scale": jnp.ones(2)})
local = horo_lite.LocalSGD(layers, every=2)
for _ in range(4):
    change = lambda x: x + rank if equinox.is_array(x) else x
    layers = local.step(jax.tree.map(change, layers))
assert type(layers[0]) is type(net) and layers[0].activation is net.activation
mean = 4 * (size - 1) / 2
assert isinstance(layers[1]["scale"], jax.Array) and (layers[1]["scale"] == 1 + mean).all()
was = net.layers[0].weight
np.testing.assert_allclose(layers[0].layers[0].weight, was + mean, rtol=1e-5)

# The bits of all ranks are those of one, also with random numbers.
def noisy(net, x, key):
    return (jax.vmap(net)(x) * jax.random.normal(key, (2,)) - x[:, :2]).std()

def trained(group):
    micro_batches, net = horo_lite.MicroBatches(4, seed=1, group=group), equinox.nn.MLP(
        3, 2, 4, 1, key=jax.random.key(0)
    )
    gradient = equinox.filter_jit(equinox.filter_grad(noisy))
    images = np.random.default_rng(0).standard_normal((20, 3), np.float32)
    for step in range(4):
        for batch in micro_batches(step):
            rows = batch.rows(images)
            batch.gradients = gradient(net, images[rows], jax.random.key(batch.seed))
        averages = micro_batches.gradients
        assert type(averages) is type(net) and averages.activation is None
        net = equinox.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, averages))
    return [np.asarray(x) for x in jax.tree.leaves(net) if equinox.is_array(x)]

alone = [hvd.new_group([r]) for r in range(size)][rank]
together, alone = trained(None), trained(alone)
assert [x.tobytes() for x in together] == [x.tobytes() for x in alone]
assert (together[0] != np.asarray(net.layers[0].weight)).all()
""",
        2,
    )


@WAYS
def test_one_order_on_all_ranks(way: str) -> None:
    ranks(
        """
def work(x):
    for _ in range(3):
        x = jnp.tanh(x @ x)
    return x

x = jnp.full((400, 400), 0.01)

# Independent of each other, traced by the ranks in different orders, ready at different times.
first = lambda a: hvd.allreduce(a, hvd.Sum, name="first")
second = lambda b: hvd.allreduce(b, hvd.Sum, name="second")
if rank == 0:
    pair = jax.jit(lambda a, b: (first(work(a)), second(b)))
else:
    swapped = jax.jit(lambda b, a: (first(a * 1), second(work(b) * 0 + b)))
    pair = lambda a, b: swapped(b, a)
for i in range(5):
    a, b = jax.block_until_ready(pair(x, x + rank))
    assert jnp.allclose(b, 2 * x + 1)

# Dispatched one after the other, without waiting for any, beside a blocking call.
@jax.jit
def step(p, i):
    return p + hvd.allreduce(work(x) * 0 + i * (rank + 1), hvd.Sum)

p = jnp.zeros(())
for i in range(40):
    p = step(p, np.float32(i))
    if i % 15 == 0:
        assert hvd.allreduce(float(rank + i)) == 0.5 + i
assert (p == 3 * sum(range(40))).all()

# A rank that reads a result waits for those that still compute, and they wait for it elsewhere.
long = jax.jit(lambda x, n: hvd.allreduce(jax.lax.fori_loop(0, n, lambda i, x: work(x), x)))
result = long(x, 1 if rank == 0 else 40)
if rank == 0:
    jax.block_until_ready(result)
hvd.barrier()

# And for independent calls.
score = jax.jit(lambda i: hvd.allreduce(work(x).sum() * 0 + i, hvd.Sum))
assert [float(s) for s in [score(i + 100.0 * rank) for i in range(30)]] == [
    2 * i + 100 for i in range(30)
]
""",
        2,
        way,
        # A pool of one thread, which an operation blocks.
        xla_flags="--xla_cpu_multi_thread_eigen=false",
    )


@WAYS
def test_ranks_that_differ_inside_jit(way: str) -> None:
    ranks(
        """
@jax.jit
def step(tree, x):
    for _ in range(3):
        x = jnp.tanh(x @ x)  # long enough to be run by another thread
    return hvd.average_gradients(tree, name="mine"), x

x = jnp.full((400, 400), 0.01)
tree = lambda n: {"layers": [{"w": jnp.ones(n)}], "b": jnp.ones(2)}
fine = lambda: step(tree(3), x)
jax.block_until_ready(fine())

for other, words in (
    (tree(3 + rank), ["layers.0.w", "float32[3]", "float32[4]"]),
    ({"b": jnp.ones(2)} if rank else tree(3), ["layers.0.w", "nothing more"]),
):
    error = raised(lambda: step(other, x))
    assert isinstance(error, jax.errors.JaxRuntimeError)
    assert all(word in str(error) for word in ["mine, call", "rank 0", "rank 1", *words]), error
    assert isinstance(hvd.cause_of(error), hvd.MismatchError)
    # The world remains usable.
    assert hvd.allreduce(1.0 + rank) == 1.5
    assert (fine()[0]["b"] == 1).all()
assert hvd.cause_of(ValueError("something else")) is None

# A call that the others do not make.
name = "left" if rank else "right"
error = raised(lambda: jax.jit(lambda x: hvd.allreduce(x, name=name))(x))
assert f"{name}, call" in str(error) and "by rank" in str(error), error
assert hvd.allreduce(1.0 + rank) == 1.5

# Outside jit, the same, and immediately.
error = raised(lambda: hvd.average_gradients(tree(3 + rank)))
assert isinstance(error, hvd.MismatchError) and "layers.0.w" in str(error)
error = raised(lambda: hvd.broadcast_parameters(tree(3 + rank)))
assert isinstance(error, hvd.MismatchError) and "layers.0.w" in str(error)
""",
        2,
        way,
    )


def test_what_is_in_progress_at_the_end_is_completed() -> None:
    result = ranks(
        """
@jax.jit
def step(x, y):
    for _ in range(3):
        x = x @ x / x.shape[0]  # runs for long enough
    return x[0, 0] + hvd.allreduce(y, op=hvd.Sum)

large, mine = jnp.ones((1500, 1500)), jnp.ones(3) + rank
total = step(large, mine)
hvd.shutdown()
assert total.tolist() == [4, 4, 4]

hvd.init()
error = raised(lambda: step(large, jnp.ones(3 + rank)))
assert isinstance(hvd.cause_of(error), hvd.MismatchError)
hvd.shutdown()  # not an error again

hvd.init()
wrong = step(large, jnp.ones(3 + rank))
try:
    hvd.shutdown()
except hvd.MismatchError as error:
    assert f"float32[{3 + rank}]" in str(error), error
else:
    raise AssertionError("nobody sees the error")

hvd.init()
total = step(large, mine)
if rank == 0:
    print("at the end:", total.tolist(), flush=True)
""",
        2,
    )
    assert "at the end: [4.0, 4.0, 4.0]" in result.stdout, str(result)


def test_what_is_in_progress_counts_before_join() -> None:
    ranks(
        """
@jax.jit
def step(x, y):
    for _ in range(20):
        x = jnp.sin(x @ x) / x.shape[0]  # runs for long enough on rank 0
    return hvd.allreduce(y + 0 * x[0, 0], op=hvd.Sum)

large = jnp.ones((1000 if rank == 0 else 5,) * 2)
total = step(large, jnp.full(3, rank + 1.0))
if rank == 1:
    assert total.tolist() == [3, 3, 3], total
    assert step(large, jnp.full(3, 10.0)).tolist() == [10, 10, 10]
assert hvd.join() == 1
assert total.tolist() == [3, 3, 3], total

# A rank may first compare its gradients when another has done so long before.
eager = lambda tree: hvd.average_gradients(tree, op=hvd.Sum)
for way in (jax.jit(eager), eager):
    if rank == 0:
        assert way({"w": jnp.full(3, 5.0)})["w"].tolist() == [5, 5, 5]
    hvd.join()
    for _ in range(2):
        assert way({"w": jnp.full(3, rank + 1.0)})["w"].tolist() == [3, 3, 3]
""",
        2,
    )


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(3)"])
def test_a_rank_that_is_gone_while_others_wait_inside_jit(end: str) -> None:
    result = run_ranks(
        f"""{START}
import os, sys
step = jax.jit(lambda x: x + hvd.allreduce(jnp.tanh(x @ x)))
x = step(jnp.ones((300, 300)))
jax.block_until_ready(x)
if rank == 1:
    {end}
error = raised(lambda: step(step(x)))
assert isinstance(hvd.cause_of(error), hvd.PeerLostError)
print("heard:", str(error).splitlines()[-1], flush=True)
raise error
""",
        2,
        timeout_s=60,
    )
    assert result.returncode != 0
    assert re.search(r"heard: .*PeerLostError: rank 1 \(pid", result.stdout), str(result)


def test_ctrl_c_while_waiting_inside_jit() -> None:
    result = run_ranks(
        f"""{START}
import os, signal, threading, time
step = jax.jit(hvd.allreduce)
step(jnp.ones(3))  # so small that the training thread runs it itself
if rank == 1:
    time.sleep(60)
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    jax.block_until_ready(step(jnp.ones(3)))
except KeyboardInterrupt:
    print("heard", flush=True)
    raise
""",
        2,
        timeout_s=50,
    )
    assert result.returncode != 0
    assert "heard" in result.stdout, str(result)


@pytest.mark.shows("eager", "jit")
def test_modules_of_equinox_and_flax() -> None:
    ranks(
        """
import equinox as eqx
from flax import linen, nnx
import horo_lite

x = jax.random.normal(jax.random.key(1), (4 * size, 3))
y = x.sum(1, keepdims=True)
mine = slice(4 * rank, 4 * rank + 4)
sgd = lambda: optax.sgd(0.1)

def close(a, b):  # float32 sums in another order
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

# equinox: functions among the leaves, None for missing gradients.
def train(net, tx, x, y):
    state = tx.init(eqx.filter(net, eqx.is_array))

    @eqx.filter_jit
    def step(net, state):
        gradients = eqx.filter_grad(lambda net: ((jax.vmap(net)(x) - y) ** 2).mean())(net)
        updates, state = tx.update(gradients, state, net)
        return eqx.apply_updates(net, updates), state

    for _ in range(3):
        net, state = step(net, state)
    return eqx.filter(net, eqx.is_array)

new = lambda seed: eqx.nn.MLP(3, 1, 5, 1, key=jax.random.key(seed))
for broadcast in (hvd.broadcast_parameters, horo_lite.broadcast_parameters):
    net = broadcast(new(rank), root_rank=1)
    assert type(net) is eqx.nn.MLP and callable(net.activation)
    close(eqx.filter(net, eqx.is_array), eqx.filter(new(1), eqx.is_array))
together = train(net, horo_lite.DistributedOptimizer(sgd()), x[mine], y[mine])
check_alike(together)
close(together, train(net, sgd(), x, y))

# flax.linen
net = linen.Dense(1)
def train(params, tx, x, y):
    state = tx.init(params)
    loss = lambda params: ((net.apply(params, x) - y) ** 2).mean()
    for _ in range(3):
        updates, state = jax.jit(tx.update)(jax.jit(jax.grad(loss))(params), state, params)
        params = optax.apply_updates(params, updates)
    return params

params = hvd.broadcast_parameters(net.init(jax.random.key(rank), x))
together = train(params, hvd.DistributedOptimizer(sgd()), x[mine], y[mine])
check_alike(together)
close(together, train(params, sgd(), x, y))

# flax.nnx, whose modules are changed in place.
def train(tx, x, y):
    net = nnx.Linear(3, 1, rngs=nnx.Rngs(rank))
    nnx.update(net, hvd.broadcast_parameters(nnx.state(net)))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer):
        optimizer.update(net, nnx.grad(lambda net: ((net(x) - y) ** 2).mean())(net))

    for _ in range(3):
        step(net, optimizer)
    return nnx.state(net)

together = train(hvd.DistributedOptimizer(sgd()), x[mine], y[mine])
check_alike(together)
close(together, train(sgd(), x, y))

# Its optimizer takes a divided state out of variables in each step; each of its own ways to write
# a whole one is read.
def train(tx, x, y, steps, start=None):
    net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    if start is not None:
        nnx.update(net, start[0])
        optimizer.opt_state = hvd.divided_state(start[1], optimizer.opt_state)

    @nnx.jit
    def step(net, optimizer):
        optimizer.update(net, nnx.grad(lambda net: ((net(x) - y) ** 2).mean())(net))

    for _ in range(steps):
        step(net, optimizer)
    return nnx.as_pure(nnx.state(net)), optimizer.opt_state

whole = train(optax.adam(0.1), x, y, 2)
other = train(optax.adam(0.1), x, y, 4)
tx = hvd.DistributedOptimizer(optax.adam(0.1), shard_state=True)
state = train(tx, x[mine], y[mine], 2)
assert len(jax.tree.leaves(state[1])) < len(jax.tree.leaves(whole[1]))
collected = hvd.whole_state(state[1])
close((state[0], collected), whole)
for start in (collected, whole[1], nnx.as_pure(whole[1])):
    after = train(tx, x[mine], y[mine], 2, (state[0], start))
    check_alike(after[0])
    close((after[0], hvd.whole_state(after[1])), other)
tx = hvd.shard_state(optax.adam(0.1))
error = raised(lambda: tx.update({"w": x}, tx.init({"w": x, "b": y})))
assert isinstance(error, ValueError) and "has divided 2 parameters" in str(error)

class Net(nnx.Module):  # moving statistics and noise are each rank's own
    def __init__(self):
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(rank))

net = Net()
net.norm.mean[...] += rank
assert horo_lite.check_in_sync({"net": net})
assert "norm.mean" in str(raised(lambda: horo_lite.check_in_sync(net, buffers=True)))
nnx.update(net, hvd.broadcast_parameters(nnx.state(net)))
assert horo_lite.check_in_sync(net, buffers=True)

error = raised(lambda: hvd.DistributedOptimizer(optax.MultiSteps(sgd(), 2)))
assert "gradient_transformation()" in str(error)
""",
        2,
    )


def test_public_functions_show_what_they_take() -> None:
    import inspect

    import horo_lite.jax as hvd

    for name, function in vars(hvd).items():
        if getattr(function, "__module__", "").startswith("horo_lite.jax"):
            signature = str(inspect.signature(function))
            assert "self" not in signature, name
            assert "*" not in signature.replace("*, ", ""), name
    with pytest.raises(TypeError, match=r"^DistributedOptimizer\(\) got .* 'compresion'"):
        hvd.DistributedOptimizer(None, compresion=1)


def test_what_is_known_of_xla_is_what_its_header_says(tmp_path: Path) -> None:
    import jax

    header = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    extension = "InternalExtension" if "InternalExtension" in header else "Extension_Base"
    pairs = {
        f"XLA_FFI_{extension} XlaExtension": "struct_size type next",
        "XLA_FFI_Api_Version XlaVersion": "struct_size extension_start=extensions "
        "major_version=major minor_version=minor",
        "XLA_FFI_Metadata XlaMetadata": "struct_size api_version=version traits",
        "XLA_FFI_Metadata_Extension XlaMetadataExtension": "extension_base=base metadata",
        "XLA_FFI_Error_Create_Args XlaErrorCreateArgs": "struct_size extension_start=extensions "
        "message errc=code",
        "XLA_FFI_Buffer XlaBuffer": "struct_size extension_start=extensions dtype data rank dims",
        "XLA_FFI_ByteSpan XlaText": "ptr=data len=size",
        "XLA_FFI_Scalar XlaScalar": "dtype value",
        "XLA_FFI_Args XlaOperands": "struct_size extension_start=extensions size types "
        "args=operands",
        "XLA_FFI_Rets XlaOperands": "struct_size extension_start=extensions size types "
        "rets=operands",
        "XLA_FFI_Attrs XlaAttributes": "struct_size extension_start=extensions size types names "
        "attrs=attributes",
        "XLA_FFI_Api XlaApi": "struct_size extension_start=extensions api_version=version "
        "internal_api=internal XLA_FFI_Error_Create=error_create",
        "XLA_FFI_CallFrame XlaCallFrame": "struct_size extension_start=extensions api ctx=context "
        "stage args=arguments rets=results attrs=attributes",
    }
    checks = []
    for pair, names in pairs.items():
        theirs, ours = pair.split()
        for name in names.split():
            their, _, our = name.partition("=")
            their, our = f"{theirs}, {their}", f"horo::{ours}, {our or their}"
            checks.append(f"offsetof({their}) == offsetof({our})")
            at = [f"decltype({name.replace(', ', '::')})" for name in (their, our)]
            checks.append(f"sizeof({at[0]}) == sizeof({at[1]})")
    dtypes = {
        "PRED": 1, "S8": 1, "S16": 2, "S32": 4, "S64": 8, "U8": 1, "U16": 2, "U32": 4, "U64": 8,
        "F16": 2, "F32": 4, "F64": 8, "BF16": 2, "C64": 8, "C128": 16, "TOKEN": 0,
    }  # fmt: skip
    checks += [f"horo::kXlaItemBytes[XLA_FFI_DataType_{t}] == {n}" for t, n in dtypes.items()]
    checks += [
        f"horo::{ours} == XLA_FFI_{theirs}"
        for ours, theirs in {
            "kXlaMajor": "API_MAJOR",
            "kXlaMetadata": "Extension_Metadata",
            "kXlaAborted": "Error_Code_ABORTED",
            "kXlaInt64": "DataType_S64",
            "kXlaToken": "DataType_TOKEN",
            "kXlaScalar": "AttrType_SCALAR",
            "kXlaBuffer": "ArgType_BUFFER",
            "kXlaExecute": "ExecutionStage_EXECUTE",
        }.items()
    ]
    checks.append("XLA_FFI_RetType_BUFFER == XLA_FFI_ArgType_BUFFER")
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "bindings/xla_ffi.h"']
    lines += [f"static_assert({check});" for check in checks]
    (tmp_path / "check.cpp").write_text("\n".join(lines))
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", jax.ffi.include_dir(), "-I", str(CSRC)]
    subprocess.run([*command, str(tmp_path / "check.cpp")], check=True, timeout=60)


def test_an_unknown_interface_of_xla_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from horo_lite.jax import primitive

    header = primitive.Path.read_text
    monkeypatch.setattr(
        primitive.Path,
        "read_text",
        lambda *args, **options: header(*args, **options).replace("MAJOR 0", "MAJOR 7"),
    )
    with pytest.warns(RuntimeWarning, match=r"JAX .* \(version 7\.\d+ is unknown\)"):
        assert not primitive._xla_calls.__wrapped__()


def test_digits() -> None:
    on_shared = {"run": script_on_ranks, "job_env": compilation()}
    assert accuracy_of("jax", epochs=4, **on_shared, timeout_s=120) > 0.9


@pytest.mark.shows("eager", "jit")
def test_divided_state_is_that_of_one_rank_in_shares() -> None:
    code = f"""{TRAIN}
import copy, pickle
from horo_lite import elastic
params = hvd.broadcast_parameters(new_params(0))

def trained(tx, compiled, state=None, params=params, steps=4):
    state = tx.init(params) if state is None else state

    def step(params, state):
        gradients = jax.grad(loss_of)(params, x[mine], y[mine])
        updates, state = tx.update(gradients, state, params, weight=n_mine)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if compiled else step
    for _ in range(steps):
        params, state = step(params, state)
    return params, state

def equal(a, b, tolerance=0.0):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)

only_w = jax.tree.map(lambda x: x.ndim > 1, params)
labels = jax.tree.map(lambda x: "adam" if x.ndim else "sgd", params)
momentum = optax.sgd(0.1, momentum=0.9)
optimizers = {{
    "momentum": momentum,
    "adafactor": optax.adafactor(0.01),
    "adamw": optax.adamw(0.01, mask=only_w),
    "several": optax.multi_transform({{"adam": optax.adam(0.01), "sgd": momentum}}, labels),
}}
for name, inner in optimizers.items():
    exact = name in ("momentum", "adafactor")  # XLA rounds Adam by what it compiles together
    for compiled in [False, True][: 1 if exact else 2]:
        tx = hvd.DistributedOptimizer(inner, shard_state=True)
        one, other = trained(hvd.DistributedOptimizer(inner), compiled), trained(tx, compiled)
        equal((one[0], one[1]), (other[0], hvd.whole_state(other[1])), 0.0 if exact else 1e-6)
        check_alike(other[0])

# Each rank has a part, and all parts are the whole.
plain, tx = optax.adam(0.01), hvd.DistributedOptimizer(optax.adam(0.01), shard_state=True)
params_after, state = trained(tx, True)
parts = hvd.allgather_object(sum(x.size for x in jax.tree.leaves(state)) - 1)
assert sum(parts) == sum(x.size for x in jax.tree.leaves(plain.init(params))) - 1, parts
assert max(parts) < 0.9 * sum(parts)

# A part of a chain, next to what needs all gradients.
clip = optax.clip_by_global_norm(0.01)
whole = hvd.DistributedOptimizer(optax.chain(clip, momentum))
divided = hvd.DistributedOptimizer(optax.chain(clip, hvd.shard_state(momentum)))
one, other = trained(whole, False), trained(divided, False)
equal(one, (other[0], hvd.whole_state(other[1])))
noise = optax.add_noise(0.01, 0.5, 0)  # of each parameter by its place among all

def by_rounds(together):
    def updates(gradients, params):
        limit = lambda x: jnp.abs(sum(jax.tree.leaves(gradients)) if together else x).max() / 2
        halved = lambda x: jax.lax.while_loop(lambda y: y.max() > limit(x), lambda y: y / 2, x)
        added = lambda x: jax.lax.scan(lambda y, z: (y + z, None), x, jnp.stack([x, x]))[0]
        return jax.tree.map(lambda x: added(halved(x)), gradients)

    return updates

one_of = {{"one": optax.apply_if_finite(momentum, 5), "rest": momentum}}
refused = (
    (optax.chain(clip, momentum), "depends on no other one, but that of"),
    (optax.apply_if_finite(momentum, 5), "depends on no other one, but that of"),
    (noise, "depends on no other one, but that of"),
    # What happens in late steps only, and in loops.
    (optax.conditionally_transform(clip, lambda step: step > 99), "but that of ['a'] does"),
    (optax.stateless(by_rounds(together=True)), "but that of ['a'] does"),
    (
        optax.multi_transform(one_of, {{"a": "rest", "b": "one", "c": "rest"}}),
        "['one'].inner_state.notfinite_count belongs to none",
    ),
)
for inner, reason in refused[rank :: size]:  # which each rank finds out alone
    small = {{name: jnp.ones(2) for name in "abc"}}
    error = raised(lambda: hvd.shard_state(inner).init(small))
    assert isinstance(error, ValueError) and reason in str(error), error
hvd.shard_state(optax.stateless(by_rounds(together=False))).init(small)
hvd.shard_state(optax.MultiSteps(momentum, 9).gradient_transformation()).init(small)

# An integer's gradient is float0, which has no content.
mixed = {{"v": jnp.ones(3), "n": jnp.arange(2), "w": jnp.ones((2, 2))}}
gradients = jax.grad(lambda p: (1.0 + hvd.rank()) * (p["v"].sum() + p["w"].sum()), allow_int=True)(
    mixed
)
floats = optax.masked(optax.sgd(1.0), {{"v": True, "n": False, "w": True}})
tx = hvd.DistributedOptimizer(floats, shard_state=True)
updates, _ = tx.update(gradients, tx.init(mixed), mixed)
assert updates["n"].dtype == jax.dtypes.float0
equal([updates["v"], updates["w"]], [jnp.full(3, -2.0), jnp.full((2, 2), -2.0)])

# Saved on rank 0, and loaded by any number of ranks.
saved = hvd.broadcast_object(jax.tree.map(np.asarray, hvd.whole_state(state)))
update = jax.jit(plain.update)
for group in (None, hvd.new_group([0, 1]), hvd.new_group([2])):
    if group is None or group:
        tx = hvd.shard_state(optax.adam(0.01), group=group)
        loaded = hvd.divided_state(saved, tx.init(params))
        equal(hvd.whole_state(loaded), saved)
        gradients = jax.tree.map(lambda x: np.asarray(x) + 1, params)
        equal(jax.jit(tx.update)(gradients, loaded)[0], update(gradients, saved)[0], 1e-6)
assert "other parameters" in str(raised(lambda: hvd.divided_state(saved, tx.init([x]))))

# What would save or copy a share alone.
for call in (pickle.dumps, copy.deepcopy):
    assert "whole_state()" in str(raised(lambda: call(state)))
assert isinstance(raised(lambda: hvd.broadcast_parameters(state)), hvd.MismatchError)
assert isinstance(raised(lambda: tx.update(gradients, saved)), TypeError)

# A commit has all of it; after a change of the ranks, they go back to it.
tx = hvd.DistributedOptimizer(momentum, shard_state=True)
kept = elastic.State(params=params, state=tx.init(params), chain=(tx.init(params), 1))
kept.params, kept.state = trained(tx, True, kept.state, steps=2)
kept.commit()
lost = trained(tx, True, kept.state, kept.params, steps=1)
hvd.shutdown()
hvd.init()
assert "the ranks have changed" in str(raised(lambda: trained(tx, False, lost[1])))
kept.params, kept.state = lost
assert kept.has_lost_shares()
kept.restore()
assert not kept.has_lost_shares()
kept.sync()
after = trained(tx, True, kept.state, kept.params, steps=2)
before = trained(hvd.DistributedOptimizer(momentum), True)
equal(before, (after[0], hvd.whole_state(after[1])), 1e-6)
"""
    ranks(code, np=3)


RANDOM = """
import random

ROWS, N_STEPS = 12, 5
CORES = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.05, eps=1e-3),
    "lamb": lambda: optax.lamb(0.05, eps=1e-3, weight_decay=0.1),
    "several": lambda: optax.multi_transform(
        {"a": optax.rmsprop(0.05, eps=1e-3), "b": optax.sgd(0.1)}, {"body": "a", "heads": "b"}
    ),
}
CLIPS = {
    "no norm": optax.identity,
    "value": lambda: optax.clip(0.05),
    "norm of all": lambda: optax.clip_by_global_norm(0.1),
    "norm of each": lambda: optax.clip_by_block_rms(0.05),
}

class Program:
    \"""A random training loop: its optimizer, and what it does one after the other.\"""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.seed, self.core, self.clip = seed, draw.choice([*CORES]), draw.choice([*CLIPS])
        self.accumulates = draw.choice(["", "", "inside", "around"])
        self.op = draw.choice([hvd.Average, hvd.Average, hvd.Sum])
        self.shards = draw.choice(["", "part", "all" if self.clip != "norm of all" else "part"])
        self.is_weighted = self.op is hvd.Average and draw.random() < 0.5
        self.ends = [ROWS // size * (r + 1) for r in range(size)]
        if self.is_weighted:  # a rank may have no samples
            self.ends = [*sorted(draw.choices(range(ROWS + 1), k=size - 1)), ROWS]
        self.steps = draw.choices([*[draw.choice(["jit", "jit", "scan"])] * 3, "saved"], k=N_STEPS)

    def optimizer(self, alone):
        def accumulating(tx, where):
            if where != self.accumulates:
                return tx
            return optax.MultiSteps(tx, 2).gradient_transformation()

        core = CORES[self.core]()
        if not alone and self.shards == "part":
            core = hvd.shard_state(core)
        tx = accumulating(optax.chain(CLIPS[self.clip](), core), "inside")
        if not alone:
            tx = hvd.DistributedOptimizer(tx, op=self.op, shard_state=self.shards == "all")
        return accumulating(tx, "around")

    def train(self, alone):
        \"""Return the parameters after each step, and the whole state at the end.\"""
        random = np.random.default_rng(self.seed)
        batches = jnp.asarray(random.standard_normal((N_STEPS + 1, ROWS, 5)))
        params = {"body": random.standard_normal((3, 2)), "heads": random.standard_normal((2, 2))}
        params = jax.tree.map(jnp.asarray, params)
        n_rows = np.diff([0, *self.ends])
        shares = n_rows / ROWS * (size if self.op is hvd.Sum else 1) if alone else np.ones(size)

        def loss_of(params, i, r):
            x, y = jnp.split(batches[i, self.ends[r] - n_rows[r] : self.ends[r]], [3], axis=1)
            head = params["heads"][(i + r) % 2]  # the other one's gradient is 0
            return shares[r] * ((jnp.tanh(x @ params["body"]) * head - y) ** 2).mean()

        def step(params, state, i):
            of = [r for r in range(size) if n_rows[r]] if alone else [rank]
            gradients = jax.grad(lambda p: sum(loss_of(p, i, r) for r in of))(params)
            weight = {"weight": n_rows[rank]} if self.is_weighted and not alone else {}
            updates, state = tx.update(gradients, state, params, **weight)
            return optax.apply_updates(params, updates), state

        def two_steps(params, state, i):
            both = lambda carry, i: (step(*carry, i), None)
            return jax.lax.scan(both, (params, state), i + jnp.arange(2))[0]

        run = {"jit": jax.jit(step), "scan": jax.jit(two_steps)}
        tx, every = self.optimizer(alone), []
        state = tx.init(params)
        for i, what in enumerate(self.steps):
            if what in run:
                params, state = run[what](params, state, i)
            elif not alone:
                state = hvd.divided_state(hvd.whole_state(state), tx.init(params))
            every.append(params)
        return every, state if alone else hvd.whole_state(state)
"""


@pytest.mark.shows("eager", "jit")
def test_random_programs_train_as_one_process() -> None:
    """What the other tests of training and of shares do one by one, in any combination."""
    ranks(
        f"""{RANDOM}
first = hvd.broadcast_object(random.randrange(1 << 30))
for seed in range(first, first + 4):
    program = Program(seed)
    with jax.enable_x64(True):
        every, state = program.train(alone=False)
        check_alike(every[-1])
        expected, whole = program.train(alone=True) if rank == seed % size else (every, state)
    if program.accumulates == "around":  # where each rank adds up its own
        state = whole = None
    found, wanted = map(jax.tree.leaves, ((every, state), (expected, whole)))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-5, 1e-5, err_msg=str(vars(program)))
""",
        np=2,
    )


@pytest.mark.skipif(mpi_name() != "openmpi", reason="Open MPI's fault tolerance")
@pytest.mark.parametrize("divided", [False, True])
def test_the_others_continue_when_a_rank_is_killed_inside_jit(divided: bool) -> None:
    result = run_ranks(
        f"""{START}
import os
from horo_lite import elastic

params = {{f"w{{i}}": jnp.full((5, 4 + i), 0.1 * i) for i in range(6)}}
momentum = optax.sgd(0.1, momentum=0.9)

def trained(tx, params, state, steps):
    def step(params, state, k):  # the same gradients on all ranks, however many there are
        gradients = jax.tree.map(lambda x: jnp.cos(x + k), params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))  # so a step that fails has taken its arrays
    for k in steps:
        params, state = compiled(params, state, k)
    return params, state  # maybe before they have contents, which they may never have

tx = hvd.DistributedOptimizer(momentum, shard_state={divided})
mine = jax.tree.map(jnp.copy, (params, tx.init(params)))
state = elastic.State(mine=mine, step=0, seen=[])

@elastic.run
def train(state):
    while state.step < 8:
        if rank == 1 and state.step == 5:
            os.kill(os.getpid(), 9)
        state.mine = trained(tx, *state.mine, [state.step])
        state.seen = [*state.seen, state.step]
        state.step += 1
        if state.step % 3 == 0:
            state.commit()

train(state)
expected = trained(momentum, params, momentum.init(params), range(8))
found = hvd.whole_state(state.mine)
for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
print("ends", hvd.rank(), hvd.size(), state.seen, flush=True)
""",
        3,
        env=compilation(),
        options=["--with-ft", "ulfm"],
        timeout_s=90,
    ).check()
    seen = list(range(8))
    ends = sorted(line for line in result.stdout.splitlines() if line.startswith("ends"))
    assert ends == [f"ends {rank} 2 {seen}" for rank in (0, 1)]
