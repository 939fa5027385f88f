"""horo_lite.needle with a stand-in for Needle, as specified by the course."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract import Divisible
from digits_runs import EXAMPLES, accuracy_of
from launch import run_ranks, run_threads

HERE = Path(__file__).resolve().parent
STAND_IN = str(HERE / "stand_ins")
sys.path.insert(0, STAND_IN)

import needle as ndl  # noqa: E402

import horo_lite.needle as hvd  # noqa: E402
from horo_lite import Group, MismatchError, ops  # noqa: E402
from horo_lite import needle as face  # noqa: E402

drawing = threading.Lock()  # NumPy's global state
PATHS = [STAND_IN, str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
ENV = {"PYTHONPATH": os.pathsep.join(PATHS)}
DEVICES = [ndl.cpu(), ndl.cpu_numpy()]
pytestmark = pytest.mark.timeout(360)


def parameter(values: Any, device: Any = DEVICES[0]) -> Any:
    return ndl.nn.Parameter(np.asarray(values, np.float32), device=device)


def gradient(values: Any, device: Any = DEVICES[0]) -> Any:
    return ndl.Tensor(np.asarray(values, np.float32), device=device, requires_grad=False)


class Turned(ndl.nn.Module):  # type: ignore[misc]
    """The gradient of its weight is a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = ndl.nn.Linear(8, 36, device=DEVICES[1]).weight

    def forward(self, x: Any) -> Any:
        return x @ ndl.ops.transpose(self.weight, (1, 0))


@pytest.mark.shows("eager", "fp16")
class TestNeedle(Divisible):
    threads = True
    face = hvd
    optimizers = ("momentum", "adam")

    def network(self, seed: int) -> Any:
        with drawing:
            np.random.seed(seed)
            return ndl.nn.Sequential(
                Turned(), ndl.nn.ReLU(), ndl.nn.Linear(8, 5, device=DEVICES[1])
            )

    def parameters(self, values: Any) -> Any:
        net = ndl.nn.Module()
        vars(net).update({name: parameter(x, DEVICES[1]) for name, x in values.items()})
        return net

    def arrays(self, net: Any) -> Any:
        names = [name for name in vars(net) if name != "training"]
        params = net.parameters()
        return dict(zip(names if len(names) == len(params) else "abc", params, strict=True))

    def parts(self, net: Any) -> Any:
        return partial(ndl.optim.Adam, lr=0.01, eps=1e-3, weight_decay=0.01), net.parameters()

    def optimizer(self, kind: str, net: Any) -> Any:
        params = net.parameters()
        if kind == "adam":
            return ndl.optim.Adam(params, lr=0.01, eps=1e-3, weight_decay=0.01)
        rate = {"lr": 1.0} if kind == "sgd" else {"lr": 0.1, "momentum": 0.9}
        return ndl.optim.SGD(params, **rate)

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.reset_grad()
        x, y = (ndl.Tensor(a, device=DEVICES[1]) for a in (x.reshape(len(x), -1), y))
        ndl.nn.SoftmaxLoss()(net(x), y).backward()
        assert not net.modules[0].weight.grad.cached_data.is_compact()

    def given(self, net: Any, gradients: Any) -> Any:
        for name, p in self.arrays(net).items():
            p.grad = None if gradients[name] is None else gradient(gradients[name], DEVICES[1])

    def array(self, x: Any) -> Any:
        return gradient(x, DEVICES[1])

    def numpy(self, x: Any) -> Any:
        assert x.device == DEVICES[1]
        return x.numpy()


def test_the_example() -> None:
    assert accuracy_of("needle", epochs=4, env=ENV, timeout_s=60) > 0.94


