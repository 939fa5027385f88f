"""What the layers may know of each other."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import horo_lite

PACKAGE = Path(horo_lite.__file__).parent
WAYS = {"SoloTransport", "ShmTransport", "MpiTransport", "NcclTransport", "StagedTransport"}


def knowledge_of_transports(source: str) -> Iterator[str]:
    """Yield where the source asks which transport it has, instead of using the interface."""
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
        "from horo_lite.transports.mpi.transport import MpiTransport",
        "world.group.transport.name == 'shm'",
    ):
        assert list(knowledge_of_transports(line)), line
    assert not list(knowledge_of_transports("transport.announce(what, 1.0)"))


def imports(source: str, *, at_run_time: bool) -> set[str]:
    """Return the package's modules that a file imports; without those for type checkers only."""
    tree = ast.parse(source)
    if at_run_time:
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horo_lite"):
            found |= {node.module or "", *(f"{node.module}.{one.name}" for one in node.names)}
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in files()}
    return {name for module in found if (name := module.removeprefix("horo_lite.")) in modules}


def files(*rooms: str) -> list[Path]:
    chosen = [PACKAGE / room for room in rooms] or [PACKAGE]
    return [each for one in chosen for each in ([one] if one.is_file() else one.rglob("*.py"))]


def test_what_worlds_are_made_of_does_not_know_how_they_are_made() -> None:
    rooms = ["context.py", "errors.py", "arguments.py", "timeline.py", "messages.py"]
    rooms += ["adapters", "collectives", "training", "state", "transports"]
    above = ("start", "launch", "elastic")
    found = {
        str(path.relative_to(PACKAGE)): [
            name
            for name in imports(path.read_text(), at_run_time=False)
            if name.split(".")[0] in above
        ]
        for path in files(*rooms)
    }
    assert not {path: names for path, names in found.items() if names}


def test_the_context_imports_the_errors_only() -> None:
    assert imports((PACKAGE / "context.py").read_text(), at_run_time=True) == {"errors"}


def test_start_has_no_cycle() -> None:
    graph = {
        f"start.{path.stem}": imports(path.read_text(), at_run_time=False)
        for path in files("start")
    }
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("start.settings") < order.index("start.session")


@pytest.mark.parametrize(
    "environ", [{}, {"HYDI_CONTROL_FD": "7", "PMI_SIZE": "2", "PMI_RANK": "0"}]
)
def test_importing_the_package_changes_nothing_and_loads_next_to_nothing(
    environ: dict[str, str],
) -> None:
    """MPICH's variables alone are not its launcher, whose child would install hooks."""
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
        modules += [f"horo_lite.{name}" for name in ("context", "errors", "start")]
        modules += ["horo_lite.start.ending", "horo_lite.start.launcher"]
    assert ran.stdout.split() == modules
