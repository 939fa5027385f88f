"""SyncBatchNorm on ranks as threads, against torch.nn.BatchNorm on the concatenated batch."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from typing import Any

import pytest
from launch import RanksFailedError, run_and_hear, run_threads
from worlds import on_ranks

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.errors import MismatchError  # noqa: E402
from horo_lite.horovod.process_sets import ProcessSet, global_process_set  # noqa: E402
from horo_lite.torch.sync_batch_norm import SyncBatchNorm  # noqa: E402

# BatchNorm itself, for any number of dimensions.
BATCH_NORM = {
    2: torch.nn.BatchNorm1d,
    3: torch.nn.BatchNorm1d,
    4: torch.nn.BatchNorm2d,
    5: torch.nn.BatchNorm3d,
}
PLACES = {2: (), 3: (7,), 4: (5, 3), 5: (2, 3, 4)}
FEATURES = 3
EXACT = {"rtol": 1e-12, "atol": 1e-12}
ROUNDED = {"rtol": 1e-5, "atol": 2e-6}


def numbers(seed: int, *shape: int, dtype: Any = torch.float64) -> Any:
    # Threads share torch's generator.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def batch(n: int, dims: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    """Return samples whose channels have different means and deviations, none of them 0 or 1."""
    x = numbers(seed, n, FEATURES, *PLACES[dims])
    channel = torch.arange(FEATURES, dtype=x.dtype).reshape(FEATURES, *(1,) * (dims - 2))
    drift = torch.arange(n, dtype=x.dtype).reshape(n, *(1,) * (dims - 1))  # ranks must differ
    return ((x + 0.3 * drift) * (2 + channel) + 5 * channel - 3).to(dtype)


def with_parameters(layer: Any) -> Any:
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([1.5, -0.5, 2.0]))
            layer.bias.copy_(torch.tensor([0.25, 1.0, -2.0]))
    return layer


def results(layer: Any, xs: list[Any], tail: int = 1) -> dict[str, Any]:
    """Return the results of consecutive training steps; the loss weights outputs differently."""
    found: dict[str, Any] = {}
    for step, x in enumerate(xs):
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        assert y.dtype is x.dtype
        (y.double() * weights(x, step, tail)).sum().backward()
        found |= {f"y{step}": y.detach(), f"dx{step}": x.grad}
    found |= {f"d_{name}": p.grad for name, p in layer.named_parameters()}
    return found | {name: b.clone() for name, b in layer.named_buffers()}


def weights(x: Any, step: int, offset: int) -> Any:
    """Return a number for every element, which depends on the sample's place in the whole batch."""
    place = torch.arange(x.numel(), dtype=torch.float64) + offset * x[0:1].numel()
    return torch.sin(place * (step + 1)).reshape(x.shape)


def compare(
    whole: dict[str, Any], parts: list[dict[str, Any]], cuts: list[int], tolerance: dict[str, float]
) -> None:
    """Assert that the ranks' parts together equal the results of the whole batch."""
    for name, expected in whole.items():
        of_ranks = [part[name] for part in parts]
        if name.startswith("d_"):
            found = sum(of_ranks)
        elif name[0] in "yd":
            assert [len(part) for part in of_ranks] == cuts
            found = torch.cat(of_ranks)
        else:
            found = of_ranks[0]
            assert all(torch.equal(found, other) for other in of_ranks), name
        torch.testing.assert_close(
            found, expected, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def check(
    cuts: list[int],
    dims: int = 4,
    dtype: Any = torch.float64,
    tolerance: Any = EXACT,
    **options: Any,
) -> None:
    xs = [batch(sum(cuts), dims, step, dtype) for step in range(3)]
    expected = with_parameters(BATCH_NORM[dims](FEATURES, **options).to(dtype))
    whole = results(expected, xs, 0)

    def rank(group: Group) -> dict[str, Any]:
        layer = with_parameters(SyncBatchNorm(FEATURES, **options, process_set=group).to(dtype))
        mine = [x.split(cuts)[group.rank] for x in xs]
        return results(layer, mine, sum(cuts[: group.rank]))

    compare(whole, run_threads(len(cuts), rank), cuts, tolerance)


@pytest.mark.parametrize("cuts", [[4, 4], [7, 1], [3, 2, 4], [1, 1, 1], [5, 0, 1]], ids=str)
@pytest.mark.parametrize("dims", [2, 3, 4, 5])
def test_ranks_on_parts_give_what_batch_norm_gives_on_the_whole(dims: int, cuts: list[int]) -> None:
    check(cuts, dims)


@pytest.mark.parametrize("cuts", [[4, 4], [3, 0, 2]], ids=str)
@pytest.mark.parametrize("dims", [2, 4])
def test_float32(dims: int, cuts: list[int]) -> None:
    check(cuts, dims, torch.float32, ROUNDED)


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"momentum": 0.9, "eps": 0.5},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    check([3, 1, 2], **options)


