"""Ranks of one machine, started without MPI: the starter creates the memory they share.

The starter writes one line of JSON to each rank's standard input (`invite`), and the rank makes a
world of it (`join`), which `hvd.init()` then returns. Everything else is as under a launcher.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from horo_lite import _native, context
from horo_lite.collectives.group import Group
from horo_lite.messages import Messages
from horo_lite.settings import Settings
from horo_lite.start import devices, session
from horo_lite.transports.nccl import NcclTransport
from horo_lite.transports.pipes import Pipes
from horo_lite.transports.shm import ShmTransport
from horo_lite.transports.staged import StagedTransport
from horo_lite.transports.stream import CommunicationStream

N_GROUPS = 3  # the world's operations, its watchdog, and the checks' own


def invite(ranks: Sequence[subprocess.Popen[str]]) -> _native.Segment | None:
    """Send the ranks what they need to connect; return their memory, to be kept while they run."""
    size = len(ranks)
    pids = [rank.pid for rank in ranks]
    segment = None
    where: tuple[int, int, int] | None = None
    if size > 1:
        segment = _native.Segment.create(N_GROUPS * _native.ShmGroup.memory_bytes(size))
        where = os.getpid(), segment.fd, segment.token
    for number, rank in enumerate(ranks):
        assert rank.stdin is not None
        rank.stdin.write(json.dumps({"rank": number, "pids": pids, "where": where}) + "\n")
        rank.stdin.close()
    return segment


def join() -> tuple[Any, Group]:
    """Return this process's world, and a group of the same ranks beside it, over host memory."""
    told = json.loads(sys.stdin.readline())
    rank, pids = told["rank"], told["pids"]
    size = len(pids)
    if size == 1:
        world = session.init()
        assert world.device.kind == "cuda", world
        return world, world.group
    owner, descriptor, token = told["where"]
    group_bytes = _native.ShmGroup.memory_bytes(size)
    segment = _native.Segment.open(owner, descriptor, N_GROUPS * group_bytes, token)
    names = [f"rank {r} (pid {pid})" for r, pid in enumerate(pids)]
    transports = [
        ShmTransport(_native.ShmGroup(segment, i * group_bytes, rank, size, pids, names))
        for i in range(N_GROUPS)
    ]
    world = context.World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        cross_rank=0,
        cross_size=1,
        device=context.Device("cuda", rank % len(_native.gpus()[1])),
        homogeneous=True,
        thread_multiple=True,
        group=Group(*transports[:2]),
    )
    made = session.Session(
        settings=Settings.read({}, os.environ),
        given_comm=None,
        world=world,
        comm=None,
        host_of_rank=[0] * size,
        restore_threads=lambda: None,
        messages=Messages(Pipes(), transports[0], ""),  # no messages are sent here
        subgroups=[],
        began=time.monotonic(),
    )
    session._session = made
    context.enter(made.world, made.messages, made.subgroups)
    devices.make_current(world.device.index)
    atexit.register(session._at_exit)
    return world, Group(transports[2])


def use_nccl_alone(world: Any) -> None:
    """Make a world of one, which does not need NCCL, use it for its GPU's exchanges anyway."""
    from horo_lite.training.plan import DEFAULT_BUCKET_BYTES
    from horo_lite.transports.nccl_library import nccl_candidates

    _native.nccl_library(nccl_candidates())
    for asynchronous in (False, True):
        stream = world.group.stream(world.device.index, asynchronous)
        assert isinstance(stream, CommunicationStream)
        meeting = _native.nccl_unique_id()
        nccl = _native.NcclGroup(stream.queue, meeting, 0, 1, DEFAULT_BUCKET_BYTES, 60.0)
        nccl.register_bucket(windows=nccl.can_use_windows)
        staged = StagedTransport(stream.host, stream.queue, DEFAULT_BUCKET_BYTES)
        stream._transport = NcclTransport(stream.host, nccl, staged)
