"""LocalSGD computes what one process computes that has the models of all ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from launch import RanksFailedError, run_and_hear, run_threads
from numpy.typing import NDArray
from worlds import on_ranks

import horo_lite as hvd
from horo_lite import elastic
from horo_lite.collectives.group import Group
from horo_lite.errors import DriftError, MismatchError

SHAPES = [(5, 3), (), (4,)]


def start() -> list[NDArray[np.float64]]:
    rng = np.random.default_rng(0)
    return [np.array(rng.standard_normal(shape)) for shape in SHAPES]


def own_step(weights: list[Any], rank: int, step: int) -> None:
    """Take a step towards this rank's own target, which differs between ranks."""
    for i, w in enumerate(weights):
        w -= 0.1 * (w - np.cos(rank + i + 0.1 * step))


def n_samples(rank: int, step: int) -> float:
    return 1.0 + rank * (step % 5)


def oracle(n: int, steps: int, every: int, lr: float, momentum: float) -> list[NDArray[np.float64]]:
    """Return the weights of n models in one process, averaged with Nesterov's outer momentum."""
    anchor, velocity = start(), [0 * w for w in start()]
    models = [start() for _ in range(n)]
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            own_step(model, rank, step)
        if step % every:
            continue
        since = range(step - every + 1, step + 1)
        counts = [sum(n_samples(rank, step) for step in since) for rank in range(n)]
        for i, old in enumerate(anchor):
            mean = sum(c * m[i] for c, m in zip(counts, models, strict=True)) / sum(counts)
            gradient = old - mean
            velocity[i] = momentum * velocity[i] + gradient
            anchor[i] = np.array(old - lr * (gradient + momentum * velocity[i]))
        models = [[w.copy() for w in anchor] for _ in models]
    return anchor


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("every", "lr", "momentum"), [(1, 1.0, 0.0), (4, 1.0, 0.0), (3, 0.7, 0.9)])
def test_it_is_what_one_process_with_all_models_computes(
    n: int, every: int, lr: float, momentum: float
) -> None:
    def train(group: Group) -> list[NDArray[np.float64]]:
        weights = start()
        local = hvd.LocalSGD(
            weights, every=every, outer_lr=lr, outer_momentum=momentum, group=group
        )
        for step in range(1, 13):
            own_step(weights, group.rank, step)
            assert local.step(weight=n_samples(group.rank, step)) is weights
        return weights

    everyone = run_threads(n, train)
    expected = oracle(n, 12, every, lr, momentum)
    alone = oracle(1, 12, every, lr, momentum)
    for weights in everyone:
        for w, mine, first, single in zip(weights, expected, everyone[0], alone, strict=True):
            np.testing.assert_allclose(w, mine, rtol=1e-12)
            assert w.tobytes() == first.tobytes()
            assert n == 1 or not np.allclose(w, single, rtol=1e-3)  # no communication


def test_what_it_had_done_is_in_its_state() -> None:
    def train(group: Group, stop: int) -> list[NDArray[np.float64]]:
        weights = start()
        options: Any = {"every": 4, "outer_lr": 0.7, "outer_momentum": 0.9, "group": group}
        local = hvd.LocalSGD(weights, **options)
        for step in range(1, 13):
            if step == stop:
                state = copy.deepcopy(local.state_dict())
                weights, other = [w.copy() for w in weights], start()
                local = hvd.LocalSGD(other, **options)
                for x, w in zip(other, weights, strict=True):
                    x[...] = w
                local.load_state_dict(state)
                weights = other
            own_step(weights, group.rank, step)
            local.step(weight=n_samples(group.rank, step))
        for others, options, why in (
            ([np.zeros((5, 3))], {}, "in its anchors, number 1 is 'nothing' here"),
            ([np.zeros(3), *start()[1:]], {}, "in its anchors, number 0 is .* \\[3\\]' here"),
            (start(), {"outer_momentum": 0.0}, "in its momenta, number 0 is 'nothing' here"),
        ):
            other = hvd.LocalSGD(others, every=4, group=group, **options)
            before = copy.deepcopy(other.state_dict())
            with pytest.raises(ValueError, match=why):
                other.load_state_dict(local.state_dict())
            assert str(other.state_dict()) == str(before)
        other = hvd.LocalSGD(start(), every=4, outer_momentum=0.9, group=group)
        incomplete, before = local.state_dict(), copy.deepcopy(other.state_dict())
        del incomplete["weight"]
        with pytest.raises(KeyError, match="weight"):
            other.load_state_dict(incomplete)
        assert str(other.state_dict()) == str(before)
        return weights

    for stop in (5, 7):
        for one, other in zip(
            run_threads(2, lambda group: train(group, 0)),
            run_threads(2, lambda group, stop=stop: train(group, stop)),
            strict=True,
        ):
            assert all(map(np.array_equal, one, other))


