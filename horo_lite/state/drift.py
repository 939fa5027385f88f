"""Compare replicas between ranks, and report which ranks deviate, and by how much.

A comparison is one handshake: its digest ensures that names and shapes agree, and its count is a
hash of all arrays' hashes. Only if the counts differ are the hashes exchanged, and then one array.
What follows depends on data that all ranks have, so all of them raise, warn or heal. (A non-finite
gradient is reported in the same way, with the plans of a step.)
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horo_lite import _native, ops
from horo_lite._native import Tensors
from horo_lite.adapters import adapter_of, to_host
from horo_lite.adapters.object import is_array, join
from horo_lite.collectives.calls import Call, Compare, Finish, Part
from horo_lite.errors import DriftError, MismatchError, ranks_by, ranks_in_words, warn
from horo_lite.state.broadcast import (
    NOT_ARRAYS,
    broadcast_optimizer_state,
    broadcast_parameters,
    is_container,
    is_writable,
    opened,
)
from horo_lite.state.hashes import Readable
from horo_lite.state.optimizer_state import OptimizerState, in_host_memory
from horo_lite.state.trees import NUMBERS, Node, Tree
from horo_lite.transports.agreement import allgather_row

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group
    from horo_lite.transports import Transport
    from horo_lite.transports.interface import Header

ADVICE = (
    "Usual causes: no broadcast_parameters() after the model was made or loaded; a step, a "
    "load_state_dict() or a change by hand on some ranks only; a learning rate that follows a "
    "rank's own loss; buffers that every rank computes from samples of its own; an optimizer that "
    "draws random numbers, or reads second derivatives, which are not averaged; where only last "
    "bits differ, ranks with different processors, libraries or numbers of threads, which round a "
    "norm, say, differently."
)

OFF = "HORO_LITE_CHECK_EVERY=0 turns this comparison off."
"""What to add to a warning for which nobody has asked."""


def check_in_sync(
    replica: Any,
    *,
    on_drift: str = "raise",
    buffers: bool = False,
    state: bool = False,
    step: int | None = None,
    group: Group | None = None,
) -> bool:
    """Check that `replica` has the same bits on every rank.

    Collective, at any time. `replica` is an array, any nesting of dicts and lists of arrays, a
    module or an optimizer, as for `broadcast_parameters`. For a module, its parameters (Keras,
    TensorFlow, MLX, tinygrad, flax.nnx: those that are trained) are compared, and with `buffers`
    also its other state except seeds: leave out BatchNorm's running means if ranks compute them
    from their own samples. For an optimizer, `state` also compares its momenta, counts
    and options. All arguments must be the same on all ranks.

    If bits differ (even -0.0 and 0.0, or two kinds of NaN), every rank does what `on_drift` says:
    "raise" raises a DriftError that names the first parameter that differs, the deviating ranks and
    by how much they deviate; "warn" issues a RuntimeWarning with the same text on rank 0, and
    returns False; "heal" gives all ranks the values of the rank with which most agree (the lowest
    in a tie), warns, and returns False. "heal" needs writable values: no JAX arrays, no numbers.

    Costs a hash, about as fast as memory can be read (7 ms for 100 MB), and one handshake. Arrays
    on a GPU, and those not in C order, are copied to the host one by one.

    Args:
        replica: The parameters, module or optimizer.
        on_drift: "raise", "warn" or "heal".
        buffers: Whether to compare a module's buffers, too.
        state: Whether to compare an optimizer's state, too.
        step: The step to name in messages.
        group: The ranks that take part, all of which call it; by default all.

    Returns:
        Whether `replica` has the same bits on every rank.

    Raises:
        MismatchError: On every rank, if names, dtypes or shapes differ.
    """
    check_reaction(on_drift)
    if isinstance(replica, Iterator):
        replica = list(replica)
    group = ops.ranks_of(group)
    named = _named(replica, buffers)
    n_parameters = len(named)
    if state:
        named += OptimizerState(replica).named()
    return compare(
        named,
        group=group,
        on_drift=on_drift,
        step=step,
        stateful=replica,
        n_parameters=n_parameters,
    )


def fingerprint(replica: Any, *, buffers: bool = False) -> str:
    """Return a SHA-256 hash of `replica`: of the names, dtypes, shapes and bits of all its arrays.

    Local: it waits for no other rank. Two runs have trained the same model if it is equal.

    Args:
        replica: The parameters, module or optimizer, as for `check_in_sync`.
        buffers: Whether to include a module's buffers.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, leaf in _named(replica, buffers):
        value = _value(name, in_host_memory(leaf))
        digest.update(f"{name} {_spec(value)}\n".encode())
        if not hasattr(value, "tobytes"):  # a tensor of a dtype that NumPy lacks
            value = value.contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
        digest.update(value.tobytes())
    return digest.hexdigest()


