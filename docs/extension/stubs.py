"""Stubs for every framework, so that the API reference is made where none is installed.

Sphinx' own mocks will not do: JAX's adapter unpacks an empty one, and a real annotation such as
`ProcessGroup | None` has no operand in them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar, Union

FRAMEWORKS = {
    "cupy", "distributed", "jax", "jaxlib", "keras", "ml_dtypes", "mlx", "mpi4py", "needle",
    "nnabla", "nnabla_ext", "optax", "paddle", "pyspark", "ray", "singa", "tensorflow",
    "threadpoolctl", "tinygrad", "torch",
}  # fmt: skip
CORE = "horo_lite._native"
"""The compiled core, which thus need not be compiled either."""


class Anything:
    """Any object of a framework: a class to derive from, a function, a decorator or a number."""

    __members__: ClassVar[dict[str, Any]] = {}  # of an enumeration

    def __init__(self, name: str) -> None:
        self.__module__, _, self.__name__ = name.rpartition(".")
        self.__qualname__ = self.__name__

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__module__}.{self.__name__}.{name}")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type(self.__name__, (), {"__module__": self.__module__}),)

    def __call__(self, *args: Any, **options: Any) -> Any:
        decorated = len(args) == 1 and not options and isinstance(args[0], types.FunctionType)
        return args[0] if decorated else self

    def __getitem__(self, key: Any) -> Anything:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Anything]:
        return iter([self])

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007 (`|` is what this defines)

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__name__}"


class StubModule(types.ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # a package, so that it has submodules  # noqa: RUF012

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for a framework, also where the framework is installed."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == CORE or fullname.partition(".")[0] in FRAMEWORKS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """From now on `import torch` and the like give stubs."""
    sys.meta_path.insert(0, Stubs())
