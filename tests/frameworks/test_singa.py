"""Training as in SINGA, with a stand-in for SINGA: see stand_ins/singa/__init__.py.

The same tests run on SINGA itself, by hand: see singa_mended.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import Contract
from launch import SUPPORT, TESTS, run_ranks, run_threads

REAL = os.environ.get("HORO_LITE_TEST_SINGA", "")  # see singa_mended.py
STAND_IN = Path(__file__).with_name("stand_ins")
SINGA = [*filter(None, [REAL]), str(STAND_IN)]
sys.path[:0] = SINGA

import small_net  # noqa: E402
from singa import autograd, device, opt, singa_wrap, tensor  # noqa: E402
from small_net import N_STEPS, alone, close, mean_loss, network, samples, values  # noqa: E402

import horo_lite  # noqa: E402
import horo_lite.singa as hvd  # noqa: E402
from horo_lite import ops  # noqa: E402
from horo_lite.adapters import adapter_of  # noqa: E402
from horo_lite.adapters.singa import array_of, write  # noqa: E402
from horo_lite.collectives.group import Group  # noqa: E402
from horo_lite.errors import MismatchError  # noqa: E402

EXAMPLE = TESTS.parent / "examples" / "digits_singa.py"
PYTHONPATH = os.pathsep.join([*SINGA, str(SUPPORT), os.environ.get("PYTHONPATH", "")])


needs_stand_in = pytest.mark.skipif(
    bool(REAL), reason="SINGA 3.0.0.dev1, mended, has no GPUs, and no float16 in Python"
)


def sgd(weight_decay: float = 0) -> opt.SGD:
    return opt.SGD(lr=0.3, momentum=0.9, weight_decay=weight_decay)


def new(array: Any, name: str | None = None) -> tensor.Tensor:
    t = tensor.from_numpy(np.asarray(array, np.float32))
    t.name = name or t.name
    t.stores_grad = True
    return t


_backward = autograd.backward


def backward(loss: Any) -> Iterator[tuple[tensor.Tensor, tensor.Tensor]]:
    """Take lists of (parameter, gradient as numbers) as losses, too."""
    if isinstance(loss, tensor.Tensor):
        yield from _backward(loss)
    else:
        for p, g in loss:
            yield p, new(g)


autograd.backward = backward


# DistributedOptimizer.


@pytest.mark.shows("eager", "fp16")
class TestSinga(Contract):
    threads = True
    face = hvd
    optimizers = ("momentum",)
    has_class = False
    test_a_second_wrapper_does_not_change_the_first = None  # it takes no op=

    def network(self, seed: int) -> Any:
        rng = np.random.default_rng(seed)
        shapes = {"w0": (36, 6), "b0": (6,), "w1": (6, 5), "w2": (5, 5)}
        return {name: new(rng.standard_normal(s) / 4, name) for name, s in shapes.items()}

    def parameters(self, values: Any) -> Any:
        return {name: new(x, name) for name, x in values.items()}

    def arrays(self, net: Any) -> Any:
        return net

    def optimizer(self, kind: str, net: Any) -> Any:
        return opt.SGD(lr=1.0) if kind == "sgd" else sgd()

    def wrap(self, net: Any, optimizer: Any, **options: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, parameters=net, **options)

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return mean_loss(net, x.reshape(len(x), -1), y.astype(np.int32))

    def given(self, net: Any, gradients: Any) -> Any:
        return [(net[name], g) for name, g in gradients.items() if g is not None]

    def step(self, net: Any, optimizer: Any, gradients: Any, **weight: float) -> None:
        optimizer(gradients, **weight)

    def array(self, x: Any) -> Any:
        return new(x)

    def numpy(self, x: Any) -> Any:
        return tensor.to_numpy(x)


def test_uneven_shards_with_weights_and_a_rank_without_samples() -> None:
    bounds = [0, 1, 9, 9, 12]

    def rank(group: Group) -> None:
        net = network()
        optimizer = hvd.DistributedOptimizer(sgd(), parameters=net, group=group)
        for step in range(N_STEPS):
            x, y = (a[bounds[group.rank] : bounds[group.rank + 1]] for a in samples(step))
            optimizer(mean_loss(net, x, y) if len(x) else None, weight=len(x))
        assert close(net, alone())

    run_threads(4, rank)


@pytest.mark.shows("overlap")
def test_buckets_leave_before_the_last_gradient_has_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: dict[str, list[str]] = {}
    backward = autograd.backward

    def watched(loss: Any) -> Iterator[Any]:
        for p, g in backward(loss):
            events[threading.current_thread().name].append(p.name)
            yield p, g

    monkeypatch.setattr(autograd, "backward", watched)

    def rank(group: Group) -> None:
        mine = events[threading.current_thread().name] = []
        exchange_async = group.exchange_async

        def sends(*args: Any, **options: Any) -> Any:
            mine.append(f"sends {' '.join(options['names'])}")
            return exchange_async(*args, **options)

        monkeypatch.setattr(group, "exchange_async", sends)
        net = network()
        optimizer = hvd.DistributedOptimizer(sgd(), group=group)
        for step in range(3):
            mine.clear()
            x, y = (a[group.rank :: 2] for a in samples(step))
            optimizer.backward_and_update(mean_loss(net, x, y), threshold=31)

    run_threads(2, rank)
    for mine in events.values():
        assert mine.index("sends w2") < mine.index("w0")


def test_a_missing_gradient_counts_as_zeros_and_one_that_nobody_has_is_left_alone() -> None:
    def rank(group: Group) -> None:
        a, b, c = (new([1, 1], name) for name in "abc")
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=1), parameters=[c, b, a], group=group)
        optimizer([(a, [2, 4])] if group.rank == 0 else [(b, [6, 8])])
        assert [tensor.to_numpy(p).tolist() for p in (a, b, c)] == [[0, -1], [-2, -3], [1, 1]]
        optimizer([(a, [group.rank, 1])] * (group.rank == 1))  # one of which only has zeros
        assert tensor.to_numpy(a).tolist() == [-0.5, -1.5]

    run_threads(2, rank)


def test_ranks_with_another_sparsity_are_told() -> None:
    def rank(group: Group) -> None:
        optimizer = hvd.DistributedOptimizer(opt.SGD(), group=group)
        with pytest.raises(MismatchError, match=r"spars 0\.6"):
            optimizer.backward_and_sparse_update(
                [(new([1, 2], "kernel"), [1, 2])], spars=0.5 if group.rank < 2 else 0.6
            )

    run_threads(3, rank)


def test_nothing_of_a_failed_step_is_left_for_the_next() -> None:
    def rank(group: Group) -> None:
        a, b = new([0], "a"), new([0, 0], "b")
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=1), parameters=[a, b], group=group)
        with pytest.raises(MismatchError, match="'b'"):
            optimizer([(a, [1]), (b, np.ones(1 + group.rank))])
        optimizer([(a, [2 * group.rank])])
        assert [tensor.to_numpy(p).tolist() for p in (a, b)] == [[-1], [0, 0]]

    run_threads(2, rank)


def test_a_backward_pass_that_raises_half_way_leaves_nothing_in_flight() -> None:
    def rank(group: Group) -> None:
        a, b = new([0], "a"), new([0, 0], "b")
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=1), group=group)

        def backward(n: int) -> Iterator[Any]:
            yield a, [2 * group.rank]
            if n == 1:  # on every rank, such as when out of memory, with `a` in flight
                raise MemoryError
            yield b, [n, 4 * group.rank]

        optimizer.backward_and_update(backward(0), threshold=1)
        with pytest.raises(MemoryError):
            optimizer.backward_and_update(backward(1), threshold=1)
        optimizer.backward_and_update(backward(2), threshold=1)
        assert [tensor.to_numpy(p).tolist() for p in (a, b)] == [[-2], [-2, -4]]

    run_threads(2, rank)


def test_a_parameter_that_turns_up_late_is_an_error_that_says_what_to_do() -> None:
    a, b = new([1], "a"), new([1], "b")

    def rank(group: Group) -> None:
        optimizer = hvd.DistributedOptimizer(opt.SGD(), group=group)
        optimizer([(a, [1])])
        with pytest.raises(
            RuntimeError, match=r"on rank 0, the first gradient of 'b' .* parameters=model.get_pa"
        ):
            optimizer([(a, [1]), (b, [1])])

    run_threads(1, rank)


def test_weight_decay_of_a_transposed_gradient() -> None:
    """SINGA adds it in the wrong order, so the optimizer gets a gradient that is not transposed."""

    def rank(group: Group) -> list[bytes]:
        net = network()
        optimizer = hvd.DistributedOptimizer(
            opt.SGD(lr=1, weight_decay=0.5), parameters=net, group=group
        )
        mine = mean_loss(net, *samples(0)) if group.rank == 0 else None
        gradients = {p.name: g for p, g in autograd.backward(mean_loss(net, *samples(0)))}
        assert gradients["w2"].data.transpose()
        optimizer(mine, weight=1 - group.rank)
        for name, p in network().items():
            p = tensor.to_numpy(p)
            expected = p - (tensor.to_numpy(gradients[name]) + 0.5 * p)
            assert np.allclose(tensor.to_numpy(net[name]), expected, atol=1e-6)
        return [a.tobytes() for a in values(net).values()]

    a, b = run_threads(2, rank)
    assert a == b


def test_one_tensor_that_is_the_gradient_of_two_is_averaged_once() -> None:
    """A sum passes its gradient on to both terms; weight decay then changes it in place."""

    def loss(net: dict[str, Any], x: Any, y: Any) -> tensor.Tensor:
        out = autograd.matmul(
            tensor.Tensor(data=x, requires_grad=False), autograd.add(net["a"], net["b"])
        )
        return autograd.softmax_cross_entropy(out, tensor.from_numpy(y))

    def fresh() -> dict[str, Any]:
        return {"a": new(np.ones((4, 3)), "a"), "b": new(np.eye(4, 3), "b")}

    autograd.training = True
    expected, one = fresh(), sgd(weight_decay=1e-3)
    one(loss(expected, *samples(0)))

    def rank(group: Group) -> None:
        net = fresh()
        optimizer = hvd.DistributedOptimizer(sgd(weight_decay=1e-3), group=group)
        optimizer(loss(net, *(a[group.rank :: 2] for a in samples(0))))
        assert np.allclose(tensor.to_numpy(net["a"]), tensor.to_numpy(expected["a"]), atol=1e-6)
        # In one process b's gradient includes a's weight decay; here each has its own.
        decay = 0.3 * 1e-3 * np.ones((4, 3))
        assert np.allclose(
            tensor.to_numpy(net["b"]), tensor.to_numpy(expected["b"]) + decay, atol=1e-6
        )

    run_threads(2, rank)


@pytest.mark.parametrize("by_hand", [True, False])
def test_accumulated_and_clipped_gradients_are_those_of_the_whole_batch(by_hand: bool) -> None:
    """SINGA does not accumulate gradients, so a program adds and clips those of backward()."""

    def step(one: Any, net: Any, parts: list[Any], averaged: Callable[[Any], Any]) -> None:
        total = {name: np.zeros(shape, np.float32) for name, shape in small_net.SHAPES.items()}
        for x, y in parts:
            for p, g in autograd.backward(mean_loss(net, x, y)):
                total[p.name] += tensor.to_numpy(g) / len(parts)
        gradients = averaged({name: tensor.from_numpy(g) for name, g in total.items()})
        norm = np.sqrt(sum((tensor.to_numpy(g) ** 2).sum() for g in gradients.values()))
        for name, g in gradients.items():
            one.apply(name, net[name], tensor.from_numpy(tensor.to_numpy(g) * min(1, 0.1 / norm)))

    x, y = samples(0)

    expected = network()
    step(sgd(), expected, [(x, y)], lambda gradients: gradients)
    unclipped = network()
    sgd()(mean_loss(unclipped, *samples(0)))
    assert not close(unclipped, values(expected))  # so clipping has an effect

    def rank(group: Group) -> None:
        net = network()
        optimizer = hvd.DistributedOptimizer(sgd(), group=group)

        def averaged(gradients: Any) -> Any:
            if not by_hand:
                return horo_lite.average_gradients(gradients, group=group)
            for g in gradients.values():
                optimizer.all_reduce(g.data)
                g /= optimizer.world_size
            return gradients

        mine = [(x[i::4], y[i::4]) for i in (group.rank, group.rank + 2)]
        step(optimizer.opt, net, mine, averaged)
        assert close(net, values(expected))

    run_threads(2, rank)


# Half precision.


@pytest.mark.shows("fp16")
def test_halves_are_scaled_and_clipped() -> None:
    small, large = np.full(1024, 3e-8), np.full(1024, 2e6)

    def rank(group: Group) -> None:
        p = new(np.zeros(2048), "p")
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=1), group=group)
        mine = np.concatenate([small, large]) * (1 + group.rank)
        optimizer.backward_and_update_half([(p, mine)])
        assert np.allclose(-tensor.to_numpy(p), 1.5 * np.concatenate([small, large]), rtol=2**-9)
        p.set_value(0)
        optimizer.backward_and_update_half([(p, mine)], clipping=True, clip_Value=3e6)
        assert np.allclose(-tensor.to_numpy(p)[1024:], 2.5e6, rtol=2**-9)  # of 2e6 and 3e6

    run_threads(2, rank)


def test_halves_travel() -> None:
    def rank(group: Group) -> None:
        net = network()
        optimizer = hvd.DistributedOptimizer(sgd(), group=group)
        for step in range(N_STEPS):
            x, y = (a[group.rank :: 2] for a in samples(step))
            optimizer.backward_and_update_half(mean_loss(net, x, y))
        assert not close(net, alone())  # so they were rounded
        for name, array in values(net).items():
            assert np.allclose(array, alone()[name], atol=2e-3)  # four steps of 2^-11 of gradients

    run_threads(2, rank)


# Partial updates.


def test_partial_updates_average_one_part_after_the_other() -> None:
    parts = [["w1"], ["w2", "b0", "w0"]]  # w1 is large, the others exceed 25 together

    def rank(group: Group) -> list[dict[str, Any]]:
        net = network(seed=group.rank)
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=0.1), group=group)
        history = []
        for step in range(6):
            x, y = (a[group.rank :: 2] for a in samples(step))
            locally = network()
            for name, p in net.items():
                locally[name].copy_data(p)
            opt.SGD(lr=0.1)(mean_loss(locally, x, y))
            optimizer.backward_and_partial_update(mean_loss(net, x, y), threshold=25)
            history.append({"local": values(locally), "now": values(net)})
        assert float(tensor.to_numpy(optimizer.step_counter)[0]) == 6
        return history

    mine, other = run_threads(2, rank)
    for step, (a, b) in enumerate(zip(mine, other, strict=True)):
        for name in small_net.SHAPES:
            if name in parts[step % 2]:
                assert np.array_equal(a["now"][name], b["now"][name])
                mean = (a["local"][name] + b["local"][name]) / 2
                assert np.allclose(a["now"][name], mean, atol=1e-6)
            else:
                assert not np.array_equal(a["now"][name], b["now"][name])
                assert np.array_equal(a["now"][name], a["local"][name])


# Sparse updates: only the large elements of gradients.


@pytest.mark.parametrize("corr", [True, False])
@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({"topK": True, "spars": 0.4}, [[0, 9, 0, -7, 0], [0, 8, 0, 9, 0]]),
        ({"topK": False, "spars": 7}, [[0, 9, 0, -7, 0], [-7, 8, 0, 9, 0]]),
    ],
)
def test_what_travels_is_summed_exactly_and_the_rest_is_kept(
    options: dict[str, Any], sent: list[list[int]], corr: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five elements by magnitude, over both parameters as one, or all of at least 7."""
    gradients = [[1, 9, 2, -7, 5], [-7, 8, 1, 9, 0]]
    shipped = [0, 0]

    def counted(x: Any, *, group: Group, **options: Any) -> Any:
        shipped[group.rank] += x.nbytes
        return ops.allgather(x, group=group, **options)

    monkeypatch.setattr("horo_lite.singa.sparse.allgather", counted)

    def rank(group: Group) -> None:
        a, b = new([0, 0], "a"), new([0, 0, 0], "b")
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=1), group=group)
        mine = gradients[group.rank]
        loss = [(a, mine[:2]), (b, mine[2:])]
        optimizer.backward_and_sparse_update(loss, corr=corr, **options)
        applied = -np.concatenate([tensor.to_numpy(a), tensor.to_numpy(b)])
        assert applied.tolist() == (np.sum(sent, 0) / 2).tolist()
        assert shipped[group.rank] == 8 * np.count_nonzero(sent[group.rank])
        zeros = [(a, [0, 0]), (b, [0, 0, 0])]
        optimizer.backward_and_sparse_update(zeros, topK=True, spars=1, corr=corr)
        applied = -np.concatenate([tensor.to_numpy(a), tensor.to_numpy(b)])
        assert applied.tolist() == (np.sum(gradients if corr else sent, 0) / 2).tolist()

    run_threads(2, rank)


