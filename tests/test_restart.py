"""Commits on the disk, whole whatever happens, and jobs that begin again from them."""

from __future__ import annotations

import os
import signal
import stat
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import horo_lite as hvd
from horo_lite.elastic import checkpoint

# --- files ----------------------------------------------------------------------------------------


def snapshot(commit: int) -> dict[str, Any]:
    # Arrays of a size that pickle writes straight to the file, and several of them.
    return {"commit": commit, "weights": [np.full(10_000, commit + i) for i in range(2)]}


def check(found: Any, *commits: int) -> int:
    """Which commit was found, whole, one of those."""
    commit: int = found["commit"]
    assert commit in commits
    assert all(np.all(w == commit + i) for i, w in enumerate(found["weights"]))
    return commit


def test_the_newest_commit_is_found_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    assert checkpoint.load(path) is None
    assert checkpoint.saved_at(path) is None
    for commit in range(3):
        checkpoint.save(path, snapshot(commit))
        check(checkpoint.load(path), commit)
    assert sorted(os.listdir(tmp_path)) == ["run.ckpt", "run.ckpt.previous"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert checkpoint.saved_at(path) == path.stat().st_mtime
    checkpoint.remove(path)
    assert not os.listdir(tmp_path)


def test_a_kill_at_any_moment_of_saving_leaves_a_whole_commit(tmp_path: Path) -> None:
    """A child is killed in the first call that save() makes, in the second, and so on."""
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, snapshot(0))
    checkpoint.save(path, snapshot(1))
    commit, found, n_calls = 2, [], 0
    while True:
        n_calls += 1
        child = os.fork()
        if child == 0:
            left = n_calls

            def count(frame: FrameType, event: str, arg: object) -> None:
                nonlocal left
                left -= event in ("call", "c_call", "c_return")
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(count)
            try:
                checkpoint.save(path, snapshot(commit))
            finally:
                sys.setprofile(None)
                os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none of this is damage
            found.append(check(checkpoint.load(path), commit - 1, commit))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if found[-1] == commit:
            commit += 1
    assert found[0] == 1
    assert len(set(found)) > 2, "no kill came after the new commit was in place"
    assert n_calls > 50
    assert set(os.listdir(tmp_path)) == {"run.ckpt", "run.ckpt.previous"}


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["magic", "format", "length", "digest", "data", "torn", "empty"])
def test_a_damaged_commit_falls_back_to_the_one_before(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    for commit in range(2):
        checkpoint.save(path, snapshot(commit))
    harms = {"magic": 0, "format": 11, "length": 39, "digest": 50, "data": 100_000}
    if harm in harms:
        damage(path, harms[harm])
    else:
        os.truncate(path, 100_000 if harm == "torn" else 0)
    with pytest.warns(RuntimeWarning, match=r"run\.ckpt .*put aside"):
        check(checkpoint.load(path), 0)
    # The damaged one does not become the previous one.
    checkpoint.save(path, snapshot(2))
    damage(path, 100_000)
    with pytest.warns(RuntimeWarning, match="checksum"):
        check(checkpoint.load(path), 0)
    damage(tmp_path / "run.ckpt.previous", 100_000)
    with pytest.raises(hvd.CheckpointError, match=r"run\.ckpt\.previous is damaged"):
        checkpoint.load(path)


def test_a_file_that_is_no_commit_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('a script and no commit, given by mistake')\n" * 9)
    with pytest.raises(hvd.CheckpointError, match="no commit of horo_lite"):
        checkpoint.load(path)
    assert os.listdir(tmp_path) == ["train.py"]


def test_another_users_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, snapshot(0))
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(hvd.CheckpointError, match="belongs to user"):
        checkpoint.load(path)
