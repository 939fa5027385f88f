"""shard_state=True: the same bits as with all of the state on every rank, and a share on each."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import io
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from launch import RanksFailedError, run_threads
from worlds import on_ranks

torch = pytest.importorskip("torch")

import test_torch_optimizer as ordinary  # noqa: E402
from test_torch_optimizer import fails_alike, small_buckets, watched  # noqa: E402, F401

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.errors import DriftError, MismatchError, PeerLostError  # noqa: E402
from horo_lite.horovod.reductions import Adasum  # noqa: E402
from horo_lite.torch.independence import check_independent  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402
from horo_lite.torch.sharded_state import ShardedState, _cut  # noqa: E402
from horo_lite.training.sharding import Piece  # noqa: E402

nn = torch.nn
optim = torch.optim

KINDS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "momentum, fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, not foreach": lambda p: optim.Adam(p, lr=0.01, foreach=False),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad, fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    **{
        name: lambda p, name=name: getattr(optim, name)(p, lr=0.01)  # type: ignore[misc]
        for name in ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop")
    },
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}
if hasattr(optim, "Muon"):
    KINDS["Muon"] = lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=0.01)


def network(seed: int = 0, dtype: Any = torch.float32) -> Any:
    """Return a network of which every number of ranks cuts the largest parameters."""
    net = nn.Sequential(
        nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 33), nn.Tanh(), nn.Linear(33, 3)
    ).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return net


def backward(net: Any, step: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn((6, 20), generator=generator).to(net[0].weight.dtype)
    loss = nn.functional.cross_entropy(net(x), torch.randint(0, 3, (6,), generator=generator))
    loss.backward()
    return loss


def wrap(optimizer: Any, group: Group, **options: Any) -> Any:
    return DistributedOptimizer(optimizer, process_set=group, shard_state=True, **options)


def use_option(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    """Make optimizers whose state is divided with that option, too, here and in `ordinary`."""

    def make(optimizer: Any, *args: Any, shard_state: Any = False, **options: Any) -> Any:
        options[option] = bool(shard_state)
        return hvd.DistributedOptimizer(optimizer, *args, shard_state=shard_state, **options)

    monkeypatch.setitem(globals(), "DistributedOptimizer", make)
    monkeypatch.setattr(ordinary, "DistributedOptimizer", functools.partial(make, shard_state=True))


def train(net: Any, optimizer: Any, rank: int, steps: range = range(5)) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, step, rank)
        optimizer.step()


def trained(
    group: Group, make: Callable[[Any], Any], shard: bool | str = True, steps: range = range(5)
) -> tuple[Any, Any]:
    net = network()
    optimizer = DistributedOptimizer(make(net.parameters()), process_set=group, shard_state=shard)
    train(net, optimizer, group.rank, steps)
    return net, optimizer


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_same_bits(a: Any, b: Any) -> None:
    assert same([p.detach() for p in a.parameters()], [p.detach() for p in b.parameters()])


def n_elements_of_state(optimizer: Any) -> int:
    tensors = (x for own in optimizer.state.own.values() for x in own.values())
    return sum(x.numel() for x in tensors if isinstance(x, torch.Tensor) and x.dim())


@pytest.mark.parametrize("momentum", [0, 0.5])
def test_sparse_gradients(momentum: float) -> None:
    """Ones that are sparse in some steps only, or with sparse momenta, which ranks compare."""

    def rank(group: Group, shard: bool) -> Any:
        table = nn.Embedding(30, 20, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.linspace(-1, 1, 600).reshape(30, 20))
        optimizer = DistributedOptimizer(
            optim.SGD(table.parameters(), lr=0.1, momentum=momentum),
            process_set=group,
            shard_state=shard,
        )
        for step in range(4):
            optimizer.zero_grad()
            if momentum or step % 2:
                (table(torch.tensor([group.rank, 5 + step])) ** 2).sum().backward()
            else:
                ((table.weight + group.rank) ** 2).sum().backward()
            optimizer.step()
            optimizer.state_dict()
        return table

    expected = run_threads(3, functools.partial(rank, shard=False))[0]
    for table in run_threads(3, functools.partial(rank, shard=True)):
        assert_same_bits(table, expected)


SIZES = [(kind, 3) for kind in KINDS] + [
    (kind, size) for kind in ("momentum", "AdamW, fused", "Adafactor") for size in (2, 4)
]


@pytest.mark.parametrize(("kind", "size"), SIZES)
def test_the_bits_are_those_of_the_whole_state_and_each_rank_has_a_share(
    kind: str, size: int
) -> None:
    def rank(group: Group) -> Any:
        net, optimizer = trained(group, KINDS[kind])
        return net, n_elements_of_state(optimizer), copy.deepcopy(optimizer.state_dict())

    ordinary = run_threads(size, lambda group: trained(group, KINDS[kind], shard=False))
    sharded = run_threads(size, rank)
    expected = ordinary[0][1].state_dict()
    n_elements = [
        sum(x.numel() for x in own.values() if isinstance(x, torch.Tensor) and x.dim())
        for own in expected["state"].values()
    ]
    assert sum(n for _, n, _ in sharded) == sum(n_elements)
    if kind not in ("Adafactor", "Muon"):
        assert max(n for _, n, _ in sharded) <= sum(n_elements) / size * 1.2
    for net, _, state in sharded:
        assert_same_bits(net, ordinary[0][0])
        assert same(state, expected)


@pytest.mark.served
@pytest.mark.parametrize("kind", ["momentum", "AdamW, fused"])
@pytest.mark.parametrize("hosts", ["", "2,1"])
def test_between_processes_and_hosts(kind: str, hosts: str) -> None:
    fresh, resumed = on_ranks(_trained_in_a_world, 3, kind, hosts=hosts)[0]
    assert fresh
    assert resumed


def _trained_in_a_world(kind: str) -> tuple[bool, bool]:
    group = hvd.init().group
    net, _ = trained(group, KINDS[kind], shard=False, steps=range(6))
    sharded, optimizer = trained(group, KINDS[kind])
    state, weights = optimizer.state_dict(), copy.deepcopy(sharded.state_dict())
    train(sharded, optimizer, group.rank, range(5, 6))
    # In a job that starts from what rank 0 has saved:
    other = network(seed=group.rank)
    another = wrap(KINDS[kind](other.parameters()), group)
    if group.rank == 0:
        other.load_state_dict(weights)
        another.load_state_dict(state)
    hvd.broadcast_parameters(other.state_dict())
    hvd.broadcast_optimizer_state(another, 0)
    train(other, another, group.rank, range(5, 6))
    found = [all(map(torch.equal, net.parameters(), x.parameters())) for x in (sharded, other)]
    every = hvd.allgather_object(found)
    return all(a for a, _ in every), all(b for _, b in every)


def test_state_goes_from_one_number_of_ranks_to_another() -> None:
    def first(group: Group) -> Any:
        net, optimizer = trained(group, KINDS["Adam"])
        file = io.BytesIO()
        torch.save([net.state_dict(), optimizer.state_dict()], file)
        return file.getvalue()

    saved = run_threads(3, first)
    assert len(set(saved)) == 1

    def second(group: Group, shard: bool) -> Any:
        net = network()
        optimizer = DistributedOptimizer(
            KINDS["Adam"](net.parameters()), process_set=group, shard_state=shard
        )
        weights, state = torch.load(io.BytesIO(saved[0]))
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(net, optimizer, group.rank, range(5, 8))
        return net

    for size in (1, 2, 4):
        expected = run_threads(size, lambda group: second(group, shard=False))
        for net in run_threads(size, lambda group: second(group, shard=True)):
            assert_same_bits(net, expected[0])


# Properties of the ordinary optimizer hold here, too.

SAME: dict[str, Callable[[Any], None]] = {
    f"{kind}, {size} ranks": lambda _, kind=kind, size=size: (  # type: ignore[misc]
        ordinary.test_shards_give_what_one_process_gives_on_the_whole(kind, size, 2)
    )
    for kind, size in [("sgd", 3), ("adam", 2), ("adamw", 3), ("clip", 3), ("scaler", 2)]
} | {
    "overlap": ordinary.test_buckets_leave_before_backward_ends_and_all_is_there_when_it_returns,
    "flush": lambda _: (
        ordinary.test_fewer_passes_are_flushed_and_the_model_may_zero_its_gradients()
    ),
    "graphs": lambda _: ordinary.test_retained_graphs_second_derivatives_and_other_threads(),
    "untouched": lambda group: ordinary.test_only_what_was_touched_takes_part(True, group),
    "untouched zeros": lambda group: ordinary.test_only_what_was_touched_takes_part(False, group),
    "some ranks": lambda _: ordinary.test_touched_on_some_ranks_only(),
    "two losses": lambda _: ordinary.test_losses_with_passes_of_their_own(),
    "several": lambda _: ordinary.test_several_optimizers_on_one_model(),
    "added later": lambda _: ordinary.test_parameters_added_later_unfrozen_and_shared(),
    "by hand": lambda _: ordinary.test_gradients_assigned_by_hand_are_exchanged_by_step(),
    "sparse": lambda _: ordinary.test_sparse_embeddings(False),
    "sparse as dense": lambda _: ordinary.test_sparse_embeddings(True),
    "needs averages": lambda _: ordinary.test_a_scaler_needs_averages(True, False),
    "overflow": lambda _: ordinary.test_all_ranks_skip_the_step_that_overflows_on_one(),
    "broken pass": lambda _: ordinary.test_a_pass_that_breaks_off_leaves_nothing_behind(),
    "error": lambda _: ordinary.test_an_error_in_one_optimizer_leaves_the_others_usable(),
}


@pytest.mark.parametrize("promise", SAME)
def test_keeps_the_ordinary_optimizers_promises(
    promise: str,
    watched: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: list[Any] = []
    init = ShardedState.__init__

    def noted(state: ShardedState, *args: Any) -> None:
        states.append(state)
        init(state, *args)

    monkeypatch.setattr(ShardedState, "__init__", noted)
    sharded = functools.partial(DistributedOptimizer, shard_state=True)
    monkeypatch.setattr(ordinary, "DistributedOptimizer", sharded)
    SAME[promise](watched)
    assert states


def test_parameters_that_move_freeze_and_are_added() -> None:
    def rank(group: Group, shard: bool) -> Any:
        net, extra = network(), nn.Parameter(torch.linspace(-1, 1, 700))
        net[2].weight.requires_grad_(False)
        make = functools.partial(optim.Adam, lr=0.01)
        optimizer = DistributedOptimizer(
            make(net.parameters()), process_set=group, shard_state=shard
        )
        for step in range(12):
            if step == 2:
                net[2].weight.requires_grad_(True)
            if step == 4:
                optimizer.add_param_group({"params": [extra], "lr": 0.1})
            if step == 6:
                net[0].weight.data = net[0].weight.detach().clone()
                net[4].bias.requires_grad_(False)
            if step == 8:
                net.to(torch.float64).to(torch.float32)
                net[2].weight.data = net[2].weight.detach().t().contiguous().t()
                net[0].weight.data.mul_(0.5)
                net[4].bias.requires_grad_(True)
            if step == 10:
                net[2].weight.data = net[2].weight.detach().contiguous()
                optimizer.param_groups[0]["lr"] = 0.5
            optimizer.zero_grad()
            backward(net, step, group.rank)
            if step >= 4:
                (extra * extra).sum().backward()
            optimizer.step()
        assert [group["params"] for group in optimizer.param_groups][1][0] is extra
        return net, extra, copy.deepcopy(optimizer.state_dict())

    ordinary = run_threads(2, lambda group: rank(group, shard=False))[0]
    for net, extra, state in run_threads(2, lambda group: rank(group, shard=True)):
        assert_same_bits(net, ordinary[0])
        assert same([extra.detach(), state], [ordinary[1].detach(), ordinary[2]])


@pytest.mark.parametrize("saves_before", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_parameter_that_is_removed_takes_its_state_with_it(
    saves_before: bool, replaces: bool
) -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = network()
        optimizer = DistributedOptimizer(
            optim.Adam(net.parameters(), 0.01), process_set=group, shard_state=shard
        )
        for step in range(4):
            if step == 2:
                if saves_before:
                    optimizer.state_dict()
                parameters = optimizer.param_groups[0]["params"]
                removed = parameters.pop(0)
                if replaces:
                    net[0].weight = nn.Parameter(torch.full_like(removed, 0.1))
                    parameters.insert(0, net[0].weight)
                if not shard:
                    del optimizer.state[removed]
            optimizer.zero_grad()
            backward(net, step, group.rank)
            optimizer.step()
        return net, copy.deepcopy(optimizer.state_dict())

    ordinary = run_threads(2, lambda group: rank(group, shard=False))[0]
    for net, state in run_threads(2, lambda group: rank(group, shard=True)):
        assert_same_bits(net, ordinary[0])
        assert same(state, ordinary[1])


class Mixed(nn.Module):
    """Several dtypes and memory layouts, and parameters without dimensions or elements."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(16 * 16, 33)
        self.turned = nn.Parameter(torch.zeros(33, 50).t())
        self.shift = nn.Parameter(torch.zeros(33, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.zeros(200, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(4, 0))
        self.row = nn.Parameter(torch.zeros(4, 60)[:1, :33])
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)

    def forward(self, x: Any) -> Any:
        y = self.wide(self.image(x).flatten(1)).tanh() + self.shift.float() + self.empty.sum()
        y = y + self.row
        return (y @ self.turned.t() * self.scalar).sum() + (self.phase * (1 + 2j)).sum().real


@pytest.mark.parametrize("kind", ["momentum", "AdamW"])
def test_every_dtype_and_layout(kind: str) -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = Mixed()
        optimizer = DistributedOptimizer(
            KINDS[kind](net.parameters()), process_set=group, shard_state=shard
        )
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + group.rank)
            optimizer.zero_grad()
            net(torch.randn(2, 8, 6, 6, generator=generator)).backward()
            optimizer.step()
        return net, copy.deepcopy(optimizer.state_dict())

    expected, state = run_threads(3, lambda group: rank(group, shard=False))[0]
    for net, found in run_threads(3, lambda group: rank(group, shard=True)):
        assert_same_bits(net, expected)
        assert [p.stride() for p in net.parameters()] == [p.stride() for p in expected.parameters()]
        assert same(found, state)


