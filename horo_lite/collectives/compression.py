"""What gradients look like on their way between ranks."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


class Compressor:
    """A wire dtype, and what happens to a gradient before and after it travels.

    `wire` is one of "none" (as it is), "fp16" and "bf16". The core does the casting, fused with
    packing; only float32 and float64 tensors are ever narrowed, and products never.

    For more (sparsification, error feedback), derive from this class and override `prepare` and
    `restore`. An instance may keep state by tensor name. Give every rank an equal one: `name` and
    `wire` are compared, and ranks that differ get a MismatchError.
    """

    def __init__(self, name: str, wire: str = "none") -> None:
        if wire not in ("none", "fp16", "bf16"):
            raise ValueError(f"wire is 'none', 'fp16' or 'bf16', not {wire!r}")
        self.name = name
        self.wire = wire

    def prepare(self, name: str, gradient: NDArray[Any]) -> None:
        """`gradient` holds, changed in place, what this rank contributes of tensor `name`."""

    def restore(self, name: str, gradient: NDArray[Any]) -> None:
        """`gradient` holds, changed in place, what the optimizer is to see."""

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Compression:
    """The ready-made compressors.

    none: nothing is changed. Sums are formed in float32 (float64 for float64), in rank order.

    fp16: half the bytes. Each block of at most 1,024 elements of a tensor travels as float16 with
    a power-of-two scale of its own, taken from the block's largest finite magnitude on the way in
    and from the largest of all ranks' on the way back, so nothing overflows or vanishes by itself.
    For an average x̄ over ranks' x_r on one host, with A the largest |x_r| in the block:

        |result - x̄| <= 2^-11 (mean |x_r| + |x̄|) + 2^-37 A      (up to float32 rounding)

    An inf or nan arrives as inf or nan, alone, for loss scalers to see.

    bf16: half the bytes, float32's range, 8 bits of precision: relative error 2^-8 a rounding.
    """

    none = Compressor("none", "none")
    fp16 = Compressor("fp16", "fp16")
    bf16 = Compressor("bf16", "bf16")
