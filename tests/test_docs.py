"""The documents: names that they mention exist, and code that they call equivalent is."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import FEATURES
from launch import run_threads
from worlds import script_on_ranks

import horo_lite
from horo_lite import errors

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / f"{name}.md"
    for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY", "CHANGELOG")
]
DOCUMENTS = [*PAGES, *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = ROOT / "docs" / "snippets"

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch"
)


def faces() -> str:
    """Return the text of all modules of horo_lite, without importing any framework."""
    return "\n".join(path.read_text() for path in (ROOT / "horo_lite").rglob("*.py"))


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub generates for a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_version_is_the_same_everywhere() -> None:
    places = {
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## (\S+)",
    }
    for file, line in places.items():
        found = re.search(line, (ROOT / file).read_text(), re.MULTILINE)
        assert found, file
        assert found[1] == horo_lite.__version__, file


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_of_ours_in_a_document_exists(document: Path) -> None:
    # In the left columns of tables `hvd` is Horovod.
    text = re.sub(r"^\| `hvd[^|]*\|", "", document.read_text(), flags=re.MULTILINE)
    names = {name for name in re.findall(r"\bhvd\.(\w+)", text) if name != "py"}
    defined = faces()
    missing = [
        name
        for name in sorted(names)
        if not hasattr(horo_lite, name) and not re.search(rf"\b(def|class) {name}\b", defined)
    ]
    assert not missing
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]*))?\)", text):
        linked = document.parent / path if path else document
        assert linked.exists(), f"a link to {path}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{path} has no heading #{anchor}"
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        made = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert made, f"`make {target}`, which does not exist"


def tree_of_the_architecture() -> list[str]:
    """Return the paths in the tree of ARCHITECTURE.md, in order; folders end with a slash."""
    found: list[str] = []
    folders: list[str] = []
    for line in (ROOT / "ARCHITECTURE.md").read_text().split("```")[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if depth > 2:  # continues the description of the line above
            continue
        for name in line.split():
            if not re.fullmatch(r"\w+(/|\.py|\.h)", name):
                break
            found.append("".join([*folders[:depth], name]))
            if name.endswith("/"):
                folders[depth:] = [name]
    return found


def test_the_tree_of_the_architecture_is_that_of_the_repository() -> None:
    tree = tree_of_the_architecture()
    assert len(tree) > 70
    assert [path for path in tree if not (ROOT / path).exists()] == []
    # If some files of a folder are listed, it has no others.
    for folder in {path.rstrip("/").rpartition("/")[0] for path in tree} - {""}:
        there = {
            f"{folder}/{path.name}{'/' * path.is_dir()}"
            for path in (ROOT / folder).iterdir()
            if path.suffix in (".py", ".h") or (path.is_dir() and not path.name.startswith("_"))
        }
        assert there - {f"{folder}/__init__.py"} <= set(tree), folder


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_what_a_page_for_developers_names_exists(page: str) -> None:
    """Paths, and names in backticks. "NAME" stands for that of a framework."""
    text = (ROOT / page).read_text()
    places = ("horo_lite", "csrc", "tests", "docs", "examples", "benchmarks")
    paths = re.findall(rf"(?<![\w./-])(?:{'|'.join(places)})/[\w./*-]*[\w*]", text)
    assert [path for path in paths if not any(ROOT.glob(path.replace("NAME", "*")))] == []

    files = [*ROOT.glob("*"), *(path for place in places for path in (ROOT / place).rglob("*"))]
    ends = {"/".join(path.parts[i:]) for path in files for i in (-3, -2, -1)}
    ends.add("dist")  # made by `make wheel`
    kinds = (".py", ".h", ".cpp", ".cu", ".md")
    sources = [path for path in files if path.suffix in kinds and path.parent != ROOT]
    sources += [ROOT / name for name in ("Makefile", "pyproject.toml", "setup.py", ".ci/run")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    names = {name for name in re.findall(r"`([^`\s]+)`", prose) if "NAME" not in name}
    is_path = re.compile(r"\w[\w/]*(/|\.(py|h|cpp|cu))")
    is_name = re.compile(r"[A-Za-z_][\w.]*(\(.*\))?")
    assert len(list(filter(is_name.fullmatch, names))) > 40
    missing = [
        name
        for name in names
        if (is_path.fullmatch(name) and name.rstrip("/") not in ends)
        or (
            is_name.fullmatch(name)
            and not is_path.fullmatch(name)
            and not set(re.findall(r"\w+", name.partition("(")[0])) <= words
        )
    ]
    assert missing == []


def loaded(path: Path) -> ModuleType:
    """Return a module of the docs, by its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learned(np: int, rows: str, names: list[str]) -> dict[str, list[float]]:
    """Return what each snippet has learned from `rows` of its batches (see snippets_ranks.py)."""
    script = ROOT / "tests" / "support" / "snippets_ranks.py"
    args = [rows, str(SNIPPETS), *names]
    result = script_on_ranks(script, np, args=args, timeout_s=60)
    found: dict[str, list[float]] = json.loads(result.stdout)
    assert set(found) == set(names)
    return found


