"""Arguments of torch's collectives: their options, and the tensors that they read and write.

What a collective reads and writes is declared once, by the `Access` of its Call; counts, dtypes,
sizes and root are checked against that here, and `memory.Staged` alone decides what must be copied,
because it is not dense or overlaps something that is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch import distributed as dist

_OP_NAMES = {op: name for name, op in dist.ReduceOp.RedOpType.__members__.items()}


class ArgumentError(ValueError, RuntimeError):
    """An invalid argument, found before the operation is submitted.

    Torch's own backends raise RuntimeError for some, ValueError for others. The texts contain
    theirs ("invalid root rank: 4"), which programs and PyTorch's tests look for.
    """


@dataclass
class Options:
    """The options of a collective: of an object of c10d's, or single arguments.

    Attributes:
        op: The name of the reduction.
        factor: The factor of each rank's contribution to it.
        root: The root's rank in the process group.
        root_tensor: The index of the tensor that a broadcast copies to the others.
        timeout_s: The timeout in seconds; 0 if the caller has set none.
        is_async: Whether the caller may never wait for the operation.
    """

    op: str = "SUM"
    factor: float = 1.0
    root: int = 0
    root_tensor: int = 0
    timeout_s: float = 0.0
    is_async: bool = True

    @classmethod
    def of(cls, given: Sequence[Any], named: Mapping[str, Any]) -> Options:
        """Return the options in the arguments that follow the tensors, in any of c10d's forms."""
        options = cls()
        if unknown := named.keys() - {"opts", "op", "root", "timeout"}:
            raise TypeError(f"unexpected keyword arguments of a collective: {sorted(unknown)}")
        for value in (*given, *named.values()):
            if isinstance(value, int):
                options.root = value
            elif isinstance(value, timedelta):
                options.timeout_s = max(0.0, value.total_seconds())
            elif isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
                options._reduce_by(value)
            elif value is not None:
                options._take(value)
        return options

    def _take(self, opts: Any) -> None:
        self.root = int(getattr(opts, "rootRank", 0))
        self.root_tensor = int(getattr(opts, "rootTensor", 0))
        self.is_async = bool(getattr(opts, "asyncOp", True))
        if isinstance(timeout := getattr(opts, "timeout", None), timedelta):
            self.timeout_s = max(0.0, timeout.total_seconds())
        if (op := getattr(opts, "reduceOp", None)) is not None:
            self._reduce_by(op)

    def _reduce_by(self, op: Any) -> None:
        self.op = _OP_NAMES[getattr(op, "op", op)]
        self.factor = float(op.factor) if self.op == "PREMUL_SUM" else 1.0


@dataclass(frozen=True)
class Access:
    """What the ranks read and write in a collective that moves tensors.

    What a rank sends to itself has the same dtypes and sizes as what it receives from itself, and
    all parts have the same dtypes.

    Attributes:
        reads_each: Whether the input has a part for each rank, and not one for all.
        writes_each: Whether the output has a part for each rank.
        read_at_root: Whether only the root has an input.
        written_at_root: Whether only the root has an output.
        is_even: Whether all parts must have the same sizes.
    """

    reads_each: bool = False
    writes_each: bool = False
    read_at_root: bool = False
    written_at_root: bool = False
    is_even: bool = False

    def check(
        self,
        what: str,
        send: Sequence[Sequence[Tensor]],
        receive: Sequence[Sequence[Tensor]],
        rank: int,
        size: int,
        root: int,
    ) -> None:
        """Raise ArgumentError unless these are a rank's input and output in operation `what`."""
        sides = (
            ("input", send, self.reads_each, self.read_at_root),
            ("output", receive, self.writes_each, self.written_at_root),
        )
        for side, parts, is_each, at_root in sides:
            expected = 0 if at_root and rank != root else size if is_each else 1
            if len(parts) != expected:
                raise ArgumentError(
                    f"{what}: Incorrect {side} list size {len(parts)}. {side.capitalize()} list "
                    f"size should be {expected}, one tensor for each rank"
                )
        own = own_part(receive, rank) or own_part(send, rank)
        for side, parts, *_ in sides:
            mine = own_part(parts, rank)
            for r, each in enumerate(parts):
                check_alike(what, f"{side} for rank {r}", each, own, self.is_even or each is mine)


