"""Records of the ranks' last operations: where they are kept, and what a failed job writes."""

from __future__ import annotations

import contextlib

from horo_lite import context, files
from horo_lite.errors import ranks_in_words
from horo_lite.recording import flight_record, recorder, records, timeline
from horo_lite.settings import flight_record_folder
from horo_lite.start import ending

_PATIENCE_S = 10.0
"""How long a job that fails waits for a rank that writes its timeline, which may be stopped."""


def keep(rank: int, size: int, job: str, epoch_ns: int) -> None:
    """Start a new record of this rank's operations.

    Args:
        rank: This rank's number.
        size: The number of ranks.
        job: The name of the world, the same on all ranks.
        epoch_ns: The result of `clocks.epoch_ns`.

    Raises:
        OSError: The folder for the flight record cannot be written.
    """
    folder = flight_record_folder()
    here = {"rank": rank, "size": size, "job": job, "epoch_ns": epoch_ns}
    if folder is None:
        recorder.keep(recorder.CAPACITY, None, here)
    else:
        try:
            folder = files.folder(folder)
            (folder / f"{rank}{records.ENDED}").unlink(missing_ok=True)  # from another job
            recorder.keep(recorder.CAPACITY, records.file_of(folder, rank), here)
        except OSError as error:
            raise OSError(
                error.errno,
                f"rank {rank} cannot record its operations in HORO_LITE_FLIGHT_RECORD={folder} "
                f"({error.strerror}): set another folder, or unset the variable",
            ) from error
    ending.before_abort(leave)


def ended() -> None:
    """Remove the ranks' records, once all of those found here are of ranks that ended normally.

    Until then they are kept: a rank that ends while others need it may be the cause of a failure.
    """
    file = recorder.release()
    if file is None:
        return
    with contextlib.suppress(OSError):
        file.rename(file.with_name(file.name.removesuffix(records.ENDING) + records.ENDED))
        job = recorder.job()
        if not records.of_files(records.files_of(file.parent), job, most=0):
            for other in records.files_of(file.parent, records.ENDED):
                if records.of_files([other], job, most=0):
                    other.unlink(missing_ok=True)


context.on_ended(timeline.stop)  # releases the memory
context.on_ended(ended)


def leave() -> None:
    """Write the last operations of all ranks, including hung and dead ones, if requested."""
    file, folder, trace = recorder.file(), flight_record_folder(), timeline.path()
    if file is None or ending.in_forked_child():
        return
    try:
        # With a timeline, records of running ranks are beside the trace, not in the folder.
        files = [] if folder is None else records.files_of(folder, records.ENDED)
        for place in {file.parent, folder or file.parent}:
            files += records.files_of(place)
        everyone = records.of_files(files, recorder.job())
        if folder is not None and everyone:
            flight_record.write(folder, everyone)
            ranks = ranks_in_words([one.rank for one in everyone])
            ending.write(f"[horo_lite] the last operations of {ranks} are in {folder}\n")
        if trace is not None:
            timeline.finish(trace, recorder.job(), _PATIENCE_S)
    except Exception as error:  # the error that ends the job is more important
        ending.write(f"[horo_lite] the last operations could not be written: {error}\n")
