"""Gradients in shared memory: the same bits as the ordinary exchange, and really in place."""

from __future__ import annotations

import functools
import gc
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_threads
from worlds import script_on_ranks

torch = pytest.importorskip("torch")

import test_torch_optimizer as ordinary  # noqa: E402
from test_torch_optimizer import small_buckets, watched  # noqa: E402, F401

from horo_lite import _native, ops  # noqa: E402
from horo_lite.collectives.calls import Part  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.collectives.reductions import Average, Exchange, Sum  # noqa: E402
from horo_lite.collectives.shared_memory import share  # noqa: E402
from horo_lite.errors import MismatchError  # noqa: E402
from horo_lite.horovod.reductions import Adasum  # noqa: E402
from horo_lite.torch import Compression, bucket_views  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402
from horo_lite.transports import Reduction  # noqa: E402
from horo_lite.transports.shm import SharedMemory  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def in_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """Yield every exchange of gradients so far: its label, and whether it was in place."""
    seen: list[tuple[str, bool]] = []
    complete = Exchange._complete

    def noted(call: Exchange, part: Part) -> bool:
        seen.append((part.label, part.offsets is not None))
        return complete(call, part)

    monkeypatch.setattr(Exchange, "_complete", noted)
    return seen


def ways(in_place: list[tuple[str, bool]], since: int = 0) -> set[bool]:
    return {way for _, way in in_place[since:]}


def shared_memory(group: Group, n_bytes: int) -> SharedMemory:
    memory = SharedMemory(n_bytes)
    assert share(group, memory)
    return memory


