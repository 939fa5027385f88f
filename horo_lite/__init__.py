"""Any framework's optimizer, averaged over ranks: `import horo_lite as hvd`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo_lite.adapters import Adapter as Adapter
    from horo_lite.adapters import register_adapter as register_adapter
    from horo_lite.broadcast import broadcast_optimizer_state as broadcast_optimizer_state
    from horo_lite.broadcast import broadcast_parameters as broadcast_parameters
    from horo_lite.calls import run as run
    from horo_lite.collectives import *  # noqa: F403
    from horo_lite.compression import Compression as Compression
    from horo_lite.compression import Compressor as Compressor
    from horo_lite.data import DistributedSampler as DistributedSampler
    from horo_lite.data import partition_dataset as partition_dataset
    from horo_lite.drift import check_in_sync as check_in_sync
    from horo_lite.errors import *  # noqa: F403
    from horo_lite.gradients import average_gradients as average_gradients
    from horo_lite.gradients import grad_and_average as grad_and_average
    from horo_lite.join import join as join
    from horo_lite.messages import irecv as irecv
    from horo_lite.messages import isend as isend
    from horo_lite.messages import recv as recv
    from horo_lite.messages import send as send
    from horo_lite.optimizer import DistributedOptimizer as DistributedOptimizer
    from horo_lite.stall import Straggler as Straggler
    from horo_lite.stall import announce as announce
    from horo_lite.stall import stragglers as stragglers
    from horo_lite.world import *  # noqa: F403

__version__ = "0.1.0"

# Where each public name is defined. Nothing is imported before it is used.
_HOME = {
    name: home
    for home, names in {
        "adapters": "Adapter register_adapter",
        "broadcast": "broadcast_parameters broadcast_optimizer_state",
        "calls": "run",
        "collectives": "Average Sum Min Max Product Op Group Handle allreduce allreduce_ "
        "allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ reducescatter reducescatter_async "
        "allgather allgather_async broadcast broadcast_ broadcast_async broadcast_async_ alltoall "
        "alltoall_async barrier broadcast_object allgather_object synchronize poll",
        "compression": "Compression Compressor",
        "data": "DistributedSampler partition_dataset",
        "drift": "check_in_sync",
        "errors": "HoroLiteError NotInitializedError MismatchError DriftError NonFiniteError "
        "PeerLostError TooFewRanksError StallError LauncherError DeviceError CheckpointError "
        "JobError",
        "gradients": "average_gradients grad_and_average",
        "join": "join",
        "messages": "send recv isend irecv",
        "optimizer": "DistributedOptimizer",
        "stall": "announce stragglers Straggler",
        "world": "init shutdown is_initialized world rank size local_rank local_size cross_rank "
        "cross_size is_homogeneous device new_group free_group World Device",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOME)
# What is more than a name: horo_lite.jax and its like, imported when first used.
_FACES = {"elastic", "jax", "keras", "mlx", "needle", "nnabla", "singa", "tensorflow", "torch"}


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the files world.py and broadcast.py must not hide the functions of those names.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.__name__,)  # cloudpickle knows plain modules only


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _FACES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


if "HYDI_CONTROL_FD" in os.environ:
    # MPICH's launcher lets a rank's failure pass that comes before MPI_Init, and the others wait
    # there for ever: from here on it is told.
    import_module(f"{__name__}.world").guard_start()
