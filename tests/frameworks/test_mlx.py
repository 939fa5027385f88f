"""MLX: its optimizers wrapped, its arrays and modules in every call."""

from __future__ import annotations

import pytest
from digits_runs import accuracy_of
from launch import Result, run_ranks

START = """
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

import horo_lite as hvd

world = hvd.init()
rank, size = world.rank, world.size

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.out = nn.Sequential(mx.tanh, nn.Linear(3 * 4 * 4, 5))

    def __call__(self, x):
        return self.out(nn.relu(self.conv(x)).reshape(len(x), -1))

def values(tree):
    tree = tree.parameters() if isinstance(tree, nn.Module) else tree
    return {name: np.array(x) for name, x in tree_flatten(tree)}

def copy_of(net):
    copy = Net()
    copy.update(tree_map(lambda x: mx.array(np.array(x)), net.parameters()))
    return copy

def samples(n, seed):
    rng = np.random.default_rng(seed)
    return mx.array(rng.standard_normal((n, 6, 6, 1)), mx.float32), mx.array(rng.integers(0, 5, n))

def loss_of(net, x, y):
    return nn.losses.cross_entropy(net(x), y, reduction="mean")

# Float32 sums in another order: a batch's mean of shards' means.
def check_close(mine, other):
    for name in other:
        np.testing.assert_allclose(mine[name], other[name], rtol=2e-5, atol=2e-6, err_msg=name)

def check_alike(net):
    everyone = hvd.allgather_object({name: a.tobytes() for name, a in values(net).items()})
    assert all(theirs == everyone[0] for theirs in everyone)

def refused(error, call, *words):
    try:
        call()
    except error as said:
        assert all(word in str(said) for word in words), said
    else:
        raise SystemExit(f"no {error.__name__}")

mx.random.seed(rank)
net = Net()
"""


def ranks(code: str, np: int) -> Result:
    return run_ranks(START + code + "\nprint('done', rank)\n", np, timeout_s=120).check()


@pytest.mark.shows("eager")
@pytest.mark.parametrize("np", [2, 3])
def test_training_is_that_of_one_process_on_the_whole_batch(np: int) -> None:
    ranks(
        """
before = values(net)
theirs = hvd.broadcast_object(before, size - 1)
assert rank == size - 1 or (theirs["conv.weight"] != before["conv.weight"]).all()
assert hvd.broadcast_parameters(net, root_rank=size - 1) is net
assert values(net).keys() == theirs.keys()
assert all((values(net)[name] == theirs[name]).all() for name in theirs)
hvd.check_in_sync(net)

alone = copy_of(net)
schedule = optim.cosine_decay(0.1, 10)
makers = [
    lambda: optim.SGD(learning_rate=schedule, momentum=0.9),
    lambda: optim.Adam(learning_rate=0.01, eps=1e-3, bias_correction=True),
    lambda: optim.MultiOptimizer(
        [optim.SGD(learning_rate=0.1), optim.AdamW(learning_rate=0.01, eps=1e-3)],
        [lambda name, x: "conv" in name],
    ),
]
for make in makers:
    inner, opt_alone = make(), make()
    opt = hvd.DistributedOptimizer(inner)
    assert isinstance(opt, type(inner)) and opt.__dict__ is inner.__dict__
    for step in range(4):
        x, y = samples(4 * size + 1, step)
        cuts = [0, 5, *range(9, 4 * size + 2, 4)]  # the first rank has one sample more
        mine, n = slice(cuts[rank], cuts[rank + 1]), cuts[rank + 1] - cuts[rank]
        loss, gradients = nn.value_and_grad(net, loss_of)(net, x[mine], y[mine])
        if step % 2:
            net.update(opt.apply_gradients(gradients, net, weight=n))
        else:
            own = values(gradients)
            doubled = tree_map(lambda g: 2 * g, gradients)  # computed after the exchange
            opt.update(net, gradients, weight=n)
            assert all((values(gradients)[name] == own[name]).all() for name in own)
            assert all((values(doubled)[name] == 2 * own[name]).all() for name in own)
        opt_alone.update(alone, nn.value_and_grad(alone, loss_of)(alone, x, y)[1])
    check_close(values(net), values(alone))
    check_alike(net)
    assert not np.array_equal(values(net)["conv.weight"], theirs["conv.weight"])
""",
        np,
    )


