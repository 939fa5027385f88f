"""Elastic training as Horovod's documentation shows it for Keras; here for Keras 3."""

import argparse

import horovod.keras as hvd
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.04)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # so that only the state makes models alike
digits = load_digits()
# Every rank's part of each batch, in the order of batches.
mine = np.arange(768).reshape(-1, hvd.size(), args.batch_size)[:, hvd.rank()].ravel()
x = (digits.data / 16).astype("float32")[mine]
y = digits.target[mine]
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.5))
model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])


def on_state_reset():
    model.optimizer.learning_rate = args.lr * hvd.size()


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])
losses = []


class Losses(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        losses.append(logs["loss"])


@hvd.elastic.run
def train(state):
    state.model.fit(
        x,
        y,
        batch_size=args.batch_size,
        epochs=args.epochs - state.epoch,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            Losses(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=8),
        ],
    )


train(state)
total = float(sum(np.abs(w).sum(dtype=np.float64) for w in model.get_weights()))
assert len(set(hvd.allgather_object(total))) == 1
assert state.epoch == args.epochs
if hvd.rank() == 0:
    for epoch, loss in enumerate(losses):
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    print(f"ranks {hvd.size()} weights {total:.6f}", flush=True)
