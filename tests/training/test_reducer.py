"""The reducer: any order of readiness, gradients that come and go, plans that differ."""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import RanksFailedError, run_threads
from recording import Recording

from horo_lite.adapters import Adapter
from horo_lite.collectives.compression import Compression
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Sum
from horo_lite.errors import MismatchError
from horo_lite.training.overlap import Overlap
from horo_lite.training.reducer import Reducer


class Parameter:
    def __init__(self, grad: Any = None) -> None:
        self.data = np.zeros(() if grad is None else np.shape(grad))
        self.grad = grad


SHAPES = [(3, 2), (), (5,), (0, 4), (7,), (2, 2, 2), (1,)]


def integers(rank: int, i: int, step: int = 0, shape: tuple[int, ...] | None = None) -> Any:
    """Return values that differ by rank, step and element, with exact sums in float16."""
    shape = SHAPES[i % len(SHAPES)] if shape is None else shape
    n = int(np.prod(shape))
    values = (np.arange(n) * (i + 1) + 4 * rank + step) % 13 * (rank + 1) * 12
    return values.reshape(shape).astype(np.float32)


def average(size: int, i: int, step: int = 0, shape: tuple[int, ...] | None = None) -> Any:
    return sum(integers(rank, i, step, shape) for rank in range(size)) / size


def make(
    group: Any, n: int, *, bucket_bytes: int = 32, **options: Any
) -> tuple[Reducer, list[Parameter]]:
    parameters = [Parameter() for _ in range(n)]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    return Reducer(group, Adapter(), named, bucket_bytes=bucket_bytes, **options), parameters


def fails_alike(
    n: int, fn: Callable[[Group], Any], kind: type[BaseException] = MismatchError
) -> str:
    """Assert that every rank fails with the same message, and return it."""
    with pytest.raises(RanksFailedError) as caught:
        run_threads(n, fn)
    assert sorted(caught.value.errors) == list(range(n))
    assert all(type(error) is kind for error in caught.value.errors.values()), caught.value
    (message,) = {str(error) for error in caught.value.errors.values()}
    return message


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("compression", [Compression.none, Compression.fp16])
def test_all_at_once(size: int, compression: Any) -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 7, compression=compression)
        for step in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step)
            mine = [parameter.grad for parameter in parameters]
            reducer.finish()
            for i, parameter in enumerate(parameters):
                assert parameter.grad is mine[i]
                assert (parameter.grad == average(size, i, step)).all()

    # The averages must be exact, too.
    assert all((average(size, i) * size % size == 0).all() for i in range(7))
    run_threads(size, rank)


