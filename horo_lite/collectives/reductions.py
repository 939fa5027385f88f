"""All-reduces, and the operations based on them."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from horo_lite import _native, arguments
from horo_lite.collectives import adasum, arithmetic
from horo_lite.collectives.arrays import check_apart, described
from horo_lite.collectives.calls import Call, Finish, Part
from horo_lite.collectives.compression import COMPRESSORS, Compression, Compressor
from horo_lite.collectives.participation import ArraySpec, neutral
from horo_lite.collectives.shared_memory import memory_of
from horo_lite.errors import printable
from horo_lite.recording import recorder
from horo_lite.transports.agreement import StandIn, digest_of, needs_all
from horo_lite.transports.interface import Division, Header, Reduction

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.transports import QueuedReductions, Transport
    from horo_lite.transports.watchdog import Watchdog


class Op(enum.Enum):
    """How the ranks' values are combined."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"


class AdasumOp(enum.Enum):
    """Horovod's op Adasum, which is not computed by the core: see `horo_lite.collectives.adasum`.

    The APIs with Horovod's names offer it.
    """

    Adasum = "adasum"


AnyOp: TypeAlias = Op | AdasumOp
Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product
Adasum = AdasumOp.Adasum


@dataclass(frozen=True)
class AllReduce(Call[bool]):
    """Reduce every array over all ranks, in place.

    With op Average and weights (given on every rank or on none), each rank's contribution is
    multiplied by its weight, and the sum is divided by the sum of all weights; a rank of weight 0
    contributes nothing, whatever its arrays hold. The result is whether anything was reduced: see
    `Exchange`.

    Attributes:
        op: How the ranks' values are combined.
        compression: How the arrays are represented while they travel.
        prescale_factor: Multiplies every rank's contribution.
        postscale_factor: Multiplies the result before it is rounded.
        names: The arrays' names, compared, and used in messages.
    """

    op: AnyOp = Op.Average
    compression: Compressor = Compression.none
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    names: Sequence[str] = ()

    kind = "allreduce"

    def __post_init__(self) -> None:
        super().__post_init__()
        op, compression = cast("tuple[object, object]", (self.op, self.compression))
        if not isinstance(op, AnyOp):
            known = ", ".join(f"hvd.{one.name}" for one in Op)
            raise ValueError(f"op must be one of {known}, not {op!r}")
        if not isinstance(compression, Compressor):
            raise ValueError(f"compression must be {COMPRESSORS}, not {compression!r}")
        if compression.is_for_steps:
            raise ValueError(
                f"compression {compression.name} is for the gradients of an optimizer's steps that "
                "are changed in place: an all-reduce of its own cannot use it"
            )
        if op is Adasum and compression.wire != "none":
            raise ValueError("op=hvd.Adasum does not compress: leave compression out")
        for name, given in (
            ("prescale_factor", self.prescale_factor),
            ("postscale_factor", self.postscale_factor),
        ):
            factor = arguments.factor(name, given)
            if factor is not given:
                object.__setattr__(self, name, factor)

    @property
    def tensor_names(self) -> Sequence[str]:
        return self.names

    def prepare(self, part: Part) -> None:
        memory = part.memory
        if part.weight is not None:
            part.weight = checked_weight(part.weight, self.op)
        check_apart(memory, self.names, part.label)
        # Arrays in shared memory are reduced there, if they need no conversion.
        as_they_are = self.compression.wire == "none" and self.prescale_factor == 1
        if (
            part.shared is not None
            and as_they_are
            and part.weight is None
            and memory.stream is None
        ):
            part.offsets = part.shared.offsets(memory.tensors)
        self._hook(part, type(self.compression).prepare, Compressor.prepare)
        self.compression.attach(memory, self.names)

    def check(self, part: Part) -> None:
        arithmetic.check(
            part.memory.tensors,
            self.op.value,
            self.prescale_factor,
            self.postscale_factor,
            part.weight is not None,
            label=part.label,
            names=self.names,
        )

    def contract(self, part: Part) -> object:
        return (
            part.label,
            self.op.value,
            self.compression.name,
            self.compression.wire,
            self.prescale_factor,
            self.postscale_factor,
            part.memory.tensors.signature,
            _digest_of(tuple(self.names)),
            part.weight is not None,
            _location(part),
        )

    def describe(self, part: Part) -> str:
        return self._text(self._options(part), part.memory.describe(self.names))

    def _text(self, options: str, arrays: Sequence[str]) -> str:
        return "\n".join([options, *arrays])

    def count(self, part: Part) -> int:
        return part.memory.tensors.layout

    def queue(self, part: Part, transport: Transport) -> Finish[bool] | None:
        stream = part.memory.stream
        watchdog = None if stream is None else stream.watchdog
        queued = transport.queued
        if watchdog is None or queued is None or self.op is Adasum:
            return None
        reduction = Reduction(
            self._arithmetic(part),
            self.compression.wire,
            self.prescale_factor,
            self.postscale_factor,
        )
        if not queued.can_reduce(part.memory.tensors, reduction, part.weight):
            return None
        division = self._division(part, transport.size)
        is_queued = self._queue(part, queued, reduction, division, watchdog)
        return lambda: is_queued and self._complete(part)

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[bool]:
        memory = part.memory
        if any(header.count != headers[0].count for header in headers):
            memory.use_c_order()
            part.offsets = None
        try:
            reduction = self._reduction(part, [header.weight for header in headers])
        except ValueError as error:  # on all ranks; raised when this call no longer counts as begun
            return partial(_raise, error)
        memory.begin(transport.reads_sources and self.op is not Adasum)
        self._reduce(part, transport, reduction)
        return lambda: self._complete(part)

    def submit(
        self,
        part: Part,
        engine: _native.Engine,
        transport: Transport,
        record: _native.Operation | None,
    ) -> tuple[_native.Job, Finish[bool]]:
        """Have the engine run it without Python, if it can."""
        if not self._is_native(part, transport):
            return super().submit(part, engine, transport, record)
        in_place = part.offsets is not None and part.shared is not None
        job = engine.submit_allreduce(
            transport.members,
            part.label,
            digest_of(self.contract(part)),
            lambda headers: self._run_matched(part, transport, headers),
            part.memory.tensors,
            self._arithmetic(part),
            self.compression.wire,
            self.prescale_factor,
            self.postscale_factor,
            self.count(part),
            part.own_weight,
            lambda: printable(self.describe(part)),
            lambda joined: self.participation(part, transport.ranks, joined),
            record,
            part.shared.distances if in_place and part.shared is not None else (),
            self.changes(part),
        )
        return job, lambda: self._complete(part)

    def _is_native(self, part: Part, transport: Transport) -> bool:
        """Return whether the core alone can run it; else Python code raises errors, too."""
        if part.memory.stream is not None or self._division(part, transport.size):
            return False
        if self.op is Adasum:
            return False
        return not self._is_refused(part)

    def _is_refused(self, part: Part) -> bool:
        try:
            self.check(part)
        except ValueError:
            return True
        return False

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        scaled = self.op.value in ("min", "max", "product") and self.prescale_factor != 1.0
        if scaled or part.memory.stream is not None:
            return needs_all(part.label)(joined)
        weighted = part.weight is not None
        # Without hooks: a compressor's state is this rank's own, and zeros must remain zeros.
        bare = Compressor(str(self.compression.name), self.compression.wire)
        return replace(self, compression=bare).stand_in(
            part, joined, 0.0 if weighted else 1.0, weighted=weighted, location=_location(part)
        )

    def part_that_changes_nothing(
        self, group: Group, specs: Sequence[ArraySpec], own: dict[str, Any]
    ) -> Part:
        shared = None if own["location"] is None else memory_of(group, own["location"][0])
        if shared is None:
            nothing = [neutral(spec, self.op.value) for spec in specs]
        else:  # the contents of shared memory are this rank's part
            nothing = [
                shared.arrays[offset] if 0 not in spec[1] else neutral(spec)
                for offset, spec in zip(own["location"][1], specs, strict=True)
            ]
            for array in nothing:
                array[...] = 0
        return Part(
            group.memory(nothing),
            weight=0.0 if own["weighted"] else None,
            shared=shared,
        )

    def _options(self, part: Part, *more: str) -> str:
        """Return the description without the arrays."""
        location = _location(part)
        options = [
            f"{self.kind}, op {self.op.name}",
            f"compression {self.compression.name}",
            f"prescale_factor {self.prescale_factor}, postscale_factor {self.postscale_factor}",
            f"weighted: {part.weight is not None}",
            "shared memory {} at {}".format(*location) if location else "memory of this rank",
            *more,
        ]
        return "\n".join([part.label, *options])

    def _queue(
        self,
        part: Part,
        queued: QueuedReductions,
        reduction: Reduction,
        division: Division,
        watchdog: Watchdog,
    ) -> bool:
        """Queue the work on the GPU; whether the ranks agree is checked concurrently."""
        tensors = part.memory.tensors
        asked = self._options(part, _order(tensors.layout))
        # If this rank's host is ahead, notices wait for other hosts: they must not keep arrays.
        outline, names = tensors.outline(), self.names

        def describe() -> str:
            return self._text(asked, described(outline, names))

        digest = digest_of((self.contract(part), tensors.layout))
        notice = watchdog.announce(part.label, digest, describe, follows=part.follows)
        if not part.follows:
            watchdog.wait(notice)
            if notice.nobody_follows:
                return False
        recorder.begin()
        part.memory.begin()
        queued.reduce(tensors, reduction, part.weight, division)
        return True

    def _reduction(self, part: Part, weights: Sequence[float]) -> Reduction:
        if self.op is Adasum:
            adasum.check_size(len(weights))
            return Reduction(self.op.value)
        return Reduction.of(
            self._arithmetic(part),
            self.compression.wire,
            self.prescale_factor,
            self.postscale_factor,
            weights,
        )

    def _reduce(self, part: Part, transport: Transport, reduction: Reduction) -> None:
        tensors = part.memory.tensors
        division = self._division(part, transport.size)
        if self.op is Adasum:
            adasum.reduce(part.memory, transport, self.prescale_factor, self.postscale_factor)
        elif part.offsets is not None and part.shared is not None:
            transport.reduce_in_place(tensors, part.shared, reduction, division)
        else:
            transport.allreduce(tensors, reduction, division)

    def _division(self, part: Part, size: int) -> Division:
        """Return what each of `size` ranks receives of the results; empty if all of them."""
        sees_results = type(self.compression).restore is not Compressor.restore
        return () if sees_results else self.needed(part.memory.tensors, size)

    def needed(self, tensors: _native.Tensors, size: int) -> Division:
        """Return what each of `size` ranks needs of the results; empty if all of them."""
        return ()

    def _complete(self, part: Part) -> bool:
        part.memory.end()
        self._hook(part, type(self.compression).restore, Compressor.restore)
        part.memory.write_back()
        return True

    def _arithmetic(self, part: Part) -> str:
        """Return the core's name of the op."""
        return self.op.value if part.weight is None else f"weighted {self.op.value}"

    def _hook(self, part: Part, method: Callable[..., None], default: Callable[..., None]) -> None:
        if method is not default:
            for i, x in enumerate(part.memory.seen()):
                name = self.names[i] if self.names else f"{part.label}[{i}]"
                method(self.compression, name, x)


