"""A benchmark on synthetic images as Horovod's documentation shows it for TensorFlow 2."""

import argparse
import timeit

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=2)
args = parser.parse_args()

hvd.init()
model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, 3, activation="relu", input_shape=(16, 16, 3)),
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.GlobalAveragePooling2D(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([args.batch_size, 16, 16, 3])
target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=9, dtype=tf.int64)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none


@tf.function
def benchmark_step(first_batch):
    with tf.GradientTape() as tape:
        probs = model(data, training=True)
        loss = tf.reduce_mean(tf.losses.sparse_categorical_crossentropy(target[:, 0], probs))
    op = hvd.Adasum if args.use_adasum else hvd.Average
    tape = hvd.DistributedGradientTape(tape, compression=compression, op=op)
    gradients = tape.gradient(loss, model.trainable_variables)
    opt.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        variables = opt.variables() if callable(opt.variables) else opt.variables
        hvd.broadcast_variables(variables, root_rank=0)


def log(s):
    if hvd.rank() == 0:
        print(s, flush=True)


benchmark_step(first_batch=True)
timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
img_secs = []
for _ in range(args.num_iters):
    time = timeit.timeit(
        lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter
    )
    img_secs.append(args.batch_size * args.num_batches_per_iter / time)
weights = [v.numpy() for v in model.trainable_variables]
total = float(sum(np.abs(w).sum(dtype=np.float64) for w in weights))
assert len(set(hvd.allgather_object(total))) == 1
log(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * np.mean(img_secs):.1f}")
