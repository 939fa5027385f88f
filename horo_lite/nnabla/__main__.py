"""`python -m horo_lite.nnabla train.py …`: a script for NNabla's communicator, unchanged."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from horo_lite.nnabla import install


def main() -> None:
    """Run an NNabla script with this package in place of NNabla's communicator."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: mpiexec -n 2 python -m horo_lite.nnabla train.py [its arguments]")
    install()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
