"""The choice of a wire format, by trying each for a few steps."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from horo_lite.arguments import QUANTIZED
from horo_lite.errors import say

if TYPE_CHECKING:
    from horo_lite.collectives.compression import AutoCompressor, Compressor
    from horo_lite.collectives.group import Group

N_WARM = 2  # steps with a new format that are not timed: the first one does not overlap
N_TIMED = 5
TOLERANCE = 1.05  # a format that rounds less may take this much longer than the fastest


class Trials:
    """Tries each candidate for some steps, all ranks the same, and keeps one.

    It is the first one whose median step takes at most 5 % longer than that of the fastest. Steps
    are timed from the end of one exchange to the end of the next, and the ranks' times averaged.
    """

    def __init__(self, group: Group, asked: AutoCompressor) -> None:
        self._group = group
        is_useless = QUANTIZED if group.transport.shares_memory else ()
        found = [one for one in asked.candidates if one.wire not in is_useless]
        self._candidates = (found or list(asked.candidates))[: None if group.size > 1 else 1]
        self._seconds: list[list[float]] = [[]]  # of each step with each candidate so far
        self._last = time.perf_counter()

    @property
    def candidate(self) -> Compressor:
        return self._candidates[len(self._seconds) - 1]

    @property
    def is_over(self) -> bool:
        return len(self._candidates) == 1

    def end_step(self, what: str, *, counts: bool) -> None:
        """End a step. Collective after the last one.

        Args:
            what: What is exchanged, for the message with the choice.
            counts: Whether all ranks have taken it: so all count the same steps.
        """
        now = time.perf_counter()
        began, self._last = self._last, now
        if not counts:
            return
        self._seconds[-1].append(now - began)
        if len(self._seconds[-1]) < N_WARM + N_TIMED:
            return
        if len(self._seconds) < len(self._candidates):
            self._seconds.append([])
            return
        medians = np.array([statistics.median(each[N_WARM:]) for each in self._seconds])
        self._group.exchange([medians], names=["seconds"], label=f"the times of {what}")
        chosen = int(np.argmax(medians <= TOLERANCE * medians.min()))
        if self._group.rank == 0:
            times = ", ".join(
                f"{one.name} {1e3 * s:.3g}"
                for one, s in zip(self._candidates, medians, strict=True)
            )
            name = self._candidates[chosen].name
            say(f"compression {name} from now on, for {what}: ms a step: {times}")
        self._candidates, self._seconds = [self._candidates[chosen]], [[]]
