"""Assignment of gradients to buckets: integers only, no arrays.

A plan is reused while names, shapes, dtypes, presence and shared storage are those of the last
step. In each step all ranks compare a digest of it. Only if digests differ, they exchange the plans
and `merge` them. So the usual case, in which every rank has all gradients, costs nothing; a bitmap
of the gradients that are there, in every header, would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, repeat
from math import prod
from typing import Any

from horo_lite.errors import MismatchError, ranks_by, ranks_in_words

DEFAULT_BUCKET_BYTES = 25 * 2**20
LAST_BUCKETS = 8, 4, 2
"""The last bucket has at most `bucket_bytes` divided by the first of these, and so on."""


def is_one_bucket(n_bytes: float, bucket_bytes: float) -> bool:
    """Return whether gradients of `n_bytes` in total are too small for smaller last buckets."""
    return n_bytes <= 2 * bucket_bytes / LAST_BUCKETS[0]


@dataclass(frozen=True)
class Entry:
    """The gradient of one parameter: its name and memory layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


Layout = tuple[Any, ...]
"""What rows look like: numbers, strings and tuples of them; None if this rank does not know."""
Rows = tuple[tuple[int, Layout], ...]
"""The gradients of which a rank has some rows: their indices and layouts, sorted."""


@dataclass(frozen=True)
class Plan:
    """What travels, and in which buckets; executed only if it is the same on every rank.

    `entries` has one item per parameter, in parameter order. `present[i]` says whether parameter i
    has a gradient; `owners[i]` is the index of the first parameter whose gradient has the same
    memory (normally i itself), so that memory shared by two parameters travels once. `buckets` are
    the indices that travel together, the last parameters first, because backward passes produce
    those first; a gradient larger than `bucket_bytes` (bytes on the wire) has its own bucket. The
    last buckets are smaller, since they leave when little computation is left to overlap with.
    `together` numbers the group of each parameter, or is empty: the gradients of a group, unless it
    is -1, form one bucket of any size. `travelling` are all indices in the order of the buckets.
    `rows` has the layouts of the gradients of which each rank has some rows, by index; they are not
    `present`, and travel after the buckets (see sparse_rows.py). `digest` has 63 bits and is the
    same in every process.
    """

    entries: tuple[Entry, ...]
    present: tuple[bool, ...]
    owners: tuple[int, ...]
    bucket_bytes: int
    wire: str
    options: tuple[tuple[str, str], ...] = ()
    together: tuple[int, ...] = ()
    rows: Rows = ()
    buckets: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    travelling: tuple[int, ...] = field(init=False, compare=False, repr=False)
    digest: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        buckets = self._fill_buckets()
        object.__setattr__(self, "buckets", buckets)
        object.__setattr__(self, "travelling", tuple(i for bucket in buckets for i in bucket))
        object.__setattr__(self, "digest", self._hash())

    def wire_bytes(self, i: int) -> int:
        """Return the bytes of gradient i on the wire of a host; a compressed float has two."""
        entry = self.entries[i]
        narrow = self.wire in ("fp16", "bf16") and entry.dtype.startswith("float")
        return entry.n_elements * (min(entry.itemsize, 2) if narrow else entry.itemsize)

    @property
    def gpu(self) -> bool:
        """Whether the gradients are in a GPU's memory."""
        return ("memory", "GPU") in self.options

    def lacks_only_some_of(self, other: Plan) -> bool:
        """Return whether this plan becomes `other` if missing gradients are replaced by zeros."""
        try:
            return merge([other, self]) == other
        except MismatchError:
            return False

    def _fill_buckets(self) -> tuple[tuple[int, ...], ...]:
        alone: list[int] = []
        grouped: dict[int, list[int]] = {}
        for i in reversed(range(len(self.entries))):
            if not self.present[i] or self.owners[i] != i:
                continue
            if self.together and self.together[i] >= 0:
                grouped.setdefault(self.together[i], []).append(i)
            else:
                alone.append(i)
        # A bucket is complete when its first parameter, which backward() reaches last, is ready.
        buckets = [*self._divide(alone), *map(tuple, grouped.values())]
        return tuple(sorted(buckets, key=min, reverse=True))

    def _divide(self, indices: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Divide indices into buckets that become smaller towards the end."""
        total = sum(map(self.wire_bytes, indices))
        parts = () if is_one_bucket(total, self.bucket_bytes) else LAST_BUCKETS
        largest = chain((self.bucket_bytes // part for part in parts), repeat(self.bucket_bytes))
        current: list[int] = []
        n_bytes, most = 0, next(largest)
        for i in reversed(indices):
            size = self.wire_bytes(i)
            if current and n_bytes + size > most:
                yield tuple(reversed(current))
                current, n_bytes, most = [], 0, next(largest)
            current.append(i)
            n_bytes += size
        if current:
            yield tuple(reversed(current))

    def _hash(self) -> int:
        # A missing gradient has only a name here: other ranks know its dtype and shape.
        seen = [
            (e.name, e.dtype, e.shape, owner) if here else (e.name,)
            for e, here, owner in zip(self.entries, self.present, self.owners, strict=True)
        ]
        options = self.bucket_bytes, self.wire, self.options, self.together
        return hash63(repr((options, seen, self.rows)))


def hash63(text: str) -> int:
    """Return a hash of `text` with 63 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


NOTHING = Plan((), (), (), DEFAULT_BUCKET_BYTES, "none")
"""A plan in which nothing travels."""


def merge(plans: Sequence[Plan], ranks: Sequence[int] = ()) -> Plan:
    """Return the plan that all ranks can execute together; `plans[r]` is that of rank r.

    `ranks` are the ranks in the world, if not all of them take part.

    A gradient that only some ranks have takes its dtype and shape from the first rank that has it.
    Any other difference raises a MismatchError that names the first entry that differs; every rank
    calls this with the same `plans`, so the message is the same on every rank.
    """
    difference = first_difference(plans, ranks)
    if difference is not None:
        raise MismatchError(difference)
    # If no rank has a gradient, use rank 0's entry.
    witness = [
        next((plan for plan in plans if plan.present[i]), plans[0])
        for i in range(len(plans[0].entries))
    ]
    return Plan(
        entries=tuple(plan.entries[i] for i, plan in enumerate(witness)),
        present=tuple(plan.present[i] for i, plan in enumerate(witness)),
        owners=tuple(plan.owners[i] for i, plan in enumerate(witness)),
        bucket_bytes=plans[0].bucket_bytes,
        wire=plans[0].wire,
        options=plans[0].options,
        together=plans[0].together,
        rows=_all_rows(plans),
    )


def first_difference(plans: Sequence[Plan], ranks: Sequence[int] = ()) -> str | None:
    """Return a description of the first difference between the ranks' plans.

    None if they can be executed together: a gradient missing on some ranks is not a difference.
    """
    settings = [
        {
            "bucket_bytes": str(plan.bucket_bytes),
            "compression": plan.wire,
            **dict(plan.options),
            "groups": str(plan.together),
        }
        for plan in plans
    ]
    for key in dict.fromkeys(key for setting in settings for key in setting):
        values = [f"{key}={setting.get(key)}" for setting in settings]
        if len(set(values)) > 1:
            return (
                f"The options differ between the ranks: {who_has(values, ranks)}. "
                "Use the same on every rank."
            )
    for i in range(max(len(plan.entries) for plan in plans)):
        names = {plan.entries[i].name if i < len(plan.entries) else None for plan in plans}
        if (
            len(names) > 1
            or len({_at(plan, i) for plan in plans if plan.present[i]}) > 1
            or _is_torn(plans, i)
        ):
            return (
                f"The gradients differ between the ranks, first at parameter {i}: "
                f"{who_has([_at(plan, i) for plan in plans], ranks)}. Every rank needs the same "
                "parameters in the same order, with gradients of the same dtype and shape."
            )
    return _difference_of_rows(plans, ranks)


def _all_rows(plans: Sequence[Plan]) -> Rows:
    """Return the rows of all plans, with what some rank knows of their layouts."""
    found: dict[int, Layout] = {}
    for i, layout in chain.from_iterable(plan.rows for plan in plans):
        known = found.get(i, layout)
        found[i] = tuple(b if a is None else a for a, b in zip(known, layout, strict=True))
    return tuple(sorted(found.items()))


def _difference_of_rows(plans: Sequence[Plan], ranks: Sequence[int]) -> str | None:
    merged = dict(_all_rows(plans))
    for i, layout in chain.from_iterable(plan.rows for plan in plans):
        if any(b not in (None, a) for a, b in zip(merged[i], layout, strict=True)):
            texts = [_in_words(dict(plan.rows).get(i, ("no rows",))) for plan in plans]
            return (
                f"the rows of the gradient of {plans[0].entries[i].name!r} belong to different "
                f"tensors: {who_has(texts, ranks)}. Every rank needs the same parameters in the "
                "same order."
            )
    for i in merged:
        if any(plan.present[i] for plan in plans):
            name = plans[0].entries[i].name
            numbers = ranks or range(len(plans))
            have = [r for r, plan in zip(numbers, plans, strict=True) if i in dict(plan.rows)]
            return (
                f"the gradient of {name!r} is sparse on {ranks_in_words(have)} and dense on "
                "others: make it the same on all ranks, or pass sparse_as_dense=True"
            )
    return None


def _in_words(layout: Layout) -> str:
    return " ".join(str(list(x) if isinstance(x, tuple) else x) for x in layout if x is not None)


def _is_torn(plans: Sequence[Plan], i: int) -> bool:
    """Return whether gradient i shares memory with another one that some rank has without it.

    On that rank, neither its zeros nor the result could be in the shared memory.
    """
    owners = {plan.owners[i] for plan in plans}
    return any(plan.present[owner] and not plan.present[i] for plan in plans for owner in owners)


def who_has(values: Sequence[str], ranks: Sequence[int] = ()) -> str:
    """Describe each rank's value, with equal ones grouped: `rank 0 has a, ranks 1 and 2 have b`."""
    return ", ".join(
        f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
        for value, ranks in ranks_by(values, ranks).items()
    )


def _at(plan: Plan, i: int) -> str:
    if i >= len(plan.entries):
        return f"only {len(plan.entries)} parameters"
    if not plan.present[i]:
        return f"{plan.entries[i].name!r} without a gradient"
    owner = plan.owners[i]
    shared = f" in the memory of {plan.entries[owner].name!r}" if owner != i else ""
    return f"{plan.entries[i]}{shared}"
