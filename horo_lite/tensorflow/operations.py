"""Operations among ranks on TensorFlow's tensors: at once, or as nodes of a graph; differentiable.

Every rank calls them in the same order; inside tf.function that is the order of the program, since
the nodes have effects. Results are new tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite import collectives
from horo_lite.collectives import Average, Op, Sum
from horo_lite.world import rank

Tensor = Any
Array = np.ndarray[Any, Any]
Shape = Sequence[int | None] | None

# XLA's message that it cannot compile a node tells nothing but the node's name.
NODE = "horo_lite_needs_jit_compile_False"

# tf.function rewrites the Python it traces, and whatever that calls, unless it is told not to.
as_it_is = tf.autograph.experimental.do_not_convert


def in_python(
    function: Callable[..., Sequence[Array | None]],
    tensors: Sequence[Tensor | None],
    results: Sequence[tuple[Any, Shape]],
) -> list[Tensor | None]:
    """What `function` makes of the tensors as NumPy arrays, which it must not change.

    At once, or when the graph runs that is being traced. `results` are the dtypes and shapes;
    shapes None and dimensions None are those that the ranks may have different ones of. None among
    the tensors is None in the arrays; a graph has none.
    """
    if not any(tf.is_symbolic_tensor(x) for x in tensors):
        arrays = function(*(None if x is None else np.asarray(x) for x in tensors))
        return [None if array is None else tf.convert_to_tensor(array) for array in arrays]

    def call(*arrays: Any) -> list[Array]:
        views = [np.asarray(array) for array in arrays]  # a scalar is none before
        for view in views:  # of the graph's own memory, which others may read
            view.flags.writeable = False
        return [np.asarray(result) for result in function(*views)]

    outputs = tf.numpy_function(as_it_is(call), tensors, [dtype for dtype, _ in results], name=NODE)
    for output, (_, shape) in zip(outputs, results, strict=True):
        output.set_shape(shape)
    return list(outputs)


def allreduce(tensor: Tensor, op: Op = Average, **options: Any) -> Tensor:
    """The op over all ranks' `tensor`; options as those of `horo_lite.allreduce`."""
    (result,) = grouped_allreduce([tensor], op, **options)
    return result


@as_it_is  # type: ignore[untyped-decorator]
def grouped_allreduce(tensors: Sequence[Tensor], op: Op = Average, **options: Any) -> list[Tensor]:
    """The op over all ranks' `tensors`, reduced as one.

    The gradient of an average or a sum is the average or sum of the ranks' gradients.
    """

    def exchange(*arrays: Array) -> list[Array]:
        return [*collectives.grouped_allreduce(arrays, op, **options)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduced(*xs: Tensor) -> Any:
        def backward(*gradients: Tensor) -> list[Tensor]:
            if op not in (Average, Sum):
                raise ValueError(f"allreduce with op={op.name} has no gradient")
            return [*grouped_allreduce(gradients, op, **options)]

        return in_python(exchange, xs, [(x.dtype, x.shape) for x in xs]), backward

    return list(reduced(*map(tf.convert_to_tensor, tensors)))


@as_it_is  # type: ignore[untyped-decorator]
def allgather(tensor: Tensor, *, name: str | None = None) -> Tensor:
    """All ranks' `tensor`, one after the other along the first dimension, which may differ.

    The gradient is this rank's rows of the sum of all ranks' gradients.
    """

    def exchange(array: Array) -> list[Array]:
        return [collectives.allgather(array, name=name)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gathered(x: Tensor) -> Any:
        def backward(gradient: Tensor) -> Tensor:
            n_rows = allgather(tf.shape(x)[:1])
            begin = tf.reduce_sum(n_rows[: rank()])
            return allreduce(gradient, Sum)[begin : begin + n_rows[rank()]]

        (result,) = in_python(exchange, [x], [(x.dtype, [None, *x.shape[1:]])])
        return result, backward

    x = tf.convert_to_tensor(tensor)
    return gathered(x[None] if x.shape.rank == 0 else x)


@as_it_is  # type: ignore[untyped-decorator]
def broadcast(tensor: Tensor, root_rank: int = 0, *, name: str | None = None) -> Tensor:
    """What `tensor` is on rank `root_rank`, whose gradient is the sum of all ranks' gradients."""

    def exchange(array: Array) -> list[Array]:
        return [collectives.broadcast(array, root_rank, name=name)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def received(x: Tensor) -> Any:
        def backward(gradient: Tensor) -> Tensor:
            everyone = allreduce(gradient, Sum)
            return everyone if rank() == root_rank else tf.zeros_like(everyone)

        (result,) = in_python(exchange, [x], [(x.dtype, x.shape)])
        return result, backward

    return received(tf.convert_to_tensor(tensor))
