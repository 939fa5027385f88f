"""Calls of the autograd engine: notification when the outermost backward() ends, or fails."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from horo_lite.errors import HoroLiteError, MismatchError, NonFiniteError
from horo_lite.torch.uncompiled import all_uncompiled

if TYPE_CHECKING:
    from horo_lite.torch.exchange import GradientExchange

graph_task = torch._C._current_graph_task_id
_evaluating: Callable[[], Any] = torch._C._current_autograd_node  # None between nodes

_passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


def notify_at_end(task: int, exchange: GradientExchange) -> None:
    """Call `exchange.end_pass()` or `break_pass()` when the graph task ends."""
    known = _passes.get(task)
    if known is None:
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "in_compiled_autograd_region", False):
            raise RuntimeError(
                "gradients cannot be exchanged in a backward() that compiled autograd executes, "
                "since it does not report its end: turn torch._dynamo.config.compiled_autograd off"
            )
        known = _passes[task] = Pass(task)
        torch.autograd.Variable._execution_engine.queue_callback(known)
    known.exchanges.append(exchange)


@all_uncompiled
class Pass:
    """The callback at the end of one graph task, which is a call of the autograd engine.

    The engine calls it, or drops it if the task ended with an error.
    """

    def __init__(self, task: int) -> None:
        self.task = task
        self.exchanges: list[GradientExchange] = []
        self.is_over = False

    def __call__(self) -> None:
        self.is_over = True
        node = _evaluating()
        if node is not None:  # this task is a backward() inside another one
            for exchange in self.exchanges:
                exchange.is_nested = True
            _hand_over(node, self.exchanges)
            return
        # In order of creation: the order of their hooks may differ between ranks.
        waiting = sorted(self.exchanges, key=lambda exchange: exchange.number)
        errors: list[HoroLiteError] = []
        try:
            while waiting:
                try:
                    waiting.pop(0).end_pass()
                except (MismatchError, NonFiniteError) as error:  # on all ranks: continue
                    errors.append(error)
        finally:
            for exchange in waiting:
                exchange.break_pass(self.task)
        if errors:
            raise errors[0]

    def __del__(self) -> None:
        if not self.is_over:
            for exchange in self.exchanges:
                exchange.break_pass(self.task)


def _hand_over(node: Any, exchanges: list[GradientExchange]) -> None:
    """Notify the exchanges at the end of the task that `node` belongs to instead.

    That task is evaluating `node`, and will evaluate its successors; a leaf has none, but a hook of
    its tensor comes before those of the node.
    """
    handles: list[Any] = []

    def before(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        handles.clear()
        task = graph_task()
        for exchange in exchanges:
            exchange.enter(task)

    for successor, _ in node.next_functions:
        if successor is not None:
            handles.append(successor.register_prehook(before))
    if not handles:
        handles.append(node.register_hook(before))
