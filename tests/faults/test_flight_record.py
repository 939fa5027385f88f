"""The flight record: each rank's last operations, saved after any failure, readable by PyTorch."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pickle
import re
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import run_ranks, run_threads
from without_mpi import ended

import horo_lite as hvd
from horo_lite.__main__ import main
from horo_lite.launch import top
from horo_lite.recording import flight_record, recorder, records
from horo_lite.recording.records import Operation, Records
from horo_lite.start.recording import keep as start_recording

FOLDER = "HORO_LITE_FLIGHT_RECORD"
N_BEFORE = 3

HANGS = f"""
import os, signal, sys, time
import numpy as np
import horo_lite as hvd
from stall_limits import limit_waits

hvd.init()
rank = hvd.rank()
for i in range({N_BEFORE}):
    hvd.allreduce(np.ones((2, 3), np.float32), name="gradient")
    hvd.synchronize(hvd.allreduce_async(np.ones(4), name="metric"))
    if rank < 2:
        hvd.allgather(np.zeros((rank, 5)))
    else:
        hvd.allgather(np.zeros((7, 5)))
handles = [] if rank == 1 else [hvd.allreduce_async(np.ones(2), name="forgotten")]
hvd.synchronize(hvd.allreduce_async(np.ones(4), name="last"))  # now all engines know of it
if "killed" in sys.argv:
    pids = hvd.allgather_object(os.getpid())
    done = np.zeros(1)
    if rank == 2:
        for r in (1, 0):
            hvd.recv(done, r)
        for r in (1, 0):  # so that neither notices the death of the other
            os.kill(pids[r], signal.SIGSTOP)
        for r in (1, 0, 2):
            os.kill(pids[r], signal.SIGKILL)
    hvd.send(done, 2)
else:
    limit_waits(3)
    if rank == 1:
        time.sleep(600)
hvd.allreduce(np.ones(5), name="loss")
"""


def compared_by_torch(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Return the report of PyTorch's tool on a folder."""
    tool = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    caplog.clear()
    with caplog.at_level(logging.INFO, "Flight Recorder"):
        tool.main([str(folder)])
    gc.enable()  # the tool disables it
    return caplog.text


