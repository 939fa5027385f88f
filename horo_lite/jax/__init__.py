"""JAX and optax over several ranks: `import horo_lite.jax as hvd`.

    world = hvd.init()
    params = hvd.broadcast_parameters(params)
    tx = hvd.DistributedOptimizer(optax.adam(1e-3))

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss)

Each rank is a process with a JAX of its own; nothing here needs `jax.distributed`. Everything that
`horo_lite` has is here as well; what is not among the operations below is called outside jit.
"""

from __future__ import annotations

# ruff: noqa: F401, F403
from horo_lite import *
from horo_lite.jax.operations import *
from horo_lite.jax.optimizer import DistributedOptimizer
from horo_lite.jax.primitive import cause_of, inside_jit
from horo_lite.jax.trees import broadcast_parameters
