"""Who the other ranks are, and how they show each other small objects before a world stands."""

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
# Forms of what tells a process: see `fits`.
NAME = re.compile(r"rank -?\d+ \(pid \d+ on \S*\)")
PID, DESCRIPTOR = range(1, (1 << 22) + 1), range(1 << 31)


def host_key() -> tuple[str, ...]:
    """Return what is equal on two processes of one host that can see each other's processes."""
    boot, processes = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, processes


def lives(pid: int) -> bool:
    """Return whether a process of this host, of which pid and host_key() are known, still runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def asked(question: Callable[[], T], look: Callable[[], object]) -> T:
    """Return the answer to a question that a library asks another process, which may never answer.

    A thread asks it, so that this one notices Ctrl-C, and can look after other things.

    Args:
        question: Is asked once. Where the wait is given up, its thread goes on waiting.
        look: Called some 20 times a second meanwhile. What it raises ends the wait.
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
    return answers[0]


class ObjectCommunicator:
    """A communicator as far as making a world or a group needs one, with mpi4py's names.

    Attributes:
        rank: This process's number among those of the communicator.
        size: How many there are.
    """

    rank: int
    size: int

    def allgather(self, obj: Any, form: Any = object) -> list[Any]:
        """Return every rank's object, in rank order; each `fits` that form."""
        raise NotImplementedError

    def connections(self) -> GlooConnections:
        """Return the world's connections between hosts; every rank calls it.

        Raises:
            LauncherError: There can be none: the message says what is missing.
        """
        raise NotImplementedError

    def Free(self) -> None:  # noqa: N802 (mpi4py's name)
        """Give the communicator back: it is not used any more."""


def allgather_objects(comm: MPI.Comm | ObjectCommunicator, obj: T, form: Any = object) -> list[T]:
    """Return every rank's object, in rank order. Every rank of `comm` calls it.

    Nothing is unpickled that has not come whole: where a rank dies meanwhile, a collective
    operation of Open MPI's may end without an error and without the data.

    Args:
        comm: The ranks' communicator.
        obj: What this rank shows the others.
        form: What each object must fit where others than the ranks may have written it.

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
    """Tell whether a value from another process has that form.

    A form is a type, None, a range of integers, a pattern of a string; a tuple of forms, one for
    each item, or `(form, ...)` for any number of items; a dict of the forms of what a dict must
    contain; or a list of forms, one of which will do.
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
