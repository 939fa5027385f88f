"""tinygrad: its optimizers wrapped, its tensors in every call."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from contract import Divisible, raises, samples
from digits_runs import accuracy_of
from worlds import on_ranks

# Kernels without optimization, which would take more time than it saves here. 0.14 reads TRAINING
# as Tensor.training, and compiles in PARALLEL processes, which a rank would leave behind.
ENV = {"NOOPT": "1", "TRAINING": "1", "PARALLEL": "0"}
if not shutil.which("clang"):
    ENV["DEV"] = "CPU:X86"  # tinygrad's own assembler
os.environ.update(ENV)

from tinygrad import GlobalCounters, Tensor, TinyJit, nn  # noqa: E402

import horo_lite as hvd  # noqa: E402
from horo_lite.adapters import adapter_of  # noqa: E402

pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]
Tensor.training = True


class Net:
    def __init__(self) -> None:
        self.conv = nn.Conv2d(1, 3, 3)
        self.blocks = [{"out": nn.Linear(3 * 4 * 4, 5)}]

    def __call__(self, x: Any) -> Any:
        return self.blocks[0]["out"](self.conv(x).relu().flatten(1))


def loss_of(net: Net, x: Any, y: Any) -> Any:
    return net(Tensor(x)).sparse_categorical_crossentropy(Tensor(y))


@pytest.mark.shows("eager", "in place", "fp16")
class TestTinygrad(Divisible):
    env: ClassVar = ENV
    optimizers = ("momentum", "group")
    dtypes = ("float16",)
    skips_missing = False

    def network(self, seed: int) -> Any:
        Tensor.manual_seed(seed)
        net = Net()
        Tensor.realize(*nn.state.get_parameters(net))
        return net

    def parameters(self, values: Any) -> Any:
        return {name: Tensor(x).contiguous().realize() for name, x in values.items()}

    def arrays(self, net: Any) -> Any:
        return nn.state.get_state_dict(net)

    def optimizer(self, kind: str, net: Any) -> Any:
        params = list(self.arrays(net).values())
        if kind == "group":
            adam = nn.optim.Adam(nn.state.get_parameters(net.blocks), lr=0.01, eps=1e-3)
            return nn.optim.OptimizerGroup(nn.optim.SGD(params[:2], lr=0.1), adam)
        if kind == "adam":
            return nn.optim.Adam(params, lr=0.01, eps=1e-3)
        return nn.optim.SGD(params, lr=1.0) if kind == "sgd" else nn.optim.SGD(params, 0.1, 0.9)

    def parts(self, net: Any) -> Any:
        return partial(nn.optim.Adam, lr=0.01, eps=1e-3), nn.state.get_parameters(net)

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss_of(net, x, y).backward()

    def given(self, net: Any, gradients: Any) -> Any:
        for name, p in net.items():
            p.grad = None if gradients[name] is None else Tensor(gradients[name])

    def array(self, x: Any) -> Any:
        return Tensor(x)

    def held(self, net: Any) -> Any:
        return [p.grad.realize() for p in nn.state.get_parameters(net)]

    def place(self, gradient: Any) -> Any:
        return id(gradient), adapter_of(gradient).value(gradient).ctypes.data


CONTRACT = TestTinygrad()


def once() -> None:
    """Gradients are computed once, and in memory of their own."""
    world = hvd.init()
    rank, size = world.rank, world.size
    net = CONTRACT.network(0)
    opt = hvd.DistributedOptimizer(nn.optim.SGD(nn.state.get_parameters(net), lr=0.1))
    x, y = samples(4, rank)

    def kernels(realize: Any) -> int:
        CONTRACT.gradients(net, opt, x, y)
        before = GlobalCounters.kernel_count
        realize()
        return GlobalCounters.kernel_count - before

    alone = kernels(lambda: Tensor.realize(*[p.grad for p in opt.params]))
    assert 0 < kernels(opt.synchronize) <= alone, "each gradient ran the backward pass again"
    grads = kernels(lambda: hvd.average_gradients([p.grad for p in opt.params]))
    assert grads <= alone + len(opt.params)

    # A gradient that is a view of something else, and one tensor as the gradient of two.
    data = Tensor(np.arange(6.0).reshape(3, 2) + rank).realize()
    a, b = Tensor.zeros(2).contiguous(), Tensor.zeros(2).contiguous()
    opt = hvd.DistributedOptimizer(nn.optim.SGD([a, b], lr=1.0))
    a.grad = b.grad = data.cast("float")[1]
    opt.step()
    assert (data.numpy() == np.arange(6.0).reshape(3, 2) + rank).all()
    assert a.tolist() == b.tolist() == [-2.5, -3.5]

    # Several passes, then clipping, then the step: as in one process on the whole batch.
    def clip(opt: Any) -> None:
        norm = sum(p.grad.square().sum().item() for p in opt.params) ** 0.5
        assert norm > 0.1
        for p in opt.params:
            p.grad = p.grad * (0.1 / norm)

    net, other = CONTRACT.network(0), CONTRACT.network(0)
    opt, opt_alone = (nn.optim.SGD(nn.state.get_parameters(one), lr=0.1) for one in (net, other))
    opt = hvd.DistributedOptimizer(opt)
    x, y = samples(4 * size, 7)
    opt.zero_grad()
    for i in (rank, rank + size):
        (loss_of(net, x[i :: 2 * size], y[i :: 2 * size]) / 2).backward()
    opt.synchronize()
    clip(opt)
    with opt.skip_synchronize():
        opt.step()
    CONTRACT.gradients(other, opt_alone, x, y)
    clip(opt_alone)
    opt_alone.step()
    CONTRACT.check_close(net, other)
    CONTRACT.check_alike(net, world.group)


def test_gradients_are_computed_once_and_in_memory_of_their_own() -> None:
    on_ranks(once, 2, job_env=ENV, timeout_s=120)


def compiled() -> None:
    """Gradients and steps are compiled apart, with the exchange in between."""
    world = hvd.init()
    size = world.size
    net, alone = CONTRACT.network(0), CONTRACT.network(0)
    opt, opt_alone = CONTRACT.optimizer("adam", net), CONTRACT.optimizer("adam", alone)

    @TinyJit
    def gradients(x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = net(x).sparse_categorical_crossentropy(y).backward()
        return loss, *[p.grad for p in opt.params]

    @TinyJit
    def apply(*gradients: Any) -> None:
        for p, g in zip(opt.params, gradients, strict=True):
            p.grad = g
        opt.step()

    for step in range(5):
        x, y = samples(4 * size, step)
        mine = slice(4 * world.rank, 4 * world.rank + 4)
        _, *grads = gradients(Tensor(x[mine]).realize(), Tensor(y[mine]).realize())
        apply(*hvd.average_gradients(grads))
        CONTRACT.gradients(alone, opt_alone, x, y)
        opt_alone.step()
    CONTRACT.check_close(net, alone)
    CONTRACT.check_alike(net, world.group)

    # Inside, it would be skipped whenever the step is replayed: an error when it is recorded.
    whole = hvd.DistributedOptimizer(CONTRACT.optimizer("adam", net))

    @TinyJit
    def whole_step(x: Any, y: Any) -> Any:
        whole.zero_grad()
        loss = net(x).sparse_categorical_crossentropy(y).backward()
        whole.step()
        return loss

    whole_step(Tensor(x).realize(), Tensor(y).realize())
    again = Tensor(x).realize(), Tensor(y).realize()
    raises(RuntimeError, lambda: whole_step(*again), "inside a TinyJit")


def test_compiled_steps_exchange_in_between() -> None:
    on_ranks(compiled, 2, job_env=ENV, timeout_s=120)


def micro_batches() -> None:
    """The bits of all ranks are those of one, also with dropout."""
    world = hvd.init(threads=1)
    alone = [hvd.new_group([r]) for r in range(world.size)][world.rank]
    found = []
    for group in (None, alone):
        Tensor.manual_seed(0)
        net = Net()  # lazy until its values are used
        opt = nn.optim.SGD(nn.state.get_parameters(net), lr=0.1)
        batches = hvd.MicroBatches(4, opt, group=group)
        x, y = samples(8, 1)
        for step in range(2):
            for batch in batches(step):
                rows = batch.rows(x)
                noisy = Tensor(x[rows]).dropout(0.3)
                net(noisy).sparse_categorical_crossentropy(Tensor(y[rows])).backward()
            opt.step()
        found.append(hvd.fingerprint(net))
    assert found[0] == found[1]


def test_micro_batches_have_the_same_bits_on_any_number_of_ranks() -> None:
    on_ranks(micro_batches, 3, job_env=ENV, timeout_s=120)


def states() -> None:
    """Lazy tensors, and states that are saved, compared and sent, in their own objects."""
    rank = hvd.init().rank
    lazy, constant = Tensor([1.0, 2.0]) * rank, Tensor.zeros(3) + rank
    tree = {"lazy": lazy, "more": [constant], "bytes": Tensor([rank]).cast("uchar")}
    assert hvd.broadcast_parameters(tree, root_rank=2)["lazy"] is lazy
    assert lazy.tolist() == [2, 4]
    assert constant.tolist() == [2, 2, 2]
    assert tree["bytes"].item() == 2
    assert (lazy + 1).tolist() == [3, 5]
    spread = Tensor.ones(4).contiguous().shard(("CPU:0", "CPU:1"), axis=0)
    raises(TypeError, lambda: hvd.allreduce(spread), "CPU:1")

    norm = nn.BatchNorm(2)
    norm.running_mean += rank
    assert hvd.check_in_sync({"norm": norm})
    raises(hvd.DriftError, lambda: hvd.check_in_sync(norm, buffers=True), "'running_mean'")
    net = CONTRACT.network(0)
    opt = nn.optim.Adam(nn.state.get_parameters(net), lr=0.1 * (rank + 1))
    for step in range(rank):
        CONTRACT.gradients(net, opt, *samples(3, step))
        opt.step()
    opt = hvd.DistributedOptimizer(opt)
    moments, lr = list(opt.m), opt.lr
    hvd.broadcast_parameters(opt)
    hvd.broadcast_optimizer_state(opt, root_rank=1)
    assert all(m is was for m, was in zip(opt.m, moments, strict=True))
    assert opt.lr is lr
    assert abs(lr.item() - 0.2) < 1e-7
    assert abs(opt.b1_t.item() - 0.9) < 1e-7
    assert any(m.numpy().any() for m in opt.m)
    hvd.check_in_sync(opt, state=True)
    opt.m[0].assign(opt.m[0] + (rank == 2)).realize()
    raises(hvd.DriftError, lambda: hvd.check_in_sync(opt, state=True), "'m.0'", "ank 2")

    # A fused one sees all parameters as one tensor, of which it has one trust ratio.
    divided = partial(hvd.DistributedOptimizer, parameters=list(opt.params), shard_state=True)
    lars, lamb = (partial(kind, fused=True) for kind in (nn.optim.LARS, nn.optim.LAMB))
    raises(ValueError, lambda: divided(lars), "fused=True")
    raises(ValueError, lambda: divided(lambda p: nn.optim.OptimizerGroup(lamb(p))), "fused=True")
    divided(partial(nn.optim.Adam, fused=True))
    divided(partial(nn.optim.LAMB, fused=False))

    # The same for a group of them; different options on a rank are an error.
    group = nn.optim.OptimizerGroup(
        nn.optim.SGD([net.conv.weight], lr=1.0 + rank, momentum=0.9),
        nn.optim.SGD([net.conv.bias], lr=3.0),
    )
    group[0].b[0].assign(Tensor.full((3, 1, 3, 3), float(rank))).realize()
    hvd.broadcast_optimizer_state(group, root_rank=2)
    assert group[0].b[0].numpy().min() == 2
    assert group[0].lr.item() == 3
    lone = nn.optim.SGD([net.conv.weight], lr=1.0, momentum=0.9 if rank else 0.0)
    if rank:
        words = "keeps lr, b.0, and the other lr"
        raises(ValueError, lambda: hvd.broadcast_optimizer_state(lone), words)
    else:
        hvd.broadcast_optimizer_state(lone)

    # Committed and restored, as in elastic training.
    state = hvd.elastic.State(net=net, opt=group)
    state.commit()
    group[0].b[0].assign(Tensor.zeros(3, 1, 3, 3)).realize()
    net.conv.bias.assign(Tensor.full((3,), 9.0)).realize()
    state.restore()
    assert group[0].b[0].numpy().min() == 2
    assert net.conv.bias.numpy().max() < 9


def test_states_are_sent_compared_and_saved() -> None:
    on_ranks(states, 3, job_env=ENV, timeout_s=120)


def test_digits() -> None:
    assert accuracy_of("tinygrad", epochs=1, env=ENV, timeout_s=240) > 0.8
