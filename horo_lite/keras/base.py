"""Which Keras this process uses, and what optimizers of both kinds have in common.

Keras 3, or tf_keras (Keras 2) if TF_USE_LEGACY_KERAS says so, as for TensorFlow, or if the script
has already imported tf_keras.
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
    """Base class of all wrapped optimizers, in addition to their own class."""

    _exchange: Exchange

    def register_local_var(self, var: Any) -> None:
        """Do not exchange the gradient of this variable; call it before the first step.

        The gradient is divided by the number of ranks unless scale_local_gradients=False.
        """
        self._exchange.register_local([var])


def is_of_keras2(optimizer: Any) -> bool:
    """Return whether it is an optimizer of tf_keras, of either family."""
    if "tf_keras" not in sys.modules:
        return False
    kinds = import_module("tf_keras").optimizers
    return isinstance(optimizer, (kinds.Optimizer, kinds.legacy.Optimizer))


def build(optimizer: Any, variables: Any) -> None:
    """Create the optimizer's variables, unless it has them."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    elif is_of_keras2(optimizer) or not optimizer.built:
        optimizer.build(variables)


def name_of(variable: Any) -> str:
    """Return the name that identifies a variable between ranks."""
    return getattr(variable, "path", None) or str(variable.name)
