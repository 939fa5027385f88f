"""Variables with which JAX's ranks compile quickly, for loops that run for microseconds."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.metadata import version

_FOLDER = tempfile.TemporaryDirectory(prefix="hvd")


def compilation(flags: str = "", *, optimized: bool = False) -> Mapping[str, str]:
    """Return variables for ranks that share what they compile, until the test session ends.

    Unless `optimized`, a third of XLA's default time: without the emitters of fused loops, in one
    piece, and with few of LLVM's passes. `flags` are more of XLA's.
    """
    quick = "--xla_cpu_parallel_codegen_split_count=1"
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later ones refuse it
        quick += " --xla_cpu_use_fusion_emitters=false"
    return {
        "JAX_COMPILATION_CACHE_DIR": _FOLDER.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if optimized else "1",
        "XLA_FLAGS": flags if optimized else f"{quick} {flags}",
    }
