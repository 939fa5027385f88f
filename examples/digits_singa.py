"""Handwritten digits with a small network in SINGA, on any number of ranks, with or without GPUs.

    python digits_singa.py                       one process
    mpiexec -n 2 python digits_singa.py          two ranks, same result

The code that only several ranks need contains `hvd`.

Written for SINGA 3 and later; the tests run it with a stub, since PyPI has no SINGA for current
versions of Python.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from digits import load_digits
from report import Report, arguments
from singa import autograd, opt, tensor

import horo_lite.singa as hvd

Net = dict[str, Any]


def main() -> None:
    args = arguments(__doc__, lr=0.1)
    world = hvd.init()

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    net = network([train_images[0].size, 128, 64, 10], seed=args.seed + world.rank)
    hvd.broadcast_parameters(net)
    sgd = opt.SGD(lr=args.lr, momentum=0.9)
    sgd = hvd.DistributedOptimizer(sgd, compression=args.compression)

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.size() for p in net.values()),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            autograd.training = True
            out = logits(net, images)
            loss = autograd.softmax_cross_entropy(out, tensor.from_numpy(labels.astype(np.int32)))
            # Weighted, because the ranks' shares of a batch may differ by one image. Gradients
            # are exchanged during backward(), so the time is that of both together.
            with report.exchange():
                sgd(loss, weight=len(labels))
            loss_sum += float(tensor.to_numpy(loss)[0]) * len(labels)
            n_seen += len(labels)
        autograd.training = False
        for images, labels in test:
            n_correct += int((tensor.to_numpy(logits(net, images)).argmax(1) == labels).sum())
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({name: tensor.to_numpy(p) for name, p in net.items()})


def network(widths: list[int], seed: int) -> Net:
    """Return the weights and biases of a perceptron with these widths."""
    rng = np.random.default_rng(seed)
    net = {}
    for i, (n_in, n_out) in enumerate(pairwise(widths)):
        weights = rng.standard_normal((n_in, n_out)) * np.sqrt(2 / n_in)
        for name, values in ((f"weights{i}", weights), (f"biases{i}", np.zeros(n_out))):
            p = tensor.Tensor(values.shape, requires_grad=True, stores_grad=True, name=name)
            p.copy_from_numpy(values.astype(np.float32))
            net[name] = p
    return net


def logits(net: Net, images: Any) -> Any:
    out = tensor.from_numpy(images.reshape(len(images), -1))
    out.requires_grad = False
    for i in range(len(net) // 2):
        out = out if i == 0 else autograd.relu(out)
        out = autograd.add_bias(autograd.matmul(out, net[f"weights{i}"]), net[f"biases{i}"])
    return out


if __name__ == "__main__":
    main()
