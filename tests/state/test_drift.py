"""Replicas that differ are detected, named and repaired; non-finite gradients are named."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from launch import RanksFailedError, run_and_hear, run_ranks, run_threads

import horo_lite as hvd
from horo_lite import _native, ops
from horo_lite._native import Tensors
from horo_lite.state.drift import check_in_sync

FACTOR = 0x9E3779B97F4A7C15
DTYPES = ["bool", *(f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64))]
DTYPES += ["float16", "float32", "float64"]


def fingerprint(x: Any) -> int:
    return _native.fingerprints(Tensors([x], writable=False))[0]


def fingerprint_reference(data: bytes) -> int:
    """Return the same, computed one word at a time."""

    def step(value: int, word: int) -> int:
        product = (value ^ word) * FACTOR
        return (product ^ product >> 64) % 2**64

    words = np.frombuffer(data + bytes(-len(data) % 32), np.uint64).tolist()
    hashes = [(k + 1) * FACTOR % 2**64 for k in range(4)]
    for i, word in enumerate(words):
        hashes[i % 4] = step(hashes[i % 4], word)
    result = len(data)
    for value in hashes:
        result = step(result, value)
    return result


def raises_alike(n: int, fn: Any, kind: type[BaseException]) -> str:
    """Assert that every rank fails with the same message, and return it."""
    with pytest.raises(RanksFailedError) as caught:
        run_threads(n, fn)
    assert sorted(caught.value.errors) == list(range(n)), caught.value
    assert all(type(error) is kind for error in caught.value.errors.values()), caught.value
    messages = {str(error) for error in caught.value.errors.values()}
    assert len(messages) == 1, messages
    (message,) = messages
    return message


# The hash.


@pytest.mark.parametrize("n_bytes", [0, 1, 7, 8, 31, 32, 33, 64, 1000, 4096])
def test_fingerprint_is_what_the_reference_says(n_bytes: int) -> None:
    data = np.random.default_rng(n_bytes).integers(0, 256, n_bytes, np.uint8)
    assert fingerprint(data) == fingerprint_reference(data.tobytes())


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_is_of_the_bytes_whatever_they_are(dtype: str) -> None:
    x = np.random.default_rng(1).integers(0, 2, (5, 3)).astype(dtype)
    assert fingerprint(x) == fingerprint_reference(x.tobytes())
    assert fingerprint(x[0, 0]) == fingerprint_reference(x[0, 0].tobytes())


def test_every_bit_at_every_place_counts() -> None:
    x = np.zeros(20, np.uint64)
    seen = {fingerprint(x)}
    for i in range(x.size):
        for bit in range(64):
            x[i] = 1 << bit
            seen.add(fingerprint(x))
        x[i] = 0
    assert len(seen) == 1 + 20 * 64


def test_paired_changes_and_swaps_show() -> None:
    """Those that a plain XOR or sum misses, and in the highest bits, which products preserve."""
    x = np.random.default_rng(2).standard_normal(64)
    seen = {fingerprint(x)}
    n = 1
    for i in range(x.size):
        for j in range(i):
            for change in ("swap", "signs", "both plus one"):
                y = x.copy()
                if change == "swap":
                    y[[i, j]] = y[[j, i]]
                elif change == "signs":
                    y[[i, j]] *= -1
                else:
                    y.view(np.uint64)[[i, j]] ^= 1
                seen.add(fingerprint(y))
                n += 1
    assert len(seen) == n


def test_signed_zeros_nans_and_lengths_are_bits_like_others() -> None:
    quiet = np.array([0x7FF8000000000000], np.uint64).view(np.float64)
    other = np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    alike = [np.zeros(1), -np.zeros(1), quiet, other, np.zeros(2), np.zeros(3), np.zeros(0)]
    assert len({fingerprint(x) for x in alike}) == len(alike)


def test_the_padding_of_long_doubles_is_not_compared() -> None:
    x = np.array([1, 2.5, -3], np.longdouble)
    y = np.frombuffer(bytearray(b"\xaa" * x.nbytes), np.longdouble)
    y[...] = x
    if np.finfo(np.longdouble).nmant == 63:
        y.view(np.uint8).reshape(3, -1)[:, 10:] = 0x55
    assert (x == y).all()
    assert fingerprint(x) == fingerprint(y)
    y[1] += 1
    assert fingerprint(x) != fingerprint(y)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "longdouble"])
def test_every_element_that_is_not_finite_is_counted(dtype: str) -> None:
    x = np.full(1000, np.finfo(dtype).max, dtype)
    x[::7] *= -1
    x[1::7] = 0
    assert _native.count_non_finite(Tensors([x])) == [(0, 0)]
    x[[3, 999]] = np.nan
    x[[0, 4, 998]] = [np.inf, -np.inf, np.inf]
    assert _native.count_non_finite(Tensors([x[:3], x, x[4:5]])) == [(0, 1), (2, 3), (0, 1)]


def test_only_dense_memory_is_looked_at() -> None:
    for x in (np.zeros((4, 4))[:, :2], np.zeros((4, 3)).T):
        with pytest.raises(ValueError, match="C order"):
            _native.fingerprints(Tensors([x]))
    with pytest.raises(ValueError, match="dense"):
        _native.count_non_finite(Tensors([np.zeros(8)[::2]]))


# check_in_sync.


def params(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "w": random.standard_normal((6, 4)),
        "b": random.standard_normal(4).astype(np.float32),
        "n": np.array(3),
    }


def with_last_bit(x: np.ndarray, index: int = 0) -> None:
    x.reshape(-1).view(np.uint8)[index * x.itemsize] ^= 1


def check(change: Callable[[int, dict[str, Any]], None], **options: Any) -> Callable[..., Any]:
    """Return a rank's function: equal params, a change, check_in_sync; it returns the result."""

    def run(group: Any) -> Any:
        mine = params()
        kept = dict(mine)
        change(group.rank, mine)
        result = check_in_sync(mine, group=group, **options)
        assert all(mine[name] is kept[name] for name in mine) or "on_drift" not in options
        return result, mine

    return run


