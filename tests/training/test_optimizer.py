"""DistributedOptimizer around home-made optimizers and torch's, and the adapters for them."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from contract import Divisible
from launch import run_threads
from worlds import on_ranks

from horo_lite import adapters, ops
from horo_lite.adapters import Adapter, from_numpy, register_adapter, to_host
from horo_lite.collectives.compression import Compression
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Max, Sum
from horo_lite.errors import MismatchError, NotInitializedError
from horo_lite.state.broadcast import broadcast_optimizer_state
from horo_lite.training.optimizer import DistributedOptimizer


class Parameter:
    def __init__(self, data: Any) -> None:
        self.data = np.asarray(data, np.float64)
        self.grad: Any = None


class Momentum:
    """A typical home-made optimizer."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        self.params = params
        self.lr = lr
        self.velocity = [np.zeros_like(p.data) for p in self.parameters]
        self.n_steps = 0

    @property
    def parameters(self) -> list[Parameter]:
        return list(self.params.values()) if isinstance(self.params, dict) else list(self.params)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self, scale: float = 1.0) -> str:
        self.n_steps += 1
        for p, v in zip(self.parameters, self.velocity, strict=True):
            if p.grad is not None:
                v *= 0.5
                v += p.grad
                p.data -= self.lr * scale * v
        return "stepped"


def network(seed: int = 0) -> dict[str, Parameter]:
    rng = np.random.default_rng(seed)
    return {"w": Parameter(rng.standard_normal((3, 2))), "b": Parameter(rng.standard_normal(2))}


def backward(net: dict[str, Parameter], x: Any, y: Any, *, mean: bool = True) -> float:
    """Add the gradients of the squared error, averaged over the samples; return the error."""
    error = x @ net["w"].data + net["b"].data - y
    n = len(x) if mean else 1
    for name, gradient in (("w", 2 * x.T @ error / n), ("b", 2 * error.sum(0) / n)):
        old = net[name].grad
        net[name].grad = gradient if old is None else old + gradient
    return float((error**2).sum() / n)


def samples(n: int, seed: int = 1) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 3)), rng.standard_normal((n, 2))


def alone(n_steps: int, n: int = 12, **options: Any) -> dict[str, Any]:
    """Return the result of one process with the whole batches."""
    net = network()
    optimizer = Momentum(net, **options)
    for step in range(n_steps):
        optimizer.zero_grad()
        backward(net, *samples(n, step))
        optimizer.step()
    return {name: p.data for name, p in net.items()}


def close(net: dict[str, Parameter], expected: dict[str, Any]) -> bool:
    return all(np.allclose(net[name].data, expected[name], rtol=1e-12) for name in expected)


@pytest.mark.shows("eager", "in place", "fp16")
class TestHomeMade(Divisible):
    threads = True
    optimizers = ("momentum",)
    dtypes = ("float64", "float16")

    def network(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        shapes = {"w": (36, 5), "b": (5,)}
        return self.parameters({k: rng.standard_normal(x).astype("f") for k, x in shapes.items()})

    def parameters(self, values: Any) -> Any:
        net = {name: Parameter(0) for name in values}
        for name, x in values.items():
            net[name].data = x.copy()
        return net

    def arrays(self, net: Any) -> Any:
        return net

    def optimizer(self, kind: str, net: Any) -> Any:
        return Momentum(net, lr=1.0 if kind == "sgd" else 0.1)

    def parts(self, net: Any) -> Any:
        return lambda parameters: Momentum(parameters, lr=0.1), net

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        x = x.reshape(len(x), -1)
        error = (np.tanh(x @ net["w"].data + net["b"].data) - np.eye(5)[y]) / len(x)
        self.given(net, {"w": np.float32(x.T @ error), "b": np.float32(error.sum(0))})

    def given(self, net: Any, gradients: Any) -> Any:
        for name, p in net.items():  # copies, since averages are written into them
            p.grad = None if gradients[name] is None else gradients[name].copy()

    def array(self, x: Any) -> Any:
        return x

    def numpy(self, x: Any) -> Any:
        return x.data if isinstance(x, Parameter) else x

    def held(self, net: Any) -> Any:
        return [p.grad for p in net.values()]

    def place(self, gradient: Any) -> Any:
        return id(gradient), gradient.ctypes.data


def test_sum() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net, lr=0.5 / 12), op=Sum, group=group)
        for step in range(3):
            optimizer.zero_grad()
            x, y = samples(12, step)
            backward(net, x[group.rank :: 3], y[group.rank :: 3], mean=False)
            optimizer.step()
        assert close(net, alone(3))

    run_threads(3, rank)


def test_several_passes_are_summed_and_exchanged_once() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(
            Momentum(net), op=Sum, backward_passes_per_step=2, group=group
        )
        for step in range(3):
            optimizer.zero_grad()
            x, y = samples(12, step)
            for i in range(2):
                part = slice(group.rank + 2 * i, None, 4)
                backward(net, x[part], y[part], mean=False)
            optimizer.lr = 0.5 / 12
            optimizer.step()
        assert close(net, alone(3))

    run_threads(2, rank)


