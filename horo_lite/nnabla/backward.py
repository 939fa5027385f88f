"""Which gradients are complete while backward() still runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from horo_lite.training.optimizer import DistributedOptimizer

Function = Any  # nnabla.function.Function
NdArray = Any  # nnabla.NdArray


class Backward:
    """To be told of each function that backward() has run; tells whose gradients are complete.

    A gradient is complete when all functions that add to it have run, and a parameter may be in
    several. Which functions a pass will run is read off the graph at its first one, which made the
    loss: nothing else marks where a pass begins or ends. `begin` gives the gradients and their
    numbers; a pass that writes none of them is none that ends. Where there are none, nothing is
    read off, and this is for one pass only.
    """

    def __init__(
        self,
        begin: Callable[[], Mapping[NdArray, int]],
        ready: Callable[[int], None],
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_begin, self._on_ready, self._on_end = begin, ready, end
        self._left: dict[Function, set[int]] = {}  # what will run, and which gradients it writes
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
    """What backward() calls so that gradients travel while it still runs.

        loss.backward(clear_buffer=True, function_post_hook=hvd.overlap(solver))
        solver.update()

    `solver` is a DistributedOptimizer; made and given anew for each pass, on every rank. A bucket
    (`bucket_bytes`) leaves as soon as its gradients are complete, the first time in the second
    step, when all ranks know the plan; results are there when the solver next looks at gradients,
    and they are not to be touched before. The last bucket, before which nothing is left to compute,
    leaves when the solver looks: a model whose gradients fit into one has nothing to overlap, and
    its backward() runs as without this. `weight` as for `update()`, which takes none then.
    """
    if type(solver) is not DistributedOptimizer:
        raise TypeError(f"overlap() takes a DistributedOptimizer, not {type(solver).__name__}")
    own = solver._own
    if not own.streams:
        own.streams, own.reducer = True, None

    def begin() -> dict[NdArray, int]:
        named = own.named()
        if not own.has_begun:
            own.forget()  # the last pass' gradients, if the solver looked at them and did not step
            own.begin(named, weight)
        assert own.reducer is not None
        return {named[i][1].grad: i for i in own.reducer.early()}

    def ready(i: int) -> None:
        assert own.reducer is not None
        own.reducer.ready(i)

    backward = Backward(begin, ready)

    def hook(function: Function) -> None:
        if not (backward.is_idle and own.has_begun):  # else this pass overlaps with nothing
            backward.is_idle = False
            backward(function)

    return hook
