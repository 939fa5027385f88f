"""Protection against other users: the ranks' shared memory, and that no ports are opened."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks

from horo_lite import CheckpointError, checkpoint, files
from horo_lite._native import Segment
from horo_lite.launch import jobs
from horo_lite.recording import recorder, records, timeline
from horo_lite.start.entries import Offer, offered
from horo_lite.transports.pipes import Pipes

N_BYTES = 4096


def test_shared_memory_has_no_name_and_is_its_owners_only() -> None:
    segment = Segment.create(N_BYTES)
    assert stat.S_IMODE(os.fstat(segment.fd).st_mode) == 0o600
    assert Path(f"/proc/self/fd/{segment.fd}").readlink() == Path("/memfd:horo_lite (deleted)")
    assert not os.get_inheritable(segment.fd)
    segment.close_descriptor()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment.fd)


def test_shared_memory_is_opened_with_a_token_that_nobody_can_guess() -> None:
    segments = [Segment.create(N_BYTES) for _ in range(64)]
    tokens = [segment.token for segment in segments]
    for bit in range(62):
        assert {token >> bit & 1 for token in tokens} == {0, 1}
    first = segments[0]
    assert Segment.open(os.getpid(), first.fd, N_BYTES, first.token).token == first.token
    for wrong in (0, tokens[1], first.token ^ 1):
        with pytest.raises(RuntimeError, match="not this job's segment"):
            Segment.open(os.getpid(), first.fd, N_BYTES, wrong)


def test_what_another_user_made_is_not_mapped() -> None:
    segment = Segment.create(N_BYTES)
    if os.geteuid() == 0:
        os.fchown(segment.fd, 12345, -1)
        foreign = os.dup(segment.fd)
    else:
        foreign = os.open("/dev/null", os.O_RDWR)  # root's, and writable by all users
    try:
        with pytest.raises(RuntimeError, match="belongs to another user"):
            Segment.open(os.getpid(), foreign, N_BYTES, segment.token)
    finally:
        os.close(foreign)


@pytest.mark.parametrize("n_bytes", [0, N_BYTES - 1, N_BYTES + 1, 1 << 30])
def test_what_has_another_size_is_not_mapped(n_bytes: int) -> None:
    segment = Segment.create(N_BYTES)
    with pytest.raises(RuntimeError, match="another size"):
        Segment.open(os.getpid(), segment.fd, n_bytes, segment.token)


@pytest.mark.parametrize("kind", ["file", "fifo"])
def test_what_has_a_name_is_not_mapped(kind: str, tmp_path: Path) -> None:
    """Although it has the size, the token and the owner of a segment."""
    segment = Segment.create(N_BYTES)
    image, path = Path(f"/proc/self/fd/{segment.fd}").read_bytes(), tmp_path / "victim"
    path.write_bytes(image) if kind == "file" else os.mkfifo(path)
    victim = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(RuntimeError, match=r"is not a segment but a file|another size"):
            Segment.open(os.getpid(), victim, N_BYTES, segment.token)
    finally:
        os.close(victim)
    assert kind == "fifo" or path.read_bytes() == image


@pytest.mark.parametrize("kind", ["file", "fifo of another"])
def test_only_an_inbox_is_written_to(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "victim"
    path.write_text("precious") if kind == "file" else os.mkfifo(path)
    if kind != "file":
        if os.geteuid() != 0:
            pytest.skip("only root can make files of another user")
        os.chown(path, STRANGER, STRANGER)
    victim = os.open(path, os.O_RDWR)
    pipes = Pipes()
    try:
        with pytest.raises(PermissionError, match="is not the inbox of a rank"):
            pipes.connect([(os.getpid(), victim)], "00" * 8)
        assert not pipes.send(0, b"record")
    finally:
        pipes.close()
        os.close(victim)
    assert kind != "file" or path.read_text() == "precious"


def test_a_pipe_that_has_replaced_an_inbox_is_not_written_to() -> None:
    """A rank that has left closes its inbox, and the program's next pipe gets the number."""
    inbox, other = os.pipe(), os.pipe()
    os.set_blocking(other[0], False)
    pipes = Pipes()
    try:
        pipes.connect([(os.getpid(), inbox[0])], "00" * 8)
        os.dup2(other[0], inbox[0])
        assert not pipes.send(0, b"an acknowledgement")
        with pytest.raises(BlockingIOError):
            os.read(other[0], 1)
    finally:
        pipes.close()
        for descriptor in (*inbox, *other):
            os.close(descriptor)


