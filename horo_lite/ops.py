"""The public operations between ranks: `hvd.allreduce` and all the others.

Collectives take `group=`, by default all ranks of the world. They are implemented in
`collectives/calls.py` and `messages.py`; this file handles arguments and arrays.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from horo_lite import arguments, context
from horo_lite.adapters import changed
from horo_lite.collectives.arrays import MEMORY, Array
from horo_lite.collectives.calls import (
    AllGather,
    AllGatherBytes,
    AllToAll,
    Barrier,
    Broadcast,
    BroadcastBytes,
    Call,
    Outcome,
    Part,
    rows_and_row,
)
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group, NullGroup
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import AllReduce, Average, Op, ReduceScatter
from horo_lite.errors import in_one_line
from horo_lite.transports.agreement import on_ranks

if TYPE_CHECKING:
    from horo_lite.messages import Message

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "irecv",
    "isend",
    "join",
    "poll",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "send",
    "synchronize",
]

P = ParamSpec("P")
T = TypeVar("T")

context.on_ended(MEMORY.clear)


def ranks_of(group: Group | NullGroup | None) -> Group:
    """Return the group, or the world's group for None.

    Raises:
        NotInitializedError: There is no world.
        ValueError: This rank is not in the group.
        TypeError: It is not a group.
    """
    if group is None:
        return context.world().group
    if isinstance(group, NullGroup):
        group.refuse()
    if not isinstance(group, Group):
        raise TypeError(
            f"group must be what new_group() returned, or None for all ranks, not {group!r}"
        )
    return group


def _explains_average(function: Callable[P, T]) -> Callable[P, T]:
    """Explain what replaces Horovod's old `average=`."""

    @wraps(function)
    def _call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "average" in kwargs:
            raise TypeError(
                f"{function.__name__}() takes no average=: use op=hvd.Average for "
                "average=True, op=hvd.Sum for average=False"
            )
        return function(*args, **kwargs)

    return _call


@_explains_average
def allreduce(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: float | None = None,
    group: Group | None = None,
) -> Array:
    """Reduce an array over all ranks into a new one.

    Every rank calls it, in the same order as its other blocking calls. Sums are computed in rank
    order, in float32 (float64 for float64), so all ranks and all runs get the same bits.

    Args:
        x: An array (NumPy, DLPack or buffer protocol) or a number, of the same shape and
            dtype on every rank. Numbers are reduced as float64.
        op: How the ranks' values are combined: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are truncated towards zero.
        name: The operation's name in messages and the timeline; the same on every rank.
        compression: The wire format: `Compression.none`, `.fp16` or `.bf16`; narrows only
            float32 and float64.
        prescale_factor: Multiplies this rank's contribution, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the result is then the average over all samples.
        group: The ranks that take part; by default all.

    Returns:
        A new array of the kind of `x`; for a number, a number. As in torch.distributed, it
        is not differentiable; use the operations of `horo_lite.torch`, `.jax` and
        `.tensorflow` for that.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
        TypeError: It is an array of Python objects: convert it, or use allgather_object.
        ValueError: There is no such reduction of this dtype (bool has no average and takes no
            factors; complex numbers have only Sum and Average; bytes, dates and float8 none), or
            every rank's weight is 0; raised on every rank.
    """
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor)
    return _reduced(call, [x], group, weight)[0]


@_explains_average
def allreduce_(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: float | None = None,
    group: Group | None = None,
) -> Array:
    """Reduce an array over all ranks in place: `allreduce` into `x`, which it returns.

    Raises:
        TypeError: `x` is a number or a list: use `allreduce`.
        ValueError: The memory is read-only or shares elements: pass a writable copy, or use
            `allreduce`.
    """
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor)
    _reduce_in_place(call, [x], group, weight)
    return x


