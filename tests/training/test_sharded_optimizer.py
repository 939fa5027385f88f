"""shard_state=True around optimizers of any framework: the same bits, and a share on each rank."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from home_made import Parameter
from launch import RanksFailedError, run_threads
from worlds import on_ranks

import horo_lite as hvd
from horo_lite import adapters
from horo_lite.adapters import Adapter
from horo_lite.collectives.group import Group
from horo_lite.errors import DriftError, MismatchError, PeerLostError
from horo_lite.state.broadcast import broadcast_optimizer_state, broadcast_parameters
from horo_lite.state.drift import check_in_sync
from horo_lite.training.optimizer import DistributedOptimizer

Net = dict[str, Parameter]


class Momentum:
    """Keeps its state in a list, by position, and makes it at once."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.params = list(params.values()) if isinstance(params, dict) else list(params)
        self.lr = lr
        self.velocity = [np.zeros_like(p.data) for p in self.params]
        self.n_steps = 0

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self, scale: float = 1.0) -> str:
        self.n_steps += 1
        for p, v in zip(self.params, self.velocity, strict=True):
            if p.grad is not None:
                v *= 0.9
                v += p.grad
                p.data -= self.lr * scale * v
        return "stepped"


class Adam:
    """Keeps its state in dicts by the id of a parameter; its options are in groups, as torch's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        params = list(params.values()) if isinstance(params, dict) else list(params)
        self.param_groups = [{"params": params, "lr": lr, "betas": (0.9, 0.999)}]
        self.defaults = {"lr": lr, "betas": (0.9, 0.999)}
        self.moments: dict[int, tuple[Any, Any]] = {}
        self.t = 0

    def reset_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad[...] = 0

    def update(self) -> None:
        self.t += 1
        group = self.param_groups[0]
        (a, b), lr = group["betas"], group["lr"]
        for p in group["params"]:
            if p.grad is not None:
                m, v = self.moments.get(id(p), (np.zeros_like(p.grad), np.zeros_like(p.grad)))
                m, v = a * m + (1 - a) * p.grad, b * v + (1 - b) * p.grad**2
                self.moments[id(p)] = m, v
                p.data = p.data - lr * (m / (1 - a**self.t)) / (np.sqrt(v / (1 - b**self.t)) + 1e-8)


class Needling(Momentum):
    """Has a state_dict() of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "velocity": [v.copy() for v in self.velocity]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lr = state["lr"]
        self.velocity = [v.copy() for v in state["velocity"]]


KINDS: dict[str, Callable[[Any], Any]] = {
    "momentum": Momentum,
    "adam": Adam,
    "state_dict": Needling,
}
SHAPES = {"w": (20, 7), "b": (7,), "scalar": (), "wide": (7, 33), "c": (33,), "empty": (0, 4)}


def network(seed: int = 0, n: int = 6) -> Net:
    rng = np.random.default_rng(seed)
    return {k: Parameter(np.array(rng.standard_normal(x))) for k, x in list(SHAPES.items())[:n]}


def backward(net: Net, step: int, rank: int) -> None:
    """Add gradients, in which every parameter's value counts; one has none, on any rank."""
    for i, (name, p) in enumerate(net.items()):
        if (name, step % 3) == ("c", 1) or ((name, step) == ("b", 2) and rank == 0):
            continue
        rng = np.random.default_rng([i, step, rank])
        gradient = np.array(rng.standard_normal(np.shape(p.data)) + 0.1 * p.data)
        p.grad = gradient if p.grad is None else np.array(p.grad + gradient)


def clear(optimizer: Any) -> None:
    getattr(optimizer, "reset_grad" if hasattr(optimizer, "reset_grad") else "zero_grad")()


def take(optimizer: Any, net: Net, rank: int, steps: range) -> None:
    for step in steps:
        clear(optimizer)
        backward(net, step, rank)
        getattr(optimizer, "update" if hasattr(optimizer, "update") else "step")()


def values(net: Net) -> list[bytes]:
    return [np.asarray(p.data).tobytes() for p in net.values()]