def test_only_a_rank_of_this_user_offers_a_secret(tmp_path: Path) -> None:
    """Whatever file the store's entries name, its contents are not taken for the secret."""
    offer = Offer()
    assert offered(os.getpid(), offer.descriptor) == offer.secret
    (tmp_path / "known").write_bytes(bytes(32))
    os.mkfifo(tmp_path / "fifo")
    named = os.memfd_create("another"), os.memfd_create("horo_lite_secret")
    os.write(named[0], bytes(32))  # has another name; the second has another size
    files = [os.open("/dev/null", os.O_RDONLY), os.open(tmp_path / "known", os.O_RDONLY)]
    files += [*named, os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)]
    if os.geteuid() == 0:
        files.append(os.memfd_create("horo_lite_secret"))
        os.write(files[-1], bytes(32))
        os.fchown(files[-1], STRANGER, STRANGER)
    for file in files:
        with pytest.raises(PermissionError, match="is not memory of a rank of this user"):
            offered(os.getpid(), file)
        os.close(file)
    number = offer.descriptor
    offer.close()
    with pytest.raises(OSError, match="No such file"):
        offered(os.getpid(), number)


def test_each_job_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HORO_LITE_JOB_TOKEN", raising=False)
    tokens = [jobs.environment()["HORO_LITE_JOB_TOKEN"] for _ in range(2)]
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) == 32
    assert jobs.environment({"HORO_LITE_JOB_TOKEN": "mine"})["HORO_LITE_JOB_TOKEN"] == "mine"
    monkeypatch.setenv("HORO_LITE_JOB_TOKEN", "")
    assert len(jobs.environment({"HORO_LITE_JOB_TOKEN": ""})["HORO_LITE_JOB_TOKEN"]) == 32


STRANGER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@as_root
@pytest.mark.parametrize("suffix", ["", ".previous", ".new", ".damaged"])
def test_a_commit_follows_no_link_of_another_user(suffix: str, tmp_path: Path) -> None:
    """The victim's file is neither written nor moved nor removed, whichever name leads to it."""
    victim, folder = tmp_path / "victim", tmp_path / "open to all"
    victim.write_text("precious")
    folder.mkdir()
    folder.chmod(0o777)
    planted = folder / f"run.ckpt{suffix}"
    planted.symlink_to(victim)
    os.lchown(planted, STRANGER, STRANGER)
    for commit in range(3):
        if suffix:
            checkpoint.save(folder / "run.ckpt", commit)
            assert checkpoint.load(folder / "run.ckpt") == commit
        else:
            for call in (checkpoint.load, checkpoint.saved_at, checkpoint.remove):
                with pytest.raises(CheckpointError, match=f"a link made by user {STRANGER}"):
                    call(folder / "run.ckpt")
            with pytest.raises(CheckpointError, match=f"a link made by user {STRANGER}"):
                checkpoint.save(folder / "run.ckpt", commit)
    if suffix:
        checkpoint.remove(folder / "run.ckpt")
    assert victim.read_text() == "precious"


