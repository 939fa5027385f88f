"""Rendezvous of ranks in worlds that MPI did not start.

`init()` only needs the ranks to exchange small objects a few times (`ObjectCommunicator`), which
`Rendezvous` does with torch's TCPStore. The store's port is open to the network: no entry is ever
unpickled, every entry is checked (`fits`), and it must be signed (entries.py), unless the ranks are
on several hosts and have no token of the job.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any, TypeVar

from horo_lite.errors import (
    HoroLiteError,
    LauncherError,
    PeerLostError,
    in_one_line,
    printable,
    ranks_in_words,
    say,
    warn,
)
from horo_lite.processes import lives
from horo_lite.start.entries import (
    Offer,
    job_token,
    offered,
    sign,
    signature,
    signed_store,
    verify,
)
from horo_lite.start.launcher import JOB_TOKEN, NO_PROC, has_proc
from horo_lite.start.rendezvous_spec import RendezvousSpec
from horo_lite.transports.gloo.connections import GlooConnections
from horo_lite.transports.peers import (
    DESCRIPTOR,
    NAME,
    PID,
    ObjectCommunicator,
    asked,
    fits,
    host_key,
)

T = TypeVar("T")
NOTICE_S = 15.0  # after this time, a rank reports that it waits, and for which ranks
ANSWER_S = 10.0  # the store's own timeout
GRACE_S = 2.0  # how long a store is kept for ranks that may still come to a world that has failed
LOOK_S = 0.5  # how often each rank looks who has arrived
MOST_BYTES = 1 << 20  # the largest entry
# Kinds of failures: ranks did not come in time, a rank has died or failed, anything else.
_LATE, _LOST, _REFUSED = "late", "lost", "refused"
_stores: dict[tuple[str, int], Any] = {}


class Rendezvous(ObjectCommunicator):
    """The ranks of a rendezvous, once all have arrived; objects must be representable in JSON.

    Ranks on several hosts are connected by PyTorch's gloo.

    Each process publishes its world size under its rank, if no other has, so that all can detect
    whether two have the same rank, or different sizes. A process that fails in `init()`, for any
    reason, publishes that, too, and every rank raises it: those that wait, and those that come
    later. Worlds are numbered: the next one begins once all have arrived in one, a rank comes again
    after it has failed, or one comes that the others did not wait for any longer. What is published
    after the arrival is signed with the world's own key, which only ranks of this user can know:
    see `_world_key`.

    Args:
        spec: The address of the rendezvous, and this process's rank.
        timeout_s: Seconds within which all ranks must arrive.
        store: A torch store to which this process is already connected; by default it connects to
            the one in `spec`.

    Raises:
        LauncherError: Ranks are missing, two have the same number, or the store has been modified.
        PeerLostError: A rank died during this.
    """

    def __init__(self, spec: RendezvousSpec, timeout_s: float, store: Any = None) -> None:
        if not has_proc():  # each rank would consider the others dead
            raise LauncherError(NO_PROC)
        self.rank, self.size = spec.rank, spec.size
        self._timeout_s = timeout_s
        self._where = spec.where
        self._store_name = f"the store at {spec.where}" if spec.port else spec.where
        self._spec = spec
        self._job_token = job_token()
        self._offer = None if self._job_token or self.rank else Offer()
        self._me = _name(spec)
        self._names = {self.rank: self._me}
        self._pids: dict[int, int] = {}  # of ranks whose end can be detected here
        self._n_rounds = 0
        self._prefix = ""  # of the keys of this world; "": not known yet
        self._round = ""  # the prefix of the current round's keys; "": ranks are still arriving
        self._phase = _Wait(self._timeout_s)
        self._has_given_up = self._has_timed_out = False
        self._connections: GlooConnections | None = None
        self._keeps_store = self.rank == 0 and not spec.served
        self._store = store
        if store is None:
            self._store = self._open(spec)
        self._lost = _lost_key(spec)
        self._mine = (
            *(self.rank, self.size, self._me, os.getpid(), _here()),
            *(self._offer and self._offer.descriptor, secrets.token_hex(16)),
        )
        self._key = self._job_token
        try:
            self._join(f"horo_lite/{spec.attempt}")
            self._key = self._world_key(self._arrivals())
        except BaseException as error:
            self.give_up(error)
            raise

    def allgather(self, obj: Any, form: Any = object) -> list[Any]:
        """Return every rank's object, in rank order; each must fit `form`."""
        self._phase = _Wait(self._timeout_s)
        self._round = room = f"{self._prefix}/{self._n_rounds}"
        self._n_rounds += 1
        self._put(f"{room}/{self.rank}", obj)
        everyone = [self._take(f"{room}/{r}", form, r) for r in range(self.size)]
        if everyone[self.rank] != _read_back(json.loads(json.dumps(obj))):
            raise LauncherError(self._overwritten())
        if self._offer:
            self._offer.close()  # all have read it
        self._round = room = f"{room}/read by"
        self._put(f"{room}/{self.rank}", True)
        if self._keeps_store:  # the store would end with this process
            for r in range(self.size):
                self._take(f"{room}/{r}", bool, r)
        return everyone

    def connections(self) -> GlooConnections:
        """Return the connections between the world's ranks; every rank calls it."""
        if self._connections is None:
            prefix = f"{self._prefix}/gloo"
            store = signed_store(
                self._store, prefix, self._key, self._forged, lambda: self._has_given_up
            )
            waited = "to be connected to the others"
            try:
                self._connections = GlooConnections(
                    store,
                    self.rank,
                    self.size,
                    self._where,
                    self._timeout_s,
                    lambda: self._check(self._pids, waited),
                    lambda sender, receiver: signature(self._key, f"{sender} to {receiver}", b""),
                )
            except LauncherError:  # gloo blames the network, even if rank 0 ended with the store
                self._check(self._pids, waited)
                raise
            self.allgather(True, bool)  # the store is no longer needed
        return self._connections

    def give_up(self, error: BaseException) -> None:
        self._has_given_up = True
        if not self._prefix:
            return
        failure = self._failure
        with suppress(HoroLiteError, RuntimeError):
            if not self._has(failure):
                kind, why = _LOST, str(error)
                if isinstance(error, LauncherError):
                    kind = _LATE if self._has_timed_out else _REFUSED
                elif not isinstance(error, PeerLostError):
                    why = f"{self._me} failed in init() ({in_one_line(error):.1000})"
                self._put(failure, [kind, why], notice=True)
            self._put(f"{failure} read by/{self.rank}", True, notice=True)
            if self._keeps_store:
                self._keep_store_until_read()

    def _keep_store_until_read(self) -> None:
        """Wait until the others have read why this world failed, for a time."""
        began = time.monotonic()
        left = set(range(self.size)) - {self.rank}
        while left:
            left -= {r for r in left if self._has(f"{self._failure} read by/{r}")}
            left -= {r for r in left if self._pids.get(r) and not lives(self._pids[r])}
            has_come = any(r in self._names for r in left)
            if time.monotonic() > began + (ANSWER_S if has_come else GRACE_S):
                return
            time.sleep(0.02)

    def Free(self) -> None:  # noqa: N802 (mpi4py's name)
        if self._connections is not None:
            self._connections.close()

    # Arrival.

    def _open(self, spec: RendezvousSpec) -> Any:
        """Return a connection to the store, once it exists."""
        try:
            from torch.distributed import TCPStore  # noqa: F401
        except ImportError as error:
            raise LauncherError(
                f"{self._me} of {self.size} should find the others at {self._where}, which needs "
                "PyTorch's store: pip install torch; or start the job with mpiexec or "
                "`python -m horo_lite -n N`, which need no PyTorch"
            ) from error
        host, port = spec.host, spec.port
        known = self._answer(lambda: _known_store(spec))
        if known is not None:
            return known
        if self._keeps_store:
            with suppress(RuntimeError):  # the port is taken: by another rank 0?
                return keep_store(spec, self._timeout_s)
            self._keeps_store = False
        with socket.socket(socket.AF_UNIX) as mark:
            self._listen_for_store(host, port, mark)
        try:
            store = self._answer(lambda: _connected(spec, self._timeout_s))
        except HoroLiteError:
            raise
        except RuntimeError as error:
            try:
                _knock(host, port, timeout_s=5)
            except OSError:  # it no longer answers
                raise self._lost_store() from error
            raise LauncherError(
                f"what answers at {self._where} is not a PyTorch store ({error}): does "
                "another program use that port? Choose one that is free on rank 0's host"
            ) from error
        # Where ranks are threads, it does not replace the store that this process keeps.
        return _stores.setdefault((host, port), store)

    def _listen_for_store(self, host: str, port: int, mark: socket.socket) -> None:
        """Wait until a process listens on the port.

        While TCPStore waits, it does not react to Ctrl-C, and prints many messages.

        Args:
            host: The host.
            port: The port.
            mark: A socket that shows the other ranks of this host that this one has reported it.
        """
        while True:
            try:
                _knock(host, port, timeout_s=5)
                return
            except OSError as error:
                if self._waits_too_long(
                    self._phase,
                    lambda: _is_first_here(mark, self._where),
                    lambda: f"rank 0 of {self.size}",
                ):
                    raise LauncherError(
                        f"{self._me} of {self.size} has waited {self._timeout_s:.0f} s for rank 0, "
                        f"which should keep a store at {self._where} ({error}): has rank 0 been "
                        "started, and is that the address of its host?"
                    ) from None
            time.sleep(0.02)

    def _join(self, room: str) -> None:
        """Arrive in the first world of this room that is not over.

        Args:
            room: Precedes the keys of its worlds.
        """
        for number in itertools.count():
            prefix = f"{room}/{number}"
            if self._has(f"{prefix}/over"):
                continue
            self._prefix = prefix
            name = self._place(self.rank)
            if self._put_first(name, self._mine):
                if not (self._has(self._failure) and self._read_failure()[0] == _LATE):
                    return
                self._end_world()  # the others may come again, as this one does now
                continue
            # Another process has, or this one did, in an init() that failed.
            _, _, other, pid, host, *_ = self._read(name, _COMING)
            has_died = host == _here() and not lives(pid)
            if not has_died and not self._has(self._failure):
                raise LauncherError(
                    f"two processes claim to be rank {self.rank}: {other} and {self._me}. Each "
                    "needs its own number, and each job its own port"
                )
            self._end_world()

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/come/{rank}"

    @property
    def _failure(self) -> str:
        """The key under which the first error of this world is published."""
        return f"{self._prefix}/failure"

    def _end_world(self) -> None:
        """Let ranks that come from now on arrive in the next world."""
        self._put(f"{self._prefix}/over", True, notice=True)

    def _arrivals(self) -> list[Any]:
        """Return what the ranks have published, once all have arrived."""
        if not 0 <= self.rank < self.size:
            raise LauncherError(
                f"{self._me} is in a world of {self.size}, whose ranks go from 0 to {self.size - 1}"
            )
        arrived: dict[int, Any] = {}
        next_look = 0.0

        def missing() -> list[int]:
            nonlocal next_look
            absent = [r for r in range(self.size) if r not in arrived]
            # Each of them costs a request to the store.
            if time.monotonic() > next_look or self._has(self._place(absent[0])):
                for rank in absent:
                    if self._has(self._place(rank)):
                        arrived[rank] = self._read(self._place(rank), _COMING)
                        self._greet(rank, *arrived[rank][:5])
                next_look = time.monotonic() + LOOK_S
            return [r for r in absent if r not in arrived]

        self._wait(missing, self._pids)
        self._check(self._pids, "for the others")  # one may have failed before this one came
        self._end_world()
        return [arrived[rank] for rank in range(self.size)]

    def _greet(self, place: int, rank: int, size: int, name: str, pid: int, host: Any) -> None:
        """Note where an arrived process is.

        Raises:
            LauncherError: It does not belong to this world.
        """
        if size != self.size:
            raise LauncherError(
                f"the ranks have different world sizes: {self.size} is that of {self._me}, but "
                f"{size} that of {name}"
            )
        if rank != place or (rank == self.rank and name != self._me):
            raise LauncherError(self._overwritten())
        self._names[rank] = name
        self._pids[rank] = pid if host == _here() else 0

    def _world_key(self, arrived: Sequence[Any]) -> bytes:
        """Return the key with which the ranks of this world, and no others, sign their entries.

        It is made of a secret that other users do not know and of all arrivals, so that it is a new
        one for each world, and equal only if all ranks have read the same. The ranks of several
        hosts without a token have none.
        """
        if self._mine not in arrived:
            raise LauncherError(self._overwritten())
        secret = self._job_token
        elsewhere = next((one for one in arrived if one[4] != _here()), None)
        if not secret and elsewhere is None:
            pid, descriptor = next((one[3], one[5]) for one in arrived if one[0] == 0)
            try:
                secret = self._offer.secret if self._offer else offered(pid, descriptor or 0)
            except OSError as error:
                self._check_living(self._pids, "for its secret")
                raise LauncherError(
                    f"{self._me} cannot verify that {self._names[0]} belongs to the same user "
                    f"({error.strerror}): start all ranks of a host as one user, in one container; "
                    f"or {_CLOSE_PORT}"
                ) from error
        elif not secret and elsewhere is not None:
            if self._spec.one_host:
                raise LauncherError(
                    f"{elsewhere[2]} is on another host than {self._me}, or in another container, "
                    "although all ranks should be on one (MASTER_ADDR is a loopback address, or "
                    f"LOCAL_WORLD_SIZE is {self.size}). {_SET_TOKEN}"
                )
            if self.rank == 0:
                warn(
                    "the ranks are on several hosts and cannot verify each other: whoever can "
                    f"connect to {self._where} can become one and run code as this user. "
                    f"{_SET_TOKEN}"
                )
        return signature(secret, "world", json.dumps(arrived).encode())

    def _overwritten(self) -> str:
        return (
            f"another process has overwritten what {self._me} published in the store at "
            f"{self._where}: {_CLOSE_PORT}"
        )

    def _is_here(self, rank: int) -> bool:
        """Return whether a rank is known to have progressed as far as this one."""
        return self._has(f"{self._round}/{rank}") if self._round else rank in self._names

    def _is_lowest_here(self) -> bool:
        return not any(map(self._is_here, range(self.rank)))

    def _absent(self) -> list[int]:
        return [r for r in range(self.size) if not self._is_here(r)]

    def _name_absent(self) -> str:
        ranks = self._absent()
        return f"{ranks_in_words(ranks)} of {self.size}" if ranks else ""

    # Requests to the store.

    def _answer(self, question: Callable[[], T]) -> T:
        """Return the store's answer.

        Raises:
            LauncherError: There is none: the process that keeps the store may be stopped.
        """
        wait = _Wait(self._timeout_s + ANSWER_S)  # longer than the store's own timeout
        awaited = f"an answer of {self._store_name}"
        with ExitStack() as marks:

            def is_first_here() -> bool:
                mark = marks.enter_context(socket.socket(socket.AF_UNIX))
                return _is_first_here(mark, self._where)

            def look() -> None:
                if self._waits_too_long(wait, is_first_here, lambda: awaited):
                    self._prefix = ""  # nothing can be published there
                    raise LauncherError(
                        f"{self._me} of {self.size} has waited {wait.limit_s:.0f} s in init() "
                        f"for {awaited}: the process that keeps it (rank 0, or torchrun's agent) "
                        "is stopped, or its host is no longer reachable"
                    )

            return asked(question, look)

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return self._answer(question)
        except HoroLiteError:
            raise
        except RuntimeError as error:
            self._check_living(self._pids, f"for {self._store_name}")  # the cause of rank 0's end
            raise self._lost_store() from error

    def _lost_store(self) -> PeerLostError:
        return PeerLostError(
            f"{self._me} has lost the store at {self._where} in init(): rank 0, which keeps it, "
            "has ended"
        )

    def _put(self, key: str, obj: Any, *, notice: bool = False) -> None:
        """Write an entry; a notice can also be read by processes that are still arriving."""
        secret = self._job_token if notice else self._key
        entry = sign(secret, key, json.dumps(obj).encode())
        self._ask(lambda: self._store.set(key, entry))

    def _put_first(self, key: str, obj: Any) -> bool:
        """Write an entry unless there is one; return whether it was written."""
        entry = sign(self._key, key, json.dumps(obj).encode())
        if self._has(key):
            return False
        found = self._ask(lambda: self._store.compare_set(key, "", entry.decode()))
        return bool(found == entry)

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _read(self, key: str, form: Any, *, notice: bool = False) -> Any:
        entry: bytes = self._ask(lambda: self._store.get(key))
        data = verify(self._job_token if notice else self._key, key, entry[:MOST_BYTES])
        if data is None:
            raise LauncherError(self._forged(key))
        text = data.decode(errors="replace")
        try:
            value = _read_back(json.loads(text))
        except (ValueError, RecursionError):
            value = _NOTHING
        if value is _NOTHING or not fits(value, form):
            raise LauncherError(
                f"the entry {key} in the store at {self._where} is not one that a rank with this "
                f"version of horo_lite writes ({printable(repr(text[:200]))}, as "
                f"{self._me} read it): {_CLOSE_PORT}"
            )
        return value

    def _forged(self, key: str) -> str:
        why = f"which {'has one' if self._job_token else 'has none'}: set the same on all ranks"
        if self._key != self._job_token:  # all have arrived, with the same one
            why = "in this job"
        return (
            f"the entry {key} in the store at {self._where} was not written with the {JOB_TOKEN} "
            f"of {self._me}, {why}; or {_CLOSE_PORT}"
        )

    def _take(self, key: str, form: Any, rank: int) -> Any:
        """Wait for a rank's entry and return it."""
        self._wait(lambda: [] if self._has(key) else [rank], [rank])
        return self._read(key, form)

    def _wait(self, missing: Callable[[], list[int]], living: Collection[int]) -> None:
        """Return when no rank is missing.

        Args:
            missing: Returns which ranks are.
            living: Ranks whose death is an error.
        """
        pause_s = 1e-3
        while ranks := missing():
            self._check(living, f"for {ranks_in_words(ranks)}")
            if self._waits_too_long(self._phase, self._is_lowest_here, self._name_absent):
                self._has_timed_out = True
                raise LauncherError(
                    f"{ranks_in_words(ranks)} of {self.size} did not reach {self._where} within "
                    f"{self._timeout_s:.0f} s (HORO_LITE_START_TIMEOUT_S): check whether they "
                    "have been started, and whether all have the same address and size"
                )
            time.sleep(pause_s)
            pause_s = min(0.05, 1.5 * pause_s)

    def _check(self, ranks: Iterable[int], waited: str) -> None:
        """Raise the error of a rank that has failed in `init()`, or with which the store has ended.

        Args:
            ranks: Ranks whose death is an error, too.
            waited: For what this rank waits.
        """
        if self._has(self._failure):
            kind, why = self._read_failure()
            raise PeerLostError(why) if kind == _LOST else LauncherError(why)
        if self._has(self._lost):
            why = self._read(self._lost, str, notice=True)
            raise PeerLostError(f"{why}, while {self._me} waited in init() {waited}")
        self._check_living(ranks, waited)

    def _read_failure(self) -> Any:
        """Return the kind of the failure of this world, and the message."""
        return self._read(
            self._failure, (re.compile(f"{_LATE}|{_LOST}|{_REFUSED}"), str), notice=True
        )

    def _check_living(self, ranks: Iterable[int], waited: str) -> None:
        """Raise PeerLostError if one of these ranks is known to have died."""
        # Names all of them: others may have ended because they detected the first death.
        dead = [rank for rank in ranks if self._pids.get(rank) and not lives(self._pids[rank])]
        if dead:
            names = ", ".join(self._names[rank] for rank in dead)
            raise PeerLostError(f"{names} died in init(), while {self._me} waited {waited}")

    def _waits_too_long(
        self, wait: _Wait, reports: Callable[[], bool], whom: Callable[[], str]
    ) -> bool:
        """Return whether the wait has timed out; before that, one of the ranks reports it.

        Args:
            wait: The wait.
            reports: Returns whether this rank reports it.
            whom: Returns what or which ranks it waits for; "" for none.
        """
        waited_s = time.monotonic() - wait.began
        if waited_s > NOTICE_S and not wait.is_noted:
            if reports() and (awaited := whom()):
                say(
                    f"{self._me} has waited {waited_s:.0f} s in init() for {awaited}, and will for "
                    f"{wait.limit_s:.0f} s"
                )
            wait.is_noted = True
        return waited_s > wait.limit_s


