"""Properties for all arrays, sizes, orders and layouts, tested by Hypothesis on threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
from checks import OP_OF, WIRES, digest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from launch import run_threads
from oracle import Array, rank_order_reference, same_bits, sample

import horo_lite as hvd
from horo_lite import Average, Compression, Group, Sum, _native, ops

# Every example starts threads: fewer examples than usual, without a time limit.
law = settings(max_examples=80)

wires = st.sampled_from(["none", "fp16", "bf16"])
sizes = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def blocks_of_any_size(draw: st.DrawFn) -> list[Array]:
    """Draw one array per rank; every part of it has its own order of magnitude."""
    n_ranks, n = draw(sizes), draw(st.sampled_from([1, 5, 1023, 1024, 1025, 2500]))
    random = np.random.default_rng(draw(seeds))
    exponents = draw(st.lists(st.integers(-37, 36), min_size=4 * n_ranks, max_size=4 * n_ranks))
    arrays = []
    for rank in range(n_ranks):
        x = random.standard_normal(n)
        for quarter in range(4):
            x[quarter * n // 4 : (quarter + 1) * n // 4] *= 10.0 ** exponents[4 * rank + quarter]
        special = draw(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), max_size=4))
        x[: min(n, len(special))] = special[:n]
        arrays.append(np.clip(x, -(2.0**120), 2.0**120).astype(np.float32))
    return arrays


@pytest.mark.shows("fp16")
@law
@given(blocks_of_any_size(), wires)
@example([np.full(9, 6e4, np.float32)] * 8, "fp16")
@example([np.full(9, 2e-7, np.float32)] * 64, "fp16")
@example([np.repeat(np.array([1e6, 1e-7], np.float32), 1024)] * 2, "fp16")
@example([np.full(3, 2.0**-149, np.float32)] * 3, "fp16")
def test_the_wire_keeps_its_bound(inputs: list[Array], wire: str) -> None:
    """The error bound of the wire.

    A block is up to 1,024 elements, counted from the tensor's own start, with a power-of-two scale
    from its largest finite magnitude m over all ranks. The error of an average over N ranks of one
    host is at most (1 + 2^-9) * 2^-11 * (mean |x_r| + |mean|) + 2^-37 * m for fp16,
    (1 + 2^-6) * 2^-8 * (mean |x_r| + |mean|) for bf16, and only that of float32's additions in
    rank order for none. All ranks have the same bits.
    """

    def reduce(group: Group) -> Array:
        out: Array = ops.allreduce(inputs[group.rank], compression=WIRES[wire], group=group)
        return out

    outs = run_threads(len(inputs), reduce)
    assert len({digest([out]) for out in outs}) == 1
    exact = oracle.allreduce_reference(inputs, "average")
    error = np.abs(outs[0] - exact)
    bound = oracle.wire_bound(inputs, wire)
    worst = int(np.argmax(error - bound))
    assert np.all(error <= bound), (worst, outs[0][worst], exact[worst], bound[worst])
    if wire == "none":
        assert same_bits(outs[0], rank_order_reference(inputs, "average"))


@law
@given(
    st.lists(st.lists(st.floats(width=32), min_size=6, max_size=6), min_size=1, max_size=4), wires
)
@example([[np.inf, 1.0, 0.0, 0.0, 0.0, 0.0], [2.0**37, 1.0, 0.0, 0.0, 0.0, 0.0]], "fp16")
@example([[np.inf, 1e-37, -np.inf, 0.0, 0.0, 0.0], [2.0, 1e30, np.inf, 0.0, 0.0, 0.0]], "fp16")
def test_what_is_not_finite_stays_alone(rows: list[list[float]], wire: str) -> None:
    """Exactly the elements that are inf or nan on some rank arrive as their sum: inf or nan."""
    inputs = [np.array(row, np.float32) for row in rows]
    with np.errstate(all="ignore"):
        inputs = [np.where(np.isfinite(x), np.clip(x, -1e30, 1e30), x) for x in inputs]
    bad = ~np.all(np.isfinite(inputs), axis=0)

    def reduce(group: Group) -> Array:
        out: Array = ops.allreduce(inputs[group.rank], compression=WIRES[wire], group=group)
        return out

    for out in run_threads(len(inputs), reduce):
        with np.errstate(invalid="ignore"):
            what = np.sum([np.where(np.isfinite(x), np.float32(0), x) for x in inputs], axis=0)
        np.testing.assert_array_equal(out[bad], what[bad])
        assert np.all(np.isfinite(out[~bad]))
        # The other ranks' values there are finite, and may have set the scale of the block.
        finite = [np.where(np.isfinite(x), x, np.float32(0)) for x in inputs]
        exact = oracle.allreduce_reference(finite, "average")
        error = np.abs(np.where(bad, exact, out) - exact)
        assert np.all(error <= oracle.wire_bound(finite, wire))


@law
@given(
    n_ranks=sizes,
    lengths=st.lists(
        st.sampled_from([0, 1, 7, 1023, 1024, 1025, 4000, 40_000]), min_size=1, max_size=8
    ),
    wire=wires,
    seed=seeds,
    data=st.data(),
)
def test_bits_do_not_depend_on_grouping_order_or_company(
    n_ranks: int, lengths: list[int], wire: str, seed: int, data: st.DataObject
) -> None:
    """Buckets of any size and order, with others in between, as bucket_bytes may change them."""
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(lengths)), max_size=4)) | {0, len(lengths)})
    strangers = data.draw(
        st.lists(st.sampled_from([1, 100, 30_000]), min_size=len(lengths), max_size=len(lengths))
    )

    def reduce(group: Group) -> tuple[str, str, str]:
        compression = WIRES[wire]
        mine = [sample(group.rank, (n,), np.float32, seed=seed + i) for i, n in enumerate(lengths)]
        alone = [ops.allreduce(x, compression=compression, group=group) for x in mine]
        grouped: dict[int, Array] = {}
        for start, end in itertools.pairwise(cuts):
            bucket = order[start:end]
            outs = ops.grouped_allreduce(
                [mine[i] for i in bucket], compression=compression, group=group
            )
            grouped.update(zip(bucket, outs, strict=True))
        among: list[Array] = []
        for x, n in zip(mine, strangers, strict=True):
            among += [sample(group.rank, (n,), np.int32), x]
        crowd = ops.grouped_allreduce(among, Sum, compression=compression, group=group)[1::2]
        crowd_alone = [ops.allreduce(x, Sum, compression=compression, group=group) for x in mine]
        assert digest(crowd) == digest(crowd_alone)
        return (
            digest(alone),
            digest([grouped[i] for i in range(len(mine))]),
            digest(ops.grouped_allreduce(mine, compression=compression, group=group)),
        )

    assert len({each for of_rank in run_threads(n_ranks, reduce) for each in of_rank}) == 1


def _permuted(x: Array, axes: Sequence[int]) -> Array:
    """Return the same numbers, dense in memory, with the axes in this order."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


