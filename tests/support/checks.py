"""Properties that hold for any group of ranks over any transport.

Every `check_…(group)` is called by all ranks of the group. Each rank computes the inputs of all
ranks itself, computes the expected result with the oracle, and compares; no two ranks' inputs are
the same, so that neither the identity nor a rank that receives nothing can pass.
test_collectives.py runs these with ranks as threads and with real processes over every transport.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import arithmetic_table
import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from oracle import Array, bfloat16, rank_order_reference, same_bits, sample, whole_sample

import horo_lite as hvd
from horo_lite import Average, Compression, Max, Min, MismatchError, Product, Sum, ops
from horo_lite.collectives.calls import AllGatherInPlace, Part
from horo_lite.collectives.reductions import rows_of

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

OP_OF = {"average": Average, "sum": Sum, "min": Min, "max": Max, "product": Product}
WIRES = {"none": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}


def hosts_of(group: Group) -> list[int]:
    """Return the host of each rank, as assigned by HORO_LITE_TEST_HOSTS."""
    counts = os.environ.get("HORO_LITE_TEST_HOSTS")
    if not counts:
        return [0] * group.size
    hosts = [host for host, count in enumerate(counts.split(",")) for _ in range(int(count))]
    assert len(hosts) == group.size
    return hosts


def everyone(group: Group, make: Callable[[int], Array]) -> tuple[Array, list[Array]]:
    """Return this rank's input, and all ranks' inputs."""
    inputs = [make(rank) for rank in range(group.size)]
    return inputs[group.rank].copy(order="K"), inputs


def samples(
    group: Group, shape: Sequence[int], dtype: npt.DTypeLike, *, seed: int = 0
) -> tuple[Array, list[Array]]:
    """Return this rank's sample, and all ranks' samples."""
    return everyone(group, lambda rank: sample(rank, shape, dtype, seed=seed))


def assert_exact(group: Group, got: Any, inputs: Sequence[Array], op: str) -> None:
    """Assert that `got` is the result of the documented order of additions, bit for bit."""
    if oracle.is_float(inputs[0].dtype):
        expected = rank_order_reference(inputs, op, hosts=hosts_of(group))
    else:
        expected = oracle.allreduce_reference(inputs, op)
    got = np.asarray(got)
    what = f"{op} of {inputs[0].dtype}{list(inputs[0].shape)}"
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    wrong = np.argwhere(got != expected).tolist()
    assert same_bits(got, expected), (
        f"{what}: {len(wrong)} wrong elements, such as at {wrong[:2]}: "
        f"{[got[tuple(at)] for at in wrong[:2]]} is not {[expected[tuple(at)] for at in wrong[:2]]}"
    )


def assert_bound(group: Group, got: Array, inputs: Sequence[Array], wire: str) -> None:
    """Assert that the error of `got` is within the bound for the wire."""
    exact = oracle.allreduce_reference(inputs, "average")
    bound = oracle.wire_bound(inputs, wire, hosts=len(set(hosts_of(group))))
    error = np.abs(got.astype(np.float64) - exact)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert np.all(error <= bound), (
        f"{wire}: {got[worst]!r} at {worst}, exact {exact[worst]!r}, error {error[worst]:.3g}, "
        f"allowed {bound[worst]:.3g}"
    )


def digest(arrays: Sequence[Any]) -> str:
    """Return a hash of every bit, shape and dtype."""
    state = hashlib.sha256()
    for array in map(np.asarray, arrays):
        state.update(f"{array.dtype}{array.shape}".encode())
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()


def assert_alike(group: Group, arrays: Sequence[Any]) -> None:
    """Assert that all ranks hold the same bits."""
    digests = ops.allgather_object(digest(arrays), group=group)
    assert digests == digests[:1] * group.size


# --- numbers --------------------------------------------------------------------------------------


def check_every_dtype_and_op(group: Group) -> None:
    for dtype in (*oracle.INTEGERS, *oracle.FLOATS):
        for op in oracle.OPS:
            shape = (33, 65)
            x, inputs = samples(group, shape, dtype, seed=3)
            untouched = x.copy()
            out = ops.allreduce(x, OP_OF[op], group=group)
            assert isinstance(out, np.ndarray)
            assert same_bits(x, untouched)
            if dtype == bfloat16 and len(set(hosts_of(group))) > 1:
                # A host's sum is rounded before it is sent to the other hosts.
                if op == "average":
                    assert_bound(group, out, inputs, "bf16")
                continue
            assert_exact(group, out, inputs, op)
            assert_alike(group, [out])


def check_every_cell_of_the_table(group: Group) -> None:
    """Each dtype, op, wire, factor and weight is computed right, or refused on all ranks.

    All cells with three ranks that are threads, and on hosts with 2 and 1; a part with others, in
    processes of one host, and over gloo and MPICH, where the same code computes what arrives
    (test_gloo.py compares the bits).
    """
    elsewhere = "HORO_LITE_ADDRESS" in os.environ or os.environ.get("HORO_LITE_TEST_MPI") == "mpich"
    places = [[0, 0, 1]] if hvd.is_initialized() else [[0, 0, 0]]
    whole = hosts_of(group) in places and not elsewhere
    every = 1 if whole else 11
    assert arithmetic_table.check_cells(group, hosts_of(group), every) > 7000 // every


def check_default_is_the_average(group: Group) -> None:
    x, inputs = everyone(group, lambda rank: whole_sample(rank, (5,), np.float32))
    assert_exact(group, ops.allreduce(x, group=group), inputs, "average")


def check_bool(group: Group) -> None:
    x, inputs = samples(group, (100,), np.bool_, seed=5)
    for op in ("sum", "product", "min", "max"):
        assert_exact(group, ops.allreduce(x, OP_OF[op], group=group), inputs, op)
    with pytest.raises((TypeError, ValueError), match=r"(?i)average.*bool"):
        ops.allreduce(x, Average, group=group)
    assert_exact(group, ops.allreduce(x, Sum, group=group), inputs, "sum")


def check_integer_averages_are_exact(group: Group) -> None:
    """The average is the true sum, without wrap-around, truncated toward zero."""
    for dtype in oracle.INTEGERS:
        info = np.iinfo(dtype)
        ends = np.array([info.max, info.max, info.min, info.min, 0, 1], dtype)
        inputs = [ends - np.array([0, rank, 0, 0, 0, 0], dtype) for rank in range(group.size)]
        assert_exact(
            group, ops.allreduce(inputs[group.rank], Average, group=group), inputs, "average"
        )
        if info.min < 0:
            inputs = [np.array([-1 - rank, -7, 7, rank - 3], dtype) for rank in range(group.size)]
            assert_exact(
                group, ops.allreduce(inputs[group.rank], Average, group=group), inputs, "average"
            )


def check_float32_is_added_in_rank_order(group: Group) -> None:
    """Inputs differ so much in size that another order of additions gives other bits."""

    def make(rank: int) -> Array:
        random = np.random.default_rng([11, rank])
        return np.asarray(random.standard_normal(50_000) * 10.0 ** random.integers(-6, 7, 50_000))

    for dtype in (np.float32, np.float64):
        inputs = [make(rank).astype(dtype) for rank in range(group.size)]
        hosts = hosts_of(group)
        if group.size > 2 and dtype == np.float32:
            backwards = rank_order_reference(inputs[::-1], "sum")
            assert not same_bits(backwards, rank_order_reference(inputs, "sum", hosts=hosts))
        for op in ("sum", "average"):
            assert_exact(
                group, ops.allreduce(inputs[group.rank], OP_OF[op], group=group), inputs, op
            )


def check_scaling(group: Group) -> None:
    x, inputs = samples(group, (3000,), np.float32, seed=7)
    for op in ("sum", "average", "max"):
        for prescale, postscale in ((0.5, 1.0), (1.0, 4.0), (0.25, 8.0)):
            out = ops.allreduce(
                x, OP_OF[op], prescale_factor=prescale, postscale_factor=postscale, group=group
            )
            expected = rank_order_reference(
                inputs, op, prescale=prescale, postscale=postscale, hosts=hosts_of(group)
            )
            assert same_bits(out, expected), (op, prescale, postscale)
    # Factors that are not powers of two may be rounded at a different point.
    out = ops.allreduce(x, Sum, prescale_factor=1 / 3, postscale_factor=0.7, group=group)
    exact = oracle.allreduce_reference(inputs, "sum") * 0.7 / 3
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6 * group.size)


def check_scaling_goes_with_the_wire(group: Group) -> None:
    """Scaling by 1e6 or 1e-6 does not move numbers out of the range of half precision."""
    x, inputs = samples(group, (2000,), np.float32, seed=8)
    exact = oracle.allreduce_reference(inputs, "average")
    scaled = [1e6 * x.astype(np.float64) for x in inputs]
    for wire in ("fp16", "bf16"):
        bound = oracle.wire_bound(scaled, wire, hosts=len(set(hosts_of(group)))) * 1.01
        before = ops.allreduce(x, compression=WIRES[wire], prescale_factor=1e6, group=group)
        assert np.all(np.abs(before - 1e6 * exact) <= bound)
        after = ops.allreduce(x, compression=WIRES[wire], postscale_factor=1e6, group=group)
        assert np.all(np.abs(after - 1e6 * exact) <= bound)
        down = ops.allreduce(x, compression=WIRES[wire], postscale_factor=1e-6, group=group)
        assert np.all(np.abs(down - 1e-6 * exact) <= 1e-12 * bound)


# --- the wire -------------------------------------------------------------------------------------


def check_wire_bounds(group: Group) -> None:
    for wire in ("fp16", "bf16"):
        for size in (1, 7, 1023, 1024, 1025, 70_001):
            x, inputs = samples(group, (size,), np.float32, seed=size)
            out = ops.allreduce(x, compression=WIRES[wire], group=group)
            assert out.dtype == np.float32
            assert_bound(group, out, inputs, wire)
            assert_alike(group, [out])
    for dtype in (np.float64, np.float16, bfloat16):
        x, inputs = samples(group, (3001,), dtype, seed=2)
        out = ops.allreduce(x, compression=Compression.fp16, group=group)
        assert out.dtype == dtype
        # Rounded to its own dtype again if that is narrower than the wire.
        wire = "bf16" if dtype == bfloat16 else "fp16"
        assert_bound(group, out, inputs, wire)


def check_wire_is_narrower(group: Group) -> None:
    """The wire is really used: numbers with more bits than half precision come out rounded."""
    x, inputs = everyone(group, lambda rank: np.full(64, 1 + 2.0**-15 + rank, np.float32))
    plain = ops.allreduce(x, group=group)
    assert_exact(group, plain, inputs, "average")
    if group.size > 1:
        for wire in ("fp16", "bf16"):
            assert not np.array_equal(ops.allreduce(x, compression=WIRES[wire], group=group), plain)


def check_wire_is_exact_for_small_whole_numbers(group: Group) -> None:
    x, inputs = everyone(group, lambda rank: whole_sample(rank, (5000,), np.float32) * 4)
    for wire in ("fp16", "bf16"):
        out = ops.allreduce(x, Sum, compression=WIRES[wire], group=group)
        if group.size <= 4:  # sums below 256, which are exact in bfloat16
            assert same_bits(out, oracle.allreduce_reference(inputs, "sum").astype(np.float32))


def check_extremes_share_the_wire(group: Group) -> None:
    """1e6 and 1e-7 in different tensors and in different blocks of one; the limits of float32."""
    blocks = np.repeat(np.array([1e6, 1e-7, 3e4, 1e-20], np.float32), oracle.BLOCK)

    def make(rank: int) -> list[Array]:
        factor = np.float32(1 + rank / 8)
        ends = np.repeat(np.array([1e37, 1e-37], np.float32), oracle.BLOCK)
        return [
            np.full(300, 1e6, np.float32) * factor,
            np.full(300, 1e-7, np.float32) * factor,
            blocks * factor,
            ends * factor,
        ]

    inputs = [make(rank) for rank in range(group.size)]
    for wire in ("fp16", "bf16"):
        outs = ops.grouped_allreduce(make(group.rank), compression=WIRES[wire], group=group)
        for index, out in enumerate(outs):
            assert_bound(group, out, [tensors[index] for tensors in inputs], wire)


def check_sixty_thousand(group: Group) -> None:
    """Averages of 6e4s are 6e4, although their sum overflows half precision; also of 2e-7s."""
    # Multiples of 32, half precision's spacing at 6e4, with an average near 6e4.
    step = 64 * (group.rank - (group.size - 1) / 2)
    large = np.full(2048, 6e4 + step, np.float32)
    assert np.all(ops.allreduce(large, compression=Compression.fp16, group=group) == 6e4)
    assert np.all(ops.allreduce(large.astype(np.float16), group=group) == np.float16(6e4))
    tiny, inputs = everyone(group, lambda rank: np.full(2048, 2e-7 * (rank + 1), np.float32))
    assert_bound(
        group, ops.allreduce(tiny, compression=Compression.fp16, group=group), inputs, "fp16"
    )


def check_non_finite_arrive_alone(group: Group) -> None:
    last = group.size - 1

    def make(rank: int) -> Array:
        x = sample(rank, (4000,), np.float32, seed=9)
        if rank == last:
            x[[5, 2100]] = np.inf, -np.inf
        if rank == 0:
            x[1500] = np.nan
        return x

    x, inputs = everyone(group, make)
    bad = np.zeros(4000, bool)
    bad[[5, 1500, 2100]] = True
    finite = [np.where(np.isfinite(y), y, np.float32(0)) for y in inputs]
    exact = oracle.allreduce_reference(finite, "average")
    for wire in ("none", "fp16", "bf16"):
        out = ops.allreduce(x, compression=WIRES[wire], group=group)
        np.testing.assert_array_equal(~np.isfinite(out), bad)
        assert_bound(group, np.where(bad, exact, out), finite, wire)
    # A block without finite values, and a sum of two infinities.
    x, _ = everyone(group, lambda rank: np.full(1024, np.inf * (-1) ** rank, np.float32))
    for wire in ("none", "fp16", "bf16"):
        assert not np.any(np.isfinite(ops.allreduce(x, compression=WIRES[wire], group=group)))


# --- shapes and layouts ---------------------------------------------------------------------------


def check_in_place(group: Group) -> None:
    x, inputs = samples(group, (40, 50), np.float32)
    out = ops.allreduce_(x, Sum, group=group)
    assert out is x
    assert_exact(group, x, inputs, "sum")
    arrays = [sample(group.rank, (n,), np.float32, seed=n) for n in (3, 5000, 1)]
    outs = ops.grouped_allreduce_(arrays, Sum, group=group)
    for n, array, out in zip((3, 5000, 1), arrays, outs, strict=True):
        assert out is array
        of_all = [sample(rank, (n,), np.float32, seed=n) for rank in range(group.size)]
        assert_exact(group, array, of_all, "sum")


def check_empty_and_zero_dimensional(group: Group) -> None:
    empty = ops.allreduce(np.empty((0, 3), np.float32), group=group)
    assert empty.shape == (0, 3)
    assert empty.dtype == np.float32
    x, inputs = everyone(group, lambda rank: np.array(rank + 1, np.float32))
    out = ops.allreduce(x, Sum, group=group)
    assert np.asarray(out).shape == ()
    assert_exact(group, np.asarray(out), inputs, "sum")
    ops.allreduce_(x, Sum, group=group)
    assert_exact(group, x, inputs, "sum")
    assert ops.grouped_allreduce([], group=group) == []
    mixed = [np.empty(0, np.int8), np.full(3, group.rank + 1, np.int64), np.empty((2, 0))]
    outs = ops.grouped_allreduce(mixed, Sum, group=group)
    assert outs[1].tolist() == [sum(range(1, group.size + 1))] * 3
    assert [out.shape for out in outs] == [(0,), (3,), (2, 0)]
    assert ops.allgather(np.empty((0, 2), np.int16), group=group).shape == (0, 2)
    assert ops.broadcast(np.empty(0), root_rank=group.size - 1, group=group).shape == (0,)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C": lambda x: x.copy(order="C"),
    "Fortran": lambda x: x.copy(order="F"),
    "channels last": lambda x: np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "strided": lambda x: _spread(x)[::2, :, ::3],
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ..., ::-1])[::-1, ..., ::-1],
}


def _spread(x: Array) -> Array:
    a, b, c, d = x.shape
    wide = np.full((2 * a, b, 3 * c, d), 77, x.dtype)
    wide[::2, :, ::3] = x
    return wide


def check_layouts(group: Group) -> None:
    """The memory layout does not change results, whether it is the same on all ranks or not."""
    shape = (6, 5, 4, 30)
    names = list(LAYOUTS)
    inputs = [sample(rank, shape, np.float32, seed=4) for rank in range(group.size)]
    for wire in ("none", "fp16"):
        for first in range(len(names)):
            for step in (0, 1):  # the same layout on every rank, or a different one on each
                layout = LAYOUTS[names[(first + step * group.rank) % len(names)]]
                x = layout(inputs[group.rank])
                assert np.array_equal(x, inputs[group.rank])
                out = ops.allreduce(x, compression=WIRES[wire], group=group)
                assert np.array_equal(x, inputs[group.rank])
                assert ops.allreduce_(x, compression=WIRES[wire], group=group) is x
                for result in (out, x):
                    if wire == "none":
                        assert_exact(group, np.ascontiguousarray(result), inputs, "average")
                    else:
                        largest = [np.full(shape, np.abs(y).max()) for y in inputs]
                        exact = oracle.allreduce_reference(inputs, "average")
                        slack = oracle.wire_bound(inputs, wire, hosts=2)
                        slack = slack + 2.0**-36 * np.max(largest, axis=0)
                        assert np.all(np.abs(result - exact) <= slack)
                assert_alike(group, [out, x])


def check_strided_views_leave_their_gaps_alone(group: Group) -> None:
    wide = np.full((8, 9), -5.0, np.float32)
    view = wide[1::3, ::2]
    view[...] = group.rank + 1
    ops.allreduce_(view, Sum, group=group)
    total = sum(range(1, group.size + 1))
    assert np.all(view == total)
    untouched = np.ones((8, 9), bool)
    untouched[1::3, ::2] = False
    assert np.all(wide[untouched] == -5)


def check_odd_sizes_through_many_chunks(group: Group) -> None:
    """Several MiB in arrays of odd sizes and mixed dtypes, several times."""
    random = np.random.default_rng(21)
    sizes = [int(n) for n in random.integers(1, 90_000, 40)]
    kinds = [np.float32, np.float64, np.int16, np.float32, np.int32]

    def make(rank: int) -> list[Array]:
        return [
            np.arange(n, dtype=np.int64).astype(kinds[i % 5]) % 13 + rank
            for i, n in enumerate(sizes)
        ]

    total = [np.sum(many, axis=0) for many in zip(*map(make, range(group.size)), strict=True)]
    for wire in ("none", "fp16", "bf16", "none"):
        arrays = [x.astype(kinds[i % 5]) for i, x in enumerate(make(group.rank))]
        ops.grouped_allreduce_(arrays, Sum, compression=WIRES[wire], group=group)
        for index, (array, expected) in enumerate(zip(arrays, total, strict=True)):
            wrong = np.flatnonzero(array != expected)
            assert wrong.size == 0, (
                f"{wire}, array {index} of {sizes[index]} {array.dtype}: wrong at {wrong[:3]}…"
            )


def check_bits_do_not_depend_on_company(group: Group) -> None:
    """Alone, grouped, in another order, or with others in between: the same bits everywhere."""
    sizes = (1, 300, 1024, 1025, 5000, 70_000, 13)
    mine = [sample(group.rank, (n,), np.float32, seed=n) * 10.0 ** (n % 7) for n in sizes]
    mine = [x.astype(np.float32) for x in mine]
    others = [sample(group.rank, (n,), np.float64, seed=n) for n in (77, 4096, 33_333)]
    for wire in ("none", "fp16", "bf16"):
        compression = WIRES[wire]
        together = ops.grouped_allreduce(mine, compression=compression, group=group)
        alone = [ops.allreduce(x, compression=compression, group=group) for x in mine]
        backwards = ops.grouped_allreduce(mine[::-1], compression=compression, group=group)[::-1]
        mixed = [x for pair in zip(mine, [*others, *others, others[0]], strict=True) for x in pair]
        between = ops.grouped_allreduce(mixed, compression=compression, group=group)[::2]
        pairs = [
            out
            for start in range(0, len(mine), 2)
            for out in ops.grouped_allreduce(
                mine[start : start + 2], compression=compression, group=group
            )
        ]
        handles = [
            ops.allreduce_async(x, compression=compression, name=f"company {i}", group=group)
            for i, x in enumerate(mine)
        ]
        later = [group.synchronize(handle) for handle in handles]
        for other in (alone, backwards, between, pairs, later):
            assert digest(other) == digest(together)
        if wire == "none":
            of_all = [
                (sample(rank, (300,), np.float32, seed=300) * 10.0 ** (300 % 7)).astype(np.float32)
                for rank in range(group.size)
            ]
            assert_exact(group, together[1], of_all, "average")
        assert_alike(group, together)


def check_asynchronous_groups_take_names_and_weights(group: Group) -> None:
    """Like the synchronous ones."""
    rank, total = group.rank, sum(range(1, group.size + 1))
    expected = sum(r * (r + 1) for r in range(group.size)) / total
    for form in (
        partial(ops.grouped_allreduce_async, group=group),
        partial(ops.grouped_allreduce_async_, group=group),
    ):
        xs = [np.full(3, float(rank)), np.full(2, 2.0 * rank)]
        handle = form(xs, name="both", names=["a", "b"], weight=rank + 1.0)
        a, b = group.synchronize(handle)
        np.testing.assert_allclose(a, expected, rtol=1e-12)
        np.testing.assert_allclose(b, 2 * expected, rtol=1e-12)
    if group.size > 1:
        handle = ops.grouped_allreduce_async(
            [np.zeros(1)], name="c", names=[f"of {rank}"], group=group
        )
        with pytest.raises(MismatchError, match="of 1"):
            group.synchronize(handle)


# --- moving rows ----------------------------------------------------------------------------------


def check_allgather(group: Group) -> None:
    for dtype in (*oracle.INTEGERS, *oracle.FLOATS, np.dtype(bool)):
        inputs = [sample(rank, (rank * 3 % 5, 4), dtype) for rank in range(group.size)]
        out = ops.allgather(inputs[group.rank], group=group)
        assert same_bits(out, oracle.allgather_reference(inputs))
    x, inputs = everyone(group, lambda rank: sample(rank, (100_000 * (rank + 1), 2), np.float32))
    assert same_bits(ops.allgather(x, group=group), oracle.allgather_reference(inputs))
    x, inputs = everyone(group, lambda rank: np.asfortranarray(sample(rank, (9, 7), np.int32)))
    assert same_bits(ops.allgather(x, group=group), oracle.allgather_reference(inputs))
    assert same_bits(
        ops.allgather(x[::2, 1:], group=group), np.concatenate([y[::2, 1:] for y in inputs])
    )


def check_allgather_in_place(group: Group) -> None:
    """Arrays of any owner, none of some ranks, and larger than what is sent at once."""
    size = group.size
    for owners, lengths in [
        ([r % size for r in range(2 * size + 1)], [5, 0, 300_001]),
        ([size - 1, 0, size - 1], [1, 70_000, 3]),
        ([0], [7]),
    ]:
        shapes = [(lengths[i % len(lengths)],) for i in range(len(owners))]
        arrays, expected = [], []
        for i, (owner, shape) in enumerate(zip(owners, shapes, strict=True)):
            dtype = (np.float32, np.int8, np.float64)[i % 3]
            mine, inputs = samples(group, shape, dtype, seed=i)
            arrays.append(mine)
            expected.append(inputs[owner])
        names = [f"x{i}" for i in range(len(owners))]
        group.run(
            AllGatherInPlace("shares", owners, names), Part(group.memory(arrays), label="shares")
        )
        assert all(map(same_bits, arrays, expected))
    if size > 1:
        call = AllGatherInPlace("shares", [int(group.rank > 0)], ["w"])
        part = Part(group.memory([np.zeros(2, np.float32)]), label="shares")
        with pytest.raises(MismatchError, match=r"'w': float32\[2\] of rank 0.*of rank 1"):
            group.run(call, part)
        check_usable(group)


def check_broadcast(group: Group) -> None:
    for root in range(group.size):
        for dtype in (*oracle.INTEGERS, *oracle.FLOATS, np.dtype(bool)):
            x, inputs = samples(group, (33, 3), dtype, seed=6)
            kept = x.copy()
            out = ops.broadcast(x, root_rank=root, group=group)
            assert same_bits(out, oracle.broadcast_reference(inputs, root))
            assert same_bits(x, kept)
            assert ops.broadcast_(x, root_rank=root, group=group) is x
            assert same_bits(x, inputs[root])
            (new,) = ops.grouped_broadcast(
                [y := kept.copy()], root_rank=root, names=["y"], group=group
            )
            assert same_bits(new, inputs[root])
            assert same_bits(y, kept)
        x, inputs = samples(group, (700, 901), np.float64)
        view = np.asfortranarray(x) if group.rank % 2 else np.repeat(x, 2, axis=0)[::2]
        ops.broadcast_(view, root_rank=root, group=group)
        assert same_bits(np.ascontiguousarray(view), inputs[root])
    for root in (-1, group.size):
        with pytest.raises((ValueError, MismatchError), match=r"root"):
            ops.broadcast(np.zeros(3), root_rank=root, group=group)


OTHER_TYPES = (
    "c8", "c16", "G", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ">f4", ">i8", "M8[ms]", "S3",
    [("n", "i4"), ("x", "f8")],
)  # fmt: skip


def check_moving_elements_of_any_type(group: Group) -> None:
    n, r = group.size, group.rank
    for dtype in map(np.dtype, OTHER_TYPES):

        def of(rank: int, n_rows: int = 3, dtype: np.dtype[Any] = dtype) -> Array:
            n_bytes = 2 * n_rows * dtype.itemsize
            return (np.arange(n_bytes) % 50 + 10 * rank).astype(np.uint8).view(dtype).reshape(-1, 2)

        def same(x: Array, *parts: Array) -> bool:
            return x.dtype == parts[0].dtype and x.tobytes() == b"".join(y.tobytes() for y in parts)

        root = n - 1
        assert same(ops.broadcast(of(r), root, group=group), of(root))
        wide = np.zeros((3, 4), dtype)
        wide[:, ::2] = of(r)
        ops.broadcast_(wide[:, ::2], root, group=group)
        assert same(wide[:, ::2], of(root))
        assert wide[:, 1::2].tobytes() == bytes(6 * dtype.itemsize)
        assert same(ops.allgather(of(r, r), group=group), *[of(s, s) for s in range(n)])
        rows = ops.alltoall(of(r, n), group=group)
        assert same(rows, *[of(s, n)[r] for s in range(n)])
        handle = ops.broadcast_async(of(r), root, name="of any type", group=group)
        assert same(ops.synchronize(handle, group=group), of(root))
    if n > 1:
        other = np.zeros(2, ml_dtypes.float8_e5m2 if r else ml_dtypes.float8_e4m3fn)
        with pytest.raises(MismatchError, match=r"float8_e4m3fn\[2\].*float8_e5m2\[2\]"):
            ops.broadcast(other, group=group)
    check_usable(group)


def check_complex_numbers_are_reduced_as_pairs(group: Group) -> None:
    n, r = group.size, group.rank

    def of(rank: int, dtype: str, shape: Sequence[int] = (5, 1200)) -> Array:
        pairs = oracle.whole_sample(rank, (*shape, 2), np.float64)
        return (pairs[..., 0] - 1j * pairs[..., 1]).astype(dtype)

    for dtype in ("c8", "c16", "G"):
        inputs = [of(s, dtype) for s in range(n)]
        total = sum(inputs[1:], inputs[0])
        mean = total / n
        assert np.array_equal(ops.allreduce(inputs[r], Sum, group=group), total)
        assert np.allclose(ops.allreduce(inputs[r], group=group), mean, rtol=1e-6)
        fp16 = Compression.fp16
        assert np.array_equal(ops.allreduce(inputs[r], Sum, compression=fp16, group=group), total)
        halves = ops.allreduce(inputs[r], Sum, prescale_factor=0.5, group=group)
        assert np.array_equal(halves, total / 2)
        strided = inputs[r].T[::2]
        ops.allreduce_(strided, Sum, group=group)
        assert np.array_equal(strided, total.T[::2])
        inputs[r] = of(r, dtype)
        weighted = ops.allreduce(inputs[r], weight=float(r == 0), group=group)
        assert np.array_equal(weighted, of(0, dtype))
        handle = ops.allreduce_async(inputs[r], Sum, name="complex", group=group)
        assert np.array_equal(ops.synchronize(handle, group=group), total)
        rows = ops.reducescatter(inputs[r], Sum, group=group)
        begin, end = rows_of(5, n, r)
        assert np.array_equal(rows, total[begin:end])
        mixed = ops.grouped_allreduce([inputs[r], np.full(3, r)], Sum, group=group)
        assert np.array_equal(mixed[0], total)
        assert mixed[1].tolist() == [n * (n - 1) // 2] * 3


def check_numbers_stay_what_they_are(group: Group) -> None:
    """Moving a Python number keeps its type and every digit."""
    root = group.size - 1
    for number in (True, 2**53 + 1, -(2**63), 0.1, math.inf):
        mine = number if group.rank == root else type(number)(group.rank)
        handle = ops.broadcast_async(mine, root, name="number", group=group)
        others = ops.grouped_broadcast([mine, mine], root, group=group)
        for got in (ops.broadcast(mine, root, group=group), group.synchronize(handle), *others):
            assert (type(got), got) == (type(number), number)
        all_of_them = ops.allgather(mine, group=group)
        assert all_of_them.dtype == np.array(number).dtype
        assert all_of_them.tolist() == [
            number if r == root else type(number)(r) for r in range(group.size)
        ]
    for call in (
        partial(ops.broadcast, group=group),
        partial(ops.broadcast_async, group=group),
        partial(ops.allgather, group=group),
    ):
        with pytest.raises(ValueError, match="broadcast_object"):
            call(2**63)
    if group.size > 1:
        with pytest.raises(MismatchError, match="int64"):
            ops.broadcast(1 if group.rank else 1.5, group=group)
    # When reduced, numbers are float64, and so are lists that no integer dtype can hold.
    assert ops.allreduce(2**70 + group.rank * 2**60, Max, group=group) == 2**70 + root * 2**60
    assert ops.allreduce([2**53 + 1 + group.rank], Max, group=group).tolist() == [2**53 + 1 + root]
    for inexact in (2**53 + 1, -(2**62) - 1, [2**63 - 1, 2**63], [2**53 + 1, 0.5]):
        for reduce in (ops.allreduce, ops.allreduce_async):
            with pytest.raises(ValueError, match="not exact as a float64"):
                reduce(inexact, Max, group=group)


def check_reducescatter(group: Group) -> None:
    """The result is this rank's rows of what allreduce returns, bit for bit."""
    for rows in (group.size, 4 * group.size + 1, 1, 60_000):
        for wire in ("none", "fp16"):
            x, inputs = samples(group, (rows, 3), np.float32, seed=rows)
            whole = ops.allreduce(x, Average, compression=WIRES[wire], group=group)
            share = ops.reducescatter(x, Average, compression=WIRES[wire], group=group)
            rows_kept = oracle.share_of(rows, group.size, group.rank)
            assert same_bits(np.asarray(share), np.ascontiguousarray(whole[rows_kept]))
            if wire == "none":
                assert_exact(group, share, [y[rows_kept] for y in inputs], "average")
    x, inputs = samples(group, (11,), np.int64)
    share = ops.reducescatter(x, Sum, group=group)
    kept = oracle.share_of(11, group.size, group.rank)
    assert same_bits(share, oracle.allreduce_reference([y[kept] for y in inputs], "sum"))


