"""PaddlePaddle: its optimizers wrapped, its tensors and layers in every call."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)
import numpy as np
import paddle
import pytest
from contract import Contract, raises, samples
from digits_runs import accuracy_of
from paddle import nn
from worlds import on_ranks

import horo_lite as hvd

pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]


@pytest.mark.shows("eager", "in place", "fp16")
class TestPaddle(Contract):
    optimizers = ("momentum", "groups")
    dtypes = ("bfloat16",)

    def network(self, seed: int) -> Any:
        paddle.seed(seed)
        layers = nn.Flatten(), nn.Linear(3 * 4 * 4, 8), nn.Linear(8, 5)
        return nn.Sequential(nn.Conv2D(1, 3, 3), nn.ReLU(), *layers)

    def parameters(self, values: Any) -> Any:
        zero = nn.initializer.Constant(0.0)
        net = nn.ParameterDict()
        for name, x in values.items():
            net[name] = paddle.create_parameter(
                list(x.shape), str(x.dtype), default_initializer=zero
            )
            net[name].set_value(self.array(x))
        return net

    def arrays(self, net: Any) -> Any:
        return dict(net.named_parameters())

    def optimizer(self, kind: str, net: Any) -> Any:
        if kind == "sgd":
            return paddle.optimizer.SGD(1.0, parameters=net.parameters())
        if kind == "groups":
            last = net[3].parameters() + net[4].parameters()
            groups = [{"params": net[0].parameters()}, {"params": last, "learning_rate": 0.1}]
            return paddle.optimizer.Adam(learning_rate=0.01, epsilon=1e-3, parameters=groups)
        rate = paddle.optimizer.lr.StepDecay(0.1, 2)
        clip = nn.ClipGradByGlobalNorm(0.1)  # of the averages
        return paddle.optimizer.Momentum(rate, 0.9, parameters=net.parameters(), grad_clip=clip)

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.clear_grad()
        if isinstance(optimizer, paddle.optimizer.Momentum):
            optimizer._learning_rate.step()
        loss = nn.functional.cross_entropy(net(paddle.to_tensor(x)), paddle.to_tensor(y))
        loss.backward()
        return loss

    def step(self, net: Any, optimizer: Any, gradients: Any, **weight: float) -> None:
        if gradients is not None and isinstance(optimizer, paddle.optimizer.Momentum):
            optimizer.minimize(gradients, **weight)  # which does not support groups
        else:
            optimizer.step(**weight)

    def given(self, net: Any, gradients: Any) -> Any:
        for name, p in net.named_parameters():
            p.grad = None if gradients[name] is None else self.array(gradients[name])

    def array(self, x: Any) -> Any:
        return paddle.to_tensor(x.astype(np.float32), dtype=str(x.dtype))

    def numpy(self, x: Any) -> Any:
        return x.astype("float32").numpy().astype(str(x.dtype).removeprefix("paddle."))

    def held(self, net: Any) -> Any:
        return [p.grad for p in net.parameters()]

    def place(self, gradient: Any) -> Any:
        return gradient.data_ptr()


CONTRACT = TestPaddle()


def states() -> None:
    rank = hvd.init().rank
    words = nn.Embedding(5, 2, sparse=True)
    words(paddle.to_tensor([1, 2])).sum().backward()
    opt = CONTRACT.wrap(words, CONTRACT.optimizer("sgd", words))
    raises(TypeError, opt.step, "'weight'", "sparse=False")
    assert hvd.allreduce(paddle.to_tensor(2.0 * rank, dtype="bfloat16")).dtype == paddle.bfloat16

    x = paddle.to_tensor([[1.0, 2.0], [3.0, 4.0]])
    hvd.allreduce_(x, op=hvd.Sum)
    assert x.tolist() == [[3, 6], [9, 12]]

    # Running means are part of a layer; tensors in trees are written in place.
    norm = nn.BatchNorm1D(4)
    norm._mean.set_value(paddle.full([4], float(rank)))
    tree = {"norm": norm, "transposed": x.T * rank}
    hvd.broadcast_parameters(tree, root_rank=2)
    assert norm._mean.tolist() == [2] * 4
    assert tree["transposed"].tolist() == (x.T * 2).tolist()

    # A schedule goes on with the optimizer.
    net = CONTRACT.network(0)
    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    opt = paddle.optimizer.Adam(schedule, parameters=net.parameters())
    for step in range(rank == 1):
        CONTRACT.gradients(net, opt, *samples(3, step))
        opt.step()
        schedule.step(5)
    hvd.broadcast_parameters(net, root_rank=1)
    opt = hvd.DistributedOptimizer(opt)
    hvd.broadcast_optimizer_state(opt, root_rank=1)
    assert schedule.last_epoch == 5
    hvd.check_in_sync(opt, state=True)


def divided() -> None:
    rank = hvd.init().rank
    for kind in ("SGD", "Momentum", "Adam", "AdamW"):
        owned = []

        def make(parameters: Any, kind: str = kind, owned: list[str] = owned) -> Any:
            owned += [p.name for p in parameters]
            return getattr(paddle.optimizer, kind)(0.01, parameters=parameters)

        whole, net = CONTRACT.network(0), CONTRACT.network(0)
        parameters = net.parameters()
        plain = hvd.DistributedOptimizer(make(whole.parameters(), owned=[]))
        sharded = hvd.DistributedOptimizer(make, parameters=parameters, shard_state=True)
        for step in range(4):
            if step == 2:
                state = sharded.state_dict()
                assert len(state) == len(parameters)
                sharded.load_state_dict(state)
            x, y = map(paddle.to_tensor, samples(3, 3 * step + rank))
            for model, opt in ((whole, plain), (net, sharded)):
                opt.clear_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                opt.step()
        for p, q in zip(whole.parameters(), parameters, strict=True):
            assert p.numpy().tobytes() == q.numpy().tobytes(), kind
        everyone = hvd.allgather_object(owned)
        assert sum(len(set(names)) for names in everyone) == len(parameters)
        assert all(len(set(names)) < len(parameters) for names in everyone)


def test_divided_states() -> None:
    on_ranks(divided, 3, timeout_s=120)


def test_tensors_and_states() -> None:
    on_ranks(states, 3, timeout_s=120)


def test_digits() -> None:
    assert accuracy_of("paddle", epochs=4, timeout_s=180) > 0.93