class _Wait:
    """One wait of this rank: when it began, its limit, and whether it has been reported."""

    def __init__(self, limit_s: float) -> None:
        self.began = time.monotonic()
        self.limit_s = limit_s
        self.is_noted = False


def keep_store(spec: RendezvousSpec, timeout_s: float = ANSWER_S) -> Any:
    """Create and return the store of a rendezvous, which exists as long as this process.

    Rank 0 does so in `init()`, unless it has before.

    Args:
        spec: The rendezvous.
        timeout_s: The timeout, in seconds, of each request to it.

    Raises:
        ImportError: PyTorch is not installed.
        RuntimeError: The port is in use.
    """
    _stores[spec.host, spec.port] = store = _connected(spec, timeout_s, keeps=True)
    return store


def report_failure(spec: RendezvousSpec, why: str) -> None:
    """Make ranks that wait for this one in `init()`, now or later, raise PeerLostError.

    It does nothing if their store cannot be reached. Of several failures, the first is reported.

    Args:
        spec: The rendezvous, in one start of the job.
        why: The reason.
    """
    key = _lost_key(spec)
    with suppress(ImportError, OSError, RuntimeError):
        store = _known_store(spec)
        if store is None:
            _knock(spec.host, spec.port, timeout_s=ANSWER_S)
            store = _connected(spec, ANSWER_S)
        reason = json.dumps(f"{_name(spec)} failed ({why:.1000})").encode()
        store.compare_set(key, "", sign(job_token(), key, reason).decode())


