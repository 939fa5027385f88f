"""The flight record: every rank's last operations, in the format of PyTorch's flight recorder.

Every rank's recorder is in a file `<rank>.operations` of a folder. The process that ends a failed
job converts these files, also those of ranks that hang or have died, to files `rank_<rank>` that
PyTorch's `torchfrtrace FOLDER` compares.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horo_lite import files
from horo_lite.recording.records import Operation, Records, ranks_text

_PREFIX = "rank_"
_VERSION = "2.10"

# PyTorch's name for each kind of operation. If sizes may differ between ranks, it is a name for
# which its tools do not compare sizes. Operations that move no arrays appear as barriers.
_KINDS = {
    "allreduce": "all_reduce",
    "exchange": "all_reduce",
    "allgather": "all_gather_v",
    "allgather_object": "all_gather_v",
    "broadcast": "broadcast",
    "broadcast_object": "broadcast",
    "alltoall": "all_to_all_v_single",
    "reducescatter": "reduce_scatter_v",
    "all_gather": "all_gather_v",
    "all_to_all": "all_to_all_v_single",
    "sparse all_reduce": "all_reduce",
    "gather": "gather",
    "scatter": "scatter",
}
_SIZES_ARE_ALIKE = {"allreduce", "exchange", "broadcast", "reducescatter"}
_DTYPES = {
    "bool": "Bool",
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
}


def write(folder: Path, everyone: Sequence[Records]) -> None:
    """Write the ranks' records for PyTorch's tools.

    Args:
        folder: The folder for the files. Those of another job are replaced.
        everyone: The records of all ranks that have any.

    Raises:
        OSError: The folder cannot be written.
    """
    first = _first_positions(everyone)
    for records in everyone:
        with files.replaced(folder / f"{_PREFIX}{records.rank}") as file:
            pickle.dump(_dump(records, first), file, protocol=4)
    if everyone:
        _remove_others(folder, everyone[0].size)


def _remove_others(folder: Path, size: int) -> None:
    """Remove the records of ranks that do not exist in this job."""
    for path in folder.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isdecimal() and int(number) >= size:
            with contextlib.suppress(OSError):
                path.unlink()


def _channel(operation: Operation) -> tuple[tuple[int, ...], bool]:
    return operation.ranks, operation.asynchronous


def _first_positions(everyone: Sequence[Records]) -> Mapping[tuple[tuple[int, ...], bool], int]:
    """Return, for every channel, the first operation that is still in the rings of all its ranks.

    A rank with more operations on other channels has lost more of the older ones.
    """
    first: dict[tuple[tuple[int, ...], bool], int] = {}
    for records in everyone:
        if not records.operations or records.operations[0].number == 1:
            continue  # its ring still contains all operations
        lowest: dict[tuple[tuple[int, ...], bool], int] = {}
        for operation in records.operations:
            if operation.position:
                channel = _channel(operation)
                lowest[channel] = min(operation.position, lowest.get(channel, operation.position))
        for channel, position in lowest.items():
            first[channel] = max(position, first.get(channel, 0))
    return first


def _dump(records: Records, first: Mapping[tuple[tuple[int, ...], bool], int]) -> dict[str, Any]:
    """Return one rank's record as PyTorch's flight recorder dumps it."""
    groups: dict[str, dict[str, str]] = {}
    entries = []
    for operation in records.operations:
        if operation.position and operation.position < first.get(_channel(operation), 0):
            continue
        name = ranks_text(operation.ranks, records.size)
        way = "asynchronous operations" if operation.asynchronous else "blocking calls"
        group = f"{way} of {name}"
        groups[group] = {"name": group, "desc": "undefined", "ranks": str(list(operation.ranks))}
        entries.append(_entry(operation, group, records))
    return {
        "version": _VERSION,
        "pg_config": groups,
        "pg_status": {},
        "entries": entries,
        "horo_lite": records.description,
    }


def _entry(operation: Operation, group: str, records: Records) -> dict[str, Any]:
    def at(ns: int) -> int | None:
        return ns + int(records.description.get("epoch_ns", 0)) if ns else None

    alike = operation.kind in _SIZES_ARE_ALIKE and operation.n_tensors
    sizes = [list(operation.shape)] if alike else [[]]
    dtypes = [_DTYPES.get(operation.dtype, operation.dtype)] if alike else [""]
    began, done = operation.begun_ns, operation.done_ns
    tensors = f" ({', '.join(operation.names)})" if operation.names else ""
    return {
        "pg_id": 0,
        "process_group": (group, "undefined"),
        # An operation that no other rank knows yet has no position: use a unique number.
        "collective_seq_id": operation.position or (1 << 62) + operation.number,
        "p2p_seq_id": 0,
        "op_id": operation.number,
        # Not needed: _first_positions() determines which records all ranks have.
        "record_id": 0,
        "profiling_name": f"gloo:{_KINDS.get(operation.kind, 'barrier')}",
        "time_created_ns": at(operation.submitted_ns),
        "time_discovered_started_ns": at(began),
        "time_discovered_completed_ns": at(done),
        "duration_ms": (done - began) / 1e6 if began and done else None,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        # "started" on some ranks and "scheduled" on others would only reflect that ranks are read
        # at different times.
        "state": "completed" if done and not operation.failed else "scheduled",
        "retired": bool(done),
        "timeout_ms": 0,
        "is_p2p": False,
        # The tools print a stack here: the operation's name in messages.
        "frames": [{"name": f"{operation.label}{tensors}", "filename": "horo_lite", "line": 0}],
    }
