"""Random training loops with optimizers of one's own: ranks train as one process, or raise."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launch import RanksFailedError, run_threads

from horo_lite.adapters.numpy import Slot
from horo_lite.state.broadcast import broadcast_optimizer_state, broadcast_parameters
from horo_lite.training.optimizer import DistributedOptimizer

SHAPES = ((2, 3), (3,), (), (0,))
ALL = tuple(range(len(SHAPES)))


class Parameter:
    def __init__(self, data: Any) -> None:
        self.data, self.grad = data, None


class Copying(Parameter):
    """Converts its arrays whenever they are read, as around those of another language."""

    data = property(lambda self: self.of["data"].copy(), lambda self, x: self.set("data", x))
    grad = property(lambda self: copy.copy(self.of["grad"]), lambda self, x: self.set("grad", x))

    def set(self, name: str, x: Any) -> None:
        self.of = {**getattr(self, "of", {}), name: None if x is None else np.array(x)}


class Momentum:
    """Its parameters are objects, in a list, a dict or groups."""

    def __init__(self, params: Any) -> None:
        self.params, self.lr = params, 0.1
        self.velocity: dict[Any, Any] = {}

    def each(self) -> list[Any]:
        return list(self.params.values() if isinstance(self.params, dict) else self.params)

    def zero_grad(self, to_none: bool = True) -> None:
        for p in self.each():
            p.grad = None if to_none or p.grad is None else 0 * p.grad

    def step(self, gradients: Any = None, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for i, p in enumerate(self.each()):
            if (gradient := p.grad if gradients is None else gradients[i]) is not None:
                self.velocity["of", i] = 0.5 * self.velocity.get(("of", i), 0.0) + gradient
                p.data = p.data - self.lr * self.velocity["of", i]

    def minimize(self, closure: Any) -> None:
        closure()
        self.step()


class Groups(Momentum):
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params, "name": "all", "velocity": {}}]
        self.lr = 0.1

    params = property(lambda self: self.param_groups[0]["params"])
    velocity = property(lambda self: self.param_groups[0]["velocity"])


class Update(Momentum):
    """Takes its steps in update(); `step` is their number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.step = 0  # type: ignore[assignment,method-assign]

    def update(self, *args: Any, **kwargs: Any) -> None:
        self.step += 1  # type: ignore[assignment,operator]
        Momentum.step(self, *args, **kwargs)

    def minimize(self, closure: Any) -> None:
        closure()
        self.update()