def _known_store(spec: RendezvousSpec) -> Any:
    """Return this process's connection to the store of a rendezvous; None: none that answers.

    The store ends with rank 0; when that is started again, there is another at the same address.
    """
    place = spec.host, spec.port
    with suppress(RuntimeError):
        if place in _stores:
            _stores[place].check([_lost_key(spec)])
            return _stores[place]
    _stores.pop(place, None)
    return None


def _connected(spec: RendezvousSpec, timeout_s: float, *, keeps: bool = False) -> Any:
    """Return a connection to the store of a rendezvous; with `keeps`, this process keeps it."""
    from torch.distributed import TCPStore

    # If torch.distributed has opened a store there in this process, it is shared.
    return TCPStore(
        spec.host,
        spec.port,
        None,
        keeps,
        timedelta(seconds=min(ANSWER_S, timeout_s)),
        False,
        multi_tenant=keeps,
    )


def _knock(host: str, port: int, timeout_s: float) -> None:
    """Raise OSError unless a process listens there."""
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        # If none does on this host, the kernel may choose the same port for this end, so that the
        # socket connects to itself: with an even port above 32,768, once in 14,116 tries.
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


def _lost_key(spec: RendezvousSpec) -> str:
    """Return the key that reports a failed rank, so that the others of this start do not wait.

    The rank may or may not have arrived before.
    """
    return f"horo_lite/{spec.attempt}/lost"


