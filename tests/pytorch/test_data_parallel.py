"""DistributedDataParallel: a wrapped model and a plain optimizer, on ranks as threads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from launch import run_threads

torch = pytest.importorskip("torch")

import horo_lite.torch as hvd  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.errors import MismatchError  # noqa: E402

BATCH = 12


def network(seed: int, width: int = 5) -> Any:
    net = torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return net


def batch(step: int) -> Any:
    return torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def part(group: Group, step: int) -> Any:
    n = BATCH // group.size
    return batch(step)[n * group.rank : n * (group.rank + 1)]


def backward(net: Any, x: Any) -> None:
    net(x).square().mean().backward()


def gradients(net: Any) -> list[Any]:
    return [p.grad.clone() for p in net.parameters()]


def expected(*steps: int) -> list[Any]:
    """Return one process's gradients of these whole batches, added, with the weights of rank 0."""
    net = network(0)
    for step in steps:
        backward(net, batch(step))
    return gradients(net)


def close(ours: list[Any], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_is_that_of_one_process(size: int, as_view: bool) -> None:
    def rank(group: Group) -> list[Any]:
        inner = network(group.rank)
        net = hvd.DistributedDataParallel(
            inner, device_ids=[0], process_group=group, gradient_as_bucket_view=as_view
        )
        assert net.module is inner
        assert all(name.startswith("module.") for name in net.state_dict())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            backward(net, part(group, step))
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    alone = network(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        backward(alone, batch(step))
        optimizer.step()
    everyone = run_threads(size, rank)
    for ours in everyone:
        close(ours, [p.detach() for p in alone.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(ours, everyone[0], strict=True))


def test_passes_in_no_sync_add_up_until_the_next_one() -> None:
    def rank(group: Group) -> None:
        net = hvd.DistributedDataParallel(network(group.rank), process_group=group)
        with net.no_sync():
            backward(net, part(group, 0))
            own = network(0)
            backward(own, part(group, 0))
            close(gradients(net), gradients(own))  # this rank's alone
            backward(net, part(group, 1))
        backward(net, part(group, 2))
        close(gradients(net), expected(0, 1, 2))
        # As in torch: without zero_grad(), mean(g0 + g1 + g2) + mean(g3), and so on.
        backward(net, part(group, 3))
        close(gradients(net), expected(0, 1, 2, 3))

    run_threads(2, rank)


@pytest.mark.parametrize("as_view", [False, True])
def test_what_only_no_sync_has_touched_travels_with_the_next_exchange(as_view: bool) -> None:
    def rank(group: Group) -> None:
        first, last = (torch.nn.Linear(2, 2, bias=False) for _ in "ab")
        net = hvd.DistributedDataParallel(
            torch.nn.ModuleList([first, last]),
            process_group=group,
            gradient_as_bucket_view=as_view,
        )
        mean = sum(r + 1.0 for r in range(group.size)) / group.size
        for step in range(3):
            net.zero_grad(set_to_none=step != 1)
            with net.no_sync():
                (first(torch.full((2,), group.rank + 1.0))).sum().backward()
            assert first.weight.grad.tolist() == [[group.rank + 1.0] * 2] * 2
            last(torch.full((2,), 2.0 * (group.rank + 1))).sum().backward()
            assert first.weight.grad.tolist() == [[mean] * 2] * 2, step
            assert last.weight.grad.tolist() == [[2 * mean] * 2] * 2, step

    run_threads(3, rank)


def test_parameters_are_those_of_the_module_as_it_is() -> None:
    """Some are unfrozen, and others are replaced."""

    def rank(group: Group) -> None:
        inner = network(group.rank)
        inner[0].requires_grad_(False)
        net = hvd.DistributedDataParallel(inner, process_group=group)
        backward(net, part(group, 0))
        assert inner[0].weight.grad is None
        inner[0].requires_grad_(True)
        for step in range(4):
            if step == 2:
                inner.load_state_dict(network(0).state_dict(), assign=True)
            net.zero_grad()
            backward(net, part(group, step))
            close(gradients(net), expected(step))

    run_threads(2, rank)


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("how", ["to", "there and back", "load_state_dict"])
def test_parameters_that_are_swapped_are_averaged(how: str, swapping: None) -> None:
    """With set_swap_module_params_on_conversion(); torch loses their hooks."""

    def swap(inner: Any) -> None:
        if how == "load_state_dict":
            inner.load_state_dict(network(0).state_dict())
            return
        inner.to(torch.float32)
        if how == "there and back":
            inner.to(torch.float64)

    def rank(group: Group) -> None:
        inner = network(group.rank)
        net = hvd.DistributedDataParallel(inner, process_group=group)
        wrapped = network(0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(wrapped.parameters(), lr=0.0), process_set=group
        )
        for step in range(3):
            if step:
                swap(inner)
                swap(wrapped)
            for model in (net, wrapped):
                optimizer.zero_grad()
                net.zero_grad()
                x = part(group, step).to(next(model.parameters()).dtype)
                backward(model, x)  # not only in step(), which clipping precedes
                for found, mean in zip(gradients(model), expected(step), strict=True):
                    torch.testing.assert_close(found.double(), mean, rtol=1e-5, atol=1e-6)

    run_threads(2, rank)


@pytest.mark.parametrize("how", ["to", "load_state_dict"])
def test_parameters_swapped_through_the_wrapper_need_no_forward(how: str, swapping: None) -> None:
    """The forward of a compiled wrapper does not look for lost hooks."""

    def rank(group: Group) -> None:
        inner = network(group.rank)
        net = hvd.DistributedDataParallel(inner, process_group=group)
        for step in range(3):
            if step:
                net.to(torch.float32)
                net.to(torch.float64)
                if how == "load_state_dict":
                    net.load_state_dict(
                        {f"module.{k}": v for k, v in network(0).state_dict().items()}
                    )
            net.zero_grad()
            backward(inner, part(group, step))
            for found, mean in zip(gradients(net), expected(step), strict=True):
                torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6)

    run_threads(2, rank)


def test_one_rank_copies_the_model_and_all_begin_with_buffers_that_are_not_saved() -> None:
    """As for a running average of the weights."""

    def rank(group: Group) -> None:
        inner = network(group.rank)
        inner.register_buffer("noise", torch.tensor([group.rank + 1.0]), persistent=False)
        net = hvd.DistributedDataParallel(inner, process_group=group, broadcast_buffers=False)
        assert inner.noise.tolist() == [1.0]
        averaged = None if group.rank else torch.optim.swa_utils.AveragedModel(net)
        for step in range(2):
            net.zero_grad()
            backward(net, part(group, step))
            close(gradients(net), expected(step))
        if averaged is not None:
            close(list(averaged.parameters()), list(network(0).parameters()))
        with pytest.raises(TypeError, match=r"save model\.module or model\.state_dict\(\)"):
            pickle.dumps(net)
        copied = copy.deepcopy(net)
        copied.zero_grad()
        backward(copied, part(group, 2))  # exchanges, like the first
        close(gradients(copied), expected(2))
        close(gradients(net), expected(1))

    run_threads(2, rank)


def test_buffers_are_overwritten_between_two_forward_passes() -> None:
    """Running statistics may be; another buffer that backward() needs may not."""

    def rank(group: Group) -> None:
        inner = torch.nn.Sequential(network(0), torch.nn.BatchNorm1d(2).double())
        net = hvd.DistributedDataParallel(inner, process_group=group)
        x = part(group, 0) * (group.rank + 1)
        (net(x) + net(x * 2)).square().mean().backward()
        inner.register_buffer("scale", torch.ones((), dtype=torch.float64))
        inner.register_forward_hook(lambda module, _, y: y * module.scale)
        first, _ = net(x), net(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.square().mean().backward()

    run_threads(2, rank)


def test_a_gradient_that_some_ranks_lack_counts_as_zeros() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.unused = (
                torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(3)
            )

        def forward(self, which: str, scale: float) -> Any:
            return (getattr(self, which) * scale).sum()

    def rank(group: Group) -> None:
        net = hvd.DistributedDataParallel(
            Branches(), process_group=group, find_unused_parameters=True
        )
        for _ in range(2):
            net.zero_grad()
            net("left" if group.rank else "right", group.rank + 1.0).backward()
            assert net.module.left.grad.tolist() == [1.0, 1.0]  # 2 / 2
            assert net.module.right.grad.tolist() == [0.5, 0.5]  # 1 / 2
            assert net.module.unused.grad is None

    run_threads(2, rank)


def test_forward_passes_of_training_begin_with_rank_zeros_buffers() -> None:
    def rank(group: Group) -> None:
        norm = torch.nn.BatchNorm1d(3).double()
        net = hvd.DistributedDataParallel(norm, process_group=group)
        for step in range(2):
            net(part(group, step)).sum().backward()
        alone = torch.nn.BatchNorm1d(3).double()
        alone(batch(0)[: BATCH // 2])
        mean = 0.9 * alone.running_mean + 0.1 * part(group, 1).mean(0)
        torch.testing.assert_close(norm.running_mean, mean)
        before = norm.running_mean.clone()
        net.eval()
        net(part(group, 2))
        assert torch.equal(norm.running_mean, before)

    run_threads(2, rank)


def test_what_cannot_be_wrapped_is_an_error() -> None:
    def rank(group: Group) -> None:
        net = network(group.rank)
        wrapped = hvd.DistributedDataParallel(net, process_group=group)
        with pytest.raises(ValueError, match="belongs to another"):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), group=group)
        with pytest.raises(ValueError, match="no parameter that needs a gradient"):
            hvd.DistributedDataParallel(torch.nn.ReLU(), process_group=group)
        with pytest.raises(MismatchError, match=r"0\.bias"):
            hvd.DistributedDataParallel(network(0, 5 + group.rank), process_group=group)
        backward(wrapped, part(group, 0))
        close(gradients(wrapped), expected(0))

    run_threads(2, rank)