def test_images_of_different_sizes() -> None:
    shapes = [(2, FEATURES, 5, 3), (3, FEATURES, 2, 2)]
    xs = [4 * numbers(i, *shape) + i for i, shape in enumerate(shapes)]
    dys = [numbers(9 + i, *shape) for i, shape in enumerate(shapes)]

    def in_a_row(tensors: list[Any]) -> Any:  # the same values, as one batch of numbers
        return torch.cat([t.movedim(1, -1).reshape(-1, FEATURES) for t in tensors])

    x = in_a_row(xs).requires_grad_()
    y = torch.nn.BatchNorm1d(FEATURES).double()(x)
    y.backward(in_a_row(dys))

    def rank(group: Group) -> tuple[Any, Any]:
        mine = xs[group.rank].clone().requires_grad_()
        out = SyncBatchNorm(FEATURES, process_set=group).double()(mine)
        out.backward(dys[group.rank])
        return out.detach(), mine.grad

    outs, gradients = (list(found) for found in zip(*run_threads(2, rank), strict=True))
    torch.testing.assert_close(in_a_row(outs), y.detach(), **EXACT)
    torch.testing.assert_close(in_a_row(gradients), x.grad, **EXACT)


def test_other_memory_layouts() -> None:
    x, dy = batch(6, 4), numbers(1, 6, FEATURES, *PLACES[4])
    whole = x.clone().requires_grad_()
    y = torch.nn.BatchNorm2d(FEATURES).double()(whole)
    y.backward(dy)

    def rank(group: Group) -> None:
        mine = slice(3 * group.rank, 3 * group.rank + 3)
        layer = SyncBatchNorm(FEATURES, process_set=group).double()
        last = x[mine].to(memory_format=torch.channels_last).requires_grad_()
        out = layer(last)
        assert out.is_contiguous(memory_format=torch.channels_last)
        out.backward(dy[mine])
        torch.testing.assert_close(out, y[mine], **EXACT)
        torch.testing.assert_close(last.grad, whole.grad[mine], **EXACT)
        # Every other row of a larger array, and a gradient that is one number, expanded.
        strided = x[mine].repeat_interleave(2, dim=2)[:, :, ::2].requires_grad_()
        out = layer(strided)
        out.sum().backward()
        torch.testing.assert_close(out, y[mine], **EXACT)
        assert strided.grad.abs().max() < 1e-12

    run_threads(2, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parameters_too", [False, True])
def test_half_inputs_are_normalized_in_float32(dtype: Any, parameters_too: bool) -> None:
    cuts = [4, 1]
    x = batch(5, 4, dtype=dtype)
    expected = with_parameters(torch.nn.BatchNorm2d(FEATURES).double())
    whole = results(expected, [x.double()], 0)

    def rank(group: Group) -> dict[str, Any]:
        layer = with_parameters(SyncBatchNorm(FEATURES, process_set=group))
        if parameters_too:
            layer.to(dtype)
        return results(layer, [x.split(cuts)[group.rank]], sum(cuts[: group.rank]))

    parts = run_threads(2, rank)
    kept = dtype if parameters_too else torch.float32
    assert parts[0]["running_var"].dtype is parts[0]["d_weight"].dtype is kept
    parts = [{k: v if v.dtype is torch.int64 else v.double() for k, v in p.items()} for p in parts]
    # Only the roundings of inputs and outputs.
    eps = torch.finfo(dtype).eps
    compare(whole, parts, cuts, {"rtol": 2 * eps, "atol": 4 * eps})


def test_channels_far_from_zero_keep_their_digits() -> None:
    # Sums of squares of such numbers have no correct digit of their variance.
    x = numbers(0, 8, FEATURES, 40) + torch.tensor([1e9, -1e8, 0]).reshape(1, FEATURES, 1)
    exact = x.var(dim=(0, 2), correction=1)

    def rank(group: Group) -> None:
        layer = SyncBatchNorm(FEATURES, momentum=1.0, process_set=group).double()
        layer(x.split([6, 2])[group.rank])
        torch.testing.assert_close(layer.running_var, exact, rtol=1e-6, atol=0)

    run_threads(2, rank)


def test_evaluating_asks_nobody() -> None:
    x = batch(4, 4)
    plain = with_parameters(torch.nn.BatchNorm2d(FEATURES).double())
    plain(batch(9, 4, 1))
    expected = plain.eval()(x)

    def rank(group: Group) -> None:
        layer = SyncBatchNorm(FEATURES, process_set=group).double()
        layer.load_state_dict(plain.state_dict())
        layer.eval()
        if group.rank:  # the other one is absent
            assert torch.equal(layer(x), expected)
            untracked = SyncBatchNorm(FEATURES, track_running_stats=False, process_set=group).eval()
            other = torch.nn.BatchNorm2d(FEATURES, track_running_stats=False).eval()
            assert torch.equal(untracked(x.float()), other(x.float()))

    run_threads(2, rank)


def test_one_rank_is_plain_batch_norm() -> None:
    def rank(group: Group) -> None:
        x = batch(4, 4, dtype=torch.float32)
        layer = with_parameters(SyncBatchNorm(FEATURES, process_set=group))
        plain = with_parameters(torch.nn.BatchNorm2d(FEATURES))
        found, expected = results(layer, [x]), results(plain, [x])
        assert all(torch.equal(found[name], expected[name]) for name in expected)

    run_threads(1, rank)


class Twice(torch.nn.Module):
    """One layer that is called twice, between others."""

    def __init__(self, make: Any, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.layers = torch.nn.ModuleList(
            [torch.nn.Conv2d(FEATURES, FEATURES, 1) for _ in range(2)]
        ).double()
        with torch.no_grad():
            for i, p in enumerate(self.layers.parameters()):
                p.copy_(numbers(50 + i, *p.shape))
        self.norm = with_parameters(make().double())
        self.other = make().double()

    def forward(self, x: Any) -> Any:
        def part(x: Any) -> Any:
            return self.norm(self.layers[1](torch.relu(self.other(self.norm(self.layers[0](x))))))

        if not self.how:
            return part(x)
        return checkpoint(part, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
def test_called_twice_and_with_checkpointing(how: str) -> None:
    cuts = [2, 3]
    xs = [batch(5, 4, step) for step in range(3)]
    whole = results(Twice(lambda: torch.nn.BatchNorm2d(FEATURES), how), xs, 0)

    def rank(group: Group) -> dict[str, Any]:
        net = Twice(lambda: SyncBatchNorm(FEATURES, process_set=group), how)
        return results(net, [x.split(cuts)[group.rank] for x in xs], sum(cuts[: group.rank]))

    compare(whole, run_threads(2, rank), cuts, {"rtol": 1e-10, "atol": 1e-10})


def test_under_autocast() -> None:
    cuts = [2, 4]
    x = batch(6, 4, dtype=torch.float32)

    def step(net: Any, x: Any) -> tuple[Any, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
            assert y.dtype is torch.bfloat16
        y.float().square().sum().backward()
        return y.detach(), net[0].weight.grad, net[1].weight.grad, net[1].running_var

    def network(norm: Any) -> Any:
        convolution = torch.nn.Conv2d(FEATURES, FEATURES, 1)
        with torch.no_grad():
            convolution.weight.copy_(numbers(5, FEATURES, FEATURES, 1, 1))
            convolution.bias.zero_()
        return torch.nn.Sequential(convolution, with_parameters(norm))

    y, d_convolution, d_norm, variance = step(network(torch.nn.BatchNorm2d(FEATURES)), x)

    def rank(group: Group) -> tuple[Any, ...]:
        norm = SyncBatchNorm(FEATURES, process_set=group)
        return step(network(norm), x.split(cuts)[group.rank])

    parts = run_threads(2, rank)
    close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y, **close)
    scale = d_norm.abs().max()
    torch.testing.assert_close(sum(p[2] for p in parts) / scale, d_norm / scale, **close)
    torch.testing.assert_close(sum(p[1] for p in parts) / scale, d_convolution / scale, **close)
    for part in parts:
        torch.testing.assert_close(part[3], variance, rtol=1e-3, atol=0)


def test_without_gradients_of_the_input_or_of_anything() -> None:
    x = batch(4, 4)
    plain = with_parameters(torch.nn.BatchNorm2d(FEATURES).double())
    plain(x).square().sum().backward()

    def rank(group: Group) -> Any:
        layer = with_parameters(SyncBatchNorm(FEATURES, process_set=group).double())
        mine = x.split(2)[group.rank]
        layer(mine).square().sum().backward()
        with torch.no_grad():
            assert not layer(mine).requires_grad
        layer.weight.requires_grad_(False)
        layer.bias.requires_grad_(False)
        assert not layer(mine).requires_grad
        return layer.weight.grad

    torch.testing.assert_close(sum(run_threads(2, rank)), plain.weight.grad, **EXACT)


def test_optimizers_with_different_weights_in_one_backward_are_an_error() -> None:
    def rank(group: Group) -> None:
        layers = torch.nn.Linear(FEATURES, FEATURES), SyncBatchNorm(FEATURES, process_set=group)
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), process_set=group)
            for layer in layers
        ]
        for weight, optimizer in enumerate(optimizers, 2):
            optimizer.set_weight(weight)
        with pytest.raises(RuntimeError, match=r"different weights .*2.0.*3.0"):
            torch.nn.Sequential(*layers)(numbers(0, 4, FEATURES).float()).sum().backward()

    run_threads(2, rank)


