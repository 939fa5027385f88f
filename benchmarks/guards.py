"""The cost of a step's default and optional checks, and of a timeline.

`python benchmarks/guards.py` (or `make bench`) starts mpiexec jobs itself. Within a job all
contenders take turns, as in `horo-lite bench`; a time is the slowest rank's, and every result is
compared with the exact one. The cost of a check is the median, over the turns, of the additional
time of a step with it over the bare exchange in the same turn: collecting the gradients, a
handshake that compares nothing, and the reduction, in separate shared memory without stall
detection.

The second set has the same number of arrays with one element each: there the exchange is little
more than the handshake, and the cost of checks, which does not depend on sizes, is most visible.

The cost of a timeline is the median of the additional time over a step without one in the same
turn, each right after another such step; starting and completing it is not counted. The rows below
it show a rank's time to record an operation, which it always does, without and with a timeline. A
training step also has forward and backward passes, so its share is smaller.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from allreduce import MEMCPY, Gradients, drive, resnet50_shapes, take_turns

from horo_lite.launch.bench import Array, Way

HERE = Path(__file__).resolve()
SETS: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "resnet50": resnet50_shapes,
    "161x1": lambda: [(1,)] * 161,
}
BARE = "bare exchange"
WATCHED = "the same, with stall detection"
STEP = "step, default checks"
WITHOUT = "step, once more"
TIMELINE = "the same, with a timeline"
RECORDING = "recording an operation, µs"
RECORDING_TIMELINE = "recording an operation with a timeline, µs"
N_RECORDED = 1000  # operations, so that milliseconds for all are microseconds for one
COMPARISON = "check_in_sync"


# --- inside a rank ----------------------------------------------------------------------------


class Parameter:
    def __init__(self, data: Array, grad: Array) -> None:
        self.data, self.grad = data, grad


class Idle:
    """An optimizer whose step costs nothing."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        pass


def unwatched(comm: Any) -> Any:
    """Create a group of the ranks, all on this host, in separate shared memory."""
    from horo_lite._native import Segment, ShmGroup

    n_bytes = ShmGroup.memory_bytes(comm.size)
    segment = Segment.create(n_bytes) if comm.rank == 0 else None
    where = comm.bcast(segment and (os.getpid(), segment.fd, segment.token))
    segment = segment or Segment.open(where[0], where[1], n_bytes, where[2])
    comm.Barrier()
    segment.close_descriptor()
    names = [f"rank {r}" for r in range(comm.size)]
    return ShmGroup(segment, 0, comm.rank, comm.size, comm.allgather(os.getpid()), names)


def record() -> None:
    """Record operations like direct calls (see Group.direct)."""
    from horo_lite.recording import recorder

    channel = recorder.channel_of([])  # of no group
    for _ in range(N_RECORDED):
        recorder.enter(channel)
        recorder.operation("allreduce of nothing", "allreduce")
        recorder.begin()
        recorder.leave(False)


def contenders(gradients: Gradients, comm: Any) -> tuple[list[Way], list[Way], Way]:
    """Return contenders without a timeline, with one, and the step to compare the latter with."""
    import horo_lite as hvd
    from horo_lite._native import Tensors
    from horo_lite.adapters import adapter_of

    arrays, exact = gradients.arrays, gradients.averages
    replica = [np.zeros_like(array) for array in arrays]
    parameters = [Parameter(x, array) for x, array in zip(replica, arrays, strict=True)]
    inner = Idle(parameters)
    adapter = adapter_of(inner)

    def exchange(group: Any) -> Callable[[], object]:
        def run() -> None:
            found = [parameter for _, parameter in adapter.parameters(inner)]
            tensors = Tensors([adapter.gradient(parameter) for parameter in found])
            group.agree("bare", 0)
            group.allreduce(tensors, "average", "none", 1.0, 1.0, comm.size)

        return run

    def step(**options: Any) -> Callable[[], object]:
        return hvd.DistributedOptimizer(inner, **options).step

    def copy() -> None:
        for to, array in zip(gradients.copies, arrays, strict=True):
            np.copyto(to, array)

    field = [
        Way(MEMCPY, copy, alone=True),
        Way(BARE, exchange(unwatched(comm)), arrays, exact),
        Way(WATCHED, exchange(hvd.world().group.transport.group), arrays, exact),
        Way(STEP, step(), arrays, exact),
        Way('step, check_finite="raise"', step(check_finite="raise"), arrays, exact),
        Way(COMPARISON, lambda: hvd.check_in_sync(replica)),
        Way(RECORDING, record, alone=True),
    ]
    traced = [
        Way(TIMELINE, step(), arrays, exact),
        Way(RECORDING_TIMELINE, record, alone=True),
    ]
    return field, traced, Way(WITHOUT, step(), arrays, exact)


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Run one rank's part of a job."""
    import horo_lite as hvd

    hvd.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    results = []
    for which, shapes in SETS.items():
        gradients = Gradients(shapes(), comm.rank, comm.size)
        gradients.fill(gradients.arrays)
        field, traced, without = contenders(gradients, comm)
        for turn in range(options.repeats + 2):  # the second step is the first with an agreed plan
            take_turns(gradients, field, counts=turn > 1)
            # Both after a step that is not timed: the first with a timeline writes all names.
            take_turns(gradients, [without], counts=False)
            take_turns(gradients, [without], counts=turn > 1)
            hvd.start_timeline(f"{options.output}.trace")
            take_turns(gradients, traced[:1], counts=False)
            take_turns(gradients, traced, counts=turn > 1)
            hvd.stop_timeline()
            comm.Barrier()  # a rank that starts a timeline while another's is active joins it
        results.append(
            {
                "set": which,
                "bytes": gradients.flat.nbytes,
                "milliseconds": {
                    each.name: [1e3 * seconds for seconds in each.seconds]
                    for each in [*field, without, *traced]
                },
            }
        )
    return {"results": results}


# --- the driver -------------------------------------------------------------------------------


def table(job: dict[str, Any], result: dict[str, Any]) -> str:
    """Format medians, and the additional time of each step over the same turn's bare exchange."""
    times = {name: np.array(ms) for name, ms in result["milliseconds"].items()}
    bare = times[BARE]
    width = max(map(len, times))
    lines = [
        f"{result['set']}: {result['bytes'] / 2**20:.1f} MiB, {job['ranks']} ranks",
        f"{'':<{width}}{'ms':>10}{'beyond the bare exchange, ms (quartiles)':>44}{'':>4}%",
    ]
    for name, ms in times.items():
        line = f"{name:<{width}}{np.median(ms):>10.3f}"
        if name in (WATCHED, TIMELINE) or name.startswith("step"):
            base = times[WITHOUT] if name == TIMELINE else bare
            low, middle, high = np.quantile(ms - base, [0.25, 0.5, 0.75])
            line += f"{f'{middle:.3f} ({low:.3f} to {high:.3f})':>44}"
            line += f"{100 * middle / np.median(base):>5.1f}"
        if name == COMPARISON:
            per_100_mb = np.median(ms) * 1e8 / result["bytes"]
            line += f"{f'{per_100_mb:.2f} ms for 100 MB':>44}" if result["bytes"] > 1e6 else ""
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="time the checks for drift, mismatches and NaN")
    parser.add_argument("--repeats", type=int, default=60, help="turns (default: 60)")
    drive(parser, HERE, work, lambda job: [table(job, result) for result in job["results"]])
