"""Handwritten digits: averages of parameters every some steps, on ranks with unlike data.

    mpiexec -n 2 python digits_local_sgd.py --every 20
    mpiexec -n 2 python digits_local_sgd.py --every 20 --outer-lr 0.7 --outer-momentum 0.9
    mpiexec -n 2 python digits_local_sgd.py --every 0       never: what a rank learns by itself

Each rank has the images of some digits only, so that it cannot learn the others by itself.
"""

from __future__ import annotations

import argparse

import numpy as np
from digits import load_digits
from digits_numpy import SGD, Network

import horo_lite as hvd


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="default %(default)s")
    parser.add_argument("--every", type=int, default=20, help="default %(default)s")
    parser.add_argument("--outer-lr", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--outer-momentum", type=float, default=0.0, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    args = parser.parse_args()

    world = hvd.init(threads=1)
    train_images, train_labels, test_images, test_labels = load_digits(None)
    mine = np.flatnonzero(train_labels % world.size == world.rank)
    net = Network(train_images.shape[1:], n_classes=10, seed=args.seed)
    weights = [p.data for p in net.params]
    opt = SGD(net.params, lr=0.1)  # each rank's own
    local = hvd.LocalSGD(
        weights,
        every=args.every or args.steps + 1,
        outer_lr=args.outer_lr,
        outer_momentum=args.outer_momentum,
    )
    rng = np.random.default_rng([args.seed, world.rank])
    for _ in range(args.steps):
        samples = rng.choice(mine, 32)
        net.gradients(train_images[samples], train_labels[samples])
        opt.step()
        local.step()
    correct = net.count_correct(test_images, test_labels) / len(test_labels)
    everyone = hvd.allgather_object(correct)
    if world.rank == 0:
        n_averages = args.steps // args.every if args.every else 0
        print(f"{world.size} ranks, {args.steps} steps, {n_averages} averages")
        print("test accuracy of the ranks' models:", *(f"{one:.4f}" for one in everyone))


if __name__ == "__main__":
    main()
