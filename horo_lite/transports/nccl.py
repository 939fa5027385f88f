"""GPUs of the ranks' own, with NCCL between them: see csrc/nccl_group.cpp."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from horo_lite import _native, launcher
from horo_lite.agreement import agree, exchange_bytes, told
from horo_lite.errors import DeviceError
from horo_lite.plan import DEFAULT_BUCKET_BYTES
from horo_lite.transports import Header, Transport
from horo_lite.transports.nccl_library import nccl_candidates
from horo_lite.transports.staged import StagedTransport

if TYPE_CHECKING:
    from horo_lite.transports.watch import Watch

# Each operation of NCCL costs the host tens of microseconds, and the GPU has the memory.
BUCKET_BYTES = 128 * 2**20

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

    def only_queues(
        self,
        tensors: _native.Tensors,
        op: str,
        prescale: float,
        scale: float,
        weight: float | None,
    ) -> bool:
        """Whether `reduce` does no more than that. Else the ranks must have agreed on it before."""
        divisor = self._divisor(op, weight)
        return self.group.can_reduce(tensors, op, prescale, scale, divisor)

    def _divisor(self, op: str, weight: float | None) -> float:
        return float(self.size) if op == "average" and weight is None else 1.0

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
        average, divisor = op == "average", self._divisor(op, weight)
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

    def leave(self, reason: str) -> None:
        self.host.leave(reason)

    def silent(self) -> list[int]:
        return self.host.silent()

    def first_to_tell(self) -> bool:
        return self.host.first_to_tell()

    def close(self) -> None:
        pass


class Lane:
    """How one rank's GPU takes part in a group: a stream, and a transport found at first use."""

    def __init__(self, host: Transport, index: int, allowed: bool) -> None:
        self.index = index
        self.queue = _native.DeviceQueue(index)
        self.host = host
        self.watch: Watch | None = None
        self._allowed = allowed
        self._transport: NcclTransport | StagedTransport | None = None

    @property
    def found(self) -> NcclTransport | StagedTransport | None:
        """The transport, if there is one yet."""
        return self._transport

    def transport(self) -> NcclTransport | StagedTransport:
        """Collective at the first call, and at the first after `reset`."""
        found = self._transport  # other threads may reset it
        if found is None:
            self._transport = found = connect(self.host, self.queue, self._allowed)
            if self.watch is not None and isinstance(found, NcclTransport):
                self.watch.start()
        return found

    def transport_of_all(self) -> NcclTransport | StagedTransport:
        """The same where ranks may have reset theirs at different times; collective every time."""
        label = "arrays on a GPU"
        found = self._transport
        headers = self.host.agree(0, found is not None and not self.failure(), label=label)
        if found is None or not all(header.count for header in headers):
            self.fail("the ranks connect their GPUs anew")
            self.reset()
            found = self.transport()
            self.host.agree(0, label=label)  # what passes through the host begins with one
        return found

    def fail(self, reason: str) -> None:
        """What waits on the GPU ends. For any thread."""
        found = self._transport
        if isinstance(found, NcclTransport):
            found.group.fail(reason)

    def failure(self) -> str:
        """What NCCL has failed with, or what was given to `fail`. For any thread."""
        found = self._transport
        if isinstance(found, NcclTransport):
            try:
                found.group.check()
            except DeviceError as error:
                return str(error)
        return ""

    def reset(self) -> None:
        """The ranks connect anew at the next use."""
        self._transport = None

    def close(self) -> None:
        """All ranks leave; not when nobody refers to it any more, which may be at any time."""
        found = self._transport
        if isinstance(found, NcclTransport):
            found.group.close()
        self.reset()


def connect(
    host: Transport, queue: _native.DeviceQueue, allowed: bool
) -> NcclTransport | StagedTransport:
    """NCCL, if every rank has it and a GPU of its own; else pinned memory, and rank 0 says why.

    Collective. DeviceError on every rank, with all ranks' reasons, if NCCL is there but fails.
    """
    given = int(_variable("HORO_LITE_BUCKET_BYTES", 0))
    bucket_bytes = given or BUCKET_BYTES
    timeout_s = _variable("HORO_LITE_NCCL_TIMEOUT_S", 120)
    registers = os.environ.get("HORO_LITE_NCCL_REGISTER", "1") != "0"
    staged = StagedTransport(host, queue, given or DEFAULT_BUCKET_BYTES)
    if host.size == 1:
        return staged
    mine = _credentials(queue.index, allowed, host.rank == 0)
    label = "the first call with arrays on a GPU"
    # Other buckets here than there would let the GPUs wait for ever.
    alike = f"{label}\nHORO_LITE_BUCKET_BYTES {given or 'not set'}, register {registers}"
    headers = agree(host, label, alike, lambda: alike, count=len(pickle.dumps(mine)))
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
    group = _connect(host, queue, everyone[0]["meeting"], bucket_bytes, timeout_s)
    if registers:
        headers = host.agree(0, int(group.can_use_windows), label=label)
        problem = ""
        try:
            group.register_bucket(windows=all(header.count for header in headers))
        except DeviceError as error:
            problem = str(error)
        if any(told(host, problem)):  # then the communicator is of no more use
            group.fail("the bucket could not be registered")
            meeting = _native.nccl_unique_id().hex() if host.rank == 0 else ""
            group = _connect(
                host, queue, bytes.fromhex(told(host, meeting)[0]), bucket_bytes, timeout_s
            )
    return NcclTransport(host, group, staged)


def _connect(
    host: Transport,
    queue: _native.DeviceQueue,
    meeting: bytes,
    bucket_bytes: int,
    timeout_s: float,
) -> _native.NcclGroup:
    """All ranks are in it; DeviceError on every rank, with all ranks' reasons, if one is not."""
    group, problem = None, ""
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
            + "; ".join(f"rank {host.ranks[r]}: {text}" for r, text in enumerate(problems) if text)
        )
    assert group is not None
    return group


def _variable(name: str, default: float) -> float:
    text = os.environ.get(name) or str(default)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}, which is no number") from None


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
