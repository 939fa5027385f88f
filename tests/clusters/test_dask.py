"""Dask: `hvd.run(on="dask")` on workers that are processes of this machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_checks import check_jobs
from distributed import Client, LocalCluster

import horo_lite as hvd


@pytest.fixture(autouse=True)
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_run() -> None:
    check_jobs("dask")


def test_a_cluster_that_is_too_small() -> None:
    with pytest.raises(hvd.LauncherError, match=r"5 ranks on Dask .* the 2 workers have 4"):
        hvd.run(int, np=5, on="dask")


def test_a_cancelled_job_leaves_no_rank(client: Client, tmp_path: Path) -> None:
    """As by Ctrl-C, which interrupts the wait for the results."""

    def wait() -> None:
        (tmp_path / f"{os.getpid()}").touch()
        time.sleep(600)

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        client.cancel(futures)

    futures: list[object] = []
    submit = client.submit

    def submitted(*args: object, **options: object) -> object:
        futures.append(submit(*args, **options))
        return futures[-1]

    client.submit = submitted
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(BaseException):  # noqa: B017, PT011 (CancelledError, which each version has elsewhere)
        hvd.run(wait, np=2, on="dask")
    thread.join()
    until = time.monotonic() + 60
    while any(Path("/proc", file.name).exists() for file in tmp_path.iterdir()):
        assert time.monotonic() < until, "ranks still run"
        time.sleep(0.1)
