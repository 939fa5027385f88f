"""What is said of torch's parameters and gradients at the first exchange, and at which line."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from launch import run_and_hear, run_threads

torch = pytest.importorskip("torch")

from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.horovod.reductions import Adasum  # noqa: E402
from horo_lite.torch.optimizer import DistributedOptimizer  # noqa: E402


def training(
    samples: list[int],
    dtype: Any = torch.float32,
    *,
    loaded: tuple[float, ...] = (0, 0, 0),
    **options: Any,
) -> Callable[[Group], None]:
    """Return a rank's program: `samples[rank]` is the seed of its samples.

    If `loaded[rank]` is not 0, the rank has loaded an optimizer's state with that momentum.
    """

    def run(group: Group) -> None:
        net = torch.nn.Linear(4, 3, bias=False)
        weight = torch.full((4, 3), 0.5, dtype=dtype).t()  # not contiguous
        net.weight = torch.nn.Parameter(weight)
        inner = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if loaded[group.rank]:
            inner.state[net.weight]["momentum_buffer"] = torch.full_like(
                net.weight, loaded[group.rank]
            )
        optimizer = DistributedOptimizer(
            inner, net.named_parameters(), process_set=group, **options
        )
        for step in range(2):
            optimizer.zero_grad()
            rng = torch.Generator().manual_seed(samples[group.rank] + 100 * step)
            net(torch.randn(6, 4, generator=rng).to(dtype)).square().sum().backward()
            optimizer.step()

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_same_samples_are_found_in_every_dtype(dtype: Any) -> None:
    assert run_and_hear(3, training([0, 1, 2], dtype))[1] == []
    (text,) = run_and_hear(3, training([1, 0, 1], dtype))[1]
    assert "on ranks 0 and 2 (gradients of optimizer 1, step 1)" in text


def test_ranks_that_take_steps_of_their_own_first_are_not_compared() -> None:
    assert run_and_hear(2, training([0, 1], op=Adasum))[1] == []


def test_a_state_that_only_some_ranks_have_loaded_is_named() -> None:
    assert run_and_hear(3, training([0, 1, 2], loaded=(2, 2, 2)))[1] == []
    (text,) = run_and_hear(3, training([0, 1, 2], loaded=(2, 0, 0)))[1]
    assert "before gradients of optimizer 1, step 1 are exchanged: rank 0 against" in text
    assert "against ranks 1 and 2 (none)." in text
    assert "broadcast_optimizer_state(optimizer) on every rank" in text
    (text,) = run_and_hear(3, training([0, 1, 2], loaded=(2, 3, 2)))[1]
    assert "ranks 0 and 2 against rank 1." in text
    assert run_and_hear(3, training([0, 1, 2], loaded=(2, 0, 0), check_every=0))[1] == []


def test_a_warning_is_at_the_line_that_called_backward() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(2, training([0, 0]))
    (warning,) = caught
    lines, first = inspect.getsourcelines(training)
    assert warning.filename == __file__
    assert "backward()" in lines[warning.lineno - first]


@pytest.mark.parametrize("change", ["clip", "zero", "none", "replace"])
def test_gradients_from_before_the_optimizer_that_were_clipped_are_a_warning(change: str) -> None:
    """Some libraries create an optimizer for the gradients that they have; what is then right?"""

    def run(group: Group) -> float:
        parameter = torch.nn.Parameter(torch.zeros(2))
        (parameter * (group.rank + 1.0) * 5).sum().backward()
        optimizer = DistributedOptimizer(torch.optim.SGD([parameter], 1.0), process_set=group)
        if change == "clip":
            torch.nn.utils.clip_grad_value_([parameter], 8.0)
        elif change == "zero":
            parameter.grad.zero_()
        elif change == "replace":
            parameter.grad = torch.full_like(parameter, group.rank)
        optimizer.step()
        return -float(parameter[0].detach())

    averages, heard = run_and_hear(2, run)
    assert averages == [{"clip": (5 + 8) / 2, "zero": 0, "none": 7.5, "replace": 0.5}[change]] * 2
    heard = [text for text in heard if "computed before the DistributedOptimizer" in text]
    assert len(heard) == (2 if change == "clip" else 0)


def test_gradients_written_by_hand_after_a_pass_was_dropped_are_no_warning() -> None:
    """zero_grad() keeps the tensor, whose version the pass has recorded."""

    def run(group: Group) -> list[float]:
        weight = torch.nn.Parameter(torch.ones(2))
        inner = torch.optim.SGD([weight], 1.0)
        optimizer = DistributedOptimizer(inner, process_set=group, backward_passes_per_step=2)
        weight.sum().backward()
        optimizer.zero_grad(set_to_none=False)
        weight.grad.fill_(group.rank + 1.0)
        optimizer.step()
        return list(weight.tolist())

    assert run_and_hear(2, run) == ([[-0.5, -0.5]] * 2, [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["meta", "nested", "float8"])
def test_parameters_without_memory_are_left_out_of_unasked_comparisons(kind: str) -> None:
    """Frozen ones, after step 10, too; the others are compared."""
    frozen = {
        "meta": lambda: torch.empty(3, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "float8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
    }[kind]()

    def run(group: Group) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        inner = torch.optim.SGD([parameter, torch.nn.Parameter(frozen, requires_grad=False)], 0.1)
        optimizer = DistributedOptimizer(inner, process_set=group)
        for step in range(12):
            optimizer.zero_grad()
            (parameter * (group.rank + 1.0)).sum().backward()
            optimizer.step()
            if step == 5 and group.rank == 1:
                parameter.data[0] += 1

    (text,) = run_and_hear(2, run)[1]
    assert "the replicas differ after step 10: 1 of " in text


@pytest.mark.parametrize("differs", [False, True])
def test_parameters_with_sparse_gradients_only_are_compared(differs: bool) -> None:
    def run(group: Group) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(group.rank if differs else 1)
        inner = torch.optim.SparseAdam(table.parameters())
        optimizer = DistributedOptimizer(inner, process_set=group)
        if group.rank == 0:  # the other has no rows
            table(torch.tensor([0, 1])).sum().backward()
        optimizer.step()

    heard = run_and_hear(2, run)[1]
    assert ["the replicas differ before the exchange" in text for text in heard] == [True] * differs