@law
@given(
    n_ranks=sizes,
    shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9),
    in_place=st.booleans(),
    data=st.data(),
)
def test_layouts_change_nothing(
    n_ranks: int, shape: tuple[int, ...], in_place: bool, data: st.DataObject
) -> None:
    """Each rank has its own memory order: dense, with gaps or backwards."""
    axes = [data.draw(st.permutations(range(len(shape)))) for _ in range(n_ranks)]
    steps = [data.draw(st.sampled_from([1, 2, -1])) for _ in range(n_ranks)]
    inputs = [sample(rank, shape, np.float32) for rank in range(n_ranks)]

    def arranged(rank: int) -> Array:
        x = _permuted(inputs[rank], axes[rank]) if shape else inputs[rank].copy()
        if shape and steps[rank] == 2:
            wide = np.full((2 * shape[0], *shape[1:]), 99, np.float32)
            wide[::2] = x
            x = wide[::2]
        elif shape and steps[rank] == -1:
            x = np.flip(_permuted(np.flip(x, 0), axes[rank]), 0)
        assert np.array_equal(x, inputs[rank])
        return x

    def reduce(group: Group) -> Array:
        x = arranged(group.rank)
        out: Array = ops.allreduce_(x, group=group) if in_place else ops.allreduce(x, group=group)
        return out

    expected = rank_order_reference(inputs, "average")
    for out in run_threads(n_ranks, reduce):
        assert same_bits(np.array(out, order="C"), expected)


def test_an_axis_of_extent_one_takes_no_step_whatever_its_stride() -> None:
    strided = np.lib.stride_tricks.as_strided
    memory = np.zeros(4, np.float32)
    a, b = (strided(memory, (1, 2), (stride, 8)) for stride in (0, 4))
    assert _native.Tensors([a, b]).overlaps() == [(0, 1, 0, True)]
    a, b = (strided(memory, (1, 2), (0, stride)) for stride in (8, 4))
    assert _native.Tensors([a, b]).overlaps() == [(0, 1, 0, False)]


