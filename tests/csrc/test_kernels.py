"""The host kernels: every instruction set gives the same bits, and binary16 is as in NumPy."""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from horo_lite import _native

BLOCK = 1024
HEADER_BYTES = 16  # of a scaled float16 block


@pytest.fixture
def best() -> Iterator[str]:
    name = _native.instruction_set()
    yield name
    _native.use_instruction_set(name)


def available(best: str) -> list[str]:
    order = ["avx512", "avx2", "portable"]
    return order[order.index(best) :]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="ARM64 has one set of kernels")
def test_the_best_instruction_set_that_the_kernel_reports_is_chosen(best: str) -> None:
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert found
    needed = {
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx2": {"avx2", "f16c"},
        "portable": set(),
    }
    assert best == next(name for name, flags in needed.items() if flags <= {*found[1].split()})


def hard_floats(n: int, dtype: str, seed: int) -> np.ndarray:
    """Return every kind of float: any bit pattern, so also subnormals, infinities and NaNs."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    bits = rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
    tame = rng.standard_normal(n).astype(kind)
    return np.where(rng.random(n) < 0.2, bits, tame)


def through(layout: _native.WireLayout, n_bytes: int, weights: list[float]) -> list[bytes]:
    """Return the memory after encoding, reducing three copies, and decoding."""
    images = [np.zeros(n_bytes, np.uint8) for _ in range(2)]
    source, total = (image.ctypes.data for image in images)
    layout.encode(0, source)
    layout.reduce(0, 0, [source] * 3, 0.75, weights, 1.0, 3.0, total)
    return [image.tobytes() for image in images]


@pytest.mark.parametrize("wire", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint32"])
@pytest.mark.parametrize("op", ["average", "sum", "min", "max", "product"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_instruction_sets_agree_to_the_bit(dtype: str, wire: str, op: str, best: str) -> None:
    n = 3 * BLOCK + 17  # whole blocks and a tail that fills no lane
    if dtype.startswith("float"):
        original = hard_floats(n, dtype, 7)
    else:
        original = np.random.default_rng(7).integers(0, 100, n).astype(dtype)
    seen = {}
    for isa in available(best):
        _native.use_instruction_set(isa)
        x = original.copy()
        layout = _native.WireLayout(_native.Tensors([x]), op, wire, 1 << 20, 1)
        left = through(layout, 20 * n + 4096, [0.3, 0.0, 1e-9] if op == "average" else [])
        layout.decode(0, np.frombuffer(left[1], np.uint8).ctypes.data)
        seen[isa] = (*left, x.tobytes())
        assert x.tobytes() != original.tobytes()
    assert len(set(seen.values())) == 1, f"instruction sets differ: {sorted(seen)}"


def test_binary16_is_what_numpy_rounds_to(best: str) -> None:
    """Scaled by the power of two in the header, all halves are as rounded by NumPy."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)].astype(np.float32)
    # Between any two neighbours: the midpoint (a tie) and the numbers next to it.
    values = np.concatenate(
        [finite, finite * np.float32(1 + 2.0**-11), finite * np.float32(1.0003)]
    )
    for isa in available(best):
        _native.use_instruction_set(isa)
        layout = _native.WireLayout(_native.Tensors([values]), "sum", "fp16", 1 << 22, 1)
        image = np.zeros(1 << 20, np.uint8)
        layout.encode(0, image.ctypes.data)
        for first in range(0, len(values) // BLOCK * BLOCK, BLOCK):
            begin = first // BLOCK * (HEADER_BYTES + 2 * BLOCK)
            (exponent,) = image[begin : begin + 4].view(np.int32)
            block = values[first : first + BLOCK]
            largest = np.abs(block).max()
            assert largest == 0 or 2.0**14 <= largest * 2.0**exponent < 2.0**15
            expected = (block * np.float32(2.0) ** exponent).astype(np.float16)
            got = image[begin + HEADER_BYTES : begin + HEADER_BYTES + 2 * BLOCK].view(np.float16)
            assert np.array_equal(got.view(np.uint16), expected.view(np.uint16)), isa


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("wire", ["none", "fp16", "bf16"])
def test_inf_stays_inf_beside_anything(wire: str, dtype: str, best: str) -> None:
    """For any difference in size of blocks and weights; its neighbours do not change either."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    small, large = (1e-7, 6e4) if dtype == "float16" else (1e-38, 1e30)
    for isa, (weights, sign) in itertools.product(
        available(best), [([], 1), ([0.999, 1e-60], 1), ([1e-60, 0.999], -1)]
    ):
        _native.use_instruction_set(isa)
        xs = [np.full(2 * BLOCK, small, kind), np.full(2 * BLOCK, large, kind)]
        xs[0][5], xs[1][5] = sign * np.inf, sign * np.inf
        xs[0][6] = sign * np.inf
        xs[0][7], xs[1][7] = np.inf, -np.inf
        xs[0][8] = np.nan
        xs[1][9] = sign * np.inf
        images = [np.zeros(1 << 16, np.uint8) for _ in range(3)]
        layouts = [_native.WireLayout(_native.Tensors([x]), "sum", wire, 1 << 20, 1) for x in xs]
        for layout, image in zip(layouts, images, strict=False):
            layout.encode(0, image.ctypes.data)
        places = [image.ctypes.data for image in images]
        layouts[0].reduce(0, 0, places[:2], 1.0, weights, 1.0, 1.0, places[2])
        layouts[0].decode(0, places[2])
        out = xs[0].astype(np.float64)
        assert out[[5, 6, 9]].tolist() == [sign * np.inf] * 3, isa
        assert np.isnan(out[[7, 8]]).all(), isa
        expected = small + large if not weights else weights[0] * small + weights[1] * large
        bound = 2.0**-7 * (expected + 2.0**-38 * large * max(weights or [1]))
        assert np.all(
            np.abs(out[10:] - expected) <= bound + (2.0**-24 if small == 1e-7 else 1e-37)
        ), isa


def test_weighted_integers_are_divided_at_the_last_hop_only(best: str) -> None:
    """Within a host contributions are weighted and added, between hosts added and divided."""
    for isa, dtype in itertools.product(available(best), ["int8", "int32", "uint64"]):
        _native.use_instruction_set(isa)
        xs = [np.full(BLOCK + 17, value, dtype) for value in (2, 4, 7, 9)]
        layouts = [
            _native.WireLayout(_native.Tensors([x]), "weighted average", "none", 1 << 20, 1)
            for x in xs
        ]
        images = [np.zeros(1 << 16, np.uint8) for _ in range(7)]
        places = [image.ctypes.data for image in images]
        for layout, place in zip(layouts, places, strict=False):
            layout.encode(0, place)
        weights = [0.5, 0.125, 0.125, 0.125]
        layouts[0].reduce(0, 0, places[:2], 1.0, weights[:2], 1.0, 1.0, places[4])
        layouts[0].reduce(0, 0, places[2:4], 1.0, weights[2:], 1.0, 1.0, places[5])
        layouts[0].reduce(0, 0, places[4:6], 1.0, [], 1.0, sum(weights), places[6])
        layouts[0].decode(0, places[6])
        assert (xs[0] == 4).all(), (isa, dtype, xs[0][:3])  # (2 * 4 + 4 + 7 + 9) / 7


def test_an_unknown_instruction_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="sse9"):
        _native.use_instruction_set("sse9")
