"""Addresses of tensors and slots, and how slots are written, do not change any bit of a result."""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from launch import run_ranks, run_threads

from horo_lite import Average, Compression, Group, _native, ops

PAGE = 4096
# Every residue modulo 64, on both sides of a page boundary: where slots begin.
OFFSETS = [*range(64), *range(PAGE - 64, PAGE)]
WIRES = {"none": Compression.none, "fp16": Compression.fp16, "bf16": Compression.bf16}
KINDS = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
}


def at(offset: int, numbers: np.ndarray) -> np.ndarray:
    """Return a copy of an array that begins `offset` bytes into a page."""
    memory = np.empty(numbers.nbytes + 2 * PAGE, np.uint8)
    begin = -memory.ctypes.data % PAGE + offset
    array = memory[begin : begin + numbers.nbytes].view(numbers.dtype)
    array[:] = numbers
    assert array.ctypes.data % PAGE == offset
    return array


def inputs(kind: np.dtype, n_ranks: int) -> list[np.ndarray]:
    n = 5000  # several blocks, and a tail that fills no vector
    numbers = [np.random.default_rng(r).standard_normal(n) * 40 for r in range(n_ranks)]
    return [each.astype(kind) for each in numbers]


COMBINATIONS = [
    (kind, wire)
    for kind, wire in itertools.product(KINDS, WIRES)
    if wire == "none" or kind.startswith("float")
]


@pytest.fixture(params=["avx512", "avx2", "portable"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    best = _native.instruction_set()
    try:
        _native.use_instruction_set(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    yield
    _native.use_instruction_set(best)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("stores", ["cached", "streaming"])
@pytest.mark.parametrize(("kind", "wire"), COMBINATIONS)
def test_addresses_and_stores_change_no_bit(kind: str, wire: str, stores: str) -> None:
    """An all-reduce of three ranks, whose arrays begin at different offsets."""
    numbers = inputs(KINDS[kind], 3)

    def average(group: Group) -> list[bytes]:
        native = group.transport.native_group
        assert native is not None
        results = []

        def reduce(offset: int) -> None:
            x = at(offset, numbers[group.rank])
            ops.allreduce_(x, op=Average, compression=WIRES[wire], group=group)
            results.append(x.tobytes())

        native.write_slots("cached")
        reduce(64)
        native.write_slots(stores)
        for i in range(len(OFFSETS)):
            reduce(OFFSETS[(i + 40 * group.rank) % len(OFFSETS)])
        return results

    by_rank = run_threads(3, average)
    expected = by_rank[0][0]
    assert expected != numbers[0].tobytes()
    for rank, results in enumerate(by_rank):
        for result in results:
            assert result == expected, f"rank {rank}"


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("stores", ["cached", "streaming"])
def test_moved_bytes_arrive_at_any_address(stores: str) -> None:
    """Broadcasts and all-gathers, longer than a slot."""
    n = (1 << 20) + 77

    def move(group: Group) -> None:
        native = group.transport.native_group
        assert native is not None
        native.write_slots(stores)
        for offset in OFFSETS[::9]:
            mine = np.random.default_rng(group.rank).integers(0, 256, n, np.uint8)
            root = np.random.default_rng(1).integers(0, 256, n, np.uint8)
            x = at((offset + group.rank) % PAGE, mine)
            gathered = ops.allgather(x, group=group)
            assert np.array_equal(gathered[n * group.rank : n * (group.rank + 1)], mine)
            assert np.array_equal(gathered[n : 2 * n], root)
            ops.broadcast_(x, 1, group=group)
            assert np.array_equal(x, root)

    run_threads(2, move)


@pytest.mark.launches
def test_auto_follows_the_measured_round_trip() -> None:
    """Of all ranks: one that is far from its neighbour is enough."""
    code = """
        import time
        import numpy as np
        import horo_lite as hvd

        world = hvd.init()
        native = world.group.transport.native_group
        assert (native.slot_stores, native.stores, native.round_trip_ns) == ("auto", "cached", 0)
        x = np.ones(1 << 20, np.float32)
        # A rank that is not running does not answer: on a busy machine the result may remain 0.
        until = time.monotonic() + 10
        while not hvd.allreduce(
            np.array(native.round_trip_ns > 0 or time.monotonic() > until), op=hvd.Min
        ):
            hvd.allreduce_(x)
        farthest = hvd.allreduce(np.array(native.round_trip_ns), op=hvd.Max)
        print("farthest", farthest)
        assert native.stores == ("streaming" if farthest > 320 else "cached"), farthest
        native.write_slots("streaming")
        assert native.stores == "streaming"
    """
    result = run_ranks(code, 2).check()
    if "farthest 0.0" in result.stdout:
        pytest.skip("this machine is so busy that no two ranks ran at the same time")


def test_what_stores_there_are() -> None:
    def choose(group: Group) -> None:
        native = group.transport.native_group
        assert native is not None
        native.write_slots("streaming")
        assert native.stores == "streaming"
        with pytest.raises(ValueError, match="not 'fast'"):
            native.write_slots("fast")
        assert native.slot_stores == "streaming"

    run_threads(1, choose)


SHOWN_CPUS = """
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

long sysconf(int name) {
  const char* shown = getenv("SHOWN_CPUS");
  if (name == _SC_NPROCESSORS_ONLN && shown) return atol(shown);
  return ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}
"""
RANKS = """
import os
import numpy as np

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["SHOWN_CPUS"] = "64" if rank == 0 else "2"
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])

import horo_lite as hvd

hvd.init()
for n in (100_000, 1_000_001):
    x = np.arange(n, dtype=np.float32) % 1000
    assert np.array_equal(hvd.allreduce(x * (rank + 1), hvd.Sum), x * 6), n
print("right", flush=True)
"""


@pytest.mark.mpi
@pytest.mark.timeout(180)
def test_ranks_that_are_shown_other_numbers_of_cpus(tmp_path: Path) -> None:
    """As in containers on one host: chunk sizes depend on whether there are few cores."""
    (tmp_path / "shown.c").write_text(SHOWN_CPUS)
    library, compiler = tmp_path / "shown.so", os.environ.get("CC") or "cc"
    flags = ["-shared", "-fPIC", "-D_GNU_SOURCE"]
    subprocess.run(
        [*shlex.split(compiler), *flags, "shown.c", "-o", library], cwd=tmp_path, check=True
    )
    result = run_ranks(RANKS, 3, env={"LD_PRELOAD": str(library)}, timeout_s=60).check()
    assert result.stdout.count("right") == 3, result
