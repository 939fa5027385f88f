"""What the ranks that are left have in common, while others die."""

from __future__ import annotations

import os
import signal
import time
from array import array
from contextlib import suppress
from typing import Any

from horo_lite.context import world
from horo_lite.errors import PeerLostError, StallError
from horo_lite.start import mpi
from horo_lite.transports.mpi.start_barrier import StartBarrier

# After so long, and each time after as long again, a rank checks what keeps the others.
_GRACE_S = 2.0
# How often it checks before it gives up those that a StallError is about.
_N_CHECKS = 5


def consensus(comm: Any, bits: int, error: BaseException | None = None) -> tuple[int, bool]:
    """What the bits of all living ranks have in common, and whether some ranks are known dead.

    The same on every rank that survives it, whenever others die. Waits for all, at little cost;
    for those that `error`, a StallError, is about not any longer. PeerLostError where a rank has
    ended in a way that MPI does not notice.
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
                    raise error  # they are on other hosts, where nobody here can end them
    except MPI.Exception:  # on all alike: some are dead
        mpi.end_without_finalize()
        return common[0], True
    return common[0], False


def _check_missing(error: BaseException | None, gone: set[object]) -> set[object]:
    """Return the ranks that are gone; PeerLostError where some of them were `gone` before.

    Of ranks that do not come none is waited for in vain: those that a StallError is about are
    killed, so that MPI notices, and of others that ended MPI may never notice it. Those of this
    host are seen to be gone, others have said that they end.
    """
    now: set[object] = set(StartBarrier.ended())
    if error is not None:
        transport = world().group.transport
        if isinstance(error, StallError):
            for pid in transport.peer_pids(silent=True):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            pids = transport.peer_pids(silent=False)
            now.update(pid for pid in pids if not os.path.exists(f"/proc/{pid}"))
    if now & gone:
        names = sorted(str(one) for one in now if isinstance(one, str))
        cause = error or f"{', '.join(names)} of those that the job began with ended it"
        raise PeerLostError(
            f"{cause}. The others cannot go on: Open MPI notices the death of ranks that a signal "
            "ends, and not of those that exit with a status of their own (os._exit), or that end "
            "the job (Ctrl-C)"
        )
    return now
