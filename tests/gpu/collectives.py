"""Checks of the public API with arrays on a GPU, run by every rank: see `make gpu-check`.

    collectives.py LIBRARY nccl|staged|alone [--lose-a-peer] [--only NAME]

Every rank computes the inputs of all ranks, and the expected results with the oracle, and compares.
No two ranks' inputs are the same. Sums are of small whole numbers, exact in every dtype, unless a
check is about rounding.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from libraries import LIBRARIES, Host, Library
from oracle import allgather_reference, allreduce_reference, alltoall_reference, share_of
from ranks import join, use_nccl_alone

import horo_lite as hvd
from horo_lite import ops
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Max, Min, Product, Sum

Check = Callable[[Group, Library], None]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def everyone(group: Group, shape: Sequence[int], dtype: str) -> list[Host]:
    """Return the contributions of all ranks: 1 … 5, or 0 and 1."""
    n = int(np.prod(shape))
    values = [(np.arange(n) * (rank + 1) + rank) % 5 + 1 for rank in range(group.size)]
    whole = [v % 2 if dtype == "bool" else v for v in values]
    return [v.reshape(shape).astype(dtype_of(dtype)) for v in whole]


def total(group: Group) -> int:
    """Return the sum if rank r contributes r + 1."""
    return sum(range(1, group.size + 1))


def full(group: Group, n: int = 1000) -> Host:
    return np.full(n, group.rank + 1, np.float32)


def summed(inputs: Sequence[Host]) -> Host:
    return allreduce_reference(inputs, "sum").astype(inputs[0].dtype)


def assert_same(got: Host, expected: Host, what: object) -> None:
    assert got.dtype == expected.dtype, (what, got.dtype)
    assert np.array_equal(got, expected), (what, got, expected)


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """Return the text of the error, or "" if there is none."""
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def check_every_dtype_and_op(group: Group, library: Library) -> None:
    for dtype in library.dtypes:
        inputs = everyone(group, (3, 700), dtype)
        for op in (Average, Sum, Min, Max, Product):
            if dtype == "bool" and op is Average:
                continue
            x = library.make(inputs[group.rank])
            expected = allreduce_reference(inputs, op.value).astype(inputs[0].dtype)
            got = ops.allreduce(x, op, group=group)
            assert type(got) is type(x)
            assert_same(library.read(got), expected, (dtype, op))
            assert_same(library.read(x), inputs[group.rank], "the input was changed")
            if library.writable:
                assert ops.allreduce_(x, op, group=group) is x
                assert_same(library.read(x), expected, (dtype, op, "in place"))


def check_shapes_and_groups(group: Group, library: Library) -> None:
    shapes = [(), (0,), (1,), (5, 3), (100_003,), (2, 3, 4, 5)]
    for dtypes in (["float32"] * 6, ["float32", "int64", "float64", "float16", "int32", "uint8"]):
        inputs = [everyone(group, s, d) for s, d in zip(shapes, dtypes, strict=True)]
        xs = [library.make(each[group.rank]) for each in inputs]
        for got, each in zip(ops.grouped_allreduce(xs, Sum, group=group), inputs, strict=True):
            assert_same(library.read(got), summed(each), each[0].shape)
        if library.writable:
            ops.grouped_allreduce_(xs, Sum, group=group)
            for x, each in zip(xs, inputs, strict=True):
                assert_same(library.read(x), summed(each), each[0].shape)


def check_views_in_place(group: Group, library: Library) -> None:
    for cut in (np.s_[::2], np.s_[:, 1:3], np.s_[1]):
        base = library.make(np.full((6, 8), group.rank + 1, np.float32))
        ops.allreduce_(base[cut], Sum, group=group)
        expected = np.full((6, 8), group.rank + 1, np.float32)
        expected[cut] = total(group)
        assert_same(library.read(base), expected, cut)


def check_arrays_that_cannot_be_written(group: Group, library: Library) -> None:
    x = library.make(full(group))
    text = raised(ValueError, lambda: ops.allreduce_(x, Sum, group=group))
    assert "without the underscore" in text, text


def check_narrow_wires(group: Group, library: Library) -> None:
    """2e-7, 6e4 and 1e30 survive float16 in one exchange; inf and nan do not spread; same bits."""
    magnitudes = [2e-7, 6e4, 1e30, 1.0]
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        random = np.random.default_rng(3)
        inputs = [
            [(m * random.uniform(0.5, 1, 3000)).astype(np.float32) for m in magnitudes]
            for _ in range(group.size)
        ]
        for x in inputs[-1][-1:]:
            x[3], x[700] = np.inf, np.nan
        mine = [library.make(x) for x in inputs[group.rank]]
        got = [
            library.read(x)
            for x in ops.grouped_allreduce(mine, compression=compression, group=group)
        ]
        bound = 2.0**-9 if compression.wire == "fp16" else 2.0**-6
        for i, x in enumerate(got):
            mean = np.mean([each[i].astype(np.float64) for each in inputs], axis=0)
            finite = np.isfinite(mean)
            assert not np.isfinite(x[~finite]).any(), (compression, i)
            error = np.abs(x[finite] / mean[finite] - 1).max()
            assert error < bound, (compression, magnitudes[i], error)
        digest = hashlib.sha256(b"".join(x.tobytes() for x in got)).hexdigest()
        assert len(set(ops.allgather_object(digest, group=group))) == 1, "the ranks' bits differ"


def check_weights(group: Group, library: Library) -> None:
    """A rank of weight 0 contributes nothing, whatever its arrays contain."""
    weights = [3.0] * group.size
    weights[-1] = 0.0 if group.size > 1 else 2.0
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        values = full(group) if weights[group.rank] else np.full(1000, np.nan, np.float32)
        x = library.make(values)
        group.exchange(
            [x],
            names=["x"],
            label="weighted",
            weight=weights[group.rank],
            compression=compression,
        )
        mean = sum(w * (r + 1) for r, w in enumerate(weights)) / sum(weights)
        assert np.allclose(library.read(x), mean, rtol=2e-3), compression


def check_factors(group: Group, library: Library) -> None:
    x = library.make(full(group))
    got = ops.allreduce(x, Sum, prescale_factor=0.5, postscale_factor=3.0, group=group)
    assert np.all(library.read(got) == total(group) * 1.5)


def check_gathers_and_the_like(group: Group, library: Library) -> None:
    size, rank = group.size, group.rank
    for dtype in ("float32", "int64", "bool"):
        rows = [everyone(group, (r + 1, 4), dtype)[r] for r in range(size)]
        got = library.read(ops.allgather(library.make(rows[rank]), group=group))
        assert_same(got, allgather_reference(rows), "allgather")
    for root in range(size):
        values = everyone(group, (40, 5), "float32")
        got = library.read(ops.broadcast(library.make(values[rank]), root, group=group))
        assert_same(got, values[root], "broadcast")
    rows = everyone(group, (2 * size + 1, 3), "float32")
    got = library.read(ops.reducescatter(library.make(rows[rank]), Sum, group=group))
    share = share_of(2 * size + 1, size, rank)
    assert_same(got, summed(rows)[share], "reducescatter")
    splits = [[(s + d) % 3 for d in range(size)] for s in range(size)]
    parts = [everyone(group, (sum(splits[r]), 2), "int32")[r] for r in range(size)]
    result, received = ops.alltoall(library.make(parts[rank]), splits[rank], group=group)
    assert_same(library.read(result), alltoall_reference(parts, splits, rank), "alltoall")
    assert received.tolist() == [splits[s][rank] for s in range(size)]


def check_divided_results(group: Group, library: Library) -> None:
    """Each rank receives its part of the results, also of tensors larger than a bucket."""
    rank, size = group.rank, group.size
    n_large = 100_000 if library.name == "fake device" else 35_000_000
    shapes = [(64 * size,), (3, 700), (5,), (0,), (n_large,)]

    def cuts(n: int) -> list[int]:
        return [n * r // size for r in range(size)] + [n]

    each = [cuts(int(np.prod(shape))) for shape in shapes]
    division = [[(c[r], c[r + 1]) for c in each] for r in range(size)]
    wires = [("float32", hvd.Compression.fp16), ("float32", hvd.Compression.bf16)]
    whole = [(dtype, hvd.Compression.none) for dtype in library.dtypes if dtype != "bool"]
    for dtype, compression in whole + wires:
        some = slice(None) if (dtype, compression.wire) == ("float32", "none") else slice(4)
        inputs = [everyone(group, shape, dtype) for shape in shapes[some]]
        xs = [library.make(x[rank]) for x in inputs]
        names = [str(shape) for shape in shapes[some]]
        parts = [of_rank[some] for of_rank in division]
        how: dict[str, Any] = {"names": names, "compression": compression, "op": Sum}
        group.exchange(xs, label="divided", division=parts, **how)
        for x, given, (begin, end) in zip(xs, inputs, parts[rank], strict=True):
            got = library.read(x).reshape(-1)[begin:end]
            assert_same(got, summed(given).reshape(-1)[begin:end], (dtype, given[0].shape))


def check_asynchronous_forms(group: Group, library: Library) -> None:
    """By name, in a different order on every rank."""
    names = [f"t{i}" for i in range(6)]
    names = names[group.rank :] + names[: group.rank]
    handles = {
        name: ops.allreduce_async(
            library.make(full(group) * int(name[1])), Sum, name=name, group=group
        )
        for name in names
    }
    for name in reversed(names):
        got = library.read(group.synchronize(handles[name]))
        assert np.all(got == int(name[1]) * total(group)), name
    gathered = ops.allgather_async(library.make(full(group, 2)), name="g", group=group)
    sent = ops.broadcast_async(library.make(full(group, 2)), 0, name="b", group=group)
    assert np.all(library.read(group.synchronize(sent)) == 1)
    expected = np.repeat(np.arange(1, group.size + 1), 2)
    assert np.array_equal(library.read(group.synchronize(gathered)), expected)


def check_order_of_streams(group: Group, library: Library) -> None:
    """Work queued before a call is seen by it, work queued after it sees the result.

    The stream is not the default one, it is busy, and the host does not wait for it in between.
    """
    library.read(library.doubled(ops.allreduce(library.make(full(group)), Sum, group=group)))
    with library.another_stream():
        for turn in range(3):
            late = library.late(full(group) + turn)
            got = library.doubled(ops.allreduce(late, Sum, group=group))
            waited = not library.is_busy(late)
            expected = 2.0 * (total(group) + turn * group.size)
            assert np.all(library.read(got) == expected), (turn, expected, library.read(got))
            if library.writable:
                late = library.late(full(group))
                ops.allreduce_(late, Sum, group=group)
                assert np.all(library.read(library.doubled(late)) == 2 * total(group)), turn
            if over_nccl(group):
                assert not waited, "the call waited for the GPU"


def check_memory_may_go_at_once(group: Group, library: Library) -> None:
    """Memory of unreferenced arrays returns to its allocator immediately, in stream order."""
    for turn in range(3):
        with library.another_stream():
            results = [
                ops.allreduce(library.make(full(group, 50_000) + i), Sum, group=group)
                for i in range(4)
            ]
            gc.collect()
            for i, x in enumerate(results):
                assert np.all(library.read(x) == total(group) + i * group.size), (turn, i)


SHAPES = [(300, 40), (40,), (1,), (1000,)]


def check_optimizer(group: Group, library: Library) -> None:
    """Parameters start as the last rank's; steps on shards equal steps on the whole batch."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        start = [np.full(shape, group.rank + 1, np.float32) for shape in SHAPES]
        inner, params = library.optimizer(start)
        root = group.size - 1
        hvd.broadcast_parameters(params, root, group=group)
        optimizer = hvd.DistributedOptimizer(inner, group=group, compression=compression)
        expected = [np.full(shape, root + 1, np.float64) for shape in SHAPES]
        for step in range(4):
            gradients = [
                [np.full(s, r + 2 * i + 4 * step, np.float32) for i, s in enumerate(SHAPES)]
                for r in range(group.size)
            ]
            library.give(inner, [library.make(x) for x in gradients[group.rank]])
            optimizer.step()
            for i, value in enumerate(expected):
                value -= 0.5 * np.mean([each[i] for each in gradients], axis=0)
        for param, value in zip(params, expected, strict=True):
            assert np.allclose(library.read(param), value, rtol=2e-3), compression