# The quirks, with ranks as threads.


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_two_gradients_that_are_one_tensor(device: Any) -> None:
    """As with a sum: averaged once, however many parameters have it."""

    def rank(group: Group) -> None:
        a, b = parameter([1, 2], device), parameter([3, 4], device)
        for _ in range(2):
            ((a + b) * (4.0 * group.rank)).backward()
            assert a.grad is b.grad
            shared = a.grad
            hvd.DistributedOptimizer(ndl.optim.SGD([a, b]), group=group).synchronize()
            assert a.grad is b.grad is shared
            assert a.grad.numpy().tolist() == [2, 2]
            assert a.grad.device == device

    run_threads(2, rank)


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_gradients_that_share_memory_in_other_ways(device: Any) -> None:
    """One in another shape, one transposed, and one whose elements share one location."""

    def rank(group: Group) -> None:
        a, b = parameter(np.ones((2, 3)), device), parameter(np.ones(6), device)
        c, d = parameter(np.ones((3, 2)), device), parameter(np.ones((2, 3)), device)
        scale = gradient(np.arange(6.0).reshape(2, 3) * (2 * group.rank), device)
        total = a + ndl.ops.reshape(b, (2, 3)) + ndl.ops.transpose(c, (1, 0))
        loss = ndl.ops.summation(total * scale) + ndl.ops.summation(d)
        (loss * (1.0 + group.rank)).backward()
        handles = {p.grad.cached_data._handle for p in (a, b, c)}
        assert len(handles) == 1
        assert d.grad.cached_data.strides == (0, 0)
        hvd.DistributedOptimizer(ndl.optim.SGD([a, b, c, d]), group=group).synchronize()
        expected = np.arange(6.0).reshape(2, 3) * 2  # rank 0: 0, rank 1: 2 x 2
        np.testing.assert_array_equal(a.grad.numpy(), expected)
        np.testing.assert_array_equal(b.grad.numpy(), expected.reshape(6))
        np.testing.assert_array_equal(c.grad.numpy(), expected.T)
        np.testing.assert_array_equal(d.grad.numpy(), np.full((2, 3), 1.5))

    run_threads(2, rank)


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_a_gradient_that_is_not_compact(device: Any) -> None:
    def rank(group: Group) -> None:
        weight = parameter(np.ones((3, 2)), device)
        x = gradient(np.random.default_rng(group.rank).random((5, 2)), device)
        ndl.ops.summation(x @ ndl.ops.transpose(weight, (1, 0))).backward()
        assert not weight.grad.cached_data.is_compact()
        mine = weight.grad.numpy()
        hvd.DistributedOptimizer(ndl.optim.SGD([weight]), group=group).synchronize()
        expected = np.mean(ops.allgather_object(mine, group=group), axis=0)
        np.testing.assert_allclose(weight.grad.numpy(), expected, rtol=1e-6)
        assert weight.grad.cached_data.is_compact()
        assert np.any(expected != mine)

    run_threads(3, rank)


def test_gradients_that_are_none() -> None:
    def rank(group: Group) -> None:
        a, b, c = (parameter([1, 1]) for _ in range(3))
        opt = hvd.DistributedOptimizer(ndl.optim.SGD([a, b, c], lr=1.0), group=group)
        assert not hasattr(b, "grad")  # and before the first backward(), there is not even a None
        a.grad, c.grad = gradient([2, 2]), None
        if group.rank:
            b.grad = gradient([6, 6])
        opt.step()
        assert b.grad.numpy().tolist() == [3, 3]
        assert b.grad.dtype == "float32"
        assert not b.grad.requires_grad
        assert c.grad is None
        assert [p.numpy()[0] for p in (a, b, c)] == [-1, -2, 1]
        assert set(opt.u) == {a, b}

    run_threads(2, rank)


def test_parameters_are_looked_up_each_step_and_kept() -> None:
    def rank(group: Group) -> None:
        a, b = parameter([0]), parameter([0])
        opt = hvd.DistributedOptimizer(ndl.optim.SGD([a], lr=1.0, momentum=0.5), group=group)
        for params in ([a], [a, b], [b]):
            opt.params = params
            for p in params:
                p.grad = gradient([2.0 * group.rank])
            opt.step()
            assert all(p.grad.numpy().tolist() == [1] for p in params)
            opt.reset_grad()
            assert all(p.grad is None for p in params)
        assert opt.inner.params == [b]
        assert set(opt.u) == {a, b}
        assert a.numpy().tolist() == [-1.25]

    run_threads(2, rank)


def test_reset_grad_after_synchronize() -> None:
    """The gradients were abandoned: the next step exchanges its own."""

    def rank(group: Group) -> None:
        a = parameter([0])
        opt = hvd.DistributedOptimizer(ndl.optim.SGD([a], lr=1.0), group=group)
        a.grad = gradient([2.0 * group.rank])
        opt.synchronize()
        opt.reset_grad()
        a.grad = gradient([4.0 * group.rank])
        opt.step()
        assert a.numpy().tolist() == [-2]

    run_threads(2, rank)


def test_clipping_sees_the_averages() -> None:
    def rank(group: Group) -> None:
        a = parameter([0, 0])
        opt = hvd.DistributedOptimizer(ndl.optim.SGD([a], lr=1.0), group=group)
        for _ in range(2):
            a.data = gradient([0, 0])
            a.grad = gradient([[6, 0], [0, 8]][group.rank])
            opt.clip_grad_norm(max_norm=1.0)
            opt.step()
            np.testing.assert_allclose(a.numpy(), [-0.6, -0.8], rtol=1e-6)

    run_threads(2, rank)


