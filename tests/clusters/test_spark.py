"""Spark: `hvd.run(on="spark")` in a barrier stage, on two workers of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from cluster_checks import check_jobs
from pyspark.sql import SparkSession


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local-cluster[2,2,1024]")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


def test_run() -> None:
    check_jobs("spark")