def check_alltoall(group: Group) -> None:
    size = group.size

    def splits(rank: int) -> list[int]:
        return [(rank + 2 * to) % 4 for to in range(size)]

    x, inputs = everyone(group, lambda rank: sample(rank, (sum(splits(rank)), 3), np.float32))
    expected = oracle.alltoall_reference(inputs, [splits(r) for r in range(size)], group.rank)
    received = _rows_of(ops.alltoall(x, splits=splits(group.rank), group=group))
    assert same_bits(received, expected)
    received = _rows_of(ops.alltoall(x, splits=np.array(splits(group.rank), np.int32), group=group))
    assert same_bits(received, expected)

    x, inputs = samples(group, (50_000 * size,), np.float64, seed=1)
    even = [[50_000] * size] * size
    expected = oracle.alltoall_reference(inputs, even, group.rank)
    assert same_bits(_rows_of(ops.alltoall(x, group=group)), expected)
    with pytest.raises(ValueError, match="splits"):
        ops.alltoall(x, splits=[1] * size, group=group)
    with pytest.raises(ValueError, match="splits"):
        ops.alltoall(x, splits=[50_000] * (size + 1), group=group)
    if size > 1:
        with pytest.raises(ValueError, match=r"."):
            ops.alltoall(x[1:], group=group)
    assert same_bits(_rows_of(ops.alltoall(x, group=group)), expected)


