"""Nested dicts, lists and tuples: their leaves by name, and the same tree with other leaves.

`Tree` is the walker of everything whose leaves the ranks compare by name: gradients, parameters,
optimizer states. Its order and its names are alike on all ranks: dicts are walked by their keys'
text, since ranks may have filled them in different orders, and named by their keys; lists and
tuples by position, unless they consist of pairs (name, leaf). `mapped` and `overwritten` are for
what has no names, because it is copied or kept on one rank.

Two walkers are apart, since what they promise differs. `adapters.object.name_leaves` names an
optimizer's parameters in the order in which it has them, which is a plan's, and runs in every step.
`jax.trees.named_arrays` leaves it to JAX what a node is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from horo_lite.adapters.object import is_array, join, keyed

NUMBERS = (bool, int, float, complex, np.generic)


Rebuild: TypeAlias = Callable[[Iterator[Any], bool], Any]
"""Makes a tree of the next leaves; True: in place, where that can be."""


class Node(NamedTuple):
    """A container, opened."""

    children: list[tuple[str, Any]]
    """What it holds, each with its whole name."""

    other: Callable[[list[Any]], Any]
    """Makes another one of the same kind that holds these; or, if it has to, changes itself."""

    hold: Callable[[list[Any]], None] | None = None
    """Makes this one hold these; None where only another one can."""


class Tree:
    """The leaves of a tree, named, and how to get the tree with others in their place.

    Args:
        tree: Dicts, lists, tuples and named tuples of each other and of leaves. What is neither
            one of these nor opened by `opened`, and None, is a leaf.
        root: The name of a tree that is a leaf, and what the names in a list begin with.
        opened: Asked before anything else what an object with that name contains; None: it is to
            be looked at as usual. Not asked about arrays, which are leaves.
        join: The name of a dict's item, by the dict's and the key.
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
        """Another tree of these leaves, in containers of the same kinds."""
        return self._rebuilt(iter(leaves), False)

    def written(self, leaves: Iterable[Any]) -> Any:
        """The tree itself holds these leaves; what cannot be written is made anew around them."""
        return self._rebuilt(iter(leaves), True)

    def _walk(self, tree: Any, path: str) -> Rebuild | None:
        """Name the leaves; return what makes the tree from others, or None for a leaf."""
        is_leaf = tree is None or is_array(tree)
        node = None if is_leaf else self._opened(tree, path) or self._node(tree, path)
        if node is None:
            self.named.append((path or self._root, tree))
            return None
        return partial(_rebuilt, tree, node, [self._walk(x, name) for name, x in node.children])

    def _node(self, tree: Any, path: str) -> Node | None:
        if isinstance(tree, (dict, Mapping)):  # the first is quick to see
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


# What rebuilds nodes: partial() holds its arguments in fewer objects for the garbage collector to
# visit than a closure does, and there are several for each node.


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
        if tree[key] is not x:
            tree[key] = x


def _assign_pairs(tree: list[Any], keys: list[Any], new: list[Any]) -> None:
    tree[:] = zip(keys, new, strict=True)


def _mapping_like(tree: Mapping[Any, Any], keys: list[Any], new: list[Any]) -> Any:
    items = dict(zip(keys, new, strict=True))
    if not isinstance(tree, (dict, MutableMapping)):
        return type(tree)({key: items[key] for key in tree})  # type: ignore[call-arg]
    other = copy.copy(tree)  # and so in the same order
    other.update(items)
    return other


def in_brackets(path: str, key: object) -> str:
    """A `join` that names items as Python would: `state['w'][0]`."""
    return f"{path}[{key!r}]" if path else str(key)


def mapped(tree: Any, change: Callable[[Any], Any], key: Callable[[Any], Any] | None = None) -> Any:
    """Plain dicts, lists and tuples, like those of `tree`, of what `change` makes of each leaf.

    Everything that is neither dict, list nor tuple is a leaf. `key` changes the dicts' keys.
    """
    if isinstance(tree, dict):
        return {key(k) if key else k: mapped(x, change, key) for k, x in tree.items()}
    if isinstance(tree, (list, tuple)):
        items = [mapped(x, change, key) for x in tree]
        return items if isinstance(tree, list) else _tuple_like(tree, items)
    return change(tree)


def overwritten(
    old: Any,
    new: Any,
    leaf: Callable[[Any, Any], Any],
    key: Callable[[Any], Any] = lambda key: key,
) -> Any:
    """`old`, or what takes its place, holding what `new` holds: dicts and lists are kept.

    `leaf(old, new)` does the same for what is no container, or not on both sides; a container that
    is new here is filled from `leaf(None, …)`. `key` makes the dicts' keys from those of `new`.
    """
    if isinstance(new, dict) and (old is None or isinstance(old, dict)):
        kept = {} if old is None else old
        here = {key(k): x for k, x in new.items()}
        items = {k: overwritten(kept.get(k), x, leaf, key) for k, x in here.items()}
        kept.clear()
        kept.update(items)
        return kept
    if isinstance(new, (list, tuple)) and (old is None or isinstance(old, (list, tuple))):
        olds = [*(old or ()), *[None] * len(new)]
        new_items = [overwritten(x, y, leaf, key) for x, y in zip(olds, new, strict=False)]
        if isinstance(old, list) and isinstance(new, list):
            old[:] = new_items
            return old
        return new_items if isinstance(new, list) else _tuple_like(new, new_items)
    return leaf(old, new)


def _tuple_like(tree: tuple[Any, ...], items: list[Any]) -> Any:
    if hasattr(tree, "_make"):
        return tree._make(items)
    try:
        return type(tree)(items)
    except TypeError:  # a class of its own, which holds other things, or is made otherwise
        return tuple(items)
