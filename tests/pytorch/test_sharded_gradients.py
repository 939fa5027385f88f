"""shard_gradients=True: each rank has averages in its share only, and the same bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from launch import run_threads
from worlds import on_ranks

torch = pytest.importorskip("torch")

import test_sharded_state as divided  # noqa: E402
import test_torch_optimizer as ordinary  # noqa: E402
from test_sharded_state import KINDS, assert_same_bits, backward, network, train  # noqa: E402
from test_torch_optimizer import small_buckets, watched  # noqa: E402, F401

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.collectives.reductions import Exchange  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402

nn = torch.nn


def wrap(optimizer: Any, group: Any, **options: Any) -> Any:
    options = {"shard_state": True, "shard_gradients": True, **options}
    return DistributedOptimizer(optimizer, process_set=group, **options)


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Divide gradients in the tests of other files; return which exchanges were divided."""
    seen: list[bool] = []
    reduce = Exchange._reduce

    def noted(call: Exchange, *args: Any) -> None:
        seen.append(bool(call.division))
        reduce(call, *args)

    monkeypatch.setattr(Exchange, "_reduce", noted)
    divided.use_option(monkeypatch, "shard_gradients")
    return seen


SAME: dict[str, Callable[[Any], Any]] = {
    f"{kind}, {size} ranks": lambda _, kind=kind, size=size: (  # type: ignore[misc]
        divided.test_the_bits_are_those_of_the_whole_state_and_each_rank_has_a_share(kind, size)
    )
    for kind, size in [("momentum", 2), ("AdamW, fused", 3), ("Adafactor", 4)]
} | {
    "moves": lambda _: divided.test_parameters_that_move_freeze_and_are_added(),
    "dtypes": lambda _: divided.test_every_dtype_and_layout("AdamW"),
    "no share": lambda _: divided.test_ranks_without_a_share(),
    "closures": lambda _: (
        divided.test_hooks_and_closures_see_the_users_parameters_all_of_them_updated()
    ),
    "broadcast": lambda _: divided.test_broadcast_in_mid_training_changes_nothing(0),
    "resumed": lambda _: divided.test_state_goes_from_one_number_of_ranks_to_another(),
    "becomes sparse": lambda _: divided.test_sparse_gradients(0),
    "joins": lambda _: divided.test_a_rank_that_has_joined_cannot_update_its_share((3, 5)),
    "adam": lambda _: ordinary.test_shards_give_what_one_process_gives_on_the_whole("adam", 2, 2),
    "several": lambda _: ordinary.test_several_optimizers_on_one_model(),
    "added later": lambda _: ordinary.test_parameters_added_later_unfrozen_and_shared(),
    "sparse": lambda _: ordinary.test_sparse_embeddings(False),
    "broken pass": lambda _: ordinary.test_a_pass_that_breaks_off_leaves_nothing_behind(),
}


@pytest.mark.parametrize("promise", SAME)
def test_keeps_the_promises_of_a_divided_state(
    promise: str,
    watched: Any,  # noqa: F811
    scattered: list[bool],
) -> None:
    SAME[promise](watched)
    assert any(scattered)


def test_each_rank_has_averages_in_its_share_and_its_own_gradient_elsewhere() -> None:
    def rank(group: Group) -> Any:
        parameter = nn.Parameter(torch.zeros(600))
        optimizer = wrap(torch.optim.SGD([parameter], lr=1.0, momentum=0.9), group)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            if step < 2:
                (parameter.sum() * (group.rank + 1)).backward()
            else:
                parameter.grad = torch.full((600,), group.rank + 1.0)
                optimizer.synchronize()
            seen.append(parameter.grad.tolist())
            optimizer.step()
            assert parameter.grad is None
            assert [tensor.grad for tensor in optimizer.state.tensors] == [None]
        return seen

    for number, (first, *later) in enumerate(run_threads(3, rank)):
        assert first == [2.0] * 600  # the state is divided at its end
        begin, end = 192 * number, 192 * number + (192 if number < 2 else 216)
        share = [2.0 if begin <= i < end else number + 1.0 for i in range(600)]
        assert later == [share, share]


