"""`reducescatter`, on ranks as threads: rows of an all-reduce, without performing one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch import run_threads
from numpy.typing import NDArray

import horo_lite as hvd
from horo_lite.collectives.compression import Compressor
from horo_lite.transports.shm import ShmTransport

SHAPE = (11, 3000)


def values(rank: int, shape: tuple[int, ...] = SHAPE) -> NDArray[np.float32]:
    rng = np.random.default_rng(rank)
    exponents = rng.integers(-6, 7, shape).astype(np.float32)
    return rng.standard_normal(shape).astype(np.float32) * np.exp2(exponents)


def scattered(group: hvd.Group, x: Any, asynchronous: bool, **options: Any) -> Any:
    if asynchronous:
        return hvd.synchronize(hvd.reducescatter_async(x, group=group, **options), group=group)
    return hvd.reducescatter(x, group=group, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("wire", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_of_an_all_reduce(n: int, wire: str, asynchronous: bool) -> None:
    options = {
        "compression": getattr(hvd.Compression, wire),
        "prescale_factor": 0.3,
        "postscale_factor": 7.0,
    }

    def body(group: hvd.Group) -> None:
        x = values(group.rank)
        rows = np.array_split(np.arange(len(x)), n)[group.rank]
        for given in (x, np.asfortranarray(x), x[:, ::2]):
            kept = given.copy()
            expected = hvd.allreduce(given, group=group, **options)[rows]
            assert scattered(group, given, asynchronous, **options).tobytes() == expected.tobytes()
            assert np.array_equal(given, kept)

    run_threads(n, body)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nothing_but_each_ranks_rows_travels(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: hvd.Group) -> list[float]:
        result: NDArray[np.float64] = scattered(
            group, np.arange(6.0) * (group.rank + 1), asynchronous, op=hvd.Sum
        )
        return result.tolist()

    reduce_scatter, seen = ShmTransport.reduce_scatter, []

    def noted(transport: ShmTransport, parts: Any, *args: Any) -> None:
        seen.append([part.nbytes for part in parts])
        reduce_scatter(transport, parts, *args)

    monkeypatch.setattr(ShmTransport, "reduce_scatter", noted)
    assert run_threads(3, body) == [[0.0, 6.0], [12.0, 18.0], [24.0, 30.0]]
    assert seen == [[16, 16, 16]] * 3


def test_scales_of_fp16_begin_with_each_ranks_rows() -> None:
    """So a small number beside a large one in another rank's rows is not lost."""
    x = np.array([2.0**20, 2.0**-20], np.float32)

    def body(group: hvd.Group) -> tuple[float, float]:
        options = {"compression": hvd.Compression.fp16, "group": group}
        own = x * (group.rank + 0.5)  # of which x is the average
        return hvd.allreduce(own, **options)[1], hvd.reducescatter(own, **options)[0]

    assert run_threads(2, body)[1] == (0.0, 2.0**-20)


class WholeResults(Compressor):
    """Adds the sum of the result to every element, so it must see the whole result."""

    def restore(self, name: str, gradient: NDArray[Any]) -> None:
        gradient += gradient.sum()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hooks_see_whole_results(asynchronous: bool) -> None:
    def body(group: hvd.Group) -> list[float]:
        x = np.arange(4.0) * (group.rank + 0.5)
        compression = WholeResults("whole results", "none")
        result: NDArray[np.float64] = scattered(group, x, asynchronous, compression=compression)
        return result.tolist()

    assert run_threads(2, body) == [[6.0, 7.0], [8.0, 9.0]]


def test_many_at_a_time() -> None:
    """The engines run operations submitted by all ranks back to back."""

    def body(group: hvd.Group) -> None:
        ones = np.full((group.size, 300), group.rank + 1.0, np.float32)
        operations = {"scatter": hvd.reducescatter_async, "all": hvd.allreduce_async}
        handles = {
            (name, i): begin(ones * i, hvd.Sum, name=f"{name} {i}", group=group)
            for i in range(40)
            for name, begin in operations.items()
        }
        for (_, i), handle in handles.items():
            assert np.all(hvd.synchronize(handle, group=group) == 6.0 * i)

    run_threads(3, body)
