"""horo_lite.torch: every operation against NumPy, gradients, errors, process sets, real jobs."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_ranks, run_threads
from oracle import adasum_reference
from worlds import on_ranks, script_on_ranks

torch = pytest.importorskip("torch")

import horo_lite.torch as hvd  # noqa: E402
from horo_lite import ops  # noqa: E402
from horo_lite.collectives.calls import AllGather  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.errors import HoroLiteError, MismatchError, NotInitializedError  # noqa: E402
from horo_lite.state.optimizer_state import in_host_memory  # noqa: E402
from horo_lite.torch import compression, mpi_ops  # noqa: E402
from horo_lite.torch.distributed.work import Waiter, Work  # noqa: E402

SIZES = [1, 2, 3, 4]
INTEGERS = ["uint8", "int8", "int16", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
OPS = {
    "Sum": lambda xs: sum(xs),
    "Min": lambda xs: reduce(np.minimum, xs),
    "Max": lambda xs: reduce(np.maximum, xs),
    "Product": lambda xs: reduce(np.multiply, xs),
    "Average": lambda xs: sum(xs) / len(xs),
}


def values(rank: int, shape: Sequence[int] = (3, 4)) -> np.ndarray:
    """Return values from 1 to 3 that differ by rank; products of four ranks are exact, too."""
    n = int(np.prod(shape))
    return ((np.arange(n) * (rank + 2) + rank) % 3 + 1.0).reshape(shape)


def tensor(rank: int, dtype: str = "float64", shape: Sequence[int] = (3, 4)) -> Any:
    return torch.from_numpy(values(rank, shape)).to(getattr(torch, dtype))


def number(x: Any) -> np.ndarray:
    return x.double().resolve_neg().numpy()


def same(got: Any, expected: np.ndarray, dtype: str = "float64") -> None:
    assert str(got.dtype) == f"torch.{dtype}"
    if dtype in INTEGERS:
        expected = np.trunc(expected)
    bound = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 1e-6)
    np.testing.assert_allclose(number(got), expected, rtol=bound)


@pytest.mark.parametrize("size", SIZES)
def test_reductions_of_every_dtype(size: int) -> None:
    def rank(group: Group) -> None:
        for dtype in INTEGERS + FLOATS:
            for name, oracle in OPS.items():
                x = tensor(group.rank, dtype)
                before = x.clone()
                expected = oracle([values(r) for r in range(size)])
                options = {"op": getattr(hvd, name), "process_set": group}
                same(hvd.allreduce(x, **options), expected, dtype)
                assert torch.equal(x, before)
                part = np.array_split(expected, size)[group.rank]
                same(hvd.reducescatter(x, **options), part, dtype)
                assert hvd.allreduce_(x, **options) is x
                same(x, expected, dtype)
        mask = torch.tensor([group.rank == 0, True, False])
        assert hvd.allreduce(mask, op=hvd.Sum, process_set=group).tolist() == [True, True, False]
        anded = hvd.allreduce(mask, op=hvd.Product, process_set=group)
        assert anded.tolist() == [size == 1, True, False]

    run_threads(size, rank)


@pytest.mark.parametrize("size", SIZES)
def test_factors_compression_and_average(size: int) -> None:
    total = sum(values(r) for r in range(size))

    def rank(group: Group) -> None:
        x = tensor(group.rank, "float32")
        k = {"process_set": group}
        same(hvd.allreduce(x, **k), total / size, "float32")
        factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
        same(hvd.allreduce(x, op=hvd.Sum, **factors, **k), total / 2, "float32")
        part = np.array_split(total / 2 / size, size)[group.rank]
        same(hvd.reducescatter(x, **factors, **k), part, "float32")
        for wire in (hvd.Compression.fp16, hvd.Compression.bf16):
            same(hvd.allreduce(x, op=hvd.Sum, compression=wire, **k), total, "float32")
        with warnings.catch_warnings():  # Python's warning filters are global: one rank checks
            warnings.simplefilter("ignore", DeprecationWarning)
            same(hvd.allreduce(x, average=False, **k), total, "float32")
            same(hvd.allreduce(x, True, **k), total / size, "float32")

    run_threads(size, rank)


def test_average_is_deprecated_and_excludes_op() -> None:
    def rank(group: Group) -> None:
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async):
            with pytest.warns(DeprecationWarning, match="op=hvd") as warned:
                call(torch.ones(2), average=True, process_set=group)
            assert [w.filename for w in warned] == [__file__]
        with pytest.raises(ValueError, match="average and op"):
            hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum, process_set=group)

    run_threads(1, rank)


@pytest.mark.parametrize("size", SIZES)
def test_groups_layouts_and_odd_shapes(size: int) -> None:
    def rank(group: Group) -> None:
        k = {"op": hvd.Sum, "process_set": group}
        everyone = range(size)
        shapes = [(3, 4), (), (0, 3), (5,), (2, 1, 3)]
        xs = [tensor(group.rank, shape=s) for s in shapes]
        xs.append(tensor(group.rank, "int32"))
        for got, shape in zip(hvd.grouped_allreduce(xs, **k), [*shapes, (3, 4)], strict=True):
            same(got.double(), sum(values(r, shape) for r in everyone))
        own = [x.clone() for x in xs]
        got = hvd.grouped_allreduce_(own, **k)
        assert all(a is b for a, b in zip(got, own, strict=True))
        same(own[0], sum(values(r) for r in everyone))
        assert hvd.grouped_allreduce([], **k) == []
        for parameters in (xs, [torch.nn.Parameter(x) for x in xs[:5]]):  # with gradients, too
            got = hvd.grouped_allreduce((x for x in parameters), **k)
            assert len(got) == len(parameters)
            assert hvd.grouped_allgather((x for x in parameters[:1]), process_set=group)
            assert hvd.grouped_reducescatter((x for x in parameters[:1]), **k)
        own = [x.clone() for x in xs]
        assert all(a is b for a, b in zip(hvd.grouped_allreduce_(iter(own), **k), own, strict=True))

        # Layouts differ between ranks: only the numbers matter.
        for make in (
            lambda x: x if group.rank else x.t().contiguous().t(),
            lambda x: torch.stack([x, x], 2)[..., 0],
            lambda x: torch.cat([x, x], 1)[:, :4],
            lambda x: torch._neg_view(-x),
        ):
            for dtype in ("float64", "bfloat16"):
                x = make(tensor(group.rank, dtype))
                expected = sum(values(r) for r in everyone)
                same(hvd.allreduce(x, **k), expected, dtype)
                same(
                    hvd.allgather(x, process_set=group),
                    np.concatenate([values(r) for r in everyone]),
                    dtype,
                )
                same(hvd.broadcast(x, size - 1, process_set=group), values(size - 1), dtype)
                address = x.data_ptr()
                assert hvd.allreduce_(x, **k) is x
                assert x.data_ptr() == address
                same(x, expected, dtype)
                x = make(tensor(group.rank, dtype))
                hvd.broadcast_(x, size - 1, process_set=group)
                same(x, values(size - 1), dtype)

    run_threads(size, rank)


@pytest.mark.parametrize("size", SIZES)
def test_moving_every_dtype(size: int) -> None:
    def rank(group: Group) -> None:
        k = {"process_set": group}
        everyone = range(size)
        for dtype in [*INTEGERS, *FLOATS, "bool"]:

            def mine(r: int, shape: Sequence[int], dtype: str = dtype) -> Any:
                return (tensor(r, "float64", shape) - 1).to(getattr(torch, dtype))

            x = mine(group.rank, (group.rank, 2))  # rank 0 has none
            expected = torch.cat([mine(r, (r, 2)) for r in everyone])
            assert torch.equal(hvd.allgather(x, **k), expected)
            one, two = hvd.grouped_allgather([x, x[:1]], **k)
            assert torch.equal(one, expected)
            assert torch.equal(two, torch.cat([mine(r, (r, 2))[:1] for r in everyone]))
            for root in everyone:
                x = mine(group.rank, (2, 3))
                assert torch.equal(hvd.broadcast(x, root, **k), mine(root, (2, 3)))
                assert torch.equal(x, mine(group.rank, (2, 3)))
                assert hvd.broadcast_(x, root, **k) is x
                assert torch.equal(x, mine(root, (2, 3)))
            x = mine(group.rank, (2 * size, 3))
            expected = torch.cat([mine(r, (2 * size, 3)).split(2)[group.rank] for r in everyone])
            assert torch.equal(hvd.alltoall(x, **k), expected)
        # Rank r sends (r + d) % 3 rows to rank d, so some get none.
        rows = [[(s + d) % 3 for d in everyone] for s in everyone]
        for as_tensor in (False, True):
            splits: Any = rows[group.rank]
            x = tensor(group.rank, "float32", (sum(splits), 2))
            got, received = hvd.alltoall(x, torch.tensor(splits) if as_tensor else splits, **k)
            parts = [
                tensor(s, "float32", (sum(rows[s]), 2)).split(rows[s])[group.rank] for s in everyone
            ]
            assert torch.equal(got, torch.cat(parts))
            assert received.tolist() == [rows[s][group.rank] for s in everyone]
        assert hvd.allgather(torch.tensor(float(group.rank)), **k).tolist() == list(everyone)
        hvd.barrier(group)

    run_threads(size, rank)


@pytest.mark.parametrize("size", SIZES)
def test_sparse_and_objects(size: int) -> None:
    def rank(group: Group) -> None:
        k = {"process_set": group}
        dense = [values(r, (5, 2)) * (np.arange(5) % (r + 1) == 0)[:, None] for r in range(size)]
        for op in ("Sum", "Average"):
            x = torch.from_numpy(dense[group.rank]).to_sparse(1)
            handle = hvd.sparse_allreduce_async(x, "s", getattr(hvd, op), **k)
            got = handle()
            assert got.layout is torch.sparse_coo
            same(got.to_dense(), OPS[op](dense))
        empty = torch.zeros(5, 2).to_sparse(1)
        assert hvd.synchronize(hvd.sparse_allreduce_async(empty, "e", **k)).to_dense().sum() == 0

        root = size - 1
        thing = {"rank": group.rank, "x": torch.ones(group.rank), "text": "x" * group.rank}
        with torch.device("meta"):  # the default device of this thread
            got = hvd.broadcast_object(thing, root, **k)
            assert hvd.allgather_object(group.rank, **k) == list(range(size))
        assert (got["rank"], len(got["x"]), got["text"]) == (root, root, "x" * root)
        assert hvd.broadcast_object(None, root, name="none", **k) is None
        gathered = hvd.allgather_object([group.rank] * group.rank, **k)
        assert gathered == [[r] * r for r in range(size)]

    run_threads(size, rank)


def test_bfloat16_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    def rank(group: Group) -> None:
        k = {"process_set": group}
        x = tensor(group.rank, "bfloat16")
        same(hvd.allgather(x, **k), np.concatenate([values(0), values(1)]), "bfloat16")
        same(hvd.allgather(x[0, 0], **k), np.array([values(0)[0, 0], values(1)[0, 0]]), "bfloat16")
        expected = np.concatenate([values(r)[2 * group.rank :][:1] for r in range(2)])
        same(hvd.alltoall(x[::2], **k), expected, "bfloat16")
        same(hvd.broadcast(x, 1, **k), values(1), "bfloat16")
        same(hvd.allreduce_(x.t(), op=hvd.Sum, **k).t(), values(0) + values(1), "bfloat16")

    run_threads(2, rank)


# Asynchronous calls.


@pytest.mark.parametrize("size", [1, 3])
def test_names_match_whatever_the_order(size: int) -> None:
    def rank(group: Group) -> None:
        k = {"process_set": group}
        calls: dict[str, Callable[[], Any]] = {
            "a": lambda: hvd.allreduce_async(tensor(group.rank), name="a", op=hvd.Sum, **k),
            "b": lambda: hvd.allreduce_async(tensor(group.rank) * 2, name="b", op=hvd.Sum, **k),
            "g": lambda: hvd.allgather_async(tensor(group.rank), name="g", **k),
            "t": lambda: hvd.broadcast_async(tensor(group.rank), 0, name="t", **k),
            "s": lambda: hvd.reducescatter_async(tensor(group.rank), name="s", op=hvd.Sum, **k),
            "o": lambda: hvd.alltoall_async(tensor(group.rank, shape=(size, 2)), name="o", **k),
            "l": lambda: hvd.grouped_allreduce_async(
                [tensor(group.rank)] * 2, name="l", op=hvd.Sum, **k
            ),
            "m": lambda: hvd.grouped_reducescatter_async([tensor(group.rank)] * 2, name="m", **k),
            "n": lambda: hvd.grouped_allgather_async([tensor(group.rank)] * 2, name="n", **k),
            # The same name for another kind of operation is a different name.
            "c": lambda: hvd.broadcast_async(tensor(group.rank), size - 1, name="a", **k),
            # Unnamed: numbered by kind, so the two kinds may come in any order.
            "u": lambda: hvd.allreduce_async(tensor(group.rank) * 3, op=hvd.Max, **k),
            "v": lambda: hvd.allgather_async(tensor(group.rank), **k),
        }
        order = list(calls)
        np.random.default_rng(group.rank).shuffle(order)
        handles = {key: calls[key]() for key in order}
        assert len(set(handles.values())) == len(handles)
        np.random.default_rng(group.rank + 9).shuffle(order)
        got = {key: hvd.synchronize(handles[key]) for key in order}
        total = sum(values(r) for r in range(size))
        same(got["a"], total)
        same(got["b"], 2 * total)
        same(got["l"][1], total)
        same(got["s"], np.array_split(total, size)[group.rank])
        same(got["m"][1], np.array_split(total / size, size)[group.rank])
        same(got["t"], values(0))
        same(got["c"], values(size - 1))
        same(got["u"], 3 * OPS["Max"]([values(r) for r in range(size)]))
        for key in ("g", "v"):
            same(got[key], np.concatenate([values(r) for r in range(size)]))
        same(got["n"][0], np.concatenate([values(r) for r in range(size)]))

    run_threads(size, rank)


def test_handles_are_taken_once() -> None:
    def rank(group: Group) -> None:
        handle = hvd.allreduce_async(torch.ones(3), name="x", process_set=group)
        while not hvd.poll(handle):
            pass
        assert {handle: 1}[handle] == 1
        assert hvd.synchronize(handle).tolist() == [1, 1, 1]
        for call in (hvd.synchronize, hvd.poll):
            with pytest.raises(ValueError, match="was already synchronized"):
                call(handle)
            with pytest.raises(ValueError, match="not a handle"):
                call(7)

    run_threads(2, rank)


def test_in_place_forms_and_autograd() -> None:
    def rank(group: Group) -> None:
        k = {"op": hvd.Sum, "process_set": group}
        parameter = torch.nn.Parameter(tensor(group.rank))
        assert hvd.allreduce_(parameter, **k) is parameter
        assert parameter.is_leaf
        assert parameter.requires_grad
        same(parameter.detach(), values(0) + values(1))
        hvd.broadcast_(parameter, 1, process_set=group)
        x = tensor(group.rank).requires_grad_()
        y = x.exp()
        total = y.sum()
        hvd.allreduce_(y, **k)  # backward() needs y unchanged
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
        with torch.no_grad():
            assert not hvd.allreduce(x, **k).requires_grad
        assert not hvd.synchronize(hvd.allreduce_async(x, **k)).requires_grad
        with torch.inference_mode():
            same(hvd.allreduce_(tensor(group.rank), **k), values(0) + values(1))

    run_threads(2, rank)


# Gradients.

# Horovod's gradients of each operation, from the ranks' input shapes and upstream gradients (`u`),
# in rank order. `i` is this rank, n the number of ranks.


IN_PLACE = {
    "allreduce_": lambda x, group: hvd.allreduce_(x, process_set=group),
    "allreduce_async_": lambda x, group: hvd.synchronize(
        hvd.allreduce_async_(x, process_set=group)
    ),
    "grouped_allreduce_": lambda x, group: hvd.grouped_allreduce_([x], process_set=group),
    "broadcast_": lambda x, group: hvd.broadcast_(x, 0, process_set=group),
    "ops.allreduce_": lambda x, group: ops.allreduce_(x, group=group),
    "ops.allreduce_async_": lambda x, group: ops.synchronize(
        ops.allreduce_async_(x, group=group), group=group
    ),
    "ops.grouped_allreduce_": lambda x, group: ops.grouped_allreduce_([x], group=group),
    "ops.broadcast_": lambda x, group: ops.broadcast_(x, group=group),
    "ops.broadcast_async_": lambda x, group: ops.synchronize(
        ops.broadcast_async_(x, group=group), group=group
    ),
    "ops.grouped_broadcast_": lambda x, group: ops.grouped_broadcast_([x], group=group),
}


@pytest.mark.parametrize("call", IN_PLACE)
def test_backward_through_what_was_changed_in_place_is_an_error(call: str) -> None:
    change = IN_PLACE[call]

    def rank(group: Group) -> None:
        w = tensor(group.rank).requires_grad_()
        x = 2 * w
        change(x, group)
        assert x.requires_grad
        with pytest.raises(RuntimeError, match="an operation between ranks changed in place"):
            x.sum().backward()
        rows = 2 * w
        change(rows[1:], group)
        with pytest.raises(RuntimeError, match="an operation between ranks changed in place"):
            rows.sum().backward()
        x = 2 * w
        square = x * x
        change(x, group)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()
        assert w.grad is None

        x = 2 * w
        seen = x.sum()
        with torch.no_grad():
            change(x, group)
        change(x.detach().clone(), group)
        change(w, group)  # leaves, and views of them, are values
        change(w.view(-1), group)
        (x.sum() + seen + w.sum()).backward()
        assert w.grad.tolist() == torch.full_like(w, 5).tolist()
        with torch.inference_mode():
            change(torch.ones(3), group)

    run_threads(2, rank)


def rows_of(i: int, shapes: Sequence[Sequence[int]]) -> slice:
    begin = sum(shape[0] for shape in shapes[:i])
    return slice(begin, begin + shapes[i][0])


GRADIENTS: dict[str, tuple[Callable[[Any, Any, int, int], Any], Callable[..., Any]]] = {
    # The same reduction of the upstream gradients.
    "allreduce Sum": (
        lambda x, k, i, n: hvd.allreduce(x, op=hvd.Sum, **k),
        lambda i, n, s, u: sum(u),
    ),
    "allreduce": (lambda x, k, i, n: hvd.allreduce(x, **k), lambda i, n, s, u: sum(u) / n),
    "allreduce with factors": (
        lambda x, k, i, n: hvd.allreduce(x, prescale_factor=3.0, postscale_factor=0.5, **k),
        lambda i, n, s, u: 1.5 * sum(u) / n,
    ),
    "grouped allreduce": (
        lambda x, k, i, n: torch.cat(hvd.grouped_allreduce([x[:1], x[1:]], op=hvd.Sum, **k)),
        lambda i, n, s, u: sum(u),
    ),
    # This rank's rows of the average of the upstream gradients.
    "allgather": (
        lambda x, k, i, n: hvd.allgather(x, **k),
        lambda i, n, s, u: (sum(u) / n)[rows_of(i, s)],
    ),
    "allgather of other numbers of rows": (
        lambda x, k, i, n: hvd.allgather(x[: i % 3], **k),
        lambda i, n, s, u: np.concatenate(
            [
                (sum(u) / n)[rows_of(i, [(r % 3,) for r in range(n)])],
                np.zeros((s[i][0] - i % 3, *s[i][1:])),
            ]
        ),
    ),
    "allgather of a scalar": (
        lambda x, k, i, n: hvd.allgather(x.sum(), **k),
        lambda i, n, s, u: np.full(s[i], (sum(u) / n)[i]),
    ),
    "grouped allgather": (
        lambda x, k, i, n: torch.cat(hvd.grouped_allgather([x, x], **k)),
        lambda i, n, s, u: sum(half[rows_of(i, s)] for half in np.split(sum(u) / n, 2)),
    ),
    # On the root the average of the upstream gradients, elsewhere zeros.
    "broadcast": (
        lambda x, k, i, n: hvd.broadcast(x, k["process_set"].transport.ranks[n - 1], **k),
        lambda i, n, s, u: sum(u) / n * (i == n - 1),
    ),
    # The upstream gradients of all ranks, concatenated: n times as large if op is Sum.
    "reducescatter": (
        lambda x, k, i, n: hvd.reducescatter(x, **k),
        lambda i, n, s, u: np.concatenate(u),
    ),
    "reducescatter Sum": (
        lambda x, k, i, n: hvd.reducescatter(x, op=hvd.Sum, **k),
        lambda i, n, s, u: n * np.concatenate(u),
    ),
    "reducescatter with factors": (
        lambda x, k, i, n: hvd.reducescatter(
            x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0, **k
        ),
        lambda i, n, s, u: 1.5 * n * np.concatenate(u),
    ),
    "grouped reducescatter": (
        lambda x, k, i, n: hvd.grouped_reducescatter([x, x[:0]], op=hvd.Sum, **k)[0],
        lambda i, n, s, u: n * np.concatenate(u),
    ),
    # Every row's gradient goes back to where the row came from.
    "alltoall": (
        lambda x, k, i, n: hvd.alltoall(x[:n], **k),
        lambda i, n, s, u: np.concatenate(
            [*(v[i : i + 1] for v in u), np.zeros_like(u[0][:1]).repeat(s[i][0] - n, 0)]
        ),
    ),
    "alltoall with splits": (  # all rows to the next rank
        lambda x, k, i, n: hvd.alltoall(x, [5 * (r == (i + 1) % n) for r in range(n)], **k)[0],
        lambda i, n, s, u: u[(i + 1) % n],
    ),
}


def check_gradients(group: Group) -> None:
    """Against the formulas, with different tensors and upstream gradients on every rank."""
    i, n = group.rank, group.size
    for name, (call, formula) in GRADIENTS.items():
        x = tensor(i, shape=(5, 2)).requires_grad_()
        k = {"process_set": group}
        y = call(x, k, i, n)
        upstream = np.random.default_rng(100 * n + i).random(tuple(y.shape))
        y.backward(torch.from_numpy(upstream.copy()))
        everyone = ops.allgather_object((tuple(x.shape), upstream), group=group)
        expected = formula(i, n, [shape for shape, _ in everyone], [u for _, u in everyone])
        np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-12, err_msg=name)
        (grad,) = torch.autograd.grad(call(x, k, i, n).square().sum(), x, create_graph=True)
        assert grad.requires_grad, name  # or this rank would not take part in what follows
        grad.square().sum().backward()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_horovods(size: int) -> None:
    run_threads(size, check_gradients, timeout_s=60)


def check_gradients_in_process_sets() -> list[int]:
    sets = [hvd.ProcessSet(ranks) for ranks in ([1], [0, 2], [0, 1, 3], [1, 2, 3])]
    hvd.init(process_sets=sets)
    own = [each for each in sets if each.included()]
    for each in own:
        check_gradients(each.group())
    return [each.size() for each in own]


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["4", "2,1,1"])
def test_gradients_are_horovods_in_process_sets_of_one_to_three(hosts: str) -> None:
    checked = on_ranks(check_gradients_in_process_sets, 4, hosts=hosts, timeout_s=120)
    assert checked == [[2, 3], [1, 3, 3], [2, 3], [3, 3]]


def test_other_reductions_say_that_they_have_no_gradient() -> None:
    def rank(group: Group) -> None:
        x = tensor(group.rank).requires_grad_()
        for op in (hvd.Max, hvd.Adasum):
            y = hvd.allreduce(x, op=op, process_set=group)
            with pytest.raises(RuntimeError, match="no gradient"):
                y.sum().backward()
        n = torch.tensor([3])  # has no gradient, which is not an error
        y, m = hvd.grouped_allreduce([x, n], op=hvd.Sum, process_set=group)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert (m.item(), g.unique().tolist()) == (6, [2])
        y = hvd.allreduce(x, process_set=group)
        (g,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        g.sum().backward()  # of d/dx of the mean's square, summed over ranks: 2 / size * size
        assert torch.allclose(x.grad, torch.full_like(x, 2.0))

    run_threads(2, rank)


# Adasum.


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_adasum(size: int) -> None:
    rng = np.random.default_rng(5)
    shapes = [(7, 3), (), (0,), (1,), (257,)]
    data = [[rng.standard_normal(s) for s in shapes] for _ in range(size)]
    data[-1][0][...] = 0  # a zero norm
    expected = [adasum_reference([data[r][i] for r in range(size)]) for i in range(len(shapes))]

    def rank(group: Group) -> list[bytes]:
        k = {"op": hvd.Adasum, "process_set": group}
        mine = [torch.from_numpy(np.array(x)) for x in data[group.rank]]
        for got, want in zip(hvd.grouped_allreduce(mine, **k), expected, strict=True):
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-10, atol=1e-12)
        small = [x.float() for x in mine]
        names = [f"p{i}" for i in range(len(small))]
        group.exchange(small, names=names, label="small", op=hvd.Adasum)
        np.testing.assert_allclose(small[4].numpy(), expected[4], rtol=2e-5, atol=1e-6)
        half = hvd.allreduce(mine[4].half(), prescale_factor=2.0, postscale_factor=0.5, **k)
        np.testing.assert_allclose(half.double().numpy(), expected[4], rtol=2e-2, atol=2e-2)
        # Two at once, submitted and awaited in different orders.
        handles = {}
        for name in ("a", "b") if group.rank % 2 else ("b", "a"):
            handles[name] = hvd.allreduce_async(mine[4], name=name, **k)
        for name in ("a", "b") if group.rank % 3 else ("b", "a"):
            np.testing.assert_allclose(
                hvd.synchronize(handles[name]).numpy(), expected[4], rtol=1e-9
            )
        return [x.numpy().tobytes() for x in small]

    results = run_threads(size, rank)
    assert all(result == results[0] for result in results)


def test_adasum_of_equal_and_of_orthogonal_gradients(recwarn: pytest.WarningsRecorder) -> None:
    def rank(group: Group) -> None:
        k = {"op": hvd.Adasum, "process_set": group}
        assert hvd.allreduce(torch.tensor([3.0, 4.0]), **k).tolist() == [3, 4]
        with pytest.raises(MismatchError, match="tensor 'p'"):
            group.exchange([torch.ones(2 + group.rank)], names=["p"], label="p", op=hvd.Adasum)
        with pytest.raises(ValueError, match="floating"):
            hvd.allreduce(torch.tensor([1, 2]), **k)
        one_hot = torch.eye(4)[group.rank]
        assert hvd.allreduce(one_hot, **k).tolist() == [1, 1, 1, 1]
        # Values whose squares overflow or underflow.
        for least in (1e-320, 1e-200, 1e200, 5e307):
            x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) * least
            assert hvd.allreduce(x, **k).tolist() == x.tolist()
            opposite = hvd.allreduce(x if group.rank % 2 else -x, **k)
            assert opposite.tolist() == [0, 0, 0]
        # However small a gradient is, half of its peer along it is removed.
        mixed = torch.ones(3) * (1e-42 if group.rank % 2 else 1)
        assert hvd.allreduce(mixed, **k).tolist() == [0.5] * 3

    run_threads(4, rank)
    assert not recwarn.list


# Errors.


def test_what_ranks_do_not_agree_on_is_an_error_on_all() -> None:
    def rank(group: Group) -> None:
        r = group.rank
        k = {"process_set": group}
        cases: dict[str, Callable[[], Any]] = {
            "shape": lambda: hvd.allreduce(torch.ones(2 + r), **k),
            "dtype": lambda: hvd.allreduce(
                torch.ones(2, dtype=[torch.int32, torch.float32][r > 0]), op=hvd.Sum, **k
            ),
            "op": lambda: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Max][r > 0], **k),
            "factor": lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + r, **k),
            "wire": lambda: hvd.allreduce(
                torch.ones(2), compression=[hvd.Compression.none, hvd.Compression.fp16][r > 0], **k
            ),
            "number": lambda: hvd.grouped_allreduce([torch.ones(2)] * (1 + r), **k),
            "name": lambda: hvd.allreduce(torch.ones(2), name=f"n{r > 0}", **k),
            "kind": lambda: (
                hvd.allreduce(torch.ones(2), name="x", **k)
                if r
                else hvd.broadcast(torch.ones(2), 0, name="x", **k)
            ),
            "root": lambda: hvd.broadcast(torch.ones(2), min(r, 1), **k),
            "broadcast": lambda: hvd.broadcast(torch.ones(2 + r), 0, **k),
            "broadcast dtype": lambda: hvd.broadcast(
                torch.ones(2).to([torch.int16, torch.bfloat16][r > 0]), 0, **k
            ),
            "rows": lambda: hvd.allgather(torch.ones(2, 2 + r), **k),
            "rows dtype": lambda: hvd.allgather(
                torch.ones(2).to([torch.int16, torch.bfloat16][r > 0]), **k
            ),
            "dimensions": lambda: hvd.allgather(torch.ones((2,) * (1 + r)), **k),
            "alltoall": lambda: hvd.alltoall(torch.ones(3, 1 + r), **k),
            "scatter": lambda: hvd.reducescatter(torch.ones(3 + r), **k),
            "sparse": lambda: hvd.sparse_allreduce_async(torch.ones(3 + r).to_sparse(), "s", **k)(),
            "in place": lambda: hvd.allreduce_(torch.ones(2 + r), **k),
            "gradient": lambda: hvd.allreduce(torch.ones(2 + r, requires_grad=True), **k),
        }
        for what, call in cases.items():
            with pytest.raises(MismatchError) as error:
                call()
            assert isinstance(error.value, hvd.HorovodInternalError)
            assert "rank" in str(error.value), what
            same(hvd.allreduce(tensor(r), op=hvd.Sum, **k), sum(values(i) for i in range(3)))

    run_threads(3, rank, timeout_s=60)


def test_wrong_arguments_are_value_errors_at_the_call() -> None:
    # Not at the top: the ranks that import this file would import PyTorch's compiler, too.
    from torch.testing._internal.two_tensor import TwoTensor

    others_have_tried = threading.Barrier(3)

    def rank(group: Group) -> None:
        k = {"process_set": group}
        one = torch.ones(3)
        cases: list[tuple[str, Callable[[], Any]]] = [
            ("float8.*sent, but not", lambda: hvd.allreduce_async(one.to(torch.float8_e5m2), **k)),
            ("complex64", lambda: hvd.allreduce_async(one * 1j, op=hvd.Max, **k)),
            ("bool", lambda: hvd.allreduce_async(one.bool(), op=hvd.Average, **k)),
            ("sparse", lambda: hvd.allreduce_async(one.to_sparse(), **k)),
            ("nested", lambda: hvd.allreduce(torch.nested.nested_tensor([one, one]), **k)),
            ("MKL-DNN", lambda: hvd.allreduce_async(one.to_mkldnn(), **k)),
            ("sparse", lambda: hvd.sparse_allreduce_async(one, "x", **k)),
            ("Sum", lambda: hvd.sparse_allreduce_async(one.to_sparse(), "x", hvd.Max, **k)),
            ("not a list: .* grouped", lambda: hvd.allreduce_async([one, one], **k)),
            ("not a ndarray: .*as_tensor", lambda: hvd.allreduce_async(one.numpy(), **k)),
            ("list of tensors", lambda: hvd.grouped_allreduce_async(one, **k)),
            ("on meta, but", lambda: hvd.grouped_allreduce_async([one, one.to("meta")], **k)),
            ("a TwoTensor: .* contents", lambda: hvd.allreduce_async(TwoTensor(one, one), **k)),
            ("device, without", lambda: hvd.allreduce_async(one.to("meta"), **k)),
            ("op must be", lambda: hvd.allreduce_async(one, op="sum", **k)),
            ("root_rank", lambda: hvd.broadcast_async(one, 3, **k)),
            ("root_rank", lambda: hvd.broadcast_async_(one, -1, **k)),
            ("root_rank", lambda: hvd.broadcast_object(1, 3, **k)),
            ("root_rank", lambda: hvd.broadcast_parameters({"a": one}, 3, **k)),
            ("multiple", lambda: hvd.alltoall_async(torch.ones(4), **k)),
            ("splits", lambda: hvd.alltoall_async(one, [1, 1], **k)),
            ("splits", lambda: hvd.alltoall_async(one, [1, 1, 2], **k)),
            ("splits", lambda: hvd.alltoall_async(one, [-1, 2, 2], **k)),
            ("splits", lambda: hvd.alltoall_async(one, [1.0, 1.0, 1.0], **k)),
            ("splits.*not 3", lambda: hvd.alltoall_async(one, 3, **k)),
            ("splits.*not 3", lambda: hvd.alltoall_async(one, torch.tensor(3), **k)),
            ("splits.*not True", lambda: hvd.alltoall_async(one, torch.ones(3).bool(), **k)),
            ("splits", lambda: hvd.alltoall(one.requires_grad_(), [1, 1], **k)),
            ("dimension", lambda: hvd.alltoall_async(torch.tensor(1.0), **k)),
            ("dimension", lambda: hvd.reducescatter_async(torch.tensor(1.0), **k)),
            ("compression", lambda: hvd.allreduce(one, compression="fp16", **k)),
            ("power of two", lambda: hvd.allreduce_async(one, op=hvd.Adasum, **k)),
            ("process_set", lambda: hvd.allreduce_async(one, process_set=[0, 1])),
            ("not registered", lambda: hvd.allreduce(one, process_set=hvd.ProcessSet([0, 1]))),
            ("list of ranks", lambda: hvd.ProcessSet("ab")),
        ]
        for text, call in cases:
            if text == "not registered":
                with pytest.raises(ValueError, match="init"):  # there is no world in this process
                    call()
                continue
            with pytest.raises(ValueError, match=text) as error:
                call()
            # One traceback, without that of an inner TypeError.
            assert error.value.__cause__ is None
            assert error.value.__context__ is None or error.value.__suppress_context__
        with pytest.raises(TypeError, match="a function cannot be sent to other processes"):
            hvd.allgather_object(lambda: 0, **k)
        unsent = (lambda: 0) if group.rank == 1 else 0
        for call in (hvd.allgather_object, partial(hvd.broadcast_object, root_rank=1)):
            with pytest.raises(TypeError, match=r"on rank 1, .* cannot be sent"):
                call(unsent, **k)
        first = hvd.allreduce_async(tensor(group.rank), name="twice", **k) if group.rank else None
        if group.rank:
            with pytest.raises(ValueError, match=r"'twice'.*in flight"):
                hvd.allreduce_async(one, name="twice", **k)
        others_have_tried.wait(20)  # while rank 0 has not submitted it, and it is in flight
        if group.rank == 0:
            first = hvd.allreduce_async(tensor(group.rank), name="twice", **k)
        same(hvd.synchronize(first), sum(values(r) for r in range(3)) / 3)

        # If only one rank's call is invalid, the others find out as soon as all of them wait.
        if group.rank == 0:
            with pytest.raises(ValueError, match="splits"):
                hvd.alltoall(one, [9, 9, 9], **k)
            with pytest.raises(MismatchError):
                hvd.barrier(group)
        else:
            with pytest.raises(MismatchError, match="alltoall"):
                hvd.alltoall(one, [1, 1, 1], **k)
        hvd.barrier(group)
        with pytest.raises(MismatchError):  # rank 0 skips an operation without a name
            hvd.allgather(one, **k) if group.rank else hvd.barrier(group)
        hvd.barrier(group)
        for _ in range(2):
            assert len(hvd.allgather(one, **k)) == 9
            assert hvd.alltoall(one, [1, 1, 1], **k)[1].tolist() == [1, 1, 1]
            for name in ("1", "noname.x") if group.rank == 0 else ():  # no unnamed operation's
                with pytest.raises(ValueError, match="splits"):
                    hvd.alltoall(one, [1, 1], name=name, **k)
        ones = [torch.tensor(1)] * 3
        assert hvd.alltoall(one, ones, **k)[1].tolist() == [1, 1, 1]

    run_threads(3, rank)


@pytest.mark.parametrize("grad", [False, True])
def test_a_call_with_wrong_arguments_takes_no_number_of_others(grad: bool) -> None:
    def rank(group: Group) -> None:
        k = {"process_set": group}
        one = torch.ones(4, requires_grad=grad)
        if group.rank == 1:
            for wrong in (
                lambda: hvd.allreduce(one, prescale_factor=float("nan"), **k),
                lambda: hvd.reducescatter(one, compression="fp16", **k),
                lambda: hvd.grouped_allgather([one, one.to_sparse()], **k),
                lambda: hvd.broadcast(one, 7, **k),
                lambda: hvd.alltoall(one, [1, 1], **k),
            ):
                with pytest.raises(ValueError, match=r"."):
                    wrong()
        mine = [tensor(group.rank, shape=(4, 3)) + i for i in range(2)]
        for begin in (
            hvd.allreduce_async, hvd.reducescatter_async, hvd.allgather_async,
            partial(hvd.broadcast_async, root_rank=1), hvd.alltoall_async,
        ):  # fmt: skip
            one, other = (hvd.synchronize(h) for h in [begin(x, **k) for x in mine])
            if begin is hvd.alltoall_async:
                one, other = one[0], other[0]
            assert torch.equal(one + 1, other)  # not of two operations

    run_threads(2, rank)


def test_forward_mode_loses_no_tangent() -> None:
    def rank(group: Group) -> None:
        one = torch.ones(2)
        with pytest.raises(ValueError, match="tangent would be lost"):
            torch.func.jvp(lambda x: hvd.allreduce(x, process_set=group), (one,), (one,))

    run_threads(1, rank)  # differentiation levels are global to the process


def test_before_init_everything_is_a_value_error() -> None:
    assert not hvd.is_initialized()
    one = torch.ones(2)
    for call in (
        hvd.rank,
        hvd.size,
        hvd.mpi_threads_supported,
        hvd.barrier,
        hvd.global_process_set.size,
        lambda: hvd.allreduce(one),
        lambda: hvd.allgather(one),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.add_process_set([0]),
        lambda: hvd.start_timeline("x.json"),
    ):
        with pytest.raises(ValueError, match="init"):
            call()
    hvd.shutdown()
    hvd.stop_timeline()


# Compression.


class Halved(compression.Compressor):
    """A compressor as written for Horovod."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return (tensor * 2).to(ctx)


