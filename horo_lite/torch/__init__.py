"""Horovod's PyTorch API: `import horo_lite.torch as hvd` in place of `import horovod.torch as hvd`.

Names, arguments and meaning are those of Horovod's documentation. Everything else in `horo_lite`,
such as `LocalSGD` and its errors, is available here as well. These environment variables of Horovod
are honoured; the corresponding HORO_LITE_ variable takes precedence:

    HOROVOD_FUSION_THRESHOLD    HORO_LITE_BUCKET_BYTES: size of a bucket of gradients
    HOROVOD_TIMELINE            HORO_LITE_TIMELINE: file of the timeline that `init` starts;
                                "DYNAMIC": none
    HOROVOD_STALL_CHECK_TIME_SECONDS, HOROVOD_STALL_SHUTDOWN_TIME_SECONDS
                                HORO_LITE_STALL_WARN_S, HORO_LITE_STALL_ABORT_S
    HOROVOD_STALL_CHECK_DISABLE HORO_LITE_STALL_WARN_S=0
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.autoload import register as _register
from horo_lite.errors import HoroLiteError as HorovodInternalError
from horo_lite.horovod.process_sets import *
from horo_lite.horovod.world import *
from horo_lite.torch import elastic
from horo_lite.torch.compression import Compression
from horo_lite.torch.data_parallel import DistributedDataParallel
from horo_lite.torch.functions import *
from horo_lite.torch.mpi_ops import *
from horo_lite.torch.optimizer import DistributedOptimizer
from horo_lite.torch.sync_batch_norm import SyncBatchNorm

_register()  # torch does this itself only if the package's entry points are installed