def _rows_of(received: Any) -> Array:
    return np.asarray(received[0] if isinstance(received, tuple) else received)


def check_objects(group: Group) -> None:
    for root in range(group.size):
        mine = {"rank": group.rank, "text": "x" * (10 + 400_000 * group.rank)}
        got = ops.broadcast_object(mine, root_rank=root, group=group)
        assert got == {"rank": root, "text": "x" * (10 + 400_000 * root)}
    gathered = ops.allgather_object([group.rank] * (group.rank + 1), group=group)
    assert gathered == [[rank] * (rank + 1) for rank in range(group.size)]
    assert ops.allgather_object(None, group=group) == [None] * group.size


def check_barrier_waits_for_the_last(group: Group) -> None:
    ops.barrier(group=group)
    if group.rank == group.size - 1:
        time.sleep(0.1)
    came = time.monotonic()  # one clock for all processes on the machine
    ops.barrier(group=group)
    left = time.monotonic()
    moments = ops.allgather_object((came, left), group=group)
    assert max(came for came, _ in moments) <= min(left for _, left in moments)


# --- asynchronous ---------------------------------------------------------------------------------


def check_async_in_any_order(group: Group) -> None:
    """Each rank submits, and synchronizes, in its own order."""
    n = 24
    random = np.random.default_rng([31, group.rank])
    inputs = [
        [sample(rank, (100 * i + 1,), np.float32, seed=i) for i in range(n)]
        for rank in range(group.size)
    ]
    for _ in range(3):
        handles = {}
        for i in random.permutation(n):
            handles[i] = ops.allreduce_async(inputs[group.rank][i], Sum, name=f"t{i}", group=group)
        for i in random.permutation(n):
            out = group.synchronize(handles[i])
            assert_exact(group, out, [inputs[rank][i] for rank in range(group.size)], "sum")


