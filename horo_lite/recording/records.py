"""Reading recorders' memory, of this process or from files of others."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from horo_lite import _native, files
from horo_lite.recording.recorder import DESCRIPTION_AT, DESCRIPTION_ENDS

ENDING = ".operations"
"""The suffix of recorders' files."""
ENDED = ".operations.ended"
"""The suffix of files of ranks that have left the world."""

# As in csrc/recorder/recorder.h.
_MAGIC = b"horo_lite ops 1\0"
_HEADER = struct.Struct("<16s4I6Q")
_OPERATION = struct.Struct("<2Q3qQ6q4I3B5x4q104s")
_ASYNCHRONOUS, _FAILED = 1, 2
_LARGEST_FILE = _native.Recorder.memory_bytes(1 << 16)
"""The size of the largest record, that of a timeline."""
_DESCRIBED: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("rank", "size", "pid", "epoch_ns"), int),
    **dict.fromkeys(("host", "job"), str),
    "began": float,
}
# Numbered as in csrc/pack/dtype.h.
DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "longdouble"),
)


class Operation(NamedTuple):
    """One operation of one rank. Times are ns of its host's monotonic clock; 0 means: not yet.

    Attributes:
        number: Its number among all operations that the rank has recorded, from 1.
        position: Its number in the channel, the same on all ranks; 0 if it is not known yet.
        ranks: The ranks that take part.
        asynchronous: Whether the progress thread runs it; it is then matched by its label.
        label: The operation's name in messages.
        kind: Its kind, such as "allreduce".
        names: The names of its tensors, if they have any.
        submitted_ns: When this rank reached it.
        begun_ns: When all ranks had reached it.
        done_ns: When it ended on this rank.
        failed: Whether it raised an error.
        n_bytes: The bytes of all its tensors on this rank.
        n_tensors: The number of its tensors.
        dtype: The dtype of the first tensor; "" if there is none.
        shape: The shape of the first tensor, up to six axes.
        phases_ns: The time spent in each phase, by name; empty unless a timeline is written.
    """

    number: int
    position: int
    ranks: tuple[int, ...]
    asynchronous: bool
    label: str
    kind: str
    names: tuple[str, ...]
    submitted_ns: int
    begun_ns: int
    done_ns: int
    failed: bool
    n_bytes: int
    n_tensors: int
    dtype: str
    shape: tuple[int, ...]
    phases_ns: dict[str, int]

    @property
    def n_elements(self) -> int:
        """The number of elements of the first tensor."""
        return prod(self.shape)


PHASES = ("pack", "wait", "reduce", "unpack")


class Counters(NamedTuple):
    """A rank's counters since its world began.

    Attributes:
        n_operations: Operations that it has reached.
        n_done: How many of them have ended.
        n_bytes: The bytes of the arrays of those that have ended.
        waited_ns: How long its program has waited for other ranks to reach operations.
        exchanged_ns: How long it was in operations after that.
        n_steps: Steps of its optimizers.
    """

    n_operations: int = 0
    n_done: int = 0
    n_bytes: int = 0
    waited_ns: int = 0
    exchanged_ns: int = 0
    n_steps: int = 0


class Records(NamedTuple):
    """The records of one rank."""

    rank: int
    size: int
    description: dict[str, Any]
    """Describes its process: host, pid, job, epoch_ns and what else `recorder.keep` was given."""
    operations: list[Operation]
    """The last operations, in the order in which the rank reached them."""
    counters: Counters = Counters()


def of_memory(memory: bytes | mmap.mmap, most: int = 1 << 30) -> Records:
    """Read a recorder's memory.

    Args:
        memory: The memory, or a copy of it.
        most: The maximum number of operations to read.

    Raises:
        ValueError: It is not the memory of a recorder.
    """
    try:
        return _read(memory, most)
    except (ArithmeticError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__}: {error})") from error


