"""How much this rank has sent to other ranks, as counted where carriers are given the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from horo_lite import _native


@dataclass(frozen=True)
class Stats:
    """What this process has exchanged so far.

    Attributes:
        bytes_sent: The bytes that it has given to MPI or gloo for other ranks: what all-reduces,
            broadcasts, gathers, all-to-alls and messages send, of the world and of groups, in the
            format in which they travel (compressed, with its scales). Nothing is counted twice, and
            received bytes are not counted. Handshakes and other control messages are not counted,
            nor the envelopes of messages, nor what MPI, gloo and the network add.
    """

    bytes_sent: int


def stats() -> Stats:
    """Return what this process has sent so far; the difference of two calls is what lies between.

    Any rank may call it, at any time; no other rank takes part. Asynchronous operations are counted
    as they proceed, and completely when they are done. A second `init()` does not begin anew.

    MPI and gloo carry bytes if the ranks are on several hosts, and then also messages of `send`
    and `isend` to ranks of the same host. What goes through a host's shared memory is not counted,
    so on a single host `bytes_sent` is 0; nor is what NCCL carries.

    Returns:
        The totals since the process began.
    """
    return Stats(_native.bytes_sent())
