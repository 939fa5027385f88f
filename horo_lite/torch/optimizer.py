"""DistributedOptimizer: gradients are averaged over the ranks while backward() still runs."""

from __future__ import annotations

import copy
import itertools
import math
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from types import MethodType
from typing import Any

import numpy as np
import torch

from horo_lite import ops, settings
from horo_lite.adapters.torch import HAS_TABLE, TorchAdapter
from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import Average, Op, Sum, checked_weight
from horo_lite.collectives.shared_memory import share
from horo_lite.context import is_initialized, on_renewed, world
from horo_lite.errors import HoroLiteError, MismatchError, NonFiniteError
from horo_lite.state.drift import check_reaction, compare
from horo_lite.torch import bucket_views
from horo_lite.torch.adasum import Adasum, AdasumOp, adasum_async_
from horo_lite.torch.process_sets import ProcessSet, global_process_set, group_of
from horo_lite.training.optimizer import takes_weight
from horo_lite.training.plan import DEFAULT_BUCKET_BYTES
from horo_lite.training.reducer import Reducer
from horo_lite.transports.shm import SharedMemory

# How often backward() added to a gradient since it was made stands on the gradient itself: one that
# zero_grad() or the user has replaced is told from one that is being added to.
_MARK = "_horo_lite_passes"

_graph_task = torch._C._current_graph_task_id
_evaluating = torch._C._current_autograd_node

