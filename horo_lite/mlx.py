"""MLX on several ranks: `import horo_lite.mlx as hvd`.

    world = hvd.init()
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(optim.Adam(learning_rate=1e-3))

    loss, gradients = nn.value_and_grad(model, loss_of)(model, x, y)
    optimizer.update(model, gradients)

Each rank is a separate process; nothing here needs `mx.distributed`.
"""

from __future__ import annotations

from typing import Any

from mlx.optimizers import Optimizer

# ruff: noqa: F403
from horo_lite import *
from horo_lite import Average, Compression, Compressor, Group, Op, average_gradients
from horo_lite.training.options import Options


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Optimizer,
    *,
    op: Op = Average,
    compression: Compressor = Compression.none,
    name: str | None = None,
    group: Group | None = None,
) -> Any:
    """Return an optimizer whose `update` and `apply_gradients` first average over all ranks.

    Every rank creates it with the same options and calls these methods the same number of times,
    outside `mx.compile`. It has the same class as `optimizer`, and shares its state, settings and
    schedules.

    Both methods take `weight=`, this rank's number of samples, on every rank or on none: the
    average is then the mean over all samples, however uneven the batches. The gradients that are
    passed are not changed. See `average_gradients` for options and errors.
    """
    kind: Any = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{optimizer!r} is not an optimizer of mlx.optimizers")
    if hasattr(kind, "averages_gradients"):
        raise TypeError("this optimizer is already a DistributedOptimizer: wrap it only once")
    options = Options(op=op, compression=compression, group=group)

    class Distributed(kind):  # type: ignore[misc]
        averages_gradients = True

        def update(self, model: Any, gradients: Any, *, weight: float | None = None) -> None:
            model.update(self.apply_gradients(gradients, model, weight=weight))

        def apply_gradients(
            self, gradients: Any, parameters: Any, *, weight: float | None = None
        ) -> Any:
            averages = average_gradients(
                gradients,
                op=options.op,
                compression=options.compression,
                weight=weight,
                name=name,
                group=options.group,
            )
            return super().apply_gradients(averages, parameters)

    Distributed.__name__ = kind.__name__
    wrapped = object.__new__(Distributed)
    wrapped.__dict__ = optimizer.__dict__
    return wrapped