def test_gradients_computed_after_clipping_are_not_stepped_with_unaveraged() -> None:
    def rank(group: Group) -> None:
        a = parameter([0, 0])
        opt = hvd.DistributedOptimizer(ndl.optim.SGD([a], lr=1.0), group=group)
        a.grad = gradient([group.rank, 0])
        opt.clip_grad_norm(max_norm=1.0)
        a.grad = gradient([0, 2 * group.rank])  # as left behind by a step that was skipped
        for use in (opt.step, opt.clip_grad_norm):
            with pytest.raises(RuntimeError, match=r"changed since clip_grad_norm\(\) averaged"):
                use()
        assert a.numpy().tolist() == [0, 0]
        opt.reset_grad()
        a.grad = gradient([0, 2 * group.rank])
        opt.step()
        assert a.numpy().tolist() == [0, 1 - group.size]

    run_threads(2, rank)
    run_threads(3, rank)


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_broadcast_of_a_model_with_running_means(device: Any) -> None:
    def rank(group: Group) -> Any:
        rng = np.random.default_rng(group.rank)
        norm = ndl.nn.Module()
        norm.weight = parameter(np.ones(3), device)
        norm.running_mean, norm.running_var = (gradient(rng.random(3), device) for _ in range(2))
        net = ndl.nn.Sequential(ndl.nn.Linear(2, 3, device=device), norm)
        net.heads = {"a": [ndl.nn.Linear(3, 1, device=device)]}
        net.modules[0].weight.data = gradient(rng.random((2, 3)), device)
        before = net.parameters(), [p.numpy().copy() for p in net.parameters()]
        mean = norm.running_mean.numpy().copy()
        hvd.broadcast_parameters(net, root_rank=1, group=group)
        assert all(p is q for p, q in zip(net.parameters(), before[0], strict=True))
        assert all(p.device == device for p in net.parameters())
        if group.rank == 1:
            assert all((p.numpy() == x).all() for p, x in zip(*before, strict=True))
            assert (norm.running_mean.numpy() == mean).all()
        else:
            assert (net.modules[0].weight.numpy() != before[1][0]).any()
            assert (norm.running_mean.numpy() != mean).any()
        tensors = [*net.parameters(), norm.running_mean, norm.running_var]
        hvd.broadcast_parameters(net.parameters(), group=group)  # a list is accepted
        return [t.numpy().tobytes() for t in tensors]

    one, two, three = run_threads(3, rank)
    assert one == two == three


def test_state_goes_on_where_root_stands() -> None:
    """Momenta by parameter, for a rank that has none so far."""

    def rank(group: Group) -> None:
        a, b = parameter([1, 2]), parameter([3])
        adam = ndl.optim.Adam([a, b], lr=0.1 * (1 + group.rank))
        if group.rank == 0:
            for p in (a, b):
                p.grad = gradient(np.ones(p.shape))
            adam.step()
        m = adam.m
        opt = hvd.DistributedOptimizer(adam, group=group)
        hvd.broadcast_optimizer_state(opt, group=group)
        hvd.broadcast_parameters(opt, group=group)
        assert adam.params == [a, b]
        assert (adam.t, adam.lr) == (1, 0.1)
        assert adam.m is m
        assert set(adam.m) == set(adam.v) == {a, b}
        assert isinstance(adam.m[a], ndl.Tensor)
        np.testing.assert_allclose(adam.m[a].numpy(), [0.1, 0.1], rtol=1e-6)
        for p in (a, b):
            p.grad = gradient(np.full(p.shape, 2.0 * group.rank))
        opt.step()
        everyone = ops.allgather_object([p.numpy().tobytes() for p in (a, b)], group=group)
        assert everyone[0] == everyone[1]

    run_threads(2, rank)


def test_a_mismatch_names_the_parameter() -> None:
    def rank(group: Group) -> None:
        net = ndl.nn.Sequential(ndl.nn.Linear(2, 3 if group.rank else 4, device=DEVICES[0]))
        wrong = r"rank 0.*'modules\[0\].weight'.*2, 4.*rank 1.*2, 3"
        with pytest.raises(MismatchError, match=wrong):
            hvd.broadcast_parameters(net, group=group)
        opt = hvd.DistributedOptimizer(ndl.optim.SGD(net.parameters()), group=group)
        for p in net.parameters():
            p.grad = gradient(np.ones(p.shape))
        with pytest.raises(MismatchError, match=r"'params\[0\]' float32\[2, 4\], rank 1 has"):
            opt.step()
        opt.params = [parameter([1]) for _ in range(1 + group.rank)]
        with pytest.raises(
            MismatchError, match=r"rank 0 has only 1 parameters, rank 1 has 'params"
        ):
            opt.step()

    run_threads(2, rank)


