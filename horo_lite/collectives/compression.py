"""How gradients are represented while they travel between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def compressed(
        self, arrays: Sequence[Any], excluded: Callable[[Any], bool] = lambda x: x is None
    ) -> tuple[Compressor, list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Return how to send what, and a function that makes results of what is received.

        This compressor, and the arrays themselves, except with an `OwnCompressor`.
        """
        return self, list(arrays), list

    def __repr__(self) -> str:
        return f"Compression.{self.name}"


class OwnCompressor(Compressor):
    """A user's object with Horovod's methods `compress` and `decompress`.

    They are called around an operation, on the framework's own arrays, and may change the dtype and
    the shape.
    """

    def __init__(self, own: Any) -> None:
        super().__init__(str(getattr(own, "name", type(own).__name__)))
        self._own = own

    def compressed(
        self, arrays: Sequence[Any], excluded: Callable[[Any], bool] = lambda x: x is None
    ) -> tuple[Compressor, list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """Compress the arrays, except those that are `excluded`; the function decompresses."""
        kept = list(map(excluded, arrays))
        pairs = [
            (x, None) if keep else self._own.compress(x)
            for x, keep in zip(arrays, kept, strict=True)
        ]

        def restored(received: Sequence[Any]) -> list[Any]:
            return [
                x if keep else self._own.decompress(x, context)
                for x, keep, (_, context) in zip(received, kept, pairs, strict=True)
            ]

        return Compression.none, [x for x, _ in pairs], restored


def compressor_of(given: Any) -> Compressor:
    """Return the compressor that a Horovod script specifies; raise ValueError if it is none."""
    if isinstance(given, Compressor):
        return given
    if all(callable(getattr(given, name, None)) for name in ("compress", "decompress")):
        return OwnCompressor(given)
    raise ValueError(
        "compression must be hvd.Compression.none, .fp16 or .bf16, or have compress() and "
        f"decompress(), not {given!r}"
    )


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
