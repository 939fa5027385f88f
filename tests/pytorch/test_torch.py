"""torch: optimizers, schedulers, scalers, closures, layouts and modules on ranks as threads."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from launch import run_threads

torch = pytest.importorskip("torch")

from horo_lite import adapters, ops  # noqa: E402
from horo_lite.collectives.compression import Compression  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.collectives.reductions import Sum  # noqa: E402
from horo_lite.errors import (  # noqa: E402
    DriftError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
)
from horo_lite.horovod.reductions import Adasum  # noqa: E402
from horo_lite.state.broadcast import broadcast_optimizer_state, broadcast_parameters  # noqa: E402
from horo_lite.state.drift import check_in_sync  # noqa: E402
from horo_lite.torch.exchange import _follow_world  # noqa: E402
from horo_lite.torch.optimizer import _DistributedOptimizer  # noqa: E402
from horo_lite.training.optimizer import DistributedOptimizer  # noqa: E402


class OfOnesOwn:
    """An optimizer that is not one of torch's: the generic wrapper averages in its step()."""

    def __init__(self, inner: Any) -> None:
        self.param_groups, self.step, self.zero_grad = (
            inner.param_groups,
            inner.step,
            inner.zero_grad,
        )


def network(seed: int = 0) -> Any:
    # Threads share torch's generator: initial values come from a separate one.
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 3)
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return net


def samples(step: int, n: int = 12) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    x = torch.from_numpy(rng.standard_normal((n, 1, 4, 4)))
    return x, torch.from_numpy(rng.integers(0, 3, n))


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(net(x), y)


def same(a: Any, b: Any) -> bool:
    return all(
        torch.allclose(p, q, rtol=1e-10, atol=1e-12)
        for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
}


def test_schedulers_accept_the_wrapper_and_reach_the_inner_one() -> None:
    def rank(group: Group) -> None:
        net = network()
        inner = torch.optim.SGD(net.parameters(), lr=0.8)
        optimizer = DistributedOptimizer(inner, group=group)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer, torch.optim.SGD)
        before = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1.0)
        schedulers = [
            before,
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        ]
        loss_of(net, *samples(0)).backward()
        optimizer.step()
        before = copy.deepcopy(net)
        loss_of(net, *samples(0)).backward()
        optimizer.step()
        assert not same(net, before)
        schedulers[1].step()
        assert inner.param_groups[0]["lr"] == 0.4
        optimizer.param_groups[0]["lr"] = 0.3
        assert inner.param_groups[0]["lr"] == 0.3
        assert "initial_lr" in inner.param_groups[0]

    run_threads(1, rank)


def test_cosine_and_one_cycle() -> None:
    def rank(group: Group) -> None:
        net = network()
        inner = torch.optim.AdamW(net.parameters())
        optimizer = DistributedOptimizer(inner, group=group)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
            ],
            [3],
        )
        rates = set()
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            rates.add(inner.param_groups[0]["lr"])
        assert len(rates) >= 4

    run_threads(1, rank)


def test_state_dict_round_trip_and_deepcopy() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(OPTIMIZERS["sgd"](net.parameters()), group=group)
        loss_of(net, *samples(group.rank)).backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["momentum_buffer"] is not None
        other = DistributedOptimizer(OPTIMIZERS["sgd"](network().parameters()), group=group)
        other.load_state_dict(state)
        assert torch.equal(
            other.state_dict()["state"][0]["momentum_buffer"], state["state"][0]["momentum_buffer"]
        )
        deep = copy.deepcopy(optimizer)
        assert isinstance(deep, _DistributedOptimizer)
        assert isinstance(deep, torch.optim.SGD)
        assert deep.param_groups[0]["params"][0] is not next(net.parameters())
        assert not optimizer.state_dict()["param_groups"][0].get("nonsense")

    run_threads(2, rank)


