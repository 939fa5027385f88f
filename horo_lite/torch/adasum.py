"""Adasum: sums of gradients that shrink where the gradients point the same way.

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum where they are
orthogonal, their mean where they are equal. Ranks combine in pairs, pairs in fours, and so on, as
in Maleki et al., "Scaling Distributed Training with Adaptive Summation" (2020); each tensor by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from horo_lite import _native, adapters
from horo_lite.adapters.object import NO_ORDER
from horo_lite.collectives.calls import Call, Finish, Part
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.participation import ArraySpec
from horo_lite.transports.agreement import agree, exchange_bytes, needs_all

if TYPE_CHECKING:
    from horo_lite.transports import Transport


def adasum_(group: Group, tensors: Sequence[torch.Tensor], names: Sequence[str] = ()) -> None:
    """Each tensor holds, in place, the Adasum of what it is on all ranks of the group.

    Called by every rank with tensors of the same floating dtypes and shapes, dense and on one
    device. `names`, if given, are compared, and messages use them.
    """
    label = f"{names[0]} and {len(names) - 1} more" if names else f"{len(tensors)} tensors"
    adasum_async_(group, tensors, names, label).wait()


def adasum_async_(
    group: Group,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    label: str,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    kind: str = "allreduce",
) -> Handle:
    """As `adasum_`, when the handle has been waited for; matched by `label`.

    Takes two copies of all tensors, in float32, or in float64 where one of them is.
    """
    if group.size & (group.size - 1):
        raise ValueError(
            f"Adasum combines ranks in pairs, so their number must be a power of two, not "
            f"{group.size}: start as many, use a ProcessSet, or op=hvd.Average"
        )
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"Adasum is for floating point tensors, not {tensor.dtype}")
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    dtype = torch.float64 if wide else torch.float32
    flat = [tensor.detach().reshape(-1).to(dtype) for tensor in tensors]
    mine = torch.cat(flat) * prescale_factor if flat else torch.zeros(0, dtype=dtype)
    specs = tuple((str(x.dtype)[6:], tuple(x.shape)) for x in tensors)
    call = AdasumReduce(label, specs, tuple(names), prescale_factor, postscale_factor)

    def write(_: None) -> None:
        begin = 0
        for tensor, end in zip(tensors, call.ends(), strict=True):
            result = mine[begin:end] * postscale_factor
            tensor.detach().copy_(result.reshape(tensor.shape))
            begin = end

    memory = group.memory([mine, torch.empty_like(mine)], asynchronous=True)
    return group.submit(call, Part(memory, label=f"{kind} '{label}'"), write)


@dataclass(frozen=True)
class AdasumReduce(Call[None]):
    """The first of two arrays holds, in place, the Adasum over all ranks.

    Attributes:
        specs: The dtypes and shapes of the tensors that lie in it, one after the other.
        names: Their names, compared, and used in messages.
        prescale_factor: What they have been multiplied by.
        postscale_factor: What the caller multiplies the result by.
    """

    specs: tuple[ArraySpec, ...] = ()
    names: tuple[str, ...] = ()
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0

    kind = "allreduce"

    @property
    def tensor_names(self) -> Sequence[str]:
        return self.names

    def ends(self) -> list[int]:
        """Where each tensor ends in the array."""
        return list(accumulate(prod(shape) for _, shape in self.specs))

    def run(self, part: Part, transport: Transport) -> Finish[None]:
        contract = [
            part.label,
            f"Adasum, prescale_factor {self.prescale_factor}, "
            f"postscale_factor {self.postscale_factor}",
            *(
                f"tensor {repr(self.names[i]) if self.names else i}: {dtype}{list(shape)}"
                for i, (dtype, shape) in enumerate(self.specs)
            ),
        ]
        agree(
            transport,
            part.label,
            contract,
            lambda: "\n".join(contract),
            participation=lambda joined: self.participation(part, transport.ranks, joined),
        )
        memory = part.memory
        mine, theirs = memory.arrays
        memory.begin()
        # What happens on a GPU belongs to the stream in which its arrays travel.
        queue = 0 if memory.stream is None else memory.stream.queue.stream
        with adapters.adapter_of(mine).on_stream(mine, queue) if queue else nullcontext():
            _combine(transport, mine, theirs, self.ends())
        return memory.end

    def participation(
        self, part: Part, ranks: Sequence[int], joined: Sequence[int]
    ) -> tuple[float, bytes]:
        if part.memory.stream is not None:
            return needs_all(part.label)(joined)
        return self.stand_in(part, joined, is_wide=part.memory.tensors.itemsize(0) == 8)

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], asynchronous: bool, own: dict[str, Any]
    ) -> Part:
        dtype = torch.float64 if own["is_wide"] else torch.float32
        n_elements = sum(prod(shape) for _, shape in self.specs)
        nothing = [torch.zeros(n_elements, dtype=dtype) for _ in range(2)]
        return Part(group.memory(nothing, asynchronous=asynchronous))


def _combine(
    transport: Transport, mine: torch.Tensor, theirs: torch.Tensor, ends: Sequence[int]
) -> None:
    """`mine` holds the Adasum of all ranks'; `ends` are where the tensors in it end.

    Halves go to the partner and back (recursive halving), so that every number is computed by one
    rank and is the same on all.
    """
    rank, size = transport.rank, transport.size
    begin, end = 0, len(mine)
    distance = 1
    while distance < size:
        partner = rank ^ distance
        middle = begin + (end - begin + 1) // 2
        first, second = (begin, middle), (middle, end)
        keep, give = (first, second) if rank < partner else (second, first)
        _swap(transport, partner, mine, give, theirs, keep)
        begin, end = keep
        lower, upper = (mine, theirs) if rank < partner else (theirs, mine)
        spans = _spans(ends, begin, end)
        dots = torch.zeros(len(ends), 3, dtype=torch.float64, device=mine.device)
        for i, at in spans:
            a, b = lower[at].double(), upper[at].double()
            dots[i] = torch.stack([a.dot(b), a.dot(a), b.dot(b)])
        # The tensors lie on all ranks that have been combined so far.
        block = rank // (2 * distance) * 2 * distance
        total = _sum_of(transport, dots, range(block, block + 2 * distance))
        for i, at in spans:
            dot, aa, bb = total[i].tolist()
            a, b = lower[at], upper[at]
            factor_a = 1.0 - dot / (2.0 * aa) if aa else 1.0
            factor_b = 1.0 - dot / (2.0 * bb) if bb else 1.0
            mine[at] = a * factor_a + b * factor_b
        distance *= 2
    while distance > 1:
        distance //= 2
        partner = rank ^ distance
        begin_, end_ = _part(partner, distance, size, len(mine))
        _swap(transport, partner, mine, (begin, end), mine, (begin_, end_))
        begin, end = min(begin, begin_), max(end, end_)


def _part(rank: int, distance: int, size: int, n: int) -> tuple[int, int]:
    """What `rank` has after the halvings up to that distance, and after the joins down to it."""
    begin, end = 0, n
    step = 1
    while step <= distance:
        middle = begin + (end - begin + 1) // 2
        begin, end = (begin, middle) if not rank & step else (middle, end)
        step *= 2
    return begin, end


def _spans(ends: Sequence[int], begin: int, end: int) -> list[tuple[int, slice]]:
    """Which tensors lie between `begin` and `end`, and where."""
    spans = []
    start = 0
    for i, stop in enumerate(ends):
        low, high = max(start, begin), min(stop, end)
        if low < high:
            spans.append((i, slice(low, high)))
        start = stop
    return spans


def _swap(
    transport: Transport,
    partner: int,
    source: torch.Tensor,
    give: tuple[int, int],
    target: torch.Tensor,
    take: tuple[int, int],
) -> None:
    """`take` of `target` holds what the partner gave, and the partner has `give` of `source`."""
    rank, size = transport.rank, transport.size
    headers = transport.agree(0, give[1] - give[0], label="a swap of Adasum")
    n_bytes = [[0] * size for _ in range(size)]
    for other, header in enumerate(headers):
        n_bytes[other][other ^ rank ^ partner] = header.count * source.element_size()
    outgoing = [source[slice(*give) if r == partner else slice(0, 0)] for r in range(size)]
    incoming = [target[slice(*take) if r == partner else slice(0, 0)] for r in range(size)]
    transport.alltoall(
        [_native.Tensors([x], stream=NO_ORDER) for x in outgoing],
        [_native.Tensors([x], stream=NO_ORDER) for x in incoming],
        n_bytes,
    )


def _sum_of(transport: Transport, dots: torch.Tensor, ranks: range) -> torch.Tensor:
    """The sum, in rank order, of what those ranks have."""
    data = dots.cpu().numpy().tobytes()
    transport.agree(0, label="dot products of Adasum")
    everyone = exchange_bytes(transport, data, [len(data)] * transport.size)
    parts = [np.frombuffer(one, np.float64) for one in everyone]
    total = np.zeros(len(parts[0]))
    for rank in ranks:
        total += parts[rank]
    return torch.from_numpy(total.reshape(tuple(dots.shape)))