class Mixed(nn.Module):
    """Several dtypes, several layouts, and sizes that are not multiples of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(7 * 16, 33)
        self.shift = nn.Parameter(torch.zeros(33, dtype=torch.bfloat16))
        self.head = nn.Linear(33, 3)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        self.head.double()

    def forward(self, x: Any) -> Any:
        y = self.wide(self.image(x).flatten(1)).tanh() + self.shift.float() + self.empty.sum()
        return self.head(y.double()) * self.scalar


def loss_of(net: Any, step: int, rank: int = 0, size: int = 1) -> Any:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn((12, 3, 6, 6), generator=generator)[rank::size]
    y = torch.randint(0, 3, (12,), generator=generator)[rank::size]
    return nn.functional.cross_entropy(net(x), y)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("kind", "size", "streamed"), [("sgd", 2, 0), ("adam", 3, 1 << 20)])
def test_the_bits_of_the_ordinary_exchange_and_the_model_of_one_process(
    kind: str, size: int, passes: int, streamed: int, in_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_views, "STREAMED_BYTES", streamed)

    def train(net: Any, optimizer: Any, rank: int, size: int, step: int) -> None:
        # All three ways to start again.
        (optimizer, net)[step % 2].zero_grad(set_to_none=step % 3 != 2)
        for k in range(passes):
            loss_of(net, step * passes + k, rank, size).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()

    def rank(group: Group) -> Any:
        nets = Mixed(), Mixed()
        views, plain = (
            DistributedOptimizer(
                OPTIMIZERS[kind](net.parameters()),
                net.named_parameters(),
                backward_passes_per_step=passes,
                process_set=group,
                gradient_as_bucket_view=net is nets[0],
            )
            for net in nets
        )
        addresses: list[int] = []
        for step in range(6):
            for net, optimizer in zip(nets, (views, plain), strict=True):
                train(net, optimizer, group.rank, group.size, step)
            for (name, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
                assert torch.equal(p.grad, q.grad), (name, step)
                assert p.grad.stride() == q.grad.stride()
                assert torch.equal(p, q), (name, step)
            now = [p.grad.data_ptr() for p in nets[0].parameters() if p.numel()]
            addresses = addresses or now
            assert now == addresses
        memory = views._exchange.reducer.shared
        tensors = _native.Tensors([p.grad for p in nets[0].parameters()])
        assert memory.offsets(tensors) is not None
        assert plain._exchange.reducer.shared is None
        return nets[0]

    alone = Mixed()
    optimizer = OPTIMIZERS[kind](alone.parameters())
    for step in range(6):
        train(alone, optimizer, 0, 1, step)
    results = run_threads(size, rank)
    for net in results:
        for p, q, first in zip(*(n.parameters() for n in (net, alone, results[0])), strict=True):
            # Half precision is included: a rank's gradients are rounded before they are added.
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0.02, atol=0.002)
            assert torch.equal(p, first)
    # Every bucket of every exchange but the first, and none of the other optimizer's.
    by_optimizer = {
        number: [way for label, way in in_place if f"optimizer {number}," in label]
        for number in (1, 2)
    }
    n_first = sum("optimizer 1, step 1" in label for label, _ in in_place)
    n = len(by_optimizer[1])
    assert n - n_first >= 5 * size * 3
    assert sorted(by_optimizer[1]) == [False] * n_first + [True] * (n - n_first)
    assert not any(by_optimizer[2])


# Properties of the ordinary optimizer hold here, too.

SAME: dict[str, Callable[[Any], None]] = {
    "clipping and passes": lambda _: ordinary.test_shards_give_what_one_process_gives_on_the_whole(
        "clip", 3, 2
    ),
    "GradScaler": lambda _: ordinary.test_shards_give_what_one_process_gives_on_the_whole(
        "scaler", 2, 1
    ),
    "closures": lambda _: ordinary.test_shards_give_what_one_process_gives_on_the_whole(
        "lbfgs", 2, 1
    ),
    "overlap": ordinary.test_buckets_leave_before_backward_ends_and_all_is_there_when_it_returns,
    "copies": lambda _: ordinary.test_copies_wrap_copies(),
    "flush": lambda _: (
        ordinary.test_fewer_passes_are_flushed_and_the_model_may_zero_its_gradients()
    ),
    "graphs": lambda _: ordinary.test_retained_graphs_second_derivatives_and_other_threads(),
    "checkpoints": lambda group: ordinary.test_checkpoints(True, True, group),
    "inner passes": lambda _: ordinary.test_passes_inside_of_passes_that_begin_later(),
    "compile": lambda _: ordinary.test_compiled(),
    "untouched": lambda group: ordinary.test_only_what_was_touched_takes_part(True, group),
    "untouched zeros": lambda group: ordinary.test_only_what_was_touched_takes_part(False, group),
    "some ranks": lambda _: ordinary.test_touched_on_some_ranks_only(),
    "two losses": lambda _: ordinary.test_losses_with_passes_of_their_own(),
    "several": lambda _: ordinary.test_several_optimizers_on_one_model(),
    "added later": lambda _: ordinary.test_parameters_added_later_unfrozen_and_shared(),
    "by hand": lambda _: ordinary.test_gradients_assigned_by_hand_are_exchanged_by_step(),
    "sparse": lambda _: ordinary.test_sparse_embeddings(False),
    "sparse as dense": lambda _: ordinary.test_sparse_embeddings(True),
    "overflow": lambda _: ordinary.test_all_ranks_skip_the_step_that_overflows_on_one(),
    "broken pass": lambda _: ordinary.test_a_pass_that_breaks_off_leaves_nothing_behind(),
    "error": lambda _: ordinary.test_an_error_in_one_optimizer_leaves_the_others_usable(),
}


@pytest.mark.parametrize("promise", SAME)
def test_keeps_the_ordinary_optimizers_promises(
    promise: str,
    watched: Any,  # noqa: F811
    in_place: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = functools.partial(DistributedOptimizer, gradient_as_bucket_view=True)
    monkeypatch.setattr(ordinary, "DistributedOptimizer", views)
    monkeypatch.setattr(bucket_views, "STREAMED_BYTES", 0)
    SAME[promise](watched)
    assert True in ways(in_place)


def test_what_takes_the_place_of_a_gradient_travels_and_the_kept_one_is_the_view() -> None:
    def rank(group: Group) -> Any:
        weight = nn.Parameter(torch.zeros(5))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), process_set=group, gradient_as_bucket_view=True
        )
        mine = torch.arange(5.0) + group.rank
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            if step == 1:
                weight.grad = mine * 2  # by hand
            elif step == 2:
                (weight * mine).sum().backward(create_graph=True)
                assert weight.grad.requires_grad or weight.grad.grad_fn is None
            elif step == 3:
                weight.grad = torch.stack([mine, mine], 1)[:, 0]  # strided
            else:
                (weight * mine).sum().backward()
            optimizer.synchronize()
            seen.append(weight.grad.tolist())
            if step == 0:
                view = weight.grad
            elif step != 2:
                assert weight.grad is view
        return seen

    average = (torch.arange(5.0) + 0.5).tolist()
    expected = [average, [2 * x for x in average], average, average, average]
    assert run_threads(2, rank) == [expected, expected]


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 17])
def test_streaming_copies_are_exact_at_every_alignment_and_touch_nothing_else(n: int) -> None:
    source = np.random.default_rng(n).integers(1, 256, n + 64, np.uint8)
    for begin in range(0, 64, 7):
        for first in (0, 1, 16, 63):
            target = np.zeros(n + 192, np.uint8)
            parts = source[first : first + n], target[64 + begin : 64 + begin + n]
            _native.Tensors([parts[0]]).copy_to(_native.Tensors([parts[1]]), streaming=True)
            assert np.array_equal(*parts)
            assert np.count_nonzero(target) == n


@pytest.mark.parametrize("streamed", [0, 1 << 30])
def test_any_gradient_is_moved_and_graphs_notice(
    streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_views, "STREAMED_BYTES", streamed)
    x = torch.randn(70, 33, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    gradients = {
        "another layout": torch.arange(70.0 * 33).view(33, 70).t(),
        "strided": torch.arange(140.0 * 33).view(140, 33)[::2],
        "one element": torch.tensor(3.0).expand(70, 33),
        "yet to be negated": x.conj().imag,
        "zeros without memory": torch._efficientzerotensor((70, 33)),  # type: ignore[no-untyped-call]
    }
    assert gradients["yet to be negated"].is_neg()
    for what, gradient in gradients.items():
        view = torch.zeros(70, 33)
        scale = torch.ones(70, 33, requires_grad=True)
        loss = (scale * view).sum()
        bucket_views.move(gradient, view)
        assert torch.equal(view, gradient), what
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("n_steps", [(0, 3), (5, 2)])
def test_a_rank_that_has_joined_takes_part_with_zeros(
    n_steps: tuple[int, int], in_place: Any
) -> None:
    def rank(views: bool, group: Group) -> Any:
        net = ordinary.network().float()
        optimizer = ordinary.wrap(ordinary.sgd(net), group, net, gradient_as_bucket_view=views)
        for epoch in range(2):
            for step in range(n_steps[group.rank]):
                optimizer.zero_grad()
                x, y = ordinary.samples(step + 10 * group.rank + 100 * epoch)
                ordinary.loss_of(net, x.float(), y).backward()
                optimizer.step()
            last = group.join()
            ops.grouped_broadcast_([p.detach() for p in net.parameters()], last, group=group)
        return list(net.parameters())

    results = [run_threads(2, functools.partial(rank, views)) for views in (False, True)]
    for a, b in zip(*(result[0] + result[1] for result in results), strict=True):
        assert torch.equal(a, b)
    # If a rank had no step at all, the ranks were never in an exchange together.
    assert ways(in_place) == {False, 0 not in n_steps}


def test_a_rank_that_has_joined_without_its_optimizer_is_an_error_and_no_hang() -> None:
    def rank(group: Group) -> str:
        def train(n_steps: int) -> None:
            weight = nn.Parameter(torch.zeros(4))
            optimizer = DistributedOptimizer(
                torch.optim.SGD([weight], lr=1.0), process_set=group, gradient_as_bucket_view=True
            )
            for _ in range(n_steps):
                optimizer.zero_grad()
                (weight * (1.0 + group.rank)).sum().backward()
                optimizer.step()

        text = ""
        if group.rank == 0:
            train(3)
            gc.collect()
        else:
            with pytest.raises(MismatchError) as raised:
                train(5)
            text = str(raised.value)
        group.join()
        assert ops.allreduce(1.0, Sum, group=group) == 2
        return text

    _, text = run_threads(2, rank)
    assert "rank 0: memory of this rank; rank 1: shared memory 1 at (0,)" in text


# If it is not possible, results are the same.


@pytest.mark.parametrize(
    "options",
    [{"compression": Compression.fp16}, {"gradient_predivide_factor": 2.0}, {"op": Adasum}],
    ids=str,
)
def test_options_that_need_the_ordinary_exchange_get_it(options: Any, in_place: Any) -> None:
    def rank(group: Group) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            process_set=group,
            gradient_as_bucket_view=True,
            **options,
        )
        for _ in range(3):
            optimizer.zero_grad()
            (weight * torch.tensor([4.0, -4.0])[group.rank]).sum().backward()
            optimizer.step()
        return weight.tolist()

    # Opposite gradients: their average is 0, and so is their Adasum.
    assert run_threads(2, rank) == [[0.0] * 4] * 2
    assert ways(in_place) <= {False}


@pytest.mark.parametrize("where", ["create", "open"])
def test_a_rank_that_gets_no_memory_keeps_all_from_sharing(
    where: str, in_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        @staticmethod
        def create(n_bytes: int) -> Any:
            if where == "create" and threading.current_thread().name == "rank 0":
                raise OSError("no memory")
            return _native.Segment.create(n_bytes)

        @staticmethod
        def open(pid: int, fd: int, n_bytes: int, token: int) -> Any:
            if where == "open" and threading.current_thread().name == "rank 0":
                raise RuntimeError("not mine")
            return _native.Segment.open(pid, fd, n_bytes, token)

    from horo_lite.transports import shm

    class Native:
        Segment = Refusing

        def __getattr__(self, name: str) -> Any:
            return getattr(_native, name)

    monkeypatch.setattr(shm, "_native", Native())

    def rank(group: Group) -> list[float]:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), process_set=group, gradient_as_bucket_view=True
        )
        for _ in range(3):
            optimizer.zero_grad()
            (weight * (1.0 + group.rank)).sum().backward()
            optimizer.step()
        return weight.tolist()

    with pytest.warns(RuntimeWarning, match="cannot access each other's memory"):
        results = run_threads(2, rank)
    assert results == [[-4.5] * 4] * 2
    assert ways(in_place) == {False}


def test_a_mixture_is_an_error_that_says_who_has_what() -> None:
    def options(group: Group) -> None:
        weight = nn.Parameter(torch.zeros(4))
        optimizer = DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            process_set=group,
            gradient_as_bucket_view=group.rank == 1,
        )
        weight.sum().backward()
        optimizer.step()

    message = ordinary.fails_alike(2, options, MismatchError)
    assert "rank 0 has gradient_as_bucket_view=False, rank 1 has gradient_as_bucket_view=True" in (
        message
    )

    def addresses(asynchronous: bool, group: Group) -> None:
        memory = shared_memory(group, 400)
        inside = memory.array(0, 400).view(np.float32)
        array = inside if group.rank else np.zeros(100, np.float32)
        how = {"names": ["w"], "label": "here", "op": Sum, "shared": memory}
        if asynchronous:
            group.synchronize(group.exchange_async([array], **how))
        else:
            group.exchange([array], **how)

    for asynchronous in (True, False):
        fn = functools.partial(addresses, asynchronous)
        message = ordinary.fails_alike(2, fn, MismatchError)
        assert "rank 0: memory of this rank; rank 1: shared memory 1 at (0,)" in message

    def memories(group: Group) -> None:
        """Both have the same position, but in different memories, with different contents."""
        each = [shared_memory(group, 400) for _ in range(2)]
        memory = each[group.rank]
        array = memory.array(0, 400).view(np.float32)
        group.exchange([array], names=["w"], label="here", op=Sum, shared=memory)

    message = ordinary.fails_alike(2, memories, MismatchError)
    assert "rank 0: shared memory 1 at (0,); rank 1: shared memory 2 at (0,)" in message


@pytest.mark.shows("in place")
def test_the_core_adds_up_in_place_and_touches_nothing_else() -> None:
    kinds = [np.float32, np.float64, np.float16]
    sizes = [1, 1023, 1024, 1025, 70_001]

    def rank(op: Any, group: Group) -> None:
        memory = shared_memory(group, 4_000_000)
        everything = memory.array(0, 4_000_000)
        everything[...] = 99  # the gaps do not belong to any tensor
        shared, own, taken = [], [], np.zeros(4_000_000, bool)
        begin = 0
        for k, size in enumerate(sizes * len(kinds)):
            kind = np.dtype(kinds[k // len(sizes)])
            numbers = np.random.default_rng([k, group.rank]).standard_normal(size).astype(kind)
            begin = -(-(begin + 24) // 64) * 64
            n_bytes = size * kind.itemsize
            taken[begin : begin + n_bytes] = True
            array = memory.array(begin, n_bytes).view(kind)
            array[...] = numbers
            shared.append(array)
            own.append(numbers)
            begin += n_bytes
        names = [str(k) for k in range(len(shared))]
        for arrays, where in ((shared, memory), (own, None)):
            group.exchange(arrays, names=names, label="all", op=op, shared=where)
            ops.barrier(group=group)
        for a, b in zip(shared, own, strict=True):
            assert a.tobytes() == b.tobytes()
        # Divided, by cuts anywhere: each rank gets its part, and the rest stays as it was.
        before = [np.roll(array, group.rank + 1) for array in own]
        for array, numbers in zip(shared, before, strict=True):
            array[...] = numbers
        reduced = [numbers.copy() for numbers in before]
        group.exchange(reduced, names=names, label="again", op=op)
        draw = np.random.default_rng(group.size)
        cuts = [[0, *sorted(draw.integers(0, x.size + 1, group.size - 1)), x.size] for x in own]
        division = [[(int(c[r]), int(c[r + 1])) for c in cuts] for r in range(group.size)]
        how = {"op": op, "shared": memory, "division": division}
        group.exchange(shared, names=names, label="divided", **how)
        mine = division[group.rank]
        for array, x, y, (start, stop) in zip(shared, reduced, before, mine, strict=True):
            expected = [y[:start], x[start:stop], y[stop:]]
            assert array.tobytes() == np.concatenate(expected).tobytes()
        assert np.all(everything[~taken] == 99)
        # Integers are averaged in a wider type, so not in place.
        counts = _native.Tensors([memory.array(0, 400).view(np.int32)])
        with pytest.raises(ValueError, match="int32 are converted on the wire"):
            group.transport.reduce_in_place(counts, memory, Reduction("average"))

    for size in (2, 3, 4):
        run_threads(size, functools.partial(rank, Average if size % 2 else Sum))


def test_orders_that_differ_meet_elsewhere(in_place: Any) -> None:
    def rank(group: Group) -> Any:
        memory = shared_memory(group, 24)
        array = memory.array(0, 24).view(np.float32).reshape((2, 3), order="CF"[group.rank])
        array[...] = np.arange(6).reshape(2, 3) * (1 + group.rank)
        group.exchange([array], names=["w"], label="w", op=Sum, shared=memory)
        return array.tolist()

    assert run_threads(2, rank) == [[[0, 3, 6], [9, 12, 15]]] * 2
    assert ways(in_place) == {False}


def mapped() -> int:
    """Return how many mappings of the ranks' shared memory this process has."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:horo_lite" in line for line in maps)


