"""`horo-lite compare`: do two runs take the same steps, and if not, which is the first to differ?

It reads what `training/step_record.py` has written. The order of the comparisons is that in which
a training computes: the parameters with which it starts; then, step by step, the gradients, and
what the optimizer adds to the parameters. So the first difference is the one to look into.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horo_lite.training.step_record import FORMAT, N_SUMS

TOLERANCE = 1e-3
"""The relative difference up to which two runs in float32 count as the same."""
_ROUNDING = 1e-5
"""A relative difference that sums of float32 in another order explain."""
_EPSILON = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 2**-52, "complex128": 2**-52}
_EPSILON_OF_WIRE = {"fp16": 2**-10, "bf16": 2**-7, "int8": 2**-6, "int4": 2**-2, "auto": 2**-2}
_SMALL = 1e-3
"""An array that is smaller than all together by this factor may differ by as much more."""
_MOST_NAMES = 3


class UnreadableError(ValueError):
    """A file is not a record of steps."""


class Arrays(NamedTuple):
    """The gradients, or the parameters, of one step."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    sketches: NDArray[np.float64]  # a row for each array

    @property
    def norms(self) -> NDArray[np.float64]:
        """The norm of each array, as its sketch shows it."""
        norms: NDArray[np.float64] = np.sqrt((self.sketches**2).sum(1))
        return norms

    def chosen(self, names: Sequence[str]) -> Arrays:
        """Return those with these names, in their order."""
        at = {name: i for i, name in enumerate(self.names)}
        which = [at[name] for name in names]
        dtypes = tuple(self.dtypes[i] for i in which)
        return Arrays(tuple(names), dtypes, self.sketches[which])

    def epsilons(self) -> NDArray[np.float64]:
        """Return the relative distance of neighbouring numbers of each array's dtype."""
        return np.array([_EPSILON.get(dtype, 2**-23) for dtype in self.dtypes])


class Step(NamedTuple):
    """What one line of a file says."""

    gradients: Arrays
    parameters: Arrays
    compression: str


class Run(NamedTuple):
    """A file: the steps of each optimizer."""

    path: Path
    size: int
    command: str
    steps: dict[str, list[Step]]


class Difference(NamedTuple):
    """How far the same arrays of two runs are apart, relative to the larger ones.

    Attributes:
        of_all: That of all arrays together.
        of_each: That of each; inf if it is finite in one run only.
        names: Of the arrays.
        sketches: Those of both runs.
    """

    of_all: float
    of_each: NDArray[np.float64]
    names: tuple[str, ...]
    sketches: tuple[NDArray[np.float64], NDArray[np.float64]]

    def ratio(self, which: Sequence[int]) -> tuple[float, float]:
        """Return by which factor those of the second run are larger, and what it leaves over."""
        x, y = (sketches[which] for sketches in self.sketches)
        xx, yy = float((x * x).sum()), float((y * y).sum())
        if not (xx and yy):
            return 0.0, inf
        factor = float((x * y).sum()) / xx
        return factor, sqrt(float(((y - factor * x) ** 2).sum()) / yy)


class Finding(NamedTuple):
    """The first comparison whose difference is beyond the tolerance."""

    kind: str  # "start", "gradients" or "updates"
    step: int
    difference: Difference
    which: list[int]  # the arrays that differ, the worst first


def read(path: Path) -> Run:
    """Read a file of HORO_LITE_RECORD_STEPS.

    Raises:
        UnreadableError: It is not such a file, or has no step.
        OSError: It cannot be read.
    """
    size, command, steps = 0, "", dict[str, list[Step]]()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines):
            if not text.endswith("\n"):
                break  # the job was killed while it wrote
            try:
                line = json.loads(text)
                if number == 0:
                    if line["horo_lite_steps"] != FORMAT:
                        raise UnreadableError(f"{path} was written by another version of horo_lite")
                    size, command = int(line["size"]), shlex.join(map(str, line["command"]))
                    continue
                gradients, parameters = _arrays(line["gradients"]), _arrays(line["parameters"])
                step = Step(gradients, parameters, str(line["compression"]))
                steps.setdefault(str(line["of"]), []).append(step)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, UnreadableError):
                    raise
                raise UnreadableError(
                    f"{path}, line {number + 1}: not what HORO_LITE_RECORD_STEPS writes"
                ) from error
    if not steps:
        raise UnreadableError(f"{path}: no step was recorded (is it an optimizer of horo_lite?)")
    return Run(path, size, command, steps)


