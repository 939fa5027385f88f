"""Replacements for lost ranks: started during training, added to the world at a commit.

Only rank 0 spawns, in a thread, so that nothing that happens to the new process can delay the
others. `MPI_Comm_spawn` connects it to rank 0 only. At a commit it is connected to all ranks, by
accept and connect, also in threads, which are abandoned after 15 s. The result, once all have
agreed to it, is a communicator with one more rank, over which the world is rebuilt as after a loss.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from horo_lite.elastic.consensus import consensus
from horo_lite.errors import say
from horo_lite.processes import lives
from horo_lite.settings import REPLACEMENT
from horo_lite.start import mpi
from horo_lite.transports.peers import host_key

# How long connecting a replacement that has reached elastic.run to the others may take.
_CONNECT_S = 15.0
# How long one that was started may take to reach elastic.run, before rank 0 says that it has not.
_REPORT_S = 300.0
# The messages that its starter sends it, in addition to the name of a port.
_GO, _LEAVE = "go", "leave"


class Replacements:
    """Replacements, which rank 0 starts one at a time. Every rank makes the same calls.

    A thread starts them, since MPI's Spawn returns only when the new process has reached
    elastic.run: training continues meanwhile, and does not wait for one that never gets there.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._peer: Any = None  # a communicator with the replacement, once it is ready
        self._started = self._ended = False
        self._report_at = float("inf")

    def wanted(self, size: int) -> bool:
        """Return whether a world of that size should grow."""
        return size < self._max_size

    def ready(self) -> bool:
        """Return whether a replacement waits to be added to the world; for rank 0."""
        if self._peer is None and time.monotonic() > self._report_at:
            self._report_at = float("inf")
            say(
                f"the replacement started {_REPORT_S:.0f} s ago has not reached elastic.run: "
                "continuing without it. It is slow or has died (see its output), or MPI_Comm_spawn "
                "waits forever. No other is started: to train on all ranks again, restart the job "
                "from its checkpoint"
            )
        return self._peer is not None

    def start(self) -> None:
        """Start a replacement, unless one has been started. Called by rank 0."""
        if not self._started:
            self._started, self._report_at = True, time.monotonic() + _REPORT_S
            threading.Thread(target=self._spawn, name="horo_lite spawn", daemon=True).start()

    def end(self) -> None:
        """Add no more replacements; one that is ready, or is ready later, ends."""
        self._ended = True
        peer, self._peer = self._peer, None
        self._send(peer, _LEAVE)

    def take_in(self, comm: Any) -> Any:
        """Return a communicator with one more rank, the last; None if that failed.

        Every rank of `comm` calls it, and waits for at most _CONNECT_S.
        """
        from mpi4py import MPI

        peer, self._peer = self._peer, None
        # In a thread and with its own communicator, so that it can be abandoned.
        ours = comm.Shrink()
        merged: list[Any] = []

        def accept() -> None:
            with suppress(MPI.Exception):
                port = ""
                if comm.rank == 0:
                    port = MPI.Open_port()
                    peer.send(port, 1)
                joined = ours.Accept(port).Merge(high=False)
                _meet(joined)
                merged.append(joined)

        thread = threading.Thread(target=accept, name="horo_lite accept", daemon=True)
        thread.start()
        thread.join(_CONNECT_S)
        connected, died = consensus(comm, bool(merged))
        if connected and not died:
            self._started = False  # the next one can be started
            self._send(peer, _GO)
            return merged[0]
        ours.Revoke()
        self._send(peer, _LEAVE)
        return None

    def _spawn(self) -> None:
        from mpi4py import MPI

        mpi.end_without_finalize()
        variable = f"{REPLACEMENT}={os.getpid()}@{_host()}"
        # The variable is set by `env`: Open MPI passes on the environment of mpiexec.
        command = [variable, sys.executable, *sys.orig_argv[1:]]
        try:
            peer = MPI.COMM_SELF.Dup().Spawn("env", command, 1).Merge(high=False)
        except MPI.Exception as error:
            say(
                f"no replacement can be started ({error}): continuing without it. Does mpiexec "
                "have a slot for it? (--oversubscribe)"
            )
            return
        finally:
            self._report_at = float("inf")
        self._peer = peer
        if self._ended:
            self.end()

    @staticmethod
    def _send(peer: Any, word: str) -> None:
        from mpi4py import MPI

        if peer is not None:
            with suppress(MPI.Exception):  # it may be dead
                peer.send(word, 1)


def join() -> Any:
    """Return a communicator of a running job's ranks, of which this process is the last.

    Called by a replacement, which ends here if it is no longer needed.
    """
    mpi.end_without_finalize()
    watch = _Watch()
    MPI = mpi.load(None)
    try:
        peer = MPI.Comm.Get_parent().Merge(high=True)
        watch.suspend()
        port = _word(peer)  # sent at the others' next commit
        watch.resume()
        comm = MPI.COMM_SELF.Connect(port).Merge(high=True)
        _meet(comm)
        if _word(peer) != _GO:
            _leave()
    except MPI.Exception:  # the rank that started it is dead
        _leave()
    watch.end()
    return comm


def _meet(comm: Any) -> None:
    """Exchange a message with the last rank of `comm`, the new one; that one with all others.

    Before its first message to a process that was spawned, Open MPI asks the launcher how to reach
    it, and waits forever if it has died meanwhile: then Revoke would not end either.
    """
    new = comm.size - 1
    for other in range(new) if comm.rank == new else [new]:
        comm.Sendrecv(bytearray(1), other, recvbuf=bytearray(1), source=other)


def _word(peer: Any) -> str:
    while not peer.Iprobe(0):
        time.sleep(1e-3)
    word = str(peer.recv(source=0))
    if word == _LEAVE:
        _leave()
    return word


def _leave() -> NoReturn:
    os._exit(0)


class _Watch:
    """Ends this process if it waits inside MPI for a rank that will never arrive."""

    def __init__(self) -> None:
        pid, _, host = os.environ.pop(REPLACEMENT).partition("@")  # from now on a rank like others
        # If the starter is on another host, only the time limit applies.
        self._starter = int(pid) if host == _host() else os.getpid()
        self._over = False
        self.resume()
        threading.Thread(target=self._check, name="horo_lite watch", daemon=True).start()

    def suspend(self) -> None:
        """Allow any time, as long as the starter lives."""
        self._until = float("inf")

    def resume(self) -> None:
        self._until = time.monotonic() + 2 * _CONNECT_S

    def end(self) -> None:
        self._over = True

    def _check(self) -> None:
        while not self._over:
            if time.monotonic() > self._until or not lives(self._starter):
                _leave()
            time.sleep(0.05)


def _host() -> str:
    return ",".join(host_key())
