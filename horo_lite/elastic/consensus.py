"""Agreement between the remaining ranks, while others die."""

from __future__ import annotations

import os
import signal
import time
from array import array
from contextlib import suppress
from typing import Any

from horo_lite.context import world
from horo_lite.errors import PeerLostError, StallError
from horo_lite.processes import lives
from horo_lite.start import mpi
from horo_lite.transports.mpi.start_barrier import StartBarrier

# After this time, and at this interval, a rank checks why the others do not arrive.
_GRACE_S = 2.0
# How often it checks before it gives up the ranks that a StallError reports.
_N_CHECKS = 5


def consensus(comm: Any, bits: int, error: BaseException | None = None) -> tuple[int, bool]:
    """Return the bitwise AND of the bits of all living ranks, and whether ranks are known dead.

    The result is the same on every rank that survives the call, whenever others die. It waits for
    all ranks, at little cost, but no longer for those that `error`, a StallError, reports.

    Raises:
        PeerLostError: A rank has ended in a way that MPI does not detect.
    """
    from mpi4py import MPI

    common = array("i", [bits])
    request = comm.Iagree(common)
    began, pause_s = time.monotonic(), 20e-6
    gone: set[object] = set()
    n_checks = 0
    try:
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(1e-3, 1.5 * pause_s)
            if time.monotonic() - began > _GRACE_S:
                began, n_checks = time.monotonic(), n_checks + 1
                gone = _check_missing(error, gone)
                if isinstance(error, StallError) and n_checks >= _N_CHECKS:
                    raise error  # they are on other hosts, where this rank cannot kill them
    except MPI.Exception:  # on all ranks: some are dead
        mpi.end_without_finalize()
        return common[0], True
    return common[0], False


def _check_missing(error: BaseException | None, gone: set[object]) -> set[object]:
    """Return the ranks that are gone; raise PeerLostError if some of them already were `gone`.

    This prevents waiting forever: ranks that a StallError reports are killed, so that MPI detects
    it. MPI may never detect that others have ended: on this host, their processes no longer run; on
    other hosts, they have announced their end.
    """
    now: set[object] = set(StartBarrier.ended())
    if error is not None:
        transport = world().group.transport
        if isinstance(error, StallError):
            for pid in transport.members.peer_pids(silent=True):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            pids = transport.members.peer_pids(silent=False)
            now.update(pid for pid in pids if not lives(pid))
    if now & gone:
        names = sorted(str(one) for one in now if isinstance(one, str))
        cause = error or f"{', '.join(names)}, as numbered at the start of the job, ended it"
        raise PeerLostError(
            f"{cause}. The others cannot continue: Open MPI detects the death of ranks that a "
            "signal ends, but not of those that exit with their own status (os._exit), or that end "
            "the job (Ctrl-C)"
        )
    return now
