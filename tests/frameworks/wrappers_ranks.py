"""Train a small model with the wrapper and on the backend named by the arguments, by torchrun."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horo_lite.torch  # noqa: F401 (registers the backend, also where the package is not installed)

wrapper, backend, result = sys.argv[1], sys.argv[2], Path(sys.argv[3])
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
alone = copy.deepcopy(model)
optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
samples = torch.randn(64, 12)
targets = samples[:, :3].sin()
loader: Any = DataLoader(TensorDataset(samples, targets), batch_size=4)

if wrapper == "accelerate":
    from accelerate import Accelerator

    dist.init_process_group(backend)  # Accelerate only knows the backends of its own list
    accelerator = Accelerator(cpu=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    backward = accelerator.backward

    def mean_of(loss: torch.Tensor) -> torch.Tensor:
        return accelerator.gather(loss).mean()
elif wrapper == "ddp":
    dist.init_process_group(backend)
    wrapped = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(samples, shuffle=False)
    loader = DataLoader(TensorDataset(samples, targets), batch_size=4, sampler=sampler)
    backward = torch.Tensor.backward

    def mean_of(loss: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(loss)
        return loss / dist.get_world_size()
else:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(
        accelerator="cpu", strategy=DDPStrategy(process_group_backend=backend), devices=2
    )
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, optimizer)
    sampler = DistributedSampler(samples, shuffle=False)
    loader = DataLoader(TensorDataset(samples, targets), batch_size=4, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    backward = fabric.backward

    def mean_of(loss: torch.Tensor) -> torch.Tensor:
        return fabric.all_reduce(loss, reduce_op="mean")


assert dist.get_backend() == backend and dist.get_world_size() == 2
losses = []
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x), y)
        backward(loss)
        optimizer.step()
        losses.append(mean_of(loss.detach()))

# One process. The ranks' batches of one step are eight consecutive samples.
optimizer = torch.optim.Adam(alone.parameters(), 0.01)
expected = []
for _ in range(3):
    for x, y in zip(samples.split(8), targets.split(8), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
for a, b in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
torch.save({"model": model.state_dict(), "losses": losses}, f"{result}.{dist.get_rank()}")
