"""Executes a plan: `ready(i)` when gradients are complete, `finish()` at the end of a step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakSet

import numpy as np

from horo_lite import ops, settings
from horo_lite.adapters import Adapter, adapter_of
from horo_lite.arguments import QUANTIZED
from horo_lite.collectives.arrays import HOST, gpu_of
from horo_lite.collectives.calls import Compare, Part, gathered
from horo_lite.collectives.compression import (
    AutoCompressor,
    Compression,
    Compressor,
    OwnCompressor,
)
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import (
    Adasum,
    AnyOp,
    Average,
    Sum,
    checked_weight,
)
from horo_lite.context import on_renewed
from horo_lite.errors import MismatchError, NonFiniteError, PeerLostError, StallError, warn
from horo_lite.recording import recorder
from horo_lite.state import drift
from horo_lite.training import gradient_noise, step_record
from horo_lite.training.gradient_memory import (
    Finding,
    Gradients,
    compare_samples,
    compare_states,
    find_non_finite,
    gradients_of,
    hash_of,
    in_words,
    lent_by,
    tensors_of,
)
from horo_lite.training.hyperparameters import Hyperparameters, difference, digest
from horo_lite.training.overlap import Overlap
from horo_lite.training.plan import (
    DEFAULT_BUCKET_BYTES,
    NOTHING,
    Entry,
    Layout,
    Plan,
    Rows,
    hash63,
    merge,
    who_has,
)
from horo_lite.training.trials import Trials

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.transports.interface import Division
    from horo_lite.transports.shm import SharedMemory


class _Numbers:
    """Numbers a group's reducers, independent of which still exist, which may differ by rank."""

    def __init__(self, group: Group) -> None:
        self.reset_counts()
        group.counting.add(self)

    def reset_counts(self) -> None:
        self._next = itertools.count(1)

    def __next__(self) -> int:
        return next(self._next)


class Offer(NamedTuple):
    """What the ranks compare, and report to each other if there is a difference."""

    plan: Plan  # of this step, on this rank
    agreed: Plan | None  # the plan under which buckets may have left
    n_begun: int  # how many buckets have left
    step: str
    attempt: int
    note: Any
    finding: Finding | None
    hyperparameters: Hyperparameters
    failure: str  # why this rank cannot take part
    is_first: bool  # of this rank's reducer; others may have been made anew
    measures_noise: bool

    @property
    def number(self) -> int:
        """The number of buckets that have left, and above it a hash of all the rest."""
        agreed = 0 if self.agreed is None else self.agreed.digest
        rest = hash63(
            f"{self.step} {self.attempt} {agreed} {self.plan.digest} {self.note} {self.finding} "
            f"{digest(self.hyperparameters)} {self.failure} {self.is_first} {self.measures_noise}"
        )
        return rest // _MOST_BUCKETS * _MOST_BUCKETS + min(self.n_begun, _MOST_BUCKETS - 1)


_MOST_BUCKETS = 1 << 16


@dataclass(frozen=True)
class _Agreement(Compare):
    """Find out whether the ranks' offers are alike: by the numbers, since they may differ."""

    needs_all: bool = False

    def contract(self, part: Part) -> object:
        return "an optimizer's step"


class Common(NamedTuple):
    """What the ranks have agreed on."""

    plan: Plan
    n_begun: int  # how many buckets of the last plan some rank has begun
    notes: dict[int, Any]  # by rank in the world
    findings: dict[int, Finding | None]
    all_are_here: bool  # no rank has joined
    is_first: bool  # for every rank
    some_begin: bool  # it is the first of some rank's reducer, if this is compared
    measures_noise: bool  # every rank
    warnings: Sequence[str] = ()  # about what the ranks begin with


class AgreedPlan(NamedTuple):
    """The plan under which buckets leave early, and what is looked up in it."""

    plan: Plan
    signatures: list[int]  # of the gradients in each bucket
    bucket_of: dict[int, int]
    n_members: list[int]

    @classmethod
    def of(cls, plan: Plan, arrays: Sequence[Any]) -> AgreedPlan:
        signatures = [tensors_of([arrays[i] for i in b]).signature for b in plan.buckets]
        # Memory shared by several parameters is complete when all of them are ready.
        of_owner = {i: number for number, bucket in enumerate(plan.buckets) for i in bucket}
        bucket_of = {i: of_owner[owner] for i, owner in enumerate(plan.owners) if plan.present[i]}
        members = Counter(bucket_of.values())
        return cls(plan, signatures, bucket_of, [members[b] for b in range(len(plan.buckets))])


@dataclass(slots=True, eq=False)
class Step:
    """What belongs to one step only: it is dropped with the step, finished or not.

    It ends with `Reducer.finish()` or, if a backward pass has raised, with `Reducer.abandon()`.
    """

    n_awaited: list[int]  # of each bucket's gradients, how many are not ready
    n_ready: list[int]  # how often each gradient was announced
    weight: float | None = None
    handles: list[Handle] = field(default_factory=list)  # of the buckets that have left
    waits: bool = False  # nothing more leaves before finish()
    finding: Finding | None = None
    began: tuple[float, float] | None = None  # when the first gradient was ready: see Overlap


