"""tinygrad: its optimizers wrapped, its tensors in every call."""

from __future__ import annotations

import shutil

import pytest
from digits_runs import accuracy_of
from launch import Result, run_ranks

# Kernels without optimization, which would take more time than it saves here.
ENV = {"NOOPT": "1"}
if not shutil.which("clang"):
    ENV["DEV"] = "CPU:X86"  # tinygrad's own assembler

START = """
import numpy as np
from tinygrad import GlobalCounters, Tensor, TinyJit, dtypes, nn
import horo_lite as hvd
from horo_lite.collectives import arrays
from horo_lite.adapters import adapter_of

world = hvd.init()
rank, size = world.rank, world.size
Tensor.training = True

class Net:
    def __init__(self):
        self.conv = nn.Conv2d(1, 3, 3)
        self.blocks = [{"out": nn.Linear(3 * 4 * 4, 5)}]

    def __call__(self, x):
        return self.blocks[0]["out"](self.conv(x).relu().flatten(1))

def named(net):
    return nn.state.get_state_dict(net)

def values(net):
    return {name: t.numpy() for name, t in named(net).items()}

def copy_of(net):
    copy = Net()
    for name, t in named(copy).items():
        t.assign(Tensor(values(net)[name])).realize()
    return copy

def samples(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 1, 6, 6)).astype(np.float32)
    return x, rng.integers(0, 5, n)

def loss_of(net, x, y):
    return net(Tensor(x)).sparse_categorical_crossentropy(Tensor(y))

def address(t):
    return adapter_of(t).value(t).ctypes.data

# Float32 sums in another order: a batch's mean of shards' means.
def check_close(mine, other):
    for name in other:
        np.testing.assert_allclose(mine[name], other[name], rtol=2e-5, atol=2e-6, err_msg=name)

def check_alike(net):
    everyone = hvd.allgather_object({name: a.tobytes() for name, a in values(net).items()})
    assert all(theirs == everyone[0] for theirs in everyone)

Tensor.manual_seed(rank)
net = Net()
"""


def ranks(code: str, np: int) -> Result:
    return run_ranks(START + code + "\nprint('done', rank)\n", np, env=ENV, timeout_s=180).check()


@pytest.mark.shows("eager", "in place")
@pytest.mark.parametrize("np", [2, 3])
def test_training_is_that_of_one_process_on_the_whole_batch(np: int) -> None:
    ranks(
        """
# From the last rank, whose values no other rank has; the tensors remain the same objects.
before, tensors = values(net), list(named(net).values())
theirs = hvd.broadcast_object(before, size - 1)
assert rank == size - 1 or (theirs["conv.weight"] != before["conv.weight"]).all()
hvd.broadcast_parameters(net, root_rank=size - 1)
assert all(new is old for new, old in zip(named(net).values(), tensors))
assert all((values(net)[name] == theirs[name]).all() for name in theirs)

alone = copy_of(net)
makers = {
    "momentum": lambda net: nn.optim.SGD(nn.state.get_parameters(net), lr=0.1, momentum=0.9),
    "group": lambda net: nn.optim.OptimizerGroup(
        nn.optim.SGD([net.conv.weight, net.conv.bias], lr=0.1),
        nn.optim.Adam(nn.state.get_parameters(net.blocks), lr=0.01, eps=1e-3),
    ),
}
for kind, make in makers.items():
    opt, opt_alone = hvd.DistributedOptimizer(make(net), check_every=2), make(alone)
    assert isinstance(opt, nn.optim.Optimizer)
    for step in range(3):
        x, y = samples(4 * size + 1, step)
        cuts = [0, 5, *range(9, 4 * size + 2, 4)]  # the first rank has one sample more
        mine = slice(cuts[rank], cuts[rank + 1])
        opt.zero_grad()
        loss_of(net, x[mine], y[mine]).backward()
        if step == 1:
            grads = [p.grad.realize() for p in opt.params]
            own = [(address(g), g.numpy()) for g in grads]
            copied = arrays.bytes_copied
            opt.synchronize(weight=cuts[rank + 1] - cuts[rank])
            # The same objects and memory, now with the average gradients.
            assert all(p.grad is g for p, g in zip(opt.params, grads))
            assert [address(g) for g in grads] == [place for place, _ in own]
            assert all((g.numpy() != was).any() for g, (_, was) in zip(grads, own))
            assert arrays.bytes_copied == copied
            with opt.skip_synchronize():
                opt.step()
        else:
            opt.step(weight=cuts[rank + 1] - cuts[rank])
        opt_alone.zero_grad()
        loss_of(alone, x, y).backward()
        opt_alone.step()
    check_close(values(net), values(alone))
    check_alike(net)
""",
        np,
    )