# Whose gradients a parameter's are, by the parameter's id, so that nobody averages them twice.
_owner_of: dict[int, weakref.ref[_Exchange]] = {}
# Those of a world of one, which own nothing, and have work once that has grown.
_alone: weakref.WeakSet[_Exchange] = weakref.WeakSet()
_wrapper_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


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
    process_set: ProcessSet | Group | None = global_process_set,
    check_every: int | None = None,
    on_drift: str = "raise",
    check_finite: str | None = None,
    gradient_as_bucket_view: bool = False,
    bucket_bytes: int | None = None,
) -> Any:
    """An optimizer of the same class, state and param_groups that steps with all ranks' gradients.

    Every rank calls it, with the same options, and runs the same backward passes and steps. From
    then on the gradients of its parameters are exchanged in backward(): buckets leave while it
    still runs, and when the outermost backward() returns, every `.grad` that it touched holds the
    average over the ranks. Clipping, `GradScaler` and whatever else looks at gradients thus see
    what step() will use, and where one rank's overflow, all ranks skip the step. step() exchanges
    what is left, and nothing in the usual case.

    named_parameters: pairs as `model.named_parameters()` gives them; names for error messages. If
        given, every parameter of the optimizer is among them.
    compression: what travels; `Compression.fp16` halves the bytes. What has `compress` and
        `decompress` of its own is called.
    backward_passes_per_step: so many passes are summed, not divided, before the ranks exchange
        them at the end of the last. One more, before step() or zero_grad(), is a RuntimeError.
    op: Average, Sum or Adasum. Adasum combines the gradients, so that all ranks keep one state of
        the optimizer; it needs a power of two of ranks, and does not compress.
    gradient_predivide_factor: gradients are divided by it before they are added up, and the sum by
        size / factor. Only with op=Average.
    num_groups, groups: which parameters travel together: a number of groups of neighbours, or lists
        of parameters. Others fill buckets of `bucket_bytes` (default HORO_LITE_BUCKET_BYTES, or
        25 MiB).
    sparse_as_dense: sparse gradients become dense ones, and stay dense; otherwise their indices and
        values are gathered from all ranks, and added up. Adasum needs dense ones.
    process_set: the ranks that take part; by default all. On others it changes nothing.
    check_every: after every so many steps the ranks compare their parameters, and where these
        differ do what `on_drift` says: see `check_in_sync`. Default HORO_LITE_CHECK_EVERY, or 0:
        never, because a comparison reads all parameters (7 ms for 100 MB).
    check_finite: "raise" or "warn" where a rank's own dense gradient, before it is averaged, has
        NaN or inf: NonFiniteError from backward() on every rank, or a RuntimeWarning on rank 0,
        with the rank, the tensor that left first and how many. Reads the gradients once more (4 ms
        for 100 MB), in the host's memory only; off by default, and not for GradScaler, to which
        inf is nothing new.
    gradient_as_bucket_view: gradients live in memory that the ranks of the host see, and are added
        up where they lie, to the same bits; see below.

    What takes part in an exchange is what backward() has touched on any rank since the last one.
    Untouched everywhere, a gradient stays as it is: None, or what it was (with no zero_grad(), or
    zero_grad(set_to_none=False)). Touched on some ranks only, it counts as zeros on the others,
    whatever they hold, and all receive the result. A gradient that was assigned by hand takes part
    in step(); changed by hand after backward(), it is this rank's alone.

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
    every rank or on none, makes the averages of this step those over all samples.

    A closure, as LBFGS needs, is called by step(); its backward() exchanges, and the loss it
    returns is averaged, so that all ranks search alike.

    Backward passes inside of backward() (checkpoint with use_reentrant=True) belong to the
    outermost; buckets then leave at its end. Where its last node has no successors, as when a
    tensor's hook calls backward(), the exchange is left to the next pass or step().

    Raises ValueError at once for options that make no sense, an optimizer or parameter that is
    wrapped already, and incomplete names; MismatchError in backward() or step(), on every rank,
    where ranks differ. After an error in backward(), call zero_grad() and go on.

    A world of one is not touched: no hooks, no exchange.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already: wrap it once")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer: for optimizers of other "
            "kinds there is horo_lite.DistributedOptimizer"
        )
    wrapper = _wrapper_of.get(optimizer, _nobody)()
    if wrapper is not None:
        raise ValueError(
            "this optimizer has a DistributedOptimizer already: use that one, or delete it first"
        )
    options = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
        "check_every": check_every,
        "on_drift": on_drift,
        "check_finite": check_finite,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "bucket_bytes": bucket_bytes,
    }
    named = None if named_parameters is None else list(named_parameters)
    exchange = _Exchange(optimizer, named, options)
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
        @wraps(base.step)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if "weight" in kwargs and not takes_weight(base.step):
                raise TypeError(f"step() takes no weight: {_WEIGHT_COMES_FIRST}")
            optimizer._opt_called = True  # schedulers want to know
            return optimizer._exchange.step(MethodType(base.step, optimizer), args, kwargs)

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


class _Distributed:
    """What a wrapped optimizer has beside its own class."""

    __slots__ = ("_exchange",)
    _exchange: _Exchange

    def set_weight(self, weight: float) -> None:
        """This rank's number of samples of the step that comes, where batches are uneven.

        The averages of the step, and that of its closure's loss, are then those over all samples:
        each rank counts as often as its weight says, and a rank without samples gives 0. To be
        called on every rank or on none, after zero_grad() and before backward(), which sends the
        gradients; of several backward passes, before the first that does. step() forgets it.

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
            raise TypeError(f"synchronize() takes no weight: {_WEIGHT_COMES_FIRST}")
        self._exchange.flush()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, step() exchanges nothing; for scripts that call `synchronize()` themselves."""
        self._exchange.is_skipping = True
        try:
            yield
        finally:
            self._exchange.is_skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `passes` passes are summed before the ranks exchange them. Collective."""
        self._exchange.set_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> Any:
        """Gradients are None, or zeros; what backward passes did to them is forgotten."""
        self._exchange.begin_step()
        return super().zero_grad(set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer has these parameters, too. Collective."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._exchange.look_at_parameters()

    # Copies wrap copies of the optimizer: a class that was made here cannot be unpickled.

    def __reduce_ex__(self, protocol: Any) -> Any:
        exchange = self._exchange
        return _rewrapped, (exchange.inner(self), exchange.named(), exchange.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        exchange = self._exchange
        parts = exchange.inner(self), exchange.named(), exchange.options["groups"]
        inner, named, groups = copy.deepcopy(parts, memo)
        return _rewrapped(inner, named, {**exchange.options, "groups": groups})


def _rewrapped(inner: Any, named: list[tuple[str, Any]], options: dict[str, Any]) -> Any:
    return DistributedOptimizer(inner, named, **options)


@cache
def _class_of(base: Any) -> Any:
    body = {"step": _Step(base), "__module__": base.__module__, "__doc__": base.__doc__}
    return type(base.__name__, (_Distributed, base), body)


_WEIGHT_COMES_FIRST = (
    "torch's gradients are exchanged in backward(). Call optimizer.set_weight(n) on every rank "
    "before backward(), with its number of samples"
)


def _nobody() -> None:
    return None


class _Slot:
    """One parameter, and what has happened to its gradient."""

    __slots__ = ("exchanged", "home", "hook", "index", "is_away", "name", "parameter", "passed",
                 "passes", "touched", "travels", "version")  # fmt: skip

    def __init__(self, name: str, parameter: Any) -> None:
        self.name = name
        self.parameter = parameter
        self.index = 0
        self.hook: Any = None
        self.passes = 0  # since the last step() or zero_grad()
        self.passed = 0  # the number of the last pass that touched it
        self.touched = False  # since the last exchange
        self.travels = False  # announced to the reducer: not to be changed any more
        self.exchanged = False  # since the last step() or zero_grad()
        self.version = -1  # of a gradient that no pass has made, when it was exchanged
        self.home: Any = None  # where the gradient is to live, in shared memory
        self.is_away = False  # it cannot live there, and a copy travels

    def begin(self) -> None:
        self.passes = 0
        self.touched = self.exchanged = self.is_away = False

    def bring_home(self) -> Any:
        """The gradient, which now lives where it is to live."""
        gradient, home = self.parameter.grad, self.home
        self.is_away = False
        if home is None or gradient is home or not bucket_views.fits(gradient, home):
            return gradient
        home.copy_(gradient.detach())
        if gradient.requires_grad:  # of backward(create_graph=True): its history is not to be lost
            self.is_away = True
            return gradient
        self.parameter.grad = home
        return home

    def send_back(self) -> None:
        """The gradient has the result, wherever it lives."""
        if self.is_away:
            self.is_away = False
            self.parameter.grad.detach().copy_(self.home)


class _Adapter(TorchAdapter):
    """The gradients that were touched, in slots."""

    def gradient(self, slot: Any) -> Any:
        if slot.is_away:
            return slot.home
        gradient = slot.parameter.grad if slot.touched else None
        if gradient is None or gradient.layout is not torch.strided:
            return None
        if gradient.requires_grad:  # of backward(create_graph=True)
            gradient = gradient.detach()
        return gradient if HAS_TABLE else super().gradient(slot.parameter)

    def set_gradient(self, slot: Any, array: Any) -> None:
        slot.touched = True
        gradient = slot.parameter.grad
        if gradient is None:
            slot.parameter.grad = array
        elif gradient is array:
            pass
        elif _is_sparse(gradient):
            raise MismatchError(
                f"the gradient of {slot.name!r} is sparse on this rank and dense on others: make "
                "it one of the two on all of them, or pass sparse_as_dense=True"
            )
        else:
            gradient.detach().copy_(array)

    def missing(self, slot: Any, dtype: str, shape: tuple[int, ...]) -> Any:
        home = slot.home
        if home is not None and (str(home.dtype)[6:], tuple(home.shape)) == (dtype, shape):
            return home.zero_()
        # In the parameter's layout, as autograd makes them: on the way it is the same on all ranks.
        parameter = slot.parameter.detach()
        return torch.zeros_like(parameter, dtype=getattr(torch, dtype))

    def value(self, slot: Any) -> Any:
        return super().value(slot.parameter)

    def zeros_like(self, x: Any) -> Any:
        return torch.zeros_like(x.detach())


class _Exchange:
    """When the gradients of one optimizer travel."""

    def __init__(
        self, optimizer: Any, named: list[tuple[str, Any]] | None, options: dict[str, Any]
    ) -> None:
        self.number = next(_numbers)
        self.options = options
        self.op: Op | AdasumOp = options["op"]
        self.sparse_as_dense = bool(options["sparse_as_dense"])
        self._check(options)
        self._base = type(optimizer)
        self._inner = weakref.ref(optimizer)
        self._param_groups: Callable[[], list[dict[str, Any]]]
        attributes = optimizer.__dict__
        self._param_groups = lambda: attributes["param_groups"]
        self._names = _names(named, self._parameters())
        self.passes: int = options["backward_passes_per_step"]
        self.check_every = settings.check_every(options["check_every"])
        self.patched_step: Any = None
        self.is_skipping = False
        self.weight: float | None = None  # this step's, of this rank

        self._of_id: dict[int, _Slot] = {}
        self._finalizer = weakref.finalize(self, _release, self._of_id)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tasks: set[int] = set()  # at whose end something is to be done
        self._pass = 1  # the number of the outermost backward pass that runs or comes next
        self.is_nested = False  # passes inside of passes were seen: one may touch a slot twice
        self.follow_world()

    def follow_world(self) -> None:
        """The ranks are those of the world as it is now; the gradients of another are forgotten."""
        self.group = _group_of(self.options["process_set"])
        self.active = self.group is not None and self.group.size > 1
        self.slots: list[_Slot] = []
        self._unhooked: list[_Slot] = []
        self._due = True  # nothing was exchanged since the last step() or zero_grad()
        self._is_broken = False  # a pass did not come to its end
        self._n_steps = self._n_exchanges = 0
        self.weight = None
        for slot in self._of_id.values():
            slot.begin()
            slot.travels, slot.home, slot.parameter.grad = False, None, None
        _alone.discard(self)
        if not self.active:
            if is_initialized() and self.group is world().group:
                _alone.add(self)
            return
        assert self.group is not None
        options = self.options
        factor = float(options["gradient_predivide_factor"])
        compression = options["compression"]
        if isinstance(self.op, AdasumOp) and self.group.size & (self.group.size - 1):
            raise ValueError(
                "op=Adasum combines ranks in pairs, so their number must be a power of two, not "
                f"{self.group.size}: start as many, use a ProcessSet, or op=Average"
            )
        self.reducer = Reducer(
            _face_of(self.group, self.op, options["compression"]),
            _Adapter(),
            [],
            op=Average if isinstance(self.op, AdasumOp) else self.op,
            compression=compression if isinstance(compression, Compressor) else Compression.none,
            bucket_bytes=settings.bucket_bytes(options["bucket_bytes"]) or DEFAULT_BUCKET_BYTES,
            prescale_factor=1 / factor,
            postscale_factor=factor,
            options=[
                ("op", self.op.name),
                ("compression", getattr(compression, "name", type(compression).__name__)),
                ("backward_passes_per_step", str(self.passes)),
                ("gradient_predivide_factor", str(factor)),
                ("sparse_as_dense", str(self.sparse_as_dense)),
                ("check_every", str(self.check_every)),
                ("on_drift", str(options["on_drift"])),
                ("gradient_as_bucket_view", str(bool(options["gradient_as_bucket_view"]))),
            ],
            check_finite=options["check_finite"],
        )
        self._shares = bool(
            options["gradient_as_bucket_view"]
            and self.op is not Adasum
            and factor == 1
            and getattr(compression, "wire", "") == "none"
            and bucket_views.can_share(self.group)
        )
        self._memory: SharedMemory | None = None
        self.look_at_parameters()
        self._place()
        self.group.counting.add(self)

    def _check(self, options: dict[str, Any]) -> None:
        passes, factor = options["backward_passes_per_step"], options["gradient_predivide_factor"]
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(
                f"DistributedOptimizer takes op=Average, Sum or Adasum, not {self.op!r}"
            )
        if not isinstance(passes, int) or passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}, not 1 or more")
        if not factor > 0:
            raise ValueError(f"gradient_predivide_factor is {factor}, not more than 0")
        if factor != 1 and self.op is not Average:
            raise ValueError("gradient_predivide_factor needs op=Average")
        if options["check_finite"] not in (None, "raise", "warn"):
            raise ValueError(
                f'check_finite is "raise", "warn" or None, not {options["check_finite"]!r}'
            )
        settings.bucket_bytes(options["bucket_bytes"])
        check_reaction(options["on_drift"])
        compression = options["compression"]
        if not isinstance(compression, Compressor) and not all(
            callable(getattr(compression, name, None)) for name in ("compress", "decompress")
        ):
            raise ValueError(
                "compression is one of Compression, or has compress() and decompress(), not "
                f"{compression!r}"
            )
        groups, n = options["groups"], options["num_groups"]
        if not isinstance(n, int) or n < 0 or (isinstance(groups, int) and groups < 0):
            raise ValueError("the number of groups is 0 or more")
        if groups is not None and not isinstance(groups, int):
            if not isinstance(groups, (list, tuple)) or not all(
                isinstance(group, (list, tuple)) for group in groups
            ):
                raise ValueError("groups is a number, or a list of lists of parameters")
            seen = Counter(id(parameter) for group in groups for parameter in group)
            if any(count > 1 for count in seen.values()):
                raise ValueError("a parameter is in two of the groups")

    # Which parameters there are.

    def inner(self, wrapped: Any) -> Any:
        """The optimizer that was wrapped, or one like it if it is gone."""
        inner = self._inner()
        if inner is None:
            inner = object.__new__(self._base)
            inner.__dict__ = wrapped.__dict__
        return inner

    def named(self) -> list[tuple[str, Any]]:
        return [
            (self._names.get(id(parameter), name), parameter)
            for name, parameter in self._parameters()
        ]

    def _parameters(self) -> list[tuple[str, Any]]:
        return [
            (name, parameter)
            for g, group in enumerate(self._param_groups())
            for name, parameter in zip(
                group.get("param_names")
                or [f"param_groups[{g}][{i}]" for i in range(len(group["params"]))],
                group["params"],
                strict=True,
            )
        ]

    def look_at_parameters(self) -> None:
        """The slots are those of the parameters as they are now; whoever can, has a hook."""
        if not self.active:
            return
        if sum(len(group["params"]) for group in self._param_groups()) != len(self.slots):
            named = self.named()
            for name, parameter in named:
                owner = _owner_of.get(id(parameter), _nobody)()
                if owner is not None and owner is not self:
                    raise ValueError(
                        f"parameter {name!r} belongs to another DistributedOptimizer, and its "
                        "gradient would be exchanged twice: give each parameter to one of them"
                    )
            self.slots = []
            for i, (name, parameter) in enumerate(named):
                slot = self._of_id.get(id(parameter))
                if slot is None:
                    slot = self._of_id[id(parameter)] = _Slot(name, parameter)
                    if parameter.grad is not None:
                        setattr(parameter.grad, _MARK, 0)  # not touched yet
                slot.index = i
                self.slots.append(slot)
                _owner_of[id(parameter)] = weakref.ref(self)
            gone = self._of_id.keys() - {id(parameter) for _, parameter in named}
            _release({i: self._of_id.pop(i) for i in gone})
            self._unhooked = [slot for slot in self.slots if slot.hook is None]
            self.reducer.bind([(slot.name, slot) for slot in self.slots], self._together())
            self._make_homes()
        for slot in [slot for slot in self._unhooked if slot.parameter.requires_grad]:
            hook = _hook(weakref.ref(self), slot)
            slot.hook = slot.parameter.register_post_accumulate_grad_hook(hook)
            self._unhooked.remove(slot)

    def _together(self) -> list[int]:
        groups = self.options["groups"] or self.options["num_groups"]
        if isinstance(groups, int):
            n = len(self.slots)
            return [i * groups // n for i in range(n)] if groups else []
        number = {id(p): g for g, group in enumerate(groups) for p in group}
        return [number.get(id(slot.parameter), -1) for slot in self.slots]

    def set_passes(self, passes: int) -> None:
        self._check({**self.options, "backward_passes_per_step": passes})
        self.options["backward_passes_per_step"] = self.passes = passes
        if self.active:
            self.reducer.options["backward_passes_per_step"] = str(passes)

    # During backward().

    def touch(self, slot: _Slot) -> None:
        """A pass has added to the gradient."""
        if not self.active:  # any more
            return
        with self._lock:
            task = _graph_task()
            if task not in self._tasks and not self.enter(task):
                return
            gradient = self._densify(slot)
            if slot.passed == self._pass:  # a second time, by another pass inside of this one
                self.is_nested = True
                if slot.travels and not self.reducer.hold(slot.index):
                    raise RuntimeError(
                        f"the gradient of {slot.name!r} was added to after it was sent, by a "
                        "backward pass inside of another, the first of its kind. From now on they "
                        "are waited for: call zero_grad() and do this step again"
                    )
                slot.bring_home()
                return
            if slot.passes and not hasattr(gradient, _MARK):
                slot.begin()  # another gradient: somebody has set the last one to None
            slot.passed = self._pass
            slot.passes += 1
            slot.touched = True
            if slot.passes > self.passes:
                slot.passes = self.passes
                raise RuntimeError(
                    f"the gradient of {slot.name!r} was computed {self.passes + 1} times before "
                    f"step(): with backward_passes_per_step={self.passes}, call step(), or "
                    f"zero_grad() to begin anew, after every {self.passes} backward passes; or "
                    "raise backward_passes_per_step"
                )
            if slot.exchanged and self.op is not Average:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} was exchanged before its {self.passes} passes "
                    f"were complete, because others' were, and with op={self.op.name} it cannot be "
                    "exchanged again: let all passes touch the same parameters, or use op=Average"
                )
            gradient = slot.bring_home()
            setattr(gradient, _MARK, slot.passes)
            if slot.passes == self.passes and not self.is_nested:
                slot.travels = True
                self.reducer.ready(slot.index)

    def _densify(self, slot: _Slot) -> Any:
        """The gradient, which is dense from now on if that was asked for."""
        gradient = slot.parameter.grad
        if self.sparse_as_dense and _is_sparse(gradient):
            slot.parameter.grad = gradient = gradient.to_dense()
        return gradient

    def enter(self, task: int) -> bool:
        """This optimizer will hear of the end of that graph task; False if it is not to act."""
        if os.getpid() != self._pid:
            return False  # a forked child's backward() is its own affair
        if self._is_broken:
            self._mend()
        self._give_weight()
        self._tasks.add(task)
        known = _passes.get(task)
        if known is None:
            known = _passes[task] = _Pass(task)
            torch.autograd.Variable._execution_engine.queue_callback(known)
        known.exchanges.append(self)
        return True

    def end_pass(self) -> None:
        """The outermost backward() is about to return."""
        with self._lock:
            self._tasks.clear()
            self._pass += 1
            self._look_for_unhooked()
            if any(slot.touched and slot.passes >= self.passes for slot in self.slots):
                self._exchange()

    def break_pass(self, task: int) -> None:
        """A pass has ended with an error; that may be heard of late."""
        self._is_broken = self._is_broken or task in self._tasks

    def _mend(self) -> None:
        self.reducer.abandon()
        self._is_broken = False
        self._tasks.clear()
        self._pass += 1
        for slot in self.slots:
            slot.travels = False

    # Beside backward().

    def set_weight(self, weight: float) -> None:
        weight = checked_weight(weight, self.op)  # type: ignore[arg-type]  # Adasum is refused
        if not self.active:
            return
        with self._lock:
            if self._is_broken:
                self._mend()
            if self._tasks or not self._due:
                raise RuntimeError(
                    "set_weight() comes too late: gradients of this step have been exchanged. "
                    "Call it before backward(), and after the zero_grad() that begins a step"
                )
            self.weight = weight

    def _give_weight(self) -> None:
        if self.reducer.weight != self.weight:
            self.reducer.weight = self.weight

    def begin_step(self) -> None:
        """Gradients of another step come: a weight that has served is not theirs."""
        if self.active and not self._due:
            self.weight = None
        self.begin()

    def begin(self) -> None:
        """Other gradients come: zero_grad(), step()."""
        if not self.active:
            return
        with self._lock:
            if self._is_broken:
                self._mend()
            self._due = True
            for slot in self.slots:
                slot.begin()

    def flush(self) -> None:
        """What no backward() has exchanged is exchanged; nothing, if there is nothing."""
        if not self.active or os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_broken:
                self._mend()
            self.look_at_parameters()
            self._look_for_unhooked()
            for slot in self.slots:
                gradient = slot.parameter.grad
                known = gradient is None or slot.exchanged or hasattr(gradient, _MARK)
                slot.touched = slot.touched or not known  # one assigned by hand
            # A rank whose passes touched nothing meets here those whose did.
            if self._due or any(slot.touched for slot in self.slots):
                self._exchange()

    def step(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `step` returns, with the gradients of all ranks."""
        if not self.active:
            return step(*args, **kwargs)
        if args and callable(args[0]):
            args = (self._averaging(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._averaging(kwargs["closure"])}
        elif not self.is_skipping:
            self.flush()
        result = step(*args, **kwargs)
        self.begin()
        self.weight = None
        self._n_steps, self._n_exchanges = self._n_steps + 1, 0
        self._place()
        if self.check_every and self._n_steps % self.check_every == 0:
            assert self.group is not None
            compare(
                self.named(),
                group=self.group,
                on_drift=self.options["on_drift"],
                step=self._n_steps,
                needs_all=False,
            )
        return result

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """`closure`, after which gradients and loss are those of all ranks."""

        @wraps(closure)
        def averaged() -> Any:
            self.begin()
            loss = closure()
            self.flush()
            if not isinstance(loss, (int, float, torch.Tensor)):
                return loss  # nothing that an optimizer could decide by
            value = torch.as_tensor(loss).detach().to(torch.float64, copy=True).reshape(())
            assert self.group is not None
            name, op = "the closure's loss", Sum if self.op is Sum else Average
            self.group.exchange([value], names=[name], label=name, op=op, weight=self.weight)
            if isinstance(loss, torch.Tensor):
                return value.to(loss.dtype).reshape(loss.shape)
            return value.item()

        return averaged

    def _look_for_unhooked(self) -> None:
        """Gradients that no hook can announce, such as those of a master copy of the weights."""
        for slot in self._unhooked:
            gradient = slot.parameter.grad
            if gradient is None:
                continue
            if not hasattr(gradient, _MARK) or gradient._version != slot.version:
                slot.touched = True
                slot.passes = max(slot.passes, 1)
        if self._unhooked:
            self.look_at_parameters()

    def _exchange(self) -> None:
        reducer = self.reducer
        sparse = [s for s in self.slots if s.touched and _is_sparse(self._densify(s))]
        reducer.note = ";".join(map(_sparse_note, sparse))
        for slot in self.slots:
            if slot.touched and not slot.travels:
                slot.bring_home()
        self._give_weight()
        try:
            reducer.finish()
            if any(reducer.notes):
                self._exchange_sparse(reducer.notes)
            # All ranks have just agreed on a plan, and so on what lies where in their memory.
            if self._shares and reducer.shared is None and reducer.all_are_here:
                self._share()
            self._n_exchanges += 1
        except MismatchError:
            # Raised on all ranks: they may have been in different steps, and begin anew.
            self._n_steps = self._n_exchanges = 0
            raise
        finally:
            self._due = False
            for slot in self.slots:
                if slot.touched:
                    slot.exchanged = True
                    slot.send_back()
                    slot.touched = slot.travels = False
                    if slot.hook is None or slot.passes == 0:
                        self._mark(slot)
            self._place()

    def _make_homes(self) -> None:
        """There is memory for every gradient, which other ranks will be able to see."""
        self.reducer.shared = None
        if self._shares:
            # As they travel, so that those of a bucket are neighbours.
            slots = self.slots[::-1]
            self._memory, homes = bucket_views.homes_of([slot.parameter for slot in slots])
            for slot, home in zip(slots, homes, strict=True):
                slot.home = home

    def _share(self) -> None:
        """Gradients are reduced where they lie from now on, unless a rank cannot. Collective."""
        assert self.group is not None
        if share(self.group, self._memory):
            self.reducer.shared = self._memory
            return
        if self.group.rank == 0:
            warnings.warn(
                "horo_lite: gradient_as_bucket_view=True, but the ranks cannot see each other's "
                "memory, or one got none: gradients are exchanged as without it",
                stacklevel=2,
            )
        self._shares = False
        self._memory = None
        for slot in self.slots:
            if not slot.is_away:
                slot.home = None

    def _mark(self, slot: _Slot) -> None:
        """The gradient is known, although no backward() has made it."""
        gradient = slot.parameter.grad
        if gradient is not None:
            setattr(gradient, _MARK, slot.passes)
            slot.version = gradient._version

    def reset_counts(self) -> None:
        """All ranks have joined, after steps of different numbers."""
        self._n_steps = self._n_exchanges = 0
        self._place()

    def _place(self) -> None:
        # A backward() that exchanges on some ranks only would otherwise meet the next one's.
        self.reducer.position = f", exchange {self._n_exchanges + 1} of step {self._n_steps + 1}"

    def _exchange_sparse(self, notes: list[str]) -> None:
        found = {
            int(index): (int(n_dims), dtype)
            for note in notes
            for index, n_dims, dtype in (item.split(":") for item in note.split(";") if item)
        }
        assert self.group is not None
        if self.op not in (Average, Sum):  # on all ranks alike, which know the notes of all
            raise ValueError(
                f"the gradient of {self.slots[min(found)].name!r} is sparse, and op={self.op.name} "
                "combines dense gradients only: pass sparse_as_dense=True, or use op=Average or Sum"
            )
        divisor = float(self.group.size) if self.op is Average else 1.0
        if self.weight is not None:
            name = "the weights of sparse gradients"
            total = float(
                ops.allreduce(np.array([self.weight]), Sum, name=name, group=self.group)[0]
            )
            divisor = total / self.weight if self.weight else math.inf
        for index, (n_dims, dtype) in sorted(found.items()):
            slot = self.slots[index]
            gradient = slot.parameter.grad if slot.touched else None
            shape = slot.parameter.shape
            if gradient is None or divisor == math.inf:
                indices = torch.empty((0, n_dims), dtype=torch.int64, device=slot.parameter.device)
                values = torch.empty(
                    (0, *shape[n_dims:]),
                    dtype=getattr(torch, dtype),
                    device=slot.parameter.device,
                )
            else:
                gradient = gradient.coalesce()
                indices, values = gradient.indices().t().contiguous(), gradient.values() / divisor
            name = f"the gradient of {slot.name!r}"
            indices = ops.allgather(indices, name=f"{name}, indices", group=self.group)
            values = ops.allgather(values, name=f"{name}, values", group=self.group)
            slot.parameter.grad = torch.sparse_coo_tensor(
                indices.t(), values, shape, check_invariants=False
            ).coalesce()
            slot.touched = True
            self._mark(slot)


class _Pass:
    """What is to be done when one graph task, a call of the autograd engine, ends.

    The engine calls it, or drops it where the task ended with an error.
    """

    def __init__(self, task: int) -> None:
        self.task = task
        self.exchanges: list[_Exchange] = []
        self.is_over = False

    def __call__(self) -> None:
        self.is_over = True
        node = _evaluating()
        if node is not None:  # this task is a backward() inside of another
            for exchange in self.exchanges:
                exchange.is_nested = True
            _hand_over(node, self.exchanges)
            return
        # In the order in which they were made: that of their hooks may differ between ranks.
        waiting = sorted(self.exchanges, key=lambda exchange: exchange.number)
        errors: list[HoroLiteError] = []
        try:
            while waiting:
                try:
                    waiting.pop(0).end_pass()
                except (MismatchError, NonFiniteError) as error:  # on all ranks alike: go on
                    errors.append(error)
        finally:
            for exchange in waiting:
                exchange.break_pass(self.task)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        if not self.is_over:
            for exchange in self.exchanges:
                exchange.break_pass(self.task)


def _hand_over(node: Any, exchanges: list[_Exchange]) -> None:
    """The task that `node` belongs to has something to do at its end.

    `node` is being evaluated, and its successors will be, by that task.
    """
    handles: list[Any] = []

    def before(_: Any) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        task = _graph_task()
        for exchange in exchanges:
            if task not in exchange._tasks:
                exchange.enter(task)

    for successor, _ in node.next_functions:
        if successor is not None:
            handles.append(successor.register_prehook(before))


def _follow_world() -> None:
    alive = {exchange for owner in _owner_of.values() if (exchange := owner()) is not None}
    for exchange in sorted(alive.union(_alone), key=lambda exchange: exchange.number):
        exchange.follow_world()


on_renewed(_follow_world)


def _hook(reference: weakref.ref[_Exchange], slot: _Slot) -> Callable[[Any], None]:
    def touched(_: Any) -> None:
        exchange = reference()
        if exchange is not None:
            exchange.touch(slot)

    return touched


def _release(slots: Mapping[int, _Slot]) -> None:
    """These parameters are nobody's any more."""
    for i, slot in slots.items():
        _owner_of.pop(i, None)
        if slot.hook is not None:
            slot.hook.remove()


def _is_sparse(gradient: Any) -> bool:
    return gradient is not None and gradient.layout is not torch.strided


def _sparse_note(slot: _Slot) -> str:
    gradient = slot.parameter.grad
    return f"{slot.index}:{gradient.sparse_dim()}:{str(gradient.dtype).removeprefix('torch.')}"


def _names(
    named: list[tuple[str, Any]] | None, parameters: list[tuple[str, Any]]
) -> dict[int, str]:
    if named is None:
        return {}
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in named):  # type: ignore[redundant-expr]
        raise ValueError(
            "named_parameters is pairs (name, parameter), as model.named_parameters() gives them"
        )
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has {twice[0]!r} more than once")
    names = {id(parameter): name for name, parameter in named}
    lost = [name for name, parameter in parameters if id(parameter) not in names]
    if lost:
        raise ValueError(
            f"named_parameters lacks {len(lost)} of the optimizer's parameters, {lost[0]} first: "
            "pass those of the whole model"
        )
    return names


