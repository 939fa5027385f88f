"""Training as Horovod's documentation shows it for Keras; it does not mention horo_lite."""

import argparse

import horovod.keras as hvd
import keras
import numpy as np
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.04)
parser.add_argument("--passes", type=int, default=1)
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # so that only the broadcast makes models alike
digits = load_digits()
n = hvd.size() * args.batch_size
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
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    backward_passes_per_step=args.passes,
    average_aggregated_gradients=True,
    compression=hvd.Compression.none,
)
model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=args.lr * hvd.size(), warmup_epochs=1),
]
if args.passes > 1:
    callbacks.pop()
history = model.fit(
    x,
    y,
    batch_size=args.batch_size,
    callbacks=callbacks,
    epochs=args.epochs,
    shuffle=False,
    verbose=0,
)
total = float(sum(np.abs(w).sum(dtype=np.float64) for w in model.get_weights()))
assert float(hvd.allreduce(total, name="weights", average=False)) == total * hvd.size()
if hvd.rank() == 0:
    for epoch, loss in enumerate(history.history["loss"]):
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
    print(f"ranks {hvd.size()} weights {total:.6f}", flush=True)