def test_ranks_without_a_share() -> None:
    def rank(group: Group, kind: str) -> Any:
        weight = nn.Parameter(torch.ones(2, 2))
        rest = nn.Parameter(torch.ones(3, 3))
        optimizer = KINDS[kind]([weight])
        optimizer.add_param_group({"params": [rest]})
        optimizer = wrap(optimizer, group)
        for _ in range(2):
            optimizer.zero_grad()
            (weight.sum() * (group.rank + 1) + rest.sum()).backward()
            optimizer.step()
        return weight.detach(), rest.detach()

    for kind in KINDS:
        results = run_threads(4, functools.partial(rank, kind=kind))
        assert all(same(result, results[0]) for result in results)
        assert not torch.equal(results[0][0], torch.ones(2, 2))


class ByLoss(optim.SGD):
    """Steps as far as the loss says; may change parameters before it calls its closure."""

    looks_ahead = False

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"] if self.looks_ahead else []:
            p.data.add_(1e-3)
        with torch.enable_grad():
            loss = closure()
        self.param_groups[0]["lr"] = 0.1 * float(loss)
        super().step()
        return loss


class Ahead(ByLoss):
    looks_ahead = True


@pytest.mark.filterwarnings("error:.*could not be tried")
def test_the_optimizer_may_use_the_loss() -> None:
    def rank(group: Group, shard: bool | str, kind: Any = ByLoss) -> Any:
        net = network()
        inner = kind(net.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, process_set=group, shard_state=shard)

        def closure() -> Any:
            optimizer.zero_grad()
            return backward(net, 0, group.rank)

        losses = [optimizer.step(closure), optimizer.step(closure=closure)]
        return net, torch.stack(losses)

    (expected, losses), *_ = run_threads(2, lambda group: rank(group, False))
    for net, found in run_threads(2, lambda group: rank(group, "elements")):
        assert_same_bits(net, expected)
        assert torch.equal(found, losses)
    with pytest.raises(RanksFailedError, match="called its closure after changing parameters"):
        run_threads(2, lambda group: rank(group, "elements", Ahead))