def test_nan_is_not_kept_back() -> None:
    def rank(group: Group) -> None:
        a = new([0, 0, 0], "a")
        optimizer = hvd.DistributedOptimizer(opt.SGD(lr=1), group=group)
        mine = [(a, [np.nan, 1, 0] if group.rank else [0, 1, 0])]
        optimizer.backward_and_sparse_update(mine, topK=bool(group.size % 2), spars=0.3)
        assert np.isnan(tensor.to_numpy(a)[0])

    for size in (2, 3):
        run_threads(size, rank)


@pytest.mark.parametrize(
    "options", [{"topK": True, "spars": 0.1}, {"topK": False, "spars": 0.15}], ids=["topK", "value"]
)
def test_sparse_updates_learn_as_much_with_correction(options: dict[str, Any]) -> None:
    """The same batch every time: the loss must decrease as far as without sparsification."""
    whole = samples(0, n=24)

    def final_loss(train: Callable[[Group, Any], None]) -> Any:
        def rank(group: Group) -> tuple[float, list[bytes]]:
            net = network()
            step = train(group, opt.SGD(lr=0.1))
            for _ in range(150):
                step(mean_loss(net, *(a[group.rank :: 2] for a in whole)), threshold=40)
            loss = float(tensor.to_numpy(mean_loss(net, *whole))[0])
            return loss, [a.tobytes() for a in values(net).values()]

        (loss, bits), (_, other) = run_threads(2, rank)
        assert bits == other
        return loss

    start = float(tensor.to_numpy(mean_loss(network(), *whole))[0])
    dense = final_loss(lambda g, o: hvd.DistributedOptimizer(o, group=g).backward_and_update)

    def sparse(corr: bool) -> Any:
        def train(group: Group, inner: Any) -> Any:
            optimizer = hvd.DistributedOptimizer(inner, group=group)
            return lambda loss, threshold: optimizer.backward_and_sparse_update(
                loss, threshold, corr=corr, **options
            )

        return train

    assert dense < 0.7 * start
    assert final_loss(sparse(corr=True)) < dense + 0.05 * (start - dense)
    assert final_loss(sparse(corr=False)) > dense + 0.1 * (start - dense)