@pytest.mark.parametrize(
    ("norm_type", "dtype", "passes"),
    [
        (2.0, torch.float32, 1),
        (1.0, torch.float32, 2),
        (3.0, torch.float64, 1),
        (math.inf, torch.float32, 1),
    ],
)
def test_clipping_by_the_norm_of_all_shares(norm_type: float, dtype: Any, passes: int) -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = network(dtype=dtype)
        inner = KINDS["momentum"](net.parameters())
        optimizer = wrap(
            inner,
            group,
            shard_state=shard,
            shard_gradients=shard,
            backward_passes_per_step=passes,
        )
        norms = []
        for step in range(5):
            optimizer.zero_grad()
            backward(net, step, group.rank)
            # The third is not clipped.
            most = 1e4 if step == 2 else 0.05
            if shard or step < 4:
                norms.append(optimizer.clip_grad_norm_(most, norm_type, error_if_nonfinite=True))
            else:
                optimizer.synchronize()
                norms.append(nn.utils.clip_grad_norm_(net.parameters(), most, norm_type))
            optimizer.step()
        assert {norm.dtype for norm in norms} == {dtype}
        return net, torch.stack(norms)

    whole = run_threads(3, functools.partial(rank, shard=False))[0]
    first, *others = run_threads(3, functools.partial(rank, shard=True))
    for net, norms in others:  # up to rounding for one process, but equal on all ranks
        assert_same_bits(net, first[0])
        assert torch.equal(norms, first[1])
    assert (whole[1] > 0.1).all()
    torch.testing.assert_close(first[1], whole[1])
    for p, q in zip(first[0].parameters(), whole[0].parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_a_norm_that_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    def rank(group: Group) -> str:
        net = network()
        optimizer = wrap(KINDS["SGD"](net.parameters()), group)
        train(net, optimizer, group.rank, range(1))
        (net[0].weight.sum() * (math.inf if group.rank == 1 else 1.0)).backward()
        with pytest.raises(RuntimeError, match="gradients is inf, so they cannot") as caught:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert optimizer.clip_grad_norm_(1.0) == math.inf
        return str(caught.value)

    assert len(set(run_threads(2, rank))) == 1


def test_what_would_see_a_share_only_is_an_error() -> None:
    def clip_some(net: Any, optimizer: Any) -> None:
        net[0].weight.sum().backward()
        net[0].weight.grad.mul_(0.5)
        net[2].weight.sum().backward()
        optimizer.step()

    def clip_twice(net: Any, optimizer: Any) -> None:
        net[0].weight.sum().backward()
        nn.utils.clip_grad_value_(net.parameters(), 0.1)
        optimizer.clip_grad_norm_(1.0)

    def clip_and_save(net: Any, optimizer: Any) -> None:
        net[0].weight.sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.state_dict()
        optimizer.step()

    def scale(net: Any, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(net[0].weight.sum()).backward()
        scaler.step(optimizer)

    def clip(net: Any, optimizer: Any) -> None:
        net[0].weight.sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    def replace(net: Any, optimizer: Any) -> None:
        net[0].weight.sum().backward()
        net[0].weight.grad = torch.ones_like(net[0].weight)
        optimizer.step()

    def add(net: Any, optimizer: Any) -> None:
        for _ in range(2):
            net[0].weight.sum().backward()

    def rank(group: Group) -> None:
        for do, told in (
            (scale, "GradScaler does not go with shard_gradients=True"),
            (clip, r"'param_groups\[0\]\[0\]' was changed after .*clip_grad_norm_\(\)"),
            (clip_some, r"'param_groups\[0\]\[0\]' was changed after"),
            (clip_twice, r"'param_groups\[0\]\[0\]' was changed after"),
            (clip_and_save, r"'param_groups\[0\]\[0\]' was changed after"),
            (replace, r"'param_groups\[0\]\[0\]' was changed after"),
            (add, "after it was exchanged, and with shard_gradients=True"),
        ):
            net = network()
            optimizer = wrap(KINDS["SGD"](net.parameters()), group)
            train(net, optimizer, group.rank, range(2))
            optimizer.zero_grad()
            with pytest.raises(RuntimeError, match=told):
                do(net, optimizer)
            optimizer.zero_grad(set_to_none=False)
            net[2].weight.sum().backward()
            optimizer.step()
            train(net, optimizer, group.rank, range(2))

    run_threads(2, rank)


def test_norms_that_shares_do_not_add_up_to() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = wrap(KINDS["SGD"](net.parameters()), group)
        for norm_type in (0.0, -1.0, -math.inf, math.nan):
            with pytest.raises(ValueError, match="norm_type must be more than 0, not "):
                optimizer.clip_grad_norm_(1.0, norm_type)
        train(net, optimizer, group.rank, range(2))
        other = network()
        optimizer = wrap(KINDS["SGD"](other.parameters()), group, shard_gradients=False)
        (other[0].bias.sum() * (1 + 2 * group.rank)).backward()
        assert optimizer.clip_grad_norm_(1.0, -math.inf) == 2  # the smallest

    run_threads(2, rank)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shard_state": False}, "shard_gradients=True needs shard_state=True"),
        ({"compression": hvd.Compression.int8}, "takes no compression int8"),
        ({"compression": hvd.Compression.auto("none", "int8")}, "takes no compression auto"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], told: str) -> None:
    def rank(group: Group) -> None:
        with pytest.raises(ValueError, match=told):
            wrap(KINDS["SGD"](network().parameters()), group, **options)

    run_threads(2, rank)


def test_a_state_that_is_divided_again_between_backward_and_step() -> None:
    def rank(group: Group, shard: bool) -> Any:
        net = network()
        net[2].weight.requires_grad_(False)
        optimizer = wrap(
            KINDS["Adam"](net.parameters()), group, shard_state=shard, shard_gradients=shard
        )
        for step in range(6):
            optimizer.zero_grad()
            net[2].weight.requires_grad_(step > 2)
            backward(net, step, group.rank)
            if step in (1, 4):
                optimizer.state_dict()
            optimizer.step()
        return net

    expected = run_threads(3, functools.partial(rank, shard=False))[0]
    for net in run_threads(3, functools.partial(rank, shard=True)):
        assert_same_bits(net, expected)


def ramp(*shape: int) -> Any:
    return nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).reshape(shape))


