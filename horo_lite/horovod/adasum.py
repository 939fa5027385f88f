"""Adasum: sums of gradients that shrink the more the gradients point the same way.

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum if they are
orthogonal, their mean if they are equal. Ranks combine in pairs, pairs in fours, and so on, each
tensor separately, as in Maleki et al., "Scaling Distributed Training with Adaptive Summation"
(2020).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import _native, adapters
from horo_lite.adapters.object import NO_ORDER
from horo_lite.collectives import arithmetic
from horo_lite.collectives.calls import Call, Finish, Part
from horo_lite.collectives.group import Group
from horo_lite.collectives.participation import ArraySpec
from horo_lite.transports.agreement import agree, exchange_bytes, needs_all

if TYPE_CHECKING:
    from horo_lite.transports import Transport

Array = Any  # a NumPy array, or a tensor in a GPU's memory

SMALLEST = -1022
"""The smallest scale (an exponent) whose inverse is also a float64."""


def adasum_(
    group: Group,
    arrays: Sequence[np.ndarray[Any, Any]],
    names: Sequence[str] = (),
    label: str = "",
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> None:
    """Replace each array, in place, by its Adasum over all ranks of the group.

    Every rank calls it, in the same order as its other direct calls, with arrays of the same
    floating point dtypes and shapes. Needs memory for two copies of all arrays, in float64 if one
    of them is float64, otherwise in float32.

    Args:
        group: The ranks, a power of two.
        arrays: Writable NumPy arrays.
        names: The arrays' names, if given; they are compared, and used in messages.
        label: For messages.
        prescale_factor: Multiplies this rank's contribution.
        postscale_factor: Multiplies the result.
    """
    specs = tuple((x.dtype.name, x.shape) for x in arrays)
    check_adasum(group, [dtype for dtype, _ in specs], prescale_factor, postscale_factor)
    dtype = np.float64 if any(name == "float64" for name, _ in specs) else np.float32
    flat = [x.reshape(-1).astype(dtype) for x in arrays]
    mine: np.ndarray[Any, Any] = np.concatenate(flat) if arrays else np.zeros(0, dtype)
    mine *= prescale_factor
    label = label or f"{len(arrays)} tensors"
    call = AdasumReduce(label, specs, tuple(names), prescale_factor, postscale_factor)
    memory = group.memory([mine, np.empty_like(mine)])
    group.run(call, Part(memory, label=f"allreduce '{label}'"))
    begin = 0
    for x, end in zip(arrays, call.ends(), strict=True):
        x[...] = (mine[begin:end] * postscale_factor).reshape(x.shape)
        begin = end


def check_adasum(
    group: Group, dtypes: Sequence[str], prescale_factor: float = 1.0, postscale_factor: float = 1.0
) -> None:
    """Raise ValueError if there is no Adasum for these ranks, dtypes and factors."""
    if group.size & (group.size - 1):
        raise ValueError(
            f"Adasum combines ranks in pairs, so their number must be a power of two, not "
            f"{group.size}: change the number of ranks, use a ProcessSet, or op=hvd.Average"
        )
    for dtype in dtypes:
        if reason := arithmetic.refusal(dtype, "adasum", prescale_factor, postscale_factor):
            raise ValueError(f"{reason} (a tensor of {dtype})")


class GroupView:
    """Stands in for a group in a reducer, to exchange in another way.

    It compares equal to the group, so that all of the group's optimizers are counted together.
    """

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group(), name)

    def __hash__(self) -> int:
        return hash(self.group())

    def __eq__(self, other: object) -> bool:
        return self.group() is (other.group() if isinstance(other, GroupView) else other)

    def group(self) -> Group:
        group = self._group()
        assert group is not None
        return group

    def compares_later(self, gpu: int | None) -> bool:
        return False


class AdasumView(GroupView):
    """Makes exchanges of NumPy arrays Adasums."""

    def exchange(self, arrays: Sequence[Any], **options: Any) -> bool:
        if options["weight"] is not None:
            raise ValueError("sample weights apply to averages only, not to op=Adasum")
        adasum_(self.group(), arrays, options["names"], options["label"])
        return True


@dataclass(frozen=True)
class AdasumReduce(Call[None]):
    """Replace the first of two arrays, in place, by the Adasum over all ranks.

    Attributes:
        specs: The dtypes and shapes of the tensors that the array contains, one after the other.
        names: Their names, compared, and used in messages.
        prescale_factor: By what they have been multiplied.
        postscale_factor: By what the caller multiplies the result.
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
        """Return where each tensor ends in the array."""
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
        # On a GPU, the arithmetic must run in the stream in which its arrays travel.
        queue = 0 if memory.stream is None else memory.stream.queue.stream
        stream = adapters.adapter_of(mine).on_stream(mine, queue) if queue else nullcontext()
        with stream, np.errstate(over="ignore", invalid="ignore"):  # loss scalers see them
            _combine(transport, mine, theirs, self, memory.tensors.itemsize(0))
        return memory.end

    def dots(self, a: Array, b: Array, spans: Sequence[slice]) -> np.ndarray[Any, Any]:
        """Return, for each span, a·b, a·a and b·b, in float64, and the scales p and q.

        The products are of a/2**p and b/2**q, so that squares of float64 numbers neither overflow
        nor underflow.
        """
        result = np.empty((len(spans), 5))
        for i, at in enumerate(spans):
            x, y = self.wide(a[at]), self.wide(b[at])
            p, q = (_scale(v) if a.itemsize == 8 else 0 for v in (x, y))
            x, y = x * 2.0**-p, y * 2.0**-q
            result[i] = x.dot(y), x.dot(x), y.dot(y), p, q
        return result

    def wide(self, x: Array) -> Array:
        """Return `x` in float64."""
        return np.asarray(x, np.float64)

    def participation(
        self, part: Part, ranks: Sequence[int], joined: Sequence[int]
    ) -> tuple[float, bytes]:
        if part.memory.stream is not None:
            return needs_all(part.label)(joined)
        return self.stand_in(part, joined, is_wide=part.memory.tensors.itemsize(0) == 8)

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], asynchronous: bool, own: dict[str, Any]
    ) -> Part:
        dtype = np.float64 if own["is_wide"] else np.float32
        n_elements = sum(prod(shape) for _, shape in self.specs)
        nothing = [np.zeros(n_elements, dtype) for _ in range(2)]
        return Part(group.memory(nothing, asynchronous=asynchronous))


