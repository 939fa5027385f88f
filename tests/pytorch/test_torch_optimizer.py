"""horo_lite.torch.DistributedOptimizer: ranks as threads against one process on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import pickle
import re
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from launch import RanksFailedError, run_and_hear, run_ranks, run_threads
from recording import Recording
from worlds import on_ranks

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import horo_lite  # noqa: E402
from horo_lite import elastic  # noqa: E402
from horo_lite.collectives.compression import Compression, Compressor  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.collectives.reductions import Average, Min, Sum  # noqa: E402
from horo_lite.errors import MismatchError, NonFiniteError, PeerLostError  # noqa: E402
from horo_lite.horovod.reductions import Adasum  # noqa: E402
from horo_lite.state.broadcast import (  # noqa: E402
    broadcast_optimizer_state,
    broadcast_parameters,
)
from horo_lite.state.drift import check_in_sync  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402

nn = torch.nn


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a wrapper for `process_set` that records what is sent."""
    from horo_lite.torch import exchange

    ordinary = exchange.group_of_member
    monkeypatch.setattr(
        exchange, "group_of_member", lambda g: g if isinstance(g, Recording) else ordinary(g)
    )
    return Recording


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_LITE_BUCKET_BYTES", "256")


def fill(module: Any, seed: int = 0) -> Any:
    """Fill `module` with float64 values from a separate generator: threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return module


def network(seed: int = 0) -> Any:
    return fill(
        nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), seed
    )


def samples(step: int, n: int = 12) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn((n, 5), generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (n,), generator=generator)


def loss_of(net: Any, x: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(net(x), y)


def gradients(net: Any) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def assert_same(a: Any, b: Any) -> None:
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def assert_same_weights(a: Any, b: Any) -> None:
    assert_same([p.detach() for p in a.parameters()], [p.detach() for p in b.parameters()])


def sgd(net: Any, **options: Any) -> Any:
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


def wrap(optimizer: Any, group: Any, net: Any = None, **options: Any) -> Any:
    named = None if net is None else net.named_parameters()
    return DistributedOptimizer(optimizer, named, process_set=group, **options)


def fails_alike(n: int, fn: Any, kind: type[BaseException]) -> str:
    """Assert that every rank fails with the same message, and return it."""
    with pytest.raises(RanksFailedError) as caught:
        run_threads(n, fn)
    assert sorted(caught.value.errors) == list(range(n)), caught.value
    assert all(type(error) is kind for error in caught.value.errors.values()), caught.value
    (message,) = {str(error) for error in caught.value.errors.values()}
    return message


# Against one process on the whole batch.


def train(optimizer: Any, net: Any, rank: int, size: int, kind: str, passes: int) -> list[float]:
    losses = []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "scaler")
    for step in range(5):
        batches = [samples(step * passes + k) for k in range(passes)]

        def closure(batches: Any = batches, set_to_none: bool = step % 2 == 0) -> Any:
            optimizer.zero_grad(set_to_none=set_to_none)
            for x, y in batches:
                loss = loss_of(net, x[rank::size], y[rank::size])
                scaler.scale(loss).backward()
            return loss

        if kind == "lbfgs":
            losses.append(optimizer.step(closure).item())
        else:
            closure()
            if kind == "clip":
                losses.append(nn.utils.clip_grad_norm_(net.parameters(), 0.01).item())
            if kind == "scaler":
                scaler.unscale_(optimizer)
                losses.append(nn.utils.clip_grad_norm_(net.parameters(), 0.05).item())
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    return losses


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, whose param_groups and state it shows, as many of its kind do."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.defaults, self.n_steps = inner, {}, 0
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.n_steps += 1
        if self.n_steps % 2 == 0:
            parameters = [p.data for group in self.param_groups for p in group["params"]]
            for slow, fast in zip(self.slow, parameters, strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))
        return result


OPTIMIZERS = {
    "around": lambda p: Lookahead(torch.optim.AdamW(p, lr=0.01)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "clip": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
    "scaler": lambda p: torch.optim.SGD(p, lr=1.0),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5, line_search_fn="strong_wolfe"),
}


@pytest.mark.shows("eager")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_give_what_one_process_gives_on_the_whole(kind: str, size: int, passes: int) -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(
            OPTIMIZERS[kind](net.parameters()), group, net, backward_passes_per_step=passes
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as a scheduler that finds step() overridden
            losses = train(optimizer, net, group.rank, size, kind, passes)
        return net, losses

    alone = network()
    expected = train(OPTIMIZERS[kind](alone.parameters()), alone, 0, 1, kind, passes)
    results = run_threads(size, rank)
    for net, losses in results:
        assert_same_weights(net, alone)
        assert losses == pytest.approx(expected, rel=1e-9)
        # Not only close: equal.
        assert all(
            torch.equal(p, q)
            for p, q in zip(net.parameters(), results[0][0].parameters(), strict=True)
        )


@pytest.mark.shows("overlap")
def test_buckets_leave_before_backward_ends_and_all_is_there_when_it_returns(watched: Any) -> None:
    def rank(group: Group) -> None:
        net, alone = network(), network()
        record = watched(group)
        optimizer = wrap(sgd(net), record, net)
        when: list[int] = []
        net[0].weight.register_hook(lambda g: when.append(len(record.left)))
        for step in range(3):
            record.left.clear()
            x, y = samples(step)
            optimizer.zero_grad()
            alone.zero_grad()
            loss_of(net, x[group.rank :: 2], y[group.rank :: 2]).backward()
            loss_of(alone, x, y).backward()
            assert_same(gradients(net), gradients(alone))
            # In the first step, ranks agree on the plan; then, the last layer is sent before the
            # first.
            assert (when[step] > 0) == (step > 0)
            if step:
                assert record.left[0] == ("early", ["4.bias"])
                assert all(how == "early" for how, _ in record.left)
            assert record.names() == sorted(name for name, _ in net.named_parameters())
            record.left.clear()
            with torch.no_grad():
                for p in alone.parameters():
                    p -= 0.1 * p.grad
            optimizer.step()
            assert record.left == []  # step() exchanges nothing
            assert_same_weights(net, alone)

    run_threads(2, rank)


@pytest.mark.shows("fp16")
@pytest.mark.parametrize("op", [Average, Sum])
def test_op_factor_groups_and_compression(op: Any, watched: Any) -> None:
    def rank(group: Group) -> None:
        for options in (
            {},
            {"num_groups": 2},
            {"groups": 3},
            {"groups": "lists"},
            {"compression": Compression.fp16},
            {"gradient_predivide_factor": 4.0} if op is Average else {},
        ):
            net = network()
            record = watched(group)
            given = dict(options)
            if given.get("groups") == "lists":
                given["groups"] = [[net[0].weight, net[4].bias], [net[2].weight]]
            optimizer = wrap(sgd(net), record, net, op=op, **given)
            for step in range(3):
                x, y = samples(step)
                record.left.clear()
                optimizer.zero_grad()
                loss_of(net, x[group.rank :: 2], y[group.rank :: 2]).backward()
                got = gradients(net)
                alone = copy.deepcopy(net)
                alone.zero_grad()
                loss_of(alone, x, y).backward()
                scale = 2 if op is Sum else 1
                for g, p in zip(got, alone.parameters(), strict=True):
                    rough = {"rtol": 1e-2, "atol": 1e-4} if "compression" in options else {}
                    torch.testing.assert_close(g, scale * p.grad, **rough)
            buckets = [sorted(names) for how, names in record.left if how == "early"]
            if "num_groups" in options:
                assert buckets == [
                    ["2.bias", "4.bias", "4.weight"],
                    ["0.bias", "0.weight", "2.weight"],
                ]
            if options.get("groups") == 3:
                assert len(buckets) == 3
            if options.get("groups") == "lists":
                assert ["0.weight", "4.bias"] in buckets
                assert ["2.weight"] in buckets

    run_threads(2, rank)


def test_adasum_and_compressors_of_ones_own() -> None:
    @dataclass  # which has no hash
    class Halves:
        dtype: Any = torch.float32

        def compress(self, tensor: Any) -> Any:
            return tensor.to(self.dtype), tensor.dtype

        def decompress(self, tensor: Any, context: Any) -> Any:
            assert tensor.dtype is self.dtype
            return tensor.to(context)

    def rank(group: Group) -> Any:
        net = network()
        x, y = samples(group.rank)
        seen = []
        for options in ({"op": Adasum, "adasum_of": "gradients"}, {"compression": Halves()}):
            optimizer = wrap(sgd(net), group, net, **options)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
            seen.append(gradients(net))
            del optimizer
        net.zero_grad()
        loss_of(net, x, y).backward()
        return *seen, gradients(net)

    (adasum, average, a), (adasum_, average_, b) = run_threads(2, rank)
    assert all(torch.equal(p, q) for p, q in zip(adasum + average, adasum_ + average_, strict=True))
    for got, mean, p, q in zip(adasum, average, a, b, strict=True):
        dot = (p * q).sum()
        expected = (1 - dot / (2 * (p * p).sum())) * p + (1 - dot / (2 * (q * q).sum())) * q
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(mean, (p + q) / 2, rtol=1e-6, atol=1e-7)
    with pytest.raises(RanksFailedError, match="must be a power of two, not 3"):
        run_threads(3, lambda group: wrap(sgd(network()), group, op=Adasum))


# The wrapper as an object.


def test_is_the_users_class_and_shares_its_state() -> None:
    class Mine(torch.optim.Adam):
        pass

    def rank(group: Group) -> None:
        net = network()
        inner = Mine(net.parameters(), lr=0.1)
        early = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)  # before it is wrapped
        optimizer = wrap(inner, group, net)
        assert isinstance(optimizer, Mine)
        assert type(optimizer).__name__ == "Mine"
        assert optimizer.state is inner.state
        assert optimizer.param_groups is inner.param_groups
        optimizer._step_supports_amp_scaling = True  # as optimizers do that unscale themselves
        assert inner._step_supports_amp_scaling is optimizer._step_supports_amp_scaling is True
        del inner._step_supports_amp_scaling
        own, optimizer.step = optimizer.step, lambda: "patched"
        assert optimizer.step() == "patched"
        del optimizer.step
        assert optimizer.step == own
        for step in range(2):
            x, y = samples(step + group.rank * 9)
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                early.step()
        assert optimizer.param_groups[0]["lr"] == 0.025
        state = copy.deepcopy(optimizer.state_dict())
        assert state["state"][0]["step"] == 2
        # A round trip, through bytes, into another of the same kind; then both continue equally.
        other_net = copy.deepcopy(net)
        other = wrap(Mine(other_net.parameters()), group, other_net)
        data = io.BytesIO()
        torch.save(state, data)
        data.seek(0)
        other.load_state_dict(torch.load(data))
        assert other.param_groups[0]["lr"] == 0.025
        for o, n in ((optimizer, net), (other, other_net)):
            x, y = samples(7 + group.rank)
            o.zero_grad()
            loss_of(n, x, y).backward()
            o.step()
        assert_same_weights(net, other_net)
        optimizer.load_state_dict(state)
        assert inner.state is optimizer.state  # still the same object
        assert "Mine (" in repr(optimizer)

    run_threads(2, rank)


def test_wrappers_that_derive_their_class_from_the_optimizers() -> None:
    """As Lightning's and Fabric's do; they also copy its dictionary."""

    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.__dict__ = dict(optimizer.__dict__)
            self.__class__ = type("Mixed", (Wrapper, type(optimizer)), {})

    def rank(group: Group) -> Any:
        net = network()
        optimizer = Wrapper(wrap(sgd(net, momentum=0.9), group, net))
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, *samples(step + 10 * group.rank)).backward()
            optimizer.step()
        assert "momentum_buffer" in optimizer.state[net[0].weight]
        return net

    a, b = run_threads(2, rank)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a[0].weight, network()[0].weight)


def test_a_new_parameter_has_no_name_of_one_that_was_freed() -> None:
    def rank(group: Group) -> list[str]:
        net = network()
        given = [*net.named_parameters(), *nn.ParameterList([torch.ones(1)]).named_parameters()]
        optimizer = DistributedOptimizer(sgd(net), given, process_set=group)
        values = [torch.ones(1) for _ in range(100)]
        kept = [nn.Parameter(values.pop())]
        if group.rank == 0:
            old = id(given.pop()[1])
            while values and id(kept[-1]) != old:  # usually, the first one gets the same address
                kept.append(nn.Parameter(values.pop()))
        optimizer.add_param_group({"params": [kept[-1]]})
        (kept[-1] * (group.rank + 1)).sum().backward()
        assert kept[-1].grad.tolist() == [1.5]
        return [name for name, _ in optimizer._exchange.named()]

    names = [name for name, _ in network().named_parameters()]
    assert run_threads(2, rank) == [[*names, "param_groups[1][0]"]] * 2


class SendsHalf(Compressor):
    """Keeps the other half of a gradient for the next step."""

    def __init__(self) -> None:
        super().__init__("half")
        self.left_over: dict[str, Any] = {}

    def prepare(self, name: str, gradient: Any) -> None:
        gradient += self.left_over.get(name, 0)
        gradient *= 0.5
        self.left_over[name] = gradient.copy()


def test_copies_wrap_copies() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(sgd(net, momentum=0.9), group, net, compression=SendsHalf())
        loss_of(net, *samples(group.rank)).backward()
        optimizer.step()
        net2, optimizer2 = copy.deepcopy([net, optimizer], {id(group): group})
        for n, o in ((net, optimizer), (net2, optimizer2)):
            o.zero_grad()
            loss_of(n, *samples(5 + group.rank)).backward()
            o.step()
        assert type(optimizer2) is type(optimizer)
        assert net2[0].weight is optimizer2.param_groups[0]["params"][0]
        assert_same_weights(net, net2)

    run_threads(2, rank)


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("how", ["to", "there and back", "load_state_dict"])
def test_parameters_that_are_swapped_are_averaged(how: str, swapping: None) -> None:
    """With set_swap_module_params_on_conversion(); torch loses their hooks."""

    def swap(net: Any) -> None:
        if how == "load_state_dict":
            net.load_state_dict(network().state_dict())
            return
        net.to(torch.float32)
        if how == "there and back":
            net.to(torch.float64)

    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.0), group)
        for step in range(3):
            if step:
                swap(net)
            optimizer.zero_grad()
            x, y = samples(step, 6 * group.size)
            part = slice(6 * group.rank, 6 * (group.rank + 1))
            x = x.to(net[0].weight.dtype)
            loss_of(net, x[part], y[part]).backward()  # not only in step(), after clipping
            alone = network()
            loss_of(alone, x.double(), y).backward()
            for found, mean in zip(gradients(net), gradients(alone), strict=True):
                torch.testing.assert_close(found.double(), mean, rtol=1e-5, atol=1e-6)

    run_threads(2, rank)


def test_wrapping_twice_is_refused_and_hooks_end_with_the_wrapper() -> None:
    def rank(group: Group) -> None:
        net = network()
        inner = sgd(net)
        optimizer = wrap(inner, group)
        with pytest.raises(TypeError, match="wrap it only once"):
            wrap(optimizer, group)
        with pytest.raises(ValueError, match="already has a DistributedOptimizer"):
            wrap(inner, group)
        with pytest.raises(ValueError, match="delete one that is no longer used"):
            wrap(sgd(net), group)
        assert all(p._post_accumulate_grad_hooks for p in net.parameters())
        del optimizer
        gc.collect()
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
        # Alone again: no rank waits for another.
        if group.rank == 0:
            loss_of(net, *samples(0)).backward()
            inner.step()
        # And it can be wrapped again.
        optimizer = wrap(inner, group)
        optimizer.zero_grad()
        loss_of(net, *samples(group.rank)).backward()
        return net[0].weight.grad

    first, second = run_threads(2, rank)
    assert torch.equal(first, second)


def test_wrong_arguments() -> None:
    def rank(group: Group) -> None:
        net = network()
        named = list(net.named_parameters())
        for error, given in {
            "more than once": {"named_parameters": [*named, (named[0][0], named[1][1])]},
            "lacks 1": {"named_parameters": named[1:]},
            "pairs": {"named_parameters": list(net.parameters())},
            "must be 1 or more": {"backward_passes_per_step": 0},
            "op=Average, op=Sum or op=Adasum": {"op": Min},
            "needs op=Average": {"op": Sum, "gradient_predivide_factor": 2.0},
            "more than 0": {"gradient_predivide_factor": 0.0},
            "0 or more": {"num_groups": -1},
            "list of lists": {"groups": [net[0].weight]},
            r"groups\[1\]\[0\] is the same": {"groups": [[net[0].weight], [net[0].weight]]},
            "compression must be hvd.Compression": {"compression": "fp16"},
        }.items():
            with pytest.raises(ValueError, match=error):
                DistributedOptimizer(sgd(net), **{"process_set": group, **given})
        with pytest.raises(TypeError, match=r"not an optimizer.*torch\.optim\.Optimizer"):
            DistributedOptimizer(object(), process_set=group)
        with pytest.raises(
            TypeError, match=r"SGD has no param_groups.* contains one, pass that one"
        ):
            DistributedOptimizer(object.__new__(torch.optim.SGD), process_set=group)
        holds = type("", (Lookahead,), {"param_groups": None, "state": None})(sgd(net))
        holds.param_groups, holds.state = holds.inner.param_groups, holds.inner.state
        for outer in (Lookahead(sgd(net)), holds):
            with pytest.raises(ValueError, match="are those of another optimizer inside it: pass"):
                DistributedOptimizer(outer, process_set=group, shard_state="elements")
        with pytest.raises(TypeError, match="the class SGD is not an optimizer"):
            DistributedOptimizer(torch.optim.SGD, process_set=group)
        with pytest.raises(TypeError, match="pass group= or process_set=, not both"):
            DistributedOptimizer(sgd(net), process_set=group, group=group)

    run_threads(1, rank)

    def listed_twice(group: Group) -> None:
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], lr=0.1)
        optimizer.param_groups[0]["params"].append(p)
        with pytest.raises(ValueError, match="twice"):
            wrap(optimizer, group)

    run_threads(2, listed_twice)


class Sharpness(torch.optim.SGD):
    """Follows the gradients at hand, and takes the step that the closure finds there, from here."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        for p in parameters:
            if p.grad is not None:
                p.add_(p.grad)
        with torch.enable_grad():
            loss = closure()
        for p, x in zip(parameters, before, strict=True):
            p.copy_(x)
        super().step()
        return loss


