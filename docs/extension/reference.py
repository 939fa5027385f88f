"""The API reference: every public name, from the sources.

`.. face:: horo_lite.torch` documents a module: its docstring, what it defines, and the names that
it shares with `horo_lite`. At the end of a build every public name has to be on a page.
"""

from __future__ import annotations

import inspect
import types
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import horo_lite

from . import docstrings, links

log = logging.getLogger(__name__)

MODULES = (
    *(f"horo_lite.{face}" for face in sorted(horo_lite._FACES)),
    "horo_lite.keras.callbacks",
    "horo_lite.keras.elastic",
    "horo_lite.tensorflow.elastic",
    "horo_lite.torch.ddp_hooks",
    "horo_lite.torch.distributed",
    "horo_lite.torch.elastic",
    "horo_lite.adapters",
    "horo_lite.transports",
)
"""The public modules beside `horo_lite` itself, each on a page of its own or of its framework's."""


@cache
def public_names(module_name: str) -> tuple[list[str], dict[str, str]]:
    """Return the names that a module defines for its users, and those that it has from `horo_lite`.

    Without `__all__` the former are what is defined in the module or below it. The latter are a
    dict: the full name there, by the name here.
    """
    module = import_module(module_name)
    others = [horo_lite.elastic, horo_lite.horovod]
    homes = [horo_lite, *(home for home in others if home.__name__ != module_name)]
    of_ours = {
        id(getattr(home, name)): f"{home.__name__}.{name}"
        for home in homes
        for name in home.__all__
    }
    own, shared = [], {}
    for name in getattr(module, "__all__", vars(module)):
        value = getattr(module, name)
        kind = value if isinstance(value, (type, types.FunctionType)) else type(value)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        if id(value) in of_ours:
            shared[name] = of_ours[id(value)]
        elif f"{kind.__module__}.".startswith(f"{module_name}.") or hasattr(module, "__all__"):
            own.append(name)
    return sorted(own), shared


def required_names() -> set[str]:
    """Return the full name of everything that must be on a page."""
    required = {f"horo_lite.{name}" for name in horo_lite.__all__}
    for module in MODULES:
        required.update(f"{module}.{name}" for name in public_names(module)[0])
    return required


class Face(SphinxDirective):
    """`.. face:: MODULE`: its docstring, and everything that it defines."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {}

    def run(self) -> list[nodes.Node]:
        module_name = self.arguments[0]
        module = import_module(module_name)
        own, shared = public_names(module_name)
        text = [f".. automodule:: {module_name}", "   :no-members:", ""]
        if shared and len(shared) < len(horo_lite.__all__) // 2:
            text += [f"The same as in ``horo_lite``: {', '.join(_same(shared))}.", ""]
        for name in own:
            value = getattr(module, name)
            kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
            text += [f".. auto{kind}:: {module_name}.{name}", ""]
        node = nodes.container()
        self.state.nested_parse(StringList(text, module_name), 0, node)
        return node.children


def _same(shared: dict[str, str]) -> list[str]:
    return [
        f":py:obj:`{here} <{there}>`"
        for here, there in sorted(shared.items(), key=lambda names: names[0].lower())
    ]


class LinkNames(SphinxTransform):
    """`hvd.allreduce(x)` in a page's text links to the reference.

    Not in the first column of a table: there `hvd` may be Horovod.
    """

    default_priority = 700

    def apply(self, **options: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext().removeprefix("hvd.").partition("(")[0]
            if not literal.astext().startswith("hvd.") or name not in horo_lite.__all__:
                continue
            entry, parent = None, literal.parent
            while parent is not None:
                if isinstance(parent, (nodes.reference, addnodes.pending_xref, nodes.title)):
                    break
                entry = parent if isinstance(parent, nodes.entry) else entry
                parent = parent.parent
            if parent is not None or (entry is not None and entry.parent.index(entry) == 0):
                continue
            reference = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=f"horo_lite.{name}", refexplicit=True,
                refdoc=self.env.docname, refwarn=False,
            )  # fmt: skip
            literal.replace_self(reference)
            reference += literal


def _docstring(
    app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]
) -> None:
    def link(text: str) -> str | None:
        if text in horo_lite.__all__ or text == "elastic.run":
            return f"horo_lite.{text}"
        return None

    lines[:] = docstrings.to_rst(lines, link)


def _source(app: Sphinx, docname: str, content: list[str]) -> None:
    if str(app.env.doc2path(docname)).endswith(".md"):
        folder = Path(app.env.doc2path(docname)).parent
        content[0] = links.to_pages(content[0], folder)


def _included(app: Sphinx, path: Path, docname: str, content: list[str]) -> None:
    if path.suffix == ".md":
        content[0] = links.to_pages(content[0], (Path(app.srcdir) / path).resolve().parent)


def _check(app: Sphinx, env: BuildEnvironment) -> None:
    documented = {name for name, *_ in env.get_domain("py").get_objects()}
    for name in sorted(required_names() - documented):
        log.warning("%s is public, and on no page of the API reference", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register all of it."""
    app.add_directive("face", Face)
    app.add_transform(LinkNames)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("source-read", _source)
    app.connect("include-read", _included)
    app.connect("env-check-consistency", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
