"""Optimizers of tf_keras (Keras 2), of both families: `apply_gradients()` averages, then applies.

`tf_keras.optimizers.SGD` and the like, and those of `tf_keras.optimizers.legacy`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from horo_lite.horovod.gradients import GradientAverager
from horo_lite.keras.base import Averaging
from horo_lite.state.wrapper import sharing


def wrapped(optimizer: Any, averager: GradientAverager, passes: int, average_passes: bool) -> Any:
    """Return an optimizer of the same class and state whose gradients are exchanged.

    Args:
        optimizer: An optimizer of tf_keras.
        averager: What averages the gradients.
        passes: How many passes are added up before an exchange.
        average_passes: Whether the sum is divided by their number.
    """
    if passes > 1 and hasattr(optimizer, "inner_optimizer"):
        raise ValueError("backward_passes_per_step cannot be combined with a LossScaleOptimizer")
    return sharing(
        optimizer,
        AveragingOptimizer,
        _averager=averager,
        _passes=passes,
        _share=1 / passes if average_passes else 1.0,
        _sums={},
        _n_passes=None,
    )


_APPLY_ONLY = {"experimental_aggregate_gradients": False}  # both families understand it


class AveragingOptimizer(Averaging):
    """Base class of a wrapped optimizer of tf_keras, in addition to its own class."""

    _passes: int
    _share: float
    _sums: dict[Any, tf.Variable]
    _n_passes: tf.Variable | None

    # A LossScaleOptimizer around this one calls these before it checks that all are finite.

    def aggregate_gradients(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        return self._averaged(list(grads_and_vars))

    _aggregate_gradients = aggregate_gradients

    def apply_gradients(
        self, grads_and_vars: Any, name: str | None = None, *, weight: Any = None, **options: Any
    ) -> Any:
        pairs = list(grads_and_vars)
        skips = options.pop("skip_gradients_aggregation", False)
        aggregates = options.pop("experimental_aggregate_gradients", True) and not skips
        apply = super().apply_gradients  # type: ignore[misc]
        if self._passes > 1:
            if weight is not None:
                raise ValueError("weight= cannot be combined with backward_passes_per_step")
            return self._add(pairs, lambda sums: apply(sums, name=name, **_APPLY_ONLY))
        if aggregates:
            pairs = self._averaged(pairs, weight)
        return apply(pairs, name=name, **_APPLY_ONLY, **options)

    def _averaged(self, pairs: list[Any], weight: Any = None) -> list[Any]:
        variables = [variable for _, variable in pairs]
        gradients = [gradient for gradient, _ in pairs]
        averages = self._averager(variables, gradients, weight)
        return list(zip(averages, variables, strict=True))

    def _add(self, pairs: list[Any], apply: Any) -> Any:
        """Add up the gradients of a pass; the last pass exchanges and applies the sums.

        The sums are not among the optimizer's variables, so they are neither saved nor broadcast.
        """
        sums = self._sums
        with tf.init_scope():
            iterations: Any = self.iterations  # type: ignore[attr-defined]
            if self._n_passes is None:
                vars(self)["_n_passes"] = tf.Variable(0, dtype=tf.int64, trainable=False)
            for gradient, variable in pairs:
                if gradient is not None and variable.ref() not in sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    sums[variable.ref()] = tf.Variable(zeros, trainable=False)
        for gradient, variable in pairs:
            if gradient is not None:
                sums[variable.ref()].assign_add(tf.convert_to_tensor(gradient))
        assert self._n_passes is not None
        n_passes = self._n_passes.assign_add(1)

        def step() -> Any:
            found = [
                (sums[v.ref()] * self._share if v.ref() in sums else None, v) for _, v in pairs
            ]
            apply(self._averaged(found))
            for total in sums.values():
                total.assign(tf.zeros_like(total))
            return tf.identity(iterations)

        # Horovod counts passes as iterations, too, which learning rate schedules rely on.
        tf.cond(n_passes % self._passes == 0, step, lambda: tf.identity(iterations.assign_add(1)))
        return iterations