def test_equal_replicas_are_in_sync_whatever_their_layout() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        if rank == 1:
            mine["w"] = np.asfortranarray(mine["w"])
        if rank == 2:
            mine["w"] = np.repeat(mine["w"], 2, axis=1)[:, ::2]

    results, warned = run_and_hear(3, check(change))
    assert [result for result, _ in results] == [True] * 3
    assert not warned


def test_one_bit_on_one_rank_of_three_is_found_and_named() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        if rank == 2:
            with_last_bit(mine["w"], 5)

    message = raises_alike(3, check(change, step=40), hvd.DriftError)
    assert "differ after step 40: 1 of 3 arrays, first 'w' (float64[6, 4])" in message
    assert "Rank 2 differs from ranks 0 and 1, which agree." in message
    assert re.search(r"rank 2's in 1 of 24 elements, by up to \d\.\d+e-1[5-9]\.", message)
    largest = f"{np.abs(params()['w']).max():.3g}"
    assert f"Against rank 0's (largest element {largest}) it is off" in message
    assert "broadcast_parameters()" in message


def test_two_ranks_have_no_majority() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        mine["b"][1] += rank
        mine["n"] += rank

    message = raises_alike(2, check(change), hvd.DriftError)
    assert "2 of 3 arrays, first 'b' (float32[4])" in message
    assert "There is no majority: rank 0 against rank 1." in message
    assert "rank 1's in 1 of 4 elements, by up to 1." in message


def test_what_is_not_finite_is_named() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        if rank == 1:
            mine["b"][[0, 1, 3]] = [np.nan, np.inf, np.nan]

    message = raises_alike(3, check(change), hvd.DriftError)
    assert "rank 1's in 3 of 4 elements, by up to 0, with 2 NaN and 1 inf." in message


def test_swapped_elements_are_found() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        if rank == 0:
            mine["w"][[0, 1]] = mine["w"][[1, 0]]

    message = raises_alike(3, check(change), hvd.DriftError)
    assert "Rank 0 differs from ranks 1 and 2" in message
    assert "rank 0's in 8 of 24 elements" in message


