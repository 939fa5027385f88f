"""What adapters can define besides access to gradients, each with a home-made framework."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from launch import run_threads

import horo_lite as hvd
from horo_lite import adapters
from horo_lite.adapters import Adapter, register_adapter
from horo_lite.adapters.object import named_variables
from horo_lite.collectives.group import Group


class Later:
    """An array that is computed when it is needed; only its own methods can read it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.array = make, None

    def compute(self) -> Any:
        if self.array is None:
            self.array = np.array(self.make(), np.float32)
        return self.array


class Weight:
    def __init__(self, value: Any) -> None:
        self.value = Later(lambda: value)
        self.grad: Later | None = None


class Descent:
    """Keeps its last update, and calls a hook after a step: it takes no closure."""

    def __init__(self, weights: list[Weight]) -> None:
        self.params = weights
        self.moved = Later(lambda: 0.0)
        self.marks: list[str] = []

    def step(self, hook: Callable[[], str]) -> str:
        before = self.moved.compute()
        for weight in self.params:
            assert weight.grad is not None
            old, slope = weight.value, weight.grad
            weight.value = Later(lambda old=old, slope=slope: old.compute() - slope.compute())
        moved = sum(float(weight.grad.compute().sum()) for weight in self.params)
        self.moved = Later(lambda: before + moved)
        self.marks.append(hook())
        return "stepped"


class OwnDescent:
    """An optimizer that the framework's adapter does not know, of its parameters."""

    def __init__(self, params: list[Weight], moved: Later) -> None:
        self.params, self.moved = params, moved

    def step(self) -> None:
        pass


class Frozen:
    """A model that is immutable."""

    def __init__(self, *rows: Any) -> None:
        self.rows = [np.array(row, np.float32) for row in rows]
        for row in self.rows:
            row.flags.writeable = False


class LaterAdapter(Adapter):
    takes_closure = False
    array_types = (Later,)

    def __init__(self) -> None:
        self.computed: list[int] = []  # the number of gradients, each time

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (Later, Weight, Descent, Frozen))

    def parameters(self, owner: Any) -> list[tuple[str, Any]]:
        return [(f"w{i}", w) for i, w in enumerate(getattr(owner, "params", ()))]

    def flattened(
        self, tree: Any
    ) -> tuple[list[tuple[str, Any]], Callable[[Iterable[Any]], Any]] | None:
        if not isinstance(tree, Frozen):
            return None
        return [(f"row {i}", row) for i, row in enumerate(tree.rows)], lambda new: Frozen(*new)

    def compute(self, parameters: Sequence[Any]) -> None:
        lazy = [p.grad for p in parameters if isinstance(p.grad, Later) and p.grad.array is None]
        if lazy:
            self.computed.append(len(lazy))
        for gradient in lazy:
            gradient.compute()

    def gradient(self, parameter: Any) -> Any:
        assert parameter.grad is None or parameter.grad.array is not None, "one by one"
        return None if parameter.grad is None else parameter.grad.array

    def set_gradient(self, parameter: Any, array: Any) -> None:
        parameter.grad = self.from_numpy(array, parameter)

    def value(self, parameter: Any) -> Any:
        return (parameter if isinstance(parameter, Later) else parameter.value).compute()

    def from_numpy(self, array: Any, like: Any) -> Any:
        return Later(lambda: array)


@contextmanager
def registered(adapter: Adapter) -> Iterator[None]:
    before = list(adapters._registered)
    register_adapter(adapter)
    try:
        yield
    finally:
        adapters._registered[:] = before


def test_a_lazy_framework() -> None:
    adapter = LaterAdapter()

    def rank(group: Group) -> None:
        weights = [Weight(np.zeros(3)), Weight(np.ones(2))]
        optimizer = hvd.DistributedOptimizer(Descent(weights), group=group)
        for step in range(2):
            for i, weight in enumerate(weights):
                weight.grad = Later(lambda i=i: np.full(3 - i, 4.0 * group.rank + i))
            # The argument of this step is not a closure: it is called unchanged, once, without
            # averaging.
            assert optimizer.step(lambda step=step: f"after {step}") == "stepped"
        assert optimizer.marks == ["after 0", "after 1"]
        assert weights[0].value.compute().tolist() == [-4] * 3
        assert weights[1].value.compute().tolist() == [-5] * 2

        # Its arrays can be state, and a function's gradients.
        optimizer.moved = Later(lambda: 7.0 + group.rank)
        hvd.broadcast_optimizer_state(optimizer, 1, group=group)
        assert type(optimizer.moved) is Later
        assert optimizer.moved.compute() == 8
        own = OwnDescent(weights, Later(lambda: 7.0 + group.rank))
        hvd.broadcast_optimizer_state(own, 1, group=group)
        assert type(own.moved) is Later
        assert own.moved.compute() == 8
        tree = {name: Later(lambda: [2.0 * group.rank, 6.0]) for name in "ab"}
        averages = hvd.average_gradients(tree, group=group)
        assert all(type(averages[name]) is Later for name in "ab")
        assert [averages[name].compute().tolist() for name in "ab"] == [[1, 6]] * 2
        assert tree["a"].compute().tolist() == [2 * group.rank, 6]

    with registered(adapter):
        run_threads(2, rank)
    assert adapter.computed == [2] * 6  # all at once: two steps and one tree, on two ranks


