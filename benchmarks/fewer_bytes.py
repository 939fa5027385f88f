"""Train with each wire format between hosts, on ranks with unlike data: accuracy against bytes.

    mpiexec -n 4 python benchmarks/fewer_bytes.py

Every rank counts as a host. Each has the images of some digits only (scikit-learn's), so that a
rank that never communicates cannot learn the others. The network is trained with Adam, from three
seeds. The last rows show averages of parameters every 20 steps, and what a rank learns by itself.

"error": of one average of the trained network's gradients, without error feedback, in the
Euclidean norm, as a multiple of the average's. "bytes": what a rank sends for each parameter in a
step, counted by `hvd.stats()`; a ring of 4 ranks sends 6 in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
os.environ.setdefault("HORO_LITE_TEST_HOSTS", ",".join("1" * 64))

from digits import load_digits

import horo_lite
import horo_lite.torch as hvd

WIRES = ("none", "bf16", "fp16", "int8", "int4")


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )


class Digits:
    """Batches of this rank's digits, and the test of a model on all."""

    def __init__(self) -> None:
        train, labels, test, test_labels = load_digits(None)
        self._train, self._labels = torch.tensor(train), torch.tensor(labels).long()
        self._test, self._test_labels = torch.tensor(test), torch.tensor(test_labels).long()
        self._mine = np.flatnonzero(labels % hvd.size() == hvd.rank())

    def losses(self, model: torch.nn.Module, n_steps: int, seed: int) -> Iterator[torch.Tensor]:
        random = np.random.default_rng([seed, hvd.rank()])
        for _ in range(n_steps):
            samples = random.choice(self._mine, 32)
            outputs = model(self._train[samples])
            yield torch.nn.functional.cross_entropy(outputs, self._labels[samples])

    def test(self, model: torch.nn.Module) -> tuple[float, float]:
        """Return the loss and the accuracy."""
        with torch.no_grad():
            outputs = model(self._test)
            loss = torch.nn.functional.cross_entropy(outputs, self._test_labels)
            return float(loss), float((outputs.argmax(1) == self._test_labels).float().mean())


def averaging_gradients(digits: Digits, wire: str, n_steps: int, seed: int) -> torch.nn.Module:
    model = network(seed)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3), compression=getattr(hvd.Compression, wire)
    )
    for loss in digits.losses(model, n_steps, seed):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def averaging_parameters(digits: Digits, every: int, n_steps: int, seed: int) -> torch.nn.Module:
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    local = horo_lite.LocalSGD(model, every=every)
    for loss in digits.losses(model, n_steps, seed):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
    return model


def errors(digits: Digits, model: torch.nn.Module) -> dict[str, float]:
    """Return the relative error of one average of gradients with each wire format."""
    (loss,) = digits.losses(model, 1, seed=1)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    exact = [hvd.allreduce(x.double()) for x in gradients]
    found = {}
    for wire in WIRES:
        averages = [hvd.allreduce(x, compression=getattr(hvd.Compression, wire)) for x in gradients]
        squares = sum(float((a - x).square().sum()) for a, x in zip(averages, exact, strict=True))
        found[wire] = (squares / sum(float(x.square().sum()) for x in exact)) ** 0.5
    return found


def row(
    title: str, error: float | None, train: Callable[[int], Any], digits: Digits, n: int
) -> str:
    before = horo_lite.stats().bytes_sent
    tests = [digits.test(train(seed)) for seed in range(3)]
    sent = (horo_lite.stats().bytes_sent - before) / n
    # A rank that never communicates has its own result: the best is shown.
    best = min(hvd.allgather_object(tests))
    return (
        f"| {title} | {'–' if error is None else f'{error:.1g}'} | {sent:.3g} "
        f"| {', '.join(f'{loss:.3f}' for loss, _ in best)} "
        f"| {', '.join(f'{correct:.3f}' for _, correct in best)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    digits = Digits()
    n_parameters = sum(p.numel() for p in network(0).parameters())
    n = 3 * options.steps * n_parameters
    error = errors(digits, averaging_gradients(digits, "none", 100, seed=0))
    rows = [
        "| wire | error | bytes | test loss, 3 seeds | test accuracy |",
        "|---|---|---|---|---|",
    ]
    for wire in WIRES:

        def train(seed: int, wire: str = wire) -> torch.nn.Module:
            return averaging_gradients(digits, wire, options.steps, seed)

        rows.append(row(wire, error[wire], train, digits, n))
    for title, every in ("LocalSGD, every 20", 20), ("never", options.steps + 1):

        def train_locally(seed: int, every: int = every) -> torch.nn.Module:
            return averaging_parameters(digits, every, options.steps, seed)

        rows.append(row(title, None, train_locally, digits, n))
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, {n_parameters} parameters, {options.steps} steps\n", flush=True)
        print("\n".join(rows), flush=True)


if __name__ == "__main__":
    main()
