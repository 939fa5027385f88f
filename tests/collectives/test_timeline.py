"""The timeline has every operation of every API, with its tensors, also after a failure."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from worlds import script_on_ranks

from horo_lite.__main__ import main
from horo_lite.recording import recorder, timeline
from horo_lite.start import clocks
from horo_lite.transports.interface import Header

PHASES = ("pack", "wait", "reduce", "unpack")
HOSTS = pytest.mark.parametrize("hosts", ["2", "1,1"])

NUMPY = """
import os, time
import numpy as np
import horo_lite as hvd
from home_made import SGD, Parameter

path = os.environ["TRACE"]
world = hvd.init()
rank = world.rank
hvd.allreduce(np.ones(3), name="before")
hvd.start_timeline(path)
params = {name: Parameter(np.zeros(n)) for name, n in (("weight", 40), ("bias", 5))}
opt = hvd.DistributedOptimizer(SGD(params))
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
if part:
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
    """Check each operation's event against its time in the queue; return the events by name."""
    opened: dict[str, dict[str, Any]] = {}
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
        elif event["ph"] == "X" and event["cat"] == "phase":
            whole = done[last["name"]]
            assert event["name"] in PHASES
            assert whole["ts"] <= event["ts"] + 1
            assert event["ts"] + event["dur"] <= whole["ts"] + whole["dur"] + 1
        elif event["ph"] == "X":
            assert (event["name"], event["ts"]) == (last["name"], last["ts"])
            assert event["dur"] >= 0
            done[event["name"]] = event
    assert not opened
    return done


@pytest.mark.mpi
@HOSTS
def test_every_kind_of_operation_is_in_it(hosts: str, tmp_path: Path) -> None:
    path = tmp_path / "trace-{rank}.json"
    folder = tmp_path / "flight"
    env = {
        "HORO_LITE_TEST_HOSTS": hosts,
        "TRACE": str(path),
        "HORO_LITE_FLIGHT_RECORD": str(folder),
    }
    result = run_ranks(NUMPY, 2, env=env, timeout_s=60).check()
    for rank in range(2):
        own = Path(str(path).replace("{rank}", str(rank)))
        events = events_of(own)
        done = check_pairs(events, rank)
        steps = [e for e in events if e["ph"] == "X" and "optimizer 1" in e["name"]]
        assert {e["name"] for e in events if e.get("cat") == "phase"} == set(PHASES)
        # The first exchange compares the gradients of all ranks, too.
        assert [e["cat"] for e in steps] == ["agree", "agree", "allreduce", "agree", "allreduce"]
        for step in steps[2::2]:
            assert step["args"]["tensors"] == ["bias", "weight"]  # in the order of sending
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
        if rank:  # another group has another row
            assert len({event["tid"] for event in second.values()}) == 2

    # Rank 1 submitted it only after a message from rank 0.
    before, after = map(int, result.stdout.split("submitted ")[1].split()[:2])
    events = events_of(Path(str(path).replace("{rank}", "0")))
    queue = {e["ph"]: e["ts"] * 1e3 for e in events if e["name"] == "allreduce 'late'"}
    slack = 1e5  # wall clock and monotonic clock drift apart
    assert before - slack <= queue["b"] <= after + slack <= queue["e"] + 2 * slack
    # Nothing is left of a job that ends well.
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "flight",
        *(f"trace-{rank}.json{number}" for rank in range(2) for number in ("", ".2")),
    ]
    assert list(folder.iterdir()) == []


