"""DistributedOptimizer for optax: average, then the inner transformation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op
from horo_lite.jax import sharded_state
from horo_lite.jax.operations import Array, average_gradients
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
    on; other extra arguments are.

    Transformations that depend on gradients (clipping, `optax.apply_if_finite`, `optax.masked`)
    must be inside it, where they see averages: a rank that skips an `update` on its own falls
    behind the others.

    `optax.MultiSteps` around it calls it in every mini-step and keeps the last result, so gradients
    are exchanged in every mini-step. It adds up each rank's own, and what has been added up is
    weighted by the last mini-step's `weight`: if weights change from one to the next, it must be
    inside. See `average_gradients` for errors.

    Args:
        optimizer: What optax.adam and similar functions return.
        op: Average or Sum.
        compression: The wire format; `Compression.fp16` halves the bytes.
        shard_state: Whether each rank has the optimizer's state of its share of the parameters
            only; see the function `shard_state`.
        name: For messages.
        group: The ranks; by default all.
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
        updates = average_gradients(
            updates,
            op=op,
            compression=compression,
            weight=weight,
            name=name,
            group=group,
            parameters=params,
        )
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
