"""The paths of libnccl in installed wheels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def nccl_candidates() -> list[str]:
    """Return paths where nvidia-nccl wheels install libnccl, existing or not, in `sys.path` order.

    Imports nothing. Wheels for CUDA 12 and CUDA 13 have the same path.
    """
    spec = find_spec("nvidia")  # a namespace package of all NVIDIA wheels
    folders = None if spec is None else spec.submodule_search_locations
    return [str(Path(folder, "nccl", "lib", "libnccl.so.2")) for folder in folders or ()]
