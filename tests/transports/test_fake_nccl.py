"""The stand-in for NCCL itself, on which the tests of the GPU transport rely."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import fake_nccl
import pytest

pytestmark = pytest.mark.launches

CHECKS = Path(fake_nccl.__file__).with_name("checks.py")


def launch(size: int, folder: Path, *checks: str, **environment: str) -> None:
    """Run `checks` on all ranks; `environment` without the prefix HORO_LITE_FAKE_NCCL_."""
    settings = {f"HORO_LITE_FAKE_NCCL_{name}": value for name, value in environment.items()}
    env = {**os.environ, "HORO_LITE_NCCL_LIB": fake_nccl.compiled(), **settings}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHECKS), str(rank), str(size), str(folder), *checks],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        output = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    ended = [rank.returncode for rank in ranks]
    assert ended == [0] * size, "\n".join(f"rank {r}: {text}" for r, text in enumerate(output))


@pytest.mark.parametrize("size", [2, 4])
def test_operations(size: int, tmp_path: Path) -> None:
    operations = ["reductions", "broadcasts", "messages", "order"]
    launch(size, tmp_path, *operations, "splits_blocking", "splits_non_blocking")


def test_two_ranks(tmp_path: Path) -> None:
    launch(2, tmp_path, "leaves_nothing", "abort", "mismatch")


@pytest.mark.parametrize("version", ["21803", "22707"])
def test_a_late_peer(version: str, tmp_path: Path) -> None:
    launch(2, tmp_path, "late_peer", VERSION=version)


@pytest.mark.parametrize(
    ("check", "name", "value"),
    [
        ("init_fails", "INIT_FAILS", "1:1"),
        ("init_hangs", "INIT_HANGS", "1:1"),
        ("operation_fails", "FAILS_AT", "1:3"),
    ],
)
def test_failures_on_demand(check: str, name: str, value: str, tmp_path: Path) -> None:
    launch(2, tmp_path, check, **{name: value})


@pytest.mark.parametrize("failure", ["", "1", "null"])
def test_registration(failure: str, tmp_path: Path) -> None:
    settings = {"REGISTER_FAILS": failure} if failure else {}
    launch(2, tmp_path, "registers", LOG=str(tmp_path / "log"), **settings)
    calls = fake_nccl.read_log(tmp_path / "log")
    assert len(calls) == 2
    for rank in calls.values():
        allocated = next(call.address for call in rank if call.name == "ncclMemAlloc")
        for name in ("ncclCommRegister", "ncclCommWindowRegister"):
            registered = [call for call in rank if call.name == name]
            assert [(call.count, call.address) for call in registered] == [(8192, allocated)]


def test_the_log_tells_every_call_in_order(tmp_path: Path) -> None:
    launch(2, tmp_path, "order", LOG=str(tmp_path / "log"))
    calls = fake_nccl.read_log(tmp_path / "log")
    by_rank = {rank[-1].rank: rank for rank in calls.values()}
    assert sorted(by_rank) == [0, 1]
    assert by_rank[0][0].name == "ncclGetUniqueId"
    names = [call.name for call in by_rank[1]]
    middle = ["ncclGroupStart", "ncclAllReduce", "ncclBroadcast", "ncclGroupEnd", "ncclGroupEnd"]
    assert names == ["ncclCommInitRankConfig", *["ncclAllReduce"] * 2, *middle, "ncclAllReduce"]
    one, two, *_, last = [call for call in by_rank[1] if call.name == "ncclAllReduce"]
    assert (one.count, one.dtype, one.op) == (5, "float64", "sum")
    assert one.stream == last.stream != two.stream
    assert one.address != two.address == last.address


def test_variants_lack_what_older_versions_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    older = ctypes.CDLL(fake_nccl.compiled(fake_nccl.SINCE_2_27))
    newer = ctypes.CDLL(fake_nccl.compiled())
    assert hasattr(newer, "ncclCommWindowRegister")
    assert not hasattr(older, "ncclCommWindowRegister")
    assert hasattr(older, "ncclCommRegister")
    version = ctypes.c_int()
    assert newer.ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == 22707
    monkeypatch.setenv("HORO_LITE_FAKE_NCCL_VERSION", "21903")
    assert older.ncclGetVersion(ctypes.byref(version)) == 0
    assert version.value == 21903
