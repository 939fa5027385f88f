"""join(): uneven numbers of batches, and what the others can do while a rank has none."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from home_made import Parameter
from launch import RanksFailedError, run_ranks, run_threads
from worlds import on_ranks

import horo_lite as hvd
from horo_lite import Average, Max, Min, Op, Product, Sum, ops
from horo_lite.adapters import adapter_of
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.errors import MismatchError, PeerLostError
from horo_lite.training.reducer import Reducer

ORACLE = {
    Sum: lambda xs, size: sum(xs),
    Average: lambda xs, size: sum(xs) / size,  # of all ranks, as in Horovod
    Min: lambda xs, size: np.minimum.reduce(xs),
    Max: lambda xs, size: np.maximum.reduce(xs),
    Product: lambda xs, size: np.multiply.reduce(xs),
}


def values(rank: int, dtype: str = "float32") -> Any:
    """Return values that differ by rank, exact in every dtype, of both signs across ranks."""
    return (np.arange(6).reshape(3, 2) % 3 + 2 * rank - 3).astype(dtype)


def awaited(group: Group, name: str) -> Callable[..., Any]:
    """Return the asynchronous form of an operation, wrapped as a blocking call."""
    begin = getattr(ops, f"{name}_async")
    return lambda *args, **kwargs: group.synchronize(begin(*args, **kwargs, group=group))


def direct(group: Group, name: str) -> Callable[..., Any]:
    return partial(getattr(ops, name), group=group)


@pytest.mark.parametrize("joined", [[0], [2], [0, 1], [1, 3]])
def test_what_the_others_do_while_ranks_have_joined(joined: list[int]) -> None:
    size = 4
    here = [r for r in range(size) if r not in joined]

    def work(group: Group) -> None:
        x = values(group.rank)
        for form in (partial(direct, group), partial(awaited, group)):
            for op, oracle in ORACLE.items():
                for dtype in ("float64", "float16", "int32", "int8"):
                    got = form("allreduce")(values(group.rank, dtype), op)
                    expected = oracle([values(r, dtype).astype("f8") for r in here], size)
                    expected = np.trunc(expected) if dtype.startswith("int") else expected
                    np.testing.assert_allclose(got, expected, rtol=1e-3, err_msg=f"{op} {dtype}")
                    assert got.dtype == dtype
            for op, negated in ((Sum, False), (Max, False), (Min, True), (Product, True)):
                of = [(np.arange(6) % size == r) ^ negated for r in range(size)]
                got = form("allreduce")(of[group.rank], op)
                expected = np.array([r in here for r in np.arange(6) % size]) ^ negated
                np.testing.assert_array_equal(got, expected, err_msg=f"{op} bool")
            total = sum(values(r) for r in here)
            options = {"prescale_factor": 2.0, "postscale_factor": 0.25}
            for compression in (Compression.none, Compression.fp16, Compression.bf16):
                got = form("allreduce")(x, Sum, compression=compression, **options)
                np.testing.assert_array_equal(got, total / 2)
            got = form("grouped_allreduce")([x, 2.0 * x, np.float64(group.rank)], Sum, name="g")
            np.testing.assert_array_equal(got[1], 2 * total)
            assert got[2] == sum(here)
            rows = x[: 1 + group.rank % 3]  # a different number on each rank
            parts = [values(r)[: 1 + r % 3] for r in here]
            np.testing.assert_array_equal(form("allgather")(rows), np.concatenate(parts))
            root = here[-1]
            np.testing.assert_array_equal(form("broadcast")(x, root, name="b"), values(root))
        ops.allreduce_(y := x.copy(), Sum, group=group)
        group.synchronize(ops.allreduce_async_(z := x.copy(), Sum, group=group))
        np.testing.assert_array_equal([y, z], [total, total])
        ops.barrier(group=group)
        ops.grouped_broadcast_([z := x.copy(), z[:1]], here[0], names=["p", "q"], group=group)
        np.testing.assert_array_equal(z, values(here[0]))
        handles = [ops.allreduce_async(x + i, Sum, name=str(i), group=group) for i in range(20)]
        for i in range(20) if group.rank % 2 else range(19, -1, -1):
            expected = total + i * len(here)
            np.testing.assert_array_equal(group.synchronize(handles[i]), expected)

    def rank(group: Group) -> None:
        if group.rank in here:
            work(group)
        assert group.join() in here
        # As before, including unnamed operations, of which some ranks have called more.
        everyone = sum(values(r) for r in range(size))
        np.testing.assert_array_equal(ops.allreduce(values(group.rank), Sum, group=group), everyone)
        np.testing.assert_array_equal(
            awaited(group, "allreduce")(values(group.rank), Sum), everyone
        )

    run_threads(size, rank, timeout_s=60)


def test_what_needs_every_rank_is_an_error_and_no_hang() -> None:
    def rank(group: Group) -> None:
        x = np.ones((2, 2), np.float32)
        if group.rank != 1:
            for label, call in {
                "alltoall": lambda: ops.alltoall(x, [1, 0, 1], group=group),
                "alltoall 'a'": lambda: awaited(group, "alltoall")(x, [1, 0, 1], name="a"),
                "reducescatter": lambda: ops.reducescatter(x, group=group),
                "reducescatter number": lambda: awaited(group, "reducescatter")(x),
                "broadcast from rank 1": lambda: ops.broadcast(x, 1, group=group),
                "broadcast 'b' from rank 1": lambda: awaited(group, "broadcast")(x, 1, name="b"),
                "broadcast_object": lambda: ops.broadcast_object("x", 0, group=group),
                "allgather_object": lambda: ops.allgather_object("x", group=group),
                "new_group": lambda: group.agree("new_group", "ranks [0]"),
                "allreduce": lambda: ops.allreduce(x, Max, prescale_factor=2.0, group=group),
            }.items():
                with pytest.raises(MismatchError, match=f"^{label}.* needs every rank, but rank 1"):
                    call()
            # Mismatches among the others concern only them.
            with pytest.raises(MismatchError, match=r"rank 0: .*\[2, 2\]; rank 2: .*\[1, 2\]"):
                ops.allreduce(x[: 2 - group.rank // 2], group=group)
            with pytest.raises(MismatchError, match=r"rank 0: .*\[2, 2\]; rank 2: .*\[1, 2\]"):
                awaited(group, "allreduce")(x[: 2 - group.rank // 2], name="c")
            with pytest.raises(MismatchError, match=r"by rank . but not by rank [02], and"):
                awaited(group, "allreduce")(x, name=f"of rank {group.rank}")
            assert awaited(group, "allreduce")(x, Sum)[0, 0] == 2
        assert group.join() != 1
        assert awaited(group, "allreduce")(x, Sum)[0, 0] == 3

    run_threads(3, rank)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_rank_is_the_same_everywhere(asynchronous: bool) -> None:
    """Whatever the others do after some have joined: three epochs, each in a different order."""
    orders = [[2, 0, 1], [1, 2, 0], [0, 1, 2]]

    def rank(group: Group) -> list[int]:
        add: Any = (
            awaited(group, "allreduce") if asynchronous else partial(ops.allreduce, group=group)
        )
        lasts = []
        for order in orders:
            for turn in range(order.index(group.rank)):
                assert add(np.ones(1), Sum)[0] >= 3 - turn - 1
            lasts.append(group.join())
        return lasts

    assert run_threads(3, rank) == [[order[-1] for order in orders]] * 3


class OneMore(Compressor):
    """Has state, as for error feedback, and adds one to a rank's contribution."""

    def __init__(self) -> None:
        super().__init__("one more")
        self.kept = threading.Lock()  # which cannot be sent to another rank

    def prepare(self, name: str, gradient: Any) -> None:
        gradient += 1


