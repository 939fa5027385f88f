"""How much of the averaged gradients is noise, and so how many fewer steps more ranks would need.

Rank r's gradient g_r is that of all data, G, and noise: its variance, over all elements, is S
divided by the rank's number of samples. For the average g over N ranks with B samples in all, and
shares w_r of them, the expected values are

    sum of w_r |g_r|² = |G|² + N S / B        |g|² = |G|² + S / B

So their difference over N - 1 is the noise in |g|². Its share q of |g|² depends neither on the
scale of the loss nor on the number of samples. S / |G|² is the simple noise scale of McCandlish,
Kaplan and Amodei ("An empirical model of large-batch training", 2018, appendix A.1), by which k
times as many samples need 1 / (1 - q + q / k) times fewer steps for the same loss: Amdahl's law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from horo_lite import ops, settings
from horo_lite.arguments import QUANTIZED
from horo_lite.collectives.calls import gathered
from horo_lite.collectives.compression import Compressor, OwnCompressor
from horo_lite.collectives.reductions import AnyOp, Average, Sum
from horo_lite.errors import say
from horo_lite.state.drift import Run
from horo_lite.state.hashes import Readable
from horo_lite.training.step_record import reals

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

_AT_ONCE = 1 << 15


@dataclass
class GradientNoise:
    """The share of noise in the averages of an optimizer's gradients, in some steps.

    Attributes:
        title: Such as "gradients of optimizer 1": optimizers are numbered in the order of their
            first steps.
        steps: The steps that were measured; the first one of the optimizer is 1.
        shares: For each of them, how much of the squared norm of the averaged gradient is noise: 0
            if all ranks have the same gradient, 1 if these have nothing in common. An estimate,
            which may exceed 1.
    """

    title: str
    steps: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def share(self, begin: float = 0.0, end: float = 1.0) -> float:
        """Return the median of the shares in a part of the run, at most 1.

        Args:
            begin: Where the part begins: 0 is the first measured step, 0.5 half of them.
            end: Where it ends.
        """
        n = len(self.shares)
        return min(float(np.median(self.shares[int(begin * n) : max(math.ceil(end * n), 1)])), 1.0)

    def fewer_steps(self, factor: float, begin: float = 0.0, end: float = 1.0) -> float:
        """Return how many times fewer steps `factor` times as many ranks need for the same loss.

        If each has as many samples in a step as now, and the learning rate is the best one for
        either number.

        Args:
            factor: How many times as many ranks; `math.inf` for the limit.
            begin: The part of the run from which it is estimated: see `share`.
            end: Likewise.
        """
        share = self.share(begin, end)
        needed = 1 - share + share / factor
        return 1 / needed if needed > 0 else math.inf

    def __str__(self) -> str:
        n = len(self.shares)
        thirds = [self.share(third / 3, (third + 1) / 3) for third in range(3)]
        course = ", ".join(f"{share:.0%}" for share in thirds)
        limit = self.fewer_steps(math.inf)
        most = f", and no number more than {limit:.3g}" if limit < math.inf else ""
        return (
            f"{self.title}: {self.share():.0%} of their average is noise, by its squared norm "
            f"(median of {n} steps{f'; in thirds of the run: {course}' if n > 8 else ''}). So for "
            f"the same loss, twice as many ranks may need {self.fewer_steps(2):.2f} times fewer "
            f"steps, 4 times as many {self.fewer_steps(4):.2f}{most}"
        )


def gradient_noise(group: Group | None = None) -> list[GradientNoise]:
    """Return what HORO_LITE_NOISE_EVERY has measured so far, for each optimizer. Not collective.

    Args:
        group: The ranks whose optimizers are meant; by default all.
    """
    return list(_kept(ops.ranks_of(group)).values())


def _kept(group: Group) -> dict[object, GradientNoise]:
    known: dict[object, GradientNoise] = group.kept.setdefault(GradientNoise, {})
    return known


def is_due(step: int, every: int, op: AnyOp, compression: Compressor) -> bool:
    """Return whether the noise is measured in that step, the first of which is 1.

    It cannot be measured if the ranks receive something else than the average of what they have.

    Args:
        step: The number of the step.
        every: See `settings.noise_every`.
        op: How the gradients are combined.
        compression: How they travel.
    """
    return (
        every > 0
        and step % every == 0
        and op in (Average, Sum)
        and compression.wire not in QUANTIZED
        and not isinstance(compression, OwnCompressor)
        and not any(
            getattr(type(compression), hook) is not getattr(Compressor, hook)
            for hook in ("prepare", "restore", "exchange")
        )
    )


class Measurement:
    """A measurement in one step, from before the exchange of gradients until after it.

    Args:
        group: The ranks.
        title: Whose gradients they are; see `GradientNoise`.
        names: Of the gradients.
        step: Its number.
        gradients: This rank's gradients.
    """

    def __init__(
        self, group: Group, title: str, names: Sequence[str], step: int, gradients: Iterable[Any]
    ) -> None:
        self._group, self._title, self._names, self._step = group, title, tuple(names), step
        self._own = _squared_norm(gradients, group)

    def finish(
        self,
        results: Iterable[Any],
        *,
        op: AnyOp,
        weight: float | None,
        factor: float,
        run: Run | None = None,
    ) -> None:
        """Note the share of noise in the results, unless some rank has joined. Collective.

        Args:
            results: The averages or sums that this rank has received.
            op: Average or Sum.
            weight: This rank's weight in the average.
            factor: By which the results were multiplied.
            run: Executes the operation; by default the group's.
        """
        factor *= self._group.size if op is Sum else 1
        average = _squared_norm(results, self._group) / factor**2 if factor else 0.0
        mine = (self._own, 1.0 if weight is None else weight)
        # Without the step's number, which differs on ranks that have given up different steps.
        what = f"noise of {self._title}"
        everyone: list[tuple[float, float]]
        everyone = gathered(self._group, mine, what, needs_all=False, run=run)
        share = noise_share(everyone, average)
        if share is not None and len(everyone) == self._group.size:  # no rank has joined
            key = self._title, self._names
            noise = _kept(self._group).setdefault(key, GradientNoise(self._title))
            noise.steps.append(self._step)
            noise.shares.append(share)


def _squared_norm(arrays: Iterable[Any], group: Group) -> float:
    """Return the sum of the squares of all elements of these gradients."""
    readable = Readable(group)
    total = 0.0
    for array in arrays:
        tensors = readable.plain(array)
        numbers = reals(tensors) if tensors.is_float(0) else np.empty(0)
        for begin in range(0, len(numbers), _AT_ONCE):
            part = numbers[begin : begin + _AT_ONCE].astype(np.float64)
            total += float(part @ part)
    return total


def noise_share(ranks: Sequence[tuple[float, float]], average: float) -> float | None:
    """Return the share of noise in an average; None if it cannot be known.

    Args:
        ranks: The squared norm of each rank's gradient, and its weight.
        average: The squared norm of their average.
    """
    with_samples = [(square, weight) for square, weight in ranks if weight > 0]
    total = math.fsum(weight for _, weight in with_samples)
    if len(with_samples) < 2 or not average > 0:
        return None
    squares = math.fsum(square * weight / total for square, weight in with_samples)
    noise = max(squares - average, 0.0) / (len(with_samples) - 1)
    share = noise / average
    return share if math.isfinite(share) else None


def print_summary(groups: Sequence[Group]) -> None:
    """Say what was measured, if this is the first rank of one of these groups.

    The first of them is the world. It is for runs in which `settings.noise_every` is not 0.
    """
    found = [(group, noise) for group in groups for noise in gradient_noise(group)]
    for group, noise in found:
        if group.rank == 0:
            say(str(noise))
    every, world = settings.noise_every(), groups[0]
    if not found and world.rank == 0 and world.size > 1:
        say(
            f"the gradients' noise was not measured: HORO_LITE_NOISE_EVERY={every} needs an "
            f"optimizer that averages gradients over several ranks in at least {every} steps, "
            "and neither int8, int4 nor a compression of your own"
        )
