"""The memory that an all-reduce needs besides the arrays: a few chunks, for any model size."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_ranks, run_threads
from sources_ranks import compare_with_in_place
from thin_array import thin_array

import horo_lite as hvd
from horo_lite import _native, ops
from horo_lite.collectives import arrays

MIB = 1 << 20

PEAK = """\
import os, sys
import numpy as np
import horo_lite as hvd
world = hvd.init()
rank, size = world.rank, world.size
def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) / 1024
def extra(what):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
    before = status("VmRSS")
    what()
    return status("VmHWM") - before
arrays = [np.full(16 << 20, rank + 1, np.float32) for _ in range(4)]  # 256 MiB in total
def fill():
    for x in arrays:
        x[:] = rank + 1
def check():
    assert all(np.all(x == sum(range(1, size + 1)) / size) for x in arrays)
names = ["a", "b", "c", "d"]
class Parameter:
    def __init__(self, grad):
        self.data, self.grad = np.zeros_like(grad), grad
class Descent:
    def __init__(self, params):
        self.params = params
    def step(self):
        pass
opt = hvd.DistributedOptimizer(Descent([Parameter(x) for x in arrays]))
opt.step()  # makes the plan
ways = {
    "none": lambda: hvd.grouped_allreduce_(arrays),
    "fp16": lambda: hvd.grouped_allreduce_(arrays, compression=hvd.Compression.fp16),
    "bf16": lambda: hvd.grouped_allreduce_(arrays, compression=hvd.Compression.bf16),
    "async": lambda: hvd.synchronize(hvd.grouped_allreduce_async_(arrays, name="x")),
    "exchange": lambda: world.group.exchange(arrays, names=names, label="step"),
    "optimizer": opt.step,
    "broadcast": lambda: [hvd.broadcast_(x, root_rank=1) for x in arrays],
}
for way, run in ways.items():
    fill()
    print(f"<{way} {extra(run):.1f}>", flush=True)
    if way != "broadcast":
        check()
    else:
        assert all(np.all(x == 2) for x in arrays)
from horo_lite.collectives import arrays
print("copied", arrays.bytes_copied, flush=True)
hvd.shutdown()
"""


@pytest.mark.launches
@pytest.mark.parametrize("hosts", ["", pytest.param("1,1", marks=pytest.mark.mpi)])
def test_the_peak_of_256_mib(hosts: str) -> None:
    result = run_ranks(PEAK, 2, env={"HORO_LITE_TEST_HOSTS": hosts}, timeout_s=60).check()
    peaks = re.findall(r"<(\w+) (\S+)>", result.stdout)
    assert len(peaks) == 14
    assert result.stdout.count("copied 0") == 2, str(result)
    for way, mib in peaks:
        assert float(mib) < 40, f"{way} needs {mib} MiB more: {result}"


@pytest.mark.shows("in place")
def test_only_what_is_not_dense_is_copied() -> None:
    def count(group: hvd.Group) -> list[int]:
        dense = [np.ones((30, 40)), np.ones((30, 40), order="F"), np.ones(7), np.array(1.0)]
        strided = np.ones((30, 80))[:, ::2]
        counts = [arrays.bytes_copied]
        for x in (*dense, strided):
            ops.barrier(group=group)
            ops.allreduce_(x, group=group)
            ops.broadcast_(x, root_rank=0, group=group)
            group.exchange([x], names=["x"], label="x")
            group.synchronize(ops.allreduce_async_(x, name="x", group=group))
            ops.barrier(group=group)
            counts.append(arrays.bytes_copied)
        return np.diff(counts).tolist()

    for counts in run_threads(2, count):
        assert counts[:-1] == [0] * 4
        assert counts[-1] == 2 * 4 * 30 * 40 * 8  # both ranks, four calls


BEYOND = (1 << 31) + 4099  # bytes; more than fits into a signed 32-bit count


def test_more_than_2_gib() -> None:
    def reduce(group: hvd.Group) -> None:
        x = thin_array(BEYOND)
        x[:] = group.rank + 1
        ops.allreduce_(x, hvd.Max, group=group)
        assert x.min() == x.max() == 2
        x[-5:] = group.rank
        ops.broadcast_(x, root_rank=1, group=group)
        assert x[-5:].tolist() == [1] * 5

    run_threads(2, reduce, timeout_s=100)


@pytest.mark.launches
def test_more_than_2_gib_between_hosts() -> None:
    """Once is enough: bytes are counted by mpi4py's interface, the same over both MPIs."""
    body = f"""
    import horo_lite as hvd
    from thin_array import thin_array
    world = hvd.init()
    x = thin_array({BEYOND})
    x[:] = world.rank + 1
    hvd.allreduce_(x, op=hvd.Max)
    assert x.min() == x.max() == 2
    x[-5:] = world.rank
    hvd.broadcast_(x, root_rank=1)
    assert x[-5:].tolist() == [1] * 5
    print("moved", flush=True)
    """
    env = {"HORO_LITE_TEST_HOSTS": "1,1"}
    result = run_ranks(body, 2, env=env, timeout_s=100).check()
    assert result.stdout.count("moved") == 2


