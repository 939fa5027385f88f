"""Run PyTorch's own tests of backends on the backend that the arguments name, in this rank.

PyTorch starts new processes for each test. Here all tests run in the same ones, each with a process
group of its own. What became of each test, and why, is written to a file.

Args: the backend, a folder for files, and the names of tests if not all are to run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from launch import PATIENCE
from torch import distributed as dist

import horo_lite.torch  # noqa: F401 (registers the backend, also where the package is not installed)

backend, folder, chosen = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.update(BACKEND=backend, TEMP_DIR=str(folder))  # for the module of the tests
for name in ("barrier", "test_dir", "init_dir"):
    (folder / name).mkdir(exist_ok=True)
theirs: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
# Exit codes by which a test says that it does not apply, and the reasons.
SKIPS = {skip.exit_code: skip.message for skip in theirs.TEST_SKIPS.values()}


class Test(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
    """A test, in this process."""

    def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
        theirs.Barrier.sync(wait_for, PATIENCE * timeout)


def outcome(number: int, name: str) -> str:
    """Run a test; return "passed", or why it has not."""
    test = Test(name)
    test.rank = rank
    test.file_name = str(folder / f"store of {number}")
    theirs.Barrier.barrier_id = 1000 * number  # also if the last test has failed before one
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            backend,
            f"file://{test.file_name}",
            world_size=size,
            rank=rank,
            timeout=timedelta(seconds=10 * PATIENCE),
        )
        try:
            getattr(test, name)()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        return f"skipped: {SKIPS[end.code]}" if end.code in SKIPS else f"exited: {end.code}"
    except Exception:
        return f"failed: {traceback.format_exc()}"
    return "passed"


outcomes = {}
for number, name in enumerate(unittest.TestLoader().getTestCaseNames(Test), 1):
    if not chosen or name in chosen:
        print("begins", name, flush=True)
        outcomes[name] = outcome(number, name)
(folder / f"outcomes of {rank}.json").write_text(json.dumps(outcomes))