@pytest.mark.parametrize("how", ["passes", "too few passes", "by hand"])
def test_an_optimizer_that_uses_gradients_before_its_closure(how: str) -> None:
    """It has no averages there after fewer backward passes than the ranks exchange after."""

    def train(net: Any, optimizer: Any, rank: int, size: int, synchronizes: bool = False) -> None:
        for step in range(3):
            x, y = samples(step)

            def closure(x: Any = x[rank::size], y: Any = y[rank::size]) -> Any:
                optimizer.zero_grad()
                for _ in range(2):
                    loss = loss_of(net, x, y)
                    loss.backward()
                return loss

            closure()
            if how != "passes":
                optimizer.zero_grad()
                loss_of(net, x[rank::size], y[rank::size]).backward()
            if how == "by hand":
                for p in net.parameters():
                    p.grad = p.grad.clone()
            if synchronizes:
                optimizer.synchronize()
            optimizer.step(closure)

    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(Sharpness(net.parameters(), lr=0.1), group, backward_passes_per_step=2)
        if how != "passes":
            with pytest.raises(
                RuntimeError, match=r"before it called its closure.*synchronize\(\)"
            ):
                train(net, optimizer, group.rank, 2)
            net = fill(net)
        train(net, optimizer, group.rank, 2, synchronizes=how != "passes")
        return net

    alone = network()
    train(alone, Sharpness(alone.parameters(), lr=0.1), 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_that_calls_backward_in_its_step(passes: int) -> None:
    class Calls(torch.optim.SGD):
        closure: Any = None

        def step(self, closure: Any = None) -> Any:
            self.zero_grad()
            self.closure().backward()
            return super().step()

    def train(net: Any, optimizer: Any, rank: int, size: int) -> None:
        for step in range(3):
            x, y = samples(step)
            optimizer.closure = lambda x=x, y=y: loss_of(net, x[rank::size], y[rank::size])
            optimizer.step()

    def rank(group: Group) -> Any:
        net = network()
        inner = Calls(net.parameters(), lr=0.1)
        optimizer = wrap(inner, group, backward_passes_per_step=passes)
        if passes == 1:
            train(net, optimizer, group.rank, 2)
            assert_same_weights(net, alone)
        else:
            with pytest.raises(RuntimeError, match=r"its own backward.* that were not averaged"):
                train(net, optimizer, group.rank, 2)

    alone = network()
    train(alone, Calls(alone.parameters(), lr=0.1), 0, 1)
    run_threads(2, rank)


def test_an_optimizer_that_assigns_gradients_in_its_step() -> None:
    """Of copies of the parameters, in another precision. The optimizer inside it is averaged."""

    class Copies(torch.optim.Optimizer):
        def __init__(self, model: Any, inner: Any) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.inner, self.model = inner, model
            self.add_param_group({"params": [torch.ones(2, requires_grad=True)]})

        def step(self, closure: Any = None) -> None:
            unused = self.param_groups[1]["params"][0]
            unused.grad = torch.zeros_like(unused)
            pairs = list(zip(self.model.parameters(), self.param_groups[0]["params"], strict=True))
            for p, copied in pairs:
                copied.grad = p.grad.clone()
            self.inner.step()
            for p, copied in pairs:
                p.data.copy_(copied.data)

    def train(net: Any, wraps: str, group: Any) -> None:
        size, rank = (group.size, group.rank) if group else (1, 0)
        copied = [p.detach().clone().requires_grad_() for p in net.parameters()]
        inner = torch.optim.SGD(copied, lr=0.1)
        inner = wrap(inner, group) if wraps == "inner" else inner
        outer = Copies(net, inner)
        outer = wrap(outer, group) if wraps == "outer" else outer
        for step in range(3):
            x, y = samples(step)
            net.zero_grad()
            outer.zero_grad()
            loss_of(net, x[rank::size], y[rank::size]).backward()
            outer.step()

    def rank(group: Group) -> Any:
        with pytest.raises(
            RuntimeError, match=r"has assigned .* a gradient, which was not averaged"
        ):
            train(network(), "outer", group)
        train(net := network(), "inner", group)
        return net

    train(alone := network(), "", None)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


def test_a_closure_beside_a_frozen_parameter_that_has_no_version() -> None:
    def rank(group: Group) -> float:
        with torch.inference_mode():
            frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = wrap(
            torch.optim.SGD([parameter, frozen], lr=1.0), group, backward_passes_per_step=2
        )

        def closure() -> Any:
            loss = parameter.sum() * (1 + group.rank)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)  # adds a second pass
        return float(parameter[0].detach())

    assert run_threads(2, rank) == [-3.0, -3.0]


# Passes.


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_passes_after_an_exchange_add_to_the_averages(passes: int, views: bool) -> None:
    """Also if only some ranks add: the averages that the others hold count."""

    def train(net: Any, optimizer: Any, ranks: range, size: int) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for k in range(4):
                x, y = samples(step * 4 + k)
                parts = [loss_of(net, x[r::size], y[r::size]) for r in ranks]
                if k == 2:  # only rank 0 uses head "two"
                    losses = [
                        nn.functional.cross_entropy(net(x[r::size], "two"), y[r::size])
                        for r in ranks
                    ]
                    parts = [losses[i] if r == 0 else parts[i] for i, r in enumerate(ranks)]
                (torch.stack(parts).sum() / len(ranks)).backward()
            optimizer.step()

    def rank(group: Group) -> Any:
        net = fill(Heads())
        options = {"backward_passes_per_step": passes, "gradient_as_bucket_view": views}
        r = group.rank
        train(net, wrap(sgd(net), group, net, **options), range(r, r + 1), group.size)
        return net

    alone = fill(Heads())
    train(alone, sgd(alone), range(2), 2)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("op", [Sum, Adasum])
