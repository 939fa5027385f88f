"""JAX and optax over several ranks: `import horo_lite.jax as hvd`.

    world = hvd.init()
    params = hvd.broadcast_parameters(params)
    tx = hvd.DistributedOptimizer(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss)

Each rank is a process with its own JAX; nothing here needs `jax.distributed`. Everything in
`horo_lite` is available here as well; functions other than the operations below must be called
outside jit.
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.jax.operations import *
from horo_lite.jax.optimizer import DistributedOptimizer
from horo_lite.jax.primitive import cause_of, inside_jit
from horo_lite.jax.sharded_state import *
from horo_lite.jax.trees import broadcast_parameters
