"""JAX and optax over several ranks: `import horo_lite.jax as hvd`.

    world = hvd.init()
    params = hvd.broadcast_parameters(params)
    tx = hvd.DistributedOptimizer(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss)

Each rank is a process with a JAX of its own; nothing here needs `jax.distributed`.
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite.collectives import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather_object,
    barrier,
    broadcast_object,
)
from horo_lite.compression import Compression
from horo_lite.data import DistributedSampler, partition_dataset
from horo_lite.errors import *
from horo_lite.gradients import grad_and_average
from horo_lite.jax.operations import *
from horo_lite.jax.optimizer import DistributedOptimizer
from horo_lite.jax.primitive import cause_of, inside_jit
from horo_lite.jax.trees import broadcast_parameters
from horo_lite.world import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    world,
)
