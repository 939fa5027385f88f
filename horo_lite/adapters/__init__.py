"""Choose the adapter for an object by what `sys.modules` holds, without importing a framework."""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from horo_lite.adapters.object import Adapter
from horo_lite.errors import warn

__all__ = ["Adapter", "adapter_of", "changed", "from_numpy", "register_adapter", "to_host"]

# The frameworks' names in sys.modules; each has an adapter in the file of that name here. The order
# matters: Keras' models are also modules of torch or TensorFlow. NumPy comes last, since its
# adapter recognizes objects by their attributes, the others by their type.
_BUILT_IN = (
    "keras", "tf_keras", "torch", "tensorflow", "jax", "cupy", "singa", "needle", "nnabla",
    "tinygrad", "mlx", "paddle", "numpy",
)  # fmt: skip

_registered: list[Adapter] = []
_loaded: dict[str, Adapter | None] = {}
_of_arrays: dict[type, Adapter] = {}  # of the types of arrays that have been seen
_generic = Adapter()


def register_adapter(adapter: Adapter) -> None:
    """Support a framework of your own: `adapter` is tried before all others from now on.

    The optimizer in this example keeps arrays in `weight.w` and gradients in `weight.dw`, and
    applies them in `apply()`:

        import horo_lite as hvd
        from horo_lite.adapters import Adapter

        class TinyAdapter(Adapter):
            steps = ("apply",)                      # the methods that apply gradients

            def matches(self, obj):                 # what this adapter understands
                return isinstance(obj, (tiny.Trainer, tiny.Weight))

            def parameters(self, owner):            # (name, weight) pairs; a weight has none
                return [(weight.name, weight) for weight in getattr(owner, "weights", ())]

            def gradient(self, weight):             # NumPy, DLPack or buffer protocol; or None
                return weight.dw

            def set_gradient(self, weight, array):  # if there was none, or it was read-only
                weight.dw = array

            def value(self, weight):
                return weight.w

            def set_value(self, weight, array):     # only if value() cannot be written
                weight.w = array

        hvd.register_adapter(TinyAdapter())
        trainer = hvd.DistributedOptimizer(tiny.Trainer(net))

    `Adapter` has defaults for the rest, which some frameworks need to override:

        before_step = ("clip",)                     # methods that need the averages before a step
        clear_gradient(weight)                      # if set_gradient(weight, None) does not do it
        takes_closure = False                       # a callable passed to a step is not a closure
        is_filled_later = True                      # optimizers may be wrapped without parameters
        array_types = (tiny.Array,)                 # arrays with neither DLPack nor a buffer
        from_numpy(array, like)                     # an array of the framework, like `like`
        compute(parameters)                         # evaluate lazy gradients, all at once
        flattened(tree)                             # models that cannot be changed, only rebuilt
        state(optimizer), set_state(optimizer, s)   # for broadcast_optimizer_state
        face = "tiny.distributed"                   # the module of its own DistributedOptimizer

    and, for arrays in a GPU's memory, `copy`, `empty`, `stream` and others.

    Adapters are tried in the reverse order of registration. Every rank must register the same ones.

    Args:
        adapter: An instance of a class that is derived from `Adapter` or has its methods.
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
    """Return the adapter for an optimizer, module, parameter or array; by default the generic one.

    Never imports a framework: if `sys.modules` does not hold it, none of its objects can exist.
    """
    for adapter in reversed(_registered):
        if adapter.matches(obj):
            return adapter
    known = _of_arrays.get(type(obj))  # TensorFlow cannot convert an assignment expression
    if known is not None:
        return known
    for name in _BUILT_IN:
        if sys.modules.get(name) is not None:  # None keeps a framework from being imported
            if name not in _loaded:
                _loaded[name] = _load(name)
            adapter_or_none = _loaded[name]
            if adapter_or_none is not None and adapter_or_none.matches(obj):
                if isinstance(obj, adapter_or_none.array_types):
                    _of_arrays[type(obj)] = adapter_or_none
                return adapter_or_none
    return _generic


def _load(name: str) -> Adapter | None:
    """Return the adapter for a framework, or None with a warning if its API has changed.

    No error: the framework may be imported by accident, while another one trains.
    """
    try:
        adapter: Adapter = import_module(f"{__name__}.{name}").ADAPTER
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules[name], "__version__", "of unknown version")
        warn(
            f"the arrays of {name} {version}, which this program has imported, cannot be read "
            f"({type(error).__name__}: {error}): docs/frameworks.md lists the version that was "
            "tested. Other frameworks are not affected"
        )
        return None
    return adapter


def needs(framework: ModuleType, oldest: str, what: str = "horo_lite") -> None:
    """Raise ImportError if a framework is older than the oldest release known to work.

    Its adapter calls this, which every use of the framework imports, so that nothing fails later
    with an error about a name that this release lacks; and `what` needs a newer one than the rest.
    """
    name = framework.__name__.partition(".")[0]
    found = getattr(framework, "__version__", None)
    if found is None:
        from importlib.metadata import PackageNotFoundError, version  # takes 50 ms

        try:
            found = version(name)
        except PackageNotFoundError:  # of a checkout, which is taken as it is
            return
    if _numbers(found) < _numbers(oldest):
        raise ImportError(
            f"{what} needs {name} {oldest} or later, and this is {found}: "
            f"pip install '{name}>={oldest}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release that order it, without those of a development version."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", version)[0])))


def from_numpy(array: np.ndarray[Any, Any], like: object) -> Any:
    """Convert `array` to the kind of array that `like` is, as a caller who passed `like` expects.

    That is a torch.Tensor for torch, a jax.Array for JAX, a number for a number, and a NumPy array
    for NumPy and anything unknown. The result shares the memory of `array` if the framework can.
    An `array` that is a framework's own (for a dtype that NumPy lacks) stays as it is.
    """
    if type(like) is np.ndarray or not isinstance(array, np.ndarray):
        return array
    adapter = _generic if isinstance(like, (bool, int, float, complex)) else adapter_of(like)
    return adapter.from_numpy(array, like)


def to_host(x: object) -> Any:
    """Return `x` as an object whose memory the core can read: itself for NumPy, detached for torch.

    Lists and numbers become NumPy arrays. Nothing else is copied.
    """
    if isinstance(x, (np.ndarray, np.generic, memoryview, array.array, bytearray)):
        return x
    if isinstance(x, (list, tuple, bool, int, float, complex)):
        try:
            numbers = np.asarray(x)
        except ValueError:  # a list or tuple
            raise ValueError(
                f"the items of this {type(x).__name__} differ in shape, so they are not one array: "
                "pass several arrays to a grouped operation, such as grouped_allreduce"
            ) from None
        return exact(numbers, x)
    return adapter_of(x).value(x)


def changed(arrays: Iterable[object]) -> None:
    """Tell the arrays' frameworks that an operation has changed them in place."""
    for x in arrays:
        if type(x) is not np.ndarray:
            adapter_of(x).changed(x)


def exact(array: np.ndarray[Any, Any], x: object) -> np.ndarray[Any, Any]:
    """Return `array`, which NumPy made from a number or list `x`.

    NumPy converts integers to float64 if there are floats among them, or if no single integer dtype
    can hold them all.

    Raises:
        ValueError: The conversion rounded an integer.
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
