"""Whether gradients leave while backward() computes the others, or together when it has ended."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from horo_lite import context

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

ENOUGH = 0.5
"""Of a core for each rank, beside what backward() uses: see docs/performance.md."""


class Overlap:
    """Whether an exchange pays beside backward(), as this rank sees it.

    Between hosts ranks wait for the link, so it does. Among the ranks of one host an exchange is
    work for the cores, and where backward() leaves them no time, each interrupts the other. So it
    is measured how much of its cores this rank uses from the first gradient of a step to the last.
    Results do not depend on it, nor on whether all ranks see it alike.

    Args:
        cores: How many this rank has to itself. With math.inf it always pays, with 0 never.

    Attributes:
        pays: Whether it does, in the next step.
    """

    def __init__(self, cores: float = math.inf) -> None:
        self._cores = cores
        self._began: tuple[float, float] | None = None
        self._used = self._elapsed = 0.0  # seconds of cores, and of time
        self.pays = cores > ENOUGH

    @classmethod
    def of(cls, group: Group) -> Overlap:
        """Return that of gradients in the host's memory among these ranks."""
        if not context.is_initialized() or group.transport.host.native_group is None:
            return cls()
        world = context.world()
        return cls({"always": math.inf, "never": 0.0}.get(world.overlap, world.cores))

    def begin(self) -> None:
        """A gradient of the step is there."""
        if self._began is None and self._cores < math.inf:
            self._began = time.process_time(), time.perf_counter()

    def end(self) -> None:
        """All of them are."""
        if self._began is None:
            return
        used, elapsed = self._began
        # The latest step counts as much as all before it.
        self._used = self._used / 2 + time.process_time() - used
        self._elapsed = self._elapsed / 2 + time.perf_counter() - elapsed
        self._began = None
        self.pays = self._used < (self._cores - ENOUGH) * self._elapsed

    def forget(self) -> None:
        """The step was given up."""
        self._began = None