def check_many_async_in_a_row(group: Group) -> None:
    """Consecutive operations of very different size do not disturb each other."""
    sizes = (1, 90_001, 17, 250_003, 4096, 3, 60_000)
    for turn in range(4):
        names = [f"{turn}.{i}" for i in range(len(sizes))]
        arrays = [np.full(n, (group.rank + 1) * (i + 1), np.float32) for i, n in enumerate(sizes)]
        handles = [
            ops.allreduce_async_(array, Sum, name=name, group=group)
            for array, name in zip(arrays, names, strict=True)
        ]
        total = sum(range(1, group.size + 1))
        direct = ops.allreduce(np.full(5, group.rank + 1.0), Sum, group=group)
        assert direct.tolist() == [total] * 5
        for handle in handles:
            group.synchronize(handle)
        for i, array in enumerate(arrays):
            assert np.all(array == (i + 1) * total), names[i]


def check_async_of_every_kind(group: Group) -> None:
    size, rank = group.size, group.rank
    rows = np.full((rank + 1, 2), rank, np.int32)
    two = [np.full(3, rank, np.float32), np.full(9000, rank + 1, np.float64)]
    mine = np.full(4, float(rank))
    handles = [
        ops.allgather_async(rows, name="gather", group=group),
        ops.broadcast_async(mine.copy(), root_rank=size - 1, name="broadcast", group=group),
        ops.grouped_allreduce_async(two, Sum, name="two", group=group),
        ops.reducescatter_async(
            np.full(2 * size, rank, np.int64), Sum, name="scatter", group=group
        ),
        ops.alltoall_async(np.full(size, rank, np.int64), name="all to all", group=group),
        ops.allreduce_async(mine, Max, name="max", group=group),
    ]
    gathered, sent, both, share, swapped, top = (group.synchronize(handle) for handle in handles)
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert np.all(sent == size - 1)
    assert np.all(both[0] == sum(range(size)))
    assert np.all(both[1] == sum(range(1, size + 1)))
    assert share.tolist() == [sum(range(size))] * 2
    assert _rows_of(swapped).tolist() == list(range(size))
    assert np.all(top == size - 1)


