"""Compiles kernels.cu with NVRTC and nvFatbin, since PyPI has no nvcc for CUDA 12.

Usage: compile_kernels.py WHEELS OUTPUT ARCHITECTURE...

WHEELS is the folder `nvidia` in which pip installs nvidia-cuda-nvrtc-cu12, nvidia-nvfatbin-cu12 and
nvidia-cuda-runtime-cu12. OUTPUT gets machine code for every architecture (75, 80, …), and PTX of
the first one for all GPUs without any. Messages of the compiler go to stderr.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

OPTIONS = ["--std=c++17", "--fmad=false", f"--include-path={Path(__file__).resolve().parents[1]}"]


def load(wheels: Path, folder: str, name: str) -> ctypes.CDLL:
    """Load the only library of that name in the folder."""
    (found,) = (wheels / folder / "lib").glob(f"lib{name}.so.*")
    return ctypes.CDLL(str(found))


class Nvrtc:
    def __init__(self, wheels: Path) -> None:
        self.nvrtc = load(wheels, "cuda_nvrtc", "nvrtc")

    def check(self, result: int, log: str = "") -> None:
        if result:
            self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            why = self.nvrtc.nvrtcGetErrorString(result).decode()
            raise SystemExit(f"{log}NVRTC could not compile horo_lite's kernels: {why}")

    def got(self, program: ctypes.c_void_p, what: str) -> bytes:
        """Return an output of the compilation: its `ProgramLog`, `CUBIN` or `PTX`."""
        size = ctypes.c_size_t()
        self.check(getattr(self.nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        data = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.nvrtc, f"nvrtcGet{what}")(program, data))
        return data.raw

    def compile(self, source: Path, what: str, architecture: str, *options: str) -> bytes:
        """Compile to machine code (`CUBIN` for sm_90) or to `PTX` (for compute_90)."""
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        create = self.nvrtc.nvrtcCreateProgram
        self.check(create(ctypes.byref(program), text, name, 0, None, None))
        given = [f"--gpu-architecture={architecture}", *OPTIONS, *options]
        array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        result = self.nvrtc.nvrtcCompileProgram(program, len(given), array)
        log = self.got(program, "ProgramLog").rstrip(b"\0").decode()
        self.check(result, log)
        sys.stderr.write(log)
        code = self.got(program, what)
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return code


class Fatbin:
    """Code for several architectures in one file, compressed so that every driver can read it."""

    def __init__(self, wheels: Path) -> None:
        self.nvfatbin = load(wheels, "nvfatbin", "nvfatbin")
        self.handle = ctypes.c_void_p()
        options = (ctypes.c_char_p * 2)(b"-64", b"-compress-all")
        self.call("Create", ctypes.byref(self.handle), options, ctypes.c_size_t(2))

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self.nvfatbin, f"nvFatbin{name}")(*arguments)
        if result:
            self.nvfatbin.nvFatbinGetErrorString.restype = ctypes.c_char_p
            why = self.nvfatbin.nvFatbinGetErrorString(result).decode()
            raise SystemExit(f"nvFatbin{name} failed: {why}")

    def add(self, what: str, code: bytes, architecture: str) -> None:
        more = (None,) if what == "PTX" else ()  # the options it was compiled with
        size, number, name = ctypes.c_size_t(len(code)), architecture.encode(), b"kernels.cu"
        self.call(f"Add{what}", self.handle, code, size, number, name, *more)

    def bytes(self) -> bytes:
        size = ctypes.c_size_t()
        self.call("Size", self.handle, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self.call("Get", self.handle, data)
        return data.raw


def main() -> None:
    wheels, output, *architectures = sys.argv[1:]
    compiler, fatbin = Nvrtc(Path(wheels)), Fatbin(Path(wheels))
    source = Path(__file__).with_name("kernels.cu")
    for number in architectures:
        fatbin.add("Cubin", compiler.compile(source, "CUBIN", f"sm_{number}"), number)
    oldest = architectures[0]
    fatbin.add("PTX", compiler.compile(source, "PTX", f"compute_{oldest}"), oldest)
    Path(output).write_bytes(fatbin.bytes())


if __name__ == "__main__":
    main()