@pytest.mark.parametrize("synchronizes", [False, True])
@pytest.mark.parametrize("one_s_own", [False, True])
def test_clipping(one_s_own: bool, synchronizes: bool) -> None:
    """Averages are clipped, whoever exchanges them, and whenever."""
    if one_s_own and not synchronizes:
        pytest.skip("an error: see the next test")

    def rank(group: Group) -> None:
        net, whole = network(), network()
        inner: Any = torch.optim.SGD(net.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(OfOnesOwn(inner) if one_s_own else inner, group=group)
        single = torch.optim.SGD(whole.parameters(), lr=1.0)
        for step in range(3):
            x, y = samples(step)
            optimizer.zero_grad()
            loss_of(net, x[group.rank :: 2], y[group.rank :: 2]).backward()
            if synchronizes:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            if synchronizes:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            single.zero_grad()
            loss_of(whole, x, y).backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            single.step()
        assert same(net, whole)

    run_threads(2, rank)


def test_gradients_changed_before_they_are_averaged_are_an_error() -> None:
    """Never a step with gradients that each rank has clipped by its own norm."""

    def rank(group: Group) -> None:
        net, whole = network(), network()
        inner = OfOnesOwn(torch.optim.SGD(net.parameters(), lr=0.1))
        optimizer = DistributedOptimizer(inner, group=group)
        single = torch.optim.SGD(whole.parameters(), lr=0.1)

        def clip() -> None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)

        def scale() -> None:
            net[0].weight.grad /= 3

        x, y = samples(0)
        before = copy.deepcopy(net)
        for change in (clip, scale):
            optimizer.zero_grad()
            loss_of(net, x[group.rank :: 2], y[group.rank :: 2]).backward()
            change()
            with pytest.raises(
                RuntimeError, match=r"'param_groups\[0\]\[0\]' has been changed.*sync"
            ):
                optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="before the closure averages it"):
            DistributedOptimizer(inner, group=group).step(
                lambda: (loss_of(net, x, y).backward(), clip())[0]
            )
        assert same(net, before)
        optimizer.zero_grad()
        for step in range(4):  # accumulated, and with zeros to which nothing is added
            net.zero_grad(set_to_none=step % 2 == 0)
            single.zero_grad()
            x, y = samples(step)
            parts = x[group.rank :: 2], y[group.rank :: 2]
            for part in (0, 1):
                (loss_of(net, parts[0][part::2], parts[1][part::2]) / 2).backward()
            loss_of(whole, x, y).backward()
            if step == 2:
                optimizer.synchronize()
                clip()
                torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
                with pytest.raises(RuntimeError, match="a second time"):
                    optimizer.step()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
            single.step()
            assert same(net, whole)
        net.zero_grad(set_to_none=False)
        optimizer.step()
        assert same(net, whole)
        loss_of(net, x, y).backward()
        optimizer.step()
        scale()  # what has been used
        optimizer.step()
        loss_of(net, x, y).backward()
        optimizer.zero_grad(set_to_none=False)
        net[0].weight.grad.fill_(1.0)
        optimizer.step()

    run_threads(2, rank)


