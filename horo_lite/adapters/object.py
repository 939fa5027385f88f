"""The generic adapter, for objects with `.grad` of frameworks that have no adapter of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

import horo_lite.adapters as adapters

if TYPE_CHECKING:
    from horo_lite._native import DeviceQueue

Array = Any  # NumPy, DLPack or buffer protocol, with .dtype and .shape
Parameter = Any
Named = list[tuple[str, Parameter]]


@dataclass(frozen=True)
class Held:
    """An object that is part of a module's state."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class RunningStatistics(Protocol):
    """Running statistics of normalization layers, for one micro-batch at a time."""

    def begin(self) -> None:
        """From now on, compute the statistics of each micro-batch alone."""

    def take(self, batch: object) -> np.ndarray[Any, Any]:
        """Return those of `batch`, which was computed last, in one dimension."""

    def end(self) -> None:
        """Restore the statistics as they were before `begin`."""

    def fold(self, everyones: np.ndarray[Any, Any]) -> None:
        """Update the statistics by those of all micro-batches, a row each, in their order."""


ZERO_GRAD = ("zero_grad", "reset_grad", "clear_grad")
"""The names of an optimizer's method that clears the gradients."""

NO_ORDER = -1
"""DLPack's value for: no stream needs to wait for another."""


def zero_gradients(optimizer: Any, adapter: Adapter, named: Named) -> None:
    """Call the optimizer's zero_grad(); if it has none, set the parameters' gradients to zero."""
    for name in ZERO_GRAD:
        if callable(zero := getattr(optimizer, name, None)):
            zero()
            return
    for _, parameter in named:
        gradient = adapter.gradient(parameter)
        if gradient is None:
            continue
        try:
            gradient[...] = 0
        except (TypeError, ValueError):  # it is read-only
            adapter.set_gradient(parameter, np.zeros(gradient.shape, gradient.dtype))


class Passes(NamedTuple):
    """Passes of an optimizer that adds up the gradients of each rank until a step."""

    n: int  # all that were counted
    n_per_step: int
    sums: list[Parameter]  # variables


