"""Handwritten digits with LeNet in MLX, on any number of ranks.

    python digits_mlx.py                       one process
    mpiexec -n 2 python digits_mlx.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from digits import load_digits
from mlx.utils import tree_flatten
from report import Report, arguments

import horo_lite as hvd


class LeNet(nn.Module):
    """LeNet-5 with relu and max pooling, for images `[n, height, width, 1]` of any size."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=2)
        self.full1 = nn.Linear(16 * (height // 4) * (width // 4), 120)
        self.full2 = nn.Linear(120, 84)
        self.full3 = nn.Linear(84, 10)

    def __call__(self, x: mx.array) -> mx.array:
        halved = nn.MaxPool2d(2)
        x = halved(nn.relu(self.conv1(x)))
        x = halved(nn.relu(self.conv2(x))).flatten(1)
        return self.full3(nn.relu(self.full2(nn.relu(self.full1(x)))))


def mean_loss(net: LeNet, images: mx.array, labels: mx.array) -> mx.array:
    return nn.losses.cross_entropy(net(images), labels, reduction="mean")


def main() -> None:
    args = arguments(__doc__, lr=0.003)
    world = hvd.init()

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    mx.random.seed(args.seed + world.rank)
    net = LeNet(*train_images.shape[1:3])
    hvd.broadcast_parameters(net)
    opt = optim.Adam(learning_rate=optim.linear_schedule(args.lr, 0, args.epochs * len(train)))
    opt = hvd.DistributedOptimizer(opt, compression=args.compression)
    loss_and_gradients = nn.value_and_grad(net, mean_loss)

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.size for _, p in tree_flatten(net.parameters())),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            loss, gradients = loss_and_gradients(net, mx.array(images), mx.array(labels))
            mx.eval(loss, gradients)  # so that the exchange is timed alone
            with report.exchange():
                # Weighted, because the ranks' shares of a batch may differ by one image.
                opt.update(net, gradients, weight=len(labels))
            loss_sum += loss.item() * len(labels)
            n_seen += len(labels)
        for images, labels in test:
            n_correct += int((np.array(net(mx.array(images)).argmax(axis=1)) == labels).sum())
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({name: np.array(p) for name, p in tree_flatten(net.parameters())})


if __name__ == "__main__":
    main()