@dataclass(frozen=True)
class Exchange(AllReduce):
    """All-reduce an optimizer's gradients, which the call's name identifies.

    If `Group.compares_later`, a rank whose Part has `follows=False` waits to learn what the others
    do. If all ranks do so, nothing is exchanged, and the result is False.

    Attributes:
        division: What each rank needs of the results; the rest is undefined afterwards. Empty: all.
    """

    division: Division = ()

    kind = "exchange"

    def prepare(self, part: Part) -> None:
        if self.division:
            part.memory.use_c_order()
        super().prepare(part)

    def contract(self, part: Part) -> object:
        contract = super().contract(part)
        if not self.division:
            return contract
        return contract, _digest_of(tuple(map(tuple, self.division)))

    def _text(self, options: str, arrays: Sequence[str]) -> str:
        text = super()._text(options, arrays)
        return f"{text}\ndivided: {self.division}" if self.division else text

    def needed(self, tensors: _native.Tensors, size: int) -> Division:
        return self.division

    def changes(self, part: Part) -> _native.Tensors | None:
        return None  # they have already been compared with each other


@dataclass(frozen=True)
class ReduceScatter(AllReduce):
    """Reduce every array; each rank receives its `rows_of` it, and the other rows are undefined.

    Only these rows travel, unless the compression has a hook that must see whole results. On CPUs,
    the blocks that fp16 scales begin at each rank's first row.
    """

    kind = "reducescatter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.op is Adasum:
            raise ValueError("reducescatter takes op=Average, Sum, Min, Max or Product, not Adasum")

    def prepare(self, part: Part) -> None:
        part.memory.use_c_order()
        super().prepare(part)

    def participation(self, part: Part, ranks: Sequence[int], joined: Sequence[int]) -> StandIn:
        return needs_all(part.label)(joined)

    def needed(self, tensors: _native.Tensors, size: int) -> Division:
        shapes = [tensors.shape(i) for i in range(len(tensors))]
        n_each = [math.prod(shape[1:]) for shape in shapes]  # elements of a row
        of_ranks = [[rows_of(shape[0], size, rank) for shape in shapes] for rank in range(size)]
        return [
            [(begin * n, end * n) for (begin, end), n in zip(rows, n_each, strict=True)]
            for rows in of_ranks
        ]