def test_warn_tells_once_and_goes_on() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        mine["w"][0, 0] = rank == 1

    results, warned = run_and_hear(3, check(change, on_drift="warn"))
    assert [result for result, _ in results] == [False] * 3
    assert len(warned) == 1
    assert "Rank 1 differs from ranks 0 and 2" in warned[0]
    assert results[1][1]["w"][0, 0] == 1


def test_heal_takes_the_values_that_most_have() -> None:
    """The first two ranks each have their own error; no two ranks agree on everything."""

    def change(rank: int, mine: dict[str, Any]) -> None:
        if rank == 0:
            with_last_bit(mine["w"])
        if rank == 1:
            mine["b"][2] = np.nan

    results, warned = run_and_hear(3, check(change, on_drift="heal"))
    for result, mine in results:
        assert result is False
        for name, exact in params().items():
            assert mine[name].tobytes() == exact.tobytes(), name
    assert len(warned) == 1
    assert "Ranks 0 and 1 differ from rank 2." in warned[0]


def test_heal_without_a_majority_takes_the_lowest_rank() -> None:
    def change(rank: int, mine: dict[str, Any]) -> None:
        mine["w"] += rank // 2

    results, warned = run_and_hear(4, check(change, on_drift="heal"))
    assert all((mine["w"] == params()["w"]).all() for _, mine in results)
    assert "There is no majority: ranks 0 and 1 against ranks 2 and 3." in warned[0]
    assert warned[0].endswith("Healed: all ranks have the values of rank 0 now.")


def test_heal_says_at_once_what_it_could_not_write() -> None:
    constant = np.ones(3)
    constant.flags.writeable = False

    def run(group: Any) -> None:
        assert check_in_sync({"a": constant, "lr": 0.1}, group=group)
        with pytest.raises(TypeError, match="'x', a ndarray, cannot be written"):
            check_in_sync({"x": constant}, group=group, on_drift="heal")
        check_in_sync({"lr": 0.1}, group=group, on_drift="heal")

    assert "'lr', a float, cannot be written" in raises_alike(2, run, TypeError)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rank, mine: mine.update(b=np.zeros(4 + rank, np.float32)), "float32[5]"),
        (lambda rank, mine: mine.update(b=np.zeros(4, ["f4", "f8"][rank])), "float64[4]"),
        (lambda rank, mine: mine.pop("b") if rank else None, "'b' float32[4]"),
    ],
)
def test_other_shapes_dtypes_and_names_are_a_mismatch(change: Any, said: str) -> None:
    message = raises_alike(2, check(change), hvd.MismatchError)
    assert "check_in_sync" in message
    assert said in message


def test_ranks_that_want_different_things_are_a_mismatch() -> None:
    """One would raise while the other continues: detected before either does."""

    def run(group: Any) -> None:
        mine = params(seed=group.rank)
        check_in_sync(mine, group=group, on_drift=["warn", "raise"][group.rank])

    assert "on_drift='warn'" in raises_alike(2, run, hvd.MismatchError)

    def another_call(group: Any) -> None:
        if group.rank:
            ops.barrier(group=group)
        else:
            check_in_sync(params(), group=group)

    with pytest.raises(RanksFailedError) as caught:
        run_threads(2, another_call)
    for error in caught.value.errors.values():
        assert type(error) is hvd.MismatchError
        assert "rank 0: check_in_sync; rank 1: barrier" in str(error)


def test_the_world_is_usable_after_drift() -> None:
    def run(group: Any) -> None:
        with pytest.raises(hvd.DriftError):
            check_in_sync(params(seed=group.rank), group=group)
        assert check_in_sync(params(), group=group)
        assert ops.allreduce(group.rank, op=hvd.Sum, group=group) == 3

    run_threads(3, run)