class FirstOnly:
    """Sends a part of each gradient."""

    @staticmethod
    def compress(x: Any) -> Any:
        return x.reshape(-1)[:100].clone(), x

    @staticmethod
    def decompress(x: Any, whole: Any) -> Any:
        return torch.cat([x, torch.zeros(whole.numel() - len(x))]).reshape(whole.shape)


class Peak:
    """Keeps of each average what is far from 0."""

    @staticmethod
    def compress(x: Any) -> Any:
        return x.clone(), None

    @staticmethod
    def decompress(x: Any, _: Any) -> Any:
        return torch.where(x.abs() > x.abs().mean(), x, 0)


def added_before_clipping(optimizer: Any, first: Any, _: Any, step: int) -> None:
    if step == 2:
        optimizer.param_groups[0]["params"].append(first)
    assert optimizer.clip_grad_norm_(1e6) > (60 if step > 1 else 1)


def dropped_before_the_update(optimizer: Any, _: Any, second: Any, step: int) -> None:
    second.grad = None
    if step == 3:
        second.sum().backward()
    if step:
        optimizer.clip_grad_norm_(1e6)


def removed_before_the_update(optimizer: Any, first: Any, second: Any, step: int) -> None:
    if step == 0:
        optimizer.param_groups[0]["params"].append(first)
    elif step == 2:
        optimizer.param_groups[0]["params"].remove(second)


