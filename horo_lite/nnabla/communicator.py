"""NNabla's communicator on CPUs: the API of `nnabla.communicators` between this job's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import nnabla as nn
import numpy as np

from horo_lite import ops
from horo_lite.adapters.nnabla import NnablaAdapter, memory_of
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group, NullGroup
from horo_lite.collectives.reductions import Average, Sum
from horo_lite.context import is_initialized, world
from horo_lite.errors import StallError
from horo_lite.nnabla.backward import Backward, Function, NdArray
from horo_lite.settings import check_every, seconds
from horo_lite.start import stall
from horo_lite.start.ending import abort
from horo_lite.start.groups import new_group
from horo_lite.start.session import init
from horo_lite.training.reducer import Reducer

N_OTHERS = 16  # sets of arrays that are no parameters' gradients, and may be new in each call


class MultiProcessDataParallelCommunicator:
    """The communicator of NNabla's tutorial on distributed training, without CUDA.

    Every rank creates one and calls `init()`. Arrays are `NdArray`s, one or a list of them, and are
    changed in place; `inplace`, which trades memory for speed in NNabla, has no effect. Results
    have the same bits on all ranks. If the ranks' calls or shapes differ, each rank raises
    MismatchError. `src` and `dst` are positions in the list of ranks that `new_group` was given.

    context: if its `type_config` is "half", gradients travel as 2-byte floats.
    compression: `Compression.fp16` does so, too, whatever the context is.
    """

    name = "MultiProcessDataParallelCommunicator"

    def __init__(self, context: Any = None, *, compression: Compressor | None = None) -> None:
        half = context is not None and str(context.backend[0]).endswith(":half")
        self._compression = compression or (Compression.fp16 if half else Compression.none)
        self._parameters: dict[str, Any] = {}
        self._groups: dict[str, tuple[list[int], Group | NullGroup]] = {}  # except the world

    def init(self) -> None:
        """Connect the ranks. Collective; `horo_lite.init()` may have been called before."""
        if not is_initialized():
            init()

    @property
    def rank(self) -> int:
        return world().rank

    @property
    def size(self) -> int:
        return world().size

    @property
    def local_rank(self) -> int:
        return world().local_rank

    # Parameters, for the old allreduce() and for names in messages.

    def add_context_and_parameters(self, ctx_param_dict: tuple[Any, dict[str, Any]]) -> None:
        """Add the parameters whose gradients `allreduce` reduces."""
        self._parameters.update(ctx_param_dict[1])

    def clear_context_parameters(self) -> None:
        """Remove all parameters from those that `allreduce` reduces."""
        self._parameters.clear()

    # Groups.

    def new_group(self, name_ranks: Any, ranks: Sequence[int] | None = None) -> str:
        """Create a group from `(name, ranks)`, and return its name."""
        name, ranks = name_ranks if ranks is None else (name_ranks, ranks)
        if known := self.find_group(name):
            raise ValueError(f"a group {name!r} already exists, with ranks {known}")
        self._groups[name] = list(ranks), new_group(ranks)
        return str(name)

    def list_groups(self) -> dict[str, list[int]]:
        """Return the ranks of each group, by name."""
        groups = {name: list(ranks) for name, (ranks, _) in self._groups.items()}
        return {"world": list(range(self.size)), **groups}

    def find_group(self, group: str) -> list[int]:
        """Return the ranks of a group; an empty list if there is no such group."""
        return self.list_groups().get(group, [])

    # Gradients. An array on which all ranks called `zero()` stays zero, as a solver expects.

    def all_reduce(
        self, data: Any, division: bool = False, inplace: bool = False, group: str = "world"
    ) -> None:
        """Replace each array by its sum over the group's ranks; with `division`, by the average.

        With int8 and int4, error feedback lasts while the arrays are parameters' gradients; of
        other arrays, the last 16 sets of each group have it.
        """
        with watch_dog():
            self._reducer(_list_of(data), division, group).finish()

    def allreduce(self, division: bool = False, inplace: bool = False) -> None:
        """Call `all_reduce` on the gradients of all added parameters; deprecated in NNabla."""
        self.all_reduce([variable.grad for variable in self._parameters.values()], division)

    def all_reduce_callback(
        self,
        data: Any,
        pack_size: int,
        division: bool = False,
        group: str = "world",
        scale_grad: float = 1.0,
        keep_dtype: bool = False,
    ) -> list[Any]:
        """Return callbacks for one `backward()`, which then reduces `data` before it returns.

            loss.backward(communicator_callbacks=comm.all_reduce_callback(gradients, 1 << 20))

        From the second pass with these arrays on, `pack_size` values at a time travel while
        backward() is still running. Parameters may be shared by several functions. Call it anew
        for each pass; if a pass needs several callbacks, pass their sum. Each rank's values are
        multiplied by `scale_grad` first. Arrays keep their dtype, with or without `keep_dtype`.
        """
        arrays = _list_of(data)
        reducer = self._reducer(arrays, division, group, 4 * int(pack_size), scale_grad)
        return _waiting_for(reducer, arrays)

    def _reducer(
        self,
        arrays: list[NdArray],
        division: bool,
        group: str,
        bucket_bytes: int = 25 * 2**20,
        scale: float = 1.0,
    ) -> Reducer:
        """Return a reducer, kept for later calls: with its plan, and what int8 has rounded away.

        As long as the arrays are parameters' gradients; others keep their memory while it exists.
        """
        members = self._members(group)
        # Those of a group are dropped alike on its ranks, whatever these do in other groups.
        reducers: dict[Any, Reducer] = members.kept.setdefault(self, {})
        key = tuple(arrays), division, bucket_bytes, scale
        reducer = reducers.pop(key, None)
        if reducer is None:
            parameters = self._by_gradient()
            others = [known for known in reducers if not parameters.keys() >= set(known[0])]
            for known in others[: -(N_OTHERS - 1)]:
                del reducers[known]
            reducer = Reducer(
                members,
                Arrays({a: parameters[a][1] for a in arrays if a in parameters}),
                [
                    (parameters[a][0] if a in parameters else f"array {i}", a)
                    for i, a in enumerate(arrays)
                ],
                op=Average if division else Sum,
                compression=self._compression,
                bucket_bytes=max(bucket_bytes, 1),
                prescale_factor=scale,
                options=[("scale_grad", str(scale))],
                checks_start=check_every() != 0 and parameters.keys() >= set(arrays),
            )
        reducers[key] = reducer
        return reducer

    def _by_gradient(self) -> dict[NdArray, tuple[str, Any]]:
        """Return the names of all parameters, and themselves, by their gradients."""
        known = {**nn.get_parameters(grad_only=False), **self._parameters}
        return {variable.grad: (name, variable) for name, variable in known.items()}

    # Other collectives.

    def reduce(
        self,
        data: Any,
        dst: int,
        division: bool = False,
        inplace: bool = False,
        group: str = "world",
    ) -> None:
        """Replace each array by its sum over the group's ranks, on rank `dst` only."""
        members, arrays = self._members(group), _list_of(data)
        if not 0 <= dst < members.size:
            raise ValueError(f"dst is {dst}, but {group!r} has ranks 0 to {members.size - 1}")
        sums = ops.grouped_allreduce(_read(arrays), Average if division else Sum, group=members)
        if members.rank == dst:
            _write(arrays, sums)

    def bcast(self, data: Any, src: int, inplace: bool = False, group: str = "world") -> None:
        """Copy each array of rank `src` to all ranks."""
        ops.grouped_broadcast_(
            [array.data for array in _list_of(data)], src, group=self._members(group)
        )

    def all_gather(self, ndarray: Any, ndarray_list: Sequence[Any], group: str = "world") -> None:
        """Copy the `ndarray` of each rank r into `ndarray_list[r]`."""
        mine = ndarray.get_data("r")
        _write(ndarray_list, ops.allgather(mine[None], group=self._members(group)))

    def reduce_scatter(
        self,
        ndarray_list: Sequence[Any],
        ndarray: Any,
        division: bool = False,
        group: str = "world",
    ) -> None:
        """Set `ndarray` on each rank r to the sum of all ranks' `ndarray_list[r]`."""
        parts = np.stack(_read(ndarray_list))
        op, members = Average if division else Sum, self._members(group)
        _write([ndarray], ops.reducescatter(parts, op, group=members))

    def barrier(self) -> None:
        """Wait until all ranks of the world have called this."""
        ops.barrier()

    def abort(self) -> NoReturn:
        """End the job, on all ranks, with a non-zero exit code."""
        abort("Communicator.abort() was called")

    def _members(self, group: str) -> Group:
        if group == "world":
            return world().group
        if group not in self._groups:
            raise ValueError(f"there is no group {group!r} among {', '.join(self.list_groups())}")
        ranks, members = self._groups[group]
        if not members:
            raise ValueError(f"rank {self.rank} is not in group {group!r} of ranks {ranks}")
        return members


