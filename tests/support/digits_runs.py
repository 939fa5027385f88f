"""Run the examples that learn handwritten digits, for the tests of each framework."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch import Result, run_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def accuracy_of(
    framework: str, *, epochs: int, run: Callable[..., Result] = run_ranks, **options: Any
) -> float:
    """Return the final accuracy of examples/digits_FRAMEWORK.py on 2 ranks, with equal weights.

    `run` is `run_ranks` or `script_on_ranks`, and has the `options`.
    """
    script, arguments = EXAMPLES / f"digits_{framework}.py", ["--epochs", str(epochs)]
    result = run(script, 2, args=arguments, **options).check()
    assert "parameters bit-identical on all 2 ranks" in result.stdout, str(result)
    (found,) = re.findall(r"^test accuracy (\d\.\d+)$", result.stdout, re.MULTILINE)
    return float(found)
