"""The device, CPU or GPU, of each rank."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from horo_lite import _native
from horo_lite.errors import warn

OLDEST_DRIVER = 12010  # the first that supports kernels with 32 KiB of parameters


class DeviceChoice(NamedTuple):
    """A rank's choice of a device, before it knows those of the others."""

    kind: str
    number: int | None
    """The number of the GPU; None to choose by the local rank."""
    gpus: tuple[str, ...]
    """The identifiers of the GPUs that this process sees."""


# The form, for `fits`, of a choice that another rank has sent.
FORM = (str, [None, range(1 << 20)], (str, ...))


def choose(device: str | None, rank: int) -> DeviceChoice:
    """Return a rank's device; rank 0 warns of GPUs that cannot be used.

    Args:
        device: The requested device, "cpu", "cuda" or like "cuda:1"; None for a GPU if there is
            one.
        rank: This rank's number.

    Raises:
        ValueError: The requested GPU does not exist, or its driver is too old.
    """
    kind, _, index = str(device).partition(":")
    # For the CPU, the driver is not even loaded: it may hang or be in use.
    driver, gpus, why = (0, [], "") if kind == "cpu" else _native.gpus()
    # A CUDA 13 runtime needs a driver for CUDA 13, and the kernels one for 12.1.
    oldest = max(OLDEST_DRIVER, _native.cuda_runtime_version() // 1000 * 1000)
    outdated = (
        f"the NVIDIA driver is for CUDA {driver // 1000}.{driver % 1000 // 10}, but this build of "
        f"horo_lite needs one for CUDA {oldest // 1000}.{oldest % 1000 // 10} or newer"
    )
    if device is None:
        if gpus and driver < oldest and rank == 0:
            warn(f"{outdated}, so the GPUs are not used: update the driver, or pass device='cpu'")
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
    """Return the index of a rank's GPU in that rank's process; 0 for the CPU."""
    if choice.kind == "cpu":
        return 0
    return local_rank % len(choice.gpus) if choice.number is None else choice.number


def make_current(index: int) -> None:
    """Make frameworks that are already imported put new arrays on this GPU."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(index)
    if cupy is not None:
        cupy.cuda.Device(index).use()
