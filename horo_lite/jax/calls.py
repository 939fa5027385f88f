"""The operations between ranks that can be used inside jit: shapes, derivatives, execution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from horo_lite import ops
from horo_lite.adapters.jax import ADAPTER, MEMORY
from horo_lite.collectives.arrays import Memory
from horo_lite.collectives.calls import AllGatherInPlace, Part
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import AllReduce, Average, Op, Sum, checked_weight
from horo_lite.context import on_ended, on_ending, on_renewed
from horo_lite.errors import raised_in_graphs, warn
from horo_lite.jax.primitive import bind, complete
from horo_lite.settings import check_every, noise_every
from horo_lite.state.drift import DriftCheck, Run, differences
from horo_lite.training import step_record
from horo_lite.training.gradient_memory import compare_samples, hash_of
from horo_lite.training.gradient_noise import Measurement, is_due

Array = Any  # jax.Array, traced or not; a NumPy array where stated
C = TypeVar("C", bound="Call")


# Compiled functions depend on the number of ranks. Those compiled ahead remain: see `Call.place`.
on_renewed(jax.clear_caches)
on_ending(complete)
on_ended(MEMORY.clear)


@dataclass(frozen=True)
class Call(ABC):
    """One operation, as far as it is known when a function is traced; compared by value.

    Attributes:
        name: For messages.
        group: The ranks; None for all ranks of the current world.
        place: This rank and the number of ranks, if the program's use of the result depends on
            them (`here`): it is an error to run a function that was compiled for another place.
    """

    name: str | None
    group: Group | None
    place: tuple[int, int] | None = field(default=None, kw_only=True)

    in_place: ClassVar[bool]
    """Whether `start` leaves the results in its arrays."""

    elementwise: ClassVar[bool] = False
    """Whether one call can process several cases at once, as vmap needs."""

    @property
    def without_gradient(self) -> str:
        """Why it has no gradient, in words; empty if it has one."""
        return ""

    def of(self, places: Sequence[int]) -> Call:
        """Return the same operation for the tangents of some of the arrays."""
        return self

    def without_parameters(self, xs: Sequence[Array]) -> tuple[Call, Sequence[Array]]:
        """Return the operation and its inputs without those that are compared only."""
        return self, xs

    def ranks(self) -> Group:
        return ops.ranks_of(self.group)

    def here(self: C) -> C:
        """Return the same operation, for this place only."""
        return replace(self, place=(self.ranks().rank, self.ranks().size))

    def check(self, xs: Sequence[Any]) -> None:  # noqa: B027 (most take all)
        """Raise, while the function is traced, the errors that such arrays would cause later."""

    @abstractmethod
    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        """Execute the operation now; return results of the same types as `xs`."""

    @abstractmethod
    def start(self, xs: list[Any], name: str) -> Handle:
        """Submit the operation on NumPy arrays under that name."""

    def execute(self, xs: Sequence[Any], name: str) -> Any:
        """Submit the operation on NumPy arrays under that name, and wait for it."""
        return self.ranks().synchronize(self.start(list(xs), name), beside=True)

    def results(self, xs: Sequence[Any]) -> list[Any]:
        """Return the results' shapes and dtypes, given those of `xs`."""
        return list(xs)

    def title(self, i: int) -> str:
        """Return how messages refer to array `i`."""
        return f"{type(self).__name__.lower()} {self.name or ''}".rstrip()

    @abstractmethod
    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        """Return the inputs' cotangents, if the operation has a gradient."""

    def run(self, xs: Sequence[Any]) -> list[Any]:
        """Execute the operation on NumPy arrays; called by a thread of XLA when it reaches it."""
        try:
            group = self.ranks()
            number = f"call {group.new_number('inside jit')} inside jit"
            if self.place is not None and self.place != (group.rank, group.size):
                rank, size = self.place
                raise ValueError(
                    f"{self.title(0)}: the function was compiled for rank {rank} of {size}, but "
                    f"this is rank {group.rank} of {group.size}: compile it again"
                )
            result = self.execute(xs, f"{self.name}, {number}" if self.name else number)
        except BaseException as error:
            raised_in_graphs.append(error)
            raise
        return list(self.results(xs)) if self.in_place else [result]