class WithoutFirst(compression.Compressor):
    """Sends a view of the tensor that has another shape."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor.view(-1)[1:], tensor

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return torch.cat([torch.zeros(1, dtype=ctx.dtype), tensor]).view(ctx.shape)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_compressors(size: int) -> None:
    for compressor, dtype in (
        (hvd.Compression.none, torch.float32),
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ):
        small, context = compressor.compress(torch.ones(3))
        assert small.dtype is dtype
        assert compressor.decompress(small, context).dtype is torch.float32
        whole, context = compressor.compress(torch.ones(3, dtype=torch.int32))
        assert compressor.decompress(whole, context).dtype is torch.int32
        assert pickle.loads(pickle.dumps(compressor)).wire == compressor.wire

    def rank(group: Group) -> None:
        x = tensor(group.rank)
        got = hvd.allreduce(x, op=hvd.Sum, compression=Halved, process_set=group)
        same(got, sum(values(r) for r in range(size)))
        same(x, values(group.rank))
        hvd.allreduce_(x, op=hvd.Sum, compression=Halved, process_set=group)
        same(x, sum(values(r) for r in range(size)))
        how = {"op": hvd.Sum, "compression": WithoutFirst, "process_set": group}
        whole = sum(values(r) for r in range(size))
        whole.reshape(-1)[0] = 0
        x = tensor(group.rank)
        same(hvd.allreduce(x, **how), whole)
        same(x, values(group.rank))
        same(hvd.reducescatter(x, **how), np.array_split(whole, size)[group.rank])
        same(x, values(group.rank))

    run_threads(size, rank)


# Parameters and optimizer state.


def net(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return made


def train(model: Any, optimizer: Any, n_steps: int) -> None:
    for step in range(n_steps):

        def loss(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = model(torch.arange(6.0).reshape(2, 3) + step).square().sum()
            loss.backward()
            return loss

        optimizer.step(loss)


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.AdamW(p, lr=lr, amsgrad=True),
    "tensor lr": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr)),
    "lbfgs": lambda p, lr: torch.optim.LBFGS(p, lr=lr, history_size=3, max_iter=2),
    "centered": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.5, centered=True),
    **{
        name: lambda p, lr, name=name: getattr(torch.optim, name)(p, lr=lr)
        for name in (
            *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam"),
            "Rprop",
        )
    },
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_everyone_goes_on_as_the_root_would(kind: str) -> None:
    def rank(group: Group) -> tuple[list[Any], list[Any]]:
        model = net(group.rank)
        optimizer = OPTIMIZERS[kind](model.parameters(), 0.01 * (group.rank + 1))
        if group.rank < 2:  # rank 1 is ahead, rank 2 has no state yet
            train(model, optimizer, 2 + group.rank)
        before = pickle.dumps(optimizer.state_dict())
        hvd.broadcast_parameters(model.state_dict(), 0, process_set=group)
        hvd.broadcast_optimizer_state(optimizer, 0, process_set=group)
        if group.rank == 0:
            assert pickle.dumps(optimizer.state_dict()) == before
        train(model, optimizer, 2)
        return [x.tolist() for x in model.state_dict().values()], optimizer.state_dict()[
            "param_groups"
        ]

    results = run_threads(3, rank)
    for result in results[1:]:
        assert str(result) == str(results[0])


def test_names_order_and_defaults_of_arguments_are_horovods() -> None:
    """Each function takes Horovod 0.28's documented arguments in order, followed by ours."""
    reduction = "name=None compression op=None prescale_factor=1.0 postscale_factor=1.0 process_set"
    scatter = "name=None {}op process_set prescale_factor=1.0 postscale_factor=1.0"
    signatures = {
        "allreduce": f"tensor average=None {reduction}",
        "grouped_allreduce": f"tensors average=None {reduction}",
        "sparse_allreduce_async": "tensor name op=None process_set",
        "reducescatter": "tensor " + scatter.format("compression "),
        "grouped_reducescatter": "tensors " + scatter.format("compression "),
        "reducescatter_async": "tensor " + scatter.format(""),
        "grouped_reducescatter_async": "tensors " + scatter.format(""),
        "allgather": "tensor name=None process_set",
        "allgather_async": "tensor name=None process_set",
        "grouped_allgather": "tensors name=None process_set",
        "broadcast": "tensor root_rank name=None process_set",
        "broadcast_": "tensor root_rank name=None process_set",
        "broadcast_async_": "tensor root_rank name=None process_set",
        "alltoall": "tensor splits=None name=None process_set",
        "alltoall_async": "tensor splits=None name=None process_set",
        "barrier": "process_set",
        "join": "device=-1",
        "poll": "handle",
        "synchronize": "handle",
        "broadcast_parameters": "params root_rank process_set",
        "broadcast_optimizer_state": "optimizer root_rank model=None process_set",
        "broadcast_object": "obj root_rank=0 name=None process_set",
        "allgather_object": "obj name=None process_set",
        "start_timeline": "file_path mark_cycles=False",
        "DistributedOptimizer": "optimizer named_parameters=None compression "
        "backward_passes_per_step=1 op gradient_predivide_factor=1.0 num_groups=0 groups=None "
        "sparse_as_dense=False process_set",
        "SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True "
        "process_set",
    }
    for form in ("allreduce_", "allreduce_async", "allreduce_async_"):
        arguments = f"average=None {reduction.replace('compression ', '')}"
        signatures[form] = f"tensor {arguments}"
        signatures[f"grouped_{form}"] = f"tensors {arguments}"
    for name, expected in signatures.items():
        own = list(inspect.signature(getattr(hvd, name)).parameters.values())
        for parameter, argument in zip(own, expected.split(), strict=False):
            wanted, _, default = argument.partition("=")
            assert parameter.name == wanted, name
            assert not default or str(parameter.default) == default, (name, wanted)
        assert len(own) >= len(expected.split()), name


