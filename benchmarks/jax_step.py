"""Time the exchange of gradients inside JAX's jit, next to in-place exchange of NumPy arrays.

`python benchmarks/jax_step.py` (or `make bench`) starts mpiexec jobs itself. Within a job all
contenders take turns, so that other load on the machine affects them equally; a time is the slowest
rank's, from the call until the results are available, and a ratio is the median over the turns of a
contender's time divided by NumPy's in the same turn. Every result is compared with the exact
average: a wrong result ends the benchmark.

The compiled functions only exchange, and receive new arrays in every turn: donated, like a step's
own gradients, which may be overwritten, or kept, so that XLA has to copy them first. JAX's overhead
for calling a function with that many arrays is part of every step: it is measured with an identity
function, and subtracted in the last column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from allreduce import MEMCPY, Gradients, drive, resnet50_shapes, rest

HERE = Path(__file__).resolve()
NUMPY = "NumPy arrays, in place"
BARE = "inside jit, nothing exchanged"


# --- inside a rank ----------------------------------------------------------------------------


def ways() -> dict[str, Callable[[list[Any]], Any]]:
    """Return functions of a list of arrays; all but the first take JAX arrays."""
    import jax

    import horo_lite.jax as hvd
    from horo_lite.ops import grouped_allreduce_

    def compiled(way: str, **options: Any) -> Callable[[list[Any]], Any]:
        function = jax.jit(lambda arrays: hvd.grouped_allreduce(arrays), **options)

        def run(arrays: list[Any]) -> Any:
            os.environ["HORO_LITE_INSIDE_JIT"] = way  # read when the function is compiled
            return jax.block_until_ready(function(arrays))

        return run

    bare = jax.jit(lambda arrays: arrays, donate_argnums=0)
    return {
        NUMPY: grouped_allreduce_,
        BARE: lambda arrays: jax.block_until_ready(bare(arrays)),
        "inside jit, donated": compiled("xla", donate_argnums=0),
        "inside jit, kept": compiled("xla"),
        "inside jit, through a callback": compiled("callback", donate_argnums=0),
        "outside jit": lambda arrays: hvd.grouped_allreduce(arrays),
    }


def take_turns(
    gradients: Gradients, field: dict[str, Callable[[list[Any]], Any]], comm: Any
) -> dict[str, float]:
    """Give each contender one turn, check its result, and return its milliseconds."""
    import jax.numpy as jnp

    found: dict[str, float] = {}
    for name, run in field.items():
        gradients.fill(gradients.arrays)
        new = np.array if name == NUMPY else jnp.array
        arrays = [new(array) for array in gradients.arrays]
        for array in arrays:
            if name != NUMPY:
                array.block_until_ready()
        rest(comm)
        comm.Barrier()
        began = time.perf_counter()
        results = run(arrays)
        elapsed = time.perf_counter() - began
        rest(comm)
        expected = gradients.arrays if name == BARE else gradients.averages
        for index, (array, exact) in enumerate(zip(results, expected, strict=True)):
            if not np.array_equal(np.asarray(array).reshape(-1), exact.reshape(-1)):
                raise ValueError(f"{name} is wrong in array {index}")
        found[name] = 1e3 * max(comm.allgather(elapsed))
    if comm.rank == 0:
        began = time.perf_counter()
        for to, array in zip(gradients.copies, gradients.arrays, strict=True):
            np.copyto(to, array)
        found[MEMCPY] = 1e3 * (time.perf_counter() - began)
    rest(comm)
    return found


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's part of a job."""
    import horo_lite as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    gradients = Gradients(resnet50_shapes(), comm.rank, comm.size)
    field = ways()
    turns = [take_turns(gradients, field, comm) for _ in range(options.repeats + 2)][2:]
    times = {name: [turn[name] for turn in turns] for name in turns[0]}
    return {"bytes": gradients.flat.nbytes, "milliseconds": times}


# --- the driver -------------------------------------------------------------------------------


def table(job: dict[str, Any]) -> str:
    """Format medians, and their ratios to NumPy's in the same turn."""
    times: dict[str, Sequence[float]] = job["milliseconds"]
    width = max(map(len, times))
    lines = [
        f"resnet50: {job['bytes'] / 2**20:.1f} MiB in 161 arrays, {job['ranks']} ranks",
        f"{'':<{width}}{'ms':>10}{'× NumPy (quartiles)':>30}{'without the call':>20}",
    ]
    for name, ms in times.items():
        ratios = np.array(ms) / np.array(times[NUMPY])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        line = f"{name:<{width}}{statistics.median(ms):>10.1f}{ratio:>30}"
        if name.startswith("inside jit") and name != BARE:
            beyond = (np.array(ms) - np.array(times[BARE])) / np.array(times[NUMPY])
            line += f"{np.median(beyond):>20.2f}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="time the exchange of gradients inside JAX's jit")
    parser.add_argument("--repeats", type=int, default=15, help="turns (default: 15)")
    drive(parser, HERE, work, lambda job: [table(job)])
