"""The accuracy of float16 on NCCL, with and without a common power-of-two scale per tensor.

    python benchmarks/fp16_on_nccl.py

Needs no GPU: the host version of the kernels packs and unpacks, bit-identically to a GPU, and NumPy
adds in half precision, one rank after the other, like an NCCL ring. Without a scale, gradients are
cast, added and divided by the number of ranks, as in Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from horo_lite import _testing

N = 2**16
MAGNITUDES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e5, 1e6)
RANKS = (2, 8, 64)
NO_EXPONENT = -0x7F7F7F80
WIRE_UNIT = 64  # bytes

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


def gradients(n_ranks: int, magnitude: float) -> list[Floats]:
    """Return a direction that all ranks share plus as much noise, different on each rank."""
    random = np.random.default_rng(7)
    shared = random.standard_normal(N)
    return [
        (magnitude * (shared + random.standard_normal(N))).astype(np.float32)
        for _ in range(n_ranks)
    ]


def added(halves: Sequence[Halves]) -> Halves:
    total = halves[0].copy()
    for other in halves[1:]:
        total += other
    return total


def plain(xs: Sequence[Floats]) -> Floats:
    return added([x.astype(np.float16) for x in xs]).astype(np.float32) / np.float32(len(xs))


def scaled(xs: Sequence[Floats]) -> Floats:
    """Measure, pack, add and unpack, as csrc/gpu/nccl_group.cpp does."""
    exponents = np.full(1, NO_EXPONENT, np.int32)
    memory = np.zeros(2 * N + WIRE_UNIT, np.uint8)
    skip = -memory.ctypes.data % WIRE_UNIT
    wire = memory[skip : skip + 2 * N].view(np.float16)

    def run(step: str, x: Floats, wire_dtype: str, divisor: float = 1.0) -> None:
        _testing.run_kernel(
            None,
            step,
            "float32",
            wire_dtype,
            [(x.ctypes.data, x.size, 0, 0)],
            wire=wire.ctypes.data,
            divisor=divisor,
            exponents=exponents.ctypes.data,
            headroom=(len(xs) - 1).bit_length(),
        )

    for x in xs:  # the maximum over all ranks
        run("measure", x, "float32")
    halves = []
    for x in xs:
        run("pack", x, "float16")
        halves.append(wire.copy())
    wire[:] = added(halves)
    result = np.empty(N, np.float32)
    run("unpack", result, "float16", divisor=float(len(xs)))
    return result


def column(result: Floats, mean: NDArray[np.float64]) -> str:
    """Format the error of the finite elements, and how many elements became infinite or zero."""
    finite = np.isfinite(result)
    n_over, n_zero = int((~finite).sum()), int(((result == 0) & (mean != 0)).sum())
    error = result[finite].astype(np.float64) - mean[finite]
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.sqrt((error**2).sum() / (mean[finite] ** 2).sum()) if finite.any() else np.nan
    parts = [f"{relative:.1e}" if finite.any() else "-"]
    parts += [f"{n_over / N:.1%} overflow"] * (n_over > 0)
    parts += [f"{n_zero / N:.1%} flushed"] * (n_zero / N >= 0.0005)
    return ", ".join(parts)


def main() -> None:
    heads = [f"{kind}, {n} ranks" for n in RANKS for kind in ("scaled", "plain")]
    print("| gradients of size | " + " | ".join(heads) + " |")
    print("| --- |" + " --- |" * len(heads))
    for magnitude in MAGNITUDES:
        cells = []
        for n_ranks in RANKS:
            xs = gradients(n_ranks, magnitude)
            mean = np.mean([x.astype(np.float64) for x in xs], axis=0)
            with np.errstate(over="ignore", invalid="ignore"):
                cells += [column(way(xs), mean) for way in (scaled, plain)]
        print(f"| {magnitude:.0e} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
