"""A trace of the ranks' operations, for ui.perfetto.dev or chrome://tracing.

While a timeline is written, a rank's recorder has room for more operations, in a file beside the
trace. When the timeline ends, the rank adds its operations to the trace and removes that file.
Ranks do so one at a time, in any order: in between, the trace is valid, and it is complete after
the last rank. If a job fails, the rank that reports the failure adds the operations of all ranks;
after a job whose processes were killed, `horo-lite trace` does so. Both repair a trace that a rank
was writing when it was killed, as the next rank does.

The trace is in Chrome's trace event format. For each operation it contains

- a pair of events "b" and "e" with the category "queue", from its submission until every rank had
  submitted it;
- an event "X", from then until it was complete on this rank. Its category is the kind of operation;
- within that, for reductions in host memory, an event "X" of the category "phase" for each of its
  phases. These are sums: large arrays pass through the phases piece by piece.

All of them contain the operation's name, and in `args` its size and the names of its tensors, if
they have any. `pid` is the rank; each group of ranks has a `tid` for its blocking calls and one for
its asynchronous operations. Times are in microseconds since 1970, by the clock of rank 0's host. On
a GPU, an operation ends when it has been queued there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from horo_lite import _native, files
from horo_lite.errors import warn
from horo_lite.recording import recorder
from horo_lite.recording.records import (
    Operation,
    Records,
    file_of,
    files_of,
    of_files,
    of_memory,
    ranks_text,
)

CAPACITY = 1 << 16
"""How many of each rank's last operations a timeline keeps."""
PATIENCE_S = 600.0
"""How long a rank waits while others write, which takes seconds for each."""
_BEGIN, _END, _UNJOINED_END = b"[\n", b"\n]\n", b"\n] "


class _Running(NamedTuple):
    given: str
    path: Path
    first: int
    """The number of its first operation."""
    former: Path | None
    """The previous file of the recorder's memory."""
    pid: int
    """To recognize forked children, which are not ranks."""


_running: _Running | None = None
_paused: str | None = None
"""What `resume` continues: the path as it was given."""


def start(path: str | os.PathLike[str], rank: int, *, paused: bool = False) -> None:
    """Start a timeline: see `horo_lite.start_timeline`.

    Args:
        path: The file of the trace, which is replaced if it exists.
        rank: This rank's number.
        paused: Whether to start with `resume`, and then to keep an existing trace.

    Raises:
        ValueError: A timeline is already being written.
        OSError: The file cannot be written.
    """
    global _paused
    if is_running():
        raise ValueError("a timeline is already being written: call stop_timeline() first")
    given = os.path.abspath(path)
    if paused:
        _paused = given
        return
    trace = _trace_of(given, rank)
    try:
        _start(given, rank, anew=True)
    except TimeoutError:
        raise
    except files.ForeignFileError as error:
        why = f"rank {rank} cannot write its timeline: {error.strerror}"
        raise PermissionError(error.errno, why) from None
    except OSError as error:
        raise OSError(
            error.errno,
            f"rank {rank} cannot write its timeline to {trace} ({error.strerror}): use another "
            "file in start_timeline() or HORO_LITE_TIMELINE",
        ) from error


def _trace_of(given: str, rank: int) -> Path:
    return Path(given.replace("{rank}", str(rank)))


def _start(given: str, rank: int, anew: bool) -> None:
    global _running
    trace = _trace_of(given, rank)
    with _locked(trace) as file:
        # The first rank to begin may find files of another job or an earlier timeline.
        others = files_of(trace)
        if anew and not of_files(others, recorder.job()):
            os.truncate(file, 0)
            for other in others:
                with contextlib.suppress(PermissionError):  # another user's, which is not read
                    other.unlink(missing_ok=True)
        former = recorder.file()
        recorder.keep(CAPACITY, file_of(trace, rank))
    _native.Recorder.time_phases(True)
    _running = _Running(given, trace, _native.Recorder.n_operations() + 1, former, os.getpid())


