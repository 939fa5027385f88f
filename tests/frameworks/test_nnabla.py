"""NNabla 1.39 on CPUs: its solvers wrapped, and the calls of its communicator."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import run_ranks

pytestmark = pytest.mark.timeout(540)
LIMIT_S = 60
EARLY = {"HORO_LITE_OVERLAP": "always"}  # however busy the cores are
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_nnabla.py"

# A network in which 'b' is used twice, 'unused' never and 'fixed' without a gradient.
MODEL = """\
import sys
import numpy as np
import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
from nnabla.initializer import UniformInitializer

N_STEPS, BATCH = 5, 12
rng = np.random.default_rng(0)
IMAGES = rng.standard_normal((N_STEPS, BATCH, 8)).astype(np.float32)
LABELS = rng.integers(0, 3, (N_STEPS, BATCH, 1))

def model(n, seed=0):
    nn.clear_parameters()
    kw = {"w_init": UniformInitializer((-0.4, 0.4), rng=np.random.RandomState(seed))}
    x, t = nn.Variable((n, 8)), nn.Variable((n, 1))
    PF.affine(x, 3, name="unused", **kw)
    h = F.relu(PF.affine(x, 16, name="a", **kw))
    h = F.relu(PF.affine(h, 16, name="b", **kw))
    h = F.relu(PF.affine(h, 16, name="b", **kw))
    y = PF.affine(h, 3, name="c", **kw) + PF.affine(x, 3, name="fixed", fix_parameters=True, **kw)
    return x, t, F.mean(F.softmax_cross_entropy(y, t))

def train(solver, mine, *, steps=N_STEPS, hook=None, middle=None, update=None):
    x, t, loss = model(len(range(BATCH)[mine]))
    solver.set_parameters(nn.get_parameters())
    for step in range(steps):
        x.d, t.d = IMAGES[step][mine], LABELS[step][mine]
        loss.forward(clear_no_need_grad=True)
        solver.zero_grad()
        loss.backward(clear_buffer=True, function_post_hook=hook and hook())
        if middle:
            middle(solver)
        update(solver) if update else solver.update()
    return values()

def values():
    return {name: v.d.copy() for name, v in sorted(nn.get_parameters(grad_only=False).items())}

def close(a, b, rtol=1e-5, atol=1e-6):  # float32 sums in another order
    return a.keys() == b.keys() and all(np.allclose(a[k], b[k], rtol, atol) for k in a)

def same_bits(found):
    return len(set(hvd.allgather_object(b"".join(v.tobytes() for v in found.values())))) == 1
"""

TRAINING = (
    MODEL
    + """
from functools import partial
import horo_lite as hvd
from horo_lite.collectives import arrays
from horo_lite.collectives.group import Group

world = hvd.init()
rank, size = world.rank, world.size
shard, everything = slice(rank, None, size), slice(None)
momentum = partial(S.Momentum, 0.2)
whole = train(momentum(), everything)
assert not close(whole, train(momentum(), shard)), "a shard alone would do"
assert np.array_equal(whole["unused/affine/W"], (model(1), values())[1]["unused/affine/W"])

# The same, step for step, in the gradients' own memory.
copied = arrays.bytes_copied
solver = hvd.DistributedOptimizer(momentum())
assert isinstance(solver, S.Solver) and solver.name == "Momentum"
places = []
def look(solver):
    found = {k: v.grad for k, v in nn.get_parameters().items() if not v.grad.zeroing}
    places.append({k: grad.get_data("r").ctypes.data for k, grad in found.items()})
def update(solver):
    look(solver), solver.update(), look(solver)
found = train(solver, shard, update=update)
assert close(found, whole) and same_bits(found)
assert arrays.bytes_copied == copied
assert places[::2] == places[1::2] and [len(p) for p in places] == [6] * 2 * N_STEPS
kept = {parameter for _, parameter in solver._own.named()}
assert all(parameter in kept for _, parameter in solver._own.named())  # the plan is kept
print("eager", flush=True)

# Between backward and update, a solver sees all ranks' gradients.
def middle(solver):
    solver.weight_decay(0.01)
    solver.clip_grad_by_norm(0.3)
    solver.scale_grad(0.5)
