"""Averaging of gradients between tape and optimizer, and broadcast of variables."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple, cast

import numpy as np
import tensorflow as tf

from horo_lite import ops
from horo_lite.adapters.object import named_variables
from horo_lite.adapters.tensorflow import array_of
from horo_lite.collectives.compression import Compression
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average
from horo_lite.horovod.gradients import GradientAverager, identity, options_of
from horo_lite.horovod.process_sets import (
    Set,
    global_process_set,
    group_of_member,
    ranks_given,
    root_given,
)
from horo_lite.tensorflow.errors import raised_as_tensorflows
from horo_lite.tensorflow.operations import (
    Array,
    as_it_is,
    check_dtype,
    dtypes_of_scaled_rows,
    in_python,
    ranks_of,
)
from horo_lite.training import sparse_rows, transform
from horo_lite.training.options import Options
from horo_lite.training.plan import Layout


class _Rows(NamedTuple):
    """tf.IndexedSlices as NumPy arrays."""

    values: Array
    indices: Array
    dense_shape: Array | None


class Transform(transform.Transform):
    """A transformation of tensors and IndexedSlices, executed now or as one node of a graph.

    For IndexedSlices, such as an embedding's gradient, the rows of all ranks are gathered, whatever
    their number on each; they are not compressed.
    """

    def __init__(
        self, options: Options, sparse_as_dense: bool = False, title: str | None = None
    ) -> None:
        super().__init__(options, title=title)
        self._sparse_as_dense = sparse_as_dense

    @as_it_is
    def __call__(
        self,
        names: Sequence[str],
        gradients: Sequence[Any],
        weight: Any = None,
        like: Any = None,  # always a tensor
        compared: Callable[[], Sequence[tuple[str, Any]]] | None = None,
    ) -> list[Any]:
        results = list(gradients)
        if self._sparse_as_dense:
            results = [tf.convert_to_tensor(g) if _is_sparse(g) else g for g in results]
        if self.options.op is Average:
            results = [_that_can_be_divided(g) for g in results]
        if tf.executing_eagerly():
            with raised_as_tensorflows():
                averages = self._averages(names, [_in_numpy(g) for g in results], weight, compared)
            return [_in_tensorflow(average) for average in averages]

        here = [i for i, g in enumerate(results) if g is not None]  # missing in every step
        tensors, layouts = [], []
        for i in here:
            for part in _parts(results[i]):
                rows_differ = _is_sparse(results[i]) and part.shape.rank is not None
                tensors.append(part)
                layouts.append((part.dtype, [None, *part.shape[1:]] if rows_differ else part.shape))
        given = [] if weight is None else [tf.cast(weight, tf.float64)]

        def run(*arrays: Array) -> list[Array]:
            parts = iter(arrays[len(given) :])
            mine = [
                _Rows(next(parts), next(parts), _known_shape(results[i]))
                if _is_sparse(results[i])
                else next(parts)
                for i in here
            ]
            averages = self._averages(
                [names[i] for i in here], mine, arrays[0] if given else None, compared
            )
            return [part for average in averages for part in _parts(average)]

        outputs = iter(in_python(run, [*given, *tensors], layouts))
        for i in here:
            if _is_sparse(results[i]):
                values, indices = next(outputs), next(outputs)
                results[i] = tf.IndexedSlices(values, indices, results[i].dense_shape)
            else:
                results[i] = next(outputs)
        return results

    def _averages(
        self,
        names: Sequence[str],
        gradients: Sequence[Array | _Rows | None],
        weight: Any,
        compared: Callable[[], Sequence[tuple[str, Any]]] | None,
    ) -> list[Array | _Rows | None]:
        """Return the averages of these gradients, all as NumPy arrays."""
        weight = None if weight is None else float(weight)
        dense = [None if isinstance(g, _Rows) else g for g in gradients]
        self._rows = {
            i: (_layout(g), g.values) for i, g in enumerate(gradients) if isinstance(g, _Rows)
        }
        results = super().__call__(names, dense, weight, compared=compared)

        def rows(i: int, layout: Layout, divisor: float) -> tuple[Array, Array]:
            values_dtype, row, indices_dtype, _ = layout
            mine = gradients[i]
            if not isinstance(mine, _Rows) or divisor == math.inf:
                return np.empty(0, indices_dtype), np.empty((0, *row), values_dtype)
            if divisor == 1:
                return mine.indices, mine.values
            wide, dtype = dtypes_of_scaled_rows(mine.values.dtype)
            return mine.indices, (mine.values.astype(wide) / divisor).astype(dtype)

        assert self._reducer is not None
        options, check = self.options, self._reducer.reset_unless_finite
        how = names.__getitem__, rows, options.ranks, options.op, weight, check
        layouts = dict(self._all_rows)
        for i, indices, values in sparse_rows.exchange(self._all_rows, *how):
            mine, shape = gradients[i], layouts[i][-1]
            if isinstance(mine, _Rows):
                known = mine.dense_shape
            else:
                known = None if shape is None else np.array(shape, np.int64)
            results[i] = _Rows(values, indices, known)
        return results


class DistributedGradientTape:
    """A tf.GradientTape whose `gradient()` returns the averages over all ranks.

        with tf.GradientTape() as tape:
            ...
        tape = hvd.DistributedGradientTape(tape)

    Alternatively, wrap the tape from the beginning: `with hvd.DistributedGradientTape(
    tf.GradientTape()) as tape`. Every rank makes the same calls of `gradient()`. Everything else is
    that of the tape: `jacobian()` and `batch_jacobian()` return this rank's own.

    Args:
        gradtape: The tape, which may be persistent.
        device_dense: Horovod's argument, which has no effect here.
        device_sparse: The same.
        compression: The wire format; `Compression.fp16` halves the bytes. An object with its own
            `compress` and `decompress` is called.
        sparse_as_dense: Convert gradients of embeddings to dense tensors before they travel;
            otherwise they stay tf.IndexedSlices, with the rows of all ranks.
        op: Average, Sum or Adasum, which needs a number of ranks that is a power of two, and dense
            gradients.
        gradient_predivide_factor: Gradients are divided by it before they are added up, and the sum
            by size / factor. Only with op=Average.
        num_groups: Horovod's older name for `groups`.
        groups: Which gradients travel together in Horovod; it has no effect here.
        process_set: The ranks; by default all. On other ranks gradients are not changed.
        scale_local_gradients: Whether gradients of local sources are divided by the number of
            ranks.
        group: The ranks as a `Group`.
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: AnyOp = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: Set = global_process_set,
        scale_local_gradients: bool = True,
        *,
        group: Group | None = None,
    ) -> None:
        if isinstance(gradtape, DistributedGradientTape) or not hasattr(gradtape, "gradient"):
            raise TypeError(
                "DistributedGradientTape wraps a tf.GradientTape, and only once, but got "
                f"{type(gradtape).__name__}"
            )
        self._tape = gradtape
        options = options_of(
            op, compression, process_set, group, gradient_predivide_factor, num_groups, groups
        )
        self._options = options
        self._sparse_as_dense = sparse_as_dense
        self._local: list[Any] = []
        self._scale_local = scale_local_gradients

    def register_local_source(self, source: Any) -> None:
        """Do not exchange the gradient of this variable.

        The gradient is divided by the number of ranks unless scale_local_gradients=False.
        """
        self._local.append(source)

    @as_it_is
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        *,
        weight: Any = None,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the averages over all ranks of what the tape's own `gradient()` returns.

        None for a source without a gradient on any rank. If only some ranks have a gradient, it
        counts as zeros on the others; inside tf.function, where it is known at tracing time which
        gradients there are, this raises MismatchError instead.

        Args:
            target: As for the tape.
            sources: As for the tape.
            output_gradients: As for the tape.
            unconnected_gradients: As for the tape.
            weight: This rank's number of samples, given on every rank or on none: the average is
                then the mean over all samples, however uneven the batches. 0 is allowed.
            use_generic_names: Horovod's argument: identify gradients by their positions instead of
                the names of the sources.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        variables = tf.nest.flatten(sources)
        names = [f"sources[{i}]" for i in range(len(variables))] if use_generic_names else ()
        averager = GradientAverager(self._transform_of(variables), self._scale_local)
        averager.register_local(self._local)
        found = tf.nest.flatten(gradients)
        averages = averager(variables, found, weight, names=names)
        return tf.nest.pack_sequence_as(gradients, averages)

    @as_it_is
    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return what `gradient()` returns as (source, gradient): the local sources, and the rest.

        The arguments are those of `gradient()`.
        """
        gradients = self.gradient(
            target, sources, output_gradients, use_generic_names=use_generic_names
        )
        local = {id(identity(source)) for source in self._local}
        found: tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]] = [], []
        for pair in zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True):
            found[id(identity(pair[0])) not in local].append(pair)
        return found

    def _transform_of(self, sources: Sequence[Any]) -> Transform:
        """Return what averages the gradients of these sources in all steps, for each its own tape.

        Variables are known by their identity, since two models may have some of the same names.
        Tensors exist in one step only, so nothing is kept for them, or compared.
        """
        options, as_dense = self._options, self._sparse_as_dense
        # Ranks may trace a function at different times, so it has no number.
        title = "gradients of a tape"
        own = [identity(source) for source in sources]
        are_variables = all(hasattr(source, "assign") for source in own)
        if not are_variables or group_of_member(options.group) is None:
            return Transform(replace(options, check_every=0), as_dense, title)
        kept = options.ranks.kept.setdefault("tapes", {})
        factor = options.gradient_predivide_factor
        key = (tuple(map(id, own)), options.op, options.compression, factor, as_dense)
        if key not in kept:

            def forget(_: Any) -> None:
                kept.pop(key, None)

            kept[key] = Transform(options, as_dense, title), [weakref.ref(x, forget) for x in own]
        transform: Transform = kept[key][0]
        return transform

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *exception: Any) -> Any:
        return self._tape.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)


@as_it_is
def PartialDistributedGradientTape(  # noqa: N802 (Horovod's name)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: AnyOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Set = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> DistributedGradientTape:
    """Return a `DistributedGradientTape` that does not exchange the gradients of some layers.

    `local_layers` is a Keras layer, or several, that have been built. The other arguments are those
    of `DistributedGradientTape`.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in import_module("horo_lite.keras.optimizer").variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: AnyOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Set = global_process_set,
    scale_local_gradients: bool = True,
    *,
    group: Group | None = None,
) -> Any:
    """Return a Keras optimizer that averages gradients over all ranks before it applies them.

    Not for gradients that a DistributedGradientTape has already averaged.
    See `horo_lite.keras.DistributedOptimizer` for details and for the arguments, which have another
    order there, as in Horovod; `use_locking` has no effect here.
    """
    return import_module("horo_lite.keras").DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        group=group,
    )