def test_another_package_of_that_name_is_left_alone() -> None:
    code = """
    import sys, types
    sys.modules["needle"] = types.ModuleType("needle")
    import numpy as np
    import horo_lite as hvd
    hvd.init()
    class Opt:
        params, grads = [np.ones(2)], [np.ones(2)]
        def step(self): self.params[0] -= self.grads[0]
    opt = hvd.DistributedOptimizer(Opt())
    opt.step()
    assert opt.params[0].tolist() == [0, 0]
    """
    run_ranks(code, 1, env=ENV, launcher=False, timeout_s=60).check()


# Data.


class Numbers(ndl.data.Dataset):  # type: ignore[misc]
    def __getitem__(self, index: Any) -> Any:
        return np.float32(index), 10 * index

    def __len__(self) -> int:
        return 23


class OldLoader(ndl.data.DataLoader):  # type: ignore[misc]
    """From a homework before there were devices; it indexes with arrays."""

    def __init__(self, dataset: Any, batch_size: int = 1, shuffle: bool = False) -> None:
        super().__init__(dataset, batch_size, shuffle)

    def __next__(self) -> Any:
        return tuple(ndl.Tensor(x) for x in self.dataset[next(self._batches)])


@pytest.mark.parametrize("loader", [ndl.data.DataLoader, OldLoader])
@pytest.mark.parametrize("shuffle", [False, True])
def test_parts_of_a_dataset(loader: Any, shuffle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndl.data, "DataLoader", loader)
    monkeypatch.setattr(face, "size", lambda: 3)
    seen = []
    for rank in range(3):
        monkeypatch.setattr(face, "rank", lambda rank=rank: rank)
        np.random.seed(0)
        batches, bsz = hvd.partition_dataset(
            Numbers(), 8, device=ndl.cpu(), dtype="float32", shuffle=shuffle
        )
        assert bsz == 2
        assert batches.batch_size == 2
        for _ in range(2):  # more than one epoch
            epoch = list(batches)
            assert [x.shape for x, _ in epoch] == [(2,), (2,), (2,), (1,)]
            assert all(x.device == y.device == ndl.cpu() for x, y in epoch)
            assert all((10 * x.numpy() == y.numpy()).all() for x, y in epoch)
        seen.append([x.numpy().tolist() for x, _ in epoch])
    assert sorted(x for rank in seen for batch in rank for x in batch) == list(range(21))
    if not shuffle:  # the ranks' first batches are one process's first batch
        assert sorted(x for rank in seen for x in rank[0]) == list(range(6))


def test_too_few_samples_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face, "size", lambda: 4)
    monkeypatch.setattr(face, "rank", lambda: 0)
    with pytest.raises(
        ValueError, match=r"23 samples in batches of 3 leave nothing .* the 4 ranks"
    ):
        hvd.partition_dataset(Numbers(), 3)


def test_a_part_of_another_world_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face, "is_initialized", lambda: True)
    monkeypatch.setattr(face, "size", lambda: 3)
    monkeypatch.setattr(face, "rank", lambda: 1)
    batches, _ = hvd.partition_dataset(Numbers(), 9, shuffle=False)
    assert next(iter(batches))[0].numpy().tolist() == [1, 4, 7]
    monkeypatch.setattr(face, "size", lambda: 2)
    with pytest.raises(RuntimeError, match="of rank 1 of 3, but this is now rank 1 of 2: call"):
        next(iter(batches))


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's if there is one, by its index in forks whose cuda() takes one."""

    class Gpu:
        def __init__(self, index: int | None) -> None:
            self.index = index

        def enabled(self) -> bool:
            return True

    class Here:
        rank = 5

        class device:  # noqa: N801
            kind, index = "cuda", 3

    monkeypatch.setattr(face.horo_lite, "init", lambda: Here)
    assert hvd.init() == (5, ndl.cpu())  # a GPU, but no backend for it
    monkeypatch.setattr(ndl, "cuda", lambda: Gpu(None))
    assert hvd.init()[1].index is None
    monkeypatch.setattr(ndl, "cuda", lambda index: Gpu(index))
    assert hvd.init()[1].index == 3
    Here.device.kind = "cpu"
    assert hvd.init() == (5, ndl.cpu())
