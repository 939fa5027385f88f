"""Horovod's TensorFlow 2 API: `import horo_lite.tensorflow as hvd`.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    if is_first_batch:
        hvd.broadcast_variables(variables, root_rank=0)

All of this works eagerly and inside tf.function, where a node of the graph calls Python for the
exchange (tf.numpy_function, in host memory). XLA cannot compile such a node: tf.function(
jit_compile=True) raises an error about a node named horo_lite_needs_jit_compile_False.

Everything in `horo_lite` is available here as well; functions not listed below take eager tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.collectives.reductions import Adasum
from horo_lite.errors import HoroLiteError as HorovodInternalError
from horo_lite.horovod.objects import *
from horo_lite.horovod.process_sets import *
from horo_lite.horovod.world import *
from horo_lite.tensorflow import elastic
from horo_lite.tensorflow.gradients import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    broadcast_,
    broadcast_global_variables,
    broadcast_variables,
)
from horo_lite.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)

# Names that need Keras, which is imported when they are first used.
_WITH_KERAS = {
    "PartialDistributedOptimizer": "horo_lite.keras.optimizer",
    "SyncBatchNormalization": "horo_lite.tensorflow.sync_batch_norm",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_KERAS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_KERAS[name]), name)