@as_it_is
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    process_set: Set = global_process_set,
    inplace: bool = False,
    *,
    group: Group | None = None,
) -> None:
    """Set the variables, in place, to the values of rank `root_rank`.

    Every rank calls it, eagerly or inside tf.function.

    Args:
        variables: Variables of TensorFlow or Keras, such as `model.weights` and
            `optimizer.variables`. In Keras 3, `model.variables` also has the seeds of random
            layers, with which all ranks would draw the same noise.
        root_rank: The root's rank in the world; with `group`, its rank in the group.
        process_set: The ranks; by default all.
        inplace: Horovod's argument, which has no effect here.
        group: The ranks as a `Group`.

    Raises:
        MismatchError: On every rank, if names, dtypes or shapes differ between ranks.
    """
    _assign("broadcast_variables", list(variables), root_rank, process_set, group)


@as_it_is
def broadcast_(
    variables: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: Set = global_process_set,
    *,
    group: Group | None = None,
) -> Any:
    """Set the variables to the values of rank `root_rank`, and return these as tensors.

    Every rank calls it, eagerly or inside tf.function. Like Horovod's `broadcast_`, it takes a list
    of tf.Variables; in addition, it takes a single variable, or a writable array (NumPy), which it
    returns. Tensors cannot be changed: `broadcast` returns new ones.

    Args:
        variables: The variables or the array to change.
        root_rank: As for `broadcast_variables`.
        name: For messages; if given, the same on all ranks.
        process_set: The ranks; by default all.
        group: The ranks as a `Group`.
    """
    if isinstance(variables, (list, tuple)):
        return _assign("broadcast_", variables, root_rank, process_set, group, name)
    if isinstance(variables, np.ndarray):
        ranks = ranks_of(ranks_given(process_set, group))
        root = root_given(ranks, root_rank, group)
        return ops.broadcast_(variables, root, name=name, group=ranks)
    return _assign("broadcast_", [variables], root_rank, process_set, group, name)[0]


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Raise an error: TensorFlow 2 has no collection of all variables.

    Raises:
        RuntimeError: Always; it says what to call instead.
    """
    raise RuntimeError(
        "broadcast_global_variables() needs TensorFlow 1's collection of all variables, which "
        "TensorFlow 2 does not have: call "
        f"hvd.broadcast_variables(model.weights, root_rank={root_rank}), and the same with "
        "optimizer.variables"
    )


def _assign(
    what: str,
    variables: Sequence[Any],
    root_rank: int,
    process_set: Set,
    group: Group | None,
    title: str | None = None,
) -> list[Any]:
    members = ranks_given(process_set, group)
    for i, variable in enumerate(variables):
        if not callable(getattr(variable, "assign", None)):
            raise TypeError(
                f"{what} changes tf.Variables, but variables[{i}] is "
                f"{type(variable).__name__}: call broadcast(), which returns a new tensor"
            )
    names = [name for name, _ in named_variables(variables)]
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    for name, x in zip(names, tensors, strict=True):
        check_dtype(f"{what}, {name!r}", x)
    if title is not None:
        names = [f"{title}, {name}" for name in names]

    def run(*arrays: Array) -> list[Array]:
        copies = [np.array(x) for x in arrays]
        ranks = ranks_of(members)
        root = root_given(ranks, root_rank, group)
        return ops.grouped_broadcast_(copies, root, names=names, group=ranks)

    values = in_python(run, tensors, [(x.dtype, x.shape) for x in tensors])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
    return values


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _that_can_be_divided(gradient: Any) -> Any:
    """Return the gradient; IndexedSlices of integers as floats."""
    if not _is_sparse(gradient):
        return gradient
    _, dtype = dtypes_of_scaled_rows(gradient.values.dtype.as_numpy_dtype)
    values = tf.cast(gradient.values, dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _parts(gradient: Any) -> tuple[Any, ...]:
    """Return the tensors, or arrays, that a gradient consists of."""
    if _is_sparse(gradient) or isinstance(gradient, _Rows):
        return gradient.values, gradient.indices
    return (gradient,)


def _in_numpy(gradient: Any) -> Array | _Rows | None:
    if _is_sparse(gradient):
        values, indices = array_of(gradient.values), array_of(gradient.indices)
        return _Rows(values, indices, _known_shape(gradient))
    return None if gradient is None else array_of(gradient)


def _in_tensorflow(average: Array | _Rows | None) -> Any:
    if isinstance(average, _Rows):
        return tf.IndexedSlices(*(None if x is None else tf.convert_to_tensor(x) for x in average))
    return None if average is None else tf.convert_to_tensor(average)


def _known_shape(slices: tf.IndexedSlices) -> Array | None:
    shape = slices.dense_shape
    return None if shape is None else cast("Array | None", tf.get_static_value(shape))


def _layout(rows: _Rows) -> Layout:
    """Describe such rows, for a rank that has none."""
    shape = None if rows.dense_shape is None else tuple(int(n) for n in rows.dense_shape)
    return rows.values.dtype.name, rows.values.shape[1:], rows.indices.dtype.name, shape
