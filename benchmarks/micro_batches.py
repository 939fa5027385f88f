"""Time steps with the same bits on any number of ranks, next to ordinary accumulated steps.

`python benchmarks/micro_batches.py` (or `make bench`) starts mpiexec jobs itself. Both contenders
compute the same gradients, of the same micro-batches: hvd.MicroBatches, and a DistributedOptimizer
with as many backward passes per step. They take turns, so that other load on the machine affects
them equally; a time is the slowest rank's, and a ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from allreduce import drive, rest
from torch import nn

HERE = Path(__file__).resolve()
SAMPLES = 64


def perceptron(width: int) -> Callable[[], tuple[Any, Any, Any]]:
    """Return a function that makes a network with two layers of this width, and its samples."""

    def make() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        layers = nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10)
        return nn.Sequential(*layers), torch.randn(SAMPLES, 256), torch.randint(10, (SAMPLES,))

    return make


def convolutional() -> tuple[Any, Any, Any]:
    """Return a convolutional network and its samples."""
    torch.manual_seed(0)
    layers: list[Any] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))
    return net, torch.randn(SAMPLES, 3, 32, 32), torch.randint(10, (SAMPLES,))


MODELS = {
    "2 layers of 128": perceptron(128),
    "2 layers of 2,048": perceptron(2048),
    "3 convolutions": convolutional,
}


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's part of a job."""
    import horo_lite.torch as hvd

    world = hvd.init(threads=1)
    from mpi4py import MPI

    found = {}
    for name in options.models:
        for n in options.n:
            if n % world.size == 0:
                found[f"{name}, {n}"] = times(MODELS[name], n, options.repeats, MPI.COMM_WORLD)
    return {"times": found}


def times(
    make: Callable[[], tuple[Any, Any, Any]], n: int, repeats: int, comm: Any
) -> list[list[float]]:
    """Return the milliseconds of each contender in every turn; all of their models must agree."""
    import horo_lite.torch as hvd

    passes, rows = n // comm.size, SAMPLES // n
    net, x, y = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    micro_batches = hvd.MicroBatches(n, optimizer)

    def in_micro_batches(step: int) -> None:
        for batch in micro_batches(step):
            part = batch.rows(x)
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
        optimizer.step()

    other, _, _ = make()
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(other.parameters(), lr=0.01), backward_passes_per_step=passes
    )

    def accumulated(step: int) -> None:
        for i in range(comm.rank * passes, (comm.rank + 1) * passes):
            part = slice(i * rows, (i + 1) * rows)
            (nn.functional.cross_entropy(other(x[part]), y[part]) / passes).backward()
        wrapped.step()
        wrapped.zero_grad()

    turns = []
    for step in range(repeats + 2):
        turn = []
        for contender in (in_micro_batches, accumulated):
            rest(comm)
            comm.Barrier()
            began = time.perf_counter()
            contender(step)
            turn.append(1e3 * max(comm.allgather(time.perf_counter() - began)))
        turns.append(turn)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert hvd.check_in_sync(net)
    return turns[2:]


def table(job: dict[str, Any]) -> str:
    """Format medians, and the ratio in the same turn."""
    lines = [
        f"{job['ranks']} rank{'s' * (job['ranks'] > 1)}",
        f"{'model, micro-batches':<28}{'accumulated, ms':>18}{'MicroBatches, ms':>18}"
        f"{'ratio (quartiles)':>24}",
    ]
    for name, turns in job["times"].items():
        ours, theirs = zip(*turns, strict=True)
        low, middle, high = np.quantile(np.divide(ours, theirs), [0.25, 0.5, 0.75])
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        lines.append(
            f"{name:<28}{statistics.median(theirs):>18.1f}{statistics.median(ours):>18.1f}"
            f"{ratio:>24}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="time steps that have the same bits")
    parser.add_argument("--repeats", type=int, default=15, help="turns (default: 15)")
    parser.add_argument("--n", type=int, nargs="+", default=[4, 8], help="micro-batches")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    drive(parser, HERE, work, lambda job: [table(job)], ranks=(1, 2, 4))