KILLED = """
import os, signal, sys
import numpy as np
import horo_lite as hvd

hvd.init()
for i in range(5):
    hvd.allreduce(np.ones(3), name=f"number {i}")
pids = hvd.allgather_object(os.getpid())
hvd.allreduce(np.ones(3), name="complete")
handle = hvd.allreduce_async(np.ones(3), name="in flight") if hvd.rank() == 0 else None
hvd.barrier()
hvd.allreduce(np.ones(3), name="all have left the barrier")
if hvd.rank() == 0:
    if "all" in sys.argv:
        os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[0], signal.SIGKILL)
hvd.barrier()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("who", ["one", "all"])
def test_ranks_share_a_file_that_has_also_those_that_were_killed(who: str, tmp_path: Path) -> None:
    path, script = tmp_path / "trace.json", tmp_path / "killed.py"
    path.write_text("[\n of an earlier job")
    (tmp_path / "trace.json.7.operations").write_bytes(b"of an earlier job")
    script.write_text(KILLED)
    env = {"HORO_LITE_TIMELINE": str(path)}
    result = run_ranks(script, 2, args=[who], env=env, timeout_s=60)
    assert result.returncode != 0
    left = list(tmp_path.glob("*.operations"))
    files = {f"trace.json.{rank}.operations" for rank in range(2)}
    # MPICH's launcher kills the others before they can write anything, and Open MPI's may do so
    # before they have written all.
    if who == "all" or left:
        names = {one.name for one in left}
        assert names == files if who == "all" else names <= files
        assert main(["trace", str(path)]) == 0
        assert not list(tmp_path.glob("*.operations"))
    with pytest.raises(SystemExit):
        main(["trace", str(path)])  # there is nothing more to add
    events = events_of(path)
    submitted: dict[str, list[float]] = {}
    begun: dict[str, list[float]] = {}
    for rank in range(2):
        own = [event for event in events if event["pid"] == rank and event["ph"] != "M"]
        names = [(event["ph"], event["name"]) for event in own]
        assert {("X", "allreduce 'complete'"), ("X", "barrier")} <= set(names)
        in_flight = [phase for phase, name in names if name == "allreduce 'in flight'"]
        assert in_flight == ["b"] * (rank == 0)
        for event in own:
            if "number" in event["name"] and event["ph"] in "bX" and event["cat"] != "phase":
                times = submitted if event["ph"] == "b" else begun
                times.setdefault(event["name"], []).append(event["ts"])
    # On one clock: no rank begins before all have submitted.
    assert len(begun) == 5
    for name, times in begun.items():
        assert len(times) == len(submitted[name]) == 2
        assert max(submitted[name]) <= min(times) + 1  # microseconds are rounded


UNWRITTEN = """
import errno, json, os, pathlib, signal
import numpy as np
import horo_lite as hvd

path = pathlib.Path(os.environ["TRACE"])
rank = hvd.init().rank
hvd.start_timeline(path)
hvd.allreduce(np.full(3, rank), name="recorded")
hvd.barrier()
write = os.pwrite

def write_some(file, text, at):
    write(file, text[:100], at)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(errno.ENOSPC, "No space left on device")

for turn in range(3):
    if rank == turn:
        if rank:
            os.pwrite = write_some
        try:
            hvd.stop_timeline()
        except OSError as error:
            assert f"`horo-lite trace {path}` adds them" in str(error), error
            assert {event["pid"] for event in json.loads(path.read_text())} == {0}
            print("no room", flush=True)
    hvd.barrier()
"""


@pytest.mark.launches
def test_a_trace_is_complete_after_ranks_that_could_not_write_all(tmp_path: Path) -> None:
    """One has no room on the disk, and another is killed while it writes."""
    path = tmp_path / "trace.json"
    result = run_ranks(UNWRITTEN, 3, env={"TRACE": str(path)}, timeout_s=60)
    assert result.returncode != 0
    assert "no room" in result.stdout
    assert main(["trace", str(path)]) == 0
    recorded = [event["pid"] for event in events_of(path) if event["name"].endswith("'recorded'")]
    assert [recorded.count(rank) for rank in range(3)] == [3, 3, 3]  # in the queue, and done


class Killed(BaseException):
    """Stands for SIGKILL: it is not handled anywhere."""


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Yield a function that writes a rank's file beside a trace, and returns the trace's path."""
    trace = tmp_path / "trace.json"

    def record(rank: int) -> Path:
        here = {"rank": rank, "size": 3, "job": "tests", "epoch_ns": 0}
        recorder.keep(8, trace.with_name(f"{trace.name}.{rank}.operations"), here)
        recorder.enter(recorder.channel_of([0, 1, 2]))
        recorder.operation(f"barrier of {rank}", "barrier")
        recorder.begin()
        recorder.leave(False)
        recorder.release()  # the file remains
        return trace

    yield record
    recorder.keep(recorder.CAPACITY, None, {"rank": 0, "size": 1, "job": "tests", "epoch_ns": 0})


