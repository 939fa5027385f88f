"""Configuration shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from launch import mpi_name
from worlds import ON_RANKS, close_worlds

# Make threads of OpenMP and OpenBLAS sleep while they wait. By default they spin, which costs more
# than the work itself when jobs share two cores: ResNet-50 on one rank takes 39 s of CPU instead of
# 6 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
# UCX, which the MPI libraries load, tests at once whether it notices when memory is freed, which
# takes a tenth of a rank's start. It needs to know for network cards that read memory: none here.
os.environ.setdefault("UCX_MEM_EVENTS", "n")
# PyTorch asks a name server for the IPv6 address of "localhost" where /etc/hosts has none: a lost
# packet would cost 5 s, the time limit of some tests of the rendezvous.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

FEATURES = ("eager", "jit", "overlap", "in place", "fp16")  # the columns of docs/frameworks.md


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --in-files-with, which saves half of a short run."""
    parser.addoption("--in-files-with", metavar="MARK", help="read only files with this mark")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that --in-files-with leaves out."""
    mark = config.getoption("in_files_with")
    if (
        mark
        and collection_path.suffix == ".py"
        and f"mark.{mark}" not in collection_path.read_text()
    ):
        return True
    return None


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a file is imported that uses Hypothesis, turn off what fails on a busy machine.

    Such a machine may pause an example for any time, and also how examples are drawn.
    """
    if "from hypothesis import" in module_path.read_text():
        from hypothesis import HealthCheck, settings

        checks = list(HealthCheck)  # the others depend on what is drawn, at random
        settings.register_profile("busy", deadline=None, suppress_health_check=checks)
        settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """End the run immediately if HORO_LITE_TEST_MPI is wrong, before any test could seem to pass.

    Also make the tests' processes receive Ctrl-C, even if this run is a background job of a shell,
    which ignores it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("HORO_LITE_TEST_MPI"):
        mpi_name()
    sys.addaudithook(_refuse_unmarked_process)


_running: pytest.Item | None = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note which test runs, for `_refuse_unmarked_process`."""
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Import what PyTorch's first optimizer imports before the time limit of `run_threads` begins.

    It takes some seconds of CPU, and took longer than that limit on a machine that was busy enough.
    """
    elsewhere = any(map(item.get_closest_marker, ("launches", "served")))
    if item.path.parent.name == "pytorch" and not elsewhere:
        pytest.importorskip("torch._dynamo")


def pytest_collection_finish() -> None:
    """Exclude from garbage collection what there is: all tests, and the frameworks they import.

    Looking through it again and again took 5 % of the CPU of the quick tests.
    """
    gc.collect()
    gc.freeze()


def _refuse_unmarked_process(event: str, args: tuple[object, ...]) -> None:
    """Raise in a test that starts a process, or shares ranks, and is not marked so."""
    if event == ON_RANKS and _running and not _running.get_closest_marker("served"):
        raise RuntimeError(
            f"{_running.nodeid} uses ranks of others: mark it with pytest.mark.served"
        )
    if event != "subprocess.Popen" or args[0] == "/sbin/ldconfig":  # by ctypes, to find a library
        return
    if _running and not _running.get_closest_marker("launches"):
        raise RuntimeError(
            f"{_running.nodeid} starts {args[0]}: mark it with pytest.mark.launches (or mpi, if it "
            f"must also run under MPICH)"
        )


def pytest_sessionfinish() -> None:
    """End the ranks that have served this worker's tests."""
    close_worlds()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is served, repeated under MPICH, or has an environment of its own, as launching.

    Raise if a `shows` mark names a feature that docs/frameworks.md does not have.
    """
    for item in items:
        implied = any(item.get_closest_marker(name) for name in ("served", "mpi"))
        if implied or item.path.parent.name in ("frameworks", "clusters"):
            item.add_marker("launches")
        for mark in item.iter_markers("shows"):
            unknown = [feature for feature in mark.args if feature not in FEATURES]
            if unknown or not mark.args:
                raise pytest.UsageError(f"{item.nodeid} shows {unknown or 'nothing'}: not a cell")
