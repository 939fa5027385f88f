"""The clocks of the ranks' hosts, compared."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horo_lite.transports import Transport

_N_HANDSHAKES = 9


def epoch_ns(transport: Transport, several_hosts: bool) -> int:
    """Return what this rank adds to its monotonic clock to have rank 0's time since 1970, in ns.

    Every rank calls it. All ranks leave a handshake at almost the same time: within the time that a
    message takes between their hosts, by which the clocks are compared.

    Args:
        transport: Between the ranks.
        several_hosts: Whether they are on several hosts: those of one have one clock.
    """
    mine = time.time_ns() - time.monotonic_ns()
    headers = transport.agree(0, mine, label="init()")
    if not several_hosts:
        return headers[0].count
    ahead = []
    for _ in range(_N_HANDSHAKES):
        now = time.monotonic_ns()  # all have just left a handshake
        times = transport.agree(0, now, label="init()")
        ahead.append(now - times[0].count)
    return headers[0].count - int(statistics.median(ahead))
