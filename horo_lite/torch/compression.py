"""Compression of tensors in transfer: Horovod's interface to horo_lite's wire formats."""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.collectives import compression as core


class Compressor:
    """Base class for your own compressors, as in Horovod: an operation calls its two methods."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the result for the caller, from the received tensor."""
        raise NotImplementedError


class _HorovodMethods:
    """Horovod's methods, for a wire format of the core, which casts while it packs."""

    _dtype: torch.dtype | None = None

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor in the wire dtype, and its own dtype; integers are not changed."""
        if self._dtype is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(self._dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor in the dtype that it had before `compress`."""
        return tensor if ctx is None else tensor.to(ctx)


class WireCompressor(_HorovodMethods, core.Compressor):
    """A wire format that is a dtype."""

    def __init__(self, name: str, wire: str, dtype: torch.dtype | None) -> None:
        super().__init__(name, wire)
        self._dtype = dtype


class QuantizingCompressor(_HorovodMethods, core.Quantizer):
    """A wire format between hosts, to which `compress()` cannot convert: it changes nothing."""


NoneCompressor = WireCompressor("none", "none", None)
FP16Compressor = WireCompressor("fp16", "fp16", torch.float16)
BF16Compressor = WireCompressor("bf16", "bf16", torch.bfloat16)


class Compression:
    """The built-in compressors: see horo_lite.Compression for their effect on the numbers.

    With one of these, the core of an operation casts, with scales against overflow that
    `compress()` does not have. An object with its own `compress` and `decompress` is called.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = QuantizingCompressor("int8")
    int4 = QuantizingCompressor("int4")
    auto = staticmethod(core.Compression.auto)
