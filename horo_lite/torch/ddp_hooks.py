"""Communication hooks for torch's DistributedDataParallel on the backend "horo_lite".

model = DistributedDataParallel(model, gradient_as_bucket_view=True)
model.register_comm_hook(None, horo_lite.torch.ddp_hooks.fp16_compress)
"""

# DDP looks at the annotations of a hook, and wants to find types, not strings.
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.collectives.shared_memory import share
from horo_lite.torch.bucket_views import can_share
from horo_lite.torch.distributed.process_group import ProcessGroup
from horo_lite.transports.shm import SharedMemory

__all__ = ["SharedBuckets", "average_in_place", "bf16_compress", "fp16_compress"]

# DDP arranges its buckets anew after the first step.
_SHARED_FROM_STEP = 3


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


class SharedBuckets:
    """A model's buckets in memory that the ranks of the host see; for `average_in_place`.

    Each model needs its own.

    Args:
        process_group: The process group of the model; None for the default one.

    Raises:
        TypeError: The process group's backend is not horo_lite.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = _checked(process_group)
        self._can_share = can_share(self.process_group.group)
        self._buckets: dict[int, _Bucket] = {}

    def of(self, bucket: dist.GradBucket) -> "_Bucket":
        """Return what is known of a bucket. Collective: ranks call it for the same ones."""
        buffer, index = bucket.buffer(), bucket.index()
        known = self._buckets.get(index)
        if known is None or known.n_bytes != buffer.nbytes:
            known = self._buckets[index] = _Bucket(buffer.nbytes)
        known.n_steps += 1
        if known.n_steps == _SHARED_FROM_STEP and self._can_share:
            self._share(known, buffer)
        return known

    def _share(self, bucket: "_Bucket", buffer: torch.Tensor) -> None:
        """Move the bucket to memory that all see, where it is from then on. Collective."""
        memory = _moved_to_shared_memory(buffer)
        if share(self.process_group.group, memory):
            assert memory is not None
            bucket.memory, bucket.storage = memory, buffer.untyped_storage()
            bucket.there = torch.from_numpy(memory.array(0, buffer.nbytes)).view(buffer.dtype)
            return
        self._can_share = False  # on all ranks alike
        if self.process_group.rank() == 0:
            warnings.warn(
                "horo_lite: average_in_place: the ranks cannot see each other's memory, or a rank "
                "got none (/dev/shm may be too small): buckets are averaged as without the hook",
                stacklevel=2,
            )


def average_in_place(
    state: SharedBuckets, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients where they lie, in memory that all ranks of the host see.

    From the third step on, DDP's buckets lie in shared memory (as torch shares tensors, in
    /dev/shm), and nothing is copied to exchange them. With gradient_as_bucket_view=True they are
    the gradients, too. The bits are those of `all_reduce` with ReduceOp.AVG. Ranks of several
    hosts, and those that cannot see each other's memory, exchange as without the hook.

    Args:
        state: `SharedBuckets()`, of this model alone.
        bucket: The gradients, from DDP.

    Returns:
        A future of the averages, for DDP.
    """
    buffer, known = bucket.buffer(), state.of(bucket)
    group = state.process_group
    if known.memory is None:
        return group.average(buffer).get_future().then(lambda future: future.value()[0])
    there = known.there
    # A rank that has joined (`DistributedDataParallel.join`) sends zeros that lie elsewhere.
    is_there = buffer.untyped_storage()._cdata == known.storage._cdata
    if not is_there:
        there.copy_(buffer)
    work = group.average(there, shared=known.memory)
    return work.get_future().then(lambda _: buffer if is_there else buffer.copy_(there))


@dataclass
class _Bucket:
    n_bytes: int
    n_steps: int = 0
    memory: SharedMemory | None = None
    storage: Any = None  # DDP's, in that memory: kept, so that no other can take its place
    there: Any = None  # the bucket, as this package sees it


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
