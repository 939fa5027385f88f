"""Horovod's `hvd.elastic` for TensorFlow, with all of horo_lite.elastic: see docs/elastic.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

# ruff: noqa: F403, F405
from horo_lite.elastic import *


class TensorFlowState(State):
    """A `State` of tf.Variables and any other objects.

    Args:
        variables: The variables, such as `model.weights`; TensorFlow 2 has no collection of all.
        session: TensorFlow 1's argument, which has no effect here.
        **things: Other objects that belong to the state: see `horo_lite.elastic.State`.
    """

    def __init__(self, variables: Sequence[Any], session: Any = None, **things: Any) -> None:
        super().__init__(variables=list(variables), **things)


def __getattr__(name: str) -> Any:
    if name == "TensorFlowKerasState":  # needs Keras
        return import_module("horo_lite.keras.elastic").TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
