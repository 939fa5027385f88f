"""DistributedOptimizer: gradients are averaged over the ranks during backward()."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch

from horo_lite.collectives.compression import Compression, compressor_of
from horo_lite.collectives.group import Group
from horo_lite.collectives.reductions import AnyOp, Average
from horo_lite.horovod.process_sets import Set, global_process_set, ranks_given
from horo_lite.horovod.reductions import named_op
from horo_lite.state.wrapper import Sharing, check_unwrapped, sharing
from horo_lite.torch.exchange import WEIGHT_COMES_FIRST, GradientExchange
from horo_lite.torch.local_steps import LocalSteps
from horo_lite.torch.sharded_state import ShardedUpdate
from horo_lite.training.optimizer import takes_weight
from horo_lite.training.options import Options


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: AnyOp = Average,
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
    shard_state: bool | str = False,
    shared_parameters: bool = False,
    shard_gradients: bool = False,
    group: Group | None = None,
    adasum_of: str = "steps",
) -> Any:
    """Return an optimizer that steps with gradients averaged over all ranks.

    It has the same class, state and param_groups as `optimizer`. Every rank calls it, with the same
    options, and runs the same backward passes and steps. From then on, the gradients of its
    parameters are exchanged in backward(): buckets are sent while it runs, and when the outermost
    backward() returns, every `.grad` that it touched is the average over the ranks. Clipping,
    `GradScaler` and everything else that reads gradients thus see what step() will use, and if one
    rank's gradients overflow, all ranks skip the step. step() exchanges what is left, usually
    nothing.

    Args:
        optimizer: An optimizer of torch.optim, or derived from torch.optim.Optimizer.
        named_parameters: Pairs as from `model.named_parameters()`: names for error messages. If
            given, they must include every parameter of the optimizer.
        compression: The wire format; `Compression.fp16` halves the bytes. An object with its own
            `compress` and `decompress` is called.
        backward_passes_per_step: The number of passes whose gradients are summed, not divided,
            before the ranks exchange them at the end of the last one. What later passes add to the
            averages is exchanged in turn; sums and Adasums cannot be added to before zero_grad()
            (a RuntimeError). Changing a gradient in place before the exchange is a
            RuntimeError. After fewer passes, call synchronize() before clipping.
        op: Average, Sum or Adasum, which combines the ranks' steps: see below.
        gradient_predivide_factor: Divides gradients before they are added up; the sum is divided by
            size / factor. Only with op=Average.
        num_groups: The number of groups of neighbouring parameters that travel together.
        groups: The same, or lists of parameters that travel together. Others fill buckets.
        sparse_as_dense: Exchange sparse gradients as dense ones, and make them sparse again;
            otherwise their indices and values are gathered from all ranks, and added up. Adasum
            needs it.
        process_set: The ranks that take part; by default all. On other ranks it has no effect.
        check_every: The number of steps between comparisons of the ranks' parameters; if they
            differ, `on_drift` says what to do: see `check_in_sync`. A comparison reads all
            parameters (7 ms for 100 MB). By default HORO_LITE_CHECK_EVERY; if that is not set,
            rank 0 warns if they differ before the first exchange (they, or the optimizers' states),
            after steps 10 and 100 or after every 1,000, or if ranks have the same first gradients,
            as from the same samples. 0 turns this off, too.
        on_drift: "raise", "warn" or "heal".
        check_finite: "raise" or "warn" if a rank's own dense gradient, before it is averaged,
            contains NaN or inf: a NonFiniteError from backward() on every rank, or a RuntimeWarning
            on rank 0, with the rank, the tensor that was sent first and the number of elements.
            Reads the gradients once more (4 ms for 100 MB), in host memory only; off by default. Do
            not use it with GradScaler, which produces inf in normal operation.
        gradient_as_bucket_view: Keep gradients in memory shared by the ranks of the host, where
            they are reduced in place, with the same bits; see below.
        bucket_bytes: Size of the buckets for gradients that are in no group; by default
            HORO_LITE_BUCKET_BYTES, or 25 MiB.
        shard_state: Keep on each rank the optimizer's state (momenta, variances) of a share of the
            parameters only, and update only these there; see below. True for optimizers of
            torch.optim except LBFGS; for others "elements" if the update of an element depends on
            the gradients and state of no other one, as in Adam, or "parameters" if it depends on
            those of no other parameter, as in Adafactor. The first step tries whether that is true.
        shared_parameters: With shard_state, keep one copy of the parameters for all ranks of the
            host, instead of one for each; see below.
        shard_gradients: With shard_state, give each rank the averages of its share only, which is
            half the bytes; see below.
        group: Another name for `process_set`, as in `horo_lite.DistributedOptimizer`.
        adasum_of: What op=Adasum combines: "steps" or "gradients".

    An exchange includes the gradients that backward() has touched on any rank since the last one. A
    gradient touched on no rank is not changed: it stays None, or what it was (without zero_grad(),
    or with zero_grad(set_to_none=False)). Touched on some ranks only, it counts as zeros on the
    others, whatever its value there, and all receive the result. Gradients that exist when the
    optimizer is wrapped take part in the first exchange. A gradient that was assigned by hand takes
    part in step(), and so does the same tensor in every later step, with its contents at that time,
    until backward() adds to it or another one replaces it. Changes by hand after backward() affect
    only this rank. A rank that has no loss, and so no backward(), receives the averages in step():
    if gradients are clipped or unscaled before step(), call synchronize() on every rank after
    backward(); otherwise it is a RuntimeError.

    With gradient_as_bucket_view=True, each `.grad` that backward() has touched is a tensor in
    shared memory, always the same one: a tensor that autograd or the user puts in its place is
    copied there before it is sent. zero_grad() works with either argument; set_to_none=True is
    faster, since autograd has nothing to add to. A reference to a gradient therefore changes in the
    next step: clone it to keep the values. The option needs all ranks on one host, CPU tensors, op
    Average or Sum, no compression and no predivide factor; otherwise it has no effect, with a
    warning if the system refuses the memory. Sparse gradients stay where they are. The memory
    replaces the gradients' own. zero_grad() does not release it: it is released with the optimizer
    and the gradients in it.

    With shard_state=True, N ranks need 1/N of the memory for the optimizer's state each, and 1/N of
    the time to update the parameters, and get the same bits. Gradients are averaged on all ranks
    as without it, so clipping, GradScaler and hooks of step() need no change. In step(), the
    optimizer updates this rank's share of the parameters, cut inside a parameter if it updates each
    element independently; then all ranks receive all parameters, as many bytes as a broadcast. The
    state is divided in the first step, which compares the ranks' parameters and state. After that
    `optimizer.state` cannot be read, and every rank has to call `state_dict()`, which returns the
    state of all ranks on all of them; `load_state_dict()` accepts it in a world of any size. The
    optimizer cannot be copied or pickled then, and no rank may leave the others by join(): one
    without samples calls set_weight(0), backward() and step() like the others.

    With shared_parameters=True in addition, the first step moves parameters in host memory to
    memory that all ranks of the host share, and each rank updates its share there: nothing is sent
    within the host, and N ranks need memory for the parameters once. A change that the program
    makes in place between steps is then seen by all ranks of the host at once, and made several
    times if each of them makes it (a warning). Views of a parameter that the program took before
    the first step, and `parameter.data`, keep the old memory. Between hosts, updates are sent as
    without it.

    With shard_gradients=True in addition, from the second step on, a rank's `.grad` has averages in
    its share only; the rest is undefined. Clip by `optimizer.clip_grad_norm_()`. Any other change
    of gradients after backward(), another backward() that adds to them, and GradScaler are a
    RuntimeError. step() sets all gradients to None.

    If the ranks' batches are uneven, call `optimizer.set_weight(len(batch))` before backward(), on
    every rank or on none: the averages of this step are then over all samples. In other frameworks
    the weight is an argument of step(); here, gradients are already averaged when step() is called.

    With op=Adasum, as in Horovod, each rank's optimizer takes its step with the rank's own
    gradients, and the changes of each parameter are combined, by the formula in
    `horo_lite.collectives.adasum`. So gradients and momenta are each rank's own: save, and
    broadcast, those of one rank. Everything is exchanged in step(). Backward passes are not
    counted: step() uses the sum of their gradients. A closure runs on each rank separately, as
    often as the optimizer calls it. With `adasum_of="gradients"`, the gradients are combined in
    backward(), and every rank takes the same step; everything said here about op=Sum then applies.
    Both need a number of ranks that is a power of two, and ignore `compression`. GradScaler needs
    `adasum_of="gradients"`, since otherwise each rank would skip its own steps.

    A closure, as LBFGS needs it, is called by step(); its backward() exchanges, and the loss that
    it returns is averaged, so that the line search is the same on all ranks. Since backward() runs
    inside step(), the weight is an argument of that: `step(closure, weight=len(batch))`.

    Backward passes inside backward() (checkpoint with use_reentrant=True) belong to the outermost
    one; buckets are then sent at its end. If the last one is in a post-accumulate-grad hook, after
    which autograd computes nothing, the next pass or step() exchanges.

    After an error in backward(), call zero_grad() and continue. In a world of one rank, nothing is
    changed: there are no hooks and no exchange.

    Raises:
        TypeError: It is not an optimizer of torch, or it is already a DistributedOptimizer.
        ValueError: Options are invalid, the optimizer or a parameter already has a
            DistributedOptimizer, or names are incomplete; in the first step, if the optimizer does
            not update independently what shard_state says.
        MismatchError: In backward() or step(), on every rank, if gradients, options or
            hyperparameters differ between ranks.
        DriftError: In the first step with shard_state, on every rank, if their parameters or state
            differ.
    """
    is_one = isinstance(optimizer, torch.optim.Optimizer)
    if not is_one or not hasattr(optimizer, "param_groups"):
        is_class = isinstance(optimizer, type)
        given = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
        lacks = "has no param_groups" if is_one else "is not an optimizer of torch"
        raise TypeError(
            f"{given} {lacks}: pass a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1). If it contains one, pass that one, and "
            "put the result inside. For other kinds of optimizers, use "
            "horo_lite.DistributedOptimizer"
        )
    options = Options(
        op=named_op(op),
        compression=compressor_of(compression),
        bucket_bytes=bucket_bytes,
        backward_passes_per_step=backward_passes_per_step,
        check_every=check_every,
        on_drift=on_drift,
        check_finite=check_finite,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        group=ranks_given(process_set, group),
        gradient_as_bucket_view=gradient_as_bucket_view,
        shard_state=shard_state,
        shared_parameters=shared_parameters,
        shard_gradients=shard_gradients,
        adasum_of=adasum_of,
        takes_adasum=True,
    )
    return _wrapped(optimizer, named_parameters, options)


def _wrapped(
    optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None, options: Options
) -> Any:
    check_unwrapped(optimizer)
    named = None if named_parameters is None else list(named_parameters)
    kind = GradientExchange
    if options.combines_steps:
        kind = LocalSteps
    elif options.shard_state:
        kind = ShardedUpdate
    exchange = kind(optimizer, named, options)
    wrapped = sharing(optimizer, _DistributedOptimizer, _exchange=exchange)
    # The exchange ends with the wrapper, not with the optimizer.
    weakref.finalize(wrapped, wrapped.__dict__.pop, "_exchange", None).atexit = False
    return wrapped


class _Step:
    """The method step() of a wrapped class.

    It takes precedence over the optimizer's dictionary, which contains the patched step() of a
    scheduler created before the wrapper. torch patches no step() with the attribute `hooked` or
    `_wrapped_by_lr_sched`.
    """

    hooked = True

    def __init__(self, base: Any) -> None:
        has_own_weight = takes_weight(base.step)

        @wraps(base.step)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            weight = None if has_own_weight else kwargs.pop("weight", None)
            optimizer._opt_called = True  # checked by schedulers
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


class _DistributedOptimizer(Sharing):
    """Base class of a wrapped optimizer, in addition to its own class."""

    _exchange: GradientExchange

    @classmethod
    def attributes(cls, base: Any) -> dict[str, Any]:
        return {"step": _Step(base), _Scales.NAME: _Scales()}

    def set_weight(self, weight: float) -> None:
        """Set this rank's number of samples in the next step, for uneven batches.

        The averages of the step, and that of its closure's loss, are then over all samples: each
        rank counts in proportion to its weight, 0 for a rank without samples. Call it on every rank
        or on none, after zero_grad() and before backward(), which sends the weight with the
        gradients; with several backward passes, before the first. It is valid for one step: step()
        uses it up, even if it raises, and so does zero_grad() after backward().

        Args:
            weight: For example len(batch). In a world of one rank it has no effect.

        Raises:
            ValueError: It is negative or not finite, or op is not Average.
            RuntimeError: Gradients of this step have already been exchanged.
        """
        self._exchange.set_weight(weight)

    def synchronize(self, weight: None = None) -> None:
        """Exchange all gradients that backward() touched and that have not been exchanged.

        Collective. Usually there are none after backward(). After fewer than
        `backward_passes_per_step` passes, their sums are exchanged. A `weight` is a TypeError: see
        `set_weight`.
        """
        if weight is not None:
            raise TypeError(f"synchronize() takes no weight: {WEIGHT_COMES_FIRST}")
        self._exchange.flush()

    @property
    def is_between_passes(self) -> bool:
        """Whether there are gradients of passes that have not been exchanged. Local."""
        return self._exchange.is_between_passes

    def watch(self) -> None:
        """Begin to watch for what `is_midway` tells, and consider changes up to now as complete."""
        self._exchange.watch()

    @property
    def is_midway(self) -> bool:
        """Whether parameters have changed since the step's first backward pass. Local.

        Such as in the line search of LBFGS, or in sharpness-aware minimization.
        """
        return self._exchange.is_midway

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Disable the exchange in step(), for scripts that call `synchronize()` themselves.

        A step() in the block is a RuntimeError if gradients have not been exchanged.
        """
        with self._exchange.skipping():
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all averaged gradients so that the norm of them together is at most `max_norm`.

        Like `torch.nn.utils.clip_grad_norm_` of the optimizer's parameters, and up to rounding with
        the same result, also if shard_gradients=True has left each rank a share of the averages.
        Then it is collective.

        Args:
            max_norm: The largest norm, more than 0.
            norm_type: The p of the p-norm; math.inf for the largest element.
            error_if_nonfinite: Whether a norm of NaN or inf is a RuntimeError, on every rank.

        Returns:
            The norm before, a scalar.

        Raises:
            RuntimeError: See `error_if_nonfinite`; or gradients have not been averaged yet.
            ValueError: `norm_type` is not more than 0, with shard_gradients.
        """
        return self._exchange.clip(max_norm, norm_type, error_if_nonfinite)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many passes are summed before the ranks exchange them. Collective."""
        self._exchange.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """Set gradients to None or zeros, and forget the backward passes that added to them."""
        pending = self._exchange.begin_step()
        result = super().zero_grad(set_to_none)  # type: ignore[misc]
        self._exchange.take_zeros(pending)
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the optimizer. Collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._exchange.look_at_parameters()

    # Copies wrap copies of the optimizer: a class that was created here cannot be unpickled.

    def __reduce_ex__(self, protocol: Any) -> Any:
        exchange = self._exchange
        return _wrapped, (exchange.inner(), exchange.named(), exchange.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        exchange = self._exchange
        options = exchange.options
        parts = exchange.inner(), exchange.named(), options.groups, options.compression
        inner, named, groups, compression = copy.deepcopy(parts, memo)
        return _wrapped(inner, named, replace(options, groups=groups, compression=compression))


class _Scales:
    """The attribute that GradScaler reads before it decides, on each rank, whether to step.

    Fused optimizers have it in their dictionary: they decide themselves.
    """

    NAME = "_step_supports_amp_scaling"

    def __get__(self, optimizer: Any, owner: Any = None) -> bool:
        if optimizer is None:
            return False
        optimizer._exchange.is_scaled = True
        is_fused = bool(optimizer.__dict__.get(self.NAME, False))
        optimizer._exchange.check_scaling(is_fused)
        return is_fused

    def __set__(self, optimizer: Any, value: bool) -> None:
        optimizer.__dict__[self.NAME] = value