def rows_of(n_rows: int, size: int, rank: int) -> tuple[int, int]:
    """Return where the rows of a rank begin and end, if `size` ranks divide `n_rows` rows."""
    rows, more = divmod(n_rows, size)
    begin = rank * rows + min(rank, more)
    return begin, begin + rows + (rank < more)


def checked_weight(weight: Any, op: AnyOp) -> float:
    """Return `weight` as a float; raise ValueError if it is invalid or `op` takes no weight."""
    try:
        samples = math.nan if isinstance(weight, str) else float(weight)
    except (TypeError, ValueError):
        samples = math.nan
    if not 0 <= samples < math.inf:
        raise ValueError(f"weight must be a number of samples (0 or more), not {weight!r}")
    if op is not Average:
        raise ValueError(f"a weight needs op=Average; with op={op.name} it has no meaning")
    return samples


def _raise(error: Exception) -> NoReturn:
    raise error


def _location(part: Part) -> tuple[int, tuple[int, ...]] | None:
    """Return the shared memory's number and the offsets in it; None for a rank's own memory."""
    if part.offsets is None or part.shared is None:
        return None
    return part.shared.number, part.offsets


def _order(layout: int) -> str:
    return f"memory in {'C order' if layout == 0 else f'another order than C ({layout:x})'}"


@lru_cache(maxsize=64)
def _digest_of(what: tuple[object, ...]) -> int:
    """Return a digest, cached because an optimizer has the same names and parts in every step."""
    return digest_of(what)