def _arrays(of: dict[str, list[Any]]) -> Arrays:
    sketches = np.array([sums for _, *sums in of.values()], np.float64)
    dtypes = tuple(str(dtype) for dtype, *_ in of.values())
    return Arrays(tuple(of), dtypes, sketches.reshape(len(of), N_SUMS))


# Comparisons.


def difference(a: Arrays, b: Arrays, *, within: NDArray[np.float64] | float = 0.0) -> Difference:
    """Compare arrays of the same names; those that differ by up to `within` count as equal."""
    ours, theirs = np.isfinite(a.norms), np.isfinite(b.norms)
    both = ours & theirs
    norms = np.where(both, np.maximum(a.norms, b.norms), 0.0)
    x, y = (np.where(both[:, None], one.sketches, 0.0) for one in (a, b))
    apart = np.sqrt(((x - y) ** 2).sum(1))
    norm = float(np.sqrt((norms**2).sum()))
    scale = norms + _SMALL * norm
    each = np.divide(apart, scale, out=np.zeros(len(apart)), where=(scale > 0) & (apart > within))
    each[ours != theirs] = inf
    return Difference(float(np.sqrt((apart**2).sum())) / (norm or 1.0), each, a.names, (x, y))


def _update(before: Arrays, after: Arrays) -> Arrays:
    """Return what a step has added to the parameters."""
    return before._replace(sketches=after.sketches - before.sketches)