def test_everything_else_is_the_inner_optimizers() -> None:
    def rank(group: Group) -> None:
        inner = Momentum(network())
        optimizer = DistributedOptimizer(inner, group=group)
        optimizer.lr = 0.25
        optimizer.note = note = lambda: None
        assert (inner.lr, inner.note) == (0.25, note)
        assert optimizer.velocity is inner.velocity
        assert optimizer.inner is inner
        del optimizer.note
        assert not hasattr(inner, "note")
        with pytest.raises(AttributeError, match="nonsense"):
            _ = optimizer.nonsense
        assert not hasattr(object.__new__(DistributedOptimizer), "lr")  # as while it is made
        inner.update = 3  # an attribute, in spite of its name
        assert optimizer.update == 3
        optimizer.update = 4
        assert inner.update == 4
        assert isinstance(optimizer, Momentum)
        assert isinstance(optimizer, DistributedOptimizer)
        assert {"lr", "synchronize", "zero_grad"} <= set(dir(optimizer))
        assert re.match(
            r"DistributedOptimizer\(<.*Momentum.*>, compression=fp16, op=Average, 2 parameters\)",
            repr(DistributedOptimizer(inner, compression=Compression.fp16, group=group)),
        )

    run_threads(1, rank)


def test_a_patched_step_does_not_recurse() -> None:
    def rank(group: Group) -> None:
        optimizer = DistributedOptimizer(Momentum(network()), group=group)
        calls = []
        original = optimizer.step.__func__

        def patched(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return original.__get__(optimizer)(*args, **kwargs)

        optimizer.step = patched
        assert optimizer.step(2.0) == "stepped"
        assert calls == [(2.0,)]
        assert optimizer.inner.n_steps == 1
        del optimizer.step
        optimizer.step()
        assert len(calls) == 1

    run_threads(1, rank)


class Updating:
    """The same with other names; parameters are returned by a method."""

    def __init__(self, params: list[Parameter]) -> None:
        self._held = params

    def parameters(self) -> list[Parameter]:
        return self._held

    def update(self) -> None:
        for p in self._held:
            p.data -= p.grad


def test_where_parameters_are_found() -> None:
    class Bare:
        def step(self) -> None:
            pass

    def names(group: Group, inner: Any, **options: Any) -> list[str]:
        return [n for n, _ in DistributedOptimizer(inner, group=group, **options)._own.named()]

    def rank(group: Group) -> None:
        a, b, c = (Parameter(np.zeros(2)) for _ in range(3))
        inner = Bare()
        inner.params = [a, b]
        assert names(group, inner) == ["params[0]", "params[1]"]
        assert names(group, inner, named_parameters=[("a", a)]) == ["a", "params[1]"]
        assert names(group, inner, parameters=[c]) == ["parameters[0]"]
        assert names(group, inner, parameters=iter([c])) == ["parameters[0]"]
        assert names(group, inner, parameters={"c": c, "deep": {"a": a, "b": [b]}}) == [
            "c",
            "deep.a",
            "deep.b[0]",
        ]
        assert names(group, inner, parameters=lambda: [("x", c)]) == ["x"]
        inner.params = {"a": a, "b": b}
        assert names(group, inner) == ["a", "b"]
        inner.params = {"lr": 0.1}  # hyperparameters under that name
        inner.parameters = (b, c)
        assert names(group, inner) == ["parameters[0]", "parameters[1]"]
        inner.param_groups = [{"params": [a], "lr": 1}, {"params": [b, c], "lr": 2}]
        assert names(group, inner) == [
            "param_groups[0][0]",
            "param_groups[1][0]",
            "param_groups[1][1]",
        ]
        assert names(group, Bare(), named_parameters=[("a", a)]) == ["a"]

    run_threads(1, rank)


@pytest.mark.parametrize(
    ("name", "kind", "groups"),
    [("lr", float, False), ("learning_rate", np.float32, False), ("lr", float, True)],
)
def test_ranks_whose_learning_rates_differ_do_not_step_apart(
    name: str, kind: Any, groups: bool
) -> None:
    class Sgd(Momentum):
        def step(self, scale: float = 1.0) -> str:
            self.lr = getattr(self, name)
            return super().step(scale)

    def rank(group: Group) -> None:
        net = network()
        inner = Sgd(net)
        if groups:  # which have no rate
            inner.param_groups = [{"params": inner.parameters}]
        optimizer = DistributedOptimizer(inner, group=group)
        for step, rate in enumerate((0.5, 0.5 + group.rank, 0.25)):
            setattr(optimizer, name, kind(rate))
            optimizer.zero_grad()
            backward(net, *samples(4, group.rank))
            if step == 1:
                words = rf"differ: {name}: rank 0 has 0\.5, rank 1 has 1\.5, so"
                with pytest.raises(MismatchError, match=words):
                    optimizer.step()
            else:
                optimizer.step()
        assert optimizer.n_steps == 2

    run_threads(2, rank)


def test_ranks_whose_hyperparameters_differ_do_not_step_apart() -> None:
    class Grouped:
        def __init__(self) -> None:
            self.weight = Parameter([0.0])
            self.param_groups = [{"params": [self.weight], "lr": 0.5}]

        def step(self) -> None:
            self.weight.data -= self.param_groups[0]["lr"] * self.weight.grad

    def rank(group: Group) -> None:
        inner = Grouped()
        optimizer = DistributedOptimizer(inner, group=group)

        def step(rate: float, has_gradient: bool = True) -> None:
            inner.param_groups[0]["lr"] = rate
            inner.weight.grad = np.array([2.0 * group.rank]) if has_gradient else None
            optimizer.step()

        step(0.5)
        differ = r"differ: lr: ranks 0 and 2 have 0\.5, rank 1 has 0\.05, .*allreduce"
        with pytest.raises(MismatchError, match=differ):
            step(0.05 if group.rank == 1 else 0.5)
        # The last digits may differ by library, even if this changes the rounded number.
        low, high = np.float32(0.125), np.nextafter(np.float32(0.125), np.float32(1))
        rate = (float(low) + float(high)) / 2
        other = float(np.nextafter(rate, 1))
        assert (np.float32(rate), np.float32(other)) == (low, high)
        step(rate if group.rank == 1 else other)
        assert close({"w": inner.weight}, {"w": [-1 - 2 * rate]})
        with pytest.raises(MismatchError, match=r"ranks 0 and 2 have nan, rank 1 has 0\.05"):
            step(0.05 if group.rank == 1 else np.nan)
        step(np.nan, has_gradient=group.rank != 1)  # the same, also when plans are compared
        assert np.isnan(inner.weight.data).all()

    run_threads(3, rank)


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_or_dict_of_parameters_may_change(kind: type) -> None:
    """With an optimizer that recreates its parameters, and one that gets another one later."""

    def rank(group: Group) -> None:
        holder: Any = dict(enumerate([Parameter([0.0]), Parameter([0.0])]))
        if kind is list:
            holder = list(holder.values())

        class Replacing:
            def step(self) -> None:
                for i in range(len(holder)):
                    holder[i] = Parameter(holder[i].data - holder[i].grad)

        optimizer = DistributedOptimizer(Replacing(), parameters=holder, group=group)
        for step in range(3):
            for i in range(len(holder)):
                holder[i].grad = np.array([2.0 * (group.rank + i)])
            optimizer.step()
            if step == 1:
                more = Parameter([0.0])
                holder.append(more) if kind is list else holder.update({2: more})
        assert [holder[i].data.tolist() for i in range(3)] == [[-3.0], [-9.0], [-5.0]]

    run_threads(2, rank)


def test_a_group_of_parameters_added_later() -> None:
    def rank(group: Group) -> None:
        net = network()
        inner = Momentum([net["w"]])
        optimizer = DistributedOptimizer(inner, group=group)
        net["w"].grad = np.full((3, 2), 1.0 * group.rank)
        optimizer.step()
        inner.params.append(net["b"])
        inner.velocity.append(np.zeros(2))
        for p in net.values():
            p.grad = np.full_like(p.data, group.rank)
        optimizer.step()
        assert (net["b"].grad == 0.5).all()

    run_threads(2, rank)


class Derived(DistributedOptimizer):
    pass


def test_errors_at_construction() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), group=group)
        with pytest.raises(TypeError, match="wrap it only once"):
            DistributedOptimizer(optimizer, group=group)
        derived = copy.copy(Derived(Momentum(net), group=group))
        assert type(derived) is Derived
        with pytest.raises(TypeError, match="wrap it only once"):
            DistributedOptimizer(derived, group=group)
        with pytest.raises(TypeError, match=r"has no step\(\) or update\(\).*register_adapter"):
            DistributedOptimizer(object(), group=group)
        with pytest.raises(TypeError, match="is not an optimizer"):
            DistributedOptimizer(Momentum, group=group)
        with pytest.raises(
            ValueError, match=r"(?s)shows no parameters .*parameters=.*register_ada"
        ):
            DistributedOptimizer(Momentum([]), group=group)
        with pytest.raises(TypeError, match=r"'parameters\[0\]' \(ndarray\) has no .grad"):
            DistributedOptimizer(Momentum(net), parameters=[np.zeros(2)], group=group)
        with pytest.raises(ValueError, match="op=Average or op=Sum"):
            DistributedOptimizer(Momentum(net), op=Max, group=group)
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            DistributedOptimizer(Momentum(net), backward_passes_per_step=0, group=group)
        with pytest.raises(ValueError, match="bucket_bytes=0"):
            DistributedOptimizer(Momentum(net), bucket_bytes=0, group=group)
        with pytest.raises(ValueError, match="bucket_bytes='1MB': a bucket has a whole number"):
            DistributedOptimizer(Momentum(net), bucket_bytes="1MB", group=group)  # type: ignore[arg-type]
        for pair in net["w"], (net["w"], "w"), ("w", net["w"], 1):
            for options in ({}, {"parameters": net, "shard_state": True}):
                with pytest.raises(TypeError, match=r"named_parameters contains a .* of a pair"):
                    DistributedOptimizer(Momentum(net), named_parameters=[pair], **options)
        with (
            registered(PairlessAdapter()),
            pytest.raises(TypeError, match=r"parameters\(\) of PairlessAdapter contains a Par"),
        ):
            DistributedOptimizer(Clipping(), group=group)
        twice = [("a", net["w"]), ("a", net["b"])]
        with pytest.raises(ValueError, match="'a' more than once"):
            DistributedOptimizer(Momentum(net), named_parameters=twice, group=group)

    run_threads(1, rank)


