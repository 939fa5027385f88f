import torch
from torch.nn.functional import mse_loss

import horo_lite.torch as hvd


def train(model, batches):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
    for inputs, targets in batches:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()  # all ranks have the averages
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()  # each updates its share, and receives the others'
    state = optimizer.state_dict()  # on every rank; then rank 0 saves it
    assert len(state["state"]) == len(list(model.parameters()))