@pytest.mark.served
@pytest.mark.mpi
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["any_framework", "shard_state_numpy"], id="numpy"),
        pytest.param(
            ["clip", "accumulate", "mixed_precision", "uneven", "shard_state"],
            id="torch",
            marks=needs_torch,
        ),
    ],
)
def test_snippets_learn_on_two_ranks_what_they_learn_on_one(names: list[str]) -> None:
    shares, whole = learned(2, "shares", names), learned(1, "whole", names)
    half = learned(1, "half", names)
    for name in names:
        # Rounding; with autocast to bfloat16, and on the wire to float16.
        bound = 2e-3 if name == "mixed_precision" else 1e-5
        assert np.abs(np.subtract(shares[name], whole[name])).max() < bound, name
        # What rank 0 would learn alone.
        assert np.abs(np.subtract(half[name], whole[name])).max() > 0.03, name


def test_the_compressor_of_the_docs_sends_the_rest_later() -> None:
    def rank(group: horo_lite.Group) -> list[float]:
        compressor = loaded(SNIPPETS / "compressor.py").LargestTenth()
        total = np.zeros(20)
        for _ in range(40):
            gradient = np.arange(1.0, 21.0) * (1 + 2 * group.rank)
            group.exchange(
                [gradient], names=["g"], label="step", op=horo_lite.Average, compression=compressor
            )
            assert np.count_nonzero(gradient) <= 4
            total += gradient
        return list(total / 40)

    for means in run_threads(2, rank):
        # An element of the residual waits at most until it is among the tensor's largest.
        assert np.allclose(means, 2 * np.arange(1.0, 21.0), atol=8)


