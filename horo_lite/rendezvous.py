"""Worlds that MPI did not start: how their ranks find each other.

What `init()` needs of all ranks together is little: that they show each other small objects a few
times. mpi4py's communicators can do that, and so can those here, with the same three methods: over
torch's TCPStore until the world stands (`Rendezvous`), and over the world itself afterwards
(`Part`). Nothing that comes out of the store is ever unpickled: its port is open to the network.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from horo_lite.errors import LauncherError, PeerLostError
from horo_lite.launcher import Appointment, host_key

if TYPE_CHECKING:
    from horo_lite.collectives import Group

TIMEOUT_S = 120.0
NOTICE_S = 15.0  # who has waited for so long says for whom
GRACE_S = 2.0  # so long a store is kept for those who have yet to read why init() fails
_stores: dict[tuple[str, int], Any] = {}


class Meeting:
    """A communicator as far as init() and new_group() need one, as mpi4py names it."""

    rank: int
    size: int

    def allgather(self, obj: Any) -> list[Any]:
        """What every rank has brought, in rank order."""
        raise NotImplementedError

    def Free(self) -> None:  # noqa: N802 (mpi4py's name)
        """It is not used any more."""


class Rendezvous(Meeting):
    """The ranks of an appointment, all of which have come; objects are what JSON can say.

    Every process gets a number when it comes, and tells under that number which rank it is; so
    that all can see if two are the same rank, or if they believe in different sizes. Whoever finds
    something wrong writes it down, and every rank raises it.
    """

    def __init__(self, appointment: Appointment, timeout_s: float) -> None:
        self.rank, self.size = appointment.rank, appointment.size
        self._timeout_s = timeout_s
        self._where = f"{appointment.host}:{appointment.port}"
        self._me = f"rank {self.rank} (pid {os.getpid()} on {socket.gethostname()})"
        self._names = {self.rank: self._me}
        self._pids: dict[int, int] = {}  # of those whose end can be seen from here
        self._n_rounds = 0
        self._begin()
        self._keeps_store = self.rank == 0 and not appointment.served
        self._store = self._open(appointment)
        room = f"horo_lite/{appointment.attempt}"
        number = self._ask(lambda: self._store.add(f"{room}/come", 1)) - 1
        first = number - number % self.size  # this world's: there may have been others before
        self._prefix = f"{room}/{first}"
        # Where others write what is wrong with this world, or with this process.
        self._failures = [f"{self._prefix}/failure", f"{room}/come/{number}/failure"]
        self._put(f"{room}/come/{number}", [self.rank, self.size, self._me, os.getpid(), _here()])
        for place in range(first, first + self.size):
            why = self._greet(*self._take(f"{room}/come/{place}"))
            if why:
                self._refuse(why, f"{room}/come/{place}/failure")

    def allgather(self, obj: Any) -> list[Any]:
        room = f"{self._prefix}/{self._n_rounds}"
        self._n_rounds += 1
        self._begin()
        self._put(f"{room}/{self.rank}", obj)
        everyone = [_tuples(self._take(f"{room}/{r}", r)) for r in range(self.size)]
        self._put(f"{room}/read by {self.rank}", True)
        if self._keeps_store:  # it would be gone with this process
            for r in range(self.size):
                self._take(f"{room}/read by {r}", r)
        return everyone

    # Coming.

    def _open(self, appointment: Appointment) -> Any:
        """A connection to the store, which is there now."""
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise LauncherError(
                f"{self._me} of {self.size} is to meet the others at {self._where}, and for that "
                "PyTorch's store is needed: pip install torch; or start the job with mpiexec or "
                "`python -m horo_lite -n N`, which need no PyTorch"
            ) from error
        host, port = appointment.host, appointment.port
        if (host, port) not in _stores:
            if self._keeps_store:
                with suppress(RuntimeError):  # the port is taken: by another rank 0?
                    # If torch.distributed has opened one there in this process, it is shared.
                    _stores[host, port] = TCPStore(
                        host,
                        port,
                        None,
                        True,
                        timedelta(seconds=min(10.0, self._timeout_s)),
                        False,
                        multi_tenant=True,
                    )
                    return _stores[host, port]
                self._keeps_store = False
            self._listen_for_store(host, port)
            try:
                _stores[host, port] = TCPStore(
                    host, port, None, False, timedelta(seconds=min(10.0, self._timeout_s)), False
                )
            except RuntimeError as error:
                raise LauncherError(
                    f"what answers at {self._where} is no store of PyTorch's ({error}): does "
                    "another program use that port? Choose one that is free on rank 0's host"
                ) from error
        return _stores[host, port]

    def _listen_for_store(self, host: str, port: int) -> None:
        """Somebody listens there. (TCPStore would wait deaf to Ctrl-C, and complain at length.)"""
        while True:
            try:
                socket.create_connection((host, port), timeout=5).close()
                return
            except OSError as error:
                if self._waits_too_long([0]):
                    raise LauncherError(
                        f"{self._me} of {self.size} has waited {self._timeout_s:.0f} s for rank 0, "
                        f"which is to keep a store at {self._where} ({error}): has rank 0 been "
                        "started, and is that the address of its host?"
                    ) from None
            time.sleep(0.02)

    def _greet(self, rank: int, size: int, name: str, pid: int, host: Any) -> str:
        """Why a process that has come is no rank of this world, or is another; "" if it is one."""
        if size != self.size:
            return (
                f"the ranks believe in different sizes: {self.size} is that of {self._me}, but "
                f"{size} that of {name}"
            )
        if not 0 <= rank < size:
            return f"{name} is in a world of {size}, whose ranks go from 0 to {size - 1}"
        if rank in self._pids or (rank == self.rank and name != self._me):
            return (
                f"two processes say that they are rank {rank}: {self._names[rank]} and {name}. "
                "Each needs a number of its own, and each job a port"
            )
        self._names[rank] = name
        self._pids[rank] = pid if host == _here() else 0
        return ""

    def _absent(self) -> list[int]:
        return [r for r in range(self.size) if r not in self._names]

    # Asking the store.

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            _stores.clear()  # the next one may be another
            raise PeerLostError(
                f"{self._me} has lost the store at {self._where} in init(): rank 0, which keeps "
                "it, has ended"
            ) from error

    def _put(self, key: str, obj: Any) -> None:
        self._ask(lambda: self._store.set(key, json.dumps(obj)))

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _read(self, key: str) -> Any:
        return json.loads(self._ask(lambda: self._store.get(key)))

    def _take(self, key: str, awaited: int | None = None) -> Any:
        """What stands under that key once a rank has written it; None: one of those to come."""
        pause_s = 1e-3
        while not self._has(key):
            for failure in self._failures:
                if self._has(failure):
                    raise LauncherError(self._read(failure))
            ranks = self._absent() if awaited is None else [awaited]
            for rank, pid in self._pids.items():
                if pid and (awaited in (None, rank)) and not _lives(pid):
                    raise PeerLostError(
                        f"{self._names[rank]} died in init(), while {self._me} waited for "
                        f"{_these(ranks)}"
                    )
            if self._waits_too_long(ranks):
                self._refuse(
                    f"{_these(ranks)} of {self.size} did not come to {self._where} within "
                    f"{self._timeout_s:.0f} s (HORO_LITE_START_TIMEOUT_S): look at what became of "
                    "them, and whether all have the same address and size"
                )
            time.sleep(pause_s)
            pause_s = min(0.05, 1.5 * pause_s)
        return self._read(key)

    def _refuse(self, why: str, *places: str) -> NoReturn:
        """LauncherError, on every rank that comes or has come."""
        for failure in (*places, self._failures[0]):
            self._put(failure, why)
        if self._keeps_store:
            time.sleep(GRACE_S)
        raise LauncherError(why)

    def _begin(self) -> None:
        self._began, self._noted = time.monotonic(), False

    def _waits_too_long(self, awaited: list[int]) -> bool:
        """Whether it is time to give up; the first rank says for whom it waits before that."""
        waited_s = time.monotonic() - self._began
        if waited_s > NOTICE_S and not self._noted:
            self._noted = True
            if self.rank == min(self._names):
                print(
                    f"[horo_lite] {self._me} has waited {waited_s:.0f} s in init() for "
                    f"{_these(awaited)} of {self.size}, and will for {self._timeout_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
        return waited_s > self._timeout_s


class Part(Meeting):
    """Some ranks of a world that stands, while they make a group.

    The whole world exchanges what these say to each other: the other ranks `attend`.
    """

    def __init__(self, group: Group, ranks: list[int]) -> None:
        self.size = len(ranks)
        self.rank = ranks.index(group.rank) if group.rank in ranks else -1
        self._group = group
        self._ranks = ranks

    def allgather(self, obj: Any) -> list[Any]:
        return [said for said, _ in self._exchange(obj)]

    def attend(self) -> None:
        """The others have made their group."""
        while not any(is_over for _, is_over in self._exchange(None)):
            pass

    def Free(self) -> None:  # noqa: N802
        self._exchange(None, True)

    def _exchange(self, obj: Any, is_over: bool = False) -> list[tuple[Any, bool]]:
        everyone = self._group.allgather_object((obj, is_over), name="new_group")
        return [everyone[r] for r in self._ranks]


def _here() -> list[str]:
    return list(host_key())


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _tuples(obj: Any) -> Any:
    """JSON has no tuples, and lists are no keys."""
    if isinstance(obj, list):
        return tuple(map(_tuples, obj))
    return {k: _tuples(v) for k, v in obj.items()} if isinstance(obj, dict) else obj


def _these(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
