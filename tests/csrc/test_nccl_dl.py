"""Which NCCL is loaded, and the error if there is none: each case in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fake_nccl
import pytest

from horo_lite.transports import nccl_library

pytestmark = pytest.mark.launches

# Prints what was loaded, or the error. Libraries that are to be loaded before come first.
OPEN = """
import ctypes, sys
from horo_lite import _native
from horo_lite.errors import DeviceError
loaded, *candidates = sys.argv[1:]
if loaded:
    keep = ctypes.CDLL(loaded)
try:
    print(*_native.nccl_library(candidates))
except DeviceError as error:
    print("refused:", error)
    sys.exit(3)
path, version = _native.nccl_library(["/never/looked/at"])
assert version > 0
"""


def opened(*candidates: str, loaded: str = "", ok: bool = True, **environment: str) -> str:
    """Return the process's output: path and version, or with ok=False the error's text."""
    env = {name: value for name, value in os.environ.items() if name != "HORO_LITE_NCCL_LIB"}
    command = [sys.executable, "-c", OPEN, loaded, *candidates]
    ended = subprocess.run(
        command, env={**env, **environment}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == (0 if ok else 3), ended.stdout + ended.stderr
    return ended.stdout.strip()


@pytest.fixture(scope="module")
def newer() -> str:
    return fake_nccl.compiled()


@pytest.fixture(scope="module")
def older() -> str:
    """Return another file, with the symbols of 2.18."""
    return fake_nccl.compiled(fake_nccl.SINCE_2_19 + fake_nccl.SINCE_2_27)


@pytest.fixture(scope="module")
def crippled() -> str:
    return fake_nccl.compiled(["ncclCommSplit"])


def test_the_environment_variable_is_the_only_place(newer: str, older: str) -> None:
    assert opened(older, loaded=older, HORO_LITE_NCCL_LIB=newer) == f"{newer} 22707"
    text = opened(newer, loaded=newer, ok=False, HORO_LITE_NCCL_LIB="/nowhere/libnccl.so.2")
    assert "/nowhere/libnccl.so.2 (HORO_LITE_NCCL_LIB; nothing else is tried): no such file" in text
    assert newer not in text
    assert opened(newer, HORO_LITE_NCCL_LIB="") == f"{newer} 22707"  # empty is unset


def test_the_copy_in_the_process_comes_first_then_candidates(newer: str, older: str) -> None:
    assert opened(newer, loaded=older) == f"{older} 22707"
    assert opened(older, newer) == f"{older} 22707"
    assert opened("/nowhere/libnccl.so.2", newer) == f"{newer} 22707"


def test_the_system_comes_last(newer: str, older: str) -> None:
    system = str(Path(newer).parent)
    assert opened(LD_LIBRARY_PATH=system) == f"{newer} 22707"
    assert opened(older, LD_LIBRARY_PATH=system) == f"{older} 22707"


def test_2_18_will_do_without_what_came_later(older: str) -> None:
    assert opened(older, HORO_LITE_FAKE_NCCL_VERSION="21800") == f"{older} 21800"


@pytest.mark.parametrize(("number", "text"), [("21799", "2.17.99"), ("2708", "2.7.8")])
def test_an_older_one_is_refused(newer: str, number: str, text: str) -> None:
    said = opened(newer, ok=False, HORO_LITE_FAKE_NCCL_VERSION=number)
    assert f"{newer} (the nvidia-nccl package): is NCCL {text}, but" in said
    assert "the oldest supported version is 2.18.0" in said


def test_the_error_lists_every_place_and_what_to_install(
    newer: str, crippled: str, tmp_path: Path
) -> None:
    broken = tmp_path / "libnccl.so.2"
    broken.write_text("not a library")
    system = str(Path(crippled).parent)
    places = ["/nowhere/libnccl.so.2", str(broken)]
    said = opened(*places, loaded=crippled, ok=False, LD_LIBRARY_PATH=system)
    lines = said.splitlines()
    assert lines[0].startswith("refused: no NCCL of version 2.18.0 or newer was found")
    assert lines[1:3] == [
        f"  {crippled} (already in this process): lacks the symbol ncclCommSplit",
        "  /nowhere/libnccl.so.2 (the nvidia-nccl package): no such file",
    ]
    assert lines[3].startswith(f"  {broken} (the nvidia-nccl package): cannot be loaded: ")
    assert "invalid ELF header" in lines[3] or "file too short" in lines[3]
    assert lines[4] == "  libnccl.so.2 (the system's): lacks the symbol ncclCommSplit"
    for way_out in ("horo_lite[cuda12]", "horo_lite[cuda13]", "HORO_LITE_NCCL_LIB"):
        assert way_out in lines[5]
    # A rejected one does not prevent the next from being tried.
    assert opened(newer, loaded=crippled) == f"{newer} 22707"


def test_wheels_are_found_without_an_import(newer: str, tmp_path: Path) -> None:
    places = [tmp_path / name / "nvidia" / "nccl" / "lib" for name in ("one", "two")]
    for place in places:
        place.mkdir(parents=True)
    (places[1] / "libnccl.so.2").symlink_to(newer)
    find = f"""
import runpy, sys
nccl_candidates = runpy.run_path({nccl_library.__file__!r})["nccl_candidates"]
print(*nccl_candidates(), sep="\\n")
assert not [name for name in sys.modules if name.split(".")[0] == "nvidia"]
"""
    roots = [tmp_path / "one", tmp_path / "two"]
    ended = subprocess.run(
        [sys.executable, "-S", "-c", find],  # without the wheels of this environment
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    candidates = ended.stdout.splitlines()
    assert candidates == [str(place / "libnccl.so.2") for place in places]
    assert opened(*candidates) == f"{places[1] / 'libnccl.so.2'} 22707"
