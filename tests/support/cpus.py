"""Simulate other CPUs: request the kernels that libraries would choose there, by name.

The rounding of a matrix product, and whether equal rows of it are equal, depends on the kernels. So
tests that compare how a batch is split run with all kernels that this CPU can execute; the rest are
skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


def _flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()  # not x86


def _kernels(variable: str, needs: dict[str, set[str]]) -> list[object]:
    """Return parameters that are environments: this machine's own choice, then each of `needs`."""
    flags = _flags()
    return [
        pytest.param({}, id="own-kernels"),
        *(
            pytest.param(
                {variable: name},
                id=name,
                marks=pytest.mark.skipif(
                    not needed <= flags,
                    reason=f"this CPU cannot run the {name} kernels: {sorted(needed - flags)}",
                ),
            )
            for name, needed in needs.items()
        ),
    ]


# NumPy's and SciPy's.
OPENBLAS = _kernels(
    "OPENBLAS_CORETYPE",
    {
        "Nehalem": {"sse4_2"},
        "Sandybridge": {"avx"},
        "Haswell": {"avx2", "fma"},
        "Zen": {"avx2", "fma"},
        "SkylakeX": _AVX512,
    },
)