def test_sums_are_not_added_to(op: Any) -> None:
    def rank(group: Group) -> list[Any]:
        net = network()
        options = {"adasum_of": "gradients", "backward_passes_per_step": 2}
        optimizer = wrap(sgd(net), group, net, op=op, **options)
        x, y = samples(group.rank)
        for _ in range(2):
            loss_of(net, x, y).backward()
        with pytest.raises(RuntimeError, match=r"after it was exchanged.*after 2 passes"):
            loss_of(net, x, y).backward()
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(net, x, y).backward()
        found = gradients(net)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"after it was exchanged.*zero_grad\(\) after step"):
            loss_of(net, x, y).backward()
        net.zero_grad(set_to_none=False)
        for _ in range(2):
            loss_of(net, x, y).backward()
        return [*found, *gradients(net)]

    first, second = run_threads(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("op", [Average, Sum, Adasum])
def test_a_skipped_step_whose_gradients_the_optimizer_does_not_zero(op: Any) -> None:
    """As in Horovod's documentation of mixed precision."""

    def by_model(net: Any) -> None:
        net.zero_grad(set_to_none=False)

    def by_hand(net: Any) -> None:
        for p in net.parameters():
            if p.grad is not None:
                p.grad.data.zero_()

    def train(net: Any, group: Group, zero: Any, synchronizes: bool) -> Any:
        optimizer = wrap(sgd(net), group, net, op=op, adasum_of="gradients")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(4):
            zero(net) if zero else optimizer.zero_grad()
            loss = loss_of(net, *samples(step + 10 * group.rank))
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            if synchronizes:
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
            else:
                scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 4.0
        return net

    def rank(group: Group) -> list[Any]:
        zeroes = (by_model, by_hand, None)
        return [train(network(), group, zero, s) for zero in zeroes for s in (False, True)]

    nets = [net for each in run_threads(2, rank) for net in each]
    for net in nets[1:]:
        assert all(
            torch.equal(p, q) for p, q in zip(net.parameters(), nets[0].parameters(), strict=True)
        )


@pytest.mark.parametrize("last", ["a pass", "only the loss"])
def test_a_closure_that_continues_earlier_passes(last: str) -> None:
    """As in Lightning, which always passes a closure to step()."""

    def train(net: Any, optimizer: Any, rank: int, size: int) -> None:
        for step in range(3):
            (x, y), (x2, y2) = ((a[rank::size], b[rank::size]) for a, b in map(samples, (step, 9)))
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()

            def closure(loss: Any = loss, x: Any = x2, y: Any = y2) -> Any:
                if last == "a pass":
                    loss = nn.functional.cross_entropy(net(x, "two"), y)
                    loss.backward()
                return loss

            optimizer.step(closure)

    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net), group, net, backward_passes_per_step=2)
        train(net, optimizer, group.rank, group.size)
        return net

    alone = fill(Heads())
    train(alone, sgd(alone), 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


class OwnOptimizer:
    def __init__(self, params: list[Any]) -> None:
        self.params = params

    def step(self) -> None:
        pass


@pytest.mark.parametrize("parts_of", ["torch.cat's gradient", "a user's flat buffer"])
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_parts_of_one_tensor(parts_of: str, is_own: bool, passes: int) -> None:
    """They have one version counter: adding to one is no change of the others."""

    def rank(group: Group) -> None:
        a, b = params = [nn.Parameter(torch.ones(n, 2)) for n in (1, 2)]
        options = {"group": group, "backward_passes_per_step": passes}
        if is_own:
            optimizer = horo_lite.DistributedOptimizer(OwnOptimizer(params), **options)
        else:
            optimizer = DistributedOptimizer(torch.optim.SGD(params, lr=0.0), **options)
        flat = torch.zeros(6)
        if parts_of == "a user's flat buffer":
            a.grad, b.grad = flat[:2].view(1, 2), flat[2:].view(2, 2)
        for _ in range(3):
            flat.zero_()
            for p in params:
                if p.grad is not None:
                    p.grad.zero_()
            for _ in range(passes):
                (torch.cat(params).view(-1) @ torch.arange(6.0) * (1 + 2 * group.rank)).backward()
            optimizer.step()
            found = torch.cat([p.grad for p in params]).view(-1)
            assert found.tolist() == [2.0 * passes * i for i in range(6)]
        if parts_of == "a user's flat buffer":
            assert torch.equal(flat, found)

    run_threads(2, rank)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_gradients_whose_memory_contains_the_conjugate(is_own: bool, by_hand: bool) -> None:
    def rank(group: Group) -> None:
        params = [nn.Parameter(torch.ones(3, dtype=torch.complex128)), nn.Parameter(torch.ones(3))]
        if is_own:
            optimizer = horo_lite.DistributedOptimizer(OwnOptimizer(params), group=group)
        else:
            optimizer = wrap(torch.optim.SGD(params, lr=0.0), group)
        x = torch.arange(3.0) + 1j * (1 + 2 * group.rank)
        if by_hand:
            params[0].grad, params[1].grad = x.to(torch.complex128).conj(), x.conj().imag
            assert params[0].grad.is_conj()
            assert params[1].grad.is_neg()
        else:
            (params[0].conj() * x.conj()).real.sum().backward()
        optimizer.step()
        assert params[0].grad.tolist() == [0 - 2j, 1 - 2j, 2 - 2j]
        assert params[1].grad is None or params[1].grad.tolist() == [-2.0] * 3

    run_threads(2, rank)


@pytest.mark.parametrize("when", ["between passes", "before a step of fewer passes"])
@pytest.mark.parametrize("views", [False, True])
def test_clipping_gradients_that_are_not_averages_yet_is_an_error(when: str, views: bool) -> None:
    """Each rank would clip its own, by a different norm."""

    def train(net: Any, optimizer: Any, n: int, rank: int, clip_early: bool = False) -> None:
        def step(first: int, passes: int) -> None:
            for k in range(first, first + passes):
                x, y = samples(k)
                loss_of(net, x.chunk(n)[rank], y.chunk(n)[rank]).backward()
                if clip_early and when == "between passes":
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            if passes == 1 and n > 1 and not clip_early:
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

        step(0, 2)
        if not clip_early or when == "before a step of fewer passes":
            step(2, 1)

    def rank(group: Group) -> Any:
        net = network()
        options = {"backward_passes_per_step": 2, "gradient_as_bucket_view": views}
        optimizer = wrap(sgd(net), group, net, **options)
        with pytest.raises(RuntimeError, match="was changed in place before it was averaged"):
            train(net, optimizer, group.size, group.rank, clip_early=True)
        fill(net)
        optimizer.zero_grad()
        train(net, optimizer, group.size, group.rank)
        return net

    alone = network()
    train(alone, sgd(alone), 1, 0)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("by_hand", [False, True])
def test_clip_grad_norm_averages_what_is_left(by_hand: bool) -> None:
    def rank(group: Group) -> list[Any]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), group, backward_passes_per_step=2)
        if by_hand:
            weight.grad = torch.full((1,), 2.0 + 4.0 * group.rank)
        else:
            ((2.0 + 4.0 * group.rank) * weight).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return [norm.item(), weight.item()]

    assert run_threads(2, rank) == [pytest.approx([4.0, -1.0])] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_needs_averages(fused: bool, unscales: bool) -> None:
    """Otherwise it skips the step on a rank that overflows, and takes it on the others."""

    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(sgd(net, fused=fused), group, net, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu")

        def step(*, averaged: bool) -> None:
            loss = loss_of(net, *samples(group.rank)) * (math.inf if group.rank else 1.0)
            scaler.scale(loss).backward()
            if averaged:
                optimizer.synchronize()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)

        with pytest.raises(RuntimeError, match=r"optimizer.synchronize\(\) before scaler"):
            step(averaged=False)
        optimizer.zero_grad()
        scaler.update(65536.0)
        step(averaged=True)
        scaler.update()
        return net, scaler.get_scale()

    for net, scale in run_threads(2, rank):
        assert_same_weights(net, network())
        assert scale == 32768.0


def test_fewer_passes_are_flushed_and_the_model_may_zero_its_gradients() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(sgd(net), group, net, backward_passes_per_step=3)
        seen = []
        for how in ("synchronize", "step"):
            optimizer.zero_grad()
            for k in range(2):
                loss_of(net, *samples(10 * k + group.rank)).backward()
            local = gradients(net)
            if how == "step":
                optimizer.step()
            else:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            seen.append((local, gradients(net)))
        # zero_grad() of the module, as after a step that a scaler has skipped: no excess pass.
        optimizer.set_backward_passes_per_step(1)
        for step in range(3):
            net.zero_grad()
            loss_of(net, *samples(step + group.rank)).backward()
            averages = gradients(net)
        seen.append((averages, averages))
        return seen

    (*first, (a, _)), (*second, (b, _)) = run_threads(2, rank)
    assert_same(a, b)
    for (a, averaged_a), (b, averaged_b) in zip(first, second, strict=True):
        assert not torch.equal(a[0], b[0])
        assert_same(averaged_a, [(p + q) / 2 for p, q in zip(a, b, strict=True)])
        assert_same(averaged_a, averaged_b)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("by_hand", [False, True])
def test_skipping_an_exchange_that_has_not_taken_place_is_an_error(by_hand: bool) -> None:
    def rank(group: Group) -> None:
        weight, unused = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([weight, unused], lr=1.0)
        optimizer = wrap(inner, group, backward_passes_per_step=2)
        for synchronizes in (False, True):
            optimizer.zero_grad()
            if by_hand:
                weight.grad = torch.full((3,), 1.0 + group.rank)
            else:
                (weight * (1.0 + group.rank)).sum().backward()
            if synchronizes:
                optimizer.synchronize()
                weight.grad, unused.grad = weight.grad / 3, torch.zeros(3)
            refused = pytest.raises(RuntimeError, match="without synchronize")
            with (
                optimizer.skip_synchronize(),
                contextlib.nullcontext() if synchronizes else refused,
            ):
                optimizer.step()
        assert weight.tolist() == [-0.5] * 3

    run_threads(2, rank)


def test_retained_graphs_second_derivatives_and_other_threads() -> None:
    def run(net: Any, optimizer: Any, rank: int, size: int) -> list[Any]:
        seen = []
        x, y = samples(0)
        x, y = x[rank::size].requires_grad_(), y[rank::size]
        for step in range(3):
            optimizer.zero_grad()
            # torch.autograd.grad does not change gradients of parameters.
            (slope,) = torch.autograd.grad(loss_of(net, x, y) * len(x), x, create_graph=True)
            torch.autograd.grad(loss_of(net, x, y), list(net.parameters()))
            assert all(p.grad is None for p in net.parameters())
            penalty = slope.pow(2).sum(1).mean()  # its gradient is a double backward
            if step == 0:
                (loss_of(net, x, y) + penalty).backward(create_graph=True)
                assert net[0].weight.grad.requires_grad
                for p in net.parameters():
                    p.grad.requires_grad_(False) if p.grad.is_leaf else p.grad.detach_()
            elif step == 1:  # one graph, twice
                loss = loss_of(net, x, y) + penalty
                optimizer.set_backward_passes_per_step(2) if size > 1 else None
                loss.backward(retain_graph=True)
                loss.backward()
                optimizer.set_backward_passes_per_step(1) if size > 1 else None
            else:
                thread = threading.Thread(target=(loss_of(net, x, y) + penalty).backward)
                thread.start()
                thread.join()
            seen += gradients(net)
            optimizer.step()
        return seen

    def rank(group: Group) -> Any:
        net = network()
        return run(net, wrap(sgd(net), group, net), group.rank, group.size)

    alone = network()
    expected = run(alone, sgd(alone), 0, 1)
    for seen in run_threads(2, rank):
        assert_same(seen, expected)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, deep: bool = False) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.reentrant = reentrant
        self.deep = deep

    def forward(self, x: Any) -> Any:
        def run(f: Any, x: Any) -> Any:
            return checkpoint(f, x, use_reentrant=self.reentrant)

        x = run(self.first, x)
        for _ in range(2):  # the same parameters in two inner passes
            x = run(lambda x: self.shared(x).tanh(), x)
        if self.deep:
            return run(lambda x: run(self.last, x), x)
        return self.last(x)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, deep: bool, watched: Any) -> None:
    def rank(group: Group) -> None:
        net = fill(Checkpointed(reentrant, deep))
        alone = copy.deepcopy(net)
        record = watched(group)
        optimizer, other = wrap(sgd(net), record, net), sgd(alone)
        for step in range(4):
            record.left.clear()
            x, y = samples(step)
            optimizer.zero_grad()
            other.zero_grad()
            loss_of(net, x[group.rank :: 2].requires_grad_(), y[group.rank :: 2]).backward()
            loss_of(alone, x.requires_grad_(), y).backward()
            assert_same(gradients(net), gradients(alone))
            # Once each.
            assert record.names() == sorted(name for name, _ in net.named_parameters())
            optimizer.step()
            other.step()
        assert_same_weights(net, alone)

    run_threads(2, rank)


def test_passes_inside_of_passes_that_begin_later() -> None:
    def rank(group: Group) -> None:
        net = fill(Checkpointed(reentrant=False))
        alone = copy.deepcopy(net)
        optimizer, other = wrap(sgd(net), group, net), sgd(alone)
        for step in range(4):
            x, y = samples(step)

            def backward(x: Any = x, y: Any = y) -> None:
                optimizer.zero_grad()
                loss_of(net, x[group.rank :: 2].requires_grad_(), y[group.rank :: 2]).backward()

            if step == 2:
                net.reentrant = True
                with pytest.raises(RuntimeError, match="repeat this step"):
                    backward()
            backward()
            optimizer.step()
            other.zero_grad()
            loss_of(alone, x, y).backward()
            other.step()
        assert_same_weights(net, alone)

    run_threads(2, rank)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_a_pass_that_adds_to_a_gradient_of_the_pass_around_it(sent: bool, views: bool) -> None:
    def rank(group: Group) -> list[float]:
        p, q = (nn.Parameter(torch.ones(100)) for _ in range(2))
        options = {"gradient_as_bucket_view": views}
        optimizer = wrap(torch.optim.SGD([q, p], lr=1.0), group, **options)
        factor = group.rank + 1.0

        @torch.enable_grad()
        def inside(_: Any) -> None:
            (4.0 * factor * p).sum().backward()

        def backward(*, inner: bool) -> None:
            optimizer.zero_grad()
            around = q * 1.0
            if inner:  # after p's gradient, since autograd prefers leaves
                around.register_hook(inside)
            (factor * around * p).sum().backward(create_graph=not sent)

        if sent:
            for _ in range(2):
                backward(inner=False)
            with pytest.raises(RuntimeError, match="repeat this step"):
                backward(inner=True)
        backward(inner=True)
        return p.grad.tolist()

    assert run_threads(2, rank) == [[7.5] * 100] * 2


