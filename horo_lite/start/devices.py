"""The CPU or GPU on which each rank computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from horo_lite import _native
from horo_lite.errors import warn

OLDEST_DRIVER = 12010  # the first that takes kernels with 32 KiB of parameters


class DeviceChoice(NamedTuple):
    """What a rank has chosen to compute on, before it knows the others."""

    kind: str
    number: int | None
    """The number of the GPU; None for this rank's turn among those of its host."""
    gpus: tuple[str, ...]
    """The identifiers of the GPUs that this process sees."""


# As `fits` takes it, for one that another rank has written.
FORM = (str, [None, range(1 << 20)], (str, ...))


def choose(device: str | None, rank: int) -> DeviceChoice:
    """Return what a rank computes on; rank 0 warns of GPUs that cannot be used.

    Args:
        device: What was asked for, "cpu", "cuda" or like "cuda:1"; None for a GPU if there is one.
        rank: This rank's number.

    Raises:
        ValueError: The GPU that was asked for is not there, or its driver is too old.
    """
    kind, _, index = str(device).partition(":")
    # Who wants the CPU may be on a machine whose driver hangs or is in use: it is not even loaded.
    driver, gpus, why = (0, [], "") if kind == "cpu" else _native.gpus()
    # A CUDA 13 runtime wants a driver for CUDA 13, and the kernels one for 12.1.
    oldest = max(OLDEST_DRIVER, _native.cuda_runtime_version() // 1000 * 1000)
    outdated = (
        f"the NVIDIA driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, and this build of "
        f"horo_lite needs one for CUDA {oldest // 1000}.{oldest % 1000 // 10} or newer"
    )
    if device is None:
        if gpus and driver < oldest and rank == 0:
            warn(f"{outdated}, so the GPUs are left alone: update the driver, or pass device='cpu'")
        kind = "cuda" if gpus and driver >= oldest else "cpu"
    elif kind == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f"CUDA_VISIBLE_DEVICES is {visible!r}" if visible is not None else "all are visible"
        if not gpus:
            raise ValueError(f"device is {device!r}, but {why}; {shown}. Pass device='cpu'?")
        if int(index or 0) >= len(gpus):
            raise ValueError(
                f"device is {device!r}, but this process sees only {len(gpus)} GPU(s), numbered "
                f"from 0 ({shown})"
            )
        if driver < oldest:
            raise ValueError(f"{outdated}: update it, or pass device='cpu'")
    return DeviceChoice(kind, int(index) if index else None, tuple(gpus))


def index_of(choice: DeviceChoice, local_rank: int) -> int:
    """Return the number of a rank's GPU, as that rank counts them; 0 for the CPU."""
    if choice.kind == "cpu":
        return 0
    return local_rank % len(choice.gpus) if choice.number is None else choice.number


def warn_of_shared_gpus(hosts: Sequence[tuple[str, int]], gpus: Sequence[str]) -> None:
    """Warn where two ranks have to share a GPU.

    Args:
        hosts: Each rank's host, by name and number.
        gpus: The identifier of each rank's GPU.
    """
    first_with: dict[object, int] = {}
    for rank, place in enumerate(zip(hosts, gpus, strict=True)):
        other = first_with.setdefault(place, rank)
        if other != rank:
            warn(
                f"{len(gpus)} ranks, but ranks {other} and {rank} on "
                f"{hosts[rank][0]} have to share a GPU, and NCCL needs one each: arrays on GPUs "
                "will go through the host's memory, which is slow. Start one rank a GPU, or look "
                "at CUDA_VISIBLE_DEVICES"
            )
            return


def make_current(index: int) -> None:
    """Let frameworks that are imported already put new arrays on this GPU."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(index)
    if cupy is not None:
        cupy.cuda.Device(index).use()
