"""DistributedOptimizer for Keras: `apply()` averages the gradients, then applies them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import keras

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op
from horo_lite.training.options import Options
from horo_lite.training.transform import Transform


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    *,
    compression: Compressor = Compression.none,
    op: Op = Average,
    sparse_as_dense: bool = False,
    group: Group | None = None,
) -> Any:
    """`optimizer`, which from now on applies the gradients of all ranks.

    Every rank calls it, with the same options, and applies gradients equally often: give each rank
    batches of its own, as many as the others have (`steps_per_epoch=` of `fit`).

        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)

    The result is of the class of `optimizer` and shares everything with it: variables, learning
    rate, configuration. Gradients are averaged when `apply()` (or `apply_gradients`,
    `stateless_apply`) is called, so clipping, accumulation, decay and moving averages see what one
    process with all the samples would see. With gradient_accumulation_steps every pass is
    exchanged. It works in `fit` on every backend, compiled on JAX; on TensorFlow the model has to
    be compiled with jit_compile=False, which is the default where there is no GPU.

    `model.save` writes what it would write of `optimizer`, so a file needs no horo_lite to be read:
    continue with `horo_lite.keras.load_model`, which makes the optimizer distributed again.

    In a training loop of one's own, `apply(grads, variables, weight=n)` takes this rank's number of
    samples, on every rank or on none: the average is then the mean over all samples, however uneven
    the batches. In `fit`, such batches want a loss with reduction="sum", op=hvd.Sum and a learning
    rate divided by the samples of a batch.

    A gradient missing on some ranks counts as zeros there. Variables are known by their paths: a
    rank that has built more models than others needs layers with names (Keras counts those without:
    dense, dense_1).

    Args:
        optimizer: A Keras optimizer, or the name of one. Under mixed_float16 give a
            LossScaleOptimizer: all ranks then skip the same steps.
        compression: What travels; `Compression.fp16` halves the bytes.
        op: Average or Sum.
        sparse_as_dense: On TensorFlow, gradients of embeddings become dense before they travel;
            otherwise the rows of all ranks are gathered.
        group: The ranks; default all.

    Raises:
        MismatchError: From `apply()`, on every rank, naming the first variable that differs, where
            ranks come with different gradients or options.
    """
    optimizer = keras.optimizers.get(optimizer)
    if isinstance(optimizer, AveragingOptimizer):
        raise TypeError("this optimizer is a DistributedOptimizer already: wrap it once")
    options = Options(op=op, compression=compression, group=group)
    kind: Any = type(optimizer)
    wrapped = object.__new__(_class_of(kind))
    # One state, whoever loads or changes it; Keras would look into it while it is being set.
    object.__setattr__(wrapped, "__dict__", vars(optimizer))
    transform = _transform(options, sparse_as_dense)
    vars(wrapped).update(_transform=transform, _is_averaged=False)
    return wrapped


def load_model(
    filepath: Any,
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
    safe_mode: bool = True,
    *,
    compression: Compressor = Compression.none,
    op: Op = Average,
    sparse_as_dense: bool = False,
    group: Group | None = None,
) -> Any:
    """The model that `model.save(filepath)` wrote, with a DistributedOptimizer in the old state.

    A model without an optimizer has none afterwards.

    Args:
        filepath: As for `keras.models.load_model`.
        custom_objects: As there.
        compile: As there.
        safe_mode: As there.
        compression: As for DistributedOptimizer; a file does not keep it, or what follows.
        op: As there.
        sparse_as_dense: As there.
        group: As there.
    """
    model = keras.models.load_model(filepath, custom_objects, compile, safe_mode)
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(
            model.optimizer,
            compression=compression,
            op=op,
            sparse_as_dense=sparse_as_dense,
            group=group,
        )
    return model


_LOSS_SCALE = (
    "a LossScaleOptimizer around a DistributedOptimizer would skip steps on single ranks, wherever "
    "their own gradients overflow: put them the other way round, "
    "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)). (compile() adds a "
    "LossScaleOptimizer under mixed_float16 unless there is one.)"
)


class AveragingOptimizer:
    """What a wrapped optimizer has beside its own class."""

    _transform: Transform
    _is_averaged: bool
    _trainable_variables: list[Any]

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
        # A LossScaleOptimizer looks at the gradients before it calls another's apply(); the rest
        # call their own.
        own = vars(self)
        grads = self._averaged(grads, None, weight)
        own["_is_averaged"] = True
        try:
            return super().stateless_apply(  # type: ignore[misc]
                optimizer_variables, grads, trainable_variables
            )
        finally:
            own["_is_averaged"] = False

    def _averaged(
        self, grads: Sequence[Any], variables: list[Any] | None, weight: Any
    ) -> Sequence[Any]:
        if variables is None:
            variables = self._trainable_variables
        if self._is_averaged or len(grads) != len(variables):  # Keras says what is wrong with that
            return grads
        return self._transform([_name_of(variable) for variable in variables], grads, weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loss_scale_factor" and value is None:  # as a LossScaleOptimizer does inside it
            raise TypeError(_LOSS_SCALE)
        super().__setattr__(name, value)


@cache
def _class_of(base: type) -> Any:
    def from_config(cls: Any, /, config: dict[str, Any], **options: Any) -> Any:
        return DistributedOptimizer(base.from_config(config, **options))  # type: ignore[attr-defined]

    names = {
        "__module__": __name__,
        # Whoever asks, Keras when it saves a model above all, hears of the optimizer's own class.
        "__class__": property(lambda self: base),
        "from_config": classmethod(from_config),
    }
    return type(f"Distributed{base.__name__}", (AveragingOptimizer, base), names)


def _transform(options: Options, as_dense: bool) -> Transform:
    if keras.backend.backend() == "tensorflow":
        from horo_lite.tensorflow.gradients import Transform as ForTensors

        return ForTensors(options, as_dense)
    return Transform(options)


def _name_of(variable: Any) -> str:
    return getattr(variable, "path", None) or str(variable.name)
