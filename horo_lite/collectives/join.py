"""join(): ranks without more batches take part in what the others do, with nothing of their own.

A rank that has joined waits in two places: where the ranks meet in direct calls, and in its engine.
In both it learns what the others are about to do, makes the same call with arrays that change
nothing, and is compared, matched and served as in any call. See `participation.py`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from horo_lite import context
from horo_lite.errors import HoroLiteError

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


def join() -> int:
    """All ranks have called this; the number of the last one that did, alike on all of them.

    For uneven numbers of batches: a rank that has no more calls it, and until all have, it takes
    part in what the others do without changing it. In sums and averages it counts as zeros, and
    averages are still divided by the number of all ranks, as Horovod has it; one that is weighted
    by numbers of samples, only by those that there are. In allgathers it has no rows, and of
    broadcasts from others it sees nothing. What needs it (a broadcast from it, alltoall,
    reducescatter, objects, a new process set, so far whatever has arrays on a GPU) is a
    MismatchError for those that call it.

    Its own parameters stay behind meanwhile; the last rank's have seen every step:

        for batch in batches:
            ...
        last = hvd.join()
        hvd.broadcast_parameters(model, root_rank=last)

    The optimizer's state, and what else a step changes, has to be broadcast likewise. Afterwards
    everything is as before, and a next epoch may end in another join(). It is also a barrier.
    PeerLostError where a rank ends or fails meanwhile.
    """
    everyone, *parts = context.groups()
    if parts and not context.world().thread_multiple:
        raise HoroLiteError(
            "join() waits in every group of ranks at once, and MPI was initialised without "
            "THREAD_MULTIPLE: let horo_lite.init() initialise it, or do without process sets"
        )
    errors: list[BaseException] = []

    def join_part(part: Group) -> None:
        try:
            part.join()
        except BaseException as error:
            errors.append(error)

    # The others may operate among part of the ranks at any time, and wait for this one there.
    threads = [threading.Thread(target=join_part, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    last = everyone.join()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return everyone.transport.ranks[last]
