"""Detect which gradients are complete while backward() is still running."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from horo_lite.training.optimizer import DistributedOptimizer

Function = Any  # nnabla.function.Function
NdArray = Any  # nnabla.NdArray


class Backward:
    """Reports which gradients are complete; call it after each function that backward() has run.

    A gradient is complete when all functions that add to it have run, and a parameter may be used
    in several. NNabla does not mark where a pass begins or ends: so the functions that it will run
    are taken from the graph when it runs the first one, which computed the loss. `begin` returns
    the gradients and their numbers; for a pass that writes none of them, `end` is not called. If it
    returns none, the object stays idle from then on.
    """

    def __init__(
        self,
        begin: Callable[[], Mapping[NdArray, int]],
        ready: Callable[[int], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_begin, self._on_ready, self._on_end = begin, ready, end
        self._left: dict[Function, set[int]] = {}  # still to run, and the gradients each writes
        self._uses: Counter[int] = Counter()
        self.is_idle = False

    @property
    def is_running(self) -> bool:
        return bool(self._left)

    def __call__(self, function: Function) -> None:
        if function not in self._left and not self._begin(function):
            return
        for number in self._left.pop(function):
            self._uses[number] -= 1
            if not self._uses[number]:
                self._on_ready(number)
        if not self._left and self._uses:
            self._on_end()

    def _begin(self, last: Function) -> bool:
        if self.is_idle:
            return False
        numbers = self._on_begin()
        self.is_idle = not numbers
        if self.is_idle:
            return False
        self._left = {}
        found = [last]
        while found:
            if (function := found.pop()) in self._left:
                continue
            inputs = [variable for variable in function.inputs if variable.need_grad]
            self._left[function] = {numbers[g] for v in inputs if (g := v.grad) in numbers}
            parents = [variable.parent for variable in inputs]
            found += [parent for parent in parents if parent is not None and parent.need_grad]
        self._uses = Counter(i for written in self._left.values() for i in written)
        return True


def overlap(solver: Any, weight: float | None = None) -> Callable[[Function], None]:
    """Return a hook for backward() that sends gradients while it is still running.

        loss.backward(clear_buffer=True, function_post_hook=hvd.overlap(solver))
        solver.update()

    `solver` is a DistributedOptimizer. Create a new hook for each pass, on every rank. From the
    second step on, when all ranks know the plan, a bucket (`bucket_bytes`) leaves as soon as its
    gradients are complete. Results are available when the solver next reads gradients; do not touch
    these before. The last bucket leaves only then, since no computation is left to overlap with: if
    all gradients fit into one bucket, backward() runs as without the hook. `weight` is that of
    `update()`, which must then be called without it.
    """
    if not issubclass(type(solver), DistributedOptimizer):
        raise TypeError(f"overlap() takes a DistributedOptimizer, not {type(solver).__name__}")
    own = solver._own
    if not own.streams:
        own.streams, own.reducer = True, None

    def begin() -> dict[NdArray, int]:
        named = own.named()
        if not own.step.has_begun:
            own.forget()  # gradients of the last pass, if the solver read them but did not step
            own.begin(named, weight)
        assert own.reducer is not None
        return {named[i][1].grad: i for i in own.reducer.early()}

    def ready(i: int) -> None:
        assert own.reducer is not None
        own.reducer.ready(i)

    backward = Backward(begin, ready)

    def hook(function: Function) -> None:
        if not (backward.is_idle and own.step.has_begun):  # otherwise there is nothing to overlap
            backward.is_idle = False
            backward(function)

    return hook