def wrap(group: Group, kind: str, net: Net, shard: bool = True, **options: Any) -> Any:
    make = KINDS[kind]
    if shard:
        return DistributedOptimizer(make, parameters=net, group=group, shard_state=True, **options)
    return DistributedOptimizer(make(net), parameters=net, group=group, **options)


def trained(group: Group, kind: str, shard: bool = True, steps: range = range(6)) -> Any:
    net = network()
    optimizer = wrap(group, kind, net, shard)
    take(optimizer, net, group.rank, steps)
    return net, optimizer


def plain(tree: Any) -> Any:
    """Return the contents in a form that can be compared."""
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [(key, plain(x)) for key, x in items]
    is_array = isinstance(tree, (np.ndarray, np.generic))
    return (tree.dtype.str, tree.shape, tree.tobytes()) if is_array else tree


def n_state_bytes(optimizers: Sequence[Any]) -> int:
    """Return the bytes of the arrays that optimizers keep."""
    seen: list[Any] = []

    def look(x: Any) -> None:
        if isinstance(x, np.ndarray):
            seen.append(x)
        elif isinstance(x, (dict, list, tuple)):
            for y in x.values() if isinstance(x, dict) else x:
                look(y)

    for optimizer in optimizers:
        look(vars(optimizer))
    return sum(x.nbytes for x in seen)


def of_this_rank(optimizer: Any) -> list[Any]:
    return list(optimizer._own.inner._shares._optimizers.values())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_one_optimizer_and_each_rank_has_a_share(
    kind: str, size: int
) -> None:
    def whole(group: Group) -> Any:
        net, optimizer = trained(group, kind, shard=False)
        return values(net), n_state_bytes([optimizer.inner])

    def divided(group: Group) -> Any:
        net, optimizer = trained(group, kind)
        return values(net), n_state_bytes(of_this_rank(optimizer))

    expected, n_bytes = run_threads(size, whole)[0]
    assert expected != values(network())
    found = run_threads(size, divided)
    assert all(bits == expected for bits, _ in found)
    assert sum(n for _, n in found) == n_bytes
    largest = 7 * 33 * 8 * (2 if kind == "adam" else 1)
    assert max(n for _, n in found) == largest  # dealt by size: it belongs to a rank alone
    assert min(n for _, n in found) > 0


@pytest.mark.served
@pytest.mark.parametrize("hosts", ["", "2,1"])
def test_between_processes_and_hosts(hosts: str) -> None:
    for found in on_ranks(_trained_in_a_world, 3, hosts=hosts):
        assert found == {"fresh": True, "resumed": True, "in sync": True}


def _trained_in_a_world() -> dict[str, bool]:
    group = hvd.init().group
    net, _ = trained(group, "adam", shard=False, steps=range(7))
    sharded, optimizer = trained(group, "adam")
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(sharded)
    take(optimizer, sharded, group.rank, range(6, 7))
    # In a job that starts from what rank 0 has saved:
    other = network(seed=group.rank)
    another = wrap(group, "adam", other)
    if group.rank == 0:
        for name, p in other.items():
            p.data = weights[name].data
        another.load_state_dict(pickle.loads(pickle.dumps(state)))
    hvd.broadcast_parameters(other)
    hvd.broadcast_optimizer_state(another)
    take(another, other, group.rank, range(6, 7))
    return {
        "fresh": values(sharded) == values(net),
        "resumed": values(other) == values(net),
        "in sync": hvd.check_in_sync(another, state=True),
    }


@pytest.mark.served
def test_in_another_world_the_shares_are_lost() -> None:
    assert all(on_ranks(_in_another_world, 2))


