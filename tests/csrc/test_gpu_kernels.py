"""The GPU kernels' body, run on the CPU: bit for bit as csrc/gpu/kernels.h specifies, in NumPy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from oracle import Array, bfloat16

from horo_lite import _testing

FLOATS = ["float16", "bfloat16", "float32", "float64"]
PAIRS = [
    *((name, name) for name in FLOATS),
    *((grad, wire) for grad in ["float32", "float64"] for wire in ["float16", "bfloat16"]),
]
INTEGERS = ["bool", *(f"{sign}int{bits}" for sign in ["", "u"] for bits in [8, 16, 32, 64])]
# Around the sizes of a vector, a warp's tile, a block's range.
SIZES = [1, 7, 8, 9, 127, 128, 129, 255, 256, 257, 511, 512, 1023, 1024, 1025]
SIZES += [2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 16383, 16384, 16385, 40000]
WIRE_UNIT = 64
GUARD = 0xA5
NO_EXPONENT = np.int32(-0x7F7F7F80)  # 0x80808080
FEW, SOME = 32, 167  # as in kernel_body.h
MANY = 1360  # pieces in one launch


# --- what csrc/gpu/kernels.h says, in NumPy -------------------------------------------------------


def dtype_of(name: str) -> np.dtype[Any]:
    return bfloat16 if name == "bfloat16" else np.dtype(name)


def real_of(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    return np.float64 if dtype == np.float64 else np.float32


def bits_of(x: Array) -> Array:
    return x.view(f"u{x.dtype.itemsize}")


def rounded(y: Array, dtype: np.dtype[Any]) -> Array:
    """Return `y`, rounded again; every NaN is the one with all bits except the sign set."""
    with np.errstate(all="ignore"):
        out = y if dtype == np.float64 else y.astype(np.float32).astype(dtype)
    out = out.copy()
    everything = np.iinfo(f"u{dtype.itemsize}").max
    bits_of(out)[np.isnan(y)] = everything >> 1
    return out


def power_of_two_times(y: Array, k: int) -> Array:
    with np.errstate(all="ignore"):
        if y.dtype == np.float32:  # a float64 holds every product exactly
            return (y.astype(np.float64) * 2.0**k).astype(np.float32)
        return np.ldexp(y, k)


def prescaled(x: Array, prescale: float) -> Array:
    real = real_of(x.dtype)
    with np.errstate(all="ignore"):
        return np.zeros(x.shape, real) if prescale == 0 else x.astype(real) * real(prescale)


def pack_reference(x: Array, wire: np.dtype[Any], prescale: float, k: int) -> Array:
    return rounded(power_of_two_times(prescaled(x, prescale), k), wire)


def unpack_reference(
    wire: Array, grad: np.dtype[Any], k: int, scale: float, divisor: float
) -> Array:
    real = real_of(grad)
    with np.errstate(all="ignore"):
        y = power_of_two_times(wire.astype(real), -k)
        return rounded(y * real(scale) / real(divisor), grad)


def exponent_reference(x: Array, prescale: float) -> np.int32:
    y = prescaled(x, prescale)
    y = y[np.isfinite(y) & (y != 0)]
    return np.int32(np.frexp(y)[1].max()) if y.size else NO_EXPONENT


def k_of(exponent: np.int32, headroom: int) -> int:
    return 0 if exponent == NO_EXPONENT else 15 - headroom - int(exponent)


def stats_reference(wire: Array) -> tuple[int, int]:
    values = wire.astype(np.float64)
    finite = np.abs(values[np.isfinite(values)])
    top = float(finite.max()) if finite.size else 0.0
    amax = np.float32(min(top, float(np.finfo(np.float32).max)))
    return int(amax.view(np.uint32)), int(values.size - finite.size)


# --- calling the kernels --------------------------------------------------------------------------


class Buffer:
    """Memory that begins at a multiple of 64 bytes, filled with guard bytes."""

    def __init__(self, n_bytes: int) -> None:
        self._memory = np.full(n_bytes + WIRE_UNIT, GUARD, np.uint8)
        skip = -self._memory.ctypes.data % WIRE_UNIT
        self.bytes = self._memory[skip : skip + n_bytes]
        self.address = self.bytes.ctypes.data

    def array(self, at: int, n: int, dtype: np.dtype[Any]) -> Array:
        return self.bytes[at : at + n * dtype.itemsize].view(dtype)


class Tensors:
    """Tensors in one buffer with guards between, number i off a multiple of 64 by shifts[i] items.

    Their data on the wire is in `wire`, also with guards between. `expected` and `expected_wire`
    are the expected final contents of the two buffers.
    """

    def __init__(
        self, inputs: Sequence[Array], wire_dtype: np.dtype[Any], shifts: Sequence[int] = (0,)
    ) -> None:
        self.dtype = inputs[0].dtype
        spans = [-(-x.nbytes // WIRE_UNIT) * WIRE_UNIT + 2 * WIRE_UNIT for x in inputs]
        starts = np.concatenate([[0], np.cumsum(spans)])
        self.memory, self.wire = Buffer(int(starts[-1])), Buffer(int(starts[-1]))
        self.pieces, self.views, self.wires = [], [], []
        for i, x in enumerate(inputs):
            at = int(starts[i]) + shifts[i % len(shifts)] * x.dtype.itemsize
            self.views.append(self.memory.array(at, x.size, x.dtype))
            self.views[-1][:] = x
            self.wires.append(self.wire.array(int(starts[i]), x.size, wire_dtype))
            self.pieces.append((self.memory.address + at, x.size, int(starts[i]) // WIRE_UNIT, i))
        self._of = lambda buffer, view: slice(
            view.ctypes.data - buffer.address, view.ctypes.data - buffer.address + view.nbytes
        )

    def expected(self, outputs: Sequence[Array]) -> Array:
        """Return the tensors' buffer as if these had been written."""
        return self._with(self.memory, self.views, outputs)

    def expected_wire(self, outputs: Sequence[Array]) -> Array:
        return self._with(self.wire, self.wires, outputs)

    def _with(self, buffer: Buffer, views: Sequence[Array], outputs: Sequence[Array]) -> Array:
        image = buffer.bytes.copy()
        for view, output in zip(views, outputs, strict=True):
            assert view.dtype == output.dtype
            image[self._of(buffer, view)] = output.view(np.uint8)
        return image


