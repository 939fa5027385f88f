"""A rank's gradients as memory: whether they are writable, overlap, or are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from horo_lite._native import Tensors, count_non_finite, difference, fingerprints
from horo_lite.adapters.object import NO_ORDER, Named
from horo_lite.collectives.arrays import HOST, copy_of
from horo_lite.collectives.calls import Compare, Part
from horo_lite.errors import ranks_by, ranks_in_words
from horo_lite.state.broadcast import is_same
from horo_lite.state.drift import OFF, Run
from horo_lite.state.hashes import Readable
from horo_lite.training.plan import hash63

if TYPE_CHECKING:
    from horo_lite.adapters import Adapter
    from horo_lite.collectives.group import Group


def tensors_of(arrays: Sequence[Any]) -> Tensors:
    """Return the arrays that are not None, for inspection: no stream waits for another."""
    return Tensors([array for array in arrays if array is not None], stream=NO_ORDER)


class Gradients(NamedTuple):
    """The gradients of all parameters, in their order; None for a missing gradient."""

    arrays: list[Any]
    copied: dict[int, Any]  # the copies, which must be written back
    tensors: Tensors
    overlaps: list[tuple[int, int, int, bool]]

    def owners(self, parameters: Named) -> tuple[int, ...]:
        """Return each gradient's owner: gradients that are one tensor (tied weights) have one."""
        owners = list(range(len(self.arrays)))
        here = [i for i, array in enumerate(self.arrays) if array is not None]
        for first, second, _, same in self.overlaps:
            i, k = here[first], here[second]
            if not same:
                (a, a_spec), (b, b_spec) = (
                    (parameters[here[at]][0], self.tensors.describe(at)) for at in (first, second)
                )
                raise ValueError(
                    f"the gradients of {a!r} ({a_spec}) and {b!r} ({b_spec}) overlap in memory, "
                    "so shared elements would be averaged twice: give each its own memory, or both "
                    "exactly the same (tied weights)"
                )
            owners[k] = min(owners[k], i)
        return tuple(owners)


def gradients_of(adapter: Adapter, parameters: Named) -> Gradients:
    """Return every gradient as writable memory: its own, or a copy."""
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
    if crowded:  # such as an expanded tensor: the result needs memory for each element
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
        pass  # process them one by one, to find the name
    for i, array in enumerate(arrays):
        try:
            tensors_of([array])
        except (ValueError, BufferError):
            arrays[i] = copied[i] = np.array(array)
        except TypeError as error:
            text = str(error).removeprefix("array 0: ")
            raise TypeError(f"the gradient of {parameters[i][0]!r}: {text}") from error
    return tensors_of(arrays)


def lent_by(adapter: Adapter, parameters: Named, own: Gradients) -> set[int]:
    """Return which gradients are copies that are made each time they are read.

    What is written into them would be lost. It suffices to look once, as each is read twice.
    """
    return {
        i
        for i, ((_, parameter), x) in enumerate(zip(parameters, own.arrays, strict=True))
        if x is not None and i not in own.copied and not is_same(x, adapter.gradient(parameter))
    }


class Finding(NamedTuple):
    """A rank's non-finite gradients: the first to leave, and how many there are."""

    name: str
    n_nan: int
    n_inf: int
    n_tensors: int


def compare_samples(
    mine: int,
    group: Group,
    label: str,
    run: Run | None = None,
) -> str | None:
    """Return a message if ranks have the same gradients, as from the same samples. Collective.

    Args:
        mine: What `hash_of` has returned for this rank's gradients before they were averaged.
        group: The ranks.
        label: What was exchanged, the same on every rank.
        run: Executes the comparison; by default the group's.
    """
    call = Compare(f"samples of {label}", needs_all=False)
    headers = (run or group.run)(call, Part(number=mine))
    ranks_with = ranks_by([header.count for header in headers], group.transport.ranks)
    unknown = (0, Compare.JOINED)
    same = [ranks for found, ranks in ranks_with.items() if ranks[1:] and found not in unknown]
    if not same:
        return None
    return (
        "before they are averaged, all gradients are the same, bit for bit, on "
        f"{', and on '.join(map(ranks_in_words, same))} ({label}). Probably these ranks read the "
        "same samples, and train no faster than one of them: give each rank its own, with "
        "DistributedSampler, partition_dataset or data[rank()::size()], and not by local_rank(), "
        "which repeats on every host. Or something else, such as DistributedDataParallel, has "
        f"averaged these gradients already. {OFF}"
    )