whole = train(S.Adam(0.01, eps=1e-3), everything, middle=middle)
assert not close(whole, train(S.Adam(0.01, eps=1e-3), everything))
found = train(hvd.DistributedOptimizer(S.Adam(0.01, eps=1e-3)), shard, middle=middle)
assert close(found, whole) and same_bits(found)
print("clipped", flush=True)

# Uneven shards, by weight.
whole = train(momentum(), everything)
bounds = [0, 2, 9, 12] if size == 3 else [0, 3, 12]
uneven = slice(bounds[rank], bounds[rank + 1])
n = bounds[rank + 1] - bounds[rank]
weigh = lambda solver: solver.update(weight=n)
found = train(hvd.DistributedOptimizer(momentum()), uneven, update=weigh)
assert close(found, whole) and same_bits(found)
assert not close(train(hvd.DistributedOptimizer(momentum()), uneven), whole)
print("uneven", flush=True)

# With overlap, in small buckets; events are recorded in order.
events = []
submit = Group.exchange_async
def exchange_async(self, *args, **kwargs):
    events.append(kwargs["names"])
    return submit(self, *args, **kwargs)
Group.exchange_async = exchange_async
solver = hvd.DistributedOptimizer(momentum(), bucket_bytes=256)
def hook():
    events.append("backward")
    tell = hvd.nnabla.overlap(solver, weight=n)
    def told(function):
        tell(function)
        events.append(function.info.type_name)
    return told
found = train(solver, uneven, hook=hook)
assert close(found, whole) and same_bits(found)
last = events[len(events) - 1 - events[::-1].index("backward") :]
order = [e if isinstance(e, str) else e[0].split("/")[0] for e in last]
# 'c' is sent before anything else is ready, and 'b' right after the second function that uses it.
assert order.index("c") < order.index("ReLU") < order.index("b"), last
assert order[: order.index("b")].count("Affine") == 2, last
assert order.index("b") < len(order) - 1 - order[::-1].index("Affine"), last
assert "a" not in order[: order.index("b")], last
# The last bucket cannot overlap with anything, and bypasses the engine; so does a single bucket.
assert not any("a/affine/W" in e for e in last if isinstance(e, list)), last
events.clear()
solver = hvd.DistributedOptimizer(momentum())
found = train(solver, uneven, hook=hook)
assert close(found, whole) and same_bits(found) and events.count("backward") == N_STEPS
assert not any(isinstance(e, list) for e in events), events
Group.exchange_async = submit
# The same hook for every pass, although it is meant for one.
solver = hvd.DistributedOptimizer(momentum())
kept = hvd.nnabla.overlap(solver, weight=n)
found = train(solver, uneven, hook=lambda: kept)
assert close(found, whole) and same_bits(found)
print("overlap", flush=True)

