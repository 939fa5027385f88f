"""Horovod's own tests of its operations, each on ranks of its own, with horo_lite as `horovod`.

    pip download --no-deps --no-binary :all: horovod==0.19.5    # the last with tests in its source
    tar xf horovod-0.19.5.tar.gz
    .venv/bin/python tests/by_hand/horovod_tests.py horovod-0.19.5/test/test_torch.py -n 3

It prints what became of each test, and the error. docs/from-horovod.md says why those fail that do.
It is run by hand: the tests are Horovod's, and written for older versions of PyTorch and Python.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

RANK = "OMPI_COMM_WORLD_RANK"


@contextlib.contextmanager
def temppath() -> Iterator[str]:
    folder = tempfile.mkdtemp()
    try:
        yield f"{folder}/file"
    finally:
        shutil.rmtree(folder)


def run_as_rank(test: str) -> int:
    """Run a test in this process, which is one rank."""
    import pytest

    import horo_lite.horovod

    horo_lite.horovod.install()
    # The tests' own helpers are not part of Horovod's source package.
    common = types.ModuleType("common")
    common.mpi_env_rank_and_size = lambda: (  # type: ignore[attr-defined]
        int(os.environ[RANK]),
        int(os.environ["OMPI_COMM_WORLD_SIZE"]),
    )
    common.temppath = temppath  # type: ignore[attr-defined]
    sys.modules["common"] = common
    if not hasattr(inspect, "getargspec"):  # from Python 3.11 on
        spec = collections.namedtuple("spec", "args varargs keywords defaults")
        inspect.getargspec = lambda f: spec(*inspect.getfullargspec(f)[:4])  # type: ignore[attr-defined]
    if "torch" in test:
        import torch

        # They train with every optimizer of PyTorch; this newer one is for matrices only.
        if muon := getattr(torch.optim, "Muon", None):
            muon.__module__ = ""
    return pytest.main([test, "-q", "--tb=short", "--no-header", "-p", "no:cacheprovider"])


def job(test: str, n: int) -> tuple[str, str]:
    """Return how a job that runs a test ended, and an error that caused it."""
    with tempfile.TemporaryDirectory() as folder:
        line = f'exec {sys.executable} {__file__} --rank "{test}" >{folder}/out.${RANK} 2>&1'
        launcher = [sys.executable, "-m", "horo_lite", "-n", str(n)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                [*launcher, "bash", "-c", line],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if not any(Path(folder).iterdir()):
                raise SystemExit(f"no rank has started:\n{done.stderr}")
        outputs = [path.read_text() for path in Path(folder).iterdir()]
    ends = [re.search(r"1 (passed|failed|skipped)", output) for output in outputs]
    errors = [re.search(r"^E +(.*)", output, re.M) for output in outputs]
    # Other ranks than the one that failed raise PeerLostError.
    found = sorted((error[1] for error in errors if error), key=lambda e: "PeerLostError" in e)
    named = {end[1] if end else "not ended" for end in ends}
    ended = "failed" if "failed" in named else min(named, default="not ended")
    return ended, next(iter(found), "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", help="a file of tests, or one test as pytest names it")
    parser.add_argument("-n", type=int, default=2, help="the number of ranks")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        raise SystemExit(run_as_rank(args.tests))
    file, _, rest = args.tests.partition("::")
    text = Path(file).read_text()
    (within,) = re.findall(r"^class (\w+)", text, re.M)
    tests = [f"{within}::{name}" for name in re.findall(r"^ +def (test_\w+)", text, re.M)]
    counts: collections.Counter[str] = collections.Counter()
    for test in [rest] if rest else tests:
        end, error = job(f"{file}::{test}", args.n)
        counts[end] += 1
        print(f"{test}: {end} {error if end == 'failed' else ''}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))


if __name__ == "__main__":
    main()
