"""Where a wheel may have put libnccl."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def nccl_candidates() -> list[str]:
    """The paths at which nvidia-nccl wheels put libnccl, in `sys.path` order, there or not.

    Nothing is imported. Wheels for CUDA 12 and CUDA 13 have the same path.
    """
    spec = find_spec("nvidia")  # shared by all of NVIDIA's wheels
    folders = None if spec is None else spec.submodule_search_locations
    return [str(Path(folder, "nccl", "lib", "libnccl.so.2")) for folder in folders or ()]
