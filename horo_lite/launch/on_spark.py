"""Ranks on Spark: the tasks of a barrier stage, which Spark starts all at once or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

from horo_lite.launch.tasks import RankEnd, RankTask, address_of, free_port, ranks_by_host


def run_tasks(task: RankTask) -> list[RankEnd]:
    """Run every rank's task in a barrier stage of the active session, or of one of its own.

    Raises:
        Py4JJavaError: Spark has not enough slots, or an executor was lost.
    """

    def run(_: Iterator[Any]) -> Iterator[RankEnd]:
        context = BarrierTaskContext.get()
        hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
        ports = context.allGather(str(free_port()))
        ranks = ranks_by_host(hosts)
        zero = ranks.index(0)
        address = address_of(hosts[zero], int(ports[zero]))
        yield task.run(ranks[context.partitionId()], address)

    context = SparkSession.builder.getOrCreate().sparkContext
    tasks = context.parallelize(range(task.size), task.size).barrier()
    ends: list[RankEnd] = tasks.mapPartitions(run).collect()
    return ends
