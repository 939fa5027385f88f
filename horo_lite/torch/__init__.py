"""Horovod's PyTorch API: `import horo_lite.torch as hvd` in place of `import horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod's documentation. Variables of Horovod's that have
a meaning here are honoured; where the HORO_LITE_ one is set, it counts:

    HOROVOD_FUSION_THRESHOLD    HORO_LITE_BUCKET_BYTES: how large a bucket of gradients gets
    HOROVOD_TIMELINE            what `init` gives to `start_timeline`; "DYNAMIC" starts none
"""

from __future__ import annotations

from horo_lite.errors import HoroLiteError as HorovodInternalError  # noqa: F401
from horo_lite.torch.compression import Compression as Compression
from horo_lite.torch.functions import *  # noqa: F403
from horo_lite.torch.mpi_ops import *  # noqa: F403
from horo_lite.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horo_lite.torch.process_sets import (
    ProcessSet as ProcessSet,
)
from horo_lite.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horo_lite.torch.process_sets import (
    add_process_set as add_process_set,
)
from horo_lite.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horo_lite.torch.process_sets import (
    global_process_set as global_process_set,
)
from horo_lite.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horo_lite.torch.process_sets import (
    remove_process_set as remove_process_set,
)
from horo_lite.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from horo_lite.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from horo_lite.torch.timeline import start_timeline as start_timeline
from horo_lite.torch.timeline import stop_timeline as stop_timeline
from horo_lite.torch.world import *  # noqa: F403
from horo_lite.world import (
    cross_rank as cross_rank,
)
from horo_lite.world import (
    cross_size as cross_size,
)
from horo_lite.world import (
    is_homogeneous as is_homogeneous,
)
from horo_lite.world import (
    is_initialized as is_initialized,
)
from horo_lite.world import (
    local_rank as local_rank,
)
from horo_lite.world import (
    local_size as local_size,
)
from horo_lite.world import (
    rank as rank,
)
from horo_lite.world import (
    size as size,
)