def _combine(
    transport: Transport, mine: Array, theirs: Array, call: AdasumReduce, itemsize: int
) -> None:
    """Replace `mine` by the Adasum of all ranks' arrays.

    Halves go to the partner and back (recursive halving), so each number is computed by one rank
    only, and is the same on all.
    """
    rank, size = transport.rank, transport.size
    ends = call.ends()
    begin, end = 0, len(mine)
    distance = 1
    while distance < size:
        partner = rank ^ distance
        middle = begin + (end - begin + 1) // 2
        first, second = (begin, middle), (middle, end)
        keep, give = (first, second) if rank < partner else (second, first)
        _swap(transport, partner, itemsize, mine, give, theirs, keep)
        begin, end = keep
        lower, upper = (mine, theirs) if rank < partner else (theirs, mine)
        spans = _spans(ends, begin, end)
        dots = np.tile([0.0, 0.0, 0.0, SMALLEST, SMALLEST], (len(ends), 1))
        dots[[i for i, _ in spans]] = call.dots(lower, upper, [at for _, at in spans])
        # The tensors are spread over all ranks that have been combined so far.
        block = rank // (2 * distance) * 2 * distance
        total = _sum_of(transport, dots, range(block, block + 2 * distance))
        for i, at in spans:
            dot, aa, bb, p, q = total[i].tolist()
            # In float64: the factor of a tensor much smaller than its peer may exceed float32.
            a, b = call.wide(lower[at]), call.wide(upper[at])
            a_less = a * 2.0**-p * (dot / (2.0 * aa) * 2.0**q) if aa else 0.0
            b_less = b * 2.0**-q * (dot / (2.0 * bb) * 2.0**p) if bb else 0.0
            mine[at] = (a - a_less) + (b - b_less)
        distance *= 2
    while distance > 1:
        distance //= 2
        partner = rank ^ distance
        begin_, end_ = _part(partner, distance, size, len(mine))
        _swap(transport, partner, itemsize, mine, (begin, end), mine, (begin_, end_))
        begin, end = min(begin, begin_), max(end, end_)


def _part(rank: int, distance: int, size: int, n: int) -> tuple[int, int]:
    """Return the range that `rank` holds after halving up to `distance`, or joining down to it."""
    begin, end = 0, n
    step = 1
    while step <= distance:
        middle = begin + (end - begin + 1) // 2
        begin, end = (begin, middle) if not rank & step else (middle, end)
        step *= 2
    return begin, end


def _spans(ends: Sequence[int], begin: int, end: int) -> list[tuple[int, slice]]:
    """Return which tensors are between `begin` and `end`, and where."""
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
    itemsize: int,
    source: Array,
    give: tuple[int, int],
    target: Array,
    take: tuple[int, int],
) -> None:
    """Send `give` of `source` to the partner, and receive its part into `take` of `target`."""
    rank, size = transport.rank, transport.size
    headers = transport.agree(0, give[1] - give[0], label="Adasum swap")
    n_bytes = [[0] * size for _ in range(size)]
    for other, header in enumerate(headers):
        n_bytes[other][other ^ rank ^ partner] = header.count * itemsize
    outgoing = [source[slice(*give) if r == partner else slice(0, 0)] for r in range(size)]
    incoming = [target[slice(*take) if r == partner else slice(0, 0)] for r in range(size)]
    transport.alltoall(
        [_native.Tensors([x], stream=NO_ORDER) for x in outgoing],
        [_native.Tensors([x], stream=NO_ORDER) for x in incoming],
        n_bytes,
    )


def _sum_of(transport: Transport, dots: np.ndarray[Any, Any], ranks: range) -> np.ndarray[Any, Any]:
    """Return the sum of the ranks' dot products, in rank order, at the largest of their scales."""
    data = dots.tobytes()
    transport.agree(0, label="Adasum dot products")
    everyone = exchange_bytes(transport, data, [len(data)] * transport.size)
    each = [np.frombuffer(everyone[rank], np.float64).reshape(dots.shape) for rank in ranks]
    scales = np.max([one[:, 3:] for one in each], axis=0)
    total = np.zeros((len(dots), 3))
    for one in each:
        p, q = (one[:, 3:] - scales).astype(int).T
        total += np.ldexp(one[:, :3], np.stack([p + q, 2 * p, 2 * q], axis=1))
    return np.concatenate([total, scales], axis=1)


def _scale(x: np.ndarray[Any, Any]) -> int:
    """Return the exponent of the largest magnitude."""
    greatest = float(np.abs(x).max())
    return max(math.frexp(greatest)[1] - 1, SMALLEST) if greatest else SMALLEST
