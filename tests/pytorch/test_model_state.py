"""State of torch's models and optimizers with other dtypes than the parameters', and objects."""

from __future__ import annotations

from typing import Any

import pytest
from launch import run_threads

from horo_lite.collectives.group import Group
from horo_lite.elastic import State
from horo_lite.state.broadcast import broadcast_optimizer_state

torch = pytest.importorskip("torch")


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