class Arrays(NnablaAdapter):
    """Treats arrays as parameters whose gradients are the arrays' own values.

    Args:
        parameters: The variables that belong to them, if they are indeed gradients.
    """

    def __init__(self, parameters: Mapping[NdArray, Any]) -> None:
        self._parameters = parameters

    def gradient(self, parameter: NdArray) -> Any:
        return None if parameter.zeroing else memory_of(parameter)

    def set_gradient(self, parameter: NdArray, array: Any) -> None:
        parameter.data = array

    def value(self, parameter: NdArray) -> Any:
        variable = self._parameters.get(parameter)
        return (parameter if variable is None else variable.data).get_data("r")  # keeps `zeroing`


WATCH_DOG = "NNABLA_MPI_WATCH_DOG_ENABLE"
WATCH_DOG_TIMEOUT = "NNABLA_MPI_WATCH_DOG_TIMEOUT"


@contextmanager
def watch_dog() -> Iterator[None]:
    """Limit a reduction to 60 seconds, if NNabla's watch dog variable is set.

    As in NNabla, other calls are not limited: users let ranks wait for each other in `barrier()`.
    """
    if (os.environ.get(WATCH_DOG) or "0").startswith("0"):
        yield
        return
    timeout_s = seconds(WATCH_DOG_TIMEOUT, os.environ.get(WATCH_DOG_TIMEOUT) or 0) or 60.0
    try:
        with stall.abort_after(timeout_s):
            yield
    except StallError as error:
        raise StallError(
            f"{error}. NNabla's watch dog ({WATCH_DOG}) limits a reduction to {timeout_s:g} s: "
            f"increase {WATCH_DOG_TIMEOUT}, or call barrier() before it if ranks are late"
        ) from None