@pytest.mark.parametrize("step", ["the part", "the seam", "the end", "removing the file"])
@pytest.mark.parametrize("who", ["another rank", "horo-lite trace"])
def test_a_trace_is_mended_wherever_a_rank_was_killed(
    step: str,
    who: str,
    recorded: Callable[[int], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert timeline.finish(recorded(0)) == [0]
    trace = recorded(1)
    left = ["the part", "the seam", "the end", "removing the file"].index(step)
    write = os.pwrite

    def write_until_killed(file: int, text: bytes, at: int) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            write(file, text[: len(text) // 2] if step == "the part" else b"", at)
            raise Killed
        return write(file, text, at)

    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write_until_killed)
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            timeline.finish(trace)
    if who == "another rank":
        descriptor = os.open(trace, os.O_RDWR)
        timeline._append(descriptor, [{"name": "barrier of 2", "ph": "X"}])
        os.close(descriptor)
        assert "barrier of 2" in {event["name"] for event in events_of(trace)}  # it is valid
    assert main(["trace", str(trace)]) == 0
    found = [event["name"] for event in events_of(trace) if event["ph"] == "X"]
    assert sorted(found) == [f"barrier of {i}" for i in range(2 + (who == "another rank"))]
    assert not list(trace.parent.glob("*.operations"))


@pytest.mark.parametrize(
    ("path", "why"),
    [("/dev/null", "not a regular file"), ("/", "Is a directory"), ("{tmp}/none/t", "No such")],
)
def test_where_no_timeline_can_be_written(path: str, why: str, tmp_path: Path) -> None:
    path = path.replace("{tmp}", str(tmp_path))
    with pytest.raises(OSError, match=rf"^\[.*rank 3 cannot write its .* {path} .*{why}.*: use"):
        timeline.start(path, 3)
    assert not timeline.is_running()


class Clocks:
    """Two ranks; the other one's host started `s` seconds earlier."""

    def __init__(self, s: float, wrong_s: float) -> None:
        self.ahead_ns, self.wrong_ns = int(s * 1e9), int(wrong_s * 1e9)
        self.n = 0

    def agree(self, digest: int, count: int, *, label: str) -> list[Header]:
        self.n += 1
        shift = self.wrong_ns - self.ahead_ns if self.n == 1 else self.ahead_ns
        return [Header(digest, count + shift, 1.0), Header(digest, count, 1.0)]


def test_a_rank_that_is_stopped_while_it_writes_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    (tmp_path / "trace.json.0.operations").touch()
    with trace.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"horo-lite trace {trace}"):
            timeline.finish(trace, patience_s=0.1)
    assert timeline.finish(trace, patience_s=0.1) == []


@pytest.mark.parametrize("wrong_s", [0.0, 3600.0])
def test_all_hosts_have_the_time_of_rank_0(wrong_s: float) -> None:
    """Its clock may be wrong, and the uptimes of hosts differ."""
    between: Any = Clocks(500.0, wrong_s)
    mine = time.time_ns() - time.monotonic_ns()
    found = clocks.epoch_ns(between, several_hosts=True)
    assert found - mine == pytest.approx(wrong_s * 1e9, abs=1e9)
    on_one_host: Any = Clocks(0.0, 7.0)
    found = clocks.epoch_ns(on_one_host, several_hosts=False)
    assert found - mine == pytest.approx(7e9, abs=1e9)


def test_a_pause_while_the_clock_is_read_does_not_shift_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic, pauses = time.monotonic_ns, iter([60e9, 0])
    monkeypatch.setattr(time, "monotonic_ns", lambda: monotonic() + int(next(pauses, 0)))
    on_one_host: Any = Clocks(0.0, 0.0)
    found = clocks.epoch_ns(on_one_host, several_hosts=False)
    assert found == pytest.approx(time.time_ns() - monotonic(), abs=1e9)


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
    opt,
    net.named_parameters(),
    op=getattr(hvd, os.environ["OP"]),
    num_groups=2,
    adasum_of="gradients",
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


@pytest.mark.served
@HOSTS
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_both_buckets_of_a_training_step_are_in_it(op: str, hosts: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "trace-{rank}.json"
    env = {"HORO_LITE_TEST_HOSTS": hosts, "TRACE": str(path), "OP": op}
    env["HORO_LITE_OVERLAP"] = "always"
    script_on_ranks(TORCH, 2, env=env, timeout_s=90)
    for rank in range(2):
        done = check_pairs(events_of(Path(str(path).replace("{rank}", str(rank)))), rank)
        buckets = {name: e for name, e in done.items() if "bucket" in name}
        tensors = [e["args"]["tensors"] for e in buckets.values()]
        assert tensors == [["1.bias", "1.weight"], ["0.bias", "0.weight"]]
        assert all(e["cat"] == "allreduce" for e in buckets.values())
        assert done["allgather 'sizes'"]["args"]["bytes"] == 4 * (rank + 1)
        assert done["allreduce 'noname.1'"]["cat"] == "allreduce"
