"""Training that outlives its ranks: state that can move, and `run`, which goes on with the rest."""

from __future__ import annotations

from horo_lite.elastic.recovery import HostsUpdatedInterrupt, run
from horo_lite.elastic.sampler import Sampler
from horo_lite.elastic.state import ArrayState, ObjectState, State

__all__ = ["ArrayState", "HostsUpdatedInterrupt", "ObjectState", "Sampler", "State", "run"]
