import torch
from torch.nn.functional import mse_loss

import horo_lite.torch as hvd


def train(model, batches):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.fp16
    )
    scaler = torch.amp.GradScaler("cpu")
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu"):
            loss = mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()  # averages, still scaled
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)  # every rank skips the same steps
        scaler.update()
