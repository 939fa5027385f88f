"""Any framework's optimizer, averaged over ranks: `import horo_lite as hvd`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horo_lite.world import init as init

_HOME = {
    "world": "init shutdown is_initialized world rank size local_rank local_size cross_rank "
    "cross_size is_homogeneous device World Device",
    "collectives": "Average Sum Min Max Product Op Group Handle",
    "compression": "Compression Compressor",
    "optimizer": "DistributedOptimizer",
    "broadcast": "broadcast_parameters broadcast_optimizer_state",
    "adapters": "Adapter register_adapter",
    "data": "DistributedSampler partition_dataset",
    "errors": "HoroLiteError NotInitializedError MismatchError PeerLostError StallError "
    "LauncherError",
}
