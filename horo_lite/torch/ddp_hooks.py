"""Communication hooks for torch's DistributedDataParallel on the backend "horo_lite".

model = DistributedDataParallel(model, gradient_as_bucket_view=True)
model.register_comm_hook(None, horo_lite.torch.ddp_hooks.fp16_compress)
"""

# DDP looks at the annotations of a hook, and wants to find types, not strings.
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
    """Average gradients that travel as float16 with a power-of-two scale for each block.

    Unlike in torch's `fp16_compress_hook`, gradients of 1e-7 and of 1e6 both survive, and sums are
    taken in float32: compression itself never causes overflow or underflow.

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
    """Average gradients that travel as bfloat16. See `fp16_compress`."""
    return _averaged(state, bucket, Compression.bf16)


def average_in_place(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients where they lie, in memory that all ranks of the host see.

    From the third step on, DDP's buckets lie in shared memory (as torch shares tensors, in
    /dev/shm), and nothing is copied to exchange them. With gradient_as_bucket_view=True they are
    the gradients, too. The bits are those of `all_reduce` with ReduceOp.AVG. Ranks of several
    hosts, and those that cannot see each other's memory, exchange as without the hook.

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

    # A rank that has joined (`DistributedDataParallel.join`) sends zeros that lie elsewhere. The
    # others' lie in shared memory, and so must these; its own gradients are still there.
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
    is_arranged: bool = False  # as it will be from now on
    memory: SharedMemory | None = None
    storage: Any = None  # DDP's, in that memory: kept, so that no other can take its place
    there: Any = None  # the bucket, as this package sees it


class _SharedBuckets:
    """The buckets of a group's models, by their first parameter: DDP may number two alike."""

    def __init__(self, group: Group) -> None:
        self._group = weakref.ref(group)  # which keeps this
        self._can_share = can_share(group)
        self._buckets: dict[int, _Bucket] = {}

    def of(self, bucket: dist.GradBucket) -> _Bucket:
        """Return what is known of a bucket. Collective: ranks call it for the same ones."""
        buffer, first = bucket.buffer(), bucket.parameters()[0]
        known = self._buckets.get(id(first))
        kind = buffer.dtype, buffer.numel()
        if known is None or (known.dtype, known.n_elements) != kind:
            if known is None:
                weakref.finalize(first, _forget, weakref.ref(self), id(first))
            # DDP arranges parameters anew after the first step: wait for the next.
            known = self._buckets[id(first)] = _Bucket(*kind)
        elif not known.is_arranged and self._can_share:
            known.is_arranged = True
            self._share(known, buffer)
        return known

    def forget(self, key: int) -> None:
        """The parameter with that id is gone, and its bucket with it."""
        self._buckets.pop(key, None)

    def _share(self, bucket: _Bucket, buffer: torch.Tensor) -> None:
        """Move the bucket to memory that all see, where it is from then on. Collective."""
        group = self._group()
        assert group is not None
        memory = _moved_to_shared_memory(buffer)
        if share(group, memory):
            assert memory is not None
            bucket.memory, bucket.storage = memory, buffer.untyped_storage()
            bucket.there = torch.from_numpy(memory.array(0, buffer.nbytes)).view(buffer.dtype)
            return
        self._can_share = False  # on all ranks alike
        if group.rank == 0:
            warn(
                "average_in_place: the ranks cannot see each other's memory, or a rank "
                "got none (/dev/shm may be too small): buckets are averaged as without the hook"
            )


def _forget(buckets: weakref.ref[_SharedBuckets], key: int) -> None:
    known = buckets()  # gone with its group: a parameter may be there for longer
    if known is not None:
        known.forget(key)


def _shared_buckets(group: Group) -> _SharedBuckets:
    kept: _SharedBuckets | None = group.kept.get(_SHARED_BUCKETS)
    if kept is None:
        kept = group.kept[_SHARED_BUCKETS] = _SharedBuckets(group)
    return kept


def _moved_to_shared_memory(buffer: torch.Tensor) -> SharedMemory | None:
    """Return the memory to which a tensor's storage has been moved; None without such memory."""
    if buffer.layout is not torch.strided or buffer.device.type != "cpu":
        return None
    storage = buffer.untyped_storage()
    if not buffer.is_contiguous() or buffer.storage_offset() or storage.nbytes() != buffer.nbytes:
        return None
    try:
        descriptor, n_bytes = storage._share_fd_cpu_()
        return SharedMemory(n_bytes, of=descriptor)
    except (OSError, RuntimeError):  # torch says the latter where memory is short
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
