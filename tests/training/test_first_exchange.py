"""Before the first exchange, the ranks' parameters should be the same, and their gradients not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launch import run_and_hear, run_threads

import horo_lite as hvd
from horo_lite.collectives.group import Group
from horo_lite.training import reducer
from horo_lite.training.gradient_memory import hash_of
from horo_lite.training.options import Options
from horo_lite.training.transform import Transform

OFF = " HORO_LITE_CHECK_EVERY=0 turns this comparison off."


class Parameter:
    def __init__(self, data: np.ndarray) -> None:
        self.data = data
        self.grad: Any = None


class Sgd:
    def __init__(self) -> None:
        self.params = {"w": Parameter(np.zeros((40, 3))), "b": Parameter(np.ones(3, np.float32))}

    def step(self) -> None:
        for parameter in self.params.values():
            if parameter.grad is not None:
                parameter.data -= parameter.grad


def gradients(seed: int) -> list[np.ndarray]:
    """Return what a rank computes from the samples of this number."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((40, 3)), rng.standard_normal(3).astype(np.float32)]


def training(
    samples: Callable[[int], int | list[Any]],
    change: Callable[[int, Sgd], None] = lambda rank, inner: None,
    n_steps: int = 3,
    **options: Any,
) -> Callable[[Group], None]:
    """Return a rank's program; `samples(rank)` is a seed for its gradients, or its gradients."""

    def run(group: Group) -> None:
        inner = Sgd()
        change(group.rank, inner)
        optimizer = hvd.DistributedOptimizer(inner, group=group, **options)
        for step in range(n_steps):
            chosen = samples(group.rank)
            grads = gradients(chosen + 100 * step) if isinstance(chosen, int) else chosen
            for parameter, grad in zip(inner.params.values(), grads, strict=True):
                parameter.grad = None if grad is None else grad.copy()
            optimizer.step()

    return run


def own(rank: int) -> int:
    return rank


def forgotten_broadcast(rank: int, inner: Sgd) -> None:
    if rank == 1:
        inner.params["b"].data[2] += 0.5


def test_nothing_is_said_of_ranks_that_begin_as_they_should() -> None:
    _, warned = run_and_hear(3, training(own))
    assert not warned


def test_parameters_that_differ_are_named_with_their_ranks() -> None:
    _, warned = run_and_hear(3, training(own, forgotten_broadcast))
    (text,) = warned  # of one rank, and once
    assert text.startswith(
        "horo_lite: the replicas differ before the exchange of gradients of optimizer 1, step 1: "
        "1 of 2 arrays, first 'b' (float32[3]). Rank 1 differs from ranks 0 and 2, which agree. "
        "Against rank 0's (largest element 1) it is off: rank 1's in 1 of 3 elements, by up to "
        "0.5. "
    )
    assert "no broadcast_parameters()" in text
    assert text.endswith(OFF)


def test_ranks_with_the_same_samples_are_told_apart_from_others() -> None:
    """As if each of two hosts had given its ranks the same samples, by local_rank()."""
    _, warned = run_and_hear(4, training(lambda rank: rank % 2))
    (text,) = warned
    assert text.startswith(
        "horo_lite: before they are averaged, all gradients are the same, bit for bit, on ranks 0 "
        "and 2, and on ranks 1 and 3 (gradients of optimizer 1, step 1). "
    )
    assert "DistributedSampler" in text
    assert text.endswith(OFF)
    _, warned = run_and_hear(3, training(lambda rank: min(rank, 1)))
    (text,) = warned
    assert "on ranks 1 and 2 (" in text


@pytest.mark.parametrize(
    "grads",
    [
        lambda rank: [np.zeros((40, 3)), None],
        lambda rank: [np.full((40, 3), np.nan), np.zeros(3, np.float32)],
        lambda rank: [np.zeros((40, 3)), np.full(3, [np.nan, 0, np.inf], np.float32)],
        # One that differs is enough, wherever; the other may be that of a penalty.
        lambda rank: [np.eye(40, 3), np.ones(3, np.float32) * rank],
        lambda rank: [np.ones((40, 3)), np.full(3, rank, np.float32)],
    ],
)
def test_gradients_that_say_nothing_of_the_samples(grads: Callable[[int], list[Any]]) -> None:
    """Such as those of a first step with a loss scale that is too large."""
    _, warned = run_and_hear(2, training(grads, n_steps=1))
    assert not warned


def test_an_exchange_of_nothing_is_told() -> None:
    """Such as with an optimizer that computes gradients in its step."""
    _, (text,) = run_and_hear(2, training(lambda rank: [None, None]))
    assert text.startswith("horo_lite: no rank has a gradient in the first exchange of gradients")
    assert run_and_hear(2, training(lambda rank: gradients(1) if rank else [None, None]))[1] == []


def test_numbers_at_the_end_count_as_those_at_the_beginning() -> None:
    """As in the gradient of an embedding, whose first rows no sample has used."""

    def run(group: Group) -> list[int]:
        gradient = np.zeros((100, 50), np.float32)
        nothing = hash_of([gradient], group)
        gradient[-1] = 1
        return [nothing, hash_of([gradient], group), hash_of([gradient.T], group)]

    ((nothing, *hashes),) = run_threads(1, run)
    assert nothing == 0
    assert 0 not in hashes
    assert len(set(hashes)) == 2


@pytest.mark.parametrize("off", ["argument", "variable"])
def test_it_can_be_turned_off(off: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"check_every": 0} if off == "argument" else {}
    if off == "variable":
        monkeypatch.setenv("HORO_LITE_CHECK_EVERY", "0")
    _, warned = run_and_hear(2, training(lambda rank: 0, forgotten_broadcast, **options))
    assert not warned


