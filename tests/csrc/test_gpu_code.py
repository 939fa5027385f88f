"""The kernels as machine code: no spills, 128-bit accesses, all loads before the first store."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.launches

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURES = ["80", "90"]
BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
BYTES |= {f"Raw{8 * n}": n for n in [1, 2, 4, 8]}
PAIRS = [(name, name) for name in BYTES]
PAIRS += [(grad, wire) for grad in ["F32", "F64"] for wire in ["F16", "BF16"]]
KERNELS = [("Measure", name, name) for name in ["F16", "BF16", "F32", "F64"]]
KERNELS += [(step, *pair) for step in ["Pack", "Unpack"] for pair in PAIRS]


def nvcc() -> str | None:
    """Return the toolkit's compiler, from where csrc/gpu/cuda.cmake looks for it."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")


def tool(name: str) -> str:
    """Return the path of `name` in the toolkit or in its package on PyPI."""
    found = shutil.which(name, path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    if found:
        return found
    try:
        files = metadata.files(f"nvidia-cuda-{name}") or []
    except metadata.PackageNotFoundError:
        pytest.fail(f"no {name} to inspect machine code with: pip install nvidia-cuda-{name}")
    (path,) = (str(file.locate()) for file in files if file.name == name)
    return path


needs_toolkit = pytest.mark.skipif(
    nvcc() is None, reason="no CUDA toolkit here (CUDA_HOME, nvcc on PATH, /usr/local/cuda)"
)


@dataclass
class Code:
    """A kernel's code for one architecture."""

    instructions: list[str]  # opcode and operands, in order
    registers: int
    stack: int
    spills: int


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Code]:
    """Return the code by architecture and kernel name."""
    fatbin = tmp_path_factory.mktemp("kernels") / "kernels.fatbin"
    compiler = nvcc()
    assert compiler
    # From the PTX of the oldest, which is as good: kernel_body.h asks whether it is 80 or later.
    codes = ",".join(f"sm_{a}" for a in ARCHITECTURES)
    target = f"-gencode=arch=compute_{ARCHITECTURES[0]},code=[{codes}]"
    options = ["-std=c++17", "-O3", "--fmad=false", "-Xptxas=-v", "-fatbin", "-o", str(fatbin)]
    options += ["-I", str(ROOT / "csrc")]
    command = [compiler, *options, target, str(ROOT / "csrc" / "gpu" / "kernels.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {}
    for architecture in ARCHITECTURES:
        listing = disassembled(fatbin, architecture)
        for name, (stack, spills, registers) in reported(done.stderr, architecture).items():
            found[architecture, name] = Code(listing[name], registers, stack, spills)
    return found


def reported(text: str, architecture: str) -> dict[str, tuple[int, int, int]]:
    """Return from ptxas's report: bytes of stack, bytes of spills, registers."""
    pattern = (
        rf"Compiling entry function '(\w+)' for 'sm_{architecture}'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers"
    )
    return {
        name: (int(stack), int(stores) + int(loads), int(registers))
        for name, stack, stores, loads, registers in re.findall(pattern, text, re.DOTALL)
    }


def disassembled(fatbin: Path, architecture: str) -> dict[str, list[str]]:
    # cuobjdump calls nvdisasm, which it finds on PATH.
    path = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ["PATH"]])
    command = [tool("cuobjdump"), "-sass", "-arch", f"sm_{architecture}", str(fatbin)]
    environment = os.environ | {"PATH": path}
    text = subprocess.check_output(command, text=True, env=environment)
    _, *functions = re.split(r"Function : (\w+)\n", text)
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][^;]*)")
    return {
        name: instruction.findall(body)
        for name, body in zip(functions[::2], functions[1::2], strict=True)
    }


def each(compiled: dict[tuple[str, str], Code]) -> list[tuple[str, str, str, str, str, Code]]:
    """Return architecture, name, step, the tensor's format, the wire's format, code."""
    sizes = ["few", "some", "many"]
    return [
        (a, f"horo_{step}_{g}_{w}_{size}", step, g, w, compiled[a, f"horo_{step}_{g}_{w}_{size}"])
        for a, (step, g, w), size in itertools.product(ARCHITECTURES, KERNELS, sizes)
    ]


@needs_toolkit
@pytest.mark.timeout(900)
def test_registers_suffice(compiled: dict[tuple[str, str], Code]) -> None:
    """Nothing is spilled, and four blocks of 256 threads fit on a multiprocessor.

    With 64 bytes per thread in flight, that is more than twice what hides an H100's latency.
    """
    for architecture, name, *_, code in each(compiled):
        assert (code.stack, code.spills) == (0, 0), (architecture, name)
        assert code.registers <= 65536 // (4 * 256), (architecture, name)
        assert not [i for i in code.instructions if i.startswith(("LDL", "STL"))], name


@needs_toolkit
@pytest.mark.timeout(900)
def test_accesses_are_128_bits_wide(compiled: dict[tuple[str, str], Code]) -> None:
    """64 bytes of the tensor per thread, all loads issued before the first store."""
    for architecture, name, step, grad, wire, code in each(compiled):
        wide = [i for i in code.instructions if re.match(r"(LDG|STG)\.E\.128", i)]
        ratio = BYTES[grad] // BYTES[wire]
        n_loads = 4 // ratio if step == "Unpack" else 4
        n_stores = {"Measure": 0, "Pack": 4 // ratio, "Unpack": 4}[step]
        expected = ["LDG"] * n_loads + ["STG"] * n_stores
        assert [i[:3] for i in wide] == expected, (architecture, name)


@needs_toolkit
@pytest.mark.timeout(900)
def test_halves_are_converted_in_pairs(compiled: dict[tuple[str, str], Code]) -> None:
    """By the hardware, two per instruction, except for those of the tail."""
    written = {"F16": r"F2FP(\.F16\.F32)?\.PACK_AB", "BF16": r"F2FP\.BF16(\.F32)?\.PACK_AB"}
    for architecture, name, step, grad, wire, code in each(compiled):
        to = {"Measure": "", "Pack": wire, "Unpack": grad}[step]
        if to in written:
            found = [i for i in code.instructions if re.match(written[to], i)]
            pairs = [i for i in found if "RZ" not in i]  # a single one is paired with zero
            assert len(pairs) >= 64 // BYTES[grad] // 2, (architecture, name)
