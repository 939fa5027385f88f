"""What holds for all arrays, sizes, orders and layouts, looked for by Hypothesis on threads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
from checks import OP_OF, WIRES, digest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from launch import run_threads
from oracle import Array, rank_order_reference, same_bits, sample

import horo_lite as hvd
from horo_lite import Average, Compression, Group, Sum

# Every example starts threads: fewer examples than usual, and no limit on their time.
law = settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))

wires = st.sampled_from(["none", "fp16", "bf16"])
sizes = st.integers(1, 5)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def blocks_of_any_size(draw: st.DrawFn) -> list[Array]:
    """One array for each rank; every stretch of it has an order of magnitude of its own."""
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
    """The contract of the wire.

    A block is 1,024 elements or fewer, counted from the tensor's own start, with a power-of-two
    scale from its largest finite magnitude m over all ranks. An average over N ranks of one host
    is off by at most (1 + 2^-9) * 2^-11 * (mean |x_r| + |mean|) + 2^-37 * m for fp16, by
    (1 + 2^-6) * 2^-8 * (mean |x_r| + |mean|) for bf16, and by nothing but float32's additions in
    rank order for none. All ranks have the same bits.
    """

    def reduce(group: Group) -> Array:
        out: Array = group.allreduce(inputs[group.rank], compression=WIRES[wire])
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
def test_what_is_not_finite_stays_alone(rows: list[list[float]], wire: str) -> None:
    """Exactly the elements that some rank has as inf or nan arrive as inf or nan."""
    inputs = [np.array(row, np.float32) for row in rows]
    with np.errstate(all="ignore"):
        inputs = [np.where(np.isfinite(x), np.clip(x, -1e30, 1e30), x) for x in inputs]
    bad = ~np.all(np.isfinite(inputs), axis=0)

    def reduce(group: Group) -> Array:
        out: Array = group.allreduce(inputs[group.rank], compression=WIRES[wire])
        return out

    for out in run_threads(len(inputs), reduce):
        np.testing.assert_array_equal(~np.isfinite(out), bad)
        # What other ranks hold there is finite, and may have set the scale of the block.
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
    """Buckets of any size, in any order, with strangers between: what bucket_bytes may change."""
    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(lengths)), max_size=4)) | {0, len(lengths)})
    strangers = data.draw(
        st.lists(st.sampled_from([1, 100, 30_000]), min_size=len(lengths), max_size=len(lengths))
    )

    def reduce(group: Group) -> tuple[str, str, str]:
        compression = WIRES[wire]
        mine = [sample(group.rank, (n,), np.float32, seed=seed + i) for i, n in enumerate(lengths)]
        alone = [group.allreduce(x, compression=compression) for x in mine]
        grouped: dict[int, Array] = {}
        for start, end in itertools.pairwise(cuts):
            bucket = order[start:end]
            outs = group.grouped_allreduce([mine[i] for i in bucket], compression=compression)
            grouped.update(zip(bucket, outs, strict=True))
        among: list[Array] = []
        for x, n in zip(mine, strangers, strict=True):
            among += [sample(group.rank, (n,), np.int32), x]
        crowd = group.grouped_allreduce(among, Sum, compression=compression)[1::2]
        crowd_alone = [group.allreduce(x, Sum, compression=compression) for x in mine]
        assert digest(crowd) == digest(crowd_alone)
        return (
            digest(alone),
            digest([grouped[i] for i in range(len(mine))]),
            digest(group.grouped_allreduce(mine, compression=compression)),
        )

    assert len({each for of_rank in run_threads(n_ranks, reduce) for each in of_rank}) == 1


def _permuted(x: Array, axes: Sequence[int]) -> Array:
    """The same numbers, dense in memory, with the axes in this order."""
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
    """Each rank has its own memory order, dense or with gaps or backwards."""
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
        out: Array = group.allreduce_(x) if in_place else group.allreduce(x)
        return out

    expected = rank_order_reference(inputs, "average")
    for out in run_threads(n_ranks, reduce):
        assert same_bits(np.array(out, order="C"), expected)


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
    else:  # all bits, so that sums and products wrap
        random = np.random.default_rng(seed)
        info = np.iinfo(dtype)
        inputs = [
            np.asarray(random.integers(info.min, info.max, shape, dtype, endpoint=True))
            for _ in range(n_ranks)
        ]
        expected = oracle.allreduce_reference(inputs, op)
    outs = run_threads(n_ranks, lambda group: group.allreduce(inputs[group.rank], OP_OF[op]))
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
    """Whatever bits they are: reduced in float32 in rank order, and only the result is rounded."""
    random = np.random.default_rng(seed)
    inputs = []
    for _ in range(n_ranks):
        x = random.integers(0, 1 << 16, 1500, np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):  # signalling nans
            inputs.append(np.where(np.isfinite(x), x, dtype.type(1)))
    expected = rank_order_reference(inputs, op)
    for out in run_threads(n_ranks, lambda group: group.allreduce(inputs[group.rank], OP_OF[op])):
        assert same_bits(out, expected)


@law
@given(
    weights=st.lists(st.just(0.0) | st.floats(2.0**-10, 2.0**20, width=32), min_size=1, max_size=5),
    factor=st.sampled_from([0.25, 2.0, 1024.0]),
    wire=wires,
    seed=seeds,
)
def test_weights(weights: list[float], factor: float, wire: str, seed: int) -> None:
    """sum(w x) / sum(w), and nothing but the ratios of the weights counts."""
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
        handles = {i: group.allreduce_async(mine[i], name=f"t{i}") for i in there[group.rank]}
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
    """What all have submitted comes through; the rest is a mismatch; then the group goes on."""
    owners = data.draw(st.sets(st.integers(0, n_ranks - 1), min_size=1, max_size=n_ranks - 1))
    # Every rank must be blocked in the end: those that do not know the name wait for their own.
    own_name = {rank: "mine" if rank in owners else "others" for rank in range(n_ranks)}

    def reduce(group: Group) -> None:
        handles = {
            name: group.allreduce_async(np.full(5, group.rank, np.float64), Sum, name=name)
            for name in sorted(common, key=lambda name: hash((name, group.rank)))
        }
        alone = group.allreduce_async(np.ones(3), name=own_name[group.rank])
        with pytest.raises(hvd.MismatchError, match=own_name[group.rank]):
            group.synchronize(alone)
        for handle in handles.values():
            assert np.all(group.synchronize(handle) == sum(range(n_ranks)))
        assert np.all(group.allreduce(np.ones(3), Sum) == n_ranks)
        again = group.allreduce_async(np.ones(3), Sum, name="mine")
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
        assert same_bits(group.allgather(uneven[rank]), oracle.allgather_reference(uneven))
        assert same_bits(group.broadcast(alike[rank], root_rank=root), alike[root])
        got = group.alltoall(uneven[rank], splits=splits[rank])
        got = got[0] if isinstance(got, tuple) else got
        assert same_bits(got, oracle.alltoall_reference(uneven, splits, rank))
        op = Sum if dtype.kind == "b" else Average
        rows = oracle.share_of(len(alike[0]), n_ranks, rank)
        whole = group.allreduce(alike[rank], op)
        assert same_bits(group.reducescatter(alike[rank], op), np.ascontiguousarray(whole[rows]))

    run_threads(n_ranks, move)


@law
@given(n_ranks=st.integers(1, 6), n=st.integers(1, 300_000), wire=wires, shift=st.integers(0, 9))
def test_large_and_small_right_behind_each_other(
    n_ranks: int, n: int, wire: str, shift: int
) -> None:
    """What one operation leaves in shared memory is never taken for the next one's."""

    def reduce(group: Group) -> None:
        for turn in range(4):
            value = (turn + shift) % 8
            arrays = [
                np.full(n if turn % 2 else 1 + n // 7, value + group.rank, np.float32),
                np.full(5, value, np.float32),
                np.full(n // 3, value - group.rank, np.float32),
            ]
            group.grouped_allreduce_(arrays, Sum, compression=WIRES[wire])
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
            lambda group: group.allreduce(inputs[group.rank], compression=Compression.fp16),
            timeout_s=60,
        )

    # Around 6e4 in steps that half precision holds there.
    for out in average([np.full(2000, 6e4 + 64 * (r - 3.5), np.float32) for r in range(8)]):
        assert np.all(out == 6e4)
    tiny = [np.full(2000, 2e-7 * (r + 1) / 32.5, np.float32) for r in range(64)]
    for inputs in (tiny, [np.full(2000, 2e-7, np.float32)] * 64):
        exact = oracle.allreduce_reference(inputs, "average")
        np.testing.assert_allclose(exact, 2e-7, rtol=1e-6)
        for out in average(inputs):
            assert np.all(np.abs(out - exact) <= oracle.wire_bound(inputs, "fp16"))
