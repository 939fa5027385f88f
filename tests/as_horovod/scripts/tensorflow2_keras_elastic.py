"""Elastic training with tf.keras as Horovod's documentation shows it; for Keras 2 (tf_keras)."""

import argparse

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.04)
parser.add_argument("--legacy", action="store_true")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())
digits = load_digits()
mine = np.arange(768).reshape(-1, hvd.size(), args.batch_size)[:, hvd.rank()].ravel()
dataset = (
    tf.data.Dataset.from_tensor_slices(
        ((digits.data / 16).astype("float32")[mine], digits.target[mine])
    )
    .repeat()
    .batch(args.batch_size)
)
model = keras.Sequential(
    [
        keras.layers.Dense(32, activation="relu", input_shape=(64,)),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
family = keras.optimizers.legacy if args.legacy else keras.optimizers
optimizer = hvd.DistributedOptimizer(family.SGD(args.lr * hvd.size(), momentum=0.5))
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=optimizer,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)


def on_state_reset():
    optimizer.lr.assign(args.lr * hvd.size())


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
losses = []


class Losses(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        losses.append(logs["loss"])


callbacks = [
    hvd.callbacks.MetricAverageCallback(),
    Losses(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=8),
]


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset,
        steps_per_epoch=len(mine) // args.batch_size,
        callbacks=callbacks,
        epochs=args.epochs - state.epoch,
        verbose=0,
    )


train(state)
total = float(sum(np.abs(w).sum(dtype=np.float64) for w in model.get_weights()))
assert len(set(hvd.allgather_object(total))) == 1
assert state.epoch == args.epochs
if hvd.rank() == 0:
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    print(f"ranks {hvd.size()} weights {total:.6f}", flush=True)
