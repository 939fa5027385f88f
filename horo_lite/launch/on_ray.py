"""Ranks on a Ray cluster: one task per rank, on CPUs that are reserved for all at once."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horo_lite.errors import LauncherError
from horo_lite.launch.tasks import (
    RankEnd,
    RankTask,
    address_of,
    ends_of,
    free_port,
    ranks_by_host,
)
from horo_lite.settings import Settings

_GONE_S = 10.0  # how long a task may take to end after its resources were removed


def run_tasks(task: RankTask) -> list[RankEnd]:
    """Run every rank's task on the cluster that this process is connected to.

    If there is no connection, it connects to the cluster in RAY_ADDRESS, or starts one.

    Raises:
        LauncherError: The cluster does not have enough free CPUs.
        ray.exceptions.RayError: A worker was lost, or cannot import horo_lite.
    """
    if not ray.is_initialized():
        ray.init()
    timeout_s = Settings.read({}, os.environ).start_timeout_s
    reserved = reserve(
        [{"CPU": 1}] * task.size,
        "PACK",
        timeout_s,
        f"{task.size} ranks on Ray need one CPU each",
        "HORO_LITE_START_TIMEOUT_S",
    )
    running: list[Any] = []
    try:
        places = [
            PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=bundle)
            for bundle in range(task.size)
        ]
        host = ray.remote(num_cpus=1, max_retries=0)(get_node_ip_address)
        port = ray.remote(num_cpus=1, max_retries=0)(free_port)
        rank = ray.remote(num_cpus=1, max_retries=0)(RankTask.run)
        hosts = ray.get([host.options(scheduling_strategy=place).remote() for place in places])
        ranks = ranks_by_host(hosts)
        zero = ranks.index(0)
        first_port = ray.get(port.options(scheduling_strategy=places[zero]).remote())
        address = address_of(hosts[zero], first_port)
        running = [
            rank.options(scheduling_strategy=place).remote(task, number, address)
            for place, number in zip(places, ranks, strict=True)
        ]
        return ends_of(running, _first_done, ray.get)
    finally:
        remove_placement_group(reserved)  # which also ends everything that runs in it
        for reference in running:  # otherwise Ray prints the errors of tasks that nothing has read
            with suppress(ray.exceptions.RayError):
                ray.get(reference, timeout=_GONE_S)


def _first_done(references: Sequence[Any], timeout_s: float | None) -> Collection[Any]:
    done: list[Any] = ray.wait(list(references), num_returns=1, timeout=timeout_s)[0]
    return done


def reserve(
    bundles: Sequence[Mapping[str, float]],
    strategy: str,
    timeout_s: float,
    needs: str,
    limit: str,
) -> Any:
    """Reserve resources of the cluster, all bundles or none, and return the placement group.

    Args:
        bundles: The resources of each bundle; a bundle is on one node.
        strategy: How Ray distributes the bundles: "PACK", "STRICT_SPREAD" and so on.
        timeout_s: How many seconds it may take.
        needs: What needs the resources, for the error message.
        limit: What sets `timeout_s`, for the error message.

    Raises:
        LauncherError: The cluster does not have enough free resources.
    """
    reserved = placement_group([dict(bundle) for bundle in bundles], strategy=strategy)
    if reserved.wait(timeout_s):
        return reserved
    remove_placement_group(reserved)
    free, total = ray.available_resources(), ray.cluster_resources()
    kinds = sorted({kind for bundle in bundles for kind in bundle})
    has = "; ".join(
        f"{kind} free: {free.get(kind, 0):g}, total: {total.get(kind, 0):g}" for kind in kinds
    )
    raise LauncherError(
        f"{needs}, but the cluster did not have them within {timeout_s:.0f} s ({has}): start "
        f"fewer ranks, add nodes, or wait longer ({limit})"
    )