# DistOpt's other methods and attributes.


def test_what_programs_ask_of_distopt_is_there() -> None:
    def rank(group: Group) -> None:
        optimizer = hvd.DistributedOptimizer(sgd(), group=group)
        me = (group.rank, group.rank, group.rank, group.rank, 2)
        assert me == (
            optimizer.global_rank,
            optimizer.rank_in_global,
            optimizer.local_rank,
            optimizer.rank_in_local,
            optimizer.world_size,
        )
        assert hasattr(optimizer, "communicator")  # by which SINGA's examples detect a DistOpt
        assert optimizer.get_states()["step_counter"] == 0
        optimizer.set_states({"step_counter": 5, "moments": {}})
        assert tensor.to_numpy(optimizer.opt.step_counter)[0] == 5
        with pytest.raises(AttributeError):
            optimizer.nothing  # noqa: B018
        # A custom loop, as with DistOpt: sums, which update() divides.
        p, g = new([1, 1], "p"), new([2 * group.rank, 4])
        optimizer.all_reduce(g.data)
        assert tensor.to_numpy(g).tolist() == [2, 8]
        optimizer.opt = opt.SGD(lr=1)
        optimizer.update(p, g)
        assert tensor.to_numpy(p).tolist() == [0, -3]
        more = [new([group.rank, 1]), new([[1, 2]])]
        optimizer.fused_all_reduce([t.data for t in more])
        optimizer.all_reduce_half(g.data)
        optimizer.fused_all_reduce_half([t.data for t in more])
        assert [tensor.to_numpy(t).tolist() for t in more] == [[2, 4], [[4, 8]]]
        assert tensor.to_numpy(g).tolist() == [2, 8]  # update() had divided it
        kept = new([0, 0])
        optimizer.sparsification(more[0].data, kept.data, 3, topK=False)
        optimizer.fused_sparsification([more[1].data, g.data], None, 0.25, topK=True)
        assert tensor.to_numpy(more[0]).tolist() == [0, 8]
        assert tensor.to_numpy(kept).tolist() == [2, 0]

    run_threads(2, rank)


