"""Ranks of several hosts: shared memory inside a host, and whatever carries bytes between hosts.

Handshakes, all-reduces and waiting are C++ (csrc/hosts), which is given the carrier; here are the
operations that only move bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from horo_lite import _native
from horo_lite.transports.hosts.byte_stream import ByteStream
from horo_lite.transports.interface import Header, Reduction, Transport
from horo_lite.transports.this_host import Role

if TYPE_CHECKING:
    from horo_lite.transports.hosts.carrier import Carrier, Done
    from horo_lite.transports.this_host import ThisHost

# A carrier is given no memory but its own, through which everything is copied in windows.
STAGE_BYTES = 1 << 20
SMALLEST_STAGE_BYTES, STAGES_BYTES = 1 << 16, 8 << 20  # of one peer, and of all


class HostsTransport(Transport):
    """A transport for ranks on several hosts.

    Args:
        carrier: What carries bytes between all of the ranks.
        host: The ranks of this host.
        role: What the transport is for.
        names: Each rank's, for error messages.
    """

    reads_sources = True

    def __init__(
        self,
        carrier: Carrier,
        host: ThisHost,
        role: Role,
        names: Sequence[str],
    ) -> None:
        self.name = carrier.name
        self.carrier = carrier
        self.executor = carrier.executor
        self.serve = carrier.serve
        self.rank = carrier.rank
        self.size = carrier.size
        self.ranks = host.ranks
        self._detector = self.stall_detector = host.stall_detector
        self._host_group = host.group(role)
        self.group = self.engine_group = _native.HostsGroup(
            self._host_group,
            carrier.native(),
            carrier.channel().native(),
            host.hosts,
            host.host,
            host.scratch(role),
            host.stall_detector,
            host.ranks,
            names,
            role == Role.DIRECT,
        )
        carrier.memory["group"] = self.group
        if role == Role.ENGINE:
            stop = None if self.executor is None else self.executor.close
            self.group.for_engine(carrier.channel().native(), stop)

    # Agreeing and reducing.

    @property
    def label(self) -> str:
        return self.group.label

    def agree(
        self, digest: int, count: int = 0, weight: float = 1.0, *, label: str = ""
    ) -> list[Header]:
        if self.serve is not None:
            self.serve(0.0)  # even if this call never waits
        return [Header(*header) for header in self.group.agree(label, digest, count, weight)]

    def allreduce(self, tensors: _native.Tensors, reduction: Reduction) -> None:
        self.group.allreduce(tensors, *reduction)

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
                self.group.wait(before)
                finish(window - 1)
            before = started

    # Ending.

    def new_engine(
        self, direct: Transport, explain: Callable[[str, list[str], list[int]], str]
    ) -> _native.Engine | None:
        assert direct.engine_group is not None
        # How a thread that waits lets the engine go on; None where the engine needs nobody.
        serve = None if self.executor is None else self.executor.serve
        ranks = list(self.ranks)
        engine = _native.Engine.over(self.group, direct.engine_group, ranks, explain, serve)
        engine.watched_by(self._detector)
        return engine

    def announce(self, what: str, expect_s: float) -> None:
        self.group.announce(what, expect_s)

    def check_peer(self, peer: int, name: str) -> None:
        self.group.check_peers(name, peer)

    def has_left(self, peer: int, n_records: int) -> bool:
        return self.group.has_left(peer, n_records)

    def abandon(self, reason: str) -> None:
        self.group.abandon(reason)

    def leave(self, reason: str) -> None:
        self.group.leave(reason)

    def given_up(self) -> bool:
        return self.group.given_up

    def peer_pids(self, silent: bool) -> list[int]:
        return self._host_group.peer_pids(silent)

    def claim_report(self) -> bool:
        return self._host_group.claim_report()

    def close(self) -> None:
        self.carrier.close(in_good_order=not self.group.given_up)
