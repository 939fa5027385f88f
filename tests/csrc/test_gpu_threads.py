"""The code that calls CUDA and NCCL, from threads of all kinds: see fake_cuda/checks.cpp."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import run_ranks

pytestmark = pytest.mark.launches

HERE = Path(__file__).resolve().parent / "fake_cuda"
CSRC = Path(__file__).resolve().parents[2] / "csrc"


COMPILER = shlex.split(os.environ.get("CXX") or "c++")


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the program, with the stand-in next to it."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    compiler = [*COMPILER, "-std=c++20", "-O0", "-Wall", "-Wextra"]
    library = ["-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", HERE / "fake_cuda.cpp"]
    program = [HERE / "checks.cpp"]
    program += [
        CSRC / "gpu" / f"{name}.cpp" for name in ("device_cuda", "device_queue", "nccl_group")
    ]
    options = [f"-I{HERE}", f"-I{CSRC}", "-pthread", f"-L{folder}", "-l:libcuda.so.1", "-ldl"]
    run([*compiler, f"-I{HERE}", *library, "-o", folder / "libcuda.so.1"])
    run([*compiler, *program, *options, f"-Wl,-rpath,{folder}", "-o", folder / "checks"])
    return folder / "checks"


def run(command: list[object]) -> str:
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("job", ["contexts", "current", "abort", "kernels"])
def test_all_is_well(checks: Path, job: str) -> None:
    assert "all is well" in run(["timeout", "60", checks, job])


CPU = """
import sys
import numpy as np
import horo_lite as hvd

world = hvd.init(device="cpu")
assert world.device.kind == "cpu"
mean = (world.size - 1) / 2
assert hvd.allreduce(np.full(3, float(world.rank))).tolist() == [mean] * 3
handle = hvd.allreduce_async(np.full(3, float(world.rank)))
assert hvd.synchronize(handle).tolist() == [mean] * 3
assert not {"cupy", "torch", "jax"} & set(sys.modules)
hvd.shutdown()
print("left alone", "libcuda" in open("/proc/self/maps").read())
"""


@pytest.mark.parametrize("size", [1, 2])
def test_who_wants_the_cpu_never_loads_the_driver(size: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap.c"
    trap.write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) void trap(void) { abort(); }\n"
    )
    run([*COMPILER, "-x", "c", trap, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1"])
    path = os.pathsep.join([str(tmp_path), os.environ.get("LD_LIBRARY_PATH", "")])
    env = {"LD_LIBRARY_PATH": path, "HORO_LITE_TEST_GPUS": "", "HORO_LITE_DEVICE": ""}
    asked = [sys.executable, "-c", "from horo_lite import _native; _native.gpus()"]
    assert subprocess.run(asked, env={**os.environ, **env}).returncode < 0  # the trap works
    result = run_ranks(CPU, size, env=env, launcher=size > 1, timeout_s=60).check()
    assert result.stdout.count("left alone False") == size