def test_gradients_are_computed_once_and_in_memory_of_their_own() -> None:
    ranks(
        """
opt = hvd.DistributedOptimizer(nn.optim.SGD(nn.state.get_parameters(net), lr=0.1))
x, y = samples(4, rank)

def kernels(realize):
    opt.zero_grad()
    loss_of(net, x, y).backward()
    before = GlobalCounters.kernel_count
    realize()
    return GlobalCounters.kernel_count - before

alone = kernels(lambda: Tensor.realize(*[p.grad for p in opt.params]))
assert 0 < kernels(opt.synchronize) <= alone, "each gradient ran the backward pass again"
grads = lambda: hvd.average_gradients([p.grad for p in opt.params])
assert kernels(grads) <= alone + len(opt.params)

# A gradient that is a view of something else, and one tensor as the gradient of two.
data = Tensor(np.arange(6.0).reshape(3, 2) + rank).realize()
a, b = Tensor.zeros(2).contiguous(), Tensor.zeros(2).contiguous()
opt = hvd.DistributedOptimizer(nn.optim.SGD([a, b], lr=1.0))
a.grad = b.grad = data.cast("float")[1]
opt.step()
assert (data.numpy() == np.arange(6.0).reshape(3, 2) + rank).all()
assert a.tolist() == b.tolist() == [-2.5, -3.5]

# Several passes, then clipping, then the step: as in one process on the whole batch.
def clip(opt):
    norm = sum(p.grad.square().sum().item() for p in opt.params) ** 0.5
    assert norm > 0.1
    for p in opt.params:
        p.grad = p.grad * (0.1 / norm)

hvd.broadcast_parameters(net)
alone = copy_of(net)
make = lambda net: nn.optim.SGD(nn.state.get_parameters(net), lr=0.1)
opt, opt_alone = hvd.DistributedOptimizer(make(net)), make(alone)
x, y = samples(4 * size, 7)
opt.zero_grad(), opt_alone.zero_grad()
for i in (rank, rank + size):
    (loss_of(net, x[i :: 2 * size], y[i :: 2 * size]) / 2).backward()
opt.synchronize()
clip(opt)
with opt.skip_synchronize():
    opt.step()
loss_of(alone, x, y).backward()
clip(opt_alone)
opt_alone.step()
check_close(values(net), values(alone))
check_alike(net)
""",
        2,
    )


def test_compiled_steps_exchange_in_between() -> None:
    ranks(
        """
hvd.broadcast_parameters(net)
alone = copy_of(net)
make = lambda net: nn.optim.Adam(nn.state.get_parameters(net), lr=0.01, eps=1e-3)
opt, opt_alone = make(net), make(alone)

@TinyJit
def gradients(x, y):
    opt.zero_grad()
    loss = net(x).sparse_categorical_crossentropy(y).backward()
    return loss, *[p.grad for p in opt.params]

@TinyJit
def apply(*gradients):
    for p, g in zip(opt.params, gradients):
        p.grad = g
    opt.step()

for step in range(5):
    x, y = samples(4 * size, step)
    mine = slice(4 * rank, 4 * rank + 4)
    loss, *grads = gradients(Tensor(x[mine]).realize(), Tensor(y[mine]).realize())
    apply(*hvd.average_gradients(grads))
    opt_alone.zero_grad()
    loss_of(alone, x, y).backward()
    opt_alone.step()
check_close(values(net), values(alone))
check_alike(net)

# Inside, it would be skipped whenever the step is replayed: an error when the step is recorded.
opt = hvd.DistributedOptimizer(make(net))

@TinyJit
def whole_step(x, y):
    opt.zero_grad()
    loss = net(x).sparse_categorical_crossentropy(y).backward()
    opt.step()
    return loss

try:
    for step in range(3):
        whole_step(Tensor(x).realize(), Tensor(y).realize())
    raise SystemExit("a step without its exchange")
except RuntimeError as error:
    assert step == 1 and "inside a TinyJit" in str(error), error
""",
        2,
    )


@pytest.mark.shows("fp16")
def test_what_travels_and_what_does_not() -> None:
    ranks(
        """
# fp16 on the wire: close to the average, and not the float32 one.
params = [Tensor.zeros(300).contiguous() for _ in range(2)]
opt = hvd.DistributedOptimizer(nn.optim.SGD(params, lr=1.0), compression=hvd.Compression.fp16)
rng = [np.random.default_rng(r) for r in range(size)]
whole = [np.stack([r.standard_normal(300) for r in rng]).astype(np.float32) for _ in params]
whole[1] *= 1e-9  # float16 has no such numbers
for p, g in zip(params, whole):
    p.grad = Tensor(g[rank])
opt.synchronize()
for p, g in zip(params, whole):
    error = np.abs(p.grad.numpy() - g.mean(0)) / np.abs(g).max()
    assert 1e-6 < error.max() < 2**-10, error.max()
with opt.skip_synchronize():
    opt.step()

# float16 is kept, and gradients that only others have count as zeros.
half, full = Tensor.ones(4).half().contiguous(), Tensor.ones(2, 2).contiguous()
opt = hvd.DistributedOptimizer(nn.optim.SGD([half, full], lr=1.0))
half.grad = Tensor([rank, 1, 2, 3]).half()
full.grad = None if rank else Tensor([[2.0, 4.0], [6.0, 8.0]])
opt.synchronize()
assert half.grad.dtype == dtypes.half and half.grad.tolist() == [0.5, 1, 2, 3]
assert full.grad.tolist() == [[1, 2], [3, 4]]

# Another shape on one rank, or a missing parameter: every rank gets an error, and can continue.
def refused(parameters, *words):
    parameters = {name: Tensor.ones(*shape).contiguous() for name, shape in parameters.items()}
    for p in parameters.values():
        p.grad = Tensor.ones(*p.shape)
    opt = nn.optim.SGD(list(parameters.values()), lr=1.0)
    opt = hvd.DistributedOptimizer(opt, named_parameters=parameters.items())
    try:
        opt.step()
    except hvd.MismatchError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise SystemExit("stepped")

refused({"w": [2], "deep.b": [2 + rank]}, "deep.b", "float32[2]", "float32[3]")
refused({"w": [2]} | ({} if rank else {"extra": [2]}), "extra", "rank 0")

spread = Tensor.ones(4).contiguous().shard(("CPU:0", "CPU:1"), axis=0)
try:
    hvd.allreduce(spread)
    raise SystemExit("half of it")
except TypeError as error:
    assert "CPU:1" in str(error), error
""",
        2,
    )