def test_passes_inside_of_the_hook_of_a_loss_without_a_graph() -> None:
    """As gradient caching runs them, one for each part of the batch."""

    def train(net: Any, optimizer: Any, rank: int, size: int) -> None:
        for step in range(4):
            parts = [part[rank::size] for part in samples(step)[0].chunk(2)]
            loss = torch.ones(1, requires_grad=True)

            @torch.enable_grad()
            def inside(factor: Any, parts: Any = parts) -> None:
                for x in parts:
                    (factor * net(x).square().mean()).backward()

            loss.register_hook(inside)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # of averages
            optimizer.step()

    def rank(group: Group) -> Any:
        net = network()
        train(net, wrap(sgd(net), group, net), group.rank, group.size)
        return net

    alone = network()
    train(alone, sgd(alone), 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("to_none", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_passes_whose_end_is_not_reported(to_none: bool, drops: bool) -> None:
    """They are inside the last hook of a leaf, after which autograd evaluates nothing."""

    def train(net: Any, optimizer: Any, rank: int, size: int) -> None:
        for step in range(4):
            x, y = (samples_of[rank::size] for samples_of in samples(step))
            leaf = torch.ones(1, requires_grad=True)

            @torch.enable_grad()
            def inside(_: Any, x: Any = x, y: Any = y) -> None:
                loss_of(net, x, y).backward()

            leaf.register_post_accumulate_grad_hook(inside)
            optimizer.zero_grad(set_to_none=to_none)
            if size > 1:
                optimizer.set_weight(len(x))
            leaf.backward()
            if drops:
                optimizer.zero_grad(set_to_none=to_none)
                if size > 1:
                    optimizer.set_weight(len(x))
                loss_of(net, x, y).backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    def rank(group: Group) -> Any:
        net = network()
        train(net, wrap(sgd(net), group, net), group.rank, group.size)
        return net

    alone = network()
    train(alone, sgd(alone), 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


def test_a_pass_that_adds_after_an_exchange_inside_it() -> None:
    def rank(group: Group) -> list[float]:
        p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
        optimizer = wrap(torch.optim.SGD([q, p], lr=1.0), group)
        factor = group.rank + 1.0

        @torch.enable_grad()
        def inside(_: Any) -> None:  # after p's gradient, since autograd prefers leaves
            optimizer.synchronize()
            (4.0 * factor * p).sum().backward()

        around = q * 1.0
        around.register_hook(inside)
        (factor * around * p).sum().backward()
        return p.grad.tolist()

    assert run_threads(2, rank) == [[7.5] * 2] * 2


@pytest.mark.shows("jit")
def test_compiled() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(sgd(net), group, net)
        for step in range(3):
            x, y = samples(step)
            optimizer.zero_grad()
            compiled[group.rank](net, x[group.rank :: 2], y[group.rank :: 2]).backward()
            optimizer.step()
        return net

    # The compiler does not support several threads at once.
    lock = threading.Lock()

    def under(lock: Any, f: Any) -> Any:
        def call(*args: Any) -> Any:
            with lock:
                return f(*args)

        return call

    compiled = [
        under(lock, torch.compile(loss_of, backend="aot_eager", dynamic=False)) for _ in range(2)
    ]
    alone = network()
    optimizer = sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(alone, *samples(step)).backward()
        optimizer.step()
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


# Which gradients take part.


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Any, head: str = "one") -> Any:
        return getattr(self, head)(self.body(x).tanh())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_only_what_was_touched_takes_part(set_to_none: bool, watched: Any) -> None:
    def rank(group: Group) -> None:
        net = fill(Heads())
        record = watched(group)
        net.two.bias.grad = torch.full((3,), 1.0 + group.rank, dtype=torch.float64)  # from before
        optimizer = wrap(sgd(net), record, net)
        for step in range(3):
            record.left.clear()
            if step:
                optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(net, *samples(step + 10 * group.rank)).backward()
            touched = ["body.bias", "body.weight", "one.bias", "one.weight"]
            assert record.names() == touched + ["two.bias"] * (step == 0)
            assert net.unused.weight.grad is None
            if step == 0:
                assert torch.equal(net.two.bias.grad, torch.full((3,), 1.5).double())
            optimizer.step()
            assert len(record.left) <= 5 - (step > 0)

    run_threads(2, rank)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_given_up_leaves_all_ranks_the_same(set_to_none: bool) -> None:
    """Zeros in place of a gradient that was never exchanged are on all ranks, or on none."""

    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net, weight_decay=0.1), group, net, backward_passes_per_step=2)
        x, y = samples(group.rank)
        # The first of two passes; then the others of the batch are skipped.
        nn.functional.cross_entropy(net(x, ("one", "two")[group.rank]), y).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(2):
            loss_of(net, x, y).backward()
        assert (net.two.weight.grad is None) == set_to_none
        optimizer.step()
        return net

    a, b = run_threads(2, rank)
    assert_same_weights(a, b)


def test_zeros_that_the_module_sets_to_zero_again_have_not_been_changed() -> None:
    def rank(group: Group) -> list[float]:
        net = nn.Linear(2, 1, bias=False)
        optimizer = wrap(sgd(net), group, backward_passes_per_step=2)
        x = torch.full((1, 2), group.rank + 1.0)
        net(x).sum().backward()
        optimizer.zero_grad(set_to_none=False)
        net.zero_grad(set_to_none=False)
        for _ in range(2):
            net(x).sum().backward()
        return net.weight.grad.flatten().tolist()

    assert run_threads(2, rank) == [[3.0, 3.0]] * 2


def test_gradients_that_a_rank_in_join_did_not_receive() -> None:
    """They are zeros on all ranks afterwards, and not on those only that had more batches."""

    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net, weight_decay=0.1), group, net)
        for head in ("one", "two")[: 1 if group.rank == 2 else 2]:  # rank 2 has one batch
            optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(net(samples(group.rank)[0], head), samples(0)[1]).backward()
            optimizer.step()
        last = group.join()
        broadcast_parameters(net, last, group=group)
        optimizer.zero_grad(set_to_none=False)
        loss_of(net, *samples(9 + group.rank)).backward()  # "one"
        assert net.two.weight.grad is not None
        optimizer.step()
        return net

    a, b, c = run_threads(3, rank)
    assert_same_weights(a, b)
    assert_same_weights(a, c)


def test_touched_on_some_ranks_only() -> None:
    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net), group, net)
        seen = []
        for step in range(4):
            if step < 2:
                optimizer.zero_grad(set_to_none=True)
            elif step == 2:
                optimizer.zero_grad(set_to_none=False)
            # In the last step, nothing is zeroed: what the others hold must not be added.
            head = ("one", "two")[(group.rank + step) % 2] if step < 3 else "one"
            before = gradients(net)
            if step < 3 or group.rank == 0:
                x, y = samples(step + 10 * group.rank)
                nn.functional.cross_entropy(net(x, head), y).backward()
            optimizer.synchronize()
            local = fill(Heads())
            local.load_state_dict(net.state_dict())
            if step < 3 or group.rank == 0:
                nn.functional.cross_entropy(local(x, head), y).backward()
            seen.append((before, gradients(local), gradients(net)))
            optimizer.step()
        return seen

    for step, both in enumerate(zip(*run_threads(2, rank), strict=True)):
        (before_a, local_a, got_a), (_, local_b, got_b) = both
        for i, (a, b) in enumerate(zip(local_a, local_b, strict=True)):
            if a is None and b is None:
                if step < 3:
                    assert got_a[i] is None
                continue
            zeros = torch.zeros_like(a if a is not None else b)
            total = (zeros if a is None else a) + (zeros if b is None else b)
            if step == 3:
                total = total + before_a[i]  # rank 0's pass was added to the existing gradient
            torch.testing.assert_close(got_a[i], total / 2)
            torch.testing.assert_close(got_b[i], total / 2)


def test_losses_with_passes_of_their_own() -> None:
    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net), group, net)
        for step in range(3):
            optimizer.zero_grad()
            features = torch.ones(2, 4, dtype=torch.float64) * (group.rank + 1)
            (net.one(features).pow(2).sum() * (step + 1)).backward()
            one = net.one.weight.grad.clone()
            (net.two(features).pow(2).sum() * (step + 1)).backward()
            assert torch.equal(net.one.weight.grad, one)  # not a second time
            optimizer.step()
        return net

    a, b = run_threads(2, rank)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_several_optimizers_on_one_model() -> None:
    def steps(net: Any, body: Any, head: Any, rank: int, size: int) -> None:
        for step in range(4):
            x, y = (a[rank::size] for a in samples(step))
            body.zero_grad()
            head.zero_grad()
            loss_of(net, x, y).backward()
            if step % 2:
                head.step()
            body.step()

    def rank(group: Group) -> Any:
        net = fill(Heads())
        body = wrap(sgd(net.body), group)
        head = wrap(torch.optim.Adam(net.one.parameters(), lr=0.1), group)
        steps(net, body, head, group.rank, group.size)
        return net

    alone = fill(Heads())
    steps(alone, sgd(alone.body), torch.optim.Adam(alone.one.parameters(), lr=0.1), 0, 1)
    for net in run_threads(3, rank):
        assert_same_weights(net, alone)


def test_optimizers_whose_gradients_come_in_another_order_on_each_rank() -> None:
    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizers = [wrap(sgd(part), group) for part in (net.one, net.two)]
        parts = [net.one, net.two] if group.rank == 0 else [net.two, net.one]
        order: list[str] = []
        for name in ("one", "two"):
            net.get_parameter(f"{name}.bias").register_hook(lambda g, n=name: order.append(n))
        for step in range(3):
            x = torch.full((2, 4), 1.0 + group.rank + step, dtype=torch.float64)
            for optimizer in optimizers:
                optimizer.zero_grad()
            first, second = (part(x).pow(2).sum() for part in parts)
            (first + second).backward()
            for optimizer in optimizers:
                optimizer.step()
        return net, order

    (a, order), (b, other_order) = run_threads(2, rank)
    assert order != other_order
    assert_same_weights(a, b)


def test_gradients_that_are_not_finite_do_not_keep_those_of_other_optimizers_back() -> None:
    def rank(group: Group) -> None:
        named = {name: nn.Parameter(torch.ones(2)) for name in "abc"}
        options = {"process_set": group, "check_finite": "raise", "check_every": 1}
        optimizers = [
            DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [(name, p)], **options)
            for name, p in named.items()
        ]
        bad = math.nan if group.rank else 1.0
        with pytest.raises(NonFiniteError, match="'a'"):  # the first one's
            (bad * (named["a"] + named["c"]) + (1.0 + group.rank) * named["b"]).sum().backward()
        assert named["b"].grad.tolist() == [1.5] * 2
        optimizers[1].step()

    run_threads(2, rank)


def test_parameters_added_later_unfrozen_and_shared() -> None:
    def steps(net: Any, optimizer: Any, rank: int, size: int) -> None:
        for step in range(6):
            if step == 1:
                net.body.weight.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": list(net.two.parameters()), "lr": 0.3})
            if step == 4:
                net.two.weight = net.one.weight  # tied from now on
            x, y = (a[rank::size] for a in samples(step))
            net.zero_grad()
            (loss_of(net, x, y) + nn.functional.cross_entropy(net(x, "two"), y)).backward()
            optimizer.step()

    def optimizer_of(net: Any) -> Any:
        net.body.weight.requires_grad_(False)
        return torch.optim.SGD([*net.body.parameters(), *net.one.parameters()], lr=0.1)

    def rank(group: Group) -> Any:
        net = fill(Heads())
        steps(net, wrap(optimizer_of(net), group), group.rank, group.size)
        return net

    alone = fill(Heads())
    steps(alone, optimizer_of(alone), 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("comes", ["unfrozen", "put into param_groups"])
def test_parameters_that_come_later_are_averages_when_backward_returns(comes: str) -> None:
    """Also if no other parameter has a gradient: what is clipped next are averages."""

    def rank(group: Group) -> list[float]:
        frozen, new = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
        optimizer = wrap(torch.optim.SGD([frozen], lr=1.0), group)
        if comes == "unfrozen":
            new = frozen.requires_grad_(True)
        else:
            optimizer.param_groups[0]["params"] = [new]
        optimizer.zero_grad()
        ((group.rank + 1.0) * new).sum().backward()
        return new.grad.tolist()

    assert run_threads(2, rank) == [[1.5] * 3] * 2


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("sparse", "torch.sparse_coo"), ("csr", "torch.sparse_csr"), ("meta", "without memory")],
)
def test_a_frozen_parameter_without_dense_memory(kind: str, refused: str) -> None:
    """It stays as it is; a state that is divided cannot include it."""

    def wrapped(group: Group, **options: Any) -> Any:
        value = {
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "meta": torch.empty(3, device="meta"),
        }[kind]
        parameters = nn.Parameter(torch.zeros(3)), nn.Parameter(value, requires_grad=False)
        named = [("dense", parameters[0]), ("odd", parameters[1])]
        return DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), named, process_set=group, **options
        )

    def rank(group: Group) -> list[float]:
        optimizer = wrapped(group)
        dense, _ = optimizer.param_groups[0]["params"]
        for _ in range(2):
            optimizer.zero_grad()
            ((group.rank + 1.0) * dense).sum().backward()
            optimizer.step()
        return dense.tolist()

    assert run_threads(2, rank) == [[-3.0] * 3] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        message = fails_alike(2, lambda group: wrapped(group, shard_state=True).step(), ValueError)
    assert "'odd'" in message
    assert refused in message


def test_a_lazy_parameter_is_an_error_that_names_it() -> None:
    def rank(group: Group) -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
        with pytest.raises(ValueError, match=r"'1\.weight' is uninitialized.*call the module"):
            wrap(sgd(net), group, net)
        net(torch.ones(1, 2))
        wrap(sgd(net), group, net)

    run_threads(2, rank)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("first", ["new", "old"])
def test_a_new_head_is_averaged_without_the_optimizers_zero_grad(
    first: str, passes: int, views: bool
) -> None:
    """The body's hook finds it, whether autograd has already reached it or not."""

    def rank(group: Group) -> list[Any]:
        body, former, head = (nn.Parameter(torch.ones(3)) for _ in range(3))
        optimizer = wrap(
            torch.optim.SGD([body, former], lr=1.0),
            group,
            backward_passes_per_step=passes,
            gradient_as_bucket_view=views,
        )
        for x in [former, head, head]:
            optimizer.param_groups[0]["params"][1] = x
            a, b = (body, x) if first == "new" else (x, body)  # the last one used comes first
            for p in [body, former, head]:
                p.grad = None  # as by the module's zero_grad()
            for _ in range(passes):
                ((group.rank + 1.0) * (a * 2.0 * b) + 0.0 * former).sum().backward()
            averages = [body.grad.tolist(), x.grad.tolist()]
        return averages

    assert run_threads(2, rank) == [[[3.0 * passes] * 3] * 2] * 2


