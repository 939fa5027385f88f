"""Ranks on a Ray cluster: actors, whose resources are reserved for all at once.

`hvd.run(on="ray")` has each actor start a rank as a process of its own. Horovod's RayExecutor has
them execute functions themselves, so that ranks keep their state between functions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horo_lite import context
from horo_lite.errors import LauncherError, PeerLostError, in_one_line
from horo_lite.launch.tasks import (
    RankEnd,
    RankTask,
    address_of,
    ends_of,
    free_port,
    ranks_by_host,
)
from horo_lite.settings import Settings
from horo_lite.start import rendezvous, session
from horo_lite.start.rendezvous_spec import RendezvousSpec, rendezvous_spec

_GONE_S = 10.0  # how long a call may take to end after its actor was killed
_CAUSE_S = 10.0  # how long to wait for the error that caused the others


def run_tasks(task: RankTask) -> list[RankEnd]:
    """Run every rank's task on the cluster that this process is connected to.

    If there is no connection, it connects to the cluster in RAY_ADDRESS, or starts one.

    Raises:
        LauncherError: The cluster does not have enough free CPUs.
        ray.exceptions.RayError: A worker was lost, or cannot import horo_lite.
    """
    timeout_s = Settings.read({}, os.environ).start_timeout_s
    workers = Workers(task.size, {"CPU": 1}, timeout_s=timeout_s, limit="HORO_LITE_START_TIMEOUT_S")
    running: list[Any] = []
    try:
        for rank, actor in enumerate(workers.actors):
            running.append(actor.call.remote(task.run, rank, workers.address))
        return ends_of(running, _first_done, ray.get)
    finally:
        workers.kill()
        for reference in running:  # otherwise Ray prints the errors of calls that nothing has read
            with suppress(ray.exceptions.RayError):
                ray.get(reference, timeout=_GONE_S)


def _first_done(references: Sequence[Any], timeout_s: float | None) -> Collection[Any]:
    done: list[Any] = ray.wait(list(references), num_returns=1, timeout=timeout_s)[0]
    return done


class Workers:
    """Actors, one for each rank; those of a node have consecutive ranks.

    Args:
        n: The number of ranks.
        needs: The resources that each of them reserves, by Ray's names: "CPU", "GPU".
        timeout_s: Seconds within which Ray must have reserved all of them.
        limit: What sets `timeout_s`, for the error message.
        n_hosts: The number of nodes, with as many ranks on each; by default as few as possible.
        inherits: Whether the actors run in the placement group of the task or actor that creates
            them, if it has one.

    Raises:
        LauncherError: The cluster does not have enough free resources.
    """

    def __init__(
        self,
        n: int,
        needs: Mapping[str, float],
        *,
        timeout_s: float,
        limit: str,
        n_hosts: int | None = None,
        inherits: bool = False,
    ) -> None:
        if not ray.is_initialized():
            ray.init()
        self._needs = needs
        self._reserved: Any = None  # the placement group, if it is not an inherited one
        self.actors: list[Any] = []
        """In rank order."""
        self._n_calls = 0
        self._went_well = True  # the previous call, as far as is known
        try:
            actors = self._start(n, timeout_s, limit, n_hosts, inherits)
            where = ray.get([actor.call.remote(here) for actor in actors])
        except BaseException:
            self.kill()
            raise
        nodes = [node for node, *_ in where]
        ranks = ranks_by_host(nodes)
        order = sorted(range(n), key=ranks.__getitem__)
        self.actors = [actors[i] for i in order]
        self._nodes = [nodes[i] for i in order]
        node, port, _ = where[order[0]]
        self.address = address_of(node, port)
        """An address for the rendezvous, on the node of rank 0."""
        self._gpus: dict[str, list[str]] = {node: [] for node in nodes}
        for i in order:
            self._gpus[nodes[i]] += [gpu for gpu in where[i][2] if gpu not in self._gpus[nodes[i]]]

    def _start(
        self, n: int, timeout_s: float, limit: str, n_hosts: int | None, inherits: bool
    ) -> list[Any]:
        group = get_current_placement_group() if inherits else None
        bundles = [-1] * n  # any bundle of it that has room
        if group is None:
            shares, strategy = (n, "PACK") if n_hosts is None else (n_hosts, "STRICT_SPREAD")
            bundles = [rank // (n // shares) for rank in range(n)]
            share = {kind: amount * (n // shares) for kind, amount in self._needs.items()}
            group = self._reserved = placement_group([share] * shares, strategy=strategy)
            if not group.wait(timeout_s):
                raise LauncherError(self._too_few(n, timeout_s, limit, n_hosts))
        for bundle in bundles:
            actor = ray.remote(_Worker).options(
                num_cpus=self._needs["CPU"],
                num_gpus=self._needs.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            )
            self.actors.append(actor.remote())
        return self.actors

    def _too_few(self, n: int, timeout_s: float, limit: str, n_hosts: int | None) -> str:
        on = "" if n_hosts is None else f" on {n_hosts} nodes"
        each = ", ".join(f"{kind} {amount:g}" for kind, amount in self._needs.items())
        free, total = ray.available_resources(), ray.cluster_resources()
        has = "; ".join(
            f"{kind} free: {free.get(kind, 0):g}, total: {total.get(kind, 0):g}"
            for kind in self._needs
        )
        return (
            f"{n} ranks on Ray{on} need {each} each, but the cluster did not have them within "
            f"{timeout_s:.0f} s ({has}): start fewer ranks, add nodes, or wait longer ({limit})"
        )

    def kill(self) -> None:
        """Kill the actors, whatever they are doing, and give back what was reserved."""
        actors, self.actors = self.actors, []
        for actor in actors:
            ray.kill(actor)
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            remove_placement_group(reserved)

    def become_ranks(self, env: Mapping[str, str]) -> None:
        """Make the actors ranks of one job, with these variables and this process's modules."""
        path = [os.path.abspath(entry) for entry in sys.path]
        started = []
        for rank, (actor, node) in enumerate(zip(self.actors, self._nodes, strict=True)):
            own = {**env, "HORO_LITE_RANK": str(rank)}
            if "GPU" in self._needs:
                # Ray makes only a worker's own GPUs visible to it, so that
                # `torch.cuda.set_device(hvd.local_rank())`, which scripts use, would fail.
                own["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus[node])
            started.append(actor.call.remote(_become, own, path))
        ray.get(started)

    def make(self, make: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        """Create the object that `submit` passes to functions, on every rank."""
        ray.get([actor.make.remote(make, args, kwargs) for actor in self.actors])

    def submit(self, fn: Callable[[Any], Any], only_first: bool = False) -> list[Any]:
        """Begin to call a function on every rank, or only on rank 0, after all previous ones.

        Returns:
            Ray's references to the results, in rank order.
        """
        if not self._went_well:
            # A rank may have returned from the function before another one raised.
            ray.get([actor.call.remote(int) for actor in self.actors])  # all have ended
            ray.get([actor.call.remote(_leave_lost_world) for actor in self.actors])
        self._went_well = False
        self._n_calls += 1
        sent = ray.put(fn)
        actors = self.actors[:1] if only_first else self.actors
        return [actor.execute.remote(sent, self._n_calls) for actor in actors]

    def results(self, references: Sequence[Any]) -> list[Any]:
        """Return the ranks' results; if ranks failed, raise the error that caused the others."""
        try:
            results: list[Any] = ray.get(list(references))
        except PeerLostError:
            for reference in references:  # the error of the rank that the others waited for
                try:
                    ray.get(reference, timeout=_CAUSE_S)
                except (PeerLostError, ray.exceptions.GetTimeoutError):
                    continue
            raise
        self._went_well = True
        return results


# --- in the actors --------------------------------------------------------------------------------


class _Worker:
    """The actor."""

    def __init__(self) -> None:
        self._made: Any = None

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function."""
        return fn(*args)

    def make(self, make: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        """Create the object that is passed to functions."""
        self._made = make(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any], number: int) -> Any:
        """Call the function with that number, as all ranks do."""
        # So that the rendezvous does not find ranks of an earlier, failed call. Torch's variable.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        try:
            return fn(self._made)
        except BaseException as error:
            reason = f"it raised {in_one_line(error)}"
            _leave_world(reason)
            with suppress(Exception):  # the function may have changed the environment
                rendezvous.report_failure(_rendezvous(), reason)
            raise


def here() -> tuple[str, int, list[str]]:
    """Return the address of this actor's node, a free port there, and the actor's GPUs."""
    return get_node_ip_address(), free_port(), [str(gpu) for gpu in ray.get_gpu_ids()]


def _become(env: dict[str, str], path: list[str]) -> None:
    """Make this process a rank, as the variables say, with access to the caller's modules."""
    os.environ.update(env)
    sys.path += [entry for entry in path if entry not in sys.path]
    spec = _rendezvous()
    if spec.rank == 0 and spec.size > 1:
        # Before any function runs, so that ranks that fail before init() can report it.
        with suppress(ImportError, RuntimeError):  # init() will raise it, if it is called
            rendezvous.keep_store(spec)


def _rendezvous() -> RendezvousSpec:
    """Return where this rank finds the others, from the environment that `_become` has set."""
    spec = rendezvous_spec(Settings.read({}, os.environ), os.environ)
    assert spec is not None
    return spec


def _leave_lost_world() -> None:
    """Leave the world if another rank has left it: the next `init()` then makes a new one."""
    if context.is_initialized():
        try:
            context.world().group.transport.members.check_peers("the next function")
        except PeerLostError:
            _leave_world("another rank failed")


def _leave_world(reason: str) -> None:
    """Make ranks that wait for this one raise PeerLostError; `init()` then makes a new world."""
    if context.is_initialized():
        context.world().group.abandon(reason)
        with suppress(Exception):  # operations in flight have failed
            session.shutdown()