def test_the_memory_goes_with_the_optimizer_and_the_last_gradient() -> None:
    def rank(group: Group) -> Any:
        nets = []
        for _ in range(2):
            net = nn.Linear(3, 2)
            optimizer = DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=1.0),
                process_set=group,
                gradient_as_bucket_view=True,
            )
            net(torch.ones(1, 3)).sum().backward()
            del optimizer
            nets.append(net)
        nets[0].zero_grad()
        gc.collect()
        ops.barrier(group=group)
        return nets[1].weight.grad

    gc.collect()
    before = mapped()
    kept = run_threads(2, rank)
    gc.collect()
    assert mapped() == before + 2  # one network's on each rank
    assert [gradient.sum() for gradient in kept] == [6.0, 6.0]  # their worlds do not exist any more
    # A gradient is copied or saved alone, without its neighbours in memory.
    assert kept[0].untyped_storage().nbytes() == 24
    kept.clear()
    gc.collect()
    assert mapped() == before


SCRIPT = Path(__file__).with_name("bucket_views_ranks.py")


@pytest.mark.served
@pytest.mark.mpi
def test_processes_forks_copies_cycles_and_sets() -> None:
    result = script_on_ranks(SCRIPT, 3, timeout_s=60)
    assert re.findall(r"shared (\w+)", result.stdout) == ["True"] * 3, result
    assert "Error" not in result.stderr, result
