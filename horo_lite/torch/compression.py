"""What tensors look like on their way; Horovod's interface over horo_lite's wire formats."""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.collectives import compression as core


class Compressor:
    """To derive from, as from Horovod's: two static methods that an operation calls."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What is to travel, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """What the caller gets, of what has come."""
        raise NotImplementedError


class WireCompressor(core.Compressor):
    """A wire format of the core's, which casts while it packs; also usable as Horovod's are."""

    def __init__(self, name: str, wire: str, dtype: torch.dtype | None) -> None:
        super().__init__(name, wire)
        self._dtype = dtype

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor in the wire's dtype, and its own; integers stay as they are."""
        if self._dtype is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(self._dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The tensor in the dtype that `compress` found."""
        return tensor if ctx is None else tensor.to(ctx)


NoneCompressor = WireCompressor("none", "none", None)
FP16Compressor = WireCompressor("fp16", "fp16", torch.float16)
BF16Compressor = WireCompressor("bf16", "bf16", torch.bfloat16)


class Compression:
    """The ready-made compressors: see horo_lite.Compression for what they do to the numbers.

    An operation that is given one lets the core do the casting, with scales against overflow that
    `compress()` does not have. What has `compress` and `decompress` of its own is called.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
