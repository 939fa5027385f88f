"""DistributedOptimizer for optax: average, then the inner transformation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op, Sum
from horo_lite.jax import sharded_state
from horo_lite.jax.operations import Array, allreduce, average_gradients, grouped_allreduce
from horo_lite.training.options import Options

if TYPE_CHECKING:
    import optax


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: optax.GradientTransformation,
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    shard_state: bool = False,
    name: str | None = None,
    group: Group | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optax transformation so that its `update` averages the gradients of all ranks first.

    Every rank creates it with the same options and calls `update` the same number of times, inside
    or outside `jax.jit`. The result is an ordinary optax transformation: it can be chained and
    wrapped, its state is that of the inner transformation, and gradients can be any pytree.

    `update(…, weight=n)`, on every rank or on none, averages over samples: n, a number or a traced
    scalar, is the number of samples that this rank's gradients are the mean of. It is not passed
    on; other extra arguments are. Of these, the ones that optax gives a meaning are averaged (or
    summed) as gradients are, without compression: a loss (`value`), its gradients (`grad`), and
    functions of the parameters that return a loss (`value_fn`, `obj_fn`; their gradients, too) or
    gradients (`grad_fn`). So line searches, Polyak steps and the like are those of one process with
    all samples.

    Transformations that depend on gradients (clipping, `optax.apply_if_finite`, `optax.masked`)
    must be inside it, where they see averages: a rank that skips an `update` on its own falls
    behind the others. What takes the gradients of single samples, such as
    `optax.contrib.differentially_private_aggregate`, comes before it.

    `optax.MultiSteps` around it calls it in every mini-step and keeps the last result, so gradients
    are exchanged in every mini-step. It adds up each rank's own, and what has been added up is
    weighted by the last mini-step's `weight`: if weights change from one to the next, it must be
    inside. It must also be inside if it is a part of an `optax.chain` and weights are passed: optax
    does not pass them on there, and the average would not be weighted. See `average_gradients` for
    errors.

    Args:
        optimizer: What optax.adam and similar functions return.
        op: Average or Sum.
        compression: The wire format; `Compression.fp16` halves the bytes.
        shard_state: Whether each rank has the optimizer's state of its share of the parameters
            only; see the function `shard_state`.
        name: For messages.
        group: The ranks; by default all.

    Raises:
        ValueError: From `update`: gradients have other shapes than the parameters.
    """
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optax.GradientTransformation: pass what "
            "optax.adam or a similar function returns, or MultiSteps(…).gradient_transformation()"
        )
    Options(op=op, compression=compression, group=group)  # checks them
    divided = sharded_state.shard_state(optimizer, group=group) if shard_state else optimizer
    inner = optax.with_extra_args_support(divided)

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        _check_shapes(updates, params)
        averages = average_gradients(
            updates,
            op=op,
            compression=compression,
            weight=weight,
            name=name,
            group=group,
            parameters=params,
        )
        if not extra.keys().isdisjoint(_OF_THE_LOSS):
            extra = _of_all_ranks(extra, updates, averages, _average_of(op, weight, group))
        return inner.update(averages, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _check_shapes(gradients: Any, params: Any) -> None:
    """Refuse those of single samples, whose averages over ranks would be of different samples."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (gradients, params)]
    if structures[0] != structures[1]:
        return
    paths = tree_leaves_with_path(gradients)
    for (path, gradient), parameter in zip(paths, jax.tree.leaves(params), strict=True):
        shape, wanted = (getattr(x, "shape", None) for x in (gradient, parameter))
        if None not in (shape, wanted) and shape != wanted:
            name = keystr(path, simple=True, separator=".")
            raise ValueError(
                f"the gradient of {name!r} has the shape {shape}, and the parameter {wanted}: only "
                "gradients of a batch can be averaged. If these are of single samples, put what "
                "clips and adds them up before DistributedOptimizer, in optax.chain"
            )


_OF_THE_LOSS = "value", "grad", "value_fn", "obj_fn", "grad_fn"  # extra arguments in optax


def _average_of(op: Op, weight: Array | None, group: Group | None) -> Callable[[Any], Any]:
    """Return a function of a pytree that averages it as gradients are, and has derivatives."""
    if weight is None:
        return lambda tree: grouped_allreduce(tree, op, group=group)
    total = allreduce(jnp.asarray(weight, float), Sum, name="weight", group=group)
    share = jnp.where(total == 0, 0.0, weight / total)

    def average(tree: Any) -> Any:
        # Without samples, a mean is NaN.
        mine = jax.tree.map(lambda x: jnp.where(share == 0, 0, share * x).astype(x.dtype), tree)
        return grouped_allreduce(mine, Sum, group=group)

    return average


def _of_all_ranks(
    extra: Mapping[str, Any], updates: Any, averages: Any, average: Callable[[Any], Any]
) -> dict[str, Any]:
    """Return optax's extra arguments with what they say of this rank's loss said of all ranks'."""
    found = dict(extra)
    if found.get("value") is not None:
        found["value"] = average(jnp.asarray(found["value"]) * 1.0)  # of integers, too
    if found.get("grad") is not None:
        ids = [list(map(id, jax.tree.leaves(tree))) for tree in (found["grad"], updates)]
        found["grad"] = averages if ids[0] == ids[1] else average(found["grad"])
    for name in ("value_fn", "obj_fn"):
        if found.get(name) is not None:
            found[name] = _function_of_all_ranks(found[name], average)
    if (gradients_of := found.get("grad_fn")) is not None:
        found["grad_fn"] = lambda *args: average(gradients_of(*args))
    return found


def _function_of_all_ranks(
    loss_of: Callable[..., Any], average: Callable[[Any], Any]
) -> Callable[..., Any]:
    """Return the average of the ranks' functions; its gradients are the average of theirs."""

    @jax.custom_vjp
    def alike(params: Any) -> Any:
        return params

    alike.defvjp(lambda params: (params, None), lambda _, gradients: (average(gradients),))

    @jax.custom_vjp
    def averaged(value: Any) -> Any:
        return average(value)

    averaged.defvjp(lambda value: (average(value), None), lambda _, cotangent: (cotangent,))

    @wraps(loss_of)  # since optax passes the arguments that it has
    def function(params: Any, *args: Any, **options: Any) -> Any:
        return averaged(loss_of(alike(params), *args, **options))

    return function
