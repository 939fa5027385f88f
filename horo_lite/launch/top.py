"""A live view of the ranks of a job: `horo-lite top`.

It reads what the ranks' recorders write in any case, without affecting the ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from horo_lite.errors import printable
from horo_lite.recording import recorder
from horo_lite.recording.records import (
    ENDING,
    Operation,
    Records,
    files_of,
    of_files,
    ranks_text,
)

_CLEAR = "\x1b[H\x1b[2J"
# If the shares of time that ranks spend waiting differ by less than this, no rank is reported as
# slowest.
_WORTH_REPORTING = 0.05


class Sample(NamedTuple):
    """The records of the ranks of one job at one time, by rank."""

    at_ns: int
    ranks: Mapping[int, Records]


def sample(places: Sequence[Path], job: str | None = None) -> Sample:
    """Return what the ranks of a running job have recorded.

    Args:
        places: Folders or traces beside which recorders keep their files; if empty, all accessible
            processes of this host are searched.
        job: The name of the job; by default the one that began last.
    """
    paths = [path for place in places for path in files_of(place)]
    found = of_files(paths if places else _files_of_processes(), job, most=1, counts=_runs)
    return Sample(time.monotonic_ns(), {one.rank: one for one in found})


def _files_of_processes() -> Iterator[Path]:
    seen = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        links: list[Path] = []
        with contextlib.suppress(OSError):  # another user's, or the process has ended
            links = list(folder.iterdir())
        for link in links:
            with contextlib.suppress(OSError):  # it has been closed
                target = os.readlink(link)
                if not target.startswith(f"/memfd:{recorder.NAME} ") and not target.endswith(
                    ENDING
                ):
                    continue
                status = link.stat()
                file = status.st_dev, status.st_ino
                if file not in seen:  # forked children have the same file
                    seen.add(file)
                    yield link


def _runs(records: Records) -> bool:
    """Return whether a rank runs, as far as this host knows."""
    return not _is_here(records) or _resident_bytes(records) > 0


def _is_here(records: Records) -> bool:
    return bool(records.description["host"] == socket.gethostname())


def _resident_bytes(records: Records) -> int:
    """Return the resident memory of a process of this host; 0 after it has ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        path = Path("/proc") / str(int(records.description["pid"])) / "statm"
        return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class _Row(NamedTuple):
    """What one rank did between two samples; shares refer to the time between them."""

    steps_per_s: float
    operations_per_s: float
    bytes_per_s: float
    waits: float
    exchanges: float


def _row(before: Records | None, now: Records, from_ns: int, at_ns: int) -> _Row:
    took_ns = max(at_ns - from_ns, 1)
    since = (before or now).counters
    waited_ns = now.counters.waited_ns - since.waited_ns
    exchanged_ns = now.counters.exchanged_ns - since.exchanged_ns
    last = _in_blocking_call(now)
    if last is not None:  # the operation in progress has not been counted yet
        begun_ns = last.begun_ns or at_ns
        waited_ns += max(0, begun_ns - max(last.submitted_ns, from_ns))
        exchanged_ns += max(0, at_ns - max(begun_ns, from_ns))
    return _Row(
        steps_per_s=(now.counters.n_steps - since.n_steps) / took_ns * 1e9,
        operations_per_s=(now.counters.n_done - since.n_done) / took_ns * 1e9,
        bytes_per_s=(now.counters.n_bytes - since.n_bytes) / took_ns * 1e9,
        waits=min(waited_ns / took_ns, 1.0),
        exchanges=min(exchanged_ns / took_ns, 1.0),
    )


def _in_blocking_call(records: Records) -> Operation | None:
    """Return the blocking call that a rank of this host is in; other hosts' clocks differ."""
    last = records.operations[-1] if records.operations else None
    is_in_it = last is not None and not last.done_ns and not last.asynchronous
    return last if is_in_it and _is_here(records) else None


def table(before: Sample, now: Sample) -> str:
    """Return what the ranks did between two samples, and what they are doing."""
    if not now.ranks:
        return "no rank of the job runs here\n"
    first = next(iter(now.ranks.values()))
    steps = [records.counters.n_steps for records in now.ranks.values()]
    progress = str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"
    job = _line(first.description["job"])
    lines = [
        f"job {job}: {len(now.ranks)} of {first.size} ranks, step {progress}",
        f"{'rank':>4}  {'host':<12} {'pid':>8} {'steps/s':>8} {'ops/s':>8} {'MB/s':>8} "
        f"{'waits':>6} {'exchanges':>9} {'memory':>8}  in",
    ]
    rows = {
        rank: _row(before.ranks.get(rank), records, before.at_ns, now.at_ns)
        for rank, records in now.ranks.items()
    }
    for rank, row in rows.items():
        records = now.ranks[rank]
        host, pid = _line(records.description["host"]), records.description["pid"]
        lines.append(
            f"{rank:>4}  {host:<12.12} {pid:>8} "
            f"{row.steps_per_s:>8.1f} {row.operations_per_s:>8.0f} {row.bytes_per_s / 1e6:>8.0f} "
            f"{row.waits:>6.0%} {row.exchanges:>9.0%} {_memory(records):>8}  "
            f"{_doing(records, now.at_ns)}"
        )
    slowest = min(rows, key=lambda rank: rows[rank].waits)
    most = max(row.waits for row in rows.values())
    if most - rows[slowest].waits > _WORTH_REPORTING:
        lines.append(f"slowest: rank {slowest}, for which others wait {most:.0%} of the time")
    return "\n".join(lines) + "\n"


def _memory(records: Records) -> str:
    if not _is_here(records):
        return "–"
    n_bytes = _resident_bytes(records)
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


def _doing(records: Records, now_ns: int) -> str:
    last = records.operations[-1] if records.operations else None
    if last is None:
        return ""
    label = _line(last.label)
    if last.done_ns:
        return f"(after {label})"
    group = ranks_text(last.ranks, records.size)
    label = label if group == "all ranks" else f"{label} of {group}"
    age_s = (now_ns - last.submitted_ns) / 1e9
    return f"{label} for {age_s:.0f} s" if _in_blocking_call(records) and age_s >= 1 else label


def _line(text: str) -> str:
    """Return text of a rank, perhaps another user's, in a form that is safe to show in one line."""
    return printable(text).replace("\n", " ")


def main(places: Sequence[Path], *, interval_s: float, once: bool) -> int:
    """Show what the ranks of a job are doing, until it ends.

    Args:
        places: See `sample`.
        interval_s: Seconds between two views.
        once: Whether to show only one view.

    Returns:
        1 if there is no such job, otherwise 0.
    """
    before = sample(places)
    if not before.ranks:
        print("there is no job whose memory this user may read", file=sys.stderr)
        return 1
    job = next(iter(before.ranks.values())).description["job"]
    while True:
        time.sleep(interval_s)
        now = sample(places, job)
        if not now.ranks:
            print("the job has ended")
            return 0
        text = table(before, now)
        clears = sys.stdout.isatty() and not once
        print(_CLEAR + text if clears else text, end="", flush=True)
        if once:
            return 0
        before = now