def test_every_message_in_troubleshooting_is_one_of_ours_and_every_error_is_there() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = page.partition("## By message\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^|]*)` \|", rows, re.MULTILINE)
    assert len(quoted) > 10
    sources = [*(ROOT / "horo_lite").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    # Messages are written as several literals.
    texts = "\n".join(re.sub(r'"\s+f?"', "", path.read_text()) for path in sources)
    assert [text for text in quoted if text not in texts] == []
    classes = page.partition("## By error class\n")[2].partition("\n## ")[0]
    described = set(re.findall(r"^\| `(\w+)` \|", classes, re.MULTILINE))
    assert described == {
        name
        for name in horo_lite.__all__
        if isinstance(getattr(horo_lite, name), type)
        and issubclass(getattr(horo_lite, name), errors.HoroLiteError)
        and name != "HoroLiteError"
    }


def test_the_figures_of_the_readme_are_those_of_the_measurements() -> None:
    _, _, section = (ROOT / "README.md").read_text().partition("\n## Speed\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    measured = (ROOT / "docs" / "measurements.md").read_text().splitlines()
    assert len(rows) > 4
    assert [row for row in rows if row not in measured] == []


def test_links_between_files_become_links_between_pages() -> None:
    to_pages = loaded(ROOT / "docs" / "extension" / "links.py").to_pages
    for text, page in (
        ("[a](docs/jobs.md#restarts)", "[a](/jobs.md#restarts)"),
        ("[a](docs/frameworks.md)", "[a](/frameworks.md)"),
        ("[a](ARCHITECTURE.md#invariants)", "[a](/architecture.md#invariants)"),
        ("[`x`](examples/digits.py)", "[`x`](/../examples/digits.py)"),
        ("[results](benchmarks/results)", "results"),
        ("[here](#anchor) and x[0](1)", "[here](#anchor) and x[0](1)"),
    ):
        assert to_pages(text, ROOT) == page
    assert to_pages("[a](../README.md)", ROOT / "docs") == "[a](/index.md)"


def test_docstrings_become_rst() -> None:
    to_rst = loaded(ROOT / "docs" / "extension" / "docstrings.py").to_rst
    docstring = ["`init()`ed, `x` and x_ |y|:", "", "    code(`x`)", "", "    more_", "", "End."]
    assert to_rst(docstring, {"init": "horo_lite.init"}.get) == [
        r":py:obj:`init() <horo_lite.init>`\ ed, ``x`` and x\_ \|y\|:",
        *["", "::", ""],
        *["    code(`x`)", "", "    more_", "", "End."],
    ]


@pytest.mark.parametrize("face", sorted(horo_lite._FACES - {"elastic", "horovod", "torch"}))
def test_a_face_has_everything_that_horo_lite_has(face: str) -> None:
    """One import is enough; horo_lite.torch has everything that Horovod's has."""
    (found,) = [
        path
        for path in (ROOT / "horo_lite" / f"{face}.py", ROOT / "horo_lite" / face / "__init__.py")
        if path.exists()
    ]
    assert "from horo_lite import *\n" in found.read_text()


def shown_by(path: Path) -> set[str]:
    """Return the `shows` marks in a file of tests, without importing what it imports."""
    return {
        ast.literal_eval(feature)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.shows"
        for feature in node.args
    }


def test_every_cell_of_the_table_of_frameworks_has_a_test_and_every_test_a_cell() -> None:
    tests = ROOT / "tests"
    # The first word of a row, and its test.
    files = {
        path.stem: [tests / "frameworks" / f"test_{path.stem}.py"]
        for path in tests.glob("frameworks/*.txt")
    }
    files["pytorch"] = [*tests.glob("pytorch/test_*.py")]
    files["numpy"] = [
        *tests.glob("training/test_optimizer.py"),
        *tests.glob("collectives/test_*.py"),
    ]
    _, table = (ROOT / "docs" / "frameworks.md").read_text().split("| framework | tested ")
    rows = {}
    for line in table.split("\n\n")[0].splitlines()[2:]:
        name, version, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        key = re.split(r"\W", name.lower())[0]
        assert len(cells) == len(FEATURES), line
        assert set(cells) <= {"✓", ""}, line
        rows[key] = {feature for feature, cell in zip(FEATURES, cells, strict=True) if cell}
        pins = tests / "frameworks" / f"{key}.txt"
        if pins.exists() and (found := re.search(r"^[\w.\[\]-]+==(\S+)", pins.read_text(), re.M)):
            assert found[1] in version, f"{name} is tested with {found[1]}"
    assert rows == {key: set().union(*map(shown_by, paths)) for key, paths in files.items()}


@pytest.mark.served
@needs_torch
@pytest.mark.mpi
def test_what_stands_beside_torch_distributed_does_the_same(tmp_path: Path) -> None:
    code = f"""
    import torch
    import torch.distributed as dist
    import horo_lite.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    meet = "file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)

    def mine(rows=4):
        return torch.arange(rows * 3.0).reshape(rows, 3) + 100 * rank**2

    theirs, ours = mine(), mine()
    dist.all_reduce(theirs)
    hvd.allreduce_(ours, op=hvd.Sum)
    assert torch.equal(theirs, ours)

    theirs, ours = mine(), mine()
    work, handle = dist.all_reduce(theirs, async_op=True), hvd.allreduce_async_(ours, op=hvd.Sum)
    work.wait()
    hvd.synchronize(handle)
    assert torch.equal(theirs, ours)

    theirs, ours = mine(), mine()
    dist.broadcast(theirs, 1)
    hvd.broadcast_(ours, 1)
    assert torch.equal(theirs, ours)

    theirs = mine()
    dist.reduce(theirs, 1)
    ours = hvd.allreduce(mine(), op=hvd.Sum)
    assert rank != 1 or torch.equal(theirs, ours)

    theirs = [torch.empty(4, 3) for _ in range(size)]
    dist.all_gather(theirs, mine())
    assert torch.equal(torch.cat(theirs), hvd.allgather(mine()))

    theirs = torch.empty(2, 3)
    dist.reduce_scatter(theirs, list(mine(2 * size).chunk(size)))
    assert torch.equal(theirs, hvd.reducescatter(mine(2 * size), op=hvd.Sum))

    theirs, rows = torch.empty(2, 3), mine(2 * size) if rank == 1 else torch.empty(0, 3)
    dist.scatter(theirs, list(rows.chunk(size)) if rank == 1 else None, src=1)
    ours, _ = hvd.alltoall(rows, [2 if rank == 1 else 0] * size)
    assert torch.equal(theirs, ours)

    theirs = torch.empty(2 * size, 3)
    dist.all_to_all_single(theirs, mine(2 * size))
    ours, _ = hvd.alltoall(mine(2 * size), [2] * size)
    assert torch.equal(theirs, ours)

    theirs = [{{"rank": rank}}]
    dist.broadcast_object_list(theirs, src=1)
    assert theirs == [hvd.broadcast_object({{"rank": rank}}, root_rank=1)] == [{{"rank": 1}}]

    theirs = [None] * size
    dist.all_gather_object(theirs, rank)
    assert theirs == hvd.allgather_object(rank)

    pair, part = dist.new_group([0, 1]), hvd.add_process_set([0, 1])
    if rank < 2:
        theirs, ours = mine(), mine()
        dist.all_reduce(theirs, group=pair)
        hvd.allreduce_(ours, op=hvd.Sum, process_set=part)
        assert torch.equal(theirs, ours)

    # The tutorial's trainer.
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    model(mine()).square().sum().backward()
    theirs = [p.grad.clone() for p in model.parameters()]
    for gradient in theirs:
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
        gradient /= size
    ours = hvd.grouped_allreduce([p.grad for p in model.parameters()])
    for p, a, b in zip(model.parameters(), theirs, ours):
        hvd.allreduce_(p.grad)
        assert torch.allclose(a, b, rtol=1e-6) and torch.equal(b, p.grad)

    dist.barrier()
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()
    print("alike")
    """
    result = script_on_ranks(code, 3, timeout_s=90)
    assert result.stdout.count("alike") == 3
