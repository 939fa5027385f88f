"""Any framework's optimizer, averaged over ranks: `import horo_lite as hvd`.

Importing it imports no framework, no MPI and no CUDA, and changes nothing in the process, with one
exception. Hydra, the launcher of MPICH and Intel MPI, does not notice if a rank fails before
MPI_Init, and the others wait in MPI_Init forever. There, `start.ending.guard_start` replaces
sys.excepthook, threading.excepthook and sys.exit until `init()` or the end of the process, so that
such a failure ends the job.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo_lite.adapters import Adapter as Adapter
    from horo_lite.adapters import register_adapter as register_adapter
    from horo_lite.collectives.compression import Compression as Compression
    from horo_lite.collectives.compression import Compressor as Compressor
    from horo_lite.collectives.compression import Ranks as Ranks
    from horo_lite.collectives.handle import Handle as Handle
    from horo_lite.collectives.reductions import Average as Average
    from horo_lite.collectives.reductions import Max as Max
    from horo_lite.collectives.reductions import Min as Min
    from horo_lite.collectives.reductions import Op as Op
    from horo_lite.collectives.reductions import Product as Product
    from horo_lite.collectives.reductions import Sum as Sum
    from horo_lite.context import *  # noqa: F403
    from horo_lite.errors import *  # noqa: F403
    from horo_lite.launch.run import run as run
    from horo_lite.ops import *  # noqa: F403
    from horo_lite.start.groups import *  # noqa: F403
    from horo_lite.start.session import *  # noqa: F403
    from horo_lite.start.stall import Straggler as Straggler
    from horo_lite.start.stall import announce as announce
    from horo_lite.start.stall import stragglers as stragglers
    from horo_lite.start.trace import record_step as record_step
    from horo_lite.start.trace import start_timeline as start_timeline
    from horo_lite.start.trace import stop_timeline as stop_timeline
    from horo_lite.start.traffic import Stats as Stats
    from horo_lite.start.traffic import stats as stats
    from horo_lite.state.broadcast import broadcast_optimizer_state as broadcast_optimizer_state
    from horo_lite.state.broadcast import broadcast_parameters as broadcast_parameters
    from horo_lite.state.drift import check_in_sync as check_in_sync
    from horo_lite.state.drift import fingerprint as fingerprint
    from horo_lite.training.data import DistributedSampler as DistributedSampler
    from horo_lite.training.data import partition_dataset as partition_dataset
    from horo_lite.training.gradient_noise import GradientNoise as GradientNoise
    from horo_lite.training.gradient_noise import gradient_noise as gradient_noise
    from horo_lite.training.gradients import average_gradients as average_gradients
    from horo_lite.training.gradients import grad_and_average as grad_and_average
    from horo_lite.training.local_sgd import LocalSGD as LocalSGD
    from horo_lite.training.micro_batches import MicroBatch as MicroBatch
    from horo_lite.training.micro_batches import MicroBatches as MicroBatches
    from horo_lite.training.optimizer import DistributedOptimizer as DistributedOptimizer

__version__ = "0.1.0"

# Where each public name is defined. Nothing is imported before it is used.
_DEFINED_IN = {
    name: module
    for module, names in {
        "adapters": "Adapter register_adapter",
        "state.broadcast": "broadcast_parameters broadcast_optimizer_state",
        "launch.run": "run",
        "collectives.group": "Group",
        "collectives.handle": "Handle",
        "collectives.reductions": "Average Sum Min Max Product Op",
        "ops": "allreduce allreduce_ "
        "allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ "
        "grouped_allreduce_async grouped_allreduce_async_ reducescatter reducescatter_async "
        "allgather allgather_async broadcast broadcast_ broadcast_async broadcast_async_ alltoall "
        "alltoall_async barrier broadcast_object allgather_object synchronize poll join "
        "send recv isend irecv",
        "collectives.compression": "Compression Compressor Ranks",
        "training.data": "DistributedSampler partition_dataset",
        "state.drift": "check_in_sync fingerprint",
        "errors": "HoroLiteError NotInitializedError MismatchError DriftError NonFiniteError "
        "AllocationError PeerLostError TooFewRanksError StallError LauncherError DeviceError "
        "CheckpointError JobError",
        "training.gradient_noise": "GradientNoise gradient_noise",
        "training.gradients": "average_gradients grad_and_average",
        "training.local_sgd": "LocalSGD",
        "training.micro_batches": "MicroBatch MicroBatches",
        "training.optimizer": "DistributedOptimizer",
        "start.stall": "announce stragglers Straggler",
        "start.traffic": "stats Stats",
        "start.trace": "start_timeline stop_timeline record_step",
        "context": "is_initialized world rank size local_rank local_size cross_rank cross_size "
        "is_homogeneous device World Device",
        "start.groups": "new_group free_group",
        "start.session": "init shutdown",
    }.items()
    for name in names.split()
}
__all__ = sorted(_DEFINED_IN)
# Modules that are more than a name, such as horo_lite.jax, imported when first used.
_FACES = {
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


def __getattr__(name: str) -> Any:
    if name in _FACES:
        return import_module(f"{__name__}.{name}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_FACES, "__version__"])


if "PMI_FD" in os.environ:  # others set it, too, and guard_start() does nothing there
    import_module(f"{__name__}.start.ending").guard_start()
