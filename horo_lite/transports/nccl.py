"""NCCL between the ranks, each with its own GPU: see csrc/gpu/nccl_group.cpp."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from horo_lite import _native, settings
from horo_lite.arguments import QUANTIZED
from horo_lite.errors import DeviceError, MismatchError, warn
from horo_lite.transports.agreement import allgather_objects, allgather_texts, explain
from horo_lite.transports.gpu import GpuTransport
from horo_lite.transports.interface import (
    Division,
    QueuedReductions,
    Reduction,
    Transport,
    parts_of,
)
from horo_lite.transports.nccl_library import nccl_candidates
from horo_lite.transports.peers import host_key
from horo_lite.transports.staged import DEFAULT_STAGE_BYTES, StagedTransport

# Each operation of NCCL costs the host tens of microseconds, and the GPU has the memory.
BUCKET_BYTES = 128 * 2**20

# NCCL's text for ncclInvalidUsage, such as several ranks on one GPU, which it may tell apart in
# other ways than we do.
_REFUSED = "invalid usage"

# NCCL's own variables with which its communicators would not be as they are asked for.
_SPOILING = {
    "NCCL_COMM_BLOCKING": "whose calls would then not return if another rank is missing",
    "NCCL_COMM_ID": "all of whose communicators would then meet at one address, and mix up",
}

_warned: set[str] = set()  # the reasons for slow exchanges that have been reported


class NcclTransport(GpuTransport):
    """A transport for tensors on a GPU. Calls return when the work is queued.

    The caller must ensure that all ranks queue the same: `agree` waits for the other ranks'
    programs, so a `Watchdog` compares reductions, which are on a step's critical path.
    """

    name = "nccl"

    def __init__(self, host: Transport, group: _native.NcclGroup, staged: StagedTransport) -> None:
        super().__init__(host)
        self.group = group
        self._staged = staged

    @property
    def queued(self) -> QueuedReductions:
        return self

    def can_reduce(
        self, tensors: _native.Tensors, reduction: Reduction, weight: float | None
    ) -> bool:
        op, _, prescale, scale, _, _ = reduction
        return self.group.can_reduce(tensors, op, prescale, scale, self._divisor(op, weight))

    def _divisor(self, op: str, weight: float | None) -> float:
        return float(self.size) if op == "average" and weight is None else 1.0

    def reduce(
        self,
        tensors: _native.Tensors,
        reduction: Reduction,
        weight: float | None,
        division: Division = (),
    ) -> None:
        op, wire, prescale, scale, _, _ = reduction
        self._check_wire(wire)
        divisor = self._divisor(op, weight)
        parts = parts_of(tensors, division)
        self.group.reduce(parts, op, wire, prescale, scale, divisor, weight)

    def allreduce(
        self, tensors: _native.Tensors, reduction: Reduction, division: Division = ()
    ) -> None:
        op, wire, prescale, scale, divisor, weights = reduction
        if self.group.can_reduce(tensors, op, prescale, scale, divisor):  # the same on all ranks
            self._check_wire(wire)
            parts, weight = parts_of(tensors, division), weights[self.rank] if weights else None
            self.group.reduce(parts, op, wire, prescale, scale, divisor, weight)
        else:
            self.host.agree(0, label="a reduction without NCCL")
            self._staged.allreduce(tensors, reduction, division)

    def _check_wire(self, wire: str) -> None:
        if self.rank == 0 and wire in QUANTIZED and wire not in _warned:
            _warned.add(wire)
            warn(
                f"compression {wire} has no effect between GPUs with NCCL, where everything "
                "travels as it is: fp16 halves the bytes there"
            )

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        nothing = _native.Tensors([])
        self.group.broadcast([tensors if r == root else nothing for r in range(self.size)])

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        self.group.broadcast([send if r == self.rank else x for r, x in enumerate(receive)])

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        self.group.alltoall(list(send), list(receive))

    def fail(self, reason: str) -> None:
        self.group.fail(reason)

    def failure(self) -> str:
        try:
            self.group.check()
        except DeviceError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self.group.close()


def connect(host: Transport, queue: _native.DeviceQueue, allowed: bool) -> GpuTransport:
    """Connect by NCCL if every rank has it and its own GPU; else by pinned memory, with a warning.

    Collective. Raise DeviceError on every rank, with all ranks' reasons, if NCCL fails.
    """
    given = settings.bucket_bytes()
    bucket_bytes = given or BUCKET_BYTES
    timeout_s = settings.nccl_timeout_s()
    registers = settings.registers_with_nccl()
    staged = StagedTransport(host, queue, given or DEFAULT_STAGE_BYTES)
    if host.size == 1:
        return staged
    label = "the first call with arrays on a GPU"
    chosen = f"HORO_LITE_BUCKET_BYTES {given or 'not set'}, register {registers}"
    mine = _endpoint(queue.index, allowed, host.rank == 0)._replace(settings=chosen)
    everyone: list[_Endpoint] = allgather_objects(host, mine)
    by_rank = [f"{label}\n{each.settings}" for each in everyone]
    if len(set(by_rank)) > 1:  # with different bucket sizes, the GPUs would wait forever
        raise MismatchError(explain(label, by_rank, host.ranks))
    obstacle = _obstacle(everyone)
    group = None
    if not obstacle:
        group, obstacle = _connect(host, queue, everyone[0].unique_id, bucket_bytes, timeout_s)
    if group is None:
        if host.rank == 0 and obstacle not in _warned:
            _warned.add(obstacle)
            warn(f"GPU arrays go through the host's memory, which is slow: {obstacle}")
        return staged
    if registers:
        headers = host.agree(0, int(group.can_use_windows), label=label)
        problem = ""
        try:
            group.register_bucket(windows=all(header.count for header in headers))
        except DeviceError as error:
            problem = str(error)
        if any(allgather_texts(host, problem)):  # the communicator can no longer be used
            group.fail("the bucket could not be registered")
            unique_id = _native.nccl_unique_id() if host.rank == 0 else b""
            unique_id = allgather_objects(host, unique_id)[0]
            group, obstacle = _connect(host, queue, unique_id, bucket_bytes, timeout_s)
            if group is None:
                raise DeviceError(f"the GPUs could not be connected again. {obstacle}")
    return NcclTransport(host, group, staged)


def _connect(
    host: Transport,
    queue: _native.DeviceQueue,
    unique_id: bytes,
    bucket_bytes: int,
    timeout_s: float,
) -> tuple[_native.NcclGroup | None, str]:
    """Create a communicator of all ranks.

    None, and NCCL's reason, if it cannot be used with these GPUs. If it fails on a rank, all raise
    DeviceError with reasons.
    """
    group, problem = None, ""
    try:
        group = _native.NcclGroup(queue, unique_id, host.rank, host.size, bucket_bytes, timeout_s)
    except DeviceError as error:
        problem = str(error)
    problems = allgather_texts(host, problem)
    if any(problems):
        if group is not None:
            group.fail("another rank could not connect its GPU")
        each = [f"rank {host.ranks[r]}: {text}" for r, text in enumerate(problems) if text]
        if all(_REFUSED in text for text in each):
            return None, "; ".join(each)
        raise DeviceError("the GPUs could not be connected. " + "; ".join(each))
    assert group is not None
    return group, ""


class _Endpoint(NamedTuple):
    """The properties of one rank's GPU and NCCL that the others need to know."""

    host: tuple[str, ...]
    gpu_index: int
    gpu: str
    may_share: bool
    path: str = ""
    version: int = 0
    unique_id: bytes = b""  # rank 0's
    problem: str = ""
    settings: str = ""  # which must be the same on all ranks


