"""NNabla: solvers, and the variables and arrays that they update; all are written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import nnabla as nn
import nnabla_ext.cpu
import numpy as np
from nnabla.solver import Solver
from nnabla.utils.dlpack import to_dlpack

from horo_lite.adapters.object import Adapter, Array, Named

FLOAT = np.dtype(np.float32)
CPU = nnabla_ext.cpu.context()


class Memory:
    """An array's own memory, exported through DLPack and kept alive by this object.

    NNabla's `data` takes 0.1 ms each time: it searches the disk for a module that does not exist.
    """

    dtype = FLOAT

    def __init__(self, array: Any) -> None:
        array.data_ptr(FLOAT, CPU)  # executes a deferred fill(), which DLPack would not do
        self._array = array
        self.shape = array.shape

    @property
    def data(self) -> Any:
        return self._array.data

    def __dlpack__(self, **_: Any) -> Any:
        return to_dlpack(self._array, FLOAT, CPU)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def memory_of(array: Any) -> Array:
    """Return the memory of an NdArray, for reading and writing."""
    try:
        is_float = array.dtype == FLOAT  # float16 would be taken for bfloat16
    except RuntimeError:  # nothing has been written yet
        is_float = False
    return Memory(array) if is_float else array.data


class Parameter:
    """A solver's parameter, always as the same object; the solver creates new ones each time."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable

    @property
    def grad(self) -> Any:
        return self.variable.grad

    @property
    def data(self) -> Any:
        return self.variable.data


class _Watch:
    """Detects changes of gradients, and reads them only if NNabla computes something."""

    def __init__(self, digest: Callable[[], object]) -> None:
        self._digest = digest
        self._before: object = None

    def on_function(self) -> None:
        """Take the digest before the first function runs; it may be a forward or backward one."""
        if self._before is None:
            self._before = self._digest()

    def has_changed(self) -> bool:
        return self._before is not None and self._before != self._digest()


_watches: WeakSet[_Watch] = WeakSet()
# Never removed: NNabla iterates over its hooks while it calls them.
_hooks: list[bool] = []


def _on_function(_: Any) -> None:
    for each in tuple(_watches):
        each.on_function()


class NnablaAdapter(Adapter):
    """Solvers by `get_parameters()`; parameters by their `grad` and `data`.

    A gradient that no backward pass has written since `zero_grad()` counts as missing: the solver
    skips its parameter, and so does the exchange if it is missing on all ranks. NNabla keeps a flag
    for this, which reading the gradient's memory would clear.
    """

    steps = ("update",)
    before_step = (
        "weight_decay", "clip_grad_by_norm", "scale_grad",
        "check_inf_grad", "check_nan_grad", "check_inf_or_nan_grad",
    )  # fmt: skip
    of_all = (
        "get_parameters", "set_parameters", "remove_parameters", "clear_parameters",
        "get_states", "set_states", "save_states", "load_states",
    )  # fmt: skip
    takes_closure = False  # update() takes hooks
    is_filled_later = True

    def __init__(self) -> None:
        self._known: WeakValueDictionary[Any, Parameter] = WeakValueDictionary()

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (Solver, Parameter, nn.Variable, nn.NdArray, Memory))

    def parameters(self, owner: Any) -> Named:
        if not isinstance(owner, Solver):
            return []
        # Sorted: the solver's own order is that of a hash table.
        return [(name, self._parameter(v)) for name, v in sorted(owner.get_parameters().items())]

    def _parameter(self, variable: Any) -> Parameter:
        # Variables are equal where they stand for the same memory.
        return self._known.setdefault(variable, Parameter(variable))

    def gradient(self, parameter: Any) -> Array | None:
        gradient = parameter.grad
        return None if gradient.zeroing else memory_of(gradient)

    def set_gradient(self, parameter: Any, array: Array) -> None:
        parameter.grad.data = array

    def clear_gradient(self, parameter: Any) -> None:
        parameter.grad.zero()

    def watch(self, digest: Callable[[], object]) -> Callable[[], bool]:
        if not _hooks:
            _hooks.append(True)
            nn.set_function_pre_hook("horo_lite", _on_function)
        _watches.add(watch := _Watch(digest))
        return watch.has_changed

    def value(self, parameter: Any) -> Array:
        is_array = isinstance(parameter, (nn.NdArray, Memory))
        return parameter.data if is_array else parameter.data.data

    def set_value(self, parameter: Any, array: Array) -> None:
        (parameter if isinstance(parameter, nn.NdArray) else parameter.data).data = array

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        if isinstance(like, nn.NdArray):
            return nn.NdArray.from_numpy_array(array)
        return nn.Variable.from_numpy_array(array)

    # The solver's state: the learning rate, and each parameter's number of updates and arrays.

    def state(self, optimizer: Any) -> Any:
        states = {
            name: (state.t, {key: np.array(v.d) for key, v in state.pstate.items()})
            for name, state in optimizer.get_states().items()
        }
        return optimizer.learning_rate(), states

    def set_state(self, optimizer: Any, state: Any) -> None:
        learning_rate, states = state
        optimizer.set_learning_rate(learning_rate)
        mine = optimizer.get_states()
        if differ := sorted(states.keys() ^ mine.keys()):
            raise ValueError(
                f"the ranks' solvers have different parameters (only one has {differ[0]!r}): call "
                "set_parameters() with the same parameters on every rank before "
                "broadcast_optimizer_state()"
            )
        for name, (t, arrays) in states.items():
            mine[name].t = t
            for key, array in arrays.items():
                mine[name].pstate[key].d = array
        optimizer.set_states(mine)


ADAPTER = NnablaAdapter()