def test_too_few_values_are_an_error_on_all_ranks_and_the_next_batch_is_none() -> None:
    def rank(group: Group) -> str:
        layer = SyncBatchNorm(FEATURES, process_set=group)
        with pytest.raises(ValueError, match="all 2 ranks together have") as caught:
            layer(torch.ones(group.rank, FEATURES))
        assert layer.num_batches_tracked == 0
        layer(torch.ones(1, FEATURES))
        assert layer.num_batches_tracked == 1
        return str(caught.value)

    assert all("have 1 " in text for text in run_threads(2, rank))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda group: SyncBatchNorm(FEATURES + group.rank, process_set=group), "4 features"),
        (lambda group: SyncBatchNorm(FEATURES, eps=[1, 2][group.rank], process_set=group), "eps 2"),
        (
            lambda group: SyncBatchNorm(
                FEATURES, momentum=[0.5, None][group.rank], process_set=group
            ),
            "momentum None",
        ),
        (
            lambda group: SyncBatchNorm(FEATURES, process_set=group).to(
                [torch.float32, torch.float64][group.rank]
            ),
            "torch.float64",
        ),
    ],
    ids=["features", "eps", "momentum", "dtype"],
)
def test_ranks_that_differ_hear_of_it_and_can_go_on(wrong: Any, said: str) -> None:
    def rank(group: Group) -> None:
        layer = wrong(group)
        x = numbers(0, 4, layer.num_features).to(layer.weight.dtype)
        with pytest.raises(MismatchError, match="SyncBatchNorm number 1, call 1") as caught:
            layer(x)
        assert said in str(caught.value)
        assert layer.num_batches_tracked == 0
        good = SyncBatchNorm(FEATURES, process_set=group)
        for _ in range(2):
            good(numbers(group.rank, 4, FEATURES).float())
        assert good.num_batches_tracked == 2

    run_threads(2, rank)


