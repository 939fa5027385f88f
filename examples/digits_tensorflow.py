"""Handwritten digits with a small network in TensorFlow 2, in a custom training loop.

    python digits_tensorflow.py                       one process
    mpiexec -n 2 python digits_tensorflow.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from digits import load_digits

import horo_lite.tensorflow as hvd


class Net(tf.Module):
    """Two layers, [n, 64] -> [n, 10]."""

    def __init__(self, n_inputs: int, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)

        def variable(name: str, *shape: int) -> tf.Variable:
            scale = np.sqrt(2 / shape[0]) if len(shape) > 1 else 0
            return tf.Variable(tf.constant(scale * rng.normal(size=shape), tf.float32), name=name)

        self.w1, self.b1 = variable("w1", n_inputs, 128), variable("b1", 128)
        self.w2, self.b2 = variable("w2", 128, 10), variable("b2", 10)

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        x = tf.reshape(images, [-1, self.w1.shape[0]])
        return tf.nn.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=0.2, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    args = parser.parse_args()
    world = hvd.init()

    train_images, train_labels, test_images, test_labels = load_digits(None)
    train, _ = hvd.partition_dataset((train_images, train_labels), 64, seed=args.seed)
    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    net = Net(train_images[0].size, args.seed + world.rank)
    hvd.broadcast_variables(net.variables, root_rank=0)

    @tf.function(reduce_retracing=True)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, net(images))
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape)
        # Weighted, because the ranks' shares of a batch may differ by one image.
        gradients = tape.gradient(loss, net.trainable_variables, weight=tf.size(labels))
        for variable, gradient in zip(net.trainable_variables, gradients, strict=True):
            variable.assign_sub(args.lr * gradient)
        return tf.reduce_sum(losses)

    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum, n_seen = 0.0, 0
        for images, labels in train:
            loss_sum += float(step(tf.constant(images), tf.constant(labels)))
            n_seen += len(labels)
        loss_sum, n_seen = hvd.allreduce(np.array([loss_sum, n_seen]), op=hvd.Sum)
        if world.rank == 0:
            print(f"epoch {epoch + 1:2}  train loss {loss_sum / n_seen:.4f}", flush=True)

    correct = tf.argmax(net(tf.constant(test_images)), axis=1).numpy() == test_labels
    hvd.check_in_sync(net)  # raises if a single bit differs
    if world.rank == 0:
        print(f"test accuracy {correct.mean():.4f}")
        if world.size > 1:
            print(f"parameters bit-identical on all {world.size} ranks")


if __name__ == "__main__":
    main()
