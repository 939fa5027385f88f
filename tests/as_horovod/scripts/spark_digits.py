"""Training on Spark as Horovod's documentation shows it: a function for horovod.spark.run."""

import argparse

import horovod.spark
from pyspark.sql import SparkSession

parser = argparse.ArgumentParser()
parser.add_argument("--num-proc", type=int, default=2)
parser.add_argument("--master", default="local-cluster[2,1,1024]")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.04)
args = parser.parse_args()


def train(images, labels, batch_size, lr):
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # so that only the broadcast makes models alike
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    losses = []
    for _ in range(2):
        total = torch.zeros(())
        for begin in range(hvd.rank() * batch_size, len(x), hvd.size() * batch_size):
            part = slice(begin, begin + batch_size)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[part]), y[part])
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
    from sklearn.datasets import load_digits

    digits = load_digits()
    builder = SparkSession.builder.appName("digits").master(args.master)
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    results = horovod.spark.run(
        train,
        args=(digits.data[:768] / 16, digits.target[:768], args.batch_size),
        kwargs={"lr": args.lr},
        num_proc=args.num_proc,
    )
    spark.stop()
    assert len(results) == args.num_proc
    assert all(result == results[0] for result in results)
    size, losses, weights = results[0]
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    print(f"ranks {size} weights {weights:.6f}", flush=True)
