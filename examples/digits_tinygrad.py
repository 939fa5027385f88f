"""Handwritten digits with LeNet in tinygrad, on any number of ranks.

    python digits_tinygrad.py                       one process
    mpiexec -n 2 python digits_tinygrad.py          two ranks, same result

tinygrad compiles kernels with clang; `DEV=CPU:X86` in the environment avoids it (up to 0.13).
The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TRAINING", "1")  # read as Tensor.training from 0.14 on

import numpy as np
from digits import load_digits
from report import Report, arguments
from tinygrad import Tensor, TinyJit, nn

import horo_lite as hvd


class LeNet:
    """LeNet-5 with relu and max pooling, for images `[n, 1, height, width]` of any size."""

    def __init__(self, height: int, width: int) -> None:
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=2)
        self.full1 = nn.Linear(16 * (height // 4) * (width // 4), 120)
        self.full2 = nn.Linear(120, 84)
        self.full3 = nn.Linear(84, 10)
        # tinygrad's initial weights are so small that the loss stays flat for several epochs.
        for name, p in nn.state.get_state_dict(self).items():
            is_weight = name.endswith("weight")
            p.replace(Tensor.kaiming_normal(*p.shape) if is_weight else Tensor.zeros(*p.shape))

    def __call__(self, x: Tensor) -> Tensor:
        x = self.conv1(x).relu().max_pool2d()
        x = self.conv2(x).relu().max_pool2d().flatten(1)
        return self.full3(self.full2(self.full1(x).relu()).relu())


def main() -> None:
    args = arguments(__doc__, lr=0.05)
    world = hvd.init()
    Tensor.training = True

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    Tensor.manual_seed(args.seed + world.rank)
    net = LeNet(*train_images.shape[1:3])
    hvd.broadcast_parameters(net)
    named = nn.state.get_state_dict(net)
    opt = nn.optim.SGD(list(named.values()), lr=args.lr, momentum=0.9, nesterov=True)
    opt = hvd.DistributedOptimizer(
        opt, named_parameters=named.items(), compression=args.compression
    )

    # Only the computation of the gradients is compiled, not the exchange after it.
    @TinyJit
    def gradients(images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        opt.zero_grad()
        loss = net(images).sparse_categorical_crossentropy(labels).backward()
        return loss, *[p.grad for p in opt.params]

    def tensors(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        return Tensor(images.transpose(0, 3, 1, 2).copy()), Tensor(labels)

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(int(p.numel()) for p in opt.params),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            loss, *grads = gradients(*(x.realize() for x in tensors(images, labels)))
            for p, grad in zip(opt.params, grads, strict=True):
                p.grad = grad
            # Weighted, because the ranks' shares of a batch may differ by one image.
            with report.exchange():
                opt.synchronize(weight=len(labels))
            with opt.skip_synchronize():
                opt.step()
            loss_sum += loss.item() * len(labels)
            n_seen += len(labels)
        opt.lr.assign([args.lr * (1 - (epoch + 1) / args.epochs)]).realize()
        for images, labels in test:
            x, y = tensors(images, labels)
            n_correct += int((net(x).argmax(axis=1) == y).sum().item())
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({name: p.numpy() for name, p in named.items()})


if __name__ == "__main__":
    main()
