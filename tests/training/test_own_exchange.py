"""Compressors that make their own calls: PowerSGD and top-k of the documentation, and errors."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from home_made import SGD, Parameter
from launch import run_threads
from worlds import on_ranks

import horo_lite as hvd
from horo_lite.collectives.group import Group

pytestmark = [pytest.mark.served, pytest.mark.timeout(60)]

SNIPPETS = Path(__file__).resolve().parents[2] / "docs" / "snippets"


def compressor(which: str) -> Any:
    if which.startswith("top"):
        share = 1.0 if which == "top all" else 0.05
        return runpy.run_path(str(SNIPPETS / "top_k.py"))["TopK"](share)
    return runpy.run_path(str(SNIPPETS / "powersgd.py"))["PowerSGD"](int(which))


def law(which: str) -> None:
    runpy.run_path(str(SNIPPETS / "law_of_compressors.py"))["check"](compressor(which))


@pytest.mark.parametrize("which", ["top-k", "4", "1"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_documented_compressors_lose_nothing(which: str, size: int) -> None:
    on_ranks(law, size, which)


class NeverSends(hvd.Compressor):
    def exchange(self, names: Any, gradients: Any, ranks: hvd.Ranks) -> None:
        self.left_over = {name: 0 * g for name, g in zip(names, gradients, strict=True)}


class Forgets(hvd.Compressor):
    def exchange(self, names: Any, gradients: Any, ranks: hvd.Ranks) -> None:
        self.left_over = {name: 0 * g for name, g in zip(names, gradients, strict=True)}
        for g in gradients:
            g[abs(g) < 0.5] = 0
        ranks.average(gradients)


def fails(kind: str) -> bool:
    check = runpy.run_path(str(SNIPPETS / "law_of_compressors.py"))["check"]
    try:
        check({"never sends": NeverSends, "forgets": Forgets}[kind](kind))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("kind", ["never sends", "forgets"])
def test_the_law_finds_compressors_that_lose_something(kind: str) -> None:
    assert on_ranks(fails, 2, kind) == [True, True]


def zeros(shape: tuple[int, ...]) -> Parameter:
    return Parameter(np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def gradient(step: int, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng([step, rank, *shape]).standard_normal(shape).astype(np.float32)


SHAPES = [(12, 6), (5,), (6, 3, 4)]
N_BATCHES = (3, 5)  # of each rank


def train(which: str, weighted: bool) -> list[np.ndarray]:
    rank = hvd.init().rank
    params = [zeros(shape) for shape in SHAPES]
    own = compressor(which) if which else hvd.Compression.none
    opt = hvd.DistributedOptimizer(SGD(params), compression=own, check_every=1)
    for step in range(5 if weighted else N_BATCHES[rank]):
        for p in params:
            p.grad[...] = gradient(step, rank, p.grad.shape)
        opt.step(**({"weight": 1 + 2 * rank} if weighted else {}))
    if not weighted:
        hvd.join()
    return [p.data for p in params]


@pytest.mark.parametrize("weighted", [False, True])
def test_averages_are_those_of_the_step(weighted: bool) -> None:
    """With weights, and with a rank that has no more batches."""
    found = on_ranks(train, 2, "5", weighted)
    exact = on_ranks(train, 2, "", weighted)
    for (a, vector, b), (c, same, d) in zip(found, exact, strict=True):
        np.testing.assert_allclose(vector, same, atol=1e-5)  # it is sent as it is
        for x, y in (a, c), (b, d):
            assert 1e-3 < np.abs(x - y).max() < 3  # what is left over, of about one gradient
    if weighted:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*found, strict=True))


def test_shares_follow_the_weights() -> None:
    """Where each rank scales what it sends: here all elements, so that nothing is left over."""
    exact = on_ranks(train, 2, "", True)
    for found in on_ranks(train, 2, "top all", True):
        for x, y in zip(found, exact[0], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def misuse() -> None:
    hvd.init()
    own = compressor("4")
    with pytest.raises(ValueError, match="is for the gradients of an optimizer's steps"):
        hvd.allreduce(np.ones(3), compression=own)
    with pytest.raises(ValueError, match="needs op=Average, not Sum"):
        hvd.average_gradients([np.ones(3)], op=hvd.Sum, compression=own)
    for other in own, hvd.Compression.auto():
        with pytest.raises(ValueError, match=r"LocalSGD takes .*is for the gradients of an optim"):
            hvd.LocalSGD([np.ones(3)], every=20, compression=other)
    # Its share would be 0 / 0.
    opt = hvd.DistributedOptimizer(SGD([x := zeros((3,))]), compression=compressor("top all"))
    with pytest.raises(ValueError, match="every rank passed weight 0"):
        opt.step(weight=0)
    assert x.data.tolist() == [0, 0, 0]


def test_what_is_left_over_does_not_go_to_another_parameter() -> None:
    """Names are places in a list, so those of later parameters change if one is removed."""

    def train(group: Group) -> list[list[float]]:
        params = [zeros((8,)) for _ in range(2)]
        inner, received = SGD(params), []
        opt = hvd.DistributedOptimizer(inner, compression=compressor("top-k"), group=group)
        params[0].grad[...] = np.arange(10, 18) + group.rank
        opt.step()
        del params[0]
        for value in (0, 1 + group.rank):
            params[0].grad[...] = value * np.arange(8)
            opt.step()
            received.append(params[0].grad.tolist())
        return received

    assert run_threads(2, train) == 2 * [[8 * [0], [*7 * [0], 10.5]]]


def test_after_a_join_nothing_is_left_over() -> None:
    """Ranks have taken different numbers of steps before it."""

    def train(group: Group) -> float:
        (p,) = params = [zeros((8,))]
        opt = hvd.DistributedOptimizer(SGD(params), compression=compressor("top-k"), group=group)
        p.grad[...] = np.arange(10, 18) + group.rank
        opt.step()  # leaves 16.5 as the largest
        group.join()
        p.grad[...] = 0
        opt.step()
        return float(p.grad.max())

    assert run_threads(2, train) == [0.0, 0.0]


def test_a_copy_has_a_compressor_of_its_own() -> None:
    def train(group: Group) -> list[float]:
        original = SGD([zeros((8,))])
        opt = hvd.DistributedOptimizer(original, compression=compressor("top-k"), group=group)
        original.params[0].grad[...] = np.arange(10, 18) + group.rank
        opt.step()  # leaves 16.5 as the largest
        received = []
        for each in copy.deepcopy(opt), opt:
            (p,) = each.params
            p.grad[...] = 0
            each.step()
            received.append(float(p.grad.max()))
        return received

    assert run_threads(2, train) == 2 * [[16.5, 16.5]]


def renewed() -> list[dict[str, Any]]:
    own = compressor("top-k")
    for _ in range(2):
        hvd.init()
        before = dict(own.left_over)
        opt = hvd.DistributedOptimizer(SGD([p := zeros((8,))]), compression=own)
        p.grad[...] = 1 + hvd.rank()
        opt.step()
        hvd.shutdown()
    return [before, own.left_over]


def test_a_new_world_begins_with_nothing_left_over() -> None:
    """In which ranks may be new, after a step that ended on some only: see elastic.run."""
    for before, after in on_ranks(renewed, 2):
        assert before == {}
        assert list(after) == ["params[0]"]


class Raises(hvd.Compressor):
    def exchange(self, names: Any, gradients: Any, ranks: hvd.Ranks) -> None:
        ranks.average(gradients)
        if hvd.rank() == 1:
            raise ArithmeticError("no factors")
        ranks.average(gradients)

    def reset(self) -> None:
        self.is_reset = True


def goes_on() -> list[str]:
    rank = hvd.init().rank
    own = Raises("raises")
    opt = hvd.DistributedOptimizer(SGD([zeros((3,))]), compression=own)
    try:
        opt.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    assert own.is_reset
    if rank == 1:
        with pytest.raises(hvd.MismatchError):
            hvd.barrier()
    return [said]


def test_misuse_is_an_error() -> None:
    on_ranks(misuse, 2)


def test_a_compressor_that_raises_on_one_rank_does_not_hang() -> None:
    (first,), (second,) = on_ranks(goes_on, 2)
    assert second == "ArithmeticError: no factors"
    assert first.startswith("MismatchError")
    assert "by raises, call 2" in first