def test_an_optimizer_from_before_version_3(monkeypatch: pytest.MonkeyPatch) -> None:
    if not REAL:
        monkeypatch.delattr(singa_wrap.Device, "graph_enabled")

    class Old:  # it only had update() and step()
        n_steps = 0

        def update(self, param: tensor.Tensor, grad: tensor.Tensor) -> None:
            singa_wrap.Axpy(-1.0, grad.data, param.data)

        def step(self) -> None:
            self.n_steps += 1

    def rank(group: Group) -> None:
        net, old = network(), Old()
        optimizer = hvd.DistributedOptimizer(old, group=group)
        optimizer(mean_loss(net, *(a[group.rank :: 2] for a in samples(0))))
        expected = network()
        opt.SGD(lr=1)(mean_loss(expected, *samples(0)))
        assert close(net, values(expected))
        assert old.n_steps == 1

    run_threads(2, rank)


# Communicator.


@pytest.mark.parametrize("size", [2, 3])
def test_what_follows_a_call_sees_the_sum_without_wait(size: int) -> None:
    """A program that averages its parameters: SINGA queues the division after the sum."""

    def rank(group: Group) -> None:
        optimizer = hvd.DistributedOptimizer(opt.SGD(), group=group)
        communicator = optimizer.communicator
        calls: list[Callable[[tensor.Tensor], None]] = [
            lambda p: optimizer.all_reduce(p.data),
            lambda p: optimizer.all_reduce_half(p.data),
            lambda p: optimizer.fused_all_reduce([p.data]),
            lambda p: optimizer.fused_all_reduce_half([p.data]),
            lambda p: optimizer.sparsification(p.data, None, 1.0, topK=True),
            lambda p: optimizer.fused_sparsification([p.data], None, 0.0, topK=False),
            lambda p: communicator.synch(p.data),
            lambda p: communicator.synchHalf(p.data),
            lambda p: communicator.fusedSynch(singa_wrap.VecTensor([p.data])),
            lambda p: communicator.fusedSynchHalf(singa_wrap.VecTensor([p.data])),
        ]
        for call in calls:
            net = [new([group.rank, 3]), new([[2 * group.rank]])]
            for p in net:
                call(p)
                p /= group.size
            middle = (group.size - 1) / 2
            assert [tensor.to_numpy(p).tolist() for p in net] == [[middle, 3], [[2 * middle]]]
            optimizer.wait()  # no effect any more
            assert [tensor.to_numpy(p).tolist() for p in net] == [[middle, 3], [[2 * middle]]]

    run_threads(size, rank)


