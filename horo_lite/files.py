"""Files that the package writes: each is opened here (tests/test_layers.py checks it).

Other users may be able to write into the folder, as into /tmp. So nothing here follows a link that
another user has made, or writes into a file that another user owns or can reach by another name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PRIVATE, ORDINARY = 0o600, 0o666
"""Modes of new files: readable by their owner only, or as the umask says."""


class ForeignFileError(PermissionError):
    """Another user has, or may have, put something at the path; `strerror` says what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.EPERM, text)


def real(path: str | os.PathLike[str]) -> Path:
    """Return the path of the file to which links lead.

    Raises:
        ForeignFileError: Another user has made a link.
    """
    found = _in_real_folder(Path(path))
    for _ in range(40):
        if not found.is_symlink():
            break
        owner = found.lstat().st_uid
        if owner not in (os.geteuid(), 0):
            raise ForeignFileError(
                f"{found} is a link made by user {owner} (you are {os.geteuid()}): remove it, or "
                "use a path in a directory in which no other user may write"
            )
        found = _in_real_folder(found.parent / found.readlink())
    return found


def _in_real_folder(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)


def check_own(path: Path, about: os.stat_result) -> None:
    """Raise ForeignFileError if what is at `path` is not a file of this user."""
    if not stat.S_ISREG(about.st_mode):
        raise ForeignFileError(f"{path} is not a regular file: use another path, or remove it")
    if not is_own(path, about):
        raise ForeignFileError(
            f"{path} belongs to user {about.st_uid} (you are {os.geteuid()}): use another path, "
            "in a directory in which no other user may write"
        )


def is_own(path: Path, about: os.stat_result) -> bool:
    """Return whether what is at `path` belongs to this user."""
    if about.st_uid == os.geteuid():
        return True
    # NFS may give root's files another owner: which one does a file of this process get there?
    probe = path.with_name(f".{path.name}.{os.getpid()}.owner")
    try:
        descriptor = create(probe)
    except OSError:
        return False
    try:
        mine = os.fstat(descriptor)
        return (mine.st_dev, mine.st_uid) == (about.st_dev, about.st_uid)
    finally:
        os.close(descriptor)
        probe.unlink(missing_ok=True)


def _check_replaceable(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        about = path.lstat()
        if not stat.S_ISLNK(about.st_mode):  # a link is replaced, and nothing behind it is touched
            check_own(path, about)


def folder(path: Path) -> Path:
    """Return the folder, which is created if it does not exist."""
    found = real(path)
    found.mkdir(parents=True, exist_ok=True)
    return found


def create(path: Path, mode: int = PRIVATE) -> int:
    """Return the descriptor of a new file; FileExistsError if there is anything at the path."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, mode)


def renewed(path: Path, mode: int = PRIVATE) -> int:
    """Return the descriptor of a new file, in place of this user's file, or a link, at the path."""
    _check_replaceable(path)
    path.unlink(missing_ok=True)
    return create(path, mode)


@contextlib.contextmanager
def replaced(path: Path, mode: int = PRIVATE) -> Iterator[BinaryIO]:
    """Provide a new file that takes the place of the one at the path when it is complete."""
    _check_replaceable(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(renewed(partial, mode), "wb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def shared(path: Path) -> int:
    """Return the descriptor of a file to which several processes of this user add their parts.

    Nobody else can open it: whoever can read a file can also lock it, without end.
    """
    path = real(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE)
    try:
        about = os.fstat(descriptor)
        check_own(path, about)
        if about.st_nlink > 1:
            raise ForeignFileError(f"{path} is a hard link to a file with another name: remove it")
        os.fchmod(descriptor, PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
