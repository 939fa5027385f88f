"""Elastic training as Horovod's documentation shows it for PyTorch."""

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
x = torch.linspace(-1, 1, 64)[:, None]
data = TensorDataset(x, x**2)
sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=16 // hvd.size(), sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 3):  # noqa: B020
        state.sampler.set_epoch(state.epoch)
        for batch_idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(data), target).backward()
            optimizer.step()
            state.sampler.record_batch(batch_idx, loader.batch_size)
            state.batch = batch_idx
            if batch_idx % 2 == 0:
                state.commit()
    state.commit()
    return state.epoch


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = 0.1


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
assert train(state) == 2
total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
assert len(set(hvd.allgather_object(total))) == 1
if hvd.rank() == 0:
    print(f"ranks {hvd.size()} weights {total:.6f}", flush=True)
