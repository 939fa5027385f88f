"""The public side of the timeline: it is written between `init()` and `shutdown()`."""

from __future__ import annotations

from horo_lite import context, timeline


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write this rank's collective operations to a file from now on, as they happen.

    Only rank 0 writes, as in Horovod; with "{rank}" in the path every rank that calls this writes a
    file of its own. A file of that name is overwritten. What the file has when the job is killed
    can be viewed: Chrome and Perfetto accept a list without its end. `HORO_LITE_TIMELINE=path`
    starts one in `init()`. While none is written, it costs one comparison in each operation.

    Args:
        file_path: Where the file is to be.
        mark_cycles: Horovod's; has no meaning here.

    Raises:
        ValueError: A timeline is being written already: call `stop_timeline()` first.
        NotInitializedError: There was no `init()` yet.
    """
    timeline.start(file_path, context.world().rank)


def stop_timeline() -> None:
    """Complete the file. Does nothing where no timeline is being written."""
    timeline.stop()


context.on_ended(stop_timeline)
