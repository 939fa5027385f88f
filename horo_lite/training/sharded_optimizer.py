"""shard_state=True for optimizers of any framework: each rank has those of its share of parameters.

Optimizers keep their state in ways of their own, many by the positions of the parameters that they
were given, so it cannot be divided from outside. Instead a function makes them, and each rank has
one for every parameter that it owns, and only these: a state belongs to one parameter, however many
ranks there are, and the state of all is a dict by the parameters' names.

Gradients are averaged on all ranks, as without it. In a step, each rank's optimizers update its
parameters; then all ranks receive all parameters.

From the first step on, the state is divided. Before that, and after load_state_dict(), each rank
knows all of it without communication: its optimizers have their part, the rest is what was loaded,
or what the function makes. So replacements for dead ranks, for example, can save theirs.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.adapters import adapter_of, to_host
from horo_lite.adapters.object import ZERO_GRAD, Named, is_array, keyed
from horo_lite.collectives.arrays import gpu_of
from horo_lite.state.broadcast import is_writable
from horo_lite.state.optimizer_state import OptimizerState, in_host_memory
from horo_lite.state.wrapper import Divided
from horo_lite.training.closures import (
    closure_of,
    returning,
    step_names,
    takes_steps,
    with_closure,
)
from horo_lite.training.gradient_memory import tensors_of
from horo_lite.training.sharding import (
    changing,
    check_not_lost,
    check_not_torn,
    collected,
    compare_division,
    owners_of,
    receive_values,
)

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

_RATES = ("lr", "learning_rate")

Change = Callable[[Any], Any]
"""What is done to each optimizer."""


class ShardedOptimizer(Divided):
    """Stands for the optimizers of all parameters, and has those of this rank's share.

    Its attributes are those of this rank's first one; they are set on all of them, and methods are
    called on all of them.
    """

    _shares: Shares

    def __init__(self, shares: Shares) -> None:
        object.__setattr__(self, "_shares", shares)

    _cannot_be_copied = (
        "an optimizer with shard_state=True cannot be copied or pickled, since this rank has a "
        "share of its state only: copy or save what its state_dict() returns"
    )

    @property
    def _divided_between(self) -> Group | None:
        return self._shares.group if self._shares.is_divided else None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, by name. Collective after the first step."""
        return self._shares.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` has returned, in a job with any number of ranks."""
        self._shares.load(state)

    def __getattr__(self, name: str) -> Any:
        if name == "_shares":  # the object is being made
            raise AttributeError(name)
        return self._shares.attribute(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._shares.all(lambda optimizer: setattr(optimizer, name, value))

    def __delattr__(self, name: str) -> None:
        self._shares.all(lambda optimizer: delattr(optimizer, name))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._shares.first)

    def __dir__(self) -> Iterable[str]:
        return {*dir(type(self)), *dir(self._shares.first)}

    def __repr__(self) -> str:
        return repr(self._shares.first)


class Shares:
    """The optimizers of this rank's share of the parameters.

    Args:
        make: Returns an optimizer for the parameters in a container like `parameters`.
        parameters: Nested dicts, lists and tuples of all parameters.
        named: Returns the parameters with their names.
        ranks: Returns the ranks.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        parameters: Any,
        named: Callable[[], Named],
        ranks: Callable[[], Group],
    ) -> None:
        self._make, self._now, self._ranks = make, named, ranks
        self._alone = list(_alone(parameters))
        self._named = named()
        if not self._named:
            raise ValueError("shard_state=True needs parameters, and parameters= has none")
        twice = [name for name, n in Counter(name for name, _ in self._named).items() if n > 1]
        if twice:
            raise ValueError(
                f"shard_state=True needs different names for all parameters, but {twice[0]!r} is "
                "the name of several: the state is divided, saved and loaded by name"
            )
        self.is_torn = False
        self._optimizers: dict[int, Any] = {}
        self._n_steps = 0
        self._deal({})

    @property
    def is_divided(self) -> bool:
        return self._rest is None

    @property
    def first(self) -> Any:
        """The optimizer whose attributes are read."""
        return next(iter(self._optimizers.values()))

    # Making them.

    def _deal(self, states: dict[str, Any]) -> None:
        """Make the optimizers of this rank's share, with these states, if there are any."""
        self.group = group = self._ranks()
        sizes = [math.prod(to_host(parameter).shape) for _, parameter in self._named]
        self._owners = owners_of(sizes, group.size)
        self._rest: dict[str, Any] | None = states
        self._changes: list[Change] = []
        mine = [i for i, owner in enumerate(self._owners) if owner == group.rank]
        # A rank without a parameter has the optimizer of another rank's, too, for its attributes.
        here = mine or [sizes.index(min(sizes))]
        with changing(self):
            self._optimizers = {i: self._made(i, self._optimizers.get(i)) for i in here}
        self._seen = _frozen(_settings(self.first))

    def _made(self, i: int, optimizer: Any = None) -> Any:
        """Return an optimizer of a parameter, in the state in which it is while that is whole."""
        assert self._rest is not None
        name, parameter = self._named[i]
        if optimizer is None:
            optimizer = self._make(self._alone[i])
            _check_made(optimizer, name)
        if name in self._rest:
            OptimizerState(optimizer, [(name, parameter)]).write(self._rest[name])
        for change in self._changes:
            change(optimizer)
        return optimizer

    # Attributes.

    def all(self, change: Change) -> list[Any]:
        """Return the results of doing something to each optimizer of this rank.

        While the state is whole, it will be done to those of other ranks where these are needed.
        """
        results = [change(optimizer) for optimizer in self._optimizers.values()]
        if not self.is_divided:
            self._changes.append(change)
        return results

    def attribute(self, name: str) -> Any:
        """Return an attribute of the first optimizer, or a method of all of them."""
        first = self.first
        found, finder = getattr(first, name), adapter_of(first)
        is_step, steps = name in finder.steps, step_names(first, finder)
        if not callable(found) or (name in getattr(first, "__dict__", ()) and not is_step):
            return found

        @wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            if is_step:
                return self._step(name, args, kwargs, finder.takes_closure)
            if name in ZERO_GRAD:
                return self._zero_grad(name, args, kwargs)
            if name in (*finder.before_step, *finder.of_all) or takes_steps(found, steps):
                raise TypeError(
                    f"{type(first).__name__}.{name}() is about all parameters, and with "
                    "shard_state=True this rank has optimizers of its share only: change gradients "
                    "between synchronize() and a step inside `with optimizer.skip_synchronize():`, "
                    "and use state_dict() for the state"
                )
            return self.all(lambda optimizer: getattr(optimizer, name)(*args, **kwargs))[0]

        return method

    def _spread(self) -> None:
        """Give all optimizers what has been changed in place in the first one's options.

        That is what schedulers of learning rates do: `param_groups[0]["lr"] = …`, `lr.assign(…)`.
        """
        now = _settings(self.first)
        frozen = _frozen(now)
        changed = {key: x for key, x in now.items() if frozen[key] != self._seen.get(key, self)}
        if changed:
            self.all(partial(_set, changed))
        self._seen = frozen

    def _zero_grad(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clear the gradients of all parameters, in the way of this rank's optimizers."""
        results = [
            getattr(optimizer, name)(*args, **kwargs) for optimizer in self._optimizers.values()
        ]
        mine = [self._named[i][1] for i in self._optimizers]
        are_cleared = all(adapter_of(p).gradient(p) is None for p in mine)
        for _, parameter in self._named:
            adapter = adapter_of(parameter)
            if are_cleared:
                adapter.clear_gradient(parameter)
                continue
            gradient = adapter.gradient(parameter)
            if gradient is None:
                continue
            if is_writable(gradient):
                gradient[...] = 0
            else:
                adapter.set_gradient(parameter, adapter.zeros(str(gradient.dtype), gradient.shape))
        return results[0]

    # A step.

    def _step(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], takes_closure: bool
    ) -> Any:
        closure = closure_of(args, kwargs) if takes_closure else None
        loss = closure() if closure is not None else None
        self._divide()
        self._spread()
        results = []
        with changing(self) if self.group.size > 1 else nullcontext():
            for i, optimizer in self._optimizers.items():
                if closure is not None:
                    own = returning(loss, partial(_values, self._named[i][1]))
                    args, kwargs = with_closure(own, args, kwargs)
                results.append(getattr(optimizer, name)(*args, **kwargs))
            self._seen = _frozen(_settings(self.first))  # some count their steps in them
            self._n_steps += 1
            self._receive()
        return loss if closure is not None else results[0]

    def _divide(self) -> None:
        """Forget the rest of the state if it is whole. Collective in that case."""
        check_not_torn(self)
        now = self._now()
        if len(now) != len(self._named) or not all(
            map(is_, (p for _, p in now), (p for _, p in self._named))
        ):
            raise RuntimeError(
                "the parameters are not those that shard_state=True divided between the ranks: "
                "change the values of the same objects, or make a DistributedOptimizer of the new "
                "ones, and load the state_dict() of this one"
            )
        if self.is_divided:
            check_not_lost(self.group, self._ranks())
            return
        if self.group is not self._ranks():
            self._deal(self.state())
        self._check_memory()
        dealt = [
            f"{name!r}: rank {owner}"
            for (name, _), owner in zip(self._named, self._owners, strict=True)
        ]
        compare_division(
            self.group,
            self._label("division"),
            dealt,
            self._named,
            self.state,
            is_new=not self._rest,
        )
        self._rest, self._changes, self._n_steps = None, [], 0

    def _check_memory(self) -> None:
        """Raise ValueError for parameters that two ranks would update."""
        values = [(name, to_host(parameter)) for name, parameter in self._named]
        places = {id(parameter): name for name, parameter in self._named}
        twice = [(name, places[id(p)]) for name, p in self._named if places[id(p)] != name]
        held = [(name, x) for name, x in values if gpu_of(x) is None and is_writable(x)]
        overlaps = tensors_of([x for _, x in held]).overlaps()
        twice += [(held[i][0], held[k][0]) for i, k, *_ in overlaps]
        for one, other in twice:
            raise ValueError(
                f"shard_state=True needs parameters that share no memory, but {one!r} and "
                f"{other!r} do: pass what is used in both places once"
            )

    def _receive(self) -> None:
        """Give all ranks the parameters as their owners have updated them."""
        label = self._label(f"step {self._n_steps}")
        receive_values(self.group, label, self._owners, self._named)

    def _label(self, what: str) -> str:
        return f"{what} of a {type(self.first).__name__} with shard_state=True"

    # The state.

    def state(self) -> dict[str, Any]:
        """Return the state of all parameters, by name. Collective if it is divided.

        It is whole from now on, until the next step.
        """
        check_not_torn(self)
        self._spread()
        if self._rest is None:
            check_not_lost(self.group, self._ranks())
            mine = {
                self._named[i][0]: self._read(i, x)
                for i, x in self._optimizers.items()
                if self._owners[i] == self.group.rank
            }
            self._rest = collected(self.group, self._label("state_dict()"), mine)
        return {name: self._state_of(i) for i, (name, _) in enumerate(self._named)}

    def _state_of(self, i: int) -> Any:
        """Return the state of a parameter, while that of all is whole."""
        assert self._rest is not None
        name, _ = self._named[i]
        if i in self._optimizers:
            return self._read(i, self._optimizers[i])
        if name in self._rest and not self._changes:
            return self._rest[name]
        return self._read(i, self._made(i))

    def _read(self, i: int, optimizer: Any) -> Any:
        return OptimizerState(optimizer, [self._named[i]]).read()

    def load(self, state: Mapping[str, Any]) -> None:
        names = [name for name, _ in self._named]
        given: Mapping[Any, Any] = dict(state)
        for name in (*names, *given):
            if name not in given or name not in names:
                raise ValueError(
                    f"the state has {'no' if name in names else 'a'} parameter {name!r}, "
                    f"{'but' if name in names else 'and'} this optimizer has"
                    f"{'' if name in names else ' none'}: pass what state_dict() of an optimizer "
                    "with shard_state=True and the same parameters has returned"
                )
        self._deal(copy.deepcopy(dict(state)))


def is_factory(obj: Any) -> bool:
    """Return whether this makes optimizers, and is none."""
    steps = adapter_of(obj).steps
    is_optimizer = any(callable(getattr(obj, name, None)) for name in steps)
    return callable(obj) and (isinstance(obj, type) or not is_optimizer)


def _values(parameter: Any) -> list[Any]:
    return [to_host(parameter)]


def _check_made(optimizer: Any, name: str) -> None:
    kind, adapter = type(optimizer).__name__, adapter_of(optimizer)
    if adapter.face is not None:
        raise TypeError(
            f"the function that shard_state=True calls has made a {kind}, which is wrapped by the "
            f"DistributedOptimizer of {adapter.face}: pass that the {kind} itself"
        )
    if reason := adapter.combines(optimizer):
        raise ValueError(
            f"shard_state=True needs an optimizer in which the update of a parameter depends on no "
            f"other one, but that of a {kind} does: {reason}"
        )
    found = adapter.parameters(optimizer)
    if len(found) > 1:
        raise TypeError(
            f"the function that shard_state=True calls has made a {kind} of {len(found)} "
            f"parameters, among them {found[1][0]!r}, when it was called with {name!r} alone: it "
            "must use the parameters in its argument, and no others"
        )


def _alone(tree: Any) -> Iterator[Any]:
    """Return for each leaf, in the order of `name_leaves`, the same containers with it alone."""
    if isinstance(tree, Mapping):
        yield from ({key: one} for key, x in tree.items() for one in _alone(x))
    elif (pairs := keyed(tree)) is not None:
        yield from ([(key, one)] for key, x in pairs for one in _alone(x))
    elif isinstance(tree, (list, tuple)):
        yield from ([one] for x in tree for one in _alone(x))
    else:
        yield tree


def _settings(optimizer: Any) -> dict[Any, Any]:
    """Return the options of its groups, or its learning rate; not its parameters."""
    groups: Iterable[Any] | None = getattr(optimizer, "param_groups", None)
    if groups is None:
        return {name: getattr(optimizer, name, None) for name in _RATES}
    return {
        (i, key): x
        for i, group in enumerate(groups)
        if isinstance(group, dict)
        for key, x in group.items()
        if key != "params"
    }


def _set(settings: Mapping[Any, Any], optimizer: Any) -> None:
    for key, x in settings.items():
        if isinstance(key, tuple):
            optimizer.param_groups[key[0]][key[1]] = x
        else:
            setattr(optimizer, key, x)


def _frozen(settings: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what can be compared with later settings, of which some may be changed in place."""

    def frozen(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [frozen(each) for each in x]
        if is_array(x) or isinstance(x, adapter_of(x).array_types):
            return np.array(to_host(in_host_memory(x))).tobytes()
        return x

    return {key: frozen(x) for key, x in settings.items()}
