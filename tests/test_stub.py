"""The stubs of the C++ modules match the modules: names, arguments, defaults and types."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from horo_lite import _native, _testing

# Types that the stub may describe in more detail than nanobind, and how nanobind's begin.
VAGUE = {
    "object": "",
    "object | None": "",
    "Array": "NDArray",
    "Callable": "Callable",
    "Sequence": "Sequence",
    "list": "list",
}
# nanobind's own notation, which is not valid Python.
ARRAY = re.compile(r"numpy\.ndarray\[[^\]]*\]")


class Signature(NamedTuple):
    """What both sides know of a function, a method or a property; for a class nothing."""

    kind: str  # function (or method), static, property, class
    arguments: list[tuple[str, str]]  # name and type
    defaults: list[str]  # of the last arguments
    result: str


def in_stub(module: ModuleType) -> Iterator[tuple[str, Signature]]:
    """Yield the full name and the signature of everything that the stub declares."""
    path = Path(module.__file__ or "").parent / f"{module.__name__.rpartition('.')[2]}.pyi"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, declared(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, Signature("class", [], [], "")
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", declared(member)


def declared(node: ast.FunctionDef) -> Signature:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    kind = {"property": "property", "staticmethod": "static"}[marks[0]] if marks else "function"
    arguments = [
        (a.arg, plain(ast.unparse(a.annotation) if a.annotation else "")) for a in node.args.args
    ]
    defaults = [repr(ast.literal_eval(default)) for default in node.args.defaults]
    assert not node.args.kwonlyargs
    assert not node.args.vararg
    assert not node.args.kwarg
    return Signature(
        kind, arguments, defaults, plain(ast.unparse(node.returns or ast.Constant("")))
    )


def in_module(module: ModuleType) -> Iterator[tuple[str, Signature]]:
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if not isinstance(value, type):
            yield name, made(value, "function")
            continue
        yield name, Signature("class", [], [], "")
        for member, defined in vars(value).items():
            if isinstance(defined, property):
                yield f"{name}.{member}", made(defined.fget, "property")
            elif hasattr(defined, "__nb_signature__") and member != "__new__":
                is_static = type(defined).__name__ == "nb_func"
                yield f"{name}.{member}", made(defined, "static" if is_static else "function")


def made(function: Any, kind: str) -> Signature:
    ((text, _, values),) = function.__nb_signature__
    text = ARRAY.sub("Array", text.replace("def (", "def _("))
    text = re.sub(r"\\\d+", "None", text).replace("typing_extensions.CapsuleType", "object")
    (node,) = ast.parse(f"{text}: ...").body
    assert isinstance(node, ast.FunctionDef)
    arguments = [
        (a.arg, plain(ast.unparse(a.annotation) if a.annotation else "")) for a in node.args.args
    ]
    # A list would be the same object in every call; the stub has a tuple.
    defaults = [repr(tuple(v) if isinstance(v, list) else v) for v in values or ()]
    return Signature(
        kind, arguments, defaults, plain(ast.unparse(node.returns or ast.Constant("")))
    )


def plain(annotation: str) -> str:
    return re.sub(
        r"\b(?:horo_lite\._native|horo_lite\._testing|collections\.abc|typing)\.", "", annotation
    )


def agree(stub: str, module: str) -> bool:
    if stub in (module, f"{module} | None"):  # a null pointer is None, which nanobind omits
        return True
    return module in VAGUE and stub.startswith(VAGUE[module])


@pytest.mark.parametrize("module", [_native, _testing])
def test_the_stub_equals_the_module(module: ModuleType) -> None:
    stub, found = dict(in_stub(module)), dict(in_module(module))
    assert sorted(stub) == sorted(found)
    for name, ours in stub.items():
        theirs = found[name]
        assert ours.kind == theirs.kind, name
        assert [a for a, _ in ours.arguments] == [a for a, _ in theirs.arguments], name
        assert ours.defaults == theirs.defaults, name
        types = [*ours.arguments, ("its result", ours.result)]
        others = [*theirs.arguments, ("its result", theirs.result)]
        for (argument, declared_type), (_, type_) in zip(types, others, strict=True):
            assert agree(declared_type, type_), f"{name}, {argument}: {declared_type} or {type_}"