@pytest.mark.parametrize("synchronizes", [False, True])
def test_loss_scaling_skips_the_step_on_all_ranks_alike(synchronizes: bool) -> None:
    def rank(group: Group) -> list[bytes]:
        net = network().float()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), compression=Compression.fp16, group=group
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        start = copy.deepcopy(net)
        for step in range(3):
            x, y = samples(step + group.rank)
            optimizer.zero_grad()
            factor = float("inf") if step == 1 and group.rank == 1 else 1.0
            scaler.scale(loss_of(net, x.float(), y) * factor).backward()
            before = copy.deepcopy(net)
            if synchronizes:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
            assert same(net, before) == (step == 1)
        assert scaler.get_scale() == 2.0**9
        assert not same(net, start)
        return [p.detach().numpy().tobytes() for p in net.parameters()]

    one, other = run_threads(2, rank)
    assert one == other


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_lost_with_its_world_leaves_nothing_to_the_scaler(fused: bool) -> None:
    """It would take the next gradients for unscaled; a fused step would multiply both scales."""
    all_are_there = threading.Barrier(2)

    def rank(group: Group) -> None:
        weight = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([weight], lr=1.0, fused=fused)
        optimizer = DistributedOptimizer(inner, group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step() -> None:
            optimizer.zero_grad()
            scaler.scale((weight * (1 + group.rank)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        def fail(*_: Any) -> None:
            raise PeerLostError("rank 2 is dead")

        step()
        hook = optimizer.register_step_pre_hook(fail)
        with pytest.raises(PeerLostError):
            step()
        hook.remove()
        if all_are_there.wait() == 0:
            _follow_world()  # of all exchanges in this process
        all_are_there.wait()
        step()
        assert weight.tolist() == [-3.0, -3.0]

    run_threads(2, rank)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("one_s_own", [False, True])
def test_dtypes_and_layouts(one_s_own: bool, dtype: str) -> None:
    def rank(group: Group) -> None:
        of = getattr(torch, dtype)
        values = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5) % 7 + 2 * group.rank
        gradients = [
            values.to(of),
            values.to(of).contiguous(memory_format=torch.channels_last),
            values.to(of).permute(3, 1, 0, 2),
            values.to(of).repeat_interleave(2, 3)[..., ::2],
            torch.tensor(float(group.rank * 2), dtype=of),
            torch.zeros(0, 3, dtype=of),
        ]
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
        inner: Any = torch.optim.SGD(parameters, lr=1.0)
        optimizer = DistributedOptimizer(OfOnesOwn(inner) if one_s_own else inner, group=group)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        mine = [parameter.grad for parameter in parameters]
        optimizer.step()
        expected = (values - 2 * group.rank + 1).to(of)
        assert all(p.grad is g for p, g in zip(parameters, mine, strict=True))
        assert torch.equal(parameters[0].grad, expected)
        assert torch.equal(parameters[1].grad, expected)
        assert torch.equal(parameters[2].grad, expected.permute(3, 1, 0, 2))
        assert torch.equal(parameters[3].grad, expected)
        assert float(parameters[4].grad) == 1
        # Missing on one rank.
        for p in parameters:
            p.grad = None if group.rank else torch.full_like(p, 4)
        optimizer.step()
        assert all(torch.equal(p.grad, torch.full_like(p, 2)) for p in parameters)
        assert all(p.grad.dtype is of for p in parameters)

    run_threads(2, rank)


@pytest.mark.parametrize("one_s_own", [False, True])
def test_gradients_that_need_gradients(one_s_own: bool) -> None:
    def rank(group: Group) -> None:
        w = torch.nn.Parameter(torch.ones(3))
        (gradient,) = torch.autograd.grad((w**2).sum() * (group.rank + 1), w, create_graph=True)
        inner: Any = torch.optim.SGD([w], lr=1.0)
        optimizer = DistributedOptimizer(OfOnesOwn(inner) if one_s_own else inner, group=group)
        w.grad = gradient
        optimizer.synchronize()
        assert torch.equal(w.grad.detach(), torch.full((3,), 3.0))

    run_threads(2, rank)


def test_sparse_gradients_are_refused_by_name() -> None:
    def rank(group: Group) -> None:
        net = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True))
        optimizer = DistributedOptimizer(
            OfOnesOwn(torch.optim.SGD(net.parameters(), lr=1.0)),
            named_parameters=net.named_parameters(),
            group=group,
        )
        net(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match=r"the gradient of '0.weight': it is sparse.*sparse=Fa"):
            optimizer.step()

    run_threads(1, rank)


def test_frozen_and_tied_parameters() -> None:
    def rank(group: Group) -> None:
        net = torch.nn.Sequential(
            torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        )
        net[1].weight = net[0].weight
        frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        parameters = [*net.parameters(), frozen]
        optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=Sum, group=group)
        net[0].weight.grad = torch.full((3, 3), 1.0 + group.rank)
        optimizer.step()
        assert (net[1].weight.grad == 3).all()
        assert frozen.grad is None

    run_threads(2, rank)


def test_names_come_from_the_model() -> None:
    def rank(group: Group) -> str:
        net = network()
        options = {"named_parameters": net.named_parameters(), "group": group}
        inner = OfOnesOwn(torch.optim.SGD(net.parameters(), lr=1.0))
        optimizer = DistributedOptimizer(inner, **options)
        loss_of(net, *samples(0)).backward()
        if group.rank:
            net[3].weight = torch.nn.Parameter(torch.zeros(3, 15).double())
            optimizer.param_groups[0]["params"][2] = net[3].weight
            net[3].weight.grad = torch.zeros(3, 15).double()
        with pytest.raises(MismatchError) as caught:
            optimizer.step()
        return str(caught.value)

    message, other = run_threads(2, rank)
    assert message == other
    assert "rank 0 has '3.weight' float64[3, 16], rank 1 has" in message