def _in_another_world() -> bool:
    rank = hvd.init().rank
    net, expected = network(), network()
    options: Any = {"shard_state": True, "parameters": net}
    optimizer = hvd.DistributedOptimizer(Momentum, **options)
    fresh = hvd.DistributedOptimizer(Momentum, shard_state=True, parameters=network())
    alone = hvd.DistributedOptimizer(Momentum(expected))
    take(optimizer, net, rank, range(3))
    take(alone, expected, rank, range(4))
    state = copy.deepcopy(optimizer.state_dict())
    take(optimizer, net, rank, range(3, 4))
    hvd.shutdown()
    rank = hvd.init().rank
    before = values(net)
    for use in (lambda: take(optimizer, net, rank, range(4, 5)), optimizer.state_dict):
        with pytest.raises(RuntimeError, match="so parts of it are lost: load a state_dict"):
            use()
    assert values(net) == before == values(expected)
    assert len(fresh.state_dict()) == len(SHAPES)
    # The same step once more.
    for name, p in network().items():
        net[name].data[...] = p.data
    take(replay := hvd.DistributedOptimizer(Momentum, **options), net, rank, range(3))
    assert plain(replay.state_dict()) == plain(state)
    optimizer.load_state_dict(state)
    take(optimizer, net, rank, range(3, 4))
    return values(net) == values(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_from_one_number_of_ranks_to_another(kind: str) -> None:
    def first(group: Group) -> Any:
        net, optimizer = trained(group, kind)
        state = optimizer.state_dict()
        assert list(state) == list(SHAPES)
        return pickle.dumps(({name: p.data for name, p in net.items()}, state))

    saved = run_threads(3, first)
    assert all(plain(pickle.loads(one)) == plain(pickle.loads(saved[0])) for one in saved)

    def second(group: Group) -> Any:
        net = network(seed=1)
        optimizer = wrap(group, kind, net)
        weights, state = pickle.loads(saved[0])
        for name, p in net.items():
            p.data = weights[name]
        optimizer.load_state_dict(state)
        kept = plain(optimizer.state_dict())
        for one in state.values():
            for x in one.get("velocity", ()):
                x[...] = np.nan  # what was loaded is a copy
        take(optimizer, net, group.rank % 3, range(6, 9))
        return kept, values(net)

    for size in (1, 2, 4):
        results = run_threads(size, second)
        assert all(kept == plain(pickle.loads(saved[0])[1]) for kept, _ in results)
        assert all(bits == results[0][1] for _, bits in results)
    expected, _ = run_threads(3, lambda group: trained(group, kind, False, range(9)))[0]
    assert all(bits == values(expected) for _, bits in run_threads(3, second))


def test_learning_rates_are_changed_in_every_way() -> None:
    def rank(group: Group, shard: bool) -> Any:
        nets = network(), network()
        momentum = wrap(group, "momentum", nets[0], shard)
        adam = wrap(group, "adam", nets[1], shard)
        momentum.lr = 0.5  # before the first step, too
        adam.param_groups[0]["lr"] = 0.25
        for step in range(6):
            if step == 2 and shard:
                rates = {one["lr"] for one in momentum.state_dict().values()}
                assert rates == {0.5**3}
            take(momentum, nets[0], group.rank, range(step, step + 1))
            take(adam, nets[1], group.rank, range(step, step + 1))
            momentum.lr *= 0.5
            for each in adam.param_groups:
                each["lr"] *= 0.5
                each["betas"] = (0.9 - step / 100, 0.99)
        assert momentum.n_steps == adam.t == 6
        assert momentum.lr == 0.5**7
        if shard:
            assert {one["lr"] for one in momentum.state_dict().values()} == {0.5**7}
        return [values(net) for net in nets]

    expected = run_threads(3, lambda group: rank(group, shard=False))[0]
    assert all(found == expected for found in run_threads(3, lambda group: rank(group, True)))


def test_what_is_changed_before_the_first_step_is_in_the_whole_state() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(group, "momentum", net)
        optimizer.lr = 0.75
        whole = optimizer.state_dict() if group.rank == 1 else None  # not collective yet
        adam = wrap(group, "adam", network())
        adam.param_groups[0]["lr"] = 0.125
        take(optimizer, net, group.rank, range(1))
        before = values(net)
        if whole is not None:
            assert {one["lr"] for one in whole.values()} == {0.75}
            assert all(not x.any() for one in whole.values() for x in one["velocity"])
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.note = print
        optimizer.load_state_dict(state)
        assert optimizer.note is print
        optimizer.lr = 0.5
        assert {one["lr"] for one in optimizer.state_dict().values()} == {0.5}
        take(optimizer, net, group.rank, range(1, 2))
        assert {one["lr"] for one in optimizer.state_dict().values()} == {0.5}
        assert values(net) != before

    run_threads(3, rank)


def test_attributes_and_methods_are_those_of_all_optimizers() -> None:
    class Noted(Momentum):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=np.array(0.5))
            self.loss = abs
            self.step = super().step  # type: ignore[method-assign]

        @property
        def n_parameters(self) -> int:
            return len(self.params)

        def scale(self, by: float) -> str:
            self.velocity = [v * by for v in self.velocity]
            self.options = {"by": 1.0}
            self.options.update(by=by)  # no update() of its own
            return "scaled"

        def minimize(self) -> None:
            self.step()

    class Held(Adam):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.param_groups[0].update(lr=np.array(0.5), betas=[0.9, 0.99], note=self)

    def rank(group: Group) -> None:
        options: Any = {"parameters": network(), "group": group, "shard_state": True}
        optimizer = DistributedOptimizer(Noted, **options)
        assert optimizer.n_parameters == 1
        optimizer.velocity = [1.0]
        assert optimizer.scale(3) == "scaled"
        with pytest.raises(TypeError, match=r"minimize\(\) is about all parameters"):
            optimizer.minimize()
        assert all(one.velocity == [3.0] for one in of_this_rank(optimizer))
        optimizer.note = 1
        del optimizer.note
        assert not any(hasattr(one, "note") for one in of_this_rank(optimizer))
        assert not hasattr(object.__new__(type(optimizer.inner)), "lr")
        assert optimizer.loss is abs
        optimizer.lr[...] = 0.25
        assert optimizer.step() == "stepped"
        assert {(one.n_steps, float(one.lr)) for one in of_this_rank(optimizer)} == {(1, 0.25)}

        net = network()
        options["parameters"] = net
        held = DistributedOptimizer(Held, **options)
        held.param_groups[0]["lr"] *= 0.5  # in place, in this rank's first optimizer
        held.param_groups[0]["betas"][0] = 0.8
        backward(net, 1, group.rank)  # "c" has none
        held.update()
        groups = [one.param_groups[0] for one in of_this_rank(held)]
        assert {(float(x["lr"]), x["betas"][0]) for x in groups} == {(0.25, 0.8)}
        held.reset_grad()
        assert [name for name, p in net.items() if p.grad is None] == ["c"]
        assert not any(p.grad.any() for p in net.values() if p.grad is not None)
        for betas in ([0.5, 0.5], held.param_groups[0]["betas"]):
            held.param_groups[0]["betas"] = betas
            held.state_dict()
            assert all(one.param_groups[0]["betas"] == betas for one in of_this_rank(held))

    run_threads(2, rank)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_gradients_are_averages_on_every_rank_and_cleared_on_every_rank(kind: str) -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = network()
        optimizer = wrap(group, kind, net, shard)
        backward(net, 0, group.rank)
        optimizer.synchronize()
        seen = [np.array(p.grad) for p in net.values()]
        for p in net.values():
            p.grad *= 0.5
        with optimizer.skip_synchronize():
            (optimizer.step if kind == "momentum" else optimizer.update)()
        clear(optimizer)
        cleared = [None if p.grad is None else np.array(p.grad) for p in net.values()]
        assert all(g is None or not g.any() for g in cleared)
        assert (cleared[0] is None) == (kind == "momentum")
        return [g.tobytes() for g in seen], [g is None for g in cleared], values(net)

    expected = run_threads(3, lambda group: rank(group, shard=False))[0]
    assert all(found == expected for found in run_threads(3, lambda group: rank(group, True)))