@settings(max_examples=25)
@given(
    size=st.integers(1, 3),
    n=st.integers(1, 9),
    bucket_bytes=st.integers(1, 120),
    passes=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_order_of_readiness_gives_the_averages(
    size: int, n: int, bucket_bytes: int, passes: int, seed: int
) -> None:
    def rank(group: Group) -> list[list[tuple[str, list[str]]]]:
        rng = random.Random(seed * 10 + group.rank)
        recording = Recording(group)
        reducer, parameters = make(recording, n, bucket_bytes=bucket_bytes, passes=passes)
        trace = []
        for step in range(3):
            recording.left = []
            order = [i for i in range(n) for _ in range(passes)]
            rng.shuffle(order)
            for parameter in parameters:
                parameter.grad = None
            for i in order:
                if parameters[i].grad is None:
                    parameters[i].grad = np.zeros_like(integers(group.rank, i, step))
                parameters[i].grad += integers(group.rank, i, step)
                reducer.ready(i)
            reducer.finish()
            for i, parameter in enumerate(parameters):
                assert (parameter.grad == passes * average(size, i, step)).all()
            trace.append(recording.left)
        return trace

    traces = run_threads(size, rank)
    assert all(trace == traces[0] for trace in traces)
    # All ranks have the same plan: in reverse order of the parameters.
    for step in traces[0]:
        assert [name for _, names in step for name in names] == [
            f"p{i}" for i in reversed(range(n))
        ]


def test_the_first_bucket_leaves_before_the_last_gradient_is_ready() -> None:
    def rank(group: Group) -> None:
        recording = Recording(group)
        reducer, parameters = make(recording, 6, bucket_bytes=8)
        shape = (2,)
        for step in range(3):
            recording.left = []
            seen = []
            for i in [5, 3, 4, 0, 2, 1] if group.rank else [3, 5, 1, 4, 2, 0]:
                parameters[i].grad = integers(group.rank, i, step, shape)
                reducer.ready(i)
                seen.append([names[0] for _, names in recording.left])
            if step:
                with pytest.raises(RuntimeError, match="must be set before the first ready"):
                    reducer.weight = 1.0
                with pytest.raises(RuntimeError, match=r"changed between ready\(\) and finish"):
                    reducer.bind([])
            reducer.finish()
            # In the first step's finish() the ranks agree on the plan.
            if step == 0:
                assert recording.left == [("at the end", [f"p{i}" for i in (5, 4, 3, 2, 1, 0)])]
                continue
            assert [how for how, _ in recording.left] == ["early"] * 6
            assert [names for _, names in recording.left] == [[f"p{i}"] for i in (5, 4, 3, 2, 1, 0)]
            if group.rank:
                assert seen == [
                    ["p5"],
                    ["p5"],
                    ["p5", "p4", "p3"],
                    ["p5", "p4", "p3"],
                    ["p5", "p4", "p3", "p2"],
                    ["p5", "p4", "p3", "p2", "p1", "p0"],
                ]
            for i in range(6):
                assert (parameters[i].grad == average(2, i, step, shape)).all()
        recording.left = []
        reducer.bind([(f"new{i}", parameter) for i, parameter in enumerate(parameters)])
        for i in range(6):
            reducer.ready(i)
        reducer.finish()
        assert [how for how, _ in recording.left] == ["at the end"]

    run_threads(2, rank)


@pytest.mark.parametrize("cores", [[0, 0], [0, math.inf], [math.inf, 0]])
def test_nothing_leaves_early_on_a_rank_where_that_does_not_pay(cores: Sequence[float]) -> None:
    """A rank on which it seems to pay may send: its buckets wait for this one's."""

    def rank(group: Group) -> None:
        recording = Recording(group)
        overlap = Overlap(cores[group.rank])
        reducer, parameters = make(recording, 6, bucket_bytes=8, overlap=overlap)
        for step in range(3):
            recording.left = []
            for i in range(5, -1, -1):
                parameters[i].grad = integers(group.rank, i, step, (2,))
                reducer.ready(i)
            assert bool(recording.left) == (step > 0 and cores[group.rank] > 0)
            reducer.finish()
            for i in range(6):
                assert (parameters[i].grad == average(2, i, step, (2,))).all()

    run_threads(2, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_gradients_count_as_zeros(streaming: bool) -> None:
    def rank(group: Group) -> None:
        recording = Recording(group)
        reducer, parameters = make(recording, 6, bucket_bytes=16)
        for step in range(5):
            here = {i for i in range(6) if (i + group.rank + step) % 3}
            here -= {2, step}  # no rank has these
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step) if i in here else None
                if streaming and i in here:
                    reducer.ready(i)
            reducer.finish()
            for i, parameter in enumerate(parameters):
                having = [r for r in range(3) if (i + r + step) % 3 and i not in (2, step)]
                if not having:
                    assert parameter.grad is None
                    continue
                expected = sum(integers(r, i, step) for r in having).astype(np.float64) / 3
                assert parameter.grad.dtype == np.float32
                assert (parameter.grad == expected.astype(np.float32)).all()
        recording.left = []
        for parameter in parameters:
            parameter.grad = None
        reducer.finish()
        assert recording.left == []
        assert all(parameter.grad is None for parameter in parameters)

    run_threads(3, rank)


def test_a_bucket_is_not_held_up_by_parameters_nobody_uses() -> None:
    def rank(group: Group) -> None:
        recording = Recording(group)
        reducer, parameters = make(recording, 4, bucket_bytes=1)
        for step in range(2):
            recording.left = []
            for i in (2, 0):  # 3 and 1 are frozen
                parameters[i].grad = integers(group.rank, i, step)
                reducer.ready(i)
            early = len(recording.left)
            reducer.finish()
        assert early == 2
        assert parameters[3].grad is None

    run_threads(2, rank)


def test_a_gradient_absent_on_one_rank_after_others_sent_theirs() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 3, bucket_bytes=1)
        for step in range(3):
            for i in (2, 1, 0):
                parameters[i].grad = None
                if step < 2 or group.rank != 1 or i == 0:
                    parameters[i].grad = integers(group.rank, i, step, (4,))
                    reducer.ready(i)
            reducer.finish()
        for i in (2, 1):
            expected = sum(integers(r, i, 2, (4,)) for r in (0, 2)) / 3
            assert np.allclose(parameters[i].grad, expected, rtol=1e-6)
        assert (parameters[0].grad == average(3, 0, 2, (4,))).all()

    run_threads(3, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_gradients_that_change_on_all_ranks_make_a_new_plan(streaming: bool) -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 5, bucket_bytes=24)
        for step, shape in enumerate([(3,), (3,), (4,), (4,), (2, 3), (3,)]):
            dtype = np.float64 if step == 3 else np.float32
            if step == 4:
                parameters.append(Parameter())
                reducer.bind([(f"p{i}", parameter) for i, parameter in enumerate(parameters)])
            order = list(range(len(parameters)))
            random.Random(group.rank + step).shuffle(order)
            for i in order:
                of_step = shape if i in (1, 4, 5) else (2,)
                parameters[i].grad = integers(group.rank, i, step, of_step).astype(dtype)
                if streaming:
                    reducer.ready(i)
            reducer.finish()
            for i, parameter in enumerate(parameters):
                of_step = shape if i in (1, 4, 5) else (2,)
                assert parameter.grad.dtype == dtype
                assert (parameter.grad == average(2, i, step, of_step)).all()

    run_threads(2, rank)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("where", [0, 2, 4])
