"""Which Keras this process uses, and what optimizers of both kinds have in common.

Keras 3, or tf_keras (Keras 2) if TF_USE_LEGACY_KERAS says so, as for TensorFlow, or if the script
has already imported tf_keras.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any

from horo_lite.context import is_initialized, size
from horo_lite.errors import warn
from horo_lite.horovod.gradients import GradientAverager
from horo_lite.state.wrapper import Sharing

is_keras2 = (
    os.environ.get("TF_USE_LEGACY_KERAS", "") in ("1", "true", "True")
    or sys.modules.get("tf_keras") is not None
)
_name = "tf_keras" if is_keras2 else "keras"
keras: Any = import_module(_name)
import_module(f"horo_lite.adapters.{_name}")  # an ImportError if this release is too old


class Averaging(Sharing):
    """Base class of all wrapped optimizers, in addition to their own class."""

    _averager: GradientAverager

    @classmethod
    def attributes(cls, base: Any) -> dict[str, Any]:
        def from_config(kind: Any, /, config: dict[str, Any], **options: Any) -> Any:
            face = import_module("horo_lite.keras")
            return face.DistributedOptimizer(base.from_config(config, **options))

        return {
            "__module__": cls.__module__,
            "__qualname__": f"Distributed{base.__name__}",
            # To others, above all Keras when it saves a model, it has the optimizer's own class.
            "__class__": property(lambda self: base),
            "from_config": classmethod(from_config),
        }

    def register_local_var(self, var: Any) -> None:
        """Do not exchange the gradient of this variable; call it before the first step.

        The gradient is divided by the number of ranks unless scale_local_gradients=False.

        Raises:
            ValueError: The optimizer does to all gradients what depends on all of them, so those of
                local variables would make the others differ between ranks.
        """
        reason = ""
        parts = (self, *getattr(self, "optimizers", ()))  # of a MultiOptimizer
        if getattr(self, "inner_optimizer", None) is not None:
            reason = "a LossScaleOptimizer skips a step if any gradient is not finite"
        elif any(getattr(part, "global_clipnorm", None) for part in parts):
            reason = "global_clipnorm scales all gradients by a norm over all; clipnorm does not"
        if reason:
            path = getattr(var, "path", None) or var.name
            raise ValueError(
                f"{self.__class__.__name__} cannot have local variables such as {path!r}: "
                f"{reason}. Local gradients differ between ranks, so all variables would diverge"
            )
        self._averager.register_local([var])

    def get_config(self) -> Any:
        """Return the inner optimizer's configuration, from which Keras also makes copies."""
        if is_initialized() and size() > 1 and _is_for_a_copy(sys._getframe(1)):
            kind = self.__class__.__name__
            warn(
                f"a copy of a compiled model (copy.deepcopy, pickle, clone_model or "
                f"compile_from_config) has a plain {kind}, which trains every rank separately: "
                "before you train the copy, set copied.optimizer = "
                "hvd.DistributedOptimizer(copied.optimizer)"
            )
        return super().get_config()  # type: ignore[misc]


def _is_for_a_copy(frame: Any) -> bool:
    """Return whether Keras asks for a configuration to copy the model, not to save it in a file."""
    outermost = ""
    while frame is not None and _is_keras(frame):
        outermost = frame.f_code.co_name
        if outermost in ("__reduce__", "__deepcopy__", "clone_model"):
            return True
        frame = frame.f_back
    return outermost == "get_compile_config"


def _is_keras(frame: Any) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("keras", "tf_keras", "horo_lite")


def is_of_keras2(optimizer: Any) -> bool:
    """Return whether it is an optimizer of tf_keras, of either family."""
    if sys.modules.get("tf_keras") is None:
        return False
    kinds = import_module("tf_keras").optimizers
    return isinstance(optimizer, (kinds.Optimizer, kinds.legacy.Optimizer))


def build(optimizer: Any, variables: Any) -> None:
    """Create the optimizer's variables, unless it has them."""
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        optimizer._create_all_weights(variables)
    elif is_of_keras2(optimizer) or not optimizer.built:
        optimizer.build(variables)


def forget_compiled_steps(optimizer: Any) -> None:
    """Let models with this optimizer compile their next step, which is not to be as the last."""
    for model in gc.get_objects():
        is_model = hasattr(type(model), "make_train_function")
        if is_model and getattr(model, "optimizer", None) is optimizer:
            model.train_function = None
