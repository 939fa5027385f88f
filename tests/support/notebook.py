"""Run the code of a notebook as a script, without Jupyter: `python notebook.py example.ipynb`."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def code_of(notebook: Path) -> str:
    """Return all code cells, in order."""
    cells = json.loads(notebook.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


if __name__ == "__main__":
    exec(compile(code_of(Path(sys.argv[1])), sys.argv[1], "exec"), {"__name__": "__main__"})