def test_sums_of_several_calls() -> None:
    def rank(group: Group) -> None:
        communicator = hvd.Communicator(4194304, group=group)
        assert (communicator.global_rank, communicator.world_size) == (group.rank, 3)
        assert (communicator.MPIRankInGlobal, communicator.totalMPIRanksInGlobal) == (group.rank, 3)
        communicator.wait()  # nothing to wait for
        one, two, three = new([1 + group.rank, 10]), new([[group.rank]]), new(np.full(5, 1e6))
        twice = new([2**group.rank])
        communicator.synch(one.data)
        communicator.synchHalf(three.data)
        communicator.fusedSynch([two.data, twice.data])
        communicator.wait()
        assert tensor.to_numpy(one).tolist() == [6, 30]
        assert tensor.to_numpy(two).tolist() == [[3]]
        assert tensor.to_numpy(twice).tolist() == [7]
        assert np.allclose(tensor.to_numpy(three), 3e6, rtol=2**-9)  # the largest float16 is 65504

    run_threads(3, rank)


def test_tensors_set_aside_travel_as_they_were_then() -> None:
    """DistOpt stores each gradient as it comes, and sends when there are enough."""

    def rank(group: Group) -> None:
        communicator = hvd.Communicator(4194304, group=group)
        a, b, c = new([1, 2]), new([3]), new([4])
        half = new([0.25])
        communicator.fusedSynch(singa_wrap.VecTensor([a.data]), False)
        communicator.fusedSynch(singa_wrap.VecTensor([b.data]), send=False)
        communicator.fusedSynchHalf(singa_wrap.VecTensor([half.data]), False)
        a.set_value(-1)
        b.set_value(-1)
        communicator.fusedSynch(singa_wrap.VecTensor([a.data, b.data]))
        communicator.fusedSynchHalf(singa_wrap.VecTensor([half.data]), True)
        communicator.fusedSynch(singa_wrap.VecTensor([c.data]), True)  # nothing is stored
        communicator.wait()
        found = [tensor.to_numpy(t).tolist() for t in (a, b, c, half)]
        assert found == [[2, 4], [6], [8], [0.5]]
        communicator.fusedSynch([a.data], send=False)
        with pytest.raises(ValueError, match=r"rank . has stored tensors of shapes \[\(2,\)\]"):
            communicator.fusedSynch([b.data])
        a.set_value(-1)
        communicator.fusedSynch([a.data])  # what was stored is still there
        assert tensor.to_numpy(a).tolist() == [4, 8]

    run_threads(2, rank)