def test_arrays_that_cannot_be_reduced_are_compared_all_the_same() -> None:
    def run(group: Any) -> None:
        x = {"z": np.arange(6, dtype=np.complex128).reshape(2, 3).T, "t": np.array(["a", "bc"])}
        assert check_in_sync(x, group=group)
        x["z"][2, 1] += 1j * group.rank
        check_in_sync(x, group=group)

    message = raises_alike(2, run, hvd.DriftError)
    assert "first 'z' (complex128[3, 2])" in message
    assert "rank 1's in 2 of 96 bytes" in message


def test_objects_are_refused_by_name() -> None:
    def run(group: Any) -> None:
        check_in_sync({"o": np.array([None])}, group=group)

    assert "'o'" in raises_alike(2, run, TypeError)


def test_a_world_of_one_is_in_sync_but_for_its_arguments() -> None:
    ((result, _),) = run_threads(1, check(lambda *_: None))
    assert result is True
    assert "on_drift must be" in raises_alike(
        1, check(lambda *_: None, on_drift="ignore"), ValueError
    )


# DistributedOptimizer.


class Parameter:
    def __init__(self, data: Any) -> None:
        self.data = np.array(data, np.float64)
        self.grad: Any = None


class Sgd:
    def __init__(self) -> None:
        self.params = {"w": Parameter(np.arange(6).reshape(2, 3)), "b": Parameter([1, 2])}
        self.momentum = np.zeros(2)

    def step(self) -> None:
        for parameter in self.params.values():
            parameter.data -= parameter.grad


def backward(optimizer: Any, rank: int) -> None:
    for parameter in optimizer.params.values():
        parameter.grad = np.full(parameter.data.shape, 1.0 + rank)


def train(n_steps: int, at: int, change: Callable[[int, Any], None], **options: Any) -> Any:
    """Return a rank's function: n_steps, with a change before step `at`; it returns the params."""

    def run(group: Any) -> Any:
        optimizer = hvd.DistributedOptimizer(Sgd(), group=group, **options)
        for step in range(1, n_steps + 1):
            backward(optimizer, group.rank)
            if step == at:
                change(group.rank, optimizer)
            if step % 2:
                optimizer.step()
            else:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
        return {name: parameter.data for name, parameter in optimizer.params.items()}

    return run


def flip(rank: int, optimizer: Any) -> None:
    if rank == 1:
        optimizer.params["b"].data[1] += 0.5


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_replica_that_drifts_is_noticed_at_the_next_comparison(at: int) -> None:
    message = raises_alike(3, train(9, at, flip, check_every=3), hvd.DriftError)
    assert "differ after step 3: 1 of 2 arrays, first 'b' (float64[2])" in message
    assert "Rank 1 differs from ranks 0 and 2, which agree." in message


def test_a_healed_replica_trains_on() -> None:
    results, warned = run_and_hear(3, train(4, 2, flip, check_every=2, on_drift="heal"))
    for result in results:
        assert (result["b"] == np.array([1, 2]) - 8).all()
    assert len(warned) == 1


def test_a_drift_is_a_warning_if_nobody_asked_for_comparisons() -> None:
    def heard(n_steps: int, at: int, **options: Any) -> list[str]:
        return run_and_hear(3, train(n_steps, at, flip, **options))[1]

    (text,) = heard(120, 10)  # and none after step 100
    assert text.startswith("horo_lite: the replicas differ after step 10: 1 of 2 arrays, first 'b'")
    assert "Rank 1 differs from ranks 0 and 2, which agree." in text
    assert text.endswith("HORO_LITE_CHECK_EVERY=0 turns this comparison off.")
    assert heard(99, 11) == []
    (text,) = heard(100, 11)
    assert "differ after step 100: " in text
    (text,) = heard(2000, 1001)
    assert "differ after step 2000: " in text
    assert heard(10, 10, check_every=0) == []
    assert heard(10, 10, check_every=20) == []
    assert heard(2000, 2001) == []


