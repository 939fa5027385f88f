"""Comparison of the clocks of the ranks' hosts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horo_lite.transports import Transport

_N_HANDSHAKES = 9


def epoch_ns(transport: Transport, several_hosts: bool) -> int:
    """Return the offset of rank 0's time since 1970 from this rank's monotonic clock, in ns.

    Every rank calls it. The clocks are compared when the ranks leave a handshake, which they do at
    the same time to within the latency of a message between their hosts.

    Args:
        transport: The transport between the ranks.
        several_hosts: Whether they are on several hosts: ranks of one host have the same clock.
    """
    # A pause between the two makes a difference too small.
    mine = max(time.time_ns() - time.monotonic_ns() for _ in range(5))
    headers = transport.agree(0, mine, label="init()")
    if not several_hosts:
        return headers[0].count
    ahead = []
    for _ in range(_N_HANDSHAKES):
        now = time.monotonic_ns()  # all have just left a handshake
        times = transport.agree(0, now, label="init()")
        ahead.append(now - times[0].count)
    return headers[0].count - sorted(ahead)[_N_HANDSHAKES // 2]
