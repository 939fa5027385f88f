"""Operations among ranks as functions of JAX arrays: eagerly, inside jit, differentiable.

Every rank calls them with the same options. Arrays of one shape and dtype on all ranks, unless said
otherwise; results are new arrays. Outside jit calls are matched by position, as those of
`horo_lite`. Inside jit they run when the compiled function does, one after the other in the order
of the program, however XLA arranges the rest; they are matched by that order among themselves.

`name` is for messages. `group` is a set of ranks; by itself, all of them.

Gradients are exact: that of an operation is its adjoint, so that a rank gets the derivative of the
sum of all ranks' losses by its own input. `horo_lite.torch` and `horo_lite.tensorflow`, whose
functions have Horovod's names, scale some of them as Horovod does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax.numpy as jnp

from horo_lite import ops
from horo_lite.adapters.jax import named_arrays
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op
from horo_lite.jax.calls import Allgather, Allreduce, Alltoall, Broadcast, Call
from horo_lite.jax.primitive import bind, is_traced

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "broadcast",
    "grouped_allreduce",
    "reducescatter",
]

Tree = TypeVar("Tree")
Array = Any  # jax.Array, traced or not; NumPy arrays and numbers


def allreduce(
    x: Array,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: Group | None = None,
) -> Array:
    """The op over all ranks' `x`; see `horo_lite.allreduce`.

    The gradient of a sum or an average is the same op of the ranks' cotangents; other ops have
    none.

    Args:
        x: Of the same shape and dtype on every rank.
        op: Average, Sum, Min, Max or Product.
        name: For messages.
        compression: What travels, such as Compression.fp16.
        prescale_factor: Multiplies what this rank contributes.
        postscale_factor: Multiplies the result.
        group: The ranks; default all.
    """
    return grouped_allreduce(
        x,
        op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        group=group,
    )


def grouped_allreduce(
    xs: Tree,
    op: Op = Average,
    *,
    name: str | None = None,
    compression: Compressor = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    group: Group | None = None,
) -> Tree:
    """The op over all ranks' `xs`, a list or any other pytree of arrays, reduced as one.

    The other arguments are those of `allreduce`.
    """
    return _reduced(
        xs,
        Allreduce(name, group, op, compression, prescale_factor, postscale_factor),
    )


def average_gradients(
    tree: Tree,
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    weight: Array | None = None,
    name: str | None = None,
    group: Group | None = None,
) -> Tree:
    """`tree` with the average (or sum) over all ranks in place of every array.

    Args:
        tree: Any pytree, as `jax.grad` returns it; leaves that are not arrays, and equal on all
            ranks anyway, stay as they are.
        op: Average or Sum.
        compression: What travels; `Compression.fp16` halves the bytes.
        weight: On every rank or on none, what this rank's gradients count: its number of samples,
            a number or a traced scalar.
        name: For messages.
        group: The ranks; default all.

    Raises:
        MismatchError: Naming the first leaf of which the ranks have something else.
    """
    if weight is not None and op is not Average:
        raise ValueError(f"a weight needs op=Average; with op={op} it has no meaning")
    return _reduced(tree, Allreduce(name or "gradients", group, op, compression), weight)


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
    """This rank's rows of `allreduce(x)`; see `horo_lite.reducescatter`.

    The gradient is all ranks' cotangents, one after the other, for an average divided by the number
    of ranks. The arguments are those of `allreduce`.
    """
    part = ops.ranks_of(group).part_of(x)
    call = Allreduce(name, group, op, compression, prescale_factor, postscale_factor)
    return _reduced(x, call.here())[part]


def allgather(x: Array, *, name: str | None = None, group: Group | None = None) -> Array:
    """All ranks' `x`, one after the other along the first dimension.

    Inside jit, where shapes are known beforehand, all ranks have as many rows. The gradient of `x`
    is the sum over all ranks of its rows' cotangents.

    Args:
        x: Alike on every rank in dtype and all dimensions; outside jit, in all but the first.
        name: For messages.
        group: The ranks; default all.
    """
    return _one(x, Allgather(name, group))


def broadcast(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """What `x` is on rank `root_rank`.

    The gradient is the sum of all ranks' cotangents on that rank, and zeros elsewhere.

    Args:
        x: Of the same shape and dtype on every rank.
        root_rank: Whose; among the ranks of `group`, if that is given.
        name: For messages.
        group: The ranks; default all.
    """
    return _one(x, Broadcast(name, group, root_rank))


def alltoall(
    x: Array,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """The rows that all ranks had for this one, in rank order; see `horo_lite.alltoall`.

    Inside jit without `splits`: every rank gets as many rows. The gradient goes the way back.

    Args:
        x: Alike on every rank in dtype and all dimensions but the first.
        splits: How many rows go to each rank, in order; without it, each gets as many.
        name: For messages.
        group: The ranks; default all.

    Returns:
        The received rows; with `splits`, a pair of these and how many came from each rank.
    """
    if splits is not None:
        if is_traced([x]):
            raise ValueError(
                "alltoall inside jit takes no splits, since the shape of the result must be known "
                "beforehand: call it outside, or send each rank as many rows, some of them padding"
            )
        return ops.alltoall(x, splits, name=name, group=group)
    return _one(x, Alltoall(name, group))


def _reduced(tree: Tree, call: Allreduce, weight: Array | None = None) -> Tree:
    named, rebuilt = named_arrays(tree)
    names = () if [name for name, _ in named] == [""] else tuple(name for name, _ in named)
    xs = [x for _, x in named]
    if is_traced(xs):  # numbers are reduced as floats, as they are outside
        xs = [float(x) if isinstance(x, (bool, int)) else x for x in xs]
    if weight is not None:
        xs.append(jnp.asarray(weight, float))
    return rebuilt(bind(replace(call, names=names, weighted=weight is not None), xs))


def _one(x: Array, call: Call) -> Array:
    (result,) = bind(call, [x])
    return result
