"""Properties that hold for arrays in GPU memory, in any world; see checks.py for host memory.

Arrays are on the fake device, so this needs no GPU. Only `numpy()` waits for a stream.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import fake_device
import ml_dtypes
import numpy as np
import pytest
from oracle import allgather_reference, allreduce_reference, alltoall_reference, share_of

import horo_lite as hvd
from horo_lite import ops
from horo_lite.adapters.object import Adapter
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Max, Min, Product, Sum
from horo_lite.training.gradient_memory import hash_of
from horo_lite.training.reducer import Reducer

DEVICE = 0
WHOLE = ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bool"]

DTYPES = ["float32", "float64", "float16", "bfloat16", *WHOLE]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def on_gpu(values: Any, dtype: Any = None) -> fake_device.FakeGpuArray:
    return fake_device.array(values, dtype, DEVICE)


def whole(rank: int, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return small whole numbers, different on each rank; sums of four are exact in every dtype."""
    n = int(np.prod(shape))
    values = (np.arange(n) * (rank + 1) + rank) % 5 + 1
    return (values % 2 if dtype == np.bool_ else values).reshape(shape).astype(dtype)


def everyone(group: Group, shape: Sequence[int], dtype: np.dtype) -> list[np.ndarray]:
    return [whole(r, shape, dtype) for r in range(group.size)]


def check_every_dtype_and_op(group: Group) -> None:
    for name in DTYPES:
        dtype = dtype_of(name)
        for op in (Average, Sum, Min, Max, Product):
            if name == "bool" and op is Average:
                continue
            for shape in ((5,), (3, 1000), ()):
                inputs = everyone(group, shape, dtype)
                x = on_gpu(inputs[group.rank])
                got = ops.allreduce(x, op, group=group)
                expected = allreduce_reference(inputs, op.value)
                assert got is not x
                assert got.dtype == dtype
                assert np.allclose(
                    got.numpy().astype(np.float64), expected.astype(np.float64), rtol=1e-2, atol=0
                ), (name, op, shape)
                if op not in (Average, Product) or name in WHOLE:
                    assert np.array_equal(got.numpy(), expected), (name, op)
                assert np.array_equal(x.numpy(), inputs[group.rank])


def check_order_with_the_current_stream(group: Group) -> None:
    """Earlier work on the stream is seen, later work sees the result, and the host never waits."""
    total = sum(range(1, group.size + 1))
    for _ in range(3):
        x = on_gpu(np.zeros(1000), np.float32)
        x.fill(np.full(1000, group.rank + 1))  # late
        ops.allreduce_(x, Sum, group=group)
        y = ops.allreduce(x.add(1), Sum, group=group)
        with fake_device.another_stream():
            z = ops.allreduce(y, Sum, group=group)
            z.add(1)
        assert np.all(z.numpy() == (total + 1) * group.size**2 + 1)


def check_memory_may_go_at_once(group: Group) -> None:
    """Memory of an unreferenced array returns to its allocator immediately, in stream order."""
    for k in range(3):
        results = [
            ops.allreduce(on_gpu(np.full(10_000, group.rank + k + i), np.float32), Sum, group=group)
            for i in range(4)
        ]
        gc.collect()
        for i, result in enumerate(results):
            assert np.all(result.numpy() == sum(r + k + i for r in range(group.size)))


def check_in_place_and_grouped(group: Group) -> None:
    shapes = [(7,), (0,), (40, 50), (), (3, 5, 2)]
    for dtypes in (["float32"] * 5, ["float32", "int64", "float64", "float16", "int32"]):
        inputs = [everyone(group, s, np.dtype(d)) for s, d in zip(shapes, dtypes, strict=True)]
        xs = [on_gpu(each[group.rank]) for each in inputs]
        got = ops.grouped_allreduce(xs, Sum, group=group)
        assert ops.grouped_allreduce_(xs, Sum, group=group) == xs
        for x, y, each in zip(xs, got, inputs, strict=True):
            assert np.array_equal(x.numpy(), allreduce_reference(each, "sum"))
            assert np.array_equal(y.numpy(), x.numpy())