@pytest.mark.parametrize("size", [2, 3])
def test_what_horovods_handles_give(size: int) -> None:
    """Alltoall's return rows and their numbers, even if the numbers were not requested."""

    def rank(group: Group) -> None:
        k = {"process_set": group}
        x = torch.arange(2.0 * size * (group.rank + 1))  # twice as many rows on the next rank
        rows, received = hvd.synchronize(hvd.alltoall_async(x, **k))
        assert received.tolist() == [2 * (r + 1) for r in range(size)]
        assert received.dtype is torch.int32
        assert torch.equal(hvd.alltoall(x, **k), rows)
        parts = [torch.arange(2.0 * size * (r + 1)).chunk(size)[group.rank] for r in range(size)]
        assert torch.equal(rows, torch.cat(parts))
        for again in (pickle.loads(pickle.dumps(hvd.Adasum)), copy.deepcopy(hvd.Adasum)):
            assert again is hvd.Adasum

    run_threads(size, rank)


def test_state_on_a_gpu_travels_through_the_hosts_memory() -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        def cpu(self) -> str:
            return "here"

    tree = {"state": {0: {"step": 1, "moments": [OnGpu(), torch.ones(1)]}}, "param_groups": []}
    moved = in_host_memory(tree)
    assert moved["state"][0]["moments"] == ["here", torch.ones(1)]
    assert isinstance(tree["state"][0]["moments"][0], OnGpu)


