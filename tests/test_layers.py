"""Dependencies between layers, beyond what `lint-imports` checks (pyproject.toml)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import horo_lite

PACKAGE = Path(horo_lite.__file__).parent
WAYS = {"SoloTransport", "ShmTransport", "HostsTransport", "NcclTransport", "StagedTransport"}


def knowledge_of_transports(source: str) -> Iterator[str]:
    """Yield places that check which transport they have, instead of using the interface."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            text = ast.unparse(node)
            if node.func.id in ("isinstance", "getattr", "hasattr", "cast") and "ransport" in text:
                yield text
        elif isinstance(node, ast.ImportFrom):
            yield from (f"import {one.name}" for one in node.names if one.name in WAYS)
        elif isinstance(node, ast.Compare) and "ransport.name" in ast.unparse(node):
            yield ast.unparse(node)


def test_nothing_above_the_transports_asks_which_one_it_has() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(knowledge_of_transports(path.read_text()))
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] != "transports"
    }
    assert not {path: texts for path, texts in found.items() if texts}


def test_that_check_sees_what_it_is_for() -> None:
    for line in (
        "isinstance(transport, object)",
        "getattr(group.transport, 'label', '')",
        "hasattr(transport, 'announce')",
        "cast('ShmTransport', x)",
        "from horo_lite.transports.hosts.transport import HostsTransport",
        "world.group.transport.name == 'shm'",
    ):
        assert list(knowledge_of_transports(line)), line
    assert not list(knowledge_of_transports("transport.members.announce(what, 1.0)"))


WRITERS = {"write_text", "write_bytes", "mkdir", "makedirs", "mkfifo", "mknod", "symlink"}
WRITERS |= {"symlink_to", "hardlink_to", "mkstemp", "NamedTemporaryFile", "savetxt", "tofile"}
NO_FILES = ("os.devnull", "f'/proc/")  # opened without being created


def files_written(source: str) -> Iterator[str]:
    """Yield calls that open or create a file or folder for writing by its path."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called, text = ast.unparse(node.func), ast.unparse(node)
        name = called.rpartition(".")[2]
        arguments = [*node.args, *(one.value for one in node.keywords)]
        if name in WRITERS:
            yield text
        elif called == "os.open":
            reads = re.search(r"O_RDONLY|O_PATH", text) and not re.search("O_(CREAT|TRUNC)", text)
            if not reads and not ast.unparse(arguments[0]).startswith(NO_FILES):
                yield text
        elif name == "open":
            is_method = called != "open"
            modes = [*node.args[0 if is_method else 1 :]]
            modes += [one.value for one in node.keywords if one.arg == "mode"]
            is_descriptor = not is_method and isinstance(node.args[0], ast.Call)
            found = [one.value for one in modes if isinstance(one, ast.Constant)]
            if not is_descriptor and any(re.search("[wax+]", str(one)) for one in found):
                yield text


def test_files_are_opened_for_writing_in_one_place() -> None:
    """In files.py, which follows no link of another user."""
    found = {
        str(path.relative_to(PACKAGE)): list(files_written(path.read_text()))
        for path in PACKAGE.rglob("*.py")
    }
    assert found.pop("files.py")
    assert not {path: texts for path, texts in found.items() if texts}
    written = re.compile(r"\b(fopen|creat|mkdir|mkstemp|ofstream|O_CREAT)\b")
    core = PACKAGE.parent / "csrc"
    texts = {path: path.read_text() for path in core.rglob("*") if path.suffix in (".cpp", ".h")}
    assert not [str(path) for path, text in texts.items() if written.search(text)]


def test_that_check_sees_files_that_are_written() -> None:
    for line in (
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('r+')",
        "path.write_text('')",
        "folder.mkdir(parents=True)",
        "os.open(path, flags, 0o600)",
        "os.open(path, os.O_RDWR | os.O_CREAT)",
    ):
        assert list(files_written(line)), line
    for line in ("open(path)", "open(files.create(new), 'wb')", "os.open(path, os.O_RDONLY)"):
        assert not list(files_written(line)), line


def imported_without_a_skip(source: str) -> Iterator[str]:
    """Yield a module's imports of PyTorch that do not follow `pytest.importorskip`."""
    for node in ast.parse(source).body:
        text = ast.unparse(node)
        if "importorskip('torch')" in text:
            return
        if re.match(r"(import|from) (horo_lite\.)?torch\b", text):
            yield text


def test_tests_are_skipped_without_pytorch() -> None:
    """`make test TORCH=`; tests of frameworks run where these are."""
    tests = Path(__file__).parent
    found = {
        str(path): list(imported_without_a_skip(path.read_text()))
        for path in tests.rglob("test_*.py")
        if "frameworks" not in path.parts
    }
    assert len(found) > 100
    assert not {path: texts for path, texts in found.items() if texts}
    skips = 'torch = pytest.importorskip("torch")\n'
    assert not list(imported_without_a_skip(f"{skips}import horo_lite.torch as hvd"))
    assert len(list(imported_without_a_skip(f"from torch import nn\n{skips}"))) == 1


def test_the_source_tree_in_the_docs_has_the_order_of_the_layers() -> None:
    root = PACKAGE.parent
    contract = (root / "pyproject.toml").read_text().partition("\nlayers = [\n")[2]
    layers = [re.findall(r"\w+", line) for line in contract.partition("\n]")[0].splitlines()]
    tree = (root / "ARCHITECTURE.md").read_text().partition("\nhoro_lite/\n")[2]
    shown = re.findall(r"^  (\w+)(?:\.py|/)", tree.partition("\ncsrc/")[0], re.MULTILINE)
    assert shown[0] == "__init__"
    level = {room: i for i, rooms in enumerate(layers) for room in rooms}
    assert set(shown[1:]) == set(level)
    assert shown[1:] == sorted(shown[1:], key=level.__getitem__)


@pytest.mark.launches
@pytest.mark.parametrize("environ", [{}, {"PMI_FD": "7", "PMI_SIZE": "2", "PMI_RANK": "0"}])
def test_importing_the_package_changes_nothing_and_loads_next_to_nothing(
    environ: dict[str, str],
) -> None:
    """Hydra's variables alone are not that launcher, whose child would install hooks."""
    code = """
    import sys, threading
    before = sys.excepthook, threading.excepthook, sys.exit, set(sys.modules)
    import horo_lite
    assert before[:3] == (sys.excepthook, threading.excepthook, sys.exit)
    new = set(sys.modules) - before[3]
    print(*sorted(name for name in new if name.startswith(("horo_lite", "numpy", "mpi4py"))))
    """
    lines = [line.strip() for line in code.strip().splitlines()]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={name: value for name, value in os.environ.items() if "PMI" not in name} | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    modules = ["horo_lite"]
    if environ:
        names = ("context", "errors", "files", "processes", "start")
        modules += [f"horo_lite.{name}" for name in names]
        modules += [f"horo_lite.start.{n}" for n in ("arrivals", "ending", "launcher", "orphans")]
    assert ran.stdout.split() == modules
