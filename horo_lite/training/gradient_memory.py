"""The gradients that a rank has, as memory: which can be written, is shared, or is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horo_lite._native import Tensors, count_non_finite
from horo_lite.adapters.object import NO_ORDER, Named
from horo_lite.collectives.arrays import HOST, copy_of

if TYPE_CHECKING:
    from horo_lite.adapters import Adapter


def tensors_of(arrays: Sequence[Any]) -> Tensors:
    """Those that are there, to be looked at: nobody's stream waits for another's."""
    return Tensors([array for array in arrays if array is not None], stream=NO_ORDER)


class Gradients(NamedTuple):
    """Of all parameters, in their order; None where there is no gradient."""

    arrays: list[Any]
    copied: dict[int, Any]  # those that are copies, to be put back
    tensors: Tensors
    overlaps: list[tuple[int, int, int, bool]]

    def owners(self, parameters: Named) -> tuple[int, ...]:
        """Gradients that are one tensor (of tied weights) travel once; others lie apart."""
        owners = list(range(len(self.arrays)))
        here = [i for i, array in enumerate(self.arrays) if array is not None]
        for first, second, _, same in self.overlaps:
            i, k = here[first], here[second]
            if not same:
                (a, a_look), (b, b_look) = (
                    (parameters[here[at]][0], self.tensors.describe(at)) for at in (first, second)
                )
                raise ValueError(
                    f"the gradients of {a!r} ({a_look}) and {b!r} ({b_look}) overlap in memory, "
                    "and what they share would be averaged twice: give each memory of its own, or "
                    "both the same (tied weights)"
                )
            owners[k] = min(owners[k], i)
        return tuple(owners)


NONE = Gradients([], {}, Tensors([]), [])


def gradients_of(adapter: Adapter, parameters: Named) -> Gradients:
    """Every gradient as memory that can be written: its own, or a copy."""
    adapter.compute([parameter for _, parameter in parameters])
    arrays: list[Any] = []
    for name, parameter in parameters:
        try:
            arrays.append(adapter.gradient(parameter))
        except TypeError as error:
            raise TypeError(f"the gradient of {name!r}: {error}") from error
    copied: dict[int, Any] = {}
    tensors = _writable(parameters, arrays, copied)
    overlaps = tensors.overlaps()
    crowded = [first for first, second, *_ in overlaps if first == second]
    if crowded:  # expanded, for instance: the result needs memory for each of its elements
        here = [i for i, array in enumerate(arrays) if array is not None]
        for i in crowded:
            arrays[here[i]] = copied[here[i]] = copy_of(arrays[here[i]])
        tensors = _writable(parameters, arrays, copied)
        overlaps = tensors.overlaps()
    return Gradients(arrays, copied, tensors, overlaps)


def _writable(parameters: Named, arrays: list[Any], copied: dict[int, Any]) -> Tensors:
    try:
        return tensors_of(arrays)
    except (TypeError, ValueError, BufferError):
        pass  # one by one, to find the names
    for i, array in enumerate(arrays):
        if array is None:
            continue
        try:
            tensors_of([array])
        except (ValueError, BufferError):
            arrays[i] = copied[i] = np.array(array)
        except TypeError as error:
            text = str(error).removeprefix("array 0: ")
            raise TypeError(f"the gradient of {parameters[i][0]!r}: {text}") from error
    return tensors_of(arrays)


class Finding(NamedTuple):
    """What is not finite among a rank's own gradients: the first that leaves, and how many."""

    name: str
    n_nan: int
    n_inf: int
    n_tensors: int


def find_non_finite(named: Named, known: Finding | None) -> Finding | None:
    """What was known, and which of these gradients, still this rank's own, are not finite."""
    arrays = [array for _, array in named if array is not None]
    tensors = tensors_of(arrays)
    if tensors.device != HOST:
        raise ValueError(
            "check_finite looks at gradients in the host's memory, and these are on a GPU: "
            "leave it out, and look at them there before step()"
        )
    if tensors.strided:
        tensors = tensors_of([copy_of(array) for array in arrays])
    names = [name for name, array in named if array is not None]
    for name, (n_nan, n_inf) in zip(names, count_non_finite(tensors), strict=True):
        if n_nan or n_inf:
            first = known or Finding(name, n_nan, n_inf, 0)
            known = first._replace(n_tensors=first.n_tensors + 1)
    return known


def in_words(findings: dict[int, Finding | None], label: str) -> str:
    """The sentence about what the ranks have found in the exchange with that label."""
    found = {rank: one for rank, one in findings.items() if one}
    rank, first = next(iter(found.items()))
    counts = ((first.n_nan, "NaN"), (first.n_inf, "inf"))
    what = " and ".join(f"{n:,} {name}" for n, name in counts if n)
    more = f", one of {first.n_tensors} such there" if first.n_tensors > 1 else ""
    others = [str(other) for other in found if other != rank]
    also = f" Ranks with such gradients, too: {', '.join(others)}." if others else ""
    return (
        f"the gradient of {first.name!r} has {what} on rank {rank}, before averaging{more} "
        f"({label}).{also} Look at that rank's samples of this step, at divisions by 0 "
        "and logarithms of it, and at the learning rate."
    )