def check_async_and_sync_together(group: Group) -> None:
    """Synchronous calls continue while asynchronous ones wait for a slow rank."""
    slow = group.size - 1
    if group.rank != slow:
        handle = ops.allreduce_async(np.full(10, group.rank + 1.0), Sum, name="early", group=group)
        assert not group.poll(handle)
    assert ops.allgather_object(group.rank, group=group) == list(range(group.size))
    if group.rank == slow:
        handle = ops.allreduce_async(np.full(10, group.rank + 1.0), Sum, name="early", group=group)
    until = time.monotonic() + 10
    while not group.poll(handle) and time.monotonic() < until:
        time.sleep(0.001)
    assert group.poll(handle)
    assert np.all(group.synchronize(handle) == sum(range(1, group.size + 1)))


def check_random_orders(group: Group) -> None:
    """Direct calls, submissions, polls, waits and pauses in a different order on every rank.

    All make the same direct calls in the same order. From a common order of events, each rank
    submits earlier, and waits later, by random amounts: so only the library could cause a deadlock.
    """
    common, own = random.Random(5), random.Random(100 + group.rank)
    events = []
    for i in range(40):
        if common.random() < 0.4:
            events.append((i, "direct", i))
        else:
            later = i + 0.5 + common.randrange(6)
            events.append((i - 0.1 - own.randrange(6), "submit", i))
            events.append((later + own.randrange(6), "wait", i))
    sizes = [common.choice([1, 1000, 150_000, 400_000]) for _ in range(40)]
    handles: dict[int, Any] = {}
    for _, what, i in sorted(events):
        x = np.full(sizes[i], group.rank + i + 1, np.float32)
        if own.random() < 0.2:
            time.sleep(own.random() * 0.01)
        if handles and own.random() < 0.3:
            group.poll(own.choice(list(handles.values())))
        if what == "submit":
            handles[i] = ops.allreduce_async(x, Sum, name=str(i), group=group)
            continue
        if what == "direct":
            got = ops.allreduce(x, Sum, group=group)
        else:
            while own.random() < 0.5 and not group.poll(handles[i]):
                pass
            got = group.synchronize(handles.pop(i))
        assert np.all(got == sum(range(group.size)) + (i + 1) * group.size), (i, what)


def check_a_name_in_flight_is_taken(group: Group) -> None:
    if group.rank != 0:
        ops.barrier(group=group)
    mine, total = np.full(3, group.rank + 1.0), sum(range(1, group.size + 1))
    handle = ops.allreduce_async(mine, Sum, name="taken", group=group)
    if group.rank == 0:
        if group.size > 1:
            with pytest.raises(ValueError, match="taken"):
                ops.allreduce_async(mine, Sum, name="taken", group=group)
        ops.barrier(group=group)
    assert np.all(group.synchronize(handle) == total)
    again = ops.allreduce_async(mine, Sum, name="taken", group=group)
    assert np.all(group.synchronize(again) == total)