def test_hooks_and_closures_see_the_users_parameters_all_of_them_updated() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(KINDS["Adam"](net.parameters()), group)
        seen: list[Any] = []

        def look(optimizer: Any, args: Any, kwargs: Any) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            assert list(map(id, parameters)) == list(map(id, net.parameters()))
            seen.append(sum(p.detach().double().sum().item() for p in parameters))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)

        def closure() -> Any:
            optimizer.zero_grad()
            assert torch.is_grad_enabled()
            return backward(net, 0, group.rank)

        loss = optimizer.step(closure)
        assert seen[0] != seen[1] == sum(p.detach().double().sum().item() for p in net.parameters())
        return loss.item(), optimizer.step(closure=closure).item(), seen

    results = run_threads(2, rank)
    assert results[0] == results[1]
    assert results[0][1] < results[0][0]


def test_a_step_inside_of_a_compiled_function() -> None:
    """On one rank: the compiler does not support several threads at once."""

    def rank(group: Group, compiles: bool) -> Any:
        net = network()
        optimizer = wrap(torch.optim.Adam(net.parameters()), group)

        def step() -> None:
            optimizer.step()

        if compiles and group.rank == 0:
            step = torch.compile(step, backend="eager")
        for k in range(2):
            optimizer.zero_grad()
            backward(net, k, group.rank)
            step()
        return net

    plain, _ = run_threads(2, lambda group: rank(group, False))
    for net in run_threads(2, lambda group: rank(group, True)):
        assert same(list(net.parameters()), list(plain.parameters()))


