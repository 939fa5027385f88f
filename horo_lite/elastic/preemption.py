"""Requests of a scheduler to save the work and end, heard by all ranks after the same step."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from horo_lite.collectives.calls import Compare, Part
from horo_lite.errors import HoroLiteError
from horo_lite.ops import ranks_of

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group


class Preemption:
    """Tell all ranks, after the same step, that a signal has asked one of them to end.

        preemption = hvd.elastic.Preemption()
        while state.step < n_steps:
            ...
            state.step += 1
            if preemption.requested():
                state.commit()
                sys.exit(75)        # EX_TEMPFAIL: to be started again

    Schedulers send a signal some time before they kill a job, often to one of its processes only,
    or twice. Until `close()`, these signals do nothing else. Make it right after `init()`: before,
    a signal ends the rank. An object that is made later knows of signals that came before.

    Args:
        signals: The signals to handle, on this rank. Those of Slurm and Kubernetes are SIGTERM, or
            what `sbatch --signal` says.
        group: The ranks; by default all.

    Raises:
        HoroLiteError: This is not the main thread, which alone can handle signals.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        group: Group | None = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise HoroLiteError("make Preemption in the main thread, which alone handles signals")
        self._group = group
        self._signals: list[int] = []
        try:
            for number in dict.fromkeys(signals):
                if number not in _former:
                    _former[number] = signal.signal(number, _receive)
                _n_objects[number] += 1
                self._signals.append(number)
        except BaseException:
            self.close()
            raise

    def requested(self) -> bool:
        """Return whether any rank has received a signal, the same on all ranks. Collective.

        Costs a handshake: some microseconds on one host.
        """
        ranks = ranks_of(self._group)
        call = Compare("preemption", needs_all=False)
        is_received = not _received.isdisjoint(self._signals)
        headers = ranks.run(call, Part(number=int(is_received)))
        return any(header.count == 1 for header in headers)

    def close(self) -> None:
        """Restore the signals' former handlers, if no other object handles them."""
        for number in self._signals:
            _n_objects[number] -= 1
            if not _n_objects[number]:
                before = _former.pop(number)
                # None: it was not installed by Python, and cannot be installed again.
                signal.signal(number, signal.SIG_DFL if before is None else before)
                _received.discard(number)
        self._signals = []


# Of the process: a signal counts for objects that are made later, too, since a function that is
# repeated after a failure may make one each time.
_former: dict[int, Any] = {}
_n_objects: Counter[int] = Counter()
_received: set[int] = set()


def _receive(number: int, frame: FrameType | None) -> None:
    _received.add(number)