def compare_states(state: Sequence[tuple[str, Any]], group: Group, label: str) -> str | None:
    """Return a message if the state of the ranks' optimizers differs. Collective.

    Args:
        state: This rank's arrays and numbers, with names; none before a step or load_state_dict().
        group: The ranks.
        label: What is about to be exchanged, the same on every rank.
    """
    readable = Readable(group)
    seen = [
        (name, fingerprints(readable.plain(x)) if hasattr(x, "shape") else x) for name, x in state
    ]
    call = Compare(f"optimizer states before {label}", needs_all=False)
    headers = group.run(call, Part(number=hash63(repr(seen)) if seen else 0))
    ranks_with = ranks_by([header.count for header in headers], group.transport.ranks)
    ranks_with.pop(Compare.JOINED, None)
    if len(ranks_with) < 2:
        return None
    sides = [
        ranks_in_words(ranks) + (" (none)" if number == 0 else "")
        for number, ranks in ranks_with.items()
    ]
    return (
        f"the state of the ranks' optimizers (momenta, step counts) differs before {label} are "
        f"exchanged: {' against '.join(sides)}. So the ranks' parameters are about to diverge. "
        "Usual causes: a checkpoint that only some ranks have loaded; a join() after which only "
        "parameters were broadcast. Call broadcast_optimizer_state(optimizer) on every rank. "
        f"{OFF}"
    )


def hash_of(gradients: Sequence[Any], group: Group) -> int:
    """Return a hash of the gradients' bits, which differs between ranks with different samples.

    It is 0 if nothing depends on the samples: gradients of zeros, or of NaN only, are left out.
    """
    readable = Readable(group)
    seen: list[int] = []
    for i, gradient in enumerate(gradients):
        if gradient is None:
            continue
        tensors = readable.plain(gradient)
        # Most have a number other than zero at their beginning, so that the rest need not be read.
        first = tensors.elements([(0, min(prod(tensors.shape(0)), 1024))])
        if any(difference(part, part)[2] > 0 for part in (first, tensors)):
            seen += i, *fingerprints(tensors)
    return hash63(repr(seen)) if seen else 0


def find_non_finite(named: Named, known: Finding | None) -> Finding | None:
    """Check this rank's own gradients, and return the finding `known` so far, updated."""
    arrays = [array for _, array in named if array is not None]
    tensors = tensors_of(arrays)
    if tensors.device != HOST:
        raise ValueError(
            "check_finite works on gradients in host memory, but these are on a GPU: "
            "leave it out, and check them there before step()"
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
    """Return the message about what the ranks have found in the exchange with that label."""
    found = {rank: one for rank, one in findings.items() if one}
    rank, first = next(iter(found.items()))
    counts = ((first.n_nan, "NaN"), (first.n_inf, "inf"))
    what = " and ".join(f"{n:,} {name}" for n, name in counts if n)
    more = f", one of {first.n_tensors} such tensors there" if first.n_tensors > 1 else ""
    others = [str(other) for other in found if other != rank]
    also = f" Other ranks with such gradients: {', '.join(others)}." if others else ""
    return (
        f"the gradient of {first.name!r} has {what} on rank {rank}, before averaging{more} "
        f"({label}).{also} Check that rank's samples of this step, divisions by 0 and logarithms "
        "of 0, and the learning rate."
    )
