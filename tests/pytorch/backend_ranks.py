"""Collectives of torch.distributed on a gloo group and on a horo_lite group, side by side.

Every case is a function of the process group that returns tensors. The values depend on the rank
and are integers, which all backends add without rounding: the results must be equal. Cases that
gloo does not support have their expected values written beside them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional

import horo_lite as hvd
import horo_lite.torch
from horo_lite.torch.distributed import ProcessGroup

warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 has replaced
Group = Any
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]


def mine(group: Group, *shape: int, dtype: torch.dtype = torch.float32, plus: int = 0) -> Tensor:
    """Return small numbers, different on each rank."""
    n = torch.Size(shape).numel()
    return (torch.arange(n) % 5 + 3 * group.rank() + 1 + plus).to(dtype).reshape(shape)


# --- the cases -----------------------------------------------------------------------------------


def all_reduce(op: Any, dtype: torch.dtype, group: Group) -> list[Tensor]:
    x = mine(group, 7, dtype=dtype)
    dist.all_reduce(x, op, group=group)
    return [x]


def all_reduce_large(group: Group) -> list[Tensor]:
    x = mine(group, 300, 1001)
    dist.all_reduce(x, group=group)
    return [x]


def all_reduce_complex(group: Group) -> list[Tensor]:
    x = torch.complex(mine(group, 4), -mine(group, 4))
    dist.all_reduce(x, group=group)
    return [x]


def all_reduce_coalesced(group: Group) -> list[Tensor]:
    xs = [mine(group, 3), mine(group, 2, 2)]
    dist.all_reduce_coalesced(xs, group=group)
    return xs


def several_in_flight(group: Group) -> list[Tensor]:
    xs = [mine(group, 1000 + i, plus=i) for i in range(20)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return xs


def by_future(group: Group) -> list[Tensor]:
    futures = []
    for i in range(5):
        x = mine(group, 50, plus=i)
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        futures.append(future.then(lambda f: f.value()[0] * 2))
    return list(torch.futures.wait_all(futures))


def by_future_in_a_callback(group: Group) -> list[Tensor]:
    """As in PowerSGD's hook, whose callback waits for further operations."""

    def again(future: Any) -> Tensor:
        y = future.value()[0] + 1
        return dist.all_reduce(y, group=group, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(mine(group, 5), group=group, async_op=True).get_future()
    return [future.then(again).wait()]


def futures_in_reverse(group: Group) -> list[Tensor]:
    """The later one can only end after the future of the earlier one."""
    xs = [mine(group, 2), mine(group, 3)]
    if group.rank() == 0:
        works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
        last, first = (work.get_future() for work in works[::-1])
        first.wait()
        for r in range(1, group.size()):
            dist.send(torch.ones(1), group_dst=r, group=group)
        last.wait()
    else:
        dist.all_reduce(xs[0], group=group)
        dist.recv(torch.zeros(1), group_src=0, group=group)
        dist.all_reduce(xs[1], group=group)
    return xs


def reduce(group: Group) -> list[Tensor]:
    root = group.size() - 1
    x = mine(group, 4)
    dist.reduce(x, group_dst=root, group=group)
    return [x] if group.rank() == root else []  # torch does not specify the others' values


def reduce_scatter(op: Any, dtype: torch.dtype, group: Group) -> list[Tensor]:
    n = group.size()
    parts = [mine(group, 3, dtype=dtype, plus=r) for r in range(n)]
    out, single = torch.zeros(3, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
    dist.reduce_scatter(out, parts, op, group=group)
    given = mine(group, 2 * n, 3, dtype=dtype)
    dist.reduce_scatter_tensor(single, given, op, group=group)
    assert torch.equal(given, mine(group, 2 * n, 3, dtype=dtype)), "the input has changed"
    return [out, single]


def reduce_scatter_large(group: Group) -> list[Tensor]:
    """So large that the memory shared by the ranks is used several times."""
    n = group.size()
    out, given = torch.zeros(301, 1001), mine(group, n * 301, 1001)
    dist.reduce_scatter_tensor(out, given, group=group)
    return [out]


def reduce_scatter_of_views(group: Group) -> list[Tensor]:
    """Not in C order, without elements, and into the memory of the input."""
    n, r = group.size(), group.rank()
    turned = torch.zeros(3, 2).t()
    dist.reduce_scatter_tensor(turned, mine(group, 3, 2 * n).t(), group=group)
    nothing = torch.zeros(0, 3)
    dist.reduce_scatter_tensor(nothing, torch.zeros(0, 3), group=group)
    own, first = mine(group, n * 50), mine(group, n * 50)
    dist.reduce_scatter_tensor(own[50 * r : 50 * (r + 1)], own, group=group)
    dist.reduce_scatter_tensor(first[:50], first, group=group)
    table = mine(group, n * 5, 10)
    dist.reduce_scatter_tensor(table[:5], table, group=group)
    return [turned, nothing, own[50 * r : 50 * (r + 1)], first[:50], table[:5]]


def broadcast(dtype: torch.dtype, group: Group) -> list[Tensor]:
    xs = []
    for root in range(group.size()):
        x = mine(group, 3, 2, dtype=dtype)
        dist.broadcast(x, group=group, group_src=root)
        xs.append(x)
    return xs


def all_gather(dtype: torch.dtype, group: Group) -> list[Tensor]:
    parts = [torch.zeros(3, dtype=dtype) for _ in range(group.size())]
    dist.all_gather(parts, mine(group, 3, dtype=dtype), group=group)
    out = torch.zeros(group.size() * 2, 2, dtype=dtype)
    dist.all_gather_into_tensor(out, mine(group, 2, 2, dtype=dtype), group=group)
    n, r = out.numel() // group.size(), group.rank()
    whole = torch.zeros(out.numel(), dtype=dtype)
    own = whole[n * r : n * (r + 1)]
    own.copy_(mine(group, n, dtype=dtype))
    dist.all_gather_into_tensor(whole, own, group=group)  # as in FSDP2
    return [*parts, out, whole]


def all_gather_coalesced(group: Group) -> list[Tensor]:
    """The future's value has a list for each rank, unless there is only one."""
    n, shapes = group.size(), [(3,), (2, 2)]
    everyone = [[torch.zeros(shape) for shape in shapes] for _ in range(n)]
    given = [mine(group, *shape) for shape in shapes]
    value = dist.all_gather_coalesced(everyone, given, group=group, async_op=True).wait()
    lists = [value] if n == 1 else value
    assert [[x.shape for x in each] for each in lists] == [list(shapes)] * n
    return [x for each in lists for x in each]


def gather(group: Group) -> list[Tensor]:
    here = group.rank() == 1
    parts = [torch.zeros(5, 2) for _ in range(group.size())] if here else None
    dist.gather(mine(group, 5, 2), parts, group=group, group_dst=1)
    return parts or []


def scatter(group: Group) -> list[Tensor]:
    here = group.rank() == 1
    parts = [mine(group, 5, plus=r) for r in range(group.size())] if here else None
    x = torch.zeros(5)
    dist.scatter(x, parts, group=group, group_src=1)
    return [x]


def all_to_all(group: Group) -> list[Tensor]:
    n, r = group.size(), group.rank()
    out = torch.zeros(n * 2, 3)
    dist.all_to_all_single(out, mine(group, n * 2, 3), group=group)
    uneven = torch.zeros(sum(s + r for s in range(n)), 2)
    dist.all_to_all_single(
        uneven,
        mine(group, sum(r + d for d in range(n)), 2),
        [s + r for s in range(n)],
        [r + d for d in range(n)],
        group=group,
    )
    return [out, uneven]


def overlapping(group: Group) -> list[Tensor]:
    """What is read is in the memory that is written, except on gloo; an output is there twice."""
    n, r, is_gloo = group.size(), group.rank(), dist.get_backend(group) == "gloo"

    def of(view: Tensor) -> Tensor:
        return view.clone() if is_gloo else view

    a, b, c, d, e, f = (mine(group, 3 * n, plus=i) for i in range(6))
    dist.all_gather_into_tensor(a[: 2 * n], of(a[1:3]), group=group)
    dist.all_gather(list(b.split(3)), of(b[1:4]), group=group)
    here, root = r == n - 1, n - 1
    dist.gather(of(c[1:4]), list(c.split(3)) if here else None, group=group, group_dst=root)
    twice = torch.zeros(2)
    dist.all_gather([twice] * n, d[:2], group=group)
    parts = [of(x) for x in d.split(3)] if here else None
    dist.scatter(d[1:4], parts, group=group, group_src=root)
    dist.all_to_all_single(e[n:], of(e[: 2 * n]), group=group)
    dist.reduce_scatter_tensor(f[1:4], of(f), group=group)
    return [a, b, c, d, twice, e, f]


def lists_of_several(group: Group) -> list[Tensor]:
    """With a ProcessGroup's own methods: the tensors of one call, each as if of another rank."""
    n, k = group.size(), 2
    reduced = [mine(group, 4, plus=i) for i in range(k)]
    group.allreduce(reduced).wait()
    largest = [mine(group, 4, plus=i).int() for i in range(k)]
    group.allreduce(largest, op=ReduceOp.BOR).wait()
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    copied = [mine(group, 4, plus=i) for i in range(k)]
    group.broadcast(copied, options).wait()
    gathered = [[torch.zeros(3) for _ in range(k * n)] for _ in range(k)]
    work = group.allgather(gathered, [mine(group, 3, plus=i) for i in range(k)])
    assert [len(each) for each in work.get_future().wait()] == [k * n] * k
    rows = [[i + group.rank()] for i in range(k)]
    sparse = [torch.sparse_coo_tensor([row], mine(group, 1), (n + k,)) for row in rows]
    group.allreduce(sparse).wait()
    assert all(x.is_sparse for x in sparse)
    return [*reduced, *largest, *copied, *gathered[0], *gathered[1], *map(Tensor.to_dense, sparse)]


def by_keyword(group: Group) -> list[Tensor]:
    """With a ProcessGroup's own methods, and single options in place of an object of them."""
    n, r, limit = group.size(), group.rank(), timedelta(minutes=1)
    a, b, c = (mine(group, 3, plus=i) for i in range(3))
    group.broadcast(a, root=1).wait()
    group.allreduce(b, op=ReduceOp.MAX, timeout=limit).wait()
    group.reduce(c, root=0, op=ReduceOp.PRODUCT).wait()
    parts = [torch.zeros(3) for _ in range(n)]
    group.gather(parts if r == 1 else [], mine(group, 3), root=1).wait()
    received = torch.zeros(3)
    group.scatter(received, [mine(group, 3, plus=s) for s in range(n)] if not r else [], 0).wait()
    group.barrier(timeout=limit).wait()
    return [a, b, *([c] if r == 0 else []), *parts, received]


def messages(group: Group) -> list[Tensor]:
    n, r = group.size(), group.rank()
    after, before = (r + 1) % n, (r - 1) % n
    received = []
    for size in 3, 100_000:  # inside the envelope, and fetched
        work = dist.isend(mine(group, size), group_dst=after, group=group, tag=size)
        x = torch.zeros(size)
        dist.recv(x, group_src=before, group=group, tag=size)
        work.wait()
        received.append(x)
    ops = [
        dist.P2POp(dist.isend, mine(group, 4), group=group, group_peer=after),
        dist.P2POp(dist.irecv, x := torch.zeros(4), group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [*received, x]


def objects(group: Group) -> list[Tensor]:
    n, r = group.size(), group.rank()
    everyone: list[Any] = [None] * n
    dist.all_gather_object(everyone, {"rank": r, "more": "x" * r}, group=group)
    one: list[Any] = [r, "y" * r]
    dist.broadcast_object_list(one, group=group, group_src=n - 1)
    at_root: list[Any] = [None] * n
    dist.gather_object(r * 2, at_root if r == 0 else None, group=group, group_dst=0)
    got: list[Any] = [None]
    dist.scatter_object_list(got, list(range(5, 5 + n)), group=group, group_src=0)
    assert everyone == [{"rank": s, "more": "x" * s} for s in range(n)]
    assert one == [n - 1, "y" * (n - 1)]
    assert at_root == ([2 * s for s in range(n)] if r == 0 else [None] * n)
    return [torch.tensor([got[0], *[each["rank"] for each in everyone]])]


def by_functional(group: Group) -> list[Tensor]:
    """Through C++, as in DTensor and torch.compile."""
    x = mine(group, 2 * group.size(), 2)
    results = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.broadcast(x, 1, group),
        functional.all_to_all_single(x, None, None, group),
    ]
    return [functional.wait_tensor(each).clone() for each in results]


def many_of_all_kinds(group: Group) -> list[Tensor]:
    """Operations that run after one round of the engines must not mix their data."""
    results = []
    for i in range(60):
        works, n = [], group.size()
        x, y, z = mine(group, 8, plus=i), mine(group, 8, plus=i), torch.zeros(8 * n)
        works.append(dist.all_reduce(x, group=group, async_op=True))
        works.append(dist.broadcast(y, group=group, group_src=i % n, async_op=True))
        works.append(group.all_gather_single(z, mine(group, 8, plus=i)))
        for work in works:
            work.wait()
        results += [x, y, z]
    return results


def barrier(group: Group) -> list[Tensor]:
    dist.barrier(group)
    assert dist.barrier(group, async_op=True).wait()
    return []


def profiled(group: Group) -> list[Tensor]:
    with torch.profiler.profile() as profile:
        dist.barrier(group)
    assert f"{dist.get_backend(group)}:barrier" in {event.name for event in profile.events()}
    return []


CASES: dict[str, Callable[[Group], list[Tensor]]] = {
    **{
        f"all_reduce {op} {dtype}": partial(all_reduce, getattr(ReduceOp, op), dtype)
        for op in ("SUM", "MIN", "MAX", "PRODUCT")
        for dtype in (*FLOATS, *INTEGERS)
    },
    **{
        f"all_reduce {op} {dtype}": partial(all_reduce, getattr(ReduceOp, op), dtype)
        for op in ("BAND", "BOR", "BXOR")
        for dtype in INTEGERS
    },
    **{
        f"reduce_scatter {op} {dtype}": partial(reduce_scatter, getattr(ReduceOp, op), dtype)
        for op in ("SUM", "MIN", "MAX", "PRODUCT")
        for dtype in (*FLOATS, *INTEGERS)
    },
    **{f"broadcast {d}": partial(broadcast, d) for d in (*FLOATS, *INTEGERS, torch.bool)},
    **{f"all_gather {d}": partial(all_gather, d) for d in (*FLOATS, *INTEGERS, torch.complex64)},
    **{
        function.__name__: function
        for function in (
            all_reduce_large,
            all_reduce_complex,
            all_reduce_coalesced,
            several_in_flight,
            by_future,
            by_future_in_a_callback,
            futures_in_reverse,
            reduce,
            reduce_scatter_large,
            reduce_scatter_of_views,
            all_gather_coalesced,
            gather,
            scatter,
            all_to_all,
            overlapping,
            lists_of_several,
            by_keyword,
            messages,
            objects,
            many_of_all_kinds,
            barrier,
        )
    },
}
if "HORO_LITE_TEST_HOSTS" in os.environ:  # once, since they import PyTorch's compiler
    CASES |= {"by_functional": by_functional, "profiled": profiled}


# Cases that gloo refuses or gets wrong, with the correct results.


def sums_of(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def test_what_gloo_cannot(group: Group) -> None:
    n, r = group.size(), group.rank()
    ranks = range(n)

    def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        numbers = torch.arange(torch.Size(shape).numel()) % 5 + 3 * rank + 1
        return numbers.to(dtype).reshape(shape)

    x = mine(group, 6)
    dist.all_reduce(x, ReduceOp.AVG, group=group)
    assert torch.allclose(x, sums_of([of(s, 6) for s in ranks]) / n, rtol=1e-6), x
    x = mine(group, 6)
    dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group=group)
    assert torch.equal(x, sums_of([of(s, 6) for s in ranks]) * 2), x

    truths = [torch.tensor([s == 0, True, False, s > 0]) for s in ranks]
    for op, expected in (
        (ReduceOp.SUM, torch.stack(truths).any(0)),
        (ReduceOp.MAX, torch.stack(truths).any(0)),
        (ReduceOp.BOR, torch.stack(truths).any(0)),
        (ReduceOp.MIN, torch.stack(truths).all(0)),
        (ReduceOp.BAND, torch.stack(truths).all(0)),
        (ReduceOp.BXOR, torch.stack(truths).sum(0) % 2 == 1),
    ):
        x = truths[r].clone()
        dist.all_reduce(x, op, group=group)
        assert torch.equal(x, expected), (op, x)

    x = mine(group, 5)  # one after the other; gloo's two threads race
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    assert torch.equal(x, sums_of([of(s, 5) for s in ranks]) * n * n), x

    stacked = torch.zeros(n, 2, 2)
    dist.all_gather_into_tensor(stacked, mine(group, 2, 2), group=group)
    assert torch.equal(stacked, torch.stack([of(s, 2, 2) for s in ranks])), stacked
    # Several tensors in one operation, as called by c10d.
    outputs = [torch.zeros(3 * n), torch.zeros(2 * n, 2)]
    inputs = [mine(group, 3), mine(group, 2, 2)]
    group.all_gather_single_coalesced(outputs, inputs).wait()
    for i, shape in enumerate([(3,), (2, 2)]):
        assert torch.equal(outputs[i], torch.cat([of(s, *shape) for s in ranks])), outputs
    parts = [torch.zeros(2), torch.zeros(1)]
    group.reduce_scatter_single_coalesced(parts, [mine(group, 2 * n), mine(group, n)]).wait()
    for part, total in zip(parts, (2 * n, n), strict=True):
        expected = sums_of([of(s, total) for s in ranks])
        assert torch.equal(part, expected.view(n, -1)[r]), parts

    # A reduce-scatter has the bits of the all-reduce, whose order of ranks shows in these values.
    for dtype in FLOATS:
        for op in (ReduceOp.SUM, ReduceOp.AVG, dist._make_nccl_premul_sum(0.3)):
            given = (torch.randn(n * 700, 3, generator=torch.Generator().manual_seed(r)) * 9).to(
                dtype
            )
            out, whole = torch.zeros(700, 3, dtype=dtype), given.clone()
            dist.reduce_scatter_tensor(out, given, op, group=group)
            dist.all_reduce(whole, op, group=group)
            assert torch.equal(out, whole[700 * r : 700 * (r + 1)]), (dtype, op)
    sizes = [0, 5, 3000][:n]  # uneven
    out = torch.zeros(sizes[r])
    dist.reduce_scatter(
        out, [mine(group, size, plus=d) for d, size in enumerate(sizes)], group=group
    )
    assert torch.equal(out, sums_of([of(s, sizes[r]) + r for s in ranks])), out
    total = torch.stack(truths).sum(0)
    for op, expected in ((ReduceOp.SUM, total > 0), (ReduceOp.BXOR, total % 2 == 1)):
        out = torch.zeros(4, dtype=torch.bool)
        dist.reduce_scatter(out, [truths[r]] * n, op, group=group)
        assert torch.equal(out, expected), (op, out)
    z = torch.complex(mine(group, 2 * n), -mine(group, 2 * n))
    out = torch.zeros(2, dtype=torch.complex64)
    dist.reduce_scatter_tensor(out, z, group=group)
    total = sums_of([of(s, 2 * n) for s in ranks])[2 * r : 2 * r + 2]
    assert torch.equal(out, torch.complex(total, -total)), out

    whole = mine(group, 6, 4)
    dist.all_reduce(whole[::2, 1:], group=group)
    assert torch.equal(whole[::2, 1:], sums_of([of(s, 6, 4) for s in ranks])[::2, 1:])
    assert torch.equal(whole[1::2], of(r, 6, 4)[1::2])  # elements outside of the view are unchanged
    # In another memory order on one rank.
    permuted = mine(group, 5, 3) if r else mine(group, 5, 3).t().contiguous().t()
    dist.all_reduce(permuted, group=group)
    assert torch.equal(permuted, sums_of([of(s, 5, 3) for s in ranks]))

    mixed = [mine(group, 3), mine(group, 2, dtype=torch.int64)]
    group.allreduce_coalesced(mixed).wait()
    for x in mixed:
        assert torch.equal(x, sums_of([of(s, *x.shape, dtype=x.dtype) for s in ranks])), mixed

    parts = [torch.zeros(s + 1, 2) for s in ranks]  # uneven
    dist.all_gather(parts, mine(group, r + 1, 2), group=group)
    for s in ranks:
        assert torch.equal(parts[s], of(s, s + 1, 2)), (s, parts[s])
    sent = [mine(group, r + d + 1) for d in ranks]
    got = [torch.zeros(s + r + 1) for s in ranks]
    dist.all_to_all(got, sent, group=group)
    for s in ranks:
        assert torch.equal(got[s], of(s, s + r + 1)), (s, got[s])

    parts = [torch.zeros(4, 2).t() for _ in ranks]  # not in C order, and no thread waits
    work = dist.all_gather(parts, mine(group, 2, 4), group=group, async_op=True)
    while not work.is_completed():
        time.sleep(1e-3)
    assert all(torch.equal(parts[s], of(s, 2, 4)) for s in ranks), parts

    def sparse(rank: int) -> Tensor:  # each has one row more than the previous rank
        places = torch.tensor([[i, (i + rank) % 5] for i in range(rank + 1)]).t()
        values = of(rank, rank + 1, 2)
        return torch.sparse_coo_tensor(places, values, (5, 5, 2), check_invariants=True)

    for factor in 1, 1 + 2j:
        x = sparse(r) * factor
        dist.all_reduce(x, group=group)
        assert torch.equal(x.to_dense(), sums_of([sparse(s).to_dense() for s in ranks]) * factor), x

    x = torch.sparse_coo_tensor(torch.zeros(1, int(r > 0)).long(), torch.ones(int(r > 0)), (2,))
    dist.all_reduce(x, group=group)  # one rank has no element
    assert x.to_dense().tolist() == [n - 1.0, 0.0], x

    # The output is in the memory that held the part for another rank.
    parts = [mine(group, 4, plus=s) for s in ranks]
    dist.all_to_all([parts[(s + 1) % n] for s in ranks], parts, group=group)
    for s in ranks:
        assert torch.equal(parts[(s + 1) % n], of(s, 4) + r), (s, parts)
    parts = [mine(group, 4, plus=s) for s in ranks]
    out = parts[1] if r == 0 else torch.zeros(4)
    dist.scatter(out, parts if r == 0 else None, group=group, group_src=0)
    assert torch.equal(out, of(0, 4) + r), out

    # The thread that copies a result to its place uses the caller's mode, which is thread-local.
    with torch.inference_mode():
        whole = mine(group, 6, 4)
        work = dist.all_reduce(whole[::2, 1:], group=group, async_op=True)
        while not work.is_completed():
            time.sleep(1e-3)
        assert torch.equal(whole[::2, 1:], sums_of([of(s, 6, 4) for s in ranks])[::2, 1:])

    for dtype in torch.float8_e4m3fn, torch.uint16, torch.int16:
        x = mine(group, 4).to(dtype)
        dist.broadcast(x, group=group, group_src=1)
        assert torch.equal(x.to(torch.float64), of(1, 4).to(dtype).to(torch.float64)), x

    x = mine(group, 3)
    if r == 0:
        seen = {dist.recv(got := torch.zeros(3), group=group) for _ in range(n - 1)}
        assert seen == {dist.get_global_rank(group, s) for s in ranks if s}, seen
    else:
        dist.send(x, group_dst=0, group=group)

    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as several:
        dist.all_reduce(x, group=group)
        dist.all_reduce(y := mine(group, 2), group=group)
    several.wait()
    assert torch.equal(y, sums_of([of(s, 2) for s in ranks])), y


def raises(error: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except error as caught:
        assert text in str(caught), caught
    else:
        raise AssertionError(f"no {error.__name__} with {text!r}")


def test_errors(group: Group) -> None:
    r = group.rank()
    x = torch.ones(3 + (r == 1))
    for call in (
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.all_reduce(torch.ones(2), [ReduceOp.SUM, ReduceOp.MAX][r == 1], group=group),
        lambda: dist.broadcast(torch.ones(2), group=group, group_src=int(r == 1)),
        lambda: dist.reduce(torch.ones(2), group=group, group_dst=int(r == 1)),
        lambda: dist.reduce(
            torch.ones(2).int(), group=group, group_dst=int(r == 1), op=ReduceOp.BAND
        ),
        lambda: dist.barrier(group) if r == 1 else dist.all_reduce(torch.ones(2), group=group),
        lambda: dist.all_gather_into_tensor(torch.ones(x.numel() * group.size()), x, group=group),
        lambda: dist.all_to_all_single(
            torch.ones(group.size() + (r == 1)),
            torch.ones(group.size()),
            [1 + (r == 1)] + [1] * (group.size() - 1),
            group=group,
        ),
    ):
        raises(hvd.MismatchError, "ranks disagree on torch.distributed collective", call)
    # Its number is not enough: the message also names the collectives.
    other = (
        (lambda: dist.broadcast(x, group=group, group_src=0))
        if r == 1
        else (lambda: dist.all_reduce(x, group=group))
    )
    raises(hvd.MismatchError, ": allreduce, op Sum", other)
    # The group is in step afterwards. A future has the text, too.
    work = dist.all_reduce(torch.ones(3 + (r == 1)), group=group, async_op=True)
    raises(RuntimeError, "ranks disagree on torch.distributed", work.get_future().wait)
    assert work.is_completed() and not work.is_success()
    assert isinstance(work.exception(), hvd.MismatchError)

    # One that cannot be written, waited for by a thread that waits for others, too.
    works = [
        dist.all_reduce(each, group=group, async_op=True)
        for each in (torch.ones(1).expand(3), torch.ones(3))
    ]
    futures = [work.get_future() for work in works]
    assert futures[1].wait()[0].tolist() == [group.size()] * 3
    raises(RuntimeError, "single memory location", futures[0].wait)
    raises(RuntimeError, "single memory location", works[0].wait)

    # An invalid call of one rank raises before anything is issued.
    raises(ValueError, "length must be", lambda: dist.all_gather([x], x, group=group))
    raises(
        ValueError,
        "input_split_sizes",
        lambda: dist.all_to_all_single(
            torch.ones(4), torch.ones(4), None, [1, 1, 1, 9][: group.size()], group=group
        ),
    )
    for text, call in (
        ("all_reduce: ", lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND, group=group)),
        ("reduce to rank 0: ", lambda: dist.reduce(torch.ones(2), 0, ReduceOp.BAND, group)),
        (
            "reduce_scatter: ",
            lambda: dist.reduce_scatter(
                torch.ones(2), [torch.ones(2)] * group.size(), ReduceOp.BAND, group
            ),
        ),
    ):
        raises(ValueError, f"{text}unsupported reduction operation: BAND", call)
    for text, opaque in (
        ("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        ("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
    ):
        raises(ValueError, text, lambda x=opaque: dist.broadcast(x, group=group, group_src=0))
    meta = torch.ones(2, device="meta")
    raises(ValueError, "on the meta device", lambda: dist.all_reduce(meta, group=group))


def options(kind: str, root: int, root_tensor: int = 0) -> Any:
    """Return c10d's options of a rooted collective."""
    result = getattr(dist, f"{kind}Options")()
    result.rootRank = root
    if root_tensor:
        result.rootTensor = root_tensor
    return result


def test_arguments(group: Group, gloo: Group) -> None:
    """Invalid ones raise the errors that they raise on gloo, before anything is issued."""
    n, r = group.size(), group.rank()
    away = (r + 1) % n
    x, double, longer = torch.zeros(1), torch.zeros(1).double(), torch.zeros(2)
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (1,))
    broadcast, reduce, gather, scatter = (
        partial(options, kind) for kind in ("Broadcast", "Reduce", "Gather", "Scatter")
    )
    cases: list[tuple[str, Callable[[Group], Any]]] = []
    for root in (-1, n):
        cases += [
            ("invalid root rank", lambda g, root=root: g.broadcast([x], broadcast(root))),
            ("invalid root rank", lambda g, root=root: g.reduce([x], reduce(root))),
            ("invalid root rank", lambda g, root=root: g.gather([], [x], gather(root))),
            ("invalid root rank", lambda g, root=root: g.scatter([x], [], scatter(root))),
        ]
    for wrong, text in (double, "invalid tensor type"), (longer, "invalid tensor size"):
        cases += [
            (text, lambda g, wrong=wrong: g.broadcast([x, wrong], broadcast(r))),
            (text, lambda g, wrong=wrong: g.allreduce([x, wrong])),
            (text, lambda g, wrong=wrong: g.scatter([x], [[wrong] * n], scatter(r))),
            (text, lambda g, wrong=wrong: g.gather([[wrong] * n], [x], gather(r))),
            (text, lambda g, wrong=wrong: g.allgather([[x, x] * n] * 2, [x, wrong])),
        ]
    for length in (n - 1, n + 1):
        sizes = f"list size {length}. "
        cases += [
            (f"Incorrect input {sizes}", lambda g, k=length: g.scatter([x], [[x] * k], scatter(r))),
            (f"Incorrect output {sizes}", lambda g, k=length: g.gather([[x] * k], [x], gather(r))),
            ("invalid output tensor list", lambda g, k=length: g.allgather([[x] * k], [x])),
        ]
    cases += [
        ("invalid root tensor", lambda g: g.broadcast([x], broadcast(r, 1))),
        ("invalid root tensor", lambda g: g.broadcast([x], broadcast(r, -1))),
        ("invalid root tensor", lambda g: g.broadcast([], broadcast(r))),
        ("single-element tensor list", lambda g: g.reduce([x, x], reduce(r))),
        ("single-element output tensor list", lambda g: g.scatter([], [], scatter(0))),
        ("single-element output tensor list", lambda g: g.scatter([x, x], [], scatter(0))),
        ("single-element input list", lambda g: g.scatter([x], [], scatter(r))),
        ("single-element input list", lambda g: g.scatter([x], [[x] * n] * 2, scatter(r))),
        ("requires empty input on non-root", lambda g: g.scatter([x], [[x] * n], scatter(away))),
        ("single-element input tensor list", lambda g: g.gather([], [], gather(0))),
        ("single-element input tensor list", lambda g: g.gather([], [x, x], gather(0))),
        ("single-element output list", lambda g: g.gather([], [x], gather(r))),
        ("single-element output list", lambda g: g.gather([[x] * n] * 2, [x], gather(r))),
        ("requires empty output on non-root", lambda g: g.gather([[x] * n], [x], gather(away))),
        ("requires non-empty tensor list", lambda g: g.allreduce([])),
        ("requires non-empty tensor list", lambda g: g.allreduce_coalesced([])),
        ("invalid tensor layout", lambda g: g.allreduce([x, sparse])),
        ("invalid tensor layout at index", lambda g: g.allreduce_coalesced([x, sparse])),
        ("unsupported layout", lambda g: g.allreduce_coalesced([sparse, sparse.clone()])),
        ("unsupported reduction operation", lambda g: g.allreduce([sparse], ReduceOp.MAX)),
        ("dense", lambda g: g.reduce([sparse], reduce(r))),
        ("recv", lambda g: g.barrier()._source_rank()),
        ("recv", lambda g: g.allreduce([torch.ones(1)])._source_rank()),
        ("requires non-empty input tensor list", lambda g: g.allgather([], [])),
        ("tensor lists to have the same length", lambda g: g.allgather([], [x])),
        ("tensor lists to have the same length", lambda g: g.allgather([[x] * n] * 2, [x])),
        ("invalid tensor type", lambda g: g.allgather([[x, *[double] * (n - 1)]], [x])),
    ]
    for text, call in cases:
        for each in (gloo, group):
            raises(RuntimeError, text, partial(call, each))
    # Others, which are undefined on gloo.
    for call in (
        lambda: dist.send(x, group_dst=-2, group=group),
        lambda: dist.recv(x, group_src=n, group=group),
        lambda: dist.reduce_scatter(x, [double] * n, group=group),
        lambda: dist.all_to_all([x] * n, [double] * n, group=group),
        lambda: dist.all_to_all([x] * n, [x] * (n - 1), group=group),
        lambda: group.allgather([[x] * n], [double]),
    ):
        raises(ValueError, "", call)
    for given, error in ({"roots": 1}, TypeError), ({"root": n}, ValueError):
        raises(error, "root", lambda given=given: group.broadcast(x, **given))


def same(group: Group, other: Group) -> None:
    for name, case in CASES.items():
        got, expected = case(group), case(other)
        assert len(got) == len(expected), name
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b), f"{name}: {a} instead of {b}"


@contextmanager
def connecting_late() -> Iterator[None]:
    """Check that no rank begins before all others are connected to the store of the ranks."""
    connected, connect = Path("connected"), dist.TCPStore

    def late(*args: Any, **options: Any) -> Any:
        if not (is_host := args[3]):
            threading.Event().wait(0.2)
        store = connect(*args, **options)
        if not is_host:
            with connected.open("a") as file:
                file.write(".")
        return store

    dist.TCPStore = late
    yield
    dist.TCPStore = connect
    assert len(connected.read_text()) == hvd.size() - 1


def test_devices_of_a_new_group() -> None:
    """PyTorch 2.15 asks as it creates a group, and would record with the backend of a device."""
    asked: list[Any] = []
    with patch.object(
        ProcessGroup, "_set_group_desc", lambda self, _: asked.append(self._device_types)
    ):
        group = dist.new_group()
    assert asked == [[]], asked
    assert group._device_types == [torch.device("cpu")]


def main() -> None:
    by_mpi = "RANK" not in os.environ
    with connecting_late() if by_mpi else nullcontext():
        dist.init_process_group(
            "horo_lite", "horo-lite://" if by_mpi else None, timeout=timedelta(minutes=5)
        )
    world = dist.group.WORLD
    rank, size = hvd.rank(), hvd.size()
    assert size > 1
    assert dist.get_backend() == "horo_lite" and (world.rank(), world.size()) == (rank, size)
    assert by_mpi or (str(rank), str(size)) == (os.environ["RANK"], os.environ["WORLD_SIZE"])
    assert hvd.init() is hvd.context.world()  # the same world
    everyone = dist.new_group(backend="gloo")
    same(world, everyone)
    test_arguments(world, everyone._get_backend(torch.device("cpu")))
    test_what_gloo_cannot(world)
    test_errors(world)

    # Groups: of all, of some in their own order, of one; two at once.
    ranks = [size - 1, 0]
    part, gloo = (
        dist.new_group(ranks, backend=backend, sort_ranks=False) for backend in (None, "gloo")
    )
    if rank in ranks:
        assert part.rank() == ranks.index(rank)
        same(part, gloo)
        test_errors(part)
        test_what_gloo_cannot(part)
    test_devices_of_a_new_group()
    alone = dist.new_group([1])
    if rank == 1:
        x = torch.full((3,), 4.0)
        dist.all_reduce(x, group=alone)
        everyone = [torch.zeros(3)]
        future = dist.all_gather(everyone, x, group=alone, async_op=True).get_future()
        assert future.wait()[0].tolist() == [4.0] * 3
        dist.reduce_scatter(y := torch.zeros(3), [x], ReduceOp.AVG, group=alone)
        assert y.tolist() == [4.0] * 3
        dist.barrier(alone)
    a, b = dist.new_group([0, 1]), dist.new_group(list(range(size)))
    # Messages of one group are not received in another, whatever their tags.
    if rank == 0:
        sent = dist.isend(torch.tensor([1.0]), 1, group=b)
        dist.send(torch.tensor([2.0]), 1, group=a)
        sent.wait()
    elif rank == 1:
        for group, expected in (a, 2.0), (b, 1.0):
            dist.recv(x := torch.zeros(1), 0, group=group)
            assert x.item() == expected
    dist.destroy_process_group(b)
    raises(hvd.NotInitializedError, "this group of ranks is closed", b.barrier)

    dist.destroy_process_group()
    assert hvd.is_initialized() == by_mpi  # by MPI, hvd.init() has made the world
    if not by_mpi:
        once_more(rank, size)
    print("right", flush=True)


def once_more(rank: int, size: int) -> None:
    """With the same store, and over a world that the program has made itself."""
    dist.init_process_group("horo_lite")
    dist.all_reduce(x := torch.tensor([rank + 1.0]))
    assert x.item() == size * (size + 1) / 2
    dist.destroy_process_group()
    # A rank that aborts is not waited for; afterwards all start again.
    dist.init_process_group("horo_lite")
    if rank == 1:
        dist.distributed_c10d._abort_process_group()
    else:
        raises(hvd.PeerLostError, "it called abort()", lambda: dist.all_reduce(torch.ones(1)))
        dist.destroy_process_group()
    assert not hvd.is_initialized()
    made = hvd.init(device="cpu")
    dist.init_process_group("horo_lite")
    assert hvd.allreduce(torch.tensor([rank + 1.0]), op=hvd.Sum).item() == x.item()
    dist.all_reduce(y := torch.tensor([rank + 1.0]))
    assert y.item() == x.item()
    dist.destroy_process_group()
    assert hvd.context.world() is made  # the one made by the program
    raises(
        ValueError,
        "the numbers must be the same",
        lambda: dist.init_process_group(
            "horo_lite", store=dist.HashStore(), rank=size - 1 - rank, world_size=size + size % 2
        ),
    )


if __name__ == "__main__":
    main()
    sys.exit(0)
