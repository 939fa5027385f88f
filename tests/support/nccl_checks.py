"""The programs of single ranks for test_nccl_group.py: one function per job."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fake_device
import ml_dtypes
import numpy as np
import pytest
from fake_nccl import SINCE_2_27, Call, compiled, read_log
from oracle import allgather_reference, allreduce_reference, share_of
from stall_limits import limit_waits

import horo_lite as hvd
from horo_lite import _native, ops
from horo_lite.collectives.calls import AllGatherInPlace, Part
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Max, Min, Product, Sum
from horo_lite.errors import DeviceError
from horo_lite.training.reducer import Reducer
from horo_lite.transports import watchdog

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)


def start(**settings: str) -> Group:
    """Start a new world after the previous one; the settings hold from now on."""
    hvd.shutdown()
    os.environ["HORO_LITE_TEST_GPUS"] = f"{RANK}a"
    os.environ.update({f"HORO_LITE_{name}": value for name, value in settings.items()})
    return hvd.init().group


def on_gpu(values: Any, dtype: Any = np.float32) -> fake_device.FakeGpuArray:
    return fake_device.array(values, dtype)


def usable(group: Group) -> None:
    """Assert that direct and asynchronous calls work, on the GPU and on the host."""
    total = sum(range(1, group.size + 1))
    handle = ops.allreduce_async(on_gpu(np.full(10, RANK + 1)), Sum, group=group)
    assert np.all(ops.allreduce(on_gpu(np.full(10, RANK + 1)), Sum, group=group).numpy() == total)
    assert np.all(ops.allreduce(np.full(10, RANK + 1.0), Sum, group=group) == total)
    assert np.all(group.synchronize(handle).numpy() == total)
    ops.barrier(group=group)


def fails(call: Callable[[], Any], error: type[Exception], *words: str) -> str:
    """Assert that the call raises; return the text."""
    with pytest.raises(error) as found:
        call()
    for word in words:
        assert word in str(found.value), f"{word!r} is not in {found.value}"
    return str(found.value)


def settles(call: Callable[[], Any], error: type[Exception], *words: str) -> str:
    """Call until the asynchronous comparison of ranks has ended; return the text of the error."""

    def until() -> None:
        end = time.monotonic() + 20  # if no error is reported
        while time.monotonic() < end:
            call()
            time.sleep(0.005)

    return fails(until, error, *words)


def log() -> list[Call]:
    return read_log(os.environ["HORO_LITE_FAKE_NCCL_LOG"])[os.getpid()]


def since(n_calls: int, *names: str) -> list[Call]:
    return [call for call in log()[n_calls:] if call.name.removeprefix("nccl") in names]


def n_operations() -> int:
    calls = since(0, "AllReduce", "ReduceScatter", "Broadcast", "Send", "Recv")
    return sum(call.rank >= 0 for call in calls)  # not those of a communicator that is gone


# Communicators.


def life() -> None:
    os.environ["NCCL_COMM_BLOCKING"] = "0"  # as horo_lite asks for it anyway
    group = start(BUCKET_BYTES="4096")
    ops.allreduce(on_gpu([1.0]), Sum, group=group).numpy()
    calls = log()
    inits = since(0, "CommInitRankConfig")
    assert [(call.rank, call.count) for call in inits] == [(RANK, group.size)]
    (bucket,) = {call.address for call in since(0, "MemAlloc")}
    assert [call.address for call in since(0, "CommWindowRegister")] == [bucket]
    assert not since(0, "CommRegister")
    names = [call.name for call in calls]
    assert names.index("ncclMemAlloc") < names.index("ncclCommWindowRegister")
    assert names.index("ncclCommWindowRegister") < names.index("ncclAllReduce")

    def reduced(sizes: list[int], dtypes: list[str], **options: Any) -> list[tuple[Any, ...]]:
        xs = [on_gpu(np.full(n, RANK + 1), d) for n, d in zip(sizes, dtypes, strict=True)]
        n_calls = len(log())
        ops.grouped_allreduce_(xs, Sum, **options, group=group)
        total = sum(range(1, group.size + 1))
        for x in xs:
            assert np.all(x.numpy() == total)
        return [
            (call.count, call.dtype, call.op, call.address == bucket)
            for call in since(n_calls, "AllReduce")
        ]

    # One operation per bucket, in plan order; every tensor begins at a multiple of 64 bytes.
    assert reduced([10, 20], ["f4", "f4"]) == [(16 + 32, "float32", "sum", True)]
    assert reduced([900, 100, 100, 50], ["f4"] * 4) == [
        (912 + 112, "float32", "sum", True),
        (112 + 64, "float32", "sum", True),
    ]
    assert reduced([10, 10, 10, 10], ["f4", "i4", "f4", "f8"]) == [
        (32, "float32", "sum", True),
        (10, "int32", "sum", False),
        (10, "float64", "sum", False),
    ]
    # A single tensor is sent in place, and one that is too large for a bucket is split.
    assert reduced([700], ["f4"]) == [(700, "float32", "sum", False)]
    assert reduced([2500], ["f4"]) == [
        (1024, "float32", "sum", False),
        (1024, "float32", "sum", False),
        (452, "float32", "sum", False),
    ]
    # The scales come first, for all tensors at once.
    fp16 = {"compression": hvd.Compression.fp16}
    assert reduced([1500, 100, 1500], ["f4"] * 3, **fp16) == [
        (3, "int32", "max", False),
        (1504 + 128, "float16", "sum", True),
        (1504, "float16", "sum", True),
    ]

    divided_results(group, bucket)

    n_calls = len(log())
    ops.grouped_broadcast_([on_gpu(np.ones(n)) for n in (3, 0, 5)], 1, group=group)
    names = [call.name.removeprefix("nccl") for call in log()[n_calls:]]
    assert names == ["GroupStart", "Broadcast", "Broadcast", "GroupEnd"]
    sent = since(n_calls, "Broadcast")
    assert [(call.count, call.dtype, call.op) for call in sent] == [
        (12, "uint8", "1"),
        (20, "uint8", "1"),
    ]

    # A world ends cleanly, and another one can begin.
    for _ in range(2):
        n_calls = len(log())
        usable(group)
        former, group = group, start()
        assert former is not group
        ended = [call.name.removeprefix("nccl") for call in log()]
        for name in ("MemAlloc", "CommInitRankConfig", "CommWindowRegister"):
            assert ended.count(name) == 2 * ended.count("CommInitRankConfig") // 2
        assert ended.count("CommFinalize") == ended.count("CommDestroy")
        assert ended.count("CommDestroy") == ended.count("CommInitRankConfig")
        assert ended.count("CommWindowDeregister") == ended.count("CommWindowRegister")
        assert ended.count("MemFree") == ended.count("MemAlloc")
        assert "CommAbort" not in ended
        assert ended.index("CommFinalize") < ended.index("CommDestroy")


def divided_results(group: Group, bucket: int) -> None:
    """Each rank receives its part only, with the bits of an all-reduce; buckets have 4096 bytes."""
    rank, size = group.rank, group.size

    def exchanged(
        given: list[np.ndarray], division: Any, **options: Any
    ) -> tuple[list[fake_device.FakeGpuArray], list[Call]]:
        """Return the arrays, and the calls of NCCL after the weights and scales."""
        names = [f"x{i}" for i in range(len(given))]
        whole, xs = ([on_gpu(x, x.dtype) for x in given] for _ in range(2))
        group.exchange(whole, names=names, label="whole", **options)
        n_calls = len(log())
        group.exchange(xs, names=names, label="divided", division=division, **options)
        calls = since(n_calls, "AllReduce", "ReduceScatter")
        for x, y, own, (begin, end) in zip(xs, whole, given, division[rank], strict=True):
            got, expected = x.numpy()[begin:end], y.numpy()[begin:end]
            assert got.tobytes() == expected.tobytes(), (options, got, expected)
            assert len(got) < 9 or got.tobytes() != own[begin:end].tobytes()
        while calls and calls[0].name == "ncclAllReduce" and calls[0].dtype in ("float64", "int32"):
            del calls[0]
        return xs, calls

    def values(n: int, dtype: Any = np.float32) -> np.ndarray:
        random = np.random.default_rng([rank, n])
        dtype = np.dtype(dtype)
        if dtype.kind in "iub":
            return random.integers(0, 2 if dtype.kind == "b" else 30, n).astype(dtype)
        return (random.standard_normal(n) * 2.0 ** random.integers(-9, 9, n)).astype(dtype)

    def evenly(*sizes: int) -> list[list[tuple[int, int]]]:
        return [[(n * r // size, n * (r + 1) // size) for n in sizes] for r in range(size)]

    # Equal parts of one tensor are reduced where they are, others in a bucket, with padding.
    for averages in ({}, {"postscale_factor": 3.0}):
        (x,), (call,) = exchanged([values(50 * size)], evenly(50 * size), **averages)
        place = x._memory.ctypes.data + 4 * 50 * rank
        assert call[1:5] == ("ncclReduceScatter", 50, "float32", "sum")
        assert call.address == place
    n = 40 * size + 1
    _, (call,) = exchanged([values(n), values(5), values(0)], evenly(n, 5, 0))
    assert call[1:5] == ("ncclReduceScatter", 48 + 16, "float32", "sum")
    assert call.address == bucket + 4 * (48 + 16) * rank
    # The first rank has much of one tensor, the others have more of another.
    sizes = [1000, 100 + 300 * (size - 1)]
    division = [[(0, 1000), (0, 100)]] + [
        [(1000, 1000), (100 + 300 * r, 400 + 300 * r)] for r in range(size - 1)
    ]
    for options in (
        {},
        {"prescale_factor": 0.3, "postscale_factor": 1.7},
        {"weight": rank + 0.5},
        {"compression": hvd.Compression.bf16},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.fp16, "weight": float(rank)},
        {"op": Product},
    ):
        _, calls = exchanged([values(n) for n in sizes], division, **options)
        assert {call.name for call in calls} == {"ncclReduceScatter", "ncclAllReduce"}
        assert {call.dtype for call in calls} < {"float32", "float16", "bfloat16"}
    # More than a bucket: the rank's own part, in sections.
    n = 3000
    _, calls = exchanged([values(n * size)], evenly(n * size))
    assert {call.name for call in calls} == {"ncclReduceScatter"}
    assert sum(call.count for call in calls) == 3008
    assert max(call.count for call in calls) == 4096 // size // 64 * 16
    # Tensors follow each other in memory on one rank only.
    block = on_gpu(np.full(50 * size, rank + 1))
    xs = [block[50 * i : 50 * i + 50] if rank == 0 else on_gpu(values(50)) for i in range(size)]
    for x in xs:
        x.fill(np.full(50, rank + 1))
    division = [[(0, 50 * (i == r)) for i in range(size)] for r in range(size)]
    group.exchange(xs, names=list("abcd")[:size], label="one each", op=Sum, division=division)
    assert np.all(xs[rank].numpy() == sum(range(1, size + 1)))
    # What is one rank's alone is sent to all, since a reduce-scatter would send more.
    _, calls = exchanged([values(200)], [[(0, 200 * (r == 1))] for r in range(size)])
    assert [call[1:3] for call in calls] == [("ncclAllReduce", 200)]
    # Kinds of tensors in one exchange.
    dtypes = ["f4", "i4", "f8", "f2", "u1", "?", "f4", "i8", ml_dtypes.bfloat16]
    sizes = [997 + i for i in range(len(dtypes))]
    for op in (Sum, Max):
        chosen = [d for d in dtypes if op is Sum or np.dtype(d).kind in "iu"]
        given = [values(n, d) for n, d in zip(sizes, chosen, strict=False)]
        _, calls = exchanged(given, evenly(*sizes[: len(given)]), op=op)
        assert {call.name for call in calls} == {"ncclReduceScatter"}
        assert len({call.dtype for call in calls}) == len(set(chosen)) - (op is Sum)  # u1 and ?
    n_calls = len(log())
    rows = ops.reducescatter(on_gpu(np.full((2 * size, 30), RANK + 1)), Sum, group=group)
    assert np.array_equal(rows.numpy(), np.full((2, 30), sum(range(1, size + 1))))
    (call,) = since(n_calls, "AllReduce", "ReduceScatter")
    assert call[1:3] == ("ncclReduceScatter", 60)


def splits() -> None:
    """The native group alone: colors, a rank outside, all in stream order."""
    world = start()
    queue = _native.DeviceQueue(0)
    if world.rank == 0:
        _native.nccl_library([])
        identity = _native.nccl_unique_id()
    else:
        identity = b""
        _native.nccl_library([])
    identity = ops.broadcast_object(identity, group=world)
    whole = _native.NcclGroup(queue, identity, world.rank, world.size, 4096, 20.0)
    assert (whole.rank, whole.size, whole.registered) == (world.rank, world.size, "no")
    #  ranks: 0, 3 | 1 | 2 outside
    color = [0, 1, -1, 0][world.rank]
    place, size = [(0, 2), (0, 1), (0, 0), (1, 2)][world.rank]
    part = whole.split(color, place, size)
    assert (part is None) == (color < 0)
    if part is not None:
        assert (part.rank, part.size) == (place, size)
    second = whole.split(0, world.size - 1 - world.rank, world.size)  # in reverse order
    assert second.rank == world.size - 1 - world.rank

    x, n = on_gpu(np.zeros(5000)), world.size
    tensors = _native.Tensors([x], stream=-1)
    for k in range(5):
        x.fill(np.full(5000, world.rank + k))  # late
        queue.follow(fake_device.stream().handle)
        expected = np.full(n, np.arange(n) + k, dtype=float)
        whole.reduce([tensors], "sum", "none", 1.0, 1.0, 1.0)
        expected[:] = expected.sum()
        if part is not None:
            part.reduce([tensors], "sum", "none", 1.0, 1.0, 1.0)
        expected[[0, 3]] = expected[[0, 3]].sum()
        second.reduce([tensors], "sum", "fp16", 1.0, 1.0, 1.0)
        whole.reduce([tensors], "average", "none", 1.0, 1.0, float(n))
        queue.lead(fake_device.stream().handle)
        got = x.numpy()
        assert np.allclose(got, expected.sum(), rtol=1e-3), (k, got, expected.sum())
    y = on_gpu(np.full(7, world.rank))
    y.numpy()
    second.broadcast([_native.Tensors([y], stream=-1), *[_native.Tensors([])] * (n - 1)])
    queue.lead(fake_device.stream().handle)
    assert np.all(y.numpy() == n - 1)
    del part, second, whole
    names = [call.name for call in log()]
    assert "ncclCommAbort" not in names
    assert names.count("ncclCommDestroy") == 3 - (color < 0)


def registration() -> None:
    """Windows if every rank can, else registration, else nothing: results are the same."""
    n_calls = 0
    for failure, done in (("", "window"), ("1", "no"), ("null", "no")):
        group = start(FAKE_NCCL_REGISTER_FAILS=failure, BUCKET_BYTES="4096")
        usable(group)
        assert group._streams[0].transport().group.registered == done, failure
        assert since(n_calls, "CommWindowRegister")
        n_calls = len(log())


def one_rank_has_no_windows() -> None:
    if RANK == 1:
        os.environ["HORO_LITE_NCCL_LIB"] = compiled(SINCE_2_27)
    group = start()
    usable(group)
    assert not since(0, "CommWindowRegister")
    assert len(since(0, "CommRegister")) == 2  # for direct and for asynchronous calls
    assert group._streams[0].transport().group.registered == "buffer"
    hvd.shutdown()
    assert len(since(0, "CommDeregister")) == 2


# Failures.


def connecting_fails() -> None:
    call = lambda: ops.allreduce(on_gpu([RANK + 1.0]), Sum, group=group)  # noqa: E731
    group = start(NCCL_TIMEOUT_S="1", FAKE_NCCL_INIT_HANGS="1:1")
    fails(call, DeviceError, "rank 1", "1 s", "NCCL_SOCKET_IFNAME")
    assert np.all(ops.allreduce(np.ones(3), Sum, group=group) == group.size)
    os.environ["HORO_LITE_NCCL_TIMEOUT_S"] = "60"
    usable(group)
    group = start(NCCL_TIMEOUT_S="1", FAKE_NCCL_INIT_HANGS="1")
    fails(call, DeviceError, "rank 1", "1 s", "NCCL_SOCKET_IFNAME")
    handle = ops.allreduce_async(on_gpu([1.0]), name="x", group=group)
    fails(lambda: group.synchronize(handle), DeviceError, "rank 1")
    os.environ["HORO_LITE_FAKE_NCCL_INIT_HANGS"] = ""
    os.environ["HORO_LITE_NCCL_TIMEOUT_S"] = "60"
    usable(group)
    group = start(NCCL_TIMEOUT_S="1", FAKE_NCCL_INIT_FAILS="1", FAKE_NCCL_INIT_HANGS="")
    fails(call, DeviceError, "rank 1", "INIT_FAILS", "NCCL_DEBUG")
    os.environ["HORO_LITE_FAKE_NCCL_INIT_FAILS"] = ""
    os.environ["HORO_LITE_NCCL_TIMEOUT_S"] = "60"
    usable(group)
    # NCCL refuses the GPUs, for a reason that is not known before.
    group = start(FAKE_NCCL_INIT_REFUSED=str(RANK))
    with pytest.warns(match="Duplicate GPU detected") if RANK == 0 else warnings.catch_warnings():
        usable(group)
    assert group._streams is not None
    assert group._streams[0].transport().name == "staged"


def fails_soon(n: int, group: Group) -> None:
    """Make rank 1 fail in its n-th operation from here."""
    ops.barrier(group=group)
    where = f"1:{n_operations() + n}"
    os.environ["HORO_LITE_FAKE_NCCL_FAILS_AT"] = where if RANK == 1 else ""


def operations_fail() -> None:
    """Operations fail on rank 1 in different situations: all ranks are notified, and none hangs."""

    def soon(n: int) -> None:
        fails_soon(n, group)

    def step() -> None:
        ops.allreduce(on_gpu(np.ones(5)), Sum, group=group).numpy()  # waits for its stream

    words = "on rank 1, NCCL could not", "FAILS_AT", "NCCL_DEBUG"
    group = start()
    usable(group)
    assert group._streams is not None
    failed = group._streams[0].transport()
    soon(3)
    settles(step, DeviceError, *words)
    usable(group)

    n_each = np.array_split(np.arange(50), group.size)
    division = [[(int(part[0]), int(part[-1]) + 1)] for part in n_each]
    soon(3)
    settles(
        lambda: group.exchange(
            [on_gpu(np.ones(50))], names=["x"], label="divided", division=division
        ),
        DeviceError,
        *words,
    )
    usable(group)

    # What failed is deleted at any time, also while the GPU waits for another rank.
    token = np.ones(1)
    if RANK != 1:
        x = ops.allreduce(on_gpu(np.ones(5)), Sum, group=group)
        del failed
        ops.send(token, 1)
    else:
        for source in (0, 2):
            ops.recv(token, source)
        x = ops.allreduce(on_gpu(np.ones(5)), Sum, group=group)
    assert np.all(x.numpy() == 3)

    # One rank has continued and queued more when another one waits for its GPU.
    soon(2)
    step()

    def queue_only() -> None:
        xs = [ops.allreduce(on_gpu(np.ones(5)), Sum, group=group) for _ in range(3)]
        if RANK != 1:
            xs[0].numpy()
        time.sleep(0.3)

    settles(queue_only, DeviceError, "on rank 1, NCCL could not")
    usable(group)

    # A peer is in a call of the host, which ends.
    soon(1)
    met = ""
    try:
        x = ops.allreduce(on_gpu(np.ones(5)), Sum, group=group)
    except DeviceError as error:  # usually it is raised later, by whatever waits for the result
        met = str(error)
    assert not met or words[0] in met
    if RANK == 1 and not met:
        time.sleep(0.6)
        x.numpy()
    ops.barrier(group=group)
    if not met:
        settles(step, DeviceError, *words)
    usable(group)

    # Only asynchronous calls.
    soon(2)
    settles(
        lambda: group.synchronize(
            ops.allreduce_async(on_gpu([1.0]), name="x", group=group)
        ).numpy(),
        DeviceError,
        "on rank 1, NCCL could not",
    )
    usable(group)

    # Not noticed until the end.
    soon(1)
    met = ""
    try:
        ops.allreduce(on_gpu(np.ones(5)), Sum, group=group).numpy()
    except DeviceError as error:  # as above
        met = str(error)
    if met:
        assert words[0] in met
        hvd.shutdown()
    else:
        fails(hvd.shutdown, DeviceError, *words)
    os.environ["HORO_LITE_FAKE_NCCL_FAILS_AT"] = ""
    usable(start())


def learns_late() -> None:
    """Rank 1, whose GPU fails, has submitted more by the time its program learns about it."""
    abort = watchdog.Watchdog._abort

    def slowly(self: watchdog.Watchdog, error: Exception) -> None:
        if RANK == 1:
            time.sleep(0.5)
        abort(self, error)

    watchdog.Watchdog._abort = slowly  # type: ignore[method-assign]
    group = start()
    for name in "x", None:  # unnamed operations are numbered, and the ranks' counts differ by now
        usable(group)
        fails_soon(2, group)
        settles(
            lambda name=name: group.synchronize(  # type: ignore[misc]
                ops.allreduce_async(on_gpu([1.0]), name=name, group=group)
            ),
            DeviceError,
            "on rank 1, NCCL could not",
        )
    usable(group)


def ahead() -> None:
    """A rank whose host runs ahead keeps nothing of past steps, and its lead is bounded."""
    watchdog.MAX_AHEAD = 20
    go = Path(os.environ["HORO_LITE_FAKE_NCCL_LOG"]).with_name("go")
    group = start()
    usable(group)
    assert group._watchdog is not None
    n_calls, n_ahead, arrays = 60, [0], []

    def step(i: int) -> None:
        x = on_gpu(np.full(5, RANK + i))
        ops.allreduce_(x, Sum, group=group)
        arrays.append(weakref.ref(x))

    if RANK == 0:

        def let_go() -> None:  # once this rank cannot continue, or all is queued
            assert group._watchdog is not None
            while group._watchdog._notices.qsize() < 15:
                time.sleep(0.001)
            time.sleep(0.1)
            n_ahead[0] = group._watchdog._notices.qsize()
            go.touch()

        for i in range(15):
            step(i)
        gc.collect()
        n_kept = sum(array() is not None for array in arrays)
        assert n_kept <= 1, n_kept  # perhaps the latest
        helper = threading.Thread(target=let_go)
        helper.start()
        for i in range(15, n_calls):
            step(i)
        helper.join()
        assert n_ahead[0] <= watchdog.MAX_AHEAD, n_ahead
    else:
        while not go.exists():
            time.sleep(0.001)
        for i in range(n_calls):
            step(i)
    usable(group)


def without_nccl() -> None:
    """Arrays are staged through host memory, and rank 0 says why, once."""

    def travels(words: list[str], **settings: str) -> None:
        group = start(**settings)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                usable(group)
        texts = [str(one.message) for one in caught]
        assert len(texts) == (RANK == 0), texts
        for word in words if texts else ():
            assert word in texts[0], f"{word!r} is not in {texts[0]}"
        assert group._streams[0].transport().name == "staged"

    install = ["go through the host's memory", "on rank 0", "pip install", "HORO_LITE_NCCL_LIB"]
    good = os.environ["HORO_LITE_NCCL_LIB"]
    travels(["given to init() is the CPU"], DEVICE="cpu")
    os.environ["HORO_LITE_DEVICE"] = ""
    travels([*install, "/nowhere/libnccl.so.2", "no such file"], NCCL_LIB="/nowhere/libnccl.so.2")
    travels([*install, good, "2.17.1", "2.18"], NCCL_LIB=good, FAKE_NCCL_VERSION="21701")
    lacks = compiled(["ncclCommSplit"])
    travels([*install, lacks, "ncclCommSplit"], NCCL_LIB=lacks, FAKE_NCCL_VERSION="22707")
    mine = "22707" if RANK == 0 else "22808"
    travels(
        ["22707 on rank 0", "22808 on rank 1", good, "one version"],
        NCCL_LIB=good,
        FAKE_NCCL_VERSION=mine,
    )
    for name, value in (("NCCL_COMM_BLOCKING", "1"), ("NCCL_COMM_ID", "127.0.0.1:7000")):
        if RANK == 1:
            os.environ[name] = value
        travels(["on rank 1", f"{name}={value}", "unset it"])
        os.environ.pop(name, None)


# Mismatches.


def mismatches() -> None:
    group = start()
    usable(group)
    odd = group.rank == group.size - 1

    def gpu_sum() -> None:
        ops.allreduce(on_gpu(np.ones(5)), Sum, group=group).numpy()

    others: dict[str, Callable[[], Any]] = {
        "barrier": partial(ops.barrier, group=group),
        "broadcast": lambda: ops.broadcast(on_gpu(np.ones(5)), group=group),
        "allgather": lambda: ops.allgather(on_gpu(np.ones(5)), group=group),
        "alltoall": lambda: ops.alltoall(on_gpu(np.ones(2 * group.size)), group=group),
        "on the host": lambda: ops.allreduce(np.ones(3), Sum, group=group),
        "broadcast_object": lambda: ops.broadcast_object(3, group=group),
        "allreduce": lambda: ops.allreduce(on_gpu(np.ones(4), np.int32), Average, group=group),
    }

    def divided(at: int) -> None:
        parts = [[(0, at)], [(at, 8)], [(8, 8)]]
        x = on_gpu(np.ones(8))
        group.exchange([x], names=["x"], label="averages", division=parts[: group.size])

    text = settles(partial(divided, 4 if odd else 5), hvd.MismatchError, "averages", "divided: ")
    assert f"rank {group.size - 1}" in text, text
    usable(group)
    for what, other in others.items():
        for odd_sums in (True, False) if what == "barrier" else (True,):
            call = gpu_sum if odd == odd_sums else other
            text = settles(call, hvd.MismatchError, "allreduce", what)
            assert f"rank {group.size - 1}" in text, text
            ops.barrier(group=group)
            usable(group)

    # Both use the host, as without a GPU.
    fails(
        partial(ops.barrier, group=group) if odd else others["allgather"],
        hvd.MismatchError,
        "barrier",
        "allgather",
    )
    usable(group)


def joined() -> None:
    """While a rank has joined, the others' GPU operations fail; none hangs, all work later."""
    group = start()

    def others() -> None:
        x = on_gpu(np.ones(5))
        settles(
            lambda: ops.allreduce(x, Sum, group=group).numpy(),
            hvd.MismatchError,
            "join()",
            "allreduce",
        )
        for call in (
            lambda: ops.allreduce(x, Sum, group=group),
            lambda: ops.allgather(x, group=group),
            lambda: ops.broadcast(x, group=group),
            lambda: group.synchronize(ops.allreduce_async(x, Sum, group=group)),
            lambda: group.synchronize(ops.allgather_async(x, name="rows", group=group)),
        ):
            fails(call, hvd.MismatchError, "needs every rank, but rank 1")
        assert ops.allreduce(np.ones(3), Sum, group=group)[0] == group.size - 1
        assert (
            group.synchronize(ops.allreduce_async(np.ones(3), Sum, group=group))[0]
            == group.size - 1
        )

    for _ in range(2):
        usable(group)
        if group.rank != 1:
            others()
        assert hvd.join() != 1
    usable(group)


