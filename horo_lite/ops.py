"""The operations among ranks, as programs call them: `hvd.allreduce` and all the others.

Collectives take `group=`, by default all ranks of the world. What they are made of is in
`collectives/calls.py` and `messages.py`; here are the arguments, and what becomes of the arrays.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from horo_lite import arguments, context
from horo_lite.adapters import changed
from horo_lite.collectives.arrays import MEMORY, Array, array_of, copies_of, copy_of, results_of
from horo_lite.collectives.calls import (
    AllGather,
    AllGatherBytes,
    AllToAll,
    Barrier,
    Broadcast,
    BroadcastBytes,
    Part,
    rows_and_row,
)
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group, NullGroup
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import AllReduce, Average, Op, ReduceScatter
from horo_lite.errors import HoroLiteError

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
    """The group, or that of the world for None.

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
                f"{function.__name__}() takes no average=: write op=hvd.Average for "
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

    Every rank calls it, in the same order as its other direct calls. Sums are formed in rank
    order, in float32 (float64 for float64), so that all ranks and every run have the same bits.

    Args:
        x: An array (NumPy, DLPack or buffer protocol) or a number, of the same shape and
            dtype on every rank. Numbers are reduced as float64.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What messages and the timeline call the operation; the same on every rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        A new array of the kind of `x`; for a number, a number. No gradients flow
        through it, as through torch.distributed's: for that there are the operations of
        `horo_lite.torch`, `.jax` and `.tensorflow`.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: This cannot be reduced (objects, complex numbers); convert it.
    """
    (result,) = _reduced(
        AllReduce(name, op, compression, prescale_factor, postscale_factor), [x], group, weight
    )
    return result


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
    """Reduce an array over all ranks in place.

    Every rank calls it, in the same order as its other direct calls. See `allreduce`.

    Args:
        x: A writable array, of the same shape and dtype on every rank. It is changed in
            place.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What messages and the timeline call the operation; the same on every rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        `x` itself.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: `x` is a number or a list: use the call without the underscore.
        ValueError: The memory is read-only or shares elements: pass a writable copy, or use
            the call without the underscore.
    """
    _reduce_in_place(
        AllReduce(name, op, compression, prescale_factor, postscale_factor), [x], group, weight
    )
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
    """Reduce several arrays over all ranks, as one, into new ones.

    Every rank calls it, in the same order as its other direct calls. See `allreduce`.

    Args:
        xs: Arrays, as many on every rank, of the same shapes and dtypes there.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What messages and the timeline call the operation; the same on every rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        names: Names of the arrays for messages; the same on every rank.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        New arrays of the kinds of `xs`.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: This cannot be reduced (objects, complex numbers); convert it.
    """
    return _reduced(
        AllReduce(name, op, compression, prescale_factor, postscale_factor, names),
        arguments.several(xs),
        group,
        weight,
    )


@_explains_average
def grouped_allreduce_(
    xs: Sequence[Array],
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    weight: float | None = None,
    group: Group | None = None,
) -> list[Array]:
    """Reduce several arrays over all ranks, as one, in place.

    Every rank calls it, in the same order as its other direct calls. See `allreduce`.

    Args:
        xs: Writable arrays, as many on every rank, of the same shapes and dtypes there. No
            two of them share memory. They are changed in place.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What messages and the timeline call the operation; the same on every rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        `xs` themselves, as a list.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: One of them is a number or a list: use grouped_allreduce.
        ValueError: Two of them share memory, which would be reduced twice, or one is read-
            only: pass each memory once, or use grouped_allreduce.
    """
    xs = arguments.several(xs)
    _reduce_in_place(
        AllReduce(name, op, compression, prescale_factor, postscale_factor), xs, group, weight
    )
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
    """Begin `allreduce`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: An array (NumPy, DLPack or buffer protocol) or a number, of the same shape and
            dtype on every rank. Numbers are reduced as float64. It is copied: it may be
            changed at once.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is a new array.

    Raises:
        TypeError: This cannot be reduced (objects, complex numbers); convert it.
    """
    return _begin_reduced(
        AllReduce(name, op, compression, prescale_factor, postscale_factor),
        [x],
        group,
        lambda results: results[0],
        weight,
    )


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
    """Begin `allreduce_`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: A writable array, of the same shape and dtype on every rank. It is changed in
            place. Leave it alone until it is synchronized.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is `x`.

    Raises:
        TypeError: `x` is a number or a list: use the call without the underscore.
        ValueError: The memory is read-only or shares elements: pass a writable copy, or use
            the call without the underscore.
    """
    return _begin_in_place(
        AllReduce(name, op, compression, prescale_factor, postscale_factor),
        [x],
        group,
        lambda: x,
        weight,
    )


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
    """Begin `grouped_allreduce`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        xs: Arrays, as many on every rank, of the same shapes and dtypes there. They are
            copied.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        names: Names of the arrays for messages; the same on every rank.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is a list of new arrays.

    Raises:
        TypeError: This cannot be reduced (objects, complex numbers); convert it.
    """
    return _begin_reduced(
        AllReduce(name, op, compression, prescale_factor, postscale_factor, names),
        arguments.several(xs),
        group,
        list,
        weight,
    )


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
    """Begin `grouped_allreduce_`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        xs: Writable arrays, as many on every rank, of the same shapes and dtypes there. No
            two of them share memory. They are changed in place. Leave them alone until the
            handle is synchronized.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        names: Names of the arrays for messages; the same on every rank.
        weight: This rank's number of samples, given on every rank or on none, with op
            Average only: the average is then that over all samples.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is `xs` as a list.

    Raises:
        TypeError: One of them is a number or a list: use grouped_allreduce_async.
        ValueError: Two of them share memory, or one is read-only.
    """
    xs = arguments.several(xs)
    return _begin_in_place(
        AllReduce(name, op, compression, prescale_factor, postscale_factor, names),
        xs,
        group,
        lambda: list(xs),
        weight,
    )


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

    Every rank calls it, in the same order as its other direct calls. The first `len(x) % size`
    ranks get one row more than the others.

    Args:
        x: An array of at least one dimension, of the same shape and dtype on every rank.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What messages and the timeline call the operation; the same on every rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        group: The ranks that take part; all of the world by default.

    Returns:
        A new array: this rank's rows of what `allreduce(x)` gives. On CPUs nothing else
        travels. With fp16, whose blocks begin at each rank's first row then, small numbers
        may survive that an all-reduce loses beside large ones.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        ValueError: `x` has no dimension to be divided.
    """
    ranks = ranks_of(group)
    call = ReduceScatter(name, op, compression, prescale_factor, postscale_factor)
    [result], sources = results_of([x])
    rows = ranks.part_of(result)
    memory = ranks.memory([result], fresh=True, sources=sources)
    ranks.run(call, Part(memory))
    return memory.part(result, rows, x)


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
    """Begin `reducescatter`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: An array of at least one dimension, of the same shape and dtype on every rank. It
            is copied: it may be changed at once.
        op: How the ranks' values become one: `Average`, `Sum`, `Min`, `Max` or `Product`.
            Averages of integers are cut towards zero.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        compression: What travels: `Compression.none`, `.fp16` or `.bf16`; it narrows
            float32 and float64 only.
        prescale_factor: Multiplies what this rank contributes, in float32 (float64 for
            float64).
        postscale_factor: Multiplies the result before it is rounded to the dtype of the
            array.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is this rank's rows.

    Raises:
        ValueError: `x` has no dimension to be divided.
    """
    ranks = ranks_of(group)
    call = ReduceScatter(name, op, compression, prescale_factor, postscale_factor)
    rows = ranks.part_of(copy := copy_of(x))
    memory = ranks.memory([copy], fresh=True, asynchronous=True)
    return ranks.submit(call, Part(memory), lambda _: memory.part(copy, rows, x))