def test_sixty_four_ranks_on_a_host() -> None:
    def reduce(group: hvd.Group) -> None:
        x = np.full(3000, group.rank + 1, np.float32)
        ops.allreduce_(x, hvd.Sum, group=group)
        assert np.all(x == 64 * 65 / 2)
        tiny = ops.allreduce(
            np.full(3000, 2e-7, np.float32), compression=hvd.Compression.fp16, group=group
        )
        # 2e-7 rounded to half precision twice, without any other loss.
        assert np.all(np.abs(tiny - np.float32(2e-7)) <= 2e-7 * 2.0**-10)
        assert ops.allgather_object(group.rank, group=group) == list(range(64))

    run_threads(64, reduce, timeout_s=60)


def test_bytes_per_rank_in_shared_memory_do_not_grow_with_the_arrays() -> None:
    """And are few: a job of many ranks must fit into a small machine."""
    from horo_lite._native import ShmGroup

    assert ShmGroup.memory_bytes(2) <= 8 * MIB
    assert ShmGroup.memory_bytes(64) <= 64 * 4 * MIB
    assert os.sysconf("SC_PAGE_SIZE") <= ShmGroup.memory_bytes(1)


def test_memory_is_used_again_once_nothing_refers_to_it() -> None:
    memory = _native.ReusedMemory()

    def address(x: np.ndarray) -> int:
        return int(x.ctypes.data)

    first, other = memory.arrays([MIB, MIB])
    places = {address(first), address(other)}
    part = first[5:].view(np.int8)  # NumPy refers to the owner of the memory, not to `first`
    first[...] = 7
    del first
    assert memory.bytes == (2 * MIB, 0)
    del other
    again, new = memory.arrays([MIB, MIB])
    again[...] = new[...] = 3
    assert address(again) in places
    assert address(new) not in places
    assert (part == 7).all(), "memory that is still referenced was reused"
    del part, again, new
    assert memory.bytes == (0, 3 * MIB)