def entries_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pickle.loads((folder / f"rank_{rank}").read_bytes())["entries"]
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["stalled", "killed"])
def test_the_rank_that_lacks_an_operation_is_named(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, script = tmp_path / "of" / "a job", tmp_path / "hangs.py"
    folder.mkdir(parents=True)
    (folder / "rank_3").write_bytes(b"of a larger job")
    script.write_text(HANGS)
    result = run_ranks(script, 3, args=[how], env={FOLDER: str(folder)}, timeout_s=60)
    assert result.returncode != 0
    if how == "stalled":
        assert f"the last operations of ranks 0, 1 and 2 are in {folder}" in result.stderr
    else:  # no rank was left to write it
        assert {one.name for one in folder.iterdir()} == {
            *(f"{rank}.operations" for rank in range(3)),
            "rank_3",
        }
        assert main(["flight-record", str(folder)]) == 0
    assert sorted(one.name for one in folder.glob("rank_*")) == ["rank_0", "rank_1", "rank_2"]
    assert {stat.S_IMODE(one.stat().st_mode) for one in folder.iterdir()} == {0o600}

    for rank in range(3):
        entries = entries_of(folder, rank)
        first = entries[0]
        assert first["frames"][0]["name"] == "allreduce 'gradient'"
        assert (first["input_sizes"], first["input_dtypes"]) == ([[2, 3]], ["Float"])
        assert first["state"] == "completed"
        created, started, done = (
            first[f"time_{what}_ns"]
            for what in ("created", "discovered_started", "discovered_completed")
        )
        assert created <= started <= done
        names = [entry["frames"][0]["name"] for entry in entries]
        assert names.count("allreduce 'metric'") == names.count("allgather") == N_BEFORE
        assert names.count("allreduce 'forgotten'") == (rank != 1)
    said = compared_by_torch(folder, caplog)
    found = re.findall(r"missing ranks: (.*)\n(?s:.*?)stack trace: \n (.*) at ", said)
    missing = {label: ranks for ranks, label in found}
    assert missing.pop("allreduce 'forgotten'") == "{1}"
    if how == "stalled":
        assert missing == {"allreduce 'loss'": "{1}"}
    else:  # the others may have progressed to here
        assert set(missing) <= {"allreduce 'loss'"}
    assert "has errors" not in said


@pytest.mark.mpi
def test_a_rank_that_ended_before_is_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = """
        import sys
        import numpy as np
        import horo_lite as hvd

        hvd.init()
        hvd.allreduce(np.ones(3), name="both")
        if hvd.rank() == 0:
            hvd.allreduce(np.ones(3), name="one batch more")
    """
    env = {FOLDER: str(tmp_path), "HORO_LITE_TIMELINE": str(tmp_path / "trace.json")}
    result = run_ranks(code, 2, env=env, timeout_s=60)
    assert result.returncode != 0
    assert f"the last operations of ranks 0 and 1 are in {tmp_path}" in result.stderr
    names = [[e["frames"][0]["name"] for e in entries_of(tmp_path, rank)] for rank in range(2)]
    assert names[1] == names[0][:-1] == ["allreduce 'both'"]
    said = compared_by_torch(tmp_path, caplog)
    assert "missing ranks: {1}" in said
    assert "allreduce 'one batch more'" in said


@pytest.mark.mpi
@pytest.mark.parametrize("by", ["mpiexec", "torchrun"])
def test_the_others_do_not_end_the_job_before_it_is_written(by: str, tmp_path: Path) -> None:
    """With a slow disk: the rank that writes it reports afterwards why the job ends."""
    code = """
        import time
        import numpy as np
        import horo_lite as hvd
        from horo_lite.recording import flight_record

        write = flight_record.write

        def slowly(*args):
            time.sleep(2)
            write(*args)

        flight_record.write = slowly
        hvd.init()
        hvd.allreduce(np.ones(3 + (hvd.rank() == 1)), name="unlike")
    """
    env = {FOLDER: str(tmp_path / "records")}
    if by == "mpiexec":
        result = run_ranks(code, 3, env=env, timeout_s=60)
    else:
        pytest.importorskip("torch")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
        result = ended(code, 3, tmp_path, torchrun, env)
    assert result.returncode != 0
    assert f"the last operations of ranks 0, 1 and 2 are in {tmp_path}" in result.stderr
    assert "MismatchError: ranks disagree on allreduce 'unlike'" in result.stderr, str(result)


@pytest.fixture
def small_ring() -> Iterator[int]:
    """Yield the reduced capacity, in operations, of this process's recorder."""
    here = {"rank": 0, "size": 1, "job": "tests", "epoch_ns": 0}
    recorder.keep(8, None, here)
    yield 8
    recorder.keep(recorder.CAPACITY, None, here)


def test_the_last_operations_are_kept(small_ring: int) -> None:
    def body(group: hvd.Group) -> None:
        for i in range(20):
            hvd.allreduce(np.ones(i, np.int16), name=f"{i} {'ö' * 100}", group=group)
        with pytest.raises(ValueError, match="bool"):
            hvd.allreduce(np.ones(3, bool), hvd.Average, name="wrong", group=group)
        many = {f"tensor {i}": np.zeros((1,) * 9) for i in range(3)}
        hvd.broadcast_parameters(many, group=group)

    run_threads(1, body)
    found = records.of_memory(recorder.memory()).operations
    numbers = [each.number for each in found]
    assert len(found) == small_ring
    assert numbers == list(range(numbers[0], numbers[0] + small_ring))
    last = found[-1]
    assert (last.kind, last.names) == ("broadcast", ("tensor 0", "tensor 1", "tensor 2"))
    assert (last.n_tensors, last.n_bytes) == (3, 24)
    assert (last.dtype, last.shape) == ("float64", (1,) * 6)
    gradient = next(each for each in found if each.label.startswith("allreduce '19"))
    assert (gradient.dtype, gradient.shape, gradient.n_bytes) == ("int16", (19,), 38)
    assert gradient.label == f"allreduce '19 {'ö' * 45}"  # as much as fits into 104 bytes
    assert all(0 < each.submitted_ns <= each.begun_ns <= each.done_ns for each in found)


def test_names_without_end_take_no_memory_without_end(small_ring: int) -> None:
    def body(group: hvd.Group) -> None:
        for i in range(small_ring):
            many = {f"tensor {'x' * 60_000} {i}": np.zeros(1)}
            hvd.broadcast_parameters(many, group=group)

    run_threads(1, body)
    found = records.of_memory(recorder.memory()).operations
    assert len(found[0].names) <= 1
    assert found[-1].names == ()
    assert found[-1].kind == "broadcast"


def test_no_file_of_another_is_written_to(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "0.operations"
    victim.write_text("as it was")
    link.symlink_to(victim)
    recorder.keep(8, link)
    assert (stat.S_IMODE(link.stat().st_mode), link.is_symlink()) == (0o600, False)
    recorder.keep(8, None)
    assert not link.exists()
    assert victim.read_text() == "as it was"


def test_memory_without_a_name_where_the_kernel_refuses_one(
    monkeypatch: pytest.MonkeyPatch, small_ring: int
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    recorder.keep(small_ring, None, {"rank": 0, "size": 1, "job": "tests", "epoch_ns": 0})

    run_threads(1, lambda group: hvd.allreduce(np.ones(3), name="kept", group=group))
    assert "kept" in records.of_memory(recorder.memory()).operations[-1].label


def test_a_file_has_its_room_on_the_disk_before_it_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "0.operations"
    recorder.keep(1 << 10, path)
    n_bytes = len(recorder.memory())
    assert path.stat().st_blocks * 512 >= n_bytes
    recorder.keep(8, None)


@pytest.mark.parametrize("why", ["a file is there", "the disk is full"])
def test_a_folder_that_cannot_be_written_is_named(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "records"
    monkeypatch.setenv(FOLDER, str(folder))
    if why == "a file is there":
        folder.write_text("no folder")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    error = f"rank 3 cannot record its operations in {FOLDER}={folder} ("
    with pytest.raises(OSError, match=re.escape(error)):
        start_recording(3, 4, "tests", 0)


@pytest.mark.parametrize("length", [0, 100, 5000, None])
def test_what_is_not_a_recorders_file_is_not_read(
    length: int | None, tmp_path: Path, small_ring: int
) -> None:
    del small_ring
    whole = recorder.memory()
    assert records.of_memory(whole).rank == 0
    path = tmp_path / "0.operations"
    path.write_bytes(os.urandom(len(whole)) if length is None else whole[:length])
    assert records.of_files(records.files_of(tmp_path)) == []
    with pytest.raises(SystemExit):
        main(["flight-record", str(tmp_path)])


@pytest.mark.parametrize(
    "described",
    [
        {"rank": float("inf")},
        {"epoch_ns": None},
        {"host": None},
        {"began": 10**400},
        {"size": []},
    ],
)
def test_a_damaged_file_does_not_keep_others_from_being_read(
    described: dict[str, Any], tmp_path: Path, small_ring: int
) -> None:
    del small_ring
    whole = bytearray(recorder.memory())
    for rank in range(2):
        (tmp_path / f"{rank}.operations").write_bytes(whole)
        begin, end = recorder.DESCRIPTION_AT, recorder.DESCRIPTION_ENDS
        text = json.loads(whole[begin:end].partition(b"\0")[0]) | described
        written = json.dumps({name: x for name, x in text.items() if x is not None}).encode()
        whole[begin:end] = written.ljust(end - begin, b"\0")
    assert [one.rank for one in records.of_files(records.files_of(tmp_path))] == [0]
    assert list(top.sample([tmp_path]).ranks) == [0]


def test_ranks_that_cannot_be(small_ring: int) -> None:
    del small_ring
    everything: Any = [{}]
    recorder.enter(recorder.channel_of(everything))
    recorder.operation("a barrier", "barrier")
    recorder.leave(False)
    with pytest.raises(ValueError, match="it is damaged"):
        records.of_memory(recorder.memory())
    assert records.ranks_text((0, 1), 10**30) == "ranks 0, 1"


def operation(number: int, position: int, ranks: tuple[int, ...]) -> Operation:
    return Operation(
        number=number,
        position=position,
        ranks=ranks,
        asynchronous=False,
        label="barrier",
        kind="barrier",
        names=(),
        submitted_ns=1,
        begun_ns=2,
        done_ns=3,
        failed=False,
        n_bytes=0,
        n_tensors=0,
        dtype="",
        shape=(),
        phases_ns={},
    )


def test_what_some_ranks_have_forgotten_is_not_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that does more in another group has fewer records of this one."""
    description = {"job": "tests", "epoch_ns": 0, "began": 0.0}
    other = [operation(10 + i, 10 + i, (1,)) for i in range(4)]
    everyone = [
        Records(0, 2, description, [operation(2 + i, 2 + i, (0, 1)) for i in range(10)]),
        Records(1, 2, description, [*other, *(operation(6 + i, i, (0, 1)) for i in range(8, 12))]),
    ]
    flight_record.write(tmp_path, everyone)
    assert [entry["collective_seq_id"] for entry in entries_of(tmp_path, 0)] == [8, 9, 10, 11]
    assert "missing ranks" not in compared_by_torch(tmp_path, caplog)
    del everyone[1].operations[-2]
    flight_record.write(tmp_path, everyone)
    assert "missing ranks: {1}" in compared_by_torch(tmp_path, caplog)