def check_layouts(group: Group) -> None:
    for cut in (np.s_[::2], np.s_[:, 1:3], np.s_[1]):
        base = on_gpu(np.full((6, 8), group.rank + 1), np.float32)
        view = base[cut]
        ops.allreduce_(view, Sum, group=group)
        total = sum(range(1, group.size + 1))
        expected = np.full((6, 8), group.rank + 1.0)
        expected[cut] = total
        assert np.array_equal(base.numpy(), expected)
    values = everyone(group, (4, 6), np.dtype(np.float32))
    fortran = fake_device.FakeGpuArray(np.empty((6, 4), np.float32).T, DEVICE).fill(
        values[group.rank]
    )
    ops.allreduce_(fortran, Sum, group=group)
    assert np.array_equal(fortran.numpy(), allreduce_reference(values, "sum"))


def check_scaling(group: Group) -> None:
    inputs = everyone(group, (1000,), np.dtype(np.float32))
    for op, pre, post in ((Sum, 0.5, 2.0), (Average, 2.0, 0.25), (Sum, 1.0, 3.0)):
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            got = ops.allreduce(
                on_gpu(inputs[group.rank]),
                op,
                compression=compression,
                prescale_factor=pre,
                postscale_factor=post,
                group=group,
            )
            expected = allreduce_reference(inputs, op.value).astype(np.float64) * pre * post
            bound = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2}[compression.wire]
            assert np.allclose(got := got.numpy(), expected, rtol=bound), (
                f"{op}, {pre}, {post}, {compression}: {got[:9]}, not {expected[:9]}"
            )


def check_fp16_neither_overflows_nor_vanishes(group: Group) -> None:
    """6e4, 2e-7, 1e30 and 1e-7 in different tensors of one exchange; inf and nan do not spread."""
    magnitudes = [6e4, 2e-7, 1e30, 1e-7, 1.0]
    xs = [on_gpu(np.full(1500, m), np.float32) for m in magnitudes]
    odd = np.ones(1500, np.float32)
    if group.rank == group.size - 1:
        odd[3], odd[700] = np.inf, np.nan
    xs.append(on_gpu(odd))
    ops.grouped_allreduce_(xs, Average, compression=hvd.Compression.fp16, group=group)
    for x, m in zip(xs, magnitudes, strict=False):
        assert np.allclose(x.numpy(), m, rtol=2e-3, atol=0), m
    got = xs[-1].numpy()
    assert not np.isfinite(got[[3, 700]]).any()
    assert np.all(np.delete(got, [3, 700]) == 1)
    half = on_gpu(np.full(100, 6e4), np.float16)
    assert np.allclose(ops.allreduce(half, group=group).numpy().astype(float), 6e4, rtol=2e-3)
    travelled = ops.allreduce(
        on_gpu(np.full(10, 1 / 7)), compression=hvd.Compression.fp16, group=group
    )
    rounded = travelled.numpy() != 1 / 7
    assert np.all(rounded) if group.size > 1 else not np.any(rounded)