def test_a_framework_with_an_adapter_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Weight:
        def __init__(self, w: Any) -> None:
            self.w, self.dw = w, None

    class Trainer:
        def __init__(self, weights: list[Weight]) -> None:
            self.weights, self.sums = weights, [np.zeros(3) for _ in weights]

        def clear_grad(self) -> None:
            for weight in self.weights:
                weight.dw = None

        def apply(self) -> None:
            for weight, total in zip(self.weights, self.sums, strict=True):
                total += weight.dw
                weight.w = weight.w - total

    class Own(Adapter):
        steps = ("apply",)

        def matches(self, obj: Any) -> bool:
            return isinstance(obj, (Trainer, Weight))

        def parameters(self, owner: Any) -> Any:
            return [(f"w{i}", weight) for i, weight in enumerate(getattr(owner, "weights", ()))]

        def gradient(self, weight: Any) -> Any:
            return weight.dw

        def set_gradient(self, weight: Any, array: Any) -> None:
            weight.dw = array

        def value(self, weight: Any) -> Any:
            return weight.w

        def set_value(self, weight: Any, array: Any) -> None:
            weight.w = array

    monkeypatch.setattr(adapters, "_registered", [Own()])

    def rank(group: Group) -> Any:
        weights = [Weight(np.arange(3.0) + i) for i in range(4)]
        optimizer = DistributedOptimizer(Trainer, parameters=weights, group=group, shard_state=True)
        for step in range(3):
            for weight in weights:
                weight.dw = np.full(3, 1.0 * group.rank + step)
            optimizer.apply()
            optimizer.clear_grad()
            assert all(weight.dw is None for weight in weights)
        return [weight.w.tolist() for weight in weights]

    # Gradients are 1, 2, 3; so their sums are 1, 3, 6.
    assert run_threads(3, rank) == [[[k + i - 10.0 for k in range(3)] for i in range(4)]] * 3


