"""Builds `horo_lite._native` from csrc/ with CMake; the rest of the package: pyproject.toml.

An editable install (`pip install -e`, `setup.py build_ext --inplace`) gets `horo_lite._testing` as
well, which the tests need and no wheel has.

Of the environment, csrc/gpu/cuda.cmake sees CUDA_HOME (a toolkit), HORO_LITE_CUDA=0 (none wanted),
HORO_LITE_CUDA_ARCHITECTURES (instead of all: 90, or native) and HORO_LITE_CUDA_WHEELS (`make
wheel`: the compilers on PyPI instead of a toolkit); CMAKE_ARGS are CMake's own. HORO_LITE_DEBUG=1
(`make debug`) builds with assertions and little optimization.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
TESTING = "horo_lite._testing"


def tool(name: str) -> str:
    """The path of a build tool, on PATH or beside this interpreter (a venv not activated)."""
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise SystemExit(f"horo_lite needs {name} to build its C++ core: pip install {name}")
    return found


def nanobind_dir() -> str:
    """The directory of nanobind's CMake package."""
    # The variable has CMake's own name for it. With it two environments share one build tree, and
    # the second has nothing to compile.
    given = os.environ.get("nanobind_DIR")  # noqa: SIM112
    ask = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    return given or subprocess.check_output(ask, text=True).strip()


class CMakeBuild(build_ext):
    def run(self) -> None:
        if not self.inplace and not self.editable_mode:
            self.extensions = [ext for ext in self.extensions if ext.name != TESTING]
            for built in Path(self.build_lib, "horo_lite").glob("_testing*"):
                built.unlink()  # for an editable install, which shares the directory
        super().run()

    def build_extension(self, ext: Extension) -> None:
        # One lasting tree per Python ABI: pip's own build directory is thrown away, and with it
        # every object file that did not have to be compiled again.
        wheels = os.environ.get("HORO_LITE_CUDA_WHEELS", "")
        debug = os.environ.get("HORO_LITE_DEBUG", "0") not in ("", "0")
        kind = "debug" if debug else "wheel" if wheels else "cmake"
        tree = ROOT / "build" / f"{kind}{SUFFIX.removesuffix('.so')}"
        cache, home = tree / "CMakeCache.txt", f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}/csrc\n"
        if cache.exists() and home not in cache.read_text():
            shutil.rmtree(tree)  # the checkout was moved or copied, and CMake refuses such a tree
        configure = [
            *(tool("cmake"), "-S", str(ROOT / "csrc"), "-B", str(tree), "-G", "Ninja"),
            # Named each time: the ones in the cache may lie in an isolated environment long gone.
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_BUILD_TYPE={'Debug' if debug else 'Release'}",
            f"-Dnanobind_DIR={nanobind_dir()}",
            # What they are not set to is said too: the cache remembers the last time.
            f"-DHORO_LITE_CUDA={os.environ.get('HORO_LITE_CUDA', '1')}",
            f"-DHORO_LITE_CUDA_ARCHITECTURES={os.environ.get('HORO_LITE_CUDA_ARCHITECTURES', '')}",
            f"-DHORO_LITE_CUDA_WHEELS={wheels}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        module = ext.name.rpartition(".")[2]
        for command in (configure, [tool("cmake"), "--build", str(tree), "--target", module]):
            if subprocess.run(command).returncode:
                raise SystemExit(
                    "horo_lite: the C++ core could not be built; the messages above say why "
                    "(it needs a C++20 compiler such as g++ 11 or later)"
                )
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Put in its place as a whole: a running process may have the old file mapped, and another
        # may just be starting.
        fresh = target.with_name(f".{target.name}.new")
        shutil.copy2(tree / f"{module}{SUFFIX}", fresh)
        fresh.replace(target)


setup(
    ext_modules=[Extension("horo_lite._native", sources=[]), Extension(TESTING, sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
