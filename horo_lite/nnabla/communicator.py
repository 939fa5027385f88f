"""NNabla's communicator, on CPUs: the calls of `nnabla.communicators`, among this job's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
from horo_lite.settings import seconds
from horo_lite.start import stall
from horo_lite.start.ending import abort
from horo_lite.start.groups import new_group
from horo_lite.start.session import init
from horo_lite.training.reducer import Reducer

N_REDUCERS = 16


class MultiProcessDataParallelCommunicator:
    """The communicator of NNabla's tutorial on distributed training, without CUDA.

    Made and `init()`ed on every rank. Arrays are `NdArray`s, one or a list of them, and hold the
    result themselves; `inplace`, which there chooses between memory and speed, changes nothing.
    Results have the same bits on all ranks. Where ranks differ in what they call or in shapes, each
    of them raises MismatchError. `src` and `dst` are places in `group`, as `new_group` was given
    its ranks.

    context: of its `type_config`, "half" means that gradients travel as 2-byte floats.
    compression: says so whatever the context is: `Compression.fp16`.
    """

    name = "MultiProcessDataParallelCommunicator"

    def __init__(self, context: Any = None, *, compression: Compressor | None = None) -> None:
        half = context is not None and str(context.backend[0]).endswith(":half")
        self._compression = compression or (Compression.fp16 if half else Compression.none)
        self._parameters: dict[str, Any] = {}
        self._groups: dict[str, tuple[list[int], Group | NullGroup]] = {}  # beside the world
        self._reducers: dict[Any, Reducer] = {}

    def init(self) -> None:
        """The ranks know each other. Collective; `horo_lite.init()` may have been called before."""
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
        """`allreduce` means the gradients of these parameters, too."""
        self._parameters.update(ctx_param_dict[1])

    def clear_context_parameters(self) -> None:
        """`allreduce` means no gradients any more."""
        self._parameters.clear()

    # Groups.

    def new_group(self, name_ranks: Any, ranks: Sequence[int] | None = None) -> str:
        """The name of a new group, made of `(name, ranks)`; called by every rank of the world."""
        name, ranks = name_ranks if ranks is None else (name_ranks, ranks)
        if known := self.find_group(name):
            raise ValueError(f"there is a group {name!r} already: ranks {known}")
        self._groups[name] = list(ranks), new_group(ranks)
        return str(name)

    def list_groups(self) -> dict[str, list[int]]:
        """The ranks of each group, by name."""
        groups = {name: list(ranks) for name, (ranks, _) in self._groups.items()}
        return {"world": list(range(self.size)), **groups}

    def find_group(self, group: str) -> list[int]:
        """The ranks of a group; none where there is no such group."""
        return self.list_groups().get(group, [])

    # Gradients. An array that is zero since `zero()` on all ranks stays so, as a solver expects.

    def all_reduce(
        self, data: Any, division: bool = False, inplace: bool = False, group: str = "world"
    ) -> None:
        """Each array holds its sum over the group's ranks; with `division` the average."""
        with watch_dog():
            self._reducer(_list_of(data), division, group).finish()

    def allreduce(self, division: bool = False, inplace: bool = False) -> None:
        """As `all_reduce` of all gradients of the parameters that were added; deprecated there."""
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
        """For `communicator_callbacks` of one `backward()`: when it returns, `data` is reduced.

            loss.backward(communicator_callbacks=comm.all_reduce_callback(gradients, 1 << 20))

        `pack_size` values travel together, while backward() still runs, from the second pass with
        these arrays on. Parameters may be shared by several functions. Called for each pass anew;
        of several callbacks for one pass, give the sum. `scale_grad` is multiplied with each rank's
        values before. Arrays keep their dtype, with or without `keep_dtype`.
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
        """Kept for the next time, since only a plan that is known lets gradients leave early."""
        members = self._members(group)
        key = tuple(arrays), division, members, bucket_bytes, scale
        reducer = self._reducers.pop(key, None)
        if reducer is None:
            reducer = Reducer(
                members,
                Arrays(),
                self._named(arrays),
                op=Average if division else Sum,
                compression=self._compression,
                bucket_bytes=max(bucket_bytes, 1),
                prescale_factor=scale,
                options=[("scale_grad", str(scale))],
            )
        self._reducers[key] = reducer
        if len(self._reducers) > N_REDUCERS:
            del self._reducers[next(iter(self._reducers))]
        return reducer

    def _named(self, arrays: list[NdArray]) -> list[tuple[str, Any]]:
        known = {**nn.get_parameters(grad_only=False), **self._parameters}
        names = {variable.grad: name for name, variable in known.items()}
        return [(names.get(a, f"array {i}"), a) for i, a in enumerate(arrays)]

    # Other collectives.

    def reduce(
        self,
        data: Any,
        dst: int,
        division: bool = False,
        inplace: bool = False,
        group: str = "world",
    ) -> None:
        """On rank `dst` each array holds its sum over the group's ranks; elsewhere what it held."""
        members, arrays = self._members(group), _list_of(data)
        if not 0 <= dst < members.size:
            raise ValueError(f"dst is {dst}, but {group!r} has ranks 0 to {members.size - 1}")
        sums = ops.grouped_allreduce(_read(arrays), Average if division else Sum, group=members)
        if members.rank == dst:
            _write(arrays, sums)

    def bcast(self, data: Any, src: int, inplace: bool = False, group: str = "world") -> None:
        """Each array holds what it held on rank `src`."""
        ops.grouped_broadcast_(
            [array.data for array in _list_of(data)], src, group=self._members(group)
        )

    def all_gather(self, ndarray: Any, ndarray_list: Sequence[Any], group: str = "world") -> None:
        """`ndarray_list[r]` holds what `ndarray` holds on rank r."""
        mine = ndarray.get_data("r")
        _write(ndarray_list, ops.allgather(mine[None], group=self._members(group)))

    def reduce_scatter(
        self,
        ndarray_list: Sequence[Any],
        ndarray: Any,
        division: bool = False,
        group: str = "world",
    ) -> None:
        """`ndarray` holds, on rank r, the sum of the ranks' `ndarray_list[r]`."""
        parts = np.stack(_read(ndarray_list))
        op, members = Average if division else Sum, self._members(group)
        _write([ndarray], ops.reducescatter(parts, op, group=members))

    def barrier(self) -> None:
        """All ranks of the world have called this."""
        ops.barrier()

    def abort(self) -> NoReturn:
        """The job ends, on all ranks, with an exit code that is not 0."""
        abort("Communicator.abort() was called")

    def _members(self, group: str) -> Group:
        if group == "world":
            return world().group
        if group not in self._groups:
            raise ValueError(f"there is no group {group!r} among {', '.join(self.list_groups())}")
        ranks, members = self._groups[group]
        if not members:
            raise ValueError(f"rank {self.rank} is not in group {group!r}, which is ranks {ranks}")
        return members