def check_graph_capture(group: Group, library: Library) -> None:
    """torch: an exchange is captured once and replayed with new gradients."""
    torch = library.torch  # type: ignore[attr-defined]
    inner, _ = library.optimizer([np.zeros(s, np.float32) for s in SHAPES])
    optimizer = hvd.DistributedOptimizer(inner, group=group, compression=hvd.Compression.fp16)
    gradients = [library.make(np.ones(s, np.float32)) for s in SHAPES]
    library.give(inner, gradients)
    sources = [torch.zeros_like(x) for x in gradients]

    def step() -> None:
        torch._foreach_copy_(gradients, sources)
        optimizer.synchronize()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    ops.barrier(group=group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(5):
        for i, source in enumerate(sources):
            source.fill_(turn + i + group.rank)
        graph.replay()
        for i, x in enumerate(gradients):
            expected = turn + i + (group.size - 1) / 2
            assert np.allclose(library.read(x), expected, rtol=1e-3), (turn, i)
    ops.barrier(group=group)


def check_mismatches_are_told_to_all(group: Group, library: Library) -> None:
    """On every rank, with the name of the rank; the world remains usable."""
    odd = group.rank == group.size - 1
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: ops.allreduce(library.make(np.ones(7 + odd, np.float32)), group=group),
            "float32[7]",
        ),
        (
            lambda: ops.allreduce(library.make(full(group)), Sum if odd else Average, group=group),
            "op Sum",
        ),
        (
            lambda: ops.allreduce(library.make(full(group)), name="x" if odd else "y", group=group),
            "'y'",
        ),
    ]
    for call, words in calls:
        until = time.monotonic() + 20
        text = ""
        while not text and time.monotonic() < until:
            text = raised(hvd.MismatchError, call)
            time.sleep(0.01)
        assert words in text, text or "no mismatch was reported"
        assert f"rank {group.size - 1}" in text, text
        got = library.read(ops.allreduce(library.make(full(group)), Sum, group=group))
        assert np.all(got == total(group)), "the world is not usable any more"


