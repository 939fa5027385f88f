"""DistributedOptimizer for Keras 3: `apply()` averages the gradients, then applies them.

The one for tf_keras is in keras2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from horo_lite.collectives.compression import Compression
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average
from horo_lite.context import rank
from horo_lite.horovod.gradients import GradientAverager, options_of, scaled
from horo_lite.horovod.process_sets import Set, global_process_set, group_of_member
from horo_lite.keras.base import (
    Averaging,
    forget_compiled_steps,
    is_of_keras2,
    keras,
)
from horo_lite.keras.sharded_state import ShardedState
from horo_lite.ops import barrier
from horo_lite.state.wrapper import check_unwrapped, sharing
from horo_lite.training.options import Options, checked_passes
from horo_lite.training.transform import Transform


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: AnyOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Set = global_process_set,
    scale_local_gradients: bool = True,
    *,
    group: Group | None = None,
    shard_state: bool = False,
) -> Any:
    """Return an optimizer that averages gradients over all ranks before it applies them.

    Every rank calls it, with the same options, and applies gradients the same number of times: give
    each rank its own batches, and the same number of them (`steps_per_epoch=` of `fit`).

        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)

    The result has the class of `optimizer` and shares everything with it: variables, learning rate,
    configuration. Gradients are averaged when `apply()` (or `apply_gradients`, `stateless_apply`)
    is called, so clipping, accumulation, decay and moving averages see what one process with all
    samples would see. With Keras' own gradient_accumulation_steps, every pass is exchanged. It
    works in `fit` on every backend, compiled on JAX; on TensorFlow, the model must be compiled with
    jit_compile=False, which is the default if there is no GPU.

    `model.save` writes the same file as with `optimizer`, so it can be read without horo_lite. To
    continue training, use `horo_lite.keras.load_model`, which makes the optimizer distributed
    again.

    In your own training loop, `apply(grads, variables, weight=n)` takes this rank's number of
    samples, on every rank or on none: the average is then the mean over all samples, however uneven
    the batches. In `fit`, uneven batches need a loss with reduction="sum", op=hvd.Sum and a
    learning rate divided by the samples of a batch.

    A gradient missing on some ranks counts as zeros there (with backward_passes_per_step, all ranks
    need the same ones). Variables are identified by their paths: if a rank has built more models
    than others, its layers need explicit names (Keras numbers unnamed ones: dense, dense_1). After
    `register_local_var(variable)`, called before the first step, the gradient of that variable is
    not exchanged. Neither global_clipnorm nor a LossScaleOptimizer goes with that.

    Args:
        optimizer: A Keras optimizer, or the name of one. Under mixed_float16, pass a
            LossScaleOptimizer: all ranks then skip the same steps.
        name: Horovod's argument, which has no effect here.
        device_dense: The same.
        device_sparse: The same.
        compression: The wire format; `Compression.fp16` halves the bytes. An object with its own
            `compress` and `decompress` is called.
        sparse_as_dense: On TensorFlow, convert gradients of embeddings to dense tensors before they
            travel; otherwise the rows of all ranks are gathered.
        gradient_predivide_factor: Gradients are divided by it before they are added up, and the sum
            by size / factor. Only with op=Average.
        op: Average, Sum or Adasum. Adasum combines the gradients, so all ranks keep the same
            optimizer state; it needs a number of ranks that is a power of two, dense gradients,
            and on JAX steps that are not compiled.
        backward_passes_per_step: The number of batches whose gradients are added up before they are
            exchanged and applied together. In steps that JAX compiles, every pass is exchanged,
            with the same result. It uses Keras' gradient_accumulation_steps, which must not be set.
            On several ranks, a .keras file that is saved between two passes has none of this
            step's; an .h5 file, for which Keras does not ask the optimizer, has one rank's.
        average_aggregated_gradients: True: the sum is divided by backward_passes_per_step, as Keras
            itself does.
        num_groups: Horovod's older name for `groups`.
        groups: Which gradients travel together in Horovod. It does not affect results, and has no
            effect here.
        process_set: The ranks; by default all. On other ranks gradients are not changed.
        scale_local_gradients: Whether gradients of local variables are divided by the number of
            ranks.
        group: The ranks as a `Group`.
        shard_state: Whether each rank has the optimizer's slots (momenta, variances) of its share
            of the variables only, on the torch and JAX backends: see docs/how-to/shard-state.md.

    Raises:
        MismatchError: From `apply()`, on every rank, if gradients or options differ between ranks;
            it names the first variable that differs.
    """
    is_keras2 = is_of_keras2(optimizer)
    if not is_keras2:
        optimizer = keras.optimizers.get(optimizer)
        is_keras2 = is_of_keras2(optimizer)
    check_unwrapped(optimizer)
    if shard_state:
        _check_can_shard(optimizer, is_keras2)
    options = options_of(
        op, compression, process_set, group, gradient_predivide_factor, num_groups, groups
    )
    passes = checked_passes(backward_passes_per_step)
    if int(optimizer.iterations):
        forget_compiled_steps(optimizer)
    transform = _transform(options, sparse_as_dense, is_keras2)
    averager = GradientAverager(transform, scale_local_gradients)
    if is_keras2:
        keras2 = import_module("horo_lite.keras.keras2")
        return keras2.wrapped(optimizer, averager, passes, average_aggregated_gradients)
    if passes > 1:
        _check_can_accumulate(optimizer, passes)
        vars(optimizer)["gradient_accumulation_steps"] = passes
    wrapped = sharing(
        optimizer,
        ShardedOptimizer if shard_state else AveragingOptimizer,
        _averager=averager,
        _is_averaged=False,
        _passes=passes,
        _sum_of=1 if average_aggregated_gradients else passes,
        _accumulated=None,
        **({"_options": options, "_division": None} if shard_state else {}),
    )
    if shard_state and optimizer.built:
        wrapped.divide_built()
    return wrapped


def _check_can_accumulate(optimizer: Any, passes: int) -> None:
    if kind := _kind_of_others(optimizer):
        raise ValueError(
            f"backward_passes_per_step cannot be combined with a {kind}: set "
            "gradient_accumulation_steps of the optimizer inside it"
        )
    steps = getattr(optimizer, "gradient_accumulation_steps", None)
    if optimizer.built and steps == passes:
        return  # it was saved with the same number, and has the memory for it
    if steps:
        raise ValueError(
            "Keras' gradient_accumulation_steps and backward_passes_per_step mean the same: pass "
            "only one of them"
        )
    if optimizer.built:
        raise ValueError(
            "backward_passes_per_step needs an optimizer that has not been built: create the "
            "DistributedOptimizer before the first step"
        )


def _check_can_shard(optimizer: Any, is_keras2: bool) -> None:
    backend = "tf_keras" if is_keras2 else keras.backend.backend()
    if backend not in ("torch", "jax"):
        raise ValueError(
            f"shard_state=True is for Keras 3 on the torch and JAX backends, and not for {backend}"
        )
    if kind := _kind_of_others(optimizer):
        raise ValueError(
            f"shard_state=True cannot be combined with a {kind}, whose state is that of "
            "other optimizers: leave one of the two out (for mixed precision without scaling "
            'of the loss, use the policy "mixed_bfloat16", or compile with '
            "auto_scale_loss=False)"
        )


def _kind_of_others(optimizer: Any) -> str:
    """Return the name of its class if it passes the gradients to other optimizers, else ''."""
    kinds = ("LossScaleOptimizer", "MultiOptimizer")
    return next((k for k in kinds if isinstance(optimizer, getattr(keras.optimizers, k, ()))), "")


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: AnyOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Set = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedOptimizer` that does not exchange the gradients of some layers.

    `local_layers` is a layer, or several, that have been built. The other arguments are those of
    `DistributedOptimizer`.
    """
    wrapped = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of(local_layers):
        wrapped.register_local_var(variable)
    return wrapped


