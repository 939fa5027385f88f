"""What all tests share."""

from __future__ import annotations

import os
import signal

import pytest
from launch import mpi_name


def pytest_configure(config: pytest.Config) -> None:
    """A wrong HORO_LITE_TEST_MPI has ended the run before any test could seem to pass.

    What the tests start hears Ctrl-C, even where this run is a shell's background job and does not.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("HORO_LITE_TEST_MPI"):
        mpi_name()
