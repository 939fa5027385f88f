"""Handwritten digits with autograd (gradients of NumPy functions), on any number of ranks.

    python digits_autograd.py                       one process
    mpiexec -n 2 python digits_autograd.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

from typing import Any

import autograd.numpy as np
from autograd import value_and_grad
from autograd.misc.optimizers import adam
from digits import load_digits
from report import Report, arguments

import horo_lite as hvd

Params = dict[str, dict[str, Any]]


def main() -> None:
    args = arguments(__doc__, lr=0.005)
    world = hvd.init()

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    params = network(train_images[0].size, 64, 10, seed=args.seed + world.rank)
    params = hvd.broadcast_parameters(params)

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.size for layer in params.values() for p in layer.values()),
        dtype="float64",
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        losses, sizes = [], []
        batches = report.batches(train, epoch)

        def gradient(params: Params, step: int) -> Params:
            images, labels = next(batches)  # noqa: B023 (called in this epoch only)
            loss, gradients = value_and_grad(mean_loss)(params, images, labels)
            losses.append(loss * len(labels))  # noqa: B023
            sizes.append(len(labels))  # noqa: B023
            # Weighted, because the ranks' shares of a batch may differ by one image.
            with report.exchange():
                return hvd.average_gradients(
                    gradients, weight=len(labels), compression=args.compression
                )

        step_size = args.lr * (1 - epoch / args.epochs)
        params = adam(gradient, params, num_iters=len(train), step_size=step_size)
        next(batches, None)  # finish the epoch
        n_correct = n_tested = 0
        for images, labels in test:
            n_correct += int((scores(params, images).argmax(axis=1) == labels).sum())
            n_tested += len(labels)
        report.epoch(sum(losses), sum(sizes), n_correct, n_tested)
    report.finish({f"{i}.{name}": p for i in params for name, p in params[i].items()})


def network(n_pixels: int, n_hidden: int, n_classes: int, seed: int) -> Params:
    """Return the parameters of two dense layers with tanh in between."""
    random = np.random.RandomState(seed)
    shapes = {"hidden": (n_pixels, n_hidden), "out": (n_hidden, n_classes)}
    return {
        name: {"weight": random.randn(*shape) / np.sqrt(shape[0]), "bias": np.zeros(shape[1])}
        for name, shape in shapes.items()
    }


def scores(params: Params, images: Any) -> Any:
    hidden, out = params["hidden"], params["out"]
    x = images.reshape(len(images), -1)
    return np.tanh(x @ hidden["weight"] + hidden["bias"]) @ out["weight"] + out["bias"]


def mean_loss(params: Params, images: Any, labels: Any) -> Any:
    """Return the cross-entropy, averaged over the batch."""
    x = scores(params, images)
    x = x - x.max(axis=1, keepdims=True)
    chosen = x[np.arange(len(labels)), labels]
    return np.mean(np.log(np.sum(np.exp(x), axis=1)) - chosen)


if __name__ == "__main__":
    main()