def test_it_needs_a_world() -> None:
    with pytest.raises(NotInitializedError):
        DistributedOptimizer(Momentum(network()))


def test_bucket_bytes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: Group) -> int:
        return DistributedOptimizer(Momentum(network()), group=group)._own.options.bucket_bytes

    assert run_threads(1, rank) == [25 * 2**20]
    monkeypatch.setenv("HORO_LITE_BUCKET_BYTES", "4096")
    assert run_threads(1, rank) == [4096]
    monkeypatch.setenv("HORO_LITE_BUCKET_BYTES", "25MB")
    with pytest.raises(AssertionError, match="HORO_LITE_BUCKET_BYTES=25MB"):
        run_threads(1, rank)


def test_synchronize_clip_and_step() -> None:
    def rank(group: Group) -> None:
        net = network()
        before = net["b"].data.copy()
        optimizer = DistributedOptimizer(Momentum(net, lr=1.0), group=group)
        for p in net.values():
            p.grad = np.full_like(p.data, 2.0 * group.rank)
        optimizer.synchronize()
        assert (net["b"].grad == 1).all()
        net["b"].grad *= 0.5 * optimizer.lr
        with optimizer.skip_synchronize():
            optimizer.step()
        assert np.array_equal(net["b"].data, before - 0.5)
        optimizer.step()  # an ordinary step again

    run_threads(2, rank)