def _endpoint(index: int, allowed: bool, leads: bool) -> _Endpoint:
    gpu = _native.gpus()[1][index]
    mine = _Endpoint(host_key(), index, gpu, settings.shares_gpus_with_nccl())
    if not allowed:
        return mine._replace(problem="the device given to init() is the CPU")
    for name, why in _SPOILING.items():
        value = os.environ.get(name, "")
        if value and (name, value) != ("NCCL_COMM_BLOCKING", "0"):  # 0 is what is asked for
            problem = f"{name}={value} is set for NCCL, {why}: unset it"
            return mine._replace(problem=problem)
    try:
        path, version = _native.nccl_library(nccl_candidates())
        unique_id = _native.nccl_unique_id() if leads else b""
    except DeviceError as error:
        return mine._replace(problem=str(error))
    return mine._replace(path=path, version=version, unique_id=unique_id)


def _obstacle(everyone: Sequence[_Endpoint]) -> str:
    """Return why NCCL cannot be used, as text, or ""; the same on every rank."""
    for rank, each in enumerate(everyone):
        if each.problem:
            return f"on rank {rank}, {each.problem}"
    versions = [each.version for each in everyone]
    for rank, each in enumerate(everyone):
        if each.version != versions[0]:
            return (
                f"NCCL is {versions[0]} on rank 0 ({everyone[0].path}) and {each.version} on "
                f"rank {rank} ({each.path}): install one version everywhere"
            )
    first_with: dict[Any, int] = {}
    for rank, each in enumerate(everyone):
        other = first_with.setdefault((each.host, each.gpu), rank)
        if other != rank and not each.may_share:
            return (
                f"ranks {other} and {rank} of {each.host[0]} use the same GPU (cuda:"
                f"{each.gpu_index} on rank {rank}), and NCCL needs one each: start fewer ranks, or "
                "put each rank's arrays on its own GPU (torch.cuda.set_device(world.device.index), "
                "cupy.cuda.Device(world.device.index).use())"
            )
    return ""
