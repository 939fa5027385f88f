"""User-defined compressors: what happens to a gradient before and after the exchange."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch import run_threads
from numpy.typing import NDArray

from horo_lite import ops
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Sum
from horo_lite.errors import MismatchError


class LargestWithFeedback(Compressor):
    """Sends only the largest element; the rest is kept for the next time."""

    def __init__(self) -> None:
        super().__init__("largest", "fp16")
        self.left: dict[str, NDArray[Any]] = {}

    def prepare(self, name: str, gradient: NDArray[Any]) -> None:
        gradient += self.left.get(name, 0)
        largest = np.argmax(np.abs(gradient))
        self.left[name] = gradient.copy()
        self.left[name][largest] = 0
        gradient[...] = gradient - self.left[name]

    def restore(self, name: str, gradient: NDArray[Any]) -> None:
        gradient *= 10


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hooks_see_every_tensor_and_may_keep_state(asynchronous: bool) -> None:
    def average(group: Group) -> list[list[float]]:
        compressor = LargestWithFeedback()
        results = []
        for _ in range(2):
            a, b = np.array([1.0, 4.0 + group.rank, 0.0]), np.array([8.0, 2.0])
            options: dict[str, Any] = {"names": ["a", "b"], "label": "step", "op": Average}
            if asynchronous:
                handle = group.exchange_async([a, b], **options, compression=compressor)
                group.synchronize(handle)
            else:
                group.exchange([a, b], **options, compression=compressor)
            results += [a.tolist(), b.tolist()]
        assert set(compressor.left) == {"a", "b"}
        return results

    # First only the largest; the second time what was left over is twice as large.
    expected = [[0, 45, 0], [80, 0], [0, 45, 0], [80, 0]]
    assert run_threads(2, average) == [expected, expected]


def test_what_follows_an_operation_is_done_once_however_often_it_is_synchronized() -> None:
    class Halves(Compressor):
        def prepare(self, name: str, gradient: Any) -> None:
            gradient /= 2

        def restore(self, name: str, gradient: Any) -> None:
            gradient *= 2

    def rank(group: Group) -> None:
        x = np.full(3, group.rank + 1.0)
        halves = Halves("halves")
        handle = ops.allreduce_async_(x, Sum, name="x", compression=halves, group=group)
        for _ in range(2):
            assert group.synchronize(handle).tolist() == [3.0] * 3

    run_threads(2, rank)


def test_compressors_that_differ_are_a_mismatch() -> None:
    def reduce(group: Group) -> str:
        compression = Compression.fp16 if group.rank else Compression.bf16
        with pytest.raises(MismatchError) as caught:
            ops.allreduce(np.ones(3), Sum, name="g", compression=compression, group=group)
        return str(caught.value)

    for text in run_threads(3, reduce):
        assert "allreduce 'g'" in text
        assert "rank 0: compression bf16" in text
        assert "ranks 1 and 2: compression fp16" in text


def test_wrong_compressors_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="fp8"):
        Compressor("mine", "fp8")
    (text,) = run_threads(1, lambda group: str(_refusal(group)))
    assert "Compression.none" in text


def _refusal(group: Group) -> ValueError:
    with pytest.raises(ValueError, match="compression") as caught:
        ops.allreduce(np.ones(3), compression="fp16", group=group)  # type: ignore[arg-type]
    return caught.value
