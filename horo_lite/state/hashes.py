"""Hashes of arrays, wherever they are: of the copies in host memory that the core can read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native
from horo_lite._native import Tensors
from horo_lite.adapters import to_host
from horo_lite.collectives.arrays import copy_of, gpu_of

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


class Readable:
    """Arrays, and numbers, in a form that the core can read.

    At most one copy from a GPU exists at a time.

    Args:
        group: The group whose stream copies arrays from a GPU; None: they copy themselves.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._staging: _native.Staging | None = None

    def hashes(self, values: Sequence[Any]) -> NDArray[np.uint64]:
        """Return a hash of each array's bits."""
        try:
            hashes = _native.fingerprints(Tensors(values, writable=False))
        except (TypeError, ValueError, BufferError):  # some need a copy: process them one by one
            hashes = [_native.fingerprints(self.plain(value))[0] for value in values]
        return np.array(hashes, np.uint64)

    def plain(self, value: Any) -> Tensors:
        """Return the array in host memory, in C order; as bytes if the core lacks its dtype."""
        if gpu_of(value) is not None:
            return self._downloaded(value)
        try:
            tensors = Tensors([value], writable=False)
            if not tensors.layout and not tensors.strided:
                return tensors
            return Tensors([copy_of(value)])
        except (TypeError, BufferError):
            torch = sys.modules.get("torch")
            if torch is None or not isinstance(value, torch.Tensor):
                return Tensors([np.array(to_host(value), order="C").reshape(-1).view(np.uint8)])
            if value.layout is not torch.strided:  # the same rows in another order are the same
                value = value.to_dense()
            return Tensors([value.contiguous().reshape(-1).view(torch.uint8)])

    def _downloaded(self, value: Any) -> Tensors:
        """Copy an array from a GPU into host memory, which the next call overwrites."""
        if self._group is None:
            return self.plain(value.cpu() if hasattr(value, "cpu") else value.get())  # torch, CuPy
        memory = self._group.rows(value)
        assert memory.stream is not None
        memory.begin()
        if self._staging is None:
            self._staging = _native.Staging(memory.stream.queue)
        return self._staging.download(memory.tensors, 0, 1)
