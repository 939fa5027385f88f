"""Records of steps (HORO_LITE_RECORD_STEPS) of ranks that are threads, and their comparison."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch import run_threads

from horo_lite.__main__ import main
from horo_lite.collectives.group import Group
from horo_lite.training import step_record


def recorded(path: Path, n_ranks: int, program: Callable[[Group], Any]) -> str:
    """Run the program on that many ranks, and return the path of its record."""
    os.environ["HORO_LITE_RECORD_STEPS"] = str(path)
    try:
        run_threads(n_ranks, program)
    finally:
        del os.environ["HORO_LITE_RECORD_STEPS"]
        step_record._writer.close()
    return str(path)


def compared(*arguments: str) -> tuple[int, str]:
    """Return the exit code of `horo-lite compare`, and what follows its table, or its error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["compare", *arguments])
    lines = out.getvalue().splitlines()
    headings = [i for i, line in enumerate(lines) if line.startswith("    step")]
    results = [line for line in lines[min(headings, default=-1) + 1 :] if line[:6] != " " * 6]
    return code, "\n".join(results) if headings else err.getvalue()