def _group_of(process_set: ProcessSet | Group | None) -> Group | None:
    """The ranks; None where this one is not among them."""
    if isinstance(process_set, ProcessSet) and not process_set.included():
        return None
    return group_of(process_set)


class _Face:
    """A group, for a reducer, that exchanges in another way."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group(), name)

    def group(self) -> Group:
        group = self._group()
        assert group is not None
        return group

    def compares_later(self, gpu: int | None) -> bool:
        return False

    def exchange(self, arrays: Sequence[Any], **options: Any) -> bool:
        self.exchange_async(arrays, **options).wait()
        return True

    def exchange_async(self, arrays: Sequence[Any], **options: Any) -> Handle:
        raise NotImplementedError


class _Adasum(_Face):
    """Its exchanges are Adasums."""

    def exchange_async(self, arrays: Sequence[Any], **options: Any) -> Handle:
        return adasum_async_(self.group(), arrays, options["names"], options["label"])


class _Compressing(_Face):
    """The user's own compressor is called before and after."""

    def __init__(self, group: Group, compressor: Any) -> None:
        super().__init__(group)
        self._compressor = compressor

    def exchange_async(self, arrays: Sequence[Any], **options: Any) -> Handle:
        pairs = [self._compressor.compress(array) for array in arrays]
        small = [tensor.contiguous() for tensor, _ in pairs]
        handle = self.group().exchange_async(small, **options)

        def finish() -> None:
            handle.wait()
            for array, tensor, (_, context) in zip(arrays, small, pairs, strict=True):
                array.copy_(self._compressor.decompress(tensor, context))

        return Handle(handle.name, handle._job, finish)


def _face_of(group: Group, op: Op | AdasumOp, compression: Any) -> Any:
    """What the reducer exchanges through; one a group, since it numbers the reducers of each."""
    key, face = compression, _Face(group)
    if isinstance(op, AdasumOp):
        key, face = "Adasum", _Adasum(group)
    elif not isinstance(compression, Compressor):
        face = _Compressing(group, compression)
    else:
        return group
    return _faces.setdefault(group, {}).setdefault(key, face)


_faces: weakref.WeakKeyDictionary[Group, dict[Any, Any]] = weakref.WeakKeyDictionary()
