"""The timeline: every operation of every face in it, with its tensors, and readable at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks

pytestmark = pytest.mark.mpi

HOSTS = pytest.mark.parametrize("hosts", ["2", "1,1"])

NUMPY = """
import os, time
import numpy as np
import horo_lite as hvd

class Parameter:
    def __init__(self, n):
        self.data, self.grad = np.zeros(n), None

class Sgd:
    def __init__(self, params):
        self.params = params

    def step(self):
        for p in self.params.values():
            p.data -= p.grad

path = os.environ["TRACE"]
world = hvd.init()
rank = world.rank
hvd.allreduce(np.ones(3), name="before")
hvd.start_timeline(path)
opt = hvd.DistributedOptimizer(Sgd({"weight": Parameter(40), "bias": Parameter(5)}))
for _ in range(2):
    for p in opt.params.values():
        p.grad = np.full(p.data.shape, float(rank))
    opt.step()
hvd.allreduce(np.full(10, rank, np.float32), hvd.Sum, name="loss")
hvd.broadcast_parameters({"a": np.full(4, rank), "b": np.zeros(2)})
hvd.allgather(np.zeros((rank, 2)))
hvd.broadcast_object({"rank": rank})
hvd.barrier()
before = time.time_ns()
handle = hvd.allreduce_async(np.zeros(7), name="early" if rank else "late")
if rank == 0:
    after = time.time_ns()
    hvd.send(np.array([after], np.int64), 1)
    other = hvd.allreduce_async(np.zeros(7), name="early")
    hvd.synchronize(handle), hvd.synchronize(other)
    print("submitted", before, after)
else:
    hvd.recv(np.zeros(1, np.int64), 0)
    other = hvd.allreduce_async(np.zeros(7), name="late")
    hvd.synchronize(other), hvd.synchronize(handle)
hvd.alltoall(np.zeros(2))
try:
    hvd.allreduce(np.zeros(3 + rank), name="unlike")
    raise SystemExit("no error")
except hvd.MismatchError:
    pass
part = hvd.new_group([1])
hvd.stop_timeline()
hvd.allreduce(np.ones(3), name="between")
hvd.start_timeline(path + ".2")
if part is not None:
    hvd.allreduce(np.ones(3), name="alone", group=part)
hvd.allreduce(np.ones(3), name="after")
try:
    hvd.start_timeline("x")
    raise SystemExit("two timelines")
except ValueError:
    pass
