"""Which adapter reads and writes an object: decided by what is imported, importing nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from horo_lite.adapters.object import Adapter
from horo_lite.errors import warn

__all__ = ["Adapter", "adapter_of", "changed", "from_numpy", "register_adapter", "to_host"]

# The frameworks' modules, as they stand in sys.modules; a file of that name here knows each. NumPy
# comes last: it looks at the shape of an object, the others at its type first. Keras' models are
# torch's or TensorFlow's modules as well.
_BUILT_IN = (
    "keras", "tf_keras", "torch", "tensorflow", "jax", "cupy", "singa", "needle", "nnabla",
    "tinygrad", "mlx", "paddle", "numpy",
)  # fmt: skip

_registered: list[Adapter] = []
_loaded: dict[str, Adapter | None] = {}
_generic = Adapter()


def register_adapter(adapter: Adapter) -> None:
    """From now on `adapter` is asked first about every optimizer, module and parameter.

    For a framework of one's own. Its optimizer here keeps arrays in `weight.w` and gradients in
    `weight.dw`, and applies them in `apply()`:

        import horo_lite as hvd
        from horo_lite.adapters import Adapter

        class TinyAdapter(Adapter):
            steps = ("apply",)                      # the methods that apply gradients

            def matches(self, obj):                 # what this adapter understands
                return isinstance(obj, (tiny.Trainer, tiny.Weight))

            def parameters(self, owner):            # named; a weight has none
                return [(weight.name, weight) for weight in getattr(owner, "weights", ())]

            def gradient(self, weight):             # NumPy, DLPack or buffer protocol; or None
                return weight.dw

            def set_gradient(self, weight, array):  # where there was none, or it was read-only
                weight.dw = array

            def value(self, weight):
                return weight.w

            def set_value(self, weight, array):     # only where value() cannot be written
                weight.w = array

        hvd.register_adapter(TinyAdapter())
        trainer = hvd.DistributedOptimizer(tiny.Trainer(net))

    `Adapter` has defaults for the rest, which a framework may need to override:

        before_step = ("clip",)                     # methods that need the averages before a step
        takes_closure = False                       # a callable given to a step is no closure
        is_filled_later = True                      # optimizers may be wrapped without parameters
        array_types = (tiny.Array,)                 # arrays with neither DLPack nor a buffer
        from_numpy(array, like)                     # an array of the framework's, like that one
        compute(parameters)                         # lazy gradients are computed, all at once
        flattened(tree)                             # models that cannot be changed, only made anew
        state(optimizer), set_state(optimizer, s)   # for broadcast_optimizer_state
        face = "tiny.distributed"                   # where a DistributedOptimizer of its own is

    and, for arrays in a GPU's memory, `copy`, `empty`, `stream` and others.

    An adapter registered later is asked before earlier ones. Every rank registers the same.

    Args:
        adapter: An instance of a class derived from `Adapter`, or with its methods.
    """
    for method in ("matches", "parameters", "gradient", "set_gradient", "value", "set_value"):
        if not callable(getattr(adapter, method, None)) or isinstance(adapter, type):
            raise TypeError(
                f"register_adapter needs an object with the methods of horo_lite.adapters.Adapter; "
                f"{adapter!r} has no {method}() of its own"
                + (": give an instance, not the class" if isinstance(adapter, type) else "")
            )
    _registered.append(adapter)


def adapter_of(obj: object) -> Adapter:
    """The adapter for an optimizer, module, parameter or array; the generic one if none fits.

    Never imports a framework: an object of a framework that is not in `sys.modules` cannot exist.
    """
    for adapter in reversed(_registered):
        if adapter.matches(obj):
            return adapter
    for name in _BUILT_IN:
        if name in sys.modules:
            if name not in _loaded:
                _loaded[name] = _load(name)
            adapter_or_none = _loaded[name]
            if adapter_or_none is not None and adapter_or_none.matches(obj):
                return adapter_or_none
    return _generic


def _load(name: str) -> Adapter | None:
    """The adapter for a framework; None, and a warning, for one that is not what it was.

    It may be here by accident, while another one trains.
    """
    try:
        adapter: Adapter = import_module(f"{__name__}.{name}").ADAPTER
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules[name], "__version__", "of unknown version")
        warn(
            f"the arrays of {name} {version}, which is imported here, cannot be read "
            f"({type(error).__name__}: {error}): docs/frameworks.md says with which version it was "
            "tested. Other frameworks are not affected"
        )
        return None
    return adapter


def from_numpy(array: np.ndarray[Any, Any], like: object) -> Any:
    """`array` as the kind of array that `like` is: what a caller who gave `like` expects back.

    NumPy array for NumPy and for anything unknown, torch.Tensor for torch, jax.Array for JAX, a
    number for a number. Shares the memory of `array` where the framework can.
    """
    if type(like) is np.ndarray:
        return array
    return adapter_of(like).from_numpy(array, like)


def to_host(x: object) -> Any:
    """`x` as something whose memory the core can read: itself for NumPy, detached for torch.

    Lists and numbers become NumPy arrays. Nothing else is copied.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return x
    if isinstance(x, (list, tuple, bool, int, float, complex)):
        try:
            array = np.asarray(x)
        except ValueError:  # a list or tuple
            raise ValueError(
                f"the items of this {type(x).__name__} differ in shape, so they are not one array: "
                "pass several arrays to a grouped operation, such as grouped_allreduce"
            ) from None
        return exact(array, x)
    return adapter_of(x).value(x)


def changed(arrays: Iterable[object]) -> None:
    """Their frameworks know that an operation has changed the arrays in place."""
    for x in arrays:
        if type(x) is not np.ndarray:
            adapter_of(x).changed(x)


def exact(array: np.ndarray[Any, Any], x: object) -> np.ndarray[Any, Any]:
    """`array`, which NumPy has made of a number or list: ValueError where an integer was rounded.

    It makes float64 of integers beside floats, and of those that no one integer dtype can hold.
    """
    if array.dtype == np.float64 and np.any(np.abs(array) >= 2**53):
        numbers: list[Any] = np.asarray(x, np.object_).ravel().tolist()
        for number in numbers:
            if isinstance(number, int) and number != float(number):
                raise ValueError(
                    f"the integer {number} is not exact as a float64, which it would travel as: "
                    "pass a NumPy array of an integer dtype, or use allgather_object()"
                )
    return array