@pytest.mark.parametrize("ready", ["0", "all"])
def test_a_change_on_one_rank_is_a_mismatch_on_all_and_the_world_goes_on(
    streaming: bool, where: int, ready: str
) -> None:
    def rank(group: Group) -> str:
        reducer, parameters = make(group, 5, bucket_bytes=8)
        message = ""
        for step in range(5):
            for i in reversed(range(5)):
                shape = (3,) if step == 2 and group.rank == 1 and i == where else (2,)
                parameters[i].grad = integers(group.rank, i, step, shape)
                if streaming and (ready == "all" or group.rank == 0):
                    reducer.ready(i)
            if step == 2:
                with pytest.raises(MismatchError) as caught:
                    reducer.finish()
                message = str(caught.value)
                continue
            reducer.finish()
            for i in range(5):
                assert (parameters[i].grad == average(3, i, step, (2,))).all() or step == 3
        return message

    # Ranks 0 and 2 have average(3, …) in thirds: compare on integers that are divisible by 3.
    messages = run_threads(3, rank)
    assert len(set(messages)) == 1
    assert (
        f"ranks 0 and 2 have 'p{where}' float32[2], rank 1 has 'p{where}' float32[3]" in messages[0]
    )


def test_a_parameter_more_on_one_rank_is_a_mismatch() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2 + group.rank)
        for parameter in parameters:
            parameter.grad = np.ones(2)
        reducer.finish()

    assert "rank 0 has only 2 parameters, rank 1 has 'p2' float64[2]" in fails_alike(2, rank)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([{"op": Sum}, {}], "rank 0 has op=Sum, rank 1 has op=Average"),
        ([{"bucket_bytes": 64}, {}], "rank 0 has bucket_bytes=64, rank 1 has bucket_bytes=32"),
        (
            [{}, {"compression": Compression.fp16}],
            "rank 0 has compression=none, rank 1 has compression=fp16",
        ),
        (
            [{"passes": 2}, {"passes": 3}],
            "rank 0 has backward_passes_per_step=2, rank 1 has backward_passes_per_step=3",
        ),
    ],
)
def test_options_that_differ_are_named(options: Sequence[dict[str, Any]], words: str) -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2, **options[group.rank])
        for parameter in parameters:
            parameter.grad = np.ones(2)
        reducer.finish()

    assert words in fails_alike(2, rank)


