"""A trace of this rank's operations, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from horo_lite.world import world

__all__ = ["start_timeline", "stop_timeline"]


class Event:
    """One operation: from its submission until the caller had its result."""

    def __init__(self, trace: _Trace, kind: str, name: str) -> None:
        self._trace = trace
        self._kind = kind
        self._name = name
        self._began = time.perf_counter_ns()

    def end(self) -> None:
        """The caller has the result."""
        now = time.perf_counter_ns()
        self._trace.add(
            {
                "name": self._name,
                "cat": self._kind,
                "ph": "X",
                "ts": (self._began - self._trace.began) / 1e3,  # microseconds
                "dur": (now - self._began) / 1e3,
                "pid": self._trace.rank,
                "tid": self._kind,
            }
        )


class _Trace:
    def __init__(self, path: str, rank: int) -> None:
        self.rank = rank
        self.began = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed in close())
        self._file.write("[\n")
        self.add({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})

    def add(self, event: dict[str, Any]) -> None:
        # A list without its end is a trace too: what was written counts if the job dies.
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(event) + ",\n")

    def close(self) -> None:
        with self._lock:
            self._file.write("{}]\n")
            self._file.close()


_trace: _Trace | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """From now on this rank's operations are written to a file, as Chrome trace events.

    An event has the operation's name and kind ("cat"), and when it began and how long it took until
    `synchronize` returned it, in microseconds. Only rank 0 writes, as in Horovod; with "{rank}" in
    the path every rank writes a file of its own. `mark_cycles` has no meaning here. ValueError
    where a timeline is being written already.
    """
    global _trace
    rank = world().rank
    if _trace is not None:
        raise ValueError("a timeline is being written already: call stop_timeline() first")
    if rank == 0 or "{rank}" in file_path:
        _trace = _Trace(file_path.replace("{rank}", str(rank)), rank)


def stop_timeline() -> None:
    """The file is complete. Does nothing where no timeline is being written."""
    global _trace
    if _trace is not None:
        _trace.close()
    _trace = None


def begin(kind: str, name: str) -> Event | None:
    """An operation begins; None where no timeline is being written."""
    return None if _trace is None else Event(_trace, kind, name)
