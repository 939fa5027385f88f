"""Optimizers around other ones, as functions of a model's state see through them."""

from __future__ import annotations

from typing import Any, Protocol

from horo_lite.adapters import adapter_of
from horo_lite.adapters.object import Named


class Wrapped(Protocol):
    """What a wrapper keeps for itself."""

    inner: Any

    @property
    def n_steps(self) -> int:
        """Return how many steps were taken."""

    def named(self) -> Named:
        """Return the parameters with their names, as the wrapper was given them."""


class Wrapper:
    """Base of what wraps an optimizer, showing the inner one's attributes and class as its own."""

    _own: Wrapped


def wrapped(obj: Any) -> Wrapped | None:
    """Return what a wrapper keeps for itself; None for anything else."""
    # isinstance() would ask __class__, which is the inner one's.
    return obj._own if issubclass(type(obj), Wrapper) else None


def unwrapped(owner: Any) -> tuple[Any, Named]:
    """Return an optimizer or module, without what wraps it, and its parameters with their names."""
    own = wrapped(owner)
    return (own.inner, own.named()) if own else (owner, adapter_of(owner).parameters(owner))
