"""Everyone starts from one rank's weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import ops
from horo_lite._native import Tensors
from horo_lite.adapters import adapter_of, from_numpy, to_host
from horo_lite.adapters.object import NO_ORDER, is_array, join
from horo_lite.collectives.arrays import gpu_of
from horo_lite.state.optimizer_state import OptimizerState
from horo_lite.state.trees import NUMBERS, Node, Tree
from horo_lite.state.wrapper import unwrapped

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def broadcast_parameters(params: Any, root_rank: int = 0, *, group: Group | None = None) -> Any:
    """`params` with the values of rank `root_rank`, and so alike on every rank.

    Collective, at any time. `params` is an array or parameter, any nesting of dicts, lists, tuples
    and (name, parameter) pairs of them, a module (torch: its whole state_dict, buffers too), or an
    optimizer. Objects are kept and written in place. What cannot be written (JAX arrays, numbers)
    is replaced in the dict or list that holds it; tuples that hold such are made anew, so use what
    is returned: `params = broadcast_parameters(params)`.

    MismatchError on every rank, naming the first that differs and who has what, where names, dtypes
    or shapes are not alike; nothing has been written then. Dicts may be in any order. ValueError
    for a generator that has been used, of which nothing or a part would be broadcast.

    Args:
        params: The tree, module or optimizer.
        root_rank: The rank whose values all receive, 0 to size - 1.
        group: The ranks that take part, all of which call it; by default all.

    Returns:
        `params`, or what takes its place where it cannot be written.
    """
    group = ops.ranks_of(group)
    if isgenerator(params) and getgeneratorstate(params) != GEN_CREATED:
        raise ValueError(
            "params is a generator of which values were taken before, which would not be "
            "broadcast: an optimizer that was given model.parameters() has used them up. Call it "
            "again for broadcast_parameters"
        )
    if isinstance(params, Iterator):
        params = list(params)
    if params is None or isinstance(params, str):
        raise TypeError(
            f"broadcast_parameters needs parameters, a module or an optimizer, not {params!r}"
        )
    tree = Tree(params, opened=opened)
    # None and strings in a tree are no parameters, and are left alone.
    arrays = [(name, x) for name, x in tree.named if x is not None and type(x) is not str]
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
    return tree.written(x if isinstance(x, skipped) else next(received) for _, x in tree.named)


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
    group = ops.ranks_of(group)
    state = OptimizerState(optimizer)
    state.check()
    is_root = group.rank == root_rank
    received = ops.broadcast_object(state.read() if is_root else None, root_rank, group=group)
    if not is_root:
        state.write(received)


def opened(tree: Any, path: str) -> Node | None:
    """What a module or optimizer contains, for `Tree`; None for anything else."""
    if isinstance(tree, (list, tuple, str, *NUMBERS)) or type(tree) is dict:
        return None
    if isinstance(tree, Mapping) and not isinstance(tree, dict):
        return None
    if (flattened := adapter_of(tree).flattened(tree)) is not None:
        named, rebuilt = flattened
        return Node([(join(path, name), leaf) for name, leaf in named], rebuilt)
    if isinstance(tree, dict):
        return None
    _, named = unwrapped(tree)
    for name, parameter in named:
        if is_array(parameter) and not is_writable(to_host(parameter)):
            raise TypeError(
                f"{type(tree).__name__} holds {name!r} as a {type(parameter).__name__}, which "
                "cannot be written: broadcast the dict or list that it keeps them in"
            )
    return Node([(join(path, name), x) for name, x in named], lambda _: tree) if named else None


def _value(name: str, leaf: Any) -> Any:
    try:
        return to_host(leaf)
    except TypeError as error:
        raise TypeError(f"{name or 'params'!r}: {error}") from error


def is_writable(value: Any) -> bool:
    """Whether a received value can be written into it."""
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
