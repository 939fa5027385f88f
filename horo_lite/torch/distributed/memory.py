"""Conversion of tensors and options of torch's collectives for the core."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from horo_lite import _native
from horo_lite.torch.submission import refuse_opaque

_C_ORDER = torch.contiguous_format
_OP_NAMES = {op: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}
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
        self._after: list[Callable[[Any], None]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """Return dense memory with the contents of the tensor."""
        return self._plain(tensor.resolve_conj().resolve_neg()).contiguous()

    def inputs(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return dense memory with the tensors' contents, which may be read during the writes."""
        memory = [self.input(x) for x in tensors]
        read, written = ([_extent(x) for x in each] for each in (tensors, outputs))
        if any(a < end and begin < b for begin, end in read for a, b in written):
            memory = [x.clone() for x in memory]
        return memory

    def output(self, tensor: Tensor) -> Tensor:
        """Return dense memory whose contents will be copied to the tensor if necessary."""
        memory = self._plain(tensor)
        if memory.is_contiguous() and not memory.is_neg():
            return memory
        return self._copied_back(memory, torch.empty_like(memory, memory_format=_C_ORDER))

    def output_of(self, tensor: Tensor, copy: Tensor) -> Tensor:
        """Return the copy; its contents will be copied to the tensor, which may have any shape."""
        memory = self._plain(tensor)
        self._copied_back(memory, copy.view(memory.shape))
        return copy

    def in_place(self, tensor: Tensor) -> Tensor:
        """Return dense memory with the tensor's contents, which will be copied back to it."""
        memory = self._plain(tensor)
        if memory.is_contiguous() and not memory.is_neg():
            return memory
        return self._copied_back(memory, memory.clone(memory_format=_C_ORDER))

    def do_before(self, step: Callable[[Any], None]) -> None:
        """Call `step` with the operation's result before tensors are copied back."""
        self._before.append(step)

    def do_after(self, step: Callable[[Any], None]) -> None:
        """Call `step` with the operation's result at the end."""
        self._after.append(step)

    def finish(self) -> Callable[[Any], None] | None:
        """Return a function that executes all steps; None if there are none."""
        steps = [*self._before, *self._after]
        if not steps:
            return None
        mode = torch.is_inference_mode_enabled()  # it is per thread, and another one may run this

        def run(result: Any) -> None:
            with torch.inference_mode(mode):
                for step in steps:
                    step(result)

        return run

    def _copied_back(self, memory: Tensor, copy: Tensor) -> Tensor:
        def copy_back(_: Any) -> None:
            memory.copy_(copy)

        self._after.insert(0, copy_back)
        return copy

    def _plain(self, tensor: Tensor) -> Tensor:
        refuse_opaque(tensor)
        if not tensor.is_cpu:
            raise ValueError(
                f"a tensor is on {tensor.device}: torch.distributed's backend horo_lite is for "
                "CPU tensors. For GPUs, use the backend nccl, or the DistributedOptimizer of "
                "horo_lite.torch, which uses NCCL"
            )
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"a tensor's layout is {tensor.layout}: only all_reduce accepts a layout other "
                "than strided, and only sparse_coo. Call .to_dense() first"
            )
        tensor = tensor.detach()
        if tensor.is_complex():
            self.is_complex = True
            return torch.view_as_real(tensor.resolve_conj())
        return tensor


def memory_of(tensors: Sequence[Tensor], writable: bool = True) -> _native.Tensors:
    """Return the memory of contiguous tensors, of any dtype."""
    return _native.Tensors([as_bytes(x) for x in tensors], writable)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor, or a view of it as bytes if the core does not know its dtype."""
    return tensor if tensor.dtype in _KNOWN else tensor.view(torch.uint8)


def described(tensors: Sequence[Tensor]) -> str:
    """Return dtypes and numbers of elements, on which alone transfers depend."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}[{x.numel()}]" for x in tensors)


def listed(tensors: Any) -> list[Tensor]:
    """Return a tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[Tensor]]:
    """Return a list of tensors, or several, as a list of lists."""
    return [tensors] if isinstance(tensors[0], Tensor) else list(tensors)


def joined(parts: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the parts concatenated in new memory, and a view of each in it."""
    ends = list(itertools.accumulate(x.numel() for x in parts))
    whole = torch.cat([x.detach().reshape(-1) for x in parts])
    begins = [0, *ends[:-1]]
    return whole, [whole[begin:end] for begin, end in zip(begins, ends, strict=True)]


def cut(x: Tensor, sizes: Sequence[int] | None, n: int, which: str) -> list[Tensor]:
    """Return the rows of a contiguous tensor for each of n ranks."""
    if not sizes:
        if x.dim() == 0 or len(x) % n:
            raise ValueError(
                f"all_to_all: the {which}, of shape {list(x.shape)}, cannot be divided equally "
                f"among {n} ranks: pass {which}_split_sizes"
            )
        return list(x.split(len(x) // n)) if len(x) else [x] * n
    if len(sizes) != n or sum(sizes) != len(x):
        raise ValueError(
            f"all_to_all: {which}_split_sizes must be {n} numbers whose sum is {len(x)}, the "
            f"number of rows, not {list(sizes)}"
        )
    return list(x.split(list(sizes)))


def check_number(tensors: Sequence[Any], n: int, what: str) -> None:
    """Raise ValueError unless there is one tensor, or list of tensors, for each of n ranks."""
    if len(tensors) != n:
        raise ValueError(f"{what} must be {n}, one for each rank, not {len(tensors)}")


def check_alike(tensors: Sequence[Tensor], like: Tensor, what: str) -> None:
    """Raise ValueError unless the tensors for all ranks are equal to this rank's own in size."""
    for r, x in enumerate(tensors):
        if x.nbytes != like.nbytes or (x.dtype != like.dtype and not x.is_complex()):
            raise ValueError(
                f"{what} tensor for rank {r} is {described([x])}, but this rank's own is "
                f"{described([like])}: they must be the same"
            )


def is_apart(output: Tensor, parts: Sequence[Sequence[Tensor]], own: Tensor) -> bool:
    """Return whether an output may be written while parts of the inputs are still read.

    It may have the same memory as `own`, the part that it is the result of.
    """
    begin, end = _extent(output)
    for each in parts:
        for x in each:
            first, last = _extent(x)
            is_same = x is own and (first, last) == (begin, end)
            if first < end and begin < last and not (is_same and x.is_contiguous()):
                return False
    return True


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the begin and end addresses of a tensor's elements."""
    if x.layout is not torch.strided or x.numel() == 0:
        return 0, 0
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + reach * x.element_size()


def op_of(opts: Any) -> tuple[str, float]:
    """Return the name of the reduction, and the factor of each rank's contribution."""
    given = getattr(opts, "reduceOp", opts)
    if given is None:
        return "SUM", 1.0
    name = _OP_NAMES[getattr(given, "op", given)]
    return name, float(given.factor) if name == "PREMUL_SUM" else 1.0


def root_of(opts: Any) -> int:
    """Return the root's rank in the process group."""
    return int(getattr(opts, "rootRank", 0))


def timeout_of(opts: Any) -> float:
    """Return the timeout of an operation in seconds; 0 if the caller has set none."""
    timeout = getattr(opts, "timeout", None)
    return max(0.0, timeout.total_seconds()) if isinstance(timeout, timedelta) else 0.0


def is_async(opts: Any) -> bool:
    """Return whether the caller may never wait for the operation."""
    return bool(getattr(opts, "asyncOp", True))