def test_autograd_knows_that_every_parameter_has_changed() -> None:
    def rank(group: Group) -> None:
        net, optimizer = trained(group, KINDS["Adam"])
        optimizer.zero_grad()
        backward(net, 5, group.rank)
        saved = [p.square().sum() for p in net.parameters()]
        optimizer.step()
        for loss in saved:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    run_threads(2, rank)


def test_schedulers_made_before_and_after() -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = network()
        inner = KINDS["momentum"](net.parameters())
        scheduler = optim.lr_scheduler.StepLR(inner, 1, 0.5)
        optimizer = DistributedOptimizer(inner, process_set=group, shard_state=shard)
        another = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                train(net, optimizer, group.rank, range(step, step + 1))
                scheduler.step()
                another.step()
        return net

    expected = run_threads(2, lambda group: rank(group, shard=False))[0]
    for net in run_threads(2, lambda group: rank(group, shard=True)):
        assert_same_bits(net, expected)


def test_a_collected_state_returns_to_the_parameters_device() -> None:
    parameter = nn.Parameter(torch.zeros((), device="meta"))
    state = {"step": torch.ones(()), "exp_avg": torch.ones(()), "n": 1}
    for options, there in (({}, []), ({"fused": True}, ["step"]), ({"capturable": True}, ["step"])):
        found = _cut(state, parameter, Piece(0, 0, 1, 0), options)
        meta = [key for key in state if getattr(found[key], "is_meta", False)]
        assert meta == [*there, "exp_avg"]


# What the state's readers are told.


def test_a_sharded_state_cannot_be_read_written_or_copied() -> None:
    def rank(group: Group) -> None:
        net, optimizer = trained(group, KINDS["Adam"])
        inner = optimizer._exchange.inner()
        parameter = net[0].weight
        for wrong in (
            lambda: optimizer.state[parameter],
            lambda: inner.state[parameter],
            lambda: optimizer.state.__setitem__(parameter, {}),
            lambda: optimizer.state.get(parameter),
            lambda: parameter in optimizer.state,
            lambda: optimizer.state.update({parameter: {}}),
            lambda: optimizer.state.clear(),
            lambda: copy.deepcopy(optimizer),
            lambda: torch.save(optimizer, io.BytesIO()),
        ):
            with pytest.raises(RuntimeError, match=r"state_dict\(\)"):
                wrong()
        with pytest.warns(RuntimeWarning, match="iterating over it finds nothing"):
            assert list(optimizer.state.items()) == []
        assert optimizer.state.shared is None
        assert optimizer.state  # if empty, torch.distributed.checkpoint would take a step
        train(net, optimizer, group.rank)

    run_threads(2, rank)


def test_the_unwrapped_optimizers_state_dict_is_whole_too() -> None:
    def rank(group: Group) -> Any:
        net = network()
        inner = KINDS["Adam"](net.parameters())
        seen: list[int] = []
        inner.register_state_dict_pre_hook(lambda own: seen.append(len(own.state)))
        optimizer = wrap(inner, group)
        train(net, optimizer, group.rank)
        inner.state_dict()
        assert seen == [6]
        assert hvd.check_in_sync(optimizer, state=True, process_set=group)
        return copy.deepcopy(inner.state_dict()), optimizer.state_dict()

    for inner, outer in run_threads(2, rank):
        assert same(inner, outer)
        assert len(inner["state"]) == 6


def test_without_its_wrapper_a_sharded_state_is_not_taken_for_an_empty_one() -> None:
    def rank(group: Group) -> int:
        net = network()
        inner = KINDS["Adam"](net.parameters())
        train(net, wrap(inner, group), group.rank)
        gc.collect()
        ordinary = DistributedOptimizer(inner, process_set=group)
        for reader in (inner, ordinary):
            with pytest.raises(RuntimeError, match="no longer exists"):
                reader.state_dict()
        del reader, ordinary
        assert len(wrap(inner, group).state_dict()["state"]) == 6
        gc.collect()
        return len(inner.state_dict()["state"])

    assert run_threads(2, rank) == [6, 6]