@pytest.mark.parametrize("first", ["kept", "removed"])
def test_a_parameter_taken_out_of_param_groups_is_not_averaged(first: str) -> None:
    """Its hook runs once more, if no other has found that it is gone."""

    def rank(group: Group) -> list[Any]:
        kept, removed = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = wrap(torch.optim.SGD([kept, removed], lr=1.0), group)
        a, b = (removed, kept) if first == "kept" else (kept, removed)  # the last comes first
        for step in range(3):
            if step == 1:
                del optimizer.param_groups[0]["params"][1]
            removed.grad = kept.grad = None  # as by the module's zero_grad()
            ((group.rank + 1.0) * (a * 2.0 * b)).sum().backward()
        return [removed.grad.tolist(), kept.grad.tolist()]

    for number, (removed, kept) in enumerate(run_threads(2, rank)):
        assert removed == [2.0 * (number + 1)] * 3
        assert kept == [3.0] * 3


def test_a_parameter_taken_out_of_param_groups_is_freed() -> None:
    """With its gradient: an optimizer whose layers are replaced would keep all of them."""

    def rank(group: Group) -> bool:
        weights = [nn.Parameter(torch.ones(3)) for _ in "ab"]
        inner = torch.optim.SGD(weights, lr=1.0)
        named = [("a", weights[0]), ("b", weights[1])]
        optimizer = DistributedOptimizer(inner, named, process_set=group)
        named.clear()
        removed = weakref.ref(weights[0])
        for step in range(2):
            if step == 1:
                del weights[0], inner.param_groups[0]["params"][0]
            optimizer.zero_grad()
            torch.stack(weights).sum().backward()
            optimizer.step()
        gc.collect()
        return removed() is None

    assert run_threads(2, rank) == [True, True]


@pytest.mark.parametrize("op", [Average, Sum])
@pytest.mark.parametrize("replaces", [True, False])
def test_parameters_put_into_param_groups_by_hand(replaces: bool, op: Any) -> None:
    """A new head, without add_param_group(): averaged from its first gradient on."""

    def rank(group: Group) -> list[Any]:
        body, head = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = wrap(torch.optim.SGD([body, head], lr=1.0), group, op=op)
        for step in range(3):
            if step == 1:
                head = nn.Parameter(torch.ones(3))
                params = optimizer.param_groups[0]["params"]
                params[1 if replaces else 2 :] = [head]
            optimizer.zero_grad()
            ((group.rank + 1.0) * body + (group.rank + 3.0) * head).sum().backward()
            optimizer.step()
        return [body.tolist(), head.tolist()]

    n = 1 if op is Sum else 2
    for body, head in run_threads(2, rank):
        assert body == [1 - 3 * 3 / n] * 3
        assert head == [1 - 2 * 7 / n] * 3


def test_gradients_assigned_by_hand_are_exchanged_by_step() -> None:
    def rank(group: Group) -> Any:
        weight = torch.nn.Parameter(torch.zeros(3))
        master = torch.zeros(3)  # does not require a gradient: it cannot have a hook
        optimizer = wrap(torch.optim.SGD([weight, master], lr=1.0), group)
        for step in range(3):
            weight.grad = torch.full((3,), 1.0 + group.rank + step)
            if step == 0:
                master.grad = torch.full((3,), 2.0 + group.rank)
            else:
                master.grad.fill_(2.0 + group.rank)
            optimizer.step()
        return weight.tolist() + master.tolist()

    assert run_threads(2, rank) == [[-7.5] * 3 + [-7.5] * 3] * 2


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("write", ["copy_", "data", "fill_"])
def test_gradients_written_into_a_tensor_that_stays_are_exchanged_by_step(
    write: str, views: bool
) -> None:
    """As with torch.func, and Apex's master weights, whose version counter .data bypasses."""

    def rank(group: Group) -> Any:
        weight, master = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)
        both = [weight, master]
        options = {"gradient_as_bucket_view": views}
        optimizer = wrap(torch.optim.SGD(both, lr=1.0, momentum=0.5), group, **options)
        for step in range(4):
            for k, p in enumerate(both):
                value = torch.full((3,), 1.0 + group.rank + step + 10 * k)
                if p.grad is None:
                    p.grad = torch.empty_like(p)
                if write == "data":
                    p.grad.data.copy_(value)
                elif write == "copy_":
                    p.grad.copy_(value)
                else:
                    p.grad.fill_(value[0])
            optimizer.step()
        return [p.tolist() for p in both]

    alone = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer = torch.optim.SGD(alone, lr=1.0, momentum=0.5)
    for step in range(4):
        for k, p in enumerate(alone):
            p.grad = torch.full((3,), 1.5 + step + 10 * k)
        optimizer.step()
    assert run_threads(2, rank) == [[p.tolist() for p in alone]] * 2


def test_a_closure_that_writes_gradients_into_a_tensor_that_stays() -> None:
    def rank(group: Group) -> Any:
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        target = torch.arange(2.0).double() + group.rank
        optimizer = wrap(torch.optim.LBFGS([weight], line_search_fn="strong_wolfe"), group)

        def closure() -> Any:
            gradient = 4 * (weight.detach() - target) ** 3
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad.copy_(gradient)
            return ((weight.detach() - target) ** 4).sum()

        optimizer.step(closure)
        optimizer.step(closure)
        return weight.tolist()

    (a, b) = run_threads(2, rank)
    assert a == b
    assert a == pytest.approx([0.5, 1.5], abs=1e-2)


def test_gradients_from_before_the_optimizer_are_exchanged_by_a_step_without_backward() -> None:
    def rank(group: Group) -> Any:
        net = network()
        x, y = samples(0)
        loss_of(net, x[group.rank :: 2], y[group.rank :: 2]).backward()
        optimizer = wrap(sgd(net), group, net)
        optimizer.step()
        return net

    alone = network()
    loss_of(alone, *samples(0)).backward()
    sgd(alone).step()
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("replaces", [True, False])
def test_hooks_that_change_a_gradient_on_its_way_are_an_error_and_earlier_ones_are_not(
    replaces: bool,
) -> None:
    def rank(group: Group) -> None:
        def doubled(p: Any) -> None:
            if replaces:
                p.grad = p.grad * 2
            else:
                p.grad.mul_(2)

        nets = [nn.ParameterList(torch.ones(2) for _ in "ab") for _ in range(2)]
        for p in nets[0]:
            p.register_post_accumulate_grad_hook(doubled)
        optimizers = [wrap(sgd(net), group) for net in nets]
        for p in nets[1]:
            p.register_post_accumulate_grad_hook(doubled)
        for _ in range(2):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                loss = sum((p * (group.rank + 1.0)).sum() for p in net)
                if net is nets[0]:
                    loss.backward()
                    assert [p.grad.tolist() for p in net] == [[3.0, 3.0]] * 2
                else:
                    with pytest.raises(RuntimeError, match=r"changed during backward.*register"):
                        loss.backward()

    run_threads(2, rank)


def test_an_earlier_hook_that_takes_the_gradient_away_is_an_error() -> None:
    """It applies each rank's own gradient, as "fused" backward passes do."""

    def rank(group: Group) -> None:
        def apply(p: Any) -> None:
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None

        weight = nn.Parameter(torch.ones(2))
        handle = weight.register_post_accumulate_grad_hook(apply)
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), group)
        with pytest.raises(RuntimeError, match=r"'param_groups\[0\]\[0\]' was set to None during"):
            (weight * (group.rank + 1.0)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        weight.data.fill_(1.0)
        (weight * (group.rank + 1.0)).sum().backward()
        optimizer.step()
        assert weight.tolist() == [-0.5] * 2

    run_threads(2, rank)


def test_sums_of_rows_are_added_to_after_they_were_set_to_zero() -> None:
    def rank(group: Group) -> list[float]:
        table = nn.Embedding(3, 1, sparse=True)
        table.weight.data.fill_(0)
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=1.0), group, op=Sum)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            table(torch.tensor([0, group.rank])).sum().backward()
            optimizer.step()
        return table.weight.flatten().tolist()

    assert run_threads(2, rank) == [[-6.0, -2.0, 0.0]] * 2


def test_nothing_is_left_of_a_step_with_a_gradient_changed_too_early() -> None:
    """By then, the gradient of another parameter has been sent."""

    def rank(group: Group) -> None:
        first, last = weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
        optimizer = wrap(torch.optim.SGD(weights, lr=1.0), group, backward_passes_per_step=2)

        def backward(factor: float, *used: Any) -> None:
            (sum(w.sum() for w in used) * (factor + group.rank)).backward()

        for _ in range(2):
            optimizer.zero_grad()
            backward(1.0, *weights)
            backward(1.0, *weights)
        optimizer.zero_grad()
        backward(1.0, *weights)
        first.grad.mul_(2)
        with pytest.raises(RuntimeError, match="was changed in place before it was averaged"):
            backward(1.0, last)
        optimizer.zero_grad()
        backward(3.0, *weights)
        backward(3.0, *weights)
        assert [w.grad.unique().tolist() for w in weights] == [[7.0]] * 2

    run_threads(2, rank)


def test_when_a_weight_comes_too_late() -> None:
    """Not after a pass that failed; but inside of one, and while some gradient is held."""

    def rank(group: Group) -> list[float]:
        first, last = weights = [nn.Parameter(torch.ones(1)) for _ in "ab"]
        optimizer = wrap(torch.optim.SGD(weights, lr=1.0), group)

        def backward() -> None:
            ((first + last) * (group.rank + 1.0)).sum().backward()

        def fail(_: Any) -> None:
            with pytest.raises(RuntimeError, match="comes too late"):
                optimizer.set_weight(5)
            raise KeyError

        optimizer.set_weight(5)
        handle = first.register_post_accumulate_grad_hook(fail)
        with pytest.raises(KeyError):
            backward()
        handle.remove()
        first.grad = last.grad = None
        optimizer.set_weight(1 + 2 * group.rank)
        backward()
        averages = [float(first.grad), float(last.grad)]
        first.grad = None
        with pytest.raises(RuntimeError, match="comes too late"):
            optimizer.set_weight(5)
        return averages

    assert run_threads(2, rank) == [[1.75, 1.75]] * 2


def test_passes_are_counted_anew_after_each_exchange() -> None:
    def rank(group: Group) -> list[float]:
        weight = nn.Parameter(torch.ones(1))
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), group, backward_passes_per_step=2)
        seen = []
        for _ in range(4):
            (weight * (group.rank + 1.0)).sum().backward()
            seen.append(float(weight.grad))
        optimizer.step()
        return seen

    assert run_threads(2, rank) == [[1.0, 3.0, 4.0, 6.0], [2.0, 3.0, 5.0, 6.0]]


@pytest.mark.parametrize("passes", [1, 2])
def test_nothing_is_left_of_a_pass_whose_gradient_was_taken_away(passes: int) -> None:
    """By then, the gradient of another parameter has been sent."""

    def rank(group: Group) -> None:
        first, last = weights = [nn.Parameter(torch.ones(64)) for _ in range(2)]
        optimizer = wrap(torch.optim.SGD(weights, lr=1.0), group, backward_passes_per_step=2)

        def backward(factor: float) -> None:
            ((first.sum() + last.sum()) * (factor + group.rank)).backward()

        for _ in range(2):
            optimizer.zero_grad()
            backward(1.0)
            backward(1.0)
        handle = first.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        optimizer.zero_grad()
        last.sum().backward()
        with pytest.raises(RuntimeError, match=r"'param_groups\[0\]\[0\]' was set to None during"):
            backward(1.0)
        handle.remove()
        optimizer.zero_grad()
        for _ in range(passes):
            backward(3.0)
        optimizer.synchronize()
        assert [w.grad.unique().tolist() for w in weights] == [[3.5 * passes]] * 2

    run_threads(2, rank)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_hook_that_takes_the_gradients_of_others_away_is_an_error(passes: int) -> None:
    """As LOMO's, which applies those that are there when the next one comes."""

    def rank(group: Group) -> None:
        weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]

        def apply(_: Any) -> None:
            with torch.no_grad():
                for weight in weights:
                    if weight.grad is not None:
                        weight.sub_(weight.grad)
                        weight.grad = None

        for weight in weights:
            weight.register_hook(apply)
        optimizer = torch.optim.SGD(weights, lr=1.0)
        wrapped = wrap(optimizer, group, backward_passes_per_step=passes)
        told = "changed during backward" if passes == 1 else "set to None during backward"
        with pytest.raises(RuntimeError, match=told):
            (sum(weight.sum() for weight in weights) * (group.rank + 1.0)).backward()
        del wrapped

    run_threads(2, rank)