class Slot:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.grad: Any = None


def optimizers() -> None:
    group = start(BUCKET_BYTES="4000")
    usable(group)
    odd = group.rank == group.size - 1

    class Descent:
        def __init__(self) -> None:
            self.params = [on_gpu(np.zeros(900)) for _ in range(4)]
            self.grads = [on_gpu(np.full(900, RANK)) for _ in range(4)]

        def step(self) -> None:
            pass

    def steps(*optimizers: Any) -> Callable[[], None]:
        def step() -> None:
            for optimizer in optimizers:
                optimizer.synchronize()

        return step

    # Differences that exist from the first step on are found in it.
    compression = hvd.Compression.fp16 if odd else hvd.Compression.bf16
    wrong = hvd.DistributedOptimizer(Descent(), group=group, compression=compression)
    fails(steps(wrong), hvd.MismatchError, "fp16", "bf16")
    usable(group)
    wrong = hvd.DistributedOptimizer(Descent(), group=group, bucket_bytes=8000 if odd else 4000)
    fails(steps(wrong), hvd.MismatchError, "bucket")
    usable(group)
    # Two known optimizers are exchanged on one rank.
    a, b = (hvd.DistributedOptimizer(Descent(), group=group) for _ in range(2))
    for _ in range(2):
        steps(a, b)()
    settles(steps(b, a) if odd else steps(a, b), hvd.MismatchError, "optimizer")
    usable(group)

    # Streaming, with buckets in flight when something changes.
    def reducer() -> tuple[Reducer, list[Slot]]:
        slots = [Slot(on_gpu(np.zeros(900))) for _ in range(6)]
        named = [(f"p{i}", slot) for i, slot in enumerate(slots)]
        return Reducer(group, Values(), named, bucket_bytes=4000), slots

    def stream(
        reducer: Reducer, slots: list[Slot], sizes: list[int | None], announced: Any = None
    ) -> None:
        for i, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
            slot.grad = None if size is None else on_gpu(np.full(size, group.rank + i))
        for i in range(6) if announced is None else announced:
            if slots[i].grad is not None:
                reducer.ready(i)
        reducer.finish()

    def holds(slots: list[Slot], givers: dict[int, int] | None = None) -> None:
        for i, slot in enumerate(slots):
            ranks = range((givers or {}).get(i, group.size))
            expected = sum(r + i for r in ranks) / group.size
            assert np.allclose(slot.grad.numpy(), expected), i

    usual: list[int | None] = [900] * 6
    for changed in (0, 2, 5):
        one, slots = reducer()
        for _ in range(3):
            stream(one, slots, usual)
            holds(slots)
        other = [*usual]
        other[changed] = 450
        # The same on all ranks: a step without overlap, and then as before.
        for _ in range(2):
            stream(one, slots, other)
            holds(slots)
        for _ in range(2):
            stream(one, slots, usual)
            holds(slots)
        # On one rank only, and so often that the comparison has ended.
        settles(
            lambda r=one, s=slots, o=other: stream(r, s, o if odd else usual),
            hvd.MismatchError,
        )
        usable(group)
        one, slots = reducer()
        for _ in range(2):
            stream(one, slots, usual)
        # A gradient that one rank does not announce, or does not have.
        for _ in range(2):
            stream(one, slots, usual, [i for i in range(6) if not (odd and i == changed)])
            holds(slots)
        lacking: list[int | None] = [None if odd and i == changed else 900 for i in range(6)]
        for _ in range(3):
            stream(one, slots, lacking)
            holds(slots, {changed: group.size - 1})
        for _ in range(2):
            stream(one, slots, usual)
            holds(slots)

    # Rows, which travel in host memory here.
    for n_dense in (1, 3):  # one bucket, or three
        one, slots = reducer()
        dense: list[int | None] = [900 if i < n_dense else None for i in range(6)]

        def step(
            here: bool, one: Reducer = one, slots: list[Slot] = slots, dense: Any = dense
        ) -> Any:
            for i, (slot, size) in enumerate(zip(slots, dense, strict=True)):
                slot.grad = None if size is None else on_gpu(np.full(size, group.rank + i))
            return one.finish(rows={5: ((1, "float32"), None)} if here else {}).plan.rows

        agreed = ((5, (1, "float32")),)
        for here in (False, True, False, True, True):
            for _ in range(2):
                assert step(here) == (agreed if here else ())
                holds(slots[:n_dense])
        for _ in range(3):  # one rank lacks them
            assert step(not odd) == agreed
            holds(slots[:n_dense])
        for _ in range(2):
            assert step(False) == ()
        settles(lambda: step(odd), hvd.MismatchError, "with rows of p5")
        usable(group)


