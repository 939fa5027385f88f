"""A framework of one's own, made known to horo_lite by an adapter of a dozen lines.

    mpiexec -n 2 python my_framework.py

The framework below calls everything differently: arrays are `weight.w`, gradients `weight.dw`,
and its optimizer is a `Trainer` whose `apply()` takes the step. It fits a line to noisy points.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import horo_lite as hvd

# The framework. It knows nothing of horo_lite.


class Weight:
    def __init__(self, name: str, w: np.ndarray[Any, Any]) -> None:
        self.name = name
        self.w = w
        self.dw: np.ndarray[Any, Any] | None = None


class Trainer:
    def __init__(self, weights: list[Weight], rate: float) -> None:
        self.weights = weights
        self.rate = rate

    def apply(self) -> None:
        for weight in self.weights:
            weight.w -= self.rate * weight.dw


# What horo_lite is told about it.


class MyAdapter(hvd.Adapter):
    steps = ("apply",)

    def matches(self, obj: object) -> bool:
        return isinstance(obj, (Trainer, Weight))

    def parameters(self, owner: Trainer) -> list[tuple[str, Weight]]:
        return [(weight.name, weight) for weight in owner.weights]

    def gradient(self, weight: Weight) -> np.ndarray[Any, Any] | None:
        return weight.dw

    def set_gradient(self, weight: Weight, array: np.ndarray[Any, Any]) -> None:
        weight.dw = array

    def value(self, weight: Weight) -> np.ndarray[Any, Any]:
        return weight.w


hvd.register_adapter(MyAdapter())

# The program: the same three lines as with any framework.


def main() -> None:
    world = hvd.init()
    random = np.random.default_rng(7)
    x = random.uniform(-1, 1, 1000)
    y = 3 * x - 2 + random.normal(0, 0.1, 1000)
    batches, _ = hvd.partition_dataset((x, y), 100)

    slope = Weight("slope", np.full(1, float(world.rank)))
    offset = Weight("offset", np.full(1, -float(world.rank)))
    trainer = Trainer([slope, offset], rate=0.3)
    hvd.broadcast_parameters(trainer)
    trainer = hvd.DistributedOptimizer(trainer)

    for epoch in range(5):
        batches.set_epoch(epoch)
        for xs, ys in batches:
            error = slope.w * xs + offset.w - ys
            slope.dw, offset.dw = np.array([np.mean(error * xs)]), np.array([np.mean(error)])
            trainer.apply(weight=len(xs))

    fits = hvd.allgather_object((float(slope.w[0]), float(offset.w[0])))
    if world.rank == 0:
        print(
            f"y = {fits[0][0]:.3f} x {fits[0][1]:+.3f} on rank 0; the points were made with 3 x - 2"
        )
        print(f"all {world.size} ranks found the same: {fits == fits[:1] * world.size}")


if __name__ == "__main__":
    main()