@settings(max_examples=300)
@given(data=st.data())
def test_overlaps_are_those_that_numpy_finds(data: st.DataObject) -> None:
    """Of views of one memory, with any steps, and of arrays with their own strides."""
    memory = np.zeros(60, np.uint8)

    def view() -> Array:
        kind = data.draw(st.sampled_from([np.uint8, np.int16, np.float32]))
        whole = memory.view(kind)
        n = len(whole)
        if data.draw(st.booleans()):
            begin, end = sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            return whole[begin:end][:: data.draw(st.sampled_from([1, 2, 3, -1, -2]))]
        shape = data.draw(st.tuples(st.integers(0, 3), st.integers(1, 3)))
        strides = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
        size = whole.itemsize
        return np.lib.stride_tricks.as_strided(
            whole[data.draw(st.integers(0, 2)) :], shape, [s * size for s in strides]
        )

    views = [view() for _ in range(data.draw(st.integers(1, 4)))]
    expected = []
    for i, a in enumerate(views):
        addresses = [
            a.__array_interface__["data"][0] + sum(np.multiply(a.strides, at))
            for at in np.ndindex(a.shape)
        ]
        if len(set(addresses)) < len(addresses):
            expected.append((i, i))
        expected += [(i, k) for k in range(i + 1, len(views)) if np.shares_memory(a, views[k])]
    found = _native.Tensors(views).overlaps()
    assert [(i, k) for i, k, *_ in found] == expected
    for i, k, distance, same in found:
        ends = [views[j].__array_interface__["data"][0] for j in (i, k)]
        assert distance == ends[1] - ends[0]
        looks = [(views[j].dtype, views[j].shape) for j in (i, k)]
        if views[i].size > 1:
            strides = [np.array(views[j].strides)[np.array(views[j].shape) > 1] for j in (i, k)]
            alike = distance == 0 and looks[0] == looks[1]
            assert same == (alike and np.array_equal(*strides))
    one, *others = views
    there = _native.Tensors([one]).overlaps(_native.Tensors(others))
    assert [k + 1 for _, k, *_ in there] == [k for i, k in expected if i == 0 and k != 0]


@law
@given(
    n_ranks=sizes,
    op=st.sampled_from(oracle.OPS),
    dtype=st.sampled_from([*oracle.INTEGERS, np.dtype(np.float32), np.dtype(np.float64)]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=50),
    seed=seeds,
)
def test_every_op_of_every_dtype(
    n_ranks: int, op: str, dtype: np.dtype[Any], shape: tuple[int, ...], seed: int
) -> None:
    if oracle.is_float(dtype):
        inputs = [sample(rank, shape, dtype, seed=seed) for rank in range(n_ranks)]
        expected = rank_order_reference(inputs, op)
    else:  # all bits, so that sums and products wrap around
        random = np.random.default_rng(seed)
        info = np.iinfo(dtype)
        inputs = [
            np.asarray(random.integers(info.min, info.max, shape, dtype, endpoint=True))
            for _ in range(n_ranks)
        ]
        expected = oracle.allreduce_reference(inputs, op)
    outs = run_threads(
        n_ranks, lambda group: ops.allreduce(inputs[group.rank], OP_OF[op], group=group)
    )
    for out in outs:
        assert same_bits(np.asarray(out), expected)


@law
@given(
    n_ranks=sizes,
    op=st.sampled_from(oracle.OPS),
    dtype=st.sampled_from([np.dtype(np.float16), oracle.bfloat16]),
    seed=seeds,
)
def test_halves_are_rounded_once(n_ranks: int, op: str, dtype: np.dtype[Any], seed: int) -> None:
    """For any bits: reduced in float32 in rank order, and only the result is rounded."""
    random = np.random.default_rng(seed)
    inputs = []
    for _ in range(n_ranks):
        x = random.integers(0, 1 << 16, 1500, np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):  # signalling nans
            inputs.append(np.where(np.isfinite(x), x, dtype.type(1)))
    expected = rank_order_reference(inputs, op)
    for out in run_threads(
        n_ranks, lambda group: ops.allreduce(inputs[group.rank], OP_OF[op], group=group)
    ):
        assert same_bits(out, expected)