@dataclass(frozen=True)
class Allreduce(Call):
    """`allreduce` inside jit; see `horo_lite.ops` for the attributes."""

    op: Op = Average
    compression: Compressor = Compression.none
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    names: tuple[str, ...] = ()  # of the arrays
    weighted: bool = False  # the input after the arrays is the weight
    of_gradients: bool = False  # warn if ranks have the same in the first call; record steps
    parameters: tuple[str, ...] = ()  # names of the last inputs, which are compared, and not sent
    broadcast_later: bool = False  # the parameters, between the first call and the second
    owner: object = None  # of the gradients: those of one with the same names are counted together

    in_place = True
    elementwise = True

    @property
    def without_gradient(self) -> str:
        if self.op not in (Average, Sum):
            return f"with op {self.op.name}"
        return "with a weight" if self.weighted else ""

    def of(self, places: Sequence[int]) -> Call:
        names = tuple(self.names[i] for i in places if self.names)
        return replace(self, names=names, of_gradients=False, parameters=())

    def without_parameters(self, xs: Sequence[Array]) -> tuple[Call, Sequence[Array]]:
        return replace(self, parameters=()), xs[: len(xs) - len(self.parameters)]

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        arrays, options, parameters = self._given(xs)
        group = self.ranks()
        mine, noise = self._hash_if_first(arrays), self._measurement(arrays)
        averages = ops.grouped_allreduce(arrays, self.op, name=self.name, **options, group=group)
        self._compare(mine, parameters, self.name or "")
        self._record(averages, parameters)
        self._finish(noise, averages, options["weight"])
        return averages

    def start(self, xs: list[Any], name: str) -> Handle:
        arrays, options, _ = self._given(xs)
        return ops.grouped_allreduce_async_(
            arrays, self.op, name=name, **options, group=self.ranks()
        )

    def execute(self, xs: Sequence[Any], name: str) -> Any:
        group = self.ranks()

        def run(call: Any, part: Part) -> Any:
            return group.synchronize(group.submit(call, part), beside=True)

        arrays, options, parameters = self._given(xs)
        mine, noise = self._hash_if_first(arrays), self._measurement(arrays)
        result = super().execute(xs, name)
        self._compare(mine, parameters, name, run)
        self._record(arrays, parameters)
        self._finish(noise, arrays, options["weight"], run)
        return result

    def _hash_if_first(self, gradients: Sequence[Array]) -> int | None:
        """Return their hash, before the first exchange of gradients with these names."""
        known = self._exchanges()
        is_first = known is not None and known.is_first and check_every() != 0
        return hash_of(gradients, self.ranks()) if is_first else None

    def _compare(
        self,
        mine: int | None,
        parameters: Sequence[tuple[str, Array]],
        label: str,
        run: Run | None = None,
    ) -> None:
        """Compare what should be the same on all ranks, and that hash, which should not.

        After the exchange, by which the ranks know that the gradients' names are alike.
        """
        known, group = self._exchanges(), self.ranks()
        if known is None:
            return
        texts = []
        if mine is not None:
            texts.append(compare_samples(mine, group, label, run))
            if parameters and not self.broadcast_later:
                texts.append(differences(parameters, group, label, run=run))
        elif parameters and not known.is_first:
            known.drift.stepped(lambda: parameters, group, run)
        known.is_first = False
        for text in texts if group.rank == 0 else ():
            if text is not None:
                warn(text)

    def _exchanges(self) -> _Exchanges | None:
        """Return what is known of those of gradients with these names, if ranks are compared."""
        group = self.ranks()
        if not self.of_gradients or group.size == 1:
            return None
        return _AllExchanges.of(group).known[self.owner, self.names]

    def _record(self, averages: Sequence[Array], parameters: Sequence[tuple[str, Array]]) -> None:
        """Record the step, if that is wanted."""
        if self.of_gradients and step_record.is_on():
            named = zip(self.names or ("",), averages, strict=True)
            title, how = self.name or "gradients", str(self.compression.name)
            step_record.record_for(self.ranks(), title, named, parameters, how)

    def _measurement(self, gradients: Sequence[Array]) -> Measurement | None:
        """Begin to measure how much of the average is noise, if that is wanted in this step."""
        known = self._exchanges()
        if known is None:
            return None
        known.n_steps += 1
        if not is_due(known.n_steps, noise_every(), self.op, self.compression):
            return None
        title = self.name or "gradients"
        return Measurement(self.ranks(), title, self.names, known.n_steps, gradients)

    def _finish(
        self,
        noise: Measurement | None,
        results: Sequence[Array],
        weight: float | None,
        run: Run | None = None,
    ) -> None:
        if noise is not None:
            factor = self.prescale_factor * self.postscale_factor
            noise.finish(results, op=self.op, weight=weight, factor=factor, run=run)

    def check(self, xs: Sequence[Any]) -> None:
        arrays = Memory([np.empty(0, x.dtype) for x in self.results(xs)], fresh=True)
        part = Part(arrays, weight=1.0 if self.weighted else None)
        factors = self.prescale_factor, self.postscale_factor
        AllReduce(self.name, self.op, self.compression, *factors).check(part)

    def results(self, xs: Sequence[Any]) -> list[Any]:
        return list(xs[: len(xs) - len(self.parameters) - self.weighted])

    def title(self, i: int) -> str:
        return super().title(i) + (f", {self.names[i]!r}" if i < len(self.names) else "")

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        return bind(self, cotangents)

    def _given(
        self, xs: Sequence[Array]
    ) -> tuple[Sequence[Array], dict[str, Any], list[tuple[str, Array]]]:
        """Return the arrays to reduce, options, and the named parameters."""
        arrays = self.results(xs)
        rest = xs[len(arrays) :]
        weight = checked_weight(float(rest[0]), self.op) if self.weighted else None
        options = {
            "compression": self.compression,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
            "names": self.names,
            "weight": weight,
        }
        return arrays, options, list(zip(self.parameters, rest[self.weighted :], strict=True))


