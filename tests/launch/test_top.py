"""The live view: what the ranks of a running job are doing, read from outside."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from launch import run_threads, start_ranks

import horo_lite as hvd
from horo_lite.__main__ import main
from horo_lite.launch import top
from horo_lite.recording import recorder
from horo_lite.recording.records import Counters, Operation, Records

N_STEPS = 3
HANGS = f"""
import time
import numpy as np
import horo_lite as hvd

class Parameter:
    def __init__(self):
        self.data, self.grad = np.zeros(1000), np.ones(1000)

class Sgd:
    params = {{"weight": Parameter()}}

    def step(self):
        pass

hvd.init()
opt = hvd.DistributedOptimizer(Sgd())
for _ in range({N_STEPS}):
    opt.step()
hvd.synchronize(hvd.allreduce_async(np.zeros(5)))
if hvd.rank() == 1:
    time.sleep(600)
hvd.barrier()
"""


@pytest.mark.mpi
def test_a_job_that_runs_is_seen_from_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", str(tmp_path)]) == 1
    with start_ranks(HANGS, 2, env={"HORO_LITE_FLIGHT_RECORD": str(tmp_path)}):
        until = time.monotonic() + 60
        while time.monotonic() < until:
            ranks = top.sample([tmp_path]).ranks
            if [rank for rank in ranks if ranks[rank].counters.n_steps == N_STEPS] == [0, 1]:
                last = [records.operations[-1] for records in ranks.values()]
                if last[0].label == "barrier" and last[1].n_bytes == 40 and last[1].done_ns:
                    ranks = top.sample([tmp_path]).ranks  # complete: both ranks are at rest
                    break
            time.sleep(0.05)
        else:
            pytest.fail(f"the ranks did not get this far: {ranks}")
        counters = [records.counters for records in ranks.values()]
        assert counters[0].n_done == counters[0].n_operations - 1  # it is in the barrier
        assert counters[1].n_done == counters[1].n_operations
        assert counters[0].n_bytes == counters[1].n_bytes == (N_STEPS * 1000 + 5) * 8
        # Also without being given the folder.
        token = ranks[0].description["job"]
        found = top.sample([], token).ranks
        assert {r: one.description["pid"] for r, one in found.items()} == {
            r: one.description["pid"] for r, one in ranks.items()
        }
        capsys.readouterr()
        assert main(["top", "--once", "--interval", "0.2", str(tmp_path)]) == 0
    _, *rows, slowest = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["0", "1"]
    assert "100%" in rows[0]
    assert "barrier" in rows[0]
    assert "(after allreduce" in rows[1]
    assert slowest == "slowest: rank 1, for which others wait 100% of the time"
    assert main(["top", "--once", str(tmp_path)]) == 1  # it was killed and left its files there


@pytest.fixture
def job_of_this_process() -> Iterator[str]:
    job = f"tests {os.getpid()}"
    description = {"rank": 0, "size": 1, "job": job, "epoch_ns": 0}
    recorder.keep(recorder.CAPACITY, None, description)
    yield job
    recorder.keep(recorder.CAPACITY, None, description | {"job": ""})


def test_memory_without_a_file_is_found(job_of_this_process: str) -> None:
    recorder.step()
    ranks = top.sample([], job_of_this_process).ranks
    assert (ranks[0].description["pid"], ranks[0].counters.n_steps) == (os.getpid(), 1)


def test_names_cannot_change_the_terminal(job_of_this_process: str) -> None:
    def body(group: hvd.Group) -> None:
        hvd.allreduce(np.ones(3), name="a\n\x1b[2Jb", group=group)

    run_threads(1, body)
    now = top.sample([], job_of_this_process)
    assert top.table(now, now).splitlines()[-1].endswith("  (after allreduce 'a \\x1b[2Jb')")


def records_of(rank: int, counters: Counters, last: Operation | None = None) -> Records:
    description = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": "tests",
        "began": 0.0,
        "epoch_ns": 0,
    }
    return Records(rank, 2, description, [] if last is None else [last], counters)


def test_the_figures_are_those_of_the_interval() -> None:
    s = 1_000_000_000
    earlier = Counters(n_done=10, n_bytes=0, waited_ns=7 * s, exchanged_ns=s, n_steps=5)
    before = top.Sample(100 * s, {0: records_of(0, earlier), 1: records_of(1, earlier)})
    now = top.Sample(
        104 * s,
        {
            0: records_of(0, Counters(0, 50, 8_000_000, 8 * s, 3 * s, 13)),
            1: records_of(1, Counters(0, 50, 8_000_000, 7 * s, 2 * s, 11)),
        },
    )
    head, _, first, second, slowest = top.table(before, now).splitlines()
    assert head == "job tests: 2 of 2 ranks, step 11 to 13"
    assert first.split()[3:8] == ["2.0", "10", "2", "25%", "50%"]
    assert second.split()[3:8] == ["1.5", "10", "2", "0%", "25%"]
    assert slowest.startswith("slowest: rank 1, for which others wait 25%")