def test_unasked_comparisons_are_counted_again_after_join() -> None:
    """All ranks compare together, though they had taken different numbers of steps."""

    def run(group: Any) -> None:
        optimizer = hvd.DistributedOptimizer(Sgd(), group=group)
        for rounds in range(2):
            for step in range(12 + 3 * group.rank):
                backward(optimizer, group.rank)
                if step == 8:
                    flip(group.rank, optimizer)
                optimizer.step()
            last = group.join()
            if rounds == 0:
                hvd.broadcast_parameters(optimizer, last, group=group)

    _, (first, second) = run_and_hear(2, run)
    assert "differ after step 10: " in first
    assert "differ after step 25: " in second  # rank 1 had taken 15


def test_objects_that_show_gradients_only_are_not_compared() -> None:
    class Gradient:
        def __init__(self) -> None:
            self.grad = np.ones(3)

    class Inner:
        def __init__(self) -> None:
            self.params = [Gradient()]

        def step(self) -> None:
            pass

    def run(group: Any) -> None:
        optimizer = hvd.DistributedOptimizer(Inner(), group=group)
        for step in range(12):
            optimizer.params[0].grad = np.full(3, group.rank + step + 1.0)
            optimizer.step()

    assert run_and_hear(2, run)[1] == []


def test_comparisons_raise_nothing_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_threads(2, train(3, 1, flip))
    monkeypatch.setenv("HORO_LITE_CHECK_EVERY", "2")
    assert "after step 2" in raises_alike(2, train(3, 1, flip), hvd.DriftError)
    run_threads(2, train(3, 1, flip, check_every=0))
    run_threads(1, train(3, 1, lambda rank, optimizer: flip(1, optimizer)))
    monkeypatch.setenv("HORO_LITE_CHECK_EVERY", "often")
    assert "HORO_LITE_CHECK_EVERY=often" in raises_alike(1, train(1, 0, flip), ValueError)


def test_each_of_several_optimizers_has_its_own_turn() -> None:
    def run(group: Any) -> None:
        first = hvd.DistributedOptimizer(Sgd(), group=group, check_every=2)
        second = hvd.DistributedOptimizer(Sgd(), group=group, check_every=3)
        for step in range(1, 7):
            for optimizer in (first, second):
                backward(optimizer, group.rank)
                if step == 5 and optimizer is second:
                    flip(group.rank, optimizer)
                optimizer.step()

    assert "differ after step 6: " in raises_alike(2, run, hvd.DriftError)


def test_nothing_is_compared_while_a_rank_waits_in_join() -> None:
    def run(group: Any) -> None:
        optimizer = hvd.DistributedOptimizer(Sgd(), group=group, check_every=2)
        for _ in range(3 + 2 * (group.rank > 0)):  # rank 0 stops after step 4
            backward(optimizer, group.rank)
            optimizer.step()
        if group.rank > 0:
            with pytest.raises(hvd.MismatchError, match="check_in_sync needs every rank"):
                check_in_sync(optimizer, group=group)
        last = group.join()
        hvd.broadcast_parameters(optimizer, last, group=group)
        for _ in range(2):  # counted the same again
            backward(optimizer, group.rank)
            flip(group.rank, optimizer)
            optimizer.step()

    assert "Rank 1 differs from" in raises_alike(3, run, hvd.DriftError)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("check_every", (1, 2)),
        ("on_drift", ("raise", "warn")),
        ("check_finite", (None, "raise")),
    ],
)
def test_ranks_with_other_options_are_a_mismatch(option: str, values: tuple[Any, Any]) -> None:
    def run(group: Any) -> None:
        train(2, 0, flip, **{option: values[group.rank]})(group)

    assert f"{option}={values[0]}" in raises_alike(2, run, hvd.MismatchError)


@pytest.mark.parametrize("option", [{"check_every": -1}, {"on_drift": 1}, {"check_finite": True}])
def test_wrong_options_are_refused(option: dict[str, Any]) -> None:
    assert next(iter(option)) in raises_alike(1, train(1, 0, flip, **option), ValueError)


