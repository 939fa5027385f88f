"""A CuPy script with the public API, to run under compute-sanitizer."""

from __future__ import annotations

import cupy
from ranks import use_nccl_alone

import horo_lite as hvd


class Descent:
    def __init__(self, params: list[cupy.ndarray]) -> None:
        self.params = params
        self.grads = [cupy.ones_like(p) for p in params]

    def step(self) -> None:
        for param, grad in zip(self.params, self.grads, strict=True):
            param -= 0.5 * grad


world = hvd.init()
use_nccl_alone(world)
inner = Descent([cupy.zeros(n, cupy.float32) for n in (1, 7, 1025, 40_001)])
hvd.broadcast_parameters(inner.params)
for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
    hvd.DistributedOptimizer(inner, compression=compression).step()
for param in inner.params:
    assert cupy.all(param == -1.5)
rows = cupy.arange(12, dtype=cupy.float16).reshape(6, 2)
assert cupy.all(hvd.allgather(rows) == rows)
assert cupy.all(hvd.alltoall(rows) == rows)
assert cupy.all(hvd.allreduce(rows, hvd.Sum, compression=hvd.Compression.fp16) == rows)
hvd.shutdown()