class Adapter:
    """How parameters, gradients and values of one framework are read and written.

    This class handles objects whose gradient is `.grad` and whose value is `.data`, `.value` or the
    object itself; a framework's own adapter overrides what differs (see `register_adapter`).
    The exchange writes gradients and values in place. The two setters are called only if that is
    impossible: for read-only memory, or a gradient that other ranks have and this one does not.
    """

    steps: tuple[str, ...] = ("step", "update")
    """The methods of an optimizer that apply gradients."""

    before_step: tuple[str, ...] = ()
    """Its methods that need averaged gradients, such as one that clips them: the first call of one
    averages, and the step does not average again."""

    of_all: tuple[str, ...] = ()
    """Its other methods that are about all of its parameters: not for one that has only some."""

    not_state: tuple[str, ...] = ()
    """The attributes of an optimizer that hold parameters and gradients, and no state."""

    takes_closure: bool = True
    """Whether a callable that is passed to a step computes the gradients."""

    is_filled_later: bool = False
    """Whether an optimizer may still be without parameters when it is wrapped."""

    mutable: bool = True
    """Whether arrays in a GPU's memory may be written in place."""

    face: str | None = None
    """The module whose DistributedOptimizer wraps this framework's optimizers; None: horo_lite."""

    array_types: tuple[type, ...] = ()
    """Types of its arrays, which may have neither DLPack nor a buffer: optimizers' state of these
    types is sent by value()."""

    def matches(self, obj: object) -> bool:
        """Return whether `obj` (optimizer, module, parameter or array) is of this framework."""
        return True

    def combines(self, optimizer: Any) -> str:
        """Return why an update depends on several parameters, if that can be seen, in words."""
        return ""

    def parameters(self, owner: Any) -> Named:
        """Return the named parameters of an optimizer or module, in the same order on all ranks.

        Empty if named_parameters(), param_groups, params and parameters contain none.
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

    def replica(self, owner: Any, buffers: bool) -> Named | None:
        """Return what is the same on all ranks of a module: what is trained.

        With `buffers` also the rest of its state, such as moving statistics, but nothing that each
        rank has of its own, such as seeds. None if the object makes no such difference.
        """
        own_buffers = getattr(owner, "named_buffers", None)
        if isinstance(owner, type) or not callable(own_buffers):
            return None
        return [*owner.named_parameters(), *(own_buffers() if buffers else ())]

    def objects(self, owner: Any) -> list[tuple[str, Held]]:
        """Return a module's state that consists of other objects than arrays, with names."""
        return []

    def passes(self, owner: Any) -> Passes | None:
        """Return how far an optimizer has come that adds up gradients until a step; or None."""
        return None

    def flattened(self, tree: Any) -> tuple[Named, Callable[[Iterable[Any]], Any]] | None:
        """Return a tree's named leaves and a function that rebuilds it with others.

        For trees that cannot be changed; None otherwise.
        """
        return None

    def compute(self, parameters: Sequence[Parameter]) -> None:
        """Compute the parameters' gradients, which are read next: for lazy frameworks."""

    def gradient(self, parameter: Parameter) -> Array | None:
        """Return the gradient's own memory, or None if there is no gradient."""
        try:
            gradient = parameter.grad
        except AttributeError:
            raise TypeError(
                f"a {type(parameter).__name__} has no .grad: {type(self).__name__} needs its own "
                "method gradient(parameter), see horo_lite.register_adapter"
            ) from None
        if gradient is None or type(gradient) is np.ndarray:
            return gradient
        return adapters.to_host(_cell(parameter, "grad")[2])

    def set_gradient(self, parameter: Parameter, array: Array) -> None:
        """Set the parameter's gradient to `array`, which the framework may keep."""
        if parameter.grad is None:
            like = parameter if is_array(parameter) else _cell(parameter)[2]
            parameter.grad = adapters.from_numpy(array, like)
        else:
            holder, attribute, old = _cell(parameter, "grad")
            setattr(holder, attribute, adapters.from_numpy(array, old))

    def clear_gradient(self, parameter: Parameter) -> None:
        """Remove the gradient, so that there is none."""
        if hasattr(parameter, "grad"):
            parameter.grad = None
        else:
            self.set_gradient(parameter, None)

    def value(self, parameter: Parameter) -> Array:
        """Return the parameter's own memory."""
        return parameter if is_array(parameter) else adapters.to_host(_cell(parameter)[2])

    def set_value(self, parameter: Parameter, array: Array) -> None:
        """Set the parameter to `array`, which the framework may keep."""
        if is_array(parameter):
            parameter[...] = array
        else:
            holder, attribute, old = _cell(parameter)
            setattr(holder, attribute, adapters.from_numpy(array, old))

    def received(self, parameter: Parameter, value: Array) -> Parameter:
        """Return a parameter with a received value: the same object if it can be written."""
        self.set_value(parameter, value)
        return parameter

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Return a new writable array of zeros, for a gradient that this rank does not have.

        It is in host memory; for a GPU, `zeros_like(value(parameter))` is used instead.
        """
        if dtype == "bfloat16":
            import ml_dtypes  # noqa: F401 (gives NumPy the name)
        return np.zeros(shape, np.dtype(dtype))

    def changed(self, x: Array) -> None:
        """Record that an operation changed `x` in place: for frameworks that keep its history."""

    def mark_gradients(self, parameters: Sequence[Parameter]) -> None:
        """From now on, mark a gradient whenever a backward pass has added to it.

        `changed_by_hand` needs the mark. Does nothing if the framework gives no way to do so.
        """

    def changed_by_hand(self, parameter: Parameter) -> bool:
        """Return whether its gradient was changed in place since a backward pass added to it."""
        return False

    def forget_marks(self, parameters: Sequence[Parameter]) -> None:
        """Remove the marks: the gradients have been used, or the caller has set them."""

    def watch(self, digest: Callable[[], object]) -> Callable[[], bool]:
        """Return a function that returns whether the gradients have changed from now on.

        It is called between a method of `before_step` and the step, since a further backward pass
        would add this rank's own gradients to averages. `digest` reads all gradients; a framework
        that reports when it computes something need not read them every time.
        """
        before = digest()
        return lambda: digest() != before

    def held(self, parameter: Parameter, dtype: str, shape: tuple[int, ...]) -> Array | None:
        """Return this rank's share of a gradient that only others have changed; None for zeros.

        A gradient that was exchanged before in the same step is the same on all ranks, and what
        others have added since counts on top of it.
        """
        return None

    def missing(self, parameter: Parameter, dtype: str, shape: tuple[int, ...]) -> Array:
        """Return zeros for a gradient that only other ranks have; set_gradient() receives them."""
        return self.zeros(dtype, shape)

    def state(self, optimizer: Any) -> Any | None:
        """Return the optimizer's state, picklable; or None to have the object searched for it."""
        return None

    def set_state(self, optimizer: Any, state: Any) -> None:
        """Set the optimizer's state to what `state()` of another rank's optimizer returned."""

    def seed(self, number: int) -> None:
        """Seed the framework's random generators, with a number below 2^63."""

    def computed(self, a: Array, b: Array) -> list[np.ndarray[Any, Any]]:
        """Return what the framework computes from two matrices, whose bits show how it rounds."""
        return []

    def running_statistics(self, model: Any) -> RunningStatistics:
        """Return access to the running statistics of a model's normalization layers."""
        raise TypeError(
            f"{type(self).__name__} cannot read the running statistics of a "
            f"{type(model).__name__}: model= is for models of PyTorch"
        )

    makes_copies: bool = False
    """Whether it has `host_results` and `from_results`, because NumPy's memory is unsuitable."""

    def host_results(self, views: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Return new, uninitialized NumPy arrays in C order, otherwise like `views`."""
        raise NotImplementedError

    def from_results(
        self, results: Sequence[np.ndarray[Any, Any]], likes: Sequence[Array]
    ) -> list[Array]:
        """Return arrays like `likes` over the results' memory, which nothing else writes."""
        raise NotImplementedError

    # Arrays in a GPU's memory; copy() and empty() also for host memory of dtypes that NumPy lacks.

    def zeros_like(self, x: Array) -> Array:
        """Return a new dense array of zeros, otherwise like `x`."""
        zeros = self.copy(x)
        zeros[...] = 0
        return zeros

    def stream(self, x: Array) -> int | None:
        """Return the current CUDA stream for work on `x`; None if only the framework knows it."""
        return None

    def on_stream(self, x: Array, stream: int) -> AbstractContextManager[Any]:
        """Return a context in which this thread uses `stream` for work and memory on `x`'s GPU."""
        return nullcontext()

    def copy(self, x: Array) -> Array:
        """Return a new dense copy of `x` in C order."""
        raise TypeError(
            f"horo_lite cannot create a {type(x).__name__} in a GPU's memory: reduce it in place "
            "(allreduce_), or register an adapter with the methods copy, empty and stream "
            "(horo_lite.register_adapter)"
        )

    def empty(self, x: Array, shape: Sequence[int]) -> Array:
        """Return a new uninitialized dense array like `x`, on the same GPU, with another shape."""
        return self.copy(x)  # raises the error that names what is missing

    def finished(self, x: Array, queue: DeviceQueue) -> Array:
        """Hand `x`, made by copy() or empty() and filled by work on `queue`, to its new owner."""
        return x

    def from_numpy(self, array: np.ndarray[Any, Any], like: object) -> Any:
        """Convert `array` to the kind of array that `like` is, sharing memory where possible."""
        if isinstance(like, (bool, int, float, complex)) and not isinstance(like, np.generic):
            return array.item() if array.ndim == 0 else array
        return array[()] if isinstance(like, np.generic) else array


class VariablesAdapter(Adapter):
    """Optimizers that keep their state in variables, which `variables()` lists."""

    def variables(self, optimizer: Any) -> Named:
        """Return all of the state, with what each rank has of its own."""
        return self.parameters(optimizer)

    def state(self, optimizer: Any) -> Any | None:
        return [np.array(self.value(variable)) for _, variable in self.variables(optimizer)]

    def set_state(self, optimizer: Any, state: Any) -> None:
        for (_, variable), array in zip(self.variables(optimizer), state, strict=True):
            self.set_value(variable, array)


def named_variables(variables: Iterable[Any]) -> Named:
    """Name variables of Keras or TensorFlow by layer, name and place, alike on all ranks.

    Whole paths differ if one rank has loaded a model and the others have built it: what Keras loads
    has no part for the model, and each process numbers layers without names as it makes them. Here
    those with the same name are numbered from 0, in the order in which they were made.
    """
    variables = list(variables)
    # Eager tensors have no names.
    paths = (getattr(x, "path", None) or getattr(x, "name", "") for x in variables)
    return list(zip(_own_names(tuple(map(str, paths))), variables, strict=True))


@lru_cache(256)
def _own_names(paths: tuple[str, ...]) -> list[str]:
    parts = [path.partition(":")[0].rpartition("/") for path in paths]
    layers = [_layer(path.rpartition("/")[2]) for path, _, _ in parts]
    numbers: dict[str, list[int]] = {}
    for base, number in sorted(set(layers)):
        numbers.setdefault(base, []).append(number)
    names = []
    for i, ((base, number), (_, _, own)) in enumerate(zip(layers, parts, strict=True)):
        n = numbers[base].index(number)
        names.append(f"{base}_{n}/{own} ({i})" if n else f"{base}/{own} ({i})".lstrip("/ "))
    return names


def _layer(name: str) -> tuple[str, int]:
    """Split off the number that Keras gives to all but the first layer of a name."""
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (name, -1)


def name_leaves(tree: Any, place: str) -> Named:
    """Return the leaves of nested dicts, lists and tuples, each named by its path.

    A dict's keys are used as they are ("conv.weight"), positions look like "params[3]"; a list of
    (name, leaf) pairs is read as a dict. Leaves keep the owner's order, which a plan uses in every
    step; `state.trees.Tree` sorts dicts instead, and can rebuild the tree.
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
    """Return the (key, value) pairs of a dict or of a list of pairs; None for anything else."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)) and all(map(_is_pair, tree)):
        return list(tree)
    return None


@cache
def _is_container(kind: type) -> bool:
    return issubclass(kind, (list, tuple, Mapping))


@lru_cache(maxsize=64)
def _places(path: str, n: int) -> tuple[str, ...]:
    return tuple(f"{path}[{i}]" for i in range(n))


def join(path: str, key: object) -> str:
    """Return the path of the item that an object at `path` holds under `key`."""
    return f"{path}.{key}" if path else str(key)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)


def is_array(x: Any) -> bool:
    """Return whether `x` is an array that shares its memory, as a NumPy array or by DLPack."""
    return hasattr(x, "__dlpack__")


def _cell(holder: Any, attribute: str | None = None) -> tuple[Any, str, Any]:
    """Find the array of `holder`: return the object and attribute that hold it, and the array.

    Frameworks wrap arrays in objects of their own, so it may be a few attributes deep.
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
        "those as .data or .value): write an adapter for it, see horo_lite.register_adapter"
    )