@pytest.mark.parametrize("loaded_on", [None, 0, 1])
def test_broadcast_in_mid_training_changes_nothing(loaded_on: int | None) -> None:
    def rank(group: Group) -> Any:
        net, optimizer = trained(group, KINDS["Adam"], steps=range(3))
        if loaded_on is not None:  # a state that others do not have, which is not sharded
            state = copy.deepcopy(optimizer.state_dict())
            weights = copy.deepcopy(net.state_dict())
            train(net, optimizer, group.rank, range(3, 4))
            net.load_state_dict(weights)
            if group.rank == loaded_on:
                optimizer.load_state_dict(state)
        hvd.broadcast_optimizer_state(optimizer, loaded_on or 0, process_set=group)
        train(net, optimizer, group.rank, range(3, 5))
        return net

    expected = run_threads(2, lambda group: trained(group, KINDS["Adam"]))[0][0]
    for net in run_threads(2, rank):
        assert_same_bits(net, expected)


def test_after_the_ranks_have_changed_shares_are_lost() -> None:
    before = run_threads(3, lambda group: trained(group, KINDS["Adam"]))

    def rank(group: Group) -> None:
        net, optimizer = before[group.rank]
        exchange = optimizer._exchange
        exchange.options = dataclasses.replace(exchange.options, group=group)
        exchange.follow_world()
        for use in (lambda: train(net, optimizer, group.rank), optimizer.state_dict):
            with pytest.raises(RuntimeError, match="so parts of it are lost: load a state_dict"):
                use()

    run_threads(2, rank)


def test_state_dict_on_one_rank_only() -> None:
    def rank(group: Group) -> None:
        net, optimizer = trained(group, KINDS["Adam"])
        if group.rank == 0:
            optimizer.state_dict()
        train(net, optimizer, group.rank)

    with pytest.raises(RanksFailedError) as caught:
        run_threads(2, rank)
    assert all(type(error) is MismatchError for error in caught.value.errors.values())
    for error in caught.value.errors.values():
        assert (
            "rank 0: allgather_object 'state_dict() of optimizer 1, with shard_state=True'"
            in str(error)
        )
        assert re.search(r"rank 1: .*step 6", str(error))


@pytest.mark.parametrize("what", ["parameters", "state", "presence", "class"])
def test_ranks_that_begin_with_different_things(what: str) -> None:
    def rank(group: Group) -> None:
        is_odd = group.rank == 1
        net = network(seed=int(is_odd and what == "parameters"))
        kind = "AdamW" if is_odd and what == "class" else "Adam"
        optimizer = KINDS[kind](net.parameters())
        if what == "state" or (what == "presence" and is_odd):
            other = network()
            backward(other, group.rank, 0)
            given = KINDS[kind](other.parameters())
            given.step()
            optimizer.load_state_dict(given.state_dict())
        train(net, wrap(optimizer, group), group.rank)

    kind: Any = DriftError if what in ("parameters", "state") else MismatchError
    told = fails_alike(2, rank, kind)
    expected = {
        "parameters": "first 'param_groups[0][0]' (float32[70, 20])",
        "state": "first \"param_groups[0][0]['exp_avg']\"",
        "presence": "exp_avg",
        "class": "rank 1",
    }
    assert expected[what] in told


def test_gradients_removed_on_one_rank_after_backward() -> None:
    def rank(group: Group) -> None:
        net, optimizer = trained(group, KINDS["Adam"], steps=range(2))
        optimizer.zero_grad()
        backward(net, 2, group.rank)
        if group.rank == 1:
            net[0].weight.grad = None
        optimizer.step()

    told = fails_alike(2, rank, MismatchError)
    assert "parameters of optimizer 1, step 3:" in told


def test_an_optimizer_that_fails_on_one_rank() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(KINDS["Adam"](net.parameters()), group)
        if group.rank == 1:
            optimizer.register_step_pre_hook(lambda *_: 1 / 0)
        train(net, optimizer, group.rank)

    with pytest.raises(RanksFailedError) as caught:
        run_threads(2, rank)
    assert type(caught.value.errors[1]) is ZeroDivisionError
    assert isinstance(caught.value.errors[0], PeerLostError)


class Failing(torch.optim.Adam):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no memory left")
        return super().step(closure)


@pytest.mark.parametrize("options", [{}, {"shared_parameters": True}])
def test_after_an_error_in_the_middle_of_a_step_parameters_and_state_are_to_be_loaded(
    options: dict[str, Any],
) -> None:
    expected = run_threads(2, lambda group: trained(group, torch.optim.Adam)[0])

    def rank(group: Group) -> Any:
        net = network()
        inner = Failing(net.parameters())
        wrapped = hvd.DistributedOptimizer(
            inner, process_set=group, shard_state="elements", **options
        )
        train(net, wrapped, group.rank, range(3))
        saved = copy.deepcopy((wrapped.state_dict(), net.state_dict()))
        train(net, wrapped, group.rank, range(3, 4))
        wrapped.fails = group.rank == 1
        with pytest.raises(ValueError if wrapped.fails else MismatchError):
            train(net, wrapped, group.rank, range(4, 5))
        if wrapped.fails:
            with pytest.raises(MismatchError):
                group.agree("the next call", "")
        wrapped.fails = False
        for use in (wrapped.step, wrapped.state_dict):
            with pytest.raises(RuntimeError, match="Load a state_dict"):
                use()
        wrapped.load_state_dict(saved[0])
        group.agree("shared parameters are written", "")
        net.load_state_dict(saved[1])
        group.agree("shared parameters have been written", "")
        train(net, wrapped, group.rank, range(3, 5))
        return net

    for found, wanted in zip(run_threads(2, rank), expected, strict=True):
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("n_steps", [(5, 5), (3, 5), (0, 5)])
def test_a_rank_that_has_joined_cannot_update_its_share(n_steps: tuple[int, int]) -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(KINDS["Adam"](net.parameters()), group)
        for _ in range(2):
            train(net, optimizer, group.rank, range(n_steps[group.rank]))
            group.join()

    if n_steps[0] == n_steps[1]:
        run_threads(2, rank)
    else:
        with pytest.raises(RanksFailedError) as caught:
            run_threads(2, rank)
        error = caught.value.errors[1]
        assert type(error) is MismatchError
        assert "needs every rank, but rank 0 has no more batches" in str(error)


