"""Limits of a rank's waits, set after init(), for scripts of tests.

As settings they would also hold in init(), in which a rank waits for the imports of the others.
"""

from __future__ import annotations

from horo_lite import context
from horo_lite.start.stall import detector_of


def limit_waits(abort_s: float, warn_s: float | None = None) -> None:
    """Set after how many seconds a wait of this rank ends the job, and when it is reported."""
    detector = detector_of(context.world())
    assert detector is not None
    detector.set_limits(detector.warn_s if warn_s is None else warn_s, abort_s)