def test_different_calls_are_told() -> None:
    def rank(group: Group) -> None:
        communicator = hvd.Communicator(group=group)
        with pytest.raises(MismatchError, match="call 1 of SINGA's Communicator 1, synch"):
            communicator.synch(new(np.ones(3 if group.rank else 4)).data)

    run_threads(2, rank)


def test_a_world_that_is_not_this_one_is_an_error() -> None:
    holder = hvd.NcclIdHolder()
    _, port = holder.address.split(":")
    assert int(port) < 32_768  # the kernel gives outgoing connections those from there on

    def rank(group: Group) -> None:
        assert hvd.Communicator(group.rank, 2, holder, 4194304, group=group).local_rank < 2
        me = {"gpu_num": group.rank, "gpu_per_node": 2}  # as SINGA defined it before
        optimizer = hvd.DistributedOptimizer(sgd(), nccl_id=holder, **me, group=group)
        assert (optimizer.local_rank, optimizer.world_size) == (group.rank, 2)
        with pytest.raises(ValueError, match=r"rank . of 2, not 1 of 4"):
            hvd.DistributedOptimizer(sgd(), holder, gpu_num=1, gpu_per_node=4, group=group)
        with pytest.raises(TypeError, match="gpu_num is the earlier name of local_rank"):
            hvd.DistributedOptimizer(sgd(), holder, group.rank, 2, gpu_num=group.rank, group=group)
        with pytest.raises(ValueError, match=r"rank . of 2, not 1 of 4: leave nccl_id out"):
            hvd.DistributedOptimizer(sgd(), holder, 1, 4, group=group)
        with pytest.raises(TypeError, match="2 arguments"):
            hvd.Communicator(1, 4, group=group)

    run_threads(2, rank)


