"""The public side of the timeline: it is written between `init()` and `shutdown()`."""

from __future__ import annotations

import os

from horo_lite import context
from horo_lite.recording import timeline


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write this rank's collective operations to a file, from now until `stop_timeline()`.

    All ranks that call it share the file, in which each writes its operations when its timeline
    ends; with "{rank}" in the path every rank has its own. A file of that name is overwritten. Of
    each rank the last 65,536 operations are kept, in a file beside it: after a job that was killed,
    `horo-lite trace FILE` makes the trace of these. `HORO_LITE_TIMELINE=path` starts one on every
    rank in `init()`.

    Args:
        file_path: Where the file is to be: for ranks of several hosts in a folder that they share,
            or else in one of each host.
        mark_cycles: Horovod's; has no meaning here.

    Raises:
        ValueError: A timeline is being written already: call `stop_timeline()` first.
        NotInitializedError: There was no `init()` yet.
        OSError: The file cannot be written.
    """
    timeline.start(file_path, context.world().rank)


def stop_timeline() -> None:
    """Complete this rank's part of the file. Does nothing where no timeline is being written.

    Raises:
        OSError: The file cannot be written. The operations stay beside it, and `horo-lite trace`
            adds them.
    """
    timeline.stop()
