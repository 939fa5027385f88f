"""Horovod's `hvd.elastic` for PyTorch, with all of horo_lite.elastic: see docs/elastic.md."""

from __future__ import annotations

from typing import Any

# ruff: noqa: F403, F405
from horo_lite.elastic import *


class ElasticSampler(Sampler):
    """A `horo_lite.elastic.Sampler` with Horovod's arguments.

    Args:
        dataset: Anything with a length: the same on every rank.
        shuffle: Whether every epoch has its own random order, generated from `seed`.
        seed: The seed of the order; the same on all ranks.
    """

    def __init__(self, dataset: object, shuffle: bool = True, seed: int = 0) -> None:
        super().__init__(dataset, shuffle, seed)


class TorchState(State):
    """A `State` of a model, an optimizer and any other named objects."""

    def __init__(self, model: Any = None, optimizer: Any = None, **things: Any) -> None:
        own = {"model": model, "optimizer": optimizer}
        super().__init__(**{name: v for name, v in own.items() if v is not None}, **things)