def test_broadcast_module_and_optimizer() -> None:
    def rank(group: Group) -> None:
        net = torch.nn.Sequential(network(group.rank), torch.nn.BatchNorm1d(3).double())
        net[1].running_mean += group.rank
        net[1].num_batches_tracked += 5 * group.rank
        kept = list(net.parameters())
        assert broadcast_parameters(net, root_rank=1, group=group) is net
        assert all(p is q for p, q in zip(net.parameters(), kept, strict=True))
        assert all(p.requires_grad for p in kept)
        assert same(net[0], network(1))
        assert (net[1].running_mean == 1).all()
        assert net[1].num_batches_tracked == 5

        for of in (
            lambda n: n.state_dict(),
            lambda n: n.named_parameters(),
            lambda n: n.parameters(),
            lambda n: torch.optim.SGD(n.parameters(), lr=1.0),
            lambda n: DistributedOptimizer(torch.optim.SGD(n.parameters(), lr=1.0), group=group),
            lambda n: {"model": n, "more": [n[0].weight]},
        ):
            other = network(group.rank)
            broadcast_parameters(of(other), root_rank=2, group=group)
            assert same(other, network(2))

    run_threads(3, rank)


@pytest.mark.parametrize("by", ["broadcast", "heal"])
def test_received_values_are_not_mistaken_for_those_saved_for_backward(by: str) -> None:
    def rank(group: Group) -> None:
        x = torch.full((3,), 1.0 + (group.rank == 0), requires_grad=True)
        y = x * 2
        loss = (y * y).sum()
        if by == "heal":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check_in_sync({"y": y.detach()}, on_drift="heal", group=group)
        else:
            broadcast_parameters({"y": y.detach()}, root_rank=1, group=group)
        assert y.tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_threads(3, rank)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_broadcast_optimizer_state(name: str) -> None:
    def rank(group: Group) -> None:
        net = network(group.rank)
        inner = OPTIMIZERS[name](net.parameters())
        optimizer = DistributedOptimizer(inner, group=group) if group.rank else inner
        if group.rank == 1:  # the others have no state yet
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            inner.step()
            inner.param_groups[0]["lr"] = 0.77
        broadcast_optimizer_state(optimizer, root_rank=1, group=group)
        assert inner.param_groups[0]["lr"] == 0.77
        states = ops.allgather_object(
            [
                {k: np.asarray(v).tolist() for k, v in state.items()}
                for state in inner.state_dict()["state"].values()
            ],
            group=group,
        )
        assert len(states[0]) == 4
        assert states[0] == states[1] == states[2]
        assert inner.param_groups[0]["params"][0] is next(net.parameters())

    run_threads(3, rank)


def test_from_numpy_and_to_host() -> None:
    like = torch.zeros(1)
    array = np.arange(6.0).reshape(2, 3)
    made = adapters.from_numpy(array, like)
    assert isinstance(made, torch.Tensor)
    assert made.data_ptr() == array.ctypes.data
    assert adapters.from_numpy(np.array(2.5), like).shape == ()
    parameter = torch.nn.Parameter(torch.ones(2))
    host = adapters.to_host(parameter)
    assert host.ctypes.data == parameter.data_ptr()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    half = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert adapters.to_host(half).dtype == ml_dtypes.bfloat16
    assert adapters.to_host(half).ctypes.data == half.data_ptr()
    made = adapters.from_numpy(np.array([1.5, 2], ml_dtypes.bfloat16), like)
    assert made.dtype is torch.bfloat16
    assert made.tolist() == [1.5, 2.0]


class OfOlderVersion(torch.Tensor):
    """One that is exported as by PyTorch before 2.10: by a method, not by a table of functions."""

    __dlpack_c_exchange_api__ = None


