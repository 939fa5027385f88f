"""Objects with `.grad`: the adapter for every framework that has no file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

import horo_lite.adapters as adapters

if TYPE_CHECKING:
    from horo_lite._native import DeviceQueue

Array = Any  # NumPy, DLPack or buffer protocol, with .dtype and .shape
Parameter = Any
Named = list[tuple[str, Parameter]]


NO_ORDER = -1
"""DLPack's word for: no stream need wait for another."""


class Adapter:
    """How parameters, gradients and values of one framework are read and written.

    This one knows objects whose gradient is `.grad` and whose value is `.data`, `.value` or the
    object itself; a framework's own adapter overrides what differs (see `register_adapter`).
    The exchange writes gradients and values in place. The two setters are called only where that
    cannot be: memory that is read-only, or a gradient that other ranks have and this one does not.
    """

    steps: tuple[str, ...] = ("step", "update")
    """The methods of an optimizer that apply gradients."""

    before_step: tuple[str, ...] = ()
    """Its methods for gradients that are averages already, such as one that clips them: the first
    of them averages, and the step does not do it again."""

    takes_closure: bool = True
    """Whether a callable that a step is given computes the gradients."""

    is_filled_later: bool = False
    """Whether an optimizer may still be without parameters when it is wrapped."""

    mutable: bool = True
    """Whether arrays in a GPU's memory may be written in place."""

    face: str | None = None
    """The module whose DistributedOptimizer wraps this framework's optimizers, if not ours."""

    array_types: tuple[type, ...] = ()
    """Arrays with neither DLPack nor a buffer: such as an optimizer keeps travel by value()."""

    def matches(self, obj: object) -> bool:
        """Whether `obj` (an optimizer, a module, a parameter or an array) is this framework's."""
        return True

    def parameters(self, owner: Any) -> Named:
        """The named parameters of an optimizer or module, in an order that is alike on all ranks.

        Empty if nothing is found in named_parameters(), param_groups, params or parameters.
        """
        if isinstance(owner, type):
            return []
        for place in ("named_parameters", "param_groups", "params", "parameters"):
            found = getattr(owner, place, None)
            if callable(found) and place.endswith("parameters"):
                found = list(found())
            if place == "param_groups" and found is not None:
                found = [group["params"] for group in found]
            named = name_leaves(found, place)
            if named and all(hasattr(leaf, "grad") or is_array(leaf) for _, leaf in named):
                return named
        return []

    def flattened(self, tree: Any) -> tuple[Named, Callable[[Iterable[Any]], Any]] | None:
        """Of objects that are made anew rather than changed: leaves, and the tree with others."""
        return None

    def compute(self, parameters: Sequence[Parameter]) -> None:
        """Their gradients, which are about to be read, have been computed: for lazy frameworks."""

    def gradient(self, parameter: Parameter) -> Array | None:
        """The gradient's own memory, or None if there is none."""
        try:
            gradient = parameter.grad
        except AttributeError:
            raise TypeError(
                f"a {type(parameter).__name__} has no .grad: {type(self).__name__} needs a method "
                "gradient(parameter) of its own, see horo_lite.register_adapter"
            ) from None
        if gradient is None or type(gradient) is np.ndarray:
            return gradient
        return adapters.to_host(_cell(parameter, "grad")[2])

    def set_gradient(self, parameter: Parameter, array: Array) -> None:
        """The parameter's gradient holds what `array` holds; `array` is the framework's to keep."""
        if parameter.grad is None:
            like = parameter if is_array(parameter) else _cell(parameter)[2]
            parameter.grad = adapters.from_numpy(array, like)
        else:
            holder, attribute, old = _cell(parameter, "grad")
            setattr(holder, attribute, adapters.from_numpy(array, old))

    def value(self, parameter: Parameter) -> Array:
        """The parameter's own memory."""
        return parameter if is_array(parameter) else adapters.to_host(_cell(parameter)[2])

    def set_value(self, parameter: Parameter, array: Array) -> None:
        """The parameter holds what `array` holds; `array` is the framework's to keep."""
        if is_array(parameter):
            parameter[...] = array
        else:
            holder, attribute, old = _cell(parameter)
            setattr(holder, attribute, adapters.from_numpy(array, old))

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """A new writable array of zeros, for a gradient that this rank does not have.

        In the host's memory; on a GPU it is `zeros_like(value(parameter))`.
        """
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401 (gives NumPy the name)
        return np.zeros(shape, np.dtype(dtype))

    def changed(self, x: Array) -> None:
        """An operation has changed the array `x` in place: for frameworks that keep its history."""

    def mark_gradients(self, parameters: Sequence[Parameter]) -> None:
        """From now on a gradient is marked when a backward pass has added to it.

        Where a framework can tell, so that `changed_by_hand` can.
        """

    def changed_by_hand(self, parameter: Parameter) -> bool:
        """Whether its gradient has been changed in place since a backward pass added to it."""
        return False

    def forget_marks(self, parameters: Sequence[Parameter]) -> None:
        """What the gradients are now has been used, or is the caller's own."""

    def watch(self, digest: Callable[[], object]) -> Callable[[], bool]:
        """A function that tells whether the gradients have changed from now on.

        Asked between a method of `before_step` and the step: what a further backward pass adds to
        averages is this rank's own. `digest` reads all gradients; a framework that tells when it
        computes something need not read them every time.
        """
        before = digest()
        return lambda: digest() != before

    def missing(self, parameter: Parameter, dtype: str, shape: tuple[int, ...]) -> Array:
        """Zeros for the gradient of `parameter`, which other ranks have; then set_gradient()."""
        return self.zeros(dtype, shape)

    def state(self, optimizer: Any) -> Any | None:
        """What the optimizer keeps, ready to be pickled; None: it is looked for in the object."""
        return None

    def set_state(self, optimizer: Any, state: Any) -> None:
        """The optimizer goes on as the one whose `state()` this is."""

    makes_copies: bool = False
    """Whether it has `host_results` and `from_results`, because NumPy's memory will not do."""

    def host_results(self, views: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """New NumPy arrays in C order with any contents, otherwise like `views`."""
        raise NotImplementedError

    def from_results(self, results: Sequence[np.ndarray[Any, Any]]) -> list[Array]:
        """Arrays of this framework's over that memory, which nobody else writes."""
        raise NotImplementedError

    # Arrays in a GPU's memory.

    def zeros_like(self, x: Array) -> Array:
        """A new dense array of zeros, otherwise like `x`."""
        zeros = self.copy(x)
        zeros[...] = 0
        return zeros

    def stream(self, x: Array) -> int | None:
        """The CUDA stream that work on `x` is given to just now; None: only its owner can say."""
        return None

    def on_stream(self, x: Array, stream: int) -> AbstractContextManager[Any]:
        """Inside, this thread's work on the GPU of `x`, and its memory, belong to that stream."""
        return nullcontext()

    def copy(self, x: Array) -> Array:
        """A new dense array in C order that holds what `x` holds."""
        raise TypeError(
            f"horo_lite cannot make a {type(x).__name__} in a GPU's memory: reduce it in place "
            "(allreduce_), or tell how with horo_lite.register_adapter (copy, empty, stream)"
        )

    def empty(self, x: Array, shape: Sequence[int]) -> Array:
        """A new dense array like `x`, on the same GPU, with another shape and any contents."""
        return self.copy(x)  # says what is missing

    def finished(self, x: Array, queue: DeviceQueue) -> Array:
        """`x`, which copy() or empty() made and work on `queue` has filled, for its new owner."""
        return x

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        """`array` as the kind of array that `like` is, sharing memory where possible."""
        if isinstance(like, (bool, int, float)) and not isinstance(like, np.generic):
            return array.item()
        return array[()] if isinstance(like, np.generic) else array


class VariablesAdapter(Adapter):
    """Optimizers that keep their state in variables, all of which `parameters()` lists."""

    def state(self, optimizer: Any) -> Any | None:
        return [np.array(self.value(variable)) for _, variable in self.parameters(optimizer)]

    def set_state(self, optimizer: Any, state: Any) -> None:
        for (_, variable), array in zip(self.parameters(optimizer), state, strict=True):
            self.set_value(variable, array)


def name_leaves(tree: Any, place: str) -> Named:
    """The leaves of nested dicts, lists and tuples, each with a name that says where it is.

    A dict's keys stand for themselves ("conv.weight"), positions look like "params[3]"; a list of
    (name, leaf) pairs is read as a dict. They come in the owner's order, which is that of a plan,
    and in every step; `state.trees.Tree` sorts dicts, and can rebuild what it walked.
    """

    def leaves(tree: Any, path: str) -> Named:
        if (pairs := keyed(tree)) is not None:
            return [named for key, leaf in pairs for named in leaves(leaf, join(path, key))]
        if isinstance(tree, (list, tuple)):
            places = _places(path, len(tree))
            if not any(map(_is_container, set(map(type, tree)))):
                return list(zip(places, tree, strict=True))
            return [
                named for name, x in zip(places, tree, strict=True) for named in leaves(x, name)
            ]
        return [(path, tree)]

    return leaves(tree, place if keyed(tree) is None else "")


def keyed(tree: Any) -> list[tuple[Any, Any]] | None:
    """The (key, value) pairs of a dict or of a list of such pairs; None for anything else."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)) and tree and all(map(_is_pair, tree)):
        return list(tree)
    return None


@cache
def _is_container(kind: type) -> bool:
    return issubclass(kind, (list, tuple, Mapping))


@lru_cache(maxsize=64)
def _places(path: str, n: int) -> tuple[str, ...]:
    return tuple(f"{path}[{i}]" for i in range(n))


def join(path: str, key: object) -> str:
    """Return the path of what an object holds under `key`."""
    return f"{path}.{key}" if path else str(key)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def is_array(x: Any) -> bool:
    """Whether it is an array that memory can be shared with: NumPy's, or by DLPack."""
    return isinstance(x, np.ndarray) or hasattr(x, "__dlpack__")


def _cell(holder: Any, attribute: str | None = None) -> tuple[Any, str, Any]:
    """Where the array is kept: the object and its attribute that holds it, and the array.

    Frameworks wrap arrays in objects of their own, so it may lie a few attributes deep.
    """
    x = holder
    for _ in range(4):
        if attribute is None:
            attribute = next((name for name in ("data", "value") if hasattr(x, name)), None)
        if attribute is None:
            break
        holder, x = x, getattr(x, attribute)
        if is_array(x) or isinstance(x, np.generic):
            return holder, attribute, x
        if isinstance(x, (bool, int, float)):
            # One dtype for all numbers: a gradient may be 0 on one rank and 0.5 on another.
            return holder, attribute, np.float64(x)
        attribute = None
    raise TypeError(
        f"{type(x).__name__} gives no array that horo_lite can read (NumPy, DLPack, or one of "
        "those as .data or .value): tell it how with horo_lite.register_adapter"
    )
