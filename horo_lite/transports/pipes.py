"""How messages travel inside a host: records through pipes, what is large through anonymous files.

Every rank has one pipe, which the others open through /proc for writing. What is written in one go
is not torn apart if it fits into PIPE_BUF, so all of them can use it, and it stays there even when
its writer has ended. Large bytes wait in a memfd of the sender's, where the receiver reads them:
with reads and writes rather than mappings, which would cost a page fault for every 4 KiB.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

N_IDLE, IDLE_BYTES = 2, 32 << 20  # files that are kept for the next messages
_LENGTH = struct.Struct("<I")
_MARK_BYTES = 16


class Pipes:
    """This rank's mailbox, and the way to the others'; see `horo_lite.messages.Mailbox`."""

    def __init__(self) -> None:
        self._inbox, self._inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  # kept open: no hang-up
        self.place_of_inbox = os.getpid(), self._inbox
        self._read = bytearray()
        self._inboxes: Sequence[tuple[int, int]] = []
        self._outlets: dict[int, int] = {}
        self._full: set[int] = set()
        self._idle: list[int] = []
        self._token = b""

    def connect(self, inboxes: Sequence[tuple[int, int]], token: str) -> None:
        """Where each rank's inbox is: process, and number there; and what only this world knows."""
        self._inboxes, self._token = inboxes, bytes.fromhex(token)

    def post(self, peer: int, record: bytes) -> bool:
        data = _LENGTH.pack(len(record)) + record
        assert len(data) <= select.PIPE_BUF
        try:
            if peer not in self._outlets:
                pid, number = self._inboxes[peer]
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                self._outlets[peer] = os.open(f"/proc/{pid}/fd/{number}", flags)
            outlet = self._outlets[peer]
            self._full.add(outlet)
            os.write(outlet, data)
            self._full.discard(outlet)
        except BlockingIOError:
            return False
        except OSError:  # it has ended, as who waits will find
            self._full.discard(self._outlets.get(peer, -1))
            return False
        return True

    def collect(self) -> list[bytes]:
        with suppress(BlockingIOError):
            while data := os.read(self._inbox, 1 << 16):
                self._read += data
        records = []
        while len(self._read) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._read)[0]
            if len(self._read) < end:
                break
            records.append(bytes(self._read[_LENGTH.size : end]))
            del self._read[:end]
        return records

    def lay_out(self, peer: int, number: int, address: int, n_bytes: int) -> int:
        file = self._idle.pop() if self._idle else os.memfd_create("horo_lite", os.MFD_CLOEXEC)
        _move(os.pwritev, file, self._mark(number), address, n_bytes)
        return file

    def place(self, laid_out: int) -> tuple[int, int]:
        return os.getpid(), laid_out

    def clear(self, laid_out: int) -> None:
        if len(self._idle) < N_IDLE and os.fstat(laid_out).st_size <= IDLE_BYTES:
            self._idle.append(laid_out)  # its pages are the dear part
        else:
            os.close(laid_out)

    def fetch(
        self, peer: int, number: int, place: Any, address: int, n_bytes: int
    ) -> Callable[[], bool]:
        pid, descriptor = place
        file = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mark = bytearray(_MARK_BYTES)
            _move(os.preadv, file, mark, address, n_bytes)
        finally:
            os.close(file)
        if mark != self._mark(number):  # another process has that number now
            raise OSError(f"process {pid} does not hold message {number}")
        return lambda: True

    def _mark(self, number: int) -> bytes:
        """Of a message, and of nothing else."""
        return self._token + number.to_bytes(_MARK_BYTES - len(self._token), "little")

    def wait(self, timeout_s: float) -> None:
        poll = select.poll()
        poll.register(self._inbox, select.POLLIN)
        for outlet in list(self._full):
            poll.register(outlet, select.POLLOUT)
        poll.poll(timeout_s * 1000)

    def close(self) -> None:
        for descriptor in (self._inbox, self._inlet, *self._outlets.values(), *self._idle):
            if descriptor >= 0:
                os.close(descriptor)
        self._inbox = self._inlet = -1
        self._outlets.clear()
        self._idle.clear()

    __del__ = close


def _move(
    call: Callable[..., int], file: int, mark: bytes | bytearray, address: int, n_bytes: int
) -> None:
    """The mark and the bytes at `address` have been read from the file, or written to it."""
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
    call(file, [mark], 0)
    done = 0
    while done < n_bytes:  # one call moves 2 GiB at most
        moved = call(file, [memory[done:]], _MARK_BYTES + done)
        if moved <= 0:
            raise OSError(f"only {done} of {n_bytes} bytes of a message are there")
        done += moved
