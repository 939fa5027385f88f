"""The clusters that `run` supports, each imported when it is used."""

from __future__ import annotations

from collections.abc import Callable

from horo_lite.launch.tasks import RankEnd, RankTask

Cluster = Callable[[RankTask], list[RankEnd]]
"""Runs the tasks of all ranks at once, and returns how they ended, in any order.

If a rank fails, the others are terminated, and may be missing from the result.
"""


def cluster(name: str) -> Cluster:
    """Return the function that runs tasks on "ray", "dask" or "spark".

    Raises:
        ValueError: The name is none of these.
        ImportError: The package is not installed.
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
    raise ValueError(f"on must be 'ray', 'dask' or 'spark', or None for mpiexec, not {name!r}")
