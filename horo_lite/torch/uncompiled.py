"""Functions that torch.compile calls as they are, between two graphs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_dynamo: Any = torch._C._dynamo.eval_frame
_can_skip = hasattr(_dynamo, "_FrameExecStrategy")  # older ones have not


def uncompiled(function: F) -> F:
    """Mark a function, which dynamo is to neither trace nor compile when it runs.

    As torch.compiler.disable() does, which imports dynamo (1 to 2 s) and adds a call.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    if _can_skip:
        skip = _dynamo._FrameAction.SKIP
        both = _dynamo._FrameExecStrategy(skip, skip)  # this function, and what it calls
        _dynamo.set_code_exec_strategy(marked.__code__, both)
    return function


def all_uncompiled(kind: C) -> C:
    """Mark the methods of a class."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            uncompiled(method)
    return kind
