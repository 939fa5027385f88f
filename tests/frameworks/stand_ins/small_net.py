"""A small network in SINGA, and the result of one process on whole batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from singa import autograd, opt, tensor

SHAPES = {"w0": (4, 6), "b0": (6,), "w1": (6, 5), "w2": (3, 5)}
N_STEPS = 4
# One process adds the samples of a batch in another order than several do: float32 has 24 bits, the
# gradients are below 1 and the steps few.
CLOSE = {"rtol": 0, "atol": 2e-6}

Net = dict[str, tensor.Tensor]


def network(seed: int = 0) -> Net:
    rng = np.random.default_rng(seed)
    net = {name: tensor.Tensor(s, stores_grad=True, name=name) for name, s in SHAPES.items()}
    for p in net.values():
        p.copy_from_numpy(rng.standard_normal(p.shape).astype(np.float32) / 2)
    return net


def samples(step: int, n: int = 12) -> tuple[Any, Any]:
    rng = np.random.default_rng(100 + step)
    return rng.standard_normal((n, 4)).astype(np.float32), rng.integers(0, 3, n).astype(np.int32)


def mean_loss(net: Net, x: Any, y: Any) -> tensor.Tensor:
    """Return the loss of the samples; the gradient of w2, used transposed, is transposed."""
    autograd.training = True
    out = tensor.Tensor(data=x, requires_grad=False)
    out = autograd.relu(autograd.add_bias(autograd.matmul(out, net["w0"]), net["b0"]))
    out = autograd.matmul(autograd.matmul(out, net["w1"]), autograd.transpose(net["w2"], (1, 0)))
    return autograd.softmax_cross_entropy(out, tensor.from_numpy(y))


def values(net: Net) -> dict[str, Any]:
    return {name: tensor.to_numpy(p) for name, p in net.items()}


def alone(n_steps: int = N_STEPS) -> dict[str, Any]:
    net = network()
    sgd = opt.SGD(lr=0.3, momentum=0.9)
    for step in range(n_steps):
        sgd(mean_loss(net, *samples(step)))
    return values(net)


def close(net: Net, expected: dict[str, Any]) -> bool:
    return all(np.allclose(array, expected[name], **CLOSE) for name, array in values(net).items())