def test_a_compressor_of_ones_own_adds_nothing_on_a_rank_that_has_joined() -> None:
    def rank(group: Group) -> None:
        if group.rank == 1:
            group.join()
            return
        for form in (direct, awaited):
            x = np.full(3, group.rank + 1.0)
            total = form(group, "allreduce")(x, Sum, compression=OneMore())
            assert total.tolist() == [2 + 4] * 3
        group.join()

    run_threads(3, rank)


def test_a_world_of_one_joins_itself() -> None:
    hvd.init()
    assert hvd.join() == 0
    hvd.shutdown()


def test_messages_name_ranks_as_the_world_does() -> None:
    """In a group with ranks 5 and 7 of a world."""
    from horo_lite._native import thread_group
    from horo_lite.transports.shm import ShmTransport

    natives = thread_group(2)

    def rank(outer: Group) -> str:
        r = outer.rank
        group = Group(ShmTransport(natives[r], [5, 7]))
        with pytest.raises(MismatchError) as error:
            awaited(group, "allreduce")(np.ones(1), name=f"of {r}")
        with pytest.raises(MismatchError, match=r"rank 5: .*\[1\]; rank 7: .*\[2\]"):
            awaited(group, "allreduce")(np.ones(1 + r), name="shape")
        if r:
            with pytest.raises(MismatchError, match="rank 5 has no more batches"):
                ops.broadcast(np.ones(1), 0, group=group)
        group.join()
        group.close()
        return str(error.value)

    mine, other = run_threads(2, rank)
    assert "by rank 5 but not by rank 7" in mine
    assert "by rank 7 but not by rank 5" in other