@_explains_average
def grouped_allreduce(
    xs: Sequence[Array],
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    names: Sequence[str] = (),
    weight: float | None = None,
    group: Group | None = None,
) -> list[Array]:
    """Reduce several arrays over all ranks, in one operation; return new arrays in a list.

    As `allreduce` of each of `xs`, whose number, shapes and dtypes are the same on every rank.
    `names` are the arrays' names in messages, the same on every rank.
    """
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor, names)
    return _reduced(call, arguments.several(xs), group, weight)


@_explains_average
def grouped_allreduce_(
    xs: Sequence[Array],
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    names: Sequence[str] = (),
    weight: float | None = None,
    group: Group | None = None,
) -> list[Array]:
    """Reduce several arrays over all ranks, in one operation, in place; return `xs` as a list.

    As `allreduce_` of each of `xs`, whose number, shapes and dtypes are the same on every rank.
    `names` are the arrays' names in messages, the same on every rank.

    Raises:
        TypeError: One of them is a number or a list: use `grouped_allreduce`.
        ValueError: Two of them share memory, which would be reduced twice, or one is
            read-only: pass each array once, or use `grouped_allreduce`.
    """
    xs = arguments.several(xs)
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor, names)
    _reduce_in_place(call, xs, group, weight)
    return xs


@_explains_average
def allreduce_async(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: float | None = None,
    group: Group | None = None,
) -> Handle:
    """Begin `allreduce`, and return at once a handle for `synchronize` and `poll`.

    Every rank submits the operation, in any order, and synchronizes it, which returns the result or
    raises the errors of `allreduce`. It is matched among the ranks by `name`, by default by its
    number among this rank's unnamed operations. `x` is copied, and may be changed at once.

    Raises:
        TypeError: It is an array of Python objects: convert it, or use allgather_object.
        ValueError: There is no such reduction of this dtype: see `allreduce`.
    """
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor)
    return _begin_reduced(call, [x], group, lambda results: results[0], weight)


@_explains_average
def allreduce_async_(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: float | None = None,
    group: Group | None = None,
) -> Handle:
    """Begin `allreduce_`, as `allreduce_async` begins `allreduce`.

    Do not use `x` until it is synchronized, which returns it. Raises the errors of `allreduce_`
    that concern this rank's `x`.
    """
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor)
    return _begin_in_place(call, [x], group, lambda: x, weight)


@_explains_average
def grouped_allreduce_async(
    xs: Sequence[Array],
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    names: Sequence[str] = (),
    weight: float | None = None,
    group: Group | None = None,
) -> Handle:
    """Begin `grouped_allreduce`, as `allreduce_async` begins `allreduce`.

    The arrays are copied.
    """
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor, names)
    return _begin_reduced(call, arguments.several(xs), group, list, weight)


@_explains_average
def grouped_allreduce_async_(
    xs: Sequence[Array],
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    names: Sequence[str] = (),
    weight: float | None = None,
    group: Group | None = None,
) -> Handle:
    """Begin `grouped_allreduce_`, as `allreduce_async` begins `allreduce`.

    Do not use the arrays until they are synchronized, which returns them in a list. `names` are
    their names in messages, the same on every rank. Raises the errors of `grouped_allreduce_` that
    concern this rank's arrays.
    """
    xs = arguments.several(xs)
    call = AllReduce(name, op, compression, prescale_factor, postscale_factor, names)
    return _begin_in_place(call, xs, group, lambda: list(xs), weight)


@_explains_average
def reducescatter(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: Group | None = None,
) -> Array:
    """Reduce an array over all ranks, and keep this rank's part of the rows.

    Every rank calls it, in the same order as its other blocking calls. The first `len(x) % size`
    ranks get one row more than the others.

    Args:
        x: An array of at least one dimension, of the same shape and dtype on every rank.
        op: How the ranks' values are combined: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are truncated towards zero.
        name: The operation's name in messages and the timeline; the same on every rank.
        compression: The wire format: `Compression.none`, `.fp16` or `.bf16`; narrows only
            float32 and float64.
        prescale_factor: Multiplies this rank's contribution, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        group: The ranks that take part; by default all.

    Returns:
        A new array: this rank's rows of `allreduce(x)`; no others are sent to it. With fp16 on
        CPUs, the blocks begin at each rank's first row, so small numbers may be preserved
        that an all-reduce loses next to large ones.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
        ValueError: `x` has no dimension to be divided.
    """
    ranks = ranks_of(group)
    call = ReduceScatter(name, op, compression, prescale_factor, postscale_factor)
    memory = ranks.results([x])
    rows = ranks.part_of(memory.arrays[0])
    ranks.run(call, Part(memory))
    return memory.part(rows)


