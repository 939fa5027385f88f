"""The host kernels: every instruction set gives the same bits, and binary16 is what NumPy says."""

from __future__ import annotations

from collections.abc import Iterator

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


def hard_floats(n: int, dtype: str, seed: int) -> np.ndarray:
    """Every kind of float: any bit pattern, so also subnormals, infinities and NaNs."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    bits = rng.integers(0, 256, n * kind.itemsize, np.uint8).view(kind)
    tame = rng.standard_normal(n).astype(kind)
    return np.where(rng.random(n) < 0.2, bits, tame)


def through(layout: _native.WireLayout, n_bytes: int) -> list[bytes]:
    """What encoding, reducing three times the same, and decoding leave in memory."""
    images = [np.zeros(n_bytes, np.uint8) for _ in range(2)]
    source, total = (image.ctypes.data for image in images)
    layout.encode(0, 0.75, source)
    layout.reduce(0, 0, [source] * 3, 1.0, 3.0, total)
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
        left = through(layout, 20 * n + 4096)
        layout.decode(0, np.frombuffer(left[1], np.uint8).ctypes.data)
        seen[isa] = (*left, x.tobytes())
        assert x.tobytes() != original.tobytes()
    assert len(set(seen.values())) == 1, f"instruction sets differ: {sorted(seen)}"


def test_binary16_is_what_numpy_rounds_to(best: str) -> None:
    """Scaled by the power of two that the header tells, all halves are NumPy's own."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)].astype(np.float32)
    # Between each two neighbours: the midpoint (a tie) and what is just beside it.
    values = np.concatenate(
        [finite, finite * np.float32(1 + 2.0**-11), finite * np.float32(1.0003)]
    )
    for isa in available(best):
        _native.use_instruction_set(isa)
        layout = _native.WireLayout(_native.Tensors([values]), "sum", "fp16", 1 << 22, 1)
        image = np.zeros(1 << 20, np.uint8)
        layout.encode(0, 1.0, image.ctypes.data)
        for first in range(0, len(values) // BLOCK * BLOCK, BLOCK):
            begin = first // BLOCK * (HEADER_BYTES + 2 * BLOCK)
            (exponent,) = image[begin : begin + 4].view(np.int32)
            block = values[first : first + BLOCK]
            largest = np.abs(block).max()
            assert largest == 0 or 2.0**14 <= largest * 2.0**exponent < 2.0**15
            expected = (block * np.float32(2.0) ** exponent).astype(np.float16)
            got = image[begin + HEADER_BYTES : begin + HEADER_BYTES + 2 * BLOCK].view(np.float16)
            assert np.array_equal(got.view(np.uint16), expected.view(np.uint16)), isa


def test_an_unknown_instruction_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="sse9"):
        _native.use_instruction_set("sse9")