class Own(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"]["n_steps"] = self.state["all"].get("n_steps", 0) + 1
        for group in self.param_groups:
            group["n_steps"] = group.get("n_steps", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0) + p.grad * p.grad
                    state["n"] = state.get("n", 0) + 1
                    state["nested"] = {"pair": (p.grad.clone(), [state["n"]])}
                    state["bounds"] = state.get("bounds", torch.zeros(2)) + 1
                    p.sub_(p.grad / (state["sum"].sqrt() + 1e-3), alpha=group["lr"])


@pytest.mark.parametrize("how", ["elements", "parameters"])
def test_an_optimizer_of_ones_own(how: str) -> None:
    def rank(group: Group, shard: bool | str) -> Any:
        net, optimizer = trained(group, Own, shard)
        optimizer.state_dict()
        train(net, optimizer, group.rank, range(5, 7))
        return net, optimizer.state_dict()

    net, state = run_threads(3, lambda group: rank(group, shard=False))[0]
    for other, found in run_threads(3, lambda group: rank(group, shard=how)):
        assert_same_bits(other, net)
        assert same(found, state)


class Combines(optim.Optimizer):
    """Does what "parameters" or "elements" of `kind` exclude."""

    def __init__(self, params: Any, kind: str, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.kind = kind

    def along(self, p: Any) -> float:
        return round(float((p.flatten() * p.grad.flatten()).sum()), 6)

    def turns(self, p: Any) -> bool:
        before = self.state[p].get("before", p.grad)
        self.state[p]["before"] = p.grad.clone()
        return bool((before * p.grad < 0).any())

    def waits(self, p: Any) -> bool:
        self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
        return self.state[p]["steps"] <= 10

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        groups = [(group, p) for group in self.param_groups for p in group["params"]]
        groups = [(group, p) for group, p in groups if p.grad is not None]
        matrices = [p for _, p in groups if p.dim() == 2]
        partners = {id(matrices[0]): matrices[1]} if len(matrices) > 1 else {}
        total = math.hypot(*(float(p.grad.norm()) for _, p in groups))
        for group, p in groups:
            factor = {
                "the norm of all": 1 / total,
                "clipping": min(1, 10 / total),
                "a little weight decay": 1 + 1e-4 * total,
                "the norm of each": 1 / p.grad.norm(),
                "its shape": p.dim(),
                "the norm of each, where orthogonal": 1
                / (1 + p.grad.norm() * (self.along(p) == 0)),
                "its shape, where a sign changes": p.dim() if self.turns(p) else 1,
                "the norm of each, if large": 1 / p.grad.norm() if p.numel() >= 4096 else 1,
                "noise": 1 + torch.rand(()),
                "pairs of matrices": partners.get(id(p), p).grad.norm(),
                "the norm of each, late": self.kind.endswith("late")
                and (0 if self.waits(p) else 1 / p.grad.norm()),
            }.get(self.kind, 1)
            p.sub_(p.grad, alpha=float(factor * group["lr"]))
            if self.kind == "a number in state":
                self.state["all"]["sum"] = total + self.state["all"].get("sum", 0)
            if self.kind == "its largest":
                self.state[p]["largest"] = max(p.grad.max(), self.state[p].get("largest", 0))
            if self.kind == "two in one tensor":
                self.state[p]["both"] = torch.stack([p.grad, p.grad**2])
            if self.kind == "a number in param_groups":
                group["largest"] = max(total, group.get("largest", 0))
            if self.kind == "one for each":
                group["norms"] = torch.ones(len(group["params"]))


@pytest.mark.parametrize("lr", [1e-7, 0.0])  # 0.0: a warm-up begins
@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("the norm of all", ["elements", "parameters"]),
        ("clipping", ["elements", "parameters"]),
        ("a little weight decay", ["elements", "parameters"]),
        ("a number in param_groups", ["elements", "parameters"]),
        ("a number in state", ["elements", "parameters"]),
        ("one for each", ["parameters"]),
        ("noise", ["elements", "parameters"]),
        ("the norm of each", ["elements"]),
        ("its shape", ["elements"]),
        ("the norm of each, where orthogonal", ["elements"]),
        ("its shape, where a sign changes", ["elements"]),
        ("the norm of each, if large", ["elements"]),
        ("its largest", ["elements"]),
        ("the norm of each, late", ["elements"]),
        ("pairs of matrices", ["elements", "parameters"]),
        ("two in one tensor", ["elements"]),
        ("nothing", []),
    ],
)
def test_what_an_optimizer_combines_is_found(kind: str, refused: list[str], lr: float) -> None:
    def rank(group: Group) -> None:
        for claimed in ("elements", "parameters"):
            net = network(dtype=torch.float32 if lr else torch.bfloat16)
            net[2].register_parameter("large", nn.Parameter(net[0].weight.new_ones(64, 80)))
            inner = Combines(net.parameters(), kind, lr)
            optimizer = DistributedOptimizer(inner, process_set=group, shard_state=claimed)
            backward(net, 0, group.rank)
            if claimed in refused:
                with pytest.raises(ValueError, match=f"'{claimed}' is not true of Combines: what"):
                    optimizer.step()
            else:
                optimizer.step()

    run_threads(2, rank)


