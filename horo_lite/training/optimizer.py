"""DistributedOptimizer: average the gradients over the ranks, then step."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from horo_lite.adapters import Adapter, adapter_of, to_host
from horo_lite.adapters.object import ZERO_GRAD, Named, is_array, name_leaves, zero_gradients
from horo_lite.collectives.arrays import Array, gpu_of
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.reductions import Average, Op
from horo_lite.context import on_renewed
from horo_lite.state.drift import DriftCheck
from horo_lite.state.hashes import Readable
from horo_lite.state.wrapper import Wrapper, wrapped
from horo_lite.training.closures import averaging, closure_of, step_names, takes_steps, with_closure
from horo_lite.training.hyperparameters import hyperparameters_of
from horo_lite.training.options import Options
from horo_lite.training.reducer import Reducer
from horo_lite.training.sharded_optimizer import (
    ShardedOptimizer,
    Shares,
    is_factory,
)

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

T = TypeVar("T")


class DistributedOptimizer(Wrapper):
    """Wrap an optimizer so that it steps with gradients averaged over all ranks.

    Collective: every rank wraps its optimizer with the same options and calls `step()` the same
    number of times. The optimizer is any object with a `step()` or an `update()`, and parameters
    with a `.grad` (in `param_groups`, `params` or `parameters`, or passed as `parameters=`: a list,
    a dict by name, or a function that returns one). For others, see `horo_lite.register_adapter`.

    All attributes except `step`, `update`, `synchronize`, `skip_synchronize` and `inner` are those
    of the inner optimizer, for reading and writing, and `isinstance` returns what it would for it.
    Its own methods that call `self.step()`, such as a `minimize()`, average, too.

    Args:
        named_parameters: pairs (name, parameter), as from `model.named_parameters()`: names for
            error messages, and parameters if the optimizer exposes none.
        compression: the wire format; `Compression.fp16` halves the bytes.
        op: Average or Sum. Gradients that remain after a step are exchanged again, with what later
            passes add: averages remain averages, but sums are summed again unless `zero_grad()` was
            called.
        backward_passes_per_step: how many backward passes add to the gradients before `step()` is
            called, once, after the last. Their sum is exchanged, and not divided.
        bucket_bytes: size of the buckets in which gradients travel, on the wire; by default
            HORO_LITE_BUCKET_BYTES, or 25 MiB. Results do not depend on it.
        group: the ranks; by default all.
        check_every: how many steps to take between comparisons of the ranks' parameters; if they
            differ, `on_drift` says what to do: see `check_in_sync`. A comparison reads all
            parameters (7 ms for 100 MB). By default HORO_LITE_CHECK_EVERY; if that is not set,
            rank 0 warns if they differ before the first exchange, after steps 10 and 100 or after
            every 1,000, or if ranks have the same first gradients, as from the same samples. 0
            turns this off, too.
        check_finite: "raise" or "warn" if a rank's own gradient, before it is averaged, contains
            NaN or inf: a NonFiniteError before the step, on every rank, or a RuntimeWarning on
            rank 0, with the rank, the tensor and the number of elements. Of several tensors, it
            names the last one, which a backward pass reaches first. Reads the gradients once more
            (4 ms for 100 MB), in host memory only; off by default. Do not use it with loss scalers
            (GradScaler), which produce inf in normal operation.
        shard_state: keep on each rank the optimizer's state (momenta, variances) of a share of the
            parameters only. `optimizer` is then a function that makes one, see below; for an
            optimizer of torch, see `horo_lite.torch.DistributedOptimizer`.

    For an optimizer of torch, this returns `horo_lite.torch.DistributedOptimizer`, and likewise
    those of this package's modules for JAX, Keras and MLX. With torch, gradients are averages when
    backward() returns, so clipping and `GradScaler` need no `synchronize()`; for uneven batches,
    call `optimizer.set_weight(len(batch))` before backward(), which sends the gradients (a step
    with a closure takes `weight=` as here). The following applies to all others.

    Until `step()` or `synchronize()`, gradients are each rank's own: code that inspects or changes
    them (clipping, loss scalers, noise) must follow `synchronize()`, as shown there. If your own
    optimizer has torch parameters, changing their gradients in place between backward() and step()
    is a RuntimeError. `step()` after `synchronize()` never averages twice. Several backward passes
    may add to the gradients before either is called.

    With shard_state=True, each rank has an optimizer of its own for every parameter of its share,
    about 1/N of all on N ranks:

        hvd.DistributedOptimizer(lambda p: Adam(p, lr=0.1), parameters=net.params, shard_state=True)

    The function is called with a container like `parameters`, in which one parameter is left. So an
    optimizer sees no other parameter: norms over all of them, as for clipping, must be computed
    between `synchronize()` and the step. Each rank updates its parameters, and receives the others.
    Bits are those of one optimizer. Attributes are read from this rank's first optimizer, set on
    all, and methods are called on all; `zero_grad()` clears all gradients. From the first step on,
    every rank has to call `state_dict()`: it returns the state of all parameters, by name, which
    `load_state_dict()` accepts in a world of any size. The first step compares the ranks'
    parameters. The wrapper cannot be copied or pickled, nor its parameters be replaced by others,
    and no rank may leave the others by join().

    Costs two handshakes per step in addition to the bytes. If parameters, gradients, options,
    learning rates (`lr`, `learning_rate`) or other numbers in `param_groups` differ between ranks,
    every rank raises MismatchError, which names the first difference; a gradient missing on some
    ranks counts as zeros there.
    """

    if not TYPE_CHECKING:  # type checkers see the options of __init__

        def __new__(cls, optimizer: Any, **options: Any) -> Any:
            """Return the framework's own wrapper, if it has one."""
            face = adapter_of(optimizer).face
            if face is not None and cls is DistributedOptimizer:
                if options.pop("parameters", None) is not None:
                    raise TypeError(
                        "horo_lite.DistributedOptimizer takes no parameters= with a "
                        f"{type(optimizer).__name__}, which has its own, used by {face}: leave it "
                        "out. For names in messages, torch's takes named_parameters="
                    )
                return import_module(face).DistributedOptimizer(optimizer, **options)
            return super().__new__(cls)

    _own: _Own

    def __init__(
        self,
        optimizer: Any,
        *,
        parameters: Any = None,
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        compression: Compressor = Compression.none,
        op: Op = Average,
        backward_passes_per_step: int = 1,
        bucket_bytes: int | None = None,
        group: Group | None = None,
        check_every: int | None = None,
        on_drift: str = "raise",
        check_finite: str | None = None,
        shard_state: bool | str = False,
    ) -> None:
        if wrapped(optimizer) is not None:
            raise TypeError("this optimizer is already a DistributedOptimizer: wrap it only once")
        # A list or dict may be changed later: its current contents are used at each step.
        is_kept = parameters is None or isinstance(parameters, (list, tuple, Mapping))
        if not is_kept and not callable(parameters):
            parameters = list(parameters)
        named_parameters = list(named_parameters or ())
        _check_named(named_parameters, "named_parameters")
        options = Options(
            op=op,
            compression=compression,
            group=group,
            bucket_bytes=bucket_bytes,
            backward_passes_per_step=backward_passes_per_step,
            check_every=check_every,
            on_drift=on_drift,
            check_finite=check_finite,
            shard_state=shard_state,
        )
        if shard_state:
            _check_sharded(optimizer, parameters, shard_state)
            if not isinstance(parameters, (list, tuple, Mapping)):
                parameters = parameters()
            found = partial(_named, parameters, named_parameters)
            shares = Shares(optimizer, parameters, found, lambda: options.ranks)
            optimizer = ShardedOptimizer(shares)
        own = _Own(
            inner=optimizer,
            parameters=parameters,
            named_parameters=named_parameters,
            options=options,
            drift=DriftCheck(options.check_every, on_drift),
        )
        own.check()
        object.__setattr__(self, "_own", own)

    @property
    def inner(self) -> Any:
        """The optimizer that was wrapped."""
        return self._own.inner

    def step(self, *args: Any, weight: float | None = None, **kwargs: Any) -> Any:
        """Average the gradients, step the inner optimizer, and return its result.

        Collective. `weight` is the rank's number of samples in this step, given on every rank or on
        none: the average is then the mean over all samples, however uneven the batches (a rank
        without samples passes 0). It is never passed on; the other arguments are.

        A closure (`closure=`, or the first callable argument) is called by the inner optimizer.
        After each call, its gradients and the loss that it returns are averaged, so that optimizers
        that depend on the loss decide in the same way on every rank; that loss is float64.

        Raises:
            RuntimeError: `synchronize()` was called: step inside `with
                optimizer.skip_synchronize():`.
            TypeError: An argument is an array that is not averaged, such as gradients: pass those
                that `average_gradients` returns to `inner.step()`.
        """
        return self._apply(self._own.step_names()[0], args, weight, kwargs)

    def synchronize(self, weight: float | None = None) -> None:
        """Average the gradients now, so that they can be clipped or inspected before stepping.

        Collective. Then step without exchanging them a second time:

            optimizer.synchronize()
            clip(parameters)
            with optimizer.skip_synchronize():
                optimizer.step()

        `weight` is that of `step()`.
        """
        own = self._own
        own.exchange(own.named(), weight)
        own.step.is_averaged = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step()`, inside the block, use the gradients as they are after `synchronize()`."""
        own = self._own
        own.check_averaged()
        own.is_skipping = True
        try:
            yield
        finally:
            own.is_skipping = False
            own.step.is_averaged = bool(own.step.averaged_for)

    def _apply(
        self, name: str, args: tuple[Any, ...], weight: float | None, kwargs: dict[str, Any]
    ) -> Any:
        own, of = self._own, self._own.step
        step = getattr(own.inner, name)
        if weight is not None and takes_weight(step):
            raise TypeError(
                f"{type(own.inner).__name__}.{name}() has its own argument `weight`: "
                "pass the number of samples to synchronize(weight=…), and step inside "
                "skip_synchronize()"
            )
        named = own.named()
        closure = closure_of(args, kwargs) if own.finder.takes_closure else None
        if own.is_skipping or of.averaged_for:
            own.check_averaged()
            own.check_unchanged(name)
            if closure is not None:
                raise TypeError(
                    f"inside skip_synchronize(), {name}() takes no closure, whose gradients would "
                    "be this rank's own: pass it to a step outside, which averages them"
                )
            if weight is not None:
                where = "inside skip_synchronize()" if own.is_skipping else "after averaging"
                raise TypeError(f"{where}, a step takes no weight: pass it to synchronize()")
            own.forget()
            return own.counted(step(*args, **kwargs), named)
        if of.is_averaged:
            raise RuntimeError(
                f"{name}() after synchronize() would exchange the gradients a second time: write "
                "`with optimizer.skip_synchronize(): optimizer.step()`. If these are the gradients "
                "of another step, call synchronize() for them, too, or zero_grad() in between"
            )
        before = own.n_exchanges
        if closure is None:
            own.average(named, name, weight)
            own.check_arguments(named, name, (*args, kwargs))
        else:
            args, kwargs = with_closure(own.averaging(closure, name, weight), args, kwargs)
        result = step(*args, **kwargs)
        if own.n_exchanges == before:
            raise RuntimeError(
                f"{name}() has not called the function that it was given as a closure, so it has "
                "taken a step with this rank's own gradients: leave that argument out, and pass "
                "what is no closure when the optimizer is made"
            )
        return own.counted(result, named)

    def _call_before_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._own
        own.check_unchanged(name)
        if not own.step.is_averaged:
            own.exchange(own.named(), None)
            own.step.is_averaged, own.step.averaged_for = True, name
        try:
            return getattr(own.inner, name)(*args, **kwargs)
        finally:
            if own.step.averaged_for:
                own.step.changed = own.finder.watch(own.digest)

    # For everything else, a proxy of the inner optimizer.

    def __getattr__(self, name: str) -> Any:
        if name == "_own":  # the object is being copied, and not complete yet
            raise AttributeError(name)
        own = self._own
        found = getattr(own.inner, name)
        if name in own.finder.steps and callable(found):
            return MethodType(_stepper(name), self)
        if name in own.finder.before_step:
            return MethodType(_before_step(name), self)
        if name in ZERO_GRAD:
            own.forget()
        if isinstance(found, MethodType) and takes_steps(found, own.step_names()):
            return MethodType(found.__func__, self)  # so that the steps it takes are averaged
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # Schedulers patch step() of the optimizer that they receive, which is this one: if it were
        # passed on, the patched method would call itself.
        if name in self._own.finder.steps and callable(value):
            self.__dict__[name] = value
        else:
            setattr(self._own.inner, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._own.inner, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._own.inner.__class__

    def __dir__(self) -> Iterable[str]:
        return {*dir(type(self)), *dir(self._own.inner)}

    def __repr__(self) -> str:
        own = self._own
        return (
            f"DistributedOptimizer({own.inner!r}, compression={own.options.compression.name}, "
            f"op={own.options.op.name}, {len(own.named())} parameters)"
        )

    # Copies wrap copies of the inner optimizer and belong to the same ranks.

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self._own)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __copy__(self) -> DistributedOptimizer:
        return _rebuilt(type(self), self._own.copied(inner=copy.copy(self._own.inner)))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedOptimizer:
        own = self._own
        if callable(own.parameters) and copy.deepcopy(own.parameters, memo) is own.parameters:
            raise TypeError(
                "the copy would average the gradients of this optimizer's parameters, and step "
                "with its own, since parameters= is a function: pass a list, a dict or a method of "
                "what is copied, too"
            )
        parts = {name: getattr(own, name) for name in ("inner", "parameters", "named_parameters")}
        # What a compressor keeps belongs to one optimizer.
        compression = copy.deepcopy(own.options.compression, memo)
        options = replace(own.options, compression=compression)
        return _rebuilt(type(self), own.copied(options=options, **copy.deepcopy(parts, memo)))


# For help() and editors, which would otherwise show that of __new__; without `self`.
_of_init = inspect.signature(DistributedOptimizer.__init__)
DistributedOptimizer.__signature__ = _of_init.replace(  # type: ignore[attr-defined]
    parameters=list(_of_init.parameters.values())[1:], return_annotation=inspect.Signature.empty
)


@dataclass(slots=True, eq=False)
class _Step:
    """What has happened to the gradients of one step; dropped when those of another begin."""

    has_begun: bool = False  # they may be in flight
    is_averaged: bool = False  # by synchronize(), or by a method that needed averages
    averaged_for: str = ""  # such a method: step() need not average
    changed: Callable[[], bool] | None = None  # returns whether they have changed since


@dataclass(eq=False)
class _Own:
    """The wrapper's own state, kept separate since its attributes are the inner optimizer's."""

    inner: Any
    parameters: Any
    named_parameters: list[tuple[str, Any]]
    options: Options
    drift: DriftCheck
    step: _Step = field(default_factory=_Step)
    is_skipping: bool = False
    is_midway: bool = False  # a step with a closure has begun, and not ended
    n_exchanges: int = 0
    streams: bool = False  # gradients are announced during backward()
    reducer: Reducer | None = None

    def __post_init__(self) -> None:
        # A home-made optimizer may hold torch parameters.
        self.finder = self.adapter = adapter_of(self.inner)
        if self.parameters is None:
            whose = f"parameters() of {type(self.finder).__name__}"
            _check_named(self.finder.parameters(self.inner), whose)
        named = self.named()
        if type(self.finder) is Adapter and named:
            self.adapter = adapter_of(named[0][1])
        self.adapter.mark_gradients([parameter for _, parameter in named])
        _alive.add(self)

    def follow_world(self) -> None:
        """Reset after a change of the world: the current step is lost.

        Its gradients are cleared, since the first pass of the next step would be added to them.
        """
        self.step, self.reducer = _Step(), None
        zero_gradients(self.inner, self.adapter, self.named())

    def check(self) -> None:
        """Raise unless the inner object is an optimizer with parameters; say what is missing."""
        kind = type(self.inner).__name__
        steps = " or ".join(f"{name}()" for name in self.finder.steps)
        is_class = isinstance(self.inner, type)
        if is_class or not self.step_names():
            why = "it is a class" if is_class else f"it has no {steps}"
            raise TypeError(
                f"{self.inner!r} is not an optimizer: {why}. DistributedOptimizer wraps an "
                "optimizer object; if its methods have other names, see register_adapter; a "
                "function that makes optimizers is for shard_state=True"
            )
        if not self.named() and not self.finder.is_filled_later:
            raise ValueError(
                f"{kind} shows no parameters with a .grad, neither in its named_parameters(), "
                "param_groups, params (with or without grads) nor parameters: pass parameters=…, "
                "or write an adapter for it, see horo_lite.register_adapter"
            )
        for name, parameter in self.named():
            if type(self.adapter) is Adapter and not hasattr(parameter, "grad"):
                raise TypeError(
                    f"parameter {name!r} ({type(parameter).__name__}) has no .grad: pass objects "
                    "that have one, or write an adapter, see horo_lite.register_adapter"
                )
        names = Counter(name for name, _ in self.named_parameters)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"named_parameters has {twice[0]!r} more than once")
        _ = self.options.ranks  # raises if there is no world

    @property
    def n_steps(self) -> int:
        return self.drift.n_steps

    def step_names(self) -> list[str]:
        return step_names(self.inner, self.finder)

    def named(self) -> Named:
        """Return the current named parameters: groups may have been added."""
        parameters = self.parameters() if callable(self.parameters) else self.parameters
        if parameters is not None:
            return _named(parameters, self.named_parameters)
        return _renamed(self.finder.parameters(self.inner), self.named_parameters)

    def begin(self, named: Named, weight: float | None) -> Reducer:
        """Return the reducer of this step, which accepts gradients from now on."""
        group = self.options.ranks
        if self.reducer is None:
            self.drift.reset_counts()
            group.counting.add(self.drift)
            self.reducer = self.options.reducer(
                self.adapter,
                named,
                streams=self.streams,
                options=self.options.compared,
            )
            self.reducer.on_mismatch = self.drift.reset_counts
        else:
            self.reducer.bind(named)
        self.reducer.weight = weight
        # A rank whose step failed after the exchange would step with the others' next averages.
        self.reducer.position = f", step {self.drift.n_together + 1}"
        self.step.has_begun = True
        return self.reducer

    def average(self, named: Named, name: str, weight: float | None) -> None:
        """Average the gradients for the method `name`, which is about to use them."""
        self.check_own(named, name)
        self.exchange(named, weight)

    def exchange(self, named: Named, weight: float | None) -> None:
        """Average the gradients."""
        if self.step.has_begun and weight is not None:
            raise TypeError("gradients have left during backward(): pass the weight before it")
        numbers = hyperparameters_of(self.inner)
        begun = self.reducer if self.step.has_begun else None
        reducer = begun or self.begin(named, weight)
        self.step = _Step()  # if this fails, they are not those that were averaged before
        self.n_exchanges += 1
        reducer.finish(numbers=numbers)

    def check_own(self, named: Named, name: str) -> None:
        """Raise RuntimeError if this rank has changed its own gradients before their average."""
        for parameter_name, parameter in named:
            if self.adapter.changed_by_hand(parameter):
                raise RuntimeError(
                    f"the gradient of {parameter_name!r} has been changed since backward() (was it "
                    f"clipped?), before {name} averages it over the ranks: each rank has changed "
                    "its own gradient instead of the average. Call optimizer.synchronize() after "
                    "backward(), change the averages, and step inside `with "
                    "optimizer.skip_synchronize():`"
                )

    def check_averaged(self) -> None:
        """Raise RuntimeError unless synchronize() has averaged the gradients of this step."""
        if not self.step.is_averaged:
            raise RuntimeError(
                "skip_synchronize() without synchronize(): every rank would step with its own "
                "gradients. Call synchronize() first; to do that on purpose, call inner.step()"
            )

    def check_arguments(self, named: Named, name: str, arguments: Any) -> None:
        """Raise TypeError for arrays, perhaps gradients, among the arguments of the step `name`.

        Numbers may be arrays, too; and the parameters' own arrays and gradients are averaged.
        """
        arrays = [x for _, x in name_leaves(arguments, "") if is_array(x) and len(x.shape)]
        if not arrays:
            return
        known = {id(self.adapter.gradient(p)) for _, p in named}
        known |= {id(self.adapter.value(p)) for _, p in named}
        if not all(id(x) in known for x in arrays):
            raise TypeError(
                f"{name}() was given arrays, which are not averaged over the ranks. If they are "
                f"gradients, pass hvd.average_gradients(gradients) to optimizer.inner.{name}()"
            )

    def check_closure(self, name: str, arguments: Any) -> None:
        """Raise TypeError if what the step `name` calls is given gradients, and computes none."""
        arrays = [x for _, x in name_leaves(arguments, "") if is_array(x)]
        if arrays and any(self.adapter.gradient(p) is x for _, p in self.named() for x in arrays):
            raise TypeError(
                f"{name}() calls what it was given with gradients, which are not averaged over the "
                "ranks yet, so that is no closure, which computes them: write `takes_closure = "
                "False` in the optimizer's adapter, see horo_lite.register_adapter"
            )

    def forget_marks(self, named: Named) -> None:
        """Accept the gradients as they are now: earlier changes no longer matter."""
        self.adapter.forget_marks([parameter for _, parameter in named])

    def check_unchanged(self, name: str) -> None:
        """Raise RuntimeError if gradients have changed since they were averaged, before `name`."""
        of = self.step
        if of.changed is None or not of.changed():
            return
        raise RuntimeError(
            f"the gradients have changed since {of.averaged_for}() averaged them, and {name}() "
            "does not average them again: what a further backward pass has added is this rank's "
            f"own. Accumulate first and call {of.averaged_for}() after the last pass, or "
            "zero_grad() before the next one. Gradients that you change yourself: call "
            "synchronize(), change them, and step inside `with optimizer.skip_synchronize():`"
        )

    def digest(self) -> list[int | None]:
        """Return a hash of each gradient; for one on a GPU, only whether it exists."""
        parameters = [parameter for _, parameter in self.named()]
        self.adapter.compute(parameters)
        hashes = Readable(None).hashes

        def hash_of(gradient: Array | None) -> int | None:
            if gradient is None:
                return None
            return 0 if gpu_of(gradient) is not None else int(hashes([to_host(gradient)])[0])

        return [hash_of(self.adapter.gradient(parameter)) for parameter in parameters]

    def forget(self) -> None:
        """Forget this step's gradients: the next ones belong to another step."""
        self.forget_marks(self.named())
        if self.reducer is not None:
            self.reducer.abandon()
        self.step = _Step()

    def begin_anew(self) -> None:
        """Forget and clear the gradients of the step in progress."""
        self.forget()
        self.is_midway = False
        zero_gradients(self.inner, self.adapter, self.named())

    def counted(self, result: T, named: Named) -> T:
        """Count a step that has ended, compare parameters if that is due, and return `result`."""
        self.forget_marks(named)
        self.is_midway = False
        self.drift.stepped(self.named, self.options.ranks)
        return result

    def averaging(
        self, closure: Callable[..., Any], name: str, weight: float | None
    ) -> Callable[..., Any]:
        """Return `closure`, followed by averaging of gradients and loss."""

        @wraps(closure)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_closure(name, (args, kwargs))
            self.is_midway = True  # between its calls, step() may change parameters
            return closure(*args, **kwargs)

        def exchange() -> None:
            self.average(self.named(), "the closure", weight)

        options = self.options
        return averaging(
            checked, exchange, group=options.ranks, op=options.op, weight=lambda: weight
        )

    def copied(self, **changes: Any) -> _Own:
        """Return this state for a copy of the inner optimizer, which is not synchronized yet."""
        return replace(
            self,
            step=_Step(),
            is_skipping=False,
            reducer=None,
            drift=copy.copy(self.drift),
            **changes,
        )

    def __getstate__(self) -> dict[str, Any]:
        if self.options.group is not None:
            raise TypeError("a DistributedOptimizer with its own group cannot be pickled")
        own = vars(self.copied())
        return {name: value for name, value in own.items() if name not in ("finder", "adapter")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()


_alive: weakref.WeakSet[_Own] = weakref.WeakSet()


def _follow_world() -> None:
    for own in list(_alive):
        own.follow_world()


on_renewed(_follow_world)


def _rebuilt(cls: type[DistributedOptimizer], own: _Own) -> DistributedOptimizer:
    optimizer = object.__new__(cls)
    object.__setattr__(optimizer, "_own", own)
    return optimizer


def _named(parameters: Any, named_parameters: Named) -> Named:
    """Return the parameters in nested dicts, lists and tuples, with names, if there are any."""
    return _renamed(name_leaves(parameters, "parameters"), named_parameters)


def _renamed(found: Named, named_parameters: Named) -> Named:
    names = {id(parameter): name for name, parameter in named_parameters}
    if not found or not names:
        return found or named_parameters
    return [(names.get(id(parameter), name), parameter) for name, parameter in found]


def _check_sharded(factory: Any, parameters: Any, shard_state: bool | str) -> None:
    """Raise unless optimizers can be made of single parameters."""
    example = "DistributedOptimizer(lambda parameters: Adam(parameters), parameters=…)"
    if shard_state == "elements":
        raise ValueError(
            'shard_state="elements" is for optimizers of PyTorch: others update whole parameters, '
            "so pass shard_state=True"
        )
    if not is_factory(factory):
        raise TypeError(
            "with shard_state=True, each rank has an optimizer for each parameter of its share: "
            f"pass a function that makes them, and not a {type(factory).__name__}: {example}"
        )
    if parameters is None:
        raise TypeError(f"shard_state=True needs all parameters, a list or a dict: {example}")


def _check_named(named: Iterable[Any], whose: str) -> None:
    for pair in named:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"{whose} contains a {type(pair).__name__} instead of a pair (name, parameter): "
                "names identify gradients, and must be the same on every rank"
            )


@cache
def _stepper(name: str) -> Callable[..., Any]:
    def step(
        self: DistributedOptimizer, *args: Any, weight: float | None = None, **kwargs: Any
    ) -> Any:
        return self._apply(name, args, weight, kwargs)

    return step


@cache
def _before_step(name: str) -> Callable[..., Any]:
    def before_step(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        return self._call_before_step(name, args, kwargs)

    return before_step


def takes_weight(step: Callable[..., Any]) -> bool:
    """Return whether this function has its own argument `weight`."""
    try:
        return "weight" in inspect.signature(step).parameters
    except (TypeError, ValueError):  # perhaps written in C
        return False