class Values(fake_device.FakeGpuAdapter):
    def value(self, parameter: Slot) -> Any:
        return parameter.value


def one_call_ahead() -> None:
    group = start()
    usable(group)
    if RANK == 0:
        ops.allreduce(on_gpu(np.ones(5)), Sum, group=group)
    hvd.shutdown()
    print("came through", flush=True)


def stalled() -> None:
    """One rank is late, and the other waits for its GPU, in a call outside this package."""
    group = start()
    usable(group)
    limit_waits(1.5, warn_s=0.5)

    def late() -> None:
        time.sleep(4)

    x = on_gpu(np.ones(1000))
    if RANK == 1:
        late()
    else:
        ops.allreduce_(x, Sum, name="x", group=group)
        x.numpy()
    fails(
        lambda: ops.allreduce_(x, Sum, group=group),
        hvd.StallError,
        "rank 1 did not arrive",
        "allreduce 'x'",
    )
    print("told", flush=True)
    if RANK == 1:
        Path("rank 1 was told").touch()
    while not Path("rank 1 was told").exists():  # the end of rank 0 would be another error
        time.sleep(0.01)


def killed() -> None:
    """One rank dies; the others wait for their GPUs."""
    group = start()
    usable(group)
    if RANK == 1:
        time.sleep(0.3)
        print("FAULT", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    x = on_gpu(np.ones(1000))
    for _ in range(20):
        ops.allreduce_(x, Sum, group=group)
    x.numpy()
    ops.allreduce_(x, Sum, group=group)
    print("came through", flush=True)


def killed_while_another_is_ahead() -> None:
    """CUDA blocks a rank's thread whose stream is full, and its watchdog must be able to run."""
    group = start()
    xs = [on_gpu(np.ones(1000)) for _ in range(3)]

    def step() -> None:
        ops.grouped_allreduce_(xs, compression=hvd.Compression.fp16, group=group)

    step()
    ops.barrier(group=group)
    if RANK == 1:
        time.sleep(0.7)
        os.kill(os.getpid(), signal.SIGKILL)
    fails(lambda: [step() for _ in range(10_000)], hvd.PeerLostError, "rank 1")
    print("told", flush=True)
    os._exit(0)


def killed_while_progress_threads_are_ahead() -> None:
    """CUDA blocks the threads that make the rounds of the engines: they cannot see a dead rank."""
    group = start()
    xs = [on_gpu(np.ones(1000)) for _ in range(3)]
    n_steps = 0

    def step() -> None:
        nonlocal n_steps
        how: dict[str, Any] = {"compression": hvd.Compression.fp16, "group": group}
        group.synchronize(ops.grouped_allreduce_async_(xs, name="xs", **how))
        n_steps += 1

    def die_once_blocked() -> None:
        seen = 0
        while n_steps < 20 or n_steps > seen:
            seen = n_steps
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    step()
    ops.barrier(group=group)
    if RANK == 1:
        xs[0].queue(lambda _: time.sleep(60))
        threading.Thread(target=die_once_blocked, daemon=True).start()
    fails(lambda: [step() for _ in range(10_000)], hvd.PeerLostError, "rank 1")
    assert n_steps >= 10
    print("told", flush=True)
    os._exit(0)


def full_streams() -> None:
    """CUDA blocks at some 1,000 commands: other threads, such as the watchdog, must still run."""
    os.environ["HORO_LITE_TEST_GPUS"] = "a"
    queue = _native.DeviceQueue(0)
    for command in (queue.follow, queue.lead, lambda stream: queue.hold(object(), stream)):
        stream, gate = fake_device.new_stream(), threading.Event()
        stream.call(gate.wait)

        def fill(command: Callable[[int], None] = command, stream: int = stream.handle) -> None:
            for _ in range(1100):
                command(stream)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "the stream is not full"
        gate.set()
        thread.join(20)
        assert not thread.is_alive()


# Ranks and GPUs that are late.


def shuts_down_behind_a_busy_gpu() -> None:
    """What was queued before shutdown() is done, however late a GPU is."""
    group = start()
    usable(group)
    x = on_gpu(np.full(1000, RANK + 1))
    if RANK == 1:
        x.queue(lambda _: time.sleep(5.5))
    ops.allreduce_(x, Sum, group=group)
    hvd.shutdown()
    assert np.all(x._memory == sum(range(1, group.size + 1)))


def leaves_beside_one_call_too_many() -> None:
    """What all ranks queued is done, although one has queued more and the other leaves."""
    group = start()
    usable(group)
    x = on_gpu(np.full(1000, RANK + 1))
    x.queue(lambda _: time.sleep(1))
    ops.allreduce_(x, Sum, group=group)
    if RANK == 0:
        y = on_gpu(np.ones(1000))
        settles(lambda: ops.allreduce_(y, Sum, group=group), hvd.PeerLostError, "rank 1 has left")
    else:
        hvd.shutdown()
    assert np.all(x._memory == sum(range(1, group.size + 1)))
    print("all is well", flush=True)
    os._exit(0)


def late_at_the_first_use() -> None:
    """NCCL connects at the first operation of a kind, whose time is no limit for late ranks."""
    group = start(NCCL_TIMEOUT_S="1")
    usable(group)
    if RANK == 0:
        time.sleep(2.5)
    x = on_gpu(np.full(10_000, RANK + 1))
    ops.allreduce_(x, Sum, group=group)
    assert np.all(x.numpy() == sum(range(1, group.size + 1)))


def interrupted_at_the_first_use() -> None:
    """Ctrl-C ends the wait for ranks that do not come."""
    go = Path(os.environ["HORO_LITE_FAKE_NCCL_LOG"]).with_name("go")
    group = start(NCCL_TIMEOUT_S="600")
    usable(group)
    x = on_gpu(np.full(10_000, RANK + 1))
    if RANK == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ops.allreduce_(x, Sum, group=group)
        print("told", flush=True)
        go.touch()
    else:
        while not go.exists():
            time.sleep(0.01)
        settles(lambda: ops.allreduce_(x, Sum, group=group), hvd.HoroLiteError)
        print("told", flush=True)
    os._exit(0)


def backward_overlaps() -> None:
    """A bucket that leaves early does not hold up what the caller's stream does next."""
    go = Path(os.environ["HORO_LITE_FAKE_NCCL_LOG"]).with_name("go")
    group = start()

    class Parameter:
        def __init__(self) -> None:
            self.data, self.grad = (on_gpu(np.full(1000, RANK + i)) for i in range(2))

    class Adapter(fake_device.FakeGpuAdapter):
        def gradient(self, parameter: Any) -> Any:
            return parameter.grad

        def value(self, parameter: Any) -> Any:
            return parameter.data

    def wait_for_go(_: Any) -> None:
        until = time.monotonic() + 15
        while not go.exists() and time.monotonic() < until:
            time.sleep(0.001)

    first, last = Parameter(), Parameter()
    reducer = Reducer(group, Adapter(), [("first", first), ("last", last)], bucket_bytes=4000)
    reducer.finish()  # agrees on a plan
    mean = np.mean([rank + 1 for rank in range(group.size)])
    for x in (first.grad, last.grad):
        assert np.all(x.numpy() == mean)
        x.fill(np.full(1000, RANK))
    if RANK == 1:
        last.grad.queue(wait_for_go)
    reducer.ready(1)
    if RANK == 0:
        ran = threading.Event()
        first.grad.queue(lambda _: ran.set())
        assert ran.wait(10), "the next kernel of backward() waits for the bucket"
        go.touch()
    reducer.ready(0)
    reducer.finish()
    # In stream order, without waiting on the host.
    doubled = [x.copy().add(1) for x in (first.grad, last.grad)]
    for x in doubled:
        assert np.all(x.numpy() == np.mean(range(group.size)) + 1)


def graphs() -> None:
    """A captured step gives at each replay what a step gives, also beside calls that were not."""
    group = start(BUCKET_BYTES="4096")
    size = group.size
    xs = [on_gpu(np.zeros(n)) for n in (700, 300)]

    def step() -> None:
        ops.grouped_allreduce_(xs, Average, compression=hvd.Compression.fp16, group=group)

    def fill(k: int) -> None:
        for x in xs:
            x.fill(np.full(x.shape, RANK + k))

    step()
    y = on_gpu(np.zeros(100))
    halves = [[(0, 60)], [(60, 100)]]

    def divided() -> None:
        group.exchange([y], names=["y"], label="divided", division=halves)

    divided()
    with fake_device.capture() as replay:
        divided()
    n_calls = len(log())
    for k in range(3):
        y.fill(np.full(100, RANK + k))
        replay(fake_device.stream())
        begin, end = halves[RANK][0]
        assert np.all(y.numpy()[begin:end] == (size - 1) / 2 + k), k
    assert not since(n_calls, "AllReduce", "ReduceScatter")

    n_calls = len(log())
    fill(5)
    with fake_device.capture() as replay:
        step()
    n_captured = len(since(n_calls, "AllReduce"))
    assert n_captured == 2, "the exponents, and one bucket"
    for x in xs:
        assert np.all(x.numpy() == RANK + 5), "it has run although it was only captured"
    for k in range(4):
        fill(k)
        replay(fake_device.stream())
        if k % 2:
            alone = ops.allreduce(on_gpu(np.full(10, RANK + k)), Sum, group=group)
            assert np.all(alone.numpy() == sum(range(size)) + size * k)
        for x in xs:
            assert np.all(x.numpy() == (size - 1) / 2 + k), k
    assert len(since(n_calls, "AllReduce")) == n_captured + 2, "a replay was more than a replay"
    usable(group)


def keeps_nan() -> None:
    """In the minimum and maximum, where NCCL loses it."""
    group = start()
    x = np.array([np.nan if RANK == 0 else 1.0, 2.0 + RANK, np.nan if RANK == 1 else 1.0])
    for dtype in (np.float16, np.float32, np.float64):
        for op, last in ((Min, 2.0), (Max, 1.0 + group.size)):
            got = ops.allreduce(on_gpu(x, dtype), op, group=group).numpy()
            assert np.isnan(got[[0, 2]]).all(), (dtype, op, got)
            assert got[1] == last


# All kinds of calls in random order.

KINDS = ["direct", "direct_", "grouped", "compressed", "async", "async", "async_", "gather"]
KINDS += ["gather_", "broadcast", "scatter", "alltoall", "host", "host_async", "wait", "look"]


def results_are_kept_for_late_readers(group: Group) -> None:
    """Memory that an asynchronous call allocated returns to its stream only after being read."""
    parts = [np.full((5, 3), r + 1.0) for r in range(group.size)]
    handles = [ops.allgather_async(on_gpu(parts[group.rank]), group=group) for _ in range(3)]
    time.sleep(0.05)
    fake_device.stream().call(lambda: time.sleep(0.2))
    results = []
    while handles:
        results.append(group.synchronize(handles.pop()))
        time.sleep(0.02)  # everything that is not kept is freed now
    for result in results:
        assert np.array_equal(result.numpy(), np.concatenate(parts))


def sequences() -> None:
    group = start(BUCKET_BYTES="20000")
    results_are_kept_for_late_readers(group)
    seed = int(os.environ.get("HORO_LITE_TEST_SEED") or 1)
    n_operations = int(os.environ.get("HORO_LITE_TEST_N") or 150)
    alike = random.Random(seed)
    rank, size = group.rank, group.size
    checks: list[Callable[[], None]] = []
    handles: dict[str, Any] = {}

    def values(number: int, shape: tuple[int, ...], dtype: Any) -> list[np.ndarray]:
        n = int(np.prod(shape))
        return [
            ((np.arange(n) * (r + 1) + r + number) % 7 + 1).reshape(shape).astype(dtype)
            for r in range(size)
        ]

    def later(got: Any, expected: np.ndarray, what: object, rtol: float = 0) -> None:
        def check() -> None:
            found = got.numpy()
            assert found.dtype == expected.dtype, what
            assert found.shape == expected.shape, what
            wide = found.astype(float), expected.astype(float)
            assert np.allclose(*wide, rtol=rtol, atol=0), (seed, what, found, expected)

        checks.append(check)

    for number in range(n_operations):
        kind = alike.choice(KINDS)
        n = alike.choice([0, 1, 5, 300, 5000, alike.randrange(200_000)])
        dtype = alike.choice([np.float32, np.float64, np.int32, np.float32])
        op = alike.choice([Sum, Max, Min, Average])
        if op is Average and dtype is np.int32:
            op = Sum
        each = values(number, (n,), dtype)
        what = (number, kind, n, dtype.__name__, op.name)
        reduced = allreduce_reference(each, op.value).astype(dtype)
        rtol = 1e-6 if op is Average else 0
        name = f"n{number}"
        with fake_device.another_stream() if alike.random() < 0.2 else warnings.catch_warnings():
            if kind == "direct":
                later(
                    ops.allreduce(on_gpu(each[rank], dtype), op, group=group), reduced, what, rtol
                )
            elif kind == "direct_":
                x = on_gpu(each[rank], dtype)
                ops.allreduce_(x, op, group=group)
                x.add(1)
                later(x, reduced + dtype(1), what, rtol)
            elif kind == "compressed":
                x = ops.allreduce(
                    on_gpu(each[rank], np.float32),
                    Sum,
                    compression=hvd.Compression.fp16,
                    group=group,
                )
                later(x, allreduce_reference(each, "sum").astype(np.float32), what, 2e-3)
            elif kind == "grouped":
                shapes = [(alike.randrange(3000),) for _ in range(alike.randrange(1, 6))]
                group_of = [values(number + k, s, dtype) for k, s in enumerate(shapes)]
                got = ops.grouped_allreduce(
                    [on_gpu(v[rank], dtype) for v in group_of], op, group=group
                )
                for y, v in zip(got, group_of, strict=True):
                    later(y, allreduce_reference(v, op.value).astype(dtype), what, rtol)
            elif kind == "async":
                handle = ops.allreduce_async(on_gpu(each[rank], dtype), op, name=name, group=group)
                handles[name] = handle, reduced, what, rtol
            elif kind == "async_":
                x = on_gpu(each[rank], dtype)
                handles[name] = (
                    ops.allreduce_async_(x, op, name=name, group=group),
                    reduced,
                    what,
                    rtol,
                )
            elif kind == "gather":
                parts = [v[: (r + 1) * n // size] for r, v in enumerate(each)]
                got = ops.allgather(on_gpu(parts[rank], dtype), group=group)
                later(got, allgather_reference(parts), what)
            elif kind == "gather_":
                owners = [alike.randrange(size) for _ in range(alike.randrange(1, 5))]
                xs = [on_gpu(each[rank], dtype) for _ in owners]
                call = AllGatherInPlace(name, owners, [f"x{i}" for i in range(len(xs))])
                group.run(call, Part(group.memory(xs)))
                for x, owner in zip(xs, owners, strict=True):
                    later(x, each[owner], what)
            elif kind == "broadcast":
                root = alike.randrange(size)
                later(ops.broadcast(on_gpu(each[rank], dtype), root, group=group), each[root], what)
            elif kind == "scatter":
                part = ops.reducescatter(on_gpu(each[rank], dtype), op, group=group)
                later(part, reduced[share_of(n, size, rank)], what, rtol)
            elif kind == "alltoall":
                rows = n // size
                sent = [v[: rows * size] for v in each]
                got = ops.alltoall(on_gpu(sent[rank], dtype), group=group)
                expected = [v[rank * rows : (rank + 1) * rows] for v in sent]
                later(got, np.concatenate(expected), what)
            elif kind == "host":
                assert np.allclose(
                    ops.allreduce(each[rank].copy(), op, group=group), reduced, rtol=1e-6
                )
            elif kind == "host_async":
                handle = ops.allreduce_async(each[rank].copy(), op, name=name, group=group)
                assert np.allclose(group.synchronize(handle), reduced, rtol=1e-6)
            elif kind == "wait" and handles:
                for waited in alike.sample(sorted(handles), alike.randrange(1, len(handles) + 1)):
                    handle, expected, which, bound = handles.pop(waited)
                    later(group.synchronize(handle), expected, which, bound)
            elif kind == "look":
                while checks:
                    checks.pop()()
    for handle, expected, which, bound in handles.values():
        later(group.synchronize(handle), expected, which, bound)
    for check in checks:
        check()


def serve(job: str) -> None:
    """Do a job on ranks that serve many, and leave their environment as it was."""
    before = dict(os.environ)
    try:
        globals()[job]()
    finally:
        hvd.shutdown()
        os.environ.clear()
        os.environ.update(before)


def main(job: str) -> None:
    faulthandler.dump_traceback_later(100)
    globals()[job]()
    hvd.shutdown()
    print("all is well", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
