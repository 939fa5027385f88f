"""A custom training loop as Horovod's documentation shows it for TensorFlow 2."""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.04)
args = parser.parse_args()

hvd.init()
tf.keras.utils.set_random_seed(hvd.rank())
digits = load_digits()
mine = np.arange(768).reshape(-1, hvd.size(), args.batch_size)[:, hvd.rank()].ravel()
data = tf.data.Dataset.from_tensor_slices(
    ((digits.data / 16).astype("float32")[mine], digits.target[mine])
).batch(args.batch_size)
model = tf.keras.Sequential(
    [
        tf.keras.Input((64,)),
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.optimizers.SGD(args.lr * hvd.size(), momentum=0.5)


@tf.function
def training_step(x, y, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    return loss


optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
for epoch in range(args.epochs):
    losses = [training_step(x, y, epoch == 0 and i == 0) for i, (x, y) in enumerate(data)]
    mean = hvd.allreduce(tf.reduce_mean(losses), name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch}: loss {float(mean):.6f}", flush=True)
total = float(sum(np.abs(w).sum(dtype=np.float64) for w in model.get_weights()))
assert len(set(hvd.allgather_object(total))) == 1
if hvd.rank() == 0:
    print(f"ranks {hvd.size()} weights {total:.6f}", flush=True)