def test_trying_an_optimizer_changes_nothing() -> None:
    class Notes(optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.notes: list[str] = []
            self.param_groups[0]["notes"] = self.notes

        def step(self, closure: Any = None) -> Any:
            self.notes.append("a step")
            self.param_groups[0]["notes"].append("its group")
            return super().step(closure)  # calls the hooks

    def rank(group: Group, shard: bool | str) -> Any:
        net = network()
        inner = Notes(net.parameters())
        inner.register_step_post_hook(lambda *_: inner.notes.append("a hook"))
        optimizer = DistributedOptimizer(inner, process_set=group, shard_state=shard)
        train(net, optimizer, group.rank, range(1))
        return inner.notes

    optim.SGD([torch.ones(1)])  # from now on, torch calls hooks in step() of this class, too
    expected = run_threads(2, lambda group: rank(group, False))
    assert run_threads(2, lambda group: rank(group, "elements")) == expected
    assert set(expected[0]) == {"a step", "its group", "a hook"}

    inner = Combines(network().parameters(), "noise")
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="or on random numbers"):
        check_independent(inner, Combines.step.__wrapped__, "parameters")
    assert torch.equal(torch.get_rng_state(), before)


class HasOne(optim.Optimizer):
    """Updates its parameters by another optimizer, or from a list of its own."""

    def __init__(self, params: Any, kind: str) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.1})
        self.inner = optim.SGD(params, lr=0.1) if kind == "inside" else None
        self.parameters = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.inner is not None:
            self.inner.step(closure)
        for p in self.parameters if self.inner is None else ():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("kind", ["inside", "a list"])
def test_an_optimizer_that_updates_what_is_not_in_its_groups(kind: str) -> None:
    def rank(group: Group) -> None:
        for claimed in ("elements", "parameters"):
            net = network()
            inner = HasOne(net.parameters(), kind)
            optimizer = DistributedOptimizer(inner, process_set=group, shard_state=claimed)
            backward(net, 0, group.rank)
            with pytest.raises(ValueError, match="HasOne changes parameters that it does not take"):
                optimizer.step()
            assert_same_bits(net, network())  # trying it has not changed them

    run_threads(2, rank)


def test_an_object_in_the_state_of_a_parameter_cannot_be_cut() -> None:
    @dataclasses.dataclass
    class Moments:
        first: Any

    class HasObjects(Own):
        def step(self, closure: Any = None) -> None:
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p]["moments"] = Moments(p.grad)

    inner = HasObjects(network().parameters())
    with pytest.raises(ValueError, match=r'HasObjects keeps a Moments .* try "parameters"'):
        check_independent(inner, HasObjects.step, "elements")
    assert check_independent(inner, HasObjects.step, "parameters") == ("kept", "")


class Uses(Own):
    """Scales gradients, of which it leaves what they are then, or nothing."""

    def __init__(self, params: Any, drops: bool) -> None:
        super().__init__(params)
        self.drops = drops

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for p in parameters:
            p.grad.data.mul_(0.5)
        super().step()
        for p in parameters if self.drops else ():
            p.grad = None


def test_gradients_after_a_step_that_changes_them() -> None:
    """What a rank has of them then is its share: another pass does not add to that."""

    def rank(group: Group, drops: bool, shard: bool | str) -> Any:
        net = network()
        inner = Uses(net.parameters(), drops)
        optimizer = DistributedOptimizer(inner, process_set=group, shard_state=shard)
        for step in range(6):
            if step and not drops:
                if shard:
                    with pytest.raises(RuntimeError, match=r"Uses has changed.*call zero_grad\(\)"):
                        backward(net, step, group.rank)
                zeroed = [optimizer, net][step % 2]
                zeroed.zero_grad(set_to_none=step % 3 == 0)
            backward(net, step, group.rank)
            optimizer.step()
        return net

    for drops in (False, True):
        expected = run_threads(3, lambda group, drops=drops: rank(group, drops, shard=False))[0]
        for how in ("elements", "parameters"):
            for net in run_threads(3, lambda group, d=drops, how=how: rank(group, d, how)):
                assert_same_bits(net, expected)


