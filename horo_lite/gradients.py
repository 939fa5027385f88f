"""Gradients as functions give them: trees of arrays in, the averages over all ranks out."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from horo_lite.adapters import Adapter, adapter_of, from_numpy
from horo_lite.adapters.object import is_array, join, keyed
from horo_lite.arrays import copy_of, like
from horo_lite.collectives import Average, Op, Sum
from horo_lite.compression import Compression, Compressor
from horo_lite.optimizer import takes_weight
from horo_lite.reducer import Reducer

if TYPE_CHECKING:
    from horo_lite.collectives import Group

T = TypeVar("T")
P = ParamSpec("P")


def average_gradients(
    gradients: T,
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    weight: float | None = None,
    name: str | None = None,
    group: Group | None = None,
) -> T:
    """A tree like `gradients`, whose arrays hold the averages over all ranks.

    Called by every rank of `group` (default: all), with the same names, shapes, dtypes and options.
    `gradients` are an array or a number, or dicts, lists, tuples, named tuples, dataclasses and
    (where JAX is imported) pytrees of them, as jax.grad, torch.func.grad, mlx.nn.value_and_grad,
    autograd.grad or a function of one's own return. They are not changed: the result has new arrays
    of the same kinds in containers of the same kinds. In compiled functions of JAX, too.

    A leaf that is None on every rank stays None; where other ranks have an array, it counts as
    zeros and receives the result. (On GPUs every rank needs every array.)

    op: Average or Sum. Averages of integer arrays are cut towards zero.
    compression: what travels; `Compression.fp16` halves the bytes.
    weight: this rank's number of samples, given on every rank or on none: with it the average is
        the mean over all samples, however uneven the batches. 0 is allowed.
    name: what messages call this exchange, alike on all ranks.

    MismatchError on every rank, naming the first leaf that differs ("layers[0].weight") and who has
    what; the next call may be made. TypeError, naming it, for a leaf that is no array. All arrays
    travel as one. Costs a copy of them, and two meetings of the ranks beside the bytes.
    """
    if op not in (Average, Sum):
        raise ValueError(f"average_gradients takes op=Average or op=Sum, not {op}")
    leaves: list[tuple[str, Any]] = []
    rebuilt = _opened(gradients, "", leaves)
    names, arrays = [name for name, _ in leaves], [leaf for _, leaf in leaves]
    if _is_traced(arrays):
        traced: T = import_module("horo_lite.jax").average_gradients(
            gradients, op=op, compression=compression, weight=weight, name=name, group=group
        )
        return traced
    if group is None:
        from horo_lite.world import world

        group = world().group
    reducer, slots = _reducer(group, names, op, compression, name)
    reducer.weight = weight
    try:
        for slot, array in zip(slots, arrays, strict=True):
            slot.grad = array
        for one_of_its_kind in {type(array): array for array in arrays}.values():
            adapter_of(one_of_its_kind).compute(slots)
        for slot, path in zip(slots, names, strict=True):
            slot.grad = _copied(path, slot.grad)
        reducer.finish()
        # What was None here is of the kind of what was not.
        some = next((array for array in arrays if array is not None), None)
        results = [slot.result(array, some) for slot, array in zip(slots, arrays, strict=True)]
    finally:
        for slot in slots:
            slot.grad = None
    averages: T = rebuilt(iter(results))
    return averages


def grad_and_average(
    fn: Callable[P, T],
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    name: str | None = None,
    group: Group | None = None,
) -> Callable[..., T]:
    """`fn`, whose result is averaged over all ranks: what it returns is alike on every rank.

        gradient = hvd.grad_and_average(jax.value_and_grad(loss))
        value, gradients = gradient(params, batch, weight=len(batch))

    `fn` returns gradients, or anything that holds gradients: jax.grad(loss), torch.func.grad(loss),
    autograd.grad(loss), mlx.nn.value_and_grad(model, loss) or a function of one's own. All numbers
    and arrays in its result are averaged, the loss as well; it must hold nothing else. To leave
    something out (predictions, a count of samples), call `average_gradients` on the rest.

    Every rank calls the new function equally often, with arguments of its own. `weight` is its
    number of samples, as in `average_gradients`, and is not passed on; the other arguments are.
    """

    @wraps(fn)
    def averaged(*args: Any, weight: float | None = None, **kwargs: Any) -> T:
        if weight is not None and takes_weight(fn):
            raise TypeError(
                f"{fn!r} has an argument `weight` of its own: call it, and then "
                "hvd.average_gradients(result, weight=…)"
            )
        return average_gradients(
            fn(*args, **kwargs),
            op=op,
            compression=compression,
            weight=weight,
            name=name,
            group=group,
        )

    return averaged


class _Slot:
    """A leaf's place in the plan, the same from call to call; its gradient is this call's."""

    grad: Any = None

    def result(self, leaf: Any, some: Any) -> Any:
        if leaf is not None:
            return like(self.grad, leaf)
        if isinstance(self.grad, np.ndarray) and some is not None:
            return from_numpy(self.grad, some)
        return self.grad


class _SlotAdapter(Adapter):
    def gradient(self, parameter: _Slot) -> Any:
        return parameter.grad

    def set_gradient(self, parameter: _Slot, array: Any) -> None:
        parameter.grad = array

    def value(self, parameter: _Slot) -> Any:
        return parameter.grad


_adapter = _SlotAdapter()


def _reducer(
    group: Group, paths: list[str], op: Op, compression: Compressor, name: str | None
) -> tuple[Reducer, list[_Slot]]:
    """Who exchanges a tree with leaves of these names, and where their arrays are put."""
    known = group.kept.setdefault("average_gradients", {})
    key = (tuple(paths), op, compression, name)
    if key not in known:
        if len(known) == 8:  # which leaves there are changes all the time
            known.clear()
        slots = [_Slot() for _ in paths]
        title = "average_gradients" if name is None else f"average_gradients '{name}'"
        known[key] = (
            Reducer(
                group,
                _adapter,
                list(zip(paths, slots, strict=True)),
                op=op,
                compression=compression,
                streams=False,
                title=title,
            ),
            slots,
        )
    found: tuple[Reducer, list[_Slot]] = known[key]
    return found


def _copied(path: str, leaf: Any) -> Any:
    try:
        return None if leaf is None else copy_of(leaf)
    except TypeError as error:
        raise TypeError(f"the gradient of {path!r}: {error}") from error


def _is_traced(leaves: list[Any]) -> bool:
    """Whether this is a function of JAX that is being compiled, where there are no values yet."""
    core = sys.modules.get("jax.core")
    return core is not None and any(isinstance(leaf, core.Tracer) for leaf in leaves)


def _opened(tree: Any, path: str, leaves: list[tuple[str, Any]]) -> Callable[[Iterator[Any]], Any]:
    """A function that makes another such tree of as many leaves; these, named, are in `leaves`."""
    node = _node(tree, path)
    if node is None:
        leaves.append((path or "gradients", tree))
        return next
    children, made_of = node
    parts = [_opened(child, name, leaves) for name, child in children]
    return lambda new: made_of([part(new) for part in parts])


def _node(
    tree: Any, path: str
) -> tuple[list[tuple[str, Any]], Callable[[Iterable[Any]], Any]] | None:
    """What a container holds, named, and how to make another one of as much; None for a leaf."""
    if tree is None or is_array(tree):
        return None
    if isinstance(tree, (dict, Mapping)):
        keys = sorted(tree, key=str)  # ranks may have filled their dicts in different orders
        children = [(join(path, key), tree[key]) for key in keys]
        return children, lambda new: _mapping_like(tree, dict(zip(keys, new, strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_make"):  # a named one
        names = tree._fields  # type: ignore[attr-defined]
        return [(join(path, key), x) for key, x in zip(names, tree, strict=True)], tree._make
    if isinstance(tree, (list, tuple)):
        if (pairs := keyed(tree)) is None:
            return [(f"{path or 'gradients'}[{i}]", x) for i, x in enumerate(tree)], type(tree)
        keys = [key for key, _ in pairs]
        children = [(join(path, key), x) for key, x in pairs]
        return children, lambda new: type(tree)(zip(keys, new, strict=True))
    util = sys.modules.get("jax.tree_util")
    if util is not None and not util.all_leaves([tree]):  # of a class that JAX was told of
        found, structure = util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        named = [(f"{path}{util.keystr(key)}".lstrip("."), x) for key, x in found]
        return named, structure.unflatten
    if is_dataclass(tree) and not isinstance(tree, type):
        keys = [field.name for field in fields(tree)]
        children = [(join(path, key), getattr(tree, key)) for key in keys]
        return children, lambda new: _dataclass_like(tree, zip(keys, new, strict=True))
    return None


def _mapping_like(tree: Any, items: dict[Any, Any]) -> Any:
    if not isinstance(tree, (dict, MutableMapping)):
        return type(tree)(items)
    other = copy.copy(tree)  # and so in the same order
    other.update(items)
    return other


def _dataclass_like(tree: Any, items: Iterable[tuple[str, Any]]) -> Any:
    other = copy.copy(tree)
    for name, value in items:
        object.__setattr__(other, name, value)  # it may be frozen
    return other
