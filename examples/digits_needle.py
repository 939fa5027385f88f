"""Handwritten digits with Needle, the framework of CMU 10-414/714, on any number of ranks.

    python digits_needle.py                       one process
    mpiexec -n 2 python digits_needle.py          two ranks

Needle is written by the course's students: add your own to PYTHONPATH. This example uses nn.Linear,
nn.ReLU, nn.Sequential, nn.SoftmaxLoss and optim.Adam. The code that only several ranks need
contains `hvd`.
"""

from __future__ import annotations

from typing import Any

import needle as ndl
import numpy as np
from digits import load_digits
from report import Report, arguments

import horo_lite.needle as hvd


class Pictures(ndl.data.Dataset):  # type: ignore[misc]
    def __init__(self, images: Any, labels: Any) -> None:
        super().__init__()
        self.images, self.labels = images.reshape(len(images), -1), labels

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        return self.images[index], self.labels[index]

    def __len__(self) -> int:
        return len(self.images)


def main() -> None:
    args = arguments(__doc__, lr=0.005)
    rank, device = hvd.init()

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    pictures = Pictures(train_images, train_labels)
    # Different weights and a different order on each rank; without the broadcast the check at the
    # end fails.
    np.random.seed(args.seed + rank)
    train, _ = hvd.partition_dataset(pictures, args.batch_size, device=device, dtype="float32")
    test = Pictures(test_images[rank :: hvd.size()], test_labels[rank :: hvd.size()])

    model = ndl.nn.Sequential(
        ndl.nn.Linear(pictures.images.shape[1], 100, device=device),
        ndl.nn.ReLU(),
        ndl.nn.Linear(100, 10, device=device),
    )
    hvd.broadcast_parameters(model)
    opt = ndl.optim.Adam(model.parameters(), lr=args.lr)
    opt = hvd.DistributedOptimizer(opt, compression=args.compression)
    mean_loss = ndl.nn.SoftmaxLoss()

    report = Report(
        args,
        hvd.world(),
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.numpy().size for p in model.parameters()),
    )
    for epoch in range(args.epochs):
        loss_sum, n_seen = 0.0, 0
        for images, labels in report.batches(train, epoch):
            opt.reset_grad()
            loss = mean_loss(model(images), labels)
            loss.backward()
            with report.exchange():
                opt.synchronize()
            with opt.skip_synchronize():
                opt.step()
            loss_sum += loss.numpy().item() * len(images.numpy())
            n_seen += len(images.numpy())
        scores = model(ndl.Tensor(test.images, device=device)).numpy()
        n_correct = int((scores.argmax(axis=1) == test.labels).sum())
        report.epoch(loss_sum, n_seen, n_correct, len(test))
    report.finish({str(i): p.numpy() for i, p in enumerate(model.parameters())})


if __name__ == "__main__":
    main()
