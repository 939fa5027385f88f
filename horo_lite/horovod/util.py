"""Functions that scripts import from `horovod.common.util`."""

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
    """Return whether a framework ("torch", "tensorflow" or "keras") is installed."""
    is_there = ext_base_name in ("torch", "tensorflow", "keras") and find_spec(ext_base_name)
    if verbose:
        print(f"{ext_base_name}: {'installed' if is_there else 'not installed'}")
    return bool(is_there)


def check_extension(ext_name: str, *details: Any, verbose: bool = False) -> None:
    """Raise ImportError if the framework of `ext_name` ("horovod.torch") is not installed."""
    framework = ext_name.removeprefix("horovod.").partition(".")[0]
    if not extension_available(framework, verbose):
        raise ImportError(f"{ext_name} needs {framework}, which is not installed here")


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether Adasum can combine this number of ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


check_num_rank_power_of_2 = num_rank_is_power_2


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """Split `items`, in order, into n parts whose lengths differ by at most one.

    With fewer than n items, the result has one part per item.
    """
    n = min(n, len(items))
    size, longer = divmod(len(items), n) if n else (0, 0)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(n)]
    return [items[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