def test_unnamed_numbers_stay_alike_after_unmatched_operations() -> None:
    """Several operations have no match on one rank, and one of their handles is dropped."""

    def rank(group: Group) -> None:
        if group.rank == 0:
            handles = [ops.allreduce_async(np.ones(1), group=group) for _ in range(3)]
            for handle in handles[:2]:
                with pytest.raises(MismatchError, match="by rank 0 but not by rank 1"):
                    group.synchronize(handle)
        else:
            with pytest.raises(MismatchError, match="by rank 1 but not by rank 0"):
                awaited(group, "allgather")(np.ones(1), name="another")
        for _ in range(2):
            assert awaited(group, "allreduce")(np.full(1, group.rank + 1.0), Sum)[0] == 3

    run_threads(2, rank)


def test_optimizers_are_counted_alike_after_a_join_whichever_a_rank_has_kept() -> None:
    """Python may have collected an unused one on some ranks only."""

    def rank(group: Group) -> None:
        def reducer(parameter: Parameter) -> Reducer:
            return Reducer(group, adapter_of(parameter), [("w", parameter)])

        kept = []
        for _ in range(2):
            parameter = Parameter(np.zeros(2, np.float32))
            parameter.grad = np.full(2, group.rank + 1.0)
            one = reducer(parameter)
            one.finish()
            assert parameter.grad.tolist() == [1.5, 1.5]
            kept += [one] * group.rank
            del one
            gc.collect()
            group.join()
        reducer(parameter).finish()
        later = reducer(parameter)
        if group.rank == 0:
            later.finish()
        group.join()
        later.finish()

    run_threads(2, rank)


@pytest.mark.parametrize("weighted", [False, True])
def test_averages_count_all_ranks_or_all_samples(weighted: bool) -> None:
    """Gradients are announced one by one, so buckets are sent early; all ranks lack one."""
    counts = [3, 5, 0]

    def rank(group: Group) -> list[Any]:
        parameters = [Parameter(np.zeros(n, np.float32)) for n in (2, 1, 1)]
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        reducer = Reducer(group, adapter_of(parameters[0]), named, bucket_bytes=4)
        results = []
        for epoch in range(2):
            n = counts[(group.rank + epoch) % 3]
            for step in range(n):
                reducer.weight = group.rank + 1.0 if weighted else None
                for i in (1, 0):
                    parameters[i].grad = np.full_like(parameters[i].data, step + group.rank + i)
                    reducer.ready(i)
                reducer.finish()
                assert parameters[2].grad is None
                results.append((epoch, step, parameters[0].grad[0], parameters[1].grad[0]))
            group.join()
        return results

    for r, results in enumerate(run_threads(3, rank)):
        assert len(results) == sum(counts[(r + epoch) % 3] for epoch in range(2))
        for epoch, step, *got in results:
            here = [k for k in range(3) if step < counts[(k + epoch) % 3]]
            weights = {k: k + 1.0 if weighted else 1.0 for k in here}
            total = sum(weights.values()) if weighted else 3
            for i, value in enumerate(got):
                expected = sum(weights[k] * (step + k + i) for k in here) / total
                assert value == pytest.approx(expected, rel=1e-6)


def test_an_average_of_no_samples_is_an_error_only_of_those_that_ask_for_it() -> None:
    def rank(group: Group) -> int:
        if group.rank < 2:
            with pytest.raises(ValueError, match="every rank passed weight 0"):
                ops.allreduce(np.ones(3), weight=0, group=group)
            handle = ops.allreduce_async(np.ones(3), weight=0, group=group)
            with pytest.raises(ValueError, match="every rank passed weight 0"):
                group.synchronize(handle)
            mean = ops.allreduce(np.full(3, group.rank + 1.0), weight=group.rank, group=group)
            assert mean.tolist() == [2.0] * 3
        last = group.join()
        assert ops.allreduce(np.array([group.rank]), hvd.Sum, group=group) == 3
        return last

    assert len(set(run_threads(3, rank))) == 1


