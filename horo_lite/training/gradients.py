"""Averages of gradients that functions return: trees of arrays in, trees of averages out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from horo_lite.adapters import from_numpy
from horo_lite.arguments import QUANTIZED
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.reductions import Average, Op
from horo_lite.state.trees import Node, Tree, dataclass_node
from horo_lite.training.optimizer import takes_weight
from horo_lite.training.options import Options
from horo_lite.training.transform import Transform, is_traced

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

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
    parameters: Any = None,
) -> T:
    """Return a tree like `gradients` with the arrays averaged over all ranks.

    Every rank of `group` calls it, with the same names, shapes, dtypes and options. `gradients` is
    an array or a number, or dicts, lists, tuples, named tuples, dataclasses and (if JAX is
    imported) pytrees of them, as returned by jax.grad, torch.func.grad, mlx.nn.value_and_grad,
    autograd.grad or your own function. They are not changed: the result has new arrays of the same
    kinds in containers of the same kinds. It also works in functions that JAX compiles.

    A leaf that is None on every rank stays None; if other ranks have an array, it counts as zeros
    and receives the result. (On GPUs every rank needs every array.)

    All arrays travel together. Costs a copy of them, and two handshakes in addition to the bytes.

    Args:
        gradients: The tree. It is not changed.
        op: `Average` or `Sum`. Averages of integer arrays are truncated towards zero.
        compression: The wire format; `Compression.fp16` halves the bytes.
        weight: This rank's number of samples, given on every rank or on none: the average is
            then the mean over all samples, however uneven the batches. 0 is allowed.
        name: The exchange's name in messages; the same on every rank. With `Compression.int8` and
            `.int4`, only calls with a name have error feedback: give each model its own.
        group: The ranks that take part, all of which call it; by default all.
        parameters: A tree of the parameters that will be updated, under the same names: the ranks
            compare them after 10 and 100 calls and every 1,000, and rank 0 warns if they differ.

    Returns:
        A tree like `gradients`, of new arrays.

    Raises:
        MismatchError: On every rank, if their trees differ; it names the first leaf that does
            ("layers[0].weight") and the ranks. Further calls are possible.
        TypeError: A leaf, which it names, is not an array.
    """
    options = Options(op=op, compression=compression, group=group)
    tree = Tree(gradients, "gradients", opened=opened)
    names, arrays = [name for name, _ in tree.named], [leaf for _, leaf in tree.named]
    if is_traced(arrays):
        traced: T = import_module("horo_lite.jax").average_gradients(
            gradients,
            op=op,
            compression=compression,
            weight=weight,
            name=name,
            group=group,
            parameters=parameters,
            broadcast_later=True,
        )
        return traced

    def compared() -> list[tuple[str, Any]]:
        tree = Tree(parameters, "gradients", opened=opened)
        return [(name, leaf) for name, leaf in tree.named if name in names]

    known = None if parameters is None else compared
    results = _transform(options, names, name)(names, arrays, weight, compared=known)
    averages: T = tree.copied(
        result if leaf is None else from_numpy(result, leaf)
        for result, leaf in zip(results, arrays, strict=True)
    )
    return averages


def grad_and_average(
    fn: Callable[P, T],
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    name: str | None = None,
    group: Group | None = None,
) -> Callable[..., T]:
    """Return a function that calls `fn` and averages its result over all ranks.

        gradient = hvd.grad_and_average(jax.value_and_grad(loss))
        value, gradients = gradient(params, batch, weight=len(batch))

    `fn` returns gradients, or a structure that contains gradients: jax.grad(loss),
    torch.func.grad(loss), autograd.grad(loss), mlx.nn.value_and_grad(model, loss) or your own
    function. All numbers and arrays in its result are averaged, including the loss; it must contain
    nothing else. To exclude something (predictions, a number of samples), call `average_gradients`
    on the rest.

    Every rank calls the new function the same number of times, with its own arguments. `weight` is
    its number of samples, as in `average_gradients`, and is not passed on; other arguments are.

    Args:
        fn: A function whose entire result is averaged.
        op: `Average` or `Sum`. Averages of integer arrays are truncated towards zero.
        compression: The wire format; `Compression.fp16` halves the bytes.
        name: The exchange's name in messages; the same on every rank. With `Compression.int8` and
            `.int4`, only calls with a name have error feedback: give each model its own.
        group: The ranks that take part, all of which call it; by default all.

    Returns:
        A function with the arguments of `fn`, and `weight`.
    """

    @wraps(fn)
    def averaged(*args: Any, weight: float | None = None, **kwargs: Any) -> T:
        if weight is not None and takes_weight(fn):
            raise TypeError(
                f"{fn!r} has its own argument `weight`: call it directly, and then "
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


def _transform(options: Options, names: list[str], name: str | None) -> Transform:
    """Return the Transform for trees with these names; each has its own, since it keeps a plan."""
    # What is left over, or being tried, belongs to a name: others must not displace it.
    compression = options.compression
    keeps = name is not None and (compression.wire in QUANTIZED or compression.is_for_steps)
    kind = ("average_gradients", name) if keeps else "average_gradients"
    known: dict[Any, Transform] = options.ranks.kept.setdefault(kind, {})
    key = (tuple(names), options.op, options.compression, name)
    if key not in known:
        if len(known) == 8:  # the set of leaves changes all the time
            known.clear()
        title = "average_gradients" if name is None else f"average_gradients '{name}'"
        known[key] = Transform(
            replace(options, group=options.ranks),
            copies=True,
            title=title,
            feeds_back=name is not None,  # else two models may have gradients of these names
        )
    return known[key]


def opened(tree: Any, path: str) -> Node | None:
    """Return the contents of other containers: classes registered with JAX, and dataclasses."""
    if isinstance(tree, (dict, list, tuple, Mapping)):
        return None
    util = sys.modules.get("jax.tree_util")
    if util is not None and not util.all_leaves([tree]):
        found, structure = util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        named = [(f"{path}{util.keystr(key)}".lstrip("."), x) for key, x in found]
        return Node(named, structure.unflatten)
    return dataclass_node(tree, path)
