"""PaddlePaddle: its optimizers wrapped, its tensors and layers in every call."""

from __future__ import annotations

import pytest
from digits_runs import accuracy_of
from launch import Result, run_ranks

START = """
import numpy as np
import paddle
from paddle import nn

import horo_lite as hvd
from horo_lite.collectives import arrays

world = hvd.init()
rank, size = world.rank, world.size

def network():
    return nn.Sequential(
        nn.Conv2D(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.Linear(8, 5)
    )

def values(net):
    return {name: t.numpy().copy() for name, t in net.state_dict().items()}

def samples(n, seed):
    rng = np.random.default_rng(seed)
    x = paddle.to_tensor(rng.standard_normal((n, 1, 6, 6)).astype(np.float32))
    return x, paddle.to_tensor(rng.integers(0, 5, n))

def backward(net, x, y):
    nn.functional.cross_entropy(net(x), y).backward()

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

paddle.seed(rank)
net = network()
"""


def ranks(code: str, np: int) -> Result:
    return run_ranks(START + code + "\nprint('done', rank)\n", np, timeout_s=180).check()


@pytest.mark.shows("eager", "in place")
@pytest.mark.parametrize("np", [2, 3])
def test_training_is_that_of_one_process_on_the_whole_batch(np: int) -> None:
    ranks(
        """
before, tensors = values(net), list(net.state_dict().values())
theirs = hvd.broadcast_object(before, size - 1)
assert rank == size - 1 or (theirs["0.weight"] != before["0.weight"]).all()
hvd.broadcast_parameters(net, root_rank=size - 1)
assert all(new is old for new, old in zip(net.state_dict().values(), tensors))
assert all((values(net)[name] == theirs[name]).all() for name in theirs)

alone = network()
alone.set_state_dict(net.state_dict())
clip = nn.ClipGradByGlobalNorm(0.1)  # of the averages
make = {
    "momentum": lambda net: paddle.optimizer.Momentum(
        paddle.optimizer.lr.StepDecay(0.1, 2), 0.9, parameters=net.parameters(), grad_clip=clip
    ),
    "groups": lambda net: paddle.optimizer.Adam(
        learning_rate=0.01,
        epsilon=1e-3,
        parameters=[
            {"params": net[0].parameters()},
            {"params": net[3].parameters() + net[4].parameters(), "learning_rate": 0.1},
        ],
    ),
}
for kind in make:
    opt, opt_alone = make[kind](net), make[kind](alone)
    opt = hvd.DistributedOptimizer(
        opt, named_parameters=net.named_parameters(), check_every=2
    )
    assert isinstance(opt, paddle.optimizer.Optimizer)
    for step in range(4):
        x, y = samples(4 * size + 1, step)
        cuts = [0, 5, *range(9, 4 * size + 2, 4)]  # the first rank has one sample more
        mine, n = slice(cuts[rank], cuts[rank + 1]), cuts[rank + 1] - cuts[rank]
        opt.clear_grad()
        backward(net, x[mine], y[mine])
        if step == 1:
            own = [(p.grad.data_ptr(), p.grad.numpy().copy()) for p in net.parameters()]
            copied = arrays.bytes_copied
            opt.synchronize(weight=n)
            assert [p.grad.data_ptr() for p in net.parameters()] == [place for place, _ in own]
            assert all(
                (p.grad.numpy() != was).any() for p, (_, was) in zip(net.parameters(), own)
            )
            assert arrays.bytes_copied == copied
            with opt.skip_synchronize():
                opt.step()
        elif step == 2 and kind == "momentum":  # Paddle's minimize does not support groups
            opt.minimize(nn.functional.cross_entropy(net(x), y), weight=n)
        else:
            opt.step(weight=n)
        opt_alone.clear_grad()
        backward(alone, x, y)
        opt_alone.step()
        for each in (opt, opt_alone):
            if kind == "momentum":
                each._learning_rate.step()
    check_close(values(net), values(alone))
    check_alike(net)
assert (values(net)["0.weight"] != theirs["0.weight"]).any()
""",
        np,
    )