def test_ranks_without_a_share() -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = network(n=2)
        optimizer = wrap(group, "momentum", net, shard)
        optimizer.lr = 0.3
        assert isinstance(optimizer, Momentum)
        take(optimizer, net, group.rank, range(3))
        assert (optimizer.lr, optimizer.n_steps) == (0.3, 3)
        if shard:
            state = optimizer.state_dict()
            assert list(state) == ["w", "b"]
            assert {one["n_steps"] for one in state.values()} == {3}
            optimizer.load_state_dict(state)
            optimizer.zero_grad()
            assert all(p.grad is None for p in net.values())
        take(optimizer, net, group.rank, range(3, 5))
        return values(net)

    expected = run_threads(4, lambda group: rank(group, shard=False))[0]
    assert all(found == expected for found in run_threads(4, lambda group: rank(group, True)))


def test_containers_are_like_that_of_all_parameters() -> None:
    a, b, c = (Parameter(np.zeros(2)) for _ in range(3))
    for parameters, expected in (
        ([a, b, c], [[a], [b], [c]]),
        ({"a": a, "b": b}, [{"a": a}, {"b": b}]),
        ({"deep": {"a": a, "rest": [b, c]}}, [{"deep": {"a": a}}, {"deep": {"rest": [b]}}]),
        ([("a", a), ("b", b)], [[("a", a)], [("b", b)]]),
        (lambda: [a, b], [[a], [b]]),
        (iter([a, b]), [[a], [b]]),
    ):
        seen: list[Any] = []

        def rank(group: Group, parameters: Any = parameters, seen: list[Any] = seen) -> None:
            def make(given: Any) -> Any:
                seen.append(given)
                return Momentum([p for p in (a, b, c) if repr(p) in repr(given)])

            DistributedOptimizer(make, parameters=parameters, group=group, shard_state=True)

        run_threads(1, rank)
        assert seen[: len(expected)] == expected


class ByLoss(Momentum):
    """Takes a closure, and steps as far as its loss says; may change parameters before."""

    looks_ahead = False

    def step(self, closure: Any) -> str:  # type: ignore[override]
        for p in self.params if self.looks_ahead else []:
            p.data = p.data + 1e-3
        return super().step(scale=0.5 + closure())


class Ahead(ByLoss):
    looks_ahead = True


