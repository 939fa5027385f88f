"""New results have the same bits as in-place ones, and arguments are not changed."""

from __future__ import annotations

from typing import Any

import numpy as np

import horo_lite as hvd


class Marks(type(hvd.Compression.none)):  # type: ignore[misc]
    """A compressor that changes the gradients that it gets."""

    def __init__(self) -> None:
        super().__init__("marks")

    def prepare(self, name: str, gradient: np.ndarray) -> None:
        gradient += 1


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("float32", {"op": hvd.Average}),
    ("float32", {"op": hvd.Sum, "prescale_factor": 0.3, "postscale_factor": 1.7}),
    ("float32", {"op": hvd.Average, "compression": hvd.Compression.fp16}),
    ("float32", {"op": hvd.Sum, "compression": hvd.Compression.bf16}),
    ("float32", {"op": hvd.Sum, "compression": Marks()}),
    ("float32", {"op": hvd.Max}),
    ("float64", {"op": hvd.Average}),
    ("float16", {"op": hvd.Sum}),
    ("int32", {"op": hvd.Average}),
    ("int64", {"op": hvd.Min}),
    ("uint8", {"op": hvd.Sum}),
]


def compare_with_in_place(group: hvd.Group) -> None:
    rng = np.random.default_rng(group.rank)

    def numbers(dtype: str, shape: tuple[int, ...] = (600_001,)) -> np.ndarray:
        return np.array(50 + 7 * rng.standard_normal(shape)).astype(dtype)

    same = numbers("float32")
    strided = np.asfortranarray(numbers("float32", (900, 700)))[::2, 1:]
    mixed = [same, numbers("float64", (7, 5)), numbers("float16", ()), same, same[100:], strided]
    cases = [([numbers(dtype)], options) for dtype, options in OPTIONS]
    for xs, options in [*cases, ([strided], {}), (mixed, {})]:
        before = [x.tobytes() for x in xs]
        expected = [np.array(x, order="C") for x in xs]
        for x in xs:
            x.flags.writeable = False
        results = hvd.grouped_allreduce(xs, group=group, **options)
        hvd.grouped_allreduce_(expected, group=group, **options)
        for x, bits, result, right in zip(xs, before, results, expected, strict=True):
            assert (result.dtype, result.shape) == (x.dtype, x.shape)
            assert result.tobytes() == right.tobytes(), options
            assert x.tobytes() == bits, "the argument has changed"
            assert not np.shares_memory(result, x)
            assert group.size == 1 or result.tobytes() != bits, "nothing was exchanged"


if __name__ == "__main__":
    world = hvd.init()
    assert world.transport == "mpi", world.transport
    compare_with_in_place(world.group)
