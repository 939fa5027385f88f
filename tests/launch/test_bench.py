"""`horo-lite bench`: which results it accepts as correct, and what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from horo_lite.launch import bench

SIZE = 3


@pytest.mark.parametrize("operation", bench.OPERATIONS)
def test_the_result_it_expects_is_that_of_the_operation(operation: str) -> None:
    cases = [bench.Case(operation, 4 * 91, rank, SIZE) for rank in range(SIZE)]
    given = np.stack([case.given for case in cases])
    results = {
        "allreduce": lambda: [given.sum(0)] * SIZE,
        "broadcast": lambda: [given[0]] * SIZE,
        "allgather": lambda: [given.reshape(-1)] * SIZE,
        "reducescatter": lambda: np.split(given.sum(0), SIZE),
        "alltoall": lambda: given.reshape(SIZE, SIZE, -1).swapaxes(0, 1).reshape(SIZE, -1),
    }[operation]()
    for case, result in zip(cases, results, strict=True):
        np.testing.assert_array_equal(case.expected, result)
        bench.Way("right", list, exact=[case.expected]).check([result], 0)


@pytest.mark.parametrize("operation", bench.OPERATIONS)
def test_a_result_without_communication_is_refused(operation: str) -> None:
    case = bench.Case(operation, 4 * 91, 1, SIZE)
    alone = case.given if case.given.size == case.expected.size else case.given[: 90 // SIZE]
    if operation == "allgather":
        alone = np.tile(case.given, SIZE)
    with pytest.raises(ValueError, match="alone is wrong in array 0"):
        bench.Way("alone", list, exact=[case.expected]).check([alone], 0.02)


def test_sizes() -> None:
    assert bench.sizes(4, 300, 4) == [4, 16, 64, 256]
    assert bench.sizes(4, 30, 1.25) == [4, 8, 12, 16, 20, 25]
    options = bench.parser("bench").parse_args(["-b", "1k", "-e", "1.5MiB"])
    assert (options.begin, options.end) == (1024, 3 << 19)


@pytest.mark.parametrize(
    "wrong", [["-b", "2"], ["-b", "x"], ["-e", "inf"], ["-f", "1"], ["-f", "nan"], ["--op", "sum"]]
)
def test_wrong_arguments(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parser("bench").parse_args(wrong)
    assert ended.value.code == 2
    assert f"argument {wrong[0]}" in capsys.readouterr().err


@pytest.mark.mpi
def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "horo_lite", "bench", "-n", "2", "-b", "1k", "-e", "64k"]
    ended = subprocess.run(
        [*command, "-f", "64", "--compare", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not ended.returncode, ended.stderr
    found = json.loads(file.read_text())
    assert (found["op"], found["ranks"]) == ("allreduce", 2)
    assert {(row["way"], row["n_bytes"]) for row in found["rows"]} >= {
        (way, n_bytes) for way in ("horo_lite", "MPI") for n_bytes in (1024, 65536)
    }
    for row in found["rows"]:
        assert row["us"] > 0
        # The same in the digits shown: 2 (n - 1) / n is 1 with two ranks.
        assert row["bus_gb_s"] == row["algorithm_gb_s"]
        # Both are rounded: the time to 0.01 us, which matters more the shorter it is.
        slowest, fastest = (row["n_bytes"] / (row["us"] + e) / 1e3 for e in (0.0051, -0.0051))
        assert slowest - 0.0006 <= row["algorithm_gb_s"] <= fastest + 0.0006
    assert all(f"{n:,} horo_lite" in ended.stdout for n in (1024, 65536))