def test_nothing_is_averaged_twice_or_never_by_accident() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), op=Sum, group=group)
        mine, whole = samples(3, group.rank), network()
        for r in range(group.size):
            backward(whole, *samples(3, r), mean=False)

        def is_summed_once() -> bool:
            return all(np.allclose(net[name].grad, whole[name].grad) for name in net)

        with pytest.raises(RuntimeError, match=r"without synchronize\(\)"):
            optimizer.skip_synchronize().__enter__()
        backward(net, *mine, mean=False)
        optimizer.synchronize()
        with pytest.raises(RuntimeError, match="a second time"):
            optimizer.step()
        assert optimizer.inner.n_steps == 0
        assert is_summed_once()
        optimizer.zero_grad()  # these gradients were abandoned
        backward(net, *mine, mean=False)
        optimizer.step()
        assert is_summed_once()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            pass  # like a loss scaler that found an inf
        optimizer.step()
        assert optimizer.inner.n_steps == 2
        optimizer.synchronize()
        with optimizer.skip_synchronize(), pytest.raises(TypeError, match="pass it to synchroniz"):
            optimizer.step(weight=3)

    run_threads(2, rank)


class Clipping(Momentum):
    """Clips with its own method, gets its parameters late, and defines its own state."""

    def __init__(self) -> None:
        super().__init__({}, lr=1.0)

    def clip(self, limit: float) -> list[Any]:
        found = [p for p in self.parameters if p.grad is not None]
        before = [p.grad.copy() for p in found]
        for p in found:
            p.grad = np.minimum(p.grad, limit)
        return before


@contextmanager
def registered(*given: Adapter) -> Iterator[None]:
    """Register these adapters inside, and whatever is registered there only until the end."""
    before = list(adapters._registered)
    for adapter in given:
        register_adapter(adapter)
    try:
        yield
    finally:
        adapters._registered[:] = before


class PairlessAdapter(Adapter):
    def matches(self, obj: object) -> bool:
        return isinstance(obj, Clipping)

    def parameters(self, owner: Any) -> Any:
        return [Parameter(0)]


class ClippingAdapter(Adapter):
    before_step = ("clip",)
    is_filled_later = True

    def matches(self, obj: object) -> bool:
        return isinstance(obj, Clipping)

    def state(self, optimizer: Any) -> Any:
        return ("velocity", optimizer.velocity)

    def set_state(self, optimizer: Any, state: Any) -> None:
        assert state[0] == "velocity"
        optimizer.velocity = [2 * v for v in state[1]]


def test_methods_that_look_at_gradients_find_those_of_all_ranks() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Clipping(), group=group)
        optimizer.params = net
        optimizer.velocity = [np.full_like(p.data, group.rank) for p in net.values()]
        broadcast_optimizer_state(optimizer, 1, group=group)
        assert all(np.all(v == 2 - group.rank) for v in optimizer.velocity)
        optimizer.velocity = [np.zeros_like(p.data) for p in net.values()]

        def give() -> None:
            optimizer.zero_grad()
            for p in net.values():
                p.grad = np.full_like(p.data, 4.0 * group.rank)

        start = net["b"].data.copy()
        give()
        assert all((seen == 2).all() for seen in optimizer.clip(1.5))  # and not 0 or 4
        assert all((seen == 1.5).all() for seen in optimizer.clip(1))  # nothing is averaged again
        net["w"].grad *= 2
        with pytest.raises(RuntimeError, match=r"changed since clip.* and clip\(\) does not"):
            optimizer.clip(1)
        net["w"].grad /= 2
        optimizer.step()
        assert np.array_equal(net["b"].data, start - 1)
        net["w"].grad, net["b"].grad = None, np.full(2, 4.0 * group.rank)  # without zero_grad()
        optimizer.clip(1)
        optimizer.step()
        assert np.array_equal(net["b"].data, start - 2.5)
        start -= 1.5
        optimizer.velocity[1][...] = 1
        give()
        optimizer.clip(1)
        give()  # the clipped ones were abandoned
        optimizer.step()
        assert np.array_equal(net["b"].data, start - 1 - 2.5)
        give()
        optimizer.synchronize(weight=1 + 2 * group.rank)
        net["w"].grad += group.rank  # after synchronize() they may be changed
        assert (optimizer.clip(9)[0] == 3 + group.rank).all()
        net["w"].grad -= group.rank
        with optimizer.skip_synchronize():
            optimizer.step()
        assert np.array_equal(net["b"].data, start - 1 - 2.5 - 4.25)
        give()
        optimizer.clip(1)
        with pytest.raises(TypeError, match="pass it to synchronize"):
            optimizer.step(weight=3)
        optimizer.synchronize()
        for p in net.values():
            p.grad *= 0.5
        with optimizer.skip_synchronize():
            optimizer.step()

    with registered(ClippingAdapter()):
        run_threads(2, rank)


