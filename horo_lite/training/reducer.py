"""Executes a plan: `ready(i)` when gradients are complete, `finish()` at the end of a step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

from horo_lite.collectives.arrays import HOST, gpu_of
from horo_lite.collectives.compression import Compression, Compressor, OwnCompressor
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import Adasum, AnyOp, Average, checked_weight
from horo_lite.errors import MismatchError, NonFiniteError, PeerLostError, StallError, warn
from horo_lite.recording import recorder
from horo_lite.training.gradient_memory import (
    NONE,
    Finding,
    find_non_finite,
    gradients_of,
    in_words,
    tensors_of,
)
from horo_lite.training.overlap import Overlap
from horo_lite.training.plan import (
    DEFAULT_BUCKET_BYTES,
    NOTHING,
    Entry,
    Plan,
    hash63,
    merge,
    who_has,
)
from horo_lite.transports.agreement import (
    Report,
    exchange_reports,
    exchange_texts,
    explain,
    not_joined,
)

if TYPE_CHECKING:
    from horo_lite.adapters import Adapter
    from horo_lite.collectives.group import Group
    from horo_lite.transports import Transport
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


_numbers: WeakKeyDictionary[Group, _Numbers] = WeakKeyDictionary()


class Offer(NamedTuple):
    """What a rank reports to the others after a difference was detected."""

    plan: Plan  # of this step, on this rank
    agreed: Plan | None  # the plan under which buckets may have left
    n_begun: int  # how many buckets have left
    step: str
    attempt: int
    note: Any
    finding: Finding | None
    rates: tuple[float, ...]
    failure: str


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
    `abandon()`: what has not been executed yet is withdrawn, and the step's next attempt has
    another number, which is part of the label that is matched. So gradients of two attempts are
    never combined. If ranks call `finish()` in different attempts, and some bucket was executed
    with gradients that a rank has abandoned since, every rank raises MismatchError; otherwise they
    continue.

    A gradient that only some ranks have counts as zeros on the others, which receive the result,
    too. A gradient that no rank has stays as it is.

    `title` describes what is exchanged, in the same way on all ranks; by default, the gradients of
    an optimizer that is numbered at its first step.

    With `check_finite`, "raise" or "warn", `finish()` reports gradients that were not finite on
    some rank before the exchange, on all ranks, after everything has been exchanged.
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
        title: str | None = None,
    ) -> None:
        self.group = group
        self._adapter = adapter
        self._op = op
        self._compression = compression
        self._bucket_bytes = bucket_bytes
        self._passes = passes
        self._streams = streams
        self._overlap = overlap or Overlap.of(group)
        self._how: dict[str, Any] = {  # arguments of every exchange
            "op": op,
            "prescale_factor": prescale_factor,
            "postscale_factor": postscale_factor,
        }
        self.options = {
            "op": op.name,
            "compression": str(compression.name),
            "backward_passes_per_step": str(passes),
            "check_finite": str(check_finite),
            **dict(options),
        }
        self._check_finite = check_finite
        self._finding: Finding | None = None
        self._findings: dict[int, Finding | None] = {}
        self._failure = ""  # why this rank cannot take part
        self.shared: SharedMemory | None = None  # gradients in it are reduced in place
        self.all_are_here = True  # no rank had joined when the last exchange ended
        self.rates: tuple[float, ...] = ()  # this rank's learning rates: must be equal on all
        self.note: Any = ""  # for the other ranks: has a text, and can be pickled
        self.notes: dict[int, Any] = {}
        self._title = title
        self._number = 0
        self._position = ""
        self._step = ""  # identifies the optimizer and its exchange
        self._attempt = 1
        self._label = ""  # step and attempt
        self._weight: float | None = None
        self._parameters: list[tuple[str, Any]] = []
        self._handles: list[Handle] = []
        self._place: int | None = None
        self.bind(parameters)
        group.counting.add(self)

    def bind(self, parameters: Sequence[tuple[str, Any]], together: Sequence[int] = ()) -> None:
        """Use these named parameters from the next step on; cheap if nothing changed.

        `together` is that of `Plan`.
        """
        if (
            parameters
            and len(parameters) == len(self._parameters)
            and all(
                new is old and name == known
                for (name, new), (known, old) in zip(parameters, self._parameters, strict=True)
            )
        ):
            return
        if self._handles:
            raise RuntimeError("the parameters changed between ready() and finish()")
        self._parameters = list(parameters)
        self._together = tuple(together)
        self._plans: dict[object, Plan] = {}
        self._forget()
        self._reset()

    def reset_counts(self) -> None:
        """Restart: ranks that had joined are back, and know neither the plan nor the numbers."""
        self._forget()
        self._number = 0
        self._attempt = 1
        if not self._handles:
            self._reset()

    def _forget(self) -> None:
        self._agreed: Plan | None = None
        self._signatures: list[int] = []
        self._bucket_of: dict[int, int] = {}
        self._n_members: list[int] = []

    @property
    def weight(self) -> float | None:
        """This rank's weight in this step, such as its number of samples; None: equal weights.

        Set it before the step's first `ready()`, on every rank or on none; it is reset afterwards.
        """
        return self._weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        checked = None if weight is None else checked_weight(weight, self._op)
        if self._handles:
            raise RuntimeError("the weight must be set before the first ready() of the step")
        self._weight = checked

    @property
    def position(self) -> str:
        """The owner's description of the next exchange, the same on every rank."""
        return self._position

    @position.setter
    def position(self, position: str) -> None:
        self._position = position
        self._relabel()

    def _relabel(self) -> None:
        if self._title or self._number:
            title = self._title or f"gradients of optimizer {self._number}"
            self._step = f"{title}{self._position}"
            self._label = self._step
            if self._attempt > 1:
                self._label += f", attempt {self._attempt}"

    def ready(self, i: int) -> None:
        """Announce that the gradient of parameter i is ready; do not touch it until `finish()`."""
        n_ready = self._n_ready[i] = self._n_ready[i] + 1
        if n_ready < self._passes:
            return
        if n_ready > self._passes:
            name = self._parameters[i][0]
            self._n_ready[i] = self._passes
            raise RuntimeError(
                f"the gradient of {name!r} became ready {self._passes + 1} times before step(), "
                f"but backward_passes_per_step={self._passes}: call step() after that many passes"
            )
        self._overlap.begin()
        bucket = self._bucket_of.get(i) if self._streams else None
        if bucket is None or self._agreed is None:
            return
        self._n_awaited[bucket] -= 1
        while (
            self._n_awaited[bucket] == 0
            and (self._overlap.pays or self._agreed.gpu)
            and not self._changed
            and len(self._handles) < len(self._n_awaited)
            and self._n_awaited[len(self._handles)] == 0
        ):
            self._leave_early()

    def early(self) -> list[int]:
        """Return the parameters whose gradients `ready()` may send before all are complete.

        Those of the last bucket are not among them: with it, all gradients are complete, and
        `finish()` can send it without the engine.
        """
        last = len(self._n_members) - 1
        return [i for i, bucket in self._bucket_of.items() if bucket < last] if last > 0 else []

    def hold(self, i: int) -> bool:
        """Send nothing before `finish()`, since parameter i's gradient changes after it was ready.

        Returns False if it has already left.
        """
        self._changed = True
        return self._agreed is None or self._bucket_of.get(i, len(self._handles)) >= len(
            self._handles
        )

    def finish(self) -> None:
        """Exchange the remaining gradients, and wait for all results. Every rank calls it.

        Afterwards, `notes` contains every rank's `note`, by its number in the world.

        Raises:
            MismatchError: The ranks' plans differ.
        """
        try:
            self._finish()
            recorder.step()
            self._handles = []
            self._attempt = 1
            if any(self._findings.values()):
                self._report_findings()
        except (PeerLostError, StallError):
            raise  # this world can no longer be used
        except BaseException:
            self.abandon()
            raise
        finally:
            self._reset()

    def _finish(self) -> None:
        self._overlap.end()
        self.notes = dict.fromkeys(self.group.transport.ranks, self.note)
        try:
            mine = self._read()
        except Exception as error:
            self.fail(error)
        arrays, copied = self._own.arrays, self._own.copied
        if self._compares_later() and self._follow(mine, arrays, copied):
            return
        plan, n_begun = self._agree(mine)
        if plan is not mine:
            self._fill(plan, arrays, copied)
        rest = plan.travelling
        if n_begun and self._agreed is not None:
            early = {i for bucket in self._agreed.buckets[:n_begun] for i in bucket}
            rest = tuple(i for i in rest if i not in early)
            for bucket in self._agreed.buckets[len(self._handles) : n_begun]:
                self._send(self._agreed, bucket, [arrays[i] for i in bucket])
        if rest:
            names = [self._parameters[i][0] for i in rest]
            self._exchange([arrays[i] for i in rest], names, self._label, shared=self.shared)
        for handle in self._handles:
            self.group.synchronize(handle)
        if copied:
            self._write_back(plan, copied)
        self._adopt(plan, arrays)

    def _read(self) -> Plan:
        """Read this rank's gradients, and return the plan for them."""
        self._own = gradients_of(self._adapter, self._parameters)
        arrays = self._own.arrays
        if self._check_finite:
            begun = len(self._handles)
            here = [i for i in range(len(arrays)) if self._bucket_of.get(i, begun) >= begun]
            here.reverse()  # the order in which they leave
            self._scan(here, [arrays[i] for i in here])
        return self._describe(arrays)

    def fail(self, error: Exception) -> NoReturn:
        """Raise `error`, and MismatchError on the ranks that wait in `finish()`. Collective.

        On a GPU where ranks do not wait for each other, it is raised on this rank only.
        """
        if not self._compares_later():
            number = self.group.transport.ranks[self.group.rank]
            self._failure = f"rank {number}: {type(error).__name__}: {error}"
            try:
                with suppress(MismatchError):
                    self._agree(NOTHING)
            finally:
                self._failure = ""
        raise error

    def has_exchanged(self, i: int) -> bool:
        """Return whether the last exchange contained the gradient of parameter i, of any rank."""
        return self._agreed is not None and self._agreed.present[i]

    def compare_rates(self, rates: tuple[float, ...]) -> None:
        """Raise MismatchError on every rank if their learning rates differ. Collective."""
        self.rates, self.note = rates, ""
        try:
            self._agree(NOTHING)
        finally:
            self.rates = ()

    def abandon(self) -> None:
        """Give up this step, on this rank only, so that none of its buckets is in flight any more.

        When it returns, nothing writes into gradients, and the next gradients belong to another
        attempt. It does not wait for other ranks' programs.
        """
        if self._handles:
            self._withdraw()
            self._attempt += 1
        self._reset()

    def _withdraw(self) -> bool:
        """Withdraw everything in flight; return whether this rank's gradients were changed."""
        is_changed = (
            bool(self._handles) and type(self._compression).prepare is not Compressor.prepare
        )
        for handle in self._handles:
            if not handle.withdraw():
                is_changed = True
                with suppress(Exception):  # errors of this step no longer matter
                    self.group.synchronize(handle)
        if (self._handles or any(self._n_ready)) and self._agreed is not None and self._agreed.gpu:
            # Work queued on GPUs cannot be withdrawn: the ranks agree before they queue more.
            self._forget()
        self._handles = []
        return is_changed

    # This rank's gradients.

    def _describe(self, arrays: list[Any]) -> Plan:
        present = tuple([array is not None for array in arrays])
        options = (
            *self.options.items(),
            ("weighted", str(self._weight is not None)),
            ("memory", "host" if self._gpu() is None else "GPU"),
        )
        key = (present, self._own.tensors.signature, tuple(self._own.overlaps), options)
        if key not in self._plans:
            if len(self._plans) == 8:  # the set of gradients changes all the time
                self._plans.clear()
            self._plans[key] = Plan(
                entries=tuple(
                    _entry(name, None if array is None else array)
                    for (name, _), array in zip(self._parameters, arrays, strict=True)
                ),
                present=present,
                owners=self._own.owners(self._parameters),
                bucket_bytes=self._bucket_bytes,
                wire=self._compression.wire,
                options=options,
                together=self._together,
            )
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
                arrays[i] = self._adapter.zeros_like(value)
            else:
                arrays[i] = self._adapter.missing(parameter, entry.dtype, entry.shape)
            copied[i] = arrays[i]

    # Non-finite gradients.

    def _scan(self, chosen: Sequence[int], arrays: Sequence[Any]) -> None:
        """Record whether these gradients are finite; arrays[k] is the gradient of chosen[k]."""
        names = [self._parameters[i][0] for i in chosen]
        named = list(zip(names, arrays, strict=True))
        self._finding = find_non_finite(named, self._finding)

    def _report_findings(self) -> None:
        text = in_words(self._findings, self._label)
        if self._check_finite == "raise":
            raise NonFiniteError(text)
        if self.group.rank == 0:
            warn(text)

    # On a GPU with NCCL, where a step does not wait for the other ranks' programs.

    def _compares_later(self) -> bool:
        agreed = self._agreed
        if agreed is None or not agreed.gpu or self._op is Adasum:
            return False
        if isinstance(self._compression, OwnCompressor):
            return False
        return self.group.compares_later(self._gpu())

    def _gpu(self) -> int | None:
        """Return the GPU of the gradients; None for host memory."""
        if len(self._own.tensors):
            self._place = self._own.tensors.device
        elif self._place is None:  # no gradient yet: assume that it is where its parameter is
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
        plan = self._agreed
        assert plan is not None
        follows = mine == plan
        begun = len(self._handles)
        if follows or mine.lacks_only_some_of(plan):
            full, zeros = list(arrays), dict(copied)
            self._fill(plan, full, zeros)
            batches = list(plan.buckets[begun:]) if self._streams else [plan.travelling]
        else:
            early = {i for bucket in plan.buckets[:begun] for i in bucket}
            batches = [tuple(i for i in mine.travelling if i not in early)]
            full, zeros = arrays, copied
        for batch in filter(None, batches):
            if not self._send(plan, batch, [full[i] for i in batch], follows):
                return False
            follows = True
        if zeros:
            self._write_back(plan, zeros)
        return True

    # All ranks' gradients.

    def _agree(self, mine: Plan) -> tuple[Plan, int]:
        """Return the common plan, and how many buckets of the last plan some rank has begun."""
        if not (self._title or self._number):
            if self.group not in _numbers:
                _numbers[self.group] = _Numbers(self.group)
            self._number = next(_numbers[self.group])
            self._relabel()
        plan, n_begun, total_weight = self.group.direct(
            lambda transport: self._meet(transport, mine)
        )
        if total_weight <= 0:
            self._begin_attempt(self._attempt + 1)
            raise ValueError("every rank passed weight 0 in this step: at least one needs samples")
        return plan, n_begun

    def _meet(self, transport: Transport, mine: Plan) -> tuple[Plan, int, float]:
        agreed = 0 if self._agreed is None else self._agreed.digest
        recorder.operation(self._label, "agree")
        headers = transport.agree(
            hash63(
                f"{self._label} {agreed} {mine.digest} {self.note} {self._finding} "
                f"{shown(self.rates)} {self._failure}"
            ),
            count=len(self._handles),
            weight=self._own_weight,
            label=self._label,
        )
        recorder.begin()
        here = not_joined(headers)
        self._findings = {transport.ranks[r]: self._finding for r in here}
        self.all_are_here = len(here) == len(headers)
        if len({headers[r].digest for r in here}) == 1:
            plan, n_begun = mine, max(headers[r].count for r in here)
            if len(here) < len(headers):
                # Ranks that have joined take part in the exchange, but not in this.
                exchange_texts(transport, "")
        else:
            plan, n_begun = self._settle(mine, here)
        return plan, n_begun, sum(header.weight for header in headers)

    def _settle(self, mine: Plan, here: Sequence[int]) -> tuple[Plan, int]:
        """Return a common plan of the ranks `here`, whose plans differ, if that is possible."""
        offer = Offer(
            mine,
            self._agreed,
            len(self._handles),
            self._step,
            self._attempt,
            self.note,
            self._finding,
            self.rates,
            self._failure,
        )
        everyone = exchange_reports(self.group.transport, Report(self._label, offer))
        reports, ranks = [everyone[r] for r in here], [self.group.transport.ranks[r] for r in here]
        offers: list[Offer] = [report.data for report in reports]
        if not all(isinstance(offer, Offer) for offer in offers):  # peers are in another call
            raise MismatchError(explain(self._label, [report.text for report in reports], ranks))
        self.notes = dict(zip(ranks, (offer.note for offer in offers), strict=True))
        self._findings = dict(zip(ranks, (offer.finding for offer in offers), strict=True))
        n_begun = max(offer.n_begun for offer in offers)
        attempts = [offer.attempt for offer in offers]
        try:
            failures = [offer.failure for offer in offers if offer.failure]
            if failures:
                raise MismatchError(
                    f"{self._step} cannot be exchanged, because of an error on another rank, "
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
            if not all(_are_close(offer.rates, offers[0].rates) for offer in offers):
                rates = who_has([shown(offer.rates) for offer in offers], ranks)
                raise MismatchError(
                    f"The ranks' learning rates differ: {rates}, so their parameters would "
                    "diverge. Give a scheduler the same number on every rank (allreduce() the "
                    "loss that it follows), and call broadcast_optimizer_state() if only one rank "
                    "has loaded a checkpoint."
                )
            if len(set(attempts)) > 1:
                self._join_attempts(attempts, here)
                return plan, 0
            if n_begun and len({offer.agreed for offer in offers}) > 1:
                sent = [f"sent {offer.n_begun} buckets" for offer in offers]
                raise MismatchError(
                    f"The ranks' plans come from different steps: {who_has(sent, ranks)} "
                    "before step(), and some do not know these. Create, change and step the "
                    "optimizer in the same way on every rank."
                )
        except MismatchError:
            self._begin_attempt(max(attempts) + 1)
            raise
        return plan, n_begun

    def _join_attempts(self, attempts: Sequence[int], here: Sequence[int]) -> None:
        """Continue with one attempt, from its beginning; MismatchError if gradients were mixed."""
        transport = self.group.transport
        is_changed = self._withdraw()
        headers = transport.agree(hash63(self._step), count=int(is_changed), label=self._step)
        if len(here) < len(headers):
            exchange_texts(transport, "")
        ranks = [transport.ranks[r] for r in here]
        mixed = [transport.ranks[r] for r in here if headers[r].count]
        if mixed:
            who = who_has([f"attempt {attempt}" for attempt in attempts], ranks)
            what = ["gradients that were averaged with abandoned ones"] * len(mixed)
            raise MismatchError(
                "A backward pass was abandoned on some ranks, after an error or an interrupt, and "
                f"finished on others: of {self._step}, {who}. So {who_has(what, mixed)}. Drop the "
                "gradients of this step on every rank with zero_grad(), and continue with the next "
                "batch."
            )
        self._attempt = max(attempts)
        self._relabel()

    def _begin_attempt(self, number: int) -> None:
        """Give up this attempt, as all ranks do, and give the next one that number."""
        self._withdraw()
        self._attempt = number

    # Sending.

    def _leave_early(self) -> None:
        assert self._agreed is not None
        number = len(self._handles)
        bucket = self._agreed.buckets[number]
        arrays = [self._adapter.gradient(self._parameters[i][1]) for i in bucket]
        # A gradient that differs from the plan, and all after it, wait for finish(), where the
        # ranks determine whether it changed on all of them.
        try:
            tensors = tensors_of(arrays)
            self._changed = tensors.signature != self._signatures[number] or bool(
                tensors.overlaps()
            )
        except (TypeError, ValueError, BufferError):
            self._changed = True
        if not self._changed:
            if self._check_finite:
                self._scan(bucket, arrays)
            self._send(self._agreed, bucket, arrays)

    def _send(
        self, plan: Plan, bucket: tuple[int, ...], arrays: list[Any], follows: bool = True
    ) -> bool:
        names = [plan.entries[i].name for i in bucket]
        number = len(self._handles) + 1
        label = f"{self._label}, bucket {number} of {len(plan.buckets)} ({_some_of(names)})"
        if plan.gpu and self._compares_later():
            # A stream keeps operations in order, so names need not be matched.
            sent = self._exchange(arrays, names, label, follows=follows)
            if sent:
                self._handles.append(Handle(label, None, lambda: None))
            return bool(sent)
        exchange = self.group.exchange_async
        self._handles.append(self._exchange(arrays, names, label, exchange, shared=self.shared))
        return True

    def _exchange(
        self,
        arrays: Sequence[Any],
        names: Sequence[str],
        label: str,
        exchange: Callable[..., bool | Handle] | None = None,
        **how: Any,
    ) -> Any:
        """Call `exchange`, by default that of the group, and return its result."""
        how |= self._how | {"names": names, "label": label, "weight": self._weight}
        wire, sent, restored = self._compression.compressed(arrays)
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

    def _write_back(self, plan: Plan, copied: dict[int, Any]) -> None:
        for i, owner in enumerate(plan.owners):
            if plan.present[i] and owner in copied:
                self._adapter.set_gradient(self._parameters[i][1], copied[owner])

    def _adopt(self, plan: Plan, arrays: list[Any]) -> None:
        """Let buckets leave early under `plan` from now on."""
        if self._agreed == plan:
            return
        self._agreed = plan
        self._signatures = [tensors_of([arrays[i] for i in b]).signature for b in plan.buckets]
        # Memory shared by several parameters is complete when all of them are ready.
        of_owner = {i: number for number, bucket in enumerate(plan.buckets) for i in bucket}
        self._bucket_of = {
            i: of_owner[owner] for i, owner in enumerate(plan.owners) if plan.present[i]
        }
        members = Counter(self._bucket_of.values())
        self._n_members = [members[number] for number in range(len(plan.buckets))]

    def _reset(self) -> None:
        """Begin a new step, in which nothing is ready or in flight."""
        self._overlap.forget()
        self._weight = None
        self._finding = None
        self._findings = {}
        self._changed = False
        self._relabel()  # the attempt may have changed
        self._handles = []
        self._own = NONE  # do not keep gradients alive that the caller drops
        self._n_ready = [0] * len(self._parameters)
        self._n_awaited = list(self._n_members)

    @property
    def _own_weight(self) -> float:
        return 1.0 if self._weight is None else self._weight


def learning_rates(param_groups: Any) -> tuple[float, ...]:
    """Return the learning rates of groups like torch's, as far as they are numbers."""
    rates = [group.get("lr") for group in param_groups if isinstance(group, dict)]
    return tuple(rate for rate in rates if isinstance(rate, (int, float)))


def shown(rates: tuple[float, ...]) -> str:
    """Return the learning rates in words, rounded as they are compared."""
    return ", ".join([f"{rate:.6g}" for rate in rates]) or "none"


def _are_close(rates: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Return whether rates are equal up to the last digits, which may depend on libraries."""
    return len(rates) == len(others) and all(
        math.isclose(rate, other, rel_tol=1e-6) or (math.isnan(rate) and math.isnan(other))
        for rate, other in zip(rates, others, strict=True)
    )


def _some_of(names: Sequence[str]) -> str:
    return (
        ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} and {len(names) - 2} more"
    )


def _entry(name: str, array: Any) -> Entry:
    if array is None:
        return Entry(name, "unknown", (), 0)
    dtype = str(array.dtype).removeprefix("torch.")
    return Entry(name, dtype, tuple(array.shape), array.dtype.itemsize)
