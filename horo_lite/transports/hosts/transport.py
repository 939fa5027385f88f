"""Ranks of several hosts: shared memory inside a host, and a carrier of bytes between hosts.

Handshakes, reductions, broadcasts and waiting are in C++ (csrc/hosts), which uses the carrier.
This file contains the operations in which every rank has its own bytes for the others. An
all-gather sends each rank's data to one rank of every other host, and from there to the others
through shared memory (`Places`). In an all-to-all, what stays on a host goes through shared memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from horo_lite import _native
from horo_lite.transports.hosts.byte_stream import ByteStream
from horo_lite.transports.interface import HostTransport
from horo_lite.transports.shm import alltoall
from horo_lite.transports.this_host import Role

if TYPE_CHECKING:
    from horo_lite.transports.hosts.carrier import Carrier, Done
    from horo_lite.transports.this_host import ThisHost

# A carrier uses only its own memory, through which everything is copied in windows. Many small ones
# are in flight: MPI sends a large message only after a rendezvous, which waits behind earlier
# messages on the same connection.
WINDOW_BYTES, UNDER_WAY = 1 << 18, 8
# Fewer and smaller windows for many peers: the same total size, or the fewest of the smallest.
SMALLEST_WINDOW_BYTES, FEWEST, WINDOWS_BYTES = 1 << 16, 2, 16 << 20


@dataclass(frozen=True)
class Places:
    """Which rank of a host receives which tensors, so that each travels to that host once.

    Attributes:
        index: This rank's index among those of its host.
        counterparts: The rank of each other host that receives this rank's tensors, the next host
            first, so that not all send to the first one at once.
        brought: For each rank of this host, the ranks whose tensors it has for the others: its own,
            and those of its counterparts.
        most_peers: The maximum number of tensors that a rank of any host receives from others.
    """

    index: int
    counterparts: list[int]
    brought: list[list[int]]
    most_peers: int

    @classmethod
    def of(cls, hosts: Sequence[Sequence[int]], here: int, index: int) -> Places:
        """Return the places of the `index`-th rank of host `here`."""
        others = [hosts[(here + i) % len(hosts)] for i in range(1, len(hosts))]
        n = len(hosts[here])
        brought = [
            [rank, *(peer for ranks in others for p, peer in enumerate(ranks) if p % n == i)]
            for i, rank in enumerate(hosts[here])
        ]
        fewest, most = min(map(len, hosts)), max(map(len, hosts))
        most_peers = len(others) * -(-most // fewest)
        return cls(index, [ranks[index % len(ranks)] for ranks in others], brought, most_peers)


class HostsTransport(HostTransport):
    """A transport for ranks on several hosts.

    Args:
        carrier: Carries bytes between all of the ranks.
        host: The ranks of this host.
        role: The transport's purpose.
        names: Each rank's name, for error messages.
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
        self._smallest_host = min(map(len, host.hosts))
        self._places = Places.of(host.hosts, host.host, host.rank)
        self.group = _native.HostsGroup(
            host.group(role),
            carrier.native(),
            carrier.channel().native(),
            host.hosts,
            host.host,
            carrier.least_window,
            host.scratch(role),
            host.stall_detector,
            host.ranks,
            names,
        )
        carrier.memory["group"] = self.group
        if role == Role.OPERATIONS:
            self.group.for_engine(carrier.channel().native())
        super().__init__(self.group, host.ranks, host.stall_detector)
        self.here = host.hosts[host.host]

    def broadcast(self, tensors: _native.Tensors, root: int) -> None:
        self.group.broadcast(tensors, root)

    def allgather(self, send: _native.Tensors, receive: Sequence[_native.Tensors]) -> None:
        brought = self._places.brought
        mine = brought[self._places.index]
        self._send_and_receive(
            dict.fromkeys(self._places.counterparts, send),
            {peer: receive[peer] for peer in mine if peer != self.rank},
            self._places.most_peers,
        )
        if len(brought) == 1:
            return
        tensors = [send if r == self.rank else each for r, each in enumerate(receive)]
        wanted = []
        for i, ranks in enumerate(brought):
            begins = accumulate((tensors[r].nbytes for r in ranks), initial=0)
            if i != self._places.index:
                wanted += [(i, begin, tensors[r]) for r, begin in zip(ranks, begins, strict=False)]
        n_bytes = [sum(tensors[r].nbytes for r in ranks) for ranks in brought]
        self.group.exchange_on_host([tensors[r] for r in mine], n_bytes, wanted)

    def alltoall(
        self,
        send: Sequence[_native.Tensors],
        receive: Sequence[_native.Tensors],
        n_bytes: Sequence[Sequence[int]],
    ) -> None:
        here, others = self.here, range(self.rank + 1, self.rank + self.size)
        # In this order, so that not all send to 0 first.
        peers = [r % self.size for r in others if r % self.size not in here]
        outgoing = {peer: send[peer] for peer in peers}
        incoming = {peer: receive[peer] for peer in peers}
        self._send_and_receive(outgoing, incoming, self.size - self._smallest_host)
        alltoall(
            self.group.exchange_on_host,
            here.index(self.rank),
            [send[r] for r in here],
            [receive[r] for r in here],
            [[n_bytes[s][d] for d in here] for s in here],
        )

    def _send_and_receive(
        self,
        send: Mapping[int, _native.Tensors],
        receive: Mapping[int, _native.Tensors],
        most_peers: int,
    ) -> None:
        """Send to peers and receive from them; `most_peers` is the same on all ranks."""
        each = WINDOWS_BYTES // most_peers
        size = max(SMALLEST_WINDOW_BYTES, min(WINDOW_BYTES, each // UNDER_WAY))
        under_way = max(FEWEST, min(UNDER_WAY, each // size))
        outgoing = {id(tensors): ByteStream(tensors) for tensors in send.values()}
        incoming = {peer: ByteStream(tensors) for peer, tensors in receive.items()}
        streams = [*outgoing.values(), *incoming.values()]
        n_bytes = size * len(streams)
        stages = [
            self.carrier.buffer(f"stages {i}", n_bytes)[:n_bytes].reshape(-1, size)
            for i in range(under_way)
        ]
        place = {key: i for i, key in enumerate((*outgoing, *(("from", p) for p in receive)))}

        def start(window: int) -> Done:
            stage = stages[window % under_way]
            filled = {
                key: stream.read(window, size, stage[place[key]])
                for key, stream in outgoing.items()
            }
            rooms = {
                peer: stage[place["from", peer]][: stream.length(window, size)]
                for peer, stream in incoming.items()
            }
            parts = {peer: filled[id(tensors)] for peer, tensors in send.items()}
            return self.carrier.start(
                [(peer, 0, room) for peer, room in rooms.items() if room.size],
                [(peer, 0, part) for peer, part in parts.items() if part.size],
            )

        def finish(window: int) -> None:
            for peer, stream in incoming.items():
                stream.write(window, size, stages[window % under_way][place["from", peer]])

        n = max(stream.n_windows(size) for stream in streams)
        started: deque[Done] = deque()
        for window in range(n + under_way - 1):
            if window < n:
                started.append(start(window))
            done = window - under_way + 1
            if 0 <= done < n:
                self.group.wait(started.popleft())
                finish(done)

    def close(self) -> None:
        self.carrier.close(in_good_order=not self.group.given_up())
