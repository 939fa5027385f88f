"""SyncBatchNormalization: batch normalization over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Sum
from horo_lite.horovod.process_sets import (
    ProcessSet,
    Set,
    global_process_set,
    group_of,
    set_with,
)
from horo_lite.keras.base import is_keras2, keras
from horo_lite.tensorflow.operations import allreduce


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """BatchNormalization with the statistics of the whole batch of all ranks.

    Collective while training: every rank calls such layers the same number of times, in the same
    order. With n_r values per channel on rank r, their mean m_r and variance v_r,

        mean = sum(n_r * m_r) / sum(n_r),    variance = sum(n_r * (v_r + (m_r - mean)^2)) / sum(n_r)

    This equals Horovod's if all n_r are equal; otherwise, Horovod gives all ranks the same weight.
    Gradients flow through both, in which every rank's loss counts alike: for uneven batches, do not
    pass `weight=` to the tape or optimizer, but divide each rank's sum of losses by the number of
    all ranks' samples, with op=Sum. Works with Keras' TensorFlow backend, and with tf_keras.

    Args:
        fused: Horovod's argument, which may only be False.
        process_set: The ranks; by default all. A copy made from the configuration (`clone_model`,
            `load_model`) has the same ranks, which must then be a registered set.
        **kwargs: As for keras.layers.BatchNormalization.
    """

    def __init__(
        self, fused: bool = False, process_set: Set = global_process_set, **kwargs: Any
    ) -> None:
        if fused:
            raise ValueError("SyncBatchNormalization does not support fused=True")
        # Keras 2 has a fused kernel that does not call _moments().
        super().__init__(**kwargs, **({"fused": False} if is_keras2 else {}))
        self._process_set = process_set

    def get_config(self) -> dict[str, Any]:
        given = self._process_set
        if isinstance(given, Group):
            given = ProcessSet(given.transport.ranks)
        ranks = None if given in (None, global_process_set) else given.ranks
        return {**super().get_config(), "process_set": ranks}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        ranks = config.get("process_set")
        given = None if ranks is None else set_with(ranks)
        return super().from_config({**config, "process_set": given})

    def _moments(self, inputs: Any, *how: Any, **named: Any) -> tuple[Any, Any]:
        # Keras 3 passes (inputs, mask), Keras 2 (inputs, axes, keep_dims=…, mask=…).
        if is_keras2:
            axes, mask = how[0], named.get("mask")
            mean, variance = super()._moments(inputs, *how, **named)
        else:
            (mask,), axes = how, self._reduction_axes
            mean, variance = super()._moments(inputs, mask)
        if group_of(self._process_set).size == 1:
            return mean, variance
        shape = mean.shape
        mean, variance = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
        if mask is None:
            sizes = tf.shape(inputs)
            count = tf.reduce_prod([sizes[axis] for axis in axes])
        else:
            count = tf.math.count_nonzero(mask)
        count = tf.cast(count, mean.dtype)
        # Without samples they are NaN, and NaN times a count of 0 would make all ranks' result NaN.
        mean, variance = (tf.where(count > 0, x, tf.zeros_like(x)) for x in (mean, variance))
        sums = self._sum(tf.concat([count[None], count * mean], 0), "means")
        total = tf.maximum(sums[0], 1)
        common = sums[1:] / total
        spread = self._sum(count * (variance + (mean - common) ** 2), "variances")
        return tf.reshape(common, shape), tf.reshape(spread / total, shape)

    def _sum(self, x: Any, what: str) -> Any:
        name = f"{self.name}, {what}"
        return allreduce(x, op=Sum, name=name, process_set=self._process_set)