def test_a_weight_on_some_ranks_only_is_a_mismatch() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 1)
        parameters[0].grad = np.ones(2)
        if group.rank == 0:
            reducer.weight = 32
        reducer.finish()

    assert "rank 0 has weighted=True, rank 1 has weighted=False" in fails_alike(2, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_weights(streaming: bool) -> None:
    weights = [3.0, 0.0, 5.0]

    def rank(group: Group) -> None:
        reducer, parameters = make(group, 4)
        for step in range(3):
            reducer.weight = weights[group.rank]
            for i, parameter in enumerate(parameters):
                idle = group.rank == 1 and step == 1
                parameter.grad = None if idle else integers(group.rank, i, step)
                if streaming and not idle:
                    reducer.ready(i)
            reducer.finish()
            for i, parameter in enumerate(parameters):
                expected = sum(w * integers(r, i, step) for r, w in enumerate(weights)) / 8
                assert (parameter.grad == expected).all()

    run_threads(3, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_weight_zero_everywhere_is_an_error_on_all_ranks(streaming: bool) -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2)
        for step in range(3):
            reducer.weight = 0 if step == 1 else 1
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step)
                if streaming:
                    reducer.ready(i)
            if step == 1:
                with pytest.raises(ValueError, match="every rank passed weight 0"):
                    reducer.finish()
            else:
                reducer.finish()
                assert (parameters[0].grad == average(2, 0, step)).all()

    run_threads(2, rank)


@pytest.mark.parametrize("asked", [None, "warn"])
def test_only_who_asks_is_told_of_gradients_that_are_not_finite(asked: str | None) -> None:
    """Whether a bucket leaves early, as from step 1 on, or with the rest."""

    def rank(group: Group) -> list[Any]:
        reducer, parameters = make(group, 3, check_finite=asked)
        told = []
        for _ in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = np.full(8, np.nan)[:: i + 1]
                reducer.ready(i)
            found = reducer.finish().findings.values()
            told.append([one.n_tensors if one else 0 for one in found])
        return told

    n_told = 3 if asked else 0
    assert run_threads(2, rank) == [[[n_told] * 2] * 3] * 2


