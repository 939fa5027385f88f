"""Public functions of the timeline, which is written between `init()` and `shutdown()`."""

from __future__ import annotations

import os

from horo_lite import context
from horo_lite.recording import timeline


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write this rank's collective operations to a file, from now until `stop_timeline()`.

    All ranks that call it share the file, to which each writes its operations when its timeline
    ends; with "{rank}" in the path, every rank has its own. An existing file is overwritten; it is
    readable by its owner only. The last 65,536 operations of each rank are kept in a file beside
    it: after a job that was killed, `horo-lite trace FILE` makes the trace from these.
    `HORO_LITE_TIMELINE=path` starts a timeline on every rank in `init()`.

    Args:
        file_path: The path of the file: for ranks on several hosts, in a folder that they share, or
            otherwise in one folder per host.
        mark_cycles: Horovod's argument, which has no effect here.

    Raises:
        ValueError: A timeline is already being written: call `stop_timeline()` first.
        NotInitializedError: `init()` has not been called.
        OSError: The file cannot be written.
    """
    timeline.start(file_path, context.world().rank)


def stop_timeline() -> None:
    """Complete this rank's part of the file. Does nothing if no timeline is being written.

    Raises:
        OSError: The file cannot be written. The operations are kept beside it, and `horo-lite
            trace` adds them.
    """
    timeline.stop()