# SINGA's memory.


@pytest.mark.parametrize(
    "kind", [np.float32, np.int32, pytest.param(np.float16, marks=needs_stand_in)]
)
def test_reading_and_writing_raw_tensors(kind: type) -> None:
    array = np.arange(6 * 5000).reshape(6, 5000).astype(kind)  # more than float16 can count
    t = tensor.from_numpy(array)
    assert array_of(t.data).dtype == kind
    assert np.array_equal(array_of(t.data), array)
    write(t.data, array[::-1])
    assert np.array_equal(tensor.to_numpy(t), array[::-1])
    turned = singa_wrap.DefaultTranspose(t.data)  # the same memory
    assert np.array_equal(array_of(turned), array[::-1].T)
    write(turned, array.T)
    assert np.array_equal(array_of(turned), array.T)
    assert np.array_equal(tensor.to_numpy(t), array)


@needs_stand_in
def test_a_tensor_on_a_gpu_is_copied_to_the_host_and_stays_where_it_is() -> None:
    gpu = device.create_cuda_gpu_on(0)
    t = new([1, 2])
    t.to_device(gpu)
    with pytest.raises(singa_wrap.Fatal):
        t.data.GetFloatValue(2)
    assert array_of(t.data).tolist() == [1, 2]
    write(t.data, np.array([3, 4]))
    assert t.data.device() is gpu
    assert tensor.to_numpy(t).tolist() == [3, 4]


def test_graph_mode_is_refused() -> None:
    here = device.get_default_device()
    net = network()

    def rank(group: Group) -> None:
        loss = mean_loss(net, *samples(0))
        here.EnableGraph(True)
        with pytest.raises(RuntimeError, match=r"use_graph=False"):
            hvd.DistributedOptimizer(sgd(), group=group)(loss)

    try:
        run_threads(1, rank)
    finally:
        here.EnableGraph(False)


def test_the_generic_functions_know_tensors_models_and_optimizers() -> None:
    class Model:  # SINGA's models have get_params()
        __module__ = "singa.model"

        def __init__(self, net: dict[str, Any]) -> None:
            self.net = net

        def get_params(self) -> dict[str, Any]:
            return self.net

    def rank(group: Group) -> None:
        net, other = network(seed=group.rank), network(seed=group.rank)
        originals = dict(net)
        horo_lite.broadcast_parameters(net, root_rank=1, group=group)
        horo_lite.broadcast_parameters(Model(other), root_rank=1, group=group)
        for name, expected in values(network(seed=1)).items():
            assert net[name] is originals[name]
            assert np.array_equal(tensor.to_numpy(net[name]), expected)
            assert np.array_equal(tensor.to_numpy(other[name]), expected)
        mean = ops.allreduce(new([group.rank, 2]), group=group)
        assert isinstance(mean, tensor.Tensor)
        assert tensor.to_numpy(mean).tolist() == [1, 2]
        count = ops.allreduce(tensor.from_numpy(np.array([group.rank])), hvd.Sum, group=group)
        assert tensor.to_numpy(count).tolist() == [3]
        two = adapter_of(count).from_numpy(np.ones(2), like=count)  # of float64
        assert tensor.to_numpy(two).dtype == np.float32
        net["w2"] = new(np.ones(2 + group.rank))
        with pytest.raises(MismatchError, match="w2"):
            horo_lite.broadcast_parameters(net, group=group)
        for function in (horo_lite.DistributedOptimizer, horo_lite.broadcast_optimizer_state):
            with pytest.raises(TypeError, match=r"horo_lite\.singa"):
                function(sgd(), group=group)

    run_threads(3, rank)


# Real processes.


