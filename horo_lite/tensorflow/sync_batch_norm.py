"""SyncBatchNormalization: Keras' layer, over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from horo_lite.collectives.reductions import Sum
from horo_lite.horovod.gradients import Set
from horo_lite.horovod.process_sets import global_process_set, group_of
from horo_lite.tensorflow.operations import allreduce


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """What BatchNormalization is on one process, on the whole batch of all ranks.

    Collective while training: every rank calls the layer equally often, in one order with the
    others. With n_r values a channel on rank r, their mean m_r and variance v_r,

        mean = sum(n_r * m_r) / sum(n_r),    variance = sum(n_r * (v_r + (m_r - mean)^2)) / sum(n_r)

    which is Horovod's where all n_r are equal; where they are not, Horovod counts ranks alike.
    Gradients flow through both. On Keras' TensorFlow backend.

    Args:
        fused: Horovod's argument, which may only be False.
        process_set: The ranks; default all.
        **kwargs: As for keras.layers.BatchNormalization.
    """

    def __init__(
        self, fused: bool = False, process_set: Set = global_process_set, **kwargs: Any
    ) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(**kwargs)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, mask)
        if group_of(self._process_set).size == 1:
            return mean, variance
        if mask is None:
            shape = tf.shape(inputs)
            count = tf.reduce_prod([shape[axis] for axis in self._reduction_axes])
        else:
            count = tf.math.count_nonzero(mask)
        count = tf.cast(count, mean.dtype)
        sums = self._sum(tf.concat([count[None], count * mean], 0), "means")
        total = tf.maximum(sums[0], 1)
        common = sums[1:] / total
        spread = self._sum(count * (variance + (mean - common) ** 2), "variances")
        return common, spread / total

    def _sum(self, x: Any, what: str) -> Any:
        name = f"{self.name}, {what}"
        return allreduce(x, op=Sum, name=name, process_set=self._process_set)
