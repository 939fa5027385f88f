"""Horovod's `hvd.elastic` for PyTorch: see horo_lite.elastic, and docs/elastic.md."""

from __future__ import annotations

from typing import Any

from horo_lite.elastic import HostsUpdatedInterrupt, ObjectState, Sampler, State, run

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]

ElasticSampler = Sampler


class TorchState(State):
    """A `State` of a model, an optimizer and whatever else is named."""

    def __init__(self, model: Any = None, optimizer: Any = None, **things: Any) -> None:
        own = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: v for name, v in own.items() if v is not None}, **things)
