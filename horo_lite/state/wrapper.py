"""The two ways of wrapping an optimizer, and how functions on a model's state see through one.

A `Sharing` wrapper is of a class derived from the optimizer's, and shares its `__dict__`: for
frameworks that require an object of their class, and whose optimizers are written in Python. A
`Wrapper` is a proxy: for all others.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from horo_lite.adapters import adapter_of
from horo_lite.adapters.object import Named

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


class Wrapped(Protocol):
    """The state of a wrapper itself."""

    inner: Any

    @property
    def n_steps(self) -> int:
        """Return the number of steps taken."""

    @property
    def is_midway(self) -> bool:
        """Return whether a step has begun, which may have changed parameters, and not ended."""

    def named(self) -> Named:
        """Return the parameters with their names, as passed to the wrapper."""

    def begin_anew(self) -> None:
        """Forget and clear the gradients of the step in progress."""


class Wrapper:
    """Base of optimizer wrappers, which show the inner one's attributes and class as their own."""

    _own: Wrapped


class DividedState:
    """Base of an optimizer, or an optimizer's state, that shard_state divides between the ranks."""

    _cannot_be_copied: ClassVar[str] = ""
    """Why, and what can be copied instead; empty if copies have all of it."""

    @property
    def _divided_between(self) -> Group | None:
        """The ranks that have the parts; None while each knows all of the state."""
        raise NotImplementedError

    @property
    def is_sharded(self) -> bool:
        """Whether no rank has the state of all parameters, so that reading it is collective."""
        return self._divided_between is not None

    @property
    def is_lost(self) -> bool:
        """Whether the ranks that have the parts are no longer the ranks of a world."""
        ranks = self._divided_between
        return ranks is not None and ranks.is_closed

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._cannot_be_copied:
            raise RuntimeError(f"{self._cannot_be_copied}, which every rank must call")
        return super().__reduce_ex__(protocol)


class Divided(DividedState):
    """Base of what stands for an optimizer, and has several, each of one parameter.

    The state of all is what its `state_dict()` returns, by the parameters' names.
    """


def is_divided(optimizer: Any) -> bool:
    """Return whether it is a Divided; isinstance() would use the class that it shows."""
    return issubclass(type(optimizer), Divided)


def wrapped(obj: Any) -> Wrapped | None:
    """Return the state of a wrapper itself; None for anything else."""
    # isinstance() would use __class__, which is the inner one's.
    return obj._own if issubclass(type(obj), Wrapper) else None


def unwrapped(owner: Any) -> tuple[Any, Named]:
    """Return an optimizer or module without its wrapper, and its named parameters."""
    own = wrapped(owner)
    return (own.inner, own.named()) if own else (owner, adapter_of(owner).parameters(owner))


class Sharing:
    """Base of the wrappers that share their optimizer's state.

    No slots: wrappers such as Lightning's change their class to one that is derived from this.
    """

    @classmethod
    def attributes(cls, base: Any) -> dict[str, Any]:
        """Return further attributes of the class that is derived from this one and `base`."""
        return {}


_wrapper_of: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def check_unwrapped(optimizer: Any) -> None:
    """Raise unless `sharing` may wrap this optimizer, for those who change it before they call it.

    Two wrappers would share one state, and so the options of the second one.

    Raises:
        TypeError: It is a wrapper.
        ValueError: It has a wrapper, which still exists.
    """
    if isinstance(optimizer, Sharing):
        raise TypeError("this optimizer is already a DistributedOptimizer: wrap it only once")
    existing = _wrapper_of.get(optimizer)
    if existing is not None and existing() is not None:
        raise ValueError(
            "this optimizer already has a DistributedOptimizer: use that one, or delete it first"
        )


def sharing(optimizer: Any, mixin: Any, **own: Any) -> Any:
    """Return an optimizer that shares the state of `optimizer`, with the methods of `mixin`.

    `mixin` is derived from Sharing. `own` is what its methods need; it is added to the state.
    Raises as `check_unwrapped` does.
    """
    check_unwrapped(optimizer)
    base: Any = type(optimizer)
    wrapped = object.__new__(_derived(mixin, base))
    # Set in this way, since Keras would inspect the attribute.
    object.__setattr__(wrapped, "__dict__", vars(optimizer))
    vars(wrapped).update(own)
    _wrapper_of[optimizer] = weakref.ref(wrapped)
    return wrapped


@cache
def _derived(mixin: Any, base: Any) -> Any:
    attributes = {"__module__": base.__module__, "__doc__": base.__doc__, **mixin.attributes(base)}
    return type(base.__name__, (mixin, base), attributes)
