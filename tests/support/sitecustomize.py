"""Spares a job's ranks parts of PyTorch, which take more than half of the time of importing it.

Python runs this file as it starts, if this folder is on PYTHONPATH. Every optimizer of PyTorch
imports the compiler, torch._dynamo (and with it SymPy: 1.7 s of CPU), only to mark functions that
it must not compile. PyTorch itself imports what compilers and exports trace with (a quarter of the
rest) and distributions, which no rank uses. The compiler is executed only if something else of it
is used, and the others if one of them is, together. `torch.testing.assert_close` imports DTensors
to see whether it has been given one, and with them all of these and more: as much as PyTorch. To
note where it defines operators, PyTorch looks through all modules for their source text.

The garbage collector leaves alone what a framework's import creates, which stays until the process
ends: looking through it, again and again, takes a third of the time of PyTorch's import and end.

NumPy adds the docstrings of what is written in C in modules of their own, a tenth of its import,
which ranks do without.

JAX creates an MLIR context for each program that it lowers, and loads all dialects into it, which
is a third of the CPU of lowering a small one, of which a test has hundreds. Here all share one.
The ranks also share a cache of compiled programs, in which one could read what another has written
only half (JAX then warns): here, a file gets its name when it is complete.

Ranks may also be spared packages that are optional: HORO_LITE_TEST_WITHOUT names those that cannot
be imported, as if they were not installed.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
POSTPONED = [  # in PyTorch's own order, until they are executed
    "torch.distributions",
    "torch.export",
    "torch.distributed._meta_registrations",
    "torch._meta_registrations",
    COMPILER,
]
COMPARISON = "torch.testing._comparison"
DOCSTRINGS = ("numpy._core._add_newdocs", "numpy._core._add_newdocs_scalars")
LARGE = ("jax", "keras", "numpy", "torch")
WITHOUT = os.environ.get("HORO_LITE_TEST_WITHOUT", "").split()


def disable(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Do as the compiler's function of this name: neither compile a function nor what it calls.

    PyTorch keeps the result, so it must hold also when the compiler has been executed.
    """
    if function is None:
        return disable
    from torch._C._dynamo import eval_frame

    @wraps(function)
    def disabled(*args: object, **kwargs: object) -> Any:
        return function(*args, **kwargs)

    if hasattr(eval_frame, "_FrameExecStrategy"):  # from PyTorch 2.7 on
        skip = eval_frame._FrameAction.SKIP
        both = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(disabled.__code__, both)
    disabled._torchdynamo_disable = True  # type: ignore[attr-defined]
    return disabled


def graph_break(*_: object, **__: object) -> None:
    """Do nothing: outside of compiled functions, neither does the compiler's."""


def allow_generators() -> None:
    """Do as torch._prims does, without which PyTorch refuses to create a generator."""
    from torch import _C

    for name, metaclass in (
        ("torch._custom_class_base", "CustomClassBaseMeta"),  # from 2.15 on
        ("torch._opaque_base", "OpaqueBaseMeta"),
    ):
        if importlib.util.find_spec(name):
            _C._set_generator_metaclass(getattr(importlib.import_module(name), metaclass))
            return


def execute_uncollected(loader: Any, module: ModuleType) -> None:
    """Execute a module, and exclude from garbage collection what there is then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with places_only() if module.__name__ == "torch" else nullcontext():
            type(loader).exec_module(loader, module)
        if module.__name__ == "jax":
            share_context()
            importlib.import_module("jax._src.lru_cache").LRUCache.put = put_complete  # type: ignore[attr-defined]
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


@contextmanager
def places_only() -> Iterator[None]:
    """Let PyTorch ask for the file and line of its operators' definitions without their text."""
    inspect = importlib.import_module("inspect")
    original = inspect.getframeinfo
    inspect.getframeinfo = partial(original, context=0)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        inspect.getframeinfo = original  # type: ignore[attr-defined]


def share_context() -> None:
    """Let the programs that JAX lowers be modules of one MLIR context."""
    mlir = importlib.import_module("jax._src.interpreters.mlir")
    create = mlir.make_ir_context
    shared = cache(create)

    def context() -> Any:
        # Inside the lowering of another program, MLIR would insert a module of its context there.
        return create() if mlir.ir.Context.current else shared()

    mlir.make_ir_context = context  # type: ignore[attr-defined]


def put_complete(cache: Any, key: str, value: bytes) -> None:
    """Add a compiled program to JAX's cache, where others see all of its file or none."""
    incomplete = f"{cache.path}/{key}.{os.getpid()}.{threading.get_ident()}"
    with open(incomplete, "wb") as file:
        file.write(value)
    os.replace(incomplete, f"{cache.path}/{key}-cache")


class IfImported(str):
    """The name of a module, which is true if that has been imported."""

    def __bool__(self) -> bool:
        """Return whether there may be objects of this module."""
        return str(self) in sys.modules


def execute_comparison(loader: Any, module: ModuleType) -> None:
    """Execute the module of `assert_close`, which looks for DTensors only if there may be any."""
    type(loader).exec_module(loader, module)
    module._HAS_DTENSOR = IfImported("torch.distributed.tensor")  # type: ignore[attr-defined]


class Postponed(ModuleType):
    """One of these modules as long as nobody uses more of it than the functions above."""

    def __getattr__(self, name: str) -> Any:
        """Execute the module. `inspect` asks every module for special attributes."""
        if name.startswith("__"):
            raise AttributeError(name)
        execute_postponed(self.__name__)
        return getattr(self, name)


def execute_postponed(name: str) -> None:
    """Let postponed modules be what they are without this file: all, or all but the compiler."""
    names = [each for each in POSTPONED if each != COMPILER or name == COMPILER]
    POSTPONED[:] = [each for each in POSTPONED if each not in names]
    for module in [sys.modules[each] for each in names if each in sys.modules]:
        module.__class__ = ModuleType
        importlib.reload(module)


class Finder:
    """Postpones the execution of modules to the first import of one inside them, or longer."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a postponed module, or one inside it, which is imported at once."""
        if fullname in WITHOUT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        if fullname in POSTPONED and (spec := PathFinder.find_spec(fullname, path, target)):
            spec.loader = self
            return spec
        if fullname in DOCSTRINGS:
            return ModuleSpec(fullname, Imported(ModuleType(fullname)))
        if fullname in LARGE and (spec := PathFinder.find_spec(fullname, path, target)):
            assert spec.loader
            spec.loader.exec_module = partial(execute_uncollected, spec.loader)  # type: ignore[method-assign]
            return spec
        if fullname == COMPARISON and (spec := PathFinder.find_spec(fullname, path, target)):
            assert spec.loader
            spec.loader.exec_module = partial(execute_comparison, spec.loader)  # type: ignore[method-assign]
            return spec
        if (package := fullname.rpartition(".")[0]) in POSTPONED:
            execute_postponed(package)
            return ModuleSpec(fullname, Imported(importlib.import_module(fullname)))
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Do not execute it yet."""
        module.__class__ = Postponed
        if module.__name__ == COMPILER:
            module.__dict__.update(disable=disable, graph_break=graph_break)
        elif module.__name__ == "torch._meta_registrations":
            allow_generators()


class Imported:
    """Loads a module that the search for it has imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the imported module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore what the import system has changed."""
        module.__spec__ = self._spec


# Importing the base classes for these, of importlib.abc, takes as long as Python's own start.
finder: Any = Finder()
sys.meta_path.insert(0, finder)
