"""broadcast_parameters and broadcast_optimizer_state, without a framework and with JAX."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from home_made import Parameter
from launch import RanksFailedError, run_threads

from horo_lite import adapters
from horo_lite.adapters.object import keyed
from horo_lite.collectives.group import Group
from horo_lite.errors import DriftError, MismatchError
from horo_lite.state.broadcast import broadcast_optimizer_state, broadcast_parameters
from horo_lite.state.drift import check_in_sync
from horo_lite.state.trees import Tree, dataclass_node, mapped, repeats
from horo_lite.training.gradients import average_gradients
from horo_lite.training.optimizer import DistributedOptimizer


class Pair(NamedTuple):
    w: Any
    b: Any


def values(rank: int, n: int = 3) -> Any:
    return np.arange(n) * 10.0 + rank


@pytest.mark.parametrize("root", [0, 1, 2])
def test_trees_are_written_in_place(root: int) -> None:
    def rank(group: Group) -> None:
        r = group.rank
        frozen = values(r)
        frozen.flags.writeable = False
        tree: dict[str, Any] = {
            "array": values(r),
            "nested": {"list": [values(r), r + 0.5, True], "none": None, "text": "kept"},
            "pair": Pair(values(r), r),
            "arrays_only": (values(r), values(r)),
            "parameter": Parameter(values(r)),
            "read_only": frozen,
            "scalar": np.float32(r),
            "zero_dimensional": np.array(r),
            "strided": np.repeat(values(r), 2)[::2],
            "mapping": MappingProxyType({"x": r}),
        }
        if r == 1:  # in another order
            tree = dict(reversed(list(tree.items())))
        kept = dict(tree)
        assert broadcast_parameters(tree, root, group=group) is tree
        for name in ("array", "nested", "arrays_only", "parameter", "zero_dimensional", "strided"):
            assert tree[name] is kept[name]
        assert np.array_equal(tree["array"], values(root))
        assert np.array_equal(tree["nested"]["list"][0], values(root))
        assert tree["nested"]["list"][1:] == [root + 0.5, True]
        assert type(tree["nested"]["list"][2]) is bool
        assert tree["nested"]["none"] is None
        assert tree["nested"]["text"] == "kept"
        assert type(tree["pair"]) is Pair
        assert tree["pair"].w is kept["pair"].w
        assert np.array_equal(tree["pair"].w, values(root))
        assert tree["pair"].b == root
        assert np.array_equal(tree["arrays_only"][1], values(root))
        assert np.array_equal(tree["parameter"].data, values(root))
        assert np.array_equal(tree["read_only"], values(root))
        assert np.array_equal(frozen, values(r))
        assert tree["scalar"] == root
        assert type(tree["scalar"]) is np.float32
        assert tree["zero_dimensional"] == root
        assert np.array_equal(tree["strided"], values(root))
        assert tree["mapping"]["x"] == root

    run_threads(3, rank)


def test_lists_pairs_iterators_and_single_ones() -> None:
    def rank(group: Group) -> None:
        r = group.rank
        array = values(r)
        assert broadcast_parameters(array, 1, group=group) is array
        assert np.array_equal(array, values(1))
        assert broadcast_parameters(r, 1, group=group) == 1
        parameters = [Parameter(values(r)), Parameter(values(r))]
        broadcast_parameters(iter(parameters), 1, group=group)
        assert np.array_equal(parameters[1].data, values(1))
        named = [("w", values(r)), ("b", values(r, 2))]
        assert broadcast_parameters(named, 1, group=group)[1][0] == "b"
        assert np.array_equal(named[1][1], values(1, 2))
        numbers = [("w", r), ("b", 2 * r)]
        assert broadcast_parameters(numbers, 1, group=group) == [("w", 1), ("b", 2)]
        assert broadcast_parameters([], group=group) == []

    run_threads(2, rank)


@pytest.mark.parametrize("n_taken", [1, 2])
def test_a_generator_that_has_been_used_is_refused(n_taken: int) -> None:
    """Nothing, or a part, would be broadcast, and ranks would train from different weights."""

    def rank(group: Group) -> None:
        parameters = [Parameter(values(group.rank)), Parameter(values(group.rank))]
        generator = (each for each in parameters)
        broadcast_parameters(generator, 1, group=group)
        assert np.array_equal(parameters[1].data, values(1))
        generator = (each for each in parameters)
        for _ in range(n_taken):
            next(generator)
        with pytest.raises(ValueError, match="values have already been taken"):
            broadcast_parameters(generator, 0, group=group)

    run_threads(2, rank)


def test_modules_and_optimizers() -> None:
    class Holder:
        def __init__(self, **held: Any) -> None:
            vars(self).update(held)

        def step(self) -> None:
            pass

    def rank(group: Group) -> None:
        r = group.rank
        for hold in (
            lambda p: Holder(params=p),
            lambda p: Holder(params={"a": p[0], "b": p[1]}),
            lambda p: Holder(parameters=lambda: iter(p)),
            lambda p: Holder(named_parameters=lambda: [("a", p[0]), ("b", p[1])]),
            lambda p: Holder(param_groups=[{"params": p}]),
            lambda p: DistributedOptimizer(Holder(params=p), group=group),
            lambda p: DistributedOptimizer(Holder(), parameters=p, group=group),
        ):
            parameters = [Parameter(values(r)), Parameter(float(r))]
            broadcast_parameters(hold(parameters), 1, group=group)
            assert np.array_equal(parameters[0].data, values(1))
            assert parameters[1].data == 1
        for hold in (
            lambda p: Holder(params=p),
            lambda p: Holder(params=p, grads=[None, None]),
            lambda p: Holder(params={"a": p[0], "b": p[1]}, grads={}),
        ):
            arrays = [values(r), values(r, 2)]
            broadcast_parameters(hold(arrays), 1, group=group)
            assert np.array_equal(arrays[1], values(1, 2))

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ([{"w": values(0), "b": values(0)}, {"w": values(1), "c": values(1)}], ["'b'", "'c'"]),
        ([{"w": values(0)}, {"w": values(1, 4)}], ["'w'", "float64[3]", "float64[4]"]),
        ([{"w": values(0)}, {"w": values(0).astype(np.int64)}], ["'w'", "float64[3]", "int64[3]"]),
        ([[values(0)], [values(0), values(0)]], ["'[1]'"]),
    ],
)
def test_what_differs_is_named_on_every_rank_and_nothing_is_written(
    mine: Any, words: list[str]
) -> None:
    def rank(group: Group) -> str:
        tree = mine[group.rank]
        before = repr(tree)
        with pytest.raises(MismatchError) as caught:
            broadcast_parameters(tree, group=group)
        assert repr(tree) == before
        assert broadcast_parameters(group.rank, 1, group=group) == 1
        return str(caught.value)

    one, other = run_threads(2, rank)
    assert one == other
    assert all(word in one for word in ["rank 0", "rank 1", *words])


def test_roots_that_differ_and_roots_that_are_none() -> None:
    def rank(group: Group) -> None:
        with pytest.raises(MismatchError, match="root_rank 1"):
            broadcast_parameters(values(0), group.rank, group=group)
        with pytest.raises(ValueError, match="root_rank is 2"):
            broadcast_parameters(values(0), 2, group=group)
        with pytest.raises(TypeError, match=r"'a\[0\]': object gives no array"):
            broadcast_parameters({"a": [object()]}, group=group)

    run_threads(2, rank)


class Adam:
    """Keeps state in every common way."""

    def __init__(self, params: list[Parameter]) -> None:
        self.params = params
        self.lr = 0.1
        self.n_steps = 0
        self.moments: dict[Any, Any] = {}
        self.by_id: dict[int, Any] = {}
        self.by_pair: dict[Any, Any] = {}
        self.values = [p.data for p in params]  # the parameters', and not state
        self.listed: list[Any] = [np.zeros(2), np.zeros(3)]
        self.log = print
        self.betas = (0.9, 0.999)

    def step(self) -> None:
        self.n_steps += 1
        for i, p in enumerate(self.params):
            self.moments[p] = {"m": p.grad * 1.0, "n": self.n_steps}
            self.by_id[id(p)] = p.grad * 2
            self.by_pair[p, "m"] = p.grad * 3
            self.listed[i] += p.grad
            p.data -= p.grad


@pytest.mark.parametrize("wrapped", [False, True])
def test_state_of_an_optimizer_without_state_dict(wrapped: bool) -> None:
    def rank(group: Group) -> None:
        r = group.rank
        params = [Parameter(np.zeros(2)), Parameter(np.zeros(3))]
        inner = Adam(params)
        optimizer = DistributedOptimizer(inner, group=group) if wrapped else inner
        if r == 1:  # the others have no state yet
            params[0].grad, params[1].grad = np.full(2, 3.0), np.full(3, 4.0)
            inner.step()
            inner.lr = 0.7
        kept = (inner.moments, inner.listed, inner.listed[0])
        broadcast_optimizer_state(optimizer, root_rank=1, group=group)
        assert (inner.moments, inner.listed) == kept[:2]
        assert inner.listed[0] is kept[2]
        assert (inner.lr, inner.n_steps, inner.betas) == (0.7, 1, (0.9, 0.999))
        assert inner.log is print
        assert inner.params is params
        assert list(inner.moments) == params
        assert (inner.moments[params[1]]["m"] == 4).all()
        assert inner.moments[params[1]]["n"] == 1
        assert list(inner.by_id) == [id(p) for p in params]
        assert (inner.by_id[id(params[0])] == 6).all()
        assert list(inner.by_pair) == [(p, "m") for p in params]
        assert (inner.by_pair[params[0], "m"] == 9).all()
        assert (inner.listed[0] == 3).all()
        assert (params[0].data == (-3 if r == 1 else 0)).all()

    run_threads(3, rank)


def test_arrays_and_elements_that_are_one_object_on_some_ranks() -> None:
    class Adam:
        def __init__(self) -> None:
            self.params = [Parameter(np.zeros(2))]
            self.v = [np.zeros(2)]
            self.m = list(self.v)  # one object each, until the first step
            self.first = self.m
            self.expanded = np.lib.stride_tricks.as_strided(np.zeros(1), (2,), (0,))

        def step(self) -> None:
            self.m[0], self.v[0] = self.m[0] + 1, self.v[0] + 2

    def rank(group: Group) -> None:
        inner = Adam()
        if group.rank == 1:
            inner.step()
            inner.expanded = np.array([3.0, 4.0])
        v = inner.v[0]
        broadcast_optimizer_state(inner, root_rank=1, group=group)
        assert (inner.m[0].tolist(), inner.v[0].tolist()) == ([1, 1], [2, 2])
        assert inner.v[0] is v
        assert inner.first is inner.m
        assert inner.expanded.tolist() == [3, 4]

    run_threads(2, rank)


def test_state_beside_plain_arrays() -> None:
    class Sgd:
        def __init__(self, params: list[Any], grads: list[Any]) -> None:
            self.params, self.grads = params, grads
            self.velocity = [np.zeros_like(p) for p in params]

        def step(self) -> None:
            pass

        def state_dict(self) -> dict[str, Any]:  # which nothing could load
            return {}

    def rank(group: Group) -> None:
        r = group.rank
        inner = Sgd([values(r)], [values(r)])
        inner.velocity[0][:] = r
        broadcast_optimizer_state(inner, root_rank=1, group=group)
        assert (inner.velocity[0] == 1).all()
        assert np.array_equal(inner.params[0], values(r))
        assert np.array_equal(inner.grads[0], values(r))

    run_threads(2, rank)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def rank(group: Group) -> None:
        r = group.rank
        layers = [{"w": jnp.full((2, 3), r, jnp.bfloat16), "b": jnp.arange(3.0) + r}]
        tree = {"layers": layers, "state": (jnp.float32(r), 5 * r)}
        kept = layers[0]["b"]
        result = broadcast_parameters(tree, 1, group=group)
        assert result is tree
        assert tree["layers"] is layers
        assert isinstance(layers[0]["w"], jax.Array)
        assert layers[0]["w"].dtype == jnp.bfloat16
        assert (layers[0]["w"] == 1).all()
        assert (layers[0]["b"] == jnp.arange(3.0) + 1).all()
        assert (kept == jnp.arange(3.0) + r).all()
        assert tree["state"] == (1, 5)
        assert (tree["layers"][0]["b"] is kept) == (r == 1)

        class Step:
            def __init__(self) -> None:
                self.params = [Parameter(jnp.zeros(2))]

            def step(self) -> None:
                self.params[0].data = self.params[0].data - self.params[0].grad

        inner = Step()
        optimizer = DistributedOptimizer(inner, group=group)
        inner.params[0].grad = jnp.full(2, 2.0 * r)
        mine = inner.params[0].grad
        optimizer.step()
        assert isinstance(inner.params[0].grad, jax.Array)
        assert (inner.params[0].data == -1).all()
        assert (mine == 2.0 * r).all()
        inner.params[0].grad = None if r else jnp.full(2, 4.0)
        optimizer.synchronize()
        assert isinstance(inner.params[0].grad, jax.Array)
        assert (inner.params[0].grad == 2).all()
        assert isinstance(adapters.from_numpy(np.ones(2), mine), jax.Array)
        inner.params = [jnp.zeros(2)]
        with pytest.raises(TypeError, match="broadcast the dict or list"):
            broadcast_parameters(inner, group=group)

    run_threads(2, rank)


def test_a_failing_rank_is_reported() -> None:
    """This is a property of the helper: an assertion in a rank fails the test."""

    def rank(group: Group) -> None:
        assert group.rank == 0

    with pytest.raises(RanksFailedError):
        run_threads(2, rank)


@dataclass
class Net:
    w: Any
    n: Any
    frozen: Any = None


@dataclass(frozen=True)
class Frozen:
    b: Any
    n: Any


def test_dataclasses() -> None:
    def rank(group: Group) -> None:
        r = group.rank
        net = Net(values(r), r, Frozen(values(r), r))
        w, frozen, b = net.w, net.frozen, net.frozen.b
        assert check_in_sync([Net(1.0, 2)], group=group)
        with pytest.raises(DriftError, match=r"4 of 4 arrays, first 'w'"):
            check_in_sync(net, group=group)
        assert broadcast_parameters(net, 1, group=group) is net
        assert net.w is w
        assert net.frozen.b is b
        assert np.array_equal(w, values(1))
        assert np.array_equal(b, values(1))
        assert (net.n, net.frozen.n, frozen.n) == (1, 1, r)
        averages = average_gradients(Net(values(r), float(r)), group=group)
        assert np.array_equal(averages.w, values(0) + 0.5)
        assert averages.n == 0.5

    run_threads(2, rank)


@pytest.mark.parametrize("params", [None, "weights.npz"])
def test_what_is_no_tree_is_refused(params: Any) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(TypeError, match="needs parameters, a module or an optimizer, not "):
            broadcast_parameters(params, group=group)

    run_threads(1, rank)


def test_new_leaves_are_in_the_same_containers() -> None:
    @dataclass
    class One:
        x: int

    def tree(by: int) -> list[Any]:
        return [by, (2 * by, 3 * by), [("a", 4 * by)], (("b", 5 * by),), One(6 * by), {"c": 7 * by}]

    for in_place in (False, True):
        old = [*tree(1), defaultdict(list, d=8)]
        whole = Tree(old, opened=dataclass_node)
        parts = list(old)
        leaves = [10 * leaf for _, leaf in whole.named]
        new = whole.written(leaves) if in_place else whole.copied(leaves)
        assert new == [*tree(10), {"d": 80}]
        assert new[6].default_factory is list
        assert (new is old) == in_place
        assert [x is y for x, y in zip(new, parts, strict=True)] == [
            i in (2, 4, 5, 6) and in_place for i in range(7)
        ]
    assert Tree(One, opened=dataclass_node).named == [("", One)]
    pairs = [("a", 1), ("b", 2)]
    assert keyed(pairs) == pairs
    assert keyed([(1, 2)]) is keyed([("a", 1, 2)]) is keyed([*pairs, 3]) is None
    assert type(mapped(Pair(1, 2), str)) is Pair
    assert repeats(np.broadcast_to(1.0, (3, 2)))
    strided = np.lib.stride_tricks.as_strided
    assert not any(map(repeats, (strided(np.ones(3), (1, 3), (0, 8)), np.broadcast_to(1, (0, 3)))))