def test_weights_that_make_no_sense() -> None:
    def rank(group: Group) -> None:
        reducer, _ = make(group, 1)
        for weight in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="number of samples"):
                reducer.weight = weight
        reducer, _ = make(group, 1, op=Sum)
        with pytest.raises(ValueError, match="op=Average"):
            reducer.weight = 1

    run_threads(1, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_shared_memory_travels_once(streaming: bool) -> None:
    def rank(group: Group) -> None:
        recording = Recording(group)
        reducer, parameters = make(recording, 4, bucket_bytes=1)
        for step in range(3):
            recording.left = []
            tied = integers(group.rank, 0, step)
            mine = [tied, integers(group.rank, 1, step), tied.view(), integers(group.rank, 3, step)]
            for i in (3, 2, 1, 0):
                parameters[i].grad = mine[i]
                if streaming:
                    reducer.ready(i)
                    # Not before its other owner is ready, too.
                    assert ["p0"] not in [names for _, names in recording.left] or i == 0
            reducer.finish()
            assert sorted(name for _, names in recording.left for name in names) == [
                "p0",
                "p1",
                "p3",
            ]
            for i, like in enumerate([0, 1, 0, 3]):
                assert (parameters[i].grad == average(2, like, step)).all()

    run_threads(2, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_gradients_that_overlap_in_part_are_an_error(streaming: bool) -> None:
    """Wherever they begin, in any buckets; interleaved views do not overlap."""

    def rank(group: Group) -> None:
        reducer, parameters = make(group, 3, bucket_bytes=8)
        for step in range(3):
            whole = np.full(40, group.rank + 1.0)
            views = [whole[:20], whole[20::2], whole[21::2]]
            if step == 2:
                views[2] = whole[10:30:2]
            for i, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
                parameter.grad = view
                if streaming and step < 2:
                    reducer.ready(i)
            if step < 2:
                reducer.finish()
                assert np.all(whole == sum(range(1, group.size + 1)) / group.size)
            else:
                with pytest.raises(ValueError, match=r"'p0' .*'p(1|2)' .* overlap in memory"):
                    reducer.finish()

    run_threads(2, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_gradient_whose_elements_share_memory_gets_some_of_its_own(streaming: bool) -> None:
    """Two that are one expanded number on some ranks, where on others all elements are distinct."""

    def rank(group: Group) -> None:
        reducer, parameters = make(group, 4)  # the first has none
        for step in range(3):
            parameters[3].grad = integers(group.rank, 1, step)
            number = np.full(1, 4.0)
            for parameter in parameters[1:3]:
                parameter.grad = np.arange(4.0)
                if group.rank == 0:
                    parameter.grad = np.lib.stride_tricks.as_strided(number, (4,), (0,))
            for i in (3, 2, 1) if streaming else ():
                reducer.ready(i)
            reducer.finish()
            expected = (4 + (group.size - 1) * np.arange(4.0)) / group.size
            assert all(np.array_equal(parameter.grad, expected) for parameter in parameters[1:3])
            assert (parameters[3].grad == average(group.size, 1, step)).all()

    run_threads(2, rank)


def test_memory_shared_on_one_rank_only_is_a_mismatch() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 3)  # the first has none
        parameters[1].grad = np.ones(2)
        parameters[2].grad = parameters[1].grad if group.rank else np.ones(2)
        reducer.finish()

    assert "rank 1 has 'p2' float64[2] in the memory of 'p1'" in fails_alike(2, rank)


def test_gradients_that_overlap_are_refused() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2)
        parameters[0].grad = np.ones(4)
        parameters[1].grad = parameters[0].grad[:2]
        with pytest.raises(ValueError, match=r"'p0' .*float64.4.* and 'p1' .*float64.2.* overlap"):
            reducer.finish()

    run_threads(1, rank)


def test_read_only_gradients_and_numbers_are_put_back() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 3)
        for step in range(2):
            frozen = integers(group.rank, 0, step)
            frozen.flags.writeable = False
            parameters[0].grad = frozen
            parameters[1].grad = float(integers(group.rank, 1, step))
            parameters[2].grad = np.float64(integers(group.rank, 1, step))
            reducer.finish()
            assert (parameters[0].grad == average(2, 0, step)).all()
            assert parameters[0].grad is not frozen
            assert parameters[1].grad == parameters[2].grad == average(2, 1, step)
            assert type(parameters[1].grad) is float or type(parameters[1].grad) is np.float64

    run_threads(2, rank)


def test_memory_orders_and_strides() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 3)
        full = [integers(group.rank, i, 0, (4, 6)) for i in range(3)]
        parameters[0].grad = np.asfortranarray(full[0])
        parameters[1].grad = np.repeat(full[1], 2, axis=1)[:, ::2]
        parameters[2].grad = full[2].T
        mine = [parameter.grad for parameter in parameters]
        reducer.finish()
        for i, parameter in enumerate(parameters):
            expected = average(2, i, 0, (4, 6))
            assert parameter.grad is mine[i]
            assert (parameter.grad == (expected.T if i == 2 else expected)).all()

    run_threads(2, rank)


@pytest.mark.parametrize("streaming", [False, True])
def test_gradients_that_are_dropped_after_the_step_are_not_kept(streaming: bool) -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 4)
        for step in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step)
                if streaming:
                    reducer.ready(i)
            reducer.finish()
            kept = [weakref.ref(parameter.grad) for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
            until = time.monotonic() + 5  # the engine's thread may hold them for a moment
            while any(reference() is not None for reference in kept):
                assert time.monotonic() < until
                time.sleep(0.001)

    run_threads(2, rank)


def test_sum() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 7, op=Sum)
        for i, parameter in enumerate(parameters):
            parameter.grad = integers(group.rank, i)
        reducer.finish()
        for i, parameter in enumerate(parameters):
            assert (parameter.grad == 3 * average(3, i)).all()

    run_threads(3, rank)


def test_ready_too_often_names_the_parameter() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2, passes=2)
        parameters[1].grad = np.ones(2)
        reducer.ready(1)
        reducer.ready(1)
        with pytest.raises(RuntimeError, match=r"'p1' became ready 3 times .*=2"):
            reducer.ready(1)

    run_threads(1, rank)


