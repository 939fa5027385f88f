"""How gradients are represented while they travel between ranks."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray


class Compressor:
    """A wire dtype, and hooks that change gradients before and after they travel.

    `wire` is "none" (no conversion), "fp16" or "bf16". The core does the casting, fused with
    packing; only float32 and float64 tensors are ever narrowed, and products never. With "fp16" or
    "bf16", float16 tensors are sent as blocks with a scale, as float32 ones with "fp16" are.

    For more (sparsification, error feedback), derive from this class and override `prepare` and
    `restore`. An instance may keep state by tensor name. Pass an equal one on every rank: `name`
    and `wire` are compared, and a difference raises MismatchError.
    """

    def __init__(self, name: str, wire: str = "none") -> None:
        if wire not in ("none", "fp16", "bf16"):
            raise ValueError(f"wire must be 'none', 'fp16' or 'bf16', not {wire!r}")
        self.name = name
        self.wire = wire

    def prepare(self, name: str, gradient: NDArray[Any]) -> None:
        """Change `gradient` of tensor `name`, in place, to what this rank contributes."""

    def restore(self, name: str, gradient: NDArray[Any]) -> None:
        """Change the reduced `gradient`, in place, to what the optimizer receives."""

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class Compression:
    """The built-in compressors.

    none: no conversion. Sums are formed in float32 (float64 for float64), in rank order.

    fp16: half the bytes. Each block of at most 1,024 elements of a tensor travels as float16 with
    its own power-of-two scale, chosen from the block's largest finite magnitude on the way in and
    from the largest of all ranks on the way back, so compression itself never causes overflow or
    underflow. For an average x̄ over ranks' x_r on one host, with A the largest |x_r| in the block:

        |result - x̄| <= 2^-11 (mean |x_r| + |x̄|) + 2^-37 A      (up to float32 rounding)

    An inf or nan arrives as inf or nan, and affects no other element, so loss scalers see it.

    bf16: half the bytes, float32's range, 8 bits of precision: relative error 2^-8 per rounding.
    """

    none = Compressor("none", "none")
    fp16 = Compressor("fp16", "fp16")
    bf16 = Compressor("bf16", "bf16")