def test_memory_that_is_kept_is_bounded() -> None:
    memory = _native.ReusedMemory()
    # Whatever the sizes, no more is kept than was in use at the same time.
    for n in range(1, 100):
        held = memory.arrays([n * MIB // 8, MIB])
        most = sum(x.nbytes for x in held)
        assert sum(memory.bytes) == most
        del held
        assert memory.bytes == (0, most)
    # Usage long ago does not count.
    for _ in range(2000):
        memory.arrays([MIB])
    assert memory.bytes == (0, MIB)
    memory.arrays([1] * 100)
    assert memory.bytes == (0, MIB), "small memory should not be kept"
    memory.clear()
    assert memory.bytes == (0, 0)


def test_no_more_memory_is_kept_than_wanted() -> None:
    memory = _native.ReusedMemory(most_kept=3 * MIB)
    held = memory.arrays([2 * MIB, MIB])
    del held
    assert memory.bytes == (0, 3 * MIB)
    memory.arrays([4 * MIB])
    assert sum(memory.bytes) == 0, (
        "kept memory should be freed for more, and 4 MiB are too many to keep"
    )


@pytest.mark.parametrize("what", ["allreduce", "allgather", "reducescatter", "alltoall"])
def test_memory_of_large_results_is_used_again_but_not_while_somebody_has_it(what: str) -> None:
    n = MIB  # of float32: 4 MiB
    is_reduction = "reduce" in what
    used = np.zeros(2)  # by each rank; each may reuse what the other has returned

    def results(group: hvd.Group, steps: range) -> list[np.ndarray]:
        each = [np.full(n, 10 * group.rank + step, np.float32) for step in steps]
        options = {"op": hvd.Sum} if is_reduction else {}
        made = [getattr(ops, what)(x, group=group, **options) for x in each]
        return [y[0] if isinstance(y, tuple) else y for y in made]

    def expected(step: int) -> np.ndarray:
        each = np.array([step, 10 + step], np.float32)
        n_rows = n if what in ("allreduce", "allgather") else n // 2
        return np.full(n_rows, each.sum()) if is_reduction else np.repeat(each, n_rows)

    def work(group: hvd.Group) -> None:
        first = results(group, range(3))
        for step, x in enumerate(first):
            assert np.array_equal(x, expected(step)), (what, step)
        part = first[2][7:11]  # keeps all of it alive
        del first, x
        ops.barrier(group=group)
        used[group.rank] = arrays.MEMORY.bytes[1]
        ops.barrier(group=group)
        again = results(group, range(3, 6))
        ops.barrier(group=group)
        used[group.rank] -= arrays.MEMORY.bytes[1]
        ops.barrier(group=group)
        for step, x in enumerate(again, 3):
            assert np.array_equal(x, expected(step)), (what, step)
        assert np.array_equal(part, expected(2)[7:11]), "memory that is still referenced was reused"

    run_threads(2, work, timeout_s=60)
    assert used.min() >= expected(0).nbytes, f"memory was not reused: {used}"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_large_arrays_are_reduced_from_where_they_lie(size: int) -> None:
    run_threads(size, compare_with_in_place, timeout_s=60)


@pytest.mark.mpi
def test_large_arrays_are_reduced_from_where_they_lie_between_hosts() -> None:
    script = Path(__file__).with_name("sources_ranks.py")
    run_ranks(script, 2, env={"HORO_LITE_TEST_HOSTS": "1,1"}).check()


def test_large_arrays_are_not_copied_before_they_are_reduced() -> None:
    read = []

    def work(group: hvd.Group) -> None:
        x = np.full(MIB, group.rank, np.float32)
        allreduce = group.transport.allreduce

        def spy(tensors: _native.Tensors, *how: Any) -> None:
            # The previous contents of the result's memory are not reduced.
            _native.Tensors([np.full(MIB, 77, np.float32)]).copy_to(tensors)
            read.append(group.rank)
            allreduce(tensors, *how)

        group.transport.allreduce = spy
        assert np.all(hvd.allreduce(x, op=hvd.Sum, group=group) == 3)

    run_threads(3, work, timeout_s=60)
    assert sorted(read) == [0, 1, 2]


def test_large_arrays_are_copied_before_they_are_broadcast() -> None:
    def work(group: hvd.Group) -> None:
        x = np.full(MIB, 1 + group.rank, np.float32)
        for root in range(2):
            assert np.all(hvd.broadcast(x, root, group=group) == 1 + root)
        assert np.all(x == 1 + group.rank)

    run_threads(2, work)