def test_averages_of_before_are_not_those_of_an_exchange_that_failed() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), group=group)
        backward(net, *samples(3, group.rank))
        optimizer.synchronize()
        net["b"].grad = np.ones(2 + group.rank)
        with pytest.raises(MismatchError):
            optimizer.synchronize()
        with pytest.raises(RuntimeError, match=r"without synchronize\(\)"):
            optimizer.skip_synchronize().__enter__()

    run_threads(2, rank)


def test_after_an_error_in_a_method_that_has_averaged_nothing_may_be_added() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Clipping(), group=group)
        optimizer.params, optimizer.velocity = net, [np.zeros_like(p.data) for p in net.values()]
        backward(net, *samples(3, group.rank))
        with pytest.raises(TypeError, match="ufunc"):
            optimizer.clip("1")
        kept = {name: p.grad for name, p in net.items()}
        backward(net, *samples(3, group.rank))
        with pytest.raises(RuntimeError, match=r"changed since clip\(\) averaged them"):
            optimizer.step()
        for name, p in net.items():
            p.grad = kept[name]
        optimizer.step()
        found = [p.data.tolist() for p in net.values()]
        assert ops.allgather_object(found, group=group) == [found, found]

    with registered(ClippingAdapter()):
        run_threads(2, rank)


def test_a_rank_whose_step_failed_does_not_take_part_in_the_next_of_the_others() -> None:
    """It lacks a step, and all find out."""

    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), group=group)
        for step in range(4):
            optimizer.zero_grad()
            backward(net, *samples(3, group.rank))
            if step == 1 and group.rank:
                with pytest.raises(TypeError):
                    optimizer.step(scale="1")
            elif step == 2:
                text = "rank 0 has .* step 3, rank 1 has .* step 2"
                with pytest.raises(MismatchError, match=text):
                    optimizer.step()
            else:
                optimizer.step()

    run_threads(2, rank)


def lose_by_mismatch(optimizer: Any, net: Any, group: Group) -> None:
    net["b"].grad = np.ones(2 + group.rank)
    with pytest.raises(MismatchError):
        optimizer.step(weight=2)


def lose_by_a_wrong_gradient(optimizer: Any, net: Any, group: Group) -> None:
    net["b"].grad = object() if group.rank else np.ones(2)
    with pytest.raises(TypeError if group.rank else MismatchError):
        optimizer.step(weight=2)


def lose_by_weights(optimizer: Any, net: Any, group: Group) -> None:
    with pytest.raises(ValueError, match="weight 0"):
        optimizer.synchronize(weight=0)


def lose_by_an_error_after_averaging(optimizer: Any, net: Any, group: Group) -> None:
    optimizer.clip(0.1)
    net["b"].grad += 1
    with pytest.raises(RuntimeError, match="changed since clip"):
        optimizer.step()


def lose_by_an_error_of_the_step(optimizer: Any, net: Any, group: Group) -> None:
    optimizer.synchronize(weight=1 + group.rank)
    with optimizer.skip_synchronize(), pytest.raises(TypeError, match="scale"):
        optimizer.step(scale=None)


@pytest.mark.parametrize(
    "lose",
    [
        lose_by_mismatch,
        lose_by_a_wrong_gradient,
        lose_by_weights,
        lose_by_an_error_after_averaging,
        lose_by_an_error_of_the_step,
    ],
)
def test_nothing_of_a_lost_step_is_left_for_the_next(lose: Any) -> None:
    class Careful(Clipping):
        def step(self, scale: Any = 1.0) -> str:
            if scale is None:
                raise TypeError("scale")
            return super().step(scale)

    def rank(group: Group) -> None:
        nets, optimizers = [network(), network()], []
        for net in nets:
            optimizer = DistributedOptimizer(Careful(), group=group)
            optimizer.params, optimizer.velocity = (
                net,
                [np.zeros_like(p.data) for p in net.values()],
            )
            optimizers.append(optimizer)
        for step in range(3):
            for net, optimizer in zip(nets, optimizers, strict=True):
                if step == 1 and net is nets[0]:
                    backward(net, *samples(3, 100 + group.rank))
                    lose(optimizer, net, group)
                optimizer.zero_grad()
                backward(net, *samples(3, group.rank + group.size * step))
                optimizer.step()
        bits = [[p.data.tobytes() for p in net.values()] for net in nets]
        assert bits[0] == bits[1]
        assert ops.allgather_object(bits, group=group) == [bits] * group.size

    with registered(ClippingAdapter()):
        run_threads(2, rank)


