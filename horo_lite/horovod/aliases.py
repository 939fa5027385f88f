"""The name `horovod` for this package: modules under the names that Horovod gives them."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = "0.28.1"
"""The version of Horovod whose API this is: scripts compare `horovod.__version__`."""

PATH = str(Path(__file__).parent / "path")
"""On PYTHONPATH, it makes every Python process of a job find this package as `horovod`."""

# Each module of Horovod, with the modules in which its names are looked up, in order.
_ERRORS = "horo_lite.horovod.exceptions"
_COMMON = ("horo_lite.horovod.world", "horo_lite.horovod.process_sets", "horo_lite.horovod.util")
SOURCES: dict[str, tuple[str, ...]] = {
    "horovod": ("horo_lite.horovod.runner",),
    "horovod.data": ("horo_lite.horovod.data",),
    "horovod.data.data_loader_base": ("horo_lite.horovod.data",),
    "horovod.ray": ("horo_lite.horovod.ray",),
    "horovod.ray.runner": ("horo_lite.horovod.ray",),
    "horovod.runner": ("horo_lite.horovod.runner",),
    "horovod.spark": ("horo_lite.horovod.spark",),
    "horovod.spark.runner": ("horo_lite.horovod.spark",),
    "horovod.common": _COMMON,
    "horovod.common.basics": _COMMON,
    "horovod.common.elastic": ("horo_lite.elastic",),
    "horovod.common.exceptions": (_ERRORS,),
    "horovod.common.process_sets": ("horo_lite.horovod.process_sets",),
    "horovod.common.util": ("horo_lite.horovod.util",),
    "horovod.torch": ("horo_lite.torch",),
    "horovod.torch.compression": ("horo_lite.torch.compression",),
    "horovod.torch.elastic": ("horo_lite.torch.elastic",),
    "horovod.torch.elastic.sampler": ("horo_lite.torch.elastic",),
    "horovod.torch.elastic.state": ("horo_lite.torch.elastic",),
    "horovod.torch.functions": ("horo_lite.torch.functions",),
    "horovod.torch.mpi_ops": ("horo_lite.torch.mpi_ops", "horo_lite.torch"),
    "horovod.torch.optimizer": ("horo_lite.torch.optimizer",),
    "horovod.torch.sync_batch_norm": ("horo_lite.torch.sync_batch_norm",),
    "horovod.tensorflow": ("horo_lite.tensorflow",),
    "horovod.tensorflow.compression": ("horo_lite.tensorflow",),
    "horovod.tensorflow.elastic": ("horo_lite.tensorflow.elastic",),
    "horovod.tensorflow.functions": ("horo_lite.tensorflow",),
    "horovod.tensorflow.mpi_ops": ("horo_lite.tensorflow",),
    "horovod.tensorflow.sync_batch_norm": ("horo_lite.tensorflow",),
    "horovod.tensorflow.keras": ("horo_lite.keras",),
    "horovod.tensorflow.keras.callbacks": ("horo_lite.keras.callbacks",),
    "horovod.tensorflow.keras.elastic": ("horo_lite.keras.elastic",),
    "horovod.keras": ("horo_lite.keras",),
    "horovod.keras.callbacks": ("horo_lite.keras.callbacks",),
    "horovod.keras.elastic": ("horo_lite.keras.elastic",),
}

# What to use instead of missing parts of Horovod.
INSTEAD = {
    "horovod.ray": "horovod.ray has only RayExecutor, with a fixed number of workers",
    "horovod.spark": "horovod.spark.run(fn, num_proc=4) trains with a function; there are no "
    "estimators, and no stores for them",
}


class _Alias(ModuleType):
    """A module under Horovod's name: its names come from other modules, and can be overwritten."""

    _sources: tuple[ModuleType, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return self.__dir__()
        if not name.startswith("__"):
            for source in self._sources:
                if hasattr(source, name):
                    return getattr(source, name)
        instead = INSTEAD.get(".".join(self.__name__.split(".")[:2]), "")
        raise AttributeError(
            f"horo_lite's {self.__name__} has no {name!r}: "
            f"{instead and instead + '; '}docs/from-horovod.md lists what Horovod has and "
            "horo_lite does not"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Functions that refer to such a module are pickled for other processes.
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        names = {
            name for source in self._sources for name in getattr(source, "__all__", dir(source))
        }
        return sorted(name for name in names if not name.startswith("_"))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        if fullname not in SOURCES:
            instead = INSTEAD.get(".".join(fullname.split(".")[:2]))
            raise ModuleNotFoundError(
                f"there is no {fullname}: `horovod` is horo_lite here (docs/from-horovod.md), "
                + (f"and {instead}" if instead else f"which provides {', '.join(sorted(SOURCES))}"),
                name=fullname,
            )
        return ModuleSpec(fullname, self, origin="horo_lite", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, f"{spec.name}, which is {SOURCES[spec.name][0]} of horo_lite.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["_sources"] = tuple(map(import_module, SOURCES[module.__name__]))
        if module.__name__ == "horovod":
            vars(module)["__version__"] = VERSION


_finder = _Finder()


def alias(name: str) -> ModuleType:
    """Return a new module for `name`, the name of one of Horovod's modules."""
    spec = _finder.find_spec(name)
    assert spec is not None
    module = module_from_spec(spec)
    _finder.exec_module(module)
    return module


def install(*, replace: bool = False) -> None:
    """Make `import horovod` import this package, in this process.

    `horovod.torch` is then `horo_lite.torch`, and so on for the modules of Horovod that scripts
    import. Frameworks are imported only with these modules. Call it before the first import of
    `horovod`; a second call changes nothing.

    Args:
        replace: Whether to hide a real Horovod, if one is installed.

    Raises:
        RuntimeError: A real Horovod is installed, or has already been imported.
    """
    if _finder in sys.meta_path:
        return
    loaded = sys.modules.get("horovod")
    if loaded is not None and not getattr(loaded, "is_horo_lite", False):
        raise RuntimeError(
            f"horovod has already been imported, from {getattr(loaded, '__file__', 'elsewhere')}: "
            "call horo_lite.horovod.install() before the first import of horovod"
        )
    found = installed_horovod()
    if found and not replace:
        raise RuntimeError(
            f"{found}: uninstall it, or call horo_lite.horovod.install(replace=True) (on the "
            "command line: --as-horovod-anyway) to use horo_lite in its place"
        )
    sys.meta_path.insert(0, _finder)


def installed_horovod() -> str | None:
    """Return a sentence about the real Horovod that is installed here; None if there is none."""
    path = [place for place in sys.path if place != PATH]
    spec = PathFinder.find_spec("horovod", path)
    if spec is None:
        return None
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return f"a real Horovod, {version}, is installed here ({spec.origin or 'a namespace'})"