def test_what_is_no_optimizer_or_module_is_refused() -> None:
    def rank(group: Group) -> None:
        k = {"process_set": group}
        model = net(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = type("", (torch.nn.Linear,), {"step": print})(1, 1)
        parameters = set(model.parameters())  # which has an update()
        states = model.state_dict(), optimizer.state_dict()
        for wrong in (model, steps, torch.nn.Linear, *states, parameters, None):
            with pytest.raises(TypeError, match="is not an optimizer: it has no step"):
                hvd.broadcast_optimizer_state(wrong, 0, **k)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 + group.rank)
        hvd.broadcast_optimizer_state(scheduler, 1, **k)  # which has state and a step()
        assert scheduler.step_size == 2
        with pytest.raises(TypeError, match="a Linear is not an array"):
            ops.allreduce(torch.nn.Linear(1, 1), group=group)

    run_threads(2, rank)


def test_parameters_in_any_of_horovods_forms() -> None:
    def rank(group: Group) -> None:
        model = net(group.rank)
        for form in (
            lambda: model.named_parameters(),
            lambda: list(model.parameters()),
            lambda: model.state_dict(),
            lambda: model,
        ):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(group.rank)
            hvd.broadcast_parameters(form(), 1, process_set=group)
            everyone = hvd.allgather(model[0].weight.detach()[None], process_set=group)
            assert torch.equal(everyone[0], everyone[1])
        with pytest.raises(MismatchError, match="b"):
            hvd.broadcast_parameters(
                {"a" if group.rank else "b": torch.ones(2)}, 0, process_set=group
            )
        for nothing in (None, 5, "weight"):
            with pytest.raises(ValueError, match="nothing can be written"):
                hvd.broadcast_parameters(nothing, 0, process_set=group)

    run_threads(2, rank)


