"""How messages travel inside a host: records through pipes, what is large through anonymous files.

Every rank has one pipe, which the others open through /proc for writing. What is written in one go
is not torn apart if it fits into PIPE_BUF, so all of them can use it, and it stays there even when
its writer has ended. Large bytes wait in a memfd of the sender's, where the receiver reads them:
with reads and writes rather than mappings, which would cost a page fault for every 4 KiB. A file
holds many messages, so that the number of open descriptors does not grow with theirs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

N_IDLE = 2  # files without a message that are kept for the next ones
FILE_BYTES = 32 << 20  # where a file ends this far or farther, the next message begins another one
_LENGTH = struct.Struct("<I")
_MARK_BYTES = 16


class _File:
    """Anonymous memory in which messages lie one behind the other, each behind its mark."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("horo_lite", os.MFD_CLOEXEC)
        self.n_messages = 0  # that have not been fetched
        self.end = 0


class Pipes:
    """This rank's mailbox, and the way to the others'; see `horo_lite.transports.mailbox`."""

    def __init__(self) -> None:
        # The inlet is kept open, so that there is no hang-up.
        self.inbox, self._inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._read = bytearray()
        self._inboxes: Sequence[tuple[int, int]] = []
        self._outlets: dict[int, int] = {}
        self._full: set[int] = set()
        self._files: list[_File] = []
        self._token = b""

    def connect(self, inboxes: Sequence[tuple[int, int]], token: str) -> None:
        """Reach the other ranks' inboxes.

        Args:
            inboxes: Each rank's process id, and the descriptor of its inbox there.
            token: What only this world knows, in hexadecimal digits.
        """
        self._inboxes = inboxes
        self._token = bytes.fromhex(token)
        for pid, number in self._inboxes:
            path = f"/proc/{pid}/fd/{number}"
            try:
                status = os.stat(path)
            except OSError:  # it has ended, as who sends to it will find
                continue
            _check_inbox(path, status)

    def send(self, peer: int, record: bytes) -> bool:
        data = _LENGTH.pack(len(record)) + record
        assert len(data) <= select.PIPE_BUF
        try:
            if peer not in self._outlets:
                self._outlets[peer] = _open_inbox(*self._inboxes[peer])
            outlet = self._outlets[peer]
            self._full.add(outlet)
            os.write(outlet, data)
            self._full.discard(outlet)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EPERM):  # this rank's own trouble
                raise
            # Else it has ended, as who waits will find.
            self._full.discard(self._outlets.get(peer, -1))
            return False
        return True

    def receive(self) -> list[bytes]:
        with suppress(BlockingIOError):
            while data := os.read(self.inbox, 1 << 16):
                self._read += data
        records = []
        while len(self._read) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                break
            records.append(bytes(self._read[_LENGTH.size : end]))
            del self._read[:end]
        return records

    def offer(self, peer: int, number: int, address: int, n_bytes: int) -> tuple[_File, int]:
        file = next((each for each in self._files if each.end < FILE_BYTES), None)
        if file is None:
            file = _File()
            self._files.append(file)
        begin = file.end
        _move(os.pwritev, file.descriptor, begin, self._mark(number), address, n_bytes)
        file.end += _MARK_BYTES + n_bytes
        file.n_messages += 1
        return file, begin

    def location(self, offered: tuple[_File, int]) -> tuple[int, int, int]:
        file, begin = offered
        return os.getpid(), file.descriptor, begin

    def release(self, offered: tuple[_File, int]) -> None:
        file, _ = offered
        file.n_messages -= 1
        if file.n_messages:
            return
        n_idle = sum(not each.n_messages for each in self._files)
        if n_idle <= N_IDLE and file.end <= FILE_BYTES:
            file.end = 0  # its pages are the dear part
        else:
            self._files.remove(file)
            os.close(file.descriptor)

    def fetch(self, peer: int, number: int, location: Any, address: int, n_bytes: int) -> Fetched:
        pid, descriptor, begin = location
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mark = bytearray(_MARK_BYTES)
            _move(os.preadv, file, begin, mark, address, n_bytes)
        finally:
            os.close(file)
        if mark != self._mark(number):  # another process has that number now
            raise OSError(f"process {pid} does not hold message {number}")
        return Fetched()

    def _mark(self, number: int) -> bytes:
        """Return what marks that message, and nothing else."""
        return self._token + number.to_bytes(_MARK_BYTES - len(self._token), "little")

    def wait(self, timeout_s: float) -> None:
        self._wait(timeout_s, self.inbox)

    def wait_for_room(self, timeout_s: float) -> None:
        self._wait(timeout_s)

    def _wait(self, timeout_s: float, *inbox: int) -> None:
        poll = select.poll()
        for each in inbox:
            poll.register(each, select.POLLIN)
        for outlet in list(self._full):
            poll.register(outlet, select.POLLOUT)
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        # What has not been fetched can be, until this process ends.
        files = [file.descriptor for file in self._files if not file.n_messages]
        for descriptor in (self.inbox, self._inlet, *self._outlets.values(), *files):
            if descriptor >= 0:
                self._close(descriptor)
        self.inbox = self._inlet = -1
        self._outlets.clear()
        self._files.clear()

    __del__ = close
    # At the interpreter's end the module `os` may be gone before this object.
    _close = staticmethod(os.close)


def _open_inbox(pid: int, number: int) -> int:
    """Open that process's inbox to write to. The number may be that of any file."""
    path = f"/proc/{pid}/fd/{number}"
    try:
        inbox = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            why = "no free file descriptor is left for a rank's messages: raise `ulimit -n`"
            raise OSError(error.errno, why) from error
        raise
    try:
        _check_inbox(path, os.fstat(inbox))
    except PermissionError:
        os.close(inbox)
        raise
    return inbox


def _check_inbox(path: str, status: os.stat_result) -> None:
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} is not the inbox of a rank of this user")


class Fetched:
    """A message that is here already."""

    def is_here(self) -> bool:
        return True

    def discard(self) -> None:
        """It is too late for that."""


def _move(
    call: Callable[..., int],
    file: int,
    begin: int,
    mark: bytes | bytearray,
    address: int,
    n_bytes: int,
) -> None:
    """From `begin` on, the mark and the bytes at `address` are read from the file, or written."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
    call(file, [mark], begin)
    done = 0
    while done < n_bytes:  # one call moves 2 GiB at most
        moved = call(file, [memory[done:]], begin + _MARK_BYTES + done)
        if moved <= 0:
            raise OSError(f"only {done} of {n_bytes} bytes of a message are there")
        done += moved