class Comparison:
    """Compares the steps of one optimizer in two runs."""

    def __init__(self, a: Sequence[Step], b: Sequence[Step], tolerance: float) -> None:
        self._a, self._b, self._tolerance = a, b, tolerance
        self.n_steps = min(len(a), len(b))
        self.lengths = len(a), len(b)
        self.of_gradients: list[float] = []  # the differences in each step
        self.of_updates: list[float | None] = []
        # The names of arrays that only one run has in some step.
        self.only_here: dict[str, set[str]] = {"parameters": set(), "gradients": set()}
        self.are_renamed = False
        self.n_compared = 0  # arrays, in all steps
        self.finding: Finding | None = None
        wires = {step.compression for steps in (a, b) for step in steps}
        self._of_wire = max(_EPSILON_OF_WIRE.get(wire, 0.0) for wire in wires)
        own = [steps[0].gradients.epsilons().max(initial=0.0) for steps in (a, b)]
        self.rounding = max(_ROUNDING, self._of_wire, *own)
        largest = 0.0
        for found in self._differences():
            self._add(found)
            self.n_compared += len(found.difference.names)
            if found.kind == "gradients":
                largest = max(largest, found.difference.of_all)
            limits = self._limits(found, largest)
            which = np.flatnonzero(found.difference.of_each > limits)
            if self.finding is None and which.size:
                order = np.argsort(-found.difference.of_each[which], kind="stable")
                self.finding = found._replace(which=which[order].tolist())

    def _add(self, found: Finding) -> None:
        if found.kind == "gradients":
            self.of_gradients.append(found.difference.of_all)
            self.of_updates.append(None)
        elif found.kind == "updates":
            self.of_updates[-1] = found.difference.of_all

    def _limits(self, found: Finding, largest: float) -> NDArray[np.float64]:
        """Return the tolerance of each array."""
        at = found.step - 1
        known: dict[str, float] = {}
        for one in (self._a[at], self._b[at]):
            arrays = one.parameters if found.kind == "start" else one.gradients
            for name, epsilon in zip(arrays.names, arrays.epsilons().tolist(), strict=True):
                known[name] = max(epsilon, known.get(name, 0.0))
        own = np.array([known.get(name, 0.0) for name in found.difference.names])
        limits: NDArray[np.float64] = self._tolerance + 4 * np.maximum(own, self._of_wire)
        # Adam divides by the size of the gradients: where they are small, it enlarges differences.
        return np.maximum(limits, 30 * largest) if found.kind == "updates" else limits

    def _differences(self) -> Iterator[Finding]:
        for at in range(self.n_steps):
            before = self._pairs("parameters", at)
            if at == 0:
                yield Finding("start", 1, difference(*before), [])
            pairs = self._pairs("gradients", at)
            yield Finding("gradients", at + 1, difference(*pairs), [])
            if at + 1 == self.n_steps:
                break
            after = self._pairs("parameters", at + 1)
            if not before[0].names or after[0].names != before[0].names:
                continue
            before, after = self._with_gradients(before, pairs), self._with_gradients(after, pairs)
            if not before[0].names:
                continue
            # Sums of a parameter and an update round to neighbouring numbers.
            rounding = before[0].epsilons() * before[0].norms
            updates = [_update(*one) for one in zip(before, after, strict=True)]
            yield Finding("updates", at + 1, difference(*updates, within=rounding), [])

    def _pairs(self, kind: str, at: int) -> tuple[Arrays, Arrays]:
        """Return the arrays that both have, by name, or if all names differ, by position."""
        a, b = getattr(self._a[at], kind), getattr(self._b[at], kind)
        common = [name for name in a.names if name in set(b.names)]
        if not common and len(a.names) == len(b.names):
            self.are_renamed |= bool(a.names)
            return a, b._replace(names=a.names)
        self.only_here[kind] |= set(a.names) ^ set(b.names)
        return a.chosen(common), b.chosen(common)

    @staticmethod
    def _with_gradients(
        parameters: tuple[Arrays, Arrays], gradients: tuple[Arrays, Arrays]
    ) -> tuple[Arrays, Arrays]:
        """Leave out parameters whose gradients are 0 but for rounding, to which Adam adds noise."""
        small: set[str] = set()
        for of in gradients:
            norms = np.where(np.isfinite(of.norms), of.norms, inf)
            limit = 1e-6 * float(np.sqrt((of.norms[np.isfinite(of.norms)] ** 2).sum()))
            few = {name for name, norm in zip(of.names, norms, strict=True) if norm <= limit}
            small = few if of is gradients[0] else small & few
        names = [name for name in parameters[0].names if name not in small]
        return parameters[0].chosen(names), parameters[1].chosen(names)

    @property
    def grew(self) -> bool:
        """Whether the first difference beyond the tolerance has grown from smaller ones."""
        found = self.finding
        if found is None or found.kind != "gradients" or found.step == 1:
            return False
        before, now = self.of_gradients[found.step - 2 : found.step]
        return before > now / 20

    @property
    def is_same(self) -> bool:
        """Whether the runs take the same steps, but for rounding."""
        if self.finding is None:
            return self.n_compared > 0
        return self.grew and self.of_gradients[0] < self.rounding


# Words.


def main(first: Path, second: Path, tolerance: float = TOLERANCE) -> int:
    """Compare two files, and print what was found.

    Returns:
        0 if the runs take the same steps, 1 if not, 2 if a file cannot be used.
    """
    try:
        a, b = read(first), read(second)
    except (OSError, UnreadableError) as error:
        print(f"horo-lite compare: {error}", file=sys.stderr)
        return 2
    for letter, run in ("A", a), ("B", b):
        ranks = "1 rank" if run.size == 1 else f"{run.size} ranks"
        print(f"{letter}: {run.path}: {ranks}, {run.command}")
    is_same = len(a.steps) == len(b.steps)
    by_name = a.steps.keys() == b.steps.keys()
    for ours, theirs in zip(a.steps, a.steps if by_name else b.steps, strict=False):
        print(f"\n{ours}" if ours == theirs else f"\n{ours} in A, {theirs} in B")
        found = Comparison(a.steps[ours], b.steps[theirs], tolerance)
        print("\n".join([*_table(found), *_remarks(found), *_result(found, b.size / a.size)]))
        is_same &= found.is_same
    if len(a.steps) != len(b.steps):
        print(f"\nA has {len(a.steps)} optimizers and B {len(b.steps)}: others are not compared.")
    return 0 if is_same else 1