def test_a_closure_is_called_once_and_its_loss_is_averaged() -> None:
    def rank(group: Group, shard: bool, kind: Any = ByLoss) -> Any:
        net = network()
        calls = []
        optimizer: Any = (
            DistributedOptimizer(kind, parameters=net, group=group, shard_state=True)
            if shard
            else DistributedOptimizer(kind(net), group=group)
        )

        def closure() -> float:
            calls.append(1)
            optimizer.zero_grad()
            backward(net, 0, group.rank)
            return float(group.rank)

        results = [optimizer.step(closure), optimizer.step(closure=closure)]
        assert len(calls) == 2
        return results, values(net)

    results = run_threads(3, lambda group: rank(group, True))
    assert results == [([1.0, 1.0], results[0][1])] * 3
    (_, expected), *_ = run_threads(3, lambda group: rank(group, False))
    assert results[0][1] == expected
    with pytest.raises(RanksFailedError, match="called its closure after changing parameters"):
        run_threads(2, lambda group: rank(group, True, Ahead))


def test_values_that_cannot_be_written_and_other_layouts() -> None:
    class ReadOnly(Parameter):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, x: Any) -> None:
            self._data = np.array(x)
            self._data.flags.writeable = False

    class Sgd(Momentum):
        def step(self) -> None:  # type: ignore[override]
            for p in self.params:
                p.data = p.data - self.lr * p.grad

    def rank(group: Group) -> Any:
        x = np.arange(12.0).reshape(3, 4)
        number = Parameter(0.5)
        parameters = [
            ReadOnly(x),
            Parameter(np.asfortranarray(x)),
            Parameter(np.repeat(x, 2, axis=1)[:, ::2]),
            number,
            Parameter(np.float32([1, 2])),
        ]
        optimizer = DistributedOptimizer(
            lambda p: Sgd(p, 0.5), parameters=parameters, group=group, shard_state=True
        )
        for _ in range(2):
            for p in parameters:
                p.grad = np.full(np.shape(p.data), group.rank, np.asarray(p.data).dtype)
            optimizer.step()
        for p in parameters[:3]:
            assert (p.data == x - (group.size - 1) / 2).all()
        assert parameters[4].data.dtype == np.float32
        return [np.asarray(p.data).tolist() for p in parameters]

    results = run_threads(3, rank)
    assert results == [results[0]] * 3
    assert results[0][3] == -0.5


def test_state_dict_on_one_rank_only() -> None:
    def rank(group: Group) -> None:
        net, optimizer = trained(group, "momentum")
        if group.rank == 0:
            optimizer.state_dict()
        take(optimizer, net, group.rank, range(6, 7))

    with pytest.raises(RanksFailedError) as caught:
        run_threads(2, rank)
    for error in caught.value.errors.values():
        assert type(error) is MismatchError
        assert "'state_dict() of a Momentum with shard_state=True'" in str(error)


@pytest.mark.parametrize("what", ["values", "class", "state", "presence", "nothing"])
def test_ranks_that_begin_with_different_things(what: str) -> None:
    def rank(group: Group) -> None:
        is_odd = group.rank == 1
        net = network(seed=int(is_odd and what == "values"))
        kind = "state_dict" if is_odd and what == "class" else "momentum"
        optimizer = wrap(group, kind, net)
        if what == "state" or (what in ("presence", "nothing") and is_odd):
            state = optimizer.state_dict()
            state["wide"]["velocity"][0][...] = group.rank * (what != "nothing")
            optimizer.load_state_dict(state)
        optimizer.lr = 0.125
        take(optimizer, net, group.rank, range(1))

    expected = {
        "values": (DriftError, "first 'w' (float64[20, 7])"),
        "class": (MismatchError, "Needling"),
        "state": (DriftError, "first \"wide['velocity'][0]\" (float64[7, 33])"),
    }
    expected["presence"] = expected["state"]
    if what == "nothing":
        run_threads(2, rank)
        return
    with pytest.raises(RanksFailedError) as caught:
        run_threads(2, rank)
    kind, text = expected[what]
    for error in caught.value.errors.values():
        assert type(error) is kind
        assert text in str(error)


def test_a_rank_that_fails_or_has_joined_is_missed() -> None:
    def rank(group: Group, joins: bool) -> None:
        net, optimizer = trained(group, "momentum")
        if group.rank == 1:
            if joins:
                group.join()
            else:
                optimizer.inner._shares.first.step = lambda: 1 / 0
        take(optimizer, net, group.rank, range(6, 7))

    for joins, kind in ((True, MismatchError), (False, PeerLostError)):
        with pytest.raises(RanksFailedError) as caught:
            run_threads(2, lambda group, joins=joins: rank(group, joins))
        assert type(caught.value.errors[0]) is kind


