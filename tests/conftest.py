"""What all tests share: the marker of the tests that need an MPI launcher."""

from __future__ import annotations

import os

import pytest
from launch import mpi_name


def pytest_configure(config: pytest.Config) -> None:
    """`mpi` is a known marker, and a wrong HORO_LITE_TEST_MPI ends the run at once."""
    config.addinivalue_line(
        "markers", "mpi: runs ranks under mpiexec; run again with the other MPI library"
    )
    if os.environ.get("HORO_LITE_TEST_MPI"):
        mpi_name()