def _read(memory: bytes | mmap.mmap, most: int) -> Records:
    if len(memory) < DESCRIPTION_ENDS:
        raise ValueError("it is too short")
    magic, capacity, text_bytes, n_text_bytes, _, *counted = _HEADER.unpack_from(memory)
    counters = Counters(*counted)
    n_operations = counters.n_operations
    if magic != _MAGIC:
        raise ValueError("it was not written by this version of horo_lite")
    first = DESCRIPTION_ENDS + text_bytes
    if n_text_bytes > text_bytes or len(memory) < first + capacity * _OPERATION.size:
        raise ValueError("it is incomplete")
    description = json.loads(_text(memory, DESCRIPTION_AT, DESCRIPTION_ENDS))
    if not isinstance(description, dict):
        raise ValueError("it does not say whose it is")
    for name, kind in _DESCRIBED.items():
        description[name] = kind(description[name])
    rank, size = description["rank"], description["size"]
    texts: dict[int, Any] = {0: None}

    def text(place: int, decode: bool = True) -> Any:
        if place not in texts:
            if place >= n_text_bytes:
                raise ValueError("a text lies outside")
            found = _text(memory, DESCRIPTION_ENDS + place, first)
            texts[place] = json.loads(found) if decode else found
        return texts[place]

    operations = []
    for number in range(max(0, n_operations - min(capacity, most)) + 1, n_operations + 1):
        values = _OPERATION.unpack_from(memory, first + number % capacity * _OPERATION.size)
        if values[0] != number:  # being written now
            continue
        label = values[23].partition(b"\0")[0].decode(errors="replace")
        n_tensors, names, channel, kind, dtype, n_axes, flags = values[12:19]
        phases = dict(zip(PHASES, values[19:23], strict=True)) if any(values[19:23]) else {}
        operations.append(
            Operation(
                number=number,
                position=values[1],
                ranks=tuple(map(int, text(channel) or ())),
                asynchronous=bool(flags & _ASYNCHRONOUS),
                label=label,
                kind=text(kind, False) or label.partition(" ")[0],
                names=tuple(map(str, text(names) or ())),
                submitted_ns=values[2],
                begun_ns=values[3],
                done_ns=values[4],
                failed=bool(flags & _FAILED),
                n_bytes=values[5],
                n_tensors=n_tensors,
                dtype=DTYPES[dtype] if n_tensors and dtype < len(DTYPES) else "",
                shape=tuple(values[6 : 6 + min(n_axes, 6)]),
                phases_ns=phases,
            )
        )
    return Records(rank, size, description, operations, counters)


def of_file(path: Path, most: int | None = None) -> Records:
    """Read a recorder's file, which may still be written.

    Args:
        path: The file. If it is not in /proc, it must belong to this user, and a link is not
            followed.
        most: The maximum number of operations to read, without a copy, from memory that may change
            meanwhile; by default all operations are read, from a copy.

    Raises:
        ValueError: It is not a recorder's file.
        OSError: It cannot be read.
    """
    in_proc = path.parts[:2] == ("/", "proc")
    follow = 0 if in_proc else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | follow)
    try:
        about = os.fstat(descriptor)
        n_bytes = about.st_size
        if not DESCRIPTION_ENDS <= n_bytes <= _LARGEST_FILE:
            raise ValueError("it does not have the size of a recorder's memory")
        if not in_proc and not files.is_own(path, about):
            raise ValueError("it belongs to another user")
        # Another user could cut off a file, which would kill a process that has mapped it.
        if most is None or about.st_uid != os.geteuid():
            copy = os.pread(descriptor, n_bytes, 0)
            return of_memory(copy) if most is None else of_memory(copy, most)
        with mmap.mmap(descriptor, n_bytes, prot=mmap.PROT_READ) as memory:
            return of_memory(memory, most)
    finally:
        os.close(descriptor)


def file_of(place: Path, rank: int) -> Path:
    """Return the file for the memory of this rank's recorder, in a folder or beside a trace."""
    if place.is_dir():
        return place / f"{rank}{ENDING}"
    return place.with_name(f"{place.name}.{rank}{ENDING}")


def files_of(place: Path, *endings: str) -> list[Path]:
    """Return all files of recorders in a folder, or beside a trace.

    Args:
        place: The folder, or the trace.
        endings: By default ENDING, of ranks that have not left the world.
    """
    folder, begin = (place, "") if place.is_dir() else (place.parent, f"{place.name}.")
    return [
        path
        for path in folder.glob("*")
        if path.name.startswith(begin)
        and path.name.endswith(endings or ENDING)
        # Another trace's name may begin with this one's.
        and (not begin or path.name[len(begin) :].partition(".")[0].isdecimal())
    ]


def of_files(
    paths: Iterable[Path],
    job: str | None = None,
    most: int | None = None,
    counts: Callable[[Records], bool] = lambda _: True,
) -> list[Records]:
    """Read the files of the ranks of one job, in rank order; skip others.

    Args:
        paths: The files.
        job: The name of the job; by default the one that began last.
        most: As for `of_file`.
        counts: Returns whether a rank's records count.
    """
    found = []
    for path in paths:
        with contextlib.suppress(ValueError, OSError):
            records = of_file(path, most)
            if counts(records):
                found.append(records)
    if found and job is None:
        newest = max(found, key=lambda one: float(one.description["began"]))
        job = newest.description["job"]
    of_job = [one for one in found if one.description["job"] == job]
    return sorted(of_job, key=lambda one: one.rank)


def _text(memory: bytes | mmap.mmap, begin: int, end: int) -> str:
    found = memory.find(b"\0", begin, end)
    text: bytes = memory[begin : end if found < 0 else found]
    return text.decode(errors="replace")


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """Return a phrase that names these ranks."""
    if len(ranks) == size and list(ranks) == list(range(size)):
        return "all ranks"
    return f"ranks {', '.join(map(str, ranks))}"
