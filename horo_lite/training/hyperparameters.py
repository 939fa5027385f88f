"""Learning rates and other numbers of an optimizer: ranks that step with others would diverge."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from horo_lite.collectives.arrays import gpu_of
from horo_lite.training.plan import who_has

Hyperparameters = tuple[tuple[str, int, float], ...]
"""Names, such as `lr` or `betas[1]`, the number of the group, and values."""

# How PyTorch computes a step, and not what.
_WAYS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def hyperparameters(groups: Iterable[Any], defaults: Iterable[str]) -> Hyperparameters:
    """Return the learning rates, and all other numbers for which an optimizer has a default.

    Groups may have more entries, which are not compared. Neither are numbers on a GPU.

    Args:
        groups: The `param_groups` of an optimizer of PyTorch, or of one that is made like that.
        defaults: The names of its defaults.
    """
    names = ["lr", *[name for name in defaults if name != "lr" and name not in _WAYS]]
    found: list[tuple[str, int, float]] = []
    for i, group in enumerate(groups):
        if isinstance(group, dict):
            for name in names:
                value = group.get(name)
                if isinstance(value, (int, float)):
                    found.append((name, i, value))
                elif value is not None:
                    found += [(name + which, i, x) for which, x in _numbers(value)]
    return tuple(found)


def hyperparameters_of(optimizer: object) -> Hyperparameters:
    """Return those of its groups, or, if these have none, its `lr` or `learning_rate`."""
    groups: Iterable[Any] | None = getattr(optimizer, "param_groups", None)
    if found := hyperparameters(groups or (), getattr(optimizer, "defaults", ())):
        return found
    rates = [(name, getattr(optimizer, name, None)) for name in ("lr", "learning_rate")]
    kinds = (int, float, np.number, np.ndarray)  # reading a lazy framework's would compute it
    return tuple(
        (name, 0, x) for name, rate in rates if isinstance(rate, kinds) for _, x in _numbers(rate)
    )


def _numbers(value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)):
        yield "", value
    elif isinstance(value, (tuple, list)):
        for i, each in enumerate(value):
            yield from ((f"[{i}]{which}", x) for which, x in _numbers(each))
    elif hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        yield from [("", value.item())] if gpu_of(value) is None else []


def digest(numbers: Hyperparameters) -> str:
    """Return a text that is the same if they are, up to rounding: see `difference`."""
    return array("f", [x for _, _, x in numbers]).tobytes().hex()


def difference(everyone: Sequence[Hyperparameters], ranks: Sequence[int]) -> str:
    """Describe the first that differs between ranks by more than the last digits; else ""."""
    values_of = [{(name, i): x for name, i, x in numbers} for numbers in everyone]
    for name, i in dict.fromkeys(key for values in values_of for key in values):
        values = [values.get((name, i)) for values in values_of]
        if not all(_are_close(value, values[0]) for value in values):
            texts = ["none" if value is None else f"{value:.6g}" for value in values]
            return f"{name}{f' of group {i}' if i else ''}: {who_has(texts, ranks)}"
    return ""


def _are_close(a: float | None, b: float | None) -> bool:
    """Return whether both are equal up to the last digits, which may depend on libraries."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(a) and math.isnan(b))
