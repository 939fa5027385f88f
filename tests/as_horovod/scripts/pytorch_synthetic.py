"""A benchmark on random images as Horovod's users write them; its figures are not checked."""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=2)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3),
    hvd.SyncBatchNorm(8),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(8, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), groups=2, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data = torch.randn(args.batch_size, 3, 16, 16)
target = torch.randint(0, 10, (args.batch_size,))


def benchmark_step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(data), target).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=2)
    rates.append(args.batch_size * 2 / seconds)
    log(f"Iter: {rates[-1]:.1f} img/sec per CPU")
mean = float(hvd.allreduce(torch.tensor(np.mean(rates)), name="rate"))
parts = hvd.allgather(torch.tensor([hvd.rank()]))
assert parts.tolist() == list(range(hvd.size()))
first = hvd.allgather(next(model.parameters()).detach().flatten()[None])
assert (first == first[0]).all()
log(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * mean:.1f}")
