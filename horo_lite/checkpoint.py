"""What a job that ends badly leaves for the next: the last commit, whole, or the one before it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

from horo_lite import __version__
from horo_lite.errors import CheckpointError, warn

# Magic, format, horo_lite's version, length of the pickle, its SHA-256.
_HEADER = struct.Struct(">8sI20sQ32s")
_MAGIC, _FORMAT = b"HOROLITE", 1
_CHUNK_BYTES = 1 << 20


def save(path: str | Path, snapshot: Any) -> None:
    """`snapshot`, which pickle must know, is on the disk at `path`; what was there is one older.

    Called by one process, rank 0. However it ends, also by a kill or a power failure at any moment,
    `load` finds this snapshot or the last one, whole. The file is readable by its owner only.
    OSError where it cannot be written; then the last one is still there. CheckpointError where
    there is something else than a file of this user's. Costs one pass of SHA-256 over the data and
    waits for the disk.
    """
    path = _real(path)
    _check_own(path)
    new, previous = _beside(path, ".new"), _beside(path, ".previous")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()  # half of one, left by a kill
    try:
        _write(new, snapshot)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()  # or it would keep a full disk full
        if not isinstance(error, OSError):
            raise
        raise OSError(
            error.errno,
            f"the commit cannot be written to {path} ({error.strerror}): the last one that was is "
            "kept. Make room there, or give another path",
        ) from error
    # At every moment the newest is at `path`: where nothing is, somebody has removed it.
    with contextlib.suppress(FileNotFoundError):
        previous.unlink()
    with contextlib.suppress(OSError):  # nothing is there yet, or no hard links in this file system
        os.link(path, previous, follow_symlinks=False)
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(new: Path, snapshot: Any) -> None:
    """The snapshot is in a new file, and on the disk."""
    with open(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(bytes(_HEADER.size))
        body = _Hashed(file)
        pickle.dump(snapshot, body, protocol=5)
        file.seek(0)
        file.write(_header(body.n_bytes, body.digest.digest()))
        file.flush()
        os.fsync(file.fileno())


def load(path: str | Path) -> Any:
    """The snapshot that `save` left at `path`, or None where there has been none.

    Where the newest file is torn or damaged, the one before it is returned with a RuntimeWarning,
    and the damaged one put aside as `path`.damaged. CheckpointError where neither can be read. A
    pickle can run any code, so a file that belongs to somebody else counts as damaged.
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
            warn(f"{unreadable[0]}: put aside, and the commit before it is used")
        if name != path:  # or the next save would make a damaged one the previous one
            with contextlib.suppress(OSError):
                name.replace(path)
        return snapshot
    if unreadable:
        raise CheckpointError(
            f"no commit can be read: {'; '.join(unreadable)}. Give another path, or remove what is "
            "there to begin anew"
        )
    return None


def saved_at(path: str | Path) -> float | None:
    """When the commit that `load` would try first was made, in seconds since 1970; or None."""
    for name in _commits(_real(path)):
        with contextlib.suppress(FileNotFoundError):
            return name.lstat().st_mtime
    return None


def _commits(path: Path) -> list[Path]:
    """Where commits may be, the newest first; nowhere, if somebody has removed the newest."""
    return [path, _beside(path, ".previous")] if os.path.lexists(path) else []


def remove(path: str | Path) -> None:
    """No commit is left at `path`: the job that made them has reached its end."""
    for suffix in ("", ".previous", ".new", ".damaged"):
        with contextlib.suppress(FileNotFoundError):
            _beside(_real(path), suffix).unlink()


class _UnreadableError(Exception):
    """Why not, as the rest of a sentence that begins with the file's name."""


class _Hashed:
    """A file for pickle that knows what went through it: no second copy of the data in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.n_bytes += memoryview(data).nbytes
        return self._file.write(data)


def _real(path: str | Path) -> Path:
    """The path without links. CheckpointError where another user says by a link where it leads."""
    path = _in_real_folder(Path(path))
    for _ in range(40):
        if not path.is_symlink():
            break
        owner = path.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            raise CheckpointError(
                f"{path} is a link that user {owner} has made (you are {os.geteuid()}): remove it, "
                "or give a path in a directory in which nobody else may write"
            )
        path = _in_real_folder(path.parent / path.readlink())
    return path


def _in_real_folder(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)


def _opened(path: Path) -> int:
    """A descriptor for reading, at once: no link is followed, and nobody awaited at a FIFO."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a socket, without permission
        raise _UnreadableError(f"cannot be opened ({error.strerror})") from error


def _check_own(path: Path) -> None:
    """CheckpointError where something is at `path` that no `save` of this user has left."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file: give another path, or remove it")
    if found.st_uid != os.geteuid():
        raise CheckpointError(
            f"{path} belongs to user {found.st_uid} (you are {os.geteuid()}): give another path, "
            "one in a directory in which nobody else may write"
        )


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
            f"belongs to user {about.st_uid}, whose code reading it could run (you are "
            f"{os.geteuid()}; copy it if you trust them)"
        )
    start = file.read(_HEADER.size)
    if len(start) < _HEADER.size or not start.startswith(_MAGIC):
        raise _UnreadableError("is no commit of horo_lite")
    _, format_, version, n_bytes, digest = _HEADER.unpack(start)
    if format_ != _FORMAT:
        writer = version.rstrip(bytes(1)).decode(errors="replace")
        raise _UnreadableError(
            f"is of format {format_} (horo_lite {writer}), and this version reads format {_FORMAT}"
        )
    length = about.st_size - _HEADER.size
    if length != n_bytes:
        raise _UnreadableError(f"has {length} bytes of data where {n_bytes} were written")
    found = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        found.update(chunk)
    if found.digest() != digest:
        raise _UnreadableError("is damaged: its checksum is not the one it was written with")
    file.seek(_HEADER.size)
    return pickle.load(file)
