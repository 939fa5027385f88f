"""DistributedOptimizer: gradients are averaged over the ranks while backward() still runs."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch

from horo_lite.collectives.compression import Compression
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import Average, Op
from horo_lite.horovod.process_sets import Set, global_process_set, ranks_given
from horo_lite.horovod.reductions import AdasumOp, named_op
from horo_lite.torch.exchange import WEIGHT_COMES_FIRST, GradientExchange, nobody
from horo_lite.torch.local_steps import LocalSteps
from horo_lite.torch.options import TorchOptions
from horo_lite.training.optimizer import takes_weight

_wrapper_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op | AdasumOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Set = global_process_set,
    check_every: int | None = None,
    on_drift: str = "raise",
    check_finite: str | None = None,
    gradient_as_bucket_view: bool = False,
    bucket_bytes: int | None = None,
    *,
    group: Group | None = None,
    adasum_of: str = "steps",
) -> Any:
    """An optimizer of the same class, state and param_groups that steps with all ranks' gradients.

    Every rank calls it, with the same options, and runs the same backward passes and steps. From
    then on the gradients of its parameters are exchanged in backward(): buckets leave while it
    still runs, and when the outermost backward() returns, every `.grad` that it touched holds the
    average over the ranks. Clipping, `GradScaler` and whatever else looks at gradients thus see
    what step() will use, and where one rank's overflow, all ranks skip the step. step() exchanges
    what is left, and nothing in the usual case.

    Args:
        optimizer: One of torch.optim, or derived from torch.optim.Optimizer.
        named_parameters: pairs as `model.named_parameters()` gives them; names for error messages.
            If given, every parameter of the optimizer is among them.
        compression: what travels; `Compression.fp16` halves the bytes. What has `compress` and
            `decompress` of its own is called.
        backward_passes_per_step: so many passes are summed, not divided, before the ranks exchange
            them at the end of the last. One more, before step() or zero_grad(), is a RuntimeError,
            and so is a gradient changed in place before. Of fewer, clip after synchronize().
        op: Average, Sum or Adasum, which combines the ranks' steps: see below.
        gradient_predivide_factor: gradients are divided by it before they are added up, and the sum
            by size / factor. Only with op=Average.
        num_groups: how many groups of neighbours travel together.
        groups: the same, or lists of parameters that travel together. Others fill buckets.
        sparse_as_dense: sparse gradients become dense ones, and stay dense; otherwise their indices
            and values are gathered from all ranks, and added up. Adasum needs dense ones.
        process_set: the ranks that take part; by default all. On others it changes nothing.
        check_every: after every so many steps the ranks compare their parameters, and where these
            differ do what `on_drift` says: see `check_in_sync`. Default HORO_LITE_CHECK_EVERY, or
            0: never, because a comparison reads all parameters (7 ms for 100 MB).
        on_drift: "raise", "warn" or "heal".
        check_finite: "raise" or "warn" where a rank's own dense gradient, before it is averaged,
            has NaN or inf: NonFiniteError from backward() on every rank, or a RuntimeWarning on
            rank 0, with the rank, the tensor that left first and how many. Reads the gradients once
            more (4 ms for 100 MB), in the host's memory only; off by default, and not for
            GradScaler, to which inf is nothing new.
        gradient_as_bucket_view: gradients live in memory that the ranks of the host see, and are
            added up where they lie, to the same bits; see below.
        bucket_bytes: how much travels together of what is in no group; default
            HORO_LITE_BUCKET_BYTES, or 25 MiB.
        group: another name for `process_set`, that of `horo_lite.DistributedOptimizer`.
        adasum_of: "steps" or "gradients": what op=Adasum combines.

    What takes part in an exchange is what backward() has touched on any rank since the last one.
    Untouched everywhere, a gradient stays as it is: None, or what it was (with no zero_grad(), or
    zero_grad(set_to_none=False)). Touched on some ranks only, it counts as zeros on the others,
    whatever they hold, and all receive the result. A gradient that was assigned by hand takes part
    in step(), and so does the same tensor in every later step, with what was written into it, until
    backward() adds to it or another takes its place; changed by hand after backward(), it is this
    rank's alone. A rank that has no loss, and so no backward(), receives the averages in step():
    where gradients are clipped or unscaled before, call synchronize() on every rank after
    backward(), or it is a RuntimeError.

    With gradient_as_bucket_view=True each `.grad` that backward() has touched is a tensor in shared
    memory, always the same one: what autograd or the user puts in its place is copied there before
    it travels. zero_grad() works either way, and set_to_none=True, which leaves autograd nothing to
    add to, is the faster. A gradient that somebody keeps therefore changes in the next step: clone
    it. It needs all ranks on one host, CPU tensors, op Average or Sum, no compression and no
    predivide factor; otherwise, and with a warning where the system refuses the memory, the option
    changes nothing. Sparse gradients stay where they are. The memory takes the place of the
    gradients' own; zero_grad() does not give it back: it goes with the optimizer and the gradients
    in it.

    Where the ranks' batches are uneven, `optimizer.set_weight(len(batch))` before backward(), on
    every rank or on none, makes the averages of this one step those over all samples. Elsewhere the
    weight is an argument of step(); here step() comes when the gradients have been averaged.

    With op=Adasum, as in Horovod, each rank's optimizer takes its step with the rank's own
    gradients, and the changes of each parameter are combined: `horo_lite.horovod.adasum` has the
    formula. So gradients stay a rank's own, and so do momenta: save, and broadcast, those of one
    rank. All exchange is in step(). Backward passes are not counted: step() takes what they have
    added up. A closure runs, as often as the optimizer calls it, on each rank by itself. With
    `adasum_of="gradients"` the gradients are combined in backward(), and every rank takes the same
    step; all that is said here of op=Sum is then true of it. Both need a power of two of ranks, and
    compress nothing. GradScaler needs the latter, since each rank would skip steps of its own.

    A closure, as LBFGS needs, is called by step(); its backward() exchanges, and the loss it
    returns is averaged, so that all ranks search alike. As backward() comes after the call, the
    weight is an argument there: `step(closure, weight=len(batch))`.

    Backward passes inside of backward() (checkpoint with use_reentrant=True) belong to the
    outermost; buckets then leave at its end. Where its last node has no successors, as when a
    tensor's hook calls backward(), the exchange is left to the next pass or step().

    Raises ValueError at once for options that make no sense, an optimizer or parameter that is
    wrapped already, and incomplete names; MismatchError in backward() or step(), on every rank,
    where ranks differ, also in their learning rates. After an error in backward(), call zero_grad()
    and go on.

    A world of one is not touched: no hooks, no exchange.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        is_class = isinstance(optimizer, type)
        given = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        raise TypeError(
            f"{given} is not an optimizer of torch's: give a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1). For optimizers of other kinds there is "
            "horo_lite.DistributedOptimizer"
        )
    options = TorchOptions(
        op=named_op(op),
        compression=compression,
        bucket_bytes=bucket_bytes,
        backward_passes_per_step=backward_passes_per_step,
        check_every=check_every,
        on_drift=on_drift,
        check_finite=check_finite,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=ranks_given(process_set, group),
        gradient_as_bucket_view=gradient_as_bucket_view,
        adasum_of=adasum_of,
    )
    return _wrapped(optimizer, named_parameters, options)


