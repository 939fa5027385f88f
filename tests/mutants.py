"""One-line changes that matter, each of which some test has to find: `make mutants`.

Each mutant is applied alone to a temporary copy of this checkout, which uses the same environment
and, unless C++ changes, the same core. The tests given after `--` run there until the first fails;
a table says which one. A mutant that none finds is an error.

    python tests/mutants.py -- -m "not launches or quick"          # all, as `make mutants`
    python tests/mutants.py broadcast weight -- tests/collectives  # some, by some tests
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
IGNORED = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "*.egg-info",
    "test_mutants.py",  # in a copy, it would find the changed line
    "__pycache__",
    ".hypothesis",
    ".*_cache",
)


class Mutant(NamedTuple):
    """A change of one line, which occurs once in the file."""

    name: str
    what: str
    file: str
    line: str
    instead: str


MUTANTS = (
    Mutant(
        "average",
        "an all-reduce that does not divide",
        "horo_lite/transports/interface.py",
        "return cls(op, wire, prescale, scale, divisor, weights)",
        "return cls(op, wire, prescale, scale, 1.0, weights)",
    ),
    Mutant(
        "broadcast",
        "a broadcast from the wrong root",
        "horo_lite/collectives/calls.py",
        "transport.broadcast(memory.tensors, self.root_rank)",
        "transport.broadcast(memory.tensors, 0)",
    ),
    Mutant(
        "bucket",
        "a bucket that is left out",
        "horo_lite/training/reducer.py",
        "early = {i for bucket in self._agreed.plan.buckets[:n_begun] for i in bucket}",
        "early = {i for bucket in self._agreed.plan.buckets[: n_begun + 1] for i in bucket}",
    ),
    Mutant(
        "error",
        "a mismatch of gradients that step() swallows",
        "horo_lite/training/reducer.py",
        "            self.abandon()\n            raise\n",
        "            self.abandon()\n            return\n",
    ),
    Mutant(
        "wait",
        "a wait in init() without a time limit",
        "horo_lite/start/rendezvous.py",
        "self.limit_s = limit_s",
        "self.limit_s = float('inf')",
    ),
    Mutant(
        "weight",
        "a rank's weight that is ignored",
        "horo_lite/collectives/calls.py",
        "return 1.0 if self.weight is None else self.weight",
        "return 1.0",
    ),
    Mutant(
        "fp16",
        "fp16 blocks without their scale",
        "csrc/pack/pack_isa.cpp",
        "const int k = scale_exponent(x, n);",
        "const int k = 0;",
    ),
    Mutant(
        "missing",
        "a gradient that rank 0 lacks, and that none exchanges",
        "horo_lite/training/plan.py",
        "present=tuple(plan.present[i] for i, plan in enumerate(witness)),",
        "present=tuple(plans[0].present[i] for i, _ in enumerate(witness)),",
    ),
    Mutant(
        "mismatch",
        "operations that are not compared",
        "horo_lite/transports/agreement.py",
        "return _native.hash64(repr(contract).encode())",
        "return _native.hash64(str(type(contract)).encode())",
    ),
    Mutant(
        "stale",
        "a step that meets the buckets of an abandoned attempt",
        "horo_lite/training/reducer.py",
        'f", {_which_try(self._attempt)}" if self._attempt > 1 else ""',
        '""',
    ),
)


def found_by(mutant: Mutant, tests: list[str]) -> str:
    """Return the first of the tests that fails with this mutant, or "" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder, "horo_lite")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
        file = copy / mutant.file
        text = file.read_text()
        if text.count(mutant.line) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.line!r} is not once in {mutant.file}")
        file.write_text(text.replace(mutant.line, mutant.instead))
        env = dict(os.environ, PYTHONPATH=str(copy))  # also for the processes that tests start

        def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, *arguments]
            return subprocess.run(
                command, cwd=copy, env=env | more, capture_output=True, text=True, check=False
            )

        if file.suffix == ".cpp":
            quickly = {"HORO_LITE_QUICK_BUILD": "1", "HORO_LITE_CUDA": "0"}
            built = python("setup.py", "-q", "build_ext", "--inplace", **quickly)
            if built.returncode:
                raise SystemExit(f"{mutant.name} does not compile:\n{built.stderr}")
        where = python("-c", "import horo_lite; print(horo_lite.__file__)").stdout.strip()
        if where != str(copy / "horo_lite" / "__init__.py"):
            raise SystemExit(f"tests would import {where}, which is not the mutant")
        ended = python("-m", "pytest", "-x", "-q", "--timeout", "180", *tests)
    if ended.returncode == 5:
        raise SystemExit(f"no test is selected by {tests}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    return "" if ended.returncode == 0 else failed[1] if failed else ended.stdout + ended.stderr


def main(names: list[str], tests: list[str]) -> int:
    """Run the mutants with these names, or all, and print a table."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    chosen = [known[name] for name in names or known]
    n_found = 0
    for mutant in chosen:
        began = time.monotonic()
        by = found_by(mutant, tests)
        n_found += bool(by)
        print(f"{mutant.what}: {by or 'NOT FOUND'} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{n_found} of {len(chosen)} were found by these tests")
    return int(n_found < len(chosen))


if __name__ == "__main__":
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.exit(main(sys.argv[1:end], sys.argv[end + 1 :]))