@_explains_average
def reducescatter_async(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: Group | None = None,
) -> Handle:
    """Begin `reducescatter`, as `allreduce_async` begins `allreduce`. `x` is copied."""
    ranks = ranks_of(group)
    call = ReduceScatter(name, op, compression, prescale_factor, postscale_factor)
    memory = ranks.results([x], asynchronous=True)
    rows = ranks.part_of(memory.arrays[0])
    return ranks.submit(call, Part(memory), lambda _: memory.part(rows))


def allgather(x: Array, *, name: str | None = None, group: Group | None = None) -> Array:
    """Concatenate all ranks' arrays along the first dimension.

    Every rank calls it, in the same order as its other blocking calls.

    Args:
        x: An array; only its first dimension may differ between ranks. A Python number (of
            the same type on every rank: ints become int64) or a zero-dimensional array is
            one row.
        name: The operation's name in messages and the timeline; the same on every rank.
        group: The ranks that take part; by default all.

    Returns:
        A new array of all rows, in rank order.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
    """
    ranks, call = ranks_of(group), AllGather(name)
    rows = ranks.rows(x)
    return rows.result(ranks.run(call, Part(rows)))


def allgather_async(x: Array, *, name: str | None = None, group: Group | None = None) -> Handle:
    """Begin `allgather`, as `allreduce_async` begins `allreduce`.

    Do not change `x` until it is synchronized.
    """
    ranks, call = ranks_of(group), AllGather(name)
    rows = ranks.rows(x, asynchronous=True)
    return ranks.submit(call, Part(rows), rows.result)