def check_names_known_to_some_ranks_only(group: Group) -> None:
    """Every rank gets an error once all wait, naming what is missing where; the group recovers."""
    if group.size == 1:
        return
    last = group.size - 1
    name = "only here" if group.rank == last else "only there"
    handle = ops.allreduce_async(np.ones(2), name=name, group=group)
    with pytest.raises(MismatchError, match=name) as caught:
        group.synchronize(handle)
    assert str(last) in str(caught.value)
    check_usable(group)


def check_one_threads_wait_does_not_hide_anothers(group: Group) -> None:
    """A mismatch is found although another thread waits too, and is done first."""
    if group.size == 1:
        return
    group.synchronize(done := ops.allreduce_async(np.ones(2), group=group))
    name = "only here, too" if group.rank == 0 else "only there, too"
    handle = ops.allreduce_async(np.ones(2), name=name, group=group)

    def wait() -> None:
        for _ in range(20):
            time.sleep(0.002)
            group.synchronize(done, beside=True)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    with pytest.raises(MismatchError, match=name):
        group.synchronize(handle)
    thread.join()
    check_usable(group)


def check_waiting_beside_the_training_thread(group: Group) -> None:
    """Waiting in a thread while the training thread does other things is not a mismatch."""
    if group.size == 1:
        return
    last = group.rank == group.size - 1
    results: list[Any] = []

    def work(beside: bool) -> None:
        if last:
            time.sleep(0.4)  # much longer than it takes to find a mismatch
        handle = ops.allreduce_async(np.ones(2), Sum, name="beside", group=group)
        results.append(group.synchronize(handle, beside=beside))

    for beside in (True, False):
        thread = threading.Thread(target=work, args=(beside,), daemon=True)
        thread.start()
        if not last:
            thread.join()
        ops.barrier(group=group)  # the last rank waits in this meanwhile
        thread.join()
        assert np.all(results.pop() == group.size)
    # Now all wait, with different names: this is a mismatch.
    handle = ops.allreduce_async(np.ones(2), name="aside" if last else "aside, too", group=group)
    with pytest.raises(MismatchError, match="aside"):
        group.synchronize(handle, beside=True)
    check_usable(group)


def check_memory_in_flight(group: Group) -> None:
    """Memory that an asynchronous operation changes is refused to others until it is done."""
    if group.size == 1:
        return
    x = np.full(40, group.rank + 1.0, np.float32)
    total = sum(range(1, group.size + 1))
    if group.rank != 0:
        ops.barrier(group=group)
    first = ops.allreduce_async_(x[:30], Sum, name="first", group=group)
    if group.rank == 0:
        for part in (x, x[:1], x[29:31], x[5:10]):
            for submit in (
                partial(ops.allreduce_async_, group=group),
                partial(ops.broadcast_async_, group=group),
            ):
                with pytest.raises(ValueError, match=r"'second'.*'first'"):
                    submit(part, name="second")
        ops.barrier(group=group)
    beside = ops.allreduce_async_(x[30:], Sum, name="beside", group=group)
    copied = ops.allreduce_async(x[:0], Sum, name="empty", group=group)
    for handle in (first, beside, copied):
        group.synchronize(handle)
    assert np.all(x == total)
    group.synchronize(ops.allreduce_async_(x, Sum, name="second", group=group))
    assert np.all(x == total * group.size)


def check_errors_can_be_asked_for_again(group: Group) -> None:
    """A handle raises its own error, as often as asked, in any thread; the engine continues.

    Each error starts with a fresh traceback: earlier raises have left no frames in it.
    """
    if group.size == 1:
        return
    wrong = {
        "one more column": lambda: ops.allgather_async(
            np.ones((2, 2 + (group.rank == 0))), name="one more column", group=group
        ),
        "one more element": lambda: ops.allreduce_async(
            np.ones(2 + (group.rank == 0)), name="one more element", group=group
        ),
        "average of bool": lambda: ops.allreduce_async(
            np.ones(3, bool), name="average of bool", group=group
        ),
    }
    handles = {name: make() for name, make in wrong.items()}
    beside = ops.allreduce_async(np.full(3, group.rank + 1.0), Sum, name="right", group=group)
    seen: dict[str, list[BaseException]] = {name: [] for name in wrong}

    def ask() -> None:
        for _ in range(20):
            for name, handle in handles.items():
                try:
                    group.synchronize(handle)
                except (MismatchError, ValueError) as error:
                    seen[name].append(error)
                    depth = len(traceback.extract_tb(error.__traceback__))
                    assert depth < 20, f"{name}: {depth} frames, including those of earlier threads"

    ask()
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, errors in seen.items():
        assert len(errors) == 20 * (1 + len(threads))
        assert len({(type(error), str(error)) for error in errors}) == 1
        assert type(errors[0]) is (ValueError if name == "average of bool" else MismatchError)
        assert name in str(errors[0])
    assert np.all(group.synchronize(beside) == sum(range(1, group.size + 1)))
    with pytest.raises(TypeError, match="'0'"):
        ops.broadcast_async(np.ones(3), "0", group=group)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"root_rank is {group.size}"):
        ops.broadcast_async(np.ones(3), group.size, group=group)
    check_usable(group)


# --- mismatches -----------------------------------------------------------------------------------


def check_usable(group: Group) -> None:
    x, inputs = everyone(group, lambda rank: whole_sample(rank, (2000,), np.float32))
    assert_exact(group, ops.allreduce(x, Sum, group=group), inputs, "sum")
    handle = ops.allreduce_async(x, Sum, name="usable", group=group)
    assert_exact(group, group.synchronize(handle), inputs, "sum")


