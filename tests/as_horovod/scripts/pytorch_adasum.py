"""A small model trained with Adasum, as Horovod's documentation shows it for PyTorch."""

import argparse

import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--passes", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
if hvd.rank() > 0:
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # so that only the broadcast makes models alike
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
# Adasum needs no learning rate that grows with the number of ranks.
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    backward_passes_per_step=args.passes,
    op=hvd.Adasum,
)
for step in range(args.steps):
    optimizer.zero_grad()
    for i in range(args.passes):
        shift = hvd.rank() + (step * args.passes + i) / 10
        x = torch.linspace(-1, 1, 16, dtype=torch.float64)[:, None] + shift
        torch.nn.functional.mse_loss(model(x), torch.sin(x)).backward()
    optimizer.step()
weights = [parameter.tolist() for parameter in model.parameters()]
assert all(other == weights for other in hvd.allgather_object(weights))
total = sum(parameter.detach().abs().sum().item() for parameter in model.parameters())
if hvd.rank() == 0:
    print(f"ranks {hvd.size()} weights {total:.6f}", flush=True)