def _wrapped(
    optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None, options: TorchOptions
) -> Any:
    wrapper = _wrapper_of.get(optimizer, nobody)()
    if wrapper is not None:
        raise ValueError(
            "this optimizer has a DistributedOptimizer already: use that one, or delete it first"
        )
    named = None if named_parameters is None else list(named_parameters)
    kind = LocalSteps if options.combines_steps else GradientExchange
    exchange = kind(optimizer, named, options)
    base: Any = type(optimizer)
    wrapped = object.__new__(_class_of(base))
    wrapped.__dict__ = optimizer.__dict__  # one state, whoever loads or changes it
    wrapped._exchange = exchange
    _wrapper_of[optimizer] = weakref.ref(wrapped)
    return wrapped


class _Step:
    """The method step() of a wrapped class.

    It takes precedence over the optimizer's dictionary, where a scheduler made before the wrapper
    has left a step() of its own. torch patches neither what is `hooked` nor what is
    `_wrapped_by_lr_sched`.
    """

    hooked = True

    def __init__(self, base: Any) -> None:
        has_own_weight = takes_weight(base.step)

        @wraps(base.step)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            weight = None if has_own_weight else kwargs.pop("weight", None)
            optimizer._opt_called = True  # schedulers want to know
            inner = MethodType(base.step, optimizer)
            return optimizer._exchange.step(inner, args, kwargs, weight)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.step = step

    def __get__(self, optimizer: Any, owner: Any = None) -> Any:
        if optimizer is None:
            return self
        patched = optimizer._exchange.patched_step
        return MethodType(self.step, optimizer) if patched is None else patched

    def __set__(self, optimizer: Any, step: Any) -> None:
        optimizer._exchange.patched_step = step

    def __delete__(self, optimizer: Any) -> None:
        optimizer._exchange.patched_step = None

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        return self.step(optimizer, *args, **kwargs)