def stop() -> None:
    """Write this rank's operations into the trace, if a timeline is being written.

    Raises:
        OSError: The trace cannot be written. The operations remain in a file beside it.
    """
    global _running, _paused
    running, _running, _paused = _running, None, None
    if running is None or running.pid != os.getpid():
        return
    _native.Recorder.time_phases(False)
    mine = of_memory(recorder.memory())
    path = recorder.file()
    try:
        with _locked(running.path) as file:
            if path is not None and path.exists():  # no other process has added them already
                _append(file, list(events_of(mine, running.first)))
                path.unlink()
    except OSError as error:
        recorder.release()
        with contextlib.suppress(OSError):  # there may be no room for its file, either
            recorder.keep(recorder.CAPACITY, running.former)
        if isinstance(error, TimeoutError):
            raise
        raise OSError(
            error.errno,
            f"the operations of rank {mine.rank} cannot be added to {running.path} "
            f"({error.strerror}): they are kept in {path}; `horo-lite trace {running.path}` adds "
            "them later",
        ) from error
    recorder.keep(recorder.CAPACITY, running.former)


def pause(lost: Iterable[int]) -> None:
    """Stop until `resume`, and add the operations of lost ranks, whose numbers others get.

    Every remaining rank calls it, before any of them calls `resume`; again, if more ranks are lost.
    A trace that cannot be written does not end the job: this warns.
    """
    global _paused
    with _warning():
        if _running is not None:
            given = _running.given
            stop()
            _paused = given
        if _paused is not None:
            for trace, rank in [(_trace_of(_paused, rank), rank) for rank in lost]:
                with _locked(trace) as file:
                    _add(file, [file_of(trace, rank)], None)


def resume(rank: int) -> None:
    """Continue the trace that was paused, if any, as this rank of a new world."""
    global _paused
    given, _paused = _paused, None
    if given is not None:
        with _warning():
            _start(given, rank, anew=False)


@contextlib.contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warn(f"the timeline is incomplete: {error}")


def is_running() -> bool:
    """Return whether this rank is writing a timeline, or will with `resume`."""
    return _running is not None or _paused is not None


def path() -> Path | None:
    """Return the path of the trace, while a timeline is being written."""
    return None if _running is None else _running.path


def finish(trace: Path, job: str | None = None, patience_s: float = PATIENCE_S) -> list[int]:
    """Add to a trace the records of ranks that have not added them themselves.

    Args:
        trace: The file.
        job: The name of the ranks' job; by default the one that began last.
        patience_s: Seconds to wait for a rank that is writing.

    Returns:
        The ranks whose operations were added to the trace.

    Raises:
        OSError: The file cannot be written.
        TimeoutError: Another rank is writing, and does not finish.
    """
    if not files_of(trace):
        return []
    with _locked(trace, patience_s) as file:
        paths = files_of(trace)
        if job is None:
            job = next((str(one.description["job"]) for one in of_files(paths)), None)
        return sorted(_add(file, paths, job))


def _add(file: int, paths: Iterable[Path], job: str | None) -> list[int]:
    """Add the records in these files, of any job or of this one; return the ranks."""
    done: list[int] = []
    for path in paths:
        for records in of_files([path], job):
            events = list(events_of(records))
            # A rank may have been killed after writing them and before removing its file.
            if events and not _contains(file, events[-1]):
                _append(file, events)
            path.unlink(missing_ok=True)
            done.append(records.rank)
    return done


@contextlib.contextmanager
def _locked(trace: Path, patience_s: float = PATIENCE_S) -> Iterator[int]:
    """Provide the trace's descriptor, under a lock that excludes other ranks."""
    descriptor = files.shared(trace)
    until = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"another rank has been writing {trace} for {patience_s:g} s, or is "
                        f"stopped. When it has ended, `horo-lite trace {trace}` completes the trace"
                    ) from None
                time.sleep(0.01)
        yield descriptor
    finally:
        os.close(descriptor)