def test_a_model_that_cannot_be_changed_is_made_anew() -> None:
    def rank(group: Group) -> None:
        mine = Frozen([group.rank, 1], [[5.0 * group.rank]])
        tree = {"model": mine, "n": group.rank}
        new = hvd.broadcast_parameters(tree, 1, group=group)
        assert type(new["model"]) is Frozen
        assert new["n"] == 1
        assert [row.tolist() for row in new["model"].rows] == [[1, 1], [[5]]]
        assert [row.tolist() for row in mine.rows] == [[group.rank, 1], [[5 * group.rank]]]
        with pytest.raises(hvd.MismatchError, match=r"'model.row 1': float32\[1, 1\]"):
            hvd.broadcast_parameters(
                {"model": Frozen([0, 0], [[1] * (1 + group.rank)])}, group=group
            )

    with registered(LaterAdapter()):
        run_threads(2, rank)


def test_a_framework_with_a_face_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rule:
        """An object without a step()."""

    class RuleAdapter(Adapter):
        face = "a_framework_of_ones_own"

        def matches(self, obj: object) -> bool:
            return isinstance(obj, Rule)

    face: Any = types.ModuleType(RuleAdapter.face)
    face.DistributedOptimizer = lambda optimizer, **options: ("wrapped", optimizer, options)
    monkeypatch.setitem(sys.modules, RuleAdapter.face, face)
    rule = Rule()
    with registered(RuleAdapter()):
        assert hvd.DistributedOptimizer(rule, op=hvd.Sum) == ("wrapped", rule, {"op": hvd.Sum})
    with pytest.raises(TypeError, match="not an optimizer"):
        hvd.DistributedOptimizer(rule)


def test_a_framework_that_is_not_what_it_was_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = types.ModuleType("tinygrad")
    other.__version__ = "99.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tinygrad", other)
    monkeypatch.setattr(adapters, "_loaded", {})
    monkeypatch.delitem(sys.modules, "horo_lite.adapters.tinygrad", raising=False)
    with pytest.warns(RuntimeWarning, match=r"tinygrad 99\.1.*ImportError.*not affected"):
        assert type(adapters.adapter_of(Weight(0))) is Adapter
    assert type(adapters.adapter_of(Weight(0))) is Adapter  # registered once


@pytest.mark.parametrize(
    ("oldest", "older", "later"),
    [
        ("0.7.2", "0.6.2 0.7.1 0.7 0.7.1.dev20250901", "0.7.2 0.7.2.dev1 0.10.2"),
        ("3.10", "3.9.2", "3.10.0 4"),
    ],
)
def test_a_framework_that_is_too_old_is_an_error_that_names_both_releases(
    oldest: str, older: str, later: str
) -> None:
    framework: Any = types.ModuleType("frame.core")
    for framework.__version__ in older.split():
        with pytest.raises(ImportError) as raised:
            adapters.needs(framework, oldest)
        told = f"horo_lite needs frame {oldest} or later, and this is {framework.__version__}:"
        assert str(raised.value).startswith(told)
    for framework.__version__ in later.split():
        adapters.needs(framework, oldest)
    adapters.needs(types.ModuleType("frame"), oldest)  # of unknown version


def test_arrays_of_a_framework_that_is_too_old_are_refused_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = types.ModuleType("keras")
    old.__version__ = "2.15.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keras", old)
    monkeypatch.setattr(adapters, "_loaded", {})
    monkeypatch.delitem(sys.modules, "horo_lite.adapters.keras", raising=False)
    with pytest.warns(RuntimeWarning, match=r"needs keras 3\.10 or later, and this is 2\.15\.0"):
        assert type(adapters.adapter_of(Weight(0))) is Adapter


def names_of(*paths: str) -> list[str]:
    return [name for name, _ in named_variables(types.SimpleNamespace(path=p) for p in paths)]


def test_variables_have_the_same_names_whether_a_model_was_built_or_loaded() -> None:
    built = names_of("model/dense/kernel", "model/dense/bias", "model/dense_1/kernel", "model/w_1")
    loaded = names_of("dense_9/kernel", "dense_9/bias", "dense_10/kernel", "model/w_1")
    assert loaded == built == ["dense/kernel (0)", "dense/bias (1)", "dense_1/kernel (2)", built[3]]
    assert built[3] == "model/w_1 (3)"
    # The same layers in another order are not the same.
    one, other = names_of("block_1/w", "block_2/w"), names_of("block_2/w", "block_1/w")
    assert not set(one) & set(other)
    assert names_of("", "Variable:0") == ["(0)", "Variable (1)"]  # of TensorFlow


def test_a_framework_that_may_not_be_imported_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None in sys.modules is how a program keeps something from being imported."""
    monkeypatch.setattr(adapters, "_loaded", {})
    for name in ("keras", "torch", "jax", "tinygrad"):
        monkeypatch.setitem(sys.modules, name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(adapters.adapter_of(Weight(0))) is Adapter