# Real jobs.


def two_lives_with_process_sets() -> None:
    even = hvd.ProcessSet([2, 0])
    for _ in range(2):
        live_with_process_sets(even)


def live_with_process_sets(even: hvd.ProcessSet) -> None:
    from mpi4py import MPI

    def fails(kind: type[Exception], call: Callable[[], object]) -> str:
        try:
            call()
        except kind as error:
            return str(error)
        raise AssertionError("no error")

    world = hvd.init(process_sets=[even, [1]])
    assert hvd.init() is world
    rank, size = hvd.rank(), hvd.size()
    assert (size, hvd.global_process_set.process_set_id) == (3, 0)
    assert hvd.global_process_set.ranks == [0, 1, 2]
    assert hvd.global_process_set.rank() == rank
    assert even.process_set_id == 1
    assert even.ranks == [0, 2]
    assert even.size() == 2
    assert even.included() == (rank != 1)
    x = torch.full((4,), 10.0**rank)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [111.0] * 4  # unnamed: numbered again

    if even.included():
        assert even.rank() == rank // 2
        k = {"process_set": even}
        assert hvd.allreduce(x, op=hvd.Sum, **k)[0] == 101
        assert hvd.allgather(x[:1], **k).tolist() == [1, 100]
        assert hvd.broadcast(x, 2, **k)[0] == 100  # roots are named as in the world
        assert hvd.alltoall(x, [1, 3], **k)[1].tolist() == [1 if rank == 0 else 3] * 2
        assert hvd.reducescatter(x, op=hvd.Max, **k).tolist() == [100, 100]
        assert hvd.allreduce(x, op=hvd.Adasum, **k)[0] > 1
        assert hvd.broadcast_object(rank, 2, **k) == 2
        assert hvd.allgather_object(rank, **k) == [0, 2]
        hvd.barrier(even)
        hvd.broadcast_parameters({"x": x.clone()}, 2, **k)
        assert "root_rank" in fails(ValueError, lambda: hvd.broadcast(x, 1, **k))
        text = fails(MismatchError, lambda: hvd.allreduce(x[: 1 + rank], **k))
        assert "rank 0:" in text, text
        assert "rank 2:" in text, text
        y = x.clone().requires_grad_()
        (hvd.allreduce(y, op=hvd.Sum, **k) * (rank + 1)).sum().backward()
        assert y.grad.tolist() == [4.0] * 4
    else:
        assert "rank 1 is not" in fails(ValueError, lambda: hvd.barrier(even))
        fails(ValueError, even.rank)

    # Overlapping sets, added and removed, used at the same time and in different orders.
    sets = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2], [0, 1, 2], [2, 0])]
    assert [s.process_set_id for s in sets] == [3, 4, 0, 1]
    handles = {}
    for i in range(4) if rank else reversed(range(4)):
        if sets[i].included():
            handles[i] = hvd.allreduce_async(x, name="same", op=hvd.Sum, process_set=sets[i])
    for i, handle in handles.items():
        assert hvd.synchronize(handle)[0] == sum(10.0**r for r in sets[i].ranks)
    assert hvd.remove_process_set(sets[0])
    assert sets[0].process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    fails(ValueError, lambda: hvd.allreduce(x, process_set=sets[0]))
    fails(ValueError, lambda: hvd.remove_process_set(sets[0]))
    fails(MismatchError, lambda: hvd.add_process_set([rank]))
    fails(ValueError, lambda: hvd.add_process_set([0, 7]))
    assert hvd.add_process_set(sets[0]).process_set_id == 5
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [111.0] * 4

    # Parts of a split communicator: every rank passes its own, numbered in rank order.
    part = hvd.ProcessSet(MPI.COMM_WORLD.Split(0 if rank == 1 else 1, -rank))
    assert hvd.add_process_set(part).ranks == ([1] if rank == 1 else [0, 2])
    assert part.process_set_id == (2 if rank == 1 else 1)
    assert hvd.allreduce(x, op=hvd.Sum, process_set=part)[0] == (10 if rank == 1 else 101)
    null = hvd.ProcessSet(MPI.COMM_WORLD.Split(MPI.UNDEFINED if rank == 1 else 1, rank))
    assert hvd.add_process_set(null).process_set_id == (None if rank == 1 else 1)

    fails(MismatchError, lambda: hvd.broadcast(x, rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = hvd.allreduce_async(x, name="over the end")
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert even.process_set_id is None
    fails(NotInitializedError, lambda: hvd.synchronize(handle))
    fails(ValueError, lambda: hvd.allreduce(x, process_set=even))


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["3", "2,1"])
def test_a_job_with_process_sets_and_two_lives(hosts: str) -> None:
    on_ranks(two_lives_with_process_sets, 3, hosts=hosts, timeout_s=60)


@pytest.mark.mpi
def test_sets_between_hosts_then_some_ranks_and_their_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace-{rank}.json"
    code = f"""
        import os
        from mpi4py import MPI
        import torch
        import horo_lite.torch as hvd

        hvd.init(process_sets=[[0, 1], [1, 2]])
        assert hvd.mpi_threads_supported()
        first, rank, x = hvd.ProcessSet([0, 1]), hvd.rank(), torch.ones(3)
        hvd.add_process_set(first)
        for _ in range(5):
            if rank == 1:  # waits for the set after the world, rank 0 before it
                assert hvd.allreduce(x, name="world", op=hvd.Sum)[0] == 3
                assert hvd.allreduce(x, name="set", op=hvd.Sum, process_set=first)[0] == 2
            else:
                world = hvd.allreduce_async(x, name="world", op=hvd.Sum)
                if rank == 0:
                    assert hvd.allreduce(x, name="set", op=hvd.Sum, process_set=first)[0] == 2
                assert hvd.synchronize(world)[0] == 3
        hvd.shutdown()

        os.environ.update(HORO_LITE_TEST_HOSTS="1,1", HOROVOD_TIMELINE={str(path)!r})
        if rank:
            hvd.init(comm=[1, 2], process_sets="dynamic")
            assert hvd.init(comm=[1, 2]).size == 2
            assert hvd.rank() == rank - 1
            hvd.allreduce(torch.ones(3), name="loss")
            hvd.allgather(torch.ones(2))
            assert hvd.mpi_enabled() and hvd.mpi_built() and not hvd.gloo_enabled()
            hvd.shutdown()
        else:
            try:
                hvd.init(comm=[1, 2])
                raise SystemExit("init() took a rank that is not in the list")
            except ValueError as error:
                assert "rank 0" in str(error)
        print("done")
    """
    result = run_ranks(code, 3, env={"HORO_LITE_TEST_HOSTS": "2,1"}, timeout_s=60).check()
    assert result.stdout.count("done") == 3
    for rank in range(2):
        events = json.loads(Path(str(path).replace("{rank}", str(rank))).read_text())
        events = [e for e in events if e["ph"] == "X" and e["cat"] != "phase"]
        assert [event["cat"] for event in events] == ["allreduce", "allgather"]
        assert [event["name"] for event in events] == ["allreduce 'loss'", "allgather 'noname.1'"]
        assert all(event["dur"] > 0 and event["pid"] == rank for event in events)


@pytest.mark.served
@pytest.mark.mpi
def test_a_script_as_horovods_documentation_has_it() -> None:
    code = """
        import torch
        import torch.nn.functional as F
        import horo_lite.torch as hvd

        hvd.init()
        torch.manual_seed(hvd.rank())
        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank())
        torch.set_num_threads(1)

        digits = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(1))
        labels = torch.arange(200) % 10
        images = digits[labels] + 0.1 * torch.randn(200, 1, 28, 28)
        data = torch.utils.data.TensorDataset(images, labels)
        sampler = torch.utils.data.distributed.DistributedSampler(
            data, num_replicas=hvd.size(), rank=hvd.rank())
        loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv1 = torch.nn.Conv2d(1, 10, kernel_size=5)
                self.conv2 = torch.nn.Conv2d(10, 20, kernel_size=5)
                self.fc = torch.nn.Linear(320, 10)

            def forward(self, x):
                x = F.relu(F.max_pool2d(self.conv1(x), 2))
                x = F.relu(F.max_pool2d(self.conv2(x), 2))
                return F.log_softmax(self.fc(x.view(-1, 320)), dim=1)

        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16,
            op=hvd.Average)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

        means = []
        for epoch in range(4):
            sampler.set_epoch(epoch)
            total = 0.0
            for image, label in loader:
                optimizer.zero_grad()
                loss = F.nll_loss(model(image), label)
                loss.backward()
                optimizer.step()
                total += loss.item() / len(loader)
            means.append(hvd.allreduce(torch.tensor(total), name="avg_loss").item())
        assert means[-1] < 0.5 * means[0], means
        weights = hvd.allgather_object([p.tolist() for p in model.parameters()])
        assert weights[0] == weights[1]
        if hvd.rank() == 0:
            print("trained")
    """
    assert "trained" in script_on_ranks(code, 2, timeout_s=60).stdout


@pytest.mark.launches
def test_one_process_is_a_world(tmp_path: Path) -> None:
    code = f"""
        import os
        import horo_lite.torch as hvd
        import horo_lite.torch.mpi_ops, horo_lite.torch.functions, horo_lite.torch.compression
        import torch
        for _ in range(2):
            alone = hvd.ProcessSet([0])
            hvd.init(process_sets=[alone])
            assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
            assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1) and hvd.is_homogeneous()
            assert not hvd.mpi_enabled() and hvd.mpi_threads_supported()
            assert hvd.gloo_built() and not hvd.gloo_enabled()
            assert not (hvd.ddl_built() or hvd.ccl_built() or hvd.rocm_built())
            assert isinstance(hvd.nccl_built(), int) and isinstance(hvd.cuda_built(), bool)
            hvd.start_timeline({str(tmp_path / "t.json")!r})
            try:
                hvd.start_timeline("again.json")
                raise SystemExit("two timelines")
            except ValueError:
                pass
            x = torch.arange(4.0, requires_grad=True)
            hvd.allreduce(x, process_set=alone).sum().backward()
            assert hvd.allreduce(x.detach(), op=hvd.Adasum).tolist() == [0, 1, 2, 3]
            assert hvd.broadcast_object("me") == "me" and hvd.allgather_object("me") == ["me"]
            hvd.barrier()
            hvd.stop_timeline()
            hvd.shutdown()
        assert os.environ["HORO_LITE_BUCKET_BYTES"] == "123456"
    """
    run_ranks(code, 1, launcher=False, env={"HOROVOD_FUSION_THRESHOLD": "123456"}).check()
    events = json.loads((tmp_path / "t.json").read_text())
    assert {"allreduce", "broadcast_object", "allgather_object", "barrier"} <= {
        e.get("cat") for e in events
    }


def test_all_names_of_horovods_documentation() -> None:
    for name in mpi_ops.__all__:
        assert getattr(hvd, name) is getattr(mpi_ops, name)
    assert hvd.Adasum not in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


def test_a_work_of_torch_distributed_is_not_waited_for_inside_an_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a finalizer or a signal handler: refused, and complete afterwards."""
    groups: dict[int, Group] = {}
    works: dict[int, Work] = {}
    real = AllGather.move

    def move(self: AllGather, part: Any, transport: Any, headers: Any) -> Any:
        mine = np.full(1, transport.rank + 1.0)
        handle = ops.allreduce_async_(mine, hvd.Sum, group=groups[transport.rank])
        work = works[transport.rank] = Work(handle, [torch.from_numpy(mine)], Waiter())
        with pytest.raises(HoroLiteError, match="while this thread was in 'allgather"):
            work.wait()
        return real(self, part, transport, headers)

    monkeypatch.setattr(AllGather, "move", move)

    def rank(group: Group) -> None:
        groups[group.rank] = group
        ops.allgather(np.ones(1), group=group)
        assert works[group.rank].wait()
        assert works[group.rank].result()[0].item() == 3

    run_threads(2, rank)


def test_a_future_that_a_signal_handler_requests_in_the_middle_of_another_request() -> None:
    """One thread completes both, in the order of requests."""

    def rank(group: Group) -> None:
        waiter, futures = Waiter(), []

        def request() -> Any:
            handle = ops.allreduce_async(1.0, hvd.Sum, group=group)
            return Work(handle, [torch.ones(1)], waiter).get_future()

        def trace(frame: Any, event: str, _: Any) -> Any:
            return at_line if frame.f_code is Waiter.put.__code__ else None

        def at_line(frame: Any, event: str, _: Any) -> Any:
            if event == "line":  # as if a signal's handler were called there
                futures.append(request())
            return at_line

        sys.settrace(trace)
        try:
            futures.append(request())
        finally:
            sys.settrace(None)
        for future in futures:
            future.wait()
        assert len(futures) > 4
        waiter.close()

    run_threads(2, rank)
    assert not [each for each in threading.enumerate() if each.name == "horo_lite futures"]
