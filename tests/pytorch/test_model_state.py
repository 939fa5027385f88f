"""State of torch's models and optimizers with other dtypes than the parameters', and objects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from launch import run_threads

from horo_lite.collectives.group import Group
from horo_lite.elastic import State
from horo_lite.state.broadcast import broadcast_optimizer_state, broadcast_parameters
from horo_lite.state.drift import check_in_sync

torch = pytest.importorskip("torch")

import horo_lite.torch as hvd  # noqa: E402


class Wide(torch.optim.Optimizer):
    """Keeps float32 state of bfloat16 parameters, as Adafactor of Hugging Face's transformers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        pass


def wide(rank: int) -> tuple[Wide, Any]:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = Wide([parameter])
    exact = torch.arange(3, dtype=torch.float32) + rank + 2.0**-20  # not exact in bfloat16
    optimizer.state[parameter].update(m=exact, past=[exact + 1], n=rank, counts=torch.tensor([300]))
    return optimizer, optimizer.state[parameter]


def check_is_that_of(rank: int, state: Any) -> None:
    expected = wide(rank)[1]
    for got, wanted in (
        (state["m"], expected["m"]),
        (state["past"][0], expected["past"][0]),
        (state["counts"], expected["counts"]),
    ):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    assert state["n"] == rank


def test_optimizer_state_keeps_its_dtype() -> None:
    def rank(group: Group) -> None:
        optimizer, _ = wide(group.rank)
        if group.rank == 0:
            optimizer.state.clear()
        broadcast_optimizer_state(optimizer, 2, group=group)
        check_is_that_of(2, next(iter(optimizer.state.values())))

    run_threads(3, rank)


def test_elastic_state_keeps_the_dtype_of_an_optimizers() -> None:
    optimizer, state = wide(1)
    kept = State(optimizer=optimizer)
    state["m"] += 1
    kept.restore()
    check_is_that_of(1, next(iter(optimizer.state.values())))
    other, _ = wide(0)
    State(optimizer=other).load(kept.snapshot())
    check_is_that_of(1, next(iter(other.state.values())))


class Counting(torch.nn.Module):
    """Its extra state is a new dict whenever it is asked for."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.n, self.mode = rank, f"of rank {rank}"

    def get_extra_state(self) -> Any:
        return {"n": self.n, "mode": self.mode}

    def set_extra_state(self, state: Any) -> None:
        self.n, self.mode = state["n"], state["mode"]


def test_extra_state_of_modules_is_sent_whole() -> None:
    def rank(group: Group) -> None:
        inner = Counting(group.rank)
        broadcast_parameters({"net": torch.nn.Sequential(inner)}, 1, group=group)
        assert (inner.n, inner.mode) == (1, "of rank 1")
        whole = Counting(group.rank)
        with pytest.raises(TypeError, match=r"'0\._extra_state' is extra state of a module"):
            broadcast_parameters(torch.nn.Sequential(whole).state_dict(), 1, group=group)
        broadcast_parameters(torch.nn.Linear(2, 2).state_dict(), 1, group=group)
        assert whole.n == group.rank

    run_threads(2, rank)


def test_modules_in_a_tree_are_compared_without_buffers() -> None:
    def rank(group: Group) -> None:
        norm = torch.nn.BatchNorm1d(2)
        with torch.no_grad():
            norm.running_mean += group.rank
        nets = {"norm": norm, "counting": [Counting(group.rank)]}
        broadcast_parameters(nets["counting"], group=group)
        assert check_in_sync(nets, group=group)
        with pytest.raises(Exception, match=r"first 'norm\.running_mean'"):
            check_in_sync(nets, buffers=True, group=group)

    run_threads(2, rank)


def test_complex_parameters_and_buffers_of_any_dtype() -> None:
    def rank(group: Group) -> None:
        net = torch.nn.Linear(2, 2, dtype=torch.complex128)
        net.register_buffer("rotary", torch.full((3,), group.rank + 1j))
        net.register_buffer("scale", torch.full((3,), 1.0 * group.rank).to(torch.float8_e4m3fn))
        net.register_buffer(
            "strided", torch.full((6,), 1.0 * group.rank).to(torch.float8_e5m2)[::2]
        )
        image = torch.arange(6.0).reshape(2, 3).to(torch.float8_e5m2)
        image = image.t().contiguous().t() if group.rank else torch.zeros_like(image)
        net.register_buffer("image", image)  # in another memory order on each rank
        broadcast_parameters(net, 1, group=group)
        assert net.image.float().tolist() == [[0, 1, 2], [3, 4, 5]]
        assert torch.equal(net.rotary, torch.full((3,), 1 + 1j))
        assert net.scale.float().tolist() == net.strided.float().tolist() == [1.0] * 3
        alone = copy.deepcopy(net)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.5), process_set=group
        )
        other = torch.optim.SGD(alone.parameters(), lr=0.5)
        x = torch.arange(8.0, dtype=torch.float64).reshape(4, 2) * (1 + 0.5j)
        for model, stepper, batch in (net, optimizer, x[group.rank :: 2]), (alone, other, x):
            stepper.zero_grad()
            loss = model(batch).abs().square().mean() + model.bias.conj().imag.sum()
            loss.backward()
            stepper.step()
        for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
        conjugate = (torch.ones(2) * 1j * group.rank).conj()
        assert hvd.allgather(conjugate, process_set=group).tolist() == [0, 0, -1j, -1j]
        with pytest.raises(ValueError, match=r"resolve_conj\(\)"):
            hvd.allreduce_(conjugate, process_set=group)

    run_threads(2, rank)