def test_weight_is_not_passed_on() -> None:
    class OwnWeight(Momentum):
        def step(self, weight: float = 7) -> float:  # type: ignore[override]
            return weight

    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(OwnWeight(net), group=group)
        backward(net, *samples(3))
        assert optimizer.step() == 7
        assert optimizer.step(9) == 9
        with pytest.raises(TypeError, match="its own argument `weight`"):
            optimizer.step(weight=3)
        optimizer.synchronize(weight=3)
        with optimizer.skip_synchronize():
            assert optimizer.step(8) == 8
        with pytest.raises(ValueError, match="op=Average"):
            DistributedOptimizer(Momentum(net), op=Sum, group=group).step(weight=3)

    run_threads(1, rank)


def test_arrays_that_a_step_may_be_given() -> None:
    class Given(Momentum):
        def step(self, *arrays: Any) -> int:  # type: ignore[override]
            return len(arrays)

    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Given(net), group=group)
        backward(net, *samples(3))
        assert optimizer.step(np.array(0.5), net["w"].data, net["w"].grad) == 3
        with pytest.raises(TypeError, match="was given arrays, which are not averaged"):
            optimizer.step(net["w"].grad.copy())

    run_threads(1, rank)


def test_a_closures_gradients_and_loss_are_averaged() -> None:
    class LineSearch(Momentum):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            return [closure(), closure()]

    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(LineSearch(net), group=group)
        evaluations = []

        def closure() -> Any:
            evaluations.append(len(evaluations))
            for p in net.values():
                p.grad = np.full_like(p.data, 4.0 * group.rank + evaluations[-1])
            return float(group.rank)

        assert optimizer.step(closure) == [0.5, 0.5]
        assert (net["b"].grad == 3).all()
        assert optimizer.step(closure=closure, weight=3 if group.rank else 1) == [0.75, 0.75]
        assert (net["b"].grad == 6).all()
        ignoring = DistributedOptimizer(Momentum(net), group=group)
        ignoring.inner.step = lambda model: None
        with pytest.raises(RuntimeError, match="has not called the function that it was given"):
            ignoring.step(lambda x: x)  # such as a model

    run_threads(2, rank)


def test_what_applies_gradients_is_no_closure() -> None:
    class Model(Momentum):
        def step(self, rule: Any) -> None:  # type: ignore[override]
            for p in self.params.values():
                p.data = rule(p.data, gradient=p.grad)

    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Model(net), group=group)
        for p in net.values():
            p.grad = np.full_like(p.data, group.rank)
        with pytest.raises(TypeError, match="write `takes_closure = False`"):
            optimizer.step(lambda value, gradient: value - gradient)

    run_threads(2, rank)


def test_methods_that_take_steps_average_and_others_are_the_inner_optimizers() -> None:
    class Loading(Updating):
        def train(self, gradient: Any) -> None:
            self._held[0].grad = gradient
            self.update()

        def load(self, state: Any) -> None:
            self.__dict__.update(state)

    def rank(group: Group) -> None:
        params = [Parameter(np.zeros(2))]
        optimizer = DistributedOptimizer(Loading(params), group=group)
        optimizer.train(np.full(2, 2.0 * group.rank))
        assert (params[0].data == -1).all()
        optimizer.load({"rate": 3})
        assert optimizer.inner.rate == 3

    run_threads(2, rank)


def test_copies_and_pickles() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), compression=Compression.fp16, group=group)
        deep = copy.deepcopy(optimizer)
        assert type(deep) is DistributedOptimizer
        assert deep.inner is not optimizer.inner
        assert deep.params["w"] is not net["w"]
        assert deep._own.options.compression.wire == "fp16"
        for p in deep.params.values():
            p.grad = np.full_like(p.data, 2.0 * group.rank)
        deep.step()
        assert (deep.params["w"].grad == 1).all()
        assert net["w"].grad is None
        shallow = copy.copy(optimizer)
        shallow.lr = 77
        assert optimizer.lr == 0.5
        assert shallow.params is optimizer.params
        function = DistributedOptimizer(Momentum(net), parameters=lambda: net, group=group)
        with pytest.raises(TypeError, match="the copy would average the gradients of this"):
            copy.deepcopy(function)
        inner = Updating(list(net.values()))
        deep = copy.deepcopy(DistributedOptimizer(inner, parameters=inner.parameters, group=group))
        assert [p for _, p in deep._own.named()] == deep.inner._held != inner._held
        named = DistributedOptimizer(Momentum(net), named_parameters=list(net.items()), group=group)
        deep = copy.deepcopy(named)
        assert [p for _, p in deep._own.named()] == list(deep.params.values())
        with pytest.raises(TypeError, match="with its own group cannot be pickled"):
            pickle.dumps(optimizer)

    run_threads(2, rank)


