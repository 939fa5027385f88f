"""The recorder: this process's last operations, in a ring of memory (csrc/recorder).

All operations of all frameworks pass `Group` and its engine, which report to these functions: what
a direct call is, when all ranks have come to it, when it is over. The engine reports itself what
becomes of the operations that it was given.

The ring is this process's memory, or that of a file (`keep_in`), which then holds it after any end
of the process. `records.py` reads it.
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

from horo_lite import _native

if TYPE_CHECKING:
    from horo_lite._native import Job, Tensors

CAPACITY = 1024
"""Operations that are kept: of a training loop with ten buckets those of a hundred steps."""
NAME = "horo_lite_operations"
"""Of the memory, where it is no file's."""
DESCRIPTION_AT = 1024
DESCRIPTION_ENDS = 4096
"""Where the memory's header describes the process, as JSON that ends with a 0."""

enter = _native.Recorder.enter
begin = _native.Recorder.begin
leave = _native.Recorder.leave
step = _native.Recorder.step
operation_called = _native.Recorder.operation
"""`operation(label)`, of which nothing else is known, or which Group.run() has told already."""

_places: dict[str | tuple[str, ...], int] = {}
_file: Path | None = None
_memory: mmap.mmap | None = None
_description: dict[str, Any] = {}


def _place_of(text: str | tuple[str, ...]) -> int:
    """The place of a text, or of names, in the memory; 0 where there is no room for more."""
    place = _places.get(text)
    if place is None:
        written = text if isinstance(text, str) else json.dumps(text)
        # What has found no room finds none later; remembering that would take memory without end.
        place = _native.Recorder.text(written)
        if place:
            _places[text] = place
    return place


def channel_of(ranks: Sequence[int]) -> int:
    """What the recorder calls these ranks, by their numbers in the world."""
    return _place_of(json.dumps(list(ranks)))


def operation(
    label: str, kind: str, names: Sequence[str] = (), tensors: Tensors | None = None
) -> None:
    """Say what the direct call is that this thread is in, unless that has been said already.

    The rank has come to it, and waits for the others.
    """
    operation_called(
        label,
        _places.get(kind) or _place_of(kind),
        _place_of(tuple(names)) if names else 0,
        tensors,
    )


def submitted(
    channel: int, job: Job, kind: str, names: Sequence[str] = (), tensors: Tensors | None = None
) -> None:
    """Follow an operation that the engine has got."""
    job.record(channel, _place_of(kind), _place_of(tuple(names)) if names else 0, tensors)


def keep(capacity: int, path: Path | None, description: Mapping[str, Any] | None = None) -> None:
    """Keep the operations in memory of another size, from now on: that of a file, if given.

    Args:
        capacity: Operations that it has room for.
        path: The file. One of that name is replaced, and the former one removed.
        description: Of this process as a rank of a new world, for those who read the memory:
            `rank`, `size`, `job`, `epoch_ns` (since 1970, when the monotonic clock was 0). All
            ranks begin to count anew. None: the same world as before.

    Raises:
        OSError: The file cannot be made.
    """
    global _file, _memory, _description
    n_bytes = _native.Recorder.memory_bytes(capacity)
    if path is None:
        memory = _anonymous(n_bytes)
    else:
        path.unlink(missing_ok=True)
        # Links of other users are not followed, and what they see is their business only.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: on a full disk, writing into the mapping would end the process.
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
    """Memory that `horo-lite top` finds by its name, where the kernel lets it have one."""
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
    """Return where the memory is, if it is a file's."""
    return _file


def release() -> Path | None:
    """Return where the memory is, if it is a file's, and leave the file to the caller."""
    global _file
    former, _file = _file, None
    return former


def _remove(path: Path | None) -> None:
    if path is not None and os.getpid() == _description.get("pid"):  # and not in a forked child
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def memory() -> bytes:
    """Return a copy of this process's memory, for `records.of_memory`."""
    return b"" if _memory is None else _memory[:]


def job() -> str:
    """Return what names the world that this process was in last."""
    return str(_description.get("job", ""))
