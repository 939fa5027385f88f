"""The backend of torch.distributed: `init_process_group("horo_lite")`.

`horo_lite.autoload` registers it when torch is imported, and calls `new_process_group` for every
process group that a program creates with it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from horo_lite import context, ops
from horo_lite.adapters import needs
from horo_lite.start import groups, session, stall
from horo_lite.torch.distributed.process_group import ProcessGroup

# With 2.4, DDP waits for a process group written in Python while it holds the GIL: a deadlock.
needs(torch, "2.9", "the backend horo_lite of torch.distributed")

__all__ = ["ProcessGroup", "new_process_group", "rendezvous"]


def new_process_group(options: Any) -> ProcessGroup:
    """Create a process group for torch.distributed. Every rank of it calls this.

    Args:
        options: Torch's `_DistributedBackendOptions`: store, rank, size, timeout and, unless it is
            the default group, the numbers of its ranks.

    Raises:
        LauncherError: The ranks cannot be connected.
        ValueError: There is already a world, with other rank numbers.
        PeerLostError: A rank died during this.
    """
    store, rank, size = options.store, options.group_rank, options.group_size
    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group)
    owns_world = False
    if not context.is_initialized():
        if ranks and ranks != list(range(len(ranks))):
            raise ValueError(
                f"a process group of ranks {ranks} needs a world of horo_lite, and there is none "
                "yet: call horo_lite.init() first, on every rank, or create the default process "
                'group with backend="horo_lite"'
            )
        session.init_with_store(store, rank, size, timeout_s)
        owns_world = True
        _limit_waits(timeout_s)
    world = context.world()
    if not ranks and (world.rank, world.size) != (rank, size):
        raise ValueError(
            f"this process is rank {world.rank} of {world.size} in horo_lite's world, and rank "
            f"{rank} of {size} in torch.distributed's: the numbers must be the same"
        )
    if not ranks or owns_world:
        group = world.group
    else:
        group = groups.new_group_of_members(ranks, options.group_id)
    if not ranks and rank == 0 and sys.modules.get("ignite.distributed") is not None:
        warnings.warn(
            "Ignite's auto_model() knows the backends nccl, gloo, mpi and horovod: on horo_lite it "
            "does not wrap a model in DistributedDataParallel, and replicas diverge. Do it "
            "yourself: model = DistributedDataParallel(idist.auto_model(model))",
            stacklevel=2,
        )
    return ProcessGroup(rank, size, group, options.group_id, timeout_s, owns_world=owns_world)


def _limit_waits(timeout_s: float) -> None:
    """Make a rank that waits for longer raise StallError, unless the user has set a limit."""
    detector = stall.detector_of(context.world())
    if detector is not None and detector.abort_s == 0:
        detector.set_limits(detector.warn_s, timeout_s)


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=30), **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and size for `init_method="horo-lite://"`, if MPI started the ranks.

    Every rank calls it; it creates the world unless `init()` has.
    """
    from torch.distributed import TCPStore

    world = session.init()
    host, port, store = "localhost", 0, None
    if world.rank == 0:
        import socket

        host = socket.gethostname() if world.local_size < world.size else "localhost"
        store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        port = store.port
    host, port = ops.broadcast_object((host, port))
    if store is None:
        store = TCPStore(host, port, None, False, timeout)
    ops.barrier()  # rank 0 may destroy the store as soon as it leaves
    yield store, world.rank, world.size
    raise RuntimeError("the ranks of a world of horo_lite can rendezvous only once")
