import torch
from torch.nn.functional import mse_loss

import horo_lite.torch as hvd

PASSES = 2


def train(model, batches):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=PASSES
    )
    for i, (inputs, targets) in enumerate(batches, start=1):
        loss = mse_loss(model(inputs), targets) / PASSES  # passes are summed
        loss.backward()  # the last of them exchanges the sum
        if i % PASSES == 0:
            optimizer.step()
            optimizer.zero_grad()
