"""Training that survives a killed rank: handwritten digits on ranks that this script starts.

    python restart.py
    python restart.py --ranks 4 --epochs 8 --kill-in-epoch 5

In the middle of an epoch the last rank is killed, as by the OOM killer. The job restarts from its
last commit, and ends with weights that are bit-identical to those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import numpy as np
from digits import load_digits
from digits_numpy import SGD, Network

import horo_lite as hvd


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="default %(default)s")
    parser.add_argument("--epochs", type=int, default=5, help="default %(default)s")
    parser.add_argument("--kill-in-epoch", type=int, default=3, help="default %(default)s")
    args = parser.parse_args()

    print("without interruption:")
    expected = hvd.run(train, (args.epochs, None), np=args.ranks, restarts=1)
    print("\nwith a rank killed:")
    found = hvd.run(train, (args.epochs, args.kill_in_epoch), np=args.ranks, restarts=1)

    pairs = zip(expected[0], found[0], strict=True)
    if not all(np.array_equal(a, b) for a, b in pairs):
        raise SystemExit("the weights differ")
    print("\nthe weights are bit-identical")


def train(n_epochs: int, kill_in_epoch: int | None) -> list[Any]:
    """Return the weights after that many epochs, on each rank."""
    world = hvd.init()
    train_images, train_labels, test_images, test_labels = load_digits(None)
    batches, _ = hvd.partition_dataset((train_images, train_labels), 64)
    net = Network(train_images.shape[1:], n_classes=10, seed=0)
    opt = hvd.DistributedOptimizer(SGD(net.params, lr=0.2))
    # Everything that the rest of the training depends on.
    state = hvd.elastic.State(weights=[p.data for p in net.params], opt=opt, epoch=1)

    @hvd.elastic.run  # Reads the last commit, if there is one, and broadcasts it.
    def go_on(state: Any) -> None:
        while state.epoch <= n_epochs:
            batches.set_epoch(state.epoch)
            for step, (images, labels) in enumerate(batches):
                net.gradients(images, labels)
                is_time = state.epoch == kill_in_epoch and step == len(batches) // 2
                if is_time and world.rank == world.size - 1 and not restarted:
                    os.kill(os.getpid(), signal.SIGKILL)
                opt.step()
            if world.rank == 0:
                correct = net.count_correct(test_images, test_labels)
                print(f"epoch {state.epoch}: test accuracy {correct / len(test_labels):.4f}")
            state.epoch += 1
            state.commit()  # Rank 0 writes it, atomically.

    restarted = os.environ["HORO_LITE_RESTART"] != "0"
    go_on(state)
    return [p.data for p in net.params]


if __name__ == "__main__":
    main()
