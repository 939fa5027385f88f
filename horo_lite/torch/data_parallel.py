"""PyTorch's own DistributedDataParallel on the ranks of `init()`."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from horo_lite.context import world


def DistributedDataParallel(  # noqa: N802 (replaces a class of this name)
    module: torch.nn.Module, **options: Any
) -> TorchDistributedDataParallel:
    """Wrap a model in host memory in PyTorch's DistributedDataParallel, on the ranks of `init()`.

    Every rank calls it, with a model of the same parameters. If torch.distributed has no process
    group yet, one with the backend "horo_lite" is made, which
    `torch.distributed.destroy_process_group()` ends. To average in memory that the ranks of a host
    share, register `horo_lite.torch.ddp_hooks.average_in_place`.

    Args:
        module: The model. Its parameters and buffers are broadcast from rank 0.
        **options: Those of PyTorch's class; gradient_as_bucket_view is True by default.

    Returns:
        PyTorch's wrapper, with `.module`, `no_sync()` and `join()`.

    Raises:
        NotInitializedError: Call `init()` first.
        TypeError: `module` is not a torch.nn.Module.
    """
    world()
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"DistributedDataParallel wraps a module, not {type(module).__name__}")
    if not dist.is_initialized():
        dist.init_process_group("horo_lite", init_method="horo-lite://")
    return TorchDistributedDataParallel(module, **{"gradient_as_bucket_view": True, **options})
