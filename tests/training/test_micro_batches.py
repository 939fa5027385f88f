"""MicroBatches: one training, whatever the number of ranks."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits
from worlds import on_ranks

import horo_lite as hvd
from horo_lite.errors import MismatchError
from horo_lite.training.micro_batches import MicroBatch, seed_of

N_SAMPLES, N_INPUTS = 50, 6


class Weight:
    def __init__(self, *shape: int) -> None:
        self.data = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
        self.grad: Any = None


class Momentum:
    def __init__(self) -> None:
        self.params = [Weight(N_INPUTS, 9), Weight(9), Weight(9, 1), Weight(2)]
        self.lr = 0.1
        self.speed = [np.zeros_like(p.data) for p in self.params]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def step(self) -> None:
        for p, speed in zip(self.params, self.speed, strict=True):
            if p.grad is not None:
                speed *= np.float32(0.9)
                speed += p.grad
                p.data -= np.float32(self.lr) * speed


def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((N_SAMPLES, N_INPUTS)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def backward(params: list[Weight], x: Any, y: Any, noise: Any = None) -> None:
    """Add the gradients of a mean squared error of a network with a hidden layer."""
    w, b, v, unused = params
    hidden = np.tanh(x @ w.data + b.data)
    if noise is not None:
        hidden *= noise.random(hidden.shape, dtype=np.float32) < 0.8
    error = 2 * (hidden @ v.data - y) / np.float32(len(x))
    inner = (error @ v.data.T) * (1 - hidden**2)
    for p, gradient in ((w, x.T @ inner), (b, inner.sum(axis=0)), (v, hidden.T @ error)):
        p.grad = gradient if p.grad is None else p.grad + gradient
    assert unused.grad is None


def digest(params: list[Weight]) -> str:
    return hashlib.sha256(b"".join(p.data.tobytes() for p in params)).hexdigest()


def train(n: int, batch_size: int) -> tuple[str, float]:
    """Return a hash of the parameters after training, and a random number."""
    hvd.init(threads=1)
    x, y = data()
    optimizer = Momentum()
    micro_batches = hvd.MicroBatches(n, optimizer, seed=5)
    for step in range(20):
        for batch in micro_batches(step):
            i = batch.samples(x, batch_size)
            backward(optimizer.params, x[i], y[i], batch.rng)
            if step == 3 and batch.number == 1:
                optimizer.params[3].grad = np.ones(2, np.float32)  # in one micro-batch only
        optimizer.step()
    return digest(optimizer.params), random.random() + np.random.random()


WORLDS = [(2, ""), (3, ""), (4, ""), (3, "2,1"), (4, "1,1,2")]


@pytest.mark.mpi
@pytest.mark.served
@pytest.mark.parametrize(("n", "batch_size"), [(4, 8), (8, 27)])
def test_the_bits_do_not_depend_on_the_number_of_ranks(n: int, batch_size: int) -> None:
    (alone,) = on_ranks(train, 1, n, batch_size)
    for size, hosts in WORLDS:
        assert on_ranks(train, size, n, batch_size, hosts=hosts) == [alone] * size
    (other,) = on_ranks(train, 1, 2, batch_size)
    assert other[0] != alone[0]  # the number of micro-batches does matter


def averages() -> list[Any]:
    """Return the differences from the gradients of the whole batch, and of a tree's leaves."""
    hvd.init(threads=1)
    x, y = data()
    optimizer = Momentum()
    differences = []
    for length in (48, 50):  # of 50, some micro-batches have 6 samples and some have 7
        for batch in (micro_batches := hvd.MicroBatches(8, optimizer))(0):
            backward(optimizer.params, x[batch.rows(length)], y[batch.rows(length)])
        mine = [p.grad for p in optimizer.params]
        optimizer.zero_grad()
        backward(optimizer.params, x[:length], y[:length])
        assert mine[3] is None
        differences += [
            np.abs(a - p.grad).max() / np.abs(p.grad).max()
            for a, p in zip(mine[:3], optimizer.params, strict=False)
        ]
    weights = optimizer.params
    bare = type("Bare", (), {"step": lambda self: None})()  # shows no parameters
    for given in (iter(weights), {"net": weights}):
        for batch in hvd.MicroBatches(4, bare, parameters=given)(0):
            for p in weights:
                p.grad = np.full(p.data.shape, np.float32(batch.number))
        assert all((p.grad == 1.5).all() for p in weights)
    for batch in hvd.MicroBatches(4, bare, parameters=weights)(0):  # there is no zero_grad()
        for p in weights:
            p.grad += np.float32(batch.number)
    assert all((p.grad == 1.5).all() for p in weights)
    number = type("Number", (), {"data": 0.0, "grad": None})()
    for batch in hvd.MicroBatches(4, bare, parameters=[number])(0):
        number.grad = 1.0 * batch.number
    assert number.grad == 1.5
    with pytest.raises(RuntimeError, match="its parameters hold the averaged gradients"):
        _ = micro_batches.gradients

    micro_batches = hvd.MicroBatches(4)
    for batch in micro_batches(0):
        i = np.float32(batch.number)
        batch.gradients = {"a": [i, None], "b": np.array([[i, -0.0]])}
    tree = micro_batches.gradients
    assert tree["a"] == [1.5, None]
    assert type(tree["a"][0]) is np.float32
    assert tree["b"].tolist() == [[1.5, 0.0]]
    assert not np.signbit(tree["b"]).any()
    first, second = hvd.MicroBatches(4), hvd.MicroBatches(4)
    for a, b in zip(first(0), second(0), strict=True):
        a.gradients, b.gradients = a.number + np.float64(2**-40), np.float64(b.number**2)
    assert (first.gradients, second.gradients) == (1.5 + 2**-40, 3.5)
    for batch in micro_batches(1):
        batch.weight = [3, 0, 1, 0][batch.number]
        batch.gradients = np.array([1.0, 2.0, 3.0, np.nan][batch.number])
    assert micro_batches.gradients == 1.5
    return differences


