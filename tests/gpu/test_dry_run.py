"""The checks of `make gpu-check`, tried on the fake device, so that they work on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launches

HERE = Path(__file__).resolve().parent


def check(only: str, **env: str) -> subprocess.CompletedProcess[str]:
    import horo_lite

    package = Path(horo_lite.__file__).parent.parent
    given = {"HORO_LITE_TEST_GPU_PACKAGE": str(package), "HORO_LITE_TEST_GPU_ONLY": only, **env}
    return subprocess.run(
        [sys.executable, str(HERE / "check.py")],
        capture_output=True,
        text=True,
        timeout=330,
        env={**os.environ, **given},
    )


@pytest.mark.parametrize("only", ["fake device, 1 rank;fake device, 2 ranks", "a killed peer"])
def test_on_the_fake_device(only: str, tmp_path: Path) -> None:
    out = tmp_path / "table"
    ended = check(only, HORO_LITE_TEST_GPUS="a", OUT=str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed, failed = ended.stdout.splitlines()[-1].removesuffix(" failed").split(" passed, ")
    assert int(passed) == (41 if "fake device" in only else 1)
    assert int(failed) == 0
    assert out.read_text() == ended.stdout


@pytest.mark.parametrize(
    ("stage", "only", "n_passed"), [("extra", "2 ranks", 9), ("tune", "without NCCL_P2P", 2)]
)
def test_the_other_stages(stage: str, only: str, n_passed: int) -> None:
    ended = check(only, HORO_LITE_TEST_GPUS="a", HORO_LITE_TEST_GPU_STAGE=stage)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{n_passed} passed, 0 failed"


def test_what_fails_is_counted_and_shown() -> None:
    """Here NCCL cannot be found, and no check of a world over it can pass."""
    ended = check("fake device, 1 rank", HORO_LITE_TEST_GPUS="a", HORO_LITE_NCCL_LIB="/nowhere")
    assert ended.returncode == 1
    assert "FAILED:" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "0 passed, 1 failed"
