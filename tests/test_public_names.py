"""The public API in dir(), help(), editors and type checkers, and in errors for a typo."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_threads

import horo_lite as hvd
from horo_lite import ops
from horo_lite.adapters import Adapter
from horo_lite.training.options import Options

FACES = {
    "elastic",
    "horovod",
    "jax",
    "keras",
    "mlx",
    "needle",
    "nnabla",
    "ray",
    "singa",
    "tensorflow",
    "torch",
}
FUNCTIONS = sorted(
    name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))
)  # fmt: skip
OF_A_GROUP = [
    name
    for name in FUNCTIONS
    if "group" in inspect.signature(getattr(hvd, name)).parameters
    and name != "grad_and_average"  # it returns a function, which looks at it
]


def test_dir_shows_the_public_names_only() -> None:
    import horo_lite.state.broadcast  # noqa: F401 (what has been imported is no public name)

    assert set(dir(hvd)) == {*hvd.__all__, *FACES, "__version__"}
    assert callable(hvd.broadcast)


@pytest.mark.parametrize("face", sorted(FACES - {"elastic", "horovod"}))
def test_a_frameworks_module_has_all_names(face: str) -> None:
    """Pages show functions as `hvd.name`, whichever module of horo_lite a script imports as hvd."""
    package = Path(hvd.__file__).parent
    of_elastic = package / face / "elastic.py"
    if of_elastic.exists():
        assert "\nfrom horo_lite.elastic import *\n" in of_elastic.read_text()
    module_file = package / f"{face}.py"
    text = (module_file if module_file.exists() else package / face / "__init__.py").read_text()
    assert "\nfrom horo_lite import *\n" in text
    if face == "torch" and importlib.util.find_spec("torch"):
        module = importlib.import_module("horo_lite.torch")
        assert set(hvd.__all__) - set(dir(module)) == set()


def described(name: str) -> list[str]:
    """Return the arguments that a function's docstring has in its section `Args`."""
    text = (inspect.getdoc(getattr(hvd, name)) or "").partition("\nArgs:\n")[2]
    return re.findall(r"^ {4}(\w+): ", text.partition("\n\n")[0], re.MULTILINE)