def test_a_rank_that_fails_ends_the_wait_of_those_that_have_joined() -> None:
    def rank(group: Group) -> None:
        if group.rank == 1:
            ops.allreduce(np.ones(1), group=group)
            raise KeyError("no such sample")
        group.join()

    with pytest.raises(RanksFailedError) as caught:
        run_threads(3, rank)
    for r in (0, 2):
        assert isinstance(caught.value.errors[r], PeerLostError)
        # In join(), in its engine, or before it: whatever it noticed first.
        assert "rank 1" in str(caught.value.errors[r])


def random_epoch(rng: random.Random, size: int) -> tuple[list[str], list[int]]:
    """Return the calls of an epoch, and how many of them each rank makes before it joins."""
    kinds = ["allreduce", "allgather", "broadcast", "barrier", "step", "shuffled", "late"]
    todo = rng.choices(kinds, k=rng.randrange(14))
    stops = [rng.randrange(len(todo) + 1) for _ in range(size)]
    stops[rng.randrange(size)] = len(todo)
    return todo, stops


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_that_ranks_leave_anywhere(seed: int) -> None:
    """Direct and asynchronous calls; some handles are waited for only after join()."""
    everywhere = random.Random(seed)
    size = everywhere.choice([2, 3, 4])
    epochs = [random_epoch(everywhere, size) for _ in range(3)]

    def rank(group: Group) -> list[int]:
        r, rng = group.rank, random.Random(100 * seed + group.rank)
        slots = [Parameter(np.zeros(n, np.float32)) for n in (5, 3, 2)]
        named = [(f"p{i}", slot) for i, slot in enumerate(slots)]
        reducer = Reducer(group, adapter_of(slots[0]), named, bucket_bytes=16)

        def do(what: str, k: int, here: list[int]) -> Any:
            x, expected = np.full(4, 10.0 * k + r), {q: 10.0 * k + q for q in here}
            total = sum(expected.values())
            # Whether a call is asynchronous must be the same on all ranks.
            form = awaited if k % 2 else direct
            if what == "allreduce":
                assert form(group, what)(x, Sum)[0] == total
            elif what == "allgather":
                got = form(group, what)(x[: 1 + r % 2])
                assert got.tolist() == [v for q, v in expected.items() for _ in range(1 + q % 2)]
            elif what == "broadcast":
                assert form(group, what)(x, here[k % len(here)])[0] == expected[here[k % len(here)]]
            elif what == "barrier":
                ops.barrier(group=group)
            elif what == "shuffled":
                names = rng.sample("abc", 3)
                handles = {
                    n: ops.allreduce_async(x + ord(n), Sum, name=n, group=group) for n in names
                }
                for name in rng.sample("abc", 3):
                    got = group.synchronize(handles[name])
                    assert got[0] == total + len(here) * ord(name)
            elif what == "step":
                for i, slot in enumerate(slots):
                    slot.grad = np.full_like(slot.data, 10.0 * k + r + i)
                    reducer.ready(i)
                reducer.finish()
                for i, slot in enumerate(slots):
                    np.testing.assert_allclose(slot.grad, (total + len(here) * i) / size, rtol=1e-6)
            else:
                return ops.allreduce_async(x, Sum, group=group), total
            return None

        lasts = []
        for todo, stops in epochs:
            late = []
            for k, what in enumerate(todo[: stops[r]]):
                time.sleep(rng.choice([0, 0, 0, 0.002]))
                late.append(do(what, k, [q for q in range(size) if stops[q] > k]))
            lasts.append(group.join())
            for handle, total in filter(None, late):
                assert group.synchronize(handle)[0] == total
        return lasts

    results = run_threads(size, rank)
    assert results == [results[0]] * size
    for (todo, stops), last in zip(epochs, results[0], strict=True):
        # No rank has waited for more operations than the last one: it has seen every step.
        waits = [[k for k in range(stop) if todo[k] != "late"] for stop in stops]
        assert len(waits[last]) == max(map(len, waits))


# horo_lite.torch.


