"""Operations between ranks on TensorFlow tensors: eager, or as nodes of a graph; differentiable.

Every rank calls them in the same order; inside tf.function this is the program order, since the
nodes have side effects. Results are new tensors.

Gradients are those of Horovod, since scripts were tuned with them. With N ranks, the following
differ from the derivative of the sum of all ranks' losses (which `horo_lite.jax` uses):

    allgather       the average of the upstream gradients, this rank's rows: 1/N of the derivative
    broadcast       their average on the root, zeros elsewhere: 1/N of the derivative
    reducescatter   Sum: N times the gathered gradients, Average: the gathered ones: N times the
                    derivative, so that it is the gradient of a loss averaged over the ranks
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import tensorflow as tf

from horo_lite import ops
from horo_lite.adapters.tensorflow import array_of
from horo_lite.collectives.compression import Compression, compressor_of
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.context import world
from horo_lite.errors import raised_in_graphs
from horo_lite.horovod.process_sets import (
    Set,
    global_process_set,
    group_of,
    ranks_given,
    root_given,
    set_of,
)
from horo_lite.horovod.reductions import op_of
from horo_lite.tensorflow.errors import raised_as_tensorflows

P = ParamSpec("P")
T = TypeVar("T")
Tensor = Any  # tf.Tensor, and anything that tf.convert_to_tensor accepts
Array = np.ndarray[Any, Any]
Shape = Sequence[int | None] | None

# XLA's message that it cannot compile a node contains only the node's name.
NODE = "horo_lite_needs_jit_compile_False"

# The attribute of a graph that holds our last operation in it.
_LAST = "_horo_lite_last"

_DTYPES = {
    *("bool", "float16", "bfloat16", "float32", "float64"),
    *(f"{kind}{n_bits}" for kind in ("int", "uint") for n_bits in (8, 16, 32, 64)),
}


def as_it_is(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, marked so that tf.function does not rewrite it.

    Otherwise AutoGraph rewrites the Python code that it traces, and everything that it calls.
    """
    return cast("Callable[P, T]", tf.autograph.experimental.do_not_convert(function))


def ranks_of(ranks: Set) -> Group:
    """Return the ranks when an operation runs: the world may have changed since it was traced."""
    return group_of(ranks)


def in_python(
    function: Callable[..., Sequence[Array | None]],
    tensors: Sequence[Tensor | None],
    results: Sequence[tuple[Any, Shape]],
) -> list[Any]:
    """Call `function` on the tensors as NumPy arrays, which it must not change; return its results.

    It is called now or, while a graph is being traced, whenever the graph runs. `results` gives the
    results' dtypes and shapes; a shape or dimension is None if it may differ between ranks. An
    eager call passes on None in `tensors`; a graph has no None. Without tensors, it is called, too:
    the other ranks may have some.
    """
    if tf.executing_eagerly():
        with raised_as_tensorflows():
            arrays = function(*(None if x is None else array_of(x) for x in tensors))
        return [None if array is None else tf.convert_to_tensor(array) for array in arrays]

    def call(*arrays: Any) -> list[Array]:
        views = [np.asarray(array) for array in arrays]  # scalars are not arrays yet
        for view in views:  # the memory is the graph's, and other nodes may read it
            view.flags.writeable = False
        try:
            return [np.asarray(result) for result in function(*views)]
        except Exception as error:
            raised_in_graphs.append(error)
            raise

    # tf.function keeps nodes with side effects in order, but not those of its gradient functions.
    graph = tf.compat.v1.get_default_graph()
    before = getattr(graph, _LAST, None)
    with tf.control_dependencies([] if before is None else [before]):
        outputs = tf.numpy_function(as_it_is(call), tensors, [d for d, _ in results], name=NODE)
    setattr(graph, _LAST, outputs[0].op if results else outputs)
    if not results:
        return []
    for output, (_, shape) in zip(outputs, results, strict=True):
        output.set_shape(shape)
    return list(outputs)


