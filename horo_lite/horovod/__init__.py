"""Horovod's API: what the modules for all frameworks share, and the import name `horovod`.

    import horo_lite.horovod
    horo_lite.horovod.install()

    import horovod.torch as hvd            # horo_lite.torch

To leave a script unchanged, use `python -m horo_lite -n 4 --as-horovod train.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from horo_lite.horovod.aliases import install as install
from horo_lite.horovod.aliases import installed_horovod as installed_horovod

if TYPE_CHECKING:
    from horo_lite.collectives.reductions import Adasum as Adasum
    from horo_lite.horovod.objects import *  # noqa: F403
    from horo_lite.horovod.process_sets import *  # noqa: F403
    from horo_lite.horovod.world import *  # noqa: F403

# Where the names that the framework modules share are defined. Nothing is imported before it is
# used: the command line needs only `install`.
_DEFINED_IN = {
    name: module
    for module, names in {
        "objects": "allgather_object barrier broadcast_object broadcast_object_fn join",
        "process_sets": "ProcessSet add_process_set global_process_set remove_process_set",
        "reductions": "Adasum",
        "world": "ccl_built cuda_built ddl_built gloo_built gloo_enabled init mpi_built "
        "mpi_enabled mpi_threads_supported nccl_built rocm_built",
    }.items()
    for name in names.split()
}
__all__ = sorted([*_DEFINED_IN, "install", "installed_horovod"])


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