class Arrays(Momentum):
    """Parameters and gradients are arrays, in two lists or dicts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.grads: Any = {} if isinstance(params, dict) else []

    def each(self) -> list[Any]:
        keys = self.params if isinstance(self.params, dict) else range(len(self.params))
        return [Slot(self, key) for key in keys]


MAKE: dict[str, Callable[[list[Any]], Any]] = {
    "list": lambda values: Momentum([Parameter(x) for x in values]),
    "dict": lambda values: Momentum({f"w{i}": Parameter(x) for i, x in enumerate(values)}),
    "groups": lambda values: Groups([Parameter(x) for x in values]),
    "copying": lambda values: Momentum([Copying(x) for x in values]),
    "update()": lambda values: Update([Parameter(x) for x in values]),
    "arrays": Arrays,
    "dict of arrays": lambda values: Arrays({f"w{i}": x for i, x in enumerate(values)}),
}


def in_layout(x: Any, layout: str, rank: int | None) -> Any:
    if layout == "of its rank":
        return np.array(x, order="F" if rank else "C")
    if layout == "strided" and x.ndim:
        return np.repeat(x, 2, 0)[::2]
    x.flags.writeable = layout != "read-only"
    return x if x.ndim or layout == "strided" else x[()]


@dataclass
class Loop:
    """The loop of one rank, or of one process (`rank` is None), which has the samples of all."""

    optimizer: Any
    size: int
    rank: int | None
    group: Any = None
    n_losses: int = 0
    steps: list[list[Any]] = field(default_factory=list)

    @property
    def inner(self) -> Any:
        return self.optimizer if self.rank is None else self.optimizer.inner

    def backward(
        self,
        which: tuple[int, ...] = ALL,
        layout: str = "",
        only: int | None = None,
        uneven: bool = False,
    ) -> float:
        """Add to gradients, on all ranks, or on the only one that has a loss."""
        self.n_losses += 1
        ends = np.cumsum([r if uneven else 2 for r in range(self.size)])  # rank 0 may have none
        batch = np.random.default_rng(self.n_losses).integers(-4, 5, ends[-1]) / 4
        parts = np.split(batch, ends[:-1])
        if self.rank not in (None, only) and only is not None:
            return 0.0
        share = 1 / self.size if self.rank is None and only is not None else 1.0
        rank = only if self.rank is None else self.rank
        x = batch if rank is None else parts[rank]
        if not len(x):
            return 0.0
        parameters = self.inner.each()
        for p in [parameters[i] for i in which if i < len(parameters)]:
            gradient = np.asarray(share * (x.mean() * (1 + p.data) + (x**2).mean()))
            old = p.grad
            if layout == "in place" and getattr(getattr(old, "flags", None), "writeable", False):
                old += gradient
                p.grad = old
            else:
                gradient = gradient if old is None else gradient + old
                p.grad = in_layout(np.asarray(gradient), layout, self.rank)
        return float(share * x.mean())

    def step(self, *args: Any, **kwargs: Any) -> None:
        name = "update" if isinstance(self.inner, Update) else "step"
        getattr(self.optimizer, name)(*args, **kwargs)

    def synchronize(self) -> None:
        if self.rank is not None:
            self.optimizer.synchronize()

    def skipping(self) -> Any:
        return nullcontext() if self.rank is None else self.optimizer.skip_synchronize()


@dataclass(frozen=True)
class Backward:
    which: tuple[int, ...]
    layout: str
    only: int | None = None

    def run(self, loop: Loop) -> None:
        loop.backward(self.which, self.layout, self.only)


@dataclass(frozen=True)
class Clear:
    how: str

    def run(self, loop: Loop) -> None:
        if self.how == "by hand":
            for p in loop.inner.each():
                p.grad = None
        else:
            loop.optimizer.zero_grad(self.how == "to None")


def clip(loop: Loop) -> None:
    for p in loop.inner.each():
        p.grad = None if p.grad is None else np.clip(p.grad, -0.2, 0.2)


WRONG = {
    "closure in skip_synchronize()": "takes no closure",
    "two steps in skip_synchronize()": r"skip_synchronize\(\) without synchronize\(\)",
    "gradients passed": "was given arrays",
}


@dataclass(frozen=True)
class TakeStep:
    how: str = "plain"
    uneven: bool = False

    def run(self, loop: Loop) -> None:
        weight: Any = {}
        if self.uneven and loop.rank is not None:
            weight = {"weight": loop.rank}

        def closure() -> float:
            loop.optimizer.zero_grad()
            return loop.backward(uneven=self.uneven)

        if self.how == "plain":
            if self.uneven:
                closure()
            loop.step(**weight)
        elif self.how == "closure":
            loop.step(closure=closure, **weight)
        elif self.how == "second argument":
            loop.step(None, closure, **weight)
        elif self.how == "minimize":
            closure = lambda: loop.backward()  # noqa: E731
            loop.optimizer.minimize(closure)
        elif self.how == "gradients passed":
            gradients = [p.grad for p in loop.inner.each()]
            loop.step([None if x is None else np.array(x) for x in gradients])
        else:
            loop.synchronize()
            if self.how == "clipped":
                clip(loop)
            with loop.skipping():
                if self.how == "closure in skip_synchronize()":
                    loop.step(closure=closure)
                elif self.how == "two steps in skip_synchronize()":
                    loop.step()
                    loop.backward()
                    loop.step()
                elif self.how != "dropped":
                    loop.step()
            if self.how == "dropped":
                loop.optimizer.zero_grad()
        loop.steps.append([np.array(p.data) for p in loop.inner.each()])


@dataclass(frozen=True)
class Change:
    how: str

    def run(self, loop: Loop) -> None:
        inner, params = loop.inner, loop.inner.params
        if self.how == "copy":
            loop.optimizer = copy.copy(loop.optimizer)
        elif self.how == "deepcopy":
            loop.optimizer = copy.deepcopy(loop.optimizer)
        elif self.how == "lower rate":
            loop.optimizer.lr *= 0.5
        elif self.how == "remove":
            for p in inner.each():
                p.grad = None
            inner.velocity.clear()
            if len(params) > 1:
                del params[next(iter(params)) if isinstance(params, dict) else 0]
            if isinstance(inner, Arrays):
                inner.grads.clear()
        elif self.how == "load on one rank" and loop.rank is not None:
            if loop.rank > 0:
                inner.velocity.clear()
                for p in inner.each():
                    p.data = 0 * p.data
            broadcast_parameters(loop.optimizer, group=loop.group)
            broadcast_optimizer_state(loop.optimizer, group=loop.group)


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, int, list[Any]]:
    """Draw the kind of optimizer, the number of ranks, and what they do one after the other."""
    size = draw(st.sampled_from([2, 2, 3]))
    which = st.lists(st.sampled_from(ALL), min_size=1, unique=True).map(tuple)
    layout = st.sampled_from(["", "of its rank", "strided", "read-only", "in place"])
    only = st.one_of(st.none(), st.none(), st.integers(0, size - 1))
    ways = ["plain", "closure", "second argument", "minimize", "clipped", "dropped"]
    changes = ["copy", "deepcopy", "lower rate", "remove", "load on one rank"]
    one = st.one_of(
        st.builds(Backward, which, layout, only),
        st.builds(Backward, st.just(ALL), layout),
        st.builds(Clear, st.sampled_from(["to None", "to zero", "by hand"])),
        st.builds(TakeStep, st.sampled_from(ways), st.booleans()),
        st.builds(Change, st.sampled_from(changes)),
    )
    wrong = st.sampled_from(sorted(WRONG)).map(lambda how: [Backward(ALL, ""), TakeStep(how)])
    end = draw(st.one_of(st.just([TakeStep()]), st.just([TakeStep()]), wrong))
    return draw(st.sampled_from(sorted(MAKE))), size, [*draw(st.lists(one, max_size=9)), *end]


def made(kind: str) -> Any:
    return MAKE[kind]([np.linspace(-1, 1, int(np.prod(x))).reshape(x)[()] for x in SHAPES])


LOAD = [Change("load on one rank"), TakeStep()]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60)
@example(("groups", 2, [Backward(ALL, ""), TakeStep(), *LOAD]))
@example(("arrays", 2, [Backward(ALL, "", 1), *LOAD]))
@given(programs())
def test_the_ranks_train_as_one_process_or_raise(drawn: tuple[str, int, list[Any]]) -> None:
    kind, size, program = drawn
    alone = Loop(made(kind), size, None)
    for each in program:
        each.run(alone)
    loops: list[Loop] = []

    def train(group: Any) -> None:
        optimizer = DistributedOptimizer(made(kind), group=group)
        loop = Loop(optimizer, size, group.rank, group)
        loops.append(loop)
        for each in program:
            each.run(loop)

    raised = []
    try:
        run_threads(size, train)
    except RanksFailedError as error:
        raised = [str(each) for each in error.errors.values()]
    known = WRONG.get(getattr(program[-1], "how", ""), "")
    assert all(known and re.search(known, text) for text in raised), raised
    assert raised or all(len(loop.steps) == len(alone.steps) for loop in loops)
    for loop in loops:
        for found, expected in zip(loop.steps, alone.steps, strict=False):
            for a, b in zip(found, expected, strict=True):
                assert np.allclose(a, b, rtol=0, atol=1e-9), (loop.rank, loop.steps, alone.steps)
