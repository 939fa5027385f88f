"""A trace of this rank's collective operations, for ui.perfetto.dev or chrome://tracing.

Operations are recorded in their `Group` and its engine, which all of them pass, whichever framework
they come from: direct calls, asynchronous ones, and every bucket of every optimizer. The file is in
Chrome's trace event format. Of each operation it has

- a pair of events "b" and "e" with the category "queue": from its submission until every rank had
  submitted it;
- an event "X", from then until it was complete on this rank. Its category is the kind of operation.

Both carry the operation's name, and in `args` the names of its tensors, where they have any, and
its size. `pid` is the rank; each group of ranks has a `tid` for its direct calls and one for its
asynchronous operations. Times are in microseconds since 1970, so that the files of several ranks
can be put side by side. On a GPU, an operation ends when it has been queued there.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from horo_lite._native import Job


def start(path: str, rank: int) -> None:
    """Start a timeline: see `horo_lite.start_timeline`.

    Raises:
        ValueError: One is being written already.
    """
    global _recording
    if is_running():
        raise ValueError("a timeline is being written already: call stop_timeline() first")
    if rank == 0 or "{rank}" in path:
        _recording = _Recording(path.replace("{rank}", str(rank)))


def stop() -> None:
    """Complete the file, if a timeline is being written."""
    global _recording
    recording, _recording = _recording, None
    if recording is not None:
        recording.close()


def is_running() -> bool:
    """Tell whether a timeline is being written by this rank."""
    return _recording is not None


class Members(Protocol):
    """The ranks of a group, as a transport knows them."""

    rank: int
    ranks: Sequence[int]


class _Operation:
    """What is known of one operation until it is over."""

    __slots__ = ("begun_ns", "kind", "n_bytes", "name", "number", "row", "submitted_ns", "tensors")

    def __init__(self, submitted_ns: int, row: tuple[int, int]) -> None:
        self.submitted_ns = submitted_ns
        self.row = row  # pid and tid
        self.number = -1  # of its events in the file
        self.kind = self.name = ""
        self.tensors: Sequence[str] = ()
        self.n_bytes = 0
        self.begun_ns = 0

    def args(self) -> dict[str, Any]:
        args: dict[str, Any] = {"tensors": list(self.tensors)} if self.tensors else {}
        return {**args, "bytes": self.n_bytes} if self.n_bytes else args


class _Recording:
    """The file, and what is in flight."""

    def __init__(self, path: str) -> None:
        # Unbuffered: what has happened is in the file when the job is killed, and a forked child
        # has nothing to write.
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed in close())
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._rows: dict[tuple[int, ...], int] = {}  # by the ranks of the group
        self._in_flight: list[tuple[_Operation, Job]] = []
        self._since_1970_ns = time.time_ns() - time.monotonic_ns()
        self._separator = b"[\n"

    def row(self, members: Members, asynchronous: bool) -> tuple[int, int]:
        """The rank, and the number of the group's channel."""
        ranks = tuple(members.ranks)
        rank = ranks[members.rank]
        with self._lock:
            if ranks not in self._rows:
                row = self._rows[ranks] = 2 * len(self._rows)
                who = ", ".join(map(str, ranks))
                self._name("process_name", rank, 0, f"rank {rank}")
                for tid, what in ((row, "direct calls"), (row + 1, "asynchronous operations")):
                    self._name("thread_name", rank, tid, f"{what} of ranks {who}")
            return rank, self._rows[ranks] + asynchronous

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._write({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})

    def begin(self, operation: _Operation) -> None:
        """It has been submitted."""
        operation.number = next(self._numbers)
        self._event("b", operation, operation.submitted_ns)

    def end(self, operation: _Operation, done_ns: int, failed: bool) -> None:
        """It is complete on this rank, or has failed."""
        begun_ns = operation.begun_ns or done_ns
        self._event("e", operation, begun_ns)
        self._event("X", operation, begun_ns, done_ns - begun_ns, failed)

    def follow(self, operation: _Operation, job: Job) -> None:
        """Asynchronous, it ends some time."""
        with self._lock:
            self._in_flight.append((operation, job))

    def record_completed(self) -> None:
        """Record those in flight that are complete."""
        with self._lock:
            in_flight, self._in_flight = self._in_flight, []
            for operation, job in in_flight:
                _, operation.begun_ns, done_ns, failed = job.times
                if done_ns:
                    self.end(operation, done_ns, failed)
                else:
                    self._in_flight.append((operation, job))

    def close(self) -> None:
        with self._lock:
            self.record_completed()
            if os.getpid() == self._pid:
                self._file.write(b"[]\n" if self._separator == b"[\n" else b"\n]\n")
            self._file.close()

    def _event(
        self, phase: str, operation: _Operation, at_ns: int, took_ns: int = 0, failed: bool = False
    ) -> None:
        pid, tid = operation.row
        event: dict[str, Any] = {
            "name": operation.name,
            "ph": phase,
            "ts": (at_ns + self._since_1970_ns) / 1e3,
            "pid": pid,
            "tid": tid,
        }
        if phase == "X":
            event |= {"cat": _category(operation), "dur": took_ns / 1e3}
        else:
            event |= {"cat": "queue", "id": operation.number}
        if phase != "e":
            event["args"] = operation.args() | ({"failed": True} if failed else {})
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed and os.getpid() == self._pid:
                self._file.write(self._separator + json.dumps(event).encode())
                self._separator = b",\n"