PROGRAMS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "added before clipping": (added_before_clipping, {}),
    "removed before the update": (removed_before_the_update, {}),
    "dropped before the update": (dropped_before_the_update, {}),
    "sparse": (lambda *_: None, {}),
    "sparse as dense": (lambda *_: None, {"sparse_as_dense": True}),
    "compresses to another size": (lambda *_: None, {"compression": FirstOnly}),
    "decompresses all at once": (lambda *_: None, {"compression": Peak}),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_do_not_clear_gradients(program: str) -> None:
    def rank(group: Group, shard: bool) -> Any:
        change, options = PROGRAMS[program]
        first, second, third, table, larger = (
            ramp(300),
            ramp(600),
            ramp(500),
            ramp(9, 9),
            ramp(9, 20),
        )
        larger.requires_grad_(False)
        dense = [second, third]
        sparse = [table, larger] if program.startswith("sparse") else []
        optimizer = wrap(
            torch.optim.SGD([*dense, *sparse], lr=0.001, weight_decay=0.0 if sparse else 0.1),
            group,
            **(options if shard else {**options, "shard_state": False, "shard_gradients": False}),
        )
        for step in range(5):
            if not shard:
                optimizer.zero_grad()
            first.grad = None
            larger.requires_grad_(step > 2)  # the tables' owners change
            loss = sum((p**3).sum() * (group.rank + 1) for p in [first * 5, second, third])
            for x in sparse:
                rows = nn.functional.embedding(torch.tensor([group.rank, 4, 4]), x, sparse=True)
                loss = loss + (rows**3).sum() * (group.rank + 1)
            loss.backward()
            change(optimizer, first, second, step)
            optimizer.step()
        return nn.ParameterList([first, *dense, *sparse])

    expected = run_threads(3, functools.partial(rank, shard=False))[0]
    for parameters in run_threads(3, functools.partial(rank, shard=True)):
        assert_same_bits(parameters, expected)


def test_in_a_world_of_one_step_clears_gradients_too() -> None:
    def rank(group: Group) -> Any:
        parameter = ramp(4)
        optimizer = wrap(torch.optim.SGD([parameter], lr=0.1), group)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        return parameter.grad

    assert run_threads(1, rank) == [None]


def test_a_rank_outside_of_the_process_set(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = hvd.ProcessSet([1])
    monkeypatch.setattr(hvd.ProcessSet, "process_set_id", 1)  # registered
    monkeypatch.setattr(outside, "included", lambda: False)
    parameter = ramp(4)
    optimizer = wrap(torch.optim.SGD([parameter], lr=0.1), outside)
    parameter.sum().backward()
    assert optimizer.clip_grad_norm_(9.0) == 2.0
    optimizer.step()
    assert parameter.grad is not None


@pytest.mark.served
@pytest.mark.parametrize("hosts", ["", "1,2"])
def test_in_processes(hosts: str) -> None:
    for ways in on_ranks(_in_a_world, 3, hosts=hosts):
        assert all(same for same, _ in ways.values()), ways
        if hosts:
            _, whole = ways["whole"]
            # What the parameters' way back takes is saved on the gradients' one.
            assert ways["state"][1] > 1.4 * whole
            assert ways["gradients"][1] < 1.1 * whole


def _in_a_world() -> Any:
    group = hvd.init().group
    expected, _ = divided.trained(group, KINDS["AdamW"], shard=False)
    found = {}
    shared = {"shared_parameters": True, "gradient_as_bucket_view": True}
    for way, options in (
        ("whole", {"shard_state": False, "shard_gradients": False}),
        ("state", {"shard_gradients": False}),
        ("gradients", {}),
        ("shared", shared if group.transport.shares_memory else {}),
        ("in backward", {"bucket_bytes": 4096}),
    ):
        net = network()
        optimizer = wrap(KINDS["AdamW"](net.parameters()), group, **options)
        train(net, optimizer, group.rank, range(3))
        before = hvd.stats().bytes_sent
        train(net, optimizer, group.rank, range(3, 5))
        sent = sum(hvd.allgather_object(hvd.stats().bytes_sent - before))
        same = all(map(torch.equal, net.parameters(), expected.parameters()))
        found[way] = same, sent
    return found
