"""What every framework's optimizers do under horo_lite, once for all: tests to derive from.

A class of tests that is derived from `Contract` says in a few lines how to make a network, an
optimizer and gradients with its framework.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from launch import run_threads
from worlds import on_ranks

import horo_lite
from horo_lite.adapters import adapter_of
from horo_lite.collectives import arrays as memory
from horo_lite.collectives.group import Group
from horo_lite.state import drift
from horo_lite.state.wrapper import Sharing

Arrays = dict[str, np.ndarray]
N_STEPS = 4
told: list[str] = []  # by warnings


def samples(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return n images of 6 x 6 and the numbers of their 5 classes."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 1, 6, 6)).astype(np.float32), rng.integers(0, 5, n)


def raises(error: type[Exception], call: Callable[[], object], *words: str) -> None:
    """Require an error whose text has these words."""
    with pytest.raises(error) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value


class Contract:
    """Tests, and how the framework in question does what they need.

    The defaults are for optimizers with a step(), whose parameters hold the gradients.
    """

    face: Any = horo_lite
    threads = False  # ranks are threads of this process
    env: ClassVar[Mapping[str, str]] = {}  # of the ranks, if they are processes
    optimizers: ClassVar[tuple[str, ...]]  # kinds for `optimizer`; the last one has a state
    dtypes: ClassVar[tuple[str, ...]] = ()  # of parameters, apart from float32
    close: ClassVar[Mapping[str, float]] = {"rtol": 2e-5, "atol": 2e-6}  # sums in another order
    keeps_objects = True  # a broadcast writes into the same arrays
    has_class = True  # the wrapper is of the optimizer's class
    skips_missing = True  # an optimizer leaves a parameter without a gradient as it is

    def network(self, seed: int) -> Any:
        """Return a network for `samples()`."""
        raise NotImplementedError

    def parameters(self, values: Arrays) -> Any:
        """Return what holds these parameters, as a network does."""
        raise NotImplementedError

    def arrays(self, net: Any) -> dict[str, Any]:
        """Return the network's parameters, by name."""
        raise NotImplementedError

    def optimizer(self, kind: str, net: Any) -> Any:
        """Return an optimizer of this kind; "sgd" has a learning rate of 1 and nothing else."""
        raise NotImplementedError

    def gradients(self, net: Any, optimizer: Any, x: Any, y: Any) -> Any:
        """Compute the gradients of the mean loss over these samples; return what `step` takes."""
        raise NotImplementedError

    def given(self, net: Any, gradients: Mapping[str, np.ndarray | None]) -> Any:
        """Use these gradients; return what `step` takes."""
        raise NotImplementedError

    def array(self, x: np.ndarray) -> Any:
        """Return an array of the framework."""
        raise NotImplementedError

    def numpy(self, x: Any) -> np.ndarray:
        """Return an array or parameter of the framework as one of NumPy's."""
        return x.numpy()

    def step(self, net: Any, optimizer: Any, gradients: Any, **weight: float) -> None:
        """Take a step."""
        optimizer.step(**weight)

    def wrap(self, net: Any, optimizer: Any, **options: Any) -> Any:
        """Return the DistributedOptimizer."""
        named = self.arrays(net).items()
        return self.face.DistributedOptimizer(optimizer, named_parameters=named, **options)

    def broadcast(self, net: Any, root: int, group: Group) -> None:
        """Send the parameters of rank `root` to all."""
        self.face.broadcast_parameters(net, root_rank=root, group=group)

    def broadcast_state(self, optimizer: Any, root: int, group: Group) -> None:
        """Send the state of the optimizer of rank `root` to all."""
        self.face.broadcast_optimizer_state(optimizer, root_rank=root, group=group)

    def held(self, net: Any) -> list[Any] | None:
        """Return the gradients, if they are exchanged in place."""
        return None

    def place(self, gradient: Any) -> Any:
        """Return the address of a gradient, and what else must not change."""
        raise NotImplementedError

    # The tests.

    def run(self, check: Callable[[Group], None], size: int) -> None:
        """Call a method on each rank of a world of its own."""
        if self.threads:
            run_threads(size, check)
        else:
            kind = type(self)
            where = inspect.getfile(kind), kind.__name__, check.__name__
            on_ranks(_run, size, *where, job_env=self.env, timeout_s=120)

    def values(self, net: Any) -> Arrays:
        return {name: np.array(self.numpy(x)) for name, x in self.arrays(net).items()}

    def check_alike(self, net: Any, group: Group) -> None:
        bits = [x.tobytes() for x in self.values(net).values()]
        assert all(bits == other for other in horo_lite.allgather_object(bits, group=group))

    def check_alike_and_close(self, net: Any, alone: Any, group: Group) -> None:
        """Compare with what only rank 0 has computed alone: frameworks may compile for seconds."""
        self.check_alike(net, group)
        if group.rank == 0:
            self.check_close(net, alone)

    def check_close(self, net: Any, alone: Any) -> None:
        mine, other = self.values(net), self.values(alone)
        assert mine.keys() == other.keys()
        for name, x in other.items():
            np.testing.assert_allclose(mine[name], x, err_msg=name, **self.close)

    def test_training_is_that_of_one_process_on_the_whole_batch(self) -> None:
        for size in (2, 3) if self.threads else (3,):  # processes cost more
            self.run(self.training, size)

    def training(self, group: Group) -> None:
        """Train with uneven shards, from the values of a rank that no other rank has."""
        rank, size = group.rank, group.size
        net, alone = self.network(rank), self.network(size - 1)
        before, objects = self.values(net), list(self.arrays(net).values())
        theirs = horo_lite.broadcast_object(before, size - 1, group=group)
        assert rank == size - 1 or any((theirs[name] != before[name]).any() for name in theirs)
        self.broadcast(net, size - 1, group)
        start = self.values(net)
        assert start.keys() == theirs.keys()
        assert all((start[name] == theirs[name]).all() for name in theirs)
        now = self.arrays(net).values()
        if self.keeps_objects:
            assert all(new is old for new, old in zip(now, objects, strict=True))
        cuts = [0, 5, *range(9, 4 * size + 2, 4)]  # the first rank has one sample more
        mine, n = slice(cuts[rank], cuts[rank + 1]), cuts[rank + 1] - cuts[rank]
        for kind in self.optimizers:
            inner, opt_alone = self.optimizer(kind, net), self.optimizer(kind, alone)
            opt = self.wrap(net, inner, group=group)
            assert isinstance(opt, type(inner)) or not self.has_class
            for step in range(N_STEPS):
                x, y = samples(4 * size + 1, step)
                found = self.gradients(net, opt, x[mine], y[mine])
                held = self.held(net)
                if step == 1 and held is not None:
                    self.synchronize(opt, net, held, n)
                else:
                    self.step(net, opt, found, weight=n)
                if rank == 0:
                    self.step(alone, opt_alone, self.gradients(alone, opt_alone, x, y))
            self.check_alike_and_close(net, alone, group)
            del opt  # PyTorch's parameters may have only one
        assert any((x != start[name]).any() for name, x in self.values(net).items())

    def synchronize(self, opt: Any, net: Any, held: list[Any], n: int) -> None:
        """Step with averages that are in the memory of this rank's own gradients."""
        own = [(self.place(g), np.array(self.numpy(g))) for g in held]
        copied = memory.bytes_copied
        opt.synchronize(weight=n)
        now = self.held(net)
        assert now is not None
        assert [self.place(g) for g in now] == [place for place, _ in own]
        assert memory.bytes_copied == copied or self.threads
        pairs = zip(now, own, strict=True)
        assert all((self.numpy(g) != was).any() for g, (_, was) in pairs if was.any())
        with opt.skip_synchronize():
            opt.step()

    def moved(self, group: Group, start: Arrays, gradients: Any, **options: Any) -> Arrays:
        """Return what a step with a learning rate of 1 subtracts: the averages."""
        net = self.parameters(start)
        opt = self.wrap(net, self.optimizer("sgd", net), group=group, **options)
        self.step(net, opt, self.given(net, gradients))
        now = self.values(net)
        assert all(now[name].dtype == x.dtype for name, x in start.items())
        return {name: x - now[name] for name, x in start.items()}

    def test_fp16_is_rounded_and_small_numbers_survive(self) -> None:
        self.run(self.fp16, 2)

    def fp16(self, group: Group) -> None:
        rngs = [np.random.default_rng(r) for r in range(group.size)]
        whole = np.stack([rng.standard_normal(300) for rng in rngs]).astype(np.float32)
        each = {"a": whole, "b": np.float32(1e-9) * whole}  # float16 has no such numbers
        found = self.moved(
            group,
            {name: np.zeros(300, np.float32) for name in each},
            {name: x[group.rank] for name, x in each.items()},
            compression=horo_lite.Compression.fp16,
        )
        for name, x in each.items():
            error = np.abs(found[name] - x.mean(0)) / np.abs(x).max()
            assert 1e-6 < error.max() < 2**-10, error.max()

    def test_a_missing_gradient_counts_as_zeros_and_dtypes_are_kept(self) -> None:
        self.run(self.missing, 2)

    def missing(self, group: Group) -> None:
        first = group.rank == 0
        names = ("own", "every", "nobodys") if self.skips_missing else ("own", "every")
        zeros = {name: np.zeros((2, 2), np.float32) for name in names}
        halves = {dtype: np.zeros(4, np.dtype(dtype)) for dtype in self.dtypes}
        gradients = {
            "own": np.array([[2, 4], [6, 8]], np.float32) if first else None,
            "every": np.full((2, 2), 2.0 * group.rank, np.float32),
            **({"nobodys": None} if self.skips_missing else {}),
            **{name: np.array([group.rank, 1, 2, 3], x.dtype) for name, x in halves.items()},
        }
        found = self.moved(group, zeros | halves, gradients)
        assert found["own"].tolist() == [[1, 2], [3, 4]]
        assert found["every"].tolist() == [[1, 1], [1, 1]]
        assert not self.skips_missing or not found["nobodys"].any()
        assert all(found[dtype].tolist() == [0.5, 1, 2, 3] for dtype in self.dtypes)

    def test_ranks_that_differ_are_told_what_differs_and_go_on(self) -> None:
        self.run(self.mismatches, 2)

    def mismatches(self, group: Group) -> None:
        def step(values: Arrays) -> Arrays:
            return self.moved(group, values, {name: x + 1 for name, x in values.items()})

        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, np.float32)

        wider = {"w": zeros(2), "deep_b": zeros(2 + group.rank)}
        words = ("deep_b", "rank 0", "float32[2]", "rank 1", "float32[3]")
        raises(horo_lite.MismatchError, lambda: step(wider), *words)
        more = {"w": zeros(2)} | ({} if group.rank else {"extra": zeros(2)})
        raises(horo_lite.MismatchError, lambda: step(more), "extra", "rank 0")
        assert step({"w": zeros(2)})["w"].tolist() == [1, 1]

    def test_a_second_wrapper_does_not_change_the_first(self) -> None:
        self.run(self.second_wrapper, 2)

    def second_wrapper(self, group: Group) -> None:
        net = self.parameters({"w": np.zeros(2, np.float32)})
        inner = self.optimizer("sgd", net)
        opt = self.wrap(net, inner, op=horo_lite.Sum, group=group)
        raises(TypeError, lambda: self.wrap(net, opt, group=group), "already")
        if isinstance(opt, Sharing):
            again = lambda: self.wrap(net, inner, group=group)  # noqa: E731
            raises(ValueError, again, "already has a DistributedOptimizer")
        else:
            other = self.wrap(net, inner, group=group)
            assert other.inner is inner
        self.step(net, opt, self.given(net, {"w": np.full(2, 1.0 + group.rank, np.float32)}))
        assert self.values(net)["w"].tolist() == [-3, -3]

    def test_replicas_that_differ_are_told_though_nobody_has_asked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told.clear()
        monkeypatch.setattr(drift, "warn", told.append)  # for ranks that are threads
        self.run(self.replicas, 2)

    def replicas(self, group: Group) -> None:
        patched = mock.patch.object(drift, "warn", told.append)
        with nullcontext() if self.threads else patched:
            for differ in (False, True):
                name = f"w{differ:d}"  # MLX counts by names
                net = self.parameters({name: np.full(3, 1.0 + differ * group.rank, np.float32)})
                opt = self.wrap(net, self.optimizer("sgd", net), group=group)
                for step in range(11):
                    gradient = np.full(3, float(step + group.rank), np.float32)
                    self.step(net, opt, self.given(net, {name: gradient}))
                horo_lite.barrier(group=group)
                speaks = differ and (self.threads or group.rank == 0)
                assert len(told) == speaks, told
        assert all("the replicas differ after step 10: 1 of 1" in text for text in told)

    def test_arrays_in_every_call(self) -> None:
        self.run(self.calls, 3)

    def calls(self, group: Group) -> None:
        rank, hvd = group.rank, horo_lite

        def array(x: Any) -> Any:
            return self.array(np.asarray(x, np.float32))

        own = [[rank + 1, 2 * rank + 2], [3 * rank + 3, 4 * rank + 4]]
        x = array(own)
        total = hvd.allreduce(x, op=hvd.Sum, group=group)
        assert type(total) is type(x)
        assert self.numpy(total).tolist() == [[6, 12], [18, 24]]
        assert self.numpy(x).tolist() == own
        rows = hvd.allgather(array(np.full((rank + 1, 2), rank)), group=group)
        assert type(rows) is type(x)
        assert self.numpy(rows)[:, 0].tolist() == [0, 1, 1, 2, 2, 2]
        assert self.numpy(hvd.broadcast(array([rank, 7]), 1, group=group)).tolist() == [1, 7]
        assert float(self.numpy(hvd.allreduce(array(2.0 * rank), group=group))) == 2
        tree = hvd.average_gradients({"x": [x, None]}, group=group)
        assert type(tree["x"][0]) is type(x)
        assert tree["x"][1] is None
        assert self.numpy(tree["x"][0]).tolist() == [[2, 4], [6, 8]]
        assert self.numpy(x).tolist() == own
        if self.keeps_objects:
            kept = {"more": [array([rank]), (array(np.zeros((0, 2))), None)]}
            first = kept["more"][0]
            assert hvd.broadcast_parameters(kept, root_rank=2, group=group) is kept
            assert kept["more"][0] is first
            assert self.numpy(first).tolist() == [2]

    def test_an_optimizer_goes_on_as_that_of_the_root(self) -> None:
        self.run(self.state, 3)

    def state(self, group: Group) -> None:
        """Only rank 1 has taken steps; the others have no state yet."""
        rank, size, kind = group.rank, group.size, self.optimizers[-1]
        net, alone = self.network(0), self.network(0)
        inner, opt_alone = self.optimizer(kind, net), self.optimizer(kind, alone)
        for one, opt, n in ((net, inner, 2 * (rank == 1)), (alone, opt_alone, 2 * (rank == 0))):
            for step in range(n):
                self.step(one, opt, self.gradients(one, opt, *samples(5, step)))
        self.broadcast(net, 1, group)
        opt = self.wrap(net, inner, group=group)
        self.broadcast_state(opt, 1, group)
        for step in range(2):
            x, y = samples(4 * size, 9 + step)
            found = self.gradients(net, opt, x[rank::size], y[rank::size])
            self.step(net, opt, found)
            if rank == 0:
                self.step(alone, opt_alone, self.gradients(alone, opt_alone, x, y))
        self.check_alike_and_close(net, alone, group)


