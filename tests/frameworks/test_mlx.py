"""MLX: its optimizers wrapped, its arrays and modules in every call."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from contract import Contract, raises, samples
from digits_runs import accuracy_of
from mlx.utils import tree_flatten, tree_unflatten
from worlds import on_ranks

import horo_lite
import horo_lite.mlx as hvd
from horo_lite.adapters import adapter_of

pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.out = nn.Sequential(mx.tanh, nn.Linear(3 * 4 * 4, 5))

    def __call__(self, x: Any) -> Any:
        return self.out(nn.relu(self.conv(x)).reshape(len(x), -1))


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return nn.losses.cross_entropy(net(x), y, reduction="mean")


def values(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(adapter_of(x).value(x)) for name, x in arrays.items()}


@pytest.mark.shows("eager", "fp16")
class TestMlx(Contract):
    face = hvd
    optimizers = ("multi", "momentum", "adam")
    dtypes = ("float16", "bfloat16")
    skips_missing = False
    keeps_objects = False

    def network(self, seed: int) -> Any:
        mx.random.seed(seed)
        return Net()

    def parameters(self, values: Any) -> Any:
        module = nn.Module()
        for name, x in values.items():
            module[name] = self.array(x)
        return module

    def arrays(self, net: Any) -> Any:
        return dict(tree_flatten(net.parameters()))

    def optimizer(self, kind: str, net: Any) -> Any:
        if kind == "multi":
            both = [optim.SGD(learning_rate=0.1), optim.AdamW(learning_rate=0.01, eps=1e-3)]
            return optim.MultiOptimizer(both, [lambda name, x: "conv" in name])
        if kind == "adam":
            return optim.Adam(learning_rate=0.01, eps=1e-3, bias_correction=True)
        if kind == "sgd":
            return optim.SGD(learning_rate=1.0)
        return optim.SGD(learning_rate=optim.cosine_decay(0.1, 10), momentum=0.9)

    def wrap(self, net: Any, optimizer: Any, **options: Any) -> Any:
        opt = hvd.DistributedOptimizer(optimizer, **options)
        assert opt.__dict__ is optimizer.__dict__
        return opt

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        x = mx.array(np.moveaxis(x, 1, -1))
        return nn.value_and_grad(net, loss_of)(net, x, mx.array(y))[1]

    def given(self, net: Any, gradients: Any) -> Any:
        return {k: None if g is None else self.array(g) for k, g in gradients.items()}

    def step(self, net: Any, optimizer: Any, gradients: Any, **weight: float) -> None:
        present = {name: g for name, g in tree_flatten(gradients) if g is not None}
        own = values(present)
        doubled = {name: 2 * g for name, g in present.items()}  # computed after the exchange
        if "momentum" in optimizer.state:
            optimizer.update(net, gradients, **weight)
        else:
            net.update(optimizer.apply_gradients(gradients, net, **weight))
        assert all((values(present)[name] == g).all() for name, g in own.items())
        assert all((values(doubled)[name] == 2 * g).all() for name, g in own.items())

    def array(self, x: Any) -> Any:
        return adapter_of(mx.zeros(1)).from_numpy(x, None)

    def numpy(self, x: Any) -> Any:
        return adapter_of(x).value(x)


CONTRACT = TestMlx()


def what_travels() -> None:
    """Views and broadcast arrays among gradients, and compiled functions."""
    world = hvd.init()
    rank, size = world.rank, world.size
    got = hvd.average_gradients(
        {
            "broadcast": mx.broadcast_to(mx.array(2.0 * rank), (2, 3)),
            "view": mx.arange(6.0).reshape(2, 3).T * (rank + 1),
        }
    )
    assert got["broadcast"].tolist() == [[1] * 3] * 2
    assert got["view"].tolist() == [[0, 4.5], [1.5, 6], [3, 7.5]]
    opt = hvd.DistributedOptimizer(optim.SGD(learning_rate=1.0))
    bad = {"w": mx.ones(2), "deep": [{"b": mx.ones(2 + rank)}]}
    step = partial(opt.apply_gradients, bad, bad)
    raises(hvd.MismatchError, step, "deep[0].b", "float32[2]", "float32[3]")

    # A compiled step has no values to exchange yet; compile the gradients, and the rest, instead.
    net, alone = CONTRACT.network(0), CONTRACT.network(0)
    opt = hvd.DistributedOptimizer(optim.SGD(learning_rate=0.1))
    whole_step = mx.compile(lambda x: opt.apply_gradients({"w": 2 * x}, {"w": x})["w"])
    raises(RuntimeError, lambda: whole_step(mx.ones(2)), "inside mx.compile")

    @partial(mx.compile, inputs=net.state, outputs=net.state)
    def gradients(x: Any, y: Any) -> Any:
        return nn.value_and_grad(net, loss_of)(net, x, y)

    for n in range(3):
        x, y = (mx.array(a) for a in samples(4 * size, n))
        x = x.reshape(-1, 6, 6, 1)
        opt.update(net, gradients(x[rank::size], y[rank::size])[1])
        found = nn.value_and_grad(alone, loss_of)(alone, x, y)[1]
        optim.SGD(learning_rate=0.1).update(alone, found)
    CONTRACT.check_close(net, alone)


def test_what_travels_and_compiled_functions() -> None:
    on_ranks(what_travels, 2, timeout_s=120)


def states() -> None:
    rank = hvd.init().rank
    assert hvd.allreduce(mx.array(2.0 * rank, mx.bfloat16)).dtype == mx.bfloat16
    assert hvd.allreduce(mx.array(1.0 * rank, mx.float64), op=hvd.Sum).item() == 3
    x = mx.ones((2, 2)) * rank
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.tolist() == [[3, 3], [3, 3]]
    tree = {"bool": mx.array([rank == 2]), "more": [mx.array(rank), (mx.zeros((0, 2)), None)]}
    assert hvd.broadcast_parameters(tree, root_rank=2) is tree
    assert tree["bool"].item()
    assert tree["more"][0].item() == 2
    assert tree["more"][1][0].shape == (0, 2)

    # An optimizer that has not stepped yet continues as another rank's would.
    net = CONTRACT.network(rank)
    assert horo_lite.broadcast_parameters(net) is net
    hvd.check_in_sync(net)
    opt = hvd.DistributedOptimizer(optim.Adam(learning_rate=0.1 * (rank + 1)))
    if rank == 1:
        optim.Adam.apply_gradients(opt, {"w": mx.array([2.0])}, {"w": mx.ones(1)})
    state = opt.state
    hvd.broadcast_optimizer_state(opt, root_rank=1)
    assert opt.state is state
    assert all(type(x) is mx.array for _, x in tree_flatten(state))
    assert opt.step.item() == 1
    assert abs(opt.learning_rate.item() - 0.2) < 1e-7
    assert abs(opt.state["w"]["m"].item() - 0.2) < 1e-6
    hvd.check_in_sync(opt.state)
    raises(TypeError, lambda: hvd.broadcast_parameters(opt), "no parameters", ".state")
    moved = opt.apply_gradients({"w": mx.array([1.0 * rank])}, {"w": mx.ones(1)})
    assert len(set(hvd.allgather_object(moved["w"].item()))) == 1
    assert opt.step.item() == 2
    opt.state["w"]["m"] += rank == 2
    raises(hvd.DriftError, lambda: hvd.check_in_sync(opt.state), "w.m", "ank 2")

    # Replicas are the same if what is trained is.
    norm = nn.BatchNorm(2)
    norm.running_mean += rank
    assert hvd.check_in_sync({"norm": norm})
    raises(hvd.DriftError, lambda: hvd.check_in_sync(norm, buffers=True), "'running_mean'")
    raises(TypeError, lambda: hvd.broadcast_optimizer_state(norm), "is not an optimizer")


def test_arrays_and_states() -> None:
    on_ranks(states, 3, timeout_s=120)


def sharded_states() -> None:
    """With the same bits as an undivided optimizer, whose state is that of all ranks."""
    world = hvd.init()
    rank, size = world.rank, world.size

    def step(net: Any, opt: Any, n: int) -> None:
        x, y = samples(4, 10 * n + rank)
        x = mx.array(np.moveaxis(x, 1, -1))
        opt.update(net, nn.value_and_grad(net, loss_of)(net, x, mx.array(y))[1], weight=1 + rank)

    def check_alike(nets: Any, opts: Any) -> None:
        trained = [net.parameters() for net in nets]
        for one, other in (trained, [hvd.whole_state(opt) for opt in opts]):
            mine, theirs = (dict(tree_flatten(x)) for x in (one, other))
            assert mine.keys() == theirs.keys()
            for name, x in values(mine).items():
                np.testing.assert_array_equal(x, values(theirs)[name], err_msg=name)
        hvd.check_in_sync(nets[0])

    def n_elements(opt: Any) -> int:
        return sum(x.size for _, x in tree_flatten(opt.state) if x.ndim)

    kinds = ("sgd", "momentum", "adam", "multi")
    for kind in kinds:
        nets = [CONTRACT.network(0) for _ in range(2)]
        opts = [
            hvd.DistributedOptimizer(CONTRACT.optimizer(kind, None), shard_state=shards)
            for shards in (True, False)
        ]
        if kind == "momentum":
            opts[0].init(nets[0].trainable_parameters())
        for n in range(3):
            for net, opt in zip(nets, opts, strict=True):
                step(net, opt, n)
        check_alike(nets, opts)
        elements = hvd.allgather_object(n_elements(opts[0]))
        assert sum(elements) == n_elements(opts[1]), elements
        assert max(elements) < sum(elements) or size == 1, elements

        # Another job continues from it, and an undivided optimizer.
        saved = tree_flatten(hvd.whole_state(opts[0]))
        loaded = hvd.DistributedOptimizer(CONTRACT.optimizer(kind, None), shard_state=True)
        loaded.state = tree_unflatten(saved)
        net = CONTRACT.network(0)
        net.update(nets[0].parameters())
        assert n_elements(loaded) == n_elements(opts[1])
        state = horo_lite.elastic.State(opt=loaded)
        step(net, loaded, 5)
        state.restore()
        net.update(nets[0].parameters())
        step(net, loaded, 3)
        assert n_elements(loaded) == elements[rank]
        state.commit()  # that of a divided state
        kept = net.parameters()
        step(net, loaded, 5)
        state.restore()
        net.update(kept)
        for one, opt in zip(nets, opts, strict=True):
            step(one, opt, 3)
        check_alike((net, nets[1]), (loaded, opts[1]))
        check_alike(nets, opts)
        # One rank's state, for all.
        for shards in (False, True):
            sent = hvd.DistributedOptimizer(CONTRACT.optimizer(kind, None), shard_state=shards)
            if rank == size - 1:
                sent.state = tree_unflatten(saved)
            hvd.broadcast_optimizer_state(sent, root_rank=size - 1)
            assert n_elements(sent) == sum(elements)
            twin = CONTRACT.network(1)
            step(twin, sent, 4)
            hvd.check_in_sync(twin)
        assert n_elements(sent) == elements[rank]
        share = tree_flatten(opts[0].state)
        raises(RuntimeError, partial(copy.deepcopy, sent), "whole_state")

    if size > 1:
        loaded.state = tree_unflatten(share)
        raises(ValueError, lambda: step(net, loaded, 4), "nothing for the parameter")
    opt = hvd.DistributedOptimizer(optim.Adam(learning_rate=0.1), shard_state=True)
    one = {"w": mx.ones(3), "list": [mx.ones(2), mx.ones(5)]}
    two = {"w": mx.ones(3), "list": [mx.ones(2), mx.ones(5), mx.ones(1)]}
    opt.apply_gradients(one, one)
    raises(ValueError, lambda: opt.apply_gradients(two, two), "list.2")
    if size > 1:
        opt = hvd.DistributedOptimizer(optim.Adam(learning_rate=0.1), shard_state=True)
        own = {"w": mx.ones(3) * rank}
        raises(hvd.DriftError, lambda: opt.apply_gradients(own, own), "'w'")
        alone = optim.Adam(learning_rate=0.1)
        alone.apply_gradients(one, one)
        scaled = [(name, x * (1 + rank) if x.ndim else x) for name, x in tree_flatten(alone.state)]
        opt.state = tree_unflatten(scaled)
        for _ in range(2):  # the first has not dropped what the second compares
            raises(hvd.DriftError, lambda: opt.apply_gradients(one, one), "'list.0.m'")

    class Failing(optim.Adam):
        fails = False

        def apply_single(self, *arguments: Any) -> Any:
            if self.fails:
                raise ArithmeticError
            return super().apply_single(*arguments)

    if size < 4:  # every rank has a share
        opt = hvd.DistributedOptimizer(Failing(learning_rate=0.1), shard_state=True)
        opt.apply_gradients(one, one)
        kept = hvd.whole_state(opt)
        opt.fails = True
        raises(ArithmeticError, lambda: opt.apply_gradients(one, one))
        opt.fails = False
        raises(RuntimeError, lambda: opt.apply_gradients(one, one), "caught")
        raises(RuntimeError, lambda: hvd.whole_state(opt), "caught")
        opt.state = kept
        opt.apply_gradients(one, one)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_rank_has_a_share_of_the_state(size: int) -> None:
    on_ranks(sharded_states, size, timeout_s=240)


def test_digits() -> None:
    assert accuracy_of("mlx", epochs=4, timeout_s=120) > 0.93
