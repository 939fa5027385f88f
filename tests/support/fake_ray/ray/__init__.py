"""The part of Ray that horo_lite.launch.on_ray uses: processes as actors, simulated resources.

Four CPUs and two GPUs on each of two simulated nodes. Only names and semantics are Ray's; the real
Ray is used in tests/clusters.
"""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle

from ray import util as util

NODE = {"CPU": 4.0, "GPU": 2.0}
N_NODES = 2
# Actors are forks of a process that has imported PyTorch, and nothing else of the driver.
_fork = multiprocessing.get_context("forkserver")
_fork.set_forkserver_preload(["torch"])
_is_connected = False
node, gpu_ids = "", []  # of the actor that this process is
started: list[Any] = []  # all processes that were started


def init() -> None:
    global _is_connected
    _is_connected = True


def is_initialized() -> bool:
    return _is_connected


def cluster_resources() -> dict[str, float]:
    return {kind: n * N_NODES for kind, n in NODE.items()}


available_resources = cluster_resources


def get_gpu_ids() -> list[int]:
    return gpu_ids


class Reference:
    def __init__(self, future: Future[bytes]) -> None:
        self.future = future


def put(value: Any) -> Reference:
    future: Future[bytes] = Future()
    future.set_result(cloudpickle.dumps((True, value)))
    return Reference(future)


class exceptions:  # noqa: N801 (a module of Ray's)
    class RayError(Exception):
        pass

    class GetTimeoutError(RayError):
        pass


def wait(
    references: list[Reference], num_returns: int, timeout: float | None
) -> tuple[list[Reference], list[Reference]]:
    assert num_returns == 1
    from concurrent.futures import FIRST_COMPLETED, wait

    done = wait([one.future for one in references], timeout, FIRST_COMPLETED).done
    return (
        [one for one in references if one.future in done],
        [one for one in references if one.future not in done],
    )


def get(references: Any, timeout: float | None = None) -> Any:
    if isinstance(references, list):
        # As in Ray: the first failure is raised, while others may still be waiting.
        from concurrent.futures import FIRST_COMPLETED, wait

        waiting = {reference.future for reference in references}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                _value(future)
        return [_value(reference.future) for reference in references]
    try:
        references.future.exception(timeout)
    except TimeoutError as error:
        raise exceptions.GetTimeoutError from error
    return _value(references.future)


def _value(future: Future[bytes]) -> Any:
    is_well, value = cloudpickle.loads(future.result())
    if not is_well:
        raise value
    return value


def remote(cls: type) -> Any:
    return _ActorClass(cls, {})


def kill(actor: _Actor) -> None:
    actor.process.kill()
    actor.process.join()


class _ActorClass:
    def __init__(self, cls: type, options: dict[str, Any]) -> None:
        self._cls, self._options = cls, options

    def options(self, **options: Any) -> _ActorClass:
        return _ActorClass(self._cls, options)

    def remote(self) -> _Actor:
        return _Actor(self._cls, self._options)


class _Actor:
    def __init__(self, cls: type, options: dict[str, Any]) -> None:
        strategy = options["scheduling_strategy"]
        where, gpus = strategy.group.place(
            strategy.bundle, {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
        )
        self._pipe, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(theirs, where, gpus), daemon=True)
        self.process.start()
        theirs.close()
        started.append(self.process)
        self._thread = ThreadPoolExecutor(1)  # calls of an actor run one after the other
        self._call("", (cls,))

    def __getattr__(self, name: str) -> Any:
        return _Method(lambda *args: Reference(self._call(name, args)))

    def _call(self, name: str, args: tuple[Any, ...]) -> Future[bytes]:
        def call() -> bytes:
            values = tuple(get(x) if isinstance(x, Reference) else x for x in args)
            self._pipe.send_bytes(cloudpickle.dumps((name, values)))
            return self._pipe.recv_bytes()

        return self._thread.submit(call)


class _Method:
    def __init__(self, call: Callable[..., Reference]) -> None:
        self.remote = call


def _serve(pipe: Any, where: str, gpus: list[int]) -> None:
    """Run an actor, in a process that has started with nothing."""
    global node, gpu_ids
    node, gpu_ids = where, gpus
    actor = None
    while True:
        try:
            data = pipe.recv_bytes()
        except EOFError:  # the program that made the actor has ended
            return
        try:
            name, args = cloudpickle.loads(data)
            if name:
                result = getattr(actor, name)(*args)
            else:
                actor, result = args[0](), None
            answer = cloudpickle.dumps((True, result))
        except BaseException as error:
            traceback.print_exc()
            answer = cloudpickle.dumps((False, error))
        pipe.send_bytes(answer)


HERE = str(Path(__file__).parents[1])
assert HERE in sys.path, "the processes of actors find this by PYTHONPATH"
