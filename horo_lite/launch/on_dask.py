"""Ranks on a Dask cluster: one task per rank, on a thread of a worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from urllib.parse import urlsplit

from distributed import Future, TimeoutError, default_client, get_worker, wait

from horo_lite.errors import LauncherError
from horo_lite.launch.tasks import RankEnd, RankTask, address_of, ends_of, free_port


def run_tasks(task: RankTask) -> list[RankEnd]:
    """Run every rank's task on the cluster of this process's Client.

    Raises:
        ValueError: There is no Client.
        LauncherError: The workers do not have enough threads.
    """
    client = default_client()
    workers = client.scheduler_info(n_workers=-1)["workers"]
    # One thread of each worker first, then second threads: a worker's memory is limited.
    threads = [[address] * worker["nthreads"] for address, worker in workers.items()]
    free = [worker for turn in zip_longest(*threads) for worker in turn if worker is not None]
    if len(free) < task.size:
        raise LauncherError(
            f"{task.size} ranks on Dask need one thread of a worker each, but the {len(workers)} "
            f"workers have {len(free)}: start fewer ranks, or more workers"
        )
    chosen = sorted(free[: task.size], key=_host)  # ranks of one host are consecutive
    port = client.submit(free_port, workers=chosen[:1], pure=False).result()
    address = address_of(_host(chosen[0]), port)
    futures = [
        client.submit(_run, task, rank, address, workers=[worker], pure=False, retries=0)
        for rank, worker in enumerate(chosen)
    ]
    try:
        return ends_of(futures, _first_done, Future.result)
    finally:
        client.cancel(futures)


def _first_done(futures: Sequence[Future], timeout_s: float | None) -> Collection[Future]:
    try:
        done: Collection[Future] = wait(futures, timeout_s, "FIRST_COMPLETED").done
    except TimeoutError:
        return ()
    return done


def _host(worker: str) -> str:
    return urlsplit(worker).hostname or ""


def _run(task: RankTask, rank: int, address: str) -> RankEnd:
    worker = get_worker()
    key = worker.get_current_task()

    def is_cancelled() -> bool:
        state = worker.state.tasks.get(key)
        return state is None or state.state == "cancelled"

    return task.run(rank, address, is_cancelled)