def _category(operation: _Operation) -> str:
    """The kind of operation in MPI's words: an optimizer's exchange is an all-reduce."""
    return "allreduce" if operation.kind == "exchange" else operation.kind


_recording: _Recording | None = None


# What groups say of direct calls. Nothing happens in any of these where no timeline is written.


class _Direct(threading.local):
    operation: _Operation | None = None  # that this thread is in


_direct = _Direct()
_NOT_RECORDED = nullcontext()


class _Call(AbstractContextManager[None]):
    """A direct call, which may turn out to be an operation."""

    def __init__(self, recording: _Recording, members: Members) -> None:
        self._recording = recording
        self._outer = _direct.operation
        self._operation = _Operation(time.monotonic_ns(), recording.row(members, False))

    def __enter__(self) -> None:
        _direct.operation = self._operation

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _direct.operation = self._outer
        if self._operation.number >= 0:
            self._recording.end(self._operation, time.monotonic_ns(), kind is not None)
        self._recording.record_completed()


def direct(members: Members) -> AbstractContextManager[None]:
    """Inside, this thread makes a direct call."""
    recording = _recording
    return _NOT_RECORDED if recording is None else _Call(recording, members)


def waits(name: str, kind: str = "", tensors: Sequence[str] = (), n_bytes: int = 0) -> None:
    """The direct call that this thread is in waits for the other ranks; what it is, if known."""
    operation = _direct.operation
    if operation is None or operation.number >= 0:  # its second handshake is part of it
        return
    operation.name, operation.kind = name, kind or name.split(" ")[0]
    operation.tensors, operation.n_bytes = tensors, n_bytes
    if _recording is not None:
        _recording.begin(operation)


def runs() -> None:
    """All ranks are there."""
    operation = _direct.operation
    if operation is not None and not operation.begun_ns:
        operation.begun_ns = time.monotonic_ns()


# And of asynchronous ones.


def submitted(
    members: Members,
    job: Job,
    kind: str = "",
    tensors: Sequence[str] = (),
    n_bytes: int = 0,
) -> None:
    """The engine has got this job."""
    recording = _recording
    if recording is None:
        return
    operation = _Operation(job.times[0], recording.row(members, True))
    operation.name, operation.kind = job.name, kind or job.name.split(" ")[0]
    operation.tensors, operation.n_bytes = tensors, n_bytes
    recording.begin(operation)
    recording.follow(operation, job)
    recording.record_completed()


def record_completed() -> None:
    """Record asynchronous operations that are complete by now."""
    if _recording is not None:
        _recording.record_completed()