"""


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def check_pairs(events: list[dict[str, Any]], rank: int) -> dict[str, dict[str, Any]]:
    """By name, the event of each operation, after comparing it with its time in the queue."""
    opened: dict[int, dict[str, Any]] = {}
    done: dict[str, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    for event in events:
        assert event["pid"] == rank
        if event["ph"] == "b":
            opened[event["id"]] = event
        elif event["ph"] == "e":
            begin = opened.pop(event["id"])
            assert begin["ts"] <= event["ts"]
            assert begin["name"] == event["name"]
            last = event
        elif event["ph"] == "X":
            assert (event["name"], event["ts"]) == (last["name"], last["ts"])
            assert event["dur"] >= 0
            done[event["name"]] = event
    assert not opened
    return done


@HOSTS
def test_every_kind_of_operation_is_in_it(hosts: str, tmp_path: Path) -> None:
    path = tmp_path / "trace-{rank}.json"
    env = {"HORO_LITE_TEST_HOSTS": hosts, "TRACE": str(path)}
    result = run_ranks(NUMPY, 2, env=env, timeout_s=60).check()
    for rank in range(2):
        own = Path(str(path).replace("{rank}", str(rank)))
        events = events_of(own)
        done = check_pairs(events, rank)
        steps = [e for e in events if e["ph"] == "X" and "optimizer 1" in e["name"]]
        assert [e["cat"] for e in steps] == ["agree", "allreduce"] * 2
        for step in steps[1::2]:
            assert step["args"]["tensors"] == ["bias", "weight"]  # as they leave
            assert step["args"]["bytes"] == 45 * 8
        assert done["allreduce 'loss'"]["args"]["bytes"] == 40
        assert done["broadcast"]["args"]["tensors"] == ["a", "b"]
        kinds = {"allgather", "broadcast_object", "barrier", "alltoall"}
        assert kinds <= {event["cat"] for event in done.values()}
        for name in ("early", "late"):
            assert done[f"allreduce '{name}'"]["tid"] == done["barrier"]["tid"] + 1
        assert done["allreduce 'unlike'"]["args"]["failed"] is True
        assert not any("before" in name or "between" in name for name in done)

        second = check_pairs(events_of(Path(f"{own}.2")), rank)
        assert list(second) == ["allreduce 'alone'"] * rank + ["allreduce 'after'"]
        if rank:  # other ranks, another row
            assert len({event["tid"] for event in second.values()}) == 2

    # Rank 1 submitted it only after rank 0 had told it to.
    before, after = map(int, result.stdout.split("submitted ")[1].split()[:2])
    events = events_of(Path(str(path).replace("{rank}", "0")))
    queue = {e["ph"]: e["ts"] * 1e3 for e in events if e["name"] == "allreduce 'late'"}
    slack = 1e5  # the clocks of 1970 and of the machine's start drift apart
    assert before - slack <= queue["b"] <= after + slack <= queue["e"] + 2 * slack


def test_only_rank_0_writes_and_what_a_killed_job_wrote_can_be_read(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time
        import numpy as np
        import horo_lite as hvd

        hvd.init()
        hvd.allreduce(np.ones(3), name="complete")
        handle = hvd.allreduce_async(np.ones(3), name="in flight") if hvd.rank() == 0 else None
        hvd.barrier()
        if hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()
    """
    path = tmp_path / "trace.json"
    result = run_ranks(code, 2, env={"HORO_LITE_TIMELINE": str(path)}, timeout_s=60)
    assert result.returncode != 0
    assert [one.name for one in tmp_path.iterdir()] == ["trace.json"]
    text = path.read_text()
    assert not text.rstrip().endswith("]")
    events = json.loads(text + "]")  # viewers do not ask for the end
    names = [(event["ph"], event["name"]) for event in events]
    assert {("X", "allreduce 'complete'"), ("X", "barrier")} <= set(names)
    assert [phase for phase, name in names if name == "allreduce 'in flight'"] == ["b"]


TORCH = """
import os
import torch
import horo_lite.torch as hvd

hvd.init()
rank = hvd.rank()
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
hvd.broadcast_parameters(net.state_dict())
opt = torch.optim.SGD(net.parameters(), lr=0.1)
opt = hvd.DistributedOptimizer(
    opt, net.named_parameters(), op=getattr(hvd, os.environ["OP"]), num_groups=2
)
for step in range(3):
    if step == 2:
        hvd.start_timeline(os.environ["TRACE"])
    opt.zero_grad()
    net(torch.full((3, 8), 1.0 + rank)).sum().backward()
    opt.step()
hvd.synchronize(hvd.allgather_async(torch.ones(rank + 1), name="sizes"))
hvd.allreduce(torch.ones(2), op=hvd.Sum)
hvd.shutdown()
"""


@HOSTS
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_both_buckets_of_a_training_step_are_in_it(op: str, hosts: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "trace-{rank}.json"
    env = {"HORO_LITE_TEST_HOSTS": hosts, "TRACE": str(path), "OP": op}
    run_ranks(TORCH, 2, env=env, timeout_s=90).check()
    for rank in range(2):
        done = check_pairs(events_of(Path(str(path).replace("{rank}", str(rank)))), rank)
        buckets = {name: e for name, e in done.items() if "bucket" in name}
        tensors = [e["args"]["tensors"] for e in buckets.values()]
        assert tensors == [["1.bias", "1.weight"], ["0.bias", "0.weight"]]
        assert all(e["cat"] == "allreduce" for e in buckets.values())
        assert done["allgather 'sizes'"]["args"]["bytes"] == 4 * (rank + 1)
        assert done["allreduce 'noname.1'"]["cat"] == "allreduce"