@pytest.mark.parametrize("kind", [torch.Tensor, OfOlderVersion])
def test_lazily_negated_tensors_are_refused(kind: type[torch.Tensor]) -> None:
    """Their memory holds the opposite of their values."""

    def reduce(group: Group) -> None:
        x = torch._neg_view(torch.ones(3).as_subclass(kind))
        with pytest.raises(ValueError, match="resolve_neg"):
            ops.allreduce_(x, group=group)
        assert torch.equal(ops.allreduce(x.resolve_neg(), Sum, group=group), torch.full((3,), -2.0))

    run_threads(2, reduce)


SHARES = [slice(0, 7), slice(7, 7), slice(7, 12)]  # of 12 samples: uneven, and one empty


def loss_of_share(net: Any, x: Any, y: Any) -> Any:
    return loss_of(net, x, y) if len(x) else 0 * net(torch.zeros(1, 1, 4, 4).double()).sum()


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("bucket_bytes", [64, None])
def test_weights_make_averages_over_all_samples(bucket_bytes: Any, compression: str) -> None:
    """Uneven batches in every second step, clipped without synchronize(): as in one process."""

    def rank(group: Group) -> None:
        net, whole = network(), network()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9),
            named_parameters=net.named_parameters(),
            group=group,
            bucket_bytes=bucket_bytes,
            compression=getattr(Compression, compression),
        )
        single = torch.optim.SGD(whole.parameters(), lr=0.5, momentum=0.9)
        for step in range(6):
            x, y = samples(step)
            share = SHARES[(group.rank + step) % 3] if step % 2 else slice(group.rank, 12, 3)
            optimizer.zero_grad()
            if step % 2:
                optimizer.set_weight(len(x[share]))
            loss_of_share(net, x[share], y[share]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            single.zero_grad()
            loss_of(whole, x, y).backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.3)
            single.step()
        tolerance = 1e-10 if compression == "none" else 1e-2
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)

    run_threads(3, rank)


def test_weights_with_accumulation_and_with_closures() -> None:
    def rank(group: Group) -> None:
        net, whole = network(), network()
        optimizer = DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5), backward_passes_per_step=2, group=group
        )
        single = torch.optim.SGD(whole.parameters(), lr=0.5)
        for step in range(3):
            x, y = samples(step)
            xs, ys = x[SHARES[2 * group.rank]], y[SHARES[2 * group.rank]]
            optimizer.zero_grad()
            optimizer.set_weight(len(xs))
            for part in (slice(0, 2), slice(2, None)):
                (loss_of(net, xs[part], ys[part]) * len(xs[part]) / len(xs)).backward()
            optimizer.step()
            single.zero_grad()
            loss_of(whole, x, y).backward()
            single.step()
        assert same(net, whole)
        del optimizer

        optimizer = DistributedOptimizer(OPTIMIZERS["lbfgs"](net.parameters()), group=group)
        lbfgs = OPTIMIZERS["lbfgs"](whole.parameters())
        for step in range(2):
            x, y = samples(step)
            xs, ys = x[SHARES[2 * group.rank]], y[SHARES[2 * group.rank]]

            def closure(opt: Any, net: Any, x: Any, y: Any) -> Any:
                opt.zero_grad()
                loss = loss_of(net, x, y)
                loss.backward()
                return loss

            mine = partial(closure, optimizer, net, xs, ys)
            if step:
                optimizer.set_weight(len(xs))
                loss = optimizer.step(mine)
            else:
                loss = optimizer.step(mine, weight=len(xs))
            expected = lbfgs.step(lambda x=x, y=y: closure(lbfgs, whole, x, y))
            assert torch.allclose(loss, expected, rtol=1e-9)
        assert same(net, whole)

    run_threads(2, rank)


def test_weights_of_sparse_gradients() -> None:
    def rank(group: Group) -> None:
        net = torch.nn.Embedding(5, 2, sparse=True)
        torch.nn.init.zeros_(net.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), group=group)
        weights = [3.0, 0.0, 1.0]
        optimizer.set_weight(weights[group.rank])
        rows = torch.tensor([group.rank, 4])
        scale = float("nan") if group.rank == 1 else group.rank + 1.0
        (net(rows).sum() * scale).backward()
        optimizer.step()
        expected = torch.tensor([-0.75, 0, -0.75, 0, -1.5])[:, None].expand(5, 2)
        torch.testing.assert_close(net.weight.detach(), expected)

    run_threads(3, rank)