@pytest.mark.shows("fp16")
def test_what_travels_and_what_does_not() -> None:
    ranks(
        """
# fp16 on the wire: close to the average, and not the float32 one.
whole = np.stack([np.random.default_rng(r).standard_normal(300) for r in range(size)])
tree = lambda r: {"a": mx.array(whole[r], mx.float32), "b": [mx.array(1e-9 * whole[r], mx.float32)]}
half = hvd.average_gradients(tree(rank), compression=hvd.Compression.fp16)
for got, scale in ((half["a"], 1), (half["b"][0], 1e-9)):
    error = np.abs(np.array(got) / scale - whole.mean(0)) / np.abs(whole).max()
    assert 1e-6 < error.max() < 2**-10, error.max()

# Dtypes are kept, and gradients that only others have count as zeros.
mixed = {
    "half": mx.array([rank, 1.0, 2.0], mx.float16),
    "brain": mx.array([rank, 1.0, 3.0], mx.bfloat16),
    "missing": None if rank else mx.array([[2.0, 4.0]]),
    "broadcast": mx.broadcast_to(mx.array(2.0 * rank), (2, 3)),
    "view": mx.arange(6.0).reshape(2, 3).T * (rank + 1),
}
got = hvd.average_gradients(mixed)
assert got["half"].dtype == mx.float16 and got["half"].tolist() == [0.5, 1, 2]
assert got["brain"].dtype == mx.bfloat16 and got["brain"].tolist() == [0.5, 1, 3]
assert got["missing"].tolist() == [[1, 2]] and got["broadcast"].tolist() == [[1] * 3] * 2
assert got["view"].tolist() == [[0, 4.5], [1.5, 6], [3, 7.5]]

opt = hvd.DistributedOptimizer(optim.SGD(learning_rate=1.0))
bad = {"w": mx.ones(2), "deep": [{"b": mx.ones(2 + rank)}]}
step = lambda: opt.apply_gradients(bad, bad)
refused(hvd.MismatchError, step, "deep[0].b", "float32[2]", "float32[3]")
bad = {"w": mx.ones(2)} | ({} if rank else {"extra": mx.ones(2)})
refused(hvd.MismatchError, step, "extra", "rank 0")
bad = {"w": mx.array([1.0 + rank])}
assert step()["w"].item() == 1 + rank - 1.5
refused(TypeError, lambda: hvd.DistributedOptimizer(opt), "already a DistributedOptimizer")
inner = optim.SGD(learning_rate=1.0)
opt = hvd.DistributedOptimizer(inner, op=hvd.Sum)
again = lambda: hvd.DistributedOptimizer(inner, op=hvd.Average)
refused(ValueError, again, "already has a DistributedOptimizer")
bad = {"w": mx.ones(1)}
assert step()["w"].item() == 1 - 2  # by the sum

# A compiled step has no values to exchange yet; compile the gradients, and the rest, instead.
hvd.broadcast_parameters(net)
alone, opt = copy_of(net), hvd.DistributedOptimizer(optim.SGD(learning_rate=0.1))
whole_step = mx.compile(lambda x: opt.apply_gradients({"w": 2 * x}, {"w": x})["w"])
refused(RuntimeError, lambda: whole_step(mx.ones(2)), "inside mx.compile")

@partial(mx.compile, inputs=net.state, outputs=net.state)
def gradients(x, y):
    return nn.value_and_grad(net, loss_of)(net, x, y)

for n in range(3):
    x, y = samples(4 * size, n)
    opt.update(net, gradients(x[rank::size], y[rank::size])[1])
    optim.SGD(learning_rate=0.1).update(alone, nn.value_and_grad(alone, loss_of)(alone, x, y)[1])
check_close(values(net), values(alone))
""",
        2,
    )


def test_arrays_and_states_in_every_call() -> None:
    ranks(
        """
x = mx.array([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
total = hvd.allreduce(x, op=hvd.Sum)
assert type(total) is mx.array and total.tolist() == [[6, 12], [18, 24]]
assert x.tolist() == [[rank + 1, 2 * rank + 2], [3 * rank + 3, 4 * rank + 4]]
assert hvd.allgather(mx.full((rank + 1, 2), rank)).tolist() == [
    [r, r] for r in range(size) for _ in range(r + 1)
]
assert hvd.broadcast(mx.array([rank, 7]), 1).tolist() == [1, 7]
assert hvd.allreduce(mx.array(2.0 * rank, mx.bfloat16)).dtype == mx.bfloat16
assert hvd.allreduce(mx.array(1.0 * rank, mx.float64), op=hvd.Sum).item() == 3
hvd.allreduce_(x, op=hvd.Sum)
assert x.tolist() == [[6, 12], [18, 24]]

tree = {"bool": mx.array([rank == 2]), "more": [mx.array(rank), (mx.zeros((0, 2)), None)]}
assert hvd.broadcast_parameters(tree, root_rank=2) is tree
assert tree["bool"].item() and tree["more"][0].item() == 2 and tree["more"][1][0].shape == (0, 2)

# An optimizer that has not stepped yet continues as another rank's would.
opt = hvd.DistributedOptimizer(optim.Adam(learning_rate=0.1 * (rank + 1)))
hvd.broadcast_parameters(net)
if rank == 1:
    optim.Adam.apply_gradients(opt, {"w": mx.array([2.0])}, {"w": mx.ones(1)})
state = opt.state
hvd.broadcast_optimizer_state(opt, root_rank=1)
assert opt.state is state and all(type(x) is mx.array for _, x in tree_flatten(state))
assert opt.step.item() == 1 and abs(opt.learning_rate.item() - 0.2) < 1e-7
assert abs(opt.state["w"]["m"].item() - 0.2) < 1e-6
hvd.check_in_sync(opt.state)
refused(TypeError, lambda: hvd.broadcast_parameters(opt), "no parameters", ".state")
moved = opt.apply_gradients({"w": mx.array([1.0 * rank])}, {"w": mx.ones(1)})
assert len(set(hvd.allgather_object(moved["w"].item()))) == 1 and opt.step.item() == 2
opt.state["w"]["m"] += rank == 2
refused(hvd.DriftError, lambda: hvd.check_in_sync(opt.state), "w.m", "ank 2")

# Replicas are the same if what is trained is.
norm = nn.BatchNorm(2)
norm.running_mean += rank
assert hvd.check_in_sync({"norm": norm})
refused(hvd.DriftError, lambda: hvd.check_in_sync(norm, buffers=True), "'running_mean'")
refused(TypeError, lambda: hvd.broadcast_optimizer_state(norm), "is not an optimizer")
""",
        3,
    )


def test_digits() -> None:
    assert accuracy_of("mlx", epochs=4, timeout_s=120) > 0.93
