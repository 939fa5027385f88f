"""The processes of the other ranks, and exchanges of small objects before a world exists."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import re
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from horo_lite.errors import PeerLostError

if TYPE_CHECKING:
    from mpi4py import MPI

    from horo_lite.transports.gloo.connections import GlooConnections

T = TypeVar("T")
# Forms of values that identify a process: see `fits`.
NAME = re.compile(r"rank -?\d+ \(pid \d+ on \S*\)")
PID, DESCRIPTOR = range(1, (1 << 22) + 1), range(1 << 31)


def host_key() -> tuple[str, ...]:
    """Return a key that is equal for processes of one host that share a PID namespace."""
    boot, processes = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, processes


def asked(question: Callable[[], T], look: Callable[[], object]) -> T:
    """Return the result of a library call that waits for another process, perhaps forever.

    A thread makes the call, so that this one can handle Ctrl-C and other events.

    Args:
        question: Called once. If the wait is ended early, its thread continues to wait.
        look: Called some 20 times per second meanwhile. An exception from it ends the wait.
    """
    answers: list[T] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask, name="horo_lite asks", daemon=True)
    thread.start()
    thread.join(0.05)
    while thread.is_alive():
        look()
        thread.join(0.05)
    if failures:
        raise failures[0]
    if not answers:
        raise RuntimeError("the thread that asked has ended without an answer")
    return answers[0]


class ObjectCommunicator:
    """The part of a communicator that creating a world or a group needs, with mpi4py's names.

    Attributes:
        rank: This process's rank in the communicator.
        size: The number of ranks.
    """

    rank: int
    size: int

    def allgather(self, obj: Any, form: Any = object) -> list[Any]:
        """Return every rank's object, in rank order; each `fits` the form."""
        raise NotImplementedError

    def connections(self) -> GlooConnections:
        """Return the world's connections between hosts; every rank calls it.

        Raises:
            LauncherError: They cannot be created: the message says what is missing.
        """
        raise NotImplementedError

    def give_up(self, error: BaseException) -> None:
        """Tell ranks that wait for this one, in this communicator, that it has failed, and why."""

    def Free(self) -> None:  # noqa: N802 (mpi4py's name)
        """Free the communicator, which is no longer used."""


def allgather_objects(comm: MPI.Comm | ObjectCommunicator, obj: T, form: Any = object) -> list[T]:
    """Return every rank's object, in rank order. Every rank of `comm` calls it.

    Only complete data is unpickled: if a rank dies meanwhile, Open MPI's collective operations may
    return without an error and without the data.

    Args:
        comm: The ranks' communicator.
        obj: This rank's object.
        form: The form that each object must fit if processes other than the ranks may write it.

    Raises:
        LauncherError: An object does not fit the form.
        PeerLostError: A rank died meanwhile.
    """
    if isinstance(comm, ObjectCommunicator):
        return comm.allgather(obj, form)
    data = pickle.dumps(obj)
    header = struct.Struct("<QI")
    mine = header.pack(len(data), zlib.crc32(data))
    sealed = mine + zlib.crc32(mine).to_bytes(4, "little")
    headers = bytearray(len(sealed) * comm.size)
    comm.Allgather(sealed, headers)
    sizes, sums = [], []
    for begin in range(0, len(headers), len(sealed)):
        each, seal = headers[begin : begin + header.size], headers[begin + header.size :][:4]
        if zlib.crc32(each).to_bytes(4, "little") != seal:
            raise PeerLostError("a rank died while the ranks were making a world or a group")
        size, crc = header.unpack(each)
        sizes.append(size)
        sums.append(crc)
    everyone = bytearray(sum(sizes))
    comm.Allgatherv(data, [everyone, sizes])
    ends = list(itertools.accumulate(sizes))
    parts = [bytes(everyone[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    if [zlib.crc32(part) for part in parts] != sums:
        raise PeerLostError("a rank died while the ranks were making a world or a group")
    return [pickle.loads(part) for part in parts]


def fits(value: Any, form: Any) -> bool:
    """Return whether a value from another process has the given form.

    A form is a type, None, a range of integers, a regular expression for a string; a tuple of
    forms, one for each item, or `(form, ...)` for any number of items; a dict with the forms of
    required items; or a list of alternative forms.
    """
    if isinstance(form, list):
        return any(fits(value, each) for each in form)
    if isinstance(form, range):
        return type(value) is int and value in form
    if isinstance(form, re.Pattern):
        return isinstance(value, str) and form.fullmatch(value) is not None
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            key in value and fits(value[key], each) for key, each in form.items()
        )
    if isinstance(form, tuple):
        if not isinstance(value, tuple):
            return False
        forms = form[:1] * len(value) if form[1:] == (...,) else form
        return len(value) == len(forms) and all(map(fits, value, forms))
    return value is None if form is None else form is object or type(value) is form