def test_an_unreadable_gradient_is_named() -> None:
    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2)
        parameters[0].grad = np.ones(2)
        for wrong in (object(), np.array([object()]), np.array(["text"])):
            parameters[1].grad = wrong
            # Text has memory that can be sent, and is refused when it is to be reduced.
            with pytest.raises((TypeError, ValueError), match=r"(the gradient of|array) 'p1'"):
                reducer.finish()

    run_threads(1, rank)


def test_different_optimizers_at_the_same_time_are_a_mismatch() -> None:
    def rank(group: Group) -> None:
        reducers = [make(group, 1), make(group, 1)]
        for reducer, parameters in reducers:
            parameters[0].grad = np.ones(2)
            reducer.finish()
        reducers[group.rank][0].finish()

    message = fails_alike(2, rank)
    assert "rank 0 has gradients of optimizer 1, rank 1 has gradients of optimizer 2" in message


def test_results_do_not_depend_on_buckets_or_neighbours() -> None:
    def rank(group: Group, n: int, bucket_bytes: int) -> Any:
        reducer, parameters = make(
            group, n, bucket_bytes=bucket_bytes, compression=Compression.fp16
        )
        for _ in range(2):
            for i, parameter in enumerate(parameters):
                rng = np.random.default_rng([group.rank, i])
                parameter.grad = rng.standard_normal(3000).astype(np.float32)
                reducer.ready(i)
            reducer.finish()
        return [parameter.grad for parameter in parameters[:3]]

    results = [
        run_threads(3, lambda group, n=n, size=size: rank(group, n, size))
        for n, size in ((3, 1), (3, 10**6), (5, 7000))
    ]
    first = [gradient.tobytes() for gradient in results[0][0]]
    for ranks in results:
        for gradients in ranks:
            assert [gradient.tobytes() for gradient in gradients] == first
    assert first != [
        np.random.default_rng([0, i]).standard_normal(3000).astype(np.float32).tobytes()
        for i in range(3)
    ]


# Abandoned steps.


def attempt_of(rank: int, i: int, step: int, attempt: int, scale: int = 1) -> Any:
    """Return a rank's gradient i in one attempt of one step: no two are equal."""
    return scale * np.array([1.0, 1000.0]) * (i + 1 + 10 * rank + 100 * attempt + 1000 * step)


@settings(max_examples=60)
@given(data=st.data(), size=st.integers(2, 3), n=st.integers(1, 4), passes=st.integers(1, 2))
def test_a_step_has_the_gradients_of_one_attempt_of_each_rank(
    data: st.DataObject, size: int, n: int, passes: int
) -> None:
    """Wherever attempts fail, on any ranks: correct gradients, or the same error on all.

    A step in which the same number of attempts have failed on every rank is correct, as is every
    step in which none has, whatever came before. The arrays are the same in every attempt.
    """
    n_calls = n * passes
    failures = st.lists(st.integers(0, n_calls), max_size=3)  # after how many calls of ready()
    steps = data.draw(st.lists(st.tuples(*[failures] * size), min_size=1, max_size=4))
    script: list[Sequence[list[int]]] = [[[]] * size]  # the first step sends nothing early
    for step in steps:
        script += [step, [[]] * size]

    def rank(group: Group) -> list[str]:
        reducer, parameters = make(group, n, bucket_bytes=1, passes=passes)
        for parameter in parameters:
            parameter.grad = np.zeros(2)
        order = [i for _ in range(passes) for i in reversed(range(n))]
        outcomes = []
        for step, failing in enumerate(script):
            mine = [*failing[group.rank], n_calls]
            for attempt, n_ready in enumerate(mine):
                for parameter in parameters:
                    parameter.grad[...] = 0
                for i in order[:n_ready]:
                    parameters[i].grad += attempt_of(group.rank, i, step, attempt)
                    reducer.ready(i)
                if attempt < len(mine) - 1:
                    reducer.abandon()
            try:
                reducer.finish()
            except MismatchError as error:
                outcomes.append(str(error))
                continue
            outcomes.append("")
            for i, parameter in enumerate(parameters):
                of_all = [attempt_of(r, i, step, len(failing[r]), passes) for r in range(size)]
                np.testing.assert_allclose(parameter.grad, sum(of_all) / size, rtol=1e-12)
        return outcomes

    outcomes = run_threads(size, rank)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for failing, outcome in zip(script, outcomes[0], strict=True):
        # Only an attempt that has sent something counts.
        n_sent = {sum(k > (passes - 1) * n for k in each) for each in failing}
        assert len(n_sent) > 1 or not outcome
        assert not outcome or ("of the backward pass" in outcome and "zero_grad()" in outcome)


