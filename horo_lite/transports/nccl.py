"""GPUs of the ranks' own, with NCCL between them: see csrc/nccl_group.cpp."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

from horo_lite import _native, launcher
from horo_lite.agreement import agree, exchange_bytes, told
from horo_lite.errors import DeviceError
from horo_lite.plan import DEFAULT_BUCKET_BYTES
from horo_lite.transports import Header, Transport
from horo_lite.transports.nccl_library import nccl_candidates
from horo_lite.transports.staged import StagedTransport

_told: set[str] = set()  # why it is slow, once for each reason


class NcclTransport:
    """A transport for tensors on a GPU. Calls return when the work is queued.

    Whether all ranks queue the same is for the caller to see to: `agree` waits for the other ranks'
    programs, so reductions, which are a step's path, are compared by a `Watch` instead.
    """

    name = "nccl"

    def __init__(self, host: Transport, group: _native.NcclGroup, staged: StagedTransport) -> None:
        self.rank = host.rank
        self.size = host.size
        self.ranks = host.ranks
        self.group = group
        self.host = host
        self._staged = staged

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        return self.host.agree(digest, count, weight, label=label)

    def reduce(
        self,
        tensors: _native.Tensors,
        *,
        op: str,
        wire: str,
        prescale: float,
        scale: float,
        weight: float | None,
    ) -> None:
        """As `allreduce`; with op average, divided by the sum of all ranks' weights or by size."""
        average = op == "average"
        divisor = float(self.size) if average and weight is None else 1.0
        if self.group.can_reduce(tensors, op, prescale, scale, divisor):
            self.group.allreduce(tensors, op, wire, prescale, scale, divisor, weight)
            return
        mine = 1.0 if weight is None else weight
        weights = [header.weight for header in self.host.agree(0, weight=mine, label="weights")]
        self._staged.allreduce(
            tensors,
            op=op,
            wire=wire,
            prescale=prescale * mine if average else prescale,
            scale=scale,
            divisor=sum(weights) or 1.0 if average else 1.0,
        )

    def allreduce(
        self,
        tensors: _native.Tensors,
        *,
        op: str,
        wire: str,
        prescale: float,
        scale: float,
        divisor: float,
    ) -> None:
        if self.group.can_reduce(tensors, op, prescale, scale, divisor):
            self.group.allreduce(tensors, op, wire, prescale, scale, divisor)
        else:
            self.host.agree(0, label="what NCCL cannot reduce")
            self._staged.allreduce(
                tensors, op=op, wire=wire, prescale=prescale, scale=scale, divisor=divisor
            )

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        self.group.broadcast(tensors, root)

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        self.group.allgather(send, list(receive))

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        self.group.alltoall(list(send), list(receive))

    def abandon(self, reason: str) -> None:
        self.host.abandon(reason)

    def leave(self) -> None:
        self.host.leave()

    def close(self) -> None:
        pass


class Lane:
    """How one rank's GPU takes part in a group: a stream, and a transport found at first use."""

    def __init__(self, host: Transport, index: int, allowed: bool) -> None:
        self.index = index
        self.queue = _native.DeviceQueue(index)
        self.host = host
        self._allowed = allowed
        self._transport: NcclTransport | StagedTransport | None = None

    @property
    def found(self) -> NcclTransport | StagedTransport | None:
        """The transport, if there is one yet."""
        return self._transport

    def transport(self) -> NcclTransport | StagedTransport:
        """Collective at the first call, and at the first after `reset`."""
        if self._transport is None:
            self._transport = connect(self.host, self.queue, self._allowed)
        return self._transport

    def fail(self, reason: str) -> None:
        """What waits on the GPU ends. For any thread."""
        if isinstance(self._transport, NcclTransport):
            self._transport.group.fail(reason)

    def poll(self) -> None:
        """Raises DeviceError if NCCL has failed."""
        if isinstance(self._transport, NcclTransport):
            self._transport.group.check()

    def reset(self) -> None:
        """The ranks connect anew at the next use."""
        self._transport = None


