"""Scripts written for Horovod, run unchanged: `python -m horo_lite --as-horovod`."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from launch import PATIENCE, TESTS, Job, environment

SCRIPTS = TESTS / "as_horovod" / "scripts"


def run_script(
    script: str,
    n: int,
    *args: object,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    path: str = "",
) -> str:
    """Return the output of the script on `n` ranks; `path` is searched first for modules.

    Raises LaunchTimeoutError, with the stacks of all processes, if it has not ended in `timeout_s`.
    """
    command = [sys.executable, "-m", "horo_lite", "-n", str(n), "--as-horovod"]
    command += [str(SCRIPTS / script), *map(str, args)]
    path = os.pathsep.join(filter(None, [path, *sys.path]))
    env = environment({"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})})
    with contextlib.closing(Job(command, env, Path.cwd())) as job:
        return job.wait(timeout_s / PATIENCE).check().stdout


def figures(text: str, n: int) -> list[float]:
    """Return the losses and the sum of the weights that a script printed on `n` ranks."""
    assert f"ranks {n} weights" in text, text
    words = itertools.pairwise(text.split())
    return [float(number) for word, number in words if word in ("loss", "weights")]
