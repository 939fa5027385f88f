"""The clusters that `run` knows, each imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from horo_lite.launch.tasks import RankEnd, RankTask

Cluster = Callable[[RankTask], list[RankEnd]]
"""Runs the tasks of all ranks at once, and returns their ends in any order.

Where a rank has failed, the others are ended, and may be missing from what is returned.
"""


def cluster(name: str) -> Cluster:
    """Return what runs tasks on "ray", "dask" or "spark".

    Raises:
        ValueError: It is none of these.
        ImportError: It is not installed.
    """
    if name == "ray":
        from horo_lite.launch import on_ray

        return on_ray.run_tasks
    if name == "dask":
        from horo_lite.launch import on_dask

        return on_dask.run_tasks
    if name == "spark":
        from horo_lite.launch import on_spark

        return on_spark.run_tasks
    raise ValueError(f"on is 'ray', 'dask' or 'spark', or None for mpiexec, not {name!r}")
