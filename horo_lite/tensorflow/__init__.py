"""Horovod's TensorFlow 2 API: `import horo_lite.tensorflow as hvd`.

    hvd.init()
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    if is_first_batch:
        hvd.broadcast_variables(variables, root_rank=0)

All of that works eagerly and inside tf.function, where Python does the exchange in a node of the
graph (tf.numpy_function, in the host's memory). XLA cannot compile that: tf.function(jit_compile=
True) is an error whose node is called horo_lite_needs_jit_compile_False.

Everything that `horo_lite` has is here as well; what is not listed below takes tensors eagerly.
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.tensorflow.gradients import (
    DistributedGradientTape,
    DistributedOptimizer,
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
    reducescatter,
)