def test_torch_operations_while_a_rank_has_joined() -> None:
    torch = pytest.importorskip("torch")
    import horo_lite.torch as th

    def rank(group: Group) -> None:
        r, k = group.rank, {"process_set": group}
        if r != 2:
            here = [q for q in range(4) if q != 2]
            for dtype in (torch.float32, torch.bfloat16, torch.int64):
                x = torch.arange(4).to(dtype) + r
                assert th.allreduce(x, op=th.Sum, **k).tolist() == [4 + 3 * i for i in range(4)]
                assert th.allreduce(x, op=th.Min, **k).tolist() == [0, 1, 2, 3]
                assert th.allreduce(x, op=th.Max, **k).tolist() == [3, 4, 5, 6]
            x = x.double().requires_grad_()
            th.allreduce(x, op=th.Average, **k).sum().backward()
            assert x.grad.tolist() == [0.75] * 4
            assert th.allgather(x.detach()[: r + 1], **k).tolist() == [
                float(i + q) for q in here for i in range(q + 1)
            ]
            one, two = th.grouped_allgather([x.detach()[:1], x.detach()[:1] * 2], **k)
            assert (one * 2).tolist() == two.tolist() == [0, 2, 6]
            assert th.broadcast(x.detach(), 3, **k)[0] == 3
            assert th.broadcast_object({"from": r}, 3, **k) == {"from": 3}
            for name in ("complex32", "float8_e5m2"):  # unknown to NumPy
                few = torch.ones(1).to(getattr(torch, name))
                assert len(th.allgather(few, **k)) == len(here)
            sparse = torch.tensor([4.0 if q == r else 0.0 for q in range(4)]).to_sparse()
            total = th.sparse_allreduce_async(sparse, "s", th.Average, **k)().to_dense()
            assert total.tolist() == [1, 1, 0, 1]
            th.barrier(**k)
            # Of equal gradients Adasum returns one; zeros have no effect.
            got = th.allreduce(torch.tensor([3.0, 4.0]), op=th.Adasum, **k)
            assert got.tolist() == pytest.approx([3.0, 4.0])
            with pytest.raises(MismatchError, match="needs every rank, but rank 2"):
                th.alltoall(torch.ones(4), **k)
            with pytest.raises(th.HorovodInternalError, match="from rank 2 needs every rank"):
                th.broadcast(x.detach(), 2, **k)
        group.join()
        assert th.allreduce(torch.ones(1) * r, op=th.Sum, **k).item() == 6

    run_threads(4, rank)