def explained(name: str) -> set[str]:
    """Return the arguments that a docstring explains, or those of the functions that it names."""
    if described(name):
        return set(described(name))
    quoted = re.findall(r"`(\w+)`", inspect.getdoc(getattr(hvd, name)) or "")
    others = [explained(other) for other in quoted if other in FUNCTIONS]
    return set(quoted).union(*others)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_says_what_can_be_given(name: str) -> None:
    function = getattr(hvd, name)
    parameters = inspect.signature(function).parameters
    assert "self" not in parameters
    kinds = {p.kind for p in parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert function.__qualname__ == name
    if described(name):
        assert described(name) == list(parameters)
    assert explained(name) >= set(parameters)


def test_the_optimizer_shows_its_options_and_names_a_wrong_one() -> None:
    shown = inspect.signature(hvd.DistributedOptimizer).parameters
    assert list(shown)[:4] == ["optimizer", "parameters", "named_parameters", "compression"]
    assert "options" not in shown
    for option in shown:
        assert option == "optimizer" or f"{option}" in (hvd.DistributedOptimizer.__doc__ or "")
    options: dict[str, Any] = {"compresion": hvd.Compression.fp16}
    with pytest.raises(TypeError, match=r"DistributedOptimizer.*'compresion'"):
        hvd.DistributedOptimizer(Descent([Weight()]), **options)


def test_options_have_the_same_defaults_wherever_they_are_given() -> None:
    wrappers: list[Any] = [hvd.DistributedOptimizer, hvd.average_gradients]
    if importlib.util.find_spec("torch"):
        wrappers.append(importlib.import_module("horo_lite.torch").DistributedOptimizer)
    defaults = {each.name: each.default for each in dataclasses.fields(Options)}
    for wrapper in wrappers:
        given = inspect.signature(wrapper).parameters
        shared = {name: given[name].default for name in given.keys() & defaults}
        assert shared == {name: defaults[name] for name in shared}
        assert {"op", "compression", "group"} <= shared.keys()


@pytest.mark.launches
def test_a_type_checker_finds_a_typo(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "typo.py"
    script.write_text(
        "import horo_lite as hvd\n"
        "opt: object = None\n"
        "hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)\n"
        "hvd.DistributedOptimizer(opt, compresion=hvd.Compression.fp16)\n"
        "hvd.allreduce_async(1.0, hvd.Sum, name='x')\n"
        "hvd.allreduce_async(1.0, nme='x')\n"
    )
    # Independent of installed frameworks, which take most of the time: `make check` covers them.
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n"
        "[mypy-torch.*,jax.*,numpy.*]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", f"--config-file={config}"]
    command += [f"--cache-dir={tmp_path}", str(script)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line.split(":")[1] for line in found.stdout.splitlines() if ": error:" in line]
    assert lines == ["4", "6"], found.stdout + found.stderr


@pytest.mark.parametrize("name", ["allreduce", "allreduce_", "grouped_allreduce", "broadcast"])
def test_a_wrong_argument_is_told_in_public_words(name: str) -> None:
    call: Any = getattr(hvd, name)
    hvd.init()
    try:
        with pytest.raises(TypeError, match=rf"^{name}\(\) .*'compresion'"):
            call(np.ones(2), compresion=None)
        if "reduce" in name:
            with pytest.raises(TypeError, match=rf"^{name}\(\) takes no average=: .*hvd.Sum"):
                call(np.ones(2), average=False)
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("name", OF_A_GROUP)
def test_what_is_not_a_group_is_a_clear_error(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters
    given = {"optimizer": Descent([Weight()]), "gradients": [np.ones(2)]}
    given |= {"params": [np.ones(2)], "xs": [np.ones(2)]}
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.name != "group"]
    hvd.init()
    try:
        with pytest.raises(TypeError, match=r"^group must be what new_group\(\) returned"):
            getattr(hvd, name)(*(given.get(each, np.ones(2)) for each in needed), group=1.5)
    finally:
        hvd.shutdown()


class Weight:
    def __init__(self) -> None:
        self.data = np.zeros(2)
        self.grad = np.ones(2)


class Bare:
    def __init__(self) -> None:
        self.data = np.zeros(2)


class Descent:
    def __init__(self, params: list[Any]) -> None:
        self.params = params

    def step(self) -> None:
        pass


def test_an_adapter_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Adapter):
        def matches(self, obj: object) -> bool:
            return isinstance(obj, (Descent, Bare))

        def parameters(self, owner: Any) -> Any:
            return owner.params if nameless else [("a", p) for p in owner.params]

    monkeypatch.setattr("horo_lite.adapters._registered", [])
    hvd.register_adapter(Own())
    nameless = True

    def rank(group: hvd.Group) -> None:
        with pytest.raises(TypeError, match=r"parameters\(\) of Own contains a Bare instead"):
            hvd.DistributedOptimizer(Descent([Bare()]), group=group)

    run_threads(2, rank)
    nameless = False

    def rank_with_names(group: hvd.Group) -> None:
        optimizer = hvd.DistributedOptimizer(Descent([Bare()]), group=group)
        with pytest.raises(TypeError, match=r"gradient of 'a': a Bare has no .grad: Own needs its"):
            optimizer.step()

    run_threads(2, rank_with_names)


def test_what_cannot_be_sent_is_told_with_its_type() -> None:
    def rank(group: hvd.Group) -> None:
        for call in (ops.allgather_object, ops.broadcast_object):
            with pytest.raises(TypeError, match="a lock cannot be sent to other processes"):
                call(threading.Lock(), group=group)
        with pytest.raises(TypeError, match=r"Python objects .*astype\(float\).*allgather_object"):
            ops.allreduce(np.array([None, 1], object), group=group)
        with pytest.raises(ValueError, match=r"this list differ in shape.*grouped_allreduce"):
            ops.allreduce([np.ones(3), np.ones(2)], group=group)
        with pytest.raises(ValueError, match=r"compression must be hvd.Compression.none, .fp16"):
            hvd.DistributedOptimizer(Descent([Weight()]), compression="fp16", group=group)  # type: ignore[arg-type]

    run_threads(2, rank)


@pytest.mark.launches
def test_run_says_how_it_is_called() -> None:
    wrong: Any = hvd.run
    with pytest.raises(TypeError, match=r"the list of fn's arguments, not 2.*hvd.run\(train, np=2"):
        wrong(print, 2)
    with pytest.raises(ValueError, match=r"np must be the number of ranks.*hvd.run\(fn, np=2\)"):
        wrong(print)
    with pytest.raises(TypeError, match=r"run\(\) needs a function to call on every rank, not 3"):
        wrong(3, np=2)
    with pytest.raises(TypeError, match="the result on rank 0, a lock, cannot be sent"):
        wrong(threading.Lock, np=1)