def test_an_exchange_overwrites_what_is_saved_for_backward() -> None:
    def rank(group: Group) -> None:
        weight, factor = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), group)
        weight.grad = torch.full((2,), 1.0 + group.rank)
        loss = (factor * weight.grad).sum()
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_threads(2, rank)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("hooks_first", [True, False])
def test_steps_inside_of_backward(hooks_first: bool, zeroes: bool, set_to_none: bool) -> None:
    """A small optimizer for each parameter, called by a hook."""

    def train(net: Any, wrapper: Any, rank: int, size: int) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in net.parameters()}

        def add_hooks() -> None:
            for p in net.parameters():
                p.register_post_accumulate_grad_hook(step)

        def step(p: Any) -> None:
            optimizers[p].step()
            if zeroes:
                optimizers[p].zero_grad(set_to_none)

        if hooks_first:
            add_hooks()
        for p in optimizers:
            optimizers[p] = wrapper(optimizers[p])
        if not hooks_first:
            add_hooks()
        for i in range(3):
            x, y = samples(i)
            loss_of(net, x[rank::size], y[rank::size]).backward()
            net.zero_grad(set_to_none)

    def rank(group: Group) -> Any:
        net = network()
        train(net, lambda optimizer: wrap(optimizer, group), group.rank, group.size)
        return net

    alone = network()
    train(alone, lambda optimizer: optimizer, 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_embeddings(as_dense: bool) -> None:
    def make(sparse: bool) -> Any:
        table = nn.EmbeddingBag(10, 3, sparse=sparse, mode="sum")
        return fill(nn.ModuleList([table, nn.Linear(3, 3)]))

    def steps(net: Any, optimizer: Any, rank: int, size: int) -> None:
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            words = torch.randint(0, 10, (6, 4), generator=generator)[rank::size]
            optimizer.zero_grad()
            features = net[0](words)
            if step == 3 and size > 1 and rank == 1:
                features = features.detach()  # only some ranks have a sparse gradient
            if step == 3 and size == 1:
                features = torch.cat([f if i % 2 == 0 else f.detach() for i, f in
                                      enumerate(features.unbind())]).reshape(-1, 3)  # fmt: skip
            net[1](features).pow(2).mean().backward()
            assert net[0].weight.grad.is_sparse == (size > 1)
            optimizer.step()

    def rank(group: Group) -> Any:
        net = make(True)
        steps(net, wrap(sgd(net), group, net, sparse_as_dense=as_dense), group.rank, group.size)
        return net

    alone = make(False)
    steps(alone, sgd(alone), 0, 1)
    for net in run_threads(2, rank):
        assert_same_weights(net, alone)


def sparse(indices: list[int], rank: int) -> Any:
    """Return a [4, 2] gradient of rows: row i is i + 1 + 10 * rank, once per occurrence."""
    values = torch.tensor([[i + 1.0 + 10 * rank] * 2 for i in indices], dtype=torch.float64)
    return torch.sparse_coo_tensor(
        torch.tensor([indices], dtype=torch.int64),
        values.reshape(-1, 2),
        (4, 2),
        check_invariants=False,
    )


# Rows of each rank: some twice, some on several ranks, none on one rank.
ROWS = [[0, 1, 1], [1, 3], [], [3, 3, 0]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("by", ["backward", "hand"])
@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_gradients_add_up_row_by_row(size: int, by: str, as_dense: bool) -> None:
    """And are sparse afterwards, as in Horovod, also if they were exchanged as dense ones."""

    def rank(group: Group) -> None:
        for op in (Average, Sum):
            table = nn.Embedding(4, 2, sparse=True).double()
            optimizer = wrap(sgd(table), group, op=op, sparse_as_dense=as_dense)
            mine = sparse(ROWS[group.rank], group.rank)
            for _ in range(2):
                optimizer.zero_grad()
                if by == "hand":
                    table.weight.grad = mine
                    optimizer.synchronize()
                else:
                    rows = torch.tensor(ROWS[group.rank], dtype=torch.int64)
                    weights = mine._values().detach()
                    (table(rows) * weights).sum().backward()
                total = sum(sparse(ROWS[r], r).to_dense() for r in range(size))
                expected = total / size if op is Average else total
                got = table.weight.grad
                assert got.is_sparse
                torch.testing.assert_close(got.to_dense(), expected, rtol=1e-12, atol=0)
                optimizer.step()
                assert table.weight.grad is None or table.weight.grad.is_sparse

    run_threads(size, rank)


@pytest.mark.parametrize("as_dense", [True, False])
def test_a_sum_that_is_used_twice_is_not_summed_twice(as_dense: bool) -> None:
    def rank(group: Group) -> list[list[float]]:
        table = fill(nn.Embedding(4, 2, sparse=True))
        optimizer = wrap(
            torch.optim.SGD(table.parameters(), lr=1.0), group, op=Sum, sparse_as_dense=as_dense
        )
        before = table.weight.detach().clone()
        table(torch.tensor([group.rank, 2])).sum().backward()
        optimizer.step()
        optimizer.step()
        return (before - table.weight.detach())[:, 0].tolist()

    assert run_threads(2, rank) == [pytest.approx([2, 2, 4, 0])] * 2


@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_adam(as_dense: bool) -> None:
    """It takes only sparse gradients; on a rank without rows, too."""

    def train(table: Any, optimizer: Any, ranks: range, size: int) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for k in range(2):
                rows = [ROWS[(r + step + k) % 3] for r in ranks]
                for r, indices in zip(ranks, rows, strict=True):
                    if indices:
                        loss = table(torch.tensor(indices)).pow(2).sum() * (r + 1 + k)
                        (loss / (size if len(ranks) > 1 else 1)).backward()
            optimizer.step()

    def rank(group: Group) -> Any:
        table = fill(nn.Embedding(4, 2, sparse=True))
        adam = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        options = {"sparse_as_dense": as_dense, "backward_passes_per_step": 2}
        optimizer = wrap(adam, group, table, **options)
        train(table, optimizer, range(group.rank, group.rank + 1), group.size)
        return table

    alone = fill(nn.Embedding(4, 2, sparse=True))
    train(alone, torch.optim.SparseAdam(list(alone.parameters()), lr=0.1), range(2), 2)
    for table in run_threads(2, rank):
        assert_same_weights(table, alone)


@pytest.mark.parametrize("as_dense", [True, False])
@pytest.mark.parametrize("then", ["sparse", "dense"])
def test_a_zeroed_sparse_gradient_receives_what_others_computed(then: str, as_dense: bool) -> None:
    """Of rank 0, which does not use the parameter in the second step."""

    def rank(group: Group) -> list[float]:
        table = fill(nn.Embedding(4, 2, sparse=True))
        optimizer = wrap(
            torch.optim.SGD(table.parameters(), lr=1.0), group, sparse_as_dense=as_dense
        )
        before = table.weight.detach().clone()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if group.rank == 1:
            used = table(torch.tensor([2])) if then == "sparse" else table.weight[2] * 1.0
            used.sum().backward()
        optimizer.step()
        return (before - table.weight.detach())[:, 0].tolist()

    for steps in run_threads(2, rank):
        assert steps == pytest.approx([0, 1, 0.5, 0])


@pytest.mark.parametrize("shares", [False, True])
def test_gradients_made_dense_are_sparse_again_on_all_ranks_or_on_none(shares: bool) -> None:
    """Otherwise an optimizer updates sparse rows on some ranks, and dense ones on others."""

    def rank(group: Group) -> list[Any]:
        table = fill(nn.Embedding(4, 2, sparse=True))
        adagrad = torch.optim.Adagrad(table.parameters(), lr=0.1)
        options = {"sparse_as_dense": True, "gradient_as_bucket_view": shares}
        optimizer = wrap(adagrad, group, table, backward_passes_per_step=2, **options)
        found = []
        for case in ("abandoned on rank 1", "dense on rank 1", "sparse", "dense on rank 0"):
            optimizer.zero_grad()
            if case == "abandoned on rank 1" and group.rank == 1:
                table(torch.tensor([0, 1])).sum().backward()
                optimizer.zero_grad(set_to_none=False)  # zeros, where a dense gradient was
            is_dense = case == f"dense on rank {group.rank}"
            for k in range(2):
                rows = torch.tensor([k, group.rank])
                (table.weight[rows] if is_dense else table(rows)).pow(2).sum().backward()
            optimizer.step()
            found.append(table.weight.grad.is_sparse)
        return [found, table.weight.tolist()]

    first, second = run_threads(2, rank)
    assert first == second
    assert first[0] == [True, False, True, False]


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another() -> None:
    def rank(group: Group) -> None:
        table = nn.Embedding(4, 2, sparse=group.rank == 1)
        wrapped = wrap(sgd(table), group, table)
        table(torch.tensor([0, 1])).sum().backward()
        wrapped.step()

    message = fails_alike(3, rank, MismatchError)
    assert "'weight' is sparse on rank 1 and dense on others" in message


@pytest.mark.parametrize("who", ["one", "all"])
def test_an_expanded_gradient_is_averaged(who: str) -> None:
    """As of torch.autograd.grad() of a sum."""

    def rank(group: Group) -> list[Any]:
        weight = nn.Parameter(torch.ones(3, 2))
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), group)
        for _ in range(2):
            value = torch.tensor(1.0 + group.rank)
            is_expanded = who == "all" or group.rank == 0
            weight.grad = value.expand(3, 2) if is_expanded else torch.full((3, 2), float(value))
            optimizer.step()
        return weight.tolist()

    assert run_threads(2, rank) == [[[-2.0] * 2] * 3] * 2


@pytest.mark.parametrize("case", ["overlap", "clipped"])
def test_a_rank_that_cannot_use_its_gradients_fails_on_all_ranks(case: str) -> None:
    def rank(group: Group) -> Any:
        a, b = (nn.Parameter(torch.ones(2)) for _ in "ab")
        given = {"named_parameters": [("a", a), ("b", b)], "backward_passes_per_step": 2}
        optimizer = DistributedOptimizer(
            torch.optim.SGD([a, b], lr=1.0), process_set=group, **given
        )
        for step in range(3):
            ((a + b) * (group.rank + 1.0)).sum().backward()
            if step == 1 and group.rank == 1 and case == "clipped":
                a.grad.mul_(0.5)
            if step == 1 and group.rank == 1 and case == "overlap":
                both = torch.ones(3)
                a.grad, b.grad = both[:2], both[1:]
            if step == 1:
                kind = {"overlap": ValueError, "clipped": RuntimeError}[case]
                said = {"overlap": "'a'.*'b'.*overlap", "clipped": "'a' was changed in place"}[case]
                kind, said = (kind, said) if group.rank else (MismatchError, f"rank 1: .*{said}")
                with pytest.raises(kind, match=said):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return a.tolist() + b.tolist()

    assert run_threads(2, rank) == [[-2.0] * 4] * 2


def test_adasum_of_sparse_gradients_is_an_error_on_all_ranks() -> None:
    def rank(group: Group) -> None:
        table = nn.Embedding(4, 2, sparse=True).double()
        optimizer = wrap(sgd(table), group, op=Adasum, adasum_of="gradients")
        if group.rank:
            table.weight.grad = sparse(ROWS[0], 0)
        optimizer.step()

    assert "sparse_as_dense=True" in fails_alike(2, rank, ValueError)


def test_all_ranks_skip_the_step_that_overflows_on_one() -> None:
    def rank(group: Group) -> Any:
        net = network().float()
        optimizer = wrap(sgd(net), group, net)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        skipped = []
        for step in range(4):
            x, y = samples(step + group.rank)
            optimizer.zero_grad()
            loss = loss_of(net, x.float(), y)
            if step == 1 and group.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            before = net[0].weight.detach().clone()
            scaler.step(optimizer)
            skipped.append(torch.equal(before, net[0].weight))
            scaler.update()
        return skipped, scaler.get_scale(), net

    (first, scale, a), (second, other_scale, b) = run_threads(2, rank)
    assert first == second == [False, True, False, False]
    assert scale == other_scale == 2.0
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# Errors.


def test_a_mismatch_reaches_the_caller_of_backward_on_every_rank_and_the_next_step_works() -> None:
    def rank(group: Group) -> Any:
        net = nn.Linear(3, 2 + group.rank).double()
        optimizer = wrap(sgd(net), group, net)
        net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()

    message = fails_alike(2, rank, MismatchError)
    assert "rank 0 has 'weight' float64[2, 3], rank 1 has 'weight' float64[3, 3]" in message

    def goes_on(group: Group) -> Any:
        net = network()
        optimizer = wrap(sgd(net), group, net)
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                optimizer.set_backward_passes_per_step(1 + group.rank)
                backward = loss_of(net, *samples(step)).backward
                with pytest.raises(MismatchError, match="backward_passes_per_step=2"):
                    (backward(), optimizer.step())
                optimizer.set_backward_passes_per_step(1)
                optimizer.zero_grad()
            loss_of(net, *samples(step + group.rank)).backward()
            optimizer.step()
        return net

    a, b = run_threads(2, goes_on)
    assert_same_weights(a, b)


def test_a_pass_that_breaks_off_leaves_nothing_behind() -> None:
    def rank(group: Group) -> Any:
        net, alone = network(), network()
        optimizer, other = wrap(sgd(net), group, net), sgd(alone)
        broken = [False]

        def hook(gradient: Any) -> None:
            if broken[0]:
                raise KeyError("mine")

        net[0].weight.register_hook(hook)  # after the first bucket has been sent
        for step in range(4):
            x, y = samples(step)
            if step == 2:
                optimizer.zero_grad()
                broken[0] = True
                with pytest.raises(KeyError, match="mine"):
                    loss_of(net, x[group.rank :: 2], y[group.rank :: 2]).backward()
                broken[0] = False
            for n, o, at in ((net, optimizer, slice(group.rank, None, 2)), (alone, other, ...)):
                o.zero_grad()
                loss_of(n, x[at], y[at]).backward()
                o.step()
        assert_same_weights(net, alone)

    run_threads(2, rank)


