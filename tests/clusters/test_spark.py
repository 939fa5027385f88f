"""Spark: `hvd.run(on="spark")` in a barrier stage, on two workers of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from cluster_checks import check_jobs, check_script
from pyspark.sql import SparkSession


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkSession]:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local-cluster[2,2,1024]")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


@pytest.mark.usefixtures("session")
def test_run() -> None:
    check_jobs("spark")


def test_a_script_for_horovod_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    check_script("spark_digits.py", "--num-proc")


@pytest.mark.usefixtures("session")
def test_by_horovods_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import horo_lite.horovod

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    horo_lite.horovod.install(replace=True)
    import horovod.spark
    import horovod.torch as horovod_torch
    import torch

    def train(scale: float, *, plus: float) -> tuple[int, int, float]:
        horovod_torch.init()
        x = torch.full((2,), scale * (horovod_torch.rank() + 1))
        total = horovod_torch.allreduce(x, op=horovod_torch.Sum, name="x")[0].item() + plus
        return horovod_torch.rank(), horovod_torch.size(), total

    env = {"HORO_LITE_DEVICE": "cpu"}
    found = horovod.spark.run(train, (0.5,), {"plus": 1}, num_proc=3, start_timeout=90, env=env)
    assert found == [(rank, 3, 4.0) for rank in range(3)]
    found = horovod.spark.run(train, (0.5,), {"plus": 1}, env=env)  # spark.default.parallelism
    assert found == [(rank, 4, 6.0) for rank in range(4)]

    def fail() -> None:
        horovod_torch.init()
        if horovod_torch.rank() == 1:
            raise ValueError("share 1 is missing")
        horovod_torch.barrier()

    with pytest.raises(ValueError, match="share 1 is missing"):
        horovod.spark.run(fail, num_proc=2, env=env)