def _name(spec: RendezvousSpec) -> str:
    return printable(f"rank {spec.rank} (pid {os.getpid()} on {socket.gethostname()})")


# rank, size, name, pid, host, descriptor of rank 0's secret, a number that no one else knew before
_COMING = (int, int, NAME, PID, (str, ...), [None, DESCRIPTOR], str)
_NOTHING = object()
_SET_TOKEN = (
    f"Set {JOB_TOKEN} to the same random text on all ranks, such as the output of `openssl rand "
    "-hex 16` (docs/security.md)"
)
_CLOSE_PORT = "if other users can reach that port, close it to the network, or choose another"


def _here() -> tuple[str, ...]:
    return tuple(map(printable, host_key()))


def _is_first_here(mark: socket.socket, where: str) -> bool:
    """Return whether no other rank of this host reports that it waits for a store.

    Before a store exists, the ranks do not know each other. But a name in Linux's abstract
    namespace belongs to one socket, as long as that is open.
    """
    try:
        mark.bind(f"\0horo_lite waits for {where[-80:]}")
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def _read_back(obj: Any) -> Any:
    """Return a JSON object with tuples instead of lists, and printable strings."""
    if isinstance(obj, str):
        return printable(obj.replace("\n", " "))
    if isinstance(obj, list):
        return tuple(map(_read_back, obj))
    return {k: _read_back(v) for k, v in obj.items()} if isinstance(obj, dict) else obj