def test_layers_in_another_order_on_one_rank_are_noticed() -> None:
    def rank(group: Group) -> None:
        if group.rank:
            SyncBatchNorm(1, process_set=group)  # an additional layer, never used, has no effect
        gone = [SyncBatchNorm(1, process_set=group) for _ in range(3)]
        for layer in gone:
            layer(torch.ones(2, 1))
        del layer, gone[group.rank :]  # nor has a layer that one rank keeps for longer
        layers = [SyncBatchNorm(FEATURES, process_set=group) for _ in range(2)]
        x = numbers(group.rank, 4, FEATURES).float()
        for layer in layers:
            layer(x)
        with pytest.raises(MismatchError, match=r"SyncBatchNorm number [45], call 2"):
            layers[group.rank](x)
        for layer in layers:
            layer(x)
        # Backward, too: an output that only one rank uses.
        one, other = (layers[0](x.requires_grad_()) for _ in range(2))
        with pytest.raises(MismatchError, match=r"number 4, call [34]:.*gradients"):
            [one, other][group.rank].sum().backward()
        layers[0](x).sum().backward()

    run_threads(2, rank)


def test_wrong_inputs_are_errors_at_the_call() -> None:
    def rank(group: Group) -> None:
        layer = SyncBatchNorm(FEATURES, process_set=group)
        if group.rank:
            with pytest.raises(ValueError, match="at least 2 dimensions"):
                layer(torch.ones(FEATURES))
            with pytest.raises(ValueError, match="3 features, got 4"):
                layer(torch.ones(2, FEATURES + 1))

    run_threads(2, rank)


