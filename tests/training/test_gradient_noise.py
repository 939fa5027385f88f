"""The share of noise in averaged gradients tells how many steps more ranks save."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from launch import run_and_hear, run_threads

import horo_lite as hvd
from horo_lite.adapters import Adapter
from horo_lite.collectives.group import Group
from horo_lite.training.gradient_noise import Measurement, noise_share, print_summary
from horo_lite.training.reducer import Reducer

N = 20_000


@pytest.fixture(autouse=True)
def _every_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORO_LITE_NOISE_EVERY", "3")


class Parameter:
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.grad = data, data


class Descent:
    def __init__(self, params: dict[str, Parameter]) -> None:
        self.params = params

    def step(self) -> None:
        pass


def noisy(group: Group, step: int, n_samples: int, scale: float = 1.0) -> np.ndarray:
    """Return a gradient of squared norm N, and noise of variance 6 N over the samples."""
    rng = np.random.default_rng([group.rank, step])
    return scale * (1 + rng.standard_normal(N) * math.sqrt(6 / n_samples))


def train(group: Group, n_samples: int, n_steps: int = 6, **options: Any) -> hvd.GradientNoise:
    params = {name: Parameter(np.ones(N // 2, np.float32)) for name in "ab"}
    optimizer = hvd.DistributedOptimizer(Descent(params), group=group, **options)
    for step in range(n_steps):
        gradient = noisy(group, step, n_samples)
        for x, part in zip(params.values(), np.split(gradient, 2), strict=True):
            x.grad = part.astype(np.float32)
        optimizer.step()
    (noise,) = hvd.gradient_noise(group)
    return noise


def one(group: Group, **options: Any) -> tuple[Reducer, Parameter]:
    parameter = Parameter(np.ones(N, np.float32))
    return Reducer(group, Adapter(), [("p", parameter)], **options), parameter


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"op": hvd.Sum},
        {"compression": hvd.Compression.fp16},
    ],
)
def test_the_share_is_that_of_the_noise(size: int, options: dict[str, Any]) -> None:
    for noise in run_threads(size, lambda group: train(group, 8, **options)):
        variance = 6 / (8 * size)
        assert noise.title == "gradients of optimizer 1"
        assert noise.steps == [3, 6]
        assert noise.share() == pytest.approx(variance / (1 + variance), abs=0.02)


def test_factors_do_not_count() -> None:
    def rank(group: Group) -> float:
        reducer, parameter = one(group, op=hvd.Sum, prescale_factor=0.25, postscale_factor=3.0)
        for step in range(3):
            parameter.grad = noisy(group, step, 2, scale=1e6).astype(np.float32)
            reducer.finish()
        return hvd.gradient_noise(group)[0].share()

    assert run_threads(2, rank) == pytest.approx([1.5 / 2.5] * 2, abs=0.02)


def test_averages_of_zeros_have_no_share_of_noise() -> None:
    def rank(group: Group) -> list[Any]:
        measured = Measurement(group, "gradients", ["w"], 3, [np.zeros(4)])
        measured.finish([np.zeros(4)], op=hvd.Average, weight=None, factor=1.0)
        return hvd.gradient_noise(group)

    assert run_threads(2, rank) == [[], []]


def test_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    def rank(group: Group) -> str:
        noise = train(group, 3)
        print_summary([group])
        return str(noise)

    text = run_threads(2, rank)[0]
    assert capsys.readouterr().err == f"[horo_lite] {text}\n"
    shares = [0.5, 0.5, 0.25, 0.75, 0.75, 0.75, 0.75, 1.0, 1.0]
    assert str(hvd.GradientNoise("gradients of optimizer 1", list(range(9)), shares)) == (
        "gradients of optimizer 1: 75% of their average is noise, by its squared norm (median of 9 "
        "steps; in thirds of the run: 50%, 75%, 100%). So for the same loss, twice as many ranks "
        "may need 1.60 times fewer steps, 4 times as many 2.29, and no number more than 4"
    )


def test_the_summary_says_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(1, lambda group: print_summary([group]))
    assert capsys.readouterr().err == ""  # one rank has nothing to measure
    run_threads(2, lambda group: print_summary([group]))
    text = capsys.readouterr().err
    assert "noise was not measured: HORO_LITE_NOISE_EVERY=3 needs" in text
    assert text.count("\n") == 1


def test_every_rank_has_the_same_number() -> None:
    one, *others = run_threads(3, lambda group: train(group, 4))
    assert all(other == one for other in others)


def test_weights_count_as_samples() -> None:
    samples = [2, 0, 10]

    def rank(group: Group) -> float | None:
        reducer, parameter = one(group)
        n = samples[group.rank]
        for step in range(3):
            parameter.grad = noisy(group, step, n) if n else np.zeros(N)
            reducer.weight = n
            reducer.finish()
        (noise,) = hvd.gradient_noise(group)
        return noise.share()

    for share in run_threads(3, rank):
        assert share == pytest.approx(0.5 / 1.5, abs=0.02)  # the variance is 6 / 12


def test_nothing_leaves_early_in_a_step_that_is_measured() -> None:
    def rank(group: Group) -> list[bool]:
        parameters = [Parameter(np.ones(N, np.float32)) for _ in range(4)]
        named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
        reducer = Reducer(group, Adapter(), named, bucket_bytes=4 * N)
        reducer._overlap.pays = True  # type: ignore[misc]
        early = []
        for step in range(6):
            for i in reversed(range(4)):
                parameters[i].grad = noisy(group, step, 1).astype(np.float32)
                reducer.ready(i)
            early.append(reducer.has_left(3))
            reducer.finish()
        (noise,) = hvd.gradient_noise(group)
        assert noise.steps == [3, 6]
        return early

    assert run_threads(2, rank) == [[False, True, False, True, True, False]] * 2


def test_steps_without_all_ranks_are_not_measured() -> None:
    def rank(group: Group) -> list[int]:
        reducer, parameter = one(group)
        for n_steps in (5 if group.rank == 0 else 9, 3):
            for step in range(n_steps):
                parameter.grad = noisy(group, step, 1).astype(np.float32)
                reducer.finish()
            group.join()
        (noise,) = hvd.gradient_noise(group)
        return noise.steps

    # All have begun to count anew.
    assert run_threads(3, rank) == [[3, 3]] * 3


def test_ranks_that_have_counted_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: Group) -> int:
        reducer, parameter = one(group)
        reducer._n_steps = group.rank  # one has given up a step
        for step in range(6):
            parameter.grad = noisy(group, step, 1).astype(np.float32)
            reducer.finish()
        return sum(len(noise.steps) for noise in hvd.gradient_noise(group))

    assert run_threads(2, rank) == [0, 0]
    monkeypatch.setenv("HORO_LITE_NOISE_EVERY", "1")
    assert run_threads(2, rank) == [6, 6]


def test_averages_of_a_share_are_not_measured() -> None:
    def rank(group: Group) -> int:
        reducer, parameter = one(group)
        reducer.division = [[(0, N // 2), (N // 2, N)]]
        for step in range(3):
            parameter.grad = noisy(group, step, 1).astype(np.float32)
            reducer.finish()
        return len(hvd.gradient_noise(group))

    assert run_threads(2, rank) == [0, 0]


def test_noise_alone_and_none() -> None:
    same = [(4.0, 1.0), (4.0, 1.0)]
    assert noise_share(same, 4.0) == 0
    assert noise_share(same, 2.0) == 1  # at right angles
    assert noise_share(same, 0.0) is None
    assert noise_share([(4.0, 1.0), (9.0, 0.0)], 4.0) is None
    assert noise_share([(math.inf, 1.0), (4.0, 1.0)], 4.0) is None
    assert noise_share([(math.nan, 1.0), (4.0, 1.0)], math.nan) is None


def test_steps_follow_amdahls_law() -> None:
    noise = hvd.GradientNoise("gradients of optimizer 1", [1, 2, 3], [0.5, 0.75, 2.0])
    assert noise.share() == 0.75
    assert noise.fewer_steps(1) == 1
    assert noise.fewer_steps(3) == 2
    assert noise.fewer_steps(math.inf) == 4
    assert noise.share(2 / 3) == 1
    assert noise.fewer_steps(4, begin=2 / 3) == 4
    assert noise.fewer_steps(math.inf, begin=2 / 3) == math.inf
    assert str(hvd.GradientNoise("gradients of optimizer 1", [1], [1.5])).endswith(
        "4 times as many 4.00"
    )


@pytest.mark.parametrize("every", ["0", ""])
def test_without_the_variable_nothing_is_exchanged(
    monkeypatch: pytest.MonkeyPatch, every: str
) -> None:
    monkeypatch.setenv("HORO_LITE_NOISE_EVERY", every)
    with pytest.raises(Exception, match="not enough values"):
        run_threads(2, lambda group: train(group, 8))


class Sign(hvd.Compressor):
    """Sends something else than the gradient."""

    def prepare(self, name: str, gradient: np.ndarray) -> None:
        np.sign(gradient, out=gradient)


def test_what_is_no_average_of_gradients_is_not_measured() -> None:
    none = hvd.Compression.none
    kinds = (hvd.Compression.int8, hvd.Average), (Sign("sign"), hvd.Average), (none, hvd.Max)

    def rank(group: Group) -> int:
        for compression, op in kinds:
            reducer, parameter = one(group, op=op, compression=compression)
            for step in range(3):
                parameter.grad = noisy(group, step, 1).astype(np.float32)
                reducer.finish()
        return len(hvd.gradient_noise(group))

    assert run_and_hear(2, rank)[0] == [0, 0]
