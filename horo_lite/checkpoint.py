"""Checkpoint files of a job, from which the next continues: the last complete commit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

from horo_lite import __version__, files
from horo_lite.errors import CheckpointError, warn

# Magic, format, horo_lite's version, length of the pickle, its SHA-256.
_HEADER = struct.Struct(">8sI20sQ32s")
_MAGIC, _FORMAT = b"HOROLITE", 1
_CHUNK_BYTES = 1 << 20


def save(path: str | Path, snapshot: Any) -> None:
    """Write `snapshot`, which must be picklable, to disk at `path`, and keep the previous one.

    One process calls it, rank 0. However it ends, even by a kill or a power failure at any moment,
    `load` finds this snapshot or the previous one, complete. The file is readable by its owner
    only. Costs one pass of SHA-256 over the data, and waits for the disk.

    Raises:
        OSError: The file cannot be written; the previous one still exists.
        CheckpointError: There is something other than a file of this user at `path`.
    """
    path = _real(path)
    _check_own(path)
    new, previous = _beside(path, ".new"), _beside(path, ".previous")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()  # an incomplete one, left by a kill
    try:
        _write(new, snapshot)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()  # otherwise it would keep a full disk full
        if not isinstance(error, OSError):
            raise
        raise OSError(
            error.errno,
            f"the commit cannot be written to {path} ({error.strerror}): the previous one is kept. "
            "Make room there, or use another path",
        ) from error
    # The newest is always at `path`: if nothing is there, a user has removed it.
    with contextlib.suppress(FileNotFoundError):
        previous.unlink()
    with contextlib.suppress(OSError):  # nothing there yet, or no hard links in this file system
        os.link(path, previous, follow_symlinks=False)
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(new: Path, snapshot: Any) -> None:
    """Write the snapshot into a new file, and flush it to disk."""
    with open(files.create(new), "wb") as file:
        file.write(bytes(_HEADER.size))
        body = _Hashed(file)
        pickle.dump(snapshot, body, protocol=5)
        file.seek(0)
        file.write(_header(body.n_bytes, body.digest.digest()))
        file.flush()
        os.fsync(file.fileno())


def load(path: str | Path) -> Any:
    """Return the snapshot that `save` wrote to `path`, or None if there is none.

    If the newest file is incomplete or damaged, the previous one is returned with a RuntimeWarning,
    and the damaged one is renamed to `path`.damaged. A pickle can run any code, so a file that
    belongs to another user counts as damaged.

    Raises:
        CheckpointError: Neither file can be read.
    """
    path, unreadable = _real(path), []
    for name in _commits(path):
        try:
            with open(_opened(name), "rb") as file:
                snapshot = _read(file)
        except FileNotFoundError:
            continue
        except _UnreadableError as error:
            unreadable.append(f"{name} {error}")
            continue
        if unreadable:
            damaged = _beside(path, ".damaged")
            with contextlib.suppress(OSError):
                damaged.unlink(missing_ok=True)
                os.link(path, damaged)
            warn(f"{unreadable[0]}: it was renamed, and the previous commit is used")
        if name != path:  # otherwise the next save would make the damaged one the previous one
            with contextlib.suppress(OSError):
                name.replace(path)
        return snapshot
    if unreadable:
        raise CheckpointError(
            f"no commit can be read: {'; '.join(unreadable)}. Use another path, or remove these "
            "files to start from the beginning"
        )
    return None


def saved_at(path: str | Path) -> float | None:
    """Return when (in seconds since 1970) the commit that `load` tries first was made, or None."""
    for name in _commits(_real(path)):
        with contextlib.suppress(FileNotFoundError):
            return name.lstat().st_mtime
    return None


def _commits(path: Path) -> list[Path]:
    """Return the paths of possible commits, newest first; none, if a user removed the newest."""
    return [path, _beside(path, ".previous")] if os.path.lexists(path) else []


def remove(path: str | Path) -> None:
    """Remove all commits at `path`, because the job has reached its end."""
    for suffix in ("", ".previous", ".new", ".damaged"):
        with contextlib.suppress(FileNotFoundError):
            _beside(_real(path), suffix).unlink()


class _UnreadableError(Exception):
    """The reason, as the rest of a sentence that begins with the file's name."""


class _Hashed:
    """A file for pickle that hashes what is written: no second copy of the data in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.n_bytes += memoryview(data).nbytes
        return self._file.write(data)


def _real(path: str | Path) -> Path:
    """Return the path without links; raise CheckpointError if a link belongs to another user."""
    try:
        return files.real(path)
    except files.ForeignFileError as error:
        raise CheckpointError(error.strerror) from None


def _opened(path: Path) -> int:
    """Open a file for reading, without following a link or waiting at a FIFO."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a socket, without permission
        raise _UnreadableError(f"cannot be opened ({error.strerror})") from error


def _check_own(path: Path) -> None:
    """Raise CheckpointError if `path` is something that this user's `save` cannot have written."""
    try:
        files.check_own(path, path.lstat())
    except FileNotFoundError:
        return
    except files.ForeignFileError as error:
        raise CheckpointError(error.strerror) from None


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _header(n_bytes: int, digest: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, _FORMAT, __version__.encode(), n_bytes, digest)


def _read(file: BinaryIO) -> Any:
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise _UnreadableError("is not a regular file")
    if about.st_uid != os.geteuid():
        raise _UnreadableError(
            f"belongs to user {about.st_uid}, and reading it could run that user's code (you are "
            f"{os.geteuid()}; copy it if you trust them)"
        )
    start = file.read(_HEADER.size)
    if len(start) < _HEADER.size or not start.startswith(_MAGIC):
        raise _UnreadableError("is not a commit of horo_lite")
    _, format_, version, n_bytes, digest = _HEADER.unpack(start)
    if format_ != _FORMAT:
        writer = version.rstrip(bytes(1)).decode(errors="replace")
        raise _UnreadableError(
            f"has format {format_} (horo_lite {writer}), but this version reads format {_FORMAT}"
        )
    length = about.st_size - _HEADER.size
    if length != n_bytes:
        raise _UnreadableError(f"has {length} bytes of data, but {n_bytes} were written")
    found = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        found.update(chunk)
    if found.digest() != digest:
        raise _UnreadableError("is damaged: its checksum does not match")
    file.seek(_HEADER.size)
    return pickle.load(file)