@pytest.mark.served
@pytest.mark.parametrize("size", [1, 3])
def test_averages_are_those_of_the_whole_batch(size: int) -> None:
    for differences in on_ranks(averages, size):
        assert max(differences) < 1e-5


def refusals() -> None:
    world = hvd.init(threads=1)
    for n in (0, 3, 12):
        with pytest.raises(ValueError, match="must be a power of two"):
            hvd.MicroBatches(n)
    with pytest.raises(TypeError, match="a second time"):
        hvd.MicroBatches(4, hvd.DistributedOptimizer(Momentum()))
    bare = type("Bare", (), {"step": lambda self: None})()  # shows no parameters
    for given, error in ((None, ValueError), ([], ValueError), ([np.ones(2)], TypeError)):
        with pytest.raises(error, match=r"pass no optimizer, and set batch\.gradients"):
            hvd.MicroBatches(4, bare, parameters=given)
    with pytest.raises(ValueError, match=r"2 micro-batches are too few for 3 .* MicroBatches\(4\)"):
        list(hvd.MicroBatches(2)(0))
    micro_batches = hvd.MicroBatches(4)
    with pytest.raises(RuntimeError, match="there are no averages"):
        _ = micro_batches.gradients
    with pytest.raises(RuntimeError, match=r"<micro-batch \d of 4, step 0> has no gradients"):
        list(micro_batches(0))

    def run(dtype: Any = float) -> None:
        for batch in hvd.MicroBatches(4)(0):
            batch.gradients = np.ones(1 + (world.rank == 1), dtype)

    with pytest.raises(MismatchError, match=r"float64\[1\].*float64\[2\]"):
        run()
    with pytest.raises(TypeError, match=r"'gradients': .* not int64 arrays"):
        run(dtype=np.int64)
    for weight in (-1, np.nan):
        with pytest.raises(ValueError, match="its weight must be 0 or more and finite"):  # noqa: PT012
            for batch in hvd.MicroBatches(4)(0):
                batch.gradients, batch.weight = np.ones(1), weight
    with pytest.raises(ValueError, match=r"of 16, step 0> differ .*64\[\d\], then .*64\[\d\]"):  # noqa: PT012
        for batch in hvd.MicroBatches(16)(0):
            batch.gradients = np.ones(1 + batch.number % 2)
    with pytest.raises(MismatchError, match="step"):
        list(hvd.MicroBatches(4, Momentum())(world.rank))
    with pytest.raises(MismatchError, match="seed="):
        list(hvd.MicroBatches(4, Momentum(), seed=world.rank)(0))
    optimizer = Momentum()
    optimizer.lr += world.rank
    with pytest.raises(MismatchError, match=r"lr of group 0"):  # noqa: PT012
        for _ in hvd.MicroBatches(4, optimizer)(0):
            optimizer.params[0].grad = np.ones(optimizer.params[0].data.shape, np.float32)
    assert optimizer.params[0].grad is None  # not that of one micro-batch
    tanh = np.tanh
    try:
        np.tanh = lambda x: np.nextafter(tanh(x), 2 * world.rank)  # type: ignore[assignment]
        with pytest.raises(MismatchError, match="bits of a test computation on this processor"):
            list(hvd.MicroBatches(4, Momentum())(0))
    finally:
        np.tanh = tanh
    with (
        threadpool_limits(1 + world.rank),
        pytest.raises(MismatchError, match="threads of openblas: 2"),
    ):
        list(hvd.MicroBatches(4, Momentum())(0))

    # A loop that is left is as if it had not begun, such as the second one of this zip().
    first, second = Momentum(), Momentum()
    loops = [hvd.MicroBatches(4, each)(0) for each in (first, second)]
    for batch, _ in zip(*loops, strict=False):
        for p in [*first.params, *second.params]:
            p.grad = np.full(p.data.shape, np.float32(batch.number))
    del loops
    assert all((p.grad == 1.5).all() for p in first.params)
    assert all(p.grad is None for p in second.params)
    micro_batches = hvd.MicroBatches(4)
    for batch in micro_batches(0):
        batch.gradients = np.ones(1)
        break
    with pytest.raises(RuntimeError, match="there are no averages"):
        _ = micro_batches.gradients
    for batch in micro_batches(0):
        batch.gradients = np.full(1, 2.0 * batch.number)
    assert micro_batches.gradients == [3.0]
    with pytest.raises(ValueError, match="the weights of all micro-batches are 0"):  # noqa: PT012
        for batch in micro_batches(1):
            batch.gradients, batch.weight = np.ones(1), 0
    with pytest.raises(RuntimeError, match="there are no averages"):
        _ = micro_batches.gradients