def test_what_was_given_up_waits_for_nobody_and_is_written_to_no_more() -> None:
    abandoned, submitted = threading.Event(), threading.Event()

    def rank(group: Group) -> None:
        reducer, parameters = make(group, 2, bucket_bytes=1)
        for step in range(2):
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step, (2,))
            if step == 1 and group.rank == 0:
                reducer.ready(1)
                reducer.abandon()  # rank 1 does nothing until this has returned
                kept = parameters[1].grad.copy()
                abandoned.set()
                submitted.wait(10)
                assert (parameters[1].grad == kept).all()
            elif step == 1:
                assert abandoned.wait(10)
                for i in (1, 0):
                    reducer.ready(i)
                submitted.set()
            reducer.finish()  # no rank's gradients have changed: training continues
            for i in range(2):
                assert (parameters[i].grad == average(2, i, step, (2,))).all()

    run_threads(2, rank)


def test_gradients_averaged_with_abandoned_ones_are_an_error_on_all_ranks() -> None:
    def rank(group: Group) -> str:
        reducer, parameters = make(group, 2, bucket_bytes=1)
        message = ""
        for step in range(5):
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step, (2,))
            if step == 2:
                reducer.ready(1)
                while not reducer._step.handles[0].done():  # so rank 1's gradient has changed
                    time.sleep(0.001)
                if group.rank == 0:
                    reducer.abandon()
                with pytest.raises(MismatchError) as caught:
                    reducer.finish()
                message = str(caught.value)
                continue
            for i in (1, 0) if step % 2 else ():
                reducer.ready(i)
            reducer.finish()
            for i in range(2):
                assert (parameters[i].grad == average(2, i, step, (2,))).all()
        return message

    messages = run_threads(2, rank)
    assert messages[0] == messages[1]
    assert (
        "of gradients of optimizer 1, rank 0 has try 2 of the backward pass, rank 1 has try 1 of "
        "the backward pass. So rank 1"
    ) in messages[0]
    assert "rank 1 has gradients that were averaged with abandoned ones" in messages[0]
    assert "zero_grad()" in messages[0]


def test_an_error_in_finish_leaves_nothing_in_flight() -> None:
    """After the ranks have agreed, when one has sent a bucket that the other has not."""

    class Full(Adapter):
        is_full = False

        def missing(self, parameter: Any, dtype: str, shape: tuple[int, ...]) -> Any:
            if self.is_full:
                raise MemoryError
            return super().missing(parameter, dtype, shape)

    def rank(group: Group) -> None:
        overlap = Overlap(cores=0 if group.rank else math.inf)
        adapter, parameters = Full(), [Parameter() for _ in range(3)]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
        reducer = Reducer(group, adapter, named, bucket_bytes=1, overlap=overlap)
        for step in range(3):
            adapter.is_full = step == 1
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step, (2,))
            if adapter.is_full:
                parameters[group.rank].grad = None
            reducer.ready(2)
            if adapter.is_full:
                with pytest.raises(MemoryError):
                    reducer.finish()
                continue
            reducer.finish()
            for i, parameter in enumerate(parameters):
                assert (parameter.grad == average(2, i, step, (2,))).all()

    run_threads(2, rank)


def test_a_gradient_that_all_ranks_drop_after_one_has_sent_it_stays_away() -> None:
    def rank(group: Group) -> None:
        overlap = Overlap(cores=0 if group.rank else math.inf)
        reducer, parameters = make(group, 3, bucket_bytes=1, overlap=overlap)
        for step in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = integers(group.rank, i, step, (2,))
            reducer.ready(2)
            if step == 1:
                assert len(reducer._step.handles) == (1 if group.rank == 0 else 0)
                parameters[2].grad = None
            reducer.finish()
            for i, parameter in enumerate(parameters):
                if step == 1 and i == 2:
                    assert parameter.grad is None
                else:
                    assert (parameter.grad == average(2, i, step, (2,))).all()

    run_threads(2, rank)