@pytest.mark.parametrize("what", ["step", "load"])
def test_after_an_error_in_the_middle_parameters_and_state_are_to_be_loaded(what: str) -> None:
    expected = run_threads(2, lambda group: values(trained(group, "momentum")[0]))

    def rank(group: Group) -> list[bytes]:
        net, optimizer = trained(group, "momentum", steps=range(3))
        saved = optimizer.state_dict(), {name: p.data.copy() for name, p in net.items()}
        if what == "load":
            wrong = {**dict.fromkeys(saved[0]), "w": saved[0]["w"]}
            with pytest.raises(AttributeError):
                optimizer.load_state_dict(wrong)
        else:
            take(optimizer, net, group.rank, range(3, 4))
            last = of_this_rank(optimizer)[-1]
            if group.rank == 1:
                last.step = lambda: 1 / 0
                with pytest.raises(ZeroDivisionError):
                    take(optimizer, net, group.rank, range(4, 5))
                del last.step
                with pytest.raises(MismatchError):
                    group.agree("the next call", "")
            else:
                with pytest.raises(MismatchError):
                    take(optimizer, net, group.rank, range(4, 5))
        for use in (lambda: take(optimizer, net, group.rank, range(5)), optimizer.state_dict):
            with pytest.raises(RuntimeError, match="Load a state_dict"):
                use()
        optimizer.load_state_dict(saved[0])
        for name, x in saved[1].items():
            net[name].data = x
        take(optimizer, net, group.rank, range(3, 6))
        return values(net)

    assert run_threads(2, rank) == expected


def test_parameters_that_share_memory_or_are_replaced() -> None:
    def rank(group: Group) -> None:
        base = np.ones((3, 4))
        for parameters in ([Parameter(base), Parameter(base[1:])], [Parameter(base)] * 2):
            optimizer = DistributedOptimizer(
                Momentum, parameters=parameters, group=group, shard_state=True
            )
            words = r"'parameters\[0\]' and 'parameters\[1\]' do"
            for p in parameters:
                p.grad = np.ones_like(p.data)
            with pytest.raises(ValueError, match=words):
                optimizer.step()
        net = network()
        optimizer = wrap(group, "momentum", net)
        take(optimizer, net, group.rank, range(1))
        net["more"] = Parameter(np.ones(2))
        with pytest.raises(RuntimeError, match="not those that shard_state=True divided"):
            take(optimizer, net, group.rank, range(1))
        del net["more"]
        net["w"] = Parameter(net["w"].data)
        with pytest.raises(RuntimeError, match="not those that shard_state=True divided"):
            take(optimizer, net, group.rank, range(1))

    run_threads(2, rank)


def test_what_is_refused() -> None:
    class Called(Momentum):
        def __call__(self) -> None:
            pass

    def rank(group: Group) -> None:
        net = network()

        def wrapped(make: Any, parameters: Any = net, shard_state: Any = True) -> Any:
            return DistributedOptimizer(
                make, parameters=parameters, group=group, shard_state=shard_state
            )

        for call, error, text in (
            (lambda: wrapped(Momentum(net)), TypeError, "pass a function .* not a Momentum"),
            (lambda: wrapped(Called(net)), TypeError, "pass a function .* not a Called"),
            (lambda: wrapped(3), TypeError, "pass a function .* not a int"),
            (lambda: wrapped(Momentum, None), TypeError, "needs all parameters"),
            (lambda: wrapped(Momentum, {"a": []}), ValueError, "parameters= has none"),
            (lambda: wrapped(Momentum, shard_state=False), TypeError, "is for shard_state=True"),
            (lambda: wrapped(Momentum, shard_state="elements"), ValueError, "of PyTorch"),
            (
                lambda: wrapped(lambda _: Momentum(net)),
                TypeError,
                "made a Momentum of 6 parameters",
            ),
            (lambda: wrapped(lambda _: object()), TypeError, r"has no step\(\)"),
            (lambda: wrapped(Momentum, [("a", net["w"]), ("a", net["b"])]), ValueError, "'a'"),
            (lambda: copy.deepcopy(wrapped(Momentum)), RuntimeError, r"state_dict\(\)"),
            (lambda: copy.copy(wrapped(Momentum)), RuntimeError, r"state_dict\(\)"),
            (lambda: pickle.dumps(wrapped(Momentum)), (RuntimeError, TypeError), "pickled"),
            (lambda: wrapped(Momentum).load_state_dict({"w": 1}), ValueError, "no parameter 'b'"),
            (lambda: wrapped(Momentum).nonsense, AttributeError, "nonsense"),
        ):
            with pytest.raises(error, match=text):
                call()
        state = {**wrapped(Momentum).state_dict(), "more": 1}
        with pytest.raises(ValueError, match="a parameter 'more', and this optimizer has none"):
            wrapped(Momentum).load_state_dict(state)

    run_threads(1, rank)


