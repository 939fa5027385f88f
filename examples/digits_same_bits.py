"""Handwritten digits: the same bits on any number of ranks, also if ranks die on the way.

    python digits_same_bits.py                                  one process
    mpiexec -n 3 python digits_same_bits.py                     the same model
    mpiexec --with-ft ulfm -n 4 python digits_same_bits.py --kill 1:30 --kill 2:50

In the last job, rank 1 is killed in step 30 and rank 2 in step 50, and the others continue (with
Open MPI). Each step averages the gradients of 8 micro-batches, in an order that does not depend on
the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import signal

from digits import load_digits
from digits_numpy import SGD, Network

import horo_lite as hvd


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="default %(default)s")
    parser.add_argument("--kill", action="append", default=[], metavar="RANK:STEP")
    args = parser.parse_args()
    kills = dict(tuple(map(int, text.split(":"))) for text in args.kill)

    world = hvd.init(threads=1)  # As many in every job, since results depend on it.
    train_images, train_labels, test_images, test_labels = load_digits(None)
    net = Network(train_images.shape[1:], n_classes=10, seed=0)
    opt = SGD(net.params, lr=0.2)
    micro_batches = hvd.MicroBatches(8, opt, seed=1)
    state = hvd.elastic.State(weights=[p.data for p in net.params], opt=opt, step=0)

    def train(state: hvd.elastic.State) -> None:
        while state.step < args.steps:
            for batch in micro_batches(state.step):
                if kills.get(world.rank) == state.step:
                    os.kill(os.getpid(), signal.SIGKILL)
                samples = batch.samples(train_images, 64)
                net.gradients(train_images[samples], train_labels[samples])
            opt.step()
            state.step += 1

    if kills:
        train = hvd.elastic.run(train)
    train(state)
    if hvd.rank() == 0:
        correct = net.count_correct(test_images, test_labels)
        print(f"{world.size} rank(s) began, {hvd.size()} ended, {args.steps} steps")
        print(f"test accuracy {correct / len(test_labels):.4f}")
        print(f"SHA-256 of the model {hvd.fingerprint([p.data for p in net.params])}", flush=True)


if __name__ == "__main__":
    main()
