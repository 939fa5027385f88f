"""Checks of the arguments of public calls, before any rank waits for another."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeVar

T = TypeVar("T")
QUANTIZED = ("int8", "int4")
WIRES = ("none", "fp16", "bf16", *QUANTIZED)  # formats of floating point numbers in transfer


def integer(name: str, value: Any) -> int:
    """Return `value` as an int; accepts everything with `__index__` except bools."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, not {value!r} ({type(value).__name__})")


def several(xs: Iterable[T]) -> list[T]:
    """Return the items of a list, generator or other iterable with an order, equal on all ranks."""
    if isinstance(xs, (Mapping, Set)):
        raise TypeError(
            f"a grouped operation takes a list of arrays, not a {type(xs).__name__}, whose order "
            "may differ between ranks"
        )
    if not isinstance(xs, Iterable):
        raise TypeError(f"a grouped operation takes a list of arrays, not a {type(xs).__name__}")
    return list(xs)


def rank(name: str, value: Any, size: int) -> int:
    """Return `value` as the number of one of `size` ranks."""
    number = integer(name, value)
    if not 0 <= number < size:
        raise ValueError(f"{name} is {number}, but the ranks are 0 to {size - 1} here")
    return number


def text(name: str, value: Any) -> None:
    """Raise unless `value` is None or a str that can be sent to other ranks."""
    if not (value is None or isinstance(value, str)):
        raise TypeError(f"{name} must be a str, not {value!r} ({type(value).__name__})")
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be text, but {value!r} has lone surrogates") from None


def factor(name: str, value: Any) -> float:
    """Return `value` as a finite float."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number
