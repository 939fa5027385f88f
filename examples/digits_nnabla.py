"""Handwritten digits with LeNet in NNabla, on any number of ranks.

    python digits_nnabla.py                       one process
    mpiexec -n 2 python digits_nnabla.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

from typing import Any

import nnabla as nn
import nnabla.functions as F
import nnabla.parametric_functions as PF
import nnabla.solvers as S
import numpy as np
from digits import load_digits
from nnabla.initializer import NormalInitializer, calc_normal_std_he_forward
from report import Report, arguments

import horo_lite.nnabla as hvd


def main() -> None:
    args = arguments(__doc__, lr=0.05)
    world = hvd.init(device="cpu")

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    rng = np.random.RandomState(args.seed + world.rank)
    lenet(nn.Variable((1, *train_images.shape[1:])), rng)
    hvd.broadcast_parameters(nn.get_parameters())
    solver = S.Momentum(args.lr, momentum=0.9)
    solver = hvd.DistributedOptimizer(solver, compression=args.compression)
    solver.set_parameters(nn.get_parameters())

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(v.size for v in nn.get_parameters().values()),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        solver.set_learning_rate(args.lr * (1 - epoch / args.epochs))
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            logits = lenet(nn.Variable.from_numpy_array(images))
            target = nn.Variable.from_numpy_array(labels[:, None])
            loss = F.mean(F.softmax_cross_entropy(logits, target))
            loss.forward(clear_no_need_grad=True)
            solver.zero_grad()
            # Weighted, because the ranks' shares of a batch may differ by one image.
            loss.backward(
                clear_buffer=True, function_post_hook=hvd.overlap(solver, weight=len(labels))
            )
            with report.exchange():
                solver.synchronize()
            with solver.skip_synchronize():
                solver.update()
            loss_sum += float(loss.d) * len(labels)
            n_seen += len(labels)
        for images, labels in test:
            logits = lenet(nn.Variable.from_numpy_array(images))
            logits.forward(clear_buffer=True)
            n_correct += int((logits.d.argmax(axis=1) == labels).sum())
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({name: v.d for name, v in nn.get_parameters().items()})


def lenet(images: Any, rng: np.random.RandomState | None = None) -> Any:
    """LeNet-5 with relu and max pooling, for images `[n, height, width, 1]` of any size."""

    def he(n_in: int, n_out: int, kernel: tuple[int, int] = (1, 1)) -> NormalInitializer:
        return NormalInitializer(calc_normal_std_he_forward(n_in, n_out, kernel), rng)

    def convolution(h: Any, n_out: int, pad: int, name: str) -> Any:
        w_init = he(h.shape[1], n_out, (5, 5))
        h = PF.convolution(h, n_out, (5, 5), pad=(pad, pad), w_init=w_init, name=name)
        return F.max_pooling(F.relu(h), (2, 2))

    def affine(h: Any, n_out: int, name: str) -> Any:
        return PF.affine(h, n_out, w_init=he(h.size // h.shape[0], n_out), name=name)

    h = F.reshape(images, (images.shape[0], 1, *images.shape[1:3]))
    h = convolution(convolution(h, 6, 2, "conv1"), 16, 2, "conv2")
    h = F.relu(affine(h, 120, "affine1"))
    h = F.relu(affine(h, 84, "affine2"))
    return affine(h, 10, "affine3")


if __name__ == "__main__":
    main()
