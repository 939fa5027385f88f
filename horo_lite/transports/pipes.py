"""Messages inside a host: records through pipes, large data through anonymous files.

Every rank has one pipe, which the others open through /proc for writing. Writes of at most PIPE_BUF
bytes are atomic, so all ranks can share the pipe, and the data stays there even after its writer
has ended. Large data waits in a memfd of the sender, from which the receiver reads it: with reads
and writes rather than mappings, which would cost a page fault for every 4 KiB. A file holds many
messages, so that the number of open descriptors does not grow with their number.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from horo_lite.transports.hosts.carrier import memory_at

N_IDLE = 2  # empty files that are kept for the next messages
FILE_BYTES = 32 << 20  # when a file has reached this size, the next message begins another one
_LENGTH = struct.Struct("<I")
_MARK_BYTES = 16


class _File:
    """Anonymous memory that contains consecutive messages, each preceded by its mark."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("horo_lite", os.MFD_CLOEXEC)
        self.n_messages = 0  # not fetched yet
        self.end = 0


class Pipes:
    """This rank's mailbox, and access to the others'; see `horo_lite.transports.mailbox`."""

    def __init__(self) -> None:
        # The write end is kept open, so that there is no POLLHUP.
        self.inbox, self._inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._read = bytearray()
        self._inboxes: Sequence[tuple[int, int]] = []
        self._pipes: dict[int, int] = {}  # the inode of each peer's inbox
        self._outlets: dict[int, int] = {}
        self._full: set[int] = set()
        self._files: list[_File] = []
        self._token = b""

    def connect(self, inboxes: Sequence[tuple[int, int]], token: str) -> None:
        """Connect to the other ranks' inboxes.

        Args:
            inboxes: Each rank's process ID, and the descriptor of its inbox in that process.
            token: A secret of this world, in hexadecimal digits.
        """
        self._inboxes = inboxes
        self._token = bytes.fromhex(token)
        for peer, (pid, number) in enumerate(self._inboxes):
            path = f"/proc/{pid}/fd/{number}"
            try:
                status = os.stat(path)
            except OSError:  # it has ended, which sending to it will detect
                continue
            _check_inbox(path, status)
            self._pipes[peer] = status.st_ino

    def count(self, n_bytes: int) -> None:
        pass  # it stays on this host

    def send(self, peer: int, record: bytes) -> bool:
        data = _LENGTH.pack(len(record)) + record
        assert len(data) <= select.PIPE_BUF
        try:
            if peer not in self._outlets:
                outlet = _open_inbox(*self._inboxes[peer], self._pipes.get(peer))
                if outlet is None:
                    return False
                self._outlets[peer] = outlet
            outlet = self._outlets[peer]
            self._full.add(outlet)
            os.write(outlet, data)
            self._full.discard(outlet)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EPERM):  # an error of this rank
                raise
            # Otherwise the peer has ended, which the wait will detect.
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

    def undelivered(self) -> Sequence[int]:
        return ()  # the receiver has the pipe

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
            file.end = 0  # keep its pages, which are expensive to allocate
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
        if mark != self._mark(number):  # another process has this PID now
            raise OSError(f"process {pid} does not hold message {number}")
        return Fetched()

    def _mark(self, number: int) -> bytes:
        """Return the mark of that message, which is unique."""
        return self._token + number.to_bytes(_MARK_BYTES - len(self._token), "little")

    def wait(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self.inbox, select.POLLIN)
        for outlet in list(self._full):
            poll.register(outlet, select.POLLOUT)
        poll.poll(timeout_s * 1000)

    wait_beside = wait

    def close(self) -> None:
        # Messages that have not been fetched remain available until this process ends.
        files = [file.descriptor for file in self._files if not file.n_messages]
        for descriptor in (self.inbox, self._inlet, *self._outlets.values(), *files):
            if descriptor >= 0:
                self._close(descriptor)
        self.inbox = self._inlet = -1
        self._outlets.clear()
        self._files.clear()

    __del__ = close
    # At interpreter shutdown the module `os` may be cleared before this object is deleted.
    _close = staticmethod(os.close)


def _open_inbox(pid: int, number: int, inode: int | None) -> int | None:
    """Open that process's inbox for writing; return None if it has been closed.

    Its number may then refer to any file, even to another pipe.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        inbox = os.open(f"/proc/{pid}/fd/{number}", flags)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            why = "no free file descriptor is left for a rank's messages: raise `ulimit -n`"
            raise OSError(error.errno, why) from error
        raise
    status = os.fstat(inbox)
    if status.st_ino != inode or not stat.S_ISFIFO(status.st_mode):
        os.close(inbox)
        return None
    return inbox


def _check_inbox(path: str, status: os.stat_result) -> None:
    if not stat.S_ISFIFO(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} is not the inbox of a rank of this user")


class Fetched:
    """A message that has arrived already."""

    def is_here(self) -> bool:
        return True

    def discard(self) -> None:
        """Do nothing: the message has been written already."""


def _move(
    call: Callable[..., int],
    file: int,
    begin: int,
    mark: bytes | bytearray,
    address: int,
    n_bytes: int,
) -> None:
    """Read the mark and the bytes at `address` from the file, or write them, from `begin` on."""
    memory = memory_at(address, n_bytes)
    call(file, [mark], begin)
    done = 0
    while done < n_bytes:  # a call transfers at most 2 GiB
        moved = call(file, [memory[done:]], begin + _MARK_BYTES + done)
        if moved <= 0:
            raise OSError(f"only {done} of {n_bytes} bytes of a message could be transferred")
        done += moved
