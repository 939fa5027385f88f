"""Handwritten digits with LeNet in Keras 3, on any number of ranks and any backend.

    python digits_keras.py                                          one process
    KERAS_BACKEND=jax mpiexec -n 2 python digits_keras.py           two ranks

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
from digits import load_digits
from keras import layers

import horo_lite.keras as hvd


def main() -> None:
    args = arguments()
    world = hvd.init()

    # Every rank has the same number of images, and so the same number of batches.
    train_images, train_labels, test_images, test_labels = load_digits(None)
    n_each = len(train_images) // world.size
    mine = slice(world.rank * n_each, (world.rank + 1) * n_each)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    keras.utils.set_random_seed(args.seed + world.rank)
    model = lenet(*train_images.shape[1:3])
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    model.compile(
        optimizer=hvd.DistributedOptimizer(
            keras.optimizers.SGD(args.lr, momentum=0.9), compression=compression
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        train_images[mine],
        train_labels[mine],
        batch_size=max(1, args.batch_size // world.size),
        epochs=args.epochs,
        validation_data=(test_images, test_labels),
        verbose=2 if world.rank == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(args.lr, warmup_epochs=2),
        ],
    )

    hvd.check_in_sync(model)  # raises if a single bit differs
    if world.rank == 0:
        print(f"test accuracy {history.history['val_accuracy'][-1]:.4f}")
        if world.size > 1:
            print(f"parameters bit-identical on all {world.size} ranks")
        if args.save:
            model.save(args.save)


def lenet(height: int, width: int) -> keras.Model:
    """LeNet-5 with relu and max pooling, for images `[height, width, 1]` of any size."""
    return keras.Sequential(
        [
            keras.Input((height, width, 1)),
            layers.Conv2D(6, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=12, help="default %(default)s")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        help="images per step, all ranks together (default %(default)s)",
    )
    parser.add_argument("--lr", type=float, default=0.05, help="default %(default)s")
    parser.add_argument(
        "--fp16-allreduce", action="store_true", help="send gradients as 2-byte floats"
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--save", type=Path, metavar="FILE.keras", help="save the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
