"""Arrays of more bytes than memory: providing gigabytes takes longer than reducing them."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

PART = 16 << 20
_MAP_FIXED = 0x10


def thin_array(size: int) -> np.ndarray:
    """Return `size` bytes, of which only the first and the last PART, or more, are of their own.

    All parts between are the same memory, so what is done to an element must not depend on how
    often: it may be a maximum, but no sum. The memory is never given back.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.memfd_create("thin_array")
    parts = size // PART  # the last one is longer
    os.ftruncate(file, 2 * PART + size)

    def map_(address: int | None, length: int, flags: int, fd: int, offset: int) -> int:
        found = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if found == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        return found

    shared = mmap.MAP_SHARED | _MAP_FIXED
    start = map_(None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    for part in range(parts):
        place = min(part, 1) + (part == parts - 1)
        length = size - part * PART if part == parts - 1 else PART
        map_(start + part * PART, length, shared, file, place * PART)
    os.close(file)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