# Several passes; the last one of each step sends.
half = lambda p: slice(rank + p * size, None, 2 * size)
solver = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2, bucket_bytes=256)
x, t, loss = model(BATCH // size // 2)
solver.set_parameters(nn.get_parameters())
for step in range(N_STEPS):
    solver.zero_grad()
    for p in range(2):
        x.d, t.d = IMAGES[step][half(p)], LABELS[step][half(p)]
        loss.forward(clear_no_need_grad=True)
        loss.backward(0.5, clear_buffer=True, function_post_hook=hvd.nnabla.overlap(solver))
    solver.update()
found = values()
assert close(found, whole) and same_bits(found)
print("passes", flush=True)

# Several passes, then clipping, without overlap: one process on the whole batch.
def clipped(solver, parts):
    x, t, loss = model(len(range(BATCH)[parts[0]]))
    solver.set_parameters(nn.get_parameters())
    for step in range(N_STEPS):
        solver.zero_grad()
        for part in parts:
            x.d, t.d = IMAGES[step][part], LABELS[step][part]
            loss.forward(clear_no_need_grad=True)
            loss.backward(1 / len(parts), clear_buffer=True)
        solver.clip_grad_by_norm(0.3)
        loss.forward()  # does not change any gradient
        solver.update()
    return values()
once = clipped(momentum(), [everything])
assert not close(once, whole)
found = clipped(hvd.DistributedOptimizer(momentum()), [half(p) for p in range(2)])
assert close(found, once) and same_bits(found)
print("accumulated and clipped", flush=True)

# With a solver for each parameter of this rank's share: the same bits, and a saved state goes on.
def adam(parameters):
    solver = S.Adam(0.01)
    solver.set_parameters(parameters)
    return solver
def divided(parameters):
    made.extend(parameters)
    return adam(parameters)
def go(solver, steps):
    for step in steps:
        x.d, t.d = IMAGES[step][shard], LABELS[step][shard]
        loss.forward(clear_no_need_grad=True)
        solver.zero_grad()
        assert all(v.grad.zeroing for v in nn.get_parameters().values())
        loss.backward(clear_buffer=True)
        solver.update()
        solver.set_learning_rate(solver.learning_rate() * 0.5)
    return values()
x, t, loss = model(BATCH // size)
whole_state = go(hvd.DistributedOptimizer(adam(nn.get_parameters())), range(5))
x, t, loss = model(BATCH // size)
made = []
solver = hvd.DistributedOptimizer(divided, parameters=nn.get_parameters(), shard_state=True)
assert isinstance(solver, S.Solver) and solver.name == "Adam"
go(solver, range(3))
everyone = [name for names in hvd.allgather_object(made) for name in names]
assert sorted(everyone) == sorted(nn.get_parameters()), everyone
state = solver.state_dict()
assert sorted(state) == sorted(everyone) and state["a/affine/W"][1]["a/affine/W"][0] == 3, state
for method in (lambda: solver.clip_grad_by_norm(1.0), lambda: solver.save_states("states.h5")):
    try:
        method()
    except TypeError as error:
        assert "about all parameters" in str(error), error
    else:
        raise SystemExit("not refused")
solver = hvd.DistributedOptimizer(divided, parameters=nn.get_parameters(), shard_state=True)
solver.load_state_dict(state)
found = go(solver, range(3, 5))
assert close(found, whole_state, 0, 0) and same_bits(found)
print("divided", flush=True)

# fp16 on the wire: not the same, but close, and small gradients do not underflow.
found = train(hvd.DistributedOptimizer(momentum(), compression=hvd.Compression.fp16), shard)
assert close(found, whole, 1e-2, 1e-3) and same_bits(found)
assert not close(found, whole, 0, 0)
w = nn.Variable((4,), need_grad=True)
w.d = 0
solver = hvd.DistributedOptimizer(S.Sgd(1.0), compression=hvd.Compression.fp16)
solver.set_parameters({"w": w})
solver.zero_grad()
F.sum(w * (size * 2.0 ** (rank - 30))).backward()
solver.update()
assert np.all(w.d == -sum(2.0 ** (r - 30) for r in range(size))), w.d
print("fp16", flush=True)

# The bits of all ranks are those of one.
def in_micro_batches(group):
    x, t, loss = model(BATCH // 4)
    solver = momentum()
    solver.set_parameters(nn.get_parameters())
    micro_batches = hvd.MicroBatches(4, solver, group=group)
    for step in range(N_STEPS):
        for batch in micro_batches(step):
            rows = batch.rows(BATCH)
            x.d, t.d = IMAGES[step][rows], LABELS[step][rows]
            loss.forward(clear_no_need_grad=True)
            loss.backward(clear_buffer=True)
        solver.update()
    return values()

alone = [hvd.new_group([r]) for r in range(size)][rank]
found = in_micro_batches(None)
assert close(found, in_micro_batches(alone), 0, 0)
assert close(found, whole) and not close(found, whole, 0, 0)
print("micro-batches", flush=True)
"""
)


@pytest.mark.shows("eager", "overlap", "in place", "fp16")
def test_training_equals_one_process_on_the_whole_batch() -> None:
    size = 3
    env = {**EARLY, "HORO_LITE_THREADS": "1"}
    result = run_ranks(TRAINING, size, timeout_s=LIMIT_S, env=env).check()
    for part in (
        "eager",
        "clipped",
        "uneven",
        "overlap",
        "passes",
        "and clipped",
        "divided",
        "fp16",
        "micro-batches",
    ):
        assert len(re.findall(rf"^.*{part}$", result.stdout, re.MULTILINE)) >= size, str(result)


TOGETHER = (
    MODEL
    + """
import horo_lite.nnabla as hvd
from nnabla.experimental.mixed_precision_training import DynamicLossScalingUpdater

world = hvd.init()
rank, size = world.rank, world.size

# Parameters and the solver's state come from rank 1; memory and objects are kept.
x, t, loss = model(BATCH, seed=rank)
parameters = nn.get_parameters()
places = {k: v.data.data.ctypes.data for k, v in parameters.items()}
theirs = hvd.allgather_object(values())
hvd.broadcast_parameters(nn.get_parameters(grad_only=False), root_rank=1)
assert close(values(), theirs[1], 0, 0) and not close(theirs[0], theirs[1])
assert places == {k: v.data.data.ctypes.data for k, v in parameters.items()}
solver = S.Adam(0.1)
solver.set_parameters(parameters)
for step in range(2 * rank):  # rank 0 has not made a step yet
    x.d, t.d = IMAGES[step], LABELS[step]
    loss.forward(), solver.zero_grad(), loss.backward(), solver.update()
solver.set_learning_rate(0.01 * (rank + 1))
solver = hvd.DistributedOptimizer(solver)
hvd.broadcast_parameters(solver, root_rank=1)
hvd.broadcast_optimizer_state(solver, root_rank=1)
hvd.check_in_sync(parameters)
x.d, t.d = IMAGES[3], LABELS[3]
loss.forward(), solver.zero_grad(), loss.backward(), solver.update()
found = values()
assert same_bits(found)
states = solver.get_states()
assert states["a/affine/W"].t == 3 and states["unused/affine/W"].t == 0
assert np.isclose(solver.learning_rate(), 0.02)
print("broadcast", flush=True)

# A parameter that only one rank's graph uses counts as zeros on the others; all update it.
nn.clear_parameters()
with nn.parameter_scope("both"):
    a = nn.parameter.get_parameter_or_create("a", (3,), np.ones(3))
    b = nn.parameter.get_parameter_or_create("b", (3,), np.ones(3))
solver = hvd.DistributedOptimizer(S.Sgd(1.0))
solver.set_parameters(nn.get_parameters())
cost = F.sum(a * 2) + F.sum(b * 6) if rank == 1 else F.sum(a * 4)
cost.forward(), solver.zero_grad(), cost.backward(), solver.update()
assert np.all(a.d == 1 - 3) and np.all(b.d == 1 - 3), (a.d, b.d)

# The hooks of update(), also by position, are not closures: they run after the exchange.
solver = hvd.DistributedOptimizer(S.Sgd(1.0), op=hvd.Sum)
solver.set_parameters(nn.get_parameters())
hooked = []
cost = F.sum(a) + F.sum(b)
cost.forward(), solver.zero_grad(), cost.backward()
solver.update(lambda: hooked.append(float(a.g[0])), update_post_hook=lambda: hooked.append("post"))
assert hooked == [2, "post", 2, "post"] and a.d[0] == 1 - 3 - 2, (hooked, a.d)
a.d = b.d = -2

# Differing shapes and missing parameters are named, and the next step works.
wrong = {"w/b": nn.Variable((3 + rank,), need_grad=True), "w/a": a}
for given in (wrong, {"w/a": a} if rank else {"w/a": a, "w/b": b}):
    solver = hvd.DistributedOptimizer(S.Sgd(1.0))
    solver.set_parameters(given)
    cost = sum(F.sum(v) for v in given.values())
    cost.forward(), solver.zero_grad(), cost.backward()
    try:
        solver.update()
    except hvd.MismatchError as error:
        print("<", " ".join(str(error).split()), ">", flush=True)
solver = hvd.DistributedOptimizer(S.Sgd(1.0))
solver.set_parameters({"a": a})
cost = F.sum(a * rank)
cost.forward(), solver.zero_grad(), cost.backward(), solver.update()
assert np.all(a.d == 1 - 3 - 0.5)

# After one rank's overflow all ranks skip the same steps, and keep the same scale.
x, t, loss = model(BATCH // 2)
solver = hvd.DistributedOptimizer(S.Momentum(0.1))
solver.set_parameters(nn.get_parameters())
feeds = []
def feed():
    step = len(feeds)
    feeds.append(step)
    x.d, t.d = IMAGES[step % N_STEPS][rank::2], LABELS[step % N_STEPS][rank::2]
    if step == 2 and rank == 1:
        x.d[0, 0] = np.inf
updater = DynamicLossScalingUpdater(solver, loss, feed, scale=8.0, N=100)
for _ in range(4):
    updater.update()
assert len(feeds) == 5 and updater.scale == 4.0, (feeds, updater.scale)
found = values()
assert same_bits(found) and all(np.isfinite(v).all() for v in found.values())
print("overflow", flush=True)

# Clipping has averaged the gradients: they are not averaged again, so a weight is too late.
loss.forward(), solver.zero_grad(), loss.backward(), solver.check_nan_grad()
try:
    solver.update(weight=3)
except TypeError as error:
    assert "pass it to synchronize()" in str(error)
    print("late", flush=True)

# Gradients that a pass adds after clipping are not averaged, and must not be used by a step.
solver = hvd.DistributedOptimizer(S.Sgd(0.1))
solver.set_parameters(nn.get_parameters())
before = values()
def refused(call):
    try:
        call()
    except RuntimeError as error:
        assert "changed since clip_grad_by_norm() averaged them" in str(error), error
        return
    raise AssertionError("stepped with gradients of its own")
loss.forward(), solver.zero_grad(), loss.backward(), solver.clip_grad_by_norm(1.0)
loss.forward(), loss.backward()
refused(solver.update)
refused(lambda: solver.weight_decay(0.1))
assert close(values(), before, 0, 0)
# Changed equally by the program, or not at all, they are still averages; zero_grad() starts again.
loss.forward(), solver.zero_grad(), loss.backward(), solver.clip_grad_by_norm(1.0)
for v in nn.get_parameters().values():
    if not v.grad.zeroing:
        v.g = v.g * 0.5
solver.weight_decay(0.1), solver.update()
loss.forward(), solver.zero_grad(), loss.backward(), solver.clip_grad_by_norm(1.0)
loss.forward(), solver.zero_grad(), loss.forward(), loss.backward()
solver.update()
assert same_bits(values()) and not close(values(), before)
print("refused", flush=True)

# A step skipped after a check: the next pass's gradients are exchanged, even without zero_grad().
solver = hvd.DistributedOptimizer(S.Sgd(0.1))
solver.set_parameters(nn.get_parameters())
some = F.sum(nn.get_parameters()["c/affine/b"] * rank)
for cost in (some, loss):  # gradients that the first lacks are in no plan yet
    for v in nn.get_parameters().values():
        v.grad.zero()
    cost.forward(), cost.backward(function_post_hook=hvd.overlap(solver))
    solver.check_nan_grad()
solver.update()
assert same_bits(values())
print("left out", flush=True)

# A step that is lost after backward(), with gradients in flight, leaves nothing in the next one.
# (NNabla does not stop a backward pass in which a hook raises.)
mine = slice(rank, None, size)
def trained(loses):
    x, t, loss = model(len(range(BATCH)[mine]))
    solver = hvd.DistributedOptimizer(S.Momentum(0.1), bucket_bytes=1)
    solver.set_parameters(nn.get_parameters())
    for k in (0, 1, 2) if loses else (0, 2):
        x.d, t.d = IMAGES[k][mine], LABELS[k][mine]
        loss.forward(), solver.zero_grad()
        loss.backward(function_post_hook=hvd.overlap(solver))
        if k == 1:
            assert solver._own.reducer._step.handles
        else:
            solver.update()
    return values()
assert close(trained(loses=True), trained(loses=False), 0, 0)
print("lost", flush=True)
"""
)


def test_states_mismatches_and_overflows() -> None:
    result = run_ranks(TOGETHER, 2, env=EARLY, timeout_s=LIMIT_S).check()
    for part in ("broadcast", "overflow", "late", "refused", "left out", "lost"):
        assert result.stdout.count(part) == 2, str(result)
    shape, missing = re.findall(r"< (.*) >", result.stdout)[:2]
    assert re.search(r"'w/b'.*float32\[3\].*float32\[4\]", shape), shape
    assert "'w/b'" in missing
    assert result.stdout.count("< ") == 4


COMMUNICATOR = (
    MODEL
    + """
import warnings
import horo_lite.nnabla as hvd
from nnabla.ext_utils import get_extension_context
import nnabla.communicators as C

try:
    C.MultiProcessDataParallelCommunicator(get_extension_context("cpu"))
except RuntimeError:
    print("NNabla has none", flush=True)
hvd.install()
comm = C.MultiProcessDataParallelCommunicator(get_extension_context("cpu"))
comm.init()
rank, size = comm.rank, comm.size
assert (rank, size, comm.local_rank) == (hvd.rank(), 3, hvd.local_rank())
assert comm.name == "MultiProcessDataParallelCommunicator"

def array(*numbers):
    return nn.NdArray.from_numpy_array(np.array(numbers, np.float32))

def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")

x, y = array(rank, 1), array(10 * rank)
comm.all_reduce([x, y], division=False, inplace=True)
assert x.data.tolist() == [3, 3] and y.data.tolist() == [30]
comm.all_reduce(x, division=True)
assert x.data.tolist() == [3, 3]
x = array(rank, 6)
comm.all_reduce(x, True)
assert x.data.tolist() == [1, 6]

# Zeroed on all ranks an array remains so; zeroed on some ranks it counts as zeros there.
x, y = array(1), array(rank)
x.zero()
if rank == 2:
    y.zero()
comm.all_reduce([x, y])
assert x.zeroing and not y.zeroing and y.data.tolist() == [1]

x = array(rank + 1, rank)
comm.reduce(x, dst=1)
assert x.data.tolist() == ([6, 3] if rank == 1 else [rank + 1, rank])
comm.bcast([x, y], src=2)
assert x.data.tolist() == [3, 2] and y.data.tolist() == [1]
parts = [array(0, 0) for _ in range(3)]
comm.all_gather(array(rank, 7), parts)
assert [p.data.tolist() for p in parts] == [[0, 7], [1, 7], [2, 7]]
comm.reduce_scatter([array(rank, i) for i in range(3)], x, division=True)
assert x.data.tolist() == [1, rank]
comm.barrier()

# Other dtypes, and memory that has not been written to so far.
for dtype in (np.float16, np.float64, np.int32):
    x = nn.NdArray.from_numpy_array(np.array([rank, 2], dtype))
    comm.all_reduce(x)
    assert x.dtype == dtype and x.data.tolist() == [3, 6], (dtype, x.data)
x, y = nn.NdArray((2,)), array(5, 5)
x.fill(rank)
y.fill(rank)
comm.all_reduce([x, y])
assert x.data.tolist() == y.data.tolist() == [3, 3]

class Halved(hvd.Compressor):
    def prepare(self, name, gradient):
        gradient *= 0.5

x = array(rank)
halved = hvd.MultiProcessDataParallelCommunicator(compression=Halved("halved"))
halved.all_reduce(x)
assert x.data.tolist() == [1.5]

# Groups: ranks are positions in the group, not numbers of the world.
assert comm.new_group(("last", [2, 1])) == "last" and comm.new_group("first", [0]) == "first"
groups = {"world": [0, 1, 2], "last": [2, 1], "first": [0]}
assert comm.list_groups() == groups
assert comm.find_group("last") == [2, 1] and comm.find_group("none") == []
x = array(rank)
if rank:
    comm.all_reduce(x, division=True, group="last")
    assert x.data.tolist() == [1.5]
    x = array(rank)
    comm.bcast(x, src=0, group="last")
    assert x.data.tolist() == [2]
else:
    message = raised(ValueError, lambda: comm.bcast(x, 0, group="last"))
    assert "rank 0 is not in group 'last'" in message
# What is kept of earlier calls does not depend on this rank's calls in other groups, nor, for
# parameters, on the number of sets.
weights = [nn.parameter.get_parameter_or_create(f"w{i}", (2,)) for i in range(20)]
kept = []
for step in range(3):
    if rank == 0:
        for _ in range(20):
            comm.all_reduce(array(1), group="first")
    for weight in weights:
        weight.grad.data = np.array([rank, step])
        comm.all_reduce([weight.grad])
        assert weight.grad.data.tolist() == [3, 3 * step]
    kept.append([comm._reducer([weight.grad], False, "world") for weight in weights])
assert kept[0] == kept[1] == kept[2]
# The first gradients of a parameter should differ between the ranks, and its values should not.
for name, value, gradient, said in (
    ("one", 0.5, 1.0, "all gradients are the same, bit for bit, on ranks 0, 1 and 2"),
    ("two", 0.5 + rank, 1.0 + rank, "the replicas differ"),
    ("three", 0.5, 1.0 + rank, None),
):
    parameter = nn.parameter.get_parameter_or_create(name, (2,))
    parameter.d, parameter.grad.data = value, np.full(2, gradient)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm.all_reduce([parameter.grad])
        comm.all_reduce([parameter.grad])
    texts = [str(one.message) for one in caught]
    assert len(texts) == (rank == 0 and said is not None), texts
    assert all(said in text for text in texts), texts
nn.clear_parameters()
assert "'last'" in raised(ValueError, lambda: comm.new_group(("last", [0])))
assert "no group 'x'" in raised(ValueError, lambda: comm.all_reduce(x, group="x"))
shape = nn.NdArray((2 + (rank == 1),))
shape.data = 1
message = raised(hvd.MismatchError, lambda: comm.all_reduce([shape]))
assert "'array 0'" in message and "float32[3]" in message, message

# Half precision on the wire.
half = hvd.MultiProcessDataParallelCommunicator(get_extension_context("cpu", type_config="half"))
half.init()
x, z = array(1 / 7, 1), array(1 / 7, 1)
half.all_reduce(x)
comm.all_reduce(z)
assert np.allclose(z.data, [3 / 7, 3], rtol=1e-6), z.data
assert x.data[0] != z.data[0] and np.allclose(x.data, z.data, rtol=1e-3), x.data
print("calls", flush=True)

# all_reduce_callback: NNabla's complete loop, while backward() runs.
mine = slice(rank, None, size)
whole = train(S.Momentum(0.2), slice(None))
events = []
submit = hvd.Group.exchange_async
def exchange_async(self, *args, **kwargs):
    events.append(kwargs["names"])
    return submit(self, *args, **kwargs)
hvd.Group.exchange_async = exchange_async
comm.clear_context_parameters()
x, t, loss = model(BATCH // size)
parameters = nn.get_parameters()
comm.add_context_and_parameters((None, parameters))
solver = S.Momentum(0.2)
solver.set_parameters(parameters)
early = lambda: comm.all_reduce_callback([v.grad for v in parameters.values()], 64, division=True)
for step in range(N_STEPS):
    x.d, t.d = IMAGES[step][mine], LABELS[step][mine]
    before = early() if step == 3 else None  # a forward pass comes first
    loss.forward(clear_no_need_grad=True)
    solver.zero_grad()
    events.clear()
    if step == 2:
        loss.backward(clear_buffer=True)
        comm.allreduce(division=True)
    else:
        loss.backward(
            clear_buffer=True,
            communicator_callbacks=before or early() if step != 3 else before,
            function_post_hook=lambda f: events.append(f.info.type_name),
        )
    g = nn.get_parameters()["c/affine/b"].g.copy()
    assert len(set(hvd.allgather_object(g.tobytes()))) == 1, step  # right after backward()
    solver.update()
found = values()
assert close(found, whole) and same_bits(found)
names = [e if isinstance(e, str) else e[0].split("/")[0] for e in events]
assert names.index("c") < names.index("ReLU") < names.index("b"), events
print("callback", flush=True)

# Two callbacks made first, each for its own pass.
u, v = (nn.Variable((2,), need_grad=True) for _ in range(2))
u.d = v.d = 1
u.grad.zero(), v.grad.zero()
both = [comm.all_reduce_callback(w.grad, 64, scale_grad=s) for w, s in ((u, 0.5), (v, 1))]
for w, callbacks, total in ((v, both[1], 3), (u, both[0], 1.5)):
    cost = F.sum(w * rank)
    cost.forward()
    cost.backward(communicator_callbacks=callbacks)
    assert w.g.tolist() == [total] * 2 and (w is u or u.grad.zeroing)

# Using one twice is an error with its name; an unused one is done before the solver's next step.
used = early()
loss.backward(communicator_callbacks=used)
message = raised(TypeError, lambda: loss.backward(communicator_callbacks=used))
assert "call_it_for_each_backward_anew" in message, message
solver.zero_grad()
loss.forward(), loss.backward()
early()
solver.update()
assert same_bits(values())
loss.forward(), solver.zero_grad()
few = [v.grad for v in parameters.values()][: 8 if rank == 0 else 4]
try:
    loss.backward(communicator_callbacks=comm.all_reduce_callback(few, 64))
except SystemError as error:
    assert isinstance(error.__cause__, hvd.MismatchError), repr(error.__cause__)
    print("<", " ".join(str(error.__cause__).split()), ">", flush=True)
comm.barrier()
if rank == 1:
    comm.abort()
comm.barrier()
"""
)


@pytest.mark.shows("overlap")
def test_every_call_of_the_communicator() -> None:
    result = run_ranks(COMMUNICATOR, 3, timeout_s=LIMIT_S, env=EARLY)
    for part in ("NNabla has none", "calls", "callback"):
        assert result.stdout.count(part) == 3, str(result)
    assert result.stdout.count("< ") == 3, str(result)
    assert re.search(r"rank 0 has '[abc]/", result.stdout), str(result)
    # abort() has ended the job.
    assert result.returncode != 0
    assert "rank 1 of 3 ends the job: Communicator.abort() was called" in result.stderr, str(result)


TUTORIAL = (
    MODEL
    + """
import nnabla.communicators as C
from nnabla.ext_utils import get_extension_context

ctx = get_extension_context(sys.argv[1], type_config="float", device_id="0")
comm = C.MultiProcessDataParalellCommunicator(ctx)
comm.init()
nn.set_default_context(ctx)
x, t, loss = model(BATCH // comm.size)
comm.add_context_and_parameters((ctx, nn.get_parameters()))
solver = S.Momentum(0.2)
solver.set_parameters(nn.get_parameters())
for step in range(N_STEPS):
    x.d, t.d = IMAGES[step][comm.rank :: comm.size], LABELS[step][comm.rank :: comm.size]
    loss.forward()
    solver.zero_grad()
    loss.backward()
    comm.allreduce(division=True)
    solver.update()
found = values()
assert close(found, train(S.Momentum(0.2), slice(None)))
print(f"rank {comm.rank} of {comm.size} trained", __name__, len(sys.argv))
"""
)


@pytest.mark.parametrize("context", ["cpu", "cudnn"])
def test_a_script_for_nnablas_communicator_runs_unchanged(context: str, tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(TUTORIAL)
    module = f"""
        import runpy, sys
        sys.argv[1:] = [{str(script)!r}, {context!r}]
        runpy.run_module("horo_lite.nnabla", run_name="__main__")
    """
    result = run_ranks(module, 2, timeout_s=LIMIT_S).check()
    for rank in range(2):
        assert f"rank {rank} of 2 trained __main__ 2" in result.stdout
    line = "[horo_lite] NNabla's extension 'cudnn' (nnabla-ext-cuda) is not installed"
    assert result.stderr.count(line) == (context == "cudnn"), str(result)


WATCH_DOG = """\
import sys
import time
import nnabla as nn
import nnabla.functions as F
import numpy as np
import horo_lite.nnabla as hvd

comm = hvd.MultiProcessDataParallelCommunicator()
comm.init()
w = nn.Variable((2,), need_grad=True)
w.d = 1
cost = F.sum(w * comm.rank)

def reduce():
    cost.forward()
    w.grad.zero()
    if sys.argv[1] == "all_reduce":
        cost.backward()
        comm.all_reduce(w.grad)
    else:
        cost.backward(communicator_callbacks=comm.all_reduce_callback(w.grad, 64))
    assert w.g.tolist() == [1, 1]

if comm.rank == 1:
    time.sleep(3)
comm.barrier()  # waits without a limit
reduce()
print("reduced", flush=True)
if comm.rank == 1:
    time.sleep(25)
reduce()
print("went on", flush=True)
"""


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce_callback"])
def test_the_watch_dog_ends_a_reduction_that_takes_too_long(call: str) -> None:
    env = {"NNABLA_MPI_WATCH_DOG_ENABLE": "1", "NNABLA_MPI_WATCH_DOG_TIMEOUT": "2"}
    result = run_ranks(WATCH_DOG, 2, args=[call], env=env, timeout_s=LIMIT_S)
    assert result.returncode != 0, str(result)
    assert result.stdout.count("reduced") == 2, str(result)
    assert "went on" not in result.stdout, str(result)
    assert re.search("StallError: .*rank 1 did not arrive", result.stderr), str(result)
    assert "increase NNABLA_MPI_WATCH_DOG_TIMEOUT" in result.stderr, str(result)


def test_the_example_learns_and_ends_with_the_same_bits_everywhere() -> None:
    result = run_ranks(EXAMPLE, 2, args=["--epochs", "4"], timeout_s=LIMIT_S).check()
    assert "parameters bit-identical on all 2 ranks" in result.stdout
    (accuracy,) = re.findall(r"^test accuracy (\d\.\d+)$", result.stdout, re.MULTILINE)
    assert float(accuracy) > 0.9