SCRIPT = """
import numpy as np
import horo_lite.singa as hvd
from singa import opt, singa_wrap, tensor
from small_net import alone, close, mean_loss, network, samples, values

world = hvd.init()

def shard(step):
    return [a[world.rank :: world.size] for a in samples(step)]

def same_bits(net):
    digests = hvd.allgather_object([a.tobytes() for a in values(net).values()])
    return all(digest == digests[0] for digest in digests)

def sgd():
    return opt.SGD(lr=0.3, momentum=0.9)

net = network(seed=world.rank)
hvd.broadcast_parameters(net)
optimizer = hvd.DistributedOptimizer(sgd())
assert (optimizer.global_rank, optimizer.local_rank) == (world.rank, world.local_rank)
for step in range(4):
    optimizer(mean_loss(net, *shard(step)))
assert close(net, alone()) and same_bits(net)

# SINGA's own DistOpt, unchanged.
assert not hasattr(singa_wrap, "Communicator")
hvd.install()
for threshold in (5, 25, 2097152):
    net = network()
    dist = opt.DistOpt(sgd())
    assert type(dist.communicator) is hvd.Communicator
    assert (dist.global_rank, dist.world_size) == (world.rank, world.size)
    for step in range(4):
        dist.backward_and_update(mean_loss(net, *shard(step)), threshold)
    assert close(net, alone()) and same_bits(net), threshold

    net = network()
    dist = opt.DistOpt(sgd(), singa_wrap.NcclIdHolder(), world.rank, world.size)
    for step in range(4):
        dist.backward_and_update_half(mean_loss(net, *shard(step)), threshold, clipping=True)
    assert not close(net, alone()) and same_bits(net)
    assert all(np.allclose(a, alone()[k], atol=2e-3) for k, a in values(net).items())

    for spars, top_k in ((0.0, False), (1.0, True)):  # all of it is sent
        net = network()
        dist = opt.DistOpt(sgd())
        for step in range(4):
            dist.backward_and_sparse_update(mean_loss(net, *shard(step)), threshold, spars, top_k)
        assert close(net, alone()) and same_bits(net), (spars, top_k)
    for corr in (True, False):
        ours, theirs = network(), network()
        dist, optimizer = opt.DistOpt(sgd()), hvd.DistributedOptimizer(sgd())
        for step in range(4):
            sparse = dict(threshold=threshold, spars=0.3, topK=True, corr=corr)
            dist.backward_and_sparse_update(mean_loss(theirs, *shard(step)), **sparse)
            optimizer.backward_and_sparse_update(mean_loss(ours, *shard(step)), **sparse)
        assert close(ours, values(theirs)) and same_bits(theirs), (threshold, corr)
        assert not close(ours, alone())

    ours, theirs = network(), network()
    dist, optimizer = opt.DistOpt(sgd()), hvd.DistributedOptimizer(sgd())
    for step in range(5):
        dist.backward_and_partial_update(mean_loss(theirs, *shard(step)), threshold)
        optimizer.backward_and_partial_update(mean_loss(ours, *shard(step)), threshold)
        assert close(ours, values(theirs)) and optimizer.partial == dist.partial
print(f"rank {world.rank} is done")
"""


@pytest.mark.mpi
@pytest.mark.parametrize("size", [2, 3])
def test_real_ranks_and_singas_own_distopt(size: int) -> None:
    result = run_ranks(SCRIPT, size, env={"PYTHONPATH": PYTHONPATH}, timeout_s=60).check()
    assert result.stdout.count("is done") == size


MULTIPROCESSING = """
import multiprocessing

import horo_lite.singa as hvd
from singa import opt, singa_wrap
from small_net import alone, close, mean_loss, network, samples

hvd.install()

def run(local_rank, world_size, nccl_id):
    sgd = opt.SGD(lr=0.3, momentum=0.9)
    sgd = opt.DistOpt(sgd, nccl_id=nccl_id, local_rank=local_rank, world_size=world_size)
    net = network()
    for step in range(4):
        shard = [a[sgd.global_rank :: sgd.world_size] for a in samples(step)]
        sgd.backward_and_update(mean_loss(net, *shard))
    assert close(net, alone())

if __name__ == "__main__":
    nccl_id = singa_wrap.NcclIdHolder()
    ranks = [multiprocessing.Process(target=run, args=(r, 3, nccl_id)) for r in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
"""


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="ranks without a launcher need PyTorch's store for the rendezvous; pip install torch",
)
def test_distopt_in_processes_that_the_program_starts() -> None:
    env = {"PYTHONPATH": PYTHONPATH}
    run_ranks(MULTIPROCESSING, 1, env=env, launcher=False, timeout_s=60).check()


@pytest.mark.mpi
def test_the_example_learns_to_read_digits() -> None:
    accuracies = []
    for size in (1, 2):
        arguments = ["--epochs", "3"]
        env = {"PYTHONPATH": PYTHONPATH}
        result = run_ranks(
            EXAMPLE, size, args=arguments, env=env, launcher=size > 1, timeout_s=90
        ).check()
        (found,) = re.findall(r"^test accuracy (\d\.\d+)$", result.stdout, re.MULTILINE)
        accuracies.append(float(found))
        assert size == 1 or "parameters bit-identical on all 2 ranks" in result.stdout
    assert accuracies[0] > 0.9
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.006)  # two of 359 images