def variables_of(local_layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, of several, or of None."""
    if local_layers is None:
        return []
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers)
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers must be Keras layers, not {layer!r}")
        if not layer.built:
            raise ValueError(f"the layer {layer.name!r} has no variables yet: build it first")
    return [variable for layer in layers for variable in layer.trainable_weights]


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    *,
    compile: bool = True,
    safe_mode: bool = True,
    op: AnyOp = Average,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    group: Group | None = None,
    shard_state: bool = False,
) -> Any:
    """Load a saved model, and make its optimizer a DistributedOptimizer with the saved state.

    If the model was saved without an optimizer, it has none.

    `custom_optimizers` are classes of optimizers that are not Keras' own, and `legacy_opts` is
    Horovod's argument, which has no effect here. `filepath`, `custom_objects`, `compile` and
    `safe_mode` are those of `keras.models.load_model`, and the others those of
    `DistributedOptimizer`, which files do not contain. Only `backward_passes_per_step` is saved by
    Keras 3, as gradient_accumulation_steps: if it is not given again, Keras averages over the
    passes. With `shard_state`, every rank loads the file.

    An optimizer that something in `custom_objects` has made a DistributedOptimizer stays as it is.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, known or None, compile, safe_mode)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, Averaging):
        model.optimizer = DistributedOptimizer(
            optimizer,
            compression=compression,
            op=op,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            group=group,
            shard_state=shard_state,
        )
    return model


