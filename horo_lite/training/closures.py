"""The closure of a step, which computes gradients and returns the loss; and methods that step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite.adapters import Adapter, from_numpy, to_host
from horo_lite.collectives.reductions import AnyOp
from horo_lite.state.hashes import Readable

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Return the closure among the arguments of a step: `closure=`, or the first callable."""
    return next(filter(callable, (kwargs.get("closure"), *args, *kwargs.values())), None)


def with_closure(
    closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a step with another closure in the place of theirs."""
    theirs = closure_of(args, kwargs)
    return (
        tuple(closure if x is theirs else x for x in args),
        {name: closure if x is theirs else x for name, x in kwargs.items()},
    )


def step_names(optimizer: Any, finder: Adapter) -> list[str]:
    """Return the names of the methods with which this optimizer applies gradients."""
    return [name for name in finder.steps if callable(getattr(optimizer, name, None))]


def takes_steps(method: Callable[..., Any], steps: Iterable[str]) -> bool:
    """Return whether a method probably calls one of the methods `steps` of its object.

    Not if it uses the object's `__dict__`, as in `self.__dict__.update(state)`.
    """
    code = getattr(inspect.unwrap(method), "__code__", None)  # None: written in C
    names = getattr(code, "co_names", ())
    return any(name in names for name in steps) and not {"__dict__", "vars"}.intersection(names)


def returning(loss: Any, values: Callable[[], Sequence[Any]]) -> Callable[..., Any]:
    """Return a closure for the optimizer of a share, after the closure of all parameters.

    Args:
        loss: What that has returned, on all ranks.
        values: Returns the arrays of the share.

    Returns:
        A function that returns `loss`. It raises RuntimeError if the arrays have changed: gradients
        for the new values would need all parameters.
    """
    hashes = Readable(None).hashes
    before = hashes(values())

    def closure(*args: Any, **kwargs: Any) -> Any:
        if not np.array_equal(before, hashes(values())):
            raise RuntimeError(
                "step() has called its closure after changing parameters. With shard_state=True, "
                "the closure is called once, with the parameters before the step, since a rank "
                "changes only its share of them in step(): omit shard_state"
            )
        return loss

    return closure


def averaging(
    closure: Callable[..., Any],
    exchange: Callable[[], None],
    *,
    group: Group,
    op: AnyOp,
    weight: Callable[[], float | None],
    like: Callable[[Any, Any], Any] = from_numpy,
) -> Callable[..., Any]:
    """Return `closure`, followed by averaging of gradients and loss.

    Args:
        closure: Computes gradients and returns the loss, a number in any form. Any other result is
            returned as it is, since no optimizer can base a decision on it.
        exchange: Averages the gradients.
        group: The ranks.
        op: Average or Sum, for the loss as for the gradients.
        weight: Returns this rank's number of samples, or None on every rank, as used by
            `exchange`.
        like: Converts a float64 array to an object like the second argument, a loss.
    """

    @wraps(closure)
    def averaged(*args: Any, **kwargs: Any) -> Any:
        loss = closure(*args, **kwargs)
        exchange()
        try:
            value = to_host(loss)
            if not isinstance(value, (np.ndarray, np.generic)):  # on a GPU, or bfloat16
                value = float(loss)
            value = np.array(value, np.float64).reshape(())
        except (TypeError, ValueError):
            return loss
        name = "the closure's loss"
        group.exchange([value], names=[name], label=name, op=op, weight=weight())
        return like(value, loss)

    return averaged