@as_it_is
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Set = global_process_set,
    ignore_name_scope: bool = False,
    *,
    group: Group | None = None,
) -> Tensor:
    """Return the op over all ranks' `tensor` as a new tensor; every rank calls it.

    For tf.IndexedSlices, the rows of all ranks are gathered, whatever their number on each, and for
    an average divided by the number of ranks: the result is IndexedSlices, too. As in Horovod, rows
    of integers become floats by that; dense averages of integers are truncated.

    The gradient of an average or a sum is the same op over the upstream gradients.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        average: Horovod's older form: True for Average, False for Sum.
        device_dense: Horovod's argument, which has no effect here.
        device_sparse: The same.
        compression: The wire format, such as Compression.fp16; not for IndexedSlices. An object
            with its own `compress` and `decompress` is called.
        op: Average (the default), Sum, Min, Max, Product or Adasum, or Horovod's number for one.
            IndexedSlices support the first two. Adasum needs a number of ranks that is a power of
            two, and no compression. Averages of integers are truncated towards zero.
        prescale_factor: Multiplies this rank's contribution.
        postscale_factor: Multiplies the result.
        name: For messages; if given, the same on all ranks.
        process_set: The ranks; by default all.
        ignore_name_scope: Horovod's argument, which has no effect here.
        group: The ranks as a `Group`.

    Raises:
        MismatchError: On every rank, if shapes, dtypes or options differ between ranks. Outside of
            graphs it is a tf.errors.FailedPreconditionError too, as in Horovod, and a ValueError
            about an argument a tf.errors.InvalidArgumentError.
    """
    (result,) = grouped_allreduce(
        [tensor],
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=ranks_given(process_set, group),
        name=name,
    )
    return result


@as_it_is
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Set = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    *,
    group: Group | None = None,
) -> list[Tensor]:
    """Return the op over all ranks' `tensors`, reduced in one operation. See `allreduce`."""
    op = op_of(average, op)
    ranks = ranks_given(process_set, group)
    wire, results, restored = compressor_of(compression).compressed(
        list(tensors), lambda x: isinstance(x, tf.IndexedSlices)
    )
    slices = [i for i, x in enumerate(results) if isinstance(x, tf.IndexedSlices)]
    dense = [i for i in range(len(results)) if i not in slices]

    def run(*arrays: Array) -> list[Array]:
        return ops.grouped_allreduce(
            arrays,
            op,
            name=name,
            compression=wire,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            group=ranks_of(ranks),
        )

    def reduced(*xs: Tensor) -> Any:
        def backward(*gradients: Tensor) -> list[Tensor]:
            _check_linear("allreduce", op)
            return grouped_allreduce(
                [tf.convert_to_tensor(gradient) for gradient in gradients],
                compression=wire,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=ranks,
                name=_backward(name),
            )

        return in_python(run, xs, [(x.dtype, x.shape) for x in xs]), backward

    if dense:
        xs = [_tensor("allreduce", results[i]) for i in dense]
        for i, result in zip(dense, _differentiable(reduced, xs), strict=True):
            results[i] = result
    for i in slices:
        own_name = name if len(results) == 1 else f"{name or 'allreduce'}[{i}]"
        factor = prescale_factor * postscale_factor
        results[i] = _gathered_slices(results[i], op, own_name, factor, ranks)
    return restored(results)


@as_it_is
def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Tensor:
    """Return all ranks' `tensor`, concatenated along the first dimension, which may differ.

    A scalar counts as one row. The gradient is Horovod's: this rank's rows of the *average* of the
    upstream gradients, which for N ranks is 1/N of the derivative of the sum of their losses.

    Args:
        tensor: A tensor with the same dtype and dimensions, except the first, on every rank.
        name: For messages; if given, the same on all ranks.
        ignore_name_scope: Horovod's argument, which has no effect here.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
    """
    members = ranks_given(process_set, group)

    def run(array: Array) -> list[Array]:
        return [ops.allgather(array, name=name, group=ranks_of(members))]

    def place(shape: Array) -> list[Array]:
        ranks = ranks_of(members)
        n_mine = int(shape[0]) if len(shape) else 1
        n_rows = ops.allgather(np.array([n_mine]), name=_backward(name), group=ranks)
        begin = n_rows[: ranks.rank].sum()
        return [np.array([begin, begin + n_mine], np.int64)]

    def gathered(x: Tensor) -> Any:
        def backward(gradient: Tensor) -> Tensor:
            average = allreduce(
                tf.convert_to_tensor(gradient), name=_backward(name), process_set=members
            )
            (rows,) = in_python(place, [tf.shape(x)], [(tf.int64, [2])])
            return tf.reshape(average[rows[0] : rows[1]], tf.shape(x))

        (result,) = in_python(run, [x], [(x.dtype, _some_rows(x))])
        return result, backward

    return _differentiable(gathered, [_tensor("allgather", tensor)])


@as_it_is
def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> list[Tensor]:
    """Return `allgather` of each tensor."""
    ranks = ranks_given(process_set, group)
    return [allgather(x, name=_of_many(name, i), process_set=ranks) for i, x in enumerate(tensors)]


