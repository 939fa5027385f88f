"""Operations among ranks as functions of JAX arrays: eagerly, inside jit, differentiable.

Every rank calls them with the same options. Arrays of one shape and dtype on all ranks, unless said
otherwise; results are new arrays. Outside jit calls are matched by position, as those of
`horo_lite`. Inside jit they run when the compiled function does, one after the other in the order
of the program, however XLA arranges the rest; they are matched by that order among themselves.

`name` is for messages. `group` is a set of ranks; by itself, all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from horo_lite.collectives import Average, Group, Op
from horo_lite.compression import Compression, Compressor
from horo_lite.jax.calls import Allgather, Allreduce, Alltoall, Broadcast, Call, ranks_of
from horo_lite.jax.primitive import bind
from horo_lite.jax.trees import named_arrays

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
    """The op over all ranks' `xs`, a list or any other pytree of arrays, reduced as one."""
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

    `tree` is any pytree, as `jax.grad` returns it; leaves that are no arrays, and equal on all
    ranks anyway, stay as they are. `weight`, on every rank or on none, is what this rank's
    gradients count: its number of samples, a number or a traced scalar. MismatchError names the
    first leaf of which the ranks have something else.
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
    """This rank's rows of `allreduce(x)`; see `horo_lite.reducescatter`."""
    part = ranks_of(group).part_of(x)
    whole = allreduce(
        x,
        op,
        name=name,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        group=group,
    )
    return whole[part]


def allgather(x: Array, *, name: str | None = None, group: Group | None = None) -> Array:
    """All ranks' `x`, one after the other along the first dimension.

    Inside jit, where shapes are known beforehand, all ranks have as many rows. The gradient of `x`
    is the sum over all ranks of its rows' cotangents.
    """
    return _one(x, Allgather(name, group))


def broadcast(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """What `x` is on rank `root_rank`, whose gradient is the sum of all ranks' cotangents."""
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
    """
    if splits is not None:
        if isinstance(x, jax.core.Tracer):
            raise ValueError(
                "alltoall inside jit takes no splits, since the shape of the result must be known "
                "beforehand: call it outside, or send each rank as many rows, some of them padding"
            )
        return ranks_of(group).alltoall(x, splits, name=name)
    return _one(x, Alltoall(name, group))


def _reduced(tree: Tree, call: Allreduce, weight: Array | None = None) -> Tree:
    named, rebuilt = named_arrays(tree)
    names = () if [name for name, _ in named] == [""] else tuple(name for name, _ in named)
    xs = [x for _, x in named]
    if weight is not None:
        xs.append(jnp.asarray(weight, float))
    return rebuilt(bind(replace(call, names=names, weighted=weight is not None), xs))


def _one(x: Array, call: Call) -> Array:
    (result,) = bind(call, [x])
    return result
