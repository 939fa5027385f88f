"""average_gradients and grad_and_average: properties on threads, with NumPy and perhaps torch."""

from __future__ import annotations

import importlib.util
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import run_threads
from worlds import script_on_ranks

from horo_lite import Average, Compression, Group, Max, MismatchError, Sum, grad_and_average, ops
from horo_lite import average_gradients as average
from horo_lite.collectives import arrays as arrays_module
from horo_lite.training.options import Options
from horo_lite.training.transform import Transform

law = settings(max_examples=40)


class Pair(NamedTuple):
    weight: Any
    bias: Any


@dataclass(frozen=True)
class Layer:
    w: Any
    b: Any = None
    doubled: Any = field(init=False, default=None)


leaf_shapes = st.sampled_from([(), (1,), (3, 2), (0,), (1025,)])
trees = st.recursive(
    leaf_shapes | st.none(),
    lambda inner: (
        st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.builds(lambda items: ("tuple", items), st.lists(inner, max_size=3))
        | st.builds(Pair, inner, inner)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=8,
)


def is_shape(tree: Any) -> bool:
    return type(tree) is tuple and all(isinstance(n, int) for n in tree)


def grown(tree: Any, rank: int, dtype: Any = np.float32, path: str = "") -> Any:
    """Return the tree with arrays in place of shapes, which differ by rank and leaf."""
    if tree is None:
        return None
    if is_shape(tree):
        return oracle.sample(rank, tree, dtype, seed=sum(map(ord, path)))
    if isinstance(tree, dict):
        return {key: grown(x, rank, dtype, path + key) for key, x in tree.items()}
    if isinstance(tree, Layer):
        return Layer(grown(tree.w, rank, dtype, path + "w"), grown(tree.b, rank, dtype, path + "b"))
    if isinstance(tree, Pair):
        return Pair(*(grown(x, rank, dtype, f"{path}{i}") for i, x in enumerate(tree)))
    if isinstance(tree, tuple):
        return tuple(grown(x, rank, dtype, f"{path}{i}") for i, x in enumerate(tree[1]))
    return [grown(x, rank, dtype, f"{path}{i}") for i, x in enumerate(tree)]


def skeleton(tree: Any) -> Any:
    """Return everything of a tree except the numbers in it."""
    if isinstance(tree, np.ndarray):
        return tree.shape, tree.dtype.name
    if isinstance(tree, Layer):
        return "Layer", skeleton(tree.w), skeleton(tree.b)
    if isinstance(tree, dict):
        return type(tree), [(key, skeleton(x)) for key, x in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree), [skeleton(x) for x in tree]
    return tree


def leaves(tree: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(tree, Layer):
        return leaves([tree.w, tree.b])
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    if isinstance(tree, (list, tuple)):
        return [leaf for x in tree for leaf in leaves(x)]
    return [] if tree is None else [tree]


@law
@given(trees, st.integers(1, 4), st.sampled_from([Average, Sum]), st.booleans(), st.data())
def test_every_leaf_is_the_oracles_in_a_tree_of_the_same_shape(
    tree: Any, size: int, op: Any, weighted: bool, data: st.DataObject
) -> None:
    weights = None
    if weighted and op is Average:
        weights = data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
    before = [grown(tree, rank) for rank in range(size)]
    given_ = [grown(tree, rank) for rank in range(size)]

    def rank(group: Group) -> Any:
        weight = weights[group.rank] if weights else None
        return average(given_[group.rank], op=op, weight=weight, group=group)

    results = run_threads(size, rank)
    inputs = zip(*map(leaves, before), strict=True)
    for result, mine, kept in zip(results, given_, before, strict=True):
        assert skeleton(result) == skeleton(mine)
        for out, x, old in zip(leaves(result), leaves(mine), leaves(kept), strict=True):
            np.testing.assert_array_equal(x, old)
            assert out.size == 0 or not np.shares_memory(out, x)
    for xs, *outs in zip(inputs, *map(leaves, results), strict=True):
        assert len({out.tobytes() for out in outs}) == 1
        exact = oracle.allreduce_reference(xs, op.value, weights=weights)
        np.testing.assert_allclose(outs[0], exact, rtol=1e-5, atol=1e-6)


@law
@given(st.integers(1, 4), st.integers(-8, 8), st.integers(-8, 8))
def test_it_is_linear(size: int, a: int, b: int) -> None:
    """For whole numbers, which float32 adds exactly, bit for bit."""

    def rank(group: Group) -> None:
        x = {"w": oracle.whole_sample(group.rank, (5, 3), np.float32)}
        y = {"w": oracle.whole_sample(group.rank, (5, 3), np.float32, seed=1)}
        both = average({"w": a * x["w"] + b * y["w"]}, op=Sum, group=group)
        apart = average(x, op=Sum, group=group), average(y, op=Sum, group=group)
        np.testing.assert_array_equal(both["w"], a * apart[0]["w"] + b * apart[1]["w"])
        everyone = [oracle.whole_sample(r, (5, 3), np.float32) for r in range(size)]
        np.testing.assert_array_equal(apart[0]["w"], sum(everyone))

    run_threads(size, rank)


def test_one_rank_gets_what_it_gave_in_new_arrays() -> None:
    def rank(group: Group) -> None:
        x = np.linspace(-1, 1, 7, dtype=np.float32)
        result = average([x], group=group, weight=3)
        assert result[0].tobytes() == x.tobytes()
        assert result[0] is not x

    run_threads(1, rank)


def test_containers_and_leaves_of_many_kinds() -> None:
    def rank(group: Group) -> None:
        r = group.rank
        tree = {
            "ordered": OrderedDict(z=np.full(2, 1.0 * r), a=np.full(3, 2.0 * r)),
            "proxy": MappingProxyType({"w": np.float32(4 * r)}),
            "number": 1.0 * r,
            "integer": 2 * r,
            "whole": np.arange(3) * r,
            "counts": Counter(a=10 * r, b=4),
            "named": [("x.y", np.full(1, 6.0 * r))],
            "strided": np.arange(12.0).reshape(3, 4).T[::2] * r,
            3: np.full((), 8.0 * r),
            "nothing": {},
        }
        out = average(tree, group=group)
        assert list(out) == list(tree)
        assert type(out["ordered"]) is OrderedDict
        assert list(out["ordered"]) == ["z", "a"]
        assert out["ordered"]["a"].tolist() == [1, 1, 1]
        assert type(out["proxy"]) is MappingProxyType
        assert type(out["proxy"]["w"]) is np.float32
        assert out["proxy"]["w"] == 2
        assert (out["number"], out["integer"]) == (0.5, 1.0)
        assert type(out["number"]) is type(out["integer"]) is float
        assert out["whole"].tolist() == [0, 0, 1]  # 0, 1/2 and 1, truncated
        assert out["counts"] == Counter(a=5, b=4)
        assert type(out["counts"]) is Counter
        assert out["named"][0][0] == "x.y"
        assert out["named"][0][1].tolist() == [3]
        assert out["strided"].tolist() == (np.arange(12.0).reshape(3, 4).T[::2] / 2).tolist()
        assert out[3].shape == ()
        assert out[3] == 4
        assert out["nothing"] == {}
        assert average(np.float64(r), group=group) == 0.5
        assert average([], group=group) == []

    run_threads(2, rank)


def test_leaves_that_are_none() -> None:
    def rank(group: Group) -> None:
        tree = {"a": None, "b": None if group.rank else np.full(2, 6.0), "c": np.ones(1)}
        for _ in range(2):
            out = average(tree, group=group)
            assert out["a"] is None
            assert out["b"].tolist() == [2, 2]
            assert tree["a"] is None
            assert (tree["b"] is None) == (group.rank > 0)
        out = average(Pair(None, None if group.rank != 1 else np.full(2, 3.0)), group=group)
        assert out.weight is None
        assert out.bias.tolist() == [1, 1]

    run_threads(3, rank)


def test_fp16_travels_in_half_the_bits() -> None:
    tree = {"w": (1000,), "deep": [(3, 2), (1030,)]}

    def rank(group: Group) -> Any:
        return average(grown(tree, group.rank), compression=Compression.fp16, group=group)

    results = run_threads(3, rank)
    per_leaf = zip(*(leaves(grown(tree, r)) for r in range(3)), strict=True)
    for xs, *outs in zip(per_leaf, *map(leaves, results), strict=True):
        assert len({out.tobytes() for out in outs}) == 1
        exact = oracle.allreduce_reference(xs, "average")
        bound = oracle.wire_bound(list(xs), "fp16")
        assert np.all(np.abs(outs[0] - exact) <= bound)
        assert np.any(outs[0] != exact.astype(np.float32)), "nothing was rounded"


@pytest.mark.parametrize(
    ("ours", "theirs", "what"),
    [
        (
            {"layers": [{"weight": np.ones((3, 2))}]},
            {"layers": [{"weight": np.ones((3, 1))}]},
            r"rank 0 has 'layers\[0\].weight' float64\[3, 2\], "
            r"rank 1 has 'layers\[0\].weight' float64\[3, 1\]",
        ),
        ({"a": np.ones(2), "b": np.ones(2)}, {"a": np.ones(2)}, "'b' .*rank 1 has only 1 param"),
        (Pair(np.ones(2), 1.0), Layer(np.ones(2)), "rank 0 has 'weight' .*rank 1 has 'w'"),
        (np.ones(2), np.ones(2, np.float32), r"'gradients' float64\[2\].*'gradients' float32"),
        ([np.ones(2)], (1.0, np.ones(2)), r"'gradients\[0\]' float64\[\]"),
    ],
)
def test_a_mismatch_names_the_leaf_and_the_next_call_works(
    ours: Any, theirs: Any, what: str
) -> None:
    def rank(group: Group) -> str:
        for tree in (ours, theirs):  # both ranks know both already
            average(tree, group=group)
        with pytest.raises(MismatchError, match=what) as caught:
            average(theirs if group.rank else ours, group=group)
        assert average(1.0 * group.rank, group=group) == 0.5
        return str(caught.value)

    one, other = run_threads(2, rank)
    assert one == other


def test_other_mismatches() -> None:
    def rank(group: Group) -> None:
        x = np.ones(2)
        mine = group.rank == 0
        with pytest.raises(MismatchError, match="rank 0 has op=Sum, rank 1 has op=Average"):
            average(x, op=Sum if mine else Average, group=group)
        with pytest.raises(MismatchError, match="compression=fp16"):
            average(x, compression=Compression.fp16 if mine else Compression.none, group=group)
        with pytest.raises(MismatchError, match="weighted=True"):
            average(x, weight=2 if mine else None, group=group)
        with pytest.raises(MismatchError, match="average_gradients 'critic'"):
            average(x, name="actor" if mine else "critic", group=group)
        with pytest.raises(MismatchError, match=r"average_gradients 'actor'.*allreduce"):
            average(x, name="actor", group=group) if mine else ops.allreduce(x, group=group)
        with pytest.raises(ValueError, match="every rank passed weight 0"):
            average(x, weight=0, group=group)
        assert average(1.0 * group.rank, group=group) == 0.5

    run_threads(2, rank)


def test_what_cannot_be_averaged_is_named() -> None:
    def rank(group: Group) -> None:
        with pytest.raises(TypeError, match=r"the gradient of 'note': str gives no array"):
            average({"w": np.ones(2), "note": "hello"}, group=group)
        with pytest.raises(ValueError, match=r"'gradients\[1\]' .* can be sent, but not reduced"):
            average([np.ones(2), np.array(["text"])], group=group)
        with pytest.raises(ValueError, match="op=Average or op=Sum"):
            average([1.0], op=Max, group=group)
        with pytest.raises(ValueError, match="op=Average"):
            average([1.0], op=Sum, weight=3, group=group)
        assert average(2.0, group=group) == 2.0

    run_threads(1, rank)


@pytest.mark.parametrize("leaf", ["hello", [np.ones(1), "x"], 2**60 + 1], ids=repr)
def test_what_one_rank_cannot_average_is_an_error_on_all(leaf: Any) -> None:
    def rank(group: Group) -> None:
        with pytest.raises((TypeError, ValueError, MismatchError)) as raised:
            average({"w": np.ones(2), "note": leaf if group.rank == 1 else 1}, group=group)
        assert "the gradient of 'note" in str(raised.value)
        assert group.rank == 1 or "rank 1: " in str(raised.value)
        assert average(2.0 * group.rank, group=group) == 1.0

    run_threads(2, rank, timeout_s=5)


def test_a_tree_seen_before_costs_two_meetings_and_no_plan() -> None:
    def rank(group: Group) -> None:
        tree = {f"w{i}": np.full(100, 1.0 * group.rank) for i in range(20)}
        average(tree, group=group)
        (before,) = group.kept["average_gradients"].values()
        meetings = 0
        together = group._together

        def counted(*args: Any) -> Any:
            nonlocal meetings
            meetings += 1
            return together(*args)

        group._together = counted  # type: ignore[method-assign]
        copied = arrays_module.bytes_copied
        assert average(tree, group=group)["w7"][0] == 0.5
        assert meetings == 2
        assert arrays_module.bytes_copied == copied
        (after,) = group.kept["average_gradients"].values()
        assert after is before
        for i in range(30):  # and those of all others are not kept forever
            assert average([1.0 * group.rank] * i, group=group) == [0.5] * i
        assert len(group.kept["average_gradients"]) <= 8

    run_threads(2, rank)


def test_an_exchange_whose_gradients_change() -> None:
    def rank(group: Group) -> None:
        exchange = Transform(Options(group=group), copies=True)
        for names in ("a", "ab", "bc"):
            given = [np.array(ord(name) + 2.0 * group.rank) for name in names]
            assert exchange(names, given) == [ord(name) + 1.0 for name in names]

    run_threads(2, rank)


def test_dicts_in_any_order() -> None:
    sums = {3: [2.0] * 2, "3": [6.0] * 2, "a": [2.0] * 3, "b": [2.0] * 4}

    def rank(group: Group) -> None:
        keys = ["3", "b", "a", 3] if group.rank else [3, "a", "b", "3"]
        out = average({key: np.array(sums[key]) * group.rank for key in keys}, group=group)
        assert list(out) == keys
        assert {key: (2 * out[key]).tolist() for key in keys} == sums

    run_threads(2, rank)


def loss_and_gradients(params: Any, x: Any, y: Any) -> tuple[float, Any]:
    error = x @ params.weight + params.bias - y
    n = len(x)
    return float((error**2).sum() / n), Pair(2 * x.T @ error / n, 2 * error.sum(0) / n)


def test_functional_training_equals_one_process() -> None:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((4, 12, 3)), random.standard_normal((4, 12, 2))
    start = Pair(random.standard_normal((3, 2)), random.standard_normal(2))
    cuts = [0, 1, 8, 12]

    def trained(gradient: Any, mine: slice, options: dict[str, Any]) -> tuple[Pair, list[float]]:
        params, losses = start, []
        for xs, ys in zip(x, y, strict=True):
            loss, g = gradient(params, xs[mine], y=ys[mine], **options)
            params = Pair(params.weight - 0.1 * g.weight, params.bias - 0.1 * g.bias)
            losses.append(loss)
        return params, losses

    expected, losses = trained(loss_and_gradients, slice(None), {})

    def rank(group: Group) -> bytes:
        gradient = grad_and_average(loss_and_gradients, group=group)
        begin, end = cuts[group.rank : group.rank + 2]
        got, same_losses = trained(gradient, slice(begin, end), {"weight": end - begin})
        np.testing.assert_allclose(got.weight, expected.weight, rtol=1e-12)
        np.testing.assert_allclose(got.bias, expected.bias, rtol=1e-12)
        np.testing.assert_allclose(same_losses, losses, rtol=1e-12)
        return got.weight.tobytes() + got.bias.tobytes() + repr(same_losses).encode()

    assert len(set(run_threads(3, rank))) == 1


def test_the_wrapped_function_is_itself_in_all_else() -> None:
    def gradient(x: Any, weight: float = 2.0) -> Any:
        """Of something."""
        return weight * x

    def rank(group: Group) -> None:
        wrapped = grad_and_average(gradient, op=Sum, name="it", group=group)
        assert wrapped.__name__ == "gradient"
        assert wrapped.__doc__ == "Of something."
        assert wrapped(1.0 * group.rank) == 2
        assert wrapped(1.0 * group.rank, 5.0) == 5
        with pytest.raises(TypeError, match="has its own argument `weight`"):
            wrapped(1.0, weight=3)

    run_threads(2, rank)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
def test_torchs_functions() -> None:
    import torch

    def rank(group: Group) -> None:
        weights = {"w": torch.arange(6.0).reshape(2, 3).t().requires_grad_(), "b": torch.ones(2)}
        x = torch.full((1, 3), 1.0 + 2 * group.rank)

        def loss(weights: Any) -> Any:
            return (x @ weights["w"] + weights["b"]).sum()

        gradient = grad_and_average(torch.func.grad_and_value(loss), group=group)
        gradients, value = gradient(weights)
        assert type(gradients["w"]) is torch.Tensor
        assert gradients["w"].tolist() == [[2, 2]] * 3
        assert gradients["b"].tolist() == [1, 1]
        assert value.item() == pytest.approx(15 * 2 + 2)
        (only,) = average(torch.autograd.grad(loss(weights), [weights["w"]]), group=group)
        assert only.tolist() == [[2, 2]] * 3
        halves = {"w": torch.full((3,), 1.0 * group.rank, dtype=torch.bfloat16)}
        assert average(halves, group=group)["w"].tolist() == [0.5] * 3
        nothing = {"w": None if group.rank else torch.ones(3), "b": torch.ones(1)}
        assert type(average(nothing, group=group)["w"]) is torch.Tensor

    run_threads(2, rank)


@pytest.mark.served
@pytest.mark.mpi
def test_in_a_job() -> None:
    """The world's group is the default, and a world of one needs no launcher."""
    code = """
    import numpy as np
    import horo_lite as hvd

    hvd.init()
    mean = (hvd.size() - 1) / 2
    assert hvd.average_gradients({"w": np.full(3, hvd.rank())* 1.0})["w"].tolist() == [mean] * 3
    square = hvd.grad_and_average(lambda x: (x * x, 2 * x))
    assert square(1.0 * hvd.rank(), weight=hvd.rank() + 1)[1] == {1: 0.0, 3: 8 / 3}[hvd.size()]
    """
    script_on_ranks(code, 3)
    script_on_ranks(code, 1)
