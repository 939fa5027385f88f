"""Build `horo_lite._native` from csrc/ with CMake; the rest of the package is in pyproject.toml.

An editable install (`pip install -e`, `setup.py build_ext --inplace`) also gets
`horo_lite._testing`, which the tests need and wheels do not contain. A wheel's core, built with
CPython 3.12 or later, uses only the stable ABI, so it works with every CPython from 3.12 on.
Beside each module is its stub, a .pyi file for type checkers, made from the module's signatures.

Environment variables: csrc/gpu/cuda.cmake reads CUDA_HOME (a toolkit), HORO_LITE_CUDA=0 (build
without CUDA), HORO_LITE_CUDA_ARCHITECTURES (instead of all: 90, or native) and
HORO_LITE_CUDA_WHEELS (`make wheel`: compilers from PyPI instead of a toolkit); CMake reads
CMAKE_ARGS. HORO_LITE_WHEEL_CPU=x86_64 or aarch64 (`make wheel`) builds for every Linux with that
CPU, using csrc/zig.cmake. HORO_LITE_DEBUG=1 (`make debug`) builds with assertions and little
optimization, HORO_LITE_QUICK_BUILD=1 (`make demo`) for this machine's CPU only and without what the
tests need.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
# When building for another processor, Python's files are named after that one.
WHEEL_CPU = os.environ.get("HORO_LITE_WHEEL_CPU", "")
HERE = platform.machine()
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX").replace(HERE, WHEEL_CPU or HERE)
HAS_STABLE_ABI = (
    sys.implementation.name == "cpython"
    and sys.version_info >= (3, 12)  # the first whose stable ABI has everything nanobind needs
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
TESTING = "horo_lite._testing"


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def tool(name: str) -> str:
    """Return the path of a build tool, on PATH or beside this interpreter (venv not activated)."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise SystemExit(f"horo_lite needs {name} to build its C++ core: pip install {name}")
    return found


def nanobind_dir() -> str:
    """Return the directory of nanobind's CMake package."""
    # The variable has CMake's name for it. With it, two environments can share one build tree, and
    # the second has nothing to compile.
    given = os.environ.get("nanobind_DIR")  # noqa: SIM112
    ask = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    return given or subprocess.check_output(ask, text=True).strip()