def check_weights(group: Group) -> None:
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        for weights in ([1.0, 3.0, 0.0, 2.0], [0.0, 2.0, 1.0, 1.0]):
            mine = weights[: group.size]
            if not sum(mine):
                continue
            value = group.rank + 1 if mine[group.rank] else np.nan
            x, later = (on_gpu(np.full(300, value), np.float32) for _ in range(2))
            how: dict[str, Any] = {"names": ["x"], "label": "weighted", "compression": compression}
            how["weight"] = mine[group.rank]
            how["prescale_factor"] = 8.0  # some rank's factor is 1
            group.exchange([x], **how)
            group.synchronize(group.exchange_async([later], **how))
            expected = 8 * sum(w * (r + 1) for r, w in enumerate(mine)) / sum(mine)
            for got in (x, later):
                bound = 2e-3 if compression.wire != "none" else 1e-6
                assert np.allclose(got.numpy(), expected, rtol=bound)
    for value, weight in ((3000, 33.0), (65504, 1.0), (6e-8, 0.25)):
        x = on_gpu(np.full(300, value, np.float16), np.float16)
        group.exchange([x], names=["x"], label="halves", weight=weight * (group.rank + 1))
        assert np.allclose(x.numpy().astype(float), float(np.float16(value)), rtol=2e-3, atol=0)
    x = on_gpu(np.full(5, 7 * (group.rank + 1)), np.int32)
    group.exchange([x], names=["x"], label="integers", weight=0.5)
    assert np.all(x.numpy() == 7 * (group.size + 1) // 2)


def check_moving_data(group: Group) -> None:
    rank, size = group.rank, group.size
    for dtype in (np.float32, np.int16):
        parts = [whole(r, (r + 1, 3), np.dtype(dtype)) for r in range(size)]
        got = ops.allgather(on_gpu(parts[rank]), group=group)
        assert isinstance(got, fake_device.FakeGpuArray)
        assert np.array_equal(got.numpy(), allgather_reference(parts))
    none = [np.zeros((0 if r == 0 else 2, 2), np.float32) + r for r in range(size)]
    assert np.array_equal(
        ops.allgather(on_gpu(none[rank]), group=group).numpy(), allgather_reference(none)
    )
    scalars = ops.allgather(on_gpu(np.float32(rank)), group=group).numpy()
    assert np.array_equal(scalars, np.arange(size))
    for root in range(size):
        values = everyone(group, (5, 2), np.dtype(np.float64))
        x = on_gpu(values[rank])
        assert np.array_equal(ops.broadcast(x, root, group=group).numpy(), values[root])
        assert np.array_equal(x.numpy(), values[rank])
        y, z = on_gpu(values[rank]), on_gpu(np.full(3, rank))
        ops.grouped_broadcast_([y, z], root, group=group)
        assert np.array_equal(y.numpy(), values[root])
        assert np.all(z.numpy() == root)
    rows = everyone(group, (2 * size + 1, 3), np.dtype(np.float32))
    got = ops.reducescatter(on_gpu(rows[rank]), Sum, group=group)
    expected = allreduce_reference(rows, "sum")[share_of(2 * size + 1, size, rank)]
    assert np.array_equal(got.numpy(), expected)
    splits = [[(s + d) % 3 for d in range(size)] for s in range(size)]
    inputs = [whole(r, (sum(splits[r]), 2), np.dtype(np.int32)) for r in range(size)]
    result, received = ops.alltoall(on_gpu(inputs[rank]), splits[rank], group=group)
    assert np.array_equal(result.numpy(), alltoall_reference(inputs, splits, rank))
    assert received.tolist() == [splits[s][rank] for s in range(size)]
    even = ops.alltoall(on_gpu(np.arange(size) + 10 * rank), group=group)
    assert np.array_equal(even.numpy(), [10 * r + rank for r in range(size)])


def check_divided_results(group: Group) -> None:
    """Each rank receives what it needs of the results, with the bits of an all-reduce."""
    rank, size = group.rank, group.size
    shapes = [(5,), (0,), (3, 1000), (60_000,), (7, 11)]
    owners = [0, 0, -1, -1, size - 1]  # -1: every rank has a part, in which the last one's is empty

    def needed(r: int, i: int) -> tuple[int, int]:
        n = int(np.prod(shapes[i]))
        if owners[i] >= 0:
            return (0, n) if owners[i] == r else (0, 0)
        cuts = [n * k // max(size - 1, 1) for k in range(size)] + [n]
        return cuts[r], cuts[r + 1] if size > 1 else n

    division = [[needed(r, i) for i in range(len(shapes))] for r in range(size)]
    narrow = [hvd.Compression.fp16, hvd.Compression.bf16]
    cases = [(name, op, hvd.Compression.none) for name in DTYPES for op in (Sum, Max, Average)]
    cases += [("float32", op, wire) for wire in narrow for op in (Sum, Average)]
    for turn, (name, op, compression) in enumerate(cases):
        if (name, op) == ("bool", Average):
            continue
        dtype = dtype_of(name)
        each = [everyone(group, shape, dtype) for shape in shapes]
        whole, blocking, later = ([on_gpu(x[rank]) for x in each] for _ in range(3))
        names = [f"x{i}" for i in range(len(shapes))]
        how: dict[str, Any] = {"names": names, "op": op, "compression": compression}
        how["weight"] = 2.0 + rank if op is Average and turn % 2 else None
        group.exchange(whole, label="whole", **how)
        group.exchange(blocking, label="divided", division=division, **how)
        handle = group.exchange_async(later, label="later", division=division, **how)
        group.synchronize(handle)
        for i, (x, *divided) in enumerate(zip(whole, blocking, later, strict=True)):
            begin, end = division[rank][i]
            expected = x.numpy().reshape(-1)[begin:end]
            for got in divided:
                mine = got.numpy().reshape(-1)[begin:end]
                assert mine.tobytes() == expected.tobytes(), (name, op, compression, i)
    if group.stream(DEVICE).transport().name == "staged":  # type: ignore[union-attr]
        sent = []
        for parts in ((), division):
            before = hvd.stats().bytes_sent
            group.exchange(whole, names=names, label=f"{len(parts)} parts", division=parts)
            sent.append(sum(ops.allgather_object(hvd.stats().bytes_sent - before, group=group)))
        assert sent[1] < 0.7 * sent[0] or sent[0] == 0, sent  # 0: within a host
    # In memory in another order, elements are numbered as in C order.
    values = everyone(group, (4, 6), np.dtype(np.float32))
    parts = [[(24 * r // size, 24 * (r + 1) // size)] for r in range(size)]
    fortran = fake_device.FakeGpuArray(np.empty((6, 4), np.float32).T, DEVICE).fill(values[rank])
    group.exchange([fortran], names=["x"], label="turned", op=Sum, division=parts)
    cut = slice(*parts[rank][0])
    total = allreduce_reference(values, "sum").reshape(-1)
    assert np.array_equal(fortran.numpy().reshape(-1)[cut], total[cut])


def check_async_in_any_order(group: Group) -> None:
    names = [f"t{i}" for i in range(6)]
    order = names[group.rank :] + names[: group.rank]
    handles = {}
    for name in order:
        x = on_gpu(np.full(500, int(name[1]) + group.rank), np.float32)
        handles[name] = ops.allreduce_async(x, Sum, name=name, group=group)
        del x
    for name in reversed(order):
        got = group.synchronize(handles[name])
        assert np.all(got.numpy() == sum(int(name[1]) + r for r in range(group.size)))
    gathered = ops.allgather_async(on_gpu(np.full(2, group.rank)), name="g", group=group)
    sent = ops.broadcast_async_(on_gpu(np.full(2, group.rank)), 0, name="b", group=group)
    assert np.all(group.synchronize(sent).numpy() == 0)
    assert np.array_equal(group.synchronize(gathered).numpy(), np.repeat(np.arange(group.size), 2))
    x = on_gpu(np.full(9, group.rank), np.float32)
    group.synchronize(ops.reducescatter_async(x, Sum, name="r", group=group))


def check_host_and_gpu_side_by_side(group: Group) -> None:
    for k in range(3):
        handle = ops.allreduce_async(np.full(5, group.rank + k), Sum, name="host", group=group)
        got = ops.allreduce(on_gpu(np.full(5, group.rank + k), np.float32), Sum, group=group)
        on_host = ops.allreduce(np.full(5, group.rank + k, np.float32), Sum, group=group)
        assert np.array_equal(got.numpy(), on_host)
        assert np.array_equal(group.synchronize(handle), on_host)
    with pytest.raises(ValueError, match="memory"):
        ops.grouped_allreduce([on_gpu(np.ones(3)), np.ones(3)], group=group)


def check_wrong_arguments_stay_here(group: Group) -> None:
    with pytest.raises(ValueError, match="one GPU"):
        ops.allreduce(fake_device.array(np.ones(3), device=DEVICE + 7), group=group)
    x = Foreign(on_gpu(np.ones(3)))
    with pytest.raises(TypeError, match="register_adapter"):
        ops.allreduce(x, group=group)
    if group.size > 1:
        with pytest.raises(ValueError, match="root_rank"):
            ops.broadcast(on_gpu(np.ones(3)), group.size, group=group)
    usable(group)


def usable(group: Group) -> None:
    got = ops.allreduce(on_gpu(np.full(10, group.rank + 1), np.float32), Sum, group=group)
    assert np.all(got.numpy() == sum(range(1, group.size + 1)))


def settles(group: Group, call: Callable[[], object], error: type[Exception]) -> str:
    """Call until the asynchronous comparison of ranks has ended; return the text of the error.

    Rounds may take seconds on a busy machine: the limit only ends hangs.
    """
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            call()
        except error as found:
            return str(found)
        time.sleep(0.01)
    raise AssertionError("no mismatch was reported")


def check_mismatches_are_told_to_all(group: Group) -> None:
    """Every rank gets the error; the world remains usable, with new connections between GPUs."""
    if group.size == 1:
        return
    odd = group.rank == group.size - 1
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: ops.allreduce(on_gpu(np.ones(7 + odd), np.float32), group=group), "float32[7]"),
        (
            lambda: ops.allreduce(on_gpu(np.ones(7), "f4" if odd else "f8"), group=group),
            "float64[7]",
        ),
        (lambda: ops.allreduce(on_gpu(np.ones(7)), Sum if odd else Average, group=group), "op Sum"),
        (lambda: ops.allreduce(on_gpu(np.ones(7)), name="x" if odd else "y", group=group), "'y'"),
    ]
    if group.compares_later(DEVICE):
        weight = 1.0 if odd else None
        x = on_gpu(np.ones(7), "f4")
        calls.append(
            (lambda: group.exchange([x], names=["w"], label="e", weight=weight), "weighted: True")
        )
    for call, words in calls:
        text = settles(group, call, hvd.MismatchError)
        assert words in text, text
        assert f"rank {group.size - 1}" in text
        usable(group)


def check_foreign_arrays(group: Group) -> None:
    """Arrays of an unknown framework, in place, ordered by DLPack."""
    for kind in (Foreign, Managed):
        x = on_gpu(np.zeros(100), np.float32).fill(np.full(100, group.rank + 1))
        ops.allreduce_(kind(x), Sum, group=group)
        assert np.all(x.numpy() == sum(range(1, group.size + 1)))


class Foreign:
    """Exports through DLPack, and has nothing else."""

    def __init__(self, array: fake_device.FakeGpuArray) -> None:
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)


class Managed(bytearray):
    """Exports a buffer, too, as CuPy's arrays in unified memory do, which no stream orders."""

    def __init__(self, array: fake_device.FakeGpuArray) -> None:
        super().__init__(array.shape[0] * array.dtype.itemsize)
        self._array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return 13, self._array.device

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)


class Descent:
    """A home-made optimizer over such arrays."""

    def __init__(self, params: list[Any]) -> None:
        self.params = params
        self.grads: list[Any] = [None] * len(params)

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            if grad is not None:
                param.subtract(grad, 0.5)


SHAPES = [(300, 40), (40,), (), (1000,)]


def gradient(rank: int, i: int, step: int) -> np.ndarray:
    return np.full(SHAPES[i], rank + 2 * i + 4 * step, np.float32)


def check_optimizer(group: Group) -> None:
    """Steps on shards equal steps on the whole batch; parameters start as the root's."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        params = [on_gpu(np.full(shape, group.rank + 1.0), np.float32) for shape in SHAPES]
        root = group.size - 1
        hvd.broadcast_parameters(params, root, group=group)
        inner = Descent(params)
        optimizer = hvd.DistributedOptimizer(inner, group=group, compression=compression)
        for step in range(4):
            inner.grads = [on_gpu(gradient(group.rank, i, step)) for i in range(len(SHAPES))]
            optimizer.step()
        for i, param in enumerate(params):
            mean = [
                np.mean([gradient(r, i, step) for r in range(group.size)], axis=0)
                for step in range(4)
            ]
            expected, got = root + 1 - 0.5 * sum(mean), param.numpy()
            assert np.allclose(got, expected, rtol=1e-3), (compression, i, got, expected)


def check_noise(group: Group) -> None:
    """A step that measures the noise reads gradients and averages in stream order."""
    os.environ["HORO_LITE_NOISE_EVERY"] = "3"
    inner = Descent([on_gpu(np.zeros(shape), np.float32) for shape in SHAPES])
    optimizer = hvd.DistributedOptimizer(inner, group=group)
    for step in range(7):
        inner.grads = [on_gpu(gradient(group.rank, i, step)) for i in range(len(SHAPES))]
        optimizer.step()
    del os.environ["HORO_LITE_NOISE_EVERY"]
    found = hvd.gradient_noise(group)
    assert bool(found) == (group.size > 1)
    for noise in found:
        assert noise.steps == [3, 6]
        for step, share in zip((2, 5), noise.shares, strict=True):
            of_ranks = [
                np.concatenate([gradient(r, i, step).ravel() for i in range(len(SHAPES))])
                for r in range(group.size)
            ]
            average = np.mean(of_ranks, axis=0)
            variance = np.sum(np.var(of_ranks, axis=0, ddof=1)) / group.size
            assert np.isclose(share, variance / np.sum(average**2), rtol=1e-4)


def check_drift(group: Group) -> None:
    """Replicas on GPUs are compared in stream order, and repaired in place."""
    size, odd = group.size, group.size - 1
    params = [on_gpu(np.arange(12).reshape(3, 4), np.float32), on_gpu(np.ones(5), np.float32)]
    params[0] = params[0][:, ::2]
    assert hvd.check_in_sync(params, group=group)
    if size == 1:
        return  # no other rank to drift from
    ours = [np.full((3, 4), 1.5 + group.rank, np.float32), np.zeros(5, np.float32)]
    there = [on_gpu(x, np.float32) for x in ours]
    assert hash_of(there, group) == hash_of(ours, group) != 0
    assert hash_of(there[:1], group) != hash_of([there[0][:, ::2]], group)
    assert hash_of([None, there[1]], group) == 0
    params[1].fill([1, 1, 1, 1 + group.rank // odd, 1])
    with pytest.raises(hvd.DriftError) as caught:
        hvd.check_in_sync(params, group=group)
    assert f"rank {odd}'s in 1 of 5 elements, by up to 1." in str(caught.value), caught.value
    assert ("which agree" in str(caught.value)) == (size > 2), caught.value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert not hvd.check_in_sync(params, group=group, on_drift="heal")
    assert params[1].numpy().tolist() == [1] * 5
    optimizer = hvd.DistributedOptimizer(Descent(params), group=group, check_every=1)
    optimizer.inner.grads = [on_gpu(np.full((3, 2), group.rank), np.float32), None]
    optimizer.step()
    # What checks gradients in host memory does not claim to have checked these.
    optimizer = hvd.DistributedOptimizer(Descent(params), group=group, check_finite="warn")
    optimizer.inner.grads = [None, on_gpu(np.full(5, np.nan), np.float32)]
    with pytest.raises(ValueError, match="these are on a GPU"):
        optimizer.step()


def check_missing_gradients(group: Group) -> None:
    """Missing on some ranks counts as zeros there; missing on all stays None; then all are back."""
    params = [on_gpu(np.zeros(shape), np.float32) for shape in SHAPES]
    inner = Descent(params)
    optimizer = hvd.DistributedOptimizer(inner, group=group)
    size, last = group.size, group.size - 1
    #      step: the gradients that each rank lacks
    lacks = [(), (1,), (1,), (), "all 2", "all 2", (), (0,)]
    for step, lack in enumerate(lacks):
        inner.grads = [on_gpu(gradient(group.rank, i, step)) for i in range(len(SHAPES))]
        for i in (2,) if lack == "all 2" else lack if group.rank == last else ():
            inner.grads[i] = None
        optimizer.synchronize()
        for i, grad in enumerate(inner.grads):
            if lack == "all 2" and i == 2:
                assert grad is None
                continue
            givers = [r for r in range(size) if lack == "all 2" or not (i in lack and r == last)]
            if not givers:
                assert grad is None
                continue
            expected = sum(gradient(r, i, step) for r in givers) / size
            assert np.allclose(grad.numpy(), expected), (step, i)
        with optimizer.skip_synchronize():
            optimizer.step()


def check_gradients_that_change_on_some_ranks_only(group: Group) -> None:
    if group.size == 1:
        return
    inner = Descent([on_gpu(np.zeros(5), np.float32) for _ in range(2)])
    optimizer = hvd.DistributedOptimizer(inner, group=group)
    inner.grads = [on_gpu(np.ones(5), np.float32) for _ in range(2)]
    optimizer.step()

    def step() -> None:
        n = 6 if group.rank == 0 else 5
        inner.grads = [on_gpu(np.ones(5), np.float32), on_gpu(np.ones(n), np.float32)]
        optimizer.step()

    text = settles(group, step, hvd.MismatchError)
    assert "float32[6]" in text, text
    usable(group)


class Slot:
    def __init__(self) -> None:
        self.grad: Any = None


def check_streaming(group: Group) -> None:
    """Buckets are sent as they fill, in plan order, whatever order gradients become ready in."""
    slots = [(f"p{i}", Slot()) for i in range(6)]
    reducer = Reducer(group, Adapter(), slots, bucket_bytes=4000)
    shares = [(900 * r // group.size, 900 * (r + 1) // group.size) for r in range(group.size)]
    for step in range(6):
        if step == 4:  # from now on, a rank receives its share only
            reducer.division = [shares] * 6
        share = slice(*shares[group.rank] if step >= 4 else (0, 900))
        for i, (_, slot) in enumerate(slots):
            slot.grad = on_gpu(np.full(900, group.rank + i + step), np.float32)
        order = [5, 4, 3, 2, 1, 0] if group.rank % 2 else [4, 5, 2, 3, 0, 1]
        for i in order:
            reducer.ready(i)
        reducer.finish()
        for i, (_, slot) in enumerate(slots):
            expected = np.mean([r + i + step for r in range(group.size)])
            assert np.allclose(slot.grad.numpy()[share], expected)


def check_average_gradients(group: Group) -> None:
    """Inputs are not changed; a gradient that one rank lacks is adjacent to one that it has."""
    n_lacking = int(group.size > 1)
    lacks = n_lacking and group.rank == group.size - 1
    here = on_gpu(np.full(5, 1.0 + group.rank), np.float32)
    tree = {"a": here, "b": None if lacks else on_gpu(np.full((3, 2), 6.0), np.float32)}
    for _ in range(2):
        averages = hvd.average_gradients(tree, group=group)
        ops.barrier(group=group)  # if MPI only takes calls from this thread, it makes progress here
        assert type(averages["b"]) is type(here)
        assert np.allclose(averages["a"].numpy(), (group.size + 1) / 2)
        average = 6.0 * (group.size - n_lacking) / group.size
        assert np.allclose(averages["b"].numpy(), np.full((3, 2), average))
        assert np.allclose(here.numpy(), 1.0 + group.rank)


CHECKS: dict[str, Callable[[Group], None]] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def run_all(group: Group) -> int:
    """Return how many checks this rank has passed; AssertionError with the first that failed."""
    for name, check in CHECKS.items():
        try:
            check(group)
            ops.barrier(group=group)
        except BaseException:
            print(f"rank {group.rank} failed in {name}:\n{traceback.format_exc()}", file=sys.stderr)
            raise
    return len(CHECKS)


def main() -> None:
    """Run everything in the world that `init()` finds, and print how its GPU arrays travelled."""
    global DEVICE
    if os.environ.get("HORO_LITE_TEST_GPUS") == "own":  # every rank has its own GPU, on any host
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        os.environ["HORO_LITE_TEST_GPUS"] = ",".join(f"{rank}{name}" for name in "abcd")
    faulthandler.dump_traceback_later(150)
    world = hvd.init()
    assert world.device.kind == "cuda", world
    assert world.size == int(os.environ["HORO_LITE_TEST_SIZE"])
    DEVICE = world.device.index
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        n_passed = run_all(world.group)
    n_slow = sum("go through the host's memory" in str(w.message) for w in caught)
    assert n_slow <= 1, [str(w.message) for w in caught]
    stream = world.group.stream(DEVICE)
    assert stream is not None
    name = stream.transport().name
    hvd.shutdown()
    print(f"{n_passed} checks passed over {name}, told {n_slow} times", flush=True)


if __name__ == "__main__":
    main()