def test_an_error_in_one_optimizer_leaves_the_others_usable() -> None:
    class Broken:
        @staticmethod
        def compress(tensor: Any) -> Any:
            raise TypeError("cannot be compressed")

        @staticmethod
        def decompress(tensor: Any, context: Any) -> Any:
            return tensor

    def rank(group: Group) -> Any:
        net = fill(Heads())
        odd = torch.nn.Parameter(torch.ones(2))
        first = wrap(torch.optim.SGD([odd], lr=0.1), group, compression=Broken)
        optimizer = wrap(sgd(net), group)
        for step in range(4):
            optimizer.zero_grad()
            first.zero_grad()
            loss = loss_of(net, *samples(step + group.rank))
            if step == 2:
                with pytest.raises(TypeError, match="cannot be compressed"):
                    (loss + odd.abs().sum()).backward()
                optimizer.zero_grad()
                loss = loss_of(net, *samples(step + group.rank))
            loss.backward()
            optimizer.step()
        return net

    a, b = run_threads(2, rank)
    assert_same_weights(a, b)


@pytest.mark.parametrize("how", ["step", "skip_synchronize", "closure", "tensor"])
def test_learning_rates_are_compared_when_they_are_used(how: str) -> None:
    """Until then ranks may differ, as when one has loaded a checkpoint: the others receive it."""

    def rank(group: Group) -> Any:
        net = network()
        rate: Any = 0.1 * (1 + group.rank)
        if how == "tensor":
            rate = torch.tensor(rate, dtype=torch.float64)
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=rate), group, net)

        def step(k: int, *, broadcasts: bool) -> None:
            def closure() -> Any:
                loss = loss_of(net, *samples(k + 10 * group.rank))
                loss.backward()
                return loss

            optimizer.zero_grad()
            if how == "closure":
                if broadcasts:
                    broadcast_optimizer_state(optimizer, 0, group=group)
                optimizer.step(closure=closure)
                return
            closure()
            if broadcasts:
                broadcast_optimizer_state(optimizer, 0, group=group)
            with optimizer.skip_synchronize() if how[:4] == "skip" else contextlib.nullcontext():
                optimizer.step()

        step(0, broadcasts=True)
        optimizer.param_groups[0]["lr"] += 0.1 * group.rank
        before = [p.detach().clone() for p in net.parameters()]
        for k in (1, 2):
            with pytest.raises(MismatchError, match=r"rank 0 has 0\.1, rank 1 has 0\.2, so"):
                step(k, broadcasts=False)
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
        step(3, broadcasts=True)
        step(4, broadcasts=False)
        return net

    a, b = run_threads(2, rank)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(
    ("how", "zeroed_by"),
    [("step", "hand"), ("step", "module"), ("skip", "module"), ("synchronize", "optimizer")],
)
def test_a_failed_exchange_leaves_no_gradients_to_step_with(how: str, zeroed_by: str) -> None:
    def rank(group: Group) -> list[Any]:
        net = nn.Linear(2, 1)
        nn.init.ones_(net.weight)
        nn.init.zeros_(net.bias)
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=1.0), group)

        def backward() -> None:
            (net(torch.ones(1, 2)) * (1.0 + group.rank)).sum().backward()

        if group.rank:
            optimizer.set_weight(1.0)
        with pytest.raises(MismatchError, match="weighted"):
            backward()
        skipping = optimizer.skip_synchronize() if how == "skip" else contextlib.nullcontext()
        call = optimizer.synchronize if how == "synchronize" else optimizer.step
        with skipping, pytest.raises(RuntimeError, match=r"'param_groups\[0\]\[0\]' has failed"):
            call()
        assert net.weight.tolist() == [[1.0, 1.0]]
        if zeroed_by == "hand":
            net.weight.grad = net.bias.grad = None
        else:
            owner = optimizer if zeroed_by == "optimizer" else net
            owner.zero_grad(set_to_none=zeroed_by == "optimizer")
        backward()
        optimizer.step()
        return [*net.weight.tolist(), net.bias.tolist()]

    assert run_threads(2, rank) == [[[-0.5, -0.5], [-1.5]]] * 2


def test_a_closure_may_return_a_float() -> None:
    def rank(group: Group) -> float:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = wrap(torch.optim.SGD([weight], lr=1.0), group)

        def closure() -> float:
            optimizer.zero_grad()
            loss = ((group.rank + 1.0) * (weight + 1.0)).sum()
            loss.backward()
            return loss.item()

        return optimizer.step(closure)

    assert run_threads(2, rank) == [1.5, 1.5]


def test_only_numbers_and_plain_tensors_of_a_state_are_compared() -> None:
    def rank(group: Group) -> None:
        weight = nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([weight], lr=1.0)
        rows = torch.eye(3).to_sparse()
        inner.state[weight] = {
            "name": "x", "none": None, "rows": rows, "meta": torch.ones(3, device="meta"),
            "count": 5 + group.rank,
        }  # fmt: skip
        optimizer = wrap(inner, group)
        ((group.rank + 1.0) * weight).sum().backward()
        optimizer.step()

    with pytest.warns(RuntimeWarning, match="the state of the ranks' optimizers"):
        run_threads(2, rank)


def test_parameters_that_cannot_have_gradients_have_no_hook_and_others_have_one() -> None:
    def rank(group: Group) -> list[Any]:
        weight = nn.Parameter(torch.zeros(3))
        count = nn.Parameter(torch.arange(3), requires_grad=False)
        optimizer = wrap(torch.optim.SGD([weight, count], lr=1.0), group)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        ((group.rank + 1.0) * weight).sum().backward()
        optimizer.step()
        return [weight.tolist(), count.tolist(), len(weight._post_accumulate_grad_hooks)]

    assert run_threads(2, rank) == [[[-1.5] * 3, [0, 1, 2], 1]] * 2


@pytest.mark.parametrize("name", ["weight_decay", "betas", "amsgrad"])
def test_all_numbers_of_the_groups_are_compared(name: str) -> None:
    def rank(group: Group) -> None:
        net = network()
        groups = [{"params": [p], "rank": group.rank} for p in net.parameters()]
        same = {"weight_decay": 0.1, "betas": (0.9, 0.99), "amsgrad": False}
        other = {"weight_decay": 0.2, "betas": (0.9, 0.98), "amsgrad": True}
        # How a step is computed may differ.
        optimizer = torch.optim.AdamW(groups, foreach=group.rank == 1, **same)
        optimizer = wrap(optimizer, group, net)
        for k, differs in enumerate((False, True, False)):
            optimizer.param_groups[1][name] = (other if differs and group.rank else same)[name]
            optimizer.zero_grad()
            loss_of(net, *samples(k)).backward()
            if differs:
                which = {"betas": "betas[1]"}.get(name, name)
                with pytest.raises(MismatchError, match=re.escape(f"{which} of group 1: rank 0")):
                    optimizer.step()
            else:
                optimizer.step()

    run_threads(2, rank)


def test_exchanges_of_different_steps_are_not_mixed() -> None:
    def rank(group: Group) -> None:
        net = fill(Heads())
        optimizer = wrap(sgd(net), group, net)
        ones = torch.ones(1, 4, dtype=torch.float64)
        for _ in range(2):
            net.one(ones).sum().backward()
            if group.rank == 0:
                net.two(ones).sum().backward()  # in one step, rank 1 lacks a whole exchange
            optimizer.step()
            optimizer.zero_grad()

    message = fails_alike(2, rank, MismatchError)
    assert "backward pass 2 of step 1, rank 1 has gradients of optimizer 1, step 2" in message


def test_a_rank_whose_backward_touches_nothing_takes_part_in_step() -> None:
    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net), group, net)
        for step in range(3):
            optimizer.zero_grad()
            if step != 1 or group.rank == 0:
                loss_of(net, *samples(step + group.rank)).backward()
            optimizer.step()
        return net

    a, b = run_threads(2, rank)
    assert_same_weights(a, b)


@pytest.mark.parametrize("change", ["clip", "replace", "unscale"])
def test_changing_gradients_that_another_rank_receives_in_step_is_an_error(change: str) -> None:
    """The other rank has no gradients to change yet: the ranks would take different steps."""

    def rank(group: Group) -> Any:
        net = fill(Heads())
        optimizer = wrap(sgd(net), group, net)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        loss_of(net, *samples(group.rank)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scaled = scaler.scale(loss_of(net, *samples(2)))
        if group.rank == 0:
            scaled.backward()
        if change == "clip":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        elif change == "unscale":
            scaler.unscale_(optimizer)
        else:
            for p in net.parameters():
                p.grad = None if p.grad is None else p.grad * 0.5
        with contextlib.ExitStack() as stack:
            if change == "unscale":  # which leaves no trace on rank 0's gradients
                if group.rank == 1:
                    stack.enter_context(pytest.raises(RuntimeError, match=r"has no loss.*synchr"))
                scaler.step(optimizer)
            else:
                if group.rank == 0:
                    said = r"'body.weight' was changed.*rank 1 had.*synchronize\(\)"
                    stack.enter_context(pytest.raises(RuntimeError, match=said))
                optimizer.step()

    run_threads(2, rank)


@pytest.mark.parametrize("synchronize", [True, False])
def test_changing_gradients_before_another_rank_synchronizes_is_an_error(synchronize: bool) -> None:
    def rank(group: Group) -> None:
        p = nn.Parameter(torch.zeros(3))
        optimizer = wrap(torch.optim.SGD([p], lr=1.0), group)
        if group.rank == 0:
            (8 * p).sum().backward()
            with torch.no_grad():
                p.grad.mul_(0.5)
        if group.rank == 1 or synchronize:
            with pytest.raises(RuntimeError, match="rank 1 had") if group.rank == 0 else nothing():
                optimizer.synchronize()
        else:
            with pytest.raises(RuntimeError, match="rank 1 had"):
                optimizer.step()

    nothing = contextlib.nullcontext
    run_threads(2, rank)


def test_weights_come_before_the_passes_that_they_belong_to() -> None:
    """After an exchange, set_weight() begins a step, but drops no pass."""

    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(sgd(net), group, net, backward_passes_per_step=2)
        optimizer.synchronize()
        loss_of(net, *samples(group.rank)).backward()
        with pytest.raises(RuntimeError, match="comes too late"):
            optimizer.set_weight(12)

    run_threads(2, rank)


@pytest.mark.parametrize("scales", [True, False])
def test_a_rank_without_a_loss_clips_and_unscales_after_synchronize(scales: bool) -> None:
    def steps(net: Any, optimizer: Any, rank: int, size: int) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scales)
        for step in range(4):
            optimizer.zero_grad(set_to_none=step < 2)
            loss = scaler.scale(loss_of(net, *samples(step)) / (2 // size))
            if rank == 0:
                loss.backward()
            if size > 1:
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        return net

    def rank(group: Group) -> Any:
        net = network()
        return steps(net, wrap(sgd(net), group, net), group.rank, group.size)

    alone = network()
    steps(alone, sgd(alone), 0, 1)
    a, b = run_threads(2, rank)
    assert_same_weights(a, alone)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# Real processes.

SCRIPT = """
import io, os, pickle, signal, threading
import torch
import horo_lite as hvd
from horo_lite.horovod.reductions import Adasum  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer

world = hvd.init()
rank, size = world.rank, world.size
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                          torch.nn.Linear(8 * 16, 4)).double()
net = net.to(memory_format=torch.channels_last)
alone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(),
                            torch.nn.Linear(8 * 16, 4)).double()
alone.load_state_dict(net.state_dict())
optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
                                 net.named_parameters())
other = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        # A worker may compute its own gradients.
        weight = torch.nn.Parameter(torch.ones(2))
        net[3].bias.grad = None
        net[3].bias.sum().backward()
        generator = torch.Generator().manual_seed(i)
        return torch.randn((3, 6, 6), generator=generator, dtype=torch.float64), i % 4


loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2,
                                     multiprocessing_context="fork")
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x[rank::size]), y[rank::size]).backward()
    assert net[0].weight.grad.stride() == net[0].weight.stride()
    optimizer.step()
    other.zero_grad()
    torch.nn.functional.cross_entropy(alone(x), y).backward()
    other.step()
for p, q in zip(net.parameters(), alone.parameters()):
    torch.testing.assert_close(p, q)

# Pickled, the optimizer is wrapped again where it is unpickled.
copies = pickle.loads(pickle.dumps([net, optimizer]))
torch.save(net, io.BytesIO())
*_, (x, y) = loader  # to its end: workers that are left in between may fail to remove their files
for n, o in ((net, optimizer), copies):
    o.zero_grad()
    torch.nn.functional.cross_entropy(n(x[rank::size]), y[rank::size]).backward()
    o.step()
for p, q in zip(net.parameters(), copies[0].parameters()):
    assert torch.equal(p, q)

# Ctrl-C reaches a rank that waits inside backward() for another.
hvd.barrier()
if rank == 0:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        net(x).sum().backward()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        os._exit(3)
else:
    import time
    time.sleep(5)
"""


@pytest.mark.mpi
def test_processes_with_forked_workers_pickles_and_signals() -> None:
    result = run_ranks(SCRIPT, 2, timeout_s=60)
    assert "interrupted" in result.stdout, result
    assert "Error" not in result.stderr, result


@pytest.mark.launches
def test_a_scheduler_that_follows_a_ranks_own_loss_is_an_error() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(sgd(net), group, net)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

        def step(loss: float) -> None:
            optimizer.zero_grad()
            loss_of(net, *samples(group.rank)).backward()
            optimizer.step()
            scheduler.step(loss)

        step(1.0)
        step(2.0 if group.rank == 1 else 0.5)
        with pytest.raises(MismatchError, match=r"rank 0 has 0\.1, rank 1 has 0\.01, so"):
            step(0.0)
        broadcast_optimizer_state(optimizer, 0, group=group)
        step(0.0)
        assert check_in_sync(optimizer, group=group)

    run_threads(2, rank)


def train_in_a_process_set_and_in_all() -> None:
    import horo_lite.torch as hvd

    hvd.init()
    rank = hvd.rank()
    some = hvd.add_process_set([0, 2])
    torch.manual_seed(rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    ).double()
    ones = hvd.DistributedOptimizer(torch.optim.Adam(net[0].parameters(), lr=0.1), process_set=some)
    all_ = hvd.DistributedOptimizer(
        torch.optim.SGD(net[2].parameters(), lr=0.1 + rank, momentum=0.9),
        net.named_parameters(),
        hvd.Compression.none,
        1,
        hvd.Average,
        gradient_as_bucket_view=True,
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(all_, root_rank=0)
    for step in range(3):
        x = torch.full((3, 4), float(rank + step + 1), dtype=torch.float64)
        ones.zero_grad()
        all_.zero_grad()
        net(x).pow(2).sum().backward()
        found = hvd.allgather_object([p.grad.tolist() for p in net.parameters()])
        assert found[0][:2] == found[2][:2] != found[1][:2]
        assert found[0][2:] == found[1][2:] == found[2][2:]
        ones.step()
        all_.step()
    assert all_._exchange.reducer.shared is None  # not between hosts
    found = hvd.allgather_object([p.tolist() for p in net.parameters()])
    assert found[0] == found[2]
    assert found[0][2:] == found[1][2:]
    with pytest.raises(ValueError, match="power of two, not 3"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(2)], lr=0.1), op=hvd.Adasum)


@pytest.mark.served
@pytest.mark.mpi
def test_process_sets_and_two_hosts() -> None:
    on_ranks(train_in_a_process_set_and_in_all, 3, hosts="2,1", timeout_s=60)


def use_a_process_set_of_a_former_world() -> None:
    import horo_lite.torch as hvd

    second = hvd.ProcessSet([1])
    hvd.init(process_sets=[second])
    hvd.shutdown()
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="is not registered"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=second)
    hvd.shutdown()