def save_model(model: Any, filepath: Any, overwrite: bool = True, **options: Any) -> None:
    """Save a model from rank 0; every rank calls it, and returns when the file is there.

    For an optimizer with shard_state=True, whose state it collects from all ranks; other models may
    as well be saved with `model.save` on one rank.

    Args:
        model: The model, which all ranks have.
        filepath: As for `model.save`, on rank 0.
        overwrite: Likewise.
        **options: Further arguments of `keras.models.save_model`.
    """
    if hasattr(model, "jax_state_sync"):  # in a callback, the variables may be empty
        model.jax_state_sync()
    optimizer: Any = getattr(model, "optimizer", None)
    if getattr(optimizer, "is_sharded", False):
        optimizer.whole_state()
    if rank() == 0:
        keras.models.save_model(model, filepath, overwrite, **options)
    barrier()


_LOSS_SCALE = (
    "a LossScaleOptimizer around a DistributedOptimizer would skip steps only on the ranks whose "
    "own gradients overflow: wrap it the other way round, "
    "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). (compile() adds a "
    "LossScaleOptimizer under mixed_float16 unless there is one.)"
)


class AveragingOptimizer(Averaging):
    """Base class of a wrapped optimizer, in addition to its own class."""

    _is_averaged: bool
    _passes: int
    _sum_of: int
    _accumulated: list[Any] | None
    _trainable_variables: list[Any]
    _accumulated_gradients: list[Any]
    _iterations: Any

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        weight: float | None = None,
    ) -> None:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        grads = self._averaged(grads, trainable_variables, weight)
        super().apply(grads, trainable_variables)  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, *, weight: float | None = None) -> Any:
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight=weight)
        return self.iterations  # type: ignore[attr-defined]

    def stateless_apply(
        self,
        optimizer_variables: Any,
        grads: Sequence[Any],
        trainable_variables: Any,
        *,
        weight: Any = None,
    ) -> Any:
        # A LossScaleOptimizer checks the gradients before it calls the inner optimizer's apply();
        # other optimizers call their own.
        own = vars(self)
        grads = self._averaged(grads, None, weight, trainable_variables)
        own["_is_averaged"] = True
        try:
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )
        finally:
            own["_is_averaged"] = False

    def _averaged(
        self,
        grads: Sequence[Any],
        variables: list[Any] | None,
        weight: Any,
        values: Sequence[Any] | None = None,
    ) -> Sequence[Any]:
        if self._passes > 1:
            if weight is not None:
                raise ValueError("weight= cannot be combined with backward_passes_per_step")
            return grads  # exchanged when they have been added up: see _clip_gradients
        if variables is None:
            variables = self._trainable_variables
        if self._is_averaged or len(grads) != len(variables) or not grads:  # or Keras raises
            return grads
        # What a rank without any gradient receives is of the same kind as its variables.
        like = None if any(g is not None for g in grads) else variables[0].value
        return self._averager(variables, grads, weight, like, values)

    # Every backend's Keras optimizer calls these two methods in this order, the second one with the
    # sum over the passes.

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        vars(self)["_accumulated"] = list(trainable_variables)
        try:
            super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        finally:
            vars(self)["_accumulated"] = None

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        variables = self._accumulated
        if self._passes > 1 and variables is not None:
            sums = [scaled(gradient, self._sum_of) for gradient in grads]
            grads = self._averager(variables, sums)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def save_own_variables(self, store: Any) -> None:
        if self._passes == 1:
            super().save_own_variables(store)  # type: ignore[misc]
            return
        variables = list(self.variables)  # type: ignore[attr-defined]
        self.save_values(store, variables, [variable.numpy() for variable in variables])

    def save_values(self, store: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Save the values of these variables, without the passes of a step that is not complete.

        Each rank has sums of its own, and a file has one rank's, which all ranks would continue.
        """
        n_pending = int(self._iterations.numpy()) % self._passes
        group = group_of_member(self._averager.group) if n_pending else None
        leaves_out = group is not None and group.size > 1
        sums = set(map(id, self._accumulated_gradients)) if leaves_out else set()
        for i, (variable, value) in enumerate(zip(variables, values, strict=True)):
            if id(variable) in sums:
                value = np.zeros_like(value)
            elif leaves_out and variable is self._iterations:
                value = value - np.asarray(n_pending, value.dtype)
            store[str(i)] = value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # set by a LossScaleOptimizer around it
            raise TypeError(_LOSS_SCALE)
        super().__setattr__(name, value)


class ShardedOptimizer(ShardedState, AveragingOptimizer):
    """Base class of a wrapped optimizer with shard_state=True."""


def _transform(options: Options, as_dense: bool, is_keras2: bool) -> Transform:
    if is_keras2 or keras.backend.backend() == "tensorflow":
        from horo_lite.tensorflow.gradients import Transform as ForTensors

        return ForTensors(options, as_dense)
    return Transform(options)