def name_of(dtype: np.dtype[Any]) -> str:
    return "bfloat16" if dtype == bfloat16 else dtype.name


def run(step: str, tensors: Tensors, **options: Any) -> None:
    """Run the kernel over all pieces; arrays among the options are passed by address."""
    given = {
        name: value.ctypes.data if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    grad, wire = name_of(tensors.dtype), name_of(tensors.wires[0].dtype)
    _testing.run_kernel(None, step, grad, wire, tensors.pieces, wire=tensors.wire.address, **given)


def hard(n: int, dtype: np.dtype[Any], seed: int = 0) -> Array:
    """Return random bit patterns among ordinary numbers, and every special number."""
    random = np.random.default_rng([seed, n])
    if dtype.kind in "biu":
        low, high = (0, 2) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return random.integers(low, high, n, dtype if dtype.kind != "b" else np.uint8).astype(dtype)
    wild = random.integers(0, 256, n * dtype.itemsize, np.uint8).view(dtype)
    tame = random.standard_normal(n).astype(dtype)
    x = np.where(random.random(n) < 0.3, wild, tame)
    tiny = np.array([1], f"u{dtype.itemsize}").view(dtype)[0]
    with np.errstate(all="ignore"):
        special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 65520, 65519.99], dtype)
        special = np.concatenate([special, np.array([tiny, -tiny, 1 / tiny, 3 * tiny], dtype)])
        odd = np.array([2.0**-24, 2.0**-25, 3 * 2.0**-26, 1 + 2.0**-8, 1 + 2.0**-11], np.float64)
        special = np.concatenate([special, odd.astype(dtype), (-odd * (1 + 2e-7)).astype(dtype)])
    at = random.permutation(n)[: len(special)]
    x[at] = random.permutation(special)[: len(at)]
    return x