@pytest.mark.served
def test_a_process_set_of_a_former_world_leaves_no_rank_alone() -> None:
    """Its numbers are others' ranks: whoever has none of them would train without the rest."""
    on_ranks(use_a_process_set_of_a_former_world, 2)


def test_a_world_of_one_has_no_hooks(watched: Any) -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(sgd(net), group, net)
        assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
        assert pickle.loads(pickle.dumps(sgd(net))) is not None
        for _ in range(2):
            loss_of(net, *samples(0)).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.set_backward_passes_per_step(2)

    run_threads(1, rank)


# backward() that raises, as when memory runs out.


class _Failing(torch.autograd.Function):
    """The identity; its backward() raises."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise RuntimeError("out of memory (so the test says)")


def layers(fails_at: int | None, net: Any, x: Any) -> Any:
    x = x.requires_grad_()
    for i, layer in enumerate(net):
        x = layer(_Failing.apply(x) if i == fails_at else x)
    return (_Failing.apply(x) if fails_at == len(net) else x).sum()


# The layers at which attempts of one step fail, by rank, and the ranks' result.
ATTEMPTS: dict[str, tuple[list[list[int]], str]] = {
    "all, at different layers": ([[1], [3], [2]], "right"),
    "all, again and again": ([[1, 3], [3, 0], [2, 2]], "right"),
    "one, before anything was sent": ([[4], [], []], "right"),
    "one": ([[0], [], []], "error or right"),
    "one more often than others": ([[1], [3, 2], [2]], "error or right"),
}


@pytest.mark.parametrize("form", ["", "views", "two passes", "two optimizers", "keeps memory"])
@pytest.mark.parametrize("name", ATTEMPTS)
@pytest.mark.parametrize("size", [2, 3])
def test_attempts_that_fail_leave_nothing_in_the_next(size: int, name: str, form: str) -> None:
    """All ranks have the gradients of one whole attempt each, or the same error; then all works.

    As in a loop that catches the error, calls zero_grad() and continues with the next batch.
    """
    failing, expected = ATTEMPTS[name]
    if form == "two optimizers" and name in ("all, at different layers", "all, again and again"):
        # For the first layers' optimizer this is "one": backward passes of some ranks fail before
        # they reach it, and others have sent its gradients.
        expected = "error or right"
    passes = 2 if form == "two passes" else 1
    to_none = form != "keeps memory"

    template = nn.Sequential(*[nn.Linear(6, 6, bias=False).double() for _ in range(4)])

    def batch(rank: int, step: int, attempt: int, k: int) -> Any:
        seed = rank + 10 * step + 100 * attempt + 1000 * k
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).double()

    def rank(group: Group) -> list[Any]:
        net = copy.deepcopy(template)
        options = {"backward_passes_per_step": passes, "gradient_as_bucket_view": form == "views"}
        parts = [net[:2], net[2:]] if form == "two optimizers" else [net]
        optimizers = [
            wrap(torch.optim.SGD(part.parameters(), lr=0.0), group, part, **options)
            for part in parts
        ]
        seen: list[Any] = []
        for step in range(5):
            tries = failing[group.rank] if step == 2 else []
            for attempt, fails_at in enumerate([*tries, None]):
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=to_none)
                try:
                    for k in range(passes):
                        last = k == passes - 1
                        x = batch(group.rank, step, attempt, k)
                        layers(fails_at if last else None, net, x).backward()
                except MismatchError as error:
                    seen.append(str(error))
                    break
                except RuntimeError as error:
                    if "so the test says" not in str(error):
                        raise
            else:
                seen.append(gradients(net))
                for optimizer in optimizers:
                    optimizer.step()
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORO_LITE_BUCKET_BYTES", "64")
        results = run_threads(size, rank)
    for step in range(5):
        outcomes = [seen[step] for seen in results]
        if isinstance(outcomes[0], str):
            assert (step, expected) == (2, "error or right")
            assert len(set(outcomes)) == 1
            assert "zero_grad()" in outcomes[0]
            continue
        whole = copy.deepcopy(template)
        for r in range(size):
            attempt = len(failing[r]) if step == 2 else 0
            for k in range(passes):
                (layers(None, whole, batch(r, step, attempt, k)) / size).backward()
        for outcome in outcomes:
            assert_same(outcome, gradients(whole))


LOST: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "fp16": {"compression": Compression.fp16},
    "sum": {"op": Sum},
    "finite": {"check_finite": "raise"},
    "two passes": {"backward_passes_per_step": 2},
    "weights": {},
    "closure": {},
    "adasum of steps": {"op": Adasum},
    "adasum of gradients": {"op": Adasum, "adasum_of": "gradients"},
}


@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize("kind", LOST)
def test_a_step_after_a_lost_one_has_the_same_bits_as_without_it(kind: str, fails_at: int) -> None:
    """backward() raises on every rank, half way; another optimizer never sees that batch."""
    passes = 2 if kind == "two passes" else 1

    def rank(group: Group) -> Any:
        nets = [fill(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])) for _ in range(2)]
        optimizers = [wrap(sgd(net, momentum=0.9), group, net, **LOST[kind]) for net in nets]

        def batch(net: Any, optimizer: Any, seed: int, fails_at: int | None) -> None:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * seed + group.rank))

            def closure() -> Any:
                optimizer.zero_grad()
                loss = layers(fails_at, net, x.double())
                loss.backward()
                return loss.detach()

            if kind == "closure":
                optimizer.step(closure)
                return
            optimizer.zero_grad()
            if kind == "weights" and seed % 2:  # the lost step's must not be used in the next one
                optimizer.set_weight(seed + group.rank)
            for k in range(passes):
                layers(fails_at if k == passes - 1 else None, net, x.double() + k).backward()
            optimizer.step()

        for step in range(4):
            for net, optimizer in zip(nets, optimizers, strict=True):
                if step == 2 and net is nets[0]:
                    with pytest.raises(RuntimeError, match="so the test says"):
                        batch(net, optimizer, 99, fails_at)
                batch(net, optimizer, 2 * step, None)
        for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(p, q)
        return [p.tolist() for p in nets[0].parameters()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORO_LITE_BUCKET_BYTES", "64")
        first, second = run_threads(2, rank)
    assert first == second


# Cases in which Horovod warns or raises.


def one_weight(group: Group, **options: Any) -> tuple[Any, Any]:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    return weight, wrap(torch.optim.SGD([weight], lr=1.0), group, op=Sum, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_step_after_synchronize_exchanges_nothing_again(size: int) -> None:
    def rank(group: Group) -> Any:
        weight, optimizer = one_weight(group)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * (group.rank + 1)).sum().backward()
            optimizer.synchronize()
            weight.grad *= 0.5  # as clipping does
            optimizer.synchronize()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        return weight.tolist()

    total = sum(range(1, size + 1))
    assert run_threads(size, rank) == [[-2 * 0.5 * total] * 3] * size


def test_zero_grad_after_backward_begins_the_step_anew() -> None:
    def rank(group: Group) -> Any:
        weight, optimizer = one_weight(group)
        for _ in range(2):
            for factor in (100.0, 1.0):  # the first is discarded
                optimizer.zero_grad()
                (weight * factor * (group.rank + 1)).sum().backward()
            optimizer.step()
        return weight.tolist()

    assert run_threads(2, rank) == [[-6.0] * 3] * 2


def overflow_in_sparse_gradients() -> list[float]:
    """Return the largest average of the dense gradient in each step; the first one overflows."""
    rank = horo_lite.init().rank
    dense, rows = nn.Parameter(torch.zeros(40, 50)), nn.Embedding(10, 4, sparse=True)
    named = [("dense", dense), ("rows", rows.weight)]
    sgd = torch.optim.SGD([p for _, p in named], 1.0)
    opt = DistributedOptimizer(sgd, named_parameters=named, compression=Compression.int8)
    largest = []
    for step in range(3):
        opt.zero_grad()
        x = torch.randn(40, 50, generator=torch.Generator().manual_seed(2 * step + rank))
        scale, other = (1e30, math.inf if rank else 1.0) if step == 0 else (1.0, 1.0)
        ((dense * x).sum() * scale + rows(torch.tensor([1, 2])).sum() * other).backward()
        opt.synchronize()
        largest.append(float(dense.grad.abs().max()))
    return largest


@pytest.mark.served
def test_nothing_is_left_over_of_a_step_whose_sparse_gradients_overflow() -> None:
    """Their infinities make a loss scaler skip the step, too, as those of dense gradients do."""
    for first, *others in on_ranks(overflow_in_sparse_gradients, 2, hosts="1,1"):
        assert first > 1e30
        assert all(1 < one < 10 for one in others)


def test_what_is_counted_or_committed_between_passes_is_no_whole_step() -> None:
    def rank(group: Group) -> None:
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        optimizer = wrap(torch.optim.SGD(net.parameters(), 1.0), group, backward_passes_per_step=2)
        state = elastic.State(net=net, optimizer=optimizer, batch=0)

        def add(gradient: float) -> None:
            ((gradient + group.rank) * net.weight).sum().backward()
            state.batch += 1

        for gradient in 1.0, 2.0:
            add(gradient)
        optimizer.step()
        optimizer.zero_grad()
        state.commit()
        assert state.progress().is_whole
        assert net.weight.item() == 1 - 3 - 1
        add(8.0)
        assert not state.progress().is_whole
        state.restore()  # without what this pass has added
        for gradient in 1.0, 2.0:
            add(gradient)
        optimizer.step()
        assert net.weight.item() == -3 - 3 - 1
        optimizer.zero_grad()
        add(1.0)
        state.commit()

    _, warned = run_and_hear(2, rank)
    assert len(warned) == 2
    assert all("commit() between two backward passes" in text for text in warned)


class Perturbing(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """Follows gradients at changed parameters, as sharpness-aware minimization does."""

    def step(self, closure: Any) -> None:
        closure()
        weight = self.param_groups[0]["params"][0]
        with torch.no_grad():
            weight.add_(weight.grad)
            closure()
            weight.sub_(weight.grad)
        super().step()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_that_was_interrupted_in_its_middle_is_no_whole_step(by_hand: bool) -> None:
    def rank(group: Group) -> None:
        net = nn.Linear(1, 1, bias=False)
        nn.init.ones_(net.weight)
        inner = (torch.optim.SGD if by_hand else Perturbing)(net.parameters(), 1.0)
        optimizer = wrap(inner, group)
        state = elastic.State(net=net, optimizer=optimizer, batch=0)

        def backward(fails: bool = False) -> None:
            optimizer.zero_grad()
            if fails:
                raise PeerLostError("rank 2 is dead")
            (net.weight * (1 + group.rank)).sum().backward()

        def step(fails_in: int = 0) -> None:
            calls = iter((1, 2))
            closure = torch.enable_grad()(lambda: backward(next(calls) == fails_in))
            if not by_hand:
                optimizer.step(closure)
                return
            closure()
            with torch.no_grad():
                net.weight.add_(1.5)
                closure()
                net.weight.sub_(1.5)
            optimizer.step()

        for fails_in, is_whole in (1, True), (2, False):
            with pytest.raises(PeerLostError):
                step(fails_in)
            assert state.progress().is_whole == is_whole
        state.restore()
        assert state.progress().is_whole
        step()
        state.batch += 1
        with torch.no_grad():
            net.weight.clamp_(-1.0)  # which no step does, and comes before its first pass
        assert state.progress().is_whole
        assert net.weight.item() == -0.5

    run_threads(2, rank)
