"""Whether gradients leave while backward() computes the others, or together when it has ended."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from horo_lite import context

if TYPE_CHECKING:
    from collections.abc import Callable

    from horo_lite.collectives.group import Group

ENOUGH = 0.5
"""Of a core, or of what a rank has of one, beside what backward() uses: docs/performance.md."""


class Overlap:
    """Whether an exchange pays beside backward(), as this rank sees it.

    Between hosts ranks wait for the link, so it does. Among the ranks of one host an exchange is
    work for the cores, and where backward() leaves them no time, each interrupts the other. So it
    is measured how much of its cores this rank uses from the first gradient of a step to the last,
    not counting exchanges. Results do not depend on it, nor on whether all ranks see it alike.

    Args:
        cores: How many this rank has to itself. With math.inf it always pays, with 0 never.
        exchanging_s: How long exchanges have had a core, in seconds.

    Attributes:
        pays: Whether it does, in the next step.
    """

    def __init__(
        self, cores: float = math.inf, exchanging_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._cores = cores
        self._exchanging_s = exchanging_s
        self._enough = ENOUGH * min(cores, 1.0)
        self._began: tuple[float, float] | None = None
        self._used = self._elapsed = 0.0  # seconds of cores, and of time
        self.pays = cores > 0

    @classmethod
    def of(cls, group: Group) -> Overlap:
        """Return that of gradients in the host's memory among these ranks."""
        if not context.is_initialized() or group.transport.host.native_group is None:
            return cls()
        world = context.world()
        cores = {"always": math.inf, "never": 0.0}.get(world.overlap, world.cores)
        return cls(cores, group.busy_s)

    def begin(self) -> None:
        """A gradient of the step is there."""
        if self._began is None and 0 < self._cores < math.inf:
            self._began = self._busy_s(), time.perf_counter()

    def end(self) -> None:
        """All of them are."""
        if self._began is None:
            return
        used, elapsed = self._began
        # The latest step counts as much as all before it.
        self._used = self._used / 2 + self._busy_s() - used
        self._elapsed = self._elapsed / 2 + time.perf_counter() - elapsed
        self._began = None
        self.pays = self._used < (self._cores - self._enough) * self._elapsed

    def _busy_s(self) -> float:
        return time.process_time() - self._exchanging_s()

    def forget(self) -> None:
        """The step was given up."""
        self._began = None