def check_reaction(on_drift: str) -> None:
    """Raise ValueError unless `on_drift` is one of the three."""
    if on_drift not in ("raise", "warn", "heal"):
        raise ValueError(f'on_drift must be "raise", "warn" or "heal", not {on_drift!r}')


def compare(
    named: Sequence[tuple[str, Any]],
    *,
    group: Group,
    on_drift: str,
    step: int | None = None,
    stateful: Any = None,
    n_parameters: int | None = None,
    needs_all: bool = True,
    run: Run | None = None,
) -> bool:
    """Do `check_in_sync` for named leaves; from `n_parameters` on they are `stateful`'s state.

    Unless it `needs_all` ranks, nothing is compared while some wait in join(), since their replicas
    are not updated. `run` executes a Call; by default the group's.
    """
    if group.size == 1:
        return True
    n_parameters = len(named) if n_parameters is None else n_parameters
    values = [_value(name, leaf) for name, leaf in named]
    if on_drift == "heal":
        for (name, leaf), value in zip(named[:n_parameters], values, strict=False):
            if isinstance(leaf, NUMBERS) or (is_array(leaf) and not is_writable(value)):
                raise TypeError(
                    f'on_drift="heal" writes in place, and {name!r}, a {type(leaf).__name__}, '
                    'cannot be written: use "raise" or "warn", and broadcast_parameters()'
                )
    replica = _Replica(group, [name for name, _ in named], values)
    found = _find(replica, group, f"on_drift={on_drift!r}", step or 0, needs_all, run)
    if found is None:
        return True
    text = f"the replicas differ{found.text} {ADVICE}"
    if on_drift == "raise":
        raise DriftError(text)
    if on_drift == "heal":
        wrong = [named[i] for i in found.which if i < n_parameters]
        broadcast_parameters(wrong, found.source, group=group)
        if found.which[-1] >= n_parameters:
            broadcast_optimizer_state(stateful, found.source, group=group)
        text += f" Healed: all ranks have the values of rank {found.of_source} now."
    if group.rank == 0:
        warn(text)
    return False


def differences(
    named: Sequence[tuple[str, Any]],
    group: Group,
    label: str = "",
    step: int = 0,
    run: Run | None = None,
) -> str | None:
    """Return a warning if these parameters differ between the ranks; None if they do not.

    Collective, at the exchange of that label or after that step. Nobody asked for it, so it raises
    no error, leaves out what cannot be read, and compares nothing while ranks are in join(). `run`
    executes a Call; by default the group's.
    """
    values = values_of(named)
    try:
        replica = _Replica.of(values, group)
    except _UNREADABLE:
        replica = _Replica.of([each for each in values if _is_readable(each, group)], group)
    try:
        found = _find(replica, group, label, step, needs_all=False, run=run)
    except MismatchError as error:  # of shapes, though those of the gradients agree
        return f"{error} {OFF}"
    before = f" before the exchange of {label}" if label else ""
    return found and f"the replicas differ{before}{found.text} {ADVICE} {OFF}"


Run = Callable[[Any, Part], Any]
"""Executes a Call with this rank's Part, and returns its result."""

_UNREADABLE = (TypeError, ValueError, BufferError, RuntimeError)
"""What reading raises for objects without memory of their own: sparse, nested, on device `meta`."""