@as_it_is
def broadcast(
    tensor: Tensor,
    root_rank: int = 0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Tensor:
    """Return the `tensor` of rank `root_rank` as a new tensor.

    The gradient is Horovod's: the *average* of the upstream gradients on that rank and zeros
    elsewhere, which for N ranks is 1/N of the derivative of the sum of their losses.

    Args:
        tensor: A tensor of the same shape and dtype on every rank.
        root_rank: The root's rank in the world; with `group`, its rank in the group.
        name: For messages; if given, the same on all ranks.
        ignore_name_scope: Horovod's argument, which has no effect here.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
    """
    members = ranks_given(process_set, group)

    def root(ranks: Group) -> int:
        return root_given(ranks, root_rank, group)

    def run(array: Array) -> list[Array]:
        ranks = ranks_of(members)
        return [ops.broadcast(array, root(ranks), name=name, group=ranks)]

    def received(x: Tensor) -> Any:
        def backward(gradient: Tensor) -> Tensor:
            average = allreduce(
                tf.convert_to_tensor(gradient), name=_backward(name), process_set=members
            )
            is_root = _when_run(lambda ranks: ranks.rank == root(ranks), members, tf.bool, average)
            return tf.where(is_root, average, tf.zeros_like(average))

        (result,) = in_python(run, [x], [(x.dtype, x.shape)])
        return result, backward

    return _differentiable(received, [_tensor("broadcast", tensor)])


@as_it_is
def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Any:
    """Send rows to every rank; return those received, in rank order. Every rank calls it.

    The gradient of each row is sent back to the rank that the row came from.

    Args:
        tensor: A tensor with the same dtype and dimensions, except the first, on every rank.
        splits: How many rows go to each rank, in order; by default the same number to each.
        name: For messages; if given, the same on all ranks.
        ignore_name_scope: Horovod's argument, which has no effect here.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.

    Returns:
        The received rows; with `splits`, a pair of these and an int32 tensor of how many came from
        each rank.
    """
    members = ranks_given(process_set, group)
    if splits is not None:
        splits = tf.convert_to_tensor(splits)
        if not splits.dtype.is_integer:
            raise TypeError(f"alltoall: splits must be integers, not {splits.dtype.name}")

    def run(array: Array, splits: Array | None = None) -> list[Array]:
        ranks = ranks_of(members)
        if splits is None:
            n_rows = len(array) if array.ndim else 1
            if n_rows % ranks.size:
                raise ValueError(
                    f"alltoall without splits needs a multiple of {ranks.size} rows, not {n_rows}"
                )
            splits = np.full(ranks.size, n_rows // ranks.size)
        rows, received = ops.alltoall(array, splits, name=name, group=ranks)
        return [rows, received.astype(np.int32)]

    def exchanged(x: Tensor) -> Any:
        inputs = [x] if splits is None else [x, splits]
        rows, received = in_python(run, inputs, [(x.dtype, _some_rows(x)), (tf.int32, [None])])

        def backward(gradient: Tensor, _: Tensor) -> Tensor:
            gradient = tf.convert_to_tensor(gradient)
            back, _ = alltoall(gradient, received, name=_backward(name), process_set=members)
            return tf.reshape(back, tf.shape(x))

        return (rows, received), backward

    rows, received = _differentiable(exchanged, [_tensor("alltoall", tensor)])
    return rows if splits is None else (rows, received)


@as_it_is
def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: Set = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    group: Group | None = None,
) -> Tensor:
    """Return this rank's rows of `allreduce(tensor)`; every rank calls it.

    The first `rows % size` ranks get one row more than the others.

    The gradient is Horovod's: for Sum N times the gathered upstream gradients, for Average the
    gathered ones. For N ranks this is N times the derivative of the sum of their losses.

    The arguments are those of `allreduce`.
    """
    op = op_of(None, op)
    members = ranks_given(process_set, group)
    wire, (tensor,), restored = compressor_of(compression).compressed([tensor])

    def run(array: Array) -> list[Array]:
        part = ops.reducescatter(
            array,
            op,
            name=name,
            compression=wire,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            group=ranks_of(members),
        )
        return [part]

    def scattered(x: Tensor) -> Any:
        def backward(gradient: Tensor) -> Tensor:
            _check_linear("reducescatter", op)
            whole = allgather(
                tf.convert_to_tensor(gradient), name=_backward(name), process_set=members
            )
            n_times = prescale_factor * postscale_factor
            factor = _when_run(
                lambda ranks: n_times * (ranks.size if op is Sum else 1), members, tf.float64, whole
            )
            return tf.reshape(whole, tf.shape(x)) * tf.cast(factor, whole.dtype)

        (result,) = in_python(run, [x], [(x.dtype, _some_rows(x))])
        return result, backward

    (result,) = restored([_differentiable(scattered, [_tensor("reducescatter", tensor)])])
    return result


@as_it_is
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Set = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    *,
    group: Group | None = None,
) -> list[Tensor]:
    """Return `reducescatter` of each tensor."""
    ranks = ranks_given(process_set, group)
    return [
        reducescatter(
            x,
            compression=compression,
            op=op,
            name=_of_many(name, i),
            process_set=ranks,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for i, x in enumerate(tensors)
    ]


@as_it_is
def size_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return the number of ranks at run time, of the process set with that number if given."""
    return _number(lambda: set_of(process_set_id).size())


@as_it_is
def rank_op(name: str | None = None) -> Tensor:
    """Return this rank's number at run time."""
    return _number(lambda: world().rank)


@as_it_is
def local_size_op(name: str | None = None) -> Tensor:
    """Return the number of ranks on this host at run time."""
    return _number(lambda: world().local_size)


@as_it_is
def local_rank_op(name: str | None = None) -> Tensor:
    """Return this rank's number on its host at run time."""
    return _number(lambda: world().local_rank)


@as_it_is
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """Return 1 if this rank is in the process set with that number at run time, otherwise 0."""
    return _number(lambda: int(set_of(process_set_id).included()))


def _number(known: Callable[[], int]) -> Tensor:
    (value,) = in_python(
        lambda _: [np.array(known(), np.int32)], [tf.constant(0)], [(tf.int32, [])]
    )
    return value


def _differentiable(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """Call `function`, which returns results and their backward function; return the results."""
    return tf.custom_gradient(as_it_is(function))(*tensors)


def _gathered_slices(
    slices: tf.IndexedSlices, op: AnyOp, name: str | None, factor: float, ranks: Set
) -> tf.IndexedSlices:
    """Gather all ranks' rows: adding up rows with the same index gives the average or sum."""
    if op not in (Average, Sum):
        raise NotImplementedError(  # what Horovod raises
            f"allreduce of IndexedSlices takes op=Average or op=Sum, not {op}: for other ops, pass "
            "tf.convert_to_tensor(slices)"
        )
    title = name or "allreduce of IndexedSlices"
    values = allgather(slices.values, name=f"{title}, values", process_set=ranks)
    indices = allgather(slices.indices, name=f"{title}, indices", process_set=ranks)
    if op is Average or factor != 1:
        wide, result = dtypes_of_scaled_rows(values.dtype.as_numpy_dtype)
        values = tf.cast(values, wide)
        if factor != 1:
            values = values * tf.cast(factor, wide)
        if op is Average:
            size = _when_run(lambda group: group.size, ranks, tf.float64, indices)
            values = values / tf.cast(size, wide)
        values = tf.cast(values, result)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def dtypes_of_scaled_rows(dtype: Any) -> tuple[Any, Any]:
    """Return the dtypes to compute multiples and fractions of rows in, and to return.

    Integers become floats: as integers, each of several rows with one index would be truncated
    before they are added. In Horovod, which divides the rows too, their average has the same dtype.
    """
    wide = np.promote_types(dtype, np.float32)
    return wide, dtype if tf.as_dtype(dtype).is_floating else wide


def _when_run(known: Callable[[Group], object], ranks: Set, dtype: Any, near: Tensor) -> Tensor:
    """Return `known(ranks)` as a scalar, evaluated whenever the graph of the tensor `near` runs."""
    (value,) = in_python(
        lambda _: [np.array(known(ranks_of(ranks)), dtype.as_numpy_dtype)],
        [tf.shape(near)],
        [(dtype, [])],
    )
    return value


def _tensor(what: str, given: Tensor) -> Tensor:
    if isinstance(given, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
        kind = type(given).__name__
        hint = {
            "IndexedSlices": "tf.convert_to_tensor(x) makes it a dense tensor",
            "SparseTensor": "tf.sparse.to_dense(x) makes it a dense tensor",
            "RaggedTensor": "call it with its flat_values, and with its row_splits",
        }[kind]
        raise TypeError(f"{what} takes a tensor, not a {kind}: {hint}")
    tensor = tf.convert_to_tensor(given)
    check_dtype(what, tensor)
    return tensor


def check_dtype(what: str, tensor: Tensor) -> None:
    """Raise TypeError, also while a graph is traced, if the ranks cannot exchange such tensors."""
    if tensor.dtype.name not in _DTYPES:
        raise TypeError(
            f"{what}: dtype {tensor.dtype.name} cannot be reduced or sent: use integers, bool, or "
            "float16/bfloat16/float32/float64"
        )


def _check_linear(what: str, op: AnyOp) -> None:
    if op not in (Average, Sum):
        raise ValueError(f"{what} with op={op.name} has no gradient")


def _some_rows(x: Tensor) -> Shape:
    """Return the shape of any number of rows like those of `x`; None if it is unknown."""
    return None if x.shape.rank is None else [None, *x.shape[1:]]


def _backward(name: str | None) -> str | None:
    return None if name is None else f"{name}, backward"


def _of_many(name: str | None, i: int) -> str | None:
    return None if name is None else f"{name}[{i}]"
