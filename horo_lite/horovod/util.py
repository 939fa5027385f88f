"""What scripts import from `horovod.common.util`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, TypeVar

from horo_lite.horovod.world import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = [
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "cuda_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Tell whether the framework `ext_base_name` ("torch", "tensorflow", "keras") is installed."""
    is_there = ext_base_name in ("torch", "tensorflow", "keras") and find_spec(ext_base_name)
    if verbose:
        print(f"{ext_base_name}: {'installed' if is_there else 'not installed'}")
    return bool(is_there)


def check_extension(ext_name: str, *details: Any, verbose: bool = False) -> None:
    """ImportError if the framework of `ext_name`, such as "horovod.torch", is not installed."""
    framework = ext_name.removeprefix("horovod.").partition(".")[0]
    if not extension_available(framework, verbose):
        raise ImportError(f"{ext_name} needs {framework}, which is not installed here")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Tell whether Adasum can combine so many ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


check_num_rank_power_of_2 = num_rank_is_power_2


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """Cut `items` into n parts, in order, whose lengths differ by one at most.

    With fewer items than parts, only as many parts as items are returned.
    """
    n = min(n, len(items))
    size, longer = divmod(len(items), n) if n else (0, 0)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(n)]
    return [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