def test_a_rank_that_never_comes_is_no_hang() -> None:
    def rank(group: Group) -> None:
        layer = SyncBatchNorm(FEATURES, process_set=group)
        if group.rank:
            raise KeyError("elsewhere")
        layer(torch.ones(4, FEATURES))

    with pytest.raises(RanksFailedError) as caught:
        run_threads(2, rank)
    assert {type(e).__name__ for e in caught.value.errors.values()} == {"KeyError", "PeerLostError"}


def test_an_optimizer_that_exchanges_after_two_passes() -> None:
    xs = [batch(6, 2, k) for k in range(2)]

    def gradients(layer: Any, optimizer: Any, part: slice) -> list[Any]:
        for x in xs:
            layer(x[part]).sin().sum().backward()
        optimizer.step()
        return [p.grad for p in layer.parameters()]

    def sgd(layer: Any) -> Any:
        return torch.optim.SGD(layer.parameters(), lr=0.1)

    def rank(group: Group) -> list[Any]:
        layer = with_parameters(SyncBatchNorm(FEATURES, process_set=group).double())
        how = {"op": hvd.Sum, "backward_passes_per_step": 2, "process_set": group}
        optimizer = hvd.DistributedOptimizer(sgd(layer), **how)
        return gradients(layer, optimizer, slice(4 * group.rank, 4 + 2 * group.rank))

    whole = with_parameters(torch.nn.BatchNorm1d(FEATURES).double())
    expected = gradients(whole, sgd(whole), slice(None))
    for found in run_threads(2, rank):
        torch.testing.assert_close(found, expected, **EXACT)


def test_states_are_batch_norms() -> None:
    layer, plain = SyncBatchNorm(FEATURES), torch.nn.BatchNorm2d(FEATURES)
    assert isinstance(layer, torch.nn.modules.batchnorm._BatchNorm)
    layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    assert copy.deepcopy(layer).state_dict().keys() == layer.state_dict().keys()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).process_set is global_process_set
    sets = [ProcessSet([0, 3]), global_process_set]
    assert [copy.deepcopy(s) for s in sets] == sets
    run_threads(1, lambda group: copy.deepcopy(SyncBatchNorm(3, process_set=group)))
    assert pickle.loads(pickle.dumps(sets[0])).ranks == [0, 3]
    assert repr(layer).startswith("SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=True")


@pytest.mark.parametrize("norm", [torch.nn.BatchNorm2d, torch.nn.SyncBatchNorm])
def test_a_converted_model_is_that_of_the_whole_batch(norm: Any) -> None:
    cuts = [2, 3]
    xs = [batch(5, 4, step) for step in range(3)]
    whole = results(Twice(lambda: torch.nn.BatchNorm2d(FEATURES)), xs, 0)

    def rank(group: Group) -> dict[str, Any]:
        net = Twice(lambda: norm(FEATURES))
        parameters, seen = list(net.parameters()), []
        net.norm.register_forward_hook(lambda *_: seen.append(1))
        assert SyncBatchNorm.convert_sync_batchnorm(net.eval(), process_set=group) is net
        assert not net.norm.training
        assert all(map(operator.is_, net.parameters(), parameters))
        found = results(
            net.train(), [x.split(cuts)[group.rank] for x in xs], sum(cuts[: group.rank])
        )
        assert len(seen) == 2 * len(xs)
        return found

    compare(whole, run_threads(2, rank), cuts, {"rtol": 1e-10, "atol": 1e-10})