def _list_of(data: Any) -> list[NdArray]:
    return [data] if isinstance(data, nn.NdArray) else list(data)


def _read(arrays: Sequence[NdArray]) -> list[Any]:
    return [array.get_data("r") for array in arrays]


def _write(arrays: Sequence[NdArray], values: Any) -> None:
    for array, value in zip(arrays, values, strict=True):
        array.data = value


# NNabla cannot call Python when backward() ends: `communicator_callbacks` takes C++ objects only.
# But it calls hooks after each function of any pass, and before a solver touches a gradient.


class _Waiting:
    """An exchange that belongs to the next backward()."""

    def __init__(self, reducer: Reducer, arrays: list[NdArray]) -> None:
        self.reducer = reducer
        self.ticket: list[Any] = []  # the list of callbacks that NNabla receives, empty
        numbers = {array: i for i, array in enumerate(arrays)}
        self._backward = Backward(lambda: numbers, reducer.ready, self.finish)
        self._forward: set[Function] = set()

    def on_function(self, function: Function) -> None:
        if self._backward.is_running or not self._is_forward(function):
            self._backward(function)

    def _is_forward(self, function: Function) -> bool:
        """Return whether `function` is part of a forward pass.

        Such a pass begins with a function whose inputs have no parents, and runs no function twice.
        """
        if not any(variable.parent for variable in function.inputs):
            self._forward = {function}
        elif self._forward and function not in self._forward:
            self._forward.add(function)
        else:
            return False
        return True

    def finish(self) -> None:
        """Reduce the arrays."""
        _waiting.remove(self)
        self.ticket.append(_UsedUp())  # NNabla has read the list, and refuses it a second time
        with watch_dog():
            self.reducer.finish()


class _UsedUp:
    """An object that makes NNabla refuse a used list of callbacks, with this class' name."""


_UsedUp.__name__ = "all_reduce_callback_that_was_used_before_call_it_for_each_backward_anew"

_waiting: list[_Waiting] = []


def _waiting_for(reducer: Reducer, arrays: list[NdArray]) -> list[Any]:
    if not _hooks:
        _hooks.append(True)
        nn.set_function_post_hook("horo_lite", _on_function)
        nn.set_solver_pre_hook("horo_lite", _on_solver)
    for earlier in [each for each in _waiting if each.reducer is reducer]:  # never used
        _waiting.remove(earlier)
        reducer.abandon()
    _waiting.append(_Waiting(reducer, arrays))
    return _waiting[-1].ticket


# Never removed: NNabla iterates over its hooks while it calls them.
_hooks: list[bool] = []


def _on_function(function: Function) -> None:
    for each in tuple(_waiting):
        each.on_function(function)


def _on_solver() -> None:
    for each in tuple(_waiting):  # the pass was not recognized, or had nothing to do
        each.finish()
