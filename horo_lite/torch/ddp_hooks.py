"""Communication hooks for torch's DistributedDataParallel on the backend "horo_lite".

model = DistributedDataParallel(model, gradient_as_bucket_view=True)
model.register_comm_hook(None, horo_lite.torch.ddp_hooks.fp16_compress)
"""

# `average_in_place` turns DDP's own buckets into segments: torch moves their storages to files in
# memory, as it does to share tensors, and each rank maps the files a second time, since a forked
# child shares torch's mapping.

# DDP checks the annotations of a hook, which must be types, not strings.
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.shared_memory import share
from horo_lite.errors import warn
from horo_lite.torch.bucket_views import can_share
from horo_lite.torch.distributed.process_group import ProcessGroup
from horo_lite.transports.shm import SharedMemory

__all__ = ["average_in_place", "bf16_compress", "fp16_compress"]

_SHARED_BUCKETS = "DDP's buckets in shared memory"  # in Group.kept


def fp16_compress(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients, sent as float16 with a power-of-two scale for each block.

    Unlike with torch's `fp16_compress_hook`, gradients of 1e-7 and of 1e6 are both preserved, and
    sums are computed in float32: compression itself never causes overflow or underflow.

    Args:
        state: The process group; None for the default one.
        bucket: The gradients, from DDP.

    Returns:
        A future of the averages, for DDP.

    Raises:
        TypeError: The process group's backend is not horo_lite.
    """
    return _averaged(state, bucket, Compression.fp16)


def bf16_compress(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients, sent as bfloat16. See `fp16_compress`."""
    return _averaged(state, bucket, Compression.bf16)


def average_in_place(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in place, in memory shared by all ranks of the host.

    From the third step on, DDP's buckets are in shared memory (in /dev/shm, as torch shares
    tensors), and are exchanged without copies. With gradient_as_bucket_view=True they are also the
    gradients. The bits are those of `all_reduce` with ReduceOp.AVG. Ranks on several hosts, and
    those that cannot access each other's memory, exchange as without the hook.

    Args:
        state: The process group; None for the default one.
        bucket: The gradients, from DDP.

    Returns:
        A future of the averages, for DDP.

    Raises:
        TypeError: The process group's backend is not horo_lite.
    """
    group, buffer = _checked(state), bucket.buffer()
    known = _shared_buckets(group.group).of(bucket)
    if known.memory is None:
        return group.average(buffer).get_future().then(lambda future: future.value()[0])
    there = known.there
    if buffer.untyped_storage()._cdata == known.storage._cdata:
        work = group.average(there, shared=known.memory)
        return work.get_future().then(lambda _: buffer)

    # A rank that has joined (`DistributedDataParallel.join`) sends zeros from other memory. Like
    # the other ranks' buckets, they must be in shared memory, which still has its own gradients.
    own = there.clone()
    there.copy_(buffer)

    def restore(_: Any) -> torch.Tensor:
        buffer.copy_(there)
        there.copy_(own)
        return buffer

    return group.average(there, shared=known.memory).get_future().then(restore)


@dataclass
class _Bucket:
    dtype: torch.dtype
    n_elements: int
    is_arranged: bool = False  # DDP will not rearrange it any more
    memory: SharedMemory | None = None
    storage: Any = None  # DDP's, in that memory: kept, so that no other can get its address
    there: Any = None  # the bucket, as a tensor in `memory`


class _SharedBuckets:
    """The buckets of a group's models, by first parameter: DDP's numbers may be ambiguous."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)  # the group keeps this object
        self._can_share = can_share(group)
        self._buckets: dict[int, _Bucket] = {}

    def of(self, bucket: dist.GradBucket) -> _Bucket:
        """Return the record of a bucket. Collective: all ranks call it for the same buckets."""
        buffer, first = bucket.buffer(), bucket.parameters()[0]
        known = self._buckets.get(id(first))
        kind = buffer.dtype, buffer.numel()
        if known is None or (known.dtype, known.n_elements) != kind:
            if known is None:
                weakref.finalize(first, _forget, weakref.ref(self), id(first))
            # DDP rebuilds its buckets after the first step: wait for the next one.
            known = self._buckets[id(first)] = _Bucket(*kind)
        elif not known.is_arranged and self._can_share and buffer.layout is torch.strided:
            known.is_arranged = True
            self._share(known, buffer)
        return known

    def forget(self, key: int) -> None:
        """Remove the bucket of a parameter that no longer exists, given its id."""
        self._buckets.pop(key, None)

    def _share(self, bucket: _Bucket, buffer: torch.Tensor) -> None:
        """Move the bucket to shared memory, where it stays. Collective."""
        group = self._group()
        assert group is not None
        memory = _moved_to_shared_memory(buffer)
        if share(group, memory):
            assert memory is not None
            bucket.memory, bucket.storage = memory, buffer.untyped_storage()
            bucket.there = torch.from_numpy(memory.array(0, buffer.nbytes)).view(buffer.dtype)
            return
        self._can_share = False  # on all ranks
        if group.rank == 0:
            warn(
                "average_in_place: the ranks cannot access each other's memory, or a rank could "
                "not allocate any (/dev/shm may be too small): buckets are averaged as without "
                "the hook"
            )


def _forget(buckets: weakref.ref[_SharedBuckets], key: int) -> None:
    known = buckets()  # deleted with its group; a parameter may exist for longer
    if known is not None:
        known.forget(key)


def _shared_buckets(group: Group) -> _SharedBuckets:
    kept: _SharedBuckets | None = group.kept.get(_SHARED_BUCKETS)
    if kept is None:
        kept = group.kept[_SHARED_BUCKETS] = _SharedBuckets(group)
    return kept


def _moved_to_shared_memory(buffer: torch.Tensor) -> SharedMemory | None:
    """Move a tensor's storage to shared memory, and return that; None if impossible."""
    if buffer.device.type != "cpu":
        return None
    storage = buffer.untyped_storage()
    if not buffer.is_contiguous() or buffer.storage_offset() or storage.nbytes() != buffer.nbytes:
        return None
    try:
        descriptor, n_bytes = storage._share_fd_cpu_()
        return SharedMemory(n_bytes, of=descriptor)
    except (OSError, RuntimeError):  # torch raises the latter if memory is short
        return None


def _averaged(state: Any, bucket: Any, compression: Compressor) -> Any:
    work = _checked(state).average(bucket.buffer(), compression)
    return work.get_future().then(lambda future: future.value()[0])


def _checked(group: Any) -> ProcessGroup:
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"this hook needs a process group of the backend horo_lite, not {group!r}: call "
            'init_process_group("horo_lite"), and register the hook with that group, or None'
        )
    return group
