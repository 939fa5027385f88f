"""An example as one rank of a world made by ranks.py; rank 0 checks its output."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import cupy  # noqa: F401 (before the world is made, which then tells it which GPU to use)
from ranks import join

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def main() -> int:
    name, *options = sys.argv[1:]
    world, _ = join()
    sys.argv = [name, *options]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    if world.rank:
        return 0
    text = said.getvalue()
    print(text, file=sys.stderr)
    accuracy = re.search(r"^test accuracy (\d\.\d+)$", text, re.MULTILINE)
    speed = re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +([\d,]+)", text, re.MULTILINE)
    alike = world.size == 1 or "parameters bit-identical on all" in text
    good = accuracy is not None and float(accuracy[1]) > 0.97 and alike
    found = f"accuracy {accuracy[1]}" if accuracy else "no accuracy"
    print(
        f"{'passed' if good else 'FAILED'} {' '.join([name, *options])}: {found}, "
        f"{speed[-1] if speed else '?'} images/s" + ("" if alike else ", parameters differ")
    )
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