def _append(file: int, events: Sequence[dict[str, Any]]) -> None:
    """Append events to the file's JSON list, which is valid before and after, even on errors."""
    if not events:
        return
    text = ",\n".join(map(json.dumps, events)).encode()
    end = _complete_bytes(file)
    try:
        if end == 0:
            _write(file, _BEGIN + text + _END, 0)
            return
        _write(file, text[1:] + _UNJOINED_END, end)
    except OSError:
        os.truncate(file, end)
        raise
    # From here on no more room is needed. If a rank is killed here, its incomplete file can be
    # recognized, since no event contains a newline: `_END` is in the middle until the lists are
    # joined, and then nowhere.
    _write(file, b",\n" + text[:1], end - len(_END))
    _write(file, _END, end + len(text) - 1)


def _complete_bytes(file: int) -> int:
    """Repair the file if a rank was killed while it wrote; return the resulting size in bytes."""
    n_bytes = os.fstat(file).st_size
    last = os.pread(file, len(_END), max(0, n_bytes - len(_END)))
    if n_bytes and last != _END:
        with mmap.mmap(file, n_bytes, prot=mmap.PROT_READ) as written:
            found = written.find(_END)
        if found < 0 and last == _UNJOINED_END:
            _write(file, _END, n_bytes - len(_END))
        else:
            n_bytes = found + len(_END) if found >= 0 else 0
            os.truncate(file, n_bytes)
    return n_bytes


def _contains(file: int, event: dict[str, Any]) -> bool:
    if not (n_bytes := _complete_bytes(file)):
        return False
    with mmap.mmap(file, n_bytes, prot=mmap.PROT_READ) as written:
        return written.find(json.dumps(event).encode()) >= 0


def _write(file: int, text: bytes, at: int) -> None:
    while text:
        n = os.pwrite(file, text, at)
        at, text = at + n, text[n:]


def events_of(records: Records, first: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank's operations, from the first one on.

    Args:
        records: The rank's records.
        first: The number of the first operation.
    """
    rank, epoch_ns = records.rank, int(records.description["epoch_ns"])
    host = f"{records.description['host']}, pid {records.description['pid']}"

    def name(what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": rank, "tid": tid, "args": args}

    rows: dict[tuple[int, ...], int] = {}
    for operation in records.operations:
        if operation.number < first:
            continue
        if not rows:
            yield name("process_name", 0, name=f"rank {rank} ({host})")
            yield name("process_sort_index", 0, sort_index=rank)
        if operation.ranks not in rows:
            row = rows[operation.ranks] = 2 * len(rows)
            who = ranks_text(operation.ranks, records.size)
            yield name("thread_name", row, name=f"blocking calls of {who}")
            yield name("thread_name", row + 1, name=f"asynchronous operations of {who}")
        yield from _events(operation, rank, rows[operation.ranks], epoch_ns)


def _events(operation: Operation, rank: int, row: int, epoch_ns: int) -> Iterator[dict[str, Any]]:
    args: dict[str, Any] = {}
    if operation.names:
        args["tensors"] = list(operation.names)
    if operation.n_bytes:
        args["bytes"] = operation.n_bytes
    if operation.position:
        args["position"] = operation.position

    def event(phase: str, at_ns: int, category: str, **more: Any) -> dict[str, Any]:
        return {
            "name": operation.label,
            "cat": category,
            "ph": phase,
            "ts": (at_ns + epoch_ns) / 1e3,
            "pid": rank,
            "tid": row + operation.asynchronous,
            **more,
        }

    number = f"{rank}.{operation.number}"
    yield event("b", operation.submitted_ns, "queue", id=number, args=args)
    begun_ns = operation.begun_ns or operation.done_ns
    if not begun_ns:
        return
    yield event("e", begun_ns, "queue", id=number)
    if not operation.done_ns:
        yield event("B", begun_ns, _category(operation), args=args)
        return
    args = args | ({"failed": True} if operation.failed else {})
    took_us = (operation.done_ns - begun_ns) / 1e3
    yield event("X", begun_ns, _category(operation), dur=took_us, args=args)
    at_ns = begun_ns
    for phase, phase_ns in operation.phases_ns.items():
        if phase_ns:
            yield event("X", at_ns, "phase", dur=phase_ns / 1e3) | {"name": phase}
            at_ns += phase_ns


def _category(operation: Operation) -> str:
    """Return the kind of operation in MPI's terms: an optimizer's exchange is an all-reduce."""
    return "allreduce" if operation.kind == "exchange" else operation.kind