def values_of(named: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return these parameters as arrays, except those that cannot be read."""
    values = []
    for name, leaf in named:
        with suppress(*_UNREADABLE):  # such as an object that shows its gradient only
            values.append((name, _value(name, leaf)))
    return values


def _is_readable(named: tuple[str, Any], group: Group) -> bool:
    try:
        _Replica.of([named], group)
    except _UNREADABLE:
        return False
    return True


class DriftCheck:
    """Counts steps, and compares the ranks' parameters after some.

    Args:
        every: The number of steps between comparisons; 0 for never. None, for which nobody has
            asked: after steps 10 and 100 and then every 1,000, until one has warned of a
            difference. So what ranks with other processors or a load_state_dict() of their own
            train is not silently worse.
        on_drift: What to do if parameters differ: see `check_in_sync`.
    """

    def __init__(self, every: int | None, on_drift: str) -> None:
        self._every, self._on_drift = every, on_drift
        self.n_steps = 0
        self.reset_counts()

    def reset_counts(self) -> None:
        """Restart the count to the next comparison, as all ranks do, whatever their counts were."""
        self.n_together = 0  # steps since all ranks started to count
        self._has_warned = False  # all ranks

    def stepped(
        self,
        named: Callable[[], Sequence[tuple[str, Any]]],
        group: Group,
        run: Run | None = None,
    ) -> None:
        """Count a step; if a comparison is due, compare `named()`. Ranks may be in join().

        `run` executes a Call; by default the group's.
        """
        self.n_steps += 1
        self.n_together += 1
        if self._every is None:
            self._compare_unasked(named, group, run)
        elif self._every and self.n_together % self._every == 0:
            how = self._on_drift
            compare(named(), group=group, on_drift=how, step=self.n_steps, needs_all=False, run=run)

    def _compare_unasked(
        self,
        named: Callable[[], Sequence[tuple[str, Any]]],
        group: Group,
        run: Run | None,
    ) -> None:
        is_due = self.n_together in (10, 100) or self.n_together % 1000 == 0
        if not is_due or self._has_warned or group.size == 1:
            return
        text = differences(named(), group, step=self.n_steps, run=run)
        self._has_warned = text is not None
        if text is not None and group.rank == 0:
            warn(text)


class _Found(NamedTuple):
    """A difference, the same on every rank, and the rank whose values are probably correct."""

    text: str
    which: list[int]
    source: int
    of_source: int


def _find(
    replica: _Replica,
    group: Group,
    how: str,
    step: int,
    needs_all: bool,
    run: Run | None,
) -> _Found | None:
    run = run or group.run
    text = "\n".join([_Find.kind, how, *replica.lines()])
    mine = Part(number=replica.hash_of_all(), weight=step)
    with group.uninterrupted():
        headers = run(Compare(_Find.kind, text, needs_all), mine)
        hashes = {header.count for header in headers}
        if len(hashes) == 1 or Compare.JOINED in hashes:
            return None
        found: _Found = run(_Find(step=int(max(header.weight for header in headers))), replica)
        return found


@dataclass(frozen=True)
class _Find(Call[_Found]):
    """Find out what differs between the ranks' replicas."""

    step: int = 0

    kind = "check_in_sync"

    def move(self, part: Part, transport: Transport, headers: Sequence[Header]) -> Finish[_Found]:
        assert isinstance(part, _Replica)
        found = part.find(transport, self.step)
        return lambda: found


class _Replica(Part):
    """The arrays of one rank, and their hashes."""

    def __init__(self, group: Group, names: Sequence[str], values: Sequence[Any]) -> None:
        super().__init__()
        self._names = names
        self._values = values
        self._readable = Readable(group)
        self._specs = [_spec(value) for value in values]
        self._hashes = self._readable.hashes(values)

    @classmethod
    def of(cls, named: Sequence[tuple[str, Any]], group: Group) -> _Replica:
        return cls(group, [name for name, _ in named], [value for _, value in named])

    def lines(self) -> list[str]:
        """Return each array's name, dtype and shape."""
        return [f"{name!r} {spec}" for name, spec in zip(self._names, self._specs, strict=True)]

    def hash_of_all(self) -> int:
        return _native.hash64(self._hashes.tobytes())

    def find(self, transport: Transport, step: int) -> _Found:
        table = allgather_row(transport, self._hashes)
        which = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
        # For each parameter that differs, every rank gets a vote from each rank that agrees.
        votes = np.zeros(transport.size, np.int64)
        for i in which:
            _, kinds, counts = np.unique(table[:, i], return_inverse=True, return_counts=True)
            votes += counts[kinds.reshape(-1)]
        source = int(votes.argmax())
        odd = np.flatnonzero((table != table[source]).any(axis=1))
        is_majority = bool((votes[odd] < votes[source]).all())
        first = which[0]
        text = (
            f"{f' after step {step}' if step else ''}: {len(which)} of {len(self._names)} arrays, "
            f"first {self._names[first]!r} ({self._specs[first]}). "
            f"{_who(transport.ranks, table, odd.tolist(), is_majority)} "
            f"{self._how_far(transport, first, source)}"
        )
        return _Found(text, which, source, transport.ranks[source])

    def _how_far(self, transport: Transport, first: int, source: int) -> str:
        """Describe how far the first differing array of each rank is from that of `source`."""
        mine = self._readable.plain(self._values[first])
        theirs = np.empty(mine.nbytes, np.uint8)
        is_source = transport.rank == source
        transport.host.broadcast(mine if is_source else Tensors([theirs]), source)
        found = _native.difference(mine, mine if is_source else Tensors([theirs]))
        numbers = np.array([*found, *_native.count_non_finite(mine)[0]], np.float64)
        table = allgather_row(transport, numbers).tolist()
        _, _, magnitude, *in_source = table[source]
        n_elements = int(np.prod(self._values[first].shape, dtype=np.int64))
        is_bytes = mine.dtype(0) == "uint8" and "uint8[" not in self._specs[first]
        is_number = mine.is_number(0) and not is_bytes
        told = []
        for rank, (n_different, largest, _, *non_finite) in zip(
            transport.ranks, table, strict=True
        ):
            if n_different:
                told.append(
                    f"rank {rank}'s in {int(n_different):,} of {n_elements:,} elements, by up to "
                    f"{largest:.3g}{_non_finite(*non_finite)}"
                    if is_number
                    else f"rank {rank}'s in {int(n_different):,} of {mine.nbytes:,} bytes"
                )
        more = f"; {len(told) - 4} more ranks" if len(told) > 4 else ""
        size = f" (largest element {magnitude:.3g}{_non_finite(*in_source)})" if is_number else ""
        off = f"{'; '.join(told[:4])}{more}"
        return f"Against rank {transport.ranks[source]}'s{size} it is off: {off}."


# The values to compare.


def _named(replica: Any, buffers: bool) -> list[tuple[str, Any]]:
    """Return every array, parameter and number of `replica`, with names."""
    tree, has_modules = tree_of(replica, buffers)
    if buffers and not has_modules:
        raise ValueError(f"buffers=True is for modules: a {type(replica).__name__} has no buffers")
    return [
        (name or "the array", leaf) for name, leaf in tree.named if not isinstance(leaf, NOT_ARRAYS)
    ]


def tree_of(replica: Any, buffers: bool) -> tuple[Tree, bool]:
    """Return what is the same on all ranks, and whether there is a module among it.

    `buffers` says whether to include the modules' moving statistics.
    """
    has_modules = False

    def compared(tree: Any, path: str) -> Node | None:
        nonlocal has_modules
        named = None if is_container(tree) else adapter_of(tree).replica(tree, buffers)
        if named is None:
            return opened(tree, path)
        has_modules = True
        return Node([(join(path, name), x) for name, x in named], lambda _: tree)

    return Tree(replica, opened=compared), has_modules


def _value(name: str, leaf: Any) -> Any:
    try:
        value = to_host(leaf)
    except TypeError as error:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{name!r}: {error}") from error
        value = leaf.detach()  # its dtype does not exist in NumPy
    if getattr(value, "dtype", None) == np.dtype(object):
        raise TypeError(f"{name!r}: arrays of Python objects cannot be compared")
    return value


def _spec(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# Phrases of messages.


def _who(
    ranks: Sequence[int], table: NDArray[np.uint64], odd: Sequence[int], is_majority: bool
) -> str:
    if is_majority:
        rest = [ranks[r] for r in range(len(table)) if r not in odd]
        verb = "differs" if len(odd) == 1 else "differ"
        wrong = ranks_in_words([ranks[r] for r in odd]).capitalize()
        who = f"{wrong} {verb} from {ranks_in_words(rest)}"
        return f"{who}." if len(rest) == 1 else f"{who}, which agree."
    sides = ranks_by([hashes.tobytes() for hashes in table], ranks)
    return f"There is no majority: {' against '.join(map(ranks_in_words, sides.values()))}."


def _non_finite(n_nan: float, n_inf: float) -> str:
    """Return what to add to a clause about an array with non-finite elements."""
    parts = [f"{int(n):,} {what}" for n, what in ((n_nan, "NaN"), (n_inf, "inf")) if n]
    return f", with {' and '.join(parts)}" if parts else ""