def test_names_stand_in_the_error() -> None:
    def rank(group: Group) -> str:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), group=group)
        backward(net, *samples(3))
        if group.rank:
            net["w"].grad = np.zeros((1, 2))
        with pytest.raises(MismatchError) as caught:
            optimizer.step()
        optimizer.zero_grad()
        backward(net, *samples(3))
        optimizer.step()
        return str(caught.value)

    one, other = run_threads(2, rank)
    assert one == other
    assert "rank 0 has 'w' float64[3, 2], rank 1 has 'w' float64[1, 2]" in one


def test_other_collectives_at_the_same_time_are_a_mismatch_on_both() -> None:
    def rank(group: Group) -> str:
        net = network()
        optimizer = DistributedOptimizer(Momentum(net), group=group)
        backward(net, *samples(3))
        optimizer.step()
        measure = partial(ops.allreduce, np.ones(3), name="accuracy", group=group)
        with pytest.raises(MismatchError) as caught:
            (measure if group.rank else optimizer.step)()
        optimizer.step()
        return str(caught.value)

    for message in run_threads(2, rank):
        assert "accuracy" in message
        assert "gradients of optimizer 1" in message


# Adapters.


def test_a_list_of_arrays_and_a_list_of_gradients() -> None:
    class Sgd:
        def __init__(self, params: Any, grads: Any) -> None:
            self.params, self.grads = params, grads

        def update(self) -> None:
            keys = self.params if isinstance(self.params, dict) else range(len(self.params))
            for key in keys:
                self.params[key] -= self.grads[key]

    def rank(group: Group) -> None:
        for as_dict in (False, True):
            params: Any = [np.zeros(2), np.zeros(3)]
            grads: Any = [np.full(2, 2.0 * group.rank), None if group.rank else np.full(3, 4.0)]
            if as_dict:
                params, grads = (dict(zip("ab", x, strict=True)) for x in (params, grads))
            optimizer = DistributedOptimizer(Sgd(params, grads), group=group)
            optimizer.update()
            reducer = optimizer._own.reducer
            assert (given := reducer._given)
            reducer.bind(optimizer._own.named())
            assert reducer._given is given  # nothing has changed, so that the plan is kept
            values = list(params.values()) if as_dict else params
            assert (values[0] == -1).all()
            assert (values[1] == -2).all()
            if as_dict:
                del grads["b"]
                grads["a"] = np.ones(2)
                optimizer.synchronize()
                assert list(grads) == ["a"]
                grads["dw"] = grads["a"]
                with pytest.raises(ValueError, match=r"no params\['dw'\] for the gradient"):
                    optimizer.update()
            else:
                grads.append(grads[0])
                with pytest.raises(ValueError, match="3 grads of 2 params"):
                    optimizer.update()

    run_threads(2, rank)


def test_lists_that_are_made_anew_do_not_lose_what_is_put_into_them() -> None:
    class Layers(Momentum):
        params = property(lambda self: [self.w])
        grads = property(lambda self: [self.dw])

        def __init__(self) -> None:
            self.w, self.dw = np.zeros(2), None

    def rank(group: Group) -> None:
        optimizer = DistributedOptimizer(Layers(), group=group)
        optimizer.dw = np.full(2, 2.0 * group.rank)
        optimizer.synchronize()
        assert (optimizer.dw == 1).all()
        optimizer.dw = np.broadcast_to(np.float64(group.rank), (2,))
        with pytest.raises(TypeError, match=r"Layers\.grads is another container each time"):
            optimizer.synchronize()

    run_threads(2, rank)


def test_scalar_values_and_gradients() -> None:
    class Value:  # as in micrograd
        def __init__(self, data: float) -> None:
            self.data = data
            self.grad = 0

    class Sgd:
        def __init__(self, params: list[Value]) -> None:
            self.params = params

        def step(self) -> None:
            for p in self.params:
                p.data -= p.grad

    def rank(group: Group) -> None:
        values = [Value(1.0), Value(2.0)]
        optimizer = DistributedOptimizer(Sgd(values), group=group)
        values[0].grad = 3.0 * group.rank
        optimizer.step()
        assert [value.data for value in values] == [-0.5, 2.0]

    run_threads(2, rank)


def test_gradients_wrapped_in_objects() -> None:
    class Tensor:
        def __init__(self, data: Any) -> None:
            self.data = data
            self.grad: Any = None

    def rank(group: Group) -> None:
        w = Tensor(np.zeros(2))
        w.grad = Tensor(np.full(2, 2.0 * group.rank))
        inner = Momentum.__new__(Momentum)
        inner.params, inner.velocity = [], []
        DistributedOptimizer(inner, parameters=[w], group=group).synchronize()
        assert (w.grad.data == 1).all()
        frozen = np.full(2, 4.0 * group.rank)
        frozen.flags.writeable = False
        w.grad = kept = Tensor(frozen)
        DistributedOptimizer(inner, parameters=[w], group=group).synchronize()
        assert w.grad is kept
        assert (kept.data == 2).all()

    run_threads(2, rank)


def test_a_gradient_that_only_others_have_is_of_the_parameters_kind() -> None:
    torch = pytest.importorskip("torch")

    def rank(group: Group) -> None:
        w = Parameter(0)
        w.data = torch.zeros(2)
        if group.rank == 0:
            w.grad = torch.full((2,), 3.0)
        inner = Momentum.__new__(Momentum)
        inner.params = []
        DistributedOptimizer(inner, parameters=[w], group=group).synchronize()
        assert isinstance(w.grad, torch.Tensor)
        assert w.grad.tolist() == [1.5, 1.5]

    run_threads(2, rank)