@pytest.mark.parametrize("call", ["allreduce", "grouped_allreduce"])
@pytest.mark.parametrize("end", ["", "_", "_async", "_async_"])
def test_a_public_reduction_may_be_weighted(call: str, end: str) -> None:
    function = getattr(ops, call + end)

    def rank(group: Group) -> list[Any]:
        def reduced(x: Any, **options: Any) -> Any:
            result = function(x if call == "allreduce" else [x], group=group, **options)
            if "async" in end:
                result = ops.synchronize(result, group=group)
            return result if call == "allreduce" else result[0]

        x = np.full(3, [1.0, 5.0, np.nan][group.rank])
        with pytest.raises(ValueError, match="a weight needs op=Average"):
            reduced(x.copy(), op=Sum, weight=1)
        with pytest.raises(ValueError, match="weight must be a number of samples"):
            reduced(x.copy(), weight=-1)
        with pytest.raises(hvd.MismatchError, match="weighted"):
            reduced(x.copy(), weight=2 if group.rank else None, name="on some")
        of_all = reduced(x.copy(), weight=[3, 1, 0][group.rank])
        return [of_all.tolist(), reduced(np.full(1, group.rank)).tolist()]

    assert run_threads(3, rank) == [[[2.0] * 3, [1]]] * 3


@law
@given(
    weights=st.lists(st.just(0.0) | st.floats(2.0**-10, 2.0**20, width=32), min_size=1, max_size=5),
    factor=st.sampled_from([0.25, 2.0, 1024.0]),
    wire=wires,
    seed=seeds,
)
def test_weights(weights: list[float], factor: float, wire: str, seed: int) -> None:
    """sum(w x) / sum(w): only the ratios of the weights matter."""
    assume(sum(weights) > 0)
    n = len(weights)
    inputs = [sample(rank, (1500,), np.float32, seed=seed) for rank in range(n)]

    def reduce(group: Group) -> tuple[Array, Array]:
        plain, scaled = inputs[group.rank].copy(), inputs[group.rank].copy()
        for x, f in ((plain, 1.0), (scaled, factor)):
            group.exchange(
                [x],
                names=["x"],
                label=f"times {f}",
                compression=WIRES[wire],
                weight=weights[group.rank] * f,
            )
        return plain, scaled

    outs = run_threads(n, reduce)
    exact = oracle.allreduce_reference(inputs, "average", weights=weights)
    weighted = [w * x.astype(np.float64) for w, x in zip(weights, inputs, strict=True)]
    bound = oracle.wire_bound(weighted, wire) * n / sum(weights)
    rounding = 2.0**-22 * np.mean(np.abs(weighted), axis=0) * n / sum(weights) + 1e-30
    for plain, scaled in outs:
        assert np.all(np.abs(plain - exact) <= bound + rounding)
        assert same_bits(plain, scaled)
        assert same_bits(plain, outs[0][0])


@law
@given(
    weights=st.lists(
        st.sampled_from([0.0, 1e-30, 0.25, 1.0, 33.0, 1e5, 1e30, 1e308]), min_size=1, max_size=4
    ),
    dtype=st.sampled_from([np.dtype(np.float16), oracle.bfloat16, np.dtype(np.float32)]),
    asynchronous=st.booleans(),
    seed=seeds,
)
@example([33.0, 33.0], np.dtype(np.float16), False, 0)
@example([0.25, 0.25], np.dtype(np.float16), False, 1)
@example([1e308, 1e308, 1e308], oracle.bfloat16, True, 2)
def test_a_weighted_average_is_as_exact_as_any(
    weights: list[float], dtype: np.dtype[Any], asynchronous: bool, seed: int
) -> None:
    """For numbers of all sizes of the dtype: rounded once to it, and to float32 before."""
    assume(sum(weights) > 0)
    n = len(weights)
    random = np.random.default_rng(seed)
    kind = np.dtype(f"u{dtype.itemsize}")
    inputs = []
    for rank in range(n):
        x = random.integers(0, np.iinfo(kind).max, 1500, kind, endpoint=True).view(dtype)
        with np.errstate(invalid="ignore"):
            x = np.where(np.isfinite(x), x, dtype.type(1))
        if dtype == np.float32:  # unlike the other dtypes, a sum of two may overflow
            x = (x / 4).astype(np.float32)
        x[0], x[1], x[2] = 65504 - 32 * (rank == 1), 6e-8, 3
        inputs.append(x if weights[rank] else np.full_like(x, np.nan))

    def reduce(group: Group) -> Array:
        x = inputs[group.rank].copy()
        options: dict[str, Any] = {"names": ["x"], "label": "x", "weight": weights[group.rank]}
        if asynchronous:
            group.synchronize(group.exchange_async([x], **options))
        else:
            group.exchange([x], **options)
        return x

    outs = run_threads(n, reduce)
    shares = [w / max(weights) for w in weights]
    total = sum(shares)
    numbers = [
        x.astype(np.float64) if s else np.zeros(1500) for x, s in zip(inputs, shares, strict=True)
    ]
    exact = sum(s * x for s, x in zip(shares, numbers, strict=True)) / total
    magnitude = sum(s * np.abs(x) for s, x in zip(shares, numbers, strict=True)) / total
    digits, least = {"float16": (11, -24), "bfloat16": (8, -133), "float32": (24, -149)}[dtype.name]
    once = 2.0**-digits * np.abs(exact) + 2.0 ** (least - 1)
    # A nonzero weight counts at least as the smallest normal number of float32, so inf stays inf.
    weightless = 2.0**-125 * (1 + np.max(np.abs(numbers), axis=0))
    on_the_way = (n + 2) * 2.0**-24 * magnitude + n * weightless
    for out in outs:
        assert same_bits(out, outs[0])
        assert np.all(np.abs(out.astype(np.float64) - exact) <= once + 1.01 * on_the_way)
        assert dtype == np.float32 or same_bits(out[2:3], np.full(1, 3, dtype))