class Divisible(Contract):
    """For optimizers whose state horo_lite.DistributedOptimizer(shard_state=True) divides."""

    def parts(self, net: Any) -> tuple[Callable[[Any], Any], Any]:
        """Return a function that makes an optimizer with a state, and the parameters for it."""
        raise NotImplementedError

    def test_a_divided_state_gives_the_same_bits(self) -> None:
        self.run(self.division, 3)

    def division(self, group: Group) -> None:
        """Train, and go on from what has been saved."""
        made: list[Any] = []

        def sharded(net: Any) -> Any:
            make, parameters = self.parts(net)

            def noted(part: Any) -> Any:
                made.append(part)
                return make(part)

            return self.face.DistributedOptimizer(
                noted, parameters=parameters, shard_state=True, group=group
            )

        def step(net: Any, opt: Any, seed: int) -> None:
            x, y = samples(4 * group.size, seed)
            mine = slice(group.rank, None, group.size)
            self.step(net, opt, self.gradients(net, opt, x[mine], y[mine]))

        nets = [self.network(0) for _ in range(3)]
        make, parameters = self.parts(nets[0])
        named = self.arrays(nets[0]).items()
        whole = self.face.DistributedOptimizer(
            make(parameters), named_parameters=named, group=group
        )
        opt = sharded(nets[1])
        for seed in range(4):
            step(nets[0], whole, seed)
            step(nets[1], opt, seed)
        self.check_bits(nets[1], nets[0])
        everyone = horo_lite.allgather_object(len(made), group=group)
        assert sum(everyone) == max(group.size, len(self.arrays(nets[1])))
        assert not self.has_class or isinstance(opt, type(whole.inner))
        state = pickle.dumps([self.values(nets[1]), opt.state_dict()])
        step(nets[1], opt, 5)
        values, loaded = pickle.loads(state)
        assert len(loaded) == len(values)
        assert horo_lite.check_in_sync(opt, state=True, group=group)
        other = sharded(nets[2])
        for x, old in zip(values.values(), self.arrays(nets[2]).values(), strict=True):
            self.assign(old, x)
        other.load_state_dict(loaded)
        step(nets[0], whole, 5)
        step(nets[2], other, 5)
        for net in nets[1:]:
            self.check_bits(net, nets[0])
            self.check_alike(net, group)

    def assign(self, parameter: Any, value: np.ndarray) -> None:
        """Set a parameter's value."""
        adapter_of(parameter).set_value(parameter, value)

    def check_bits(self, net: Any, other: Any) -> None:
        mine, theirs = self.values(net), self.values(other)
        assert [x.tobytes() for x in mine.values()] == [x.tobytes() for x in theirs.values()]
        start = self.values(self.network(0))
        assert all((x != start[name]).any() for name, x in mine.items())


def _run(path: str, name: str, check: str) -> None:
    """Run a check on this rank."""
    folder, file = os.path.split(path)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    tests = getattr(importlib.import_module(file.removesuffix(".py")), name)()
    getattr(tests, check)(horo_lite.init().group)


if __name__ == "__main__":  # in a job of its own
    _run(*sys.argv[1:])