class _DistributedOptimizer:
    """What a wrapped optimizer has beside its own class."""

    __slots__ = ("_exchange",)
    _exchange: GradientExchange

    def set_weight(self, weight: float) -> None:
        """This rank's number of samples of the step that comes, where batches are uneven.

        The averages of the step, and that of its closure's loss, are then those over all samples:
        each rank counts as often as its weight says, and a rank without samples gives 0. To be
        called on every rank or on none, after zero_grad() and before backward(), which sends the
        weight with the gradients; of several backward passes, before the first. It is for one step:
        step() uses it up, even one that raises, and so does a zero_grad() after backward().

        Args:
            weight: Such as len(batch). With a world of one it changes nothing.

        Raises:
            ValueError: It is negative or not finite, or op is not Average.
            RuntimeError: Gradients of this step have been exchanged already.
        """
        self._exchange.set_weight(weight)

    def synchronize(self, weight: None = None) -> None:
        """Every gradient that backward() touched holds the result.

        Usually nothing is left to do: that is so after backward() already. Fewer than
        `backward_passes_per_step` passes are exchanged as they are. Collective. A `weight` is a
        TypeError: see `set_weight`.
        """
        if weight is not None:
            raise TypeError(f"synchronize() takes no weight: {WEIGHT_COMES_FIRST}")
        self._exchange.flush()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() exchanges nothing; for scripts that call `synchronize()` themselves."""
        with self._exchange.skipping():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `passes` passes are summed before the ranks exchange them. Collective."""
        self._exchange.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """Gradients are None, or zeros; what backward passes did to them is forgotten."""
        self._exchange.begin_step()
        result = super().zero_grad(set_to_none)  # type: ignore[misc]
        self._exchange.take_zeros()
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer has these parameters, too. Collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._exchange.look_at_parameters()

    # Copies wrap copies of the optimizer: a class that was made here cannot be unpickled.

    def __reduce_ex__(self, protocol: Any) -> Any:
        exchange = self._exchange
        return _wrapped, (exchange.inner(self), exchange.named(), exchange.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        exchange = self._exchange
        parts = exchange.inner(self), exchange.named(), exchange.options.groups
        inner, named, groups = copy.deepcopy(parts, memo)
        return _wrapped(inner, named, replace(exchange.options, groups=groups))


class _Scales:
    """What GradScaler asks an optimizer before it decides, on its own rank, whether to step.

    Fused optimizers have it in their dictionary: they take that decision themselves.
    """

    NAME = "_step_supports_amp_scaling"

    def __get__(self, optimizer: Any, owner: Any = None) -> bool:
        if optimizer is None:
            return False
        is_fused = bool(optimizer.__dict__.get(self.NAME, False))
        optimizer._exchange.check_scaling(is_fused)
        return is_fused

    def __set__(self, optimizer: Any, value: bool) -> None:
        optimizer.__dict__[self.NAME] = value


@cache
def _class_of(base: Any) -> Any:
    body = {
        "step": _Step(base),
        _Scales.NAME: _Scales(),
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (_DistributedOptimizer, base), body)