def broadcast(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """Copy one rank's array to all ranks, into new ones.

    Every rank calls it, in the same order as its other blocking calls.

    Args:
        x: An array of the same shape and dtype on every rank, or a number of the same type:
            a bool, an int of up to 64 bits or a float.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: The operation's name in messages and the timeline; the same on every rank.
        group: The ranks that take part; by default all.

    Returns:
        A new array with the values of rank `root_rank`; for a number, a number of that type.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
    """
    ranks = ranks_of(group)
    call = Broadcast(name, _root(root_rank, ranks))
    memory = ranks.results([x], reduced=False)
    ranks.run(call, Part(memory))
    return memory.results()[0]


def broadcast_(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """Copy one rank's array to all ranks in place: `broadcast` into `x`, which it returns.

    Raises:
        TypeError: `x` is a number or a list: use `broadcast`.
        ValueError: The memory is read-only or shares elements: pass a writable copy, or use
            `broadcast`.
    """
    ranks = ranks_of(group)
    ranks.run(Broadcast(name, _root(root_rank, ranks)), Part(ranks.memory([x])))
    changed([x])
    return x


def broadcast_async(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle:
    """Begin `broadcast`, as `allreduce_async` begins `allreduce`. `x` is copied."""
    ranks = ranks_of(group)
    call = Broadcast(name, _root(root_rank, ranks))
    memory = ranks.results([x], asynchronous=True, reduced=False)
    return ranks.submit(call, Part(memory), lambda _: memory.results()[0])


def broadcast_async_(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle:
    """Begin `broadcast_`, as `allreduce_async` begins `allreduce`.

    Do not use `x` until it is synchronized, which returns it. Raises the errors of `broadcast_`
    that concern this rank's `x`.
    """
    ranks = ranks_of(group)
    call = Broadcast(name, _root(root_rank, ranks))
    part = Part(ranks.memory([x], asynchronous=True))
    return ranks.submit(call, part, lambda _: _changed([x], x))


def grouped_broadcast_(
    xs: Sequence[Array],
    root_rank: int = 0,
    *,
    names: Sequence[str] = (),
    group: Group | None = None,
) -> list[Array]:
    """Copy several arrays of one rank to all ranks, in one operation, in place; return a list.

    As `broadcast_` of each of `xs`, whose number, shapes and dtypes are the same on every rank.
    Some may share memory (tied weights), if they do so in the same way on all ranks. `names` are
    the arrays' names in messages, the same on every rank.
    """
    xs, ranks = arguments.several(xs), ranks_of(group)
    call = Broadcast(None, _root(root_rank, ranks), names)
    ranks.run(call, Part(ranks.memory(xs)))
    changed(xs)
    return xs


def grouped_broadcast(
    xs: Sequence[Array],
    root_rank: int = 0,
    *,
    names: Sequence[str] = (),
    group: Group | None = None,
) -> list[Array]:
    """Copy several arrays of one rank to all ranks, in one operation; return new arrays in a list.

    As `broadcast` of each of `xs`, whose number, shapes and dtypes are the same on every rank.
    `names` are the arrays' names in messages, the same on every rank.
    """
    xs, ranks = arguments.several(xs), ranks_of(group)
    call = Broadcast(None, _root(root_rank, ranks), names)
    memory = ranks.results(xs, reduced=False)
    ranks.run(call, Part(memory))
    return memory.results()


def alltoall(
    x: Array,
    splits: Sequence[int] | NDArray[Any] | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """Send some rows to each rank, and receive rows from each.

    Every rank calls it, in the same order as its other blocking calls.

    Args:
        x: An array whose dtype and shape, except the first dimension, are the same on every
            rank.
        splits: How many rows of `x`, in order, go to each rank: `size` numbers that add up
            to `len(x)`. By default each gets the same number.
        name: The operation's name in messages and the timeline; the same on every rank.
        group: The ranks that take part; by default all.

    Returns:
        The rows that all ranks sent to this one, in rank order; with `splits`, also how
        many came from each rank.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
        ValueError: `splits` does not fit `x`.
    """
    ranks, call = ranks_of(group), AllToAll(name)
    rows = ranks.rows(x)
    part = Part(rows, splits=_splits(rows_and_row(rows)[0], splits, ranks.size))
    everyone, received = ranks.run(call, part)
    result = rows.result(everyone)
    return result if splits is None else (result, received)


def alltoall_async(
    x: Array,
    splits: Sequence[int] | NDArray[Any] | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Handle:
    """Begin `alltoall`, as `allreduce_async` begins `allreduce`.

    Do not change `x` until it is synchronized.

    Raises:
        ValueError: `splits` does not fit `x`.
    """
    ranks, call = ranks_of(group), AllToAll(name)
    rows = ranks.rows(x, asynchronous=True)
    part = Part(rows, splits=_splits(rows_and_row(rows)[0], splits, ranks.size))

    def result(moved: tuple[Array, NDArray[np.int64]]) -> Any:
        everyone, received = moved
        result = rows.result(everyone)
        return result if splits is None else (result, received)

    return ranks.submit(call, part, result)


def barrier(*, group: Group | None = None) -> None:
    """Wait until all ranks have called this.

    Every rank calls it, in the same order as its other blocking calls.

    Args:
        group: The ranks that take part; by default all.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
    """
    ranks_of(group).run(Barrier(), Part())


def broadcast_object(
    obj: T, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> T:
    """Copy one rank's Python object to all ranks.

    Every rank calls it, in the same order as its other blocking calls. Objects are pickled: receive
    only from ranks that you trust.

    Args:
        obj: Any picklable object; ignored on ranks other than the root.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: The operation's name in messages and the timeline; the same on every rank.
        group: The ranks that take part; by default all.

    Returns:
        The object of rank `root_rank`: on that rank itself, on others a copy.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
        TypeError: The object cannot be pickled, or cannot be unpickled on a rank; raised on every
            rank; further calls are possible.
    """
    return broadcast_made(lambda: obj, root_rank, name=name, group=group)


def broadcast_made(
    make: Callable[[], T], root_rank: int, *, name: str | None = None, group: Group | None = None
) -> T:
    """Return, on every rank, the object that `make` returns on rank `root_rank`.

    Only the root calls `make`. If that fails, every rank raises TypeError.
    """
    ranks = ranks_of(group)
    call = BroadcastBytes(name, _root(root_rank, ranks))
    if ranks.rank != call.root_rank:
        (received,) = transfer_objects(ranks, call)
        return cast("T", received)
    made: list[T] = []

    def kept() -> T:
        made.append(make())
        return made[0]

    transfer_objects(ranks, call, kept)
    return made[0]


def allgather_object(obj: T, *, name: str | None = None, group: Group | None = None) -> list[T]:
    """Gather all ranks' Python objects.

    Every rank calls it, in the same order as its other blocking calls. Objects are pickled.

    Args:
        obj: Any picklable object.
        name: The operation's name in messages and the timeline; the same on every rank.
        group: The ranks that take part; by default all.

    Returns:
        A list of the objects in rank order.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank; further calls are possible.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
        TypeError: A rank's object cannot be pickled, or cannot be unpickled on a rank; raised on
            every rank; further calls are possible.
    """
    return transfer_objects(ranks_of(group), AllGatherBytes(name), lambda: obj)


def transfer_objects(
    group: Group,
    call: Call[Any],
    make: Callable[[], Any] | None = None,
    *,
    by_name: bool = False,
    pickler: type[pickle.Pickler] = pickle.Pickler,
) -> list[Any]:
    """Return the objects that ranks send in `call`.

    Making, pickling and unpickling them can fail on some ranks alone. So the ranks compare their
    outcomes afterwards: either all return, or all raise.

    Args:
        group: The ranks, all of which call it.
        call: A `BroadcastBytes` or `AllGatherBytes`.
        make: Returns this rank's object; None on a rank that only receives.
        by_name: Whether it is matched by name, and not by its position among blocking calls.
        pickler: Pickles the object.

    Raises:
        TypeError: It failed on a rank; raised on every rank.
    """

    def run(call: Call[Any], part: Part) -> Any:
        if by_name:
            return group.synchronize(group.submit(call, part))
        return group.run(call, part)

    part, failure, received = Part(), None, []
    try:
        if make is not None:
            part.data = _pickled(make(), pickler)
    except Exception as error:
        failure = error
    with nullcontext() if by_name else group.uninterrupted():
        everyone = run(call, part)
        try:
            if failure is None:
                received = [_unpickled(one) for one in everyone if one]
        except Exception as error:
            failure = error
        text = "" if failure is None else in_one_line(failure)
        outcome = Outcome(f"{part.label}, received")
        texts = run(outcome, Part(data=text.encode()))
    if any(texts):
        failures = on_ranks(group.transport.ranks, [one.decode() for one in texts])
        raise TypeError(f"{part.label} has failed: {failures}") from failure
    return received


def synchronize(handle: Handle, *, beside: bool = False, group: Group | None = None) -> Any:
    """Wait for an asynchronous operation.

    Every rank synchronizes all operations that it submitted, in any order.

    Args:
        handle: What the `…_async` call returned. It may be synchronized again.
        beside: Whether this is not the training thread, which continues meanwhile. On every
            rank at most one such thread waits at a time, for the same operations in the
            same order.
        group: The ranks that take part; by default all.

    Returns:
        The operation's result.

    Raises:
        MismatchError: The ranks' calls differ, or some ranks did not submit the operation.
        PeerLostError: A rank died, left or failed. The group can no longer be used.
        TypeError: `handle` is not a handle but, for example, the result of a blocking call.
    """
    return ranks_of(group).synchronize(_handle(handle), beside=beside)


def poll(handle: Handle, *, group: Group | None = None) -> bool:
    """Return whether an operation has ended.

    Local: it waits for no other rank.

    Args:
        handle: What the `…_async` call returned.
        group: The ranks that take part; by default all.

    Returns:
        True if `synchronize(handle)` would return or raise at once.
    """
    return ranks_of(group).poll(_handle(handle))


# How reductions treat arrays.


def _reduced(
    call: AllReduce, xs: Sequence[Array], group: Group | None, weight: float | None = None
) -> list[Array]:
    """New arrays."""
    ranks = ranks_of(group)
    memory = ranks.results(xs)
    ranks.run(call, Part(memory, weight))
    return memory.results()


def _begin_reduced(
    call: AllReduce,
    xs: Sequence[Array],
    group: Group | None,
    result: Callable[[list[Array]], Any],
    weight: float | None = None,
) -> Handle:
    ranks = ranks_of(group)
    memory = ranks.results(xs, asynchronous=True)
    return ranks.submit(call, Part(memory, weight), lambda _: result(memory.results()))


def _reduce_in_place(
    call: AllReduce, xs: Sequence[Array], group: Group | None, weight: float | None
) -> None:
    ranks = ranks_of(group)
    ranks.run(call, Part(ranks.memory(xs), weight))
    changed(xs)


def _begin_in_place(
    call: AllReduce,
    xs: Sequence[Array],
    group: Group | None,
    result: Callable[[], Any],
    weight: float | None = None,
) -> Handle:
    ranks = ranks_of(group)
    part = Part(ranks.memory(xs, asynchronous=True), weight)
    return ranks.submit(call, part, lambda _: _changed(xs, result()))


def _changed(xs: Sequence[Array], result: T) -> T:
    changed(xs)
    return result


# Ranks without more batches.


def join() -> int:
    """Wait until all ranks have called this, taking part in the others' operations meanwhile.

    For uneven numbers of batches: a rank without further batches calls it and, until all have done
    so, takes part in the others' operations without changing their results. In sums and averages it
    contributes zeros, and averages are still divided by the number of all ranks, as in Horovod;
    averages weighted by numbers of samples are divided only by the actual samples. In allgathers it
    has no rows, and it ignores broadcasts from others.

    Its own parameters are not updated meanwhile; those of the last rank have seen every step:

        for batch in batches:
            ...
        last = hvd.join()
        hvd.broadcast_parameters(model, root_rank=last)

    Broadcast the optimizer's state, and anything else that a step changes, in the same way.
    Afterwards everything is as before, and the next epoch may end in another join(). It is also a
    barrier.

    Returns:
        The last rank that called it, the same on all ranks.

    Raises:
        MismatchError: On ranks that call an operation that needs every rank (a broadcast from one
            that has joined, alltoall, reducescatter, objects, a new process set, arrays on a GPU);
            the rank in join() keeps waiting.
        PeerLostError: A rank ended or failed meanwhile.
    """
    everyone, *parts = context.groups()
    context.notify_ending()  # what is in progress is not part of what the others do without it
    errors: list[BaseException] = []

    def join_part(part: Group) -> None:
        try:
            part.join()
        except BaseException as error:
            errors.append(error)

    # The others may call operations of a subgroup at any time, and wait for this rank there.
    threads = [
        threading.Thread(target=join_part, args=(part,), name="horo_lite join", daemon=True)
        for part in parts
    ]
    for thread in threads:
        thread.start()
    last = everyone.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return everyone.transport.ranks[last]


# Messages from one rank to another.


def send(x: Array, dst: int, *, tag: int = 0) -> None:
    """Send `x` to rank `dst`; `x` may be changed on return.

    Only that rank takes part, with `recv`. With arrays above 3 KB it waits until the receiver has
    them, so two ranks that first send such arrays to each other, and then receive, deadlock: one of
    them must use `isend`. Messages between two ranks with the same `tag` are received in the order
    in which they were sent.

    Args:
        x: An array in host memory, or a number.
        dst: The rank that receives it.
        tag: Distinguishes messages between the same two ranks.

    Raises:
        MismatchError: The receiver's array has another dtype or number of elements. For small
            messages, only the receiver raises it.
        PeerLostError: `dst` has ended.
        ValueError: `x` is on a GPU: send a copy in host memory. Or `dst` is not another rank.
    """
    isend(x, dst, tag=tag).wait()


def recv(x: Array, src: int | None = None, *, tag: int = 0) -> int:
    """Receive into `x` a message that rank `src` has sent with this `tag`.

    Elements are in C order; shapes may differ.

    Args:
        x: A writable array in host memory, which is changed; its dtype and number of elements must
            be those of the array that was sent.
        src: The rank that sends it; None for any.
        tag: Distinguishes messages between the same two ranks.

    Returns:
        The rank that sent it.

    Raises:
        MismatchError: The message has another dtype or number of elements; `x` is not changed. If
            the message is large, the sender raises it, too.
        PeerLostError: `src` has ended without sending it.
        ValueError: `x` is on a GPU or read-only, or `src` is not another rank.
    """
    return context.messages().recv(x, src, tag)


def isend(x: Array, dst: int, *, tag: int = 0) -> Message:
    """Begin to send `x` to rank `dst`; do not change `x` until `wait()` on the result has returned.

    Like `send`. Every such message must be waited for, at the latest at the end of the program.

    Args:
        x: An array in host memory, or a number.
        dst: The rank that receives it.
        tag: Distinguishes messages between the same two ranks.

    Returns:
        A message to wait for.
    """
    return context.messages().isend(x, dst, tag)


def irecv(x: Array, src: int | None = None, *, tag: int = 0) -> Message:
    """Begin to receive into `x`; `wait()` on the result returns the rank that sent it.

    Like `recv`. If several receives accept a message, the one begun first gets it. It arrives
    whatever this rank does meanwhile, such as waiting in a collective.

    Args:
        x: A writable array in host memory. Do not use it until the message is received.
        src: The rank that sends it; None for any.
        tag: Distinguishes messages between the same two ranks.

    Returns:
        A message to wait for.
    """
    return context.messages().irecv(x, src, tag)


# Arguments.


def _handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"handle must be what an …_async call returned, not a {type(handle).__name__}: other "
            "calls need no synchronize()"
        )
    return handle


def _root(root_rank: Any, group: Group) -> int:
    return arguments.rank("root_rank", root_rank, group.size)


def _pickled(obj: object, pickler: type[pickle.Pickler]) -> bytes:
    file = io.BytesIO()
    try:
        pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:
        raise TypeError(
            f"a {type(obj).__name__} cannot be sent to other processes ({error}): send "
            "its contents as numbers, arrays, lists or dicts"
        ) from error
    return file.getvalue()


def _unpickled(data: bytes | memoryview) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise TypeError(
            f"an object that was sent cannot be read here ({in_one_line(error)}): every rank must "
            "be able to import its classes, and to create it"
        ) from error


def _splits(rows: int, splits: Sequence[int] | NDArray[Any] | None, size: int) -> NDArray[np.int64]:
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits needs a multiple of {size} rows, not {rows}")
        return np.full(size, rows // size, np.int64)
    if not np.ndim(splits):
        raise TypeError(f"splits must be a sequence of integers, not {splits!r}")
    numbers = [arguments.integer("splits", n) for n in np.asarray(splits).reshape(-1).tolist()]
    if np.shape(splits) != (size,) or min(numbers) < 0 or sum(numbers) != rows:
        raise ValueError(
            f"splits must be {size} non-negative numbers of rows that add up to {rows}, not "
            f"{np.asarray(splits).tolist()}"
        )
    return np.array(numbers, np.int64)