def test_torchs_optimizers_go_to_their_own_wrapper() -> None:
    torch = pytest.importorskip("torch")

    def rank(group: Group) -> None:
        parameters = [torch.nn.Parameter(torch.ones(3))]
        with pytest.raises(TypeError, match=re.escape("DistributedOptimizer of horo_lite.torch")):
            DistributedOptimizer(
                torch.optim.Adam, parameters=parameters, group=group, shard_state=True
            )
        assert hvd.DistributedOptimizer(torch.optim.Adam(parameters), group=group, shard_state=True)

    run_threads(1, rank)


def test_home_made_optimizers_of_torchs_parameters() -> None:
    torch = pytest.importorskip("torch")

    class Sgd:
        def __init__(self, params: list[Any]) -> None:
            self.params = params
            self.velocity = [torch.zeros_like(p) for p in params]

        def zero_grad(self) -> None:
            for p in self.params:
                p.grad = None

        @torch.no_grad()
        def step(self) -> None:
            for p, v in zip(self.params, self.velocity, strict=True):
                v.mul_(0.9).add_(p.grad)
                p.sub_(v, alpha=0.1)

    # Here, since the threads share one random generator.
    start = torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Linear(5, 3))

    def rank(group: Group, shard: bool) -> Any:
        net = copy.deepcopy(start)
        parameters = list(net.parameters())
        optimizer: Any = (
            DistributedOptimizer(Sgd, parameters=parameters, group=group, shard_state=True)
            if shard
            else DistributedOptimizer(Sgd(parameters), group=group)
        )
        for step in range(3):
            optimizer.zero_grad()
            x = torch.arange(16.0).reshape(2, 8) * (step + group.rank)
            net(x).tanh().sum().backward()
            optimizer.step()
        assert all(p.grad is not None for p in parameters)
        return [p.detach().numpy().tobytes() for p in parameters]

    expected = run_threads(1, lambda group: rank(group, shard=False))
    whole = run_threads(2, lambda group: rank(group, shard=False))[0]
    assert whole != expected[0]
    assert run_threads(2, lambda group: rank(group, shard=True)) == [whole] * 2


def test_broadcast_in_mid_training_changes_nothing() -> None:
    def rank(group: Group) -> Any:
        net, optimizer = trained(group, "adam", steps=range(3))
        broadcast_parameters(net, 1, group=group)
        broadcast_optimizer_state(optimizer, 1, group=group)
        assert check_in_sync(optimizer, state=True, group=group)
        take(optimizer, net, group.rank, range(3, 6))
        return values(net)

    expected = run_threads(2, lambda group: trained(group, "adam"))[0][0]
    assert run_threads(2, rank) == [values(expected)] * 2


def test_the_function_makes_optimizers_of_this_ranks_share_only() -> None:
    def rank(group: Group) -> Any:
        made: list[str] = []

        def make(parameters: Net) -> Momentum:
            made.extend(parameters)
            return Momentum(parameters)

        net = network()
        optimizer = DistributedOptimizer(make, parameters=net, group=group, shard_state=True)
        take(optimizer, net, group.rank, range(2))
        optimizer.state_dict()
        return made

    made = run_threads(3, rank)
    assert sorted(name for one in made for name in one) == sorted(SHAPES)
