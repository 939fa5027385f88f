"""MLX on several ranks: `import horo_lite.mlx as hvd`.

    world = hvd.init()
    hvd.broadcast_parameters(model)
    optimizer = hvd.DistributedOptimizer(optim.Adam(learning_rate=1e-3))

    loss, gradients = nn.value_and_grad(model, loss_of)(model, x, y)
    optimizer.update(model, gradients)

Each rank is a separate process; nothing here needs `mx.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx.optimizers import Optimizer

# ruff: noqa: F403
from horo_lite import *
from horo_lite import Average, Compression, Compressor, Group, Op, average_gradients
from horo_lite.state.wrapper import Sharing, sharing
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
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{optimizer!r} is not an optimizer of mlx.optimizers")
    Options(op=op, compression=compression, group=group)  # checks them

    def average(gradients: Any, weight: float | None) -> Any:
        return average_gradients(
            gradients,
            op=op,
            compression=compression,
            weight=weight,
            name=name,
            group=group,
        )

    return sharing(optimizer, Averaging, _average=average)


class Averaging(Sharing):
    """Base class of a wrapped optimizer, in addition to its own class."""

    _average: Callable[[Any, float | None], Any]

    def update(self, model: Any, gradients: Any, *, weight: float | None = None) -> None:
        model.update(self.apply_gradients(gradients, model, weight=weight))

    def apply_gradients(
        self, gradients: Any, parameters: Any, *, weight: float | None = None
    ) -> Any:
        averages = self._average(gradients, weight)
        return super().apply_gradients(averages, parameters)  # type: ignore[misc]
