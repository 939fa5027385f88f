"""The state of the other ranks of several hosts, and what this one reports to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from horo_lite import _native
from horo_lite.errors import PeerLostError, StallError
from horo_lite.transports.hosts.control import ControlChannel, Tag, fitting

# A rank that waits for longer reports that it has arrived; repeatedly, since it may be stopped.
ARRIVED_S, AGAIN_S = 0.25, 10.0


class PeerStatus:
    """Who has left, given up or arrived, as received from the control channel.

    An operation begins with an `agree`, in which all ranks take part: `begin` counts them.
    """

    def __init__(
        self,
        control: ControlChannel,
        host_group: _native.ShmGroup,
        stall_detector: _native.StallDetector,
        rank: int,
        ranks: Sequence[int],
        names: Sequence[str],
    ) -> None:
        self._control = control
        self._host_group = host_group
        self._detector = stall_detector
        self._rank, self._ranks, self._names = rank, ranks, names
        self._scope = stall_detector.scope(ranks)
        self.label = ""
        """The operation that began last."""
        self.began = 0.0
        """When it did."""
        self._n_begun = 0
        self.n_records = [0] * len(ranks)
        """Of messages, how many this rank has sent to each."""
        # Of who has left: after which operation, after how many records to this rank, and why.
        self._left: dict[int, tuple[int, int, str]] = {}
        self.lost = ""
        """Who gave up, and why."""
        self._sent: set[Tag] = set()  # of this rank's end
        self._arrivals: dict[
            int, tuple[int, float]
        ] = {}  # at which operation, and when that was sent
        self._arrival = 0, 0.0  # the same of this rank

    def begin(self, label: str) -> None:
        """This rank begins another operation."""
        self.label = label
        self._n_begun += 1
        self.began = time.monotonic()

    def doing(self) -> str:
        """What this rank does, for error messages."""
        return f"{self._names[self._rank]} waited in {self.label or 'an operation'}"

    # From the peers.

    def receive(self) -> None:
        """Note what peers have sent since the last call; raise StallError if that is what it is."""
        if Tag.LEFT in self._sent:  # another thread has ended the world, or the program
            raise PeerLostError(f"{self._names[self._rank]} has left while {self.doing()}")
        ended = set(self._control.channel.ended())  # before what they have sent is received
        for peer, tag, text in self._control.receive():
            reason = text.decode(errors="replace")
            if tag == Tag.GAVE_UP:
                self.lost = self.lost or f"{self._names[peer]} gave up ({reason})"
            elif tag == Tag.STALLED:
                self._detector.stall(reason)
            elif tag == Tag.ARRIVED:
                self._arrivals[peer] = int.from_bytes(text, "little"), time.monotonic()
            elif tag == Tag.ANNOUNCED:
                expect_s, _, what = reason.partition(" ")
                self._detector.announce(self._ranks[peer], what, float(expect_s))
            else:
                n_begun, n_records, why = reason.split(" ", 2)
                self._left[peer] = int(n_begun), int(n_records), why
        for peer in ended - self._left.keys():
            self.lost = self.lost or f"{self._names[peer]} died (its connection has ended)"
        self._detector.check()

    def check_all(self) -> None:
        """Raise PeerLostError if the operation that began last cannot be completed."""
        self.receive()
        self._check_lost()
        for peer, (n_begun, _, reason) in self._left.items():
            # Who has been in this operation had done its part when it left, and what it has sent is
            # on its way.
            if n_begun < self._n_begun:
                raise PeerLostError(f"{self._names[peer]} has left ({reason}) while {self.doing()}")
        self._host_group.check_peers(self.label)

    def check_one(self, peer: int, name: str) -> None:
        """Raise PeerLostError if `peer`, needed for `name`, has left, or any died or gave up."""
        self.receive()
        self._check_lost()
        if peer in self._left:
            raise PeerLostError(
                f"{self._names[peer]} has left ({self._left[peer][2]}) while "
                f"{self._names[self._rank]} waited for it in {name}"
            )
        self._host_group.check_peers(name)
        self.send_arrived()  # and continued: others may still wait in that operation

    def _check_lost(self) -> None:
        if self.lost:
            raise PeerLostError(f"{self.lost} while {self.doing()}")

    def has_left(self, peer: int, n_records: int) -> bool:
        """Whether that rank has left, having sent this one at most so many records of messages."""
        self.receive()
        return peer in self._left and self._left[peer][1] <= n_records

    # To the peers.

    def report_wait(self, wait: _native.Wait, among: Sequence[int]) -> None:
        """Show the ranks of this host, and those that wait on others, that this one waits."""
        self.send_arrived()
        if self.label == "join()":  # see kJoin in csrc/shm/stall_detector.h
            self._detector.check()
            return
        now = time.monotonic()
        here = [self._rank]
        for peer, (n_begun, at) in self._arrivals.items():
            if peer in among and n_begun >= self._n_begun and now - at < 2.5 * AGAIN_S:
                here.append(peer)
        late = [self._ranks[r] for r in among if r not in here]
        wait.report_if_due(self.label + self._scope, [self._ranks[r] for r in here], late)

    def send_arrived(self) -> None:
        """Tell peers which operation this rank is in, if it has been for a while."""
        n_begun, at = self._arrival
        now = time.monotonic()
        if now - self.began > ARRIVED_S and (n_begun < self._n_begun or now - at > AGAIN_S):
            self._arrival = self._n_begun, now
            self._control.send(self._n_begun.to_bytes(8, "little"), Tag.ARRIVED)

    def announce(self, what: str, expect_s: float) -> None:
        """Tell peers that this rank will be late by so much; "": it is over."""
        self._control.send(fitting(f"{expect_s} {what}"), Tag.ANNOUNCED)

    def abandon(self, reason: str) -> None:
        """Make peers that wait for this rank raise PeerLostError, or StallError if that is why."""
        self._host_group.abandon(reason)
        try:
            self._detector.check()
        except StallError as stalled:
            self._say_once(fitting(str(stalled)), Tag.STALLED)
        self._say_once(fitting(reason), Tag.GAVE_UP)

    def leave(self, reason: str) -> None:
        """Make peers that wait for this rank in an operation it is not in raise PeerLostError."""
        self._host_group.leave(reason)
        texts = [fitting(f"{self._n_begun} {n} {reason}") for n in self.n_records]
        self._say_once(texts, Tag.LEFT)

    def _say_once(self, text: bytes | list[bytes], tag: Tag) -> None:
        if tag not in self._sent and not self._control.channel.is_over():
            self._sent.add(tag)
            with suppress(*self._control.channel.lost):  # some are dead
                self._control.send(text, tag)