def filled(torch: Any, net: Any) -> Any:
    """Fill `net` with the same values everywhere: ranks as threads share torch's generator."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3)
    return net


def network(torch: Any) -> Any:
    net = torch.nn.Sequential(
        torch.nn.EmbeddingBag(6, 3, mode="sum", sparse=True, dtype=torch.float64),
        torch.nn.Linear(3, 4, dtype=torch.float64),
        torch.nn.Linear(4, 2, dtype=torch.float64),
    )
    return filled(torch, net)


def batch(torch: Any, epoch: int, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
    return torch.randint(0, 6, (3, 2), generator=generator)


@pytest.mark.parametrize("op", ["Average", "Sum", "Adasum"])
def test_torch_optimizer_with_uneven_batches(op: str, monkeypatch: Any) -> None:
    """Every step averages all existing batches; sparse gradients, small buckets, two epochs."""
    torch = pytest.importorskip("torch")
    import horo_lite.torch as th

    monkeypatch.setenv("HORO_LITE_BUCKET_BYTES", "64")
    size, counts = (2, [3, 5]) if op == "Adasum" else (3, [3, 5, 0])

    def batches(rank: int, epoch: int) -> int:
        return counts[(rank + epoch) % size]

    def rank(group: Group) -> Any:
        net = network(torch)
        optimizer = th.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.01),
            net.named_parameters(),
            op=getattr(th, op),
            sparse_as_dense=op == "Adasum",
            process_set=group,
        )
        for epoch in range(3):
            for step in range(batches(group.rank, epoch)):
                optimizer.zero_grad()
                net(batch(torch, epoch, step, group.rank)).square().mean().backward()
                optimizer.step()
            last = group.join()
            assert batches(last, epoch) == max(counts)
            th.broadcast_parameters(net, last, process_set=group)
        return net

    expected = network(torch)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01)
    for epoch in range(3):
        for step in range(max(counts)):
            gradients = []
            for r in range(size):
                optimizer.zero_grad()
                if step < batches(r, epoch):
                    expected(batch(torch, epoch, step, r)).square().mean().backward()
                    gradients.append([p.grad.to_dense() for p in expected.parameters()])
            for p, *gs in zip(expected.parameters(), *gradients, strict=True):
                if op == "Adasum" and len(gs) == 2:
                    a, b = gs
                    dot = (a * b).sum()
                    p.grad = (1 - dot / 2 / (a * a).sum()) * a + (1 - dot / 2 / (b * b).sum()) * b
                else:
                    p.grad = sum(gs) / (size if op == "Average" else 1)
            optimizer.step()
    for net in run_threads(size, rank):
        for p, q in zip(net.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["adam", "lbfgs", "compressor"])
def test_whoever_joined_goes_on_as_the_last_rank_would(kind: str) -> None:
    """The usual idiom: parameters and the optimizer's state from the last rank, two epochs."""
    torch = pytest.importorskip("torch")
    import horo_lite.torch as th

    class Halves:  # a user-defined compressor
        compress = staticmethod(lambda x: (x.half(), x.dtype))
        decompress = staticmethod(lambda x, dtype: x.to(dtype))

    counts, n_epochs = [0, 3, 1], 1 if kind == "lbfgs" else 2
    options: dict[str, Any] = {
        "adam": {"gradient_predivide_factor": 2.0, "num_groups": 2},
        "lbfgs": {},
        "compressor": {"compression": Halves()},
    }[kind]

    def optimizer_of(net: Any) -> Any:
        if kind == "lbfgs":
            return torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
        return torch.optim.Adam(net.parameters(), lr=0.01)

    def net_of() -> Any:
        return filled(torch, torch.nn.Linear(2, 3, dtype=torch.float64))

    def loss_of(net: Any, epoch: int, step: int, rank: int) -> Any:
        return (net(batch(torch, epoch, step, rank).double()) - rank).square().mean()

    def train(optimizer: Any, loss_of_step: Callable[[], Any]) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of_step()
            loss.backward()
            return loss

        if kind == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    def rank(group: Group) -> list[Any]:
        net, r = net_of(), group.rank
        optimizer = th.DistributedOptimizer(
            optimizer_of(net), net.named_parameters(), process_set=group, **options
        )
        for epoch in range(n_epochs):
            for step in range(counts[(r + epoch) % 3]):
                train(optimizer, lambda e=epoch, s=step: loss_of(net, e, s, r))
            last = group.join()
            th.broadcast_parameters(net, last, process_set=group)
            if kind != "lbfgs":
                th.broadcast_optimizer_state(optimizer, last, process_set=group)
        return [p.detach() for p in net.parameters()]

    expected = net_of()
    optimizer = optimizer_of(expected)
    for epoch in range(n_epochs):
        for step in range(3):
            here = [r for r in range(3) if step < counts[(r + epoch) % 3]]
            train(
                optimizer,
                lambda e=epoch, s=step, here=here: (
                    sum(loss_of(expected, e, s, r) for r in here) / 3
                ),
            )
    for parameters in run_threads(3, rank):
        for p, q in zip(parameters, expected.parameters(), strict=True):
            rtol = 1e-3 if kind == "compressor" else 1e-9
            torch.testing.assert_close(p, q.detach(), rtol=rtol, atol=rtol)


def test_sync_batch_norm_of_those_that_have_batches() -> None:
    torch = pytest.importorskip("torch")
    import horo_lite.torch as th

    def rank(group: Group) -> None:
        layer = th.SyncBatchNorm(2, affine=False, process_set=group).double()
        for counts in ([2, 1, 0], [0, 2, 1]):
            for step in range(counts[group.rank]):
                here = [r for r in range(3) if step < counts[r]]
                parts = [batch(torch, 0, step, r).double() for r in here]
                whole = torch.nn.BatchNorm1d(2, affine=False).double()(torch.cat(parts))
                got = layer(parts[here.index(group.rank)])
                assert torch.allclose(got, whole.split(3)[here.index(group.rank)])
            group.join()

    run_threads(3, rank)


# Real jobs.


