"""Wrappers of optimizers, and how functions on a model's state see through them."""

from __future__ import annotations

from typing import Any, Protocol

from horo_lite.adapters import adapter_of
from horo_lite.adapters.object import Named


class Wrapped(Protocol):
    """The state of a wrapper itself."""

    inner: Any

    @property
    def n_steps(self) -> int:
        """Return the number of steps taken."""

    def named(self) -> Named:
        """Return the parameters with their names, as passed to the wrapper."""


class Wrapper:
    """Base of optimizer wrappers, which show the inner one's attributes and class as their own."""

    _own: Wrapped


def wrapped(obj: Any) -> Wrapped | None:
    """Return the state of a wrapper itself; None for anything else."""
    # isinstance() would use __class__, which is the inner one's.
    return obj._own if issubclass(type(obj), Wrapper) else None


def unwrapped(owner: Any) -> tuple[Any, Named]:
    """Return an optimizer or module without its wrapper, and its named parameters."""
    own = wrapped(owner)
    return (own.inner, own.named()) if own else (owner, adapter_of(owner).parameters(owner))
