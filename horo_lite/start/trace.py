"""Public functions of the timeline, and of the record of a training without horo_lite."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from horo_lite import context
from horo_lite.adapters import adapter_of
from horo_lite.recording import timeline
from horo_lite.settings import is_replacement
from horo_lite.start.rendezvous_spec import expected_place
from horo_lite.training import step_record


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write this rank's collective operations to a file, from now until `stop_timeline()`.

    All ranks that call it share the file, to which each writes its operations when its timeline
    ends; with "{rank}" in the path, every rank has its own. An existing file is overwritten; it is
    readable by its owner only. The last 65,536 operations of each rank are kept in a file beside
    it: after a job that was killed, `horo-lite trace FILE` makes the trace from these.
    `HORO_LITE_TIMELINE=path` starts a timeline on every rank in `init()`.

    Args:
        file_path: The path of the file: for ranks on several hosts, in a folder that they share, or
            otherwise in one folder per host.
        mark_cycles: Horovod's argument, which has no effect here.

    Raises:
        ValueError: A timeline is already being written: call `stop_timeline()` first.
        NotInitializedError: `init()` has not been called.
        OSError: The file cannot be written.
    """
    # A replacement for a lost rank takes part in the job's trace as soon as it has joined.
    timeline.start(file_path, context.world().rank, paused=is_replacement())


def stop_timeline() -> None:
    """Complete this rank's part of the file. Does nothing if no timeline is being written.

    Raises:
        OSError: The file cannot be written. The operations are kept beside it, and `horo-lite
            trace` adds them.
    """
    timeline.stop()


def record_step(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    *,
    name: str = "gradients of optimizer 1",
) -> None:
    """Record a step of a script that does not train with horo_lite, for `horo-lite compare`.

    A `DistributedOptimizer` records its steps itself. Where gradients are averaged by another
    library, or on one process by none, call this when they are complete and before anything
    changes them: after `backward()` (Horovod: after `synchronize()`), before clipping and `step()`.
    It needs no `init()`. Without HORO_LITE_RECORD_STEPS, and on other ranks than 0, it has no
    effect.

    Args:
        optimizer: The optimizer, or the model, that has the parameters.
        named_parameters: Pairs (name, parameter), as from `model.named_parameters()`; by default
            those of `optimizer`, with names that depend on the framework.
        name: The optimizer, if there are several. By default the first one to step.

    Raises:
        ValueError: `optimizer` shows no parameters.
        TypeError: None of its parameters shows a (dense) gradient.
    """
    if not step_record.is_on():
        return
    if context.is_initialized():
        rank, size = context.rank(), context.size()
    else:
        rank, size = expected_place(os.environ)
    if rank != 0:
        return
    found = list(named_parameters or adapter_of(optimizer).parameters(optimizer))
    if not found:
        raise ValueError(
            f"{type(optimizer).__name__} shows no parameters: pass named_parameters=, pairs of a "
            "name and a parameter with a .grad"
        )
    adapter = adapter_of(found[0][1])
    adapter.compute([parameter for _, parameter in found])
    gradients, values = [], []
    problem: TypeError | None = None
    for label, parameter in found:
        try:
            gradients.append((label, adapter.gradient(parameter)))
        except TypeError as error:  # such as of a sparse one
            problem = error
        with suppress(TypeError, AttributeError):  # objects that have a gradient only
            values.append((label, adapter.value(parameter)))
    if problem is not None and not gradients:
        raise problem
    step_record.record(name, gradients, values, size=size)
