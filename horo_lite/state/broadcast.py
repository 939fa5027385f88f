"""Broadcast of one rank's weights and optimizer state to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import ops
from horo_lite._native import Tensors
from horo_lite.adapters import Adapter, adapter_of, changed, from_numpy, to_host
from horo_lite.adapters.object import NO_ORDER, Held, is_array, join
from horo_lite.collectives.arrays import gpu_of
from horo_lite.state.optimizer_state import OptimizerState, in_host_memory
from horo_lite.state.trees import NUMBERS, Node, Tree, dataclass_node
from horo_lite.state.wrapper import unwrapped

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def broadcast_parameters(params: Any, root_rank: int = 0, *, group: Group | None = None) -> Any:
    """Give all ranks the values that rank `root_rank` has in `params`.

    Collective, at any time. `params` is an array or parameter, any nesting of dicts, lists, tuples,
    dataclasses and (name, parameter) pairs of them, a module (torch: its whole state_dict,
    including buffers, and its extra state), or an optimizer. Objects are written in place. Values
    that cannot be written (JAX arrays, numbers) are replaced in the dict, list or dataclass that
    holds them; tuples and frozen dataclasses that hold such values are rebuilt, so use the result:
    `params = broadcast_parameters(params)`.

    Dicts may be in any order.

    Args:
        params: The tree, module or optimizer.
        root_rank: The rank whose values all receive, 0 to size - 1.
        group: The ranks that take part, all of which call it; by default all.

    Returns:
        `params`, or a new object if it cannot be written in place.

    Raises:
        MismatchError: On every rank, if names, dtypes or shapes differ; it names the first
            difference and the ranks. Nothing has been written.
        ValueError: `params` is a generator that has already been used in part or completely.
    """
    group = ops.ranks_of(group)
    if isgenerator(params) and getgeneratorstate(params) != GEN_CREATED:
        raise ValueError(
            "params is a generator from which values have already been taken, so they would not be "
            "broadcast: an optimizer that received model.parameters(), for example, has consumed "
            "it. Call model.parameters() again for broadcast_parameters"
        )
    if isinstance(params, Iterator):
        params = list(params)
    if params is None or isinstance(params, str):
        raise TypeError(
            f"broadcast_parameters needs parameters, a module or an optimizer, not {params!r}"
        )
    tree = Tree(params, opened=_received_by)
    arrays = [(name, x) for name, x in tree.named if not isinstance(x, NOT_ARRAYS)]
    places = Places(arrays)
    for chosen in places.by_device():
        ops.grouped_broadcast_(
            [places.targets[i] for i in chosen],
            root_rank,
            names=[arrays[i][0] for i in chosen],
            group=group,
        )
    is_root = group.rank == root_rank
    received = iter(places.received([is_root] * len(arrays)))
    objects = [x for _, x in tree.named if isinstance(x, Held)]
    if objects:
        theirs = ops.broadcast_made(
            lambda: [in_host_memory(held.get()) for held in objects], root_rank, group=group
        )
        for held, state in zip(objects, theirs, strict=True) if not is_root else ():
            held.set(state)
    return tree.written(x if isinstance(x, NOT_ARRAYS) else next(received) for _, x in tree.named)


class Places:
    """Where ranks receive the values of named leaves: in their own memory, or in copies of them.

    Attributes:
        targets: For each leaf, what an operation writes in place.
    """

    def __init__(self, named: Sequence[tuple[str, Any]]) -> None:
        self._leaves = [leaf for _, leaf in named]
        self._values = [_value(name, leaf) for name, leaf in named]
        self.targets = [
            x if is_writable(x) and (x is leaf or is_same(x, _value(name, leaf))) else np.array(x)
            for x, (name, leaf) in zip(self._values, named, strict=True)
        ]

    def by_device(self) -> list[list[int]]:
        """Return the positions of the targets in host memory, maybe none, then those on each GPU.

        The copy of a number is in host memory, even if other values are on a GPU.
        """
        where = [gpu_of(target) for target in self.targets]
        gpus = sorted({gpu for gpu in where if gpu is not None})
        return [[i for i, gpu in enumerate(where) if gpu == here] for here in (None, *gpus)]

    def received(self, is_mine: Sequence[bool]) -> list[Any]:
        """Return the leaves with the values in the targets, as the same objects if possible.

        `is_mine` says of each leaf whether the value is this rank's own. Frameworks are told of
        these, too, so that an error that this causes in one is raised on all ranks.
        """
        triples = list(zip(self._leaves, self.targets, self._values, strict=True))
        changed([leaf for leaf, target, value in triples if target is value])
        return [_received(*triple, mine) for triple, mine in zip(triples, is_mine, strict=True)]


# None and strings in a tree are not parameters, and are left unchanged.
NOT_ARRAYS = (type(None), str, Held)


def broadcast_optimizer_state(
    optimizer: Any, root_rank: int = 0, *, group: Group | None = None
) -> None:
    """Copy the optimizer's state (momenta, step counts, learning rates) from rank `root_rank`.

    Collective, at any time; the other ranks may have no state yet. Parameters are not changed: see
    `broadcast_parameters`. The state is that of `state_dict()` and `load_state_dict()`, or that of
    the optimizer's adapter. For other optimizers, it is every attribute that is a number, an array
    or a list, tuple or dict of these; parameters in it, and keys that are one or the `id()` of one,
    stand for the parameter at the same position on the other ranks. Other attributes, such as
    objects, are not changed: give an optimizer with these a state_dict() and load_state_dict().

    The state is sent pickled, so for a moment it is in memory twice.

    Args:
        optimizer: The optimizer, wrapped or not.
        root_rank: The rank whose values all receive, 0 to size - 1.
        group: The ranks that take part, all of which call it; by default all.
    """
    group = ops.ranks_of(group)
    state = OptimizerState(optimizer)
    state.check()
    received = broadcast_content(state.read, root_rank, group, is_sharded=state.is_sharded)
    if group.rank != root_rank:
        state.write(received)


def broadcast_content(
    read: Callable[[], Any], root_rank: int, group: Group, *, is_sharded: bool
) -> Any:
    """Return what `read` returns on rank `root_rank`. All ranks call it if its state is sharded."""
    received = ops.broadcast_made(lambda: None if is_sharded else read(), root_rank, group=group)
    if received is None:
        content = read()
        received = ops.broadcast_object(content, root_rank, group=group)
    return received


def opened(tree: Any, path: str) -> Node | None:
    """Return the contents of a module or optimizer, for `Tree`; None for anything else."""
    if is_container(tree):
        return None
    adapter = adapter_of(tree)
    if (flattened := adapter.flattened(tree)) is not None:
        named, rebuilt = flattened
        return Node([(join(path, name), leaf) for name, leaf in named], rebuilt)
    if isinstance(tree, dict):
        return None
    _, named = unwrapped(tree)
    for name, parameter in named:
        if is_array(parameter) and not is_writable(to_host(parameter)):
            raise TypeError(
                f"{type(tree).__name__} holds {name!r} as a {type(parameter).__name__}, which "
                "cannot be written: broadcast the dict or list that contains it"
            )
    named = [*named, *adapter.objects(tree)]
    if not named and type(adapter) is Adapter and not hasattr(tree, "grad"):
        return dataclass_node(tree, path)
    return Node([(join(path, name), x) for name, x in named], lambda _: tree) if named else None


def is_container(tree: Any) -> bool:
    """Return whether no framework needs to be asked what `tree` is; MLX's modules are dicts."""
    if isinstance(tree, (list, tuple, str, Held, *NUMBERS)) or type(tree) is dict:
        return True
    return isinstance(tree, Mapping) and not isinstance(tree, dict)


