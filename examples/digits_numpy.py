"""Handwritten digits with a convolutional network in plain NumPy, on any number of ranks.

    python digits_numpy.py                       one process
    mpiexec -n 2 python digits_numpy.py          two ranks, same result

The code that only several ranks need contains `hvd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from digits import load_digits
from report import Report, arguments

import horo_lite as hvd

xp = numpy  # The array module. digits_cupy.py replaces it by CuPy, to run on a GPU.
Array = Any


def main() -> None:
    args = arguments(__doc__, lr=0.2)
    world = hvd.init()

    train_images, train_labels, test_images, test_labels = load_digits(args.data)
    train, _ = hvd.partition_dataset((train_images, train_labels), args.batch_size, seed=args.seed)
    test, _ = hvd.partition_dataset((test_images, test_labels), 512, shuffle=False, drop_last=False)

    # Different weights on each rank, on purpose: without the broadcast the check at the end fails.
    net = Network(train_images.shape[1:], n_classes=10, seed=args.seed + world.rank)
    hvd.broadcast_parameters(net.params)
    opt = hvd.DistributedOptimizer(SGD(net.params, args.lr), compression=args.compression)

    report = Report(
        args,
        world,
        n_train=len(train_images),
        n_test=len(test_images),
        parameter_sizes=(p.data.size for p in net.params),
    )
    for epoch in range(args.epochs):
        train.set_epoch(epoch)
        opt.lr = args.lr * (1 - epoch / args.epochs)  # The wrapper passes it on to SGD.
        loss_sum = 0.0
        n_seen = n_correct = n_tested = 0
        for images, labels in report.batches(train, epoch):
            loss = net.gradients(xp.asarray(images), xp.asarray(labels))
            # Weighted, because the ranks' shares of a batch may differ by one image.
            with report.exchange():
                opt.synchronize(weight=len(labels))
            with opt.skip_synchronize():
                opt.step()
            loss_sum += loss * len(labels)
            n_seen += len(labels)
        for images, labels in test:
            n_correct += net.count_correct(xp.asarray(images), xp.asarray(labels))
            n_tested += len(labels)
        report.epoch(loss_sum, n_seen, n_correct, n_tested)
    report.finish({p.name: p.data for p in net.params})


class Parameter:
    """A trainable array, and the gradient of the loss with respect to it."""

    def __init__(self, name: str, data: Array) -> None:
        self.name = name
        self.data = data
        self.grad: Array = None


class SGD:
    """Stochastic gradient descent with momentum."""

    def __init__(self, params: Sequence[Parameter], lr: float, momentum: float = 0.9) -> None:
        self.params = list(params)
        self.lr = lr
        self.momentum = momentum
        self.velocities = [xp.zeros_like(p.data) for p in self.params]

    def step(self) -> None:
        for p, velocity in zip(self.params, self.velocities, strict=True):
            velocity *= self.momentum
            velocity += p.grad
            p.data -= self.lr * velocity


class Network:
    """Twice (convolution, SiLU, pooling), then two dense layers; images are `[n, h, w, channels]`.

    Its gradient is continuous, so that ranks with shares of a batch get the result of one rank with
    the whole batch, regardless of rounding in matrix products. With ReLU or max pooling that may
    fail: which of two values is larger may depend on the last bit, and so on the row's position.
    """

    def __init__(self, image_shape: Sequence[int], n_classes: int, seed: int) -> None:
        random = numpy.random.default_rng(seed)
        height, width, channels = image_shape
        self.layers = [
            Convolution("conv1", channels, 16, random),
            Silu(),
            MeanPool(),
            Convolution("conv2", 16, 32, random),
            Silu(),
            MeanPool(),
            Flatten(),
            Dense("dense1", height // 4 * (width // 4) * 32, 64, random),
            Silu(),
            Dense("dense2", 64, n_classes, random),
        ]
        self.params = [p for layer in self.layers for p in layer.params]

    def forward(self, images: Array) -> Array:
        x = images
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def gradients(self, images: Array, labels: Array) -> float:
        """Return the mean loss of a batch, and store its gradients in the parameters."""
        loss, slope = softmax_cross_entropy(self.forward(images), labels)
        for layer in reversed(self.layers):
            slope = layer.backward(slope)
        return loss

    def count_correct(self, images: Array, labels: Array) -> int:
        return int((self.forward(images).argmax(axis=1) == labels).sum())


def softmax_cross_entropy(logits: Array, labels: Array) -> tuple[float, Array]:
    """Return the mean loss and its gradient with respect to the logits."""
    n = len(labels)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_sum = xp.log(xp.exp(logits).sum(axis=1, keepdims=True))
    rows = xp.arange(n)
    loss = float((log_sum[:, 0] - logits[rows, labels]).mean())
    slope = xp.exp(logits - log_sum)
    slope[rows, labels] -= 1
    return loss, slope / n


class Layer:
    """`forward` saves what `backward` needs to turn the output's gradient into the input's."""

    params: Sequence[Parameter] = ()

    def forward(self, x: Array) -> Array:
        raise NotImplementedError

    def backward(self, slope: Array) -> Array:
        raise NotImplementedError


class Dense(Layer):
    def __init__(self, name: str, n_in: int, n_out: int, random: numpy.random.Generator) -> None:
        # 4: Silu and MeanPool reduce the variance to about a quarter.
        weight = random.normal(0, (4 / n_in) ** 0.5, (n_in, n_out))
        self.weight = Parameter(f"{name}.weight", xp.asarray(weight, dtype=xp.float32))
        self.bias = Parameter(f"{name}.bias", xp.zeros(n_out, xp.float32))
        self.params = (self.weight, self.bias)

    def forward(self, x: Array) -> Array:
        self.x = x
        return x @ self.weight.data + self.bias.data

    def backward(self, slope: Array) -> Array:
        self.weight.grad = self.x.T @ slope
        self.bias.grad = slope.sum(axis=0)
        return slope @ self.weight.data.T


class Convolution(Dense):
    """3 x 3 with zero padding: a dense layer over the 3 x 3 patch around every pixel."""

    def __init__(self, name: str, n_in: int, n_out: int, random: numpy.random.Generator) -> None:
        super().__init__(name, 9 * n_in, n_out, random)

    def forward(self, x: Array) -> Array:
        self.shape = n, height, width, channels = x.shape
        padded = xp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        patches = xp.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
        patches = patches.reshape(n * height * width, channels * 9)
        return super().forward(patches).reshape(n, height, width, -1)

    def backward(self, slope: Array) -> Array:
        n, height, width, channels = self.shape
        patches = super().backward(slope.reshape(n * height * width, -1))
        patches = patches.reshape(n, height, width, channels, 3, 3)
        padded = xp.zeros((n, height + 2, width + 2, channels), slope.dtype)
        for i in range(3):
            for j in range(3):
                padded[:, i : i + height, j : j + width] += patches[..., i, j]
        return padded[:, 1:-1, 1:-1]


class Silu(Layer):
    """`x * sigmoid(x)`: unlike ReLU's, its derivative has no jump that rounding could decide."""

    def forward(self, x: Array) -> Array:
        self.x = x
        self.sigmoid = (1 + xp.tanh(x / 2)) / 2
        return x * self.sigmoid

    def backward(self, slope: Array) -> Array:
        return slope * self.sigmoid * (1 + self.x * (1 - self.sigmoid))


class MeanPool(Layer):
    """The mean of every 2 x 2 pixels; an odd last row or column is dropped."""

    def forward(self, x: Array) -> Array:
        self.shape = n, height, width, channels = x.shape
        x = x[:, : height // 2 * 2, : width // 2 * 2]
        return x.reshape(n, height // 2, 2, width // 2, 2, channels).mean(axis=(2, 4))

    def backward(self, slope: Array) -> Array:
        x = xp.zeros(self.shape, slope.dtype)
        _, height, width, _ = slope.shape
        for i in range(2):
            for j in range(2):
                x[:, i : 2 * height : 2, j : 2 * width : 2] = slope / 4
        return x


class Flatten(Layer):
    def forward(self, x: Array) -> Array:
        self.shape = x.shape
        return x.reshape(len(x), -1)

    def backward(self, slope: Array) -> Array:
        return slope.reshape(self.shape)


if __name__ == "__main__":
    main()