def test_gradients_without_an_optimizer_are_compared_too() -> None:
    def run(group: Group) -> None:
        for step in range(3):
            w, b = gradients(0 if step == 2 else group.rank)
            hvd.average_gradients({"w": w, "b": b}, group=group)
            hvd.average_gradients({"b": b}, group=group)  # other ones
            hvd.average_gradients({"v": gradients(0)[0]}, name="discriminator", group=group)
            hvd.allreduce(np.ones(3), group=group)  # which may well be the same

    (text,) = run_and_hear(2, run)[1]
    assert "on ranks 0 and 1 (average_gradients 'discriminator')" in text


def test_parameters_are_compared_where_only_gradients_are_given() -> None:
    """From the second call on, since a broadcast may follow the first one."""

    def averaging(n_calls: int, at: int, **options: Any) -> Callable[[Group], None]:
        def run(group: Group) -> None:
            parameters = {"w": np.ones((40, 3)), "none": None, "b": np.ones(3, np.float32)}
            for call in range(n_calls):
                w, b = gradients(group.rank + 10 * call)
                if call == at and group.rank == 2:
                    parameters["w"][1, 1] += 0.5
                tree = {"w": w, "none": None, "b": b}
                hvd.average_gradients(tree, group=group, parameters=parameters, **options)

        return run

    (text,) = run_and_hear(3, averaging(120, at=0))[1]
    assert text.startswith(
        "horo_lite: the replicas differ after step 10: 1 of 2 arrays, first 'w' (float64[40, 3]). "
        "Rank 2 differs from ranks 0 and 1, which agree. "
    )
    assert run_and_hear(3, averaging(10, at=0))[1] == []
    assert run_and_hear(3, averaging(12, at=99))[1] == []


def test_later_steps_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def counted(gradients: Any, group: Group) -> int:
        seen.append(group.rank)
        return hash_of(gradients, group)

    monkeypatch.setattr(reducer, "hash_of", counted)
    run_threads(2, training(own))
    assert sorted(seen) == [0, 1]


def test_shapes_that_differ_are_a_warning_too() -> None:
    """Nobody has asked for the comparison: it must not end what would train."""

    class Halves(Sgd):
        def step(self) -> None:
            pass

    def run(group: Group) -> Any:
        inner = Halves()
        inner.params = {"w": Parameter(np.zeros(3 + group.rank))}
        optimizer = hvd.DistributedOptimizer(inner, group=group)
        inner.params["w"].grad = np.full(3, 2.0 * group.rank)
        optimizer.step()
        return inner.params["w"].grad.tolist()

    results, warned = run_and_hear(2, run)
    assert results == [[1.0] * 3] * 2
    (text,) = warned
    assert "'w' float64[3]" in text
    assert "'w' float64[4]" in text


def test_parameters_that_became_stale_in_join_are_found_afterwards() -> None:
    def run(group: Group) -> None:
        inner = Sgd()
        optimizer = hvd.DistributedOptimizer(inner, group=group)
        for n_steps in (1 + group.rank, 1):
            for step in range(n_steps):
                for parameter, grad in zip(
                    inner.params.values(), gradients(10 * step + group.rank), strict=True
                ):
                    parameter.grad = grad
                optimizer.step()
            group.join()  # and no broadcast from the rank that was the last

    (text,) = run_and_hear(2, run)[1]
    assert (
        "the replicas differ before the exchange of gradients of optimizer 1, step 1: 2 of 2"
        in text
    )


def test_a_rank_that_begins_anew_compares_nothing_with_the_others() -> None:
    """As where one rank traces a function of TensorFlow again, and with it makes a new tape."""

    def run(group: Group) -> list[float]:
        def made() -> Transform:
            return Transform(Options(group=group), title="gradients of a tape")

        transform = made()
        for step in range(3):
            if step == 1 and group.rank == 1:
                transform = made()
            (average,) = transform(["w"], [np.full(2, 1.0 + group.rank * (step == 0))])
        return average.tolist()

    results, warned = run_and_hear(2, run)
    assert results == [[1.0, 1.0]] * 2
    assert not warned


def test_all_count_anew_to_the_next_comparison_if_one_begins_anew() -> None:
    """Otherwise one would compare parameters while the others exchange gradients."""

    def run(group: Group) -> None:
        def made() -> Transform:
            return Transform(Options(group=group), title="gradients of a model")

        def parameters() -> list[tuple[str, Any]]:
            return [("w", np.full(2, float(group.rank)))]

        transform = made()
        for step in range(17):
            if step == 5 and group.rank == 1:
                transform = made()
            (average,) = transform(
                ["w"], [np.full(2, 1.0 * step + group.rank)], compared=parameters
            )
            np.testing.assert_array_equal(average, [step + 0.5] * 2)

    _, (text,) = run_and_hear(2, run)
    assert "'w'" in text, text
    assert "after step 15" in text, text


def test_ranks_that_have_joined_are_not_the_same() -> None:
    def run(group: Group) -> None:
        if group.rank == 0:
            training(own, n_steps=1)(group)
        group.join()

    assert run_and_hear(3, run)[1] == []


def test_a_warning_that_is_an_error_ends_the_step_after_the_exchange() -> None:
    """On rank 0, which reports it; the others are not left waiting."""

    def run(group: Group) -> str:
        try:
            training(lambda rank: 0, n_steps=1)(group)
        except RuntimeWarning as warning:
            return str(warning)
        return ""

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        texts = run_threads(2, run)
    assert "all gradients are the same" in texts[0]
    assert texts[1] == ""
