"""Operations between ranks as functions of JAX arrays: eager, inside jit, differentiable.

Every rank calls them with the same options. Unless stated otherwise, arrays have the same shape and
dtype on all ranks; results are new arrays. Outside jit, calls are matched by position, as those of
`horo_lite`. Inside jit, they run when the compiled function runs, one at a time and in program
order, however XLA schedules the rest; they are matched by that order among themselves.

`name` is for messages. `group` is a set of ranks; by default all.

Gradients are exact: the gradient of an operation is its adjoint, so each rank gets the derivative
of the sum of all ranks' losses with respect to its own input. `horo_lite.torch` and
`horo_lite.tensorflow`, whose functions have Horovod's names, scale some gradients as Horovod does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from horo_lite import ops
from horo_lite.adapters.jax import named_arrays
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op
from horo_lite.jax.calls import Allgather, Allreduce, Alltoall, Broadcast, Call
from horo_lite.jax.primitive import bind, is_sendable, is_traced

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
    """Return the op over all ranks' `x`; see `horo_lite.allreduce`.

    The gradient of a sum or an average is the same op over the ranks' cotangents; other ops have
    no gradient.

    Args:
        x: An array of the same shape and dtype on every rank.
        op: Average, Sum, Min, Max or Product.
        name: For messages.
        compression: The wire format, such as Compression.fp16.
        prescale_factor: Multiplies this rank's contribution.
        postscale_factor: Multiplies the result.
        group: The ranks; by default all.
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
    """Return the op over all ranks' `xs`, a list or any other pytree of arrays, in one operation.

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
    parameters: Any = None,
    broadcast_later: bool = False,
    owner: object = None,
) -> Tree:
    """Return `tree` with every array replaced by its average (or sum) over all ranks.

    Args:
        tree: Any pytree, as `jax.grad` returns it; leaves that are not arrays are returned
            unchanged, and must be equal on all ranks.
        op: Average or Sum.
        compression: The wire format; `Compression.fp16` halves the bytes.
        weight: The weight of this rank's gradients, usually its number of samples: a number or a
            traced scalar, on every rank or on none.
        name: For messages.
        group: The ranks; by default all.
        parameters: A pytree with the parameters that will be updated, under the same names: the
            ranks compare them in the first call, after 10 and 100 calls and every 1,000, and rank 0
            warns if they differ.
        broadcast_later: Whether they are not compared in the first call, since they are broadcast
            after it, as by Horovod's callbacks.
        owner: What has these gradients, such as an optimizer: calls are counted for each.

    Raises:
        MismatchError: The ranks' trees differ; it names the first leaf that does.
    """
    if weight is not None and op is not Average:
        raise ValueError(f"a weight needs op=Average; with op={op.name} it has no meaning")
    call = Allreduce(
        name or "gradients",
        group,
        op,
        compression,
        of_gradients=True,
        broadcast_later=broadcast_later,
        owner=owner,
    )
    return _reduced(tree, call, weight, parameters)


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
    """Return this rank's rows of `allreduce(x)`; see `horo_lite.reducescatter`.

    The gradient is the concatenation of all ranks' cotangents; for an average, divided by the
    number of ranks. The arguments are those of `allreduce`.
    """
    part = ops.ranks_of(group).part_of(x)
    call = Allreduce(name, group, op, compression, prescale_factor, postscale_factor)
    return _reduced(x, call.here())[part]


def allgather(x: Array, *, name: str | None = None, group: Group | None = None) -> Array:
    """Return all ranks' `x`, concatenated along the first dimension.

    Inside jit, where shapes must be known in advance, all ranks have the same number of rows. The
    gradient of `x` is the sum over all ranks of its rows' cotangents.

    Args:
        x: An array with the same dtype and shape on every rank; outside jit, the first dimension
            may differ.
        name: For messages.
        group: The ranks; by default all.
    """
    return _one(x, Allgather(name, group))


def broadcast(
    x: Array, root_rank: int = 0, *, name: str | None = None, group: Group | None = None
) -> Array:
    """Return the `x` of rank `root_rank`.

    The gradient is the sum of all ranks' cotangents on that rank, and zeros elsewhere.

    Args:
        x: An array of the same shape and dtype on every rank.
        root_rank: The rank whose array all receive; a rank of `group`, if that is given.
        name: For messages.
        group: The ranks; by default all.
    """
    return _one(x, Broadcast(name, group, root_rank))


def alltoall(
    x: Array,
    splits: Sequence[int] | None = None,
    *,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """Send rows to every rank; return those received, in rank order. See `horo_lite.alltoall`.

    Inside jit, `splits` is not supported: all ranks get the same number of rows. The gradient is
    sent in the opposite direction.

    Args:
        x: An array with the same dtype and dimensions, except the first, on every rank.
        splits: How many rows go to each rank, in order; by default the same number to each.
        name: For messages.
        group: The ranks; by default all.

    Returns:
        The received rows; with `splits`, a pair of these and how many came from each rank.
    """
    if splits is not None:
        if is_traced([x]):
            raise ValueError(
                "alltoall inside jit takes no splits, since the shape of the result must be known "
                "in advance: call it outside jit, or pad the array to equal numbers of rows"
            )
        return ops.alltoall(x, splits, name=name, group=group)
    return _one(x, Alltoall(name, group))


def _reduced(
    tree: Tree, call: Allreduce, weight: Array | None = None, parameters: Any = None
) -> Tree:
    named, rebuilt = named_arrays(tree)
    names = [name for name, _ in named]
    xs = [x for _, x in named]
    if is_traced(xs):  # numbers are reduced as floats, as outside jit
        xs = [float(x) if isinstance(x, (bool, int)) else x for x in xs]
    call = replace(call, names=() if names == [""] else tuple(names), weighted=weight is not None)
    if weight is not None:
        xs.append(jnp.asarray(weight, float))
    # A compiled function would keep values that are known now, and compare these in every call.
    now, known = not is_traced(xs), set(names)
    compared = {
        name: x
        for name, x in named_arrays(parameters)[0]
        if name in known
        and hasattr(x, "dtype")
        and is_sendable(x.dtype)
        and now != isinstance(x, jax.core.Tracer)
    }
    xs += compared.values()
    call = replace(call, parameters=tuple(name or "parameters" for name in compared))
    return rebuilt(bind(call, xs))


def _one(x: Array, call: Call) -> Array:
    (result,) = bind(call, [x])
    return result
