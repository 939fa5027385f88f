"""Exchange of one optimizer's gradients: in backward(), and in step() if some are left."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch

from horo_lite.adapters.torch import parameters_of, resolved, with_own_version
from horo_lite.collectives.adasum import check_size
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Adasum, Average, Sum, checked_weight
from horo_lite.collectives.shared_memory import share
from horo_lite.context import is_initialized, on_renewed, world
from horo_lite.errors import NonFiniteError, ranks_in_words, warn
from horo_lite.horovod.process_sets import group_of_member
from horo_lite.state.drift import DriftCheck
from horo_lite.torch import bucket_views, sparse
from horo_lite.torch.passes import graph_task, notify_at_end
from horo_lite.torch.shared_parameters import make_own
from horo_lite.torch.slots import Slot, SlotAdapter, is_sparse
from horo_lite.torch.submission import none_instead_of
from horo_lite.torch.uncompiled import uncompiled
from horo_lite.training import step_record
from horo_lite.training.closures import averaging, closure_of, with_closure
from horo_lite.training.hyperparameters import Hyperparameters, digest, hyperparameters
from horo_lite.training.options import Options
from horo_lite.transports.shm import SharedMemory

# An attribute of each gradient: where it comes from. This distinguishes a gradient that zero_grad()
# or the user has replaced from one that is added to.
_MARK = "_horo_lite_origin"
_COMPUTED = 0  # by backward(), or by that of other ranks
_BY_HAND = -1  # assigned by the user, who may write the next step's values into the same tensor
# The version of a gradient that was exchanged without a call of the hook.
_TAKEN = "_horo_lite_taken"

WEIGHT_COMES_FIRST = (
    "torch's gradients are exchanged in backward(). Call optimizer.set_weight(n) on every rank "
    "before backward(), with its number of samples"
)

# The exchange of each parameter, by the parameter's id, to prevent averaging a gradient twice.
_owner_of: dict[int, weakref.ref[GradientExchange]] = {}
# Exchanges in a world of one rank, which own no parameters until the world grows.
_alone: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
# Those whose set_weight() was called.
_weighted: weakref.WeakSet[GradientExchange] = weakref.WeakSet()
_numbers = itertools.count()

IN_BACKWARD, IN_SYNCHRONIZE, IN_STEP = range(3)


class Note(NamedTuple):
    """What the ranks tell each other with an exchange."""

    where: int  # the exchange is: in backward(), in synchronize(), or in step()
    hyperparameters: str  # their digest, which may be different until step() uses them
    were_sparse: dict[int, int]  # with sparse_as_dense: the sparse dimensions, 0 of a dense one


@dataclass(slots=True, eq=False)
class BackwardPass:
    """What belongs to one outermost backward pass, and is dropped when it ends or has failed."""

    tasks: set[int] = field(default_factory=set)  # graph tasks whose end the exchange learns about
    is_broken: bool = False  # it has ended with an error


@dataclass(slots=True, eq=False)
class Step:
    """What belongs to one step of the optimizer: dropped when zero_grad() or step() begins another.

    What belongs to one exchange is in the reducer's own Step.
    """

    weight: float | None = None  # this rank's
    weight_is_used: bool = False
    is_due: bool = True  # nothing was exchanged
    later: list[int] = field(default_factory=list)  # ranks that receive later what this one has
    until: int = IN_BACKWARD  # where the last of them does
    exchanged: list[tuple[Slot, Any, int]] = field(default_factory=list)  # what they receive
    is_late: bool = False  # this rank receives in step() what others have before
    failed: list[tuple[Slot, Any]] = field(default_factory=list)  # undefined since an exchange


class GradientExchange:
    """Exchanges the gradients of one optimizer."""

    def __reduce__(self) -> Any:
        """Leave it out of copies of an optimizer's dictionary, since hooks refer to it."""
        return type(None), ()

    def __init__(
        self, optimizer: Any, named: list[tuple[str, Any]] | None, options: Options
    ) -> None:
        self.number = next(_numbers)
        self.options = options
        self.op = options.op
        self._base = type(optimizer)
        self._inner = weakref.ref(optimizer)
        # Another one with the same attributes, as the wrapped one is, which keeps neither alive.
        self._optimizer: Any = object.__new__(self._base)
        self._optimizer.__dict__ = optimizer.__dict__
        self._names = _names(named, self._parameters())
        self._drift = DriftCheck(options.check_every, options.on_drift)
        self.patched_step: Any = None
        self._is_skipping = False
        self._is_stepping = False
        self._differs = False  # hyperparameters, as far as all ranks know
        self.is_scaled = False  # by a GradScaler, which knows whether gradients are unscaled
        self._is_watched = False
        self._before: list[int] | None = None  # versions of parameters at the step's first pass

        self._of_id: dict[int, Slot] = {}
        self._finalizer = weakref.finalize(self, _release, self._of_id)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.is_nested = False  # there were passes inside passes, which may touch a slot twice
        self.follow_world()

    def follow_world(self) -> None:
        """Use the ranks of the current world."""
        self.group = group_of_member(self.options.group)
        self.active = self.group is not None and (self.group.size > 1 or step_record.is_on())
        self.slots: list[Slot] = []
        self._seen: list[Any] = []  # their parameters
        self._step = Step()
        self._pass = BackwardPass()  # the current or next one
        for slot in self._of_id.values():
            slot.begin()
            slot.view = None
        _alone.discard(self)
        if not self.active:
            if is_initialized() and self.group is world().group:
                _alone.add(self)
            return
        assert self.group is not None
        options = self.options
        factor, compression = float(options.gradient_predivide_factor), options.compression
        if self.op is Adasum:
            check_size(self.group.size)
            compression = none_instead_of(compression, self.group)
        self.reducer = options.reducer(
            self._make_adapter(),
            [],
            self.group,
            compression=compression,
            passes=1,  # passes are counted here
            prescale_factor=1 / factor,
            postscale_factor=factor,
            state=None if options.shard_state else _state_of(weakref.ref(self)),
            options=[
                *options.compared,
                ("backward_passes_per_step", str(options.backward_passes_per_step)),
            ],
        )
        self._shares = bool(
            options.gradient_as_bucket_view
            and self.op is not Adasum
            and factor == 1
            and options.wire is compression
            and compression.wire == "none"
            and bucket_views.can_share(self.group)
        )
        self._memory: SharedMemory | None = None
        self.look_at_parameters()
        self._count_anew()
        self.group.counting.add(self)

    def _make_adapter(self) -> SlotAdapter:
        """Return the reducer's access to the gradients in slots."""
        return SlotAdapter()

    # The parameters.

    def inner(self) -> Any:
        """Return the optimizer that was wrapped, or an equal one if it no longer exists."""
        inner = self._inner()
        return self._optimizer if inner is None else inner

    def named(self) -> list[tuple[str, Any]]:
        return [
            (self._names.get(parameter, name), parameter) for name, parameter in self._parameters()
        ]

    def kept(self) -> Iterator[tuple[str, Any]]:
        """Yield what the optimizer keeps for each parameter, in an order that all ranks have."""
        state = getattr(self._optimizer, "state", None) or {}
        for name, parameter in self.named():
            of_parameter: Any = state.get(parameter)
            for key in sorted(of_parameter, key=str) if isinstance(of_parameter, dict) else ():
                x = of_parameter[key]
                is_plain = type(x) is torch.Tensor and x.layout is torch.strided
                if isinstance(x, (int, float)) or (is_plain and x.device.type != "meta"):
                    yield f"{name} {key}", x

    def _parameters(self) -> list[tuple[str, Any]]:
        return parameters_of(self._optimizer.param_groups)

    def look_at_parameters(self, *, with_gradients: bool = False) -> None:
        """Update the slots to the current parameters, and register missing hooks.

        Existing gradients of new parameters take part in the next exchange. `with_gradients`, no
        hook has seen these: they are treated as assigned by hand.
        """
        if not self.active:
            return
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        if len(parameters) != len(self.slots) or not all(map(is_, parameters, self._seen)):
            named = self.named()
            self._check_owned_once(named)
            for name, parameter in named:
                if torch.nn.parameter.is_lazy(parameter):
                    raise ValueError(
                        f"parameter {name!r} is uninitialized, as in a lazy module, so it has no "
                        "shape yet: call the module with a batch on every rank, and then "
                        "broadcast_parameters(), before its parameters are in a "
                        "DistributedOptimizer"
                    )
            self.slots = []
            for i, (name, parameter) in enumerate(named):
                slot = self._of_id.get(id(parameter))
                if slot is None:
                    slot = self._of_id[id(parameter)] = Slot(name, parameter)
                    if parameter.layout is torch.strided:
                        make_own(parameter)
                    if parameter.grad is not None and not with_gradients:
                        setattr(parameter.grad, _MARK, _COMPUTED)
                        slot.touched = True
                        slot.see()
                slot.index = i
                self.slots.append(slot)
                _owner_of[id(parameter)] = weakref.ref(self)
            gone = self._of_id.keys() - {id(parameter) for _, parameter in named}
            _release(former := {i: self._of_id.pop(i) for i in gone})
            for slot in former.values():
                self._names.pop(slot.parameter, None)
            self.reducer.bind([(slot.name, slot) for slot in self.slots], self._together())
            self._seen = parameters
            self._make_views()
            self._add_hooks()

    def _check_owned_once(self, named: list[tuple[str, Any]]) -> None:
        here: set[int] = set()
        for name, parameter in named:
            if id(parameter) in here:
                raise ValueError(
                    f"parameter {name!r} is in the optimizer's param_groups twice: list it once"
                )
            here.add(id(parameter))
            owner = _owner_of.get(id(parameter), nobody)()
            if owner is not None and owner is not self:
                raise ValueError(
                    f"parameter {name!r} belongs to another DistributedOptimizer, so its "
                    "gradient would be exchanged twice: pass each parameter to only one of them, "
                    "and delete one that is no longer used"
                )

    def _add_hooks(self) -> None:
        for slot in self.slots:
            parameter = slot.parameter
            can_have = parameter.is_floating_point() or parameter.is_complex()
            if slot.hook is not None or not can_have or parameter.is_inference():
                continue
            requires_grad = parameter.requires_grad
            parameter.requires_grad_(True)  # a frozen one refuses hooks, and may be unfrozen later
            hook = _hook(weakref.ref(self), slot)
            slot.hook = parameter.register_post_accumulate_grad_hook(hook)
            slot.attributes = parameter.__dict__
            if self.refuses_additions:
                slot.zeros_hook = parameter.register_hook(_begin_if_zero(slot))
            parameter.requires_grad_(requires_grad)

    def _together(self) -> list[int]:
        groups = self.options.groups or self.options.num_groups
        if isinstance(groups, int):
            n = len(self.slots)
            return [i * groups // n for i in range(n)] if groups else []
        number = {id(p): g for g, group in enumerate(groups) for p in group}
        return [number.get(id(slot.parameter), -1) for slot in self.slots]

    @property
    def takes_part(self) -> bool:
        """Whether there are other ranks, and this is not a forked child of one."""
        return self.active and os.getpid() == self._pid

    @property
    def refuses_additions(self) -> bool:
        """Whether there are gradients to which a pass cannot add once they are exchanged."""
        return self.op is not Average

    def why_not_added_to(self, slot: Slot) -> str:
        """Return why a pass cannot add to the result of an exchange; "" if it can."""
        if self.op is Average:
            return ""
        return f"with op={self.op.name} what was exchanged before would be added up again"

    @property
    def passes(self) -> int:
        return self.options.backward_passes_per_step

    def set_passes(self, passes: int) -> None:
        self.options = replace(self.options, backward_passes_per_step=passes)
        if self.active:
            self.reducer.options["backward_passes_per_step"] = str(passes)

    # During backward().

    def touch(self, slot: Slot) -> None:
        """Handle an addition to the gradient by a pass."""
        with self._lock:
            task = graph_task()
            if task not in self._pass.tasks and not self.enter(task):
                return
            if slot.hook is None:  # taken out of param_groups since the last pass
                return
            gradient = slot.parameter.grad
            if gradient is None or getattr(gradient, _TAKEN, None) == gradient._version:
                if gradient is None and slot.task != task:
                    raise RuntimeError(_taken_away(slot.name))
                return  # an earlier hook has called step(), and possibly zero_grad()
            if slot.last_pass is not self._pass and not hasattr(gradient, _MARK):
                slot.begin_another()  # the last one has been set to None
            if self.options.sparse_as_dense:
                self._densify(slot)
            if slot.last_pass is self._pass:  # a second time, by a pass inside this one
                self.is_nested = True  # nothing more is announced before finish()
                if self.reducer.has_left(slot.index):
                    raise RuntimeError(
                        "a backward pass inside another one, the first of its kind, added to the "
                        f"gradient of {slot.name!r} after it was sent. From now on, gradients are "
                        "sent after such passes: call zero_grad() and repeat this step"
                    )
                slot.move_to_shared_memory()
                slot.see()
                return
            if slot.passes and slot.has_changed(self._travels(slot), additions=1):
                raise RuntimeError(_changed_too_early(slot.name))
            if slot.is_result and (why := self.why_not_added_to(slot)):
                raise RuntimeError(_exchanged_already(slot, why, self.passes))
            slot.last_pass = self._pass
            slot.passes += 1
            slot.touched = True
            if slot.view is None:
                with_own_version(slot.parameter)
            gradient = slot.move_to_shared_memory()
            setattr(gradient, _MARK, _COMPUTED)
            slot.see()
            if slot.passes >= self.passes and not self.is_nested:
                self.reducer.ready(slot.index)

    def _densify(self, slot: Slot) -> None:
        """Make the gradient dense."""
        gradient = slot.parameter.grad
        if slot.make_dense() and hasattr(gradient, _MARK):
            setattr(slot.parameter.grad, _MARK, getattr(gradient, _MARK))

    def _make_sparse(self, slot: Slot, sparse_dim: int, is_by_hand: bool) -> None:
        """Give the optimizer a sparse gradient again, as SparseAdam needs it."""
        gradient = slot.parameter.grad
        if gradient is not None and not is_sparse(gradient):
            slot.parameter.grad = gradient.detach().to_sparse(sparse_dim)
            self._mark(slot, _BY_HAND if is_by_hand else _COMPUTED)

    def _travels(self, slot: Slot) -> bool:
        """Return whether the gradient was announced to the reducer: it must not change any more."""
        return self.reducer.n_ready[slot.index] > 0

    def enter(self, task: int) -> bool:
        """Request notification of the graph task's end; return False if nothing is exchanged."""
        if task in self._pass.tasks:
            return True
        if not self.takes_part:
            return False
        self._mend()
        self._use_weight()
        if not self._pass.tasks:  # zero_grad() has not seen these if it was the module's
            self.look_at_parameters()
            if self._is_watched and self._before is None:
                self._before = self._versions()
        self._pass.tasks.add(task)
        notify_at_end(task, self)
        return True

    def end_pass(self) -> None:
        """Exchange what is complete: the outermost backward() is about to return."""
        with self._lock:
            ended, self._pass = self._pass, BackwardPass()
            if self.passes > 1:  # otherwise the exchange finds out, on all ranks
                for slot in self.slots:
                    if slot.last_pass is ended and slot.parameter.grad is None:
                        self.reducer.abandon()  # others were announced, and may have left
                        raise RuntimeError(_taken_away(slot.name))
            if any(slot.touched and slot.passes >= self.passes for slot in self.slots):
                self.exchange()

    def break_pass(self, task: int) -> None:
        """Note that a pass has ended with an error; this notification may be late."""
        self._pass.is_broken |= task in self._pass.tasks

    def _mend(self, drops: bool = False) -> None:
        """Give up what a pass that has ended with an error, or is to be dropped, has sent."""
        if self._pass.is_broken or (drops and self._pass.tasks):
            self.reducer.abandon()
            self._pass = BackwardPass()

    # Outside backward().

    def set_weight(self, weight: float) -> None:
        weight = checked_weight(weight, self.op)
        with self._lock:
            self._mend()
            # The module's zero_grad() has begun a step, after one that GradScaler has skipped?
            own = [slot for slot in self.slots if slot.exchanged or slot.touched]
            is_held = any(slot.parameter.grad is not None for slot in own)
            if not (self._step.is_due or self._pass.tasks or is_held):
                self.begin_step()
            if self._pass.tasks or not self._step.is_due:
                raise RuntimeError(
                    "set_weight() comes too late: gradients of this step have been exchanged. "
                    "Call it before backward(), and after the zero_grad() that begins a step"
                )
            self._step.weight, self._step.weight_is_used = weight, False
            _weighted.add(self)

    def _use_weight(self) -> None:
        self._step.weight_is_used = True
        if self.reducer.weight != self._step.weight:
            self.reducer.weight = self._step.weight

    def begin_step(self) -> list[Slot]:
        """Begin another step, and discard a used weight unless a closure calls this.

        Returns:
            Those whose gradients were not exchanged: other ranks may have none.
        """
        pending = [slot for slot in self.slots if slot.touched]
        if self._step.weight_is_used and not self._is_stepping:
            self._step.weight = None
        self.begin()
        for slot in self.slots:
            slot.is_result = False
        self.look_at_parameters()  # before backward(), which sends only what has a hook
        return pending

    def take_zeros(self, pending: list[Slot]) -> None:
        """Accept the zeros of zero_grad(), so that a hook does not take them for an addition.

        Those `pending` take part in the next exchange, so that all ranks have them.
        """
        for slot in self.slots:
            gradient = slot.parameter.grad
            if hasattr(gradient, _TAKEN):
                setattr(gradient, _TAKEN, gradient._version)
        for slot in pending:
            slot.touched = slot.parameter.grad is not None

    def begin(self, *, keeps_pending: bool = False) -> None:
        """Begin other gradients, after zero_grad() or step().

        If it `keeps_pending` ones, those that passes have touched since the last exchange take part
        in the next one.
        """
        with self._lock:
            # Outside of backward(), a pass that is not over has ended without a report.
            self._mend(drops=graph_task() < 0 and not keeps_pending)
            self._step = Step(self._step.weight, self._step.weight_is_used)
            for slot in self.slots:
                if not (keeps_pending and slot.touched):
                    slot.begin()
                slot.restore_hook()

    def flush(self, where: int = IN_SYNCHRONIZE) -> None:
        """Exchange the gradients that no backward() has exchanged, if there are any.

        Raises:
            RuntimeError: This rank has changed averages that others receive only here, or an
                exchange has failed before.
        """
        if not self.takes_part:
            return
        with self._lock:
            self._mend()
            if graph_task() < 0:  # over, too, if its end was not reported: see _hand_over
                self._pass = BackwardPass()
            self._check_defined()
            # A rank whose passes touched nothing joins the other ranks' exchange here.
            if self._is_left() or self._step.is_due:
                self.exchange(where)
            for slot, gradient, version in self._step.exchanged:
                if slot.parameter.grad is not gradient or gradient._version != version:
                    raise RuntimeError(
                        f"the gradient of {slot.name!r} was changed after backward(), for example "
                        f"by clipping, but {ranks_in_words(self._step.later)} had no backward() "
                        "for it and received the unchanged average later, so the ranks' steps "
                        "would differ: call optimizer.synchronize() on every rank before gradients "
                        "are changed"
                    )
            if where == self._step.until == IN_SYNCHRONIZE:  # all ranks have them now
                self._step.exchanged = []

    def _check_defined(self) -> None:
        """Raise RuntimeError if there are gradients whose exchange has failed, on every rank."""
        for slot, gradient in self._step.failed:
            if gradient is not None and slot.parameter.grad is gradient:
                raise RuntimeError(
                    f"the exchange of the gradient of {slot.name!r} has failed with an error, "
                    "which the program has caught, so the gradient is undefined: call "
                    "optimizer.zero_grad() on every rank, and repeat the backward passes"
                )

    def _is_left(self) -> bool:
        """Return whether there are gradients that no backward() has exchanged."""
        # A parameter added to param_groups has a gradient that no hook has seen.
        self.look_at_parameters(with_gradients=True)
        for slot in self.slots:
            slot.touched = slot.touched or self._is_by_hand(slot)
        return any(slot.touched for slot in self.slots)

    def _is_left_out(self) -> bool:
        """Return whether a step without an exchange would use gradients that need one.

        What the user assigns after synchronize() does not.
        """
        return self.is_between_passes or (self._step.is_due and self._is_left())

    @property
    def is_between_passes(self) -> bool:
        """Whether passes have added to gradients since the last exchange."""
        return any(slot.touched and slot.passes for slot in self.slots)

    def watch(self) -> None:
        """Watch from now on whether a step has begun to change parameters, and not ended."""
        self._is_watched, self._before = True, None

    @property
    def is_midway(self) -> bool:
        """Whether they have changed since the first pass that was watched, without a step."""
        return self._before is not None and self._before != self._versions()

    def _versions(self) -> list[int]:
        # Parameters that were made in inference mode have none, and no hook.
        return [slot.parameter._version for slot in self.slots if slot.hook is not None]

    def _is_by_hand(self, slot: Slot) -> bool:
        """Return whether this step has a gradient that no backward() has computed."""
        gradient = slot.parameter.grad
        if gradient is None or slot.exchanged:
            return False
        return bool(getattr(gradient, _MARK, _BY_HAND) == _BY_HAND)

    def _check_hyperparameters(self) -> None:
        """Raise MismatchError on every rank if they are about to step with different ones.

        They compare them here only if they have found a difference in an exchange: after that,
        broadcast_optimizer_state() may have removed it.
        """
        if self._differs:
            self.reducer.compare_hyperparameters(self._hyperparameters())
            self._differs = False

    def _hyperparameters(self) -> Hyperparameters:
        optimizer = self._optimizer
        return hyperparameters(optimizer.param_groups, getattr(optimizer, "defaults", ()))

    def _flush_in_closure(self) -> None:
        self.flush(IN_STEP)
        self._check_hyperparameters()

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Average what is left, and scale all gradients; see the optimizer's method."""
        self.flush()
        parameters = [parameter for _, parameter in self._parameters()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def check_scaling(self, is_fused: bool) -> None:
        """Raise if GradScaler, or a fused step, would check gradients of this rank only for inf."""
        if self._is_skipping or not self.takes_part:
            return
        is_left = self._is_left()
        if not is_left:
            self.flush(IN_STEP)
        if is_left or self._step.is_late:
            raise RuntimeError(
                "GradScaler would check gradients for inf that are not averaged yet, so each "
                "rank would decide separately whether to skip the step: if a step has fewer "
                "passes than backward_passes_per_step, a rank has no loss, or gradients are "
                "assigned by hand, call optimizer.synchronize() before scaler.unscale_() and "
                "scaler.step(), on every rank"
            )

    def step(
        self,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        weight: float | None,
    ) -> Any:
        """Average the gradients, call `step` and return its result; the weight is used up."""
        closure = closure_of(args, kwargs)
        if weight is not None:
            if closure is None:
                raise TypeError(f"step() takes no weight without a closure: {WEIGHT_COMES_FIRST}")
            self.set_weight(weight)
        if not self.active:
            return step(*args, **kwargs)
        try:
            if closure is not None:
                self._is_stepping = True
                averaged = self._averaging(self._after_averages(closure))
                args, kwargs = with_closure(averaged, args, kwargs)
            else:
                if not self._is_skipping:
                    self.flush(IN_STEP)
                elif self.takes_part:
                    self._check_defined()
                    if self._is_left_out():
                        raise RuntimeError(
                            "skip_synchronize() without synchronize(): every rank would step with "
                            "its own gradients. Call synchronize() first"
                        )
                self._check_hyperparameters()
            without = [slot for slot in self.slots if slot.parameter.grad is None]
            result = self.take_step(step, args, kwargs)
            if self.takes_part:
                self._check_gradients_of_step(without)
        finally:
            self._is_stepping = False
            self._step.weight = None
        self.begin()
        self._stepped()
        return result

    def _check_gradients_of_step(self, without: Sequence[Slot]) -> None:
        """Raise RuntimeError if step() has used gradients that it has computed or assigned itself.

        Those that were not averaged. The slots `without` had no gradient before.
        """
        for slot in self.slots:
            if slot.touched and slot.passes:
                raise RuntimeError(
                    "step() has used gradients of its own backward() that were not averaged, such "
                    f"as that of {slot.name!r}, since it has run fewer passes than "
                    "backward_passes_per_step, so each rank has taken another step: create the "
                    "DistributedOptimizer with backward_passes_per_step=1"
                )
        for slot in filter(self._is_by_hand, without):
            gradient = slot.parameter.grad
            if is_sparse(gradient) or gradient.any():  # zeros are the same on all ranks
                raise RuntimeError(
                    f"step() has assigned {slot.name!r} a gradient, which was not averaged, so "
                    "each rank has taken another step: if it is an optimizer around another one, "
                    "with copies of the parameters in another precision, pass that one to "
                    f"DistributedOptimizer, and the result to {self._base.__name__}"
                )

    def take_step(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Update the parameters with averaged gradients."""
        return step(*args, **kwargs)

    def _stepped(self) -> None:
        """Count a completed step, and compare the ranks' parameters if that is due."""
        self._n_exchanges = 0
        self._before = None
        assert self.group is not None
        try:
            self._drift.stepped(self.named, self.group)
        finally:
            self._place()

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Disable the exchange in step() inside the block."""
        self._is_skipping = True
        try:
            yield
        finally:
            self._is_skipping = False

    def _after_averages(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure`, which fails if step() has used gradients that were not averaged yet.

        As in sharpness-aware minimization, which first follows the gradients at hand.
        """
        if not self.takes_part or not any(s.touched or self._is_by_hand(s) for s in self.slots):
            return closure

        before = self._versions()

        @wraps(closure)
        def checked() -> Any:
            if before and before != self._versions():
                self.reducer.fail(
                    RuntimeError(
                        "step() has changed parameters before it called its closure, by gradients "
                        "that had not been averaged, as after fewer passes than "
                        "backward_passes_per_step: call optimizer.synchronize() before it, on "
                        "every rank"
                    )
                )
            before.clear()
            return closure()

        return checked

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return `closure`, followed by averaging of gradients and loss."""

        @wraps(closure)
        def begun() -> Any:
            self.begin(keeps_pending=True)  # zero_grad() in the closure discards it
            return closure()

        assert self.group is not None
        return averaging(
            begun,
            self._flush_in_closure,
            group=self.group,
            op=Sum if self.op is Sum else Average,
            weight=lambda: self._step.weight,  # the closure may have set it
            like=_loss_like,
        )

    def exchange(self, where: int = IN_BACKWARD) -> None:
        reducer = self.reducer
        touched = [slot for slot in self.slots if slot.touched]
        were_sparse: dict[int, int] = {}
        if self.options.sparse_as_dense:
            for slot in touched:
                self._densify(slot)
            were_sparse = {s.index: s.sparse_dim for s in touched if s.parameter.grad is not None}
        note = Note(where, digest(self._hyperparameters()), were_sparse)
        n_ready = reducer.n_ready
        changed = [slot for slot in touched if slot.has_changed(n_ready[slot.index] > 0)]
        for slot in changed:
            if not slot.passes:
                _warn_if_clipped(slot)
        changed = [slot for slot in changed if slot.passes]
        for slot in changed:
            if not self._travels(slot):
                try:
                    reducer.fail(RuntimeError(_changed_too_early(slot.name)))
                finally:
                    self._give_up(touched)
        by_hand = [slot for slot in touched if slot.passes == 0 and self._is_by_hand(slot)]
        for slot in touched:
            if slot.passes == 0 and slot.parameter.grad is not None:
                resolved(slot.parameter)
            if not n_ready[slot.index]:
                slot.move_to_shared_memory()
        self._use_weight()
        try:
            common = reducer.finish(note, rows=sparse.rows_of(touched))
            notes: dict[int, Note] = common.notes
            self._differs = len({note.hyperparameters for note in notes.values()}) > 1
            if common.plan.rows:
                assert self.group is not None
                how = self.group, self.op, self._step.weight, reducer
                for slot in sparse.exchange(common.plan.rows, self.slots, *how):
                    slot.touched = True
                    self._mark(slot, _COMPUTED)
            # All ranks have just agreed on a plan, and thus on the layout of their memory.
            if self._shares and reducer.shared is None and common.all_are_here:
                self._share()
            self._n_exchanges += 1
            self._step.failed = [pair for pair in self._step.failed if not pair[0].touched]
        except Exception as error:
            # NonFiniteError is raised when everything has been exchanged.
            self._give_up([] if isinstance(error, NonFiniteError) else touched)
            raise
        finally:
            self._step.is_due = False
            for slot in self.slots:
                if slot.touched:
                    is_computed = slot.passes > 0
                    slot.end_exchange()
                    if not is_computed:
                        self._mark(slot, _BY_HAND if slot in by_hand else _COMPUTED)
            self._place()
        # Sparse again only if it was sparse wherever it was touched.
        for i in set().union(*(note.were_sparse for note in notes.values())):
            n_dims = min(note.were_sparse[i] for note in notes.values() if i in note.were_sparse)
            if n_dims:
                self._make_sparse(self.slots[i], n_dims, self.slots[i] in by_hand)
        places = [note.where for note in notes.values()]
        self._step.is_late |= where == IN_STEP > min(places)
        if where < max(places):
            self._step.later = [rank for rank, note in notes.items() if note.where > where]
            self._step.until = max(places)
            self._step.exchanged = [
                (slot, gradient, gradient._version)
                for slot in self.slots
                if slot.exchanged and (gradient := slot.parameter.grad) is not None
            ]
        if changed:  # not raised earlier, since other ranks wait for this exchange
            raise RuntimeError(
                f"the gradient of {changed[0].name!r} was changed during backward() after it was "
                "sent, so this rank's gradient differs from the others': register the hook that "
                "changes it before creating the DistributedOptimizer, as Tensor.register_hook, or "
                "change gradients after backward()"
            )

    def _give_up(self, undefined: Sequence[Slot]) -> None:
        """Start counting again after an error on all ranks: they may have been in other steps."""
        self._count_anew()
        self._step.failed = [(slot, slot.parameter.grad) for slot in undefined]

    def _make_views(self) -> None:
        """Allocate memory for every gradient that other ranks will be able to access."""
        self.reducer.shared = None
        if self._shares:
            # In the order in which they travel, so that a bucket is contiguous.
            slots = self.slots[::-1]
            self._memory, views = bucket_views.views_of([slot.parameter for slot in slots])
            for slot, view in zip(slots, views, strict=True):
                slot.view = view

    def _share(self) -> None:
        """Reduce gradients in place from now on, if all ranks can. Collective."""
        assert self.group is not None
        if share(self.group, self._memory):
            self.reducer.shared = self._memory
            return
        if self.group.rank == 0:
            warn(
                "gradient_as_bucket_view=True, but the ranks cannot access each other's memory "
                "(do they run as one user, in one container?), or a rank could not allocate any: "
                "gradients are exchanged as without it"
            )
        self._shares = False
        self._memory = None
        for slot in self.slots:
            if not slot.is_copied:
                slot.view = None

    def _mark(self, slot: Slot, mark: int) -> None:
        """Mark a gradient that no backward() has computed as seen."""
        gradient = slot.parameter.grad
        if gradient is not None:
            setattr(gradient, _MARK, mark)
            setattr(gradient, _TAKEN, gradient._version)

    def reset_counts(self) -> None:
        """Start counting again: all ranks have joined, after different numbers of steps.

        The gradients that are left are of different steps, too, and ranks may lack some: unless
        zero_grad() makes them None, they take part in the next exchange.
        """
        self._count_anew()
        for slot in self.slots:
            slot.touched |= slot.parameter.grad is not None and not slot.exchanged

    def _count_anew(self) -> None:
        self._drift.reset_counts()
        self._n_exchanges = 0
        self._differs = False
        self._place()

    def _place(self) -> None:
        # Otherwise a backward() that exchanges only on some ranks would match the next exchange.
        n = (self._n_exchanges + 1) * self.passes if self._n_exchanges else 0
        self.position = f"step {self._drift.n_together + 1}"
        of_pass = f"backward pass {n} of " if n else ""
        self.reducer.position = f", {of_pass}{self.position}"


def weight_in_backward(group: Group) -> float | None:
    """Return the weight that optimizers will give to the gradients of the pass under way.

    For a layer whose backward() adds up gradients of all ranks. `group` tells ranks that are
    threads apart.
    """
    rank = group.transport.ranks[group.rank]
    weights = {
        exchange._step.weight
        for exchange in list(_weighted)
        if (own := exchange.group) is not None
        and exchange.active
        and own.transport.ranks[own.rank] == rank
    } - {None}
    if len(weights) > 1:
        raise RuntimeError(
            f"optimizers have different weights ({sorted(map(str, weights))}) in one backward(), "
            "and its SyncBatchNorm cannot tell whose gradients it adds up: pass the same number to "
            "set_weight() of all of them"
        )
    return weights.pop() if weights else None


def _follow_world() -> None:
    alive = {exchange for owner in _owner_of.values() if (exchange := owner()) is not None}
    for exchange in sorted(alive.union(_alone), key=lambda exchange: exchange.number):
        for _, parameter in exchange._parameters():
            parameter.grad = None  # the next passes would add to those of a step that was lost
        exchange.follow_world()
    if any(exchange.is_scaled for exchange in alive):
        _forget_unscaled(alive)


def _forget_unscaled(exchanges: Iterable[GradientExchange]) -> None:
    """Have every GradScaler forget which gradients it has unscaled: they were lost with the world.

    Otherwise it would not unscale those of the next step.
    """
    for exchange in exchanges:  # a fused step would multiply this scale by the next one
        for name in ("grad_scale", "found_inf"):
            vars(exchange._optimizer).pop(name, None)
    for each in gc.get_objects():
        if issubclass(type(each), torch.amp.GradScaler) and each.is_enabled():
            each._per_optimizer_states.clear()


on_renewed(_follow_world)


def _changed_too_early(name: str) -> str:
    return (
        f"the gradient of {name!r} was changed in place before it was averaged, so each rank has "
        "changed (clipped, unscaled) its own: with several backward passes, gradients are averaged "
        "in the last one. Change them after it; if a step has fewer passes than "
        "backward_passes_per_step, call optimizer.synchronize() first. To restart the step, call "
        "optimizer.zero_grad()"
    )


def _warn_if_clipped(slot: Slot) -> None:
    gradient = slot.parameter.grad
    if is_sparse(gradient) or gradient.any():  # otherwise it was zeroed by hand
        warn(
            f"the gradient of {slot.name!r} was computed before the DistributedOptimizer was "
            "created, and changed in place before the first step averaged it: what clips it has "
            "clipped this rank's own. Create the optimizer before backward(), or call its "
            "synchronize() before gradients are changed"
        )


def _taken_away(name: str) -> str:
    return (
        f"the gradient of {name!r} was set to None during backward() before it was averaged, by a "
        "hook, so every rank would train alone: let that hook call step() and zero_grad() of a "
        "DistributedOptimizer of this parameter instead of applying the gradient itself, or remove "
        "the hook"
    )


def _exchanged_already(slot: Slot, why: str, passes: int) -> str:
    what = (
        f"call step() or zero_grad() after {passes} passes (backward_passes_per_step), or use the "
        "same parameters in all passes"
    )
    return (
        f"backward() has added to the gradient of {slot.name!r} after it was exchanged, and {why}: "
        + (what if slot.exchanged else "call zero_grad() after step()")
    )


def _hook(reference: weakref.ref[GradientExchange], slot: Slot) -> Callable[[Any], None]:
    @uncompiled
    def touched(_: Any) -> None:
        exchange = reference()
        if exchange is not None:
            exchange.touch(slot)

    return touched


def _state_of(
    reference: weakref.ref[GradientExchange],
) -> Callable[[], list[tuple[str, Any]]]:
    # Its reducer must not keep an exchange alive.
    return lambda: [] if (exchange := reference()) is None else list(exchange.kept())


def _begin_if_zero(slot: Slot) -> Callable[[Any], None]:
    """Return a hook called before an addition: what was zeroed in place since is a new gradient."""

    @uncompiled
    def begin(_: Any) -> None:
        gradient = slot.parameter.grad if slot.is_result else None
        if gradient is not None and not is_sparse(gradient) and not gradient.any():
            slot.begin_another()

    return begin


def _release(slots: Mapping[int, Slot]) -> None:
    """Release these parameters, and remove their hooks."""
    for i, slot in slots.items():
        _owner_of.pop(i, None)
        for hook in (slot.hook, slot.zeros_hook):
            if hook is not None:
                hook.remove()
        slot.hook = slot.zeros_hook = None


def _names(
    named: list[tuple[str, Any]] | None, parameters: list[tuple[str, Any]]
) -> dict[Any, str]:
    """Return the names by parameter, not by its id, which another one may get once it is freed."""
    if named is None:
        return {}
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):  # type: ignore[redundant-expr]
        raise ValueError(
            "named_parameters must be pairs (name, parameter), as from model.named_parameters()"
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters contains {twice[0]!r} more than once")
    names = {parameter: name for name, parameter in named}
    lost = [name for name, parameter in parameters if parameter not in names]
    if lost:
        raise ValueError(
            f"named_parameters lacks {len(lost)} of the optimizer's parameters, the first is "
            f"{lost[0]}: pass those of the whole model"
        )
    return names


def _loss_like(value: np.ndarray[Any, Any], loss: Any) -> Any:
    if not isinstance(loss, torch.Tensor):
        return value.item()
    return torch.from_numpy(value).to(loss.device, loss.dtype).reshape(loss.shape)


def nobody() -> None:
    """Return None, like a weak reference to an optimizer that no longer exists."""
