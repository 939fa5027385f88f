"""The communicators of a transport: made, kept while requests may use them, and given back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from horo_lite.transports.mpi.control import ControlChannel
from horo_lite.transports.peers import allgather_objects

if TYPE_CHECKING:
    from mpi4py import MPI


class Communicators:
    """The communicators of one transport, and the memory that requests on them use.

    Requests of an operation that ended early (an interrupt, a peer's death) stay under way, and MPI
    may write into their memory for as long as it runs. So the memory lives as long as they do.
    """

    in_use: ClassVar[list[Communicators]] = []
    """All that have not been given back, in the order in which they were made."""
    unusable: ClassVar[list[Communicators]] = []
    """All that never can be given back."""

    def __init__(self, comm: MPI.Comm) -> None:
        # All made from `comm`: who is left waiting when a rank dies meanwhile learns of it there.
        self._parent = comm
        self.all = comm.Dup()
        """Of all ranks."""
        self._control_channels: list[ControlChannel] = []
        self.closed = False  # nothing was interrupted, and this rank needs them no more
        self.memory: dict[str, Any] = {}
        Communicators.in_use.append(self)

    def buffer(self, name: str, n_bytes: int) -> NDArray[np.uint8]:
        """Return the memory of that name, at least so large; no request on it is under way."""
        if name not in self.memory or self.memory[name].size < n_bytes:
            self.memory[name] = np.empty(n_bytes, np.uint8)
        memory: NDArray[np.uint8] = self.memory[name]
        return memory

    def control_channel(self) -> ControlChannel:
        """Make a new one; collective."""
        self._control_channels.append(ControlChannel(self._parent))
        return self._control_channels[-1]

    def _free(self, n_sent: Sequence[Sequence[int]]) -> None:
        for i, channel in enumerate(self._control_channels):
            channel.free([each[i] for each in n_sent])
        self.all.Free()

    @staticmethod
    def free_closed(comm: MPI.Comm) -> None:
        """Give back the communicators of former worlds over the same ranks; collective.

        Not earlier: to do it in shutdown() a rank would have to wait for all others. What some rank
        did not close in good order is left to the end of MPI, as is what it still uses.
        """
        from mpi4py import MPI

        alike = (MPI.IDENT, MPI.CONGRUENT)
        former = [one for one in Communicators.in_use if MPI.Comm.Compare(one.all, comm) in alike]
        mine = [
            (one.closed, [channel.n_sent for channel in one._control_channels]) for one in former
        ]
        everyone = allgather_objects(comm, mine)
        Communicators.in_use = [one for one in Communicators.in_use if one not in former]
        if len({len(offers) for offers in everyone}) == 1:
            for i, one in enumerate(former):
                if all(offers[i][0] for offers in everyone):
                    one._free([offers[i][1] for offers in everyone])
                else:
                    Communicators.in_use.append(one)
        else:
            Communicators.unusable += former