def over_nccl(group: Group) -> bool:
    stream = group.stream(hvd.device().index)
    return stream is not None and stream.transport().name == "nccl"


CHECKS: dict[str, Check] = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def why_not(name: str, library: Library, transport: str, size: int) -> str | None:
    """Return why a check does not apply here; such checks are skipped and not counted."""
    if name == "graph capture":
        return None if library.name == "torch" and transport != "staged" else "not this library"
    if name == "arrays that cannot be written":
        return "they can" if library.writable else None
    in_place = ("views in place", "weights", "optimizer", "divided results")
    if name in in_place and not library.writable:
        return "nothing is done in place"
    if name == "mismatches are told to all" and size == 1:
        return "one rank"
    return None


def lose_a_peer(group: Group, library: Library) -> None:
    """Kill the last rank; the others find out within 20 s, and do not hang."""
    ops.allreduce(library.make(full(group)), Sum, group=group)
    ops.barrier(group=group)
    if group.rank == group.size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()

    def call() -> None:
        library.read(ops.allreduce(library.make(full(group)), Sum, group=group))

    text = ""
    while not text and time.monotonic() < began + 20:
        text = raised(hvd.PeerLostError, call)
    assert f"rank {group.size - 1}" in text, text or "the lost peer was not reported"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=LIBRARIES)
    parser.add_argument("transport", choices=["nccl", "staged", "alone"])
    parser.add_argument("--lose-a-peer", action="store_true")
    parser.add_argument("--only", default="", help="a part of the names of checks")
    args = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(os.environ.get("HORO_LITE_TEST_GPU_S", "60")) * 0.9)

    library = LIBRARIES[args.framework]()
    world, referee = join()
    group = world.group
    if args.lose_a_peer:
        say("begin", "a killed peer", world.rank)
        began = time.monotonic()
        lose_a_peer(group, library)
        say("passed", f"a killed peer: noticed after {time.monotonic() - began:.1f} s", world.rank)
        sys.stdout.flush()
        os._exit(0)  # the world is not usable any more

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if args.transport == "alone":
            use_nccl_alone(world)
        failed = False
        for name, check in CHECKS.items():
            if args.only in name and why_not(name, library, args.transport, world.size) is None:
                failed |= judged(name, lambda: check(group, library), referee)  # noqa: B023

        def how_they_travelled() -> None:
            n_told = sum("go through the host's memory" in str(w.message) for w in caught)
            staged = args.transport == "staged"
            assert over_nccl(group) == (not staged)
            expected = int(staged and world.rank == 0 and world.size > 1)
            assert n_told == expected, f"{n_told} warnings: {[str(w.message) for w in caught]}"

        name = "one warning that says so" if args.transport == "staged" else "all over NCCL"
        failed |= judged(name, how_they_travelled, referee)
    hvd.shutdown()
    return int(failed)


def judged(name: str, check: Callable[[], None], referee: Group) -> bool:
    """Return whether any rank failed; rank 0 prints which, and why."""
    say("begin", name, referee.rank)
    error = ""
    began = time.monotonic()
    try:
        check()
    except Exception as found:
        text = " ".join(str(found).split())[:600]
        where = traceback.extract_tb(found.__traceback__)[-1]
        error = f"{type(found).__name__}: {text} ({where.name}:{where.lineno})"
        traceback.print_exc()
    errors = ops.allgather_object(error, group=referee)
    if not any(errors):
        say("passed", f"{name} ({time.monotonic() - began:.1f} s)", referee.rank)
        return False
    texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text)
    say("FAILED", f"{name}: {texts}", referee.rank)
    return True


def say(verdict: str, text: str, rank: int) -> None:
    if rank == 0:
        print(f"{verdict} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