@law
@given(
    weights=st.lists(st.integers(0, 2**20), min_size=1, max_size=4),
    unit=st.sampled_from([1.0, 0.5, 2.0**-20]),
    dtype=st.sampled_from([np.dtype(code) for code in "bBiIlL"]),
    seed=seeds,
)
@example([1, 1], 0.5, np.dtype("i"), 0)
def test_weighted_averages_of_integers(
    weights: list[int], unit: float, dtype: np.dtype[Any], seed: int
) -> None:
    """The exact sum over the exact total, truncated toward zero."""
    assume(sum(weights) > 0)
    random = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    inputs = [random.integers(info.min, info.max, 200, dtype, endpoint=True) for _ in weights]

    def reduce(group: Group) -> Array:
        x = inputs[group.rank].copy()
        group.exchange([x], names=["x"], label="x", weight=weights[group.rank] * unit)
        return x

    columns = zip(*(x.tolist() for x in inputs), strict=True)
    sums = [sum(w * x for w, x in zip(weights, column, strict=True)) for column in columns]
    expected = [abs(s) // sum(weights) * (1 if s >= 0 else -1) for s in sums]
    for out in run_threads(len(weights), reduce):
        assert out.tolist() == expected


@law
@given(n_ranks=sizes, seed=seeds, data=st.data())
def test_async_operations_in_any_order(n_ranks: int, seed: int, data: st.DataObject) -> None:
    lengths = data.draw(
        st.lists(st.sampled_from([1, 1000, 30_000, 90_001]), min_size=1, max_size=9)
    )
    there = [data.draw(st.permutations(range(len(lengths)))) for _ in range(n_ranks)]
    back = [data.draw(st.permutations(range(len(lengths)))) for _ in range(n_ranks)]
    inputs = [
        [sample(rank, (n,), np.float32, seed=seed + i) for i, n in enumerate(lengths)]
        for rank in range(n_ranks)
    ]

    def reduce(group: Group) -> None:
        mine = inputs[group.rank]
        handles = {
            i: ops.allreduce_async(mine[i], name=f"t{i}", group=group) for i in there[group.rank]
        }
        for i in back[group.rank]:
            of_all = [inputs[rank][i] for rank in range(n_ranks)]
            out = group.synchronize(handles[i])
            assert same_bits(out, rank_order_reference(of_all, "average"))

    run_threads(n_ranks, reduce)


@law
@given(
    n_ranks=st.integers(2, 4),
    common=st.sets(st.sampled_from("abcdef"), max_size=4),
    data=st.data(),
)
def test_names_that_not_all_ranks_know(n_ranks: int, common: set[str], data: st.DataObject) -> None:
    """Names submitted by all complete; the others are mismatches; the group remains usable."""
    owners = data.draw(st.sets(st.integers(0, n_ranks - 1), min_size=1, max_size=n_ranks - 1))
    # Every rank must be blocked in the end: those that do not know the name wait for their own.
    own_name = {rank: "mine" if rank in owners else "others" for rank in range(n_ranks)}

    def reduce(group: Group) -> None:
        handles = {
            name: ops.allreduce_async(
                np.full(5, group.rank, np.float64), Sum, name=name, group=group
            )
            for name in sorted(common, key=lambda name: hash((name, group.rank)))
        }
        alone = ops.allreduce_async(np.ones(3), name=own_name[group.rank], group=group)
        with pytest.raises(hvd.MismatchError, match=own_name[group.rank]):
            group.synchronize(alone)
        for handle in handles.values():
            assert np.all(group.synchronize(handle) == sum(range(n_ranks)))
        assert np.all(ops.allreduce(np.ones(3), Sum, group=group) == n_ranks)
        again = ops.allreduce_async(np.ones(3), Sum, name="mine", group=group)
        assert np.all(group.synchronize(again) == n_ranks)

    run_threads(n_ranks, reduce)


@law
@given(
    n_ranks=sizes,
    row=hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=5),
    dtype=st.sampled_from([*oracle.INTEGERS, *oracle.FLOATS, np.dtype(bool)]),
    data=st.data(),
)
def test_rows_arrive_where_they_belong(
    n_ranks: int, row: tuple[int, ...], dtype: np.dtype[Any], data: st.DataObject
) -> None:
    counts = st.lists(st.integers(0, 40), min_size=n_ranks, max_size=n_ranks)
    splits = [data.draw(counts) for _ in range(n_ranks)]
    root = data.draw(st.integers(0, n_ranks - 1))
    uneven = [sample(rank, (sum(splits[rank]), *row), dtype) for rank in range(n_ranks)]
    alike = [sample(rank, (splits[0][0], *row), dtype, seed=1) for rank in range(n_ranks)]

    def move(group: Group) -> None:
        rank = group.rank
        assert same_bits(
            ops.allgather(uneven[rank], group=group), oracle.allgather_reference(uneven)
        )
        assert same_bits(ops.broadcast(alike[rank], root_rank=root, group=group), alike[root])
        got = ops.alltoall(uneven[rank], splits=splits[rank], group=group)
        got = got[0] if isinstance(got, tuple) else got
        assert same_bits(got, oracle.alltoall_reference(uneven, splits, rank))
        op = Sum if dtype.kind == "b" else Average
        rows = oracle.share_of(len(alike[0]), n_ranks, rank)
        whole = ops.allreduce(alike[rank], op, group=group)
        assert same_bits(
            ops.reducescatter(alike[rank], op, group=group), np.ascontiguousarray(whole[rows])
        )

    run_threads(n_ranks, move)