def at_scales(dtype: np.dtype[Any]) -> list[Array]:
    """Return tensors from the smallest to the largest magnitudes, each with much smaller ones."""
    limit = 1023 if dtype == np.float64 else 15 if dtype == np.float16 else 127
    tensors = []
    for exponent in range(-limit - 60, limit + 1, max(1, limit // 9)):
        random = np.random.default_rng([limit, exponent + 2000])
        with np.errstate(all="ignore"):
            x = np.ldexp(random.uniform(-2, 2, 1000), exponent - random.integers(0, 45, 1000))
            x = x.astype(dtype)
        tensors.append(x)
    tensors.append(np.array([np.nan, np.inf, 0.0, -np.inf] * 3, dtype))
    tensors.append(np.zeros(5, dtype))
    return tensors


# --- the tests ------------------------------------------------------------------------------------

FACTORS = [  # prescale, scale, divisor
    (1.0, 1.0, 1.0),
    (0.3, 1.7, 3.0),
    (-(2.0**-20), 2.0**30, 8.0),
    (5.0, -0.1, 7.3),
    (0.0, 1.0, 2.0**-3),
    (2.0**-120, 1.0, 2.0**127),
    (1.0, 1.0, -(2.0**-130)),
]


def check_everything(
    inputs: Sequence[Array],
    wire: np.dtype[Any],
    shifts: Sequence[int] = (0,),
    *,
    factors: tuple[float, float, float] = (0.7, 1.0, 3.0),
    headroom: int | None = None,
) -> None:
    """Measure (if there is a headroom), pack and unpack them in one call each."""
    prescale, scale, divisor = factors
    tensors = Tensors(inputs, wire, shifts)
    exponents, ks, more = None, [0] * len(inputs), {}
    if headroom is not None:
        exponents = np.full(len(inputs), NO_EXPONENT)
        run("measure", tensors, prescale=prescale, exponents=exponents)
        assert exponents.tolist() == [exponent_reference(x, prescale) for x in inputs]
        ks = [k_of(e, headroom) for e in exponents]
        more = {"exponents": exponents, "headroom": headroom}

    packed = [pack_reference(x, wire, prescale, k) for x, k in zip(inputs, ks, strict=True)]
    stats = np.zeros((len(inputs), 2), np.uint32)
    wire_image = tensors.expected_wire(packed)
    memory_image = tensors.expected(inputs)
    run("pack", tensors, prescale=prescale, stats=stats, **more)
    assert_same(tensors.wire.bytes, wire_image, tensors.wires, packed)
    assert np.array_equal(tensors.memory.bytes, memory_image)
    assert stats.tolist() == [list(stats_reference(w)) for w in packed]

    outputs = [
        unpack_reference(w, tensors.dtype, k, scale, divisor)
        for w, k in zip(packed, ks, strict=True)
    ]
    memory_image = tensors.expected(outputs)
    run("unpack", tensors, scale=scale, divisor=divisor, **more)
    assert_same(tensors.memory.bytes, memory_image, tensors.views, outputs)
    assert np.array_equal(tensors.wire.bytes, wire_image)


def assert_same(
    image: Array, expected: Array, views: Sequence[Array], outputs: Sequence[Array]
) -> None:
    """Assert that the whole buffer is as expected, guards included; name the first difference."""
    if np.array_equal(image, expected):
        return
    for i, (view, output) in enumerate(zip(views, outputs, strict=True)):
        wrong = np.flatnonzero(bits_of(view) != bits_of(output))
        if wrong.size:
            j = wrong[0]
            pytest.fail(
                f"tensor {i} of {len(view)}: {wrong.size} wrong, the first is number {j}: "
                f"{view[j]!r} ({bits_of(view)[j]:#x}) instead of "
                f"{output[j]!r} ({bits_of(output)[j]:#x})"
            )
    pytest.fail("something was written between the tensors")


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize(("grad", "wire"), PAIRS)
def test_every_size(grad: str, wire: str, factors: tuple[float, float, float]) -> None:
    inputs = [hard(n, dtype_of(grad)) for n in SIZES]
    check_everything(inputs, dtype_of(wire), factors=factors)
    check_everything(inputs, dtype_of(wire), factors=factors, headroom=2)


@pytest.mark.parametrize(("grad", "wire"), PAIRS)
def test_every_alignment(grad: str, wire: str) -> None:
    dtype = dtype_of(grad)
    shifts = range(32 // dtype.itemsize + 1)
    for n in [1, 8, 1025, 9000]:
        inputs = [hard(n, dtype, seed) for seed in shifts]
        check_everything(inputs, dtype_of(wire), shifts, headroom=1)


@pytest.mark.parametrize("headroom", [0, 3])
@pytest.mark.parametrize(("grad", "wire"), PAIRS)
def test_every_magnitude(grad: str, wire: str, headroom: int) -> None:
    """2^k may be outside the range of float32; the product is still exact."""
    inputs = at_scales(dtype_of(grad))
    for prescale in [1.0, 0.3, 2.0**-30]:
        check_everything(inputs, dtype_of(wire), factors=(prescale, 1.0, 3.0), headroom=headroom)


@pytest.mark.parametrize(("grad", "wire"), PAIRS)
def test_any_wire_under_any_exponent(grad: str, wire: str) -> None:
    """Unpacked data may differ from what was packed: sums, and other ranks' exponents."""
    dtype = dtype_of(grad)
    exponents = np.arange(*((-1073, 1025, 5) if grad == "float64" else (-148, 129)), dtype=np.int32)
    wires = [hard(700, dtype_of(wire), seed) for seed in range(exponents.size)]
    tensors = Tensors([np.ones(700, dtype)] * exponents.size, dtype_of(wire))
    for view, w in zip(tensors.wires, wires, strict=True):
        view[:] = w
    outputs = [
        unpack_reference(w, dtype, k_of(e, 1), 1.0, 1.0)
        for w, e in zip(wires, exponents, strict=True)
    ]
    expected = tensors.expected(outputs)
    run("unpack", tensors, exponents=exponents, headroom=1)
    assert_same(tensors.memory.bytes, expected, tensors.views, outputs)


@pytest.mark.parametrize("grad", ["float32", "float64"])
def test_scaled_halves_use_what_room_there_is(grad: str) -> None:
    """The largest magnitude is in [2^14, 2^15) less the headroom, and nothing overflows."""
    inputs = [x for x in at_scales(dtype_of(grad)) if np.isfinite(x).all() and x.any()]
    tensors = Tensors(inputs, np.dtype(np.float16))
    exponents = np.full(len(inputs), NO_EXPONENT)
    stats = np.zeros((len(inputs), 2), np.uint32)
    run("measure", tensors, exponents=exponents)
    run("pack", tensors, exponents=exponents, headroom=2, stats=stats)
    amax = stats[:, 0].copy().view(np.float32)
    assert np.all((amax >= 2.0**12) & (amax <= 2.0**13))
    assert not stats[:, 1].any()
    run("unpack", tensors, exponents=exponents, headroom=2)
    for x, view in zip(inputs, tensors.views, strict=True):
        tiny = np.finfo(x.dtype).smallest_subnormal
        bound = np.abs(x) * 2.0**-11 + np.abs(x).max() * 2.0**-37 + tiny
        assert np.all(np.abs(view - x) <= bound)


@pytest.mark.parametrize(("grad", "wire"), [("float32", "float16"), ("float64", "float64")])
def test_one_giant(grad: str, wire: str) -> None:
    inputs = [hard(3_000_001, dtype_of(grad))]
    check_everything(inputs, dtype_of(wire), headroom=1)
    check_everything(inputs, dtype_of(wire), shifts=[1])


def mixed_sizes(n_pieces: int, giants: dict[int, int]) -> list[int]:
    random = np.random.default_rng(n_pieces)
    sizes = random.integers(1, 20, n_pieces)
    for at, n in giants.items():
        sizes[at] = n
    return sizes.tolist()


@pytest.mark.parametrize(
    "n_pieces", [FEW, FEW + 1, SOME, SOME + 1, 1000, MANY - 1, MANY, MANY + 1, 3000]
)
@pytest.mark.parametrize("giants", [{}, {0: 100_000}, {20: 100_000}, {-1: 60_000, 5: 50_000}])
def test_many_pieces(n_pieces: int, giants: dict[int, int]) -> None:
    """Pieces of one block and of many, found by their blocks; more than fit into a launch."""
    dtype = np.dtype(np.float32)
    inputs = [hard(n, dtype, i) for i, n in enumerate(mixed_sizes(n_pieces, giants))]
    check_everything(inputs, np.dtype(np.float16), shifts=[0, 1, 4], headroom=0)


def in_two_orders(pieces: Sequence[Any]) -> Iterator[list[Any]]:
    yield list(pieces)
    yield [pieces[i] for i in np.random.default_rng(5).permutation(len(pieces))]


def test_a_tensor_in_parts_is_the_tensor_whatever_the_order() -> None:
    """Exponent and stats belong to the tensor, not to its pieces."""
    x = hard(50_000, np.dtype(np.float32))
    whole = Tensors([x], np.dtype(np.float16))
    start, _, _, _ = whole.pieces[0]
    cuts = [0, 32, 64, 4096, 4160, 20_000, 49_984, 50_000]  # wire offsets are multiples of 64 bytes
    parts = [(start + 4 * a, b - a, 2 * a // WIRE_UNIT, 0) for a, b in pairwise(cuts)]
    k = k_of(exponent_reference(x, 1.0), 0)
    packed = pack_reference(x, np.dtype(np.float16), 1.0, k)
    for pieces in in_two_orders(parts):
        whole.pieces = pieces
        exponents, stats = np.full(1, NO_EXPONENT), np.zeros((1, 2), np.uint32)
        whole.wire.bytes[:] = GUARD
        run("measure", whole, exponents=exponents)
        run("pack", whole, exponents=exponents, stats=stats)
        assert exponents[0] == exponent_reference(x, 1.0)
        assert stats.tolist() == [list(stats_reference(packed))]
        assert np.array_equal(whole.wire.bytes, whole.expected_wire([packed]))


def test_a_measure_only_raises() -> None:
    tensors = Tensors([np.array([1.0], np.float32)] * 3, np.dtype(np.float32))
    exponents = np.array([-5, 1, 7], np.int32)
    run("measure", tensors, exponents=exponents)
    assert exponents.tolist() == [1, 1, 7]


def test_prescale_0_hides_everything() -> None:
    """A rank without a gradient: zeros, whatever the memory contains, and no exponent."""
    for grad, wire in PAIRS:
        x = np.full(3000, np.nan, dtype_of(grad))
        x[::2] = np.inf
        tensors = Tensors([x, x[:5]], dtype_of(wire), [0, 1])
        exponents, stats = np.full(2, NO_EXPONENT), np.zeros((2, 2), np.uint32)
        run("measure", tensors, prescale=0.0, exponents=exponents)
        assert exponents.tolist() == [NO_EXPONENT] * 2
        exponents[:] = 9
        run("pack", tensors, prescale=0.0, exponents=exponents, stats=stats)
        assert not stats.any()
        for w in tensors.wires:
            assert not bits_of(w).any()


@pytest.mark.parametrize(("value", "divisor"), [(0.0, 1.0), (-0.0, 1.0), (3.0, 3.0), (0.25, 0.25)])
@pytest.mark.parametrize(("grad", "wire"), PAIRS)
def test_a_divisor_in_memory(grad: str, wire: str, value: float, divisor: float) -> None:
    """It replaces the argument, and 0 (no rank had a sample) counts as 1."""
    inputs = [hard(n, dtype_of(grad)) for n in [5, 4096, 9001]]
    for step in ["unpack", "scale"]:
        tensors = Tensors(inputs, dtype_of(grad if step == "scale" else wire), [0, 0, 1])
        run("pack", tensors)
        source = tensors.wires if step == "unpack" else inputs
        outputs = [unpack_reference(w, tensors.dtype, 0, 1.5, divisor) for w in source]
        expected = tensors.expected(outputs)
        at = np.array([value], np.float64)
        run(step, tensors, scale=1.5, divisor=777.0, divisor_at=at)
        assert_same(tensors.memory.bytes, expected, tensors.views, outputs)


@pytest.mark.parametrize("factors", FACTORS, ids=str)
@pytest.mark.parametrize("grad", FLOATS)
def test_scale_in_place(grad: str, factors: tuple[float, float, float]) -> None:
    """No wire, and no exponents: the arguments for them are ignored."""
    _, scale, divisor = factors
    dtype = dtype_of(grad)
    shifts = range(16 // dtype.itemsize)
    inputs = [hard(n, dtype) for n in SIZES for _ in shifts]
    tensors = Tensors(inputs, dtype, shifts)
    outputs = [unpack_reference(x, dtype, 0, scale, divisor) for x in inputs]
    expected = tensors.expected(outputs)
    exponents = np.full(len(inputs), 3, np.int32)
    run("scale", tensors, scale=scale, divisor=divisor, exponents=exponents, prescale=0.0)
    assert_same(tensors.memory.bytes, expected, tensors.views, outputs)
    assert np.all(tensors.wire.bytes == GUARD)


def test_an_exact_average_stays_exact() -> None:
    """A sum of equal integers over their number, which a reciprocal would miss (9 / 3 = 3)."""
    for n in range(1, 200):
        x = np.arange(1, 9, dtype=np.float32) * n
        tensors = Tensors([x], np.dtype(np.float32))
        run("scale", tensors, divisor=float(n))
        assert tensors.views[0].tolist() == list(range(1, 9))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_copied(dtype: str) -> None:
    kind = np.dtype(dtype)
    shifts = range(16 // kind.itemsize)
    inputs = [hard(n, kind, s) for s in shifts for n in SIZES]
    tensors = Tensors(inputs, kind, [s for s in shifts for _ in SIZES])
    stats = np.zeros((len(inputs), 2), np.uint32)
    wire_image = tensors.expected_wire(inputs)
    run("pack", tensors, stats=stats)
    assert_same(tensors.wire.bytes, wire_image, tensors.wires, inputs)
    assert not stats.any()
    memory_image = tensors.expected(inputs)
    for view in tensors.views:
        view[:] = 0
    run("unpack", tensors)
    assert_same(tensors.memory.bytes, memory_image, tensors.views, inputs)
    run("scale", tensors)
    assert np.array_equal(tensors.memory.bytes, memory_image)
    run("pack", tensors, prescale=0.0)
    for w in tensors.wires:
        assert not w.any()


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64"])
def test_integers_have_no_factors(dtype: str) -> None:
    tensors = Tensors([np.ones(3, dtype)], np.dtype(dtype))
    one, exponents = np.ones(1), np.zeros(1, np.int32)
    for step, options in [
        ("pack", {"prescale": 2.0}),
        ("pack", {"exponents": exponents}),
        ("unpack", {"scale": 0.5}),
        ("unpack", {"divisor": 2.0}),
        ("unpack", {"divisor_at": one}),
        ("scale", {"divisor": 3.0}),
        ("measure", {"exponents": exponents}),
    ]:
        with pytest.raises(ValueError, match=f"no GPU kernel can {step} {dtype}"):
            run(step, tensors, **options)


@pytest.mark.parametrize("step", ["pack", "unpack"])
@pytest.mark.parametrize(
    ("grad", "wire"),
    [
        ("float16", "float32"),
        ("float16", "bfloat16"),
        ("float32", "float64"),
        ("float64", "float32"),
        ("int32", "float16"),
        ("int32", "int16"),
        ("longdouble", "longdouble"),
    ],
)
def test_pairs_without_a_kernel(step: str, grad: str, wire: str) -> None:
    with pytest.raises(ValueError, match=f"no GPU kernel can {step} {grad} as {wire}"):
        _testing.run_kernel(None, step, grad, wire, [])


def test_no_pieces_is_nothing_to_do() -> None:
    _testing.run_kernel(None, "pack", "float32", "float16", [])