def test_weights_last_for_a_step_and_come_before_it() -> None:
    def rank(group: Group) -> None:
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), group=group)

        def averaged(weight: float | None = None) -> float:
            optimizer.zero_grad()
            if weight is not None:
                optimizer.set_weight(weight)
                assert group.size == 2
            (w.sum() * (group.rank * 4.0)).backward()
            return float(w.grad[0])

        assert averaged() == 2
        optimizer.step()
        assert averaged(1 + 2 * group.rank) == 3
        with pytest.raises(RuntimeError, match=r"comes too late.*before backward"):
            optimizer.set_weight(1)
        with pytest.raises(TypeError, match=r"step\(\) takes no weight.*set_weight\(n\).*before"):
            optimizer.step(weight=3)
        with pytest.raises(TypeError, match=r"synchronize\(\) takes no weight.*set_weight"):
            optimizer.synchronize(weight=3)
        assert averaged() == 2  # a skipped step has reset it as well
        optimizer.step()
        for wrong in (-1, float("nan"), "3"):
            with pytest.raises(ValueError, match="weight must be a number of samples"):
                optimizer.set_weight(wrong)
        for ranks in ([0], [1]):
            with pytest.raises(MismatchError, match="weighted"):
                averaged(1.0 if group.rank in ranks else None)
        optimizer.zero_grad()
        assert averaged(3 - 2 * group.rank) == 1

    run_threads(2, rank)


def test_a_weight_after_a_step_that_a_scaler_has_skipped() -> None:
    """Also if the module sets gradients to None, of which the optimizer learns nothing."""

    def rank(group: Group) -> list[float]:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        optimizer = DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), group=group)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for factor in (float("inf"), 1.0):
            layer.zero_grad()
            optimizer.set_weight(1 + 2 * group.rank)
            scaler.scale(layer(torch.full((1, 1), factor * (1 + group.rank))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            layer(torch.ones(1, 1)).sum().backward()
            with pytest.raises(RuntimeError, match="comes too late"):
                optimizer.set_weight(1)
        return layer.weight.flatten().tolist()

    assert run_threads(2, rank) == [[-1.75]] * 2


def test_a_weight_that_the_closure_sets_is_also_that_of_the_loss() -> None:
    def rank(group: Group) -> None:
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), group=group)

        def closure() -> Any:
            optimizer.zero_grad()
            optimizer.set_weight(1 + 2 * group.rank)
            loss = w.sum() * (group.rank * 4.0) + group.rank * 8.0
            loss.backward()
            return loss

        for before in None, 7:  # the closure's takes precedence
            if before is not None:
                optimizer.set_weight(before)
            with torch.no_grad():
                w.zero_()
            assert float(optimizer.step(closure)) == 6  # (1 * 0 + 3 * 8) / 4
            assert w.grad[0] == 3

    run_threads(2, rank)


def test_a_weight_is_for_one_step() -> None:
    """Reset after the step, after one that raises, and with gradients dropped by zero_grad()."""

    def rank(group: Group) -> None:
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), group=group)
        weight = 1 + 2 * group.rank

        def closure() -> Any:
            optimizer.zero_grad()
            loss = w.sum() * (group.rank * 4.0)
            loss.backward()
            return loss

        def failing() -> Any:
            closure()
            raise LookupError

        def averaged() -> float:
            optimizer.zero_grad()
            (w.sum() * (group.rank * 4.0)).backward()
            return float(w.grad[0])

        optimizer.set_weight(weight)
        assert averaged() == 3  # zero_grad() came before the gradients
        optimizer.step()
        assert averaged() == 2
        optimizer.step()
        optimizer.step(closure, weight=weight)
        assert w.grad[0] == 3
        optimizer.step(closure)
        assert w.grad[0] == 2
        with pytest.raises(LookupError):
            optimizer.step(failing, weight=weight)
        assert w.grad[0] == 3
        assert averaged() == 2
        optimizer.step()

        twice = DistributedOptimizer(
            torch.optim.SGD([v := torch.nn.Parameter(torch.zeros(1))], lr=1.0),
            backward_passes_per_step=2,
            group=group,
        )
        twice.set_weight(weight)
        (v.sum() * (group.rank * 4.0)).backward()
        twice.zero_grad()  # the step is abandoned
        for _ in range(2):
            (v.sum() * (group.rank * 4.0)).backward()
        assert v.grad[0] == 4

    run_threads(2, rank)


