"""Train with Lightning on 2 ranks: its DDP on a backend, or an optimizer of horo_lite in its model.

Arguments: the backend, or "horovod"; the file for the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horo_lite.torch as hvd

backend, result = sys.argv[1], Path(sys.argv[2])
by_horovod = backend == "horovod"


class Model(lightning.LightningModule):
    def __init__(self, n_batches: int) -> None:
        super().__init__()
        self.n_batches = n_batches
        layers = nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3)
        self.net = nn.Sequential(*layers)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, i: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if by_horovod:  # an epoch's last step has fewer batches, and Lightning clips after this
            optimizer.synchronize()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.01)
        if by_horovod:
            hvd.broadcast_parameters(self.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(
                optimizer,
                self.named_parameters(),
                backward_passes_per_step=self.n_batches,
                shard_state=self.n_batches > 1,
            )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trained(n_batches: int) -> dict[str, Any]:
    """Return the losses and the model after two epochs of steps of that many batches."""
    options: dict[str, Any] = {"devices": 2, "strategy": DDPStrategy(process_group_backend=backend)}
    if by_horovod:  # Lightning itself sees one process
        options = {"devices": 1, "plugins": [LightningEnvironment()]}
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=64,
        max_epochs=2,
        accumulate_grad_batches=n_batches,
        gradient_clip_val=0.05,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    if by_horovod:
        rank, size = hvd.rank(), hvd.size()
    else:
        rank, size = trainer.global_rank, trainer.world_size
    assert size == 2
    torch.manual_seed(3)
    samples = torch.randn(64, 12)
    data = TensorDataset(samples, samples[:, :3].sin())
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    torch.manual_seed(rank)  # both broadcast rank 0's parameters
    model = Model(n_batches)
    trainer.fit(model, DataLoader(data, batch_size=4, sampler=sampler))
    assert by_horovod or dist.get_backend() == backend
    assert len(model.losses) == 16
    assert model.losses[-1] < model.losses[0]
    return {"rank": rank, "model": model.state_dict(), "losses": model.losses}


if by_horovod:
    hvd.init()
found = [trained(n_batches) for n_batches in (1, 3)]
torch.save(found, f"{result}.{found[0]['rank']}")