def test_the_example_of_register_adapter() -> None:
    """Exactly as in the docstring."""
    code = re.search(
        r"class TinyAdapter.*?register_adapter\(TinyAdapter\(\)\)",
        inspect.getdoc(register_adapter) or "",
        re.S,
    )
    assert code is not None

    class tiny:  # noqa: N801 (a module)
        class Weight:
            def __init__(self, name: str, w: Any) -> None:
                self.name, self.w, self.dw = name, w, None

        class Trainer:
            def __init__(self, weights: Any) -> None:
                self.weights = weights

            def apply(self) -> None:
                for weight in self.weights:
                    weight.w = weight.w - weight.dw

    class hvd:  # noqa: N801
        register_adapter = staticmethod(register_adapter)

    with registered():
        exec(textwrap.dedent(" " * 4 + code[0]), {"tiny": tiny, "hvd": hvd, "Adapter": Adapter})

        def rank(group: Group) -> None:
            weights = [tiny.Weight("a", np.zeros(2)), tiny.Weight("b", np.zeros(3))]
            trainer = DistributedOptimizer(tiny.Trainer(weights), group=group)
            weights[0].dw = np.full(2, 2.0 * group.rank)
            weights[1].dw = None if group.rank else np.full(3, 4.0)
            trainer.apply()
            assert (weights[0].w == -1).all()
            assert (weights[1].w == -2).all()

        run_threads(2, rank)
    for wrong in (object(), Adapter):
        with pytest.raises(TypeError, match="register_adapter needs an object"):
            register_adapter(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("known", [Parameter, Momentum])
def test_an_adapter_may_know_the_parameters_or_the_optimizer_only(known: type) -> None:
    class Mine(Adapter):
        def matches(self, obj: object) -> bool:
            return isinstance(obj, known)

        def gradient(self, parameter: Any) -> Any:
            return None if parameter.grad is None else parameter.grad[0]

    with registered(Mine()):

        def rank(group: Group) -> None:
            net = network()
            optimizer = DistributedOptimizer(Momentum(net), group=group)
            net["b"].grad = [np.full(2, 2.0 * group.rank)]
            optimizer.synchronize()
            assert (net["b"].grad[0] == 1).all()

        run_threads(2, rank)


def test_from_numpy_and_to_host_for_numpy_and_numbers() -> None:
    array = np.ones(2)
    assert from_numpy(array, np.zeros(2)) is array
    assert from_numpy(array, object()) is array
    assert type(from_numpy(np.array(2.5), np.float32(1))) is np.float64
    assert type(from_numpy(np.array(2.5), np.float64(1))) is np.float64
    assert type(from_numpy(np.array(2.5), object())) is np.ndarray
    assert type(from_numpy(np.array(2.5), 1.0)) is float
    assert to_host(array) is array
    assert to_host([1, 2]).tolist() == [1, 2]
    assert to_host(3).dtype == np.asarray(3).dtype


@pytest.mark.launches
def test_no_framework_is_imported() -> None:
    import subprocess

    code = (
        "import sys; from horo_lite import adapters\n"
        "from horo_lite.state import broadcast; from horo_lite.training import optimizer\n"
        "class O:\n  params = []\n  def step(self): pass\n"
        "adapters.adapter_of(O())\n"
        "print([m for m in ('torch', 'jax', 'tensorflow', 'mpi4py') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def train_in_a_job() -> str:
    import horo_lite as hvd

    world = hvd.init()
    net = network(seed=world.rank)
    hvd.broadcast_parameters(net)
    optimizer = hvd.DistributedOptimizer(Momentum(net), named_parameters=net.items())
    for step in range(4):
        optimizer.zero_grad()
        x, y = samples(12, step)
        backward(net, x[world.rank :: world.size], y[world.rank :: world.size])
        optimizer.step()
    assert close(net, alone(4))
    bits = [net[name].data.tobytes() for name in net]
    assert hvd.allgather_object(bits, group=world.group) == [bits] * world.size

    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is hvd.DistributedOptimizer
    assert [name for name, _ in again._own.named()] == ["w", "b"]
    again.params["b"].grad = np.full(2, float(world.rank))
    again.step()
    assert (again.params["b"].grad == (world.size - 1) / 2).all()

    if world.size > 1:
        if world.rank == world.size - 1:
            net["w"].grad = np.zeros((7, 2))
        with pytest.raises(
            hvd.MismatchError, match=rf"rank {world.size - 1} has 'w' float64\[7, 2\]"
        ):
            optimizer.step()
        net["w"].grad = np.zeros((3, 2))
        optimizer.step()
    return world.transport


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "hosts", "transport"),
    [(1, "", "solo"), (2, "", "shm"), (2, "1,1", "mpi"), (4, "2,2", "mpi")],
)
def test_processes(ranks: int, hosts: str, transport: str) -> None:
    assert set(on_ranks(train_in_a_job, ranks, hosts=hosts, timeout_s=60)) == {transport}
