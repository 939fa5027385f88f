"""Handwritten digits with LeNet in PaddlePaddle, on any number of ranks.

    python digits_paddle.py                       one process
    mpiexec -n 2 python digits_paddle.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import paddle
from digits import load_digits
from paddle import nn
from report import Report, arguments

import horo_lite as hvd


def main() -> None:
    args = arguments(__doc__, lr=0.05)
    world = hvd.init()
    paddle.set_device("cpu")

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    paddle.seed(args.seed + world.rank)
    net = lenet(*train_images.shape[1:3])
    hvd.broadcast_parameters(net)
    schedule = paddle.optimizer.lr.PolynomialDecay(args.lr, args.epochs, end_lr=0)
    opt = paddle.optimizer.Momentum(schedule, momentum=0.9, parameters=net.parameters())
    opt = hvd.DistributedOptimizer(
        opt, named_parameters=net.named_parameters(), compression=args.compression
    )
    mean_loss = nn.CrossEntropyLoss()

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.size for p in net.parameters()),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            opt.clear_grad()
            loss = mean_loss(net(paddle.to_tensor(images)), paddle.to_tensor(labels))
            loss.backward()
            # Weighted, because the ranks' shares of a batch may differ by one image.
            with report.exchange():
                opt.synchronize(weight=len(labels))
            with opt.skip_synchronize():
                opt.step()
            loss_sum += float(loss) * len(labels)
            n_seen += len(labels)
        schedule.step()
        for images, labels in test:
            chosen = net(paddle.to_tensor(images)).argmax(axis=1).numpy()
            n_correct += int((chosen == labels).sum())
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({name: p.numpy() for name, p in net.named_parameters()})


def lenet(height: int, width: int) -> nn.Layer:
    """LeNet-5 with relu and max pooling, for images `[n, height, width, 1]` of any size."""
    weight = paddle.ParamAttr(initializer=nn.initializer.KaimingNormal())
    return nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, [1, height, width]),
        nn.Conv2D(1, 6, 5, padding=2, weight_attr=weight),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Conv2D(6, 16, 5, padding=2, weight_attr=weight),
        nn.ReLU(),
        nn.MaxPool2D(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), 120, weight_attr=weight),
        nn.ReLU(),
        nn.Linear(120, 84, weight_attr=weight),
        nn.ReLU(),
        nn.Linear(84, 10, weight_attr=weight),
    )


if __name__ == "__main__":
    main()
