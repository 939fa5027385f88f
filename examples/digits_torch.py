"""Handwritten digits with LeNet in PyTorch, on any number of ranks.

    python digits_torch.py                       one process
    mpiexec -n 2 python digits_torch.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import torch
from digits import load_digits
from report import Report, arguments
from torch import nn

import horo_lite as hvd


def main() -> None:
    args = arguments(__doc__, lr=0.05)
    world = hvd.init()

    device = str(world.device)
    arrays = [torch.from_numpy(array).to(device) for array in load_digits(args.data)]
    train_images, train_labels, test_images, test_labels = arrays
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    torch.manual_seed(args.seed + world.rank)
    height, width = train_images.shape[1:3]
    net = lenet(height, width).to(device)
    hvd.broadcast_parameters(net)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, compression=args.compression)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1, 0, total_iters=args.epochs)
    mean_loss = nn.CrossEntropyLoss()

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.numel() for p in net.parameters()),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            opt.zero_grad()
            # Weighted, because the ranks' shares of a batch may differ by one image.
            opt.set_weight(len(labels))
            loss = mean_loss(net(images), labels)
            loss.backward()  # overlaps with the exchange of gradients
            opt.step()
            loss_sum += loss.item() * len(labels)
            n_seen += len(labels)
        schedule.step()
        with torch.no_grad():
            for images, labels in test:
                n_correct += int((net(images).argmax(dim=1) == labels).sum())
                n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({name: p.detach().cpu().numpy() for name, p in net.named_parameters()})


def lenet(height: int, width: int) -> nn.Module:
    """LeNet-5 with relu and max pooling, for images `[n, height, width, 1]` of any size."""
    net = nn.Sequential(
        nn.Flatten(),
        nn.Unflatten(1, (1, height, width)),
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
    # PyTorch's default initial weights are so small that the loss stays flat for several epochs.
    for name, p in net.named_parameters():
        if name.endswith("weight"):
            nn.init.kaiming_normal_(p, nonlinearity="relu")
        else:
            nn.init.zeros_(p)
    return net


if __name__ == "__main__":
    main()
