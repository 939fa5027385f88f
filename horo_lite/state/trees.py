"""Nested dicts, lists and tuples: their leaves by name, and the same tree with other leaves.

`Tree` walks everything whose leaves the ranks compare by name: gradients, parameters, optimizer
states. Its order and names are the same on all ranks: the items of dicts are named by their keys
and sorted by the keys' text, since ranks may have filled them in different orders; those of lists
and tuples are named by position, unless they consist of pairs (name, leaf). `mapped` and
`overwritten` are for trees that need no names, because they are copied or stay on one rank.

Two walkers are separate, because their contracts differ. `adapters.object.name_leaves` names an
optimizer's parameters in the optimizer's order, which a plan uses, and runs in every step. In
`jax.trees.named_arrays`, JAX decides what a node is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from horo_lite.adapters.object import is_array, join, keyed

NUMBERS = (bool, int, float, complex, np.generic)


Rebuild: TypeAlias = Callable[[Iterator[Any], bool], Any]
"""Builds a tree from the next leaves; if the flag is True, in place where possible."""


class Node(NamedTuple):
    """The contents of a container."""

    children: list[tuple[str, Any]]
    """Its items, each with its full name."""

    other: Callable[[list[Any]], Any]
    """Returns a container of the same kind with other items; if that is impossible, changes it."""

    hold: Callable[[list[Any]], None] | None = None
    """Replaces the items in place; None if that is impossible."""


class Tree:
    """The named leaves of a tree, and ways to build the tree with other leaves.

    Args:
        tree: Nested dicts, lists, tuples and named tuples of leaves. An object that is none of
            these, and that `opened` does not open, is a leaf; so is None.
        root: The name of the tree if it is a leaf, and the prefix of names in a list.
        opened: Returns the contents of an object with a name, or None to treat it as usual. It is
            called first for every object except arrays, which are leaves.
        join: Returns the name of a dict's item, from the dict's name and the key.
    """

    def __init__(
        self,
        tree: Any,
        root: str = "",
        *,
        opened: Callable[[Any, str], Node | None] = lambda tree, path: None,
        join: Callable[[str, object], str] = join,
    ) -> None:
        self.named: list[tuple[str, Any]] = []
        self._root, self._opened, self._join = root, opened, join
        self._rebuilt = self._walk(tree, "") or _next

    def copied(self, leaves: Iterable[Any]) -> Any:
        """Return a new tree with these leaves, in containers of the same kinds."""
        return self._rebuilt(iter(leaves), False)

    def written(self, leaves: Iterable[Any]) -> Any:
        """Put these leaves into the tree itself; containers that cannot be changed are rebuilt."""
        return self._rebuilt(iter(leaves), True)

    def _walk(self, tree: Any, path: str) -> Rebuild | None:
        """Name the leaves; return a function that rebuilds the tree, or None for a leaf."""
        is_leaf = tree is None or is_array(tree)
        node = None if is_leaf else self._opened(tree, path) or self._node(tree, path)
        if node is None:
            self.named.append((path or self._root, tree))
            return None
        return partial(_rebuilt, tree, node, [self._walk(x, name) for name, x in node.children])

    def _node(self, tree: Any, path: str) -> Node | None:
        if isinstance(tree, (dict, Mapping)):  # the check for dict is fast
            keys = sorted(tree, key=str)
            if len(set(map(type, keys))) > 1:  # 1 and "1" have one name
                keys.sort(key=lambda key: (str(key), type(key).__name__))
            return Node(
                [(self._join(path, key), tree[key]) for key in keys],
                partial(_mapping_like, tree, keys),
                partial(_assign, tree, keys) if isinstance(tree, (dict, MutableMapping)) else None,
            )
        if not isinstance(tree, (list, tuple)):
            return None
        if hasattr(tree, "_fields"):  # a named tuple
            return Node(
                [(self._join(path, key), x) for key, x in zip(tree._fields, tree, strict=True)],
                tree._make,  # type: ignore[union-attr]
            )
        if (pairs := keyed(tree)) is None:
            here = path or self._root
            return Node(
                [(f"{here}[{i}]", x) for i, x in enumerate(tree)],
                type(tree),
                partial(tree.__setitem__, slice(None)) if isinstance(tree, list) else None,
            )
        keys = [key for key, _ in pairs]
        return Node(
            [(self._join(path, key), x) for key, x in pairs],
            lambda new: type(tree)(zip(keys, new, strict=True)),
            partial(_assign_pairs, tree, keys) if isinstance(tree, list) else None,
        )


# Functions that rebuild nodes, for partial(), which creates fewer objects for the garbage collector
# to visit than a closure does; there are several for each node.


def _rebuilt(
    tree: Any, node: Node, parts: list[Rebuild | None], leaves: Iterator[Any], in_place: bool
) -> Any:
    new = [part(leaves, in_place) if part else next(leaves) for part in parts]
    if not in_place:
        return node.other(new)
    if all(map(is_, new, [child for _, child in node.children])):
        return tree
    if node.hold is None:
        return node.other(new)
    node.hold(new)
    return tree


def _next(leaves: Iterator[Any], in_place: bool) -> Any:
    return next(leaves)


def _assign(tree: MutableMapping[Any, Any], keys: list[Any], new: list[Any]) -> None:
    for key, x in zip(keys, new, strict=True):
        tree[key] = x


def _assign_pairs(tree: list[Any], keys: list[Any], new: list[Any]) -> None:
    tree[:] = zip(keys, new, strict=True)


def _mapping_like(tree: Mapping[Any, Any], keys: list[Any], new: list[Any]) -> Any:
    if not isinstance(tree, (dict, MutableMapping)):
        items = dict(zip(keys, new, strict=True))
        return type(tree)({key: items[key] for key in tree})  # type: ignore[call-arg]
    other = copy.copy(tree)  # to keep the order
    _assign(other, keys, new)  # one by one, since update() of a Counter adds
    return other


def dataclass_node(tree: Any, path: str) -> Node | None:
    """Return the fields of a dataclass; None for anything else."""
    if not is_dataclass(tree) or isinstance(tree, type):
        return None
    keys = [field.name for field in fields(tree)]
    children = [(join(path, key), getattr(tree, key)) for key in keys]
    frozen = tree.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return Node(
        children,
        partial(_dataclass_like, tree, keys),
        None if frozen else partial(_set, tree, keys),
    )


def _set(tree: Any, keys: list[str], new: list[Any]) -> None:
    for key, x in zip(keys, new, strict=True):
        object.__setattr__(tree, key, x)  # it may be frozen


def _dataclass_like(tree: Any, keys: list[str], new: list[Any]) -> Any:
    other = copy.copy(tree)
    _set(other, keys, new)
    return other


def in_brackets(path: str, key: object) -> str:
    """Return names of items as Python expressions: `state['w'][0]`. For `Tree(join=)`."""
    return f"{path}[{key!r}]" if path else str(key)


def mapped(
    tree: Any,
    change: Callable[[Any], Any],
    key: Callable[[Any], Any] | None = None,
    done: dict[int, Any] | None = None,
) -> Any:
    """Return `tree` as plain dicts, lists and tuples, with `change` applied to each leaf.

    Everything that is neither dict, list nor tuple is a leaf. `key` is applied to the dicts' keys.
    What is one object in several places is one object in the result; with the same `done`, also
    in several trees.
    """
    done = {} if done is None else done
    if id(tree) in done:
        return done[id(tree)]
    result: Any
    if isinstance(tree, dict):
        result = {key(k) if key else k: mapped(x, change, key, done) for k, x in tree.items()}
    elif isinstance(tree, (list, tuple)):
        items = [mapped(x, change, key, done) for x in tree]
        result = items if isinstance(tree, list) else _tuple_like(tree, items)
    else:
        result = change(tree)
    done[id(tree)] = result
    return result


def overwritten(
    old: Any,
    new: Any,
    leaf: Callable[[Any, Any], Any],
    key: Callable[[Any], Any] = lambda key: key,
    done: dict[int, tuple[Any, Any, Any]] | None = None,
) -> Any:
    """Overwrite `old` with the contents of `new`, keeping its dicts and lists; return the result.

    `leaf(old, new)` does the same for leaves, and if only one of the two is a container; containers
    that are new here are filled from `leaf(None, …)`. `key` converts the keys of `new`'s dicts.
    What is one object in several places of `old`, but not of `new`, is copied: each place receives
    its own contents. `done` is what has been overwritten, with what, and its result.
    """
    done = {} if done is None else done
    place = old
    if id(old) in done:
        _, contents, result = done[id(old)]
        if contents is new:
            return result
        old = copy.deepcopy(old)
    if isinstance(new, dict) and (old is None or isinstance(old, dict)):
        result = {} if old is None else old
        here = {key(k): x for k, x in new.items()}
        items = {k: overwritten(result.get(k), x, leaf, key, done) for k, x in here.items()}
        result.clear()
        result.update(items)
    elif isinstance(new, (list, tuple)) and (old is None or isinstance(old, (list, tuple))):
        olds = [*(old or ()), *[None] * len(new)]
        result = [overwritten(x, y, leaf, key, done) for x, y in zip(olds, new, strict=False)]
        if isinstance(new, tuple):
            result = _tuple_like(new, result)
        elif isinstance(old, list):
            old[:] = result
            result = old
    else:
        result = leaf(old, new)
    done[id(place)] = place, new, result  # `place` too, so that its id stays its own
    return result


def repeats(array: Any) -> bool:
    """Return whether elements of a NumPy array or torch tensor are one in memory, as by expand().

    Other contents cannot be written into it.
    """
    strides = array.stride() if hasattr(array, "stride") else array.strides
    one = any(n > 1 and stride == 0 for n, stride in zip(array.shape, strides, strict=True))
    return one and 0 not in array.shape


def _tuple_like(tree: tuple[Any, ...], items: list[Any]) -> Any:
    if hasattr(tree, "_make"):
        return tree._make(items)
    try:
        return type(tree)(items)
    except TypeError:  # a derived class with another constructor
        return tuple(items)
