"""Everyone starts from one rank's weights and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horo_lite import context, ops
from horo_lite._native import Tensors
from horo_lite.adapters import Adapter, adapter_of, from_numpy, to_host
from horo_lite.adapters.object import NO_ORDER, is_array, join, keyed
from horo_lite.collectives.arrays import gpu_of
from horo_lite.state.wrapper import wrapped

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

NUMBERS = (bool, int, float, complex, np.generic)


def broadcast_parameters(params: Any, root_rank: int = 0, *, group: Group | None = None) -> Any:
    """`params` with the values of rank `root_rank`, and so alike on every rank.

    Collective, at any time. `params` is an array or parameter, any nesting of dicts, lists, tuples
    and (name, parameter) pairs of them, a module (torch: its whole state_dict, buffers too), or an
    optimizer. Objects are kept and written in place. What cannot be written (JAX arrays, numbers)
    is replaced in the dict or list that holds it; tuples that hold such are made anew, so use what
    is returned: `params = broadcast_parameters(params)`.

    MismatchError on every rank, naming the first that differs and who has what, where names, dtypes
    or shapes are not alike; nothing has been written then. Dicts may be in any order.

    Args:
        params: The tree, module or optimizer.
        root_rank: The rank whose values all receive, 0 to size - 1.
        group: The ranks that take part, all of which call it; by default all.

    Returns:
        `params`, or what takes its place where it cannot be written.
    """
    group = group or _world()
    if isinstance(params, Iterator):
        params = list(params)
    leaves: list[tuple[str, Any]] = []

    def collect(name: str, leaf: Any) -> Any:
        leaves.append((name, leaf))
        return leaf

    map_leaves(params, "", collect)
    # None and strings in a tree are no parameters, and are left alone.
    arrays = [(name, leaf) for name, leaf in leaves if leaf is not None and type(leaf) is not str]
    values = [_value(name, leaf) for name, leaf in arrays]
    targets = [value if is_writable(value) else np.array(value) for value in values]
    # A number's copy is in the host's memory, where its neighbours may be on a GPU.
    for here in (None, *sorted({gpu for gpu in map(gpu_of, targets) if gpu is not None})):
        chosen = [i for i, target in enumerate(targets) if gpu_of(target) == here]
        if chosen or here is None:
            ops.grouped_broadcast_(
                [targets[i] for i in chosen],
                root_rank,
                names=[arrays[i][0] for i in chosen],
                group=group,
            )
    is_root = group.rank == root_rank
    received = iter(
        [
            _received(leaf, target, value, is_root)
            for (_, leaf), target, value in zip(arrays, targets, values, strict=True)
        ]
    )
    skipped = (type(None), str)
    return map_leaves(
        params, "", lambda _, leaf: leaf if isinstance(leaf, skipped) else next(received)
    )


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int = 0, *, group: Group | None = None
) -> None:
    """`optimizer` goes on as rank `root_rank`'s would: momenta, step counts, learning rates.

    Collective, at any time; the other ranks may have no state yet. Parameters are not touched: see
    `broadcast_parameters`. Optimizers with `state_dict()` and `load_state_dict()`, or whose adapter
    has another way, are asked for theirs. Of any other, every attribute that is a number, an array
    or a list, tuple or dict of such is taken over; keys that are parameters, or the `id()` of one,
    stand for the parameter at the same position on the other ranks. Attributes of other kinds stay
    as they are.

    The state travels pickled: for a moment, it is in memory twice.

    Args:
        optimizer: The optimizer, wrapped or not.
        root_rank: The rank whose values all receive, 0 to size - 1.
        group: The ranks that take part, all of which call it; by default all.
    """
    group = group or _world()
    own = wrapped(optimizer)
    inner = optimizer if own is None else own.inner
    is_root = group.rank == root_rank
    adapter = adapter_of(inner)
    mine: Any = adapter.state(inner)
    if mine is not None:
        state = ops.broadcast_object(mine if is_root else None, root_rank, group=group)
        if not is_root:
            adapter.set_state(inner, state)
        return
    if hasattr(inner, "state_dict") and hasattr(inner, "load_state_dict"):
        mine = _in_host_memory(inner.state_dict()) if is_root else None
        state = ops.broadcast_object(mine, root_rank, group=group)
        if not is_root:
            before = [dict(options) for options in getattr(inner, "param_groups", ())]
            inner.load_state_dict(state)
            for options, old in zip(getattr(inner, "param_groups", ()), before, strict=False):
                for key, value in options.items():  # a learning rate on a GPU stays on it
                    if gpu_of(old.get(key)) is not None and hasattr(value, "to"):
                        options[key] = value.to(old[key].device)
        return
    named = adapter.parameters(inner) if own is None else own.named()
    places = ParameterPositions(adapter, [parameter for _, parameter in named])
    mine = places.portable(vars(inner)) if is_root else None
    state = ops.broadcast_object(mine, root_rank, group=group)
    if state is not None and not is_root:
        for attribute, value in state.items():
            setattr(inner, attribute, places.local(value, getattr(inner, attribute, None)))


def _in_host_memory(tree: Any) -> Any:
    """Pickled as they are, a GPU's tensors would come to that same GPU on the other ranks."""
    if isinstance(tree, dict):
        return {key: _in_host_memory(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_in_host_memory(value) for value in tree]
    return tree.cpu() if hasattr(tree, "cpu") and gpu_of(tree) is not None else tree


def _world() -> Group:
    return context.world().group


# Trees of parameters.


def map_leaves(tree: Any, path: str, visit: Callable[[str, Any], Any]) -> Any:
    """`tree` with `visit(name, leaf)` for each leaf; the containers are kept if they can be."""
    if isinstance(tree, Mapping) and not _is_module(tree):
        # Sorted: ranks may have filled their dicts in different orders.
        new = {key: map_leaves(tree[key], join(path, key), visit) for key in sorted(tree, key=str)}
        changed = [key for key in tree if new[key] is not tree[key]]
        if not changed:
            return tree
        if not isinstance(tree, MutableMapping):
            return type(tree)({key: new[key] for key in tree})  # type: ignore[call-arg]
        for key in changed:
            tree[key] = new[key]
        return tree
    if isinstance(tree, (list, tuple)):
        if (pairs := keyed(tree)) is not None:
            items = [(key, map_leaves(leaf, join(path, key), visit)) for key, leaf in pairs]
            same = all(new[1] is old[1] for new, old in zip(items, tree, strict=True))
        else:
            items = [map_leaves(item, f"{path}[{i}]", visit) for i, item in enumerate(tree)]
            same = all(new is old for new, old in zip(items, tree, strict=True))
        if same:
            return tree
        if isinstance(tree, list):
            tree[:] = items
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if tree is None or is_array(tree) or isinstance(tree, (str, *NUMBERS)):
        return visit(path, tree)
    if (own := wrapped(tree)) is not None:
        named = own.named()
    elif (flattened := adapter_of(tree).flattened(tree)) is not None:
        named, rebuilt = flattened
        return rebuilt(visit(join(path, name), leaf) for name, leaf in named)
    else:
        named = adapter_of(tree).parameters(tree)
    if not named:
        return visit(path, tree)
    for name, parameter in named:
        if is_array(parameter) and not is_writable(to_host(parameter)):
            raise TypeError(
                f"{type(tree).__name__} holds {name!r} as a {type(parameter).__name__}, which "
                "cannot be written: broadcast the dict or list that it keeps them in"
            )
        visit(join(path, name), parameter)
    return tree


def _is_module(tree: Any) -> bool:
    """Whether it is a dict that is more than that, as MLX's modules are."""
    is_special = isinstance(tree, dict) and type(tree) is not dict
    return is_special and adapter_of(tree).flattened(tree) is not None


def _value(name: str, leaf: Any) -> Any:
    try:
        return to_host(leaf)
    except TypeError as error:
        raise TypeError(f"{name!r}: {error}") from error


def is_writable(value: Any) -> bool:
    try:
        Tensors([value], stream=NO_ORDER)
    except (ValueError, BufferError):
        return False
    return True


def _received(leaf: Any, target: Any, value: Any, is_root: bool) -> Any:
    """The leaf, now that `target` holds what it should: the same object where that can be."""
    if is_root:
        return leaf
    if isinstance(leaf, NUMBERS):
        return from_numpy(target, leaf)
    if target is value:
        return leaf
    if is_array(leaf):
        return from_numpy(target, leaf)
    adapter_of(leaf).set_value(leaf, target)
    return leaf


# The state of optimizers that have no state_dict().


class Position(NamedTuple):
    """A dict's key that was a parameter, or its id()."""

    number: int
    is_id: bool


class _Foreign(Exception):  # noqa: N818 (no error: a kind of value)
    """What holds a parameter or something unknown is not state to hand over."""


class ParameterPositions:
    """Reads and writes state in which parameters are known by their position."""

    def __init__(self, adapter: Adapter, parameters: list[Any]) -> None:
        self._adapter = adapter
        self._parameters = parameters
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        # Held, since the id() of what is gone may come back as something else's.
        self._held = [x for p in parameters for x in (p, adapter.value(p), adapter.gradient(p))]
        self._not_state = {id(x) for x in self._held if x is not None}

    def portable(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that are state, ready to be pickled."""
        state = {}
        for name, value in attributes.items():
            with suppress(_Foreign):
                state[name] = self._packed(value)
        return state

    def _packed(self, value: Any) -> Any:
        if value is None or isinstance(value, NUMBERS):
            return value
        if id(value) in self._not_state:
            raise _Foreign
        if isinstance(value, dict):
            return {self._key(key): self._packed(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            items = [self._packed(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if self._is_array(value):
            return np.array(to_host(value))
        raise _Foreign

    def _is_array(self, value: Any) -> bool:
        return is_array(value) or isinstance(value, self._adapter.array_types)

    def _key(self, key: Any) -> Any:
        if id(key) in self._index:
            return Position(self._index[id(key)], is_id=False)
        if isinstance(key, int) and key in self._index:
            return Position(self._index[key], is_id=True)
        if isinstance(key, (int, str)):
            return key
        raise _Foreign

    def local(self, value: Any, old: Any) -> Any:
        """What `value` is on this rank; arrays and containers of `old` are kept and written."""
        if isinstance(value, np.ndarray):
            return self._local_array(value, old)
        if isinstance(value, dict):
            kept = old if isinstance(old, dict) else {}
            keys = {self._local_key(key): key for key in value}
            new = {key: self.local(value[sent], kept.get(key)) for key, sent in keys.items()}
            kept.clear()
            kept.update(new)
            return kept
        if isinstance(value, (list, tuple)):
            olds = list(old) if isinstance(old, (list, tuple)) else []
            olds += [None] * (len(value) - len(olds))
            items = [self.local(item, was) for item, was in zip(value, olds, strict=False)]
            if isinstance(value, list) and isinstance(old, list):
                old[:] = items
                return old
            return type(value)(items)
        return value

    def _local_array(self, value: np.ndarray[Any, Any], old: Any) -> Any:
        if not self._is_array(old):
            if self._parameters:
                return from_numpy(value, self._parameters[0])
            return self._adapter.from_numpy(value, value)
        memory = to_host(old)
        fits = isinstance(memory, np.ndarray) and memory.shape == value.shape
        if fits and memory.dtype == value.dtype and memory.flags.writeable:
            memory[...] = value
            return old
        return from_numpy(value, old)

    def _local_key(self, key: Any) -> Any:
        if isinstance(key, Position):
            parameter = self._parameters[key.number]
            return id(parameter) if key.is_id else parameter
        return key