Call = Callable[["Group", bool], Any]
# `odd` is true on one rank only. The words must be in the message, along with that rank.
MISMATCHES: dict[str, tuple[Call, Sequence[str]]] = {
    "kind": (
        lambda g, odd: (
            ops.allgather(np.ones(3), group=g) if odd else ops.allreduce(np.ones(3), group=g)
        ),
        ["allgather", "allreduce"],
    ),
    "kind, barrier": (
        lambda g, odd: (
            ops.barrier(group=g) if odd else ops.broadcast(np.ones(3), root_rank=0, group=g)
        ),
        ["barrier", "broadcast"],
    ),
    "shape": (
        lambda g, odd: ops.allreduce(np.ones((4, 5 + odd)), name="weights", group=g),
        ["weights", "5", "6"],
    ),
    "rank of the shape": (
        lambda g, odd: ops.allreduce(np.ones((6,) if odd else (2, 3)), name="weights", group=g),
        ["weights"],
    ),
    "dtype": (
        lambda g, odd: ops.allreduce(
            np.ones(4, np.int32 if odd else np.float32), name="weights", group=g
        ),
        ["weights", "int32", "float32"],
    ),
    "op": (
        lambda g, odd: ops.allreduce(np.ones(4), Max if odd else Sum, name="weights", group=g),
        ["max", "sum"],
    ),
    "compression": (
        lambda g, odd: ops.allreduce(
            np.ones(4, np.float32),
            compression=WIRES["fp16" if odd else "bf16"],
            name="weights",
            group=g,
        ),
        ["fp16", "bf16"],
    ),
    "name": (
        lambda g, odd: ops.allreduce(np.ones(4), name="bias" if odd else "weights", group=g),
        ["bias", "weights"],
    ),
    "count": (
        lambda g, odd: ops.grouped_allreduce([np.ones(4)] * (3 if odd else 2), group=g),
        ["tensor 2", "nothing more"],
    ),
    "one of many": (
        lambda g, odd: ops.grouped_allreduce(
            [np.ones(4 + (odd and i == 7)) for i in range(10)], group=g
        ),
        ["7", "4", "5"],
    ),
    "root": (
        lambda g, odd: ops.broadcast(np.ones(4), root_rank=int(odd), name="weights", group=g),
        ["root", "0", "1"],
    ),
    "root of an object": (
        lambda g, odd: ops.broadcast_object("x", root_rank=int(odd), group=g),
        ["root"],
    ),
    "rows to gather": (
        lambda g, odd: ops.allgather(np.ones((2 + odd, 3 + odd)), name="rows", group=g),
        ["rows", "3", "4"],
    ),
    "dtype to gather": (
        lambda g, odd: ops.allgather(
            np.ones(2, np.int8 if odd else np.int16), name="rows", group=g
        ),
        ["rows", "int8", "int16"],
    ),
    "shape to broadcast": (
        lambda g, odd: ops.broadcast_(np.ones((2, 3 + odd)), root_rank=0, name="rows", group=g),
        ["rows", "3", "4"],
    ),
    "rows to scatter": (
        lambda g, odd: ops.reducescatter(np.ones((8, 1 + odd)), name="rows", group=g),
        ["rows", "1", "2"],
    ),
    "rows to swap": (
        lambda g, odd: ops.alltoall(np.ones((g.size, 1 + odd)), name="rows", group=g),
        ["rows", "1", "2"],
    ),
    "scaling": (
        lambda g, odd: ops.allreduce(np.ones(4), postscale_factor=2.0 if odd else 1.0, group=g),
        [],
    ),
    "asynchronous shape": (
        lambda g, odd: g.synchronize(ops.allreduce_async(np.ones(4 + odd), name="later", group=g)),
        ["later", "4", "5"],
    ),
    "asynchronous dtype": (
        lambda g, odd: g.synchronize(
            ops.allreduce_async(np.ones(4, np.int32 if odd else np.float32), name="later", group=g)
        ),
        ["later", "int32", "float32"],
    ),
    "asynchronous kind": (
        lambda g, odd: g.synchronize(
            (ops.allgather_async if odd else ops.allreduce_async)(np.ones(4), name="later", group=g)
        ),
        ["later"],
    ),
    "asynchronous compression": (
        lambda g, odd: g.synchronize(
            ops.allreduce_async(
                np.ones(4, np.float32),
                compression=WIRES["none" if odd else "fp16"],
                name="later",
                group=g,
            )
        ),
        ["later", "none", "fp16"],
    ),
    "plan": (
        lambda g, odd: g.exchange(
            [np.ones(4), np.ones(5)], names=["w", "b" if odd else "c"], label="step 3"
        ),
        ["b", "c", "step 3"],
    ),
    "plan's shapes": (
        lambda g, odd: g.exchange([np.ones(4), np.ones(5 + odd)], names=["w", "b"], label="step 3"),
        ["b", "5", "6"],
    ),
    "plan's count": (
        lambda g, odd: g.exchange(
            [np.ones(4) for _ in range(2 + odd)],
            names=["w", "b", "c"][: 2 + odd],
            label="step 3",
        ),
        ["step 3"],
    ),
}


def check_mismatches(group: Group) -> None:
    """Every rank gets the same type of error, naming the tensor, the ranks and their values."""
    if group.size == 1:
        return
    for odd_rank in {0, group.size - 1}:
        for title, (call, words) in MISMATCHES.items():
            with pytest.raises(MismatchError) as caught:
                call(group, group.rank == odd_rank)
            text = str(caught.value).lower()
            for word in (*words, "rank", str(odd_rank)):
                assert word in text, f"{title}: {word!r} is not in: {text}"
            assert len(set(ops.allgather_object(title, group=group))) == 1
        check_usable(group)


def check_wrong_arguments_stay_here(group: Group) -> None:
    """Arguments that are wrong on all ranks raise a plain error, and the group remains usable."""
    frozen = np.ones(3)
    frozen.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match="read-only"):
        ops.allreduce_(frozen, group=group)
    assert np.all(ops.allreduce(frozen, group=group) == 1)
    with pytest.raises((ValueError, TypeError), match=r"(?i)object"):
        ops.allreduce(np.array([object()], dtype=object), group=group)
    for foreign in (np.array([1, 2], "M8[s]"), np.ones(3, ">f4"), np.array(["a"])):
        with pytest.raises((ValueError, TypeError), match=r"array 0 .* can be sent, but not reduc"):
            ops.allreduce(foreign, group=group)
    for op in (Min, Max, Product):
        with pytest.raises(
            ValueError, match=r"array 'z' \(complex64\[3\]\): complex numbers have only"
        ):
            ops.grouped_allreduce([np.ones(3, np.complex64)], op, names=["z"], group=group)
    with pytest.raises((ValueError, TypeError), match=r"(?i)op"):
        ops.allreduce(np.ones(3), "median", group=group)  # type: ignore[arg-type]
    check_usable(group)


# --- what gradients need --------------------------------------------------------------------------


def check_exchange(group: Group) -> None:
    """In place, with mixed dtypes and layouts, directly and as an asynchronous operation."""

    def make(rank: int) -> list[Array]:
        return [
            sample(rank, (1000,), np.float32),
            np.asfortranarray(sample(rank, (50, 3), np.float64, seed=1)),
            sample(rank, (5000,), np.int64, seed=2),
            sample(rank, (), np.float32, seed=3),
        ]

    inputs = [make(rank) for rank in range(group.size)]
    names = ["weight", "bias", "count", "scale"]
    for op in ("average", "sum"):
        for wait in (False, True):
            arrays = make(group.rank)
            if wait:
                handle = group.exchange_async(arrays, names=names, label="later", op=OP_OF[op])
                group.synchronize(handle)
            else:
                group.exchange(arrays, names=names, label="bucket", op=OP_OF[op])
            for index, array in enumerate(arrays):
                assert_exact(group, array, [of_rank[index] for of_rank in inputs], op)


def check_abandoned_steps(group: Group) -> None:
    """A withdrawn submission never matches the next attempt; what was averaged with it is lost."""
    from horo_lite.adapters import Adapter
    from horo_lite.training.reducer import Reducer

    class Parameter:
        grad: Any = None

    if group.size == 1:
        return
    parameters = [Parameter(), Parameter()]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    reducer = Reducer(group, Adapter(), named, bucket_bytes=1)
    for step, fails in enumerate(["", "on rank 0", "everywhere", "", "late", ""]):
        abandons = fails == "everywhere" or (bool(fails) and group.rank == 0)
        for attempt in range(1 + abandons):
            for parameter in parameters:
                parameter.grad = np.full(3, 100.0 * step + 10.0 * group.rank + attempt)
            if fails == "on rank 0" and group.rank != 0:
                ops.barrier(group=group)  # rank 0 gives up its attempt before these submit anything
            reducer.ready(1)
            if fails == "late" and attempt == 0:
                while not group.poll(reducer._step.handles[0]):
                    time.sleep(0.001)
            if abandons and attempt == 0:
                reducer.abandon()
                if fails == "on rank 0":
                    ops.barrier(group=group)
        if fails == "late":
            with pytest.raises(
                MismatchError, match="rank 0 has try 2 of the backward pass, rank"
            ) as caught:
                reducer.finish()
            assert len(set(ops.allgather_object(str(caught.value), group=group))) == 1
            continue
        reducer.finish()
        n_second = group.size if fails == "everywhere" else int(bool(fails))
        expected = 100.0 * step + 5.0 * (group.size - 1) + n_second / group.size
        for parameter in parameters:
            np.testing.assert_allclose(parameter.grad, expected, rtol=1e-12)
    check_usable(group)


