"""Ranks on Spark: the tasks of a barrier stage, which Spark starts all at once or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Any

from pyspark import BarrierTaskContext
from pyspark.sql import SparkSession

from horo_lite.launch.tasks import RankEnd, RankTask, address_of, free_port, ranks_by_host

_RUNS, _ENDED, _FAILED = "runs", "ended", "failed"
# How long a task waits until it exchanges its rank's state with the others again: a tenth longer
# each time, since mainly ranks that are starting cannot detect a failure by themselves.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


def run_tasks(task: RankTask) -> list[RankEnd]:
    """Run every rank's task in a barrier stage of the active session, or of a new one.

    Raises:
        Py4JJavaError: Spark does not have enough slots, or an executor was lost.
    """

    def run(_: Iterator[Any]) -> Iterator[RankEnd]:
        context = BarrierTaskContext.get()
        hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
        ports = context.allGather(str(free_port()))
        ranks = ranks_by_host(hosts)
        zero = ranks.index(0)
        address = address_of(hosts[zero], int(ports[zero]))
        failed = Event()
        with ThreadPoolExecutor(1) as pool:
            rank = ranks[context.partitionId()]
            end = pool.submit(task.run, rank, address, failed.is_set)
            try:
                _until_one_fails(context, end)
            finally:
                failed.set()
        yield end.result()

    context = SparkSession.builder.getOrCreate().sparkContext
    tasks = context.parallelize(range(task.size), task.size).barrier()
    ends: list[RankEnd] = tasks.mapPartitions(run).collect()
    return ends


def _until_one_fails(context: Any, end: Future[RankEnd]) -> None:
    """Wait until a rank has failed or all have ended; every task calls it.

    Tasks of a barrier stage can communicate only in collective calls, and the driver receives
    results only when all tasks have ended.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        wait([end], timeout=pause_s)
        state = _RUNS
        if end.done():
            state = _FAILED if end.exception() is not None or end.result().code else _ENDED
        states = context.allGather(state)
        if _FAILED in states or _RUNS not in states:
            return
        pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
