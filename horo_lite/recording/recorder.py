"""The recorder: this process's last operations, in a ring buffer (csrc/recorder).

All operations of all frameworks pass through `Group` and its progress thread. `Group` reports to
these functions what a blocking call is, when all ranks have reached it, and when it has ended; the
progress thread reports its operations itself. An operation has the same `position` on all ranks:
for blocking calls their number on that set of ranks, for asynchronous ones the number of their
first announcement in the progress threads' rounds. Phases of reductions are timed only while a
timeline is written.

The ring is always on. It is in this process's memory or, if a flight record or a timeline is
wanted, in a mapped file (`keep`): so it survives any end of the process, and another process can
write the record, the first rank of the host that fails or `horo-lite`. `records.py` reads it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horo_lite import _native, files

if TYPE_CHECKING:
    from horo_lite._native import Operation, Tensors

CAPACITY = 1024
"""The number of operations kept: those of a hundred steps with ten buckets each."""
NAME = "horo_lite_operations"
"""The name of the memory, if it is not that of a file."""
DESCRIPTION_AT = 1024
DESCRIPTION_ENDS = 4096
"""The position of the process's description in the memory's header, as zero-terminated JSON."""

enter = _native.Recorder.enter
begin = _native.Recorder.begin
leave = _native.Recorder.leave
step = _native.Recorder.step
operation_called = _native.Recorder.operation
"""`operation(label)`, if nothing else is known, or if Group.run() has already reported it."""

_places: dict[str | tuple[str, ...], int] = {}
_file: Path | None = None
_memory: mmap.mmap | None = None
_description: dict[str, Any] = {}


def _place_of(text: str | tuple[str, ...]) -> int:
    """Return the position of a text, or of names, in the memory; 0 if there is no more room."""
    place = _places.get(text)
    if place is None:
        written = text if isinstance(text, str) else json.dumps(text)
        # Texts for which there was no room are not cached: their number is unlimited.
        place = _native.Recorder.text(written)
        if place:
            _places[text] = place
    return place


def channel_of(ranks: Sequence[int]) -> int:
    """Return the recorder's number for these ranks of the world."""
    return _place_of(json.dumps(list(ranks)))


def operation(
    label: str, kind: str, names: Sequence[str] = (), tensors: Tensors | None = None
) -> None:
    """Record this thread's blocking call, unless it has been recorded already.

    The rank has reached the call, and waits for the others.
    """
    operation_called(
        label,
        _places.get(kind) or _place_of(kind),
        _place_of(tuple(names)) if names else 0,
        tensors,
    )


def submission(
    channel: int, kind: str, names: Sequence[str] = (), tensors: Tensors | None = None
) -> Operation:
    """Describe an operation that is submitted to the progress thread, which records it."""
    return _native.Operation(
        channel,
        _places.get(kind) or _place_of(kind),
        _place_of(tuple(names)) if names else 0,
        tensors,
    )


def keep(capacity: int, path: Path | None, description: Mapping[str, Any] | None = None) -> None:
    """Keep operations in new memory from now on, in a file if a path is given.

    Args:
        capacity: The number of operations to keep.
        path: The file, which is replaced if it exists; the previous one is removed.
        description: Describes this process as a rank of a new world, for readers of the memory:
            `rank`, `size`, `job`, `epoch_ns` (the time since 1970 when the monotonic clock was 0).
            All ranks restart their counts. None: the world has not changed.

    Raises:
        OSError: The file cannot be created.
    """
    global _file, _memory, _description
    n_bytes = _native.Recorder.memory_bytes(capacity)
    if path is None:
        memory = _anonymous(n_bytes)
    else:
        descriptor = files.renewed(path)
        try:
            # Allocate all of it: on a full disk, writing into the mapping would kill the process.
            os.posix_fallocate(descriptor, 0, n_bytes)
            memory = mmap.mmap(descriptor, n_bytes)
        finally:
            os.close(descriptor)
    if description is not None:
        here = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
        _description = here | dict(description)
    text = json.dumps(_description).encode() + b"\0"
    memory[DESCRIPTION_AT : DESCRIPTION_AT + len(text)] = text
    _native.Recorder.use(memory, description is not None)
    former, _file = _file, path
    _memory = memory
    if former != path:
        _remove(former)


def _anonymous(n_bytes: int) -> mmap.mmap:
    """Return memory that `horo-lite top` finds by its name, if the kernel supports names."""
    try:
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    except OSError:
        return mmap.mmap(-1, n_bytes)
    try:
        os.fchmod(descriptor, 0o600)
        os.truncate(descriptor, n_bytes)
        return mmap.mmap(descriptor, n_bytes)
    finally:
        os.close(descriptor)


def file() -> Path | None:
    """Return the path of the memory's file, if it has one."""
    return _file


def release() -> Path | None:
    """Return the path of the memory's file, if it has one, and leave its removal to the caller."""
    global _file
    former, _file = _file, None
    return former


def _remove(path: Path | None) -> None:
    if path is not None and os.getpid() == _description.get("pid"):  # not in a forked child
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def memory() -> bytes:
    """Return a copy of this process's memory, for `records.of_memory`."""
    return b"" if _memory is None else _memory[:]


def job() -> str:
    """Return the name of the world that this process was in last."""
    return str(_description.get("job", ""))