def test_tensors_and_states_in_every_call() -> None:
    ranks(
        """
x = Tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1)
total = hvd.allreduce(x, op=hvd.Sum)
assert type(total) is Tensor and total.tolist() == [[6, 12], [18, 24]]
assert x.tolist() == [[rank + 1, 2 * rank + 2], [3 * rank + 3, 4 * rank + 4]]
assert hvd.allgather(Tensor.full((rank + 1, 2), rank)).tolist() == [
    [r, r] for r in range(size) for _ in range(r + 1)
]
assert hvd.broadcast(Tensor([rank, 7]), 1).tolist() == [1, 7]
assert hvd.allreduce(Tensor(2.0 * rank)).item() == size - 1

# In place, also in lazy tensors, and in tensors without their own memory.
lazy, constant, empty = Tensor([1.0, 2.0]) * rank, Tensor.zeros(3) + rank, Tensor.zeros(0, 2)
tree = {"lazy": lazy, "more": [constant, {"empty": empty}], "bytes": Tensor([rank]).cast("uchar")}
assert hvd.broadcast_parameters(tree, root_rank=2) is tree and tree["lazy"] is lazy
assert lazy.tolist() == [2, 4] and constant.tolist() == [2, 2, 2] and tree["bytes"].item() == 2
assert (lazy + 1).tolist() == [3, 5]

# An optimizer's state continues as another rank's would; its tensors remain the same objects.
opt = nn.optim.Adam(nn.state.get_parameters(net), lr=0.1 * (rank + 1))
norm = nn.BatchNorm(2)
norm.running_mean += rank
assert hvd.check_in_sync({"norm": norm})
try:
    hvd.check_in_sync(norm, buffers=True)
    raise SystemExit("in sync")
except hvd.DriftError as error:
    assert "'running_mean'" in str(error), error
for step in range(rank):
    opt.zero_grad()
    loss_of(net, *samples(3, step)).backward()
    opt.step()
opt = hvd.DistributedOptimizer(opt)
moments, lr = list(opt.m), opt.lr
hvd.broadcast_parameters(opt)
hvd.broadcast_optimizer_state(opt, root_rank=1)
assert all(m is was for m, was in zip(opt.m, moments)) and opt.lr is lr
assert abs(lr.item() - 0.2) < 1e-7 and abs(opt.b1_t.item() - 0.9) < 1e-7
assert any(m.numpy().any() for m in opt.m)
hvd.check_in_sync(opt, state=True)
opt.m[0].assign(opt.m[0] + (rank == 2)).realize()
try:
    hvd.check_in_sync(opt, state=True)
    raise SystemExit("in sync")
except hvd.DriftError as error:
    assert "'m.0'" in str(error) and "rank 2" in str(error).lower(), error

# The same for a group of them; different options on a rank are an error.
make = lambda: nn.optim.OptimizerGroup(
    nn.optim.SGD([net.conv.weight], lr=1.0 + rank, momentum=0.9),
    nn.optim.SGD([net.conv.bias], lr=3.0),
)
group = make()
group[0].b[0].assign(Tensor.full((3, 1, 3, 3), float(rank))).realize()
hvd.broadcast_optimizer_state(group, root_rank=2)
assert group[0].b[0].numpy().min() == 2 and group[0].lr.item() == 3
lone = nn.optim.SGD([net.conv.weight], lr=1.0, momentum=0.9 if rank else 0.0)
try:
    hvd.broadcast_optimizer_state(lone)
    assert rank == 0
except ValueError as error:
    assert rank and "keeps lr, b.0, and the other lr" in str(error), error

# Committed and restored, as in elastic training.
state = hvd.elastic.State(net=net, opt=group)
state.commit()
group[0].b[0].assign(Tensor.zeros(3, 1, 3, 3)).realize()
net.conv.bias.assign(Tensor.full((3,), 9.0)).realize()
state.restore()
assert group[0].b[0].numpy().min() == 2 and net.conv.bias.numpy().max() < 9
""",
        3,
    )


def test_digits() -> None:
    assert accuracy_of("tinygrad", epochs=1, env=ENV, timeout_s=240) > 0.8
