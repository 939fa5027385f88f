"""Conversion of tensors and options of torch's collectives for the core."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from horo_lite import _native
from horo_lite.torch.distributed.arguments import ArgumentError, own_part
from horo_lite.torch.submission import refuse_opaque

_C_ORDER = torch.contiguous_format
# Other dtypes, which the core does not know, travel as bytes.
_KNOWN = frozenset(
    {
        torch.bool,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)


class Staged:
    """Dense host memory for the tensors of one operation, and the steps to do afterwards.

    Args:
        is_async: Whether the caller may continue without waiting.
    """

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.is_complex = False
        self._before: list[Callable[[Any], None]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._after: list[Callable[[Any], None]] = []

    def in_place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return dense memory with the tensors' contents, which will be copied back to them."""
        return self._written(tensors, keeps_contents=True)

    def transfer(
        self, send: Sequence[Sequence[Tensor]], receive: Sequence[Sequence[Tensor]], rank: int
    ) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """Return dense memory from which to send and into which to receive.

        Both contain a list of tensors for each rank, or one for all ranks. What is read is copied
        first if it overlaps anything that is written. The one exception is what this rank sends to
        itself, which may be the very memory in which it is received.
        """
        received = iter(self._written([x for each in receive for x in each]))
        memory = [[next(received) for _ in each] for each in receive]
        written = sorted(_extent(x) for each in memory for x in each)
        own = [_extent(x) for x in own_part(memory, rank)]
        sent = []
        for r, each in enumerate(send):
            same = own if r == rank or len(send) == 1 else []
            sent.append([self._read(x, written, same[i : i + 1]) for i, x in enumerate(each)])
        return sent, memory

    def rows(self, tensor: Tensor, sizes: Sequence[int], *, is_written: bool) -> list[Tensor]:
        """Return consecutive parts of a tensor in C order, which are views of it if it is dense."""
        dense = host_memory(tensor)
        if not _is_dense(dense):
            dense = torch.empty_like(dense, memory_format=_C_ORDER)
            if is_written:
                self._copies.append((tensor.detach(), dense))
            else:
                dense.copy_(tensor.detach())
        return list(dense.view(-1).split(list(sizes)))

    def do_before(self, step: Callable[[Any], None]) -> None:
        """Call `step` with the operation's result before tensors are copied back."""
        self._before.append(step)

    def do_after(self, step: Callable[[Any], None]) -> None:
        """Call `step` with the operation's result at the end."""
        self._after.append(step)

    def finish(self) -> Callable[[Any], None] | None:
        """Return a function that executes all steps; None if there are none."""
        if not (self._before or self._copies or self._after):
            return None
        mode = torch.is_inference_mode_enabled()  # it is per thread, and another one may run this

        def run(result: Any) -> None:
            with torch.inference_mode(mode):
                for step in self._before:
                    step(result)
                for memory, copy in self._copies:
                    memory.copy_(copy)
                for step in self._after:
                    step(result)

        return run

    def _written(self, tensors: Sequence[Tensor], keeps_contents: bool = False) -> list[Tensor]:
        memory = [host_memory(x) for x in tensors]
        overlapping = _overlapping([_extent(x) for x in memory])
        for i, x in enumerate(memory):
            if i in overlapping or not _is_dense(x):
                memory[i] = torch.empty_like(x, memory_format=_C_ORDER)
                if keeps_contents:
                    memory[i].copy_(x)
                self._copies.append((x, memory[i]))
        return [self._real(x) for x in memory]

    def _read(
        self, tensor: Tensor, written: list[tuple[int, int]], same: list[tuple[int, int]]
    ) -> Tensor:
        memory = self._real(host_memory(tensor).resolve_conj().resolve_neg().contiguous())
        extent = begin, end = _extent(memory)
        if extent in same:
            return memory
        at = bisect_left(written, (end, 0)) - 1  # the last one that begins before the end
        return memory.clone() if at >= 0 and begin < written[at][1] else memory

    def _real(self, tensor: Tensor) -> Tensor:
        self.is_complex |= tensor.is_complex()
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def host_memory(tensor: Tensor) -> Tensor:
    """Return the tensor's data; raise an error unless they are numbers in this host's memory."""
    refuse_opaque(tensor)
    if not tensor.is_cpu:
        raise ArgumentError(
            f"a tensor is on {tensor.device}: torch.distributed's backend horo_lite is for "
            "CPU tensors. For GPUs, use the backend nccl, or the DistributedOptimizer of "
            "horo_lite.torch, which uses NCCL"
        )
    if tensor.layout is not torch.strided:
        raise ArgumentError(
            f"unsupported layout of a tensor, {tensor.layout}: only all_reduce accepts a layout "
            "other than strided, and only sparse_coo. Call .to_dense() first"
        )
    return tensor.detach()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def memory_of(tensors: Sequence[Tensor], writable: bool = True) -> _native.Tensors:
    """Return the memory of contiguous tensors, of any dtype."""
    return _native.Tensors([as_bytes(x) for x in tensors], writable)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor, or a view of it as bytes if the core does not know its dtype."""
    return tensor if tensor.dtype in _KNOWN else tensor.view(torch.uint8)


def _overlapping(extents: Sequence[tuple[int, int]]) -> set[int]:
    """Return the indices of the extents that overlap another one."""
    found: set[int] = set()
    if len(extents) < 2:
        return found
    last = -1  # the one that ends last
    for i in sorted(range(len(extents)), key=extents.__getitem__):
        begin, end = extents[i]
        if begin == end:
            continue
        if last >= 0 and begin < extents[last][1]:
            found |= {i, last}
        if last < 0 or end > extents[last][1]:
            last = i
    return found


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the begin and end addresses of a tensor's elements."""
    if x.numel() == 0:
        return 0, 0
    begin = x.data_ptr()
    if x.is_contiguous():
        return begin, begin + x.nbytes
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return begin, begin + reach * x.element_size()
