"""Horovod's `hvd.elastic` for Keras, with all of horo_lite.elastic: see docs/elastic.md."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

# ruff: noqa: F403, F405
from horo_lite.elastic import *
from horo_lite.keras.base import build, is_keras2, keras


class TensorFlowKerasState(State):
    """A `State` of a model, its optimizer and any other objects.

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    If a rank dies while fit() runs on JAX, the others go back to the last commit, since the step
    that failed has overwritten the arrays.

    Args:
        model: A Keras model that has been built.
        optimizer: Its optimizer, if the model was not compiled with it.
        backend: TensorFlow 1's argument, which has no effect here.
        **things: Other objects that belong to the state: see `horo_lite.elastic.State`.
    """

    model: Any

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **things: Any
    ) -> None:
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if not getattr(model, "built", True):
            raise ValueError("the model has no weights yet: call model.build(input_shape) first")
        if optimizer is not None:
            build(optimizer, model.trainable_variables)
        own = {} if optimizer is None else {"optimizer": optimizer}
        super().__init__(model=model, **own, **things)

    def _has_lost_arrays(self) -> bool:
        lost = self._lost()
        for variable in lost:
            # Those that are not part of the state are metrics, and seeds, which differ by rank.
            is_seed = variable.dtype == "uint32"
            bits = np.frombuffer(os.urandom(4 * math.prod(variable.shape)), np.uint32)
            values = (bits if is_seed else 0 * bits).reshape(variable.shape)
            variable.assign(keras.ops.convert_to_tensor(values, variable.dtype))
        return bool(lost) or super()._has_lost_arrays()

    def _lost(self) -> list[Any]:
        """Return the variables without values."""
        if is_keras2 or keras.backend.backend() != "jax":
            return []
        optimizer = getattr(self, "optimizer", None)
        variables = [*self.model.variables, *([] if optimizer is None else optimizer.variables)]
        return [v for v in variables if v._value is not None and v._value.is_deleted()]


KerasState = TensorFlowKerasState


class CommitStateCallback(keras.callbacks.Callback):
    """Calls `state.commit()` after every `batches_per_commit` batches and after each epoch.

    Put it after the callbacks that change the state.

    Args:
        state: The state.
        batches_per_commit: How many batches may be lost; a commit copies the model.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self._n_batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._n_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._n_batches += 1
        if self._n_batches % self.batches_per_commit == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        # On JAX the variables are empty while fit() runs, until jax_state_sync() fills them.
        fill = getattr(self.model, "jax_state_sync", None)
        if fill is not None:
            fill()
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets `state.batch` to the last batch of the epoch, as Horovod does, and to 0 after the epoch.

    In Keras 3, a callback cannot shorten an epoch that resumes in its middle: if that matters, pass
    fit() the rest of the epoch, such as `steps_per_epoch=n - state.batch`.

    Args:
        state: A state with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of completed epochs, over all calls of fit().

    Args:
        state: A state with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._n_before = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._n_before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._n_before + epoch + 1