class Arrays(NnablaAdapter):
    """Arrays whose values are exchanged as if they were gradients, and so are their parameters."""

    def gradient(self, parameter: NdArray) -> Any:
        return None if parameter.zeroing else memory_of(parameter)

    def set_gradient(self, parameter: NdArray, array: Any) -> None:
        parameter.data = array

    def value(self, parameter: NdArray) -> Any:
        return parameter.get_data("r")  # leaves alone what is zeroing


WATCH_DOG = "NNABLA_MPI_WATCH_DOG_ENABLE"
WATCH_DOG_TIMEOUT = "NNABLA_MPI_WATCH_DOG_TIMEOUT"


@contextmanager
def watch_dog() -> Iterator[None]:
    """NNabla's: where its variable turns it on, no reduction waits for longer than 60 seconds.

    Of other calls it knows nothing: `barrier()` is where its users let ranks wait for each other.
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
            f"{error}. NNabla's watch dog ({WATCH_DOG}) lets a reduction wait for {timeout_s:g} s: "
            f"set {WATCH_DOG_TIMEOUT} to more, or call barrier() before it where ranks come late"
        ) from None


def _list_of(data: Any) -> list[NdArray]:
    return [data] if isinstance(data, nn.NdArray) else list(data)


def _read(arrays: Sequence[NdArray]) -> list[Any]:
    return [array.get_data("r") for array in arrays]


def _write(arrays: Sequence[NdArray], values: Any) -> None:
    for array, value in zip(arrays, values, strict=True):
        array.data = value


# NNabla calls nothing of ours when backward() ends: `communicator_callbacks` is for C++ objects.
# It does call hooks: after each function of any pass, and before a solver touches a gradient.


class _Waiting:
    """An exchange that belongs to the next backward()."""

    def __init__(self, reducer: Reducer, arrays: list[NdArray]) -> None:
        self.reducer = reducer
        self.ticket: list[Any] = []  # NNabla's list of callbacks, in which there are none
        numbers = {array: i for i, array in enumerate(arrays)}
        self._backward = Backward(lambda: numbers, reducer.ready, self.finish)
        self._forward: set[Function] = set()

    def on_function(self, function: Function) -> None:
        if self._backward.is_running or not self._is_forward(function):
            self._backward(function)

    def _is_forward(self, function: Function) -> bool:
        """A forward pass begins where nothing comes before, and no function comes twice in it."""
        if not any(variable.parent for variable in function.inputs):
            self._forward = {function}
        elif self._forward and function not in self._forward:
            self._forward.add(function)
        else:
            return False
        return True

    def finish(self) -> None:
        """The arrays are reduced."""
        _waiting.remove(self)
        self.ticket.append(_UsedUp())  # NNabla has read the list already: for the second time
        with watch_dog():
            self.reducer.finish()


class _UsedUp:
    """What NNabla refuses, by name, where a callback is given to a second backward()."""


_UsedUp.__name__ = "all_reduce_callback_that_was_used_before_call_it_for_each_backward_anew"

_waiting: list[_Waiting] = []


def _waiting_for(reducer: Reducer, arrays: list[NdArray]) -> list[Any]:
    if not _hooks:
        _hooks.append(True)
        nn.set_function_post_hook("horo_lite", _on_function)
        nn.set_solver_pre_hook("horo_lite", _on_solver)
    for earlier in [each for each in _waiting if each.reducer is reducer]:  # was never used
        _waiting.remove(earlier)
        reducer.abandon()
    _waiting.append(_Waiting(reducer, arrays))
    return _waiting[-1].ticket


# Never removed: NNabla walks through its hooks while it calls them.
_hooks: list[bool] = []


def _on_function(function: Function) -> None:
    for each in tuple(_waiting):
        each.on_function(function)


def _on_solver() -> None:
    for each in tuple(_waiting):  # the pass was not recognised, or had nothing to do
        each.finish()