def _table(found: Comparison) -> Iterator[str]:
    """Yield the differences in some steps."""
    powers = [10**k for k in range(len(str(found.n_steps)))]
    shown = {found.n_steps, 3, *(k * power for power in powers for k in (1, 2, 5))}
    if found.finding is not None:
        shown |= {found.finding.step - 1, found.finding.step}
    yield f"{'step':>8}  {'gradients':>9}  {'updates':>9}   relative difference"
    differences = zip(found.of_gradients, found.of_updates, strict=True)
    for step, (gradients, update) in enumerate(differences, 1):
        if step in shown:
            yield f"{step:>8}  {gradients:>9.1e}  {'' if update is None else f'{update:.1e}':>9}"


def _remarks(found: Comparison) -> Iterator[str]:
    """Yield what was not compared."""
    if found.are_renamed:
        yield "The names differ: arrays are compared in their order."
    for kind, names in found.only_here.items():
        if names:
            yield f"Not compared: {kind} that only one run has, {_some(sorted(names))}."
    if found.n_steps < max(found.lengths):
        a, b = found.lengths
        yield f"A has {a} steps and B {b}: the first {found.n_steps} are compared."


def _result(found: Comparison, factor: float) -> Iterator[str]:
    """Yield the result, if the second run has `factor` times the ranks of the first."""
    finding = found.finding
    if not found.n_compared:
        yield "Nothing could be compared: the runs have no array in common. Is it the same model?"
    elif finding is None:
        yield f"The same in {'1 step' if found.n_steps == 1 else f'all {found.n_steps} steps'}."
    elif found.grew:
        first, *_ = found.of_gradients
        before, now = found.of_gradients[finding.step - 2 : finding.step]
        yield (
            f"No step stands out: the difference has grown from {first:.1e} in step 1, and is "
            f"{before:.1e} and {now:.1e} in steps {finding.step - 1} and {finding.step}."
        )
        yield (
            "Training enlarges rounding errors in this way, also between two runs of one script in "
            "which sums have another order."
            if found.is_same
            else f"Rounding does not explain that of step 1: look with --tolerance {first / 4:.0e}."
        )
    elif finding.kind == "start":
        yield f"The runs start from different parameters: {_worst(finding)}."
        yield "Give both the same seed before the model is made, or let both load one checkpoint."
    else:
        difference, which = finding.difference, finding.which
        how, advice = _worst(finding), _DIFFERENT[finding.kind]
        ratio, rest = difference.ratio(which)
        if any(not isfinite(difference.of_each[i]) for i in which):
            how, advice = f"only one run's are finite: {how}", ""
        elif rest < max(0.02, 4 * found.rounding) and abs(ratio - 1) > 0.02:
            how, advice = f"B's are {ratio:.3g} times A's: {how}", _TIMES[finding.kind]
            if factor != 1 and any(abs(ratio / x - 1) < 0.02 for x in (factor, 1 / factor)):
                how += ". This is the proportion of the numbers of ranks"
        n = finding.step - 1
        same = f", after {n} that {'is' if n == 1 else 'are'} the same" if n else ""
        yield f"Step {finding.step} is the first to differ{same}, in its {finding.kind}: {how}."
        if advice:
            yield advice


_TIMES = {
    "gradients": "Look for a loss that is a sum over the batch and not its mean, op=Sum, a loss "
    "scale, and accumulation that is not divided by the number of passes.",
    "updates": "Look for the learning rate, its warm-up and schedule, and clipping.",
}
_DIFFERENT = {
    "gradients": "Look for other samples in this step (an epoch's order, a smaller last batch), "
    "random numbers (dropout, augmentation), and layers whose results depend on the batch, such as "
    "BatchNorm (those of SyncBatchNorm do not depend on the number of ranks).",
    "updates": "The gradients are the same, so look for the optimizer's options and state "
    "(momentum, weight decay, a loaded state), clipping, and for what else changes parameters.",
}


def _worst(finding: Finding) -> str:
    """Name the arrays that differ most, with their relative differences."""
    each, names = finding.difference.of_each, finding.difference.names
    return (
        f"{len(finding.which)} of {len(names)} arrays, "
        f"{_some([f'{names[i]!r} by {each[i]:.1e}' for i in finding.which])}"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