def check_alike(
    what: str, which: str, tensors: Sequence[Tensor], own: Sequence[Tensor], in_size: bool = True
) -> None:
    """Raise ArgumentError unless tensors have the dtypes, layouts and perhaps sizes of `own`."""
    if len(tensors) != len(own):
        raise ArgumentError(f"{what}: the {which} has {len(tensors)} tensors instead of {len(own)}")
    for i, (x, mine) in enumerate(zip(tensors, own, strict=True)):
        reason = (
            "type"
            if x.dtype != mine.dtype
            else "layout"
            if x.layout != mine.layout
            else "size"
            if in_size and x.numel() != mine.numel()
            else ""
        )
        if reason:
            raise ArgumentError(
                f"{what}: invalid tensor {reason} at index {i} of the {which}: it is "
                f"{described([x])}, {x.layout}, and not {described([mine])}, {mine.layout}, as "
                "this rank's own"
            )


def check_root(what: str, root: int, size: int, which: str = "root") -> int:
    """Return the rank of a root or peer; raise ArgumentError if there is no such rank."""
    if not 0 <= root < size:
        raise ArgumentError(
            f"{what}: invalid {which} rank: {root}. The process group has {size} ranks, from 0"
        )
    return root


def only(what: str, side: str, tensors: Any) -> Tensor:
    """Return the only tensor in a list, or the tensor itself."""
    tensors = listed(tensors)
    if len(tensors) != 1:
        which = f"{side} tensor list".lstrip()
        raise ArgumentError(
            f"{what}: requires a single-element {which}, and not one of {len(tensors)}"
        )
    return tensors[0]


def only_list(what: str, side: str, lists: Any, *, is_used: bool = True) -> list[Tensor]:
    """Return the only list of tensors, or the list itself; ranks that do not use it have none."""
    lists = nested(lists)
    if not is_used:
        if any(lists):
            raise ArgumentError(f"{what}: requires empty {side} on non-root ranks")
        return []
    if len(lists) != 1:
        raise ArgumentError(
            f"{what}: requires a single-element {side} list, with one list of tensors, and not "
            f"{len(lists)}"
        )
    return list(lists[0])


def some(what: str, tensors: Any) -> list[Tensor]:
    """Return a tensor, or several, as a list that is not empty."""
    tensors = listed(tensors)
    if not tensors:
        raise ArgumentError(f"{what}: requires non-empty tensor list")
    return tensors


def listed(tensors: Any) -> list[Tensor]:
    """Return a tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def nested(tensors: Any) -> list[list[Tensor]]:
    """Return a list of tensors, or several, as a list of lists."""
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else list(tensors)


def own_part(parts: Sequence[Sequence[Tensor]], rank: int) -> Sequence[Tensor]:
    """Return a rank's own part of those for each rank, or the one for all ranks."""
    return parts[rank if len(parts) > 1 else 0] if parts else ()


def row_sizes(x: Tensor, sizes: Sequence[int] | None, n: int, what: str, side: str) -> list[int]:
    """Return the numbers of elements in the rows of a tensor for each of n ranks."""
    if not sizes:
        if x.dim() == 0 or len(x) % n:
            raise ArgumentError(
                f"{what}: the {side}, of shape {list(x.shape)}, cannot be divided equally among "
                f"{n} ranks: pass {side}_split_sizes"
            )
        return [x.numel() // n] * n
    if len(sizes) != n or sum(sizes) != len(x) or min(sizes) < 0:
        raise ArgumentError(
            f"{what}: {side}_split_sizes must be {n} numbers whose sum is {len(x)}, the number "
            f"of rows, not {list(sizes)}"
        )
    row = x.numel() // len(x) if len(x) else 0
    return [row * n_rows for n_rows in sizes]


def described(tensors: Sequence[Tensor]) -> str:
    """Return dtypes and numbers of elements, on which alone transfers depend."""
    return ", ".join(f"{str(x.dtype).removeprefix('torch.')}[{x.numel()}]" for x in tensors)
