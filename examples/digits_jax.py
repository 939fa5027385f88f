"""Handwritten digits with LeNet in JAX and optax, on any number of ranks.

    python digits_jax.py                       one process
    mpiexec -n 2 python digits_jax.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import load_digits
from jax import lax
from report import Report, arguments

import horo_lite.jax as hvd

Params = dict[str, dict[str, jax.Array]]


def main() -> None:
    args = arguments(__doc__, lr=0.05)
    world = hvd.init()

    arrays = load_digits(args.data)
    train_images, train_labels, test_images, test_labels = arrays
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    height, width = train_images.shape[1:3]
    params = lenet(args.seed + world.rank, height, width)
    params = hvd.broadcast_parameters(params)
    n_steps = args.epochs * len(train)
    tx = optax.sgd(optax.linear_schedule(args.lr, 0, n_steps), momentum=0.9)
    tx = hvd.DistributedOptimizer(tx, compression=args.compression)
    state = tx.init(params)

    @jax.jit
    def step(params: Params, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, images, labels)
        # Weighted, because the ranks' shares of a batch may differ by one image.
        updates, state = tx.update(gradients, state, params, weight=len(labels))
        return optax.apply_updates(params, updates), state, loss

    @jax.jit
    def right(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        return (logits(params, images).argmax(axis=1) == labels).sum()

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.size for p in jax.tree.leaves(params)),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            params, state, loss = step(params, state, images, labels)
            loss_sum += float(loss) * len(labels)
            n_seen += len(labels)
        for images, labels in test:
            n_correct += int(right(params, images, labels))
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish(
        {f"{layer}.{kind}": np.asarray(p) for layer, ps in params.items() for kind, p in ps.items()}
    )


def lenet(seed: int, height: int, width: int) -> Params:
    """LeNet-5 with relu and max pooling, for images `[n, height, width, 1]` of any size."""
    shapes = {
        "conv1": (5, 5, 1, 6),
        "conv2": (5, 5, 6, 16),
        "full1": (16 * (height // 4) * (width // 4), 120),
        "full2": (120, 84),
        "full3": (84, 10),
    }
    rng = np.random.default_rng(seed)  # jax.random would compile for a second for each shape
    return {
        name: {
            "weight": jnp.float32(rng.normal(0, math.sqrt(2 / math.prod(shape[:-1])), shape)),
            "bias": jnp.zeros(shape[-1]),
        }
        for name, shape in shapes.items()
    }


def logits(params: Params, x: jax.Array) -> jax.Array:
    for name in ("conv1", "conv2"):
        x = lax.conv_general_dilated(
            x, params[name]["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[name]["bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    for name in ("full1", "full2"):
        x = jax.nn.relu(x @ params[name]["weight"] + params[name]["bias"])
    return x @ params["full3"]["weight"] + params["full3"]["bias"]


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels)
    return losses.mean()


if __name__ == "__main__":
    main()