def test_the_state_of_an_optimizer_is_compared_where_asked_for() -> None:
    def run(group: Any) -> Any:
        optimizer = hvd.DistributedOptimizer(Sgd(), group=group)
        optimizer.momentum[1] = group.rank == 1
        assert check_in_sync(optimizer, group=group)
        with pytest.raises(hvd.DriftError, match=r"first 'momentum' \(float64\[2\]\)"):
            check_in_sync(optimizer, group=group, state=True)
        check_in_sync(optimizer, group=group, state=True, on_drift="heal")
        return optimizer.momentum.tolist()

    results, warned = run_and_hear(3, run)
    assert results == [[0, 0]] * 3
    assert len(warned) == 1


# Gradients that are not finite.


def spoil(rank: int, optimizer: Any) -> None:
    if rank > 0:
        optimizer.params["w"].grad[0, :rank] = np.nan
        optimizer.params["w"].grad[1, 0] = -np.inf
    if rank == 2:
        optimizer.params["b"].grad[:] = np.inf


def test_the_first_rank_and_tensor_that_are_not_finite_are_named() -> None:
    message = raises_alike(3, train(3, 2, spoil, check_finite="raise"), hvd.NonFiniteError)
    assert "the gradient of 'w' has 1 NaN and 1 inf on rank 1, before averaging (" in message
    assert "Other ranks with such gradients: 2." in message

    def last(rank: int, optimizer: Any) -> None:
        spoil(2, optimizer)

    message = raises_alike(3, train(3, 2, last, check_finite="raise"), hvd.NonFiniteError)
    assert "'b' has 2 inf on rank 0, before averaging, one of 2 such tensors there" in message


def test_a_step_that_was_refused_has_changed_nothing_and_the_next_one_works() -> None:
    def run(group: Any) -> Any:
        optimizer = hvd.DistributedOptimizer(Sgd(), group=group, check_finite="raise")
        backward(optimizer, group.rank)
        spoil(group.rank, optimizer)
        with pytest.raises(hvd.NonFiniteError):
            optimizer.step()
        assert (optimizer.params["b"].data == [1, 2]).all()
        backward(optimizer, group.rank)
        optimizer.step()
        return optimizer.params["b"].data.tolist()

    assert run_threads(3, run) == [[-1, 0]] * 3


def test_warn_says_it_and_steps() -> None:
    def run(group: Any) -> Any:
        return train(3, 2, spoil, check_finite="warn")(group)["w"]

    results, warned = run_and_hear(3, run)
    for w in results:
        assert np.isfinite(w).tolist() == [[False, False, True], [False, True, True]]
    assert len(warned) == 1
    assert "'w' has 1 NaN and 1 inf on rank 1" in warned[0]


def test_finite_gradients_and_strided_ones_pass() -> None:
    def change(rank: int, optimizer: Any) -> None:
        whole = np.full((2, 6), np.nan)
        whole[:, ::2] = 1
        optimizer.params["w"].grad = whole[:, ::2] * (1 + 2 * rank)

    for result in run_threads(2, train(3, 2, change, check_finite="raise")):
        # Two steps by the mean of 1 and 2, and one by that of the strided 1 and 3.
        assert (result["w"] == np.arange(6).reshape(2, 3) - 5).all()
        assert (result["b"] == np.array([1, 2]) - 4.5).all()


# PyTorch.


