"""Ranks of several hosts: shared memory inside a host, and whatever carries bytes between hosts.

An all-reduce is C++ (csrc/hosts), which is given the carrier's messages; all else is here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from horo_lite import _native
from horo_lite.errors import PeerLostError, StallError
from horo_lite.transports.hosts.byte_stream import ByteStream
from horo_lite.transports.hosts.control import ControlChannel
from horo_lite.transports.hosts.engine_channel import EngineChannel
from horo_lite.transports.hosts.peer_status import PeerStatus
from horo_lite.transports.interface import Header, Reduction, Transport
from horo_lite.transports.this_host import Role

if TYPE_CHECKING:
    from horo_lite.transports.hosts.carrier import Carrier, Done
    from horo_lite.transports.this_host import ThisHost

# A carrier is given no memory but its own, through which everything is copied in windows.
STAGE_BYTES = 1 << 20
SMALLEST_STAGE_BYTES, STAGES_BYTES = 1 << 16, 8 << 20  # of one peer, and of all

# How long a rank has waited in the last `agree` travels with the next.
_HEADER = np.dtype([("digest", "u8"), ("count", "i8"), ("weight", "f8"), ("waited", "f8")])


class HostsTransport(Transport):
    """A transport for ranks on several hosts.

    Args:
        carrier: What carries bytes between all of the ranks.
        host: The ranks of this host.
        role: What the transport is for.
        names: Each rank's, for error messages.
    """

    def __init__(
        self,
        carrier: Carrier,
        host: ThisHost,
        role: Role,
        names: Sequence[str],
    ) -> None:
        self.name = carrier.name
        self.carrier = carrier
        self._is_direct = role == Role.DIRECT
        self.executor = carrier.executor
        self.serve = carrier.serve
        self.rank = carrier.rank
        self.size = carrier.size
        self.ranks = host.ranks
        self._detector = self.stall_detector = host.stall_detector
        self._here = [host.ranks.index(r) for r in host.here]
        self._host_group = host.group(role)
        messages = carrier.point_to_point()
        self._allreduce = _native.HostsAllreduce(
            self._host_group, messages, host.hosts, host.host, host.scratch(role)
        )
        carrier.memory["allreduce"] = self._allreduce
        self.peers = PeerStatus(
            ControlChannel(carrier.channel()),
            self._host_group,
            host.stall_detector,
            carrier.rank,
            host.ranks,
            names,
        )
        self._broken = ""
        self._n_waits = 0  # changes whenever this rank begins or stops to wait, odd while it does
        self._waiting_thread = 0  # whose wait that is: its native id
        self._waited_s = 0.0  # in the last `agree`

    # Agreeing and reducing.

    @property
    def label(self) -> str:
        return self.peers.label

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        if self._broken:
            raise PeerLostError(
                f"an operation failed, and this group of ranks can no longer be used "
                f"({self._broken}): to go on, call shutdown() and then init() on every rank"
            )
        self._detector.check()
        if self.serve is not None:
            self.serve(0.0)  # even if this call never waits
        own = self.carrier.buffer("header", _HEADER.itemsize)
        own.view(_HEADER)[0] = digest, count, weight, self._waited_s
        headers = self.carrier.buffer("headers", self.size * _HEADER.itemsize)
        everyone = headers.view(_HEADER)
        if self._is_direct:
            self._detector.doing(label)
        self.peers.begin(label)
        self._wait(self.carrier.allgather(own, headers))
        self._record_last_rank(everyone["waited"].tolist())
        self._waited_s = time.monotonic() - self.peers.began
        return [Header(int(h["digest"]), int(h["count"]), float(h["weight"])) for h in everyone]

    def _record_last_rank(self, waited_s: list[float]) -> None:
        """Hosts have clocks of their own: last in the last `agree` was who waited least."""
        last = waited_s.index(min(waited_s))
        if self._is_direct and last != self.rank and self._waited_s > 0:
            self._detector.waited_for(self.ranks[last], self._waited_s - waited_s[last])

    def allreduce(self, tensors: _native.Tensors, reduction: Reduction) -> None:
        op, wire, prescale, scale, divisor, weights = reduction
        window_bytes, n_shares = self._allreduce.window_bytes, self._allreduce.n_shares
        layout = _native.WireLayout(tensors, op, wire, window_bytes, n_shares)
        here = [weights[r] for r in self._here] if weights else ()
        wait = self._detector.wait()
        went_well = False

        def check() -> None:
            self.peers.check_all()
            self.peers.report_wait(wait, range(self.size))

        try:
            with self._giving_up():
                self._allreduce.allreduce(layout, prescale, scale, divisor, here, self.label, check)
            went_well = True
        finally:
            wait.close(went_well)

    # Moving bytes.

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        stream, size = ByteStream(tensors), STAGE_BYTES
        stages = [self.carrier.buffer(f"stage {i}", size) for i in range(2)]

        def start(window: int) -> Done:
            stage = stages[window % 2][: stream.length(window, size)]
            if self.rank == root:
                stream.read(window, size, stage)
            return self.carrier.broadcast(stage, root)

        def finish(window: int) -> None:
            if self.rank != root:
                stream.write(window, size, stages[window % 2])

        self._in_windows(stream.n_windows(size), start, finish)

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        self.alltoall([send] * self.size, receive, ())

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]  # not all to 0 first
        size = max(SMALLEST_STAGE_BYTES, min(STAGE_BYTES, STAGES_BYTES // len(peers)))
        outgoing = {id(send[peer]): ByteStream(send[peer]) for peer in peers}
        incoming = {peer: ByteStream(receive[peer]) for peer in peers}
        streams = [*outgoing.values(), *incoming.values()]
        stages = [
            self.carrier.buffer(f"stages {i}", size * len(streams)).reshape(-1, size)
            for i in range(2)
        ]
        place = {key: i for i, key in enumerate((*outgoing, *(("from", p) for p in peers)))}

        def start(window: int) -> Done:
            stage = stages[window % 2]
            filled = {
                key: stream.read(window, size, stage[place[key]])
                for key, stream in outgoing.items()
            }
            rooms = {
                peer: stage[place["from", peer]][: incoming[peer].length(window, size)]
                for peer in peers
            }
            parts = {peer: filled[id(send[peer])] for peer in peers}
            return self.carrier.exchange(
                [(peer, 0, room) for peer, room in rooms.items() if room.size],
                [(peer, 0, part) for peer, part in parts.items() if part.size],
            )

        def finish(window: int) -> None:
            for peer, stream in incoming.items():
                stream.write(window, size, stages[window % 2][place["from", peer]])

        self._in_windows(max(stream.n_windows(size) for stream in streams), start, finish)

    def _in_windows(
        self, n: int, start: Callable[[int], Done], finish: Callable[[int], None]
    ) -> None:
        """Each window is started, waited for and finished; two are under way at any time."""
        before: Done | None = None
        for window in range(n + 1):
            started = start(window) if window < n else None
            if before is not None:
                self._wait(before, longest_pause_s=1e-4)  # polls are what moves bytes
                finish(window - 1)
            before = started

    # Waiting and ending.

    def _wait(self, done: Done, longest_pause_s: float = 1e-3) -> None:
        """Return when it is done.

        MPI itself would wait for ever, at full speed, and learn of nobody's end.
        """
        wait = self._detector.wait()
        went_well = False

        def on_idle() -> None:
            if self._n_waits % 2 == 0:
                self._waiting_thread = threading.get_native_id()
                self._n_waits += 1
            self.peers.check_all()
            self.peers.report_wait(wait, range(self.size))

        try:
            with self._giving_up():
                self.carrier.wait(done, on_idle, longest_pause_s)
            went_well = True
        finally:
            self._n_waits += self._n_waits % 2
            wait.close(went_well)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Whatever ends a wait early leaves the group unusable, and the others learn of that."""
        try:
            yield
        except self.carrier.lost as error:
            self._broken = f"a rank died while {self.peers.doing()} ({error})"
            self.abandon(self._broken)
            raise PeerLostError(self._broken) from error
        except (PeerLostError, StallError) as error:
            self._broken = str(error)
            self.abandon(self._broken)
            raise
        except BaseException:
            self._broken = "this rank was interrupted in the middle of an operation"
            self.abandon("it was interrupted")
            raise

    def new_engine(
        self, direct: Transport, explain: Callable[[str, list[str], list[int]], str]
    ) -> _native.Engine | None:
        assert isinstance(direct, HostsTransport)
        channel = EngineChannel(self)
        engine = _native.Engine.over_channel(
            channel,
            list(self.ranks),
            explain,
            channel.serve,
            lambda: (direct._n_waits, direct._waiting_thread),
        )
        engine.watched_by(self._detector)
        return engine

    def announce(self, what: str, expect_s: float) -> None:
        self.peers.announce(what, expect_s)

    def check_peer(self, peer: int, name: str) -> None:
        self.peers.check_one(peer, name)

    def has_left(self, peer: int, n_records: int) -> bool:
        return self.peers.has_left(peer, n_records)

    def abandon(self, reason: str) -> None:
        self._broken = self._broken or f"this rank gave up: {reason}"
        self.peers.abandon(reason)

    def leave(self, reason: str) -> None:
        self.peers.leave(reason)

    def given_up(self) -> bool:
        return bool(self._broken)

    def peer_pids(self, silent: bool) -> list[int]:
        return self._host_group.peer_pids(silent)

    def claim_report(self) -> bool:
        return self._host_group.claim_report()

    def close(self) -> None:
        self.carrier.close(in_good_order=not self._broken)