@law
@given(n_ranks=st.integers(1, 6), n=st.integers(1, 300_000), wire=wires, shift=st.integers(0, 9))
def test_large_and_small_right_behind_each_other(
    n_ranks: int, n: int, wire: str, shift: int
) -> None:
    """Data that one operation leaves in shared memory is never taken for the next one's."""

    def reduce(group: Group) -> None:
        for turn in range(4):
            value = (turn + shift) % 8
            arrays = [
                np.full(n if turn % 2 else 1 + n // 7, value + group.rank, np.float32),
                np.full(5, value, np.float32),
                np.full(n // 3, value - group.rank, np.float32),
            ]
            ops.grouped_allreduce_(arrays, Sum, compression=WIRES[wire], group=group)
            total = sum(range(n_ranks))
            for array, expected in zip(
                arrays,
                (n_ranks * value + total, n_ranks * value, n_ranks * value - total),
                strict=True,
            ):
                assert np.all(array == expected)

    run_threads(n_ranks, reduce)


def test_eight_ranks_of_sixty_thousand_and_sixty_four_of_two_tenths_of_a_millionth() -> None:
    def average(inputs: list[Array]) -> list[Array]:
        return run_threads(
            len(inputs),
            lambda group: ops.allreduce(
                inputs[group.rank], compression=Compression.fp16, group=group
            ),
            timeout_s=60,
        )

    # Around 6e4 in steps that are exact in half precision there.
    for out in average([np.full(2000, 6e4 + 64 * (r - 3.5), np.float32) for r in range(8)]):
        assert np.all(out == 6e4)
    tiny = [np.full(2000, 2e-7 * (r + 1) / 32.5, np.float32) for r in range(64)]
    for inputs in (tiny, [np.full(2000, 2e-7, np.float32)] * 64):
        exact = oracle.allreduce_reference(inputs, "average")
        np.testing.assert_allclose(exact, 2e-7, rtol=1e-6)
        for out in average(inputs):
            assert np.all(np.abs(out - exact) <= oracle.wire_bound(inputs, "fp16"))
