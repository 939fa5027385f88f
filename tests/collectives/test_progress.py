"""Asynchronous reductions proceed while the training thread holds the GIL."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from launch import run_ranks, run_threads

import horo_lite as hvd

JOB = """\
import sys, time
import numpy as np
import horo_lite as hvd

hvd.init(device="cpu")
rank, size = hvd.rank(), hvd.size()
arrays = [np.empty(200_000, np.float32) for _ in range(10)]

def begin():
    for i, array in enumerate(arrays):
        array[:] = rank + i
    order = range(10) if rank == 0 else reversed(range(10))
    return [hvd.allreduce_async_(arrays[i], op=hvd.Sum, name=f"array {i}") for i in order]

def complete():
    return all(handle._job.times[2] for handle in handles)

first = begin()  # kept, since freeing its contents takes the GIL
for handle in first:
    hvd.synchronize(handle)
hvd.barrier()
# From here on, no other thread gets the GIL while this one computes.
sys.setswitchinterval(1e6)
handles = begin()
until = time.monotonic() + 60
while not complete() and time.monotonic() < until:
    pass
was_complete = complete()
sys.setswitchinterval(5e-3)
for handle in handles:
    hvd.synchronize(handle)
for i, array in enumerate(arrays):
    assert (array == sum(range(size)) + size * i).all(), (i, array)
assert was_complete, "the reductions waited for the GIL"
"""


@pytest.mark.mpi
@pytest.mark.parametrize(("ranks", "hosts"), [(2, ""), (2, "1,1"), (3, "2,1")])
def test_reductions_need_no_gil(ranks: int, hosts: str) -> None:
    run_ranks(JOB, ranks, env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=90).check()


def test_the_system_shows_which_threads_are_engines() -> None:
    def body(group: hvd.Group) -> int:
        handle = hvd.allreduce_async(np.array([group.rank + 1.0]), hvd.Sum, name="x", group=group)
        assert group.synchronize(handle).tolist() == [3.0]
        names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        hvd.barrier(group=group)  # no engine ends before this
        return names.count("horo_lite async\n")

    gc.collect()  # engines of an earlier test, which a traceback may have kept
    assert run_threads(2, body) == [2, 2]