def _received_by(tree: Any, path: str) -> Node | None:
    """Do the same as `opened`, but refuse what could be read and not written."""
    for key, x in tree.items() if isinstance(tree, Mapping) else ():
        if isinstance(key, str) and key.endswith("_extra_state") and x is not None:
            raise TypeError(
                f"{join(path, key)!r} is extra state of a module (its get_extra_state()), which "
                "only the module itself can receive: pass the model, not its state_dict()"
            )
    return opened(tree, path)


def _value(name: str, leaf: Any) -> Any:
    try:
        return to_host(leaf)
    except TypeError as error:
        raise TypeError(f"{name or 'params'!r}: {error}") from error


def is_writable(value: Any) -> bool:
    """Return whether a received value can be written into `value`."""
    try:
        Tensors([value], stream=NO_ORDER)
    except (ValueError, BufferError):
        return False
    return True


def is_same(value: Any, again: Any) -> bool:
    """Return whether both are the same memory: not what an attribute copies each time it is read.

    What is written into such a copy would be lost.
    """
    if value is again or not prod(value.shape):
        return True
    return bool(Tensors([value, again], stream=NO_ORDER).overlaps())


def _received(leaf: Any, target: Any, value: Any, is_root: bool) -> Any:
    """Return the leaf with the values in `target`, as the same object if possible."""
    if is_root:
        return leaf
    if isinstance(leaf, NUMBERS):
        return from_numpy(target, leaf)
    if target is value:
        return leaf
    if is_array(leaf):
        return from_numpy(target, leaf)
    return adapter_of(leaf).received(leaf, target)
