"""What all tests share."""

from __future__ import annotations

import os

import pytest
from launch import mpi_name


def pytest_configure(config: pytest.Config) -> None:
    """A wrong HORO_LITE_TEST_MPI has ended the run before any test could seem to pass."""
    if os.environ.get("HORO_LITE_TEST_MPI"):
        mpi_name()