def test_pytorchs_own_is_a_warning_when_the_model_is_broadcast() -> None:
    def rank(group: Group) -> None:
        net = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.SyncBatchNorm(1))
        hvd.broadcast_parameters(net, process_set=group)
        SyncBatchNorm.convert_sync_batchnorm(net, process_set=group)
        hvd.broadcast_parameters(net, process_set=group)

    _, (warned,) = run_and_hear(2, rank)
    assert "'1' is a torch.nn.SyncBatchNorm, which normalizes by this rank's samples" in warned
    assert run_and_hear(1, rank)[1] == []


def test_layers_that_cannot_be_converted_are_named() -> None:
    class WithActivation(torch.nn.BatchNorm2d):
        def forward(self, x: Any) -> Any:
            return torch.relu(super().forward(x))

    for other, said in (
        (torch.nn.LazyBatchNorm2d(), "'1' is lazy"),
        (WithActivation(FEATURES), r"'1' is a WithActivation, whose forward\(\)"),
    ):
        net = torch.nn.Sequential(torch.nn.BatchNorm2d(FEATURES), other)
        with pytest.raises(ValueError, match=said):
            SyncBatchNorm.convert_sync_batchnorm(net)
        assert type(net[0]) is torch.nn.BatchNorm2d
    layer = torch.nn.BatchNorm2d(FEATURES)
    assert SyncBatchNorm.convert_sync_batchnorm(layer).process_set is global_process_set
    assert SyncBatchNorm.convert_sync_batchnorm(layer) is layer  # a second time


# Convolutions, SyncBatchNorm and an optimizer over real ranks, plain, compiled and within a process
# set, against the same on the whole batch in this process. Ranks have parts of different sizes, so
# they add up parts of the whole batch's loss, or weight the means over their own samples.
def train_as_on_one_process() -> None:
    hvd.init()

    def train(norm, part, wrap, compiled=False, weighted=False):
        torch.manual_seed(7)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3), norm(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 3), norm(3)
        ).double()
        net = copy.deepcopy(net)  # as for a moving average of the parameters
        opt = wrap(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        run = torch.compile(net, backend="aot_eager") if compiled else net
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            x = torch.randn(7, 2, 8, 8, generator=generator, dtype=torch.float64) * 3 + 1
            opt.zero_grad()
            y = run(x[part]).sin()
            if weighted:
                opt.set_weight(len(y))
            (y.mean() if weighted else y.mean() * len(y) / 7).backward()
            opt.step()
        return net.state_dict()

    def compare(found, process_set=hvd.global_process_set):
        worst = max((found[name] - whole[name]).abs().max().item() for name in whole)
        assert worst < 1e-11, worst
        bits = b"".join(t.numpy().tobytes() for t in found.values())
        assert len(set(hvd.allgather_object(bits, process_set=process_set))) == 1

    def wrap(process_set):
        return lambda opt: hvd.DistributedOptimizer(opt, op=hvd.Sum, process_set=process_set)

    whole = train(torch.nn.BatchNorm2d, slice(None), lambda opt: opt)
    bounds = [0, 1, 4, 7] if hvd.size() == 3 else [0, 2, 7]
    part = slice(*bounds[hvd.rank() : hvd.rank() + 2])
    compare(train(hvd.SyncBatchNorm, part, wrap(hvd.global_process_set)))
    frames = torch._dynamo.utils.counters["frames"]
    before = frames["total"]
    compare(train(hvd.SyncBatchNorm, part, wrap(hvd.global_process_set), compiled=True))
    assert 0 < frames["total"] - before < 30, "what runs between graphs was compiled, too"
    compare(train(hvd.SyncBatchNorm, part, hvd.DistributedOptimizer, weighted=True))

    pair = hvd.add_process_set([0, hvd.size() - 1])
    if pair.included():

        def norm(n: int) -> Any:
            return pickle.loads(pickle.dumps(hvd.SyncBatchNorm(n, process_set=pair)))

        compare(train(norm, slice(*[0, 5, 7][pair.rank() :][:2]), wrap(pair)), pair)
    else:
        with pytest.raises(ValueError, match=r"rank 1 is not in ProcessSet\(\[0, 2\]\)"):
            hvd.SyncBatchNorm(2, process_set=pair)(torch.ones(2, 2))


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3])
def test_training_on_real_ranks(size: int) -> None:
    on_ranks(train_as_on_one_process, size, timeout_s=100)