def model(torch: Any, rank: int = 0) -> Any:
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    net.register_parameter("narrow", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
    with torch.no_grad():  # threads share torch's generator
        for i, parameter in enumerate(net.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
            parameter.copy_(torch.sin(values + i))
    if rank == 1:
        net.to(memory_format=torch.channels_last)
    return net


def test_torch_modules_with_and_without_buffers() -> None:
    torch = pytest.importorskip("torch")

    def run(group: Any) -> None:
        net = model(torch, group.rank)
        net(torch.full((2, 3, 4, 4), float(group.rank)))  # BatchNorm's means differ by rank
        assert check_in_sync(net, group=group)
        assert check_in_sync(net.parameters(), group=group)  # which can be read once
        with pytest.raises(ValueError, match="a dict has no buffers"):
            check_in_sync(dict(net.state_dict()), group=group, buffers=True)
        with pytest.raises(hvd.DriftError, match=r"1\.running_mean"):
            check_in_sync(net, group=group, buffers=True)
        check_in_sync(net, group=group, buffers=True, on_drift="heal")
        assert check_in_sync(net, group=group, buffers=True)
        if group.rank == 1:
            with torch.no_grad():
                net.narrow[2] += 1
        check_in_sync(net, group=group)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        message = raises_alike(3, run, hvd.DriftError)
    assert "first 'narrow' (bfloat16[5])" in message
    assert "Rank 1 differs" in message
    assert "rank 1's in 1 of 5 elements, by up to " in message


def test_a_public_fingerprint_is_of_names_dtypes_shapes_and_bits() -> None:
    torch = pytest.importorskip("torch")
    x, y = np.arange(6.0), torch.arange(6).reshape(2, 3).to(torch.float8_e4m3fn)
    others = [{"b": x}, {"a": x + 1}, {"a": x.reshape(2, 3)}, {"a": x.astype("f4")}]
    kinds = [{"a": x}, *others, [y], [y.t()], [y.float().add(1).to(y.dtype)]]
    assert len({hvd.fingerprint(each) for each in kinds}) == len(kinds)
    assert hvd.fingerprint({"a": x}) == hvd.fingerprint({"a": np.arange(12.0)[:6]})
    assert hvd.fingerprint([y.t()]) == hvd.fingerprint([y.t().contiguous()])


def test_torch_dtypes_that_numpy_lacks() -> None:
    torch = pytest.importorskip("torch")

    def run(group: Any) -> None:
        x = torch.ones(6).to(torch.float8_e4m3fn)
        assert check_in_sync([x], group=group)
        check_in_sync([torch.full((6,), 1.0 + group.rank).to(x.dtype)], group=group)

    assert "(float8_e4m3fn[6])" in raises_alike(2, run, hvd.DriftError)


def test_sparse_tensors_of_torch_are_the_same_in_any_order() -> None:
    torch = pytest.importorskip("torch")

    def run(group: Any) -> None:
        def sparse(*values: float) -> Any:
            order = slice(None) if group.rank else [1, 0]
            rows, x = torch.tensor([[1, 4]])[:, order], torch.tensor(values)[order]
            return torch.sparse_coo_tensor(rows, x, (6,), check_invariants=True)

        assert check_in_sync([sparse(2.0, 3.0)], group=group)
        check_in_sync([sparse(2.0, 3.0 + group.rank)], group=group)

    assert "(float32[6])" in raises_alike(2, run, hvd.DriftError)


def torch_training(torch: Any, group: Any, kind: str, **options: Any) -> Any:
    """Return a model, its optimizer and a function for the next step."""
    from horo_lite.torch import DistributedOptimizer

    net = model(torch).float()
    made = {
        "adam": lambda: torch.optim.Adam(net.parameters(), lr=0.01),
        "lbfgs": lambda: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2),
    }[kind]()
    optimizer = DistributedOptimizer(made, net.named_parameters(), process_set=group, **options)

    def step(x: float) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(torch.full((2, 3, 4, 4), x * (1 + group.rank))).sum() + net.narrow.sum()
            loss.backward()
            return loss

        if kind == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    return net, optimizer, step


@pytest.mark.parametrize("kind", ["adam", "lbfgs"])
def test_torch_optimizers_compare_every_so_many_steps(kind: str) -> None:
    torch = pytest.importorskip("torch")

    def run(group: Any) -> None:
        net, _, step = torch_training(torch, group, kind, check_every=2)
        for number in range(1, 5):
            step(0.5)
            if number == 3 and group.rank == 0:
                with torch.no_grad():
                    net[3].weight[0, 0] += 1e-3

    message = raises_alike(3, run, hvd.DriftError)
    assert "after step 4: " in message
    assert "first '" in message
    assert "Rank 0 differs from ranks 1 and 2, which agree." in message


def test_torch_state_is_named_after_its_parameter() -> None:
    torch = pytest.importorskip("torch")

    def run(group: Any) -> Any:
        net, optimizer, step = torch_training(torch, group, "adam")
        step(0.5)
        assert hvd.torch.check_in_sync(optimizer, state=True, process_set=group)
        if group.rank == 1:
            optimizer.state[net[3].bias]["exp_avg"][1] = 7
        if group.rank == 2:
            optimizer.param_groups[0]["lr"] = 0.5
        assert check_in_sync(optimizer, group=group)
        with pytest.raises(
            hvd.DriftError, match=r"2 of \d+ arrays, first .param_groups\[0\]\['lr'\]"
        ):
            check_in_sync(optimizer, group=group, state=True)
        check_in_sync(optimizer, group=group, state=True, on_drift="heal")
        assert check_in_sync(optimizer, group=group, state=True)
        return optimizer.param_groups[0]["lr"], float(optimizer.state[net[3].bias]["exp_avg"][1])

    import horo_lite.torch  # noqa: F401 (hvd.torch)

    results, warned = run_and_hear(3, run)
    assert len(set(results)) == 1
    assert results[0][0] == 0.01
    assert results[0][1] != 7
    assert "Ranks 1 and 2 differ from rank 0." in warned[0]


@pytest.mark.parametrize("shared", [False, True])
def test_torch_gradients_that_leave_early_are_looked_at_before_they_do(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("HORO_LITE_BUCKET_BYTES", "64")

    def run(group: Any) -> Any:
        net, _, step = torch_training(
            torch, group, "adam", check_finite="raise", gradient_as_bucket_view=shared
        )
        for _ in range(3):
            step(0.5)
        before = [parameter.detach().clone() for parameter in net.parameters()]
        with pytest.raises(hvd.NonFiniteError) as caught:
            step(float("nan") if group.rank == 1 else 0.5)
        for parameter, old in zip(net.parameters(), before, strict=True):
            assert torch.equal(parameter, old)
        step(0.5)
        assert all(parameter.isfinite().all() for parameter in net.parameters())
        assert check_in_sync(net, group=group)
        return str(caught.value)

    (message, *others) = run_threads(2, run)
    assert others == [message]
    # The bias's gradient, 2, is finite: the weight's is the first that NaN samples affect.
    assert message.startswith("the gradient of '3.weight' has 32 NaN on rank 1, before averaging")
    assert "optimizer 1, step 4)" in message


def test_sparse_gradients_of_torch_are_looked_at() -> None:
    torch = pytest.importorskip("torch")
    import horo_lite.torch as hvd_torch

    def run(group: Any) -> None:
        table = torch.nn.Embedding(4, 2, sparse=True)
        inner = torch.optim.SparseAdam(table.parameters())
        optimizer = hvd_torch.DistributedOptimizer(
            inner, table.named_parameters(), process_set=group, check_finite="raise"
        )
        loss = table(torch.tensor([0, 3])).sum()
        (loss * (float("inf") if group.rank == 2 else 1)).backward()
        optimizer.step()

    message = raises_alike(3, run, hvd.NonFiniteError)
    assert message.startswith("the gradient of 'weight' has 4 inf on rank 2, before averaging")


@pytest.mark.mpi
def test_between_hosts() -> None:
    """Hashes, votes, differences and repair over MPI; then an uncaught error."""
    result = run_ranks(
        """
        import warnings

        import numpy as np

        import horo_lite as hvd

        world = hvd.init()
        x = {"a": np.arange(300_000, dtype=np.float32), "t": np.ones((3, 4)).T}
        assert hvd.check_in_sync(x)
        x["a"][[7, 9]] += world.rank == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert not hvd.check_in_sync(x, on_drift="heal")
        assert hvd.check_in_sync(x) and x["a"][9] == 9
        print("healed", flush=True)
        x["t"][3, 1] = world.rank != 1
        hvd.check_in_sync(x, step=5)
        """,
        3,
        env={"HORO_LITE_TEST_HOSTS": "2,1"},
    )
    assert result.stdout.count("healed") == 3, str(result)
    assert result.returncode != 0, str(result)
    assert "the replicas differ after step 5: 1 of 2 arrays, first 't'" in result.stderr
    assert "Rank 1 differs from ranks 0 and 2, which agree." in result.stderr