def train_on_uneven_batches() -> None:
    import torch

    import horo_lite.torch as hvd

    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    rank, size = hvd.rank(), hvd.size()
    for compression, bound in ((hvd.Compression.none, 1e-6), (hvd.Compression.fp16, 1e-3)):
        for counts in ([3, 5, 2], [4, 0, 1]):
            weight = torch.nn.Parameter(torch.zeros(100))
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), [("weight", weight)], compression=compression
            )
            for step in range(counts[rank]):
                optimizer.zero_grad()
                (weight * (step + 10.0 * rank + 1.0)).sum().backward()
                optimizer.step()
            last = hvd.join()
            assert last == counts.index(max(counts)), last
            hvd.broadcast_parameters([weight], root_rank=last)
            expected = -sum(sum(s + 10.0 * r + 1.0 for s in range(counts[r])) for r in range(size))
            np.testing.assert_allclose(weight.detach(), expected / size, rtol=bound)
            del optimizer
    if rank == 2:
        x = torch.full((2,), 3.0)
        assert hvd.allreduce(x, op=hvd.Sum, process_set=pair).tolist() == [3, 3]
    hvd.join()
    if rank != 1:
        assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=pair) == 2


@pytest.mark.served
def test_a_torch_job_with_uneven_batches() -> None:
    pytest.importorskip("torch")
    on_ranks(train_on_uneven_batches, 3, timeout_s=90)


JOB = """
    import threading
    import numpy as np
    import horo_lite as hvd
    from horo_lite import new_group

    rank, _ = hvd.init()
    pair = new_group([2, 0])
    joined = [0, 2, 1]  # in this order
    for epoch in range(2):
        for turn in range(joined.index(rank)):
            here = joined[turn + 1:]
            x = np.full(5, rank + 1.0)
            assert hvd.allreduce(x, hvd.Sum)[0] == sum(r + 1 for r in here)
            assert hvd.synchronize(hvd.allreduce_async(x, hvd.Sum))[0] == sum(r + 1 for r in here)
            assert hvd.allgather(x[:1]).tolist() == sorted(r + 1 for r in here)
            if rank == 2:
                assert hvd.allreduce(x, hvd.Sum, group=pair)[0] == 3
                assert hvd.synchronize(hvd.allreduce_async(x, hvd.Sum, group=pair))[0] == 3
        assert hvd.join() == joined[-1]
        if rank != 1:
            handle = hvd.allreduce_async(np.full(1, rank), hvd.Sum, group=pair)
            assert hvd.synchronize(handle)[0] == 2
    assert hvd.synchronize(hvd.allreduce_async(np.full(1, rank), hvd.Sum))[0] == 3
    left = {t.name for t in threading.enumerate()} - {"MainThread", "horo_lite: launcher"}
    assert not left, left
    print("joined", flush=True)

    if rank == 1:
        hvd.allreduce(np.ones(1))
        raise KeyError("no such sample")
    hvd.join()
    print("never", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["3", "2,1"])
def test_a_job_in_which_ranks_join(hosts: str) -> None:
    """Also in a group of some ranks; the job ends if a rank fails while others wait."""
    result = run_ranks(JOB, 3, env={"HORO_LITE_TEST_HOSTS": hosts})
    assert result.stdout.count("joined") == 3, str(result)
    assert result.returncode != 0
    assert "no such sample" in result.stderr, str(result)
    assert "rank 1 of 3" in result.stderr, str(result)
    assert "never" not in result.stdout


@pytest.mark.launches
def test_nobody_is_late_while_the_others_move() -> None:
    """Three engine steps without a blocking call: longer than the limit, but each is shorter."""
    code = """
        import time
        import numpy as np
        import horo_lite as hvd

        rank, _ = hvd.init()
        ends = [time.monotonic()]
        hvd.barrier()
        for _ in range(3 * rank):
            time.sleep(0.8)
            hvd.synchronize(hvd.allreduce_async(np.ones(1)))
            ends.append(time.monotonic())
        assert hvd.join() == 1
        if rank == 1:
            print("longest", max(np.diff([*ends, time.monotonic()])))
    """
    result = run_ranks(code, 2, env={"HORO_LITE_STALL_WARN_S": "2"}).check()
    longest = float(result.stdout.split("longest")[1])
    # On a busy machine a step may take as long as the limit.
    assert "stalled" not in result.stderr or longest > 1.5, str(result)


def test_every_op_has_an_oracle() -> None:
    assert set(ORACLE) == set(Op)
