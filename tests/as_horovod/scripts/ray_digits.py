"""Training on a Ray cluster as Horovod's documentation shows it: a function for RayExecutor."""

import argparse

import ray
from horovod.ray import RayExecutor

parser = argparse.ArgumentParser()
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.04)
args = parser.parse_args()


def train(batch_size, lr):
    import horovod.torch as hvd
    import torch
    from digits import load_digits

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # so that only the broadcast makes models alike
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images, labels, *_ = load_digits(None)
    x = torch.tensor(images[:768]).flatten(1)
    y = torch.tensor(labels[:768])
    data = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    losses = []
    for _ in range(2):
        total = torch.zeros(())
        for inputs, labels in torch.utils.data.DataLoader(data, batch_size, sampler=sampler):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total += hvd.allreduce(loss.detach(), name="loss")
        losses.append(total.item())
    return (
        hvd.size(),
        losses,
        sum(p.detach().double().abs().sum().item() for p in model.parameters()),
    )


if __name__ == "__main__":
    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=30), num_workers=args.num_workers)
    executor.start()
    results = executor.run(train, kwargs={"batch_size": args.batch_size, "lr": args.lr})
    executor.shutdown()
    assert len(results) == args.num_workers
    assert all(result == results[0] for result in results)
    size, losses, weights = results[0]
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    print(f"ranks {size} weights {weights:.6f}", flush=True)