def check_weights(group: Group) -> None:
    """sum(w x) / sum(w); a rank of weight 0 contributes nothing, not even nan."""
    size, rank = group.size, group.rank
    weights = [float(r + 1) for r in range(size)]
    inputs = [whole_sample(r, (3000,), np.float32) for r in range(size)]
    for wire in ("none", "fp16", "bf16"):
        x = inputs[rank].copy()
        group.exchange(
            [x], names=["x"], label="weighted", compression=WIRES[wire], weight=weights[rank]
        )
        exact = oracle.allreduce_reference(inputs, "average", weights=weights)
        weighted = [w * y.astype(np.float64) for w, y in zip(weights, inputs, strict=True)]
        bound = oracle.wire_bound(weighted, wire, hosts=len(set(hosts_of(group))))
        assert np.all(np.abs(x - exact) <= bound * size / sum(weights) * 1.01 + 1e-6)
        assert_alike(group, [x])
    for dtype in (np.float16, bfloat16):  # products and sums overflow or underflow
        # Between hosts, a host's sum is rounded one more time.
        rtol = 0.0 if len(set(hosts_of(group))) == 1 else 2.0**-7 if dtype == bfloat16 else 2.0**-10
        for value, factor in ((3000.0, 33.0), (65504.0, 1e30), (6e-8, 0.25)):
            x = np.full(3000, value, dtype)
            expected = x.astype(np.float64)
            group.exchange([x], names=["x"], label="halves", weight=weights[rank] * factor)
            np.testing.assert_allclose(x.astype(np.float64), expected, rtol=rtol)
            x = np.full(3000, value, dtype)
            handle = group.exchange_async([x], names=["x"], label="h", weight=factor)
            group.synchronize(handle)
            np.testing.assert_allclose(x.astype(np.float64), expected, rtol=rtol)
    large = np.full(1500, 3000, np.float16)
    large = ops.allreduce(large, prescale_factor=100.0, postscale_factor=0.01, group=group)
    np.testing.assert_allclose(large, 3000, rtol=2e-3)
    for wrong in (-1.0, float("nan"), float("inf"), "3"):
        with pytest.raises(ValueError, match="weight must be a number of samples"):
            ops.grouped_allreduce([inputs[rank]], weight=wrong, group=group)
    with pytest.raises(ValueError, match="a weight needs op=Average"):
        ops.grouped_allreduce([inputs[rank]], Sum, weight=1.0, group=group)
    (mine,) = ops.grouped_allreduce([inputs[rank]], names=["x"], weight=weights[rank], group=group)
    assert same_bits(inputs[rank], whole_sample(rank, (3000,), np.float32))
    assert np.allclose(mine, exact, rtol=1e-6, atol=1e-5)
    if size > 1:
        x = inputs[rank].copy()
        if rank == 0:
            x[:] = np.nan
        group.exchange([x], names=["x"], label="uneven", weight=0.0 if rank == 0 else 2.0)
        assert same_bits(x, rank_order_reference(inputs[1:], "average", hosts=hosts_of(group)[1:]))
        x = inputs[rank].copy()
        group.synchronize(
            group.exchange_async([x], names=["x"], label="uneven", weight=float(rank == 1))
        )
        assert same_bits(x, inputs[1])


def check_arrays_that_share_memory(group: Group) -> None:
    """In place, an error before anything is sent; broadcast, allowed if alike on all ranks."""
    rank, total = group.rank, sum(range(1, group.size + 1))

    def mine(n: int = 6000) -> Array:
        return np.full(n, rank + 1, np.float32)

    x = mine()
    strided = np.lib.stride_tricks.as_strided
    same = r"arrays 0 \(float32\[6000\]\) and 1 \(float32\[6000\]\) are the same memory"
    for bad, text in (
        ([x, x], same),
        ([x[:3600], x[2400:]], r"arrays 0 .*3600.* and 1 .*3600.* overlap in memory"),
        ([mine(3), x[::2], x[::3]], "arrays 1 .* and 2 .* overlap"),
        ([x[:5].view(np.uint8), x[4:]], "arrays 0 .*uint8.* and 1 .*float32.* overlap"),
        ([strided(x, (50, 2), (4, 4))], "elements of array 0 .* share memory with each other"),
    ):
        for call in (
            partial(ops.grouped_allreduce_, group=group),
            partial(ops.grouped_allreduce_async_, group=group),
        ):
            with pytest.raises(ValueError, match=text):
                call(bad, Sum)
        with pytest.raises(ValueError, match="'a'.* share" if len(bad) == 1 else "overlap|same"):
            group.exchange(bad, names="abc"[: len(bad)], label="exchanged")
    assert same_bits(x, mine())
    ops.grouped_allreduce_(
        [x[1::2], x[::2], x[:0], x[:0]], Sum, group=group
    )  # they are interleaved
    assert np.all(x == total)
    ops.grouped_allreduce_([x[:3000], x[3000:]], Sum, group=group)
    assert np.all(x == total * group.size)
    new = ops.grouped_allreduce([y := mine(), y, y[:7]], Sum, group=group)
    assert [out.tolist() for out in new] == [[total] * 6000, [total] * 6000, [total] * 7]

    y = mine() + np.arange(6000, dtype=np.float32)
    for call in (ops.grouped_broadcast_, hvd.broadcast_parameters):
        options: dict[str, Any] = {"group": group}
        call([y, y[3:], y], group.size - 1, **options)
        assert same_bits(y, np.arange(group.size, group.size + 6000, dtype=np.float32))
    if group.size > 1:
        apart = [y[:10], y[20:30] if rank == 0 else y[5:15]]
        with pytest.raises(MismatchError, match=r"share memory: none.*0 and 1 \(20 bytes apart\)"):
            ops.grouped_broadcast_(apart, group=group)


def check_what_cannot_be_changed_in_place(group: Group) -> None:
    """An error names the call to use instead; a copy is never changed silently."""
    x = np.full(3, group.rank + 1.0)
    read_only = x.copy()
    read_only.flags.writeable = False
    calls: list[Callable[[Any], Any]] = [
        partial(ops.allreduce_, group=group),
        partial(ops.allreduce_async_, group=group),
        partial(ops.broadcast_, group=group),
        partial(ops.broadcast_async_, group=group),
        lambda bad: ops.grouped_allreduce_([x, bad], group=group),
        lambda bad: ops.grouped_allreduce_async_([x, bad], group=group),
        lambda bad: ops.grouped_broadcast_([x, bad], group=group),
    ]
    for call in calls:
        for bad in ([x], (x, x), [1.0, 2.0]):
            with pytest.raises(TypeError, match=r"is a (list|tuple).*grouped_allreduce_"):
                call(bad)
        for bad in (3, 3.0, True, np.float32(3), np.int64(3)):
            with pytest.raises(TypeError, match="cannot be changed in place: call allreduce or b"):
                call(bad)
        for bad in (read_only, np.broadcast_to(x, (2, 3)), memoryview(b"12345678")):
            with pytest.raises(ValueError, match=r"read-only.*use the out-of-place call"):
                call(bad)
    assert same_bits(x, np.full(3, group.rank + 1.0))
    assert np.all(ops.allreduce_(x, Sum, group=group) == sum(range(1, group.size + 1)))


def check_frameworks_arrays(group: Group) -> None:
    """Anything with the buffer protocol or DLPack on the CPU is accepted."""
    import array

    x = array.array("f", [group.rank + 1.0] * 5)
    ops.allreduce_(x, Sum, group=group)
    assert list(x) == [sum(range(1, group.size + 1))] * 5

    class Exported:
        """Exports its memory through DLPack only."""

        def __init__(self, data: Array) -> None:
            self.data = data

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.data.__dlpack__(**keywords)

        def __dlpack_device__(self) -> Any:
            return self.data.__dlpack_device__()

    y = np.full((3, 4), group.rank + 1, np.float64)
    ops.allreduce_(Exported(y), Sum, group=group)
    assert np.all(y == sum(range(1, group.size + 1)))
    with pytest.raises(TypeError):
        ops.allreduce_(object(), group=group)
    check_usable(group)


CHECKS: dict[str, Callable[[Group], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def run_all(group: Group) -> int:
    """Return how many checks all ranks have passed; AssertionError with all failures of this rank.

    A rank that leaves a check early meets the others in the barrier after it, which raises
    MismatchError on all of them: so the ranks are in step again for the next check.
    """
    failed = []
    for name, check in CHECKS.items():
        try:
            check(group)
            ops.barrier(group=group)
        except hvd.PeerLostError:
            raise
        except (Exception, pytest.fail.Exception):
            failed.append(f"{name}:\n{traceback.format_exc()}")
    assert not failed, f"rank {group.rank} of {group.size} failed in " + "\n".join(failed)
    return len(CHECKS)


def in_a_world(size: int) -> str:
    """Run everything in the world that `init()` finds, and return how many and over what."""
    world = hvd.init()
    assert world.size == size, f"a world of {world.size} instead of {size}"
    return f"{run_all(world.group)} checks passed over {world.transport}"
