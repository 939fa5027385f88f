"""Gradients averaged on their way from a tape to an optimizer, and variables alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import tensorflow as tf

from horo_lite import transform
from horo_lite.collectives import Average, Group, Op, Sum
from horo_lite.compression import Compression, Compressor
from horo_lite.tensorflow.operations import Array, as_it_is, in_python
from horo_lite.world import world


class Transform(transform.Transform):
    """The same for tensors and IndexedSlices, at once or as one node of a graph.

    Of IndexedSlices, what an embedding's gradient is, the rows of all ranks are gathered, as many
    as each has; they do not compress.
    """

    def __init__(
        self,
        op: Op = Average,
        compression: Compressor = Compression.none,
        group: Group | None = None,
        sparse_as_dense: bool = False,
    ) -> None:
        super().__init__(op, compression, group)
        self._sparse_as_dense = sparse_as_dense

    @as_it_is  # type: ignore[untyped-decorator]
    def __call__(
        self, names: Sequence[str], gradients: Sequence[Any], weight: Any = None
    ) -> list[Any]:
        results = list(gradients)
        if self._sparse_as_dense:
            results = [tf.convert_to_tensor(g) if _is_sparse(g) else g for g in results]
        in_graph = not tf.executing_eagerly()
        dense = [i for i, g in enumerate(results) if not _is_sparse(g)]
        if in_graph:  # what is missing there is missing in every step
            dense = [i for i in dense if results[i] is not None]
        sparse = [i for i, g in enumerate(results) if _is_sparse(g)]
        tensors = [results[i] for i in dense]
        looks = [(None, None) if g is None else (g.dtype, g.shape) for g in tensors]
        for i in sparse:
            for part in (results[i].values, results[i].indices):
                tensors.append(part)
                looks.append((part.dtype, [None, *part.shape[1:]]))
        if weight is not None:
            weight = tf.cast(weight, tf.float64)

        def exchange(weight: Array | None, *arrays: Array) -> list[Array]:
            mine = None if weight is None else float(weight)
            averages = super(Transform, self).__call__(
                [names[i] for i in dense], arrays[: len(dense)], mine
            )
            share = self._share(mine) if sparse else 1.0
            for i, values, indices in zip(
                sparse, arrays[len(dense) :: 2], arrays[len(dense) + 1 :: 2], strict=True
            ):
                n_rows = len(values) if share else 0
                scaled = (values[:n_rows] * share).astype(values.dtype)
                averages.append(self.group.allgather(scaled, name=f"{names[i]}, values"))
                averages.append(self.group.allgather(indices[:n_rows], name=f"{names[i]}, indices"))
            return averages

        if weight is None:
            outputs = in_python(lambda *arrays: exchange(None, *arrays), tensors, looks)
        else:
            outputs = in_python(exchange, [weight, *tensors], looks)
        for i, output in zip(dense, outputs, strict=False):
            results[i] = output
        for i, values, indices in zip(
            sparse, outputs[len(dense) :: 2], outputs[len(dense) + 1 :: 2], strict=True
        ):
            results[i] = tf.IndexedSlices(values, indices, results[i].dense_shape)
        return results

    def _share(self, weight: float | None) -> float:
        """What this rank's rows are multiplied by."""
        if self.op is not Average:
            return 1.0
        if weight is None:
            return 1.0 / self.group.size
        return weight / float(self.group.allreduce(weight, Sum, name="weights of sparse rows"))


class DistributedGradientTape:
    """A tf.GradientTape whose `gradient()` returns the averages over all ranks.

        with tf.GradientTape() as tape:
            ...
        tape = hvd.DistributedGradientTape(tape)

    or around the tape from the beginning, `with hvd.DistributedGradientTape(tf.GradientTape()) as
    tape`. Everything else is the tape's own. Every rank makes the same calls of `gradient()`, which
    takes, beside the tape's arguments, `weight`: this rank's number of samples, given on every rank
    or on none. Options as those of `horo_lite.keras.DistributedOptimizer`.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        *,
        compression: Compressor = Compression.none,
        op: Op = Average,
        sparse_as_dense: bool = False,
        group: Group | None = None,
    ) -> None:
        self._tape = tape
        self._transform = Transform(op, compression, group, sparse_as_dense)

    @as_it_is  # type: ignore[untyped-decorator]
    def gradient(
        self, target: Any, sources: Any, *args: Any, weight: Any = None, **options: Any
    ) -> Any:
        gradients = self._tape.gradient(target, sources, *args, **options)
        names = [_name(source, i) for i, source in enumerate(tf.nest.flatten(sources))]
        averages = self._transform(names, tf.nest.flatten(gradients), weight)
        return tf.nest.pack_sequence_as(gradients, averages)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        return self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


def DistributedOptimizer(optimizer: Any, **options: Any) -> Any:  # noqa: N802 (Horovod's name)
    """A Keras optimizer that applies the gradients of all ranks.

    See `horo_lite.keras.DistributedOptimizer`. Not for gradients that a DistributedGradientTape
    has averaged already.
    """
    return import_module("horo_lite.keras").DistributedOptimizer(optimizer, **options)


@as_it_is  # type: ignore[untyped-decorator]
def broadcast_variables(
    variables: Iterable[Any], root_rank: int = 0, *, group: Group | None = None
) -> None:
    """The variables, TensorFlow's or Keras', have the values of rank `root_rank`.

    Called by every rank, at once or inside tf.function. MismatchError on every rank where names,
    dtypes or shapes are not alike.
    """
    variables = list(variables)
    names = [_name(variable, i) for i, variable in enumerate(variables)]
    tensors = [tf.convert_to_tensor(variable) for variable in variables]

    def exchange(*arrays: Array) -> list[Array]:
        ranks = world().group if group is None else group
        return ranks.grouped_broadcast_([np.array(x) for x in arrays], root_rank, names=names)

    values = in_python(exchange, tensors, [(x.dtype, x.shape) for x in tensors])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _name(variable: Any, i: int) -> str:
    try:
        return str(getattr(variable, "path", None) or variable.name)
    except AttributeError:  # a tensor, outside of a graph
        return f"sources[{i}]"