def test_weights_where_they_mean_nothing() -> None:
    def rank(group: Group) -> None:
        for op in (Sum, Adasum):
            w = torch.nn.Parameter(torch.zeros(2))
            optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), op=op, group=group)
            with pytest.raises(ValueError, match=f"needs op=Average; with op={op.name}"):
                optimizer.set_weight(3)

    run_threads(2, rank)

    def alone(group: Group) -> None:
        w = torch.nn.Parameter(torch.zeros(2))
        optimizer = DistributedOptimizer(torch.optim.SGD([w], lr=1.0), group=group)
        optimizer.set_weight(0)
        (3 * w.sum()).backward()
        with pytest.raises(TypeError, match="set_weight"):
            optimizer.step(weight=1)
        optimizer.step()
        assert w.tolist() == [-3, -3]

    run_threads(1, alone)


def test_options_reach_the_wrapper_of_torch() -> None:
    def rank(group: Group) -> None:
        w = torch.nn.Parameter(torch.zeros(2))
        inner = torch.optim.SGD([w], lr=1.0)
        with pytest.raises(TypeError, match=r"horo_lite.DistributedOptimizer.*named_parameters="):
            DistributedOptimizer(inner, parameters=[w], group=group)
        with pytest.raises(TypeError, match=r"group= or process_set=, not both"):
            DistributedOptimizer(inner, group=group, process_set=group)
        with pytest.raises(TypeError, match=r"DistributedOptimizer\(\).*'compresion'"):
            DistributedOptimizer(inner, compresion=Compression.fp16, group=group)
        with pytest.raises(TypeError, match="Linear is not an optimizer"):
            DistributedOptimizer(torch.nn.Linear(1, 1), group=group)
        with pytest.raises(TypeError, match="is not an optimizer: it is a class"):
            DistributedOptimizer(torch.optim.SGD, group=group)
        with pytest.raises(ValueError, match="a bucket has a whole number of bytes"):
            DistributedOptimizer(inner, bucket_bytes=0, group=group)
        with pytest.raises(ValueError, match="check_finite must be"):
            DistributedOptimizer(inner, check_finite="yes", group=group)
        optimizer = DistributedOptimizer(
            inner,
            named_parameters=[("w", w)],
            check_finite="raise",
            check_every=1,
            op=Sum,
            group=group,
        )
        with pytest.raises(TypeError, match="already a DistributedOptimizer: wrap it only once"):
            DistributedOptimizer(optimizer, group=group)
        with pytest.raises(NonFiniteError, match="'w' has 2 NaN on rank 1"):
            (w.sum() * (float("nan") if group.rank else 1)).backward()
        optimizer.zero_grad()
        (w.sum() * (group.rank + 1)).backward()
        assert w.grad.tolist() == [3, 3]
        with torch.no_grad():
            w[1] += group.rank
        with pytest.raises(DriftError, match="'w'"):
            optimizer.step()

    run_threads(2, rank)


def test_bfloat16_where_numpy_has_no_such_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    def work(group: Group) -> None:
        x = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3) * (group.rank + 1)
        total = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3) * 3
        half = slice(2 * group.rank, 2 * group.rank + 2)
        assert torch.equal(ops.allreduce(x, Sum, group=group), total)
        assert torch.equal(ops.reducescatter(x, Sum, group=group), total[half])
        assert torch.equal(ops.allgather(x, group=group)[4:], total / 3 * 2)
        back = ops.alltoall(x, group=group)
        assert torch.equal(back[2:], (total / 3 * 2)[half])

    run_threads(2, work)