def say(text: str) -> None:
    """Print a line, and also on the terminal if the output is captured, as by pip."""
    print(f"horo_lite: {text}", file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            print(f"\n  horo_lite: {text}", file=terminal)


def run(command: list[str], *, verbose: bool) -> int:
    """Run CMake, and report what it found of CUDA, and its progress.

    Args:
        command: The command line.
        verbose: Whether to print all of its output, instead of only unusual lines.

    Returns:
        The exit code.
    """
    began, shown = time.monotonic(), 0
    # Under `make -j`, ninja would look for make's job server, which it cannot reach here.
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            step = re.match(r"\[(\d+)/(\d+)\]", line)
            if line.startswith("-- CUDA"):
                say(line[3:].strip())
            elif step and 4 * int(step[1]) // int(step[2]) > shown and int(step[2]) > 4:
                shown = 4 * int(step[1]) // int(step[2])
                took_s = time.monotonic() - began
                say(f"compiled {step[1]} of {step[2]} files of the C++ core in {took_s:.0f} s")
            if verbose or not (step or line.startswith(("--", "ninja: no work"))):
                print(line, end="", flush=True)
    return process.wait()


class CMakeBuild(build_ext):
    def run(self) -> None:
        if is_set("HORO_LITE_QUICK_BUILD"):
            self.extensions = [ext for ext in self.extensions if ext.name != TESTING]
        if not self.inplace and not self.editable_mode:
            self.extensions = [ext for ext in self.extensions if ext.name != TESTING]
            for ext in self.extensions:
                ext.py_limited_api = HAS_STABLE_ABI  # determines the file's name
            for built in Path(self.build_lib, "horo_lite").glob("_testing*"):
                built.unlink()  # for an editable install, which shares the directory
        super().run()
        for ext in self.extensions:
            self.write_stub(ext)

    def build_extensions(self) -> None:
        # One permanent tree per Python ABI: pip deletes its own build directory, with all object
        # files that need not be compiled again. For `make wheel`, one per CPU: four fifths of the
        # work are the same for all Pythons.
        wheels = os.environ.get("HORO_LITE_CUDA_WHEELS", "")
        debug = is_set("HORO_LITE_DEBUG")
        kind = "debug" if debug else "wheel" if wheels or WHEEL_CPU else "cmake"
        stable = any(ext.py_limited_api for ext in self.extensions)
        flavour = "-stable-abi" if stable else ""
        for_wheel = [
            # Forget what CMake and nanobind have cached about another Python.
            *("-U*Python*", "-UNB_*"),
            # CMake does not ask the interpreter when it compiles for another machine, but the first
            # pythonX.Y-config on PATH, which may be another Python's or, by pyenv, nobody's.
            f"-DPython_INCLUDE_DIR={sysconfig.get_path('include')}",
            # Otherwise nanobind names the module after the processor of the running Python.
            f"-DSKBUILD_SOABI={SUFFIX.strip('.').removesuffix('.so')}",
            f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/csrc/zig.cmake",
        ]
        if not WHEEL_CPU:
            for_wheel = []
        variant = f"-{WHEEL_CPU}" if WHEEL_CPU else f"{SUFFIX.removesuffix('.so')}{flavour}"
        tree = ROOT / "build" / f"{kind}{variant}"
        cache, home = tree / "CMakeCache.txt", f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}/csrc\n"
        if cache.exists() and home not in cache.read_text():
            shutil.rmtree(tree)  # the checkout was moved or copied: CMake refuses its tree
        configure = [
            *(tool("cmake"), "-S", str(ROOT / "csrc"), "-B", str(tree), "-G", "Ninja"),
            *for_wheel,
            # Passed each time: cached paths may be in an isolated environment that is gone.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if debug else 'Release'}",
            f"-DHORO_LITE_STABLE_ABI={int(stable)}",
            f"-DHORO_LITE_QUICK_BUILD={int(is_set('HORO_LITE_QUICK_BUILD'))}",
            f"-Dnanobind_DIR={nanobind_dir()}",
            # Defaults are passed, too, since the cache contains the values of the last build.
            "-DHORO_LITE_COMPILED=",
            f"-DHORO_LITE_CUDA={os.environ.get('HORO_LITE_CUDA', '1')}",
            f"-DHORO_LITE_CUDA_ARCHITECTURES={os.environ.get('HORO_LITE_CUDA_ARCHITECTURES', '')}",
            f"-DHORO_LITE_CUDA_WHEELS={wheels}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # Together, so the last object files of one module are compiled in parallel with the next.
        modules = [ext.name.rpartition(".")[2] for ext in self.extensions]
        for command in (configure, [tool("cmake"), "--build", str(tree), "--target", *modules]):
            if run(command, verbose=bool(self.verbose)):
                raise SystemExit(
                    "horo_lite: the C++ core could not be built; the messages above say why "
                    "(it needs a C++20 compiler such as g++ 11 or later)"
                )
        for ext, module in zip(self.extensions, modules, strict=True):
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            # Replaced atomically: a running process may have the old file mapped, and another may
            # just be starting.
            fresh = target.with_name(f".{target.name}.new")
            shutil.copy2(tree / f"{module}{'.abi3.so' if stable else SUFFIX}", fresh)
            fresh.replace(target)

    def write_stub(self, ext: Extension) -> None:
        """Write the types of a module's names, for type checkers, beside the module."""
        target = Path(self.get_ext_fullpath(ext.name))
        target = target.with_name(f"{ext.name.rpartition('.')[2]}.pyi")
        made = ROOT / "build" / target.name
        if WHEEL_CPU in ("", HERE):
            stubgen = Path(nanobind_dir()).with_name("stubgen.py")
            options = ["-q", "-i", str(target.parents[1]), "-m", ext.name, "-o", str(made)]
            subprocess.check_call([sys.executable, "-B", str(stubgen), *options])
        # A module for another processor cannot be imported here. Its stub is the same as that of
        # the module for this one, which `make wheel` has built before.
        if made.exists():
            shutil.copy2(made, target)


wheel_tags = {"py_limited_api": "cp312"} if HAS_STABLE_ABI else {}
if WHEEL_CPU:
    os.environ["SETUPTOOLS_EXT_SUFFIX"] = SUFFIX
    wheel_tags["plat_name"] = f"linux_{WHEEL_CPU}"

setup(
    ext_modules=[Extension("horo_lite._native", sources=[]), Extension(TESTING, sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    options={"bdist_wheel": wheel_tags},
)
