"""Communication hooks for torch's DistributedDataParallel on the backend "horo_lite".

model = DistributedDataParallel(model)
model.register_comm_hook(None, horo_lite.torch.ddp_hooks.fp16_compress)
"""

# DDP looks at the annotations of a hook, and wants to find types, not strings.
from typing import Any

import torch
from torch import distributed as dist

from horo_lite.collectives.compression import Compression, Compressor
from horo_lite.torch.distributed.process_group import ProcessGroup

__all__ = ["bf16_compress", "fp16_compress"]


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


def _averaged(state: Any, bucket: Any, compression: Compressor) -> Any:
    group = dist.group.WORLD if state is None else state
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"this hook needs a process group of the backend horo_lite, not {group!r}: call "
            'init_process_group("horo_lite"), and register the hook with state=None or that group'
        )
    work = group.average(bucket.buffer(), compression)
    return work.get_future().then(lambda future: future.value()[0])
