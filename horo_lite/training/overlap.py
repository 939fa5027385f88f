"""Decide whether gradients leave during backward(), or together after it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from horo_lite import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from horo_lite.collectives.group import Group

ENOUGH = 0.5
"""The share of a core, or of a rank's part of one, that must be free during backward():
docs/performance.md."""


class Overlap:
    """Decides whether it pays for this rank to exchange gradients during backward().

    Between hosts it does, since ranks wait for the link. Among the ranks of one host, an exchange
    is work for the cores; if backward() keeps them busy, the two interrupt each other. So this
    measures how much of its cores the rank uses from the first gradient of a step to the last, not
    counting exchanges. Results do not depend on the decision, which may differ between ranks.

    Args:
        cores: How many cores the rank has to itself. With math.inf it always pays, with 0 never.
        exchanging_s: Returns the CPU time of exchanges so far, in seconds.

    Attributes:
        pays: Whether it pays in the next step.
    """

    def __init__(
        self, cores: float = math.inf, exchanging_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._cores = cores
        self._exchanging_s = exchanging_s
        self._enough = ENOUGH * min(cores, 1.0)
        self._used = self._elapsed = 0.0  # seconds of CPU time, and of wall time
        self.pays = cores > 0

    @classmethod
    def of(cls, group: Group) -> Overlap:
        """Return the Overlap of gradients in host memory between these ranks."""
        if not context.is_initialized() or group.transport.host.native_group is None:
            return cls()
        world = context.world()
        cores = {"always": math.inf, "never": 0.0}.get(world.overlap, world.cores)
        return cls(cores, group.busy_s)

    def begin(self) -> tuple[float, float] | None:
        """Begin to measure, when the first gradient of the step is complete.

        Returns what `end()` takes, unless the step is given up; None if nothing is measured.
        """
        if 0 < self._cores < math.inf:
            return self._busy_s(), time.perf_counter()
        return None

    def end(self, began: tuple[float, float] | None) -> None:
        """End the measurement, when all gradients are complete, and decide."""
        if began is None:
            return
        used, elapsed = began
        # The latest step has the same weight as all steps before it.
        self._used = self._used / 2 + self._busy_s() - used
        self._elapsed = self._elapsed / 2 + time.perf_counter() - elapsed
        self.pays = self._used < (self._cores - self._enough) * self._elapsed

    def _busy_s(self) -> float:
        return time.process_time() - self._exchanging_s()