def test_a_link_of_ones_own_stays_one(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "run.ckpt"
    link.symlink_to("disk/kept.ckpt")
    for commit in range(3):
        checkpoint.save(link, commit)
        assert checkpoint.load(link) == checkpoint.load(tmp_path / "disk/kept.ckpt") == commit
    assert link.is_symlink()
    checkpoint.remove(link)
    assert not os.listdir(tmp_path / "disk")


def test_a_hard_link_loses_its_name_and_no_byte(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "run.ckpt"
    victim.write_text("precious")
    for suffix in ("", ".previous", ".new"):
        Path(f"{path}{suffix}").hardlink_to(victim)
    for commit in range(3):
        checkpoint.save(path, commit)
    checkpoint.remove(path)
    assert victim.read_text() == "precious"


@as_root
def test_a_file_of_another_user_is_neither_replaced_nor_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, "theirs")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(CheckpointError, match=f"belongs to user {STRANGER}"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match=f"belongs to user {STRANGER}"):
        checkpoint.save(path, "ours")
    assert path.stat().st_uid == STRANGER


@pytest.mark.parametrize("suffix", ["", ".new", ".previous"])
def test_nobody_is_awaited_at_a_fifo(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    os.mkfifo(f"{path}{suffix}")
    if suffix == ".previous":
        path.write_text("damaged")
    if suffix == ".new":
        assert checkpoint.load(path) is None
    else:
        with pytest.raises(CheckpointError, match="is not a regular file"):
            checkpoint.load(path)
    if suffix:
        checkpoint.save(path, "ours")
        assert checkpoint.load(path) == "ours"
    else:
        with pytest.raises(CheckpointError, match="is not a regular file"):
            checkpoint.save(path, "ours")


@as_root
@pytest.mark.parametrize("kind", ["link", "hard link", "file"])
def test_no_file_of_the_victim_is_written_through_what_another_user_planted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the path of a timeline, a flight record, a record of operations, a rank's output."""
    victim, folder = tmp_path / "victim", tmp_path / "open to all"
    victim.write_text("precious")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "rank.0").mkdir()
    names = ("trace.json", "trace.json.0.operations", "rank_0", "rank.0/stdout", "bench.json")
    for name in names:
        if kind == "link":
            (folder / name).symlink_to(victim)
            os.lchown(folder / name, STRANGER, STRANGER)
        elif kind == "hard link":
            (folder / name).hardlink_to(victim)
        else:
            (folder / name).write_text("theirs")
            os.chown(folder / name, STRANGER, STRANGER)
    remedy = "remove it" if kind != "file" else "in which no other user may write"
    with pytest.raises(OSError, match=rf"rank 0 cannot write its timeline: .*{remedy}"):
        timeline.start(folder / "trace.json", 0)
    for name in names[1:]:
        path = folder / name
        for write in (files.renewed, files.replaced):
            if kind == "file":
                with pytest.raises(PermissionError, match=f"belongs to user {STRANGER}"):
                    _write(write, path)
                assert path.read_text() == "theirs"
            else:
                _write(write, path)
                assert path.read_text() == "ours"
                assert (path.stat().st_uid, path.stat().st_nlink) == (os.geteuid(), 1)
    assert victim.read_text() == "precious"
    assert {path.name for path in folder.iterdir()} == {*names[:3], "rank.0", "bench.json"}


def _write(write: Callable[[Path], Any], path: Path) -> None:
    opened = write(path)
    with os.fdopen(opened, "wb") if isinstance(opened, int) else opened as file:
        file.write(b"ours")


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    for path in (Path(os.devnull), tmp_path):
        for write in (files.renewed, files.replaced):
            with pytest.raises(PermissionError, match="is not a regular file"):
                _write(write, path)
    with pytest.raises(PermissionError, match="is not a regular file"):
        files.shared(Path(os.devnull))


def test_nobody_else_can_lock_a_timeline(tmp_path: Path) -> None:
    """Whoever can open a file for reading can lock it for as long as they like."""
    for exists in (False, True):
        trace = tmp_path / f"trace {exists}"
        if exists:
            trace.touch(0o644)
        os.close(files.shared(trace))
        assert stat.S_IMODE(trace.stat().st_mode) == 0o600


@as_root
def test_planted_records_are_neither_read_nor_believed(tmp_path: Path) -> None:
    """Not even if they are of the right size; and what is too large is not read at all."""
    ours, theirs, huge = (tmp_path / f"{n}.operations" for n in range(3))
    recorder.keep(8, ours, {"rank": 0, "size": 2, "job": "j", "epoch_ns": 0})
    recorder.release()
    theirs.write_bytes(ours.read_bytes())
    os.chown(theirs, STRANGER, STRANGER)
    huge.touch()
    os.truncate(huge, (1 << 30) - 1)
    assert [one.rank for one in records.of_files([ours, theirs, huge])] == [0]
    with pytest.raises(ValueError, match="belongs to another user"):
        records.of_file(theirs)
    with pytest.raises(ValueError, match="does not have the size"):
        records.of_file(huge)
    recorder.keep(recorder.CAPACITY, None)


@pytest.mark.mpi
@pytest.mark.parametrize("hosts", ["", "1,1"])
def test_no_port_is_opened_that_mpi_has_not_opened(hosts: str) -> None:
    """Not by init(), blocking calls, the engine or objects, on one host or between two."""
    result = run_ranks(
        """
        import os
        import socket
        from pathlib import Path

        import numpy as np
        from mpi4py import MPI

        import horo_lite as hvd


        def listening():
            mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                    if os.path.lexists(f"/proc/self/fd/{fd}")}
            found = set()
            for kind in ("tcp", "tcp6", "udp", "udp6"):
                for line in Path("/proc/self/net", kind).read_text().splitlines()[1:]:
                    _, local, _, state, *rest = line.split()
                    if f"socket:[{rest[5]}]" in mine and (state == "0A" or kind[0] == "u"):
                        found.add(f"{kind} {local}")
            return found


        comm = MPI.COMM_WORLD.Dup()
        comm.allreduce(1)
        before = listening()
        hvd.init()
        x = np.ones(1000)
        hvd.allreduce(x)
        hvd.synchronize(hvd.allreduce_async(x, name="x"))
        hvd.allgather_object({"rank": hvd.rank()})
        hvd.check_in_sync({"x": x})
        print("more:", sorted(listening() - before), flush=True)
        with socket.create_server(("127.0.0.1", 0)):
            assert len(listening() - before) == 1, "this test sees ports"
        """,
        env={"HORO_LITE_TEST_HOSTS": hosts},
    ).check()
    assert re.findall("more: (.*)", result.stdout) == ["[]", "[]"], str(result)
