"""Functions that torch.compile does not compile, but calls between two graphs."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_dynamo: Any = torch._C._dynamo.eval_frame
_can_skip = hasattr(_dynamo, "_FrameExecStrategy")  # missing in older versions


def uncompiled(function: F) -> F:
    """Mark a function so that dynamo neither traces nor compiles it.

    Like torch.compiler.disable(), but without importing dynamo (1 to 2 s) and an additional call.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    if _can_skip:
        skip = _dynamo._FrameAction.SKIP
        both = _dynamo._FrameExecStrategy(skip, skip)  # this function, and what it calls
        # All functions with a decorator such as contextmanager share its code, PyTorch's own, too.
        while marked.__globals__["__name__"].partition(".")[0] != __name__.partition(".")[0]:
            marked = marked.__wrapped__
        _dynamo.set_code_exec_strategy(marked.__code__, both)
    return function


def all_uncompiled(kind: C) -> C:
    """Mark the methods of a class as `uncompiled`."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            uncompiled(method)
    return kind