@pytest.mark.served
def test_what_cannot_be_reproduced_is_refused() -> None:
    on_ranks(refusals, 3)


def without_threads() -> None:
    hvd.init()
    with pytest.raises(RuntimeError, match=r"call hvd\.init\(threads=1\)"):
        list(hvd.MicroBatches(4, Momentum())(0))


@pytest.mark.served
def test_the_number_of_threads_must_be_given() -> None:
    on_ranks(without_threads, 2)


def test_samples_are_those_of_an_epoch_in_its_order() -> None:
    def epoch(number: int, n: int, shuffle: bool = True) -> list[int]:
        steps = range(5 * number, 5 * number + 5)
        batches = [MicroBatch(step, i, n, seed=1) for step in steps for i in range(n)]
        return [int(i) for batch in batches for i in batch.samples(53, 10, shuffle=shuffle)]

    assert epoch(0, 4) == epoch(0, 1) == epoch(0, 8)
    assert len(set(epoch(0, 4))) == 50
    assert epoch(0, 4) != epoch(1, 4)
    assert epoch(1, 2, shuffle=False) == list(range(50))
    batch = MicroBatch(0, 1, 4, seed=1)
    assert len(batch.samples(53, 10)) == 3
    assert batch.weight == 3 * 4 / 10
    before = batch.samples(53, 10).tolist()
    batch.samples(53, 10)[...] = 0  # the caller's
    assert batch.samples(53, 10).tolist() == before
    for batch_size in (3, 54):
        with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 4"):
            batch.samples(53, batch_size)
    with pytest.raises(ValueError, match="a batch of 3 samples has none for some of the 4"):
        batch.rows(3)


def test_seeds_differ() -> None:
    seeds = {seed_of(a, b, c) for a in range(3) for b in range(20) for c in range(9)}
    assert len(seeds) == 3 * 20 * 9
    assert max(seeds) < 2**63
    assert MicroBatch(2, 3, 4, seed=1).seed == seed_of(1, 2, 3)