class Reducer:
    """Replaces every gradient by the average (or sum) over the ranks of `group`.

    When streaming, gradients are announced with `ready(i)`, in any order, `passes` times each; a
    bucket leaves as soon as all its gradients and those of the buckets before it are ready.
    `finish()` sends the rest and returns when all results are in the gradients' own memory; without
    previous calls of `ready`, it performs the whole exchange. Every rank calls `finish()` once per
    step.

    Buckets leave early only if that pays (`overlap`), and under a plan that all ranks agreed on in
    an earlier `finish()`. So the first step exchanges everything at its end, and so does a step in
    which gradients have changed. If gradients change in the same way on all ranks (shape, dtype,
    more or fewer of them), this costs the overlap of one step. If they change on some ranks only,
    every rank raises MismatchError; gradients of this step are then undefined, and the next step
    may begin.

    A step that cannot be finished because a backward pass raised on this rank is given up with
    `abandon()`: what has not been executed yet is withdrawn. The backward pass that repeats it is
    another attempt, whose number is part of the label that is matched. So gradients of two attempts
    are never combined. If ranks call `finish()` in different attempts, and some bucket was executed
    with gradients that a rank has abandoned since, every rank raises MismatchError; otherwise they
    continue.

    A gradient that only some ranks have counts as zeros on the others, which receive the result,
    too. A gradient that no rank has stays as it is.

    `title` describes what is exchanged, in the same way on all ranks; by default, the gradients of
    an optimizer that is numbered at its first step.

    With `feeds_back`, what compression has rounded away is added in the next step.

    With `check_finite`, "raise" or "warn", `finish()` reports gradients that were not finite on
    some rank before the exchange, on all ranks, after everything has been exchanged.

    With `checks_start`, the first exchange compares the ranks' parameters and gradients, and rank 0
    warns if the former differ or the latter are the same. If `state` is given, it returns what the
    optimizer keeps, which is compared, too.
    """

    def __init__(
        self,
        group: Group,
        adapter: Adapter,
        parameters: Sequence[tuple[str, Any]],
        *,
        op: AnyOp = Average,
        compression: Compressor = Compression.none,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        passes: int = 1,
        streams: bool = True,
        overlap: Overlap | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        options: Sequence[tuple[str, str]] = (),
        check_finite: str | None = None,
        checks_start: bool = False,
        state: Callable[[], Sequence[tuple[str, Any]]] | None = None,
        title: str | None = None,
        feeds_back: bool = True,
    ) -> None:
        self.group = group
        self._adapter = adapter
        self._op = op
        self._trials: Trials | None = None
        self._feeds_back = feeds_back
        if isinstance(compression, AutoCompressor):
            trials = Trials(group, compression)
            self._trials = None if trials.is_over else trials
            self._compress_with(trials.candidate)
        else:
            self._compress_with(compression)
        if compression.wire in QUANTIZED and group.size > 1 and group.transport.shares_memory:
            _warn_of_one_host(group, compression)
        self._bucket_bytes = bucket_bytes
        self._passes = passes
        self._streams = streams and not self._compression.exchanges
        if self._compression.exchanges and op is not Average:
            raise ValueError(
                f"{compression.name} has an exchange() of its own, which needs op=Average, not "
                f"{op.name}"
            )
        self._overlap = overlap or Overlap.of(group)
        self._how: dict[str, Any] = {  # arguments of every exchange
            "op": op,
            "prescale_factor": prescale_factor,
            "postscale_factor": postscale_factor,
        }
        self._noise_every = settings.noise_every()
        self._n_steps = 0
        self.options = {
            "op": op.name,
            "compression": str(compression.name),
            "backward_passes_per_step": str(passes),
            "check_finite": str(check_finite),
            "noise_every": str(self._noise_every),
            **dict(options),
        }
        self._check_finite = check_finite
        self._checks_start = self._is_first = checks_start
        self._state = state
        self.shared: SharedMemory | None = None  # gradients in it are reduced in place
        # By parameter, and rank, the elements that the rank needs; None: all ranks need all.
        self.division: Sequence[Sequence[tuple[int, int]]] | None = None
        # Returns named parameters, where the adapter knows gradients only: for the record of steps.
        self.known_parameters: Callable[[], Sequence[tuple[str, Any]]] | None = None
        self.position = ""  # the owner's description of the next exchange, the same on every rank
        # Called on every rank when they are found to be in different exchanges, or to have other
        # gradients: they begin to count anew.
        self.on_mismatch: Callable[[], None] = lambda: None
        self._title = title
        self.number = 0  # of the optimizer, the same on every rank; 0 before its first step
        self._attempt = 1
        self._agreed: AgreedPlan | None = None
        self._place: int | None = None
        self._given: list[tuple[str, Any]] = []  # to bind()
        self._parameters: list[tuple[str, Any]] = []  # with names of their own
        self._step = self._new_step()
        self.bind(parameters)
        group.counting.add(self)
        _alive.add(self)

    def _compress_with(self, compression: Compressor) -> None:
        self._compression = compression.for_steps() if self._feeds_back else compression

    def bind(self, parameters: Sequence[tuple[str, Any]], together: Sequence[int] = ()) -> None:
        """Use these named parameters from the next step on; cheap if nothing changed.

        `together` is that of `Plan`.
        """
        if (
            parameters
            and len(parameters) == len(self._given)
            and all(
                new is old and name == known
                for (name, new), (known, old) in zip(parameters, self._given, strict=True)
            )
        ):
            return
        if self._step.handles:
            raise RuntimeError("the parameters changed between ready() and finish()")
        self._given = list(parameters)
        # TensorFlow's variables may have the same names, by which compressors keep their state.
        twice = Counter(name for name, _ in parameters)
        before = {id(parameter): name for name, parameter in self._parameters}
        self._parameters = [
            (name if twice[name] == 1 else f"{name} ({i})", parameter)
            for i, (name, parameter) in enumerate(parameters)
        ]
        if any(before.get(id(parameter), name) != name for name, parameter in self._parameters):
            self._compression.reset()  # what it keeps by a name belongs to another parameter
        self._together = tuple(together)
        self._plans: dict[object, Plan] = {}
        self._lent: set[int] = set()
        self._agreed = None
        self.division = None
        self._step = self._new_step()

    def reset_counts(self) -> None:
        """Restart: ranks that had joined are back, and know neither the plan nor the numbers."""
        self._agreed = None
        self._is_first = self._checks_start
        self.number = 0
        self._attempt = 1
        self._n_steps = 0
        self._compression.reset()

    def _new_step(self) -> Step:
        n_awaited = [] if self._agreed is None else list(self._agreed.n_members)
        return Step(n_awaited, [0] * len(self._parameters), waits=self._measures_noise)

    @property
    def weight(self) -> float | None:
        """This rank's weight in this step, such as its number of samples; None: equal weights.

        Set it before the step's first `ready()`, on every rank or on none; it is reset afterwards.
        """
        return self._step.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        checked = None if weight is None else checked_weight(weight, self._op)
        if self._step.handles:
            raise RuntimeError("the weight must be set before the first ready() of the step")
        self._step.weight = checked

    @property
    def _what(self) -> str:
        """The optimizer, and which of its exchanges is the next."""
        return self._subject + self.position

    @property
    def _subject(self) -> str:
        return self._title or f"gradients of optimizer {self.number}"

    @property
    def _label(self) -> str:
        return self._what + (f", {_which_try(self._attempt)}" if self._attempt > 1 else "")

    def ready(self, i: int) -> None:
        """Announce that the gradient of parameter i is ready; do not touch it until `finish()`."""
        step, agreed = self._step, self._agreed
        n_ready = step.n_ready[i] = step.n_ready[i] + 1
        if n_ready < self._passes:
            return
        if n_ready > self._passes:
            name = self._parameters[i][0]
            raise RuntimeError(
                f"the gradient of {name!r} became ready {self._passes + 1} times before step(), "
                f"but backward_passes_per_step={self._passes}: call step() after that many passes"
            )
        if step.began is None:
            step.began = self._overlap.begin()
        if agreed is None or not self._streams or i not in agreed.bucket_of:
            return
        step.n_awaited[agreed.bucket_of[i]] -= 1
        while (
            (self._overlap.pays or agreed.plan.gpu)
            and not step.waits
            and len(step.handles) < len(step.n_awaited)
            and step.n_awaited[len(step.handles)] == 0
        ):
            self._leave_early(agreed)

    @property
    def n_ready(self) -> Sequence[int]:
        """How often each gradient has been announced in this step."""
        return self._step.n_ready

    def early(self) -> list[int]:
        """Return the parameters whose gradients `ready()` may send before all are complete.

        Those of the last bucket are not among them: with it, all gradients are complete, and
        `finish()` can send it without the engine.
        """
        if self._agreed is None:
            return []
        last = len(self._agreed.n_members) - 1
        return [i for i, bucket in self._agreed.bucket_of.items() if bucket < last]

    def has_left(self, i: int) -> bool:
        """Return whether parameter i's gradient has been sent already in this step."""
        n_begun = len(self._step.handles)
        return self._agreed is not None and self._agreed.bucket_of.get(i, n_begun) < n_begun

    def finish(
        self,
        note: Any = "",
        numbers: Hyperparameters = (),
        rows: Mapping[int, tuple[Layout, Any]] | None = None,
    ) -> Common:
        """Exchange the remaining gradients, and wait for all results. Every rank calls it.

        Args:
            note: For the other ranks; has a text, and can be pickled.
            numbers: Those of this rank's optimizer, which must be equal on all.
            rows: By index, the layout (see `Plan.rows`) and the values of the gradients of which
                this rank has some rows. The ranks agree on the layouts here;
                `sparse_rows.exchange` exchanges the rows afterwards.

        Returns:
            What the ranks have agreed on, with every rank's note.

        Raises:
            MismatchError: The ranks' plans differ.
        """
        try:
            common = self._finish(note, numbers, rows or {})
            self._n_steps += 1
        except (PeerLostError, StallError):
            raise  # this world can no longer be used
        except BaseException:
            self._compression.reset()  # the exchange may have ended on other ranks only, or halfway
            self.abandon()
            raise
        finally:
            self._step = self._new_step()
        recorder.step()
        if self._trials is not None:
            counts = common.all_are_here and not common.measures_noise
            self._try_next(self._trials, counts)
        label, self._attempt = self._label, 1
        for text in common.warnings if self.group.rank == 0 else ():
            warn(text)
        if any(common.findings.values()):
            self._report(common.findings, label)
        return common

    def _try_next(self, trials: Trials, counts: bool) -> None:
        """Continue with the compression that is to be tried next, or has been chosen."""
        before = trials.candidate
        trials.end_step(self._what, counts=counts)
        if trials.is_over:
            self._trials = None
        if trials.candidate is not before:
            self._compress_with(trials.candidate)
            self._agreed = None
            self._step = self._new_step()

    def _finish(
        self, note: Any, numbers: Hyperparameters, rows: Mapping[int, tuple[Layout, Any]]
    ) -> Common:
        self._overlap.end(self._step.began)
        try:
            read = self._read()
            if self._check_finite and rows:
                self._scan(list(rows), [values for _, values in rows.values()])
            mine = self._describe(read, tuple((i, rows[i][0]) for i in sorted(rows)))
        except Exception as error:
            self.fail(error)
        arrays, copied = read.arrays, read.copied
        if self._compares_later() and self._follow(mine, arrays, copied):
            self._record(arrays)
            notes = dict.fromkeys(self.group.transport.ranks, note)
            assert self._agreed is not None
            return Common(self._agreed.plan, 0, notes, {}, True, False, False, False)
        common = self._agree(self._offer(mine, note, numbers))
        plan, n_begun = common.plan, common.n_begun
        if common.is_first and not n_begun:
            common = common._replace(warnings=self._check_start(plan, arrays))
        self._is_first = False
        if plan is not mine:
            self._fill(plan, arrays, copied)
        gradients = [arrays[i] for i in plan.travelling]
        noise = None
        if common.measures_noise and not n_begun:
            noise = self._measurement(gradients)
        rest, handles = plan.travelling, self._step.handles
        if n_begun and self._agreed is not None:
            early = {i for bucket in self._agreed.plan.buckets[:n_begun] for i in bucket}
            rest = tuple(i for i in rest if i not in early)
            late = self._agreed.plan.buckets[len(handles) : n_begun]
            if late:  # others have sent what may have been taken away on all ranks since
                self._fill(self._agreed.plan, arrays, copied)
            for bucket in late:
                self._send(self._agreed.plan, bucket, [arrays[i] for i in bucket])
        if rest:
            names = [self._parameters[i][0] for i in rest]
            self._exchange(
                [arrays[i] for i in rest],
                names,
                self._label,
                shared=self.shared,
                division=self._division(rest),
            )
        for handle in handles:
            self.group.synchronize(handle)
        if copied:
            self._write_back(plan, copied)
        self.reset_unless_finite(gradients)
        if self._agreed is None or self._agreed.plan != plan:
            self._agreed = AgreedPlan.of(plan, arrays)  # buckets leave early under it from now on
        self._record(arrays)
        if noise is not None:
            factor = self._how["prescale_factor"] * self._how["postscale_factor"]
            noise.finish(gradients, op=self._op, weight=self._step.weight, factor=factor)
        return common

    def _read(self) -> Gradients:
        """Read this rank's gradients."""
        own = gradients_of(self._adapter, self._parameters)
        if len(own.tensors):
            self._place = own.tensors.device
        if self._check_finite:
            here = [i for i in range(len(own.arrays)) if not self.has_left(i)]
            here.reverse()  # the order in which they leave
            self._scan(here, [own.arrays[i] for i in here])
        return own

    def fail(self, error: Exception) -> NoReturn:
        """Give up this step with `error`, and MismatchError on the ranks that wait in `finish()`.

        Collective. On a GPU where ranks do not wait for each other, it is raised on this rank only.
        """
        if not self._compares_later():
            number = self.group.transport.ranks[self.group.rank]
            failure = f"rank {number}: {type(error).__name__}: {error}"
            with suppress(MismatchError):
                self._agree(self._offer(NOTHING, failure=failure))
        self.abandon()
        raise error

    def compare_hyperparameters(self, numbers: Hyperparameters) -> None:
        """Raise MismatchError on every rank if they differ. Collective."""
        self._agree(self._offer(NOTHING, numbers=numbers))

    def abandon(self) -> None:
        """Give up this step, on this rank only, so that none of its buckets is in flight any more.

        When it returns, nothing writes into gradients, and the next gradients belong to another
        attempt. It does not wait for other ranks' programs.
        """
        if self._step.handles:
            self._withdraw()
            self._compression.reset()
            self._attempt += 1
        self._step = self._new_step()

    def _withdraw(self) -> bool:
        """Withdraw everything in flight; return whether this rank's gradients were changed."""
        step = self._step
        is_changed = (
            bool(step.handles) and type(self._compression).prepare is not Compressor.prepare
        )
        for handle in step.handles:
            if not handle.withdraw():
                is_changed = True
                with suppress(Exception):  # errors of this step no longer matter
                    self.group.synchronize(handle)
        if (step.handles or any(step.n_ready)) and self._agreed and self._agreed.plan.gpu:
            # Work queued on GPUs cannot be withdrawn: the ranks agree before they queue more.
            self._agreed = None
        step.handles.clear()
        return is_changed

    # This rank's gradients.

    def _describe(self, own: Gradients, rows: Rows) -> Plan:
        """Return the plan for this rank's gradients."""
        arrays = own.arrays
        present = tuple([array is not None for array in arrays])
        options = (
            *self.options.items(),
            ("weighted", str(self._step.weight is not None)),
            ("memory", "host" if self._gpu() is None else "GPU"),
        )
        wire = self._compression.wire
        key = (present, own.tensors.signature, tuple(own.overlaps), options, wire, rows)
        if key not in self._plans:
            self._lent |= lent_by(self._adapter, self._parameters, own)
            if len(self._plans) == 8:  # the set of gradients changes all the time
                self._plans.clear()
            self._plans[key] = Plan(
                entries=tuple(
                    _entry(name, array)
                    for (name, _), array in zip(self._parameters, arrays, strict=True)
                ),
                present=present,
                owners=own.owners(self._parameters),
                bucket_bytes=self._bucket_bytes,
                wire=wire,
                options=options,
                together=self._together,
                rows=rows,
            )
        own.copied.update((i, arrays[i]) for i in self._lent if arrays[i] is not None)
        return self._plans[key]

    def _fill(self, plan: Plan, arrays: list[Any], copied: dict[int, Any]) -> None:
        """Fill in zeros for gradients of `plan` that this rank does not have."""
        for i in plan.travelling:
            if arrays[i] is not None:
                continue
            parameter, entry = self._parameters[i][1], plan.entries[i]
            value = self._adapter.value(parameter) if plan.gpu else None
            held = self._adapter.held(parameter, entry.dtype, entry.shape)
            if held is not None:
                arrays[i] = held
            elif value is not None and gpu_of(value) is not None:
                # Parameter objects of one's own hold arrays of a framework.
                of = adapter_of(value) if type(self._adapter) is Adapter else self._adapter
                arrays[i] = of.zeros_like(value)
            else:
                arrays[i] = self._adapter.missing(parameter, entry.dtype, entry.shape)
            copied[i] = arrays[i]

    # Non-finite gradients.

    def _scan(self, chosen: Sequence[int], arrays: Sequence[Any]) -> None:
        """Record whether these gradients are finite; arrays[k] is the gradient of chosen[k]."""
        names = [self._parameters[i][0] for i in chosen]
        named = list(zip(names, arrays, strict=True))
        self._step.finding = find_non_finite(named, self._step.finding)

    def _report(self, findings: dict[int, Finding | None], label: str) -> None:
        text = in_words(findings, label)
        if self._check_finite == "raise":
            raise NonFiniteError(text)
        if self.group.rank == 0:
            warn(text)

    # What the ranks begin with.

    def _check_start(self, plan: Plan, arrays: Sequence[Any]) -> list[str]:
        """Return warnings if parameters or states differ, or gradients do not. Collective.

        Whatever a script has forgotten, to broadcast parameters or to distribute samples, it would
        raise no error.
        """
        rows = dict(plan.rows)
        trained = (i for i, present in enumerate(plan.present) if present or i in rows)
        named = list(self._values(trained))
        differing = drift.differences(named, self.group, self._label) if named else None
        state = self._state and compare_states(self._state(), self.group, self._label)
        same = compare_samples(hash_of(arrays, self.group), self.group, self._label)
        none = "" if rows or any(plan.present) else _without_gradients(self._label)
        return [text for text in (differing, state, same, none) if text]

    def _values(self, chosen: Iterable[int]) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of these parameters, as far as they are known."""
        for i in chosen:
            name, parameter = self._parameters[i]
            with suppress(TypeError, AttributeError):  # an adapter that knows gradients only
                if (value := self._adapter.value(parameter)) is not None:
                    yield name, value

    def _record(self, averages: Sequence[Any]) -> None:
        """Record the step, if that is wanted."""
        if step_record.is_on():
            # Otherwise this rank has the averages of its share only.
            received = averages if self.division is None else []
            names = [name for name, _ in self._parameters]
            known = self.known_parameters
            values = drift.values_of(known()) if known else self._values(range(len(names)))
            step_record.record_for(
                self.group,
                self._subject,
                zip(names, received, strict=False),
                values,
                str(self._compression.name),
            )

    # How much of the averages is noise.

    @property
    def _measures_noise(self) -> bool:
        """Whether this step does."""
        if self.group.size == 1 or self.division is not None:
            return False
        step, every = self._n_steps + 1, self._noise_every
        return gradient_noise.is_due(step, every, self._op, self._compression)

    def _measurement(self, gradients: Sequence[Any]) -> gradient_noise.Measurement:
        names = [name for name, _ in self._parameters]
        step = self._n_steps + 1
        return gradient_noise.Measurement(self.group, self._subject, names, step, gradients)

    def reset_unless_finite(self, results: Sequence[Any]) -> None:
        """Forget what a compressor keeps of a step that overflowed, which the caller will skip.

        What is left over of its other gradients may be far larger than those of the next step.
        """
        if not self._compression.resets or self._gpu() is not None:
            return
        if find_non_finite([("", x) for x in results], None):
            self._compression.reset()

    # On a GPU with NCCL, where a step does not wait for the other ranks' programs.

    def _compares_later(self) -> bool:
        if self._agreed is None or not self._agreed.plan.gpu or self._op is Adasum:
            return False
        if self._measures_noise:
            return False
        if isinstance(self._compression, OwnCompressor) or self._compression.exchanges:
            return False
        return self.group.compares_later(self._gpu())

    def _gpu(self) -> int | None:
        """Return the GPU of the gradients; None for host memory."""
        if self._place is None:  # no gradient yet: assume that it is where its parameter is
            gpu = gpu_of(self._adapter.value(self._parameters[0][1])) if self._parameters else None
            self._place = HOST if gpu is None else gpu
        return None if self._place == HOST else self._place

    def _follow(self, mine: Plan, arrays: list[Any], copied: dict[int, Any]) -> bool:
        """Queue the exchange under the plan of an earlier step; return False if no rank can do so.

        A rank whose gradients fit that plan does not wait for others. A rank whose gradients do not
        fit waits to learn what the others do: if it only lacks some gradients and others follow the
        plan, it sends zeros for them; if no rank follows the plan, the ranks agree on a new one;
        anything else is a MismatchError.
        """
        assert self._agreed is not None
        plan = self._agreed.plan
        follows = mine == plan
        begun = len(self._step.handles)
        more = ""
        if follows or mine.lacks_only_some_of(plan):
            full, zeros = list(arrays), dict(copied)
            self._fill(plan, full, zeros)
            batches = list(plan.buckets[begun:]) if self._streams else [plan.travelling]
        else:
            early = {i for bucket in plan.buckets[:begun] for i in bucket}
            batches = [tuple(i for i in mine.travelling if i not in early)]
            if not batches[0]:  # only the rows differ from the plan
                return False
            if rows := [mine.entries[i].name for i, _ in set(mine.rows) - set(plan.rows)]:
                more = f", with rows of {_some_of(sorted(rows))}"
            full, zeros = arrays, copied
        for batch in filter(None, batches):
            if not self._send(plan, batch, [full[i] for i in batch], follows, more):
                return False
            follows = True
        for handle in self._step.handles:
            self.group.synchronize(handle)
        if zeros:
            self._write_back(plan, zeros)
        return True

    # All ranks' gradients.

    def _offer(
        self, plan: Plan, note: Any = "", numbers: Hyperparameters = (), failure: str = ""
    ) -> Offer:
        if not (self._title or self.number):
            if _Numbers not in self.group.kept:
                self.group.kept[_Numbers] = _Numbers(self.group)
            self.number = next(self.group.kept[_Numbers])
        return Offer(
            plan,
            None if self._agreed is None else self._agreed.plan,
            len(self._step.handles),
            self._what,
            self._attempt,
            note,
            self._step.finding,
            numbers,
            failure,
            self._is_first,
            self._measures_noise,
        )

    def _agree(self, mine: Offer) -> Common:
        part = Part(weight=self._step.weight, number=mine.number)
        with self.group.uninterrupted():
            headers = self.group.run(_Agreement(self._label), part)
            common = self._common(mine, [header.count for header in headers])
        if sum(header.weight for header in headers) <= 0:
            self._begin_attempt(self._attempt + 1)
            raise ValueError("every rank passed weight 0 in this step: at least one needs samples")
        return common

    def _common(self, mine: Offer, numbers: Sequence[int]) -> Common:
        """Return what the ranks have agreed on, after exchanging their offers if these differ."""
        here = [r for r, number in enumerate(numbers) if number != Compare.JOINED]
        all_are_here = len(here) == len(numbers)
        if len({numbers[r] // _MOST_BUCKETS for r in here}) > 1:
            return self._settle(mine, here)._replace(all_are_here=all_are_here)
        ranks = self.group.transport.ranks
        findings = {ranks[r]: mine.finding for r in here}
        n_begun = max(numbers[r] % _MOST_BUCKETS for r in here)
        notes = dict.fromkeys(ranks, mine.note)
        first = mine.is_first
        noise = mine.measures_noise
        return Common(mine.plan, n_begun, notes, findings, all_are_here, first, first, noise)

    def _settle(self, mine: Offer, here: Sequence[int]) -> Common:
        """Agree with the other ranks `here`, whose plans differ, if that is possible."""
        offers: list[Offer] = gathered(self.group, mine, "plans of gradients", needs_all=False)
        ranks = [self.group.transport.ranks[r] for r in here]
        n_begun = max(offer.n_begun for offer in offers)
        attempts = [offer.attempt for offer in offers]
        try:
            failures = [offer.failure for offer in offers if offer.failure]
            if failures:
                raise MismatchError(
                    f"{mine.step} cannot be exchanged, because of an error on another rank, "
                    f"which raises it: {'; '.join(failures)}"
                )
            steps = [offer.step for offer in offers]
            if len(set(steps)) > 1:
                raise MismatchError(
                    f"The ranks exchange different gradients: {who_has(steps, ranks)} "
                    "(optimizers are counted in the order of their first step). Step the same "
                    "ones, after the same backward passes, on every rank."
                )
            plan = merge([offer.plan for offer in offers], ranks)
            numbers = difference([offer.hyperparameters for offer in offers], ranks)
            if numbers:
                raise MismatchError(
                    f"The ranks' hyperparameters differ: {numbers}, so their parameters would "
                    "diverge. Give a scheduler the same number on every rank (allreduce() the "
                    "loss that it follows), and call broadcast_optimizer_state() if only one rank "
                    "has loaded a checkpoint."
                )
            if len(set(attempts)) > 1:
                self._join_attempts(attempts, here)
                n_begun = 0
            if n_begun and len({offer.agreed for offer in offers}) > 1:
                sent = [f"sent {offer.n_begun} buckets" for offer in offers]
                raise MismatchError(
                    f"The ranks' plans come from different steps: {who_has(sent, ranks)} "
                    "before step(), and some do not know these. Create, change and step the "
                    "optimizer in the same way on every rank."
                )
        except MismatchError:
            self._begin_attempt(max(attempts) + 1)
            self.on_mismatch()
            raise
        notes = {rank: offer.note for rank, offer in zip(ranks, offers, strict=True)}
        findings = {rank: offer.finding for rank, offer in zip(ranks, offers, strict=True)}
        firsts = [offer.is_first for offer in offers]
        noise = all(offer.measures_noise for offer in offers)
        return Common(plan, n_begun, notes, findings, False, all(firsts), any(firsts), noise)

    def _join_attempts(self, attempts: Sequence[int], here: Sequence[int]) -> None:
        """Continue with one attempt, from its beginning; MismatchError if gradients were mixed."""
        part, what = Part(number=int(self._withdraw())), self._what
        headers = self.group.run(Compare(what, needs_all=False), part)
        world_ranks = self.group.transport.ranks
        ranks = [world_ranks[r] for r in here]
        mixed = [world_ranks[r] for r in here if headers[r].count]
        if mixed:
            who = who_has([_which_try(attempt) for attempt in attempts], ranks)
            so = who_has(["gradients that were averaged with abandoned ones"] * len(mixed), mixed)
            raise MismatchError(
                "A backward pass was abandoned on some ranks, after an error or an interrupt, and "
                f"finished on others: of {what}, {who}. So {so}. Drop the gradients of this step "
                "on every rank with zero_grad(), and continue with the next batch."
            )
        self._attempt = max(attempts)

    def _begin_attempt(self, number: int) -> None:
        """Give up this attempt, as all ranks do, and give the next one that number."""
        self._withdraw()
        self._attempt = number

    # Sending.

    def _leave_early(self, agreed: AgreedPlan) -> None:
        step = self._step
        number = len(step.handles)
        bucket = agreed.plan.buckets[number]
        arrays = [self._adapter.gradient(self._parameters[i][1]) for i in bucket]
        # A gradient that differs from the plan, and all after it, wait for finish(), where the
        # ranks determine whether it changed on all of them.
        try:
            tensors = tensors_of(arrays)
            step.waits = tensors.signature != agreed.signatures[number] or bool(tensors.overlaps())
        except (TypeError, ValueError, BufferError):
            step.waits = True
        if not step.waits:
            if self._check_finite:
                self._scan(bucket, arrays)
            self._send(agreed.plan, bucket, arrays)

    def _send(
        self,
        plan: Plan,
        bucket: tuple[int, ...],
        arrays: list[Any],
        follows: bool = True,
        more: str = "",
    ) -> bool:
        names = [plan.entries[i].name for i in bucket]
        handles = self._step.handles
        number = len(handles) + 1
        label = f"{self._label}, bucket {number} of {len(plan.buckets)} ({_some_of(names)}){more}"
        division = self._division(bucket)
        if not follows:
            sent = self._exchange(arrays, names, label, follows=False, division=division)
            if sent:
                handles.append(Handle(label, None, lambda: None))
            return bool(sent)
        # A stream keeps operations in order, so names need not be matched.
        how: dict[str, Any]
        how = {"in_order": True} if plan.gpu and self._compares_later() else {"shared": self.shared}
        how["division"] = division
        handles.append(self._exchange(arrays, names, label, self.group.exchange_async, **how))
        return True

    def _division(self, chosen: Sequence[int]) -> Division:
        if self.division is None:
            return ()
        of_ranks = zip(*(self.division[i] for i in chosen), strict=True)
        return tuple(of_ranks)

    def _exchange(
        self,
        arrays: Sequence[Any],
        names: Sequence[str],
        label: str,
        exchange: Callable[..., bool | Handle] | None = None,
        **how: Any,
    ) -> Any:
        """Call `exchange`, by default that of the group, and return its result."""
        if self._compression.exchanges:
            self._exchange_by_compressor(arrays, names, label)
            return True
        how |= self._how | {"names": names, "label": label, "weight": self._step.weight}
        wire, sent, restored = self._compression.compressed(arrays)
        if wire is not self._compression:  # a user's decompress() may need all of a result
            how["division"] = ()
        result = (exchange or self.group.exchange)(sent, compression=wire, **how)
        if wire is self._compression:
            return result

        def write() -> None:
            for x, received in zip(arrays, restored(sent), strict=True):
                x[...] = received

        if isinstance(result, Handle):
            return result.then(write)
        write()
        return result

    def _exchange_by_compressor(
        self, arrays: Sequence[Any], names: Sequence[str], label: str
    ) -> None:
        memory = self.group.memory(arrays)
        seen = memory.seen()
        factor = self._how["prescale_factor"] * self._how["postscale_factor"]
        for x in seen if factor != 1 else ():
            x *= factor
        ranks = _StepRanks(self.group, f"{label} by {self._compression.name}", self._step.weight)
        self._compression.exchange(list(names), seen, ranks)
        memory.write_back()

    def _write_back(self, plan: Plan, copied: dict[int, Any]) -> None:
        for i, owner in enumerate(plan.owners):
            if plan.present[i] and owner in copied:
                self._adapter.set_gradient(self._parameters[i][1], copied[owner])


_alive: WeakSet[Reducer] = WeakSet()


def _follow_world() -> None:
    """Forget what compressors keep: a step may have ended on some ranks, and others are new."""
    for reducer in list(_alive):
        reducer._compression.reset()


on_renewed(_follow_world)


def _warn_of_one_host(group: Group, compression: Compressor) -> None:
    key = compression.wire, Reducer
    if group.rank == 0 and key not in group.kept:
        group.kept[key] = True
        warn(
            f"compression {compression.name} changes what travels between hosts only, and all "
            "ranks are on one: it has no effect"
        )


def _without_gradients(label: str) -> str:
    return (
        f"no rank has a gradient in the first exchange of {label}, so nothing was averaged. If the "
        "optimizer computes its gradients in step(), or keeps them elsewhere than in its "
        "parameters, each rank trains alone: register_adapter() tells horo_lite where they are, "
        f"and average_gradients() averages any tree of arrays. {drift.OFF}"
    )


class _StepRanks:
    """Implements `Ranks`: numbers the calls, so that ranks with different ones are told."""

    def __init__(self, group: Group, label: str, weight: float | None) -> None:
        self.size = group.size
        self._group, self._label, self._weight = group, label, weight
        self._n_calls = 0

    @property
    def share(self) -> float:
        if self._weight is None:
            return 1 / self.size
        total = np.array([self._weight])
        self._group.exchange([total], names=["weight"], label=self._next_label(), op=Sum)
        return float(self._weight / total[0])

    def average(self, arrays: Sequence[Any]) -> None:
        names = [str(i) for i in range(len(arrays))]
        label = self._next_label()
        self._group.exchange(arrays, names=names, label=label, weight=self._weight)

    def allgather(self, array: Any) -> list[Any]:
        lengths = ops.allgather(np.array([len(array)]), name=self._next_label(), group=self._group)
        everyone = ops.allgather(array, name=self._next_label(), group=self._group)
        ends = np.cumsum(lengths).tolist()
        return [everyone[end - n : end] for n, end in zip(lengths.tolist(), ends, strict=True)]

    def _next_label(self) -> str:
        self._n_calls += 1
        return f"{self._label}, call {self._n_calls}"


def _which_try(attempt: int) -> str:
    return f"try {attempt} of the backward pass"


def _some_of(names: Sequence[str]) -> str:
    return (
        ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
    )


def _entry(name: str, array: Any) -> Entry:
    if array is None:
        return Entry(name, "unknown", (), 0)
    dtype = str(array.dtype).removeprefix("torch.")
    return Entry(name, dtype, tuple(array.shape), array.dtype.itemsize)
