"""GPU memory without NCCL: through pinned host memory, and the host's transport from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from horo_lite import _native
from horo_lite.transports.gpu import GpuTransport
from horo_lite.transports.interface import Division, Reduction, Transport
from horo_lite.transports.solo import is_identity

DEFAULT_STAGE_BYTES = 25 * 2**20


class StagedTransport(GpuTransport):
    """Uses any transport for tensors on a GPU. Waits for the GPU twice per call.

    A world of size 1 moves nothing, and so does not wait. Reductions need `stage_bytes` of pinned
    memory, or the size of the largest tensor; other operations need as much as they move.
    """

    name = "staged"

    def __init__(self, host: Transport, queue: _native.DeviceQueue, stage_bytes: int) -> None:
        super().__init__(host)
        self._queue = queue
        self._stage_bytes = stage_bytes
        self._staging = _native.Staging(queue)

    def allreduce(
        self, tensors: _native.Tensors, reduction: Reduction, division: Division = ()
    ) -> None:
        if self.size == 1 and is_identity(reduction):
            return
        results = tensors.elements(division[self.rank]) if division else tensors
        for part, host in self._parts(tensors):
            here = [ranges[part.start : part.stop] for ranges in division]
            self.host.allreduce(host, reduction, here)
            received = host.elements(here[self.rank]) if here else host
            self._staging.upload(received, results, part.start)

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        for part, host in self._parts(tensors) if self.size > 1 else ():
            self.host.broadcast(host, root)
            if self.rank != root:
                self._staging.upload(host, tensors, part.start)

    def _parts(self, tensors: _native.Tensors) -> Iterator[tuple[range, _native.Tensors]]:
        """Yield runs of tensors that fit the stage, in pinned memory; agree on each of them."""
        sizes = [n_bytes for _, n_bytes in tensors.buffers()]
        first = filled = 0
        parts = []
        for i, size in enumerate(sizes):
            if i > first and filled + size > self._stage_bytes:
                parts.append(range(first, i))
                first, filled = i, 0
            filled += size
        parts.append(range(first, len(sizes)))
        for part in parts:
            if part.start:  # operations begin with agree(); the caller has begun the first one
                self.host.agree(0, label="another part of an exchange")
            yield part, self._staging.download(tensors, part.start, part.stop)

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        if self.size == 1:
            return
        stages, hosts = self._stage([send, *receive])
        self.host.allgather(hosts[0], hosts[1:])
        for r, into in enumerate(receive):
            if r != self.rank:
                stages[1 + r].upload(hosts[1 + r], into, 0)

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        if self.size == 1:
            return
        _, outgoing = self._stage(send)
        stages, incoming = self._stage(receive)
        self.host.alltoall(outgoing, incoming, n_bytes)
        for r, into in enumerate(receive):
            if r != self.rank:
                stages[r].upload(incoming[r], into, 0)

    def _stage(
        self, tensors: Sequence[_native.Tensors]
    ) -> tuple[list[_native.Staging], list[_native.Tensors]]:
        stages = [_native.Staging(self._queue) for _ in tensors]
        pairs = zip(stages, tensors, strict=True)
        return stages, [stage.download(one, 0, len(one)) for stage, one in pairs]