@pytest.mark.shows("fp16")
def test_what_travels_and_what_does_not() -> None:
    ranks(
        """
def parameters(*shapes, dtype="float32"):
    zero = nn.initializer.Constant(0.0)
    return [
        paddle.create_parameter(shape, dtype, default_initializer=zero) for shape in shapes
    ]

def wrapped(named, **options):
    opt = paddle.optimizer.SGD(1.0, parameters=list(named.values()))
    return hvd.DistributedOptimizer(opt, named_parameters=named.items(), **options)

# fp16 on the wire: close to the average, and not the float32 one.
named = dict(zip("ab", parameters([300], [300])))
opt = wrapped(named, compression=hvd.Compression.fp16)
whole = np.stack([np.random.default_rng(r).standard_normal(300) for r in range(size)])
whole = {"a": whole.astype(np.float32), "b": 1e-9 * whole.astype(np.float32)}
for name, p in named.items():
    p.grad = paddle.to_tensor(whole[name][rank])
opt.synchronize()
for name, p in named.items():
    error = np.abs(p.grad.numpy() - whole[name].mean(0)) / np.abs(whole[name]).max()
    assert 1e-6 < error.max() < 2**-10, error.max()

# bfloat16 is kept, and gradients that only others have count as zeros.
(brain,), (full,) = parameters([3], dtype="bfloat16"), parameters([2, 2])
opt = wrapped({"brain": brain, "full": full})
brain.grad = paddle.to_tensor([rank, 1.0, 3.0], dtype="bfloat16")
full.grad = None if rank else paddle.to_tensor([[2.0, 4.0], [6.0, 8.0]])
opt.synchronize()
assert brain.grad.dtype == paddle.bfloat16
assert brain.grad.astype("float32").tolist() == [0.5, 1, 3]
assert full.grad.tolist() == [[1, 2], [3, 4]]
opt.clear_grad()  # so this step's are exchanged as well
full.grad = paddle.full([2, 2], 2.0 * rank)
opt.step()
assert full.tolist() == [[-1, -1], [-1, -1]]

# Another shape on one rank, or a missing parameter: every rank gets an error, and can continue.
def mismatch(shapes, *words):
    named = dict(zip(shapes, parameters(*shapes.values())))
    for p in named.values():
        p.grad = paddle.ones_like(p)
    refused(hvd.MismatchError, wrapped(named).step, *words)

mismatch({"w": [2], "deep.b": [2 + rank]}, "deep.b", "float32[2]", "float32[3]")
mismatch({"w": [2]} | ({} if rank else {"extra": [2]}), "extra", "rank 0")

words = nn.Embedding(5, 2, sparse=True)
words(paddle.to_tensor([1, 2])).sum().backward()
opt = wrapped({"words": words.weight})
refused(TypeError, opt.step, "'words'", "sparse=False")
""",
        2,
    )


def test_tensors_and_states_in_every_call() -> None:
    ranks(
        """
x = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
total = hvd.allreduce(x, op=hvd.Sum)
assert isinstance(total, paddle.Tensor) and total.tolist() == [[6, 12], [18, 24]]
assert x.tolist() == [[rank + 1, 2 * rank + 2], [3 * rank + 3, 4 * rank + 4]]
hvd.allreduce_(x, op=hvd.Sum)
assert x.tolist() == total.tolist()
assert hvd.allgather(paddle.full([rank + 1, 2], rank)).tolist() == [
    [r, r] for r in range(size) for _ in range(r + 1)
]
assert hvd.broadcast(paddle.to_tensor([rank, 7]), 1).tolist() == [1, 7]
assert float(hvd.allreduce(paddle.to_tensor(2.0 * rank))) == size - 1
assert hvd.allreduce(paddle.to_tensor(2.0 * rank, dtype="bfloat16")).dtype == paddle.bfloat16

# Running means are part of a layer; tensors in trees are written in place.
norm = nn.BatchNorm1D(4)
norm._mean.set_value(paddle.full([4], float(rank)))
tree = {"norm": norm, "more": [paddle.to_tensor([rank])], "transposed": x.T * rank}
kept = tree["more"][0]
hvd.broadcast_parameters(tree, root_rank=2)
assert norm._mean.tolist() == [2] * 4 and tree["more"][0] is kept and kept.tolist() == [2]
assert tree["transposed"].tolist() == (total.T * 2).tolist()

# An optimizer that has not stepped yet continues as another rank's would.
hvd.broadcast_parameters(net)
schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
opt = paddle.optimizer.Adam(schedule, parameters=net.parameters())
for step in range(rank == 1):
    backward(net, *samples(3, step))
    opt.step()
    opt.clear_grad()
    schedule.step(5)
hvd.broadcast_parameters(net, root_rank=1)
opt = hvd.DistributedOptimizer(opt)
hvd.broadcast_optimizer_state(opt, root_rank=1)
assert schedule.last_epoch == 5
backward(net, *samples(4, rank))
opt.step()
check_alike(net)
hvd.check_in_sync(opt, state=True)
""",
        3,
    )


def test_digits() -> None:
    assert accuracy_of("paddle", epochs=4, timeout_s=180) > 0.93