class _Exchanges:
    """The exchanges of an owner's gradients with some names, as far as all ranks have made them."""

    def __init__(self) -> None:
        self.is_first = True  # the next one
        self.n_steps = 0
        self.drift = DriftCheck(check_every(), "raise")


class _AllExchanges:
    """Those of a group."""

    def __init__(self, group: Group) -> None:
        self.known: dict[tuple[object, tuple[str, ...]], _Exchanges] = defaultdict(_Exchanges)
        group.counting.add(self)

    def reset_counts(self) -> None:
        """Begin anew: all ranks have joined, after different calls."""
        self.known.clear()

    @classmethod
    def of(cls, group: Group) -> _AllExchanges:
        if cls not in group.kept:
            group.kept[cls] = cls(group)
        found: _AllExchanges = group.kept[cls]
        return found


@dataclass(frozen=True)
class Broadcast(Call):
    """`broadcast` inside jit."""

    root_rank: int

    in_place = True
    elementwise = True

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        return [ops.broadcast(x, self.root_rank, name=self.name, group=self.ranks()) for x in xs]

    def start(self, xs: list[Any], name: str) -> Handle:
        return ops.broadcast_async_(xs[0], self.root_rank, name=name, group=self.ranks())

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        sums = bind(Allreduce(self.name, self.group, op=Sum).here(), cotangents)
        is_root = self.ranks().rank == self.root_rank
        return sums if is_root else [jnp.zeros_like(x) for x in sums]


@dataclass(frozen=True)
class Allgather(Call):
    """`allgather` inside jit, with the same number of rows on every rank."""

    in_place = False

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        return [ops.allgather(x, name=self.name, group=self.ranks()) for x in xs]

    def start(self, xs: list[Any], name: str) -> Handle:
        rows = len(xs[0]) if xs[0].ndim else 1
        return ops.allgather_async(
            xs[0], name=f"{name}, {rows} rows of each rank", group=self.ranks()
        )

    def results(self, xs: Sequence[Any]) -> list[Any]:
        (x,) = xs
        rows, *row = x.shape or (1,)
        return [jax.ShapeDtypeStruct((rows * self.ranks().size, *row), x.dtype)]

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        (sum_,) = bind(Allreduce(self.name, self.group, op=Sum).here(), cotangents)
        rank, size = self.ranks().rank, self.ranks().size
        return [jnp.split(sum_, size)[rank]]


@dataclass(frozen=True)
class AllgatherInPlace(Call):
    """Each array as its owner has it."""

    owners: tuple[int, ...]
    names: tuple[str, ...]

    in_place = True

    @property
    def without_gradient(self) -> str:
        return "of divided updates"

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        arrays = [np.array(x) for x in xs]
        self.ranks().run(*self._given(arrays, asynchronous=False))
        return [ADAPTER.from_numpy(array, x) for array, x in zip(arrays, xs, strict=True)]

    def start(self, xs: list[Any], name: str) -> Handle:
        return self.ranks().submit(*replace(self, name=name)._given(xs, asynchronous=True))

    def title(self, i: int) -> str:
        return super().title(i) + f", {self.names[i]!r}"

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        raise NotImplementedError

    def _given(self, arrays: Sequence[Any], asynchronous: bool) -> tuple[AllGatherInPlace, Part]:
        rows = [x if x.ndim else x.reshape(1) for x in arrays]
        memory = self.ranks().memory(rows, asynchronous=asynchronous)
        return AllGatherInPlace(self.name, self.owners, self.names), Part(memory)


@dataclass(frozen=True)
class Alltoall(Call):
    """`alltoall` inside jit."""

    in_place = False

    def check(self, xs: Sequence[Any]) -> None:
        (x,) = xs
        size = self.ranks().size
        if not x.shape:
            raise ValueError("alltoall needs an array with at least one dimension")
        if x.shape[0] % size:
            raise ValueError(
                f"alltoall inside jit needs a multiple of {size} rows, not {x.shape[0]}"
            )

    def eagerly(self, xs: Sequence[Array]) -> list[Array]:
        return [ops.alltoall(x, name=self.name, group=self.ranks()) for x in xs]

    def start(self, xs: list[Any], name: str) -> Handle:
        return ops.alltoall_async(
            xs[0], name=f"{name}, {len(xs[0])} rows of each rank", group=self.ranks()
        )

    def transposed(self, cotangents: Sequence[Array]) -> Sequence[Array]:
        return bind(self, cotangents)