class Around(optim.Optimizer):
    """Has the same state as the optimizer inside it, which saves it, as some of its kind do."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.state = inner, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def test_an_optimizer_around_it_cannot_save_its_state_as_an_empty_one() -> None:
    def rank(group: Group) -> None:
        net = network()
        outer = Around(wrap(optim.Adam(net.parameters()), group))
        state: Any = {}
        for loads in (False, True):
            if loads:
                outer.inner.load_state_dict(state)
                outer.state = outer.inner.state
            train(net, outer, group.rank, range(2))
            with pytest.raises(RuntimeError, match=r"save what its state_dict\(\) returns"):
                torch.save(outer.state_dict(), io.BytesIO())
            state = outer.inner.state_dict()
            assert len(state["state"]) == len(list(net.parameters()))

    run_threads(2, rank)


def test_an_optimizer_of_float32_only_with_state_of_its_own_is_tried() -> None:
    class OfFloat32(Combines):
        def __init__(self, params: Any, kind: str) -> None:
            super().__init__(params, kind)
            self.state["all"]["steps"] = 0
            self.cannot_be_copied = (p for p in params)

        def step(self, closure: Any = None) -> None:
            self.state["all"]["steps"] += 1
            if any(p.dtype != torch.float32 for p in self.param_groups[0]["params"]):
                raise TypeError("not float32")
            super().step()

    inner = OfFloat32(network().parameters(), "the norm of each")
    with pytest.raises(ValueError, match="'elements' is not true of OfFloat32"):
        check_independent(inner, OfFloat32.step, "elements")
    assert check_independent(inner, OfFloat32.step, "parameters") == ("kept", "")


def test_an_optimizer_that_cannot_be_tried_is_warned_of() -> None:
    class Picky(Own):
        def step(self, closure: Any = None) -> None:
            if any(p.numel() == 23 for group in self.param_groups for p in group["params"]):
                raise RuntimeError("needs larger parameters")
            super().step()

    with pytest.warns(RuntimeWarning, match=r"Picky could not be tried .*: needs larger") as caught:
        run_threads(2, lambda group: trained(group, Picky, shard="elements", steps=range(1)))
    assert len([warning for warning in caught if "tried" in str(warning.message)]) == 1


def test_a_group_of_which_a_rank_has_no_parameter() -> None:
    """Such an optimizer may not count its steps there, and numbers are compared nowhere else."""

    class Counts(Own):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for group in self.param_groups:
                assert all(p.numel() or isinstance(p, nn.Parameter) for p in group["params"])
                group["k"] = group.get("k", 0) + bool(group["params"])
                if group["params"]:
                    group["nothing"] = torch.ones(0)
                    group["params"][0].add_(torch.nan)

    def rank(group: Group, claimed: str) -> None:
        weight, bias = nn.Parameter(torch.ones(30)), nn.Parameter(torch.ones(1))
        empty = nn.Parameter(torch.ones(0))
        inner = Counts([{"params": [weight, empty]}, {"params": [bias]}])
        optimizer = DistributedOptimizer(inner, process_set=group, shard_state=claimed)
        ((weight.sum() + bias.sum()) * (group.rank + 1)).backward()
        optimizer.step()

    for claimed in ("elements", "parameters"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run_threads(2, lambda group, claimed=claimed: rank(group, claimed))


class Asks(optim.Optimizer):
    """Asks each parameter for attributes, updates it without a gradient, and drops gradients."""

    def __init__(self, params: Any, names: list[str]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.param_groups[0]["param_names"] = names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.requires_grad:
                    p.mul_(0.9)
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * p.scale * len(name))
                    p.grad = None


def test_pieces_are_like_parameters() -> None:
    def rank(group: Group, shard: bool | str) -> Any:
        used, unused = nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(900))
        rounded = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
        rounded.grad_dtype = torch.float32
        parameters = [used, unused, rounded]
        for i, p in enumerate(parameters):
            p.scale = 1 + i
        inner = Asks(parameters, ["used", "unused", "rounded"])
        optimizer = DistributedOptimizer(inner, process_set=group, shard_state=shard)
        for _ in range(3):
            optimizer.zero_grad()
            (used.sum() + rounded.sum() * group.rank).backward()
            optimizer.step()
        return [p.detach() for p in parameters]

    expected = run_threads(3, lambda group: rank(group, False))[0]
    for how in ("elements", "parameters"):
        for found in run_threads(3, lambda group, how=how: rank(group, how)):
            assert same(found, expected)


class OwnAdam(optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "options", "told"),
    [
        (Own, {}, 'Own is not an optimizer .* shard_state="elements"'),
        (OwnAdam, {}, "OwnAdam is not"),
        (optim.LBFGS, {}, "LBFGS"),
        (optim.Adam, {"shard_state": "rows"}, "not 'rows'"),
        (optim.Adam, {"op": Adasum}, 'adasum_of="gradients"'),
    ],
)
def test_what_cannot_be_sharded(make: Any, options: dict[str, Any], told: str) -> None:
    def rank(group: Group) -> None:
        options_ = {"shard_state": True, **options}
        with pytest.raises(ValueError, match=told):
            DistributedOptimizer(make(network().parameters()), process_set=group, **options_)

    run_threads(2, rank)


def test_parameters_that_share_memory_or_have_gaps() -> None:
    base = torch.ones(30, 40)
    for parameters, told in (
        ([base, base[3:]], "share no memory, but 'param_groups[0][0]' and 'param_groups[0][1]' do"),
        ([torch.ones(30, 41)[:, :40]], "'param_groups[0][0]' has strides (41, 1) for [30, 40]"),
        ([base, torch.ones(3, device="meta")], "but 'param_groups[0][1]' is without memory"),
    ):

        def rank(group: Group, parameters: Any = parameters, told: str = told) -> None:
            own = [nn.Parameter(x) for x in parameters]
            optimizer = wrap(optim.Adam(own), group)
            own[0].grad = torch.ones_like(own[0])
            with pytest.raises(ValueError, match=re.escape(told)):
                optimizer.step()

        with contextlib.suppress(PeerLostError):
            run_threads(2, rank)


def test_in_a_world_of_one_rank_nothing_is_changed() -> None:
    def rank(group: Group) -> None:
        net, optimizer = trained(group, KINDS["Adam"])
        assert set(optimizer.state) == set(net.parameters())
        copy.deepcopy(optimizer)

    run_threads(1, rank)