def connect(
    host: Transport, queue: _native.DeviceQueue, allowed: bool
) -> NcclTransport | StagedTransport:
    """NCCL, if every rank has it and a GPU of its own; else pinned memory, and rank 0 says why.

    Collective. DeviceError on every rank, with all ranks' reasons, if NCCL is there but fails.
    """
    bucket_bytes = int(os.environ.get("HORO_LITE_BUCKET_BYTES") or DEFAULT_BUCKET_BYTES)
    staged = StagedTransport(host, queue, bucket_bytes)
    if host.size == 1:
        return staged
    mine = _credentials(queue.index, allowed, host.rank == 0)
    label = "the first call with arrays on a GPU"
    headers = agree(host, label, label, lambda: label, count=len(pickle.dumps(mine)))
    sizes = [header.count for header in headers]
    everyone = [pickle.loads(one) for one in exchange_bytes(host, pickle.dumps(mine), sizes)]
    obstacle = _obstacle(everyone)
    if obstacle:
        if host.rank == 0 and obstacle not in _told:
            _told.add(obstacle)
            warnings.warn(
                f"horo_lite: GPU arrays go through the host's memory, which is slow: {obstacle}",
                RuntimeWarning,
                stacklevel=2,
            )
        return staged
    timeout_s = float(os.environ.get("HORO_LITE_NCCL_TIMEOUT_S") or 120)
    group, problem, meeting = None, "", everyone[0]["meeting"]
    try:
        group = _native.NcclGroup(queue, meeting, host.rank, host.size, bucket_bytes, timeout_s)
    except DeviceError as error:
        problem = str(error)
    problems = told(host, problem)
    if any(problems):
        if group is not None:
            group.fail("another rank could not connect its GPU")
        raise DeviceError(
            "the GPUs could not be connected. "
            + "; ".join(f"rank {r}: {text}" for r, text in enumerate(problems) if text)
        )
    assert group is not None
    if os.environ.get("HORO_LITE_NCCL_REGISTER", "1") != "0":
        headers = host.agree(0, int(group.can_use_windows), label=label)
        group.register_bucket(windows=all(header.count for header in headers))
    return NcclTransport(host, group, staged)


def _credentials(index: int, allowed: bool, leads: bool) -> dict[str, Any]:
    """What a rank tells the others of its GPU and its NCCL."""
    mine: dict[str, Any] = {"host": launcher.host_key(), "index": index, "problem": ""}
    mine["gpu"] = _native.gpus()[1][index]
    mine["alone"] = os.environ.get("HORO_LITE_NCCL_SHARED_GPU") == "1"
    if not allowed:
        mine["problem"] = "init() was told to use the CPU"
        return mine
    try:
        mine["path"], mine["version"] = _native.nccl_library(nccl_candidates())
        mine["meeting"] = _native.nccl_unique_id() if leads else b""
    except DeviceError as error:
        mine["problem"] = str(error)
    return mine


def _obstacle(everyone: Sequence[dict[str, Any]]) -> str:
    """Why NCCL cannot be used, in words; alike on every rank."""
    for rank, each in enumerate(everyone):
        if each["problem"]:
            return f"on rank {rank}, {each['problem']}"
    versions = [each["version"] for each in everyone]
    for rank, each in enumerate(everyone):
        if each["version"] != versions[0]:
            return (
                f"NCCL is {versions[0]} on rank 0 ({everyone[0]['path']}) and {each['version']} on "
                f"rank {rank} ({each['path']}): install one version everywhere"
            )
    first_with: dict[Any, int] = {}
    for rank, each in enumerate(everyone):
        other = first_with.setdefault((each["host"], each["gpu"]), rank)
        if other != rank and not each["alone"]:
            return (
                f"ranks {other} and {rank} of {each['host'][0]} use the same GPU (cuda:"
                f"{each['index']} on rank {rank}), and NCCL needs one each: start fewer ranks, or "
                "put each rank's arrays on its own GPU (torch.cuda.set_device(world.device.index), "
                "cupy.cuda.Device(world.device.index).use())"
            )
    return ""
