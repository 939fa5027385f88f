"""The concatenated bytes of several tensors, read and written in windows."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from horo_lite import _native


class ByteStream:
    """The concatenated bytes of several tensors."""

    def __init__(self, tensors: _native.Tensors) -> None:
        self._buffers = [buffer for buffer in tensors.buffers() if buffer[1]]
        self._ends = list(accumulate(n_bytes for _, n_bytes in self._buffers))
        self.n_bytes = self._ends[-1] if self._ends else 0

    def n_windows(self, size: int) -> int:
        """Return the number of windows of `size` bytes that hold all bytes."""
        return -(-self.n_bytes // size)

    def read(self, window: int, size: int, to: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Copy that window's bytes to `to`; return the part of `to` that holds them."""
        at = to.ctypes.data
        begin = at
        for address, n_bytes in self._pieces(window, size):
            ctypes.memmove(at, address, n_bytes)
            at += n_bytes
        return to[: at - begin]

    def write(self, window: int, size: int, source: NDArray[np.uint8]) -> None:
        """Copy that window's bytes from `source`."""
        at = source.ctypes.data
        for address, n_bytes in self._pieces(window, size):
            ctypes.memmove(address, at, n_bytes)
            at += n_bytes

    def length(self, window: int, size: int) -> int:
        """Return that window's number of bytes; the last one may be shorter, later ones empty."""
        return max(0, min(size, self.n_bytes - window * size))

    def _pieces(self, window: int, size: int) -> Iterator[tuple[int, int]]:
        begin, end = window * size, window * size + self.length(window, size)
        i = bisect_right(self._ends, begin)
        while begin < end:
            address, whole = self._buffers[i]
            offset = begin - (self._ends[i] - whole)
            n_bytes = min(end - begin, whole - offset)
            yield address + offset, n_bytes
            begin += n_bytes
            i += 1
