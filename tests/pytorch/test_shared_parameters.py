"""shared_parameters=True: one copy of the parameters for all ranks, and the same bits."""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from launch import run_threads
from worlds import on_ranks

torch = pytest.importorskip("torch")

import test_sharded_state as divided  # noqa: E402
import test_torch_optimizer as ordinary  # noqa: E402
from test_sharded_state import KINDS, assert_same_bits, network, train  # noqa: E402
from test_torch_optimizer import small_buckets, watched  # noqa: E402, F401

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.collectives import shared_memory  # noqa: E402
from horo_lite.collectives.calls import AllGatherInPlace, Part  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402

nn = torch.nn


def wrap(optimizer: Any, group: Group | None = None, **options: Any) -> Any:
    options = {"shard_state": True, "shared_parameters": True, **options}
    return DistributedOptimizer(optimizer, process_set=group or hvd.global_process_set, **options)


def memory_of(parameters: Any) -> list[int]:
    """Return which page of which file each parameter begins in, 0 for ordinary memory."""
    found = []
    for p in parameters:
        pages = 0
        with open("/proc/self/maps") as maps:
            for line in maps:
                area, _, offset, _, inode, *name = line.split()
                begin, end = (int(number, 16) for number in area.split("-"))
                if begin <= p.data_ptr() < end and name and "memfd:horo_lite" in name[0]:
                    pages = int(inode) << 40 | int(offset, 16) + p.data_ptr() - begin
        found.append(pages)
    return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Share parameters in the tests of other files; return what was received by copying."""
    received: list[str] = []
    move = AllGatherInPlace.move

    def noted(call: AllGatherInPlace, part: Part, *rest: Any) -> Any:
        received.extend(call.names)
        return move(call, part, *rest)

    monkeypatch.setattr(AllGatherInPlace, "move", noted)
    divided.use_option(monkeypatch, "shared_parameters")
    return received


SAME: dict[str, Callable[[Any], None]] = {
    f"{kind}, {size} ranks": lambda _, kind=kind, size=size: (  # type: ignore[misc]
        divided.test_the_bits_are_those_of_the_whole_state_and_each_rank_has_a_share(kind, size)
    )
    for kind, size in [("momentum", 2), ("AdamW, fused", 3), ("Adafactor", 4)]
} | {
    "moves": lambda _: divided.test_parameters_that_move_freeze_and_are_added(),
    "versions": lambda _: divided.test_autograd_knows_that_every_parameter_has_changed(),
    "removed": lambda _: divided.test_gradients_removed_on_one_rank_after_backward(),
    "fails": lambda _: divided.test_an_optimizer_that_fails_on_one_rank(),
    "joins": lambda _: divided.test_a_rank_that_has_joined_cannot_update_its_share((3, 5)),
    "scaler": lambda _: ordinary.test_shards_give_what_one_process_gives_on_the_whole(
        "scaler", 2, 2
    ),
    "overlap": ordinary.test_buckets_leave_before_backward_ends_and_all_is_there_when_it_returns,
    "some ranks": lambda _: ordinary.test_touched_on_some_ranks_only(),
    "several": lambda _: ordinary.test_several_optimizers_on_one_model(),
    "sparse": lambda _: ordinary.test_sparse_embeddings(False),
}


@pytest.mark.parametrize("promise", SAME)
def test_keeps_the_promises_of_a_divided_state(
    promise: str,
    watched: Any,  # noqa: F811
    shared: list[str],
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*shared_parameters.*")
        SAME[promise](watched)
    assert not shared


def test_dtypes_that_cannot_be_shared_are_received(shared: list[str]) -> None:
    divided.test_every_dtype_and_layout("AdamW")
    assert set(shared) == {"param_groups[0][2]", "param_groups[0][4]"}  # complex, and empty


def test_all_ranks_have_one_copy_and_copies_of_it_are_ordinary() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(KINDS["Adam"](net.parameters()), group)
        train(net, optimizer, group.rank)
        where = memory_of(net.parameters())
        copied = copy.deepcopy(net)
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        assert not any(memory_of(copied.parameters()))
        assert_same_bits(copied, net)
        hvd.barrier(process_set=group)
        if group.rank == 1:
            with torch.no_grad():
                net[0].weight[3, 5] = 7.0
        hvd.barrier(process_set=group)
        assert net[0].weight[3, 5] == 7.0
        train(net, optimizer, group.rank)  # a change on one rank is not warned of
        return where, len(file.getvalue())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_threads(3, rank)
    assert all(where == found[0][0] for where, _ in found)
    assert all(found[0][0])
    assert len(set(found[0][0])) == 6
    file = io.BytesIO()
    torch.save(network().state_dict(), file)
    assert found[0][1] <= len(file.getvalue()) + 1024  # each parameter without its neighbours


def test_parameters_stay_where_they_are_when_the_state_is_divided_again() -> None:
    def rank(group: Group) -> Any:
        net = network()
        net[2].weight.requires_grad_(False)
        optimizer = wrap(KINDS["momentum"]([*net[2].parameters(), *net[4].parameters()]), group)
        train(net, optimizer, group.rank, range(1))
        views = [p.detach() for p in net[2].parameters()]
        optimizer.state_dict()
        train(net, optimizer, group.rank, range(1, 2))
        optimizer.add_param_group({"params": list(net[0].parameters())})
        net[2].weight.requires_grad_(True)
        train(net, optimizer, group.rank, range(2, 3))
        assert all(memory_of(net.parameters()))
        net[2].bias.data = net[2].bias.detach().clone()  # only this one moves back
        train(net, optimizer, group.rank, range(3, 4))
        same = [torch.equal(p, view) for p, view in zip(net[2].parameters(), views, strict=True)]
        return same, memory_of(net.parameters())

    found = run_threads(3, rank)
    assert [same for same, _ in found] == [[True, False]] * 3
    assert all(where == found[0][1] and all(where) for _, where in found)


def test_parameters_that_are_swapped_move_back() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(KINDS["Adam"](net.parameters()), group)
        train(net, optimizer, group.rank, range(2))
        for p in net.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
        assert not any(memory_of(net.parameters()))
        train(net, optimizer, group.rank, range(2, 5))
        assert all(memory_of(net.parameters()))
        return net

    for net in run_threads(3, rank):
        assert_same_bits(net, divided_alone(3))


def test_memory_that_can_no_longer_be_had_ends_the_sharing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(KINDS["Adam"](net.parameters()), group)
        train(net, optimizer, group.rank, range(2))
        net[0].weight.data = net[0].weight.detach().clone()
        hvd.barrier(process_set=group)
        monkeypatch.setattr(shared_memory, "SharedMemory", unavailable)
        train(net, optimizer, group.rank, range(2, 5))
        assert not any(memory_of(net.parameters()))
        return net

    def unavailable(*_: Any, **__: Any) -> Any:
        raise OSError("no more files")

    with pytest.warns(RuntimeWarning, match="shared_parameters=True has no effect"):
        nets = run_threads(3, rank)
    for net in nets:
        assert_same_bits(net, divided_alone(3))


class Slow(torch.optim.SGD):
    """Updates late, on one rank."""

    def __init__(self, parameters: Any, seconds: float) -> None:
        super().__init__(parameters, lr=1.0)
        self.seconds = seconds

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["params"][0].numel() > 100:  # and not when it is tried
            time.sleep(self.seconds)
        return super().step(closure)


@pytest.mark.parametrize("late", [0, 1])
def test_no_update_before_all_have_computed_and_no_return_before_all_have_updated(
    late: int,
) -> None:
    def rank(group: Group) -> Any:
        parameter = nn.Parameter(torch.ones(1000))
        inner = Slow([parameter], 0.05 * (group.rank == late))
        optimizer = wrap(inner, group, shard_state="elements")
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            (parameter.sum() * (group.rank + 1)).backward()
            time.sleep(0.05 * (group.rank == late))  # the other is in step()
            seen.append(set(parameter.tolist()))
            optimizer.step()
            seen.append(set(parameter.tolist()))
        return seen

    expected = [{1.0}, {-0.5}, {-0.5}, {-2.0}, {-2.0}, {-3.5}]
    assert run_threads(2, rank) == [expected] * 2


def test_a_change_that_every_rank_makes_is_warned_of_once() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(KINDS["momentum"](net.parameters()), group)
        train(net, optimizer, group.rank)
        for step in range(3):
            with torch.no_grad():
                net[2].weight.clamp_(-1, 1)
            train(net, optimizer, group.rank, range(step, step + 1))

    with pytest.warns(RuntimeWarning, match=r"'param_groups\[0\]\[2\]' was .* 3 ranks") as caught:
        run_threads(3, rank)
    assert len(caught) == 1


def test_another_wrapper_begins_with_copies_of_its_own() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(KINDS["momentum"](net.parameters()), group)
        train(net, optimizer, group.rank)
        state = copy.deepcopy(optimizer.state_dict())
        assert all(memory_of(net.parameters()))
        del optimizer
        gc.collect()
        inner = KINDS["momentum"](net.parameters())
        inner.load_state_dict(state)
        train(net, DistributedOptimizer(inner, process_set=group), group.rank)
        assert not any(memory_of(net.parameters()))
        return net

    def expected(group: Group) -> Any:
        net = network()
        optimizer = DistributedOptimizer(KINDS["momentum"](net.parameters()), process_set=group)
        for _ in range(2):
            train(net, optimizer, group.rank)
        return net

    for net in run_threads(2, rank):
        assert_same_bits(net, run_threads(2, expected)[0])


def test_without_the_optimizer_each_rank_trains_alone() -> None:
    def rank(group: Group) -> Any:
        net = network()
        optimizer = wrap(KINDS["momentum"](net.parameters()), group)
        train(net, optimizer, group.rank, range(2))
        del optimizer
        inner = KINDS["momentum"](net.parameters())
        train(net, inner, group.rank)
        hvd.barrier(process_set=group)
        return net

    def expected(group: Group) -> Any:
        net = divided.trained(group, KINDS["momentum"], steps=range(2))[0]
        train(net, KINDS["momentum"](net.parameters()), group.rank)
        return net

    for net, alone in zip(run_threads(2, rank), run_threads(2, expected), strict=True):
        assert_same_bits(net, alone)


def test_what_is_refused_and_where_it_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="needs shard_state=True"):
        DistributedOptimizer(KINDS["SGD"](network().parameters()), shared_parameters=True)

    def rank(group: Group) -> Any:
        monkeypatch.setattr(
            shared_memory, "SharedMemory", unavailable if group.rank == 2 else available
        )
        net = network()
        train(net, wrap(KINDS["Adam"](net.parameters()), group), group.rank)
        assert not any(memory_of(net.parameters()))
        return net

    available = shared_memory.SharedMemory

    def unavailable(*_: Any, **__: Any) -> Any:
        raise OSError("not permitted")

    with pytest.warns(RuntimeWarning, match="shared_parameters=True has no effect"):
        nets = run_threads(3, rank)
    for net in nets:
        assert_same_bits(net, divided_alone(3))


@functools.cache
def divided_alone(size: int) -> Any:
    return run_threads(size, lambda group: divided.trained(group, KINDS["Adam"], shard=False))[0][0]


@pytest.mark.served
@pytest.mark.parametrize("hosts", ["", "2,1"])
def test_in_processes(hosts: str) -> None:
    found = on_ranks(_in_a_world, 3, hosts=hosts)
    size = sum(p.nbytes for p in network().parameters()) / 1024
    for n_ranks, (n_kib, child, where) in zip([2, 2, 1] if hosts else [3] * 3, found, strict=True):
        assert child == 0
        assert n_kib < size / n_ranks + 16  # the rank's part of its host's copy
        assert all(where)
    places = [where for *_, where in found]
    assert places[0] == places[1]
    assert (places[0] == places[2]) == (not hosts)


def _in_a_world() -> Any:
    expected, its_optimizer = divided.trained(hvd.init().group, KINDS["Adam"], shard=False)
    net = network()
    optimizer = wrap(KINDS["Adam"](net.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(net, optimizer, hvd.rank())
        assert_same_bits(net, expected)
        # One rank of each host changes its copy.
        hvd.barrier()
        with torch.no_grad():
            expected[0].weight.mul_(0.5)
            if hvd.local_rank() == 0:
                net[0].weight.mul_(0.5)
        hvd.barrier()
        train(expected, its_optimizer, hvd.rank())
        train(net, optimizer, hvd.rank())
    where = memory_of(net.parameters())
    hvd.barrier()
    n_kib = 0
    with open("/proc/self/smaps") as lines:
        address = net[0].weight.data_ptr()
        inside = False
        for line in lines:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                begin, end = (int(number, 16) for number in line.split()[0].split("-"))
                inside = begin <= address < end
            elif inside and line.startswith("Pss:"):
                n_kib = int(line.split()[1])
    # What a forked child changes, such as a loader's worker, no rank sees.
    assert_same_bits(net, expected)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            net[0].weight.zero_()
        os._exit(0 if not net[0].weight.any() else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    hvd.barrier()
    assert_same_bits(net, expected)
    # Each rank has its own copy after the end of the world.
    hvd.shutdown()
    rank = hvd.init().rank
    if rank > 0:
        with torch.no_grad():
            net[0].weight.fill_(rank)
    hvd.barrier()
    if rank > 0:
        assert (net[0].weight == rank).all()
    else:
        assert_same_bits(net, expected)
    child = os.fork()  # which sees what this rank alone has written
    if child == 0:
        os._exit(0 if rank == 0 or (net[0].weight == rank).all() else 2)
    status = status or os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return n_kib, status, where