def allgather(x: Array, *, name: str | None = None, group: Group | None = None) -> Array:
    """Put all ranks' arrays one after the other.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        x: An array; only its first dimension may differ between ranks. A Python number (of
            the same type on every rank: ints become int64) or a zero-dimensional array is
            one row.
        name: What messages and the timeline call the operation; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A new array of all rows, in rank order.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
    """
    ranks, call = ranks_of(group), AllGather(name)
    rows = ranks.rows(x)
    return rows.result(ranks.run(call, Part(rows)), x)


def allgather_async(x: Array, *, name: str | None = None, group: Group | None = None) -> Handle:
    """Begin `allgather`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: An array; only its first dimension may differ between ranks. Leave it alone until
            it is synchronized.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is all rows, in rank order.
    """
    ranks, call = ranks_of(group), AllGather(name)
    rows = ranks.rows(x, asynchronous=True)
    return ranks.submit(call, Part(rows), lambda everyone: rows.result(everyone, x))


def broadcast(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """Copy one rank's array to all ranks, into new ones.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        x: An array of the same shape and dtype on every rank, or a number of the same type:
            a bool, an int of up to 64 bits or a float.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: What messages and the timeline call the operation; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A new array of what `x` is on rank `root_rank`; for a number, a number of that type.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
    """
    ranks = ranks_of(group)
    call = Broadcast(name, _root(root_rank, ranks))
    memory = ranks.memory([copy := copy_of(array_of(x))], fresh=True)
    ranks.run(call, Part(memory))
    return memory.result(copy, x)


def broadcast_(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """Copy one rank's array to all ranks in place.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        x: A writable array, of the same shape and dtype on every rank. It is changed in
            place.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: What messages and the timeline call the operation; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        `x` itself.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: `x` is a number or a list: use the call without the underscore.
        ValueError: The memory is read-only or shares elements: pass a writable copy, or use
            the call without the underscore.
    """
    ranks = ranks_of(group)
    ranks.run(Broadcast(name, _root(root_rank, ranks)), Part(ranks.memory([x])))
    changed([x])
    return x


def broadcast_async(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle:
    """Begin `broadcast`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: An array of the same shape and dtype on every rank, or a number. It is copied: it
            may be changed at once.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is a new array.
    """
    ranks = ranks_of(group)
    call = Broadcast(name, _root(root_rank, ranks))
    memory = ranks.memory([copy := copy_of(array_of(x))], fresh=True, asynchronous=True)
    return ranks.submit(call, Part(memory), lambda _: memory.result(copy, x))


def broadcast_async_(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Handle:
    """Begin `broadcast_`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: A writable array, of the same shape and dtype on every rank. It is changed in
            place. Leave it alone until it is synchronized.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is `x`.

    Raises:
        TypeError: `x` is a number or a list: use the call without the underscore.
        ValueError: The memory is read-only or shares elements: pass a writable copy, or use
            the call without the underscore.
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
    """Send several arrays of one rank to all, into the arrays that these pass.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        xs: Writable arrays, as many on every rank, of the same shapes and dtypes there. Some may
            share memory (tied weights), if they do so alike on all ranks.
        root_rank: The rank whose values all receive, 0 to size - 1.
        names: Names of the arrays for messages; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        The arrays that were passed, in a list.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: An item is a number or a list: use the call without the underscore.
        ValueError: Memory is read-only: pass a writable copy, or use the call without the
            underscore.
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
    """Send several arrays of one rank to all, into new ones.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        xs: Arrays, as many on every rank, of the same shapes and dtypes there.
        root_rank: The rank whose values all receive, 0 to size - 1.
        names: Names of the arrays for messages; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        New arrays, like `xs`.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
    """
    xs, ranks = arguments.several(xs), ranks_of(group)
    call = Broadcast(None, _root(root_rank, ranks), names)
    memory = ranks.memory(copies := [copy_of(array_of(x)) for x in xs], fresh=True)
    ranks.run(call, Part(memory))
    return [memory.result(copy, x) for copy, x in zip(copies, xs, strict=True)]


def alltoall(
    x: Array,
    splits: Sequence[int] | NDArray[Any] | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """Send some rows to each rank.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        x: An array whose dtype and shape but for the first dimension are the same on every
            rank.
        splits: How many rows of `x`, in order, go to each rank: `size` numbers that add up
            to `len(x)`. Without it each gets as many.
        name: What messages and the timeline call the operation; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        The rows that all ranks had for this one, in rank order; with `splits`, also how
        many came from each rank.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        ValueError: `splits` does not fit `x`.
    """
    ranks, call = ranks_of(group), AllToAll(name)
    rows = ranks.rows(x)
    part = Part(rows, splits=_splits(rows_and_row(rows)[0], splits, ranks.size))
    everyone, received = ranks.run(call, part)
    result = rows.result(everyone, x)
    return result if splits is None else (result, received)


def alltoall_async(
    x: Array,
    splits: Sequence[int] | NDArray[Any] | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Handle:
    """Begin `alltoall`.

    Return at once; every rank submits it, in any order, and synchronizes it. synchronize()
    raises what the direct call would.

    Args:
        x: An array whose dtype and shape but for the first dimension are the same on every
            rank. Leave it alone until it is synchronized.
        splits: How many rows of `x`, in order, go to each rank: `size` numbers that add up
            to `len(x)`. Without it each gets as many.
        name: What the operation is matched by; the same on every rank. Without one, it is
            matched by its number among the unnamed ones of this rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A handle for `synchronize` and `poll`. The result is that of `alltoall`.

    Raises:
        ValueError: `splits` does not fit `x`.
    """
    ranks, call = ranks_of(group), AllToAll(name)
    rows = ranks.rows(x, asynchronous=True)
    part = Part(rows, splits=_splits(rows_and_row(rows)[0], splits, ranks.size))

    def result(moved: tuple[Array, NDArray[np.int64]]) -> Any:
        everyone, received = moved
        result = rows.result(everyone, x)
        return result if splits is None else (result, received)

    return ranks.submit(call, part, result)


def barrier(*, group: Group | None = None) -> None:
    """Wait until all ranks have called this.

    Every rank calls it, in the same order as its other direct calls.

    Args:
        group: The ranks that take part; all of the world by default.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
    """
    ranks_of(group).run(Barrier(), Part())


def broadcast_object(
    obj: T, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> T:
    """Copy one rank's Python object to all ranks.

    Every rank calls it, in the same order as its other direct calls. It is pickled: receive
    from ranks that you trust.

    Args:
        obj: Any picklable object; what other ranks give is ignored.
        root_rank: The rank whose values all receive, 0 to size - 1.
        name: What messages and the timeline call the operation; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        The object of rank `root_rank`: there itself, elsewhere a copy.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: It cannot be pickled.
    """
    ranks = ranks_of(group)
    call = BroadcastBytes(name, _root(root_rank, ranks))
    if ranks.rank == call.root_rank:
        ranks.run(call, Part(data=pickled(obj, call.label)))
        return obj
    return cast("T", pickle.loads(ranks.run(call, Part())))


def allgather_object(obj: T, *, name: str | None = None, group: Group | None = None) -> list[T]:
    """Gather all ranks' Python objects.

    Every rank calls it, in the same order as its other direct calls. They are pickled.

    Args:
        obj: Any picklable object.
        name: What messages and the timeline call the operation; the same on every rank.
        group: The ranks that take part; all of the world by default.

    Returns:
        A list of them in rank order.

    Raises:
        MismatchError: The ranks differ in shapes, dtypes, names or options; raised on every
            rank, and the next call may be made.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: It cannot be pickled.
    """
    ranks, call = ranks_of(group), AllGatherBytes(name)
    everyone = ranks.run(call, Part(data=pickled(obj, call.label)))
    return [pickle.loads(one) for one in everyone]


def synchronize(handle: Handle, *, beside: bool = False, group: Group | None = None) -> Any:
    """Wait for an asynchronous operation.

    Every rank synchronizes what it has submitted; the order does not matter.

    Args:
        handle: What the `…_async` call returned. It may be synchronized again.
        beside: Whether this thread is another than the one that trains, which goes on
            meanwhile. On every rank one such thread at a time waits, for the same
            operations in the same order.
        group: The ranks that take part; all of the world by default.

    Returns:
        The operation's result.

    Raises:
        MismatchError: The ranks differ, or some did not submit the operation.
        PeerLostError: A rank died, left or failed. The group is of no more use.
        TypeError: `handle` is something else, such as the result of a direct call.
    """
    return ranks_of(group).synchronize(_handle(handle), beside=beside)


def poll(handle: Handle, *, group: Group | None = None) -> bool:
    """Tell whether an operation is over.

    Local: it waits for nobody.

    Args:
        handle: What the `…_async` call returned.
        group: The ranks that take part; all of the world by default.

    Returns:
        True where `synchronize(handle)` would return or raise at once.
    """
    return ranks_of(group).poll(_handle(handle))


# How reductions treat arrays.


def _reduced(
    call: AllReduce, xs: Sequence[Array], group: Group | None, weight: float | None = None
) -> list[Array]:
    """New arrays."""
    ranks = ranks_of(group)
    results, sources = results_of(xs)
    memory = ranks.memory(results, fresh=True, sources=sources)
    ranks.run(call, Part(memory, weight))
    return memory.results(results, xs)


def _begin_reduced(
    call: AllReduce,
    xs: Sequence[Array],
    group: Group | None,
    result: Callable[[list[Array]], Any],
    weight: float | None = None,
) -> Handle:
    ranks = ranks_of(group)
    copies = copies_of(xs)
    memory = ranks.memory(copies, fresh=True, asynchronous=True)

    def results(_: bool) -> Any:
        return result(memory.results(copies, xs))

    return ranks.submit(call, Part(memory, weight), results)


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
    """Wait until all ranks have called this, taking part in what the others do meanwhile.

    For uneven numbers of batches: a rank that has no more calls it, and until all have, it takes
    part in the others' operations without changing their results. In sums and averages it counts as
    zeros, and averages are still divided by the number of all ranks, as in Horovod; one that is
    weighted by numbers of samples, only by the samples that there are. In allgathers it has no
    rows, and it ignores broadcasts from others.

    Its own parameters stay behind meanwhile; those of the last rank have seen every step:

        for batch in batches:
            ...
        last = hvd.join()
        hvd.broadcast_parameters(model, root_rank=last)

    Broadcast the optimizer's state, and what else a step changes, likewise. Afterwards everything
    is as before, and a next epoch may end in another join(). It is also a barrier.

    Returns:
        The number of the last rank that called it, alike on all of them.

    Raises:
        MismatchError: On the ranks that call what needs every rank (a broadcast from one that has
            joined, alltoall, reducescatter, objects, a new process set, arrays on a GPU); the rank
            in join() goes on waiting.
        PeerLostError: A rank ended or failed meanwhile.
        HoroLiteError: There are process sets, and MPI was initialised without THREAD_MULTIPLE.
    """
    everyone, *parts = context.groups()
    if parts and not context.world().thread_multiple:
        raise HoroLiteError(
            "join() waits in every group of ranks at once, and MPI was initialised without "
            "THREAD_MULTIPLE: let horo_lite.init() initialise it, or do without process sets"
        )
    errors: list[BaseException] = []

    def join_part(part: Group) -> None:
        try:
            part.join()
        except BaseException as error:
            errors.append(error)

    # The others may operate among part of the ranks at any time, and wait for this one there.
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

    Only that rank takes part, in `recv`. Arrays above 3 KB wait until the receiver has them, so two
    ranks that first send such to each other and then receive wait for ever: one must use `isend`.
    Messages between two ranks with one `tag` are received in the order in which they were sent.

    Args:
        x: An array in the host's memory, or a number.
        dst: The rank that receives it.
        tag: Tells messages between the same two ranks apart.

    Raises:
        MismatchError: The receiver's array has another dtype or number of elements. Of small
            messages only the receiver knows.
        PeerLostError: `dst` has ended.
        ValueError: `x` is on a GPU: send a copy in the host's memory. Or `dst` is no other rank.
    """
    isend(x, dst, tag=tag).wait()


def recv(x: Array, src: int | None = None, *, tag: int = 0) -> int:
    """Receive into `x` what rank `src` has sent with this `tag`.

    Elements count in C order; shapes may differ.

    Args:
        x: A writable array in the host's memory, which is changed, with the dtype and number of
            elements of what was sent.
        src: The rank that sends it; None for any.
        tag: Tells messages between the same two ranks apart.

    Returns:
        The rank that sent it.

    Raises:
        MismatchError: What was sent has another dtype or number of elements; `x` is as before. If
            the message is large, the sender raises it, too.
        PeerLostError: `src` has ended without sending it.
        ValueError: `x` is on a GPU or read-only, or `src` is no other rank.
    """
    source = irecv(x, src, tag=tag).wait()
    assert source is not None
    return source


def isend(x: Array, dst: int, *, tag: int = 0) -> Message:
    """Begin to send `x` to rank `dst`; do not change `x` until `wait()` on the result has returned.

    As `send`. Every such message must be waited for, at the latest at the end of the program.

    Args:
        x: An array in the host's memory, or a number.
        dst: The rank that receives it.
        tag: Tells messages between the same two ranks apart.

    Returns:
        A message to wait for.
    """
    return context.messages().isend(x, dst, tag)


def irecv(x: Array, src: int | None = None, *, tag: int = 0) -> Message:
    """Begin to receive into `x`; `wait()` on the result returns the rank that sent it.

    As `recv`. Of several receives that accept a message, the one begun first gets it.

    Args:
        x: A writable array in the host's memory, to be left alone until it is received.
        src: The rank that sends it; None for any.
        tag: Tells messages between the same two ranks apart.

    Returns:
        A message to wait for.
    """
    return context.messages().irecv(x, src, tag)


# Arguments.


def _handle(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise TypeError(
            f"handle must be what an …_async call returned, not a {type(handle).__name__}: only "
            "those are synchronized"
        )
    return handle


def _root(root_rank: Any, group: Group) -> int:
    return arguments.rank("root_rank", root_rank, group.size)


def pickled(obj: object, label: str, pickler: type[pickle.Pickler] = pickle.Pickler) -> bytes:
    """`obj` as other ranks can load it; TypeError where that cannot be."""
    file = io.BytesIO()
    try:
        pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:
        raise TypeError(
            f"{label}: a {type(obj).__name__} cannot be sent to other processes ({error}): send "
            "what it is made of, such as numbers, arrays, lists or dicts"
        ) from error
    return file.getvalue()


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
            f"splits must be {size} numbers of rows, none negative, that add up to {rows}; "
            f"they are {np.asarray(splits).tolist()}"
        )
    return np.array(numbers, np.int64)
