"""Horovod's callbacks for `fit`: initial broadcast, averaged metrics, learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from horo_lite.context import rank, size
from horo_lite.errors import MismatchError, warn
from horo_lite.keras.base import Averaging, build, is_keras2, keras
from horo_lite.ops import allgather, grouped_allreduce
from horo_lite.state.broadcast import broadcast_parameters
from horo_lite.state.wrapper import unwrapped
from horo_lite.training.plan import who_has


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Broadcasts the weights and the optimizer's state of rank `root_rank` when training begins.

    Use it on every rank. If a model has no weights before its first batch (on TensorFlow, a model
    without an Input), the broadcast follows that batch. Seeds of random layers are not broadcast,
    since noise must differ between ranks.

    On TensorFlow it also turns jit_compile off, which Keras turns on by default if there is a GPU.

    Before each epoch it compares the ranks' learning rates, with which they would diverge, and
    raises MismatchError on every rank if they differ.

    Args:
        root_rank: The rank whose weights and state all receive.
        device: Horovod's argument, which has no effect here.
        local_variables: One or several variables not to broadcast: see `register_local_var`.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._is_done = False
        local = [] if local_variables is None else local_variables
        self._local: list[Any] = [local] if hasattr(local, "assign") else list(local)

    def register_local_var(self, var: Any) -> None:
        """Do not broadcast this variable: every rank starts with its own, as for local layers."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        self._is_done = False
        optimizer = self.model.optimizer
        if size() > 1 and rank() == 0 and not isinstance(optimizer, Averaging):
            warn(
                f"this model's optimizer, {optimizer!r}, is not a DistributedOptimizer, so "
                "fit() trains every rank separately: compile with hvd.DistributedOptimizer(...), "
                "and use hvd.load_model to load a model that you continue to train"
            )
        layers = self.model._flatten_layers()
        alone = [layer.name for layer in layers if getattr(layer, "synchronized", False)]
        if alone and size() > 1 and rank() == 0:
            warn(
                f"layer {alone[0]!r} has synchronized=True, which covers the replicas of a "
                "tf.distribute strategy and not the ranks, so it normalizes by this rank's samples "
                "only: use horo_lite.tensorflow.SyncBatchNormalization"
            )
        if keras.backend.backend() == "tensorflow" and self.model.jit_compile:
            if rank() == 0:
                warn(
                    "on TensorFlow, XLA cannot compile the exchange of gradients: training this "
                    "model with jit_compile=False"
                )
            self.model.jit_compile = False
            self.model.make_train_function(force=True)
        self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._is_done:
            return
        rate = math.nan  # older optimizers of tf_keras may have none, or show only a schedule
        with suppress(AttributeError, TypeError):
            rate = float(self.model.optimizer.learning_rate)
        rates = allgather(np.array([rate]), name="learning rates").tolist()
        if not np.allclose(rates, rates[0], rtol=1e-6, atol=0, equal_nan=True):
            raise MismatchError(
                f"The ranks' learning rates differ before epoch {epoch}: "
                f"{who_has([f'{rate:.6g}' for rate in rates])}, so their weights would diverge. "
                "Put MetricAverageCallback before callbacks that follow metrics, such as "
                "ReduceLROnPlateau."
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._is_done:
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not self._is_done:
            self._broadcast()

    def _broadcast(self) -> None:
        model = self.model
        if not model.built:
            return
        build(model.optimizer, model.trainable_variables)
        _, named = unwrapped(model)
        local = set(map(id, self._local))
        shared = [(name, variable) for name, variable in named if id(variable) not in local]
        broadcast_parameters(shared, self.root_rank)
        broadcast_parameters(model.optimizer, self.root_rank)
        self._is_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces all metrics in `logs` by their mean over all ranks at the end of each epoch.

    Use it on every rank, with the same metrics, and before callbacks that read them
    (ReduceLROnPlateau, EarlyStopping, ModelCheckpoint, TensorBoard), which then act in the same way
    on all ranks. All ranks have the same weight, regardless of their numbers of samples.

    Args:
        device: Horovod's argument, which has no effect here.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        values = [_number(name, logs[name]) for name in names]
        averages = grouped_allreduce(values, name=f"metrics {', '.join(names)}")
        for name, average in zip(names, averages, strict=True):
            logs[name] = average if average.ndim else float(average)


def _number(name: str, value: Any) -> np.ndarray[Any, Any]:
    """Return a metric as an array; some metrics have a value for each class."""
    try:
        array = value if is_keras2 else keras.ops.convert_to_numpy(value)
        return np.asarray(array, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"MetricAverageCallback averages numbers, but logs[{name!r}] is {value!r}: put this "
            "callback before the one that writes it"
        ) from None


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate by a schedule, from `start_epoch` until before `end_epoch`.

    As in Horovod since 0.23, the rate is

        initial_lr * multiplier(epoch)                       if multiplier is a function,
        initial_lr * multiplier ** (epoch - start_epoch)     if it is a number.

    `logs["learning_rate"]` is the rate at the end of each epoch; with tf_keras it is `logs["lr"]`,
    as in Horovod.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A number, or a function of the epoch.
        start_epoch: The first epoch with the schedule.
        end_epoch: The first epoch after the schedule; None: it does not end.
        staircase: True: the rate changes at the beginning of an epoch. False: it changes before
            every batch, and the epoch in the formulas is epoch + batch / steps_per_epoch.
        momentum_correction: Whether to multiply the momentum by new rate / old rate for each batch
            at which the rate changes (Goyal et al., 2017, remark 2). Has an effect only if steps
            run eagerly (torch, or run_eagerly=True), or with tf_keras.optimizers.legacy: other
            compiled steps contain the momentum as a constant.
        steps_per_epoch: The number of batches, if `fit` does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._momentum: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._restore_momentum()  # after a fit() that ended with an exception
        steps = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not steps:
            raise ValueError(
                "fit() does not know how many batches an epoch has: pass steps_per_epoch=… to "
                f"{type(self).__name__}"
            )
        self._steps = steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._epoch < self.start_epoch:
            return
        if self.end_epoch is not None and self._epoch >= self.end_epoch:
            return
        if self.staircase:
            if batch == 0:
                self._adjust(self._epoch)
        else:
            self._adjust(self._epoch + self._fraction(batch))

    def _fraction(self, batch: int) -> float:
        return batch / self._steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._restore_momentum()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            key = "lr" if is_keras2 else "learning_rate"
            logs[key] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        innermost = _innermost(optimizer)
        momentum = float(getattr(innermost, "momentum", 0) or 0)
        # In tf_keras' legacy family it is a variable, which graphs read.
        is_read = (
            self.model.run_eagerly
            or keras.backend.backend() == "torch"
            or hasattr(innermost, "_create_all_weights")
        )
        if self.momentum_correction and is_read and momentum and before:
            self._momentum = momentum
            innermost.momentum = momentum * after / before

    def _restore_momentum(self) -> None:
        if self._momentum is not None:
            _innermost(self.model.optimizer).momentum = self._momentum
            self._momentum = None


def _innermost(optimizer: Any) -> Any:
    """Return the optimizer with the momentum, which may be inside a LossScaleOptimizer."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate to `initial_lr`, batch by batch, during the first `warmup_epochs`.

    As in Horovod, with N ranks, the rate before each batch is

        initial_lr / N * ((epoch + (batch + 1) / steps_per_epoch) * (N - 1) / warmup_epochs + 1)

    and never more than `initial_lr`, which it reaches in the last batch: the rate for all ranks
    together, usually one rank's times the number of ranks (Goyal et al., 2017, section 2.2). With
    steps_per_execution, it changes before each execution, and is `initial_lr` after the last.

    Args:
        initial_lr: The rate at the end.
        warmup_epochs: The duration in epochs.
        momentum_correction: As for LearningRateScheduleCallback.
        steps_per_epoch: The number of batches, if `fit` does not know it.
        verbose: 1: rank 0 prints a line at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            n = size()
            return min(1.0, (epoch * (n - 1) / warmup_epochs + 1) / n)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose
        self._reached = 0.0

    def _adjust(self, epoch: float) -> None:
        super()._adjust(epoch)
        self._reached = epoch

    def _fraction(self, batch: int) -> float:
        return (batch + 1) / self._steps  # so that the last batch has the full rate

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if epoch < self.warmup_epochs <= epoch + 1 and self._reached < self.warmup_epochs:
            self.model.optimizer.learning_rate = self.initial_lr  # the last batch had no callback
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nepoch {epoch + 1}: end of the learning rate's warmup, at {rate:.6g}")


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Raise an error: Keras 3 has no collection of all variables.

    Raises:
        RuntimeError: Always; it says what to call instead.
    """
    raise RuntimeError(
        "broadcast_global_variables() needs TensorFlow 1's collection of all variables, which "
        f"Keras 3 does not have: call hvd.broadcast_parameters(model, root_rank={root_rank}) and "
        "the same with model.optimizer, or use hvd.callbacks.BroadcastGlobalVariablesCallback"
    )
