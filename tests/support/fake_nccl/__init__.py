"""A stand-in for NCCL over host memory: see fake_nccl.cpp for its behaviour and settings."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("fake_nccl.cpp")
PROJECT = Path(__file__).resolve().parents[3]
HEADERS = [PROJECT / "csrc" / "gpu" / "nccl_dl.h", PROJECT / "csrc" / "pack" / "dtype.h"]

# Symbols by the version that added them: to omit with an older HORO_LITE_FAKE_NCCL_VERSION.
SINCE_2_27 = ("ncclCommWindowRegister", "ncclCommWindowDeregister")
SINCE_2_19 = ("ncclMemAlloc", "ncclMemFree", "ncclCommRegister", "ncclCommDeregister")


def compiled(without: Sequence[str] = ()) -> str:
    """Return the path of a libnccl.so.2 for HORO_LITE_NCCL_LIB without those symbols.

    It is compiled once, and linked once without the same symbols, in the project's build directory,
    in a folder named by a hash of everything it depends on.
    """
    compiler = shlex.split(os.environ.get("CXX", ""))
    if not compiler:
        found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
        if found is None:
            raise RuntimeError("the stand-in for NCCL needs a C++ compiler: set CXX")
        compiler = [found]
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-fPIC", "-pthread", "-fvisibility=hidden"]
    flags += ["-ffp-contract=off", "-fwrapv", f"-I{PROJECT / 'csrc'}"]
    digest = hashlib.sha256(repr((compiler, flags)).encode())
    for path in [SOURCE, *HEADERS]:
        digest.update(path.read_bytes())
    folder = PROJECT / "build" / "fake_nccl" / digest.hexdigest()[:16]
    object_file = folder / "fake_nccl.o"
    linked = folder / ("-".join(["without", *sorted(without)]) if without else "all")
    linked.mkdir(parents=True, exist_ok=True)
    library, exports = linked / "libnccl.so.2", linked / "exports"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not object_file.exists():
            _made(object_file, [*compiler, *flags, "-c", str(SOURCE)])
        if not library.exists():
            exports.write_text(
                f"{{ global: nccl*; local: {' '.join(f'{x};' for x in without)} *; }};"
            )
            link = ["-shared", "-pthread", f"-Wl,--version-script={exports}", str(object_file)]
            _made(library, [*compiler, *link])
    return str(library)


def _made(path: Path, command: Sequence[str]) -> None:
    """Let a compiler make a file, which appears when it is complete."""
    unfinished = path.with_name("unfinished")
    command = [*command, "-o", str(unfinished)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ended.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{ended.stderr}")
    unfinished.rename(path)


class Call(NamedTuple):
    """One line of the log: a call by one process."""

    rank: int  # in the communicator of the call; -1 if there is none
    name: str
    count: int
    dtype: str
    op: str  # the root of a broadcast, the peer of send and recv, color/key of a split
    stream: int
    address: int


def read_log(prefix: str | Path) -> dict[int, list[Call]]:
    """Return the calls of each process that ran with HORO_LITE_FAKE_NCCL_LOG=prefix, by pid."""
    calls = {}
    for path in glob.glob(glob.escape(str(prefix)) + ".*"):
        pid = re.fullmatch(r".*\.(\d+)", path)
        if pid is None:
            continue
        # Other processes may be writing their last line.
        complete = Path(path).read_text().rpartition("\n")[0]
        lines = [line.split(" ") for line in complete.splitlines()]
        calls[int(pid[1])] = [
            Call(int(rank), name, int(count), dtype, op, int(stream, 16), int(address, 16))
            for rank, name, count, dtype, op, stream, address in lines
        ]
    return calls
