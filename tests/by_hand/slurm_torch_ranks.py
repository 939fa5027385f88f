"""The ranks of slurm.py with PyTorch's backend: they print a digest of training's bits."""

from __future__ import annotations

import hashlib
import socket

import torch
from torch import distributed as dist
from torch import nn

import horo_lite.torch as hvd

dist.init_process_group("horo_lite", init_method="horo-lite://")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for step in range(4):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    (ddp(x) - x[:, :2].sin()).square().mean().backward()
    optimizer.step()
x = torch.randn(size * 1000, generator=torch.Generator().manual_seed(rank))
part, gathered, summed = torch.zeros(1000), torch.zeros(size * 1000), x.clone()
dist.reduce_scatter_tensor(part, x)
dist.all_gather_into_tensor(gathered, part)
dist.all_reduce(summed)
assert torch.equal(gathered, summed), "reduce_scatter and all_reduce differ"
digest = hashlib.sha256(summed.numpy().tobytes())
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
transport = hvd.init().transport
print(f"rank {rank} at {size} {transport} on {socket.gethostname()}: {digest.hexdigest()}")
dist.destroy_process_group()
