"""Training that survives the loss of ranks: movable state, and `run`, which continues training."""

from __future__ import annotations

from horo_lite.elastic.preemption import Preemption
from horo_lite.elastic.recovery import HostsUpdatedInterrupt, run
from horo_lite.elastic.sampler import Sampler
from horo_lite.elastic.state import ArrayState, ObjectState, State

__all__ = [
    "ArrayState",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "Preemption",
    "Sampler",
    "State",
    "run",
]
