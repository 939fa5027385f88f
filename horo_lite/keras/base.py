"""Which Keras this process trains with, and what optimizers of both kinds have in common.

Keras 3, or tf_keras (Keras 2) where TF_USE_LEGACY_KERAS says so, as to TensorFlow, or where the
script has imported tf_keras before.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from horo_lite.horovod.gradients import Exchange

is_keras2 = (
    os.environ.get("TF_USE_LEGACY_KERAS", "") in ("1", "true", "True") or "tf_keras" in sys.modules
)
keras: Any = import_module("tf_keras" if is_keras2 else "keras")


class Averaging:
    """What every wrapped optimizer has beside its own class."""

    _exchange: Exchange

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of this variable to this rank, before the first step.

        It is divided by the number of ranks unless scale_local_gradients=False.
        """
        self._exchange.register_local([var])


def is_of_keras2(optimizer: Any) -> bool:
    """Whether it is one of tf_keras, of either family."""
    if "tf_keras" not in sys.modules:
        return False
    kinds = import_module("tf_keras").optimizers
    return isinstance(optimizer, (kinds.Optimizer, kinds.legacy.Optimizer))


def build(optimizer: Any, variables: Any) -> None:
    """Make the optimizer's variables, unless it has them."""
    if hasattr(optimizer, "_create_all_weights"):  # of tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    elif is_of_keras2(optimizer) or not optimizer.built:
        optimizer.build(variables)


def name_of(variable: Any) -> str:
    """Return what the ranks know a variable by."""
    return getattr(variable, "path", None) or str(variable.name)
