"""DistributedOptimizer for optax: average, then the inner transformation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op
from horo_lite.jax.operations import Array, average_gradients
from horo_lite.training.options import Options

if TYPE_CHECKING:
    import optax


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: optax.GradientTransformation,
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    name: str | None = None,
    group: Group | None = None,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, whose `update` from now on works with the gradients of all ranks.

    Every rank makes it with the same options and calls `update` equally often, inside `jax.jit` or
    outside. What it takes and gives is optax's: it can be chained and wrapped, the state is that of
    the inner transformation, and gradients are any pytree.

    `update(…, weight=n)`, on every rank or on none, makes the average one over samples: n, a number
    or a traced scalar, is how many this rank's gradients are the mean of. It is not passed on;
    other extra arguments are.

    What looks at gradients (clipping, `optax.apply_if_finite`, `optax.masked`) belongs inside it,
    where they are those of all ranks: a rank that skips an `update` for itself is one behind.

    Inside `optax.MultiSteps`, which calls it in every mini-step and keeps what the last one gave,
    gradients are exchanged as often. See `average_gradients` for errors.

    Args:
        optimizer: What optax.adam or its like returns.
        op: Average or Sum.
        compression: What travels; `Compression.fp16` halves the bytes.
        name: For messages.
        group: The ranks; default all.
    """
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optax.GradientTransformation: give what "
            "optax.adam or its like returns, or MultiSteps(…).gradient_transformation()"
        )
    options = Options(op=op, compression=compression, group=group)
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Array | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        updates = average_gradients(
            updates,
            op=options.op,
            compression=options.compression,
            weight=weight,
            name=name,
            group=options.group,
        )
        return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