def test_fp16_and_what_is_left_over() -> None:
    def train(group: Group) -> dict[str, Any]:
        tree = {"w": np.full(300, 1.0, np.float32), "n": 3, "rate": 0.5, "none": None}
        local = hvd.LocalSGD(tree, every=10, compression=hvd.Compression.fp16, group=group)
        tree["w"] += np.linspace(0, 0.001, 300, dtype=np.float32) * group.rank
        tree["rate"] += group.rank
        tree["n"] += group.rank  # an integer, which is no parameter
        local.step()
        local.average()
        return tree

    for rank, tree in enumerate(run_threads(3, train)):
        mean = np.linspace(1, 1.001, 300, dtype=np.float32)
        np.testing.assert_allclose(tree["w"], mean, rtol=1e-6)
        assert (tree["w"] != mean).any()  # the changes have been rounded
        assert tree["w"].dtype == np.float32
        assert (tree["n"], tree["rate"], tree["none"]) == (3 + rank, 1.5, None)


def test_what_is_left_over_of_an_average_that_fails_is_forgotten(monkeypatch) -> None:
    """It belongs to changes that no rank may have received."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise hvd.PeerLostError("a rank has died")

    weights, forgotten = np.zeros(3, np.float32), []
    hvd.init()
    local = hvd.LocalSGD([weights], every=1, compression=hvd.Compression.int8)
    monkeypatch.setattr(hvd.ops, "grouped_allreduce_", fail)
    monkeypatch.setattr(type(local._compression), "reset", lambda self: forgotten.append(self))
    with pytest.raises(hvd.PeerLostError):
        local.step()
    assert len(forgotten) == 1
    hvd.shutdown()


def test_arrays_that_the_optimizer_replaces_are_told() -> None:
    def train(group: Group, *, passes: bool) -> list[NDArray[np.float64]]:
        weights = [np.zeros(3)]
        local = hvd.LocalSGD(list(weights), every=2, group=group)
        for _ in range(4):
            weights = [weights[0] + 1 + group.rank]
            weights = local.step(weights) if passes else (local.step(), weights)[1]
        return weights

    results, warned = run_and_hear(2, partial(train, passes=True))
    assert (np.array(results) == 6).all()
    assert not warned
    (text,) = run_and_hear(2, partial(train, passes=False))[1]
    assert "no parameter has changed on any rank in local steps up to 2" in text


def test_mistakes_are_errors_on_every_rank() -> None:
    def apart(group: Group) -> None:
        weights = [np.full(3, float(group.rank))]
        hvd.LocalSGD(weights, every=1, group=group).step()

    with pytest.raises(RanksFailedError) as failed:
        run_threads(2, apart)
    assert all(isinstance(error, DriftError) for error in failed.value.errors.values())

    def loaded_on_one_rank(group: Group) -> None:
        weights = [np.zeros(3)]
        local = hvd.LocalSGD(weights, every=1, group=group)
        before = local.state_dict()
        for step in range(2):
            weights[0] += 1
            local.step()
            if step == group.rank == 0:
                local.load_state_dict({**before, "n_steps": 1, "averaged_at": 1})

    with pytest.raises(RanksFailedError) as failed:
        run_threads(2, loaded_on_one_rank)
    assert all(isinstance(error, DriftError) for error in failed.value.errors.values())

    def out_of_step(group: Group) -> None:
        weights = [np.zeros(3)]
        local = hvd.LocalSGD(weights, every=3 + group.rank, group=group)
        for _ in range(12):
            local.step()

    with pytest.raises(RanksFailedError) as failed:
        run_threads(2, out_of_step)
    assert all(isinstance(error, MismatchError) for error in failed.value.errors.values())

    def tied_on_one_rank(group: Group) -> None:
        weights = [np.zeros(3), np.zeros(3)]
        if group.rank:
            weights[1] = weights[0]
        local = hvd.LocalSGD(weights, every=1, group=group)
        weights[0] += 1
        local.step()

    with pytest.raises(RanksFailedError, match=r"\[1\], 0 bytes from \[0\]") as failed:
        run_threads(2, tied_on_one_rank)
    assert all(isinstance(error, MismatchError) for error in failed.value.errors.values())


def test_wrong_arguments() -> None:
    for options in ({"every": 0}, {"every": 2, "outer_lr": 0.0}, {"every": 2, "outer_momentum": 1}):
        with pytest.raises(ValueError, match="must be"):
            hvd.LocalSGD([np.zeros(3)], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no floating-point arrays"):
        hvd.LocalSGD([np.zeros(3, int)], every=1)
    with pytest.raises(ValueError, match="compression must be"):
        hvd.LocalSGD([np.zeros(3)], every=1, compression="fp16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is for the gradients of an optimizer's steps"):
        hvd.LocalSGD([np.zeros(3)], every=1, compression=hvd.Compression.auto())
    local = hvd.LocalSGD({"a": np.zeros(3)}, every=1)
    for weight in (-1, np.nan, np.inf):
        with pytest.raises(ValueError, match="weight must be"):
            local.step(weight=weight)
    with pytest.raises(ValueError, match="number 0 is 'a' here, and 'b' in what was given"):
        local.step({"b": np.zeros(3)})


def test_a_commit_has_it() -> None:
    hvd.init()
    try:
        weights = start()
        local = hvd.LocalSGD(iter(weights), every=2, outer_momentum=0.5)
        state = elastic.State(weights=weights, local=local)
        own_step(weights, 0, 1)
        local.step()
        state.commit()
        kept = [w.copy() for w in weights]
        own_step(weights, 0, 2)
        local.step()
        ended = [w.copy() for w in weights]
        state.restore()
        assert all(map(np.array_equal, weights, kept))
        own_step(weights, 0, 2)
        local.step()
        assert all(map(np.array_equal, weights, ended))
    finally:
        hvd.shutdown()


def merged(root: int, new: int, behind: int, passes: bool = False) -> list[float]:
    """Return the weights after a merge and what follows, with one rank new or behind by one.

    With `passes`, all but the new rank have passed their parameters to step().
    """
    rank = hvd.init().rank
    weights = [np.zeros(2)]
    local = hvd.LocalSGD(weights, every=10)
    local.step()
    local.average()
    if rank == behind:
        local.load_state_dict({**local.state_dict(), "averaged_at": 0})
    weights[0] += [1, 10, 100][rank]
    local.step(weight=1 + rank)
    weights[0] += [1, 10, 100][rank]
    local.step(weights if passes and rank != new else None, weight=1 + rank)
    local.merge_ranks(root, is_new=rank == new)
    found = [float(weights[0][0])]
    elastic.State(weights=weights, local=local).sync(root)
    local.step()  # all continue alike
    local.average()
    local.average()  # there is nothing left
    return [*found, float(weights[0][1])]


@pytest.mark.served
def test_what_ranks_that_remain_have_learned_is_averaged() -> None:
    for root in 0, 2:
        everyone = (2 * 1 + 20 * 2 + 200 * 3) / 6
        assert on_ranks(merged, 3, root, -1, -1) == [[everyone, everyone]] * 3
    two = (2 * 1 + 200 * 3) / 4
    for new, behind in (1, -1), (-1, 1):
        found = on_ranks(merged, 3, 0, new, behind)
        assert found[0] == found[2] == [two, two]
        assert found[1][1] == two  # from the root
    found = on_ranks(merged, 3, 0, 1, -1, True)
    assert [before for before, _ in found] == [2, 20, 200]
    assert [after for _, after in found] == [2, 2, 2]
    # The root lacks the others' last average: its content cannot contain what they have learned.
    assert on_ranks(merged, 3, 1, -1, 1)[1] == [20, 20]
