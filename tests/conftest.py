"""What all tests share."""

from __future__ import annotations

import os
import signal

import pytest
from launch import mpi_name

# Threads of OpenMP and OpenBLAS sleep while they wait. By default they spin, which costs more than
# the work itself where jobs share two cores: of ResNet-50 on one rank 39 s of CPU instead of 6 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

FEATURES = ("eager", "jit", "overlap", "in place", "fp16")  # the columns of docs/frameworks.md


def pytest_configure(config: pytest.Config) -> None:
    """A wrong HORO_LITE_TEST_MPI has ended the run before any test could seem to pass.

    What the tests start hears Ctrl-C, even where this run is a shell's background job and does not.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("HORO_LITE_TEST_MPI"):
        mpi_name()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mark `shows` of a feature that docs/frameworks.md does not have is an error."""
    for item in items:
        for mark in item.iter_markers("shows"):
            unknown = [feature for feature in mark.args if feature not in FEATURES]
            if unknown or not mark.args:
                raise pytest.UsageError(f"{item.nodeid} shows {unknown or 'nothing'}: not a cell")
